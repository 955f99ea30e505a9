"""What `recommended` stands for on a machine: one of its task's variants `on_gpu` or `on_cpu` (tasks.toml), at a
micro-batch.

It takes the first of these, quickest first, that has its kernels on this GPU and whose predicted memory fits into what
is free, at the micro-batch that is quickest by the committed records. What this card could not do before, by the
records below `runs`, is passed over.
"""

import dataclasses
import math
from pathlib import Path

import numpy as np

from qa_lib import record
from qa_lib.archive import read_runs
from qa_lib.errors import UserError
from qa_lib.paths import ROOT
from qa_lib.run.memory_estimate import SquadLengths, config_of, estimate, unpredicted
from qa_lib.spec import CONTEXT_GIB, Machine, Spec, resolve
from qa_lib.variants import TASKS, Settings, lacking

COMMITTED = ROOT / "runs"  # records; of an installed package those of the reference groups
ROOM = 0.9  # of the free memory that a run may take: the estimate is within a tenth of what was measured


def choose(spec: Spec, machine: Machine, runs: str | Path) -> Spec:
    """The run to take in place of `spec`, whose `chosen` says what is left to the machine; the first line of its
    `adjusted` says which one it is, and why. Raises UserError where there is none."""
    failed, free, kind = _failed(spec, runs), machine.free_mib / 1024, config_of(spec).model_type
    passed = []  # why an option was passed over, behind the GiB that it would take
    for option in _options(spec, machine):
        at = f"{option.variant} at micro-batch {option.settings.micro_batch}"
        if obstacle := option.skip or lacking(option.settings, kind) or _failure(option, failed):
            passed.append((math.inf, f"{option.variant} {obstacle}"))
            continue
        needed = _needed_gib(option) if free else 0.0
        if needed > ROOM * free:
            passed.append((needed, f"{at} would take {needed:.1f} of {free:.1f} GiB that are free"))
            continue
        reason = f"since {passed[-1][1]}" if passed else "the quickest known"
        memory = f"; predicted: {needed:.1f} of {free:.1f} GiB that are free" if needed else ""
        said = f"recommended: {at} on {machine.hardware}, {reason}{memory}"
        return dataclasses.replace(option, chosen=spec.chosen, adjusted=[said, *option.adjusted])
    raise UserError(
        f"no variant is known that can train {spec.model['name']} on {machine.hardware}: {min(passed)[1]}; end what "
        "else holds its memory (nvidia-smi lists it), give a smaller --model or --max-length, or a variant by its name"
    )


def _failed(spec: Spec, runs: str | Path) -> list[dict]:
    """The records of what this kind of card could not do with this model at this length, whatever their preset and
    code; a search's are not among them, which go up to a limit."""
    found = [
        run.record for run in read_runs(runs, left_out=lambda *_: None) if record.unable(run.record)
    ]
    found = [
        entry
        for entry in found
        if (entry["spec"]["hardware"], entry["spec"]["search"]) == (spec.hardware, "")
    ]
    alike = (spec.model["name"], spec.preset.max_length)
    return [
        entry
        for entry in found
        if (entry["model"]["name"], entry["spec"]["preset"]["max_length"]) == alike
    ]


def _options(spec: Spec, machine: Machine) -> list[Spec]:
    """Each of those variants at every micro-batch that is open, the one to prefer first."""
    task = TASKS[spec.preset.task]
    committed = [
        run.record for run in read_runs(COMMITTED, task["reference"], left_out=lambda *_: None)
    ]
    own = {name: value for name, value in spec.own.items() if name != "micro_batch"}
    sources = (spec.data, spec.model, spec.data_source, spec.model_source)
    found = []
    for name in task["on_gpu" if machine.gpus else "on_cpu"]:
        for size in _sizes(
            spec, [entry for entry in committed if entry["spec"]["variant"] == name]
        ):
            found.append(resolve(name, spec.preset.name, spec.seed, machine, *sources, size, **own))
    return found


def _sizes(spec: Spec, entries: list[dict]) -> list[int]:
    """The micro-batches that are open, the quickest first by some records: between measured sizes speeds are
    interpolated, and beyond the largest they do not grow. On a CPU, of whose memory nothing is predicted, none is
    larger than usual."""
    if "micro_batch" not in spec.chosen:
        return [spec.asked.micro_batch]
    usual = Settings().micro_batch
    batch = spec.preset.batch or usual
    sizes = [
        size
        for size in range(usual if spec.hardware == "cpu" else batch, 0, -1)
        if batch % size == 0
    ]
    speeds = {
        entry["spec"]["settings"]["micro_batch"]: entry["speed"]["samples_per_s"] or 0.0
        for entry in entries
    }
    known = sorted(speeds)
    expected = np.interp(sizes, [0, *known], [0, *map(speeds.get, known)])
    return [sizes[place] for place in np.argsort(-expected, kind="stable")]


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


def _needed_gib(spec: Spec) -> float:
    """GiB that a run is predicted to take of its GPU; 0 where that is not known."""
    if unpredicted(spec):
        return 0.0
    # Other data are read, which the run does as well.
    lengths = (
        SquadLengths(spec.preset.max_length, spec.preset.stride)
        if spec.data_source == "squad_v2"
        else None
    )
    return estimate(spec, lengths)["reserved_mib"] / 1024 + CONTEXT_GIB
