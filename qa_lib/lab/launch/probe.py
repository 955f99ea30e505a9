"""What a machine is, asked in a process of its own: a driver must hold no GPU."""

import json
import os
import subprocess
import sys

from qa_lib.errors import UserError
from qa_lib.paths import importing
from qa_lib.spec.machine import Machine

# What a Python is given with -c, here and on a node of Slurm: one line, for a job's command.
PROBE = (
    "import dataclasses, json; from qa_lib.measure.hardware import environment, this_machine;"
    "print(json.dumps([dataclasses.asdict(this_machine()), environment()]))"
)


def probe() -> tuple[Machine, dict]:
    """Return this machine and its environment. Raises UserError where the lab cannot be loaded."""
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(
        command, env=importing(os.environ), capture_output=True, text=True, errors="replace"
    )
    output = done.stderr if done.returncode else done.stdout
    return read_probe("this Python", done.returncode, output)


def read_probe(who: str, exit_code: int, output: str) -> tuple[Machine, dict]:
    """Return the machine and environment that PROBE has printed.

    Raises UserError, which names `who` has run it, where that has failed.
    """
    if exit_code:
        reason = (output.strip() or "it says nothing").splitlines()[-1]
        raise UserError(f"{who} cannot load the lab: {reason}")
    machine, environment = json.loads(output.splitlines()[-1])
    return Machine(**machine), environment
