"""GELU fused with the bias of the linear layer before it (kernels/gelu.py): variant E-gelu.

In 8 bits the linear layer and GELU are left to the next linear layer, which computes the
feed-forward block as a whole (float8_layers.py). Weights keep their names, so that a checkpoint
looks like any other.
"""

import torch
from torch import nn
from transformers.activations import GELUActivation, NewGELUActivation
from transformers.pytorch_utils import Conv1D

from qa_lib.errors import UserError
from qa_lib.kernels.gelu import gelu
from qa_lib.model.architectures import encoder_of, layers_of
from qa_lib.model.float8_layers import (
    DeferredFirstHalf,
    LinearWithoutBias,
    conv1d_without_bias,
    is_float8,
    take_copy,
)


class FusedIntermediate(nn.Module):
    """A layer's intermediate, as transformers calls it: linear layer, bias and GELU.

    The linear layer is `dense`, by the same name. GELU is that of kernels/gelu.py, to a fraction of
    half precision's rounding. After use_float8 it leaves all of that to the next linear layer, as a
    DeferredFirstHalf.
    """

    def __init__(self, native: nn.Linear):
        super().__init__()
        self.dense = native
        self.dense.__class__ = LinearWithoutBias

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor | DeferredFirstHalf:
        if is_float8(self.dense):
            copy = take_copy(hidden_states)
            return DeferredFirstHalf(
                hidden_states, copy, self.dense.weight, self.dense.bias, tanh=False
            )
        return gelu(self.dense(hidden_states), self.dense.bias)


class Conv1DGelu(Conv1D):
    """A linear layer of GPT-2 with its bias and the approximation of GELU by tanh."""

    def forward(self, x: torch.Tensor) -> torch.Tensor | DeferredFirstHalf:
        # Out of training the next layer is transformers' own: this one cannot leave it its work.
        if is_float8(self) and self.training:
            return DeferredFirstHalf(x, take_copy(x), self.weight.t(), self.bias, tanh=True)
        return gelu(conv1d_without_bias(self, x), self.bias, tanh=True)


def use_sigmoid_gelu(model: nn.Module) -> None:
    """Replace the first linear layers of the feed-forward blocks and their activations, in place.

    Raises UserError where the activations are not GELU.
    """
    encoder = encoder_of(model)
    first_linear = encoder.linears[0]
    for layer in layers_of(model):
        activation = layer.get_submodule(encoder.activation)
        linear = layer.get_submodule(first_linear)
        if isinstance(activation, NewGELUActivation):
            linear.__class__ = Conv1DGelu
            layer.set_submodule(encoder.activation, nn.Identity())
        elif isinstance(activation, GELUActivation):
            layer.set_submodule(first_linear.rpartition(".")[0], FusedIntermediate(linear))
        else:
            raise UserError(
                f"gelu 'sigmoid' stands for GELU, and this model has {type(activation).__name__}"
            )
