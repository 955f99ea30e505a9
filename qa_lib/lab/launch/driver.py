"""A run and the driver that started its process: what it is told, and how they end together.

A driver (local.py) tells the process of a run by environment variables which lock it holds, whether
other runs train on the same GPU, and how the process began. `surroundings` hands that to the run.

This module never imports torch: a child sees its cards before anything asks CUDA.
"""

import contextlib
import fcntl
import os
import signal
import threading
import time
from functools import cache
from pathlib import Path

from qa_lib.errors import UserError
from qa_lib.run.surroundings import Surroundings
from qa_lib.signals import SIGNALS, stoppable

# Environment variables of a run's process.
SHARE = "QA_LIB_SHARE"  # set where other runs train on this GPU at the same time
START = "QA_LIB_START"  # of a forked process (warm.py): WARM, or why it is cold all the same
DRIVER = "QA_LIB_DRIVER"  # the path of a file in the run's folder, which the driver has locked

WARM = "warm"
DRIVER_GONE = "SIGTERM (its driver is gone)"
LAST_S = 3  # seconds that a run has to write its record once its driver is gone

# What signals are called in this process: SIGTERM has another name once the driver is gone.
_names = dict(SIGNALS)


def is_warm() -> bool:
    """Return whether this process was forked with PyTorch imported, and CUDA untouched."""
    return os.environ.get(START) == WARM


def surroundings() -> Surroundings:
    """Return what the environment of this process tells a run."""
    start = os.environ.get(START)
    is_cold_fork = start is not None and not is_warm()
    return _FromEnvironment(
        shares_gpu=bool(os.environ.get(SHARE)),
        began_for_run=start is None,
        start_note=f"start: {start}" if is_cold_fork else None,
    )


class _FromEnvironment(Surroundings):
    """The surroundings of a run that may have a driver."""

    def signals(self) -> contextlib.AbstractContextManager:
        """Return a context in which signals raise Stopped, where a driver started this process."""
        return stoppable(_names) if DRIVER in os.environ else contextlib.nullcontext()

    def follow(self) -> None:
        """Let SIGTERM come once the driver is gone, where one started this process.

        Nobody would wait for the run any more, and it would hold the GPU.
        """
        if DRIVER in os.environ:
            _follow(os.environ[DRIVER])


@cache  # one thread a process
def _follow(lock: str) -> None:
    threading.Thread(target=_end_with, args=[lock], daemon=True).start()


def _end_with(lock: str) -> None:
    """Wait until the driver has let its lock go, and end this process."""
    with open(lock) as stream:
        fcntl.flock(stream, fcntl.LOCK_SH)
    _names[signal.SIGTERM] = DRIVER_GONE
    os.kill(os.getpid(), signal.SIGTERM)  # not SIGHUP, which a run under nohup ignores
    time.sleep(LAST_S)
    os._exit(1)


def check_driver(run_dir: Path) -> None:
    """Raise UserError where a driver started this process for another run than that of a folder."""
    if DRIVER not in os.environ:
        return
    planned = Path(os.environ[DRIVER]).parent
    if os.path.realpath(planned) != os.path.realpath(run_dir):  # which bears a link to itself
        raise UserError(
            f"{run_dir.name}: planned was {planned.name}, so data, model or code have changed "
            "since; give the command again"
        )
