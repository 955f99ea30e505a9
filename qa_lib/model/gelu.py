"""GELU by a sigmoid, in two fifths fewer instructions (row E-gelu).

GELU (Hendrycks and Gimpel 2016) is x times the share of a normal distribution below x, which PyTorch computes by the
error function: 38 instructions an element, and 53 for the gradient, so that even a kernel that only reads and writes
16-bit numbers waits for its arithmetic. The logarithm of that share over the share above, log(P(x) / P(-x)), is an odd
function that a polynomial of three terms meets; a sigmoid, one power and one division, which the GPU has instructions
for, takes it back: 23 instructions and 31. (Instructions counted in Triton's code for sm_90.)
On a T4 the same kernel waits for its memory, whose rate is a fifteenth of an H200's: there is nothing to gain there.
It compiles for one, though: for compute capability 7.5 and newer.

The bias before it is added here too. Forward, the compiler makes one kernel of all. Backward, a Triton kernel of our
own writes the gradient of the product and sums it over the tokens in registers, which is the bias's gradient; the
compiler would read it once more for that.

The polynomial was fitted to GELU's values v. They are off by a fifth of half a step of bf16 at most, that is of
2^-9 |v| + 1e-5; the gradients g by a fifth of 2^-9 |g| + 1e-3. A test holds both to that. Rounding to bf16 alone is off
by five times as much, but for values near 0. The usual approximation by tanh (`gelu_new`) is off by up to 5e-4.
"""

import torch
from torch import nn
from transformers.activations import GELUActivation

from qa_lib.errors import UserError
from qa_lib.model.ahead import operator, start
from qa_lib.model.encoders import encoder_of, layers_of
from qa_lib.model.products import Product, added_up, linear_of

PROGRAMS = 264  # backward: two for each multiprocessor of an H200

# Of x, x^3 and x^5, by linear programming over 0 < x < 6.
TERMS = (1.59422507, 7.46130176e-2, -7.83352601e-4)
LAST = 40.0  # the square of the largest x that the polynomial is for; further out, the share is 0 or 1 all the same


class SigmoidGelu(nn.Module):
    """The first product of a feed-forward block, `dense`, its bias and GELU to a fraction of half precision's
    rounding; what transformers calls a layer's intermediate, by the same name."""

    def __init__(self, native: nn.Linear):
        super().__init__()
        self.dense = linear_of(Product, native)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return gelu(self.dense(hidden_states), self.dense.bias)


def gelu(product: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """GELU of a product [..., width] and its bias [width], of the product's type."""
    return _Gelu.apply(product, bias)


class _Gelu(torch.autograd.Function):
    # PyTorch's own derivative would have the compiler keep the share for the backward pass, in fp32.
    @staticmethod
    def forward(ctx, product, bias):
        ctx.save_for_backward(product, bias)
        x = _wide(product) + bias
        share, _ = _share(x)
        return (x * share).to(product.dtype)

    @staticmethod
    def backward(ctx, grad):
        product, bias = ctx.saved_tensors
        if product.is_cuda:
            return _gelu_backward(grad, product, bias, 0.0)[:2]
        return reference(grad, product, bias)


def reference(grad, product, bias):
    """As the operator in plain PyTorch, without a factor."""
    x = _wide(product) + bias
    share, slope = _share(x)
    x_grad = grad * share * (1 + x * (1 - share) * slope)
    return x_grad.to(product.dtype), x_grad.flatten(0, -2).sum(0).to(bias.dtype)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@operator("qa_lib::gelu_backward")
def _gelu_backward(
    grad: torch.Tensor, product: torch.Tensor, bias: torch.Tensor, factor: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of product and bias, and that of the product in e5m2, times `factor` [rows, width], saturated as in
    model/fp8.py: empty where the factor is 0 (train/folding.py)."""
    from qa_lib.model import norm_kernels as kernels  # Triton comes with the CUDA builds of PyTorch alone

    width = len(bias)
    rows = product.numel() // width
    product_grad = product.new_empty(product.shape)
    eighth = product.new_empty((rows, width) if factor else 0, dtype=torch.float8_e5m2)
    sums = product.new_empty(min(rows, PROGRAMS), width, dtype=torch.float32)
    start(
        kernels.gelu_backward, (len(sums), -(-width // kernels.GELU_BACKWARD["COLUMNS"])), grad.contiguous(),
        product.contiguous(), bias, product_grad, eighth if factor else None, sums, rows, *TERMS, LAST, FACTOR=factor,
        WIDTH=width, **kernels.GELU_BACKWARD,
    )  # fmt: skip
    return product_grad, added_up(sums, bias.dtype), eighth


def _share(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The share of a normal distribution below x, and the polynomial's derivative, whose product with share and
    1 - share is the share's."""
    first, second, third = TERMS
    square = (x * x).clamp(max=LAST)
    share = torch.sigmoid(x * (first + square * (second + square * third)))
    return share, first + square * (3 * second + square * (5 * third))


def use_sigmoid_gelu(model: nn.Module) -> None:
    """Replace the first products of the feed-forward blocks and their activations, in place. Raises UserError where
    these are not GELU."""
    encoder = encoder_of(model)
    for layer in layers_of(model):
        found = layer.get_submodule(encoder.activation)
        if not isinstance(found, GELUActivation):
            raise UserError(f"activation 'sigmoid' stands for GELU, and this model has {type(found).__name__}")
        layer.set_submodule(encoder.feed_forward[0], SigmoidGelu(layer.get_submodule(encoder.products[0])))
