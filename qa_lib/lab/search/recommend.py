"""What a plan leaves to the machine: the variant behind `recommended`, and the micro-batch.

`choose` takes the first of its task's variants that has its kernels on this GPU and whose predicted
memory fits into what is free, at the micro-batch that is quickest by the committed records. Those
are `on_gpu` or `on_cpu` (TASKS), and for several processes `on_gpus` or `on_cpus`, the quickest
first. `with_quickest_size` gives all variants of a plan one micro-batch (sizes.py), at the presets
for one's own training (presets.QUICKEST).

What this card could not do before, by the records below `runs`, is passed over (history.py). A run
that is there keeps its size, so that it is resumed or returned, and not trained again at another.
"""

import contextlib
import dataclasses
import math
from pathlib import Path

from qa_lib.errors import SpecError, UserError
from qa_lib.lab.search.history import (
    committed_records,
    failed_records,
    failure_of,
    is_trained,
)
from qa_lib.lab.search.memory_estimate import USABLE, MemoryNeeds
from qa_lib.lab.search.sizes import (
    SharedSize,
    at_micro_batch,
    divisors,
    kept_micro_batch,
    quickest_first,
    shared_size,
)
from qa_lib.lab.search.step_memory import config_of
from qa_lib.spec.machine import Machine
from qa_lib.spec.presets import QUICKEST
from qa_lib.spec.rules import lacking, lacking_gpus
from qa_lib.spec.settings import Settings
from qa_lib.spec.spec import Spec
from qa_lib.spec.tasks import TASKS

# The variant.


def choose(spec: Spec, machine: Machine, runs: str | Path) -> Spec:
    """Return the run to take in place of `spec`, whose `chosen` says what is left to the machine.

    The first line of its `adjusted` says which one it is, and why. Raises UserError where no
    variant can train the model here.
    """
    why = lacking_gpus(machine, spec.world)
    if why:
        raise UserError(f"recommended {why}")
    model_type = config_of(spec).model_type
    failed = failed_records(spec, runs)
    free_gib = machine.free_mib / 1024  # 0 where that is not known
    needs = MemoryNeeds()
    passed_over = []  # (GiB that an option would take, why it was passed over)
    for option in _options(spec, machine, runs):
        obstacle = option.skip or lacking(option.settings, model_type) or failure_of(option, failed)
        if obstacle:
            passed_over.append((math.inf, f"{option.variant} {obstacle}"))
            continue
        option_at_size = f"{option.variant} at micro-batch {option.settings.micro_batch}"
        needed_gib = needs.gib(option) if free_gib else 0.0
        is_finished = spec.preset.name in QUICKEST and is_trained(option, runs)
        if needed_gib > USABLE * free_gib and not is_finished:
            memory = f"{needed_gib:.1f} of {free_gib:.1f} GiB that are free"
            passed_over.append((needed_gib, f"{option_at_size} would take {memory}"))
            continue
        if is_finished:
            reason = "which is finished"
        else:
            reason = f"since {passed_over[-1][1]}" if passed_over else _first_of_list(machine)
            if needed_gib:
                reason += f"; predicted: {needed_gib:.1f} of {free_gib:.1f} GiB that are free"
        where = f"{spec.world} x {machine.hardware}" if spec.world > 1 else machine.hardware
        sentence = f"recommended: {option_at_size} on {where}, {reason}"
        slower = slower_than_one(option)
        if slower:
            sentence += f"; {slower}"
        return dataclasses.replace(
            option, chosen=spec.chosen, adjusted=[sentence, *option.adjusted]
        )
    _, nearest = min(passed_over)
    raise UserError(
        f"no variant is known that can train {spec.model['name']} on {machine.hardware}: "
        f"{nearest}; end what else holds its memory (nvidia-smi lists it), give a smaller "
        "--model or --max-length, or a variant by its name"
    )


def _first_of_list(machine: Machine) -> str:
    """Return why the first variant of a list is chosen for a machine."""
    return "the quickest known" if machine.gpus else "the first of a list for CPUs"


def _options(spec: Spec, machine: Machine, runs: str | Path) -> list[Spec]:
    """Return the task's variants at every micro-batch that is open, the one to prefer first."""
    task = TASKS[spec.preset.task]
    if spec.world > 1:
        variants = task.on_gpus if machine.gpus else task.on_cpus
    else:
        variants = task.on_gpu if machine.gpus else task.on_cpu
    committed = committed_records(spec.preset.task)
    options = []
    for variant in variants:
        named = dataclasses.replace(spec, variant=variant, skip=None)
        sizes = open_sizes(spec, committed.get(variant, []))
        if "micro_batch" in spec.chosen and spec.preset.name in QUICKEST:
            kept = kept_micro_batch(named, machine, runs)
            if kept:
                sizes = [kept, *sizes]
        for size in dict.fromkeys(sizes):
            options.append(at_micro_batch(named, size, machine))
    return options


def open_sizes(spec: Spec, records: list[dict]) -> list[int]:
    """Return the micro-batches that a variant may have, the quickest first by its records.

    On a CPU, of whose memory nothing is predicted, none is larger than usual.
    """
    if "micro_batch" not in spec.chosen:
        return [spec.asked.micro_batch]
    usual = Settings().micro_batch
    batch = spec.preset.batch or usual
    most = usual if spec.hardware == "cpu" else batch
    # Each process has an equal part of the batch.
    return quickest_first(divisors(batch // spec.world, most), [records])


def slower_than_one(option: Spec) -> str | None:
    """Return in words that one GPU trains quicker than several at an option's batch.

    None where the records do not say so: of this variant on so many GPUs, and of any that is
    recommended on one, at the same samples a step.
    """
    if option.world == 1:
        return None
    task = TASKS[option.preset.task]
    records = committed_records(task.name, task.reference_of_several)
    batch = option.preset.batch
    of_several = _most_samples_per_s(records.get(option.variant, []), option.world, batch)
    of_one = max(_most_samples_per_s(records.get(name, []), 1, batch) for name in task.on_gpu)
    if of_several == 0 or of_several >= of_one:
        return None
    return (
        f"one GPU is quicker at {batch} samples a step ({of_one:,.0f} samples/s "
        f"instead of {of_several:,.0f}): --batch takes more"
    )


def _most_samples_per_s(records: list[dict], world: int, batch: int) -> float:
    """Return the highest speed of records with so many processes and samples a step; 0 if none."""
    speeds = [
        entry["speed"]["samples_per_s"]
        for entry in records
        if (entry["parallel"]["world"] or 1) == world
        and entry["spec"]["preset"]["effective_batch"] == batch
        and entry["speed"]["samples_per_s"]
    ]
    return max(speeds, default=0.0)


# The micro-batch of variants that are named.


def with_quickest_size(
    specs: list[Spec], machine: Machine, runs: str | Path, has_config: bool = True
) -> list[Spec]:
    """Return the specs of one plan, those of an open micro-batch with one chosen for all of them.

    The first line of their `adjusted` says which, and why. A spec that has a run below `runs` keeps
    its size, and the others take it too where it fits them. On a CPU, and where memory is not
    predicted or the model has no config.json to be read (`has_config`), the variants' own size
    stays. A `recommended` spec gets no larger size than the others, and they get none that did not
    fit it.
    """
    open_specs = [spec for spec in specs if _is_open(spec)]
    if not open_specs:
        return specs
    kept = {spec.run_path: kept_micro_batch(spec, machine, runs) for spec in open_specs}
    shared = SharedSize()
    if machine.gpus and has_config:
        kept_sizes = [size for size in kept.values() if size]
        most = min((spec.asked.micro_batch for spec in specs if _is_free(spec)), default=math.inf)
        shared = shared_size(open_specs, kept_sizes, most, machine, runs)
    result = []
    for spec in specs:
        if _is_open(spec):
            result.append(_sized(spec, kept[spec.run_path], shared, machine))
        elif _is_free(spec) and shared.micro_batch and shared.micro_batch < spec.asked.micro_batch:
            result.append(_chosen_again(spec, shared.micro_batch, machine, runs))
        else:
            result.append(spec)
    return result


def _is_open(spec: Spec) -> bool:
    """Return whether a variant was named, and its micro-batch is left to the machine."""
    return spec.chosen == ["micro_batch"]


def _is_free(spec: Spec) -> bool:
    """Return whether both the variant and its micro-batch were left to the machine."""
    return spec.recommended and "micro_batch" in spec.chosen


def _sized(spec: Spec, kept: int | None, shared: SharedSize, machine: Machine) -> Spec:
    """Return an open spec at the size of its run, if there is one, or at the shared one.

    The size of the spec stays where there is none, or where it is skipped and cannot take the
    shared one.
    """
    usual = shared.micro_batch or spec.asked.micro_batch
    if kept and kept != usual:
        run = at_micro_batch(spec, kept, machine)
        return _explained(run, f"micro-batch {kept}: that of {run.run_id}, which is there")
    if shared.micro_batch:
        with contextlib.suppress(SpecError):
            resized = at_micro_batch(spec, shared.micro_batch, machine)
            return _explained(resized, shared.reason)
    if shared.reason:
        return _explained(spec, shared.reason)
    if "micro_batch" in spec.own:
        size, most = spec.asked.micro_batch, Settings().micro_batch
        return _explained(
            spec, f"micro-batch {size}: the largest up to {most} that divides the work of a step"
        )
    return dataclasses.replace(spec, chosen=[])


def _explained(spec: Spec, sentence: str) -> Spec:
    """Return the spec with a sentence about the micro-batch that was chosen for it."""
    return dataclasses.replace(spec, chosen=["micro_batch"], adjusted=[sentence, *spec.adjusted])


def _chosen_again(spec: Spec, size: int, machine: Machine, runs: str | Path) -> Spec:
    """Return the choice in place of a recommended spec at a micro-batch that is given now."""
    asked = dataclasses.replace(spec.asked, micro_batch=size)
    at_size = dataclasses.replace(spec, asked=asked, chosen=["variant"])
    return dataclasses.replace(choose(at_size, machine, runs), chosen=spec.chosen)
