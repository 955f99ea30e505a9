"""The sweep: many specs, each through its family's notebook in a process of its own.

The notebook is a log that people can read; the record beside it is the result. This module never imports torch.
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
from qa_lib.lab.cli import own_of, variants_of
from qa_lib.lab.launch.compile_cache import use_compile_cache
from qa_lib.lab.launch.local import Launcher, say_idle
from qa_lib.lab.launch.probe import probe
from qa_lib.lab.launch.recommended import run_in_turn
from qa_lib.lab.launch.slurm import SlurmLauncher, probe_node
from qa_lib.lab.search.plan import plan
from qa_lib.packages import check_runner
from qa_lib.paths import ROOT
from qa_lib.records import record
from qa_lib.spec.presets import find_preset
from qa_lib.spec.spec import Spec
from qa_lib.spec.variants import FAMILIES, VARIANTS, find_variant

NOT_BEGUN = "not begun"  # of a run without a record


def notebook_of(variant: str) -> Path:
    """The notebook of a variant's family, relative to paths.ROOT."""
    return Path("notebooks", f"{FAMILIES[find_variant(variant).family]}.ipynb")


def notebook_command(spec: Spec, runs: Path) -> list[str]:
    """The command that executes the notebook of a spec's variant and leaves it in the run's folder."""
    paths = [ROOT / notebook_of(spec.variant), runs / spec.run_path / "notebook.ipynb"]
    # Papermill fills in what stands in braces, also in a path.
    paths = (os.path.relpath(path).replace("{", "{{").replace("}", "}}") for path in paths)
    command = [sys.executable, "-m", "papermill", *paths]
    command += [
        "--kernel",
        "python3",
        "--no-progress-bar",
        "--log-output",
        "--cwd",
        ".",
    ]
    for name, value in notebook_parameters(spec, runs).items():
        # -r keeps a text a text: a model folder named 1e3 must not become a number.
        command += ["-r" if isinstance(value, str) else "-p", name, str(value)]
    return command


def notebook_parameters(spec: Spec, runs: Path) -> dict:
    """What the driver passes to a notebook's parameters cell. Each variant has its own, and none is compared in it."""
    sources = {"data": spec.data_source, "model": spec.model_source}
    sources = {
        name: _from_here(source) if Path(source).exists() else source
        for name, source in sources.items()
    }
    named = {
        "variant": spec.variant,
        "compare_with": "",
        "preset": spec.preset.name,
        "seed": spec.seed,
    }
    return named | sources | spec.own | {"runs": _from_here(runs)}


def _from_here(path: str | Path) -> str:
    """The path as seen from the current folder, in which notebooks run, so that one shows no machine's folders where it
    need not."""
    return os.path.relpath(path)  # a link by its own name, which is the data's or the model's


def sweep(specs: list[Spec], launcher: Launcher, on_finish: str | None = None) -> list[dict]:
    """Run what is not finished yet and return every spec's record, in order; see Launcher and run_in_turn.

    Says first what there is to do and what cannot run here, then when each run starts and ends and how long is left,
    and at the end, however it ends, how every run stands. Last comes the command `on_finish`.
    """
    every, done = len(specs), sum(map(launcher.is_finished, specs))
    print(f"sweep: {every} runs, {done} finished, {every - done} to run", flush=True)
    for reason in dict.fromkeys(spec.skip for spec in specs if spec.skip):
        names = dict.fromkeys(spec.variant for spec in specs if spec.skip == reason)
        print(f"sweep: {', '.join(names)} will be skipped: {reason}", flush=True)
    before, begin, started = done, time.monotonic(), set()
    bar = tqdm(
        total=every, initial=done, unit="run", leave=False, disable=None
    )  # on a terminal alone

    def tell(line: str) -> None:
        bar.write(f"{time.strftime('%H:%M')} {line}")
        sys.stdout.flush()

    def ended(spec: Spec, entry: dict) -> None:
        nonlocal done, every
        every += spec.recommended and record.unable(entry)  # another takes its place
        done += 1
        bar.update()
        beside = [progress_of(launcher.runs / other.run_path) for other in list(launcher.active)]
        whole = done + sum(
            step / of for step, of in beside if of
        )  # runs, with parts of those at work
        left = (time.monotonic() - begin) / (whole - before) * (every - whole)
        ahead = f"; about {max(1, round(left / 60))} min left" if done < every else ""
        tell(f"[{done}/{every}] {_line(spec, entry)}{ahead}")

    def look() -> None:
        for spec in list(launcher.active):
            if spec.run_id not in started:
                started.add(spec.run_id)
                tell(f"{_name(spec)} starts")
        if not bar.disable:
            steps = {
                spec.variant: progress_of(launcher.runs / spec.run_path)
                for spec in list(launcher.active)
            }
            bar.set_postfix_str(
                ", ".join(f"{name} {step}/{of}" for name, (step, of) in steps.items() if of)
            )

    try:
        specs = run_in_turn(launcher, specs, tell, ended, look)
    finally:
        bar.close()
        summary, counts = _summary(specs, launcher)
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(printable(f"\n{summary}"), flush=True)
        if on_finish:
            _finish(on_finish, counts)
    return [launcher.entry_of(spec) for spec in specs]


def _finish(command: str, counts: dict[str, int]) -> None:
    """Run a command of the user's, with the number of runs of each status in its environment: QA_LIB_OK=3 and others,
    QA_LIB_UNFINISHED of those that have not ended; if it fails, say so."""
    numbers = {status: counts.get(status, 0) for status in record.TERMINAL}
    numbers["unfinished"] = sum(counts.values()) - sum(numbers.values())
    names = {f"QA_LIB_{status.upper()}": str(count) for status, count in numbers.items()}
    if code := subprocess.run(command, shell=True, env=os.environ | names).returncode:
        print(f"--on-finish: {command!r} ended with exit code {code}", file=sys.stderr, flush=True)


def _summary(specs: list[Spec], launcher: Launcher) -> tuple[str, dict[str, int]]:
    """A table of how every run stands, and how many of each kind there are."""
    lines = []
    for spec in specs:
        line = {
            "variant": spec.variant,
            "seed": spec.seed,
            "length": spec.preset.max_length,
            "world": spec.world,
        }
        line |= {
            "batch": spec.preset.batch,
            "micro-batch": spec.asked.micro_batch,
            "status": NOT_BEGUN,
        }
        with contextlib.suppress(record.RecordError):
            entry = launcher.entry_of(spec)
            line |= {"status": entry["status"], "seconds": entry["time"]["wall_s"]}
            if spec.hardware != "cpu":  # whose speeds rank nothing
                line |= {"samples/s": entry["speed"]["samples_per_s"]}
            line |= {entry["task"]["label"]: entry["quality"][entry["task"]["metric"]]}
        lines.append(line)
    table = pd.DataFrame(lines).dropna(axis=1, how="all")
    sizes = table.columns.intersection(["length", "batch", "micro-batch", "world"])
    table = table.drop(columns=[size for size in sizes if table[size].nunique() == 1])
    counts = table["status"].value_counts().to_dict()
    said = ", ".join(f"{count} {status}" for status, count in counts.items())
    return (
        f"{table.to_string(index=False, float_format='{:.1f}'.format, na_rep='–')}\nsweep: {said}",
        counts,
    )


def progress_of(run_dir: Path) -> tuple[int, int | None]:
    """Steps done and planned, as far as the run's files tell."""
    with contextlib.suppress(
        record.RecordError, OSError, ArithmeticError, ValueError, LookupError, TypeError
    ):
        planned = record.read_record(run_dir)["spec"]["planned_steps"]
        with open(record.regular(run_dir / "steps.jsonl"), "rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - 400))
            return int(json.loads(stream.read().splitlines()[-1])["step"]), planned
    return 0, None


def _own_words(spec: Spec) -> list[str]:
    """['micro-batch 32', 'max-length 128']"""
    return [f"{name.replace('_', '-')} {value}" for name, value in spec.own.items()]


def _name(spec: Spec) -> str:
    return ", ".join([f"{spec.variant} seed {spec.seed}", *_own_words(spec)])


def _line(spec: Spec, entry: dict) -> str:
    """One run's outcome in one line."""
    wall, score = entry["time"]["wall_s"], entry["quality"].get(entry["task"]["metric"])
    parts = [f"{_name(spec)}: {entry['status']}"]
    parts += [f"{wall:.0f} s"] if wall is not None else []
    parts += [f"{entry['task']['label']} {score:.1f}"] if score is not None else []
    told = ("checkpoint: ", "code: ")
    parts += [text for text in entry["spec"]["adjusted"] if text.startswith(told)]
    parts += [entry["error"]["message"]] if entry["error"]["message"] else []
    return one_line(", ".join(parts))


def main(args: argparse.Namespace) -> int:
    """Plan and run a sweep; exit code 1 when a run failed."""
    use_compile_cache(args.compile_cache)
    if not args.plan:
        check_runner()
    # Before this machine is probed, which takes seconds: a wrong name is an error at once.
    every = [
        name for name, variant in VARIANTS.items() if variant.task == find_preset(args.preset).task
    ]
    names = every if args.variants is args.family is None else variants_of(args)
    by_slurm = args.launcher == "slurm"
    if by_slurm and (args.gpus or args.shared_gpu):
        raise UserError(
            "--gpus and --shared-gpu are for this machine's cards; Slurm gives each run cards of its own"
        )
    machine, env = probe_node(args.runs, max(args.world or [0])) if by_slurm else probe()
    own = {
        "share": args.shared_gpu,
        "force": args.force,
        "time_limit_s": args.time_limit,
        "command": notebook_command,
    }
    own["warm"] = not by_slurm
    launcher = (SlurmLauncher if by_slurm else Launcher)(args.runs, machine, env, args.gpus, **own)
    if not by_slurm:
        say_idle(machine, args.gpus)
    sources, left_out = (args.data, args.model, args.micro_batch, machine), []
    specs = plan(
        names, args.preset, args.seeds, *sources, **own_of(args), left_out=left_out, runs=args.runs
    )
    print(
        "".join(f"left out: {reason}\n" for reason in left_out), end="", file=sys.stderr, flush=True
    )
    if args.plan:
        alike = [spec for spec in specs if spec.chosen and not spec.recommended]
        for said in dict.fromkeys(spec.adjusted[0] for spec in alike):
            print(wrapped(said))
        for spec in specs:
            state = (
                f"skip: {spec.skip}"
                if spec.skip
                else "finished"
                if launcher.is_finished(spec)
                else "run"
            )
            words = [state, *_own_words(spec), *(spec.adjusted[:1] if spec.recommended else [])]
            line = f"{spec.group}/{spec.run_id:24} {', '.join(words)}"
            print(textwrap.fill(line, 100, subsequent_indent="    ", break_on_hyphens=False))
        return 0
    entries = sweep(specs, launcher, args.on_finish)
    failed = [entry for entry in entries if entry["status"] in ("error", "killed")]
    for entry in failed:
        said = f"{entry['group']}/{entry['run_id']}: {entry['status']}, {entry['error']['message']}"
        print(one_line(said), file=sys.stderr)
    return 1 if failed else 0
