"""The tables of memory and speed against length and batch (notebooks/scaling.ipynb).

They show what `curves.points` returns; curve_figures.py draws the same. `setup_table` says what
ran.
"""

import contextlib
import math
from collections.abc import Sequence

import pandas as pd

from qa_lib.lab.report import curves, evidence
from qa_lib.lab.report.evidence import NotMeasured
from qa_lib.lab.report.format import MISSING, factor, percent
from qa_lib.lab.report.summary import change
from qa_lib.lab.report.tables import Column, compact, render
from qa_lib.spec.variants import VARIANTS

# What `setup_table` says of a group: headings -> columns of runs.
SETUP = {
    "model": "model.name",
    "hardware": "env.gpu",
    "text": "data.name",
    "lengths": "length",
    "micro-batches": "micro_batch",
}
FEW = 4  # values of a group that are all named; of more only the first and the last


# What ran.


def chosen_runs(every: pd.DataFrame, group: str, variants: str) -> pd.DataFrame:
    """Return a group's runs of the variants that a text names, of all where it is empty.

    A group without records has none.
    """
    runs = evidence.select_or_empty(every, group)
    if not variants:
        return runs
    return runs[runs["spec.variant"].isin(variants.split())]


def setup_table(every: pd.DataFrame, groups: Sequence[str]) -> pd.DataFrame:
    """Return what ran in each of some groups, and where, as text; groups without runs are missing.

    Columns: group, runs (their number) and those of SETUP.
    """
    lines = []
    for group, runs in every[every["group"].isin(groups)].groupby("group"):
        line = {"group": group, "runs": str(len(runs))}
        for heading, column in SETUP.items():
            line[heading] = _values(runs[column])
        lines.append(line)
    return pd.DataFrame(lines)


def _values(column: pd.Series) -> str:
    """Return the values of a column, each once: '8/32/64', or '8/…/512' where they are many."""
    values = sorted(set(column.dropna()))
    if len(values) > FEW:
        values = [values[0], "…", values[-1]]
    return "/".join(map(str, values))


# One optimization after the other.


def steps_table(points: pd.DataFrame) -> pd.DataFrame:
    """Return what each variant takes and gains over the nearest ancestor that ran, as text.

    `points` are those of `curves.points`. Columns: variant, "what it changes", length, micro-batch,
    memory and speed, both over the ancestor's at the largest size that both ran at. A speed says so
    where the two are of other code. Variants that this code does not know are left out, and so are
    those without an ancestor at one of their sizes.
    """
    ran = points[~points["oom"].astype(bool)]
    lines = []
    for variant in ran["variant"].unique():
        for ancestor in _ancestors(variant):
            sizes = _common_sizes(ran, variant, ancestor)
            if sizes:
                lines.append(_step(ran, variant, ancestor, max(sizes, key=_tokens)))
                break
    headings = ["variant", "what it changes", "length", "micro-batch", "memory", "speed"]
    return compact(pd.DataFrame(lines, columns=headings))


def _ancestors(variant: str) -> list[str]:
    """Return the variant that one changes, the one that this changes, and so on."""
    names = []
    while variant in VARIANTS and VARIANTS[variant].parent is not None:
        variant = VARIANTS[variant].parent
        names.append(variant)
    return names


def _common_sizes(ran: pd.DataFrame, variant: str, other: str) -> list[tuple[int, int, int]]:
    """Return the values of `curves.SIZES` at which two variants ran."""
    by_size = ran.set_index(list(curves.SIZES))["variant"]
    own = by_size.index[by_size == variant]
    return list(own.intersection(by_size.index[by_size == other]))


def _tokens(size: tuple[int, int, int]) -> tuple:
    """Return by what sizes are compared: the tokens of a micro-batch at most, then all of them."""
    length, _, micro_batch = size
    return length * micro_batch, size


def _step(
    ran: pd.DataFrame, variant: str, ancestor: str, size: tuple[int, int, int]
) -> tuple[str, ...]:
    """Return a line of `steps_table`: a variant and its ancestor at one size."""
    points = ran.set_index(["variant", *curves.SIZES])
    new = points.loc[(variant, *size)]
    old = points.loc[(ancestor, *size)]
    memory = factor(new["gib"] / old["gib"])
    speed = factor(new["speed"] / old["speed"])
    if new["code"] != old["code"] and speed != MISSING:
        speed += " of another day"
    length, _, micro_batch = size
    return variant, change(variant, ancestor), f"{length:,}", f"{micro_batch:,}", memory, speed


# The two costs.


def costs_table(points: pd.DataFrame) -> pd.DataFrame:
    """Return what each variant takes of memory whatever the batch, and for each token, as text.

    `points` are those of `curves.points`. The variants are those of the curve over micro-batches,
    or over lengths where no micro-batch differs. Columns:

    - variant
    - "fixed GiB" and "KiB a token", by the line of `curves.fit` over micro-batches or over lengths,
      that which misses least; nothing where it is not straight
    - "weights + gradients + optimizer GiB", which the fixed cost consists of
    - "line misses by" and "prediction misses by", the largest of each
    - "largest that ran", "too large" (the smallest that ran out of memory), "best samples/s", and
      the size at which that was

    Raises NotMeasured where neither micro-batches nor lengths differ.
    """
    size = "micro_batch" if points["micro_batch"].nunique() > 1 else "length"
    _, curve = curves.along(points, size)
    lines = []
    for variant, part in curve.groupby("variant", sort=False):
        own = points[points["variant"] == variant]
        fixed, each, miss = _best_fit(own)
        is_straight = miss <= curves.STRAIGHT
        best = part["speed"].max()
        lines.append({
            "variant": variant,
            "fixed": fixed if is_straight else math.nan,
            "states": own["states"].mean(),
            "each": each if is_straight else math.nan,
            "miss": miss,
            "off": _largest(own["predicted"] / own["gib"] - 1),
            "ran": part.loc[~part["oom"], size].max(),
            "oom": part.loc[part["oom"], size].min(),
            "best": best,
            "at": part.loc[part["speed"] == best, size].max(),
        })  # fmt: skip
    columns = [
        Column("variant"),
        Column("fixed", "fixed GiB"),
        Column("states", "weights + gradients + optimizer GiB"),
        Column("each", "KiB a token"),
        Column("miss", "line misses by", percent),
        Column("off", "prediction misses by", percent),
        Column("ran", "largest that ran", _whole),
        Column("oom", "too large", _whole),
        Column("best", "best samples/s"),
        Column("at", f"at {size}", _whole),
    ]
    return render(pd.DataFrame(lines), columns)


def _best_fit(own: pd.DataFrame) -> tuple[float, float, float]:
    """Return that `curves.fit` of a variant's points which misses least, NaN without any."""
    best = (math.nan, math.nan, math.nan)
    for size in ("micro_batch", "length"):
        with contextlib.suppress(NotMeasured):
            fixed, each, miss = curves.fit(curves.along(own, size)[1])
            if math.isnan(best[2]) or miss < best[2]:
                best = (fixed, each, miss)
    return best


def _largest(shares: pd.Series) -> float:
    """Return that share which is farthest from 0, with its sign; NaN without any."""
    known = shares.dropna()
    return known.loc[known.abs().idxmax()] if len(known) else math.nan


def _whole(value: float) -> str:
    """Return a whole number as text; a column in which one is missing has floats."""
    return MISSING if pd.isna(value) else f"{value:.0f}"
