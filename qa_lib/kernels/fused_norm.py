"""Bias, dropout, residual and layer norm after a linear layer, forward and backward a Triton kernel each (variants
E-norm and L-norm).

A layer of BERT has two linear layers that end so: norm(residual + dropout(x W^T + bias)). Forward, the compiler makes
one kernel of all after the GEMM. Backward it makes two, since it has two kinds of sums to take: along each row, for the
gradient of what was normed, and down the columns, over all tokens, for the gradients of bias, gamma and beta. Each
reads everything from memory, and small kernels follow that finish the columns' sums. What is different here:

- A program of the backward kernel takes every so many rows, one after the other, and keeps the columns' sums of its
  rows in registers meanwhile: everything is read once (common.py has what becomes of the partial sums).
- For rows x with mean m and inverse deviation r, normed n = (x - m) r, the gradient g of n (that of the output, times
  gamma) gives that of x as r (g - mean(g) - n mean(g n)) (Ba et al. 2016, differentiated). Means are over the row.
- The output of a norm goes two ways, into the next linear layer and past it. The kernel adds up the two gradients that
  come back (fused_norm).
- Between the passes are kept the GEMM's output, the residual, which is there anyway, and m and r: two numbers a row.
- Dropout is that of common.py, its bits computed again from each element's number; all else is in fp32.

GPT-2 has its norms before the linear layers (pre-norm; Radford et al. 2019), and the residual stream passes them by:
s = residual + dropout(x W^T + bias) goes on as it is, and norm(s) into the next linear layer. `fused_add_norm` gives
both. Its backward pass gets a gradient of each and adds that of s to what comes through the norm. It is the same
arithmetic in another order, so that the same two kernels do both. Kept is s, which is there anyway, and not x.

On a CPU plain PyTorch takes the place of the kernels, and is what the tests hold them to. They are for GPUs
of compute capability 7.5 and newer; on a T4, which has 7.5, they compile, and nobody has run them.
"""

import torch
from torch.nn import functional as F

from qa_lib.kernels.common import (
    custom_op,
    hash_dropout,
    jit,
    keep_mask,
    launch,
    sum_partials,
    threshold_of,
    tl,
)

PROGRAMS = 528  # backward: four for each multiprocessor of an H200
# Rows that a program has at a time, how far ahead of its arithmetic it reads, and threads.
FORWARD = {"ROWS": 1, "num_warps": 1}
BACKWARD = {"ROWS": 1, "STAGES": 4, "num_warps": 4}


def fused_norm(x, bias, residual, gamma, beta, seed, dropout: float, eps: float):
    """norm(residual + dropout(x + bias)) twice, of the residual's shape [..., width] and type; x [..., width], bias,
    gamma and beta [width]. `seed`, an int32 on the device, decides what is dropped out.

    The first is for the next linear layer, the second for the norm after it, as its residual. Without a compiler they
    are two tensors of one memory, so that the backward pass gets both gradients; of one it would get their sum, by a
    kernel that reads and writes all of it once more. The compiler writes that kernel: there they are one tensor.
    """
    inputs = (x, bias, residual, gamma, beta, seed, dropout, eps)
    if residual.is_cuda and not torch.compiler.is_compiling():
        return _BothWays.apply(*inputs)
    output = _norm(*inputs)[0] if residual.is_cuda else reference(*inputs)[1]
    return output, output


class _BothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        output, *rest = _norm(*inputs)
        _setup_context(ctx, (*inputs, False), (output, *rest))
        return output, output.new_empty(0).set_(
            output
        )  # no view, which autograd would look through

    @staticmethod
    def backward(ctx, grad, other):
        return *(_gradients(ctx, other, None) if grad is None else _gradients(ctx, grad, other)), *(
            None,
        ) * 3


def fused_add_norm(x, bias, residual, gamma, beta, seed, dropout: float, eps: float):
    """residual + dropout(x + bias) and its norm, for tensors as fused_norm takes them; both of the residual's shape and
    type."""
    if not residual.is_cuda:
        return reference(x, bias, residual, gamma, beta, seed, dropout, eps)
    output, _, total = _norm(x, bias, residual, gamma, beta, seed, dropout, eps, keeps=True)
    return total, output


def reference(x, bias, residual, gamma, beta, seed, dropout, eps):
    """As fused_add_norm in plain PyTorch."""
    x = hash_dropout(x + bias, seed, dropout) if dropout else x + bias
    total = residual + x
    return total, F.layer_norm(total, gamma.shape, gamma, beta, eps)


@custom_op("qa_lib::norm")
def _norm(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor,
    seed: torch.Tensor, dropout: float, eps: float, keeps: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The output, of the residual's shape and type; each row's mean and inverse deviation, fp32 [2, rows]; and what was
    normed, which is empty unless the caller `keeps` it."""
    *_, width = x.shape
    rows = x.numel() // width
    output, statistics = (
        residual.new_empty(residual.shape),
        x.new_empty(2, rows, dtype=torch.float32),
    )
    total = residual.new_empty(residual.shape if keeps else 0)
    launch(
        norm_forward_kernel, (-(-rows // FORWARD["ROWS"]),), x.contiguous(), bias, residual.contiguous(), gamma, beta,
        seed, total if keeps else None, output, statistics, rows, eps, threshold_of(dropout), 1 / (1 - dropout),
        WIDTH=width, BLOCK=_power_of_2(width), DROPS=dropout > 0, KEEPS=keeps, **FORWARD,
    )  # fmt: skip
    return output, statistics, total


@custom_op("qa_lib::norm_backward")
def _norm_backward(
    grad: torch.Tensor, other: torch.Tensor | None, x: torch.Tensor | None, bias: torch.Tensor, residual: torch.Tensor,
    gamma: torch.Tensor, seed: torch.Tensor, statistics: torch.Tensor, dropout: float, dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of x, of type `dtype`, and residual, and those of bias, gamma and beta [3, width], of the bias's
    type. The output's gradient is `grad`, plus `other` if there is one. Without `x`, `residual` is the sum that was
    normed, and `other` its gradient."""
    *_, width = residual.shape
    rows = residual.numel() // width
    x_grad, residual_grad = (
        residual.new_empty(residual.shape, dtype=dtype),
        residual.new_empty(residual.shape),
    )
    partials = residual.new_empty(min(rows, PROGRAMS), 3, width, dtype=torch.float32)
    launch(
        norm_backward_kernel, (len(partials),), grad.contiguous(), None if other is None else other.contiguous(),
        None if x is None else x.contiguous(), bias, residual.contiguous(), gamma, seed, statistics, x_grad,
        residual_grad, partials, rows, threshold_of(dropout), 1 / (1 - dropout), WIDTH=width, BLOCK=_power_of_2(width),
        ADDS=other is not None, DROPS=dropout > 0, SUMMED=x is None, **BACKWARD,
    )  # fmt: skip
    return x_grad, residual_grad, sum_partials(partials, bias.dtype)


def _setup_context(ctx, inputs, output):
    x, bias, residual, gamma, _, seed, ctx.dropout, _, ctx.keeps = inputs
    _, statistics, total = output
    ctx.dtype = x.dtype
    if ctx.keeps:  # then the backward pass does without x
        x, residual = None, total
    ctx.save_for_backward(x, bias, residual, gamma, seed, statistics)
    ctx.set_materialize_grads(False)  # of the statistics: zeros, by a kernel


def _backward(ctx, grad, _, total_grad):
    return *_gradients(ctx, grad, total_grad if ctx.keeps else None), *(None,) * 4


def _gradients(ctx, grad, other):
    x_grad, residual_grad, weights_grad = _norm_backward(
        grad, other, *ctx.saved_tensors, ctx.dropout, ctx.dtype
    )
    bias_grad, gamma_grad, beta_grad = weights_grad
    return x_grad, bias_grad, residual_grad, gamma_grad, beta_grad


_norm.register_autograd(_backward, setup_context=_setup_context)


def _power_of_2(size: int) -> int:
    """The least that is not below `size`."""
    return 1 << (size - 1).bit_length()


# The kernels. All tensors are contiguous: a GEMM's output, its residual and their gradients [rows, WIDTH], bias, gamma
# and beta [WIDTH], statistics [2, rows]. The number of an element, for dropout, is its place in memory.


@jit(do_not_specialize=["threshold"])
def norm_forward_kernel(
    gemm_out, bias, residual, gamma, beta, seed, total, output, statistics, rows, eps, threshold, keeps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DROPS: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """Of ROWS rows: the output, and the mean and the inverse deviation of what was normed; with KEEPS that as well, in
    `total`, and as it is rounded there."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    in_rows, in_width = row < rows, column < WIDTH
    at = row[:, None] * WIDTH + column
    inside = in_rows[:, None] & in_width
    x = tl.load(gemm_out + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias + column, mask=in_width, other=0.0).to(tl.float32)
    if DROPS:
        x = tl.where(
            keep_mask(at, tl.load(seed).to(tl.uint32, bitcast=True), threshold), x * keeps, 0.0
        )
    x += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if KEEPS:
        rounded = x.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    mean = tl.sum(x, 1) / WIDTH
    x = tl.where(in_width, x - mean[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)
    x *= inverse[:, None]
    scale = tl.load(gamma + column, mask=in_width, other=0.0).to(tl.float32)
    shift = tl.load(beta + column, mask=in_width, other=0.0).to(tl.float32)
    tl.store(output + at, (x * scale + shift).to(output.dtype.element_ty), mask=inside)
    tl.store(statistics + row, mean, mask=in_rows)
    tl.store(statistics + rows + row, inverse, mask=in_rows)


@jit(do_not_specialize=["threshold"])
def norm_backward_kernel(
    grad, other, gemm_out, bias, residual, gamma, seed, statistics, gemm_grad, residual_grad, partials, rows, threshold,
    keeps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADDS: tl.constexpr, DROPS: tl.constexpr,
    SUMMED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of every so many rows: the gradients of gemm_out and residual, and the program's part of the gradients of bias,
    gamma and beta, in `partials` [programs, 3, WIDTH]. The output's gradient is `grad`, or with ADDS grad + other. With
    SUMMED `residual` is what was normed, and gemm_out is not read; with both, `other` is the gradient of that sum. Rows
    beyond the last have zeros here, and add none to the partials."""
    column = tl.arange(0, BLOCK)
    in_width = column < WIDTH
    shift = tl.load(bias + column, mask=in_width, other=0.0).to(tl.float32)
    scale = tl.load(gamma + column, mask=in_width, other=0.0).to(tl.float32)
    seed_bits = tl.load(seed).to(tl.uint32, bitcast=True)
    bias_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    gamma_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    beta_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    program, programs = tl.program_id(0), tl.num_programs(0)
    for first in tl.range(program * ROWS, rows, programs * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)
        in_rows = row < rows
        at = row[:, None] * WIDTH + column
        inside = in_rows[:, None] & in_width
        y_grad = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        if ADDS and not SUMMED:
            y_grad += tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(statistics + row, mask=in_rows, other=0.0)
        inverse = tl.load(statistics + rows + row, mask=in_rows, other=0.0)
        if DROPS:
            keep = keep_mask(at, seed_bits, threshold)
        if not SUMMED:
            rest = tl.load(gemm_out + at, mask=inside, other=0.0).to(tl.float32) + shift
            x += tl.where(keep, rest * keeps, 0.0) if DROPS else rest
        x = (x - mean[:, None]) * inverse[:, None]
        gamma_sum += y_grad * x
        beta_sum += y_grad
        y_grad *= scale
        along = tl.sum(y_grad * x, 1) / WIDTH
        level = tl.sum(y_grad, 1) / WIDTH
        x_grad = (y_grad - level[:, None] - x * along[:, None]) * inverse[:, None]
        if ADDS and SUMMED:
            x_grad += tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual_grad + at, x_grad.to(residual_grad.dtype.element_ty), mask=inside)
        if DROPS:
            x_grad = tl.where(keep, x_grad * keeps, 0.0)
        tl.store(gemm_grad + at, x_grad.to(gemm_grad.dtype.element_ty), mask=inside)
        bias_sum += x_grad
    partials += program * 3 * WIDTH + column
    tl.store(partials, tl.sum(bias_sum, 0), mask=in_width)
    tl.store(partials + WIDTH, tl.sum(gamma_sum, 0), mask=in_width)
    tl.store(partials + 2 * WIDTH, tl.sum(beta_sum, 0), mask=in_width)
