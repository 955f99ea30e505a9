"""The report: figures with their manifest for every group, the table in the terminal, the results in README.md.

Reads run records and nothing else, and never imports torch.
"""

import argparse
import hashlib
import json
import os
import subprocess
from pathlib import Path

import pandas as pd

from qa_lib.measure import trace
from qa_lib.record import write_atomically
from qa_lib.report import quality as evidence
from qa_lib.report import sentences as findings
from qa_lib.report import tables
from qa_lib.report.runs import load_runs
from qa_lib.report.tables import ReportError

EXAMPLE = "example: python -m qa_lib report --runs runs --figures figures"
README = Path("README.md")
BEGIN, END = "<!-- results -->", "<!-- /results -->"
FIRST_GROUP = "h200-bench"  # what the README shows if it is there
README_COLUMNS = ("row", "what it changes", "features/s", "× A1", "MFU", "peak MiB", "note")
README_ROWS = (
    *findings.PEERS,
    *findings.LADDER,
    "B1",
    "B1-all",
    "B2",
    "B3",
    "C1",
    "C2",
    "D1",
    "E-t4",
    "EC2",
    "EB1-lean",
)
_MODULES = ("publish", "tables", "quality", "sentences", "style", "profiles", "figures")
_CODE = [Path(__file__).with_name(f"{name}.py") for name in _MODULES] + [Path(trace.__file__)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `report`."""
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the records (default: runs)")
    parser.add_argument("--figures", type=Path, default=Path("figures"), help="folder to draw into (default: figures)")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--html", type=Path, metavar="OUT.html", help="write all of it as one self-contained page")
    either.add_argument("--readme", action="store_true", help="also rewrite the result block of README.md")
    either.add_argument(
        "--notebook", action="store_true", help="also execute notebooks/report.ipynb into runs/h200-report.ipynb"
    )
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
    runs = load_runs(args.runs)
    if args.check:
        problems = check(runs, args.runs, args.figures)
        print("\n".join(problems) or "README.md and the figures of the committed runs are up to date")
        return 1 if problems else 0
    if runs.empty and not args.readme:
        raise ReportError(f"no record below {args.runs}: run something first, for example make quickstart")
    failed = []
    for group in sorted(set(runs["group"])):
        if tables.is_search(group):
            print(f"\n{group}: tries of a search, shown in the report of their hardware's other groups")
            continue
        try:
            chosen = tables.select(runs, group)
            lines = tables.summarise(chosen)
            drawn = draw(chosen, args.figures / group)
        except ReportError as problem:
            failed.append(str(problem))
            continue
        print(f"\n{tables.terminal(tables.result_table(lines))}\n\n{findings.caption(chosen, lines)}")
        print(f"Figures: {args.figures / group} ({'drawn' if drawn else 'up to date'})")
    if args.readme:
        write_atomically(README, with_results(_readme(), runs, args.runs, args.figures))
        print(f"Results written into {README}")
    if args.notebook:
        from qa_lib.report import render  # starts a kernel, which no other use of this module needs

        render.render()
        print(f"{render.NOTEBOOK} executed into {render.RENDERED}")
    if failed:
        raise ReportError("; ".join(failed))
    return 0


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def manifest(runs: pd.DataFrame) -> dict:
    """Of a group's runs, all that figures and tables depend on and the tables themselves; not yet the figures."""
    lines = tables.summarise(runs)
    group = runs["group"].iloc[0]
    written = {
        "results": tables.result_table(lines),
        **tables.family_tables(lines),
        "published": tables.published_table(lines, group),
        "cost": tables.cost_table(runs),
    }
    records = {
        run["run_id"]: {
            "sha256": _sha256(b"".join(_bytes(run["path"] / name) for name in ("record.json", "profile.json"))),
            "status": run["status"],
            "commit": run["code.commit"] if pd.notna(run["code.commit"]) else None,
            "dirty": run["code.dirty"] if pd.notna(run["code.dirty"]) else None,
        }
        for run in runs.to_dict("records")
    }
    return {
        "group": group,
        "report": _sha256(b"".join(path.read_bytes() for path in [*_CODE, tables.PUBLISHED])),
        "caption": findings.caption(runs, lines),
        "records": dict(sorted(records.items())),
        "tables": {name: table.to_dict("records") for name, table in written.items()},
    }


def _read_manifest(folder: Path) -> dict:
    """The folder's manifest; empty if there is none that can be read, since drawing again mends that."""
    try:
        found = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and {"records", "figures"} <= found.keys() else {}


def outdated(runs: pd.DataFrame, folder: Path) -> str | None:
    """Why the figures in `folder` do not show these runs, in a few words; None if they do."""
    old, new = _read_manifest(folder), json.loads(json.dumps(manifest(runs)))
    if not old:
        return "no manifest"
    records = {name for name in old["records"].keys() | new["records"].keys()
               if old["records"].get(name) != new["records"].get(name)}  # fmt: skip
    if records:
        return f"other records: {', '.join(sorted(records)[:3])}{' …' * (len(records) > 3)}"
    if any(old.get(key) != value for key, value in new.items()):
        return "drawn by another version of the report"
    for name, figure in old["figures"].items():
        if not (folder / name).is_file() or _sha256((folder / name).read_bytes()) != figure["sha256"]:
            return f"{name} is absent or not the one that was drawn"
    return None


def _render(runs: pd.DataFrame) -> tuple[dict[str, tuple[str, bytes]], dict[str, str]]:
    """Title and PNG of each figure of a group, and for each that no record supports the reason; both by name."""
    from qa_lib.report import figures  # seaborn takes a second to import, which an up-to-date report need not wait for
    from qa_lib.report import style as canvas

    drawn, not_drawn = {}, {}
    for name, figure_of in figures.FIGURES.items():
        try:
            figure = figure_of(runs)
        except tables.NotMeasured as reason:
            not_drawn[name] = str(reason)
            continue
        drawn[name] = " ".join(figure.get_suptitle().split()), canvas.png(figure)
    return drawn, not_drawn


def pictures(runs: pd.DataFrame, folder: Path) -> tuple[dict[str, tuple[str, bytes]], dict[str, str]]:
    """What `_render` gives, read from `folder` if its figures show these runs; nothing is written."""
    if outdated(runs, folder):
        return _render(runs)
    found = _read_manifest(folder)
    drawn = {name: (figure["title"], (folder / name).read_bytes()) for name, figure in found["figures"].items()}
    return {name.removesuffix(".png"): picture for name, picture in drawn.items()}, found["not_drawn"]


def draw(runs: pd.DataFrame, folder: Path) -> bool:
    """Draw a group's figures and manifest into `folder` unless they show these runs already; whether it drew."""
    if outdated(runs, folder) is None:
        return False
    drawn, not_drawn = _render(runs)
    new = manifest(runs) | {"figures": {}, "not_drawn": not_drawn}
    for name, (title, content) in drawn.items():
        write_atomically(folder / f"{name}.png", content)
        new["figures"][f"{name}.png"] = {"title": title, "sha256": _sha256(content), "runs": list(new["records"])}
    for name in _read_manifest(folder).get("figures", {}).keys() - new["figures"].keys():
        (folder / name).unlink(missing_ok=True)
    # Last, so that a manifest never vouches for a figure that was not written.
    write_atomically(folder / "manifest.json", json.dumps(new, indent=1, ensure_ascii=False) + "\n")
    return True


def committed_groups(runs: Path) -> list[str]:
    """The groups below `runs` that git tracks, without searches: only those may README.md quote. Raises ReportError
    without git."""
    if not runs.is_dir():
        return []
    command = ["git", "-C", str(runs), "ls-files", "-z", "--", "*/record.json"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError) as problem:
        raise ReportError(f"cannot ask git which groups of {runs} are committed: {problem}") from problem
    groups = {Path(name).parts[0] for name in listed.split("\0") if len(Path(name).parts) == 3}
    return sorted(group for group in groups if not tables.is_search(group))


def results(runs: pd.DataFrame, runs_dir: Path, figures_dir: Path) -> str:
    """The result block of README.md: for the reference groups the ladder, the table and their caption, as Markdown.

    Of the largest micro-batch and README_ROWS alone; the rendered report has the others.
    """
    groups = committed_groups(runs_dir)
    if FIRST_GROUP in groups:
        groups = [FIRST_GROUP]
    if not groups:
        return "No reference runs are committed yet; `make quickstart` makes a set of your own below `runs/`."
    blocks = []
    for group in groups:
        chosen = tables.select(runs, group)
        lines = tables.summarise(chosen)
        finding = " ".join(findings.speed_finding(lines).split())
        picture = Path(os.path.relpath(figures_dir / group / "ladder.png", README.parent)).as_posix()
        shown = lines[(lines["micro_batch"] == lines["micro_batch"].max()) & lines["variant"].isin(README_ROWS)]
        table, kept, said = _with_f1(shown, evidence.quality_runs(runs, group))
        blocks += [f"**{finding}.**", kept, f"![{finding}]({picture})", tables.markdown(table)]
        blocks.append(findings.caption(chosen, shown) + said)
        if timeline := _read_manifest(figures_dir / group).get("figures", {}).get("timeline.png"):
            blocks.append(f"![{timeline['title']}]({picture.replace('ladder', 'timeline')})")
    return "\n\n".join(blocks)


def _with_f1(lines: pd.DataFrame, quality: pd.DataFrame) -> tuple[pd.DataFrame, str, str]:
    """The table of `lines` with the differences in F1 that `quality` shows, what they say, and where they come from."""
    table = tables.result_table(lines, README_COLUMNS)
    try:
        tested = evidence.equivalence(quality)
    except tables.NotMeasured as reason:
        return table, f"Whether rows keep the baseline's quality is not known here: {reason}.", ""
    columns = {"ΔF1 vs A1": evidence.as_text(tested), "ΔF1 at best threshold": evidence.as_text(tested, "best_")}
    columns["n (F1)"] = tested.set_index("variant")["n"].astype(str)
    for head, texts in columns.items():
        table[head] = table["row"].map(texts).fillna(tables.MISSING)
    of = quality[(quality["spec.variant"] == tables.BASELINE) & (quality["status"] == "ok")].filter(like="quality.")
    null, at_0, best = (
        tables.points(of[f"quality.{name}"].astype(float).mean()) for name in ("always_null_f1", "f1", "best_f1")
    )
    said = (
        f" ΔF1: group {quality['group'].iloc[0]}, code {tables.commits(quality)}, {quality['model.name'].iloc[0]} on "
        f"{quality['spec.n_train'].max():,.0f} features, scored on {of['quality.n'].max():,.0f} questions (never "
        f"answering scores {null}, A1 {at_0} and at the best threshold {best}), means over equal seeds with t-based "
        "90 % intervals where n ≥ 3."
    )
    return table, f"{evidence.equivalence_finding(tested)}.", said


def _readme() -> str:
    try:
        return README.read_text(encoding="utf-8")
    except OSError as problem:
        raise ReportError(f"cannot read {README} in this folder: {problem.strerror}") from problem


def with_results(text: str, runs: pd.DataFrame, runs_dir: Path, figures_dir: Path) -> str:
    """README.md's text with its result block made anew. Raises ReportError when the block's markers are not there."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ReportError(f"{README} has no block between {BEGIN} and {END}")
    return f"{head}{BEGIN}\n{results(runs, runs_dir, figures_dir)}\n{END}{tail}"


def check(runs: pd.DataFrame, runs_dir: Path, figures_dir: Path) -> list[str]:
    """A line for each committed group whose figures are behind its records, and one for README.md if that is."""
    problems = []
    for group in committed_groups(runs_dir):
        if reason := outdated(tables.select(runs, group), figures_dir / group):
            problems.append(f"{figures_dir / group} is not up to date ({reason}): run python -m qa_lib report")
    text = _readme()
    if with_results(text, runs, runs_dir, figures_dir) != text:
        problems.append(f"{README} is not up to date: run python -m qa_lib report --readme")
    return problems
