"""The figures of profiles: a step by phase and part of the model, and memory by what fills it.

`fig_step`, `fig_phases` and `fig_allocations` take the runs of one group, and choose among the
profiles beside them.
`step`, `phases` and `allocations` draw profiles that are given, {name: profile}, as profiling.ipynb
makes them. `fig_launches` and `fig_kernels` draw the kernels of one step and of one layer.
"""

import itertools
import re
from collections.abc import Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qa_lib.lab.report import style
from qa_lib.lab.report.evidence import NotMeasured, baseline, table_order
from qa_lib.lab.report.format import number, percent
from qa_lib.measure.trace import PARTS, PHASES
from qa_lib.spec.variants import BASELINES, RECOMMENDED, VARIANTS

# The parts of a step -> their colours.
PART_COLORS = dict(zip(PARTS, sns.color_palette("colorblind", len(PARTS)), strict=True))
PART_COLORS["waiting"] = "0.9"

# What fills memory, in words -> its key in a profile's memory, less `_mib`.
HELD = {
    "parameters": "params",
    "optimizer state": "optimizer",
    "activations": "activations",
    "gradients and workspace": "workspace",
    "reserved, not used": "fragmentation",
}
HELD_COLORS = dict(zip(HELD, [*style.COLORBLIND[:4], "0.85"], strict=True))

# By at most this share the peaks of a profile and of a run of the same code differ: they draw other
# batches.
SAME = 0.05


def profiles(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the profiles beside the runs of a group, in the order of the variants table.

    Columns: variant, micro_batch, name, profile; peak_mib, the peak of the profile's memory, and
    recorded_mib, that of the run.

    Raises NotMeasured if there is none.
    """
    names = {"spec.variant": "variant", "memory.peak_alloc_mib": "recorded_mib"}
    table = runs.rename(columns=names)
    table = table.assign(profile=[run.profile() for run in runs["run"]]).dropna(subset="profile")
    if table.empty:
        raise NotMeasured(
            "no run of this group has a profile: "
            "python -m qa_lib profile VARIANT --preset S makes one"
        )
    table = table.sort_values("variant", key=table_order, kind="stable").reset_index(drop=True)
    memories = [profile["memory"] or {} for profile in table["profile"]]
    table["peak_mib"] = [memory.get("peak_mib") for memory in memories]
    table["name"] = table["variant"]
    if table["micro_batch"].nunique() > 1:
        table["name"] += table["micro_batch"].map(", micro-batch {}".format)
    return table


def with_memory(profiles: dict[str, dict]) -> dict[str, dict]:
    """Return those of some profiles {name: profile} that have memory.

    Raises NotMeasured if none has.
    """
    chosen = {name: profile for name, profile in profiles.items() if profile["memory"]}
    if not chosen:
        raise NotMeasured("GPU memory is counted by the GPU's allocator, which a CPU has not")
    return chosen


def profile_figure(title: str, shown: dict[str, dict], height: float) -> Figure:
    """Return an empty figure of profiles {name: profile} with a title and a caption.

    `height` is in inches.
    """
    commits = sorted({str(profile["code"]["commit"])[:7] for profile in shown.values()})
    sizes = sorted({profile["spec"]["micro_batch"] for profile in shown.values()})
    first = next(iter(shown.values()))
    env = first["env"]
    if env["gpu"]:
        hardware = f"{env['gpu']}, host {env['cpu']}"
    else:
        hardware = f"Operators' own times. {style.CPU_CAVEAT}"
    note = (
        f"Group {first['group']}, profiled apart from its timed runs, "
        f"micro-batch {', '.join(map(str, sizes))}. {style.code(', '.join(commits))}. {hardware}."
    )
    return style.new_figure(title, note, height)


# A step.


def fig_step(runs: pd.DataFrame) -> Figure:
    """Draw a step of the baseline and one of the recommended variant (see `step`).

    Raises NotMeasured where `_baseline_and_best` finds none.
    """
    return step(_baseline_and_best(runs))


def _baseline_and_best(runs: pd.DataFrame) -> dict[str, dict]:
    """Return the profiles {variant: profile} of the baseline and of the recommended variant.

    Where that was not profiled, the quickest profiled variant takes its place. Both are at the
    largest micro-batch at which the baseline and another variant were profiled.

    Raises NotMeasured where there is none.
    """
    base = baseline(runs)
    table = profiles(runs)
    variants = table.groupby("micro_batch")["variant"].agg(set)
    sizes = [size for size, names in variants.items() if {base} < names]
    if not sizes:
        raise NotMeasured(f"no profile of {base} beside another variant's at the same micro-batch")
    at_size = table[table["micro_batch"] == max(sizes)]
    by_variant = at_size.set_index("variant")["profile"].to_dict()
    of_base = by_variant.pop(base)
    best = RECOMMENDED
    if RECOMMENDED not in by_variant:
        best = min(by_variant, key=lambda name: by_variant[name]["time"]["step_ms"])
    return {base: of_base, best: by_variant[best]}


def step(shown: dict[str, dict]) -> Figure:
    """Draw what a step spends its time on: for each profile {name: profile} a bar for each phase,
    with a block for each part of the model.

    The step's duration is the one without the profiler.
    """
    title, part = _step_finding(shown)
    figure = profile_figure(title, shown, height=1.4 + 1.3 * len(shown))
    axes = figure.subplots(len(shown), squeeze=False)[:, 0]
    tables = [_phases_by_part(profile["time"]) for profile in shown.values()]
    for axis, (name, profile), table in zip(axes, shown.items(), tables, strict=True):
        _draw_step(axis, table)
        axis.set_title(_numbers_of(name, profile["time"], part), loc="left", fontsize=9)
    widest = max(axis.get_xlim()[1] for axis in axes)
    for axis, table in zip(axes, tables, strict=True):
        axis.set_xlim(0, widest)
        _number_blocks(axis, table, widest)
    axes[-1].set_xlabel("ms")
    style.legend(axes[0], 1.2)
    return figure


LEAST = 0.005  # ms of a block that is told


def _number_blocks(axis: Axes, table: pd.DataFrame, widest: float) -> None:
    """Write the milliseconds of each block into it, or of all blocks of a short bar beside it.

    `table` has the phases as lines and the parts as columns, and `widest` is the end of the axis. A
    block of a long bar that is too narrow for its number has none.
    """
    narrow = widest / 25
    for bar, (_, blocks) in enumerate(table.iterrows()):
        blocks = blocks[blocks >= LEAST]
        if len(blocks) and blocks.min() <= narrow and blocks.sum() < widest / 2:
            words = ", ".join(f"{part} {number(ms)}" for part, ms in blocks.items())
            axis.text(blocks.sum() + narrow / 4, bar, words, va="center", fontsize=7)
            continue
        middles = blocks.cumsum() - blocks / 2
        for middle, ms in zip(middles, blocks, strict=True):
            if ms > narrow:
                axis.text(middle, bar, number(ms), ha="center", va="center", fontsize=7)


def _step_finding(shown: dict[str, dict]) -> tuple[str, str | None]:
    """Return how long a step takes in each profile, and the part of the model that shrank most.

    The part is named, with its milliseconds, if the last profile is quicker than the first, and
    None otherwise.
    """
    times = [profile["time"] for profile in shown.values()]
    durations = [
        f"{number(time['step_ms'])} ms in {name}" for name, time in zip(shown, times, strict=True)
    ]
    title = f"A step takes {' and '.join(durations)}"
    first = times[0]
    last = times[-1]
    if last["step_ms"] >= first["step_ms"]:
        return title, None
    before = _ms_by_part(first)
    after = _ms_by_part(last)
    part = before.sub(after, fill_value=0.0).idxmax()
    both = f"{number(before[part])} and {number(after.get(part, 0.0))} ms"
    words = part.replace("elementwise", "elementwise work")
    return f"{title}; {both} go to {words}", part


def _ms_by_part(time: dict) -> pd.Series:
    """Return the milliseconds of a profile's step by part of the model."""
    return pd.DataFrame(time["parts"]).sum(axis="columns")


def _phases_by_part(time: dict) -> pd.DataFrame:
    """Return the milliseconds of each phase of a profile's step, and of waiting, by part."""
    table = pd.DataFrame(time["parts"]).T
    table = table.reindex([*PHASES, "waiting"], columns=[*PARTS, "waiting"]).fillna(0.0)
    table.loc["waiting", "waiting"] = max(0.0, time["step_ms"] - time["busy_ms"])
    return table


def _draw_step(axis: Axes, table: pd.DataFrame) -> None:
    """Draw the bars of one profile's step."""
    style.stack(axis, table, PART_COLORS)
    style.columns(axis, {"ms": table.sum(axis="columns").map(number)})


def _numbers_of(name: str, time: dict, part: str | None) -> str:
    """Return a step's duration with that of a part, the GPU's busy share, and the launches."""
    words = f"{name}: {number(time['step_ms'])} ms a step"
    if part is not None:
        words += f" ({part} {number(_ms_by_part(time).get(part, 0.0))})"
    words += f", the GPU busy for {percent(time['busy_share'])}"
    if time["launches_per_step"] is not None:
        words += f", {time['launches_per_step']:,.0f} launches"
    return words


# Memory.


def fig_phases(runs: pd.DataFrame) -> Figure:
    """Draw what fills the memory at its peak, a bar for each profiled variant of a group.

    Profiles that took other memory than the run beside them are of older code, and are left out.

    Raises NotMeasured where no profile has memory.
    """
    table = profiles(runs)
    recorded_mib = table["recorded_mib"].astype(float)
    difference = (table["peak_mib"].astype(float) - recorded_mib).abs()
    # A profile stays where either peak is missing.
    is_of_other_code = difference > SAME * recorded_mib
    return phases(table[~is_of_other_code].set_index("name")["profile"].to_dict())


def phases(shown: dict[str, dict]) -> Figure:
    """Draw what fills the memory at its peak, a bar for each profile {name: profile}.

    Profiles without memory are left out.

    Raises NotMeasured if none has memory.
    """
    shown = with_memory(shown)
    memory = pd.DataFrame({name: profile["memory"] for name, profile in shown.items()}).T
    gib = _gib_held(memory)
    peaks_mib = memory["peak_mib"].astype(float)
    fullest = peaks_mib.idxmax()
    largest = gib.loc[fullest].idxmax()
    shares = (1024 * gib[largest] / peaks_mib).map(percent)
    title = f"{largest.capitalize()} fill {shares[fullest]} of the peak in {fullest}"
    other = RECOMMENDED if RECOMMENDED in peaks_mib else peaks_mib.idxmin()
    if other != fullest:
        title += f", {shares[other]} in {other}"
    figure = profile_figure(title, shown, height=1.4 + 0.3 * len(shown))
    axis = figure.subplots()
    style.stack(axis, gib, HELD_COLORS)
    style.columns(axis, {"peaks in": memory["peak_phase"] + " pass"})
    axis.set_xlabel("GPU memory at the peak in GiB")
    style.legend(axis)
    return figure


def _gib_held(memory: pd.DataFrame) -> pd.DataFrame:
    """Return the GiB of each of HELD at the peak of each profile's memory."""
    mib = memory[[f"{key}_mib" for key in HELD.values()]].astype(float)
    gib = mib.set_axis(list(HELD), axis="columns") / 1024
    # In the optimizer's phase the activations are gone, and the gradients are there.
    in_optimizer = memory["peak_phase"] == "optimizer"
    gib.loc[in_optimizer, "gradients and workspace"] += memory["grads_mib"].astype(float) / 1024
    gib.loc[in_optimizer, "activations"] = 0.0
    return gib


def fig_allocations(runs: pd.DataFrame) -> Figure:
    """Draw the memory of a step of the baseline and of the recommended variant as it goes on.

    See `allocations`. Raises NotMeasured where `_baseline_and_best` finds none, or none has memory.
    """
    return allocations(_baseline_and_best(runs))


def allocations(shown: dict[str, dict]) -> Figure:
    """Draw the memory that is allocated as one step goes on, a line for each {variant: profile}.

    The horizontal axis counts allocations and releases, and no time: the allocator knows when the
    host asked, and while it keeps its history the host is several times slower than the GPU.

    Raises NotMeasured where no profile has memory.
    """
    shown = with_memory(shown)
    peaks = [
        f"{number(max(mib for _, mib in profiled['memory']['timeline']))} MiB in {name}"
        for name, profiled in shown.items()
    ]
    title = f"A step's allocated memory reaches {' and '.join(peaks)}"
    figure = profile_figure(title, shown, 3.2)
    axis = figure.subplots()
    looks = style.strokes(shown, BASELINES[VARIANTS[next(iter(shown))].task])
    for name, profiled in shown.items():
        mib = [point[1] for point in profiled["memory"]["timeline"]]
        axis.plot(np.linspace(0, 100, len(mib)), mib, label=name, **looks[name])
    axis.set(
        xlabel="% of the step's allocations and releases, in their order",
        ylabel="MiB",
        ylim=(0, None),
    )
    axis.legend(fontsize=8)
    return figure


# The kernels of a step, and of a layer.

HEAVIEST = 8  # kernels that are named
LETTERS = 60  # of a kernel's name, which may have thousands


def fig_launches(profiled: dict, work: pd.DataFrame) -> Figure:
    """Draw one step: every piece of work in time, and the heaviest kernels by name.

    The arguments are what `qa_lib.lab.tools.profile.steady_step` returns.
    """
    heaviest = pd.DataFrame(profiled["kernels"][:HEAVIEST])[::-1]
    share = heaviest["ms"].sum() / profiled["busy_ms"]
    title = (
        f"One step: {len(work):,} kernels in {number(profiled['step_ms'])} ms; "
        f"the {HEAVIEST} heaviest take {percent(share)}"
    )
    figure = style.new_figure(title, note="", height=4.6)
    above, below = figure.subplots(2, 1, height_ratios=[1, 3])
    spans = work[["start_ms", "ms"]].to_numpy()
    above.broken_barh(spans, (0, 1), facecolors=work["part"].map(PART_COLORS), lw=0)
    drawn_ms = spans.sum(axis=1).max() - spans[:, 0].min()
    above.set(
        xlabel=f"ms; under the profiler the kernels span {number(drawn_ms)} (white: waiting)",
        yticks=[],
    )
    names = short_names(heaviest["name"])
    names = [f"{name}  ×{n:.0f}" for name, n in zip(names, heaviest["count"], strict=True)]
    colors = heaviest["part"].map(PART_COLORS)
    bars = below.barh(range(len(names)), heaviest["ms"], color=colors, tick_label=names)
    below.tick_params(axis="y", labelsize=8)
    below.bar_label(bars, fmt=number)
    most = heaviest["ms"].max()
    below.set(xlabel="ms a step (×: how often the kernel runs)", xlim=(0, 1.1 * most))
    for part in work["part"].unique():
        below.barh(0, 0, color=PART_COLORS[part], label=part)
    below.legend(loc="lower right", fontsize=8)
    return figure


def short_names(kernels: Sequence[str]) -> list[str]:
    """Return names of kernels in at most LETTERS letters, different ones where the names are.

    A long name keeps its beginning, and what follows the last letter that it shares with another.
    """
    plain = [re.sub(r"\bvoid |\bat::native::|\(anonymous namespace\)::", "", k) for k in kernels]
    names = []
    for name in plain:
        differs_at = max((_shared(name, other) for other in plain if other != name), default=0)
        if len(name) <= LETTERS:
            names.append(name)
        elif differs_at < LETTERS - 1:
            names.append(f"{name[: LETTERS - 1]}…")
        else:
            half = LETTERS // 2
            names.append(f"{name[: half - 1]}…{name[differs_at : differs_at + half]}")
    return names


def _shared(name: str, other: str) -> int:
    """Return how many letters two names have in common at their beginnings."""
    pairs = zip(name, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def fig_kernels(operators: Sequence[str], kernels: Sequence[str]) -> Figure:
    """Draw the operators of a layer's forward pass, and beside them the kernels made of them."""
    lists = {"one by one": operators, "compiled": kernels}
    tallest = max(map(len, lists.values()))
    title = f"One layer's forward pass: {len(operators)} operators become {len(kernels)} kernels"
    note = "Blue: matrix products. Orange: all else."
    figure = style.new_figure(title, note, height=0.8 + 0.21 * tallest)
    for axis, (name, listed) in zip(figure.subplots(1, 2), lists.items(), strict=True):
        colors = [style.BLUE if "mm" in kernel else style.ORANGE for kernel in listed]
        boxes = axis.barh(range(len(listed)), 1, color=colors, alpha=0.35)
        axis.bar_label(boxes, [kernel[:60] for kernel in listed], label_type="center", fontsize=8)
        axis.set(xlim=(0, 1), ylim=(tallest, -1), title=f"{name}: {len(listed)}")
        axis.set_axis_off()
    return figure
