"""The processes of a run, as torchrun started them: how they meet, and what they tell each other.

What they do to a step's gradients is in data_parallel.py, and in pipeline.py and tensor.py where
they divide the model; what each measures meanwhile is in grad_noise.py.
"""

from contextlib import AbstractContextManager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from qa_lib.spec.rules import replicas
from qa_lib.spec.spec import Spec
from qa_lib.train.grad_noise import StepStats

SILENCE = timedelta(minutes=5)  # after which a process that waits for the others gives up
TURN = timedelta(days=30)  # a run may wait so long for other runs on its GPUs


class ProcessGroup(AbstractContextManager):
    """The processes of a run, seen from one of them; this process alone without torchrun.

    `rank` counts from 0 to `world` - 1. The first alone writes record, steps.jsonl and checkpoint.
    `join` makes the process group, which `gather` and `mean` need where there are others; leaving
    the context ends it. Neighbours make up a pipeline of `stages`; there are `replicas` of the
    model. The noise scale compares one of a step's equal `parts` with all of its `batch` samples;
    `stats` have what this process has measured. `wrapper` is the name of the class that PyTorch or
    DeepSpeed has put around the model, if any.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.rank = 0
        self.world = 1
        self.store = None
        self.stages = 1
        self.replicas = 1
        self.parts = 1
        self.batch = 1
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
        """Wait until the first process, which holds the GPUs by then, releases the others.

        All processes call this.
        """
        if self.store and self.first:
            self.store.set("turn", "")
        elif self.store:
            self.store.wait(["turn"], TURN)

    def join(self, spec: Spec) -> None:
        """Make the process group, if the spec's variant works in one.

        Raises SpecError for processes that cannot share a step's micro-batches evenly.
        """
        self.stages = spec.stages
        self.replicas = replicas(spec, self.world)
        # The noise scale takes batches of two sizes: the step's, and what each replica has of it,
        # or one of its micro-batches.
        self.parts = self.replicas if self.replicas > 1 else spec.micro_batches
        self.batch = spec.micro_batches * spec.settings.micro_batch
        if spec.settings.parallel != "none" and not dist.is_initialized():
            dist.init_process_group(
                self.backend,
                store=self.store or dist.HashStore(),
                rank=self.rank,
                world_size=self.world,
                timeout=SILENCE,
                # With a device NCCL connects now: it could not while a graph is captured.
                device_id=self.device if self.backend == "nccl" else None,
            )

    def __exit__(self, kind, *_) -> None:
        # After an error the others may never come to the end.
        if dist.is_initialized() and kind is None:
            dist.destroy_process_group()

    def local_micro_batches(self, micro_batches: list) -> list:
        """Return this process's share of a step's micro-batches."""
        return micro_batches[self.rank * self.replicas // self.world :: self.replicas]

    def mean(self, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Average a tensor in place over all processes, or over those of a group, and return it."""
        if self.world > 1:
            dist.all_reduce(tensor, self.average, group)
            if self.average == dist.ReduceOp.SUM:
                tensor /= dist.get_world_size(group)
        return tensor

    def gather_stages(self, own: dict) -> dict:
        """Return what the stages of this process's pipeline gave, in one dict, tensors on the CPU.

        Without stages it returns what this process gave.
        """
        if self.stages == 1:
            return own
        on_cpu = {
            key: value.cpu() if torch.is_tensor(value) else value for key, value in own.items()
        }
        by_rank = self.gather(on_cpu)
        first = self.rank - self.rank % self.stages
        together = {}
        for part in by_rank[first : first + self.stages]:
            together |= part
        return together

    def gather(self, value) -> list:
        """Return what each process gave, in order of their ranks."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values
