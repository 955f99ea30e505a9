"""The variants that are compared: what each one changes, and why.

A `Variant` names its parent and the one `Settings` field that it changes; following the parents gives all its settings.
`Settings` are checked where they are made: a value that does not exist, and two values that do not go together, are
errors, so that nothing is recorded that did not run. To add a variant, add a line to variants.csv.
"""

import csv
import dataclasses
import re
import tomllib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache, cached_property
from pathlib import Path
from typing import Literal, get_args, get_type_hints

from qa_lib.errors import SpecError, UnknownName, find, nearest

Attention = Literal[
    "eager", "sdpa", "flash", "efficient", "block-diagonal", "triton-varlen", "triton-causal"
]
Optimizer = Literal[
    "adamw", "adamw-fused", "adamw-8bit", "adamw-master", "adamw-master-bf16", "adamw-master-8bit"
]
DataParallel = Literal[
    "ddp", "ddp-bf16", "ddp-one-bucket", "ddp-overlap", "zero1", "zero1-overlap", "fsdp2"
]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Every knob of a run; the defaults are variant A1, the baseline of the reference project.

    Raises UnknownName for a value that does not exist and SpecError for two that do not go together (CONFLICTS).
    """

    # loop: the visible loop of train/loop.py | trainer: transformers.Trainer | plain: a rival of peers/
    engine: Literal["loop", "trainer", "plain"] = "loop"
    # autocast to fp16 (with GradScaler) or bf16 | fp32: no autocast | pure-bf16: weights and moments as well
    precision: Literal["fp16", "bf16", "fp32", "pure-bf16"] = "fp16"
    # For padded sequences eager | sdpa; for packed ones flash | efficient | block-diagonal, where sdpa takes what the
    # GPU has | triton-varlen, a kernel of our own | triton-causal, the same for windows of text
    attention: Attention = "eager"
    # query, key and value: separate linear layers | fused into one
    qkv: Literal["separate", "fused"] = "separate"
    # random bits of the hidden states' dropout: philox, PyTorch's generator | hash of the element's number | none: no
    # dropout anywhere
    dropout: Literal["philox", "hash", "none"] = "philox"
    # what comes between a layer's linear layers and the norms after them, and these: native, the compiler's | fused,
    # kernels of our own (kernels/fused_norm.py)
    norms: Literal["native", "fused"] = "native"
    # of a language model: native, from all logits | chunked, head and loss together, some tokens at a time
    # (kernels/linear_cross_entropy.py) | chunked-fp8: two of its GEMMs in 8-bit floats
    loss: Literal["native", "chunked", "chunked-fp8"] = "native"
    # linear layers of the feed-forward blocks: native, in the precision's type | fp8
    feed_forward: Literal["native", "fp8"] = "native"
    # GELU of the feed-forward blocks: exact, by the error function | sigmoid of a polynomial (kernels/gelu.py)
    gelu: Literal["exact", "sigmoid"] = "exact"
    # quantization-aware training: weights rounded to so many bits, activations to 8 (model/qat.py)
    qat: Literal["none", "int8", "int4"] = "none"
    # a backend of torch.compile | regional: inductor, for a few layers at a time | reduce-overhead: its mode, in which
    # PyTorch replays the passes of a plain engine as CUDA graphs
    compile: Literal[
        "none", "inductor", "regional", "aot_eager", "cudagraphs", "nvfuser", "reduce-overhead"
    ] = "none"
    # to the preset's max_length | to the longest of the micro-batch | packed: none, samples share sequences
    padding: Literal["max_length", "longest", "packed"] = "max_length"
    # micro-batches of samples of like length, in random order
    group_by_length: Literal[False, True] = False
    # which parameters train: a name that find_recipe knows
    trainable: str = "all"
    # what adapters leave frozen: as it is | nf4: in 4 bits by bitsandbytes (QLoRA)
    base_quantization: Literal["none", "nf4"] = "none"
    # adamw: PyTorch's default | adamw-fused: one kernel, no wait for the device | adamw-8bit: moments in 8 bits |
    # adamw-master: weights and gradients in half precision, fp32 masters in the optimizer | adamw-master-bf16: and
    # moments in bf16 | adamw-master-8bit: or in 8 bits
    optimizer: Optimizer = "adamw"
    # the whole step replayed as one CUDA graph
    cuda_graph: Literal[False, True] = False
    # recompute activations in the backward pass: none | elementwise: what takes no GEMM, by the compiler | all of a
    # layer's
    activation_checkpointing: Literal[False, "elementwise", True] = False
    # how several processes make one step, each on its share of the micro-batches (train/parallel/data_parallel.py): ddp,
    # PyTorch's DistributedDataParallel, its gradients sent as they are or in bf16 | ddp-one-bucket: one reduction of
    # all gradients | ddp-overlap: a reduction for each part of the model, while the backward pass computes the next |
    # zero1: a share of the optimizer each | zero1-overlap: both | fsdp2: a share of weights, gradients and optimizer
    # each | pipeline: some of the layers each (train/parallel/pipeline.py) | tensor: a share of every linear layer each
    # (train/parallel/tensor.py) | deepspeed: ZeRO-1 by DeepSpeed under the Trainer (train/trainer.py)
    parallel: Literal["none", DataParallel, "pipeline", "tensor", "deepspeed"] = "none"
    # in which order a pipeline's stages take micro-batches: gpipe, all forward, then all backward | 1f1b, backward as
    # early as can be | interleaved: 1f1b with two parts of the layers a process
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "gpipe"
    # a fault of the reference project's, on purpose: each process asks nvidia-smi after every step | predictions go to
    # questions by position and not by id (A4-b)
    fault: Literal["none", "nvidia-smi-polling", "positional-join"] = "none"
    # samples in one forward pass
    micro_batch: int = 8

    def __post_init__(self):
        for name, values in choices().items():
            if not any(
                getattr(self, name) is value or getattr(self, name) == value != 1
                for value in values
            ):
                raise UnknownName(nearest(name, str(getattr(self, name)), map(str, values)))
        find_recipe(self.trainable)
        if type(self.micro_batch) is not int or self.micro_batch < 1:
            raise SpecError(
                f"micro_batch {self.micro_batch!r} is not a whole number of samples, 1 or more"
            )
        for one, other, why in CONFLICTS:
            if _matches(self, one) and _matches(self, other):
                names = (re.match(r"\w+", condition).group() for condition in (one, other))
                said = (f"{name} {getattr(self, name)!r}" for name in names)
                raise SpecError(f"{' and '.join(said)} do not go together: {why}")

    @property
    def half_weights(self) -> bool:
        """Whether weights and gradients are kept in half precision."""
        return self.optimizer.startswith("adamw-master")

    @property
    def chunks(self) -> int:
        """Parts of the layers that each process of a pipeline has."""
        return 2 if self.schedule == "interleaved" else 1


@cache
def choices() -> dict[str, tuple]:
    """The values of each setting that has a fixed list of them."""
    hints = get_type_hints(Settings)
    found = {field.name: get_args(hints[field.name]) for field in dataclasses.fields(Settings)}
    return {name: values for name, values in found.items() if values}


def _matches(settings: Settings, condition: str) -> bool:
    """Whether a setting has one of the values that a condition names: 'trainable=lora*', 'padding!=packed'."""
    name, negated, patterns = re.fullmatch(r"(\w+)(!?)=(.+)", condition).groups()
    value = str(getattr(settings, name))
    return any(fnmatchcase(value, pattern) for pattern in patterns.split("|")) != bool(negated)


def meets(settings: Settings, conditions: str) -> bool:
    """Whether settings meet all of some conditions, with blanks between them."""
    return all(_matches(settings, condition) for condition in conditions.split())


def _table(name: str) -> list[dict[str, str]]:
    """The lines of a CSV file beside this one."""
    return list(
        csv.DictReader(Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines())
    )


def read_toml(name: str) -> dict[str, dict]:
    """The tables of a TOML file beside this one."""
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


CONFLICTS = [
    tuple(line.values()) for line in _table("conflicts.csv")
]  # two settings that do not go together, and why


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Which parameters train. `lr_factor` multiplies the preset's learning rate, since PEFT wants a larger one."""

    kind: Literal["all", "lora", "bitfit", "top"]
    lr_factor: float = 1.0
    targets: Sequence[str] = ()  # lora: peft's target_modules
    rank: int = 8  # lora: r; alpha is 2 r
    frozen: Sequence[int] = (0, 12)  # top: this share of the layers is frozen ...
    frozen_side: str = "bottom"  # ... counted from the bottom (with the embeddings) or from the top


RECIPES = {name: Recipe(**values) for name, values in read_toml("recipes.toml").items()}


def find_recipe(name: str) -> Recipe:
    """A recipe of RECIPES; or LoRA of any rank on the same targets, named like 'lora-all-r32', at the preset's own
    learning rate. UnknownName otherwise."""
    found = re.fullmatch(r"(lora-[a-z]+)-r([1-9]\d*)", name)
    if found and found[1] in RECIPES:
        return dataclasses.replace(RECIPES[found[1]], rank=int(found[2]), lr_factor=1.0)
    return find("trainable", name, RECIPES)


@dataclasses.dataclass(frozen=True)
class Variant:
    """What is compared: `change` holds at most one field of Settings, the difference to `parent`.

    `tags` say where the report shows it: on the `ladder` of figures, beside it as transformers' `trainer` or `plain`
    PyTorch, in tables of few variants (`headline`), as what the Trainer is by `default`; and whether
    `quickstart` trains it. What has no tag stands in the whole tables.
    """

    name: str
    parent: str | None
    change: dict
    why: str
    tags: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        return self.name[0]

    @property
    def task(self) -> str:
        """The task that the variant is for, by tasks.toml."""
        return next(name for name, task in TASKS.items() if self.family in task["families"])

    @cached_property
    def settings(self) -> Settings:
        return dataclasses.replace(
            VARIANTS[self.parent].settings if self.parent else Settings(), **self.change
        )


def value_of(setting: str, written: str) -> object:
    """The value of a setting that a table has as text."""
    return next((value for value in choices().get(setting, ()) if str(value) == written), written)


def _variant(name: str, parent: str, change: str, tags: str, why: str) -> Variant:
    """A line of variants.csv, whose `change` is written as setting=value."""
    setting, _, written = change.partition("=")
    changed = {setting: value_of(setting, written)} if setting else {}
    return Variant(name, parent or None, changed, why, tuple(tags.split()))


VARIANTS = {line["name"]: _variant(**line) for line in _table("variants.csv")}
RECOMMENDED = (
    "E-uncompiled"  # what sentences speak of; what `recommended` stands for depends on the machine
)
TASKS = read_toml("tasks.toml")
FAMILIES = {
    letter: name for task in TASKS.values() for letter, name in task["families"].items()
}  # -> notebook
BASELINES = {name: task["baseline"] for name, task in TASKS.items()}


def find_variant(name: str, task: str = "qa") -> Variant:
    """The variant of that name; for `recommended`, until `plan` has chosen one, the baseline of the task. UnknownName
    otherwise."""
    return find("variant", name, VARIANTS | {"recommended": VARIANTS[BASELINES[task]]})


def tagged(tag: str) -> list[str]:
    """The names of the variants with a tag, in table order."""
    return [variant.name for variant in VARIANTS.values() if tag in variant.tags]


def find_family(letter: str) -> list[str]:
    """The names of a family's variants, in table order; UnknownName for a letter that no family has."""
    find("family", letter, FAMILIES)
    return [variant.name for variant in VARIANTS.values() if variant.family == letter]


VOLTA, AMPERE = (
    70,
    80,
)  # compute capability x 10: of a V100, an A100; a T4 has 75, an L4 89, an H100 90
# What a machine must have for settings that meet one of the conditions `of`: what of a spec.Machine it `has`, what
# besides where it is `on_gpu`, and the `sm` (compute capability x 10) from which GPUs have it. Inductor writes kernels
# for Volta; the oldest that those of our own are compiled for in the tests is a T4.
NEEDS = _table("needs.csv")


def about(settings: Settings, table: list[dict[str, str]]) -> list[dict[str, str]]:
    """The lines of a table, NEEDS or LACKS, one of whose conditions these settings meet."""
    return [
        line
        for line in table
        if any(_matches(settings, condition) for condition in line["of"].split())
    ]


def unmet(settings: Settings, machine) -> str | None:
    """The first of the needs that a spec.Machine does not meet, in words; None if it meets all."""
    for need in about(settings, NEEDS):
        names = need["has"].split() + (need["on_gpu"].split() if machine.gpus else [])
        if not all(getattr(machine, name) for name in names) or (
            machine.gpus and machine.sm < int(need["sm"])
        ):
            return need["why"]
    return None


# What settings that meet all of the conditions `of` become on a machine, a `value` of one `setting`, from one compute
# capability x 10 (`sm`) to `below` another; a CPU has 0.
ADJUSTMENTS = _table("adjustments.csv")
LACKS = _table(
    "lacks.csv"
)  # settings `of` which a model of some `architectures` can have none, and why


def lacking(settings: Settings, architecture: str) -> str | None:
    """Why a model of that architecture, a model_type of transformers, cannot have these settings, in words; None if it
    can."""
    found = (
        lack["why"]
        for lack in about(settings, LACKS)
        if architecture in lack["architectures"].split()
    )
    return next((f"does not fit {architecture}: {why}" for why in found), None)


def since(settings: Settings) -> int | None:
    """The compute capability x 10 from which GPUs run these settings; None for every one that PyTorch has."""
    return max((int(need["sm"]) for need in about(settings, NEEDS)), default=0) or None
