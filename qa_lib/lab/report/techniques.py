"""How each technique works, in a few sentences and lines, and where this package has it.

A technique is what a variant changes: one setting, and its new value, under an engine. Each stands
below as a function under `@technique`, whose arguments name the setting, its values, the engines,
and the sentences and lines that notebooks print. The function returns the code of this package that
does it, to which the notebooks link. It imports that code itself, so that only what is linked is
loaded.

A variant that changes a new setting, sets one to a new value, or does so under another engine,
needs a technique here: `find_technique` raises SpecError for one that has none.
"""

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qa_lib.errors import SpecError
from qa_lib.paths import PACKAGE
from qa_lib.spec.settings import Engine
from qa_lib.spec.variants import VARIANTS, Variant

# Returns functions, methods or classes.
CodeOf = Callable[[], list[Any]]


@dataclass(frozen=True)
class Gain:
    """A comparison of two variants that README.md makes, to say what a technique gains."""

    adds: str
    """The variant that has the technique."""
    over: str
    """The variant that it is compared with, which has what a practitioner would have."""
    than: str
    """What `over` is, in words."""


@dataclass(frozen=True)
class Technique:
    """How one change of a setting works."""

    setting: str | None
    """The setting that is changed; None for the baseline, which changes nothing."""
    values: tuple[Any, ...]
    """The new values that this explains; empty for the baseline alone."""
    engines: tuple[Engine, ...]
    """The engines under which it explains them: each does the same by code of its own."""
    how: str
    """Sentences that say how it works."""
    yours: str
    """One to three lines that do the same, or nearly, in a training loop of one's own. Empty where
    it takes more of them."""
    code: CodeOf
    """Returns what does it in this package, the most important first."""
    gain: Gain | None
    """The comparison in README.md's table, if it stands there."""

    def explains(self, variant: Variant) -> bool:
        """Return whether this is how a variant's change works under its engine."""
        if variant.settings.engine not in self.engines:
            return False
        if self.setting is None:
            return not variant.change
        return self.setting in variant.change and variant.change[self.setting] in self.values


TECHNIQUES: list[Technique] = []


def technique(
    setting: str | None = None,
    *values: Any,
    engines: tuple[Engine, ...] = ("loop",),
    how: str,
    yours: str = "",
    gain: Gain | None = None,
) -> Callable[[CodeOf], CodeOf]:
    """Return a decorator that appends a Technique, whose code the function returns."""

    def append(code: CodeOf) -> CodeOf:
        TECHNIQUES.append(Technique(setting, values, engines, how, yours, code, gain))
        return code

    return append


def find_technique(variant: str) -> Technique:
    """Return the one of TECHNIQUES that explains what a variant changes.

    Raises SpecError where none does, or more than one.
    """
    changed = VARIANTS[variant]
    explaining = [known for known in TECHNIQUES if known.explains(changed)]
    if len(explaining) != 1:
        what = ", ".join(f"{setting} {value!r}" for setting, value in changed.change.items())
        raise SpecError(
            f"variant {variant}: {len(explaining)} techniques explain {what or 'no change'} under "
            f"engine {changed.settings.engine!r}, and it takes one, in lab/report/techniques.py"
        )
    return explaining[0]


@dataclass(frozen=True)
class Source:
    """Lines of a file of this package."""

    path: str
    """The file, from the folder that the package lies in: 'qa_lib/train/loop.py'."""
    first: int
    """The number of the first line."""
    code: str
    """The lines, without the indentation that all of them have."""


def source_of(shown: Any) -> Source:
    """Return the lines of a function, method, class, Triton kernel or operator of our own."""
    # Triton keeps a kernel's function as `fn`, and kernels/common.py an operator's as
    # `__wrapped__`.
    for attribute in ("fn", "__wrapped__"):
        shown = getattr(shown, attribute, shown)
    path = Path(inspect.getsourcefile(shown)).relative_to(PACKAGE.parent)
    lines, first = inspect.getsourcelines(shown)
    return Source(path.as_posix(), first, textwrap.dedent("".join(lines)))


BY_TRAINER: tuple[Engine, ...] = ("trainer", "trainer-tuned")
BY_RIVAL: tuple[Engine, ...] = ("plain", "searched")
IN_ORDER = (
    "Each process has some of the layers and hands hidden states on, one micro-batch after the "
    "other. The order in which it takes forward and backward passes decides how long it waits and "
    "how much it keeps."
)


# Engines, numbers, compiler.


@technique(
    "engine",
    "trainer",
    engines=("trainer",),
    how=(
        "`transformers.Trainer` gets the same model, the same micro-batches and the same "
        "schedule as the visible loop. What it is told is in the arguments below; the rest is "
        "its own."
    ),
    yours="""\
trainer = Trainer(model, TrainingArguments("out", fp16=True), train_dataset=samples)
trainer.train()
""",
)
def trainer_engine():
    from qa_lib.train.trainer import train

    return [train]


@technique(
    "engine",
    "trainer-tuned",
    engines=("trainer-tuned",),
    how=(
        "A search tried every set of four options of `transformers.Trainer`. Workers prepare "
        "batches, samples are padded to few lengths, and nothing looks for NaN in each step, which "
        "would wait for the GPU. Length grouping and the compiler are settings of their own."
    ),
    yours="""\
told = {"dataloader_num_workers": 4, "logging_nan_inf_filter": False}
Trainer(model, TrainingArguments("out", bf16=True, **told), train_dataset=samples).train()
""",
)
def tuned_trainer_engine():
    from qa_lib.train.trainer import train

    return [train]


@technique(
    "engine",
    "searched",
    engines=("searched",),
    how=(
        "A search added to the plain step what makes it quicker. Weights in bf16 are rounded at "
        "random by few compiled kernels, dropout takes random bytes that one kernel draws, and "
        "samples are dealt over a whole epoch, so that hardly a token is padding."
    ),
)
def searched_engine():
    from qa_lib.train.plain import SearchedStep

    return [SearchedStep]


@technique(
    "engine",
    "plain",
    engines=("plain",),
    how=(
        "A step as a good engineer writes it, with `torch.compile`, autocast, fused AdamW and "
        "clipping. Nothing of this library is in it, so that it shows what the library adds."
    ),
    yours="""\
model = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
""",
)
def plain_engine():
    from qa_lib.train.plain import PlainStep

    return [PlainStep]


@technique(
    "precision",
    "fp32",
    how=(
        "Everything stays in 32 bits: no autocast, and a scaler of the loss that does nothing. "
        "It is what the variants in half precision are measured against."
    ),
    yours="loss = model(**batch).loss  # and no torch.autocast around it",
)
def fp32():
    from qa_lib.train.optim import Precision

    return [Precision]


@technique(
    "precision",
    "fp16",
    "bf16",
    how=(
        "Tensor cores multiply 16-bit numbers several times as fast as 32-bit ones. fp16 ends at "
        "65,504 and underflows early, so that its loss is scaled up before the backward pass; "
        "bf16 has the range of fp32 and needs no scale."
    ),
    yours="""\
with torch.autocast("cuda", torch.float16):  # bf16 needs no scaler
    loss = model(**batch).loss
scaler.scale(loss).backward()  # of scaler = torch.amp.GradScaler()
""",
)
def half_precision():
    from qa_lib.train.optim import Precision

    return [Precision]


@technique(
    "precision",
    "fp32",
    engines=BY_TRAINER,
    how=(
        "The Trainer computes in 32 bits unless it is told otherwise: `fp16` and `bf16` are both "
        "off. Many a script trains so because nobody has asked for more."
    ),
    yours='arguments = TrainingArguments("out")  # without fp16=True and bf16=True',
)
def trainer_in_fp32():
    from qa_lib.train.trainer import train

    return [train]


@technique(
    "precision",
    "bf16",
    engines=BY_TRAINER,
    how=(
        "The Trainer puts autocast to bf16 around the model by itself. bf16 has the range of fp32, "
        "so that there is no scale of the loss, and nothing waits for the GPU to look for an "
        "overflow."
    ),
    yours='arguments = TrainingArguments("out", bf16=True)',
)
def trainer_in_bf16():
    from qa_lib.train.trainer import train

    return [train]


@technique(
    "precision",
    "pure-bf16",
    engines=BY_RIVAL,
    how=(
        "The model is cast to bf16 once, so that weights, gradients and AdamW's moments are in 16 "
        "bits. There is no autocast and no scale of the loss, and nothing keeps what is lost of a "
        "step that is smaller than a weight's rounding."
    ),
    yours="""\
model = model.to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
""",
)
def pure_bf16():
    from qa_lib.train.plain import PlainStep, train

    return [train, PlainStep]


@technique(
    "compile",
    "none",
    how=(
        "Where kernels of our own are nearly all of a step, there is little left for a compiler, "
        "and the step is captured as it is. Only these kernels are compiled, several at a time, so "
        "that the first step comes some 8 s sooner; each further step takes less than 1 % longer."
    ),
    yours="model = speed_up(model)  # from qa_lib; and no torch.compile",
)
def only_our_kernels_compiled():
    from qa_lib.train.compile import compile_kernels

    return [compile_kernels]


@technique(
    "compile",
    "regional",
    how=(
        "All layers are alike, so that three of them are compiled and that one program serves "
        "all. Training starts sooner, and what would be fused across a border is lost."
    ),
    yours="""\
for layer in model.bert.encoder.layer:
    layer.compile()  # all layers share one program
""",
)
def regional_compilation():
    from qa_lib.model.packed import RegionalModel

    return [RegionalModel]


@technique(
    "compile",
    "reduce-overhead",
    engines=("plain",),
    how=(
        '`torch.compile` in its mode "reduce-overhead" records the forward and the backward pass '
        "as CUDA graphs of its own. Optimizer and clipping are still launched kernel by kernel."
    ),
    yours='model = torch.compile(model, mode="reduce-overhead")',
)
def reduce_overhead():
    from qa_lib.train.plain import PlainStep

    return [PlainStep]


@technique(
    "compile",
    "inductor",
    "aot_eager",
    "cudagraphs",
    "nvfuser",
    how=(
        "`torch.compile` traces the model into one graph and hands it to a backend. `inductor` "
        "writes few kernels that each read and write memory once; `aot_eager` runs the graph's "
        "operators as they are, and `cudagraphs` replays them with one launch."
    ),
    yours='model = torch.compile(model)  # or backend="aot_eager", backend="cudagraphs"',
    gain=Gain(adds="A3", over="A2", than="fused attention, not compiled"),
)
def compiled():
    from qa_lib.train.compile import compiled

    return [compiled]


@technique(
    "compile",
    "inductor",
    engines=BY_TRAINER,
    how=(
        "The Trainer calls `torch.compile` on the model by itself. The first batch is compiled for "
        "its own length; when one of another length comes, it is compiled anew with the length "
        "left open."
    ),
    yours='arguments = TrainingArguments("out", torch_compile=True)',
)
def compiled_by_the_trainer():
    from qa_lib.train.trainer import train

    return [train]


# Batches.


@technique(
    "padding",
    "longest",
    engines=("loop", *BY_TRAINER),
    how=(
        "The samples of a micro-batch are padded to its longest one, rounded up to one of few "
        "lengths, and no longer to the limit. One long sample is enough to spoil it for all "
        "beside it."
    ),
    yours='collator = DataCollatorWithPadding(tokenizer, padding="longest", pad_to_multiple_of=32)',
)
def padding_to_the_longest():
    from qa_lib.data.batches import Batches

    return [Batches.padded_length, Batches.tokens]


@technique(
    "padding",
    "packed",
    how=(
        "Samples are dealt to micro-batches so that all have nearly the same number of tokens, "
        "and each micro-batch is one sequence of fixed length. Attention is told where the "
        "samples end, and computes nothing across them."
    ),
    yours="""\
rows = pack(samples, tokens=4096)  # from qa_lib, as PackedCollator and speed_up
batches = DataLoader(rows, batch_size=None, collate_fn=PackedCollator())
model = speed_up(model)
""",
    gain=Gain(adds="E-packed", over="A4", than="length grouping"),
)
def packing():
    from qa_lib.data.packing import deal
    from qa_lib.model.packed_attention import flash

    return [deal, flash]


@technique(
    "loss_padding",
    "masked",
    how=(
        "The loss of a padded sample takes a softmax over all of its places, those of padding "
        "included, and training also learns to give these low logits. Masked, it is over the "
        "sample's own tokens, as where nothing is padded."
    ),
    yours="""\
logits = start_logits.masked_fill(attention_mask == 0, -torch.inf)
loss = F.cross_entropy(logits, start_positions)
""",
)
def masked_loss():
    from qa_lib.train.compile import MaskedLossOf

    return [MaskedLossOf]


@technique(
    "group_by_length",
    True,
    how=(
        "Spans of 50 micro-batches are sorted by length before they are cut, so that those "
        "beside each other are alike, and the micro-batches are shuffled afterwards. Little is "
        "left to pad, and the order stays random."
    ),
    yours='arguments = TrainingArguments("out", train_sampling_strategy="group_by_length")',
)
def grouping_by_length():
    from qa_lib.data.batches import Batches

    return [Batches._drawn]


@technique(
    "group_by_length",
    True,
    engines=BY_TRAINER,
    how=(
        "The Trainer's own sampler shuffles the samples, cuts them into spans of up to 50 batches "
        "and sorts each span from long samples to short ones. Little is left to pad, and long "
        "batches come before short ones in each span."
    ),
    yours='arguments = TrainingArguments("out", train_sampling_strategy="group_by_length")',
)
def grouping_by_the_trainer():
    from qa_lib.train.trainer import train

    return [train]


# The step.


@technique(
    "cuda_graph",
    True,
    how=(
        "A step of BERT-base is some 1,700 kernels, each launched by Python in turn. A CUDA "
        "graph records them once and replays them with one launch, so that a slow host no longer "
        "matters."
    ),
    yours="""\
step = GraphedStep(model, optimizer)  # from qa_lib
loss = step(batch)
""",
    gain=Gain(adds="E-graph", over="E-adamw", than="compiled, packed, fused AdamW"),
)
def cuda_graph():
    from qa_lib.train.cuda_graph import CapturedStep

    return [CapturedStep.__call__, CapturedStep._capture]


@technique(
    "cuda_graph",
    True,
    engines=("searched",),
    how=(
        "The rival's step, forward and backward passes, clipping and update, is done three times "
        "and then recorded as one CUDA graph. What these steps have changed is put back, and each "
        "step from then on is one launch."
    ),
    yours="""\
graph = torch.cuda.CUDAGraph()  # after some steps on a stream of their own
with torch.cuda.graph(graph):
    loss = step()
""",
)
def graph_of_the_rival():
    from qa_lib.peers.step import Step
    from qa_lib.train.plain import SearchedStep

    return [Step._capture, SearchedStep]


@technique(
    "cuda_graph",
    False,
    how=(
        "The step is launched kernel by kernel again, as it stands below. The difference to its "
        "parent is what capturing it as a CUDA graph gives."
    ),
    yours="""\
model(**batch).loss.backward()
optimizer.step()
optimizer.zero_grad()
""",
)
def no_cuda_graph():
    from qa_lib.train.loop import OptimizerStep

    return [OptimizerStep.__call__]


@technique(
    "optimizer",
    "adamw-fused",
    how=(
        "PyTorch's default AdamW runs in many launches and keeps its step count on the host. "
        "Fused, it is one kernel for all parameters, with rate and step count on the device, and "
        "no step waits for it."
    ),
    yours="optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)",
)
def fused_adamw():
    from qa_lib.train.optim import _adamw, _fused

    return [_adamw, _fused]


@technique(
    "optimizer",
    "adamw-8bit",
    how=(
        "AdamW keeps two moments for each parameter, which bitsandbytes stores in 8 bits with a "
        "scale for each block. Small tensors and embeddings keep theirs in 32 bits."
    ),
    yours="optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=5e-5)",
)
def adamw_8bit():
    from qa_lib.train.optim import _adamw8bit

    return [_adamw8bit]


@technique(
    "optimizer",
    "adamw-master",
    how=(
        "Weights, gradients and activations are in half precision, and nothing is cast on the "
        "way. A step that is smaller than a weight's rounding would be lost: it is added to an "
        "fp32 master, of which 16 bits are the weight and 16 lie beside it."
    ),
    yours="""\
model = model.to(torch.bfloat16)
optimizer = MasterAdamW(model.parameters(), lr=5e-5, max_norm=1.0)  # from qa_lib
""",
    gain=Gain(adds="E-masters", over="E-bf16", than="autocast to bf16"),
)
def fp32_masters():
    from qa_lib.kernels.adamw import halves, master_of

    return [master_of, halves]


@technique(
    "optimizer",
    "adamw-master-bf16",
    how=(
        "Adam's moments take half the bytes in bf16. They are rounded up or down at random, "
        "since a moment that keeps 999 parts in 1,000 in every step would never move if it were "
        "rounded to the nearest."
    ),
    yours="""\
model = model.to(torch.bfloat16)
optimizer = MasterAdamW(model.parameters(), lr=5e-5, moments=torch.bfloat16)  # from qa_lib
""",
)
def bf16_moments():
    from qa_lib.kernels.adamw import update, upper

    return [update, upper]


@technique(
    "optimizer",
    "adamw-master-8bit",
    how=(
        "Adam's moments take 8 bits: an exponent and 3 bits of mantissa, with a scale for "
        "each block of 1,024. They are rounded up or down at random, or they would never move."
    ),
)
def moments_in_8_bits():
    from qa_lib.kernels.eight_bit import decode_square, encode_square

    return [encode_square, decode_square]


@technique(
    "optimizer",
    "adamw-rounded-bf16",
    how=(
        "No master stands behind a weight in bf16: the weight itself is rounded up or down at "
        "random, so that small steps move it on average. The optimizer reads and writes 14 bytes "
        "a weight in place of 18."
    ),
    yours="""\
model = model.to(torch.bfloat16)
optimizer = MasterAdamW(model.parameters(), lr=5e-5, masters=False)  # from qa_lib
""",
)
def rounded_weights():
    from qa_lib.kernels.adamw import update, weight_noise

    return [update, weight_noise]


@technique(
    "optimizer",
    "adamw-rounded-8bit",
    how=(
        "Weights in bf16 are rounded at random, without masters, and Adam's moments take 8 bits. "
        "What is left to read and write are 10 bytes a weight, of which 2 are the gradient's."
    ),
)
def rounded_weights_with_8_bits():
    from qa_lib.kernels.adamw import coded_moments, weight_noise

    return [coded_moments, weight_noise]


# Parts of the model.


@technique(
    "qkv",
    "fused",
    how=(
        "Query, key and value come from one matrix product of three times the width, where there "
        "were three. It fills more of a large GPU, is one launch, and reads the hidden states "
        "once."
    ),
    yours="model = speed_up(model)  # from qa_lib",
)
def fused_qkv():
    from qa_lib.model.fused_projections import FusedSelfAttention

    return [FusedSelfAttention.forward]


@technique(
    "dropout",
    "hash",
    how=(
        "Dropout needs a random bit for each element, and PyTorch's generator makes it in ten "
        "rounds of multiplications. A hash of the element's number does it in a few "
        "instructions, and the backward pass computes it again instead of reading a mask."
    ),
    yours="model = speed_up(model)  # from qa_lib",
)
def hashed_dropout():
    from qa_lib.kernels.hash_dropout import hash32, hash_dropout

    return [hash32, hash_dropout]


@technique(
    "dropout",
    "none",
    how=(
        "The rate of every dropout is 0, that of adapters as well. Large language models are "
        "trained so today, since they see each text once."
    ),
    yours="""\
rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
model = AutoModel.from_pretrained(name, **rates)
""",
)
def no_dropout():
    from qa_lib.model.build import build_model

    return [build_model]


@technique(
    "dropout",
    "none",
    engines=BY_RIVAL,
    how=(
        "The rival is built with a rate of 0, so that nothing is dropped and no random bits are "
        "drawn. Large language models are trained so today, since they see each text once."
    ),
    yours="""\
rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
model = AutoModel.from_pretrained(name, **rates)
""",
)
def rival_without_dropout():
    from qa_lib.train.plain import train

    return [train]


@technique(
    "attention",
    "sdpa",
    engines=("loop", *BY_TRAINER),
    how=(
        "PyTorch's fused attention goes through the scores in blocks that never leave the chip, "
        "where eager attention writes one score for every pair of tokens to memory. transformers "
        "has it: all that changes is the name that the model is made with."
    ),
    yours='model = AutoModelForQuestionAnswering.from_pretrained(name, attn_implementation="sdpa")',
)
def sdpa():
    from qa_lib.model.build import _attention_of, _pretrained

    return [_attention_of, _pretrained]


@technique(
    "attention",
    "efficient",
    how=(
        "A T4 has no FlashAttention, and PyTorch's memory-efficient kernel in its place. It "
        "takes segments of equal length alone, so that neighbours of one length share a call."
    ),
    yours="""\
with torch.nn.attention.sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
    loss = model(**batch).loss
""",
)
def memory_efficient_attention():
    from qa_lib.model.efficient_attention import _equal_limits, efficient

    return [efficient, _equal_limits]


@technique(
    "attention",
    "triton-varlen",
    "triton-causal",
    how=(
        "The softmax is taken online: for each block of keys the maximum, the sum and the output "
        "so far are corrected, and no score is written to memory. Dropout's bits are a hash of "
        "the two tokens' numbers, which the backward pass computes again."
    ),
    yours="""\
model = speed_up(model).to(torch.bfloat16)  # from qa_lib
loss = model(**PackedCollator()(samples)).loss
""",
    gain=Gain(adds="E-varlen", over="E-regions", than="the same stack with FlashAttention"),
)
def own_attention_kernel():
    from qa_lib.kernels.varlen_forward import attend

    return [attend]


@technique(
    "norms",
    "fused",
    how=(
        "Bias, dropout, residual and layer norm each read and write all hidden states if they "
        "are kernels of their own. Here a program has some rows in registers, does all four, and "
        "writes once."
    ),
    yours="model = speed_up(model)  # from qa_lib",
    gain=Gain(adds="E-norm", over="E-varlen", than="what Inductor fuses"),
)
def fused_norms():
    from qa_lib.kernels.fused_norm import norm_forward_kernel

    return [norm_forward_kernel]


@technique(
    "gelu",
    "sigmoid",
    how=(
        "GELU multiplies by the normal distribution's cdf, whose logit a polynomial of three "
        "terms meets to a fraction of half precision's rounding. With the sigmoid of that it takes "
        "15 instructions an element, where the error function takes 38."
    ),
    yours="model = speed_up(model)  # from qa_lib",
)
def gelu_by_sigmoid():
    from qa_lib.kernels.gelu import _cdf, _Gelu

    return [_cdf, _Gelu]


@technique(
    "loss",
    "chunked",
    how=(
        "The scores of every word for every token are a language model's largest tensor. Here "
        "they exist for some tokens at a time: loss and gradients are computed together, and no "
        "logits are kept."
    ),
    yours="""\
loss_of = lambda part, words: F.cross_entropy(head(part), words, reduction="sum")
pairs = zip(hidden.split(512), next_words.split(512))
loss = sum(checkpoint(loss_of, *pair, use_reentrant=False) for pair in pairs) / len(hidden)
""",
)
def chunked_loss():
    from qa_lib.kernels.linear_cross_entropy import _loss

    return [_loss]


@technique(
    "loss",
    "chunked-fp8",
    how=(
        "Head and loss are computed together, some tokens at a time, so that no logits are kept. "
        "Two of the three matrix products take 8-bit floats, which tensor cores multiply at "
        "twice the rate."
    ),
)
def chunked_loss_in_fp8():
    from qa_lib.kernels.linear_cross_entropy import _loss

    return [_loss]


@technique(
    "feed_forward",
    "fp8",
    how=(
        "Tensor cores multiply 8-bit floats at twice the rate of bf16. Operands are scaled into "
        "the formats' range first, and the gradient of the weight stays in bf16, since its error "
        "goes straight into the update."
    ),
    yours="model = convert_to_float8_training(model)  # from torchao.float8",
)
def fp8_feed_forward():
    from qa_lib.kernels.fp8 import _Fp8Linear

    return [_Fp8Linear]


@technique(
    "attention_projections",
    "fp8",
    how=(
        "These two linear layers are narrow: what 8 bits save in their matrix products is lost "
        "again where a kernel has to convert their operands first. So the kernels before them, "
        "norm and attention, write their results in 8 bits as well, from registers."
    ),
)
def fp8_attention_projections():
    from qa_lib.kernels.fp8 import _Fp8Linear

    return [_Fp8Linear]


@technique(
    "weight_gradients",
    "fp8",
    how=(
        "A third of a linear layer's arithmetic is the gradient of its weight, a sum over all "
        "tokens. In 8 bits that GEMM wants both operands turned, so the kernel of GELU's backward "
        "pass writes them so, and no longer in bf16: fewer bytes, and half the arithmetic's time."
    ),
)
def fp8_weight_gradients():
    from qa_lib.kernels.fp8 import weight_grad_by_8_bits

    return [weight_grad_by_8_bits]


# What is trained, and what is kept for it.


@technique(
    "qat",
    "int8",
    "int4",
    how=(
        "Weights and activations are rounded in the forward pass as they will be when the model "
        "is quantized, and the backward pass takes the rounding for the identity. The model "
        "learns weights that bear it."
    ),
    yours="""\
rounded = scale * (weight / scale).round()
weight = weight + (rounded - weight).detach()  # its gradient is that of the plain weight
""",
)
def quantization_aware_training():
    from qa_lib.model.qat import use_rounding

    return [use_rounding]


@technique(
    "activation_checkpointing",
    "elementwise",
    how=(
        "The compiler decides what the forward pass keeps for the backward pass. Here it leaves "
        "out the outputs of GELU and of the norms, which it computes again without repeating a "
        "matrix product."
    ),
    yours="""\
torch._functorch.config.ban_recompute_materialized_backward = False
model = torch.compile(model)
""",
)
def elementwise_checkpointing():
    from qa_lib.train.compile import compiled

    return [compiled]


@technique(
    "activation_checkpointing",
    True,
    how=(
        "The forward pass keeps the input of each layer and nothing inside it. The backward pass "
        "runs the layer once more when its gradients are due: a third more work for a part of "
        "the memory."
    ),
    yours="model.gradient_checkpointing_enable()",
)
def activation_checkpointing():
    from qa_lib.model.build import _transform

    return [_transform]


@technique(
    "trainable",
    "lora-qv",
    "lora-all",
    "bitfit",
    "freeze-bottom-10",
    "freeze-last-4",
    how=(
        "What does not train needs no gradient and no moments of the optimizer. LoRA puts two "
        "narrow matrices beside a frozen one, BitFit trains biases alone, and freezing leaves "
        "out whole layers."
    ),
    yours="""\
model = get_peft_model(model, LoraConfig(r=8, target_modules=["query", "value"]))  # LoRA, or
for name, weight in model.named_parameters():
    weight.requires_grad_(name.endswith("bias"))  # BitFit
""",
)
def a_part_of_the_weights():
    from qa_lib.model.build import _add_adapters, _frozen_by, apply_recipe

    return [apply_recipe, _add_adapters, _frozen_by]


@technique(
    "base_quantization",
    "nf4",
    how=(
        "The frozen weights are kept in 4 bits, two of them a byte, with a scale for each 64. "
        "Every forward and backward pass widens a layer's weights for its own product and "
        "forgets them again."
    ),
    yours="""\
in_4_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
model = AutoModelForCausalLM.from_pretrained(name, quantization_config=in_4_bits)
""",
)
def nf4_base():
    from qa_lib.model.nf4 import NF4Linear, _wide

    return [NF4Linear.forward, _wide]


# Several GPUs.


@technique(
    "parallel",
    "ddp-one-bucket",
    how=(
        "All gradients are put into one tensor and averaged by one call after the backward pass. "
        "Nothing hides that call, but a CUDA graph captures it with the rest of the step."
    ),
    yours="""\
gradients = torch.cat([weight.grad.flatten() for weight in model.parameters()])
torch.distributed.all_reduce(gradients, op=torch.distributed.ReduceOp.AVG)
""",
)
def one_bucket():
    from qa_lib.train.parallel.data_parallel import OneBucketDDP

    return [OneBucketDDP]


@technique(
    "parallel",
    "ddp-overlap",
    how=(
        "The gradients of some layers are sent as soon as all of them are there, on a stream of "
        "their own. Meanwhile the backward pass computes those of the layers below."
    ),
    yours="model = DistributedDataParallel(model, bucket_cap_mb=25)  # sends while it computes",
)
def ddp_overlap():
    from qa_lib.train.parallel.overlap import OverlapDDP

    return [OverlapDDP]


@technique(
    "parallel",
    "zero1",
    how=(
        "Each process updates an equal share of the weights and keeps the optimizer's state for "
        "that share alone. Gradients are reduced to their share, and the new weights are "
        "gathered after the update."
    ),
    yours="optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=5e-5)",
)
def zero1():
    from qa_lib.train.parallel.zero1 import FlatShard

    return [FlatShard.reduce_grads, FlatShard.all_gather_params]


@technique(
    "parallel",
    "zero1-overlap",
    how=(
        "Each process updates a share of the weights, and both ways of the exchange are hidden. "
        "Gradients leave during the backward pass, and new weights come during the next forward "
        "pass."
    ),
)
def zero1_overlap():
    from qa_lib.train.parallel.overlap import OverlapZero1

    return [OverlapZero1.begin, OverlapZero1._send]


@technique(
    "parallel",
    "peers",
    how=(
        "Each process updates an equal share of the weights, and nothing is sent. One kernel "
        "writes every gradient into the memory of the GPU that owns its weights, and the kernel "
        "of the update writes the new weights into the memory of all GPUs. Three barriers a step "
        "say when what is there is complete."
    ),
)
def peers():
    from qa_lib.kernels.peer_gradients import send_kernel
    from qa_lib.train.parallel.peers import PeerShard

    return [PeerShard, send_kernel]


@technique(
    "parallel",
    "fsdp2",
    how=(
        "Each process keeps a share of weights, gradients and optimizer alike. A layer gathers "
        "its weights when it needs them, and forgets them again."
    ),
    yours="""\
for layer in model.bert.encoder.layer:
    fully_shard(layer)  # from torch.distributed.fsdp
fully_shard(model)
""",
)
def fsdp2():
    from qa_lib.train.parallel.data_parallel import FSDP2

    return [FSDP2]


@technique(
    "parallel",
    "pipeline",
    how=IN_ORDER,
    yours="""\
stage = PipelineStage(my_layers, rank, world, device)  # from torch.distributed.pipelining
Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_of).step(inputs)
""",
)
def pipeline():
    from qa_lib.train.parallel.pipeline import Pipeline

    return [Pipeline._build_schedule]


@technique(
    "parallel",
    "tensor",
    how=(
        "Every matrix product is cut: the first of a pair by columns, the second by rows, so "
        "that nothing has to be sent between them. After each pair the processes add up what "
        "they have."
    ),
    yours="""\
halves = {"intermediate.dense": ColwiseParallel(), "output.dense": RowwiseParallel()}
parallelize_module(layer, mesh, halves)  # from torch.distributed.tensor.parallel
""",
)
def tensor_parallel():
    from qa_lib.train.parallel.tensor import Tensor

    return [Tensor.__init__]


@technique(
    "parallel",
    "deepspeed",
    engines=BY_TRAINER,
    how=(
        "The Trainer hands the step to DeepSpeed's engine, which is ZeRO stage 1: every process "
        "has the whole model, its own micro-batches and a share of the optimizer. It is no "
        "pipeline, whatever it has been called."
    ),
    yours='arguments = TrainingArguments("out", deepspeed="zero1.json")',
)
def deepspeed():
    from qa_lib.train.trainer import train

    return [train]


@technique(
    "parallel",
    "ddp",
    "ddp-bf16",
    how=(
        "Each process has the whole model and a part of the step's micro-batches. PyTorch's "
        "DistributedDataParallel averages the gradients in buckets while the backward pass still "
        "computes others."
    ),
    yours="model = DistributedDataParallel(model)  # in each process that torchrun starts",
)
def ddp():
    from qa_lib.train.parallel.data_parallel import DDP

    return [DDP]


@technique(
    "parallel",
    "ddp",
    engines=BY_TRAINER,
    how=(
        "Each process has the whole model and a part of the step's micro-batches. Under torchrun "
        "the Trainer puts the model into PyTorch's DistributedDataParallel by itself, which "
        "averages the gradients while the backward pass still computes others."
    ),
    yours="Trainer(model, arguments, train_dataset=samples).train()  # started by torchrun",
)
def ddp_by_the_trainer():
    from qa_lib.train.trainer import train

    return [train]


@technique(
    "schedule",
    "1f1b",
    "interleaved",
    how=IN_ORDER,
    yours="""\
schedule = ScheduleInterleaved1F1B(my_stages, n_microbatches=8, loss_fn=loss_of)
schedule.step(inputs)  # from torch.distributed.pipelining
""",
)
def pipeline_schedule():
    from qa_lib.train.parallel.pipeline import Pipeline

    return [Pipeline._build_schedule]


# Faults, on purpose.


@technique(
    "fault",
    "positional-join",
    how=(
        "The reference project's predictions came back sorted by length, and were read in the "
        "order of the questions. Here the same fault is made on purpose, to show what it does to "
        "F1."
    ),
    yours="answers = dict(zip(ids, predictions))  # the predictions are sorted by length",
)
def positional_join():
    from qa_lib.score.evaluate import joined_by_position

    return [joined_by_position]


@technique(
    "fault",
    "nvidia-smi-polling",
    engines=BY_TRAINER,
    how=(
        "Every process starts nvidia-smi after every step and waits for it. It shows what "
        "measuring costs when it is done inside the step."
    ),
    yours='subprocess.run(["nvidia-smi"])  # after every step',
)
def nvidia_smi_polling():
    from qa_lib.train.trainer import _Steps

    return [_Steps]


@technique(
    how=(
        "The baseline's optimizer step, as plain as it can be written. Every variant changes one "
        "thing of it, or of the model and the batches that it gets."
    ),
    yours="""\
scaler.scale(model(**batch).loss).backward()
scaler.step(optimizer)
optimizer.zero_grad()
""",
)
def baseline():
    from qa_lib.train.loop import OptimizerStep

    return [OptimizerStep.__call__]
