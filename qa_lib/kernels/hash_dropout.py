"""Dropout whose random bits are a hash of the element's number.

model/hash_dropout.py says why. The hash is here in PyTorch and as a device function. Both give the
same bits, so that a kernel can compute again in the backward pass what the forward pass dropped,
and so that tests can hold the kernels to plain PyTorch.
"""

import torch

from qa_lib.kernels.common import jit, tl
from qa_lib.kernels.precompile import launch

# A prime near 2^32 divided by the golden ratio (Knuth 1973). Products of neighbouring numbers with
# it, in 32 bits, lie far apart: they are seeds of hashes that have little in common.
GOLDEN = 0x9E3779B1
GOLDEN_INT32 = GOLDEN - 2**32  # the same bits as a number of int32, which PyTorch has
KERNEL_GOLDEN = tl.constexpr(GOLDEN)  # as kernels read it
DROPOUT = {"ELEMENTS": 1024, "num_warps": 4}


def hash32(numbers: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Return 32 random bits, as int32, for each of some `numbers`; two seeds give unrelated bits.

    Numbers and seed are int32, and their shapes broadcast. The hash is the finalizer "lowbias32"
    (Wellons 2018), with the seed added near its start.
    """
    # PyTorch's int32 wraps when it multiplies, and keeps the sign when it shifts, hence the masks.
    bits = ((numbers ^ ((numbers >> 16) & 0xFFFF)) + seed) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)
    return bits ^ ((bits >> 16) & 0xFFFF)


def threshold_in_31_bits(p: float) -> int:
    """Return the number below which 31 bits of a hash drop their element, at dropout rate `p`."""
    return int(p * 2**31)


def hash_dropout(x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
    """Return `x` after dropout with rate `p`; `x` has fewer than 2^31 elements, `seed` is int32."""
    if x.is_cuda and not torch.compiler.is_compiling():
        return _HashDropout.apply(x, seed, p)
    # PyTorch's compiler makes one kernel of what follows; on a CPU it runs as it is.
    numbers = torch.arange(x.numel(), device=x.device, dtype=torch.int32).view(x.shape)
    bits = hash32(numbers, seed) & 0x7FFFFFFF
    return torch.where(bits >= threshold_in_31_bits(p), x * (1 / (1 - p)), 0.0)


class _HashDropout(torch.autograd.Function):
    """`hash_dropout` by one kernel, which drops the gradient by the same bits."""

    @staticmethod
    def forward(ctx, x, seed, p):
        ctx.save_for_backward(seed)
        ctx.p = p
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        grid = (-(-x.numel() // DROPOUT["ELEMENTS"]),)
        launch(
            dropout_kernel,
            grid,
            x=x.contiguous(),
            y=y,
            seed=seed,
            size=x.numel(),
            threshold=threshold_in_31_bits(p),
            kept_scale=1 / (1 - p),
            **DROPOUT,
        )
        return y

    @staticmethod
    def backward(ctx, grad):
        (seed,) = ctx.saved_tensors
        return _HashDropout.apply(grad, seed, ctx.p), None, None


@jit(do_not_specialize=["threshold"])
def dropout_kernel(x, y, seed, size, threshold, kept_scale, ELEMENTS: tl.constexpr):
    """Drop out ELEMENTS of a contiguous `x` of `size` elements into `y`, as hash_dropout does.

    Kept elements are multiplied by `kept_scale`, which is 1 / (1 - rate).
    """
    at = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32) * kept_scale
    keep = keep_mask(at, tl.load(seed).to(tl.uint32, bitcast=True), threshold)
    tl.store(y + at, tl.where(keep, value, 0.0).to(y.dtype.element_ty), mask=at < size)


@jit
def hash32_kernel(numbers, seed):
    """Return the bits of `hash32` for unsigned numbers."""
    bits = ((numbers ^ (numbers >> 16)) + seed) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@jit
def keep_mask(at, seed, threshold):
    """Return which elements hash_dropout keeps, of those with the numbers `at` in their tensor."""
    return (hash32_kernel(at.to(tl.uint32), seed) & 0x7FFFFFFF).to(tl.int32) >= threshold
