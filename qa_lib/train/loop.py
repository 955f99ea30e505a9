"""The training loop: every row but A0 runs through `train`."""

from pathlib import Path

import torch

from qa_lib.data.batches import Batches
from qa_lib.measure.meter import PEAK_FROM, Meter, Watch
from qa_lib.model.build import DTYPES
from qa_lib.model.dropout import renew
from qa_lib.model.packed import Packed
from qa_lib.spec import Spec
from qa_lib.train.checkpoint import Checkpoint
from qa_lib.train.graph import GraphedStep
from qa_lib.train.optim import CLIP, build_optimizer, learning_rate, set_rate
from qa_lib.train.steplog import StepLog

INITIAL_SCALE = 2.0**16  # GradScaler's own default


def train(
    model: torch.nn.Module,
    batches: Batches,
    spec: Spec,
    device: torch.device,
    run_dir: Path,
    say=print,
    watch: Watch | None = None,
) -> tuple[torch.optim.Optimizer, Meter, int]:
    """Train `model` in place for all of the batches' steps; resumes from the run's checkpoint if there is one.

    Writes steps.jsonl (a line a step: step, loss, lr, ms) and, as often as the scale says, a checkpoint into
    `run_dir`. Returns the optimizer, the meter, and the step it began at. Raises NonFiniteLoss.
    """
    settings, steps, watch = spec.settings, batches.steps, watch or Watch()
    torch.manual_seed(spec.seed)
    half = settings.half_weights
    model.to(device, DTYPES[settings.precision] if half else None).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = build_optimizer(model, spec)
    mixed = settings.precision != "fp32" and not half
    # bf16 has the range of fp32, so that only fp16 needs its loss scaled.
    scaler = torch.amp.GradScaler(device.type, init_scale=INITIAL_SCALE, enabled=settings.precision == "fp16")
    # The compiled callable shares the model's weights; evaluation goes on with the plain one. Where padding varies,
    # shapes are symbolic from the start, so that a new length compiles again at most where it fuses differently.
    forward = Packed(model, batches.limits) if settings.padding == "packed" else model
    if settings.compile != "none":
        forward = torch.compile(forward, backend=settings.compile, dynamic=settings.padding == "longest")
    # That backend returns gradients in memory which its next replay writes over; further micro-batches must add to
    # tensors of our own, which then stay for the whole run.
    own_gradients = settings.compile == "cudagraphs" and spec.accumulation > 1
    if own_gradients:
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)

    def optimizer_step(micro_batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        """Forward and backward of every micro-batch, then one update; the mean loss, on the device."""
        loss = torch.zeros((), device=device)
        for inputs in micro_batches:
            if settings.dropout == "hash":
                renew(model)
            with watch.phase("forward"), torch.autocast(device.type, DTYPES[settings.precision], enabled=mixed):
                part = forward(**inputs).loss / len(micro_batches)
            with watch.phase("backward"):
                scaler.scale(part).backward()
            loss += part.detach()
        with watch.phase("optimizer"):
            scaler.unscale_(optimizer)
            if not half:  # that optimizer clips as it reads the gradients
                torch.nn.utils.clip_grad_norm_(trained, CLIP)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=not own_gradients)
        return loss

    take_step = GraphedStep(optimizer_step) if settings.step == "graph" else optimizer_step
    checkpoint = Checkpoint(run_dir, spec, model, optimizer, scaler, device)
    begin = checkpoint.load()
    log = StepLog(run_dir, spec, steps, begin, device, scaler, say)
    # The cudagraphs backend records its graphs in the first step; a replay allocates nothing that would be seen.
    peak_from = 0 if settings.compile == "cudagraphs" else PEAK_FROM
    meter = Meter(device, spec.scale.measure_from, peak_from)

    for step in range(begin, steps):
        rate = learning_rate(spec, step, steps)
        set_rate(optimizer, rate)
        micro_batches = batches.step(step)
        try:
            loss = take_step([batches.collate(indices, device) for indices in micro_batches])
        except BaseException as problem:
            problem.step = step + 1  # for the record
            raise
        meter.step(*batches.rows(micro_batches))
        log.add(loss, rate)
        done = step + 1
        saves = spec.scale.checkpoint_every and done % spec.scale.checkpoint_every == 0 and done < steps
        if log.due or done == steps or saves:
            log.write(meter.flush())
            if saves:
                checkpoint.save(done)
            meter.resume()
        watch.finished(done)
    return optimizer, meter, begin
