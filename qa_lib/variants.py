"""The variants that are compared: what each one changes, and why.

A `Variant` names its parent and the one `Settings` field that it changes; following the parents gives all its settings.
`Settings` are checked where they are made: a value that does not exist, and two values that do not go together, are
errors, so that nothing is recorded that did not run. To add a variant, add a line to VARIANTS.
"""

import argparse
import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property
from typing import Literal, get_args, get_type_hints

from qa_lib.errors import UserError


class SpecError(UserError):
    """A run that cannot be specified as asked."""


class UnknownName(SpecError):
    """A variant, preset, family, setting or value that does not exist; the message suggests the nearest."""


def nearest(kind: str, name: str, known: Iterable[str]) -> str:
    """The message of an UnknownName: what was asked for, what may have been meant, and what there is."""
    folded = {word.casefold(): word for word in known}
    close = [folded[word] for word in difflib.get_close_matches(str(name).casefold(), folded, 1, 0.3)]
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"unknown {kind} {name!r}{hint} (known: {', '.join(folded.values())})"


@dataclass(frozen=True)
class Settings:
    """Every knob of a run; the defaults are variant A1, the baseline of the reference project.

    Raises UnknownName for a value that does not exist and SpecError for two that do not go together (CONFLICTS).
    """

    # loop: the visible loop of train/loop.py | trainer: transformers.Trainer
    engine: Literal["loop", "trainer"] = "loop"
    # autocast to fp16 (with GradScaler) or bf16 | fp32: no autocast
    precision: Literal["fp16", "bf16", "fp32"] = "fp16"
    # For padded sequences eager | sdpa; for packed ones flash | efficient | block-diagonal, where sdpa takes what the
    # GPU has | triton-varlen, a kernel of our own
    attention: Literal["eager", "sdpa", "flash", "efficient", "block-diagonal", "triton-varlen"] = "eager"
    # query, key and value: separate linear layers | fused into one
    qkv: Literal["separate", "fused"] = "separate"
    # random bits of the hidden states' dropout: philox, PyTorch's generator | hash of the element's number
    dropout: Literal["philox", "hash"] = "philox"
    # what comes between a layer's linear layers and the norms after them, and these: native, the compiler's | fused,
    # kernels of our own (kernels/fused_norm.py)
    norms: Literal["native", "fused"] = "native"
    # linear layers of the feed-forward blocks: native, in the precision's type | fp8
    feed_forward: Literal["native", "fp8"] = "native"
    # GELU of the feed-forward blocks: exact, by the error function | sigmoid of a polynomial (kernels/gelu.py)
    gelu: Literal["exact", "sigmoid"] = "exact"
    # quantization-aware training: weights rounded to so many bits, activations to 8 (model/qat.py)
    qat: Literal["none", "int8", "int4"] = "none"
    # a backend of torch.compile | regional: inductor, for a few layers at a time
    compile: Literal["none", "inductor", "regional", "aot_eager", "cudagraphs", "nvfuser"] = "none"
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
    # moments in bf16
    optimizer: Literal["adamw", "adamw-fused", "adamw-8bit", "adamw-master", "adamw-master-bf16"] = "adamw"
    # the whole step replayed as one CUDA graph
    cuda_graph: Literal[False, True] = False
    # recompute activations in the backward pass: none | elementwise: what takes no GEMM, by the compiler | all of a
    # layer's
    activation_checkpointing: Literal[False, "elementwise", True] = False
    # how several processes make one step, each on its share of the micro-batches (train/data_parallel.py): ddp,
    # PyTorch's DistributedDataParallel, its gradients sent as they are or in bf16 | ddp-one-bucket: one reduction of
    # all gradients | ddp-overlap: a reduction for each part of the model, while the backward pass computes the next |
    # zero1: a share of the optimizer each | zero1-overlap: both | fsdp2: a share of weights, gradients and optimizer
    # each | pipeline: some of the layers each (train/pipeline.py) | tensor: a share of every linear layer each
    # (train/tensor.py) | deepspeed: ZeRO-1 by DeepSpeed under the Trainer (train/trainer.py)
    parallel: Literal[
        "none",
        "ddp",
        "ddp-bf16",
        "ddp-one-bucket",
        "ddp-overlap",
        "zero1",
        "zero1-overlap",
        "fsdp2",
        "pipeline",
        "tensor",
        "deepspeed",
    ] = "none"
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
            if not any(getattr(self, name) is value or getattr(self, name) == value != 1 for value in values):
                raise UnknownName(nearest(name, str(getattr(self, name)), map(str, values)))
        find_recipe(self.trainable)
        if type(self.micro_batch) is not int or self.micro_batch < 1:
            raise SpecError(f"micro_batch {self.micro_batch!r} is not a whole number of samples, 1 or more")
        for one, other, why in CONFLICTS:
            if _matches(self, one) and _matches(self, other):
                names = (re.match(r"\w+", condition).group() for condition in (one, other))
                said = (f"{name} {getattr(self, name)!r}" for name in names)
                raise SpecError(f"{' and '.join(said)} do not go together: {why}")

    @property
    def half_weights(self) -> bool:
        """Whether weights and gradients are kept in half precision."""
        return self.optimizer in ("adamw-master", "adamw-master-bf16")

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


# Two settings that do not go together, and why.
# fmt: off
CONFLICTS = (
    ("padding=packed", "attention=eager", "attention within segments takes a kernel that knows them"),
    ("attention=flash|efficient|block-diagonal|triton-varlen", "padding!=packed",
     "these are the kernels for packed sequences"),
    ("attention=flash", "precision=fp32", "FlashAttention computes in half precision alone"),
    ("padding=packed", "group_by_length=True", "packed sequences are dealt by length already, and padding has no say"),
    ("optimizer=adamw-master", "precision=fp32", "fp32 needs no masters"),
    ("optimizer=adamw-master-bf16", "precision!=bf16", "GPUs that compute in fp16 for want of bf16 cannot keep it"),
    ("feed_forward=fp8", "precision!=bf16", "the 8-bit linear layers give bf16"),
    ("feed_forward=fp8", "optimizer!=adamw-master*", "the 8-bit linear layers take weights in bf16"),
    ("norms=fused", "dropout=philox", "its backward pass computes dropout's bits again, by their hash"),
    ("norms=fused", "base_quantization=nf4", "the linear layers in 4 bits add their biases themselves"),
    ("norms=fused", "qat!=none", "the rounded linear layers add their biases themselves"),
    ("norms=fused", "parallel=tensor", "its kernels take plain tensors, and no DTensor's shares"),
    ("gelu=sigmoid", "base_quantization=nf4", "the linear layers in 4 bits add their biases themselves"),
    ("gelu=sigmoid", "qat!=none", "the rounded linear layers add their biases themselves"),
    ("gelu=sigmoid", "parallel=tensor", "its kernel takes plain tensors, and no DTensor's shares"),
    ("qkv=fused", "trainable=lora*", "the adapters' query, key and value are fused away"),
    ("base_quantization=nf4", "trainable!=lora*", "weights in 4 bits cannot train, so that adapters have to"),
    ("base_quantization=nf4", "feed_forward=fp8", "both are about the same linear layers"),
    ("base_quantization=nf4", "parallel=fsdp2|tensor|pipeline", "sharing out weights in 4 bits has not been tried"),
    ("qat!=none", "precision!=fp32", "what is rounded is what a CPU will compute, in 32 bits"),
    ("qat!=none", "trainable=lora*", "an adapter that is merged is rounded with its weight"),
    ("qat!=none", "base_quantization=nf4", "both are about the same linear layers"),
    ("qat!=none", "parallel=tensor", "a share of a row has another scale than the row"),
    ("cuda_graph=True", "optimizer=adamw|adamw-8bit", "their step counts are on the host, which a graph replays"),
    ("cuda_graph=True", "padding=longest", "a graph replays one shape"),
    ("activation_checkpointing=elementwise", "compile!=inductor|regional",
     "Inductor's partitioner decides what is kept"),
    ("compile=regional", "padding!=packed", "the regions hand on packed sequences"),
    ("compile=regional", "parallel=ddp|ddp-bf16|pipeline", "they call the whole model, or a stage, as one"),
    ("cuda_graph=True", "compile=cudagraphs", "graphs do not nest"),
    ("compile=cudagraphs", "padding=longest", "a graph replays one shape"),
    ("engine=trainer", "padding=packed", "transformers.Trainer calls the model with padded sequences"),
    ("engine=trainer", "dropout=hash", "nothing renews the seeds of its dropout"),
    ("engine=trainer", "optimizer=adamw-8bit|adamw-master*", "transformers.Trainer builds its own fused AdamW here"),
    ("engine=trainer", "activation_checkpointing=elementwise", "transformers.Trainer compiles the model itself"),
    ("engine=trainer", "cuda_graph=True", "transformers.Trainer has no CUDA graph"),
    ("engine=trainer", "compile=cudagraphs", "its gradients of several micro-batches overwrite each other"),
    ("engine=trainer", "parallel!=none|ddp|deepspeed", "transformers.Trainer takes DDP or DeepSpeed here"),
    ("engine=loop", "parallel=deepspeed", "DeepSpeed's engine is there under transformers.Trainer alone"),
    ("engine=loop", "fault=nvidia-smi-polling", "it is a callback of transformers.Trainer"),
    ("parallel!=none", "compile=cudagraphs", "a replay writes over gradients before they are reduced"),
    ("parallel=ddp|ddp-bf16|fsdp2", "cuda_graph=True", "their hooks wait on the host, which a graph has not"),
    ("parallel=fsdp2", "compile!=none", "its layers gather their weights between the compiler's graphs"),
    ("parallel=zero1*|fsdp2|tensor", "optimizer=adamw-8bit", "8-bit moments come in blocks of whole tensors"),
    ("parallel=fsdp2", "optimizer=adamw-master*", "the kernel of the update takes whole tensors"),
    ("schedule!=gpipe", "parallel!=pipeline", "a schedule is a pipeline's order"),
    ("parallel=pipeline", "padding!=packed", "its stages hand on packed sequences, which are all of one shape"),
    ("parallel=pipeline", "precision=fp16", "GradScaler scales the loss, which the last stage alone has"),
    ("parallel=pipeline", "dropout=hash", "its seeds change before a micro-batch's backward pass"),
    ("parallel=pipeline", "attention=triton-varlen", "the seeds of its dropout change before the backward pass"),
    ("parallel=pipeline|tensor", "cuda_graph=True", "what they send within a step is not captured"),
    ("parallel=pipeline|tensor", "trainable!=all", "adapters and frozen layers are not cut into shares"),
    ("parallel=tensor", "qkv=fused", "a share of the fused product is no share of the heads"),
    ("parallel=tensor", "attention=triton-varlen", "heads on several GPUs would drop out by one pattern"),
    ("parallel=tensor", "feed_forward=fp8", "the 8-bit linear layers take whole weights"),
)
# fmt: on


@dataclass(frozen=True)
class Recipe:
    """Which parameters train. `lr_factor` multiplies the preset's learning rate, since PEFT wants a larger one."""

    kind: Literal["all", "lora", "bitfit", "top"]
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
    "bitfit": Recipe("bitfit", lr_factor=30.0),
    "freeze-bottom-10": Recipe("top", frozen=(10, 12)),
    "freeze-last-4": Recipe("top", frozen=(4, 12), frozen_side="top"),
}


def find_recipe(name: str) -> Recipe:
    """A recipe of RECIPES; or LoRA of any rank on the same targets, named like 'lora-all-r32', at the preset's own
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
    """What is compared: `change` holds at most one field of Settings, the difference to `parent`.

    `tags` say where the report shows it: on the `ladder` of figures, beside it as a `peer` (transformers.Trainer), in
    tables of few variants (`headline`), as a `technique` of the README; and whether `quickstart` trains it. What has no
    tag stands in the whole tables.
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
        """The task that the variant is for, a name of run/tasks.py."""
        return "lm" if self.family == "L" else "qa"

    @cached_property
    def settings(self) -> Settings:
        base = VARIANTS[self.parent].settings if self.parent else Settings()
        return dataclasses.replace(base, **self.change)


def _variant(name: str, parent: str | None, why: str, tags: str = "", **change) -> Variant:
    return Variant(name, parent, change, why, tuple(tags.split()))


# fmt: off
VARIANTS = {variant.name: variant for variant in [
    _variant("A1", None, "The baseline: fp16, eager attention, every sample padded to the limit, AdamW, no compiler.",
             tags="ladder headline quickstart"),
    _variant("A0", "A1", "What most people would run: the same training by transformers.Trainer.",
             engine="trainer", tags="peer headline"),
    _variant("A0-sdpa", "A0", "The Trainer with fused attention, which is its default.", attention="sdpa"),
    _variant("A0-longest", "A0-sdpa", "The Trainer with its usual collator: padded to the longest.", padding="longest"),
    _variant("A0-grouped", "A0-longest", "The Trainer with batches of like length, too.",
             group_by_length=True, tags="peer"),
    _variant("A0-compile", "A0-grouped", "Whether torch.compile helps the Trainer at its best.",
             compile="inductor", tags="peer headline"),
    _variant("A2", "A1", "Fused attention keeps the score matrix out of memory and saves launches.",
             attention="sdpa", tags="ladder technique quickstart"),
    _variant("A3", "A2", "The compiler fuses elementwise work and removes Python from the step.",
             compile="inductor", tags="ladder technique quickstart"),
    _variant("A4-nb", "A3", "Padding to the longest of a batch, which one long sample spoils.",
             padding="longest", tags="ladder"),
    _variant("A4", "A4-nb", "Batches of like length make that pay: half of a batch is padding.",
             group_by_length=True, tags="ladder quickstart"),
    _variant("A4-b", "A4", "The reference project's fault on purpose: sorted predictions, unsorted questions.",
             fault="positional-join", tags="quickstart"),
    _variant("A1-fp32", "A1", "What mixed precision is worth: all of it in 32 bits.", precision="fp32"),
    _variant("A1-int8", "A1-fp32", "Training that knows that its weights will be whole numbers.", qat="int8"),
    _variant("A1-int4", "A1-fp32", "The same with 4 bits, of which rounding takes more.", qat="int4"),
    _variant("B1", "A3", "LoRA r=8 on query and value at the full rate, as in the reference project.",
             trainable="lora-qv", tags="quickstart"),
    _variant("B1-all", "A3", "LoRA r=32 on every linear layer, at five times the rate.", trainable="lora-all"),
    _variant("B2", "A3", "BitFit: only biases and the answer head train.", trainable="bitfit"),
    _variant("B3", "A3", "The bottom layers frozen, 10 of 12: a shorter backward pass.", trainable="freeze-bottom-10"),
    _variant("B3-last4", "A3", "The last layers frozen, 4 of 12: gradients pass through them.",
             trainable="freeze-last-4"),
    _variant("C1", "A3", "Adam's two moments in 8 bits instead of 32.", optimizer="adamw-8bit", tags="quickstart"),
    _variant("C2-8", "A2", "The 8-bit optimizer alone, without the compiler.", optimizer="adamw-8bit"),
    _variant("C2", "A3", "Activations are recomputed instead of kept: memory for time.", activation_checkpointing=True),
    _variant("D1", "A3", "The compiler's graph capture without its code generation.", compile="aot_eager"),
    _variant("D1-cudagraphs", "A3", "Launch overhead alone: captured graphs of unfused kernels.", compile="cudagraphs"),
    _variant("D1-nvfuser", "A3", "The backend the proposal names; torch.compile has none any more.", compile="nvfuser"),
    _variant("E-packed", "A3", "No padding: samples packed into sequences of one static length.",
             padding="packed", tags="ladder technique quickstart"),
    _variant("E-packed-efficient", "E-packed", "The kernel that a T4 has, in FlashAttention's place.",
             attention="efficient"),
    _variant("E-adamw", "E-packed", "AdamW as one kernel, with rate and step count on the device: no waiting.",
             optimizer="adamw-fused", tags="ladder"),
    _variant("E-graph", "E-adamw", "The whole step is one launch, so that a slow host no longer matters.",
             cuda_graph=True, tags="ladder technique"),
    _variant("E-bf16", "E-graph", "No loss scaling; the same matrix rate on this generation of chips.",
             precision="bf16", tags="ladder"),
    _variant("E-masters", "E-bf16", "Weights, gradients, residuals in bf16 over fp32 masters: no casts.",
             optimizer="adamw-master", tags="ladder technique"),
    _variant("E-masters-eager", "E-masters", "What the capture alone gives; and where pipelines begin.",
             cuda_graph=False),
    _variant("E-qkv", "E-masters", "Query, key and value in one linear layer: wider tiles, fewer kernels.",
             qkv="fused", tags="ladder"),
    _variant("E-dropout", "E-qkv", "Dropout's random bits at a tenth of the work.", dropout="hash", tags="ladder"),
    _variant("E-dropout-moments", "E-dropout", "Adam's moments in bf16, rounded at random: fewer bytes.",
             optimizer="adamw-master-bf16"),
    _variant("E-recompute-elementwise", "E-dropout-moments", "GELU and norms are computed twice, and not kept.",
             activation_checkpointing="elementwise"),
    _variant("E-regions", "E-dropout", "A quick start: layers are compiled by threes, all as one.",
             compile="regional", tags="ladder"),
    _variant("E-dropout-fp8", "E-dropout", "Half of the GEMMs in 8-bit floats, where the chip has them.",
             feed_forward="fp8"),
    _variant("E-varlen", "E-regions", "A kernel of our own: attention for segments of 180 tokens.",
             attention="triton-varlen", tags="ladder technique"),
    _variant("E-recompute", "E-varlen", "Layers are computed twice, in a graph: hashes need no state.",
             activation_checkpointing=True),
    _variant("E-recompute-moments", "E-recompute", "The least memory of a captured step: moments in bf16.",
             optimizer="adamw-master-bf16", tags="headline"),
    _variant("E-norm", "E-varlen", "Bias, dropout, residual and norm: one kernel each way.",
             norms="fused", tags="ladder"),
    _variant("E-gelu", "E-norm", "GELU in fewer instructions, to a fraction of bf16's step.",
             gelu="sigmoid", tags="ladder"),
    _variant("E-moments", "E-gelu", "The recommended stack: Adam's moments in bf16 as well.",
             optimizer="adamw-master-bf16", tags="ladder headline"),
    _variant("E-fp8", "E-moments", "And half of its GEMMs in 8 bits.", feed_forward="fp8", tags="ladder"),
    _variant("E-t4", "E-graph", "What is left without bf16 and FlashAttention, as on a T4.", qkv="fused"),
    _variant("E-t4-dropout", "E-t4", "Dropout's random bits at a tenth of the work, on a T4 too.", dropout="hash"),
    _variant("E-t4-masters", "E-t4-dropout", "Weights, gradients, residuals in fp16, over masters.",
             optimizer="adamw-master"),
    _variant("E-t4-norm", "E-t4-masters", "Bias, dropout, residual and norm in one, on a T4 too.",
             norms="fused", tags="headline"),
    _variant("E-packed-8bit", "E-packed", "Packed sequences with 8-bit moments: towards the least memory.",
             optimizer="adamw-8bit"),
    _variant("E-packed-8bit-recompute", "E-packed-8bit", "Packed sequences, 8-bit moments, and layers computed twice.",
             activation_checkpointing=True),
    _variant("E-packed-lora", "E-packed-8bit-recompute", "LoRA on top of that, on every linear layer.",
             trainable="lora-all", tags="headline"),
    _variant("E-packed-lora-masters", "E-packed-lora", "What is frozen in half precision: half of its bytes.",
             optimizer="adamw-master"),
    _variant("E-masters-lora-qv", "E-masters", "Does LoRA still pay once the step is fused and captured?",
             trainable="lora-qv"),
    _variant("E-masters-lora-all", "E-masters", "And LoRA on every linear layer?", trainable="lora-all"),
    _variant("E-dropout-bitfit", "E-dropout", "And biases alone?", trainable="bitfit"),
    _variant("E-dropout-freeze", "E-dropout", "And freezing, which shortens the backward pass itself?",
             trainable="freeze-bottom-10"),
    _variant("P0", "A0", "What most people would run on several GPUs: the Trainer under torchrun.", parallel="ddp"),
    _variant("P0-deepspeed", "P0", "What the slides called a pipeline: DeepSpeed's ZeRO-1.", parallel="deepspeed"),
    _variant("P0-polled", "P0", "The slides' fault on purpose: nvidia-smi in every step.", fault="nvidia-smi-polling"),
    _variant("P1", "A1", "The baseline on several GPUs: they average gradients while they make them.", parallel="ddp"),
    _variant("P1-bf16", "P1", "Half the bytes between the GPUs: gradients travel in bf16.", parallel="ddp-bf16"),
    _variant("P-fsdp", "P1", "Each GPU keeps a share of weights, gradients and optimizer.", parallel="fsdp2"),
    _variant("P-one-bucket", "E-dropout", "E-dropout on several GPUs: one reduction inside the captured step.",
             parallel="ddp-one-bucket", tags="headline"),
    _variant("P-overlap", "E-regions", "Gradients are reduced while others are still computed.",
             parallel="ddp-overlap"),
    _variant("P-overlap-zero1", "P-overlap", "Gradients and new weights travel beside the passes.",
             parallel="zero1-overlap"),
    _variant("P-zero1", "P-one-bucket", "Each GPU updates its share of the weights alone.", parallel="zero1"),
    _variant("P-gpipe", "E-masters-eager", "Each GPU has some of the layers, and hands on micro-batches.",
             parallel="pipeline"),
    _variant("P-1f1b", "P-gpipe", "Backward as early as can be: fewer activations are kept.", schedule="1f1b"),
    _variant("P-interleaved", "P-1f1b", "Two parts of the layers a GPU: it waits less.", schedule="interleaved"),
    _variant("P-tensor", "E-masters-eager", "Each GPU has a share of every linear layer.", parallel="tensor"),
    _variant("L1", "A1", "The baseline of language models: fp32, eager attention, AdamW.",
             precision="fp32", tags="ladder headline"),
    _variant("L0", "L1", "What most people would run: the same through transformers.Trainer.",
             engine="trainer", tags="peer headline"),
    _variant("L0-bf16", "L0", "The Trainer with mixed precision.", precision="bf16"),
    _variant("L0-sdpa", "L0-bf16", "The Trainer with fused attention, which is its default.",
             attention="sdpa", tags="peer"),
    _variant("L0-compile", "L0-sdpa", "The Trainer with all it offers.", compile="inductor", tags="peer headline"),
    _variant("L-fp16", "L1", "Mixed precision where there is no bf16, as on a T4.", precision="fp16"),
    _variant("L-bf16", "L1", "Mixed precision: GEMMs in bf16, weights in fp32.", precision="bf16", tags="ladder"),
    _variant("L-sdpa", "L-bf16", "Fused attention skips the half of the scores that no token may see.",
             attention="sdpa", tags="ladder"),
    _variant("L-compile", "L-sdpa", "The compiler fuses elementwise work, the loss over the vocabulary too.",
             compile="inductor", tags="ladder"),
    _variant("L-adamw", "L-compile", "AdamW as one kernel: no waiting for the device.",
             optimizer="adamw-fused", tags="ladder"),
    _variant("L-graph", "L-adamw", "The whole step is one launch; windows of text all have one length.",
             cuda_graph=True, tags="ladder"),
    _variant("L-masters", "L-graph", "Weights, gradients, residuals in bf16 over fp32 masters: no casts.",
             optimizer="adamw-master", tags="ladder"),
    _variant("L-dropout", "L-masters", "The whole stack: dropout's random bits at a tenth of the work.",
             dropout="hash", tags="ladder headline"),
    _variant("L-recompute", "L-compile", "Activations are recomputed instead of kept: memory for time.",
             activation_checkpointing=True),
    _variant("L-8bit", "L-compile", "Adam's two moments in 8 bits, but for the embeddings'.", optimizer="adamw-8bit"),
    _variant("L-lora", "L-compile", "LoRA r=32 on every linear layer, over a frozen model.", trainable="lora-all"),
    _variant("L-qlora", "L-lora", "The frozen layers in 4 bits: a seventh of their weights' bytes.",
             base_quantization="nf4"),
    _variant("L-ddp", "L-compile", "Several GPUs: gradients are averaged during the backward pass.", parallel="ddp"),
    _variant("L-one-bucket", "L-dropout", "The whole stack on several GPUs: one captured reduction.",
             parallel="ddp-one-bucket"),
]}
# fmt: on
FAMILIES = {
    "A": "systems",
    "B": "peft",
    "C": "memory",
    "D": "backends",
    "E": "beyond",
    "P": "parallel",
    "L": "language",
}  # family -> notebook
RECOMMENDED = "E-moments"  # what `recommended` stands for, and sentences speak of
BASELINES = {"qa": "A1", "lm": "L1"}  # task -> the variant that its others are compared with


def find_variant(name: str) -> Variant:
    """The variant of that name, or the `recommended` one; UnknownName otherwise."""
    name = RECOMMENDED if name == "recommended" else name
    if name not in VARIANTS:
        raise UnknownName(nearest("variant", name, [*VARIANTS, "recommended"]))
    return VARIANTS[name]


def tagged(tag: str) -> list[str]:
    """The names of the variants with a tag, in table order."""
    return [variant.name for variant in VARIANTS.values() if tag in variant.tags]


def find_family(letter: str) -> list[str]:
    """The names of a family's variants, in table order; UnknownName for a letter that no family has."""
    if letter not in FAMILIES:
        raise UnknownName(nearest("family", letter, FAMILIES))
    return [variant.name for variant in VARIANTS.values() if variant.family == letter]


@dataclass(frozen=True)
class Need:
    """What a machine must have for settings that meet one of the conditions `of`: `met` says of a spec.Machine whether
    it has it, `sm` from which compute capability x 10 GPUs do."""

    of: tuple[str, ...]
    met: Callable
    why: str
    sm: int = 0


VOLTA, TURING, AMPERE, ADA = 70, 75, 80, 89  # compute capability x 10: of a V100, a T4, an A100, an L4; an H100 has 90
# Inductor writes kernels for Volta; the oldest that those of our own are compiled for in the tests is a T4.
# fmt: off
NEEDS = (
    Need(("compile=cudagraphs", "attention=efficient", "fault=nvidia-smi-polling"),
         lambda machine: machine.gpus > 0, "needs a CUDA GPU"),
    Need(("attention=flash", "precision=bf16"), lambda machine: machine.sm >= AMPERE,
         "needs a GPU of compute capability 8.0 or newer (bf16 and FlashAttention)", AMPERE),
    Need(("feed_forward=fp8",), lambda machine: machine.sm >= ADA,
         "needs a GPU of compute capability 8.9 or newer (8-bit floats)", ADA),
    Need(("attention=triton-varlen", "norms=fused", "gelu=sigmoid", "optimizer=adamw-master*"),
         lambda machine: not machine.gpus or (machine.compiler and machine.sm >= TURING),
         "needs Triton where there is a GPU, and one of compute capability 7.5 or newer", TURING),
    Need(("attention=triton-varlen",), lambda machine: not machine.gpus or machine.sm >= AMPERE,
         "needs a GPU of compute capability 8.0 or newer (GEMMs in Triton)", AMPERE),
    Need(("compile=inductor|regional",), lambda machine: machine.compiler,
         "torch.compile needs a C++ compiler (g++), or Triton with a GPU", VOLTA),
    Need(("optimizer=adamw-8bit", "base_quantization=nf4"), lambda machine: machine.bitsandbytes,
         "needs the package bitsandbytes"),
    Need(("parallel=deepspeed",), lambda machine: machine.deepspeed, "needs the package deepspeed"),
    Need(("qat!=none",), lambda machine: machine.torchao, "needs the package torchao"),
)
# fmt: on


def needs(settings: Settings) -> list[Need]:
    """What a machine must have for these settings."""
    return [need for need in NEEDS if any(_matches(settings, condition) for condition in need.of)]


def since(settings: Settings) -> int | None:
    """The compute capability x 10 from which GPUs run these settings; None for every one that PyTorch has."""
    return max((need.sm for need in needs(settings)), default=0) or None


def main(args: argparse.Namespace) -> int:
    """Print the table of variants."""
    if args.json:
        print(json.dumps([_as_json(variant) for variant in VARIANTS.values()], indent=1))
        return 0
    for variant in VARIANTS.values():
        change = ", ".join(f"{key} = {value}" for key, value in variant.change.items()) or "baseline"
        newer = f"{capability / 10}" if (capability := since(variant.settings)) else "-"
        print(f"{variant.name:26}{variant.parent or '-':18}{newer:5}{change}\n    {variant.why}")
    print("The number is the compute capability from which GPUs run it: a T4 has 7.5, an A100 8.0, an H100 9.0.")
    return 0


def _as_json(variant: Variant) -> dict:
    own = {"family": variant.family, "settings": dataclasses.asdict(variant.settings)}
    return (
        dataclasses.asdict(variant)
        | own
        | {"needs": [need.why for need in needs(variant.settings)], "since": since(variant.settings)}
    )
