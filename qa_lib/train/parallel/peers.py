"""A sharded optimizer by pointers into the memory of other GPUs (variants P-peers, P-peers-fp8).

It is ZeRO-1 (zero1.py) without messages. After the backward pass one kernel writes every gradient
to the process that owns its weights (kernels/peer_gradients.py). The owner averages what it has
been sent, and the kernel of its optimizer writes each new weight into the memory of all GPUs
(master_adamw.py). So the weights travel while the optimizer computes, and nothing is copied.

A step waits for the others three times, by a barrier of one small kernel each: when all gradients
are sent, since the owners read them then, and no backward pass may need the old weights any more;
when the square norms of all parts are there, for clipping; and when all weights are written, which
the next forward pass reads. NCCL would need a part of the GPU's processors for as long as it sends,
and matrix products that fill the whole GPU would take twice as long beside it. Here nothing runs
beside them.

What is summed is summed in a fixed order and by one process, so that all processes have equal
weights, bit by bit.
"""

import torch

from qa_lib.kernels.peer_gradients import mean_gradient
from qa_lib.train.master_adamw import MasterAdamW
from qa_lib.train.parallel.data_parallel import NoParallel
from qa_lib.train.parallel.peer_memory import MessageMemory, PeerMemory
from qa_lib.train.parallel.zero1 import FlatShard, Zero1


class PeerShard(FlatShard):
    """A FlatShard in memory that all processes reach."""

    def placed(self, flat):
        """Return the flat weights where everybody writes to them."""
        on_gpus = flat.is_cuda and self.ranks.world > 1
        memory_class = PeerMemory if on_gpus else MessageMemory
        self.memory = memory_class(len(flat) // self.ranks.world, flat, self.ranks)
        self.memory.weights.copy_(flat)
        # Whether the optimizer's kernel writes to the memory of the others.
        self.writes_copies = False
        return self.memory.weights

    def reduce_grads(self):
        square = self.memory.send_gradients([p.grad for p in self.parameters])
        self.local_shard.grad, self.mean_square = mean_gradient(self.memory.slots)
        return square

    def all_gather_params(self):
        self.memory.send_weights(self.writes_copies)


class Peers(Zero1):
    """All trained weights as one PeerShard."""

    def flatten_parameters(self):
        return [PeerShard(self.parameters, self.ranks)]

    def attach(self, optimizer):
        (flat_shard,) = self.flat_shards
        copies = flat_shard.memory.copies()
        if isinstance(optimizer, MasterAdamW):
            optimizer.norm = lambda gradients: flat_shard.mean_square.sqrt()
            optimizer.copies = copies
            flat_shard.writes_copies = len(copies) > 0

    def global_norm(self, norm: torch.Tensor) -> torch.Tensor:
        (flat_shard,) = self.flat_shards
        squares = flat_shard.memory.gather_number(norm.square())
        return NoParallel.global_norm(self, squares.sum().sqrt())
