"""One run: the function behind the notebooks, the command line and, in a process of its own, the sweep."""

import argparse
import os
from pathlib import Path

import torch

from qa_lib.cli import own_of
from qa_lib.data.load import Data
from qa_lib.errors import UserError
from qa_lib.run.plan import plan
from qa_lib.run.torchrun import run_processes
from qa_lib.run.worker import work
from qa_lib.spec import Spec


def fit(spec: Spec, runs: str | Path = "runs", data: Data | None = None, say=print) -> dict:
    """Train, measure and evaluate one spec; write its run folder below `runs` and return the record.

    `data` is what the task's `load` returns, for callers that have it already. A spec that cannot run here ends as
    `skipped`, one that runs out of memory as `oom`: both are results and return normally. Anything else that fails is
    recorded as `error` and raised. Raises RunTaken while another process has the run, and UserError for a folder that
    cannot be and for data and a model that are not those that the spec was planned with.

    A spec of several processes is given to torchrun, which works on it in each of them; the first has the record.
    """
    if not isinstance(runs, str | os.PathLike) or not os.fspath(runs):
        raise UserError(f"runs is {runs!r}, and not a folder")
    torchrun = torch.distributed.is_torchelastic_launched()
    started = int(os.environ["WORLD_SIZE"]) if torchrun else 1
    if started > 1 and spec.settings.parallel == "none":
        raise UserError(
            f"{spec.variant} trains in one process, and torchrun has started {started}: family P is for several"
        )
    # DeepSpeed asks for a launcher also of one process, and leaves the next Trainer of the process changed.
    several = spec.world > 1 or spec.settings.parallel == "deepspeed"
    if several and not spec.skip and not torchrun:
        return run_processes(spec, runs, say)
    return work(spec, runs, data, say)


def main(args: argparse.Namespace) -> int:
    """Run one variant here, whatever its record says, and print the record."""
    sources = (args.data, args.model, args.micro_batch)
    (spec,) = plan([args.variant], args.preset, [args.seed], *sources, **own_of(args))
    entry = fit(spec, args.runs)
    if entry["status"] == "running":  # one of torchrun's processes, and not the first
        return 0
    task = entry["task"]
    measured = {"samples/s": entry["speed"]["samples_per_s"], task["label"]: entry["quality"][task["metric"]]}
    figures = [f"{name} {value:.2f}" for name, value in measured.items() if value is not None]
    print(", ".join([f"{spec.variant}: {entry['status']}", *figures]))
    print(args.runs / spec.run_path / "record.json")
    return 0
