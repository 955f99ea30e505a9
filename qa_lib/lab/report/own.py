"""The page of a group of one's own: what its runs came to and what they cost.

It has two tables and a figure. Groups that come with the checkout have the long page of
notebooks/report.ipynb, whose words are about them. This one is written without a notebook, so that
it takes seconds and needs neither Jupyter nor papermill.
"""

from pathlib import Path

import pandas as pd

from qa_lib.lab.report import evidence
from qa_lib.lab.report.figures import fig_ladder
from qa_lib.lab.report.format import gain
from qa_lib.lab.report.stats import LEVEL, MARGIN, VERDICTS, equivalence
from qa_lib.lab.report.style import SPOILT, digest, png, reason, style, title_of
from qa_lib.lab.report.summary import result_table, summary
from qa_lib.lab.report.tables import Column, markdown, render
from qa_lib.lab.report.variants_table import source
from qa_lib.records.files import writable_folder, write_atomically

# Columns of the page's two tables, by their names in `summary.columns`.
RESULTS = ("variant", "change", *evidence.AXES, "n", "score", "delta", "status", "note")
COSTS = (
    "variant",
    *evidence.AXES,
    "trainable",
    "samples_per_s",
    "ratio",
    "step",
    "waits",
    "busy",
    "mfu",
    "peak_mib",
    "joules",
    "compile_s",
    "wall_s",
)


def write_page(runs: pd.DataFrame, folder: Path) -> Path:
    """Write report.md, and its figure beside it, into a folder; return the page's path.

    `runs` are those of one group that count (`evidence.select`).

    Raises RecordError for a folder that is a link.
    """
    group = runs["group"].iloc[0]
    lines = summary(runs).sort_values("micro_batch", ascending=False, kind="stable")
    parts = [
        f"# {group}",
        f"{source(runs)} What was trained: {_about(runs)}.",
        "## What came of them",
        markdown(result_table(lines, RESULTS)),
        _about_columns(runs),
        *_verdicts(runs),
        "## Speed, and what it cost",
        _ladder(runs, writable_folder(folder)),
        markdown(result_table(lines, COSTS)),
        "*Waits for data* is the most that loading ahead could save. *Compile s* is of runs that "
        "found nothing compiled; where all found some, it is missing. Groups that came with the "
        "checkout are shown to who names them: `python -m qa_lib report --group "
        f"{evidence.REFERENCE}`.",
    ]
    page = folder / "report.md"
    write_atomically(page, "\n\n".join(parts) + "\n")
    return page


def _about(runs: pd.DataFrame) -> str:
    """Return what the runs trained, and on what they were scored, in words."""
    newest = evidence.usual_conditions(runs).iloc[-1]
    text = f"{newest['model.name']} on {newest['data.name']}"
    samples = newest["spec.n_train"]
    if pd.notna(samples):
        text += f", {samples:,.0f} samples"
    questions = newest["spec.n_eval"]
    if pd.notna(questions):
        text += f", scored on {questions:,.0f}"
    return text


def _about_columns(runs: pd.DataFrame) -> str:
    """Return what the columns of the first table mean."""
    score = runs["task.label"].iloc[0]
    return (
        "A *variant* changes one setting of another. *n* counts the runs behind a line, which "
        f"differ in their random numbers; Δ{score} is taken against {evidence.baseline(runs)} over "
        "equal seeds, and without ± it is of one or two. What failed says why under *note*."
    )


def _verdicts(runs: pd.DataFrame) -> list[str]:
    """Return which variants are as good as the baseline by three seeds or more.

    These are a table and its legend as Markdown, none where no variant has three seeds.
    """
    try:
        tested = equivalence(evidence.usual_conditions(runs))
    except evidence.NotMeasured:
        return []
    tested = tested.dropna(subset="best_delta±").reset_index()
    tested["verdict"] = tested["verdict"].map(VERDICTS)
    columns = [
        Column("variant"),
        Column("n"),
        Column("delta", "ΔF1", gain),
        Column("best_delta", "ΔF1 at best", gain),
        Column("verdict", f"within {MARGIN:g} F1"),
    ]
    legend = (
        f"Over equal seeds, at threshold 0 and at the best one: ✓ the whole {LEVEL} % interval "
        f"lies within ± {MARGIN:g} F1, ✓+ it shows a loss of less than that, ✗ of more, ? neither."
    )
    return [markdown(render(tested, columns)), legend]


def _ladder(runs: pd.DataFrame, folder: Path) -> str:
    """Draw the ladder of speeds into a folder; return it as Markdown, or why there is none."""
    try:
        with style():
            figure = fig_ladder(runs)
        write_atomically(folder / "ladder.png", png(figure, Records=digest(runs)))
    except SPOILT as problem:
        return f"*Not shown: {reason(problem)}.*"
    return f"![{title_of(figure)}](ladder.png)"
