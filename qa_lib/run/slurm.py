"""Runs as jobs of Slurm: `sweep --launcher slurm`, on any host that has `sbatch`.

Each run is a job of its own on one node. Its command, its record and how they are judged are those of a run on this
machine. `sbatch --wait` stands for the job here. It ends when the job ends, with the job's exit code, whether or not
the cluster keeps accounts. Partition, account and the like are Slurm's own variables: SBATCH_PARTITION, SBATCH_ACCOUNT,
SBATCH_CPUS_PER_GPU and so on.

This checkout, its Python and the runs folder must be on a file system that the nodes share. A driver that is stopped
cancels its jobs, which takes up to a minute. One that is killed outright leaves them. The next driver of that folder
cancels those that have not begun, and waits for the others.

Several drivers on several hosts run nothing twice where `flock` holds for all of them: on NFS (but not with the option
local_lock), on Lustre that is mounted with the option flock, and on most others. Where it holds for one host alone,
start all drivers of a folder on one host.
"""

import hashlib
import math
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from qa_lib.errors import UserError
from qa_lib.record import STARTING
from qa_lib.run.launch import PROBE, ROOT, Launcher, probed
from qa_lib.spec import WORLD, Machine, Spec

AT_A_TIME = 64  # jobs in the queue
SPARE_MIN = 10  # minutes that a job may take beyond its run's limit, which does not count what a run needs to start


class SlurmLauncher(Launcher):
    """Runs specs as jobs of Slurm; see Launcher. No more than AT_A_TIME are in the queue."""

    idle = ("waiting", STARTING)  # the latter in Slurm's queue

    def _cards(self, specs):
        return [None] * max(1, min(AT_A_TIME, len(specs)))

    def _start(self, spec: Spec, run_dir: Path, env: dict[str, str], log: TextIO) -> subprocess.Popen:
        cancel(run_dir)  # what a driver that was killed has left in the queue
        limit_min = math.ceil((self.time_limit_s or spec.preset.time_limit_s) / 60) + SPARE_MIN
        asked = {"job-name": job_name(run_dir), "open-mode": "append", "time": limit_min}
        if spec.hardware != "cpu":
            asked["gpus"] = spec.world
        if spec.preset.threads:
            asked["cpus-per-task"] = spec.preset.threads * spec.world
        words = sbatch(self.command(spec, self.runs), run_dir / "log.txt", **asked)
        # In a session of its own, which Ctrl-C does not reach: it has to wait until the job is gone.
        return subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def _end(self, process, run_dir):
        if process.poll() is None:
            cancel(run_dir)
        process.wait()
        os.utime(run_dir)  # else NFS may show the folder as it was up to a minute ago


def sbatch(command: list[str], output: Path, **asked) -> list[str]:
    """The command that runs another as a job on one node, what it prints going to `output`, and waits for its end."""
    asked |= {"nodes": 1, "ntasks": 1, "export": "ALL", "output": output.absolute(), "wrap": shlex.join(command)}
    return ["sbatch", "--wait", *(f"--{name}={value}" for name, value in asked.items())]


def cancel(run_dir: Path) -> None:
    """Cancel the job of a run, if there is one."""
    subprocess.run(["scancel", "--name", job_name(run_dir)])


def job_name(run_dir: Path) -> str:
    """A run's id, and a hash of its folder's path, which is another for a run of the same id elsewhere."""
    return f"{run_dir.name}-{hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:8]}"


def probe(runs: Path, world: int | None) -> tuple[Machine, dict]:
    """A node and its environment, asked in a job: this host may be of another kind. It counts as many GPUs as a run in
    `world` processes takes, since that many are its job's. Raises UserError where no such job can run."""
    partition = ["--partition", name] if (name := os.environ.get("SBATCH_PARTITION")) else []
    kinds = subprocess.run(["sinfo", "--noheader", "--format=%G", *partition], capture_output=True, text=True).stdout
    runs.mkdir(parents=True, exist_ok=True)
    output = runs.absolute() / f".probe-{os.getpid()}.txt"
    asked = {"gpus": 1} if "gpu" in kinds else {}
    try:
        words = sbatch([sys.executable, "-c", PROBE], output, time=SPARE_MIN, **asked)
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        said = output.read_text() if output.exists() else done.stderr
        if done.returncode:
            raise UserError(f"no node can load the lab: {(said.strip() or 'it says nothing').splitlines()[-1]}")
        machine, env = probed(said)
    finally:
        output.unlink(missing_ok=True)
    return replace(machine, gpus=machine.gpus and (world or WORLD)), env
