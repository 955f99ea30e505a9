"""Figures of profiles: a step by phase and part, memory by what fills it."""

import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from qa_lib.measure.trace import PARTS, PHASES
from qa_lib.report.format import number, percent
from qa_lib.report.load import NotMeasured, baseline, place
from qa_lib.report.style import COLORBLIND, columns, legend, new_figure, stack
from qa_lib.variants import RECOMMENDED

PART_COLORS = dict(zip(PARTS, sns.color_palette("colorblind", len(PARTS)), strict=True)) | {"waiting": "0.9"}
# What fills memory: words for it, and the keys of a profile.
HELD = {"parameters": "params", "optimizer state": "optimizer", "activations": "activations",
        "gradients and workspace": "workspace", "reserved, not used": "fragmentation"}  # fmt: skip
SAME = 0.05  # by so much the peaks of a profile and of a run of the same code may differ: they draw other batches
HELD_COLORS = dict(zip(HELD, [*COLORBLIND[:4], "0.85"], strict=True))


def profiles(runs: pd.DataFrame) -> pd.DataFrame:
    """The profiles beside the runs of a group, in table order: variant, micro_batch, name, profile, and the peak of its
    memory beside the run's, peak_mib and recorded_mib. Raises NotMeasured if there is none."""
    lines = []
    for run in runs[["spec.variant", "micro_batch", "memory.peak_alloc_mib", "run"]].to_dict("records"):
        if profile := run["run"].profile():
            peak = (profile["memory"] or {}).get("peak_mib")
            lines.append((run["spec.variant"], run["micro_batch"], profile, peak, run["memory.peak_alloc_mib"]))
    if not lines:
        raise NotMeasured("no run of this group has a profile: python -m qa_lib profile ROW --preset S makes one")
    found = pd.DataFrame(lines, columns=["variant", "micro_batch", "profile", "peak_mib", "recorded_mib"])
    found = found.sort_values("variant", key=place, kind="stable").reset_index(drop=True)
    several = found["micro_batch"].nunique() > 1
    sizes = found["micro_batch"].map(", micro-batch {}".format) if several else ""
    return found.assign(name=found["variant"] + sizes)


def _with(rows: dict[str, dict], what: str, why_not: str) -> dict[str, dict]:
    """Those of some profiles that have something. Raises NotMeasured if none has."""
    found = {name: profile for name, profile in rows.items() if profile[what]}
    if not found:
        raise NotMeasured(why_not)
    return found


def _figure(title: str, rows: dict[str, dict], height: float) -> Figure:
    """An empty figure of profiles with title and caption."""
    code = sorted({str(profile["code"]["commit"])[:7] for profile in rows.values()})
    sizes = sorted({profile["spec"]["micro_batch"] for profile in rows.values()})
    profile = next(iter(rows.values()))
    note = f"Group {profile['group']}, profiled apart from its timed runs · micro-batch {', '.join(map(str, sizes))}"
    note += f" · code {', '.join(code)}"
    if profile["env"]["gpu"]:
        note += f" · {profile['env']['gpu']}, host {profile['env']['cpu']}."
    else:
        note += " · on a CPU: operators' own times under the profiler, which proves the plumbing only."
    return new_figure(title, note, height)


def fig_timeline(runs: pd.DataFrame) -> Figure:
    """A step of the baseline and one of the recommended variant, or else of the quickest profiled one, at the largest
    micro-batch at which both were profiled."""
    first, found = baseline(runs), profiles(runs)
    sizes = found.groupby("micro_batch")["variant"].agg(set)
    both = sizes.index[sizes.map(lambda names: {first} < names)]
    if both.empty:
        raise NotMeasured(f"no profile of {first} beside another variant's at the same micro-batch")
    rows = found[found["micro_batch"] == both.max()].set_index("variant")["profile"].to_dict()
    others = [name for name in rows if name != first]
    best = RECOMMENDED if RECOMMENDED in rows else min(others, key=lambda name: rows[name]["time"]["step_ms"])
    return timeline({first: rows[first], best: rows[best]})


def timeline(rows: dict[str, dict]) -> Figure:
    """A step of each of some profiles {name: profile} as it was without the profiler, one phase after the other; of a
    phase its parts with their times summed, since layers take turns."""
    title = "A step takes " + ", ".join(f"{number(rows[name]['time']['step_ms'])} ms in {name}" for name in rows)
    figure = _figure(title, rows, 1.4 + 1.5 * len(rows))
    longest = max(profile["time"]["step_ms"] for profile in rows.values())
    wide = longest / 30  # a block that has room for its number; of the narrower ones those that count stand beside
    axes = figure.subplots(len(rows), squeeze=False, sharex=True)[:, 0]
    for axis, (name, profile) in zip(axes, rows.items(), strict=True):
        time = profile["time"]
        table = pd.DataFrame(time["parts"]).T.reindex([*PHASES, "waiting"], columns=[*PARTS, "waiting"]).fillna(0.0)
        table.loc["waiting", "waiting"] = max(0.0, time["step_ms"] - time["busy_ms"])
        took = table.sum(axis="columns")
        begins = took.cumsum() - took
        stack(axis, pd.concat([begins.rename("_before"), table], axis=1), {"_before": "none"} | PART_COLORS)
        for blocks in axis.containers[1:]:
            axis.bar_label(blocks, fmt=lambda ms: number(ms) if ms > wide else "", label_type="center", fontsize=7)
        for height, (phase, begin) in enumerate(begins.items()):
            narrow = table.loc[phase].where(lambda ms: (ms > wide / 4) & (ms <= wide)).dropna()
            said = " · ".join(f"{part} {number(ms)}" for part, ms in narrow.items())
            end = begin + took[phase]
            x, side = (end, "left") if begin < longest - end else (begin, "right")
            axis.text(x, height, f" {said} ", ha=side, va="center", fontsize=7)
        columns(axis, {"ms": took.map(number)})
        said = f"{name}: {number(time['step_ms'])} ms a step, {percent(time['busy_share'])} busy"
        if time["launches_per_step"] is not None:
            said += f", {time['launches_per_step']:,.0f} launches"
        axis.set_title(said, loc="left", fontsize=10)
        axis.set_xlim(0, longest)
    axis.set_xlabel("ms since the step began")
    legend(axes[0], 1.2)
    return figure


def fig_phases(runs: pd.DataFrame) -> Figure:
    """What fills the memory at its peak, a bar a profiled row; without profiles of older code that took other memory
    than the run they lie beside."""
    found = profiles(runs)
    ours, theirs = (found[name].astype(float) for name in ("peak_mib", "recorded_mib"))
    return phases(found[~((ours - theirs).abs() > SAME * theirs)].set_index("name")["profile"].to_dict())


def phases(rows: dict[str, dict]) -> Figure:
    """As fig_phases, for some profiles {name: profile}; those without memory are left out."""
    rows = _with(rows, "memory", "GPU memory is counted by the GPU's allocator, which a CPU has not")
    memory = pd.DataFrame({name: profile["memory"] for name, profile in rows.items()}).T
    table = memory[[f"{key}_mib" for key in HELD.values()]].astype(float).set_axis([*HELD], axis=1) / 1024
    ended = memory["peak_phase"] == "optimizer"  # the activations are gone by then
    table.loc[ended, "gradients and workspace"] += memory["grads_mib"].astype(float) / 1024
    table.loc[ended, "activations"] = 0.0
    peaks = memory["peak_mib"].astype(float)
    least, most = peaks.idxmin(), peaks.idxmax()
    largest = table.loc[most].idxmax()
    title = f"{largest.capitalize()} fill {percent(1024 * table.loc[most, largest] / peaks[most])} of {most}'s peak"
    if least != most:
        title += f"; of these rows {least} peaks lowest, at {percent(peaks[least] / peaks[most])}"
    figure = _figure(title, rows, 1.4 + 0.3 * len(rows))
    axis = figure.subplots()
    stack(axis, table, HELD_COLORS)
    columns(axis, {"peaks in the": memory["peak_phase"] + " pass"})
    axis.set_xlabel("GPU memory at the peak in GiB")
    legend(axis)
    return figure


def fig_allocator(rows: dict[str, dict]) -> Figure:
    """Memory allocated over one step, a line for each of some profiles {name: profile} that have it."""
    rows = _with(rows, "memory", "GPU memory is counted by the GPU's allocator, which a CPU has not")
    figure = _figure("Memory allocated in the course of one step", rows, 3.2)
    axis = figure.subplots()
    for name, profile in rows.items():
        axis.plot(*zip(*profile["memory"]["timeline"], strict=True), label=name, linewidth=1)
    axis.set(xlabel="ms since the step's first allocation, on the host's clock", ylabel="MiB", ylim=(0, None))
    axis.legend(fontsize=8)
    return figure
