"""What the notebooks say about parameters, a variant, its code, its runs and its family.

Text is Markdown.
"""

import contextlib
import json
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from huggingface_hub import try_to_load_from_cache

from qa_lib.errors import UnknownName, nearest
from qa_lib.lab.report import evidence
from qa_lib.lab.report.figures import timed
from qa_lib.lab.report.format import number, percent, points
from qa_lib.lab.report.summary import change, result_table, summary
from qa_lib.lab.report.tables import Column, markdown, render
from qa_lib.lab.report.techniques import Source, find_technique, source_of
from qa_lib.lab.report.variants_table import caption, headline_table
from qa_lib.paths import IS_CHECKOUT, ROOT
from qa_lib.records.files import RecordError, regular
from qa_lib.records.record import read_record
from qa_lib.spec.rules import since
from qa_lib.spec.spec import Spec
from qa_lib.spec.tasks import TASKS
from qa_lib.spec.variants import BASELINES, VARIANTS, find_family

if TYPE_CHECKING:  # it imports transformers, which takes seconds
    from qa_lib.data.examples import Example
    from qa_lib.data.load import Data

SHOWN = 5  # questions whose answers are shown
NO_ANSWER = "(no answer)"
# Families whose committed runs on a GPU are at another preset than `bench`.
PRESETS = {"P": "parallel", "L": "lm-bench"}


def check_parameters(cells: Sequence[str]) -> None:
    """Check that a notebook has the parameters that papermill was given, which itself only warns.

    `cells` are those run so far, IPython's `In`. papermill puts its own right after the parameters.

    Raises UnknownName for a parameter that the notebook has not.
    """
    for parameters, injected in pairwise(cells):
        if not injected.startswith("# Parameters\n"):
            continue
        known = _assigned_names(parameters)
        for name in _assigned_names(injected):
            if name not in known:
                raise UnknownName(nearest("parameter", name, known))


def _assigned_names(cell: str) -> list[str]:
    """Return the names to which a cell of plain assignments gives values."""
    return re.findall(r"^(\w+) = ", cell, re.MULTILINE)


# Data.


def text_within_reach(data: str, model: str) -> tuple[str, str, str]:
    """Return data and a model whose vocabulary cuts them, and a sentence on them in Markdown.

    Where no `data` are named they are real if they can be had: a folder `squad` in the current one,
    in Colab SQuAD v2 of the hub; else "", for generated text. Where no `model` is named and BERT's
    vocabulary cannot be had, it is "tiny".
    """
    online = "google.colab" in sys.modules
    if not data and Path("squad").is_dir():
        data = "squad"
    elif not data and online:
        data = "squad_v2"
    if not data:
        text = "**Generated text**: for real one put SQuAD's files into a folder `squad/`."
        return data, model, text
    text = f"**Text:** {Path(data).name}."
    if not (model or online or try_to_load_from_cache("bert-base-uncased", "vocab.txt")):
        model = "tiny"
        text += " BERT's vocabulary is not on this machine: each word counts as one token."
    return data, model, text


def first_questions(examples: Sequence["Example"]) -> str:
    """Return the first question that has an answer and the first that has none, with paragraphs."""
    rows = []
    for impossible in (False, True):
        first = next((one for one in examples if one.impossible == impossible), None)
        if first:
            gold = " / ".join(dict(first.answers)) or NO_ANSWER
            rows.append((first.question, first.context, gold))
    return markdown(pd.DataFrame(rows, columns=["question", "paragraph", "gold"]))


# A variant.


def family(letter: str) -> str:
    """Return a family's variants, folded: what each changes, and why."""
    names = find_family(letter)
    lines = [(name, change(name), VARIANTS[name].why) for name in names]
    table = markdown(pd.DataFrame(lines, columns=["variant", "what it changes", "what it is"]))
    title = f"The {len(names)} variants of this notebook"
    return f"<details><summary>{title}</summary>\n\n{table}\n\n</details>"


def describe(spec: Spec) -> str:
    """Return what a variant changes, by what code, and what it trains here.

    That is followed by what this machine cannot do as asked, and by what suits it best.
    """
    variant = VARIANTS[spec.variant]
    paragraphs = [
        f"**{variant.name} = {change(variant.name)}**. {variant.why}",
        technique(variant.name),
        _about_run(spec),
    ]
    if spec.preset.task == "qa":
        paragraphs.append(advice(spec.hardware))
    return "\n\n".join(paragraphs)


def _about_run(spec: Spec) -> str:
    """Return what a run trains, and how this machine changes that."""
    preset = spec.preset
    duration = f"{preset.steps:,} steps" if preset.steps else f"epochs: {preset.epochs:g}, steps"
    batch = preset.batch or spec.settings.micro_batch
    sentences = [
        f"Preset {preset.name}, seed {spec.seed}: {spec.model['name']} on {spec.data['name']}, "
        f"{duration} of {batch} samples of at most {preset.max_length} tokens; "
        f"learning rate {preset.learning_rate:g}."
    ]
    least_capability = since(spec.settings)
    if least_capability:
        sentences.append(f"On a GPU it needs compute capability {least_capability / 10} or newer.")
    for note in spec.adjusted:
        sentences.append(f"Adjusted to this machine: {note}.")
    if spec.skip:
        sentences.append(f"**Skipped here**: {spec.skip}.")
    return " ".join(sentences)


def advice(hardware: str) -> str:
    """Return how to train with what suits a machine; `hardware` is a spec's."""
    if hardware == "cpu":
        return (
            "**No GPU here.** Stay at preset `smoke`: a tiny model on generated text, about a "
            "minute a variant. In Colab, *Runtime, Change runtime type* gives one."
        )
    return (
        f'**This card:** {hardware.upper()}. `variant = "recommended"` takes what suits it, and '
        "says why; preset `full` trains three epochs of SQuAD v2, and `smoke` takes about ten "
        "seconds."
    )


def technique(variant: str) -> str:
    """Return how a variant's change works: in sentences, in lines of one's own, and by links.

    The links lead to the code of this package that does it.
    """
    explained = find_technique(variant)
    parts = [explained.how]
    if explained.yours:
        parts.append(
            f"In a training loop of your own:\n\n```python\n{explained.yours.strip()}\n```"
        )
    links = ", ".join(_link_to(source_of(shown)) for shown in explained.code())
    parts.append(f"The code that does it here: {links}.")
    return "\n\n".join(parts)


def _link_to(source: Source) -> str:
    """Return the place of some code, as a link in a checkout; its first line is named."""
    place = f"{source.path}, line {source.first}"
    if IS_CHECKOUT:
        return f"[{place}](../{source.path}#L{source.first})"
    return place


# Its runs.


def finished(spec: Spec, runs: str | Path) -> dict | None:
    """Return the record of a run below the folder `runs` that has ended ok, None without one."""
    with contextlib.suppress(RecordError):
        record = read_record(Path(runs) / spec.run_path)
        if record["status"] == "ok":
            return record
    return None


def gains(records: Sequence[dict]) -> str:
    """Return what runs of the same training cost, a line each, beside the F1 that they came to.

    A CPU ranks speeds otherwise than a GPU and measures no GPU memory. In their place stand the
    tokens that were computed, and memory as predicted for BERT-base on a T4.
    """
    table = pd.json_normalize(list(records))
    # Padding counts, and the speed does not: both rates are of the same seconds.
    tokens_of_a_sample = table["speed.tokens_per_s_padded"] / table["speed.samples_per_s"]
    table["tokens"] = (
        tokens_of_a_sample * table["time.steps"] * table["spec.preset.effective_batch"] / 1e6
    )
    columns = [
        Column("spec.variant", "variant"),
        Column("time.steps", "steps"),
        Column("quality.f1", "F1", points),
        Column("quality.best_f1", "best F1", points),
        Column("speed.pad_fraction", "padding", percent),
        Column("tokens", "million tokens computed"),
    ]
    if evidence.on_cpu(table):
        from qa_lib.lab.search.t4 import peaks_on_a_t4  # which imports torch

        peaks = peaks_on_a_t4(list(table["spec.variant"]), micro_batch=32)
        table["gib"] = table["spec.variant"].map(peaks) / 1024
        columns.append(Column("gib", "GiB of BERT-base on a T4, predicted"))
    else:
        table["gib"] = table["memory.peak_reserved_mib"] / 1024
        columns.append(Column("gib", "GiB reserved"))
        columns.append(Column("time.train_s", "s of training"))
        columns.append(Column("speed.samples_per_s", "samples/s"))
    return markdown(render(table, columns))


def answers(records: Sequence[dict], runs: str | Path, questions: "Data") -> str:
    """Return what runs answered to the first validation questions, beside the gold answers.

    The runs lie below the folder `runs`. Those that did not end ok are left out.
    """
    examples = questions.validation.examples[:SHOWN] if questions.validation else []
    table = pd.DataFrame({"question": [example.question for example in examples]})
    for record in records:
        if record["status"] == "ok" and examples:
            folder = Path(runs, record["group"], record["run_id"])
            path = regular(folder / "answers" / "predictions.json")
            given = json.loads(path.read_text(encoding="utf-8"))
            column = [given[example.id] or NO_ANSWER for example in examples]
            table[record["spec"]["variant"]] = column
    table["gold"] = [
        example.answers[0][0] if example.answers else NO_ANSWER for example in examples
    ]
    return markdown(table, left=set(table))


def family_table(runs: pd.DataFrame, records: Sequence[dict]) -> pd.DataFrame:
    """Return as text the variants of some records of one group, beside `relatives` of the first.

    Of one's own runs only those count that agree with the first record in model, length and
    training, since the group of a search or of scaling has many.
    """
    group = records[0]["group"]
    chosen = evidence.select(evidence.own_or_all(runs[runs["group"] == group]), group)
    first = chosen[chosen["run_id"] == records[0]["run_id"]]
    for axis in ("model", "length", "training"):
        chosen = chosen[chosen[axis].isin(first[axis])]
    names = {record["spec"]["variant"] for record in records}
    names |= relatives(records[0]["spec"]["variant"])
    chosen = chosen[chosen["spec.variant"].isin(names)]
    return brief(summary(chosen), chosen, runs, "trainable", "compile_s")


def relatives(variant: str) -> set[str]:
    """Return the variants of a variant's family, those that they change, and the baseline."""
    family = find_family(VARIANTS[variant].family)
    parents = [VARIANTS[name].parent for name in family]
    return {*family, *parents, BASELINES[VARIANTS[variant].task]}


def brief(
    lines: pd.DataFrame, chosen: pd.DataFrame, runs: pd.DataFrame, *more: str
) -> pd.DataFrame:
    """Return lines of `summary` as a table of text in few columns, and the columns `more`.

    `chosen` are the runs of the group that the lines are of. A CPU's speeds, which rank nothing,
    give way to those of the task's reference group in `runs`.
    """
    columns = ["variant", "change", *evidence.AXES, "n", "score"]
    if not evidence.on_cpu(chosen):
        columns += ["samples_per_s", "ratio", "peak_mib", *more, "status", "note"]
        return result_table(lines, columns)
    table = result_table(lines, [*columns, "status", "note"])
    reference = TASKS[lines["task.name"].iloc[0]].reference
    if reference in set(runs["group"]):
        on_gpu = evidence.select(runs, reference)
        ratios = timed(on_gpu).set_index("variant")["ratio"].reindex(lines["variant"])
        heading = f"speed × {evidence.baseline(on_gpu)} on one {on_gpu['env.gpu'].iloc[0]}"
        place = min(4, len(table.columns))
        table.insert(place, heading, [number(ratio) for ratio in ratios])
    return table


# The committed records.


def committed(letter: str) -> str:
    """Return what the committed records have of a family's variants on a GPU.

    Raises NotMeasured where they have none.
    """
    every = evidence.load_runs(ROOT / "runs")
    preset = PRESETS.get(letter, "bench")
    chosen = evidence.nearest_runs_at_preset(every, evidence.REFERENCE, preset)
    chosen = chosen[chosen["spec.variant"].isin(relatives(find_family(letter)[0]))]
    if chosen.empty:
        raise evidence.NotMeasured(f"no committed group has family {letter}")
    group = chosen["group"].iloc[0]
    judged = evidence.usual_conditions(evidence.judging_runs(every, group))
    table = headline_table(chosen, judged, names=chosen["spec.variant"])
    return f"{markdown(table)}\n\n{caption(chosen, judged)}"
