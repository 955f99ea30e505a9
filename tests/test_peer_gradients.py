"""Gradients that processes write into each other's slots: kernels against plain PyTorch.

Plain tensors stand for the memory of several GPUs.
"""

import pytest
import torch

from qa_lib.kernels.peer_gradients import (
    mean_by_kernel,
    mean_gradient,
    send_gradients,
    spread,
)
from tests.kernels import DEVICE

# The second tensor has two owners or three, and the last one a size that is no multiple of ALIGN.
SIZES = [64, 4112, 48, *[16] * 16, 2]


def drawn(sizes, seed: int, dtype=torch.bfloat16) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(size).to(DEVICE, dtype) for size in sizes]


def slots_of(world: int, sizes=SIZES, dtype=torch.bfloat16) -> list[torch.Tensor]:
    """The slots of each owner: of the gradients of all processes for its part."""
    length = -(-sum(sizes) // (16 * world)) * 16
    return [torch.zeros(world, length, dtype=dtype, device=DEVICE) for _ in range(world)]


@pytest.mark.triton
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_owner_has_its_part_of_everybodys_gradients(world):
    slots = slots_of(world)
    sent = [drawn(SIZES, seed=rank) for rank in range(world)]
    for rank, gradients in enumerate(sent):
        send_gradients(gradients, slots, rank)
    for rank, gradients in enumerate(sent):
        arrived = torch.cat([slots_of_owner[rank] for slots_of_owner in slots])
        flat = torch.cat(gradients)
        assert torch.equal(arrived[: len(flat)], flat)
        assert not arrived[len(flat) :].any(), "nobody writes to the padding"


@pytest.mark.triton
def test_what_is_sent_is_square_summed():
    gradients = drawn(SIZES, seed=0)
    square = send_gradients(gradients, slots_of(2), rank=1)
    expected = torch.cat(gradients).double().square().sum()
    assert square.item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.triton
@pytest.mark.parametrize("senders", [1, 2, 3, 4])
def test_the_kernels_mean_is_the_plain_one_bit_by_bit(senders):
    slots = torch.stack(drawn([5008] * senders, seed=senders, dtype=torch.float32))
    mean, square = mean_by_kernel(slots)
    expected, expected_square = mean_gradient(slots.cpu())
    assert torch.equal(mean.cpu(), expected)
    assert square.item() == pytest.approx(expected_square.item(), rel=1e-6)


@pytest.mark.triton
def test_the_kernels_mean_in_bf16_is_the_plain_one_but_for_its_rounding():
    """Triton's interpreter does not round to nearest."""
    slots = torch.stack(drawn([5008] * 2, seed=0))
    mean, square = mean_by_kernel(slots)
    expected, _ = mean_gradient(slots.cpu())
    torch.testing.assert_close(mean.cpu(), expected, rtol=2**-7, atol=0)
    assert square.item() == pytest.approx(mean.double().square().sum().item(), rel=1e-6)


@pytest.mark.parametrize("senders", [1, 2, 4])
def test_a_mean_is_rounded_once(senders):
    slots = torch.stack(drawn([5008] * senders, seed=senders)).cpu()
    mean, square = mean_gradient(slots)
    assert torch.equal(mean, slots.double().mean(0).bfloat16())
    assert square.item() == pytest.approx(mean.double().square().sum().item(), rel=1e-6)


@pytest.mark.triton
@pytest.mark.parametrize("rank", range(3))
def test_a_number_is_spread_to_the_place_of_its_rank(rank):
    places = [torch.zeros(3, device=DEVICE) for _ in range(3)]
    spread(torch.tensor(5.0, device=DEVICE), places, rank)
    expected = [5.0 if place == rank else 0.0 for place in range(3)]
    assert [place.tolist() for place in places] == [expected] * 3
