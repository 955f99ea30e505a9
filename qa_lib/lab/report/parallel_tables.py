"""The tables of notebooks/multi_gpu.ipynb, and what it concludes of several GPUs.

parallel_figures.py has the figures of that notebook; slides.py and hypotheses.py have what it says
of a student's slides.
"""

import dataclasses
from collections.abc import Sequence

import pandas as pd

from qa_lib.lab.report import noise_scale, one_stack, scaling
from qa_lib.lab.report.evidence import NotMeasured
from qa_lib.lab.report.format import MISSING, number, percent, points
from qa_lib.lab.report.noise_scale import REFERENCE
from qa_lib.lab.report.scaling import worded
from qa_lib.lab.report.summary import change
from qa_lib.lab.report.tables import Column, render
from qa_lib.spec.variants import VARIANTS

# The variants of which each GPU has some of the layers, and those of which it has a part of the
# model in one way or another.
PIPELINES = frozenset(
    name for name, variant in VARIANTS.items() if variant.settings.parallel == "pipeline"
)
DIVIDED = PIPELINES | {
    name for name, variant in VARIANTS.items() if variant.settings.parallel == "tensor"
}

# What both tables of measurements begin with.
KEYS = [
    Column("variant"),
    Column("world", "GPUs"),
    Column("stages"),
    Column("batch"),
    Column("micro_batch", "micro-batch"),
    Column("n"),
]
SPEED = [
    Column("speed", "samples/s"),
    Column("step_ms", "step ms"),
    Column("efficiency", "efficiency by φ", percent),
    Column("goodput"),
    Column("strong", form=percent),
    Column("weak", form=percent),
    Column("reference", "one GPU"),
]
COSTS = [
    Column("step_ms", "step ms"),
    Column("busy_ms", "computes ms"),
    Column("exposed_ms", "communicates ms"),
    Column("bubble", form=percent),
    Column("bubble_formula", "by formula", percent),
    Column("unbalanced", "stages apart", percent),
    Column("gib", "peak GiB a GPU"),
    Column("apart", "ranks apart", percent),
    Column("allreduce_gbs", "all-reduce GB/s"),
    Column("gpu_busy", "GPU busy", percent),
]
# Columns of `scaling.scaling` whose intervals are written. All others would make the tables wide.
WITH_INTERVAL = ("speed", "strong", "weak")


# Tables.


def variants_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the variants that ran, in the order of the variants table.

    Columns: variant, "what it changes" and "what it is".
    """
    ran = set(runs["spec.variant"])
    lines = [(name, change(name), variant.why) for name, variant in VARIANTS.items() if name in ran]
    return pd.DataFrame(lines, columns=["variant", "what it changes", "what it is"])


def speed_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the speed and the efficiencies of each line of `scaling.scaling` as text.

    Columns: KEYS and SPEED, less those that have no value.

    Raises NotMeasured where no run of a variant for several GPUs has ended ok.
    """
    return _table(runs, SPEED)


def costs_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return what a GPU computes, waits and holds, of each line of `scaling.scaling`, as text.

    Columns: KEYS and COSTS, less those that have no value.

    Raises NotMeasured where no run of a variant for several GPUs has ended ok.
    """
    return _table(runs, COSTS)


def _table(runs: pd.DataFrame, columns: Sequence[Column]) -> pd.DataFrame:
    """Return KEYS and these columns of a group's lines as text, in the words of its hardware."""
    lines = scaling.scaling(runs)
    written = [f"{name}±" for name in WITH_INTERVAL]
    hidden = [name for name in lines if name.endswith("±") and name not in written]
    has_stages = lines["stages"] > 1
    lines = lines.drop(columns=hidden).assign(
        stages=lines["stages"].map(str).where(has_stages, MISSING),
        batch=lines["batch"].map("{:,}".format),
        gib=lines["peak_mib"] / 1024,
    )
    in_words = [
        dataclasses.replace(column, heading=worded(column.heading, runs))
        for column in [*KEYS, *columns]
    ]
    # One GPU is compared with no other, and its reference is an empty text.
    return render(lines, in_words).replace("", MISSING)


# Conclusions.


def conclusions(runs: pd.DataFrame, learnt: pd.DataFrame) -> str:
    """Return as Markdown three rules with our numbers, and what a training takes that keeps them.

    `runs` are those of a group of speeds, and `learnt` whole trainings at several batches.

    Raises NotMeasured where a number is missing.
    """
    lines = scaling.scaling(runs)
    whole, divided = quickest_of_each_kind(lines)
    pipeline = quickest_pipeline(lines)
    try:
        memory = f"{one_stack.memory_finding(runs)}."
    except NotMeasured:
        memory = _memory_of_one(pipeline, lines)
    worth, _ = noise_scale.batch_worth(noise_scale.logs_of(learnt))
    shares = [
        f"batch {batch} has {points(line['measured'], line['measured±'])} "
        f"({points(line['predicted'])} by φ)"
        for batch, line in worth.iterrows()
    ]
    projected = scaling.projection(runs)
    rules = [
        "- **Data parallelism first.** Where the model fits on one GPU, let each GPU have all of "
        "it and a part of\n"
        f"  the batch. On {whole['world']} GPUs with {whole['batch']} samples a step, "
        f"{whole['variant']} trains {number(whole['speed'])} samples/s,\n"
        f"  and {divided['variant']}, which divides the model, {number(divided['speed'])}: "
        f"{percent(whole['strong'])} and\n"
        f"  {percent(divided['strong'])} of what as many GPUs make alone.",
        "- **A pipeline is for a model that does not fit on one GPU**, or a way between the GPUs "
        "that is too slow for gradients.\n"
        f"  {memory} With {pipeline['variant']} at {pipeline['batch']} samples a GPU waits for "
        f"{percent(pipeline['bubble'])} of a step, {percent(pipeline['bubble_formula'])} by the "
        "formula.",
        "- **A larger batch keeps GPUs busy and learns less from each sample.** Where a batch of\n"
        f"  {REFERENCE} has efficiency 1, {', '.join(shares)}.",
        f"- **Together:** {scaling.projected_words(projected)} Each step takes "
        f"{projected['batch']} samples.",
    ]
    return "\n".join(rules)


def quickest_of_each_kind(lines: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Return the quickest line that has all of the model on each GPU, and that divides it.

    `lines` are those of `scaling.scaling`. Both are of one batch and of as many GPUs: the most that
    ran both kinds at one batch, and the smallest such batch.

    Raises NotMeasured where both kinds ran at no batch on as many GPUs.
    """
    timed = lines[lines["world"] > 1].dropna(subset=["speed"])
    timed = timed.assign(is_divided=timed["variant"].isin(DIVIDED))
    with_both = [
        part for _, part in timed.groupby(["batch", "world"]) if part["is_divided"].nunique() == 2
    ]
    if not with_both:
        raise NotMeasured(
            "no variant that divides the model ran on as many GPUs as one that does not, "
            "at one batch"
        )
    # Where several have the most GPUs, `max` takes the first, which has the smallest batch.
    part = max(with_both, key=lambda part: part["world"].iloc[0])
    whole = part[~part["is_divided"]]
    divided = part[part["is_divided"]]
    return whole.loc[whole["speed"].idxmax()], divided.loc[divided["speed"].idxmax()]


def quickest_pipeline(lines: pd.DataFrame) -> pd.Series:
    """Return the line of `scaling.scaling` of the quickest pipeline, on the fewest GPUs.

    Raises NotMeasured where no pipeline has both a speed and a peak of memory.
    """
    is_pipeline = lines["variant"].isin(PIPELINES) & (lines["world"] > 1)
    measured = lines[is_pipeline].dropna(subset=["speed", "peak_mib"])
    if measured.empty:
        raise NotMeasured("no pipeline has both a speed and a peak of memory")
    fewest = measured[measured["world"] == measured["world"].min()]
    return fewest.loc[fewest["speed"].idxmax()]


def _memory_of_one(pipeline: pd.Series, lines: pd.DataFrame) -> str:
    """Return the memory of a pipeline beside that of one GPU, where no more can be compared."""
    is_alone = (
        lines["variant"].eq(scaling.one_gpu(pipeline["variant"]))
        & lines["world"].eq(1)
        & lines["batch"].eq(pipeline["batch"])
    )
    alone_mib = lines.loc[is_alone, "peak_mib"].min()
    return (
        f"Neither was measured. This model fits: {pipeline['variant']} on {pipeline['world']} GPUs "
        f"peaks at {number(pipeline['peak_mib'] / 1024)} GiB a GPU, where one takes "
        f"{number(alone_mib / 1024)} for the same {pipeline['batch']} samples; stages hold several "
        "micro-batches at a time."
    )
