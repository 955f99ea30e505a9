"""The figures that notebooks/report.ipynb alone draws: F1, and memory against speed."""

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qa_lib.lab.report import evidence, spoken, style
from qa_lib.lab.report.figures import timed
from qa_lib.lab.report.format import gain, number, percent
from qa_lib.lab.report.point_names import along_curve, name_beside
from qa_lib.lab.report.stats import LEVEL, MARGIN, equivalence
from qa_lib.lab.report.tables import column_text
from qa_lib.lab.report.variants_table import across_cards
from qa_lib.spec.variants import tagged

MOST = 8  # variants whose F1 is drawn


# F1.


def fig_equivalence(judged: pd.DataFrame) -> Figure:
    """Draw F1 of at most MOST variants less the baseline's at both thresholds, with intervals.

    Raises NotMeasured where no variant has an interval.
    """
    runs = evidence.usual_conditions(judged)
    base = evidence.baseline(judged)
    tested = equivalence(runs).dropna(subset="best_delta±")
    in_order = dict.fromkeys([*tagged("headline"), *tagged("ladder"), *tested.index])
    first = [name for name in in_order if name in tested.index][:MOST]
    rows = tested[tested.index.isin(first)]
    is_kept = rows["verdict"].isin(["within", "no worse"])
    title = (
        f"{_trained_on(runs)}: {is_kept.sum()} of {len(rows)} variants lose less than "
        f"{MARGIN:g} F1 against {base}, at both thresholds"
    )
    notes = [
        f"{LEVEL} % intervals over equal seeds",
        style.code(evidence.commits(runs)),
        across_cards(runs[runs["spec.variant"].isin([base, *rows.index])]),
    ]
    note = ". ".join(filter(None, notes))
    figure = style.group_figure(judged, title, note, 1.7 + 0.3 * len(rows))
    axis = figure.subplots()
    _draw_differences(axis, rows, base)
    texts = {
        "at best": column_text(rows, "best_delta", gain),
        "at 0": column_text(rows, "delta", gain),
        "seeds": rows["n"].map(str),
        f"loses < {MARGIN:g}": is_kept.map({True: "shown", False: "not shown"}),
    }
    style.columns(axis, texts)
    style.name_bars(axis, rows.index)
    axis.set_xlabel(f"F1 minus {base}'s")
    style.legend_of_kinds(axis, rows.index, base)
    return figure


def _trained_on(runs: pd.DataFrame) -> str:
    """Return which model runs trained and on which questions they were scored, in words."""
    never_answering = evidence.numbers(runs, {"f1": "quality.always_null_f1"})["f1"]
    questions = spoken.data(runs["data.name"].iloc[0])
    if never_answering.eq(0).all():
        questions = "questions that all have an answer"
    return f"{spoken.model(runs['model.name'].iloc[0])}, {questions}"


def _draw_differences(axis: Axes, rows: pd.DataFrame, base: str) -> None:
    """Draw two points with intervals for each line of `equivalence`, filled at the best threshold.

    The axis is as wide on both sides of 0.
    """
    axis.axvspan(-MARGIN, MARGIN, color="0.92", zorder=0, label=f"± {MARGIN:g} F1")
    axis.axvline(0, color="0.4", linewidth=1)
    colors = style.kinds(rows.index.to_series(), base).map(style.KINDS)
    for column, shift, fill, label in (
        ("best_delta", -0.12, "full", "best threshold"),
        ("delta", 0.12, "none", "threshold 0"),
    ):
        # For the legend alone.
        axis.plot([], [], "o", color="black", fillstyle=fill, markersize=4, label=label)
        for height, (name, row) in enumerate(rows.iterrows()):
            axis.errorbar(
                row[column],
                height + shift,
                xerr=row[f"{column}±"],
                fmt="o",
                markersize=4,
                capsize=2,
                color=colors[name],
                markerfacecolor=colors[name] if fill == "full" else "white",
            )
    farthest = 1.05 * max(abs(end) for end in axis.get_xlim())
    axis.set_xlim(-farthest, farthest)


# Memory.


def fig_memory(runs: pd.DataFrame) -> Figure:
    """Draw reserved memory against training speed of full fine-tunes, a point a variant.

    Raises NotMeasured where no run has its memory.
    """
    base = evidence.baseline(runs)
    shown = timed(runs)
    shown = shown[evidence.trains_all(shown["variant"])]
    shown = shown.dropna(subset=["reserved_mib", "samples_per_s"])
    if shown.empty:
        raise evidence.NotMeasured(
            "peak GPU memory was not measured: these runs had no GPU, whose allocator counts it"
        )
    shown = shown.assign(gib=shown["reserved_mib"] / 1024).set_index("variant", drop=False)
    with_ratio = shown.dropna(subset="ratio")
    least = with_ratio.loc[with_ratio["gib"].idxmin()]
    first = shown.loc[base]
    title = (
        f"{least['variant']} trains everything in {percent(least['gib'] / first['gib'])} of "
        f"{base}'s memory, {number(least['ratio'])}× as fast"
    )
    code = style.code(evidence.commits(evidence.largest_micro_batch(runs)))
    notes = [
        f"Micro-batch {first['micro_batch']}. No variant is both leaner and faster than those on "
        "the line. Small: the other variants of the report's last table",
        code,
    ]
    if evidence.on_other_data(runs):
        notes.append(evidence.on_other_data(runs))
    figure = style.group_figure(runs, title, ". ".join(notes), 6.4)
    axis = figure.subplots()
    axis.set(
        xlabel="samples/s in training (further right is faster)",
        xlim=(0, 1.1 * shown["samples_per_s"].max()),
    )
    axis.set_yscale("log", base=2)
    axis.set(
        ylabel="GPU memory reserved, in GiB (logarithmic)",
        ylim=(0.85 * shown["gib"].min(), 1.15 * shown["gib"].max()),
    )
    axis.set_yticks(_doubling(*axis.get_ylim()))
    axis.yaxis.set_major_formatter(style.THOUSANDS)
    _draw_memory(axis, shown, base)
    return figure


def _doubling(low: float, high: float) -> list[float]:
    """Return those of 1.5, 3, 6, 12, ... and of 0.75, 0.375, ... that lie between two bounds."""
    first = math.ceil(math.log2(low / 1.5))
    last = math.floor(math.log2(high / 1.5))
    return [1.5 * 2.0**power for power in range(first, last + 1)]


def _draw_memory(axis: Axes, shown: pd.DataFrame, base: str) -> None:
    """Draw all points, and a line through those that none is leaner and faster of.

    The points of the line and of the headline are large, and they alone have names.
    """
    front = shown.sort_values("samples_per_s", ascending=False)
    front = front[front["gib"] < front["gib"].cummin().shift(fill_value=math.inf)]
    told = shown["variant"].isin([*front["variant"], *tagged("headline")])
    colors = style.kinds(shown["variant"], base).map(style.KINDS)
    looks = {"s": np.where(told, 40, 14), "alpha": np.where(told, 1.0, 0.5)}
    axis.scatter(shown["samples_per_s"], shown["gib"], color=colors, zorder=2, **looks)
    # A step at each point of the front.
    x = front["samples_per_s"].repeat(2).to_numpy()[1:]
    y = front["gib"].repeat(2).to_numpy()[:-1]
    axis.plot(x, y, color=style.BLUE, linewidth=1, zorder=1)
    style.legend_of_kinds(axis, shown["variant"], base)
    points = shown[told].sort_values("samples_per_s")
    names = [*zip(points["samples_per_s"], points["gib"], points["variant"], strict=True)]
    every_point = [*zip(shown["samples_per_s"], shown["gib"], strict=True)]
    name_beside(axis, names, [*every_point, *along_curve(axis, x, y)])
