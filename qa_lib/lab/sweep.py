"""The sweep: many specs, each through its family's notebook in a process of its own.

The notebook is a log that people can read; the record beside it is the result. This module never
imports torch.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pandas as pd
from tqdm import tqdm

from qa_lib.errors import UserError, one_line, printable, wrapped
from qa_lib.lab.cli.options import overrides_of, variants_of
from qa_lib.lab.launch.compile_cache import use_compile_cache
from qa_lib.lab.launch.local import Launcher, say_idle
from qa_lib.lab.launch.probe import probe
from qa_lib.lab.launch.recommended import run_in_turn
from qa_lib.lab.launch.slurm import SlurmLauncher, probe_node
from qa_lib.lab.search.plan import plan
from qa_lib.packages import check_runner
from qa_lib.paths import ROOT
from qa_lib.records import record
from qa_lib.records.files import RecordError, regular
from qa_lib.spec.presets import find_preset
from qa_lib.spec.resolve import ALL
from qa_lib.spec.spec import Spec
from qa_lib.spec.variants import FAMILIES, VARIANTS, find_variant

NOT_BEGUN = "not begun"  # of a run without a record
LAST_LINE_BYTES = 400  # the last line of a steps.jsonl is shorter than this

# A run's notebook.


def notebook_of(variant: str) -> Path:
    """Return the notebook of a variant's family, relative to paths.ROOT."""
    return Path("notebooks", f"{FAMILIES[find_variant(variant).family]}.ipynb")


def notebook_command(spec: Spec, runs: Path) -> list[str]:
    """Return the command that executes a spec's notebook and leaves it in the run's folder."""
    source = ROOT / notebook_of(spec.variant)
    executed = runs / spec.run_path / "notebook.ipynb"
    command = [sys.executable, "-m", "papermill"]
    command += [_for_papermill(source), _for_papermill(executed)]
    command += ["--kernel", "python3", "--no-progress-bar", "--log-output", "--cwd", "."]
    for name, value in notebook_parameters(spec, runs).items():
        # -r keeps a text a text: a model folder named 1e3 must not become a number.
        option = "-r" if isinstance(value, str) else "-p"
        command += [option, name, str(value)]
    return command


def _for_papermill(path: Path) -> str:
    """Return a path as papermill takes it, which fills in what stands in braces."""
    return _from_here(path).replace("{", "{{").replace("}", "}}")


def notebook_parameters(spec: Spec, runs: Path) -> dict:
    """Return what the driver passes to a notebook's parameters cell.

    Each variant has a notebook of its own, so none is compared in it.
    """
    sources = {"data": spec.data_source, "model": spec.model_source}
    for name, source in sources.items():
        if Path(source).exists():
            sources[name] = _from_here(source)
    return {
        "variant": spec.variant,
        "compare_with": "",
        "preset": spec.preset.name,
        "seed": spec.seed,
        **sources,
        **spec.own,
        "runs": _from_here(runs),
    }


def _from_here(path: str | Path) -> str:
    """Return a path as seen from the current folder, in which notebooks run.

    So a notebook shows no machine's folders where it need not. A link keeps its own name, which is
    that of the data or the model.
    """
    return os.path.relpath(path)


# A sweep at work.


def sweep(specs: list[Spec], launcher: Launcher, on_finish: str | None = None) -> list[dict]:
    """Run what is not finished yet and return every spec's record, in order.

    Prints first what there is to do and what cannot run here, then when each run starts and ends
    and how long is left, and at the end, however it ends, how every run stands. Last comes the
    command `on_finish`. Raises what `Launcher.run_all` and `run_in_turn` raise.
    """
    progress = Progress(specs, launcher)
    progress.print_plan(specs)
    try:
        specs = run_in_turn(launcher, specs, progress.tell, progress.ended, progress.look)
    finally:
        progress.close()
        table = status_table(specs, launcher)
        counts = table["status"].value_counts().to_dict()
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(printable(f"\n{_summary(table, counts)}"), flush=True)
        if on_finish:
            run_on_finish(on_finish, counts)
    return [launcher.entry_of(spec) for spec in specs]


class Progress:
    """What a sweep prints while its runs are at work, and the bar below it on a terminal."""

    def __init__(self, specs: list[Spec], launcher: Launcher):
        self.launcher = launcher
        self.total = len(specs)
        self.done = sum(launcher.is_finished(spec) for spec in specs)
        self.done_before = self.done
        self.begin = time.monotonic()
        self.started = set()  # ids of runs
        self.bar = tqdm(
            total=self.total,
            initial=self.done,
            unit="run",
            leave=False,
            disable=None,  # unless on a terminal
        )

    def print_plan(self, specs: list[Spec]) -> None:
        """Print how much there is to do, and which variants cannot run here."""
        to_run = self.total - self.done
        print(f"sweep: {self.total} runs, {self.done} finished, {to_run} to run", flush=True)
        for reason in dict.fromkeys(spec.skip for spec in specs if spec.skip):
            variants = dict.fromkeys(spec.variant for spec in specs if spec.skip == reason)
            print(f"sweep: {', '.join(variants)} will be skipped: {reason}", flush=True)

    def tell(self, line: str) -> None:
        """Print a line with the time of day, above the bar."""
        self.bar.write(f"{time.strftime('%H:%M')} {line}")
        sys.stdout.flush()

    def ended(self, spec: Spec, entry: dict) -> None:
        """Print how a run has ended, and how long is left."""
        if spec.recommended and record.unable(entry):
            self.total += 1  # another takes its place
        self.done += 1
        self.bar.update()
        left = ""
        if self.done < self.total:
            left = f"; about {max(1, round(self.seconds_left() / 60))} min left"
        self.tell(f"[{self.done}/{self.total}] {outcome_line(spec, entry)}{left}")

    def seconds_left(self) -> float:
        """Return how long the other runs take, if each takes as long as those until now."""
        at_work = [
            progress_of(self.launcher.runs / spec.run_path) for spec in list(self.launcher.active)
        ]
        parts = sum(step / planned for step, planned in at_work if planned)
        runs_done = self.done + parts
        seconds_a_run = (time.monotonic() - self.begin) / (runs_done - self.done_before)
        return seconds_a_run * (self.total - runs_done)

    def look(self) -> None:
        """Print which runs have started since the last look, and show steps on the bar."""
        active = list(self.launcher.active)
        for spec in active:
            if spec.run_id not in self.started:
                self.started.add(spec.run_id)
                self.tell(f"{_name(spec)} starts")
        if not self.bar.disable:
            steps = []
            for spec in active:
                step, planned = progress_of(self.launcher.runs / spec.run_path)
                if planned:
                    steps.append(f"{spec.variant} {step}/{planned}")
            self.bar.set_postfix_str(", ".join(steps))

    def close(self) -> None:
        """Take the bar off the terminal."""
        self.bar.close()


def progress_of(run_dir: Path) -> tuple[int, int | None]:
    """Return the steps done and planned, as far as the run's files tell: else 0 and None."""
    try:
        planned = record.read_record(run_dir)["spec"]["planned_steps"]
        with open(regular(run_dir / "steps.jsonl"), "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            stream.seek(max(0, size - LAST_LINE_BYTES))
            last_line = stream.read().splitlines()[-1]
        return int(json.loads(last_line)["step"]), planned
    except (
        RecordError,
        OSError,
        ArithmeticError,
        ValueError,
        LookupError,
        TypeError,
    ):  # what a file can hold that is being written, or was spoilt
        return 0, None


def outcome_line(spec: Spec, entry: dict) -> str:
    """Return how a run has ended, in one line."""
    seconds = entry["time"]["wall_s"]
    score = entry["quality"].get(entry["task"]["metric"])
    parts = [f"{_name(spec)}: {entry['status']}"]
    if seconds is not None:
        parts.append(f"{seconds:.0f} s")
    if score is not None:
        parts.append(f"{entry['task']['label']} {score:.1f}")
    for sentence in entry["spec"]["adjusted"]:
        if sentence.startswith(("checkpoint: ", "code: ")):
            parts.append(sentence)
    if entry["error"]["message"]:
        parts.append(entry["error"]["message"])
    return one_line(", ".join(parts))


def _name(spec: Spec) -> str:
    """Return a run's name in words, such as 'A1 seed 0, micro-batch 32'."""
    return ", ".join([f"{spec.variant} seed {spec.seed}", *_own_words(spec)])


def _own_words(spec: Spec) -> list[str]:
    """Return what a run has of its own in words, such as ['micro-batch 32', 'max-length 128']."""
    return [f"{name.replace('_', '-')} {value}" for name, value in spec.own.items()]


# A sweep at its end.


def status_table(specs: list[Spec], launcher: Launcher) -> pd.DataFrame:
    """Return how every run stands, a row each.

    Columns that are empty, and sizes that all runs have in common, are left out.
    """
    table = pd.DataFrame([_status_row(spec, launcher) for spec in specs])
    table = table.dropna(axis=1, how="all")
    sizes = table.columns.intersection(["length", "batch", "micro-batch", "world"])
    return table.drop(columns=[size for size in sizes if table[size].nunique() == 1])


def _status_row(spec: Spec, launcher: Launcher) -> dict:
    """Return a run's sizes, and its status, time, speed and score as far as it has a record."""
    row = {
        "variant": spec.variant,
        "seed": spec.seed,
        "length": spec.preset.max_length,
        "world": spec.world,
        "batch": spec.preset.batch,
        "micro-batch": spec.asked.micro_batch,
        "status": NOT_BEGUN,
    }
    try:
        entry = launcher.entry_of(spec)
    except RecordError:
        return row
    row["status"] = entry["status"]
    row["seconds"] = entry["time"]["wall_s"]
    if spec.hardware != "cpu":  # whose speeds rank nothing
        row["samples/s"] = entry["speed"]["samples_per_s"]
    task = entry["task"]
    row[task["label"]] = entry["quality"][task["metric"]]
    return row


def _summary(table: pd.DataFrame, counts: dict[str, int]) -> str:
    """Return the table as text, and below it how many runs there are of each status."""
    text = table.to_string(index=False, float_format="{:.1f}".format, na_rep="–")
    return f"{text}\nsweep: {', '.join(f'{count} {status}' for status, count in counts.items())}"


def run_on_finish(command: str, counts: dict[str, int]) -> None:
    """Run a command of the user's, and say so if it fails.

    Its environment has the number of runs of each status, as in QA_LIB_OK=3, and QA_LIB_UNFINISHED
    for those that have not ended.
    """
    numbers = {status: counts.get(status, 0) for status in record.TERMINAL}
    numbers["unfinished"] = sum(counts.values()) - sum(numbers.values())
    variables = {f"QA_LIB_{status.upper()}": str(count) for status, count in numbers.items()}
    code = subprocess.run(command, shell=True, env=os.environ | variables).returncode
    if code:
        print(f"--on-finish: {command!r} ended with exit code {code}", file=sys.stderr, flush=True)


# The verb.


def main(args: argparse.Namespace) -> int:
    """Plan and run a sweep, or print the plan; the exit code is 1 when a run failed."""
    use_compile_cache(args.compile_cache)
    if not args.plan:
        check_runner()
    # Before this machine is probed, which takes seconds: a wrong name is an error at once.
    variants = _variants_asked(args)
    launcher = _launcher(args)
    left_out = []
    specs = plan(
        variants=variants,
        preset=args.preset,
        seeds=args.seeds,
        data=args.data,
        model=args.model,
        micro_batch=args.micro_batch,
        machine=launcher.machine,
        left_out=left_out,
        runs=args.runs,
        **overrides_of(args),
    )
    for reason in left_out:
        print(f"left out: {reason}", file=sys.stderr, flush=True)
    if args.plan:
        _print_specs(specs, launcher)
        return 0
    entries = sweep(specs, launcher, args.on_finish)
    failed = [entry for entry in entries if entry["status"] in ("error", "killed")]
    for entry in failed:
        path = f"{entry['group']}/{entry['run_id']}"
        line = f"{path}: {entry['status']}, {entry['error']['message']}"
        print(one_line(line), file=sys.stderr)
    return 1 if failed else 0


def _variants_asked(args: argparse.Namespace) -> list[str]:
    """Return the variants that were named; without a name or a family, all of the preset's task."""
    if args.variants is None and args.family is None:
        task = find_preset(args.preset).task
        return [name for name, variant in VARIANTS.items() if variant.task == task]
    return variants_of(args)


def _launcher(args: argparse.Namespace) -> Launcher:
    """Return the launcher for this machine, or for a node of Slurm, which it probes.

    Raises UserError for options of this machine's cards beside Slurm.
    """
    by_slurm = args.launcher == "slurm"
    if by_slurm and (args.gpus or args.shared_gpu):
        raise UserError(
            "--gpus and --shared-gpu are for this machine's cards; Slurm gives each run cards of "
            "its own"
        )
    if by_slurm and ALL in (args.world or []):
        raise UserError("--world all is for this machine's GPUs; give a number of them with Slurm")
    if by_slurm:
        machine, env = probe_node(args.runs, max(args.world or [0]))
    else:
        machine, env = probe()
        say_idle(machine, args.gpus)
    kind = SlurmLauncher if by_slurm else Launcher
    return kind(
        runs=args.runs,
        machine=machine,
        env=env,
        gpus=args.gpus,
        share=args.shared_gpu,
        force=args.force,
        command=notebook_command,
        time_limit_s=args.time_limit,
        warm=not by_slurm,
    )


def _print_specs(specs: list[Spec], launcher: Launcher) -> None:
    """Print what was chosen for all runs, and a line for each run that says what becomes of it."""
    alike = [spec for spec in specs if spec.chosen and not spec.recommended]
    for choice in dict.fromkeys(spec.adjusted[0] for spec in alike):
        print(wrapped(choice))
    for spec in specs:
        if spec.skip:
            state = f"skip: {spec.skip}"
        elif launcher.is_finished(spec):
            state = "finished"
        else:
            state = "run"
        words = [state, *_own_words(spec)]
        if spec.recommended:
            words.append(spec.adjusted[0])
        line = f"{spec.group}/{spec.run_id:24} {', '.join(words)}"
        print(textwrap.fill(line, 100, subsequent_indent="    ", break_on_hyphens=False))
