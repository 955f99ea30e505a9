"""The seeds' claims, each beside what the records say about it, and whether it holds.

A verdict on F1 (at threshold 0, as theirs) follows from the 90 % interval, one on speed or memory from whether the
measured ratio passes the bound that is named in it; such a ratio is often of one run. The claims are about one T4,
BERT-base and the full data set; ours is another GPU and, for quality, a smaller model on a part of the data. So a
verdict is on a claim's direction and rough size, and "cannot be told" where an interval covers both answers.
"""

import dataclasses
import math
from dataclasses import dataclass

import pandas as pd

from qa_lib.report.quality import compare, quality_runs, tries_of
from qa_lib.report.runs import BASELINE, NotMeasured, select, sibling, usual
from qa_lib.report.tables import summarise
from qa_lib.report.text import MISSING, say
from qa_lib.variants import VARIANTS

HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot be told"
Finding = tuple[dict, dict[str, str]]  # what was measured, for the claim's text; each part of the claim, its verdict


@dataclass(frozen=True)
class Facts:
    """What claims are checked against: a bench group's lines (tables.summarise), runs with quality, runs at vram, and
    the tries by which recipes were chosen."""

    bench: pd.DataFrame
    quality: pd.DataFrame
    vram: pd.DataFrame
    tries: pd.DataFrame

    def line(self, variant: str, micro_batch: int) -> pd.Series:
        """A row's line of the bench group. Raises NotMeasured where it has no speed."""
        rows = self.bench[(self.bench["variant"] == variant) & (self.bench["micro_batch"] == micro_batch)]
        rows = rows.dropna(subset=["features_per_s"])
        if rows.empty:
            raise NotMeasured(f"{variant} has no measured speed at micro-batch {micro_batch}")
        return rows.iloc[0]

    def speed(self, variant: str, base: str = BASELINE, micro_batch: int = 32) -> float:
        """Features/s of a row over another's."""
        return self.line(variant, micro_batch)["features_per_s"] / self.line(base, micro_batch)["features_per_s"]

    def peak(self, variant: str, base: str) -> float:
        """Peak allocated memory of a row over another's at micro-batch 32, in the bench group."""
        return self.line(variant, 32)["peak_mib"] / self.line(base, 32)["peak_mib"]

    def first_peak(self, variant: str, base: str) -> float:
        """The same by the seeds' protocol: one step of 8 features to settle, one measured."""
        measured = self.vram[self.vram["micro_batch"] == 8].dropna(subset=["memory.peak_alloc_mib"])
        peaks = measured.groupby("spec.variant")["memory.peak_alloc_mib"].last()
        if absent := [name for name in (variant, base) if name not in peaks]:
            raise NotMeasured(f"{absent[0]} has no peak at scale vram")
        return peaks[variant] / peaks[base]

    def speeds(self, variant: str, base: str = BASELINE) -> dict[str, float]:
        """speed() at both micro-batches."""
        return {"small": self.speed(variant, base, 8), "large": self.speed(variant, base)}

    def savings(self, variant: str, base: str) -> dict:
        """What a row that spares memory leaves of it, and what it costs in F1."""
        first, large = self.first_peak(variant, base), self.peak(variant, base)
        return {"first": first, "large": large, "loss": self.f1(variant, base)}

    def f1(self, variant: str, base: str = BASELINE) -> tuple[float, float]:
        """F1 of a row minus another's, and half the 90 % interval; NaN where it was not measured."""
        try:
            return compare(self.quality, variant, base)
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


def _is(truth: bool) -> str:
    return HOLDS if truth else FAILS


def _stack(facts: Facts) -> Finding:
    values = facts.speeds("A4") | {"gain": facts.f1("A4")}
    faster = min(values["small"], values["large"]) > 1.17
    return values, {"faster by 17 % at both": _is(faster), "better F1": between(values["gain"], 0, math.inf)}


def _range(facts: Facts) -> Finding:
    values = facts.speeds("A4") | {"best": facts.speed("E-best")}
    return values, {"reachable": _is(values["large"] > 1.3)}


def _peft_quality(facts: Facts) -> Finding:
    theirs, ours, bias, room = facts.f1("B1"), facts.fresh("B1-all"), facts.f1("B2"), facts.room()

    def about(difference: tuple[float, float], loss: float) -> str:
        """Whether a loss is of about so much, within 4 points; open where there is not so much to lose."""
        return between(difference, -loss - 4, 4 - loss) if room > loss - 4 else OPEN

    return {"theirs": theirs, "ours": ours, "bias": bias, "room": room}, {
        "LoRA as they set it loses more than 2": between(theirs, -math.inf, -2),
        "it loses about 22": about(theirs, 22),
        "LoRA on every layer loses more than 2": between(ours, -math.inf, -2),
        "BitFit loses more than 2": between(bias, -math.inf, -2),
        "it loses about 19": about(bias, 19),
    }


def _peft_pays(facts: Facts) -> Finding:
    pairs = [(name, VARIANTS[name].parent) for name in ("EB1", "EB1-all", "EB2", "EB3")]
    rows = [(*pair, facts.speed(*pair), facts.peak(*pair)) for pair in pairs]
    speeds, peaks = [row[2] for row in rows], [row[3] for row in rows]
    return {"rows": rows}, {
        "memory": _is(max(peaks) < 1),
        "speed, LoRA on query and value": _is(speeds[0] > 1),
        "speed, LoRA on every linear layer": _is(speeds[1] > 1),
        "speed, biases or top layers": _is(min(speeds[2:]) > 1),
    }


def _adam8(facts: Facts) -> Finding:
    found = facts.savings("C1", "A3")
    less = _is(found["first"] < 0.85)
    return found, {"at least 15 % less, by their protocol": less, "within 1 F1": between(found["loss"], -1, 1)}


def _checkpointing(facts: Facts) -> Finding:
    found = facts.savings("C2", "A3")
    return found, {
        "at least 28 % less, by their protocol": _is(found["first"] < 0.72),
        "at micro-batch 32": _is(found["large"] < 0.72),
        "costs 2 F1": costs(found["loss"], 2),
    }


def _join(facts: Facts) -> Finding:
    f1 = facts.quality[facts.quality["status"] == "ok"].groupby("spec.variant")["quality.f1"].mean()
    if {"A4-b", "A4"} - set(f1.dropna().index):
        raise NotMeasured("A4-b and A4 have no F1")
    verdicts = {"wrong labels (not tested)": OPEN, "a wrong join suffices": _is(f1["A4-b"] < f1["A4"] - 20)}
    return {"wrong": f1["A4-b"], "right": f1["A4"]}, verdicts


def _backends(facts: Facts) -> Finding:
    values = facts.speeds("D1", "A3") | {"loss": facts.f1("D1", "A3")}
    as_fast = min(values["small"], values["large"]) > 0.95
    return values, {"at least 95 % of the speed": _is(as_fast), "within 1 F1": between(values["loss"], -1, 1)}


# In the order in which they are shown; each is named as its texts in texts/claims.md.j2 are.
CLAIMS = (_stack, _range, _peft_quality, _peft_pays, _adam8, _checkpointing, _join, _backends)


def facts_of(runs: pd.DataFrame, group: str) -> Facts:
    """The facts in all records of a group's hardware; where it has no bench group, the group's own speeds."""
    bench, vram = (usual(sibling(runs, group, scale)) for scale in ("bench", "vram"))
    lines = summarise(usual(select(runs, group)) if bench.empty else bench)
    return Facts(lines, usual(quality_runs(runs, group)), vram, usual(tries_of(runs, group)))


def claims_table(facts: Facts) -> pd.DataFrame:
    """Every claim: what we measured, whether each part of it holds, and why. Raises NotMeasured for another task than
    question answering, about which the seeds claim nothing."""
    if facts.bench["task.name"].iloc[0] != "qa":
        raise NotMeasured("the seeds' claims are about question answering")
    lines = []
    for check in CLAIMS:
        name = check.__name__.lstrip("_")
        try:
            values, verdicts = check(facts)
            measured, why = say(f"claims.{name}", **values), say(f"claims.{name}_why", **values)
        except NotMeasured as reason:
            measured, verdicts, why = MISSING, {"": OPEN}, f"Not measured: {reason}."
        said = "; ".join(f"{part}: **{verdict}**".removeprefix(": ") for part, verdict in verdicts.items())
        claim = say(f"claims.{name}_claim")
        lines.append({"claim of the seeds": claim, "measured here": measured, "verdict": said, "why": why})
    return pd.DataFrame(lines)
