"""`python -m qa_lib report`: the report of a group, README.md's results, and a check of both.

It prints a table of few lines of one group, and makes its page. That of one's own runs is short
(lab/report/own.py); archived groups have that of notebooks/report.ipynb, executed over their
records. It also puts results into README.md, and checks that what is committed is of today's
records.

Reads run records and nothing else, and imports torch only for README.md.
"""

import argparse
import os
import tempfile
import textwrap
from pathlib import Path

import pandas as pd
from PIL import Image

from qa_lib.errors import one_line, printable
from qa_lib.lab.report import evidence, pages, schematics
from qa_lib.lab.report.notebook import brief
from qa_lib.lab.report.own import write_page
from qa_lib.lab.report.readme import with_results
from qa_lib.lab.report.style import SPOILT, digest, reason
from qa_lib.lab.report.summary import summary
from qa_lib.lab.report.tables import terminal
from qa_lib.packages import check_runner, environment_of_jupyter_kernels
from qa_lib.paths import IS_CHECKOUT, ROOT
from qa_lib.records.archive import own_groups
from qa_lib.records.files import writable_folder, write_atomically
from qa_lib.spec.variants import FAMILIES

NOTEBOOK = "notebooks/report.ipynb"
# Each page that is kept -> the notebook that it is of, and its parameters. These notebooks only
# read records.
PAGES = {
    "runs/report.ipynb": (NOTEBOOK, {}),
    "runs/multi-gpu.ipynb": ("notebooks/multi_gpu.ipynb", {}),
    "runs/scaling.ipynb": ("notebooks/scaling.ipynb", {}),
    "runs/report-h200.ipynb": (NOTEBOOK, {"group": "h200-bench"}),  # a second card
}
# Pages whose notebooks train; of these, only the cells that show committed records are made anew.
TRAINED = {
    f"runs/{name}.ipynb": f"notebooks/{name}.ipynb"
    for name in (*FAMILIES.values(), "profiling", "speedrun", "quickstart")
}
PICTURES = ROOT / "docs" / "pictures"  # which show no record
# Pages that train on a CPU or show no record, in a minute; they are executed whole.
TWINS = {
    "runs/explore.ipynb": (
        "notebooks/explore.ipynb",
        {"preset": "smoke", "data": "synthetic:400", "model": "tiny"},
    ),
    "runs/own-loop.ipynb": ("notebooks/own_loop.ipynb", {}),
}
SHOWN = 18  # lines of the table in the terminal


def main(args: argparse.Namespace) -> int:
    """Do what the verb was asked for; return 1 if a check fails, else 0.

    Raises ReportError for what cannot be shown.
    """
    if args.check:
        return print_check(args.runs, args.figures)
    runs = evidence.load_runs(args.runs)
    if args.readme:
        write_results(runs, args.runs, args.figures)
    elif args.pages:
        execute_pages()
    else:
        report(runs, args)
    return 0


# The report of a group.


def report(runs: pd.DataFrame, args: argparse.Namespace) -> None:
    """Print the table of a group, make its page, and say what to open.

    `args` are those of the verb: group, runs and figures.

    Raises ReportError where there is no such group, or where it cannot be shown.
    """
    group = args.group or default_group(runs)
    if group is None:
        raise evidence.ReportError(
            f"no record below {args.runs}: run something first, for example make quickstart"
        )
    shown = runs[runs["group"] == group]
    if shown.empty:
        known = ", ".join(evidence.groups_by_age(runs))
        raise evidence.ReportError(f"no group {group!r} below {args.runs}; there are {known}")
    if not args.group:
        shown = evidence.own_or_all(shown)
    try:
        chosen = evidence.select(shown, group)
        text = overview(chosen, runs)
        if _are_own(shown):
            page = write_page(chosen, args.figures / group)
            text += f"\n\nOpen {page}, with its figure beside it"
        else:
            page = execute_report(args.runs, args.figures, group)
            text += f"\n\nOpen {page}\nor   {page.with_suffix('.md')}, with the figures beside it"
    except SPOILT as problem:
        raise evidence.ReportError(f"group {group!r} cannot be shown: {reason(problem)}") from None
    print(printable(text))


def _are_own(runs: pd.DataFrame) -> bool:
    """Return whether all of a group's runs are the user's own, and none came with the checkout."""
    return bool(own_groups(runs["run"])) and len(evidence.own_or_all(runs)) == len(runs)


def default_group(runs: pd.DataFrame) -> str | None:
    """Return the group that is shown where none is named.

    It is the newest of one's own, or of all where none is one's own; None without any group.
    """
    groups = evidence.groups_by_age(evidence.own_or_all(runs)) or evidence.groups_by_age(runs)
    return groups[-1] if groups else None


def overview(chosen: pd.DataFrame, runs: pd.DataFrame) -> str:
    """Return what a group is evidence for, its scores and its speeds, as a terminal shows them.

    `chosen` are the group's runs that count (`evidence.select`). A CPU's speeds give way to those
    of the reference group in `runs`.
    """
    group = chosen["group"].iloc[0]
    lines = evidence.largest_micro_batch(summary(chosen))
    table = brief(lines, chosen, runs)
    parts = [
        f"Group {group}, evidence for: {evidence.purpose(chosen)}",
        f"{len(chosen)} runs, micro-batch {lines['micro_batch'].iloc[0]}",
        "",
        terminal(table[:SHOWN]),
    ]
    if len(table) > SHOWN:
        parts.append(f"and {len(table) - SHOWN} more in the report")
    others = [name for name in evidence.groups_by_age(evidence.own_or_all(runs)) if name != group]
    if others:
        names = f"Other groups (--group): {', '.join(others)}"
        parts += ["", textwrap.shorten(names, 100, placeholder=" …")]
    return "\n".join(parts)


# Pages that are notebooks.


def execute_pages() -> None:
    """Execute the notebooks of PAGES and TWINS into the checkout, and of TRAINED the cells of
    records.

    Draws the pictures that show no record anew, too.

    Raises ReportError anywhere but in the root of a checkout.
    """
    if not IS_CHECKOUT or Path.cwd() != ROOT:
        raise evidence.ReportError("--pages makes the pages of a checkout: type it in its root")
    for page, (notebook, parameters) in (PAGES | TWINS).items():
        execute(notebook, ROOT / page, parameters)
        print(f"{notebook} executed into {page}")
    for page in TWINS:
        # Which is without the code that they are about.
        (ROOT / page).with_suffix(".md").unlink()
    for page, notebook in TRAINED.items():
        execute_cells_of_records(notebook, ROOT / page)
        print(f"what {page} shows of committed records made anew")
    digests = _committed_digests(evidence.load_runs(ROOT / "runs"), ROOT / "runs")
    for page in (*PAGES, *TWINS, *TRAINED):
        stamp(ROOT / page, digests)
    schematics.draw(PICTURES)
    print(f"pictures drawn into {PICTURES.relative_to(ROOT)}")


def execute_cells_of_records(notebook: str, page: Path) -> None:
    """Execute those cells of a notebook that show committed records, and put them into its page.

    The other cells stay as they ran (see `pages.cells_of_today`).
    """
    import nbformat

    of_notebook = nbformat.read(ROOT / notebook, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        part = pages.without_training(of_notebook)
        nbformat.write(part, Path(folder, "part.ipynb"))
        execute(f"{folder}/part.ipynb", Path(folder, "executed.ipynb"), {})
        executed = nbformat.read(Path(folder, "executed.ipynb"), as_version=4)
    kept = nbformat.read(page, as_version=4)
    kept.cells = pages.cells_of_today(kept, of_notebook)
    pages.take_cells(kept, executed, pages.cells_of_records(part))
    write_atomically(page, nbformat.writes(kept).rstrip() + "\n")


def stamp(page: Path, digests: dict[str, str]) -> None:
    """Write into a page the digests of the records that it shows, and its Markdown if it has one.

    `digests` are those of all groups.
    """
    import nbformat

    content = nbformat.read(page, as_version=4)
    content.metadata["records"] = pages.shown_digests(content, digests)
    write_atomically(page, nbformat.writes(content).rstrip() + "\n")
    if page.with_suffix(".md").exists():
        write_atomically(page.with_suffix(".md"), as_markdown(content, page))


def _committed_digests(runs: pd.DataFrame, runs_dir: Path) -> dict[str, str]:
    """Return the digest of the records of each group that is committed."""
    return pages.group_digests(runs[runs["group"].isin(evidence.committed_groups(runs_dir))])


def execute_report(runs: Path, figures: Path, group: str) -> Path:
    """Execute the long page of a group into its folder below `figures`; return the page's path."""
    page = figures / group / "report.ipynb"
    parameters = {
        "group": group,
        "runs": os.path.relpath(runs),
        "figures": os.path.relpath(figures),
    }
    execute(NOTEBOOK, page, parameters)
    return page


def execute(notebook: str, page: Path, parameters: dict) -> None:
    """Execute a notebook of ROOT by papermill into `page`, and write it as Markdown beside it.

    It runs in the current folder. The page has no traces of when and where.

    Raises ReportError, which says where the notebook stopped, and UserError without papermill.
    """
    check_runner()
    # These take a second.
    import nbformat
    import papermill
    from traitlets.config import Config

    writable_folder(page.parent)
    with tempfile.TemporaryDirectory() as folder:
        executed = Path(folder, "out.ipynb")
        # The kernel talks over files of its own, and listens on no port.
        transport = {"transport": "ipc", "ip": f"{folder}/kernel"}
        try:
            with environment_of_jupyter_kernels():
                papermill.execute_notebook(
                    ROOT / notebook,
                    executed,
                    parameters,
                    cwd=".",
                    config=Config(KernelManager=transport),
                    progress_bar=False,
                    kernel_name="python3",
                )
        except papermill.PapermillExecutionError as problem:
            raise evidence.ReportError(
                f"{notebook} stopped: {problem.ename}, {problem.evalue}"
            ) from None
        content = nbformat.read(executed, as_version=4)
    _remove_traces(content, nbformat.read(ROOT / notebook, as_version=4))
    write_atomically(page, nbformat.writes(content).rstrip() + "\n")
    write_atomically(page.with_suffix(".md"), as_markdown(content, page))


def _remove_traces(executed, notebook) -> None:
    """Remove from an executed notebook what tells when and where it was executed."""
    executed.metadata = notebook.metadata
    for cell in executed.cells:
        tags = cell.metadata.get("tags", [])
        cell.metadata = {"tags": tags} if tags else {}
        if tags == [pages.INJECTED]:
            cell.id = pages.INJECTED  # papermill draws one at random


def as_markdown(executed, page: Path) -> str:
    """Return an executed notebook as Markdown.

    It is without code, and without the sentences that lead to code alone (tag `setup`). Its
    pictures are those that were saved as files; links to them are from the folder of `page`. Last
    stand the records that a kept page is of, with their digests.
    """
    parts = []
    for cell in executed.cells:
        if cell.cell_type == "markdown" and "setup" not in cell.metadata.get("tags", []):
            parts.append(cell.source)
        for output in cell.get("outputs", []):
            picture = output.get("metadata", {}).get("image/png", {})
            data = output.get("data", {})
            if "file" in picture:
                file = Path(os.path.relpath(picture["file"], page.parent))
                parts.append(f"![{picture['alt']}]({file.as_posix()})")
            elif "text/markdown" in data:
                parts.append(data["text/markdown"])
    records = executed.metadata.get("records", {})
    if records:
        words = [f"`{group}` ({value})" for group, value in records.items()]
        parts.append(f"Records, with their digests: {', '.join(words)}.")
    return "\n\n".join(parts) + "\n"


# README.md, and what is committed.


def write_results(runs: pd.DataFrame, runs_dir: Path, figures: Path) -> None:
    """Write the results into README.md and pages of docs/, and say into which."""
    for page, (_, text) in with_results(runs, runs_dir, figures).items():
        write_atomically(page, text)
        print(f"results written into {page}")


def print_check(runs_dir: Path, figures: Path) -> int:
    """Print what is not of today's records, a line each; return 1 if there is any, else 0.

    A record that cannot be read counts too.
    """
    problems: list[str] = []
    runs = evidence.load_runs(runs_dir, lambda _, problem: problems.append(str(problem)))
    problems += check(runs, runs_dir, figures)
    for problem in problems:
        print(one_line(problem))
    if not problems:
        print("README.md, pages and figures of the committed runs are up to date")
    return 1 if problems else 0


def check(runs: pd.DataFrame, runs_dir: Path, figures: Path) -> list[str]:
    """Return a sentence for each figure, page and README.md that is not of today's records."""
    problems = []
    for group in evidence.committed_groups(runs_dir):
        problems += _old_figures(runs, group, figures / group)
    problems += _old_pages()
    problems += _pages_of_other_records(_committed_digests(runs, runs_dir))
    for page, (before, after) in with_results(runs, runs_dir, figures).items():
        if before != after:
            problems.append(f"{page} is not up to date: run python -m qa_lib report --readme")
    return problems


def _old_figures(runs: pd.DataFrame, group: str, folder: Path) -> list[str]:
    """Return a sentence for each figure in a group's folder that is not of today's records.

    A figure of several groups is of the runs whose scores speak for the group.
    """
    problems = []
    of_group = digest(evidence.select(runs, group))
    for path in sorted(folder.glob("*.png")):
        with Image.open(path) as image:
            drawn_from = image.text.get("Records")
            is_of_several = "Groups" in image.text
        today = digest(evidence.judging_runs(runs, group)) if is_of_several else of_group
        if drawn_from != today:
            problems.append(f"{path} is of other records: run python -m qa_lib report --pages")
    return problems


def _pages_of_other_records(digests: dict[str, str]) -> list[str]:
    """Return a sentence for each page that shows other records than today's.

    `digests` are those of all committed groups. A page in Markdown is to be that of its notebook.
    """
    import nbformat

    problems = []
    for page in (*PAGES, *TWINS, *TRAINED):
        if not (ROOT / page).exists():
            continue
        kept = nbformat.read(ROOT / page, as_version=4)
        changed = pages.changed_groups(kept, digests)
        if changed:
            problems.append(
                f"{page} is of other records of {', '.join(changed)}: "
                "run python -m qa_lib report --pages"
            )
        text = (ROOT / page).with_suffix(".md")
        if text.exists() and text.read_text(encoding="utf-8") != as_markdown(kept, Path(page)):
            problems.append(
                f"{Path(page).with_suffix('.md')} is not what {page} says: "
                "run python -m qa_lib report --pages"
            )
    return problems


def _old_pages() -> list[str]:
    """Return a sentence for each page whose cells are not those of its notebook.

    Pages that trained are to be what `pages.cells_of_today` makes of them.
    """
    import nbformat

    problems = []
    whole = PAGES | TWINS
    notebook_of = {page: notebook for page, (notebook, _) in whole.items()} | TRAINED
    for page, notebook in notebook_of.items():
        if not (ROOT / page).exists():
            continue
        kept = nbformat.read(ROOT / page, as_version=4)
        of_notebook = nbformat.read(ROOT / notebook, as_version=4)
        if page in whole:
            is_of_today = _sources(kept) == _sources(of_notebook)
        else:
            is_of_today = kept.cells == pages.cells_of_today(kept, of_notebook)
        if not is_of_today:
            problems.append(
                f"{page} is not of today's {notebook}: run python -m qa_lib report --pages"
            )
    return problems


def _sources(notebook) -> list[str]:
    """Return the sources of a notebook's cells, less that of injected parameters."""
    return [cell.source for cell in notebook.cells if cell.id != pages.INJECTED]
