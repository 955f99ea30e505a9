"""A linear layer in 8-bit floats, on GPUs that have them, sm_89 and newer (variant E-dropout-fp8).

Tensor cores multiply 8-bit floats at twice the rate of bf16, and the feed-forward block's two
linear layers are two thirds of a layer's multiplications. An 8-bit float has 2 or 3 bits of
mantissa and little range, so that operands are scaled into it first (Micikevicius et al. 2022):
e4m3 (4 bits of exponent, 3 of mantissa) holds activations and weights, and e5m2, with more range,
gradients. All GEMMs but one (kernels/linear_cross_entropy.py) take fast sums, which keep about 14
bits (DeepSeek-V3, 2024, section 3.3.2). The result is bf16. The gradient of the weight may have
8 bits as well (`weight_grad8`). It is a sum over thousands of tokens, and its error goes straight
into the update: that GEMM adds up in fp32, which takes 4 % longer. Its operands are the 8-bit ones
of the other GEMMs turned, [columns, tokens], so that the layer keeps no input in bf16.

A GEMM in 8-bit floats wants its second operand transposed in memory. The forward pass multiplies by
the weight and the backward pass by its transpose, so that each wants a copy of its own. One kernel
makes both in tiles, from one read of the weight; the transposing copies of PyTorch and its compiler
take six times as long. One launch does a weight of all layers (cast_ahead), where nothing compiles.

What makes an operand writes it in 8 bits as well, where it is a kernel of ours that can: GELU
(gelu.py), the norms (fused_norm.py) and attention (varlen_attention.py). They write the same
numbers, from registers. Forward, such an *e4m3 copy* is an argument of the linear layer after it.
Backward it is the function after a linear layer that makes the gradient, and autograd hands on one
gradient for each result of the layer. So the layer has a second result, a *placeholder*: an e5m2
tensor without contents, whose gradient is that of the first result in e5m2. The function after the
layer takes both. Where it returns no gradient of the placeholder, the layer casts the other one. A
layer whose weight's gradient has 8 bits, and that sums no bias's, reads the e5m2 one alone. The
function after it is told so, by an argument grad8_alone, and writes and returns no other.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch

from qa_lib.kernels.common import INTERPRETED, custom_op, is_fake, jit, tl
from qa_lib.kernels.many_tensors import chosen
from qa_lib.kernels.precompile import launch

# Powers of two that move values into the range of their format. They are fixed, since finding each
# tensor's maximum costs as much as the GEMM saves. Layer norm and GELU keep activations within ±28;
# weights stay within ±7; gradients of a mean loss get what GradScaler gives them in fp16, whose
# exponents e5m2 has.
ACTIVATION = 2.0**4
WEIGHT = 2.0**6
GRADIENT = 2.0**16
# A larger value saturates, since conversion would make it NaN or infinite.
E4M3_MAX = 448.0
E5M2_MAX = 57344.0

TRANSPOSE = {"SIZE": 64, "num_warps": 4}  # of weights_in_e4m3_kernel
TURN = {"SIZE": 128, "num_warps": 8}  # of turned_kernel
CAST = {"ELEMENTS": 1024, "num_warps": 4}


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    x8: torch.Tensor | None = None,
    weight_grad8: bool = False,
) -> torch.Tensor:
    """Return x W^T + b in bf16 [..., out], for bf16 x [..., in], W [out, in] and b [out] or None.

    W may be transposed in memory. A bias that needs no gradient gets none. `x8` is x times
    ACTIVATION in e4m3, of the same shape, where something has written that already. With
    `weight_grad8` the gradient of W is a GEMM in 8-bit floats.
    """
    return _Fp8Linear.apply(x, weight, bias, x8, weight_grad8, False)


def fp8_linear_and_placeholder(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    x8: torch.Tensor | None = None,
    weight_grad8: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what fp8_linear does, and a placeholder [rows, out] for its gradient in e5m2."""
    return _Fp8Linear.apply(x, weight, bias, x8, weight_grad8, True)


def placeholder_of(rows: torch.Tensor) -> torch.Tensor:
    """Return a placeholder for the gradient of bf16 `rows` [rows, out], times GRADIENT, in e5m2.

    It has memory for one element.
    """
    return rows.new_empty_strided(rows.shape, (0, 0), dtype=torch.float8_e5m2)


class _Fp8Linear(torch.autograd.Function):
    """The linear layer's GEMMs: the output and the gradient of x in 8 bits, that of W if asked."""

    @staticmethod
    def forward(ctx, x, weight, bias, x8, weight_grad8, has_placeholder):
        rows = x.reshape(-1, x.shape[-1])
        rows8 = in_e4m3(rows, ACTIVATION) if x8 is None else x8.view(rows.shape)
        weight8, transposed8 = weight_in_e4m3(weight)
        ctx.save_for_backward(rows8 if weight_grad8 else rows, transposed8)
        ctx.shape = x.shape
        ctx.weight_grad8 = weight_grad8
        ctx.trains_bias = bias is not None and bias.requires_grad
        ctx.is_transposed = not weight.is_contiguous()
        y_rows = scaled_mm(rows8, weight8.t(), ACTIVATION * WEIGHT, bias)
        y = y_rows.view(*x.shape[:-1], -1)
        if not has_placeholder:
            return y
        # Otherwise a placeholder that got no gradient would get one of zeros.
        ctx.set_materialize_grads(False)
        return y, placeholder_of(y_rows)

    @staticmethod
    def backward(ctx, grad, grad8=None):
        rows, transposed8 = ctx.saved_tensors
        grad_rows = None if grad is None else grad.reshape(-1, grad.shape[-1])
        if grad8 is None:
            grad8 = in_e5m2(grad_rows, GRADIENT)
        x_grad = scaled_mm(grad8, transposed8.t(), GRADIENT * WEIGHT)
        bias_grad = grad_rows.sum(0) if ctx.trains_bias else None
        if ctx.weight_grad8:
            w_grad = weight_grad_by_8_bits(turned(grad8), turned(rows), ctx.is_transposed)
        else:
            w_grad = weight_grad(grad_rows, rows, ctx.is_transposed)
        return x_grad.view(ctx.shape), w_grad, bias_grad, None, None, None


def weight_grad(grad: torch.Tensor, rows: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    """Return the gradient [out, in] of a linear layer's weight.

    `grad` [rows, out] is the gradient of its output, `rows` [rows, in] its input. The result is
    transposed in memory if the weight `is_transposed`, so that nobody has to copy it for that.
    """
    return (rows.t() @ grad).t() if is_transposed else grad.t() @ rows


def weight_grad_by_8_bits(
    grad8: torch.Tensor, rows8: torch.Tensor, is_transposed: bool
) -> torch.Tensor:
    """Return what weight_grad does, in bf16, of operands in 8 bits that are `turned`.

    `grad8` [out, tokens] is times GRADIENT in e5m2, `rows8` [in, tokens] times ACTIVATION in e4m3.
    """
    scale = GRADIENT * ACTIVATION
    if is_transposed:
        return scaled_mm(rows8, grad8.t(), scale, fast=False).t()
    return scaled_mm(grad8, rows8.t(), scale, fast=False)


def turned(rows8: torch.Tensor) -> torch.Tensor:
    """Return 8-bit floats [rows, columns] turned, [columns, padded], and contiguous.

    A GEMM sums over multiples of 16 in 8 bits (`padded_rows`): the rest of the rows are zeros.
    """
    if rows8.is_cuda:
        return _turned(rows8)
    missing = padded_rows(len(rows8)) - len(rows8)
    # As integers: not every operator knows 8-bit floats.
    integers = torch.nn.functional.pad(rows8.view(torch.uint8), (0, 0, 0, missing))
    return integers.t().contiguous().view(rows8.dtype)


def padded_rows(rows: int) -> int:
    """Return the next multiple of 16."""
    return -(-rows // 16) * 16


@custom_op("qa_lib::turned")
def _turned(rows8: torch.Tensor) -> torch.Tensor:
    """Return what turned returns, by the kernel; the rows are on a GPU."""
    rows, columns = rows8.shape
    columns8 = rows8.new_empty(columns, padded_rows(rows))
    grid = (-(-rows // TURN["SIZE"]), -(-columns // TURN["SIZE"]))
    launch(
        turned_kernel,
        grid,
        rows8=rows8.contiguous().view(torch.uint8),
        columns8=columns8.view(torch.uint8),
        rows=rows,
        columns=columns,
        padded=columns8.shape[1],
        **TURN,
    )
    return columns8


@jit
def turned_kernel(rows8, columns8, rows, columns, padded, SIZE: tl.constexpr):
    """Turn one tile, SIZE by SIZE, of `rows8` [rows, columns] into `columns8` [columns, padded].

    Both are contiguous and of one type. What is beyond the rows becomes zero.
    """
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)[:, None]
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)[None, :]
    inside = (row < rows) & (column < columns)
    value = tl.load(rows8 + row * columns + column, mask=inside, other=0)
    tl.store(columns8 + column * padded + row, value, mask=(row < padded) & (column < columns))


def in_e5m2(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return x times a factor in e5m2, saturated."""
    return _in_8_bits(x, factor, E5M2_MAX, torch.float8_e5m2)


def in_e4m3(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return x times a factor in e4m3, saturated."""
    return _in_8_bits(x, factor, E4M3_MAX, torch.float8_e4m3fn)


def _in_8_bits(x: torch.Tensor, factor: float, limit: float, dtype: torch.dtype) -> torch.Tensor:
    """Return x times a factor, clamped to ±limit, in an 8-bit type."""
    # PyTorch's compiler makes one kernel of this, and may join it with others. Without it these are
    # four kernels, so that ours takes their place.
    if torch.compiler.is_compiling() or not x.is_cuda:
        return (x.float() * factor).clamp(-limit, limit).to(dtype)
    return _cast(x, factor, limit, dtype)


def _cast(x: torch.Tensor, factor: float, limit: float, dtype: torch.dtype) -> torch.Tensor:
    """Return what _in_8_bits returns, by the kernel; x is on a GPU."""
    x8 = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    grid = (-(-x.numel() // CAST["ELEMENTS"]),)
    launch(
        cast_kernel,
        grid,
        x=x.contiguous(),
        x8=x8,
        size=x.numel(),
        FACTOR=factor,
        MAX=limit,
        **CAST,
    )
    return x8


@jit
def cast_kernel(x, x8, size, FACTOR: tl.constexpr, MAX: tl.constexpr, ELEMENTS: tl.constexpr):
    """Cast ELEMENTS of a contiguous tensor `x` of `size` elements into `x8`, as _in_8_bits does."""
    at = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < size
    value = tl.load(x + at, mask=inside, other=0.0)
    tl.store(x8 + at, in_8_bits(value, FACTOR, MAX, x8.dtype.element_ty), mask=inside)


@jit
def in_8_bits(value, FACTOR: tl.constexpr, MAX: tl.constexpr, dtype: tl.constexpr):
    """Return values times FACTOR in an 8-bit type, ±MAX where they are beyond it; NaN stays.

    A GPU's conversion clamps them itself (cvt with satfinite), and Triton's interpreter's does
    not.
    """
    value = value.to(tl.float32) * FACTOR
    if INTERPRETED:
        value = tl.clamp(value, -MAX, MAX, tl.PropagateNan.ALL)
    return value.to(dtype)


@jit
def once(value8):
    """Return 8-bit floats as they are, and have the compiler compute them once.

    It would compute them again for each order in which they are stored, rather than have threads
    exchange bytes. An instruction that is not pure may have an effect beside its result, so that
    the compiler does not repeat it.
    """
    if INTERPRETED:
        return value8
    else:
        bits = value8.to(tl.int8, bitcast=True)
        bits = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [bits], dtype=tl.int8, is_pure=False, pack=4
        )
        return bits.to(value8.dtype, bitcast=True)


def weight_in_e4m3(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight [rows, columns] times WEIGHT in e4m3, saturated, and the transpose of that.

    Both results are contiguous; the weight may be transposed in memory.
    """
    if not weight.is_contiguous():
        transposed8, weight8 = weight_in_e4m3(weight.t())
        return weight8, transposed8
    if weight.is_cuda:
        # PyTorch's compiler asks for each weight by itself.
        ahead = None if torch.compiler.is_compiling() else vars(weight).pop("e4m3", None)
        if ahead is not None:
            return ahead
        weights8, transposed8 = _weights_in_e4m3([weight])
        return weights8[0], transposed8[0]
    weight8 = in_e4m3(weight, WEIGHT)
    return weight8, weight8.t().contiguous()


def cast_ahead(weights: Sequence[torch.Tensor]) -> None:
    """Cast weights of one shape by one launch, and leave with each what weight_in_e4m3 returns.

    That function takes it the next time that it is called, once, so that no copy outlives an
    update. The weights are contiguous and on a GPU.
    """
    copies = zip(*_weights_in_e4m3(list(weights)), strict=True)
    for weight, pair in zip(weights, copies, strict=True):
        weight.e4m3 = pair


@custom_op("qa_lib::weights_in_e4m3")
def _weights_in_e4m3(weights: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights [rows, columns] times WEIGHT in e4m3, saturated, and their transposes.

    The results are [weights, rows, columns] and [weights, columns, rows]. The weights are
    contiguous and on a GPU.
    """
    first = weights[0]
    rows, columns = first.shape
    weights8 = first.new_empty(len(weights), rows, columns, dtype=torch.float8_e4m3fn)
    transposed8 = first.new_empty(len(weights), columns, rows, dtype=torch.float8_e4m3fn)
    grid = (-(-rows // TRANSPOSE["SIZE"]), -(-columns // TRANSPOSE["SIZE"]), len(weights))
    launch(
        weights_in_e4m3_kernel,
        grid,
        weights=tuple(weights),
        weights8=weights8,
        transposed8=transposed8,
        rows=rows,
        columns=columns,
        FACTOR=WEIGHT,
        MAX=E4M3_MAX,
        COUNT=len(weights),
        **TRANSPOSE,
    )
    return weights8, transposed8


@jit
def weights_in_e4m3_kernel(
    weights,
    weights8,
    transposed8,
    rows,
    columns,
    FACTOR: tl.constexpr,
    MAX: tl.constexpr,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Cast one tile, SIZE by SIZE, of one of COUNT `weights` [rows, columns], and transpose it.

    The weights are contiguous; the results [COUNT, rows, columns] and [COUNT, columns, rows] are.
    """
    number = tl.program_id(2)
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)[:, None]
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)[None, :]
    inside = (row < rows) & (column < columns)
    weight = chosen(weights, number, COUNT)
    value = tl.load(weight + row * columns + column, mask=inside, other=0.0)
    value = in_8_bits(value, FACTOR, MAX, weights8.dtype.element_ty)
    first = number * rows * columns
    tl.store(weights8 + first + row * columns + column, value, mask=inside)
    tl.store(transposed8 + first + column * rows + row, value, mask=inside)


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float,
    bias: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    fast: bool = True,
) -> torch.Tensor:
    """Return factor * (a b) / scale + bias in bf16 [m, n], by a GEMM in 8-bit floats.

    `a` is [m, k], `b` [k, n] and transposed in memory, `bias` [n] and `factor` an fp32 number on
    the device, by default 1. A GEMM that is not `fast` adds up its partial sums in fp32.
    """
    if factor is None:
        factor = _scalar(1.0, a)
    return torch._scaled_mm(
        a,
        b,
        factor,
        _scalar(1 / scale, a),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


def _scalar(value: float, like: torch.Tensor) -> torch.Tensor:
    """Return a number as an fp32 tensor on another tensor's device."""
    if torch.compiler.is_compiling() or is_fake(like):
        return torch.full((), value, device=like.device)
    return _kept_scalar(value, like.device)


@lru_cache
def _kept_scalar(value: float, device: torch.device) -> torch.Tensor:
    """Return a number as a tensor that is kept, since making it takes a kernel."""
    return torch.full((), value, device=device)
