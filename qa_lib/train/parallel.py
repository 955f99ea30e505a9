"""Several processes that make one step together, one a GPU (the rows of family P).

Data parallelism: every process has the model, computes the gradients of its share of a step's micro-batches, and all
average them before they update their weights, which therefore stay equal. That is the step of one process, in less
time, plus what the averaging takes. How it is done is what the rows differ in:

- `ddp` (Li et al. 2020): gradients are reduced in buckets while the backward pass still computes others (row P1).
- `flat`: one reduction of all gradients after the backward pass. Nothing hides it, but it is one call, which a CUDA
  graph captures with the rest of the step (row P-fast).
- `overlap`: as `flat`, but a part of the model at a time, beginning while the backward pass computes the gradients of
  the parts below it. Only the embeddings' are left to wait for (row P-overlap).
- `sharded` (ZeRO-1, Rajbhandari et al. 2020): each process gets the sum of a share of the gradients alone, updates that
  share of the weights, and sends it to the others: the same bytes on the way, and an n-th of the optimizer's work and
  memory (row P-sharded).
- `fsdp` (ZeRO-3, Zhao et al. 2023): the weights are in shares, too, and each layer gathers its own when it needs them
  (row P-fsdp).

Process r of n takes micro-batches r, r + n, ... of the step's list, which follows from seed and step whatever n is: a
run that four began can go on with two. Where the model itself is divided (pipeline.py, tensor.py), the processes that
have one model between them are a replica, and n counts replicas.
"""

import contextlib
import warnings
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from qa_lib.model.encoders import layers_of
from qa_lib.model.packed import regions_of
from qa_lib.train.compilation import compiled
from qa_lib.train.ranks import Ranks
from qa_lib.variants import Settings

# PyTorch 2.13 warns of names that 2.11 knows alone.
warnings.filterwarnings("ignore", message=r".*(_tensor|broadcast_buffers)` is deprecated", category=FutureWarning)


class Alone:
    """One process that shares nothing; the base of the ways to share.

    Made when the model is on its device, and before the optimizer, which updates `parameters`.
    """

    passes = None  # what makes the passes of all of a step's micro-batches, where they are not made one by one
    draws_alike = False  # whether all processes draw the same random numbers

    def __init__(self, model: torch.nn.Module, ranks: Ranks, settings: Settings):
        self.model, self.ranks, self.settings = model, ranks, settings
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def wrapped(self, forward: torch.nn.Module) -> torch.nn.Module:
        """What is called for a forward pass, compiled."""
        return compiled(forward, self.settings)

    def micro_batch(self, last: bool):
        """A context around forward and backward pass of a micro-batch; `last` says that none follows in the step."""
        return contextlib.nullcontext()

    def reduce(self) -> None:
        """After the last backward pass: average the gradients over the processes."""

    def agree(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """After the gradients are unscaled: let all processes know whether one has found an overflow."""

    def across(self, norm: torch.Tensor) -> torch.Tensor:
        """The norm of all gradients from the norm of those that this process has."""
        return norm

    def spread(self) -> None:
        """After the update: give every process all the weights."""

    def place(self, number: int) -> int:
        """The number of one of `parameters` among those that a process alone would train."""
        return number

    def whole(self, state: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Optimizer state of a parameter as one process alone would have it; all processes call this together."""
        return whole(state)

    def part(self, state: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """The reverse of `whole`, for a parameter of this process's optimizer."""
        return part(state, parameter) if state.shape == parameter.shape else state


class DDP(Alone):
    """PyTorch's DistributedDataParallel; with accumulation, the last micro-batch's backward pass reduces."""

    hook = None

    def wrapped(self, forward):
        # Buffers are the seeds of hash dropout, and each process draws its own.
        self.forward = DistributedDataParallel(forward, broadcast_buffers=False, gradient_as_bucket_view=True)
        if self.hook:
            self.forward.register_comm_hook(None, self.hook)
        return super().wrapped(self.forward)

    def micro_batch(self, last):
        return contextlib.nullcontext() if last else self.forward.no_sync()


class DDPInHalf(DDP):
    """Gradients are cast to bf16 on their way, which halves the bytes and rounds the sum to 8 bits of mantissa."""

    @staticmethod
    def hook(state, bucket):
        return bf16_compress_hook(state, bucket)  # by its own name DDP takes it on GPUs alone


class Flat(Alone):
    """All gradients end to end in one tensor, averaged by one call, whose parts are the gradients from then on."""

    peers = None  # the group of processes that have these parameters; all

    def __init__(self, model, ranks, settings):
        super().__init__(model, ranks, settings)
        self.passed, self.first = 0, None  # backward passes of the step; the first one's square norm, if alone

    @contextlib.contextmanager
    def micro_batch(self, last):
        yield
        self.passed += 1
        if self.ranks.world == self.passed == 1 and not last:
            self.first = square_norm(self._flat())

    def _flat(self) -> torch.Tensor:
        return torch.cat([p.grad.flatten() for p in self.parameters])

    def reduce(self):
        flat = self._flat()
        # A micro-batch's gradients are those of its part of the step's mean loss.
        own = square_norm(flat) if self.first is None else self.first * self.passed**2
        self.passed, self.first = 0, None
        mean = square_norm(self.ranks.mean(flat, self.peers))
        if self.settings.precision != "fp16":  # a loss scale is on the gradients
            self.ranks.note_norms(own, mean)
        lay(flat, self.parameters)


class Overlapped(Flat):
    """The gradients of each of the model's regions in one tensor, whose reduction begins as soon as all are there."""

    def __init__(self, model, ranks, settings):
        super().__init__(model, ranks, settings)
        # A parameter of two regions is through with the lower one, and what is in none goes with the embeddings.
        region_of = dict.fromkeys(self.parameters, 0)
        for number, region in reversed(list(enumerate(regions_of(model)))):
            region_of |= {p: number for module in region for p in module.parameters() if p in region_of}
        self.regions = [[p for p in self.parameters if region_of[p] == n] for n in sorted(set(region_of.values()))]
        self.sent, self.waits_for = [], None  # (gradients, their region, what waits for them); parameters a region
        for number, region in enumerate(self.regions if ranks.world > 1 else []):
            for parameter in region:
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, number))

    @contextlib.contextmanager
    def micro_batch(self, last):
        self.waits_for = list(map(len, self.regions)) if last else None
        with super().micro_batch(last):
            yield

    def _arrived(self, number: int, _: torch.Tensor) -> None:
        if self.waits_for:
            self.waits_for[number] -= 1
            if self.waits_for[number] == 0:
                flat = torch.cat([p.grad.flatten() for p in self.regions[number]])
                self.sent.append((flat, square_norm(flat), self.regions[number], self.ranks.begin_mean(flat)))

    def reduce(self):
        if self.ranks.world == 1:
            return super().reduce()
        if missing := sum(self.waits_for):
            raise RuntimeError(f"{missing} of the model's parameters have no gradient, and their regions wait for them")
        self.passed, mean = 0, []
        for flat, _, region, end in self.sent:
            end()
            mean.append(square_norm(flat))
            lay(flat, region)
        if self.settings.precision != "fp16":  # as in Flat
            self.ranks.note_norms(sum(own for _, own, _, _ in self.sent), sum(mean))
        self.sent.clear()


class Sharded(Alone):
    """The trained weights end to end in one tensor, of which each process updates an equal share (ZeRO-1).

    The model's parameters become views of that tensor, and the optimizer's one parameter is the share. AdamW computes
    element by element, so that where one tensor ends and another begins makes no difference to it.
    """

    def __init__(self, model, ranks, settings):
        super().__init__(model, ranks, settings)
        self.trained = self.parameters
        self.size = sum(p.numel() for p in self.trained)
        length = -(-self.size // ranks.world)
        self.padding = self.trained[0].new_zeros(length * ranks.world - self.size)
        self.flat = torch.cat([*(p.detach().flatten() for p in self.trained), self.padding])
        begin = 0
        for parameter in self.trained:
            parameter.data = self.flat[begin : begin + parameter.numel()].view_as(parameter)
            begin += parameter.numel()
        self.share = torch.nn.Parameter(self.flat.view(ranks.world, length)[ranks.rank])
        self.parameters = [self.share]

    def reduce(self):
        flat = torch.cat([*(p.grad.flatten() for p in self.trained), self.padding])
        self.share.grad = torch.empty_like(self.share)
        dist.reduce_scatter_tensor(self.share.grad, flat, self.ranks.average)
        if self.ranks.average == dist.ReduceOp.SUM:
            self.share.grad /= self.ranks.world
        if self.ranks.world > 1 and self.settings.precision != "fp16":  # as in Flat
            # The mean of this over the processes is the square norm of all shares together.
            self.ranks.note_norms(square_norm(flat), self.ranks.world * square_norm(self.share.grad))
        for parameter in self.trained:
            parameter.grad = None

    def agree(self, scaler, optimizer):
        if scaler.is_enabled():
            for found in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
                dist.all_reduce(found, dist.ReduceOp.MAX)

    def across(self, norm):
        return total_norm(norm)

    def spread(self):
        dist.all_gather_into_tensor(self.flat, self.share.detach())

    def whole(self, state, parameter):
        if state.shape != self.share.shape:  # a step count
            return state
        full = state.new_empty(len(self.flat))
        # As bytes, since NCCL knows no int16.
        dist.all_gather_into_tensor(full.view(torch.uint8), state.view(torch.uint8))
        return full[: self.size]

    def part(self, state, parameter):
        if state.shape != (self.size,):
            return state
        padded = torch.cat([state, state.new_zeros(len(self.padding))])
        return padded.view(self.ranks.world, -1)[self.ranks.rank].clone()


class FSDP(Alone):
    """PyTorch's fully_shard (FSDP2) over each layer and what is around them."""

    def __init__(self, model, ranks, settings):
        for module in [*layers_of(model), model]:
            fully_shard(module, mesh=dist.init_device_mesh(ranks.device.type, (ranks.world,)))
        super().__init__(model, ranks, settings)

    def micro_batch(self, last):
        self.model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()


def total_norm(norm: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The norm of what the processes of a group have each a part of, from the norm of this one's."""
    squares = norm.square()
    dist.all_reduce(squares, group=group)
    return squares.sqrt()


def lay(flat: torch.Tensor, parameters: list[torch.nn.Parameter]) -> None:
    """Let the gradients of some parameters be the parts of a tensor that holds them end to end."""
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)


def square_norm(gradients: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(gradients, dtype=torch.float32).square()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of which this process has a share; all processes call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The reverse of `whole`: of a tensor the share that this process has of the parameter `like`."""
    return distribute_tensor(tensor, like.device_mesh, like.placements) if isinstance(like, DTensor) else tensor


def gathered(model: torch.nn.Module, build, ranks: Ranks) -> torch.nn.Module:
    """The trained model, with whole parameters each in memory of its own: the same, or where it was in shares another,
    which `build()` makes. All processes call this together."""
    if ranks.stages > 1 or any(isinstance(p, DTensor) for p in model.parameters()):
        weights = ranks.united({name: whole(p.detach()) for name, p in model.named_parameters()})
        model = build()
        model.load_state_dict(weights, strict=False)  # without the buffers
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model
