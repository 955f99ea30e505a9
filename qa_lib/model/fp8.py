"""Feed-forward products in 8-bit floats, on GPUs that have them (sm_89 and newer)."""

import torch
from torch import nn

# Powers of two that move values into the range of their format; fixed, since finding each tensor's maximum costs as
# much as the product saves. Layer norm and GELU keep activations within ±28, weights stay within ±7; gradients of a
# mean loss get what GradScaler gives them in fp16, whose exponents e5m2 has.
ACTIVATION, WEIGHT, GRADIENT = 2.0**4, 2.0**6, 2.0**16
E4M3_MAX = 448.0


class _Product(torch.autograd.Function):
    """x W^T + b with both operands in e4m3 and, for the gradient by x, e5m2 by e4m3; the one by W stays in bf16."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        rows = x.reshape(-1, x.shape[-1])
        eighth = (weight * WEIGHT).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        ctx.save_for_backward(rows, eighth)
        y = _scaled(_activation(rows), eighth.t(), ACTIVATION * WEIGHT, bias)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        rows, eighth = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        small = (flat * GRADIENT).to(torch.float8_e5m2)
        by_x = _scaled(small, eighth.t().contiguous().t(), GRADIENT * WEIGHT)
        return by_x.view(*grad.shape[:-1], -1), flat.t() @ rows, flat.sum(0)


def _activation(x):
    return (x * ACTIVATION).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _scaled(a, b, scale: float, bias=None):
    one, inverse = (torch.full((), value, device=a.device) for value in (1.0, 1 / scale))
    return torch._scaled_mm(a, b, one, inverse, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True)


class Float8Linear(nn.Linear):
    """nn.Linear for bf16 inputs and weights whose products are taken in 8-bit floats."""

    def forward(self, x):
        return _Product.apply(x, self.weight, self.bias)


def use_float8(model: nn.Module) -> None:
    """Give the feed-forward products of every layer of a BERT 8-bit operands, in place; weights stay as they are."""
    for layer in model.bert.encoder.layer:
        layer.intermediate.dense.__class__ = layer.output.dense.__class__ = Float8Linear
