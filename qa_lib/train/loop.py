"""The training loop. Every row but A0 runs through `train`; what a row changes is in the technique's own file.

`OptimizerStep` is the step that textbooks show, forward, backward, clip, step; `train` repeats it and keeps books.
"""

from pathlib import Path

import torch

from qa_lib.data.batches import Batches
from qa_lib.measure.meter import Meter, Watch
from qa_lib.model.dropout import renew
from qa_lib.model.packed import Packed
from qa_lib.spec import Spec
from qa_lib.train.checkpoint import Checkpoint
from qa_lib.train.compilation import compiled, own_gradients, peak_from
from qa_lib.train.graph import captured
from qa_lib.train.optim import build_optimizer, clip, learning_rate, set_rate, trained
from qa_lib.train.precision import Precision
from qa_lib.train.steplog import StepFailed, StepLog


class OptimizerStep:
    """Forward and backward pass of every micro-batch, then one update of the weights."""

    def __init__(self, model, batches: Batches, spec: Spec, precision: Precision, watch: Watch):
        self.model, self.precision, self.watch = model, precision, watch
        forward = Packed(model, batches.limits) if spec.settings.padding == "packed" else model
        self.forward = compiled(forward, spec.settings)
        self.optimizer = build_optimizer(model, spec)
        self.keep_gradients = own_gradients(spec)
        if self.keep_gradients:
            for parameter in trained(model):
                parameter.grad = torch.zeros_like(parameter)

    def __call__(self, micro_batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """One step on model inputs that are on the device; the mean loss, which stays there."""
        scaler, optimizer, watch = self.precision.scaler, self.optimizer, self.watch
        mean_loss = torch.zeros((), device=self.precision.device)
        for inputs in micro_batches:
            renew(self.model)
            with watch.phase("forward"), self.precision.autocast():
                loss = self.forward(**inputs).loss / len(micro_batches)
            with watch.phase("backward"):
                scaler.scale(loss).backward()
            mean_loss += loss.detach()
        with watch.phase("optimizer"):
            scaler.unscale_(optimizer)
            clip(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=not self.keep_gradients)
        return mean_loss


def train(
    model: torch.nn.Module,
    batches: Batches,
    spec: Spec,
    device: torch.device,
    run_dir: Path,
    say=print,
    watch: Watch | None = None,
) -> tuple[torch.optim.Optimizer, Meter, int, str | None]:
    """Train `model` in place for all of the batches' steps; resumes from the run's checkpoint if there is one.

    Writes steps.jsonl and, as often as the scale says, a checkpoint into `run_dir`. Returns the optimizer, the meter,
    the number of steps that were done before, and why a checkpoint was not believed, if one was not. Raises StepFailed.
    """
    torch.manual_seed(spec.seed)
    watch, precision = watch or Watch(), Precision(spec.settings, device)
    model.to(device, precision.weights).train()
    step = OptimizerStep(model, batches, spec, precision, watch)
    take_step = captured(step, spec.settings)
    checkpoint = Checkpoint(run_dir, spec, model, step.optimizer, precision.scaler, device)
    begin, refused = checkpoint.load()
    log = StepLog(run_dir, spec, batches.steps, begin, precision.scaler, say)
    meter = Meter(device, spec.scale.measure_from, peak_from(spec.settings))

    for number in range(begin + 1, batches.steps + 1):
        rate = learning_rate(spec, number - 1, batches.steps)
        set_rate(step.optimizer, rate)
        micro_batches = batches.step(number - 1)
        try:
            loss = take_step([batches.collate(features, device) for features in micro_batches])
        except Exception as problem:
            raise StepFailed(number) from problem
        meter.step(*batches.rows(micro_batches))
        log.add(loss, rate)
        saves = checkpoint.is_due(number, batches.steps)
        if log.due or saves or number == batches.steps:
            log.write(meter.flush())
            if saves:
                checkpoint.save(number)
            meter.resume()
        watch.finished(number)
    return step.optimizer, meter, begin, refused
