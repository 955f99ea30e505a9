"""What tests measure in place of a rival, in new processes, which import this file and little else.

Each function takes a task and a function that returns when its turn has come, as
peers/processes.py has it.
"""

import json
import time
from pathlib import Path

# Samples a second, by the options of a setting. Here b pays alone and not beside a, and e is the
# other way round; c and d are of one group; f does not pay; g fails.
SPEEDS = {
    "": 100.0,
    "a": 120.0,
    "b": 115.0,
    "c": 110.0,
    "d": 105.0,
    "e": 99.0,
    "f": 90.0,
    "z": 300.0,
    "ab": 119.0,
    "ac": 130.0,
    "ace": 140.0,
}


def same(task, await_turn):
    """Return the task."""
    await_turn()
    return task


def number(task, await_turn):
    """Return the number that a text has; fail where it has none."""
    return {"ms": int(task)}


def asleep(task, await_turn):
    """Sleep for so many seconds."""
    time.sleep(task)


def speed(task, await_turn):
    """Return the speed that SPEEDS has for the options of a setting, and fail where it has none."""
    await_turn()
    return {"samples_s": SPEEDS["".join(sorted(task["setting"]["model"]))]}


def noted(task, await_turn):
    """Set up and be timed for some seconds, and append what was done when to a file.

    The first attempts fail in the set-up with the messages in `faults`.
    """
    file = Path(task["file"])
    name = task["name"]
    before = file.read_text() if file.exists() else ""
    attempt = before.count(f'"{name}"')
    begin = time.monotonic()
    time.sleep(task["set_up_s"])
    _append(file, [name, "set-up", begin, time.monotonic()])
    if attempt < len(task["faults"]):
        raise RuntimeError(task["faults"][attempt])
    await_turn()
    begin = time.monotonic()
    time.sleep(task["turn_s"])
    _append(file, [name, "turn", begin, time.monotonic()])
    return {"measured": name}


def _append(file: Path, event: list) -> None:
    with file.open("a") as stream:
        stream.write(f"{json.dumps(event)}\n")
