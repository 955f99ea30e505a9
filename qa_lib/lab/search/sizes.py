"""The micro-batch of a run: which sizes there are, which is quickest, and one for a whole plan.

Variants that are compared have one size, which `shared_size` chooses: the quickest by the committed
records at which the predicted memory of each fits into the card's whole memory. What is free now
would give a run another id each time that somebody else uses the card.
"""

import contextlib
import dataclasses
import math
from collections import Counter
from glob import escape, glob
from pathlib import Path
from typing import NamedTuple

import numpy as np

from qa_lib.errors import SpecError
from qa_lib.lab.search.history import committed_records, failed_records, failure_of
from qa_lib.lab.search.memory_estimate import USABLE, MemoryNeeds, why_unpredicted
from qa_lib.records import record
from qa_lib.records.files import RecordError
from qa_lib.spec.machine import Machine
from qa_lib.spec.resolve import resolve
from qa_lib.spec.spec import Spec


def divisors(batch: int, most: float) -> list[int]:
    """Return the micro-batches of at most `most` samples that divide a batch, the largest first."""
    return [size for size in range(batch, 0, -1) if batch % size == 0 and size <= most]


def at_micro_batch(spec: Spec, size: int, machine: Machine) -> Spec:
    """Return the spec at another micro-batch; one that is skipped stays so.

    Raises SpecError for a size that its batch or its processes cannot be divided by.
    """
    own = {name: value for name, value in spec.own.items() if name != "micro_batch"}
    resized = resolve(
        variant=spec.variant,
        preset=spec.preset.name,
        seed=spec.seed,
        machine=machine,
        data=spec.data,
        model=spec.model,
        data_source=spec.data_source,
        model_source=spec.model_source,
        micro_batch=size,
        **own,
    )
    return dataclasses.replace(resized, skip=resized.skip or spec.skip)


def quickest_first(sizes: list[int], records_of_variants: list[list[dict]]) -> list[int]:
    """Return micro-batches in the order of the time that a sample takes, the quickest first.

    The time is summed over variants, each of which has some records. Between measured sizes speeds
    are interpolated, and beyond the largest they do not grow. Equals keep their order.
    """
    seconds = np.zeros(len(sizes))  # that a sample takes, at each size
    for records in records_of_variants:
        speeds = {}  # micro-batch -> samples/s
        for entry in records:
            if entry["speed"]["samples_per_s"]:
                size = entry["spec"]["settings"]["micro_batch"]
                speeds[size] = entry["speed"]["samples_per_s"]
        if speeds:
            measured = sorted(speeds)
            known = [speeds[size] for size in measured]
            seconds += 1 / np.interp(sizes, [0, *measured], [0, *known])
    return [sizes[index] for index in np.argsort(seconds, kind="stable")]


def kept_micro_batch(spec: Spec, machine: Machine, runs: str | Path) -> int | None:
    """Return the micro-batch of the run that a spec has already, at any size; None without one.

    A run that ended ok goes before others, and a later one before an earlier. One that ran out of
    memory, or was skipped, does not count.
    """
    candidates = []  # (whether it ended ok, when it began, its micro-batch)
    folder = escape(str(Path(runs, spec.group)))
    name = escape(f"{spec.variant}-s{spec.seed}")
    for path in sorted(glob(f"{folder}/{name}-*")):
        # A folder without a whole record, or a size that the spec cannot have, is no run of it.
        with contextlib.suppress(RecordError, SpecError):
            entry = record.read_record(Path(path))
            size = entry["spec"]["settings"]["micro_batch"]
            is_same_run = at_micro_batch(spec, size, machine).hash == entry["spec"]["hash"]
            if is_same_run and entry["status"] not in ("oom", "skipped"):
                candidates.append((entry["status"] == "ok", entry["time"]["started"], size))
    if not candidates:
        return None
    _, _, size = max(candidates)
    return size


@dataclasses.dataclass(frozen=True)
class SharedSize:
    """The micro-batch that the specs of a plan are to have in common, and why."""

    micro_batch: int | None = None  # None: each spec keeps the size that it has
    reason: str | None = None  # a sentence for the specs; None: there is nothing to say


class CardMemory:
    """The whole memory of a machine's first card, and what runs would take of it."""

    def __init__(self, machine: Machine, runs: str | Path):
        # What is free is at least there, where the whole is not known.
        self.gib = (machine.total_mib or machine.free_mib) / 1024
        self._runs = runs
        self._needs = MemoryNeeds()
        self._ran_out = {}  # length of samples -> records of runs that ran out of memory

    def needed(self, spec: Spec) -> float:
        """Return the GiB that a run takes.

        It is infinite where a run of its variant ran out of memory at its size or a smaller one.
        """
        length = spec.preset.max_length
        if length not in self._ran_out:
            failed = failed_records(spec, self._runs)
            self._ran_out[length] = [entry for entry in failed if entry["status"] == "oom"]
        if failure_of(spec, self._ran_out[length]):
            return math.inf
        return self._needs.gib(spec)

    def holds(self, gib: float) -> bool:
        """Return whether a run that takes so much fits on the card."""
        return gib <= USABLE * self.gib


def shared_size(
    specs: list[Spec], kept_sizes: list[int], most: float, machine: Machine, runs: str | Path
) -> SharedSize:
    """Return the micro-batch of at most `most` samples that specs are to have in common.

    Sizes that runs below `runs` have already, `kept_sizes`, come first. No size is chosen where the
    card's memory is not known, and where a run's is not predicted, which the reason says.
    """
    card = CardMemory(machine, runs)
    if not card.gib:
        return SharedSize()
    # Memory and speed are the same for every seed.
    without_seeds = {
        (spec.variant, repr(spec.preset), spec.world, spec.stages): spec for spec in specs
    }
    every = list(without_seeds.values())
    able = [spec for spec in every if not spec.skip]
    for spec in able:
        why = why_unpredicted(spec)
        if why:
            return SharedSize(
                reason=f"micro-batch {spec.asked.micro_batch}: the usual one, since {why}; "
                "--micro-batch takes another"
            )
    options = _options_by_size(able or every, most, machine)
    if not options:
        return SharedSize()

    committed = committed_records(specs[0].preset.task)
    by_speed = quickest_first(list(options), [committed.get(spec.variant, []) for spec in able])
    preferred = [size for size, _ in Counter(kept_sizes).most_common() if size in options]
    sizes = list(dict.fromkeys([*preferred, *by_speed]))
    if not able:  # nothing runs here: the size is that of a machine that can
        return SharedSize(sizes[0], f"micro-batch {sizes[0]}: the quickest known")

    fit = _first_that_fits(sizes, options, card)
    if fit is None:
        smallest = min(options)
        reason = f"micro-batch {smallest}: even that may not fit on {machine.hardware}"
        return SharedSize(smallest, reason)
    why = "the quickest that fits"
    if fit.micro_batch in preferred:
        why = "that of runs that are there, and fits"
    memory = f"({fit.variant}: {fit.needed_gib:.1f} of {card.gib:.1f} GiB)"
    reason = f"micro-batch {fit.micro_batch}: {why} on {machine.hardware} {memory}"
    return SharedSize(fit.micro_batch, reason)


class Fit(NamedTuple):
    """A micro-batch at which runs fit on a card."""

    micro_batch: int
    needed_gib: float  # of the run that takes most
    variant: str  # of that run


def _first_that_fits(
    sizes: list[int], options: dict[int, list[Spec]], card: CardMemory
) -> Fit | None:
    """Return the first of `sizes` at which the specs fit on the card; None where there is none.

    A spec that fits at no size does not count: it would take the others' speed and run out of
    memory all the same.
    """
    smallest = options[min(options)]
    fitting = [place for place, option in enumerate(smallest) if card.holds(card.needed(option))]
    if not fitting:
        return None
    for size in sizes:
        at_size = [options[size][place] for place in fitting]
        needed_gib, variant = max((card.needed(option), option.variant) for option in at_size)
        if card.holds(needed_gib):
            return Fit(size, needed_gib, variant)
    return None


def _options_by_size(specs: list[Spec], most: float, machine: Machine) -> dict[int, list[Spec]]:
    """Return the micro-batches that all specs can take, the largest first, and the specs at each.

    The specs at a size are in the order of `specs`.
    """
    options = {}
    largest_batch = max(spec.preset.batch or spec.asked.micro_batch for spec in specs)
    for size in divisors(largest_batch, most):
        with contextlib.suppress(SpecError):  # it does not divide the work of one of them
            options[size] = [at_micro_batch(spec, size, machine) for spec in specs]
    return options
