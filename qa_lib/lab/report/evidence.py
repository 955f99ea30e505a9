"""The evidence of the report: run records as one DataFrame, and the runs that a number rests on.

`load_runs` reads records; each row of its DataFrame is a run, each column a value named by its path
in the record ('speed.samples_per_s'). `select` takes the runs of one group that count. The other
functions choose which runs speak for a group where its own do not suffice (`judging_runs`), and
which of them may be compared (`usual_conditions`).

The runs of a group share hardware, preset, task and data. What may differ among them, beside the
variant and the seed, is an axis (AXES). Ratios hold only between runs that agree in every axis.
"""

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from qa_lib.errors import UserError
from qa_lib.records.archive import Run, read_runs, say_left_out
from qa_lib.spec.tasks import TASKS
from qa_lib.spec.variants import BASELINES, RECOMMENDED, VARIANTS

# The group that README.md and the advice for a card speak of, where it has records.
REFERENCE = TASKS["qa"].reference

# Presets, and searches that have groups of their own -> what a group of them is evidence for.
PURPOSES = {
    "smoke": "that everything runs, not speed or F1",
    "lm-smoke": "that everything runs, not speed or loss",
    "bench": "speed and memory",
    "lm-bench": "speed and memory of a language model",
    "parallel": "speed and memory of several GPUs",
    "vram": "memory by the reference project's protocol",
    "sizing": "memory and speed over length and batch",
    "lm-sizing": "a language model's memory over length and batch",
    "quality": "F1, and seconds to a score",
    "lm-quality": "a language model's loss",
    "answerable": "F1 where every question has an answer",
    "minutes": "minutes of a whole training, without a score",
    "speedrun": "seconds to a target F1",
    "critical-batch": "what a larger batch is worth",
    "full": "a whole training: F1, minutes and memory",
    "lm-full": "a whole training of a language model",
    "local": "a training on data of your own",
    "max-batch": "the largest micro-batch within a limit",
    "tune": "which learning rate to take, not F1",
}

# Columns of the DataFrame that have names of their own here.
TASK = ["task.name", "task.metric", "task.label", "task.higher_is_better"]
LENGTH = "spec.preset.max_length"
MICRO_BATCH = "spec.settings.micro_batch"
EPOCHS = "spec.preset.epochs"
RATE = "spec.preset.learning_rate"
BATCH = "spec.preset.effective_batch"
BATCH_TOKENS = "spec.preset.batch_tokens"

# What may differ within a group: columns that `with_axes` adds -> their headings in tables.
AXES = {
    "model": "model",
    "data": "data",
    "world": "world size",
    "stages": "stages",
    "batch": "effective batch",
    "precision": "precision",
    "length": "length",
    "training": "training",
    "micro_batch": "micro-batch",
}

# Beginnings of the columns that must be equal within a group, or ratios would compare different
# work.
IDENTITY = (
    "spec.hardware",
    "spec.preset.",
    "spec.search",
    "spec.sm",
    "task.name",
    "task.metric",
)
# Columns that begin as IDENTITY has it and may differ all the same: an axis holds them, or they
# follow from one that does. The stride follows from the length, and an answer's length from
# tokenizer and data where a preset does not ask for one.
OF_AXES = (
    LENGTH,
    "spec.preset.stride",
    EPOCHS,
    RATE,
    BATCH,
    BATCH_TOKENS,
    "spec.preset.max_answer_length",
)

STEPS = "spec.preset.steps"
SCORED = "spec.preset.quality"

# Columns that a DataFrame has even where there is no run: those by which runs are chosen.
COLUMNS = (
    "group",
    "run_id",
    "run",
    "status",
    "code",
    "sitting",
    "spec.variant",
    "spec.seed",
    "spec.hardware",
    "spec.search",
    "spec.preset.name",
    SCORED,
    *TASK,
    "time.started",
    "model.name",
    "model.revision",
    "data.name",
    "data.sha256",
    "speed.samples_per_s",
    *AXES,
)

# A full training: SQuAD v2's training questions make so many samples at length 384 and stride 128,
# and are seen for so many epochs.
FULL_SAMPLES = 131_754
FULL_EPOCHS = 3

# A run that compiled for fewer seconds found its code compiled by an earlier run of its process.
COLD_COMPILE_S = 1.0


class ReportError(UserError):
    """A report that cannot be made from these records; the message names group, file or variant."""


class NotMeasured(ReportError):
    """No record holds what a figure or sentence shows; the message says what is missing and why."""


# Loading.


def load_runs(
    runs: str | Path = "runs", left_out: Callable[..., None] = say_left_out
) -> pd.DataFrame:
    """Return every record below the folder `runs` (see `as_frame`), sorted by group and run.

    A record that cannot be trusted is left out, and `left_out` is told of it (see `read_runs`).
    """
    return as_frame(read_runs(runs, left_out=left_out))


def as_frame(runs: list[Run]) -> pd.DataFrame:
    """Return a DataFrame with a row for each run.

    Columns: each value of the record by its path (without runs those of COLUMNS), `run` (the
    archive.Run itself), AXES, and

    - code: equal where the code was: its digest, or the commit in records without one
    - sitting: equal where speeds may be compared, which is where the code was equal. Runs in
      folders count as one sitting: they are of the user's own machine, and code changes there all
      the time.
    """
    if not runs:
        return pd.DataFrame(columns=[*COLUMNS])
    frame = with_axes(pd.json_normalize([run.record for run in runs]).assign(run=runs))
    code = _digests(frame).fillna(frame["code.commit"])
    is_own = [run.folder is not None for run in runs]
    return frame.assign(code=code, sitting=code.mask(is_own, "own"))


def _digests(runs: pd.DataFrame) -> pd.Series:
    """Return the digest of each run's code; records of before November 28, 2026 have none."""
    return runs.reindex(columns=["code.digest"])["code.digest"]


def with_axes(runs: pd.DataFrame) -> pd.DataFrame:
    """Return runs with the columns of AXES.

    - model: its name with its revision, or with its size where nothing is scored
    - data: their name, with the beginning of their digest where the group has others of that name
    - world: the number of processes that trained
    - stages: pipeline stages, 1 without a pipeline
    - batch: the effective batch in samples, 0 where a step is one micro-batch
    - precision: 'own' unless another than the variant's was asked for
    - length: tokens of a sample at most
    - training: for example '3 epochs at 0.0002'
    - micro_batch: samples in a forward pass
    """
    parallel = numbers(runs, {"world": "parallel.world", "stages": "spec.stages"})
    return runs.assign(
        model=_model_axis(runs),
        data=_data_axis(runs),
        world=parallel["world"].fillna(runs["spec.world"]).astype(int),
        stages=parallel["stages"].fillna(1).astype(int),
        batch=_batch_axis(runs),
        precision=_precision_axis(runs),
        length=runs[LENGTH],
        training=_training_axis(runs),
        micro_batch=runs[MICRO_BATCH],
    )


def _model_axis(runs: pd.DataFrame) -> pd.Series:
    """Return each run's model as 'NAME REVISION', or as 'NAME PARAMETERS' where nothing is scored.

    A speed depends on a model's size and not on its weights, so that runs without a score may be
    compared across revisions. The size is the smallest of the revision, since adapters come on top.
    """
    params_total = runs["model.params_total"].astype(float)
    of_revision = params_total.groupby([runs["model.name"], runs["model.revision"]])
    params = of_revision.transform("min")
    revision = runs["model.revision"].str[:7]
    size = params.map("of {:,.0f}".format)
    is_scored = runs["spec.preset.quality"]
    return runs["model.name"] + " " + revision.where(is_scored | params.isna(), size)


def _data_axis(runs: pd.DataFrame) -> pd.Series:
    """Return each run's data as 'NAME', or 'NAME DIGEST' where the group has two of that name."""
    digest = runs["data.sha256"].str[:7]
    of_name = digest.groupby([runs["group"], runs["data.name"]])
    is_alone = of_name.transform("nunique") <= 1
    return runs["data.name"].where(is_alone, runs["data.name"] + " " + digest)


def _batch_axis(runs: pd.DataFrame) -> pd.Series:
    """Return the samples of an optimizer step, 0 where a step is one micro-batch.

    A batch that was asked for in tokens counts as that many tokens over the length of a sample.
    """
    asked = numbers(runs, {"tokens": BATCH_TOKENS, "samples": BATCH})
    of_tokens = asked["tokens"] // runs[LENGTH]
    return of_tokens.fillna(asked["samples"]).fillna(0).astype(int)


def _precision_axis(runs: pd.DataFrame) -> pd.Series:
    """Return the precision that was asked for instead of the variant's, 'own' without such."""
    precisions = {name: variant.settings.precision for name, variant in VARIANTS.items()}
    of_variant = runs["spec.variant"].map(precisions)
    asked = runs["spec.settings.precision"]
    return asked.where(of_variant.notna() & (asked != of_variant), "own")


def _training_axis(runs: pd.DataFrame) -> pd.Series:
    """Return epochs and learning rate as '3 epochs at 0.0002', without epochs where steps count."""
    epochs = runs[EPOCHS].map("{:g} epochs at ".format, na_action="ignore")
    epochs = epochs.replace("1 epochs at ", "1 epoch at ")
    return epochs.fillna("") + runs[RATE].map("{:g}".format)


def numbers(runs: pd.DataFrame, columns: dict[str, str]) -> pd.DataFrame:
    """Return columns of runs as floats under new names, {new name: column}.

    A column that no record has is NaN.
    """
    found = runs.reindex(columns=list(columns.values()))
    return found.set_axis(list(columns), axis=1).astype(float)


# Which runs count.


def select(runs: pd.DataFrame, group: str) -> pd.DataFrame:
    """Return the runs of one group that count, sorted by when they began.

    For each variant, seed, data and value of the axes one run counts: the newest that ended ok, or
    the newest of all where none did. All that ended ok must agree in IDENTITY. A run that did not
    end ok is left out where it differs from them, for example by its data. Runs without a score may
    have been timed for different numbers of steps: that changes no speed.

    Raises NotMeasured for a group without records, and ReportError for one whose runs do not agree.
    """
    chosen = runs[runs["group"] == group]
    if chosen.empty:
        known = ", ".join(sorted(set(runs["group"]))) or "none; make quickstart makes cpu-smoke"
        raise NotMeasured(f"group {group!r} has no records (groups with records: {known})")
    newest = _newest(chosen)
    is_ok = newest["status"] == "ok"
    # Where none ended ok, all are compared with each other.
    compared = newest[is_ok] if is_ok.any() else newest
    must_agree = [name for name in newest if name.startswith(IDENTITY) and name not in OF_AXES]
    if not newest[SCORED].eq(True).any():
        must_agree = [name for name in must_agree if name != STEPS]
    is_comparable = pd.Series(True, newest.index)
    for column in must_agree:
        _check_equal(compared, column, group)
        is_comparable &= newest[column].isin(compared[column])
    return newest[is_comparable].sort_values(["time.started", "run_id"], ignore_index=True)


def _newest(runs: pd.DataFrame) -> pd.DataFrame:
    """Return of runs that repeat each other the newest that ended ok, else the newest of all."""
    # Those that ended ok are sorted to the end, so that the last of equal ones is one of them.
    is_ok = runs["status"] == "ok"
    by_age = runs.assign(is_ok=is_ok).sort_values(["is_ok", "time.started", "run_id"])
    what_is_repeated = ["spec.variant", "spec.seed", "data.sha256", *AXES]
    return by_age.drop_duplicates(what_is_repeated, keep="last").drop(columns="is_ok")


def _check_equal(runs: pd.DataFrame, column: str, group: str) -> None:
    """Raise ReportError if a column differs among runs of a group.

    They come in the order in which they began; the message names one that differs from the first.
    """
    is_as_the_oldest = runs[column].isin(runs[column].head(1))
    if is_as_the_oldest.all():
        return
    old = runs[is_as_the_oldest]
    new = runs[~is_as_the_oldest].iloc[0]
    raise ReportError(
        f"group {group!r} mixes runs that cannot be compared: {column} is {new[column]!r} in "
        f"{new['run_id']}, and {old[column].iloc[0]!r} in the older {', '.join(old['run_id'])}; "
        "move their folders or lines away"
    )


def select_or_empty(runs: pd.DataFrame, group: str) -> pd.DataFrame:
    """Return what `select` does, and for a group without records a DataFrame without rows."""
    if (runs["group"] == group).any():
        return select(runs, group)
    return runs[:0]


def own_or_all(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs that lie in folders, which are the user's own; all runs where none does."""
    is_own = [run.folder is not None for run in runs["run"]] if len(runs) else []
    return runs[is_own] if any(is_own) else runs


def groups_by_age(runs: pd.DataFrame) -> list[str]:
    """Return the groups in the order in which their latest runs began, the newest last.

    Groups of a search are left out.
    """
    if runs.empty:
        return []
    began = runs.groupby("group")["time.started"].max()
    return list(began.drop(list(search_groups(runs))).sort_values().index)


def search_groups(runs: pd.DataFrame) -> set[str]:
    """Return the groups of a search (`max-batch`, `tune`), whose variants are not compared."""
    if runs.empty:
        return set()
    return set(runs.loc[runs["spec.search"] != "", "group"])


def committed_groups(runs_dir: Path) -> list[str]:
    """Return the archived groups of a folder that git tracks, the only ones README.md may quote.

    Raises ReportError without git.
    """
    command = ["git", "-C", str(runs_dir), "ls-files", "-z", "--", "*.jsonl"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as problem:
        raise ReportError(
            f"cannot ask git which groups of {runs_dir} are committed: {problem}"
        ) from problem
    return sorted(Path(name).stem for name in listed.stdout.split("\0") if name)


def groups_of(runs: pd.DataFrame) -> str:
    """Return the groups of runs in words: 'group a', 'groups a and b'."""
    names = list(dict.fromkeys(runs["group"]))
    return f"group{'s' if len(names) > 1 else ''} {' and '.join(names)}"


def purpose(runs: pd.DataFrame) -> str:
    """Return what the runs of one group are evidence for, by their preset or search.

    Where none is known it is the preset's name.
    """
    first = runs.iloc[0]
    kind = first["spec.search"] or first["spec.preset.name"]
    return PURPOSES.get(kind, kind)


# Which runs speak for a group.


def runs_at_preset(runs: pd.DataFrame, group: str, preset: str) -> pd.DataFrame:
    """Return the runs that count at a preset on the hardware of a group, empty where none are.

    The preset says the task, which may be another than the group's. Tries of a search never count,
    since each has settings of its own.
    """
    hardware = runs.loc[runs["group"] == group, "spec.hardware"]
    found = _outside_searches(runs, preset)
    found = found[found["spec.hardware"].isin(hardware)]
    if found.empty:
        return found
    return select(found, found["group"].iloc[0])


def nearest_runs_at_preset(runs: pd.DataFrame, group: str, preset: str) -> pd.DataFrame:
    """Return the runs that count at a preset on the nearest hardware that has any, else none.

    The hardware of the group comes first, then that of the reference group, then that of the group
    with the most runs at the preset. Other groups than the given one count only where their
    baseline has run, since all ratios are to it.
    """
    is_baseline = runs["spec.variant"].isin(BASELINES.values())
    has_baseline = is_baseline.groupby(runs["group"]).transform("any")
    usable = runs[has_baseline | (runs["group"] == group)]
    for near in (group, REFERENCE):
        found = runs_at_preset(usable, near, preset)
        if len(found):
            return found
    elsewhere = _outside_searches(usable, preset)
    if elsewhere.empty:
        return elsewhere
    return select(elsewhere, elsewhere["group"].mode()[0])


def _outside_searches(runs: pd.DataFrame, preset: str) -> pd.DataFrame:
    """Return the runs at a preset that are no tries of a search."""
    return runs[(runs["spec.preset.name"] == preset) & (runs["spec.search"] == "")]


def judging_runs(runs: pd.DataFrame, group: str) -> pd.DataFrame:
    """Return the runs whose scores say what the variants of a group are worth.

    These are runs of the group's task at preset `quality`, which trains long enough for a score
    that means something: on the same hardware, and where the group has no score of its own, on
    other hardware too, as any score is better than none. A score does not depend on the card, so
    that variants without one there are judged by the same training on another card. Without such
    runs they are the group's own.
    """
    own = select(runs, group)
    of_task = runs[runs["task.name"] == own["task.name"].iloc[0]]
    score = numbers(own, {"score": f"quality.{own['task.metric'].iloc[0]}"})["score"]
    if score.notna().any():
        found = runs_at_preset(of_task, group, "quality")
    else:
        found = nearest_runs_at_preset(of_task, group, "quality")
    if found.empty:
        return own
    return pd.concat([found, _scored_elsewhere(of_task, found)], ignore_index=True)


def _scored_elsewhere(runs: pd.DataFrame, found: pd.DataFrame) -> pd.DataFrame:
    """Return runs of variants that `found` lacks, which ended ok on other cards.

    They are of its model and data, and of those that repeat each other the newest.
    """
    others = _outside_searches(runs, found["spec.preset.name"].iloc[0])
    others = others[others["status"] == "ok"]
    is_new = ~others["spec.variant"].isin(found["spec.variant"])
    is_new &= ~others["spec.hardware"].isin(found["spec.hardware"])
    for name in ("model.revision", "data.sha256"):
        is_new &= others[name].isin(found[name].dropna())
    # A group names its data by itself.
    names = found.drop_duplicates("data.sha256").set_index("data.sha256")["data"]
    chosen = _newest(others[is_new])
    return chosen.assign(data=chosen["data.sha256"].map(names))


# Which runs may be compared.


def most_alike(table: pd.DataFrame) -> pd.DataFrame:
    """Return the most runs, or lines of `summary`, that agree in all axes but the micro-batch.

    The micro-batch may differ, since it changes speed and memory alone, and readers choose it. It
    is the `largest` of such parts.
    """
    return largest(alike(table, [*AXES]), table)


def usual_conditions(table: pd.DataFrame) -> pd.DataFrame:
    """Return the runs, or lines of `summary`, that a group is told by.

    They agree in all axes but the micro-batch. Where a group has changed its data, they are on data
    on which both the baseline and the recommended variant ran, as a report compares these. The
    `largest` of several such parts is taken.
    """
    on_any_data = alike(table, [name for name in AXES if name != "data"])
    by_data = alike(largest(on_any_data, table), ["data"])
    if len(by_data) > 1:
        with_both = [part for part in by_data if {baseline(part), RECOMMENDED} <= _variants(part)]
        by_data = with_both or by_data
    return largest(by_data, table)


def largest(parts: list[pd.DataFrame], table: pd.DataFrame) -> pd.DataFrame:
    """Return the longest of the parts of a table, and the table itself where it has none.

    Of several it is the first in the order of the axes' values, as `alike` returns them. Not the
    newest: lines of `summary` have no time, and a group's lines are to be of the same part as its
    runs.
    """
    return max(parts, key=len, default=table)


def alike(table: pd.DataFrame, axes: Sequence[str]) -> list[pd.DataFrame]:
    """Return the parts of a table that agree in those axes that it has, but the micro-batch.

    They are in the order of the axes' values.
    """
    known = [name for name in axes if name in table and name != "micro_batch"]
    return [part for _, part in table.groupby(known, dropna=False)] if known else [table]


def _variants(table: pd.DataFrame) -> set[str]:
    """Return the variants of runs, or of lines of `summary`."""
    return set(table["variant" if "variant" in table else "spec.variant"])


def on_other_data(runs: pd.DataFrame) -> str:
    """Return what else a group ran, on data other than those that it is told by, in a sentence.

    An empty text where there is nothing.
    """
    done = runs[runs["status"] == "ok"]
    others = done[~done["data"].isin(usual_conditions(runs)["data"])]
    if others.empty:
        return ""
    names = ", ".join(sorted(set(others["data"])))
    last = others["time.started"].max()[:10]
    return f"Not counted here: {len(others)} runs on other data ({names}), the last of {last}"


def largest_micro_batch(table: pd.DataFrame) -> pd.DataFrame:
    """Return those of the `usual_conditions` with the largest micro-batch.

    It keeps the GPU busiest.
    """
    usual = usual_conditions(table)
    return usual[usual["micro_batch"] == usual["micro_batch"].max()]


def found_compiled(runs: pd.DataFrame) -> pd.Series:
    """Return which runs found code that an earlier one had compiled, as booleans.

    The compiler's cache says so, or compiling took less than COLD_COMPILE_S, since an earlier run
    of the same process had done it.
    """
    told = runs.reindex(columns=["time.compile_cached", "time.compile_s"])
    was_cached = told["time.compile_cached"].eq(True)
    return was_cached | (told["time.compile_s"].astype(float) < COLD_COMPILE_S)


def sittings(runs: pd.DataFrame, keys: Sequence[str] = ("spec.variant",)) -> pd.Series:
    """Return the set of sittings in which each variant was timed, indexed by these columns."""
    timed = runs[runs["speed.samples_per_s"].notna()]
    return timed.groupby([*keys])["sitting"].agg(frozenset)


def share_a_sitting(found: pd.Series, variant: str) -> pd.Series:
    """Return which variants were timed in a sitting in which another one was.

    `found` are the sittings of each, indexed by variant.
    """
    return ~found.map(found[variant].isdisjoint)


def timed_in_other_sittings(runs: pd.DataFrame) -> list[str]:
    """Return the variants that were timed in no sitting in which the baseline was.

    Such runs were made on another day, and perhaps on a host that launches kernels faster or
    slower. Without a timed baseline there are none.
    """
    found = sittings(runs)
    if baseline(runs) not in found:
        return []
    together = share_a_sitting(found, baseline(runs))
    return [name for name in VARIANTS if name in found and not together[name]]


def on_cpu(runs: pd.DataFrame) -> bool:
    """Return whether a group's runs had no GPU."""
    return len(runs) > 0 and bool(runs["spec.hardware"].eq("cpu").all())


def baseline(table: pd.DataFrame) -> str:
    """Return the variant that ratios and differences of runs or lines refer to: their task's."""
    task = table["task.name"].iloc[0] if len(table) else "qa"
    return BASELINES.get(task, BASELINES["qa"])


def is_parallel(variants: pd.Series) -> pd.Series:
    """Return which variants are for several processes.

    They are compared with their like on one GPU (see `scaling.one_gpu`).
    """
    parallel = {name: variant.settings.parallel for name, variant in VARIANTS.items()}
    return variants.isin(VARIANTS) & (variants.map(parallel) != "none")


def trains_all(variants: pd.Series) -> pd.Series:
    """Return which variants train every parameter."""
    trainable = {name: variant.settings.trainable for name, variant in VARIANTS.items()}
    return variants.map(trainable) == "all"


# Order and code.


def table_order(names: pd.Index | pd.Series) -> pd.Index | pd.Series:
    """Return keys by which names sort in the order of the variants table, unknown names last.

    pandas takes this function as the `key` of its sorting.
    """
    places = {name: place for place, name in enumerate(VARIANTS)}
    return names.map(lambda name: (places.get(name, len(places)), name))


def in_table_order(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table that is indexed by variant in the order of the variants table."""
    return table.sort_index(key=table_order, kind="stable")


def commits(runs: pd.DataFrame) -> str:
    """Return the versions of the code that runs are of: 'a1b2c3d, e4f5a6b with changes'.

    Commits between which the code is equal are one version, which has the name of that commit whose
    hash sorts first.
    """
    names = runs["code.commit"].fillna("unknown").str[:7]
    is_changed = runs["code.dirty"].eq(True)
    names = names.mask(is_changed, names + " with changes")
    of_equal_code = names.groupby(_digests(runs)).transform("min")
    return ", ".join(sorted(set(of_equal_code.fillna(names))))
