"""The Triton kernel behind model/products.py, which says what it is for."""

import triton
import triton.language as tl

ADD_UP = {"ROWS": 128, "COLUMNS": 8, "num_warps": 4}


@triton.jit
def add_up(sums, total, programs, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of COLUMNS columns of `sums` [programs, WIDTH], over ROWS rows at a time: the `total` [WIDTH]."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_width = column < WIDTH
    found = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, programs, ROWS):
        program = first + tl.arange(0, ROWS)[:, None]
        found += tl.load(sums + program * WIDTH + column, mask=(program < programs) & in_width, other=0.0)
    tl.store(total + column, tl.sum(found, 0).to(total.dtype.element_ty), mask=in_width)
