"""Tables of text: columns of a DataFrame written for people, as Markdown or for a terminal."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import pandas as pd

from qa_lib.lab.report.format import MISSING, number

# The headings of columns of words, which are set to the left. All others are set to the right.
LEFT = frozenset({
    "answer",
    "arithmetic",
    "card",
    "continuation",
    "gold",
    "group",
    "hardware",
    "holds",
    "hypothesis",
    "law",
    "measured here",
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
    "precision",
    "prompt",
    "question",
    "status",
    "text",
    "their claim",
    "their experiment",
    "variant",
    "what it changes",
    "what it is",
})  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A column of a table that people read, made of a column of a DataFrame."""

    name: str
    """The column of the DataFrame."""
    heading: str = ""
    """What stands above the column; its name where empty."""
    form: Callable[..., str] | None = None
    """A function of format.py that writes a value. Without one floats are written by `number`, and
    words and whole numbers as they are."""
    interval: bool = True
    """Whether half an interval is written too, where the DataFrame has it in a column `NAME±`."""


def render(table: pd.DataFrame, columns: Iterable[Column]) -> pd.DataFrame:
    """Return these columns of a DataFrame as text, without those that say nothing."""
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
    """Return a column of a DataFrame as text, with half an interval where column `NAME±` has it."""
    if f"{name}±" not in table:
        return [form(value) for value in table[name]]
    texts = []
    for value, half in zip(table[name], table[f"{name}±"], strict=True):
        texts.append(form(value) if pd.isna(half) else form(value, half))
    return texts


def compact(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table of text without the columns that say nothing, and with '–' for NaN."""
    filled = table.fillna(MISSING)
    says_something = (filled != MISSING).any()
    return filled.loc[:, says_something]


def markdown(table: pd.DataFrame, left: Collection[str] = LEFT) -> str:
    """Return a table of text as Markdown, or a sentence if it has no lines.

    Columns whose headings are in `left` are set to the left, and numbers, in the others, to the
    right.
    """
    if table.empty:
        return "*Nothing of this table was measured.*"
    text = table.astype(str).map(lambda cell: cell.replace("|", "\\|").replace("\n", "↵"))
    for heading in text:
        if heading not in left:
            # "609 ± 6" stays in one line
            text[heading] = text[heading].str.replace(" ", "\u00a0")
    rule = ["---" if heading in left else "---:" for heading in text]
    lines = [list(text), rule, *text.to_numpy().tolist()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def terminal(table: pd.DataFrame, width: int = 100) -> str:
    """Return a table of text in columns for a terminal, its lines cut at `width` letters."""
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
