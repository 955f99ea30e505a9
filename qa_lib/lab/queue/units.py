"""What of a plan of evidence is recorded, and which of its runs come next.

Records count where they are of the card at hand and of the code that this process has loaded, by
its digest (loaded.py), or of one that the plan says computed the same. They are told by the names
of data and model, so that the state of a plan is known without either.
"""

import dataclasses
import datetime
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from qa_lib.lab.queue.plan_file import EvidencePlan, Group
from qa_lib.loaded import CODE
from qa_lib.records.archive import Run, read_runs
from qa_lib.records.record import DEFAULT_PRESET

# Statuses of a run that need not be made again.
HAS_RESULT = ("ok", "oom")
# Seconds from the end of a run to the begin of the next one of its block, at most. Processes take
# 15 to 40 to start; a host that is given anew begins later, so that no block is put together of
# two.
MOST_BETWEEN_S = 180
# Seconds that a process takes beside the `wall_s` of its record, for its begin and its end. Not its
# `notebook_s`: notebooks drew pictures as well, for up to six minutes. A cold process imports,
# and others are forked with what they import.
START_S = 10
COLD_START_S = 30


@dataclass(frozen=True)
class Unit:
    """Runs of a group that count together: a block, or a single run."""

    group: Group
    seed: int
    variants: tuple[str, ...]
    """In the order in which they run."""


def units_of(groups: list[Group]) -> list[Unit]:
    """Return the units of groups in the order in which they are made, seed by seed."""
    units = []
    for group in groups:
        parts = [tuple(group.variants)]
        if not group.alone:
            parts = [(variant,) for variant in group.variants]
        units += [Unit(group, seed, variants) for seed in group.seeds for variants in parts]
    return units


class Recorded:
    """The records of a plan on one of its cards, in folders and archives below a runs folder."""

    def __init__(self, plan: EvidencePlan, card: str, runs: Path):
        self._codes = CODE.digest, *plan.codes
        self._like: dict[tuple, list[Run]] = defaultdict(list)
        for name in sorted({group.runs_group(card) for group in plan.groups}):
            for run in read_runs(runs, name):
                self._like[_key_of_run(run)].append(run)

    def results(self, unit: Unit) -> list[Run]:
        """Return a run of each of a unit's variants, in order, one soon after the other.

        Empty where there are no such runs. A run that ran out of memory has its result. A variant
        may have several runs, of other data by the same name for example: each block that they can
        be the next run of is followed, and the first one that is whole is returned.
        """
        blocks: list[list[Run]] = [[]]
        for variant in unit.variants:
            like = self._like[_key(unit.group, variant)]
            counting = [run for run in like if self._counts(run, unit.seed)]
            blocks = [
                [*block, run]
                for block in blocks
                for run in counting
                if not block or _follows(block[-1], run)
            ]
        return blocks[0] if blocks else []

    def _counts(self, run: Run, seed: int) -> bool:
        """Return whether a run is of that seed and of a code that counts, and has its result."""
        entry = run.record
        digest = entry["code"]["digest"] or ""
        return (
            entry["spec"]["seed"] == seed
            and digest.startswith(self._codes)
            and entry["status"] in HAS_RESULT
        )

    def seconds(self, unit: Unit) -> float:
        """Return how long a unit's processes take, one after the other."""
        return sum(self._seconds_of_run(unit.group, variant) for variant in unit.variants)

    def _seconds_of_run(self, group: Group, variant: str) -> float:
        """Return the most that a like run took, whatever its code; the plan's guess without one."""
        like = [run.record["time"]["wall_s"] for run in self._like[_key(group, variant)]]
        start_s = COLD_START_S if group.cold else START_S
        known = [wall_s + start_s for wall_s in like if wall_s is not None]
        return max(known, default=float(group.seconds))


def _key(group: Group, variant: str) -> tuple:
    """Return what the runs of a group's variant have in common, whatever their seed and code."""
    preset = dataclasses.asdict(group.sized_preset(variant))
    sizes = group.sizes(variant)
    counts = sizes.micro_batch, sizes.world
    return variant, *counts, group.model, group.data, tuple(preset.items())


def _key_of_run(run: Run) -> tuple:
    """Return the same of a run."""
    spec = run.record["spec"]
    counts = spec["settings"]["micro_batch"], spec["world"]
    names = run.record["model"]["name"], run.record["data"]["name"]
    preset = {name: spec["preset"][name] for name in DEFAULT_PRESET}
    return spec["variant"], *counts, *names, tuple(preset.items())


def _follows(before: Run, after: Run) -> bool:
    """Return whether a run began when the one before it had ended, and soon after."""
    ended = datetime.datetime.fromisoformat(before.record["time"]["ended"])
    started = datetime.datetime.fromisoformat(after.record["time"]["started"])
    return 0 <= (started - ended).total_seconds() <= MOST_BETWEEN_S


def next_units(
    units: list[Unit], recorded: Recorded, seconds_left: float, places: int
) -> list[Unit]:
    """Return the units to begin now: one block, or single runs for so many GPUs (`places`).

    They are the first that end in time, by what like runs took. Single runs go on as GPUs become
    free, in order, up to the next block that would end in time.
    """
    free_after = [0.0] * places  # seconds until each GPU is free
    chosen = []
    for unit in units:
        place = free_after.index(min(free_after))
        end = free_after[place] + recorded.seconds(unit)
        if end > seconds_left:
            continue
        if unit.group.alone:
            return chosen or [unit]
        free_after[place] = end
        chosen.append(unit)
    return chosen
