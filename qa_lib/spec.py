"""Row x scale x seed x machine: one run, completely, as a frozen `Spec` whose hash names it.

Standard library only, so that the driver and the tests can plan a sweep without importing torch.
"""

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from qa_lib.variants import (
    VARIANTS,
    Recipe,
    Settings,
    SpecError,
    UnknownName,
    find_recipe,
    find_variant,
    nearest,
    needs,
)


@dataclass(frozen=True)
class Scale:
    """How much work, on what. Learning-rate schedule and effective batch belong here, so that rows stay comparable."""

    name: str
    model: str  # tiny | a hub name | "" where --model must name a folder
    data: str  # synthetic:N | a hub name | "" where --data must name a file or folder
    max_length: int
    stride: int
    effective_batch: int | None  # features per optimizer step; None: one micro-batch, however large
    learning_rate: float
    warmup: float  # share of the steps in which the learning rate rises
    steps: int | None  # optimizer steps ...
    epochs: int | None  # ... or passes over the training features
    measure_from: int  # steps before this one are warm-up and not timed
    quality: bool  # evaluate, and keep the model; without it random initialisation will do
    checkpoint_every: int  # optimizer steps; 0: never
    time_limit_s: int
    threads: int | None = None  # of a run on a CPU; None: all of them
    limit_gib: float | None = None  # GPU memory that the run may take; None: all there is


SCALES = {
    scale.name: scale
    for scale in [
        Scale("smoke", "tiny", "synthetic:1600", 96, 32, 16, 4e-3, 0.1, 400, None, 30, True, 100, 300, 1),
        Scale("bench", "bert-base-uncased", "squad_v2", 384, 128, 32, 3e-5, 0.1, 600, None, 100, False, 0, 3600),
        # The seeds' protocol for memory: one step to settle, one to measure, each of one micro-batch.
        Scale("vram", "bert-base-uncased", "squad_v2", 384, 128, None, 3e-5, 0.1, 2, None, 1, False, 0, 900),
        # For the search of the largest micro-batch under a cap on memory.
        Scale("fit", "bert-base-uncased", "squad_v2", 384, 128, None, 3e-5, 0.1, 60, None, 30, False, 0, 900),
        # For differences between rows with intervals over seeds; 2e-4 was the best rate tried for A1 (group *-tune).
        Scale("quality", "", "", 384, 128, 32, 2e-4, 0.1, None, 3, 100, True, 0, 3600),
        Scale("full", "bert-base-uncased", "squad_v2", 384, 128, 32, 3e-5, 0.1, None, 3, 100, True, 500, 6 * 3600),
        Scale("local", "", "", 384, 128, 32, 3e-5, 0.1, None, 3, 100, True, 500, 6 * 3600),
    ]
}


def find_scale(name: str) -> Scale:
    """The scale of that name; UnknownName otherwise."""
    if name not in SCALES:
        raise UnknownName(nearest("scale", name, SCALES))
    return SCALES[name]


@dataclass(frozen=True)
class Machine:
    """What decides whether a row can run here. Filled by measure.machine(); kept free of torch for the driver."""

    hardware: str = "cpu"  # first half of a group's name
    gpus: int = 0
    sm: int = 0  # CUDA compute capability x 10, 0 without a GPU
    backends: tuple[str, ...] = ()  # what torch.compile knows
    bitsandbytes: bool = False
    compiler: bool = False  # Inductor can generate code: a C++ compiler, or Triton with a GPU


def missing(settings: Settings, machine: Machine) -> str | None:
    """Why these settings cannot run on the machine, in one sentence; None if they can."""
    for need in needs(settings):
        if need == "cuda" and not machine.gpus:
            return "needs a CUDA GPU"
        if need == "sm80" and machine.sm < 80:
            return "needs a GPU of compute capability 8.0 or newer (bf16 and FlashAttention)"
        if need == "sm89" and machine.sm < 89:
            return "needs a GPU of compute capability 8.9 or newer (8-bit floats)"
        if need == "compiler" and not machine.compiler:
            return "torch.compile needs a C++ compiler (g++), or Triton with a GPU"
        if need == "bitsandbytes" and not machine.bitsandbytes:
            return "needs the package bitsandbytes"
        if need.startswith("backend ") and need.removeprefix("backend ") not in machine.backends:
            return f"this PyTorch has no torch.compile backend named {need.removeprefix('backend ')!r}"
    return None


def adjust(settings: Settings, machine: Machine) -> tuple[Settings, list[str]]:
    """The settings as this machine runs them, and a sentence for each that had to change."""
    changes, said = {}, []
    if not machine.gpus:
        if settings.precision != "fp32":
            changes["precision"] = "fp32"
            said.append(f"precision: fp32, since {settings.precision} autocast needs a GPU")
        if settings.weights == "half":
            changes["weights"] = "fp32"
            said.append("weights: fp32, as the precision")
        if settings.step == "graph":
            changes["step"] = "eager"
            said.append("step: eager, since a CUDA graph needs a GPU")
    if settings.padding == "packed" and settings.attention == "sdpa":
        changes["attention"] = "flash" if machine.sm >= 80 else "efficient" if machine.gpus else "blockmask"
        said.append(f"attention: {changes['attention']}, the kernel for packed rows here")
    return dataclasses.replace(settings, **changes), said


@dataclass(frozen=True)
class Spec:
    """One run, completely. `data` and `model` are identities: {name, sha256} and {name, revision}.

    `data_source` and `model_source` say where to load from; paths differ between machines, so they are not hashed.
    """

    variant: str
    scale: Scale
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

    @property
    def hash(self) -> str:
        """SHA-256 of the canonical JSON of what defines the run."""
        content = {
            "settings": dataclasses.asdict(self.asked),
            "scale": dataclasses.asdict(self.scale),
            "seed": self.seed,
            "data": self.data,
            "model": self.model,
        }
        if self.asked.trainable != "all":  # a name does not say which rank and rate it stood for
            content["recipe"] = dataclasses.asdict(find_recipe(self.asked.trainable))
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def recipe(self) -> Recipe:
        return find_recipe(self.settings.trainable)

    @property
    def group(self) -> str:
        return f"{self.hardware}-{self.scale.name}"

    @property
    def run_id(self) -> str:
        return f"{self.variant}-s{self.seed}-{self.hash[:6]}"

    @property
    def run_path(self) -> Path:
        """The run's folder below the runs folder."""
        return Path(self.group, self.run_id)

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step."""
        return (self.scale.effective_batch or self.settings.micro_batch) // self.settings.micro_batch


def resolve(
    variant: str,
    scale: str,
    seed: int,
    machine: Machine,
    data: dict,
    model: dict,
    data_source: str,
    model_source: str,
    micro_batch: int | None = None,
) -> Spec:
    """Variant x scale x seed to the spec of one run on this machine.

    `data` and `model` are identities and `*_source` where to load them from (see Spec). Raises UnknownName, and
    SpecError where the micro-batch does not divide the scale's effective batch.
    """
    row, size = find_variant(variant), find_scale(scale)
    if seed < 0:
        raise SpecError(f"seed {seed} is negative")
    asked = row.settings
    if micro_batch:
        asked = dataclasses.replace(asked, micro_batch=micro_batch)
    if asked.micro_batch < 1 or (size.effective_batch or asked.micro_batch) % asked.micro_batch:
        raise SpecError(
            f"micro-batch {asked.micro_batch} does not divide the effective batch {size.effective_batch} "
            f"of scale {scale!r}"
        )
    settings, adjusted = adjust(asked, machine)
    return Spec(
        variant=variant,
        scale=size,
        seed=seed,
        asked=asked,
        settings=settings,
        adjusted=adjusted,
        skip=missing(settings, machine),
        hardware=machine.hardware,
        data=data,
        model=model,
        data_source=data_source,
        model_source=model_source,
    )


def describe(spec: Spec) -> str:
    """What a notebook shows of its row, as Markdown: why it exists and how its settings differ from its parent's."""
    row = VARIANTS[spec.variant]
    base = VARIANTS[row.parent].settings if row.parent else None
    lines = [f"**{row.name}** at scale **{spec.scale.name}**, seed {spec.seed}. {row.why}", ""]
    lines += [
        "| setting | " + (f"{row.parent} | " if base else "") + f"{row.name} |",
        "|---|---|" + "---|" * bool(base),
    ]
    for key, value in dataclasses.asdict(spec.asked).items():
        before = f"{getattr(base, key)} | " if base else ""
        mark = "**" if base and getattr(base, key) != value else ""
        lines.append(f"| {key} | {before}{mark}{value}{mark} |")
    lines += [f"\nAdjusted to this machine: {note}." for note in spec.adjusted]
    lines += [f"\n**Skipped here**: {spec.skip}."] if spec.skip else []
    return "\n".join(lines)


def hardware_name(gpu: str | None) -> str:
    """A GPU's marketing name as part of a folder name: 'NVIDIA H200' is 'h200', no GPU is 'cpu'."""
    if not gpu:
        return "cpu"
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"NVIDIA|Tesla|GeForce", "", gpu).strip().lower()).strip("-")
