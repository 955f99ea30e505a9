"""The record: what a run was, what it measured, how it ended. One JSON file a run, replaced atomically.

`status` goes starting -> running -> ok | oom | error | killed | skipped; a driver writes the first, and a run that has
to wait for its GPU is `waiting` meanwhile. A number that was not measured is null, never 0. The notebook beside it is a
log; nothing but the record counts as a result.

In memory a record is the dict that its JSON says. The dataclasses below are its schema: the sections, their values and
the types of these, by which pydantic checks whatever is read.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import json
import math
import os
import re
import stat
import subprocess
import tempfile
from dataclasses import dataclass, field
from functools import cache
from glob import escape, glob
from pathlib import Path
from typing import Annotated

from pydantic import Field, StrictBool, StrictFloat, StrictInt, TypeAdapter, ValidationError

from qa_lib.errors import UserError
from qa_lib.presets import Preset, whole_number
from qa_lib.spec import Spec
from qa_lib.variants import TASKS, Settings, SpecError

SCHEMA, PROFILE_SCHEMA, QUANTIZED_SCHEMA = "qa_lib/3", "qa_lib-profile/3", "qa_lib-quantized/3"
STARTING = "starting"  # written by a driver; the run replaces it when it begins
FINISHED = ("ok", "oom", "skipped")  # not run again
TERMINAL = (*FINISHED, "error", "killed")

# What a column of a table can hold.
FITS = Field(ge=-(2**63), lt=2**63)
Whole = Annotated[StrictInt, FITS]
Number = Annotated[StrictInt | StrictFloat, FITS] | None
Plain = dict[str, str | StrictBool | Number]


@dataclass
class Error:
    """Why a run did not end ok; `step` counts from 1."""

    kind: str | None = None
    message: str | None = None
    step: Whole | None = None


@dataclass
class StepTime:
    """Milliseconds of the `n` measured optimizer steps."""

    n: Number = None
    median: Number = None
    p10: Number = None
    p90: Number = None


@dataclass
class Time:
    """When, and how many seconds what took; `steps` that were trained, in all processes that worked on the run.

    `first_step_s` is from the process's start to the end of its first training step, null where the process had served
    another run. `prepare_s` ends before the first step: data, samples, model, the measured matrix rate, the compiler's
    imports, and the start of its processes, which go on meanwhile. `compile_s` is a part of `train_s`
    (Meter.compile_s). `wall_s` is all of these, `eval_s` and the writing of the model, and `notebook_s` its process's
    imports as well.

    `data_ms` is the host's time for the inputs of a measured step, the median, of the first process where there are
    several. Most of it passes while the GPU computes, so that the GPU waits for data that long at most. Null where
    transformers.Trainer fetches them.
    """

    started: str = ""
    ended: str | None = None
    prepare_s: Number = None
    compile_s: Number = None
    compile_cached: StrictBool | None = None
    first_step_s: Number = None
    train_s: Number = None
    eval_s: Number = None
    wall_s: Number = None
    notebook_s: Number = None
    data_ms: Number = None
    steps: Whole | None = None
    resumed_from_step: Whole | None = None
    step_ms: StepTime = field(default_factory=StepTime)


@dataclass
class Speed:
    """Rates over the measured steps. Of language models, and of questions too, `tokens_per_s` leaves out padding and
    `tokens_per_s_padded` counts it.

    `gemm_utilization` is the share of the matrix rate that the run measured itself (`gemm_tflops_measured`), by the
    FLOPs of tokens without padding; `gemm_utilization_padded` by all that is computed, what is recomputed as well.
    `mfu` is the first as a share of the rate in the card's data sheet. `gpu_busy` is the share of the time in which the
    run's own GPU was busy, by NVML, the mean over the processes; `gpu_busy_polled` the mean of what nvidia-smi said
    after each step, over all GPUs of the host (variant P0-polled).
    """

    samples_per_s: Number = None
    tokens_per_s: Number = None
    tokens_per_s_padded: Number = None
    pad_fraction: Number = None
    gemm_utilization: Number = None
    gemm_utilization_padded: Number = None
    mfu: Number = None
    gemm_tflops_measured: Number = None
    gpu_busy: Number = None
    gpu_busy_polled: Number = None


@dataclass
class Memory:
    """MiB of the GPU's memory, and the process's peak on the host."""

    peak_alloc_mib: Number = None
    peak_reserved_mib: Number = None
    params_mib: Number = None
    grads_mib: Number = None
    optimizer_mib: Number = None
    activations_mib: Number = None
    host_rss_mib: Number = None


@dataclass
class Energy:
    joules_per_sample: Number = None


@dataclass
class Code:
    """The checkout that the run is of; see code_version."""

    commit: str | None = None
    dirty: StrictBool | None = None


@dataclass
class Data:
    """The identity of questions or text, and how many there are."""

    name: str = ""
    sha256: str = ""
    n: Number = None


@dataclass
class Model:
    """The model's identity, its parameters, and how many layers it has."""

    name: str = ""
    revision: str = ""
    params_total: Number = None
    params_trainable: Number = None
    layers: Whole | None = None


@dataclass
class Scoring:
    """What a run is scored by: `metric` names the score in `quality` that variants are compared by, `label` is how
    people write it, and `scores` are all that `quality` holds."""

    name: str = "qa"
    metric: str = "f1"
    label: str = "F1"
    higher_is_better: StrictBool = True
    scores: list[str] = field(default_factory=list)


@dataclass
class Noise:
    """Of the gradient over all data the square norm, and the variance that a sample adds (train/grad_noise.py); means
    over the last 32,000 samples or so of `steps`."""

    sqr: Number = None
    var: Number = None
    steps: Whole | None = None


@dataclass
class Parallel:
    """How several processes shared a run, `world` of them at its end, which have `replicas` models; null for a run
    of one, but for its wrapper and what its noise says. `wrapper` is the class that PyTorch or DeepSpeed has put
    around the model, DistributedDataParallel or DeepSpeedEngine. A pipeline has `stages`, a `schedule` and a
    `bubble`, the share of a step in which the process that waits most does so, beside what the formula says
    (train/pipeline.py); `rank_computing_ms` is how long each computes in a step, and says whether stages are balanced.
    `interconnect` is how the GPUs are connected (measure/hardware.py); `rank_*` have a value for each process, by its
    rank; `allreduce_gbs` is the bus bandwidth of one reduction; of a step, `busy_ms` is how long a GPU computes and
    `exposed_ms` how long it only communicates, means over the processes (measure/comm.py); `goodput` is samples a
    second times `efficiency` (train/grad_noise.py)."""

    world: Whole | None = None
    replicas: Whole | None = None
    wrapper: str | None = None
    stages: Whole | None = None
    schedule: str | None = None
    bubble: Number = None
    bubble_formula: Number = None
    backend: str | None = None
    interconnect: str | None = None
    allreduce_gbs: Number = None
    busy_ms: Number = None
    exposed_ms: Number = None
    rank_peak_mib: Plain | None = None
    rank_step_ms: Plain | None = None
    rank_computing_ms: Plain | None = None
    weights_equal: StrictBool | None = None
    noise: Noise = field(default_factory=Noise)
    efficiency: Number = None
    goodput: Number = None


SCORING = {name: Scoring(name=name, **task["scoring"]) for name, task in TASKS.items()}


@dataclass
class Asked:
    """What of the spec tables and figures rely on; `settings` and `preset` hold more than is named here."""

    variant: str = ""
    seed: Annotated[Whole, Field(ge=0)] = 0
    hash: str = ""
    hardware: str = ""
    world: Whole = 1
    stages: Whole | None = None
    search: str = ""
    sm: Whole | None = None
    preset: Plain = field(default_factory=dict)
    settings: Plain = field(default_factory=dict)
    adjusted: list[str] = field(default_factory=list)
    planned_steps: Whole | None = None
    n_train: Whole | None = None
    n_eval: Whole | None = None


@dataclass
class Record:
    """A whole record; `env` and `quality` are dicts of plain values."""

    run_id: str
    group: str
    status: str
    schema: str = SCHEMA
    spec: Asked = field(default_factory=Asked)
    code: Code = field(default_factory=Code)
    env: Plain = field(default_factory=dict)
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    task: Scoring = field(default_factory=Scoring)
    error: Error = field(default_factory=Error)
    time: Time = field(default_factory=Time)
    speed: Speed = field(default_factory=Speed)
    memory: Memory = field(default_factory=Memory)
    energy: Energy = field(default_factory=Energy)
    parallel: Parallel = field(default_factory=Parallel)
    quality: dict[str, Number] = field(default_factory=dict)


class RecordError(UserError):
    """A record that cannot be read or written; the message names the file."""


class RunTaken(UserError):
    """Another process is working on this run."""


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def duration(seconds: float) -> str:
    """'42 s', '12 min', '3 h 05 min'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def new_record(spec: Spec, env: dict) -> dict:
    """A record of status `running`: what is known before the work begins, and null for everything else."""
    task = SCORING[spec.preset.task]
    known = "variant seed hash hardware world stages search sm adjusted".split()
    settings = {"preset": dataclasses.asdict(spec.preset), "settings": dataclasses.asdict(spec.asked)}
    record = Record(
        run_id=spec.run_id,
        group=spec.group,
        status="running",
        spec=Asked(**{name: getattr(spec, name) for name in known}, **settings),
        code=Code(**code_version()),
        env=env,
        data=Data(**spec.data),
        model=Model(spec.model["name"], spec.model["revision"]),
        task=task,
        time=Time(started=now()),
        quality=dict.fromkeys(task.scores),
    )
    return dataclasses.asdict(record)


def code_version() -> dict:
    """{commit, dirty} of the checkout this package lies in; or the commit that $QA_LIB_COMMIT names, where the code was
    copied without its history, or onto an older one. Raises RecordError for a name that is no hash."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    if named := os.environ.get("QA_LIB_COMMIT"):
        if not re.fullmatch(r"[0-9a-f]{40}", named):
            raise RecordError(f"QA_LIB_COMMIT={named!r} is not a commit's whole hash, 40 hexadecimal digits")
        return {"commit": named, "dirty": None}
    try:
        # Runs and figures are what the code writes; only a change of the code itself makes a checkout dirty.
        return {
            "commit": git("rev-parse", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "--", ":/qa_lib", ":/notebooks", ":/requirements.txt")),
        }
    except (OSError, subprocess.SubprocessError):
        return {"commit": None, "dirty": None}


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content` in one step: a reader sees the old file or the new one, also after a crash.

    Raises RecordError when the disk is full, the folder not writable, or `path` no regular file; what was there is
    intact then.
    """
    temporary, path = None, regular(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as stream:
            stream.write(content if isinstance(content, bytes) else content.encode())
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o644)
        os.replace(temporary, path)
    except OSError as problem:
        raise RecordError(f"cannot write {path}: {problem.strerror}; what was there before is intact") from problem
    finally:
        if temporary:  # which is `path` by now, unless something came between
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def regular(path: Path) -> Path:
    """The file to replace where `path` is to be written: itself, or the one that it is a link to. Raises RecordError
    for a device, a pipe or a folder, which nothing may replace."""
    found = path.resolve() if path.is_symlink() else path
    if found.exists() and not found.is_file():
        raise RecordError(f"{path}: not a regular file, which alone is read and replaced here")
    return found


def write_record(run_dir: Path, record: dict) -> None:
    """Write record.json into the run's folder, atomically. Raises RecordError."""
    write_atomically(run_dir / "record.json", json.dumps(record, indent=1, allow_nan=False) + "\n")


def finish(run_dir: Path, record: dict, status: str, error: dict | None = None) -> dict:
    """Give a record its terminal status, and write it."""
    record["status"] = status
    record["error"] |= error or {}
    record["time"]["ended"] = now()
    write_record(run_dir, record)
    return record


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
    """A record read from `path`, with the defaults of fields that came after it. Raises RecordError."""
    try:
        found = dataclasses.asdict(_adapter(kind).validate_python(record))
        for name, unnamed in (("settings", Settings()), ("preset", Preset(name=""))):  # as in the hash of a run
            found["spec"][name] = dataclasses.asdict(unnamed) | found["spec"][name]
        known = {field.name for field in dataclasses.fields(Preset)}
        Preset(**{name: value for name, value in found["spec"]["preset"].items() if name in known})  # checks them
        whole_number("spec.settings.micro_batch", found["spec"]["settings"]["micro_batch"], 1)
    except ValidationError as problem:
        first = problem.errors()[0]
        # Where several types would do, the last part says which was tried.
        way = ".".join(str(part) for part in first["loc"] if part not in ("int", "float", "str", "bool"))
        raise RecordError(f"{path}: {way} is {str(first['input'])[:40]!r}") from None
    except SpecError as problem:
        raise RecordError(f"{path}: {problem}") from None
    known = SCORING.get(found["task"]["name"], Scoring())  # with scores that came after the record
    for name in [*found["task"]["scores"], *known.scores]:
        found["quality"].setdefault(name)
    return found


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
        raise RecordError(f"{path}: not readable as JSON ({problem})") from problem
    schema = found.get("schema") if isinstance(found, dict) else None
    if schema != known:
        raise RecordError(f"{path}: schema {schema!r} is not known to this version, which reads {known!r}")
    return found


def read_steps(path: Path) -> list[dict]:
    """The lines of a steps.jsonl, without those that a sudden end or a fault of the disk has spoilt."""
    found = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        with contextlib.suppress(Exception):  # whatever a spoilt line leads to
            step = json.loads(line)
            if step["step"] > 0 and all(value is None or math.isfinite(value) for value in step.values()):
                found.append(step)
    return found


@contextlib.contextmanager
def lock(run_dir: Path, name: str = ".lock"):
    """Hold the run's folder while working in it; RunTaken if another process does. Freed when the holder dies.

    `.lock` is held by who writes the record; a driver holds `.driver.lock` from before its kernel starts to the end.
    For other hosts, where the file system hands locks on: run/launch.py says which do.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / name, "a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunTaken(f"{run_dir}: another process is working on this run") from None
        yield
