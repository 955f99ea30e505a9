"""Runs in folders become two files of their group, which say the same."""

import dataclasses
import json
import os
import re
import shutil
import time
from pathlib import Path

import pandas as pd
import pytest

from qa_lib.__main__ import main
from qa_lib.lab.launch.local import Launcher
from qa_lib.lab.search.plan import plan
from qa_lib.records import record
from qa_lib.records.archive import (
    STEP_COLUMNS,
    Run,
    _archived_steps,
    _covers,
    _merged,
    own_first,
    own_groups,
    read_runs,
    write_archive,
)
from qa_lib.records.schema import PROFILE_SCHEMA, QUANTIZED_SCHEMA, SCHEMA
from qa_lib.spec.machine import Machine
from tests.material import edited, leave, refused, write

GROUP = "cpu-smoke"
STEPS = [
    {"step": 1, "loss": None, "lr": 1e-3, "ms": 5.0},
    {"step": 2, "loss": 0.5, "lr": 1e-3, "ms": 4.0, "phi": 70.0},
]
QUALITY = {
    "f1": 81.5,
    "best_f1": 82.0,
    "best_f1_threshold": -1.5,
    "weights_bytes": 9,
    "latency_ms": 3,
}
PROFILE = {"schema": PROFILE_SCHEMA, "time": {"busy_ms": 1.0}}
LATER = {"started": "2026-12-01T00:00:00+00:00"}


@pytest.fixture(scope="module")
def specs():
    return plan(["A1", "A2", "A3", "A4"], "smoke", data="synthetic:40", machine=Machine())


@pytest.fixture
def runs(tmp_path, specs):
    """The folders of four runs.

    A1 has a log, a profile and a quantized model; A2 has none; A3 ran out of memory; A4 is still at
    work.
    """
    for spec, status in zip(specs, ("ok", "ok", "oom", "running"), strict=True):
        leave(tmp_path, spec, status, quality={"f1": 81.5, "n": 40}, spec={"n_eval": 40})
    folder = tmp_path / specs[0].run_path
    write_steps(folder, STEPS)
    with (folder / "steps.jsonl").open("a") as stream:
        stream.write('{"step": 3, "lo')
    write(folder / "profile.json", PROFILE)
    (folder / "model-int8").mkdir()
    quantized = {
        "schema": QUANTIZED_SCHEMA,
        "run_id": folder.name,
        "group": GROUP,
        "width": "int8",
        "code": {},
        "env": {},
        "data": {},
        "before": QUALITY,
        "after": QUALITY,
    }
    write(folder / "model-int8" / "quantized.json", quantized)
    return tmp_path


def write_steps(folder: Path, steps: list[dict]) -> None:
    """Write the log of a run."""
    (folder / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))


def archive(runs: Path) -> int:
    """Archive the group; the exit code."""
    return main(["archive", GROUP, "--runs", str(runs)])


def archive_alone(runs: Path) -> Path:
    """Archive the group and remove its folders; the path of the archive."""
    assert archive(runs) == 0
    shutil.rmtree(runs / GROUP)
    return runs / f"{GROUP}.jsonl"


def lines_of(runs: Path) -> list[dict]:
    """The lines of the archive."""
    return [json.loads(line) for line in (runs / f"{GROUP}.jsonl").read_text().splitlines()]


def read_and_left_out(runs: Path, group: str | None = None) -> tuple[list[Run], list[str]]:
    """The runs that are read, and what is said of those that are not."""
    left_out = []
    found = read_runs(runs, group, left_out=lambda _, problem: left_out.append(str(problem)))
    return found, left_out


def variants_of(runs: list[Run]) -> list[str]:
    return [run.record["spec"]["variant"] for run in runs]


# An archive says what the folders said.


def test_the_verb_says_how_many_runs_are_in_the_archive(runs, capsys):
    assert archive(runs) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{runs}/{GROUP}.jsonl: 3 runs, ")
    assert "not finished, and left out: 1, " in out


def test_an_archived_record_is_that_of_the_folder_with_what_lay_beside_it(runs):
    finished = [run for run in read_runs(runs) if run.record["status"] != "running"]
    records = [
        run.record | {"profile": run.profile(), "quantized": run.quantized()} for run in finished
    ]
    archive_alone(runs)
    assert [run.record for run in read_runs(runs)] == records


def test_an_archived_run_has_its_profile(runs):
    archive_alone(runs)
    profiles = [run.profile() for run in read_runs(runs)]
    assert profiles == [PROFILE, None, None]


def test_an_archived_run_has_its_quantized_models(runs):
    (int8,) = runs.glob("*/*/model-int8")
    shutil.copytree(int8, int8.with_name("model-int4"))
    edited(int8.with_name("model-int4") / "quantized.json", width="int4")
    archive_alone(runs)
    models = [run.quantized() for run in read_runs(runs)]
    assert [len(of_run) for of_run in models] == [2, 0, 0]
    assert [model["width"] for model in models[0]] == ["int4", "int8"]
    assert models[0][1]["after"] == QUALITY


def test_an_archived_run_has_its_steps_but_for_one_that_was_cut_off(runs):
    before = [run.steps() for run in read_runs(runs)]
    archive_alone(runs)
    after = [run.steps() for run in read_runs(runs)]
    assert [len(steps) for steps in after] == [2, 0, 0]
    for steps, steps_of_folder in zip(after, before, strict=False):
        assert list(steps) == list(STEP_COLUMNS)
        assert steps.equals(steps_of_folder)


def test_an_archived_run_names_its_archive_and_no_folder(runs):
    path = archive_alone(runs)
    assert [(run.folder, run.archive) for run in read_runs(runs)] == 3 * [(None, path)]


def test_an_archive_that_is_made_again_is_the_same(runs, capsys):
    def files() -> list[bytes]:
        return [(runs / f"{GROUP}{suffix}").read_bytes() for suffix in (".jsonl", ".steps.parquet")]

    assert archive(runs) == 0
    before = files()
    assert archive(runs) == 0
    assert files() == before
    assert "differ" not in capsys.readouterr().out


def test_one_group_is_read_whatever_signs_are_in_its_name(runs):
    archive_alone(runs).rename(runs / "cpu-[smoke].jsonl")
    found, left_out = read_and_left_out(runs, group="cpu-[smoke]")
    assert found == []
    assert len(left_out) == 3, "of another group, which each line says"


def test_a_part_of_a_name_is_no_group(runs):
    archive_alone(runs)
    assert read_and_left_out(runs, group="cpu-s") == ([], [])


# Runs in folders beside archived ones.


def test_a_folder_wins_over_its_line(runs, specs):
    archive_alone(runs)
    folder = leave(runs, specs[1], quality={"f1": 12.5})
    found = read_runs(runs, GROUP)
    assert [run.folder for run in found] == [None, folder, None]
    assert [run.record["quality"]["f1"] for run in found] == [81.5, 12.5, 81.5]


def test_a_second_archive_keeps_what_the_first_one_had(runs, specs):
    archive_alone(runs)
    write_steps(leave(runs, specs[1], quality={"f1": 12.5}), STEPS[1:])
    archive_alone(runs)
    found = read_runs(runs)
    assert [run.record["quality"]["f1"] for run in found] == [81.5, 12.5, 81.5]
    assert [len(run.steps()) for run in found] == [2, 1, 0]
    assert found[0].profile() == PROFILE
    assert len(found[0].quantized()) == 1


def test_an_archived_run_is_evidence_and_nobodys_own(runs, specs):
    launcher = Launcher(runs, Machine(), {})
    assert launcher.is_finished(specs[2])
    archive_alone(runs)
    assert not any(launcher.is_finished(spec) for spec in specs)
    assert own_groups(read_runs(runs)) == set()


def test_runs_in_folders_come_first_where_there_are_any(runs, specs):
    archive_alone(runs)
    assert len(own_first(read_runs(runs))) == 3
    leave(runs, specs[1])
    assert variants_of(own_first(read_runs(runs))) == ["A2"]
    assert own_groups(read_runs(runs)) == {GROUP}


@pytest.mark.parametrize("status", ["running", "starting", "waiting"])
def test_a_run_at_work_leaves_its_archived_record_alone(runs, specs, status):
    path = archive_alone(runs)
    before = path.read_text()
    folder = leave(runs, specs[1])
    record.write_record(folder, record.read_record(folder) | {"status": status})
    assert archive(runs) == 0
    assert path.read_text() == before


# A run that was done again.


def leave_again(runs: Path, spec, status: str = "ok") -> None:
    """Leave the folder of a run that was done again, with a shorter log."""
    write_steps(leave(runs, spec, status, time=LATER), STEPS[:1])


@pytest.mark.parametrize("status", ["killed", "error", "oom"])
def test_a_run_that_failed_again_stands_beside_the_one_that_ended_ok(runs, specs, status, capsys):
    archive_alone(runs)
    leave_again(runs, specs[0], status)
    archive_alone(runs)
    assert [line["status"] for line in lines_of(runs)] == ["ok", "ok", "oom", status]
    message = rf"{specs[0].run_id}: 2 lines that differ, .*ended ok"
    assert re.search(message, capsys.readouterr().out)


@pytest.mark.parametrize("status", ["killed", "error", "oom"])
def test_of_lines_of_one_run_the_one_that_ended_ok_is_read(runs, specs, status):
    archive_alone(runs)
    leave_again(runs, specs[0], status)
    archive_alone(runs)
    first = read_runs(runs)[0]
    assert first.record["status"] == "ok"
    assert len(first.steps()) == 2


def test_of_lines_that_ended_ok_the_last_is_read(runs, specs, capsys):
    archive_alone(runs)
    leave_again(runs, specs[0])
    archive_alone(runs)
    message = f"{specs[0].run_id}: 2 lines that differ, and all are kept"
    assert message in capsys.readouterr().out
    assert len(read_runs(runs)[0].steps()) == 1


def test_the_steps_of_an_older_line_are_kept(runs, specs):
    archive_alone(runs)
    leave_again(runs, specs[0])
    path = archive_alone(runs)
    older = lines_of(runs)[:-1]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in older))
    assert len(read_runs(runs)[0].steps()) == 2


def test_a_profile_that_came_later_goes_into_the_line_that_is_there(runs, specs, capsys):
    assert archive(runs) == 0
    profile = PROFILE | {"time": {"busy_ms": 2.0}}
    write(runs / specs[1].run_path / "profile.json", profile)
    assert archive(runs) == 0
    assert "differ" not in capsys.readouterr().out
    assert len(lines_of(runs)) == 3
    assert lines_of(runs)[2]["profile"] == profile


def test_a_log_that_is_gone_takes_nothing_from_the_archive(runs, specs):
    assert archive(runs) == 0
    folder = runs / specs[0].run_path
    (folder / "steps.jsonl").unlink()
    write(folder / "profile.json", PROFILE | {"time": {"busy_ms": 2.0}})
    archive_alone(runs)
    assert len(read_runs(runs)[0].steps()) == 2


def test_a_log_that_has_changed_with_its_record_is_archived_as_it_is_now(runs, specs):
    assert archive(runs) == 0
    folder = runs / specs[0].run_path
    write_steps(folder, [step | {"ms": 9.0} for step in STEPS])
    write(folder / "profile.json", PROFILE | {"time": {"busy_ms": 2.0}})
    archive_alone(runs)
    assert read_runs(runs)[0].steps()["ms"].tolist() == [9.0, 9.0]


def test_empty_lines_go_without_a_word(runs, capsys):
    path = archive_alone(runs)
    whole = path.read_bytes()
    path.write_bytes(b"\n" + whole + b" \n\n")
    assert archive(runs) == 0
    assert path.read_bytes() == whole
    assert capsys.readouterr().err == ""


def test_fields_that_are_not_known_survive_being_archived_twice(runs, specs):
    path = runs / specs[0].run_path / "record.json"
    entry = json.loads(path.read_text())
    entry["later"] = [1]
    entry["speed"]["later"] = {"a": 1}
    write(path, entry)
    archive_alone(runs)
    leave(runs, specs[1], quality={"f1": 12.5})
    archive_alone(runs)
    line = lines_of(runs)[0]
    assert line["later"] == [1]
    assert line["speed"]["later"] == {"a": 1}


def test_an_end_between_the_two_files_leaves_an_archive_that_is_whole(runs, specs, monkeypatch):
    archive_alone(runs)
    before = [(run.record, len(run.steps())) for run in read_runs(runs)]
    leave_again(runs, specs[0])
    replaced = []
    replace = os.replace

    def replace_once(new, path):
        if replaced:
            raise KeyboardInterrupt
        replaced.append(path)
        replace(new, path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace_once)
        assert archive(runs) == 130
    assert [path.suffix for path in replaced] == [".parquet"]
    shutil.rmtree(runs / GROUP)
    assert [(run.record, len(run.steps())) for run in read_runs(runs)] == before


# What cannot be read.

# What of a line is replaced by what, and the message about it.
SPOILT = [
    (".{9}$", "", "not readable as JSON"),
    (".*", "[]", "schema None is not known"),
    (f'"{SCHEMA}"', '"qa_lib/2"', "schema 'qa_lib/2' is not known"),
    ('"group":"cpu-smoke"', '"group":"h200-x"', "a record of group 'h200-x'"),
    ('"f1":81.5', '"f1":"fast"', "quality.f1 is 'fast'"),
]


def spoil_second_line(path: Path, old: str, new: str) -> str:
    """Replace a part of an archive's second line; what the archive is then."""
    first, second, third = path.read_text().splitlines()
    spoilt = "\n".join([first, re.sub(old, new, second, count=1), third])
    path.write_text(spoilt)
    return spoilt


def test_an_archive_that_cannot_be_read_costs_itself_and_is_named(runs, monkeypatch):
    archive_alone(runs)
    (runs / "a-bench.jsonl").write_text("")
    read_bytes = Path.read_bytes

    def refuse(path):
        if path.name == "a-bench.jsonl":
            raise PermissionError(13, "Permission denied")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    told = []
    found = read_runs(runs, left_out=lambda group, problem: told.append((group, str(problem))))
    assert len(found) == 3
    assert told == [("a-bench", f"{runs}/a-bench.jsonl: not readable (Permission denied)")]


@pytest.mark.parametrize(("old", "new", "message"), SPOILT)
def test_a_broken_line_costs_itself_and_is_named(runs, old, new, message):
    path = archive_alone(runs)
    spoil_second_line(path, old, new)
    found, (problem,) = read_and_left_out(runs)
    assert variants_of(found) == ["A1", "A3"]
    assert len(found[0].steps()) == 2
    assert problem.startswith(f"{path}:2: {message}")


@pytest.mark.parametrize(("old", "new", "message"), SPOILT)
def test_a_broken_line_is_kept_as_it_is(runs, old, new, message, capsys):
    """A newer version may read what this one cannot."""
    path = archive_alone(runs)
    spoilt = spoil_second_line(path, old, new)
    assert archive(runs) == 0
    assert path.read_text() == f"{spoilt}\n"
    assert f"kept as it is: {path}:2: {message}" in capsys.readouterr().err
    assert len(read_runs(runs)[0].steps()) == 2


def test_a_line_that_is_no_text_costs_itself(runs):
    path = archive_alone(runs)
    path.write_bytes(b"\xff" + path.read_bytes())
    found, (problem,) = read_and_left_out(runs)
    assert variants_of(found) == ["A2", "A3"]
    assert problem.startswith(f"{path}:1: not UTF-8")


def test_a_line_with_a_nan_stays_as_it_is(runs):
    path = archive_alone(runs)
    path.write_text(path.read_text().replace('"busy_ms":1.0', '"busy_ms":NaN'))
    before = path.read_bytes()
    assert archive(runs) == 0
    assert path.read_bytes() == before


def test_steps_that_are_no_parquet_are_named(runs):
    path = archive_alone(runs).with_suffix(".steps.parquet")
    path.write_bytes(path.read_bytes()[:-9])
    refused(r"steps\.parquet: not readable as steps", read_runs(runs)[0].steps)


@pytest.mark.parametrize("name", ["record.json", "profile.json"])
def test_what_cannot_be_read_of_a_folder_costs_that_run_and_stays_there(runs, specs, name, capsys):
    (runs / specs[0].run_path / name).write_text('{"schema": "\\ud800"}')
    assert archive(runs) == 1
    assert len(lines_of(runs)) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert f"{specs[0].run_id}/{name}: holds half" in message
    assert "it is in its folder alone" in message


def test_an_archive_that_is_a_link_is_not_written_over(runs, tmp_path, typed):
    (runs / f"{GROUP}.jsonl").symlink_to(write(tmp_path / "theirs", []))
    assert "a link" in typed("archive", GROUP, "--runs", runs, code=2)
    assert (tmp_path / "theirs").read_text() == "[]"


def test_where_no_run_of_a_group_can_be_read_it_is_told_why(tmp_path, typed):
    folder = tmp_path / GROUP / "A1-s0-abcdef"
    folder.mkdir(parents=True)
    (folder / "record.json").write_text("{}")
    said = typed("archive", GROUP, "--runs", tmp_path, code=2).splitlines()
    assert "A1-s0-abcdef/record.json: schema None is not known" in said[0]
    assert f"no finished run of group {GROUP}" in said[1]


NO_GROUPS = [
    ("h200-none", "no finished run of group h200-none"),
    ("../x", "'../x' is not the name of a group"),
]


@pytest.mark.parametrize(("name", "message"), NO_GROUPS)
def test_what_is_no_group_is_one_line_and_changes_nothing(runs, typed, name, message):
    before = sorted(runs.rglob("*"))
    assert message in typed("archive", name, "--runs", runs, code=2)
    assert sorted(runs.rglob("*")) == before


# Older archives, lines of one run, and folders of another.


@pytest.fixture(autouse=True)
def commit(monkeypatch):
    """Name the commit of all records in this file: git takes longer than the rest of a test."""
    monkeypatch.setenv("QA_LIB_COMMIT", "a1" * 20)


def test_steps_of_an_archive_that_does_not_say_when_runs_began_are_read_and_kept(runs, specs):
    path = archive_alone(runs).with_suffix(".steps.parquet")
    pd.read_parquet(path).drop(columns="started").to_parquet(path)
    _archived_steps.cache_clear()
    assert [len(run.steps()) for run in read_runs(runs)] == [2, 0, 0]
    leave(runs, specs[1], quality={"f1": 12.5})
    archive_alone(runs)
    assert [len(run.steps()) for run in read_runs(runs)] == [2, 0, 0]
    assert len(pd.read_parquet(path)) == 2


def test_steps_whose_begin_is_null_are_those_of_an_older_archive(runs):
    path = archive_alone(runs).with_suffix(".steps.parquet")
    pd.read_parquet(path).assign(started=None).to_parquet(path)
    _archived_steps.cache_clear()
    assert [len(run.steps()) for run in read_runs(runs)] == [2, 0, 0]


def test_steps_of_an_archive_that_another_process_has_replaced_are_read_again(runs):
    """A page and a notebook look again and again, and a queue archives beside other processes."""
    path = archive_alone(runs).with_suffix(".steps.parquet")
    assert [len(run.steps()) for run in read_runs(runs)] == [2, 0, 0]
    times = path.stat()
    time.sleep(0.05)  # or both changes of the inode may have one time
    pd.read_parquet(path)[:1].to_parquet(path)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert [len(run.steps()) for run in read_runs(runs)] == [1, 0, 0]


def test_an_archived_step_without_a_number_is_left_out(runs):
    path = archive_alone(runs).with_suffix(".steps.parquet")
    steps = pd.read_parquet(path)
    spoilt = pd.concat([steps, steps.assign(step=float("nan")), steps.assign(step=0.0)])
    spoilt.to_parquet(path)
    _archived_steps.cache_clear()
    assert list(read_runs(runs)[0].steps()["step"]) == [1, 2]


def test_an_archive_whose_steps_are_gone_has_runs_without_steps(runs):
    archive_alone(runs).with_suffix(".steps.parquet").unlink()
    _archived_steps.cache_clear()
    steps = read_runs(runs)[0].steps()
    assert (len(steps), list(steps)) == (0, list(STEP_COLUMNS))


def test_of_lines_none_of_which_ended_ok_the_last_counts(runs, specs, capsys):
    archive_alone(runs)
    leave(runs, specs[2], "killed", time=LATER)
    archive_alone(runs)
    assert f"{specs[2].run_id}: 2 lines that differ" in (printed := capsys.readouterr().out)
    assert "the last counts, which ended as killed" in printed
    assert [run.record["status"] for run in read_runs(runs)] == ["ok", "ok", "killed"]


def test_of_lines_that_ended_ok_it_is_said_when_the_last_began(runs, specs, capsys):
    archive_alone(runs)
    leave_again(runs, specs[0])
    archive_alone(runs)
    said = f"the last that ended ok counts, of {LATER['started']}"
    assert said in capsys.readouterr().out


def test_the_verb_counts_runs_and_not_lines(runs, specs, capsys):
    archive_alone(runs)
    leave_again(runs, specs[0])
    archive_alone(runs)
    assert f"{GROUP}.jsonl: 3 runs, " in capsys.readouterr().out.splitlines()[-1]


def test_a_folder_with_the_record_of_another_run_is_left_out(runs, specs):
    shutil.copytree(runs / specs[0].run_path, runs / GROUP / "A9-s0-abcdef")
    found, (problem,) = read_and_left_out(runs)
    assert len(found) == 4
    assert problem.endswith(f"A9-s0-abcdef: its record is that of {GROUP}/{specs[0].run_id}")


def test_runs_come_in_the_order_of_group_and_id(runs, specs):
    ids = [run.record["run_id"] for run in read_runs(runs)]
    assert ids == sorted(ids) and len(ids) == 4


def test_lines_of_runs_that_were_archived_together_are_in_the_order_of_their_ids(runs):
    ended = [run for run in read_runs(runs) if run.record["status"] != "running"]
    write_archive(runs / f"{GROUP}.jsonl", ended[::-1], [])
    ids = [line["run_id"] for line in lines_of(runs)]
    assert len(ids) == 3
    assert ids == sorted(ids)


def test_only_the_group_that_was_asked_for_is_read_from_folders(runs, specs):
    other = dataclasses.replace(specs[0], hardware="h200")
    leave(runs, other)
    assert {run.key[0] for run in read_runs(runs, GROUP)} == {GROUP}
    assert [run.key for run in read_runs(runs, other.group)] == [(other.group, other.run_id)]


@pytest.mark.parametrize(
    ("new", "old", "covers"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": 1}, {"a": 1, "b": None}, False),
        ({"a": 1, "b": 2}, {"a": 1, "b": None}, True),
        ({"a": {"x": 1, "y": 2}}, {"a": {"x": 1}}, True),
        ({"a": {"x": 2}}, {"a": {"x": 1}}, False),
        ({"a": [1]}, {"a": []}, True),
        ({"a": [1]}, {"a": [2]}, False),
        ({"a": None}, {"a": 0}, False),
    ],
)
def test_a_line_covers_one_that_says_no_more(new, old, covers):
    assert _covers(new, old) is covers


def test_where_what_was_found_says_less_a_record_keeps_what_is_known():
    known = {"a": {"x": None, "y": 1}, "b": 2}
    assert _merged(known, {"a": {"x": 3, "z": 4}, "c": 5}) == {
        "a": {"x": 3, "y": 1, "z": 4},
        "b": 2,
        "c": 5,
    }
