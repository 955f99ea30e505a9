"""What another process begins with: `python -m qa_lib.lab.launch.child WORK SPEC WORDS`.

This is the one place that says so. `process.child_command` makes the command: one of process.Work,
a spec as JSON, and the words that follow for this work. What a function needs is imported when it
is called, since torch is not needed for all of them.
"""

import contextlib
import sys

from qa_lib.errors import print_anything
from qa_lib.lab.launch.driver import is_warm
from qa_lib.lab.launch.process import Work, spec_from
from qa_lib.signals import ended_soon, stoppable
from qa_lib.spec.spec import Spec

LAST_S = 5  # seconds that one of several processes has to write what ended it


def train(spec: Spec, runs: str) -> None:
    """Train one run, in this process or in several that torchrun starts.

    A driver has started this process, and has written the run's record.
    """
    from qa_lib.lab.launch.anywhere import fit_here, takes_torchrun
    from qa_lib.lab.launch.torchrun import watch_processes

    if takes_torchrun(spec):
        watch_processes(spec, runs, is_forkable=is_warm())
    else:
        fit_here(spec, runs)


def supervise(spec: Spec, runs: str) -> None:
    """Start the processes of a run by torchrun, and end them together."""
    from qa_lib.lab.launch.torchrun import supervise

    supervise(spec, runs)


def be_rank(spec: Spec, runs: str) -> None:
    """Be one of the processes of a run.

    Exits with 1 where it fails, so that torchrun ends the others.
    """
    from qa_lib.lab.launch.anywhere import fit_here

    # torchrun ends by SIGTERM a process whose peer has failed.
    with contextlib.suppress(KeyboardInterrupt), stoppable(), ended_soon(LAST_S):
        if fit_here(spec, runs)["status"] != "oom":
            return
    sys.exit(1)


def count_one_step(spec: Spec) -> None:
    """Make the step whose kernels Nsight Compute counts."""
    from qa_lib.lab.tools.profile import count_one_step

    count_one_step(spec)


FUNCTIONS = {
    Work.TRAIN: train,
    Work.SUPERVISE: supervise,
    Work.RANK: be_rank,
    Work.COUNT: count_one_step,
}


def main(work: str, written_spec: str, *words: str) -> None:
    """Do what the words of a command say."""
    FUNCTIONS[Work(work)](spec_from(written_spec), *words)


if __name__ == "__main__":
    print_anything()
    main(*sys.argv[1:])
