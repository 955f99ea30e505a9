"""The training loop: every row but A0 runs through `train`."""

from pathlib import Path

import torch

from qa_lib.data.batches import Batches
from qa_lib.data.packing import Packed
from qa_lib.measure.meter import PEAK_FROM, Meter, Watch
from qa_lib.model.dropout import renew
from qa_lib.train.checkpoint import Checkpoint
from qa_lib.train.graph import GraphedStep
from qa_lib.train.optim import MasterAdamW
from qa_lib.train.steplog import StepLog
from qa_lib.variants import Spec

CLIP = 1.0  # gradient norm
INITIAL_SCALE = 2.0**16  # GradScaler's own default
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def learning_rate(spec: Spec, step: int, steps: int) -> float:
    """Linear warm-up from 0, then linear decay to 0, for a step counted from 0; the recipe's factor included.

    The factor is for pretrained weights; the tiny model's own rate, from scratch, is high as it is.
    """
    factor = 1.0 if spec.model_source == "tiny" else spec.recipe.lr_factor
    peak = spec.scale.learning_rate * factor
    warmup = int(spec.scale.warmup * steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * (steps - step) / max(1, steps - warmup)


def build_optimizer(model: torch.nn.Module, spec: Spec) -> torch.optim.Optimizer:
    """AdamW without weight decay, as in the seeds, over what trains; in 8 bits for row C1.

    The 8-bit rule: both moments of tensors with at least 4,096 elements are 8-bit in blocks; smaller tensors and
    every embedding keep 32-bit moments, as bitsandbytes advises (embedding gradients are sparse and uneven).
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    lr = learning_rate(spec, 0, 1)
    if spec.settings.weights == "half":
        return MasterAdamW(trained, lr=torch.tensor(lr, device=trained[0].device), max_norm=CLIP)
    if spec.settings.optimizer == "adamw":
        return torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)
    if spec.settings.optimizer == "fused":
        # Capturable: step count and rate stay on the device, and no step waits for it.
        cuda = trained[0].device.type == "cuda"
        rate = torch.tensor(lr, device=trained[0].device) if cuda else lr
        return torch.optim.AdamW(trained, lr=rate, weight_decay=0.0, fused=True, capturable=cuda)
    import bitsandbytes  # only these rows need it, and its import is slow

    # One for the whole process, by the place of a parameter in its optimizer: it must forget an earlier model's, and
    # keep no module alive.
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.initialize()
    optimizer = bitsandbytes.optim.AdamW8bit(trained, lr=lr, weight_decay=0.0)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
    optimizer.check_overrides()
    manager.module_weight_config_triple.clear()
    return optimizer


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every parameter group this learning rate, in place where a graph reads it from the device."""
    for group in optimizer.param_groups:
        if torch.is_tensor(group["lr"]):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


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
    half = settings.weights == "half"
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
