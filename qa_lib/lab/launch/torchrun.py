"""One run in several processes: torchrun starts them, ends them together, and its record says which failed first.

`run_processes` starts `supervise` in a process of its own, which is torchrun itself. torchrun starts
fit.work_as_one in each of the run's processes. A process that fails leaves a fault in the run's folder; one that a
signal has killed leaves none. Where torchrun is started by hand, the first process reads the faults and says in the
record which came first.

Over several hosts that share the runs folder, torchrun is given the same command line on each of them. The first
process writes the record. As a job of Slurm on two nodes of four GPUs:

    #!/bin/bash
    #SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4 --time=60
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else processes that are restarted wait for those before them
    head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    srun --kill-on-bad-exit torchrun --nnodes 2 --nproc-per-node 4 --max-restarts 3 \\
        --rdzv-backend c10d --rdzv-endpoint "$head:29400" --rdzv-id "$SLURM_JOB_ID" \\
        --rdzv-conf join_timeout=40,read_timeout=20 \\
        -m qa_lib run P-one-bucket --preset bench --world 8

Without Slurm, start by hand on each host what `srun` starts, with one of them as "$head". The last line but one is for
hosts that never meet. torchrun then ends within a minute. Its last line says RendezvousTimeoutError where the others
did not come, or RendezvousConnectionError where the first was not found.

Hosts may leave and come back with `--nnodes 1:2`. Then last_call_timeout=10 stands beside the other two: else torchrun
waits half a minute for more hosts, and join_timeout is over by then. When one host of two is lost, the other goes on
with what it has, from the last checkpoint and with the same batches. When "$head" is lost, the run ends, and the same
commands go on with it.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from operator import itemgetter
from pathlib import Path

from qa_lib.lab.launch.process import call, child_env, follow_driver, kill, with_driver
from qa_lib.measure.hardware import environment
from qa_lib.records import record
from qa_lib.signals import stopped_by
from qa_lib.spec.spec import Spec

STOPPED = (
    "killed"  # kind of the error of a run that a signal has stopped, as fit.recording writes it
)
GRACE_S = 45  # for the first process to write its record; torchrun itself kills after 30 s what does not end


def run_processes(spec: Spec, runs: str | Path, say=print) -> dict:
    """Run a spec in as many processes as it has, and return the record that the first of them wrote.

    Raises RunTaken while others have the run, and UserError for a run that failed in any of its processes. Ctrl-C ends
    them all.
    """
    run_dir = Path(runs) / spec.run_path
    with record.lock(run_dir):
        record.check_folder(run_dir)
        # So that processes that die before their first line leave no older result standing.
        record.write_record(
            run_dir, record.new_record(spec, environment()) | {"status": record.STARTING}
        )
    threads = spec.preset.threads or max(1, (os.cpu_count() or 1) // spec.world)
    command, env = (
        call("qa_lib.lab.launch.torchrun:supervise", spec, runs),
        child_env(threads=threads),
    )
    process = subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    reason = "its processes ended before the run did"
    try:
        with with_driver():
            follow_driver()
            for line in process.stdout:
                say(line.rstrip("\n"))
            process.wait()
    except BaseException as stop:
        reason = stopped_by(stop)
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        raise
    finally:
        kill(process)
        with record.lock(run_dir):
            entry = record.read_record(run_dir)
            # They were stopped, or have left it as it was.
            if entry["status"] not in record.TERMINAL or entry["error"]["kind"] == STOPPED:
                record.finish(run_dir, entry, "killed", {"kind": STOPPED, "message": reason})
    return record.with_result(entry)


def supervise(spec: Spec, runs: str) -> None:
    """torchrun over the processes of a spec. If one fails it ends the others, and the record says which, and why."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    run_dir = Path(runs) / spec.run_path
    for old in faults(run_dir):
        old.unlink()
    work = call("qa_lib.run.fit:work_as_one", spec, runs)[1:]  # without the Python
    try:
        torchrun(["--standalone", "--nproc-per-node", str(spec.world), *work])
    except (ChildFailedError, SignalException) as ended:
        if isinstance(
            ended, ChildFailedError
        ):  # a signal is from run_processes, which says so in the record
            record_fault(
                spec, run_dir, {rank: failure.exitcode for rank, failure in ended.failures.items()}
            )
        sys.exit(1)


def record_fault(spec: Spec, run_dir: Path, exit_codes: dict[int, int]) -> None:
    """Put into the record which process failed first, by rank, and why.

    A process that a signal has ended says nothing; of the others each has left its fault and the time of it.
    """
    outcome = first_fault(run_dir)
    for old in faults(run_dir):
        old.unlink()
    # Not by torchrun, but that it also kills those that do not heed its SIGTERM.
    killed = {
        rank: code for rank, code in exit_codes.items() if code < 0 and code != -signal.SIGTERM
    }
    if not outcome or (killed and outcome["status"] != "oom"):
        rank, code = min((killed or exit_codes).items())
        kind = signal.Signals(-code).name if code < 0 else "ProcessEnded"
        ended = f"was ended by {kind}" if code < 0 else f"ended with exit code {code}"
        error = {"kind": kind, "message": f"process {rank} of {spec.world} {ended}", "step": None}
        outcome = {"status": "killed", "error": error}
    with record.lock(run_dir):
        record.finish(run_dir, record.read_record(run_dir), outcome["status"], outcome["error"])


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
        with contextlib.suppress(OSError, ValueError):
            found.append(json.loads(record.regular(path).read_text()))
    found = [fault for fault in found if fault["at"] >= since]
    own = [
        fault for fault in found if fault["status"] == "oom"
    ]  # what no other process's end leads to
    return min(own or found, key=itemgetter("at"), default=None)
