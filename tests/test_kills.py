"""Runs that are killed again and again and go on from their checkpoint: at the end nothing tells them from one run
without a break.

QA_LIB_KILLS=40 python -m pytest tests/test_kills.py  kills as often as that, where CI does it a handful of times.
"""

import os
import random
import time
from pathlib import Path

import pytest

from qa_lib import record
from tests import warm
from tests.conftest import slow
from tests.tiny import steps_of

KILLS = int(os.environ.get("QA_LIB_KILLS", 3))
SEED = 7  # of the moments


class Run:
    """`run A1` in a folder of its own, with dropout and a random order."""

    def __init__(self, folder: Path):
        self.folder = folder

    def start(self):
        self.folder.mkdir(exist_ok=True)
        return warm.python(self.folder / "log", *f"qa_lib run A1 --preset smoke --runs {self.folder}".split())

    def path(self, name: str) -> Path | None:
        return next(self.folder.glob(f"*/A1-*/{name}"), None)

    def steps(self) -> int:
        """How many steps its log holds."""
        log = self.path("steps.jsonl")
        return log.read_bytes().count(b"\n") if log else 0

    def finish(self) -> None:
        process = self.start()
        process.join(180)
        assert process.exitcode == 0, (self.folder / "log").read_text()

    def found(self) -> tuple[dict, list[float], bytes, bytes]:
        """Of a run that has ended: the record, every step's loss, the weights, the n-best lists."""
        folder = self.path("record.json").parent
        steps = steps_of(folder)
        assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
        files = [self.path(name).read_bytes() for name in ("model/model.safetensors", "answers/nbest_predictions.json")]
        return record.read_record(folder), [step["loss"] for step in steps], *files


@pytest.mark.parametrize("kills", [1, slow(KILLS)])
def test_random_kills_leave_no_trace(kills, swept, tmp_path):
    chance, run, at_steps = random.Random(SEED), Run(tmp_path), []
    while len(at_steps) < kills:
        process, before = run.start(), run.steps()
        while run.steps() <= before and process.is_alive():  # until it trains, or else most kills meet imports
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 3))
        if not process.is_alive():  # it came to its end: begin anew
            run = Run(tmp_path / str(len(at_steps)))
            continue
        process.kill()
        process.join()
        at_steps.append(run.steps())
        assert record.read_record(run.path("record.json").parent)["status"] == "running"
    begin = time.time()
    run.finish()
    seconds = time.time() - begin
    (entry, *rest), (whole, *others) = run.found(), Run(swept.runs).found()
    assert entry["status"] == "ok" and rest == others, at_steps
    assert entry["quality"] == whole["quality"]
    assert 0 < entry["time"]["first_step_s"] < seconds, "since this process began, which trained its first"
