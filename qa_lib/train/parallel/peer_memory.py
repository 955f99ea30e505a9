"""Memory by which processes exchange gradients and weights: that of all GPUs, or messages.

On GPUs of one host it is `PeerMemory`: a block of every GPU's memory into which all the others
write by a pointer (PyTorch's symmetric memory). Nothing is sent, and what waits is one small kernel
that all processes run, a barrier: what was written before one is seen by everybody after it. So a
CUDA graph captures the whole exchange, in which NCCL has no part.

The barrier is PyTorch's. Each process sets a flag in the memory of every other one, by a
compare-and-swap from 0 to 1 that releases what was written before, to all GPUs. It then takes the
flags that the others have set in its own memory back from 1 to 0, and acquires what those have
released. A flag that has not been taken back holds its sender, so that no process is more than one
barrier ahead of another, however many there have been. All that a process reads is in its own
memory, whose cache sees the writes of others; a kernel that begins after a barrier has nothing
older in the caches of its processors.

Elsewhere it is `MessageMemory`, in which PyTorch's collectives move the same numbers to the same
places. It is slower, and the tests' reference.
"""

import os

import torch
import torch.distributed as dist

from qa_lib.errors import UserError, first_line
from qa_lib.kernels.peer_gradients import MOST_ELEMENTS, send_gradients, spread
from qa_lib.train.parallel.data_parallel import square_norm
from qa_lib.train.parallel.process_group import SILENCE, ProcessGroup

# PyTorch 2.13 renamed it.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# What to do where memory cannot be shared.
OTHER_VARIANTS = "take P-nccl, or P-nccl-fp8 in the place of P-peers-fp8"


class PeerMemory:
    """Memory on the GPU of each process, into which all processes write.

    `weights` [world length] and `slots` [world, length] have the type of `like`. Process r owns
    weights[r length : (r + 1) length], and slot s is for the gradients of process s for these
    weights. All processes make one, and call its methods together. It stands in `ranks` how many
    bytes it takes, since PyTorch's allocator does not know of them.

    Raises UserError for GPUs that cannot share memory, and for more weights than the kernels count.
    """

    def __init__(self, length: int, like: torch.Tensor, ranks: ProcessGroup):
        # Imported here, since PyTorch may be built without it.
        import torch.distributed._symmetric_memory as symmetric_memory

        # PyTorch would set up NVLink's multicast, which nothing here uses.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        self.rank = ranks.rank
        self.length = length
        world = ranks.world
        if world * length > MOST_ELEMENTS:
            raise UserError(
                f"parallel 'peers' takes up to {MOST_ELEMENTS:,} weights, and these are "
                f"{world * length:,}: {OTHER_VARIANTS}"
            )
        flat_bytes = world * length * like.element_size()
        block_bytes = 2 * flat_bytes + world * torch.float32.itemsize
        block = symmetric_memory.empty(block_bytes, dtype=torch.uint8, device=ranks.device)
        ranks.peer_bytes = block_bytes
        block.zero_()  # nobody writes to the padding of slots
        torch.cuda.synchronize(ranks.device)
        try:
            self.handle = symmetric_memory.rendezvous(block, dist.group.WORLD)
        except RuntimeError as problem:
            raise UserError(
                f"parallel 'peers' takes GPUs that reach each other's memory, and these do not "
                f"({first_line(problem)}): {OTHER_VARIANTS}"
            ) from problem
        self.weights_of = []
        self.slots_of = []
        self.squares_of = []
        for rank in range(world):
            # Views of the block itself keep it, as long as a weight is there; those that the handle
            # gives keep nothing.
            block_of_rank = block
            if rank != self.rank:
                block_of_rank = self.handle.get_buffer(rank, (block_bytes,), torch.uint8)
            weights, slots, squares = block_of_rank.split(
                [flat_bytes, flat_bytes, block_bytes - 2 * flat_bytes]
            )
            self.weights_of.append(weights.view(like.dtype))
            self.slots_of.append(slots.view(like.dtype).view(world, length))
            self.squares_of.append(squares.view(torch.float32))
        self.weights = self.weights_of[self.rank]
        self.slots = self.slots_of[self.rank]

    def barrier(self) -> None:
        """Let what follows on this GPU wait for what all GPUs have been given before."""
        self.handle.barrier(channel=0, timeout_ms=int(SILENCE.total_seconds() * 1000))

    def copies(self) -> tuple[torch.Tensor, ...]:
        """Return the places of this process's weights in the memory of all others."""
        begin = self.rank * self.length
        return tuple(
            weights[begin : begin + self.length]
            for rank, weights in enumerate(self.weights_of)
            if rank != self.rank
        )

    def send_gradients(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Fill all slots with flat gradients; return the square norm of this process's own."""
        contiguous = [gradient.contiguous() for gradient in gradients]
        square = send_gradients(contiguous, self.slots_of, self.rank)
        self.barrier()
        return square

    def gather_number(self, number: torch.Tensor) -> torch.Tensor:
        """Return an fp32 number of each process [world], by rank."""
        spread(number, self.squares_of, self.rank)
        self.barrier()
        return self.squares_of[self.rank]

    def send_weights(self, are_written: bool) -> None:
        """Give everybody the weights of this process, unless the copies `are_written` already."""
        if not are_written:
            begin = self.rank * self.length
            for copy in self.copies():
                copy.copy_(self.weights[begin : begin + self.length])
        self.barrier()


class MessageMemory:
    """What PeerMemory is, by PyTorch's collectives, on CPUs too."""

    def __init__(self, length: int, like: torch.Tensor, ranks: ProcessGroup):
        self.rank = ranks.rank
        self.weights = like.new_zeros(ranks.world * length)
        self.slots = like.new_zeros(ranks.world, length)

    def copies(self) -> tuple[torch.Tensor, ...]:
        return ()

    def send_gradients(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        padded = flat.new_zeros(self.slots.shape)
        padded.view(-1)[: len(flat)] = flat
        # Sent as bytes, since gloo does not know every type.
        dist.all_to_all_single(self.slots.view(torch.uint8), padded.view(torch.uint8))
        return square_norm(flat)

    def gather_number(self, number: torch.Tensor) -> torch.Tensor:
        numbers = number.new_empty(len(self.slots))
        all_gather(numbers, number.view(1))
        return numbers

    def send_weights(self, are_written: bool) -> None:
        own = self.weights.view(self.slots.shape)[self.rank].clone()
        all_gather(self.weights, own)
