"""Data parallelism: several processes, one for each GPU, make one step together (family P).

Every process has the model and computes the gradients of its share of a step's micro-batches. All
processes average their gradients before they update their weights, which therefore stay equal. The
result is that of one process, in less time, apart from the time that the averaging takes. The
variants differ in how they average. `STRATEGIES` in train/loop.py has the class of each:

- `ddp` (Li et al. 2020): gradients are reduced in buckets while the backward pass still computes
  others (variant P1). `ddp-bf16` sends them in bf16 (variant P1-bf16).
- `ddp-one-bucket`: one reduction of all gradients after the backward pass. Nothing hides it, but it
  is one call, which a CUDA graph captures with the rest of the step (variants P-one-bucket and
  P-nccl).
- `ddp-overlap`: a reduction for each part of the model, like that of `ddp-one-bucket`, while the
  backward pass computes the gradients of the parts below it (variant P-overlap, overlap.py).
- `zero1` (ZeRO-1): each process updates a share of the weights, and sends it to the others (variant
  P-zero1, zero1.py).
- `zero1-overlap`: `ddp-overlap` and `zero1` together (variant P-overlap-zero1).
- `peers`: ZeRO-1 by pointers into the memory of other GPUs, which a CUDA graph captures with the
  rest of the step, and in which NCCL has no part (variant P-peers, peers.py).
- `fsdp2` (ZeRO-3, Zhao et al. 2023): each process keeps only a share of the weights, too, and each
  layer gathers its weights when it needs them (variant P-fsdp).

Process r of n takes micro-batches r, r + n, ... of the step's list. The list follows from seed and
step and not from n, so that a run of four processes can go on with two. Where the model itself is
divided (pipeline.py, tensor.py), the processes that share one copy of it are a replica, and n is
the number of replicas.
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

# DDP's option that copies buffers to all processes in a forward pass. PyTorch 2.13 renamed it.
_DDP_OPTIONS = signature(DistributedDataParallel).parameters
_NEW_NAME = "forward_sync_buffers"
SYNC_BUFFERS = _NEW_NAME if _NEW_NAME in _DDP_OPTIONS else "broadcast_buffers"


class NoParallel:
    """Training by one process alone; the base class of the ways to train with several.

    Its methods are what the training loop calls around the passes of a step. A subclass overrides
    those in which it differs. An instance is made when the model is on its device, and before the
    optimizer, which updates `parameters`.
    """

    # A method that makes all forward and backward passes of a step; None where the training loop
    # makes them, one micro-batch after the other.
    forward_backward = None
    # The square norm of the gradients that this process has computed in a step, before they are
    # averaged. `reduce_grads` sets it and `global_norm` takes it; None where it is not known.
    local_square_norm = None
    # Whether all processes draw the same random numbers: they compute on the same samples.
    draws_alike = False
    # Whether every process has all weights before a forward pass, and none comes in the pass.
    has_all_weights = True

    def __init__(self, model: torch.nn.Module, ranks: ProcessGroup, settings: Settings):
        self.model = model
        self.ranks = ranks
        self.settings = settings
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def wrapped(self, forward: torch.nn.Module) -> torch.nn.Module:
        """Return the module that a forward pass calls: `forward`, compiled."""
        return compiled(forward, self.settings)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the optimizer of `parameters`, which was made, take part in the exchange."""

    def begin(self) -> None:
        """Do what comes before the first forward pass of a step."""

    def micro_batch(self, last: bool):
        """Return a context around forward and backward pass of a micro-batch.

        `last` is whether it is the step's last one.
        """
        return contextlib.nullcontext()

    def reduce_grads(self) -> None:
        """Average the gradients over the processes, after the last backward pass."""

    def sync_found_inf(
        self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
    ) -> None:
        """Let all processes know whether one has found an overflow, after unscaling."""

    def global_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Return the norm of all gradients from `norm`, that of this process's optimizer.

        Notes it beside `local_square_norm`, for the noise scale (train/grad_noise.py).
        """
        # In fp16 the two cannot be compared: `local_square_norm` is of gradients that still have
        # the factor of the loss's scaling, `norm` of unscaled ones.
        is_scaled = self.settings.precision == "fp16"
        if self.local_square_norm is not None and not is_scaled:
            self.ranks.stats.note_norms(self.local_square_norm, norm.square())
        self.local_square_norm = None
        return norm

    def all_gather_params(self) -> None:
        """Give every process all the weights, at the end of each step."""

    def finish(self) -> None:
        """Give every process all the weights, where `all_gather_params` puts that off.

        The training loop calls this after the last step, and before a checkpoint.
        """

    def place(self, number: int) -> int:
        """Return the number that one of `parameters` would have if one process trained alone."""
        return number

    def gather(self, state: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Return optimizer state of a parameter as it would be if one process trained alone.

        All processes call this together.
        """
        return gather(state)  # the function below

    def shard(self, state: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        """Undo `gather`, for a parameter of this process's optimizer."""
        if state.shape != parameter.shape:  # a step count, which has the same value for all
            return state
        return shard(state, parameter)  # the function below


class DDP(NoParallel):
    """PyTorch's DistributedDataParallel.

    With gradient accumulation, gradients are reduced in the last micro-batch alone. `ddp-bf16`
    sends them in bf16, which halves the bytes and rounds the sum to 8 bits of mantissa.
    """

    def wrapped(self, forward):
        # Buffers are not copied: they are seeds of hash dropout, and each process draws its own.
        self.forward = DistributedDataParallel(
            forward, gradient_as_bucket_view=True, **{SYNC_BUFFERS: False}
        )
        self.ranks.wrapper = type(self.forward).__name__  # for the record
        if self.settings.parallel == "ddp-bf16":
            # DDP refuses PyTorch's own hook on a CPU, where it would work. It goes by the hook's
            # name, which a lambda does not have.
            self.forward.register_comm_hook(
                None, lambda state, bucket: bf16_compress_hook(state, bucket)
            )
        return super().wrapped(self.forward)

    def micro_batch(self, last):
        return contextlib.nullcontext() if last else self.forward.no_sync()


class OneBucketDDP(NoParallel):
    """All gradients flattened into one tensor, averaged by one call.

    Afterwards the gradients are views of that tensor.

    For the noise scale, `local_square_norm` must be that of a part of the step. With several
    processes it is that of a process's gradients before averaging. A process that is alone takes
    the step's first micro-batch for the part, if there are several.
    """

    replica_group = None  # the processes that have these parameters; None: all
    backward_passes = 0  # so far in this step
    first_square_norm = None  # of the first micro-batch's gradients, where they are the part

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
            # The loss of a micro-batch was divided by the number of micro-batches, and its
            # gradients with it.
            self.local_square_norm = self.first_square_norm * self.backward_passes**2
        self.backward_passes = 0
        self.first_square_norm = None
        self.ranks.mean(flat, self.replica_group)
        unflatten(flat, self.parameters)


class FSDP2(NoParallel):
    """PyTorch's fully_shard (FSDP2) over each layer, and over the rest of the model."""

    has_all_weights = False

    def __init__(self, model, ranks, settings):
        mesh = dist.init_device_mesh(ranks.device.type, (ranks.world,))
        for module in [*layers_of(model), model]:
            fully_shard(module, mesh=mesh)
        super().__init__(model, ranks, settings)

    def micro_batch(self, last):
        self.model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()


def total_norm(norm: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the norm over the parts that a group's processes have, from this part's norm."""
    squares = norm.square()
    dist.all_reduce(squares, group=group)
    return squares.sqrt()


def flatten(parameters: list[torch.nn.Parameter], *more: torch.Tensor) -> torch.Tensor:
    """Return a flat tensor of the parameters' gradients, followed by `more` flat tensors."""
    return torch.cat([*(p.grad.flatten() for p in parameters), *more])


def unflatten(flat: torch.Tensor, parameters: list[torch.nn.Parameter]) -> None:
    """Undo `flatten`: make each parameter's gradient a view of its part of `flat`."""
    sizes = [p.numel() for p in parameters]
    for parameter, gradient in zip(parameters, flat.split(sizes), strict=True):
        parameter.grad = gradient.view_as(parameter)


def square_norm(gradients: torch.Tensor) -> torch.Tensor:
    """Return the square of a tensor's norm, in fp32."""
    return torch.linalg.vector_norm(gradients, dtype=torch.float32).square()


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a whole, if each process has a share of it; all call this together."""
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

    It is `model` itself, or if each process has only a share of that, a new model that `build()`
    makes. All processes call this together.
    """
    is_divided = ranks.stages > 1 or any(isinstance(p, DTensor) for p in model.parameters())
    if is_divided:
        gathered = {name: gather(p.detach()) for name, p in model.named_parameters()}
        weights = ranks.gather_stages(gathered)
        model = build()
        for name, parameter in model.named_parameters():
            parameter.data.copy_(weights[name])
    for parameter in model.parameters():  # views of one tensor after ZeRO-1
        parameter.data = parameter.data.clone()
    return model
