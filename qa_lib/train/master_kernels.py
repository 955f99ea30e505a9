"""The Triton kernels behind train/masters.py, which says what they compute and why.

One call does many tensors. They come as tuples of COUNT pointers, of one kind each, and a program takes BLOCK elements
of one of the tensors, the programs of the first before those of the second. All tensors are contiguous. The kernels
compile for compute capability 7.5 and newer.
"""

import triton
import triton.language as tl

from qa_lib.model.short_kernels import hashed

COUNT = 16  # tensors of a call
NORM = {"BLOCK": 8192, "num_warps": 4}
UPDATE = {"BLOCK": 1024, "num_warps": 4}


@triton.jit
def task_of(sizes, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """What this program does: the number of its tensor, its elements, and which of these there are."""
    program = tl.program_id(0)
    number, begin, size = 0, 0, sizes[0]
    blocks = tl.cdiv(sizes[0], BLOCK)
    for other in tl.static_range(1, COUNT):
        if program >= blocks:
            number, begin, size = other, blocks, sizes[other]
        blocks += tl.cdiv(sizes[other], BLOCK)
    element = (program - begin) * BLOCK + tl.arange(0, BLOCK)
    return number, element, element < size


@triton.jit
def chosen(pointers, number, COUNT: tl.constexpr):
    """The pointer of that number. It is not known when the kernel is compiled, as an index of a tuple has to be."""
    found = pointers[0]
    for other in tl.static_range(1, COUNT):
        if number == other:
            found = pointers[other]
    return found


@triton.jit(do_not_specialize_on_alignment=["sums"])
def square_sums(tensors, sizes, sums, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the squares of each program's elements, `sums` [programs]."""
    number, element, inside = task_of(sizes, COUNT, BLOCK)
    value = tl.load(chosen(tensors, number, COUNT) + element, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(value * value, 0))


@triton.jit
def upper(value, addend):
    """As masters.upper, of 16 bits."""
    bits = (value.to(tl.int32, bitcast=True) + addend) & -65536
    return tl.where(value == value, bits.to(tl.float32, bitcast=True), value)


@triton.jit
def adamw(
    weights, grads, rests, means, squares, firsts, sizes, step, factor, rate, growth, skip,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, FINER: tl.constexpr, GOLDEN: tl.constexpr,
    SKIPS: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As masters.update; without SKIPS `skip` is not read."""
    if SKIPS:  # noqa: SIM102  known when it is compiled
        if tl.load(skip) != 0.0:
            return
    number, element, inside = task_of(sizes, COUNT, BLOCK)
    weight_at = chosen(weights, number, COUNT) + element
    rest_at = chosen(rests, number, COUNT) + element
    mean_at = chosen(means, number, COUNT) + element
    square_at = chosen(squares, number, COUNT) + element
    grad = tl.load(chosen(grads, number, COUNT) + element, mask=inside).to(tl.float32) * tl.load(factor)
    weight = tl.load(weight_at, mask=inside).to(tl.float32)
    rest = tl.load(rest_at, mask=inside)
    mean = tl.load(mean_at, mask=inside).to(tl.float32)
    square = tl.load(square_at, mask=inside).to(tl.float32)

    mean += (grad - mean) * (1 - BETA1)
    square = square * BETA2 + grad * grad * (1 - BETA2)
    move = mean / (tl.sqrt_rn(square * tl.load(growth)) + EPS) * tl.load(rate)
    if rests[0].dtype.element_ty == tl.int16:
        master = (weight.to(tl.int32, bitcast=True) + rest.to(tl.int32)).to(tl.float32, bitcast=True) - move
        weight = upper(master, 0x8000)
        rest = (master.to(tl.int32, bitcast=True) - weight.to(tl.int32, bitcast=True)).to(tl.int16)
    else:
        master = weight + rest.to(tl.float32) / FINER - move
        weight = master.to(tl.float16).to(tl.float32)
        rest = ((master - weight) * FINER).to(tl.float16)
    if means[0].dtype.element_ty == tl.bfloat16:
        seed = (tl.load(step).to(tl.int32) * GOLDEN).to(tl.uint32, bitcast=True)
        bits = hashed((tl.load(chosen(firsts, number, COUNT)) + element).to(tl.uint32), seed)
        mean = upper(mean, (bits & 0xFFFF).to(tl.int32))
        square = upper(square, (bits >> 16).to(tl.int32))

    tl.store(weight_at, weight.to(weights[0].dtype.element_ty), mask=inside)
    tl.store(rest_at, rest, mask=inside)
    tl.store(mean_at, mean.to(means[0].dtype.element_ty), mask=inside)
    tl.store(square_at, square.to(squares[0].dtype.element_ty), mask=inside)
