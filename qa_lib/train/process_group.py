"""The processes of a run, as torchrun started them: how they meet, and what they tell each other.

What they do to a step's gradients is in parallel.py, and in pipeline.py and tensor.py where they divide the model;
what each measures meanwhile is in grad_noise.py.
"""

from contextlib import AbstractContextManager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from qa_lib.spec import Spec, replicas
from qa_lib.train.grad_noise import StepStats

SILENCE = timedelta(minutes=5)  # after which a process that waits for the others gives up
TURN = timedelta(days=30)  # a run may wait so long for other runs on its GPUs


class ProcessGroup(AbstractContextManager):
    """The processes of a run, as torchrun started them, seen from one of them; or this process alone.

    `rank` counts from 0 to `world` - 1. The first alone writes record, steps.jsonl and checkpoint. `join` makes the
    process group, which `gather` and `mean` need where there are others; leaving the context ends it. Neighbours make
    up a pipeline of `stages`; there are `replicas` of the model. The noise scale compares one of a step's equal `parts`
    with all of its `batch` samples; `stats` have what this process has measured. `wrapper` is the name of the class
    that PyTorch or DeepSpeed has put around the model, if any.
    """

    def __init__(self, device: torch.device):
        self.device, self.rank, self.world, self.store = device, 0, 1, None
        self.stages = self.replicas = self.parts = self.batch = 1
        self.wrapper = None
        self.stats = StepStats(self)
        if dist.is_torchelastic_launched():
            self.store, self.rank, self.world = next(rendezvous("env://"))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.first = self.rank == 0
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        # How a reduction averages; where it can only add up, what it gives must be divided.
        self.average = dist.ReduceOp.AVG if self.backend == "nccl" else dist.ReduceOp.SUM

    def start(self) -> None:
        """All processes call this: the first, which holds the GPUs by then, releases the others, which wait for it."""
        if self.store and self.first:
            self.store.set("turn", "")
        elif self.store:
            self.store.wait(["turn"], TURN)

    def join(self, spec: Spec) -> None:
        """Make the process group, if the spec's variant works in one. Raises SpecError for processes that cannot share
        a step's micro-batches evenly."""
        self.stages, self.replicas = spec.stages, replicas(spec, self.world)
        # The noise scale takes batches of two sizes: the step's, and what each replica has of it, or one of
        # its micro-batches.
        self.parts = self.replicas if self.replicas > 1 else spec.micro_batches
        self.batch = spec.micro_batches * spec.settings.micro_batch
        if spec.settings.parallel != "none" and not dist.is_initialized():
            place = {
                "store": self.store or dist.HashStore(),
                "rank": self.rank,
                "world_size": self.world,
            }
            # With a device NCCL connects now: it could not while a graph is captured.
            device = self.device if self.backend == "nccl" else None
            dist.init_process_group(self.backend, timeout=SILENCE, device_id=device, **place)

    def __exit__(self, kind, *_) -> None:
        if (
            dist.is_initialized() and kind is None
        ):  # after an error the others may never come to the end
            dist.destroy_process_group()

    def local_micro_batches(self, micro_batches: list) -> list:
        """This process's share of a step's micro-batches."""
        return micro_batches[self.rank * self.replicas // self.world :: self.replicas]

    def mean(self, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """The tensor, averaged in place over all processes, or over those of a group."""
        if self.world > 1:
            dist.all_reduce(tensor, self.average, group)
            if self.average == dist.ReduceOp.SUM:
                tensor /= dist.get_world_size(group)
        return tensor

    def gather_stages(self, own: dict) -> dict:
        """What the stages of this process's pipeline gave, in one dict, tensors on the CPU; without stages, its own."""
        if self.stages == 1:
            return own
        found = self.gather(
            {key: value.cpu() if torch.is_tensor(value) else value for key, value in own.items()}
        )
        first = self.rank - self.rank % self.stages
        return {
            key: value for part in found[first : first + self.stages] for key, value in part.items()
        }

    def gather(self, value) -> list:
        """What each process gave, in order of their ranks."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values
