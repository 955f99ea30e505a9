"""Partial-sum reduction: the last step of a gradient that is a sum over all tokens.

The gradient of a bias is the sum of its layer's output gradient over all tokens, for which PyTorch and its compiler
read that gradient once more. The kernel that writes the gradient has it in registers and can sum it there
(varlen_attention.py, fused_norm.py, gelu.py): each program sums the tokens that it has, and this small kernel adds up
the programs' partial sums. No program adds to another's, so that results are equal in every run. It is for GPUs of
compute capability 7.5 and newer.
"""

import torch

from qa_lib.kernels.precompile import jit, launch, tl

TILE = {"ROWS": 128, "COLUMNS": 8, "num_warps": 4}


def sum_partials(partials: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum over programs of fp32 [programs, ...] on a GPU, in this type."""
    total = partials.new_empty(partials.shape[1:], dtype=dtype)
    grid = (-(-total.numel() // TILE["COLUMNS"]),)
    launch(sum_partials_kernel, grid, partials, total, len(partials), WIDTH=total.numel(), **TILE)
    return total


@jit
def sum_partials_kernel(partials, total, programs, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of COLUMNS columns of `partials` [programs, WIDTH], over ROWS rows at a time: the `total` [WIDTH]."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_width = column < WIDTH
    found = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, programs, ROWS):
        program = first + tl.arange(0, ROWS)[:, None]
        found += tl.load(partials + program * WIDTH + column, mask=(program < programs) & in_width, other=0.0)
    tl.store(total + column, tl.sum(found, 0).to(total.dtype.element_ty), mask=in_width)
