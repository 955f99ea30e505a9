"""Records in the formats of other tools: a table, or each run's curves and figures for those that draw them.

With --follow such a tool gets runs while they train. That is a process of its own, which reads what runs write anyway:
they are as fast as without it, and it may begin after them.
"""

import argparse
import contextlib
import contextvars
import importlib
import math
import os
import time
from functools import partial
from pathlib import Path

import pandas as pd

from qa_lib.errors import UserError, printable
from qa_lib.records import record
from qa_lib.records.archive import Run, own_first, read_runs, runs_in_folders, say_left_out
from qa_lib.records.files import RecordError, write_atomically

STEP_VALUES = ("loss", "lr", "ms")  # of a line of steps.jsonl
EVERY_S = 2.0  # seconds between two looks at the runs that are followed


def main(args: argparse.Namespace) -> int:
    """Write what was asked for and say how many runs are in it; where it follows, go on until it is stopped."""
    tracker = next(filter(vars(args).get, TRACKERS), None)
    if args.follow and not tracker:
        raise UserError(f"--follow goes with one of {', '.join(f'--{name}' for name in TRACKERS)}")
    every = read_runs(args.runs, args.group)
    found = every if args.group else own_first(every)
    if not found and not args.follow:
        raise UserError(f"no record of {args.group or 'any group'} below {args.runs}")
    out = args.csv or args.tensorboard or args.wandb or args.trackio
    if tracker:
        with contextlib.closing(Export(tracker, out)) as export:
            for run in found:
                try:
                    export.update(run)
                except RecordError as problem:
                    say_left_out(run.record["group"], problem)
            while args.follow:
                time.sleep(EVERY_S)
                for run in runs_in_folders(args.runs, args.group, left_out=lambda *_: None):
                    export.update(run)
    else:
        beside = ("profile", "quantized")  # of a record, in an archive
        records = [
            {name: value for name, value in run.record.items() if name not in beside}
            for run in found
        ]
        write_atomically(out, pd.json_normalize(records).to_csv(index=False))
    print(printable(f"{out}: {len(found)} runs"))
    if len(found) < len(every):
        print(
            f"left out: {len(every) - len(found)} archived runs; --group G exports those of a group"
        )
    return 0


def figures_of(record: dict) -> dict[str, float]:
    """The numbers that a run has measured, named as in its record: 'speed/samples_per_s'."""
    parts = {name: record[name] for name in ("speed", "memory", "energy", "quality", "time")}
    values = pd.json_normalize(parts, sep="/").iloc[0].to_dict()
    return {
        name: value
        for name, value in values.items()
        if type(value) in (int, float) and value == value
    }


class TensorBoard:
    """A run as a folder of event files: its steps as curves, its figures at its last step."""

    def __init__(self, module, folder: Path, project: str, name: str, **_):
        self.writer = module.SummaryWriter(folder / project / name, flush_secs=1)

    def log(self, values: dict[str, float], step: int | None) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def finish(self) -> None:
        self.writer.close()


def wandb(module, folder: Path, **names):
    """A run of Weights & Biases, offline unless $WANDB_MODE says online: the spec is its config, and the figures, which
    stand at its last step, are in its summary, too, as everything is that was logged last."""
    folder.mkdir(parents=True, exist_ok=True)
    # Runs that are followed are open at the same time.
    return module.init(
        **names, dir=folder, mode=os.environ.get("WANDB_MODE", "offline"), reinit="create_new"
    )


def trackio(module, folder: Path, **names):
    """A run of trackio: the spec is its config, the figures stand at its last step."""
    # In a context of its own, or it would end the run that was opened before; without a dashboard in a notebook, and
    # without the load of this process, which is not the run's.
    return contextvars.Context().run(
        module.init, **names, embed=False, auto_log_cpu=False, auto_log_gpu=False
    )


# By option, which is the name of the package, too: what opens a run with its module. A run has `log` and `finish`.
TRACKERS = {"tensorboard": TensorBoard, "wandb": wandb, "trackio": trackio}
MODULES = {"tensorboard": "torch.utils.tensorboard"}  # where it is not that of the package


class Export:
    """Runs on their way to one of TRACKERS, which keeps its files in `folder`. Raises UserError where its package is
    not installed."""

    def __init__(self, tracker: str, folder: Path):
        os.environ["TRACKIO_DIR"] = str(folder)  # which trackio reads when it is imported
        try:
            module = importlib.import_module(MODULES.get(tracker, tracker))
        except ImportError:
            raise UserError(
                f"this needs a package that is not installed: pip install {tracker}"
            ) from None
        self.begin = partial(TRACKERS[tracker], module, folder)
        self.open, self.sent = {}, {}  # by run: its tracker, and the last step that this has

    def update(self, run: Run) -> None:
        """Send what is new of a run; once it has ended, its figures as well."""
        entry, steps = run.record, run.steps()
        key = (
            entry["group"],
            entry["run_id"],
            entry["time"]["started"],
        )  # begun anew, it is another run there
        if entry["status"] == record.STARTING or (key in self.sent and key not in self.open):
            return  # a driver's record, before the run has written its own; or it has ended
        if key not in self.sent:
            names = {"project": entry["group"], "name": entry["run_id"], "config": entry["spec"]}
            self.open[key], self.sent[key] = self.begin(**names), 0
        for line in steps[steps["step"] > self.sent[key]].to_dict("records"):
            values = {name: line[name] for name in STEP_VALUES if not math.isnan(line[name])}
            self.open[key].log(values, step=int(line["step"]))
            self.sent[key] = line["step"]
        if entry["status"] in record.TERMINAL:
            tracker = self.open.pop(key)
            tracker.log(figures_of(entry), step=entry["time"]["steps"])
            tracker.finish()

    def close(self) -> None:
        """Leave there what has not ended as far as it is."""
        for tracker in self.open.values():
            tracker.finish()
