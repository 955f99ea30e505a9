"""Processes of a run of which one fails on purpose, or changes its weights: `python -m tests.faulty FUNCTION SPEC RUNS
FAULT`.

Takes the place of `python -m qa_lib.lab.launch.process FUNCTION SPEC RUNS`; FAULT is {rank, step, kind} as JSON.
"""

import json
import os
import pkgutil
import signal
import sys

from qa_lib.lab.launch import process, torchrun


def call(function: str, spec, runs, fault: dict) -> list[str]:
    """As process.call, for processes with that fault."""
    command = process.call(function, spec, runs)
    return [command[0], "-m", "tests.faulty", *command[3:], json.dumps(fault)]


def fail(kind: str) -> None:
    import torch

    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise {"oom": torch.OutOfMemoryError("CUDA out of memory"), "error": ValueError("a fault")}[
        kind
    ]


def break_step(fault: dict) -> None:
    """Let this process fail in that step."""
    from qa_lib.train import loop

    clip, calls = loop.clip, []

    def broken(*arguments):
        calls.append(None)
        if len(calls) == fault["step"] and fault["kind"] == "drift":
            arguments[0].param_groups[0]["params"][0].data.add_(1e-3)
        elif len(calls) == fault["step"]:
            fail(fault["kind"])
        clip(*arguments)

    loop.clip = broken


def work_but_a4(spec, runs: str) -> None:
    """The work of a run, whose first step fails if it is of A4."""
    from qa_lib.run.fit import work
    from qa_lib.train import loop

    def broken(*_):
        raise RuntimeError("no kernel image is available")

    if spec.variant == "A4":
        loop.OptimizerStep.__call__ = broken
    work(spec, runs)


if __name__ == "__main__":
    function, parts, runs, fault = *sys.argv[1:4], json.loads(sys.argv[4])
    torchrun.call = lambda function, spec, runs: call(function, spec, runs, fault)
    if (
        os.environ.get("RANK") == str(fault.get("rank"))
        and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    ):
        break_step(fault)
    pkgutil.resolve_name(function)(process.spec_from(parts), runs)
