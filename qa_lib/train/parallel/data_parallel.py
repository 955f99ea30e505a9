"""Several processes that make one step together, one a GPU (the variants of family P).

Data parallelism: every process has the model, computes the gradients of its share of a step's
micro-batches, and all average them before they update their weights, which therefore stay equal.
That is the step of one process, in less time, plus what the averaging takes. The variants differ in
how they do it:

- `ddp` (Li et al. 2020): gradients are reduced in buckets while the backward pass still computes
  others (variant P1). `ddp-bf16` sends them in bf16 (variant P1-bf16).
- `ddp-one-bucket`: one reduction of all gradients after the backward pass. Nothing hides it, but it
  is one call, which a CUDA graph captures with the rest of the step (variant P-one-bucket).
- `ddp-overlap`: a reduction for each part of the model, like that of `ddp-one-bucket`, while the
  backward pass computes the gradients of the parts below it (variant P-overlap, overlap.py).
- `zero1` (ZeRO-1): each process updates a share of the weights, and sends it to the others (variant
  P-zero1, zero1.py).
- `zero1-overlap`: `ddp-overlap` and `zero1` together (variant P-overlap-zero1).
- `fsdp2` (ZeRO-3, Zhao et al. 2023): the weights are in shares, too, and each layer gathers its own
  when it needs them (variant P-fsdp).

Process r of n takes micro-batches r, r + n, ... of the step's list, which follows from seed and
step whatever n is: a run that four began can go on with two. Where the model itself is divided
(pipeline.py, tensor.py), the processes that have one model between them are a replica, and n counts
replicas.
"""

import contextlib
from collections.abc import Callable
from inspect import signature

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from qa_lib.model.architectures import layers_of
from qa_lib.spec.settings import Settings
from qa_lib.train.compile import compiled
from qa_lib.train.parallel.process_group import ProcessGroup

# How DDP is told to leave buffers alone in a forward pass; PyTorch 2.13 has the first name.
_DDP_OPTIONS = signature(DistributedDataParallel).parameters
SYNC_BUFFERS = "forward_sync_buffers"
if SYNC_BUFFERS not in _DDP_OPTIONS:
    SYNC_BUFFERS = "broadcast_buffers"


class NoParallel:
    """One process that shares nothing; the base of the ways to share.

    It is made when the model is on its device, and before the optimizer, which updates
    `parameters`.
    """

    # A function that makes all of a step's passes, for a way that does not take one micro-batch
    # after the other.
    forward_backward = None
    # The square norm of the gradients that this process has made in a step, where it is known.
    local_square_norm = None
    # Whether all processes draw the same random numbers.
    draws_alike = False

    def __init__(self, model: torch.nn.Module, ranks: ProcessGroup, settings: Settings):
        self.model = model
        self.ranks = ranks
        self.settings = settings
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def wrapped(self, forward: torch.nn.Module) -> torch.nn.Module:
        """Return what is called for a forward pass, compiled."""
        return compiled(forward, self.settings)

    def begin(self) -> None:
        """Do what comes before the first forward pass of a step."""

    def micro_batch(self, last: bool):
        """Return a context around forward and backward pass of a micro-batch.

        `last` says that no other follows in the step.
        """
        return contextlib.nullcontext()

    def reduce_grads(self) -> None:
        """Average the gradients over the processes, after the last backward pass."""

    def sync_found_inf(
        self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
    ) -> None:
        """Let all processes know whether one has found an overflow, after unscaling."""

    def global_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Return the norm of all gradients from the norm of those that this process has.

        Notes it beside `local_square_norm`, for the noise scale (train/grad_noise.py).
        """
        # In fp16 the loss's scale is on the gradients of which `local_square_norm` was taken.
        is_scaled = self.settings.precision == "fp16"
        if self.local_square_norm is not None and not is_scaled:
            self.ranks.stats.note_norms(self.local_square_norm, norm.square())
        self.local_square_norm = None
        return norm

    def all_gather_params(self) -> None:
        """Give every process all the weights, after the update."""

    def finish(self) -> None:
        """Give every process all the weights, if they have not come.

        This follows the last step, and precedes a checkpoint.
        """

    def place(self, number: int) -> int:
        """Return the number of one of `parameters` among those that a process alone would train."""
        return number

    def gather(self, state: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Return optimizer state of a parameter the way one process alone would have it.

        All processes call this together.
        """
        return gather(state)

    def shard(self, state: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Undo `gather`, for a parameter of this process's optimizer."""
        return shard(state, parameter) if state.shape == parameter.shape else state


class DDP(NoParallel):
    """PyTorch's DistributedDataParallel; with accumulation, the last micro-batch reduces.

    `ddp-bf16` casts gradients to bf16 on their way, which halves the bytes and rounds the sum to 8
    bits of mantissa.
    """

    def wrapped(self, forward):
        # Buffers are the seeds of hash dropout, and each process draws its own.
        self.forward = DistributedDataParallel(
            forward, gradient_as_bucket_view=True, **{SYNC_BUFFERS: False}
        )
        self.ranks.wrapper = type(self.forward).__name__
        if self.settings.parallel == "ddp-bf16":
            # A lambda, since DDP knows PyTorch's own hook by its name and refuses it on a CPU.
            self.forward.register_comm_hook(None, lambda *bucket: bf16_compress_hook(*bucket))
        return super().wrapped(self.forward)

    def micro_batch(self, last):
        return contextlib.nullcontext() if last else self.forward.no_sync()


class OneBucketDDP(NoParallel):
    """All gradients flattened into one tensor, averaged by one call.

    The parts of that tensor are the gradients from then on.
    """

    replica_group = None  # the processes that have these parameters; None: all
    backward_passes = 0  # of the step, so far
    first_square_norm = None  # of the step's first gradients, where a process is alone

    @contextlib.contextmanager
    def micro_batch(self, last):
        yield
        self.backward_passes += 1
        is_first_of_several = self.backward_passes == 1 and not last
        if self.ranks.world == 1 and is_first_of_several:
            self.first_square_norm = square_norm(flatten(self.parameters))

    def reduce_grads(self):
        flat = flatten(self.parameters)
        if self.first_square_norm is None:
            self.local_square_norm = square_norm(flat)
        else:
            # A micro-batch's gradients are those of its part of the step's mean loss.
            self.local_square_norm = self.first_square_norm * self.backward_passes**2
        self.backward_passes = 0
        self.first_square_norm = None
        self.ranks.mean(flat, self.replica_group)
        unflatten(flat, self.parameters)


class FSDP2(NoParallel):
    """PyTorch's fully_shard (FSDP2) over each layer and what is around them."""

    def __init__(self, model, ranks, settings):
        for module in [*layers_of(model), model]:
            mesh = dist.init_device_mesh(ranks.device.type, (ranks.world,))
            fully_shard(module, mesh=mesh)
        super().__init__(model, ranks, settings)

    def micro_batch(self, last):
        self.model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()


def total_norm(norm: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the norm of what a group's processes each have a part of, from this part's norm."""
    squares = norm.square()
    dist.all_reduce(squares, group=group)
    return squares.sqrt()


def flatten(parameters: list[torch.nn.Parameter], *more: torch.Tensor) -> torch.Tensor:
    """Return the gradients of some parameters, and more tensors, in one tensor."""
    return torch.cat([*(p.grad.flatten() for p in parameters), *more])


def unflatten(flat: torch.Tensor, parameters: list[torch.nn.Parameter]) -> None:
    """Let the gradients of some parameters be the parts of a flat tensor."""
    sizes = [p.numel() for p in parameters]
    for parameter, gradient in zip(parameters, flat.split(sizes), strict=True):
        parameter.grad = gradient.view_as(parameter)


def square_norm(gradients: torch.Tensor) -> torch.Tensor:
    """Return the square of a tensor's norm, in fp32."""
    return torch.linalg.vector_norm(gradients, dtype=torch.float32).square()


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor that the processes share; all of them call this together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Undo `gather`: return the share of a tensor that this process has of the parameter `like`."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements)


def gather_model(
    model: torch.nn.Module, build: Callable[[], torch.nn.Module], ranks: ProcessGroup
) -> torch.nn.Module:
    """Return the trained model, with whole parameters each in memory of its own.

    It is the same model, or where the processes had shares of it another, which `build()` makes.
    All processes call this together.
    """
    is_divided = ranks.stages > 1 or any(isinstance(p, DTensor) for p in model.parameters())
    if is_divided:
        gathered = {name: gather(p.detach()) for name, p in model.named_parameters()}
        weights = ranks.gather_stages(gathered)
        model = build()
        for name, parameter in model.named_parameters():
            parameter.data.copy_(weights[name])
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model
