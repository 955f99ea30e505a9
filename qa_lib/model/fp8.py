"""Feed-forward products in 8-bit floats, on GPUs that have them, sm_89 and newer (row E-dropout-fp8).

Tensor cores multiply 8-bit floats at twice the rate of bf16, and the feed-forward block's two products are two thirds
of a layer's multiplications. An 8-bit float has 2 or 3 bits of mantissa and little range, so that operands are scaled
into it first (Micikevicius et al. 2022): e4m3 (4 bits of exponent, 3 of mantissa) holds activations and weights, and
e5m2, with more range, gradients. Sums are taken in fp32, and the result is bf16. The gradient by the weights stays in
bf16: it is summed over thousands of tokens, and its error would go straight into the update.
"""

import torch
from torch import nn

from qa_lib.model.encoders import encoder_of, layers_of
from qa_lib.model.products import Product, linear_of

# Powers of two that move values into the range of their format; fixed, since finding each tensor's maximum costs as
# much as the product saves. Layer norm and GELU keep activations within ±28, weights stay within ±7; gradients of a
# mean loss get what GradScaler gives them in fp16, whose exponents e5m2 has.
ACTIVATION, WEIGHT, GRADIENT = 2.0**4, 2.0**6, 2.0**16
E4M3_MAX, E5M2_MAX = 448.0, 57344.0  # beyond which a value saturates, since the formats make it NaN or infinite


class _Float8Product(torch.autograd.Function):
    """x W^T + b with both operands in e4m3 and, for the gradient by x, e5m2 by e4m3; the one by W stays in bf16. b may
    be None."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        rows = x.reshape(-1, x.shape[-1])
        eighth = (weight * WEIGHT).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        ctx.save_for_backward(rows, eighth)
        ctx.has_bias = bias is not None
        y = _scaled(_activation(rows), eighth.t(), ACTIVATION * WEIGHT, bias)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        rows, eighth = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        by_x = _scaled(in_e5m2(flat, GRADIENT), eighth.t().contiguous().t(), GRADIENT * WEIGHT)
        return by_x.view(*grad.shape[:-1], -1), flat.t() @ rows, flat.sum(0) if ctx.has_bias else None


def in_e5m2(x, factor: float):
    """A tensor times a factor in e5m2, saturated. In fp32, as the kernel does it that may take this over
    (train/folding.py, which knows it by these operators)."""
    return (x.float() * factor).clamp(-E5M2_MAX, E5M2_MAX).to(torch.float8_e5m2)


def _activation(x):
    return (x * ACTIVATION).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _scaled(a, b, scale: float, bias=None):
    one, inverse = (torch.full((), value, device=a.device) for value in (1.0, 1 / scale))
    return torch._scaled_mm(a, b, one, inverse, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True)


class Float8Linear(nn.Linear):
    """nn.Linear for bf16 inputs and weights whose products are taken in 8-bit floats."""

    adds_bias = True

    @classmethod
    def of(cls, native: nn.Linear) -> "Float8Linear":
        """The 8-bit form of `native`, on its own weights; of a Product's bias it makes as little."""
        eighth = linear_of(cls, native)
        eighth.adds_bias = not isinstance(native, Product)
        return eighth

    def forward(self, x):
        return _Float8Product.apply(x, self.weight, self.bias if self.adds_bias else None)


def use_float8(model: nn.Module) -> None:
    """Give the feed-forward products of every layer 8-bit operands, in place; weights stay as they are."""
    for layer in layers_of(model):
        for name in encoder_of(model).products:
            layer.set_submodule(name, Float8Linear.of(layer.get_submodule(name)))
