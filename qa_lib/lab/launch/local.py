"""Runs in processes of their own: started on their cards, ended with all their children, judged by their records.

This is the one scheduler, here and on Slurm (SlurmLauncher), of `sweep`, `tune` and `max-batch` alike. Each run that
may go on at a time has a thread. It takes the run's cards, starts the process and waits for its end. Neither an exit
code nor papermill's metadata can tell a dead kernel, or a notebook that ran another variant, from success. A run counts
when its record is where it must be, has the asked hash, is terminal and complete.

This module never imports torch, unless it has to choose again (run_in_turn): a driver must hold no GPU.
"""

import contextlib
import hashlib
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, TextIO

from qa_lib.errors import UserError, wrapped
from qa_lib.lab.launch.process import DRIVER, child_env, kill, plain_command
from qa_lib.lab.launch.warm import Forked, fork
from qa_lib.paths import importing
from qa_lib.records import record
from qa_lib.signals import stopped_by
from qa_lib.spec.spec import WORLD, Machine, Spec

POLL_S = 0.2
AT_A_TIME = 64  # jobs in the queue
SPARE_MIN = 10  # minutes that a job may take beyond its run's limit, which does not count what a run needs to start
FIRST_STEP_S = 1800  # seconds that each of the first steps of a recommended run may take, with all that is compiled
NEVER_BEGAN = "NeverBegan"  # kind of the error where a process ended before its run began
DRIVER_LOCK = (
    ".driver.lock"  # held by the driver of a run from before its process starts to the end
)


def say_idle(machine: Machine, gpus: list[int] | None) -> None:
    """Say so where GPUs stay idle that nobody has spoken of."""
    if machine.gpus > 1 and not gpus:
        cards = " ".join(map(str, range(machine.gpus)))
        print(
            f"one of {machine.gpus} GPUs has work at a time (family P takes more); --gpus {cards} uses all"
        )


PROBE = (
    "import dataclasses, json; from qa_lib.measure.hardware import environment, this_machine;"
    "print(json.dumps([dataclasses.asdict(this_machine()), environment()]))"
)


def probe() -> tuple[Machine, dict]:
    """This machine and its environment, asked in a process of its own, since the driver must not hold a GPU."""
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(
        command, env=importing(os.environ), capture_output=True, text=True, errors="replace"
    )
    return probed("this Python", done.returncode, done.stderr if done.returncode else done.stdout)


def probed(who: str, code: int, said: str) -> tuple[Machine, dict]:
    """What PROBE has printed. Raises UserError, which says who has run it, where that has failed."""
    if code:
        raise UserError(
            f"{who} cannot load the lab: {(said.strip() or 'it says nothing').splitlines()[-1]}"
        )
    machine, env = json.loads(said.splitlines()[-1])
    return Machine(**machine), env


@dataclass
class Launcher:
    """Runs specs in processes of their own, as many at a time as cards are named.

    Runs on one card take turns in training, so that one prepares while another is timed; with `share` they train at
    once, and record no times. `force` drops finished records first. `command` makes the command of a run, and
    `time_limit_s` replaces its preset's limit. With `warm` processes begin with PyTorch imported (lab/launch/warm.py). With
    `aloud` runs print here; log.txt has their errors. Raises UserError for a card that the
    machine does not have.
    """

    runs: Path
    machine: Machine
    env: dict
    gpus: list[int] | None = None
    share: bool = False
    force: bool = False
    command: Callable[[Spec, Path], list[str]] = plain_command
    time_limit_s: float | None = None
    warm: bool = False
    aloud: bool = False
    active: list[Spec] = field(default_factory=list)  # whose processes are at work
    stopped: threading.Event = field(default_factory=threading.Event)
    why: str = ""  # it was stopped
    refused: dict[Path, dict] = field(
        default_factory=dict
    )  # by run_path: records that nobody wrote
    idle: ClassVar = ("waiting",)  # statuses in which a run's time limit does not count

    def __post_init__(self):
        if absent := [gpu for gpu in self.gpus or [] if not 0 <= gpu < self.machine.gpus]:
            raise UserError(f"--gpus {absent[0]}: this machine has {self.machine.gpus} GPUs")

    def is_finished(self, spec: Spec) -> bool:
        """Whether this run may be passed over. One whose record cannot be read may not: `run_all` says why."""
        with contextlib.suppress(record.RecordError):
            return self._is_finished(spec)
        return False

    def _is_finished(self, spec: Spec) -> bool:
        return not self.force and is_finished(self.runs, spec)

    def entry_of(self, spec: Spec) -> dict:
        """The record of a run that is done with. Raises RecordError."""
        return self.refused.get(spec.run_path) or record.read_record(self.runs / spec.run_path)

    def run_all(
        self, specs: list[Spec], ended=lambda spec, entry: None, look=lambda: None
    ) -> list[dict]:
        """Run what is not finished and return every spec's record, in order.

        Each gets as many cards as it takes, in order: one of many cards waits for them, and those after it with it.
        `ended` is called with each run that ends, `look` every POLL_S seconds. A signal, and any other error here, ends
        the runs at work, keeps the finished ones, and is raised on.
        """
        free, waiting, pending, entries = self._cards(specs), deque(specs), {}, {}
        pool = ThreadPoolExecutor(len(free))
        try:
            while waiting or pending:
                while waiting and (cards := _first(free, waiting[0].world)):
                    spec = waiting.popleft()
                    for card in cards:
                        free.remove(card)
                    named = tuple(card for card in cards if card is not None)
                    pending[pool.submit(self._run, spec, named)] = spec, cards
                for future in wait(pending, POLL_S, FIRST_COMPLETED).done:
                    spec, cards = pending.pop(future)
                    free += cards
                    if entry := future.result():
                        entries[spec.run_path] = entry
                        ended(spec, entry)
                    else:
                        waiting.append(spec)  # another process works on it: look again later
                look()
        except BaseException as problem:
            self.why = f"the driver was {stopped_by(problem)}"
            self.stopped.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        return [entries[spec.run_path] for spec in specs]

    def _cards(self, specs: list[Spec]) -> list[int | None]:
        """What there is for runs to take: the cards that were named; or, for each run that may be at work at a time, a
        None, with which it sees all cards."""
        if not self.gpus:
            return [None] * side_by_side(specs)
        world = max((spec.world for spec in specs), default=1)
        if len(set(self.gpus)) < world:
            raise UserError(
                f"--gpus {' '.join(map(str, self.gpus))}: a run takes {world} different cards"
            )
        return list(self.gpus)

    def _run(self, spec: Spec, cards: tuple[int, ...]) -> dict | None:
        """One run from its claim to its record; None while another process works on it."""
        run_dir, prepared = self.runs / spec.run_path, False
        try:
            with record.lock(run_dir, DRIVER_LOCK):
                entry = self._prepare(spec, run_dir)
                prepared = True
                entry = entry or self._work(spec, run_dir, cards)
                if (
                    entry["error"]["kind"] == NEVER_BEGAN
                ):  # kernels that start together can race for a port: once more
                    entry = self._prepare(spec, run_dir) or self._work(spec, run_dir, cards)
                return entry
        except record.RunTaken:
            self.stopped.wait(POLL_S)
            return None
        except (record.RecordError, OSError, EOFError) as problem:
            if isinstance(problem, record.RecordError) and not prepared:
                return self._refuse(spec, problem)
            return self._lost(spec, run_dir, problem)

    def _refuse(self, spec: Spec, problem: record.RecordError) -> dict:
        """A record that says why a run cannot begin, such as for a record that cannot be read. It is not written: what
        is in the folder may be a newer version's, or a link to somebody else's."""
        entry = record.new_record(spec, self.env) | {"status": "error"}
        entry["error"] |= {"kind": type(problem).__name__, "message": str(problem)}
        self.refused[spec.run_path] = entry
        return entry

    def _lost(self, spec: Spec, run_dir: Path, problem: Exception) -> dict:
        """A record for a run whose own was removed or spoilt while it ran, or which had no process, since the server of
        warm ones was gone; raises any other `problem` again, so that no whole record is written over."""
        try:
            entry = record.read_record(run_dir)
        except record.RecordError:
            if self.stopped.is_set():
                raise problem from None
            lost = {
                "kind": "RecordLost",
                "message": f"its record was removed or spoilt while it ran ({problem})",
            }
            return record.finish(run_dir, record.new_record(spec, self.env), "killed", lost)
        if entry["status"] != record.STARTING or not isinstance(
            problem, EOFError | ConnectionError
        ):
            raise problem
        return record.finish(
            run_dir, entry, "killed", {"kind": "killed", "message": self.why or "it had no process"}
        )

    def _prepare(self, spec: Spec, run_dir: Path) -> dict | None:
        """The record, where there is nothing to do; else None, with the folder ready for the run's process."""
        with record.lock(run_dir):
            if self._is_finished(spec):  # another driver may have just done it
                return record.read_record(run_dir)
            if self.force:
                record.empty_folder(run_dir)
            record.check_folder(run_dir)
            entry = record.new_record(spec, self.env)
            if spec.skip:
                return record.finish(
                    run_dir, entry, "skipped", {"kind": "skipped", "message": spec.skip}
                )
            # So that a process that dies before its first line leaves no older result standing.
            record.write_record(run_dir, entry | {"status": record.STARTING})

    def _work(self, spec: Spec, run_dir: Path, cards: tuple[int, ...]) -> dict:
        """The record of a run that has its process now. Raises RunTaken if another process works on it."""
        since = time.time() - 1  # the clock of a file system is coarse
        begin, env = time.monotonic(), child_env(cards, self._shares(cards), spec.preset.threads)
        with record.open_to_write(run_dir / "log.txt", "w") as log:
            process = self._start(spec, run_dir, env, log)
        self.active.append(spec)
        try:
            reason = self._watch(process, spec, since)
        finally:
            self.active.remove(spec)
            self._end(process, run_dir)
        seconds = time.monotonic() - begin
        over_limit = reason is not None and not self.stopped.is_set()
        with record.lock(run_dir):
            return judge(spec, run_dir, reason, process.returncode, seconds, over_limit)

    def _start(
        self, spec: Spec, run_dir: Path, env: dict[str, str], log: TextIO
    ) -> subprocess.Popen | Forked:
        """A run's process, which ends with this driver."""
        env |= {DRIVER: str((run_dir / DRIVER_LOCK).absolute())}
        if self.warm:
            return fork(self.command(spec, self.runs), env, log.name)
        words = self.command(spec, self.runs)
        return subprocess.Popen(words, env=env, stdout=None if self.aloud else log, stderr=log)

    def _end(self, process: subprocess.Popen, run_dir: Path) -> None:
        """See that nothing of a run is at work any more."""
        kill(process)

    def _shares(self, cards: tuple[int, ...]) -> bool:
        """Whether other runs of ours train on one of these cards at the same time."""
        return self.share and any(self.gpus.count(gpu) > 1 for gpu in cards)

    def _watch(self, process: subprocess.Popen, spec: Spec, since: float = 0.0) -> str | None:
        """Wait until the process, which began at the time `since`, has ended, or must be ended: then the reason.

        What a run waits for the GPU, while others train on it, is no part of its time. Each of the first steps of a
        recommended run has a limit of its own, since a compiler can hang there.
        """
        first_steps = FirstSteps(self.runs / spec.run_path, since) if spec.recommended else None
        seen, used, limit = time.monotonic(), 0.0, self.time_limit_s or spec.preset.time_limit_s
        while process.poll() is None:
            if self.stopped.wait(POLL_S):
                return self.why
            now = time.monotonic()
            if record.read_record(self.runs / spec.run_path)["status"] not in self.idle:
                used += now - seen
            seen = now
            if used > limit:
                return f"over its time limit of {limit} s"
            if first_steps and first_steps.seconds() > FIRST_STEP_S:
                return f"step {first_steps.done + 1} was not done after {FIRST_STEP_S} s"
        return None


class FirstSteps:
    """How long a run that began at the time `since` has been at work on the step that it is in, one of the first."""

    def __init__(self, run_dir: Path, since: float):
        self.path, self.since = run_dir / "steps.jsonl", since
        self.done = None  # steps; None before training begins, which makes the file anew
        self.last = 0.0  # when that step was done, by the monotonic clock

    def seconds(self) -> float:
        """Seconds since the last step was logged, or since training began; 0 before that, and after the first steps."""
        if self.done is not None and self.done >= record.FIRST_STEPS:
            return 0.0
        done = steps_logged(self.path, self.since)
        if done != self.done:
            self.done, self.last = done, time.monotonic()
        return 0.0 if done is None else time.monotonic() - self.last


def steps_logged(path: Path, since: float = 0.0) -> int | None:
    """How many steps a run has done by its steps.jsonl; None where that was not written since then."""
    try:
        if path.stat().st_mtime < since:
            return None
        return max((line["step"] for line in record.read_steps(path)), default=0)
    except OSError:
        return None


def run_in_turn(
    launcher: Launcher, specs: list[Spec], say, ended=lambda *_: None, look=lambda: None
) -> list[Spec]:
    """`run_all` of what is not finished. Where a run that was `recommended` was more than its machine can do, the next
    choice takes its place, until one works; `say` is told each choice. Returns the specs that stand in the end. Raises
    UserError where none is left."""
    todo = [spec for spec in specs if not launcher.is_finished(spec)]
    while todo:
        for said in dict.fromkeys(spec.adjusted[0] for spec in todo if spec.chosen):
            say(wrapped(said))
        next_ones = {}
        for spec, entry in zip(todo, launcher.run_all(todo, ended, look), strict=True):
            if spec.recommended and record.unable(entry):
                from qa_lib.lab.search.recommend import choose  # imports torch

                next_ones[spec.run_path] = choose(spec, launcher.machine, launcher.runs)
        specs = [next_ones.get(spec.run_path, spec) for spec in specs]
        # The next choice may be one of the others.
        specs = list({spec.run_path: spec for spec in specs}.values())
        todo = [spec for spec in next_ones.values() if not launcher.is_finished(spec)]
    return specs


def _first(free: list[int | None], world: int) -> list[int | None]:
    """What a run of so many processes takes of what is free: as many different cards, or one None; nothing where there
    are too few."""
    if None in free:
        return [None]
    different = list(dict.fromkeys(free))[:world]
    return different if len(different) == world else []


def side_by_side(specs: list[Spec]) -> int:
    """How many runs at a time: one, but on a CPU as many as the cores allow where a run takes few of them."""
    threads = {
        spec.preset.threads and spec.preset.threads * spec.world
        for spec in specs
        if spec.hardware == "cpu"
    }
    return (
        max(1, min(8, (os.cpu_count() or 1) // max(threads)))
        if threads and None not in threads
        else 1
    )


def judge(
    spec: Spec,
    run_dir: Path,
    reason: str | None,
    code: int,
    seconds: float,
    over_limit: bool = False,
) -> dict:
    """The record of a run whose process has ended; `reason` says why the driver ended it, which it did of its own where
    the run was `over_limit`, and `code` is its exit code."""
    entry = record.read_record(run_dir)
    if (run_dir / "notebook.ipynb").exists():
        entry["time"]["notebook_s"] = round(seconds, 3)
    if spec.chosen:  # a notebook is told the variant alone
        entry["spec"]["adjusted"] = list(
            dict.fromkeys([*spec.adjusted, *entry["spec"]["adjusted"]])
        )
    if entry["status"] not in record.TERMINAL:  # else it had its result before it was ended
        kind = NEVER_BEGAN if entry["status"] == record.STARTING and not reason else "killed"
        # A compiler that crashes takes the process with it, and one that hangs keeps it for ever: of a run that was
        # recommended, this is told from a stop, and from a time limit that was over before training began.
        steps = steps_logged(run_dir / "steps.jsonl")
        in_first_steps = (steps or 0) < record.FIRST_STEPS
        hung = over_limit and steps is not None
        unable = spec.recommended and kind == "killed" and in_first_steps and (hung or not reason)
        reason = (
            reason
            or f"its process ended (exit code {code}) before the run did: {_last_words(run_dir)}"
        )
        return record.finish(
            run_dir, entry, "error" if unable else "killed", {"kind": kind, "message": reason}
        )
    if fault := _fault(entry, spec):
        return record.finish(run_dir, entry, "error", {"kind": "IncompleteRun", "message": fault})
    record.write_record(run_dir, entry)
    return entry


def _last_words(run_dir: Path) -> str:
    lines = record.regular(run_dir / "log.txt").read_text(errors="replace").split("\n")
    return next(
        (line.strip()[:200] for line in reversed(lines) if line.strip()), "no word in log.txt"
    )


def is_finished(runs: Path, spec: Spec) -> bool:
    """Whether a run's record has its result. One that was skipped is not finished once the machine can do it."""
    path = runs / spec.run_path
    if not (path / "record.json").exists():
        return False
    entry = record.read_record(path)
    able = entry["status"] == "skipped" and not spec.skip
    return entry["status"] in record.FINISHED and not able and _fault(entry, spec) is None


def _fault(entry: dict, spec: Spec) -> str | None:
    """What is wrong with a terminal record, if anything."""
    if entry["spec"]["hash"] != spec.hash:
        return f"the record is of another run ({entry['run_id']})"
    if entry["status"] == "ok":
        steps, planned = entry["time"]["steps"], entry["spec"]["planned_steps"]
        if steps != planned:
            return f"{steps} of {planned} steps were trained"
        answered = entry["quality"].get("n")
        if answered != entry["spec"]["n_eval"]:
            return f"{answered} of {entry['spec']['n_eval']} questions were answered"
    return None


def run_cold(spec: Spec, runs: str | Path) -> dict:
    """The record of a run by the command `python -m qa_lib run`, which finds nothing cached by this library, Inductor
    and Triton; its `notebook_s` is what the command takes from its start to its end. Raises CalledProcessError where
    the command fails, which has said why."""
    options = spec.own | {"preset": spec.preset.name, "seed": spec.seed, "runs": runs}
    options |= {"data": spec.data_source, "model": spec.model_source}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    Path(runs, spec.run_path, "record.json").unlink(
        missing_ok=True
    )  # a finished run would be left alone
    with tempfile.TemporaryDirectory() as empty:
        names = ("QA_LIB_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        env = importing(os.environ | {name: os.path.join(empty, name) for name in names})
        begin, command = (
            time.monotonic(),
            [sys.executable, "-m", "qa_lib", "run", spec.variant, *words],
        )
        subprocess.run(command, env=env, check=True)
        seconds = time.monotonic() - begin
    entry = record.read_record(Path(runs, spec.run_path))
    entry["time"] |= {
        "notebook_s": round(seconds, 3),
        "compile_cached": False,
    }  # its own code at most
    record.write_record(Path(runs, spec.run_path), entry)
    return entry


class SlurmLauncher(Launcher):
    """Runs specs as jobs of Slurm, at most AT_A_TIME in its queue, on any host that has `sbatch`; see Launcher.

    Each run is a job of its own on one node. Its command, its record and how they are judged are those of a run on this
    machine. `sbatch --wait` stands for the job here. It ends when the job ends, with the job's exit code, whether or
    not the cluster keeps accounts. Partition, account and the like are Slurm's own variables: SBATCH_PARTITION,
    SBATCH_ACCOUNT, SBATCH_CPUS_PER_GPU and so on.

    This checkout, its Python and the runs folder must be on a file system that the nodes share. A driver that is
    stopped cancels its jobs, which takes up to a minute. One that is killed outright leaves them. The next driver of
    that folder cancels those that have not begun, and waits for the others.

    Several drivers on several hosts run nothing twice where `flock` holds for all of them: on NFS (but not with the
    option local_lock), on Lustre that is mounted with the option flock, and on most others. Where it holds for one host
    alone, start all drivers of a folder on one host.
    """

    idle = ("waiting", record.STARTING)  # the latter in Slurm's queue

    def _cards(self, specs):
        return [None] * max(1, min(AT_A_TIME, len(specs)))

    def _start(self, spec, run_dir, env, log):
        cancel(run_dir)  # what a driver that was killed has left in the queue
        limit_min = math.ceil((self.time_limit_s or spec.preset.time_limit_s) / 60) + SPARE_MIN
        asked = {"job-name": job_name(run_dir), "open-mode": "append", "time": limit_min}
        if spec.hardware != "cpu":
            asked["gpus"] = spec.world
        if spec.preset.threads:
            asked["cpus-per-task"] = spec.preset.threads * spec.world
        words = sbatch(self.command(spec, self.runs), run_dir / "log.txt", **asked)
        # In a session of its own, which Ctrl-C does not reach: it has to wait until the job is gone.
        return subprocess.Popen(
            words, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def _end(self, process, run_dir):
        if process.poll() is None:
            cancel(run_dir)
        process.wait()
        os.utime(run_dir)  # else NFS may show the folder as it was up to a minute ago


def sbatch(command: list[str], output: Path, **asked) -> list[str]:
    """The command that runs another as a job on one node, what it prints going to `output`, and waits for its end."""
    asked |= {
        "nodes": 1,
        "ntasks": 1,
        "export": "ALL",
        "output": output.absolute(),
        "wrap": shlex.join(command),
    }
    return ["sbatch", "--wait", *(f"--{name}={value}" for name, value in asked.items())]


def cancel(run_dir: Path) -> None:
    """Cancel the job of a run, if there is one."""
    slurm("scancel", "--name", job_name(run_dir))


def slurm(*words: str, **options) -> subprocess.CompletedProcess:
    """Run one of Slurm's commands. Raises UserError on a host that does not have it."""
    try:
        return subprocess.run(words, **options)
    except FileNotFoundError:
        raise UserError(
            f"--launcher slurm: this host has no Slurm, whose command {words[0]} was not found; start "
            "the sweep where sbatch works, or leave --launcher out"
        ) from None


def job_name(run_dir: Path) -> str:
    """A run's id, and a hash of its folder's path, which is another for a run of the same id elsewhere."""
    return f"{run_dir.name}-{hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:8]}"


def probe_node(runs: Path, world: int | None) -> tuple[Machine, dict]:
    """A node and its environment, asked in a job: this host may be of another kind. It counts as many GPUs as a run in
    `world` processes takes, since that many are its job's. Raises UserError where no such job can run."""
    partition = ["--partition", name] if (name := os.environ.get("SBATCH_PARTITION")) else []
    listed = slurm("sinfo", "--noheader", "--format=%G", *partition, capture_output=True, text=True)
    kinds = listed.stdout
    runs.mkdir(parents=True, exist_ok=True)
    asked = {"gpus": 1} if "gpu" in kinds else {}
    with tempfile.NamedTemporaryFile(dir=runs.absolute(), prefix=".probe-") as output:
        words = sbatch([sys.executable, "-c", PROBE], Path(output.name), time=SPARE_MIN, **asked)
        done = slurm(
            *words, env=importing(os.environ), capture_output=True, text=True, errors="replace"
        )
        machine, env = probed(
            "a node", done.returncode, Path(output.name).read_text() or done.stderr
        )
    return replace(machine, gpus=machine.gpus and (world or WORLD)), env
