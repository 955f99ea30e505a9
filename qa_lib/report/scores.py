"""Scores beside speed: whether the optimizations keep what a model learns, for rows that were trained alike.

Scores are those of runs that train to the end; speeds are of a group that timed every row, which may be of another
model, since speed does not depend on what a model learns.
"""

import contextlib
from collections.abc import Iterable

import pandas as pd

from qa_lib.report.quality import MARGIN, VERDICTS, by_seed, equivalence, largest_batch
from qa_lib.report.runs import AXIS_NAMES, NotMeasured, baseline, commits, select
from qa_lib.report.tables import LEVEL, in_order, interval, summarise
from qa_lib.report.text import MISSING, gain, markdown, number, points, say
from qa_lib.report.tradeoffs import SCORES, digits


def alike(every: pd.DataFrame, group: str, rows: Iterable[str]) -> pd.DataFrame:
    """Of a group's runs the scored ones of these rows that were trained alike: one model, length, number of epochs,
    learning rate, batch and micro-batch, those that most rows share. Raises NotMeasured where no two rows do."""
    runs = select(every, group)
    column, label = SCORES[runs["task.name"].iloc[0]]
    runs = runs[(runs["status"] == "ok") & runs[column].notna() & runs["spec.variant"].isin(rows)]
    parts = [part for _, part in runs.groupby(AXIS_NAMES, dropna=False)]
    most = max(parts, key=lambda part: (part["spec.variant"].nunique(), len(part)), default=runs)
    if most["spec.variant"].nunique() < 2:
        raise NotMeasured(f"no two of these rows have {label} in group {group} and were trained alike")
    return most


def scores_table(runs: pd.DataFrame, timed: pd.DataFrame) -> pd.DataFrame:
    """Of the runs of `alike` each row's speed over the baseline's, its score, and what this differs from the baseline's
    over the seeds that both have; of question answering, whether it is shown to be within the margin."""
    task, base = runs["task.name"].iloc[0], baseline(runs)
    column, label = SCORES[task]
    scores = in_order(by_seed(runs, column).T).T
    difference = scores.sub(scores[base], axis="index").drop(columns=base) if base in scores else scores[[]]
    written, signed = (digits, _signed) if task == "lm" else (points, gain)
    table = pd.DataFrame({
        f"× {base}": timed["ratio"].reindex(scores.columns).map(number),
        "n": scores.count().map(str),
        label: list(map(written, scores.mean(), interval(scores))),
    })  # fmt: skip
    against = pd.Series(map(signed, difference.mean(), interval(difference)), difference.columns, dtype=object)
    shared = difference.count()
    fewer = (shared > 0) & (shared < scores.count()[shared.index])
    table[f"against {base}"] = against.mask(fewer, against + shared.map(" (n = {})".format))
    if task == "qa":
        with contextlib.suppress(NotMeasured):  # too few seeds to tell
            table[f"within {MARGIN:g} F1"] = equivalence(runs).set_index("variant")["verdict"].map(VERDICTS)
    table = table.fillna(MISSING).rename_axis("row").reset_index()
    return table.loc[:, (table != MISSING).any()]


def apart(every: pd.DataFrame, group: str, row: str, other: str) -> str:
    """How far two rows end from each other where they were trained alike, in a sentence. Raises NotMeasured."""
    runs = alike(every, group, (row, other))
    task = runs["task.name"].iloc[0]
    column, label = SCORES[task]
    scores = by_seed(runs, column)[[row, other]].dropna()
    if scores.empty:
        raise NotMeasured(f"no seed of group {group} has both {row} and {other}")
    difference = scores[row] - scores[other]
    written, signed = (digits, _signed) if task == "lm" else (points, gain)
    return say("scores.apart", row=row, other=other, label=label, n=len(scores), scores=scores.mean().map(written),
               difference=signed(difference.mean(), interval(difference)), model=runs["model.name"].iloc[0],
               training=runs["training"].iloc[0], group=group, code=commits(runs))  # fmt: skip


def _signed(difference: float, half: float) -> str:
    """A difference in bits per byte, in which less is better."""
    return ("+" if difference >= 0 else "") + digits(difference, half)


def shown(every: pd.DataFrame, group: str, bench: str, rows: str = "") -> list:
    """For a notebook: scores_table of these rows, named with blanks between them, or of all that `bench` timed, and
    where its numbers come from; or why it is not there."""
    from IPython.display import Markdown  # notebooks have it; the command line need not

    try:
        own = select(every, bench)
        timed = largest_batch(summarise(own)).dropna(subset="ratio").set_index("variant")
        runs = alike(every, group, rows.split() or timed.index)
    except NotMeasured as reason:
        return [Markdown(f"*No table of scores: {reason}.*")]
    first, line = runs.iloc[0], timed.iloc[0]
    silent = runs["quality.always_null_f1"].astype(float).mean() if first["task.name"] == "qa" else None
    said = say("scores.caption", group=group, bench=bench, model=first["model.name"], timed=line["model"].split()[0],
               length=first["length"], training=first["training"], size=first["micro_batch"],
               timed_size=line["micro_batch"], baseline=baseline(runs), silent=silent, level=LEVEL,
               margin=MARGIN, code=commits(runs))  # fmt: skip
    return [Markdown(markdown(scores_table(runs, timed))), Markdown(said)]
