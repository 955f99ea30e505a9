"""Measuring tasks one after the other, each in a process of its own.

A process of its own starts with an empty GPU and no compiled code, so that one measurement cannot
change the next, and can be ended with all that it has started. This file imports nothing of the
library.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

LEAST_S = 20  # no measurement begins with less time than this


class Measurements:
    """Measures tasks by calls of `measure`, prints a line of JSON for each and appends it to `out`.

    `measure` takes a task and returns figures; it must be a function that a new process can import.
    A measurement ends after `timeout_s` seconds, and all of them after `within_s`.
    """

    def __init__(
        self,
        measure: Callable[[dict], dict],
        out: Path,
        timeout_s: float,
        within_s: float,
        start_method: str = "forkserver",
    ):
        self.measure = measure
        self.out = out
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + within_s
        self.context = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            self.context.set_forkserver_preload(["torch"])  # imported once for all processes

    def __call__(self, line: dict, task: dict) -> dict:
        """Measure `task`; return what `measure` returned, or an error of at most 400 characters.

        What is printed and appended is `line`, which says what was measured, with that result and
        the time of day. Without LEAST_S seconds left, the line is only printed.
        """
        left_s = self.deadline - time.monotonic()
        if left_s < LEAST_S:
            result = {"error": "no time left"}
            print(json.dumps(line | result), flush=True)
            return result
        result = self._in_a_process(task, min(left_s, self.timeout_s))
        text = json.dumps(line | result | {"at": time.strftime("%H:%M:%S")})
        print(text, flush=True)
        with self.out.open("a") as file:
            file.write(f"{text}\n")
        return result

    def _in_a_process(self, task: dict, limit_s: float) -> dict:
        receiver, sender = self.context.Pipe(duplex=False)
        process = self.context.Process(target=_send_result, args=(self.measure, task, sender))
        process.start()
        sender.close()  # the child's is then the only one, and its end is noticed
        try:
            result = receiver.recv() if receiver.poll(limit_s) else {"error": "time is up"}
        except EOFError:
            result = {"error": "the process ended"}
        _kill_group(process.pid)
        process.kill()  # where it had no group of its own yet
        process.join()
        return result


def _send_result(measure: Callable[[dict], dict], task: dict, sender) -> None:
    """Measure in this process, and send the result or what the failure was."""
    os.setsid()  # a group of its own, so that what it starts can be ended with it
    try:
        sender.send(measure(task))
    except Exception as error:
        last_lines = traceback.format_exc().splitlines()[-6:]
        message = f"{type(error).__name__}: {error}"[:400]
        sender.send({"error": message, "trace": last_lines})


def _kill_group(leader: int) -> None:
    """Kill a process and all that it has started; it may have ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
