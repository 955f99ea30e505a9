"""Variant x preset x seed x machine: one run, completely, as a frozen `Spec` whose hash names it.

Standard library only, so that the driver and the tests can plan a sweep without importing torch.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from qa_lib.errors import SpecError
from qa_lib.spec.presets import Preset, find_preset, find_shape, sized, whole_number
from qa_lib.spec.variants import (
    ADJUSTMENTS,
    Recipe,
    Settings,
    find_recipe,
    find_variant,
    meets,
    unmet,
    value_of,
)

CONTEXT_GIB = 0.5  # a process takes this of a GPU beside what PyTorch reserves


@dataclasses.dataclass(frozen=True)
class Machine:
    """What decides whether a variant can run here. Filled by measure/hardware.py; kept free of torch for the driver."""

    hardware: str = "cpu"  # first half of a group's name
    gpus: int = 0
    sm: int = 0  # CUDA compute capability x 10, 0 without a GPU
    free_mib: int = 0  # of the first GPU's memory, 0 where that is not known
    total_mib: int = 0  # all of that memory, 0 where it is not known
    nvfuser: ClassVar = False  # torch.compile had this backend until PyTorch 2.2
    bitsandbytes: bool = False
    deepspeed: bool = False
    peft: bool = False
    torchao: bool = False
    adapters_fault: str = (
        ""  # why peft cannot be used although it is there (packages.adapters_fault)
    )
    compiler: bool = False  # Inductor can generate code: a C++ compiler, or Triton with a GPU


def hardware_name(gpu: str | None) -> str:
    """A GPU's marketing name as part of a folder name: 'NVIDIA H200' is 'h200', no GPU is 'cpu'."""
    if not gpu:
        return "cpu"
    return re.sub(
        r"[^a-z0-9]+", "-", re.sub(r"NVIDIA|Tesla|GeForce", "", gpu).strip().lower()
    ).strip("-")


def missing(settings: Settings, machine: Machine, world: int = 1) -> str | None:
    """Why these settings cannot run on the machine in `world` processes, in one sentence; None if they can."""
    if machine.gpus and world > machine.gpus:
        return f"needs {world} GPUs, and this machine has {machine.gpus}"
    if machine.adapters_fault and find_recipe(settings.trainable).kind == "lora":
        return machine.adapters_fault
    return unmet(settings, machine)


def adjust(settings: Settings, machine: Machine) -> tuple[Settings, list[str]]:
    """The settings as this machine runs them, and a sentence for each that had to change."""
    sm = max(1, machine.sm) if machine.gpus else 0
    found = [
        line
        for line in ADJUSTMENTS
        if int(line["sm"]) <= sm < int(line["below"]) and meets(settings, line["of"])
    ]
    said = [
        f"{line['setting']}: {line['value']}, {line['why'].format(**vars(settings))}"
        for line in found
    ]
    values = {line["setting"]: value_of(line["setting"], line["value"]) for line in found}
    return dataclasses.replace(settings, **values), said


IDENTITY = 1  # the version of what a run's hash covers, and of the names in it
WORLD = 2  # processes of a parallel variant that is asked for without a number


@dataclasses.dataclass(frozen=True)
class Spec:
    """One run, completely. `data` and `model` are identities: {name, sha256} and {name, revision}.

    `asked` are the variant's settings, `settings` what this machine makes of them, each change said in `adjusted`.
    `data_source` and `model_source` say where to load from; paths differ between machines, so they are not hashed.
    `search` names the verb of whose search the run is a try ("tune", "max-batch"), and `sm` the compute capability x 10
    whose kernels that search allowed; "" and None otherwise. `own` is what was asked for in place of the variant's and
    the preset's, by the names of plan's arguments; of these `chosen` has what was left to this machine
    (lab/search/recommend.py): "variant" by `recommended`, and "micro_batch" by `recommended` and the presets QUICKEST, unless
    that was asked for. The first line of `adjusted` says what was chosen.
    """

    variant: str
    preset: Preset
    seed: int
    asked: Settings
    settings: Settings
    adjusted: list[str] = dataclasses.field(compare=False)
    skip: str | None
    hardware: str
    data: dict
    model: dict
    data_source: str
    model_source: str
    world: int = 1  # processes, one a GPU; a run that is resumed may have fewer or more (train/parallel/data_parallel.py)
    stages: int = 1  # processes that a micro-batch passes through, where they make up pipelines
    search: str = ""
    sm: int | None = None
    own: dict = dataclasses.field(default_factory=dict, compare=False)
    chosen: list[str] = dataclasses.field(default_factory=list, compare=False)

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical JSON of what defines the run. Of settings and preset, fields that differ from their
        defaults: a new one whose default means what was so before moves no hash."""
        content = {
            "version": IDENTITY,
            "settings": _differing(self.asked, Settings()),
            "preset": _differing(self.preset, Preset(name="")),
            "seed": self.seed,
            "data": self.data,
            "model": self.model,
        }
        if self.asked.trainable != "all":  # a name does not say which rank and rate it stood for
            content["recipe"] = dataclasses.asdict(find_recipe(self.asked.trainable))
        content |= {
            name: number for name in ("world", "stages") if (number := getattr(self, name)) != 1
        }
        return sha256_of_json(content)

    @property
    def recommended(self) -> bool:
        """Whether the variant was left to this machine, so that another may take its place where it fails."""
        return "variant" in self.chosen

    @property
    def recipe(self) -> Recipe:
        return find_recipe(self.settings.trainable)

    @property
    def group(self) -> str:
        """The folder that holds this run and those it is compared with; what they have in common is in the record."""
        return group_name(self.hardware, self.preset.name, self.preset.task)

    @property
    def run_id(self) -> str:
        return f"{self.variant}-s{self.seed}-{self.hash[:6]}"

    @property
    def run_path(self) -> Path:
        """The run's folder below the runs folder."""
        return Path(self.group, self.run_id)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of an optimizer step, of all processes together."""
        if self.preset.batch:
            return self.preset.batch // self.settings.micro_batch
        return 1 if self.settings.parallel == "tensor" else self.world

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step of each process."""
        return self.micro_batches // replicas(self, self.world)


def group_name(hardware: str, preset: str, task: str) -> str:
    """The group of the runs of a preset on some hardware."""
    named = {"qa", *preset.split("-")}  # a preset may name its task itself
    return "-".join([hardware, preset] + [task] * (task not in named))


def replicas(spec: Spec, world: int) -> int:
    """In how many shares `world` processes work on a step's micro-batches: the processes of a pipeline share one, and
    those of a tensor-parallel run take all. Raises SpecError for processes that cannot share a step evenly."""
    stages, schedule, preset = spec.stages, spec.settings.schedule, spec.preset
    if world % stages:
        raise SpecError(f"{world} processes do not make up pipelines of {stages}")
    shares = 1 if spec.settings.parallel == "tensor" else world // stages
    each, rest = divmod(spec.micro_batches, shares)
    if rest:
        raise SpecError(
            f"{world} processes do not divide the {spec.micro_batches} micro-batches of a step at preset "
            f"{preset.name!r}, which are {preset.batch} samples by {spec.settings.micro_batch}"
        )
    if (schedule == "1f1b" and each < stages) or (schedule == "interleaved" and each % stages):
        wanted = (
            "at least as many micro-batches as"
            if schedule == "1f1b"
            else "a multiple in micro-batches of"
        )
        raise SpecError(
            f"{schedule} takes {wanted} the {stages} stages, and a pipeline has {each} in a step"
        )
    return shares


def unshared(spec: Spec, shape: Mapping[str, int]) -> str | None:
    """Why the spec's processes cannot share a model of so many `layers` and attention `heads`; None if they can."""
    way, parts = spec.settings.parallel, spec.stages * spec.settings.chunks
    if way == "pipeline" and shape["layers"] % parts:
        return f"a model of {shape['layers']} layers has no {parts} equal parts"
    if way == "tensor" and shape["heads"] % spec.world:
        return f"{spec.world} processes do not divide the {shape['heads']} heads of attention"
    return None


def _differing(values: Settings | Preset, defaults: Settings | Preset) -> dict:
    """The fields whose values are not those of `defaults`."""
    usual = dataclasses.asdict(defaults)
    return {
        name: value for name, value in dataclasses.asdict(values).items() if value != usual[name]
    }


def sha256_of_json(content: object) -> str:
    """SHA-256, in hexadecimal digits, of the canonical JSON of a value."""
    return hashlib.sha256(
        json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


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
    **own,
) -> Spec:
    """Variant x preset x seed to the spec of one run on this machine.

    `data` and `model` are identities and `*_source` where to load them from (see Spec). `micro_batch` replaces the
    variant's and `own` the preset's (see sized), unless they are 0 or None. Without `world` a parallel variant has
    WORLD processes, and without `stages` a pipeline goes through all of them. In the place of `recommended` stands the
    baseline, until something is `chosen`. Raises UnknownName, and SpecError for a variant of another task and a number
    that cannot be.
    """
    own = {
        name: value if name == "learning_rate" else whole_number(name, value or 0, 0)
        for name, value in own.items()
    }
    size = sized(find_preset(preset), **own)
    named, chosen = find_variant(variant, size.task), []
    if variant == "recommended":
        chosen = ["variant"] if micro_batch else ["variant", "micro_batch"]
    counts = {"micro_batch": micro_batch, "world": world, "stages": stages}
    counts = {name: whole_number(name, value or 0, 0) for name, value in counts.items()}
    micro_batch, world, stages = counts.values()
    asked = dataclasses.replace(
        named.settings, **{"micro_batch": micro_batch} if micro_batch else {}
    )
    if named.task != size.task:
        raise SpecError(
            f"{variant} is a variant of task {named.task}, and preset {preset!r} of task {size.task}"
        )
    if size.task == "qa" and asked.cuda_graph and asked.padding != "packed":
        raise SpecError(
            f"{variant}: the mask of padded sequences is made on the host, and a graph has no host"
        )
    if size.task == "qa" and asked.engine == "plain" and asked.padding != "packed":
        raise SpecError(f"{variant}: the plain BERT takes packed sequences")
    if (shape := find_shape(model_source)) and size.max_length > shape.positions:
        longer = re.sub(r"(P\d+)?$", f"P{size.max_length}", model_source, count=1)
        raise SpecError(
            f"{model_source} has positions for {shape.positions} tokens and not for {size.max_length}: give "
            f"--model {longer}, to all runs that are compared"
        )
    if (size.batch or asked.micro_batch) % asked.micro_batch:
        raise SpecError(
            f"micro-batch {asked.micro_batch} does not divide the effective batch {size.batch} of preset {preset!r}: "
            f"add --batch {asked.micro_batch * max(1, size.batch // asked.micro_batch)}"
        )
    world = world or (1 if asked.parallel == "none" else max(WORLD, stages or 1))
    stages = stages or (world if asked.parallel == "pipeline" else 1)
    if world > 1 and asked.parallel == "none":
        raise SpecError(
            f"{variant} trains in one process, not in {world}; the variants of family P take several"
        )
    if stages > 1 and asked.parallel != "pipeline":
        raise SpecError(f"{variant} is no pipeline and has no stages")
    settings, adjusted = adjust(asked, machine)
    # What these can be one of alone is nothing of a run's own.
    one = {"none": ("world", "stages"), "pipeline": ()}.get(asked.parallel, ("stages",))
    values = dataclasses.asdict(size) | counts | {"batch": size.effective_batch}
    given = {
        name: values[name] for name, value in (own | counts).items() if value and name not in one
    }
    spec = Spec(
        variant=named.name, preset=size, seed=seed, asked=asked, settings=settings, adjusted=adjusted,
        skip=missing(settings, machine, world), hardware=machine.hardware, data=data, model=model,
        data_source=data_source, model_source=model_source, world=world, stages=stages, own=given, chosen=chosen,
    )  # fmt: skip
    replicas(spec, world)
    return spec
