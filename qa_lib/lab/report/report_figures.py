"""The figures that notebooks/report.ipynb alone draws: F1, and memory against speed."""

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qa_lib.lab.report import evidence, style
from qa_lib.lab.report.figures import timed
from qa_lib.lab.report.format import gain, number, percent
from qa_lib.lab.report.stats import LEVEL, MARGIN, equivalence
from qa_lib.lab.report.tables import column_text
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
        f"At both thresholds, {is_kept.sum()} of these {len(rows)} variants lose less than "
        f"{MARGIN:g} F1 against {base}"
    )
    note = f"{LEVEL} % intervals over equal seeds"
    if not is_kept.all():
        note += ". Orange: not shown at one of them"
    note += f". {style.code(evidence.commits(runs))}"
    figure = style.group_figure(judged, title, note, 1.7 + 0.3 * len(rows))
    axis = figure.subplots()
    _draw_differences(axis, rows, is_kept)
    texts = {
        "at best": column_text(rows, "best_delta", gain),
        "at 0": column_text(rows, "delta", gain),
        "seeds": rows["n"].map(str),
    }
    style.columns(axis, texts)
    style.name_bars(axis, rows.index)
    axis.set_xlabel(f"F1 minus {base}'s")
    style.legend(axis)
    return figure


def _draw_differences(axis: Axes, rows: pd.DataFrame, is_kept: pd.Series) -> None:
    """Draw two points with intervals for each line of `equivalence`, filled at the best threshold.

    `is_kept` says which lines are blue; the others are orange.
    """
    axis.axvspan(-MARGIN, MARGIN, color="0.92", zorder=0, label=f"± {MARGIN:g} F1")
    axis.axvline(0, color="0.4", linewidth=1)
    for column, shift, label in (
        ("best_delta", -0.12, "best threshold"),
        ("delta", 0.12, "threshold 0"),
    ):
        for height, (name, row) in enumerate(rows.iterrows()):
            color = style.BLUE if is_kept[name] else style.ORANGE
            axis.errorbar(
                row[column],
                height + shift,
                xerr=row[f"{column}±"],
                fmt="o",
                markersize=4,
                capsize=2,
                color=color,
                markerfacecolor=color if column == "best_delta" else "white",
                label=label if height == 0 else None,
            )


# Memory.


def fig_memory(runs: pd.DataFrame) -> Figure:
    """Draw reserved memory against training speed of full fine-tunes, a point a variant.

    Raises NotMeasured where no run has its memory.
    """
    base = evidence.baseline(runs)
    shown = timed(runs)
    shown = shown[evidence.trains_all(shown["variant"])].dropna(subset=["reserved_mib", "ratio"])
    if shown.empty:
        raise evidence.NotMeasured(
            "peak GPU memory was not measured: these runs had no GPU, whose allocator counts it"
        )
    shown = shown.assign(gib=shown["reserved_mib"] / 1024).set_index("variant", drop=False)
    least = shown.loc[shown["gib"].idxmin()]
    first = shown.loc[base]
    title = (
        f"{least['variant']} trains everything in {percent(least['gib'] / first['gib'])} of "
        f"{base}'s memory, {number(least['ratio'])}× as fast"
    )
    note = (
        f"Micro-batch {first['micro_batch']}. No variant is both leaner and faster than those on "
        "the line; light ones stand in the table of every variant. "
        f"{style.code(evidence.commits(evidence.largest_micro_batch(runs)))}"
    )
    figure = style.group_figure(runs, title, note, 5.0)
    axis = figure.subplots()
    _draw_memory(axis, shown, base)
    return figure


def _draw_memory(axis: Axes, shown: pd.DataFrame, base: str) -> None:
    """Draw all points, those on the front joined, and these and the headline's by name."""
    front = shown.sort_values("samples_per_s", ascending=False)
    front = front[front["gib"] < front["gib"].cummin().shift(fill_value=math.inf)]
    named = shown[shown["variant"].isin([*front["variant"], *tagged("headline")])]
    axis.scatter(shown["samples_per_s"], shown["gib"], s=40, color="0.85")
    for kind, part in named.groupby(style.kinds(named["variant"], base), sort=False):
        axis.scatter(part["samples_per_s"], part["gib"], s=40, color=style.KINDS[kind], label=kind)
    axis.step(
        front["samples_per_s"],
        front["gib"],
        where="post",
        color=style.BLUE,
        linewidth=1,
        zorder=1,
    )
    axis.set(xlabel="samples/s in training (further right is faster)", xlim=(0, None))
    axis.set(ylabel="GPU memory reserved, in GiB", ylim=(0, None))
    words = (
        f"{line.variant}: {number(line.gib)} GiB, {number(line.samples_per_s)}/s"
        for line in named.itertuples()
    )
    style.name_points(axis, zip(named["samples_per_s"], named["gib"], words, strict=True))
    style.legend(axis)
