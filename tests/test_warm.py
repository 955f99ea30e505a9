"""Processes that are forked with PyTorch imported: a notebook's kernel, and how a run begins."""

import multiprocessing
import os
import signal
import sys

import pytest

from qa_lib.lab.launch import warm
from tests.material import wait_for

# jupyter_client and papermill are of an extra.
provisioner = pytest.importorskip("jupyter_client.provisioning.local_provisioner")

SAYS_HOW_PROCESSES_START = """import multiprocessing
print(multiprocessing.get_start_method())
"""
PRINTS_AND_IS_GONE = """import os
print("a line")
os._exit(3)
"""
STARTS_A_PROCESS = """import multiprocessing
import sys
process = multiprocessing.Process(target=print)
process.start()
process.join()
sys.exit(process.exitcode)
"""
IGNORES_SIGTERM = """import signal
import time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path("begun").touch()
time.sleep(60)
"""


@pytest.fixture
def start_kernel(tmp_path, monkeypatch):
    """Return a function that has the forked kernel run some code, as papermill does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def start(code: str) -> warm.Forked:
        (tmp_path / "kernel_code.py").write_text(code)
        return provisioner.launch_kernel(["python", "-m", "kernel_code"], dict(os.environ))

    return start


def test_a_forked_process_starts_others_as_a_cold_one_does(tmp_path, monkeypatch):
    """The workers of a data loader begin in another time where they are started otherwise."""
    (tmp_path / "told.py").write_text(SAYS_HOW_PROCESSES_START)
    monkeypatch.syspath_prepend(tmp_path)
    log = tmp_path / "log"
    process = warm.fork([sys.executable, "-m", "told"], dict(os.environ), log)
    assert process.wait() == 0
    assert log.read_text().split() == [multiprocessing.get_start_method()]


def test_a_line_of_a_forked_process_is_in_its_log_at_once(tmp_path, monkeypatch):
    (tmp_path / "prints.py").write_text(PRINTS_AND_IS_GONE)
    monkeypatch.syspath_prepend(tmp_path)
    log = tmp_path / "log"
    warm.fork([sys.executable, "-m", "prints"], dict(os.environ), log).wait()
    assert log.read_text() == "a line\n"


def test_the_lines_of_a_process_that_is_forked_again_can_be_read(tmp_path, monkeypatch):
    (tmp_path / "prints.py").write_text(PRINTS_AND_IS_GONE)
    monkeypatch.syspath_prepend(tmp_path)
    process = warm.fork_again([sys.executable, "-m", "prints"], dict(os.environ))
    assert list(process.stdout) == ["a line\n"]
    assert process.wait() == 3


def test_a_kernel_may_start_processes_as_a_data_loader_does(start_kernel):
    with warm.forked_kernel():
        kernel = start_kernel(STARTS_A_PROCESS)
        kernel.wait()
    assert kernel.returncode == 0


def test_a_kernel_without_a_command_ends_with_the_block(monkeypatch):
    started = []
    monkeypatch.setattr(warm, "Forked", lambda process: started.append(process) or process.start())
    with warm.forked_kernel():
        assert started[0].is_alive()
    assert started[0].exitcode == -signal.SIGTERM


def test_a_kernel_that_ignores_sigterm_ends_with_the_block(start_kernel, monkeypatch, tmp_path):
    monkeypatch.setattr(warm, "LAST_S", 0.1)
    with warm.forked_kernel():
        kernel = start_kernel(IGNORES_SIGTERM)
        wait_for((tmp_path / "begun").exists)
    assert kernel.wait() == -signal.SIGKILL


def test_after_the_block_a_kernel_is_started_as_before():
    launch_before = provisioner.launch_kernel
    with warm.forked_kernel():
        assert provisioner.launch_kernel is not launch_before
    assert provisioner.launch_kernel is launch_before
