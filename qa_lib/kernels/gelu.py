"""GELU by a sigmoid, in two fifths fewer instructions (variants E-gelu and L-gelu).

GELU (Hendrycks and Gimpel 2016) is x times the normal distribution's cdf at x, which PyTorch computes by the error
function: 38 instructions an element, and 53 for the gradient, so that even a kernel that only reads and writes 16-bit
numbers waits for its arithmetic. The logit of that cdf, log(P(x) / P(-x)), is an odd function that a polynomial of
three terms meets; a sigmoid, one power and one division, which the GPU has instructions for, takes it back: 23
instructions and 31. (Instructions counted in Triton's code for sm_90.)
On a T4 the same kernel waits for its memory, whose rate is a fifteenth of an H200's: there is nothing to gain there.
It compiles for one, though: for compute capability 7.5 and newer.

The bias of the linear layer before it is added here too, and the forward pass is one kernel. The backward kernel
writes the gradient of the layer's output and sums it over the tokens in registers, which is the bias's gradient; the
compiler would read it once more for that.

Where the linear layers on both sides are in 8-bit floats (kernels/fp8.py), the feed-forward block is one function. The
forward kernel then writes 8 bits alone, as the next GEMM takes them. The second weight's gradient needs GELU's output
in bf16: the backward kernel, which has all it takes, writes that again, so that a quarter of what a layer would keep
for its backward pass is never kept. It writes the gradient in 8 bits as well, for the GEMM that follows.

The polynomial was fitted to GELU's values v. They are off by a fifth of half a step of bf16 at most, that is of
2^-9 |v| + 1e-5; the gradients g by a fifth of 2^-9 |g| + 1e-3. A test holds both to that. Rounding to bf16 alone is off
by five times as much, but for values near 0. The usual approximation by tanh (`gelu_new`) is off by up to 5e-4.

GPT-2 was trained with that approximation, x (1 + tanh(z)) / 2. It is a sigmoid itself, x sigmoid(2 z), so that two
terms give it exactly.
"""

import torch

from qa_lib.kernels import fp8
from qa_lib.kernels.common import custom_op, jit, launch, sum_partials, tl
from qa_lib.kernels.fp8 import ACTIVATION, GRADIENT, WEIGHT

PROGRAMS = 264  # backward: two for each multiprocessor of an H200
FORWARD = {"ELEMENTS": 1024, "num_warps": 4}
# Rows that a program has at a time, columns, how far ahead of its arithmetic it reads, and threads.
BACKWARD = {"ROWS": 1, "COLUMNS": 1024, "STAGES": 3, "num_warps": 4}

# Of x, x^3 and x^5, by linear programming over 0 < x < 6.
TERMS = (1.59422507, 7.46130176e-2, -7.83352601e-4)
# Of the approximation by tanh, z = sqrt(2 / pi) (x + 0.044715 x^3).
TANH_TERMS = (1.59576912, 7.13548163e-2, 0.0)
LAST = 40.0  # the square of the largest x that the polynomial is for; further out, the cdf is 0 or 1 all the same


def gelu(x: torch.Tensor, bias: torch.Tensor, tanh: bool = False) -> torch.Tensor:
    """GELU of x + bias, or its approximation by tanh, for x [..., width] and bias [width], of the type of x."""
    return _Gelu.apply(x, bias, tanh)


def fp8_feed_forward(x, up, bias, tanh: bool, down, last: torch.Tensor | None) -> torch.Tensor:
    """gelu(x up^T + bias) down^T + last for bf16 x [..., width], up [inner, width], bias [inner], down [width, inner]
    and last [width] or None, by GEMMs in 8-bit floats: [..., width] in bf16. Weights may be transposed in memory."""
    return _Fp8FeedForward.apply(x, up, bias, tanh, down, last)


class _Gelu(torch.autograd.Function):
    # PyTorch's own derivative would have the compiler keep the cdf for the backward pass, in fp32.
    @staticmethod
    def forward(ctx, x, bias, tanh):
        ctx.save_for_backward(x, bias)
        ctx.tanh = tanh
        return _forward(x, bias, 0.0, tanh)

    @staticmethod
    def backward(ctx, grad):
        return *_backward(grad, *ctx.saved_tensors, 0.0, ctx.tanh)[:2], None


class _Fp8FeedForward(torch.autograd.Function):
    # One function, so that either pass hands on 8 bits, where autograd hands on one tensor in bf16.
    @staticmethod
    def forward(ctx, x, up, bias, tanh, down, last):
        rows = x.reshape(-1, x.shape[-1])
        (up8, up_across8), (down8, down_across8) = fp8.weight_in_e4m3(up), fp8.weight_in_e4m3(down)
        inner = fp8.scaled_mm(fp8.in_e4m3(rows, ACTIVATION), up8.t(), ACTIVATION * WEIGHT)
        ctx.save_for_backward(rows, inner, bias, up_across8, down_across8)
        ctx.tanh, ctx.has_last, ctx.across = (
            tanh,
            last is not None,
            [not w.is_contiguous() for w in (up, down)],
        )
        y = fp8.scaled_mm(
            _forward(inner, bias, ACTIVATION, tanh), down8.t(), ACTIVATION * WEIGHT, last
        )
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        rows, inner, bias, up_across8, down_across8 = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        gelu_grad = fp8.scaled_mm(fp8.in_e5m2(flat, GRADIENT), down_across8.t(), GRADIENT * WEIGHT)
        inner_grad, bias_grad, inner_grad8, output = _backward(
            gelu_grad, inner, bias, GRADIENT, ctx.tanh
        )
        x_grad = fp8.scaled_mm(inner_grad8, up_across8.t(), GRADIENT * WEIGHT)
        up_grad, down_grad = map(fp8.weight_grad, (inner_grad, flat), (rows, output), ctx.across)
        last_grad = flat.sum(0) if ctx.has_last else None
        return x_grad.view(*grad.shape[:-1], -1), up_grad, bias_grad, None, down_grad, last_grad


def _forward(x, bias, factor: float, tanh: bool):
    """GELU of x + bias; times `factor` in e4m3, if that is not 0."""
    if x.is_cuda:
        return _gelu_forward(x, bias, factor, tanh)
    biased = _wide(x) + bias
    y = (biased * _cdf(biased, tanh)[0]).to(x.dtype)
    return fp8.in_e4m3(y, factor) if factor else y


def _backward(grad, x, bias, factor: float, tanh: bool):
    """The gradients of x and bias; with a `factor` the former times that in e5m2, and GELU."""
    if x.is_cuda:
        return _gelu_backward(grad, x, bias, factor, tanh)
    x_grad, bias_grad, y = reference(grad, x, bias, tanh)
    return x_grad, bias_grad, fp8.in_e5m2(x_grad, factor) if factor else None, y


def reference(grad, x, bias, tanh=False):
    """As the operator in plain PyTorch, without a factor: the gradients of x and bias, and GELU."""
    biased = _wide(x) + bias
    cdf, slope = _cdf(biased, tanh)
    x_grad = grad * cdf * (1 + biased * (1 - cdf) * slope)
    return (
        x_grad.to(x.dtype),
        x_grad.flatten(0, -2).sum(0).to(bias.dtype),
        (biased * cdf).to(x.dtype),
    )


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _cdf(x: torch.Tensor, tanh: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The normal distribution's cdf at x, and the polynomial's derivative, whose product with cdf and 1 - cdf is the
    derivative of the cdf."""
    first, second, third = TANH_TERMS if tanh else TERMS
    square = (x * x).clamp(max=LAST)
    cdf = torch.sigmoid(x * (first + square * (second + square * third)))
    return cdf, first + square * (3 * second + square * (5 * third))


@custom_op("qa_lib::gelu_forward")
def _gelu_forward(
    x: torch.Tensor, bias: torch.Tensor, factor: float, tanh: bool = False
) -> torch.Tensor:
    """As _forward, by the kernel."""
    y = x.new_empty(x.shape, dtype=torch.float8_e4m3fn if factor else x.dtype)
    launch(
        gelu_forward_kernel, (-(-x.numel() // FORWARD["ELEMENTS"]),), x.contiguous(), bias, y, x.numel(),
        *(TANH_TERMS if tanh else TERMS), LAST, FACTOR=factor, MAX=fp8.E4M3_MAX, WIDTH=len(bias), **FORWARD,
    )  # fmt: skip
    return y


@custom_op("qa_lib::gelu_backward")
def _gelu_backward(
    grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, factor: float, tanh: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As _backward, by the kernel."""
    width = len(bias)
    rows = x.numel() // width
    x_grad = x.new_empty(x.shape)
    x_grad8 = x.new_empty(x.shape if factor else 0, dtype=torch.float8_e5m2)
    output = torch.empty_like(x_grad8, dtype=x.dtype)
    partials = x.new_empty(min(rows, PROGRAMS), width, dtype=torch.float32)
    launch(
        gelu_backward_kernel, (len(partials), -(-width // BACKWARD["COLUMNS"])), grad.contiguous(), x.contiguous(),
        bias, x_grad, x_grad8 if factor else None, output if factor else None, partials, rows,
        *(TANH_TERMS if tanh else TERMS), LAST, FACTOR=factor, MAX=fp8.E5M2_MAX, WIDTH=width, **BACKWARD,
    )  # fmt: skip
    return x_grad, sum_partials(partials, bias.dtype), x_grad8, output


@jit
def gelu_forward_kernel(
    gemm_out, bias, output, size,
    FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, LAST: tl.constexpr, FACTOR: tl.constexpr,
    MAX: tl.constexpr, WIDTH: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """Of ELEMENTS of `gemm_out`, which has `size` in rows of WIDTH: GELU with the bias added; with a FACTOR, that times
    it, no more than MAX, of `output`'s type. All tensors are contiguous."""
    at = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < size
    x = tl.load(gemm_out + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias + at % WIDTH, mask=inside, other=0.0).to(tl.float32)
    square = tl.minimum(x * x, LAST)
    value = (x * tl.sigmoid(x * (FIRST + square * (SECOND + square * THIRD)))).to(
        gemm_out.dtype.element_ty
    )
    if FACTOR != 0.0:
        value = tl.clamp(value.to(tl.float32) * FACTOR, -MAX, MAX, tl.PropagateNan.ALL)
    tl.store(output + at, value.to(output.dtype.element_ty), mask=inside)


@jit
def gelu_backward_kernel(
    grad, gemm_out, bias, gemm_grad, gemm_grad8, output, partials, rows,
    FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, LAST: tl.constexpr, FACTOR: tl.constexpr,
    MAX: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Of COLUMNS columns of every so many rows: the gradient of `gemm_out`, as `reference` has it, and the program's
    part of the gradient of the bias, in `partials` [programs, WIDTH]. With a FACTOR, the former times that is in
    `gemm_grad8`, too, and GELU in `output`. All tensors are contiguous, [rows, WIDTH] but for bias [WIDTH]."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_width = column < WIDTH
    shift = tl.load(bias + column, mask=in_width, other=0.0).to(tl.float32)
    bias_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(program * ROWS, rows, programs * ROWS, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)[:, None]
        at = row * WIDTH + column
        inside = (row < rows) & in_width
        x = tl.load(gemm_out + at, mask=inside, other=0.0).to(tl.float32) + shift
        x_grad = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        square = tl.minimum(x * x, LAST)
        cdf = tl.sigmoid(x * (FIRST + square * (SECOND + square * THIRD)))
        slope = FIRST + square * (3 * SECOND + square * (5 * THIRD))
        x_grad *= cdf * (1 + x * (1 - cdf) * slope)
        rounded = x_grad.to(gemm_grad.dtype.element_ty)
        tl.store(gemm_grad + at, rounded, mask=inside)
        if FACTOR != 0.0:
            scaled = tl.clamp(rounded.to(tl.float32) * FACTOR, -MAX, MAX, tl.PropagateNan.ALL)
            tl.store(gemm_grad8 + at, scaled.to(gemm_grad8.dtype.element_ty), mask=inside)
            tl.store(output + at, (x * cdf).to(output.dtype.element_ty), mask=inside)
        bias_sum += x_grad
    tl.store(partials + program * WIDTH + column, tl.sum(bias_sum, 0), mask=in_width)
