"""From runs to tables: means over seeds, ratios to the baseline, and their text.

Two forms go through this package: `runs`, the DataFrame of runs.load_runs(), a row a run; and `lines`, the DataFrame of
`summarise`, a row for each row of the variants table and cell (see runs.AXES), averaged over seeds. What was not
measured is NaN in both.
"""

import math
import textwrap
from collections import Counter
from collections.abc import Callable
from functools import wraps

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from qa_lib.report.runs import (
    AXES,
    AXIS_NAMES,
    BASELINE,
    TASK,
    ReportError,
    baseline,
    found_compiled,
    published,
    score_name,
    select,
    several,
    usual,
)
from qa_lib.report.text import MISSING, count, gain, markdown, number, points, share
from qa_lib.variants import BASELINES, VARIANTS

LEVEL = 90  # percent, of every interval: the test of equality by two one-sided tests is one of 90 %
MEASURES = {  # name in `lines` -> value of a record; beside them `score`, the one that the task names
    "samples_per_s": "speed.samples_per_s",
    "tokens_per_s_padded": "speed.tokens_per_s_padded",
    "step_ms": "time.step_ms.median",
    "step_p10_ms": "time.step_ms.p10",
    "step_p90_ms": "time.step_ms.p90",
    "data_ms": "time.data_ms",
    "busy": "speed.gpu_busy",
    "matrix_share": "speed.gemm_utilization",
    "peak_mib": "memory.peak_alloc_mib",
    "joules": "energy.joules_per_sample",
    "exact": "quality.exact",
    "trainable": "model.params_trainable",
    "params": "model.params_total",
    "compile_s": "time.compile_s",
    "train_s": "time.train_s",
    "wall_s": "time.wall_s",
}
# Dense TFLOP/s of fp16 and bf16 by NVIDIA's data sheets (H100 and H200: half of their 1,979 with sparsity), which MFU
# is a share of. Cards by PyTorch's name for them; the PCIe cards of a name clock lower and are left out.
DATA_SHEET_TFLOPS = {
    "NVIDIA H200": 989, "NVIDIA H100 80GB HBM3": 989, "NVIDIA A100-SXM4-80GB": 312, "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA L4": 121, "Tesla T4": 65,
}  # fmt: skip
WHOLE_RUN = ["compile_s", "train_s", "wall_s"]  # a resumed run timed only its last part


def change(variant: str, ancestor: str | None = None) -> str:
    """What a row changes, as its parent and the one setting: 'A1 + attention: sdpa'. Where an earlier `ancestor` is
    given, as that and every setting between them; of a task's baseline, that it is one."""
    row = VARIANTS.get(variant)
    if row is None:
        return MISSING
    if ancestor is None and variant in BASELINES.values():
        made = " + ".join(f"{key}: {value}" for key, value in row.change.items())
        return f"baseline ({row.parent} + {made})" if row.parent else "baseline"
    ancestor, changed = ancestor or row.parent, {}
    while row.name != ancestor:
        changed = row.change | changed  # what a later row sets counts
        row = VARIANTS[row.parent]
    before = VARIANTS[ancestor].settings
    told = [f"{key}: {value}" for key, value in changed.items() if value != getattr(before, key)]
    return " + ".join([ancestor, *told])


def place(variant: str) -> tuple[int, str]:
    """A key that sorts rows in the order of the variants table, unknown ones last."""
    return (list(VARIANTS).index(variant) if variant in VARIANTS else len(VARIANTS)), variant


def in_order(table: pd.DataFrame) -> pd.DataFrame:
    """A table indexed by row, in the order of the variants table."""
    return table.sort_index(key=lambda names: names.map(place))


def interval(values):
    """Half the width of the interval of the mean over seeds, at LEVEL, by Student's t; NaN below three values. Of a
    Series, of each column of a table, or of each group of a groupby. (`stdtrit` is the quantile of t, as
    scipy.stats.t.ppf, which takes longer to import.)"""
    n = values.count()
    half = stdtrit(np.maximum(n - 1, 1), 0.5 + LEVEL / 200) * values.std() / np.sqrt(np.maximum(n, 1))
    return half * np.where(n >= 3, 1.0, math.nan)


def once(function: Callable[[pd.DataFrame], pd.DataFrame]) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """Keeps what a function of a table gave last: a group's table, page, sentences and figures ask for the same one
    after another. By identity, so that nobody may change a table of runs in place."""
    last = (None, None)

    @wraps(function)
    def kept(table: pd.DataFrame) -> pd.DataFrame:
        nonlocal last
        if last[0] is not table:
            last = table, function(table)
        return last[1].copy()

    return kept


@once
def summarise(runs: pd.DataFrame) -> pd.DataFrame:
    """A group's runs, averaged over seeds, cell by cell in the order of the variants table: `lines`.

    Columns: AXES, TASK, variant, family, change, status, note, n (runs that ended ok) and, over these, each of MEASURES
    and `score` as the mean with `<name>±` beside it (see `interval`). Against the baseline of the same cell: ratio, of
    features/s, with `ratio±` over equal seeds where both rows have the same ones; delta, the score minus the
    baseline's, with `delta±` over the seeds that both have; break_even. Raises ReportError where no cell has one, but
    for a group that compares models or lengths of one row, and for one with rows for several GPUs, whose speed
    scaling.py compares.
    """
    first = baseline(runs)
    of_sizes = runs["spec.variant"].nunique() == 1 and len(runs[["model", "length"]].drop_duplicates()) > 1
    if _baseline(runs).empty and not of_sizes and not several(runs).any():
        sizes = ", ".join(map(str, sorted(set(runs["micro_batch"]))))
        found = ", ".join(Counter(runs.loc[runs["spec.variant"] == first, "status"]))
        raise ReportError(
            f"group {runs['group'].iloc[0]!r}, micro-batch {sizes}: the baseline {first} "
            f"{f'is {found}' if found else 'has no record'}, and every ratio needs it"
        )
    # Whole columns at a time: pandas takes as long for a row of two seeds as for all rows together.
    cell = runs.groupby(AXIS_NAMES, dropna=False).ngroup().rename("cell")
    values = _measured(runs, cell)
    base = values[values.index.get_level_values("row") == first].droplevel("row")
    same_seed = base.reindex(values.index.droplevel("row")).set_axis(values.index)
    values["delta"] = values["score"] - same_seed["score"]
    values["ratio"] = values["samples_per_s"] / same_seed["samples_per_s"]
    values["paired"] = values.index.droplevel("row").isin(base.index).astype(float)
    rows = values.groupby(level=["cell", "row"])
    means, halves, n = rows.mean(), interval(rows).add_suffix("±"), rows.size()
    of_base = base.groupby(level="cell")
    base_means = of_base.mean().reindex(means.index, level="cell")
    base_n = of_base.size().reindex(n.index, level="cell")
    means["warm_compile_s"] = rows["warm_compile_s"].max()  # the least that compilation takes without a cache
    means["ratio"] = means["samples_per_s"] / base_means["samples_per_s"]
    means["break_even"] = _break_even(means, base_means)
    halves["ratio±"] = halves["ratio±"].where((means["paired"] == 1) & (n == base_n))
    halves.loc[halves.index.get_level_values("row") == first, ["ratio±", "delta±"]] = math.nan

    lines = _described(runs, cell)
    numbers = pd.concat([means, halves], axis=1).drop(columns=["paired", "paired±"])
    return lines.assign(n=n.reindex(lines.index, fill_value=0)).join(numbers).reset_index(drop=True)


def _described(runs: pd.DataFrame, cell: pd.Series) -> pd.DataFrame:
    """The columns of `lines` that are words, and those of AXES and TASK; indexed by cell and row, in table order."""
    columns = ["status", "error.message", "error.step", "time.resumed_from_step", "spec.seed"]
    members = {}
    for key, run in zip(zip(cell, runs["spec.variant"], strict=True), runs[columns].to_dict("records"), strict=True):
        members.setdefault(key, []).append(run)
    heads = runs[[*AXIS_NAMES, *TASK]].set_axis(cell)
    heads = heads[~heads.index.duplicated()].to_dict("index")
    with_base = set(cell if several(runs).any() else cell[_baseline(runs).index])
    alone = f"no ratio, since {baseline(runs)} has no result under these conditions"
    keys = sorted(members, key=lambda key: (key[0], place(key[1])))
    lines = [
        heads[number]
        | {
            "variant": variant,
            "family": variant[0],
            "change": change(variant),
            "status": _status(members[number, variant]),
            "note": "; ".join(filter(None, [_note(members[number, variant]), "" if number in with_base else alone])),
        }
        for number, variant in keys
    ]
    return pd.DataFrame(lines, index=pd.MultiIndex.from_tuples(keys, names=["cell", "row"]))


def _baseline(runs: pd.DataFrame) -> pd.DataFrame:
    """The baseline's runs that have a result. That it does not fit into memory is one: ratios are unknown then."""
    return runs[(runs["spec.variant"] == baseline(runs)) & runs["status"].isin(["ok", "oom"])]


def _measured(runs: pd.DataFrame, cell: pd.Series) -> pd.DataFrame:
    """MEASURES and `score` of the runs that ended ok, as floats, indexed by cell, row and seed; compile_s of runs that
    found nothing compiled, warm_compile_s of the others, and mfu by the card's data sheet."""
    metric = runs["task.metric"].iloc[0]
    runs = runs[runs["status"] == "ok"]
    values = runs.reindex(columns=[*MEASURES.values(), f"quality.{metric}"]).set_axis([*MEASURES, "score"], axis=1)
    values = values.astype(float)
    half = runs["spec.settings.precision"] != "fp32"
    peak = runs["env.gpu"].map(DATA_SHEET_TFLOPS).astype(float).where(half)
    values["mfu"] = values["matrix_share"] * runs["speed.gemm_tflops_measured"].astype(float) / peak
    values.loc[runs["time.resumed_from_step"].notna(), WHOLE_RUN] = math.nan
    # What an earlier run has compiled is not this row's price.
    cached = found_compiled(runs)
    values["warm_compile_s"] = values["compile_s"].where(cached)
    values["compile_s"] = values["compile_s"].mask(cached)
    return values.set_index([cell[runs.index], runs["spec.variant"].rename("row"), runs["spec.seed"]])


def _break_even(rows: pd.DataFrame, base: pd.DataFrame) -> pd.Series:
    """Optimizer steps after which each row has made up for its compilation against the baseline; inf if it never
    does."""
    saved = (base["step_ms"] - rows["step_ms"]) / 1e3
    steps = (rows["compile_s"] / saved).mask(saved <= 0, math.inf)
    return steps.where(rows["compile_s"].notna())


def _status(runs: list[dict]) -> str:
    counts = Counter(run["status"] for run in runs)
    return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{n} {name}" for name, n in counts.items())


def _note(runs: list[dict]) -> str:
    """Why a row's runs did not end ok, and which were resumed."""
    reasons = {}
    for run in runs:
        if run["status"] != "ok":
            message = run["error.message"] if pd.notna(run["error.message"]) else "not finished"
            text = textwrap.shorten(f"{run['status']}: {message}", 140, placeholder=" …")
            if pd.notna(run["error.step"]):
                text += f" (after step {run['error.step']:.0f})"
        elif pd.notna(run["time.resumed_from_step"]):
            text = f"resumed at step {run['time.resumed_from_step']:.0f}, so no time of the whole run"
        else:
            continue
        reasons.setdefault(text, []).append(str(run["spec.seed"]))
    return "; ".join(
        text if len(seeds) == len(runs) else f"seed {', '.join(seeds)} {text}" for text, seeds in reasons.items()
    )


def _step(line: dict) -> str:
    if pd.isna(line["step_ms"]):
        return MISSING
    return f"{number(line['step_ms'])} [{number(line['step_p10_ms'])}–{number(line['step_p90_ms'])}]"


def _text_speed(line: dict) -> str:
    """What a language model's speed is told in; of questions, tokens are half padding."""
    return number(line["tokens_per_s_padded"], line["tokens_per_s_padded±"]) if line["task.name"] == "lm" else MISSING


COLUMNS = {  # heading, in which {score} stands for the score's label and {base} for the baseline -> text of a line
    "row": lambda line: line["variant"],
    "what it changes": lambda line: line["change"],
    **{axis.label: lambda line, name=axis.name: str(line[name]) for axis in AXES},
    "status": lambda line: line["status"],
    "n": lambda line: str(line["n"]),
    "features/s": lambda line: number(line["samples_per_s"], line["samples_per_s±"]),
    "tokens/s": _text_speed,
    "× {base}": lambda line: number(line["ratio"], line["ratio±"]),
    "step ms [p10–p90]": _step,
    "waits for data, at most": lambda line: share(line["data_ms"] / line["step_ms"]),
    "GPU busy": lambda line: share(line["busy"]),
    "of matrix rate": lambda line: share(line["matrix_share"]),
    "MFU": lambda line: share(line["mfu"]),
    "peak MiB": lambda line: number(line["peak_mib"]),
    "J/feature": lambda line: number(line["joules"]),
    "exact": lambda line: points(line["exact"], line["exact±"]),
    "{score}": lambda line: points(line["score"], line["score±"]),
    "Δ{score} vs {base}": lambda line: gain(line["delta"], line["delta±"]),
    "trainable": lambda line: count(line["trainable"]),
    "compile s": lambda line: number(line["compile_s"]),
    "break-even step": lambda line: "never" if line["break_even"] == math.inf else number(line["break_even"]),
    "wall s": lambda line: number(line["wall_s"]),
    "note": lambda line: line["note"] or MISSING,
}


AXIS_LABELS = tuple(axis.label for axis in AXES)
# Headings of two tables of a page's width, which all of them together would overflow.
SPEED = ("row", "what it changes", "trainable", *AXIS_LABELS, "status", "n", "features/s", "tokens/s", "× {base}",
         "step ms [p10–p90]", "note")  # fmt: skip
COSTS = ("row", *AXIS_LABELS, "waits for data, at most", "GPU busy", "of matrix rate", "MFU", "peak MiB", "J/feature",
         "compile s", "break-even step")  # fmt: skip


def result_table(lines: pd.DataFrame, headings=tuple(COLUMNS)) -> pd.DataFrame:
    """`lines` as text under these of COLUMNS; without those that say nothing: no value, an axis at one, all ok."""
    table = pd.DataFrame([{name: COLUMNS[name](line) for name in headings} for line in lines.to_dict("records")])
    constant = [axis.label for axis in AXES if lines[axis.name].nunique(dropna=False) == 1]
    if lines["status"].eq("ok").all():
        constant.append("status")
    table = table.drop(columns=constant, errors="ignore")
    names = {"score": score_name(lines), "base": baseline(lines)}
    return table.loc[:, (table != MISSING).any()].rename(columns=lambda name: name.format(**names))


def family_lines(lines: pd.DataFrame, family: str) -> pd.DataFrame:
    """A family's lines and above them, to compare with, the baseline and those that the family's rows change."""
    rows = set(lines.loc[lines["family"] == family, "variant"])
    parents = {VARIANTS[name].parent for name in rows if name in VARIANTS}
    return lines[lines["variant"].isin(rows | parents | {baseline(lines)})] if rows else lines[:0]


def family_table(runs: pd.DataFrame, group: str, variant: str) -> str:
    """For a notebook: the finished rows of a variant's family in its group, as Markdown; or why there is no table. Only
    of the model, length and training that the variant's newest run had: a search or a scaling group has many."""
    try:
        chosen = select(runs, group)
        lines = summarise(chosen)
    except ReportError as problem:
        return f"*No table yet: {problem}.*"
    for axis in ("model", "length", "training"):
        own = chosen.loc[chosen["spec.variant"] == variant, axis].tail(1)  # select has sorted by time
        lines = lines[lines[axis].isin(own)] if len(own) else lines
    return markdown(result_table(family_lines(lines, VARIANTS[variant].family)))


def published_table(lines: pd.DataFrame) -> pd.DataFrame:
    """The seeds' published T4 numbers, and beside their ratios ours at each micro-batch, each against its own A1;
    without rows for another task than theirs."""
    if lines["task.name"].iloc[0] != "qa":
        return lines[:0]
    theirs = published()
    table = pd.DataFrame({
        "T4: samples/s": theirs["samples_per_s"].map(number),
        "T4: F1": theirs["score"].map(points),
        "T4: ΔF1": theirs["delta"].map(gain),
        f"T4: × {BASELINE}": theirs["ratio"].map(number),
    })  # fmt: skip
    for size, part in usual(lines).groupby("micro_batch"):
        ours = part.set_index("variant")["ratio"].reindex(theirs.index)
        table[f"ours at micro-batch {size}: × {BASELINE}"] = ours.map(number)
    return table.reset_index()


def cost_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Seconds of a run that found nothing compiled, the mean of each row's, by part; without resumed runs.

    By row in table order: preparing, compiling, training, scoring, wall; n.
    """
    whole = runs[runs["time.wall_s"].notna() & runs["time.resumed_from_step"].isna()]
    whole = whole[~found_compiled(whole)]
    parts = {"preparing": "prepare", "compiling": "compile", "training": "train", "scoring": "eval", "wall": "wall"}
    seconds = pd.DataFrame({part: whole[f"time.{name}_s"].astype(float).fillna(0.0) for part, name in parts.items()})
    seconds["training"] -= seconds["compiling"]
    rows = seconds.groupby(whole["spec.variant"])
    return in_order(rows.mean().assign(n=rows.size()))
