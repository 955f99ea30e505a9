"""Every setting of a run, typed: the values that it may have, and what they mean.

Standard library only. Which values go together is in rules.py, which `Settings` asks when they are
made, so that nothing is recorded that did not run.
"""

from dataclasses import dataclass, fields
from functools import cache
from typing import Literal, get_args, get_type_hints

from qa_lib.errors import SpecError, UnknownName, nearest
from qa_lib.spec import rules
from qa_lib.spec.recipes import find_recipe

Engine = Literal["loop", "trainer", "trainer-tuned", "plain", "searched"]
Precision = Literal["fp16", "bf16", "fp32", "pure-bf16"]
Attention = Literal[
    "eager", "sdpa", "flash", "efficient", "block-diagonal", "triton-varlen", "triton-causal"
]
Compile = Literal[
    "none", "inductor", "regional", "aot_eager", "cudagraphs", "nvfuser", "reduce-overhead"
]
Optimizer = Literal[
    "adamw",
    "adamw-fused",
    "adamw-8bit",
    "adamw-master",
    "adamw-master-bf16",
    "adamw-master-8bit",
    "adamw-rounded-bf16",
    "adamw-rounded-8bit",
]
DataParallel = Literal[
    "ddp", "ddp-bf16", "ddp-one-bucket", "ddp-overlap", "zero1", "zero1-overlap", "peers", "fsdp2"
]


@dataclass(frozen=True)
class Settings:
    """All settings of a run; the defaults are variant A1, the baseline of the reference project.

    Raises UnknownName for a value that does not exist, and SpecError for two values that do not go
    together (`rules.conflicts`).
    """

    engine: Engine = "loop"
    """What trains: the visible loop of train/loop.py | transformers.Trainer | the Trainer with what
    the search of peers/search_trainer.py found to pay beside other settings | a rival of peers/,
    which is plain PyTorch | the rival with what the search of peers/search.py found to pay."""

    precision: Precision = "fp16"
    """Autocast to fp16 (with GradScaler) or bf16 | fp32: no autocast | pure-bf16: weights and
    moments in bf16 as well."""

    attention: Attention = "eager"
    """The kernel of attention. Padded sequences: eager | sdpa. Packed ones: flash | efficient |
    block-diagonal, of which sdpa stands for what the machine has | triton-varlen, a kernel of our
    own. Windows of text: eager | sdpa | triton-causal, a kernel of our own."""

    qkv: Literal["separate", "fused"] = "separate"
    """Query, key and value: three linear layers | one."""

    dropout: Literal["philox", "hash", "none"] = "philox"
    """Random bits of the hidden states' dropout: PyTorch's generator | a hash of the element's
    number | none: no dropout anywhere."""

    norms: Literal["native", "fused"] = "native"
    """What comes between a layer's linear layers and its norms, and the norms: as the compiler
    makes it | kernels of our own (kernels/fused_norm.py)."""

    loss: Literal["native", "chunked", "chunked-fp8"] = "native"
    """Loss of a language model: from all logits | head and loss together, some tokens at a time
    (kernels/linear_cross_entropy.py) | the same with two of its GEMMs in 8-bit floats."""

    loss_padding: Literal["counted", "masked"] = "counted"
    """The padding of padded samples in the softmax of their loss: counted, as in transformers' own
    loss | masked, which leaves a sample's own tokens, as in packed sequences."""

    feed_forward: Literal["native", "fp8"] = "native"
    """GEMMs of the feed-forward blocks: in the precision's type | in 8-bit floats."""

    attention_projections: Literal["native", "fp8"] = "native"
    """GEMMs of the linear layers before and after attention: in the precision's type | in 8-bit
    floats."""

    weight_gradients: Literal["native", "fp8"] = "native"
    """GEMMs of the weights' gradients: in the precision's type | in 8-bit floats, in the
    feed-forward blocks and before attention, where the layers themselves have those."""

    gelu: Literal["exact", "sigmoid"] = "exact"
    """GELU of the feed-forward blocks: by the error function | by the sigmoid of a polynomial
    (kernels/gelu.py)."""

    qat: Literal["none", "int8", "int4"] = "none"
    """Quantization-aware training: weights rounded to so many bits, activations to 8
    (model/qat.py)."""

    compile: Compile = "none"
    """A backend of torch.compile | regional: inductor, for a few layers at a time |
    reduce-overhead: inductor, whose passes PyTorch replays as CUDA graphs."""

    padding: Literal["max_length", "longest", "packed"] = "max_length"
    """Padding to the preset's max_length | to the longest sample of the micro-batch | packed: none,
    samples share sequences."""

    group_by_length: Literal[False, True] = False
    """Whether a micro-batch has samples of like length; micro-batches come in random order."""

    trainable: str = "all"
    """Which parameters train: the name of a recipe (`find_recipe`)."""

    base_quantization: Literal["none", "nf4"] = "none"
    """What adapters leave frozen: as it is | in 4 bits by bitsandbytes (QLoRA)."""

    optimizer: Optimizer = "adamw"
    """adamw: PyTorch's default, or the rivals' own (peers/adamw.py) | adamw-fused: one kernel, with
    no wait for the device | adamw-8bit: moments in 8 bits | adamw-master: weights and gradients in
    half precision over fp32 masters in the optimizer | adamw-master-bf16: and moments in bf16 |
    adamw-master-8bit: or in 8 bits | adamw-rounded-bf16: weights and moments in bf16, rounded at
    random, without masters | adamw-rounded-8bit: moments in 8 bits."""

    cuda_graph: Literal[False, True] = False
    """Whether the whole step is replayed as one CUDA graph."""

    activation_checkpointing: Literal[False, "elementwise", True] = False
    """Activations that the backward pass computes again: none | what takes no GEMM, by the compiler
    | all of a layer's."""

    parallel: Literal["none", DataParallel, "pipeline", "tensor", "deepspeed"] = "none"
    """How several processes make one step.

    Each works on its share of the micro-batches (train/parallel/data_parallel.py): ddp, PyTorch's
    DistributedDataParallel | ddp-bf16: its gradients are sent in bf16 | ddp-one-bucket: one
    reduction of all gradients | ddp-overlap: a reduction for each part of the model, while the
    backward pass computes the next | zero1: each has a share of the optimizer | zero1-overlap: both
    | peers: each has a share of the optimizer, and writes into the memory of other GPUs | fsdp2:
    each has a share of weights, gradients and optimizer | deepspeed: ZeRO-1 by DeepSpeed under the
    Trainer (train/trainer.py).

    Each has a part of the model: pipeline, some of the layers (train/parallel/pipeline.py) |
    tensor, a share of every linear layer (train/parallel/tensor.py).
    """

    schedule: Literal["gpipe", "1f1b", "interleaved"] = "gpipe"
    """The order in which a pipeline's stages take micro-batches: all forward, then all backward |
    backward as early as can be | that, with two parts of the layers in each process."""

    fault: Literal["none", "nvidia-smi-polling", "positional-join"] = "none"
    """A fault of the reference project, on purpose: each process asks nvidia-smi after every step |
    predictions go to questions by position and not by id (A4-b)."""

    micro_batch: int = 8
    """Samples in one forward pass."""

    def __post_init__(self):
        for name, allowed in choices().items():
            value = getattr(self, name)
            if not _is_one_of(value, allowed):
                raise UnknownName(nearest(name, str(value), map(str, allowed)))
        find_recipe(self.trainable)
        if type(self.micro_batch) is not int or self.micro_batch < 1:
            raise SpecError(
                f"micro_batch {self.micro_batch!r} is not a whole number of samples, 1 or more"
            )
        for sentence in rules.conflicts(self):
            raise SpecError(sentence)

    @property
    def by_trainer(self) -> bool:
        """Whether transformers.Trainer trains."""
        return self.engine in ("trainer", "trainer-tuned")

    @property
    def by_rival(self) -> bool:
        """Whether plain PyTorch of peers/ trains."""
        return self.engine in ("plain", "searched")

    @property
    def has_8_bit_layers(self) -> bool:
        """Whether linear layers have their GEMMs in 8-bit floats."""
        return "fp8" in (self.feed_forward, self.attention_projections)

    @property
    def half_weights(self) -> bool:
        """Whether the loop has weights and gradients in half precision, by MasterAdamW."""
        return self.optimizer.startswith(("adamw-master", "adamw-rounded"))

    @property
    def has_adapters(self) -> bool:
        """Whether adapters of low rank train, and what they adapt does not."""
        return find_recipe(self.trainable).kind == "lora"

    @property
    def chunks(self) -> int:
        """Parts of the layers that each process of a pipeline has."""
        return 2 if self.schedule == "interleaved" else 1


@cache
def choices() -> dict[str, tuple]:
    """Return the values of each setting that has a fixed list of them."""
    hints = get_type_hints(Settings)
    values = {field.name: get_args(hints[field.name]) for field in fields(Settings)}
    return {name: allowed for name, allowed in values.items() if allowed}


def _is_one_of(value: object, allowed: tuple) -> bool:
    """Return whether a value is among those allowed, where 1 does not stand for True."""
    is_bool = isinstance(value, bool)
    return any(value == known and is_bool == isinstance(known, bool) for known in allowed)
