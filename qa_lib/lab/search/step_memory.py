"""How many bytes of a GPU a training step takes, added up piece by piece from the run's spec.

Weights, gradients and optimizer state follow from the model's shapes. What the backward pass needs
is counted layer by layer: what autograd saves in an eager layer under autocast, or what the
compiler's partitioner keeps of it. Terms that are measured and not derived say so. A variant that
pads to the longest sample of a batch is taken to meet a batch with one of full length.

A language model adds its logits, one for each token and word of the vocabulary. In a small model
they outweigh the layers.
"""

from collections.abc import Iterable

import torch
from transformers import BertConfig

from qa_lib.kernels.linear_cross_entropy import PART
from qa_lib.measure.meter import MIB
from qa_lib.model.architectures import (
    embeddings_of,
    encoder_of,
    layers_of,
    layers_passed,
    trains,
)
from qa_lib.model.build import HEADS, apply_recipe, model_config
from qa_lib.model.load import new_model
from qa_lib.spec.recipes import Recipe
from qa_lib.spec.spec import Spec

LIBRARIES_MIB = 100  # measured on one H200: workspaces of cuBLAS, and inputs
# Bytes per unit (see StepMemory) that a recomputed layer keeps of its adapters all the same;
# measured.
RECOMPUTED_ADAPTERS = 5.5
# Bytes of Adam's two moments in fp32, for a weight.
FP32_MOMENTS = 2 * 4
# Tensors of fewer elements keep 32-bit moments in the 8-bit optimizer.
SMALL_TENSOR = 4096
# 4 bits, and a scale in fp32 for every 64 weights (QLoRA).
NF4_BYTES = 0.5 + 4 / 64
# Bytes of optimizer state per weight that trains in half precision: the half of its fp32 master
# that the weight itself does not hold (2), where it has one, and two moments in fp32, bf16 or 8
# bits.
STATE_BYTES = {
    "adamw-master": 10,
    "adamw-master-bf16": 6,
    "adamw-master-8bit": 4,
    "adamw-rounded-bf16": 4,
    "adamw-rounded-8bit": 2,
}


class StepMemory:
    """Bytes on a GPU in a training step of a spec, piece by piece.

    An *element* is one number. The *unit* is the elements of one hidden state of every token of the
    micro-batch: tokens times hidden dimensions. Bytes *per unit* are to be multiplied by it; those
    of something that is 4 hidden dimensions wide are 4 times the bytes of its element.
    """

    def __init__(self, spec: Spec, tokens: int):
        """Prepare for a micro-batch of so many `tokens`; the model is built without its weights."""
        self.spec = spec
        self.settings = spec.settings
        self.tokens = tokens
        self.is_causal = spec.preset.task == "lm"
        self.config = config_of(spec)
        self.model = model_without_weights(self.config, spec.preset.task, spec.recipe)
        layers = layers_of(self.model)
        # Gradients pass these layers: from the top down to the lowest part that trains.
        self.passed_layers = layers[len(layers) - layers_passed(self.model) :]
        self.parameters_of_a_layer = list(layers[0].parameters())  # all layers have the same shapes
        self.nf4_parameters = self._quantized_parameters(layers)
        self.trained = [
            parameter for parameter in self.model.parameters() if parameter.requires_grad
        ]
        self.unit = tokens * self.config.hidden_size
        # Bytes of an element that a GEMM gives.
        self.gemm_bytes = 4 if self.settings.precision == "fp32" else 2
        # Bytes of an element of a weight, and of the residual stream: autocast's norms give fp32.
        is_half = self.settings.half_weights or self.settings.precision == "pure-bf16"
        self.element_bytes = 2 if is_half else 4
        # Whether elementwise work is fused, by a compiler or in kernels of our own, so that little
        # of it is kept.
        is_compiled = self.settings.compile not in ("none", "cudagraphs")
        self.is_fused = is_compiled or self.settings.norms == "fused"
        self.recomputes_layers = self.settings.activation_checkpointing is True

    def _quantized_parameters(self, layers: list) -> set[torch.nn.Parameter]:
        """Return the weights that are kept in NF4: the frozen matrices of the layers."""
        if self.settings.base_quantization != "nf4":
            return set()
        return {
            parameter
            for layer in layers
            for parameter in layer.parameters()
            if parameter.ndim == 2 and not parameter.requires_grad
        }

    # What lasts from step to step.

    def weights(self) -> int:
        """Return the bytes of all weights."""
        quantized = _elements(self.nf4_parameters)
        others = _elements(self.model.parameters()) - quantized
        return self.element_bytes * others + round(NF4_BYTES * quantized)

    def gradients(self) -> int:
        """Return the bytes of a gradient for each weight that trains."""
        return self.element_bytes * _elements(self.trained)

    def optimizer(self) -> int:
        """Return the bytes of Adam's two moments, and of fp32 masters of half-precision weights."""
        if self.settings.optimizer == "adamw-8bit":
            return self._optimizer_in_8_bits()
        each = STATE_BYTES.get(self.settings.optimizer, FP32_MOMENTS)
        if self.settings.optimizer == "adamw":  # its moments have the weights' precision
            each = 2 * self.element_bytes
        return each * _elements(self.trained)

    def _optimizer_in_8_bits(self) -> int:
        """Return the bytes of moments in 8 bits; embeddings and small tensors keep 32."""
        in_embeddings = {
            module.weight
            for module in self.model.modules()
            if isinstance(module, torch.nn.Embedding)
        }
        total = 0
        for parameter in self.trained:
            in_32_bits = parameter.numel() < SMALL_TENSOR or parameter in in_embeddings
            total += (FP32_MOMENTS if in_32_bits else 2) * parameter.numel()
        return total

    # What the forward pass leaves.

    def score_elements(self) -> int:
        """Return how many elements of attention scores a layer writes to memory.

        There are none where a kernel computes attention without writing them.
        """
        if self.settings.attention != "eager":
            return 0
        return self.tokens * self.config.num_attention_heads * self.spec.preset.max_length

    def distance_bias_mask(self) -> int:
        """Return the bytes of the mask of padded samples that holds a bias of scores by distance.

        They are 0 for an encoder without such a bias, and for packed samples. The mask has an
        element for each score, and all layers share it. The backward pass has its gradient, too,
        and what a layer adds to that: three times its size in all. That is derived, not measured.

        The kernel of packed samples has gradients of scores instead, one layer's at a time: 12
        bytes per unit for 384 tokens and heads 64 wide. They are not counted. A layer's
        feed-forward activations are gone by then, which are no fewer, so that the peak stays at the
        start of the backward pass (see `temporaries`). That is derived as well.
        """
        if not encoder_of(self.model).distance_bias or self.settings.padding == "packed":
            return 0
        heads = self.config.num_attention_heads
        return 3 * self.gemm_bytes * self.tokens * heads * self.spec.preset.max_length

    def layer_bytes(self, trained: bool = True) -> float:
        """Return the bytes per unit that a layer keeps for its backward pass, without scores.

        A layer that is not `trained` is only passed by gradients.
        """
        recipe = self.spec.recipe
        norm_inputs = 2 * self.element_bytes
        dropout_masks = len(encoder_of(self.model).dropouts)  # a byte for each element
        # Query, key, value, and the attention's output, which the next linear layer takes.
        attention = 4 * self.gemm_bytes
        gelu_input = 4 * self.gemm_bytes  # it is four times as wide
        kept = norm_inputs + dropout_masks + attention + gelu_input
        if self.is_causal and not self.is_fused:
            # GPT-2's GELU is an approximation, written out. Beside half of its input it keeps three
            # more in fp32: the input, tanh of a polynomial of it, and 1 more than that.
            kept += 4 * 3 * 4
        # A compiler that may repeat elementwise work gets these inputs from what else is kept.
        repeats_elementwise = self.settings.activation_checkpointing == "elementwise"
        if recipe.kind in ("all", "top") and trained and not repeats_elementwise:
            kept += self._linear_inputs()
        if recipe.kind == "lora":
            kept += self._adapter_inputs()
        return kept

    def _linear_inputs(self) -> int:
        """Return the bytes per unit of the linear layers' inputs, for the gradients of weights.

        They are the inputs of query, key and value (without a compiler each has a half-precision
        copy of its own, unless they are one layer), of the feed-forward's first layer, and of its
        second. The latter is GELU's output, which a block in 8 bits computes again
        (kernels/gelu.py). A decoder whose gradients of weights are computed in 8 bits keeps their
        inputs so; an encoder's are the residual stream as well, in 16 bits.
        """
        share_a_copy = self.is_fused or self.is_causal or self.settings.precision == "fp32"
        copies = 1 if share_a_copy else 3
        is_in_8_bits = self.is_causal and self.settings.weight_gradients == "fp8"
        projected = copies * self.gemm_bytes
        if is_in_8_bits and self.settings.attention_projections == "fp8":
            projected = 1
        fed_forward = 1 if is_in_8_bits else self.gemm_bytes
        gelu_output = 0 if self.settings.feed_forward == "fp8" else 4 * self.gemm_bytes
        return projected + fed_forward + gelu_output

    def _adapter_inputs(self) -> int:
        """Return the bytes per unit of what adapters keep of their inputs.

        Each adapter drops out on a copy of its input of its own: 2 bytes and a mask.
        """
        # Widths of the inputs in hidden dimensions. `dense` are three layers, of which the last
        # has the feed-forward's width.
        widths = {"query": 1, "key": 1, "value": 1, "dense": 1 + 1 + 4}
        width = sum(widths[target] for target in self.spec.recipe.targets)
        if self.is_causal:  # query, key and value are one linear layer there
            width -= 2
        return 3 * width

    def activations(self) -> tuple[float, float]:
        """Return the bytes that the forward pass leaves for the backward pass (kept, largest).

        `kept` are those of the whole model. `largest` are those of the layer that keeps the most,
        counted as if it were not recomputed: `kept` has them once where layers are recomputed.
        """
        # The softmax in fp32, what dropout makes of it in the precision of GEMMs, and the mask.
        bytes_per_score = 4 + self.gemm_bytes + 1
        by_layer = []
        for layer in self.passed_layers:
            kept_of_layer = self.layer_bytes(trains(layer)) * self.unit
            by_layer.append(kept_of_layer + bytes_per_score * self.score_elements())
        kept = sum(by_layer)
        largest = max(by_layer, default=0)
        if self.recomputes_layers:  # the layers' inputs, and all of one layer at a time
            input_bytes = self.element_bytes
            if self.spec.recipe.kind == "lora":
                input_bytes += RECOMPUTED_ADAPTERS
            kept = len(self.passed_layers) * input_bytes * self.unit + largest
        if any(trains(module) for module in embeddings_of(self.model)):
            kept += self.unit  # the mask of their dropout
            if not self.is_causal:
                # The input of their layer norm, and the sum before it, in fp32.
                kept += 2 * 4 * self.unit
        return kept + self.distance_bias_mask(), largest

    # What the backward pass takes beside that.

    def temporaries(self) -> int:
        """Return the bytes that the start of the backward pass takes beside all that is kept."""
        if self.is_fused:
            # The gradients of GELU's input, which is four times as wide, and of the residual.
            gradients = 4 * 2 + 4
            # What is computed again: GELU's output, or a whole layer, which was measured.
            repeated = {False: 0, "elementwise": 4 * 2, True: 12}
            taken = (gradients + repeated[self.settings.activation_checkpointing]) * self.unit
        else:
            # Measured in half precision; the second term are the gradients of the scores.
            taken = 34 * self.unit + 2 * self.score_elements()
        # Weights in 4 bits are made whole anew for every GEMM, one at a time.
        quantized = [
            parameter.numel()
            for parameter in self.parameters_of_a_layer
            if parameter in self.nf4_parameters
        ]
        return taken + self.gemm_bytes * max(quantized, default=0)

    def casts(self) -> int:
        """Return the bytes of autocast's half-precision copies of weights that gradients pass.

        Layers that are recomputed have them one at a time. A language model's head has one, too.
        """
        if self.element_bytes == 2 or self.gemm_bytes == 4:
            return 0
        of_a_layer = 2 * _elements(
            parameter
            for parameter in self.parameters_of_a_layer
            if parameter not in self.nf4_parameters
        )
        of_head = 2 * self.head_weight().numel() if self.is_causal else 0
        copied_layers = 1 if self.recomputes_layers else len(self.passed_layers)
        return of_a_layer * copied_layers + of_head

    def head_weight(self) -> torch.nn.Parameter:
        """Return the weight of a language model's head, [words, hidden]."""
        return self.model.get_submodule(encoder_of(self.model).head).weight

    def loss(self) -> int:
        """Return the bytes that a language model's backward pass begins with, before its layers.

        They are copies of the logits, and the inputs of the last layer norm and of the head.
        Compiled, there is one copy, which the gradients are written over. Under the Trainer, whose
        compiled model returns the logits, there are three: logits, gradients, and zeros in place of
        a gradient from outside (train/compile.py). Eager, there are three in fp32: the logarithms
        of softmax, and the gradients of these and of the logits.
        """
        if self.settings.loss != "native":
            return self._loss_in_parts()
        if self.is_fused:
            copies = 3 if self.settings.by_trainer else 1
            bytes_per_logit = copies * self.gemm_bytes
        else:
            bytes_per_logit = 3 * 4
        logits = bytes_per_logit * self.tokens * self.config.vocab_size
        return logits + (self.element_bytes + self.gemm_bytes) * self.unit

    def _loss_in_parts(self) -> int:
        """Return what `loss` does, for logits made in parts (kernels/linear_cross_entropy.py).

        They are the logits of one part, in 8 bits as well where asked for, the gradients of the
        hidden states and of the weight, and the latter's sum in fp32.
        """
        bytes_per_logit = 3 if self.settings.loss == "chunked-fp8" else 2
        logits = bytes_per_logit * min(PART, self.tokens) * self.config.vocab_size
        of_weight = (4 + self.element_bytes) * self.head_weight().numel()
        return logits + of_weight + (self.element_bytes + 2 * self.gemm_bytes) * self.unit

    def start_of_backward(self) -> float:
        """Return the most bytes that activations and temporaries take together."""
        kept, largest_layer = self.activations()
        in_layers = kept + self.temporaries()
        if not self.is_causal:
            return in_layers
        # The loss comes before any layer is recomputed.
        kept_at_loss = kept - (largest_layer if self.recomputes_layers else 0)
        return max(in_layers, kept_at_loss + self.loss())

    # All of it together.

    def phases(self) -> dict[str, float]:
        """Return the peak in bytes of each phase of a step."""
        gradients = self.gradients()
        lasting = self.weights() + self.optimizer() + LIBRARIES_MIB * MIB
        forward_and_backward = lasting + self.casts() + self.start_of_backward()
        end_of_backward = lasting + gradients
        if self.is_causal and self.head_weight().requires_grad:
            # A language model's head is its embeddings, which get a gradient from both ends.
            end_of_backward += self.element_bytes * self.head_weight().numel()
        if self.spec.accumulation > 1:
            # The gradients of earlier micro-batches are there in the next one's passes. A compiled
            # backward pass returns its gradients beside those that it adds to.
            forward_and_backward += gradients
            if self.is_fused:
                end_of_backward += gradients
        update = lasting + gradients
        if self.settings.optimizer == "adamw" and not self.settings.by_rival:
            # PyTorch's default AdamW has its denominators all at once.
            update += 4 * _elements(self.trained)
        return {
            "forward and backward": forward_and_backward,
            "end of backward": end_of_backward,
            "optimizer": update,
        }


# By configuration, task and recipe: a search for a variant or a size asks for the same one again
# and again, and building it takes most of an estimate's time.
_MODELS: dict[tuple, torch.nn.Module] = {}


def model_without_weights(config, task: str, recipe: Recipe) -> torch.nn.Module:
    """Return the model of a configuration in which a recipe's parameters train, on device `meta`.

    It is kept, so that callers must not change it. Raises UserError where adapters need a package
    that is not installed.
    """
    key = (type(config), config.to_json_string(use_diff=False), task, recipe)
    if key not in _MODELS:
        with torch.device("meta"):
            _MODELS[key] = apply_recipe(new_model(config, HEADS[task], "eager"), recipe)
    return _MODELS[key]


def config_of(spec: Spec):
    """Return the configuration of a spec's model, as transformers has it."""
    if spec.model_source == "bert-base-uncased":
        return BertConfig()  # its shapes are the defaults, which need no network
    return model_config(spec.model_source, spec.preset.task)


def _elements(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Return how many elements some parameters have together."""
    return sum(parameter.numel() for parameter in parameters)
