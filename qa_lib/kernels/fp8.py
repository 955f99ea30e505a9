"""A linear layer in 8-bit floats, on GPUs that have them, sm_89 and newer (variant E-dropout-fp8).

Tensor cores multiply 8-bit floats at twice the rate of bf16, and the feed-forward block's two linear layers are two
thirds of a layer's multiplications. An 8-bit float has 2 or 3 bits of mantissa and little range, so that operands are
scaled into it first (Micikevicius et al. 2022): e4m3 (4 bits of exponent, 3 of mantissa) holds activations and weights,
and e5m2, with more range, gradients. All GEMMs but one (kernels/linear_cross_entropy.py) take fast sums, which keep
about 14 bits (DeepSeek-V3, 2024, section 3.3.2). The result is bf16. The gradient of the weight stays in bf16: it is
summed over thousands of tokens, and its error would go straight into the update.

A GEMM in 8-bit floats wants its second operand transposed in memory. The forward pass multiplies by the weight and the
backward pass by its transpose, so that either wants another copy. One kernel of our own makes both in tiles, of one
read of the weight; the compiler's and PyTorch's transposing copies take six times as long.
"""

from functools import lru_cache

import torch

from qa_lib.kernels.common import custom_op, is_fake, jit, launch, tl

# Powers of two that move values into the range of their format; fixed, since finding each tensor's maximum costs as
# much as the GEMM saves. Layer norm and GELU keep activations within ±28, weights stay within ±7; gradients of a
# mean loss get what GradScaler gives them in fp16, whose exponents e5m2 has.
ACTIVATION, WEIGHT, GRADIENT = 2.0**4, 2.0**6, 2.0**16
E4M3_MAX, E5M2_MAX = (
    448.0,
    57344.0,
)  # beyond which a value saturates, since the formats make it NaN or infinite
TILE = {"SIZE": 64, "num_warps": 4}  # of weight_in_e4m3
CAST = {"ELEMENTS": 1024, "num_warps": 4}


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + b for bf16 x [..., in], W [out, in], transposed in memory or not, and b [out] or None: [..., out] in
    bf16."""
    return _Fp8Linear.apply(x, weight, bias)


class _Fp8Linear(torch.autograd.Function):
    """Both operands are in e4m3 and, for the gradient of x, in e5m2 and e4m3; for that of W they stay in bf16."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        rows = x.reshape(-1, x.shape[-1])
        weight8, across8 = weight_in_e4m3(weight)
        ctx.save_for_backward(rows, across8)
        ctx.has_bias, ctx.across = bias is not None, not weight.is_contiguous()
        y = scaled_mm(in_e4m3(rows, ACTIVATION), weight8.t(), ACTIVATION * WEIGHT, bias)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        rows, across8 = ctx.saved_tensors
        flat = grad.reshape(-1, grad.shape[-1])
        x_grad = scaled_mm(in_e5m2(flat, GRADIENT), across8.t(), GRADIENT * WEIGHT)
        bias_grad = flat.sum(0) if ctx.has_bias else None
        return x_grad.view(*grad.shape[:-1], -1), weight_grad(flat, rows, ctx.across), bias_grad


def weight_grad(grad: torch.Tensor, rows: torch.Tensor, across: bool) -> torch.Tensor:
    """The gradient [out, in] of a linear layer's weight from those of its output [rows, out] and its input [rows, in];
    `across`: transposed in memory, as the weight is, lest it be copied for that."""
    return (rows.t() @ grad).t() if across else grad.t() @ rows


def in_e5m2(x: torch.Tensor, factor: float) -> torch.Tensor:
    """A tensor times a factor in e5m2, saturated."""
    return _in_8_bits(x, factor, E5M2_MAX, torch.float8_e5m2)


def in_e4m3(x: torch.Tensor, factor: float) -> torch.Tensor:
    """A tensor times a factor in e4m3, saturated."""
    return _in_8_bits(x, factor, E4M3_MAX, torch.float8_e4m3fn)


def _in_8_bits(x: torch.Tensor, factor: float, most: float, dtype: torch.dtype) -> torch.Tensor:
    # The compiler makes one kernel of it, and may join it with others; without it these are four.
    if torch.compiler.is_compiling() or not x.is_cuda:
        return (x.float() * factor).clamp(-most, most).to(dtype)
    return _cast(x, factor, most, dtype)


def _cast(x: torch.Tensor, factor: float, most: float, dtype: torch.dtype) -> torch.Tensor:
    """As _in_8_bits, by the kernel."""
    x8 = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    grid = (-(-x.numel() // CAST["ELEMENTS"]),)
    launch(cast_kernel, grid, x.contiguous(), x8, x.numel(), FACTOR=factor, MAX=most, **CAST)
    return x8


@jit
def cast_kernel(x, x8, size, FACTOR: tl.constexpr, MAX: tl.constexpr, ELEMENTS: tl.constexpr):
    """ELEMENTS of a contiguous tensor of `size`, as _in_8_bits has them."""
    at = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32) * FACTOR
    tl.store(
        x8 + at,
        tl.clamp(value, -MAX, MAX, tl.PropagateNan.ALL).to(x8.dtype.element_ty),
        mask=at < size,
    )


def weight_in_e4m3(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [rows, columns], which may be transposed in memory, times WEIGHT in e4m3, saturated, as it is and as its
    transpose, both contiguous."""
    if not weight.is_contiguous():
        return weight_in_e4m3(weight.t())[::-1]
    if weight.is_cuda:
        return _weight_in_e4m3(weight)
    weight8 = in_e4m3(weight, WEIGHT)
    return weight8, weight8.t().contiguous()


@custom_op("qa_lib::weight_in_e4m3")
def _weight_in_e4m3(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    weight8 = weight.new_empty(rows, columns, dtype=torch.float8_e4m3fn)
    across8 = weight.new_empty(columns, rows, dtype=torch.float8_e4m3fn)
    grid = (-(-rows // TILE["SIZE"]), -(-columns // TILE["SIZE"]))
    launch(
        weight_in_e4m3_kernel,
        grid,
        weight,
        weight8,
        across8,
        rows,
        columns,
        FACTOR=WEIGHT,
        MAX=E4M3_MAX,
        **TILE,
    )
    return weight8, across8


@jit
def weight_in_e4m3_kernel(
    weight,
    weight8,
    across8,
    rows,
    columns,
    FACTOR: tl.constexpr,
    MAX: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One tile, SIZE by SIZE, of the contiguous `weight` [rows, columns]."""
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)[:, None]
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)[None, :]
    inside = (row < rows) & (column < columns)
    value = tl.load(weight + row * columns + column, mask=inside, other=0.0).to(tl.float32) * FACTOR
    value = tl.clamp(value, -MAX, MAX, tl.PropagateNan.ALL).to(weight8.dtype.element_ty)
    tl.store(weight8 + row * columns + column, value, mask=inside)
    tl.store(across8 + column * rows + row, value, mask=inside)


def scaled_mm(
    a,
    b,
    scale: float,
    bias: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    fast=True,
):
    """a b / scale + bias in bf16, for a [m, k] and b [k, n] in 8-bit floats, b transposed in memory; the product times
    a `factor`, fp32 on the device, if there is one. Where it is not `fast`, partial sums are added up in fp32."""
    factor = _scalar(1.0, a) if factor is None else factor
    inverse = _scalar(1 / scale, a)
    return torch._scaled_mm(
        a, b, factor, inverse, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def _scalar(value: float, like: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling() or is_fake(like):
        return torch.full((), value, device=like.device)
    return _kept_scalar(value, like.device)


@lru_cache
def _kept_scalar(value: float, device: torch.device) -> torch.Tensor:
    # Made anew for each GEMM, it would be a kernel of a captured step.
    return torch.full((), value, device=device)
