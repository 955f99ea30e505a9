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
from qa_lib.report.style import BLUE, COLORBLIND, GREY, ORANGE, new_figure, show, style
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
    steps = [(each, batches, *batches.tokens(batches.step(0))) for each, batches in rows]
    said = [f"{share(1 - lengths.sum() / padded.sum())} in {each.variant}" for each, _, lengths, padded in steps]
    figure = new_figure(f"Padding takes {', '.join(said)}", "", 4.2)
    axes = figure.subplots(1, len(rows), sharex=True, sharey=True)
    for axis, (each, batches, lengths, padded) in zip(axes, steps, strict=True):
        heights = -np.arange(len(lengths)) - np.arange(len(lengths)) // batches.size  # a gap after each micro-batch
        axis.barh(heights, padded, height=1.0, color=PADDING, linewidth=0)
        axis.barh(heights, lengths, height=1.0, color=BLUE, linewidth=0)
        ours = all(getattr(each.settings, key) == getattr(spec.settings, key) for key in ("padding", "order"))
        axis.set_title(each.variant + ": as this row" * ours, loc="left", fontsize=10)
        axis.set(xlabel="tokens (grey: padding)", yticks=[])
    axes[0].set_ylabel("features of a step, by micro-batch")
    return figure


@style()
def fig_launches(found: tuple[dict, pd.DataFrame]) -> Figure:
    """One step, (trace.summary, its trace.work): every piece of work in time, and the heaviest by name."""
    summary, work = found
    on_gpu = summary["kernels_per_step"] is not None
    each = "kernel" if on_gpu else "operator"
    heaviest = pd.DataFrame(summary["kernels"][:HEAVIEST])[::-1]
    launches = f", {summary['launches_per_step']:,.0f} launches" if on_gpu else ""
    title = (
        f"One step: {len(work):,} {each}s in {number(summary['step_ms'])} ms{launches}; "
        f"the {len(heaviest)} heaviest take {share(heaviest['ms'].sum() / summary['busy_ms'])} of the work"
    )
    note = "" if on_gpu else "On a CPU: operators, and those that they call in turn, by their own times."
    figure = new_figure(title, note, 4.6)
    above, below = figure.subplots(2, 1, height_ratios=[1, 3])
    above.broken_barh(work[["start_ms", "ms"]].to_numpy(), (0, 1), facecolors=work["part"].map(PART_COLORS), lw=0)
    above.set(xlabel="ms of the step under the profiler (white: waiting)", yticks=[])
    names = heaviest["name"].str.slice(0, 48) + heaviest["count"].map("  ×{:.0f}".format)
    colors = heaviest["part"].map(PART_COLORS)
    below.bar_label(below.barh(range(len(names)), heaviest["ms"], color=colors, tick_label=names), fmt=number)
    below.set(xlabel=f"ms a step (×: how often the {each} runs)", xlim=(0, 1.1 * heaviest["ms"].max()))
    handles = [Patch(color=color, label=part) for part, color in PART_COLORS.items() if part in set(work["part"])]
    below.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.4, -0.17), ncols=len(handles), fontsize=8, frameon=False
    )
    return figure


@style()
def fig_trained(parts: pd.DataFrame, variant: str) -> Figure:
    """Of model.build.trainable_summary, how much of each part of the model trains in a row."""
    said = [f"{count(row.trainable)} of {count(row.parameters)}" for row in parts.itertuples()]
    part = share(parts.loc["all", "trainable"] / parts.loc["all", "parameters"])
    figure = new_figure(f"{variant} trains {said[-1]} parameters, {part}", "", 0.9 + 0.27 * len(parts))
    axis, rows = figure.subplots(), parts.drop(index="all")
    axis.bar_label(axis.barh(rows.index, rows["parameters"], color=PADDING), said[:-1], padding=3)
    axis.barh(rows.index, rows["trainable"], color=ORANGE)
    axis.set(xlabel="parameters (coloured: they train)", xlim=(0, 1.3 * rows["parameters"].max()))
    axis.invert_yaxis()
    return figure


@style()
def fig_scores(runs: pd.DataFrame, examples: pd.DataFrame, group: str) -> Figure:
    """F1 against the share that trains, a point a row: the baseline and family B of the reader's `group`, and of
    EXAMPLE."""
    title, note = "How much trains, and what it comes to", "F1 at the best threshold, means over seeds."
    figure, sources = new_figure(title, note, 3.6), {f"yours: {group}": (runs, group)}
    sources |= {f"an example: {EXAMPLE}": (examples, EXAMPLE)}
    for axis, (name, (table, of)) in zip(figure.subplots(1, 2), sources.items(), strict=True):
        chosen = table["status"].eq("ok") & table["spec.variant"].isin([*find_family("B"), BASELINE])
        rows = table[chosen & table["group"].eq(of)].rename(columns={"quality.best_f1": "F1"})
        rows["share"] = 100 * rows["model.params_trainable"] / rows["model.params_total"]
        means = rows.astype({"F1": float}).groupby("spec.variant")[["share", "F1"]].mean().dropna()
        means.plot.scatter("share", "F1", color=ORANGE, s=40, logx=True, ax=axis)
        for row in means.itertuples():
            axis.annotate(row.Index, row[1:], (4, 4), textcoords="offset points", fontsize=8)
        axis.axhline(rows["quality.always_null_f1"].mean(), color=GREY, linestyle="--", linewidth=1)
        axis.margins(x=0.2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set(xlabel="parameters that train, in % (log)", ylabel="F1 (dashed: never answering)", title=name)
    return figure


@style()
def fig_stack(record: dict, predicted: dict, examples: pd.DataFrame) -> Figure:
    """What lies in memory at the peak: as run.memory_estimate.estimate has `predicted` it for the row of `record`, and
    as it was measured in REFERENCE for that row, the one that it changes and the baseline."""
    variant, measured = record["spec"]["variant"], record["memory"]["peak_alloc_mib"]
    said = f"{number(measured)} measured" if measured else "not measured without a GPU"
    title = f"{variant} here: {number(predicted['peak_mib'])} MiB at the peak predicted, {said}"
    here = {"predicted": _at_peak(predicted)}
    if measured:
        here["measured"] = {label: record["memory"][f"{name}_mib"] for name, label in HELD.items()}
    chosen = examples["group"].eq(REFERENCE) & examples["status"].eq("ok") & examples[MICRO_BATCH].eq(32)
    chosen &= examples["spec.variant"].isin([BASELINE, VARIANTS[variant].parent, variant])
    columns = {f"memory.{name}_mib": label for name, label in HELD.items()}
    panels = {
        f"this run's model, {record['model']['name']}": pd.DataFrame(here).T,
        f"{REFERENCE}: measured with BERT-base at micro-batch 32": examples[chosen]
        .groupby("spec.variant")[list(columns)].mean().astype(float).rename(columns=columns).rename_axis(""),
    }  # fmt: skip
    note = "Workspace: libraries and temporaries. Measured, it counts as activations: the peak less all that lasts."
    figure = new_figure(title, note + 2 * "\n", 3.6)
    for axis, (name, part) in zip(figure.subplots(2, 1, height_ratios=[1, 2]), panels.items(), strict=True):
        part[::-1].plot.barh(stacked=True, ax=axis, color=COLORBLIND, legend=False, width=0.7)
        axis.set_title(name, loc="left", fontsize=10)
        axis.set_xlabel("MiB")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    return figure


def _at_peak(predicted: dict) -> dict[str, float]:
    """What an estimate says that is there at its peak: before the end of the backward pass gradients are only those
    that the peak has room for, and after it there are no activations."""
    held = {label: predicted[f"{name}_mib"] for name, label in HELD.items()} | {"workspace": predicted["workspace_mib"]}
    early = predicted["phase"] == "forward and backward"
    held |= {"gradients": 0.0} if early else {"activations": 0.0, "workspace": 0.0}
    return held | {"gradients" if early else "workspace": predicted["peak_mib"] - sum(held.values())}


@style()
def fig_kernels(layer: tuple[list[str], list[str], str]) -> Figure:
    """Of train.kernels.translated, the operators of a layer, and beside them the kernels made of them."""
    columns = {"one by one": layer[0], "compiled": layer[1]}
    title = f"One layer's forward pass: {len(layer[0])} operators become {len(layer[1])} kernels"
    note, tallest = "Blue: matrix products. Orange: all else.", max(map(len, layer[:2]))
    figure = new_figure(title, note, 0.8 + 0.21 * tallest)
    for axis, (name, kernels) in zip(figure.subplots(1, 2), columns.items(), strict=True):
        colors = [COLORBLIND[0 if "mm" in kernel else 1] for kernel in kernels]
        boxes = axis.barh(range(len(kernels)), 1, color=colors, alpha=0.35)
        axis.bar_label(boxes, [kernel[:60] for kernel in kernels], label_type="center", fontsize=8)
        axis.set(xlim=(0, 1), ylim=(tallest, -1), title=f"{name}: {len(kernels)}")
        axis.set_axis_off()
    return figure


def excerpt(layer: tuple[list[str], list[str], str], lines: int = 24) -> str:
    """As Markdown, the beginning of the kernel that inductor made of the GELU, or else of the last that it wrote."""
    _, kernels, program = layer
    written = [name.removesuffix(".run") for name in kernels if name.startswith(("cpp_", "triton_"))]
    name = next((name for name in written if "gelu" in name), written[-1])
    code = program[program.index(f"\n{name} = ") :].split("\n")
    return "\n".join(["```", *code[1 : 1 + lines], "...", "```"])


@style()
def fig_packed(spec, batches) -> Figure:
    """The first micro-batch of a row that packs: as it is computed, as its features would be padded, and which tokens
    attend to which. Raises NotMeasured for a row that pads."""
    if spec.settings.padding != "packed":
        raise NotMeasured(f"{spec.variant} packs nothing")
    indices, limit = batches.step(0)[0], spec.preset.max_length
    begins, lengths = batches.arrays(indices)["cu_seqlens"][: batches.size], batches.features.lengths[indices]
    title = (
        f"{batches.size} features in a row of {batches.budget:,} tokens: {share(1 - lengths.sum() / batches.budget)} "
        f"padding; each padded to {limit}: {share(1 - lengths.sum() / (batches.size * limit))}"
    )
    figure = new_figure(title, "A colour is a feature, grey is padding.", 4.2)
    axes = figure.subplot_mosaic([["packed", "mask"], ["padded", "mask"]], width_ratios=[3, 2], height_ratios=[1, 4])
    rows = -np.arange(batches.size)
    colors = sns.color_palette("husl", batches.size)
    for name, widths, height, left in (("packed", batches.budget, 0, begins), ("padded", limit, rows, 0)):
        axes[name].barh(height, widths, color=PADDING)
        axes[name].barh(height, lengths, left=left, color=colors)
        axes[name].set(xlabel=f"tokens, {name}", yticks=[], xlim=(0, batches.budget))
    axes["mask"].bar(begins, lengths, lengths, begins, align="edge", color=colors)
    axes["mask"].set(xlim=(0, batches.budget), ylim=(batches.budget, 0), aspect="equal")
    axes["mask"].set_xlabel("a token (down) attends to these")
    return figure
