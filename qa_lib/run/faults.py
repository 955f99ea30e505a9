"""What the processes of a run leave in its folder where one fails: files that say which was the first, and why."""

import contextlib
import json
from operator import itemgetter
from pathlib import Path


def fault_path(run_dir: Path, rank: int | str) -> Path:
    """Where a process leaves what ended it."""
    return run_dir / f"fault-{rank}.json"


def faults(run_dir: Path) -> list[Path]:
    """What the processes of a run have left of faults."""
    return [*run_dir.glob(fault_path(run_dir, "*").name)]


def first_fault(run_dir: Path, since: float = 0.0) -> dict | None:
    """The status and error of the process that failed first, of those that have left a fault since that time: that one
    lets all the others fail. None where none has."""
    found = []
    for path in faults(run_dir):
        with contextlib.suppress(OSError):
            found.append(json.loads(path.read_text()))
    found = [fault for fault in found if fault["at"] >= since]
    own = [fault for fault in found if fault["status"] == "oom"]  # what no other process's end leads to
    return min(own or found, key=itemgetter("at"), default=None)
