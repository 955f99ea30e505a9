"""How values are written. What was not measured is NaN, and written as "–"."""

import math
from functools import partial

import pandas as pd

MISSING = "–"


def number(value: float, half: float = math.nan) -> str:
    """Return a number in three significant digits, or in all that stand before the point.

    '–' for NaN; with ± half an interval where there is one.
    """
    if pd.isna(value):
        return MISSING
    decimals = 2
    if abs(value) >= 9.995:  # what rounds to 10.0
        decimals = 1
    if abs(value) >= 99.95:
        decimals = 0
    text = f"{value:,.{decimals}f}"
    if pd.notna(half):
        text += f" ± {half:,.{decimals}f}"
    return text


def factor(value: float) -> str:
    """Return a ratio as '×1.52'."""
    return f"×{number(value)}" if pd.notna(value) else MISSING


def count(value: float) -> str:
    """Return a number of parameters in three digits: '750', '75.3 k', '109 M'."""
    if pd.isna(value):
        return MISSING
    if value < 1_000:
        return f"{value:.0f}"
    if value < 999_500:  # what rounds to less than a million
        return f"{value / 1e3:.3g} k"
    return f"{value / 1e6:.3g} M"


def percent(value: float, half: float = math.nan) -> str:
    """Return a share in percent, with ± half an interval where there is one."""
    return f"{number(100 * value, 100 * half)} %" if pd.notna(value) else MISSING


def points(value: float, half: float = math.nan, sign: str = "", decimals: int = 2) -> str:
    """Return a score or a difference of scores with two decimals, as F1 in points of 100 has.

    `sign` "+" marks a gain; with ± half an interval where there is one.
    """
    if pd.isna(value):
        return MISSING
    text = f"{value:{sign}.{decimals}f}".replace("-", "−")
    if pd.notna(half):
        text += f" ± {half:.{decimals}f}"
    return text


# A difference of scores, with its sign.
gain = partial(points, sign="+")
# A loss or an exponent, whose third decimal counts.
three_decimals = partial(points, decimals=3)
