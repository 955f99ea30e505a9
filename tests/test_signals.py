"""Asked to end, every verb does one thing: its children end, records say by what, a line says so, in five seconds.

And a driver that had no time to end anything leaves no run that goes on alone. All with real processes.
"""

import dataclasses
import os
import pty
import signal
import subprocess
import sys
import time
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSCTTY

import psutil
import pytest

from qa_lib import record
from qa_lib.errors import CTRL_C, SIGNALS
from qa_lib.run.fit import fit
from qa_lib.run.plan import plan
from qa_lib.run.process import DRIVER_GONE
from qa_lib.spec import Machine
from tests.conftest import slow
from tests.small import FIT, environment, holders, write_notebook

ROOT = Path(__file__).parent.parent
CPU = Machine(backends=("inductor",), bitsandbytes=True, compiler=True)
GPU = dataclasses.replace(CPU, hardware="h200", gpus=1, sm=90)  # what max-batch is told; its try then runs on the CPU
SYNTHETIC = "--data synthetic:1600 --model tiny"
WORDS = {
    "run": "run A1 --preset smoke",
    "sweep": "sweep --variants A1 --preset smoke",
    "tune": "tune A1 --preset smoke --learning-rate 1e-3 2e-3",
    "max-batch": f"max-batch A1 --limit-gib 0.2 {SYNTHETIC}",
}
SECONDS = 25 if "PYTEST_XDIST_WORKER" in os.environ else 5  # beside other tests it takes longer
SLOW = "import time\nsay = lambda line: time.sleep(60)"  # at a tenth of the steps: long enough for any test


class Lab:
    """A verb at work in a session of its own, as in a terminal of its own."""

    def __init__(self, folder: Path, verb: str, before: tuple[str, ...] = (), **streams):
        self.runs, notebook, self.family = folder / "runs", folder / "notebook.ipynb", []
        write_notebook(notebook, before=SLOW, work=FIT)
        # Through papermill and its kernel: see test_sweep.
        own = environment(notebook, GPU if verb == "max-batch" else CPU, plain=verb == "sweep")
        self.process = subprocess.Popen(
            [*before, sys.executable, "-m", "tests.small", *WORDS[verb].split(), "--runs", str(self.runs)],
            cwd=ROOT, env=os.environ | own, text=True, start_new_session=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams,
        )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in (self.process, *self.family):
            if psutil.pid_exists(process.pid):
                process.kill()

    def wait_for_steps(self) -> None:
        """Wait until a run trains, and note the processes that are there then."""
        self.wait_for(lambda: any(path.stat().st_size for path in self.runs.glob("*/*/steps.jsonl")), 150)
        runs = holders(self.runs) - {self.process.pid}  # which need not be below the driver
        self.family = [*psutil.Process(self.process.pid).children(recursive=True), *map(psutil.Process, runs)]

    def wait_for(self, condition, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.process.poll()
            time.sleep(0.05)

    def records(self) -> list[dict]:
        return [record.read_record(path.parent) for path in self.runs.glob("*/*/record.json")]

    @property
    def alive(self) -> list[psutil.Process]:
        return [child for child in self.family if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


# All signals go through errors.stoppable, and all verbs with processes of their own through launch.Launcher.
CASES = [("sweep", signal.SIGTERM), slow("sweep", signal.SIGINT), *(slow("run", number) for number in SIGNALS)]
CASES += [slow("tune", signal.SIGHUP), slow("max-batch", signal.SIGTERM)]


@pytest.mark.parametrize(("verb", "number"), CASES, ids=lambda value: getattr(value, "name", value))
def test_a_signal_ends_children_and_is_named_in_records_and_on_the_terminal(verb, number, tmp_path):
    with Lab(tmp_path, verb) as lab:
        lab.wait_for_steps()
        begin = time.monotonic()
        lab.process.send_signal(number)  # to the driver alone, as batch systems do
        _, err = lab.process.communicate(timeout=30)
        assert time.monotonic() - begin < SECONDS
        assert lab.process.returncode == 130
        assert err == f"stopped by {SIGNALS[number]}; finished runs are kept\n"
        who = "" if verb == "run" else "the driver was "
        told = [(entry["status"], entry["error"]["message"]) for entry in lab.records()]
        assert told and set(told) == {("killed", f"{who}stopped by {SIGNALS[number]}")}
        lab.wait_for(lambda: not lab.alive, 2)  # what served the driver ends a moment after it


@pytest.mark.slow
def test_a_closing_terminal_reaches_all_processes_and_comes_twice(tmp_path):
    with Lab(tmp_path, "tune") as lab:
        lab.wait_for_steps()
        for _ in range(2):
            os.killpg(lab.process.pid, signal.SIGHUP)
        assert lab.process.communicate(timeout=30)[1].count("\n") == 1
        assert {entry["status"] for entry in lab.records()} == {"killed"}
        lab.wait_for(lambda: not lab.alive, 2)  # what served the driver ends a moment after it


@pytest.mark.slow
def test_a_run_ends_with_the_terminal_that_closes(tmp_path):
    terminal, its = pty.openpty()
    with Lab(tmp_path, "run", stdin=its, stdout=its, stderr=its, preexec_fn=lambda: ioctl(0, TIOCSCTTY, 0)) as lab:
        os.close(its)
        lab.wait_for_steps()
        os.close(terminal)
        assert lab.process.wait(5) == 130
        assert lab.records()[0]["error"]["message"] == f"stopped by {SIGNALS[signal.SIGHUP]}"


@pytest.mark.slow
def test_nohup_keeps_a_run_from_sighup_but_not_from_sigterm(tmp_path):
    with Lab(tmp_path, "run", before=("nohup",)) as lab:
        lab.wait_for_steps()
        lab.process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert lab.process.poll() is None
        lab.process.terminate()
        lab.process.communicate(timeout=30)
        assert lab.records()[0]["error"]["message"] == "stopped by SIGTERM"


@pytest.mark.parametrize(("verb", "before"), [("sweep", ()), slow("tune", ("nohup",))])
def test_a_run_whose_driver_was_killed_ends_and_says_so(verb, before, tmp_path):
    """Under nohup as well, which lets all that it starts ignore SIGHUP."""
    with Lab(tmp_path, verb, before) as lab:
        lab.wait_for_steps()
        lab.process.kill()
        lab.process.communicate()
        lab.wait_for(lambda: not lab.alive, 45)  # it takes three seconds, but for a busy machine
        told = [(entry["status"], entry["error"]["message"]) for entry in lab.records()]
        assert told and set(told) == {("killed", f"stopped by {DRIVER_GONE}")}


def test_ctrl_c_in_a_notebook_is_a_keyboard_interrupt_whose_record_says_killed(tmp_path):
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    (spec,) = plan(["A1"], "smoke", data="synthetic:80", machine=CPU)
    with pytest.raises(KeyboardInterrupt):
        fit(spec, tmp_path, say=interrupt)
    entry = record.read_record(tmp_path / spec.run_path)
    assert (entry["status"], entry["error"]["message"]) == ("killed", f"stopped by {CTRL_C}")
