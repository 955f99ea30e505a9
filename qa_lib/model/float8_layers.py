"""Linear layers whose GEMMs are in 8-bit floats (kernels/fp8.py): variants E-fp8, L-fp8 and more.

Whoever makes a linear layer's input may leave a copy of it in e4m3, as an attribute of that input,
since transformers' layers hand on one tensor: `leave_copy`, `take_copy`. A feed-forward block with
the sigmoid GELU is computed as a whole: its first linear layer hands its own arguments to the
second, a DeferredFirstHalf, and the second does the work of both.

An encoder's layers become Float8Linears. GPT-2's stay Conv1Ds, for evaluation and generation are
transformers' own; its fused training pass (fused_decoder.py) asks whether they are to be in 8 bits.
Weights stay in bf16 and keep their names, so that a checkpoint looks like any other.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from qa_lib.kernels.fp8 import cast_ahead, fp8_linear, fp8_linear_and_placeholder
from qa_lib.kernels.gelu import fp8_feed_forward, fp8_feed_forward_and_placeholder
from qa_lib.model.architectures import encoder_of, layers_of


def is_float8(module: nn.Module | None) -> bool:
    """Return whether the GEMMs of a linear layer are in 8 bits; of no layer, None, they are not.

    Such a layer says so by its attribute `float8`. An encoder's have it from their class, and
    GPT-2's get it one by one. Other modules have none.
    """
    return getattr(module, "float8", False)


# The copy in 8 bits of a linear layer's input.


def leave_copy(x: torch.Tensor, x8: torch.Tensor | None) -> None:
    """Leave an e4m3 copy of `x`, if there is one, with it for the next linear layer."""
    if x8 is not None:
        x.e4m3 = x8


def take_copy(x: torch.Tensor) -> torch.Tensor | None:
    """Return the e4m3 copy that was left with `x`; None if there is none.

    It is no longer there then: `x` may be kept for the backward pass, which has no use for a copy.
    """
    # PyTorch's compiler fuses conversions itself: there nobody leaves a copy.
    return None if torch.compiler.is_compiling() else vars(x).pop("e4m3", None)


# A linear layer in 8 bits, by itself or with the one before it.


class DeferredFirstHalf(NamedTuple):
    """The first half of a feed-forward block, a linear layer and GELU, that is not computed yet.

    The first linear layer returns it where hidden states would be, and transformers' modules hand
    it on as such to the second, which computes both halves.
    """

    # The block's input [..., width], and its e4m3 copy if one was left with it.
    x: torch.Tensor
    x8: torch.Tensor | None
    # The first linear layer: its weight [inner, width] and its bias [inner].
    weight: torch.Tensor
    bias: torch.Tensor
    # Whether GELU is the approximation by tanh.
    tanh: bool


def float8_linear(
    x: torch.Tensor | DeferredFirstHalf,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    weight_grad8: bool = False,
) -> torch.Tensor:
    """Apply a linear layer in 8-bit floats, and before it the first half of its block.

    The first half is applied where `x` is that half, with what it would have been applied to.
    """
    if isinstance(x, DeferredFirstHalf):
        return fp8_feed_forward(
            x.x,
            x.weight,
            x.bias,
            x.tanh,
            down=weight,
            last=bias,
            x8=x.x8,
            weight_grad8=weight_grad8,
        )
    return fp8_linear(x, weight, bias, take_copy(x), weight_grad8)


def float8_linear_and_placeholder(
    x: torch.Tensor | DeferredFirstHalf,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_grad8: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `float8_linear` does, and return a placeholder for the result's gradient as well."""
    if isinstance(x, DeferredFirstHalf):
        return fp8_feed_forward_and_placeholder(
            x.x,
            x.weight,
            x.bias,
            x.tanh,
            down=weight,
            last=bias,
            x8=x.x8,
            weight_grad8=weight_grad8,
        )
    return fp8_linear_and_placeholder(x, weight, bias, take_copy(x), weight_grad8)


# An encoder's linear layers.


class LinearWithoutBias(nn.Linear):
    """nn.Linear with a `bias` that the module around it adds."""

    float8 = False

    def forward(self, x):
        return F.linear(x, self.weight)


class Float8Linear(nn.Linear):
    """nn.Linear for bf16 inputs and weights whose GEMMs are in 8-bit floats.

    One that does not add its bias (`adds_bias`) was a LinearWithoutBias. `weight_grad8` says
    whether the gradient of its weight has 8 bits as well.
    """

    adds_bias = True
    float8 = True
    weight_grad8 = False

    @property
    def reads_grad8_alone(self) -> bool:
        """Whether nothing reads the gradient of its output in bf16, of which a bias's is a sum."""
        return self.weight_grad8 and not self.adds_bias

    def forward(self, x):
        bias = self.bias if self.adds_bias else None
        return float8_linear(x, self.weight, bias, self.weight_grad8)

    def with_placeholder(self, x) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output, and a placeholder for its gradient in e5m2 (kernels/fp8.py).

        It is None for PyTorch's compiler, which fuses conversions itself.
        """
        if torch.compiler.is_compiling():
            return self(x), None
        bias = self.bias if self.adds_bias else None
        return float8_linear_and_placeholder(x, self.weight, bias, self.weight_grad8)


def to_float8(linear: nn.Linear) -> None:
    """Make a linear layer a Float8Linear, in place."""
    linear.adds_bias = not isinstance(linear, LinearWithoutBias)
    linear.__class__ = Float8Linear


# GPT-2's linear layers, whose weights are [in, out].


def has_grad8(linear: Conv1D) -> bool:
    """Return whether the gradient of the weight of GPT-2's linear layer has 8 bits as well."""
    return getattr(linear, "weight_grad8", False)


def conv1d_without_bias(linear: Conv1D, x) -> torch.Tensor:
    """Apply GPT-2's linear layer, whose weight is [in, out], without its bias.

    In 8 bits it does what `float8_linear` does.
    """
    if is_float8(linear):
        return float8_linear(x, linear.weight.t(), weight_grad8=has_grad8(linear))
    return x @ linear.weight


def float8_conv1d(
    linear: Conv1D, x, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Apply GPT-2's linear layer in 8 bits with this bias or none, and return a placeholder, too.

    The placeholder is that of `float8_linear_and_placeholder`. It is None for PyTorch's compiler,
    which fuses conversions itself.
    """
    inputs = (x, linear.weight.t(), bias, has_grad8(linear))
    if torch.compiler.is_compiling():
        return float8_linear(*inputs), None
    return float8_linear_and_placeholder(*inputs)


# Which layers of a model have 8 bits.


def use_float8(model: nn.Module) -> None:
    """Give the feed-forward GEMMs of every layer 8-bit operands, in place; weights stay in bf16.

    A decoder must have its fused training pass and the sigmoid GELU, which alone ask for `float8`.
    """
    is_decoder = encoder_of(model).causal
    for layer in layers_of(model):
        for name in encoder_of(model).linears:
            linear = layer.get_submodule(name)
            if is_decoder:
                linear.float8 = True
            else:
                to_float8(linear)


def use_float8_weight_gradients(model: nn.Module) -> None:
    """Give the GEMMs of weights' gradients 8-bit operands, in place, after use_float8.

    They are those of the feed-forward blocks, and that of the projections before attention where it
    has 8 bits. The layer after attention is too narrow: turning its operands takes longer than the
    GEMM saves.
    """
    encoder = encoder_of(model)
    for layer in layers_of(model):
        linears = [layer.get_submodule(name) for name in encoder.linears]
        if encoder.causal:
            if is_float8(layer.attn.c_attn):
                linears.append(layer.attn.c_attn)
        else:
            qkv = getattr(layer.get_submodule(encoder.self_attention), "qkv", None)
            if is_float8(qkv):
                linears.append(qkv)
        for linear in linears:
            linear.weight_grad8 = True


def use_float8_around_causal_attention(model: nn.Module) -> None:
    """Give the GEMMs before and after a decoder's attention 8-bit operands, in place.

    The decoder has its fused training pass and our own attention kernel. Weights stay in bf16.
    """
    for layer in layers_of(model):
        layer.attn.c_attn.float8 = True
        layer.attn.c_proj.float8 = True


def copy_operands(model: nn.Module, feed_forward: bool, projections: bool) -> None:
    """Have an encoder's fused norms hand on e4m3 copies to linear layers in 8 bits, in place.

    `feed_forward` and `projections` say whether those of the feed-forward blocks, and those before
    attention, are in 8 bits.
    """
    before_feed_forward, before_projections = (
        name.rpartition(".")[0] for name in encoder_of(model).dropouts
    )
    *layers, last_layer = layers_of(model)
    for layer in layers:
        layer.get_submodule(before_feed_forward).copies = feed_forward
        layer.get_submodule(before_projections).copies = projections
    # What comes after the last layer is the head, which is not in 8 bits: nobody would take a copy.
    last_layer.get_submodule(before_feed_forward).copies = feed_forward


def cast_weights(model: nn.Module) -> None:
    """Cast the weights of an encoder's linear layers in 8 bits, all of one shape at once.

    The loop calls it before each forward pass, which takes these copies. It does nothing to other
    models, nor on a CPU. GPT-2's linear layers are no nn.Linear: they multiply by a view of their
    weight, which would not have the copies.
    """
    by_shape = {}
    for module in model.modules():
        if not isinstance(module, nn.Linear) or not is_float8(module):
            continue
        weight = module.weight
        if weight.is_cuda and weight.is_contiguous():
            by_shape.setdefault(weight.shape, []).append(weight)
    with torch.no_grad():
        for weights in by_shape.values():
            cast_ahead(weights)
