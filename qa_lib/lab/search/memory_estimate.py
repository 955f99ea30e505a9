"""How much GPU memory a variant will take, from its spec alone: before a card is rented, and without one.

`StepMemory` adds it up, piece by piece. Weights, gradients and optimizer state follow from the model's shapes. What
the backward pass needs is counted layer by layer, in bytes per token and hidden width: what autograd saves in an eager
layer under autocast, or what the compiler's partitioner keeps of it. Terms that are measured and not derived say so. A
variant that pads to the longest of a batch is taken to meet one of full length, which the two steps of preset `vram`
need not.

A language model adds its logits, one for each token and word of the vocabulary. In a small model they outweigh the
layers.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import torch
from transformers import BertConfig

from qa_lib.data.load import load_data
from qa_lib.data.packing import PackedBatches
from qa_lib.errors import UserError
from qa_lib.kernels.linear_cross_entropy import PART
from qa_lib.measure.meter import MIB
from qa_lib.model.architectures import (
    embeddings_of,
    encoder_of,
    find_encoder,
    layers_of,
    layers_passed,
    trains,
)
from qa_lib.model.build import HEADS, apply_recipe, model_config
from qa_lib.spec.machine import Machine
from qa_lib.spec.presets import Preset
from qa_lib.spec.rules import adjust
from qa_lib.spec.settings import Settings
from qa_lib.spec.shapes import find_shape
from qa_lib.spec.spec import Spec

LIBRARIES_MIB = 100  # measured on one H200: workspaces of cuBLAS, and inputs
RESERVED = 1.05  # measured on one H200: what the allocator reserves over its peak, 3 to 8 % more
QUANTILES = np.loadtxt(Path(__file__).with_name("squad_lengths.csv"))  # of the tokens of a sample
QUESTION = (
    15  # of these tokens, about: a question and what stands around it, which every window repeats
)
RECOMPUTED_ADAPTERS = (
    5.5  # measured: bytes that each layer with adapters keeps all the same, as layer_bytes has them
)
SAME = 0.02  # by so much weights and optimizer state of one model and one code differ, measured and predicted
UNKNOWN = "what {} keeps for its backward pass is not predicted"  # is said of these:
SMALL = 4096  # tensors of fewer elements keep 32-bit moments in the 8-bit optimizer


class StepMemory:
    """Bytes on a GPU in a training step of a spec whose micro-batch has so many tokens, piece by piece."""

    def __init__(self, spec: Spec, tokens: int):
        self.spec, self.settings, self.causal, self.tokens = (
            spec,
            spec.settings,
            spec.preset.task == "lm",
            tokens,
        )
        self.config = config_of(spec)
        with torch.device("meta"):
            self.model = apply_recipe(HEADS[spec.preset.task].from_config(self.config), spec.recipe)
        layers = layers_of(self.model)
        self.deep = layers_passed(self.model)
        self.passed, self.first = layers[-self.deep :], list(layers[0].parameters())
        nf4 = self.settings.base_quantization == "nf4"
        self.in_nf4 = {
            p
            for layer in layers
            for p in layer.parameters()
            if nf4 and p.ndim == 2 and not p.requires_grad
        }
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.unit = tokens * self.config.hidden_size
        self.word = (
            4 if self.settings.precision == "fp32" else 2
        )  # bytes of an element that a GEMM gives
        # Whether elementwise work is fused, by a compiler or in kernels of our own, and little of it kept.
        self.fused = (
            self.settings.compile not in ("none", "cudagraphs") or self.settings.norms == "fused"
        )
        # Bytes of an element of a weight, and of the residual stream: autocast's norms give fp32.
        self.element = (
            2 if self.settings.half_weights or self.settings.precision == "pure-bf16" else 4
        )
        self.by_layers = self.settings.activation_checkpointing is True

    def weights(self) -> int:
        """The weights; those in NF4 take 4 bits each, and a scale in fp32 for every 64 (QLoRA)."""
        small = _elements(self.in_nf4)
        return self.element * (_elements(self.model.parameters()) - small) + round(
            (0.5 + 4 / 64) * small
        )

    def gradients(self) -> int:
        """A gradient for each weight that trains."""
        return self.element * _elements(self.trained)

    def optimizer(self) -> int:
        """Adam's two moments, and of half-precision weights what their fp32 masters have beside them."""
        if self.settings.optimizer == "adamw-8bit":
            wide = {m.weight for m in self.model.modules() if isinstance(m, torch.nn.Embedding)}
            return sum(
                (8 if p.numel() < SMALL or p in wide else 2) * p.numel() for p in self.trained
            )
        each = {
            "adamw-master": 10,
            "adamw-master-bf16": 6,
            "adamw-master-8bit": 4,
            "adamw": 2 * self.element,
        }
        return each.get(self.settings.optimizer, 8) * _elements(self.trained)

    def scores(self) -> int:
        """Elements of a layer's attention scores, where they are written to memory."""
        written = self.settings.attention == "eager" and self.settings.padding != "packed"
        return (
            self.tokens * self.config.num_attention_heads * self.spec.preset.max_length
            if written
            else 0
        )

    def layer_bytes(self, trained: bool = True) -> float:
        """Bytes a layer keeps for its backward pass, per token and hidden width, without the attention scores;
        `trained` or only passed by gradients."""
        settings, recipe, causal, word = self.settings, self.spec.recipe, self.causal, self.word
        # The inputs of the two layer norms and the dropouts' masks; query, key, value and the attention's output, which
        # is the input of the next linear layer; the input of GELU, four times as wide.
        kept = 2 * self.element + len(encoder_of(self.model).dropouts) * 1 + 4 * word + 4 * word
        if causal and not self.fused:
            # GPT-2's GELU is an approximation, written out: its input, tanh of a polynomial, and 1 more than that in
            # fp32, and half of the input as it is.
            kept += 4 * 3 * 4
        # A compiler that may repeat elementwise work gets these inputs from what else is kept.
        if (
            recipe.kind in ("all", "top")
            and trained
            and settings.activation_checkpointing != "elementwise"
        ):
            # The inputs of the linear layers, for the gradients of weights: of query, key and value (without a compiler
            # each has its own half-precision copy, unless they are one layer), of the feed-forward's first layer, and
            # of its second, GELU's output, which a block in 8 bits computes again (kernels/gelu.py).
            shared = self.fused or causal or settings.precision == "fp32"
            kept += (1 if shared else 3) * word + word + 4 * word * (settings.feed_forward != "fp8")
        if recipe.kind == "lora":
            # Each adapter drops out on a copy of its input of its own: 2 bytes and a mask, for a width of 1 or 4.
            inputs = {"query": 1, "key": 1, "value": 1, "dense": 1 + 1 + 4}
            wide = sum(inputs[target] for target in recipe.targets)
            kept += 3 * (
                wide - 2 if causal else wide
            )  # query, key and value are one linear layer there
        return kept

    def activations(self) -> tuple[float, float]:
        """What the forward pass leaves for the backward pass: in all, and of it one layer that is whole."""
        # Of the scores: softmax in fp32, its dropout in the precision of GEMMs and the mask of that.
        per_score = 4 + self.word + 1
        each = [
            self.layer_bytes(trains(one)) * self.unit + per_score * self.scores()
            for one in self.passed
        ]
        kept, layer = sum(each), max(each)
        if self.by_layers:  # their inputs, and of one layer at a time all
            adapters = RECOMPUTED_ADAPTERS * (self.spec.recipe.kind == "lora")
            kept = self.deep * (self.element + adapters) * self.unit + layer
        if any(map(trains, embeddings_of(self.model))):
            kept += (1 if self.causal else 9) * self.unit  # dropout; and BERT's layer norm and sum
        return kept, layer

    def temporary(self) -> int:
        """What the start of the backward pass takes beside all that is kept.

        Fused: the gradients of GELU's input and of the residual, and measured, twice as much in a layer that is
        recomputed, or GELU's output again. Eager: measured in half precision, about three times as much and the
        gradients of the scores. Weights in 4 bits are made whole anew for every GEMM, one at a time.
        """
        repeated = {False: 0, "elementwise": 8, True: 12}[self.settings.activation_checkpointing]
        taken = (12 + repeated) * self.unit if self.fused else 34 * self.unit + 2 * self.scores()
        return taken + self.word * max(
            (p.numel() for p in self.first if p in self.in_nf4), default=0
        )

    def casts(self) -> int:
        """Autocast's copies of the weights that gradients pass through, one layer's at a time where layers are
        recomputed; and of a language model's head."""
        if self.element == 2 or self.word == 4:
            return 0
        layer = _elements(p for p in self.first if p not in self.in_nf4)
        return 2 * layer * (1 if self.by_layers else self.deep) + (
            2 * self.words().numel() if self.causal else 0
        )

    def words(self) -> torch.nn.Parameter:
        """The weight of a language model's head."""
        return self.model.get_submodule(encoder_of(self.model).head).weight

    def loss(self) -> int:
        """What a language model's backward pass begins with, before the layers' own work.

        Compiled, the logits, which their gradients write over; under the Trainer, whose compiled model returns the
        logits, both and zeros in place of a gradient from outside (train/compile.py). Eager, in fp32, the logarithms of
        softmax and the gradients of these and of their input. And the inputs of the last layer norm and of the head.
        In parts, those of one part, in 8 bits as well where asked for, the gradients of the hidden states and of the
        weight, and the latter's sum in fp32.
        """
        if self.settings.loss != "native":
            each = 3 if self.settings.loss == "chunked-fp8" else 2
            logits = each * min(PART, self.tokens) * self.config.vocab_size
            return (
                logits
                + (4 + self.element) * self.words().numel()
                + (self.element + 2 * self.word) * self.unit
            )
        copies = 3 if self.settings.engine == "trainer" else 1
        logits = copies * self.word if self.fused else 3 * 4
        return (
            logits * self.tokens * self.config.vocab_size + (self.element + self.word) * self.unit
        )

    def backward_begins(self) -> float:
        """The most that activations and temporaries take together."""
        kept, layer = self.activations()
        most = kept + self.temporary()
        return (
            max(most, kept - (layer if self.by_layers else 0) + self.loss())
            if self.causal
            else most
        )

    def phases(self) -> dict[str, float]:
        """The peak of each phase of a step."""
        gradients = self.gradients()
        lasting = self.weights() + self.optimizer() + LIBRARIES_MIB * MIB
        again = (
            self.spec.accumulation > 1
        )  # the gradients of earlier micro-batches are there in the next one's passes
        # A language model's head is its embeddings, which come by their gradients from both ends.
        tied = (
            self.element * self.words().numel() if self.causal and self.words().requires_grad else 0
        )
        # PyTorch's default AdamW has its denominators all at once.
        foreach = self.settings.optimizer == "adamw" and self.settings.engine != "plain"
        return {
            "forward and backward": lasting
            + self.casts()
            + self.backward_begins()
            + again * gradients,
            # A compiled backward pass returns its gradients beside those that it adds to.
            "end of backward": lasting
            + gradients
            + tied
            + (gradients if again and self.fused else 0),
            "optimizer": lasting + gradients + (4 * _elements(self.trained) if foreach else 0),
        }


def config_of(spec: Spec):
    """The configuration of a spec's model."""
    # Its shapes are the defaults of transformers, which need no network.
    source = spec.model_source
    return BertConfig() if source == "bert-base-uncased" else model_config(source, spec.preset.task)


def unpredicted(spec: Spec) -> str | None:
    """Why the memory of a spec is not known, in words; None if it is."""
    if spec.settings.qat != "none":
        return UNKNOWN.format("training on rounded weights")
    kind = config_of(spec).model_type
    return (
        None
        if find_encoder(kind, spec.model_source, spec.preset.task).memory_known
        else UNKNOWN.format(kind)
    )


def _elements(parameters) -> int:
    return sum(p.numel() for p in parameters)


def estimate(spec: Spec, samples=None) -> dict:
    """MiB of params, grads, optimizer, activations and workspace, the peak and its phase, and what is reserved.

    For a model that trains on a GPU. `samples` are the spec's own unless they are given. Raises UserError for a spec
    without a GPU, and for what is `unpredicted`.
    """
    if spec.hardware == "cpu":
        raise UserError(
            f"{spec.variant}: the estimate is of GPU memory, and this one is planned for a CPU"
        )
    if why := unpredicted(spec):
        raise UserError(f"{spec.variant}: {why}")
    step = StepMemory(spec, _tokens(spec, samples))
    kept, phases = step.activations()[0], step.phases()
    phase = max(phases, key=phases.get)
    sizes = {
        "params": step.weights(),
        "grads": step.gradients(),
        "optimizer": step.optimizer(),
        "activations": kept,
        "workspace": LIBRARIES_MIB * MIB + step.casts() + step.backward_begins() - kept,
        "peak": phases[phase],
        "reserved": RESERVED * phases[phase],
    }
    return {f"{name}_mib": size / MIB for name, size in sizes.items()} | {"phase": phase}


class SquadLengths:
    """SQuAD v2's training samples by their lengths alone, as far as QUANTILES tell: windows of at most `max_length`
    tokens, of which neighbours share `stride`."""

    def __init__(self, max_length: int, stride: int):
        """UserError for windows that a question and the shared tokens fill."""
        if max_length <= QUESTION + stride:
            raise UserError(
                f"{max_length} tokens are too few for a question and the {stride} that windows share"
            )
        places, known = np.linspace(0, 1, 131_754), np.linspace(0, 1, len(QUANTILES))
        whole = np.interp(places, known, QUANTILES).round().astype(int)
        # A window that is too long becomes full ones, each of which moves on by what it does not share, and a rest.
        step = max_length - QUESTION - stride
        full = np.maximum(0, -(-(whole - max_length) // step))
        self.lengths = np.concatenate(
            [whole - full * step, np.full(full.sum(), max_length)]
        )  # int64 [n]

    def __len__(self) -> int:
        return len(self.lengths)


def _tokens(spec: Spec, samples) -> int:
    """Tokens of a micro-batch; where padding is less than the limit this takes the data's lengths."""
    if spec.settings.padding == "packed":
        return PackedBatches(samples or load_data(spec).samples, spec).budget
    return (
        spec.settings.micro_batch * spec.preset.max_length
    )  # a batch of the longest comes up in any epoch


def gpu_of(sm: int) -> Machine:
    """A GPU of that compute capability with everything installed, for plans made where there is none."""
    installed = dict.fromkeys(("bitsandbytes", "deepspeed", "peft", "torchao", "compiler"), True)
    return Machine("gpu", gpus=1, sm=sm, **installed)


def predicted(runs: pd.DataFrame, model: str = "") -> pd.Series:
    """Of runs (report.runs.load_runs) the peak in MiB that `estimate` gives, by their index; NaN for one on a CPU, for
    one that an older optimizer made, and for one whose weights take another size than those of `model`, a folder or a
    name; without it, the record's own."""
    peaks, estimates = {}, {}
    for index, run in runs["run"].items():
        spec = _spec_of(run.record, model)
        if spec.hardware == "cpu" or not spec.model_source or unpredicted(spec):
            continue
        if (key := repr(spec)) not in estimates:
            generated = spec.data_source.startswith("synthetic:")
            lengths = (
                None if generated else SquadLengths(spec.preset.max_length, spec.preset.stride)
            )
            estimates[key] = estimate(spec, lengths)
        if _lasts_as(estimates[key], run.record):
            peaks[index] = estimates[key]["peak_mib"]
    return pd.Series(peaks, runs.index, dtype=float)


def _lasts_as(found: dict, entry: dict) -> bool:
    """Whether weights and optimizer state of a record are as large as the estimate has them, or not known."""
    measured = [entry["memory"][name] for name in ("params_mib", "optimizer_mib")]
    own = found["params_mib"] + found["optimizer_mib"]
    return None in measured or abs(own - sum(measured)) < SAME * sum(measured)


def _spec_of(entry: dict, model: str) -> Spec:
    """A record's spec, as far as memory depends on it: the same for all seeds."""
    given, name = entry["spec"], entry["model"]["name"]
    asked, preset = Settings(**given["settings"]), Preset(**given["preset"])
    settings, adjusted = adjust(asked, gpu_of(given["sm"] or entry["env"]["sm"]))
    source = model or (name if name == "tiny" or find_shape(name) else preset.model)
    return Spec(
        variant=given["variant"], preset=preset, seed=0, asked=asked, settings=settings, adjusted=adjusted, skip=None,
        hardware=given["hardware"], data=entry["data"], model=entry["model"], data_source=entry["data"]["name"],
        model_source=source, world=given["world"], stages=given["stages"] or 1,
    )  # fmt: skip
