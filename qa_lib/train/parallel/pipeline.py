"""Each process has some of the layers, and micro-batches pass through all of them.

Variants P-gpipe, P-1f1b and P-interleaved have such pipelines.

A pipeline of p stages (GPipe, Huang et al. 2019) needs no process to hold the whole model, and
sends no gradients but those of hidden states: a few MiB a micro-batch, where data parallelism sends
all of the weights' gradients. Its price is waiting. The last stage has nothing to do until the
first micro-batch comes, and the first nothing after its last forward pass until gradients come
back: of m micro-batches' time, p - 1 are lost at either end together. That share of a step, the
bubble, is (p - 1) / (m + p - 1): a fifth with two stages and four micro-batches. More micro-batches
make it small, but their GEMMs as well.

- `gpipe`: all micro-batches forward, then all backward. A stage keeps the activations of all m.
- `1f1b` (PipeDream, Narayanan et al. 2019): a stage begins the backward pass of a micro-batch as
  soon as it can. The bubble is the same, but at most p micro-batches' activations are kept, however
  large m is.
- `interleaved` (Narayanan et al. 2021): a process has two parts of the layers, one from each half
  of the model, so that the first micro-batch reaches the last process after half the time:
  (p - 1) / (2 m + p - 1), for twice the messages.

Two processes and four micro-batches, if a backward pass takes twice as long as a forward pass:
digits are forward passes, letters backward passes, and dots waiting. In `interleaved` 4 to 7 and e
to h are those of the upper half.

    gpipe        process 0  0123...aabbccdd              waits for 3 of 15
                 process 1  .0123aabbccdd..
    1f1b         process 0  01..aa2bb3cc.dd              3 of 15
                 process 1  .0aa1bb2cc3dd..
    interleaved  process 0  01452.ee3ff6aa7bb.gg.hhccdd  3 of 27, each half as long
                 process 1  .014ee5ff2aa3bb6gg7hhccdd..

Stage s of replica r is on rank r p + s. Replicas average their gradients the way `ddp-one-bucket`
does, each stage with those that have the same layers.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from qa_lib.errors import SpecError
from qa_lib.measure.meter import Stopwatch
from qa_lib.model.architectures import encoder_of, layers_of
from qa_lib.model.packed import ModelStage
from qa_lib.spec.rules import unshared
from qa_lib.spec.settings import Settings
from qa_lib.train.compile import LossOf, compiled
from qa_lib.train.optim import Precision
from qa_lib.train.parallel.data_parallel import OneBucketDDP, flatten, square_norm, total_norm
from qa_lib.train.parallel.process_group import ProcessGroup

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


def bubble(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Return the share of a step in which a process of a pipeline waits, in theory.

    The theory is that all parts of the model take equally long, and messages no time. A process has
    so many `chunks` of the model.
    """
    return (stages - 1) / (chunks * micro_batches + stages - 1)


def measured_bubble(stages: list[tuple[float, float]]) -> float:
    """Return the share of a step in which the stage that computes least waits.

    `stages` has what StepStats.pipelined returned in each. A step lasts as long as the passes of
    the first stage: later stages end before, and wait in the reduction that follows.
    """
    least_computing = min(computing for computing, _ in stages)
    longest_passes = max(passes for _, passes in stages)
    return 1 - least_computing / longest_passes


class Pipeline(OneBucketDDP):
    """One stage, which has `chunks` parts of the layers.

    The first part of all has the embeddings, the last the head. `replica_group` are the processes
    that have the same layers, one of each replica, and `stage_group` those that have one model
    between them.
    """

    def __init__(self, model: nn.Module, ranks: ProcessGroup, settings: Settings):
        """Leave the model what this stage has, and make other modules empty, in place.

        Raises SpecError where the layers cannot be divided.
        """
        encoder = encoder_of(model)
        layers = layers_of(model)
        self.count = ranks.stages * settings.chunks  # parts of all processes
        why = unshared(
            settings,
            layers=len(layers),
            heads=model.config.num_attention_heads,
            world=ranks.world,
            stages=ranks.stages,
        )
        if why:
            raise SpecError(why)
        size = len(layers) // self.count
        mesh = dist.init_device_mesh(
            ranks.device.type, (ranks.replicas, ranks.stages), mesh_dim_names=("replica", "stage")
        )
        self.replica_group = mesh.get_group("replica")
        self.stage_group = mesh.get_group("stage")
        # The numbers of the parts that are here.
        self.numbers = range(mesh.get_local_rank("stage"), self.count, ranks.stages)
        names = [name for name, _ in model.named_parameters()]
        part_of = dict.fromkeys(encoder.embeddings, 0)
        part_of[encoder.head] = self.count - 1
        for number in range(len(layers)):
            part_of[f"{encoder.layers}.{number}"] = number // size
        for name in part_of.keys() & dict(model.named_modules()).keys():
            if part_of[name] not in self.numbers:
                model.set_submodule(name, nn.Identity())
        super().__init__(model, ranks, settings)
        # The places of the parameters that are left among those of the whole model.
        self.places = [names.index(name) for name, _ in model.named_parameters()]
        self.micro_batches = []  # inputs of a step, which the stages share
        self.laps = []  # of computing in a step, which the stages note
        self.stages: list[Stage] = []
        self.schedule = None

    def wrapped(self, forward: LossOf) -> LossOf:
        layers = layers_of(self.model)
        size = len(layers) // self.count
        self.parts = {}
        for number in self.numbers:
            part = ModelStage(
                forward.model,
                layers[number * size : (number + 1) * size],
                embeddings=number == 0,
                head=number == self.count - 1,
            )
            self.parts[number] = compiled(part, self.settings)
        return forward

    def forward_backward(self, micro_batches: list[dict], parts: list[float]) -> torch.Tensor:
        """Do all passes of a step, and return the mean loss, like OptimizerStep.forward_backward.

        The last stage alone has the loss, which therefore counts for all of them.
        """
        if not self.schedule:
            self._build_schedule(len(micro_batches), micro_batches[0]["input_ids"].shape)
        self.micro_batches[:] = micro_batches
        self.laps[:] = []
        self.shares = parts
        for stage in self.stages:
            stage.first_square_norm = None
        self.loss = torch.zeros((), device=self.ranks.device)
        clock = Stopwatch(self.ranks.device)
        self.schedule.step(target=torch.arange(len(parts)), return_outputs=False)
        self.ranks.stats.waits.append((self.laps[:], clock.lap()))
        return self.loss * self.ranks.stages

    def _build_schedule(self, micro_batches: int, shape: torch.Size) -> None:
        """Make the stages and their schedule for packed sequences of that shape, [1, tokens]."""
        device = self.ranks.device
        width = self.model.config.hidden_size
        # Stages take and give hidden states, which come from layer norms and have the type of their
        # weights; the last one gives the loss.
        hidden = self.parameters[0].new_empty(*shape, width, device="meta", requires_grad=True)
        loss = torch.empty((), device="meta", requires_grad=True)
        for number, part in self.parts.items():
            is_first = number == 0
            is_last = number == self.count - 1
            stage = Stage(
                part,
                number,
                self.count,
                device,
                input_args=() if is_first else hidden,
                output_args=loss if is_last else hidden,
                group=self.stage_group,
            )
            stage.micro_batches = self.micro_batches
            stage.laps = self.laps
            stage.autocast = Precision(self.settings, device).autocast
            stage.alone = self.ranks.replicas == 1
            self.stages.append(stage)
        self.schedule = SCHEDULES[self.settings.schedule](
            self.stages if self.settings.chunks > 1 else self.stages[0],
            micro_batches,
            self._note_loss,
            scale_grads=False,
        )

    def _note_loss(self, loss: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """Add the loss of the micro-batch of that number to the step's, and return its share."""
        loss = loss / self.shares[int(number)]
        self.loss += loss.detach()
        return loss

    def reduce_grads(self):
        if self.ranks.replicas > 1:
            super().reduce_grads()
            return
        # There is nothing to average. The first micro-batch is compared with all, which a process
        # alone does, too.
        first_square_norm = sum(stage.first_square_norm for stage in self.stages)
        self.local_square_norm = first_square_norm * len(self.micro_batches) ** 2

    def global_norm(self, norm):
        return total_norm(super().global_norm(norm), self.stage_group)

    def place(self, number):
        return self.places[number]


class Stage(PipelineStage):
    """PyTorch's stage, which takes one of `micro_batches` by its number.

    It notes in `laps` how long it computes. In a pipeline that is `alone`, without replicas, it
    also notes the square norm of its first micro-batch's gradients, in `first_square_norm`. The
    forward pass runs in `autocast()`.
    """

    def forward_one_chunk(self, number, args, kwargs=None, *rest, **options):
        clock = Stopwatch(self.device)
        with self.autocast():
            output = super().forward_one_chunk(
                number, args, self.micro_batches[number], *rest, **options
            )
        self.laps.append(clock.lap())
        return output

    def backward_one_chunk(self, *args, **options):
        clock = Stopwatch(self.device)
        super().backward_one_chunk(*args, **options)
        self.laps.append(clock.lap())
        if self.alone and self.first_square_norm is None:
            trained = [p for p in self.submod.parameters() if p.requires_grad]
            self.first_square_norm = square_norm(flatten(trained))
