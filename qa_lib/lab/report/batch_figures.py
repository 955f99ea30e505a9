"""The figures of what a step computes: its padding, its packed sequence, and which weights train.

The notebooks explore, systems, beyond and peft draw them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from qa_lib.lab.report import style
from qa_lib.lab.report.evidence import NotMeasured
from qa_lib.lab.report.format import count, percent
from qa_lib.spec.spec import Spec

if TYPE_CHECKING:  # they import torch, which takes seconds
    from qa_lib.data.batches import Batches
    from qa_lib.data.windows import Samples

STEPS = 100  # of a run, over which the share of text is counted
PADDING = "0.85"  # the grey of what is padding, or does not train


def _batches(samples: "Samples", spec: Spec) -> "Batches":
    """Return how a variant deals samples to its steps."""
    from qa_lib.data.load import batches_of  # which imports torch

    return batches_of(samples, spec)


def fig_text(samples: "Samples", specs: Sequence[Spec]) -> Figure:
    """Draw how long windows are, and how much of the computed tokens is text, by variant."""
    shares = {}
    for spec in specs:
        batches = _batches(samples, spec)
        first = [micro_batch for step in range(STEPS) for micro_batch in batches.step(step)]
        lengths, computed = batches.tokens(first)
        name = f"{spec.variant}: {computed.sum():,} tokens"
        shares[name] = 100 * lengths.sum() / computed.sum()
    mean = samples.lengths.mean()
    title = f"Windows have {mean:.0f} of {samples.max_length} tokens on average"
    figure = style.new_figure(title, note="", height=3.2)
    left, right = figure.subplots(1, 2)
    left.hist(samples.lengths, bins=30)
    left.axvline(samples.max_length, color="0.4", linestyle="--")
    left.set(xlabel="tokens in a window (dashed: the limit)", ylabel="windows")
    bars = right.barh([*shares], shares.values())
    right.bar_label(bars, fmt="%.0f %%", padding=4)
    right.set(xlabel="text in % of the computed tokens", xlim=(0, 115))
    right.invert_yaxis()
    return figure


def fig_padding(samples: "Samples", specs: Sequence[Spec]) -> Figure:
    """Draw the first step by variant: a line of tokens for each sample, its padding grey."""
    steps = {}
    for spec in specs:
        batches = _batches(samples, spec)
        steps[spec.variant] = (batches.size, *batches.tokens(batches.step(0)))
    said = [
        f"{percent(1 - lengths.sum() / padded.sum())} in {name}"
        for name, (_, lengths, padded) in steps.items()
    ]
    figure = style.new_figure(f"Padding takes {', '.join(said)}", note="", height=4.2)
    axes = figure.subplots(1, len(steps), sharex=True, sharey=True)
    for axis, (name, (size, lengths, padded)) in zip(axes, steps.items(), strict=True):
        # A gap stands after each micro-batch.
        rows = -np.arange(len(lengths)) - np.arange(len(lengths)) // size
        axis.barh(rows, padded, height=1.0, color=PADDING, linewidth=0)
        axis.barh(rows, lengths, height=1.0, color=style.BLUE, linewidth=0)
        axis.set_title(name, loc="left", fontsize=10)
        axis.set(xlabel="tokens (grey: padding)", yticks=[])
    axes[0].set_ylabel("samples of a step, by micro-batch")
    return figure


def fig_packed(samples: "Samples", spec: Spec) -> Figure:
    """Draw the first micro-batch as it is packed, as it would be padded, and who attends to whom.

    Raises NotMeasured for a variant that packs nothing.
    """
    if spec.settings.padding != "packed":
        raise NotMeasured(f"{spec.variant} packs nothing")
    batches = _batches(samples, spec)
    limit = spec.preset.max_length
    indices = batches.step(0)[0]
    begins = batches.arrays(indices)["cu_seqlens"][: batches.size]
    lengths = batches.samples.lengths[indices]
    note = "A colour is a sample, grey is padding."
    return packed_figure(lengths, begins, batches.budget, limit, note)


def packed_figure(
    lengths: np.ndarray, begins: np.ndarray, budget: int, limit: int, note: str
) -> Figure:
    """Draw samples in one packed sequence of `budget` tokens, padded to `limit` tokens each, and
    who attends to whom.

    `lengths` are the tokens of the samples, and `begins` where each begins in the sequence.
    """
    samples = len(lengths)
    title = (
        f"{samples} samples in {budget:,} tokens: {percent(1 - lengths.sum() / budget)} padding; "
        f"each padded to {limit}: {percent(1 - lengths.sum() / (samples * limit))}"
    )
    figure = style.new_figure(title, note=note, height=4.2)
    axes = figure.subplot_mosaic(
        [["packed", "mask"], ["padded", "mask"]], width_ratios=[3, 2], height_ratios=[1, 4]
    )
    colors = sns.color_palette("husl", samples)
    axes["packed"].barh(0, budget, color=PADDING)
    axes["packed"].barh(0, lengths, left=begins, color=colors)
    rows = -np.arange(samples)
    axes["padded"].barh(rows, limit, color=PADDING)
    axes["padded"].barh(rows, lengths, color=colors)
    for name in ("packed", "padded"):
        axes[name].set(xlabel=f"tokens, {name}", yticks=[], xlim=(0, budget))
    # A block for each sample.
    axes["mask"].bar(begins, lengths, lengths, begins, align="edge", color=colors)
    axes["mask"].set(xlim=(0, budget), ylim=(budget, 0), aspect="equal")
    axes["mask"].set_xlabel("a token (down) attends to these")
    return figure


def fig_trained(parts: pd.DataFrame, variant: str) -> Figure:
    """Draw how much of each part of a model trains.

    `parts` are those of `qa_lib.model.build.trainable_summary`.
    """
    said = [f"{count(row.trainable)} of {count(row.parameters)}" for row in parts.itertuples()]
    share = parts.loc["all", "trainable"] / parts.loc["all", "parameters"]
    title = f"{variant} trains {said[-1]} parameters, {percent(share)}"
    figure = style.new_figure(title, note="", height=0.9 + 0.27 * len(parts))
    axis = figure.subplots()
    rows = parts.drop(index="all")
    bars = axis.barh(rows.index, rows["parameters"], color=PADDING)
    axis.bar_label(bars, said[:-1], padding=3)
    axis.barh(rows.index, rows["trainable"], color=style.ORANGE)
    axis.set(xlabel="parameters (coloured: they train)", xlim=(0, 1.3 * rows["parameters"].max()))
    axis.xaxis.set_major_formatter(lambda parameters, _: count(parameters))
    axis.invert_yaxis()
    return figure
