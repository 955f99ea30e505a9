"""How speed scales with GPUs (notebooks/multi_gpu.ipynb).

Two questions may be asked of n GPUs. *Strong* scaling keeps the effective batch and asks how much
sooner it is done; the share of each GPU shrinks, and with it its matrix products. *Weak* scaling
keeps what a GPU does in a step, so that the effective batch grows, which costs progress by sample.
The efficiency of either is the speed of n GPUs over n times that of one, which works alone on the
same batch, or on one GPU's share of it.

The one GPU runs the variant that shares nothing: the nearest ancestor of parallel `none`, at the
micro-batch at which it is quickest, since nobody would take a slower one.
Where that has no record, it is the variant in one process.
"""

import math
from typing import Any, Literal

import pandas as pd

from qa_lib.lab.report import evidence
from qa_lib.lab.report.format import factor, number, percent
from qa_lib.lab.report.stats import interval
from qa_lib.lab.report.summary import average
from qa_lib.lab.report.tables import Column, render
from qa_lib.spec.variants import VARIANTS, tagged

Kind = Literal["strong", "weak"]

WHERE = ["variant", "world", "stages"]  # a variant, and the GPUs that it ran on
KEYS = [*WHERE, "batch", "micro_batch"]  # what tells lines apart

# What `scaling` averages over seeds: its name there -> the column of runs.
MEASURES = {
    "speed": "speed.samples_per_s",
    "step_ms": "time.step_ms.median",
    "gpu_busy": "speed.gpu_busy",
    "busy_ms": "parallel.busy_ms",
    "exposed_ms": "parallel.exposed_ms",
    "allreduce_gbs": "parallel.allreduce_gbs",
    "bubble": "parallel.bubble",
    "bubble_formula": "parallel.bubble_formula",
    "efficiency": "parallel.efficiency",
    "goodput": "parallel.goodput",
}
# Patterns of the columns of runs that hold the peak memory of a run's processes.
PEAKS = r"memory\.peak_alloc_mib|parallel\.rank_peak_mib\.\d+"
# How far the processes of a run lie apart: its name in `scaling` -> the columns that hold each's.
SPREADS = {
    "apart": r"parallel\.rank_step_ms\.\d+",
    "unbalanced": r"parallel\.rank_computing_ms\.\d+",
}


def one_gpu(variant: str) -> str:
    """Return the variant that one for several GPUs is compared with.

    It is the nearest ancestor of parallel `none`, which is the variant itself where it is so.
    """
    while VARIANTS[variant].settings.parallel != "none":
        variant = VARIANTS[variant].parent
    return variant


def worded(text: str, runs: pd.DataFrame) -> str:
    """Return a text about GPUs, which on a CPU is one about processes."""
    if evidence.on_cpu(runs):
        return text.replace("GPUs", "processes").replace("GPU", "process")
    return text


# Efficiencies.


def scaling(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a group's runs that ended ok, averaged over seeds: a line for each of KEYS.

    Only runs of the model, data, precision, length and training that most have count. Lines are in
    the order of the variants table. Columns:

    - KEYS and n, the number of runs
    - those of MEASURES, with intervals `NAME±`; speed is the samples/s of all GPUs together
    - peak_mib: the peak of the process with the most
    - apart: the share by which the median step of the slowest process is longer than that of the
      fastest
    - unbalanced: the same of how long a pipeline's processes compute in a step
    - waiting_ms: the milliseconds of a step in which a GPU only communicates, or a pipeline's
      bubble; NaN where neither was measured
    - strong and weak, the efficiencies, as shares; `strong±` and `weak±` where both variants have
      the same seeds
    - lost_ms: the milliseconds by which a median step takes longer than on the one GPU of `weak`
    - reference: the variant that was the one GPU, or two if that of `weak` was another; with "of
      another day" where it ran by other code

    Raises NotMeasured where no run of a variant for several GPUs has ended ok.
    """
    values = by_seed(runs)
    lines = average(values.drop(columns=["code", "run_id"]), KEYS).sort_index().reset_index()
    lines = evidence.in_table_order(lines.set_index("variant")).reset_index()
    bubble_ms = lines["bubble"] * lines["step_ms"]
    # One GPU has nobody to communicate with.
    exposed_ms = lines["exposed_ms"].where(lines["world"] > 1, 0.0)
    lines["waiting_ms"] = bubble_ms.fillna(exposed_ms)
    timed = values[["speed", "step_ms", "code"]]
    return lines.join(pd.DataFrame([_efficiencies(timed, line) for _, line in lines.iterrows()]))


def by_seed(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the values that `scaling` averages, `code` and `run_id`, indexed by KEYS and seed.

    They are of the most runs that agree in model, data, precision, length and training
    (`evidence.largest`).

    Raises NotMeasured where no run of a variant for several GPUs has ended ok.
    """
    done = runs[(runs["status"] == "ok") & runs["spec.variant"].isin(VARIANTS)]
    parts = evidence.alike(done, ["model", "data", "precision", "length", "training"])
    done = evidence.largest(parts, done)
    if not evidence.is_parallel(done["spec.variant"]).any():
        raise evidence.NotMeasured("no run of a variant for several GPUs (family P) has ended ok")
    values = evidence.numbers(done, MEASURES)
    peaks = done.filter(regex=f"^({PEAKS})$").astype(float)
    values["peak_mib"] = peaks.max(axis="columns")
    for name, pattern in SPREADS.items():
        of_processes = done.filter(regex=f"^{pattern}$").astype(float)
        slowest = of_processes.max(axis="columns")
        values[name] = slowest / of_processes.min(axis="columns") - 1
    values["code"] = done["code"]
    values["run_id"] = done["run_id"]
    keys = done.rename(columns={"spec.variant": "variant", "spec.seed": "seed"})
    index = pd.MultiIndex.from_frame(keys[[*KEYS, "seed"]])
    return values.set_index(index).sort_index()


def _efficiencies(timed: pd.DataFrame, line: pd.Series) -> dict[str, Any]:
    """Return efficiencies, their intervals, lost_ms and reference of a line of `scaling`.

    `timed` has samples/s, ms and code by KEYS and seed. There is no interval where the one GPU ran
    by other code, since between days and hosts more differs than seeds tell.
    """
    several = timed.loc[tuple(line[KEYS])]
    columns: dict[str, Any] = {}
    references: list[str] = []
    for kind, batch in (("strong", line["batch"]), ("weak", line["batch"] / line["world"])):
        reference, alone = _alone(timed, line["variant"], batch)
        ideal = line["world"] * alone["speed"]
        is_same_code = set(several["code"]) == set(alone["code"])
        columns[kind] = several["speed"].mean() / ideal.mean()
        columns[f"{kind}±"] = math.nan
        if is_same_code and several.index.equals(alone.index):
            columns[f"{kind}±"] = float(interval(several["speed"] / ideal))
        if reference is not None:
            references.append(reference if is_same_code else f"{reference} of another day")
        if kind == "weak":
            columns["lost_ms"] = several["step_ms"].mean() - alone["step_ms"].mean()
    columns["reference"] = ", ".join(dict.fromkeys(references))
    return columns


def _alone(timed: pd.DataFrame, variant: str, batch: float) -> tuple[str | None, pd.DataFrame]:
    """Return the variant that is another's one GPU at a batch, and its rows of `timed` by seed.

    They are those of the micro-batch at which it is quickest. Returns None and no rows where
    nothing was run so, or if the variant itself is for one GPU.
    """
    timed = timed.dropna(subset="speed")
    nothing = timed[:0].droplevel(KEYS)
    if one_gpu(variant) == variant:
        return None, nothing
    is_alone = timed.index.get_level_values("world") == 1
    is_of_batch = timed.index.get_level_values("batch") == batch
    alone = timed[is_alone & is_of_batch]
    for name in (one_gpu(variant), variant):
        if name in alone.index.get_level_values("variant"):
            of_variant = alone.loc[name]
            speeds = of_variant["speed"].groupby(level="micro_batch").mean()
            quickest = of_variant.xs(speeds.idxmax(), level="micro_batch")
            return name, quickest.droplevel(["world", "stages", "batch"])
    return None, nothing


# What a step consists of.

PARTS = ("computing", "communicating", "bubble", "idle")


def step_shares(lines: pd.DataFrame) -> pd.DataFrame:
    """Return which share of a step each of PARTS takes, at each batch on as many GPUs.

    A line has WHERE, batch and PARTS. Lines of `scaling` of which waiting was measured count, each
    variant at the micro-batch at which it is quickest, and where two or more variants can be
    compared. They are sorted by batch, GPUs and the share that computes, the largest first.

    Raises NotMeasured where no two variants have their waiting measured at one batch.
    """
    told = lines[evidence.is_parallel(lines["variant"])].dropna(subset=["step_ms", "waiting_ms"])
    quickest = told.groupby([*WHERE, "batch"])["speed"].idxmax()
    told = told.loc[sorted(quickest)].reset_index(drop=True)
    told = told[told.groupby(["batch", "world"])["variant"].transform("size") > 1]
    if told.empty:
        raise evidence.NotMeasured(
            "no two variants for several GPUs have their waiting measured at one batch"
        )
    table = told[[*WHERE, "batch"]].join(shares_of(told))
    order = ["batch", "world", "computing"]
    return table.sort_values(order, ascending=[True, True, False], ignore_index=True)


def shares_of(lines: pd.DataFrame) -> pd.DataFrame:
    """Return which share of a step each of PARTS takes, for lines of `scaling`, by their index.

    What a GPU computes and waits is of other steps than the step's duration, so that the parts are
    shares of their sum. They are NaN for a line of which step or waiting was not measured.
    """
    is_pipeline = lines["variant"].map(lambda name: VARIANTS[name].settings.parallel) == "pipeline"
    not_waiting_ms = lines["step_ms"] - lines["waiting_ms"]
    # A pipeline's waiting was measured, and not what its stages compute.
    computing_ms = lines["busy_ms"].mask(is_pipeline).fillna(not_waiting_ms)
    parts = pd.DataFrame(
        {
            "computing": computing_ms,
            "communicating": lines["waiting_ms"].mask(is_pipeline),
            "bubble": lines["waiting_ms"].where(is_pipeline),
            "idle": (not_waiting_ms - computing_ms).clip(lower=0.0),
        }
    ).fillna(0.0)
    shares = parts.div(parts.sum(axis="columns"), axis="index")
    return shares[not_waiting_ms.notna()].reindex(lines.index)


def waiting_finding(shares: pd.DataFrame) -> str:
    """Return between which shares of a step a GPU computes, where most variants are compared."""
    parts = [part for _, part in shares.groupby(["batch", "world"])]
    most = max(parts, key=len).set_index("variant")
    batch, world = most[["batch", "world"]].iloc[0]
    computing = most["computing"]
    return (
        f"With {batch:,} samples a step on {world} GPUs, a GPU computes for "
        f"{percent(computing.min())} ({computing.idxmin()}) to {percent(computing.max())} "
        f"({computing.idxmax()}) of it"
    )


# Lines that are compared.


# How many sizes of each kind are drawn, and told of.
SHOWN: dict[Kind, int] = {"weak": 1, "strong": 2}


def shown_sizes(lines: pd.DataFrame, kind: Kind) -> list[int]:
    """Return those of the `common` sizes of a kind that a figure has a panel for."""
    return common(lines, kind)[: SHOWN[kind]]


def common(lines: pd.DataFrame, kind: Kind) -> list[int]:
    """Return the sizes at which lines of several GPUs have an efficiency of a kind.

    The sizes are effective batches (`strong`) or samples a GPU (`weak`). That with the most such
    lines comes first.
    """
    compared = lines[lines[kind].notna() & (lines["world"] > 1)]
    sizes = compared["batch"] if kind == "strong" else compared["batch"] / compared["world"]
    return [int(size) for size in sizes.sort_values().value_counts().index]


def at(lines: pd.DataFrame, kind: Kind, size: int) -> pd.DataFrame:
    """Return the timed lines of an effective batch (`strong`), or of so many samples a GPU
    (`weak`), for each variant, world and stages the quickest."""
    batch = size if kind == "strong" else size * lines["world"]
    of_size = lines[lines["batch"] == batch].dropna(subset=["speed"])
    quickest = of_size.groupby(WHERE)["speed"].idxmax()
    return of_size.loc[sorted(quickest)]


def speed_finding(lines: pd.DataFrame) -> str:
    """Return how much quicker the most GPUs are than one, as '4 GPUs train ×3.16 as fast as ...'.

    It is told at as many samples a GPU and at as many in all, for each of the `shown_sizes` at
    which that was measured. The variant is the quickest with the tag `headline`, and the quickest
    of all without any of these.

    Raises NotMeasured without an efficiency.
    """
    compared = [
        (kind, size, _compared(lines, kind, size))
        for kind in SHOWN
        for size in shown_sizes(lines, kind)
    ]
    every = pd.concat([lines[:0], *(part for _, _, part in compared)])
    if every.empty:
        raise evidence.NotMeasured(
            "no variant was run on one GPU and on several at one batch, or at one batch a GPU"
        )
    of_headline = every[every["variant"].isin(tagged("headline"))]
    candidates = every if of_headline.empty else of_headline
    variant, world = candidates.sort_values("speed")[["variant", "world"]].iloc[-1]
    gains = []
    for kind, size, part in compared:
        is_told = (part["variant"] == variant) & (part["world"] == world)
        for efficiency in part.loc[is_told, kind]:
            gain = factor(efficiency * world)
            if not gains:
                gain += " as fast as one"
            gains.append(f"{gain} at {size} {'samples each' if kind == 'weak' else 'in all'}")
    return f"{world} GPUs train {', '.join(gains)} ({variant})"


def lost_sentence(lines: pd.DataFrame) -> str:
    """Return by how much longer a median step takes than on one GPU.

    Variants with the tag `headline` are compared, at as many samples a GPU, for each number of
    GPUs. It is empty where none was measured.
    """
    sizes = common(lines, "weak")
    if not sizes:
        return ""
    table = at(lines, "weak", sizes[0]).dropna(subset="lost_ms")
    table = table[table["variant"].isin(tagged("headline")) & (table["world"] > 1)]
    said = [
        f"{line.variant} takes {number(line.step_ms)} ms on {line.world} GPUs, "
        f"{number(line.lost_ms)} more than on one"
        for line in table.itertuples()
    ]
    if not said:
        return ""
    return f"By median steps, at {sizes[0]} samples each, {'; '.join(said)}."


def _compared(lines: pd.DataFrame, kind: Kind, size: int) -> pd.DataFrame:
    """Return the lines of several GPUs with an efficiency of a kind, at one of its sizes.

    They are sorted by GPUs and speed.
    """
    of_size = at(lines, kind, size)
    compared = of_size[(of_size["world"] > 1) & of_size[kind].notna()]
    return compared.sort_values(["world", "speed"])


def speed_table(lines: pd.DataFrame) -> pd.DataFrame:
    """Return the speed of each variant on several GPUs as text, and how many times one GPU's it is.

    `lines` are those of `scaling`. They are compared at the samples a GPU that most variants have
    run at, and sorted by speed on as many GPUs as most have run on, the quickest first. Memory and
    waiting are those on the most GPUs that a variant has run on.

    Raises NotMeasured where no variant was run on one GPU and on several.
    """
    sizes = common(lines, "weak")
    if not sizes:
        raise evidence.NotMeasured("no variant has a speed on several GPUs beside its own on one")
    compared = _compared(lines, "weak", sizes[0])
    quickest = compared.drop_duplicates(["variant", "world"], keep="last")
    quickest = quickest.assign(gain=quickest["weak"] * quickest["world"])
    speeds = quickest.pivot(index="variant", columns="world", values="speed")
    gains = quickest.pivot(index="variant", columns="world", values="gain")
    on_most = quickest.drop_duplicates("variant", keep="last").set_index("variant")
    table = speeds.add_prefix("speed_on_").join(gains.add_prefix("gain_on_"))
    table["gib"] = on_most["peak_mib"] / 1024
    table["waiting_ms"] = on_most["waiting_ms"]
    by_variants = sorted(speeds, key=lambda world: (speeds[world].count(), world), reverse=True)
    table = table.sort_values([f"speed_on_{world}" for world in by_variants], ascending=False)
    columns = [
        Column("variant"),
        *(Column(f"speed_on_{world}", f"samples/s on {world}") for world in speeds),
        *(Column(f"gain_on_{world}", f"× one GPU, on {world}", factor) for world in speeds),
        Column("gib", "peak GiB a GPU, on the most"),
        Column("waiting_ms", "waits ms, on the most"),
    ]
    return render(table.reset_index(), columns)


# A whole training.


def projection(runs: pd.DataFrame) -> dict[str, Any]:
    """Return what three epochs of all of SQuAD v2 would take on the most GPUs of a group.

    It is by the quickest variant with as many samples a GPU as most have. Data and scoring are not
    counted. Keys:

    - variant, world and batch
    - speed: samples/s
    - compile_s: the seconds that its longest compilation took, 0 without a compiler
    - cold: whether that found nothing compiled
    - seconds: those of training and compilation

    Raises NotMeasured where no variant has an efficiency.
    """
    lines = scaling(runs)
    sizes = common(lines, "weak")
    if not sizes:
        raise evidence.NotMeasured("no variant has a speed on several GPUs beside its own on one")
    line = at(lines, "weak", sizes[0]).sort_values(["world", "speed"]).iloc[-1]
    done = runs[runs["status"] == "ok"].rename(columns={"spec.variant": "variant"})
    of_line = done[(done[KEYS] == line[KEYS]).all(axis="columns")]
    compile_s = evidence.numbers(of_line, {"compile_s": "time.compile_s"})["compile_s"].fillna(0.0)
    train_s = evidence.FULL_SAMPLES * evidence.FULL_EPOCHS / line["speed"]
    return {
        "variant": line["variant"],
        "world": line["world"],
        "batch": line["batch"],
        "speed": line["speed"],
        "seconds": train_s + compile_s.max(),
        "compile_s": compile_s.max(),
        "cold": not evidence.found_compiled(of_line)[compile_s.idxmax()],
    }


def projected_words(projected: dict[str, Any]) -> str:
    """Return what `projection` returned as a sentence, with the arithmetic."""
    samples = evidence.FULL_SAMPLES * evidence.FULL_EPOCHS
    arithmetic = f"{samples:,} samples ÷ {number(projected['speed'])}/s"
    if projected["compile_s"]:
        arithmetic += f" + {number(projected['compile_s'])} s of compilation"
        if not projected["cold"]:
            arithmetic += ", which found a part of the code compiled"
    return (
        f"Three epochs of SQuAD v2 on {projected['world']} GPUs would take "
        f"{number(projected['seconds'])} s with {projected['variant']}, data and scoring not "
        f"counted: {arithmetic}."
    )
