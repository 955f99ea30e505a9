"""What all figures share: size, colours, style, and their way into files and notebooks."""

import contextlib
import hashlib
import io
import json
import textwrap
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from pathlib import Path

import matplotlib.style
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from qa_lib.errors import first_line
from qa_lib.lab.report.evidence import ReportError, on_cpu
from qa_lib.lab.report.tables import markdown
from qa_lib.records.record import DEFAULTS, RecordError, writable_folder, write_atomically
from qa_lib.spec.variants import VARIANTS

WIDTH = 9.0  # inches: 900 px at 100 dpi, the width of a README
DPI = 150  # of files; a notebook shows 100
COLORBLIND = sns.color_palette("colorblind")  # safe for the common colour-vision deficiencies
BLUE, ORANGE, GREEN, RED, *_ = COLORBLIND
GREY = "0.6"
KINDS = {
    "baseline": GREEN,
    "this library": BLUE,
    "the Trainer": GREY,
    "plain PyTorch": ORANGE,
}  # of variants
ENGINES = {
    "loop": "this library",
    "trainer": "the Trainer",
    "plain": "plain PyTorch",
}  # without the baseline
THOUSANDS = "{x:,g}"  # numbers on axes, as tables have them
SPOILT = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)  # of a spoilt record
CPU_CAVEAT = "CPU speeds prove the plumbing only and say nothing about GPUs"


def style():
    """The context in which all figures are made and saved; a user's own matplotlibrc has no say in it."""
    theme = sns.axes_style("whitegrid") | {"font.family": "DejaVu Sans", "axes.spines.right": False}
    return matplotlib.style.context(["default", theme | {"font.size": 10, "axes.labelsize": 10}])


def kinds(variants: pd.Series, baseline: str) -> pd.Series:
    """Which of KINDS each variant is."""
    by_engine = {name: ENGINES[variant.settings.engine] for name, variant in VARIANTS.items()}
    return variants.map(by_engine | {baseline: "baseline"})


def wrap(text: str, width: int) -> str:
    """Lines of at most so many letters; a number stays with its percent sign, and a word with its hyphen."""
    return textwrap.fill(text.replace(" %", "\u00a0%"), width, break_on_hyphens=False)


def new_figure(title: str, note: str, height: float) -> Figure:
    """An empty figure with a title and, below it, a caption; `height` in inches."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    # A record's words may have dollars, between which matplotlib would look for formulas.
    plain = {"x": 0.01, "ha": "left", "parse_math": False}
    figure.suptitle(wrap(title, 84), fontsize=12, fontweight="bold", **plain)
    figure.supxlabel(wrap(note, 148), fontsize=8, color="0.35", **plain)
    return figure


def group_figure(runs: pd.DataFrame, title: str, note: str, height: float) -> Figure:
    """As new_figure, of a group's runs: a CPU's say so, and the caption ends with group and GPU."""
    where = [
        f"Group {runs['group'].iloc[0]}",
        *(sorted(set(runs["env.gpu"].dropna())) or [CPU_CAVEAT]),
    ]
    return new_figure(
        "On a CPU: " * on_cpu(runs) + title, ". ".join(filter(None, [note, *where])) + ".", height
    )


def code(versions: str) -> str:
    """For a caption: the versions of the code that evidence.commits names, or two of them and how many more there are."""
    named = versions.split(", ")
    return "Code " + ", ".join([*named[:2], *[f"and {len(named) - 2} more"] * (len(named) > 2)])


def legend(axis: Axes, height: float = 1.0) -> None:
    """The legend in one line above the axis, where nothing is drawn; above the heads of `columns` as well."""
    axis.legend(loc="lower left", bbox_to_anchor=(-0.01, height), ncols=9, fontsize=8, frameon=False,
                columnspacing=1.2, handletextpad=0.5, borderaxespad=1.8 if axis.texts else 0.5)  # fmt: skip


def name_bars(axis: Axes, names: Sequence[str]) -> None:
    """The axis as bars 0, 1, ... from the top down, with these names."""
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.grid(False, axis="y")


def columns(axis: Axes, table: dict[str, Iterable[str]]) -> None:
    """The columns of a table right of the axis, {head: texts}, each text level with one of the bars 0, 1, ..."""
    right = 0.0  # where a column ends, in points from the axis
    for head, texts in table.items():
        column = list(texts)
        right += 5.2 * max(map(len, (head, *column))) + 12
        place = {"textcoords": "offset points", "ha": "right", "fontsize": 8}
        axis.annotate(head, (1, 1), (right, 4), xycoords="axes fraction", color="0.35", **place)
        for height, text in enumerate(column):
            axis.annotate(
                text,
                (1, height),
                (right, 0),
                xycoords=axis.get_yaxis_transform(),
                va="center",
                **place,
            )


def name_points(axis: Axes, points: Iterable[tuple[float, float, str]]) -> None:
    """The texts of some (x, y, text) in a column right of the axis, in the order of their heights and apart from each
    other, with a line from each to its point."""
    points = sorted(points, key=itemgetter(1))
    heights = _apart(axis, [axis.transData.transform((x, y))[1] for x, y, _ in points])
    line = {"arrowstyle": "-", "color": "0.5", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4}
    for (x, y, text), height in zip(points, heights, strict=True):
        axis.annotate(text, (x, y), (1.02, height), textcoords="axes fraction", fontsize=8, va="center",
                      arrowprops=line | {"relpos": (0, 0.5)})  # fmt: skip


def _apart(axis: Axes, heights: Sequence[float], least: float = 0.07) -> np.ndarray:
    """Rising heights in pixels as shares of the axis, moved so that they are apart by a share."""
    low, high = (axis.transAxes.transform((0, share))[1] for share in (0, 1))
    steps = least * np.arange(len(heights))
    moved = np.maximum.accumulate((np.array(heights) - low) / (high - low) - steps) + steps
    return np.minimum(moved, 1 - steps[::-1])  # each at its point's or further up, and inside


def stack(axis: Axes, table: pd.DataFrame, colors: dict[str, str]) -> None:
    """A bar for each line of a table, made of a block for each column."""
    table.plot.barh(stacked=True, ax=axis, color=colors, width=0.7, legend=False, ylabel="")
    axis.set_xlim(0, 1.02 * table.sum(axis="columns").max())
    name_bars(axis, table.index)


def title_of(figure: Figure) -> str:
    return " ".join(figure.get_suptitle().split())


def figures_of(folder: Path) -> list[tuple[str, bytes]]:
    """Title and PNG of each figure that was drawn into a folder; without links, and what cannot be read as one."""
    found = []
    for path in sorted(folder.glob("*.png")):
        with contextlib.suppress(
            OSError, SyntaxError, ValueError
        ):  # as Pillow calls what is no PNG
            if path.is_file() and not path.is_symlink():
                with Image.open(path, formats=["PNG"]) as image:
                    found.append((image.text.get("Title", path.stem), path.read_bytes()))
    return found


# Fields of a preset that came after figures were drawn: they count where they are not their default, which is what was
# so before.
LATER = ("max_answer_length",)


def digest(runs: pd.DataFrame) -> str:
    """What a figure of these runs was drawn from: the same for the same records."""
    records = [
        _as_drawn(run.record) for run in runs["run"]
    ]  # and not the frame, whose types depend on what else was loaded
    return hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()[:16]


def _as_drawn(record: dict) -> dict:
    """A record without the LATER fields of its preset that are their defaults."""
    preset, usual = record["spec"]["preset"], DEFAULTS["preset"]
    kept = {
        name: value for name, value in preset.items() if name not in LATER or value != usual[name]
    }
    return record | {"spec": record["spec"] | {"preset": kept}}


def png(figure: Figure, dpi: int = DPI, **more: str) -> bytes:
    """A figure as PNG with its title, and `more`, in the file; without date and software version, so that equal figures
    are equal bytes. 256 colours, which no eye tells from the drawn ones, make it a third as large."""
    for side in (side for axis in figure.axes for side in (axis.xaxis, axis.yaxis)):
        if (
            isinstance(side.get_major_formatter(), ScalarFormatter)
            and max(side.get_view_interval()) >= 1000
        ):
            side.set_major_formatter(THOUSANDS)
    drawn, stream, info = io.BytesIO(), io.BytesIO(), PngInfo()
    for key, text in {"Title": title_of(figure), **more}.items():
        info.add_text(key, text)
    with style():
        figure.savefig(drawn, format="png", dpi=dpi)
    Image.open(drawn).convert("RGB").quantize(256).save(stream, "PNG", pnginfo=info, optimize=True)
    return stream.getvalue()


def show(made_of: Callable, *sources, save: str | Path = "", name: str = ""):
    """For a notebook: made_of(*sources), a figure, a table of text or Markdown, or the sentence that says why there is
    none.

    With `save`, a folder, a figure is kept as <save>/<group>/<name>.png, by default by the name of the function without
    `fig_`; the first of the sources are then the runs of that group.
    """
    from IPython import display  # notebooks have it; the command line need not

    try:
        with style():
            made = made_of(*sources)
        if not isinstance(made, Figure):
            return display.Markdown(made if isinstance(made, str) else markdown(made))
        kept = {}
        if save:
            runs = sources[0]
            path = Path(
                save, runs["group"].iloc[0], f"{name or made_of.__name__.removeprefix('fig_')}.png"
            )
            writable_folder(path.parent)
            write_atomically(path, png(made, Records=digest(runs)))
            kept = {"file": path.as_posix()}
        return display.Image(
            png(made, 100), width=round(100 * WIDTH), alt=title_of(made), metadata=kept
        )
    except SPOILT as problem:
        return display.Markdown(f"*Not shown: {reason(problem)}.*")


def reason(problem: Exception) -> str:
    """Why there is nothing to show, in few words."""
    known = isinstance(problem, ReportError | RecordError)
    return first_line(problem) if known else f"{type(problem).__name__}, {first_line(problem)}"
