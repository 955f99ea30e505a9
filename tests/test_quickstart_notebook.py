"""notebooks/quickstart.ipynb: the same minutes for two variants, and their answers side by side."""

import dataclasses

import pytest

from qa_lib.records.record import read_record, run_files
from qa_lib.spec.presets import PRESETS
from tests.material import ROOT, squad_folder
from tests.test_notebooks import names, run_here
from tests.tiny import checkpoint

NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"


@pytest.fixture
def quickstart(tmp_path, monkeypatch):
    """Runs the notebook with parameters, without the compiler; what it shows as text, and how many pictures."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")

    def run(**parameters) -> tuple[str, int]:
        shown = run_here(NOTEBOOK, runs=str(tmp_path / "runs"), **parameters)
        texts = [data.get("text/markdown") or data.get("text/html") or "" for data in shown]
        return "\n".join(texts), sum("image/png" in data for data in shown)

    return run


def records_of(runs):
    return [read_record(path.parent) for path in run_files(runs, "record.json")]


@pytest.mark.slow
def test_without_a_gpu_it_trains_both_at_smoke_size_and_ranks_no_speed(
    tmp_path, quickstart, monkeypatch
):
    """Here for fewer steps."""
    monkeypatch.setitem(PRESETS, "smoke", dataclasses.replace(PRESETS["smoke"], steps=60))
    shown, pictures = quickstart()
    ends = {
        run["spec"]["variant"]: (run["status"], run["time"]["steps"])
        for run in records_of(tmp_path / "runs")
    }
    assert ends == dict.fromkeys(("A0-longest", "A4"), ("ok", 60))
    words = ("recommended: A4 at micro-batch 16 on cpu", "| A0-longest | 60 |", "| A4 | 60 |")
    words += ("| question | A0-longest | A4 | gold |", "# tiny for question answering")
    assert [each for each in words if each not in shown] == [] and pictures == 1
    assert "samples/s" not in shown and names()["progress"]  # which has speeds, and is not printed
    assert (names()["folder"] / "model" / "model.safetensors").exists() and names()["best"]["text"]


def test_both_get_the_steps_that_fit_into_the_minutes(tmp_path, quickstart, monkeypatch):
    """As on a GPU, by the speed of a short run each; here of fewer steps and tokens."""
    for name, sizes in {
        "sizing": {"steps": 12, "measure_from": 4},
        "quality": {"measure_from": 4},
    }.items():
        monkeypatch.setitem(
            PRESETS, name, dataclasses.replace(PRESETS[name], max_length=64, stride=16, **sizes)
        )
    squad = squad_folder(tmp_path / "squad", "alice came to the harbour at nine", "alice")
    sources = {"data": str(squad), "model": checkpoint("bert", tmp_path / "my-bert")}
    quickstart(preset="quality", variant="A2", minutes=0.05, **sources)
    of = {"sizing": {}, "quality": {}}
    for entry in records_of(tmp_path / "runs"):
        of[entry["spec"]["preset"]["name"]][entry["spec"]["variant"]] = entry
    assert of["sizing"].keys() == of["quality"].keys() == {"A0-longest", "A2"}
    for name, entry in of["quality"].items():
        steps = 3 * of["sizing"][name]["speed"]["samples_per_s"] / 32
        assert entry["time"]["steps"] == entry["spec"]["preset"]["steps"] == int(steps)
    assert names()["best"]["text"] == "alice"
