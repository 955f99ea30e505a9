"""Measuring tasks in turns, each in a process of its own.

A process of its own starts with an empty GPU and no compiled code, so that one measurement cannot
change the next, and can be ended with all that it has started. Building and compiling take most of
a measurement. So several processes do that at the same time, and then each is timed alone: nothing
is built, compiled or trained beside it, and the others wait. This file imports nothing of the
library.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path

LEAST_S = 20  # no measurement begins with less time than this, nor several with less for each
READY = "ready"  # what a process sends when it is set up; all else that it sends is its result
GO = "go"  # what it gets when its turn comes
LACKS_MEMORY = ("out of memory", "ALLOC_FAILED")  # in the error of one that lacked a GPU's memory


class Measurements:
    """Measures tasks by calls of `measure`, prints a line of JSON for each and appends it to `out`.

    `measure` takes a task and a function, and returns figures; it must be a function that a new
    process can import. It sets the task up, calls the function, which returns when its turn has
    come, and then does what is timed. At most `at_once` tasks are set up at the same time.

    A measurement ends when its set-up and its turn have taken `timeout_s` seconds, between which it
    may wait. All of them end after `within_s`.
    """

    def __init__(
        self,
        measure: Callable[[dict, Callable[[], None]], dict],
        out: Path,
        timeout_s: float,
        within_s: float,
        at_once: int = 1,
        start_method: str = "forkserver",
    ):
        self.measure = measure
        self.out = out
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + within_s
        self.at_once = at_once
        self.context = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            self.context.set_forkserver_preload(["torch"])  # imported once for all processes

    def __call__(self, line: dict, task: dict) -> dict:
        """Measure `task`, with nothing beside it; return its result, as `in_turns` does."""
        (result,) = self.in_turns([(line, task)])
        return result

    def in_turns(self, measurements: list[tuple[dict, dict]]) -> Iterator[dict]:
        """Measure tasks in their order, and yield the result of each as soon as it is known.

        `measurements` are pairs of a line and a task. A result is what `measure` returned, or an
        `error` of at most 400 characters. What is printed and appended is the line, which says what
        was measured, with the result and the time of day. Where too little time is left to begin,
        the line is only printed.

        A task that lacks memory beside others is set up again alone when its turn comes. Those
        behind it are ended before, and set up again after it.

        Where the iterator is closed, all that has been begun is ended.
        """
        done = 0
        while done < len(measurements):
            fitting = int(self._left_s() // LEAST_S)
            if fitting < 1:
                line, _ = measurements[done]
                result = {"error": "no time left"}
                print(json.dumps(line | result), flush=True)
                done += 1
                yield result
                continue
            wave = measurements[done : done + min(fitting, self.at_once)]
            with contextlib.closing(self._wave([task for _, task in wave])) as results:
                for (line, task), result in zip(wave, results, strict=False):
                    if len(wave) > 1 and _lacks_memory(result):
                        results.close()  # which also ends this loop
                        result = self(line, task)
                        if "error" not in result:
                            self.at_once -= 1  # the memory holds fewer
                    else:
                        self._write(line, result)
                    done += 1
                    yield result

    def _wave(self, tasks: list[dict]) -> Iterator[dict]:
        """Set tasks up at the same time, then time one after the other and yield their results."""
        limit_s = min(self._left_s(), self.timeout_s)
        begun = []
        try:
            for task in tasks:
                begun.append(_Measurement(self.context, self.measure, task))
            _await_set_ups(begun, limit_s)
            for one in begun:
                if one.result is None:
                    one.take_turn(min(self._left_s(), self.timeout_s - one.set_up_s))
                yield one.result
        finally:
            for one in begun:
                one.end()

    def _left_s(self) -> float:
        """Return the seconds that are left for all measurements."""
        return self.deadline - time.monotonic()

    def _write(self, line: dict, result: dict) -> None:
        """Print a line with its result, and append it to the file."""
        text = json.dumps(line | result | {"at": time.strftime("%H:%M:%S")})
        print(text, flush=True)
        with self.out.open("a") as file:
            file.write(f"{text}\n")


class _Measurement:
    """A measurement in a process of its own, which begins at once to set its task up.

    `result` is None until it is known, and then the process has been ended.
    """

    def __init__(self, context, measure: Callable, task: dict):
        self.result: dict | None = None
        self.set_up_s = 0.0  # seconds that it took to be ready
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_work, args=(measure, task, other))
        self.process.start()
        other.close()  # the child's is then the only one, and its end is noticed
        self.runs = True

    def receive(self) -> None:
        """Take what the process has sent: that it is ready, or its result."""
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionError):
            answer = {"error": "the process ended"}
        if answer != READY:
            self._finish(answer)

    def take_turn(self, limit_s: float) -> None:
        """Let the process go on, and wait for its result for so many seconds."""
        with contextlib.suppress(ConnectionError):  # it has ended, which `receive` finds out
            self.connection.send(GO)
        if self.connection.poll(max(0.0, limit_s)):
            self.receive()
        else:
            self.run_out_of_time()

    def run_out_of_time(self) -> None:
        """End the process, whose time is up."""
        self._finish({"error": "time is up"})

    def end(self) -> None:
        """End the process and all that it has started, where that was not done before."""
        if not self.runs:
            return
        self.runs = False
        _kill_group(self.process.pid)
        self.process.kill()  # where it had no group of its own yet
        self.process.join()
        self.connection.close()

    def _finish(self, result: dict) -> None:
        """Keep the result, and end the process before another one is timed."""
        self.result = result
        self.end()


def _await_set_ups(begun: list[_Measurement], limit_s: float) -> None:
    """Wait until each is ready, has a result, or has used up so many seconds."""
    start = time.monotonic()
    setting_up = {one.connection: one for one in begun}
    while setting_up:
        passed_s = time.monotonic() - start
        heard = wait(list(setting_up), max(0.0, limit_s - passed_s))
        for connection in heard:
            one = setting_up.pop(connection)
            one.set_up_s = time.monotonic() - start
            one.receive()
        if not heard:
            for one in setting_up.values():
                one.run_out_of_time()
            return


def _lacks_memory(result: dict) -> bool:
    """Return whether a measurement failed since the GPU had too little memory left."""
    return any(words in result.get("error", "") for words in LACKS_MEMORY)


def _work(measure: Callable, task: dict, connection: Connection) -> None:
    """Measure in this process, and send the result or what the failure was."""
    os.setsid()  # a group of its own, so that what it starts can be ended with it

    def await_turn() -> None:
        connection.send(READY)
        connection.recv()

    try:
        connection.send(measure(task, await_turn))
    except Exception as error:
        last_lines = traceback.format_exc().splitlines()[-6:]
        message = f"{type(error).__name__}: {error}"[:400]
        connection.send({"error": message, "trace": last_lines})


def exit_on_sigterm() -> None:
    """Have SIGTERM end this process as an exit does, so that those that it has begun end with it.

    They are of groups of their own, which no signal for this process's group reaches.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def _kill_group(leader: int) -> None:
    """Kill a process and all that it has started; it may have ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
