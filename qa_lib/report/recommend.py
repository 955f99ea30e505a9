"""What to run on a card, as `recommended` chooses (run/recommend.py), and how long a full training takes by the
records."""

import dataclasses
import os

import pandas as pd

from qa_lib.report import load
from qa_lib.report.format import number, say
from qa_lib.spec import resolve
from qa_lib.variants import VARIANTS, tagged

PROJECTED = 32  # micro-batch


def cards_table() -> pd.DataFrame:
    """As text, what `recommended` takes for BERT-base on SQuAD v2 on each card that README.md names, with everything
    installed. Imports torch, which predicts the memory."""
    from qa_lib.run.memory_estimate import gpu_of
    from qa_lib.run.recommend import choose

    data, model = {"name": "squad_v2", "sha256": ""}, {"name": "bert-base-uncased", "revision": ""}
    lines = []
    for card, sm, gib in load.CARDS.dropna(subset="card")[["card", "sm", "gib"]].itertuples(index=False):
        machine = dataclasses.replace(gpu_of(sm), hardware=card, free_mib=round(1024 * gib))
        asked = resolve("recommended", "full", 0, machine, data, model, data["name"], model["name"])
        found = choose(asked, machine, os.devnull)  # where no card has failed
        lines.append((card, number(gib), found.variant, str(found.settings.micro_batch)))
    return pd.DataFrame(lines, columns=["card", "GiB free", "variant", "micro-batch"])


def advice(hardware: str) -> str:
    """As Markdown: how to train with what suits a machine; `hardware` is a spec's."""
    return say("no_gpu") if hardware == "cpu" else say("advice", card=hardware.upper())


def projected(lines: pd.DataFrame, variants=()) -> pd.DataFrame:
    """Minutes of training on the full data set at a bench group's speeds (`lines` of summary), indexed by variant: of
    the headline ones, or of these.

    Columns: speed (samples/s); compile_s, NaN where it was not measured; cold, whether compile_s is of runs that found
    nothing compiled; minutes of training and compilation. Data and scoring are not counted. Raises NotMeasured.
    """
    if len(lines) and lines["task.name"].iloc[0] != "qa":
        raise load.NotMeasured("the projection is to SQuAD v2's training questions, and this is another task")
    part = load.usual(lines)
    part = part[(part["micro_batch"] == PROJECTED) & part["samples_per_s"].notna()].set_index("variant")
    if load.baseline(lines) not in part.index:
        raise load.NotMeasured(f"the baseline has no measured speed at micro-batch {PROJECTED} to project from")
    part = part.loc[[name for name in variants or tagged("headline") if name in part.index]]
    cold = part["compile_s"].astype(float)
    eager = pd.Series([VARIANTS[name].settings.compile == "none" for name in part.index], part.index)
    compile_s = cold.fillna(part["warm_compile_s"].astype(float)).mask(eager, 0.0)
    table = pd.DataFrame({"speed": part["samples_per_s"], "compile_s": compile_s, "cold": eager | cold.notna()})
    table["minutes"] = (load.FULL_SAMPLES * load.FULL_EPOCHS / table["speed"] + compile_s.fillna(0.0)) / 60
    return table
