"""The records that a rendered page shows, and whether they are today's.

A page is an executed notebook that is kept. Its metadata have, under `records`, each group of
records that the page names, with the digest of the group's records when the page was made. A page
is old where today's digests are others.

Links that `make links` writes stand in a page's text alone, so that no digest depends on them.
"""

import ast
import copy
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from qa_lib.lab.report.style import digest

if TYPE_CHECKING:  # it takes a second
    from nbformat import NotebookNode

# The tag of cells that show committed records, or variants of this library, and need nothing that
# the notebook trained.
OF_RECORDS = "records"
INJECTED = "injected-parameters"  # the tag and the id of papermill's cell
# What stands above the outputs of a cell that trained and has changed since, or where all of them
# are left out.
OLDER = "*This cell stands here as it ran. The notebook's has changed since.*"
LEFT_OUT = "*What this cell drew is left out: other code draws it by now.*"
# The titles of pictures that other code draws by now, in cells whose own source is the same.
FORMER_TITLES = re.compile(r"Training loss at the end: |A step takes .* → ")


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


# Pages whose notebooks train: cells that show committed records are executed by themselves, and the
# others stay as they ran.


def cells_of_today(page: "NotebookNode", notebook: "NotebookNode") -> list["NotebookNode"]:
    """Return the cells of a notebook as its page shows them.

    A cell that has shown something is the page's, as it ran; OLDER says so where the notebook's has
    changed since. Pictures of FORMER_TITLES are left out. Other cells are the notebook's, and so
    are those of OF_RECORDS, which show nothing until they are executed. Parameters that papermill
    put into the page stay.
    """
    kept = {cell.id: cell for cell in page.cells}
    injected = [cell for cell in page.cells if INJECTED in _tags(cell)]
    cells = []
    for cell in notebook.cells:
        cells.append(_cell_of_today(kept.get(cell.id), cell))
        if "parameters" in _tags(cell):
            cells += injected
    return cells


def _cell_of_today(kept: "NotebookNode | None", cell: "NotebookNode") -> "NotebookNode":
    """Return a cell of a notebook as its page shows it, whose cell is `kept`, or None if new."""
    tags = _tags(cell)
    is_same = kept is not None and _same_code(kept, cell) and _tags(kept) == tags
    has_shown = kept is not None and kept.get("outputs")
    if OF_RECORDS in tags or not has_shown:
        if is_same:
            return kept
        today = copy.deepcopy(cell)
        today.metadata = {"tags": tags} if tags else {}
        return today
    shown = [output for output in kept.outputs if not _is_note(output)]
    current = [output for output in shown if not _is_former_picture(output)]
    if is_same and len(current) == len(kept.outputs):
        return kept
    older = copy.deepcopy(kept)
    older.outputs = [] if is_same else [_note(OLDER)]
    if len(current) < len(shown) or _has_note(kept, LEFT_OUT):
        older.outputs.append(_note(LEFT_OUT))
    older.outputs += current
    return older


def _same_code(kept: "NotebookNode", cell: "NotebookNode") -> bool:
    """Return whether two cells are the same but for comments and layout."""
    if kept.source == cell.source or cell.cell_type != "code":
        return kept.source == cell.source
    try:
        return ast.dump(ast.parse(kept.source)) == ast.dump(ast.parse(cell.source))
    except SyntaxError:  # one of Jupyter's commands
        return False


def _note(text: str) -> "NotebookNode":
    """Return an output that shows a text."""
    import nbformat

    return nbformat.v4.new_output("display_data", {"text/markdown": text})


def _is_note(output: "NotebookNode") -> bool:
    """Return whether an output is one that `_cell_of_today` adds."""
    return output.get("data", {}).get("text/markdown") in (OLDER, LEFT_OUT)


def _has_note(cell: "NotebookNode", text: str) -> bool:
    """Return whether a cell of a page shows a note."""
    return _note(text) in cell.outputs


def _is_former_picture(output: "NotebookNode") -> bool:
    """Return whether an output is a picture of FORMER_TITLES."""
    title = output.get("metadata", {}).get("image/png", {}).get("alt", "")
    return FORMER_TITLES.match(title) is not None


def _tags(cell: "NotebookNode") -> list[str]:
    """Return the tags of a cell."""
    return cell.metadata.get("tags", [])


def cells_of_records(notebook: "NotebookNode") -> list[str]:
    """Return the ids of the cells of a notebook that have the tag OF_RECORDS."""
    return [cell.id for cell in notebook.cells if OF_RECORDS in _tags(cell)]


def without_training(notebook: "NotebookNode") -> "NotebookNode":
    """Return a notebook of the cells that show committed records, and of those that prepare them.

    The latter begin with `# @title`, or have the tag `parameters`.
    """
    own = cells_of_records(notebook)
    cells = [
        cell
        for cell in notebook.cells
        if cell.id in own or cell.source.startswith("# @title") or "parameters" in _tags(cell)
    ]
    part = copy.copy(notebook)
    part.cells = cells
    return part


def take_cells(page: "NotebookNode", executed: "NotebookNode", ids: Sequence[str]) -> None:
    """Put cells of an executed notebook into a page, in place of those of the same ids."""
    made = {cell.id: cell for cell in executed.cells if cell.id in ids}
    page.cells = [made.get(cell.id, cell) for cell in page.cells]
