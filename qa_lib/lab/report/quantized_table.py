"""Models whose weights were rounded to 8 and 4 bits, after training or during it.

notebooks/scaling.ipynb shows the table. A run's folder has a file of each of its quantized models
(`Run.quantized`): what the model came to before it was rounded and after, and at what cost.
"""

import math

import pandas as pd

from qa_lib.lab.report import evidence
from qa_lib.lab.report.evidence import NotMeasured
from qa_lib.lab.report.format import gain, points
from qa_lib.lab.report.summary import average
from qa_lib.lab.report.tables import Column, render
from qa_lib.spec.variants import VARIANTS

# Each width -> the variant that trains on weights which are rounded to it.
AWARE = {
    variant.settings.qat: name
    for name, variant in VARIANTS.items()
    if variant.settings.qat != "none"
}
FULL = VARIANTS[next(iter(AWARE.values()))].parent  # the same training in full precision
SHOWN = [FULL, *AWARE.values()]

NOT_ROUNDED = "full precision"
ROUNDED_AFTER = "post-training"
ROUNDED_DURING = "quantization-aware"
FULL_WIDTH = "fp32"
# Ways and widths in the order of the table.
ORDER = [NOT_ROUNDED, ROUNDED_AFTER, ROUNDED_DURING, FULL_WIDTH, *AWARE]


def quantized_table(every: pd.DataFrame, group: str) -> pd.DataFrame:
    """Return what rounded weights cost and save beside full precision, as text.

    `every` are the runs of all groups. Columns:

    - "what it is": the way and the width; variant, n
    - F1 at the best threshold, and ΔF1 to full precision there and at threshold 0, over equal seeds
    - "MB on disk"
    - "ms a question" on a CPU, and "× as quick" as the run's own model before it was rounded
    - "× training speed" of FULL on the same hardware

    Raises NotMeasured for a group without records, and where no run of FULL was quantized.
    """
    runs = evidence.select(every, group)
    trained = runs[runs["status"].eq("ok") & runs["spec.variant"].isin(SHOWN)]
    scores = quantized_scores(evidence.largest_micro_batch(trained))
    lines = average(scores, ["way", "width"])
    lines = lines.sort_index(key=lambda level: level.map(ORDER.index)).reset_index()
    is_full = lines["way"] == NOT_ROUNDED
    # It is what the others are compared with.
    lines.loc[is_full, ["change", "change_at_0", "quicker"]] = math.nan
    is_aware = lines["way"] == ROUNDED_DURING
    variants = lines["width"].map(AWARE).where(is_aware, FULL)
    table = lines.assign(
        what=lines["way"] + " " + lines["width"],
        variant=variants,
        rate=variants.map(_training_speeds(every, group)),
    )
    columns = [
        Column("what", "what it is"),
        Column("variant"),
        Column("n"),
        Column("f1", "F1", points),
        Column("change", "ΔF1", gain),
        Column("change_at_0", "ΔF1 at 0", gain),
        Column("mb", "MB on disk", interval=False),
        Column("ms", "ms a question"),
        Column("quicker", "× as quick"),
        Column("rate", "× training speed"),
    ]
    return render(table, columns)


def quantized_scores(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the scores and costs of the models of runs of SHOWN, indexed by way, width and seed.

    A model of FULL counts as it is and as rounded after training; one of AWARE counts where it was
    rounded to the width that it was trained for. Columns:

    - f1 at the best threshold, and f1_at_0
    - mb: MB of weights on disk
    - ms: a question on a CPU
    - quicker: how many times as quick as the run's own model in full precision
    - change and change_at_0: F1 less that of full precision, of the same seed

    Raises NotMeasured where no run of FULL was quantized.
    """
    lines = []
    for variant, seed, run in zip(
        runs["spec.variant"], runs["spec.seed"], runs["run"], strict=True
    ):
        for file in run.quantized():
            lines += _models_of(file, variant, seed)
    if not any(line["way"] == NOT_ROUNDED for line in lines):
        raise NotMeasured(f"no run of {FULL} was quantized, beside {', '.join(AWARE.values())}")
    scores = pd.DataFrame(lines).groupby(["way", "width", "seed"]).mean()
    full = scores.loc[NOT_ROUNDED].droplevel("width")
    of_same_seed = full.reindex(scores.index.get_level_values("seed")).set_axis(scores.index)
    return scores.assign(
        change=scores["f1"] - of_same_seed["f1"],
        change_at_0=scores["f1_at_0"] - of_same_seed["f1_at_0"],
    )


def _models_of(file: dict, variant: str, seed: int) -> list[dict]:
    """Return the lines of one quantized model of a run: none, or one for each way that it shows."""
    width = file["width"]
    if variant == FULL:
        models = [(NOT_ROUNDED, FULL_WIDTH, file["before"]), (ROUNDED_AFTER, width, file["after"])]
    elif variant == AWARE.get(width):
        models = [(ROUNDED_DURING, width, file["after"])]
    else:
        models = []
    lines = []
    for way, bits, model in models:
        lines.append({
            "way": way,
            "width": bits,
            "seed": seed,
            "f1": model["best_f1"],
            "f1_at_0": model["f1"],
            "mb": model["weights_bytes"] / 1e6,
            "ms": model["latency_ms"],
            "quicker": file["before"]["latency_ms"] / model["latency_ms"],
        })  # fmt: skip
    return lines


def _training_speeds(every: pd.DataFrame, group: str) -> pd.Series:
    """Return the samples/s of SHOWN over that of FULL, on a group's hardware; NaN without FULL."""
    timed = evidence.runs_at_preset(every, group, "bench")
    timed = evidence.largest_micro_batch(timed[timed["spec.variant"].isin(SHOWN)])
    rates = evidence.numbers(timed, {"rate": "speed.samples_per_s"})["rate"]
    means = rates.groupby(timed["spec.variant"]).mean()
    return means / means.get(FULL, math.nan)
