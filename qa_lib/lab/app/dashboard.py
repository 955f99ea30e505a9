"""The tab "Dashboard": how far the running runs are, and the table and figures of a group."""

import time
from collections import defaultdict
from collections.abc import Collection
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from qa_lib.errors import first_line, printable
from qa_lib.lab.app.markup import picture_html, table_html, without_paths
from qa_lib.lab.app.proxies import gr
from qa_lib.lab.report.evidence import as_frame, select
from qa_lib.lab.report.style import figures_of
from qa_lib.lab.report.summary import result_table, summary
from qa_lib.lab.report.variants_table import source
from qa_lib.lab.sweep import progress_of
from qa_lib.records.archive import Run, own_groups, read_runs
from qa_lib.records.files import RecordError, regular
from qa_lib.records.record import read_record, run_files

REFRESH_S = 5  # seconds after which the running runs are looked at again
# One of them stands in the record of each run that has not ended; few records have them by chance.
UNFINISHED = (b'"starting"', b'"waiting"', b'"running"')
# Columns of a group's table, of which those are shown that it has (lab/report/summary.py).
COLUMNS = (
    "variant",
    "change",
    "model",
    "world",
    "batch",
    "length",
    "training",
    "micro_batch",
    "samples_per_s",
    "tokens_per_s",
    "ratio",
    "step",
    "mfu",
    "peak_mib",
    "score",
    "delta",
    "n",
    "status",
    "note",
)


class Dashboard(NamedTuple):
    """What the tab shows of the records."""

    groups: list[str]
    # The group that is shown; None where there is none.
    group: str | None
    # Its report as HTML.
    report: str


def dashboard_tab(demo: gr.Blocks, runs: Path, figures: Path) -> None:
    """Build the tab."""
    active = gr.HTML(visible=False, elem_classes="shown")
    group = gr.Dropdown(label="Group", interactive=True)
    report = gr.HTML(elem_classes="shown")

    def on_group(wanted: str | None) -> list:
        shown = dashboard(runs, figures, wanted or "")
        return [gr.update(choices=shown.groups, value=shown.group), shown.report]

    def on_tick() -> Any:
        paragraphs = running(runs)
        return gr.update(value=paragraphs, visible=bool(paragraphs))

    for event in (demo.load, group.input):
        event(
            on_group,
            inputs=group,
            outputs=[group, report],
            show_progress="hidden",
            api_visibility="private",
        )
    gr.on(
        [demo.load, gr.Timer(REFRESH_S).tick],
        on_tick,
        inputs=None,
        outputs=active,
        show_progress="hidden",
        api_visibility="private",
    )


def dashboard(runs_dir: Path, figures_dir: Path, wanted: str = "") -> Dashboard:
    """Return the groups that there are, and the report of the `wanted` one, or else of the first.

    The user's own groups come first, the newest of them before the others. A record that cannot be
    read costs a sentence, and one that cannot be shown its own group's table alone.
    """
    broken = defaultdict(list)

    def note_broken(group: str, problem: RecordError) -> None:
        # Names of files may hold bytes that are no text, which no page can be sent.
        broken[printable(group)].append(str(problem))

    runs = read_runs(runs_dir, left_out=note_broken)
    own = own_groups(runs)
    for group in broken:
        if (runs_dir / group).is_dir():
            own.add(group)
    groups = groups_of(runs, own, broken)
    group = wanted
    if wanted not in groups:
        group = groups[0] if groups else None

    sentences = []
    for problem in broken.get(group, []):
        sentences.append(f"Cannot be read: {problem.removeprefix(f'{runs_dir}/')}.")
    pictures = []
    chosen = [run for run in runs if run.record["group"] == group]
    if chosen:
        try:
            about, pictures = group_report(chosen, group, figures_dir)
            sentences += about
        except Exception as problem:  # whatever a spoilt record leads to: the page is to be seen
            sentences.append(f"This cannot be shown: {first_line(problem)}.")
    elif not groups:
        sentences = ["There are no records yet: make quickstart makes some in minutes."]
    paragraphs = [f"<p>{escape(without_paths(printable(text)))}</p>" for text in sentences]
    return Dashboard(groups, group, "".join(paragraphs + pictures))


def groups_of(runs: list[Run], own: Collection[str], broken: Collection[str]) -> list[str]:
    """Return the groups of runs and of broken records: the user's `own` first, the newest first.

    Groups of tries (see `search_groups` in qa_lib.lab.report.evidence) are left out.
    """
    newest_start = dict.fromkeys(broken, "")
    tries = set()
    for run in runs:
        group = run.record["group"]
        started = run.record["time"]["started"] or ""
        newest_start[group] = max(started, newest_start.get(group, ""))
        if run.record["spec"]["search"]:
            tries.add(group)
    by_name = sorted(newest_start.keys() - tries)
    return sorted(by_name, key=lambda group: (group in own, newest_start[group]), reverse=True)


def group_report(runs: list[Run], group: str, figures_dir: Path) -> tuple[list[str], list[str]]:
    """Return sentences about a group's runs, and its table and figures as HTML."""
    frame = select(as_frame(runs), group)
    table = result_table(summary(frame), COLUMNS).astype(str).map(without_paths)
    figures = [picture_html(title, png) for title, png in figures_of(figures_dir / group)]
    sentences = [source(frame)]
    if not figures:
        sentences.append(f"No figures yet: python -m qa_lib report --group {group} draws them.")
    return sentences, [table_html(table), *figures]


def running(runs_dir: Path) -> str:
    """Return a paragraph of HTML for each run that has not ended.

    It says how far the run is, and since when nothing was written.
    """
    paragraphs = []
    for path in run_files(runs_dir, "record.json"):
        try:
            content = regular(path).read_bytes()
            if not any(status in content for status in UNFINISHED):
                continue
            record = read_record(path.parent)
            files = [path, *path.parent.glob("steps.jsonl")]
            written = max(file.stat().st_mtime for file in files)
        except (OSError, RecordError):  # it is gone by now, or the dashboard says what is wrong
            continue
        name = escape(printable(f"{record['group']}/{record['run_id']} is {record['status']}"))
        progress = _progress_html(*progress_of(path.parent))
        age = tqdm.format_interval(max(0, time.time() - written))
        paragraphs.append(f"<p>{name} {progress}, last written {age} ago</p>")
    return "".join(paragraphs)


def _progress_html(step: int, planned: int | None) -> str:
    """Return a bar and words for how many steps of those planned are done; "" if none are known."""
    if not planned:
        return ""
    return f'<progress value="{step}" max="{planned}"></progress>step {step} of {planned}'
