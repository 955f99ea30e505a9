"""Runs in folders become two files of their group, which say the same."""

import json
import os
import re
import shutil

import pytest

from qa_lib.__main__ import main
from qa_lib.lab.launch.local import Launcher
from qa_lib.lab.search.plan import plan
from qa_lib.records import record
from qa_lib.records.archive import STEP_COLUMNS, read_runs
from qa_lib.spec.spec import Machine
from tests.material import leave, refused, write

GROUP = "cpu-smoke"
LINES = [
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


@pytest.fixture(scope="module")
def specs():
    return plan(["A1", "A2", "A3", "A4"], "smoke", data="synthetic:40", machine=Machine())


@pytest.fixture
def runs(tmp_path, specs):
    """A1 with a log, a profile and a quantized model; A2, and A3 that ran out of memory; A4 is still at work."""
    for spec, status in zip(specs, ("ok", "ok", "oom", "running"), strict=True):
        leave(tmp_path, spec, status, quality={"f1": 81.5, "n": 40}, spec={"n_eval": 40})
    folder = tmp_path / specs[0].run_path
    (folder / "steps.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in LINES) + '{"step": 3, "lo'
    )
    write(folder / "profile.json", {"schema": record.PROFILE_SCHEMA, "time": {"busy_ms": 1.0}})
    (folder / "model-int8").mkdir()
    own = {
        "schema": record.QUANTIZED_SCHEMA,
        "run_id": folder.name,
        "group": GROUP,
        "width": "int8",
        "before": QUALITY,
    }
    write(
        folder / "model-int8" / "quantized.json",
        own | {"code": {}, "env": {}, "data": {}, "after": QUALITY},
    )
    return tmp_path


def archive(runs, group=GROUP):
    return main(["archive", group, "--runs", str(runs)])


def archived(runs, specs):
    """The same runs, archived alone."""
    assert archive(runs) == 0
    shutil.rmtree(runs / GROUP)
    return runs


def told(runs, **more):
    """The runs that are read, and what is said of those that are not."""
    left_out = []
    return read_runs(
        runs, left_out=lambda _, problem: left_out.append(str(problem)), **more
    ), left_out


def test_an_archive_says_what_the_folders_said(runs, specs, capsys):
    before = [run for run in read_runs(runs) if run.record["status"] != "running"]
    held = [(run.record, run.steps(), run.profile(), run.quantized()) for run in before]
    after, left_out = told(archived(runs, specs))
    assert capsys.readouterr().out.startswith(f"{runs}/{GROUP}.jsonl: 3 runs, ") and not left_out
    for run, (entry, steps, profile, quantized) in zip(after, held, strict=True):
        assert (run.folder, run.archive) == (None, runs / f"{GROUP}.jsonl")
        assert run.record == entry | {"profile": profile, "quantized": quantized}
        assert (run.profile(), run.quantized()) == (profile, quantized)
        assert run.steps().equals(steps) and list(steps) == list(STEP_COLUMNS)
    assert [len(run.steps()) for run in after] == [2, 0, 0] and held[0][2] and held[0][3], (
        "of the first there is all"
    )


def test_a_folder_wins_over_its_line_and_a_second_archive_keeps_all(runs, specs, capsys):
    archived(runs, specs)
    write(leave(runs, specs[1], quality={"f1": 12.5}) / "steps.jsonl", LINES[1])
    assert [run.folder for run in read_runs(runs, GROUP)] == [None, runs / specs[1].run_path, None]
    found = read_runs(archived(runs, specs))
    assert [run.record["quality"]["f1"] for run in found] == [81.5, 12.5, 81.5]
    assert (
        [len(run.steps()) for run in found] == [2, 1, 0]
        and found[0].profile()
        and found[0].quantized()
    )


def test_an_archived_run_is_evidence_and_nobodys_own(runs, specs):
    launcher = Launcher(runs, Machine(), {})
    assert launcher.is_finished(specs[2])
    assert archived(runs, specs) and not any(map(launcher.is_finished, specs))


# What of a line is replaced by what, and what is said of it.
SPOILT = [(".{9}$", "", "not readable as JSON"), (".*", "[]", "schema None is not known")]
SPOILT += [(f'"{record.SCHEMA}"', '"qa_lib/2"', "schema 'qa_lib/2' is not known")]
SPOILT += [('"group":"cpu-smoke"', '"group":"h200-x"', "a record of group 'h200-x'")]
SPOILT += [('"f1":81.5', '"f1":"fast"', "quality.f1 is 'fast'")]


@pytest.mark.parametrize(("old", "new", "said"), SPOILT)
def test_a_broken_line_costs_itself_and_is_named(runs, specs, old, new, said):
    path = archived(runs, specs) / f"{GROUP}.jsonl"
    first, second, third = path.read_text().splitlines()
    spoilt = "\n".join([first, re.sub(old, new, second, count=1), third])
    path.write_text(spoilt)
    found, (problem,) = told(runs)
    assert [run.record["spec"]["variant"] for run in found] == ["A1", "A3"] and len(
        found[0].steps()
    ) == 2
    assert problem.startswith(f"{path}:2: {said}"), problem
    assert archive(runs, GROUP) == 0 and path.read_text() == f"{spoilt}\n", (
        "a newer version may read what this one cannot"
    )
    assert len(read_runs(runs)[0].steps()) == 2


def lines_of(runs) -> list[dict]:
    return [json.loads(line) for line in (runs / f"{GROUP}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("status", ["running", "starting", "waiting"])
def test_a_run_at_work_leaves_its_archived_record_alone(runs, specs, status):
    before = (archived(runs, specs) / f"{GROUP}.jsonl").read_text()
    folder = leave(runs, specs[1])
    record.write_record(folder, record.read_record(folder) | {"status": status})
    assert archive(runs) == 0 and (runs / f"{GROUP}.jsonl").read_text() == before


@pytest.mark.parametrize("status", ["killed", "error", "oom"])
def test_a_run_that_failed_again_stands_beside_the_one_that_ended_ok(runs, specs, status, capsys):
    archived(runs, specs)
    folder = leave(runs, specs[0], status, time={"started": "2026-12-01T00:00:00+00:00"})
    (folder / "steps.jsonl").write_text(json.dumps(LINES[0]) + "\n")
    archived(runs, specs)
    assert re.search(
        rf"{specs[0].run_id}: 2 lines that differ, .*ended ok", capsys.readouterr().out
    )
    assert [line["status"] for line in lines_of(runs)] == ["ok", "ok", "oom", status]
    found = read_runs(runs)[0]
    assert found.record["status"] == "ok" and len(found.steps()) == 2


def test_both_of_two_lines_of_one_run_that_differ_are_kept_with_their_steps(runs, specs, capsys):
    archived(runs, specs)
    folder = leave(runs, specs[0], time={"started": "2026-12-01T00:00:00+00:00"})
    (folder / "steps.jsonl").write_text(json.dumps(LINES[0]) + "\n")
    archived(runs, specs)
    assert f"{specs[0].run_id}: 2 lines that differ, and all are kept" in capsys.readouterr().out
    assert len(read_runs(runs)[0].steps()) == 1, "of the newer"
    path = runs / f"{GROUP}.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines_of(runs)[:-1]))
    assert len(read_runs(runs)[0].steps()) == 2, "those of the older are there still"


def test_an_archive_that_is_made_again_says_the_same(runs, specs, capsys):
    assert archive(runs) == 0
    before = [(runs / f"{GROUP}{end}").read_bytes() for end in (".jsonl", ".steps.parquet")]
    assert archive(runs) == 0 and "differ" not in capsys.readouterr().out
    after = [(runs / f"{GROUP}{end}").read_bytes() for end in (".jsonl", ".steps.parquet")]
    assert after == before


def test_a_profile_that_came_later_goes_into_the_line_that_is_there(runs, specs, capsys):
    assert archive(runs) == 0
    profile = {"schema": record.PROFILE_SCHEMA, "time": {"busy_ms": 2.0}}
    write(runs / specs[1].run_path / "profile.json", profile)
    assert archive(runs) == 0 and "differ" not in capsys.readouterr().out
    assert len(lines_of(runs)) == 3 and read_runs(runs)[1].profile() == profile


def test_a_log_that_is_gone_takes_nothing_from_the_archive(runs, specs):
    assert archive(runs) == 0
    folder = runs / specs[0].run_path
    (folder / "steps.jsonl").unlink()
    write(folder / "profile.json", {"schema": record.PROFILE_SCHEMA, "time": {"busy_ms": 2.0}})
    archived(runs, specs)
    assert len(read_runs(runs)[0].steps()) == 2


def test_a_line_with_what_json_has_not_stays_as_it_is(runs, specs):
    path = archived(runs, specs) / f"{GROUP}.jsonl"
    path.write_text(path.read_text().replace('"busy_ms":1.0', '"busy_ms":NaN'))
    before = path.read_bytes()
    assert archive(runs) == 0 and path.read_bytes() == before


def test_fields_that_are_not_known_survive_being_archived_twice(runs, specs):
    path = runs / specs[0].run_path / "record.json"
    entry = json.loads(path.read_text())
    entry |= {"later": [1]}
    entry["speed"]["later"] = {"a": 1}
    write(path, entry)
    for _ in range(2):
        archived(runs, specs)
        line = lines_of(runs)[0]
        assert (line["later"], line["speed"]["later"]) == ([1], {"a": 1})
        leave(runs, specs[1], quality={"f1": 12.5})


def test_an_end_between_the_two_files_leaves_an_archive_that_is_whole(runs, specs, monkeypatch):
    archived(runs, specs)
    before = [(run.record, len(run.steps())) for run in read_runs(runs)]
    folder = leave(runs, specs[0], time={"started": "2026-12-01T00:00:00+00:00"})
    (folder / "steps.jsonl").write_text(json.dumps(LINES[0]) + "\n")
    replaced, replace = [], os.replace

    def killed(new, path):
        if replaced:
            raise KeyboardInterrupt
        replaced.append(path)
        replace(new, path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        assert archive(runs) == 130
    shutil.rmtree(runs / GROUP)
    assert [path.suffix for path in replaced] == [".parquet"]
    assert [(run.record, len(run.steps())) for run in read_runs(runs)] == before


@pytest.mark.parametrize("spoilt", ["record.json", "profile.json"])
def test_a_record_that_cannot_be_read_costs_itself_and_stays_in_its_folder(
    runs, specs, spoilt, capsys
):
    (runs / specs[0].run_path / spoilt).write_text('{"schema": "\\ud800"}')
    assert archive(runs) == 1 and len(lines_of(runs)) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{specs[0].run_id}/{spoilt}: holds half" in said
    assert "it is in its folder alone" in said


def test_a_line_that_is_no_text_costs_itself(runs, specs):
    path = archived(runs, specs) / f"{GROUP}.jsonl"
    first, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([b"\xff" + first, *rest]))
    found, (problem,) = told(runs)
    assert len(found) == 2 and problem.startswith(f"{path}:1: not UTF-8")


def test_an_archive_that_is_a_link_is_not_written_over(runs, tmp_path, typed):
    (runs / f"{GROUP}.jsonl").symlink_to(write(tmp_path / "theirs", []))
    assert "a link" in typed("archive", GROUP, "--runs", runs, code=2)
    assert (tmp_path / "theirs").read_text() == "[]"


def test_steps_that_are_no_parquet_are_named(runs, specs):
    path = archived(runs, specs) / f"{GROUP}.steps.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    refused(r"steps\.parquet: not readable as steps", read_runs(runs)[0].steps)


def test_what_is_no_group_is_one_line(runs, typed):
    before = sorted(runs.rglob("*"))
    assert "no finished run of group h200-none" in typed("archive h200-none --runs", runs, code=2)
    assert "'../x' is not the name of a group" in typed("archive ../x --runs", runs, code=2)
    assert sorted(runs.rglob("*")) == before


def test_one_group_is_read_whatever_signs_are_in_its_name(runs, specs):
    archived(runs, specs)
    (runs / f"{GROUP}.jsonl").rename(runs / "cpu-[smoke].jsonl")
    assert told(runs, group="cpu-s") == ([], [])
    assert len(told(runs, group="cpu-[smoke]")[1]) == 3, "found, and of another group"
