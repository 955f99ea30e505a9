"""From runs to lines: means over seeds with their intervals, ratios to the baseline, and these as tables of text.

`average` is the one place where seeds are averaged. `summary` uses it for a group's variants; scaling.py and the
notebooks for what they compare. What was not measured is NaN.
"""

import math
import textwrap
from collections.abc import Iterable

import pandas as pd

from qa_lib.errors import printable
from qa_lib.lab.report import format as forms
from qa_lib.lab.report.load import (
    AXES,
    CARDS,
    COLUMNS,
    TASK,
    baseline,
    found_compiled,
    in_order,
    measures,
    numbers,
)
from qa_lib.lab.report.stats import interval
from qa_lib.spec.variants import BASELINES, VARIANTS

HEADINGS = COLUMNS.set_index("heading")
DATA_SHEET_TFLOPS = CARDS.dropna(subset="gpu").set_index("gpu")["tflops"]


def average(values: pd.DataFrame, keys: Iterable) -> pd.DataFrame:
    """The mean over seeds of each column of `values`, with half its interval as `<name>±`, and n, how many there are;
    indexed by `keys`, columns (as groupby takes them) that tell lines apart."""
    groups = values.groupby(list(keys), dropna=False, sort=False)
    return groups.mean().join(interval(groups).add_suffix("±")).assign(n=groups.size())


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """A group's runs, averaged over seeds: a line for each variant and value of the AXES, in the order of the variants
    table.

    Columns: AXES, TASK, variant, family, change, status, note, n (runs that ended ok) and, over these, those of
    measures.csv, mfu and `score` with their intervals (`<name>±`). Against the baseline under the same values: ratio,
    of samples/s, with `ratio±` over equal seeds where the baseline has all of them; delta, the score minus the
    baseline's, with `delta±` over the seeds that both have; break_even (optimizer steps after which compilation is made
    up for; inf: never).
    """
    runs = runs.assign(
        cell=runs.groupby([*AXES], dropna=False).ngroup(), variant=runs["spec.variant"]
    )
    done = runs[runs["status"] == "ok"]
    values = _measured(done).set_index(
        pd.MultiIndex.from_frame(done[["cell", "variant", "spec.seed"]])
    )
    base = values[values.index.get_level_values("variant") == baseline(runs)].droplevel("variant")
    same_seed = base.reindex(values.index.droplevel("variant")).set_axis(values.index)
    values["delta"] = values["score"] - same_seed["score"]
    values["ratio"] = values["samples_per_s"] / same_seed["samples_per_s"]
    values["paired"] = values.index.droplevel("variant").isin(base.index).astype(float)
    lines = average(values, ["cell", "variant"])
    of_base = average(base, ["cell"]).reindex(lines.index, level="cell")
    lines["ratio"] = lines["samples_per_s"] / of_base["samples_per_s"]
    lines["ratio±"] = lines["ratio±"].where(lines["paired"] == 1)
    lines["warm_compile_s"] = (
        values["warm_compile_s"].groupby(level=["cell", "variant"]).max()
    )  # without a cache
    lines.loc[lines.index.get_level_values("variant") == baseline(runs), ["ratio±", "delta±"]] = (
        math.nan
    )
    saved = (of_base["step_ms"] - lines["step_ms"]) / 1e3
    lines["break_even"] = (
        (lines["compile_s"] / saved).mask(saved <= 0, math.inf).where(lines["compile_s"].notna())
    )
    found = (
        _described(runs)
        .join(lines.drop(columns=["paired", "paired±"]))
        .fillna({"n": 0})
        .astype({"n": int})
    )
    found = in_order(found.reset_index("cell")).sort_values("cell", kind="stable")
    return found.drop(columns="cell").reset_index()


def _measured(runs: pd.DataFrame) -> pd.DataFrame:
    """What measures.csv has, score and mfu of runs that ended ok. compile_s is of those that found nothing compiled
    (what an earlier run has compiled is not this one's price), warm_compile_s of the others; a resumed run timed only
    its last part."""
    metric = f"quality.{runs['task.metric'].iloc[0]}" if len(runs) else "quality.f1"
    values = numbers(runs, measures("summary") | {"score": metric})
    peak = (
        runs["env.gpu"]
        .map(DATA_SHEET_TFLOPS)
        .astype(float)
        .where(runs["spec.settings.precision"] != "fp32")
    )
    values["mfu"] = (
        values["gemm_utilization"] * runs["speed.gemm_tflops_measured"].astype(float) / peak
    )
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
    status = [
        n.index[0] if len(n) == 1 else ", ".join(f"{n[name]} {name}" for name in n.index)
        for n in states
    ]
    return found.assign(
        family=names.str[0], change=names.map(change), status=status, note=list(map(_note, parts))
    )


def _note(runs: pd.DataFrame) -> str:
    """Why a variant's runs did not end ok, and which were resumed."""
    said = runs["status"] + ": " + runs["error.message"].astype(object).fillna("not finished")
    said = said.map(lambda text: textwrap.shorten(printable(text), 140, placeholder=" …"))
    resumed = "resumed at step {:.0f}, so no time of the whole run"
    resumed = runs["time.resumed_from_step"].map(resumed.format, na_action="ignore")
    seeds_of = (
        runs["spec.seed"]
        .map(str)
        .groupby(said.where(runs["status"] != "ok", resumed), sort=False)
        .agg(list)
    )
    notes = [
        text if len(seeds) == len(runs) else f"seed {', '.join(seeds)} {text}"
        for text, seeds in seeds_of.items()
    ]
    return "; ".join(notes)


def change(variant: str, ancestor: str | None = None) -> str:
    """What a variant changes, as its parent and the one setting: 'A1 + attention: sdpa'. Where an earlier `ancestor` is
    given, as that and every setting between them."""
    found = VARIANTS.get(variant)
    if found is None or found.parent is None:
        return forms.MISSING if found is None else "baseline"
    changed = dict(found.change)
    ancestor = ancestor or found.parent
    while found.parent != ancestor:
        found = VARIANTS[found.parent]
        changed = found.change | changed  # what a later variant sets counts
    before = VARIANTS[ancestor].settings
    said = [f"{key}: {value}" for key, value in changed.items() if value != getattr(before, key)]
    said = " + ".join([ancestor, *said])
    return f"baseline ({said})" if variant in BASELINES.values() else said


def result_table(lines: pd.DataFrame, headings: Iterable[str] = HEADINGS.index) -> pd.DataFrame:
    """`summary` as text under these headings of columns.csv; without those that say nothing: no value, an axis at one,
    all ok."""
    constant = [label for name, label in AXES.items() if lines[name].nunique(dropna=False) == 1]
    constant += ["status"] if lines["status"].eq("ok").all() else []
    step, low, high = (
        lines[name].map(forms.number) for name in ("step_ms", "step_p10_ms", "step_p90_ms")
    )
    lines = lines.assign(
        step=(step + " [" + low + "–" + high + "]").where(step != forms.MISSING, forms.MISSING),
        waits=lines["data_ms"] / lines["step_ms"],
        tokens_per_s=lines["tokens_per_s"].where(
            lines["task.name"] == "lm"
        ),  # of questions, half are padding
        break_even=lines["break_even"].map(forms.number).replace("inf", "never"),
        note=lines["note"].replace("", forms.MISSING),
    )
    table = {}
    for heading in (heading for heading in headings if heading not in constant):
        column = HEADINGS.loc[heading]
        name, plain = (
            column["name"],
            forms.number if pd.api.types.is_float_dtype(lines[column["name"]]) else str,
        )
        form = getattr(forms, str(column["form"]), plain)
        table[heading] = (
            forms.written(form, lines, name)
            if column["kind"] == "±"
            else list(lines[name].map(form))
        )
    names = {"score": lines["task.label"].iloc[0], "base": baseline(lines)}
    return forms.compact(pd.DataFrame(table)).rename(columns=lambda name: name.format(**names))
