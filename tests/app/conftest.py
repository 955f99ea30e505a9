"""Runs with checkpoints, and one server that shows them, for all tests of the app."""

import shutil
from pathlib import Path

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from qa_lib.data.squad import open_source
from qa_lib.lab.search.plan import plan
from qa_lib.model.hf_checkpoint import write_digests
from qa_lib.records.record import new_record
from tests.app.server import EVIL, Server
from tests.material import change_record, leave, write


@pytest.fixture(scope="session")
def runs(tmp_path_factory, swept) -> Path:
    """Two smoke runs with their checkpoints, a broken one, and one that is running; a figure, too.

    A2 is A1 once more, with other weights and a better F1. The record of A3 is cut short. A4 runs,
    and its record holds a script.
    """
    runs = tmp_path_factory.mktemp("app") / "runs"
    first, second, running = plan(["A1", "A2", "A4"], "smoke")
    shutil.copytree(swept.folder_of("A1"), runs / first.run_path)
    shutil.copytree(runs / first.run_path, runs / second.run_path)
    record = _make_a_better_one(runs / second.run_path, second)

    broken = runs / "cpu-smoke" / "A3-s0-abcdef"
    broken.mkdir()
    (broken / "record.json").write_text('{"schema": "qa_lib/1", "status":')

    running_folder = leave(
        runs,
        running,
        status="running",
        error={"message": EVIL},
        env=record["env"],
        spec={"planned_steps": 400},
    )
    write(running_folder / "steps.jsonl", {"step": 7, "loss": 1.0, "lr": 0.1, "ms": 1.0})

    figure = runs.parent / "figures" / "cpu-smoke" / "ladder.png"
    figure.parent.mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(figure)
    return runs


def _make_a_better_one(folder: Path, spec) -> dict:
    """Make a copy of a run's folder that of another spec, with other weights; its record."""
    head = "qa_outputs.weight"
    weights_file = folder / "model" / "model.safetensors"
    weights = load_file(weights_file)
    weights[head] = 1.1 * weights[head]
    save_file(weights, weights_file, {"format": "pt"})
    write_digests(folder / "model")
    quality = {"best_f1": 99.94, "best_f1_threshold": 3.25}
    record = change_record(folder, spec=new_record(spec, {})["spec"], quality=quality)
    record["run_id"] = folder.name
    write(folder / "record.json", record)
    return record


@pytest.fixture(scope="session")
def server(runs) -> Server:
    """The app that shows `runs`, for all tests of a process.

    At the end it stops at a signal, and has had no fault.
    """
    server = Server(runs)
    yield server
    server.stop(within_s=5)
    printed = server.log.read_text()
    assert server.process.exitcode == 130
    assert printed.endswith("\nstopped by SIGTERM; finished runs are kept\n")
    assert "Exception in ASGI" not in printed


@pytest.fixture(scope="session")
def questions() -> list:
    """Short generated questions, answerable and not, that the model has not been trained on."""
    examples = open_source("synthetic:400", "validation").examples
    return [example for example in examples if len(example.context) < 300]


@pytest.fixture
def in_a_notebook(monkeypatch) -> None:
    """Python is interactive, as in a notebook, where launching does not wait."""
    monkeypatch.setattr("sys.ps1", ">>> ", raising=False)
