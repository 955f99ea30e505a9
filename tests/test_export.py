"""Records for other tools. TensorBoard, Weights & Biases and trackio are played by mocks."""

import contextvars
import json
import math
import os
import re
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import pandas as pd
import pytest

from qa_lib.__main__ import main
from qa_lib.lab.search.plan import plan
from qa_lib.lab.tools import export
from qa_lib.records import record
from qa_lib.records.archive import read_runs
from qa_lib.spec.machine import Machine
from tests.material import leave

LOG = """{"step": 1, "loss": null, "lr": 1e-3, "ms": 5.0}
{"step": 2, "loss": 0.5, "lr": 1e-3, "ms": 4.0}
{"step": 3, "lo"""


@pytest.fixture
def runs(tmp_path):
    """A run of two steps, and one that was skipped and has no step log.

    The first step has no finite loss, and a third's line was being written.
    """
    done, skipped = plan(["A1", "D1-nvfuser"], "smoke", data="synthetic:40", machine=Machine())
    folder = leave(tmp_path, done, quality={"f1": 81.5}, time={"steps": 2})
    (folder / "steps.jsonl").write_text(LOG)
    leave(tmp_path, skipped, "skipped")
    return tmp_path


@pytest.fixture
def lab(monkeypatch):
    """Takes the place of a module; its runs and writers are itself."""
    noted = MagicMock()
    noted.init.return_value = noted
    noted.SummaryWriter.return_value = noted
    noted.summary = noted
    for name in ("torch.utils.tensorboard", "wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, noted)
    return noted


def test_a_table_has_a_line_a_run(runs, tmp_path, typed):
    printed = typed("export --runs", runs, "--csv", tmp_path / "out.csv")
    table = pd.read_csv(tmp_path / "out.csv")
    assert list(table["spec.variant"]) == ["A1", "D1-nvfuser"]
    assert table["quality.f1"].tolist()[0] == 81.5
    assert printed.endswith("out.csv: 2 runs\n")


def test_tensorboard_gets_curves_and_figures(runs, tmp_path, lab, typed):
    typed("export --runs", runs, "--tensorboard", tmp_path / "logs")
    scalars = [each.args for each in lab.add_scalar.call_args_list]
    assert [words for words in scalars if words[0] == "loss"] == [("loss", 0.5, 2)]
    assert ("quality/f1", 81.5, 2) in scalars
    assert not any("mfu" in words[0] for words in scalars), "which was not measured"
    assert lab.SummaryWriter.call_count == 2


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_weights_and_biases_and_trackio_get_runs(name, runs, tmp_path, lab, typed, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("TRACKIO_DIR", "")
    typed("export --group cpu-smoke --runs", runs, f"--{name}", tmp_path / "logs")
    begun = [each.kwargs for each in lab.init.call_args_list]
    assert [named["project"] for named in begun] == ["cpu-smoke"] * 2
    assert begun[0]["config"]["variant"] == "A1"
    lab.log.assert_any_call({"loss": 0.5, "lr": 1e-3, "ms": 4.0}, step=2)
    assert any(each.args[0].get("quality/f1") == 81.5 for each in lab.log.call_args_list)
    assert lab.finish.call_count == 2
    if name == "wandb":
        assert begun[0]["mode"] == "offline"
    else:
        assert os.environ["TRACKIO_DIR"] == str(tmp_path / "logs")
        assert begun[0]["auto_log_gpu"] is False


def test_a_run_is_followed_while_it_trains(runs, tmp_path, lab, typed, monkeypatch):
    """Each look sends what is new: a run that goes on, one that begins, is begun anew and ends."""
    (folder,) = runs.glob("*/A1-*")
    entry = record.read_record(folder)
    log = folder / "steps.jsonl"
    log.write_text("")

    def steps(*numbers):
        with log.open("a") as stream:
            for number in numbers:
                line = {"step": number, "loss": 1.0, "lr": 0.1, "ms": 2.0}
                stream.write(json.dumps(line) + "\n")

    def begin(at, status):
        entry["time"]["started"] = at
        record.write_record(folder, entry | {"status": status})

    def changes():
        """What happens before each look."""
        begin("t1", "starting")
        yield
        begin("t2", "running")
        yield
        steps(1, 2)
        yield
        yield
        steps(3)
        begin("t2", "killed")
        yield
        begin("t3", "running")
        yield
        yield KeyboardInterrupt  # which a mock raises

    monkeypatch.setattr(export.time, "sleep", Mock(side_effect=changes()))
    typed("export --follow --runs", runs, "--wandb", tmp_path / "logs", code=130)
    calls = []
    for name, words, named in lab.mock_calls:
        if name in ("init", "finish"):
            calls.append(name)
        elif name == "log" and "loss" in words[0]:
            calls.append(named["step"])
    there_before = ["init", "finish", "init", "finish"]
    assert calls == [*there_before, "init", 1, 2, 3, "finish", "init", 1, 2, 3, "finish"]


@pytest.mark.parametrize("option", ["--tensorboard", "--wandb", "--trackio"])
def test_a_package_that_is_not_installed_is_one_line(option, tmp_path, monkeypatch, typed):
    for module in ("torch.utils.tensorboard", "wandb", "trackio"):
        monkeypatch.setitem(sys.modules, module, None)
    printed = typed("export --follow --runs", tmp_path / "none", option, tmp_path, code=2)
    assert "error: this needs a package that is not installed: pip install" in printed


@pytest.fixture
def archived(runs, tmp_path, typed):
    """The runs in an archive alone."""
    typed("archive cpu-smoke --runs", runs)
    (runs / "cpu-smoke").rename(tmp_path / "away")
    return runs


@pytest.fixture
def own_beside_archived(archived):
    """A run of one's own in the same group as the archived ones."""
    (own,) = plan(["A2"], "smoke", data="synthetic:40", machine=Machine())
    leave(archived, own)
    return archived


def test_of_ones_own_and_archived_runs_ones_own_are_exported(own_beside_archived, tmp_path, typed):
    out = tmp_path / "out.csv"
    printed = typed("export --runs", own_beside_archived, "--csv", out)
    assert printed.splitlines()[1].startswith("left out: 2 archived runs")
    assert list(pd.read_csv(out)["spec.variant"]) == ["A2"]


def test_archived_runs_are_exported_to_who_names_their_group(own_beside_archived, tmp_path, typed):
    out = tmp_path / "out.csv"
    typed("export --group cpu-smoke --runs", own_beside_archived, "--csv", out)
    assert list(pd.read_csv(out)["spec.variant"]) == ["A1", "A2", "D1-nvfuser"]


def test_archived_runs_are_exported_where_none_is_ones_own(archived, tmp_path, typed):
    out = tmp_path / "out.csv"
    typed("export --runs", archived, "--csv", out)
    assert list(pd.read_csv(out)["spec.variant"]) == ["A1", "D1-nvfuser"]


@pytest.mark.parametrize("name", ["../../out", "/tmp/out", ".."])
@pytest.mark.parametrize("field", ["run_id", "group"])
def test_an_id_that_is_a_path_leads_nowhere(name, field, runs, tmp_path, lab, capsys):
    typed_words = ["export", "--runs", str(runs), "--tensorboard", str(tmp_path / "logs")]
    main(["archive", "cpu-smoke", "--runs", str(runs)])
    path = runs / "cpu-smoke.jsonl"
    first, second = path.read_text().splitlines()
    path.write_text(json.dumps(json.loads(first) | {field: name}) + "\n" + second)
    (runs / "cpu-smoke").rename(tmp_path / "away")
    assert main(typed_words) == 0
    assert re.search(rf"left out: .*({field}.* is|of group) '", capsys.readouterr().err)
    (call,) = lab.SummaryWriter.call_args_list
    assert call.args[0].parent == tmp_path / "logs" / "cpu-smoke"


def test_a_table_is_not_written_through_a_link(runs, tmp_path, typed):
    (tmp_path / "theirs").write_text("mine")
    (tmp_path / "out.csv").symlink_to("theirs")
    assert "a link" in typed("export --runs", runs, "--csv", tmp_path / "out.csv", code=2)
    assert (tmp_path / "theirs").read_text() == "mine"


def test_a_group_without_a_record_is_one_line(tmp_path, typed):
    printed = typed("export --group h100-full --csv x.csv --runs", tmp_path, code=2)
    assert printed == f"error: no record of h100-full below {tmp_path}\n"


def test_following_into_a_table_is_one_line(tmp_path, typed):
    printed = typed("export --csv x.csv --follow --runs", tmp_path, code=2)
    assert printed == "error: --follow goes with one of --tensorboard, --wandb, --trackio\n"


def test_steps_that_cannot_be_read_cost_a_sentence_a_run(
    own_beside_archived, tmp_path, lab, capsys
):
    runs = own_beside_archived
    (runs / "cpu-smoke.steps.parquet").write_text("no parquet")
    words = ["export", "--group", "cpu-smoke", "--runs", str(runs), "--tensorboard"]
    capsys.readouterr()
    assert main([*words, str(tmp_path / "logs")]) == 0
    assert capsys.readouterr().err.count("left out: ") == 2
    assert lab.SummaryWriter.call_count == 1


# What is exported of a run, by itself.


def test_the_figures_of_a_run_are_the_numbers_that_it_measured():
    entry = {
        "speed": {"samples_per_s": 10.5, "gpu_busy": None},
        "memory": {"peak_alloc_mib": math.nan},
        "energy": {"by": "nvml"},
        "quality": {"f1": 81, "n": 3},
        "time": {"step_ms": {"median": 4.0}, "compile_cached": True},
        "data": {"n": 7},
    }
    assert export.figures_of(entry) == {
        "speed/samples_per_s": 10.5,
        "quality/f1": 81,
        "quality/n": 3,
        "time/step_ms/median": 4.0,
    }


def test_a_table_has_no_column_of_what_an_archive_keeps_beside_a_record(tmp_path):
    entry = {"run_id": "r", "profile": {"time": 1}, "quantized": [], "speed": {"mfu": None}}
    export.write_table([SimpleNamespace(record=entry)], tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text() == "run_id,speed.mfu\nr,\n"


def test_a_tracker_keeps_what_a_run_that_has_not_ended_has_sent(runs, tmp_path, lab):
    (folder,) = runs.glob("*/A1-*")
    record.write_record(folder, record.read_record(folder) | {"status": "running"})
    (run,) = [run for run in read_runs(runs) if run.folder == folder]
    sent = export.Export("wandb", tmp_path)
    sent.update(run)
    assert lab.finish.call_count == 0
    sent.close()
    assert lab.finish.call_count == 1
    assert [call.kwargs["step"] for call in lab.log.call_args_list] == [1, 2]


@pytest.mark.parametrize(("variable", "mode"), [(None, "offline"), ("online", "online")])
def test_a_run_of_weights_and_biases_has_its_name_its_folder_and_its_mode(
    variable, mode, tmp_path, monkeypatch
):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if variable:
        monkeypatch.setenv("WANDB_MODE", variable)
    module = Mock()
    export.begin_wandb_run(module, tmp_path / "logs", project="g", name="r", config={"seed": 0})
    assert (tmp_path / "logs").is_dir()
    assert module.init.call_args.kwargs == {
        "project": "g",
        "name": "r",
        "config": {"seed": 0},
        "dir": tmp_path / "logs",
        "mode": mode,
        "reinit": "create_new",
    }


def test_a_run_of_trackio_is_begun_in_a_context_of_its_own(tmp_path):
    opened = contextvars.ContextVar("opened", default=None)
    module = Mock()
    module.init = Mock(side_effect=lambda **named: opened.set(named["name"]))
    export.begin_trackio_run(module, tmp_path, project="g", name="r", config={})
    assert module.init.call_args.kwargs["project"] == "g"
    assert opened.get() is None


def test_a_run_of_tensorboard_lies_in_the_folder_of_its_group(tmp_path):
    module = Mock()
    run = export.TensorBoard(module, tmp_path, project="g", name="r", config={})
    run.finish()
    assert module.SummaryWriter.call_args.args == (tmp_path / "g" / "r",)
    assert module.SummaryWriter.return_value.close.called


def test_runs_are_looked_at_every_two_seconds_and_of_the_asked_group_alone(runs, monkeypatch):
    sleep = Mock(side_effect=[None, KeyboardInterrupt])
    monkeypatch.setattr(export.time, "sleep", sleep)
    followed = Mock()
    with pytest.raises(KeyboardInterrupt):
        export.follow(runs, "h200-smoke", followed)
    assert sleep.call_args.args == (2.0,)
    assert not followed.update.called
