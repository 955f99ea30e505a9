"""`python -m qa_lib report`: prints a table of few lines of one group, and makes its page. That of one's own runs is
short (lab/report/own.py); archived groups have that of notebooks/report.ipynb, executed over their records. Also puts
results into README.md, and checks that what is committed is of today's records.

Reads run records and nothing else, and never imports torch.
"""

import argparse
import os
import tempfile
import textwrap
from pathlib import Path

import pandas as pd
from PIL import Image

from qa_lib.errors import one_line, printable
from qa_lib.lab.report import evidence
from qa_lib.lab.report.notebook import brief
from qa_lib.lab.report.own import write_page
from qa_lib.lab.report.readme import with_results
from qa_lib.lab.report.style import SPOILT, digest, reason
from qa_lib.lab.report.summary import summary
from qa_lib.lab.report.tables import terminal
from qa_lib.packages import check_runner, environment_of_kernels
from qa_lib.paths import IS_CHECKOUT, ROOT
from qa_lib.records.archive import own_groups
from qa_lib.records.files import writable_folder, write_atomically

NOTEBOOK = "notebooks/report.ipynb"
READERS = ("report", "multi_gpu", "scaling")  # notebooks that only read records
# Each page that is kept -> the notebook that it is of, and its parameters.
PAGES = {
    f"runs/{name.replace('_', '-')}.ipynb": (f"notebooks/{name}.ipynb", {}) for name in READERS
}
PAGES["runs/report-h200.ipynb"] = NOTEBOOK, {"group": "h200-bench"}  # a second card
SHOWN = 18  # lines of the table in the terminal


def main(args: argparse.Namespace) -> int:
    """Make the report of a group; 1 if a check fails."""
    if args.check:
        problems: list[str] = []
        runs = evidence.load_runs(args.runs, lambda _, problem: problems.append(str(problem)))
        problems += check(runs, args.runs, args.figures)
        clean = "README.md, pages and figures of the committed runs are up to date"
        print("\n".join(map(one_line, problems)) or clean)
        return 1 if problems else 0
    runs = evidence.load_runs(args.runs)
    if args.readme:
        for page, (_, after) in with_results(runs, args.runs, args.figures).items():
            write_atomically(page, after)
            print(f"results written into {page}")
        return 0
    if args.pages:
        if not IS_CHECKOUT or Path.cwd() != ROOT:
            raise evidence.ReportError("--pages makes the pages of a checkout: type it in its root")
        for page, (notebook, parameters) in PAGES.items():
            execute(notebook, ROOT / page, parameters)
            print(f"{notebook} executed into {page}")
        return 0
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
    folder = args.figures / group
    try:
        chosen = evidence.select(shown, group)
        said = overview(chosen, runs)
        if own_groups(shown["run"]) and len(evidence.own_or_all(shown)) == len(shown):
            said += f"\n\nOpen {write_page(chosen, folder)}, with its figure beside it"
        else:
            page = execute_report(args.runs, args.figures, group)
            said += f"\n\nOpen {page}\nor   {page.with_suffix('.md')}, with the figures beside it"
    except SPOILT as problem:
        raise evidence.ReportError(f"group {group!r} cannot be shown: {reason(problem)}") from None
    print(printable(said))
    return 0


def default_group(runs: pd.DataFrame) -> str | None:
    """The group that is shown where none is named: the newest of one's own, or of all where none is one's own."""
    for part in (evidence.own_or_all(runs), runs):
        if groups := evidence.groups_by_age(part):
            return groups[-1]
    return None


def execute_report(runs: Path, figures: Path, group: str) -> Path:
    """The long page of a group, executed into its folder below `figures`; returns the page's path."""
    page = figures / group / "report.ipynb"
    given_paths = {
        name: os.path.relpath(path) for name, path in {"runs": runs, "figures": figures}.items()
    }
    execute(NOTEBOOK, page, {"group": group} | given_paths)
    return page


def overview(own: pd.DataFrame, runs: pd.DataFrame) -> str:
    """The table of a group's runs `own` (evidence.select) in few lines: scores and speeds, of a
    CPU's runs the speeds of the reference group in `runs` instead."""
    group = own["group"].iloc[0]
    lines = evidence.largest_micro_batch(summary(own))
    table = brief(lines, own, runs)
    said = [
        f"Group {group}: {len(own)} runs, micro-batch {lines['micro_batch'].iloc[0]}",
        "",
        terminal(table[:SHOWN]),
    ]
    if len(table) > SHOWN:
        said.append(f"and {len(table) - SHOWN} more in the report")
    others = [name for name in evidence.groups_by_age(evidence.own_or_all(runs)) if name != group]
    if others:
        said += [
            "",
            textwrap.shorten(f"Other groups (--group): {', '.join(others)}", 100, placeholder=" …"),
        ]
    return "\n".join(said)


def execute(notebook: str, page: Path, parameters: dict) -> None:
    """A notebook of ROOT executed by papermill in the current folder into `page`, and as Markdown beside it; without
    traces of when and where. Raises ReportError, which says where it stopped, and UserError without papermill."""
    check_runner()
    import nbformat  # these take a second
    import papermill

    writable_folder(page.parent)
    from traitlets.config import Config

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.ipynb")
        # Over files of its own: the kernel listens on no port.
        own = {
            "config": Config(KernelManager={"transport": "ipc", "ip": f"{folder}/kernel"}),
            "progress_bar": False,
            "kernel_name": "python3",
        }
        try:
            with environment_of_kernels():
                papermill.execute_notebook(ROOT / notebook, out, parameters, cwd=".", **own)
        except papermill.PapermillExecutionError as problem:
            raise evidence.ReportError(
                f"{notebook} stopped: {problem.ename}, {problem.evalue}"
            ) from None
        found = nbformat.read(out, as_version=4)
    found.metadata = nbformat.read(ROOT / notebook, as_version=4).metadata
    for cell in found.cells:
        cell.metadata = {"tags": tags} if (tags := cell.metadata.get("tags")) else {}
        cell.id = "injected-parameters" if tags == ["injected-parameters"] else cell.id
    write_atomically(page, nbformat.writes(found).rstrip() + "\n")
    write_atomically(page.with_suffix(".md"), as_markdown(found, page))


def as_markdown(found, page: Path) -> str:
    """An executed notebook as Markdown without its code and the sentences that lead to code alone (tag `setup`). Its
    pictures are those that were saved as files."""
    parts = []
    for cell in found.cells:
        if cell.cell_type == "markdown" and "setup" not in cell.metadata.get("tags", []):
            parts.append(cell.source)
        for output in cell.get("outputs", []):
            picture = output.get("metadata", {}).get("image/png", {})
            if "file" in picture:
                file = os.path.relpath(picture["file"], page.parent)
                parts.append(f"![{picture['alt']}]({Path(file).as_posix()})")
            elif "text/markdown" in output.get("data", {}):
                parts.append(output["data"]["text/markdown"])
    return "\n\n".join(parts) + "\n"


def check(runs: pd.DataFrame, runs_dir: Path, figures: Path) -> list[str]:
    """A line for each figure of a committed group that is of other records, each page that is of another notebook, and
    one for README.md if that is behind."""
    import nbformat

    problems = []
    for group in evidence.committed_groups(runs_dir):
        now = digest(evidence.select(runs, group))
        for drawn in sorted((figures / group).glob("*.png")):
            with Image.open(drawn) as image:
                if image.text.get("Records") != now:
                    problems.append(
                        f"{drawn} is of other records: run python -m qa_lib report --pages"
                    )
    for page, (notebook, _) in PAGES.items():
        if (ROOT / page).exists():
            kept, source = (
                nbformat.read(ROOT / file, as_version=4).cells for file in (page, notebook)
            )
            kept = [cell for cell in kept if cell.id != "injected-parameters"]
            if [cell.source for cell in kept] != [cell.source for cell in source]:
                problems.append(
                    f"{page} is not of today's {notebook}: run python -m qa_lib report --pages"
                )
    for page, (before, after) in with_results(runs, runs_dir, figures).items():
        if before != after:
            problems.append(f"{page} is not up to date: run python -m qa_lib report --readme")
    return problems
