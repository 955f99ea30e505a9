"""Runs as jobs of Slurm: the launcher that starts each with `sbatch`, and what it asks of Slurm.

This module never imports torch.
"""

import hashlib
import math
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from qa_lib.errors import UserError
from qa_lib.lab.launch.local import Launcher
from qa_lib.lab.launch.probe import PROBE, read_probe
from qa_lib.paths import importing
from qa_lib.records import record
from qa_lib.spec.machine import Machine
from qa_lib.spec.resolve import WORLD
from qa_lib.spec.spec import Spec

AT_A_TIME = 64  # jobs in the queue
# Minutes that a job may take beyond its run's limit, which does not count the time to start.
SPARE_MIN = 10


class SlurmLauncher(Launcher):
    """Runs specs as jobs of Slurm, at most AT_A_TIME in its queue, on any host that has `sbatch`.

    Each run is a job of its own on one node. Its command, its record and how they are judged are
    those of a run on this machine; see Launcher. `sbatch --wait` stands for the job here. It ends
    when the job ends, with the job's exit code, whether or not the cluster keeps accounts.
    Partition, account and the like are Slurm's own variables: SBATCH_PARTITION, SBATCH_ACCOUNT,
    SBATCH_CPUS_PER_GPU and so on.

    This checkout, its Python and the runs folder must be on a file system that the nodes share. A
    driver that is stopped cancels its jobs, which takes up to a minute. One that is killed outright
    leaves them. The next driver of that folder cancels those that have not begun, and waits for the
    others.

    Several drivers on several hosts run nothing twice where `flock` holds for all of them: on NFS
    (but not with the option local_lock), on Lustre that is mounted with the option flock, and on
    most others. Where it holds for one host alone, start all drivers of a folder on one host.
    """

    # The latter in Slurm's queue.
    idle = ("waiting", record.STARTING)

    def _cards(self, specs: list[Spec]) -> list[int | None]:
        return [None] * max(1, min(AT_A_TIME, len(specs)))

    def _start(self, spec, run_dir, env, log) -> subprocess.Popen:
        cancel(run_dir)  # what a driver that was killed has left in the queue
        limit_min = math.ceil(self.limit_of(spec) / 60) + SPARE_MIN
        asked = {"job-name": job_name(run_dir), "open-mode": "append", "time": limit_min}
        if spec.hardware != "cpu":
            asked["gpus"] = spec.world
        if spec.preset.threads:
            asked["cpus-per-task"] = spec.preset.threads * spec.world
        words = sbatch(self.command(spec, self.runs), run_dir / "log.txt", **asked)
        # A session of its own, which Ctrl-C does not reach: it has to wait until the job is gone.
        return subprocess.Popen(
            words, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def _end(self, process: subprocess.Popen, run_dir: Path) -> None:
        if process.poll() is None:
            cancel(run_dir)
        process.wait()
        os.utime(run_dir)  # else NFS may show the folder as it was up to a minute ago


def sbatch(command: list[str], output: Path, **asked) -> list[str]:
    """Return the command that runs another as a job on one node, and waits for its end.

    What the job prints goes to `output`; `asked` are further options of sbatch.
    """
    options = asked | {
        "nodes": 1,
        "ntasks": 1,
        "export": "ALL",
        "output": output.absolute(),
        "wrap": shlex.join(command),
    }
    return ["sbatch", "--wait", *(f"--{name}={value}" for name, value in options.items())]


def cancel(run_dir: Path) -> None:
    """Cancel the job of a run, if there is one."""
    slurm("scancel", "--name", job_name(run_dir))


def slurm(*words: str, **options) -> subprocess.CompletedProcess:
    """Run one of Slurm's commands. Raises UserError on a host that does not have it."""
    try:
        return subprocess.run(words, **options)
    except FileNotFoundError:
        raise UserError(
            f"--launcher slurm: this host has no Slurm, whose command {words[0]} was not found; "
            "start the sweep where sbatch works, or leave --launcher out"
        ) from None


def job_name(run_dir: Path) -> str:
    """Return a run's id with a hash of its folder's path: the same id may be elsewhere, too."""
    digest = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()
    return f"{run_dir.name}-{digest[:8]}"


def probe_node(runs: Path, world: int | None) -> tuple[Machine, dict]:
    """Return a node and its environment, asked in a job: this host may be of another kind.

    The node counts as many GPUs as a run in `world` processes takes, since that many are its job's.
    Raises UserError where no such job can run.
    """
    name = os.environ.get("SBATCH_PARTITION")
    partition = ["--partition", name] if name else []
    listed = slurm("sinfo", "--noheader", "--format=%G", *partition, capture_output=True, text=True)
    # Several, so that it is seen whether they are linked.
    asked = {"gpus": world or 1} if "gpu" in listed.stdout else {}
    runs.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=runs.absolute(), prefix=".probe-") as log:
        words = sbatch([sys.executable, "-c", PROBE], Path(log.name), time=SPARE_MIN, **asked)
        done = slurm(
            *words, env=importing(os.environ), capture_output=True, text=True, errors="replace"
        )
        output = Path(log.name).read_text() or done.stderr
        machine, environment = read_probe("a node", done.returncode, output)
    gpus = machine.gpus and (world or WORLD)
    return replace(machine, gpus=gpus), environment
