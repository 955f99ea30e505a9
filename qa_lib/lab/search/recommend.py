"""What a plan leaves to the machine: the variant that `recommended` stands for, and the micro-batch of one's own
trainings (presets.QUICKEST).

`choose` takes the first of its task's variants `on_gpu` or `on_cpu` (spec/tasks.py), quickest first, that has its kernels
on this GPU and whose predicted memory fits into what is free, at the micro-batch that is quickest by the committed
records. `with_quickest_size` gives all variants of a plan one micro-batch, so that they are compared: the quickest by
the same records at which the same prediction fits into the card's whole memory. What is free now would give a run
another id each time that somebody else uses the card.

What this card could not do before, by the records below `runs`, is passed over. A run that is there keeps its size, so
that it is resumed or returned, and not trained again at another.
"""

import contextlib
import dataclasses
import math
from collections import Counter
from glob import escape, glob
from pathlib import Path

import numpy as np

from qa_lib.data.load import load_data
from qa_lib.errors import SpecError, UserError
from qa_lib.lab.search.memory_estimate import SquadLengths, config_of, estimate, unpredicted
from qa_lib.paths import ROOT
from qa_lib.records import record
from qa_lib.records.archive import read_runs
from qa_lib.spec.machine import CONTEXT_GIB, Machine
from qa_lib.spec.presets import QUICKEST
from qa_lib.spec.resolve import resolve
from qa_lib.spec.rules import lacking
from qa_lib.spec.settings import Settings
from qa_lib.spec.spec import Spec
from qa_lib.spec.tasks import TASKS

COMMITTED = ROOT / "runs"  # records; of an installed package those of the reference groups
ROOM = 0.9  # of the memory that a run may take: the estimate is within a tenth of what was measured


def choose(spec: Spec, machine: Machine, runs: str | Path) -> Spec:
    """The run to take in place of `spec`, whose `chosen` says what is left to the machine; the first line of its
    `adjusted` says which one it is, and why. Raises UserError where there is none."""
    failed, free, kind = _failed(spec, runs), machine.free_mib / 1024, config_of(spec).model_type
    passed = []  # why an option was passed over, behind the GiB that it would take
    loaded = {}
    for option in _options(spec, machine, runs):
        at = f"{option.variant} at micro-batch {option.settings.micro_batch}"
        if obstacle := option.skip or lacking(option.settings, kind) or _failure(option, failed):
            passed.append((math.inf, f"{option.variant} {obstacle}"))
            continue
        needed = _needed_gib(option, loaded) if free else 0.0
        finished = _sizes_are_kept(spec) and _is_trained(option, runs)
        if needed > ROOM * free and not finished:
            passed.append((needed, f"{at} would take {needed:.1f} of {free:.1f} GiB that are free"))
            continue
        reason = f"since {passed[-1][1]}" if passed else "the quickest known"
        memory = f"; predicted: {needed:.1f} of {free:.1f} GiB that are free" if needed else ""
        if finished:
            reason, memory = "which is finished", ""
        said = f"recommended: {at} on {machine.hardware}, {reason}{memory}"
        return dataclasses.replace(option, chosen=spec.chosen, adjusted=[said, *option.adjusted])
    raise UserError(
        f"no variant is known that can train {spec.model['name']} on {machine.hardware}: {min(passed)[1]}; end what "
        "else holds its memory (nvidia-smi lists it), give a smaller --model or --max-length, or a variant by its name"
    )


def with_quickest_size(
    specs: list[Spec], machine: Machine, runs: str | Path, has_config: bool = True
) -> list[Spec]:
    """The specs of one plan, those whose micro-batch is open with one that is chosen for all of them; the first line of
    their `adjusted` says which, and why.

    One that has a run below `runs` keeps its size, and the others take it too where it fits them. On a CPU, and where
    memory is not predicted or the model's config.json is not to be had, the variants' own size stays. Where
    `recommended` is among the specs, it has no larger size than the others, and they have none that did not fit it.
    """
    left = [spec for spec in specs if _is_open(spec)]
    if not left:
        return specs
    kept = {spec.run_path: _kept_size(spec, machine, runs) for spec in left}
    beside = [spec for spec in specs if spec.recommended and "micro_batch" in spec.chosen]
    most = min((spec.asked.micro_batch for spec in beside), default=math.inf)
    size, said = None, None
    if machine.gpus and has_config:
        size, said = _size_of_all(left, [*filter(None, kept.values())], most, machine, runs)
    found = []
    for spec in specs:
        own = kept.get(spec.run_path)
        if own and own != (size or spec.asked.micro_batch):
            there = _at(spec, own, machine)
            found.append(_told(there, f"micro-batch {own}: that of {there.run_id}, which is there"))
        elif spec.run_path in kept:
            found.append(_taking(spec, size, said, machine))
        elif spec in beside and size and size < spec.asked.micro_batch:
            asked = dataclasses.replace(spec.asked, micro_batch=size)
            fixed = dataclasses.replace(spec, asked=asked, chosen=["variant"])
            found.append(dataclasses.replace(choose(fixed, machine, runs), chosen=spec.chosen))
        else:
            found.append(spec)
    return found


def _is_open(spec: Spec) -> bool:
    """Whether the micro-batch of a variant that was named is left to `with_quickest_size`."""
    return spec.chosen == ["micro_batch"]


def _sizes_are_kept(spec: Spec) -> bool:
    """Whether the preset is one of those at which a run that is there keeps its size."""
    return spec.preset.name in QUICKEST


def _is_trained(spec: Spec, runs: str | Path) -> bool:
    """Whether a run ended ok, so that its result takes no memory any more."""
    with contextlib.suppress(record.RecordError):
        entry = record.read_record(Path(runs, spec.run_path))
        return (entry["status"], entry["spec"]["hash"]) == ("ok", spec.hash)
    return False


def _told(spec: Spec, said: str) -> Spec:
    return dataclasses.replace(spec, chosen=["micro_batch"], adjusted=[said, *spec.adjusted])


def _at(spec: Spec, size: int, machine: Machine) -> Spec:
    """The spec at a micro-batch. Raises SpecError where its batch or its processes do not divide by it."""
    own = {name: value for name, value in spec.own.items() if name != "micro_batch"}
    sources = (spec.data, spec.model, spec.data_source, spec.model_source)
    found = resolve(spec.variant, spec.preset.name, spec.seed, machine, *sources, size, **own)
    return dataclasses.replace(found, skip=found.skip or spec.skip)


def _taking(spec: Spec, size: int | None, said: str | None, machine: Machine) -> Spec:
    """The spec at the size of all, with what is said of that; at the size that it has where there is none, or where it
    is skipped and could not take it."""
    if size:
        with contextlib.suppress(SpecError):
            return _told(_at(spec, size, machine), said)
    if said:
        return _told(spec, said)
    if "micro_batch" in spec.own:
        usual, own = Settings().micro_batch, spec.asked.micro_batch
        return _told(
            spec, f"micro-batch {own}: the largest up to {usual} that divides the work of a step"
        )
    return dataclasses.replace(spec, chosen=[])


def _kept_size(spec: Spec, machine: Machine, runs: str | Path) -> int | None:
    """The micro-batch of the run that there is of a spec at any size; a run that ended ok goes before others, and a
    later one before an earlier. None without one. One that ran out of memory is none."""
    found = []
    names = f"{escape(str(Path(runs, spec.group)))}/{escape(f'{spec.variant}-s{spec.seed}')}-*"
    for path in map(Path, sorted(glob(names))):
        with contextlib.suppress(record.RecordError, SpecError):
            entry = record.read_record(path)
            size = entry["spec"]["settings"]["micro_batch"]
            same = _at(spec, size, machine).hash == entry["spec"]["hash"]
            if same and entry["status"] not in ("oom", "skipped"):
                found.append((entry["status"] == "ok", entry["time"]["started"], size))
    return max(found)[-1] if found else None


class Room:
    """The whole memory of a machine's card, and what runs are predicted to take of it."""

    def __init__(self, machine: Machine, runs: str | Path):
        # What is free is at least there.
        self.gib = (machine.total_mib or machine.free_mib) / 1024
        self.runs = runs
        self.loaded = {}  # samples that predictions had to read, see _needed_gib
        self.ran_out = {}  # length of samples -> the records of runs that ran out of memory

    def needed(self, spec: Spec) -> float:
        """GiB that a run takes; infinite where a run of its variant ran out of memory at its size or a smaller one."""
        length = spec.preset.max_length
        if length not in self.ran_out:
            failed = _failed(spec, self.runs)
            self.ran_out[length] = [entry for entry in failed if entry["status"] == "oom"]
        return math.inf if _failure(spec, self.ran_out[length]) else _needed_gib(spec, self.loaded)

    def holds(self, gib: float) -> bool:
        return gib <= ROOM * self.gib


def _size_of_all(
    left: list[Spec], kept: list[int], most: float, machine: Machine, runs: str | Path
) -> tuple[int | None, str | None]:
    """The micro-batch that specs are to have in common, at most `most`, and a line that says why; sizes that were
    `kept` come first. None where memory is not predicted: the line says so where it is known why."""
    room = Room(machine, runs)
    if not room.gib:
        return None, None
    # Memory and speed are the same for every seed.
    every = {(spec.variant, repr(spec.preset), spec.world, spec.stages): spec for spec in left}
    able = [spec for spec in every.values() if not spec.skip]
    for spec in able:
        if why := unpredicted(spec):
            usual = f"micro-batch {spec.asked.micro_batch}: the usual one, since {why}"
            return None, f"{usual}; --micro-batch takes another"
    options = _options_by_size(able or [*every.values()], most, machine)
    if not options:
        return None, None
    committed = _committed(left[0].preset.task)
    known = [committed.get(spec.variant, []) for spec in able]
    preferred = [size for size, _ in Counter(kept).most_common() if size in options]
    in_order = dict.fromkeys([*preferred, *_quickest_first([*options], known)])
    if not able:  # nothing runs here: the size is that of a machine that can
        size = next(iter(in_order))
        return size, f"micro-batch {size}: the quickest known"
    # What fits at no size would take the others' speed and run out of memory all the same.
    least = min(options)
    fitting = [n for n in range(len(able)) if room.holds(room.needed(options[least][n]))]
    for size in in_order if fitting else ():
        needs = [(room.needed(options[size][n]), able[n].variant) for n in fitting]
        needed, variant = max(needs)
        if room.holds(needed):
            why = "the quickest that fits"
            if size in preferred:
                why = "that of runs that are there, and fits"
            takes = f"({variant}: {needed:.1f} of {room.gib:.1f} GiB)"
            return size, f"micro-batch {size}: {why} on {machine.hardware} {takes}"
    return least, f"micro-batch {least}: even that may not fit on {machine.hardware}"


def _options_by_size(specs: list[Spec], most: float, machine: Machine) -> dict[int, list[Spec]]:
    """The micro-batches, largest first, that all of some specs can take, and the specs at each."""
    found = {}
    batch = max(spec.preset.batch or spec.asked.micro_batch for spec in specs)
    for size in range(batch, 0, -1):
        if batch % size == 0 and size <= most:
            with contextlib.suppress(SpecError):  # it does not divide the work of one of them
                found[size] = [_at(spec, size, machine) for spec in specs]
    return found


def _failed(spec: Spec, runs: str | Path) -> list[dict]:
    """The records of what this kind of card could not do with this model at this length, whatever their preset and
    code; a search's are not among them, which go up to a limit. A model is known by name and revision: the folder of
    every model that a run keeps is called `model`."""
    found = []
    for entry in (run.record for run in read_runs(runs, left_out=lambda *_: None)):
        of_this_card = (entry["spec"]["hardware"], entry["spec"]["search"]) == (spec.hardware, "")
        names = ("name", "revision")
        of_this_model = all(entry["model"][name] == spec.model[name] for name in names)
        of_this_length = entry["spec"]["preset"]["max_length"] == spec.preset.max_length
        if of_this_card and of_this_model and of_this_length and record.unable(entry):
            found.append(entry)
    return found


def _committed(task: str) -> dict[str, list[dict]]:
    """The committed records of a task's reference group, by variant."""
    found = {}
    for run in read_runs(COMMITTED, TASKS[task].reference, left_out=lambda *_: None):
        found.setdefault(run.record["spec"]["variant"], []).append(run.record)
    return found


def _options(spec: Spec, machine: Machine, runs: str | Path) -> list[Spec]:
    """Each of those variants at every micro-batch that is open, the one to prefer first."""
    task, committed = TASKS[spec.preset.task], _committed(spec.preset.task)
    found = []
    for name in task.on_gpu if machine.gpus else task.on_cpu:
        named = dataclasses.replace(spec, variant=name, skip=None)
        sizes = _sizes(spec, committed.get(name, []))
        if "micro_batch" in spec.chosen and _sizes_are_kept(spec):
            sizes = [*filter(None, [_kept_size(named, machine, runs)]), *sizes]
        for size in dict.fromkeys(sizes):
            found.append(_at(named, size, machine))
    return found


def _sizes(spec: Spec, entries: list[dict]) -> list[int]:
    """The micro-batches that are open, the quickest first by some records. On a CPU, of whose memory nothing is
    predicted, none is larger than usual."""
    if "micro_batch" not in spec.chosen:
        return [spec.asked.micro_batch]
    usual = Settings().micro_batch
    batch = spec.preset.batch or usual
    most = usual if spec.hardware == "cpu" else batch
    sizes = [size for size in range(most, 0, -1) if batch % size == 0]
    return _quickest_first(sizes, [entries])


def _quickest_first(sizes: list[int], known: list[list[dict]]) -> list[int]:
    """Micro-batches in the order of the time that a sample takes, summed over variants with some `known` records each.
    Between measured sizes speeds are interpolated, and beyond the largest they do not grow; equals keep their order."""
    seconds = np.zeros(len(sizes))
    for entries in known:
        speeds = {
            entry["spec"]["settings"]["micro_batch"]: entry["speed"]["samples_per_s"]
            for entry in entries
            if entry["speed"]["samples_per_s"]
        }
        if speeds:
            measured = sorted(speeds)
            seconds += 1 / np.interp(sizes, [0, *measured], [0, *map(speeds.get, measured)])
    return [sizes[place] for place in np.argsort(seconds, kind="stable")]


def _failure(option: Spec, failed: list[dict]) -> str | None:
    """What keeps this card from an option, by the records of what it could not do: an error of the variant, or memory
    that ran out at this size or a smaller one."""
    for entry in failed:
        size, said = (
            entry["spec"]["settings"]["micro_batch"],
            entry["error"]["message"] or entry["error"]["kind"],
        )
        may_fit = entry["status"] == "oom" and option.settings.micro_batch < size
        if entry["spec"]["variant"] == option.variant and not may_fit:
            return f"failed here at micro-batch {size} ({said[:80]}; {entry['group']}/{entry['run_id']})"
    return None


def _needed_gib(spec: Spec, loaded: dict) -> float:
    """GiB that a run is predicted to take of its GPU; 0 where that is not known. `loaded` keeps the samples of data
    that had to be read, as the run reads them, for other variants of one length."""
    if unpredicted(spec):
        return 0.0
    length = (spec.preset.max_length, spec.preset.stride)
    if spec.settings.padding != "packed":
        samples = None  # its micro-batches are as long as can be
    elif spec.data_source == "squad_v2":
        samples = SquadLengths(*length)
    else:
        samples = loaded[length] = loaded.get(length) or load_data(spec).samples
    return estimate(spec, samples)["reserved_mib"] / 1024 + CONTEXT_GIB
