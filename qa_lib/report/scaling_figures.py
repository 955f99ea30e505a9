"""The figures of rows for several GPUs: `fig_*(runs) -> Figure`, two from runs of preset `parallel`, two of `slides`.

As in figures.py, titles are sentences computed from the records, and a figure whose values no record holds raises
NotMeasured.
"""

import itertools

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from qa_lib.measure.goodput import REFERENCE
from qa_lib.report import losses, scaling, sentences, style
from qa_lib.report.runs import NotMeasured, commits, on_cpu
from qa_lib.report.style import BLUE, GREY, ORANGE, RED
from qa_lib.report.text import number, say

BATCHES = np.unique(np.geomspace(REFERENCE, 512, 60).astype(int))


def _figure(runs: pd.DataFrame, title: str, said: str, height: float) -> Figure:
    """An empty figure whose caption says what it shows and where from."""
    seeds = runs[runs["status"] == "ok"].groupby("spec.variant")["spec.seed"].nunique()
    counts = "–".join(map(str, sorted({seeds.min(), seeds.max()})))
    title, said = scaling.worded(title, runs), scaling.worded(said, runs)
    parts = [
        said,
        f"Group {runs['group'].iloc[0]}",
        f"n = {counts} seed{'' if counts == '1' else 's'}",
        f"code {commits(runs)}",
    ]
    if on_cpu(runs):
        title = f"On a CPU: {title}"
        parts.append(sentences.CPU_CAVEAT)
    return style.new_figure(title, " · ".join(parts) + ".", height)


def _whole(runs: pd.DataFrame) -> pd.DataFrame:
    """Of runs those of whole passes over the data: others measure speed, and learn little."""
    return runs[runs.reindex(columns=["spec.preset.epochs"])["spec.preset.epochs"].notna()]


@style.style()
def fig_scaling(runs: pd.DataFrame) -> Figure:
    """Features/s against GPUs: at one effective batch, at another, and at one batch a GPU; dashed, so many times the
    speed of one GPU with the same batch, or with its share of it."""
    lines = scaling.scaling(runs)
    panels = [("strong", size) for size in scaling.strong_batches(lines)[:2]]
    panels += [("weak", size) for size in scaling.weak_batches(lines)[:1]]
    several = lines[lines["variant"].map(scaling.one_gpu) != lines["variant"]]
    drawn = [scaling.at(several, **{name: size}) for name, size in panels]
    kinds = pd.concat(drawn)[["variant", "stages"]].drop_duplicates().itertuples(index=False, name=None)
    colors = dict(zip(kinds, itertools.cycle(style.COLORBLIND)))
    figure = _figure(runs, scaling.speed_finding(lines), "dashed: so many times one GPU; bars: 90 % intervals", 4.2)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (name, size), shown in zip(axes, panels, drawn, strict=True):
        for (variant, stages), line in shown.groupby(["variant", "stages"], sort=False):
            alone = (line["rate"] / line[name] / line["world"]).mean()  # of the one GPU
            if line["world"].min() > 1 and alone > 0:
                line = pd.concat([pd.DataFrame({"world": [1], "rate": [alone]}), line])
            look = {"marker": "s" if scaling.is_pipeline(variant) else "o", "markersize": 4, "capsize": 3}
            axis.errorbar(line["world"], line["rate"], line["rate±"], color=colors[variant, stages], linewidth=1.2,
                          label=_label(variant, stages), **look)  # fmt: skip
            axis.plot(line["world"], line["world"] * alone, "--", color=colors[variant, stages], linewidth=1, zorder=1)
        of = scaling.worded("in all" if name == "strong" else "a GPU", runs)
        axis.set_title(f"{size} features {of}", loc="left", fontsize=10)
        axis.set(xlabel=scaling.worded("GPUs", runs), ylim=(0, None), xticks=sorted(set(lines["world"])))
    axes[0].set_ylabel(scaling.worded("features/s of all GPUs", runs))
    handles = {}
    for axis in axes:
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside right center", fontsize=8, frameon=False)
    return figure


def _label(variant: str, stages: int) -> str:
    return f"{variant}, {stages} stages" if scaling.is_pipeline(variant) and stages > 1 else variant


@style.style()
def fig_waiting(runs: pd.DataFrame) -> Figure:
    """Where a step's time goes, by row and number of GPUs, and beside it the memory of the GPU that needs most: at the
    effective batch of most rows, or at the nearest that the row has run at, which its name says then.

    In shares of a step: steps of other batches are not equally long.
    """
    lines = scaling.scaling(runs)
    shared = lines[lines["variant"].map(scaling.one_gpu) != lines["variant"]].dropna(subset=["step_ms"])
    batches = scaling.strong_batches(lines) or list(shared["batch"].mode())
    if not batches:
        raise NotMeasured("no run of a row for several GPUs has its time")
    batch = int(batches[0])
    # Of a row's batches rather one at which its waiting was measured.
    told = shared["waiting_ms"].notna()
    shown = scaling.near(shared[told | ~told.groupby([shared[key] for key in scaling.WHERE]).transform("any")], batch)
    shown = shown.reset_index(drop=True)
    rest, divided = shown["step_ms"] - shown["waiting_ms"], shown["variant"].map(scaling.is_pipeline)
    computing = shown["busy_ms"].mask(divided).fillna(rest)
    parts = pd.DataFrame({
        "computing": computing.fillna(0.0),
        "communicating": shown["waiting_ms"].mask(divided).fillna(0.0),
        "bubble": shown["waiting_ms"].where(divided).fillna(0.0),
        "idle": (rest - computing).clip(lower=0.0).fillna(0.0),
        "not told apart": shown["step_ms"].where(computing.isna(), 0.0),
    })  # fmt: skip
    # What was profiled are other steps than the timed ones, and its parts may come to more than one of these.
    parts = 100 * parts.div(parts.sum(axis="columns"), axis="index")
    parts.index = [scaling.worded(_name(line, batch), runs) for line in shown.itertuples()]
    title = scaling.waiting_finding(shown[shown["batch"] == batch])
    meant = "communicating: nothing else runs; bubble: that or idle, in the stage that waits most; idle: nothing runs"
    said = f"{batch} features a step, or as many as a name ends with; {meant}"
    figure = _figure(runs, title, said, 1.6 + 0.2 * len(shown))
    memory = shown["peak_mib"] / 1024
    widths = [2, 1] if memory.notna().any() else [1]  # a CPU has no memory of its own
    left, *beside = figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0]
    colors = dict(zip(parts, (BLUE, ORANGE, RED, GREY, "0.9"), strict=True))
    parts = parts.loc[:, parts.any()]
    style.stack(left, parts, colors)
    style.columns(left, {"step ms": shown["step_ms"].map(number), "waits ms": map(number, shown["waiting_ms"])})
    style.legend(left, 1.03)
    left.set_xlabel("% of a step")
    for right in beside:
        right.barh(range(len(shown)), memory.fillna(0.0), color=BLUE, height=0.7)
        style.name_rows(right, [""] * len(shown))
        style.columns(right, {"GiB": memory.map(number)})
        right.set(xlabel=scaling.worded("peak memory of a GPU, in GiB", runs), xlim=(0, None))
    return figure


def _name(line, usual: int) -> str:
    """A bar's row and number of GPUs, and its batch unless that is the usual one."""
    name = f"{_label(line.variant, line.stages)}: {line.world} GPU{'s' if line.world > 1 else ''}"
    return name if line.batch == usual else f"{name} at {line.batch}"


@style.style()
def fig_artefact(runs: pd.DataFrame) -> Figure:
    """The slides' “statistical efficiency” on one log, step by step and as their second script would have seen it."""
    log = losses.one_log(losses.logs_of(_whole(runs)))
    loss = log["log"].set_index("step")["loss"]
    again = losses.repeated(loss)
    title = say("slides.artefact_title", log=log)
    figure = _figure(
        runs, title, f"the log of {log['run_id']}, batch {log['batch']}; differences of 0 are not drawn", 3.6
    )
    left, right = figure.subplots(1, 2)
    left.plot(loss.index, loss, color=BLUE, linewidth=0.5, label="each step")
    left.plot(again.index, again, color=ORANGE, linewidth=1.5, label=f"mean of {losses.EVERY} steps, told again")
    left.set(xlabel="optimizer step", ylabel="training loss")
    for values, mean, color in ((loss, log["raw"], BLUE), (again, log["again"], ORANGE)):
        measured = losses.formula(values, log["batch"])
        measured = measured[measured > 0]
        right.plot(measured.index, measured, ".", color=color, markersize=2 if color == BLUE else 5)
        right.axhline(mean, color=color, linewidth=1.5, label=f"mean {mean:.2g}")
    right.set(xlabel="optimizer step", ylabel="|loss(i − 1) − loss(i)| / batch", yscale="log")
    for axis in (left, right):
        style.legend(axis)
    return figure


@style.style()
def fig_noise(runs: pd.DataFrame) -> Figure:
    """The gradient noise scale over the training, and the efficiency of batches that follows from it beside the
    measured one."""
    logs = losses.logs_of(_whole(runs[runs["spec.variant"] == losses.SCALED]))
    phi, means = losses.phi_of(logs), losses.predicted(logs, BATCHES)
    phi = phi.assign(bin=np.ceil(20 * phi["done"]) / 20)
    try:
        found = losses.reached(logs)
        measured = found.efficiency.query(f"batch > {REFERENCE}")
    except NotMeasured:
        found, measured = None, pd.DataFrame({"mean": [], "half": []})
    title = losses.noise_finding(logs)
    said = f"{losses.SCALED}; medians and quartiles over seeds and steps, in twentieths of the training"
    if found:
        said += f"; measured: features at {REFERENCE} over features at the batch until the loss is {found.loss:.2f}"
    figure = _figure(runs, title, said, 3.6)
    left, right = figure.subplots(1, 2)
    for number_of, (batch, part) in enumerate(phi.groupby("batch")):
        color, over = style.COLORBLIND[number_of % 10], part.groupby("bin")["phi"]
        low, middle, high = (over.quantile(share) for share in (0.25, 0.5, 0.75))
        left.plot(middle, color=color, label=f"batch {batch:g}")
        left.fill_between(middle.index, low, high, color=color, alpha=0.2, linewidth=0)
    left.set(xlabel="share of the training", ylabel="noise scale φ, in features", ylim=(0, None), xlim=(0, 1))
    right.plot(means.index, means, color=BLUE, label="by φ")
    right.plot(BATCHES, REFERENCE / BATCHES, ":", color=GREY, label="if more features taught nothing")
    right.errorbar(measured.index, measured["mean"], measured["half"], fmt="o", color=RED, capsize=3, label="measured")
    ticks = [REFERENCE * 2**power for power in range(5)]
    right.set_xscale("log", base=2)
    right.set_xticks(ticks, list(map(str, ticks)))
    right.set(xlabel="features a step", ylabel=f"efficiency, batch {REFERENCE} being 1", ylim=(0, 1.2))
    for axis in (left, right):
        style.legend(axis)
    return figure


FIGURES = {"scaling": fig_scaling, "waiting": fig_waiting, "artefact": fig_artefact, "noise": fig_noise}
