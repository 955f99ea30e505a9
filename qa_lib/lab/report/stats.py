"""Intervals over seeds, and verdicts that follow from them.

A difference that is not significant is no evidence of equality. So equality is tested as such: by
two one-sided t-tests (Schuirmann 1987) over the differences between runs of equal seeds. Both
succeed exactly where the 90 % interval of the difference lies within a margin.
"""

import math

import numpy as np
import pandas as pd
from scipy.special import stdtrit  # the quantile of t; scipy.stats.t.ppf takes longer to import

from qa_lib.lab.report.evidence import NotMeasured, in_table_order
from qa_lib.spec.variants import BASELINES, VARIANTS

LEVEL = 90  # percent, of every interval
MARGIN = 1.0  # points of F1 within which a variant counts as good as the baseline
LEAST_SEEDS = 3  # below so many values there is no interval
BASELINE = BASELINES["qa"]
F1 = "quality.f1"  # at threshold 0 for "no answer"
BEST_F1 = "quality.best_f1"  # at the best threshold
EXACT = "quality.exact"  # exact match at threshold 0
BEST_EXACT = "quality.best_exact"

# What `verdict` returns -> its sign in tables; the worst comes first.
VERDICTS = {"beyond": "✗", "open": "?", "no worse": "✓+", "within": "✓"}

# The signs of a claim that holds, that does not hold, and that the interval leaves open.
HOLDS = "✓"
FAILS = "✗"
OPEN = "?"


def interval(values):
    """Return half the width of the interval of the mean at LEVEL, by Student's t.

    NaN below LEAST_SEEDS values. `values` is a Series (returns a float), a DataFrame (returns a
    value for each column) or a groupby (returns a row for each group); NaN among them do not count.
    """
    n = values.count()
    degrees_of_freedom = np.maximum(n - 1, 1)
    quantile = stdtrit(degrees_of_freedom, 0.5 + LEVEL / 200)
    half = quantile * values.std() / np.sqrt(np.maximum(n, 1))
    return half * np.where(n >= LEAST_SEEDS, 1.0, math.nan)


def by_seed(runs: pd.DataFrame, column: str = F1) -> pd.DataFrame:
    """Return a score of the runs that ended ok: a row for each seed, a column for each variant.

    Seeds and variants without any score are left out. A seed may have run at several micro-batches
    of one effective batch; the mean of these counts.
    """
    score = runs.reindex(columns=[column])[column]
    is_scored = (runs["status"] == "ok") & score.notna()
    scored = runs[is_scored]
    by_run = score[is_scored].astype(float)
    return by_run.groupby([scored["spec.seed"], scored["spec.variant"]]).mean().unstack()


def compare(
    runs: pd.DataFrame, variant: str, base: str = BASELINE, column: str = F1
) -> tuple[float, float]:
    """Return a variant's score minus another's over the seeds that both have, and half its
    interval, NaN below LEAST_SEEDS.

    Raises NotMeasured where no seed has both.
    """
    scores = by_seed(runs, column).reindex(columns=[variant, base]).dropna()
    if scores.empty:
        raise NotMeasured(f"no seed has the score of both {variant} and {base}")
    difference = scores[variant] - scores[base]
    return float(difference.mean()), float(interval(difference))


def verdict(difference: tuple[float, float]) -> str:
    """Return what the interval of a difference (mean, half) of F1 shows, a key of VERDICTS.

    - "beyond": the variant loses more than MARGIN, as the whole interval lies below -MARGIN
    - "within": the whole interval lies inside ± MARGIN
    - "no worse": it lies above -MARGIN, and reaches beyond MARGIN
    - "open": none of these, or there is no interval (NaN)
    """
    mean, half = difference
    low = mean - half
    high = mean + half
    if high < -MARGIN:
        return "beyond"
    if low > -MARGIN:
        return "within" if high < MARGIN else "no worse"
    return "open"


def equivalence(runs: pd.DataFrame) -> pd.DataFrame:
    """Return each variant's F1 against the baseline's, indexed by variant in table order.

    Columns: n (seeds that both have); delta and delta±, at threshold 0; best_delta and best_delta±,
    at the best one; verdict, the worse of both thresholds, since a model that never answers can
    have a passable F1 at threshold 0. A variant with a fault in its scoring (A4-b) is no training
    of its own and left out.

    `runs` are alike in all axes but the micro-batch.

    Raises NotMeasured where no variant has an interval, and for another task than qa.
    """
    if len(runs) and runs["task.name"].iloc[0] != "qa":
        raise NotMeasured(
            "no margin of this task's score is set within which variants count as equal"
        )
    at_zero = against_baseline(runs, F1)
    at_best = against_baseline(runs, BEST_F1).add_prefix("best_")
    table = pd.concat([at_zero, at_best], axis="columns").query("n > 0 and best_n > 0")
    table = table.drop(columns="best_n").rename_axis("variant")
    faulty = [
        name for name, variant in VARIANTS.items() if variant.settings.fault == "positional-join"
    ]
    table = in_table_order(table.drop([BASELINE, *faulty], errors="ignore"))
    if not table["delta±"].notna().any():
        raise NotMeasured(
            f"no variant of {runs['group'].iloc[0]} shares three seeds with {BASELINE}"
        )
    verdicts = []
    for line in table.to_dict("records"):
        both = [
            verdict((line["delta"], line["delta±"])),
            verdict((line["best_delta"], line["best_delta±"])),
        ]
        verdicts.append(min(both, key=list(VERDICTS).index))
    return table.assign(verdict=verdicts)


def against_baseline(runs: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return n, delta and delta± of a score against the baseline's over equal seeds, by variant.

    Raises NotMeasured where the baseline has no score.
    """
    scores = by_seed(runs, column)
    if BASELINE not in scores:
        raise NotMeasured(f"{BASELINE} has no F1")
    differences = scores.sub(scores[BASELINE], axis="index")
    return pd.DataFrame({
        "n": differences.count(),
        "delta": differences.mean(),
        "delta±": interval(differences),
    })  # fmt: skip


def between(difference: tuple[float, float], low: float, high: float) -> str:
    """Return whether a difference (mean, half) lies between two bounds.

    HOLDS if all of its interval does, FAILS if none does, else OPEN, as without an interval (NaN).
    """
    mean, half = difference
    if low < mean - half and mean + half < high:
        return HOLDS
    if mean + half < low or high < mean - half:
        return FAILS
    return OPEN
