"""What is compared: the variants table, the scales, and the spec that one run is made of.

A `Variant` names its parent and the one `Settings` field it changes. A variant, a `Scale` and a seed, together with
the identity of data and model, resolve to a frozen `Spec`; its hash names the run. Standard library only, so that the
driver and the tests can plan a sweep without importing torch.
"""

import argparse
import dataclasses
import difflib
import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path


class SpecError(ValueError):
    """A run that cannot be specified as asked."""


class UnknownName(SpecError):
    """A variant, scale, family or setting that does not exist; the message suggests the nearest."""


@dataclass(frozen=True)
class Settings:
    """Every knob of a run. The defaults are row A1, the baseline of the seeds."""

    engine: str = "loop"  # loop: the visible loop of train.py | trainer: transformers.Trainer
    precision: str = "fp16"  # autocast to fp16 (with GradScaler) or bf16 | fp32
    attention: str = "eager"  # eager | sdpa; packed rows: flash | efficient | blockmask, sdpa takes what the GPU has
    projections: str = "separate"  # query, key and value: separate | fused into one matrix product
    dropout: str = "philox"  # random bits of the hidden states' dropout: philox, PyTorch's generator | hash
    feed_forward: str = "native"  # its products in the precision's type: native | fp8
    compile: str = "none"  # none | a backend name of torch.compile
    padding: str = "max"  # max: to the scale's max_length | longest: of the micro-batch | packed: none, end to end
    order: str = "random"  # random | bucketed: micro-batches of like length, in random order
    trainable: str = "all"  # a recipe, see find_recipe
    optimizer: str = "adamw"  # adamw | fused: one kernel, no wait for the device | adamw8bit
    weights: str = "fp32"  # fp32: cast where used | half: kept in the precision's type, fp32 masters in the optimizer
    step: str = "eager"  # eager: kernel by kernel | graph: the whole step replayed as one CUDA graph
    checkpointing: bool = False  # recompute the layers' activations in the backward pass
    join: str = "id"  # predictions to questions: by id | by position, the fault of A4-b
    micro_batch: int = 8  # features in one forward pass


@dataclass(frozen=True)
class Recipe:
    """Which parameters train. `lr_factor` multiplies the scale's learning rate, since PEFT wants a larger one."""

    kind: str  # all | lora | biases | top
    lr_factor: float = 1.0
    targets: str | tuple[str, ...] = ()  # lora: peft's target_modules
    rank: int = 8  # lora: r; alpha is 2 r
    frozen: tuple[int, int] = (0, 12)  # top: this share of the layers is frozen ...
    frozen_side: str = "bottom"  # ... counted from the bottom (with the embeddings) or from the top


RECIPES = {
    "all": Recipe("all"),
    "lora-qv": Recipe("lora", targets=("query", "value")),
    # Rank and rate by `tune`: rank 8 at this rate, and ranks above 32, end one to three F1 lower (LOG.md).
    "lora-all": Recipe("lora", lr_factor=5.0, targets=("query", "key", "value", "dense"), rank=32),
    "biases": Recipe("biases", lr_factor=30.0),
    "freeze-bottom-10": Recipe("top", frozen=(10, 12)),
    "freeze-last-4": Recipe("top", frozen=(4, 12), frozen_side="top"),
}


@dataclass(frozen=True)
class Variant:
    """One row: `change` holds at most one field of Settings, the difference to `parent`."""

    name: str
    parent: str | None
    change: dict
    why: str

    @property
    def family(self) -> str:
        return self.name[0]

    @property
    def settings(self) -> Settings:
        base = VARIANTS[self.parent].settings if self.parent else Settings()
        return dataclasses.replace(base, **self.change)


VARIANTS = {
    row.name: row
    for row in [
        Variant(
            "A1",
            None,
            {},
            "The baseline: fp16, eager attention, every feature padded to the limit, AdamW, no compiler.",
        ),
        Variant(
            "A0",
            "A1",
            {"engine": "trainer"},
            "What most people would run: the same recipe through transformers.Trainer.",
        ),
        Variant("A0-sdpa", "A0", {"attention": "sdpa"}, "The Trainer with fused attention, which is its default."),
        Variant(
            "A0-nb", "A0-sdpa", {"padding": "longest"}, "The Trainer with its usual collator: padded to the longest."
        ),
        Variant(
            "A0-best", "A0-nb", {"order": "bucketed"}, "The Trainer with all that pays: batches of like length, too."
        ),
        Variant(
            "A0-compile", "A0-best", {"compile": "inductor"}, "Whether torch.compile helps the Trainer at its best."
        ),
        Variant(
            "A2",
            "A1",
            {"attention": "sdpa"},
            "Fused attention keeps the score matrix out of memory and saves launches.",
        ),
        Variant(
            "A3", "A2", {"compile": "inductor"}, "The compiler fuses elementwise work and removes Python from the step."
        ),
        Variant(
            "A4-nb",
            "A3",
            {"padding": "longest"},
            "Padding only to the longest of the batch; in random order one long feature spoils it.",
        ),
        Variant(
            "A4",
            "A4-nb",
            {"order": "bucketed"},
            "Batches of like length make dynamic padding pay: half of a padded batch is not text.",
        ),
        Variant(
            "A4-b",
            "A4",
            {"join": "position"},
            "The seeds' failed ablation on purpose: sorted predictions joined to unsorted questions.",
        ),
        Variant(
            "B1",
            "A3",
            {"trainable": "lora-qv"},
            "LoRA r=8 on query and value at the full fine-tune's rate, as in the seeds.",
        ),
        Variant(
            "B1-all",
            "A3",
            {"trainable": "lora-all"},
            "LoRA r=32 on every linear layer at five times the full fine-tune's rate.",
        ),
        Variant("B2", "A3", {"trainable": "biases"}, "BitFit: only biases and the answer head train."),
        Variant(
            "B3",
            "A3",
            {"trainable": "freeze-bottom-10"},
            "The bottom 10 of 12 layers and the embeddings frozen: the backward pass stops early.",
        ),
        Variant(
            "B3-last4",
            "A3",
            {"trainable": "freeze-last-4"},
            "The last 4 of 12 layers frozen, as the proposal wrote: gradients still pass through them.",
        ),
        Variant("C1", "A3", {"optimizer": "adamw8bit"}, "Adam's two moments in 8 bits instead of 32."),
        Variant("C2-8", "A2", {"optimizer": "adamw8bit"}, "The 8-bit optimizer alone, without the compiler."),
        Variant("C2", "A3", {"checkpointing": True}, "Activations are recomputed instead of kept: memory for time."),
        Variant("D1", "A3", {"compile": "aot_eager"}, "The compiler's graph capture without its code generation."),
        Variant(
            "D1-cudagraphs",
            "A3",
            {"compile": "cudagraphs"},
            "Launch overhead alone: captured graphs of unfused kernels.",
        ),
        Variant(
            "D1-nvfuser",
            "A3",
            {"compile": "nvfuser"},
            "The backend the proposal names; torch.compile has none any more.",
        ),
        Variant(
            "E1", "A3", {"padding": "packed"}, "No padding at all: features end to end in rows of one static length."
        ),
        Variant(
            "E1-efficient", "E1", {"attention": "efficient"}, "The kernel that a T4 has, in FlashAttention's place."
        ),
        Variant(
            "E2",
            "E1",
            {"optimizer": "fused"},
            "AdamW as one kernel, with rate and step count on the device: no waiting.",
        ),
        Variant("E3", "E2", {"step": "graph"}, "The whole step is one launch, so that a slow host no longer matters."),
        Variant(
            "E4", "E3", {"precision": "bf16"}, "No loss scaling; the same matrix rate on this generation of chips."
        ),
        Variant(
            "E5",
            "E4",
            {"weights": "half"},
            "Weights, gradients and residual stream in bf16 over fp32 masters: no casts, and half the bytes.",
        ),
        Variant(
            "E6",
            "E5",
            {"projections": "fused"},
            "Query, key and value in one product: wider tiles, fewer kernels.",
        ),
        Variant(
            "E-best",
            "E6",
            {"dropout": "hash"},
            "The recommended stack. Random bits for dropout at a tenth of the instructions.",
        ),
        Variant(
            "E-fp8",
            "E-best",
            {"feed_forward": "fp8"},
            "Half of the multiplications in 8-bit floats, where the chip has them.",
        ),
        Variant(
            "E-t4",
            "E3",
            {"projections": "fused"},
            "What is left of the stack on a GPU without bf16 and FlashAttention, such as a T4.",
        ),
        Variant("EC1", "E1", {"optimizer": "adamw8bit"}, "Packed rows with 8-bit moments: towards the least memory."),
        Variant(
            "EC2", "EC1", {"checkpointing": True}, "The leanest full fine-tune: packed, 8-bit moments, recomputed."
        ),
        Variant("EB1-lean", "EC2", {"trainable": "lora-all"}, "The leanest row of all: LoRA on top of that."),
        Variant(
            "EB1",
            "E5",
            {"trainable": "lora-qv"},
            "Does LoRA still pay once the step is fused and captured?",
        ),
        Variant("EB1-all", "E5", {"trainable": "lora-all"}, "And LoRA on every linear layer?"),
        Variant("EB2", "E-best", {"trainable": "biases"}, "And biases alone?"),
        Variant(
            "EB3", "E-best", {"trainable": "freeze-bottom-10"}, "And freezing, which shortens the backward pass itself?"
        ),
    ]
}
FAMILIES = {"A": "systems", "B": "peft", "C": "memory", "D": "backends", "E": "beyond"}  # family -> notebook


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


def _nearest(kind: str, name: str, known) -> str:
    folded = {word.casefold(): word for word in known}
    close = [folded[word] for word in difflib.get_close_matches(name.casefold(), folded, 1, 0.3)]
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown {kind} {name!r}{hint} (known: {', '.join(known)})"


def find_variant(name: str) -> Variant:
    """The row of that name; UnknownName otherwise."""
    if name not in VARIANTS:
        raise UnknownName(_nearest("variant", name, VARIANTS))
    return VARIANTS[name]


def find_scale(name: str) -> Scale:
    """The scale of that name; UnknownName otherwise."""
    if name not in SCALES:
        raise UnknownName(_nearest("scale", name, SCALES))
    return SCALES[name]


def find_family(name: str) -> list[str]:
    """The names of a family's rows, in table order; UnknownName otherwise."""
    if name not in FAMILIES:
        raise UnknownName(_nearest("family", name, FAMILIES))
    return [row.name for row in VARIANTS.values() if row.family == name]


def find_recipe(name: str) -> Recipe:
    """A recipe of RECIPES; or LoRA of any rank on the same targets, named like 'lora-all-r32', at the scale's own
    learning rate. UnknownName otherwise."""
    if found := re.fullmatch(r"(lora-[a-z]+)-r([1-9]\d*)", name):
        family, rank = found.groups()
        if family in RECIPES:
            return dataclasses.replace(RECIPES[family], rank=int(rank), lr_factor=1.0)
    if name not in RECIPES:
        raise UnknownName(_nearest("trainable", name, RECIPES))
    return RECIPES[name]


@dataclass(frozen=True)
class Machine:
    """What decides whether a row can run here. Filled by measure.machine(); kept free of torch for the driver."""

    hardware: str = "cpu"  # first half of a group's name
    gpus: int = 0
    sm: int = 0  # CUDA compute capability x 10, 0 without a GPU
    backends: tuple[str, ...] = ()  # what torch.compile knows
    bitsandbytes: bool = False
    compiler: bool = False  # Inductor can generate code: a C++ compiler, or Triton with a GPU


def needs(settings: Settings) -> list[str]:
    """What a machine must have for these settings, by name."""
    found = []
    if settings.compile == "inductor":
        found.append("compiler")
    elif settings.compile != "none":
        found.append(f"backend {settings.compile}")
    if settings.compile == "cudagraphs" or settings.attention == "efficient":
        found.append("cuda")
    if settings.attention == "flash" or settings.precision == "bf16":
        found.append("sm80")
    if settings.feed_forward == "fp8":
        found.append("sm89")
    if settings.optimizer == "adamw8bit":
        found.append("bitsandbytes")
    return found


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


EXAMPLE = "example: python -m qa_lib variants --json | jq '.[] | select(.family == \"B\")'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m qa_lib variants`."""
    parser.add_argument("--json", action="store_true", help="print every row with all its settings as JSON")


def main(args: argparse.Namespace) -> int:
    """Print the table of rows."""
    if args.json:
        rows = [
            dataclasses.asdict(row)
            | {"family": row.family, "settings": dataclasses.asdict(row.settings), "needs": needs(row.settings)}
            for row in VARIANTS.values()
        ]
        print(json.dumps(rows, indent=1))
        return 0
    for row in VARIANTS.values():
        change = ", ".join(f"{key} = {value}" for key, value in row.change.items()) or "baseline"
        print(f"{row.name:14}{row.parent or '-':9}{change:32}{row.why}")
    return 0
