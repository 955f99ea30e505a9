"""Figures of the trade-offs: a score against the size of a model, what its training cost, and the length of a text."""

import contextlib
import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from qa_lib.report.runs import NotMeasured, ReportError, commits, not_measured, on_cpu
from qa_lib.report.sentences import CPU_CAVEAT
from qa_lib.report.style import BLUE, GREEN, ORANGE, RED, legend, new_figure, show, style
from qa_lib.report.tables import LEVEL
from qa_lib.report.text import markdown, or_why, points, say
from qa_lib.report.tradeoffs import (
    AXES,
    LAWS,
    SCORES,
    SIZES,
    along,
    in_words,
    law_table,
    laws,
    means,
    measured,
    misses,
    points_table,
    scored,
    training,
    value,
)
from qa_lib.variants import find_variant

LINES = {2: (ORANGE, "--"), 3: (GREEN, ":")}  # of LAWS


def _ends(runs: pd.DataFrame) -> dict:
    """The label of the score, and the lines of the smallest and the largest model (`parameters`) and of the shortest
    and the longest text (`length`), empty where there are no two. Raises NotMeasured where both are."""
    task, ends = runs["task.name"].iloc[0], {}
    for what in ("parameters", "length"):
        lines = means(along(runs, what)).dropna(subset=["score"])
        lines["score"] = lines["score"].map(scored(runs))
        ends[what] = lines.iloc[[0, -1]].to_dict("records") if lines[what].nunique() > 1 else []
    if not any(ends.values()):
        raise NotMeasured("no two models and no two lengths were trained alike")
    return ends | {"label": SCORES[task][1]}


def finding(runs: pd.DataFrame) -> str:
    """What the largest model gains over the smallest, beside what the law of most constants predicted for it; or, of
    one model, the longest text over the shortest. Raises NotMeasured."""
    ends = _ends(runs)
    try:
        law = laws(runs, "without_embeddings").iloc[-1].to_dict()
    except NotMeasured:
        law = None
    return say("tradeoffs.finding", law=law, form=LAWS[law["constants"]] if law else "", **ends)


@style()
def fig_tradeoffs(runs: pd.DataFrame) -> Figure:
    """The score of `measured` runs against each of AXES in which they differ, with the laws over sizes; hollow, the
    model that these were not fitted to. Raises NotMeasured."""
    title = finding(runs)
    known = {what: means(along(runs, what)).dropna(subset=[what]) for what in AXES}
    shown = {what: lines for what, lines in known.items() if lines[what].nunique() > 1}
    rows = math.ceil(len(shown) / 3)
    columns = math.ceil(len(shown) / rows)
    figure = new_figure(("On a CPU: " if on_cpu(runs) else "") + title, _note(runs), 1.2 + 2.7 * rows)
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False).flat
    for axis, (what, lines) in zip(axes, shown.items(), strict=False):
        kept_out = draw_laws(axis, runs, what, lines) if what in SIZES else None
        for chosen, color in ((lines["model"] != kept_out, BLUE), (lines["model"] == kept_out, "white")):
            axis.errorbar(lines[what][chosen], lines["score"][chosen], lines["score±"][chosen], fmt="o", capsize=3,
                          color=BLUE, markerfacecolor=color, markersize=5)  # fmt: skip
        if runs["task.name"].iloc[0] == "qa":
            silent = runs["quality.always_null_f1"].astype(float).mean()
            axis.axhline(silent, color=RED, linestyle="--", label=f"a model that never answers: {points(silent)}")
        axis.set(xscale="log", xlabel=AXES[what])
        axis.margins(x=0.12)
        ticks = lines[what] if what in ("length", "depth") else lines[what].iloc[[0, len(lines) // 2, -1]]
        ticks = ticks.drop_duplicates()  # two models may have one size
        axis.set_xticks(ticks, ticks.map(in_words(what)), fontsize=8)
        if runs["task.name"].iloc[0] == "lm":  # a power is a straight line
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(MaxNLocator(6))
            axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.minorticks_off()
    for axis in list(figure.axes)[len(shown) :]:
        axis.remove()
    for axis in figure.axes[::columns]:
        axis.set_ylabel(SCORES[runs["task.name"].iloc[0]][1])
    if figure.axes[0].get_legend_handles_labels()[0]:
        legend(figure.axes[0])
    return figure


def draw_laws(axis: Axes, runs: pd.DataFrame, size: str, lines: pd.DataFrame) -> str | None:
    """The laws over a size as lines; the model that they were not fitted to, or None where there are none."""
    try:
        found = laws(runs, size)
    except NotMeasured:
        return None
    reach = np.geomspace(lines[size].min(), lines[size].max())
    for law in found.itertuples():
        color, look = LINES[law.constants]
        axis.plot(reach, value(law.law, reach), look, color=color, linewidth=1.4, label=LAWS[law.constants], zorder=1)
    return found["kept_out"].iloc[0]


def _note(runs: pd.DataFrame) -> str:
    parts = [f"Group {runs['group'].iloc[0]}, row {runs['spec.variant'].iloc[0]}"]
    ends = _ends(runs)
    parts += [say("tradeoffs.over_lengths", **ends)] if ends["parameters"] and ends["length"] else []
    parts += ["equal training data in every point", f"bars: t-based {LEVEL} % intervals over seeds"]
    parts += ["hollow: kept out of the laws"] if runs["task.name"].iloc[0] == "lm" else []
    parts += [f"code {commits(runs)}"]
    parts += sorted(set(runs["env.gpu"].dropna())) or [CPU_CAVEAT]
    return " · ".join(parts) + "."


def shown(every: pd.DataFrame, group: str, row: str) -> list:
    """For a notebook: fig_tradeoffs of a group's runs of a row, their table and the laws; or why they are not there."""
    from IPython.display import Markdown  # notebooks have it; the command line need not

    find_variant(row)
    try:
        runs = measured(every, group, row)
    except ReportError as reason:
        return [Markdown(not_measured(reason))]
    parts = [show(fig_tradeoffs, runs), Markdown(markdown(points_table(runs)))]
    if runs["task.name"].iloc[0] == "lm":
        parts = [Markdown(training(runs)), *parts, Markdown(or_why(law_table, runs))]
        with contextlib.suppress(NotMeasured):  # the table above says why, or has one size alone
            parts.append(Markdown(misses(runs)))
    return parts
