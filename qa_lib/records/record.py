"""The record of a run, record.json: what the run was, what it measured, and how it ended.

This module makes, writes, reads and checks records, and locks the folder of a run. In memory a
record is a dict, as JSON gives it. schema.py lists its sections and values and says what they mean.
The notebook beside a record is a log; nothing but the record counts as a result.

The `status` of a record goes from starting to running, and on to ok, oom, error, killed or skipped.
A driver writes "starting", and the run what follows, also "waiting" while it waits for its GPU. If
a run ends without saying how, its driver says it.

Whoever can write into a runs folder can write records. So a record is checked where it is read
(`check_record`), its ids too, before anything makes paths of them.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import json
import math
import re
from collections.abc import Iterator
from functools import cache
from glob import escape, glob
from pathlib import Path
from typing import get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from qa_lib.errors import SpecError, UserError, one_line
from qa_lib.records.code import code_version
from qa_lib.records.files import (
    RecordError,
    as_json,
    open_to_write,
    regular,
    writable_folder,
    write_atomically,
)
from qa_lib.records.schema import (
    SCHEMA,
    CodeSection,
    DataSection,
    ModelSection,
    Record,
    SpecSection,
    TaskSection,
    Time,
)
from qa_lib.spec.presets import Preset, whole_number
from qa_lib.spec.settings import Settings
from qa_lib.spec.spec import Spec, group_name
from qa_lib.spec.tasks import TASKS

STARTING = "starting"  # written by a driver; the run replaces it when it begins
FINISHED = ("ok", "oom", "skipped")  # a run with its result, which is not run again
TERMINAL = (*FINISHED, "error", "killed")  # a run that has ended, with its result or without

# Errors that the user can mend: files, a hub that does not answer, and the UserErrors. They are
# named as a record names the kind of an error.
MISTAKES = (
    "OSError",
    "UserError",
    "SpecError",
    "UnknownName",
    "DataError",
    "RecordError",
    "RunTaken",
    "NotReady",
)
# A machine that cannot do a run shows it within so many steps: in these kernels are compiled, for a
# first shape and for a second one.
FIRST_STEPS = 3

# The `task` section of a record, by the name of the task.
SCORING = {name: {"name": name} | dataclasses.asdict(task.scoring) for name, task in TASKS.items()}

# What a setting or a value of a preset was in records that are older than it.
DEFAULT_SETTINGS = dataclasses.asdict(Settings())
DEFAULT_PRESET = dataclasses.asdict(Preset(name=""))


def _types_of(hint: object) -> set[type]:
    """Return the types of a setting's values: bool and str for Literal[False, "elementwise"]."""
    choices = get_args(hint)  # none for a plain type such as int
    return {type(choice) for choice in choices} if choices else {hint}


SETTING_TYPES = {name: _types_of(hint) for name, hint in get_type_hints(Settings).items()}


class RunTaken(UserError):
    """Another process is working on this run."""


def now() -> str:
    """Return the time in UTC, as ISO 8601 with seconds."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def new_record(spec: Spec, env: dict) -> dict:
    """Return a record of status `running`, with what is known before the work begins.

    `env` is the machine as `measure.hardware.environment` describes it. What is not known yet is
    None.
    """
    scoring = SCORING[spec.preset.task]
    spec_section = SpecSection(
        variant=spec.variant,
        seed=spec.seed,
        hash=spec.hash,
        hardware=spec.hardware,
        world=spec.world,
        stages=spec.stages,
        search=spec.search,
        sm=spec.sm,
        preset=dataclasses.asdict(spec.preset),
        settings=dataclasses.asdict(spec.asked),
        adjusted=spec.adjusted,
    )
    record = Record(
        run_id=spec.run_id,
        group=spec.group,
        status="running",
        env=env,
        quality=dict.fromkeys(scoring["scores"]),
        spec=spec_section,
        code=CodeSection(**code_version()),
        data=DataSection(**spec.data),
        model=ModelSection(**spec.model),
        task=TaskSection(**scoring),
        time=Time(started=now()),
    )
    return dataclasses.asdict(record)


def document_header(schema: str, run_id: str, group: str) -> dict:
    """Return the first values of another document in a run's folder.

    They are the document's schema, the run that it belongs to, and the code that made it.
    """
    return {"schema": schema, "run_id": run_id, "group": group, "code": code_version()}


def write_record(run_dir: Path, record: dict) -> None:
    """Write record.json into the run's folder, atomically. Raises RecordError."""
    write_atomically(run_dir / "record.json", as_json(record, indent=1) + "\n")


def finish(run_dir: Path, record: dict, status: str, error: dict | None = None) -> dict:
    """Give a record its terminal status and its error, write it and return it.

    Raises RecordError.
    """
    record["status"] = status
    record["error"] |= error or {}
    record["time"]["ended"] = now()
    write_record(run_dir, record)
    return record


def with_result(record: dict, hint: str = "") -> dict:
    """Return the record as it is if its run has a result.

    Raises UserError, whose message ends with the hint, if the run failed.
    """
    if record["status"] in FINISHED:
        return record
    run = f"{record['group']}/{record['run_id']}"
    raise UserError(one_line(f"{run}: {record['status']}, {record['error']['message']}") + hint)


def unable(record: dict) -> bool:
    """Return whether a run failed because its machine cannot do it.

    Such a run ran out of memory before the end of training, or had an error before its first step
    or within FIRST_STEPS, such as a kernel that does not compile. MISTAKES do not count.
    """
    error = record["error"]
    is_trained = record["time"]["steps"] is not None
    if is_trained:
        return False
    if record["status"] == "oom":
        return True
    if record["status"] != "error" or error["kind"] in MISTAKES:
        return False
    # A loss that is not finite after the first update is the learning rate's fault, and the variant
    # that would be tried instead has the same rate.
    last_step = 1 if error["kind"] == "NonFiniteLoss" else FIRST_STEPS
    return error["step"] is None or error["step"] <= last_step


def run_files(runs: Path, name: str) -> list[Path]:
    """Return the files of that name in the run folders below `runs`.

    It does not fail if a folder vanishes meanwhile, as Path.glob would.
    """
    return [Path(path) for path in glob(f"{escape(str(runs))}/*/*/{name}")]


def read_record(run_dir: Path) -> dict:
    """Return the record in a run's folder.

    Raises RecordError for a record that is absent, broken, or of a schema that is not known, and if
    it holds a value of another type than the schema says.
    """
    path = run_dir / "record.json"
    return check_record(path, read_document(path, SCHEMA))


def read_document(path: Path, schema: str) -> dict:
    """Return the JSON of a file, which must be of that schema.

    Raises RecordError, which names the file.
    """
    try:
        return parse_document(path, regular(path).read_text(encoding="utf-8"), schema)
    except FileNotFoundError:
        raise RecordError(f"{path}: no record") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise RecordError(f"{path}: not readable as JSON ({problem})") from problem


def parse_document(path: Path, text: str, schema: str) -> dict:
    """Return the JSON that a file holds as `text`, which must be of that schema.

    Raises RecordError, which names the file by `path`.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise RecordError(f"{path}: not readable as JSON ({problem}): remove it") from problem
    # Text that was read as UTF-8 has no lone surrogate, so that only a JSON escape can make
    # one: from \ud800 to \udfff. The quick search for these spares most documents the full check.
    if re.search(r"\\ud[89a-f]", text, re.IGNORECASE) and not _is_utf8(document):
        raise RecordError(f"{path}: holds half a character (a lone surrogate)")
    found = document.get("schema") if isinstance(document, dict) else None
    if found != schema:
        raise RecordError(
            f"{path}: schema {found!r:.60} is not known to this version, which reads {schema!r}"
        )
    return document


def _is_utf8(document: object) -> bool:
    """Return whether all text in a JSON value can be written as UTF-8."""
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


@cache
def _adapter(model: type) -> TypeAdapter:
    """Return what checks a dict by a dataclass. It is kept, since it takes long to make."""
    return TypeAdapter(model)


def check_record(path: Path, document: dict, model: type[Record] = Record) -> dict:
    """Check a record that was read from `path`; return it with all the values that `model` has.

    Values that the schema got after the record was written have their defaults, and values that the
    schema does not know are left out. Raises RecordError, with the value's name, for whatever would
    make the report fail, or a path that is made of the record.
    """
    adapter = _adapter(model)
    try:
        record = adapter.dump_python(adapter.validate_python(document))
    except ValidationError as problem:
        fault = problem.errors()[0]
        # Where a value may be of several types, pydantic adds the type that it tried to its place.
        types = ("int", "float", "str", "bool")
        name = ".".join(str(part) for part in fault["loc"] if part not in types)
        raise _bad_value(path, name, fault["input"]) from None

    spec = record["spec"]
    spec["settings"] = DEFAULT_SETTINGS | spec["settings"]
    spec["preset"] = DEFAULT_PRESET | spec["preset"]
    _check_preset_and_settings(path, spec["preset"], spec["settings"])

    task = record["task"]["name"]
    if task not in SCORING:
        raise _bad_value(path, "task.name", task)
    # Scores that the task got after the record was written.
    for name in (*record["task"]["scores"], *SCORING[task]["scores"]):
        record["quality"].setdefault(name)

    gpu = record["env"].setdefault("gpu")
    if not isinstance(gpu, str | None):
        raise _bad_value(path, "env.gpu", gpu)
    return record


def _check_preset_and_settings(path: Path, preset: dict, settings: dict) -> None:
    """Raise RecordError for a value that the preset or a setting of a record cannot have."""
    try:
        Preset(**{name: preset[name] for name in DEFAULT_PRESET})  # a Preset checks its values
        whole_number("spec.settings.micro_batch", settings["micro_batch"], 1)
    except SpecError as problem:
        raise RecordError(f"{path}: {problem}") from None
    for name, types in SETTING_TYPES.items():
        if type(settings[name]) not in types:
            raise _bad_value(path, f"spec.settings.{name}", settings[name])


def _bad_value(path: Path, name: str, value: object) -> RecordError:
    """Return the error for a value that a record cannot have."""
    return RecordError(f"{path}: {name} is {str(value)[:40]!r}")


def check_group(path: Path, record: dict) -> None:
    """Raise RecordError for a record from `path` whose group is not that of its spec and task.

    The report would refuse the whole group as a mixed one.
    """
    task = record["task"]
    spec = record["spec"]
    preset = spec["preset"]
    group = group_name(spec["hardware"], preset["name"], preset["task"])
    if record["group"] != group:
        raise RecordError(
            f"{path}: group is {record['group'][:40]!r}, and its spec is of {group[:80]!r}"
        )
    if task["name"] != preset["task"]:
        raise RecordError(
            f"{path}: task.name is {task['name']!r}, and its preset's {preset['task'][:40]!r}"
        )
    for name in ("metric", "label", "higher_is_better"):
        known = SCORING[task["name"]][name]
        if task[name] != known:
            raise RecordError(f"{path}: task.{name} is {str(task[name])[:40]!r}, and not {known!r}")


def read_steps(path: Path) -> list[dict]:
    """Return the lines of a steps.jsonl, without those that a sudden end or a fault has spoilt.

    Without such a file there are none.
    """
    lines = path.read_bytes().splitlines() if path.is_file() else []
    steps = []
    for line in lines:
        with contextlib.suppress(Exception):  # a spoilt line may be no JSON, no dict, no numbers
            step = json.loads(line)
            is_finite = all(value is None or math.isfinite(value) for value in step.values())
            if step["step"] > 0 and is_finite:
                steps.append(step)
    return steps


@contextlib.contextmanager
def lock(run_dir: Path, name: str = ".lock") -> Iterator[None]:
    """Hold the run's folder while working in it. The lock is freed when its holder dies.

    The process that writes the record holds `.lock`. A driver holds `.driver.lock` from before its
    kernel starts to the end. Other hosts see a lock if the file system hands locks on:
    lab/launch/slurm.py says which do.

    Raises RunTaken if another process holds it; RecordError for a folder that cannot be written to
    or is a link, and for a lock that is no regular file.
    """
    try:
        writable_folder(run_dir).mkdir(parents=True, exist_ok=True)
        stream = open_to_write(run_dir / name, "a")
    except OSError as problem:
        raise RecordError(f"cannot write into {run_dir}: {problem.strerror}") from problem
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunTaken(f"{run_dir}: another process is working on this run") from None
        yield
