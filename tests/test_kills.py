"""Runs that are killed again and again: at the end nothing tells them from one without a break.

`QA_LIB_KILLS=40 python -m pytest tests/test_kills.py` kills as often as that, where CI does it a
handful of times.
"""

import os
import random
import time
from pathlib import Path

import pytest

from qa_lib.records import record
from tests import warm
from tests.tiny import steps_of

KILLS = int(os.environ.get("QA_LIB_KILLS", 3))


def start(folder: Path):
    """`run A1` in a folder of its own, with dropout and a random order."""
    folder.mkdir(exist_ok=True)
    return warm.python(folder / "log", *f"qa_lib run A1 --preset smoke --runs {folder}".split())


def file_of(folder: Path, name: str) -> Path | None:
    return next(folder.glob(f"*/A1-*/{name}"), None)


def logged(folder: Path) -> int:
    """How many steps its log holds."""
    log = file_of(folder, "steps.jsonl")
    return log.read_bytes().count(b"\n") if log else 0


def found(folder: Path) -> tuple[dict, list[float], bytes, bytes]:
    """Of a run that has ended: the record, every step's loss, the weights, the n-best lists."""
    run_dir = file_of(folder, "record.json").parent
    steps = steps_of(run_dir)
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    files = [
        run_dir / "model" / "model.safetensors",
        run_dir / "answers" / "nbest_predictions.json",
    ]
    return (
        record.read_record(run_dir),
        [step["loss"] for step in steps],
        *(path.read_bytes() for path in files),
    )


@pytest.mark.slow
def test_random_kills_leave_no_trace(swept, tmp_path):
    chance, folder, at_steps = random.Random(7), tmp_path, []
    while len(at_steps) < KILLS:
        process, before = start(folder), logged(folder)
        while (
            logged(folder) <= before and process.is_alive()
        ):  # until it trains, or else most kills meet imports
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 3))
        if not process.is_alive():  # it came to its end: begin anew
            folder = tmp_path / str(len(at_steps))
            continue
        process.kill()
        process.join()
        at_steps.append(logged(folder))
        assert record.read_record(file_of(folder, "record.json").parent)["status"] == "running"
    begin, process = time.time(), start(folder)
    process.join(180)
    seconds = time.time() - begin
    assert process.exitcode == 0, (folder / "log").read_text()
    (entry, *rest), (whole, *others) = found(folder), found(swept.runs)
    assert entry["status"] == "ok" and rest == others, at_steps
    assert entry["quality"] == whole["quality"]
    assert 0 < entry["time"]["first_step_s"] < seconds, (
        "since this process began, which trained its first"
    )
