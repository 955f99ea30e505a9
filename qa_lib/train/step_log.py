"""steps.jsonl: what a run says of itself while it runs, and what ends it early."""

import json
import math
import time
from pathlib import Path

import torch
from tqdm import tqdm

from qa_lib.errors import UserError
from qa_lib.measure.meter import Meter
from qa_lib.record import RecordError, open_to_write, read_steps
from qa_lib.spec import Spec
from qa_lib.train.grad_noise import noise_scale
from qa_lib.train.process_group import ProcessGroup

LOOK_EVERY_S = 1.0  # seconds between two looks at the loss; each look waits for the device
LOOK_EVERY = 50  # steps between two looks of several processes, whose clocks differ and which must look together
SAY_EVERY_S = 60.0  # a line of progress comes at each tenth of the steps, and at the latest after so many seconds


class StepFailed(RuntimeError):
    """An optimizer step that could not be done; `step` counts from 1, and the cause says why."""

    def __init__(self, step: int, message: str = "an error in the step"):
        super().__init__(f"{message} at step {step}")
        self.step = step


class NonFiniteLoss(StepFailed, UserError):
    """The loss is NaN or infinite and no smaller GradScaler scale can help. The weights, the learning rate or a kernel
    is to blame: the latter may be this machine's, so that this is none of record.MISTAKES."""


class StepLog:
    """steps.jsonl of a run: a line a step with its number, loss, learning rate (lr) and milliseconds (ms); where the
    variant's gradients show it, some lines have the noise scale so far (phi, in samples).

    Losses stay on the device until `write`, so that logging does not stall a step. `begin` is the number of steps that
    an earlier process has done; of its lines those are kept that can be read. Of several `ranks` all note their steps,
    and the first writes and says.
    """

    def __init__(
        self,
        run_dir: Path,
        spec: Spec,
        steps: int,
        begin: int,
        scaler: torch.amp.GradScaler,
        ranks: ProcessGroup,
        say,
    ):
        self.path, self.steps, self.written, self.scaler = (
            run_dir / "steps.jsonl",
            steps,
            begin,
            scaler,
        )
        self.ranks, self.say = ranks, say if ranks.first else lambda _: None
        self.pending, self.begin, self.said = [], begin, begin
        self.started = self.looked = self.said_at = time.monotonic()
        self.label, self.samples = (
            f"{spec.variant} seed {spec.seed}",
            spec.micro_batches * spec.settings.micro_batch,
        )
        self.compiling = spec.settings.compile != "none"
        if self.compiling:
            self.say(f"{self.label}: compiling, then {steps - begin} steps")
        self._append([line for line in read_steps(self.path) if line["step"] <= begin], mode="w")

    def step(
        self, meter: Meter, tokens: tuple, loss: torch.Tensor, rate: float, write: bool = False
    ) -> None:
        """One optimizer step is done, of so many `tokens`, as Meter.step takes them: note it in the meter, and its mean
        loss (a scalar on the device, not read yet) and learning rate here. Writes what was noted when it is time, after
        the last step, and if told to `write`; the next step's clock starts after that."""
        meter.step(*tokens)
        self.pending.append((loss, rate))
        if write or self.due or self.written + len(self.pending) == self.steps:
            self.write(meter.flush())
            meter.resume()

    @property
    def due(self) -> bool:
        """Whether it is time for `write`."""
        if self.ranks.world > 1:
            return len(self.pending) >= LOOK_EVERY
        return time.monotonic() - self.looked >= LOOK_EVERY_S

    def write(self, seconds: list[float]) -> None:
        """Write the noted steps with their durations; raise NonFiniteLoss if one cannot be excused.

        GradScaler is meant to skip steps that overflow in fp16, and halves its scale each time; only when it has
        come down to 1 and the loss still is not finite, the run is lost. In fp32 there is nothing to skip.
        """
        lines, broken = [], None
        excused = self.scaler.is_enabled() and self.scaler.get_scale() > 1.0
        losses = self.ranks.mean(torch.stack([loss for loss, _ in self.pending])).tolist()
        for value, (_, rate), taken in zip(losses, self.pending, seconds, strict=True):
            self.written += 1
            loss = value if math.isfinite(value) else None
            lines.append(
                {"step": self.written, "loss": loss, "lr": rate, "ms": round(1e3 * taken, 4)}
            )
            if loss is None and not excused:
                broken = broken or NonFiniteLoss(
                    self.written, f"the weights or --learning-rate give a loss of {value}"
                )
        if phi := noise_scale(self.ranks.stats.noise(self.written - self.begin)):
            lines[-1]["phi"] = round(phi, 2)
        self._append(lines)
        self.pending.clear()
        if broken:
            raise broken
        self.looked = time.monotonic()
        if self.compiling and self.written < self.steps:
            # These steps' time is the compiler's, and foretells nothing.
            self.compiling, self.said, self.said_at = False, self.written, self.looked
        tenth = self.written - self.said >= self.steps / 10
        if tenth or self.written == self.steps or self.looked - self.said_at >= SAY_EVERY_S:
            per_step = (self.looked - self.said_at) / (
                self.written - self.said
            )  # since the last line
            ahead = (self.steps - self.written) * per_step
            taken, left = map(tqdm.format_interval, (self.looked - self.started, ahead))
            self.say(
                f"{self.label}: step {self.written}/{self.steps}, loss {value:.3f}, "
                f"{self.samples / per_step:.0f} samples/s, {taken} so far, {left} left"
            )
            self.said, self.said_at = self.written, self.looked

    def _append(self, lines: list[dict], mode: str = "a") -> None:
        if not self.ranks.first:
            return
        try:
            with open_to_write(self.path, mode) as stream:
                stream.writelines(json.dumps(line) + "\n" for line in lines)
        except OSError as problem:
            raise RecordError(f"cannot write {self.path}: {problem.strerror}") from problem
