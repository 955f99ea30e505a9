"""The figures of memory and speed against length and batch (notebooks/scaling.ipynb).

`fig_curve` draws a curve for each variant from what `curves.points` returns. Its title says the
finding, and the variants that it names are drawn bolder than the others.
"""

import contextlib
import math
from itertools import pairwise
from typing import Literal, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import blended_transform_factory

from qa_lib.lab.report import curves, evidence, style
from qa_lib.lab.report.evidence import NotMeasured
from qa_lib.lab.report.format import factor, number, percent
from qa_lib.lab.report.point_names import along_curve, name_beside, name_points

Size = Literal["length", "micro_batch"]
Measure = Literal["gib", "speed"]

UNITS = {"length": "tokens", "micro_batch": "samples"}
LABELS = {
    "length": "tokens of a sample or window",
    "micro_batch": "samples in one forward pass (micro-batch)",
    "gib": "peak GPU memory, allocated, in GiB",
    "speed": "samples/s in training",
}
BAND = 0.1  # the share of an axis' height in which those stand that ran out of memory


class Finding(NamedTuple):
    """What the title of a figure of curves says."""

    title: str
    told: list[str]
    """The variants that it names."""
    note: str
    """What the caption says of it."""


def fig_curve(runs: pd.DataFrame, table: pd.DataFrame, size: Size, measure: Measure) -> Figure:
    """Draw a measure against a size: a curve for each variant that has two points or more.

    `table` are the `points` of a group's `runs`.

    Raises NotMeasured where no two runs differ in that size alone, or none has the measure.
    """
    where, part = curves.along(table, size)
    if part[measure].isna().all():
        why = "these runs record no times"
        if measure == "gib":
            why = "GPU memory is counted by the GPU's allocator"
        raise NotMeasured(f"no run with {where} has one: {why}")
    # A lone point is no curve.
    part = part[part.groupby("variant")[size].transform("nunique") > 1]
    part = part.sort_values(size, kind="stable")
    base = evidence.baseline(runs)
    found = _memory_finding(part, size) if measure == "gib" else _speed_finding(part, size, base)
    told = {*found.told, base}
    notes = [where.capitalize(), found.note, style.code(evidence.commits(runs))]
    if measure == "gib":
        notes.insert(1, _prediction(part[part["variant"].isin(told)]))
    note = ". ".join(text for text in notes if text)
    figure = style.group_figure(runs, found.title, note, 4.8)
    axis = figure.subplots()
    looks = style.looks(part["variant"], base, told)
    for variant, line in part.groupby("variant", sort=False):
        axis.plot(line[size], line[measure], **looks[variant])
        if measure == "gib" and variant in told:
            # In black: it would hide in a curve of its colour, on which it mostly lies.
            axis.plot(line[size], line["predicted"], "--", color="black", linewidth=1, zorder=4)
    _scale(axis, part, size, measure)
    style.legend_of_kinds(axis, part["variant"], base)
    _mark_out_of_memory(axis, part, size, measure, looks)
    _name_curves(axis, part, size, measure, told)
    return figure


# What titles say.


def _memory_finding(part: pd.DataFrame, size: Size) -> Finding:
    """Return how memory grows from the least size to the largest, where most and where least.

    Variants that were not measured at both do not count.
    """
    peaks = part.dropna(subset="gib").pivot(index="variant", columns=size, values="gib")
    low = peaks.columns.min()
    high = peaks.columns.max()
    growth = (peaks[high] / peaks[low]).dropna()
    if low == high or growth.empty:
        raise NotMeasured(f"no variant has a peak at the least and the most {UNITS[size]}")
    most = growth.idxmax()
    least = growth.idxmin()
    title = f"From {low:,} to {high:,} {UNITS[size]}, memory grows {factor(growth[most])} in {most}"
    told = [most]
    if most != least:
        title += f" and {factor(growth[least])} in {least}"
        told.append(least)
    variants = part["variant"].nunique()
    note = ""
    if len(growth) < variants:
        note = f"{len(growth)} of {variants} variants were measured at both ends"
    return Finding(title, told, note)


def _prediction(told: pd.DataFrame) -> str:
    """Return what is dashed, and how near it is to what was measured; "" if nothing is predicted.

    `told` are the points of the variants that have a dashed curve.
    """
    off = (told["predicted"] / told["gib"] - 1).abs().max()
    if told["predicted"].isna().all():
        return ""
    if math.isnan(off):
        return "Dashed: predicted"
    return f"Dashed: predicted, within {percent(off)} of the measured"


def _speed_finding(part: pd.DataFrame, size: Size, base: str) -> Finding:
    """Return by how much the quickest variant leads, or its speeds where that is not known.

    Over micro-batches the lead is over the Trainer or plain PyTorch (`curves.lead`), where these
    were measured, and over the baseline elsewhere, in both cases within a sitting.
    """
    # At few tokens the variants wait for the host, so that a lead over lengths is none.
    if size == "micro_batch":
        with contextlib.suppress(NotMeasured):
            return _lead(part, base)
    speeds = part.pivot(index=size, columns="variant", values="speed").dropna(how="all")
    best = speeds.max().idxmax()
    won = (speeds.idxmax(axis="columns") == best).sum()
    note = f"{best} is the fastest of {speeds.shape[1]} variants at {won} of {len(speeds)} sizes"
    if won == len(speeds):
        of_size = size.replace("_", "-")
        note = f"{best} is the fastest of {speeds.shape[1]} variants at every {of_size}"
    own = speeds[best].dropna()
    ratios = curves.ratios(part, size, best, base)
    # A pass of one sample waits for the host.
    if len(ratios) > 1 and base != best and part["micro_batch"].min() > 1:
        low, high = ratios.index[[0, -1]]
        title = (
            f"{best} trains {factor(ratios[low])} as fast as {base} at {low:,} {UNITS[size]}, "
            f"{factor(ratios[high])} at {high:,}"
        )
        return Finding(title, [best, base], note)
    low, high = own.index[[0, -1]]
    title = (
        f"{best} reaches {number(own[low])} samples/s at {low:,} {UNITS[size]}, "
        f"{number(own[high])} at {high:,}"
    )
    return Finding(title, [best], note)


def _lead(part: pd.DataFrame, base: str) -> Finding:
    """Return how much quicker the quickest variant is than its quickest rival, by micro-batch."""
    variant, rival, factors = curves.lead(part)
    kind = style.kinds(pd.Series([rival]), base).iloc[0]
    (first, ratio), *rest = factors.items()
    title = f"{variant} trains {factor(ratio)} as fast as {kind} ({rival}) at {first:,} samples"
    for micro_batch, ratio in rest:
        title += f", {factor(ratio)} at {micro_batch:,}"
    return Finding(title, [variant, rival], "")


# Parts of the figure.


def _scale(axis: Axes, part: pd.DataFrame, size: Size, measure: Measure) -> None:
    """Set the scales and the labels of both axes."""
    # At one rate of tokens, speed falls in proportion to the length.
    if measure == "gib" or size == "length":
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter(style.THOUSANDS)
    else:
        axis.set_ylim(0, 1.08 * part[measure].max())
    axis.set_xscale("log", base=2)
    sizes = sorted(set(part[size]))
    # A size that lies close to the one before it has no room for its number.
    names = [
        f"{this:,.0f}" if before * 1.2 < this else "" for before, this in pairwise([0, *sizes])
    ]
    axis.set_xticks(sizes, names)
    axis.set(xlabel=LABELS[size], ylabel=LABELS[measure])


def _mark_out_of_memory(
    axis: Axes, part: pd.DataFrame, size: Size, measure: Measure, looks: dict[str, dict]
) -> None:
    """Draw a cross at the smallest size at which each variant ran out of memory, with its name.

    The crosses stand in a band: at the top, where memory is drawn, and at the bottom, where speed
    is.
    """
    failed = part[part["oom"]].groupby("variant", sort=False)[size].min()
    if failed.empty:
        return
    is_at_top = measure == "gib"
    axis.axhspan(*_make_room(axis, is_at_top), color="0.92", zorder=0)
    in_band = blended_transform_factory(axis.transData, axis.transAxes)
    middle = 1 - BAND / 2 if is_at_top else BAND / 2
    for at, variants in failed.groupby(failed):
        for variant in variants.index:
            cross = looks[variant] | {"marker": "x", "markersize": 6, "alpha": 1.0}
            axis.plot(at, middle, transform=in_band, **cross)
        axis.annotate(
            f"out of memory: {', '.join(variants.index)}",
            (at, middle),
            (-8, 0),
            xycoords=in_band,
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=8,
        )


def _make_room(axis: Axes, is_at_top: bool) -> tuple[float, float]:
    """Move an end of the vertical axis outwards by a band, and return where this begins and ends.

    The band is a share BAND of the axis' new height.
    """
    to_scale = axis.yaxis.get_transform()
    low, high = to_scale.transform(axis.get_ylim())
    room = (high - low) * BAND / (1 - BAND)
    band = (high, high + room) if is_at_top else (low - room, low)
    bottom, top = to_scale.inverted().transform(band)
    # A number beside the band would read as one of those in it.
    low, high = axis.get_ylim()
    axis.set_yticks([tick for tick in axis.get_yticks() if low <= tick <= high])
    if is_at_top:
        axis.set_ylim(top=top)
    else:
        axis.set_ylim(bottom=bottom)
    return bottom, top


def _name_curves(
    axis: Axes, part: pd.DataFrame, size: Size, measure: Measure, told: set[str]
) -> None:
    """Write each variant's name at the end of its curve, in grey where it is not `told`.

    Where it is, and where a straight line fits memory, both of its costs stand beside the name.
    """
    at_edge = []
    within = []
    faint = []
    drawn = []
    for variant, line in part.groupby("variant", sort=False):
        measured = line.dropna(subset=measure)
        if measured.empty:
            continue
        drawn += along_curve(axis, measured[size], measured[measure])
        text = variant
        if variant not in told:
            faint.append(text)
        elif measure == "gib":
            text += _costs(line)
        x, y = measured[[size, measure]].iloc[-1]
        (at_edge if x == part[size].max() else within).append((x, y, text))
    name_points(axis, at_edge, faint)
    name_beside(axis, within, drawn, faint)


def _costs(line: pd.DataFrame) -> str:
    """Return a variant's fixed cost and that of a token, or nothing where no line fits."""
    fixed_gib, kib_a_token, miss = curves.fit(line)
    if math.isnan(miss) or miss > curves.STRAIGHT:
        return ""
    return f": {number(fixed_gib)} GiB + {number(kib_a_token)} KiB a token"
