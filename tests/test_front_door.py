"""What a newcomer types first: commands that answer at once, a quickstart of minutes, tables that fit the terminal."""

import os
import re
import resource

import psutil
import pytest

from qa_lib.lab.cli.verbs import VERBS
from qa_lib.records.record import read_record, run_files
from tests.conftest import slow
from tests.material import python, wait_for, without_torch


def run(*words, **environment):
    done = python(*words, **environment)
    return done.stdout + done.stderr


def child_seconds() -> float:
    """What processes that have ended have kept a processor busy for, whatever else is at work here."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime


COMMANDS = [[verb, "--help"] for verb in VERBS]
COMMANDS += [["variants"], ["export", "--csv", "OUT/table.csv", "--group", "h200-vram"]]
COMMANDS += [slow(["report", "--group", "h200-vram", "--figures", "OUT"])]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_imports_what_it_needs_and_fits_the_terminal(words, tmp_path):
    """`memory`, `profile`, `quantize`, `run` and `predict` need torch, and a sweep in a child."""
    before = child_seconds()
    words = [word.replace("OUT", str(tmp_path / "out")) for word in words]
    said = without_torch(tmp_path, "-m", "qa_lib", *words)
    seconds = child_seconds() - before
    assert said and max(map(len, said.splitlines())) <= 100 + len(str(tmp_path))
    if "--help" in words:  # 0.3 s of a quiet processor
        assert seconds < 1.0


def test_the_table_of_memory_fits_the_terminal(typed):
    said = typed("memory --family E --preset bench --micro-batch 32")
    assert max(map(len, said.split("\npeak in")[0].splitlines())) <= 100


def test_a_run_is_forked_and_leaves_nothing(swept):
    """In a process of its own that knows that it is warm; nothing of it is there afterwards."""
    entry = read_record(swept.folder_of("A1"))
    assert (
        entry["status"] == "ok"
        and entry["time"]["first_step_s"] is None
        and entry["time"]["notebook_s"]
    )
    # The server ends once its driver has. What a process was started with, what it forks has, too.
    wait_for(
        lambda: (
            not any(
                "SWEPT" in (each.info["environ"] or {}) for each in psutil.process_iter(["environ"])
            )
        )
    )


def test_a_process_is_cold_where_the_imports_have_touched_the_gpu(tmp_path):
    script = """import os, sys, types
sys.modules["qa_lib.lab.launch.preload"] = types.SimpleNamespace(TOUCHED=True)
from qa_lib.lab.launch.warm import _become
_become([sys.executable, "-c", "import os; print(os.environ['QA_LIB_START'])"], dict(os.environ), sys.argv[1], ".")"""
    run("-c", script, tmp_path / "log")
    assert (tmp_path / "log").read_text() == "cold, since what is imported touches the GPU\n"


@pytest.mark.slow
def test_the_quickstart_fits_one_screen_and_runs_nothing_twice(tmp_path):
    words = [
        "-m",
        "qa_lib",
        "quickstart",
        "--runs",
        tmp_path / "runs",
        "--figures",
        tmp_path / "figures",
    ]
    first = run(*words)
    lines = first.splitlines()
    assert len(lines) <= 80 and max(map(len, lines)) <= 100 + len(str(tmp_path))
    assert "E-packed  99." in first and "-> " in first
    assert all(map(os.path.exists, re.findall(rf"{tmp_path}\S+", first)))
    records = [path.read_bytes() for path in run_files(tmp_path / "runs", "record.json")]
    before = child_seconds()
    assert run(*words).strip() in first
    assert child_seconds() - before < 10
    assert records == [path.read_bytes() for path in run_files(tmp_path / "runs", "record.json")]
