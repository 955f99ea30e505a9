"""Records for other tools. TensorBoard, Weights & Biases and trackio are played by mocks."""

import json
import os
import re
import sys
from unittest.mock import MagicMock, Mock

import pandas as pd
import pytest

from qa_lib.__main__ import main
from qa_lib.lab.search.plan import plan
from qa_lib.lab.tools import export
from qa_lib.records import record
from qa_lib.spec.spec import Machine
from tests.material import leave

LOG = """{"step": 1, "loss": null, "lr": 1e-3, "ms": 5.0}
{"step": 2, "loss": 0.5, "lr": 1e-3, "ms": 4.0}
{"step": 3, "lo"""


@pytest.fixture
def runs(tmp_path):
    """A run of two steps, whose first has no finite loss, and of a third whose line was being written; and one that was
    skipped and has no step log."""
    done, skipped = plan(["A1", "D1-nvfuser"], "smoke", data="synthetic:40", machine=Machine())
    folder = leave(tmp_path, done, quality={"f1": 81.5}, time={"steps": 2})
    (folder / "steps.jsonl").write_text(LOG)
    leave(tmp_path, skipped, "skipped")
    return tmp_path


@pytest.fixture
def lab(monkeypatch):
    """Takes the place of a module; its runs and writers are itself."""
    noted = MagicMock()
    noted.init.return_value = noted.SummaryWriter.return_value = noted.__enter__.return_value = (
        noted.summary
    ) = noted
    for name in ("torch.utils.tensorboard", "wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, noted)
    return noted


def test_a_table_has_a_line_a_run(runs, tmp_path, typed):
    said = typed("export --runs", runs, "--csv", tmp_path / "out.csv")
    table = pd.read_csv(tmp_path / "out.csv")
    assert (
        list(table["spec.variant"]) == ["A1", "D1-nvfuser"]
        and table["quality.f1"].tolist()[0] == 81.5
    )
    assert said.endswith("out.csv: 2 runs\n")


def test_tensorboard_gets_curves_and_figures(runs, tmp_path, lab, typed):
    typed("export --runs", runs, "--tensorboard", tmp_path / "logs")
    scalars = [each.args for each in lab.add_scalar.call_args_list]
    assert [words for words in scalars if words[0] == "loss"] == [("loss", 0.5, 2)]
    assert ("quality/f1", 81.5, 2) in scalars and not any("mfu" in words[0] for words in scalars)
    assert lab.SummaryWriter.call_count == 2


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_weights_and_biases_and_trackio_get_runs(name, runs, tmp_path, lab, typed, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("TRACKIO_DIR", "")
    typed("export --group cpu-smoke --runs", runs, f"--{name}", tmp_path / "logs")
    begun = [each.kwargs for each in lab.init.call_args_list]
    assert [named["project"] for named in begun] == ["cpu-smoke"] * 2 and begun[0]["config"][
        "variant"
    ] == "A1"
    lab.log.assert_any_call({"loss": 0.5, "lr": 1e-3, "ms": 4.0}, step=2)
    assert lab.finish.call_count == 2
    if name == "wandb":
        assert begun[0]["mode"] == "offline"
    else:
        assert (
            os.environ["TRACKIO_DIR"] == str(tmp_path / "logs")
            and begun[0]["auto_log_gpu"] is False
        )
    assert any(each.args[0].get("quality/f1") == 81.5 for each in lab.log.call_args_list)


def test_a_run_is_followed_while_it_trains(runs, tmp_path, lab, typed, monkeypatch):
    """Each look sends what is new: a run that goes on, one that begins, is begun anew and ends."""
    (folder,) = runs.glob("*/A1-*")
    entry, log = record.read_record(folder), folder / "steps.jsonl"
    log.write_text("")

    def steps(*numbers):
        with log.open("a") as stream:
            stream.writelines(
                f'{{"step": {number}, "loss": 1.0, "lr": 0.1, "ms": 2.0}}\n' for number in numbers
            )

    def begin(at, status):
        entry["time"]["started"] = at
        record.write_record(folder, entry | {"status": status})

    def changes():
        yield begin("t1", "starting")
        yield begin("t2", "running")
        yield steps(1, 2)
        yield None
        yield steps(3), begin("t2", "killed")
        yield begin("t3", "running")
        yield KeyboardInterrupt  # which a mock raises

    monkeypatch.setattr(export.time, "sleep", Mock(side_effect=changes()))
    typed("export --follow --runs", runs, "--wandb", tmp_path / "logs", code=130)
    told = []
    for name, words, named in lab.mock_calls:
        if name in ("init", "finish"):
            told.append(name)
        elif name == "log" and "loss" in words[0]:
            told.append(named["step"])
    skipped, first = ["init", "finish"], ["init", "finish"]  # what was there before it followed
    assert told == [*first, *skipped, "init", 1, 2, 3, "finish", "init", 1, 2, 3, "finish"]


@pytest.mark.parametrize("option", ["--tensorboard", "--wandb", "--trackio"])
def test_a_package_that_is_not_installed_is_one_line(option, tmp_path, monkeypatch, typed):
    for module in ("torch.utils.tensorboard", "wandb", "trackio"):
        monkeypatch.setitem(sys.modules, module, None)
    said = typed("export --follow --runs", tmp_path / "none", option, tmp_path, code=2)
    assert "error: this needs a package that is not installed: pip install" in said


def test_ones_own_runs_are_exported_and_archived_ones_to_who_names_their_group(
    runs, tmp_path, typed
):
    typed("archive cpu-smoke --runs", runs)
    (runs / "cpu-smoke").rename(tmp_path / "away")
    (own,) = plan(["A2"], "smoke", data="synthetic:40", machine=Machine())
    leave(runs, own)
    out = tmp_path / "out.csv"
    said = typed("export --runs", runs, "--csv", out)
    assert said.splitlines()[1].startswith("left out: 2 archived runs")
    assert list(pd.read_csv(out)["spec.variant"]) == ["A2"]
    typed("export --group cpu-smoke --runs", runs, "--csv", out)
    assert list(pd.read_csv(out)["spec.variant"]) == ["A1", "A2", "D1-nvfuser"]
    (runs / "cpu-smoke" / own.run_id).rename(tmp_path / "gone")
    typed("export --runs", runs, "--csv", out)
    assert list(pd.read_csv(out)["spec.variant"]) == ["A1", "D1-nvfuser"], "none is one's own"


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


def test_no_record_and_following_into_a_table_are_one_line(tmp_path, typed):
    said = typed("export --group h100-full --csv x.csv --runs", tmp_path, code=2)
    assert said == f"error: no record of h100-full below {tmp_path}\n"
    said = typed("export --csv x.csv --follow --runs", tmp_path, code=2)
    assert said == "error: --follow goes with one of --tensorboard, --wandb, --trackio\n"


def test_steps_that_cannot_be_read_cost_a_sentence_a_run(runs, tmp_path, lab, capsys):
    main(["archive", "cpu-smoke", "--runs", str(runs)])
    (runs / "cpu-smoke").rename(tmp_path / "away")
    (runs / "cpu-smoke.steps.parquet").write_text("no parquet")
    leave(runs, plan(["A2"], "smoke", data="synthetic:40", machine=Machine())[0])
    words = ["export", "--group", "cpu-smoke", "--runs", str(runs), "--tensorboard"]
    assert main([*words, str(tmp_path / "logs")]) == 0
    assert capsys.readouterr().err.count("left out: ") == 2
    assert lab.SummaryWriter.call_count == 1
