"""notebooks/quickstart.ipynb: the same training by two variants, what each cost, and a question."""

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
def test_without_a_gpu_it_trains_both_at_smoke_size_and_ranks_no_speed(tmp_path, quickstart):
    shown, pictures = quickstart()
    ends = {
        run["spec"]["variant"]: (run["status"], run["time"]["steps"])
        for run in records_of(tmp_path / "runs")
    }
    assert ends == dict.fromkeys(("A0-longest", "A4"), ("ok", 400))
    assert "recommended: A4 at micro-batch 16 on cpu" in shown
    assert "| A0-longest | 400 |" in shown
    assert "| A4 | 400 |" in shown
    assert "| question | A0-longest | A4 | gold |" in shown
    assert "GiB of BERT-base on a T4, predicted" in shown
    assert "samples/s" not in shown
    assert pictures == 2
    assert names()["best"]["text"] == "Greta Miller"


def test_both_train_for_one_epoch_of_ones_own_data(tmp_path, quickstart, monkeypatch):
    """A GPU trains so, too; here samples have fewer tokens."""
    quality = dataclasses.replace(PRESETS["quality"], max_length=64, stride=16, measure_from=1)
    monkeypatch.setitem(PRESETS, "quality", quality)
    squad = squad_folder(tmp_path / "squad", "alice came to the harbour at nine", "alice")
    sources = {"data": str(squad), "model": checkpoint("bert", tmp_path / "my-bert")}
    shown, _ = quickstart(preset="quality", variant="A2", **sources)
    records = records_of(tmp_path / "runs")
    assert {record["spec"]["variant"] for record in records} == {"A0-longest", "A2"}
    for record in records:
        assert record["status"] == "ok"
        assert record["spec"]["preset"]["epochs"] == 1
    assert "| question | A0-longest | A2 | gold |" in shown
