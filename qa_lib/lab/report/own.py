"""The page of a group of one's own: what its runs came to and what they cost, in two tables and a figure.

Groups that come with the checkout have the long page of notebooks/report.ipynb, whose words are about them. This one is
written without a notebook, so that it takes seconds and needs neither Jupyter nor papermill.
"""

from pathlib import Path

import pandas as pd

from qa_lib.lab.report import load
from qa_lib.lab.report.figures import fig_ladder
from qa_lib.lab.report.format import markdown, render, say
from qa_lib.lab.report.readme import source
from qa_lib.lab.report.stats import LEVEL, MARGIN, VERDICTS, equivalence
from qa_lib.lab.report.style import SPOILT, digest, png, reason, style, title_of
from qa_lib.lab.report.summary import result_table, summary
from qa_lib.records.files import writable_folder, write_atomically

RESULTS = (
    "variant",
    "what it changes",
    *load.AXES.values(),
    "n",
    "{score}",
    "Δ{score} vs {base}",
    "status",
    "note",
)
COSTS = (
    "variant",
    *load.AXES.values(),
    "trainable",
    "samples/s",
    "× {base}",
    "step ms [p10–p90]",
    "waits for data, at most",
    "GPU busy",
    "MFU",
    "peak MiB",
    "J/sample",
    "compile s",
    "wall s",
)


def write_page(runs: pd.DataFrame, folder: Path) -> Path:
    """Write report.md, and its figure beside it, into a folder; returns the page's path.

    `runs` are those of one group that count (load.select). Raises RecordError for a folder that is a link.
    """
    group = runs["group"].iloc[0]
    lines = summary(runs).sort_values("micro_batch", ascending=False, kind="stable")
    parts = [
        f"# {group}",
        say("own_source", source=source(runs), about=_about(runs)),
        "## What came of them",
        markdown(result_table(lines, RESULTS)),
        say("own_columns", base=load.baseline(runs), score=runs["task.label"].iloc[0]),
        *_verdicts(runs),
        "## Speed, and what it cost",
        _ladder(runs, writable_folder(folder)),
        markdown(result_table(lines, COSTS)),
        say("own_more", reference=load.REFERENCE),
    ]
    page = folder / "report.md"
    write_atomically(page, "\n\n".join(parts) + "\n")
    return page


def _verdicts(runs: pd.DataFrame) -> list[str]:
    """Which variants are as good as the baseline by three seeds and more, as Markdown; nothing where none has them."""
    try:
        tested = equivalence(load.usual(runs)).dropna(subset="best_delta±").reset_index()
    except load.NotMeasured:
        return []
    tested["verdict"] = tested["verdict"].map(VERDICTS)
    heads = f"variant, n, delta=ΔF1, best_delta=ΔF1 at best, verdict=within {MARGIN:g} F1"
    table = render(tested, heads, gain="delta best_delta")
    return [markdown(table), say("own_verdicts", margin=MARGIN, level=LEVEL)]


def _about(runs: pd.DataFrame) -> str:
    """What the runs trained, in words."""
    shown = load.usual(runs)
    newest = shown.iloc[-1]
    samples, questions = newest["spec.n_train"], newest["spec.n_eval"]
    said = f"{newest['model.name']} on {newest['data.name']}"
    if pd.notna(samples):
        said += f", {samples:,.0f} samples"
    if pd.notna(questions):
        said += f", scored on {questions:,.0f}"
    return said


def _ladder(runs: pd.DataFrame, folder: Path) -> str:
    """The ladder of speeds as Markdown, drawn into the folder; or why there is none."""
    try:
        with style():
            figure = fig_ladder(runs)
        write_atomically(folder / "ladder.png", png(figure, Records=digest(runs)))
    except SPOILT as problem:
        return f"*Not shown: {reason(problem)}.*"
    return f"![{title_of(figure)}](ladder.png)"
