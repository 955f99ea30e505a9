"""Figures of profiles: a step by phase and part, memory by what fills it, kernels against the hardware's ceilings."""

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from qa_lib.measure.trace import PARTS, PHASES
from qa_lib.report.format import number, percent
from qa_lib.report.load import NotMeasured, baseline, place
from qa_lib.report.style import COLORBLIND, columns, legend, name_points, new_figure, stack
from qa_lib.variants import RECOMMENDED

PART_COLORS = dict(zip(PARTS, sns.color_palette("colorblind", len(PARTS)), strict=True)) | {"waiting": "0.9"}
# What fills memory: words for it, and the keys of a profile.
HELD = {"parameters": "params", "optimizer state": "optimizer", "activations": "activations",
        "gradients and workspace": "workspace", "reserved, not used": "fragmentation"}  # fmt: skip
# What the compiler fused, by what its kernels' symbols contain.
OPERATIONS = {"gelu": "GELU", "layer_norm": "layer norm"}
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


def fig_roofline(runs: pd.DataFrame) -> Figure:
    """The kernels of the quickest row whose hardware counters were read, against the measured ceilings."""
    return roofline(profiles(runs).set_index("name")["profile"].to_dict())


def roofline(rows: dict[str, dict]) -> Figure:
    """Of the quickest of some profiles that has counters, each kernel's arithmetic on the tensor cores as a share of
    the measured matrix rate, against its traffic with DRAM as a share of the measured copy bandwidth; a point as large
    as its time, and the eight longest named. What is far from both ceilings waits (Williams, Waterman and Patterson
    2009, whose roof is at 100 % of each)."""
    rows = _with(rows, "ncu", "no hardware counters were read: python -m qa_lib profile ROW --ncu does, on a GPU")
    name = min(rows, key=lambda name: rows[name]["time"]["step_ms"])
    roof, slope = (rows[name]["ceilings"][key] for key in ("matrix_tflops", "copy_gb_per_s"))
    kernels = pd.DataFrame(rows[name]["ncu"])
    kernels = kernels[(kernels["us"] > 0) & (kernels["dram_bytes"] > 0)].sort_values("us", ascending=False)
    ops = kernels[["fp16_ops", "bf16_ops", "fp8_ops"]].astype(float).sum(axis="columns")
    if not (ops > 0).any() or (ops > 0).all():
        raise NotMeasured("the counters that were read hold no products, or nothing beside them")
    attention = kernels["name"].str.contains("flash|fmha|attention", case=False)
    kernels = kernels.assign(
        rate=100 * ops / kernels["us"] / 1e6 / roof,
        width=100 * kernels["dram_bytes"] / kernels["us"] / 1e3 / slope,
        kind=np.select([attention, ops > 0], ["attention", "matrix products"], "the rest"),
    )
    rate = np.average(kernels["rate"][ops > 0], weights=kernels["us"][ops > 0])
    width = np.average(kernels["width"][ops == 0], weights=kernels["us"][ops == 0])
    title = f"{name}: matrix work reaches {rate:.1f} % of its ceiling, the rest {width:.1f} % of its own"
    figure = _figure(title, {name: rows[name]}, 4.0)
    axis = figure.subplots()
    for (kind, part), color in zip(kernels.groupby("kind"), COLORBLIND, strict=False):
        size = 400 * part["us"] / kernels["us"].max()
        axis.scatter(part["width"], part["rate"], s=size, color=color, alpha=0.6, label=kind, linewidth=0)
    axis.set(xlabel="traffic with DRAM, in % of the copy bandwidth measured", xlim=(0, 103), ylim=(-6, 106),
             ylabel="arithmetic on the tensor cores,\nin % of the matrix rate measured")  # fmt: skip
    name_points(axis, [
        (kernel.width, kernel.rate, f"{number(kernel.us)} µs, {kernel.times:.0f} ×: {words}")
        for kernel in kernels.rename(columns={"count": "times"}).head(8).itertuples()
        for words in [kernel_words(kernel.name, kernel.kind, rows[name]["time"]["kernels"])]
    ])  # fmt: skip
    legend(axis)
    return figure


def kernel_words(symbol: str, kind: str, traced: list[dict]) -> str:
    """What a kernel does, in words: its kind, and the parts and phases under which a profile's trace has it; its kind
    alone where it is not among the heaviest ones, which the trace has kept."""
    found = [entry for entry in traced if _plain(entry["name"]) == _plain(symbol)]
    parts, phases = (" and ".join(dict.fromkeys(entry[key] for entry in found)) for key in ("part", "phase"))
    if kind == "matrix products" and parts:
        work = f"products of {parts}"
    elif kind == "the rest":
        work = " and ".join(words for sign, words in OPERATIONS.items() if sign in symbol) or parts or kind
    else:
        work = kind
    return ", ".join(filter(None, dict.fromkeys([work, phases])))


def _plain(symbol: str) -> str:
    """A kernel's symbol without its template arguments, which profilers write differently."""
    return symbol.split("<")[0]
