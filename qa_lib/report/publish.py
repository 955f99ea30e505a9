"""The report: figures with their manifest for every group, the table in the terminal, the results in README.md, and the
notebooks over the records executed.

Reads run records and nothing else, and never imports torch.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import pandas as pd

from qa_lib.cli import folder, given, path
from qa_lib.errors import UserError, first_line, printable
from qa_lib.record import write_atomically
from qa_lib.report.gallery import MANIFEST, draw, outdated
from qa_lib.report.readme import README, committed_groups, with_results
from qa_lib.report.runs import ReportError, load_runs, newest, searches, select
from qa_lib.report.sentences import caption
from qa_lib.report.tables import result_table, summarise
from qa_lib.report.text import terminal

EXAMPLE = "example: python -m qa_lib report --runs runs --figures figures"
AT_ONCE = 2  # of the groups that have no figures yet, the newest so many get them; a group takes seconds
# The notebooks that only read records, and the page that each is kept as.
RENDERED = {
    Path(f"notebooks/{name}.ipynb"): Path(f"runs/h200-{name}.ipynb") for name in ("report", "slides", "scaling")
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `report`."""
    parser.add_argument("--runs", type=path, default=Path("runs"), metavar="DIR", help="of the records (runs)")
    parser.add_argument("--figures", type=folder, default=Path("figures"), metavar="DIR", help="drawn into (figures)")
    parser.add_argument("--group", type=given, metavar="G", help="this group alone (default: all, the newest last)")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--readme", action="store_true", help="every group, and the results in README.md")
    either.add_argument("--notebook", action="store_true", help="also execute the notebooks over the records")
    either.add_argument(
        "--check", action="store_true", help="write nothing; fail if figures or README.md are behind the committed runs"
    )


def main(args: argparse.Namespace) -> int:
    """Draw what is not up to date, print every group's table and where its figures are; 1 if a check fails."""
    broken: dict[Path, str] = {}
    runs = load_runs(args.runs, broken)
    if args.check:
        problems = [*broken.values(), *check(runs, args.runs, args.figures)]
        print("\n".join(problems) or "README.md and the figures of the committed runs are up to date")
        return 1 if problems else 0
    for problem in broken.values():
        print(printable(f"left out: {problem}"), file=sys.stderr)
    if runs.empty and not args.readme:
        raise ReportError(f"no record below {args.runs}: run something first, for example make quickstart")
    began = newest(runs)
    groups = sorted(began, key=began.get)
    if args.group and args.group not in groups:
        raise ReportError(f"no group {args.group!r} below {args.runs}; there are {', '.join(groups)}")
    if args.group and args.readme:
        raise ReportError("--readme shows several groups, and --group asks for one: give one of the two")
    failed, tries = [], searches(runs)
    bare = [group for group in groups if group not in tries and not (args.figures / group / MANIFEST).exists()]
    later = [] if args.group or args.readme else bare[:-AT_ONCE]  # README.md shows pictures of several groups
    for group in [args.group] if args.group else groups:
        if group in tries:
            print(f"\n{group}: tries of a search, shown in the report of their hardware's other groups")
            continue
        try:
            chosen = select(runs, group)
            lines = summarise(chosen)
            drawn = group not in later and draw(chosen, args.figures / group)
            said = printable(f"\n{terminal(result_table(lines))}\n\n{caption(chosen, lines)}")
        except UserError as problem:
            failed.append(str(problem))
            continue
        except (
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            ArithmeticError,
        ) as problem:  # whatever a spoilt record leads to
            failed.append(f"group {group!r} cannot be shown: {type(problem).__name__}, {first_line(problem)}")
            continue
        print(said)
        if group in later:
            print(f"Figures: none yet; python -m qa_lib report --group {group} draws them")
        else:
            print(f"Figures: {args.figures / group} ({'drawn' if drawn else 'up to date'})")
    if args.readme:
        write_atomically(README, with_results(runs, args.runs, args.figures)[1])
        print(f"Results written into {README}")
    if args.notebook:
        for notebook, kept in RENDERED.items():
            write_atomically(kept, rendered(notebook))
            print(f"{notebook} executed into {kept}")
    if failed:
        raise ReportError("; ".join(failed))
    return 0


def check(runs: pd.DataFrame, runs_dir: Path, figures_dir: Path) -> list[str]:
    """A line for each committed group whose figures are behind its records, and one for README.md if that is."""
    problems = []
    for group in sorted(set(committed_groups(runs, runs_dir)) - searches(runs)):
        if reason := outdated(select(runs, group), figures_dir / group):
            problems.append(f"{figures_dir / group} is not up to date ({reason}): run python -m qa_lib report")
    for notebook, kept in RENDERED.items():
        if kept.exists() and not is_page_of(kept, notebook):
            problems.append(f"{kept} is not of today's {notebook}: run python -m qa_lib report --notebook")
    before, after = with_results(runs, runs_dir, figures_dir)
    if before != after:
        problems.append(f"{README} is not up to date: run python -m qa_lib report --readme")
    return problems


def is_page_of(page: Path, notebook: Path) -> bool:
    """Whether a rendered page has the cells of a notebook, and its words wherever no code made them."""
    kept, written = (json.loads(path.read_text(encoding="utf-8"))["cells"] for path in (page, notebook))
    written = [cell for cell in written if "tags" not in cell["metadata"]]
    return [cell["id"] for cell in kept] == [cell["id"] for cell in written] and all(
        "".join(one["source"]).startswith("".join(other["source"]))
        for one, other in zip(kept, written, strict=True)
        if other["cell_type"] == "markdown"
    )


def rendered(path: Path) -> str:
    """A notebook executed in this folder, as the repository keeps it beside the runs for those who only read: the text
    of a file of Markdown alone, what the code displayed, with no trace of when or where.

    Raises nbclient's CellExecutionError, which names the cell.
    """
    import nbformat  # these start a kernel, which no other use of this module needs
    from nbclient import NotebookClient
    from traitlets.config import Config

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        # Over files of its own: the kernel listens on no port.
        config = Config(KernelManager={"transport": "ipc", "ip": f"{folder}/kernel"})
        NotebookClient(notebook, config=config, kernel_name="python3", resources={"metadata": {"path": "."}}).execute()
    shown = [cell for cell in notebook.cells if "tags" not in cell.metadata]  # those with a tag only prepare
    notebook.cells = [_as_text(cell) for cell in shown]
    notebook.cells[0].source += f"\n\n*The code of this page is in [{path}](../{path}).*"
    return nbformat.writes(notebook).rstrip() + "\n"


def _as_text(cell: dict) -> dict:
    """A cell of Markdown in place of one of code that was executed: what it displayed, pictures as attachments.

    So the page has no empty box where the code was, and a picture its alternative text: nbconvert drops the one that
    comes with a cell's output, and GitHub shows attachments, but no picture whose address holds its data.
    """
    from nbformat.v4 import new_markdown_cell

    if cell.cell_type == "markdown":
        return new_markdown_cell(cell.source, id=cell.id)
    parts, pictures = [], {}
    for output in cell.outputs:
        if picture := output.get("data", {}).get("image/png"):
            name = f"{cell.id}-{len(pictures)}.png"
            pictures[name] = {"image/png": picture}
            parts.append(f"![{output.metadata['image/png']['alt']}](attachment:{name})")
        elif output.output_type == "display_data":
            parts.append(output.data["text/markdown"])
    return new_markdown_cell("\n\n".join(parts), id=cell.id, attachments=pictures)
