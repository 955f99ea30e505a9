"""The reference project's claims, a line each, with what was measured here and a verdict.

Theirs come from its documents (published.csv and the sentences below), ours from records alone.

Their numbers have one rule for each kind: a ratio of speeds holds where ours is within NEAR of
theirs, a difference of scores where it is within MARGIN of theirs. Where there is an interval, all
of it has to lie within the bound, and the claim fails where all of it lies outside.

The two bounds were set after the runs, once for all numbers; so were those of exact match, of the
optimizer's state and of C2 against C1. The bounds of the other sentences were set before.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from qa_lib.lab.report import counters, evidence, facts
from qa_lib.lab.report.format import MISSING, factor, gain, number, percent, points
from qa_lib.lab.report.stats import (
    BASELINE,
    BEST_EXACT,
    BEST_F1,
    EXACT,
    F1,
    FAILS,
    HOLDS,
    MARGIN,
    OPEN,
    between,
    by_seed,
    compare,
    interval,
)
from qa_lib.spec.variants import RECOMMENDED, VARIANTS

NEAR = 0.10  # a ratio of speeds within so much of theirs agrees with it
SPEED = "speed.samples_per_s"
# What the reference project's protocol asks for.
TIMED_STEPS = 500
AVERAGED_RUNS = 3
NOT_MEASURED = "not measured on this card"
NOT_TIMED = "not timed together on this card"
CANNOT_TELL = MISSING  # the sign of a claim that these records cannot judge
HEADINGS = ["their claim", "of it", "theirs", "measured here", "holds"]


class Found(NamedTuple):
    """What was measured, in words, and the sign of its verdict."""

    text: str
    sign: str


def all_of(signs: Iterable[str]) -> str:
    """Return the sign of a claim of several parts: it fails where one part is shown to fail.

    It holds where every part does. A part that was not measured leaves it open, unless none was.
    """
    found = set(signs)
    if FAILS in found:
        return FAILS
    if found in ({HOLDS}, {CANNOT_TELL}):
        return found.pop()
    return OPEN


class Measured:
    """What the records of a group say of variants, and those that speak for its scores."""

    def __init__(self, every: pd.DataFrame, group: str):
        """`every` are the runs of all groups."""
        timed = evidence.runs_at_preset(every, group, "bench")
        chosen = timed if len(timed) else evidence.select(every, group)
        # Claims are on variants that newer data need not have.
        chosen = evidence.most_alike(chosen)
        self.bench = chosen[chosen["status"] == "ok"]
        self.scored = evidence.usual_conditions(evidence.judging_runs(every, group))
        vram = evidence.usual_conditions(evidence.runs_at_preset(every, group, "vram"))
        vram = vram[(vram["micro_batch"] == 8) & (vram["status"] == "ok")]
        vram = vram.drop_duplicates("spec.variant", keep="last").set_index("spec.variant")
        self.first_peaks = evidence.numbers(vram, {"peak": "memory.peak_alloc_mib"})["peak"]
        self.language = evidence.runs_at_preset(every, group, "lm-bench")
        self.fresh = self._without_seeds_of_a_search(every, "B1-all")

    def _without_seeds_of_a_search(self, every: pd.DataFrame, variant: str) -> pd.DataFrame:
        """Return the scored runs without the seeds that chose a variant's rate, on their data."""
        is_try = (
            every["spec.hardware"].isin(self.bench["spec.hardware"])
            & every["spec.search"].eq("tune")
            & every["spec.variant"].eq(variant)
            & every["data.sha256"].isin(self.scored["data.sha256"])
        )
        return self.scored[~self.scored["spec.seed"].isin(every.loc[is_try, "spec.seed"])]

    def ratio(
        self, variant: str, parent: str, size: int = 32, column: str = SPEED
    ) -> tuple[float, float]:
        """Return a measure of a variant over another's at a micro-batch, and half its interval.

        The ratio is of the means of all seeds, and the interval of ratios of equal seeds, as in
        `summary`: NaN where the parent has not run with all of the variant's seeds. Both are NaN
        for speeds of two sittings.
        """
        at_size = self.bench[self.bench["micro_batch"] == size]
        timed_in = evidence.sittings(at_size)
        own_sittings = timed_in.get(variant, frozenset())
        if column == SPEED and own_sittings.isdisjoint(timed_in.get(parent, ())):
            return math.nan, math.nan
        return _ratio_of(by_seed(at_size, column), variant, parent)

    def profile(self, variant: str, size: int = 32) -> dict | None:
        """Return a variant's newest profile at a micro-batch; None where it was not profiled."""
        is_asked = (self.bench["spec.variant"] == variant) & (self.bench["micro_batch"] == size)
        newest_first = self.bench[is_asked].sort_values("time.started", ascending=False)
        profiles = (run.profile() for run in newest_first["run"])
        return next((profile for profile in profiles if profile), None)

    def first_peak(self, variant: str, parent: str) -> float:
        """Return peak memory over another's by the reference project's protocol: one step of 8
        samples to settle, one measured."""
        return self.first_peaks.get(variant, math.nan) / self.first_peaks.get(parent, math.nan)

    def difference(
        self, variant: str, parent: str, column: str, runs: pd.DataFrame | None = None
    ) -> tuple[float, float]:
        """Return a score minus another variant's over equal seeds, and half the interval.

        Both are NaN where it was not measured. `runs` are by default all that were scored.
        """
        try:
            return compare(self.scored if runs is None else runs, variant, parent, column)
        except evidence.NotMeasured:
            return math.nan, math.nan

    def room(self, column: str) -> float:
        """Return by how much the baseline's score exceeds that of never answering."""
        base = self.scored[self.scored["spec.variant"] == BASELINE]
        means = evidence.numbers(base, {"own": column, "null": "quality.always_null_f1"}).mean()
        return means["own"] - means["null"]


def _ratio_of(by_variant: pd.DataFrame, variant: str, parent: str) -> tuple[float, float]:
    """Return a variant's mean over another's, and half the interval, as `Measured.ratio` does.

    `by_variant` has a row for each seed.
    """
    both = by_variant.reindex(columns=[variant, parent])
    own = both[variant].dropna()
    base = both[parent].dropna()
    half = float(interval(own / base)) if own.index.isin(base.index).all() else math.nan
    return own.mean() / base.mean(), half


# The tables.


def claims_table(every: pd.DataFrame, group: str) -> pd.DataFrame:
    """Return what the reference project says in words, with verdicts, as text under HEADINGS.

    `every` are the runs of all groups; `group` is the one that is asked.
    """
    return _table_of(sentences(Measured(every, group)))


def numbers_table(every: pd.DataFrame, group: str) -> pd.DataFrame:
    """Return each number that it published, with verdicts, as `claims_table` does."""
    return _table_of(published_numbers(Measured(every, group)))


def _table_of(lines: Sequence[tuple[str, str, str, Found]]) -> pd.DataFrame:
    """Return claims as a table of text under HEADINGS; a claim stands in its first line alone."""
    rows = [(claim, part, theirs, *found) for claim, part, theirs, found in lines]
    table = pd.DataFrame(rows, columns=HEADINGS)
    claims = table["their claim"]
    return table.assign(**{"their claim": np.where(claims.duplicated(), "", claims)})


# Verdicts.


def judge_by_value(value: float, low: float, high: float, half: float = math.nan) -> str:
    """Return the sign of a value that should lie between two bounds.

    `half` is half its interval, which has to lie there as well. Without one (NaN) the value alone
    decides. CANNOT_TELL where the value was not measured (NaN).
    """
    if math.isnan(value):
        return CANNOT_TELL
    return between((value, 0.0 if math.isnan(half) else half), low, high)


def judge_by_interval(difference: tuple[float, float], low: float, high: float) -> str:
    """Return the sign of a difference of scores, with half its interval, between two bounds.

    Without an interval (NaN) it is OPEN, since scores differ by chance from seed to seed.
    CANNOT_TELL where the difference was not measured (NaN).
    """
    return CANNOT_TELL if math.isnan(difference[0]) else between(difference, low, high)


def faster(
    measured: Measured,
    variants: Sequence[str],
    parent: str,
    low: float,
    sizes: Sequence[int] = (32,),
) -> Found:
    """Return whether each variant trains at least `low` times as fast as `parent`, at all sizes."""
    words = []
    signs = []
    for name in variants:
        ratios = {size: measured.ratio(name, parent, size) for size in sizes}
        words.append(f"{name} {_at_sizes(ratios)}")
        signs += [judge_by_value(value, low, math.inf, half) for value, half in ratios.values()]
    sign = all_of(signs)
    if sign == CANNOT_TELL:
        return Found(NOT_TIMED, sign)
    return Found(f"{', '.join(words)} of {parent}", sign)


def _at_sizes(ratios: dict[int, tuple[float, float]]) -> str:
    """Return ratios with their intervals in words, by micro-batch where there are several."""
    words = {
        size: "not measured" if math.isnan(value) else factor(value, half)
        for size, (value, half) in ratios.items()
    }
    if len(words) == 1:
        return next(iter(words.values()))
    return "; ".join(f"at {size}: {word}" for size, word in words.items())


def leaner(ratios: dict[str, float], high: float) -> Found:
    """Return whether each variant takes less than `high` times another's memory.

    `ratios` are those of memory, by variant.
    """
    words = []
    for name, value in ratios.items():
        change = "not measured"
        if not math.isnan(value):
            change = f"{gain(100 * (value - 1), decimals=0)} %"
        words.append(f"{name} {change}")
    sign = all_of(judge_by_value(value, -math.inf, high) for value in ratios.values())
    return Found(NOT_MEASURED if sign == CANNOT_TELL else ", ".join(words), sign)


def f1_changes(
    measured: Measured, variant: str, low: float, high: float, runs: pd.DataFrame | None = None
) -> Found:
    """Return whether F1 minus the baseline's, at the best threshold, lies between two bounds."""
    change = measured.difference(variant, BASELINE, BEST_F1, runs)
    return Found(_f1_words(variant, change), judge_by_interval(change, low, high))


def _f1_words(variant: str, change: tuple[float, float]) -> str:
    """Return a change of F1, with half its interval, in words."""
    return f"{variant} {gain(*change)} F1"


def f1_falls_about(measured: Measured, variant: str, theirs: float, margin: float) -> Found:
    """Return whether F1 falls by about as much as theirs, at the best threshold.

    It cannot be told where never answering would lose less than that.
    """
    room = measured.room(BEST_F1)
    if room < -(theirs + margin):
        change = measured.difference(variant, BASELINE, BEST_F1)
        return Found(f"{_f1_words(variant, change)}; {_room_words(room)}", CANNOT_TELL)
    return f1_changes(measured, variant, theirs - margin, theirs + margin)


def _room_words(room: float) -> str:
    """Return by how much the baseline's score exceeds that of never answering, in words."""
    return f"never answering loses {number(room)}"


def keeps(
    measured: Measured, variant: str, parent: str, columns: Sequence[str] = (F1, BEST_F1)
) -> Found:
    """Return whether a score stays within MARGIN of the parent's, at threshold 0 and at the best.

    `columns` are the score at the two thresholds.
    """
    found = [measured.difference(variant, parent, column) for column in columns]
    signs = [judge_by_interval(difference, -MARGIN, MARGIN) for difference in found]
    at_zero, at_best = (gain(*difference) for difference in found)
    return Found(f"{variant} {at_zero} at 0, {at_best} at best, of {parent}", all_of(signs))


# The claims in words.


def sentences(measured: Measured) -> list[tuple[str, str, str, Found]]:
    """Return what the reference project says, as (claim, part of it, theirs, found)."""
    lines: list[tuple[str, str, str, Found]] = []
    for make in (_about_systems, _about_adapters, _about_memory, _about_the_rest):
        for claim, parts in make(measured).items():
            lines += [(claim, part, theirs, found) for part, (theirs, found) in parts.items()]
    return lines


def _about_systems(measured: Measured) -> dict[str, dict[str, tuple[str, Found]]]:
    """Return the claims on attention, compiler, padding and their goals."""
    return {
        "SDPA, the compiler and bucketing together train faster, with better F1": {
            "faster by 17 % at both micro-batches": (
                "×1.17",
                faster(measured, ["A4"], BASELINE, 1.17, sizes=(8, 32)),
            ),
            "better F1, at the best threshold": ("+0.61", f1_changes(measured, "A4", 0, math.inf)),
        },
        "1.3 to 2.0 times the baseline's speed is reachable": {
            "reachable": ("×1.3 to ×2.0", faster(measured, ["A4", "E-moments"], BASELINE, 1.3)),
        },
        "F1 and exact match stay within about 1 point": {
            "F1": ("≤ 1", keeps(measured, RECOMMENDED, BASELINE)),
            "exact match": ("≤ 1", keeps(measured, RECOMMENDED, BASELINE, (EXACT, BEST_EXACT))),
        },
    }


def _about_adapters(measured: Measured) -> dict[str, dict[str, tuple[str, Found]]]:
    """Return the claims on LoRA and BitFit."""
    parents = {
        "E-masters-lora-qv": "E-masters",
        "E-masters-lora-all": "E-masters",
        "E-dropout-bitfit": "E-dropout",
        "E-dropout-freeze": "E-dropout",
    }
    memory = {}
    for name, parent in parents.items():
        memory[name], _ = measured.ratio(name, parent, column="memory.peak_alloc_mib")
    return {
        "LoRA and BitFit underperform on SQuAD v2": {
            "LoRA as they set it loses more than 2": (
                "−21.7",
                f1_changes(measured, "B1", -math.inf, -2),
            ),
            "LoRA as they set it loses about 22": ("−21.7", f1_falls_about(measured, "B1", -22, 4)),
            "LoRA on every layer loses more than 2 (seeds that did not choose its rate)": (
                MISSING,
                f1_changes(measured, "B1-all", -math.inf, -2, measured.fresh),
            ),
            "BitFit loses more than 2": ("−18.6", f1_changes(measured, "B2", -math.inf, -2)),
            "BitFit loses about 19": ("−18.6", f1_falls_about(measured, "B2", -19, 4)),
        },
        "PEFT still helps once kernels are fused": {
            "memory": (MISSING, leaner(memory, 1)),
            "speed, LoRA on query and value": (
                MISSING,
                faster(measured, ["E-masters-lora-qv"], "E-masters", 1),
            ),
            "speed, LoRA on every linear layer": (
                MISSING,
                faster(measured, ["E-masters-lora-all"], "E-masters", 1),
            ),
            "speed, biases or top layers": (
                MISSING,
                faster(measured, ["E-dropout-bitfit", "E-dropout-freeze"], "E-dropout", 1),
            ),
        },
    }


def _about_memory(measured: Measured) -> dict[str, dict[str, tuple[str, Found]]]:
    """Return the claims on 8-bit AdamW and activation checkpointing."""

    def at_32(variant: str, parent: str, column: str = "memory.peak_alloc_mib") -> float:
        return measured.ratio(variant, parent, column=column)[0]

    cost = measured.difference("C2", "A3", BEST_F1)
    return {
        "8-bit AdamW keeps accuracy at 20 % less memory": {
            "at least 15 % less memory than A3, by their protocol": (
                "−20 %",
                leaner({"C1": measured.first_peak("C1", "A3")}, 0.85),
            ),
            "the same at micro-batch 32": (MISSING, leaner({"C1": at_32("C1", "A3")}, 0.85)),
            "the optimizer's state is less than half": (
                MISSING,
                leaner({"C1": at_32("C1", "A3", "memory.optimizer_mib")}, 0.5),
            ),
            "within 1 F1": ("−0.62", keeps(measured, "C1", "A3")),
        },
        "Gradient checkpointing saves 32 % of memory and costs 2 F1": {
            "at least 28 % less memory than A3, by their protocol": (
                "−32 %",
                leaner({"C2": measured.first_peak("C2", "A3")}, 0.72),
            ),
            "the same at micro-batch 32": (MISSING, leaner({"C2": at_32("C2", "A3")}, 0.72)),
            "saves more than 8-bit AdamW, by their protocol": (
                "−15 % of C1",
                leaner({"C2": measured.first_peak("C2", "C1")}, 1),
            ),
            "the same at micro-batch 32, of C1": (MISSING, leaner({"C2": at_32("C2", "C1")}, 1)),
            "costs 2 F1": ("−2.4", Found(f"C2 {gain(*cost)} F1", _costs_two(cost))),
        },
    }


def _costs_two(cost: tuple[float, float]) -> str:
    """Return whether a difference of F1 is shown to be a loss, and 2 lies in its interval."""
    mean, half = cost
    if math.isnan(mean):
        return CANNOT_TELL
    if abs(mean + 2) > half:
        return FAILS
    return HOLDS if mean + half < 0 else OPEN


def _about_the_rest(measured: Measured) -> dict[str, dict[str, tuple[str, Found]]]:
    """Return the claims on the faulty join, the compiler's backends, and how it was measured."""
    joined = by_seed(measured.scored).mean().reindex(["A4", "A4-b"])
    wrong = Found(
        f"the training of A4 (F1 {points(joined['A4'])}), joined by position: "
        f"F1 {points(joined['A4-b'])}",
        judge_by_value(joined["A4-b"] - joined["A4"], -math.inf, -20),
    )
    return {
        "A4-b's collapse is a misalignment of labels": {
            "wrong labels": ("F1 26.9", Found("not tested: their run is gone", CANNOT_TELL)),
            "a wrong join suffices": (MISSING, wrong),
        },
        "aot_eager equals Inductor": {
            "at least 95 % of the speed, at both micro-batches": (
                "×1.01",
                faster(measured, ["D1"], "A3", 0.95, sizes=(8, 32)),
            ),
            "within 1 F1": ("−0.54", keeps(measured, "D1", "A3")),
            "as many kernels a step, within 10 %": (MISSING, _kernel_counts(measured, "D1", "A3")),
            "equal SM occupancy and bandwidth, within 10 %": (
                MISSING,
                _counters(measured, "D1", "A3"),
            ),
            "NVFuser": (MISSING, _nvfuser(measured)),
        },
        "Warm up for 100 steps, time 500, average 3 runs": {
            "timed steps and runs": ("500 steps, 3 runs", _protocol(measured)),
            "Nsight Systems' timeline": (
                MISSING,
                Found("not on the GPU's host; the profiler's own timeline is shown", CANNOT_TELL),
            ),
        },
        "Loading batches asynchronously saves time": {
            "with and without": (MISSING, _loading(measured)),
        },
        "Data parallelism trains the language model faster": {
            "several GPUs over one": (MISSING, _data_parallel(measured, "L-ddp")),
        },
    }


def _kernel_counts(measured: Measured, variant: str, parent: str) -> Found:
    """Return whether a step of a variant launches as many kernels as one of another, within NEAR.

    Cannot be told where a profile is missing.
    """
    counts = {}
    for name in (variant, parent):
        profile = measured.profile(name)
        if profile:
            counts[name] = profile["time"]["kernels_per_step"]
    lacking = [name for name in (variant, parent) if counts.get(name) is None]
    if lacking:
        return Found(f"no {' and no '.join(lacking)} was profiled", CANNOT_TELL)
    text = ", ".join(f"{name} {count:,.0f}" for name, count in counts.items())
    return Found(text, judge_by_value(counts[variant] / counts[parent], 1 - NEAR, 1 + NEAR))


def _counters(measured: Measured, variant: str, parent: str) -> Found:
    """Return whether kernels keep as many warps active, and come as near the memory's peak, as
    another variant's, within NEAR.

    Cannot be told where a profile with hardware counters is missing.
    """
    tables = {}
    for name in (variant, parent):
        profile = measured.profile(name)
        if profile and counters.has_counters(profile):
            tables[name] = counters.kernel_table(profile)
    lacking = [name for name in (variant, parent) if name not in tables]
    if lacking:
        return Found(f"no hardware counters of {' and '.join(lacking)} were read", CANNOT_TELL)
    words = []
    signs = []
    for column in ("warps_active_percent", "dram_percent"):
        own, base = (counters.mean(tables[name], column) for name in (variant, parent))
        words.append(f"{counters.PERCENTAGES[column]}: {number(own)}, {parent} {number(base)}")
        signs.append(judge_by_value(own / base, 1 - NEAR, 1 + NEAR))
    return Found(f"{variant} {'; '.join(words)}", all_of(signs))


def _nvfuser(measured: Measured) -> Found:
    """Return whether NVFuser trains as fast as Inductor, where a PyTorch that has it was timed."""
    found = faster(measured, ["D1-nvfuser"], "A3", 0.95)
    if found.sign == CANNOT_TELL:
        return Found("torch.compile has no NVFuser any more", CANNOT_TELL)
    return found


def _loading(measured: Measured) -> Found:
    """Return how much of a step a batch takes the host to make, which is no verdict.

    No two variants differ in how batches are loaded alone: it was argued and not tested.
    """
    runs = measured.bench[measured.bench["micro_batch"] == 32]
    columns = {"data": "time.data_ms", "step": "time.step_ms.median", "busy": "speed.gpu_busy"}
    values = evidence.numbers(runs, columns)
    shares = (values["data"] / values["step"]).groupby(runs["spec.variant"]).mean()
    busy = values["busy"].groupby(runs["spec.variant"]).mean()
    words = [
        f"{percent(shares[name])} of a step of {name} (GPU busy {percent(busy[name])})"
        for name in (BASELINE, RECOMMENDED)
        if not math.isnan(shares.get(name, math.nan))
    ]
    text = "not tested: no two variants differ in it alone"
    if words:
        text += f"; the host makes a batch in {', '.join(words)}"
    return Found(text, CANNOT_TELL)


def _data_parallel(measured: Measured, variant: str) -> Found:
    """Return whether a language model's variant on several GPUs trains faster than its parent on
    one.

    Each GPU has 32 windows. Cannot be told where the two have not run with the same code.
    """
    parent = VARIANTS[variant].parent
    runs = measured.language
    runs = runs[runs["status"].eq("ok") & runs["micro_batch"].eq(32)]
    runs = runs[runs["spec.variant"].isin([variant, parent])]
    if runs["spec.variant"].nunique() < 2:
        return Found(NOT_MEASURED, CANNOT_TELL)
    world = runs.loc[runs["spec.variant"] == variant, "world"].max()
    of_code = [part for _, part in runs.groupby("code") if part["spec.variant"].nunique() == 2]
    value, half = _ratio_of(
        by_seed(pd.concat(of_code) if of_code else runs, "speed.tokens_per_s"), variant, parent
    )
    text = f"{variant} on {world} GPUs {factor(value, half)} of {parent} on one"
    if not of_code:
        return Found(f"{text}, but of other code", CANNOT_TELL)
    return Found(text, judge_by_value(value, 1, math.inf, half))


def _protocol(measured: Measured) -> Found:
    """Return how many steps were timed in how many runs, and how far runs lie apart.

    The protocol was kept where all runs timed TIMED_STEPS, and there are AVERAGED_RUNS of the
    baseline and of the recommended variant, if that was timed. It cannot be told where the baseline
    was not timed. The warm-up is not judged here: it is the preset's, and equal in all runs.
    """
    runs = measured.bench[measured.bench["micro_batch"] == 32]
    steps = evidence.numbers(runs, {"n": "time.step_ms.n"})["n"].dropna()
    counts = runs["spec.variant"].value_counts()
    if steps.empty or BASELINE not in counts:
        return Found(NOT_MEASURED, CANNOT_TELL)
    steps_words = " to ".join(f"{count:.0f}" for count in sorted({steps.min(), steps.max()}))
    words = [f"{steps_words} steps"]
    keeps_protocol = steps.min() >= TIMED_STEPS
    for name in (BASELINE, RECOMMENDED):
        if name not in counts:
            continue
        speeds = runs.loc[runs["spec.variant"] == name, SPEED].astype(float)
        keeps_protocol &= len(speeds) >= AVERAGED_RUNS
        half = float(interval(speeds)) / speeds.mean()
        if math.isnan(half):
            words.append(f"{len(speeds)} run{'s' * (len(speeds) > 1)} of {name}")
        else:
            words.append(f"mean of {len(speeds)} runs of {name} ± {percent(half)}")
    return Found("; ".join(words), HOLDS if keeps_protocol else FAILS)


# The numbers that were published.


def published_numbers(measured: Measured) -> list[tuple[str, str, str, Found]]:
    """Return each published number of speed and score, as (claim, part of it, theirs, found)."""
    table = facts.published()
    lines = []
    for parent in (BASELINE, "A3"):
        for name in table.index:
            if parent in (VARIANTS[name].parent, BASELINE) and name != parent:
                theirs = table.loc[name, "speed"] / table.loc[parent, "speed"]
                found = _near(measured.ratio(name, parent), theirs)
                lines.append((f"Training speed, × {parent}", name, factor(theirs), found))
    for label, column, key in (("F1", "score", F1), ("Exact match", "exact", EXACT)):
        for name in table.index.drop(BASELINE):
            theirs = table.loc[name, column] - table.loc[BASELINE, column]
            found = _as_theirs(measured, name, theirs, key)
            lines.append((f"{label} minus {BASELINE}'s, at threshold 0", name, gain(theirs), found))
    return lines + _scoring_speeds(measured, table["eval_samples_per_s"])


def _scoring_speeds(measured: Measured, theirs: pd.Series) -> list[tuple[str, str, str, Found]]:
    """Return each variant's speed of scoring over the baseline's, as `published_numbers` does.

    It is one line where the baseline has no time of its own: runs that share a GPU record none.
    Times of another card, or of other code than the baseline's, do not count.
    """
    claim = f"Scoring speed, × {BASELINE}"
    ratios = theirs.drop(BASELINE) / theirs[BASELINE]
    timed = measured.scored.dropna(subset="time.eval_s")
    is_baseline = timed["spec.variant"] == BASELINE
    has_baseline = is_baseline.groupby([timed["group"], timed["code"]]).transform("any")
    seconds = by_seed(timed[has_baseline.astype(bool)], "time.eval_s")
    if BASELINE not in seconds:
        said = ", ".join(f"{name} {factor(ratio)}" for name, ratio in ratios.items())
        reason = Found(f"no {BASELINE} was scored on a GPU of its own", CANNOT_TELL)
        return [(claim, "all", said, reason)]
    lines = []
    for name, ratio in ratios.items():
        found = Found(NOT_MEASURED, CANNOT_TELL)
        if name in seconds:
            found = _near(_ratio_of(1 / seconds, name, BASELINE), ratio)
        lines.append((claim, name, factor(ratio), found))
    return lines


def _near(ratio: tuple[float, float], theirs: float) -> Found:
    """Return whether a ratio of speeds, with half its interval, is within NEAR of theirs."""
    value, half = ratio
    if math.isnan(value):
        return Found(NOT_TIMED, CANNOT_TELL)
    sign = judge_by_value(value, (1 - NEAR) * theirs, (1 + NEAR) * theirs, half)
    return Found(factor(value, half), sign)


def _as_theirs(measured: Measured, variant: str, theirs: float, column: str) -> Found:
    """Return whether a score minus the baseline's is within MARGIN of theirs, at threshold 0.

    It cannot be told where never answering would lose less than that.
    """
    found = measured.difference(variant, BASELINE, column)
    if math.isnan(found[0]):
        return Found("not scored", CANNOT_TELL)
    room = measured.room(column)
    if room < -(theirs + MARGIN):
        return Found(f"{gain(*found)}; {_room_words(room)}", CANNOT_TELL)
    return Found(gain(*found), judge_by_interval(found, theirs - MARGIN, theirs + MARGIN))
