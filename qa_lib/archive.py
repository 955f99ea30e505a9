"""Runs as readers find them: in the folders that they wrote, or archived, a whole group in one file.

Reference evidence is a data set. `runs/<group>.jsonl` has a record a line, with its profile and its quantized models
inside; `runs/<group>.steps.parquet` has a line a training step of these runs. pandas, `datasets` and grep read both. A
folder wins over a line of the same run. An archived run is evidence and nobody's own: a sweep that asks for it runs it.
"""

import argparse
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from glob import escape
from pathlib import Path

import pandas as pd

from qa_lib import record
from qa_lib.errors import UserError, printable
from qa_lib.record import RecordError

STEP_COLUMNS = (
    "step",
    "loss",
    "lr",
    "ms",
    "phi",
)  # of a line of steps.jsonl; phi: the gradient noise scale so far


@dataclass
class Archived(record.Record):
    """A line of an archive: a record, and what lay beside it."""

    profile: dict | None = None
    quantized: list[dict] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """A record and what lies beside it; `folder` is where, None for an archived run, whose `archive` is its line."""

    record: dict
    folder: Path | None = None
    archive: Path | None = None

    def profile(self) -> dict | None:
        """The profile of the run; None if it was never profiled. Raises RecordError for one that is broken."""
        if self.folder is None:
            return self.record["profile"]
        path = self.folder / "profile.json"
        return record.document(path, record.PROFILE_SCHEMA) if path.exists() else None

    def quantized(self) -> list[dict]:
        """The quantized.json of each of the run's quantized models. Raises RecordError for one that is broken."""
        if self.folder is None:
            return self.record["quantized"]
        found = sorted(self.folder.glob("model-*/quantized.json"))
        return [record.document(path, record.QUANTIZED_SCHEMA) for path in found]

    def steps(self) -> pd.DataFrame:
        """The run's log, a line a step with STEP_COLUMNS as floats; without lines where there is none. A line that is
        being written, or was cut off, is left out."""
        if self.folder is None:
            steps = _archived_steps(self.archive.with_suffix(".steps.parquet"))
            return steps.get(self.record["run_id"], _as_steps([]))
        return _as_steps(record.read_steps(self.folder / "steps.jsonl"))


def _as_steps(lines: list[dict]) -> pd.DataFrame:
    return pd.DataFrame(lines, columns=[*STEP_COLUMNS], dtype=float)


@lru_cache(maxsize=16)
def _archived_steps(path: Path) -> dict[str, pd.DataFrame]:
    """The steps of each run of an archive, by its id."""
    if not path.is_file():
        return {}
    try:
        steps = pd.read_parquet(path)
        return {
            run: own[[*STEP_COLUMNS]].reset_index(drop=True) for run, own in steps.groupby("run_id")
        }
    except (OSError, ValueError, KeyError) as problem:
        raise RecordError(f"{path}: not readable as steps of runs ({problem})") from problem


def say_left_out(group: str, problem: RecordError) -> None:
    """A line on the terminal about a record that cannot be trusted."""
    print(printable(f"left out: {problem}"), file=sys.stderr)


def read_runs(
    runs: str | Path,
    group: str | None = None,
    left_out: Callable[[str, RecordError], None] = say_left_out,
) -> list[Run]:
    """Every run below `runs`, or those of one group, by group and id. `left_out` is told of records that cannot be
    trusted, by their group."""
    every = [*_archived(Path(runs), group, left_out), *runs_in_folders(Path(runs), group, left_out)]
    found = {(run.record["group"], run.record["run_id"]): run for run in every}
    return [found[key] for key in sorted(found)]


def runs_in_folders(runs: Path, group: str | None, left_out: Callable) -> Iterator[Run]:
    """As read_runs, without those that are archived, in no order."""
    for path in record.run_files(runs, "record.json"):
        run_dir = path.parent
        if group not in (None, run_dir.parent.name):
            continue
        try:
            entry = record.read_record(run_dir)
            if (entry["group"], entry["run_id"]) != (run_dir.parent.name, run_dir.name):
                raise RecordError(
                    f"{run_dir}: its record is that of {entry['group'][:40]}/{entry['run_id'][:40]}"
                )
            yield Run(entry, run_dir)
        except RecordError as problem:
            left_out(run_dir.parent.name, problem)


def own_groups(found: Iterable[Run]) -> set[str]:
    """The groups of which some run is in a folder below the runs folder: these are one's own. Archived runs are
    committed evidence, so that a fresh checkout has no group of one's own, and this is empty."""
    return {run.record["group"] for run in found if run.folder is not None}


def _archived(runs: Path, group: str | None, left_out: Callable) -> Iterator[Run]:
    for path in sorted(runs.glob(f"{escape(group) if group else '*'}.jsonl")):
        try:
            lines = record.regular(path).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError, RecordError) as problem:
            left_out(path.stem, RecordError(f"{path}: not readable ({problem})"))
            continue
        for number, line in enumerate(lines, 1):
            place = Path(f"{path}:{number}")
            try:
                entry = record.checked(place, record.parsed(place, line, record.SCHEMA), Archived)
                if entry["group"] != path.stem:
                    raise RecordError(f"{place}: a record of group {entry['group'][:40]!r}")
                yield Run(entry, archive=path)
            except RecordError as problem:
                left_out(path.stem, problem)


def main(args: argparse.Namespace) -> int:
    """Put a group's runs, archived ones and those in folders, into one file, and their steps into another. Writes
    nothing where a record cannot be read, which would be lost."""
    if Path(args.group).name != args.group:
        raise UserError(f"{args.group!r} is not the name of a group")
    problems: list[RecordError] = []
    every = read_runs(args.runs, args.group, lambda _, problem: problems.append(problem))
    if problems:
        raise UserError(f"nothing is written, since a record would be lost: {problems[0]}")
    found = [run for run in every if run.record["status"] in record.TERMINAL]
    if not found:
        raise UserError(f"no finished run of group {args.group} below {args.runs}")
    path = args.runs / f"{args.group}.jsonl"
    write_archive(path, found)
    print(f"{path}: {len(found)} runs, and beside it their steps")
    if len(found) < len(every):
        print(
            f"not finished, and left out: {len(every) - len(found)}, which are in their folders alone"
        )
    return 0


def write_archive(path: Path, found: list[Run]) -> None:
    """Write a group's runs to a file, and their steps beside it. Raises RecordError for a profile that is broken."""
    lines = [run.record | {"profile": run.profile(), "quantized": run.quantized()} for run in found]
    text = "".join(
        json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n" for line in lines
    )
    own = [run.steps().assign(run_id=run.record["run_id"]) for run in found]
    steps, buffer = pd.concat(own, ignore_index=True), io.BytesIO()
    steps[["run_id", *STEP_COLUMNS]].to_parquet(buffer, compression="zstd", index=False)
    record.write_atomically(path, text)
    if len(steps):
        record.write_atomically(path.with_suffix(".steps.parquet"), buffer.getvalue())
    _archived_steps.cache_clear()
