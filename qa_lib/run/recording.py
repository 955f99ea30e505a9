"""The life of a run's record: `running` while it is at work, then how it ended, whatever ended it.

A run of several processes has one record, that of the first. Each of the others leaves what ended
it as a fault in the run's folder, so that the record can say which failed first.
"""

import contextlib
import json
import time
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path

import psutil
import torch

from qa_lib.measure import hardware
from qa_lib.records import record
from qa_lib.records.files import check_folder, regular, write_atomically
from qa_lib.run import notes
from qa_lib.run.surroundings import ALONE, Surroundings
from qa_lib.signals import stopped_by
from qa_lib.spec.spec import Spec
from qa_lib.train.checkpoint import CHECKPOINT
from qa_lib.train.parallel.process_group import ProcessGroup
from qa_lib.train.step_log import StepFailed

# What PyTorch, CUDA and cuBLAS say where they have no class of error for memory that ran out.
NO_MEMORY = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@contextlib.contextmanager
def recording(
    spec: Spec, run_dir: Path, say=print, surroundings: Surroundings = ALONE
) -> Iterator[dict]:
    """Yield a run's record, which is written as `running`, and end it by what happens meanwhile.

    What is raised inside makes it `error`, a signal or Ctrl-C `killed`, out of memory `oom`; only
    the latter is swallowed. Where another of the run's processes failed first, that one's fault
    ends it. The run's lock is held meanwhile.
    """
    with surroundings.signals(), record.lock(run_dir):
        check_folder(run_dir)
        entry = record.new_record(spec, hardware.environment())
        try:
            # Whoever started this may be gone already: only in here does the record say so.
            surroundings.follow()
            record.write_record(run_dir, entry)
            yield entry
            if spec.skip:
                say(f"{spec.variant}: skipped, {spec.skip}")
                record.finish(run_dir, entry, "skipped", {"kind": "skipped", "message": spec.skip})
                return
            notes.note_changed_code(entry)
            record.finish(run_dir, entry, "ok")
            _drop_leftovers(run_dir)
        except (Exception, KeyboardInterrupt) as problem:
            if isinstance(problem, KeyboardInterrupt) and entry["status"] in record.FINISHED:
                record.write_record(run_dir, entry)  # it had its result when the signal came
                raise
            shared = surroundings.shares(hardware.train_device())
            outcome = outcome_of(problem, shared)
            _end_badly(entry, run_dir, outcome)
            if outcome["status"] != "oom":
                raise
            step = outcome["error"]["step"]
            when = f"in step {step}" if step else "before training"
            say(f"{spec.variant}: out of memory {when}")


def _end_badly(entry: dict, run_dir: Path, outcome: dict) -> None:
    """Finish the record of a run with an outcome, or with the fault of a process that failed first.

    torchrun stops this process where another has failed. It starts all at once: faults that are
    older than this process are of others.
    """
    first = first_fault(run_dir, since=psutil.Process().create_time()) or outcome
    # What JSON has not, a NaN say, may be what has ended the run: the record does without it.
    text = json.dumps(entry, default=lambda _: None)
    entry |= json.loads(text, parse_constant=lambda _: None)
    notes.note_changed_code(entry)
    record.finish(run_dir, entry, first["status"], first["error"])


def _drop_leftovers(run_dir: Path) -> None:
    """Remove what a finished run needs no more: checkpoints, and faults of restarted processes."""
    for path in [*checkpoint_files(run_dir), *faults(run_dir)]:
        path.unlink(missing_ok=True)


def checkpoint_files(run_dir: Path) -> list[Path]:
    """Return where a run keeps its checkpoint, one that was not believed, and one half written."""
    endings = (".safetensors", ".refused", ".partial")
    return [(run_dir / CHECKPOINT).with_suffix(ending) for ending in endings]


# What ended a run.


def outcome_of(problem: BaseException, shares_gpu: bool = False) -> dict:
    """Return the `status` and `error` of a run that an exception, a signal or Ctrl-C has ended.

    Out of memory is a result, unless other runs share the GPU: they may have filled it. Then it is
    an error, which is run again.
    """
    if isinstance(problem, KeyboardInterrupt):
        error = {"kind": "killed", "message": stopped_by(problem), "step": None}
        return {"status": "killed", "error": error}
    status = "oom" if out_of_memory(problem) and not shares_gpu else "error"
    step = problem.step if isinstance(problem, StepFailed) else None
    if step is not None:
        problem = problem.__cause__ or problem
    kind = type(problem).__name__
    # Libraries have OSErrors of their own. In a step a file that is missing is the compiler's.
    if isinstance(problem, OSError) and step is None:
        kind = "OSError"
    message = str(problem).split("\n")[0]
    return {"status": status, "error": {"kind": kind, "message": message, "step": step}}


def out_of_memory(problem: BaseException | None) -> bool:
    """Return whether memory that ran out has raised a problem, or led to it.

    PyTorch has a class for what its GPU allocator is refused, and only messages for the host's
    memory, the driver's, cuBLAS's and Triton's. The end of a failed graph capture raises an error
    of its own over it.
    """
    if problem is None:
        return False
    if isinstance(problem, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(problem, RuntimeError) and any(words in str(problem) for words in NO_MEMORY):
        return True
    return out_of_memory(problem.__context__)


# Faults of a run's processes.


@contextlib.contextmanager
def noting_faults(run_dir: Path, ranks: ProcessGroup, shares_gpu: bool = False) -> Iterator[None]:
    """Leave in the run's folder what ends this process, if it is one of torchrun's."""
    try:
        yield
    except Exception as problem:
        if ranks.store:
            outcome = outcome_of(problem, shares_gpu)
            message = f"process {ranks.rank} of {ranks.world}: {outcome['error']['message']}"
            outcome["error"]["message"] = message
            fault = {"at": time.time()} | outcome
            write_atomically(fault_path(run_dir, ranks.rank), json.dumps(fault))
        raise


def fault_path(run_dir: Path, rank: int | str) -> Path:
    """Return where a process leaves what ended it."""
    return run_dir / f"fault-{rank}.json"


def faults(run_dir: Path) -> list[Path]:
    """Return the files of faults that the processes of a run have left."""
    return list(run_dir.glob(fault_path(run_dir, "*").name))


def first_fault(run_dir: Path, since: float = 0.0) -> dict | None:
    """Return the status and error of the process that failed first, since a time (s since 1970).

    If processes ran out of memory it is the first of these, since no other process's end leads
    to that. None where no process has left a fault.
    """
    left = []
    for path in faults(run_dir):
        with contextlib.suppress(OSError, ValueError):
            left.append(json.loads(regular(path).read_text()))
    recent = [fault for fault in left if fault["at"] >= since]
    out_of_memory_first = [fault for fault in recent if fault["status"] == "oom"]
    return min(out_of_memory_first or recent, key=itemgetter("at"), default=None)
