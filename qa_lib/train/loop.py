"""The training loop.

`train` runs all variants except those of the Trainer (trainer.py) and of plain PyTorch (plain.py).
Each technique that a variant adds has a file of its own. `OptimizerStep` is the step that textbooks
show, forward, backward, clip, step; `train` repeats it and keeps books.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from qa_lib.data.batches import Batches
from qa_lib.measure.meter import PEAK_FROM, Hooks, Meter
from qa_lib.model.float8_layers import cast_weights
from qa_lib.model.hash_dropout import renew
from qa_lib.model.packed import Packed
from qa_lib.spec.spec import Spec
from qa_lib.train.checkpoint import Checkpoint
from qa_lib.train.compile import ChunkedLossOf, LossOf, MaskedLossOf, compile_kernels
from qa_lib.train.cuda_graph import CapturedStep
from qa_lib.train.optim import (
    Precision,
    build_optimizer,
    clip,
    learning_rate,
    set_rate,
    trained,
    unscale,
)
from qa_lib.train.parallel.data_parallel import DDP, FSDP2, NoParallel, OneBucketDDP
from qa_lib.train.parallel.overlap import OverlapDDP, OverlapZero1
from qa_lib.train.parallel.peers import Peers
from qa_lib.train.parallel.pipeline import Pipeline
from qa_lib.train.parallel.process_group import ProcessGroup
from qa_lib.train.parallel.tensor import Tensor
from qa_lib.train.parallel.zero1 import Zero1
from qa_lib.train.step_log import StepFailed, StepLog
from qa_lib.train.trained import Trained

STRATEGIES = {
    "none": NoParallel,
    "ddp": DDP,
    "ddp-bf16": DDP,
    "ddp-one-bucket": OneBucketDDP,
    "ddp-overlap": OverlapDDP,
    "zero1": Zero1,
    "zero1-overlap": OverlapZero1,
    "peers": Peers,
    "fsdp2": FSDP2,
    "pipeline": Pipeline,
    "tensor": Tensor,
}


class OptimizerStep:
    """Forward and backward pass of every micro-batch, then one update of the weights."""

    def __init__(
        self,
        model,
        batches: Batches,
        spec: Spec,
        precision: Precision,
        hooks: Hooks,
        ranks: ProcessGroup,
    ):
        settings = spec.settings
        self.model = model
        self.precision = precision
        self.hooks = hooks
        self.strategy = STRATEGIES[settings.parallel](model, ranks, settings)
        forward = Packed(model, batches.limits) if settings.padding == "packed" else model
        if settings.loss_padding == "masked":
            forward = MaskedLossOf(forward)
        elif settings.loss == "native":
            forward = LossOf(forward)
        else:
            forward = ChunkedLossOf(forward, fp8=settings.loss == "chunked-fp8")
        self.forward = self.strategy.wrapped(forward)
        # A compiler casts each weight by itself.
        self.casts_ahead = (
            settings.has_8_bit_layers
            and settings.compile == "none"
            and self.strategy.has_all_weights
        )
        self.optimizer = build_optimizer(model, spec, self.strategy.parameters)
        self.strategy.attach(self.optimizer)
        # The cudagraphs backend returns gradients in memory which its next replay writes over.
        # Where another micro-batch must add to them, they need memory of their own, for the
        # whole run.
        self.keep_gradients = settings.compile == "cudagraphs" and spec.accumulation > 1
        if self.keep_gradients:
            for parameter in trained(model):
                parameter.grad = torch.zeros_like(parameter)

    def __call__(
        self, micro_batches: list[dict[str, torch.Tensor]], parts: list[float]
    ) -> torch.Tensor:
        """Do one step on model inputs on the device; return the mean loss, which stays there.

        A micro-batch is the part 1 / `parts` of what this process does in the step: its loss is
        divided by that number, which differs between micro-batches of different size.
        """
        scaler = self.precision.scaler
        optimizer = self.optimizer
        strategy = self.strategy
        strategy.begin()
        forward_backward = strategy.forward_backward or self.forward_backward
        mean_loss = forward_backward(micro_batches, parts)
        with self.hooks.phase("reduce"):
            strategy.reduce_grads()
        with self.hooks.phase("optimizer"):
            unscale(optimizer, scaler)
            strategy.sync_found_inf(scaler, optimizer)
            clip(optimizer, strategy.global_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=not self.keep_gradients)
            strategy.all_gather_params()
        return mean_loss

    def cast_weights(self) -> None:
        """Cast the weights of linear layers in 8 bits before a forward pass, if all are there."""
        if self.casts_ahead:
            cast_weights(self.model)

    def forward_backward(self, micro_batches, parts) -> torch.Tensor:
        """Do forward and backward pass of one micro-batch after the other; return the mean loss."""
        mean_loss = torch.zeros((), device=self.precision.device)
        for number, (inputs, part) in enumerate(zip(micro_batches, parts, strict=True), 1):
            renew(self.model)
            self.cast_weights()
            with self.strategy.micro_batch(last=number == len(parts)):
                with self.hooks.phase("forward"), self.precision.autocast():
                    loss = self.forward(**inputs) / part
                with self.hooks.phase("backward"):
                    self.precision.scaler.scale(loss).backward()
            mean_loss += loss.detach()
        return mean_loss


def train(
    model: torch.nn.Module,
    batches: Batches,
    spec: Spec,
    run_dir: Path,
    say: Callable[[str], None],
    hooks: Hooks,
    ranks: ProcessGroup,
) -> Trained:
    """Train `model` in place for all steps of the batches, from the run's checkpoint on.

    Writes steps.jsonl and, as often as the preset says, a checkpoint into `run_dir`. `ranks` are
    the processes that train together and have joined: all of them call this, and the first writes.
    `say` takes lines for the user.

    Raises StepFailed.
    """
    settings = spec.settings
    device = ranks.device
    precision = Precision(settings, device)
    model.to(device, precision.weights).train()
    step = OptimizerStep(model, batches, spec, precision, hooks, ranks)
    # This is dropout's seed: the weights have been drawn already.
    rank = 0 if step.strategy.draws_alike else ranks.rank
    torch.manual_seed(spec.seed + rank)
    take_step = CapturedStep(step) if settings.cuda_graph else step
    checkpoint = Checkpoint(
        run_dir,
        spec,
        model=model,
        optimizer=step.optimizer,
        scaler=precision.scaler,
        strategy=step.strategy,
    )
    begin, note = checkpoint.load()
    log = StepLog(
        run_dir, spec, batches.steps, begin=begin, scaler=precision.scaler, ranks=ranks, say=say
    )
    if device.type == "cuda" and settings.compile == "none" and settings.norms == "fused":
        first_samples = ranks.local_micro_batches(batches.step(0))[0]
        inputs = batches.collate(first_samples, device)

        def forward() -> torch.Tensor:
            step.cast_weights()
            return step.forward(**inputs)

        with precision.autocast():
            compile_kernels(forward, model)
    # The memory's peak counts from the step after which compilation allocates no more. The
    # cudagraphs backend records its graphs in the first, and a replay allocates nothing that would
    # be seen.
    peak_from = 0 if settings.compile == "cudagraphs" else PEAK_FROM
    until = max(0, batches.steps - begin - hooks.untimed_steps)
    meter = Meter(device, spec.preset.measure_from, peak_from, until)

    for number in range(begin + 1, batches.steps + 1):
        rate = learning_rate(spec, number - 1, batches.steps)
        set_rate(step.optimizer, rate)
        begun = time.perf_counter()
        all_micro_batches = batches.step(number - 1)
        micro_batches = ranks.local_micro_batches(all_micro_batches)
        share = sum(map(len, all_micro_batches)) / ranks.replicas
        parts = [share / len(samples) for samples in micro_batches]
        try:
            inputs = [batches.collate(samples, device) for samples in micro_batches]
            meter.data_s.append(time.perf_counter() - begun)
            loss = take_step(inputs, parts)
        except Exception as problem:
            raise StepFailed(number) from problem
        is_last = number == batches.steps
        saves = checkpoint.every > 0 and number % checkpoint.every == 0 and not is_last
        log.step(meter, batches.tokens(micro_batches), loss, rate, write=saves)
        if saves:
            step.strategy.finish()
            checkpoint.save(number)
            meter.resume()
        hooks.finished(number)
    # More steps would change a model that is scored.
    if ranks.world > 1 and not spec.preset.quality and begin < batches.steps:
        ranks.stats.note_overlap(lambda: take_step(inputs, parts))
    step.strategy.finish()
    return Trained(step.optimizer, meter, resumed_from=begin, checkpoint_note=note)
