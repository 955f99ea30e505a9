"""Runs in processes of their own: started on their cards, ended with their children, and judged.

`sweep`, `tune` and `max-batch` have this one scheduler, on this machine and on Slurm (slurm.py).
Each run that is at work has a thread here, which starts the run's process on its cards, waits for
its end and judges it by its record (judge.py).

This module never imports torch: a driver must hold no GPU.
"""

import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TextIO

from qa_lib.errors import UserError
from qa_lib.lab.launch.driver import DRIVER
from qa_lib.lab.launch.judge import NEVER_BEGAN, FirstSteps, is_finished, judge
from qa_lib.lab.launch.process import child_env, kill, train_command
from qa_lib.lab.launch.warm import Forked, fork
from qa_lib.records import record
from qa_lib.records.files import RecordError, check_folder, empty_folder, open_to_write
from qa_lib.signals import stopped_by
from qa_lib.spec.machine import Machine
from qa_lib.spec.spec import Spec

POLL_S = 0.2
# Seconds that each of the first steps of a recommended run may take, compiling included.
FIRST_STEP_S = 1800
# A file in a run's folder that the run's driver holds from before its process starts to the end.
DRIVER_LOCK = ".driver.lock"
MOST_ON_CPU = 8  # runs at a time on a CPU

Ended = Callable[[Spec, dict], None]  # is called when a run has ended, with its spec and record
Look = Callable[[], None]  # is called every POLL_S seconds, such as to show how far runs are


def ignore_end(spec: Spec, entry: dict) -> None:
    """Do nothing when a run ends."""


def ignore_look() -> None:
    """Do nothing while runs are at work."""


def say_idle(machine: Machine, gpus: list[int] | None) -> None:
    """Print how to use all GPUs, where there are several and `gpus` (--gpus) names none."""
    if machine.gpus > 1 and not gpus:
        cards = " ".join(map(str, range(machine.gpus)))
        print(
            f"one of {machine.gpus} GPUs has work at a time (family P takes more); "
            f"--gpus {cards} uses all"
        )


@dataclass
class Launcher:
    """Runs specs in processes of their own, as many at a time as cards are named.

    Runs on one card take turns in training, so that one prepares while another is timed; with
    `share` they train at once, and record no times. Raises UserError for a card that the machine
    does not have.
    """

    # The runs folder.
    runs: Path
    # The machine that runs are on.
    machine: Machine
    # That machine's environment, for records of runs that never began; the others note their own.
    env: dict
    # The numbers of the cards that may be used. A card that is named twice has two runs at a time.
    gpus: list[int] | None = None
    share: bool = False
    # Whether runs that are finished run again, in emptied folders.
    force: bool = False
    # (spec, runs) -> the command of a run.
    command: Callable[[Spec, Path], list[str]] = train_command
    # Seconds that replace the limit of a run's preset.
    time_limit_s: float | None = None
    # Whether processes begin with PyTorch imported (warm.py).
    warm: bool = False
    # Whether runs print to this process's output; log.txt then has what they write to stderr alone.
    aloud: bool = False

    # The runs whose processes are at work.
    active: list[Spec] = field(default_factory=list)
    # Set once the driver is stopped, and why it was.
    stopped: threading.Event = field(default_factory=threading.Event)
    why: str = ""
    # By run_path: records of runs that could not begin, which are in no file.
    refused: dict[Path, dict] = field(default_factory=dict)

    # Statuses in which a run's time limit does not count.
    idle: ClassVar[tuple[str, ...]] = ("waiting",)

    def __post_init__(self):
        for gpu in self.gpus or []:
            if not 0 <= gpu < self.machine.gpus:
                raise UserError(f"--gpus {gpu}: this machine has {self.machine.gpus} GPUs")

    def is_finished(self, spec: Spec) -> bool:
        """Return whether this run may be passed over.

        One whose record cannot be read may not: `run_all` says why.
        """
        try:
            return self._has_result(spec)
        except RecordError:
            return False

    def _has_result(self, spec: Spec) -> bool:
        """Return whether this run has a result that stands. Raises RecordError."""
        return not self.force and is_finished(self.runs, spec)

    def entry_of(self, spec: Spec) -> dict:
        """Return the record of a run that is done with. Raises RecordError."""
        if spec.run_path in self.refused:
            return self.refused[spec.run_path]
        return record.read_record(self.runs / spec.run_path)

    def limit_of(self, spec: Spec) -> float:
        """Return how many seconds a run may take."""
        return self.time_limit_s or spec.preset.time_limit_s

    # All runs.

    def run_all(
        self, specs: list[Spec], ended: Ended = ignore_end, look: Look = ignore_look
    ) -> list[dict]:
        """Run what is not finished and return every spec's record, in order.

        Runs begin in order. One that takes more cards than are free waits for them, and so do those
        after it. A signal, and any other error here, ends the runs at work, keeps the finished
        ones, and is raised again.
        """
        free = self._cards(specs)
        waiting = deque(specs)
        at_work: dict[Future, tuple[Spec, list[int | None]]] = {}
        entries = {}
        pool = ThreadPoolExecutor(len(free))
        try:
            while waiting or at_work:
                while waiting:
                    cards = take_cards(free, waiting[0].world)
                    if not cards:
                        break
                    spec = waiting.popleft()
                    visible = tuple(card for card in cards if card is not None)
                    at_work[pool.submit(self._run, spec, visible)] = spec, cards
                for future in wait(at_work, POLL_S, FIRST_COMPLETED).done:
                    spec, cards = at_work.pop(future)
                    free += cards
                    entry = future.result()
                    if entry is None:
                        waiting.append(spec)  # another driver works on it: try again later
                    else:
                        entries[spec.run_path] = entry
                        ended(spec, entry)
                look()
        except BaseException as problem:
            self.why = f"the driver was {stopped_by(problem)}"
            self.stopped.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        return [entries[spec.run_path] for spec in specs]

    def _cards(self, specs: list[Spec]) -> list[int | None]:
        """Return the places in which runs may be at work.

        Each is a card that was named. Where none was, each is None, and its run sees all cards.
        Raises UserError where a run takes more cards than are named.
        """
        if not self.gpus:
            return [None] * side_by_side(specs)
        world = max((spec.world for spec in specs), default=1)
        if len(set(self.gpus)) < world:
            named = " ".join(map(str, self.gpus))
            raise UserError(f"--gpus {named}: a run takes {world} different cards")
        return list(self.gpus)

    # One run, in a thread of its own.

    def _run(self, spec: Spec, cards: tuple[int, ...]) -> dict | None:
        """Do all there is to do for a run, and return its record.

        Returns None while another process works on it.
        """
        run_dir = self.runs / spec.run_path
        is_prepared = False
        try:
            with record.lock(run_dir, DRIVER_LOCK):
                entry = self._prepare(spec, run_dir)
                is_prepared = True
                entry = entry or self._work(spec, run_dir, cards)
                # Jupyter kernels that start together can race for a port: try once more.
                if entry["error"]["kind"] == NEVER_BEGAN:
                    entry = self._prepare(spec, run_dir) or self._work(spec, run_dir, cards)
                return entry
        except record.RunTaken:
            self.stopped.wait(POLL_S)
            return None
        except RecordError as problem:
            if not is_prepared:
                return self._refuse(spec, problem)
            return self._lose(spec, run_dir, problem)
        except (OSError, EOFError) as problem:
            return self._lose(spec, run_dir, problem)

    def _prepare(self, spec: Spec, run_dir: Path) -> dict | None:
        """Make a run's folder ready for its process, and return None.

        Returns the record where the run needs no process.
        """
        with record.lock(run_dir):
            if self._has_result(spec):  # another driver may have just done it
                return record.read_record(run_dir)
            if self.force:
                empty_folder(run_dir)
            check_folder(run_dir)
            entry = record.new_record(spec, self.env)
            if spec.skip:
                error = {"kind": "skipped", "message": spec.skip}
                return record.finish(run_dir, entry, "skipped", error)
            # So that a process that dies before its first line leaves no older result standing.
            record.write_record(run_dir, entry | {"status": record.STARTING})
            return None

    def _work(self, spec: Spec, run_dir: Path, cards: tuple[int, ...]) -> dict:
        """Have a process do a run, and return the run's record.

        Raises RunTaken if another process works on it.
        """
        since = time.time() - 1  # the clock of a file system is coarse
        begin = time.monotonic()
        env = child_env(cards, shared=self._shares(cards), threads=spec.preset.threads)
        with open_to_write(run_dir / "log.txt", "w") as log:
            process = self._start(spec, run_dir, env, log)
        self.active.append(spec)
        try:
            reason = self._watch(process, spec, since)
        finally:
            self.active.remove(spec)
            self._end(process, run_dir)
        seconds = time.monotonic() - begin
        # A driver that was not stopped ends a process only for the time that it takes.
        over_limit = reason is not None and not self.stopped.is_set()
        with record.lock(run_dir):
            return judge(spec, run_dir, reason, process.returncode, seconds, over_limit)

    def _shares(self, cards: tuple[int, ...]) -> bool:
        """Return whether other runs of this launcher train on one of these cards at once."""
        return self.share and any(self.gpus.count(card) > 1 for card in cards)

    def _start(
        self, spec: Spec, run_dir: Path, env: dict[str, str], log: TextIO
    ) -> subprocess.Popen | Forked:
        """Start a run's process, which ends with this driver (driver.py)."""
        env = env | {DRIVER: str((run_dir / DRIVER_LOCK).absolute())}
        command = self.command(spec, self.runs)
        if self.warm:
            return fork(command, env, log.name)
        stdout = None if self.aloud else log
        return subprocess.Popen(command, env=env, stdout=stdout, stderr=log)

    def _watch(
        self, process: subprocess.Popen | Forked, spec: Spec, since: float = 0.0
    ) -> str | None:
        """Wait for the end of a process, and return None.

        Returns the reason as soon as there is one to end it. The process began at the time `since`
        (s since 1970). The time in which a run waits for the GPU, while others train on it, does
        not count. Each of the first steps of a recommended run has a limit of its own, since a
        compiler can hang there.
        """
        first_steps = FirstSteps(self.runs / spec.run_path, since) if spec.recommended else None
        limit_s = self.limit_of(spec)
        used_s = 0.0
        last_look = time.monotonic()
        while process.poll() is None:
            if self.stopped.wait(POLL_S):
                return self.why
            now = time.monotonic()
            if record.read_record(self.runs / spec.run_path)["status"] not in self.idle:
                used_s += now - last_look
            last_look = now
            if used_s > limit_s:
                return f"over its time limit of {limit_s} s"
            if first_steps and first_steps.seconds() > FIRST_STEP_S:
                return f"step {first_steps.done + 1} was not done after {FIRST_STEP_S} s"
        return None

    def _end(self, process: subprocess.Popen | Forked, run_dir: Path) -> None:
        """End what is still at work of a run."""
        kill(process)

    # Runs whose own record cannot be had.

    def _refuse(self, spec: Spec, problem: RecordError) -> dict:
        """Return a record that says why a run cannot begin.

        It is not written: what is in the folder may be a newer version's, or a link to somebody
        else's.
        """
        entry = record.new_record(spec, self.env) | {"status": "error"}
        entry["error"] |= {"kind": type(problem).__name__, "message": str(problem)}
        self.refused[spec.run_path] = entry
        return entry

    def _lose(self, spec: Spec, run_dir: Path, problem: Exception) -> dict:
        """Finish and return the record of a run that lost its record or its process.

        Its record was removed or spoilt while it ran; or it had no process, since the server of
        warm ones was gone. Raises any other `problem` again, so that no whole record is written
        over.
        """
        try:
            entry = record.read_record(run_dir)
        except RecordError:
            if self.stopped.is_set():
                raise problem from None
            entry = record.new_record(spec, self.env)
            message = f"its record was removed or spoilt while it ran ({problem})"
            error = {"kind": "RecordLost", "message": message}
            return record.finish(run_dir, entry, "killed", error)
        had_no_process = isinstance(problem, EOFError | ConnectionError)
        if entry["status"] == record.STARTING and had_no_process:
            error = {"kind": "killed", "message": self.why or "it had no process"}
            return record.finish(run_dir, entry, "killed", error)
        raise problem


def take_cards(free: list[int | None], world: int) -> list[int | None]:
    """Take from the `free` places those that a run of `world` processes needs, and return them.

    They are as many different cards, or one None (see Launcher._cards). Where there are too few,
    none are taken, and the result is empty.
    """
    if None in free:
        cards = [None]
    else:
        different = list(dict.fromkeys(free))
        cards = different[:world]
        if len(cards) < world:
            return []
    for card in cards:
        free.remove(card)
    return cards


def side_by_side(specs: list[Spec]) -> int:
    """Return how many runs are at work at a time where no cards are named.

    On a GPU it is one. On a CPU it is as many as its cores allow, where every preset limits the
    threads of its runs, and else one.
    """
    on_cpu = [spec for spec in specs if spec.hardware == "cpu"]
    if not on_cpu or not all(spec.preset.threads for spec in on_cpu):
        return 1
    most_threads = max(spec.preset.threads * spec.world for spec in on_cpu)
    return max(1, min(MOST_ON_CPU, (os.cpu_count() or 1) // most_threads))
