"""Records as the report reads them: one DataFrame, a row a run; which runs count, and which may be compared.

The runs of a group share hardware, preset, task and data. What may differ among them, beside the row of the variants
table and the seed, is an axis (AXES). Runs that agree in every axis are a cell, and ratios hold within one cell only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import pandas as pd

from qa_lib.archive import read_runs, say_left_out
from qa_lib.errors import UserError
from qa_lib.record import RecordError
from qa_lib.variants import BASELINES, VARIANTS

BASELINE = BASELINES["qa"]  # the row that ratios and differences refer to, in question answering
RECOMMENDED = "E-moments"  # the row that sentences speak of, where it was run
TASK = ["task.name", "task.metric", "task.label", "task.higher_is_better"]
LENGTH, MICRO_BATCH = "spec.preset.max_length", "spec.settings.micro_batch"
EPOCHS, RATE = "spec.preset.epochs", "spec.preset.learning_rate"
BATCH, BATCH_TOKENS = "spec.preset.effective_batch", "spec.preset.batch_tokens"
AXIS_COLUMNS = (LENGTH, EPOCHS, RATE, BATCH, BATCH_TOKENS)
# What must be equal within a group, or a ratio would compare different work; but for AXIS_COLUMNS.
IDENTITY = ("spec.hardware", "spec.preset.", "spec.search", "spec.sm", "data.name", "data.sha256", *TASK[:2])


class ReportError(UserError):
    """A report that cannot be made from these records; the message names group and baseline or file."""


class NotMeasured(ReportError):
    """No record holds what a figure or sentence shows; the message says what is missing and why."""


@dataclass(frozen=True)
class Axis:
    """What may differ within a group: a column of runs and lines, its name for people, and its value for all runs."""

    name: str
    label: str
    value: Callable[[pd.DataFrame], pd.Series]


def _model(runs: pd.DataFrame) -> pd.Series:
    return runs["model.name"].astype(str) + " " + runs["model.revision"].astype(str).str[:7]


def _precision(runs: pd.DataFrame) -> pd.Series:
    """The precision that was asked for where it is not the row's own; rows that differ in precision are compared."""
    own = runs["spec.variant"].map({name: row.settings.precision for name, row in VARIANTS.items()})
    asked = runs["spec.settings.precision"]
    return asked.where(own.notna() & (asked != own), "own")


def _training(runs: pd.DataFrame) -> pd.Series:
    """How many epochs, where a preset counts them, at which learning rate: '3 epochs at 0.0002'."""
    epochs = runs[EPOCHS].map("{:g} epochs at ".format, na_action="ignore").replace("1 epochs at ", "1 epoch at ")
    epochs = epochs.fillna("")
    return epochs + runs[RATE].map("{:g}".format)


def _batch(runs: pd.DataFrame) -> pd.Series:
    """Features of an optimizer step; 0 where that is one micro-batch, however large."""
    tokens, features = (runs.reindex(columns=[name])[name].astype(float) for name in (BATCH_TOKENS, BATCH))
    return (tokens // runs[LENGTH]).fillna(features).fillna(0).astype(int)


def _world(runs: pd.DataFrame) -> pd.Series:
    """Processes that trained, which may be others than were asked for where torchrun is started by hand."""
    trained = runs.reindex(columns=["parallel.world"])["parallel.world"].astype(float)
    return trained.fillna(runs["spec.world"]).astype(int)


def _stages(runs: pd.DataFrame) -> pd.Series:
    """Processes that a micro-batch passes through; records older than pipelines do not name them."""
    return runs.reindex(columns=["spec.stages"])["spec.stages"].astype(float).fillna(1).astype(int)


AXES = (
    Axis("model", "model", _model),
    Axis("world", "world size", _world),
    Axis("stages", "stages", _stages),
    Axis("batch", "effective batch", _batch),
    Axis("precision", "precision", _precision),
    Axis("length", "length", itemgetter(LENGTH)),
    Axis("training", "training", _training),
    Axis("micro_batch", "micro-batch", itemgetter(MICRO_BATCH)),
)
AXIS_NAMES = [axis.name for axis in AXES]


def load_runs(runs: str | Path = "runs", broken: dict[Path, str] | None = None) -> pd.DataFrame:
    """Every record below `runs`, a row a run, a column a value named by its path ('speed.samples_per_s'), and AXES.

    Sorted by group, variant and seed. A record that cannot be trusted is left out, with a line on the terminal; where
    `broken` is given, with its folder and the line there instead.
    """

    def told(problem: RecordError) -> None:
        broken[Path(str(problem).partition(":")[0]).parent] = str(problem)

    found = read_runs(runs, left_out=say_left_out if broken is None else told)
    rows = [run.record | {"run": run} for run in found]
    if not rows:
        return pd.DataFrame(columns=["group", "status", "spec.variant", "spec.seed", *AXIS_NAMES])
    found = pd.json_normalize(rows)
    return found.assign(**{axis.name: axis.value(found) for axis in AXES})


def published() -> pd.DataFrame:
    """The seeds' numbers by row, with the names of `lines`."""
    names = {"f1": "score", "train_samples_per_s": "samples_per_s", "peak_alloc_mib": "peak_mib"}
    table = pd.read_csv(Path(__file__).with_name("published.csv"), comment="#", index_col="row").rename(columns=names)
    base = table.loc[BASELINE]
    return table.assign(ratio=table["samples_per_s"] / base["samples_per_s"], delta=table["score"] - base["score"])


def select(runs: pd.DataFrame, group: str) -> pd.DataFrame:
    """The runs of one group that count: for each row, seed and cell the newest.

    Raises NotMeasured for a group without records, and ReportError for one whose runs differ in what they all should
    share.
    """
    chosen = runs[runs["group"] == group]
    if chosen.empty:
        known = ", ".join(sorted(set(runs["group"]))) or "none; make quickstart makes cpu-smoke"
        raise NotMeasured(f"group {group!r} has no records (groups with records: {known})")
    chosen = chosen.sort_values(["time.started", "run_id"])
    chosen = chosen.drop_duplicates(["spec.variant", "spec.seed", *AXIS_NAMES], keep="last")
    for column in (name for name in chosen if name.startswith(IDENTITY) and name not in AXIS_COLUMNS):
        # A shorter feature may have a shorter stride.
        for _, part in chosen.groupby("length") if column == "spec.preset.stride" else [(None, chosen)]:
            if len(part[column].unique()) > 1:
                one, *others = part.drop_duplicates(column)[["run_id", column]].to_numpy()
                raise ReportError(
                    f"group {group!r} mixes runs that cannot be compared: {column} is {one[1]!r} in {one[0]} and "
                    f"{others[0][1]!r} in {others[0][0]}; move the older runs away"
                )
    return chosen.reset_index(drop=True)


def group_or_why(runs: pd.DataFrame, group: str) -> tuple[pd.DataFrame, str]:
    """For a notebook: `select` and no words; or no runs, and why."""
    try:
        return select(runs, group), ""
    except ReportError as reason:
        return runs[:0], not_measured(reason)


def not_measured(reason: ReportError) -> str:
    """What a notebook shows in place of what no record holds, as Markdown."""
    return f"*Not measured: {reason}.*"


def newest(runs: pd.DataFrame) -> dict[str, str]:
    """Of each group, when its latest run began."""
    return {} if runs.empty else runs.groupby("group")["time.started"].max().to_dict()


def searches(runs: pd.DataFrame) -> set[str]:
    """The groups that hold the tries of a search (`max-batch`, `tune`), of which no row is compared with another."""
    return set(runs.loc[runs["spec.search"] != "", "group"]) if len(runs) else set()


def several(runs: pd.DataFrame) -> pd.Series:
    """Which runs are of rows for several GPUs (family P): they are compared with their row on one GPU (scaling.py)."""
    return runs["spec.variant"].map({name: row.settings.parallel != "none" for name, row in VARIANTS.items()}).eq(True)


def found_compiled(runs: pd.DataFrame) -> pd.Series:
    """Which runs found code that an earlier one had compiled: by the cache's word or, in one process with that run, by
    the second or less that compiling took."""
    told = runs.reindex(columns=["time.compile_cached", "time.compile_s"])
    return told["time.compile_cached"].eq(True) | (told["time.compile_s"].astype(float) < 1)


def measured_apart(runs: pd.DataFrame) -> list[str]:
    """The rows of a cell all of whose timed runs are of other code than the baseline's: of another day, and perhaps of
    a host that launches kernels faster or slower."""
    timed = runs[runs["speed.samples_per_s"].notna()]
    of_base = timed.loc[timed["spec.variant"] == baseline(runs), "code.commit"]
    together = timed.groupby("spec.variant")["code.commit"].agg(lambda code: code.isin(of_base).any())
    return [name for name in VARIANTS if name in together.index and not together[name]] if len(of_base) else []


def on_cpu(runs: pd.DataFrame) -> bool:
    """Whether a group's runs had no GPU."""
    return len(runs) > 0 and runs["spec.hardware"].eq("cpu").all()


def neighbours(runs: pd.DataFrame, group: str) -> pd.DataFrame:
    """All runs that share hardware and task with a group, whatever their preset."""
    own = runs[runs["group"] == group]
    return runs[runs["spec.hardware"].isin(own["spec.hardware"]) & runs["task.name"].isin(own["task.name"])]


def sibling(runs: pd.DataFrame, group: str, preset: str) -> pd.DataFrame:
    """The runs that count of a group's hardware at another preset, which may be of another task; without rows where
    there are none."""
    hardware = runs.loc[runs["group"] == group, "spec.hardware"]
    found = runs[runs["spec.hardware"].isin(hardware)]
    found = found[(found["spec.preset.name"] == preset) & (found["spec.search"] == "")]
    return found if found.empty else select(found, found["group"].iloc[0])


def cells(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """(label, part) of each cell of a table that has columns of AXES; the largest micro-batch first, since it keeps the
    GPU busiest, and a line alone last, which there is nothing beside. The label names the axes that vary, 'length 256,
    micro-batch 8', and is empty for an only cell."""
    varying = [axis for axis in AXES if axis.name in table and table[axis.name].nunique(dropna=False) > 1]
    if not varying:
        return [("", table)]
    found = []
    for values, part in table.groupby([axis.name for axis in varying], dropna=False):
        label = ", ".join(f"{axis.label} {value}" for axis, value in zip(varying, values, strict=True))
        found.insert(0, (label, part))
    return sorted(found, key=lambda cell: len(cell[1]) == 1)


def in_cells(table: pd.DataFrame, function: Callable) -> list[tuple]:
    """(label, function(part)) of each of `cells` for which it is known. Raises NotMeasured where it is for none."""
    found, unknown = [], None
    for label, part in cells(table):
        try:
            found.append((label, function(part)))
        except NotMeasured as reason:
            unknown = reason
    if unknown and not found:
        raise unknown
    return found


def beside_baseline(runs: pd.DataFrame) -> pd.DataFrame:
    """Of runs those of cells, whatever their micro-batch, in which the baseline ran, or all if it ran in none: where it
    did not, there is nothing to compare with."""
    parts = [part for _, part in cells(runs.drop(columns="micro_batch")) if baseline(runs) in set(part["spec.variant"])]
    return runs.loc[pd.concat(parts).index] if parts else runs


def usual(table: pd.DataFrame) -> pd.DataFrame:
    """Of runs or lines those that agree with the most others in all axes but the micro-batch: what a table speaks of
    that shows a row once."""
    axes = [name for name in AXIS_NAMES if name in table and name != "micro_batch"]
    if table.empty or not axes:
        return table
    return max((part for _, part in table.groupby(axes, dropna=False)), key=len)


def score_name(table: pd.DataFrame) -> str:
    """How the score of runs or lines is called: 'F1'."""
    return table["task.label"].iloc[0]


def baseline(table: pd.DataFrame) -> str:
    """The row that ratios and differences of runs or lines refer to: their task's."""
    return BASELINES.get(table["task.name"].iloc[0], BASELINE)


def direction(table: pd.DataFrame) -> int:
    """1 where a higher score of runs or lines is the better one, else -1."""
    return 1 if table["task.higher_is_better"].iloc[0] else -1


def commits(runs: pd.DataFrame) -> str:
    """Which versions of the code the runs are of."""
    names = runs["code.commit"].fillna("unknown").str[:7]
    return ", ".join(sorted(set(names.where(~runs["code.dirty"].eq(True), names + " with changes"))))
