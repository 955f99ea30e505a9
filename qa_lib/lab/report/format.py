"""How values are written in tables and sentences of the report.

What was not measured is NaN, and written as "–". Where a function takes `half`, that is half the
width of the value's interval, which is written after it as "± 0.5"; NaN if there is none.
"""

import math
from functools import partial

import pandas as pd

MISSING = "–"


def number(value: float, half: float = math.nan) -> str:
    """Return a number with two decimals, from 10 on with one, and from 100 on with none.

    From 1 on that is three significant digits or more ('1.52', '15.2', '152', '1,520'), and fewer
    below ('0.02'). A negative one has a hyphen for its sign, where `points` has a minus.
    """
    if pd.isna(value):
        return MISSING
    decimals = 2
    if abs(value) >= 9.995:  # what rounds to 10.0
        decimals = 1
    if abs(value) >= 99.95:  # what rounds to 100
        decimals = 0
    return _with_interval(f"{value:,.{decimals}f}", half, decimals)


def _with_interval(text: str, half: float, decimals: int) -> str:
    """Return the text of a value with half its interval after it, where there is one."""
    return f"{text} ± {half:,.{decimals}f}" if pd.notna(half) else text


def factor(value: float, half: float = math.nan) -> str:
    """Return a ratio as `number` does, with '×' in front: '×1.52'."""
    return f"×{number(value, half)}" if pd.notna(value) else MISSING


def count(value: float) -> str:
    """Return a number of parameters in three digits: '750', '75.3 k', '109 M', '1.56 B'."""
    if pd.isna(value):
        return MISSING
    if value < 1_000:
        return f"{value:.0f}"
    if value < 999_500:  # what rounds to less than a million
        return f"{value / 1e3:.3g} k"
    if value < 999_500_000:
        return f"{value / 1e6:.3g} M"
    return f"{value / 1e9:.3g} B"


def percent(value: float, half: float = math.nan) -> str:
    """Return a share in percent, as `number` writes it: '12.3 %' for 0.123."""
    return f"{number(100 * value, 100 * half)} %" if pd.notna(value) else MISSING


def points(value: float, half: float = math.nan, sign: str = "", decimals: int = 2) -> str:
    """Return a score, or a difference of two, with the same decimals whatever its size: '75.00'.

    Two are what F1, in points of 100, has. With `sign` "+" a value from 0 on has a plus in front.
    """
    if pd.isna(value):
        return MISSING
    text = f"{value:{sign}.{decimals}f}".replace("-", "−")
    return _with_interval(text, half, decimals)


# A difference of scores or a change in percent, which has its sign: '+1.50'.
gain = partial(points, sign="+")
# A loss or an exponent, whose third decimal counts: '0.250'.
three_decimals = partial(points, decimals=3)
