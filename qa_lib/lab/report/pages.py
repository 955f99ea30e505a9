"""The records that a rendered page shows, and whether they are today's.

A page is an executed notebook that is kept. Its metadata have, under `records`, each group of
records that the page names, with the digest of the group's records when the page was made. A page
is old where today's digests are others.

Links that `make links` writes stand in a page's text alone, so that no digest depends on them.
"""

import copy
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from qa_lib.lab.report.style import digest

if TYPE_CHECKING:  # it takes a second
    from nbformat import NotebookNode

# The tag of cells that show committed records and need nothing that the notebook trained.
OF_RECORDS = "records"


def group_digests(runs: pd.DataFrame) -> dict[str, str]:
    """Return the digest of the records of each group of `runs`."""
    return {str(name): digest(part) for name, part in runs.groupby("group")}


def shown_digests(page: "NotebookNode", digests: dict[str, str]) -> dict[str, str]:
    """Return those of `digests` whose groups a page names, in a text, a table or a figure's file.

    `digests` are those of all groups (see `group_digests`).
    """
    text = "\n".join(_texts(page))
    return {
        group: value
        for group, value in sorted(digests.items())
        if re.search(rf"(?<![\w.-]){re.escape(group)}(?![\w-])", text)
    }


def _texts(page: "NotebookNode") -> list[str]:
    """Return what a page says: its cells, its tables, and what its pictures say of themselves."""
    texts = []
    for cell in page.cells:
        texts.append(cell.source)
        for output in cell.get("outputs", []):
            texts.append(output.get("data", {}).get("text/markdown", ""))
            texts += output.get("metadata", {}).get("image/png", {}).values()
    return [text for text in texts if isinstance(text, str)]


def changed_groups(page: "NotebookNode", digests: dict[str, str]) -> list[str]:
    """Return the groups that a page names and whose records are others than when it was made.

    A group that is there no longer is among them, and one of which the page keeps no digest.
    """
    kept = page.metadata.get("records", {})
    today = shown_digests(page, digests)
    return [name for name in sorted({*kept, *today}) if kept.get(name) != today.get(name)]


# Pages whose notebooks train: cells that show committed records are executed by themselves.


def cells_of_records(notebook: "NotebookNode") -> list[str]:
    """Return the ids of the cells of a notebook that have the tag OF_RECORDS."""
    return [cell.id for cell in notebook.cells if OF_RECORDS in cell.metadata.get("tags", [])]


def without_training(notebook: "NotebookNode") -> "NotebookNode":
    """Return a notebook of the cells that show committed records, and of those that prepare them.

    The latter begin with `# @title`, or have the tag `parameters`.
    """
    own = cells_of_records(notebook)
    cells = [
        cell
        for cell in notebook.cells
        if cell.id in own
        or cell.source.startswith("# @title")
        or "parameters" in cell.metadata.get("tags", [])
    ]
    part = copy.copy(notebook)
    part.cells = cells
    return part


def take_cells(page: "NotebookNode", executed: "NotebookNode", ids: Sequence[str]) -> None:
    """Put cells of an executed notebook into a page, in place of those of the same ids."""
    made = {cell.id: cell for cell in executed.cells if cell.id in ids}
    page.cells = [made.get(cell.id, cell) for cell in page.cells]
