"""Asked to end, every verb ends its children in seconds, and says by what in records and in a line.

A driver that is killed, and so cannot end anything, leaves no run that goes on alone. All of this
is tested with real processes.
"""

import os
import pty
import signal
import subprocess
import sys
import threading
import time
import types
from fcntl import ioctl
from termios import TIOCSCTTY
from unittest.mock import Mock

import psutil
import pytest

from qa_lib import signals
from qa_lib.lab.launch.anywhere import fit
from qa_lib.lab.launch.driver import DRIVER, DRIVER_GONE, check_driver
from qa_lib.lab.launch.process import kill
from qa_lib.signals import CTRL_C, SIGNALS, Stopped
from tests.conftest import slow
from tests.material import ROOT, end_of, refused, wait_for
from tests.small import FIT, environment, holders, write_notebook
from tests.tiny import CPU, H200, planned

COMMANDS = {
    "run": "run A1 --preset smoke",
    "sweep": "sweep --variants A1 --preset smoke",
    "tune": "tune A1 --preset smoke --learning-rate 1e-3 2e-3",
    "max-batch": "max-batch A1-fp32 --limit-gib 0.2 --data synthetic:80 --model tiny",
}
SECONDS = 5  # in which a verb must have ended
if "PYTEST_XDIST_WORKER" in os.environ:
    SECONDS = 25  # beside other tests it takes longer
# A run that waits at a tenth of its steps, for longer than any test takes.
SLOW = "import time\nsay = lambda line: time.sleep(60)"


class Lab:
    """A verb at work in a session of its own, as in a terminal of its own."""

    def __init__(self, folder, verb: str, before: tuple[str, ...] = (), **streams):
        self.runs = folder / "runs"
        self.family = []  # the processes at work, once a run trains
        notebook = folder / "notebook.ipynb"
        write_notebook(notebook, before=SLOW, work=FIT)
        # The machine that the verb is told it is on; max-batch then tries on the CPU, in fp32.
        machine = H200 if verb == "max-batch" else CPU
        # Runs go through papermill and its kernel but for a sweep's: those are in test_sweep.
        told = environment(notebook, machine, plain=verb == "sweep")
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": ROOT, "text": True}
        options |= streams
        lab = [sys.executable, "-m", "tests.small", *COMMANDS[verb].split()]
        self.process = subprocess.Popen(
            [*before, *lab, "--runs", str(self.runs)],
            env=os.environ | told,
            start_new_session=True,
            **options,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in (self.process, *self.family):
            if psutil.pid_exists(process.pid):
                process.kill()

    def wait_for_steps(self) -> None:
        """Wait until a run trains, while the driver lives, and note all processes in `family`."""
        wait_for(lambda: self.process.poll() is not None or self.trains(), 400)
        assert self.process.poll() is None
        children = psutil.Process(self.process.pid).children(recursive=True)
        # The processes of runs need not be below the driver.
        of_runs = holders(self.runs) - {self.process.pid}
        self.family = [*children, *map(psutil.Process, of_runs)]

    def trains(self) -> bool:
        """Return whether a run has logged a step."""
        return any(log.stat().st_size for log in self.runs.glob("*/*/steps.jsonl"))

    def ends(self) -> set[tuple]:
        """Return the status of each run and what is said of it."""
        return {end_of(path.parent) for path in self.runs.glob("*/*/record.json")}

    @property
    def alive(self) -> list[psutil.Process]:
        """The processes of `family` that have not ended."""
        alive = []
        for process in self.family:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
        return alive


# One default case is enough, as all signals go through errors.stoppable, and all verbs with
# processes through local.Launcher.
CASES = [
    ("sweep", signal.SIGTERM),
    slow("sweep", signal.SIGINT),
    *(slow("run", number) for number in SIGNALS),
    slow("tune", signal.SIGHUP),
    slow("max-batch", signal.SIGTERM),
]


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
        assert lab.ends() == {("killed", f"{who}stopped by {SIGNALS[number]}")}
        wait_for(lambda: not lab.alive)  # what served the driver ends a moment after it


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT], ids=lambda number: number.name)
def test_what_a_terminal_sends_reaches_all_processes_and_may_come_twice(number, tmp_path):
    """A terminal sends a signal when it closes, and for Ctrl-C.

    It goes to the driver, to papermill and to the kernel.
    """
    with Lab(tmp_path, "tune") as lab:
        lab.wait_for_steps()
        for _ in range(2):
            os.killpg(lab.process.pid, number)
        _, err = lab.process.communicate(timeout=30)
        assert err == f"stopped by {SIGNALS[number]}; finished runs are kept\n"
        assert {status for status, _ in lab.ends()} == {"killed"}
        wait_for(lambda: not lab.alive)


@pytest.mark.slow
def test_a_run_ends_with_the_terminal_that_closes(tmp_path):
    terminal, stream = pty.openpty()
    with Lab(
        tmp_path,
        "run",
        stdin=stream,
        stdout=stream,
        stderr=stream,
        preexec_fn=lambda: ioctl(0, TIOCSCTTY, 0),
    ) as lab:
        os.close(stream)
        lab.wait_for_steps()
        os.close(terminal)
        assert lab.process.wait(SECONDS) == 130
        assert lab.ends() == {("killed", f"stopped by {SIGNALS[signal.SIGHUP]}")}


@pytest.mark.slow
def test_nohup_keeps_a_run_from_sighup_but_not_from_sigterm(tmp_path):
    with Lab(tmp_path, "run", before=("nohup",)) as lab:
        lab.wait_for_steps()
        lab.process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert lab.process.poll() is None
        lab.process.terminate()
        lab.process.communicate(timeout=30)
        assert lab.ends() == {("killed", "stopped by SIGTERM")}


@pytest.mark.parametrize(("verb", "before"), [("sweep", ()), slow("tune", ("nohup",))])
def test_a_run_whose_driver_was_killed_ends_and_says_so(verb, before, tmp_path):
    """This holds under nohup as well, by which all that it starts ignores SIGHUP."""
    with Lab(tmp_path, verb, before) as lab:
        lab.wait_for_steps()
        lab.process.kill()
        lab.process.communicate()
        wait_for(lambda: not lab.alive)
        assert lab.ends() == {("killed", f"stopped by {DRIVER_GONE}")}


def test_ctrl_c_in_a_notebook_is_a_keyboard_interrupt_whose_record_says_killed(tmp_path):
    spec = planned()
    with pytest.raises(KeyboardInterrupt):
        fit(spec, tmp_path, say=Mock(side_effect=KeyboardInterrupt))
    assert end_of(tmp_path / spec.run_path) == ("killed", f"stopped by {CTRL_C}")


def is_alive(number: int) -> bool:
    """Return whether a process is at work: one that has ended may wait to be collected."""
    return psutil.pid_exists(number) and psutil.Process(number).status() != psutil.STATUS_ZOMBIE


def test_a_process_is_killed_with_its_children_and_theirs():
    child = "sleep 300 & echo $!; wait"
    process = subprocess.Popen(
        ["sh", "-c", f"sh -c '{child}' & wait"], stdout=subprocess.PIPE, text=True
    )
    grandchild = int(process.stdout.readline())
    try:
        assert is_alive(grandchild)
        kill(process)
        assert not is_alive(grandchild)
    finally:
        if is_alive(grandchild):
            os.kill(grandchild, signal.SIGKILL)


# The block of `stoppable` by itself, in this process.


@pytest.fixture
def clock(monkeypatch):
    """The seconds of a clock that tests set."""
    now = types.SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(signals.time, "monotonic", lambda: now.seconds)
    return now


def stop_of(number: int) -> str | None:
    """Return the message of the Stopped that a signal raises now; None where it raises none.

    The signal is not sent: one that nothing handles would end the tests.
    """
    handler = signal.getsignal(number)
    assert callable(handler)
    try:
        handler(number, None)
    except Stopped as stop:
        return str(stop)
    return None


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (signal.SIGINT, "SIGINT (Ctrl-C)"),
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGHUP, "SIGHUP (its terminal is gone)"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_each_signal_that_asks_for_an_end_stops_a_block_by_its_name(number, name):
    with signals.stoppable():
        assert stop_of(number) == name


def test_a_signal_that_is_sent_is_raised_in_the_block():
    with pytest.raises(Stopped, match="SIGTERM"), signals.stoppable():
        assert callable(signal.getsignal(signal.SIGTERM))
        signal.raise_signal(signal.SIGTERM)


def test_a_block_may_have_names_of_its_own_for_signals():
    with signals.stoppable(dict.fromkeys(SIGNALS, "a wish")):
        assert stop_of(signal.SIGTERM) == "a wish"


class AskedToEndInAFinalizer:
    """Its finalizer sends SIGTERM, and Python ignores what is raised there."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_that_comes_within_a_finalizer_still_ends_the_block():
    sends = AskedToEndInAFinalizer()
    with pytest.raises(Stopped, match="SIGTERM"), signals.stoppable():
        del sends
        time.sleep(SECONDS)


def test_what_else_a_finalizer_raises_is_left_to_the_hook_before(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)

    class Fails:
        def __del__(self):
            raise ValueError("a fault")

    fails = Fails()
    with signals.stoppable():
        del fails
    assert [str(unraisable.exc_value) for unraisable in told] == ["a fault"]
    assert sys.unraisablehook == told.append


def test_signals_that_follow_within_three_seconds_are_the_same_wish(clock):
    seen = []
    with signals.stoppable():
        for seconds in (0.0, 2.9, 3.0, 5.9, 6.0, 20.0, 20.0):
            clock.seconds = seconds
            seen.append(stop_of(signal.SIGTERM) is not None)
    assert seen == [True, False, True, False, True, True, False]


def test_handlers_are_as_before_after_a_block_that_was_stopped():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with pytest.raises(Stopped), signals.stoppable():
            raise Stopped
        after = {number: signal.getsignal(number) for number in SIGNALS}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert after == before


def test_a_signal_that_is_ignored_stays_so():
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.stoppable():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, handler)


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (Stopped("SIGTERM"), "stopped by SIGTERM"),
        (KeyboardInterrupt(), f"stopped by {CTRL_C}"),
        (SystemExit(3), "stopped by SystemExit"),
    ],
    ids=["signal", "notebook", "other"],
)
def test_what_stopped_a_run_is_said(problem, said):
    assert signals.stopped_by(problem) == said


@pytest.mark.parametrize(
    ("folder", "is_planned"), [("a-run", True), ("link", True), ("b-run", False)]
)
def test_a_process_trains_no_other_run_than_that_of_its_driver(
    folder, is_planned, tmp_path, monkeypatch
):
    (tmp_path / "a-run").mkdir()
    (tmp_path / "link").symlink_to("a-run")
    check_driver(tmp_path / folder)
    monkeypatch.setenv(DRIVER, str(tmp_path / "a-run" / ".driver.lock"))
    if is_planned:
        check_driver(tmp_path / folder)
    else:
        refused("^b-run: planned was a-run, so data,", check_driver, tmp_path / folder)


# A process that waits outside of Python: it locks a mutex of the C library twice.
STUCK = """
import ctypes
from qa_lib.signals import ended_soon, stoppable

with stoppable(), ended_soon(0.5):
    library = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    print("stuck", flush=True)
    library.pthread_mutex_lock(mutex)
"""


def test_a_process_that_never_comes_back_to_python_ends_all_the_same():
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "stuck\n"
    process.terminate()
    assert process.wait(SECONDS) == 1


def test_a_process_that_was_not_asked_to_end_goes_on_after_the_block():
    with signals.ended_soon(0.0):
        pass
    time.sleep(0.2)
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize(("number", "codes"), [(signal.SIGTERM, [1]), (signal.SIGCHLD, [])])
def test_signals_that_ask_for_no_end_end_no_process(number, codes, monkeypatch):
    ended = []
    monkeypatch.setattr(signals.os, "_exit", ended.append)
    reader, writer = os.pipe()
    os.write(writer, bytes([number]))
    os.close(writer)
    signals._end_after(reader, 0.0)
    assert ended == codes


def test_after_a_block_signals_are_told_to_whom_they_were_told_before():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    threads = threading.active_count()
    try:
        with signals.ended_soon(1.0):
            assert threading.active_count() == threads + 1
        assert signal.set_wakeup_fd(-1) == writer
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)
    wait_for(lambda: threading.active_count() == threads)
