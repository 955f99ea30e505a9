"""Gradients that GPUs of one host send each other, and their mean (variant P-peers).

Each of N processes owns an N-th of the weights, and averages the gradients of that part. A GPU
writes into the memory of another one by a pointer, as into its own. So one pass takes every
gradient from where the backward pass has left it to the process that owns it, which keeps what it
is sent in N *slots*, one for each sender. The gradients of several tensors, one after the other,
are cut into N parts for that, so that a tensor may have two owners.

The owner sums its slots in fp32 and in the order of their senders, and rounds once. Whoever owns an
element, its mean is the same bit by bit. Both passes have the elements in registers and sum their
squares as well: those of the mean are for clipping, those before are for the noise scale. The
kernels are for GPUs of compute capability 7.5 and newer. Who waits for whom is not their affair
(train/parallel/peer_memory.py).
"""

from collections.abc import Sequence

import torch

from qa_lib.kernels.common import jit, tl
from qa_lib.kernels.many_tensors import chosen, in_calls, tensor_of_program, with_sums
from qa_lib.kernels.precompile import launch

MOST_ELEMENTS = 2**31 - 1  # places of elements are 32-bit numbers in the kernels
SEND = {"BLOCK": 4096, "num_warps": 4}
MEAN = {"BLOCK": 4096, "num_warps": 4}


def send_gradients(
    gradients: Sequence[torch.Tensor], slots: Sequence[torch.Tensor], rank: int
) -> torch.Tensor:
    """Write gradients into their owners' slots; return the sum of their squares, fp32.

    `slots` are those of all owners by rank, each [senders, length], with as many senders as owners
    and a length that is a multiple of many_tensors.ALIGN. The flat gradients, one after the other,
    fill slot `rank` of one owner after the other. They are contiguous, of one type, on this GPU,
    and all slots of a rank together have up to MOST_ELEMENTS.
    """
    length = slots[0].shape[1]
    begins = []
    begin = 0
    for gradient in gradients:
        begins.append(begin)
        begin += gradient.numel()
    everything = len(slots) * length

    def after_own(row) -> int:
        """The order by which each sender begins with another owner, the one after itself."""
        return (row[1] - (rank + 1) * length) % everything

    all_calls = list(in_calls(gradients, begins, order=after_own))
    sums, calls_with_sums = with_sums(all_calls, SEND["BLOCK"], gradients[0].device)
    for (call_gradients, call_begins), sizes, call_sums in calls_with_sums:
        launch(
            send_kernel,
            (len(call_sums),),
            gradients=call_gradients,
            begins=call_begins,
            sizes=sizes,
            slots=tuple(slots),
            sums=call_sums,
            rank=rank,
            length=length,
            COUNT=len(sizes),
            WORLD=len(slots),
            **SEND,
        )
    return sums.sum()


def mean_gradient(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean [length] of slots [senders, length], and the sum of its squares in fp32.

    The mean has the type of the slots, and its squares are those of what was rounded to it.
    """
    if slots.is_cuda:
        return mean_by_kernel(slots)
    total = slots[0].float()
    for slot in slots[1:]:
        total = total + slot.float()
    mean = (total * (1 / len(slots))).to(slots.dtype)
    return mean, mean.float().square().sum()


def mean_by_kernel(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what mean_gradient returns, of contiguous slots on a GPU."""
    senders, length = slots.shape
    mean = slots.new_empty(length)
    sums = slots.new_empty(-(-length // MEAN["BLOCK"]), dtype=torch.float32)
    launch(
        mean_kernel,
        (len(sums),),
        slots=slots,
        mean=mean,
        sums=sums,
        length=length,
        SENDERS=senders,
        SHARE=1 / senders,
        **MEAN,
    )
    return mean, sums.sum()


def spread(number: torch.Tensor, places: Sequence[torch.Tensor], rank: int) -> None:
    """Write an fp32 number on this GPU to element `rank` of each of some fp32 tensors."""
    launch(spread_kernel, (1,), number=number, places=tuple(places), rank=rank, PLACES=len(places))


@jit(do_not_specialize=["rank"], do_not_specialize_on_alignment=["sums"])
def send_kernel(
    gradients,
    begins,
    sizes,
    slots,
    sums,
    rank,
    length,
    COUNT: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write BLOCK elements of one of COUNT gradients into slots; put their squares' sum in `sums`.

    `begins` are the places of the gradients' first elements among all that are sent.
    """
    number, _, element, inside = tensor_of_program(sizes, COUNT, BLOCK)
    value = tl.load(chosen(gradients, number, COUNT) + element, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(wide * wide, 0))
    place = chosen(begins, number, COUNT) + element
    for owner in tl.static_range(WORLD):
        at = place - owner * length
        is_owners = inside & (at >= 0) & (at < length)
        tl.store(slots[owner] + rank * length + at, value, mask=is_owners)


@jit
def mean_kernel(
    slots,
    mean,
    sums,
    length,
    SENDERS: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write BLOCK elements of the mean of slots [SENDERS, length], and their squares' sum."""
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = element < length
    total = tl.load(slots + element, mask=inside, other=0.0).to(tl.float32)
    for sender in tl.static_range(1, SENDERS):
        total += tl.load(slots + sender * length + element, mask=inside, other=0.0).to(tl.float32)
    rounded = (total * SHARE).to(mean.dtype.element_ty)
    tl.store(mean + element, rounded, mask=inside)
    wide = rounded.to(tl.float32)
    tl.store(sums + tl.program_id(0), tl.sum(wide * wide, 0))


@jit(do_not_specialize=["rank"])
def spread_kernel(number, places, rank, PLACES: tl.constexpr):
    """Write a number to element `rank` of each of PLACES tensors."""
    value = tl.load(number)
    for place in tl.static_range(PLACES):
        tl.store(places[place] + rank, value)
