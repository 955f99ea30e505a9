"""Records for other tools. TensorBoard and Weights & Biases are played by a class that notes what it is told."""

import json
import sys

import pandas as pd
import pytest

from qa_lib import record
from qa_lib.__main__ import main
from qa_lib.run.plan import plan
from qa_lib.spec import Machine


@pytest.fixture
def runs(tmp_path):
    """A run of two steps, whose first has no finite loss, and of a third whose line was being written; and one that was
    skipped and has no step log."""
    done, skipped = plan(["A1", "D1-nvfuser"], "smoke", data="synthetic:40", machine=Machine())
    entry = record.new_record(done, {"gpu": None})
    entry["quality"]["f1"], entry["time"]["steps"] = 81.5, 2
    record.finish(tmp_path / done.run_path, entry, "ok")
    lines = [{"step": 1, "loss": None, "lr": 1e-3, "ms": 5.0}, {"step": 2, "loss": 0.5, "lr": 1e-3, "ms": 4.0}]
    log = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "lo'
    (tmp_path / done.run_path / "steps.jsonl").write_text(log)
    record.finish(tmp_path / skipped.run_path, record.new_record(skipped, {"gpu": None}), "skipped")
    return tmp_path


class Noted:
    """Stands for a module, its runs and its writers: notes each call and gives itself."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *words, **named: self.calls.append((name, words, named)) or self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_a_table_has_a_line_a_run(runs, tmp_path, capsys):
    assert main(["export", "--runs", str(runs), "--csv", str(tmp_path / "out.csv")]) == 0
    table = pd.read_csv(tmp_path / "out.csv")
    assert list(table["spec.variant"]) == ["A1", "D1-nvfuser"] and table["quality.f1"].tolist()[0] == 81.5
    assert capsys.readouterr().out.endswith("out.csv: 2 runs\n")


def test_tensorboard_gets_curves_and_figures(runs, tmp_path, monkeypatch):
    board = Noted()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    assert main(["export", "--runs", str(runs), "--tensorboard", str(tmp_path / "logs")]) == 0
    scalars = [words for name, words, _ in board.calls if name == "add_scalar"]
    assert [words for words in scalars if words[0] == "loss"] == [("loss", 0.5, 2)]
    assert ("quality/f1", 81.5, 2) in scalars and not any("mfu" in words[0] for words in scalars)
    assert [name for name, _, _ in board.calls].count("SummaryWriter") == 2


def test_weights_and_biases_gets_offline_runs(runs, tmp_path, monkeypatch):
    lab = Noted()
    lab.summary = lab
    monkeypatch.setitem(sys.modules, "wandb", lab)
    assert main(["export", "--runs", str(runs), "--group", "cpu-smoke", "--wandb", str(tmp_path / "logs")]) == 0
    begun = [named for name, _, named in lab.calls if name == "init"]
    assert [named["mode"] for named in begun] == ["offline"] * 2 and begun[0]["config"]["variant"] == "A1"
    assert ("log", ({"loss": 0.5, "lr": 1e-3, "ms": 4.0},), {"step": 2}) in lab.calls
    assert [name for name, _, _ in lab.calls].count("finish") == 2


@pytest.mark.parametrize("option", ["--tensorboard", "--wandb"])
def test_a_package_that_is_not_installed_is_one_line(option, runs, tmp_path, monkeypatch, capsys):
    for module in ("torch.utils.tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, module, None)
    assert main(["export", "--runs", str(runs), option, str(tmp_path)]) == 2
    assert "error: this needs a package that is not installed: pip install" in capsys.readouterr().err


def test_no_record_is_one_line(tmp_path, capsys):
    assert main(["export", "--runs", str(tmp_path), "--group", "h100-full", "--csv", "x.csv"]) == 2
    assert capsys.readouterr().err == f"error: no record of h100-full below {tmp_path}\n"
