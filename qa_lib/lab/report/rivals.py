"""The rivals that this library is measured against, and the picture of it beside them.

Where a group has runs in turns, they are compared within their blocks (in_turns.py). Else the means
of all runs are.
"""

import contextlib
import operator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qa_lib.lab.report import in_turns, spoken, style
from qa_lib.lab.report.evidence import NotMeasured, commits, share_a_sitting, usual_conditions
from qa_lib.lab.report.format import number
from qa_lib.lab.report.stats import LEVEL
from qa_lib.lab.report.summary import summary
from qa_lib.spec.variants import RECOMMENDED, VARIANTS, tagged

# The bars of runs in turns.
IN_TURNS = (in_turns.TUNED_TRAINER, in_turns.PLAIN, in_turns.STACK_16_BITS, in_turns.STACK)


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
    timed. Rivals share a sitting with the recommended variant.

    Raises NotMeasured where the recommended variant or all rivals are missing.
    """
    lines = usual_conditions(summary(runs[runs["model.name"] == model]))
    lines = lines[lines["samples_per_s"].notna()]
    rivals_at = {}
    for size, part in lines.groupby("micro_batch"):
        part = part.set_index("variant", drop=False)
        if RECOMMENDED not in part.index:
            continue
        together = part[share_a_sitting(part["sittings"], RECOMMENDED)]
        names = quickest(together["samples_per_s"])
        if names:
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


@dataclass(frozen=True)
class Bars:
    """What the picture shows, by variant from the slowest to the library's own, which is last."""

    speeds: pd.Series
    """samples/s"""
    halves: pd.Series
    """Half the interval of each speed; NaN where it is not known."""
    leads: dict[str, float]
    """The factor of the library's own over each of the others."""
    title: str
    note: str


def fig_rivals(runs: pd.DataFrame, model: str) -> Figure:
    """Draw the training speed of the Trainer, of plain PyTorch and of this library on one model.

    `runs` are those of one group. The last bar names its factors over the two strongest rivals.

    Raises NotMeasured where the recommended variant or all rivals are missing.
    """
    of_model = runs[runs["model.name"] == model]
    bars = None
    with contextlib.suppress(NotMeasured):
        bars = _bars_in_turns(of_model)
    if bars is None:
        bars = _bars_of_means(of_model, model)
    figure = style.group_figure(runs, bars.title, bars.note, height=0.62 * len(bars.speeds) + 1.2)
    axis = figure.subplots()
    _draw_bars(axis, bars)
    style.name_bars(axis, [_two_lines(name) for name in bars.speeds.index])
    axis.tick_params(axis="y", labelsize=11)
    gpu = spoken.card(runs["env.gpu"].iloc[0])
    axis.set_xlabel(f"samples/s in training {spoken.model(model)} on one {gpu} (longer is faster)")
    axis.spines[["top", "bottom"]].set_visible(False)
    axis.grid(False)
    axis.set_xticks([])
    return figure


def _bars_in_turns(runs: pd.DataFrame) -> Bars:
    """Return the tuned Trainer, plain PyTorch, and the stack in 16 and in 8 bits.

    Raises NotMeasured where too few blocks have the stack beside plain PyTorch.
    """
    blocks = in_turns.enough_blocks(runs)
    table = in_turns.lead_table(blocks)
    shown = [name for name in IN_TURNS if name in table.index]
    table = table.loc[shown]
    return Bars(
        speeds=table["samples_per_s"],
        halves=table["samples_per_s±"],
        leads=table["lead"].drop(in_turns.STACK).to_dict(),
        title=_title(in_turns.STACK, in_turns.PLAIN, table.loc[in_turns.PLAIN, "lead"]),
        note=_note(
            blocks[blocks["spec.variant"].isin(shown)],
            "Runs in turns; factors are means over their blocks",
        ),
    )


def _bars_of_means(runs: pd.DataFrame, model: str) -> Bars:
    """Return the quickest rivals and the recommended variant, from the means of all runs.

    Raises NotMeasured where the recommended variant or all rivals are missing.
    """
    lines = compared(runs, model)
    is_shown = runs["spec.variant"].isin(lines.index)
    factors = leads(lines)
    strongest = min(factors, key=factors.get)
    return Bars(
        speeds=lines["samples_per_s"],
        halves=lines["samples_per_s±"],
        leads=factors,
        title=_title(RECOMMENDED, strongest, factors[strongest]),
        note=_note(runs[is_shown & runs["micro_batch"].isin(lines["micro_batch"])]),
    )


def _title(variant: str, rival: str, lead: float) -> str:
    """Return how far a variant leads a rival."""
    name = spoken.capital(spoken.VARIANTS[variant])
    return f"{name} trains {number(lead)} times as fast as {spoken.VARIANTS[rival]}"


def _note(runs: pd.DataFrame, *more: str) -> str:
    """Return the conditions of the runs that are shown, and what else is to be said."""
    sentences = [
        f"{runs['micro_batch'].iloc[0]} samples in a forward pass, each of up to "
        f"{runs['length'].iloc[0]:.0f} tokens",
        f"Whiskers are {LEVEL} % intervals",
        *more,
        style.code(commits(runs)),
    ]
    return ". ".join(sentences)


def _draw_bars(axis: Axes, bars: Bars) -> None:
    """Draw a bar with its interval and its speed for each variant."""
    speeds = bars.speeds
    halves = bars.halves.fillna(0.0)
    known = bars.halves.notna().to_numpy()
    rows = np.arange(len(speeds))
    colors = style.kinds(speeds.index.to_series(), baseline="").map(style.KINDS)
    axis.barh(rows, speeds, color=colors, height=0.68)
    whisker = {"fmt": "none", "color": "black", "capsize": 3, "linewidth": 1}
    axis.errorbar(speeds[known], rows[known], xerr=halves[known], **whisker)
    level_with_bar = {"va": "center", "fontsize": 12}
    gap = 0.015 * speeds.max()
    for row, (speed, half) in enumerate(zip(speeds, halves, strict=True)):
        axis.text(speed + half + gap, row, number(speed), **level_with_bar)
    rivals = {name: lead for name, lead in bars.leads.items() if not _is_of_this_library(name)}
    strongest = sorted(rivals.items(), key=operator.itemgetter(1), reverse=True)[-2:]
    said = [f"{number(lead)} × {spoken.VARIANTS[name]}" for name, lead in strongest]
    axis.text(gap, rows[-1], "\n".join(said), color="white", fontweight="bold", **level_with_bar)
    axis.set_xlim(0, 1.12 * speeds.max())


def _is_of_this_library(variant: str) -> bool:
    """Return whether a variant is no rival."""
    return variant not in {*tagged("trainer"), *tagged("plain"), *tagged("default")}


def _two_lines(variant: str) -> str:
    """Return what people say for a variant, and its name below."""
    words = spoken.VARIANTS.get(variant, "")
    return f"{words}\n({variant})" if words else variant
