"""steps.jsonl: what a run says of itself while it runs, and what ends it early."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from qa_lib.errors import UserError
from qa_lib.measure.meter import Meter
from qa_lib.records.files import RecordError, open_to_write
from qa_lib.records.record import read_steps
from qa_lib.spec.spec import Spec
from qa_lib.train.grad_noise import noise_scale
from qa_lib.train.parallel.process_group import ProcessGroup

LOOK_EVERY_S = 1.0  # seconds between two looks at the loss; each look waits for the device
# Steps between two looks of several processes, whose clocks differ and which must look together.
LOOK_EVERY = 50
# A line of progress comes at each tenth of the steps, and at the latest after so many seconds.
SAY_EVERY_S = 60.0


class StepFailed(RuntimeError):
    """An optimizer step that could not be done; `step` counts from 1, and the cause says why."""

    def __init__(self, step: int, message: str = "an error in the step"):
        super().__init__(f"{message} at step {step}")
        self.step = step


class NonFiniteLoss(StepFailed, UserError):
    """The loss is NaN or infinite and no smaller scale of GradScaler can help.

    The weights, the learning rate or a kernel is to blame. A kernel may fail on this machine alone,
    so that the error is not counted among the user's mistakes (record.MISTAKES).
    """


class StepLog:
    """steps.jsonl of a run: a line a step, and the lines of progress.

    A line has the step's number, loss, learning rate (lr) and milliseconds (ms); where the
    variant's gradients show it, some lines have the noise scale so far (phi, in samples).

    Losses stay on the device until `write`, so that logging does not stall a step. `begin` is the
    number of steps that an earlier process has done; those of its lines are kept that can be read.
    All `ranks` note their steps, and the first writes and says.
    """

    def __init__(
        self,
        run_dir: Path,
        spec: Spec,
        steps: int,
        begin: int,
        scaler: torch.amp.GradScaler,
        ranks: ProcessGroup,
        say: Callable[[str], None],
    ):
        self.path = run_dir / "steps.jsonl"
        self.steps = steps
        self.begin = begin
        self.scaler = scaler
        self.ranks = ranks
        self.say = say if ranks.first else lambda _: None
        self.label = f"{spec.variant} seed {spec.seed}"
        self.samples = spec.micro_batches * spec.settings.micro_batch  # of a step
        self.pending = []  # loss and learning rate of the steps that are not written yet
        self.written = begin  # steps that are written
        self.reported = begin  # steps that were done at the last line of progress
        now = time.monotonic()
        self.started = now
        self.looked = now  # at the loss, for the last time
        self.reported_at = now
        self.compiling = spec.settings.compile != "none"
        if self.compiling:
            self.say(f"{self.label}: compiling, then {steps - begin} steps")
        self._append([line for line in read_steps(self.path) if line["step"] <= begin], mode="w")

    def step(
        self, meter: Meter, tokens: tuple, loss: torch.Tensor, rate: float, write: bool = False
    ) -> None:
        """Take note that an optimizer step is done.

        `tokens` go to Meter.step; `loss` is the mean loss, a scalar on the device that is not read
        yet. Writes what was noted when it is time, after the last step and the last that is
        measured, and if told to `write`; the next step's clock starts after that.
        """
        meter.step(*tokens)
        self.pending.append((loss, rate))
        is_last = self.written + len(self.pending) == self.steps
        if write or self.due or meter.is_at_end or is_last:
            self.write(meter.flush())
            meter.resume()

    @property
    def due(self) -> bool:
        """Return whether it is time for `write`."""
        if self.ranks.world > 1:
            return len(self.pending) >= LOOK_EVERY
        return time.monotonic() - self.looked >= LOOK_EVERY_S

    def write(self, seconds: list[float]) -> None:
        """Write the noted steps with their durations; raise NonFiniteLoss if one cannot be excused.

        GradScaler is meant to skip steps that overflow in fp16, and halves its scale each time;
        only when it has come down to 1 and the loss still is not finite, the run is lost. In fp32
        there is nothing to skip.
        """
        lines = []
        failure = None
        excused = self.scaler.is_enabled() and self.scaler.get_scale() > 1.0
        losses = self.ranks.mean(torch.stack([loss for loss, _ in self.pending])).tolist()
        for loss, (_, rate), taken in zip(losses, self.pending, seconds, strict=True):
            self.written += 1
            is_finite = math.isfinite(loss)
            lines.append(
                {
                    "step": self.written,
                    "loss": loss if is_finite else None,
                    "lr": rate,
                    "ms": round(1e3 * taken, 4),
                }
            )
            if not is_finite and not excused and failure is None:
                failure = NonFiniteLoss(
                    self.written, f"the weights or --learning-rate give a loss of {loss}"
                )
        phi = noise_scale(self.ranks.stats.noise(self.written - self.begin))
        if phi:
            lines[-1]["phi"] = round(phi, 2)
        self._append(lines)
        self.pending.clear()
        if failure:
            raise failure
        self.looked = time.monotonic()
        self._say_progress(losses[-1])

    def _say_progress(self, loss: float) -> None:
        """Say a line of progress, with the last loss, if it is time for one."""
        if self.compiling and self.written < self.steps:
            # These steps' time is the compiler's, and foretells nothing.
            self.compiling = False
            self.reported = self.written
            self.reported_at = self.looked
        is_tenth = self.written - self.reported >= self.steps / 10
        is_last = self.written == self.steps
        is_late = self.looked - self.reported_at >= SAY_EVERY_S
        if not (is_tenth or is_last or is_late):
            return
        s_per_step = (self.looked - self.reported_at) / (self.written - self.reported)
        taken = tqdm.format_interval(self.looked - self.started)
        left = tqdm.format_interval((self.steps - self.written) * s_per_step)
        self.say(
            f"{self.label}: step {self.written}/{self.steps}, loss {loss:.3f}, "
            f"{self.samples / s_per_step:.0f} samples/s, {taken} so far, {left} left"
        )
        self.reported = self.written
        self.reported_at = self.looked

    def _append(self, lines: list[dict], mode: str = "a") -> None:
        """Write lines, if this is the first process. Raises RecordError where it cannot."""
        if not self.ranks.first:
            return
        try:
            with open_to_write(self.path, mode) as stream:
                stream.writelines(json.dumps(line) + "\n" for line in lines)
        except OSError as problem:
            raise RecordError(f"cannot write {self.path}: {problem.strerror}") from problem
