"""Records in the formats of other tools: a table, or each run's curves and figures for a tracker.

With --follow a tracker gets runs while they train. That is a process of its own, which reads what
runs write anyway: they are as fast as without it, and it may begin after them.
"""

import argparse
import contextlib
import contextvars
import importlib
import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from qa_lib.errors import UserError, printable
from qa_lib.records import record
from qa_lib.records.archive import Run, own_first, read_runs, runs_in_folders, say_left_out
from qa_lib.records.files import RecordError, write_atomically

STEP_VALUES = ("loss", "lr", "ms")  # what a tracker gets of a line of steps.jsonl
FIGURES = ("speed", "memory", "energy", "quality", "time")  # sections of a record that it gets
BESIDE_RECORD = ("profile", "quantized")  # what an archive adds to a record, and a table leaves out
EVERY_S = 2.0  # seconds between two looks at the runs that are followed


def main(args: argparse.Namespace) -> int:
    """Write what was asked for and print how many runs are in it.

    With `--follow` it goes on until it is stopped.
    """
    folders = {"tensorboard": args.tensorboard, "wandb": args.wandb, "trackio": args.trackio}
    chosen = [name for name, folder in folders.items() if folder]
    tracker = chosen[0] if chosen else None
    if args.follow and not tracker:
        raise UserError(f"--follow goes with one of {', '.join(f'--{name}' for name in TRACKERS)}")
    every = read_runs(args.runs, args.group)
    exported = every if args.group else own_first(every)
    if not exported and not args.follow:
        raise UserError(f"no record of {args.group or 'any group'} below {args.runs}")
    if tracker:
        out = folders[tracker]
        with contextlib.closing(Export(tracker, out)) as export:
            export_once(exported, export)
            if args.follow:
                follow(args.runs, args.group, export)
    else:
        out = args.csv
        write_table(exported, out)
    print(printable(f"{out}: {len(exported)} runs"))
    left_out = len(every) - len(exported)
    if left_out:
        print(f"left out: {left_out} archived runs; --group G exports those of a group")
    return 0


def write_table(runs: list[Run], path: Path) -> None:
    """Write a table of records as CSV, a line each and a column for each field."""
    records = []
    for run in runs:
        fields = {name: value for name, value in run.record.items() if name not in BESIDE_RECORD}
        records.append(fields)
    write_atomically(path, pd.json_normalize(records).to_csv(index=False))


def export_once(runs: list[Run], export: "Export") -> None:
    """Send runs to a tracker; one whose steps cannot be read costs a line on the terminal."""
    for run in runs:
        try:
            export.update(run)
        except RecordError as problem:
            say_left_out(run.record["group"], problem)


def follow(runs: Path, group: str | None, export: "Export") -> None:
    """Send what is new of all runs, again and again, until a signal ends it."""
    while True:
        time.sleep(EVERY_S)
        for run in runs_in_folders(runs, group, left_out=lambda *_: None):
            export.update(run)


def figures_of(entry: dict) -> dict[str, float]:
    """Return the numbers that a run has measured, named as in its record: 'speed/samples_per_s'."""
    sections = {name: entry[name] for name in FIGURES}
    values = pd.json_normalize(sections, sep="/").iloc[0].to_dict()
    numbers = {name: value for name, value in values.items() if type(value) in (int, float)}
    return {name: value for name, value in numbers.items() if not math.isnan(value)}


# The trackers. Each begins a run there, which has `log` and `finish`, by the package's module.


class TensorBoard:
    """A run as a folder of event files: its steps as curves, its figures at its last step."""

    def __init__(self, module, folder: Path, project: str, name: str, config: dict):
        self.writer = module.SummaryWriter(folder / project / name, flush_secs=1)

    def log(self, values: dict[str, float], step: int | None) -> None:
        """Write values at a step."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        """Close the files."""
        self.writer.close()


def begin_wandb_run(module, folder: Path, project: str, name: str, config: dict):
    """Return a run of Weights & Biases, offline unless $WANDB_MODE says online.

    The spec is its config. The figures stand at its last step, and in its summary, as everything
    does that was logged last.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return module.init(
        project=project,
        name=name,
        config=config,
        dir=folder,
        mode=os.environ.get("WANDB_MODE", "offline"),
        reinit="create_new",  # runs that are followed are open at the same time
    )


def begin_trackio_run(module, folder: Path, project: str, name: str, config: dict):
    """Return a run of trackio: the spec is its config, the figures stand at its last step."""
    # In a context of its own, or it would end the run that was opened before; without a dashboard
    # in a notebook, and without the load of this process, which is not the run's.
    return contextvars.Context().run(
        module.init,
        project=project,
        name=name,
        config=config,
        embed=False,
        auto_log_cpu=False,
        auto_log_gpu=False,
    )


# What begins a run, by the name of the option, which is also the name of the package for pip.
TRACKERS: dict[str, Callable[..., Any]] = {
    "tensorboard": TensorBoard,
    "wandb": begin_wandb_run,
    "trackio": begin_trackio_run,
}
MODULES = {"tensorboard": "torch.utils.tensorboard"}  # what is imported, if not the package


class Export:
    """Runs on their way to one of TRACKERS, which keeps its files in `folder`.

    Raises UserError where the tracker's package is not installed.
    """

    def __init__(self, tracker: str, folder: Path):
        os.environ["TRACKIO_DIR"] = str(folder)  # which trackio reads when it is imported
        try:
            module = importlib.import_module(MODULES.get(tracker, tracker))
        except ImportError:
            raise UserError(
                f"this needs a package that is not installed: pip install {tracker}"
            ) from None
        self._begin = partial(TRACKERS[tracker], module, folder)
        self._open = {}  # key of a run at work -> its run at the tracker
        self._last_step = {}  # key of a run -> the last step that the tracker has

    def update(self, run: Run) -> None:
        """Send what is new of a run; once it has ended, its figures as well.

        Raises RecordError for steps that cannot be read.
        """
        entry = run.record
        if entry["status"] == record.STARTING:
            return  # a driver wrote this record, and the run will write its own
        # A run that was begun anew is another run at the tracker.
        key = (entry["group"], entry["run_id"], entry["time"]["started"])
        is_new = key not in self._last_step
        if not is_new and key not in self._open:
            return  # it had ended at an earlier look
        steps = run.steps()  # before anything is begun at the tracker, since it may raise
        if is_new:
            self._open[key] = self._begin(
                project=entry["group"], name=entry["run_id"], config=entry["spec"]
            )
            self._last_step[key] = 0
        for line in steps[steps["step"] > self._last_step[key]].to_dict("records"):
            values = {name: line[name] for name in STEP_VALUES if not math.isnan(line[name])}
            self._open[key].log(values, step=int(line["step"]))
            self._last_step[key] = line["step"]
        if entry["status"] in record.TERMINAL:
            at_tracker = self._open.pop(key)
            at_tracker.log(figures_of(entry), step=entry["time"]["steps"])
            at_tracker.finish()

    def close(self) -> None:
        """End at the tracker the runs that are still training; the steps sent so far stay there."""
        for at_tracker in self._open.values():
            at_tracker.finish()
