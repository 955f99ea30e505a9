"""The figure of memory or speed against length or batch, which notebooks/scaling.ipynb draws."""

import contextlib
from itertools import pairwise

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qa_lib.lab.report import curves, evidence, style
from qa_lib.lab.report.evidence import NotMeasured
from qa_lib.lab.report.format import factor, number
from qa_lib.spec.variants import tagged

NAMED = 4  # variants that have a colour and a name
UNITS = {"length": "tokens", "micro_batch": "samples"}
# Columns of `curves.points` -> what stands at the axis.
AXES = {
    "length": "tokens of a sample or window",
    "micro_batch": "samples in one forward pass (micro-batch)",
    "gib": "peak GPU memory, allocated, in GiB",
    "speed": "samples/s in training",
}


def fig_curve(runs: pd.DataFrame, points: pd.DataFrame, size: str, measure: str) -> Figure:
    """Draw a measure against a size, a line for each variant of a group's runs.

    `points` are those of `curves.points`, `size` is "length" or "micro_batch", and `measure` is
    "gib" or "speed". Memory has the predicted one beside it, dashed.

    Raises NotMeasured where no run has the measure.
    """
    where, part = curves.along(points, size)
    if part[measure].notna().sum() == 0:
        if measure == "gib":
            reason = "GPU memory is counted by the GPU's allocator"
        else:
            reason = "these runs record no times"
        raise NotMeasured(f"no run with {where} has one: {reason}")
    # A lone point is no curve.
    part = part[part.groupby("variant")[size].transform("nunique") > 1]
    note = f"{where.capitalize()}. Grey: other variants; ×: out of memory"
    if measure == "gib":
        finding, told = memory_finding(part, size)
        note += "; dashed: predicted"
    else:
        finding, told = speed_finding(part, size, where, evidence.baseline(runs))
    code = style.code(evidence.commits(runs))
    figure = style.group_figure(runs, finding, f"{note}. {code}", 4.4)
    axis = figure.subplots()
    colors = _colors(part["variant"], told)
    for variant, line in part.sort_values(size).groupby("variant", sort=False):
        _draw_line(axis, line, size, measure, colors.get(variant))
    _set_scales(axis, part, size, measure)
    style.name_points(axis, _ends(part, size, measure, colors))
    return figure


def memory_finding(part: pd.DataFrame, size: str) -> tuple[str, list[str]]:
    """Return how memory grows from the least size to the largest that most variants have reached,
    and the two variants that this names, where most and where least.

    Raises NotMeasured where no variant has a peak at two sizes.
    """
    peaks = part.dropna(subset=["gib"]).pivot(index="variant", columns=size, values="gib")
    low = peaks.columns.min()
    growth = peaks.div(peaks[low], axis="index").drop(columns=low)
    reached = growth.count()
    if reached.sum() == 0:
        raise NotMeasured(f"no variant has a peak at two numbers of {UNITS[size]}")
    high = reached[reached == reached.max()].index.max()
    growth = growth[high].dropna()
    most = growth.idxmax()
    least = growth.idxmin()
    said = f"From {low:,} to {high:,} {UNITS[size]}, memory grows ×{number(growth[most])} in {most}"
    if most != least:
        said += f" and ×{number(growth[least])} in {least}"
    return said, [most, least]


def speed_finding(part: pd.DataFrame, size: str, where: str, base: str) -> tuple[str, list[str]]:
    """Return which variant is quickest at most sizes, and the variants that this names.

    Over micro-batches it is the lead over the Trainer, where that is known.
    """
    # At few tokens the variants wait for the host, so that a lead over lengths is none.
    if size != "length":
        with contextlib.suppress(NotMeasured):
            variant, rival, factors = curves.lead(part)
            said = ", ".join(f"×{number(lead)} at {at:,}" for at, lead in factors.items())
            return f"{variant} over the Trainer, {rival}: {said} ({where})", [variant, rival]
    speeds = part.pivot(index=size, columns="variant", values="speed").dropna(how="all")
    best = speeds.max().idxmax()
    won = (speeds.idxmax(axis="columns") == best).sum()
    at_which = f"{won} of {len(speeds)} sizes"
    if won == len(speeds):
        at_which = f"every {size.replace('_', '-')}"
    form = number
    shown = speeds[best].dropna()
    what = "samples/s"
    # A pass of one sample waits for the host.
    if base in speeds and part["micro_batch"].min() > 1:
        form = factor
        shown = (speeds[best] / speeds[base]).dropna()
        what = f"{base}'s speed"
    low, high = shown.index[[0, -1]]
    said = f"{form(shown[low])} {what} at {low:,} {UNITS[size]}, {form(shown[high])} at {high:,}"
    finding = f"{best} is the fastest of {speeds.shape[1]} variants at {at_which}: {said} ({where})"
    return finding, [best, base]


def _colors(variants: pd.Series, told: list[str]) -> dict:
    """Return the colours of the variants that a finding names, and of some of the headline."""
    first = [*tagged("headline"), *tagged("ladder")]
    others = sorted((set(variants) & set(first)) - set(told), key=first.index)
    return dict(zip([*told, *others][:NAMED], style.COLORBLIND, strict=False))


def _draw_line(axis: Axes, line: pd.DataFrame, size: str, measure: str, color) -> None:
    """Draw the line of one variant, grey without a colour; × where it runs out of memory."""
    look = {"color": color or "0.8", "zorder": 2 if color else 1}
    axis.plot(line[size], line[measure], marker="o", markersize=4, linewidth=1.4, **look)
    if measure == "gib" and color:
        axis.plot(line[size], line["predicted"], linestyle="--", linewidth=1, **look)
    if line["oom"].any():
        too_large = line.loc[line["oom"], size].min()
        axis.plot(too_large, 0.97, "x", transform=axis.get_xaxis_transform(), **look)


def _set_scales(axis: Axes, part: pd.DataFrame, size: str, measure: str) -> None:
    """Set the scales and the names of both axes; sizes are named that lie apart from others."""
    # At one rate of tokens, speed falls in proportion to the length.
    if measure == "gib" or size == "length":
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter(style.THOUSANDS)
    else:
        axis.set_ylim(0, 1.08 * part[measure].max())
    axis.set_xscale("log", base=2)
    sizes = sorted(set(part[size]))
    names = [
        f"{value:,.0f}" if before * 1.2 < value else "" for before, value in pairwise([0, *sizes])
    ]
    axis.set_xticks(sizes, names)
    axis.set(xlabel=AXES[size], ylabel=AXES[measure])


def _ends(
    part: pd.DataFrame, size: str, measure: str, colors: dict
) -> list[tuple[float, float, str]]:
    """Return the last point of each coloured line, with its name and, of memory, both costs."""
    ends = []
    for variant, line in part.sort_values(size).groupby("variant", sort=False):
        last = line.dropna(subset=[measure])
        if variant not in colors or last.empty:
            continue
        name = variant
        if measure == "gib":
            fixed, each, miss = curves.fit(line)
            if miss <= curves.STRAIGHT:
                name += f": {number(fixed)} GiB + {number(each)} KiB a token"
        ends.append((last[size].iloc[-1], last[measure].iloc[-1], name))
    return ends
