"""What the notebooks say: a misspelt parameter, a variant and the code that does it, what runs came to, and what the
committed records have of a family. Text is Markdown."""

import contextlib
import inspect
import json
import re
import textwrap
from collections.abc import Sequence
from fnmatch import fnmatchcase
from importlib import import_module
from itertools import pairwise
from operator import attrgetter
from pathlib import Path

import pandas as pd

from qa_lib.errors import UnknownName, nearest
from qa_lib.lab.report import evidence, readme
from qa_lib.lab.report.figures import timed
from qa_lib.lab.report.format import number
from qa_lib.lab.report.summary import change, result_table, summary
from qa_lib.lab.report.tables import markdown
from qa_lib.paths import IS_CHECKOUT, PACKAGE, ROOT
from qa_lib.records.files import RecordError, regular
from qa_lib.records.record import read_record
from qa_lib.spec.rules import since
from qa_lib.spec.spec import Spec
from qa_lib.spec.tasks import TASKS
from qa_lib.spec.variants import BASELINES, VARIANTS, find_family

SHOWN, NONE = 5, "(no answer)"  # questions, and what stands for no answer


def check_parameters(cells: Sequence[str]) -> None:
    """Raises UnknownName for a parameter that papermill was given and the notebook does not have, of which papermill
    only warns. `cells` are those run so far, IPython's `In`: papermill puts its own right after the parameters."""
    for parameters, injected in pairwise(cells):
        if injected.startswith("# Parameters\n"):
            known, given = (re.findall(r"(?m)^(\w+) = ", cell) for cell in (parameters, injected))
            if unknown := [name for name in given if name not in known]:
                raise UnknownName(nearest("parameter", unknown[0], known))


def family(letter: str) -> str:
    """A family's variants, folded: what each changes, and why."""
    lines = [(name, change(name), VARIANTS[name].why) for name in find_family(letter)]
    table = markdown(pd.DataFrame(lines, columns=["variant", "what it changes", "what it is"]))
    return f"<details><summary>The {len(lines)} variants of this notebook</summary>\n\n{table}\n\n</details>"


def describe(spec: Spec) -> str:
    """What a variant changes, why and by what code, what it trains, what this machine cannot do as asked, and what it
    does best."""
    variant, preset = VARIANTS[spec.variant], spec.preset
    said = f"**{variant.name} = {change(variant.name)}**. {variant.why}"
    length = f"{preset.steps:,} steps" if preset.steps else f"epochs: {preset.epochs:g}, steps"
    size = (
        f"{preset.batch or spec.settings.micro_batch} samples of at most {preset.max_length} tokens"
    )
    trains = f"{spec.model['name']} on {spec.data['name']}, {length} of {size}; learning rate {preset.learning_rate:g}"
    notes = [f"Preset {preset.name}, seed {spec.seed}: {trains}."]
    if newer := since(spec.settings):
        notes.append(f"On a GPU it takes compute capability {newer / 10} or newer.")
    notes += [f"Adjusted to this machine: {note}." for note in spec.adjusted]
    notes += [f"**Skipped here**: {spec.skip}."] if spec.skip else []
    what_to_run = [advice(spec.hardware)] if preset.task == "qa" else []
    return "\n\n".join([said, technique(variant.name), " ".join(notes), *what_to_run])


def advice(hardware: str) -> str:
    """Return as Markdown how to train with what suits a machine; `hardware` is a spec's."""
    if hardware == "cpu":
        return (
            "**No GPU here.** Stay at preset `smoke`: a tiny model on generated text, about ten "
            "seconds a variant. In Colab, *Runtime, Change runtime type* gives one."
        )
    return (
        f'**This card:** {hardware.upper()}. `variant = "recommended"` takes what suits it, and '
        "says why; preset `full` trains three epochs of SQuAD v2, and `smoke` takes about ten "
        "seconds."
    )


def technique(variant: str) -> str:
    """How a variant's change works, in two sentences, and the code that does it, from its file."""
    changed = ",".join(f"{name}={value}" for name, value in VARIANTS[variant].change.items())
    line = next(line for line in readme.TECHNIQUES.itertuples() if fnmatchcase(changed, line.of))
    said = [line.says]
    for place in line.code.split():
        module, _, name = place.partition(":")
        found = attrgetter(name)(import_module(module))
        for wrapped in ("fn", "_init_fn"):  # of a Triton kernel, and of a custom operator
            found = getattr(found, wrapped, found)
        path = Path(inspect.getsourcefile(found)).relative_to(PACKAGE.parent).as_posix()
        code, first = inspect.getsourcelines(found)
        shown = f"[{path}](../{path}#L{first})" if IS_CHECKOUT else f"{path}, line {first}"
        said.append(f"{shown}:\n\n```python\n{textwrap.dedent(''.join(code))}```")
    return "\n\n".join(said)


def finished(spec: Spec, runs: str | Path) -> dict | None:
    """The record of a run that has ended well below the folder `runs`; None without one."""
    with contextlib.suppress(RecordError):
        record = read_record(Path(runs) / spec.run_path)
        return record if record["status"] == "ok" else None


def answers(records: Sequence[dict], runs: str | Path, questions) -> str:
    """What runs below the folder `runs` answered to the first validation questions of a data.load.Data, beside the gold
    answers."""
    shown = questions.validation.examples[:SHOWN] if questions.validation else []
    table = pd.DataFrame({"question": [example.question for example in shown]})
    for record in records:
        path = Path(runs, record["group"], record["run_id"], "answers", "predictions.json")
        if record["status"] == "ok" and shown:
            given = json.loads(regular(path).read_text(encoding="utf-8"))
            table[record["spec"]["variant"]] = [given[example.id] or NONE for example in shown]
    table["gold"] = [example.answers[0][0] if example.answers else NONE for example in shown]
    return markdown(table, set(table))


def family_table(runs: pd.DataFrame, records: Sequence[dict]) -> pd.DataFrame:
    """As text: the variants of some records of one group, and all others of `relatives` of the first. Only of one's own
    runs, and of the model, length and training that the first had: a search or a scaling group has many."""
    chosen = evidence.select(
        evidence.own_or_all(runs[runs["group"] == records[0]["group"]]), records[0]["group"]
    )
    first = records[0]["spec"]["variant"]
    own = chosen[chosen["run_id"] == records[0]["run_id"]]
    for axis in ("model", "length", "training"):
        chosen = chosen[chosen[axis].isin(own[axis])]
    names = relatives(first).union(record["spec"]["variant"] for record in records)
    chosen = chosen[chosen["spec.variant"].isin(names)]
    return brief(summary(chosen), chosen, runs, "trainable", "compile_s")


def relatives(variant: str) -> set[str]:
    """The variants of a variant's family, those that they change, and the baseline."""
    family = find_family(VARIANTS[variant].family)
    return {*family, *(VARIANTS[name].parent for name in family), BASELINES[VARIANTS[variant].task]}


def brief(lines: pd.DataFrame, own: pd.DataFrame, runs: pd.DataFrame, *more: str) -> pd.DataFrame:
    """Return `lines` of a group's runs `own` as text in few columns, and the columns `more`.

    A CPU's speeds, which rank nothing, give way to those of the task's reference group in `runs`.
    """
    columns = ["variant", "change", *evidence.AXES, "n", "score"]
    if not evidence.on_cpu(own):
        return result_table(
            lines, [*columns, "samples_per_s", "ratio", "peak_mib", *more, "status", "note"]
        )
    table = result_table(lines, [*columns, "status", "note"])
    reference = TASKS[lines["task.name"].iloc[0]].reference
    if reference in set(runs["group"]):
        there = evidence.select(runs, reference)
        ratios = timed(there).set_index("variant")["ratio"].reindex(lines["variant"])
        head = f"speed × {evidence.baseline(there)} on one {there['env.gpu'].iloc[0]}"
        table.insert(min(4, table.shape[1]), head, list(map(number, ratios)))
    return table


def committed(letter: str) -> str:
    """What the committed records have of a family's variants on a GPU. Raises NotMeasured."""
    every = evidence.load_runs(ROOT / "runs")
    own = evidence.nearest_runs_at_preset(
        every, evidence.REFERENCE, {"P": "parallel", "L": "lm-bench"}.get(letter, "bench")
    )
    own = own[own["spec.variant"].isin(relatives(find_family(letter)[0]))]
    if own.empty:
        raise evidence.NotMeasured(f"no committed group has family {letter}")
    judged = evidence.usual_conditions(evidence.judging_runs(every, own["group"].iloc[0]))
    return f"{markdown(readme.headline_table(own, judged, own['spec.variant']))}\n\n{readme.caption(own, judged)}"
