"""What all figures share: size, colours, style, and their way into files and notebooks."""

import io
import textwrap
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter

import matplotlib.style
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from qa_lib.report.runs import NotMeasured

WIDTH = 9.0  # inches: 900 px at 100 dpi, the width of a README
DPI = 150  # of files; a notebook shows 100
COLORBLIND = sns.color_palette("colorblind")  # safe for the common colour-vision deficiencies
BLUE, ORANGE, GREEN, RED, *_ = COLORBLIND
GREY = "0.6"


def style():
    """The context in which all figures are made and saved; a user's own matplotlibrc has no say in it."""
    theme = sns.axes_style("whitegrid") | {"font.family": "DejaVu Sans", "axes.spines.right": False}
    return matplotlib.style.context(["default", theme | {"font.size": 10, "axes.labelsize": 10}])


def wrap(text: str, width: int) -> str:
    """Lines of at most so many letters; a number stays with its percent sign, and a word with its hyphen."""
    return textwrap.fill(text.replace(" %", "\u00a0%"), width, break_on_hyphens=False)


def new_figure(title: str, note: str, height: float) -> Figure:
    """An empty figure with a title and, below it, a caption; `height` in inches."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(wrap(title, 84), x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.supxlabel(wrap(note, 148), x=0.01, ha="left", fontsize=8, color="0.35")
    return figure


def legend(axis: Axes, height: float = 1.0) -> None:
    """The legend in one line above the axis, where nothing is drawn."""
    axis.legend(loc="lower left", bbox_to_anchor=(-0.01, height), ncols=9, fontsize=8, frameon=False,
                columnspacing=1.2, handletextpad=0.5)  # fmt: skip


def name_rows(axis: Axes, names: Sequence[str]) -> None:
    """The axis as rows 0, 1, ... from the top down, with these names."""
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.grid(False, axis="y")


def columns(axis: Axes, table: dict[str, Iterable[str]]) -> None:
    """The columns of a table right of the axis, {head: texts}, each text level with one of the rows 0, 1, ..."""
    right = 0.0  # where a column ends, in points from the axis
    for head, texts in table.items():
        column = list(texts)
        right += 5.2 * max(map(len, (head, *column))) + 12
        place = {"textcoords": "offset points", "ha": "right", "fontsize": 8}
        axis.annotate(head, (1, 1), (right, 4), xycoords="axes fraction", color="0.35", **place)
        for height, text in enumerate(column):
            axis.annotate(text, (1, height), (right, 0), xycoords=axis.get_yaxis_transform(), va="center", **place)


def name_points(axis: Axes, points: Iterable[tuple[float, float, str]]) -> None:
    """The texts of some (x, y, text) in a column right of the axis, in the order of their heights and apart from each
    other, with a line from each to its point."""
    points = sorted(points, key=itemgetter(1))
    low, high = axis.get_ylim()
    steps = 0.07 * (high - low) * np.arange(len(points))
    heights = np.maximum.accumulate([y for _, y, _ in points] - steps) + steps  # each at its point's or further up
    heights = np.minimum(heights, high - steps[::-1])
    line = {"arrowstyle": "-", "color": "0.5", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4}
    for (x, y, text), height in zip(points, heights, strict=True):
        axis.annotate(text, (x, y), (1.02, height), textcoords=axis.get_yaxis_transform(), fontsize=8, va="center",
                      arrowprops=line | {"relpos": (0, 0.5)})  # fmt: skip


def stack(axis: Axes, table: pd.DataFrame, colors: dict[str, str]) -> None:
    """A bar for each row of a table, made of a block for each column."""
    table.plot.barh(stacked=True, ax=axis, color=colors, width=0.7, legend=False, ylabel="")
    axis.set_xlim(0, 1.02 * table.sum(axis="columns").max())
    name_rows(axis, table.index)


def png(figure: Figure, dpi: int = DPI) -> bytes:
    """A figure as PNG without date and software version, so that equal figures are equal bytes.

    In 64 colours, which nobody sees in these figures and which makes files and executed notebooks a third as large.
    """
    drawn, stream = io.BytesIO(), io.BytesIO()
    with style():
        figure.savefig(drawn, format="png", dpi=dpi)
    image = Image.open(drawn).convert("RGB").quantize(64, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    image.save(stream, "png", optimize=True, dpi=(dpi, dpi))
    return stream.getvalue()


def show(figure_of: Callable[[pd.DataFrame], Figure], runs: pd.DataFrame):
    """For a notebook: the figure as an image, or the sentence that says why there is none."""
    from IPython import display  # notebooks have it; the command line need not

    try:
        figure = figure_of(runs)
        return display.Image(png(figure, 100), width=round(100 * WIDTH), alt=" ".join(figure.get_suptitle().split()))
    except NotMeasured as reason:
        return display.Markdown(f"*No figure: {reason}.*")
