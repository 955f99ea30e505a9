"""Adam's moments in 8 bits, for the kernel that updates the weights (variant E-recompute-8bit).

Half of what AdamW keeps is its two moments. A byte has 256 values, and a moment's elements differ by powers of ten, so
that equal steps would lose the small ones: the fewer bits there are, the more of them belong to the exponent. A code
here is the exponent, 4 bits for 16 octaves below the largest element of a block of 1,024, and as many bits of mantissa
as are left: 3 for the first moment, which has a sign, and 4 for the root of the second, which has none. Code 0 is zero.
It is the upper end of fp32's own bits, so that coding is a sum and a shift. Each block has a scale, in fp32 (Dettmers
et al. 2022, "8-bit Optimizers", have blocks too, and a table of values).

Rounding is stochastic, since a step moves the second moment by far less than its values lie apart
(train/master_adamw.py says more). The root of a second moment that is not zero is never rounded to zero, which would
divide by zero.

The functions of PyTorch are for the CPU and for tests; a kernel has its block in registers.
"""

import torch

from qa_lib.kernels.common import jit, tl

BLOCK = 1024  # elements that share a scale
MEAN_CUT, ROOT_CUT = (
    20,
    19,
)  # of fp32's bits so many are cut off: what stays is sign, exponent and 3 or 4 of mantissa
EXPONENT = 112  # fp32's exponent of code 0, so that the largest code's is that of 1


def largest(cut: int) -> float:
    """The value of the highest code, times a block's scale."""
    return 2.0 - 2.0 ** (cut - 23)


def encode(x: torch.Tensor, bits: torch.Tensor, cut: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int32 of x >= 0, fp32 [blocks, BLOCK], and scales [blocks, 1]; `bits` int32 are 16 random ones each."""
    scale = x.amax(1, keepdim=True) / largest(cut)
    y = (x / torch.where(scale > 0, scale, 1.0)).clamp(max=largest(cut))
    code = ((y.view(torch.int32) + (bits << (cut - 16))) >> cut) - (EXPONENT << (23 - cut))
    return torch.where(code > 0, code, (y * (2.0**16 / least(cut)) > bits).int()), scale


def decode(code: torch.Tensor, scale: torch.Tensor, cut: int) -> torch.Tensor:
    """What codes int32 [blocks, BLOCK] stand for, in fp32."""
    value = ((code + (EXPONENT << (23 - cut))) << cut).view(torch.float32)
    return torch.where(code > 0, value, 0.0) * scale


def least(cut: int) -> float:
    """The value of code 1, times a block's scale."""
    return 2.0 ** (EXPONENT - 127) * (1 + 2.0 ** (cut - 23))


@jit
def encode_kernel(x, bits, CUT: tl.constexpr):
    """As encode, of one block."""
    LARGEST: tl.constexpr = 2.0 - 2.0 ** (CUT - 23)
    LEAST: tl.constexpr = 2.0**-15 * (1 + 2.0 ** (CUT - 23))
    scale = tl.max(x, 0) / LARGEST
    y = tl.minimum(x / tl.where(scale > 0, scale, 1.0), LARGEST)
    code = ((y.to(tl.int32, bitcast=True) + (bits << (CUT - 16))) >> CUT) - (112 << (23 - CUT))
    tiny = (y * (65536.0 / LEAST) > bits.to(tl.float32)).to(tl.int32)
    return tl.where(code > 0, code, tiny), scale


@jit
def decode_kernel(code, scale, CUT: tl.constexpr):
    """As decode, of one block."""
    value = ((code + (112 << (23 - CUT))) << CUT).to(tl.float32, bitcast=True)
    return tl.where(code > 0, value, 0.0) * scale
