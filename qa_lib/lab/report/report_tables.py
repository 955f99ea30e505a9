"""The tables that notebooks/report.ipynb alone has: F1, time, memory, and every variant.

Functions whose names end in `_table` return tables of text, which `style.show` sets. Columns that
nothing was measured of are left out of them, unless a docstring says otherwise. The other functions
choose the runs that a table is of, and say which they are.
"""

import math

import pandas as pd

from qa_lib.lab.report import evidence, facts, headline
from qa_lib.lab.report.evidence import NotMeasured
from qa_lib.lab.report.format import MISSING, gain, percent, points
from qa_lib.lab.report.stats import (
    BEST_EXACT,
    BEST_F1,
    EXACT,
    F1,
    MARGIN,
    VERDICTS,
    against_baseline,
    equivalence,
)
from qa_lib.lab.report.summary import average, result_table
from qa_lib.lab.report.tables import Column, render
from qa_lib.spec.recipes import find_recipe

# What `score_table` averages over seeds: its name there -> the column of runs.
SCORES = {
    "f1": F1,
    "exact": EXACT,
    "best_f1": BEST_F1,
    "best_exact": BEST_EXACT,
    "has_answer_f1": "quality.has_answer_f1",
    "no_answer_f1": "quality.no_answer_f1",
}
NEVER_ANSWERS = "never answers"  # the line of a model that does not, in `score_table`

PEFT_PARENT = "A3"  # the full fine-tune that the variants B* start from

# The parts of a training's time, and two sums that have more than these in them: their names in
# records less `_s` -> their headings.
PARTS_OF_TIME = {
    "prepare": "prepare s",
    "compile": "compile s",
    "train": "train s",
    "eval": "score s",
    "wall": "all but imports s",
    "notebook": "from the command to the end s",
}

VRAM_MICRO_BATCH = 8  # of the protocol by which the reference project measured memory


def _by_variant(values: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the values of runs averaged for each variant, in table order (see `average`)."""
    variant = runs["spec.variant"].rename("variant")
    return evidence.in_table_order(average(values, [variant]))


# F1.


def score_table(judged: pd.DataFrame) -> pd.DataFrame:
    """Return F1 and exact match of every variant, and how they differ from the baseline's.

    The first line is of a model that never answers. Columns:

    - variant, n (runs that ended ok)
    - F1, EM: at threshold 0; F1 at best threshold, EM at best: each at the threshold where the
      score itself is best; HasAns F1, NoAns F1: at threshold 0, of questions with and without an
      answer
    - ΔF1, ΔEM, ΔF1 at best, ΔEM at best: less the baseline's over equal seeds, with intervals; '–'
      for variants that `stats.equivalence` leaves out
    - within 1 F1: the sign of its verdict

    Raises NotMeasured where `stats.equivalence` does.
    """
    runs = evidence.usual_conditions(judged)
    differences = equivalence(runs).drop(columns="n")
    for name in ("exact", "best_exact"):
        of_score = against_baseline(runs, SCORES[name])[["delta", "delta±"]]
        differences = differences.join(of_score.add_prefix(f"{name}_"))
    done = runs[runs["status"] == "ok"]
    scores = _by_variant(evidence.numbers(done, SCORES), done)[["n", *SCORES]]
    table = pd.concat([_never_answering(done), scores]).join(differences)
    table["verdict"] = table["verdict"].map(VERDICTS).fillna(MISSING)
    columns = [
        Column("variant"),
        Column("n"),
        Column("f1", "F1", points),
        Column("exact", "EM", points),
        Column("best_f1", "F1 at best threshold", points),
        Column("best_exact", "EM at best", points),
        Column("has_answer_f1", "HasAns F1", points),
        Column("no_answer_f1", "NoAns F1", points),
        Column("delta", "ΔF1", gain),
        Column("exact_delta", "ΔEM", gain),
        Column("best_delta", "ΔF1 at best", gain),
        Column("best_exact_delta", "ΔEM at best", gain),
        Column("verdict", f"within {MARGIN:g} F1"),
    ]
    return render(table.rename_axis("variant").reset_index(), columns)


def _never_answering(done: pd.DataFrame) -> pd.DataFrame:
    """Return the line of `score_table` for a model that never answers the questions of runs."""
    # Without an answer, F1 and exact match of a question are both 100 or both 0, and no threshold
    # changes them.
    score = evidence.numbers(done, {"f1": "quality.always_null_f1"})["f1"].mean()
    line = {"n": 0, "f1": score, "exact": score, "best_f1": score, "best_exact": score}
    return pd.DataFrame(line, index=[NEVER_ANSWERS])


def peft_table(judged: pd.DataFrame) -> pd.DataFrame:
    """Return F1 of the variants that train a part of the parameters, beside two that train all.

    Those two are the baseline and PEFT_PARENT. Columns: variant; trains, the share of the
    parameters; n (runs that ended ok); F1 at best, at the best threshold; and against A1, that F1
    less the baseline's over equal seeds.

    Raises NotMeasured where `stats.equivalence` does.
    """
    runs = evidence.usual_conditions(judged)
    base = evidence.baseline(runs)
    variant = runs["spec.variant"]
    is_shown = variant.str.startswith("B") | variant.isin([base, PEFT_PARENT])
    done = runs[is_shown & (runs["status"] == "ok")]
    columns = {
        "f1": BEST_F1,
        "trained": "model.params_trainable",
        "total": "model.params_total",
    }
    values = evidence.numbers(done, columns)
    values["share"] = values["trained"] / values["total"]
    table = _by_variant(values, done).join(equivalence(runs)[["best_delta", "best_delta±"]])
    columns = [
        Column("variant"),
        Column("share", "trains", percent, interval=False),
        Column("n"),
        Column("f1", "F1 at best", points),
        Column("best_delta", f"against {base}", gain),
    ]
    return render(table.reset_index(), columns)


def tries_of_search(runs: pd.DataFrame, chosen: pd.DataFrame, search: str) -> pd.DataFrame:
    """Return the tries of a search (`tune`, `max-batch`) on the hardware of a group, of its task.

    `chosen` are the runs of the group that count.
    """
    is_near = runs["spec.hardware"].isin(chosen["spec.hardware"])
    is_near &= runs["task.name"].isin(chosen["task.name"])
    return runs[is_near & (runs["spec.search"] == search)]


def tries_table(tries: pd.DataFrame) -> pd.DataFrame:
    """Return F1 of the tries of search `tune`, the best of each variant first.

    Of tries with the same seed the newest counts. Columns: variant; trainable, what it trains;
    learning rate, by which it trains that; n (seeds); F1, at threshold 0; and F1 at best, at the
    best one.

    Raises NotMeasured where no try has an F1.
    """
    usual = evidence.usual_conditions(tries)
    is_scored = evidence.numbers(usual, {"f1": F1})["f1"].notna()
    scored = usual[is_scored].sort_values("time.started")
    if scored.empty:
        raise NotMeasured("no try of python -m qa_lib tune has an F1 on this hardware")
    factors = [find_recipe(name).lr_factor for name in scored["spec.settings.trainable"]]
    scored = scored.assign(
        variant=scored["spec.variant"],
        trainable=scored["spec.settings.trainable"],
        rate=scored[evidence.RATE] * factors,
    )
    keys = ["variant", "trainable", "rate"]
    scored = scored.drop_duplicates([*keys, "spec.seed"], keep="last")
    values = evidence.numbers(scored, {"f1": F1, "best_f1": BEST_F1})
    table = average(values, [scored[key] for key in keys]).reset_index()
    table = table.sort_values(["variant", "best_f1"], ascending=[True, False])
    table["rate"] = table["rate"].map("{:g}".format)
    columns = [
        Column("variant"),
        Column("trainable"),
        Column("rate", "learning rate"),
        Column("n"),
        Column("f1", "F1", points),
        Column("best_f1", "F1 at best", points),
    ]
    return render(table, columns)


# Time.


def projection_table(lines: pd.DataFrame) -> pd.DataFrame:
    """Return the minutes of a full training at a group's speeds, with the arithmetic.

    `lines` are those of `summary`. Columns, of which none is left out: variant, arithmetic,
    minutes, and of A1's time, their share of the baseline's.

    Raises NotMeasured where `headline.projected` does.
    """
    rows = []
    for line in headline.projected(lines).itertuples():
        rows.append({
            "variant": line.Index,
            "arithmetic": _arithmetic(line.speed, line.compile_s, line.cold),
            "minutes": f"{line.minutes:.1f}",
            f"of {evidence.baseline(lines)}'s time": percent(line.share),
        })  # fmt: skip
    return pd.DataFrame(rows)


def _arithmetic(speed: float, compile_s: float, is_cold: bool) -> str:
    """Return the sum that the time of a full training is, in words.

    The arguments are those of a line of `headline.projected`.
    """
    text = f"{evidence.FULL_SAMPLES:,} × {evidence.FULL_EPOCHS} ÷ {speed:,.0f}/s"
    if pd.isna(compile_s):
        return f"{text} + compilation, not measured"
    if compile_s == 0:
        return text
    text += f" + {compile_s:.1f} s"
    return text if is_cold else f"{text}, a part of the code from a cache"


def measured_trainings(runs: pd.DataFrame, chosen: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the runs that have a `time_table`, by the headings of these tables.

    They are those at presets `quality` and `minutes` on the hardware of a group, which may be none,
    and last the group's own. `chosen` are those of the group that count.
    """
    group = chosen["group"].iloc[0]
    # Notebooks of timed runs drew pictures as well, and their seconds say nothing of training.
    timed = evidence.largest_micro_batch(chosen).assign(**{"time.notebook_s": math.nan})
    parts = {
        "Measured, the model for F1": evidence.runs_at_preset(runs, group, "quality"),
        "Measured, three epochs": evidence.runs_at_preset(runs, group, "minutes"),
        "Measured, this group": timed,
    }
    found = {}
    for heading, part in parts.items():
        groups = part["group"].unique()
        found[", group ".join([heading, *groups])] = part
    return found


def time_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the mean seconds that the trainings of each variant took, a column for each part.

    Those count that found nothing compiled and were not resumed. A variant that has trained for one
    epoch alone, where others have trained for more, is marked as such and comes last. Columns:
    variant, and the headings of PARTS_OF_TIME, of which `train` is without `compile`.
    """
    usual = evidence.usual_conditions(runs)
    is_known = runs["spec.variant"].isin(usual["spec.variant"])
    short = runs[(runs[evidence.EPOCHS] == 1) & ~is_known]
    short = short.assign(**{"spec.variant": short["spec.variant"] + ", one epoch"})
    shown = pd.concat([usual, short])
    whole = shown[
        shown["time.wall_s"].notna()
        & shown["time.resumed_from_step"].isna()
        & ~evidence.found_compiled(shown)
    ]
    seconds = evidence.numbers(whole, {part: f"time.{part}_s" for part in PARTS_OF_TIME})
    # Code compiles in the first steps of a training.
    seconds["train"] -= seconds["compile"].fillna(0.0)
    table = _by_variant(seconds, whole).reset_index()
    parts = [Column(part, heading, interval=False) for part, heading in PARTS_OF_TIME.items()]
    return render(table, [Column("variant"), *parts])


# Memory.


def vram_runs(runs: pd.DataFrame, group: str) -> pd.DataFrame:
    """Return a run of each variant at preset `vram` on the hardware of a group: the newest.

    They had VRAM_MICRO_BATCH samples in a forward pass. There may be none.
    """
    usual = evidence.usual_conditions(evidence.runs_at_preset(runs, group, "vram"))
    at_micro_batch = usual[usual["micro_batch"] == VRAM_MICRO_BATCH]
    return at_micro_batch.drop_duplicates("spec.variant", keep="last")


def vram_table(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the memory of runs beside what the reference project published.

    `runs` are those of `vram_runs`. Columns: variant; allocated MiB and reserved MiB, which
    PyTorch's allocator handed out and took from the card at most; theirs, headed as of their T4;
    and the ratios of both.

    Raises NotMeasured where no run has its memory.
    """
    columns = {"allocated": "memory.peak_alloc_mib", "reserved": "memory.peak_reserved_mib"}
    ours = evidence.numbers(runs, columns).set_index(runs["spec.variant"]).dropna()
    if ours.empty:
        raise NotMeasured(
            "no run at preset vram has a peak: GPU memory is counted by the GPU's allocator"
        )
    theirs = facts.published()[["peak_mib", "peak_reserved_mib"]]
    table = evidence.in_table_order(ours.join(theirs))
    table["allocated_ratio"] = table["allocated"] / table["peak_mib"]
    table["reserved_ratio"] = table["reserved"] / table["peak_reserved_mib"]
    columns = [
        Column("variant"),
        Column("allocated", "allocated MiB"),
        Column("peak_mib", "T4: allocated MiB"),
        Column("allocated_ratio", "ours over theirs"),
        Column("reserved", "reserved MiB"),
        Column("peak_reserved_mib", "T4: reserved MiB"),
        Column("reserved_ratio", "reserved: ours over theirs"),
    ]
    return render(table.rename_axis("variant").reset_index(), columns)


def source(runs: pd.DataFrame) -> str:
    """Return the group and the code of runs of one group in a sentence; of none, an empty text."""
    if runs.empty:
        return ""
    return f"Group {runs['group'].iloc[0]}, code {evidence.commits(runs)}."


def limit_of(tries: pd.DataFrame) -> str:
    """Return the limit of a group of search `max-batch` in words."""
    first = tries.iloc[0]
    gib = first["spec.preset.limit_gib"]
    capability = first["spec.sm"] / 10
    return f"Within {gib:g} GiB, at compute capability {capability:g}"


def limited_table(tries: pd.DataFrame, judged: pd.DataFrame) -> pd.DataFrame:
    """Return what each variant can do within the limit of a group of search `max-batch`.

    `judged` are the runs whose scores count. Tries that did not end ok are left out. Columns:

    - variant
    - largest micro-batch, and reserved MiB at that
    - best samples/s at any micro-batch, and at micro-batch, at which that was
    - ΔF1 at best: F1 less the baseline's over equal seeds, at the best threshold

    Raises NotMeasured where `stats.equivalence` does.
    """
    usual = evidence.usual_conditions(tries)
    done = usual[usual["status"] == "ok"]
    columns = {"speed": "speed.samples_per_s", "reserved": "memory.peak_reserved_mib"}
    measured = evidence.numbers(done, columns).dropna()
    keys = [done["spec.variant"].rename("variant"), done["micro_batch"]]
    means = measured.groupby(keys).mean().reset_index()
    largest = means.sort_values("micro_batch").groupby("variant").last()
    fastest = means.sort_values("speed").groupby("variant").last()
    differences = equivalence(evidence.usual_conditions(judged))
    table = (
        fastest.join(largest.add_suffix("_at_largest"))
        .join(largest["micro_batch"].rename("largest"))
        .join(differences[["best_delta", "best_delta±"]])
    )
    columns = [
        Column("variant"),
        Column("largest", "largest micro-batch"),
        Column("reserved_at_largest", "reserved MiB"),
        Column("speed", "best samples/s"),
        Column("micro_batch", "at micro-batch"),
        Column("best_delta", "ΔF1 at best", gain),
    ]
    return render(evidence.in_table_order(table).reset_index(), columns)


# Every variant.


def published_table() -> pd.DataFrame:
    """Return the reference project's own speeds and scores, of its T4.

    Columns: variant, samples/s, F1, ΔF1 to its A1, and × A1, the ratio of speeds.
    """
    columns = [
        Column("variant"),
        Column("samples_per_s", "T4: samples/s"),
        Column("score", "T4: F1", points),
        Column("delta", "T4: ΔF1", gain),
        Column("ratio", "T4: × A1"),
    ]
    return render(facts.published().reset_index(), columns)


def speed_table(lines: pd.DataFrame) -> pd.DataFrame:
    """Return lines of `summary` as a table of their speeds, the largest micro-batch first.

    Its columns are those of `result_table` that are named here.
    """
    what = ["variant", "change", "trainable", *evidence.AXES]
    speed = ["status", "n", "samples_per_s", "tokens_per_s", "ratio", "step", "note"]
    return result_table(_largest_first(lines), [*what, *speed])


def cost_table(lines: pd.DataFrame) -> pd.DataFrame:
    """Return lines of `summary` as a table of efficiency, memory and compilation.

    The largest micro-batch comes first. Its columns are those of `result_table` that are named
    here.
    """
    efficiency = ["waits", "busy", "gemm_utilization", "mfu"]
    costs = ["peak_mib", "joules", "compile_s", "break_even"]
    return result_table(_largest_first(lines), ["variant", *evidence.AXES, *efficiency, *costs])


def _largest_first(lines: pd.DataFrame) -> pd.DataFrame:
    """Return lines sorted by micro-batch, the largest first; equal ones stay in their order."""
    return lines.sort_values("micro_batch", ascending=False, kind="stable")
