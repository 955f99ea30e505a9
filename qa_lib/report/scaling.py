"""What several GPUs come to: speed against one GPU, and what it costs in waiting and memory.

Two questions may be asked of n GPUs. *Strong* scaling keeps the effective batch and asks how much sooner it is done;
the share of each GPU shrinks, and with it its matrix products. *Weak* scaling keeps what a GPU does in a step, so that
the effective batch grows, which costs progress by feature (slides.py). The efficiency of either is the speed of n GPUs
over n times that of one, which works alone on the same batch, or on one GPU's share of it.

The one GPU runs the row that shares nothing: the nearest ancestor of parallel `none`, at the micro-batch at which it is
quickest, since nobody would take a slower one. Where that has no record, it is the row itself in one process.
"""

import math

import pandas as pd

from qa_lib.report.quality import FULL_EPOCHS, FULL_FEATURES
from qa_lib.report.runs import NotMeasured, found_compiled, on_cpu, several
from qa_lib.report.tables import interval, place
from qa_lib.report.text import MISSING, number, say, share
from qa_lib.variants import VARIANTS

WHERE = ["variant", "world", "stages"]  # a row, and the GPUs that it ran on
KEYS = [*WHERE, "batch", "micro_batch"]  # what tells lines apart, beside what _alike keeps
MEASURES = {
    "rate": "speed.samples_per_s",
    "step_ms": "time.step_ms.median",
    "busy_ms": "parallel.busy_ms",
    "exposed_ms": "parallel.exposed_ms",
    "bubble": "parallel.bubble",
    "bubble_formula": "parallel.bubble_formula",
    "allreduce_gbs": "parallel.allreduce_gbs",
    "utilisation": "speed.gpu_busy",
    "equal": "parallel.weights_equal",
    "learnt": "parallel.efficiency",
    "goodput": "parallel.goodput",
}
STEPS = r"parallel\.rank_step_ms\.\d+"
COMPUTING = r"parallel\.rank_computing_ms\.\d+"
PEAKS = r"memory\.peak_alloc_mib|parallel\.rank_peak_mib\.\d+"
SHOWN = "P-one-bucket"  # the row that titles speak of, where it was run


def one_gpu(variant: str) -> str:
    """The row that a row for several GPUs is compared with: its nearest ancestor of parallel `none`."""
    row = VARIANTS[variant]
    return one_gpu(row.parent) if row.settings.parallel != "none" else variant


def scaling(runs: pd.DataFrame) -> pd.DataFrame:
    """A group's runs that ended ok, averaged over seeds: a line for each of KEYS, in the order of the variants table.

    Columns: KEYS, n, `rate` (features/s of all GPUs) and `rate±`, the others of MEASURES, peak_mib (of the process with
    the most), apart (the share by which the median step of the slowest process is longer than that of the fastest),
    unbalanced (the same of how long a pipeline's processes compute in a step), waiting_ms (a step's milliseconds in
    which a GPU only communicates, which includes waiting for others in it, exposed_ms, or a pipeline's bubble; NaN
    where neither was measured), `strong`, `strong±`, `weak`, `weak±` (shares; ± over equal seeds where both rows have
    the same ones) and reference, the row that was the one GPU, or "A1, P1" if that of `weak` was another, each with "of
    another day" where it ran by other code. Raises NotMeasured for runs without any for several GPUs.
    """
    done = _alike(runs[(runs["status"] == "ok") & runs["spec.variant"].isin(VARIANTS)])
    if not several(done).any():
        raise NotMeasured("no run of a row for several GPUs (family P) has ended ok")
    values = done.reindex(columns=MEASURES.values()).set_axis([*MEASURES], axis="columns").astype(float)
    values["peak_mib"] = done.filter(regex=f"^({PEAKS})$").astype(float).max(axis="columns")
    steps = done.filter(regex=f"^{STEPS}$").astype(float)
    values["apart"] = steps.max(axis="columns") / steps.min(axis="columns") - 1
    computing = done.filter(regex=f"^{COMPUTING}$").astype(float)
    values["unbalanced"] = computing.max(axis="columns") / computing.min(axis="columns") - 1
    keys = done.rename(columns={"spec.variant": "variant", "spec.seed": "seed"})[[*KEYS, "seed"]]
    values = values.set_index(pd.MultiIndex.from_frame(keys)).sort_index()
    rows = values.groupby(level=KEYS)
    lines = rows.mean().assign(**{"n": rows.size(), "rate±": interval(rows["rate"]), "equal": rows["equal"].min()})
    order = {"key": lambda column: column.map(place) if column.name == "variant" else column}
    lines = lines.reset_index().sort_values(KEYS, **order)
    alone = lines["exposed_ms"].where(lines["world"] > 1, 0.0)
    lines["waiting_ms"] = (lines["bubble"] * lines["step_ms"]).fillna(alone)
    timed = values[["rate"]].assign(code=done["code.commit"].set_axis(pd.MultiIndex.from_frame(keys)).sort_index())
    compared = [_compared(timed, line) for line in lines.itertuples()]
    return lines.reset_index(drop=True).join(pd.DataFrame(compared))


def _alike(runs: pd.DataFrame) -> pd.DataFrame:
    """Of runs those that agree with the most others in model, precision, length and training."""
    parts = [part for _, part in runs.groupby(["model", "precision", "length", "training"], dropna=False)]
    return max(parts, key=len, default=runs)


def _compared(timed: pd.DataFrame, line) -> dict:
    """strong, weak and their intervals of a line, and the rows that were the one GPU; without intervals where these are
    of other code, since between days and hosts more differs than seeds tell."""
    own, found, rows = timed.loc[tuple(getattr(line, key) for key in KEYS)], {}, []
    for name, batch in (("strong", line.batch), ("weak", line.batch / line.world)):
        row, alone = _alone(timed, line.variant, batch)
        ideal, together = line.world * alone["rate"], set(own["code"]) == set(alone["code"])
        found |= {name: own["rate"].mean() / ideal.mean(), f"{name}±": math.nan}
        if together and own.index.equals(alone.index):
            found[f"{name}±"] = float(interval(own["rate"] / ideal))
        rows += [row if together else f"{row} of another day"] if row else []
    return found | {"reference": ", ".join(dict.fromkeys(rows))}


def _alone(timed: pd.DataFrame, variant: str, batch: float) -> tuple[str | None, pd.DataFrame]:
    """The row that is a row's one GPU at that batch, and its features/s and code by seed; without any if nothing was
    run, or if the row is no row for several GPUs."""
    timed = timed.dropna(subset="rate")
    alone = timed[(timed.index.get_level_values("world") == 1) & (timed.index.get_level_values("batch") == batch)]
    for row in (one_gpu(variant), variant) if one_gpu(variant) != variant else ():
        if row in alone.index.get_level_values("variant"):
            sizes = alone.loc[row]
            quickest = sizes["rate"].groupby(level="micro_batch").mean().idxmax()
            return row, sizes.xs(quickest, level="micro_batch").droplevel(["world", "stages", "batch"])
    return None, timed[:0].droplevel(KEYS)


SPEED = {  # heading -> text of a line
    "row": lambda line: line["variant"],
    "GPUs": lambda line: str(line["world"]),
    "stages": lambda line: str(line["stages"]) if line["stages"] > 1 else MISSING,
    "batch": lambda line: str(line["batch"]),
    "micro-batch": lambda line: str(line["micro_batch"]),
    "n": lambda line: str(line["n"]),
    "features/s": lambda line: number(line["rate"], line["rate±"]),
    "a GPU's": lambda line: number(line["rate"] / line["world"]),
    "step ms": lambda line: number(line["step_ms"]),
    "efficiency by φ": lambda line: share(line["learnt"]),
    "goodput": lambda line: number(line["goodput"]),
    "strong": lambda line: share(line["strong"], line["strong±"]),
    "weak": lambda line: share(line["weak"], line["weak±"]),
    "one GPU": lambda line: line["reference"] or MISSING,
}
COSTS = {name: SPEED[name] for name in ("row", "GPUs", "stages", "batch", "micro-batch", "step ms")} | {
    "computes ms": lambda line: number(line["busy_ms"]),
    "waits ms": lambda line: number(line["exposed_ms"]),
    "bubble": lambda line: share(line["bubble"]),
    "by formula": lambda line: share(line["bubble_formula"]),
    "stages apart": lambda line: share(line["unbalanced"]),
    "GiB a GPU": lambda line: number(line["peak_mib"] / 1024),
    "ranks apart": lambda line: share(line["apart"]),
    "all-reduce GB/s": lambda line: number(line["allreduce_gbs"]),
    "GPU busy": lambda line: share(line["utilisation"]),
    "weights equal": lambda line: {1.0: "yes", 0.0: "NO"}.get(line["equal"], MISSING),
}


def scaling_table(lines: pd.DataFrame, columns=SPEED) -> pd.DataFrame:
    """`scaling` as text under these columns, SPEED or COSTS, without those that say nothing."""
    table = pd.DataFrame([{name: text(line) for name, text in columns.items()} for line in lines.to_dict("records")])
    return table.loc[:, (table != MISSING).any()]


def worded(text: str, runs: pd.DataFrame) -> str:
    """A text about GPUs: on a CPU, where each would be, is a process."""
    return text.replace("GPUs", "processes").replace("GPU", "process") if on_cpu(runs) else text


def speed_table(runs: pd.DataFrame) -> pd.DataFrame:
    """The speed of a group's rows on one GPU and on several, as text. Raises NotMeasured."""
    return scaling_table(scaling(runs)).rename(columns=lambda heading: worded(heading, runs))


def cost_table(runs: pd.DataFrame) -> pd.DataFrame:
    """What they wait for, and what memory they take, as text. Raises NotMeasured."""
    return scaling_table(scaling(runs), COSTS).rename(columns=lambda heading: worded(heading, runs))


def strong_batches(lines: pd.DataFrame) -> list[int]:
    """The effective batches at which rows for several GPUs have an efficiency, that with the most such lines first."""
    return _most(lines["batch"][lines["strong"].notna() & (lines["world"] > 1)])


def weak_batches(lines: pd.DataFrame) -> list[int]:
    """The same of features a GPU."""
    return _most((lines["batch"] / lines["world"])[lines["weak"].notna() & (lines["world"] > 1)])


def _most(sizes: pd.Series) -> list[int]:
    return [int(size) for size in sizes.sort_values().value_counts().index]


def projection(runs: pd.DataFrame) -> dict:
    """Seconds that three epochs of all of SQuAD v2 would take on the most GPUs, by the quickest row with as many
    features a GPU as most have: seconds, with features (of the three epochs), rate, compile_s (the longest of its runs,
    0 without a compiler) and cold, whether that found nothing compiled; variant, world and batch. Data and scoring are
    not counted. Raises NotMeasured."""
    lines = scaling(runs)
    sizes = weak_batches(lines)
    chosen = at(lines, weak=sizes[0]) if sizes else lines[:0]
    if chosen.empty:
        raise NotMeasured("no row has a speed on several GPUs beside its own on one")
    line = chosen.sort_values(["world", "rate"]).iloc[-1]
    done = runs[runs["status"] == "ok"].rename(columns={"spec.variant": "variant"})
    own = done[(done[KEYS] == line[KEYS]).all(axis="columns")]
    compile_s = own.reindex(columns=["time.compile_s"])["time.compile_s"].astype(float).fillna(0.0)
    cold, features = not found_compiled(own)[compile_s.idxmax()], FULL_FEATURES * FULL_EPOCHS
    seconds = features / line["rate"] + compile_s.max()
    found = {"seconds": seconds, "features": features, "compile_s": compile_s.max(), "cold": bool(cold)}
    return found | line[["variant", "world", "batch", "rate"]].to_dict()


def at(lines: pd.DataFrame, strong: int | None = None, weak: int | None = None) -> pd.DataFrame:
    """The timed lines of an effective batch, or of so many features a GPU; of each row, world and stages the
    quickest."""
    chosen = lines[lines["batch"] == (strong if weak is None else weak * lines["world"])]
    return _quickest(chosen.dropna(subset=["rate"]))


def near(lines: pd.DataFrame, batch: int) -> pd.DataFrame:
    """Of each row, world and stages the quickest of the timed lines whose effective batch is nearest to one."""
    timed = lines.dropna(subset=["rate"])
    away = (timed["batch"] - batch).abs()
    return _quickest(timed[away == away.groupby([timed[key] for key in WHERE]).transform("min")])


def _quickest(timed: pd.DataFrame) -> pd.DataFrame:
    return timed.loc[sorted(timed.groupby(WHERE)["rate"].idxmax())]


def speed_finding(lines: pd.DataFrame) -> str:
    """What the most GPUs come to at one batch and at one a GPU, of SHOWN, or else of the quickest row."""
    found = {}
    for name, sizes in (("strong", strong_batches(lines)), ("weak", weak_batches(lines))):
        chosen = at(lines, **{name: sizes[0]}) if sizes else lines[:0]
        found[name] = chosen[(chosen["world"] > 1) & chosen[name].notna()].sort_values(["world", "rate"])
    every = pd.concat(found.values())
    if every.empty:
        raise NotMeasured("no row was run on one GPU and on several at one batch, or at one batch a GPU")
    row = SHOWN if SHOWN in set(every["variant"]) else every.sort_values("rate")["variant"].iloc[-1]
    own = {name: chosen[chosen["variant"] == row].to_dict("records") for name, chosen in found.items()}
    return say("scaling.speed", **{name: lines[-1] if lines else None for name, lines in own.items()})


def waiting_finding(lines: pd.DataFrame) -> str:
    """The shortest and the longest waiting among lines of one batch, on the number of GPUs that most of them have."""
    found = lines.dropna(subset=["waiting_ms"])
    found = found[found["world"] > 1]
    if found.empty:
        raise NotMeasured("no run of several GPUs has its waiting measured")
    found = found[found["world"] == found["world"].mode()[0]]
    shares = found["waiting_ms"] / found["step_ms"]
    return say("scaling.waiting", most=found.loc[shares.idxmax()].to_dict(), least=found.loc[shares.idxmin()].to_dict())


def is_pipeline(variant: str) -> bool:
    """Whether a row divides the layers, into as many stages as it was asked for."""
    return VARIANTS[variant].settings.parallel == "pipeline"
