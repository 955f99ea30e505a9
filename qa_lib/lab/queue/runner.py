"""Units of a plan at work: each run in a process of its own, and archived as soon as it ends.

A host with GPUs may be rented for minutes, and begins bare. So no run goes on beyond the end of the
time that was given, and what has ended is in an archive before the next run begins: the runs of a
block that is broken off later are no block, and measured all the same.
"""

import contextlib
import dataclasses
import io
import math
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from qa_lib.lab.launch.cold import empty_caches
from qa_lib.lab.launch.local import Launcher
from qa_lib.lab.launch.warm import Forked
from qa_lib.lab.queue.plan_file import EvidencePlan
from qa_lib.lab.queue.units import HAS_RESULT, Unit
from qa_lib.records import record
from qa_lib.records.archive import Run, read_runs, say_left_out, steps_path, write_archive
from qa_lib.records.files import write_atomically
from qa_lib.spec.spec import Spec

# What is told of a run that has ended: its spec and its record.
Tell = Callable[[Spec, dict], None]


@dataclasses.dataclass
class TimedLauncher(Launcher):
    """A launcher that ends its runs at a time, and notes how long their processes took."""

    # When the last run ends, by the monotonic clock.
    end: float = math.inf
    # Whether each run begins with empty caches; then they run one at a time.
    cold: bool = False

    # Environment variables of the process that is started next.
    variables: dict[str, str] = dataclasses.field(default_factory=dict)

    def limit_of(self, spec: Spec) -> float:
        """Return how many seconds a run may take from now on."""
        seconds_left = max(1.0, self.end - time.monotonic())
        return round(min(super().limit_of(spec), seconds_left))

    def _work(self, spec: Spec, run_dir: Path, cards: tuple[int, ...]) -> dict:
        """Have a process do a run, and return the run's record with the process's seconds."""
        begin = time.monotonic()
        with empty_caches() if self.cold else contextlib.nullcontext({}) as caches:
            self.variables = caches
            entry = super()._work(spec, run_dir, cards)
        entry["time"]["notebook_s"] = round(time.monotonic() - begin, 3)
        if self.cold:
            entry["time"]["compile_cached"] = False  # what it found was its own code at most
        with record.lock(run_dir):
            record.write_record(run_dir, entry)
        return entry

    def _start(
        self, spec: Spec, run_dir: Path, env: dict[str, str], log: TextIO
    ) -> subprocess.Popen | Forked:
        """Start a run's process."""
        return super()._start(spec, run_dir, env | self.variables, log)


class Archives:
    """The archives of a plan's groups on a card, which get each run once it has ended."""

    def __init__(self, plan: EvidencePlan, card: str, runs: Path, copies: Path | None):
        """`runs` is the folder of runs and archives; `copies` one that gets a copy of what changes,
        or None."""
        self.plan = plan
        self.card = card
        self.runs = runs
        self.copies = copies

    def keep_all(self) -> None:
        """Archive the runs of the plan's groups that are in folders and have a result."""
        for name in sorted({group.runs_group(self.card) for group in self.plan.groups}):
            self._write(name, [run for run in read_runs(self.runs, name) if run.folder is not None])

    def keep(self, spec: Spec) -> None:
        """Archive the run of a spec, if it has a result."""
        group, run_id = spec.run_path.parts
        self._write(group, [run for run in read_runs(self.runs, group) if run.key[1] == run_id])

    def _write(self, name: str, runs: list[Run]) -> None:
        """Add those runs that have a result to the archive of a group, and copy it."""
        runs = [run for run in runs if run.record["status"] in HAS_RESULT]
        if not runs:
            return
        path = self.runs / f"{name}.jsonl"
        unread = []
        # It prints which runs have several lines: those that older code made as well.
        with contextlib.redirect_stdout(io.StringIO()):
            write_archive(path, runs, unread)
        for problem in unread:
            say_left_out(name, problem)
        if self.copies is not None:
            for file in (path, steps_path(path)):
                if file.exists():
                    write_atomically(self.copies / file.name, file.read_bytes())


def run_units(
    specs: dict[Unit, list[Spec]], launcher: TimedLauncher, archives: Archives, tell: Tell
) -> list[dict]:
    """Run units, archive each run that ends with a result, and return the records of all.

    The units are what `next_units` returns: a block, which ends at its first run without a result,
    or single runs.
    """
    in_order = [spec for unit in specs for spec in specs[unit]]

    def ended(spec: Spec, entry: dict) -> None:
        archives.keep(spec)
        tell(spec, entry)

    if not any(unit.group.alone for unit in specs):
        return launcher.run_all(in_order, ended)
    entries = []
    for spec in in_order:
        entries += launcher.run_all([spec], ended)
        if entries[-1]["status"] not in HAS_RESULT:
            break
    return entries
