"""An optimizer that several processes share: ZeRO-1 (Rajbhandari et al. 2020), variant P-zero1.

An all-reduce is two halves: first every process gets the sum of a part of the gradients
(reduce-scatter), then every process gets all parts (all-gather). The optimizer can stand between
the two: each process updates the weights of its own part, and the weights travel instead of the
gradients. The same bytes on the way, and an n-th of the optimizer's work and memory.
"""

import torch
import torch.distributed as dist

from qa_lib.kernels.many_tensors import ALIGN
from qa_lib.train.parallel.data_parallel import NoParallel, flatten, square_norm, total_norm
from qa_lib.train.parallel.process_group import ProcessGroup

# PyTorch 2.13 renamed them.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class FlatShard:
    """Some weights flattened into one tensor; each process updates an equal part of it.

    The parameters become views of `flat`, that tensor, and the part of this process, `local_shard`,
    is a parameter of the optimizer. AdamW computes element by element, so that where one tensor
    ends and another begins makes no difference to it.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], ranks: ProcessGroup):
        self.parameters = parameters
        self.ranks = ranks
        self.size = sum(p.numel() for p in parameters)
        # The least multiple of ALIGN by which the parts of all processes hold all weights.
        length = -(-self.size // (ALIGN * ranks.world)) * ALIGN
        self.padding = parameters[0].new_zeros(length * ranks.world - self.size)
        self.flat = self.placed(
            torch.cat([*(p.detach().flatten() for p in parameters), self.padding])
        )
        begin = 0
        for parameter in parameters:
            parameter.data = self.flat[begin : begin + parameter.numel()].view_as(parameter)
            begin += parameter.numel()
        self.local_shard = torch.nn.Parameter(self.flat.view(ranks.world, length)[ranks.rank])

    def placed(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a tensor like `flat`, with its values, in the memory that weights are to be in."""
        return flat

    def reduce_grads(self) -> torch.Tensor:
        """Give each process its part of the gradients' mean over the processes.

        Returns the square norm of the gradients that this process had before.
        """
        flat = flatten(self.parameters, self.padding)
        square = square_norm(flat)
        self.local_shard.grad = torch.empty_like(self.local_shard)
        reduce_scatter(self.local_shard.grad, flat, self.ranks.average)
        if self.ranks.average == dist.ReduceOp.SUM:
            self.local_shard.grad /= self.ranks.world
        return square

    def all_gather_params(self) -> None:
        """Give every process all the weights."""
        all_gather(self.flat, self.local_shard.detach())

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
        self.flat_shards = self.flatten_parameters()
        self.parameters = [flat_shard.local_shard for flat_shard in self.flat_shards]

    def flatten_parameters(self) -> list[FlatShard]:
        """Return the FlatShards that hold all trained weights."""
        return [FlatShard(self.parameters, self.ranks)]

    def reduce_grads(self):
        self.release_grads([flat_shard.reduce_grads() for flat_shard in self.flat_shards])

    def release_grads(self, squares: list[torch.Tensor]) -> None:
        """Free the whole gradients, when each process has its part of their mean.

        `squares` are the square norms of the FlatShards' gradients before.
        """
        # A process that is alone has no two batches to compare.
        self.local_square_norm = sum(squares) if self.ranks.world > 1 else None
        for flat_shard in self.flat_shards:
            for parameter in flat_shard.parameters:
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
        for flat_shard in self.flat_shards:
            flat_shard.all_gather_params()

    def gather(self, state, parameter):
        if state.shape != parameter.shape:  # a step count, which has the same value for all
            return state
        return self._flat_shard_of(parameter).gather(state)

    def shard(self, state, parameter):
        flat_shard = self._flat_shard_of(parameter)
        return flat_shard.shard(state) if state.shape == (flat_shard.size,) else state

    def _flat_shard_of(self, parameter: torch.Tensor) -> FlatShard:
        """Return the FlatShard whose local shard a parameter of the optimizer is."""
        return next(flat for flat in self.flat_shards if flat.local_shard is parameter)
