"""Runs as readers find them: in the folders that they wrote, or archived, a group in one file.

Reference evidence is a data set. `runs/<group>.jsonl` has a record a line, with its profile and its
quantized models inside; `runs/<group>.steps.parquet` has a line a training step of these runs.
pandas, `datasets` and grep read both. A folder wins over a line of the same run. An archived run is
evidence and nobody's own: a sweep that asks for it runs it.
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
from qa_lib.records.files import RecordError, as_json, regular, write_atomically
from qa_lib.records.record import (
    check_group,
    check_record,
    parse_document,
    read_document,
    read_steps,
    run_files,
)
from qa_lib.records.schema import PROFILE_SCHEMA, QUANTIZED_SCHEMA, SCHEMA, Record

# Columns of a run's steps; phi is the gradient noise scale so far.
STEP_COLUMNS = ("step", "loss", "lr", "ms", "phi")
# Columns before these in an archive, which say whose steps they are. Older archives lack `started`.
OWNER_COLUMNS = ("run_id", "started")

# Is told the group and the problem of a record that cannot be trusted.
LeftOut = Callable[[str, RecordError], None]
# The id of a run and when it began, "" where that is not known.
Owner = tuple[str, str]


@dataclass(kw_only=True)
class ArchivedRecord(Record):
    """A line of an archive: a record, and what lay beside it in its folder."""

    profile: dict | None = None
    """The content of profile.json; None if the run was never profiled."""

    quantized: list[dict] = field(default_factory=list)
    """The quantized.json of each of its quantized models."""


@dataclass(frozen=True)
class Run:
    """A record, and where what lies beside it is found."""

    record: dict
    """The record; of an archived run it has the fields of ArchivedRecord."""

    folder: Path | None = None
    """The run's folder; None for an archived run."""

    archive: Path | None = None
    """The archive that an archived run is a line of."""

    whole: dict = field(default_factory=dict)
    """The record as it was found, with the fields that this version does not know."""

    @property
    def key(self) -> tuple[str, str]:
        """The run's group and id."""
        return self.record["group"], self.record["run_id"]

    @property
    def done(self) -> bool:
        """Whether the run ended ok."""
        return self.record["status"] == "ok"

    def profile(self) -> dict | None:
        """Return the profile of the run; None if it was never profiled.

        Raises RecordError for one that is broken.
        """
        if self.folder is None:
            return self.record["profile"]
        path = self.folder / "profile.json"
        return read_document(path, PROFILE_SCHEMA) if path.exists() else None

    def quantized(self) -> list[dict]:
        """Return the quantized.json of each of the run's quantized models.

        Raises RecordError for one that is broken.
        """
        if self.folder is None:
            return self.record["quantized"]
        paths = sorted(self.folder.glob("model-*/quantized.json"))
        return [read_document(path, QUANTIZED_SCHEMA) for path in paths]

    def steps(self) -> pd.DataFrame:
        """Return the run's log: a line a step, with STEP_COLUMNS as floats.

        It has no lines where there is no log. A line that is being written, or was cut off, is left
        out. Raises RecordError for an archive's steps that cannot be read.
        """
        if self.folder is not None:
            return _as_steps(read_steps(self.folder / "steps.jsonl"))
        steps_by_owner = _steps_by_owner(steps_path(self.archive))
        run_id = self.record["run_id"]
        for owner in ((run_id, self.record["time"]["started"]), (run_id, "")):
            if owner in steps_by_owner:
                return steps_by_owner[owner]
        return _as_steps([])


def _as_steps(lines: list[dict]) -> pd.DataFrame:
    """Return lines of a log as a table."""
    return pd.DataFrame(lines, columns=list(STEP_COLUMNS), dtype=float)


# Reading runs.


def say_left_out(group: str, problem: RecordError) -> None:
    """Print a line on the terminal about a record that cannot be trusted."""
    print(one_line(f"left out: {problem}"), file=sys.stderr)


def read_runs(
    runs: str | Path, group: str | None = None, left_out: LeftOut = say_left_out
) -> list[Run]:
    """Return every run below `runs`, or those of one group, in the order of group and id.

    `left_out` is told of records that cannot be trusted.
    """
    archived = list(_archived_runs(Path(runs), group, left_out))
    # The last run of a key wins: one in a folder, else an archived one that ended ok.
    archived.sort(key=lambda run: run.done)
    in_folders = runs_in_folders(Path(runs), group, left_out)
    run_of_key = {run.key: run for run in (*archived, *in_folders)}
    return [run_of_key[key] for key in sorted(run_of_key)]


def runs_in_folders(runs: Path, group: str | None, left_out: LeftOut) -> Iterator[Run]:
    """Yield every run in a folder below `runs`, or those of one group, in no order.

    `left_out` is told of records that cannot be trusted.
    """
    for path in run_files(runs, "record.json"):
        run_dir = path.parent
        folders = (run_dir.parent.name, run_dir.name)
        if group not in (None, run_dir.parent.name):
            continue
        try:
            whole = read_document(path, SCHEMA)
            run = Run(check_record(path, whole), folder=run_dir, whole=whole)
            check_group(path, run.record)
            if run.key != folders:
                raise RecordError(f"{run_dir}: its record is that of {'/'.join(run.key)[:80]}")
        except RecordError as problem:
            left_out(run_dir.parent.name, problem)
        else:
            yield run


def own_first(runs: list[Run]) -> list[Run]:
    """Return the runs that are in folders, which are one's own; all of them where none is."""
    return [run for run in runs if run.folder is not None] or runs


def own_groups(runs: Iterable[Run]) -> set[str]:
    """Return the groups that have a run in a folder below the runs folder: these are one's own.

    Archived runs are committed evidence, so that a fresh checkout has no group of one's own.
    """
    return {run.record["group"] for run in runs if run.folder is not None}


def _archived_runs(runs: Path, group: str | None, left_out: LeftOut) -> Iterator[Run]:
    """Yield every archived run below `runs`, or those of one group, in the order of the files."""
    name = escape(group) if group else "*"
    for path in sorted(runs.glob(f"{name}.jsonl")):
        try:
            lines = _read_lines(path)
        except RecordError as problem:
            left_out(path.stem, problem)
            continue
        for number, line in enumerate(lines, 1):
            try:
                yield _parse_line(path, number, line)
            except RecordError as problem:
                left_out(path.stem, problem)


def _read_lines(path: Path) -> list[bytes]:
    """Return the lines of an archive. Raises RecordError for one that cannot be read."""
    try:
        return regular(path).read_bytes().splitlines()
    except OSError as problem:
        raise RecordError(f"{path}: not readable ({problem.strerror})") from problem


def _parse_line(path: Path, number: int, line: bytes) -> Run:
    """Return the run of a line of an archive. Raises RecordError, which names the line."""
    place = Path(f"{path}:{number}")
    try:
        text = line.decode()
    except UnicodeDecodeError as problem:
        raise RecordError(f"{place}: not UTF-8 ({problem.reason})") from problem
    whole = parse_document(place, text, SCHEMA)
    if whole.get("group") != path.stem:
        raise RecordError(f"{place}: a record of group {str(whole.get('group'))[:40]!r}")
    record = check_record(place, whole, ArchivedRecord)
    check_group(place, record)
    return Run(record, archive=path, whole=whole)


def steps_path(archive: Path) -> Path:
    """Return the path of the steps of an archive's runs."""
    return archive.with_suffix(".steps.parquet")


def _steps_by_owner(path: Path) -> dict[Owner, pd.DataFrame]:
    """Return the steps of each run of an archive; `path` is the file of the steps.

    Raises RecordError for one that cannot be read.
    """
    if not path.exists():
        return {}
    return _archived_steps(path, path.stat().st_ctime_ns)


@lru_cache(maxsize=16)
def _archived_steps(path: Path, _changed_ns: int) -> dict[Owner, pd.DataFrame]:
    """Return what `_steps_by_owner` does for a file that there is.

    The time of the file's last change is a parameter for the cache: another process may write the
    archive, and a page or a notebook that shows it goes on.
    """
    try:
        steps = pd.read_parquet(regular(path))
        if "started" not in steps:
            steps["started"] = ""
        steps["started"] = steps["started"].fillna("")
        steps[list(STEP_COLUMNS)] = steps[list(STEP_COLUMNS)].astype(float)
        steps = steps[steps["step"].between(1, 2**53)]  # which no NaN is
        return {
            owner: steps_of_run[list(STEP_COLUMNS)].reset_index(drop=True)
            for owner, steps_of_run in steps.groupby(list(OWNER_COLUMNS))
        }
    except Exception as problem:  # whatever Arrow and pandas make of a damaged file
        raise RecordError(
            f"{path}: not readable as steps of runs ({first_line(problem):.160})"
        ) from problem


# Writing an archive.


@dataclass(frozen=True)
class _Line:
    """A line of an archive, without its end, and its run; None where it cannot be read."""

    text: bytes
    run: Run | None


def write_archive(path: Path, ended: list[Run], unread: list[RecordError]) -> int:
    """Write an archive: the lines that it has, and behind them those of runs in folders.

    Returns how many runs are in it. `ended` are runs that have ended; what cannot be read of their
    folders is appended to `unread`. Prints which lines are of one run, and which cannot be read.
    Raises RecordError for an archive, or its steps, that cannot be read or written.
    """
    lines = _lines_of(path)
    for run in sorted(ended, key=lambda run: run.key):
        try:
            lines = _with_run(lines, run)
        except RecordError as problem:
            unread.append(problem)
    runs = [line.run for line in lines if line.run]

    # The steps are written first. They hold those of all older lines as well, so that a sudden end
    # in between leaves an archive that is whole, beside some steps that nobody reads.
    steps = _steps_of(runs, path)
    if len(steps):
        buffer = io.BytesIO()
        steps.to_parquet(buffer, compression="zstd", index=False)
        write_atomically(steps_path(path), buffer.getvalue())
        _archived_steps.cache_clear()
    write_atomically(path, b"".join(line.text + b"\n" for line in lines))

    lines_of_run = Counter(run.record["run_id"] for run in runs)
    for run_id, count in lines_of_run.items():
        if count > 1:
            records = [run.record for run in runs if run.record["run_id"] == run_id]
            which = _which_counts(records)
            print(f"{run_id}: {count} lines that differ, and all are kept; {which}")
    return len(lines_of_run)


def _lines_of(path: Path) -> list[_Line]:
    """Return the lines of an archive, none where there is no file. Prints which cannot be read."""
    lines = []
    for number, text in enumerate(_read_lines(path) if path.exists() else [], 1):
        try:
            lines.append(_Line(text, _parse_line(path, number, text)))
        except RecordError as problem:
            if text.strip():
                print(one_line(f"kept as it is: {problem}"), file=sys.stderr)
                lines.append(_Line(text, None))
    return lines


def _with_run(lines: list[_Line], run: Run) -> list[_Line]:
    """Return the lines of an archive with that of a run in a folder, unless one says all of it.

    Lines that say nothing else are replaced. Raises RecordError for what cannot be read of the
    folder.
    """
    content = _content_of(run)
    try:
        text = as_json(content, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as problem:
        raise RecordError(f"{run.folder}: not to be written as JSON ({problem})") from problem
    if any(line.run and _covers(line.run.whole, content) for line in lines):
        return lines
    kept = [line for line in lines if not (line.run and _covers(content, line.run.whole))]
    return [*kept, _Line(text, run)]


def _content_of(run: Run) -> dict:
    """Return what an archive says of a run in a folder: its record, and what lies beside it.

    The record has the fields that this version does not know. Raises RecordError.
    """
    record = _merged(run.record, run.whole)
    return record | {"profile": run.profile(), "quantized": run.quantized()}


def _merged(known: dict, found: dict) -> dict:
    """Return `known` with the values of `found`, section by section."""
    merged = known | found
    for name in known.keys() & found.keys():
        if isinstance(known[name], dict) and isinstance(found[name], dict):
            merged[name] = _merged(known[name], found[name])
    return merged


def _covers(new: object, old: object) -> bool:
    """Return whether a line of an archive says all that another one says.

    It does where the run was profiled meanwhile, say. What the other one leaves empty may be
    anything.
    """
    if isinstance(new, dict) and isinstance(old, dict):
        return all(name in new and _covers(new[name], value) for name, value in old.items())
    return old is None or old == [] or new == old


def _which_counts(records: list[dict]) -> str:
    """Return in words which of several lines of one run is read."""
    done = [record for record in records if record["status"] == "ok"]
    if done:
        return f"the last that ended ok counts, of {done[-1]['time']['started']}"
    return f"the last counts, which ended as {records[-1]['status']}"


def _steps_of(runs: list[Run], path: Path) -> pd.DataFrame:
    """Return the steps of runs, and those that the archive at `path` has of others.

    Others are runs whose lines cannot be read, and runs that have lost their steps. Columns are
    OWNER_COLUMNS and STEP_COLUMNS; without steps there are none.
    """
    steps_by_owner: dict[Owner, pd.DataFrame] = {}
    for run in runs:
        owner = (run.record["run_id"], run.record["time"]["started"])
        # If owners are equal, one is a changed copy of the other.
        steps_by_owner[owner] = run.steps()

    for (run_id, started), steps in _steps_by_owner(steps_path(path)).items():
        same = [
            owner
            for owner in steps_by_owner
            if owner[0] == run_id and (started == "" or started == owner[1])
        ]
        if all(len(steps_by_owner[owner]) < len(steps) for owner in same):
            steps_by_owner[same[0] if same else (run_id, started)] = steps

    if not steps_by_owner:
        return pd.DataFrame()
    parts = [
        steps.assign(run_id=run_id, started=started)
        for (run_id, started), steps in steps_by_owner.items()
    ]
    return pd.concat(parts, ignore_index=True)[[*OWNER_COLUMNS, *STEP_COLUMNS]]
