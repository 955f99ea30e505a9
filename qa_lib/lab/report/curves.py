"""How memory and speed grow with context length and batch (notebooks/scaling.ipynb).

Memory is a fixed cost (weights, gradients, optimizer state) and a cost for each token of a
micro-batch, which the backward pass keeps. `fit` finds both from what was measured.
"""

import math

import numpy as np
import pandas as pd

from qa_lib.lab.report import evidence
from qa_lib.lab.report.summary import average
from qa_lib.spec.settings import Settings
from qa_lib.spec.variants import VARIANTS

# What `points` averages over seeds: its name there -> the column of runs.
MEASURES = {
    "gib": "memory.peak_alloc_mib",
    "speed": "speed.samples_per_s",
    "tokens": "speed.tokens_per_s_padded",
    "params": "memory.params_mib",
    "grads": "memory.grads_mib",
    "optimizer": "memory.optimizer_mib",
}
SIZES = ("length", "batch", "micro_batch")
STRAIGHT = 0.05  # a fit is a straight line if it misses no point by a larger share


def points(runs: pd.DataFrame, predicted: pd.Series | float = math.nan) -> pd.DataFrame:
    """Return a line for each variant and value of SIZES, means over seeds, in table order.

    `runs` are those of a group, of which those count that ended ok or out of memory. Columns:

    - variant, length and micro_batch
    - batch: samples of a step, 0 where a step is one micro-batch or was asked for in tokens
    - gib: the peak of memory
    - states: GiB of weights, gradients and optimizer
    - predicted: GiB, where `predicted` has each run's MiB by memory_estimate.predicted_peaks
    - speed: samples/s
    - tokens: those that are computed in a micro-batch
    - params, grads, optimizer: MiB
    - oom: whether every seed ran out of memory
    - code: versions of the code
    - sittings: the set of those in which it was timed, NaN without a speed

    Raises NotMeasured where there is no such run.
    """
    runs = runs.assign(predicted=predicted)
    runs = runs[runs["status"].isin(["ok", "oom"])]
    if runs.empty:
        raise evidence.NotMeasured("no run of these has ended ok or out of memory")
    values = evidence.numbers(runs, MEASURES | {"predicted": "predicted"})
    # A variant that pads to the longest of a batch peaks at a batch of full length. A packed one
    # peaks at what it computes.
    of_packed = values["tokens"] / values["speed"] * runs["micro_batch"]
    is_packed = runs["spec.settings.padding"] == "packed"
    values["tokens"] = of_packed.where(is_packed, runs["micro_batch"] * runs["length"])
    states = values[["params", "grads", "optimizer"]]
    values["states"] = states.sum(axis="columns", skipna=False)
    values[["gib", "predicted", "states"]] /= 1024
    values["oom"] = (runs["status"] == "oom").astype(float)

    is_one_micro_batch = runs["batch"] == runs["micro_batch"]
    is_by_tokens = runs.reindex(columns=[evidence.BATCH_TOKENS])[evidence.BATCH_TOKENS].notna()
    keys = [
        runs["spec.variant"].rename("variant"),
        runs["length"],
        runs["batch"].mask(is_by_tokens | is_one_micro_batch, 0),
        runs["micro_batch"],
    ]
    code = runs.groupby(keys).apply(evidence.commits)
    is_timed = values["speed"].notna()
    sittings = runs["sitting"][is_timed].groupby([key[is_timed] for key in keys]).agg(frozenset)
    lines = average(values, keys).assign(code=code, sittings=sittings).sort_index().reset_index()
    lines = evidence.in_table_order(lines.set_index("variant")).reset_index()
    return lines.assign(oom=lines["oom"] == 1)


def along(table: pd.DataFrame, size: str) -> tuple[str, pd.DataFrame]:
    """Return the lines of `points` that a curve over one of SIZES shows.

    The other SIZES are fixed at the values at which this one varies most. These values are returned
    first, in words: 'length 384, micro-batch 32'.

    Raises NotMeasured where the size does not vary.
    """
    others = [name for name in SIZES if name != size]
    parts = list(table.groupby(others))
    if not parts:
        raise evidence.NotMeasured("the group has no runs of these variants")

    def rank(part: tuple[tuple, pd.DataFrame]) -> tuple:
        values, lines = part
        return lines[size].nunique(), len(lines), values

    values, lines = max(parts, key=rank)
    if lines[size].nunique() < 2:
        raise evidence.NotMeasured(f"no two runs differ in {_words(size)} alone")
    fixed = zip(others, values, strict=True)
    conditions = [f"{_words(name)} {value:,}" for name, value in fixed if value]
    return ", ".join(conditions), lines


def _words(size: str) -> str:
    """Return one of SIZES as people write it."""
    return size.replace("_", "-")


def fit(part: pd.DataFrame) -> tuple[float, float, float]:
    """Return the straight line through a variant's peaks of memory over its tokens.

    These are the fixed GiB, the KiB a token, and the largest miss of a point as a share of it.
    They minimize the squares of relative misses. All are NaN where fewer than three points differ.
    """
    measured = part.dropna(subset=["gib", "tokens"])
    if measured["tokens"].nunique() < 3:
        return math.nan, math.nan, math.nan
    tokens = measured["tokens"]
    gib = measured["gib"]
    gib_per_token, fixed_gib = np.polyfit(tokens, gib, 1, w=1 / gib)
    miss = ((fixed_gib + gib_per_token * tokens) / gib - 1).abs().max()
    return float(fixed_gib), float(gib_per_token * 2**20), float(miss)


def lead(part: pd.DataFrame) -> tuple[str, str, pd.Series]:
    """Return the quickest variant of the visible loop, its quickest rival, and how much quicker.

    Rivals are transformers.Trainer with the compiler and plain PyTorch: a lead over the Trainer as
    it comes would be the larger one. The quickest of either kind is so at any micro-batch. The
    factors are by micro-batch, those at which both were timed in one sitting.

    Raises NotMeasured where no micro-batch has both.
    """
    speeds = part.pivot(index="micro_batch", columns="variant", values="speed")
    speeds = speeds.dropna(axis="columns", how="all")
    # A pass of one sample waits for the host, whatever the variant.
    speeds = speeds[speeds.index > 1]
    loops = []
    rivals = []
    for name in speeds:
        settings = VARIANTS[name].settings
        if settings.engine == Settings.engine:
            loops.append(name)
        elif settings.compile != "none":
            rivals.append(name)
    if not rivals or not loops:
        raise evidence.NotMeasured(
            "no speed of both the visible loop and the Trainer with the compiler"
        )
    loop = speeds[loops].max().idxmax()
    rival = speeds[rivals].max().idxmax()
    factors = ratios(part, "micro_batch", loop, rival)
    factors = factors[factors.index.isin(speeds.index)]
    if factors.empty:
        raise evidence.NotMeasured(f"{loop} and {rival} have no micro-batch in common")
    return loop, rival, factors


def ratios(part: pd.DataFrame, size: str, variant: str, other: str) -> pd.Series:
    """Return the speed of a variant over another's by one of SIZES, where they share a sitting.

    `part` has the columns variant, speed, sittings and that size.
    """
    timed = part.dropna(subset="speed").set_index(size)
    own = timed[timed["variant"] == variant]
    base = timed[timed["variant"] == other]
    sizes = own.index.intersection(base.index).sort_values()
    own = own.loc[sizes]
    base = base.loc[sizes]
    pairs = zip(own["sittings"], base["sittings"], strict=True)
    together = [not of_own.isdisjoint(of_base) for of_own, of_base in pairs]
    return (own["speed"] / base["speed"])[together]
