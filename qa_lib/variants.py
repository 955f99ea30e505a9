"""The rows that are compared: what each one changes, and why.

A `Variant` names its parent and the one `Settings` field that it changes; following the parents gives all its settings.
`Settings` are checked where they are made: a value that does not exist, and two values that do not go together, are
errors, so that nothing is recorded that did not run. To add a row, add a line to VARIANTS.
"""

import argparse
import dataclasses
import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property
from typing import Literal, get_args, get_type_hints

from qa_lib.errors import UserError


class SpecError(UserError):
    """A run that cannot be specified as asked."""


class UnknownName(SpecError):
    """A variant, scale, family, setting or value that does not exist; the message suggests the nearest."""


def nearest(kind: str, name: str, known: Iterable[str]) -> str:
    """The message of an UnknownName: what was asked for, what may have been meant, and what there is."""
    folded = {word.casefold(): word for word in known}
    close = [folded[word] for word in difflib.get_close_matches(str(name).casefold(), folded, 1, 0.3)]
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown {kind} {name!r}{hint} (known: {', '.join(folded.values())})"


@dataclass(frozen=True)
class Settings:
    """Every knob of a run; the defaults are row A1, the baseline of the seeds.

    Raises UnknownName for a value that does not exist and SpecError for two that do not go together (CONFLICTS).
    """

    # loop: the visible loop of train/loop.py | trainer: transformers.Trainer
    engine: Literal["loop", "trainer"] = "loop"
    # autocast to fp16 (with GradScaler) or bf16 | fp32: no autocast
    precision: Literal["fp16", "bf16", "fp32"] = "fp16"
    # For padded rows eager | sdpa; for packed rows flash | efficient | blockmask, where sdpa takes what the GPU has |
    # short, a kernel of our own
    attention: Literal["eager", "sdpa", "flash", "efficient", "blockmask", "short"] = "eager"
    # query, key and value: separate | fused into one matrix product
    projections: Literal["separate", "fused"] = "separate"
    # random bits of the hidden states' dropout: philox, PyTorch's generator | hash of the element's number
    dropout: Literal["philox", "hash"] = "philox"
    # what comes between a layer's products and the norms after them, and these: native, the compiler's | fused, kernels
    # of our own (model/norms.py)
    norms: Literal["native", "fused"] = "native"
    # products of the feed-forward blocks: native, in the precision's type | fp8
    feed_forward: Literal["native", "fp8"] = "native"
    # GELU of the feed-forward blocks: exact, by the error function | sigmoid of a polynomial (model/gelu.py)
    activation: Literal["exact", "sigmoid"] = "exact"
    # train on the layers' weights rounded to so many bits and activations to 8 (model/quantize.py)
    rounding: Literal["none", "int8", "int4"] = "none"
    # a backend of torch.compile | regions: inductor, for a few layers at a time
    compile: Literal["none", "inductor", "regions", "aot_eager", "cudagraphs", "nvfuser"] = "none"
    # max: to the scale's max_length | longest: of the micro-batch | packed: none, features laid end to end
    padding: Literal["max", "longest", "packed"] = "max"
    # random | bucketed: micro-batches of like length, in random order
    order: Literal["random", "bucketed"] = "random"
    # which parameters train: a name that find_recipe knows
    trainable: str = "all"
    # what adapters leave frozen: as it is | nf4: in 4 bits by bitsandbytes (QLoRA)
    frozen: Literal["native", "nf4"] = "native"
    # adamw: PyTorch's default | fused: one kernel, no wait for the device | adamw8bit: moments in 8 bits |
    # master: weights and gradients in half precision, fp32 masters in the optimizer | master16: and moments in bf16
    optimizer: Literal["adamw", "fused", "adamw8bit", "master", "master16"] = "adamw"
    # eager: kernel by kernel | graph: the whole step replayed as one CUDA graph
    step: Literal["eager", "graph"] = "eager"
    # recompute activations in the backward pass: none | elementwise: what takes no product, by the compiler | all of a
    # layer's
    checkpointing: Literal[False, "elementwise", True] = False
    # how several processes make one step, each on its share of the micro-batches (train/parallel.py): ddp, PyTorch's
    # DistributedDataParallel, its gradients sent as they are or in bf16 | flat: one reduction of all gradients |
    # overlap: a reduction for each part of the model, while the backward pass computes the next |
    # sharded: a share of the optimizer each | overlap-sharded: both | fsdp: a share of weights, gradients and optimizer
    # each | pipeline: some of the layers each (train/pipeline.py) | tensor: a share of every layer's products each
    # (train/tensor.py) | deepspeed: a share of the optimizer each, by DeepSpeed under the Trainer (train/trainer.py)
    parallel: Literal[
        "none",
        "ddp",
        "ddp-bf16",
        "flat",
        "overlap",
        "sharded",
        "overlap-sharded",
        "fsdp",
        "pipeline",
        "tensor",
        "deepspeed",
    ] = "none"
    # in which order a pipeline's stages take micro-batches: gpipe, all forward, then all backward | 1f1b, backward as
    # early as can be | interleaved: 1f1b with two parts of the layers a process
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "gpipe"
    # how the Trainer watches its GPUs: not at all | nvidia-smi: each process asks it after every step (the slides)
    polling: Literal["none", "nvidia-smi"] = "none"
    # predictions to questions: by id | by position, the fault of A4-b
    join: Literal["id", "position"] = "id"
    # features in one forward pass
    micro_batch: int = 8

    def __post_init__(self):
        for name, values in choices().items():
            if getattr(self, name) not in values:
                raise UnknownName(nearest(name, str(getattr(self, name)), map(str, values)))
        find_recipe(self.trainable)
        if type(self.micro_batch) is not int or self.micro_batch < 1:
            raise SpecError(f"micro_batch {self.micro_batch!r} is not a whole number of features, 1 or more")
        for one, other, why in CONFLICTS:
            if _matches(self, one) and _matches(self, other):
                said = (f"{name} {getattr(self, name)!r}" for name, _ in (one, other))
                raise SpecError(f"{' and '.join(said)} do not go together: {why}")

    @property
    def half_weights(self) -> bool:
        """Whether weights and gradients are kept in half precision."""
        return self.optimizer in ("master", "master16")

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


def _matches(settings: Settings, condition: tuple[str, str]) -> bool:
    """Whether a setting has one of the values that a condition names: 'lora*', 'flash|efficient', '!packed'."""
    name, pattern = condition
    value = str(getattr(settings, name))
    found = any(fnmatchcase(value, part) for part in pattern.removeprefix("!").split("|"))
    return found != pattern.startswith("!")


# Two settings that do not go together, and why. '!x' is any value but x.
CONFLICTS = (
    (("padding", "packed"), ("attention", "eager"), "attention within segments takes a kernel that knows them"),
    (("attention", "flash|efficient|blockmask|short"), ("padding", "!packed"), "these are the kernels for packed rows"),
    (("attention", "flash"), ("precision", "fp32"), "FlashAttention computes in half precision alone"),
    (("padding", "packed"), ("order", "bucketed"), "packed rows are dealt by length already, and padding has no say"),
    (("optimizer", "master"), ("precision", "fp32"), "fp32 needs no masters"),
    (("optimizer", "master16"), ("precision", "!bf16"), "GPUs that compute in fp16 for want of bf16 cannot keep it"),
    (("feed_forward", "fp8"), ("precision", "!bf16"), "the 8-bit products give bf16"),
    (("feed_forward", "fp8"), ("optimizer", "!master*"), "the 8-bit products take weights in bf16"),
    (("norms", "fused"), ("dropout", "philox"), "its backward pass computes dropout's bits again, by their hash"),
    (("norms", "fused"), ("frozen", "nf4"), "the products in 4 bits add their biases themselves"),
    (("norms", "fused"), ("rounding", "!none"), "the rounded products add their biases themselves"),
    (("norms", "fused"), ("parallel", "tensor"), "its kernels take plain tensors, and no DTensor's shares"),
    (("activation", "sigmoid"), ("frozen", "nf4"), "the products in 4 bits add their biases themselves"),
    (("activation", "sigmoid"), ("rounding", "!none"), "the rounded products add their biases themselves"),
    (("activation", "sigmoid"), ("parallel", "tensor"), "its kernel takes plain tensors, and no DTensor's shares"),
    (("projections", "fused"), ("trainable", "lora*"), "the adapters' query, key and value are fused away"),
    (("frozen", "nf4"), ("trainable", "!lora*"), "weights in 4 bits cannot train, so that adapters have to"),
    (("frozen", "nf4"), ("feed_forward", "fp8"), "both are about the same products"),
    (("frozen", "nf4"), ("parallel", "fsdp|tensor|pipeline"), "sharing out weights in 4 bits has not been tried"),
    (("rounding", "!none"), ("precision", "!fp32"), "what is rounded is what a CPU will compute, in 32 bits"),
    (("rounding", "!none"), ("trainable", "lora*"), "an adapter that is merged is rounded with its weight"),
    (("rounding", "!none"), ("frozen", "nf4"), "both are about the same products"),
    (("rounding", "!none"), ("parallel", "tensor"), "a share of a row has another scale than the row"),
    (("step", "graph"), ("optimizer", "adamw|adamw8bit"), "their step counts are on the host, which a graph replays"),
    (("step", "graph"), ("padding", "longest"), "a graph replays one shape"),
    (("checkpointing", "elementwise"), ("compile", "!inductor|regions"), "Inductor's partitioner decides what is kept"),
    (("compile", "regions"), ("padding", "!packed"), "the regions hand on packed rows"),
    (("compile", "regions"), ("parallel", "ddp*|pipeline"), "they call the whole model, or a stage, as one"),
    (("step", "graph"), ("compile", "cudagraphs"), "graphs do not nest"),
    (("compile", "cudagraphs"), ("padding", "longest"), "a graph replays one shape"),
    (("engine", "trainer"), ("padding", "packed"), "transformers.Trainer calls the model with padded rows"),
    (("engine", "trainer"), ("dropout", "hash"), "nothing renews the seeds of its dropout"),
    (("engine", "trainer"), ("optimizer", "adamw8bit|master*"), "transformers.Trainer builds its own fused AdamW here"),
    (("engine", "trainer"), ("checkpointing", "elementwise"), "transformers.Trainer compiles the model itself"),
    (("engine", "trainer"), ("step", "graph"), "transformers.Trainer has no captured step"),
    (("engine", "trainer"), ("compile", "cudagraphs"), "its gradients of several micro-batches overwrite each other"),
    (("engine", "trainer"), ("parallel", "!none|ddp|deepspeed"), "transformers.Trainer takes DDP or DeepSpeed here"),
    (("engine", "loop"), ("parallel", "deepspeed"), "DeepSpeed's engine is there under transformers.Trainer alone"),
    (("engine", "loop"), ("polling", "!none"), "it is a callback of transformers.Trainer"),
    (("parallel", "!none"), ("compile", "cudagraphs"), "a replay writes over gradients before they are reduced"),
    (("parallel", "ddp*|fsdp"), ("step", "graph"), "their hooks wait on the host, which a graph has not"),
    (("parallel", "fsdp"), ("compile", "!none"), "its layers gather their weights between the compiler's graphs"),
    (("parallel", "*sharded|fsdp|tensor"), ("optimizer", "adamw8bit"), "8-bit moments come in blocks of whole tensors"),
    (("parallel", "fsdp"), ("optimizer", "master*"), "the kernel of the update takes whole tensors"),
    (("schedule", "!gpipe"), ("parallel", "!pipeline"), "a schedule is a pipeline's order"),
    (("parallel", "pipeline"), ("padding", "!packed"), "its stages hand on packed rows, which are all of one shape"),
    (("parallel", "pipeline"), ("precision", "fp16"), "GradScaler scales the loss, which the last stage alone has"),
    (("parallel", "pipeline"), ("dropout", "hash"), "its seeds change before a micro-batch's backward pass"),
    (("parallel", "pipeline"), ("attention", "short"), "the seeds of its dropout change before the backward pass"),
    (("parallel", "pipeline|tensor"), ("step", "graph"), "what they send within a step is not captured"),
    (("parallel", "pipeline|tensor"), ("trainable", "!all"), "adapters and frozen layers are not cut into shares"),
    (("parallel", "tensor"), ("projections", "fused"), "a share of the fused product is no share of the heads"),
    (("parallel", "tensor"), ("attention", "short"), "heads on several GPUs would drop out by one pattern"),
    (("parallel", "tensor"), ("feed_forward", "fp8"), "the 8-bit products take whole weights"),
)


@dataclass(frozen=True)
class Recipe:
    """Which parameters train. `lr_factor` multiplies the scale's learning rate, since PEFT wants a larger one."""

    kind: Literal["all", "lora", "biases", "top"]
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


def find_recipe(name: str) -> Recipe:
    """A recipe of RECIPES; or LoRA of any rank on the same targets, named like 'lora-all-r32', at the scale's own
    learning rate. UnknownName otherwise."""
    if found := re.fullmatch(r"(lora-[a-z]+)-r([1-9]\d*)", name):
        family, rank = found.groups()
        if family in RECIPES:
            return dataclasses.replace(RECIPES[family], rank=int(rank), lr_factor=1.0)
    if name not in RECIPES:
        raise UnknownName(nearest("trainable", name, RECIPES))
    return RECIPES[name]


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
    def task(self) -> str:
        """The task that the row is for, a name of run/tasks.py."""
        return "lm" if self.family == "L" else "qa"

    @cached_property
    def settings(self) -> Settings:
        base = VARIANTS[self.parent].settings if self.parent else Settings()
        return dataclasses.replace(base, **self.change)


def _row(name: str, parent: str | None, why: str, **change) -> tuple[str, Variant]:
    return name, Variant(name, parent, change, why)


VARIANTS = dict(
    [
        _row("A1", None, "The baseline: fp16, eager attention, every feature padded to the limit, AdamW, no compiler."),
        _row("A0", "A1", "What most people would run: the same training by transformers.Trainer.", engine="trainer"),
        _row("A0-sdpa", "A0", "The Trainer with fused attention, which is its default.", attention="sdpa"),
        _row("A0-nb", "A0-sdpa", "The Trainer with its usual collator: padded to the longest.", padding="longest"),
        _row("A0-best", "A0-nb", "The Trainer with batches of like length, too.", order="bucketed"),
        _row("A0-compile", "A0-best", "Whether torch.compile helps the Trainer at its best.", compile="inductor"),
        _row("A2", "A1", "Fused attention keeps the score matrix out of memory and saves launches.", attention="sdpa"),
        _row("A3", "A2", "The compiler fuses elementwise work and removes Python from the step.", compile="inductor"),
        _row("A4-nb", "A3", "Padding to the longest of a batch, which one long feature spoils.", padding="longest"),
        _row("A4", "A4-nb", "Batches of like length make that pay: half of a batch is padding.", order="bucketed"),
        _row("A4-b", "A4", "The seeds' fault on purpose: sorted predictions, unsorted questions.", join="position"),
        _row("A1-fp32", "A1", "What mixed precision is worth: all of it in 32 bits.", precision="fp32"),
        _row("A1-int8", "A1-fp32", "Training that knows that its weights will be whole numbers.", rounding="int8"),
        _row("A1-int4", "A1-fp32", "The same with 4 bits, of which rounding takes more.", rounding="int4"),
        _row("B1", "A3", "LoRA r=8 on query and value at the full rate, as in the seeds.", trainable="lora-qv"),
        _row("B1-all", "A3", "LoRA r=32 on every linear layer, at five times the rate.", trainable="lora-all"),
        _row("B2", "A3", "BitFit: only biases and the answer head train.", trainable="biases"),
        _row(
            "B3",
            "A3",
            "The bottom layers frozen, 10 of 12: a shorter backward pass.",
            trainable="freeze-bottom-10",
        ),
        _row(
            "B3-last4",
            "A3",
            "The last layers frozen, 4 of 12: gradients pass through them.",
            trainable="freeze-last-4",
        ),
        _row("C1", "A3", "Adam's two moments in 8 bits instead of 32.", optimizer="adamw8bit"),
        _row("C2-8", "A2", "The 8-bit optimizer alone, without the compiler.", optimizer="adamw8bit"),
        _row("C2", "A3", "Activations are recomputed instead of kept: memory for time.", checkpointing=True),
        _row("D1", "A3", "The compiler's graph capture without its code generation.", compile="aot_eager"),
        _row("D1-cudagraphs", "A3", "Launch overhead alone: captured graphs of unfused kernels.", compile="cudagraphs"),
        _row("D1-nvfuser", "A3", "The backend the proposal names; torch.compile has none any more.", compile="nvfuser"),
        _row("E1", "A3", "No padding at all: features end to end in rows of one static length.", padding="packed"),
        _row("E1-efficient", "E1", "The kernel that a T4 has, in FlashAttention's place.", attention="efficient"),
        _row("E2", "E1", "AdamW as one kernel, with rate and step count on the device: no waiting.", optimizer="fused"),
        _row("E3", "E2", "The whole step is one launch, so that a slow host no longer matters.", step="graph"),
        _row("E4", "E3", "No loss scaling; the same matrix rate on this generation of chips.", precision="bf16"),
        _row("E5", "E4", "Weights, gradients, residuals in bf16 over fp32 masters: no casts.", optimizer="master"),
        _row("E5-eager", "E5", "What the capture alone gives; and where pipelines begin.", step="eager"),
        _row("E6", "E5", "Query, key and value in one product: wider tiles, fewer kernels.", projections="fused"),
        _row("E-best", "E6", "Dropout's random bits at a tenth of the work.", dropout="hash"),
        _row("E-moments", "E-best", "Adam's moments in bf16, rounded at random: fewer bytes.", optimizer="master16"),
        _row("E-lean", "E-moments", "GELU and norms are computed twice, and not kept.", checkpointing="elementwise"),
        _row("E-regions", "E-best", "A quick start: layers are compiled by threes, all as one.", compile="regions"),
        _row("E-fp8", "E-best", "Half of the products in 8-bit floats, where the chip has them.", feed_forward="fp8"),
        _row("E-short", "E-regions", "A kernel of our own: attention for segments of 180 tokens.", attention="short"),
        _row(
            "E-recompute", "E-short", "Layers are computed twice, in a graph: hashes need no state.", checkpointing=True
        ),
        _row("E-least", "E-recompute", "The least memory of a captured step: moments in bf16.", optimizer="master16"),
        _row("E-norm", "E-short", "Bias, dropout, residual and norm: one kernel each way.", norms="fused"),
        _row("E-gelu", "E-norm", "GELU in fewer instructions, to a fraction of bf16's step.", activation="sigmoid"),
        _row("E-top", "E-gelu", "The recommended stack: Adam's moments in bf16 as well.", optimizer="master16"),
        _row("E-top-fp8", "E-top", "And half of its products in 8 bits.", feed_forward="fp8"),
        _row("E-t4", "E3", "What is left without bf16 and FlashAttention, as on a T4.", projections="fused"),
        _row("E-t4-hash", "E-t4", "Dropout's random bits at a tenth of the work, on a T4 too.", dropout="hash"),
        _row("E-t4-best", "E-t4-hash", "Weights, gradients, residuals in fp16, over masters.", optimizer="master"),
        _row("E-t4-norm", "E-t4-best", "Bias, dropout, residual and norm in one, on a T4 too.", norms="fused"),
        _row("EC1", "E1", "Packed rows with 8-bit moments: towards the least memory.", optimizer="adamw8bit"),
        _row("EC2", "EC1", "Packed rows, 8-bit moments, and layers computed twice.", checkpointing=True),
        _row("EB1-lean", "EC2", "LoRA on top of that, on every linear layer.", trainable="lora-all"),
        _row("EB1-least", "EB1-lean", "What is frozen in half precision: half of its bytes.", optimizer="master"),
        _row("EB1", "E5", "Does LoRA still pay once the step is fused and captured?", trainable="lora-qv"),
        _row("EB1-all", "E5", "And LoRA on every linear layer?", trainable="lora-all"),
        _row("EB2", "E-best", "And biases alone?", trainable="biases"),
        _row("EB3", "E-best", "And freezing, which shortens the backward pass itself?", trainable="freeze-bottom-10"),
        _row("P0", "A0", "What most people would run on several GPUs: the Trainer under torchrun.", parallel="ddp"),
        _row("P0-ds", "P0", "What the slides called a pipeline: DeepSpeed's ZeRO-1.", parallel="deepspeed"),
        _row("P0-polled", "P0", "The slides' fault on purpose: nvidia-smi in every step.", polling="nvidia-smi"),
        _row("P1", "A1", "The baseline on several GPUs: they average gradients while they make them.", parallel="ddp"),
        _row("P1-bf16", "P1", "Half the bytes between the GPUs: gradients travel in bf16.", parallel="ddp-bf16"),
        _row("P-fsdp", "P1", "Each GPU keeps a share of weights, gradients and optimizer.", parallel="fsdp"),
        _row("P-fast", "E-best", "E-best on several GPUs: one reduction inside the captured step.", parallel="flat"),
        _row("P-overlap", "E-regions", "Gradients are reduced while others are still computed.", parallel="overlap"),
        _row("P-best", "P-overlap", "Gradients and new weights travel beside the passes.", parallel="overlap-sharded"),
        _row("P-sharded", "P-fast", "Each GPU updates its share of the weights alone.", parallel="sharded"),
        _row(
            "P-gpipe", "E5-eager", "Each GPU has some of the layers, and hands on micro-batches.", parallel="pipeline"
        ),
        _row("P-1f1b", "P-gpipe", "Backward as early as can be: fewer activations are kept.", schedule="1f1b"),
        _row("P-interleaved", "P-1f1b", "Two parts of the layers a GPU: it waits less.", schedule="interleaved"),
        _row("P-tensor", "E5-eager", "Each GPU has a share of every matrix product.", parallel="tensor"),
        _row("L1", "A1", "The baseline of language models: fp32, eager attention, AdamW.", precision="fp32"),
        _row("L0", "L1", "What most people would run: the same through transformers.Trainer.", engine="trainer"),
        _row("L0-bf16", "L0", "The Trainer with mixed precision.", precision="bf16"),
        _row("L0-sdpa", "L0-bf16", "The Trainer with fused attention, which is its default.", attention="sdpa"),
        _row("L0-compile", "L0-sdpa", "The Trainer with all it offers.", compile="inductor"),
        _row("L-fp16", "L1", "Mixed precision where there is no bf16, as on a T4.", precision="fp16"),
        _row("L2", "L1", "Mixed precision: products in bf16, weights in fp32.", precision="bf16"),
        _row("L3", "L2", "Fused attention skips the half of the scores that no token may see.", attention="sdpa"),
        _row("L4", "L3", "The compiler fuses elementwise work, the loss over the vocabulary too.", compile="inductor"),
        _row("L5", "L4", "AdamW as one kernel: no waiting for the device.", optimizer="fused"),
        _row("L6", "L5", "The whole step is one launch; rows of text all have one length.", step="graph"),
        _row("L7", "L6", "Weights, gradients, residuals in bf16 over fp32 masters: no casts.", optimizer="master"),
        _row("L-best", "L7", "The whole stack: dropout's random bits at a tenth of the work.", dropout="hash"),
        _row("L-recompute", "L4", "Activations are recomputed instead of kept: memory for time.", checkpointing=True),
        _row("L-8bit", "L4", "Adam's two moments in 8 bits, but for the embeddings'.", optimizer="adamw8bit"),
        _row("L-lora", "L4", "LoRA r=32 on every product of the layers, over a frozen model.", trainable="lora-all"),
        _row("L-qlora", "L-lora", "The frozen layers in 4 bits: a seventh of their weights' bytes.", frozen="nf4"),
        _row("L-ddp", "L4", "Several GPUs: gradients are averaged during the backward pass.", parallel="ddp"),
        _row("L-flat", "L-best", "The whole stack on several GPUs: one captured reduction.", parallel="flat"),
    ]
)
FAMILIES = {
    "A": "systems",
    "B": "peft",
    "C": "memory",
    "D": "backends",
    "E": "beyond",
    "P": "parallel",
    "L": "language",
}  # family -> notebook
BASELINES = {"qa": "A1", "lm": "L1"}  # task -> the row that its others are compared with


def find_variant(name: str) -> Variant:
    """The row of that name; UnknownName otherwise."""
    if name not in VARIANTS:
        raise UnknownName(nearest("variant", name, VARIANTS))
    return VARIANTS[name]


def find_family(name: str) -> list[str]:
    """The names of a family's rows, in table order, by its letter or its notebook; UnknownName otherwise."""
    letters = {word: letter for letter, notebook in FAMILIES.items() for word in (letter, notebook)}
    if name not in letters:
        raise UnknownName(nearest("family", name, letters))
    return [row.name for row in VARIANTS.values() if row.family == letters[name]]


def needs(settings: Settings) -> list[str]:
    """What a machine must have for these settings, by name; spec.missing says what the names mean."""
    wanted = {
        "compiler": settings.compile in ("inductor", "regions"),
        f"backend {settings.compile}": settings.compile not in ("none", "inductor", "regions"),
        "cuda": settings.compile == "cudagraphs" or settings.attention == "efficient" or settings.polling != "none",
        "products": settings.attention == "short",
        "triton": settings.attention == "short"
        or settings.norms == "fused"
        or settings.activation == "sigmoid"
        or settings.half_weights,
        "sm89": settings.feed_forward == "fp8",
        "sm80": settings.attention == "flash" or settings.precision == "bf16",
        "bitsandbytes": settings.optimizer == "adamw8bit" or settings.frozen == "nf4",
        "torchao": settings.rounding != "none",
        "deepspeed": settings.parallel == "deepspeed",
    }
    return [need for need, asked in wanted.items() if asked]


# A need -> the compute capability x 10 from which GPUs meet it: a T4 has 75, an A100 80, an L4 89, an H100 90. Inductor
# writes kernels for 70; the oldest that those of our own are compiled for in the tests is a T4.
SINCE = {"compiler": 70, "triton": 75, "products": 80, "sm80": 80, "sm89": 89}


def since(settings: Settings) -> int | None:
    """The compute capability x 10 from which GPUs run these settings; None for every one that PyTorch has."""
    return max((SINCE[need] for need in needs(settings) if need in SINCE), default=None)


EXAMPLE = "example: python -m qa_lib variants --json | jq '.[] | select(.family == \"B\")'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m qa_lib variants`."""
    parser.add_argument("--json", action="store_true", help="print every row with all its settings as JSON")


def main(args: argparse.Namespace) -> int:
    """Print the table of rows."""
    if args.json:
        rows = [
            dataclasses.asdict(row)
            | {
                "family": row.family,
                "settings": dataclasses.asdict(row.settings),
                "needs": needs(row.settings),
                "since": since(row.settings),
            }
            for row in VARIANTS.values()
        ]
        print(json.dumps(rows, indent=1))
        return 0
    for row in VARIANTS.values():
        change = ", ".join(f"{key} = {value}" for key, value in row.change.items()) or "baseline"
        newer = f"{capability / 10}" if (capability := since(row.settings)) else "-"
        print(f"{row.name:14}{row.parent or '-':12}{change:32}{newer:5}{row.why}")
    print("The number is the compute capability from which GPUs run a row: a T4 has 7.5, an A100 8.0, an H100 9.0.")
    return 0
