"""Figures of profiles: a step as a timeline, memory by phase, kernels under the roofline, a row beside its parent."""

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from qa_lib.measure.trace import PARTS, PHASES
from qa_lib.report.runs import AXIS_NAMES, NotMeasured, baseline, cells, read_profile
from qa_lib.report.sentences import RECOMMENDED
from qa_lib.report.style import COLORBLIND, GREY, bars, new_figure, style
from qa_lib.report.tables import place
from qa_lib.report.text import factor, number, share

PART_COLORS = dict(zip(PARTS, sns.color_palette("colorblind", len(PARTS)), strict=True))
HELD = ("parameters", "optimizer state", "activations", "gradients and workspace", "reserved, not used")
HELD_COLORS = [*COLORBLIND[:4], "0.85"]
PHASE_MARKS = dict(zip(PHASES, ("|", "x", "d"), strict=True))


def profiles(runs: pd.DataFrame) -> pd.DataFrame:
    """The profiles beside the runs of a group, in table order: AXES, variant, name (of row and cell) and profile.
    Raises NotMeasured if there is none."""
    found = runs.assign(variant=runs["spec.variant"], profile=runs["path"].map(read_profile))
    found = found.loc[found["profile"].notna(), [*AXIS_NAMES, "variant", "profile"]]
    if found.empty:
        raise NotMeasured("no run of this group has a profile: python -m qa_lib profile ROW --scale S makes one")
    found = found.sort_values("variant", key=lambda names: names.map(place), kind="stable").reset_index(drop=True)
    found["name"] = found["variant"] + ", mb " + found["micro_batch"].astype(str)
    for label, part in cells(found.drop(columns="micro_batch")):
        if label:
            found.loc[part.index, "name"] += f", {label}"
    return found


def _by_name(runs: pd.DataFrame) -> dict[str, dict]:
    return profiles(runs).set_index("name")["profile"].to_dict()


def _figure(title: str, rows: dict[str, dict], height: float, legend: int = 0) -> Figure:
    """An empty figure of profiles with title and caption, and room below them for a legend of so many lines."""
    return new_figure(title, _note(rows) + 2 * legend * "\n", height)


def _with(rows: dict[str, dict], what: str, why_not: str) -> dict[str, dict]:
    """Those of some profiles that have something. Raises NotMeasured if none has."""
    found = {name: profile for name, profile in rows.items() if profile[what]}
    if not found:
        raise NotMeasured(why_not)
    return found


def _note(rows: dict[str, dict]) -> str:
    code = sorted({str(profile["code"]["commit"])[:7] for profile in rows.values()})
    profile = next(iter(rows.values()))
    note = f"Group {profile['group']} · code {', '.join(code)}"
    if not profile["env"]["gpu"]:
        return note + " · on a CPU: operators' own times under the profiler, which proves the plumbing only."
    return f"{note} · {profile['env']['gpu']}, host {profile['env']['cpu']}."


def _said(profile: dict) -> str:
    time = profile["time"]
    launches = f", {time['launches_per_step']:,.0f} launches" if time["launches_per_step"] is not None else ""
    return f"{number(time['step_ms'])} ms, {share(time['busy_share'])} busy{launches}"


def fig_timeline(runs: pd.DataFrame) -> Figure:
    """One step of the baseline and one of the recommended row, or else of the quickest profiled one, on one axis,
    coloured by part of the model. Of the cell in which both were profiled, that with the largest micro-batch."""
    first = baseline(runs)
    both = [(label, part) for label, part in cells(profiles(runs)) if {first} < set(part["variant"])]
    if not both:
        raise NotMeasured(f"no profile of {first} beside another row's at the same micro-batch")
    label, part = both[0]
    rows = dict(zip(part["variant"], part["profile"], strict=True))
    others = [name for name in rows if name != first]
    best = RECOMMENDED if RECOMMENDED in rows else min(others, key=lambda name: rows[name]["time"]["step_ms"])
    where = label or f"micro-batch {part['micro_batch'].iloc[0]}"
    return timeline({first: rows[first], best: rows[best]}, f" ({where})")


@style()
def timeline(rows: dict[str, dict], where: str = "") -> Figure:
    """One step of each of some profiles {name: profile}, on one axis."""
    title = "; ".join(f"a step of {name}: {_said(profile)}" for name, profile in rows.items())
    figure = _figure(title[0].upper() + title[1:] + where, rows, 1.4 + 1.35 * len(rows), 1)
    columns = ["start", "ms", "phase", "part"]
    spans = {name: pd.DataFrame(profile["timeline"], columns=columns) for name, profile in rows.items()}
    every = pd.concat(spans.values())
    for axis, (name, table) in zip(figure.subplots(len(rows), squeeze=False)[:, 0], spans.items(), strict=True):
        for height, phase in enumerate(reversed(PHASES)):
            part = table[table["phase"] == phase]
            colors = [PART_COLORS[part_of_model] for part_of_model in part["part"]]
            axis.broken_barh(part[["start", "ms"]].to_numpy(), (height - 0.42, 0.84), facecolors=colors, linewidth=0)
        axis.set_yticks(range(len(PHASES)), reversed(PHASES))
        axis.set_xlim(0, 1.01 * (every["start"] + every["ms"]).max())
        axis.set_title(name, loc="left", fontsize=10)
        axis.grid(False, axis="y")
    axis.set_xlabel(
        "ms of a step under the profiler, which holds the host back; the title's are without (white: waiting)"
    )
    handles = [Patch(color=PART_COLORS[part], label=part) for part in PARTS if part in set(every["part"])]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    return figure


@style()
def fig_parts(rows: dict[str, dict]) -> Figure:
    """Where the steps of some profiles {name: profile} go, by part: forward and backward apart, and waiting."""
    first, *_, last = rows.values()
    ratio = factor(first["time"]["step_ms"] / last["time"]["step_ms"])
    names = list(rows)
    title = f"{names[-1]}'s step: {_said(last)}; {ratio} as fast as {names[0]}'s ({_said(first)})"
    spans = []
    for name, profile in rows.items():
        time = profile["time"]
        for phase, parts in time["parts"].items():
            spans += [(part if phase == part else f"{part}, {phase}", name, ms) for part, ms in parts.items()]
        spans.append(("waiting", name, max(0.0, time["step_ms"] - time["busy_ms"])))
    table = pd.DataFrame(spans, columns=["part", "row", "ms"])
    longest = table[table["part"] != "waiting"].groupby("part", sort=False)["ms"].max()
    order = [*longest.sort_values(ascending=False, kind="stable").index, "waiting"]
    figure = _figure(title, rows, 1.5 + 0.3 * len(order))
    axis = figure.subplots()
    palette = dict(zip(names, [GREY, COLORBLIND[3]][-len(names) :], strict=True))
    bars(axis, table, "ms", "part", order=order, hue="row", palette=palette)
    axis.set(xlabel="ms a step", ylabel="")
    return figure


def fig_phases(runs: pd.DataFrame) -> Figure:
    """What fills the memory at its peak, a bar a profiled row, and the peak of each phase of the step."""
    return phases(_by_name(runs))


@style()
def phases(rows: dict[str, dict]) -> Figure:
    """As fig_phases, for some profiles {name: profile}; those without memory are left out."""
    rows = _with(rows, "memory", "GPU memory is counted by the GPU's allocator, which a CPU has not")
    peaks = {name: profile["memory"]["peak_mib"] for name, profile in rows.items()}
    least, most = min(peaks, key=peaks.get), max(peaks, key=peaks.get)
    title = f"{most} peaks at {number(peaks[most])} MiB, in its {rows[most]['memory']['peak_phase']} pass"
    if least != most:
        title += f"; {least} at {number(peaks[least])}, in its {rows[least]['memory']['peak_phase']}"
    figure = _figure(title, rows, 1.8 + 0.36 * len(rows), 2)
    axis = figure.subplots()
    for height, profile in enumerate(rows.values()):
        memory = profile["memory"]
        held = [memory[f"{key}_mib"] for key in ("params", "optimizer", "activations", "workspace", "fragmentation")]
        if memory["peak_phase"] == "optimizer":  # the activations are gone by then
            held[2:4] = 0.0, memory["grads_mib"] + memory["workspace_mib"]
        left = 0.0
        for mib, color in zip(held, HELD_COLORS, strict=True):
            axis.barh(height, mib, left=left, color=color, height=0.7)
            left += mib
        for phase, mib in memory["phases"].items():
            axis.plot(mib, height, PHASE_MARKS[phase], color="black", markersize=7)
    axis.set(xlabel="MiB", yticks=range(len(rows)), yticklabels=rows)
    axis.invert_yaxis()
    axis.grid(False, axis="y")
    handles = [Patch(color=color, label=label) for label, color in zip(HELD, HELD_COLORS, strict=True)]
    marks = [axis.plot([], [], mark, color="black", label=f"peak of {phase}")[0] for phase, mark in PHASE_MARKS.items()]
    figure.legend(handles=[*handles, *marks], loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


@style()
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
    """The heaviest kernels of the rows whose hardware counters were read, under the measured ceilings."""
    return roofline(_by_name(runs))


@style()
def roofline(rows: dict[str, dict]) -> Figure:
    """Arithmetic on the tensor cores against bytes of DRAM, a point a kernel, as large as its time; and how much of
    the copy bandwidth the kernels without such arithmetic reach (Williams, Waterman and Patterson 2009)."""
    rows = _with(rows, "ncu", "no hardware counters were read: python -m qa_lib profile ROW --ncu does, on a GPU")
    first = next(iter(rows.values()))
    roof, slope = first["ceilings"]["matrix_tflops"], first["ceilings"]["copy_gb_per_s"]
    kernels = pd.concat([pd.DataFrame(profile["ncu"]).assign(row=name) for name, profile in rows.items()])
    kernels = kernels[(kernels["us"] > 0) & (kernels["dram_bytes"] > 0)]
    ops = kernels[["fp16_ops", "bf16_ops", "fp8_ops"]].astype(float).sum(axis=1)
    attention = kernels["name"].str.contains("flash|fmha|attention", case=False)
    kernels = kernels.assign(**{
        "kind": np.select([attention, ops > 0], ["attention", "products"], "the rest"),
        "intensity": ops / kernels["dram_bytes"],
        "TFLOP/s": ops / kernels["us"] / 1e6,
        "GB/s": kernels["dram_bytes"] / kernels["us"] / 1e3,
    })  # fmt: skip
    products, others = kernels[ops > 0], kernels[ops == 0]
    if products.empty or others.empty:
        raise NotMeasured("the counters that were read hold no products, or nothing beside them")
    rate = np.average(products["TFLOP/s"], weights=products["us"])
    width = np.average(others["GB/s"], weights=others["us"])
    title = (
        f"Products and attention run at {share(rate / roof)} of the matrix rate, "
        f"the rest at {share(width / slope)} of the copy bandwidth (means by time)"
    )
    figure = _figure(title, rows, 4.2)
    left, right = figure.subplots(1, 2)
    left.plot([1, roof / slope * 1e3, 1e4], [slope / 1e3, roof, roof], color="0.3", linewidth=1)
    palette = dict(zip(("products", "attention", "the rest"), COLORBLIND, strict=False))
    look = {"hue": "kind", "style": "row", "size": "us", "sizes": (10, 300), "alpha": 0.6, "palette": palette}
    sns.scatterplot(products, x="intensity", y="TFLOP/s", legend=False, ax=left, **look)
    sns.scatterplot(others, x="us", y="GB/s", legend=False, ax=right, **look)
    left.set(xlabel="operations per byte of DRAM", ylabel="TFLOP/s on the tensor cores", xscale="log", yscale="log")
    right.axhline(slope, color="0.3", linewidth=1)
    right.set(xlabel="µs a step in kernels without products", ylabel="GB/s of DRAM", ylim=(0, 1.1 * slope))
    rows_marks = [Line2D([], [], color="0.4", marker=mark, linestyle="", label=name)
                  for name, mark in zip(rows, "oXs^Dv", strict=False)]  # fmt: skip
    handles = [Patch(color=color, alpha=0.6, label=kind) for kind, color in palette.items()]
    left.legend(handles=[*handles, *rows_marks], fontsize=8)
    return figure
