"""Pipelines beside data parallelism of one stack at one batch (notebooks/multi_gpu.ipynb).

A student's slides (slides.csv) say that pipelines train faster than data parallelism. To judge it,
both have to train the same model by the same code on as many samples a step, on as many GPUs. Such
variants have one ancestor that shares nothing (`scaling.one_gpu`): pipelines and P-ddp have
E-masters-eager. Each is taken at the micro-batch at which it is quickest, since the best one for a
pipeline is not that of data parallelism.

A GPU of a pipeline that waits for its neighbour is busy by NVML, as the kernel runs that waits.
What a GPU computes is told beside it.
"""

import contextlib
import math
from pathlib import Path
from typing import get_args

import pandas as pd
from matplotlib.figure import Figure

from qa_lib.lab.report import evidence, scaling, style
from qa_lib.lab.report.claims import CANNOT_TELL, NEAR, Found, all_of, judge_by_value
from qa_lib.lab.report.format import MISSING, factor, number, percent
from qa_lib.lab.report.stats import LEAST_SEEDS, interval
from qa_lib.lab.report.tables import Column, render
from qa_lib.spec.settings import DataParallel
from qa_lib.spec.variants import VARIANTS

SLIDES = Path(__file__).with_name("slides.csv")
LAST_STEPS = 20  # of a training, whose mean loss tells what it has learnt
PLACE = ["world", "batch"]  # where variants are compared
CLAIM = "pipelines train faster"
NOTHING = "no data parallelism and pipeline of one stack ran on as many GPUs at one batch"


def theirs() -> pd.DataFrame:
    """Return the slides' numbers, a line an experiment."""
    return pd.read_csv(SLIDES, comment="#")


def kind_of(variant: str) -> str | None:
    """Return whether a variant is "pipeline" or "data parallelism", None for any other."""
    parallel = VARIANTS[variant].settings.parallel
    if parallel == "pipeline":
        return parallel
    return "data parallelism" if parallel in get_args(DataParallel) else None


# What was measured.


def side_by_side(runs: pd.DataFrame) -> pd.DataFrame:
    """Return pipelines and the data parallelism of their stack, where both ran at one PLACE.

    Pipelines go through all GPUs of their run. There is a line for the quickest micro-batch of each
    variant, sorted by PLACE and in the order of the variants table. Columns are those of
    `scaling.scaling`, and

    - kind: what `kind_of` returns
    - loss and loss±: the mean over the last LAST_STEPS steps, after equally many samples
    - computes: the share of a step in which a GPU computes, as `scaling.shares_of` has it
    - gain and gain±: samples/s over those of the quickest data parallelism there, over equal seeds
    - over_one and over_one±: samples/s over those of one GPU at this batch
    - memory: the peak over that of the leanest data parallelism there at the same micro-batch

    Raises NotMeasured where there is no PLACE that has both.
    """
    runs = _of_pipelines_stack(runs)
    if runs.empty:
        raise evidence.NotMeasured(NOTHING)
    values = scaling.by_seed(runs)
    lines = scaling.scaling(runs)
    is_whole = (lines["stages"] == 1) | (lines["stages"] == lines["world"])
    lines = lines[is_whole & (lines["world"] > 1)]
    lines = lines.assign(kind=lines["variant"].map(kind_of)).dropna(subset=["kind", "speed"])
    places = [part for _, part in lines.groupby(PLACE) if part["kind"].nunique() == 2]
    if not places:
        raise evidence.NotMeasured(NOTHING)
    losses = _losses(runs, values)
    table = pd.concat([_at_place(part, values, losses) for part in places])
    table["over_one"] = table["strong"] * table["world"]
    table["over_one±"] = table["strong±"] * table["world"]
    table = table.reset_index(drop=True)
    return table.assign(computes=scaling.shares_of(table)["computing"])


def _of_pipelines_stack(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs of the stack that pipelines have, on one GPU and on several."""
    known = runs[runs["spec.variant"].isin(VARIANTS)]
    stacks = known["spec.variant"].map(scaling.one_gpu)
    is_pipeline = known["spec.variant"].map(kind_of) == "pipeline"
    return known[stacks.isin(stacks[is_pipeline])]


def _losses(runs: pd.DataFrame, values: pd.DataFrame) -> pd.Series:
    """Return the loss after each run's last steps, by KEYS and seed; NaN without a log."""
    last = {}
    for run_id, run in zip(runs["run_id"], runs["run"], strict=True):
        if run_id in set(values["run_id"]):
            last[run_id] = run.steps().dropna(subset="loss")["loss"].tail(LAST_STEPS).mean()
    return values["run_id"].map(last).astype(float)


def _at_place(part: pd.DataFrame, values: pd.DataFrame, losses: pd.Series) -> pd.DataFrame:
    """Return the lines of `side_by_side` of one place, from all its lines."""
    whole = part[part["kind"] == "data parallelism"]
    leanest = whole.groupby("micro_batch")["peak_mib"].min()
    quickest = part.loc[sorted(part.groupby("variant")["speed"].idxmax())]
    base = _of_line(values["speed"], whole.loc[whole["speed"].idxmax()])
    columns = []
    for _, line in quickest.iterrows():
        own = _of_line(values["speed"], line)
        loss = _of_line(losses, line)
        has_equal_seeds = own.index.equals(base.index)
        columns.append({
            "loss": loss.mean(),
            "loss±": float(interval(loss)),
            "gain": own.mean() / base.mean(),
            "gain±": float(interval(own / base)) if has_equal_seeds else math.nan,
            "memory": line["peak_mib"] / leanest.get(line["micro_batch"], math.nan),
        })  # fmt: skip
    return quickest.join(pd.DataFrame(columns, index=quickest.index))


def _of_line(values: pd.Series, line: pd.Series) -> pd.Series:
    """Return the values of a line by seed."""
    return values.loc[tuple(line[scaling.KEYS])]


# The table and the picture.

COLUMNS = [
    Column("world", "GPUs"),
    Column("batch"),
    Column("variant"),
    Column("micro_batch", "micro-batch"),
    Column("n"),
    Column("speed", "samples/s"),
    Column("gain", "× data parallelism"),
    Column("over_one", "× one GPU"),
    Column("gib", "peak GiB a GPU"),
    Column("memory", "× its memory"),
    Column("computes", "computes", percent),
    Column("bubble", form=percent),
    Column("bubble_formula", "by formula", percent),
    Column("gpu_busy", "GPU busy", percent),
    Column("loss"),
]


def table_of(runs: pd.DataFrame) -> pd.DataFrame:
    """Return `side_by_side` as text."""
    lines = side_by_side(runs)
    lines = lines.assign(gib=lines["peak_mib"] / 1024)
    own = [column.name for column in COLUMNS]
    intervals = [f"{name}±" for name in ("speed", "gain", "over_one", "loss")]
    return render(lines[[*own, *intervals]], COLUMNS).replace("", MISSING)


def finding(lines: pd.DataFrame) -> str:
    """Return how much quicker the quickest pipeline is, on the most GPUs at the largest batch."""
    last = lines.groupby(PLACE).ngroup().max()
    part = lines[lines.groupby(PLACE).ngroup() == last]
    pipeline = _quickest_pipeline(part)
    base = part[part["kind"] == "data parallelism"].sort_values("speed").iloc[-1]
    return (
        f"On {base['world']} GPUs at batch {base['batch']:,} {pipeline['variant']} trains "
        f"{factor(pipeline['gain'])} as fast as {base['variant']}"
    )


def _quickest_pipeline(part: pd.DataFrame) -> pd.Series:
    """Return the line of the quickest pipeline of a place."""
    return part[part["kind"] == "pipeline"].sort_values("speed").iloc[-1]


def fig_pipelines(runs: pd.DataFrame) -> Figure:
    """Draw samples/s, what a GPU computes, and peak memory of the lines of `side_by_side`.

    Raises NotMeasured where there are none.
    """
    lines = side_by_side(runs)
    notes = ["Each at its quickest micro-batch; n: runs", style.code(evidence.commits(runs))]
    if lines["n"].min() < LEAST_SEEDS:
        notes.insert(1, f"Fewer than {LEAST_SEEDS} have no interval")
    height = 1.4 + 0.25 * len(lines)
    title = scaling.worded(finding(lines), runs)
    figure = style.group_figure(runs, title, ". ".join(notes), height)
    panels = {
        "samples/s": lines["speed"],
        "% of a step computing": 100 * lines["computes"],
        "peak GiB of a GPU": lines["peak_mib"] / 1024,
    }
    colors = style.kinds(lines["variant"], evidence.baseline(runs)).map(style.KINDS)
    axes = figure.subplots(1, len(panels))
    for axis, (name, values) in zip(axes, panels.items(), strict=True):
        axis.barh(lines.index, values.fillna(0.0), color=colors, height=0.7)
        style.name_bars(axis, [""] * len(lines))
        style.columns(axis, {"": values.map(number)})
        axis.set(xlabel=scaling.worded(name, runs), xlim=(0, None))
    names = [
        f"{line.variant}, {line.world} GPUs, batch {line.batch:,}, n = {line.n}"
        for line in lines.itertuples()
    ]
    style.name_bars(axes[0], [scaling.worded(name, runs) for name in names])
    return figure


# The verdict.


def speed_claims(runs: pd.DataFrame) -> list[tuple[str, str, str, Found]]:
    """Return the slides' claim on speed, as (claim, part of it, theirs, found), a line a part.

    Theirs are samples/s over those of their first line. That counts one GPU of four, so that ours
    are told over data parallelism on as many GPUs, and over one GPU. A part holds where ours is
    within NEAR of theirs at every batch that was measured.
    """
    try:
        lines = side_by_side(runs)
    except evidence.NotMeasured:
        lines = None
    base, *rest = theirs().to_dict("records")
    claims = []
    for over, column in (("data parallelism on as many", "gain"), ("one GPU", "over_one")):
        for experiment in rest:
            world = experiment["gpus"]
            ratio = experiment["samples_per_s"] / base["samples_per_s"]
            found = Found(NOTHING, CANNOT_TELL)
            if lines is not None:
                found = _judged_speed(lines[lines["world"] == world], column, ratio)
            claims.append((CLAIM, f"{world} GPUs, over {over}", factor(ratio), found))
    return claims


def _judged_speed(lines: pd.DataFrame, column: str, ratio: float) -> Found:
    """Return whether the quickest pipeline at each batch gains as much as theirs, by a column."""
    words = []
    signs = []
    for batch, part in lines.groupby("batch"):
        pipeline = _quickest_pipeline(part)
        value = pipeline[column]
        half = pipeline[f"{column}±"]
        gained = MISSING if math.isnan(value) else f"×{number(value, half)}"
        words.append(f"{pipeline['variant']} {gained} at batch {batch:,}")
        signs.append(judge_by_value(value, (1 - NEAR) * ratio, (1 + NEAR) * ratio, half))
    return Found(", ".join(words), all_of(signs)) if words else Found(NOTHING, CANNOT_TELL)


def memory_finding(runs: pd.DataFrame) -> str:
    """Return how much memory a pipeline saves, for the model and the batch at which it saves most.

    It is compared with data parallelism at the same micro-batch. Raises NotMeasured where both ran
    at none.
    """
    lines = []
    for model, part in runs.groupby("model"):
        with contextlib.suppress(evidence.NotMeasured):
            lines.append(side_by_side(part).assign(model=model))
    told = pd.concat(lines).dropna(subset="memory") if lines else pd.DataFrame({"kind": []})
    told = told[told["kind"] == "pipeline"]
    if told.empty:
        raise evidence.NotMeasured("no pipeline ran at a micro-batch of data parallelism")
    line = told.loc[told["memory"] == told["memory"].min()].iloc[0]
    gib = line["peak_mib"] / 1024
    return (
        f"{line['variant']} on {line['world']} GPUs takes {number(gib)} GiB a GPU at batch "
        f"{line['batch']:,} and micro-batch {line['micro_batch']}, and data parallelism "
        f"{number(gib / line['memory'])} (model: {line['model']})"
    )
