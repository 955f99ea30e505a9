"""Python processes that have PyTorch and the lab from the start, forked from one that has them.

A command imports for ten seconds of a busy core before it does anything.
"""

import os
import runpy
import socket
import sys
import time
from multiprocessing import forkserver
from pathlib import Path

from qa_lib.lab.launch.warm import SERVER

ROOT = Path(__file__).parent.parent
SERVER.set_forkserver_preload(
    ["qa_lib.lab.launch.preload", "qa_lib.lab.sweep", "qa_lib.train.trainer", "tests.ranks"]
)


def address() -> str:
    """Where the server listens, which is started if need be."""
    forkserver.ensure_running()
    return forkserver._forkserver._forkserver_address


def share(address: str) -> None:
    """Let this process fork from the server of another one, and start none of its own."""
    server = forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd = (
        address,
        os.open(os.devnull, os.O_RDONLY),
    )
    server.ensure_running = lambda: None


def _become(words: list[str], log: Path, environment: dict[str, str]) -> None:
    os.setsid()
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.argv = [*words]
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def python(log: Path, *words: str, **environment: str):
    """Start `python -m WORDS` from the repository's root, in a session of its own.

    Its output goes to the file `log`.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    process = SERVER.Process(target=_become, args=([*map(str, words)], log, environment))
    process.start()
    return process


def together(
    folder: Path, world: int, *words: str, limit_s: float = 240, **environment: str
) -> None:
    """Run `world` processes of `python -m WORDS` as torchrun starts them, until they end.

    If one fails all end, and what they said is the error.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "warm"}
    common |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)} | environment
    log, end = folder / "log.txt", time.monotonic() + limit_s
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
