"""The process that a run has for itself: its command, its environment, and its end.

This module never imports torch: a child sees its cards before anything asks CUDA.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from enum import StrEnum
from pathlib import Path

import psutil
from pydantic import TypeAdapter

from qa_lib.lab.launch.driver import SHARE
from qa_lib.packages import PREPARED, jupyter_path
from qa_lib.paths import importing
from qa_lib.spec.spec import Spec

CHILD = "qa_lib.lab.launch.child"  # the module that every process begins with; `child.py` has what
QUIET = {
    # Warnings and redrawn bars would fill the notebooks and logs that the runs leave behind.
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    # Each line is there at once.
    "PYTHONUNBUFFERED": "1",
    PREPARED: "1",
}


class Work(StrEnum):
    """What a process is started for."""

    # Train one run.
    TRAIN = "train"
    # Supervise the processes of one run, as torchrun does.
    SUPERVISE = "supervise"
    # Be one of these processes.
    RANK = "rank"
    # Make a step whose kernels Nsight Compute counts.
    COUNT = "count"


def child_command(work: Work, spec: Spec, *words) -> list[str]:
    """Return the command of a fresh Python that does some work on a spec; see child.py."""
    written = json.dumps(dataclasses.asdict(spec))
    return [sys.executable, "-m", CHILD, work, written, *map(str, words)]


def spec_from(written: str) -> Spec:
    """Return the spec that `child_command` wrote as JSON."""
    return TypeAdapter(Spec).validate_json(written)


def train_command(spec: Spec, runs: Path) -> list[str]:
    """Return the command that trains one run, without a notebook."""
    return child_command(Work.TRAIN, spec, runs)


def child_env(
    cards: tuple[int, ...] = (), shared: bool = False, threads: int | None = None
) -> dict[str, str]:
    """Return the environment of a run's process.

    It sees these of the cards that are visible here, or without `cards` all. It is told where
    others share them, and OpenMP has so many threads.
    """
    changes = QUIET | {"JUPYTER_PATH": jupyter_path()}
    if cards:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else range(max(cards) + 1)
        changes["CUDA_VISIBLE_DEVICES"] = ",".join(str(names[card]).strip() for card in cards)
    if shared:
        changes[SHARE] = "1"
    if threads:
        changes["OMP_NUM_THREADS"] = str(threads)
    return importing(os.environ | changes)


def kill(process: subprocess.Popen) -> None:
    """End a process and all below it; a notebook's kernel lives in a session of its own."""
    family = []
    if process.poll() is None:
        family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    psutil.wait_procs(family, timeout=10)
