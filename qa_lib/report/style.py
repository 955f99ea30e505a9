"""What all figures share: size, colours, style, and their way into files and notebooks."""

import io
import textwrap
from collections import defaultdict
from collections.abc import Callable

import matplotlib.style
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
GREY = "0.6"
# A family that is not here, of a record by another version, is a grey cross.
COLORS = defaultdict(
    lambda: GREY, {family: COLORBLIND[index] for family, index in zip("ABCDE", (0, 1, 2, 4, 3), strict=True)}
)
MARKERS = defaultdict(lambda: "X", zip("ABCDE", "os^DP", strict=True))


def style():
    """The context in which all figures are made and saved; a user's own matplotlibrc has no say in it."""
    theme = sns.axes_style("whitegrid") | {"font.family": "DejaVu Sans", "axes.spines.right": False}
    return matplotlib.style.context(["default", theme | {"font.size": 10, "axes.labelsize": 10}])


def wrap(text: str, width: int) -> str:
    """Lines of at most so many letters; a number stays with its percent sign."""
    return "\n".join(textwrap.fill(line.replace(" %", "\u00a0%"), width) for line in text.split("\n"))


def new_figure(title: str, note: str, height: float) -> Figure:
    """An empty figure with a title and, below it, a caption; `height` in inches."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(wrap(title, 90), x=0.01, ha="left", fontsize=12, fontweight="bold")
    if note:
        figure.supxlabel(wrap(note, 148), x=0.01, ha="left", fontsize=8, color="0.35")
    return figure


def bars(axis: Axes, rows: pd.DataFrame, x: str, y: str, **look) -> None:
    """Horizontal bars of a table's values, without lines between them."""
    sns.barplot(rows, x=x, y=y, saturation=1, errorbar=None, ax=axis, **look)
    axis.grid(False, axis="y")


def png(figure: Figure, dpi: int = DPI) -> bytes:
    """A figure as PNG without date and software version, so that equal figures are equal bytes.

    In 64 colours, which nobody sees in these figures and which makes files and executed notebooks a third as large.
    """
    drawn, stream = io.BytesIO(), io.BytesIO()
    with style():
        figure.savefig(drawn, format="png", dpi=dpi)
    image = Image.open(drawn).convert("RGB").quantize(64, dither=Image.Dither.NONE)
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
