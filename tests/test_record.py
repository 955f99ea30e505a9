"""Records: what is new, what is refused when it is read, and what older ones are given."""

import dataclasses
import datetime
import functools
import json
import operator
import os
import re
import subprocess
import sys
import types

import pytest

from qa_lib.records import record
from qa_lib.records.archive import read_runs
from tests.material import ROOT, leave, refused
from tests.tiny import planned

ENV = {"python": "3", "gpu": None}


@pytest.fixture
def spec():
    return planned()


def set_value(entry: dict, path: str, value: object) -> None:
    """Set a value of a record; the path is "error.message", say."""
    *sections, name = path.split(".")
    functools.reduce(operator.getitem, sections, entry)[name] = value


# What older records have.


def test_a_score_that_came_later_is_null_in_an_older_record(spec, tmp_path):
    entry = record.new_record(spec, ENV)
    entry["task"]["scores"].remove("loss")
    del entry["quality"]["loss"]
    record.write_record(tmp_path, entry)
    assert record.read_record(tmp_path)["quality"]["loss"] is None


def test_a_score_that_its_task_no_longer_has_is_null_where_an_older_record_lacks_it(spec, tmp_path):
    entry = record.new_record(spec, ENV)
    entry["task"]["scores"].append("bleu")
    record.write_record(tmp_path, entry)
    assert record.read_record(tmp_path)["quality"]["bleu"] is None


def test_a_record_that_says_nothing_of_a_gpu_has_none(spec, tmp_path):
    record.write_record(tmp_path, record.new_record(spec, {"python": "3"}))
    assert record.read_record(tmp_path)["env"]["gpu"] is None


@pytest.mark.parametrize(
    ("section", "name"),
    [("speed", "mfu"), ("speed", "gpu_busy_polled"), ("parallel", "wrapper")],
)
def test_a_value_that_came_later_is_null_in_an_older_record(spec, section, name, tmp_path):
    entry = record.new_record(spec, ENV)
    del entry[section][name]
    record.write_record(tmp_path, entry)
    assert record.read_record(tmp_path)[section][name] is None


@pytest.mark.parametrize(
    ("section", "name", "default"), [("settings", "norms", "native"), ("preset", "warmup", 0.1)]
)
def test_what_could_be_chosen_later_has_its_default_in_an_older_record(
    spec, section, name, default, tmp_path
):
    entry = record.read_record(leave(tmp_path, spec))
    del entry["spec"][section][name]
    record.write_record(tmp_path / spec.run_path, entry)
    (run,) = read_runs(tmp_path)
    assert run.record["spec"][section][name] == default


def test_a_value_that_is_not_known_is_left_out(spec, tmp_path):
    entry = record.new_record(spec, ENV)
    entry["speed"]["later"] = 1
    record.write_record(tmp_path, entry)
    assert "later" not in record.read_record(tmp_path)["speed"]


# What is refused.

NO_RECORDS = [
    ("{}", "schema None is not"),
    ("[]", "schema None is not"),
    ('{"schema": "qa_li', "not readable as JSON"),
    ('{"schema": "other/9"}', "schema 'other/9' is not"),
    ("[" * 100_000, "not readable as JSON"),
]


@pytest.mark.parametrize(("content", "message"), NO_RECORDS)
def test_what_is_no_record_is_refused_by_name(content, message, tmp_path):
    (tmp_path / "record.json").write_text(content)
    refused(f"record.json.*{message}", record.read_record, tmp_path)


@pytest.mark.parametrize(("content", "message"), NO_RECORDS)
def test_what_is_no_record_is_left_out_of_the_runs_by_name(content, message, tmp_path, capsys):
    folder = tmp_path / "cpu-smoke" / "A1-s0-abcdef"
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(content)
    assert not read_runs(tmp_path)
    assert re.search(f"left out: .*A1-s0-abcdef/record.json.*{message}", capsys.readouterr().err)


NO_NAMES = [
    "../x",
    "/etc",
    "..",
    ".",
    "",
    ".git",
    "a/b",
    "a\\b",
    "a\0b",
    "a\nb",
    "a\n",
    "x" * 300,
    "\x1b[2J",
    "-rf",
    "é",
]


@pytest.mark.parametrize("value", NO_NAMES)
@pytest.mark.parametrize("name", ["run_id", "group"])
def test_a_name_that_no_folder_may_have_is_refused(spec, name, value, tmp_path):
    entry = record.new_record(spec, ENV) | {name: value}
    record.write_record(tmp_path, entry)
    refused(f"record.json: {name} is ", record.read_record, tmp_path)


ODD_VALUES = [
    ("status", "fine"),
    ("task.name", "translation"),
    ("task.metric", None),
    ("task.label", 5),
    ("env.gpu", 5),
    ("quality.loss", "low"),
    ("spec.settings.precision", 16),
    ("spec.settings.cuda_graph", "yes"),
    ("spec.settings.engine", None),
]


@pytest.mark.parametrize(("path", "value"), ODD_VALUES)
def test_a_value_of_another_type_is_refused_by_name(spec, path, value, tmp_path):
    entry = record.new_record(spec, ENV)
    set_value(entry, path, value)
    record.write_record(tmp_path, entry)
    message = f"record.json: {path} is {str(value)!r}"
    refused(re.escape(message), record.read_record, tmp_path)


NO_NUMBERS = [
    ("spec.seed", True),
    ("spec.seed", -1),
    ("spec.preset.max_length", True),
    ("spec.preset.max_length", 0),
    ("spec.preset.epochs", -1),
    ("spec.preset.effective_batch", 0),
    ("spec.preset.learning_rate", "fast"),
    ("spec.settings.micro_batch", 0),
    ("spec.settings.micro_batch", True),
    ("speed.samples_per_s", True),
    ("time.steps", False),
]


@pytest.mark.parametrize(("path", "value"), NO_NUMBERS)
def test_a_number_is_no_truth_value_and_a_size_is_above_0(spec, path, value, tmp_path):
    entry = record.new_record(spec, ENV)
    set_value(entry, path, value)
    record.write_record(tmp_path, entry)
    name = path.rpartition(".")[2]
    refused(name, record.read_record, tmp_path)


def test_a_number_that_no_column_holds_is_refused(spec, tmp_path):
    entry = record.new_record(spec, ENV)
    entry["quality"]["f1"] = 10**400
    record.write_record(tmp_path, entry)
    refused(r"record.json: .*(quality\.f1|integer string)", record.read_record, tmp_path)


def test_half_a_character_is_refused(spec, tmp_path):
    entry = record.new_record(spec, ENV)
    entry["error"]["message"] = "\ud800"
    (tmp_path / "record.json").write_text(json.dumps(entry))
    refused("record.json: holds half a character", record.read_record, tmp_path)


OTHER_GROUPS = [
    ("spec.hardware", "h200"),
    ("spec.preset.name", "bench"),
    ("spec.preset.task", "lm"),
    ("task.name", "lm"),
    ("task.metric", "bleu"),
    ("task.label", "x" * 500),
]


@pytest.mark.parametrize(("path", "value"), OTHER_GROUPS)
def test_a_record_of_another_group_costs_itself_and_not_its_group(spec, path, value, tmp_path):
    folder = leave(tmp_path, spec)
    entry = record.read_record(folder)
    set_value(entry, path, value)
    record.write_record(folder, entry)
    left_out = []
    runs = read_runs(tmp_path, left_out=lambda group, problem: left_out.append(str(problem)))
    assert runs == []
    (message,) = left_out
    assert f"{folder.name}/record.json: " in message
    assert len(message) < 400


# What is written.


def test_a_new_record_holds_what_is_known_before_the_work_begins(spec):
    entry = record.new_record(spec, ENV)
    assert entry["status"] == "running"
    assert entry["env"] == ENV
    assert entry["spec"]["variant"] == spec.variant
    assert entry["spec"]["hash"] == spec.hash
    assert entry["data"] | spec.data == entry["data"]
    assert entry["model"] | spec.model == entry["model"]
    assert set(entry["quality"]) == set(entry["task"]["scores"])
    assert set(entry["speed"].values()) == {None}


def test_a_new_record_shares_no_list_with_its_spec(spec):
    entry = record.new_record(spec, ENV)
    before = list(spec.adjusted)
    entry["spec"]["adjusted"].append("a change")
    assert spec.adjusted == before


def test_a_record_reads_as_it_was_written(spec, tmp_path):
    entry = record.new_record(spec, ENV)
    record.write_record(tmp_path, entry)
    assert record.read_record(tmp_path) == entry


def test_what_no_text_file_can_hold_is_written_as_question_marks(spec, tmp_path):
    entry = record.new_record(spec, ENV)
    entry["error"]["message"] = "odd \udcff\ud800 é 😀"
    record.write_record(tmp_path, entry)
    assert record.read_record(tmp_path)["error"]["message"] == "odd ?? é 😀"


# Replaces the record in a folder without pause for two seconds, by short and long ones in turn.
WRITER = """
import sys, time
from pathlib import Path
from qa_lib.records.record import read_record, write_record

folder = Path(sys.argv[1])
entry = read_record(folder)
end = time.monotonic() + 1
while time.monotonic() < end:
    for length in (10, 100_000):
        entry["error"]["message"] = "x" * length
        write_record(folder, entry)
"""


def test_a_reader_never_sees_a_torn_record(spec, tmp_path):
    record.write_record(tmp_path, record.new_record(spec, ENV))
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT)
    lengths = set()
    while writer.poll() is None:
        lengths.add(len(record.read_record(tmp_path)["error"]["message"] or ""))
    assert writer.returncode == 0
    assert {10, 100_000} <= lengths <= {0, 10, 100_000}


# What a run was more than its machine could do.

FAILURES = [
    ("oom", "OutOfMemoryError", 1, True),
    ("oom", "OutOfMemoryError", 500, True),
    ("error", "CppCompileError", None, True),
    ("error", "CppCompileError", record.FIRST_STEPS, True),
    ("error", "CppCompileError", record.FIRST_STEPS + 1, False),
    ("error", "NonFiniteLoss", 1, True),
    ("error", "NonFiniteLoss", 2, False),
    ("error", "DataError", 1, False),
    ("killed", "killed", 1, False),
    ("ok", None, None, False),
]


@pytest.mark.parametrize(("status", "kind", "step", "expected"), FAILURES)
def test_out_of_memory_and_early_errors_are_more_than_the_machine_can_do(
    spec, status, kind, step, expected
):
    entry = record.new_record(spec, ENV) | {"status": status}
    entry["error"] |= {"kind": kind, "step": step}
    assert record.unable(entry) is expected


@pytest.mark.parametrize("status", ["oom", "error"])
def test_what_fails_after_the_training_is_not_more_than_the_machine_can_do(spec, status):
    entry = record.new_record(spec, ENV) | {"status": status}
    entry["time"]["steps"] = 8
    assert not record.unable(entry)


@pytest.mark.parametrize("status", record.FINISHED)
def test_a_finished_run_has_its_result(spec, status):
    entry = record.new_record(spec, ENV) | {"status": status}
    assert record.with_result(entry) is entry


@pytest.mark.parametrize("status", ["error", "killed", "running"])
def test_a_run_without_a_result_is_refused_in_one_line(spec, status):
    entry = record.new_record(spec, ENV) | {"status": status}
    entry["error"]["message"] = "two\nlines"
    message = refused(f"{spec.run_id}: {status}, two lines", record.with_result, entry, " (hint)")
    assert message.endswith(" (hint)")


# Values of a new record, its end, and what lies around it.


@pytest.fixture
def entry(spec, monkeypatch):
    """A new record, of a commit that git is not asked for."""
    monkeypatch.setenv("QA_LIB_COMMIT", "a1" * 20)
    return record.new_record(spec, ENV)


def test_a_new_record_has_every_value_of_its_spec(spec):
    spec = dataclasses.replace(
        spec, seed=7, hardware="h200", world=4, stages=2, search="tune", sm=90, adjusted=["a"]
    )
    entry = record.new_record(spec, ENV)["spec"]
    expected = {
        "variant": "A1",
        "seed": 7,
        "hash": spec.hash,
        "hardware": "h200",
        "world": 4,
        "stages": 2,
        "search": "tune",
        "sm": 90,
        "adjusted": ["a"],
        "preset": dataclasses.asdict(spec.preset),
    }
    assert {name: entry[name] for name in expected} == expected


def test_a_record_has_the_settings_that_were_asked_for_and_not_those_of_the_machine(spec):
    fewer = dataclasses.replace(spec.settings, dropout="none")
    entry = record.new_record(dataclasses.replace(spec, settings=fewer), ENV)
    assert entry["spec"]["settings"] == dataclasses.asdict(spec.asked)
    assert entry["spec"]["settings"]["dropout"] == "philox"


@pytest.fixture
def clock(monkeypatch):
    """Let the time be noon and some microseconds, in UTC."""
    noon = datetime.datetime(2026, 1, 2, 12, 0, 3, 456, tzinfo=datetime.UTC)
    stopped = types.SimpleNamespace(datetime=types.SimpleNamespace(now=noon.astimezone))
    stopped.UTC = datetime.UTC
    monkeypatch.setattr(record, "datetime", stopped)
    return "2026-01-02T12:00:03+00:00"


def test_a_record_says_when_it_was_made_and_when_it_ended(spec, tmp_path, clock):
    entry = record.new_record(spec, ENV)
    assert (entry["time"]["started"], entry["time"]["ended"]) == (clock, None)
    entry["time"]["started"] = "before"
    entry["error"]["step"] = 3
    ended = record.finish(tmp_path, entry, "error", {"kind": "Odd", "message": "why"})
    assert (ended["time"]["started"], ended["time"]["ended"]) == ("before", clock)
    assert ended["error"] == {"kind": "Odd", "message": "why", "step": 3}
    assert record.read_record(tmp_path) == ended


def test_a_record_is_lines_that_end(entry, tmp_path):
    record.write_record(tmp_path, entry)
    text = (tmp_path / "record.json").read_text()
    assert text.startswith('{\n "') and text.endswith("\n}\n")


def test_another_document_says_its_schema_its_run_and_its_code(monkeypatch):
    monkeypatch.setattr(record, "code_version", lambda: {"commit": "a1", "dirty": True})
    assert record.document_header("x/1", "A1-s0-abcdef", "cpu-smoke") == {
        "schema": "x/1",
        "run_id": "A1-s0-abcdef",
        "group": "cpu-smoke",
        "code": {"commit": "a1", "dirty": True},
    }


def test_a_folder_without_a_record_says_so(tmp_path):
    refused("record.json: no record", record.read_record, tmp_path)


def test_a_record_that_is_no_utf_8_or_a_pipe_is_refused_by_name(tmp_path):
    (tmp_path / "record.json").write_bytes(b"\xff")
    refused("record.json: not readable as JSON", record.read_record, tmp_path)
    (tmp_path / "record.json").unlink()
    os.mkfifo(tmp_path / "record.json")
    refused("record.json: not a regular file", record.read_record, tmp_path)


@pytest.mark.parametrize("half", ["\\ud800", "\\uD800", "\\uDfFf"])
def test_half_a_character_is_refused_however_it_is_written(entry, half, tmp_path):
    entry["error"]["message"] = "HALF"
    (tmp_path / "record.json").write_text(json.dumps(entry).replace("HALF", half))
    refused("record.json: holds half a character", record.read_record, tmp_path)


def test_a_whole_character_that_is_written_in_two_halves_is_read(entry, tmp_path):
    entry["error"]["message"] = "😀"
    (tmp_path / "record.json").write_text(json.dumps(entry))
    assert record.read_record(tmp_path)["error"]["message"] == "😀"


def test_files_of_runs_are_found_whatever_signs_are_in_the_folders_name(tmp_path):
    runs = tmp_path / "runs [1]*"
    path = runs / "cpu-smoke" / "A1-s0-abcdef" / "record.json"
    path.parent.mkdir(parents=True)
    path.touch()
    (runs / "cpu-smoke" / "record.json").touch()
    assert record.run_files(runs, "record.json") == [path]


@pytest.mark.parametrize("name", ["label", "higher_is_better"])
def test_a_score_that_means_another_thing_is_of_another_group(entry, name):
    record.check_group("record.json", entry)
    entry["task"][name] = None
    refused(
        f"record.json: task.{name} is 'None', and not ", record.check_group, "record.json", entry
    )


LOG = [
    ('{"step": 1, "loss": null, "ms": 2.5}', True),
    ('{"step": 2, "loss": 0.5}', True),
    ('{"step": 0, "loss": 0.5}', False),
    ('{"step": -1}', False),
    ('{"step": 3, "loss": NaN}', False),
    ('{"step": 3, "loss": Infinity}', False),
    ('{"step": 3, "loss": "low"}', False),
    ('{"loss": 0.5}', False),
    ("[3]", False),
    ("", False),
    ('{"step": 3, "lo', False),
]


def test_a_spoilt_line_of_a_log_costs_itself(tmp_path):
    (tmp_path / "steps.jsonl").write_text("\n".join(line for line, _ in LOG))
    expected = [json.loads(line) for line, is_whole in LOG if is_whole]
    assert record.read_steps(tmp_path / "steps.jsonl") == expected


def test_without_a_log_there_are_no_steps(tmp_path):
    assert record.read_steps(tmp_path / "steps.jsonl") == []
    assert record.read_steps(tmp_path) == []


@pytest.mark.parametrize(
    "kind", ["OSError", "UserError", "SpecError", "UnknownName", "RecordError"]
)
def test_a_mistake_before_the_first_step_is_not_more_than_the_machine_can_do(entry, kind):
    entry = entry | {"status": "error"}
    entry["error"] |= {"kind": kind, "step": None}
    assert not record.unable(entry)


def test_a_name_has_200_signs_at_most(entry, tmp_path):
    record.write_record(tmp_path, entry | {"run_id": "a" * 200})
    assert record.read_record(tmp_path)["run_id"] == "a" * 200
    record.write_record(tmp_path, entry | {"run_id": "a" * 201})
    refused("record.json: run_id is ", record.read_record, tmp_path)


@pytest.mark.parametrize("number", [-(2**63), 2**63 - 1, -0.5])
def test_a_number_that_a_column_holds_is_taken(entry, number, tmp_path):
    entry["quality"]["f1"] = number
    record.write_record(tmp_path, entry)
    assert record.read_record(tmp_path)["quality"]["f1"] == number


@pytest.mark.parametrize("number", [-(2**63) - 1, 2**63])
def test_a_number_beyond_64_bits_is_refused(entry, number, tmp_path):
    entry["quality"]["f1"] = number
    record.write_record(tmp_path, entry)
    refused("record.json: quality.f1 is ", record.read_record, tmp_path)


def test_a_new_record_has_no_number_that_was_not_measured(entry):
    for section in ("speed", "memory", "energy", "parallel", "error"):
        values = {name: v for name, v in entry[section].items() if not isinstance(v, dict)}
        assert set(values.values()) == {None}, section
    assert set(entry["time"]["step_ms"].values()) == {None}
    assert set(entry["parallel"]["noise"].values()) == {None}


@pytest.mark.parametrize(("step", "expected"), [(3, True), (4, False)])
def test_a_kernel_that_cannot_be_made_shows_within_three_steps(entry, step, expected):
    entry["error"] |= {"kind": "CppCompileError", "step": step}
    assert record.unable(entry | {"status": "error"}) is expected
