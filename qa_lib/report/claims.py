"""The seeds' claims, each beside what the records say about it, and whether it holds.

A verdict on F1 follows from the 90 % interval, at the best threshold: at 0 a model that never answers would nearly do.
One on speed or memory follows from whether the measured ratio passes the bound that is named in it; such a ratio is
often of one run. The claims are about one T4, BERT-base and the full data set; ours is another GPU and, for quality, a
smaller model on a part of the data. So a verdict is on a claim's direction and rough size, and cannot be told ("?")
where an interval covers both answers.
"""

import dataclasses
import math
from dataclasses import dataclass

import pandas as pd

from qa_lib.report.quality import METRICS, compare, quality_runs, tries_of
from qa_lib.report.runs import BASELINE, RECOMMENDED, NotMeasured, select, sibling, usual
from qa_lib.report.tables import summarise
from qa_lib.report.text import FILTERS, MISSING, say
from qa_lib.variants import VARIANTS

HOLDS, FAILS, OPEN = "✓", "✗", "?"  # holds, does not hold, cannot be told
CLAIMS = {  # macro of texts/claims.md.j2, which says what was measured -> the claim
    "stack": "SDPA, the compiler and bucketing together train 17 % faster, with better F1",
    "range": "1.3 to 2.0 times the baseline's speed is reachable",
    "peft_quality": "LoRA and BitFit underperform on SQuAD v2 (by 22 and 19 F1)",
    "peft_pays": "PEFT still helps once kernels are fused",
    "adam8": "8-bit AdamW keeps accuracy at 20 % less memory",
    "checkpointing": "Gradient checkpointing saves 32 % of memory and costs 2 F1",
    "join": "A4-b's collapse is a misalignment of labels",
    "backends": "aot_eager equals Inductor",
}


Told = tuple[str, list[str], str]  # a claim, its parts "part | what was measured | verdict", and what explains it


@dataclass(frozen=True)
class Facts:
    """What claims are checked against: a bench group's lines (tables.summarise), runs with quality, runs at vram, and
    the tries by which recipes were chosen."""

    bench: pd.DataFrame
    quality: pd.DataFrame
    vram: pd.DataFrame
    tries: pd.DataFrame
    recommended = RECOMMENDED

    def line(self, variant: str, micro_batch: int) -> pd.Series:
        """A row's line of the bench group. Raises NotMeasured where it has no speed."""
        rows = self.bench[(self.bench["variant"] == variant) & (self.bench["micro_batch"] == micro_batch)]
        rows = rows.dropna(subset=["samples_per_s"])
        if rows.empty:
            raise NotMeasured(f"{variant} has no measured speed at micro-batch {micro_batch}")
        return rows.iloc[0]

    def speed(self, variant: str, base: str = BASELINE, micro_batch: int = 32) -> float:
        """Features/s of a row over another's."""
        return self.line(variant, micro_batch)["samples_per_s"] / self.line(base, micro_batch)["samples_per_s"]

    def peak(self, variant: str, base: str) -> float:
        """Peak allocated memory of a row over another's at micro-batch 32, in the bench group."""
        return self.line(variant, 32)["peak_mib"] / self.line(base, 32)["peak_mib"]

    def first_peak(self, variant: str, base: str) -> float:
        """The same by the seeds' protocol: one step of 8 features to settle, one measured."""
        measured = self.vram[self.vram["micro_batch"] == 8].dropna(subset=["memory.peak_alloc_mib"])
        peaks = measured.groupby("spec.variant")["memory.peak_alloc_mib"].last()
        if absent := [name for name in (variant, base) if name not in peaks]:
            raise NotMeasured(f"{absent[0]} has no peak at preset vram")
        return peaks[variant] / peaks[base]

    def against_parent(self, variant: str) -> dict:
        """A row's name, its parent's, and its speed and peak over the parent's."""
        parent = VARIANTS[variant].parent
        found = {"speed": self.speed(variant, parent), "peak": self.peak(variant, parent)}
        return {"name": variant, "parent": parent} | found

    def score(self, variant: str) -> float:
        """A row's mean F1. Raises NotMeasured where it has none."""
        found = self.quality.loc[self.quality["spec.variant"] == variant, "quality.f1"].astype(float).mean()
        if math.isnan(found):
            raise NotMeasured(f"{variant} has no F1")
        return found

    def f1(self, variant: str, base: str = BASELINE) -> tuple[float, float]:
        """F1 of a row minus another's, and half the 90 % interval; NaN where it was not measured."""
        try:
            return compare(self.quality, variant, base, METRICS[1])
        except NotMeasured:
            return math.nan, math.nan

    def room(self) -> float:
        """F1 of the baseline at the best threshold minus never answering's: what a row can lose by answering badly;
        NaN where it was not measured."""
        base = self.quality[self.quality["spec.variant"] == BASELINE].dropna(subset=["quality.f1"])
        return (base["quality.best_f1"].astype(float) - base["quality.always_null_f1"].astype(float)).mean()

    def fresh(self, variant: str) -> tuple[float, float]:
        """f1() on the seeds that no try of the row had: by the others it was chosen, which flatters it."""
        tried = self.tries.loc[self.tries["spec.variant"] == variant, "spec.seed"]
        return dataclasses.replace(self, quality=self.quality[~self.quality["spec.seed"].isin(tried)]).f1(variant)


def between(difference: tuple[float, float], low: float, high: float) -> str:
    """Whether a difference lies between two bounds: holds if all of its interval does, fails if none of it."""
    value, half = difference
    if low < value - half and value + half < high:
        return HOLDS
    return FAILS if value + half < low or high < value - half else OPEN


def costs(difference: tuple[float, float], loss: float) -> str:
    """Whether a loss of so much is what the difference shows: holds if its interval contains that and excludes none."""
    value, half = difference
    if abs(value + loss) > half:
        return FAILS
    return HOLDS if value + half < 0 else OPEN


def about(difference: tuple[float, float], loss: float, room: float) -> str:
    """Whether a loss is of about so much, within 4 points; open where there is not so much to lose (Facts.room)."""
    return between(difference, -loss - 4, 4 - loss) if room > loss - 4 else OPEN


def holds(truth: bool) -> str:
    return HOLDS if truth else FAILS


FILTERS |= {verdict.__name__: verdict for verdict in (between, costs, about, holds)}


def facts_of(runs: pd.DataFrame, group: str) -> Facts:
    """The facts in all records of a group's hardware; where it has no bench group, the group's own speeds."""
    bench, vram = (sibling(runs, group, preset) for preset in ("bench", "vram"))
    lines = summarise(select(runs, group) if bench.empty else bench)
    return Facts(*map(usual, (lines, quality_runs(runs, group), vram, tries_of(runs, group))))


def claims_table(facts: Facts) -> pd.DataFrame:
    """A line for each part of each claim: what was measured and the verdict. Raises NotMeasured for another task than
    question answering, about which the seeds claim nothing."""
    return verdicts(_told(facts), "claim of the seeds")


def reasons_table(facts: Facts) -> pd.DataFrame:
    """What explains the verdicts on each claim. Raises NotMeasured as `claims_table` does."""
    return reasons(_told(facts), "claim of the seeds")


def _told(facts: Facts) -> list[Told]:
    if facts.bench["task.name"].iloc[0] != "qa":
        raise NotMeasured("the seeds' claims are about question answering")
    return told("claims", CLAIMS, facts)


def told(file: str, claims: dict[str, str], facts) -> list[Told]:
    """Each of `claims` (by macro) as the macros of texts/`file`.md.j2 tell it from `facts`; open where that raises
    NotMeasured."""
    found = []
    for macro, claim in claims.items():
        try:
            *parts, why = say(f"{file}.{macro}", facts=facts).split(" ; ")
        except NotMeasured as reason:
            parts, why = [f"all of it | {MISSING} | {OPEN}"], f"Not measured: {reason}."
        found.append((claim, parts, why))
    return found


def verdicts(claims: list[Told], head: str) -> pd.DataFrame:
    """A line for each part of each claim."""
    lines = [(claim if part is parts[0] else "", *part.split(" | ")) for claim, parts, _ in claims for part in parts]
    return pd.DataFrame(lines, columns=[head, "of it", "measured here", "holds"])


def reasons(claims: list[Told], head: str) -> pd.DataFrame:
    """What explains the verdicts on each claim."""
    return pd.DataFrame([(claim, why) for claim, _, why in claims], columns=[head, "why"])
