"""From runs to lines: means over seeds with their intervals, ratios to the baseline, and these as tables of text.

`average` is the one place where seeds are averaged. `summary` uses it for a group's variants; curves.py, scaling.py and
the notebooks for what they compare. What was not measured is NaN.
"""

import math
import textwrap
from collections.abc import Iterable

import pandas as pd

from qa_lib.report.format import MISSING, compact, count, gain, number, percent, points, written
from qa_lib.report.load import AXES, TASK, baseline, found_compiled, numbers, place
from qa_lib.report.stats import interval
from qa_lib.variants import BASELINES, VARIANTS

MEASURES = {  # name in lines -> column of runs; beside them `score`, the one that the task names
    "samples_per_s": "speed.samples_per_s", "tokens_per_s": "speed.tokens_per_s", "data_ms": "time.data_ms",
    "step_ms": "time.step_ms.median", "step_p10_ms": "time.step_ms.p10", "step_p90_ms": "time.step_ms.p90",
    "busy": "speed.gpu_busy", "matrix_share": "speed.gemm_utilization", "joules": "energy.joules_per_sample",
    "peak_mib": "memory.peak_alloc_mib", "trainable": "model.params_trainable", "compile_s": "time.compile_s",
    "wall_s": "time.wall_s",
}  # fmt: skip
# Dense TFLOP/s of fp16 and bf16 by NVIDIA's data sheets (H100 and H200: half of their 1,979 with sparsity), which MFU
# is a share of. Cards by PyTorch's name for them; the PCIe cards of a name clock lower and are left out.
DATA_SHEET_TFLOPS = {
    "NVIDIA H200": 989, "NVIDIA H100 80GB HBM3": 989, "NVIDIA A100-SXM4-80GB": 312, "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA L4": 121, "Tesla T4": 65,
}  # fmt: skip


def average(values: pd.DataFrame, keys: Iterable) -> pd.DataFrame:
    """The mean over seeds of each column of `values`, with half its interval as `<name>±`, and n, how many there are;
    indexed by `keys`, columns (as groupby takes them) that tell lines apart."""
    groups = values.groupby(list(keys), dropna=False, sort=False)
    return groups.mean().join(interval(groups).add_suffix("±")).assign(n=groups.size())


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """A group's runs, averaged over seeds: a line for each variant and value of the AXES, in the order of the variants
    table.

    Columns: AXES, TASK, variant, family, change, status, note, n (runs that ended ok) and, over these, MEASURES, mfu
    and `score` with their intervals (`<name>±`). Against the baseline under the same values: ratio, of samples/s, with
    `ratio±` over equal seeds where both have the same ones; delta, the score minus the baseline's, with `delta±` over
    the seeds that both have; break_even (optimizer steps after which compilation is made up for; inf: never).
    """
    runs = runs.assign(cell=runs.groupby([*AXES], dropna=False).ngroup(), variant=runs["spec.variant"])
    done = runs[runs["status"] == "ok"]
    values = _measured(done).set_index(pd.MultiIndex.from_frame(done[["cell", "variant", "spec.seed"]]))
    base = values[values.index.get_level_values("variant") == baseline(runs)].droplevel("variant")
    same_seed = base.reindex(values.index.droplevel("variant")).set_axis(values.index)
    values["delta"] = values["score"] - same_seed["score"]
    values["ratio"] = values["samples_per_s"] / same_seed["samples_per_s"]
    values["paired"] = values.index.droplevel("variant").isin(base.index).astype(float)
    lines = average(values, ["cell", "variant"])
    of_base = average(base, ["cell"]).reindex(lines.index, level="cell")
    lines["ratio"] = lines["samples_per_s"] / of_base["samples_per_s"]
    lines["ratio±"] = lines["ratio±"].where((lines["paired"] == 1) & (lines["n"] == of_base["n"]))
    lines["warm_compile_s"] = values["warm_compile_s"].groupby(level=["cell", "variant"]).max()  # without a cache
    lines.loc[lines.index.get_level_values("variant") == baseline(runs), ["ratio±", "delta±"]] = math.nan
    saved = (of_base["step_ms"] - lines["step_ms"]) / 1e3
    lines["break_even"] = (lines["compile_s"] / saved).mask(saved <= 0, math.inf).where(lines["compile_s"].notna())
    described = _described(runs)
    found = described.join(lines.drop(columns=["paired", "paired±"])).fillna({"n": 0}).astype({"n": int})
    found = found.reset_index().sort_values(
        ["cell", "variant"], key=lambda keys: place(keys) if keys.name == "variant" else keys
    )
    return found.drop(columns="cell").reset_index(drop=True)


def _measured(runs: pd.DataFrame) -> pd.DataFrame:
    """MEASURES, score and mfu of runs that ended ok. compile_s is of those that found nothing compiled (what an earlier
    run has compiled is not this one's price), warm_compile_s of the others; a resumed run timed only its last part."""
    metric = f"quality.{runs['task.metric'].iloc[0]}" if len(runs) else "quality.f1"
    values = numbers(runs, MEASURES | {"score": metric})
    peak = runs["env.gpu"].map(DATA_SHEET_TFLOPS).astype(float).where(runs["spec.settings.precision"] != "fp32")
    values["mfu"] = values["matrix_share"] * runs["speed.gemm_tflops_measured"].astype(float) / peak
    values.loc[runs["time.resumed_from_step"].notna(), ["compile_s", "wall_s"]] = math.nan
    cached = found_compiled(runs)
    values["warm_compile_s"] = values["compile_s"].where(cached)
    values["compile_s"] = values["compile_s"].mask(cached)
    return values


def _described(runs: pd.DataFrame) -> pd.DataFrame:
    """The columns of lines that are words, and AXES and TASK; indexed by cell and variant."""
    keys = ["cell", "variant"]
    found = runs.drop_duplicates(keys).set_index(keys)[[*AXES, *TASK]]
    parts = [part for _, part in runs.groupby(keys, sort=False)]
    names = found.index.get_level_values("variant")
    states = [part["status"].value_counts(sort=False) for part in parts]
    status = [n.index[0] if len(n) == 1 else ", ".join(f"{n[name]} {name}" for name in n.index) for n in states]
    return found.assign(family=names.str[0], change=names.map(change), status=status, note=list(map(_note, parts)))


def _note(runs: pd.DataFrame) -> str:
    """Why a variant's runs did not end ok, and which were resumed."""
    said = runs["status"] + ": " + runs["error.message"].astype(object).fillna("not finished")
    said = said.map(lambda text: textwrap.shorten(text, 140, placeholder=" …"))
    resumed = "resumed at step {:.0f}, so no time of the whole run"
    resumed = runs["time.resumed_from_step"].map(resumed.format, na_action="ignore")
    seeds_of = runs["spec.seed"].map(str).groupby(said.where(runs["status"] != "ok", resumed), sort=False).agg(list)
    return "; ".join(
        text if len(seeds) == len(runs) else f"seed {', '.join(seeds)} {text}" for text, seeds in seeds_of.items()
    )


def change(variant: str, ancestor: str | None = None) -> str:
    """What a variant changes, as its parent and the one setting: 'A1 + attention: sdpa'. Where an earlier `ancestor` is
    given, as that and every setting between them."""
    found = VARIANTS.get(variant)
    if found is None or found.parent is None:
        return MISSING if found is None else "baseline"
    changed = dict(found.change)
    ancestor = ancestor or found.parent
    while found.parent != ancestor:
        found = VARIANTS[found.parent]
        changed = found.change | changed  # what a later variant sets counts
    before = VARIANTS[ancestor].settings
    said = [f"{key}: {value}" for key, value in changed.items() if value != getattr(before, key)]
    said = " + ".join([ancestor, *said])
    return f"baseline ({said})" if variant in BASELINES.values() else said


COLUMNS = {  # heading, in which {score} stands for the score's label and {base} for the baseline -> column of lines
    "variant": "variant",
    "what it changes": "change",
    **{label: name for name, label in AXES.items()},
    "status": "status",
    "n": "n",
    "samples/s": "samples_per_s",
    "tokens/s": "tokens_per_s",
    "× {base}": "ratio",
    "step ms [p10–p90]": "step",
    "waits for data, at most": "waits",
    "GPU busy": "busy",
    "of matrix rate": "matrix_share",
    "MFU": "mfu",
    "peak MiB": "peak_mib",
    "J/sample": "joules",
    "{score}": "score",
    "Δ{score} vs {base}": "delta",
    "trainable": "trainable",
    "compile s": "compile_s",
    "break-even step": "break_even",
    "wall s": "wall_s",
    "note": "note",
}
FORMS = dict.fromkeys(("waits", "busy", "matrix_share", "mfu"), percent)  # others are written by `number`
FORMS |= {"score": points, "delta": gain, "trainable": count}
WITH_INTERVAL = ("samples_per_s", "tokens_per_s", "ratio", "score", "delta")


def result_table(lines: pd.DataFrame, headings: Iterable[str] = COLUMNS) -> pd.DataFrame:
    """`summary` as text under these of COLUMNS; without those that say nothing: no value, an axis at one, all ok."""
    constant = [label for name, label in AXES.items() if lines[name].nunique(dropna=False) == 1]
    constant += ["status"] if lines["status"].eq("ok").all() else []
    step, low, high = (lines[name].map(number) for name in ("step_ms", "step_p10_ms", "step_p90_ms"))
    lines = lines.assign(
        step=(step + " [" + low + "–" + high + "]").where(step != MISSING, MISSING),
        waits=lines["data_ms"] / lines["step_ms"],
        tokens_per_s=lines["tokens_per_s"].where(lines["task.name"] == "lm"),  # of questions, half are padding
        break_even=lines["break_even"].map(number).replace("inf", "never"),
        note=lines["note"].replace("", MISSING),
    )
    table = {}
    for heading in (heading for heading in headings if heading not in constant):
        name = COLUMNS[heading]
        form = FORMS.get(name, number if pd.api.types.is_float_dtype(lines[name]) else str)
        table[heading] = written(form, lines, name) if name in WITH_INTERVAL else list(lines[name].map(form))
    names = {"score": lines["task.label"].iloc[0], "base": baseline(lines)}
    return compact(pd.DataFrame(table)).rename(columns=lambda name: name.format(**names))
