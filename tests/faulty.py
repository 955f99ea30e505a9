"""Processes of a run, one of which fails on purpose or changes its weights.

`python -m tests.faulty WORK SPEC RUNS FAULT` takes the place of `python -m qa_lib.lab.launch.child
WORK SPEC RUNS`. FAULT is {rank, step, kind} as JSON. The kinds are "killed", "oom", "error" and
"drift" in that step of that rank, and "no kernel" in the first step of any.
"""

import json
import os
import signal
import sys

from qa_lib.lab.launch import child, process, torchrun
from qa_lib.lab.launch.process import Work


def child_command(work: Work, spec, runs, fault: dict) -> list[str]:
    """Return the command of process.child_command, for processes with that fault."""
    python, _m, _child, *words = process.child_command(work, spec, runs)
    return [python, "-m", "tests.faulty", *words, json.dumps(fault)]


def command_without_a4(spec, runs) -> list[str]:
    """Return the command of process.train_command, for a run whose first step fails if it is A4."""
    kind = "no kernel" if spec.variant == "A4" else "none"
    return child_command(Work.TRAIN, spec, runs, {"kind": kind})


def fail(kind: str) -> None:
    """End this process, or raise, as the kind of a fault says."""
    import torch

    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "oom":
        raise torch.OutOfMemoryError("CUDA out of memory")
    raise ValueError("a fault")


def break_step(fault: dict) -> None:
    """Let this process fail, or drift from the others, in the step that the fault names."""
    from qa_lib.train import loop

    clip = loop.clip
    calls = 0

    def broken(*arguments):
        nonlocal calls
        calls += 1
        if calls == fault["step"] and fault["kind"] == "drift":
            arguments[0].param_groups[0]["params"][0].data.add_(1e-3)
        elif calls == fault["step"]:
            fail(fault["kind"])
        clip(*arguments)

    loop.clip = broken


def break_first_step() -> None:
    """Let the first step of this process fail, as one without a kernel for its GPU does."""
    from qa_lib.train import loop

    def broken(*_):
        raise RuntimeError("no kernel image is available")

    loop.OptimizerStep.__call__ = broken


def is_to_fail(fault: dict) -> bool:
    """Return whether this is the process that fails, which it does in its first life alone."""
    is_first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
    return is_first_life and os.environ.get("RANK") == str(fault.get("rank"))


if __name__ == "__main__":
    work, spec, runs, written = sys.argv[1:]
    fault = json.loads(written)
    # The processes that torchrun starts below have the fault as well.
    torchrun.child_command = lambda *words: child_command(*words, fault)
    if fault.get("kind") == "no kernel":
        break_first_step()
    elif is_to_fail(fault):
        break_step(fault)
    child.main(work, spec, runs)
