"""Runs that are killed again and again and go on from their checkpoint: at the end nothing tells them from one run
without a break.

QA_LIB_KILLS=40 python -m pytest tests/test_kills.py  kills as often as that, where CI does it a handful of times.
"""

import json
import os
import random
import time
from pathlib import Path

import pytest
import torch

from qa_lib import record
from qa_lib.run.plan import plan
from qa_lib.spec import Machine
from qa_lib.train.process_group import Ranks
from qa_lib.train.step_log import StepLog
from tests import warm
from tests.conftest import slow

KILLS = int(os.environ.get("QA_LIB_KILLS", 3))
SEED = 7  # of the moments

ALONE = Ranks(torch.device("cpu"))


class Run:
    """`run A1` in a folder of its own, with dropout and a random order."""

    def __init__(self, folder: Path):
        self.folder = folder

    def start(self):
        self.folder.mkdir(exist_ok=True)
        return warm.python(self.folder / "log", *f"qa_lib run A1 --preset smoke --runs {self.folder}".split())

    def path(self, name: str) -> Path | None:
        return next(self.folder.glob(f"*/*/{name}"), None)

    def steps(self) -> int:
        """How many steps its log holds."""
        log = self.path("steps.jsonl")
        return log.read_bytes().count(b"\n") if log else 0

    def finish(self) -> tuple[dict, list[float], bytes, bytes]:
        """Run to the end: the record, every step's loss, the weights, the n-best lists."""
        process = self.start()
        process.join(180)
        assert process.exitcode == 0, (self.folder / "log").read_text()
        lines = [json.loads(line) for line in self.path("steps.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        files = [self.path(name).read_bytes() for name in ("model/model.safetensors", "answers/nbest_predictions.json")]
        return record.read_record(self.path("record.json").parent), [line["loss"] for line in lines], *files


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return Run(tmp_path_factory.mktemp("whole")).finish()


@pytest.mark.parametrize("kills", [1, slow(KILLS)])
def test_random_kills_leave_no_trace(kills, whole, tmp_path):
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
    entry, *rest = run.finish()
    assert entry["status"] == "ok" and rest == list(whole[1:]), at_steps
    assert entry["quality"] == whole[0]["quality"]


@pytest.mark.parametrize("tail", [b'{"step": 51, "lo', b"\xff\xfe", b"[" * 100_000], ids=["cut", "spoilt", "nested"])
def test_a_log_that_was_cut_short_resumes_into_whole_lines(tmp_path, tail):
    """The checkpoint knows 100 steps, and of the log 50 lines reached the disk."""
    (spec,) = plan(["A1"], "smoke", machine=Machine())
    log = tmp_path / "steps.jsonl"
    log.write_bytes(b"".join(b'{"step": %d, "loss": 0.1}\n' % step for step in range(1, 51)) + tail)
    resumed = StepLog(tmp_path, spec, 400, 100, torch.amp.GradScaler(enabled=False), ALONE, lambda _: None)
    resumed.add(torch.tensor(0.5), 1e-3)
    resumed.write([0.1])
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()] == [*range(1, 51), 101]
