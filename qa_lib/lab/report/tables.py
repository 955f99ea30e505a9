"""Tables of text: columns of a DataFrame written for people, as Markdown or for a terminal.

`render` makes the text, and `markdown` and `terminal` set it.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import pandas as pd

from qa_lib.lab.report.format import MISSING, number

# The headings of columns of words, which are set to the left. All others are set to the right, as
# numbers are: a table with a new column of words has its heading added here.
LEFT = frozenset({
    "answer",
    "arithmetic",
    "card",
    "continuation",
    "evidence for",
    "gold",
    "group",
    "hardware",
    "here",
    "holds",
    "hypothesis",
    "kernel",
    "law",
    "measured here",
    "measured or predicted",
    "model",
    "N is",
    "note",
    "of it",
    "of those tried",
    "off is",
    "one GPU",
    "one process",
    "over",
    "paragraph",
    "part of the step",
    "precision",
    "prompt",
    "question",
    "status",
    "text",
    "their claim",
    "their experiment",
    "training",
    "variant",
    "what it changes",
    "what it is",
})  # fmt: skip


@dataclass(frozen=True)
class Column:
    """How a column of a DataFrame is written in a table."""

    name: str
    """The column of the DataFrame."""
    heading: str = ""
    """What stands above the column; `name` if empty."""
    form: Callable[..., str] | None = None
    """A function of format.py that writes a value. If None, floats are written by `number`, and
    words and whole numbers as they are."""
    interval: bool = True
    """Whether half the width of an interval is written after the value, where the DataFrame has it
    in a column `NAME±`."""


def render(table: pd.DataFrame, columns: Iterable[Column]) -> pd.DataFrame:
    """Return these columns of a DataFrame as text, without those that have no value."""
    texts = {}
    for column in columns:
        form = column.form
        if form is None:
            form = number if pd.api.types.is_float_dtype(table[column.name]) else str
        heading = column.heading or column.name
        if column.interval:
            texts[heading] = column_text(table, column.name, form)
        else:
            texts[heading] = [form(value) for value in table[column.name]]
    return compact(pd.DataFrame(texts, index=table.index))


def column_text(table: pd.DataFrame, name: str, form: Callable[..., str]) -> list[str]:
    """Return a column of a DataFrame as text, with the intervals that column `NAME±` has."""
    if f"{name}±" not in table:
        return [form(value) for value in table[name]]
    texts = []
    for value, half in zip(table[name], table[f"{name}±"], strict=True):
        texts.append(form(value) if pd.isna(half) else form(value, half))
    return texts


def compact(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table of text with '–' for NaN, and without the columns that have nothing else."""
    filled = table.fillna(MISSING)
    has_a_value = (filled != MISSING).any()
    return filled.loc[:, has_a_value]


def markdown(table: pd.DataFrame, left: Collection[str] = LEFT) -> str:
    """Return a table of text as Markdown, or a sentence if it has no rows.

    Columns whose headings are in `left` are set to the left, and all others to the right.
    """
    if table.empty:
        return "*Nothing of this table was measured.*"
    text = table.astype(str).map(lambda cell: cell.replace("|", "\\|").replace("\n", "↵"))
    for heading in text:
        if heading not in left:
            # A space that does not break keeps "609 ± 6" in one line.
            text[heading] = text[heading].str.replace(" ", "\u00a0")
    alignment = ["---" if heading in left else "---:" for heading in text]
    rows = [list(text), alignment, *text.to_numpy().tolist()]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def terminal(table: pd.DataFrame, width: int = 100) -> str:
    """Return a table of text in columns for a terminal, its lines cut at `width` characters."""
    aligned = []
    for heading in table:
        cells = [heading, *table[heading].astype(str)]
        widest = max(map(len, cells))
        if heading in LEFT:
            aligned.append([cell.ljust(widest) for cell in cells])
        else:
            aligned.append([cell.rjust(widest) for cell in cells])
    lines = ["  ".join(cells) for cells in zip(*aligned, strict=True)]
    return "\n".join(line.rstrip()[:width] for line in lines)
