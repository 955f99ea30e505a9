"""Many tensors in one call of a kernel.

What is done to every parameter of a model takes one launch for TENSORS_PER_CALL of them, which come
as tuples of pointers. Each of the launch's programs works on a block of elements of one tensor, and
finds out which (`tensor_of_program`).
"""

from collections.abc import Callable, Iterator, Sequence

import torch

from qa_lib.kernels.common import jit, tl

# Kernels read 16 bytes at a time where sizes and beginnings are multiples of so many elements.
ALIGN = 16
TENSORS_PER_CALL = 16  # at most


def largest_first(row: tuple) -> int:
    """Return the key by which rows of `in_calls` are sorted from the largest tensor down."""
    return -row[0].numel()


def in_calls(
    *columns: list, order: Callable[[tuple], int] = largest_first
) -> Iterator[tuple[tuple[tuple, ...], tuple[int, ...]]]:
    """Divide many tensors, and what belongs to each, among the calls of a kernel.

    `columns` are lists of equal length. The first has the tensors; items at one place of all lists
    belong together and make a row. Yields, for each call, a tuple with a tuple of items for each
    column, and the number of elements of each of the call's tensors. A call has TENSORS_PER_CALL
    rows, and the last one what is left.

    Rows are sorted by the key `order`. One tensor whose size is no multiple of ALIGN slows its
    whole call, so that these come after all others.
    """

    def key(row):
        is_unaligned = row[0].numel() % ALIGN > 0
        return is_unaligned, order(row)

    rows = sorted(zip(*columns, strict=True), key=key)
    for begin in range(0, len(rows), TENSORS_PER_CALL):
        rows_of_call = rows[begin : begin + TENSORS_PER_CALL]
        sizes = tuple(row[0].numel() for row in rows_of_call)
        yield tuple(zip(*rows_of_call, strict=True)), sizes


def with_sums(
    all_calls: Sequence[tuple[tuple, tuple[int, ...]]], block: int, device: torch.device
) -> tuple[torch.Tensor, list[tuple[tuple, tuple[int, ...], torch.Tensor]]]:
    """Return room for the sum of each program of some calls, and the calls with their room.

    `all_calls` are those of `in_calls`, and a program takes `block` elements of one tensor. The
    room is one fp32 tensor [programs of all calls], not yet written. Each call comes back with its
    part of it, a view [programs of the call], as a third item.
    """
    programs = [sum(-(-size // block) for size in sizes) for _, sizes in all_calls]
    sums = torch.empty(sum(programs), dtype=torch.float32, device=device)
    parts = sums.split(programs)
    return sums, [(*call, part) for call, part in zip(all_calls, parts, strict=True)]


@jit
def tensor_of_program(sizes, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return which BLOCK elements of which of COUNT tensors this program works on.

    These are the number of the tensor, the number of the block in it, the places of the block's
    elements in the tensor, and whether each lies in it. `sizes` has the elements of each tensor.
    The programs of the first tensor come before those of the second.
    """
    program = tl.program_id(0)
    number = 0
    begin = 0
    size = sizes[0]
    blocks = tl.cdiv(sizes[0], BLOCK)
    for other in tl.static_range(1, COUNT):
        if program >= blocks:
            number = other
            begin = blocks
            size = sizes[other]
        blocks += tl.cdiv(sizes[other], BLOCK)
    block = program - begin
    element = block * BLOCK + tl.arange(0, BLOCK)
    return number, block, element, element < size


@jit
def chosen(pointers, number, COUNT: tl.constexpr):
    """Return `pointers[number]` for a number that is known only when the kernel runs.

    Triton indexes a tuple by what it knows when it compiles.
    """
    pointer = pointers[0]
    for other in tl.static_range(1, COUNT):
        if number == other:
            pointer = pointers[other]
    return pointer
