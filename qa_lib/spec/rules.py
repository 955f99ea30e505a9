"""Every rule about what may be trained with what, each once.

- `conflicts`: settings that do not go together, wherever they are to run.
- `task_conflicts`, `size_conflicts` and `process_conflicts`: settings that do not go with a task,
  with the batch of a preset, or with a number of processes.
- `replicas`: the shares into which processes divide a step.
- `unshared`: why processes cannot share a model of some size.
- `requirements`: what settings need of a machine. `missing` says what a machine lacks of it, and
  `since` how new a GPU has to be.
- `adjust`: settings as a machine runs them.
- `lacking`: why a model of some architecture cannot have these settings.
- `unfit_heads`: why our attention kernel cannot take heads of some width.

A rule is an `if` that yields a sentence. To add one, write it into the function of its subject;
tests/test_rules.py fails for a setting or a value in it that does not exist. This module imports
`Settings` for a type checker alone, since that class imports this module to check its values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from qa_lib.errors import SpecError

if TYPE_CHECKING:
    from qa_lib.spec.machine import Machine
    from qa_lib.spec.presets import Preset
    from qa_lib.spec.settings import Settings
    from qa_lib.spec.spec import Spec

# Where few values are allowed, a list of them is shorter than a rule for each of the others. A
# setting that a list does not name may have any value.
# What the plain PyTorch of peers/ takes, the rivals that the lab is compared with:
PLAIN_TAKES = {
    "attention": ("sdpa", "flash", "block-diagonal"),
    "qkv": ("separate",),
    "dropout": ("philox", "none"),
    "norms": ("native",),
    "loss": ("native",),
    "feed_forward": ("native",),
    "attention_projections": ("native",),
    "weight_gradients": ("native",),
    "gelu": ("exact",),
    "qat": ("none",),
    "compile": ("none", "inductor", "reduce-overhead"),
    "padding": ("max_length", "packed"),
    "trainable": ("all",),
    "base_quantization": ("none",),
    "optimizer": ("adamw",),
    "cuda_graph": (False,),
    "activation_checkpointing": (False,),
    "parallel": ("none",),
}
# What they take with all that their search found: weights in bf16, rounded at random, or in fp32 on
# a CPU. The whole step may be a CUDA graph.
SEARCHED_TAKES = PLAIN_TAKES | {
    "precision": ("pure-bf16", "fp32"),
    "compile": ("none", "inductor"),
}
del SEARCHED_TAKES["cuda_graph"]
# What a decoder's fused training pass takes (norms 'fused'):
FUSED_DECODER_TAKES = {
    "attention": ("sdpa", "triton-causal"),
    "activation_checkpointing": (False, "elementwise"),
    "parallel": ("none", "ddp", "ddp-bf16", "ddp-one-bucket", "zero1"),
}


def _outside(settings: Settings, takes: dict[str, tuple]) -> Iterator[tuple[str, str]]:
    """Yield each setting whose value is not taken, and the values that are taken, in words."""
    for name, values in takes.items():
        if getattr(settings, name) not in values:
            yield name, _alternatives(values)


def _alternatives(values: tuple) -> str:
    """Return values in words: "'a', 'b' or 'c'"."""
    *others, last = map(repr, values)
    if not others:
        return last
    return f"{', '.join(others)} or {last}"


# Settings that do not go together.


def conflicts(settings: Settings) -> Iterator[str]:
    """Yield a sentence for every pair of these settings whose values do not go together."""
    yield from _attention_conflicts(settings)
    yield from _number_format_conflicts(settings)
    yield from _kernel_conflicts(settings)
    yield from _quantization_conflicts(settings)
    yield from _cuda_graph_conflicts(settings)
    yield from _compiler_conflicts(settings)
    yield from _engine_conflicts(settings)
    yield from _parallel_conflicts(settings)


def _clash(settings: Settings, one: str, other: str, why: str) -> str:
    """Return the sentence that refuses the values of two settings."""
    first = f"{one} {getattr(settings, one)!r}"
    second = f"{other} {getattr(settings, other)!r}"
    return f"{first} and {second} do not go together: {why}"


def _attention_conflicts(settings: Settings) -> Iterator[str]:
    """Yield conflicts of attention, and of packed sequences, which take kernels of their own."""
    packed = settings.padding == "packed"
    kernel = settings.attention
    if packed and kernel == "eager":
        why = "packed sequences take a kernel that knows where each sample begins"
        yield _clash(settings, "padding", "attention", why)
    if kernel in ("flash", "efficient", "block-diagonal", "triton-varlen") and not packed:
        why = "these are the kernels for packed sequences"
        yield _clash(settings, "attention", "padding", why)
    if kernel == "flash" and settings.precision == "fp32":
        why = "FlashAttention computes in half precision alone"
        yield _clash(settings, "attention", "precision", why)
    if kernel == "triton-causal" and packed:
        why = "a reader looks at later tokens as well: attention=triton-varlen"
        yield _clash(settings, "attention", "padding", why)
    if kernel == "triton-causal" and settings.norms == "native":
        why = "it is a decoder's fused training pass that calls it"
        yield _clash(settings, "attention", "norms", why)
    if packed and settings.group_by_length:
        why = "samples are packed by their lengths already"
        yield _clash(settings, "padding", "group_by_length", why)
    if packed and settings.loss != "native":
        why = "it is the loss of a language model, and questions are what is packed"
        yield _clash(settings, "loss", "padding", why)
    if packed and settings.loss_padding == "masked":
        why = "the loss of packed samples has no padding"
        yield _clash(settings, "loss_padding", "padding", why)


def _number_format_conflicts(settings: Settings) -> Iterator[str]:
    """Yield conflicts of the formats of weights, moments and GEMMs."""
    precision = settings.precision
    optimizer = settings.optimizer
    if settings.loss != "native" and not settings.half_weights:
        why = "its GEMMs take weights in half precision"
        yield _clash(settings, "loss", "optimizer", why)
    if settings.loss == "chunked-fp8" and precision != "bf16":
        yield _clash(settings, "loss", "precision", "the 8-bit linear layers give bf16")
    if optimizer in ("adamw-master", "adamw-master-8bit") and precision == "fp32":
        yield _clash(settings, "optimizer", "precision", "fp32 needs no masters")
    if optimizer == "adamw-master-bf16" and precision != "bf16":
        why = "it keeps moments in bf16, which a GPU without bf16 cannot"
        yield _clash(settings, "optimizer", "precision", why)
    if optimizer in ("adamw-rounded-bf16", "adamw-rounded-8bit") and precision != "bf16":
        why = "it is weights in bf16 that are rounded at random"
        yield _clash(settings, "optimizer", "precision", why)
    if settings.feed_forward == "fp8" and precision != "bf16":
        yield _clash(settings, "feed_forward", "precision", "the 8-bit linear layers give bf16")
    if settings.feed_forward == "fp8" and not settings.half_weights:
        why = "the 8-bit linear layers take weights in bf16"
        yield _clash(settings, "feed_forward", "optimizer", why)
    if settings.attention_projections == "fp8" and precision != "bf16":
        why = "the 8-bit linear layers give bf16"
        yield _clash(settings, "attention_projections", "precision", why)
    if settings.attention_projections == "fp8" and not settings.half_weights:
        why = "the 8-bit linear layers take weights in bf16"
        yield _clash(settings, "attention_projections", "optimizer", why)
    if settings.weight_gradients == "fp8" and settings.feed_forward != "fp8":
        why = "it takes the 8-bit operands of those linear layers: feed_forward=fp8"
        yield _clash(settings, "weight_gradients", "feed_forward", why)


def _kernel_conflicts(settings: Settings) -> Iterator[str]:
    """Yield conflicts of the kernels of our own, and of fused projections."""
    # These kernels add the bias of the linear layer before them, and must not add it twice.
    nf4_adds_biases = "the linear layers in 4 bits add their biases themselves"
    qat_adds_biases = "the rounded linear layers add their biases themselves"
    if settings.norms == "fused":
        if settings.dropout == "philox":
            why = "its backward pass computes dropout's bits again: dropout=hash"
            yield _clash(settings, "norms", "dropout", why)
        if settings.base_quantization == "nf4":
            yield _clash(settings, "norms", "base_quantization", nf4_adds_biases)
        if settings.qat != "none":
            yield _clash(settings, "norms", "qat", qat_adds_biases)
        if settings.parallel == "tensor":
            why = "its kernels take plain tensors, and no DTensor"
            yield _clash(settings, "norms", "parallel", why)
    if settings.gelu == "sigmoid":
        if settings.base_quantization == "nf4":
            yield _clash(settings, "gelu", "base_quantization", nf4_adds_biases)
        if settings.qat != "none":
            yield _clash(settings, "gelu", "qat", qat_adds_biases)
        if settings.parallel == "tensor":
            why = "its kernel takes plain tensors, and no DTensor"
            yield _clash(settings, "gelu", "parallel", why)
    if settings.qkv == "fused" and settings.has_adapters:
        why = "the adapters' query, key and value are fused away"
        yield _clash(settings, "qkv", "trainable", why)
    own_attention = ("triton-varlen", "triton-causal")
    if settings.attention_projections == "fp8" and settings.attention not in own_attention:
        why = "8 bits have been tried beside our own kernels alone: attention=triton-varlen"
        yield _clash(settings, "attention_projections", "attention", why)


def _quantization_conflicts(settings: Settings) -> Iterator[str]:
    """Yield conflicts of weights in 4 bits, and of quantization-aware training."""
    if settings.base_quantization == "nf4":
        if not settings.has_adapters:
            why = "weights in 4 bits cannot train, and adapters have to"
            yield _clash(settings, "base_quantization", "trainable", why)
        if settings.feed_forward == "fp8":
            why = "both are about the same linear layers"
            yield _clash(settings, "base_quantization", "feed_forward", why)
        if settings.attention_projections == "fp8":
            why = "both are about the same linear layers"
            yield _clash(settings, "base_quantization", "attention_projections", why)
        if settings.parallel in ("fsdp2", "tensor", "pipeline"):
            why = "sharing out weights in 4 bits has not been tried"
            yield _clash(settings, "base_quantization", "parallel", why)
    if settings.qat != "none":
        if settings.precision != "fp32":
            why = "what is rounded is what a CPU will compute, in 32 bits"
            yield _clash(settings, "qat", "precision", why)
        if settings.has_adapters:
            why = "an adapter that is merged is rounded with its weight"
            yield _clash(settings, "qat", "trainable", why)
        if settings.base_quantization == "nf4":
            why = "both are about the same linear layers"
            yield _clash(settings, "qat", "base_quantization", why)
        if settings.parallel == "tensor":
            why = "a share of a row has another scale than the row"
            yield _clash(settings, "qat", "parallel", why)


def _cuda_graph_conflicts(settings: Settings) -> Iterator[str]:
    """Yield conflicts of CUDA graphs: that of the whole step, and those of a compiler's backend."""
    backend_makes_graphs = settings.compile == "cudagraphs"
    counts_on_host = settings.optimizer in ("adamw", "adamw-8bit") and settings.engine != "searched"
    if settings.cuda_graph and counts_on_host:
        why = "its step count is on the host, and a graph replays the GPU's work alone"
        yield _clash(settings, "cuda_graph", "optimizer", why)
    if settings.cuda_graph and settings.padding == "longest":
        yield _clash(settings, "cuda_graph", "padding", "a graph replays one shape")
    if settings.cuda_graph and backend_makes_graphs:
        yield _clash(settings, "cuda_graph", "compile", "graphs do not nest")
    if backend_makes_graphs and settings.padding == "longest":
        yield _clash(settings, "compile", "padding", "a graph replays one shape")
    if backend_makes_graphs and settings.parallel != "none":
        why = "a replay writes over gradients before they are reduced"
        yield _clash(settings, "parallel", "compile", why)


def _compiler_conflicts(settings: Settings) -> Iterator[str]:
    """Yield conflicts of a compiler that decides what is computed again, or compiles by regions."""
    recomputes_elementwise = settings.activation_checkpointing == "elementwise"
    if recomputes_elementwise and settings.compile not in ("inductor", "regional"):
        why = "Inductor's partitioner decides what is kept"
        yield _clash(settings, "activation_checkpointing", "compile", why)
    if settings.compile == "regional" and settings.padding != "packed":
        why = "the regions hand on packed sequences"
        yield _clash(settings, "compile", "padding", why)
    if settings.compile == "regional" and settings.parallel in ("ddp", "ddp-bf16", "pipeline"):
        why = "DDP and pipelines call the whole model, or a stage, as one"
        yield _clash(settings, "compile", "parallel", why)


def _engine_conflicts(settings: Settings) -> Iterator[str]:
    """Yield what each engine does not take."""
    if settings.by_rival:
        takes = SEARCHED_TAKES if settings.engine == "searched" else PLAIN_TAKES
        for name, values in _outside(settings, takes):
            yield _clash(settings, "engine", name, f"the rivals take {name} {values}")
        return
    if settings.precision == "pure-bf16":
        why = "the loop keeps masters beside weights in bf16: optimizer=adamw-master"
        yield _clash(settings, "engine", "precision", why)
    if settings.compile == "reduce-overhead":
        why = "the loop has a graph of the whole step: cuda_graph=True"
        yield _clash(settings, "engine", "compile", why)
    if settings.by_trainer:
        yield from _trainer_conflicts(settings)
    else:
        yield from _loop_conflicts(settings)


def _trainer_conflicts(settings: Settings) -> Iterator[str]:
    """Yield what transformers.Trainer does not take."""
    if settings.padding == "packed":
        why = "transformers.Trainer calls the model with padded sequences"
        yield _clash(settings, "engine", "padding", why)
    if settings.dropout == "hash":
        why = "nothing renews the seeds of its dropout"
        yield _clash(settings, "engine", "dropout", why)
    if settings.loss != "native":
        why = "it is the loop that takes the loss of a model"
        yield _clash(settings, "engine", "loss", why)
    if settings.loss_padding == "masked":
        why = "transformers.Trainer takes the model's own loss"
        yield _clash(settings, "engine", "loss_padding", why)
    if settings.optimizer not in ("adamw", "adamw-fused"):
        why = "transformers.Trainer builds its own fused AdamW here"
        yield _clash(settings, "engine", "optimizer", why)
    if settings.activation_checkpointing == "elementwise":
        why = "transformers.Trainer compiles the model itself"
        yield _clash(settings, "engine", "activation_checkpointing", why)
    if settings.cuda_graph:
        why = "transformers.Trainer has no CUDA graph"
        yield _clash(settings, "engine", "cuda_graph", why)
    if settings.compile == "cudagraphs":
        why = "its gradients of several micro-batches overwrite each other"
        yield _clash(settings, "engine", "compile", why)
    if settings.parallel not in ("none", "ddp", "deepspeed"):
        why = "transformers.Trainer takes DDP or DeepSpeed here"
        yield _clash(settings, "engine", "parallel", why)


def _loop_conflicts(settings: Settings) -> Iterator[str]:
    """Yield what the visible loop does not take."""
    if settings.parallel == "deepspeed":
        why = "DeepSpeed runs under transformers.Trainer alone: engine=trainer"
        yield _clash(settings, "engine", "parallel", why)
    if settings.fault == "nvidia-smi-polling":
        why = "it is a callback of transformers.Trainer"
        yield _clash(settings, "engine", "fault", why)


def _parallel_conflicts(settings: Settings) -> Iterator[str]:
    """Yield what does not go with the way in which processes share a step."""
    parallel = settings.parallel
    if parallel in ("ddp", "ddp-bf16", "fsdp2") and settings.cuda_graph:
        why = "its hooks wait on the host, and a graph has no host"
        yield _clash(settings, "parallel", "cuda_graph", why)
    cuts_tensors = parallel in ("zero1", "zero1-overlap", "peers", "fsdp2", "tensor")
    if cuts_tensors and settings.optimizer == "adamw-8bit":
        why = "8-bit moments come in blocks of whole tensors"
        yield _clash(settings, "parallel", "optimizer", why)
    if cuts_tensors and settings.optimizer in ("adamw-master-8bit", "adamw-rounded-8bit"):
        why = "elements that share a scale would lie in several processes"
        yield _clash(settings, "parallel", "optimizer", why)
    if parallel == "peers" and settings.precision == "fp16":
        why = "its processes do not tell each other of an overflow of the scaled loss"
        yield _clash(settings, "parallel", "precision", why)
    if parallel == "fsdp2" and settings.compile != "none":
        why = "its layers gather their weights between the compiler's graphs"
        yield _clash(settings, "parallel", "compile", why)
    if parallel == "fsdp2" and settings.half_weights:
        why = "the kernel of the update takes whole tensors"
        yield _clash(settings, "parallel", "optimizer", why)
    if parallel != "pipeline" and settings.schedule != "gpipe":
        yield _clash(settings, "schedule", "parallel", "a schedule is a pipeline's order")
    if parallel == "pipeline":
        yield from _pipeline_conflicts(settings)
    if parallel == "tensor":
        yield from _tensor_conflicts(settings)
    if parallel in ("pipeline", "tensor") and settings.cuda_graph:
        why = "what they send within a step is not captured"
        yield _clash(settings, "parallel", "cuda_graph", why)
    if parallel in ("pipeline", "tensor") and settings.trainable != "all":
        why = "adapters and frozen layers are not cut into shares"
        yield _clash(settings, "parallel", "trainable", why)


def _pipeline_conflicts(settings: Settings) -> Iterator[str]:
    """Yield what does not go with a pipeline, which hands on micro-batches within a step."""
    if settings.padding != "packed":
        why = "its stages hand on packed sequences, which are all of one shape"
        yield _clash(settings, "parallel", "padding", why)
    if settings.precision == "fp16":
        why = "GradScaler scales the loss, and the last stage alone has it"
        yield _clash(settings, "parallel", "precision", why)
    if settings.dropout == "hash":
        why = "its seeds change before a micro-batch's backward pass"
        yield _clash(settings, "parallel", "dropout", why)
    if settings.attention == "triton-varlen":
        why = "the seeds of its dropout change before the backward pass"
        yield _clash(settings, "parallel", "attention", why)


def _tensor_conflicts(settings: Settings) -> Iterator[str]:
    """Yield what does not go with tensor parallelism, which cuts every linear layer into shares."""
    if settings.qkv == "fused":
        why = "a share of the fused product is no share of the heads"
        yield _clash(settings, "parallel", "qkv", why)
    if settings.attention == "triton-varlen":
        why = "heads on several GPUs would drop out by one pattern"
        yield _clash(settings, "parallel", "attention", why)
    if settings.feed_forward == "fp8":
        why = "the 8-bit linear layers take whole weights"
        yield _clash(settings, "parallel", "feed_forward", why)
    if settings.attention_projections == "fp8":
        why = "the 8-bit linear layers take whole weights"
        yield _clash(settings, "parallel", "attention_projections", why)


# Settings that do not go with a task, with a size, or with a number of processes.


def task_conflicts(settings: Settings, task: str) -> Iterator[str]:
    """Yield why a run of that task cannot have these settings, to be read after "VARIANT: "."""
    if task != "qa":  # a language model takes all that follow
        if settings.loss_padding == "masked":
            yield "windows of text have no padding to leave out of their loss"
        return
    packed = settings.padding == "packed"
    if settings.cuda_graph and not packed:
        yield "the mask of padded sequences is made on the host, and a graph has no host"
    if settings.by_rival and not packed:
        yield "the rivals take packed sequences"
    if settings.loss != "native":
        yield f"loss {settings.loss!r} is that of a language model"


def size_conflicts(settings: Settings, preset: Preset) -> Iterator[str]:
    """Yield why a step of the preset cannot be made of these settings' micro-batches."""
    micro_batch = settings.micro_batch
    batch = preset.batch
    if batch and batch % micro_batch:
        # The next smaller multiple, or one micro-batch where that would be none.
        divisible = micro_batch * max(1, batch // micro_batch)
        yield (
            f"micro-batch {micro_batch} does not divide the effective batch {batch} of preset "
            f"{preset.name!r}: add --batch {divisible}"
        )


def process_conflicts(settings: Settings, world: int, stages: int) -> Iterator[str]:
    """Yield why so many processes cannot share a run, to be read after the variant's name.

    `world` is the number of all processes, and `stages` of those that make up one pipeline.
    """
    if world > 1 and settings.parallel == "none":
        yield (
            f"trains in one process, not in {world}; the variants of family P take several, and "
            "recommended chooses one of them"
        )
    if stages > 1 and settings.parallel != "pipeline":
        yield "is no pipeline and has no stages"
    if world == 1 and settings.parallel == "pipeline":
        yield "is a pipeline, and one process makes none: give --world 2 or more"


def replicas(spec: Spec, world: int) -> int:
    """Return into how many shares `world` processes divide the micro-batches of a step.

    The processes of one pipeline work on the same share. All processes of a tensor-parallel run
    work on every micro-batch, which makes one share. Raises SpecError for processes that cannot
    divide a step evenly.
    """
    stages = spec.stages
    if world % stages:
        raise SpecError(f"{world} processes do not make up pipelines of {stages}")
    shares = 1 if spec.settings.parallel == "tensor" else world // stages
    per_share, rest = divmod(spec.micro_batches, shares)
    if rest:
        raise SpecError(
            f"{world} processes do not divide the {spec.micro_batches} micro-batches of a step at "
            f"preset {spec.preset.name!r}, which are {spec.preset.batch} samples by "
            f"{spec.settings.micro_batch}"
        )
    if spec.settings.schedule == "1f1b" and per_share < stages:
        raise SpecError(
            f"1f1b takes at least as many micro-batches as the {stages} stages, "
            f"and a pipeline has {per_share} in a step"
        )
    if spec.settings.schedule == "interleaved" and per_share % stages:
        raise SpecError(
            f"interleaved takes a multiple in micro-batches of the {stages} stages, "
            f"and a pipeline has {per_share} in a step"
        )
    return shares


def unshared(settings: Settings, *, layers: int, heads: int, world: int, stages: int) -> str | None:
    """Return why processes cannot share a model of so many layers and attention heads.

    None if they can. `world` is the number of all processes, and `stages` of those that make up
    one pipeline.
    """
    parts = stages * settings.chunks
    if settings.parallel == "pipeline" and layers % parts:
        return f"a model of {layers} layers has no {parts} equal parts"
    if settings.parallel == "tensor" and heads % world:
        return f"{world} processes do not divide the {heads} heads of attention"
    return None


# What a machine has to have.


@dataclass(frozen=True)
class Requirement:
    """One thing that settings need of a machine."""

    sentence: str
    """The message where a machine lacks it."""
    is_there: Callable[[Machine], bool]
    """Whether a machine has it, leaving the age of its GPU to `since`."""
    since: int = 0
    """The lowest compute capability x 10 of a GPU that has it; 0 if every one that PyTorch supports
    does."""

    def is_met(self, machine: Machine) -> bool:
        """Return whether a machine has what is needed."""
        has_old_gpu = machine.gpus > 0 and machine.sm < self.since
        return self.is_there(machine) and not has_old_gpu


def requirements(settings: Settings) -> Iterator[Requirement]:
    """Yield what settings need of a machine."""
    uses_bf16 = settings.precision in ("bf16", "pure-bf16")
    uses_fp8 = settings.has_8_bit_layers or settings.loss == "chunked-fp8"
    uses_triton_attention = settings.attention in ("triton-varlen", "triton-causal")
    uses_triton = (
        uses_triton_attention
        or settings.norms == "fused"
        or settings.loss != "native"
        or settings.gelu == "sigmoid"
        or settings.half_weights
    )
    if settings.compile == "nvfuser":  # PyTorch had it until 2.2: no machine has it now
        yield Requirement(
            "this PyTorch has no torch.compile backend named 'nvfuser'", lambda machine: False
        )
    if (
        settings.compile in ("cudagraphs", "reduce-overhead")
        or settings.attention == "efficient"
        or settings.fault == "nvidia-smi-polling"
    ):
        yield Requirement("needs a CUDA GPU", _has_gpu)
    if settings.attention == "flash" or uses_bf16:
        yield Requirement(
            "needs a GPU of compute capability 8.0 or newer (bf16 and FlashAttention)",
            _has_gpu,
            since=80,
        )
    if uses_fp8:
        yield Requirement(
            "needs a GPU of compute capability 8.9 or newer (8-bit floats)", _has_gpu, since=89
        )
    if uses_triton:
        # Without a GPU these run as plain PyTorch. With one, `compiler` is Triton.
        yield Requirement(
            "needs Triton where there is a GPU, and one of compute capability 7.5 or newer",
            lambda machine: machine.gpus == 0 or machine.compiler,
            since=75,  # the oldest that tests compile these kernels for: a T4
        )
    if uses_triton_attention:
        yield Requirement(
            "needs a GPU of compute capability 8.0 or newer (GEMMs in Triton)",
            lambda machine: True,  # any CPU does
            since=80,
        )
    if settings.compile in ("inductor", "regional", "reduce-overhead"):
        yield Requirement(
            "torch.compile needs a C++ compiler (g++), or Triton with a GPU",
            lambda machine: machine.compiler,
            since=70,  # the oldest that Inductor writes kernels for: Volta
        )
    if settings.optimizer == "adamw-8bit" or settings.base_quantization == "nf4":
        yield Requirement(
            "needs the package bitsandbytes: type pip install bitsandbytes",
            lambda machine: machine.bitsandbytes,
        )
    if settings.parallel == "peers":
        yield Requirement(
            "needs GPUs that write into each other's memory over NVLink",
            lambda machine: machine.gpus == 0 or machine.linked,  # CPUs send messages
        )
    if settings.parallel == "deepspeed":
        yield Requirement(
            "needs the package deepspeed: type pip install deepspeed",
            lambda machine: machine.deepspeed,
        )
    if settings.qat != "none":
        yield Requirement(
            "needs the package torchao, 0.16 or newer: type pip install -U torchao",
            lambda machine: machine.torchao,
        )
    if settings.has_adapters:
        yield Requirement(
            "needs the package peft: type pip install peft", lambda machine: machine.peft
        )


def _has_gpu(machine: Machine) -> bool:
    return machine.gpus > 0


def lacking_gpus(machine: Machine, world: int) -> str | None:
    """Return why `world` processes cannot have a GPU each of this machine; None if they can.

    Without a GPU they train on the processor.
    """
    if machine.gpus and world > machine.gpus:
        return f"needs {world} GPUs, and this machine has {machine.gpus}"
    if machine.unlike and world > 1:
        return (
            f"takes GPUs of one kind, and this machine has {machine.unlike}: "
            "CUDA_VISIBLE_DEVICES=0,1 lets it see the first two alone"
        )
    return None


def missing(settings: Settings, machine: Machine, world: int = 1) -> str | None:
    """Return why the machine cannot run these settings in `world` processes; None if it can."""
    why = lacking_gpus(machine, world)
    if why:
        return why
    if machine.adapters_fault and settings.has_adapters:
        return machine.adapters_fault
    for requirement in requirements(settings):
        if not requirement.is_met(machine):
            return requirement.sentence
    return None


def since(settings: Settings) -> int | None:
    """Return the lowest compute capability x 10 of a GPU that runs these settings.

    None if every GPU that PyTorch supports does.
    """
    capability = max((requirement.since for requirement in requirements(settings)), default=0)
    return capability or None


# Settings that a machine changes.


def adjust(settings: Settings, machine: Machine) -> tuple[Settings, list[str]]:
    """Return the settings as this machine runs them, and a sentence for each that changed."""
    changes = {}
    sentences = []
    for name, value, why in _adjustments(settings, machine):
        changes[name] = value
        sentences.append(f"{name}: {value}, {why}")
    return replace(settings, **changes), sentences


def _adjustments(settings: Settings, machine: Machine) -> Iterator[tuple[str, object, str]]:
    """Yield each setting that has another value on this machine, the value, and why."""
    # These settings run on a GPU alone: without one `missing` refuses them, as they were asked for.
    is_for_gpu = settings.has_8_bit_layers or settings.attention in ("flash", "efficient")
    if not machine.gpus and not is_for_gpu:
        if settings.precision != "fp32":
            yield "precision", "fp32", f"since {settings.precision} autocast needs a GPU"
        if settings.half_weights:
            what = "masters" if "master" in settings.optimizer else "rounding"
            yield "optimizer", "adamw-fused", f"since fp32 weights need no {what}"
        if settings.loss != "native":
            yield "loss", "native", "since chunks of logits are for weights in half precision"
        if settings.cuda_graph:
            yield "cuda_graph", False, "since it needs a GPU"
    if settings.by_trainer and settings.optimizer != "adamw-fused":
        yield "optimizer", "adamw-fused", "which transformers.Trainer takes by itself"
    if settings.padding == "packed" and settings.attention == "sdpa":
        if not machine.gpus:
            kernel = "block-diagonal"
        elif machine.sm < 80:
            kernel = "efficient"
        else:
            kernel = "flash"
        yield "attention", kernel, "the kernel for packed sequences here"


# What a model cannot have.


def lacking(settings: Settings, architecture: str) -> str | None:
    """Return why a model of that architecture cannot have these settings; None if it can.

    An architecture is a model_type of transformers, or "" where it is not known yet. It can have
    whatever no rule here refuses.
    """
    reason = next(_lacks(settings, architecture), None)
    return f"does not fit {architecture}: {reason}" if reason else None


def _lacks(settings: Settings, architecture: str) -> Iterator[str]:
    """Yield why a model of that architecture cannot have these settings."""
    # Where it is not known yet (""), it may be one of these; who builds the model asks again.
    has_rival = architecture in ("", "bert", "mpnet", "gpt2")
    if settings.by_rival and not has_rival:
        yield "the rivals are a BERT, an MPNet and a GPT-2"
    if architecture == "modernbert":
        yield from _modernbert_lacks(settings)
    elif architecture == "mpnet":
        yield from _mpnet_lacks(settings)
    elif architecture == "gpt2":
        yield from _gpt2_lacks(settings)
    # A GPT-2's are one linear layer already.
    has_separate = settings.qkv == "separate" and architecture != "gpt2"
    if settings.attention_projections == "fp8" and has_separate:
        yield "it is one linear layer of query, key and value that has 8 bits: qkv=fused"
    hands_on_parts = settings.compile == "regional" or settings.parallel == "pipeline"
    if hands_on_parts and architecture == "modernbert":
        yield (
            "its embeddings and layers take other inputs than BERT's, "
            "which the parts of a model hand on"
        )


def _modernbert_lacks(settings: Settings) -> Iterator[str]:
    if settings.qkv == "fused":
        yield "its query, key and value are one linear layer already"
    if settings.attention in ("efficient", "triton-varlen"):
        yield (
            "most of its layers look at a window around each token, which this kernel does not know"
        )
    if settings.dropout in ("hash", "none") or settings.norms == "fused":
        yield (
            "its norms come before its linear layers, and its dropouts are left out where their "
            "rate is 0, as it usually is"
        )
    if settings.gelu == "sigmoid":
        yield "its feed-forward blocks are gated and have no bias, which the kernel adds"
    if settings.trainable == "bitfit":
        yield "it has no biases to train"
    if settings.parallel == "tensor":
        yield ("a share of its one linear layer for query, key and value is no share of the heads")


def _mpnet_lacks(settings: Settings) -> Iterator[str]:
    if settings.attention in ("flash", "efficient") and not settings.by_rival:
        yield "its scores have a bias by distance, which this kernel of packed sequences has not"
    if settings.parallel == "pipeline":
        yield "all of its layers have one bias of scores, which stages would have to share"
    if settings.parallel == "tensor":
        yield "the bias of its scores is not cut into shares of the heads"


def _gpt2_lacks(settings: Settings) -> Iterator[str]:
    # The fused training pass computes all layers in one function and reads their weights itself, so
    # that what replaces or wraps a single layer would have no effect.
    if settings.norms == "fused":
        for name, values in _outside(settings, FUSED_DECODER_TAKES):
            value = getattr(settings, name)
            yield f"norms 'fused' of a decoder take {name} {values}, and not {value!r}"
    # That pass would leave adapters out. With gelu 'sigmoid' a linear layer applies GELU itself, so
    # that an adapter's output would be added after it.
    if settings.has_adapters and (settings.norms == "fused" or settings.gelu == "sigmoid"):
        yield "adapters of a decoder take norms 'native' and gelu 'exact'"


def unfit_heads(width: int, attention: str = "triton-varlen") -> str | None:
    """Return why our attention kernel cannot have heads of that width; None if it can.

    `attention` is the setting's value that the sentence names.
    """
    is_power_of_2 = width.bit_count() == 1
    if width >= 16 and is_power_of_2:
        return None
    return (
        f"attention {attention!r} takes heads as wide as a power of 2, 16 or more, and not {width}"
    )
