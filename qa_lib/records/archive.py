"""Runs as readers find them: in the folders that they wrote, or archived, a whole group in one file.

Reference evidence is a data set. `runs/<group>.jsonl` has a record a line, with its profile and its quantized models
inside; `runs/<group>.steps.parquet` has a line a training step of these runs. pandas, `datasets` and grep read both. A
folder wins over a line of the same run. An archived run is evidence and nobody's own: a sweep that asks for it runs it.
"""

import io
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from glob import escape
from pathlib import Path

import pandas as pd

from qa_lib.errors import first_line, one_line
from qa_lib.records import record
from qa_lib.records.record import RecordError

# Of a line of steps.jsonl; phi: the gradient noise scale so far.
STEP_COLUMNS = ("step", "loss", "lr", "ms", "phi")
# Of the steps of an archive: whose they are. Older archives have no `started`.
OWNER = ["run_id", "started"]


@dataclass
class Archived(record.Record):
    """A line of an archive: a record, and what lay beside it."""

    profile: dict | None = None
    quantized: list[dict] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """A record and what lies beside it; `folder` is where, None for an archived run, whose `archive` is its line.
    `whole` is the record as it was found, with the fields that this version does not know."""

    record: dict
    folder: Path | None = None
    archive: Path | None = None
    whole: dict = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        return self.record["group"], self.record["run_id"]

    @property
    def done(self) -> bool:
        return self.record["status"] == "ok"

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
        if self.folder is not None:
            return _as_steps(record.read_steps(self.folder / "steps.jsonl"))
        steps = _archived_steps(self.archive.with_suffix(".steps.parquet"))
        run_id, started = self.record["run_id"], self.record["time"]["started"]
        for owner in ((run_id, started), (run_id, "")):
            if owner in steps:
                return steps[owner]
        return _as_steps([])


def _as_steps(lines: list[dict]) -> pd.DataFrame:
    return pd.DataFrame(lines, columns=[*STEP_COLUMNS], dtype=float)


@lru_cache(maxsize=16)
def _archived_steps(path: Path) -> dict[tuple[str, str], pd.DataFrame]:
    """The steps of each run of an archive, by its id and when it began, "" where that is not told."""
    if not path.exists():
        return {}
    try:
        steps = pd.read_parquet(record.regular(path))
        if "started" not in steps:
            steps["started"] = ""
        steps["started"] = steps["started"].fillna("")
        steps[[*STEP_COLUMNS]] = steps[[*STEP_COLUMNS]].astype(float)
        steps = steps[steps["step"].between(1, 2**53)]  # which no NaN is
        return {
            owner: own[[*STEP_COLUMNS]].reset_index(drop=True)
            for owner, own in steps.groupby(OWNER)
        }
    except Exception as problem:  # whatever Arrow and pandas make of a damaged file
        raise RecordError(
            f"{path}: not readable as steps of runs ({first_line(problem):.160})"
        ) from problem


def say_left_out(group: str, problem: RecordError) -> None:
    """A line on the terminal about a record that cannot be trusted."""
    print(one_line(f"left out: {problem}"), file=sys.stderr)


def read_runs(
    runs: str | Path,
    group: str | None = None,
    left_out: Callable[[str, RecordError], None] = say_left_out,
) -> list[Run]:
    """Every run below `runs`, or those of one group, by group and id. `left_out` is told of records that cannot be
    trusted, by their group."""
    lines = [*_archived(Path(runs), group, left_out)]
    # Of lines of one id one that ended ok counts, and of several the last.
    lines.sort(key=lambda run: run.done)
    every = [*lines, *runs_in_folders(Path(runs), group, left_out)]
    found = {run.key: run for run in every}
    return [found[key] for key in sorted(found)]


def runs_in_folders(runs: Path, group: str | None, left_out: Callable) -> Iterator[Run]:
    """As read_runs, without those that are archived, in no order."""
    for path in record.run_files(runs, "record.json"):
        run_dir = path.parent
        if group not in (None, run_dir.parent.name):
            continue
        try:
            whole = record.document(path, record.SCHEMA)
            run = Run(record.checked(path, whole), run_dir, whole=whole)
            record.check_group(path, run.record)
            if run.key != (run_dir.parent.name, run_dir.name):
                raise RecordError(f"{run_dir}: its record is that of {'/'.join(run.key)[:80]}")
            yield run
        except RecordError as problem:
            left_out(run_dir.parent.name, problem)


def own_first(found: list[Run]) -> list[Run]:
    """Of runs those in folders, which are one's own; all of them where none is."""
    return [run for run in found if run.folder is not None] or found


def own_groups(found: Iterable[Run]) -> set[str]:
    """The groups of which some run is in a folder below the runs folder: these are one's own. Archived runs are
    committed evidence, so that a fresh checkout has no group of one's own, and this is empty."""
    return {run.record["group"] for run in found if run.folder is not None}


def _archived(runs: Path, group: str | None, left_out: Callable) -> Iterator[Run]:
    for path in sorted(runs.glob(f"{escape(group) if group else '*'}.jsonl")):
        try:
            lines = _lines(path)
        except RecordError as problem:
            left_out(path.stem, problem)
            continue
        for number, line in enumerate(lines, 1):
            try:
                yield _archived_run(path, number, line)
            except RecordError as problem:
                left_out(path.stem, problem)


def _lines(path: Path) -> list[bytes]:
    """The lines of an archive. Raises RecordError for one that cannot be read."""
    try:
        return record.regular(path).read_bytes().splitlines()
    except OSError as problem:
        raise RecordError(f"{path}: not readable ({problem.strerror})") from problem


def _archived_run(path: Path, number: int, line: bytes) -> Run:
    """The run of a line of an archive. Raises RecordError, which names the line."""
    place = Path(f"{path}:{number}")
    try:
        text = line.decode()
    except UnicodeDecodeError as problem:
        raise RecordError(f"{place}: not UTF-8 ({problem.reason})") from problem
    whole = record.parsed(place, text, record.SCHEMA)
    if whole.get("group") != path.stem:
        raise RecordError(f"{place}: a record of group {str(whole.get('group'))[:40]!r}")
    entry = record.checked(place, whole, Archived)
    record.check_group(place, entry)
    return Run(entry, archive=path, whole=whole)


def write_archive(path: Path, ended: list[Run], unread: list[RecordError]) -> int:
    """Write the lines that an archive has, and behind them those of runs that have ended in folders; their steps beside
    it. Says which lines are of one run, and which cannot be read. Returns how many runs are in it.

    What cannot be read of a folder is appended to `unread`. Raises RecordError for an archive, or its steps, that
    cannot.

    The steps are written first. They hold those of all older lines as well, so that a sudden end in between leaves an
    archive that is whole, beside some steps that nobody reads.
    """
    lines: list[tuple[bytes, Run | None]] = []  # each with its run, if it can be read
    for number, line in enumerate(_lines(path) if path.exists() else [], 1):
        try:
            lines.append((line, _archived_run(path, number, line)))
        except RecordError as problem:
            if line.strip():
                print(one_line(f"kept as it is: {problem}"), file=sys.stderr)
                lines.append((line, None))
    for run in sorted(ended, key=lambda run: run.key):
        try:
            whole, line = _line_of(run)
        except RecordError as problem:
            unread.append(problem)
            continue
        if any(older and _covers(older.whole, whole) for _, older in lines):
            continue
        lines = [pair for pair in lines if not (pair[1] and _covers(whole, pair[1].whole))]
        lines.append((line, run))
    every = [run for _, run in lines if run]
    steps = _steps_of(path, every)
    if len(steps):
        buffer = io.BytesIO()
        steps.to_parquet(buffer, compression="zstd", index=False)
        record.write_atomically(path.with_suffix(".steps.parquet"), buffer.getvalue())
        _archived_steps.cache_clear()
    record.write_atomically(path, b"".join(line + b"\n" for line, _ in lines))
    times = Counter(run.record["run_id"] for run in every)
    for run_id, count in times.items():
        if count > 1:
            own = [run.record for run in every if run.record["run_id"] == run_id]
            print(f"{run_id}: {count} lines that differ, and all are kept; {_counting(own)}")
    return len(times)


def _line_of(run: Run) -> tuple[dict, bytes]:
    """What an archive says of a run in a folder, also as JSON: its record with the fields that this version does not
    know, and what lies beside it. Raises RecordError."""
    whole = _merged(run.record, run.whole)
    whole |= {"profile": run.profile(), "quantized": run.quantized()}
    try:
        return whole, record.as_json(whole, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as problem:
        raise RecordError(f"{run.folder}: not to be written as JSON ({problem})") from problem


def _merged(known: dict, found: dict) -> dict:
    """What is known of a record, and what was found beside that, a section in a section."""
    both = known | found
    for name in known.keys() & found.keys():
        if isinstance(known[name], dict) and isinstance(found[name], dict):
            both[name] = _merged(known[name], found[name])
    return both


def _covers(new: object, old: object) -> bool:
    """Whether a line of an archive says all that another one says, such as one that was profiled meanwhile. What the
    other one leaves empty may be anything."""
    if isinstance(new, dict) and isinstance(old, dict):
        return all(name in new and _covers(new[name], value) for name, value in old.items())
    return old is None or old == [] or new == old


def _counting(records: list[dict]) -> str:
    """Which of several lines of one run is read, in words."""
    done = [entry for entry in records if entry["status"] == "ok"]
    if done:
        return f"the last that ended ok counts, of {done[-1]['time']['started']}"
    return f"the last counts, which ended as {records[-1]['status']}"


def _steps_of(path: Path, every: list[Run]) -> pd.DataFrame:
    """The steps of runs, with OWNER and STEP_COLUMNS; and those that the archive at `path` has of lines that cannot be
    read, and of runs that have lost theirs."""
    parts = {}
    for run in every:
        owner = (run.record["run_id"], run.record["time"]["started"])
        steps = run.steps()
        if owner not in parts or len(steps):  # of equal owners one is a changed copy of the other
            parts[owner] = steps
    for (run_id, started), steps in _archived_steps(path.with_suffix(".steps.parquet")).items():
        same = [owner for owner in parts if owner[0] == run_id and started in ("", owner[1])]
        if all(len(parts[owner]) < len(steps) for owner in same):
            parts[same[0] if same else (run_id, started)] = steps
    named = [
        steps.assign(run_id=run_id, started=started) for (run_id, started), steps in parts.items()
    ]
    return pd.concat(named, ignore_index=True)[[*OWNER, *STEP_COLUMNS]] if named else pd.DataFrame()
