"""Pictures that explain a technique, and show no measurement.

They lie in docs/pictures/, where pages of docs/ show them. `report --pages` draws them anew.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qa_lib.lab.report import style
from qa_lib.lab.report.batch_figures import packed_figure
from qa_lib.lab.report.format import percent
from qa_lib.records.files import writable_folder, write_atomically


def draw(folder: Path) -> None:
    """Draw all of PICTURES into a folder, as <name>.png."""
    writable_folder(folder)
    for name, make in PICTURES.items():
        with style.style():
            write_atomically(folder / f"{name}.png", style.png(make()))


# Packing.

LIMIT = 384  # tokens of a sample at most
PACKED = 2048  # tokens of the packed sequence
# Tokens of samples, made up. Their mean is 170, as that of SQuAD's windows.
LENGTHS = np.array([158, 96, 246, 133, 186, 112, 311, 145, 204, 128, 171, 150])


def fig_packing() -> Figure:
    """Draw samples of made-up lengths, padded and packed, and who attends to whom."""
    begins = np.cumsum(LENGTHS) - LENGTHS
    note = "A colour is a sample, grey is padding. The lengths are made up."
    return packed_figure(LENGTHS, begins, PACKED, LIMIT, note)


# The captured step.

LAUNCH = 1.0  # for which the host is busy with one launch, in the unit of KERNELS
# How long each kernel of a made-up step takes, by part.
KERNELS = {
    "forward": [0.6, 1.2, 0.3, 0.5, 1.1],
    "backward": [0.6, 1.5, 0.4, 0.5, 1.4],
    "optimizer": [0.5, 0.7],
}
KERNEL_COLORS = dict(zip(KERNELS, [style.BLUE, style.GREEN, style.ORANGE], strict=True))


def fig_captured() -> Figure:
    """Draw the host's launches and the GPU's kernels of one step, one by one and captured."""
    durations = np.concatenate(list(KERNELS.values()))
    launched = LAUNCH * np.arange(len(durations))
    one_by_one = _starts(launched + LAUNCH, durations)
    captured = _starts(np.full(len(durations), LAUNCH), durations)
    end = one_by_one[-1] + durations[-1]
    busy = durations.sum() / (end - LAUNCH)
    title = (
        f"In a made-up example, kernels launched one by one keep the GPU busy for {percent(busy)} "
        "of the time; captured, no kernel waits for the host"
    )
    note = (
        "Schematic: a step of BERT-base has hundreds of kernels. White before the last kernel: "
        "the GPU waits for the host."
    )
    figure = style.new_figure(title, note, height=3.4)
    axes = figure.subplots(2, 1, sharex=True)
    _draw_step(axes[0], "launched one by one", launched, one_by_one)
    _draw_step(axes[1], "captured as one CUDA graph", launched[:1], captured)
    axes[0].set_xlim(0, 1.01 * end)
    axes[1].set_xlabel("time")
    for part, color in KERNEL_COLORS.items():
        axes[0].barh(0, 0, color=color, label=part)
    axes[0].barh(0, 0, color=style.GREY, label="a launch")
    style.legend(axes[0], 1.2)
    return figure


def _starts(ready: np.ndarray, durations: np.ndarray) -> np.ndarray:
    """Return when each kernel starts: once it is launched, and once the one before it ends."""
    starts = []
    end = 0.0
    for launched, duration in zip(ready, durations, strict=True):
        starts.append(max(launched, end))
        end = starts[-1] + duration
    return np.array(starts)


def _draw_step(axis: Axes, title: str, launched: np.ndarray, starts: np.ndarray) -> None:
    """Draw a lane of launches above a lane of kernels."""
    edge = {"edgecolor": "white", "linewidth": 1.5}
    axis.broken_barh([(start, LAUNCH) for start in launched], (-0.4, 0.8), color=style.GREY, **edge)
    number = 0
    for part, durations in KERNELS.items():
        spans = list(zip(starts[number:], durations, strict=False))
        axis.broken_barh(spans, (0.6, 0.8), color=KERNEL_COLORS[part], **edge)
        number += len(durations)
    style.name_bars(axis, ["host", "GPU"])
    axis.tick_params(axis="y", labelsize=10)
    axis.set_title(title, loc="left", fontsize=10)
    axis.set_xticks([])
    axis.grid(False)


# Master weights.

WEIGHT = np.float32(0.7)
UPDATE = np.float32(1e-5)
UPDATES = 800  # that are drawn


def bf16(values: np.ndarray) -> np.ndarray:
    """Return fp32 numbers rounded to bf16, the upper 16 bits of fp32, to the nearest."""
    bits = values.view(np.uint32)
    is_odd = (bits >> 16) & 1
    return ((bits + 0x7FFF + is_odd) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def fig_masters() -> Figure:
    """Draw the bits of a weight before and after a small update, and its way over many."""
    title = f"An update of {UPDATE:.5f} is lost on a weight in bf16, and kept by its fp32 master"
    note = (
        "The model computes with the upper 16 bits of a master, rounded; the optimizer keeps the "
        "other 16 beside it. Orange: bits that the update changes."
    )
    figure = style.new_figure(title, note, height=4.6)
    above, below = figure.subplots(2, 1, height_ratios=[1, 2])
    _draw_bits(above)
    _draw_updates(below)
    return figure


def _draw_bits(axis: Axes) -> None:
    """Draw the bits of the master and of the weight, before and after one update."""
    before = np.array([WEIGHT])
    after = before - UPDATE
    rows = [
        ("master", before, 32),
        ("master after it", after, 32),
        ("weight", bf16(before), 16),
        ("weight after it", bf16(bf16(before) - UPDATE), 16),
    ]
    for row, (_, values, width) in enumerate(rows):
        bits = f"{values.view(np.uint32)[0]:032b}"[:width]
        # Odd rows are compared with the row above.
        other = f"{rows[row - row % 2][1].view(np.uint32)[0]:032b}"
        for place, bit in enumerate(bits):
            color = "0.8" if place < 16 else "0.93"  # the bits of bf16, and the others
            if bit != other[place]:
                color = style.ORANGE
            axis.barh(row, 0.92, left=place, height=0.8, color=color)
            axis.text(place + 0.46, row, bit, ha="center", va="center", fontsize=8)
        axis.text(width + 0.3, row, f"{values[0]:.7f}", va="center", fontsize=9)
    style.name_bars(axis, [name for name, _, _ in rows])
    axis.set_xlim(0, 37)
    axis.set_xticks([0.5, 5, 12.5, 24], ["sign", "exponent", "mantissa of bf16", "16 bits more"])
    axis.tick_params(axis="x", labelsize=8, length=0)
    axis.spines[:].set_visible(False)
    axis.grid(False)


def _draw_updates(axis: Axes) -> None:
    """Draw weight and master over equal updates, and the weight that has no master."""
    masters = [WEIGHT]
    alone = [bf16(np.array([WEIGHT]))[0]]
    for _ in range(UPDATES):
        masters.append(masters[-1] - UPDATE)
        alone.append(bf16(np.array([alone[-1] - UPDATE]))[0])
    axis.plot(alone, color=style.RED, label="weight in bf16 alone")
    axis.plot(masters, color="0.4", linestyle="--", label="fp32 master")
    axis.plot(bf16(np.array(masters)), color=style.BLUE, label="weight in bf16, of the master")
    axis.set(xlabel=f"updates of {UPDATE:.5f}", ylabel="value", xlim=(0, UPDATES))
    axis.legend(loc="lower left", fontsize=8)


# The name of a picture's file -> the function that draws it.
PICTURES: dict[str, Callable[[], Figure]] = {
    "packing": fig_packing,
    "captured": fig_captured,
    "masters": fig_masters,
}
