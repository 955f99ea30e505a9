"""Quantization: what weights in 8 or 4 bits cost in F1 and training speed, and save on disk and in time to answer.

Two ways lead to such weights. *Post-training*: a model that was trained in full precision is rounded at the end; that
is free, and the model had no chance to prepare. *Quantization-aware*: every forward pass of training sees the rounded
weights, so that the model learns to answer with them; that costs training speed (model/qat.py has the arithmetic).

`python -m qa_lib quantize` leaves a quantized.json beside a run. Both ways are held against full precision over equal
seeds. Times are of one thread of a CPU; a ratio of them is taken within one file, whose two models took turns.
"""

from dataclasses import dataclass

import pandas as pd

from qa_lib.record import RecordError
from qa_lib.report.quality import largest_batch
from qa_lib.report.runs import NotMeasured, ReportError, commits, not_measured, on_cpu, select, sibling
from qa_lib.report.sentences import CPU_CAVEAT
from qa_lib.report.tables import LEVEL, interval
from qa_lib.report.text import MISSING, gain, markdown, number, points, say
from qa_lib.variants import VARIANTS

FULL = ("A1-fp32", "A1")  # rows of full precision; the first that was quantized is compared with
AWARE = {row.settings.qat: name for name, row in VARIANTS.items() if row.settings.qat != "none"}  # by width
WAYS = ("full precision", "post-training", "quantization-aware")
SPEED = "speed.samples_per_s"


@dataclass(frozen=True)
class Quantized:
    """Of a group: `runs`, those of one kind that were quantized; `files`, a line for each of their quantized.json;
    `answers`, a line for each way, width and seed; the row `full` of full precision; and `broken`, what cannot be read.
    """

    runs: pd.DataFrame
    files: pd.DataFrame
    answers: pd.DataFrame
    full: str
    broken: tuple[str, ...]


def measured(every: pd.DataFrame, group: str) -> Quantized:
    """Of all records what a group's quantized models come to. `answers` is indexed by way, width and seed: f1 (at the
    best threshold) and f1_at_0, change and change_at_0 (from full precision), mb (on disk), ms (a question) and quicker
    (than before).

    Raises NotMeasured where the group has none, and ReportError where they answered other questions than each other.
    """
    runs = select(every, group)
    runs = runs[(runs["status"] == "ok") & runs["spec.variant"].isin([*FULL, *AWARE.values()])]
    files, broken = _files(runs)
    left = "".join(f"; left out: {problem}" for problem in broken)
    if files.empty:
        raise NotMeasured(f"no run of {', '.join([*FULL, *AWARE.values()])} in group {group} was quantized{left}")
    runs = largest_batch(runs[runs["run_id"].isin(files["run_id"])])
    files = files[files["run_id"].isin(runs["run_id"])]
    if files["data.sha256"].nunique() > 1:
        one, other, *_ = files.drop_duplicates("data.sha256")["file"]
        raise ReportError(f"{one} and {other} are of different questions, and cannot be compared")
    full = next((row for row in FULL if row in set(files["variant"])), None)
    if full is None:
        raise NotMeasured(f"no run of full precision ({' or '.join(FULL)}) in group {group} was quantized{left}")
    return Quantized(runs, files, _answers(files, full), full, broken)


def _files(runs: pd.DataFrame) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Every quantized.json beside some runs, a line each, and what is wrong with those that cannot be read."""
    found, broken = [], []
    for run in runs.to_dict("records"):
        try:
            entries = run["run"].quantized()
        except RecordError as problem:
            broken.append(str(problem))
            continue
        for entry in entries:
            path = f"{entry['run_id']}/model-{entry['width']}/quantized.json"
            found.append(entry | {"file": path, "variant": run["spec.variant"], "seed": run["spec.seed"]})
    return pd.json_normalize(found), tuple(broken)


def _answers(files: pd.DataFrame, full: str) -> pd.DataFrame:
    """The `answers` of Quantized: what full precision came to is in each file of its runs, and averaged."""
    lines = []
    for file in files.to_dict("records"):
        if file["variant"] == full:
            lines += [_line(file, WAYS[0], "before"), _line(file, WAYS[1], "after")]
        elif file["variant"] == AWARE.get(file["width"]):
            lines.append(_line(file, WAYS[2], "after"))
    found = pd.DataFrame(lines).groupby(["way", "width", "seed"]).mean()
    plain, seeds = found.loc[WAYS[0]].droplevel("width"), found.index.get_level_values("seed")
    changes = {"change": "f1", "change_at_0": "f1_at_0"}
    return found.assign(**{name: found[score] - seeds.map(plain[score]) for name, score in changes.items()})


def _line(file: dict, way: str, when: str) -> dict:
    return {
        "way": way,
        "width": "fp32" if when == "before" else file["width"],
        "seed": file["seed"],
        "f1": file[f"{when}.best_f1"],
        "f1_at_0": file[f"{when}.f1"],
        "mb": file[f"{when}.weights_bytes"] / 1e6,
        "ms": file[f"{when}.latency_ms"],
        "quicker": file["before.latency_ms"] / file[f"{when}.latency_ms"],
    }


def speeds(every: pd.DataFrame, found: Quantized) -> tuple[pd.Series, str]:
    """Each row's training speed as a factor of full precision's, and the group that it was measured in: that of the
    quantized runs, or where these were not timed, that of preset `bench`."""
    group = found.runs["group"].iloc[0]
    for runs in (found.runs, sibling(every, group, "bench")):
        timed = runs[(runs["status"] == "ok") & runs["spec.variant"].isin([found.full, *AWARE.values()])]
        rates = largest_batch(timed.dropna(subset=SPEED)).groupby("spec.variant")[SPEED].mean()
        if found.full in rates and len(rates) > 1:
            return rates / rates[found.full], timed["group"].iloc[0]
    return pd.Series(dtype=float), ""


def quantized_table(every: pd.DataFrame, found: Quantized) -> pd.DataFrame:
    """`found` as text, a line a way and width: means over seeds, with t-based intervals where three or more ran."""
    seeds, (rates, _) = found.answers.groupby(["way", "width"]), speeds(every, found)
    lines = seeds.mean().join(interval(seeds).add_suffix("±")).assign(n=seeds.size())
    lines = lines.sort_index(key=lambda level: level.map([*WAYS, "fp32", *AWARE].index)).reset_index()
    rows = lines["width"].map(AWARE).where(lines["way"] == WAYS[2], found.full)
    table = pd.DataFrame({
        "what it is": lines["way"] + " " + lines["width"],
        "row": rows,
        "n": lines["n"].map(str),
        "F1": list(map(points, lines["f1"], lines["f1±"])),
        "ΔF1": list(map(gain, lines["change"], lines["change±"])),
        "ΔF1 at 0": list(map(gain, lines["change_at_0"], lines["change_at_0±"])),
        "MB on disk": lines["mb"].map(number),
        "ms a question": list(map(number, lines["ms"], lines["ms±"])),
        "× as quick": list(map(number, lines["quicker"], lines["quicker±"])),
        "× training speed": rows.map(rates).map(number),
    })  # fmt: skip
    table.loc[lines["way"] == WAYS[0], ["ΔF1", "ΔF1 at 0", "× as quick"]] = MISSING
    return table.loc[:, (table != MISSING).any()]


def caption(every: pd.DataFrame, found: Quantized) -> str:
    """Where the table's numbers come from."""
    file, (_, timed) = found.files.iloc[0], speeds(every, found)
    cpus, gpus = (sorted(set(found.files[f"env.{name}"].dropna())) for name in ("cpu", "gpu"))
    code = commits(found.files)
    return say("quantized.caption", group=file["group"], code=code, model=found.runs["model.name"].iloc[0], cpus=cpus,
               gpus=gpus, questions=file["data.n"], level=LEVEL, full=found.full, timed=timed,
               caveat=CPU_CAVEAT if on_cpu(found.runs) else None)  # fmt: skip


def shown(every: pd.DataFrame, group: str) -> list:
    """For a notebook: the table of a group's quantized models and its caption; or why it is not there."""
    from IPython.display import Markdown  # notebooks have it; the command line need not

    try:
        found = measured(every, group)
    except ReportError as reason:
        return [Markdown(not_measured(reason))]
    left = [Markdown(f"*Left out: {problem}.*") for problem in found.broken]
    return [Markdown(markdown(quantized_table(every, found))), Markdown(caption(every, found)), *left]
