r"""One run in several processes: torchrun starts them and ends them together.

`run_processes` starts a process that is torchrun (`supervise`), and that one starts each of the
run's processes (`be_rank` in child.py). A process that fails leaves a file in the run's folder, its
fault; one that a signal has killed leaves none. The record says which failed first: `record_fault`
writes it, and where torchrun is started by hand the first process does (run/recording.py).

Over several hosts that share the runs folder, torchrun is given the same command line on each of
them. The first process writes the record. This is a job of Slurm on two nodes of four GPUs:

    #!/bin/bash
    #SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4 --time=60
    # Else processes that are restarted wait for those before them.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    srun --kill-on-bad-exit torchrun --nnodes 2 --nproc-per-node 4 --max-restarts 3 \
        --rdzv-backend c10d --rdzv-endpoint "$head:29400" --rdzv-id "$SLURM_JOB_ID" \
        --rdzv-conf join_timeout=40,read_timeout=20 \
        -m qa_lib run P-nccl --preset bench --world 8

Without Slurm, type on each host the line with `export`, and the command from the word torchrun on.
Put the name of one host for "$head", and for "$SLURM_JOB_ID" a word that is the same on all of
them. The option --rdzv-conf is for hosts that never meet: torchrun then ends within a minute. Its
last line says RendezvousTimeoutError where the others did not come, or RendezvousConnectionError
where the first was not found.

Hosts may leave and come back with `--nnodes 1:2`. Then last_call_timeout=10 stands beside the other
two: else torchrun waits half a minute for more hosts, and join_timeout is over by then. When one
host of two is lost, the other goes on with what it has, from the last checkpoint and with the same
batches. When "$head" is lost, the run ends, and the same commands go on with it.
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from qa_lib.lab.launch.driver import surroundings
from qa_lib.lab.launch.process import Work, child_command, child_env, kill
from qa_lib.lab.launch.warm import Forked, fork_again
from qa_lib.measure.hardware import environment
from qa_lib.records import record
from qa_lib.records.files import check_folder
from qa_lib.run.recording import fault_path, faults, first_fault
from qa_lib.signals import stopped_by
from qa_lib.spec.spec import Spec

# The kind of the error of a run that was stopped by a signal, as recording.py writes it.
STOPPED = "killed"
# Seconds for the first process to write its record; torchrun itself kills after 30 s what does not
# end.
GRACE_S = 45


def run_processes(spec: Spec, runs: str | Path, say=print) -> dict:
    """Run a spec in as many processes as it has, and return the record that the first wrote.

    `say` is told what they print. Raises RunTaken while others have the run, and UserError for a
    run that failed in any of its processes. Ctrl-C ends them all.
    """
    run_dir = Path(runs) / spec.run_path
    with record.lock(run_dir):
        check_folder(run_dir)
        # So that processes that die before their first line leave no older result standing.
        entry = record.new_record(spec, environment())
        record.write_record(run_dir, entry | {"status": record.STARTING})
    return watch_processes(spec, runs, say)


def watch_processes(spec: Spec, runs: str | Path, say=print, is_forkable: bool = False) -> dict:
    """Do what `run_processes` does, for a run whose record says that it starts.

    Where this process `is_forkable` (see warm.fork_again), that which is torchrun is forked from
    it, and need not import PyTorch.
    """
    run_dir = Path(runs) / spec.run_path
    process = _start_torchrun(spec, runs, is_forkable)
    driver = surroundings()
    reason = "its processes ended before the run did"
    try:
        with driver.signals():
            driver.follow()
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
        entry = _ended_record(run_dir, reason)
    return record.with_result(entry)


def _start_torchrun(spec: Spec, runs: str | Path, is_forkable: bool) -> subprocess.Popen | Forked:
    """Start the process that supervises those of a spec; its output is theirs, line by line."""
    threads = spec.preset.threads or max(1, (os.cpu_count() or 1) // spec.world)
    command = child_command(Work.SUPERVISE, spec, runs)
    env = child_env(threads=threads)
    if is_forkable:
        return fork_again(command, env)
    return subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def _ended_record(run_dir: Path, reason: str) -> dict:
    """Return the record of a run whose processes have all ended.

    Where they have not written how it ended, or only that a signal stopped them, it now says that
    the run was killed for this `reason`.
    """
    with record.lock(run_dir):
        entry = record.read_record(run_dir)
        if entry["status"] not in record.TERMINAL or entry["error"]["kind"] == STOPPED:
            record.finish(run_dir, entry, "killed", {"kind": STOPPED, "message": reason})
    return entry


def supervise(spec: Spec, runs: str) -> None:
    """Be torchrun over the processes of a spec; exit with 1 where one fails.

    It ends the others then, and the record says which failed, and why.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    run_dir = Path(runs) / spec.run_path
    for old_fault in faults(run_dir):
        old_fault.unlink()
    _python, *words = child_command(Work.RANK, spec, runs)  # torchrun adds the Python
    try:
        torchrun(["--standalone", "--nproc-per-node", str(spec.world), *words])
    except ChildFailedError as ended:
        exit_codes = {rank: failure.exitcode for rank, failure in ended.failures.items()}
        record_fault(spec, run_dir, exit_codes)
        sys.exit(1)
    except SignalException:  # from watch_processes, which says so in the record
        sys.exit(1)


def record_fault(spec: Spec, run_dir: Path, exit_codes: dict[int, int]) -> None:
    """Put into the record which process failed first, and why, and remove the faults.

    `exit_codes` are those of processes that failed, by rank; that of a process which a signal has
    ended is minus the signal's number. A process that a signal has ended without a fault of its own
    is reported instead of the first fault: the others may have failed because it was gone. But a
    lack of memory comes before all. One that has left a fault may be ended by a signal as well:
    PyTorch aborts where it cannot tidy up after an error of CUDA.
    """
    fault = first_fault(run_dir)
    left_a_fault = {rank for rank in exit_codes if fault_path(run_dir, rank).exists()}
    for file in faults(run_dir):
        file.unlink()
    # torchrun stops by SIGTERM the processes whose peer has failed.
    not_stopped = {rank: code for rank, code in exit_codes.items() if code != -signal.SIGTERM}
    killed = {
        rank: code for rank, code in not_stopped.items() if code < 0 and rank not in left_a_fault
    }
    ran_out_of_memory = fault is not None and fault["status"] == "oom"
    if fault is None or (killed and not ran_out_of_memory):
        rank, code = min((killed or not_stopped or exit_codes).items())
        fault = {"status": "killed", "error": _error_without_fault(rank, spec.world, code)}
    with record.lock(run_dir):
        record.finish(run_dir, record.read_record(run_dir), fault["status"], fault["error"])


def _error_without_fault(rank: int, world: int, code: int) -> dict:
    """Return the error of a process that has ended with an exit code, and left no fault."""
    if code < 0:
        kind = signal.Signals(-code).name
        how = f"was ended by {kind}"
    else:
        kind = "ProcessEnded"
        how = f"ended with exit code {code}"
    return {"kind": kind, "message": f"process {rank} of {world} {how}", "step": None}
