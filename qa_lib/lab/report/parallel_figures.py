"""The figures of notebooks/multi_gpu.ipynb: speed, waiting and larger batches of several GPUs."""

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qa_lib.lab.report import evidence, noise_scale, scaling, style
from qa_lib.lab.report.format import MISSING, percent
from qa_lib.lab.report.noise_scale import REFERENCE
from qa_lib.lab.report.point_names import along_curve, name_beside, name_points
from qa_lib.lab.report.scaling import worded
from qa_lib.lab.report.stats import LEVEL

PERFECT = {"linestyle": "--", "color": "0.7", "linewidth": 0.8}
LARGEST = 512  # samples of a batch up to which the worth of a sample is predicted


# Speed.


def fig_scaling(runs: pd.DataFrame) -> Figure:
    """Draw samples/s against GPUs, at one batch a GPU, at one batch in all, and at another.

    Dashed is perfect scaling, so many times the speed of one GPU.

    Raises NotMeasured where no variant was run on one GPU and on several.
    """
    lines = scaling.scaling(runs)
    panels = [(kind, size) for kind in scaling.SHOWN for size in scaling.shown_sizes(lines, kind)]
    several = lines[evidence.is_parallel(lines["variant"])]
    shown = [scaling.at(several, kind, size).dropna(subset=kind) for kind, size in panels]
    variants = pd.concat(shown)["variant"]
    base = evidence.baseline(runs)
    title = worded(scaling.speed_finding(lines), runs)
    told = [name for name in variants.unique() if f"({name})" in title]
    note = worded(
        f"Perfect: as many times one GPU. Bars are {LEVEL} % intervals, and a point without one is "
        "a single run",
        runs,
    )
    figure = style.group_figure(runs, title, f"{note}. {style.code(evidence.commits(runs))}", 4.8)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    looks = style.looks(variants, base, told)
    ends = []  # of each axis
    for axis, (kind, size), compared in zip(axes, panels, shown, strict=True):
        ends.append(_draw_speeds(axis, compared, kind, looks))
        where = "in all" if kind == "strong" else "a GPU"
        axis.set_title(worded(f"{size} samples {where}", runs), fontsize=10)
        axis.set(xlabel=worded("GPUs", runs), xticks=sorted({1, *several["world"]}))
    axes[0].set(ylabel=worded("samples/s of all GPUs", runs), ylim=(0, None))
    # Names need the limits, which all axes share: at the edge for lines that reach it first.
    for axis, points in zip(axes, ends, strict=True):
        most = max(world for world, *_ in points)
        _name(name_points, axis, [end for end in points if end[0] == most], told)
    for axis, points in zip(axes, ends, strict=True):
        most = max(world for world, *_ in points)
        taken = [place for line in axis.lines for place in along_curve(axis, *line.get_data())]
        _name(name_beside, axis, [end for end in points if end[0] < most], told, taken)
    axes[0].plot([], [], label="perfect", **PERFECT)
    style.legend_of_kinds(axes[0], variants, base, 1.06)
    return figure


def _draw_speeds(
    axis: Axes, compared: pd.DataFrame, kind: str, looks: dict
) -> list[tuple[float, float, str]]:
    """Draw a line for each variant and number of stages, with perfect scaling, dashed.

    `kind` is "strong" or "weak", the column of `compared` that has the efficiency, and `looks` are
    those of `style.looks`. Returns the last point of each line, with its name.
    """
    ends = []
    for (variant, stages), line in compared.groupby(["variant", "stages"], sort=False):
        of_one_gpu = (line["speed"] / line[kind] / line["world"]).mean()
        if line["world"].min() > 1:
            line = pd.concat([pd.DataFrame({"world": [1], "speed": [of_one_gpu]}), line])
        perfect = line["world"] * of_one_gpu
        axis.plot(line["world"], perfect, zorder=1, **PERFECT)
        axis.errorbar(line["world"], line["speed"], line["speed±"], capsize=3, **looks[variant])
        name = f"{variant}, {stages} stages" if stages > 1 else variant
        ends.append((line["world"].iloc[-1], line["speed"].iloc[-1], name))
    return ends


def _name(name_ends: Callable, axis: Axes, ends: list[tuple], told: list[str], *taken) -> None:
    """Have `name_ends` write the names of lines at their ends, grey but for those in the title."""
    name_ends(axis, ends, *taken, {name for *_, name in ends} - set(told))


# Waiting.


def fig_waiting(runs: pd.DataFrame) -> Figure:
    """Draw which share of a step a GPU computes: a group of bars for each batch and number of GPUs.

    Raises NotMeasured where no two variants of several GPUs can be compared.
    """
    shares = scaling.step_shares(scaling.scaling(runs))
    rows = []
    headings = []
    for (batch, world), part in shares.groupby(["batch", "world"]):
        heading = worded(f"{batch:,} samples on {world} GPUs", runs)
        headings.append(heading)
        rows.append(pd.Series(name=heading))  # a line without a bar
        rows += [row.rename(row["variant"]) for _, row in part.iterrows()]
    table = pd.DataFrame([row.reindex(scaling.PARTS) for row in rows], dtype=float)
    title = worded(scaling.waiting_finding(shares), runs)
    note = (
        "Communicating: a GPU does nothing else. Bubble: a pipeline's GPU waits for the layers of "
        f"another. Idle: neither. {style.code(evidence.commits(runs))}"
    )
    figure = style.group_figure(runs, title, worded(note, runs), 1.6 + 0.19 * len(table))
    axis = figure.subplots()
    colors = (style.BLUE, style.ORANGE, style.RED, style.GREY)
    style.stack(axis, 100 * table.fillna(0.0), dict(zip(scaling.PARTS, colors, strict=True)))
    for label in axis.get_yticklabels():
        label.set_fontweight("bold" if label.get_text() in headings else "normal")
    style.columns(axis, {"computing": table["computing"].map(percent).replace(MISSING, "")})
    style.legend(axis)
    axis.set(xlabel="% of a step", xlim=(0, 100))
    return figure


# Larger batches.


def fig_noise(runs: pd.DataFrame) -> Figure:
    """Draw the noise scale over the training, and what a sample teaches in larger batches.

    The latter as the noise scale predicts it, and as it was measured.

    Raises NotMeasured where the reference batch and a larger one were not both run.
    """
    logs = noise_scale.logs_of(runs)
    worth, loss = noise_scale.batch_worth(logs)
    batch = worth.index.max()
    title = (
        f"In a batch of {batch} a sample teaches {percent(worth.loc[batch, 'measured'])} of what "
        f"it does in one of {REFERENCE}; predicted: {percent(worth.loc[batch, 'predicted'])}"
    )
    variant = noise_scale.most_batches(logs)["variant"].iloc[0]
    of_phi = noise_scale.reference_phi(logs)["batch"].iloc[0]
    note = (
        "The noise scale φ is the batch whose gradient is noise and signal in equal parts. "
        f"{variant}. Lines are medians, bands quartiles over seeds; measured until a loss of "
        f"{loss:.2f}; predicted by φ at batch {of_phi}. {style.code(evidence.commits(runs))}"
    )
    figure = style.group_figure(runs, title, note, 3.6)
    left, right = figure.subplots(1, 2)
    _draw_noise(left, noise_scale.noise_scales(logs))
    _draw_worth(right, logs, worth)
    for axis in (left, right):
        style.legend(axis)
    return figure


def _draw_noise(axis: Axes, scales: pd.DataFrame) -> None:
    """Draw the noise scale over the training, by twentieths, a line for each batch."""
    for color, (size, part) in zip(style.COLORBLIND, scales.groupby("batch"), strict=False):
        over = part.groupby(np.ceil(20 * part["done"]) / 20)["phi"]
        median = over.median()
        axis.plot(median, color=color, label=f"batch {size:g}")
        low = over.quantile(0.25)
        high = over.quantile(0.75)
        axis.fill_between(median.index, low, high, color=color, alpha=0.2, linewidth=0)
    axis.set(xlabel="share of the training", ylabel="noise scale φ, in samples")
    axis.set(ylim=(0, None), xlim=(0, 1))


def _draw_worth(axis: Axes, logs: pd.DataFrame, worth: pd.DataFrame) -> None:
    """Draw what a sample teaches against the batch, of `noise_scale.batch_worth` and predicted."""
    batches = np.unique(np.geomspace(REFERENCE, LARGEST, 60).astype(int))
    axis.plot(noise_scale.efficiencies(logs, batches), color=style.BLUE, label="by φ")
    nothing = "if more samples taught nothing"
    axis.plot(batches, REFERENCE / batches, ":", color=style.GREY, label=nothing)
    axis.errorbar(
        worth.index,
        worth["measured"],
        worth["measured±"],
        fmt="o",
        color=style.RED,
        capsize=3,
        label="measured",
    )
    axis.set_xscale("log", base=2)
    ticks = [REFERENCE * 2**power for power in range(5)]
    axis.set_xticks(ticks, ticks)
    axis.set(
        xlabel="samples a step", ylabel=f"worth of a sample (at {REFERENCE}: 1)", ylim=(0, 1.2)
    )
