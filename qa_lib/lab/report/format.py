"""How values are written. What was not measured is NaN, and written as "–"."""

import math
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pandas as pd

MISSING = "–"
SAYINGS = dict(
    re.findall(
        r"(?ms)^## (\w+)\n(.*?)(?=^## |\Z)", Path(__file__).with_name("words.md").read_text("utf-8")
    )
)
WORDS = set(
    SAYINGS["left"].replace("\n", " ").strip().split(", ")
)  # columns of words, which are set to the left


def say(name: str, **values) -> str:
    """A section of words.md with these values, in one line."""
    return " ".join(SAYINGS[name].split()).format(**values)


def number(value: float, half: float = math.nan) -> str:
    """Three significant digits or all before the point, '–' for NaN; with ± half an interval where there is one."""
    if pd.isna(value):
        return MISSING
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:,.{digits}f}" + (f" ± {half:,.{digits}f}" if pd.notna(half) else "")


def factor(value: float) -> str:
    """A ratio as '×1.52'."""
    return f"×{number(value)}" if pd.notna(value) else MISSING


def count(value: float) -> str:
    """A number of parameters: '75.3 k', '109 M'."""
    if pd.isna(value) or value < 1000:
        return MISSING if pd.isna(value) else f"{value:.0f}"
    return f"{value / 1e6:.3g} M" if value >= 999_500 else f"{value / 1e3:.3g} k"


def percent(value: float, half: float = math.nan) -> str:
    """A part of a whole, or of another variant's value, in percent, with ± half an interval where there is one."""
    return f"{number(100 * value, 100 * half)} %" if pd.notna(value) else MISSING


def points(value: float, half: float = math.nan, sign: str = "", decimals: int = 2) -> str:
    """A score or a difference of scores with two decimals, as F1 in points of 100 has; `sign` "+" marks a gain."""
    if pd.isna(value):
        return MISSING
    said = f"{value:{sign}.{decimals}f}".replace("-", "−")
    return said + (f" ± {half:.{decimals}f}" if pd.notna(half) else "")


gain = partial(points, sign="+")  # a difference of scores with its sign
digits = partial(points, decimals=3)  # a loss or an exponent, whose third decimal counts


def written(form, table: pd.DataFrame, name: str) -> list[str]:
    """A column of a table as text, with the interval in the column `name±` where there is one."""
    halves = table[f"{name}±"] if f"{name}±" in table else [math.nan] * len(table)
    return [
        form(value, *[half] * pd.notna(half))
        for value, half in zip(table[name], halves, strict=True)
    ]


def render(table: pd.DataFrame, heads: str, **forms: str) -> pd.DataFrame:
    """Columns of a table as text. `heads` are 'column=heading', or the column's name alone, with commas between them;
    `forms` names the columns that a function of this module writes, percent="bubble weak". Others are written by
    `number`, words and whole numbers as they are."""
    named = {name: globals()[form] for form, names in forms.items() for name in names.split()}
    cells = {}
    for name, _, head in (pair.strip().partition("=") for pair in heads.split(",")):
        plain = name not in named and not pd.api.types.is_float_dtype(table[name])
        cells[head or name] = (
            table[name].map(str) if plain else written(named.get(name, number), table, name)
        )
    return compact(pd.DataFrame(cells, index=table.index))


def compact(table: pd.DataFrame) -> pd.DataFrame:
    """A table of text without the columns that say nothing."""
    return table.loc[:, (table.fillna(MISSING) != MISSING).any()].fillna(MISSING)


def markdown(table: pd.DataFrame, words: Iterable[str] = WORDS) -> str:
    """A table of text as a Markdown table, numbers to the right and columns of `words` to the left; a sentence if it
    has no lines."""
    if table.empty:
        return "*Nothing of this table was measured.*"
    text = table.astype(str).map(lambda cell: cell.replace("|", "\\|").replace("\n", "↵"))
    for name in set(text).difference(words):
        text[name] = text[name].str.replace(" ", "\u00a0")  # "609 ± 6" stays in one line
    rule = ["---" if name in words else "---:" for name in text]
    return "\n".join(
        "| " + " | ".join(cells) + " |" for cells in [list(text), rule, *text.to_numpy().tolist()]
    )


def terminal(table: pd.DataFrame, width: int = 100) -> str:
    """A table of text in columns for a terminal, its lines cut at `width` letters."""
    text = table.astype(str)
    widths = {name: max(len(name), *text[name].str.len()) for name in text}
    lines = [dict(zip(text, text, strict=True)), *text.to_dict("records")]
    aligned = [
        [f"{line[name]:{'<' if name in WORDS else '>'}{widths[name]}}" for name in text]
        for line in lines
    ]
    return "\n".join("  ".join(cells).rstrip()[:width] for cells in aligned)
