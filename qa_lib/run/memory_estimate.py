"""How much GPU memory a row will take, from its spec alone: before a card is rented, and without one.

Bytes kept for the backward pass are counted in units of tokens x hidden width, layer by layer: what autograd saves in
an eager layer under autocast, or what the compiler's partitioner keeps of it. Weights, gradients and optimizer state
follow from the model's shapes. Terms that are measured and not derived say so. Rows that pad to the longest of a batch
are taken to meet one of full length, which the two steps of preset `vram` need not.

A language model adds its logits, one for each token and word of the vocabulary, which in a small model outweigh the
layers.
"""

import argparse
import dataclasses
from functools import cached_property

import numpy as np
import pandas as pd
import torch
from transformers import BertConfig

from qa_lib.archive import Run, read_runs
from qa_lib.cli import add_rows, add_size, add_source_arguments, capability, rows_of
from qa_lib.data.load import load_data
from qa_lib.data.packing import PackedBatches
from qa_lib.errors import UserError
from qa_lib.measure.meter import MIB
from qa_lib.model.architectures import embeddings_of, encoder_of, layers_of, layers_passed, trains
from qa_lib.model.build import apply_recipe, model_config
from qa_lib.presets import Preset, find_preset, find_shape
from qa_lib.run.plan import plan
from qa_lib.run.tasks import TASKS
from qa_lib.spec import Machine, Spec, adjust
from qa_lib.variants import Settings

LIBRARIES_MIB = 100  # measured on one H200: workspaces of cuBLAS, and inputs
RESERVED = 1.05  # measured on one H200: what the allocator reserves over its peak, 3 to 8 % more
# Tokens of a feature: the 33 quantiles, from least to most, of the 19,273 features of 19,017 questions of SQuAD v2
# (mostly of its training set; CC BY-SA 4.0) in BERT's uncased vocabulary at 384/128.
QUANTILES = (
    37, 78, 96, 107, 114, 119, 124, 128, 132, 135, 139, 142, 146, 150, 154, 157, 161,
    166, 171, 176, 180, 186, 192, 199, 206, 214, 223, 236, 250, 266, 290, 329, 384,
)  # fmt: skip
QUESTION = 15  # of these tokens, about: a question and what stands around it, which every window repeats
RECOMPUTED_ADAPTERS = 5.5  # measured: bytes that each layer with adapters keeps all the same, as layer_bytes has them
SAME = 0.02  # by so much weights and optimizer state of one model and one code differ, measured and predicted
ROUNDED = "what training on rounded weights keeps for its backward pass is not predicted"
SMALL = 4096  # tensors of fewer elements keep 32-bit moments in the 8-bit optimizer


def _fuses(spec: Spec) -> bool:
    """Whether a compiler decides what is kept; the cudagraphs backend runs PyTorch's own kernels."""
    return spec.settings.compile not in ("none", "cudagraphs")


def layer_bytes(spec: Spec, trained: bool = True) -> float:
    """Bytes a layer keeps for its backward pass, per token and hidden width, without the attention scores; `trained` or
    only passed by gradients."""
    settings, recipe, causal = spec.settings, spec.recipe, spec.preset.task == "lm"
    residual = 2 if settings.half_weights else 4  # autocast's layer norms give fp32
    word = 4 if settings.precision == "fp32" else 2  # bytes of what products give
    # The inputs of the two layer norms and two dropout masks; query, key, value and the attention's output (its input
    # and the output product's are one tensor); the input of GELU, four times as wide.
    kept = 2 * residual + 2 * 1 + 4 * word + 4 * word
    if causal and not _fuses(spec):
        # GPT-2's GELU is an approximation, written out: its input, tanh of a polynomial, and 1 more than that in fp32,
        # and half of the input as it is.
        kept += 4 * 3 * 4
    # A compiler that may repeat elementwise work gets these inputs from what else is kept.
    if recipe.kind in ("all", "top") and trained and settings.activation_checkpointing != "elementwise":
        # The inputs of the products, for the gradients of weights: of query, key and value (without a compiler each
        # has its own half-precision copy, unless they are one product), of the feed-forward's first product, and of its
        # second, GELU's output.
        shared = _fuses(spec) or causal or settings.precision == "fp32"
        kept += (1 if shared else 3) * word + word + 4 * word
    if recipe.kind == "lora":
        # Each adapter drops out on a copy of its input of its own: 2 bytes and a mask, for a width of 1 or 4.
        inputs = {"query": 1, "key": 1, "value": 1, "dense": 1 + 1 + 4}
        wide = sum(inputs[target] for target in recipe.targets)
        kept += 3 * (wide - 2 if causal else wide)  # query, key and value are one product there
    return kept


def _weights(model, spec: Spec) -> int:
    """Bytes of a model's weights on the GPU."""
    each = 2 if spec.settings.half_weights else 4
    small = 0
    if (
        spec.settings.base_quantization == "nf4"
    ):  # of the layers' products: 4 bits, and a scale in fp32 for every 64 (QLoRA)
        small = sum(p.numel() for layer in layers_of(model) for p in layer.parameters() if _in_nf4(p))
    return each * (sum(p.numel() for p in model.parameters()) - small) + round((0.5 + 4 / 64) * small)


def _in_nf4(parameter) -> bool:
    """Whether use_nf4 would hold a layer's parameter in 4 bits."""
    return parameter.ndim == 2 and not parameter.requires_grad


def estimate(spec: Spec, features=None) -> dict:
    """MiB of params, grads, optimizer, activations and workspace, the peak and its phase, and what is reserved.

    For a model that trains on a GPU. `features` are the spec's own unless they are given. Raises UserError for a spec
    without a GPU, and for one that rounds.
    """
    settings, causal = spec.settings, spec.preset.task == "lm"
    if spec.hardware == "cpu":
        raise UserError(f"{spec.variant}: the budget is of GPU memory, and this one is planned for a CPU")
    if settings.qat != "none":
        raise UserError(f"{spec.variant}: {ROUNDED}")
    # Its shapes are the defaults of transformers, which need no network.
    source = spec.model_source
    config = BertConfig() if source == "bert-base-uncased" else model_config(source, spec.preset.task)
    with torch.device("meta"):
        model = apply_recipe(TASKS[spec.preset.task].head.from_config(config), spec.recipe)
    layers, deep = layers_of(model), layers_passed(model)
    embeddings_train = any(map(trains, embeddings_of(model)))
    trained = [p for p in model.parameters() if p.requires_grad]
    count, half = sum(p.numel() for p in trained), settings.half_weights
    each = 2 if half else 4  # bytes of a weight, and of an element of the residual stream
    params, grads = _weights(model, spec), each * count
    # Two moments, and of the masters of half-precision weights what is not in these.
    optimizer = {"adamw-master": 10, "adamw-master-bf16": 6}.get(settings.optimizer, 8) * count
    if settings.optimizer == "adamw-8bit":
        wide = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
        optimizer = sum((8 if p.numel() < SMALL or p in wide else 2) * p.numel() for p in trained)
    tokens = _tokens(spec, features)
    unit = tokens * config.hidden_size
    eager_attention = settings.attention == "eager" and settings.padding != "packed"
    scores = tokens * config.num_attention_heads * spec.preset.max_length if eager_attention else 0
    by_layers = settings.activation_checkpointing is True
    compiled, word = _fuses(spec), 4 if settings.precision == "fp32" else 2
    # Softmax in fp32, its dropout in the products' precision and the mask of that.
    per_layer = [layer_bytes(spec, trains(one)) * unit + (4 + word + 1) * scores for one in layers[-deep:]]
    layer = max(per_layer)
    inputs = deep * (each + RECOMPUTED_ADAPTERS * (spec.recipe.kind == "lora")) * unit
    kept = inputs + layer if by_layers else sum(per_layer)
    if embeddings_train:
        kept += (1 if causal else 9) * unit  # dropout; and BERT's layer norm and sum
    # At the start of the backward pass, beside all that is kept: compiled, the gradients of GELU's input and of the
    # residual, and measured, twice as much in a layer that is recomputed, or GELU's output again; eager, measured in
    # half precision, about three times as much and the gradients of the scores.
    repeated = {False: 0, "elementwise": 8, True: 12}[settings.activation_checkpointing]
    temporary = (12 + repeated) * unit if compiled else 34 * unit + 2 * scores
    # Autocast's copies of the weights that gradients pass through; one layer's at a time where layers are recomputed.
    # Weights in 4 bits are made whole anew for every product, one at a time.
    if settings.base_quantization == "nf4":
        temporary += word * max(p.numel() for p in layers[0].parameters() if _in_nf4(p))
    one_layer = sum(
        p.numel() for p in layers[0].parameters() if not (settings.base_quantization == "nf4" and _in_nf4(p))
    )
    casts = 0 if half or word == 4 else 2 * one_layer * (1 if by_layers else deep)
    again = spec.accumulation > 1  # the gradients of earlier micro-batches are there in the next one's passes
    lasting = params + optimizer + LIBRARIES_MIB * MIB
    foreach = 4 * count if settings.optimizer == "adamw" and not half else 0  # its denominators, all at once
    begins, ends = kept + temporary, 0
    if causal:
        words = model.get_submodule(encoder_of(model).head).weight
        casts += 0 if half or word == 4 else 2 * words.numel()
        # The backward pass begins with the loss, before the layers' own work. Compiled, with the logits, which their
        # gradients write over; under the Trainer, whose compiled model returns the logits, with both and with zeros in
        # place of a gradient from outside (train/compile.py). Eager, in fp32, with the logarithms of softmax and
        # the gradients of these and of their input.
        copies = 1 if settings.engine == "loop" else 3
        loss = (copies * word if compiled else 3 * 4) * tokens * config.vocab_size
        loss += (each + word) * unit  # the inputs of the last layer norm and of the head
        begins = max(begins, kept - (layer if by_layers else 0) + loss)
        # The head is the embeddings, which come by their gradients from both ends.
        ends = each * words.numel() if words.requires_grad else 0
    phases = {
        "forward and backward": lasting + casts + begins + again * grads,
        # A compiled backward pass returns its gradients beside those that it adds to.
        "end of backward": lasting + grads + ends + (grads if again and compiled else 0),
        "optimizer": lasting + grads + foreach,
    }
    phase = max(phases, key=phases.get)
    sizes = {
        "params": params,
        "grads": grads,
        "optimizer": optimizer,
        "activations": kept,
        "workspace": LIBRARIES_MIB * MIB + casts + begins - kept,
        "peak": phases[phase],
        "reserved": RESERVED * phases[phase],
    }
    return {f"{name}_mib": size / MIB for name, size in sizes.items()} | {"phase": phase}


class SquadLengths:
    """SQuAD v2's training features by their lengths alone, as far as QUANTILES tell: windows of at most `max_length`
    tokens, of which neighbours share `stride`."""

    def __init__(self, max_length: int, stride: int):
        """UserError for windows that a question and the shared tokens fill."""
        if max_length <= QUESTION + stride:
            raise UserError(f"{max_length} tokens are too few for a question and the {stride} that windows share")
        self.max_length, self.stride = max_length, stride

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 [n]: tokens of each."""
        places, known = np.linspace(0, 1, 131_754), np.linspace(0, 1, len(QUANTILES))
        whole = np.interp(places, known, QUANTILES).round().astype(int)
        # A window that is too long becomes full ones, each of which moves on by what it does not share, and a rest.
        step = self.max_length - QUESTION - self.stride
        full = np.maximum(0, -(-(whole - self.max_length) // step))
        return np.concatenate([whole - full * step, np.full(full.sum(), self.max_length)])

    def __len__(self) -> int:
        return len(self.lengths)


def _tokens(spec: Spec, features) -> int:
    """Tokens of a micro-batch; where padding is less than the limit this takes the data's lengths."""
    if spec.settings.padding == "packed":
        return PackedBatches(features or load_data(spec).samples, spec).budget
    return spec.settings.micro_batch * spec.preset.max_length  # a batch of the longest comes up in any epoch


def gpu_of(sm: int) -> Machine:
    """A GPU of that compute capability with everything installed, for plans made where there is none."""
    backends = ("inductor", "aot_eager", "cudagraphs")
    return Machine(
        "gpu", gpus=1, sm=sm, backends=backends, bitsandbytes=True, deepspeed=True, torchao=True, compiler=True
    )


def predicted(runs: pd.DataFrame, model: str = "") -> pd.Series:
    """Of runs (report.runs.load_runs) the peak in MiB that `estimate` gives, by their index; NaN for one on a CPU, for
    one that an older optimizer made, and for one whose weights take another size than those of `model`, a folder or a
    name; without it, the record's own."""
    peaks, cached = {}, {}
    for index, run in runs["run"].items():
        entry = run.record
        spec = _spec_of(entry, model)
        # Of every seed.
        key = repr((spec.asked, spec.settings, spec.preset, spec.model_source, spec.world, spec.stages))
        if key not in cached:
            can = spec.hardware != "cpu" and spec.settings.qat == "none" and spec.model_source
            cached[key] = estimate(spec, _known_lengths(spec)) if can else None
        if cached[key] and _lasts_as(cached[key], entry):
            peaks[index] = cached[key]["peak_mib"]
    return pd.Series(peaks, runs.index, dtype=float)


def _lasts_as(budget: dict, entry: dict) -> bool:
    """Whether weights and optimizer state of a record are as large as the budget has them, or not known."""
    measured = [entry["memory"][name] for name in ("params_mib", "optimizer_mib")]
    own = budget["params_mib"] + budget["optimizer_mib"]
    return None in measured or abs(own - sum(measured)) < SAME * sum(measured)


def _spec_of(entry: dict, model: str) -> Spec:
    """A record's spec, as far as memory depends on it."""
    given, name = entry["spec"], entry["model"]["name"]
    asked, preset = (
        kind(**{field.name: values[field.name] for field in dataclasses.fields(kind) if field.name in values})
        for kind, values in ((Settings, given["settings"]), (Preset, given["preset"]))
    )
    settings, adjusted = adjust(asked, gpu_of(given["sm"] or entry["env"]["sm"]))
    source = model or (name if name == "tiny" or find_shape(name) else preset.model)
    return Spec(
        variant=given["variant"], preset=preset, seed=given["seed"], asked=asked, settings=settings, adjusted=adjusted,
        skip=None, hardware=given["hardware"], data=entry["data"], model=entry["model"],
        data_source=entry["data"]["name"], model_source=source, world=given["world"], stages=given["stages"] or 1,
    )  # fmt: skip


def _known_lengths(spec: Spec) -> SquadLengths | None:
    """Those of SQuAD v2 for a spec of questions that are not generated."""
    generated = spec.data_source.startswith("synthetic:")
    return None if generated else SquadLengths(spec.preset.max_length, spec.preset.stride)


EXAMPLE = """examples:
  python -m qa_lib memory A1 C1 C2 E-moments --preset bench --data squad/ --model bert/ --micro-batch 32
  python -m qa_lib memory L1 L-dropout --preset lm-sizing --max-length 1024 16384"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m qa_lib memory`."""
    add_rows(parser, "variants")
    parser.add_argument("--compute-capability", type=capability, default=90, metavar="X.Y", help="of the GPU (9.0)")
    add_source_arguments(parser, several=True)
    add_size(parser, "--max-length", several=True)


def main(args: argparse.Namespace) -> int:
    """Print the budget of each row for a GPU of that kind, and what a record here measured."""
    preset = find_preset(args.preset)
    known = not args.data and preset.data == "squad_v2"
    data = "synthetic:1" if known or preset.task == "lm" else args.data  # nothing is fetched that is not asked for
    gpu = gpu_of(args.compute_capability)
    specs = plan(rows_of(args), args.preset, [0], data, args.model, args.micro_batch, gpu, max_length=args.max_length)
    runs = read_runs(args.runs, left_out=lambda *_: None)
    heads = ("params", "grads", "optimizer", "activations", "workspace", "peak", "reserved")
    print(f"{'row':12}{'length':>7}{'micro-batch':>12}" + "".join(f"{head:>12}" for head in heads), end="")
    print("    measured  peak in")
    for spec in specs:
        if spec.skip or spec.settings.qat != "none":
            print(f"{spec.variant:12}{spec.skip or ROUNDED}")
            continue
        found = estimate(spec, SquadLengths(spec.preset.max_length, spec.preset.stride) if known else None)
        print(
            f"{spec.variant:12}{spec.preset.max_length:7}{spec.settings.micro_batch:12}"
            + "".join(f"{found[f'{head}_mib']:12,.0f}" for head in heads)
            + f"{_measured(spec, found, runs):>12}  {found['phase']}"
        )  # fmt: skip
    print("MiB of GPU memory; beside it a process has a CUDA context of 300 to 600 MiB.")
    return 0


def _measured(spec: Spec, budget: dict, runs: list[Run]) -> str:
    """The peak of a run with these settings, this model and this optimizer on whichever GPU, as text."""
    asked = dataclasses.asdict(spec.asked)
    for entry in (run.record for run in runs):
        own = entry["spec"]
        same = (own["variant"], own["preset"]["name"], own["settings"]) == (spec.variant, spec.preset.name, asked)
        same &= (own["preset"]["max_length"], entry["model"]["name"]) == (spec.preset.max_length, spec.model["name"])
        if same and _lasts_as(budget, entry) and (peak := entry["memory"]["peak_alloc_mib"]):
            return f"{peak:,.0f}"
    return "–"
