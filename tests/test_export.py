"""Records for other tools. TensorBoard, Weights & Biases and trackio are played by a class that notes what it
is told."""

import json
import os
import sys

import pandas as pd
import pytest

from qa_lib import record
from qa_lib.__main__ import main
from qa_lib.run import export
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


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_weights_and_biases_and_trackio_get_runs(name, runs, tmp_path, monkeypatch):
    lab = Noted()
    lab.summary = lab
    monkeypatch.setitem(sys.modules, name, lab)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("TRACKIO_DIR", "")
    assert main(["export", "--runs", str(runs), "--group", "cpu-smoke", f"--{name}", str(tmp_path / "logs")]) == 0
    begun = [named for called, _, named in lab.calls if called == "init"]
    assert [named["project"] for named in begun] == ["cpu-smoke"] * 2 and begun[0]["config"]["variant"] == "A1"
    assert ("log", ({"loss": 0.5, "lr": 1e-3, "ms": 4.0},), {"step": 2}) in lab.calls
    assert [called for called, *_ in lab.calls].count("finish") == 2
    if name == "wandb":
        assert begun[0]["mode"] == "offline"
    else:
        assert os.environ["TRACKIO_DIR"] == str(tmp_path / "logs") and begun[0]["auto_log_gpu"] is False
    assert any(words[0].get("quality/f1") == 81.5 for called, words, _ in lab.calls if called == "log")


def test_a_run_is_followed_while_it_trains(runs, tmp_path, monkeypatch, capsys):
    """Each look sends what is new: a run that goes on, one that begins, is begun anew and ends."""
    (folder,) = runs.glob("*/A1-*")
    entry, log = record.read_record(folder), folder / "steps.jsonl"
    lab = Noted()
    lab.summary = lab
    monkeypatch.setitem(sys.modules, "wandb", lab)
    log.write_text("")

    def steps(*numbers):
        with log.open("a") as stream:
            stream.writelines(f'{{"step": {number}, "loss": 1.0, "lr": 0.1, "ms": 2.0}}\n' for number in numbers)

    def begin(at, status):
        entry["time"]["started"] = at
        record.write_record(folder, entry | {"status": status})

    looks = [
        lambda: begin("t1", "starting"),
        lambda: begin("t2", "running"),
        lambda: steps(1, 2),
        lambda: None,
        lambda: (steps(3), begin("t2", "killed")),
        lambda: begin("t3", "running"),
    ]

    def look(_):
        if not looks:
            raise KeyboardInterrupt
        looks.pop(0)()

    monkeypatch.setattr(export.time, "sleep", look)
    words = ["--runs", str(runs), "--wandb", str(tmp_path / "logs"), "--follow"]
    assert main(["export", *words]) == 130
    told = []
    for name, words, named in lab.calls:
        if name != "log":
            told.append(name)
        elif "loss" in words[0]:
            told.append(named["step"])
    skipped, first = ["init", "finish"], ["init", "finish"]  # what was there before it followed
    assert told == [*first, *skipped, "init", 1, 2, 3, "finish", "init", 1, 2, 3, "finish"]
    assert main(["export", "--runs", str(runs), "--csv", "x.csv", "--follow"]) == 2
    assert "error: --follow goes with one of --tensorboard, --wandb, --trackio" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--tensorboard", "--wandb", "--trackio"])
def test_a_package_that_is_not_installed_is_one_line(option, tmp_path, monkeypatch, capsys):
    for module in ("torch.utils.tensorboard", "wandb", "trackio"):
        monkeypatch.setitem(sys.modules, module, None)
    assert main(["export", "--runs", str(tmp_path / "none"), option, str(tmp_path), "--follow"]) == 2
    assert "error: this needs a package that is not installed: pip install" in capsys.readouterr().err


def test_no_record_is_one_line(tmp_path, capsys):
    assert main(["export", "--runs", str(tmp_path), "--group", "h100-full", "--csv", "x.csv"]) == 2
    assert capsys.readouterr().err == f"error: no record of h100-full below {tmp_path}\n"
