"""Python processes that have imported PyTorch and the lab when they start.

They are forked from a server that has imported them. Otherwise a command imports for ten seconds of
a busy core before it does anything.
"""

import multiprocessing
import os
import runpy
import shlex
import signal
import socket
import sys
import time
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

from qa_lib.lab.launch.warm import SERVER

ROOT = Path(__file__).parent.parent
SERVER.set_forkserver_preload(
    [
        "qa_lib.lab.launch.preload",
        "qa_lib.lab.sweep",
        "qa_lib.train.trainer",
        "qa_lib.lab.app.page",
        "tests.ranks",
    ]
)


def address() -> str:
    """Return where the server listens; start it if need be, unless that of another is shared."""
    server = forkserver._forkserver
    server.ensure_running()
    return server._forkserver_address


def share(address: str) -> None:
    """Let this process fork from the server of another one, and start none of its own."""
    server = forkserver._forkserver
    server._forkserver_address = address
    server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
    server.ensure_running = forkserver.ensure_running = lambda: None


def worker_command() -> str:
    """Return what xdist starts for a worker instead of Python: a client of the shared server."""
    return shlex.join([sys.executable, str(Path(__file__).with_name("warm_worker.py"))])


def run_worker(bootstrap: str) -> int:
    """Let the shared server fork a worker that runs this code; return its exit code at its end.

    It takes over stdin and stdout of this process, through which xdist talks to it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker is told as well
    share(os.environ["WARM_SERVER"])
    ends = (Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False))
    process = SERVER.Process(target=_be_worker, args=(bootstrap, *ends, dict(os.environ)))
    process.start()
    process.join()
    return process.exitcode


def _be_worker(
    bootstrap: str, stdin: Connection, stdout: Connection, environment: dict[str, str]
) -> None:
    """Turn this forked process into a worker of xdist."""
    multiprocessing.set_start_method(None, force=True)  # Python's default once more
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(stdin.fileno(), 0)
    os.dup2(stdout.fileno(), 1)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    exec(bootstrap, {"__name__": "__main__"})


def _become(words: list[str], log: Path, environment: dict[str, str]) -> None:
    """Turn this forked process into `python -m WORDS` with that log and environment."""
    os.setsid()
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.argv = [*words]
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def python(log: Path, *words: str, **environment: str):
    """Start `python -m WORDS` in the repository's root; return the process.

    It leads a session of its own, and its output goes to the file `log`.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    process = SERVER.Process(target=_become, args=([*map(str, words)], log, environment))
    process.start()
    return process


def together(
    folder: Path, world: int, *words: str, limit_s: float = 240, **environment: str
) -> None:
    """Run `world` processes of `python -m WORDS` as torchrun starts them, until they end.

    If one fails or the time is over, all are killed, and an AssertionError has what they said.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "warm"}
    common |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)} | environment
    log = folder / "log.txt"
    end = time.monotonic() + limit_s
    processes = [
        python(log, *words, RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank in range(world)
    ]
    try:
        while any(process.exitcode is None for process in processes) and time.monotonic() < end:
            if any(process.exitcode for process in processes):
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert [process.exitcode for process in processes] == [0] * world, log.read_text()[-6000:]
