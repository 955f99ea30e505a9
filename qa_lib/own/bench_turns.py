"""Ways to train that take turns, each in a process of its own, and the file of what was measured.

A way is set up once: its process builds the model, compiles, warms up, and then waits. All ways are
set up at the same time, since a compiler takes minutes and little of the GPU; turns begin when the
last of them waits. In each round every way is told in turn to train for some steps, so that a card
that grows warm or is shared with others does not favour one of them. Where nobody's turn is,
nothing runs. A process of its own gives a way its own peak of memory, keeps the settings that
accelerate shares in a process apart, and can be ended while it compiles, as a limit of time may
want it. Where the memory is too small for all warm-ups at once, those that ran out of it are set up
again, one after the other, beside ways that wait and hold little.
"""

import contextlib
import json
import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from qa_lib.errors import UserError
from qa_lib.measure.kernel_time import KernelTime

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Steps at the beginning of a turn that are not timed: loaders have batches ready by then that were
# made while others had their turns (a tuned Trainer's, 16), and the card's clocks rise.
LEAD_IN = 20
PROFILED = 10 if DEVICE.type == "cuda" else 0  # steps after the last turn, whose kernels are timed
# Seconds until a way of which nothing is known is set up.
SETUP_GUESSES = {"trainer-tuned": 150.0}
SETUP_GUESS = 20.0
PATIENCE_S = 2.0  # for a process to end by itself
EXIT_S = 30.0  # for one that has closed its connection to have an exit code, on a busy host


class Measured:
    """The speed and the losses of a training from the step after `warm_up` on."""

    def __init__(self, warm_up: int, batch: int):
        self.warm_up = warm_up
        self.batch = batch
        self.steps = 0
        self.first_timed = warm_up
        self.losses = []
        self.begun = self.now()  # where there is no warm-up

    def step(self, loss: torch.Tensor | None = None) -> None:
        """Count a step that has been done."""
        self.steps += 1
        if loss is not None:
            self.losses.append(loss)
        if self.steps == self.warm_up:
            self.begun = self.now()

    @property
    def timed_steps(self) -> int:
        """How many steps have been timed."""
        return max(0, self.steps - self.first_timed)

    def result(self) -> dict:
        """Return samples a second, the peak of memory, and means of losses where they are known.

        These are of the first ten steps of the training, and of the last ten.
        """
        seconds = self.now() - self.begun
        on_gpu = DEVICE.type == "cuda"
        peak = torch.cuda.max_memory_reserved() / 2**30 if on_gpu else None
        result = {
            "samples_per_s": self.timed_steps * self.batch / seconds,
            "steps": self.timed_steps,
            "reserved_gib": peak,
        }
        if self.losses:
            losses = torch.stack(self.losses).float()
            result["first_loss"] = losses[:10].mean().item()
            result["last_loss"] = losses[-10:].mean().item()
        return result

    def now(self) -> float:
        """Return the time when the device has done all that it was given."""
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


# In a way's process.


class Turns(Measured):
    """A training that waits for its turns: after the warm-up, and after each turn.

    A turn has LEAD_IN steps and then `steps` that are timed. What `connection` gets: first
    `{"setup_s": …, "step_s": …}`, the seconds from here to the end of the warm-up and those of a
    step in the later half of it, and then the result of each turn. That of the last turn has the
    milliseconds for which a step's kernels run on a GPU. `connection` gives anything to go on.
    """

    def __init__(self, warm_up: int, batch: int, steps: int, turns: int, connection: Connection):
        super().__init__(warm_up, batch)
        self.turn = LEAD_IN + steps
        self.turns = turns
        self.connection = connection
        self.created = self.begun
        self.half_way = self.begun
        self.kernels = KernelTime(PROFILED, PROFILED)
        self.last_result = {}

    @property
    def further_steps(self) -> int:
        """How many steps the training has after the warm-up."""
        return self.turns * self.turn + PROFILED

    def step(self, loss: torch.Tensor | None = None) -> None:
        """Count a step that has been done, and wait where the turn is another's."""
        super().step(loss)
        if self.steps == self.warm_up // 2:
            self.half_way = self.now()
        done = self.steps - self.warm_up
        if done == 0:
            step_s = (self.begun - self.half_way) / (self.warm_up - self.warm_up // 2)
            self._wait({"setup_s": self.begun - self.created, "step_s": step_s})
        elif 0 < done <= self.turns * self.turn:
            self._count_in_turn(done)
        if done == self.further_steps:
            if PROFILED:
                self.kernels.finished(PROFILED)
            self.connection.send(self.last_result | {"kernel_ms": self.kernels.kernel_ms})

    def _wait(self, answer: dict) -> None:
        """Tell what has been done, and wait until this is to go on.

        Memory that PyTorch keeps for later steps goes back to the GPU: all ways together may keep
        more than it has.
        """
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
        self.connection.send(answer)
        self.connection.recv()

    def _count_in_turn(self, done: int) -> None:
        """Begin to time, or end a turn, where so many steps after the warm-up say so."""
        if done % self.turn == LEAD_IN:
            self.first_timed = self.steps
            self.begun = self.now()
        elif done % self.turn == 0 and done < self.turns * self.turn:
            self._wait({**self.result(), "kernel_ms": None})
        elif done % self.turn == 0:
            self.last_result = self.result()
            if PROFILED:
                self.kernels.finished(0)


def work(train: Callable, arguments: tuple, connection: Connection) -> None:
    """Train by a way in this process, whose turns are told by the connection.

    `train` takes the connection and then `arguments`. A fault is printed, and its first line sent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    try:
        train(connection, *arguments)
    except (EOFError, BrokenPipeError):
        return  # nobody wants further turns
    except Exception as problem:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            connection.send({"fault": f"{type(problem).__name__}: {problem}".splitlines()[0]})


# In the process that tells the turns.


class WayFailed(Exception):
    """A way that cannot go on; the message says why."""

    @property
    def lacks_memory(self) -> bool:
        """Whether the GPU had too little memory for it, which others may have held."""
        return any(words in str(self) for words in ("out of memory", "ALLOC_FAILED"))


class TimeIsUp(Exception):
    """The limit of time came before what was waited for."""


class Way:
    """A way to train, in a process of its own, which sets itself up at once and then waits.

    `train` and `arguments` are those of `work`. Times are seconds of `time.monotonic`.
    """

    def __init__(self, name: str, train: Callable, arguments: tuple):
        self.name = name
        self.setup: dict = {}  # what `Turns` sends at the end of the warm-up
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=work, args=(train, arguments, other))
        self.process.start()
        other.close()

    def await_setup(self, deadline: float) -> None:
        """Wait until the process has built, compiled and warmed up."""
        self.setup = self._answer(deadline)

    def take_turn(self, deadline: float) -> dict:
        """Train for a turn; return its result."""
        with contextlib.suppress(BrokenPipeError):  # the answer says that it has ended
            self.connection.send("go on")
        return self._answer(deadline)

    def _answer(self, deadline: float) -> dict:
        """Return what the process sends next.

        Raises TimeIsUp at the deadline, and WayFailed where the way has a fault or has ended.
        """
        left = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        if not self.connection.poll(left):
            raise TimeIsUp
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(EXIT_S)
            raise WayFailed(f"its process ended with {self.process.exitcode}") from None
        if "fault" in answer:
            raise WayFailed(answer["fault"])
        return answer

    def stop(self) -> None:
        """Have the process end: by itself where it waits, else by a signal."""
        self.connection.close()
        self.process.join(PATIENCE_S)
        for end in (self.process.terminate, self.process.kill):
            if self.process.is_alive():
                end()
                self.process.join(PATIENCE_S)


# The file.


def lines_of(path: Path) -> list[dict]:
    """Return the measurements in a file, none where it does not exist.

    Raises UserError for a line that is no JSON, and for a file that cannot be read.
    """
    lines = []
    try:
        texts = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except OSError as problem:
        raise UserError(f"cannot read {path}: {problem.strerror}") from problem
    for number, text in enumerate(texts, 1):
        try:
            lines.append(json.loads(text))
        except ValueError as problem:
            raise UserError(f"{path}, line {number} is no JSON: remove it") from problem
    return lines


def append_line(path: Path, line: dict) -> None:
    """Append a measurement to a file.

    Raises UserError where it cannot be written.
    """
    try:
        with path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
    except OSError as problem:
        raise UserError(f"cannot write {path}: {problem.strerror}") from problem


def matching(lines: list[dict], wanted: dict) -> list[dict]:
    """Return the measurements that have all of these values."""
    return [line for line in lines if all(line.get(key) == wanted[key] for key in wanted)]


def expected_setup_s(way: str, lines: list[dict], card: str, size: str) -> float:
    """Return for how many seconds a way will be set up: the most on this card, or a guess.

    The most, since a host that has just been started has compiled nothing before, and since other
    ways are set up beside it.
    """
    known = matching(lines, {"card": card, "size": size, "way": way})
    seconds = [line["setup_s"] for line in known]
    return max(seconds, default=SETUP_GUESSES.get(way, SETUP_GUESS))
