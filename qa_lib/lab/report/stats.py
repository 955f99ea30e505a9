"""Intervals over seeds, and verdicts that follow from them.

A difference that is not significant is no evidence of equality. So equality is tested as such: by two one-sided t-tests
(Schuirmann 1987) over the differences between runs of equal seeds, which come to whether their 90 % interval lies
within a margin.
"""

import math

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from qa_lib.lab.report.load import NotMeasured, in_order
from qa_lib.spec.variants import BASELINES, VARIANTS

LEVEL = 90  # percent, of every interval
MARGIN = 1.0  # points of F1 within which a variant counts as good as the baseline
BASELINE = BASELINES["qa"]
F1, BEST_F1 = "quality.f1", "quality.best_f1"  # at threshold 0, and at the best one
VERDICTS = {"beyond": "✗", "open": "?", "no worse": "✓+", "within": "✓"}
HOLDS, FAILS, OPEN = "✓", "✗", "?"  # of claims: holds, does not hold, inconclusive


def interval(values):
    """Half the width of the interval of the mean over seeds, at LEVEL, by Student's t; NaN below three values. Of a
    Series, of each column of a table, or of each group of a groupby. (`stdtrit` is the quantile of t, as
    scipy.stats.t.ppf, which takes longer to import.)"""
    n = values.count()
    half = (
        stdtrit(np.maximum(n - 1, 1), 0.5 + LEVEL / 200) * values.std() / np.sqrt(np.maximum(n, 1))
    )
    return half * np.where(n >= 3, 1.0, math.nan)


def by_seed(runs: pd.DataFrame, column: str = F1) -> pd.DataFrame:
    """A score of the runs that ended ok: a line for each seed, a column for each variant that has any."""
    scored = runs[(runs["status"] == "ok") & runs.reindex(columns=[column])[column].notna()]
    # A seed may have run at several micro-batches, of one effective batch.
    found = scored.reindex(columns=[column])[column].astype(float)
    return found.groupby([scored["spec.seed"], scored["spec.variant"]]).mean().unstack()


def compare(
    runs: pd.DataFrame, variant: str, base: str = BASELINE, column: str = F1
) -> tuple[float, float]:
    """A variant's score minus another's over the seeds that both have, and half its interval, NaN below three seeds.
    Raises NotMeasured where no seed has both."""
    found = by_seed(runs, column).reindex(columns=[variant, base]).dropna()
    if found.empty:
        raise NotMeasured(f"no seed has the score of both {variant} and {base}")
    difference = found[variant] - found[base]
    return float(difference.mean()), float(interval(difference))


def verdict(difference: tuple[float, float]) -> str:
    """What an interval says: "within" where all of it lies inside ± MARGIN, "no worse" where it lies above the lower
    bound, "beyond" where it lies below it, else "open", as without an interval."""
    delta, half = difference
    if delta + half < -MARGIN:
        return "beyond"
    if not delta - half > -MARGIN:
        return "open"
    return "within" if delta + half < MARGIN else "no worse"


def equivalence(runs: pd.DataFrame) -> pd.DataFrame:
    """Each variant's F1 against the baseline's, indexed by variant in table order: n (seeds that both have); delta,
    delta± at threshold 0; best_delta, best_delta± at the best one; verdict.

    The verdict is on both, since a model that never answers can have a passable F1 at threshold 0. A variant with a
    fault in its scoring (A4-b) is no training of its own and left out. `runs` are alike in all axes but the
    micro-batch. Raises NotMeasured where no variant has an interval.
    """
    if len(runs) and runs["task.name"].iloc[0] != "qa":
        raise NotMeasured(
            "no margin of this task's score is set within which variants count as equal"
        )
    columns = {}
    for name, column in (("", F1), ("best_", BEST_F1)):
        scores = by_seed(runs, column)
        if BASELINE not in scores:
            raise NotMeasured(f"{BASELINE} has no F1")
        found = scores.sub(scores[BASELINE], axis="index")
        columns |= {
            f"{name}n": found.count(),
            f"{name}delta": found.mean(),
            f"{name}delta±": interval(found),
        }
    table = pd.DataFrame(columns).query("n > 0 and best_n > 0").drop(columns="best_n")
    faulty = [
        name for name, variant in VARIANTS.items() if variant.settings.fault == "positional-join"
    ]
    table = in_order(table.drop([BASELINE, *faulty], errors="ignore").rename_axis("variant"))
    if not table["delta±"].notna().any():
        raise NotMeasured(
            f"no variant of {runs['group'].iloc[0]} shares three seeds with {BASELINE}"
        )
    both = zip(
        table[["delta", "delta±"]].to_numpy(),
        table[["best_delta", "best_delta±"]].to_numpy(),
        strict=True,
    )
    told = [min(verdict(one), verdict(other), key=list(VERDICTS).index) for one, other in both]
    return table.assign(verdict=told)


def between(difference: tuple[float, float], low: float, high: float) -> str:
    """Whether a difference (mean, half) lies between two bounds: holds if all of its interval does, fails if none does.
    Without an interval (NaN) it is inconclusive."""
    value, half = difference
    if low < value - half and value + half < high:
        return HOLDS
    return FAILS if value + half < low or high < value - half else OPEN
