"""The Triton kernels behind model/norms.py and model/gelu.py, which say what they compute and why.

All tensors are contiguous: a product, its residual and their gradients [rows, WIDTH], bias, gamma and beta [WIDTH],
statistics [2, rows], partial sums as the backward kernels say. The number of an element, for dropout, is its place in
memory.
"""

import triton
import triton.language as tl

from qa_lib.model import fp8
from qa_lib.model.short_kernels import hashed

# Rows that a program has at a time, threads, and how far ahead of its arithmetic it reads.
FORWARD = {"ROWS": 1, "num_warps": 1}
BACKWARD = {"ROWS": 1, "STAGES": 4, "num_warps": 4}
GELU_BACKWARD = {"ROWS": 1, "COLUMNS": 1024, "STAGES": 3, "num_warps": 4}

E5M2_MAX = tl.constexpr(fp8.E5M2_MAX)


@triton.jit
def kept(at, seed, threshold):
    """Which elements dropout keeps, as dropout.HashDropout does."""
    return (hashed(at.to(tl.uint32), seed) & 0x7FFFFFFF).to(tl.int32) >= threshold


@triton.jit(do_not_specialize=["threshold"])
def norm_forward(
    product, bias, residual, gamma, beta, seed, output, statistics, rows, eps, threshold, keeps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Of ROWS rows: the output, and the mean and the inverse deviation of what was normed."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    in_rows, in_width = row < rows, column < WIDTH
    at = row[:, None] * WIDTH + column
    inside = in_rows[:, None] & in_width
    x = tl.load(product + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias + column, mask=in_width, other=0.0).to(tl.float32)
    if DROPS:
        x = tl.where(kept(at, tl.load(seed).to(tl.uint32, bitcast=True), threshold), x * keeps, 0.0)
    x += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / WIDTH
    x = tl.where(in_width, x - mean[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)
    x *= inverse[:, None]
    scale = tl.load(gamma + column, mask=in_width, other=0.0).to(tl.float32)
    shift = tl.load(beta + column, mask=in_width, other=0.0).to(tl.float32)
    tl.store(output + at, (x * scale + shift).to(output.dtype.element_ty), mask=inside)
    tl.store(statistics + row, mean, mask=in_rows)
    tl.store(statistics + rows + row, inverse, mask=in_rows)


@triton.jit(do_not_specialize=["threshold"])
def norm_backward(
    grad, other, product, bias, residual, gamma, seed, statistics, product_grad, residual_grad, sums, rows, threshold,
    keeps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADDS: tl.constexpr, DROPS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Of every so many rows: the gradients of product and residual, and the program's part of the gradients of bias,
    gamma and beta, in `sums` [programs, 3, WIDTH]. The output's gradient is `grad`, or with ADDS grad + other. Rows
    beyond the last have zeros here, and add none to the sums."""
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
        if ADDS:
            y_grad += tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(product + at, mask=inside, other=0.0).to(tl.float32) + shift
        rest = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(statistics + row, mask=in_rows, other=0.0)
        inverse = tl.load(statistics + rows + row, mask=in_rows, other=0.0)
        if DROPS:
            keep = kept(at, seed_bits, threshold)
            x = tl.where(keep, x * keeps, 0.0)
        x = (x + rest - mean[:, None]) * inverse[:, None]
        gamma_sum += y_grad * x
        beta_sum += y_grad
        y_grad *= scale
        along = tl.sum(y_grad * x, 1) / WIDTH
        level = tl.sum(y_grad, 1) / WIDTH
        x_grad = (y_grad - level[:, None] - x * along[:, None]) * inverse[:, None]
        tl.store(residual_grad + at, x_grad.to(residual_grad.dtype.element_ty), mask=inside)
        if DROPS:
            x_grad = tl.where(keep, x_grad * keeps, 0.0)
        tl.store(product_grad + at, x_grad.to(product_grad.dtype.element_ty), mask=inside)
        bias_sum += x_grad
    sums += program * 3 * WIDTH + column
    tl.store(sums, tl.sum(bias_sum, 0), mask=in_width)
    tl.store(sums + WIDTH, tl.sum(gamma_sum, 0), mask=in_width)
    tl.store(sums + 2 * WIDTH, tl.sum(beta_sum, 0), mask=in_width)


@triton.jit
def gelu_backward(
    grad, product, bias, product_grad, eighth, sums, rows,
    FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, LAST: tl.constexpr, FACTOR: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of COLUMNS columns of every so many rows: the gradient of the product, as gelu._Gelu has it, and the program's
    part of the gradient of the bias, in `sums` [programs, WIDTH]. With a FACTOR, the former times that is in `eighth`,
    too."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_width = column < WIDTH
    shift = tl.load(bias + column, mask=in_width, other=0.0).to(tl.float32)
    bias_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(program * ROWS, rows, programs * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)[:, None]
        at = row * WIDTH + column
        inside = (row < rows) & in_width
        x = tl.load(product + at, mask=inside, other=0.0).to(tl.float32) + shift
        x_grad = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        square = tl.minimum(x * x, LAST)
        share = tl.sigmoid(x * (FIRST + square * (SECOND + square * THIRD)))
        slope = FIRST + square * (3 * SECOND + square * (5 * THIRD))
        x_grad *= share * (1 + x * (1 - share) * slope)
        rounded = x_grad.to(product_grad.dtype.element_ty)
        tl.store(product_grad + at, rounded, mask=inside)
        if FACTOR != 0.0:
            scaled = tl.clamp(rounded.to(tl.float32) * FACTOR, -E5M2_MAX, E5M2_MAX, tl.PropagateNan.ALL)
            tl.store(eighth + at, scaled.to(eighth.dtype.element_ty), mask=inside)
        bias_sum += x_grad
    tl.store(sums + program * WIDTH + column, tl.sum(bias_sum, 0), mask=in_width)
