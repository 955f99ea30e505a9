"""Records in the formats of other tools: a table, or each run's curves and figures for those that draw them."""

import argparse
import importlib
import math
from pathlib import Path

import pandas as pd

from qa_lib.archive import read_runs
from qa_lib.errors import UserError
from qa_lib.record import write_atomically

STEP_VALUES = ("loss", "lr", "ms")  # of a line of steps.jsonl


def main(args: argparse.Namespace) -> int:
    """Write what was asked for and say how many runs are in it."""
    found = read_runs(args.runs, args.group)
    if not found:
        raise UserError(f"no record of {args.group or 'any group'} below {args.runs}")
    out = args.csv or args.tensorboard or args.wandb
    if args.csv:
        beside = ("profile", "quantized")  # of a record, in an archive
        records = [{name: value for name, value in run.record.items() if name not in beside} for run in found]
        write_atomically(out, pd.json_normalize(records).to_csv(index=False))
    else:
        write = to_tensorboard if args.tensorboard else to_wandb
        for run in found:
            write(run.record, run.steps().to_dict("records"), out)
    print(f"{out}: {len(found)} runs")
    return 0


def figures_of(record: dict) -> dict[str, float]:
    """The numbers that a run has measured, named as in its record: 'speed/samples_per_s'."""
    parts = {name: record[name] for name in ("speed", "memory", "energy", "quality", "time")}
    values = pd.json_normalize(parts, sep="/").iloc[0].to_dict()
    return {name: value for name, value in values.items() if type(value) in (int, float) and value == value}


def to_tensorboard(record: dict, steps: list[dict], folder: Path) -> None:
    """A run as a folder of event files: its steps as curves, its figures at its last step."""
    tensorboard = package("torch.utils.tensorboard", "tensorboard")
    with tensorboard.SummaryWriter(folder / record["group"] / record["run_id"]) as writer:
        for line in steps:
            for name in STEP_VALUES:
                if not math.isnan(line[name]):
                    writer.add_scalar(name, line[name], int(line["step"]))
        for name, value in figures_of(record).items():
            writer.add_scalar(name, value, record["time"]["steps"])


def to_wandb(record: dict, steps: list[dict], folder: Path) -> None:
    """A run as an offline run of Weights & Biases: the spec as its config, its figures as its summary."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {"project": record["group"], "name": record["run_id"]}
    run = package("wandb", "wandb").init(**names, config=record["spec"], dir=folder, mode="offline")
    for line in steps:
        run.log({name: line[name] for name in STEP_VALUES if not math.isnan(line[name])}, step=int(line["step"]))
    run.summary.update(figures_of(record))
    run.finish()


def package(module: str, name: str):
    """A module of a package that is no requirement. Raises UserError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"this needs a package that is not installed: pip install {name}") from None
