"""Linear layers of a block, rewired to our own kernels (variants E-norm, E-gelu and E-dropout-fp8).

What follows a linear layer is done by one operator, its bias included: dropout, residual and norm
(kernels/fused_norm.py), or GELU (kernels/gelu.py). The feed-forward block's GEMMs may be in 8-bit floats
(kernels/fp8.py). Weights keep their names, so that a checkpoint looks like any other.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import GELUActivation

from qa_lib.errors import UserError
from qa_lib.kernels.fp8 import fp8_linear
from qa_lib.kernels.fused_norm import fused_norm
from qa_lib.kernels.gelu import gelu
from qa_lib.model.architectures import encoder_of, layers_of
from qa_lib.model.fused_qkv import linear_as


class LinearWithoutBias(nn.Linear):
    """nn.Linear with a `bias` that the module around it adds."""

    def forward(self, x):
        return F.linear(x, self.weight)


class FusedOutput(nn.Module):
    """What transformers calls a layer's output: `dense`, `dropout` and `LayerNorm`, by the same names."""

    def __init__(self, native: nn.Module):
        super().__init__()
        self.dense, self.dropout = linear_as(LinearWithoutBias, native.dense), native.dropout
        self.LayerNorm = native.LayerNorm

    def forward(self, hidden_states, input_tensor):
        """As the original's forward: hidden_states [..., inner], the residual and the output [..., width]."""
        norm, rate = self.LayerNorm, self.dropout.p if self.training else 0.0
        x, bias = self.dense(hidden_states), self.dense.bias
        return fused_norm(x, bias, input_tensor, norm.weight, norm.bias, self.dropout.seed, rate, norm.eps)


class FusedIntermediate(nn.Module):
    """What transformers calls a layer's intermediate, with `dense` by the same name: the first linear layer of a
    feed-forward block, its bias and GELU, to a fraction of half precision's rounding."""

    def __init__(self, native: nn.Linear):
        super().__init__()
        self.dense = linear_as(LinearWithoutBias, native)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return gelu(self.dense(hidden_states), self.dense.bias)


class Float8Linear(nn.Linear):
    """nn.Linear for bf16 inputs and weights whose GEMMs are in 8-bit floats."""

    adds_bias = True

    @classmethod
    def of(cls, native: nn.Linear) -> "Float8Linear":
        """The 8-bit form of `native`, on its own weights; the bias of a LinearWithoutBias is not added here either."""
        linear = linear_as(cls, native)
        linear.adds_bias = not isinstance(native, LinearWithoutBias)
        return linear

    def forward(self, x):
        return fp8_linear(x, self.weight, self.bias if self.adds_bias else None)


def use_fused_norms(model: nn.Module) -> None:
    """Replace what follows the linear layers of every layer that end in a norm, in place, for a model with hash
    dropout. Raises UserError for a model whose norms come before its linear layers."""
    encoder = encoder_of(model)
    if encoder.causal:
        raise UserError(
            f"norms 'fused' are for norms after a linear layer, and {model.config.model_type} has them before"
        )
    for layer in layers_of(model):
        for name in encoder.dropouts:
            owner = name.rpartition(".")[0]
            layer.set_submodule(owner, FusedOutput(layer.get_submodule(owner)))


def use_sigmoid_gelu(model: nn.Module) -> None:
    """Replace the first linear layers of the feed-forward blocks and their activations, in place. Raises UserError
    where these are not GELU."""
    encoder = encoder_of(model)
    for layer in layers_of(model):
        found = layer.get_submodule(encoder.activation)
        if not isinstance(found, GELUActivation):
            raise UserError(f"activation 'sigmoid' stands for GELU, and this model has {type(found).__name__}")
        layer.set_submodule(encoder.feed_forward[0], FusedIntermediate(layer.get_submodule(encoder.linears[0])))


def use_float8(model: nn.Module) -> None:
    """Give the feed-forward GEMMs of every layer 8-bit operands, in place; weights stay as they are."""
    for layer in layers_of(model):
        for name in encoder_of(model).linears:
            layer.set_submodule(name, Float8Linear.of(layer.get_submodule(name)))
