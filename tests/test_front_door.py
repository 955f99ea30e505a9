"""What a newcomer types first: quick answers that fit the terminal, and a quickstart of minutes."""

import contextlib
import ctypes
import os
import re
import resource
import runpy
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pandas as pd
import psutil
import pytest

from qa_lib.data.english import smoke_question
from qa_lib.data.synthetic import vocabulary
from qa_lib.lab import quickstart as quickstart_module
from qa_lib.lab.cli.verbs import VERBS
from qa_lib.lab.quickstart import LOW_BY_DESIGN, PRESET, _is_current
from qa_lib.lab.report.evidence import REFERENCE, load_runs
from qa_lib.lab.search.plan import plan
from qa_lib.lab.sweep import notebook_command
from qa_lib.records.record import new_record, read_record, run_files
from qa_lib.spec.machine import Machine
from qa_lib.spec.variants import tagged
from tests.conftest import slow
from tests.material import ROOT, leave, python, wait_for, without_torch

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
show_start = "import os; print(os.environ['QA_LIB_START'], os.getcwd())"
_become([sys.executable, "-c", show_start], dict(os.environ), sys.argv[1], sys.argv[2])
"""
    (tmp_path / "log").write_text("begun\n")
    python("-c", script, tmp_path / "log", tmp_path)
    log = (tmp_path / "log").read_text()
    assert log == f"begun\ncold, since what is imported touches the GPU {tmp_path}\n"


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


@pytest.fixture(scope="module")
def reference_runs(tmp_path_factory):
    """The committed runs of the reference group alone, which are read in a moment."""
    folder = tmp_path_factory.mktemp("reference")
    shutil.copy(ROOT / "runs" / f"{REFERENCE}.jsonl", folder)
    return load_runs(folder)


@pytest.fixture
def quickstart_here(tmp_path, monkeypatch):
    """Runs quickstart on two runs that end so, without training; its exit code, and the summary."""

    pool = Mock(submit=lambda call, *words: Mock(result=lambda: call(*words)))

    speeds = pd.DataFrame({"samples_per_s": [200.0, 300.0], "ratio": [1.0, 1.5]})
    swept = []

    def sweep(specs, launcher):
        swept.append(([spec.variant for spec in specs], launcher.warm, launcher.command))
        entries = []
        for spec in specs:
            entry = new_record(spec, {}) | {"status": quickstart_here.statuses[spec.variant]}
            entry["quality"]["f1"] = {"A0": 90.0, "A2": 99.5}[spec.variant]
            entry["speed"]["pad_fraction"] = 0.25
            entries.append(entry)
        return entries

    quickstart_here = SimpleNamespace(swept=swept, folder=tmp_path, statuses={})
    stand_ins = {
        "ProcessPoolExecutor": lambda *_, **__: contextlib.nullcontext(pool),
        "tagged": lambda tag: ["A0", "A2"],
        "check_runner": lambda: None,
        "_probe": lambda: (Machine(), {}),
        "sweep": sweep,
        "_reference_speeds": lambda variants: ("GPU", speeds),
        "_answer": lambda folder: f"the answer of {folder.parent.name}",
        "_peaks_on_a_t4": lambda variants: dict.fromkeys(variants, 1536.0),
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(quickstart_module, name, value)

    def run(**statuses):
        quickstart_here.statuses = statuses
        folders = SimpleNamespace(runs=tmp_path / "runs", figures=tmp_path)
        return quickstart_module.main(folders)

    quickstart_here.run = run
    return quickstart_here


def test_a_quickstart_in_which_a_run_fails_keeps_no_summary(quickstart_here):
    assert quickstart_here.run(A0="ok", A2="error") == 1
    assert not (quickstart_here.folder / "quickstart.txt").exists()


def test_a_quickstart_sums_up_its_runs_and_begins_the_longest_first(quickstart_here, capsys):
    assert quickstart_here.run(A0="ok", A2="ok") == 0
    assert quickstart_here.swept == [(["A2", "A0"], True, notebook_command)]
    summary = (quickstart_here.folder / "quickstart.txt").read_text()
    assert capsys.readouterr().out.endswith(summary)
    rows = [line.split() for line in summary.splitlines()]
    assert ["A0", "90.00", "25.0", "%", "1.50", "200", "×1.00"] in rows
    assert ["A2", "99.50", "25.0", "%", "1.50", "300", "×1.50"] in rows
    assert "the answer of A2-s0-" in summary


def test_a_run_that_this_machine_cannot_do_fails_no_quickstart(quickstart_here):
    assert quickstart_here.run(A0="skipped", A2="ok") == 0


def test_the_path_of_the_ladder_leads_there_from_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path(quickstart_module._figure_path())
    assert path.resolve() == (ROOT / "figures" / REFERENCE / "ladder.png").resolve()


def test_speeds_of_the_reference_are_those_of_the_variants_in_their_order(
    reference_runs, monkeypatch
):
    monkeypatch.setattr(quickstart_module, "load_runs", lambda folder: reference_runs)
    gpu, speeds = quickstart_module._reference_speeds(["A2", "A1", "none"])
    assert gpu == "NVIDIA H100 80GB HBM3"
    assert speeds.index.tolist() == ["A2", "A1", "none"]
    assert speeds.loc["A1", "ratio"] == 1
    assert speeds.loc["A2", "samples_per_s"] == pytest.approx(
        speeds.loc["A1", "samples_per_s"] * speeds.loc["A2", "ratio"], rel=1e-3
    )
    assert speeds.loc["none"].isna().all()


def test_the_quickstart_asks_a_question_of_english_and_says_what_the_model_knows(
    tmp_path, monkeypatch
):
    def ask(folder, question, context):
        assert (folder, question) == (tmp_path, "Who came?")
        best = {"text": "", "probability": 0.875}
        return {"nbest": [best], "ms": {"tokenize": 1.2, "forward": 2.4}}

    monkeypatch.setattr("qa_lib.score.predict.ask", ask)
    said = quickstart_module._answer(tmp_path)
    assert "trained here on 144 words" in said
    assert "  Many had gone by March 1912." in said
    assert said.endswith("  -> no answer   (88%, 4 ms)")
    assert widest(said) <= COLUMNS


def test_a_smoke_model_knows_every_word_of_its_english_question():
    example = smoke_question()
    words = re.findall(r"\w+|[.,?]", f"{example.context} {example.question}".lower())
    assert set(words) <= set(vocabulary())


def test_the_quickstart_says_of_what_loses_by_design_that_it_does():
    variants = tagged("quickstart")
    assert LOW_BY_DESIGN.keys() == {"A4-b", "B1"}
    specs = plan(variants, PRESET, machine=Machine())
    entries = [{"quality": {"f1": 100.0}, "speed": {"pad_fraction": 0.5}}] * len(specs)
    table = quickstart_module._table(specs, entries, dict.fromkeys(variants, 12_000.0))
    assert widest(table) <= COLUMNS
    ends = {line.split("  ")[0]: line for line in table.splitlines()}
    for variant in variants:
        assert ("low by design" in ends[variant]) == (variant in LOW_BY_DESIGN)


# What the fork server imports.

PRELOAD = str(ROOT / "qa_lib" / "lab" / "launch" / "preload.py")


@pytest.mark.parametrize(
    ("status", "is_touched"), [(3, False), (0, True), (100, True), (None, False)]
)
def test_imports_that_have_initialized_cuda_are_told(status, is_touched, monkeypatch):
    """By the status of a call of CUDA's driver, 3 where it is not initialized; None: no driver."""
    for name in ("ipykernel", "matplotlib", "papermill", "seaborn"):
        for part in (name, f"{name}.kernelapp", f"{name}.pyplot", f"{name}.cli"):
            monkeypatch.setitem(sys.modules, part, Mock())
    driver = Mock(cuDeviceGetCount=lambda count: status)
    load = Mock(side_effect=OSError) if status is None else lambda name: driver
    monkeypatch.setattr(ctypes, "CDLL", load)
    handler = signal.getsignal(signal.SIGINT)
    names = runpy.run_path(PRELOAD)
    assert names["TOUCHED"] is is_touched
    assert signal.getsignal(signal.SIGINT) is handler


def test_the_server_does_without_what_notebooks_take(monkeypatch, capfd):
    for name in ("ipykernel", "matplotlib", "papermill", "seaborn"):
        for part in (name, f"{name}.kernelapp", f"{name}.pyplot", f"{name}.cli"):
            monkeypatch.setitem(sys.modules, part, None)  # as if it were not installed
    assert "TOUCHED" in runpy.run_path(PRELOAD)
    assert capfd.readouterr() == ("", "")


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
