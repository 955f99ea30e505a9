"""The variants that are compared: what each one changes, and why. Standard library only.

A `Variant` names its parent and the one setting that it changes; following the parents gives all
its settings. To add a variant, add a line to the table below: a setting or value that does not
exist, and two that do not go together, are errors when this module is imported.
"""

import dataclasses
from functools import cached_property
from typing import Literal, get_args

from qa_lib.errors import SpecError, find
from qa_lib.spec.settings import Settings
from qa_lib.spec.tasks import TASKS

Tag = Literal["ladder", "trainer", "plain", "headline", "default", "quickstart"]


@dataclasses.dataclass(init=False)
class Variant:
    """A row of every comparison: settings that differ from the parent's by one.

    The change is given by the setting's own name, as in
    `Variant("A2", parent="A1", attention="sdpa", why="...")`.

    Raises SpecError for a tag, a setting or a value that does not exist.
    """

    name: str
    """The first letter is its family."""
    parent: str | None
    """The name of a variant further up; None for the baseline."""
    change: dict[str, object]
    """The one setting that is not the parent's, and its value."""
    why: str
    """What the change is for: a sentence that tables and figures show."""
    tags: tuple[Tag, ...]
    """Where it is shown: on the `ladder` of figures, beside it as transformers' `trainer` or as
    `plain` PyTorch, in tables of few variants (`headline`), as what the Trainer is by `default`;
    `quickstart` trains it. A variant without tags is in the whole tables alone."""

    def __init__(
        self,
        name: str,
        *,
        parent: str | None = None,
        why: str,
        tags: tuple[Tag, ...] = (),
        **change: object,
    ):
        unknown = set(tags) - set(get_args(Tag))
        if unknown:
            raise SpecError(f"variant {name}: unknown tag {min(unknown)!r}")
        self.name = name
        self.parent = parent
        self.change = change
        self.why = why
        self.tags = tags

    @property
    def family(self) -> str:
        return self.name[0]

    @property
    def task(self) -> str:
        """The name of the task that its family belongs to."""
        return next(name for name, task in TASKS.items() if self.family in task.families)

    @cached_property
    def settings(self) -> Settings:
        """All settings: the parent's and the change. Raises SpecError for a change that cannot be."""
        base = VARIANTS[self.parent].settings if self.parent else Settings()
        try:
            return dataclasses.replace(base, **self.change)
        except TypeError as problem:  # a setting that does not exist
            raise SpecError(f"variant {self.name}: {problem}") from None


# fmt: off
_TABLE = [
    # The baseline, the Trainer, and attention, compiler and padding.
    Variant("A1", why="The baseline: fp16, eager attention, every sample padded to the limit, AdamW, no compiler.", tags=("ladder", "headline", "quickstart")),
    Variant("A0", parent="A1", engine="trainer", why="The same by transformers.Trainer, with A1's eager attention and full padding.", tags=("trainer",)),
    Variant("A0-sdpa", parent="A0", attention="sdpa", why="The Trainer with fused attention, which is its default."),
    Variant("A0-longest", parent="A0-sdpa", padding="longest", why="What most people would run: the Trainer in fp16, padding to the longest of a batch.", tags=("trainer", "default", "headline")),
    Variant("A0-grouped", parent="A0-longest", group_by_length=True, why="The Trainer with length grouping, too.", tags=("trainer",)),
    Variant("A0-compile", parent="A0-grouped", compile="inductor", why="The Trainer with fused attention, length grouping and torch.compile.", tags=("trainer", "headline")),
    Variant("A0-bf16", parent="A0-compile", precision="bf16", why="The compiled Trainer in bf16: no loss scaling, which waits for the GPU."),
    Variant("A0-tuned", parent="A0-bf16", engine="trainer-tuned", why="The quickest Trainer of a search: workers, no filter for NaN, few lengths, too.", tags=("trainer", "headline")),
    Variant("A0-defaults", parent="A0-sdpa", precision="fp32", why="The Trainer as it comes: its defaults, and padding as in transformers' script.", tags=("trainer", "default")),
    Variant("A2", parent="A1", attention="sdpa", why="Fused attention keeps the score matrix out of memory and saves launches.", tags=("ladder", "quickstart")),
    Variant("A3", parent="A2", compile="inductor", why="The compiler fuses elementwise work, and leaves Python fewer launches.", tags=("ladder", "quickstart")),
    Variant("A4-nb", parent="A3", padding="longest", why="Padding to the longest of a batch, which one long sample spoils.", tags=("ladder",)),
    Variant("A4", parent="A4-nb", group_by_length=True, why="Length grouping: half of a batch was padding.", tags=("ladder", "quickstart")),
    Variant("A4-b", parent="A4", fault="positional-join", why="The reference project's fault on purpose: sorted predictions, unsorted questions.", tags=("quickstart",)),
    Variant("A1-fp32", parent="A1", precision="fp32", why="What mixed precision is worth: all of it in 32 bits."),
    Variant("A1-int8", parent="A1-fp32", qat="int8", why="Training that knows that its weights will be whole numbers."),
    Variant("A1-int4", parent="A1-fp32", qat="int4", why="The same with 4 bits, of which rounding takes more."),
    Variant("A1-masked", parent="A1", loss_padding="masked", why="What padding in the softmax of the loss does: A1 without it."),
    # Fewer parameters.
    Variant("B1", parent="A3", trainable="lora-qv", why="LoRA r=8 on query and value at the full rate, as in the reference project.", tags=("quickstart",)),
    Variant("B1-all", parent="A3", trainable="lora-all", why="LoRA r=32 on every linear layer, at five times the rate."),
    Variant("B2", parent="A3", trainable="bitfit", why="BitFit: only biases and the answer head train."),
    Variant("B3", parent="A3", trainable="freeze-bottom-10", why="The bottom layers frozen, 10 of 12: a shorter backward pass."),
    Variant("B3-last4", parent="A3", trainable="freeze-last-4", why="The last layers frozen, 4 of 12: gradients pass through them."),
    # Less memory.
    Variant("C1", parent="A3", optimizer="adamw-8bit", why="Adam's two moments in 8 bits instead of 32.", tags=("quickstart",)),
    Variant("C2-8", parent="A2", optimizer="adamw-8bit", why="The 8-bit optimizer alone, without the compiler."),
    Variant("C2", parent="A3", activation_checkpointing=True, why="Activations are recomputed instead of kept: memory for time."),
    # Backends of the compiler.
    Variant("D1", parent="A3", compile="aot_eager", why="The compiler's graph capture without its code generation."),
    Variant("D1-cudagraphs", parent="A3", compile="cudagraphs", why="Launch overhead alone: captured graphs of unfused kernels."),
    Variant("D1-nvfuser", parent="A3", compile="nvfuser", why="The backend the proposal names; torch.compile has none any more."),
    # Beyond: packed sequences, and kernels of our own.
    Variant("E-packed", parent="A3", padding="packed", why="No padding: samples packed into sequences of one static length.", tags=("ladder", "quickstart")),
    Variant("E-packed-efficient", parent="E-packed", attention="efficient", why="The kernel that a T4 has, in FlashAttention's place."),
    Variant("E-packed-bf16", parent="E-packed", precision="bf16", why="No loss scaling, and else as E-packed: where the plain rival begins."),
    Variant("E-plain", parent="E-packed-bf16", engine="plain", why="An afternoon's plain PyTorch: packed, FlashAttention, compiled, fused AdamW."),
    Variant("E-plain-graphs", parent="E-plain", compile="reduce-overhead", why="The same with torch.compile's own CUDA graphs."),
    Variant("E-plain-bf16", parent="E-plain", precision="pure-bf16", why="Plain PyTorch with weights and moments in bf16."),
    Variant("E-searched-launched", parent="E-plain-bf16", engine="searched", why="What a search found to pay: rounding at random, one drawing of dropout, full packing."),
    Variant("E-searched", parent="E-searched-launched", cuda_graph=True, why="Plain PyTorch at its best, by a search: compiled, packed, in bf16, one CUDA graph.", tags=("plain", "headline")),
    Variant("E-adamw", parent="E-packed", optimizer="adamw-fused", why="AdamW as one kernel, with rate and step count on the device.", tags=("ladder",)),
    Variant("E-graph", parent="E-adamw", cuda_graph=True, why="The whole step is one CUDA graph, so that a slow host no longer matters.", tags=("ladder",)),
    Variant("E-bf16", parent="E-graph", precision="bf16", why="No loss scaling; the same matrix rate on this generation of chips.", tags=("ladder",)),
    Variant("E-masters", parent="E-bf16", optimizer="adamw-master", why="Weights, gradients, residuals in bf16 over fp32 master weights: no casts.", tags=("ladder",)),
    Variant("E-masters-eager", parent="E-masters", cuda_graph=False, why="What the capture alone gives; and where pipelines begin."),
    Variant("E-qkv", parent="E-masters", qkv="fused", why="Query, key and value in one linear layer: wider tiles, fewer kernels.", tags=("ladder",)),
    Variant("E-dropout", parent="E-qkv", dropout="hash", why="Dropout's random bits at a tenth of the work.", tags=("ladder",)),
    Variant("E-dropout-moments", parent="E-dropout", optimizer="adamw-master-bf16", why="Adam's moments in bf16, rounded at random: fewer bytes."),
    Variant("E-recompute-elementwise", parent="E-dropout-moments", activation_checkpointing="elementwise", why="GELU and norms are recomputed, and not kept."),
    Variant("E-regions", parent="E-dropout", compile="regional", why="A quick start: three layers are compiled, and all others take their code.", tags=("ladder",)),
    Variant("E-dropout-fp8", parent="E-dropout", feed_forward="fp8", why="FP8 GEMMs in the feed-forward blocks, where the chip has them."),
    Variant("E-varlen", parent="E-regions", attention="triton-varlen", why="A kernel of our own: attention for packed samples, which are short.", tags=("ladder",)),
    Variant("E-recompute", parent="E-varlen", activation_checkpointing=True, why="Layers are recomputed, in a graph: hashes need no state."),
    Variant("E-recompute-moments", parent="E-recompute", optimizer="adamw-master-bf16", why="Less memory still: moments in bf16 as well."),
    Variant("E-recompute-8bit", parent="E-recompute", optimizer="adamw-master-8bit", why="The leanest: every layer recomputed, and moments in 8 bits.", tags=("headline",)),
    Variant("E-norm", parent="E-varlen", norms="fused", why="Bias, dropout, residual and norm: one kernel each way.", tags=("ladder",)),
    Variant("E-gelu", parent="E-norm", gelu="sigmoid", why="GELU in fewer instructions, to a fraction of bf16's step.", tags=("ladder",)),
    Variant("E-moments", parent="E-gelu", optimizer="adamw-master-bf16", why="Adam's moments in bf16 as well: the whole stack in bf16.", tags=("ladder",)),
    Variant("E-fp8", parent="E-moments", feed_forward="fp8", why="E-moments with FP8 GEMMs in its feed-forward blocks."),
    Variant("E-uncompiled", parent="E-moments", compile="none", why="No compiler: kernels of our own do its work, and the first step comes sooner.", tags=("ladder", "headline")),
    Variant("E-fp8-uncompiled", parent="E-uncompiled", feed_forward="fp8", why="E-uncompiled with FP8 GEMMs in its feed-forward blocks.", tags=("ladder",)),
    Variant("E-fp8-all", parent="E-fp8-uncompiled", attention_projections="fp8", why="FP8 GEMMs before and after attention as well: in every linear layer of a block.", tags=("ladder",)),
    Variant("E-fp8-gradients", parent="E-fp8-all", weight_gradients="fp8", why="FP8 GEMMs for most weights' gradients as well, of operands that are written turned.", tags=("ladder", "headline")),
    Variant("E-fp8-8bit", parent="E-fp8-gradients", optimizer="adamw-master-8bit", why="Adam's moments in 8 bits: the optimizer moves 14 bytes a weight, not 18."),
    Variant("E-fp8-rounded-bf16", parent="E-fp8-gradients", optimizer="adamw-rounded-bf16", why="Weights rounded at random, without masters: 14 bytes a weight, not 18."),
    Variant("E-fp8-rounded", parent="E-fp8-8bit", optimizer="adamw-rounded-8bit", why="Both: moments in 8 bits, and weights rounded at random: 10 bytes a weight."),
    Variant("E-t4", parent="E-graph", qkv="fused", why="What is left without bf16 and FlashAttention, as on a T4."),
    Variant("E-t4-dropout", parent="E-t4", dropout="hash", why="Dropout's random bits at a tenth of the work, with what a T4 has."),
    Variant("E-t4-masters", parent="E-t4-dropout", optimizer="adamw-master", why="Weights, gradients, residuals in fp16 over fp32 master weights."),
    Variant("E-t4-norm", parent="E-t4-masters", norms="fused", why="Bias, dropout, residual and norm in one; timed with FlashAttention, which no T4 has.", tags=("headline",)),
    Variant("E-packed-8bit", parent="E-packed", optimizer="adamw-8bit", why="Packed sequences with 8-bit moments: towards the least memory."),
    Variant("E-packed-8bit-recompute", parent="E-packed-8bit", activation_checkpointing=True, why="Packed sequences, 8-bit moments, recomputed layers."),
    Variant("E-packed-lora", parent="E-packed-8bit-recompute", trainable="lora-all", why="Packed, 8-bit AdamW, recomputed layers, and LoRA on every linear layer."),
    Variant("E-packed-lora-masters", parent="E-packed-lora", optimizer="adamw-master", why="What is frozen in half precision: half of its bytes."),
    Variant("E-masters-lora-qv", parent="E-masters", trainable="lora-qv", why="Does LoRA still pay once the step is fused and captured?"),
    Variant("E-masters-lora-all", parent="E-masters", trainable="lora-all", why="And LoRA on every linear layer?"),
    Variant("E-dropout-bitfit", parent="E-dropout", trainable="bitfit", why="And biases alone?"),
    Variant("E-dropout-freeze", parent="E-dropout", trainable="freeze-bottom-10", why="And freezing, which shortens the backward pass itself?"),
    # Several processes.
    Variant("P0", parent="A0", parallel="ddp", why="A0 on several GPUs: transformers.Trainer under torchrun."),
    Variant("P0-deepspeed", parent="P0", parallel="deepspeed", why="What the slides called a pipeline: DeepSpeed's ZeRO-1."),
    Variant("P0-polled", parent="P0", fault="nvidia-smi-polling", why="The slides' fault on purpose: nvidia-smi in every step."),
    Variant("P1", parent="A1", parallel="ddp", why="The baseline on several GPUs: they average gradients while they make them."),
    Variant("P1-bf16", parent="P1", parallel="ddp-bf16", why="Half the bytes between the GPUs: gradients travel in bf16."),
    Variant("P-fsdp", parent="P1", parallel="fsdp2", why="Each GPU keeps a share of weights, gradients and optimizer."),
    Variant("P-one-bucket", parent="E-dropout", parallel="ddp-one-bucket", why="E-dropout on several GPUs: one reduction inside the captured step."),
    Variant("P-overlap", parent="E-regions", parallel="ddp-overlap", why="Gradients are reduced while others are still computed."),
    Variant("P-overlap-zero1", parent="P-overlap", parallel="zero1-overlap", why="Gradients and new weights travel beside the passes."),
    Variant("P-zero1", parent="P-one-bucket", parallel="zero1", why="Each GPU updates its share of the weights alone."),
    Variant("P-nccl", parent="E-uncompiled", parallel="ddp-one-bucket", why="E-uncompiled on several GPUs, the plainest way: one reduction by NCCL inside the captured step."),
    Variant("P-nccl-fp8", parent="E-fp8-gradients", parallel="ddp-one-bucket", why="P-nccl with FP8 GEMMs in all linear layers."),
    Variant("P-nccl-t4", parent="E-t4-norm", parallel="ddp-one-bucket", why="E-t4-norm on several GPUs: what a T4 has, and one reduction by NCCL."),
    Variant("P-graph", parent="E-graph", parallel="ddp-one-bucket", why="E-graph on several GPUs: for models that no kernel of our own fits."),
    Variant("P-peers", parent="E-uncompiled", parallel="peers", why="A sharded optimizer by pointers into the memory of other GPUs: no NCCL in the step.", tags=("headline",)),
    Variant("P-peers-fp8", parent="E-fp8-gradients", parallel="peers", why="P-peers with FP8 GEMMs in all linear layers."),
    Variant("P-ddp", parent="E-masters-eager", parallel="ddp", why="Data parallelism on the pipelines' stack: what they are compared with."),
    Variant("P-gpipe", parent="E-masters-eager", parallel="pipeline", why="Each GPU has some of the layers, and hands on micro-batches."),
    Variant("P-1f1b", parent="P-gpipe", schedule="1f1b", why="Backward as early as can be: fewer activations are kept."),
    Variant("P-interleaved", parent="P-1f1b", schedule="interleaved", why="Two parts of the layers a GPU: it waits less."),
    Variant("P-tensor", parent="E-masters-eager", parallel="tensor", why="Each GPU has a share of every linear layer."),
    # Language models.
    Variant("L1", parent="A1", precision="fp32", why="The baseline of language models: fp32, eager attention, AdamW.", tags=("ladder", "headline")),
    Variant("L0", parent="L1", engine="trainer", why="The same by transformers.Trainer, with L1's eager attention in fp32.", tags=("trainer",)),
    Variant("L0-bf16", parent="L0", precision="bf16", why="The Trainer with mixed precision."),
    Variant("L0-sdpa", parent="L0-bf16", attention="sdpa", why="What most people would run: the Trainer in bf16, with its own attention.", tags=("trainer", "default", "headline")),
    Variant("L0-compile", parent="L0-sdpa", compile="inductor", why="The Trainer with fused attention and torch.compile.", tags=("trainer", "headline")),
    Variant("L0-tuned", parent="L0-compile", engine="trainer-tuned", why="The Trainer with workers and no filter for NaN, too."),
    Variant("L-fp16", parent="L1", precision="fp16", why="Mixed precision where there is no bf16, as on a T4."),
    Variant("L-bf16", parent="L1", precision="bf16", why="Mixed precision: GEMMs in bf16, weights in fp32.", tags=("ladder",)),
    Variant("L-sdpa", parent="L-bf16", attention="sdpa", why="Fused attention skips the half of the scores that no token may see.", tags=("ladder",)),
    Variant("L-compile", parent="L-sdpa", compile="inductor", why="The compiler fuses elementwise work, the loss over the vocabulary too.", tags=("ladder",)),
    Variant("L-adamw", parent="L-compile", optimizer="adamw-fused", why="AdamW as one kernel: no waiting for the device.", tags=("ladder",)),
    Variant("L-graph", parent="L-adamw", cuda_graph=True, why="The whole step is one CUDA graph; windows of text all have one length.", tags=("ladder",)),
    Variant("L-masters", parent="L-graph", optimizer="adamw-master", why="Weights, gradients, residuals in bf16 over fp32 master weights: no casts.", tags=("ladder",)),
    Variant("L-dropout", parent="L-masters", dropout="hash", why="Dropout's random bits at a tenth of the work.", tags=("ladder", "headline")),
    Variant("L-norm", parent="L-dropout", norms="fused", why="Bias, dropout, residual stream and norm: one kernel each way.", tags=("ladder",)),
    Variant("L-gelu", parent="L-norm", gelu="sigmoid", why="GELU's tanh as a sigmoid, and its bias's gradient in the same kernel.", tags=("ladder",)),
    Variant("L-attention", parent="L-gelu", attention="triton-causal", why="Attention by a kernel of our own, with hashed dropout.", tags=("ladder",)),
    Variant("L-loss", parent="L-attention", loss="chunked", why="Head and loss together, a part of the tokens at a time: no logits kept.", tags=("ladder",)),
    Variant("L-moments", parent="L-loss", optimizer="adamw-master-bf16", why="The whole stack: Adam's moments in bf16 as well.", tags=("ladder", "headline")),
    Variant("L-fp8", parent="L-moments", feed_forward="fp8", why="FP8 GEMMs in the feed-forward blocks, where the chip has them.", tags=("ladder",)),
    Variant("L-fp8-head", parent="L-fp8", loss="chunked-fp8", why="Two GEMMs of the head in FP8, too.", tags=("ladder", "headline")),
    Variant("L-fp8-gradients", parent="L-fp8-head", weight_gradients="fp8", why="FP8 GEMMs for the feed-forward weights' gradients as well, of operands that are written turned.", tags=("ladder",)),
    Variant("L-fp8-uncompiled", parent="L-fp8-gradients", compile="none", why="No compiler: norms and GELU then write the operands in 8 bits themselves.", tags=("ladder",)),
    Variant("L-fp8-all", parent="L-fp8-uncompiled", attention_projections="fp8", why="FP8 GEMMs around attention as well, whose operands the kernels beside them write.", tags=("ladder", "headline")),
    Variant("L-fp8-all-nodropout", parent="L-fp8-all", dropout="none", why="The same without dropout, as large models are trained today.", tags=("headline",)),
    Variant("L-fp8-head-nodropout", parent="L-fp8-head", dropout="none", why="The same without dropout, as large models are trained today.", tags=("headline",)),
    Variant("L-fp8-head-uncompiled", parent="L-fp8-head", compile="none", why="No compiler at all: our own kernels do what it would."),
    Variant("L-moments-nodropout", parent="L-moments", dropout="none", why="The same without dropout, as large models are trained today.", tags=("headline",)),
    Variant("L-plain", parent="L-compile", engine="plain", why="An afternoon's plain PyTorch: bf16, SDPA, compiled, fused AdamW.", tags=("plain", "headline")),
    Variant("L-plain-bf16", parent="L-plain", precision="pure-bf16", why="Plain PyTorch with weights and moments in bf16.", tags=("plain", "headline")),
    Variant("L-plain-bf16-nodropout", parent="L-plain-bf16", dropout="none", why="The same without dropout.", tags=("headline",)),
    Variant("L-searched-launched", parent="L-plain-bf16", engine="searched", why="What a search found to pay: rounding at random, one drawing of dropout, loss in chunks."),
    Variant("L-searched", parent="L-searched-launched", cuda_graph=True, why="Plain PyTorch at its best, by a search: compiled, in bf16, one CUDA graph.", tags=("plain", "headline")),
    Variant("L-searched-nodropout", parent="L-searched", dropout="none", why="The same without dropout.", tags=("headline",)),
    Variant("L-recompute", parent="L-compile", activation_checkpointing=True, why="Activations are recomputed instead of kept: memory for time."),
    Variant("L-8bit", parent="L-compile", optimizer="adamw-8bit", why="Adam's two moments in 8 bits, but for the embeddings'."),
    Variant("L-lora", parent="L-compile", trainable="lora-all", why="LoRA r=32 on every linear layer, over a frozen model."),
    Variant("L-qlora", parent="L-lora", base_quantization="nf4", why="The frozen layers in 4 bits: a seventh of their weights' bytes."),
    Variant("L-ddp", parent="L-compile", parallel="ddp", why="Several GPUs: gradients are averaged during the backward pass."),
    Variant("L-one-bucket", parent="L-dropout", parallel="ddp-one-bucket", why="The whole stack on several GPUs: one captured reduction."),
]
# fmt: on

VARIANTS = {variant.name: variant for variant in _TABLE}
# What sentences speak of; what `recommended` stands for depends on the machine.
RECOMMENDED = "E-uncompiled"
# Notebook of each family.
FAMILIES = {
    letter: notebook for task in TASKS.values() for letter, notebook in task.families.items()
}
# Baseline of each task.
BASELINES = {name: task.baseline for name, task in TASKS.items()}


def _check_table() -> None:
    """Raise SpecError for a variant whose settings cannot be, and for a name that two have."""
    for variant in _TABLE:
        if VARIANTS[variant.name] is not variant:
            raise SpecError(f"two variants are named {variant.name!r}")
        _ = variant.settings


_check_table()


def find_variant(name: str, task: str = "qa", several: bool = False) -> Variant:
    """Return the variant of that name.

    `recommended` gives the baseline of the task, or for `several` processes the plainest that takes
    them, until `plan` has chosen a variant. Raises UnknownName for a name that no variant has.
    """
    stand_in = TASKS[task].on_gpus[-1] if several else BASELINES[task]
    return find("variant", name, VARIANTS | {"recommended": VARIANTS[stand_in]})


def tagged(tag: Tag) -> list[str]:
    """Return the names of the variants with a tag, in the order of the table."""
    return [variant.name for variant in VARIANTS.values() if tag in variant.tags]


def find_family(letter: str) -> list[str]:
    """Return the names of a family's variants, in the order of the table.

    Raises UnknownName for a letter that no family has.
    """
    find("family", letter, FAMILIES)
    return [variant.name for variant in VARIANTS.values() if variant.family == letter]
