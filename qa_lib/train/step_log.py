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
LOOK_EVERY_STEPS = 50
# A look says a line of progress after the last step, and when since the last line a tenth of the
# run's steps are done or so many seconds have passed.
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

    Losses stay on the device until `write`, so that logging does not stall a step. The run has
    `steps` steps, of which an earlier process has done the first `begin`; those of its lines are
    kept that can be read. All `ranks` note their steps, and the first writes and says.
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
        self.samples_per_step = spec.micro_batches * spec.settings.micro_batch
        self.pending = []  # (loss, learning rate) of each step that is not written yet
        # Numbers of steps, those of an earlier process included.
        self.steps_written = begin
        self.steps_said = begin  # at the last line of progress
        # Moments of the monotonic clock, in seconds.
        now = time.monotonic()
        self.started_at = now
        self.looked_at = now  # at the loss, for the last time
        self.said_at = now  # the last line of progress
        self.compiling = spec.settings.compile != "none"
        if self.compiling:
            self.say(f"{self.label}: compiling, then {steps - begin} steps")
        kept = [line for line in read_steps(self.path) if line["step"] <= begin]
        self._write_lines(kept, mode="w")

    def step(
        self, meter: Meter, tokens: tuple, loss: torch.Tensor, rate: float, write: bool = False
    ) -> None:
        """Take note that an optimizer step is done.

        `tokens` go to Meter.step; `loss` is the mean loss, a scalar on the device that is not read
        yet, and `rate` the learning rate. What was noted is written if that is `due`, after the
        last step and the last that is measured, and if told to `write`; the next step's clock
        starts after that.
        """
        meter.step(*tokens)
        self.pending.append((loss, rate))
        is_last = self.steps_written + len(self.pending) == self.steps
        if write or self.due or meter.is_at_end or is_last:
            self.write(meter.flush())
            meter.resume()

    @property
    def due(self) -> bool:
        """Return whether it is time for `write`."""
        if self.ranks.world > 1:
            return len(self.pending) >= LOOK_EVERY_STEPS
        return time.monotonic() - self.looked_at >= LOOK_EVERY_S

    def write(self, seconds: list[float]) -> None:
        """Write the noted steps, which took so many `seconds` each, and say progress if it is time.

        Raises NonFiniteLoss, after writing, for a loss that cannot be excused; RecordError where
        the file cannot be written.
        """
        losses = self.ranks.mean(torch.stack([loss for loss, _ in self.pending])).tolist()
        rates = [rate for _, rate in self.pending]
        first_step = self.steps_written + 1
        steps = range(first_step, first_step + len(losses))
        lines = [_line(*values) for values in zip(steps, losses, rates, seconds, strict=True)]
        self.steps_written += len(lines)
        phi = noise_scale(self.ranks.stats.noise(self.steps_written - self.begin))
        if phi:
            lines[-1]["phi"] = round(phi, 2)
        self._write_lines(lines, mode="a")
        self.pending.clear()
        self._check_losses(first_step, losses)
        self.looked_at = time.monotonic()
        self._say_progress(losses[-1])

    def _check_losses(self, first_step: int, losses: list[float]) -> None:
        """Raise NonFiniteLoss for the first loss that is not finite, if it cannot be excused.

        GradScaler is meant to skip steps that overflow in fp16, and halves its scale each time;
        only when it has come down to 1 and the loss still is not finite, the run is lost. In fp32
        there is nothing to skip.
        """
        if self.scaler.is_enabled() and self.scaler.get_scale() > 1.0:
            return
        for step, loss in enumerate(losses, first_step):
            if not math.isfinite(loss):
                raise NonFiniteLoss(step, f"the weights or --learning-rate give a loss of {loss}")

    def _say_progress(self, loss: float) -> None:
        """Say a line of progress, with the last loss, if it is time for one."""
        is_last = self.steps_written == self.steps
        if self.compiling and not is_last:
            # The time until here is the compiler's, and foretells nothing: the rate that is said
            # counts from now.
            self.compiling = False
            self.steps_said = self.steps_written
            self.said_at = self.looked_at
            return
        steps = self.steps_written - self.steps_said
        seconds = self.looked_at - self.said_at
        if not (is_last or steps >= self.steps / 10 or seconds >= SAY_EVERY_S):
            return
        s_per_step = seconds / steps
        taken = tqdm.format_interval(self.looked_at - self.started_at)
        left = tqdm.format_interval((self.steps - self.steps_written) * s_per_step)
        self.say(
            f"{self.label}: step {self.steps_written}/{self.steps}, loss {loss:.3f}, "
            f"{self.samples_per_step / s_per_step:.0f} samples/s, {taken} so far, {left} left"
        )
        self.steps_said = self.steps_written
        self.said_at = self.looked_at

    def _write_lines(self, lines: list[dict], mode: str) -> None:
        """Write lines to the file, if this is the first process.

        `mode` is that of `open`: "w" replaces what is in the file, and "a" adds to it. Raises
        RecordError where the file cannot be written.
        """
        if not self.ranks.first:
            return
        try:
            with open_to_write(self.path, mode) as stream:
                stream.writelines(json.dumps(line) + "\n" for line in lines)
        except OSError as problem:
            raise RecordError(f"cannot write {self.path}: {problem.strerror}") from problem


def _line(step: int, loss: float, rate: float, seconds: float) -> dict:
    """Return the line of a step. A loss that is not finite, which JSON does not have, is None."""
    return {
        "step": step,
        "loss": loss if math.isfinite(loss) else None,
        "lr": rate,
        "ms": round(1e3 * seconds, 4),
    }
