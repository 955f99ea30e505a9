"""Scaling profiles: memory and speed against context length and batch, a line a row of the variants table.

Memory is a fixed cost (weights, gradients, optimizer state) and a cost for each token of a micro-batch, which the
backward pass keeps. Both are fitted here to what was measured; the budget of run/memory_estimate.py, drawn dashed,
predicts them from the model's shapes. A size that ran out of memory is a cross at the top."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from qa_lib.report.runs import BATCH_TOKENS, NotMeasured, ReportError, commits, not_measured, on_cpu, select
from qa_lib.report.sentences import CPU_CAVEAT
from qa_lib.report.style import COLORBLIND, new_figure, show, style
from qa_lib.report.tables import place
from qa_lib.report.text import number, say
from qa_lib.variants import VARIANTS, find_variant

# Of `points`.
COLUMNS = ["variant", "length", "batch", "micro_batch", "gib", "speed", "states", "tokens", "predicted", "oom", "code"]
SIZES = {
    "length": "tokens of a feature or window",
    "batch": "features in an optimizer step",
    "micro_batch": "features in one forward pass (micro-batch)",
}
MEASURES = {  # column of `points` -> value of a record, its name in figures
    "gib": ("memory.peak_alloc_mib", "peak GPU memory, allocated, in GiB"),
    "speed": ("speed.samples_per_s", "features/s in training"),
}
STATES = ["memory.params_mib", "memory.grads_mib", "memory.optimizer_mib"]
NONE = "the group has no runs of these rows"
STRAIGHT = 0.05  # a fit that misses no point by more is a straight line


def points(runs: pd.DataFrame, rows: Sequence[str] = (), predicted: pd.Series | None = None) -> pd.DataFrame:
    """The points of a group's runs, means over seeds, in table order; of these rows of the variants table, or all.

    Columns: variant; length, batch (0 where a step is one micro-batch, or so many tokens) and micro_batch; gib, speed,
    states (GiB of weights, gradients and optimizer), tokens (computed in a micro-batch), predicted (GiB, where
    run.memory_estimate.predicted is given), oom, whether every seed ran out of memory, and code (commits). Raises
    NotMeasured where there is none."""
    by_tokens = runs.reindex(columns=[BATCH_TOKENS])[BATCH_TOKENS].notna()
    runs = runs.assign(batch=runs["batch"].mask(by_tokens | (runs["batch"] == runs["micro_batch"]), 0))
    runs = runs.assign(predicted=math.nan if predicted is None else predicted)
    runs = runs[runs["status"].isin(["ok", "oom"]) & (runs["spec.variant"].isin(rows) | (len(rows) == 0))]
    if runs.empty:
        raise NotMeasured(f"no run of {', '.join(rows) or 'this group'} has ended ok or out of memory")
    values = runs.reindex(
        columns=[*(column for column, _ in MEASURES.values()), "speed.tokens_per_s_padded", "predicted"]
    )
    found = values.astype(float).set_axis([*MEASURES, "tokens", "predicted"], axis=1)
    # A row that pads to the longest of a batch peaks at one of full length; a packed one has as many as it computes.
    packed = found["tokens"] / found["speed"] * runs["micro_batch"]
    found["tokens"] = packed.where(runs["spec.settings.padding"] == "packed", runs["micro_batch"] * runs["length"])
    found["states"] = runs.reindex(columns=STATES).astype(float).sum(axis="columns", skipna=False)
    found[["gib", "predicted", "states"]] /= 1024
    found["oom"] = (runs["status"] == "oom").astype(float)
    alike = [runs["spec.variant"].rename("variant"), *(runs[size] for size in SIZES)]
    found = found.groupby(alike).mean().assign(code=runs.groupby(alike).apply(commits))
    found["oom"] = found["oom"] == 1
    found = found.reset_index()
    return found.sort_values("variant", key=lambda names: names.map(place), kind="stable").reset_index(drop=True)


def along(table: pd.DataFrame, size: str) -> tuple[str, pd.DataFrame]:
    """Of `points` those that a curve over one of SIZES shows, with the others at the values that have most of them, and
    those values in words. Raises NotMeasured where the size does not vary."""
    if table.empty:
        raise NotMeasured(NONE)
    others = [name for name in SIZES if name != size]
    values, part = max(table.groupby(others), key=lambda group: (group[1][size].nunique(), len(group[1]), group[0]))
    if part[size].nunique() < 2:
        raise NotMeasured(f"no two runs differ in {size.replace('_', '-')} alone")
    given = zip(others, values, strict=True)
    return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in given if value), part


def fit(part: pd.DataFrame) -> tuple[float, float, float]:
    """Fixed GiB, KiB a token and the largest relative miss of the straight line through a row's peaks over its tokens,
    by least squares of relative misses; NaN where fewer than three points tell."""
    part = part.dropna(subset=["gib", "tokens"])
    if part["tokens"].nunique() < 3:
        return math.nan, math.nan, math.nan
    lines = np.column_stack([np.ones(len(part)), part["tokens"]])
    weights = 1 / part["gib"].to_numpy()
    (fixed, each), *_ = np.linalg.lstsq(lines * weights[:, None], np.ones(len(part)), rcond=None)
    miss = np.abs(lines @ (fixed, each) * weights - 1).max()
    return float(fixed), float(each * 2**20), float(miss)


def _fitted(part: pd.DataFrame) -> str:
    fixed, each, miss = fit(part)
    return "" if math.isnan(miss) or miss > STRAIGHT else f": {number(fixed)} GiB + {number(each)} KiB a token"


@dataclass(frozen=True)
class Profile:
    """A group's runs and their points, for a notebook; or why there are none. `absent` are rows that were asked for and
    did not run."""

    group: str
    runs: pd.DataFrame
    points: pd.DataFrame
    lacking: str = ""
    absent: tuple[str, ...] = ()

    def show(self, size: str, measure: str):
        """fig_curve as an image, or the sentence that says why there is none."""
        return show(lambda _: fig_curve(self.runs, self.points, size, measure), self.runs)


def profile(every: pd.DataFrame, group: str, rows: str, predicted: Callable) -> Profile:
    """Of all records those of a group and of some rows, named with blanks between them; predicted(runs) gives MiB.
    Raises UnknownName for a row that does not exist."""
    names = [find_variant(name).name for name in rows.split()]
    try:
        runs = select(every, group)
        runs = runs[runs["spec.variant"].isin(names) | (len(names) == 0)]
        absent = tuple(name for name in names if name not in set(runs["spec.variant"]))
        return Profile(group, runs, points(runs, names, predicted(runs)), absent=absent)
    except ReportError as reason:
        return Profile(group, every[:0], pd.DataFrame(columns=COLUMNS), not_measured(reason))


@style()
def fig_curve(runs: pd.DataFrame, table: pd.DataFrame, size: str, measure: str) -> Figure:
    """A measure of MEASURES against one of SIZES, from the `points` of a group's runs. Raises NotMeasured."""
    where, part = along(table, size)
    if part[measure].notna().sum() == 0:
        why = "GPU memory is counted by the GPU's allocator" if measure == "gib" else "these runs record no times"
        raise NotMeasured(f"no run with {where} has one: {why}")
    label = MEASURES[measure][1]
    finding = (memory_finding if measure == "gib" else speed_finding)(part, size, where)
    apart = measure == "speed" and part["code"].nunique() > 1
    figure = new_figure(("On a CPU: " if on_cpu(runs) else "") + finding, _note(runs, where, apart), 4.6)
    axis = figure.subplots()
    failing = part.loc[part["oom"], "variant"].unique().tolist()
    band = 0.04 * (len(failing) + 1) if failing else 0.0  # of the axis' height, for what ran out of memory
    for number_of, (variant, row) in enumerate(part.groupby("variant", sort=False)):
        color = COLORBLIND[number_of % len(COLORBLIND)]
        row = row.sort_values(size)
        said = variant + (_fitted(row) if measure == "gib" else "")
        axis.plot(row[size], row[measure], color=color, label=said, **_look(number_of))
        if measure == "gib":
            axis.plot(row[size], row["predicted"], color=color, linestyle="--", linewidth=1)
        if variant in failing:
            # Apart from each other, since many rows end at the same size.
            height = 1 - 0.04 * (failing.index(variant) + 1)
            first = row.loc[row["oom"], size].min()
            axis.plot(first, height, "x", color=color, transform=axis.get_xaxis_transform(), markersize=7)
    if measure == "gib" or size == "length":  # a longer feature takes longer: at one rate of tokens, in proportion
        drawn = part[["gib", "predicted"]] if measure == "gib" else part[[measure]]
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        low, high = part[measure].min() / 1.5, drawn.max().max() * 1.2
        axis.set_ylim(low, high * (high / low) ** (band / (1 - band)))
    else:
        axis.set_ylim(0, 1.05 * part[measure].max() / (1 - band))
    if measure == "gib" and part["predicted"].notna().any():
        axis.plot([], [], color="0.4", linestyle="--", linewidth=1, label="predicted")
    if failing:
        axis.add_patch(Rectangle((0, 1 - band), 1, band, color="0.93", transform=axis.transAxes, zorder=0))
        axis.plot([], [], "x", color="0.4", label="out of memory")
    _ticks(axis, part[size])
    axis.set(xlabel=SIZES[size], ylabel=label)
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
    return figure


def _figure(size: str, measure: str) -> Callable[[pd.DataFrame], Figure]:
    return lambda runs: fig_curve(runs, points(runs), size, measure)


FIGURES = {  # of a group whose preset is for profiles
    "memory_by_length": _figure("length", "gib"),
    "memory_by_batch": _figure("micro_batch", "gib"),
    "speed_by_batch": _figure("micro_batch", "speed"),
}


def _look(number_of: int) -> dict:
    """Markers tell rows apart where there is no colour, and, one more than there are colours, beyond their number."""
    return {"marker": "osD^vP*X<>p"[number_of % (len(COLORBLIND) + 1)], "markersize": 4, "linewidth": 1.4}


def _ticks(axis: Axes, sizes: pd.Series) -> None:
    """A logarithmic axis that names the sizes tried, as far as there is room."""
    axis.set_xscale("log", base=2)
    shown = []
    for value in sorted(set(sizes)):
        if not shown or value > 1.2 * shown[-1]:
            shown.append(value)
    axis.xaxis.set_major_locator(FixedLocator(shown))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _note(runs: pd.DataFrame, where: str, apart: bool) -> str:
    parts = [f"Group {runs['group'].iloc[0]}", where, f"code {commits(runs)}"]
    parts += ["points of different code are of different days, and perhaps hosts"] if apart else []
    parts += sorted(set(runs["env.gpu"].dropna())) or [CPU_CAVEAT]
    return " · ".join(parts) + "."


def memory_finding(part: pd.DataFrame, size: str, where: str) -> str:
    """By what factor memory grows from the least size to the largest that most rows have reached, in the row in which
    it grows most and in that in which it does least."""
    peaks = part.dropna(subset=["gib"]).pivot(index="variant", columns=size, values="gib")
    low = peaks.columns.min()
    growth = peaks.div(peaks[low], axis="index").drop(columns=low)
    reached = growth.count()
    if reached.sum() == 0:
        raise NotMeasured(f"no row has a peak at two sizes, {where}")
    high = reached[reached == reached.max()].index.max()
    growth = growth[high].dropna()
    most, least = growth.idxmax(), growth.idxmin()
    return say("curves.memory", size=size, low=low, high=high, most=most, least=least, growth=growth)


def lead(part: pd.DataFrame) -> tuple[str, str, pd.Series] | None:
    """Of the rows of the visible loop the one that is quickest at any micro-batch, of transformers.Trainer's with the
    compiler the same, and by what factor the first is quicker, by micro-batch. None where no micro-batch has both: a
    lead over the Trainer as it comes would be the larger one."""
    speeds = part.pivot(index="micro_batch", columns="variant", values="speed").dropna(axis="columns", how="all")
    speeds = speeds[speeds.index > 1]  # a pass of one feature waits for the host, whatever the row
    of_trainer = {name for name in speeds if VARIANTS[name].settings.engine == "trainer"}
    peers = [name for name in of_trainer if VARIANTS[name].settings.compile != "none"]
    others = speeds.columns.difference(of_trainer)
    if not peers or others.empty:
        return None
    loop, peer = (speeds[chosen].max().idxmax() for chosen in (others, peers))
    factors = (speeds[loop] / speeds[peer]).dropna()
    return (loop, peer, factors) if len(factors) else None


def lead_by_batch(runs: pd.DataFrame) -> str:
    """The lead over the Trainer at every micro-batch of a group's runs, in a sentence. Raises NotMeasured."""
    _, part = along(points(runs), "micro_batch")
    row, peer, factors = lead(part) or ("", "", [])
    if len(factors) < 2:
        raise NotMeasured("no two micro-batches have a speed of both a row of the visible loop and the Trainer")
    return say("curves.lead", row=row, peer=peer, lead=factors.to_dict(), group=runs["group"].iloc[0],
               code=commits(runs))  # fmt: skip


def speed_finding(part: pd.DataFrame, size: str, where: str) -> str:
    """Over micro-batches the lead over the Trainer at each; over lengths, what the quickest row does at both ends.
    There the lead is not told: at few tokens the rows wait for the host. Without a lead it is the quickest row, or
    where that alone has a curve, both of its ends."""
    best = part.loc[part["speed"].idxmax()].to_dict()
    timed = part.dropna(subset="speed")
    known = lead(part) if size != "length" else None
    loop, peer, factors = known or ("", "", pd.Series(dtype=float))
    curved = timed.groupby("variant")[size].nunique() > 1
    if size == "length" or (not loop and curved.sum() == 1 and curved[best["variant"]]):
        own = timed[timed["variant"] == best["variant"]].sort_values(size)
        return say("curves.speed_by_size", first=own.iloc[0], last=own.iloc[-1], where=where, size=size)
    return say("curves.speed", best=best, where=where, row=loop, peer=peer, lead=factors.to_dict())
