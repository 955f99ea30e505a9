"""The rivals that this library is measured against, and the picture of it beside them."""

import operator

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qa_lib.lab.report import spoken, style
from qa_lib.lab.report.evidence import NotMeasured, commits, usual_conditions
from qa_lib.lab.report.format import number
from qa_lib.lab.report.stats import LEVEL
from qa_lib.lab.report.summary import summary
from qa_lib.spec.variants import RECOMMENDED, VARIANTS, tagged


def quickest(speeds: pd.Series) -> list[str]:
    """Return the quickest rival of each kind that `speeds`, indexed by variant, has.

    The kinds are the Trainer as it comes, the Trainer with its compiler, and plain PyTorch.
    """
    with_compiler = [
        name for name in tagged("trainer") if VARIANTS[name].settings.compile != "none"
    ]
    found = []
    for kind in (tagged("default"), with_compiler, tagged("plain")):
        of_kind = speeds[speeds.index.isin(kind)].dropna()
        if len(of_kind):
            found.append(of_kind.idxmax())
    return found


def compared(runs: pd.DataFrame, model: str) -> pd.DataFrame:
    """Return the lines of `summary` of the quickest rivals and of the recommended variant, last.

    They are of one model of a group's runs, at the largest micro-batch at which most of them were
    timed.

    Raises NotMeasured where the recommended variant or all rivals are missing.
    """
    lines = usual_conditions(summary(runs[runs["model.name"] == model]))
    lines = lines[lines["samples_per_s"].notna()]
    rivals_at = {}
    for size, part in lines.groupby("micro_batch"):
        part = part.set_index("variant", drop=False)
        names = quickest(part["samples_per_s"])
        if names and RECOMMENDED in part.index:
            rivals_at[size] = part.loc[[*names, RECOMMENDED]]
    if not rivals_at:
        raise NotMeasured(f"{RECOMMENDED} and a rival have not both been timed on {model}")
    return max(rivals_at.values(), key=lambda part: (len(part), part["micro_batch"].iloc[0]))


def leads(lines: pd.DataFrame) -> dict[str, float]:
    """Return the factor of the recommended variant over each rival, by variant.

    `lines` are those of `compared`.
    """
    speeds = lines["samples_per_s"]
    return (speeds[RECOMMENDED] / speeds.drop(RECOMMENDED)).to_dict()


def finding(lines: pd.DataFrame) -> str:
    """Return how far the recommended variant leads its strongest rival.

    `lines` are those of `compared`.
    """
    factors = leads(lines)
    rival = min(factors, key=factors.get)
    name = spoken.capital(spoken.VARIANTS[RECOMMENDED])
    return f"{name} trains {number(factors[rival])} times as fast as {spoken.VARIANTS[rival]}"


def fig_rivals(runs: pd.DataFrame, model: str) -> Figure:
    """Draw the training speed of the Trainer, of plain PyTorch and of this library on one model.

    `runs` are those of one group. The last bar names its factors over the two strongest rivals.

    Raises NotMeasured where the recommended variant or all rivals are missing.
    """
    lines = compared(runs, model)
    is_shown = runs["spec.variant"].isin(lines.index) & runs["model.name"].eq(model)
    shown = runs[is_shown & runs["micro_batch"].isin(lines["micro_batch"])]
    note = (
        f"{lines['micro_batch'].iloc[0]} samples in a forward pass, each of up to "
        f"{lines['length'].iloc[0]:.0f} tokens. Whiskers are {LEVEL} % intervals. "
        f"{style.code(commits(shown))}"
    )
    figure = style.group_figure(runs, finding(lines), note, height=0.62 * len(lines) + 1.2)
    axis = figure.subplots()
    _draw_bars(axis, lines)
    style.name_bars(axis, [_two_lines(name) for name in lines.index])
    axis.tick_params(axis="y", labelsize=11)
    gpu = spoken.card(runs["env.gpu"].iloc[0])
    axis.set_xlabel(f"samples/s in training {spoken.model(model)} on one {gpu} (longer is faster)")
    axis.spines[["top", "bottom"]].set_visible(False)
    axis.grid(False)
    axis.set_xticks([])
    return figure


def _draw_bars(axis: Axes, lines: pd.DataFrame) -> None:
    """Draw a bar with its interval and its speed for each line of `compared`."""
    speeds = lines["samples_per_s"]
    halves = lines["samples_per_s±"].fillna(0.0)
    rows = range(len(lines))
    colors = style.kinds(lines["variant"], baseline="").map(style.KINDS)
    axis.barh(rows, speeds, color=colors, height=0.68)
    axis.errorbar(speeds, rows, xerr=halves, fmt="none", color="black", capsize=3, linewidth=1)
    level_with_bar = {"va": "center", "fontsize": 12}
    gap = 0.015 * speeds.max()
    for row, (speed, half) in enumerate(zip(speeds, halves, strict=True)):
        axis.text(speed + half + gap, row, number(speed), **level_with_bar)
    strongest = sorted(leads(lines).items(), key=operator.itemgetter(1), reverse=True)[-2:]
    said = [f"{number(lead)} × {spoken.VARIANTS[name]}" for name, lead in strongest]
    axis.text(gap, rows[-1], "\n".join(said), color="white", fontweight="bold", **level_with_bar)
    axis.set_xlim(0, 1.12 * speeds.max())


def _two_lines(variant: str) -> str:
    """Return what people say for a variant, and its name below."""
    words = spoken.VARIANTS.get(variant, "")
    return f"{words}\n({variant})" if words else variant
