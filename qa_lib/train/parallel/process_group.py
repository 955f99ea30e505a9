"""The processes of a run, as torchrun started them: how they meet, and what they tell each other.

How they share a step is in data_parallel.py, zero1.py and overlap.py; pipeline.py and tensor.py
divide the model between them. grad_noise.py has what each of them measures meanwhile.
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

    `join` makes the process group, which `gather` and `mean` need where there are others; leaving
    the context ends it. The first process alone writes record, steps.jsonl and checkpoint.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.rank = 0  # of this process, from 0 to world - 1
        self.world = 1  # processes
        self.store = None  # by which torchrun's processes meet
        self.stages = 1  # of a pipeline, which neighbours make up
        self.replicas = 1  # of the model
        # The noise scale compares one of a step's equal parts with all of its samples.
        self.parts = 1
        self.batch = 1
        # The name of the class that PyTorch or DeepSpeed has put around the model, if any.
        self.wrapper = None
        # Bytes of this GPU into which other processes write, beside what PyTorch's allocator has.
        self.peer_bytes = 0
        self.stats = StepStats(self)  # what this process has measured of its steps
        if dist.is_torchelastic_launched():
            self.store, self.rank, self.world = next(rendezvous("env://"))
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.first = self.rank == 0
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        # How a reduction averages; where it can only add up, what it gives must be divided.
        self.average = dist.ReduceOp.AVG if self.backend == "nccl" else dist.ReduceOp.SUM

    def start(self) -> None:
        """Let the other processes begin, as the first one; wait for that, as another one.

        All processes call this; the first one when it holds the GPUs.
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

    def gather_stages(self, values: dict) -> dict:
        """Return what the stages of this process's pipeline gave, in one dict, tensors on the CPU.

        Without stages it returns what this process gave.
        """
        if self.stages == 1:
            return values
        on_cpu = {
            key: value.cpu() if torch.is_tensor(value) else value for key, value in values.items()
        }
        by_rank = self.gather(on_cpu)
        first = self.rank - self.rank % self.stages
        of_all_stages = {}
        for of_stage in by_rank[first : first + self.stages]:
            of_all_stages |= of_stage
        return of_all_stages

    def gather(self, value) -> list:
        """Return what each process gave, in order of their ranks."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values
