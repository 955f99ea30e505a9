"""Processes that begin with PyTorch and the library imported: forked from a server that has done so once.

A notebook's kernel is forked as well, so that neither papermill nor the run in the kernel waits for imports, which take
longer than a small training does. The server never asks CUDA anything: a process that is forked from it sees its cards
for the first time.
"""

import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

WARM = "QA_LIB_WARM"  # an environment variable of such processes: how long a run's imports take cannot be said there
PRELOADED = ("qa_lib.run.fit", "qa_lib.train.trainer", "papermill.cli", "ipykernel.ipkernel", "ipykernel.kernelapp")
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([*PRELOADED])


class Warm:
    """A process as subprocess.Popen has it: `command` is that of a Python with -m, its output goes to `log`."""

    def __init__(self, command: list[str], env: dict[str, str], log: Path):
        self._process = _context.Process(target=_become, args=(command[2:], env | {WARM: "1"}, str(log), os.getcwd()))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()


def _become(words: list[str], env: dict[str, str], log: str, folder: str) -> None:
    """Be `python -m WORDS` in an environment and a folder."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stream, 1), os.dup2(stream, 2)
    if words[0] == "papermill":
        _fork_kernel()
    sys.argv = [*words]
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _fork_kernel() -> None:
    """Fork the process that will be the notebook's kernel before papermill has threads, and let it wait."""
    from jupyter_client.provisioning import local_provisioner

    ours, theirs = multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _be_kernel(theirs)
        os._exit(0)
    theirs.close()

    def launch(command: list[str], env: dict[str, str], cwd: str | None = None, **_) -> "Kernel":
        ours.send((command[2:], env, cwd))
        return Kernel(pid)

    local_provisioner.launch_kernel = launch


def _be_kernel(pipe: Connection) -> None:
    """Wait for the kernel's command, and run it; end where none comes."""
    with contextlib.suppress(EOFError):
        words, env, folder = pipe.recv()
        pipe.close()
        os.setsid()
        os.environ.clear()
        os.environ.update(env)
        if folder:
            os.chdir(folder)
        sys.argv = [*words]
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)


class Kernel:
    """A forked kernel as jupyter_client knows it, which is as subprocess.Popen."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int):
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        end = time.monotonic() + (timeout or 3600)
        while self.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
