"""The record: what a run was, what it measured, how it ended. One JSON file a run, replaced atomically.

`status` goes starting -> running -> ok | oom | error | killed | skipped; a driver writes the first, and a run that has
to wait for its GPU is `waiting` meanwhile. A number that was not measured is null, never 0. The notebook beside it is a
log; nothing but the record counts as a result.

In memory a record is the dict that its JSON says. record.toml has its sections, their values and what these mean.

Whoever can write into a runs folder can write records and links. So a record is checked where it is read (`checked`),
its ids too, before anything makes paths of them; and nothing is written through a link (`writable`, `check_folder`).
"""

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import json
import math
import os
import re
import shutil
import stat
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from functools import cache
from glob import escape, glob
from pathlib import Path
from types import NoneType
from typing import IO, Annotated, get_args, get_type_hints

from pydantic import Field, StrictBool, StrictFloat, StrictInt, TypeAdapter, ValidationError

from qa_lib.errors import SpecError, UserError, one_line
from qa_lib.spec.presets import Preset, whole_number
from qa_lib.spec.spec import Spec, group_name
from qa_lib.spec.variants import TASKS, Settings

SCHEMA, PROFILE_SCHEMA, QUANTIZED_SCHEMA = "qa_lib/3", "qa_lib-profile/3", "qa_lib-quantized/3"
STARTING = "starting"  # written by a driver; the run replaces it when it begins
FINISHED = ("ok", "oom", "skipped")  # not run again
TERMINAL = (*FINISHED, "error", "killed")
STATUSES = (STARTING, "waiting", "running", *TERMINAL)
NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}"  # of a run or a group, which is that of a folder, too
# Kinds of errors that the user can mend: files, a hub that does not answer, and the UserErrors.
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

# Steps within which a machine shows that it cannot do a run: it compiles for a first shape, and for a second one.
FIRST_STEPS = 3

# What a column of a table can hold.
FITS = Field(ge=-(2**63), lt=2**63)
Whole = Annotated[StrictInt, FITS]
Number = Annotated[StrictInt | StrictFloat, FITS] | None
Values = dict[str, str | StrictBool | Number]
KINDS = {  # of a value of record.toml -> its type, and what makes that of a new record, where it is not to be given
    "required": (str, dataclasses.MISSING),
    "text": (str, str),
    "text or null": (str | None, NoneType),
    "flag": (StrictBool | None, NoneType),
    "from 0": (Annotated[Whole, Field(ge=0)], int),
    "count": (Whole | None, NoneType),
    "number": (Number, NoneType),
    "texts": (list[str], list),
    "scores": (dict[str, Number], dict),
    "values": (Values, dict),
    "values or null": (Values | None, NoneType),
}


def section(name: str, values: dict) -> type:
    """The dataclass of a section of record.toml, or of all of it, by which pydantic checks what is read."""
    fields = []
    for key, kind in values.items():
        # A section is what makes its own values.
        type_, new = [section(key, kind)] * 2 if isinstance(kind, dict) else KINDS[kind]
        fields.append((key, type_, dataclasses.field(default_factory=new)))
    return dataclasses.make_dataclass(name, fields)


SECTIONS = tomllib.loads(Path(__file__).with_name("record.toml").read_text(encoding="utf-8"))
Record = section("Record", SECTIONS)
Speed, Memory = (
    section("Speed", SECTIONS["speed"]),
    section("Memory", SECTIONS["memory"]),
)  # what meter.py measures
StepTime, Noise = (
    section("StepTime", SECTIONS["time"]["step_ms"]),
    section("Noise", SECTIONS["parallel"]["noise"]),
)
DEFAULTS = {
    "settings": dataclasses.asdict(Settings()),
    "preset": dataclasses.asdict(Preset(name="")),
}
# Of each setting the types that its values have: `Literal[False, True, "elementwise"]` has bool and str.
SETTING_TYPES = {
    name: {type(value) for value in get_args(hint)} or {hint}
    for name, hint in get_type_hints(Settings).items()
}
SCORING = {
    name: {"name": name} | task["scoring"] for name, task in TASKS.items()
}  # as in a record's `task`


class RecordError(UserError):
    """A record that cannot be read or written; the message names the file."""


class RunTaken(UserError):
    """Another process is working on this run."""


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def new_record(spec: Spec, env: dict) -> dict:
    """A record of status `running`: what is known before the work begins, and null for everything else."""
    task = SCORING[spec.preset.task]
    known = "variant seed hash hardware world stages search sm adjusted".split()
    quality = dict.fromkeys(task["scores"])
    found = Record(
        spec.run_id, spec.group, "running", schema=SCHEMA, env=env, task=task, quality=quality
    )
    record = dataclasses.asdict(found)
    record["spec"] |= {name: getattr(spec, name) for name in known}
    record["spec"] |= {
        "preset": dataclasses.asdict(spec.preset),
        "settings": dataclasses.asdict(spec.asked),
    }
    record["code"] = code_version()
    record["data"] |= spec.data
    record["model"] |= spec.model
    record["time"]["started"] = now()
    return record


def beside(schema: str, run_id: str, group: str) -> dict:
    """What begins a document that lies beside a run's record: its schema, the run, and the code that made it."""
    return {"schema": schema, "run_id": run_id, "group": group, "code": code_version()}


# A line of a notebook that `make links` writes: the address to clone from, or a link to Colab or GitHub.
LINK = r"(git clone .*|\]\()https://([a-z.]+/)?github"


def code_version() -> dict:
    """{commit, dirty} of the checkout this package lies in; or the commit that $QA_LIB_COMMIT names, where the code was
    copied without its history, or onto an older one. Raises RecordError for a name that is no hash."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    if named := os.environ.get("QA_LIB_COMMIT"):
        if not re.fullmatch(r"[0-9a-f]{40}", named):
            raise RecordError(
                f"QA_LIB_COMMIT={named!r} is not a commit's whole hash, 40 hexadecimal digits"
            )
        return {"commit": named, "dirty": None}
    try:
        # Runs and figures are what the code writes; only a change of the code itself makes a checkout dirty.
        changed = git("status", "--porcelain", "--", ":/qa_lib", ":/requirements.txt")
        changed += git(
            "diff", "--no-ext-diff", "--ignore-matching-lines", LINK, "HEAD", "--", ":/notebooks"
        )
        changed += git("ls-files", "--others", "--exclude-standard", ":/notebooks")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changed)}
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content` in one step: a reader sees the old file or the new one, also after a crash.

    Raises RecordError when the disk is full, the folder not writable, or `path` a link or no regular file; what was
    there is intact then.
    """
    temporary = None
    try:
        writable(path).parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as stream:
            stream.write(content if isinstance(content, bytes) else content.encode())
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o644)
        os.replace(temporary, path)
    except OSError as problem:
        raise RecordError(
            f"cannot write {path}: {problem.strerror}; what was there before is intact"
        ) from problem
    finally:
        if temporary:  # which is `path` by now, unless something came between
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def regular(path: Path) -> Path:
    """The path of a file to read: of a regular one, also by a link, or of none. Raises RecordError for a device, a pipe
    or a folder, at which a reader could wait for ever."""
    if path.exists() and not path.is_file():
        raise RecordError(f"{path}: not a regular file, which alone is read and replaced here")
    return path


def writable(path: Path) -> Path:
    """The path of a file to write: of a regular one, or of none. Raises RecordError for a device, a pipe or a folder,
    and for a link, since what it leads to is not ours."""
    if path.is_symlink():
        raise RecordError(
            f"{path}: not a regular file, but a link; what it leads to is not written over: remove the link"
        )
    return regular(path)


def writable_folder(folder: Path) -> Path:
    """A folder in which files may be replaced. Raises RecordError for a link: they would be somebody else's."""
    if folder.is_symlink():
        raise RecordError(
            f"{folder}: a link; what is in the folder that it leads to is not written over: remove the link, or name "
            "that folder"
        )
    return folder


def open_to_write(path: Path, mode: str) -> IO:
    """open(path, mode) for a file that `writable` takes, also where somebody puts a link or a pipe there meanwhile."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)

    try:
        return open(writable(path), mode, opener=opener)
    except OSError as problem:
        if problem.errno in (errno.ELOOP, errno.ENXIO):  # a link; a pipe without a reader
            writable(path)
        raise


def check_folder(run_dir: Path) -> None:
    """Raises RecordError where a run's folder, or anything in it, is a link, or neither a file nor a folder: the run
    would write over what a link leads to, or wait at a pipe for ever."""
    writable_folder(run_dir)
    for folder, folders, files in os.walk(run_dir):
        for path in (Path(folder, name) for name in folders + files):
            if path.is_symlink() or not path.is_dir():
                writable(path)


def empty_folder(run_dir: Path) -> None:
    """Remove all that is in a run's folder but its locks, which whoever calls this holds. Links are removed, and not
    what they lead to. Raises RecordError for a folder that is a link itself."""
    for old in writable_folder(run_dir).iterdir():
        if old.name.endswith(".lock"):
            continue
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        else:
            old.unlink()


def as_json(content: object, **layout) -> str:
    """A value as JSON, with json.dumps' options `layout`. Half characters (lone surrogates), which an error's message
    may have from a file's name, become question marks: no other text format can hold them. Raises ValueError for a NaN.
    """
    text = json.dumps(content, allow_nan=False, ensure_ascii=False)
    return json.dumps(json.loads(text.encode(errors="replace")), **layout)


def write_record(run_dir: Path, record: dict) -> None:
    """Write record.json into the run's folder, atomically. Raises RecordError."""
    write_atomically(run_dir / "record.json", as_json(record, indent=1) + "\n")


def finish(run_dir: Path, record: dict, status: str, error: dict | None = None) -> dict:
    """Give a record its terminal status, and write it."""
    record["status"] = status
    record["error"] |= error or {}
    record["time"]["ended"] = now()
    write_record(run_dir, record)
    return record


def with_result(record: dict, hint: str = "") -> dict:
    """The record of a run that has its result. Raises UserError, with the hint, for one that failed."""
    if record["status"] not in FINISHED:
        said = f"{record['group']}/{record['run_id']}: {record['status']}, {record['error']['message']}"
        raise UserError(one_line(said) + hint)
    return record


def unable(record: dict) -> bool:
    """Whether a run was more than its machine could do: out of memory in training; or an error in FIRST_STEPS or
    before, such as a kernel that does not compile, but none of MISTAKES."""
    status, error, trained = record["status"], record["error"], record["time"]["steps"] is not None
    # After the first update a loss that is not finite is the learning rate's fault, which the next choice has as well.
    steps = 1 if error["kind"] == "NonFiniteLoss" else FIRST_STEPS
    early = (error["step"] is None or error["step"] <= steps) and error["kind"] not in MISTAKES
    return not trained and (status == "oom" or (status == "error" and early))


def run_files(runs: Path, name: str) -> list[Path]:
    """The files of that name in the run folders below `runs`; it bears folders that vanish meanwhile, as Path.glob does
    not."""
    return [Path(path) for path in glob(f"{escape(str(runs))}/*/*/{name}")]


def read_record(run_dir: Path) -> dict:
    """The record of a run's folder. Raises RecordError when it is absent, broken, of a schema that is not known, or
    holds a value of another type than the schema says."""
    path = run_dir / "record.json"
    return checked(path, document(path, SCHEMA))


def checked(path: Path, record: dict, kind: type = Record) -> dict:
    """A record read from `path`, with the defaults of fields that came after it, and without fields that are not known.

    Raises RecordError, with the value's name, for whatever the report, or a path that is made of the record, could
    stumble at.
    """
    try:
        found = _adapter(kind).dump_python(_adapter(kind).validate_python(record))
        for name, values in DEFAULTS.items():  # as in the hash of a run
            found["spec"][name] = values | found["spec"][name]
        Preset(
            **{name: found["spec"]["preset"][name] for name in DEFAULTS["preset"]}
        )  # checks them
        whole_number("spec.settings.micro_batch", found["spec"]["settings"]["micro_batch"], 1)
    except ValidationError as problem:
        first = problem.errors()[0]
        # Where several types would do, the last part says which was tried.
        way = ".".join(
            str(part) for part in first["loc"] if part not in ("int", "float", "str", "bool")
        )
        raise RecordError(f"{path}: {way} is {str(first['input'])[:40]!r}") from None
    except SpecError as problem:
        raise RecordError(f"{path}: {problem}") from None
    for way, value, is_known in _words_of(found):
        if not is_known:
            raise RecordError(f"{path}: {way} is {str(value)[:40]!r}")
    # Scores that came after the record.
    for name in [*found["task"]["scores"], *SCORING[found["task"]["name"]]["scores"]]:
        found["quality"].setdefault(name)
    found["env"].setdefault("gpu")
    return found


def _words_of(record: dict) -> Iterator[tuple[str, object, bool]]:
    """Of a record whose values have their types, each that has to be one of some: its name, itself, whether it is."""
    for name in ("run_id", "group"):
        yield name, record[name], re.fullmatch(NAME, record[name]) is not None
    yield "status", record["status"], record["status"] in STATUSES
    task = record["task"]["name"]
    yield "task.name", task, task in SCORING
    gpu = record["env"].get("gpu")
    yield "env.gpu", gpu, gpu is None or isinstance(gpu, str)
    for name, types in SETTING_TYPES.items():
        value = record["spec"]["settings"][name]
        yield f"spec.settings.{name}", value, type(value) in types


_adapter = cache(TypeAdapter)


def document(path: Path, known: str) -> dict:
    """The JSON of a regular file, of a known schema. Raises RecordError, which names it."""
    try:
        return parsed(path, regular(path).read_text(encoding="utf-8"), known)
    except FileNotFoundError:
        raise RecordError(f"{path}: no record") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise RecordError(f"{path}: not readable as JSON ({problem})") from problem


def parsed(path: Path, text: str, known: str) -> dict:
    """JSON of a known schema that stands in `path`. Raises RecordError, which names it."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise RecordError(f"{path}: not readable as JSON ({problem}): remove it") from problem
    # Text is UTF-8, so that half a character can only be written as an escape.
    if re.search(r"\\ud[89a-f]", text, re.IGNORECASE) and not _is_text(found):
        raise RecordError(f"{path}: holds half a character (a lone surrogate)")
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != known:
        raise RecordError(
            f"{path}: schema {schema!r:.60} is not known to this version, which reads {known!r}"
        )
    return found


def check_group(path: Path, record: dict) -> None:
    """Raises RecordError for a record, read from `path`, that says otherwise than its group. One of other hardware or
    of another task, say, would make the report refuse the whole group as a mixed one."""
    task, spec = record["task"], record["spec"]
    preset = spec["preset"]
    own = group_name(spec["hardware"], preset["name"], preset["task"])
    if record["group"] != own:
        raise RecordError(
            f"{path}: group is {record['group'][:40]!r}, and its spec is of {own[:80]!r}"
        )
    if task["name"] != preset["task"]:
        raise RecordError(
            f"{path}: task.name is {task['name']!r}, and its preset's {preset['task'][:40]!r}"
        )
    for name in ("metric", "label", "higher_is_better"):
        known = SCORING[task["name"]][name]
        if task[name] != known:
            raise RecordError(f"{path}: task.{name} is {str(task[name])[:40]!r}, and not {known!r}")


def _is_text(content: object) -> bool:
    """Whether all text in a JSON value can be written as UTF-8."""
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def read_steps(path: Path) -> list[dict]:
    """The lines of a steps.jsonl, without those that a sudden end or a fault of the disk has spoilt."""
    found = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        with contextlib.suppress(Exception):  # whatever a spoilt line leads to
            step = json.loads(line)
            if step["step"] > 0 and all(
                value is None or math.isfinite(value) for value in step.values()
            ):
                found.append(step)
    return found


@contextlib.contextmanager
def lock(run_dir: Path, name: str = ".lock"):
    """Hold the run's folder while working in it; RunTaken if another process does. Freed when the holder dies. Raises
    RecordError for a folder that cannot be written to or is a link, and for a lock that is no regular file.

    `.lock` is held by who writes the record; a driver holds `.driver.lock` from before its kernel starts to the end.
    For other hosts, where the file system hands locks on: lab/launch/slurm.py says which do.
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
