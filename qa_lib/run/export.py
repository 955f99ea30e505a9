"""Records in the formats of other tools: a table, or each run's curves and figures for those that draw them."""

import argparse
import contextlib
import importlib
import sys
from pathlib import Path

import pandas as pd

from qa_lib.cli import folder, given, path
from qa_lib.errors import UserError, printable
from qa_lib.record import RecordError, read_record, run_files, strict_json, write_atomically

STEP_VALUES = ("loss", "lr", "ms")  # of a line of steps.jsonl

EXAMPLE = """examples:
  python -m qa_lib export --csv runs.csv
  python -m qa_lib export --tensorboard logs/      then: tensorboard --logdir logs/
  python -m qa_lib export --wandb logs/            then: wandb sync logs/wandb/offline-run-*"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m qa_lib export`."""
    parser.add_argument("--runs", type=path, default="runs", metavar="DIR", help="folder of the records (%(default)s)")
    parser.add_argument("--group", type=given, metavar="G", help="this group alone (default: all)")
    to = parser.add_mutually_exclusive_group(required=True)
    to.add_argument("--csv", type=path, metavar="OUT.csv", help="a line a run, a column a value of its record")
    to.add_argument("--tensorboard", type=folder, metavar="DIR", help="event files; needs the package tensorboard")
    to.add_argument("--wandb", type=folder, metavar="DIR", help="offline runs; needs the package wandb, and no account")


def main(args: argparse.Namespace) -> int:
    """Write what was asked for and say how many runs are in it."""
    folders = sorted(file.parent for file in run_files(args.runs, "record.json"))
    records = {}
    for run_dir in folders:
        if args.group in (None, run_dir.parent.name):
            try:
                records[run_dir] = read_record(run_dir)
            except RecordError as problem:
                print(printable(f"left out: {problem}"), file=sys.stderr)
    if not records:
        raise UserError(f"no record of {args.group or 'any group'} below {args.runs}")
    if args.csv:
        write_atomically(args.csv, pd.json_normalize([*records.values()]).to_csv(index=False))
    else:
        write = to_tensorboard if args.tensorboard else to_wandb
        for run_dir, record in records.items():
            write(record, steps_of(run_dir), args.tensorboard or args.wandb)
    print(f"{args.csv or args.tensorboard or args.wandb}: {len(records)} runs")
    return 0


def steps_of(run_dir: Path) -> list[dict]:
    """The whole lines of a run's step log, without one that is being written; none where it has no log."""
    log, steps = run_dir / "steps.jsonl", []
    for line in log.read_bytes().splitlines() if log.is_file() else []:
        with contextlib.suppress(ValueError, RecursionError):
            step = strict_json(line.decode())
            if isinstance(step, dict) and isinstance(step.get("step"), int):
                steps.append({"step": step["step"], **{name: _number(step.get(name)) for name in STEP_VALUES}})
    return steps


def _number(value: object) -> float | None:
    return value if isinstance(value, int | float) else None


def figures_of(record: dict) -> dict[str, float]:
    """The numbers that a run has measured, named as in its record: 'speed/features_per_s'."""
    parts = {name: record[name] for name in ("speed", "memory", "energy", "quality", "time")}
    values = pd.json_normalize(parts, sep="/").iloc[0].to_dict()
    return {name: value for name, value in values.items() if type(value) in (int, float) and value == value}


def to_tensorboard(record: dict, steps: list[dict], folder: Path) -> None:
    """A run as a folder of event files: its steps as curves, its figures at its last step."""
    writer = package("torch.utils.tensorboard", "tensorboard").SummaryWriter(
        folder / record["group"] / record["run_id"]
    )
    with writer:
        for line in steps:
            for name in STEP_VALUES:
                if line[name] is not None:
                    writer.add_scalar(name, line[name], line["step"])
        for name, value in figures_of(record).items():
            writer.add_scalar(name, value, record["time"]["steps"])


def to_wandb(record: dict, steps: list[dict], folder: Path) -> None:
    """A run as an offline run of Weights & Biases: the spec as its config, its figures as its summary."""
    folder.mkdir(parents=True, exist_ok=True)
    run = package("wandb", "wandb").init(
        project=record["group"], name=record["run_id"], config=record["spec"], dir=folder, mode="offline"
    )
    for line in steps:
        run.log({name: line[name] for name in STEP_VALUES}, step=line["step"])
    run.summary.update(figures_of(record))
    run.finish()


def package(module: str, name: str):
    """A module of a package that is no requirement. Raises UserError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"this needs a package that is not installed: pip install {name}") from None
