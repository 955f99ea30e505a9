"""What several kernels need: dropout's random bits by a hash, and the sum of what each program has summed.

Dropout's bits are a hash of the element's number; model/fused_blocks.py says why. The hash is here in PyTorch and as a
device function. Both forms give the same bits, so that a kernel can compute again in the backward pass what the forward
pass dropped, and so that tests can hold the kernels to plain PyTorch.

Partial-sum reduction is the last step of a gradient that is a sum over all tokens, as that of a bias is of its layer's
output gradient. PyTorch and its compiler read that gradient once more for it. The kernel that writes the gradient has
it in registers and can sum it there (varlen_attention.py, fused_norm.py, gelu.py): each program sums the tokens that it
has, and a small kernel adds up the programs' partial sums. No program adds to another's, so that results are equal in
every run. It is for GPUs of compute capability 7.5 and newer.
"""

import torch

from qa_lib.kernels.precompile import jit, launch, tl

TILE = {"ROWS": 128, "COLUMNS": 8, "num_warps": 4}  # of sum_partials
DROPOUT = {"ELEMENTS": 1024, "num_warps": 4}


def hash32(numbers: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """32 bits for each of some `numbers`, which two seeds make unrelated; all of them int32, of shapes that broadcast.

    The finalizer "lowbias32" (Wellons 2018), with the seed near its start.
    """
    # PyTorch's int32 wraps when it multiplies, and keeps the sign when it shifts, hence the masks.
    bits = ((numbers ^ ((numbers >> 16) & 0xFFFF)) + seed) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return bits ^ ((bits >> 16) & 0xFFFF)


def threshold_of(p: float) -> int:
    """Below it 31 bits of a hash drop their element."""
    return int(p * 2**31)


def hash_dropout(x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
    """Dropout with rate `p` of a tensor of fewer than 2^31 elements."""
    if x.is_cuda and not torch.compiler.is_compiling():
        return _HashDropout.apply(x, seed, p)  # one kernel, where the compiler would make one of what follows
    bits = hash32(torch.arange(x.numel(), device=x.device, dtype=torch.int32).view(x.shape), seed) & 0x7FFFFFFF
    return torch.where(bits >= threshold_of(p), x * (1 / (1 - p)), 0.0)


class _HashDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seed, p):
        ctx.save_for_backward(seed)
        ctx.p, y = p, torch.empty_like(x, memory_format=torch.contiguous_format)
        grid = (-(-x.numel() // DROPOUT["ELEMENTS"]),)
        launch(dropout_kernel, grid, x.contiguous(), y, seed, x.numel(), threshold_of(p), 1 / (1 - p), **DROPOUT)
        return y

    @staticmethod
    def backward(ctx, grad):
        return _HashDropout.apply(grad, *ctx.saved_tensors, ctx.p), None, None


@jit(do_not_specialize=["threshold"])
def dropout_kernel(x, y, seed, size, threshold, keeps, ELEMENTS: tl.constexpr):
    """ELEMENTS of a contiguous tensor of `size`, as hash_dropout has them; `keeps` is 1 / (1 - rate)."""
    at = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32) * keeps
    keep = keep_mask(at, tl.load(seed).to(tl.uint32, bitcast=True), threshold)
    tl.store(y + at, tl.where(keep, value, 0.0).to(y.dtype.element_ty), mask=at < size)


@jit
def hash32_kernel(numbers, seed):
    """As hash32, in unsigned numbers."""
    bits = ((numbers ^ (numbers >> 16)) + seed) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@jit
def keep_mask(at, seed, threshold):
    """Which elements `at` these places in memory hash_dropout keeps."""
    return (hash32_kernel(at.to(tl.uint32), seed) & 0x7FFFFFFF).to(tl.int32) >= threshold


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
