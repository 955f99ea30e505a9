"""steps.jsonl: what a run says of itself while it runs, and what ends it early."""

import json
import math
import time
from pathlib import Path

import torch

from qa_lib.record import RecordError
from qa_lib.spec import Spec

LOOK_EVERY_S = 1.0  # seconds between two looks at the loss; each look waits for the device
SAY_EVERY_S = 60.0  # a line of progress comes at each tenth of the steps, and at the latest after so many seconds


class StepFailed(RuntimeError):
    """An optimizer step that could not be done; `step` counts from 1, and the cause says why."""

    def __init__(self, step: int, message: str = "an error in the step"):
        super().__init__(f"{message} at step {step}")
        self.step = step


class NonFiniteLoss(StepFailed):
    """The loss is NaN or infinite and no smaller GradScaler scale can help."""


class StepLog:
    """steps.jsonl of a run: a line a step with its number, loss, learning rate (lr) and milliseconds (ms).

    Losses stay on the device until `write`, so that logging does not stall a step. `begin` is the number of steps that
    an earlier process has done; its lines are kept.
    """

    def __init__(self, run_dir: Path, spec: Spec, steps: int, begin: int, scaler: torch.amp.GradScaler, say):
        self.path, self.steps, self.written, self.scaler, self.say = run_dir / "steps.jsonl", steps, begin, scaler, say
        self.pending, self.said = [], begin
        self.started = self.looked = self.said_at = time.monotonic()
        self.label, self.features = f"{spec.variant} seed {spec.seed}", spec.accumulation * spec.settings.micro_batch
        if spec.settings.compile != "none":
            self.say(f"{self.label}: compiling, then {steps - begin} steps")
        # A log that was cut short or spoilt is no reason not to go on.
        earlier = (
            self.path.read_text(errors="replace").splitlines(keepends=True) if begin and self.path.exists() else []
        )
        earlier = [line for line in earlier if _is_step(line)][:begin]
        self._append("".join(earlier), mode="w")

    def add(self, loss: torch.Tensor, rate: float) -> None:
        """Note a step's mean loss (a scalar on the device, not read yet) and its learning rate."""
        self.pending.append((loss, rate))

    @property
    def due(self) -> bool:
        """Whether it is time for `write`; the last step is for the caller to know."""
        return time.monotonic() - self.looked >= LOOK_EVERY_S

    def write(self, seconds: list[float]) -> None:
        """Write the noted steps with their durations; raise NonFiniteLoss if one cannot be excused.

        GradScaler is meant to skip steps that overflow in fp16, and halves its scale each time; only when it has
        come down to 1 and the loss still is not finite, the run is lost. In fp32 there is nothing to skip.
        """
        lines, broken = [], None
        excused = self.scaler.is_enabled() and self.scaler.get_scale() > 1.0
        for (loss, rate), duration in zip(self.pending, seconds, strict=True):
            self.written += 1
            value = float(loss)
            finite = math.isfinite(value)
            lines.append(
                {"step": self.written, "loss": value if finite else None, "lr": rate, "ms": round(1e3 * duration, 4)}
            )
            if not finite and not excused and broken is None:
                broken = NonFiniteLoss(self.written, f"loss is {value}")
        self._append("".join(json.dumps(line) + "\n" for line in lines))
        self.pending.clear()
        if broken:
            raise broken
        self.looked = time.monotonic()
        tenth = self.written - self.said >= self.steps / 10
        if tenth or self.written == self.steps or self.looked - self.said_at >= SAY_EVERY_S:
            self.say(f"{self.label}: {self._progress(value)}")
            self.said, self.said_at = self.written, self.looked

    def _progress(self, loss: float) -> str:
        """Where the run is: step, loss, speed since the last line, time since the first step, time that is left."""
        per_step = (self.looked - self.said_at) / (self.written - self.said)
        left, taken = (self.steps - self.written) * per_step, self.looked - self.started
        return (
            f"step {self.written}/{self.steps}, loss {loss:.3f}, {self.features / per_step:.0f} features/s, "
            f"{_duration(taken)} so far, {_duration(left)} left"
        )

    def _append(self, text: str, mode: str = "a") -> None:
        try:
            with self.path.open(mode) as stream:
                stream.write(text)
        except OSError as problem:
            raise RecordError(f"cannot write {self.path}: {problem.strerror}") from problem


def _is_step(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _duration(seconds: float) -> str:
    """'42 s', '12 min', '3 h 05 min'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
