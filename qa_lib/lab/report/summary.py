"""From runs to lines: means over seeds with their intervals, ratios to the baseline, and a table.

`average` is the one place where seeds are averaged. `summary` uses it for a group's variants;
scaling.py and the notebooks use it for what they compare. What was not measured is NaN.
"""

import math
import textwrap
from collections.abc import Iterable, Sequence

import pandas as pd

from qa_lib.errors import printable
from qa_lib.lab.report.evidence import (
    AXES,
    TASK,
    baseline,
    found_compiled,
    in_table_order,
    numbers,
    sittings,
)
from qa_lib.lab.report.facts import cards
from qa_lib.lab.report.format import MISSING, count, gain, number, percent, points
from qa_lib.lab.report.stats import interval
from qa_lib.lab.report.tables import Column, render
from qa_lib.spec.variants import BASELINES, VARIANTS

# What `summary` averages over seeds: its name there -> the column of runs.
MEASURES = {
    "samples_per_s": "speed.samples_per_s",
    "tokens_per_s": "speed.tokens_per_s",
    "data_ms": "time.data_ms",
    "step_ms": "time.step_ms.median",
    "step_p10_ms": "time.step_ms.p10",
    "step_p90_ms": "time.step_ms.p90",
    "kernel_ms": "time.kernel_ms",
    "busy": "speed.gpu_busy",
    "gemm_utilization": "speed.gemm_utilization",
    "joules": "energy.joules_per_sample",
    "peak_mib": "memory.peak_alloc_mib",
    "reserved_mib": "memory.peak_reserved_mib",
    "trainable": "model.params_trainable",
    "compile_s": "time.compile_s",
    "wall_s": "time.wall_s",
}

# PyTorch's name of a card -> the TFLOP/s of its data sheet, which MFU is a share of.
DATA_SHEET_TFLOPS = cards().dropna(subset="gpu").set_index("gpu")["tflops"]

NOTE_LETTERS = 140  # of a run's error in a table, at most
# Columns of runs that the note on a variant is made of.
OF_NOTE = ["status", "error.message", "time.resumed_from_step", "spec.seed"]


def average(values: pd.DataFrame, keys: Iterable) -> pd.DataFrame:
    """Return the mean over seeds of each column of `values`, half its interval as `NAME±`, and n.

    `keys` tell lines apart, and index the result: names of columns or index levels, or Series, as
    groupby takes them. n is the number of rows behind a line.
    """
    groups = values.groupby(list(keys), dropna=False, sort=False)
    return groups.mean().join(interval(groups).add_suffix("±")).assign(n=groups.size())


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a group's runs averaged over seeds: a line for each variant and value of the AXES.

    Lines with the same values of the AXES stand together, sorted by these, and among them those of
    variants are in the order of the variants table. Columns:

    - variant, AXES, TASK, family, change, status, note
    - n: runs that ended ok; the columns below are means over them
    - those of MEASURES, mfu and score, each with its interval `NAME±`
    - sittings: the set of those in which it was timed
    - ratio: samples/s over the baseline's under the same values of the AXES, with `ratio±` where
      the baseline has run with all of the line's seeds; NaN where they share no sitting
    - kernel_ratio: the baseline's kernel time of a step over the line's, for steps of as many
      samples; NaN where one of them has none, or where they share no sitting
    - delta: the score minus the baseline's over the seeds that both have, with `delta±`
    - warm_compile_s: the longest compilation of the runs that found code compiled
    - break_even: optimizer steps after which compilation is made up for, inf if never; NaN where
      ratio is
    """
    runs = runs.assign(
        # numbers the values of the axes, among which nothing is compared
        cell=runs.groupby([*AXES], dropna=False).ngroup(),
        variant=runs["spec.variant"],
    )
    measured = _averaged(runs[runs["status"] == "ok"], baseline(runs))
    lines = _described(runs).join(measured).fillna({"n": 0}).astype({"n": int})
    lines = in_table_order(lines.reset_index("cell")).sort_values("cell", kind="stable")
    return lines.drop(columns="cell").reset_index()


def _averaged(done: pd.DataFrame, base_name: str) -> pd.DataFrame:
    """Return the columns of `summary` that are numbers, indexed by cell and variant.

    `done` are the runs that ended ok, and `base_name` is the baseline.
    """
    of_line = ["cell", "variant"]
    keys = pd.MultiIndex.from_frame(done[[*of_line, "spec.seed"]])
    values = _measured(done).set_index(keys)
    is_base = values.index.get_level_values("variant") == base_name
    base = values[is_base].droplevel("variant")

    same_seed = base.reindex(values.index.droplevel("variant")).set_axis(values.index)
    values["delta"] = values["score"] - same_seed["score"]
    values["ratio_of_seed"] = values["samples_per_s"] / same_seed["samples_per_s"]
    base_has_seed = pd.Series(values.index.droplevel("variant").isin(base.index), values.index)

    lines = average(values, of_line)
    timed_in = sittings(done, of_line).to_dict()
    lines["sittings"] = [timed_in.get(line, frozenset()) for line in lines.index]
    is_apart = [
        own.isdisjoint(timed_in.get((cell, base_name), ()))
        for (cell, _), own in lines["sittings"].items()
    ]
    base_lines = average(base, ["cell"]).reindex(lines.index, level="cell")
    base_lines.loc[is_apart] = math.nan
    lines["ratio"] = lines["samples_per_s"] / base_lines["samples_per_s"]
    # The ratio is of means over all seeds, but its interval is that of the ratios of equal seeds,
    # and would be of fewer runs than the ratio where the baseline lacks one of the seeds.
    base_has_all_seeds = base_has_seed.groupby(level=of_line).all()
    lines["ratio±"] = lines["ratio_of_seed±"].where(base_has_all_seeds & lines["ratio"].notna())
    lines["kernel_ratio"] = base_lines["kernel_ms"] / lines["kernel_ms"]
    # The baseline against itself is 1 and 0 in every run, which is no measurement.
    is_base_line = lines.index.get_level_values("variant") == base_name
    lines.loc[is_base_line, ["ratio±", "delta±"]] = math.nan

    # Not the mean: the longest compilation is that of the run which found the least compiled.
    lines["warm_compile_s"] = values["warm_compile_s"].groupby(level=of_line).max()
    lines["break_even"] = _break_even(lines, base_lines)
    return lines.drop(columns=["ratio_of_seed", "ratio_of_seed±"])


def _break_even(lines: pd.DataFrame, base_lines: pd.DataFrame) -> pd.Series:
    """Return the optimizer steps after which quicker steps have made up for a line's compilation.

    `base_lines` has the baseline's line for each of `lines`. The steps are inf for a line that is
    no quicker than the baseline, and NaN for one without a compilation or without step times.
    """
    saved_s = (base_lines["step_ms"] - lines["step_ms"]) / 1e3
    steps = (lines["compile_s"] / saved_s).mask(saved_s <= 0, math.inf)
    return steps.where(lines["compile_s"].notna())


def _measured(runs: pd.DataFrame) -> pd.DataFrame:
    """Return MEASURES, score, mfu and warm_compile_s of runs that ended ok, a row for each.

    The seconds of compilation stand in one of two columns: in compile_s for a run that compiled
    all by itself, and in warm_compile_s for one that found what an earlier run had compiled. A run
    that was resumed has neither, and no wall_s: its times are of its last part alone.
    """
    metric = f"quality.{runs['task.metric'].iloc[0]}" if len(runs) else "quality.f1"
    values = numbers(runs, MEASURES | {"score": metric})
    peak_tflops = runs["env.gpu"].map(DATA_SHEET_TFLOPS).astype(float)
    # The data sheet's number is of 16-bit types.
    peak_tflops = peak_tflops.where(runs["spec.settings.precision"] != "fp32")
    gemm_tflops = runs["speed.gemm_tflops_measured"].astype(float)
    values["mfu"] = values["gemm_utilization"] * gemm_tflops / peak_tflops
    values.loc[runs["time.resumed_from_step"].notna(), ["compile_s", "wall_s"]] = math.nan
    is_warm = found_compiled(runs)
    values["warm_compile_s"] = values["compile_s"].where(is_warm)
    values["compile_s"] = values["compile_s"].mask(is_warm)
    return values


def _described(runs: pd.DataFrame) -> pd.DataFrame:
    """Return AXES, TASK and the words of `summary`, indexed by cell and variant.

    The words are the columns family, change, status and note.
    """
    keys = ["cell", "variant"]
    described = runs.drop_duplicates(keys).set_index(keys)[[*AXES, *TASK]]
    # Each part is a copy, so that the hundreds of columns which no word needs are dropped first.
    parts = [part for _, part in runs[[*keys, *OF_NOTE]].groupby(keys, sort=False)]
    names = described.index.get_level_values("variant")
    return described.assign(
        family=names.str[0],
        change=names.map(change),
        status=[_status(part) for part in parts],
        note=[_note(part) for part in parts],
    )


def _status(runs: pd.DataFrame) -> str:
    """Return how a variant's runs ended: 'ok' where all did, else '2 ok, 1 error'."""
    counts = runs["status"].value_counts(sort=False)
    if len(counts) == 1:
        return counts.index[0]
    return ", ".join(f"{n} {status}" for status, n in counts.items())


def _note(runs: pd.DataFrame) -> str:
    """Return why some of a variant's runs did not end ok, and which were resumed."""
    seeds_of: dict[str, list[str]] = {}
    for status, message, resumed, seed in runs[OF_NOTE].itertuples(index=False, name=None):
        if status != "ok":
            text = f"{status}: {'not finished' if pd.isna(message) else message}"
            text = textwrap.shorten(printable(text), NOTE_LETTERS, placeholder=" …")
        elif pd.notna(resumed):
            text = f"resumed at step {resumed:.0f}, so no time of the whole run"
        else:
            continue
        seeds_of.setdefault(text, []).append(str(seed))
    notes = []
    for text, seeds in seeds_of.items():
        is_of_all = len(seeds) == len(runs)
        notes.append(text if is_of_all else f"seed {', '.join(seeds)} {text}")
    return "; ".join(notes)


def change(variant: str, ancestor: str | None = None) -> str:
    """Return in words how a variant differs from its `ancestor`, which is its parent unless given.

    The words are the ancestor and the settings that differ: 'A1 + attention: sdpa'. A task's
    baseline is marked as such: 'baseline', or 'baseline (A1 + precision: fp32)' where it has a
    parent. The words are '–' for a variant that is unknown, as in records of other code.
    """
    if variant not in VARIANTS:
        return MISSING
    parent = VARIANTS[variant].parent
    if parent is None:
        return "baseline"
    ancestor = ancestor or parent
    text = " + ".join([ancestor, *_settings_changed(variant, ancestor)])
    return f"baseline ({text})" if variant in BASELINES.values() else text


def _settings_changed(variant: str, ancestor: str) -> list[str]:
    """Return the settings in which a variant differs from an ancestor, each as 'NAME: VALUE'.

    They come in the order in which the variants between the two set them first.
    """
    changed = {}
    name = variant
    while name != ancestor:
        changed = VARIANTS[name].change | changed  # what a later variant sets counts
        name = VARIANTS[name].parent
    before = VARIANTS[ancestor].settings
    return [
        f"{setting}: {value}"
        for setting, value in changed.items()
        if value != getattr(before, setting)
    ]


def columns(score: str, base: str) -> list[Column]:
    """Return the columns that `result_table` can show, in a table's order.

    `score` is the name of the task's score, and `base` the baseline.
    """
    return [
        Column("variant"),
        Column("change", "what it changes"),
        *(Column(name, heading) for name, heading in AXES.items()),
        Column("status"),
        Column("n"),
        Column("samples_per_s", "samples/s"),
        Column("tokens_per_s", "tokens/s"),
        Column("ratio", f"× {base}"),
        Column("step", "step ms [p10–p90]"),
        Column("kernel_ms", "kernel ms", interval=False),
        Column("kernel_ratio", f"× {base} by kernels"),
        Column("waits", "waits for data, at most", percent),
        Column("busy", "GPU busy", percent, interval=False),
        Column("gemm_utilization", "GEMM utilization", percent, interval=False),
        Column("mfu", "MFU", percent, interval=False),
        Column("peak_mib", "peak MiB", interval=False),
        Column("joules", "J/sample", interval=False),
        Column("score", score, points),
        Column("delta", f"Δ{score} vs {base}", gain),
        Column("trainable", "trainable", count, interval=False),
        Column("compile_s", "compile s", interval=False),
        Column("break_even", "break-even step"),
        Column("wall_s", "wall s", interval=False),
        Column("note"),
    ]


def result_table(lines: pd.DataFrame, names: Sequence[str] = ()) -> pd.DataFrame:
    """Return lines of `summary` as a table of text with the columns of these names, or with all.

    The names are those of `columns`. Columns that say nothing are left out: no value, an axis with
    one value, a status that is ok throughout.
    """
    constant = [name for name in AXES if lines[name].nunique(dropna=False) == 1]
    if lines["status"].eq("ok").all():
        constant.append("status")
    is_language_model = lines["task.name"] == "lm"
    shown = lines.assign(
        step=_step_text(lines),
        waits=lines["data_ms"] / lines["step_ms"],
        # half of the tokens of questions are padding
        tokens_per_s=lines["tokens_per_s"].where(is_language_model),
        break_even=lines["break_even"].map(number).replace("inf", "never"),
        note=lines["note"].replace("", MISSING),
    )
    known = {
        column.name: column for column in columns(lines["task.label"].iloc[0], baseline(lines))
    }
    chosen = names or list(known)
    return render(shown, [known[name] for name in chosen if name not in constant])


def _step_text(lines: pd.DataFrame) -> pd.Series:
    """Return a step's milliseconds as 'MEDIAN [P10–P90]'."""
    median = lines["step_ms"].map(number)
    low = lines["step_p10_ms"].map(number)
    high = lines["step_p90_ms"].map(number)
    return (median + " [" + low + "–" + high + "]").where(median != MISSING, MISSING)
