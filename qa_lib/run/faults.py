"""What ends a run early: an exception's outcome, and the faults that the processes of one run leave in its folder.

Where several processes make one run, the first that fails lets all the others fail. Each leaves a file that says when
and why it failed, and the record takes the earliest.
"""

import contextlib
import json
import os
import time
from operator import itemgetter
from pathlib import Path

import torch

from qa_lib.measure import hardware
from qa_lib.record import write_atomically
from qa_lib.run.process import SHARE
from qa_lib.train.process_group import ProcessGroup
from qa_lib.train.step_log import StepFailed

NO_MEMORY = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def outcome_of(problem: Exception) -> dict:
    """The `status` and `error` of a run that an exception has ended.

    Out of memory is a result, unless other runs share the GPU: they may have filled it. Then it is an error, which is
    run again.
    """
    status = "oom" if out_of_memory(problem) and not shares_gpu(hardware.train_device()) else "error"
    step = problem.step if isinstance(problem, StepFailed) else None
    if step is not None:
        problem = problem.__cause__ or problem
    error = {"kind": type(problem).__name__, "message": str(problem).split("\n")[0], "step": step}
    return {"status": status, "error": error}


def out_of_memory(problem: BaseException | None) -> bool:
    """PyTorch has a class for what its GPU allocator is refused, and only messages for the host's memory, the driver's,
    cuBLAS's and Triton's. The end of a failed graph capture raises an error of its own over it."""
    if problem is None:
        return False
    return (
        isinstance(problem, torch.OutOfMemoryError | MemoryError)
        or (isinstance(problem, RuntimeError) and any(words in str(problem) for words in NO_MEMORY))
        or out_of_memory(problem.__context__)
    )


def shares_gpu(device: torch.device) -> bool:
    """Whether other runs train on this GPU at the same time."""
    return device.type == "cuda" and bool(os.environ.get(SHARE))


@contextlib.contextmanager
def noting_faults(run_dir: Path, ranks: ProcessGroup):
    """Leave what ends one of torchrun's processes in the run's folder."""
    try:
        yield
    except Exception as problem:
        if ranks.store:
            fault = {"at": time.time()} | outcome_of(problem)
            fault["error"]["message"] = f"process {ranks.rank} of {ranks.world}: {fault['error']['message']}"
            write_atomically(fault_path(run_dir, ranks.rank), json.dumps(fault))
        raise


def fault_path(run_dir: Path, rank: int | str) -> Path:
    """Where a process leaves what ended it."""
    return run_dir / f"fault-{rank}.json"


def faults(run_dir: Path) -> list[Path]:
    """What the processes of a run have left of faults."""
    return [*run_dir.glob(fault_path(run_dir, "*").name)]


def first_fault(run_dir: Path, since: float = 0.0) -> dict | None:
    """The status and error of the process that failed first, of those that have left a fault since that time. None
    where none has."""
    found = []
    for path in faults(run_dir):
        with contextlib.suppress(OSError):
            found.append(json.loads(path.read_text()))
    found = [fault for fault in found if fault["at"] >= since]
    own = [fault for fault in found if fault["status"] == "oom"]  # what no other process's end leads to
    return min(own or found, key=itemgetter("at"), default=None)
