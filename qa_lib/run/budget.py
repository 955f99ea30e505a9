"""How much GPU memory a row will take, from its spec alone: before a card is rented, and without one.

Bytes kept for the backward pass are counted in units of tokens x hidden width, layer by layer: what autograd saves in
an eager layer under autocast, or what the compiler's partitioner keeps of it. Weights, gradients and optimizer state
follow from the model's shapes. Terms that are measured and not derived say so. Adapters under recomputation are the
one case known to come out low: EB1-lean at micro-batch 32 by 19 %.
"""

import argparse
import dataclasses
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForQuestionAnswering, BertConfig

from qa_lib.data.load import load_data
from qa_lib.data.packing import PackedBatches
from qa_lib.errors import UserError
from qa_lib.measure.meter import MIB
from qa_lib.model.build import apply_recipe, model_config
from qa_lib.model.encoders import embeddings_of, layers_of, layers_passed, trains
from qa_lib.record import RecordError, read_record
from qa_lib.run.plan import add_rows, add_source_arguments, plan, rows_of
from qa_lib.spec import Machine, Spec, find_scale

LIBRARIES_MIB = 120  # measured on one H200: workspaces of cuBLAS, and inputs
RESERVED = 1.05  # measured on one H200: what the allocator reserves over its peak, 3 to 8 % more
# Tokens of a feature: the 33 quantiles, from least to most, of the 19,273 features of 19,017 questions of SQuAD v2
# (mostly of its training set; CC BY-SA 4.0) in BERT's uncased vocabulary at 384/128.
QUANTILES = (
    37, 78, 96, 107, 114, 119, 124, 128, 132, 135, 139, 142, 146, 150, 154, 157, 161,
    166, 171, 176, 180, 186, 192, 199, 206, 214, 223, 236, 250, 266, 290, 329, 384,
)  # fmt: skip
SMALL = 4096  # tensors of fewer elements keep 32-bit moments in the 8-bit optimizer


def _fuses(spec: Spec) -> bool:
    """Whether a compiler decides what is kept; the cudagraphs backend runs PyTorch's own kernels."""
    return spec.settings.compile not in ("none", "cudagraphs")


def layer_bytes(spec: Spec) -> float:
    """Bytes a layer keeps for its backward pass, per token and hidden width, without the attention scores."""
    settings, recipe = spec.settings, spec.recipe
    residual = 2 if settings.half_weights else 4  # autocast's layer norms give fp32
    # The inputs of the two layer norms and two dropout masks; query, key, value and the attention's output in half
    # precision (its input and the output product's are one tensor); the input of GELU, four times as wide.
    kept = 2 * residual + 2 * 1 + 4 * 2 + 4 * 2
    if recipe.kind in ("all", "top"):
        # The inputs of the products, for the gradients of weights: of query, key and value (without a compiler each
        # has its own half-precision copy), of the feed-forward's first product, and of its second, GELU's output.
        kept += (2 if _fuses(spec) else 6) + 2 + 4 * 2
    if recipe.kind == "lora":
        # Each adapter drops out on a copy of its input of its own: 2 bytes and a mask, for a width of 1 or 4.
        inputs = {"query": 1, "key": 1, "value": 1, "dense": 1 + 1 + 4}
        kept += 3 * sum(inputs[target] for target in recipe.targets)
    return kept


def estimate(spec: Spec, features=None) -> dict:
    """MiB of params, grads, optimizer, activations and workspace, the peak and its phase, and what is reserved.

    For a model that trains in half precision, that is, on a GPU. `features` are the spec's own unless they are given.
    Raises UserError for a spec without a GPU.
    """
    settings = spec.settings
    if spec.scale.task != "qa":
        raise UserError(f"{spec.variant}: the budget knows question answering alone")
    if settings.precision == "fp32":
        raise UserError(f"{spec.variant}: the budget is of GPU memory, and this one is planned for a CPU")
    # Its shapes are the defaults of transformers, which need no network.
    config = BertConfig() if spec.model_source == "bert-base-uncased" else model_config(spec.model_source)
    with torch.device("meta"):
        model = apply_recipe(AutoModelForQuestionAnswering.from_config(config), spec.recipe)
    layers, deep = layers_of(model), layers_passed(model)
    embeddings_train = any(map(trains, embeddings_of(model)))
    trained = [p for p in model.parameters() if p.requires_grad]
    count, half = sum(p.numel() for p in trained), settings.half_weights
    each = 2 if half else 4  # bytes of a weight, and of an element of the residual stream
    params, grads = each * sum(p.numel() for p in model.parameters()), each * count
    optimizer = 12 * count if half else 8 * count  # two moments, and the masters of half-precision weights
    if settings.optimizer == "adamw8bit":
        wide = {m.weight for m in model.modules() if isinstance(m, torch.nn.Embedding)}
        optimizer = sum((8 if p.numel() < SMALL or p in wide else 2) * p.numel() for p in trained)
    tokens = _tokens(spec, features)
    unit = tokens * config.hidden_size
    eager_attention = settings.attention == "eager" and settings.padding != "packed"
    scores = tokens * config.num_attention_heads * spec.scale.max_length if eager_attention else 0
    compiled = _fuses(spec)
    # Softmax in fp32, its half-precision dropout and the mask of that.
    layer = layer_bytes(spec) * unit + 7 * scores
    inputs = deep * each * unit
    kept = inputs + layer if settings.checkpointing else deep * layer
    if embeddings_train:
        kept += 9 * unit  # layer norm, dropout, sum
    # At the start of the backward pass, beside all that is kept: compiled, the gradients of GELU's input and of the
    # residual; eager, measured, about three times as much and the gradients of the scores.
    temporary = 12 * unit if compiled else 34 * unit + 2 * scores
    # Autocast's copies of the weights that gradients pass through; one layer's at a time where layers are recomputed.
    one_layer = sum(p.numel() for p in layers[0].parameters())
    casts = 0 if half else 2 * one_layer * (1 if settings.checkpointing else deep)
    again = spec.accumulation > 1  # the gradients of earlier micro-batches are there in the next one's passes
    lasting = params + optimizer + LIBRARIES_MIB * MIB
    foreach = 4 * count if settings.optimizer == "adamw" and not half else 0  # its denominators, all at once
    phases = {
        "forward and backward": lasting + casts + kept + temporary + again * grads,
        # A compiled backward pass returns its gradients beside those that it adds to.
        "end of backward": lasting + grads + (grads if again and compiled else 0),
        "optimizer": lasting + grads + foreach,
    }
    phase = max(phases, key=phases.get)
    sizes = {
        "params": params,
        "grads": grads,
        "optimizer": optimizer,
        "activations": kept,
        "workspace": LIBRARIES_MIB * MIB + casts + temporary,
        "peak": phases[phase],
        "reserved": RESERVED * phases[phase],
    }
    return {f"{name}_mib": size / MIB for name, size in sizes.items()} | {"phase": phase}


class SquadLengths:
    """SQuAD v2's training features at 384/128 by their lengths alone, as far as QUANTILES tell."""

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 [n]: tokens of each."""
        places, known = np.linspace(0, 1, 131_754), np.linspace(0, 1, len(QUANTILES))
        return np.interp(places, known, QUANTILES).round().astype(int)

    def __len__(self) -> int:
        return len(self.lengths)


def _tokens(spec: Spec, features) -> int:
    """Tokens of a micro-batch; where padding is less than the limit this takes the data's lengths."""
    if spec.settings.padding == "packed":
        return PackedBatches(features or load_data(spec).features, spec).budget
    return spec.settings.micro_batch * spec.scale.max_length  # a batch of the longest comes up in any epoch


def gpu_of(sm: int) -> Machine:
    """A GPU of that compute capability with everything installed, for plans made where there is none."""
    backends = ("inductor", "aot_eager", "cudagraphs")
    return Machine("gpu", gpus=1, sm=sm, backends=backends, bitsandbytes=True, compiler=True)


EXAMPLE = "example: python -m qa_lib memory A1 C1 C2 E-best --scale bench --data squad/ --model bert/ --micro-batch 32"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m qa_lib memory`."""
    add_rows(parser, "variants")
    parser.add_argument("--sm", type=int, default=90, metavar="N", help="its compute capability x 10 (default: 90)")
    add_source_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Print the budget of each row for a GPU of that kind, and what a record here measured."""
    squad = not args.data and find_scale(args.scale).data == "squad_v2"
    data = "synthetic:1" if squad else args.data  # of SQuAD the lengths are known, and nothing is fetched
    specs = plan(rows_of(args), args.scale, [0], data, args.model, args.micro_batch, gpu_of(args.sm))
    heads = ("params", "grads", "optimizer", "activations", "workspace", "peak", "reserved")
    print(f"{'row':12}{'micro-batch':>11}" + "".join(f"{head:>12}" for head in heads) + "    measured  peak in")
    for spec in specs:
        if spec.skip:
            print(f"{spec.variant:12}{spec.skip}")
            continue
        found = estimate(spec, SquadLengths() if squad else None)
        print(
            f"{spec.variant:12}{spec.settings.micro_batch:11}"
            + "".join(f"{found[f'{head}_mib']:12,.0f}" for head in heads)
            + f"{_measured(spec, args.runs):>12}  {found['phase']}"
        )  # fmt: skip
    print("MiB of GPU memory; beside it a process has a CUDA context of 300 to 600 MiB.")
    return 0


def _measured(spec: Spec, runs: Path) -> str:
    """The peak of a run with these settings and this model on whichever GPU, as text."""
    asked = dataclasses.asdict(spec.asked)
    for folder in sorted(runs.glob(f"*-{spec.scale.name}/{spec.variant}-s*")):
        with suppress(RecordError):
            entry = read_record(folder)
            same = asked | entry["spec"]["settings"] == asked and entry["model"]["name"] == spec.model["name"]
            if same and (peak := entry["memory"]["peak_alloc_mib"]):
                return f"{peak:,.0f}"
    return "–"
