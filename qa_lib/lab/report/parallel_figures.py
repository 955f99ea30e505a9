"""The figures of notebooks/multi_gpu.ipynb: speed, waiting and larger batches of several GPUs."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qa_lib.lab.report import evidence, noise_scale, scaling, style
from qa_lib.lab.report.format import number, percent
from qa_lib.lab.report.noise_scale import REFERENCE
from qa_lib.lab.report.scaling import worded
from qa_lib.lab.report.stats import LEVEL
from qa_lib.spec.variants import VARIANTS, tagged

NAMED = 4  # variants that have a colour
LARGEST = 512  # samples of a batch up to which the worth of a sample is predicted

PIPELINES = {name for name, variant in VARIANTS.items() if variant.settings.parallel == "pipeline"}


# Speed.


def fig_scaling(runs: pd.DataFrame) -> Figure:
    """Draw samples/s against GPUs, at one batch in all, at another, and at one batch a GPU.

    Dashed is perfect scaling, so many times the speed of one GPU.

    Raises NotMeasured where no variant was run on one GPU and on several.
    """
    lines = scaling.scaling(runs)
    strong = [("strong", size) for size in scaling.common(lines, "strong")[:2]]
    weak = [("weak", size) for size in scaling.common(lines, "weak")[:1]]
    panels = [*strong, *weak]
    note = f"Bars are {LEVEL} % intervals. {style.code(evidence.commits(runs))}"
    title = worded(scaling.speed_finding(lines), runs)
    figure = style.group_figure(runs, title, note, 4.2)
    several = lines[evidence.is_parallel(lines["variant"])]
    at_panels = [scaling.at(several, kind, size) for kind, size in panels]
    drawn = pd.concat(at_panels)["variant"].unique()
    named = sorted(drawn, key=lambda name: name not in tagged("headline"))[:NAMED]
    colors = dict(zip(named, style.COLORBLIND, strict=False))
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (kind, size), compared in zip(axes, panels, at_panels, strict=True):
        _draw_speeds(axis, compared.dropna(subset=kind), kind, colors)
        where = "in all" if kind == "strong" else "a GPU"
        axis.set_title(worded(f"{size} samples {where}", runs), fontsize=10)
        axis.set(xlabel=worded("GPUs", runs), ylim=(0, None), xticks=sorted({1, *several["world"]}))
    axes[0].set_ylabel(worded("samples/s of all GPUs", runs))
    handles = _handles(axes)
    figure.legend(handles.values(), handles, loc="outside right center", fontsize=8, frameon=False)
    return figure


def _draw_speeds(axis: Axes, compared: pd.DataFrame, kind: str, colors: dict) -> None:
    """Draw a line for each variant and number of stages, with perfect scaling for those in colour.

    `kind` is "strong" or "weak", the column of `compared` that has the efficiency.
    """
    for (variant, stages), line in compared.groupby(["variant", "stages"], sort=False):
        of_one_gpu = (line["speed"] / line[kind] / line["world"]).mean()
        if line["world"].min() > 1:
            line = pd.concat([pd.DataFrame({"world": [1], "speed": [of_one_gpu]}), line])
        is_named = variant in colors
        name = "other variants"
        if is_named:
            name = f"{variant}, {stages} stages" if stages > 1 else variant
        axis.errorbar(
            line["world"],
            line["speed"],
            line["speed±"],
            marker="o",
            markersize=4,
            capsize=3,
            color=colors.get(variant, "0.8"),
            zorder=2 if is_named else 1,
            label=name,
        )
        if is_named:
            perfect = line["world"] * of_one_gpu
            axis.plot(
                line["world"], perfect, "--", color="0.4", linewidth=1, label="perfect scaling"
            )


def _handles(axes: Sequence[Axes]) -> dict:
    """Return what a legend of several axes shows, each label once."""
    found = {}
    for axis in axes:
        handles, labels = axis.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    return found


# Waiting.


def fig_waiting(runs: pd.DataFrame) -> Figure:
    """Draw where a step's time goes, in shares of it, and the memory of a GPU.

    A variant is shown at the batch of most variants, or the nearest at which it has run.

    Raises NotMeasured where no run of several GPUs has its waiting measured.
    """
    lines = scaling.scaling(runs)
    told = lines[evidence.is_parallel(lines["variant"])].dropna(subset=["step_ms", "waiting_ms"])
    if told.empty:
        raise evidence.NotMeasured("no run of several GPUs has its waiting measured")
    batch = next(iter(scaling.common(lines, "strong")), told["batch"].mode()[0])
    distance = (told["batch"] - batch).abs()
    nearest = distance.groupby([told[key] for key in scaling.WHERE]).transform("min")
    told = told[distance == nearest]
    told = told.loc[sorted(told.groupby(scaling.WHERE)["speed"].idxmax())].reset_index(drop=True)
    parts = _parts_of_a_step(told)
    shares = 100 * parts.div(parts.sum(axis="columns"), axis="index")
    title = worded(_waiting_finding(told, shares, batch), runs)
    code = style.code(evidence.commits(runs))
    figure = style.group_figure(runs, title, code, 1.6 + 0.2 * len(told))
    left, right = figure.subplots(1, 2, width_ratios=[2, 1])
    where = told["world"].map(", {} GPUs".format) + told["batch"].map(", batch {:,}".format)
    names = [worded(name, runs) for name in told["variant"] + where]
    colors = (style.BLUE, style.ORANGE, style.RED, style.GREY)
    style.stack(left, shares.set_axis(names), dict(zip(parts, colors, strict=True)))
    is_pipeline = told["variant"].isin(PIPELINES)
    columns = {
        "step ms": told["step_ms"],
        "communicates ms": told["waiting_ms"].mask(is_pipeline),
        "bubble ms": told["waiting_ms"].where(is_pipeline),
    }
    style.columns(left, {heading: column.map(number) for heading, column in columns.items()})
    style.legend(left, 1.03)
    left.set_xlabel("% of a step")
    gib = told["peak_mib"] / 1024
    right.barh(told.index, gib.fillna(0.0), color=style.BLUE, height=0.7)
    style.name_bars(right, [""] * len(told))
    style.columns(right, {"GiB": gib.map(number)})
    right.set(xlabel=worded("peak GiB of a GPU", runs), xlim=(0, None))
    return figure


def _parts_of_a_step(told: pd.DataFrame) -> pd.DataFrame:
    """Return the milliseconds of a step that a GPU computes, communicates and waits.

    `told` are lines of `scaling.scaling`. A pipeline's waiting is its bubble, and what it computes
    is all the rest.
    """
    is_pipeline = told["variant"].isin(PIPELINES)
    rest = told["step_ms"] - told["waiting_ms"]
    computing = told["busy_ms"].mask(is_pipeline).fillna(rest)
    parts = {
        "computing": computing,
        "communicating": told["waiting_ms"].mask(is_pipeline),
        "bubble": told["waiting_ms"].where(is_pipeline),
        "idle": (rest - computing).clip(lower=0.0),
    }
    return pd.DataFrame(parts).fillna(0.0)


def _waiting_finding(told: pd.DataFrame, shares: pd.DataFrame, batch: int) -> str:
    """Return which variant computes for most of a step and which for least, on the most GPUs."""
    at_batch = told["batch"] == batch
    world = told.loc[at_batch, "world"].mode()[0]
    computing = shares["computing"].set_axis(told["variant"]) / 100
    computing = computing[(at_batch & told["world"].eq(world)).to_numpy()]
    return (
        f"On {world} GPUs at batch {batch}, {computing.idxmax()} computes for "
        f"{percent(computing.max())} of a step, {computing.idxmin()} for {percent(computing.min())}"
    )


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
