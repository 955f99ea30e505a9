"""From names to specs: variants x seeds at a preset, on the data and the model that are meant.

A Request is what was asked for, checked as far as that goes without files and the hub. `plan`
resolves it to specs, looks at data and model, and puts their identity into each.
"""

import dataclasses
import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from qa_lib.calls import expect, shown
from qa_lib.errors import SpecError, UserError
from qa_lib.model.architectures import check_architecture, positions_in
from qa_lib.run.identity import go_offline_without_network, identify_data, inspect_model
from qa_lib.spec.machine import Machine
from qa_lib.spec.presets import (
    QUICKEST,
    Preset,
    find_preset,
    named_or_own,
    sized,
    whole_number,
)
from qa_lib.spec.resolve import ALL, resolve
from qa_lib.spec.rules import lacking, unshared
from qa_lib.spec.spec import Spec
from qa_lib.spec.variants import find_variant

Several = int | str | Sequence[int | str] | None  # a size, or several
# What `own` of a request may hold: what `sized` takes beside the preset, and a pipeline's stages.
OWN_NAMES = [*[*inspect.signature(sized).parameters][1:], "stages"]


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be planned; `make_request` makes one of what somebody has typed."""

    # Names; `recommended` may be among them.
    variants: list[str]
    # A name.
    preset: str
    seeds: list[int]
    # Each a path, or a name of the hub.
    data: str
    model: str
    # The machine that is to train.
    machine: Machine
    # Every variant has a spec for each of these: {max_length, batch, micro_batch, world}, with None
    # for the preset's, the variant's or the usual size.
    sizes: list[dict[str, int | None]]
    # What else of its preset a run has otherwise, by OWN_NAMES.
    own: dict
    # Whether sizes that do not go together are left out, as long as their variant has others.
    leave_out: bool


@dataclasses.dataclass
class Plan:
    """The specs of a request, in the order in which they are run."""

    specs: list[Spec]
    # A sentence for each spec that was left out.
    left_out: list[str]


# (specs, their machine, whether the model's config is known) -> the specs with what was left to the
# machine, which their `chosen` names.
Choose = Callable[[list[Spec], Machine, bool], list[Spec]]


def make_request(
    variants: Sequence[str],
    preset: str | None,
    seeds: Sequence[int],
    data: object,
    model: object,
    machine: Machine | None,
    sizes: dict[str, Several],
    own: dict,
    leave_out: bool = False,
) -> Request:
    """Return the request for variants x seeds x every combination of the sizes, each named once.

    Without data or model it has the preset's own; where both are given, the preset may be left out.
    Without a machine it is for this one. Raises SpecError for a name or number that cannot be, and
    UserError for data or a model that neither the caller nor the preset names.
    """
    preset = named_or_own(preset, data, model)
    task = find_preset(preset).task
    names = _as_list("variants", variants)
    for name in names:
        find_variant(name, task)
    numbers = [whole_number("seed", seed, 0, 2**63 - 1) for seed in _as_list("seeds", seeds)]
    data, model = _sources(find_preset(preset), data, model)
    if machine is None:
        # This imports torch, which a driver that names its machine does without.
        from qa_lib.measure.hardware import this_machine

        machine = this_machine()
    all_sizes = _combinations(sizes)
    for combination in all_sizes:
        if combination.get("world") == ALL:
            combination["world"] = _all_gpus(machine)
    return Request(
        variants=list(dict.fromkeys(names)),
        preset=preset,
        seeds=list(dict.fromkeys(numbers)),
        data=data,
        model=model,
        machine=machine,
        sizes=all_sizes,
        own=own,
        leave_out=leave_out,
    )


def plan(request: Request, choose: Choose | None = None) -> Plan:
    """Return the specs of a request; all variants with the first seed come first.

    Without `choose`, `recommended` stays the task's baseline and a micro-batch the variant's own.
    Raises SpecError, before files and the hub are asked, for sizes that do not go together and are
    not to be left out, and later for a length that the model does not take; UserError for data and
    a model that are not to be had.
    """
    planned = _resolve_all(request)
    go_offline_without_network(request.data, request.model)
    model, config = inspect_model(request.model)
    preset = find_preset(request.preset)
    data = identify_data(request.data, preset.quality, preset.task)
    kind = config.get("model_type", "")
    if kind != "":
        check_architecture(kind, request.model, preset.task)
    most_positions = positions_in(config)
    if most_positions is not None:
        for spec in planned.specs:
            spec.preset.check_length(request.model, most_positions)
    layers = _whole_or_zero(config.get("num_hidden_layers"))
    heads = _whole_or_zero(config.get("num_attention_heads"))
    specs = []
    for spec in planned.specs:
        skip = spec.skip or lacking(spec.settings, kind)
        if not skip:
            skip = unshared(
                spec.settings, layers=layers, heads=heads, world=spec.world, stages=spec.stages
            )
        specs.append(dataclasses.replace(spec, data=data, model=model, skip=skip))
    if choose and any(spec.chosen for spec in specs):
        specs = choose(specs, request.machine, bool(config))
    return Plan(specs, planned.left_out)


def _whole_or_zero(size: object) -> int:
    """Return a size of a model's config; 0, which everything divides, where it is no whole number.

    Loading the model tells that then.
    """
    return size if type(size) is int else 0


def _resolve_all(request: Request) -> Plan:
    """Return the specs of a request without the identity of data and model.

    Raises SpecError for sizes that do not go together, unless they are to be left out and their
    variant has others.
    """
    specs = []
    problems = {}  # a sentence -> its variant, and the error
    for seed, sizes, variant in itertools.product(request.seeds, request.sizes, request.variants):
        try:
            specs.append(_resolved(request, variant, seed, request.own | sizes))
        except SpecError as problem:
            problems[f"{variant}: {problem}"] = variant, problem
    planned = {"recommended" if spec.recommended else spec.variant for spec in specs}
    for variant, problem in problems.values():
        if not request.leave_out or variant not in planned:
            raise problem
    return Plan(specs, list(problems))


def _resolved(request: Request, variant: str, seed: int, own: dict) -> Spec:
    """Return the spec of a variant, with "micro_batch" among its `chosen` where that is left open.

    Until it is chosen, the spec has the variant's own, or the largest below that divides the work
    of a step. Raises SpecError.
    """
    has_open_size = variant == "recommended" or request.preset in QUICKEST
    is_open = has_open_size and not own.get("micro_batch")
    tried = [own.get("micro_batch")]
    if is_open:
        task = find_preset(request.preset).task
        tried += range(find_variant(variant, task).settings.micro_batch - 1, 0, -1)
    first_problem = None
    for micro_batch in tried:
        try:
            spec = resolve(
                variant,
                preset=request.preset,
                seed=seed,
                machine=request.machine,
                data={},
                model={},
                data_source=request.data,
                model_source=request.model,
                **own | {"micro_batch": micro_batch},
            )
        except SpecError as problem:
            first_problem = first_problem or problem
            continue
        if is_open:
            left_open = ["variant", "micro_batch"] if spec.recommended else ["micro_batch"]
            return dataclasses.replace(spec, chosen=left_open)
        return spec
    raise first_problem


# What a caller gives, as a Request has it.


def _as_list(name: str, values: object) -> list:
    """Return values as a list. Raises SpecError for what is no list of at least one."""
    listed = []
    if isinstance(values, Iterable) and not isinstance(values, str | bytes):
        listed = list(values)
    if not listed:
        hint = ""
        if isinstance(values, str | int) and values != "":
            hint = f": write {name}=[{values!r}]"
        raise SpecError(f"{name} is {shown(values)}, and not a list of at least one{hint}")
    return listed


def _sources(preset: Preset, data: object, model: object) -> tuple[str, str]:
    """Return data and model as texts, each a path or name; without one, the preset's own.

    Raises SpecError for what can be neither, and UserError for all that the preset has none of its
    own for.
    """
    given = {"data": data, "model": model}
    for name, value in given.items():
        if value is None or (isinstance(value, str) and not value):
            given[name] = getattr(preset, name)
    absent = [name for name, value in given.items() if isinstance(value, str) and not value]
    if absent:
        options = " and ".join(f"--{name}" for name in absent)
        raise UserError(
            f"preset {preset.name!r} has no {' and no '.join(absent)} of its own: give {options} "
            "(a path, or a name of the hub)"
        )
    return _as_text("data", given["data"]), _as_text("model", given["model"])


def _as_text(name: str, value: object) -> str:
    """Return a path or name as a text. Raises SpecError for what can be neither."""
    expect(name, value, (str, os.PathLike), "give a path, or a name of the hub")
    text = os.fspath(value)
    expect(name, text, str, "give a path, or a name of the hub")  # bytes are a path, too
    try:
        Path(text).exists()
    except (OSError, ValueError):  # it is too long, or has a null byte
        raise SpecError(f"{name} is {text[:40]!r}, and no path or name") from None
    return text


def _all_gpus(machine: Machine) -> int:
    """Return how many GPUs a machine has. Raises UserError where it has none."""
    if not machine.gpus:
        raise UserError("--world all takes all GPUs, and this machine has none: give a number")
    return machine.gpus


def _combinations(sizes: dict[str, Several]) -> list[dict[str, int | None]]:
    """Return every combination of some sizes, each by its name. Raises SpecError."""
    lists = []
    for name, size in sizes.items():
        is_list = isinstance(size, Sequence) and not isinstance(size, str | bytes)
        lists.append(dict.fromkeys(_as_list(name, size)) if is_list else [size])
    return [dict(zip(sizes, values, strict=True)) for values in itertools.product(*lists)]
