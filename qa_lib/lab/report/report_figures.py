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

# The reference project's variants, which its documents speak of.
REFERENCES = ("A1", "A2", "A3", "A4", "B1", "B2", "B3", "C1", "C2", "D1")
MOST = 8  # variants whose F1 is drawn, but where those of the headline and of REFERENCES are more
FARTHEST = 5  # F1 from the baseline's within which a variant has its place on the axis

LOSES_LESS = {"within": "shown", "no worse": "shown", "open": "not shown", "beyond": "refuted"}


# F1.


def fig_equivalence(judged: pd.DataFrame) -> Figure:
    """Draw F1 less the baseline's at both thresholds, with intervals, of a group's variants.

    They are those of the headline and of REFERENCES. Up to MOST, those of the ladder follow, and
    then others.

    Raises NotMeasured where no variant has an interval.
    """
    runs = evidence.usual_conditions(judged)
    base = evidence.baseline(judged)
    tested = equivalence(runs).dropna(subset="best_delta±")
    told = [name for name in tested.index if name in {*tagged("headline"), *REFERENCES}]
    in_order = dict.fromkeys([*told, *tagged("ladder"), *tested.index])
    first = [name for name in in_order if name in tested.index][: max(MOST, len(told))]
    rows = tested[tested.index.isin(first)]
    title = (
        f"{_trained_on(runs)}, against {base} at both thresholds: "
        f"{_counted_verdicts(rows['verdict'])}"
    )
    far = "Triangles: beyond the axis, with their F1 at the best threshold and at 0"
    notes = [
        far if _is_far(rows).any() else "",
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
        f"loses < {MARGIN:g}": rows["verdict"].map(LOSES_LESS),
    }
    style.columns(axis, texts)
    style.name_bars(axis, rows.index)
    axis.set_xlabel(f"F1 minus {base}'s")
    style.legend_of_kinds(axis, rows.index, base)
    return figure


def _counted_verdicts(verdicts: pd.Series) -> str:
    """Return of how many variants it is shown that they lose less than MARGIN, or more, or none."""
    is_kept = verdicts.isin(["within", "no worse"])
    is_lost = verdicts == "beyond"
    is_open = ~is_kept & ~is_lost
    text = f"{is_kept.sum()} of {len(verdicts)} variants are shown to lose less than {MARGIN:g} F1"
    if is_lost.any():
        text += f", {is_lost.sum()} to lose more"
    if is_open.any():
        text += f", {is_open.sum()} are open"
    return text


def _trained_on(runs: pd.DataFrame) -> str:
    """Return which model runs trained and on which questions they were scored, in words."""
    never_answering = evidence.numbers(runs, {"f1": "quality.always_null_f1"})["f1"]
    questions = spoken.data(runs["data.name"].iloc[0])
    if never_answering.eq(0).all():
        questions = "questions that all have an answer"
    return f"{spoken.model(runs['model.name'].iloc[0])}, {questions}"


def _is_far(rows: pd.DataFrame) -> pd.Series:
    """Return which lines of `equivalence` lie farther than FARTHEST, at either threshold."""
    return rows[["best_delta", "delta"]].abs().max(axis="columns") > FARTHEST


def _draw_differences(axis: Axes, rows: pd.DataFrame, base: str) -> None:
    """Draw two points with intervals for each line of `equivalence`, filled at the best threshold.

    The axis is as wide on both sides of 0. Lines that are far have triangles at its edge.
    """
    axis.axvspan(-MARGIN, MARGIN, color="0.92", zorder=0, label=f"± {MARGIN:g} F1")
    axis.axvline(0, color="0.4", linewidth=1)
    colors = style.kinds(rows.index.to_series(), base).map(style.KINDS)
    is_far = _is_far(rows)
    for column, shift, fill, label in (
        ("best_delta", -0.12, "full", "best threshold"),
        ("delta", 0.12, "none", "threshold 0"),
    ):
        # For the legend alone.
        axis.plot([], [], "o", color="black", fillstyle=fill, markersize=4, label=label)
        for height, (name, row) in enumerate(rows.iterrows()):
            look = {
                "color": colors[name],
                "markersize": 4,
                "markerfacecolor": colors[name] if fill == "full" else "white",
            }
            if is_far[name]:
                edge, marker = (0.01, "<") if row[column] < 0 else (0.99, ">")
                of_edge = axis.get_yaxis_transform()
                axis.plot(edge, height + shift, marker=marker, transform=of_edge, **look)
            else:
                half = row[f"{column}±"]
                axis.errorbar(row[column], height + shift, xerr=half, fmt="o", capsize=2, **look)
    for height, (name, row) in enumerate(rows.iterrows()):
        if is_far[name]:
            _number_edge(axis, height, row)
    farthest = 1.05 * max(abs(end) for end in axis.get_xlim())
    axis.set_xlim(-farthest, farthest)


def _number_edge(axis: Axes, height: int, row: pd.Series) -> None:
    """Write both differences of a line of `equivalence` beside its triangles."""
    edge, side = (0.03, "left") if row["best_delta"] < 0 else (0.97, "right")
    axis.text(
        edge,
        height,
        f"{gain(row['best_delta'])}, {gain(row['delta'])}",
        transform=axis.get_yaxis_transform(),
        ha=side,
        va="center",
        fontsize=8,
    )


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
        f"Micro-batch {first['micro_batch']}",
        _said_of_front(_front(shown)),
    ]
    unnamed = shown[~_is_named(shown)].sort_values("samples_per_s")["variant"]
    if len(unnamed):
        notes.append(f"Small, from slow to fast: {', '.join(unnamed)}")
    notes.append(code)
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


def _front(shown: pd.DataFrame) -> pd.DataFrame:
    """Return the lines than which none is both leaner and faster, the fastest first."""
    front = shown.sort_values("samples_per_s", ascending=False)
    return front[front["gib"] < front["gib"].cummin().shift(fill_value=math.inf)]


def _said_of_front(front: pd.DataFrame) -> str:
    """Return what the line of `_front` means; it may be a single point, where none is drawn."""
    if len(front) == 1:
        return f"{front['variant'].iloc[0]} is the leanest and the fastest"
    return "No variant is both leaner and faster than those on the line"


def _is_named(shown: pd.DataFrame) -> pd.Series:
    """Return which points have names: those of the line, of the headline and of REFERENCES."""
    named = [*_front(shown)["variant"], *tagged("headline"), *REFERENCES]
    return shown["variant"].isin(named)


def _draw_memory(axis: Axes, shown: pd.DataFrame, base: str) -> None:
    """Draw all points, and a line through those that none is leaner and faster of.

    Points with names are large.
    """
    front = _front(shown)
    told = _is_named(shown)
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
