"""Row x preset x seed x machine: one run, completely, as a frozen `Spec` whose hash names it.

Standard library only, so that the driver and the tests can plan a sweep without importing torch.
"""

import dataclasses
import hashlib
import json
import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import get_type_hints

from qa_lib.variants import (
    SINCE,
    VARIANTS,
    Recipe,
    Settings,
    SpecError,
    UnknownName,
    find_recipe,
    find_variant,
    nearest,
    needs,
    since,
)

MOST = 2**31 - 1  # of what is counted here


def whole_number(name: str, value: object, least: int, most: int = MOST) -> int:
    """The value, NumPy's as well, as a whole number in these bounds. Raises SpecError for any other."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= value <= most:
        raise SpecError(f"{name} is {str(value)[:40]!r}, and not a whole number from {least} to {most}")
    return int(value)


def stride_of(max_length: int, usual: int) -> int:
    """Tokens that neighbouring features of `max_length` share: the usual number, but a third of the feature where that
    would be more than half of it, which would leave a question and new tokens too little room. For the usual 128: 42
    at 128 tokens, 85 at 255, 128 from 256 on."""
    return usual if 2 * usual <= max_length else max_length // 3


@dataclass(frozen=True, kw_only=True)
class Preset:
    """How much work, on what. Learning-rate schedule and effective batch belong here, so that rows stay comparable."""

    name: str
    task: str = "qa"  # a name of run/tasks.py
    model: str = "bert-base-uncased"  # tiny | a hub name | "" where --model must name a folder
    data: str = "squad_v2"  # synthetic:N | a hub name | "" where --data must name a file or folder
    max_length: int = 384  # tokens of a feature
    stride: int = 128  # tokens that neighbouring features of a paragraph share
    effective_batch: int | None = 32  # features per optimizer step; None: one micro-batch, however large
    batch_tokens: int | None = None  # tokens per optimizer step, in place of effective_batch where features are full
    learning_rate: float = 3e-5
    recipe_rates: bool = True  # recipes multiply the rate; not for a model that starts from random weights
    warmup: float = 0.1  # share of the steps in which the learning rate rises
    steps: int | None = None  # optimizer steps ...
    epochs: int | None = None  # ... or passes over the training features
    measure_from: int = 100  # steps before this one are warm-up and not timed
    quality: bool = False  # evaluate, and keep the model; without it random initialisation will do
    checkpoint_every: int = 0  # optimizer steps; 0: never
    time_limit_s: int = 3600
    threads: int | None = None  # of a run on a CPU; None: all of them
    limit_gib: float | None = None  # GPU memory that the run may take; None: all there is

    def __post_init__(self):
        for name, kind in _preset_types().items():
            value = getattr(self, name)
            if kind in (int, int | None) and value is not None:
                whole_number(name, value, 0 if name in ("stride", "measure_from", "checkpoint_every") else 1)
            elif not isinstance(value, kind | int if kind in (float, float | None) else kind) or (
                isinstance(value, bool) and kind is not bool
            ):
                raise SpecError(f"{name} is {str(value)[:40]!r}")
        if not 0 < self.learning_rate < 1:
            raise SpecError(f"learning rate {self.learning_rate:g} is not between 0 and 1")
        if not 0 <= self.warmup <= 1:
            raise SpecError(f"warmup {self.warmup:g} is no share of the steps, from 0 to 1")
        if self.limit_gib is not None and not self.limit_gib > 0:
            raise SpecError(f"limit_gib {self.limit_gib:g} is not above 0")

    @property
    def batch(self) -> int | None:
        """Features per optimizer step; None: one micro-batch."""
        return self.batch_tokens // self.max_length if self.batch_tokens else self.effective_batch


_preset_types = cache(partial(get_type_hints, Preset))


_TO_COMPARE = {"epochs": 3, "quality": True}  # three epochs, scored
_TEXT = {
    "task": "lm", "model": "gpt2:L12H768", "data": "Salesforce/wikitext:wikitext-103-raw-v1", "max_length": 1024,
    "stride": 64, "batch_tokens": 32_768, "learning_rate": 6e-4, "recipe_rates": False,
}  # fmt: skip
PRESETS = {
    preset.name: preset
    for preset in [
        Preset(
            name="smoke", model="tiny", data="synthetic:1600", max_length=96, stride=32, effective_batch=16,
            learning_rate=4e-3, recipe_rates=False, steps=400, measure_from=30, quality=True, checkpoint_every=100,
            time_limit_s=300, threads=1,
        ),
        Preset(name="bench", steps=600),
        # Of rows in several processes, which start slowly: enough steps to time.
        Preset(name="parallel", steps=150, measure_from=50),
        # The seeds' protocol for memory: one step to settle, one to measure, each of one micro-batch.
        Preset(name="vram", effective_batch=None, steps=2, measure_from=1, time_limit_s=900),
        # For curves over micro-batch and length, and the search of the largest micro-batch under a cap on memory.
        Preset(name="sizing", effective_batch=None, steps=60, measure_from=30, time_limit_s=900),
        # For differences between rows with intervals over seeds; 2e-4 was the best rate tried for A1 (group *-tune).
        Preset(name="quality", model="", data="", learning_rate=2e-4, **_TO_COMPARE),
        # For what a batch is worth: the noise of gradients, steps to one loss (rows of family P, with --batch).
        Preset(name="critical-batch", model="", data="", learning_rate=2e-4, **_TO_COMPARE),
        Preset(name="full", checkpoint_every=500, time_limit_s=6 * 3600, **_TO_COMPARE),
        Preset(name="local", model="", data="", checkpoint_every=500, time_limit_s=6 * 3600, **_TO_COMPARE),
        Preset(
            name="lm-smoke", task="lm", model="gpt2:L2H64V1024", data="synthetic:1600", max_length=64, stride=32,
            batch_tokens=1024, learning_rate=5e-3, recipe_rates=False, steps=120, measure_from=30, quality=True,
            checkpoint_every=60, time_limit_s=300, threads=1,
        ),
        Preset(name="lm-bench", steps=150, measure_from=50, **_TEXT),
        # As `sizing`, and with positions for every context length up to 16,384.
        Preset(
            name="lm-sizing", effective_batch=None, steps=60, measure_from=30, time_limit_s=900,
            **_TEXT | {"model": "gpt2:L12H768P16384", "batch_tokens": None},
        ),
        # Small enough for differences between rows, sizes and context lengths over seeds.
        Preset(
            name="lm-quality",
            **_TEXT | _TO_COMPARE
            | {"model": "gpt2:L6H384V16384", "data": "", "max_length": 512, "learning_rate": 1e-3},
        ),
        Preset(
            name="lm-full", checkpoint_every=500, time_limit_s=6 * 3600,
            **_TEXT | {"batch_tokens": 131_072} | _TO_COMPARE,
        ),
    ]
}  # fmt: skip


def find_preset(name: str) -> Preset:
    """The preset of that name; UnknownName otherwise."""
    if name not in PRESETS:
        raise UnknownName(nearest("preset", name, PRESETS))
    return PRESETS[name]


HEAD, BYTES = 64, 256  # width of a head; tokens that a byte-level vocabulary has before it merges any


@dataclass(frozen=True)
class Shape:
    """A GPT-2 of one's own size, with random weights: heads are 64 wide, as in GPT-2 itself, whose small model is
    'gpt2:L12H768' and whose vocabulary and positions are the defaults."""

    layers: int
    hidden: int
    vocabulary: int = 50_257
    positions: int = 1024


def find_shape(model: str) -> Shape | None:
    """The shape that a name like 'gpt2:L12H768' or 'gpt2:L2H64V512P128' gives: layers, hidden width, tokens of the
    vocabulary, positions. None for another name, SpecError for a shape that cannot be."""
    if not model.startswith("gpt2:"):
        return None
    pattern = r"gpt2:L(?P<layers>\d+)H(?P<hidden>\d+)(V(?P<vocabulary>\d+))?(P(?P<positions>\d+))?"
    found = re.fullmatch(pattern, model, re.ASCII)
    sizes = {name: int(size[:10]) for name, size in found.groupdict().items() if size} if found else {}
    shape = Shape(**{"layers": 0, "hidden": 0} | sizes)
    if not (shape.layers and shape.hidden and shape.positions) or shape.hidden % HEAD or shape.vocabulary <= BYTES:
        raise SpecError(
            f"model {model!r}: a shape is written like gpt2:L12H768V50257P1024, layers, width (a multiple of {HEAD}), "
            f"vocabulary (more than {BYTES}) and positions, of which the last two may be left out"
        )
    if (12 * shape.layers * shape.hidden + shape.vocabulary + shape.positions) * shape.hidden > 10**12:
        raise SpecError(f"model {model!r}: more than a million million weights")
    return shape


@dataclass(frozen=True)
class Machine:
    """What decides whether a row can run here. Filled by measure/machine.py; kept free of torch for the driver."""

    hardware: str = "cpu"  # first half of a group's name
    gpus: int = 0
    sm: int = 0  # CUDA compute capability x 10, 0 without a GPU
    backends: tuple[str, ...] = ()  # what torch.compile knows
    bitsandbytes: bool = False
    deepspeed: bool = False
    torchao: bool = False
    compiler: bool = False  # Inductor can generate code: a C++ compiler, or Triton with a GPU


def hardware_name(gpu: str | None) -> str:
    """A GPU's marketing name as part of a folder name: 'NVIDIA H200' is 'h200', no GPU is 'cpu'."""
    if not gpu:
        return "cpu"
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"NVIDIA|Tesla|GeForce", "", gpu).strip().lower()).strip("-")


def missing(settings: Settings, machine: Machine, world: int = 1) -> str | None:
    """Why these settings cannot run on the machine in `world` processes, in one sentence; None if they can."""
    if machine.gpus and world > machine.gpus:
        return f"needs {world} GPUs, and this machine has {machine.gpus}"
    backend = settings.compile
    reasons = {
        "cuda": (machine.gpus > 0, "needs a CUDA GPU"),
        "sm80": (
            machine.sm >= SINCE["sm80"], "needs a GPU of compute capability 8.0 or newer (bf16 and FlashAttention)"
        ),
        "sm89": (machine.sm >= SINCE["sm89"], "needs a GPU of compute capability 8.9 or newer (8-bit floats)"),
        "triton": (
            not machine.gpus or (machine.compiler and machine.sm >= SINCE["triton"]),
            "needs Triton where there is a GPU, and one of compute capability 7.5 or newer",
        ),
        "triton-dot": (
            not machine.gpus or machine.sm >= SINCE["triton-dot"],
            "needs a GPU of compute capability 8.0 or newer (matrix products in Triton)",
        ),
        "compiler": (machine.compiler, "torch.compile needs a C++ compiler (g++), or Triton with a GPU"),
        "bitsandbytes": (machine.bitsandbytes, "needs the package bitsandbytes"),
        "deepspeed": (machine.deepspeed, "needs the package deepspeed"),
        "torchao": (machine.torchao, "needs the package torchao"),
        f"backend {backend}": (
            backend in machine.backends, f"this PyTorch has no torch.compile backend named {backend!r}"
        ),
    }  # fmt: skip
    return next((why for met, why in map(reasons.get, needs(settings)) if not met), None)


def adjust(settings: Settings, machine: Machine) -> tuple[Settings, list[str]]:
    """The settings as this machine runs them, and a sentence for each that had to change."""
    changes, said = {}, []
    gpu_alone = settings.feed_forward == "fp8" or settings.attention in ("flash", "efficient")
    if not machine.gpus and not gpu_alone:
        if settings.precision != "fp32":
            changes["precision"] = "fp32"
            said.append(f"precision: fp32, since {settings.precision} autocast needs a GPU")
        if settings.half_weights:
            changes["optimizer"] = "adamw-fused"
            said.append("optimizer: adamw-fused, since fp32 weights need no masters")
        if settings.cuda_graph:
            changes["cuda_graph"] = False
            said.append("cuda_graph: False, since it needs a GPU")
    if settings.engine == "trainer" and settings.optimizer != "adamw-fused":
        changes["optimizer"] = "adamw-fused"
        said.append(TRAINER_OPTIMIZER)
    if settings.padding == "packed" and settings.attention == "sdpa":
        on_gpu = "flash" if machine.sm >= SINCE["sm80"] else "efficient"
        changes["attention"] = on_gpu if machine.gpus else "block-diagonal"
        said.append(f"attention: {changes['attention']}, the kernel for packed sequences here")
    return dataclasses.replace(settings, **changes), said


TRAINER_OPTIMIZER = "optimizer: adamw-fused, which transformers.Trainer takes by itself"


IDENTITY = 1  # the version of what a run's hash covers, and of the names in it
WORLD = 2  # processes of a parallel row that is asked for without a number


@dataclass(frozen=True)
class Spec:
    """One run, completely. `data` and `model` are identities: {name, sha256} and {name, revision}.

    `asked` are the row's settings, `settings` what this machine makes of them, each change said in `adjusted`.
    `data_source` and `model_source` say where to load from; paths differ between machines, so they are not hashed.
    `search` names the verb of whose search the run is a try ("tune", "max-batch"), and `sm` the compute capability x 10
    whose kernels that search allowed; "" and None otherwise.
    """

    variant: str
    preset: Preset
    seed: int
    asked: Settings
    settings: Settings
    adjusted: list[str] = field(compare=False)
    skip: str | None
    hardware: str
    data: dict
    model: dict
    data_source: str
    model_source: str
    world: int = 1  # processes, one a GPU; a run that is resumed may have fewer or more (train/parallel.py)
    stages: int = 1  # processes that a micro-batch passes through, where they make up pipelines
    search: str = ""
    sm: int | None = None

    def __post_init__(self):
        whole_number("seed", self.seed, 0, 2**63 - 1)
        whole_number("world", self.world, 1)
        whole_number("stages", self.stages, 1)

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
        content |= {name: number for name in ("world", "stages") if (number := getattr(self, name)) != 1}
        return sha256_of_json(content)

    @property
    def recipe(self) -> Recipe:
        return find_recipe(self.settings.trainable)

    @property
    def group(self) -> str:
        """The folder that holds this run and those it is compared with; what they have in common is in the record."""
        named = {"qa", *self.preset.name.split("-")}  # a preset may name its task itself
        return "-".join([self.hardware, self.preset.name] + [self.preset.task] * (self.preset.task not in named))

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
            f"{preset.name!r}, which are {preset.batch} features by {spec.settings.micro_batch}"
        )
    if (schedule == "1f1b" and each < stages) or (schedule == "interleaved" and each % stages):
        wanted = "at least as many micro-batches as" if schedule == "1f1b" else "a multiple in micro-batches of"
        raise SpecError(f"{schedule} takes {wanted} the {stages} stages, and a pipeline has {each} in a step")
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
    return {name: value for name, value in dataclasses.asdict(values).items() if value != usual[name]}


def sha256_of_json(content: object) -> str:
    """SHA-256, in hexadecimal digits, of the canonical JSON of a value."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


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
    epochs: int | None = None,
    learning_rate: float | None = None,
    stages: int | None = None,
    max_length: int | None = None,
    batch: int | None = None,
) -> Spec:
    """Variant x preset x seed to the spec of one run on this machine.

    `data` and `model` are identities and `*_source` where to load them from (see Spec). `micro_batch` replaces the
    row's, `epochs`, `learning_rate`, `max_length` and `batch` (features of an optimizer step) the preset's, unless they
    are 0 or None; without `world` a parallel row has WORLD processes, and without `stages` a pipeline goes through all
    of them. Raises UnknownName, and SpecError for a row of another task and a number that cannot be.
    """
    asked, size = find_variant(variant).settings, find_preset(preset)
    sizes = {"micro_batch": micro_batch, "world": world, "epochs": epochs, "stages": stages, "max_length": max_length}
    sizes = {name: whole_number(name, number or 0, 0) for name, number in (sizes | {"batch": batch}).items()}
    micro_batch, world, epochs, stages, max_length, batch = sizes.values()
    if isinstance(learning_rate, numbers.Real) and not isinstance(learning_rate, bool):
        learning_rate = float(learning_rate)
    if micro_batch:
        asked = dataclasses.replace(asked, micro_batch=micro_batch)
    if (task := find_variant(variant).task) != size.task:
        raise SpecError(f"{variant} is a row of task {task}, and preset {preset!r} of task {size.task}")
    if size.task == "qa" and asked.cuda_graph and asked.padding != "packed":
        raise SpecError(f"{variant}: the mask of padded rows is made on the host, and a graph has no host")
    if epochs:
        size = dataclasses.replace(size, steps=None, epochs=epochs)
    if learning_rate:
        size = dataclasses.replace(size, learning_rate=learning_rate)
    if max_length:
        size = dataclasses.replace(size, max_length=max_length, stride=stride_of(max_length, size.stride))
    if batch:
        size = dataclasses.replace(size, effective_batch=batch, batch_tokens=None)
    if not 0 < size.stride < size.max_length <= (size.batch_tokens or size.max_length):
        raise SpecError(
            f"{size.max_length} tokens are too few or too many: a feature of preset {preset!r} has at least 3, and at "
            f"most {size.batch_tokens or 'what the model takes'}"
        )
    if size.batch_tokens and size.batch_tokens % size.max_length:
        whole = [n for n in range(3, size.batch_tokens + 1) if size.batch_tokens % n == 0]
        nearest = [n for n in whole if n < size.max_length][-1:] + [n for n in whole if n > size.max_length][:1]
        raise SpecError(
            f"features of {size.max_length} tokens do not make up the {size.batch_tokens:,} tokens of a step at preset "
            f"{preset!r}: take {' or '.join(map(str, nearest))} tokens, or give --batch"
        )
    if (shape := find_shape(model_source)) and size.max_length > shape.positions:
        longer = re.sub(r"(P\d+)?$", f"P{size.max_length}", model_source, count=1)
        raise SpecError(
            f"{model_source} has positions for {shape.positions} tokens and not for {size.max_length}: give "
            f"--model {longer}, to all runs that are compared"
        )
    if (size.batch or asked.micro_batch) % asked.micro_batch:
        raise SpecError(
            f"micro-batch {asked.micro_batch} does not divide the effective batch {size.batch} of preset {preset!r}"
        )
    world = world or (1 if asked.parallel == "none" else max(WORLD, stages or 1))
    stages = stages or (world if asked.parallel == "pipeline" else 1)
    if world > 1 and asked.parallel == "none":
        raise SpecError(f"{variant} trains in one process, not in {world}; the rows of family P take several")
    if stages > 1 and asked.parallel != "pipeline":
        raise SpecError(f"{variant} is no pipeline and has no stages")
    settings, adjusted = adjust(asked, machine)
    spec = Spec(
        variant=variant,
        preset=size,
        seed=seed,
        asked=asked,
        settings=settings,
        adjusted=adjusted,
        skip=missing(settings, machine, world),
        hardware=machine.hardware,
        data=data,
        model=model,
        data_source=data_source,
        model_source=model_source,
        world=world,
        stages=stages,
    )
    replicas(spec, world)
    return spec


def describe(spec: Spec) -> str:
    """What a notebook shows of its row, as Markdown: why it exists and how its settings differ from its parent's."""
    row = VARIANTS[spec.variant]
    base = dataclasses.asdict(VARIANTS[row.parent].settings) if row.parent else {}
    preset = spec.preset
    length = f"{preset.steps:,} steps" if preset.steps else f"{preset.epochs:g} epochs"
    batch = preset.batch or spec.settings.micro_batch
    lines = [
        f"**{row.name}** at preset **{preset.name}**, seed {spec.seed}. {row.why}\n",
        f"Model {spec.model['name']} on {spec.data['name']}: {length} of {batch} features, each of {preset.max_length} "
        f"tokens at most, of which neighbours share {preset.stride}; learning rate {preset.learning_rate:g}.\n",
    ]
    lines += [f"| setting | {row.parent or '–'} | {row.name} |", "|---|---|---|"]
    for key, value in dataclasses.asdict(spec.asked).items():
        before = base.get(key, "–")
        mark = "**" if base and before != value else ""
        lines.append(f"| {key} | {before} | {mark}{value}{mark} |")
    if newer := since(spec.settings):
        lines.append(f"\nOn a GPU it takes compute capability {newer / 10} or newer.")
    lines += [f"\nAdjusted to this machine: {note}." for note in spec.adjusted]
    lines += [f"\n**Skipped here**: {spec.skip}."] if spec.skip else []
    return "\n".join(lines)
