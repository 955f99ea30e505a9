"""Memory that GPUs share, in the order in which no test of one process has it.

Plain tensors stand for the memory of several GPUs, and threads for their processes, of which one
runs at a time. Between two barriers nothing says which of them comes first: so every order must
give the same. This is what the barriers are for; that a GPU sees what another one has written
before a barrier is PyTorch's to keep, and needs GPUs to be seen.
"""

import itertools
import threading
import types

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory

from qa_lib.kernels.peer_gradients import MOST_ELEMENTS
from qa_lib.train.parallel.peer_memory import PeerMemory
from qa_lib.train.parallel.peers import PeerShard
from tests.kernels import DEVICE
from tests.material import refused

SIZES = (35, 17, 4)  # of parameters, the second of which has two owners
STEPS = 3
BARRIERS = {"gradients are sent": 0, "norms are there": 1, "weights are written": 2}  # of a step


class Host:
    """GPUs of one host: the blocks of memory of all ranks, and the turns of their threads.

    `order(epoch)` is the order in which ranks run between two barriers. With `without`, a number of
    BARRIERS, that barrier of each step is left out.
    """

    def __init__(self, world: int, order=None, without: int | None = None):
        self.world = world
        self.order = order or (lambda epoch: range(world))
        self.without = without
        self.blocks = {}
        self.go = [threading.Semaphore(0) for _ in range(world)]
        self.back = threading.Semaphore(0)

    def ranks(self, monkeypatch, rank: int):
        """The process group of a rank, whose block is the next that is asked for."""

        def empty(size, dtype, device):
            for each in range(self.world):
                self.blocks.setdefault(each, torch.empty(size, dtype=dtype, device=device))
            return self.blocks[rank]

        monkeypatch.setattr(symmetric_memory, "empty", empty)
        monkeypatch.setattr(symmetric_memory, "rendezvous", lambda block, group: Handle(self, rank))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        return types.SimpleNamespace(rank=rank, world=self.world, device=DEVICE)

    def run(self, work) -> None:
        """Call `work(rank)` for all ranks, from barrier to barrier; raise what it raises."""
        failures = []

        def turn(rank):
            self.go[rank].acquire()
            try:
                work(rank)
            except BaseException as problem:
                failures.append(problem)
            running.discard(rank)
            self.back.release()

        running = set(range(self.world))
        for rank in range(self.world):
            threading.Thread(target=turn, args=[rank], daemon=True).start()
        for epoch in itertools.count():
            for rank in [rank for rank in self.order(epoch) if rank in running]:
                self.go[rank].release()
                self.back.acquire()
            if failures:
                raise failures[0]
            if not running:
                return


class Handle:
    """What PyTorch's rendezvous gives one rank."""

    def __init__(self, host: Host, rank: int):
        self.host = host
        self.rank = rank
        self.barriers = 0

    def get_buffer(self, rank, sizes, dtype):
        assert rank != self.rank, "a rank's own views are those of its block, which they keep"
        assert sizes == (len(self.host.blocks[rank]),)
        assert dtype == torch.uint8
        return self.host.blocks[rank]

    def barrier(self, channel, timeout_ms):
        assert timeout_ms > 0, "a rank would wait for ever"
        self.barriers += 1
        if (self.barriers - 1) % len(BARRIERS) == self.host.without:
            return
        self.host.back.release()
        self.host.go[self.rank].acquire()


def weights_at_begin() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size).to(DEVICE) for size in SIZES]


def gradient_of(weight: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    """A gradient that every weight, rank and step makes another one."""
    return (weight * (rank + 1) + step).cos()


def updated(weight: torch.Tensor, gradient: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
    """The weights after a step, whose length the norm of all gradients decides."""
    return weight - 0.1 * gradient / square.sqrt()


def trained_by_one(world: int) -> torch.Tensor:
    """The flat weights after STEPS steps of one process that makes the gradients of all ranks."""
    flat = torch.cat(weights_at_begin())
    for step in range(STEPS):
        gradients = [gradient_of(flat, rank, step) for rank in range(world)]
        mean = sum(gradients[1:], gradients[0]) * (1 / world)
        flat = updated(flat, mean, mean.square().sum())
    return flat


def trained_by_ranks(monkeypatch, host: Host) -> list[torch.Tensor]:
    """The flat weights of each rank after the same steps, as a step of P-peers makes them."""
    shards = []
    for rank in range(host.world):
        monkeypatch.setattr("qa_lib.train.parallel.peers.MessageMemory", PeerMemory)
        parameters = [torch.nn.Parameter(weight) for weight in weights_at_begin()]
        shards.append(PeerShard(parameters, host.ranks(monkeypatch, rank)))

    @torch.no_grad()
    def train(rank):
        shard = shards[rank]
        for step in range(STEPS):
            for parameter in shard.parameters:
                parameter.grad = gradient_of(parameter, rank, step)
            shard.reduce_grads()
            square = shard.memory.gather_number(shard.mean_square).sum()
            new = updated(shard.local_shard, shard.local_shard.grad, square)
            shard.local_shard.copy_(new)
            for copy in shard.memory.copies():  # as the optimizer's kernel does
                copy.copy_(new)
            shard.writes_copies = True
            shard.all_gather_params()

    host.run(train)
    return [shard.flat[: shard.size] for shard in shards]


ORDERS = {
    "in order": lambda epoch: (0, 1, 2),
    "in reverse": lambda epoch: (2, 1, 0),
    "turning": lambda epoch: ((0, 1, 2), (1, 2, 0), (2, 0, 1))[epoch % 3],
    "in turns": lambda epoch: ((0, 1, 2), (2, 1, 0))[epoch % 2],
}


def in_world(order, world):
    return lambda epoch: [rank for rank in order(epoch) if rank < world]


@pytest.mark.triton
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ORDERS)
def test_ranks_have_the_weights_of_one_process_whoever_is_first_between_barriers(
    name, world, monkeypatch
):
    host = Host(world, in_world(ORDERS[name], world))
    expected = trained_by_one(world)
    for weights in trained_by_ranks(monkeypatch, host):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.triton
def test_all_ranks_have_equal_weights_bit_by_bit(monkeypatch):
    first, *others = trained_by_ranks(monkeypatch, Host(3))
    assert all(torch.equal(weights, first) for weights in others)


@pytest.mark.triton
@pytest.mark.parametrize("name", BARRIERS)
def test_without_one_of_the_three_barriers_weights_depend_on_who_is_first(name, monkeypatch):
    """So none of them is there in vain, and the test above sees where one is missing."""
    expected = trained_by_one(3)
    wrong = []
    for order in ORDERS.values():
        host = Host(3, order, without=BARRIERS[name])
        for weights in trained_by_ranks(monkeypatch, host):
            wrong.append(not torch.allclose(weights, expected, rtol=1e-5, atol=1e-6))
    assert any(wrong)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_places_do_not_overlap_and_begin_where_kernels_read_quickly(world, dtype, monkeypatch):
    ranks = Host(world).ranks(monkeypatch, rank=1)
    memory = PeerMemory(48, torch.zeros(0, dtype=dtype), ranks)
    for rank in range(world):
        places = [*memory.weights_of[rank].view(world, 48), *memory.slots_of[rank]]
        places.append(memory.squares_of[rank])
        begins = [place.data_ptr() for place in places]
        ends = [place.data_ptr() + place.nbytes for place in places]
        base = memory.weights_of[rank].untyped_storage().data_ptr()
        assert all((begin - base) % 16 == 0 for begin in begins)
        assert [base, *ends[:-1]] == begins


def test_the_memory_of_all_ranks_counts_as_memory_of_the_run(monkeypatch):
    ranks = Host(2).ranks(monkeypatch, rank=0)
    PeerMemory(48, torch.zeros(0, dtype=torch.bfloat16), ranks)
    weights = slots = 2 * 48 * 2
    assert ranks.peer_bytes == weights + slots + 2 * 4


def test_gpus_that_cannot_share_memory_are_told_what_to_take(monkeypatch):
    ranks = Host(2).ranks(monkeypatch, rank=0)

    def rendezvous(block, group):
        raise RuntimeError("pidfd_getfd: Operation not permitted\nException raised from ...")

    monkeypatch.setattr(symmetric_memory, "rendezvous", rendezvous)
    said = r"reach each other's memory.*\(pidfd_getfd: Operation not permitted\): take P-nccl"
    refused(said, PeerMemory, 48, torch.zeros(0), ranks)


def test_more_weights_than_the_kernels_count_are_refused_before_memory_is_taken(monkeypatch):
    host = Host(2)
    ranks = host.ranks(monkeypatch, rank=0)
    refused(
        "up to 2,147,483,647 weights", PeerMemory, MOST_ELEMENTS // 2 + 1, torch.zeros(0), ranks
    )
    assert not host.blocks
