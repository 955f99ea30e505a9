"""Memory and speed against context length and batch: the points of a curve, and what follows from them.

Memory is a fixed cost (weights, gradients, optimizer state) and a cost for each token of a micro-batch, which the
backward pass keeps. Both are fitted here to what was measured. notebooks/scaling.ipynb draws the curves."""

import math

import numpy as np
import pandas as pd

from qa_lib.report.load import BATCH_TOKENS, NotMeasured, commits, in_order, measures, numbers
from qa_lib.report.summary import average
from qa_lib.variants import VARIANTS, Settings

SIZES = ("length", "batch", "micro_batch")
STRAIGHT = 0.05  # a fit that misses no point by more is a straight line


def points(runs: pd.DataFrame, predicted: pd.Series | float = math.nan) -> pd.DataFrame:
    """The points of a group's runs that ended ok or out of memory, means over seeds, in table order.

    Columns: variant; length, batch (0 where a step is one micro-batch, or so many tokens) and micro_batch; gib, speed,
    states (GiB of weights, gradients and optimizer), tokens (computed in a micro-batch), predicted (GiB, where
    run.memory_estimate.predicted is given), oom, whether every seed ran out of memory, and code (commits). Raises
    NotMeasured where there is none."""
    runs = runs.assign(predicted=predicted)[runs["status"].isin(["ok", "oom"])]
    if runs.empty:
        raise NotMeasured("no run of these has ended ok or out of memory")
    by_tokens = runs.reindex(columns=[BATCH_TOKENS])[BATCH_TOKENS].notna()
    found = numbers(runs, measures("curves") | {"predicted": "predicted"})
    # A variant that pads to the longest of a batch peaks at one of full length; a packed one has what it computes.
    packed = found["tokens"] / found["speed"] * runs["micro_batch"]
    found["tokens"] = packed.where(runs["spec.settings.padding"] == "packed", runs["micro_batch"] * runs["length"])
    found["states"] = found[["params", "grads", "optimizer"]].sum(axis="columns", skipna=False)
    found[["gib", "predicted", "states"]] /= 1024
    found["oom"] = (runs["status"] == "oom").astype(float)
    batch = runs["batch"].mask(by_tokens | (runs["batch"] == runs["micro_batch"]), 0)
    keys = [runs["spec.variant"].rename("variant"), runs["length"], batch, runs["micro_batch"]]
    found = average(found, keys).assign(code=runs.groupby(keys).apply(commits))
    found = in_order(found.sort_index().reset_index().set_index("variant")).reset_index()
    return found.assign(oom=found["oom"] == 1)


def along(table: pd.DataFrame, size: str) -> tuple[str, pd.DataFrame]:
    """Of `points` those that a curve over one of SIZES shows, with the others at the values that have most of them, and
    those values in words. Raises NotMeasured where the size does not vary."""
    others = [name for name in SIZES if name != size]
    groups = table.groupby(others)
    if not len(groups):
        raise NotMeasured("the group has no runs of these variants")
    values, part = max(groups, key=lambda group: (group[1][size].nunique(), len(group[1]), group[0]))
    if part[size].nunique() < 2:
        raise NotMeasured(f"no two runs differ in {size.replace('_', '-')} alone")
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
    speeds = part.pivot(index="micro_batch", columns="variant", values="speed").dropna(axis="columns", how="all")
    speeds = speeds[speeds.index > 1]  # a pass of one sample waits for the host, whatever the variant
    settings = {name: VARIANTS[name].settings for name in speeds}
    others = [name for name, own in settings.items() if own.engine == Settings.engine]
    rivals = [name for name in settings if name not in others and settings[name].compile != "none"]
    if not rivals or not others:
        raise NotMeasured("no speed of both the visible loop and the Trainer with the compiler")
    loop, rival = (speeds[chosen].max().idxmax() for chosen in (others, rivals))
    factors = (speeds[loop] / speeds[rival]).dropna()
    if factors.empty:
        raise NotMeasured(f"{loop} and {rival} have no micro-batch in common")
    return loop, rival, factors
