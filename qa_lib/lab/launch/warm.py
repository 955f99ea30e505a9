"""Processes that begin with PyTorch and the library imported: forked from a server that has them.

Imports take longer than a small training. A notebook's kernel is forked as well, so that neither
papermill nor the run in the kernel waits for them. Each run still has processes of its own, forked
before anything asks CUDA: it sees its cards for the first time, and what it leaves behind dies with
it. Where the imports have touched CUDA all the same, the process begins anew, cold.
"""

import contextlib
import multiprocessing
import os
import runpy
import sys
from collections.abc import Iterable, Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

from qa_lib.lab.launch.driver import START, WARM

COLD = "cold, since what is imported touches the GPU"
SERVER = multiprocessing.get_context("forkserver")
# What the server imports; no other process does.
SERVER.set_forkserver_preload(["qa_lib.lab.launch.preload"])
# Modules that are run with -m, and then start a notebook's kernel.
STARTING_KERNELS = ("papermill", "qa_lib")
LAST_S = 5  # seconds that a kernel has to end once its process is done


class Forked:
    """A multiprocessing process with what launcher and jupyter_client use of subprocess.Popen."""

    stdin = stderr = None

    def __init__(
        self, process: multiprocessing.process.BaseProcess, stdout: Iterable[str] | None = None
    ):
        """Start a process; `stdout` are the lines that it prints, where somebody reads them."""
        process.start()
        self.stdout = stdout
        self._process = process
        self.pid = process.pid
        self.terminate = process.terminate
        self.kill = process.kill

    def poll(self) -> int | None:
        return self._process.exitcode

    returncode = property(poll)

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def start_server() -> None:
    """Let the server begin to import, unless it has; do not wait for it.

    It ends with the process that calls this.
    """
    # Else torch.cuda.is_available() initializes CUDA.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    forkserver.ensure_running()


def fork(command: list[str], env: dict[str, str], log: Path) -> Forked:
    """Start `command`, a Python with -m, in `env`, and return its process.

    It is warm unless the imports have touched CUDA. Its output goes to the file `log`.
    """
    start_server()
    return Forked(SERVER.Process(target=_become, args=(command, env, str(log), os.getcwd())))


def _become(command: list[str], env: dict[str, str], log: str, folder: str) -> None:
    """Be the command, in an environment and a folder."""
    _print_to(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    from qa_lib.lab.launch import preload  # the server has it already

    if preload.TOUCHED:
        os.chdir(folder)
        os.execve(command[0], command, env | {START: COLD})
    _take_on(env | {START: WARM}, folder)
    module, *words = command[2:]
    with forked_kernel() if module in STARTING_KERNELS else contextlib.nullcontext():
        _run_module([module, *words])


def fork_again(command: list[str], env: dict[str, str]) -> Forked:
    """Fork this process, which is warm, to be `command`, a Python with -m, in `env`; return it.

    What it prints are the lines of its `stdout`. This process must have no other thread, and have
    asked CUDA nothing.
    """
    reader, writer = os.pipe()
    forking = multiprocessing.get_context("fork")
    target = forking.Process(target=_become_again, args=(command, env, reader, writer))
    process = Forked(target, os.fdopen(reader, errors="replace"))
    os.close(writer)
    return process


def _become_again(command: list[str], env: dict[str, str], reader: int, writer: int) -> None:
    """Be the command, in an environment."""
    os.close(reader)
    _print_to(writer)
    _take_on(env, os.getcwd())
    _run_module(command[2:])


def _print_to(stream: int) -> None:
    """Let this process print to an open file, and each line at once, as with PYTHONUNBUFFERED."""
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    # The old ones hold lines back, as their former files needed it.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _take_on(env: dict[str, str], folder: str) -> None:
    """Take on an environment, a current folder and Python's own way to start processes.

    Otherwise multiprocessing would start a data loader's workers from the server, as it did this
    process.
    """
    multiprocessing.set_start_method(None, force=True)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)


def _run_module(words: list[str]) -> None:
    """Be `python -m WORDS`."""
    sys.argv = [*words]
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


@contextlib.contextmanager
def forked_kernel() -> Iterator[None]:
    """Fork what will be the notebook's kernel, and let papermill take it for the one it starts.

    It is forked before papermill has threads, and waits for its command. It ends with the block. It
    is no daemon in the sense of multiprocessing, since those may start no workers of a data loader.
    """
    from jupyter_client.provisioning import local_provisioner

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_be_kernel, args=(ours, theirs))
    kernel = Forked(process)
    theirs.close()

    def launch(command: list[str], env: dict[str, str], cwd: str | None = None, **_) -> Forked:
        # The folder is sent now: papermill has changed it since the kernel was forked.
        ours.send((command[2:], env | {"JPY_PARENT_PID": str(os.getpid())}, cwd or os.getcwd()))
        return kernel

    launch_before = local_provisioner.launch_kernel
    local_provisioner.launch_kernel = launch
    try:
        yield
    finally:
        local_provisioner.launch_kernel = launch_before
        # This process waits for its children at its end, however long they take.
        process.terminate()
        process.join(LAST_S)
        process.kill()


def _be_kernel(of_parent: Connection, own: Connection) -> None:
    """Wait for the kernel's command, and run it; end where none comes."""
    of_parent.close()
    os.setsid()
    with contextlib.suppress(EOFError):
        words, env, folder = own.recv()
        _take_on(env, folder)
        _run_module(words)
