"""Variant x preset x seed x machine: the spec of one run. Standard library only."""

import dataclasses

from qa_lib.errors import SpecError
from qa_lib.spec import rules
from qa_lib.spec.machine import Machine
from qa_lib.spec.presets import Preset, find_preset, sized, whole_number
from qa_lib.spec.settings import Settings
from qa_lib.spec.shapes import check_positions
from qa_lib.spec.spec import Spec
from qa_lib.spec.variants import Variant, find_variant

ALL = "all"  # in place of a number of processes: one for each GPU
WORLD = 2  # processes of a parallel variant that is asked for without a number


def resolve(
    variant: str,
    preset: str,
    seed: int,
    machine: Machine,
    data: dict,
    model: dict,
    data_source: str,
    model_source: str,
    micro_batch: int | None = None,
    world: int | None = None,
    stages: int | None = None,
    **sizes,
) -> Spec:
    """Return the spec of one run on this machine.

    `data` and `model` are identities, and `*_source` where to load them from (see Spec).
    `micro_batch` replaces the variant's, and `sizes` (the arguments of `sized`) the preset's,
    unless they are 0 or None. Without `world` a parallel variant has WORLD processes, and without
    `stages` a pipeline goes through all of them, and `recommended` has one. In the place of
    `recommended` stands the variant of `find_variant`, until one is chosen.

    Raises UnknownName, and SpecError for a variant of another task, for settings and sizes that do
    not go together, and for a number that cannot be.
    """
    counts = {"micro_batch": micro_batch, "world": world, "stages": stages}
    own = {name: value or 0 for name, value in (sizes | counts).items()}
    for name in own:
        if name != "learning_rate":
            own[name] = whole_number(name, own[name], 0)

    own_preset = sized(find_preset(preset), **{name: own[name] for name in sizes})
    row = find_variant(variant, own_preset.task, several=own["world"] > 1)
    asked = row.settings
    if own["micro_batch"]:
        asked = dataclasses.replace(asked, micro_batch=own["micro_batch"])
    _check_variant(variant, row, asked, own_preset)
    check_positions(model_source, own_preset.max_length)
    for sentence in rules.size_conflicts(asked, own_preset):
        raise SpecError(sentence)

    world, stages = _processes(asked, own["world"], own["stages"])
    for why in rules.process_conflicts(asked, world, stages):
        raise SpecError(f"{variant} {why}")

    chosen = []
    if variant == "recommended":
        chosen = ["variant"] if own["micro_batch"] else ["variant", "micro_batch"]
    settings, adjusted = rules.adjust(asked, machine)
    spec = Spec(
        variant=row.name,
        preset=own_preset,
        seed=seed,
        asked=asked,
        settings=settings,
        adjusted=adjusted,
        skip=rules.missing(settings, machine, world),
        hardware=machine.hardware,
        data=data,
        model=model,
        data_source=data_source,
        model_source=model_source,
        world=world,
        stages=stages,
        own=_noted_sizes(own, own_preset, asked),
        chosen=chosen,
    )
    rules.replicas(spec, world)  # raises SpecError where the processes cannot share a step
    return spec


def _check_variant(name: str, row: Variant, asked: Settings, preset: Preset) -> None:
    """Raise SpecError where a variant is not for the preset's task.

    `name` is what was asked for, and `asked` the settings with a micro-batch of one's own.
    """
    if row.task != preset.task:
        raise SpecError(
            f"{name} is a variant of task {row.task}, "
            f"and preset {preset.name!r} of task {preset.task}"
        )
    for why in rules.task_conflicts(asked, preset.task):
        raise SpecError(f"{name}: {why}")


def _processes(asked: Settings, world: int, stages: int) -> tuple[int, int]:
    """Return how many processes a run has, and how many of them make up a pipeline.

    0 asks for the usual number.
    """
    if not world:
        world = 1 if asked.parallel == "none" else max(WORLD, stages)
    if not stages:
        stages = world if asked.parallel == "pipeline" else 1
    return world, stages


def _noted_sizes(own: dict, preset: Preset, asked: Settings) -> dict:
    """Return the sizes that were asked for, as the preset has them, for the record.

    What settings can have one value of alone is not among them: the processes of a run in one
    process, and the stages of what is no pipeline.
    """
    fixed = []
    if asked.parallel == "none":
        fixed.append("world")
    if asked.parallel != "pipeline":
        fixed.append("stages")
    values = own | dataclasses.asdict(preset) | {"batch": preset.effective_batch}
    return {name: values[name] for name in own if own[name] and name not in fixed}
