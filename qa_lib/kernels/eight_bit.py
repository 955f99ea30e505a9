"""Adam's moments in 8 bits, for the kernel that updates the weights (variant E-recompute-8bit).

Half of what AdamW keeps is its two moments. A byte has 256 values, and a moment's elements differ
by powers of ten, so that equal steps would lose the small ones: the fewer bits there are, the more
of them belong to the exponent. A code here is 4 bits of exponent, for 16 octaves below the largest
element of a block of 1,024, and as many bits of mantissa as are left: 3 for the first moment, which
has a sign, and 4 for the root of the second, which has none. Code 0 is zero. A code is the upper
end of fp32's own bits, so that coding is a sum and a shift. Each block has a scale, in fp32
(Dettmers et al. 2022, "8-bit Optimizers", have blocks too, and a table of values).

Rounding is stochastic, since a step moves the second moment by far less than its values lie apart
(train/master_adamw.py says more). The root of a second moment that is not zero is never rounded to
zero, by which the update would divide.

The functions in PyTorch are for the CPU and for tests; a kernel has its block in registers.
"""

import torch

from qa_lib.kernels.common import jit, tl

BLOCK = 1024  # elements that share a scale
# How many of fp32's 32 bits are cut off. What stays is the sign, the exponent, and 3 or 4 bits of
# mantissa.
MEAN_CUT = 20
ROOT_CUT = 19
EXPONENT = 112  # fp32's exponent of code 0; with 112 the largest code has the exponent of 1


def largest(cut: int) -> float:
    """Return the value of the highest code, for a scale of 1."""
    return 2.0 - 2.0 ** (cut - 23)


def least(cut: int) -> float:
    """Return the value of code 1, for a scale of 1."""
    return 2.0 ** (EXPONENT - 127) * (1 + 2.0 ** (cut - 23))


def encode(x: torch.Tensor, bits: torch.Tensor, cut: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes, int32 [blocks, BLOCK], and scales, fp32 [blocks, 1], of x >= 0 in fp32.

    `x` is [blocks, BLOCK]; `bits`, int32 of that shape, are 16 random bits for each element.
    """
    scale = x.amax(1, keepdim=True) / largest(cut)
    y = (x / torch.where(scale > 0, scale, 1.0)).clamp(max=largest(cut))
    code = ((y.view(torch.int32) + (bits << (cut - 16))) >> cut) - (EXPONENT << (23 - cut))
    # Below code 1 lies nothing but zero: a value there becomes one of the two, at random.
    tiny = (y * (2.0**16 / least(cut)) > bits).int()
    return torch.where(code > 0, code, tiny), scale


def decode(code: torch.Tensor, scale: torch.Tensor, cut: int) -> torch.Tensor:
    """Return what codes, int32 [blocks, BLOCK], stand for with scales [blocks, 1], in fp32."""
    value = ((code + (EXPONENT << (23 - cut))) << cut).view(torch.float32)
    return torch.where(code > 0, value, 0.0) * scale


@jit
def encode_kernel(x, bits, CUT: tl.constexpr):
    """Return the codes and the scale of one block, as `encode` makes them."""
    LARGEST: tl.constexpr = 2.0 - 2.0 ** (CUT - 23)
    LEAST: tl.constexpr = 2.0**-15 * (1 + 2.0 ** (CUT - 23))
    scale = tl.max(x, 0) / LARGEST
    y = tl.minimum(x / tl.where(scale > 0, scale, 1.0), LARGEST)
    code = ((y.to(tl.int32, bitcast=True) + (bits << (CUT - 16))) >> CUT) - (112 << (23 - CUT))
    tiny = (y * (65536.0 / LEAST) > bits.to(tl.float32)).to(tl.int32)
    return tl.where(code > 0, code, tiny), scale


@jit
def decode_kernel(code, scale, CUT: tl.constexpr):
    """Return what the codes of one block stand for, as `decode` does."""
    value = ((code + (112 << (23 - CUT))) << CUT).to(tl.float32, bitcast=True)
    return tl.where(code > 0, value, 0.0) * scale
