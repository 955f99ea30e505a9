"""A picture of each family's idea, drawn for its notebook from the reader's own data, model and run."""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from qa_lib.report.profiles import PART_COLORS
from qa_lib.report.readme import REFERENCE
from qa_lib.report.runs import BASELINE, MICRO_BATCH, NotMeasured
from qa_lib.report.style import COLORBLIND, COLORS, GREY, new_figure, show, style
from qa_lib.report.text import count, number, share
from qa_lib.variants import VARIANTS, find_family

EXAMPLE = "h200-quality"  # the committed group whose scores stand beside the reader's own
PADDING = "0.85"
HEAVIEST = 8  # kernels that are named
HELD = {"params": "weights", "grads": "gradients", "optimizer": "optimizer state", "activations": "activations"}


def taught(record: dict, figure_of: Callable, values_of: Callable):
    """For a notebook: figure_of(values_of()) as an image; or why there is none, where the run `record` is not ok."""

    def drawn(record: dict) -> Figure:
        if record["status"] != "ok":
            raise NotMeasured(f"{record['run_id']} is {record['status']}: {record['error']['message']}")
        return figure_of(values_of())

    return show(drawn, record)


@style()
def fig_padding(spec, rows: Sequence) -> Figure:
    """The first step of each of `rows`, (spec, its Batches): a line of tokens for each feature, padding grey. The one
    that fills its batches as `spec` does is named."""
    figure, said = new_figure(" ", "", 4.2), []
    for axis, (each, batches) in zip(figure.subplots(1, len(rows), sharex=True, sharey=True), rows, strict=True):
        lengths, padded = batches.rows(batches.step(0))
        # A gap after each micro-batch.
        heights = np.arange(len(lengths)) + np.arange(len(lengths)) // batches.size
        axis.barh(heights, lengths, height=1.0, color=COLORS["A"], linewidth=0)
        axis.barh(heights, padded - lengths, left=lengths, height=1.0, color=PADDING, linewidth=0)
        ours = all(getattr(each.settings, key) == getattr(spec.settings, key) for key in ("padding", "order"))
        part = share(1 - lengths.sum() / padded.sum())
        axis.set_title(f"{each.variant}: {part} padding" + ", as this row" * ours, loc="left", fontsize=10)
        axis.set(xlabel="tokens (grey: padding)", yticks=[])
        axis.grid(False)
        said.append(f"{part} in {each.variant}")
    figure.axes[0].invert_yaxis()
    figure.axes[0].set_ylabel("features of a step, by micro-batch")
    figure.suptitle(f"Padding takes {', '.join(said)}", x=0.01, ha="left", fontsize=12, fontweight="bold")
    return figure


@style()
def fig_launches(found: tuple[dict, pd.DataFrame]) -> Figure:
    """One step, (trace.summary, its trace.work): every piece of work in time, and the heaviest by name."""
    summary, work = found
    on_gpu = summary["kernels_per_step"] is not None
    each = "kernel" if on_gpu else "operator"
    title = f"One step: {len(work):,} {each}s in {number(summary['step_ms'])} ms"
    title += f", {summary['launches_per_step']:,.0f} launches" if on_gpu else ""
    heaviest = pd.DataFrame(summary["kernels"]).groupby(["name", "part"], as_index=False)[["ms", "count"]].sum()
    heaviest = heaviest.nlargest(HEAVIEST, "ms")
    title += f"; the {len(heaviest)} heaviest take {share(heaviest['ms'].sum() / summary['busy_ms'])} of the work"
    figure = new_figure(title, "" if on_gpu else "On a CPU: operators' own times under the profiler.", 4.4)
    above, below = figure.subplots(2, 1, height_ratios=[1, 3])
    above.broken_barh(work[["start_ms", "ms"]].to_numpy(), (0, 1), facecolors=work["part"].map(PART_COLORS))
    above.set(xlabel="ms of the step under the profiler (white: waiting)", yticks=[])
    names = heaviest["name"].str.slice(0, 48) + heaviest["count"].map("  ×{:.0f}".format)
    bars = below.barh(names, heaviest["ms"], color=heaviest["part"].map(PART_COLORS))
    below.bar_label(bars, heaviest["ms"].map(number), padding=3)
    below.set(xlabel=f"ms a step (×: how often the {each} runs)")
    below.invert_yaxis()
    below.grid(False, axis="y")
    handles = [Patch(color=color, label=part) for part, color in PART_COLORS.items() if part in set(work["part"])]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    return figure


@style()
def fig_trained(parts: pd.DataFrame, variant: str) -> Figure:
    """Of model.build.trainable_summary, how much of each part of the model trains in a row."""
    whole = parts.loc["all"]
    title = f"{variant} trains {count(whole['trainable'])} of {count(whole['parameters'])} parameters, "
    figure = new_figure(title + share(whole["trainable"] / whole["parameters"]), "", 0.9 + 0.27 * len(parts))
    axis, rows = figure.subplots(), parts.drop(index="all")
    axis.barh(rows.index, rows["parameters"], color=PADDING)
    bars = axis.barh(rows.index, rows["trainable"], color=COLORS["B"])
    said = [f"{count(row.trainable)}, {share(row.trainable / row.parameters)}" for row in rows.itertuples()]
    axis.bar_label(bars, said, padding=3)
    axis.set(xlabel="parameters (coloured: they train)", xlim=(0, 1.15 * rows["parameters"].max()))
    axis.invert_yaxis()
    axis.grid(False, axis="y")
    return figure


@style()
def fig_scores(runs: pd.DataFrame, examples: pd.DataFrame, group: str) -> Figure:
    """The best F1 against the share that trains, a point a row: of the reader's `group`, and of EXAMPLE's rows in the
    family and those that they change."""
    found = {group: runs[runs["group"] == group], f"{EXAMPLE}, an example": examples[examples["group"] == EXAMPLE]}
    figure = new_figure("How much trains, and what it comes to", "Means over seeds; B, D, E: families of rows.", 3.6)
    for axis, (name, part) in zip(figure.subplots(1, 2), found.items(), strict=True):
        part = part[part["status"].eq("ok") & part["spec.variant"].isin([*find_family("B"), BASELINE])]
        part = part.astype({"quality.best_f1": float, "quality.always_null_f1": float})
        part = part.assign(share=100 * part["model.params_trainable"] / part["model.params_total"])
        means = part.groupby("spec.variant")[["share", "quality.best_f1"]].mean()
        axis.plot(means["share"], means["quality.best_f1"], "o", color=COLORS["B"])
        for row in means.itertuples():
            axis.annotate(row.Index, row[1:], (4, 4), textcoords="offset points", fontsize=8)
        axis.axhline(part["quality.always_null_f1"].mean(), color=GREY, linestyle="--", linewidth=1)
        axis.set(xlabel="parameters that train, in % (log)", ylabel="best F1 (dashed: never answering)", xscale="log")
        axis.set_title(name, loc="left", fontsize=10)
    return figure


@style()
def fig_stack(record: dict, predicted: dict, examples: pd.DataFrame) -> Figure:
    """What lies in memory at the peak: as run.budget.estimate has `predicted` it for the row of `record`, and as it was
    measured in REFERENCE for that row, the one that it changes and the baseline."""
    variant, measured = record["spec"]["variant"], record["memory"]["peak_alloc_mib"]
    said = f"{number(measured)} MiB measured" if measured else "not measured, for want of a GPU"
    title = f"{variant} here: {number(predicted['peak_mib'])} MiB at the peak predicted, {said}"
    row = VARIANTS[variant]
    rows = examples[(examples["group"] == REFERENCE) & examples["status"].eq("ok") & (examples[MICRO_BATCH] == 32)]
    means = rows.groupby("spec.variant")[[f"memory.{name}_mib" for name in HELD]].mean().astype(float)
    means = means.reindex([name for name in dict.fromkeys([BASELINE, row.parent, variant]) if name in means.index])
    panels = {
        f"this run's model, {record['model']['name']}": pd.DataFrame([_at_peak(predicted)], index=["predicted"]),
        f"{REFERENCE}: measured with BERT-base at micro-batch 32": means.set_axis([*HELD.values()], axis=1),
    }
    note = "Activations as measured: all of the peak that is not weights, gradients or optimizer state."
    figure = new_figure(title, note + 2 * "\n", 3.6)
    for axis, (name, part) in zip(figure.subplots(2, 1, height_ratios=[1, 2]), panels.items(), strict=True):
        part.plot.barh(stacked=True, ax=axis, color=COLORBLIND[:5], legend=False, width=0.7)
        axis.set_title(name, loc="left", fontsize=10)
        axis.set(xlabel="MiB", ylabel="")
        axis.invert_yaxis()
        axis.grid(False, axis="y")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    return figure


def _at_peak(predicted: dict) -> dict[str, float]:
    """What an estimate says that is there at its peak. Before the optimizer's step gradients come as activations go."""
    held = {label: predicted[f"{name}_mib"] for name, label in HELD.items()}
    if predicted["phase"] != "forward and backward":
        return held | {
            "activations": 0.0,
            "workspace": predicted["peak_mib"] - sum(held.values()) + held["activations"],
        }
    held["workspace"] = predicted["workspace_mib"]
    return held | {"gradients": predicted["peak_mib"] - sum(held.values()) + held["gradients"]}


@style()
def fig_kernels(found: tuple[list[str], list[str]]) -> Figure:
    """The operators of a layer run one by one, and beside them the kernels that the compiler made of them."""
    operators, kernels = found
    title = f"One layer's forward pass: {len(operators)} operators become {len(kernels)} kernels"
    figure = new_figure(
        title, "Blue: matrix products, which stay as they are. Orange: all else.", 0.8 + 0.21 * len(operators)
    )
    for axis, name, names in zip(figure.subplots(1, 2), ("one by one", "compiled"), found, strict=True):
        colors = [COLORBLIND[0] if "mm" in each else COLORBLIND[1] for each in names]
        axis.barh(range(len(names)), 1, color=colors, alpha=0.35)
        for height, each in enumerate(names):
            axis.text(0.01, height, each, va="center", fontsize=8)
        axis.set_title(f"{name}: {len(names)}", loc="left", fontsize=10)
        axis.set(xlim=(0, 1), ylim=(max(map(len, found)), -1))
        axis.set_axis_off()
    return figure


@style()
def fig_packed(spec, batches) -> Figure:
    """The first micro-batch of a row that packs: as it is computed, as its features would be padded, and which tokens
    attend to which. Raises NotMeasured for a row that pads."""
    if spec.settings.padding != "packed":
        raise NotMeasured(f"{spec.variant} packs nothing")
    ends = batches.arrays(batches.step(0)[0])["cu_seqlens"]
    features, limit = batches.size, spec.scale.max_length
    begins, lengths, text = ends[:features], np.diff(ends)[:features], ends[features]
    title = (
        f"{features} features in a row of {batches.budget:,} tokens: {share(1 - text / batches.budget)} padding; "
        f"each padded to {limit}: {share(1 - text / (features * limit))}"
    )
    figure = new_figure(title, "A colour is a feature, grey is padding.", 4.2)
    axes = figure.subplot_mosaic([["packed", "mask"], ["padded", "mask"]], width_ratios=[3, 2], height_ratios=[1, 4])
    colors = sns.color_palette("husl", features)
    axes["packed"].barh(0, batches.budget, color=PADDING)
    axes["packed"].barh([0] * features, lengths, left=begins, color=colors)
    axes["packed"].set(xlabel="tokens of the packed row", yticks=[])
    axes["padded"].barh(range(features), limit, color=PADDING)
    axes["padded"].barh(range(features), lengths, color=colors)
    axes["padded"].set(xlabel="tokens of padded rows", ylabel="the same features", yticks=[])
    axes["mask"].bar(begins, lengths, lengths, begins, align="edge", color=colors)
    axes["mask"].set(xlim=(0, batches.budget), ylim=(batches.budget, 0), aspect="equal")
    axes["mask"].set(xlabel="a token (down) attends to these", ylabel="")
    for axis in axes.values():
        axis.grid(False)
    return figure
