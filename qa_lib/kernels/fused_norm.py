"""Bias, dropout, residual and layer norm after a linear layer, by a Triton kernel for each pass.

Variants E-norm and L-norm have it.

A layer of BERT has two linear layers that end so: norm(residual + dropout(x W^T + bias)). Forward,
PyTorch's compiler makes one kernel of all that follows the GEMM. Backward it makes two, since there
are two kinds of sums to take: along each row, for the gradient of what was normed, and down the
columns, over all tokens, for the gradients of bias, gamma and beta. Each kernel reads everything
from memory, and small kernels follow that finish the columns' sums. What is different here:

- A program of the backward kernel takes every so many rows, one after the other, and keeps the
  columns' sums of its rows in registers meanwhile: everything is read once (partial_sums.py says
  what becomes of the partial sums).
- For rows x with mean m and inverse deviation r, normed n = (x - m) r, the gradient g of n (that of
  the output, times gamma) gives that of x as r (g - mean(g) - n mean(g n)) (Ba et al. 2016,
  differentiated). Means are over the row.
- The output of a norm goes two ways, into the next linear layer and past it. The kernel adds up the
  two gradients that come back (`fused_norm`).
- Between the passes are kept the GEMM's output, the residual, which is there anyway, and m and r:
  two numbers a row.
- Dropout is that of hash_dropout.py, its bits computed again from each element's number; all else
  is in fp32.

GPT-2 has its norms before the linear layers (pre-norm; Radford et al. 2019), and the residual
stream passes them by: s = residual + dropout(x W^T + bias) goes on as it is, and norm(s) into the
next linear layer. `fused_add_norm` gives both. Its backward pass gets a gradient of each and adds
that of s to what comes through the norm. It is the same arithmetic in another order, so that the
same two kernels do both. Kept is s, which is there anyway, and not x.

Where linear layers are in 8-bit floats, the forward kernel writes the e4m3 copy of its output that
the next one reads, and the backward kernel the e5m2 copy of the gradient that goes into the one
before (kernels/fp8.py); that alone, where the layer reads no other.

On a CPU plain PyTorch takes the place of the kernels, and is what the tests hold them to. They are
for GPUs of compute capability 7.5 and newer; on a T4, which has 7.5, they compile, and nobody has
run them.
"""

import torch
from torch.nn import functional as F

from qa_lib.kernels.common import custom_op, jit, tl
from qa_lib.kernels.fp8 import ACTIVATION, E4M3_MAX, E5M2_MAX, GRADIENT, in_8_bits
from qa_lib.kernels.hash_dropout import hash_dropout, keep_mask, threshold_in_31_bits
from qa_lib.kernels.partial_sums import sum_partials
from qa_lib.kernels.precompile import launch

PROGRAMS = 528  # of the backward kernel: four for each multiprocessor of an H200
# ROWS are those that a program has at a time; STAGES, how many iterations ahead of its arithmetic
# it reads.
FORWARD = {"ROWS": 1, "num_warps": 1}
BACKWARD = {"ROWS": 1, "STAGES": 4, "num_warps": 4}


def fused_norm(
    x: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    seed: torch.Tensor,
    dropout: float,
    eps: float,
    placeholder: torch.Tensor | None = None,
    copies: bool = False,
    grad8_alone: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return norm(residual + dropout(x + bias)) twice, of the residual's shape and type, and None.

    `x` and `residual` are [..., width], `bias`, `gamma` and `beta` [width]. `seed`, an int32 on the
    device, decides what is dropped out. `placeholder` came with x from a linear layer in 8 bits,
    and gets the gradient of x in e5m2; with `grad8_alone` x itself gets none. The norm `copies` its
    output if the next linear layer is in 8 bits: the third result is then an e4m3 copy, times
    ACTIVATION. On a CPU, and compiled, nothing is written in 8 bits.

    The first result is for the next linear layer, the second for the norm after it, as its
    residual. Without a compiler they are two tensors on one memory, so that the backward pass gets
    both gradients; for one tensor it would get their sum, by a kernel that reads and writes all of
    it once more. PyTorch's compiler fuses that sum: there both results are one tensor.
    """
    inputs = (x, bias, residual, gamma, beta, seed, dropout, eps)
    if not residual.is_cuda:
        _, output = reference(*inputs)
        return output, output, None
    if torch.compiler.is_compiling():
        output, *_ = _norm(*inputs)
        return output, output, None
    output, second, output8 = _BothWays.apply(*inputs, False, placeholder, copies, grad8_alone)
    return output, second, output8.view(torch.float8_e4m3fn) if copies else None


class _BothWays(torch.autograd.Function):
    """`_norm` with two results that have gradients: for the next linear layer, and past it.

    The second is what was normed, if the caller `keeps` it; else it is the output once more, on the
    same memory. The third result has the bytes of the e4m3 copy, and is empty unless the norm
    `copies`.
    """

    @staticmethod
    def forward(
        ctx,
        x,
        bias,
        residual,
        gamma,
        beta,
        seed,
        dropout,
        eps,
        keeps=False,
        placeholder=None,
        copies=False,
        grad8_alone=False,
    ):
        inputs = (x, bias, residual, gamma, beta, seed, dropout, eps, keeps, copies)
        output, statistics, total, output8 = _norm(*inputs)
        _setup_context(ctx, inputs, (output, statistics, total, output8))
        ctx.has_placeholder = placeholder is not None
        ctx.grad8_alone = grad8_alone
        if keeps:
            return output, total, output8
        # No view of the output, through which autograd would look.
        second = output.new_empty(0).set_(output)
        return output, second, output8

    @staticmethod
    def backward(ctx, grad, second_grad, _):
        if grad is None and not ctx.keeps:
            grad, second_grad = second_grad, None
        (x_grad, *gradients), x_grad8 = _gradients(
            ctx, grad, second_grad, ctx.has_placeholder, ctx.grad8_alone
        )
        if not ctx.has_placeholder:
            x_grad8 = None
        if ctx.grad8_alone:
            x_grad = None
        return x_grad, *gradients, None, None, None, None, x_grad8, None, None


def fused_add_norm(
    x: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    seed: torch.Tensor,
    dropout: float,
    eps: float,
    placeholder: torch.Tensor | None = None,
    copies: bool = False,
    grad8_alone: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return residual + dropout(x + bias), its norm, and None or the norm's e4m3 copy.

    The first two have the residual's shape and type. Arguments are those of `fused_norm`, and so is
    the third result.
    """
    inputs = (x, bias, residual, gamma, beta, seed, dropout, eps)
    if not residual.is_cuda:
        return *reference(*inputs), None
    if torch.compiler.is_compiling():
        output, _, total, _ = _norm(*inputs, keeps=True)
        return total, output, None
    output, total, output8 = _BothWays.apply(*inputs, True, placeholder, copies, grad8_alone)
    return total, output, output8.view(torch.float8_e4m3fn) if copies else None


def reference(x, bias, residual, gamma, beta, seed, dropout, eps):
    """Return residual + dropout(x + bias) and its norm, by plain PyTorch."""
    x = x + bias
    if dropout:
        x = hash_dropout(x, seed, dropout)
    total = residual + x
    return total, F.layer_norm(total, gamma.shape, gamma, beta, eps)


@custom_op("qa_lib::norm")
def _norm(
    x: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor,
    seed: torch.Tensor,
    dropout: float,
    eps: float,
    keeps: bool = False,
    copies: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output, the rows' statistics, what was normed, and the bytes of an e4m3 copy.

    The output has the residual's shape and type. Statistics, fp32 [2, rows], are each row's mean
    and inverse deviation. The third tensor is empty unless the caller `keeps` it, and the fourth
    unless it `copies` the output: bytes, of which autograd knows that they have no gradient.
    """
    *_, width = x.shape
    rows = x.numel() // width
    output = residual.new_empty(residual.shape)
    statistics = x.new_empty(2, rows, dtype=torch.float32)
    total = residual.new_empty(residual.shape if keeps else 0)
    output8 = residual.new_empty(residual.shape if copies else 0, dtype=torch.uint8)
    grid = (-(-rows // FORWARD["ROWS"]),)
    launch(
        norm_forward_kernel,
        grid,
        gemm_out=x.contiguous(),
        bias=bias,
        residual=residual.contiguous(),
        gamma=gamma,
        beta=beta,
        seed=seed,
        total=total if keeps else None,
        output=output,
        output8=output8.view(torch.float8_e4m3fn) if copies else None,
        statistics=statistics,
        rows=rows,
        eps=eps,
        threshold=threshold_in_31_bits(dropout),
        kept_scale=1 / (1 - dropout),
        WIDTH=width,
        BLOCK=_power_of_2(width),
        DROPS=dropout > 0,
        KEEPS=keeps,
        FACTOR=ACTIVATION if copies else 0.0,
        MAX=E4M3_MAX,
        **FORWARD,
    )
    return output, statistics, total, output8


@custom_op("qa_lib::norm_backward")
def _norm_backward(
    grad: torch.Tensor,
    other: torch.Tensor | None,
    x: torch.Tensor | None,
    bias: torch.Tensor,
    residual: torch.Tensor,
    gamma: torch.Tensor,
    seed: torch.Tensor,
    statistics: torch.Tensor,
    dropout: float,
    dtype: torch.dtype,
    copies: bool = False,
    copy_alone: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of x, in type `dtype`, of the residual, and of the weights.

    The third is [3, width], for bias, gamma and beta, in the bias's type. The output's gradient is
    `grad`, plus `other` if there is one. Without `x`, `residual` is the sum that was normed, and
    `other` the gradient of that sum. The fourth is the e5m2 copy [rows, width] of the gradient of
    x. It is empty unless `copies`; with `copy_alone` only the copy is made, and the first is empty.
    """
    *_, width = residual.shape
    rows = residual.numel() // width
    x_grad = residual.new_empty(0 if copy_alone else residual.shape, dtype=dtype)
    x_grad8 = residual.new_empty((rows, width) if copies else 0, dtype=torch.float8_e5m2)
    residual_grad = residual.new_empty(residual.shape)
    partials = residual.new_empty(min(rows, PROGRAMS), 3, width, dtype=torch.float32)
    launch(
        norm_backward_kernel,
        (len(partials),),
        grad=grad.contiguous(),
        other=None if other is None else other.contiguous(),
        gemm_out=None if x is None else x.contiguous(),
        bias=bias,
        residual=residual.contiguous(),
        gamma=gamma,
        seed=seed,
        statistics=statistics,
        gemm_grad=None if copy_alone else x_grad,
        gemm_grad8=x_grad8 if copies else None,
        residual_grad=residual_grad,
        partials=partials,
        rows=rows,
        threshold=threshold_in_31_bits(dropout),
        kept_scale=1 / (1 - dropout),
        WIDTH=width,
        BLOCK=_power_of_2(width),
        ADDS=other is not None,
        DROPS=dropout > 0,
        SUMMED=x is None,
        FACTOR=GRADIENT if copies else 0.0,
        MAX=E5M2_MAX,
        **BACKWARD,
    )
    return x_grad, residual_grad, sum_partials(partials, bias.dtype), x_grad8


def _setup_context(ctx, inputs, output):
    x, bias, residual, gamma, _, seed, ctx.dropout, _, ctx.keeps, _ = inputs
    _, statistics, total, _ = output
    ctx.dtype = x.dtype
    if ctx.keeps:  # then the backward pass does without x
        x, residual = None, total
    ctx.save_for_backward(x, bias, residual, gamma, seed, statistics)
    # Otherwise the statistics would get a gradient of zeros, by a kernel of its own.
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _, total_grad, __):
    other = total_grad if ctx.keeps else None
    gradients, _ = _gradients(ctx, grad, other, copies=False, copy_alone=False)
    return *gradients, None, None, None, None, None


def _gradients(ctx, grad, other, copies, copy_alone):
    """Return the gradients of x, bias, residual, gamma and beta, and the e5m2 copy of the first."""
    x_grad, residual_grad, weight_grads, x_grad8 = _norm_backward(
        grad, other, *ctx.saved_tensors, ctx.dropout, ctx.dtype, copies, copy_alone
    )
    bias_grad, gamma_grad, beta_grad = weight_grads
    return (x_grad, bias_grad, residual_grad, gamma_grad, beta_grad), x_grad8


_norm.operator.register_autograd(_backward, setup_context=_setup_context)


def _power_of_2(size: int) -> int:
    """Return the least power of 2 that is not below `size`."""
    return 1 << (size - 1).bit_length()


# The kernels. All tensors are contiguous: a GEMM's output, its residual and their gradients are
# [rows, WIDTH], bias, gamma and beta [WIDTH], statistics [2, rows]. An element's number, for
# dropout, is its place in memory. A name that ends in 8 is that of a copy in 8 bits, of what is
# stored under the name without it, times FACTOR and within ±MAX; with a FACTOR of 0 there is none.
# The copy of the gradient has the same bits where gemm_grad is None and the copy is stored alone.


@jit(do_not_specialize=["threshold"])
def norm_forward_kernel(
    gemm_out,
    bias,
    residual,
    gamma,
    beta,
    seed,
    total,
    output,
    output8,
    statistics,
    rows,
    eps,
    threshold,
    kept_scale,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    DROPS: tl.constexpr,
    KEEPS: tl.constexpr,
    FACTOR: tl.constexpr,
    MAX: tl.constexpr,
):
    """Compute the output and the statistics of ROWS rows.

    With KEEPS what is normed is stored in `total`, too, and normed as it is rounded there.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    in_rows = row < rows
    in_width = column < WIDTH
    at = row[:, None] * WIDTH + column
    inside = in_rows[:, None] & in_width
    x = tl.load(gemm_out + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias + column, mask=in_width, other=0.0).to(tl.float32)
    if DROPS:
        keep = keep_mask(at, tl.load(seed).to(tl.uint32, bitcast=True), threshold)
        x = tl.where(keep, x * kept_scale, 0.0)
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
    normed = (x * scale + shift).to(output.dtype.element_ty)
    tl.store(output + at, normed, mask=inside)
    if FACTOR != 0.0:
        normed8 = in_8_bits(normed, FACTOR, MAX, output8.dtype.element_ty)
        tl.store(output8 + at, normed8, mask=inside)
    tl.store(statistics + row, mean, mask=in_rows)
    tl.store(statistics + rows + row, inverse, mask=in_rows)


@jit(do_not_specialize=["threshold"])
def norm_backward_kernel(
    grad,
    other,
    gemm_out,
    bias,
    residual,
    gamma,
    seed,
    statistics,
    gemm_grad,
    gemm_grad8,
    residual_grad,
    partials,
    rows,
    threshold,
    kept_scale,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADDS: tl.constexpr,
    DROPS: tl.constexpr,
    SUMMED: tl.constexpr,
    FACTOR: tl.constexpr,
    MAX: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute the gradients of gemm_out and residual for every so many rows.

    The program's part of the gradients of bias, gamma and beta goes into `partials`
    [programs, 3, WIDTH]. The output's gradient is `grad`, or with ADDS grad + other. With SUMMED
    `residual` is what was normed, and gemm_out is not read; with both, `other` is the gradient of
    that sum. Rows beyond the last are read as zeros, and add none to the partials.
    """
    # The gradient of gemm_out is rounded to its type first, which without it is the residual's.
    rounded_like = residual if SUMMED else gemm_out
    column = tl.arange(0, BLOCK)
    in_width = column < WIDTH
    shift = tl.load(bias + column, mask=in_width, other=0.0).to(tl.float32)
    scale = tl.load(gamma + column, mask=in_width, other=0.0).to(tl.float32)
    seed_bits = tl.load(seed).to(tl.uint32, bitcast=True)
    bias_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    gamma_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    beta_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
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
            biased = tl.load(gemm_out + at, mask=inside, other=0.0).to(tl.float32) + shift
            x += tl.where(keep, biased * kept_scale, 0.0) if DROPS else biased
        x = (x - mean[:, None]) * inverse[:, None]
        gamma_sum += y_grad * x
        beta_sum += y_grad
        y_grad *= scale
        # The formula above: g is y_grad now, and n is x.
        mean_gn = tl.sum(y_grad * x, 1) / WIDTH
        mean_g = tl.sum(y_grad, 1) / WIDTH
        x_grad = (y_grad - mean_g[:, None] - x * mean_gn[:, None]) * inverse[:, None]
        if ADDS and SUMMED:
            x_grad += tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual_grad + at, x_grad.to(residual_grad.dtype.element_ty), mask=inside)
        if DROPS:
            x_grad = tl.where(keep, x_grad * kept_scale, 0.0)
        if gemm_grad is not None:
            tl.store(gemm_grad + at, x_grad.to(gemm_grad.dtype.element_ty), mask=inside)
        if FACTOR != 0.0:
            rounded = x_grad.to(rounded_like.dtype.element_ty)
            rounded8 = in_8_bits(rounded, FACTOR, MAX, gemm_grad8.dtype.element_ty)
            tl.store(gemm_grad8 + at, rounded8, mask=inside)
        bias_sum += x_grad
    partials += program * 3 * WIDTH + column
    tl.store(partials, tl.sum(bias_sum, 0), mask=in_width)
    tl.store(partials + WIDTH, tl.sum(gamma_sum, 0), mask=in_width)
    tl.store(partials + 2 * WIDTH, tl.sum(beta_sum, 0), mask=in_width)
