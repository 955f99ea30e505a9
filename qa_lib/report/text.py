"""How values are written, and the report's prose.

A value that was not measured is NaN and written as "–". Sentences and paragraphs are macros of the templates in texts/:
Python computes their values and `say` puts these in, so that the prose can be read, and changed, in one place.
"""

import math
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from qa_lib.report.runs import NotMeasured

MISSING = "–"
# Columns of words, which are set to the left.
LEFT = {"row", "what it changes", "what it is", "group", "hardware", "you have at least", "model", "precision",
        "status", "note", "one process", "arithmetic", "claim of the seeds", "of it", "holds", "measured here", "why",
        "question",
        "answer", "gold", "paragraph", "text", "prompt", "continuation", "hypothesis", "their experiment", "one GPU",
        "N is", "law", "of those tried"}  # fmt: skip


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


def share(value: float, half: float = math.nan) -> str:
    """A part of a whole, or of another row's value, in percent, with ± half an interval where there is one."""
    return f"{number(100 * value, 100 * half)} %" if pd.notna(value) else MISSING


def points(value: float, half: float = math.nan, sign: str = "") -> str:
    """A score or a difference of scores with two decimals, as F1 in points of 100 has; `sign` "+" marks a gain."""
    if pd.isna(value):
        return MISSING
    return f"{value:{sign}.2f}".replace("-", "−") + (f" ± {half:.2f}" if pd.notna(half) else "")


def gain(value: float, half: float = math.nan) -> str:
    """A difference of scores with its sign."""
    return points(value, half, "+")


def markdown(table: pd.DataFrame) -> str:
    """A table of text as a Markdown table, numbers to the right; a sentence if it has no rows."""
    if table.empty:
        return "*No row of this table has been run.*"
    text = table.astype(str).map(lambda cell: cell.replace("|", "\\|").replace("\n", "↵"))
    for name in set(text) - LEFT:
        text[name] = text[name].str.replace(" ", "\u00a0")  # "609 ± 6" stays in one line
    rule = ["---" if name in LEFT else "---:" for name in text]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [list(text), rule, *text.to_numpy().tolist()])


def or_why(table_of: Callable[..., pd.DataFrame], *sources) -> str:
    """table_of(*sources) as Markdown; or the reason, where it is not measured."""
    try:
        return markdown(table_of(*sources))
    except NotMeasured as reason:
        return f"*No table: {reason}.*"


def said_or_why(sentence_of: Callable[..., str], *sources) -> str:
    """sentence_of(*sources); or the reason, where it is not measured."""
    try:
        return sentence_of(*sources)
    except NotMeasured as reason:
        return f"*Not known: {reason}.*"


def folded(title: str, *parts: str) -> str:
    """Paragraphs and tables under a title that is clicked on to see them, in Markdown."""
    return "\n\n".join([f"<details><summary>{title}</summary>", *parts, "</details>"])


def terminal(table: pd.DataFrame) -> str:
    """A table of text in columns for a terminal; notes are not padded, so that a long one only wraps its own line."""
    text = table.astype(str)
    widths = {name: max(len(name), *text[name].str.len()) for name in text}
    widths["note"] = 0
    rows = [dict(zip(text, text, strict=True)), *text.to_dict("records")]
    aligned = [[f"{row[name]:{'<' if name in LEFT else '>'}{widths[name]}}" for name in text] for row in rows]
    return "\n".join("  ".join(cells).rstrip() for cells in aligned)


_TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).with_name("texts")), undefined=StrictUndefined)
_TEMPLATES.globals["inf"] = math.inf
FILTERS = _TEMPLATES.filters  # what texts may call; a module with words of its own adds to them
FILTERS |= {function.__name__: function for function in (number, factor, share, points, gain)}


def say(text: str, **values) -> str:
    """A text of texts/ with these values, in one line: 'claims.stack' is the macro `stack` of claims.md.j2, which takes
    of the values those that it names."""
    file, name = text.split(".")
    macro = getattr(_TEMPLATES.get_template(f"{file}.md.j2").module, name)
    return " ".join(macro(**{argument: values[argument] for argument in macro.arguments}).split())
