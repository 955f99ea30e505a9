"""`python -m qa_lib report`: executes notebooks/report.ipynb over the records of one group, which draws its figures,
and prints a table of few lines; puts results into README.md; checks that what is committed is of today's records.

Reads run records and nothing else, and never imports torch.
"""

import argparse
import os
import tempfile
import textwrap
from pathlib import Path

import pandas as pd
from PIL import Image

from qa_lib.errors import printable
from qa_lib.record import write_atomically
from qa_lib.report import load
from qa_lib.report.format import terminal
from qa_lib.report.notebook import brief
from qa_lib.report.readme import with_results
from qa_lib.report.style import SPOILT, digest, reason
from qa_lib.report.summary import summary
from qa_lib.run.process import jupyter_path

ROOT = Path(__file__).parents[2]
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
        runs = load.load_runs(args.runs, lambda _, problem: problems.append(str(problem)))
        problems += check(runs, args.runs, args.figures)
        print(
            "\n".join(problems)
            or "README.md, pages and figures of the committed runs are up to date"
        )
        return 1 if problems else 0
    runs = load.load_runs(args.runs)
    if args.readme:
        for page, (_, after) in with_results(runs, args.runs, args.figures).items():
            write_atomically(page, after)
            print(f"results written into {page}")
        return 0
    if args.pages:
        for page, (notebook, parameters) in PAGES.items():
            execute(notebook, ROOT / page, parameters)
            print(f"{notebook} executed into {page}")
        return 0
    began = load.newest(runs)
    if not began:
        raise load.ReportError(
            f"no record below {args.runs}: run something first, for example make quickstart"
        )
    group = args.group or [*began][-1]
    if group not in set(runs["group"]):
        raise load.ReportError(
            f"no group {group!r} below {args.runs}; there are {', '.join(began)}"
        )
    page = args.figures / group / "report.ipynb"
    given_paths = {
        name: os.path.relpath(getattr(args, name).absolute(), ROOT) for name in ("runs", "figures")
    }
    try:
        said = printable(overview(runs, group))
    except SPOILT as problem:
        raise load.ReportError(f"group {group!r} cannot be shown: {reason(problem)}") from None
    execute(NOTEBOOK, page, {"group": group} | given_paths)
    print(f"{said}\n\nOpen {page}\nor   {page.with_suffix('.md')}, with the figures beside it")
    return 0


def overview(runs: pd.DataFrame, group: str) -> str:
    """A group's table in few lines: scores and speeds, of a CPU's runs the speeds of the reference group instead."""
    own = load.select(runs, group)
    lines = load.largest_batch(summary(own))
    table = brief(lines, own, runs)
    said = [
        f"Group {group}: {len(own)} runs, micro-batch {lines['micro_batch'].iloc[0]}",
        "",
        terminal(table[:SHOWN]),
    ]
    if len(table) > SHOWN:
        said.append(f"and {len(table) - SHOWN} more in the report")
    others = [name for name in load.newest(runs) if name != group]
    if others:
        said += [
            "",
            textwrap.shorten(f"Other groups (--group): {', '.join(others)}", 100, placeholder=" …"),
        ]
    return "\n".join(said)


def execute(notebook: str, page: Path, parameters: dict) -> None:
    """A notebook executed by papermill from the repository's root into `page`, and as Markdown beside it; without
    traces of when and where. Raises ReportError, which says where it stopped."""
    import nbformat  # these take a second
    import papermill
    from traitlets.config import Config

    os.environ["JUPYTER_PATH"] = jupyter_path()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.ipynb")
        # Over files of its own: the kernel listens on no port.
        own = {
            "config": Config(KernelManager={"transport": "ipc", "ip": f"{folder}/kernel"}),
            "progress_bar": False,
            "kernel_name": "python3",
        }
        try:
            papermill.execute_notebook(ROOT / notebook, out, parameters, cwd=ROOT, **own)
        except papermill.PapermillExecutionError as problem:
            raise load.ReportError(
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
                file = os.path.relpath(ROOT / picture["file"], page.parent.absolute())
                parts.append(f"![{picture['alt']}]({Path(file).as_posix()})")
            elif "text/markdown" in output.get("data", {}):
                parts.append(output["data"]["text/markdown"])
    return "\n\n".join(parts) + "\n"


def check(runs: pd.DataFrame, runs_dir: Path, figures: Path) -> list[str]:
    """A line for each figure of a committed group that is of other records, each page that is of another notebook, and
    one for README.md if that is behind."""
    import nbformat

    problems = []
    for group in load.committed(runs_dir):
        now = digest(load.select(runs, group))
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
