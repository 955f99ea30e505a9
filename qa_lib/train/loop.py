"""The training loop. Every row but A0 runs through `train`; what a row changes is in the technique's own file.

`OptimizerStep` is the step that textbooks show, forward, backward, clip, step; `train` repeats it and keeps books.
"""

import time
from pathlib import Path

import torch

from qa_lib.data.batches import Batches
from qa_lib.measure.meter import Meter, Watch
from qa_lib.model.dropout import renew
from qa_lib.model.packed import Packed
from qa_lib.spec import Spec
from qa_lib.train.checkpoint import Checkpoint
from qa_lib.train.compile import LossOf, own_gradients, peak_from
from qa_lib.train.cuda_graph import captured
from qa_lib.train.data_parallel import DDP, FSDP, Alone, DDPInHalf, Flat
from qa_lib.train.optim import Precision, build_optimizer, clip, learning_rate, set_rate, trained, unscale
from qa_lib.train.overlap import Overlapped, OverlappedShards
from qa_lib.train.pipeline import Pipeline
from qa_lib.train.process_group import Ranks
from qa_lib.train.step_log import StepFailed, StepLog
from qa_lib.train.tensor import Tensor
from qa_lib.train.zero1 import Sharded

SHARING = {
    "none": Alone,
    "ddp": DDP,
    "ddp-bf16": DDPInHalf,
    "ddp-one-bucket": Flat,
    "ddp-overlap": Overlapped,
    "zero1": Sharded,
    "zero1-overlap": OverlappedShards,
    "fsdp2": FSDP,
    "pipeline": Pipeline,
    "tensor": Tensor,
}


class OptimizerStep:
    """Forward and backward pass of every micro-batch, then one update of the weights."""

    def __init__(self, model, batches: Batches, spec: Spec, precision: Precision, watch: Watch, ranks: Ranks):
        self.model, self.precision, self.watch = model, precision, watch
        self.sharing = SHARING[spec.settings.parallel](model, ranks, spec.settings)
        forward = Packed(model, batches.limits) if spec.settings.padding == "packed" else model
        self.forward = self.sharing.wrapped(LossOf(forward))
        self.optimizer = build_optimizer(model, spec, self.sharing.parameters)
        self.keep_gradients = own_gradients(spec)
        if self.keep_gradients:
            for parameter in trained(model):
                parameter.grad = torch.zeros_like(parameter)

    def __call__(self, micro_batches: list[dict[str, torch.Tensor]], parts: list[float]) -> torch.Tensor:
        """One step on model inputs that are on the device; the mean loss, which stays there.

        Each micro-batch is one of `parts` equal parts of what this process does in the step, where all have the same
        number of features, and counts accordingly more or less where they have not.
        """
        scaler, optimizer, watch, sharing = self.precision.scaler, self.optimizer, self.watch, self.sharing
        sharing.begin()
        mean_loss = (sharing.passes or self.passes)(micro_batches, parts)
        with watch.phase("reduce"):
            sharing.reduce()
        with watch.phase("optimizer"):
            unscale(optimizer, scaler)
            sharing.agree(scaler, optimizer)
            clip(optimizer, sharing.across)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=not self.keep_gradients)
            sharing.spread()
        return mean_loss

    def passes(self, micro_batches, parts) -> torch.Tensor:
        """Forward and backward pass of one micro-batch after the other; the mean loss."""
        mean_loss = torch.zeros((), device=self.precision.device)
        for number, (inputs, part) in enumerate(zip(micro_batches, parts, strict=True), 1):
            renew(self.model)
            with self.sharing.micro_batch(last=number == len(parts)):
                with self.watch.phase("forward"), self.precision.autocast():
                    loss = self.forward(**inputs) / part
                with self.watch.phase("backward"):
                    self.precision.scaler.scale(loss).backward()
            mean_loss += loss.detach()
        return mean_loss


def train(
    model: torch.nn.Module,
    batches: Batches,
    spec: Spec,
    device: torch.device,
    run_dir: Path,
    say=print,
    watch: Watch | None = None,
    ranks: Ranks | None = None,
) -> tuple[torch.optim.Optimizer, Meter, int, str | None]:
    """Train `model` in place for all of the batches' steps; resumes from the run's checkpoint if there is one.

    Writes steps.jsonl and, as often as the scale says, a checkpoint into `run_dir`. Returns the optimizer, the meter,
    the number of steps that were done before, and what is to be said of a checkpoint. Raises StepFailed.
    `ranks` are the processes that train together: all of them call this, and the first writes.
    """
    ranks = ranks or Ranks(device)
    ranks.join(spec)
    watch, precision = watch or Watch(), Precision(spec.settings, device)
    model.to(device, precision.weights).train()
    step = OptimizerStep(model, batches, spec, precision, watch, ranks)
    # Of dropout: the weights have been drawn already.
    torch.manual_seed(spec.seed + (0 if step.sharing.draws_alike else ranks.rank))
    take_step = captured(step, spec.settings)
    checkpoint = Checkpoint(run_dir, spec, model, step.optimizer, precision.scaler, step.sharing)
    begin, note = checkpoint.load()
    log = StepLog(run_dir, spec, batches.steps, begin, precision.scaler, ranks, say)
    meter = Meter(device, spec.preset.measure_from, peak_from(spec.settings))

    for number in range(begin + 1, batches.steps + 1):
        rate = learning_rate(spec, number - 1, batches.steps)
        set_rate(step.optimizer, rate)
        begun = time.perf_counter()
        together = batches.step(number - 1)
        micro_batches = ranks.mine(together)
        share = sum(map(len, together)) / ranks.replicas
        parts = [share / len(features) for features in micro_batches]
        try:
            inputs = [batches.collate(features, device) for features in micro_batches]
            meter.data_s.append(time.perf_counter() - begun)
            loss = take_step(inputs, parts)
        except Exception as problem:
            raise StepFailed(number) from problem
        meter.step(*batches.tokens(micro_batches))
        log.add(loss, rate)
        saves = checkpoint.is_due(number, batches.steps)
        if log.due or saves or number == batches.steps:
            log.write(meter.flush())
            if saves:
                step.sharing.settle()
                checkpoint.save(number)
            meter.resume()
        watch.finished(number)
    meter.stop()
    if ranks.world > 1 and not spec.preset.quality and begin < batches.steps:  # else they would change what is scored
        ranks.gauges.note_overlap(lambda: take_step(inputs, parts))
    step.sharing.settle()
    return step.optimizer, meter, begin, note
