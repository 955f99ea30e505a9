"""GELU by a sigmoid, in half the instructions (variants E-gelu and L-gelu).

GELU (Hendrycks and Gimpel 2016) is x P(x), where P is the cdf of the normal distribution. PyTorch
computes P by the error function: 38 instructions an element, and 66 for the gradient, so that even
a kernel that only reads and writes 16-bit numbers waits for its arithmetic. Here P(x) is a sigmoid
of its own logit, log(P(x) / P(-x)). That is an odd function, and a polynomial of three terms fits
it; the sigmoid is one power and one reciprocal, which the GPU has instructions for. This takes 15
instructions and 40. (Counted in the code that Triton 3.6 makes of each kernel in bf16 for sm_90:
all instructions, divided by the elements that a thread has at a time.) On a T4 the same kernel
waits for its memory, whose rate is a fifteenth of an H200's: there is nothing to gain there. It
compiles for one, though: for compute capability 7.5 and newer.

The bias of the linear layer before it is added here too, and the forward pass is one kernel. The
backward kernel writes the gradient of the layer's output and sums it over the tokens in registers,
which is the bias's gradient; PyTorch's compiler would read it once more for that.

Where the linear layers on both sides are in 8-bit floats (kernels/fp8.py), the feed-forward block
is one function. The forward kernel then writes 8 bits alone, as the next GEMM takes them. The
second weight's gradient needs GELU's output in bf16: the backward kernel, which has all it takes,
writes that again, so that a quarter of what a layer would keep for its backward pass is never kept.
It writes the gradient in 8 bits as well, for the GEMM that follows. Where the weights' gradients
have 8 bits too (`weight_grad8`), nobody reads either in bf16: the kernel writes 8 bits alone, the
gradient both ways and GELU turned, three quarters of the bytes.

The polynomial was fitted to GELU's values v. They are off by a fifth of half a step of bf16 at
most, that is of 2^-9 |v| + 1e-5; the gradients g by a fifth of 2^-9 |g| + 1e-3. A test holds both
to that. Rounding to bf16 alone is off by five times as much, but for values near 0. The usual
approximation by tanh (`gelu_new`) is off by up to 5e-4.

GPT-2 was trained with that approximation, x (1 + tanh(z)) / 2. It is a sigmoid itself, x sigmoid(2
z), so that two terms give it exactly.
"""

import torch

from qa_lib.kernels import fp8
from qa_lib.kernels.common import INTERPRETED, KERNEL_LOG2_E, custom_op, jit, tl
from qa_lib.kernels.fp8 import ACTIVATION, GRADIENT, WEIGHT, in_8_bits, once
from qa_lib.kernels.partial_sums import sum_partials
from qa_lib.kernels.precompile import launch

PROGRAMS = 264  # of the backward kernel: two for each multiprocessor of an H200
# ROWS and COLUMNS are those that a program has at a time; STAGES, how many iterations ahead of its
# arithmetic it reads. A thread of the forward kernel has 16 neighbours, which in 8 bits are the 16
# bytes that one instruction stores, in each of two rows, which it reads before it computes.
FORWARD = {"ROWS": 8, "COLUMNS": 512, "num_warps": 4}
BACKWARD = {"ROWS": 1, "COLUMNS": 1024, "STAGES": 3, "num_warps": 4}
# The same for the backward kernel where it turns its results: then a tile's columns are stored as
# rows, and both ways take whole sectors of memory.
TURNING = {"ROWS": 64, "COLUMNS": 64, "STAGES": 3, "num_warps": 4}

# The polynomial's factors of x, x^3 and x^5, by linear programming over 0 < x < 6.
TERMS = (1.59422507, 7.46130176e-2, -7.83352601e-4)
# Those of the approximation by tanh, whose z is sqrt(2 / pi) (x + 0.044715 x^3).
TANH_TERMS = (1.59576912, 7.13548163e-2, 0.0)
# The square of the largest x that the polynomial is for. Further out the cdf is 0 or 1 anyway.
LARGEST_SQUARE = 40.0
# 1 / (1 + 2^power), where the power is the logit times -log2(e). Each of the two approximations is
# off by 2^-22 of its result, and gives 0 below 2^-126. Those that Triton's sigmoid takes are no
# nearer, and it takes eight instructions more for results below that. `tanh.approx.f32` would save
# one more. But it is off by up to 2^-11 and the cdf, (1 + tanh) / 2, by half that, even where that
# is far less than 1: GELU of -3 would be off by up to a fifth of itself.
SIGMOID = tl.constexpr("""{
    .reg .f32 sum;
    ex2.approx.ftz.f32 sum, $1;
    add.ftz.f32 sum, sum, 1.0;
    rcp.approx.ftz.f32 $0, sum;
}""")


def gelu(x: torch.Tensor, bias: torch.Tensor, tanh: bool = False) -> torch.Tensor:
    """Return GELU of x + bias, or its approximation by tanh, in the type of x.

    `x` is [..., width], `bias` [width].
    """
    return _Gelu.apply(x, bias, tanh)


def fp8_feed_forward(
    x: torch.Tensor,
    up: torch.Tensor,
    bias: torch.Tensor,
    tanh: bool,
    down: torch.Tensor,
    last: torch.Tensor | None,
    x8: torch.Tensor | None = None,
    weight_grad8: bool = False,
) -> torch.Tensor:
    """Return gelu(x up^T + bias) down^T + last in bf16 [..., width], by GEMMs in 8-bit floats.

    All are in bf16: x [..., width], up [inner, width], bias [inner], down [width, inner] and last
    [width] or None. The weights `up` and `down` may be transposed in memory. `x8` and
    `weight_grad8` are those of fp8.fp8_linear.
    """
    return _Fp8FeedForward.apply(x, up, bias, tanh, down, last, x8, weight_grad8, False)


def fp8_feed_forward_and_placeholder(
    x: torch.Tensor,
    up: torch.Tensor,
    bias: torch.Tensor,
    tanh: bool,
    down: torch.Tensor,
    last: torch.Tensor | None,
    x8: torch.Tensor | None = None,
    weight_grad8: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what fp8_feed_forward does, and a placeholder [rows, width] for its gradient in e5m2.

    kernels/fp8.py says what that is.
    """
    return _Fp8FeedForward.apply(x, up, bias, tanh, down, last, x8, weight_grad8, True)


class _Gelu(torch.autograd.Function):
    """GELU with a derivative of its own.

    PyTorch's would have the compiler keep the cdf for the backward pass, in fp32.
    """

    @staticmethod
    def forward(ctx, x, bias, tanh):
        ctx.save_for_backward(x, bias)
        ctx.tanh = tanh
        return _forward(x, bias, 0.0, tanh)

    @staticmethod
    def backward(ctx, grad):
        x, bias = ctx.saved_tensors
        x_grad, bias_grad, _, _ = _backward(grad, x, bias, 0.0, ctx.tanh)
        return x_grad, bias_grad, None


class _Fp8FeedForward(torch.autograd.Function):
    """A feed-forward block as one function.

    Each pass hands on 8 bits within it, where autograd would hand on one tensor in bf16.
    """

    @staticmethod
    def forward(ctx, x, up, bias, tanh, down, last, x8, weight_grad8, has_placeholder):
        rows = x.reshape(-1, x.shape[-1])
        rows8 = fp8.in_e4m3(rows, ACTIVATION) if x8 is None else x8.view(rows.shape)
        up8, up_transposed8 = fp8.weight_in_e4m3(up)
        down8, down_transposed8 = fp8.weight_in_e4m3(down)
        scale = ACTIVATION * WEIGHT
        inner = fp8.scaled_mm(rows8, up8.t(), scale)
        kept_rows = rows8 if weight_grad8 else rows
        ctx.save_for_backward(kept_rows, inner, bias, up_transposed8, down_transposed8)
        ctx.shape = x.shape
        ctx.weight_grad8 = weight_grad8
        ctx.tanh = tanh
        ctx.has_last = last is not None
        ctx.up_is_transposed = not up.is_contiguous()
        ctx.down_is_transposed = not down.is_contiguous()
        y_rows = fp8.scaled_mm(_forward(inner, bias, ACTIVATION, tanh), down8.t(), scale, last)
        y = y_rows.view(*x.shape[:-1], -1)
        if not has_placeholder:
            return y
        ctx.set_materialize_grads(False)
        return y, fp8.placeholder_of(y_rows)

    @staticmethod
    def backward(ctx, grad, grad8=None):
        rows, inner, bias, up_transposed8, down_transposed8 = ctx.saved_tensors
        grad_rows = None if grad is None else grad.reshape(-1, grad.shape[-1])
        if grad8 is None:
            grad8 = fp8.in_e5m2(grad_rows, GRADIENT)
        scale = GRADIENT * WEIGHT
        gelu_grad = fp8.scaled_mm(grad8, down_transposed8.t(), scale)
        if ctx.weight_grad8:
            bias_grad, inner_grad8, turned_grad8, output8 = _backward_turned(
                gelu_grad, inner, bias, ctx.tanh
            )
            up_grad = fp8.weight_grad_by_8_bits(
                turned_grad8, fp8.turned(rows), ctx.up_is_transposed
            )
            down_grad = fp8.weight_grad_by_8_bits(
                fp8.turned(grad8), output8, ctx.down_is_transposed
            )
        else:
            inner_grad, bias_grad, inner_grad8, output = _backward(
                gelu_grad, inner, bias, GRADIENT, ctx.tanh
            )
            up_grad = fp8.weight_grad(inner_grad, rows, ctx.up_is_transposed)
            down_grad = fp8.weight_grad(grad_rows, output, ctx.down_is_transposed)
        x_grad = fp8.scaled_mm(inner_grad8, up_transposed8.t(), scale)
        last_grad = grad_rows.sum(0) if ctx.has_last else None
        x_grad = x_grad.view(ctx.shape)
        return x_grad, up_grad, bias_grad, None, down_grad, last_grad, None, None, None


def _forward(x, bias, factor: float, tanh: bool):
    """Return GELU of x + bias; with a `factor` other than 0, times that in e4m3."""
    if x.is_cuda:
        return _gelu_forward(x, bias, factor, tanh)
    biased = _wide(x) + bias
    cdf, _ = _cdf(biased, tanh)
    y = biased * cdf
    return fp8.in_e4m3(y, factor) if factor else y.to(x.dtype)


def _backward(grad, x, bias, factor: float, tanh: bool):
    """Return the gradients of x and bias, the former times `factor` in e5m2, and GELU again.

    Without a factor, which is 0 then, nobody needs the last two: they may be None or empty.
    """
    if x.is_cuda:
        return _gelu_backward(grad, x, bias, factor, tanh)
    x_grad, bias_grad, y = reference(grad, x, bias, tanh)
    x_grad8 = fp8.in_e5m2(x_grad, factor) if factor else None
    return x_grad.to(x.dtype), bias_grad, x_grad8, y.to(x.dtype)


def _backward_turned(grad, x, bias, tanh: bool):
    """Return the gradient of bias, that of x in e5m2, that `turned`, and GELU turned in e4m3.

    `grad` and `x` are [rows, width]. The 8-bit ones are times fp8.GRADIENT and fp8.ACTIVATION.
    """
    if x.is_cuda:
        return _gelu_backward_turned(grad, x, bias, tanh)
    x_grad, bias_grad, y = reference(grad, x, bias, tanh)
    x_grad8 = fp8.in_e5m2(x_grad, GRADIENT)
    return bias_grad, x_grad8, fp8.turned(x_grad8), fp8.turned(fp8.in_e4m3(y, ACTIVATION))


def reference(grad, x, bias, tanh=False):
    """Return the gradients of x and bias, and GELU, in plain PyTorch.

    The first and the last are in fp32, or in fp64 if x has that type.
    """
    biased = _wide(x) + bias
    cdf, slope = _cdf(biased, tanh)
    x_grad = grad * cdf * (1 + biased * (1 - cdf) * slope)
    bias_grad = x_grad.flatten(0, -2).sum(0)
    return x_grad, bias_grad.to(bias.dtype), biased * cdf


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Return x in fp32, or in fp64 if it has that type."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _cdf(x: torch.Tensor, tanh: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normal distribution's cdf at x, and the derivative of the polynomial, its logit.

    The derivative of the cdf is the product of that slope with cdf and 1 - cdf.
    """
    first, second, third = TANH_TERMS if tanh else TERMS
    square = (x * x).clamp(max=LARGEST_SQUARE)
    cdf = torch.sigmoid(x * (first + square * (second + square * third)))
    slope = first + square * (3 * second + square * (5 * third))
    return cdf, slope


def _polynomial(tanh: bool) -> dict[str, float]:
    """Return the polynomial of the cdf's logit, as the kernels take it."""
    first, second, third = TANH_TERMS if tanh else TERMS
    return {"FIRST": first, "SECOND": second, "THIRD": third, "LARGEST_SQUARE": LARGEST_SQUARE}


@custom_op("qa_lib::gelu_forward")
def _gelu_forward(
    x: torch.Tensor, bias: torch.Tensor, factor: float, tanh: bool = False
) -> torch.Tensor:
    """Return what _forward returns, by the kernel; x is on a GPU."""
    width = len(bias)
    rows = x.numel() // width
    y = x.new_empty(x.shape, dtype=torch.float8_e4m3fn if factor else x.dtype)
    grid = (-(-rows // FORWARD["ROWS"]), -(-width // FORWARD["COLUMNS"]))
    launch(
        gelu_forward_kernel,
        grid,
        gemm_out=x.contiguous(),
        bias=bias,
        output=y,
        rows=rows,
        **_polynomial(tanh),
        FACTOR=factor,
        MAX=fp8.E4M3_MAX,
        WIDTH=width,
        **FORWARD,
    )
    return y


@custom_op("qa_lib::gelu_backward")
def _gelu_backward(
    grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, factor: float, tanh: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what _backward returns, by the kernel; without a factor the last two are empty."""
    width = len(bias)
    rows = x.numel() // width
    x_grad = x.new_empty(x.shape)
    x_grad8 = x.new_empty(x.shape if factor else 0, dtype=torch.float8_e5m2)
    output = torch.empty_like(x_grad8, dtype=x.dtype)
    partials = x.new_empty(min(rows, PROGRAMS), width, dtype=torch.float32)
    grid = (len(partials), -(-width // BACKWARD["COLUMNS"]))
    launch(
        gelu_backward_kernel,
        grid,
        grad=grad.contiguous(),
        gemm_out=x.contiguous(),
        bias=bias,
        gemm_grad=x_grad,
        gemm_grad8=x_grad8 if factor else None,
        turned_grad8=None,
        output=output if factor else None,
        turned_output8=None,
        partials=partials,
        rows=rows,
        padded=rows,
        **_polynomial(tanh),
        FACTOR=factor,
        MAX=fp8.E5M2_MAX,
        OUTPUT_FACTOR=0.0,
        OUTPUT_MAX=0.0,
        WIDTH=width,
        **BACKWARD,
    )
    return x_grad, sum_partials(partials, bias.dtype), x_grad8, output


@custom_op("qa_lib::gelu_backward_turned")
def _gelu_backward_turned(
    grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, tanh: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what _backward_turned returns, by the kernel; x is on a GPU."""
    rows, width = x.shape
    padded = fp8.padded_rows(rows)
    x_grad8 = x.new_empty(rows, width, dtype=torch.float8_e5m2)
    turned_grad8 = x.new_empty(width, padded, dtype=torch.float8_e5m2)
    turned_output8 = x.new_empty(width, padded, dtype=torch.float8_e4m3fn)
    column_tiles = -(-width // TURNING["COLUMNS"])
    row_programs = min(-(-rows // TURNING["ROWS"]), -(-2 * PROGRAMS // column_tiles))
    partials = x.new_empty(row_programs, width, dtype=torch.float32)
    launch(
        gelu_backward_kernel,
        (row_programs, column_tiles),
        grad=grad.contiguous(),
        gemm_out=x.contiguous(),
        bias=bias,
        gemm_grad=None,
        gemm_grad8=x_grad8,
        turned_grad8=turned_grad8,
        output=None,
        turned_output8=turned_output8,
        partials=partials,
        rows=rows,
        padded=padded,
        **_polynomial(tanh),
        FACTOR=GRADIENT,
        MAX=fp8.E5M2_MAX,
        OUTPUT_FACTOR=ACTIVATION,
        OUTPUT_MAX=fp8.E4M3_MAX,
        WIDTH=width,
        **TURNING,
    )
    return sum_partials(partials, bias.dtype), x_grad8, turned_grad8, turned_output8


@jit
def gelu_forward_kernel(
    gemm_out,
    bias,
    output,
    rows,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    LARGEST_SQUARE: tl.constexpr,
    FACTOR: tl.constexpr,
    MAX: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute GELU, with the bias added, of COLUMNS columns of ROWS rows of `gemm_out`.

    With a FACTOR it is multiplied by that, and becomes ±MAX beyond it. All tensors are contiguous,
    `bias` [WIDTH], the others [rows, WIDTH].
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_width = column < WIDTH
    at = row * WIDTH + column
    inside = (row < rows) & in_width
    # Read first, since all threads wait for each other when they share out the bias.
    x = tl.load(gemm_out + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias + column, mask=in_width, other=0.0).to(tl.float32)
    value = x * cdf_kernel(x, tl.minimum(x * x, LARGEST_SQUARE), FIRST, SECOND, THIRD)
    if FACTOR != 0.0:
        value = in_8_bits(value, FACTOR, MAX, output.dtype.element_ty)
    tl.store(output + at, value.to(output.dtype.element_ty), mask=inside)


@jit
def cdf_kernel(x, square, FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr):
    """Return the normal distribution's cdf at fp32 x, as _cdf does, from its clamped square."""
    if INTERPRETED:
        return tl.sigmoid(x * (FIRST + square * (SECOND + square * THIRD)))
    else:
        power = x * (
            -KERNEL_LOG2_E * FIRST
            + square * (-KERNEL_LOG2_E * SECOND + square * (-KERNEL_LOG2_E * THIRD))
        )
        return tl.inline_asm_elementwise(
            SIGMOID, "=f,f", [power], dtype=tl.float32, is_pure=True, pack=1
        )


@jit
def gelu_backward_kernel(
    grad,
    gemm_out,
    bias,
    gemm_grad,
    gemm_grad8,
    turned_grad8,
    output,
    turned_output8,
    partials,
    rows,
    padded,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    THIRD: tl.constexpr,
    LARGEST_SQUARE: tl.constexpr,
    FACTOR: tl.constexpr,
    MAX: tl.constexpr,
    OUTPUT_FACTOR: tl.constexpr,
    OUTPUT_MAX: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute the gradient of COLUMNS columns of every so many rows of `gemm_out`.

    The program's part of the bias's gradient goes into `partials` [programs, WIDTH]. The gradient
    goes into those of `gemm_grad`, `gemm_grad8` and `turned_grad8` that are not None, GELU into
    `output` or `turned_output8`. The 8-bit ones are times FACTOR and OUTPUT_FACTOR, ±MAX and
    ±OUTPUT_MAX beyond those. All tensors are contiguous, `bias` [WIDTH], the turned ones [WIDTH,
    padded] with zeros after the rows, the others [rows, WIDTH].
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
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
        square = tl.minimum(x * x, LARGEST_SQUARE)
        cdf = cdf_kernel(x, square, FIRST, SECOND, THIRD)
        slope = FIRST + square * (3 * SECOND + square * (5 * THIRD))
        x_grad *= cdf * (1 + x * (1 - cdf) * slope)
        bias_sum += x_grad
        if gemm_grad is not None:
            tl.store(gemm_grad + at, x_grad.to(gemm_grad.dtype.element_ty), mask=inside)
        if gemm_grad8 is not None:
            x_grad8 = in_8_bits(x_grad, FACTOR, MAX, gemm_grad8.dtype.element_ty)
            if turned_grad8 is not None:
                x_grad8 = once(x_grad8)
            tl.store(gemm_grad8 + at, x_grad8, mask=inside)
        if output is not None:
            tl.store(output + at, (x * cdf).to(output.dtype.element_ty), mask=inside)
        if turned_grad8 is not None:
            turned_at = column * padded + row
            in_turned = (row < padded) & in_width
            tl.store(turned_grad8 + turned_at, x_grad8, mask=in_turned)
            value = tl.where(inside, x * cdf, 0.0)
            dtype: tl.constexpr = turned_output8.dtype.element_ty
            value8 = once(in_8_bits(value, OUTPUT_FACTOR, OUTPUT_MAX, dtype))
            tl.store(turned_output8 + turned_at, value8, mask=in_turned)
    tl.store(partials + program * WIDTH + column, tl.sum(bias_sum, 0), mask=in_width)
