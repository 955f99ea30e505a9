"""What a newcomer types first: quick answers that fit the terminal, and a quickstart of minutes."""

import os
import re
import resource
from pathlib import Path

import psutil
import pytest

from qa_lib.lab.cli.verbs import VERBS
from qa_lib.lab.quickstart import PRESET, _is_current
from qa_lib.lab.search.plan import plan
from qa_lib.records.record import read_record, run_files
from qa_lib.spec.machine import Machine
from tests.conftest import slow
from tests.material import leave, python, wait_for, without_torch

COLUMNS = 100  # of a terminal


def child_seconds() -> float:
    """Return the processor time (s) of processes that have ended, whatever else is at work here."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime


def widest(printed: str) -> int:
    """Return the length of the longest line."""
    return max(len(line) for line in printed.splitlines())


@pytest.mark.parametrize("words", [["--help"], *([verb, "--help"] for verb in VERBS)], ids=" ".join)
def test_help_fits_the_terminal_and_answers_at_once_without_torch(words, tmp_path):
    before = child_seconds()
    printed = without_torch(tmp_path, "-m", "qa_lib", *words)
    assert child_seconds() - before < 0.5  # on a quiet processor 0.1
    assert widest(printed) <= COLUMNS


@pytest.mark.parametrize(
    "words",
    [
        ["variants"],
        ["export", "--csv", "OUT/table.csv", "--group", "h200-vram"],
        slow(["report", "--group", "h200-vram", "--figures", "OUT"]),
    ],
    ids=" ".join,
)
def test_what_does_without_torch_fits_the_terminal(words, tmp_path):
    words = [word.replace("OUT", str(tmp_path / "out")) for word in words]
    printed = without_torch(tmp_path, "-m", "qa_lib", *words)
    assert widest(printed) <= COLUMNS + len(str(tmp_path))


def test_the_table_of_memory_fits_the_terminal(typed):
    table, _ = typed("memory --family E --preset bench --micro-batch 32").split("\npeak in", 1)
    assert widest(table) <= COLUMNS


def test_a_run_of_a_sweep_is_forked_from_a_warm_process(swept):
    record = read_record(swept.folder_of("A1"))
    assert record["status"] == "ok"
    assert record["time"]["first_step_s"] is None  # which only a process of its own can tell
    assert record["time"]["notebook_s"]


def is_of_a_sweep(process: psutil.Process) -> bool:
    """Whether a process was started with the environment of the sweep, or forked from one."""
    return "SWEPT" in (process.info["environ"] or {})


def test_a_sweep_leaves_no_process(swept):
    # The server of warm processes ends once its driver has.
    wait_for(lambda: not any(map(is_of_a_sweep, psutil.process_iter(["environ"]))))


def test_a_process_is_cold_where_the_imports_have_touched_the_gpu(tmp_path):
    script = """import os, sys, types
sys.modules["qa_lib.lab.launch.preload"] = types.SimpleNamespace(TOUCHED=True)
from qa_lib.lab.launch.warm import _become
show_start = "import os; print(os.environ['QA_LIB_START'])"
_become([sys.executable, "-c", show_start], dict(os.environ), sys.argv[1], ".")
"""
    python("-c", script, tmp_path / "log")
    log = (tmp_path / "log").read_text()
    assert log == "cold, since what is imported touches the GPU\n"


def quickstart(folder: Path) -> str:
    """Return what quickstart prints, with its runs and figures below a folder."""
    done = python(
        *["-m", "qa_lib", "quickstart"],
        *["--runs", folder / "runs", "--figures", folder / "figures"],
    )
    return done.stdout + done.stderr


def records_below(folder: Path) -> list[bytes]:
    """Return the content of every record below a folder."""
    return [path.read_bytes() for path in run_files(folder, "record.json")]


@pytest.mark.parametrize(("written_at", "is_current"), [(150, False), (250, True)])
def test_a_summary_of_the_quickstart_is_kept_while_no_run_is_newer(
    written_at, is_current, tmp_path
):
    specs = plan(["A0", "A2"], PRESET, machine=Machine())
    for spec, ended_at in zip(specs, (100, 200), strict=True):
        os.utime(leave(tmp_path, spec) / "record.json", (ended_at, ended_at))
    summary = tmp_path / "quickstart.txt"
    summary.touch()
    os.utime(summary, (written_at, written_at))
    assert _is_current(summary, ["A0", "A2"], tmp_path) is is_current


@pytest.mark.slow
def test_the_quickstart_fits_one_screen_and_runs_nothing_twice(tmp_path):
    printed = quickstart(tmp_path)
    assert len(printed.splitlines()) <= 80
    assert widest(printed) <= COLUMNS + len(str(tmp_path))
    assert "E-packed  99." in printed
    assert "-> " in printed
    for path in re.findall(rf"{tmp_path}\S+", printed):
        assert os.path.exists(path)

    records = records_below(tmp_path / "runs")
    before = child_seconds()
    assert quickstart(tmp_path).strip() in printed
    assert child_seconds() - before < 10
    assert records_below(tmp_path / "runs") == records
