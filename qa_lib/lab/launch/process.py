"""The process that a run has for itself: its command, what it sees, and how it ends with its driver.

This module never imports torch: a child sees its cards before anything asks CUDA.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import pkgutil
import signal
import subprocess
import sys
import threading
import time
from functools import cache, partial
from pathlib import Path

import psutil
from pydantic import TypeAdapter

from qa_lib.errors import UserError, print_anything
from qa_lib.packages import PREPARED, jupyter_path
from qa_lib.paths import importing
from qa_lib.signals import SIGNALS, stoppable
from qa_lib.spec.spec import Spec

SHARE = "QA_LIB_SHARE"  # an environment variable: where it is set, other runs train on this GPU at the same time
# Warnings and redrawn bars would fill the notebooks and logs that the runs leave behind; each line is there at once.
QUIET = {
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
}
QUIET |= {"PYTHONUNBUFFERED": "1", PREPARED: "1"}
START = "QA_LIB_START"  # an environment variable of a forked process (warm.py): WARM, or why it is cold all the same
WARM = "warm"
DRIVER = "QA_LIB_DRIVER"  # an environment variable of a run that has a driver: a file that the driver has locked
DRIVER_GONE = "SIGTERM (its driver is gone)"
LAST_S = 3  # seconds that a run has to write its record once its driver is gone
_names = dict(
    SIGNALS
)  # what signals are called in this process: SIGTERM has another name once the driver is gone


def call(function: str, spec: Spec, *words) -> list[str]:
    """The command of a fresh Python that calls a function like "qa_lib.run.fit:work" with the spec and words."""
    written = json.dumps(dataclasses.asdict(spec))
    return [sys.executable, "-m", "qa_lib.lab.launch.process", function, written, *map(str, words)]


def spec_from(written: str) -> Spec:
    """The spec that `call` wrote as JSON."""
    return TypeAdapter(Spec).validate_json(written)


plain_command = partial(call, "qa_lib.run.fit:work")  # (spec, runs) -> the command of such a run


def child_env(
    cards: tuple[int, ...] = (), shared: bool = False, threads: int | None = None
) -> dict[str, str]:
    """The environment of a run's process; it sees these of the cards that are visible here, or without `cards` all."""
    changes = QUIET | {"JUPYTER_PATH": jupyter_path()}
    if cards:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else range(max(cards) + 1)
        changes["CUDA_VISIBLE_DEVICES"] = ",".join(str(names[gpu]).strip() for gpu in cards)
    if shared:
        changes[SHARE] = "1"
    if threads:
        changes["OMP_NUM_THREADS"] = str(threads)
    return importing(os.environ | changes)


def with_driver() -> contextlib.AbstractContextManager:
    """Around the work of a run: where a driver started this process, signals raise Stopped. `follow_driver` is to be
    called inside."""
    return stoppable(_names) if DRIVER in os.environ else contextlib.nullcontext()


def check_driver(run_dir: Path) -> None:
    """Raises UserError where a driver started this process for another run than that of `run_dir`."""
    planned = Path(os.environ.get(DRIVER, run_dir / "lock")).parent
    if os.path.realpath(planned) != os.path.realpath(run_dir):  # which bears a link to itself
        raise UserError(
            f"{run_dir.name}: planned was {planned.name}, so data, model or code have changed since; "
            "give the command again"
        )


@cache  # one thread a process
def follow_driver() -> None:
    """From now on SIGTERM comes once the driver that started this process, if one did, is gone. Nobody would wait for
    the run any more, and it would hold the GPU."""
    if DRIVER in os.environ:
        threading.Thread(target=_follow, args=[os.environ[DRIVER]], daemon=True).start()


def _follow(lock: str) -> None:
    with open(lock) as stream:
        fcntl.flock(stream, fcntl.LOCK_SH)  # waits until the driver has let it go
    _names[signal.SIGTERM] = DRIVER_GONE
    os.kill(os.getpid(), signal.SIGTERM)  # not SIGHUP, which a run under nohup ignores
    time.sleep(LAST_S)
    os._exit(1)


def kill(process: subprocess.Popen) -> None:
    """End a process and all below it; a notebook's kernel lives in a session of its own."""
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.kill()
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    psutil.wait_procs(family, timeout=10)


if __name__ == "__main__":  # the child that `call` starts
    print_anything()
    pkgutil.resolve_name(sys.argv[1])(spec_from(sys.argv[2]), *sys.argv[3:])
