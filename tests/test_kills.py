"""A run that is killed again and again ends as one that was left alone.

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
    """Start `run A1` in a folder of its own; it has dropout and a random order of samples."""
    folder.mkdir(exist_ok=True)
    return warm.python(folder / "log", *f"qa_lib run A1 --preset smoke --runs {folder}".split())


def file_of(folder: Path, name: str) -> Path | None:
    """Return the path of a file of the run below a folder, or None."""
    return next(folder.glob(f"*/A1-*/{name}"), None)


def logged(folder: Path) -> int:
    """Return how many steps the log of the run holds."""
    log = file_of(folder, "steps.jsonl")
    return log.read_bytes().count(b"\n") if log else 0


def results_of(run_dir: Path) -> tuple[list[float], bytes, bytes]:
    """Return the losses of all steps, the weights and the n-best lists of a run that has ended."""
    steps = steps_of(run_dir)
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    losses = [step["loss"] for step in steps]
    weights = (run_dir / "model" / "model.safetensors").read_bytes()
    answers = (run_dir / "answers" / "nbest_predictions.json").read_bytes()
    return losses, weights, answers


def run_dir_of(folder: Path) -> Path:
    """Return the folder of the run below a folder."""
    return file_of(folder, "record.json").parent


@pytest.mark.slow
def test_random_kills_leave_no_trace(swept, tmp_path):
    chance = random.Random(7)
    folder = tmp_path
    killed_at = []  # steps logged at each kill
    while len(killed_at) < KILLS:
        before = logged(folder)
        process = start(folder)
        # Until it trains, or else most kills meet imports.
        while logged(folder) <= before and process.is_alive():
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 3))
        if not process.is_alive():  # it came to its end: begin anew
            folder = tmp_path / str(len(killed_at))
            continue
        process.kill()
        process.join()
        killed_at.append(logged(folder))
        assert record.read_record(run_dir_of(folder))["status"] == "running"
    begin = time.time()
    process = start(folder)
    process.join(180)
    seconds = time.time() - begin
    assert process.exitcode == 0, (folder / "log").read_text()
    assert results_of(run_dir_of(folder)) == results_of(run_dir_of(swept.runs)), killed_at
    entry = record.read_record(run_dir_of(folder))
    assert entry["status"] == "ok"
    assert entry["quality"] == record.read_record(run_dir_of(swept.runs))["quality"]
    # The time to the first step counts from the begin of the last process alone.
    assert 0 < entry["time"]["first_step_s"] < seconds
