"""The report: figures with their manifest for every group, the table in the terminal, the results in README.md, and the
report's notebook executed.

Reads run records and nothing else, and never imports torch.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd

from qa_lib.errors import UserError, first_line, printable
from qa_lib.record import write_atomically
from qa_lib.report import quality
from qa_lib.report.gallery import draw, outdated, pictures, read_manifest
from qa_lib.report.runs import BASELINE, NotMeasured, ReportError, commits, load_runs, searches, select, usual
from qa_lib.report.sentences import LADDER, PEERS, caption, equivalence_finding, speed_finding
from qa_lib.report.tables import result_table, summarise
from qa_lib.report.text import MISSING, markdown, say, terminal

EXAMPLE = "example: python -m qa_lib report --runs runs --figures figures"
README = Path("README.md")
BEGIN, END = "<!-- results -->", "<!-- /results -->"
FIRST_GROUP = "h200-bench"  # what the README shows if it is there
README_COLUMNS = ("row", "what it changes", "features/s", "× A1", "MFU", "peak MiB", "note")
README_ROWS = (*PEERS, *LADDER, "B1", "B1-all", "B2", "B3", "C1", "C2", "D1", "E-t4", "EC2", "EB1-lean")
NOTEBOOK, RENDERED = Path("notebooks/report.ipynb"), Path("runs/h200-report.ipynb")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `report`."""
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the records (default: runs)")
    parser.add_argument("--figures", type=Path, default=Path("figures"), help="folder to draw into (default: figures)")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--html", type=Path, metavar="OUT.html", help="write all of it as one self-contained page")
    either.add_argument("--readme", action="store_true", help="also rewrite the result block of README.md")
    either.add_argument("--notebook", action="store_true", help=f"also execute {NOTEBOOK} into {RENDERED}")
    either.add_argument(
        "--check", action="store_true", help="write nothing; fail if figures or README.md are behind the committed runs"
    )


def main(args: argparse.Namespace) -> int:
    """Draw what is not up to date, print every group's table and where its figures are; 1 if a check fails."""
    if args.html:
        from qa_lib.report import page  # its templates are of use here alone

        content = page.static(args.runs, args.html, lambda runs, group: pictures(runs, args.figures / group)).encode()
        write_atomically(args.html, content)
        print(f"{args.html}: {len(content) / 1e6:.1f} MB")
        return 0
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
    failed, tries = [], searches(runs)
    for group in sorted(set(runs["group"])):
        if group in tries:
            print(f"\n{group}: tries of a search, shown in the report of their hardware's other groups")
            continue
        try:
            chosen = select(runs, group)
            lines = summarise(chosen)
            drawn = draw(chosen, args.figures / group)
            said = printable(f"\n{terminal(result_table(lines))}\n\n{caption(chosen, lines)}")
        except UserError as problem:
            failed.append(str(problem))
            continue
        except (LookupError, TypeError, ValueError, AttributeError) as problem:  # whatever a spoilt record leads to
            failed.append(f"group {group!r} cannot be shown: {type(problem).__name__}, {first_line(problem)}")
            continue
        print(said)
        print(f"Figures: {args.figures / group} ({'drawn' if drawn else 'up to date'})")
    if args.readme:
        write_atomically(README, with_results(runs, args.runs, args.figures)[1])
        print(f"Results written into {README}")
    if args.notebook:
        write_atomically(RENDERED, rendered())
        print(f"{NOTEBOOK} executed into {RENDERED}")
    if failed:
        raise ReportError("; ".join(failed))
    return 0


def committed_groups(runs: pd.DataFrame, folder: Path) -> list[str]:
    """The groups below `folder` that git tracks, without searches: only those may README.md quote. Raises ReportError
    without git."""
    if not folder.is_dir():
        return []
    command = ["git", "-C", str(folder), "ls-files", "-z", "--", "*/record.json"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError) as problem:
        raise ReportError(f"cannot ask git which groups of {folder} are committed: {problem}") from problem
    groups = {Path(name).parts[0] for name in listed.split("\0") if len(Path(name).parts) == 3}
    return sorted(groups - searches(runs))


def results(runs: pd.DataFrame, runs_dir: Path, figures_dir: Path) -> str:
    """The result block of README.md: for the reference groups the ladder, the table and their caption, as Markdown.

    Of the usual cell's largest micro-batch and README_ROWS alone; the rendered report has the others.
    """
    groups = committed_groups(runs, runs_dir)
    if FIRST_GROUP in groups:
        groups = [FIRST_GROUP]
    if not groups:
        return "No reference runs are committed yet; `make quickstart` makes a set of your own below `runs/`."
    blocks = []
    for group in groups:
        chosen = select(runs, group)
        lines = summarise(chosen)
        finding = " ".join(speed_finding(lines).split())
        picture = Path(os.path.relpath(figures_dir / group / "ladder.png", README.parent)).as_posix()
        shown = usual(lines)
        shown = shown[(shown["micro_batch"] == shown["micro_batch"].max()) & shown["variant"].isin(README_ROWS)]
        table, kept, said = _with_quality(shown, usual(quality.quality_runs(runs, group)))
        blocks += [f"**{finding}.**", kept, f"![{finding}]({picture})", markdown(table)]
        blocks.append(" ".join(filter(None, [caption(chosen, shown), said])))
        if timeline := read_manifest(figures_dir / group).get("figures", {}).get("timeline.png"):
            blocks.append(f"![{timeline['title']}]({picture.replace('ladder', 'timeline')})")
    return "\n\n".join(blocks)


def _with_quality(lines: pd.DataFrame, judged: pd.DataFrame) -> tuple[pd.DataFrame, str, str]:
    """The table of `lines` with the differences in score that `judged` shows, what they say, and where they come
    from."""
    table = result_table(lines, README_COLUMNS)
    try:
        tested = quality.equivalence(judged)
    except NotMeasured as reason:
        return table, say("readme.unknown", reason=reason), ""
    table[f"ΔF1 vs {BASELINE}"] = table["row"].map(quality.as_text(tested))
    table["ΔF1 at best threshold"] = table["row"].map(quality.as_text(tested, "best_"))
    table["n (F1)"] = table["row"].map(tested.set_index("variant")["n"].astype(str))
    base = judged[(judged["spec.variant"] == BASELINE) & (judged["status"] == "ok")]
    means = base.filter(like="quality.").mean(numeric_only=True)
    said = say(
        "readme.quality", group=judged["group"].iloc[0], code=commits(judged), model=judged["model.name"].iloc[0],
        n_train=judged["spec.n_train"].max(), n_eval=base["quality.n"].max(), means=means, baseline=BASELINE,
    )  # fmt: skip
    return table.fillna(MISSING), f"{equivalence_finding(judged)}.", said


def with_results(runs: pd.DataFrame, runs_dir: Path, figures_dir: Path) -> tuple[str, str]:
    """README.md's text, and the same with its result block made anew. Raises ReportError where there is no such file or
    no such block."""
    try:
        text = README.read_text(encoding="utf-8")
    except OSError as problem:
        raise ReportError(f"cannot read {README} in this folder: {problem.strerror}") from problem
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ReportError(f"{README} has no block between {BEGIN} and {END}")
    return text, f"{head}{BEGIN}\n{results(runs, runs_dir, figures_dir)}\n{END}{tail}"


def check(runs: pd.DataFrame, runs_dir: Path, figures_dir: Path) -> list[str]:
    """A line for each committed group whose figures are behind its records, and one for README.md if that is."""
    problems = []
    for group in committed_groups(runs, runs_dir):
        if reason := outdated(select(runs, group), figures_dir / group):
            problems.append(f"{figures_dir / group} is not up to date ({reason}): run python -m qa_lib report")
    before, after = with_results(runs, runs_dir, figures_dir)
    if before != after:
        problems.append(f"{README} is not up to date: run python -m qa_lib report --readme")
    return problems


def rendered() -> str:
    """The report's notebook executed in this folder, as the repository keeps it beside the runs for those who only
    read: the text of a file with its outputs, and no trace of when or where.

    Raises nbclient's CellExecutionError, which names the cell.
    """
    import nbformat  # these start a kernel, which no other use of this module needs
    from nbclient import NotebookClient
    from traitlets.config import Config

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        # Over files of its own: the kernel listens on no port.
        config = Config(KernelManager={"transport": "ipc", "ip": f"{folder}/kernel"})
        NotebookClient(notebook, config=config, kernel_name="python3", resources={"metadata": {"path": "."}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = [output for output in cell.outputs if output.output_type != "stream"]
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = None
    return nbformat.writes(notebook).rstrip() + "\n"
