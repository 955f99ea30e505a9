"""The update of AdamW for weights in half precision, in plain PyTorch and as one kernel.

train/master_adamw.py has the optimizer, and says what masters, low bits and rounding at random are.

An optimizer's step does little arithmetic on much memory. Written plainly it runs some ten kernels,
each of which reads and writes every parameter. On a GPU it is one pass, by a Triton kernel of our
own that takes many tensors in a call, like PyTorch's fused AdamW. It moves 26 bytes a parameter: 2
of gradient, 4 of weight, 4 of low bits and 16 of moments. Moments in bf16 are 8 of them, in 8 bits
4, so that it moves 18 or 14; without masters 14 or 10. The norm of the gradients reads 2 more.
PyTorch's compiler makes the same pass out of the plain one, but of some hundred tensors it has to
look at each: that took more seconds than all of the model. The plain one is what runs on a CPU, and
what the tests hold the kernel to. The kernel is for GPUs of compute capability 7.5 and newer;
weights in bf16 want 8.0, those in fp16 do on a T4's 7.5.
"""

import torch
from torch.nn import functional as F

from qa_lib.kernels import eight_bit
from qa_lib.kernels.common import jit, tl
from qa_lib.kernels.eight_bit import (
    decode_mean_kernel,
    decode_square_kernel,
    encode_mean_kernel,
    encode_square_kernel,
)
from qa_lib.kernels.hash_dropout import GOLDEN_INT32, hash32, hash32_kernel
from qa_lib.kernels.many_tensors import chosen, in_calls, tensor_of_program, with_sums
from qa_lib.kernels.precompile import launch

FINER = 2.0**11  # by which an fp16 weight's low bits are multiplied
# The type of a weight's low bits, by the weight's.
LOW_TYPES = {torch.bfloat16: torch.int16, torch.float16: torch.float16}
NORM = {"BLOCK": 8192, "num_warps": 4}
UPDATE = {"BLOCK": eight_bit.BLOCK, "num_warps": 4}
# Moments in 8 bits take as long to compute as to move. Every warp finds out which tensor is its
# own: with 2 of them an element takes 84 instructions of sm_90, with 4 it takes 107.
UPDATE_OF_CODES = {"BLOCK": eight_bit.BLOCK, "num_warps": 2}


def gradient_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all elements of some tensors, in fp32."""
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32)).norm()


def gradient_norm_by_kernel(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return what `gradient_norm` returns, for tensors of one type on a GPU."""
    sums, calls_with_sums = with_sums(list(in_calls(tensors)), NORM["BLOCK"], tensors[0].device)
    for (call_tensors,), sizes, call_sums in calls_with_sums:
        launch(
            square_sums,
            (len(call_sums),),
            tensors=call_tensors,
            sizes=sizes,
            sums=call_sums,
            COUNT=len(sizes),
            **NORM,
        )
    return sums.sum().sqrt()


def master_of(weight: torch.Tensor, low: torch.Tensor | None) -> torch.Tensor:
    """Return the fp32 master of a weight in half precision, or without low bits the weight."""
    if low is None:
        return weight.float()
    if weight.dtype == torch.float16:
        return weight.float() + low.float() / FINER
    # Below zero's bits are those of NaN. No update leaves such low bits, but they may be of another
    # weight, where somebody has loaded zeros into the model since.
    low = torch.where((weight == 0) & (low < 0), 0, low.int())
    return (weight.float().view(torch.int32) + low).view(torch.float32)


def halves(master: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rounding of an fp32 master to half precision, in fp32 still, and the low bits."""
    if dtype == torch.float16:
        weight = master.half().float()
        return weight, (master - weight) * FINER
    weight = upper(master, 0x8000)
    return weight, master.view(torch.int32) - weight.view(torch.int32)


def upper(value: torch.Tensor, addend: int | torch.Tensor) -> torch.Tensor:
    """Return an fp32 tensor with `addend` added to its bits and the lower 16 of these cut off.

    The result fits bf16. Half of what 16 bits can count rounds to nearest, a random addend
    stochastically.
    """
    cut = ((value.view(torch.int32) + addend) & -(1 << 16)).view(torch.float32)
    return torch.where(value.isnan(), value, cut)  # the sum turns the NaN that GPUs make into zero


def random_bits(value: torch.Tensor, first: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Return 32 random bits for each element of `value`, int32 in its shape.

    The step and the element's number in the optimizer decide them. `first` is the number of the
    first element.
    """
    span = torch.arange(value.numel(), device=value.device, dtype=torch.int32).view(value.shape)
    return hash32(first + span, step.int() * GOLDEN_INT32)


def weight_noise(bits: torch.Tensor) -> torch.Tensor:
    """Return 16 random bits that round a weight, from 32 that round its moments.

    They are the upper half of the product with an odd number, which for any lower half of `bits`
    takes every value equally often.
    """
    return (bits * GOLDEN_INT32 >> 16) & 0xFFFF


def read_moments(mean, square, scale) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both moments in fp32, from what the optimizer keeps."""
    if mean.dtype != torch.uint8:
        return mean.float(), square.float()
    means = eight_bit.decode_mean(blocks_of(mean).int(), scale[:, :1])
    squares = eight_bit.decode_square(blocks_of(square).int(), scale[:, 1:])
    return elements_of(means, mean), elements_of(squares, mean)


def blocks_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as [blocks, BLOCK], filled up with zeros."""
    padding = -tensor.numel() % eight_bit.BLOCK
    return F.pad(tensor.flatten(), (0, padding)).view(-1, eight_bit.BLOCK)


def elements_of(blocks: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Undo `blocks_of`, for a result in the shape of another tensor."""
    return blocks.flatten()[: like.numel()].view(like.shape)


def coded_moments(mean, square, bits) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the codes of both fp32 moments, int32, and their scales, fp32 [blocks, 2].

    `bits` are 32 random ones for each element.
    """
    random = blocks_of(bits)
    codes, mean_scale = eight_bit.encode_mean(blocks_of(mean), random)
    square_codes, square_scale = eight_bit.encode_square(blocks_of(square), random)
    scales = torch.cat([mean_scale, square_scale], 1)
    return elements_of(codes, mean), elements_of(square_codes, mean), scales


def update(
    weight,
    gradient,
    low,
    mean,
    square,
    scale,
    first,
    step,
    factor,
    rate,
    growth,
    shrink,
    beta1,
    beta2,
    eps,
    skip,
):
    """Do AdamW on the tensors of one parameter, in place, for its gradient times `factor`.

    `rate` is the learning rate over the mean's correction, `growth` one over that of the square.
    Weight decay leaves the part `shrink` of the master, or all where that is None. Where `low` is
    None, there is no master, and the weight is rounded at random. Where `skip` is a number other
    than 0, nothing changes.
    """
    gradient = gradient.float() * factor
    old_mean, old_square = read_moments(mean, square, scale)
    new_mean = old_mean.lerp(gradient, 1 - beta1)
    new_square = (old_square * beta2).addcmul(gradient, gradient, value=1 - beta2)
    new_scale = scale
    move = new_mean / ((new_square * growth).sqrt() + eps) * rate
    master = master_of(weight, low)
    if shrink is not None:
        master = master * shrink
    bits = random_bits(mean, first, step)
    if low is None:
        new_weight, new_low = upper(master - move, weight_noise(bits)), None
    else:
        new_weight, new_low = halves(master - move, weight.dtype)
    if mean.dtype == torch.bfloat16:
        new_mean = upper(new_mean, bits & 0xFFFF)
        new_square = upper(new_square, (bits >> 16) & 0xFFFF)
    elif mean.dtype == torch.uint8:
        new_mean, new_square, new_scale = coded_moments(new_mean, new_square, bits)
    changes = (
        (mean, new_mean),
        (square, new_square),
        (scale, new_scale),
        (low, new_low),
        (weight, new_weight),
    )
    for old, new in changes:
        if old is None:
            continue
        old.copy_(new if skip is None else torch.where(skip != 0, old, new))


def update_by_kernel(
    weights,
    gradients,
    lows,
    means,
    squares,
    scales,
    firsts,
    step,
    factor,
    rate,
    growth,
    shrink,
    beta1,
    beta2,
    eps,
    skip,
    copies=(),
) -> None:
    """Do what `update` does to each parameter of lists of tensors on a GPU.

    `lows` are None where there are no masters. The new weights of an only parameter go to `copies`
    as well, tensors like it.
    """
    has_masters = lows[0] is not None
    options = UPDATE_OF_CODES if means[0].dtype == torch.uint8 else UPDATE
    for columns, sizes in in_calls(
        weights, gradients, lows if has_masters else weights, means, squares, scales, firsts
    ):
        names = ("weights", "grads", "lows", "means", "squares", "scales", "firsts")
        programs = sum(-(-size // eight_bit.BLOCK) for size in sizes)
        launch(
            adamw,
            (programs,),
            **dict(zip(names, columns, strict=True)),
            sizes=sizes,
            step=step,
            factor=factor,
            rate=rate,
            growth=growth,
            shrink=step if shrink is None else shrink,
            skip=step if skip is None else skip,
            copies=tuple(copies) or (step,),
            BETA1=beta1,
            BETA2=beta2,
            EPS=eps,
            FINER=FINER,
            GOLDEN=GOLDEN_INT32,
            DECAYS=shrink is not None,
            SKIPS=skip is not None,
            MASTERS=has_masters,
            COPIES=len(copies),
            COUNT=len(sizes),
            **options,
        )


# The kernels. One call does many tensors. They come as tuples of COUNT pointers, of one kind each,
# and a program takes BLOCK elements of one of the tensors. All are contiguous. A name that ends in
# _at is a pointer to the elements of a program.


@jit(do_not_specialize_on_alignment=["sums"])
def square_sums(tensors, sizes, sums, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Put the sum of the squares of each program's elements into `sums` [programs]."""
    number, _, element, inside = tensor_of_program(sizes, COUNT, BLOCK)
    value = tl.load(chosen(tensors, number, COUNT) + element, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(value * value, 0))


@jit
def upper_kernel(value, addend):
    """Return what `upper` returns, for an addend of 16 bits, in bf16."""
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(value == value, bits + addend, bits)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@jit
def adamw(
    weights,
    grads,
    lows,
    means,
    squares,
    scales,
    firsts,
    sizes,
    step,
    factor,
    rate,
    growth,
    shrink,
    skip,
    copies,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    FINER: tl.constexpr,
    GOLDEN: tl.constexpr,
    DECAYS: tl.constexpr,
    SKIPS: tl.constexpr,
    MASTERS: tl.constexpr,
    COPIES: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Do what `update` does to BLOCK elements of a parameter.

    Without DECAYS `shrink` is not read, without SKIPS `skip`, and without MASTERS `lows`. The new
    weights of one parameter alone go to COPIES `copies` as well.
    """
    if SKIPS:  # noqa: SIM102  known when it is compiled
        if tl.load(skip) != 0.0:
            return
    number, block, element, inside = tensor_of_program(sizes, COUNT, BLOCK)
    weight_at = chosen(weights, number, COUNT) + element
    low_at = chosen(lows, number, COUNT) + element
    mean_at = chosen(means, number, COUNT) + element
    square_at = chosen(squares, number, COUNT) + element
    scale_at = chosen(scales, number, COUNT) + 2 * block
    CODED: tl.constexpr = means[0].dtype.element_ty == tl.uint8
    grad = tl.load(chosen(grads, number, COUNT) + element, mask=inside, other=0.0).to(tl.float32)
    grad = grad * tl.load(factor)
    weight = tl.load(weight_at, mask=inside).to(tl.float32)
    if MASTERS:
        low = tl.load(low_at, mask=inside)
    if CODED:
        code = tl.load(mean_at, mask=inside, other=0).to(tl.int32)
        mean = decode_mean_kernel(code, tl.load(scale_at))
        code = tl.load(square_at, mask=inside, other=0).to(tl.int32)
        square = decode_square_kernel(code, tl.load(scale_at + 1))
    else:
        mean = tl.load(mean_at, mask=inside).to(tl.float32)
        square = tl.load(square_at, mask=inside).to(tl.float32)

    mean += (grad - mean) * (1 - BETA1)
    square = square * BETA2 + grad * grad * (1 - BETA2)
    if CODED:
        # The GPU's own approximations, to a few parts in 10^7: a code is wrong by one in ten.
        inverse_root = tl.rsqrt(tl.sqrt(square * tl.load(growth)) + EPS)
        move = mean * tl.load(rate) * inverse_root * inverse_root
    else:
        move = mean / (tl.sqrt_rn(square * tl.load(growth)) + EPS) * tl.load(rate)
    if not MASTERS or CODED or means[0].dtype.element_ty == tl.bfloat16:
        seed = (tl.load(step).to(tl.int32) * GOLDEN).to(tl.uint32, bitcast=True)
        element_number = tl.load(chosen(firsts, number, COUNT)) + element
        bits = hash32_kernel(element_number.to(tl.uint32), seed)
    if MASTERS and lows[0].dtype.element_ty == tl.float16:
        master = weight + low.to(tl.float32) / FINER
        if DECAYS:
            master = master * tl.load(shrink)
        master = master - move
        weight = master.to(tl.float16)
        low = ((master - weight.to(tl.float32)) * FINER).to(tl.float16)
    else:
        if MASTERS:
            # master_of says why: below zero's bits are those of NaN.
            below = tl.where((weight == 0.0) & (low < 0), 0, low.to(tl.int32))
            master = (weight.to(tl.int32, bitcast=True) + below).to(tl.float32, bitcast=True)
        else:
            master = weight
        if DECAYS:
            master = master * tl.load(shrink)
        master = master - move
        if MASTERS:
            weight = upper_kernel(master, 0x8000)
            low = master.to(tl.int32, bitcast=True).to(tl.int16)  # the rest, by two's complement
        else:
            noise = (bits.to(tl.int32, bitcast=True) * GOLDEN).to(tl.uint32, bitcast=True) >> 16
            weight = upper_kernel(master, noise.to(tl.int32))
    if CODED:
        mean, mean_scale = encode_mean_kernel(mean, bits)
        square, square_scale = encode_square_kernel(square, bits)
        tl.store(scale_at, mean_scale)
        tl.store(scale_at + 1, square_scale)
    elif means[0].dtype.element_ty == tl.bfloat16:
        mean = upper_kernel(mean, (bits & 0xFFFF).to(tl.int32))
        square = upper_kernel(square, (bits >> 16).to(tl.int32))

    tl.store(weight_at, weight, mask=inside)
    for copy in tl.static_range(COPIES):
        tl.store(copies[copy] + element, weight, mask=inside)
    if MASTERS:
        tl.store(low_at, low, mask=inside)
    tl.store(mean_at, mean.to(means[0].dtype.element_ty), mask=inside)
    tl.store(square_at, square.to(squares[0].dtype.element_ty), mask=inside)
