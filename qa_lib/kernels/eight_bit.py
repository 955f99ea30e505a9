"""Adam's moments in 8 bits, for the kernel that updates the weights (variant E-recompute-8bit).

Half of what AdamW keeps is its two moments. A byte has 256 values, and a moment's elements differ
by powers of ten, so that equal steps would lose the small ones: the fewer bits there are, the more
of them belong to the exponent. A code here has 3 bits of mantissa. The first moment has its sign
and 4 bits of exponent before them, and reaches over 16 octaves. The second has no sign and 5 bits
of exponent, and reaches over 32. Each block of 1,024 elements has a scale, in fp32 (Dettmers et al.
2022, "8-bit Optimizers", have blocks too, and a table of values).

**A code is a piece of fp32's own bits**: the last of the exponent, which tell the octaves below 2
apart, and the first of the mantissa. The least power of 2 that they reach, 2^-15 or 2^-31, is added
to an element before it is coded and taken off when it is decoded. Zero therefore has code 0, and
what is small has equal steps of 2^-18 or 2^-34, like the subnormal numbers of a float. No element
is a case of its own, so that coding is a product, a sum, the rounding and a shift, and decoding is
a shift, a product and a sum.

**Rounding is stochastic**, since a step moves the second moment by far less than its values lie
apart (train/master_adamw.py says more). What is coded is the second moment and not its root: the
mean of many roundings would be that of the root, whose square is less than the mean of the squares,
and the moment would grow by the difference in every step.

The update divides by the root of the second moment, which is therefore never coded as zero. Code 1
is a root of 2^-17 of the largest one's, and the least first moment is 2^-18 of the largest: where
one is rounded up and the other down, no step is longer than those of the largest elements.

The functions in PyTorch are for the CPU and for tests; a kernel has its block in registers.
"""

import torch

from qa_lib.kernels.common import jit, tl

BLOCK = 1024  # elements that share a scale
CUT = 20  # of fp32's 32 bits, which are cut off: what stays has 3 bits of mantissa
# fp32's exponent of code 0, by the moment. The largest code has that of 1, which is 127.
MEAN_EXPONENT = 112
SQUARE_EXPONENT = 96
# The value of the highest code, for a scale of 1, but for a part in a million: an approximate
# quotient may be wrong by less, and rounding up must not carry out of the code.
LARGEST = 1.875 * (1 - 2.0**-20)
# A block of smaller elements is zero: the inverse of its scale would overflow.
VANISHING = 2.0**-100


def encode_mean(mean: torch.Tensor, bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes, int32 [blocks, BLOCK], and scales, fp32 [blocks, 1], of first moments in fp32.

    `mean` is [blocks, BLOCK]; `bits`, int32 of that shape, are random. The upper 20 round it. Of
    those for the second moment, 8 are among them, which weigh 2^-12 of a code here.
    """
    code, scale = _encode(mean.abs(), (bits >> 12) & 0xFFFFF, MEAN_EXPONENT)
    return torch.where(mean.signbit(), code + 128, code), scale


def encode_square(square: torch.Tensor, bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes, from 1 on, and scales of second moments, as `encode_mean` does.

    The lower 20 of the random bits round them.
    """
    return _encode(square, bits & 0xFFFFF, SQUARE_EXPONENT, least_code=1)


def decode_mean(code: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the first moments, fp32, of codes, int32 [blocks, BLOCK], with scales [blocks, 1]."""
    size = _decode(code & 127, scale, MEAN_EXPONENT)
    return torch.where(code > 127, -size, size)


def decode_square(code: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the second moments of codes with scales, as `decode_mean` does."""
    return _decode(code, scale, SQUARE_EXPONENT)


def _encode(x, noise, exponent: int, least_code: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of x >= 0, rounded by CUT random bits; none below `least_code`."""
    offset = 2.0 ** (exponent - 127)
    largest = x.amax(1, keepdim=True)
    inverse = torch.where(largest > VANISHING, (LARGEST - offset) / largest, 0.0)
    y = (x * inverse + offset).clamp(min=offset * (1 + least_code / 8))
    code = ((y.view(torch.int32) + noise) >> CUT) - (exponent << 3)
    return code, largest / (LARGEST - offset)


def _decode(code: torch.Tensor, scale: torch.Tensor, exponent: int) -> torch.Tensor:
    """Return what codes without signs stand for."""
    y = ((code + (exponent << 3)) << CUT).view(torch.float32)
    return (y - 2.0 ** (exponent - 127)) * scale


# The kernels. Their numbers are those of the constants above, which Triton does not read: 20 is
# CUT, 112 and 96 are the exponents.


@jit
def encode_mean_kernel(mean, bits):
    """Return the codes and the scale of one block, as `encode_mean` makes them."""
    coded, scale = encode_kernel(tl.abs(mean), (bits >> 12).to(tl.int32), 112, 0)
    # The sign takes the place of the bit before the code.
    sign = (mean.to(tl.int32, bitcast=True) >> 4) & (1 << 27)
    return ((coded & ~(1 << 27)) | sign) >> 20, scale


@jit
def encode_square_kernel(square, bits):
    """Return the codes and the scale of one block, as `encode_square` makes them."""
    coded, scale = encode_kernel(square, (bits & 0xFFFFF).to(tl.int32), 96, 1)
    return coded >> 20, scale


@jit
def decode_mean_kernel(code, scale):
    """Return what the codes of one block stand for, as `decode_mean` does."""
    size = decode_kernel(code & 127, scale, 112).to(tl.int32, bitcast=True)
    return (size | ((code & 128) << 24)).to(tl.float32, bitcast=True)


@jit
def decode_square_kernel(code, scale):
    """Return what the codes of one block stand for, as `decode_square` does."""
    return decode_kernel(code, scale, 96)


@jit
def encode_kernel(x, noise, EXPONENT: tl.constexpr, LEAST_CODE: tl.constexpr):
    """Return fp32's bits with the codes of `_encode` among them, from bit 20 on, and the scale."""
    OFFSET: tl.constexpr = 2.0 ** (EXPONENT - 127)
    SPAN: tl.constexpr = 1.875 * (1 - 2.0**-20) - OFFSET
    largest = tl.max(x, 0)
    inverse = tl.where(largest > 2.0**-100, SPAN / largest, 0.0)
    y = x * inverse + OFFSET
    if LEAST_CODE > 0:
        y = tl.maximum(y, OFFSET * (1 + LEAST_CODE / 8))
    return y.to(tl.int32, bitcast=True) + noise, largest * (1 / SPAN)


@jit
def decode_kernel(code, scale, EXPONENT: tl.constexpr):
    """Return what `_decode` returns."""
    OFFSET: tl.constexpr = 2.0 ** (EXPONENT - 127)
    y = ((code << 20) | (EXPONENT << 23)).to(tl.float32, bitcast=True)
    return y * scale - OFFSET * scale
