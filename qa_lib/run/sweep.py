"""The driver: many specs, each through its family's notebook in a process of its own, one at a time on each GPU.

The notebook is a log and the record is the result: papermill's exit code and metadata cannot tell a dead kernel, or a
notebook that ran another row, from success. A run counts when its record is where it must be, has the asked hash, is
terminal and complete. This module never imports torch.
"""

import argparse
import ast
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import psutil
from tqdm import tqdm

from qa_lib import record
from qa_lib.errors import UserError
from qa_lib.run.plan import add_source_arguments, plan
from qa_lib.spec import Machine, Spec, find_scale
from qa_lib.variants import FAMILIES, VARIANTS, find_family, find_variant

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.2
STILLBORN = "Kernel died before replying"  # kernels that start together can race for a port; the run never began
# Warnings and redrawn bars would fill the notebooks that the runs leave behind.
QUIET = {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "PYDEVD_DISABLE_FILE_VALIDATION": "1"}


class NotebookError(UserError):
    """A notebook that must not be run; the message names it."""


def probe() -> tuple[Machine, dict]:
    """This machine and its environment, asked in a process of its own: the driver must not hold a GPU."""
    code = (
        "import dataclasses, json; from qa_lib.measure import machine as measure;"
        "print(json.dumps([dataclasses.asdict(this_machine()), environment()]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"this Python cannot load the lab: {done.stderr.strip().splitlines()[-1]}")
    machine, env = json.loads(done.stdout.splitlines()[-1])
    return Machine(**machine | {"backends": tuple(machine["backends"])}), env


def notebook_of(variant: str) -> Path:
    """The notebook of a row's family, relative to the repository."""
    return Path("notebooks", f"{FAMILIES[find_variant(variant).family]}.ipynb")


def check_notebook(path: Path, parameters: dict) -> None:
    """Refuse a notebook that would not take the parameters: papermill would run its defaults without a word."""
    try:
        cells = json.loads((ROOT / path).read_text(encoding="utf-8"))["cells"]
        tagged = [cell for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
        sources = ["".join(cell["source"]) for cell in tagged]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise NotebookError(f"{path}: not a readable notebook ({problem})") from problem
    if len(tagged) != 1:
        raise NotebookError(f"{path}: {len(tagged)} cells are tagged 'parameters', and exactly one must be")
    names = {node.id for node in ast.walk(ast.parse(sources[0])) if isinstance(node, ast.Name)}
    if absent := sorted(set(parameters) - names):
        raise NotebookError(f"{path}: its parameters cell does not set {', '.join(absent)}")


def card(gpu: int) -> str:
    """What CUDA_VISIBLE_DEVICES must be for a process to see only this one of the cards that are visible here."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[gpu].strip() if visible else str(gpu)


class Job:
    """One run in a subprocess: started, watched, and judged by its record."""

    def __init__(self, spec: Spec, runs: Path, gpu: int | None, share: bool, claim: contextlib.ExitStack):
        self.spec, self.gpu, self.claim = spec, gpu, claim
        self.dir = runs / spec.run_path
        self.begin, self.trains, self.launched = time.monotonic(), None, time.time()
        notebook, parameters = notebook_of(spec.variant), notebook_parameters(spec, runs)
        command = [sys.executable, "-m", "papermill", str(notebook), str(_relative(self.dir / "notebook.ipynb"))]
        command += ["--kernel", "python3", "--no-progress-bar", "--log-output", "--cwd", "."]
        for name, value in parameters.items():
            # -r keeps a text a text: a model folder named 1e3 must not become a number.
            command += ["-r" if isinstance(value, str) else "-p", name, str(value)]
        environment = os.environ | QUIET | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": card(gpu)})
        environment |= {"QA_LIB_SHARE": "1"} if share else {}
        if spec.scale.threads:
            environment["OMP_NUM_THREADS"] = str(spec.scale.threads)
        with open(self.dir / "log.txt", "w") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)

    @property
    def over_time(self) -> bool:
        """Whether it has had more than its time, not counting what it waited for the GPU while others trained on it."""
        now = time.monotonic()
        if self.trains is None:
            with contextlib.suppress(OSError):
                if (self.dir / "steps.jsonl").stat().st_mtime > self.launched:  # begun anew when its turn has come
                    self.trains = now
        if now - (self.trains or self.begin) <= self.spec.scale.time_limit_s:
            return False
        return self.trains is not None or record.WAITING not in (self.dir / "log.txt").read_text(errors="replace")

    def progress(self) -> tuple[int, int | None]:
        """Steps done and planned, as far as the run's files tell."""
        try:
            planned = record.read_record(self.dir)["spec"]["planned_steps"]
            with open(self.dir / "steps.jsonl", "rb") as stream:
                stream.seek(max(0, os.fstat(stream.fileno()).st_size - 400))
                return json.loads(stream.read().splitlines()[-1])["step"], planned
        except (record.RecordError, OSError, ValueError, IndexError):
            return 0, None

    def kill(self) -> None:
        """End the process and all below it; the kernel lives in a session of its own."""
        try:
            family = [*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)]
        except psutil.NoSuchProcess:
            family = []
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        self.process.wait()
        psutil.wait_procs(family, timeout=10)

    def settle(self, reason: str | None = None) -> dict | None:
        """Judge the ended run and return its record; `reason` says why the driver ended it. None: not ours to judge,
        another process works on it."""
        try:
            with self.claim, record.lock(self.dir):
                scrub(self.dir)
                return self._judge(reason)
        except record.RunTaken:
            return None

    def _last_words(self) -> str:
        lines = (self.dir / "log.txt").read_text(errors="replace").split("\n")
        return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "no word in log.txt")

    def _judge(self, reason: str | None) -> dict:
        entry = record.read_record(self.dir)
        entry["time"]["notebook_s"] = round(time.monotonic() - self.begin, 3)
        if entry["status"] == "running":  # else it had its result before it was ended
            code = self.process.returncode
            reason = reason or f"the notebook ended (exit code {code}) before the run did: {self._last_words()}"
            return record.finish(self.dir, entry, "killed", {"kind": "killed", "message": reason})
        if fault := _fault(entry, self.spec):
            return record.finish(self.dir, entry, "error", {"kind": "IncompleteRun", "message": fault})
        record.write_record(self.dir, entry)
        return entry


def scrub(run_dir: Path) -> None:
    """Take this machine's folders out of a run's notebook and log, where warnings and tracebacks have put them."""
    places = {
        str(ROOT): ".",
        sys.prefix: "<python>",
        sys.base_prefix: "<python>",
        str(Path.home()): "~",
        "/usr/local": "<system>",
    }
    for path in (run_dir / "notebook.ipynb", run_dir / "log.txt"):
        if path.exists():
            text = clean = path.read_text(encoding="utf-8", errors="replace")
            for place, name in sorted(places.items(), key=lambda item: -len(item[0])):
                clean = clean.replace(place + "/", name + "/") if len(place) > 1 else clean
            if clean != text:
                record.write_atomically(path, clean)


def _fault(entry: dict, spec: Spec) -> str | None:
    """What is wrong with a terminal record, if anything."""
    if entry["spec"]["hash"] != spec.hash:
        return f"the record is of another run ({entry['run_id']})"
    if entry["status"] == "ok":
        steps, planned = entry["time"]["steps"], entry["spec"]["planned_steps"]
        if steps != planned:
            return f"{steps} of {planned} steps were trained"
        if entry["quality"]["n"] != entry["spec"]["n_eval"]:
            return f"{entry['quality']['n']} of {entry['spec']['n_eval']} questions were answered"
    return None


def notebook_parameters(spec: Spec, runs: Path) -> dict:
    """What the driver passes to a notebook's parameters cell."""
    return {
        "variant": spec.variant,
        "scale": spec.scale.name,
        "seed": spec.seed,
        "data": str(_relative(spec.data_source)) if Path(spec.data_source).exists() else spec.data_source,
        "model": str(_relative(spec.model_source)) if Path(spec.model_source).exists() else spec.model_source,
        "micro_batch": spec.asked.micro_batch,
        "runs": str(_relative(runs)),
    }


def _relative(path: str | Path) -> Path:
    """The path as seen from the repository, so that a notebook shows no machine's folders where it need not."""
    return Path(os.path.relpath(Path(path).resolve(), ROOT))


def is_finished(spec: Spec, runs: Path, retry: set[str]) -> bool:
    """Whether a sweep may pass over this run. One that was skipped is not finished once the machine can do it."""
    path = runs / spec.run_path
    if not (path / "record.json").exists():
        return False
    entry = record.read_record(path)
    if entry["status"] == "skipped" and not spec.skip:
        return False
    return entry["status"] in record.FINISHED and entry["status"] not in retry and _fault(entry, spec) is None


def sweep(
    specs: list[Spec],
    runs: Path,
    env: dict,
    gpus: list[int] | None = None,
    force: bool = False,
    retry: str = "",
    share: bool = False,
) -> list[dict]:
    """Run what is not finished yet and return every spec's record, in order.

    `gpus` are the cards to use, a process for each time a card is named; they take turns in training, so that one
    prepares while another is timed. `share` lets them train at once and records no times. `force` drops finished
    records first, `retry` names one more status to run again. Ctrl-C ends the runs in progress, keeps the finished
    ones, and is raised on.
    """
    for notebook, parameters in {notebook_of(s.variant): notebook_parameters(s, runs) for s in specs}.items():
        check_notebook(notebook, parameters)
    free: list[int | None] = list(gpus) if gpus else [None] * side_by_side(specs)
    again = {"oom": {"oom"}, "": set()}[retry]
    queue = deque(s for s in specs if force or not is_finished(s, runs, again))
    active: list[Job] = []
    reborn: set[str] = set()  # runs that were given a second kernel
    done = len(specs) - len(queue)
    layout = "{l_bar}{bar}| {n:.1f}/{total} rows [{elapsed}<{remaining}]{postfix}"
    bar = tqdm(total=len(specs), initial=done, disable=None, bar_format=layout, desc="sweep", mininterval=0.5)

    def finished(spec: Spec, entry: dict) -> None:
        nonlocal done
        done += 1
        if bar.disable:  # no terminal: a line a run instead of a bar
            print(f"[{done}/{len(specs)}] {_line(spec, entry)}", flush=True)

    try:
        with bar:
            while queue or active:
                for _ in range(len(queue)):
                    if not free:
                        break
                    spec = queue.popleft()
                    outcome = _start(spec, runs, env, free[-1], force, again, share)
                    if isinstance(outcome, Job):
                        active.append(outcome)
                        free.pop()
                    elif outcome:
                        finished(spec, outcome)
                    else:
                        queue.append(spec)  # another sweep works on it: look again later
                time.sleep(POLL_S)
                for job in list(active):
                    late = job.over_time
                    if job.process.poll() is None and not late:
                        continue
                    job.kill()
                    limit = f"over its time limit of {job.spec.scale.time_limit_s} s" if late else None
                    entry = job.settle(limit)
                    active.remove(job)
                    free.append(job.gpu)
                    stillborn = entry and entry["status"] == "killed" and STILLBORN in entry["error"]["message"]
                    if entry and not (stillborn and job.spec.hash not in reborn):
                        finished(job.spec, entry)
                        continue
                    if stillborn:
                        reborn.add(job.spec.hash)
                    queue.append(job.spec)
                _show(bar, done, active)
            bar.n = done
    except BaseException:
        for job in active:
            job.kill()
        for job in active:
            with contextlib.suppress(Exception):  # a full disk, say: what is raised is what came first
                job.settle("the sweep was stopped")
        raise
    return [record.read_record(runs / spec.run_path) for spec in specs]


def side_by_side(specs: list[Spec]) -> int:
    """How many runs at a time: one, but on a CPU as many as the cores allow where a run takes few of them."""
    threads = {spec.scale.threads for spec in specs if spec.hardware == "cpu"}
    return max(1, min(8, (os.cpu_count() or 1) // max(threads))) if threads and None not in threads else 1


def _start(spec, runs, env, gpu, force, again, share) -> Job | dict | None:
    """Begin a run: a Job; or a record if there is nothing to do; or None if another process has the run."""
    path = runs / spec.run_path
    with contextlib.ExitStack() as claim:
        try:
            claim.enter_context(record.lock(path, ".driver.lock"))
            with record.lock(path):
                if not force and is_finished(spec, runs, again):  # another sweep may have just done it
                    return record.read_record(path)
                if force:
                    for old in path.iterdir():
                        if not old.name.endswith(".lock"):
                            shutil.rmtree(old) if old.is_dir() else old.unlink()
                entry = record.new_record(spec, env)
                if spec.skip:
                    return record.finish(path, entry, "skipped", {"kind": "skipped", "message": spec.skip})
                # So that a kernel that dies before its first line leaves no older result standing.
                record.write_record(path, entry)
        except record.RunTaken:
            return None
        return Job(spec, runs, gpu, share, claim.pop_all())


def _show(bar: tqdm, done: int, active: list[Job]) -> None:
    notes, fraction = [], 0.0
    for job in active:
        step, planned = job.progress()
        fraction += step / planned if planned else 0.0
        notes.append(
            f"{job.spec.variant} s{job.spec.seed} {step}/{planned}" if planned else f"{job.spec.variant} starts"
        )
    bar.n = done + fraction
    bar.set_postfix_str(", ".join(notes), refresh=False)
    bar.update(0)


def _line(spec: Spec, entry: dict) -> str:
    """One run's outcome in one line."""
    wall, f1, note = entry["time"]["wall_s"], entry["quality"]["f1"], entry["error"]["message"]
    parts = [f"{spec.variant} seed {spec.seed}: {entry['status']}"]
    parts += [f"{wall:.0f} s"] if wall is not None else []
    parts += [f"F1 {f1:.1f}"] if f1 is not None else []
    return ", ".join(parts + ([note] if note else []))


EXAMPLE = """examples:
  python -m qa_lib sweep --scale smoke                              every row, offline, on a CPU
  python -m qa_lib sweep --family A --scale bench --seeds 0 1 2 --gpus 0 1
  python -m qa_lib sweep --variants A1,A4 --scale local --data squad/ --model bert/ --plan"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m qa_lib sweep`."""
    rows = parser.add_mutually_exclusive_group()
    rows.add_argument("--variants", metavar="A1,A4", help="these rows only (default: all)")
    rows.add_argument("--family", metavar="A", help="the rows of one family")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], metavar="N", help="a run of every row for each (0)"
    )
    add_source_arguments(parser)
    parser.add_argument(
        "--gpus", type=int, nargs="+", metavar="N", help="cards to use; one named twice prepares a run meanwhile"
    )
    parser.add_argument(
        "--share", action="store_true", help="train at once on a card that is named twice; records no times"
    )
    parser.add_argument("--plan", action="store_true", help="say what would run, and run nothing")
    parser.add_argument("--force", action="store_true", help="run again what is finished, too")
    parser.add_argument("--retry", choices=["oom"], default="", help="run again what ended with this status, too")


def main(args: argparse.Namespace) -> int:
    """Plan and run a sweep; exit code 1 when a run failed."""
    asked = [name.strip() for name in (args.variants or "").split(",") if name.strip()]
    if args.variants is not None and not asked:
        raise UserError(f"--variants {args.variants!r} names no row")
    names = asked or (find_family(args.family) if args.family else list(VARIANTS))
    for name in names:
        find_variant(name)
    find_scale(args.scale)
    machine, env = probe()
    if absent := [gpu for gpu in args.gpus or [] if not 0 <= gpu < machine.gpus]:
        raise UserError(f"--gpus {absent[0]}: this machine has {machine.gpus} GPUs")
    specs = plan(names, args.scale, args.seeds, args.data, args.model, args.micro_batch, machine)
    if args.plan:
        again = {args.retry} - {""}
        for spec in specs:
            state = "skip: " + spec.skip if spec.skip else "run"
            state = "finished" if not args.force and is_finished(spec, args.runs, again) else state
            print(f"{spec.group}/{spec.run_id:24} {state}")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a batch system's way of Ctrl-C
    entries = sweep(specs, args.runs, env, args.gpus, args.force, args.retry, args.share)
    failed = [spec for spec, entry in zip(specs, entries, strict=True) if entry["status"] in ("error", "killed")]
    for spec in failed:
        entry = record.read_record(args.runs / spec.run_path)
        print(f"{spec.group}/{spec.run_id}: {entry['status']}, {entry['error']['message']}", file=sys.stderr)
    return 1 if failed else 0
