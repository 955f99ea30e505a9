"""Dropout whose random bits are a hash of the element's number, in PyTorch and as device functions of our kernels.

model/dropout.py says why. Both forms give the same bits, so that a kernel can compute again in the backward pass what
the forward pass dropped, and so that tests can hold the kernels to plain PyTorch.
"""

import torch

from qa_lib.kernels.precompile import jit, tl


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
    bits = hash32(torch.arange(x.numel(), device=x.device, dtype=torch.int32).view(x.shape), seed) & 0x7FFFFFFF
    return torch.where(bits >= threshold_of(p), x * (1 / (1 - p)), 0.0)


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
