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
    """Runs the notebook with parameters, without the compiler.

    It returns what the notebook shows as text, and how many pictures.
    """
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
    assert "recommended: A4 at micro-batch 16 on cpu" in shown
    assert "| A0-longest | 60 |" in shown
    assert "| A4 | 60 |" in shown
    assert "| question | A0-longest | A4 | gold |" in shown
    assert "# tiny for question answering" in shown
    assert pictures == 1
    assert names()["progress"], "which has speeds"
    assert "samples/s" not in shown
    assert (names()["folder"] / "model" / "model.safetensors").exists()
    assert names()["best"]["text"]


def test_both_get_the_steps_that_fit_into_the_minutes(tmp_path, quickstart, monkeypatch):
    """By the speed of a short run each, as on a GPU; here of fewer steps and tokens."""
    short = {"max_length": 64, "stride": 16, "measure_from": 4}
    sizing = dataclasses.replace(PRESETS["sizing"], steps=12, **short)
    quality = dataclasses.replace(PRESETS["quality"], **short)
    monkeypatch.setitem(PRESETS, "sizing", sizing)
    monkeypatch.setitem(PRESETS, "quality", quality)
    squad = squad_folder(tmp_path / "squad", "alice came to the harbour at nine", "alice")
    sources = {"data": str(squad), "model": checkpoint("bert", tmp_path / "my-bert")}
    quickstart(preset="quality", variant="A2", minutes=0.02, **sources)
    records = {"sizing": {}, "quality": {}}  # preset -> variant -> record
    for entry in records_of(tmp_path / "runs"):
        records[entry["spec"]["preset"]["name"]][entry["spec"]["variant"]] = entry
    assert records["sizing"].keys() == {"A0-longest", "A2"}
    assert records["quality"].keys() == {"A0-longest", "A2"}
    for variant, entry in records["quality"].items():
        samples = 1.2 * records["sizing"][variant]["speed"]["samples_per_s"]
        steps = max(1, int(samples / 32))  # one at least, on a busy machine
        assert entry["spec"]["preset"]["steps"] == steps
        assert entry["time"]["steps"] == steps
    assert names()["best"]["text"] == "alice"
