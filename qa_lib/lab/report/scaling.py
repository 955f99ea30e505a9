"""How speed and memory scale: with GPUs (notebooks/multi_gpu.ipynb), with context length and batch (scaling.ipynb).

Memory is a fixed cost (weights, gradients, optimizer state) and a cost for each token of a micro-batch, which the
backward pass keeps. Both are fitted here to what was measured.

Two questions may be asked of n GPUs. *Strong* scaling keeps the effective batch and asks how much sooner it is done;
the share of each GPU shrinks, and with it its matrix products. *Weak* scaling keeps what a GPU does in a step, so that
the effective batch grows, which costs progress by sample. The efficiency of either is the speed of n GPUs over n times
that of one, which works alone on the same batch, or on one GPU's share of it.

The one GPU runs the variant that shares nothing: the nearest ancestor of parallel `none`, at the micro-batch at which
it is quickest, since nobody would take a slower one. Where that has no record, it is the variant in one process.
"""

import math
from collections.abc import Iterable

import numpy as np
import pandas as pd

from qa_lib.lab.report import evidence
from qa_lib.lab.report.format import factor, number
from qa_lib.lab.report.stats import interval
from qa_lib.lab.report.summary import average
from qa_lib.spec.presets import Preset
from qa_lib.spec.settings import Settings
from qa_lib.spec.variants import VARIANTS, tagged

REFERENCE = (
    Preset.effective_batch
)  # samples of the batch whose efficiency is 1, as in train/grad_noise.py
WHERE = ["variant", "world", "stages"]  # a variant, and the GPUs that it ran on
KEYS = [*WHERE, "batch", "micro_batch"]  # what tells lines apart
SPREADS = {
    "apart": r"parallel\.rank_step_ms\.\d+",
    "unbalanced": r"parallel\.rank_computing_ms\.\d+",
}
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
# The same of `points`.
POINT_MEASURES = {
    "gib": "memory.peak_alloc_mib",
    "speed": "speed.samples_per_s",
    "tokens": "speed.tokens_per_s_padded",
    "params": "memory.params_mib",
    "grads": "memory.grads_mib",
    "optimizer": "memory.optimizer_mib",
}
SIZES = ("length", "batch", "micro_batch")
STRAIGHT = 0.05  # a fit that misses no point by more is a straight line
PEAKS = r"memory\.peak_alloc_mib|parallel\.rank_peak_mib\.\d+"


def one_gpu(variant: str) -> str:
    """The variant that one for several GPUs is compared with: its nearest ancestor of parallel `none`."""
    found = VARIANTS[variant]
    return one_gpu(found.parent) if found.settings.parallel != "none" else variant


def scaling(runs: pd.DataFrame) -> pd.DataFrame:
    """A group's runs that ended ok, averaged over seeds: a line for each of KEYS, in the order of the variants table.

    Columns: KEYS, n, those of MEASURES (`speed`: samples/s of all GPUs) with intervals (`speed±`),
    peak_mib (of the process with the most), apart (the share by which the median step of the slowest process is longer than that of the
    fastest), unbalanced (the same of how long a pipeline's processes compute in a step), waiting_ms (a step's
    milliseconds in which a GPU only communicates, or a pipeline's bubble; NaN where neither was measured), `strong`,
    `strong±`, `weak`, `weak±` (shares; ± over equal seeds where both variants have the same ones) and reference, the
    variant that was the one GPU, or two if that of `weak` was another, each with "of another day" where it ran by other
    code. Of the model, precision, length and training of most runs. Raises NotMeasured for runs without any for several
    GPUs.
    """
    done = runs[(runs["status"] == "ok") & runs["spec.variant"].isin(VARIANTS)]
    alike = [
        part for _, part in done.groupby(["model", "precision", "length", "training"], dropna=False)
    ]
    done = max(alike, key=len, default=done)
    if not evidence.is_parallel(done["spec.variant"]).any():
        raise evidence.NotMeasured("no run of a variant for several GPUs (family P) has ended ok")
    values = evidence.numbers(done, MEASURES)
    values["peak_mib"] = done.filter(regex=f"^({PEAKS})$").astype(float).max(axis="columns")
    for name, pattern in SPREADS.items():
        of_ranks = done.filter(regex=f"^{pattern}$").astype(float)
        values[name] = of_ranks.max(axis="columns") / of_ranks.min(axis="columns") - 1
    keys = done.rename(columns={"spec.variant": "variant", "spec.seed": "seed"})[[*KEYS, "seed"]]
    values = (
        values.assign(code=done["code.commit"])
        .set_index(pd.MultiIndex.from_frame(keys))
        .sort_index()
    )
    lines = average(values.drop(columns="code"), KEYS)
    lines = evidence.in_table_order(
        lines.sort_index().reset_index().set_index("variant")
    ).reset_index()
    exposed = lines["exposed_ms"].where(lines["world"] > 1, 0.0)
    lines["waiting_ms"] = (lines["bubble"] * lines["step_ms"]).fillna(exposed)
    return lines.join(
        pd.DataFrame([_compared(values[["speed", "code"]], line) for line in lines.itertuples()])
    )


def _compared(timed: pd.DataFrame, line) -> dict:
    """strong, weak and their intervals of a line, and the variants that were the one GPU; without intervals where these
    are of other code, since between days and hosts more differs than seeds tell."""
    own, found, names = timed.loc[tuple(getattr(line, key) for key in KEYS)], {}, []
    for name, batch in (("strong", line.batch), ("weak", line.batch / line.world)):
        reference, alone = _alone(timed, line.variant, batch)
        ideal, together = line.world * alone["speed"], set(own["code"]) == set(alone["code"])
        found |= {name: own["speed"].mean() / ideal.mean(), f"{name}±": math.nan}
        if together and own.index.equals(alone.index):
            found[f"{name}±"] = float(interval(own["speed"] / ideal))
        names += [reference if together else f"{reference} of another day"] if reference else []
    return found | {"reference": ", ".join(dict.fromkeys(names))}


def _alone(timed: pd.DataFrame, variant: str, batch: float) -> tuple[str | None, pd.DataFrame]:
    """The variant that is another's one GPU at that batch, and its samples/s and code by seed; without any if nothing
    was run, or if the variant is none for several GPUs."""
    timed = timed.dropna(subset="speed")
    alone = timed[
        (timed.index.get_level_values("world") == 1)
        & (timed.index.get_level_values("batch") == batch)
    ]
    for name in (one_gpu(variant), variant) if one_gpu(variant) != variant else ():
        if name in alone.index.get_level_values("variant"):
            sizes = alone.loc[name]
            quickest = sizes["speed"].groupby(level="micro_batch").mean().idxmax()
            return name, sizes.xs(quickest, level="micro_batch").droplevel(
                ["world", "stages", "batch"]
            )
    return None, timed[:0].droplevel(KEYS)


def worded(text: str, runs: pd.DataFrame) -> str:
    """A text about GPUs: on a CPU, where each would be, is a process."""
    return (
        text.replace("GPUs", "processes").replace("GPU", "process")
        if evidence.on_cpu(runs)
        else text
    )


def common(lines: pd.DataFrame, kind: str) -> list[int]:
    """The effective batches (`strong`) or samples a GPU (`weak`) at which lines of several GPUs have an efficiency,
    that with the most such lines first."""
    chosen = lines[lines[kind].notna() & (lines["world"] > 1)]
    sizes = chosen["batch"] if kind == "strong" else chosen["batch"] / chosen["world"]
    return [int(size) for size in sizes.sort_values().value_counts().index]


def at(lines: pd.DataFrame, kind: str, size: int) -> pd.DataFrame:
    """The timed lines of an effective batch (`strong`), or of so many samples a GPU (`weak`); of each variant, world
    and stages the quickest."""
    chosen = lines[lines["batch"] == (size if kind == "strong" else size * lines["world"])].dropna(
        subset=["speed"]
    )
    return chosen.loc[sorted(chosen.groupby(WHERE)["speed"].idxmax())]


def speed_finding(lines: pd.DataFrame) -> str:
    """What the most GPUs come to at one batch a GPU and at one in all, of the headline variant, or else of the
    quickest. Raises NotMeasured."""
    found = {}
    for kind in ("weak", "strong"):
        sizes = common(lines, kind)
        chosen = at(lines, kind, sizes[0]) if sizes else lines[:0]
        found[kind] = chosen[(chosen["world"] > 1) & chosen[kind].notna()].sort_values(
            ["world", "speed"]
        )
    every = pd.concat(found.values())
    if every.empty:
        raise evidence.NotMeasured(
            "no variant was run on one GPU and on several at one batch, or at one batch a GPU"
        )
    tried = every[every["variant"].isin(tagged("headline"))]
    shown = (tried if len(tried) else every).sort_values("speed")["variant"].iloc[-1]
    last = {
        kind: own.iloc[-1]
        for kind, part in found.items()
        if len(own := part[part["variant"] == shown])
    }
    said = [
        f"{factor(line[kind] * line['world'])} as fast as one at "
        + (
            f"{line['batch'] // line['world']} samples each"
            if kind == "weak"
            else f"{line['batch']} in all"
        )
        for kind, line in last.items()
    ]
    said[1:] = [text.replace(" as fast as one", "") for text in said[1:]]
    return f"{next(iter(last.values()))['world']} GPUs train {', '.join(said)} ({shown})"


def projection(runs: pd.DataFrame) -> dict:
    """Seconds that three epochs of all of SQuAD v2 would take on the most GPUs, by the quickest variant with as many
    samples a GPU as most have: seconds, with speed, compile_s (the longest of its runs, 0 without a compiler) and cold,
    whether that found nothing compiled; variant, world and batch. Data and scoring are not counted. Raises
    NotMeasured."""
    lines = scaling(runs)
    sizes = common(lines, "weak")
    if not sizes:
        raise evidence.NotMeasured("no variant has a speed on several GPUs beside its own on one")
    line = at(lines, "weak", sizes[0]).sort_values(["world", "speed"]).iloc[-1]
    done = runs[runs["status"] == "ok"].rename(columns={"spec.variant": "variant"})
    own = done[(done[KEYS] == line[KEYS]).all(axis="columns")]
    compile_s = evidence.numbers(own, {"compile_s": "time.compile_s"})["compile_s"].fillna(0.0)
    cold = bool(not evidence.found_compiled(own)[compile_s.idxmax()])
    seconds = evidence.FULL_SAMPLES * evidence.FULL_EPOCHS / line["speed"] + compile_s.max()
    found = line[["variant", "world", "batch", "speed"]].to_dict()
    return found | {"seconds": seconds, "compile_s": compile_s.max(), "cold": cold}


def projected_words(found: dict) -> str:
    """Return what `projection` returned as a sentence, with the arithmetic."""
    compiled = f" + {number(found['compile_s'])} s of compilation" if found["compile_s"] else ""
    compiled += "" if found["cold"] or not compiled else ", which found a part of the code compiled"
    samples = evidence.FULL_SAMPLES * evidence.FULL_EPOCHS
    return (
        f"Three epochs of SQuAD v2 on {found['world']} GPUs would take "
        f"{number(found['seconds'])} s with {found['variant']}, data and scoring not counted: "
        f"{samples:,} samples ÷ {number(found['speed'])}/s{compiled}."
    )


def logs_of(runs: pd.DataFrame) -> pd.DataFrame:
    """The logs of a group's runs that ended ok, a line for each of more than 100 steps: variant, seed, world, batch,
    group, run_id; log (of Run.steps) and loss, its mean."""
    names = {"spec.variant": "variant", "spec.seed": "seed"}
    runs = runs[(runs["status"] == "ok") & (runs["batch"] > 0)].rename(columns=names)
    logs = runs[["variant", "seed", "world", "batch", "group", "run_id"]]
    logs = logs.assign(log=[run.steps().dropna(subset="loss") for run in runs["run"]])
    logs = logs[logs["log"].map(len) > 100].reset_index(drop=True)
    return logs.assign(loss=logs["log"].map(lambda log: log["loss"].mean()).astype(float))


def most_batches(logs: pd.DataFrame) -> pd.DataFrame:
    """Of logs those of the variant that was run at the most batches. Raises NotMeasured without logs."""
    if logs.empty:
        raise evidence.NotMeasured(
            "no run has a steps.jsonl of more than 100 steps beside its record"
        )
    return logs[logs["variant"] == logs.groupby("variant")["batch"].nunique().idxmax()]


def noise_scales(logs: pd.DataFrame) -> pd.DataFrame:
    """The running noise scale phi, in samples, a line a logged step of `most_batches` that has one: batch, seed, step,
    done (the share of the training), phi. Raises NotMeasured."""
    parts = [
        steps.reindex(columns=["step", "phi"]).assign(
            batch=batch, seed=seed, done=steps["step"] / steps["step"].max()
        )
        for batch, seed, steps in most_batches(logs)[["batch", "seed", "log"]].itertuples(
            index=False
        )
    ]
    found = pd.concat(parts).dropna()
    found = found[found["phi"] > 0].reset_index(
        drop=True
    )  # noise may hide the gradient, and phi then is no number
    if found.empty:
        raise evidence.NotMeasured("no log has a noise scale (phi)")
    return found


def efficiencies(logs: pd.DataFrame, batches: Iterable[int]) -> pd.Series:
    """The progress by sample of batches relative to batch REFERENCE, as the noise scale predicts it: the mean over the
    training at the smallest batch that has one, REFERENCE where it has. (phi + REFERENCE) / (phi + batch), equation 7
    of Pollux (Qiao et al. 2021). Raises NotMeasured."""
    phi = reference_phi(logs)["phi"].to_numpy()
    return pd.Series({batch: ((phi + REFERENCE) / (phi + batch)).mean() for batch in batches})


def reference_phi(logs: pd.DataFrame) -> pd.DataFrame:
    """Of `noise_scales` those at batch REFERENCE, or at the smallest that has any."""
    phi = noise_scales(logs)
    return phi[
        phi["batch"] == (REFERENCE if REFERENCE in set(phi["batch"]) else phi["batch"].min())
    ]


def batch_worth(logs: pd.DataFrame) -> tuple[pd.DataFrame, float]:
    """How much a sample teaches in a larger batch than REFERENCE, relative to it, and the loss by which that is
    measured. By batch: measured and measured±, the samples that it took until the smoothed training loss was down to
    the one that the worst run ends with; predicted, by `efficiencies`. Raises NotMeasured where REFERENCE and a larger
    batch were not both run."""
    logs = most_batches(logs)
    if REFERENCE not in set(logs["batch"]) or logs["batch"].max() == REFERENCE:
        raise evidence.NotMeasured(f"no variant was run at batch {REFERENCE} and at a larger one")
    curves = [_smoothed(log) for log in logs["log"]]
    loss = max(curve.min() for curve in curves)
    last = [
        log["step"].max() * batch for log, batch in zip(logs["log"], logs["batch"], strict=True)
    ]
    samples = [(curve <= loss).idxmax() * n for curve, n in zip(curves, last, strict=True)]
    table = logs.assign(samples=samples).groupby(["seed", "batch"])["samples"].mean().unstack()
    shares = table[[REFERENCE]].to_numpy() / table
    found = pd.DataFrame({"measured": shares.mean(), "measured±": interval(shares)}).query(
        f"batch > {REFERENCE}"
    )
    return found.assign(predicted=efficiencies(logs, found.index)), loss


def _smoothed(log: pd.DataFrame) -> pd.Series:
    """The mean loss around each step, over a tenth of the training; by the share of the training that is done."""
    loss = log["loss"].rolling(max(1, round(0.1 * len(log))), center=True).mean()
    return loss.set_axis(log["step"] / log["step"].max()).dropna()


def points(runs: pd.DataFrame, predicted: pd.Series | float = math.nan) -> pd.DataFrame:
    """The points of a group's runs that ended ok or out of memory, means over seeds, in table order.

    Columns: variant; length, batch (0 where a step is one micro-batch, or so many tokens) and micro_batch; gib, speed,
    states (GiB of weights, gradients and optimizer), tokens (computed in a micro-batch), predicted (GiB, where
    run.memory_estimate.predicted is given), oom, whether every seed ran out of memory, and code (commits). Raises
    NotMeasured where there is none."""
    runs = runs.assign(predicted=predicted)[runs["status"].isin(["ok", "oom"])]
    if runs.empty:
        raise evidence.NotMeasured("no run of these has ended ok or out of memory")
    by_tokens = runs.reindex(columns=[evidence.BATCH_TOKENS])[evidence.BATCH_TOKENS].notna()
    found = evidence.numbers(runs, POINT_MEASURES | {"predicted": "predicted"})
    # A variant that pads to the longest of a batch peaks at one of full length; a packed one has what it computes.
    packed = found["tokens"] / found["speed"] * runs["micro_batch"]
    found["tokens"] = packed.where(
        runs["spec.settings.padding"] == "packed", runs["micro_batch"] * runs["length"]
    )
    found["states"] = found[["params", "grads", "optimizer"]].sum(axis="columns", skipna=False)
    found[["gib", "predicted", "states"]] /= 1024
    found["oom"] = (runs["status"] == "oom").astype(float)
    batch = runs["batch"].mask(by_tokens | (runs["batch"] == runs["micro_batch"]), 0)
    keys = [runs["spec.variant"].rename("variant"), runs["length"], batch, runs["micro_batch"]]
    found = average(found, keys).assign(code=runs.groupby(keys).apply(evidence.commits))
    found = evidence.in_table_order(
        found.sort_index().reset_index().set_index("variant")
    ).reset_index()
    return found.assign(oom=found["oom"] == 1)


def along(table: pd.DataFrame, size: str) -> tuple[str, pd.DataFrame]:
    """Of `points` those that a curve over one of SIZES shows, with the others at the values that have most of them, and
    those values in words. Raises NotMeasured where the size does not vary."""
    others = [name for name in SIZES if name != size]
    groups = table.groupby(others)
    if not len(groups):
        raise evidence.NotMeasured("the group has no runs of these variants")
    values, part = max(
        groups, key=lambda group: (group[1][size].nunique(), len(group[1]), group[0])
    )
    if part[size].nunique() < 2:
        raise evidence.NotMeasured(f"no two runs differ in {size.replace('_', '-')} alone")
    given = zip(others, values, strict=True)
    return ", ".join(f"{name.replace('_', '-')} {value:,}" for name, value in given if value), part


def fit(part: pd.DataFrame) -> tuple[float, float, float]:
    """Fixed GiB, KiB a token and the largest relative miss of the straight line through a variant's peaks over its
    tokens, by least squares of relative misses; NaN where fewer than three points tell."""
    part = part.dropna(subset=["gib", "tokens"])
    if part["tokens"].nunique() < 3:
        return math.nan, math.nan, math.nan
    each, fixed = np.polyfit(part["tokens"], part["gib"], 1, w=1 / part["gib"])
    miss = ((fixed + each * part["tokens"]) / part["gib"] - 1).abs().max()
    return float(fixed), float(each * 2**20), float(miss)


def lead(part: pd.DataFrame) -> tuple[str, str, pd.Series]:
    """Of the variants of the visible loop the one that is quickest at any micro-batch, of transformers.Trainer's with
    the compiler and plain PyTorch's the same, and by what factor the first is quicker, by micro-batch. Raises
    NotMeasured where no micro-batch has both: a lead over the Trainer as it comes would be the larger one."""
    speeds = part.pivot(index="micro_batch", columns="variant", values="speed").dropna(
        axis="columns", how="all"
    )
    speeds = speeds[
        speeds.index > 1
    ]  # a pass of one sample waits for the host, whatever the variant
    settings = {name: VARIANTS[name].settings for name in speeds}
    others = [name for name, own in settings.items() if own.engine == Settings.engine]
    rivals = [name for name in settings if name not in others and settings[name].compile != "none"]
    if not rivals or not others:
        raise evidence.NotMeasured(
            "no speed of both the visible loop and the Trainer with the compiler"
        )
    loop, rival = (speeds[chosen].max().idxmax() for chosen in (others, rivals))
    factors = (speeds[loop] / speeds[rival]).dropna()
    if factors.empty:
        raise evidence.NotMeasured(f"{loop} and {rival} have no micro-batch in common")
    return loop, rival, factors
