"""Sums over tokens that every program of a kernel has a part of.

The gradient of a bias is a sum over all tokens of the gradient of its layer's output. PyTorch and
its compiler read that gradient once more to sum it. The kernel that writes the gradient has it in
registers and can sum it there (varlen_attention.py, fused_norm.py, gelu.py): each program sums the
tokens that it has, and a small kernel adds up the programs' sums. No program adds to another's, so
that results are equal in every run. It is for GPUs of compute capability 7.5 and newer.
"""

import torch

from qa_lib.kernels.common import jit, tl
from qa_lib.kernels.precompile import launch

SUM_PARTIALS = {"ROWS": 128, "COLUMNS": 8, "num_warps": 4}  # a program's tile, and its warps


def sum_partials(partials: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum over programs of fp32 `partials` [programs, ...] on a GPU, in type `dtype`."""
    total = partials.new_empty(partials.shape[1:], dtype=dtype)
    grid = (-(-total.numel() // SUM_PARTIALS["COLUMNS"]),)
    launch(
        sum_partials_kernel,
        grid,
        partials=partials,
        total=total,
        programs=len(partials),
        WIDTH=total.numel(),
        **SUM_PARTIALS,
    )
    return total


@jit
def sum_partials_kernel(
    partials,
    total,
    programs,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum COLUMNS of the columns of `partials` [programs, WIDTH] into `total` [WIDTH]."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_width = column < WIDTH
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, programs, ROWS):
        program = first + tl.arange(0, ROWS)[:, None]
        sums += tl.load(
            partials + program * WIDTH + column, mask=(program < programs) & in_width, other=0.0
        )
    tl.store(total + column, tl.sum(sums, 0).to(total.dtype.element_ty), mask=in_width)
