"""Bias, dropout, residual and layer norm after a product, forward and backward a Triton kernel each (row E-norm).

A layer of BERT has two products that end so: norm(residual + dropout(product + bias)). Forward, the compiler makes one
kernel of it. Backward it makes two, since it has two kinds of sums to take: along each row, for the gradient of what
was normed, and down the columns, over all tokens, for the gradients of bias, gamma and beta. Each reads everything from
memory, and small kernels follow that finish the columns' sums. What is different here:

- A program of the backward kernel takes every so many rows, one after the other, and keeps the columns' sums of its
  rows in registers meanwhile: everything is read once (model/products.py has what becomes of the sums).
- For rows x with mean m and inverse deviation r, normed n = (x - m) r, the gradient g of n (that of the output, times
  gamma) gives that of x as r (g - mean(g) - n mean(g n)) (Ba et al. 2016, differentiated). Means are over the row.
- The output of a norm goes two ways, into the next product and past it. The kernel adds up the two gradients that come
  back (train/folding.py).
- Between the passes are kept the product, the residual, which is there anyway, and m and r: two numbers a row.
- Dropout is that of model/dropout.py, its bits computed again from each element's number; all else is in fp32.

On a CPU plain PyTorch takes the place of the kernels, and is what the tests hold them to. They are for GPUs
of compute capability 7.5 and newer; on a T4, which has 7.5, they compile, and nobody has run them.
"""

import torch
from torch import nn
from torch.nn import functional as F

from qa_lib.errors import UserError
from qa_lib.model.ahead import operator, start
from qa_lib.model.dropout import dropped, threshold_of
from qa_lib.model.encoders import encoder_of, layers_of
from qa_lib.model.products import Product, added_up, linear_of

PROGRAMS = 528  # backward: four for each multiprocessor of an H200


class NormedProduct(nn.Module):
    """What transformers calls a layer's output: `dense`, `dropout` and `LayerNorm`, by the same names."""

    def __init__(self, native: nn.Module):
        super().__init__()
        self.dense, self.LayerNorm, self.dropout = linear_of(Product, native.dense), native.LayerNorm, native.dropout

    def forward(self, hidden_states, input_tensor):
        """As the original's forward: hidden_states [..., inner], the residual and the output [..., width]."""
        norm, rate = self.LayerNorm, self.dropout.p if self.training else 0.0
        arguments = (self.dense(hidden_states), self.dense.bias, input_tensor, norm.weight, norm.bias)
        run = _normed if input_tensor.is_cuda else reference
        return run(*arguments, self.dropout.seed, rate, norm.eps)


def reference(product, bias, residual, gamma, beta, seed, dropout, eps):
    """In plain PyTorch; tensors as the operator takes them."""
    x = dropped(product + bias, seed, dropout) if dropout else product + bias
    return F.layer_norm(residual + x, gamma.shape, gamma, beta, eps)


def _normed(*arguments):
    return _norm(*arguments)[0]


@operator("qa_lib::norm")
def _norm(
    product: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor,
    seed: torch.Tensor, dropout: float, eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The output, of the residual's shape and type, and each row's mean and inverse deviation, fp32 [2, rows]."""
    from qa_lib.model import norm_kernels as kernels  # Triton comes with the CUDA builds of PyTorch alone

    width, rows = _sizes(product)
    output, statistics = residual.new_empty(residual.shape), product.new_empty(2, rows, dtype=torch.float32)
    start(
        kernels.norm_forward, (-(-rows // kernels.FORWARD["ROWS"]),), product.contiguous(), bias,
        residual.contiguous(), gamma, beta, seed, output, statistics, rows, eps, threshold_of(dropout),
        1 / (1 - dropout), WIDTH=width, BLOCK=_power_of_2(width), DROPS=dropout > 0, **kernels.FORWARD,
    )  # fmt: skip
    return output, statistics


@operator("qa_lib::norm_backward")
def _norm_backward(
    grad: torch.Tensor, other: torch.Tensor | None, product: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor,
    gamma: torch.Tensor, seed: torch.Tensor, statistics: torch.Tensor, dropout: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of product and residual, and those of bias, gamma and beta [3, width], of the bias's type. The
    output's gradient is `grad`, plus `other` if there is one (train/folding.py)."""
    from qa_lib.model import norm_kernels as kernels

    width, rows = _sizes(product)
    product_grad, residual_grad = product.new_empty(product.shape), residual.new_empty(residual.shape)
    sums = product.new_empty(min(rows, PROGRAMS), 3, width, dtype=torch.float32)
    start(
        kernels.norm_backward, (len(sums),), grad.contiguous(), None if other is None else other.contiguous(),
        product.contiguous(), bias, residual.contiguous(), gamma, seed, statistics, product_grad, residual_grad, sums,
        rows, threshold_of(dropout), 1 / (1 - dropout), WIDTH=width, BLOCK=_power_of_2(width), ADDS=other is not None,
        DROPS=dropout > 0, **kernels.BACKWARD,
    )  # fmt: skip
    return product_grad, residual_grad, added_up(sums, bias.dtype)


def _keep(ctx, inputs, output):
    product, bias, residual, gamma, _, seed, ctx.dropout, _ = inputs
    ctx.save_for_backward(product, bias, residual, gamma, seed, output[1])


def _differentiate(ctx, grad, _):
    product_grad, residual_grad, weights_grad = _norm_backward(grad, None, *ctx.saved_tensors, ctx.dropout)
    by_bias, by_gamma, by_beta = weights_grad
    return product_grad, by_bias, residual_grad, by_gamma, by_beta, None, None, None


_norm.register_autograd(_differentiate, setup_context=_keep)


def _sizes(product: torch.Tensor) -> tuple[int, int]:
    """Width and rows."""
    width = product.shape[-1]
    return width, product.numel() // width


def _power_of_2(size: int) -> int:
    """The least that is not below `size`."""
    return 1 << (size - 1).bit_length()


def use_fused_norms(model: nn.Module) -> None:
    """Replace what follows the products of every layer that end in a norm, in place, for a model with hash dropout.
    Raises UserError for a model whose norms come before its products."""
    encoder = encoder_of(model)
    if encoder.causal:
        raise UserError(f"norms 'fused' are for norms after a product, and {model.config.model_type} has them before")
    for layer in layers_of(model):
        for name in encoder.dropouts:
            owner = name.rpartition(".")[0]
            layer.set_submodule(owner, NormedProduct(layer.get_submodule(owner)))
