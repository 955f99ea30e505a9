"""An optimizer that several processes share: ZeRO-1 (Rajbhandari et al. 2020), variant P-zero1.

An all-reduce is two halves: first every process gets the sum of a part of the gradients
(reduce-scatter), then every process gets all parts (all-gather). The optimizer can stand between
the two: each process updates the weights of its own part, and the weights travel instead of the
gradients. The same bytes on the way, and an n-th of the optimizer's work and memory.
"""

import torch
import torch.distributed as dist

from qa_lib.train.master_adamw import ALIGN
from qa_lib.train.parallel.data_parallel import NoParallel, flatten, square_norm, total_norm
from qa_lib.train.parallel.process_group import ProcessGroup

# PyTorch 2.13 renamed them.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class FlatShard:
    """Some weights flattened into one tensor, of which this process updates an equal part.

    The parameters become views of that tensor, and `own`, the part, is a parameter of the
    optimizer. AdamW computes element by element, so that where one tensor ends and another begins
    makes no difference to it.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], ranks: ProcessGroup):
        self.parameters = parameters
        self.ranks = ranks
        self.size = sum(p.numel() for p in parameters)
        length = -(-self.size // (ALIGN * ranks.world)) * ALIGN
        self.padding = parameters[0].new_zeros(length * ranks.world - self.size)
        self.flat = torch.cat([*(p.detach().flatten() for p in parameters), self.padding])
        begin = 0
        for parameter in parameters:
            parameter.data = self.flat[begin : begin + parameter.numel()].view_as(parameter)
            begin += parameter.numel()
        self.own = torch.nn.Parameter(self.flat.view(ranks.world, length)[ranks.rank])

    def reduce_grads(self) -> torch.Tensor:
        """Average the gradients over the processes, each its own part.

        Returns the square norm of the gradients that this process had before.
        """
        flat = flatten(self.parameters, self.padding)
        square = square_norm(flat)
        self.own.grad = torch.empty_like(self.own)
        reduce_scatter(self.own.grad, flat, self.ranks.average)
        if self.ranks.average == dist.ReduceOp.SUM:
            self.own.grad /= self.ranks.world
        return square

    def all_gather_params(self) -> None:
        """Give every process all the weights."""
        all_gather(self.flat, self.own.detach())

    def gather(self, state: torch.Tensor) -> torch.Tensor:
        """Return optimizer state of all the weights, from that of this process's part."""
        full = state.new_empty(len(self.flat))
        # Sent as bytes, since NCCL knows no int16.
        all_gather(full.view(torch.uint8), state.view(torch.uint8))
        return full[: self.size]

    def shard(self, state: torch.Tensor) -> torch.Tensor:
        """Undo `gather`."""
        padded = torch.cat([state, state.new_zeros(len(self.padding))])
        return padded.view(self.ranks.world, -1)[self.ranks.rank].clone()


class Zero1(NoParallel):
    """All trained weights as one FlatShard (ZeRO-1)."""

    def __init__(self, model, ranks, settings):
        super().__init__(model, ranks, settings)
        self.flat_shards = self.divided()
        self.parameters = [share.own for share in self.flat_shards]

    def divided(self) -> list[FlatShard]:
        """Return the shards of the trained weights."""
        return [FlatShard(self.parameters, self.ranks)]

    def reduce_grads(self):
        self.release_grads([share.reduce_grads() for share in self.flat_shards])

    def release_grads(self, squares: list[torch.Tensor]) -> None:
        """Free the gradients when the shares are reduced.

        `squares` are the square norms of what was there before.
        """
        # A process that is alone has no two batches to compare.
        self.own_square_norm = sum(squares) if self.ranks.world > 1 else None
        for share in self.flat_shards:
            for parameter in share.parameters:
                parameter.grad = None

    def sync_found_inf(self, scaler, optimizer):
        if not scaler.is_enabled():
            return
        state = scaler._per_optimizer_states[id(optimizer)]
        for found_inf in state["found_inf_per_device"].values():
            dist.all_reduce(found_inf, dist.ReduceOp.MAX)

    def global_norm(self, norm):
        return super().global_norm(total_norm(norm))

    def all_gather_params(self):
        for share in self.flat_shards:
            share.all_gather_params()

    def gather(self, state, parameter):
        if state.shape != parameter.shape:  # a step count, which has the same value for all
            return state
        return self._share(parameter).gather(state)

    def shard(self, state, parameter):
        share = self._share(parameter)
        return share.shard(state) if state.shape == (share.size,) else state

    def _share(self, parameter: torch.Tensor) -> FlatShard:
        """Return the shard whose own part a parameter of the optimizer is."""
        return next(share for share in self.flat_shards if share.own is parameter)
