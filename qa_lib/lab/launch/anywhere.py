"""The public `fit`: one run, wherever and in however many processes it has to be trained.

A finished run is returned. One of several processes is given to torchrun, a recommended one to a
process of its own, so that the next choice can take its place. All others are trained here, by
run/fit.py.
"""

import math
import os
from collections.abc import Callable
from pathlib import Path

import torch

from qa_lib.calls import checked, expect, expect_folder
from qa_lib.data.load import Data
from qa_lib.errors import UserError, wrapped
from qa_lib.lab.launch.driver import check_driver, surroundings
from qa_lib.lab.launch.judge import is_finished
from qa_lib.lab.launch.local import Launcher
from qa_lib.lab.launch.recommended import run_in_turn
from qa_lib.lab.launch.torchrun import run_processes
from qa_lib.measure import hardware
from qa_lib.records import record
from qa_lib.records.files import check_folder
from qa_lib.run.fit import fit as fit_in_process
from qa_lib.run.recording import checkpoint_files
from qa_lib.spec.spec import Spec


@checked
def fit(
    spec: Spec,
    runs: str | Path = "runs",
    data: Data | None = None,
    say=print,
    force: bool = False,
) -> dict:
    """Train, measure and score one spec; write its run folder below `runs` and return the record.

    For instance fit(spec)["quality"]["f1"]. A run that is finished is not trained again: its record
    is returned, unless `force` asks for a run from its first step on. One that was stopped goes on
    from its last checkpoint, unless `force` drops that.

    `data` is what the task's loader returns, for callers that have it already. A spec that cannot
    run here ends as `skipped`, one that runs out of memory as `oom`: both are results and return
    normally. Anything else that fails is recorded as `error` and raised.

    Raises RunTaken while another process has the run. Raises UserError for a folder that cannot be
    written to, and for data or a model that have changed since the spec was planned.

    A spec of several processes is given to torchrun, which works on it in each of them; the first
    has the record. A `recommended` one has a process of its own, which loads the data anew and
    prints how far it is; where its first step fails on this machine, the next choice has another.
    The record says which variant it was in the end.
    """
    expect("spec", spec, Spec, "give one spec that plan has made, as in `(spec,) = plan(...)`")
    expect_folder("runs", runs)
    expect("data", data, Data | None, "give what load_data returns, or leave it out")
    expect("say", say, Callable, "give a function of one text, such as print")
    is_rank = torch.distributed.is_torchelastic_launched()
    if is_rank:
        _check_world(spec)
    runs = Path(runs)
    run_dir = runs / spec.run_path
    check_folder(run_dir)
    if spec.chosen and not spec.recommended:  # what is recommended is told by its launcher
        say(wrapped(spec.adjusted[0]))
    if force:
        if int(os.environ.get("RANK", 0)) == 0:
            _drop_checkpoint(run_dir)
    elif not spec.skip and is_finished(runs, spec):
        return _finished(run_dir, spec, say)
    if is_rank:
        return fit_here(spec, runs, data, say)
    if spec.recommended:
        return _fit_recommended(spec, runs, say, force)
    if takes_torchrun(spec):
        return run_processes(spec, runs, say)
    return fit_here(spec, runs, data, say)


def takes_torchrun(spec: Spec) -> bool:
    """Return whether a spec is trained by processes that torchrun starts.

    DeepSpeed asks for a launcher also of one process, and leaves the next Trainer of the process
    changed.
    """
    is_of_several = spec.world > 1 or spec.settings.parallel == "deepspeed"
    return is_of_several and not spec.skip


def fit_here(spec: Spec, runs: str | Path, data: Data | None = None, say=print) -> dict:
    """Train a spec in this process, which may be one of torchrun's or a driver's; see run.fit.fit.

    Raises UserError where a driver started this process for another run.
    """
    check_driver(Path(runs) / spec.run_path)
    return fit_in_process(spec, runs, data, say, surroundings())


def _check_world(spec: Spec) -> None:
    """Raise UserError where torchrun has started several processes for a variant of one."""
    started = int(os.environ["WORLD_SIZE"])
    if started > 1 and spec.settings.parallel == "none":
        raise UserError(
            f"{spec.variant} trains in one process, and torchrun has started {started}: "
            "see family P"
        )


def _finished(run_dir: Path, spec: Spec, say) -> dict:
    """Return the record of a finished run, and tell `say` that it was not trained again."""
    entry = record.read_record(run_dir)
    if spec.recommended:
        say(wrapped(spec.adjusted[0]))
    say(
        f"finished on {entry['time']['started'][:10]}; to train it anew, give --force, or in "
        "Python force=True"
    )
    return entry


def _drop_checkpoint(run_dir: Path) -> None:
    """Let a run begin with its first step. Raises RunTaken while another process has it."""
    with record.lock(run_dir):
        for path in checkpoint_files(run_dir):
            path.unlink(missing_ok=True)


def _fit_recommended(spec: Spec, runs: Path, say, force: bool) -> dict:
    """Return the record of a recommended spec, or of that which took its place.

    Raises UserError for a run that failed.
    """
    run_dir = runs / spec.run_path
    with record.lock(run_dir):  # the launcher would wait for whoever has it
        if force:  # it passes over what is finished
            (run_dir / "record.json").unlink(missing_ok=True)
        launcher = Launcher(
            runs,
            machine=hardware.this_machine(),
            env=hardware.environment(),
            aloud=True,
            time_limit_s=math.inf,
        )
    (spec,) = run_in_turn(launcher, [spec], say)
    return record.with_result(launcher.entry_of(spec), " (its log.txt has more)")
