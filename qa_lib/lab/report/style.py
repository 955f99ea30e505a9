"""What all figures share: size, colours, frame, parts, and their way into files and notebooks."""

import contextlib
import hashlib
import io
import itertools
import json
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import matplotlib.style
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from qa_lib.errors import first_line
from qa_lib.lab.report import spoken
from qa_lib.lab.report.evidence import ReportError, groups_of, on_cpu
from qa_lib.lab.report.tables import markdown
from qa_lib.records.files import RecordError, writable_folder, write_atomically
from qa_lib.records.record import DEFAULT_PRESET, DEFAULT_SETTINGS
from qa_lib.spec.variants import VARIANTS

WIDTH = 9.0  # inches of a figure: 900 px at 100 dpi, the width of a README
DPI = 150  # of files
NOTEBOOK_DPI = 100

COLORBLIND = sns.color_palette("colorblind")  # safe for the common colour-vision deficiencies
BLUE, ORANGE, GREEN, RED, *_ = COLORBLIND
GREY = "0.6"
# The kinds of variants -> their colours. A variant has that of its kind in every figure; what tells
# variants of one kind apart are names and markers (see `looks`).
KINDS = {
    "baseline": GREEN,
    "this library": BLUE,
    "the Trainer": GREY,
    "plain PyTorch": ORANGE,
}
# Engines of variants -> the kind of a variant that is not the baseline.
ENGINES = {
    "loop": "this library",
    "trainer": "the Trainer",
    "trainer-tuned": "the Trainer",
    "plain": "plain PyTorch",
    "searched": "plain PyTorch",
}

MARKERS = "osD^vP<X>*"  # of curves of one kind, in turn
STROKES = ("-", "--", ":", "-.")  # of dense lines of one kind, in turn

THOUSANDS = "{x:,g}"  # the format of numbers on axes, as tables have them
CPU_CAVEAT = "CPU speeds prove the plumbing only and say nothing about GPUs"

# What a figure or table raises that is made of a record with missing or impossible values.
SPOILT = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


# The frame of a figure.


def style() -> contextlib.AbstractContextManager:
    """Return the context in which all figures are made and saved.

    It begins with matplotlib's defaults, so that a user's own matplotlibrc changes nothing.
    """
    theme = sns.axes_style("whitegrid") | {
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "axes.labelsize": 10,
        "axes.spines.right": False,
    }
    return matplotlib.style.context(["default", theme])


def kinds(variants: pd.Series, baseline: str) -> pd.Series:
    """Return which of KINDS each variant is.

    One that the variants table has no longer was of this library.
    """
    by_engine = {name: ENGINES[variant.settings.engine] for name, variant in VARIANTS.items()}
    return variants.map(by_engine | {baseline: "baseline"}).fillna("this library")


def looks(variants: Iterable[str], baseline: str, told: Collection[str]) -> dict[str, dict]:
    """Return how the curve of each variant is drawn, as keywords of matplotlib's `plot`.

    The colour is that of its kind, and the marker another for each variant of a kind. Curves that
    the title speaks of, `told`, are bolder than the others, and lie above them.
    """
    names = pd.Series(list(dict.fromkeys(variants)))
    turns = {kind: itertools.cycle(MARKERS) for kind in KINDS}
    drawn = {}
    for name, kind in zip(names, kinds(names, baseline), strict=True):
        is_told = name in told
        drawn[name] = {
            "color": KINDS[kind],
            "marker": next(turns[kind]),
            "markersize": 5 if is_told else 3.5,
            "linewidth": 2.0 if is_told else 1.0,
            "alpha": 1.0 if is_told else 0.6,
            "zorder": 3 if is_told else 2,
        }
    return drawn


def strokes(variants: Iterable[str], baseline: str) -> dict[str, dict]:
    """Return how a line of very many points is drawn for each variant, as keywords of `plot`.

    The colour is that of its kind, and the stroke another for each variant of a kind.
    """
    names = pd.Series(list(dict.fromkeys(variants)))
    turns = {kind: itertools.cycle(STROKES) for kind in KINDS}
    return {
        name: {"color": KINDS[kind], "linestyle": next(turns[kind]), "linewidth": 1.2}
        for name, kind in zip(names, kinds(names, baseline), strict=True)
    }


def wrap(text: str, width: int) -> str:
    """Return a text in lines of at most `width` letters.

    A number stays with its percent sign, and a word with its hyphen.
    """
    return textwrap.fill(text.replace(" %", "\u00a0%"), width, break_on_hyphens=False)


def new_figure(title: str, note: str, height: float) -> Figure:
    """Return an empty figure with a title and, below it, a caption; `height` in inches."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    # A record's words may have dollars, between which matplotlib would look for formulas.
    plain = {"x": 0.01, "ha": "left", "parse_math": False}
    figure.suptitle(wrap(title, 84), fontsize=12, fontweight="bold", **plain)
    figure.supxlabel(wrap(note, 145), fontsize=8, color="0.35", **plain)
    return figure


def group_figure(runs: pd.DataFrame, title: str, note: str, height: float) -> Figure:
    """Return what `new_figure` does for a group's runs, which may have others' after them.

    The caption ends with the groups and their GPUs. Figures of a CPU say so in title and caption.
    """
    gpus = sorted(set(runs["env.gpu"].dropna()))
    sentences = [note, spoken.capital(groups_of(runs)), *(gpus or [CPU_CAVEAT])]
    caption = ". ".join(sentence for sentence in sentences if sentence) + "."
    if on_cpu(runs):
        title = f"On a CPU: {title}"
    return new_figure(title, caption, height)


def code(versions: str) -> str:
    """Return for a caption the versions of the code that `evidence.commits` returned.

    If there are more than two, it says how many: 'Code of 4 commits'.
    """
    names = versions.split(", ")
    if len(names) > 2:
        return f"Code of {len(names)} commits"
    return f"Code {versions}"


def title_of(figure: Figure) -> str:
    """Return the title of a figure in one line."""
    return " ".join(figure.get_suptitle().split())


# Parts of a figure.


def legend(axis: Axes, height: float = 1.0) -> None:
    """Draw the legend in one line above the axis, where nothing is drawn.

    It stands above the headings of `columns` too, which are drawn before it.
    """
    has_columns = bool(axis.texts)
    axis.legend(
        loc="lower left",
        bbox_to_anchor=(-0.01, height),
        ncols=9,
        fontsize=8,
        frameon=False,
        columnspacing=1.2,
        handletextpad=0.5,
        borderaxespad=1.8 if has_columns else 0.5,
    )


def legend_of_kinds(
    axis: Axes, variants: Iterable[str], baseline: str, height: float = 1.0
) -> None:
    """Draw a legend of the colours of those KINDS that some variants are of (see `legend`)."""
    shown = set(kinds(pd.Series(list(variants)), baseline))
    for kind, color in KINDS.items():
        if kind in shown:
            axis.plot([], [], "o", color=color, label=kind)
    legend(axis, height)


def name_bars(axis: Axes, names: Sequence[str]) -> None:
    """Name bars 0, 1, ... of a horizontal bar chart, which count from the top down."""
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.grid(False, axis="y")


def columns(axis: Axes, table: dict[str, Iterable[str]]) -> None:
    """Write the columns of a table {heading: texts} right of the axis.

    Each text is level with one of the bars 0, 1, ...
    """
    style_of_text = {"textcoords": "offset points", "ha": "right", "fontsize": 8}
    level_with_bar = axis.get_yaxis_transform()
    right = 0.0  # where a column ends, in points from the axis
    for heading, texts in table.items():
        column = list(texts)
        letters = max(map(len, [heading, *column]))
        right += 5.2 * letters + 12
        axis.annotate(
            heading, (1, 1), (right, 4), xycoords="axes fraction", color="0.35", **style_of_text
        )
        for bar, text in enumerate(column):
            axis.annotate(
                text, (1, bar), (right, 0), xycoords=level_with_bar, va="center", **style_of_text
            )


def stack(axis: Axes, table: pd.DataFrame, colors: dict[str, str]) -> None:
    """Draw a bar for each line of a table, made of a block for each column."""
    table.plot.barh(stacked=True, ax=axis, color=colors, width=0.7, legend=False, ylabel="")
    axis.set_xlim(0, 1.02 * table.sum(axis="columns").max())
    name_bars(axis, table.index)


# Figures in files and notebooks.


def figures_of(folder: Path) -> list[tuple[str, bytes]]:
    """Return title and PNG of each figure that was drawn into a folder.

    Links, and files that cannot be read as PNG, are left out.
    """
    figures = []
    for path in sorted(folder.glob("*.png")):
        if path.is_symlink() or not path.is_file():
            continue
        # what Pillow raises for a file that is no PNG
        with contextlib.suppress(OSError, SyntaxError, ValueError):
            with Image.open(path, formats=["PNG"]) as image:
                title = image.text.get("Title", path.stem)
            figures.append((title, path.read_bytes()))
    return figures


# Fields of presets and settings that came after figures had been drawn, with their defaults. These
# are what was so before, so that such a field counts in a digest only where it differs.
LATER = {
    "preset": {"max_answer_length": DEFAULT_PRESET["max_answer_length"]},
    "settings": {
        name: DEFAULT_SETTINGS[name]
        for name in ("loss_padding", "attention_projections", "weight_gradients")
    },
}


def digest(runs: pd.DataFrame) -> str:
    """Return what a figure of these runs was drawn from, 16 hex digits that are equal for equal
    records."""
    # The records and not the DataFrame, whose types depend on what else was loaded.
    records = [_as_drawn(run.record) for run in runs["run"]]
    return hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()[:16]


def _as_drawn(record: dict) -> dict:
    """Return a record without those fields LATER of its spec that have their defaults."""
    parts = {}
    for part, later in LATER.items():
        fields = record["spec"][part].items()
        parts[part] = {name: value for name, value in fields if (name, value) not in later.items()}
    return record | {"spec": record["spec"] | parts}


def png(figure: Figure, dpi: int = DPI, **texts: str) -> bytes:
    """Return a figure as PNG with its title, and these texts, in the file.

    Without date and software version, so that equal figures are equal bytes. In 256 colours, which
    no eye tells from the drawn ones, it is a third as large.
    """
    for axis in figure.axes:
        _write_thousands(axis.xaxis)
        _write_thousands(axis.yaxis)
    info = PngInfo()
    for key, text in {"Title": title_of(figure), **texts}.items():
        info.add_text(key, text)
    drawn = io.BytesIO()
    with style():
        figure.savefig(drawn, format="png", dpi=dpi)
    reduced = Image.open(drawn).convert("RGB").quantize(256)
    stream = io.BytesIO()
    reduced.save(stream, "PNG", pnginfo=info, optimize=True)
    return stream.getvalue()


def _write_thousands(axis: Axis) -> None:
    """Write the numbers of an axis that reaches 1,000 with commas, where no format was set."""
    is_default = isinstance(axis.get_major_formatter(), ScalarFormatter)
    if is_default and max(axis.get_view_interval()) >= 1000:
        axis.set_major_formatter(THOUSANDS)


def show(make: Callable, *sources, save: str | Path = "", name: str = ""):
    """Return for a notebook what make(*sources) returns: a figure, a table of text, or Markdown.

    Where it raises one of SPOILT, as ReportErrors are too, return the sentence that says why there
    is nothing to show.

    With a folder `save`, a figure is kept as <save>/<group>/<name>.png. The first of the sources is
    then a DataFrame of that group's runs, and perhaps of others' after them, and the file has the
    digest of all of them. Without `name` the file is named as the function, less `fig_`.
    """
    from IPython import display  # notebooks have it; the command line need not

    try:
        with style():
            made = make(*sources)
        if isinstance(made, pd.DataFrame):
            return display.Markdown(markdown(made))
        if isinstance(made, str):
            return display.Markdown(made)
        kept = {}
        if _are_runs(sources):
            kept["group"] = ", ".join(sources[0]["group"].unique())
        if save:
            runs = sources[0]
            name = name or make.__name__.removeprefix("fig_")
            path = Path(save, runs["group"].iloc[0], f"{name}.png")
            writable_folder(path.parent)
            texts = {"Records": digest(runs)}
            if runs["group"].nunique() > 1:
                texts["Groups"] = kept["group"]
            write_atomically(path, png(made, **texts))
            kept["file"] = path.as_posix()
        return display.Image(
            png(made, NOTEBOOK_DPI),
            width=round(NOTEBOOK_DPI * WIDTH),
            alt=title_of(made),
            metadata=kept,
        )
    except SPOILT as problem:
        return display.Markdown(f"*Not shown: {reason(problem)}.*")


def _are_runs(sources: Sequence) -> bool:
    """Return whether the first of a figure's sources are the runs of a group."""
    first = sources[0] if sources else None
    return isinstance(first, pd.DataFrame) and "group" in first and len(first) > 0


def reason(problem: Exception) -> str:
    """Return why there is nothing to show, in few words."""
    if isinstance(problem, ReportError | RecordError):
        return first_line(problem)
    return f"{type(problem).__name__}, {first_line(problem)}"
