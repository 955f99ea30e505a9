"""Records as the report reads them: one DataFrame, a line a run; which runs count, and which may be compared.

The runs of a group share hardware, preset, task and data. What may differ among them, beside the variant and the seed,
is an axis (AXES). Ratios hold only between runs that agree in every axis.
"""

import subprocess
from pathlib import Path

import pandas as pd

from qa_lib.errors import UserError
from qa_lib.records.archive import Run, read_runs, say_left_out
from qa_lib.spec.tasks import TASKS
from qa_lib.spec.variants import BASELINES, VARIANTS

# The group that README.md and the advice for a card speak of, where it is there.
REFERENCE = TASKS["qa"].reference
TASK = ["task.name", "task.metric", "task.label", "task.higher_is_better"]
LENGTH, MICRO_BATCH = "spec.preset.max_length", "spec.settings.micro_batch"
EPOCHS, RATE = "spec.preset.epochs", "spec.preset.learning_rate"
BATCH, BATCH_TOKENS = "spec.preset.effective_batch", "spec.preset.batch_tokens"


def read_table(name: str) -> pd.DataFrame:
    """A CSV file beside this one; what is empty is NaN."""
    return pd.read_csv(Path(__file__).with_name(f"{name}.csv"), comment="#")


COLUMNS, MEASURES, CARDS = map(read_table, ("columns", "measures", "cards"))
# What may differ within a group, as columns of the frame -> the name for people.
AXES = COLUMNS[COLUMNS["kind"] == "axis"].set_index("name")["heading"].to_dict()
# What must be equal within a group, or a ratio would compare different work; but for what the axes hold.
IDENTITY = (
    "spec.hardware",
    "spec.preset.",
    "spec.search",
    "spec.sm",
    "data.name",
    "data.sha256",
    *TASK[:2],
)
OF_AXES = (
    LENGTH,
    "spec.preset.stride",
    EPOCHS,
    RATE,
    BATCH,
    BATCH_TOKENS,
    "spec.preset.max_answer_length",
)  # the stride follows from the length, and an answer's from tokenizer and data where it is not asked for
FULL_SAMPLES, FULL_EPOCHS = (
    131_754,
    3,
)  # of all of SQuAD v2's training questions at 384/128; its epochs


class ReportError(UserError):
    """A report that cannot be made from these records; the message names group, file or variant."""


class NotMeasured(ReportError):
    """No record holds what a figure or sentence shows; the message says what is missing and why."""


def load_runs(runs: str | Path = "runs", left_out=say_left_out) -> pd.DataFrame:
    """Every record below `runs` (see `as_frame`), sorted by group and run. A record that cannot be
    trusted is left out, and `left_out` told of it (see `read_runs`)."""
    return as_frame(read_runs(runs, left_out=left_out))


def as_frame(found: list[Run]) -> pd.DataFrame:
    """A line a run: a column a value named by its path ('speed.samples_per_s'), `run`, the
    archive.Run, and AXES."""
    if not found:
        return pd.DataFrame(columns=["group", "status", "spec.variant", "spec.seed", *AXES])
    return with_axes(pd.json_normalize([run.record for run in found]).assign(run=found))


def with_axes(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs with the columns of AXES: `batch` in samples, 0 where a step is one micro-batch; `model` with its revision
    or, where nothing is scored, its size, as speed depends on that and not on the weights; `precision` 'own' unless
    another than the variant's was asked for; `training` as '3 epochs at 0.0002'; `world` as many as trained."""
    params = runs["model.params_total"].astype(float)
    params = params.groupby([runs["model.name"], runs["model.revision"]]).transform(
        "min"
    )  # adapters come on top
    by_revision = runs["spec.preset.quality"] | params.isna()
    revision = runs["model.revision"].str[:7].where(by_revision, params.map("of {:,.0f}".format))
    seen = numbers(
        runs,
        {
            "tokens": BATCH_TOKENS,
            "samples": BATCH,
            "world": "parallel.world",
            "stages": "spec.stages",
        },
    )
    asked = runs["spec.settings.precision"]
    own = runs["spec.variant"].map(
        {name: variant.settings.precision for name, variant in VARIANTS.items()}
    )
    epochs = (
        runs[EPOCHS]
        .map("{:g} epochs at ".format, na_action="ignore")
        .replace("1 epochs at ", "1 epoch at ")
    )
    return runs.assign(
        model=runs["model.name"] + " " + revision,
        world=seen["world"].fillna(runs["spec.world"]).astype(int),
        stages=seen["stages"].fillna(1).astype(int),
        batch=(seen["tokens"] // runs[LENGTH]).fillna(seen["samples"]).fillna(0).astype(int),
        precision=asked.where(own.notna() & (asked != own), "own"),
        length=runs[LENGTH],
        training=epochs.fillna("") + runs[RATE].map("{:g}".format),
        micro_batch=runs[MICRO_BATCH],
    )


def measures(of: str) -> dict[str, str]:
    """What a module of the report averages over seeds: name in its lines -> column of runs."""
    return MEASURES[MEASURES["of"] == of].set_index("name")["column"].to_dict()


def numbers(runs: pd.DataFrame, columns: dict[str, str]) -> pd.DataFrame:
    """Columns of runs as floats, by names of one's own {name: column}; NaN where no record has it."""
    return (
        runs.reindex(columns=list(columns.values())).set_axis(list(columns), axis=1).astype(float)
    )


def select(runs: pd.DataFrame, group: str) -> pd.DataFrame:
    """The runs of one group that count: of each variant, seed, data and value of the axes the newest that ended ok, or
    else the newest. A run that did not end ok does not count where it was of other data, say, than those that did.

    Raises NotMeasured for a group without records, and ReportError for one whose runs differ in what they should share.
    """
    chosen = runs[runs["group"] == group]
    if chosen.empty:
        known = ", ".join(sorted(set(runs["group"]))) or "none; make quickstart makes cpu-smoke"
        raise NotMeasured(f"group {group!r} has no records (groups with records: {known})")
    chosen = chosen.assign(done=chosen["status"] == "ok").sort_values(
        ["done", "time.started", "run_id"]
    )
    chosen = chosen.drop_duplicates(
        ["spec.variant", "spec.seed", "data.sha256", *AXES], keep="last"
    )
    compared = chosen[chosen["done"]] if chosen["done"].any() else chosen
    for column in (name for name in chosen if name.startswith(IDENTITY) and name not in OF_AXES):
        older = compared[column].isin(compared[column].head(1))  # the first began first
        if not older.all():
            old, new = compared[older], compared[~older].iloc[0]
            raise ReportError(
                f"group {group!r} mixes runs that cannot be compared: {column} is {new[column]!r} in {new['run_id']}, "
                f"and {old[column].iloc[0]!r} in the older {', '.join(old['run_id'])}; move their folders or lines away"
            )
        chosen = chosen[chosen[column].isin(compared[column])]
    return chosen.drop(columns="done").sort_values(["time.started", "run_id"], ignore_index=True)


def group_or_none(runs: pd.DataFrame, group: str) -> pd.DataFrame:
    """`select`, and no runs where the group has none."""
    return select(runs, group) if (runs["group"] == group).any() else runs[:0]


def own_first(runs: pd.DataFrame) -> pd.DataFrame:
    """Of runs those in folders, which are one's own; all of them where none is."""
    own = [run.folder is not None for run in runs["run"]] if len(runs) else []
    return runs[own] if any(own) else runs


def newest(runs: pd.DataFrame) -> dict[str, str]:
    """Of each group, when its latest run began; without the groups of tries (see `searches`). The newest is last."""
    began = (
        runs.groupby("group")["time.started"].max().drop(list(searches(runs)))
        if len(runs)
        else pd.Series()
    )
    return began.sort_values().to_dict()


def searches(runs: pd.DataFrame) -> set[str]:
    """The groups that hold the tries of a search (`max-batch`, `tune`), whose variants are not compared."""
    return set(runs.loc[runs["spec.search"] != "", "group"]) if len(runs) else set()


def committed(runs_dir: Path) -> list[str]:
    """The archived groups of a folder that git tracks: only those may README.md quote. Raises ReportError without
    git."""
    command = ["git", "-C", str(runs_dir), "ls-files", "-z", "--", "*.jsonl"]
    try:
        listed = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20
        ).stdout
    except (OSError, subprocess.SubprocessError) as problem:
        raise ReportError(
            f"cannot ask git which groups of {runs_dir} are committed: {problem}"
        ) from problem
    return sorted(Path(name).stem for name in listed.split("\0") if name)


def found_compiled(runs: pd.DataFrame) -> pd.Series:
    """Which runs found code that an earlier one had compiled: by the cache's word or, in one process with that run, by
    the second or less that compiling took."""
    told = runs.reindex(columns=["time.compile_cached", "time.compile_s"])
    return told["time.compile_cached"].eq(True) | (told["time.compile_s"].astype(float) < 1)


def other_days(runs: pd.DataFrame) -> list[str]:
    """The variants all of whose timed runs are of other code than the baseline's: of another day, and perhaps of a host
    that launches kernels faster or slower."""
    timed = runs[runs["speed.samples_per_s"].notna()]
    of_base = timed.loc[timed["spec.variant"] == baseline(runs), "code.commit"]
    together = timed.groupby("spec.variant")["code.commit"].agg(
        lambda code: code.isin(of_base).any()
    )
    return (
        [name for name in VARIANTS if name in together.index and not together[name]]
        if len(of_base)
        else []
    )


def on_cpu(runs: pd.DataFrame) -> bool:
    """Whether a group's runs had no GPU."""
    return len(runs) > 0 and bool(runs["spec.hardware"].eq("cpu").all())


def sibling(runs: pd.DataFrame, group: str, preset: str) -> pd.DataFrame:
    """The runs that count of a group's hardware at another preset, which may be of another task; or none."""
    found = runs[runs["spec.hardware"].isin(runs.loc[runs["group"] == group, "spec.hardware"])]
    found = found[(found["spec.preset.name"] == preset) & (found["spec.search"] == "")]
    return found if found.empty else select(found, found["group"].iloc[0])


def nearest(runs: pd.DataFrame, group: str, preset: str) -> pd.DataFrame:
    """As `sibling`, and where that has none, of the reference group's hardware, or of that with most such runs. Other
    groups than the given one count where their baseline has run, since all ratios are to it."""
    based = runs["spec.variant"].isin(BASELINES.values()).groupby(runs["group"]).transform("any")
    runs = runs[based | (runs["group"] == group)]
    found = [sibling(runs, name, preset) for name in (group, REFERENCE)]
    others = runs[(runs["spec.preset.name"] == preset) & (runs["spec.search"] == "")]
    found.append(select(others, others["group"].mode()[0]) if len(others) else others)
    return next((part for part in found if len(part)), others)


def judging(runs: pd.DataFrame, group: str) -> pd.DataFrame:
    """Of all records of its task those that say what the variants of a group are worth: of preset `quality` on the same
    hardware, or else the group's own, or where these have no score, of `quality` on other hardware."""
    own = select(runs, group)
    scores = numbers(own, {"score": f"quality.{own['task.metric'].iloc[0]}"})["score"]
    find = sibling if scores.notna().any() else nearest
    found = find(runs[runs["task.name"] == own["task.name"].iloc[0]], group, "quality")
    return own if found.empty else found


def usual(table: pd.DataFrame) -> pd.DataFrame:
    """Of runs or lines those that agree with the most others in all axes but the micro-batch."""
    axes = [name for name in AXES if name in table and name != "micro_batch"]
    return max((part for _, part in table.groupby(axes, dropna=False)), key=len, default=table)


def largest_batch(table: pd.DataFrame) -> pd.DataFrame:
    """Of runs or lines those of the usual conditions at the largest micro-batch, which keeps the GPU busiest."""
    table = usual(table)
    return table[table["micro_batch"] == table["micro_batch"].max()]


def baseline(table: pd.DataFrame) -> str:
    """The variant that ratios and differences of runs or lines refer to: their task's."""
    return BASELINES.get(table["task.name"].iloc[0] if len(table) else "qa", BASELINES["qa"])


def place(names):
    """A key that sorts names of variants in the order of the variants table, unknown ones last."""
    places = {name: place for place, name in enumerate(VARIANTS)}
    return names.map(lambda name: (places.get(name, len(places)), name))


def in_order(table: pd.DataFrame) -> pd.DataFrame:
    """A table that is indexed by variant, in the order of the variants table."""
    return table.sort_index(key=place, kind="stable")


def commits(runs: pd.DataFrame) -> str:
    """Which versions of the code the runs are of."""
    names = runs["code.commit"].fillna("unknown").str[:7]
    return ", ".join(
        sorted(set(names.where(~runs["code.dirty"].eq(True), names + " with changes")))
    )


def published() -> pd.DataFrame:
    """The reference project's numbers by variant: score, samples_per_s, peak_mib, ratio and delta, as summary has them.

    Beside them its own names.
    """
    names = {"f1": "score", "train_samples_per_s": "samples_per_s", "peak_alloc_mib": "peak_mib"}
    table = read_table("published").rename(columns=names).set_index("variant")
    base = table.loc[BASELINES["qa"]]
    return table.assign(
        ratio=table["samples_per_s"] / base["samples_per_s"], delta=table["score"] - base["score"]
    )


def is_parallel(variants: pd.Series) -> pd.Series:
    """Which variants are for several processes: they are compared with theirs on one GPU (scaling.py)."""
    return variants.map(
        {name: variant.settings.parallel != "none" for name, variant in VARIANTS.items()}
    ).eq(True)


def trains_all(variants: pd.Series) -> pd.Series:
    """Which variants train every parameter."""
    return variants.map(
        {name: variant.settings.trainable == "all" for name, variant in VARIANTS.items()}
    ).eq(True)
