"""The record: what a run was, what it measured, how it ended. One JSON file a run, replaced atomically.

`status` goes running -> ok | oom | error | killed | skipped. A number that was not measured is null, never 0. The
notebook beside it is a log; nothing but the record counts as a result.
"""

import contextlib
import copy
import dataclasses
import datetime
import fcntl
import json
import os
import subprocess
import tempfile
from pathlib import Path

from qa_lib.errors import UserError
from qa_lib.spec import Spec

SCHEMA = "qa_lib/1"
PROFILE_SCHEMA = "qa_lib-profile/1"
WAITING = "waiting for the GPU, on which another run trains"  # a run's word in its log, which its driver looks for
FINISHED = ("ok", "oom", "skipped")  # not run again
TERMINAL = (*FINISHED, "error", "killed")

_SECTIONS = {
    "error": ("kind", "message", "step"),
    "time": (
        "started",
        "ended",
        "prepare_s",
        "compile_s",
        "compile_cached",
        "train_s",
        "eval_s",
        "wall_s",
        "steps",
        "resumed_from_step",
    ),
    "speed": (
        "features_per_s",
        "tokens_per_s",
        "real_tokens_per_s",
        "pad_fraction",
        "mfu",
        "hfu",
        "peak_tflops_measured",
    ),
    "memory": (
        "peak_alloc_mib",
        "peak_reserved_mib",
        "params_mib",
        "grads_mib",
        "optimizer_mib",
        "activations_mib",
        "host_rss_mib",
    ),
    "energy": ("joules_per_feature",),
    "quality": (
        "exact",
        "f1",
        "has_answer_exact",
        "has_answer_f1",
        "no_answer_f1",
        "best_exact",
        "best_exact_threshold",
        "best_f1",
        "best_f1_threshold",
        "always_null_f1",
        "n",
    ),
    "model": ("name", "revision", "params_total", "params_trainable"),
}


class RecordError(UserError):
    """A record that cannot be read or written; the message names the file."""


class RunTaken(UserError):
    """Another process is working on this run."""


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def new_record(spec: Spec, env: dict) -> dict:
    """A record of status `running`: what is known before the work begins, and null for everything else."""
    record = {name: dict.fromkeys(keys) for name, keys in _SECTIONS.items()}
    record["time"] |= {"started": now(), "step_ms": dict.fromkeys(("n", "median", "p10", "p90"))}
    record["model"] |= {"name": spec.model["name"], "revision": spec.model["revision"]}
    return {
        "schema": SCHEMA,
        "run_id": spec.run_id,
        "group": spec.group,
        "status": "running",
        "spec": {
            "variant": spec.variant,
            "scale": dataclasses.asdict(spec.scale),
            "seed": spec.seed,
            "hash": spec.hash,
            "settings": dataclasses.asdict(spec.asked),
            "adjusted": spec.adjusted,
            "planned_steps": None,
            "n_train": None,
            "n_eval": None,
        },
        "code": code_version(),
        "env": env,
        "data": spec.data | {"n": None},
        **record,
    }


def code_version() -> dict:
    """{commit, dirty} of the checkout this package lies in; or the commit that $QA_LIB_COMMIT names, where the code was
    copied without its history, or onto an older one."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *words], capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    if named := os.environ.get("QA_LIB_COMMIT"):
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

    Raises RecordError when the disk is full or the folder not writable; the old file is intact then.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as stream:
            stream.write(content if isinstance(content, bytes) else content.encode())
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as problem:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise RecordError(f"cannot write {path}: {problem.strerror}; what was there before is intact") from problem


def write_record(run_dir: Path, record: dict) -> None:
    """Write record.json into the run's folder, atomically. Raises RecordError."""
    write_atomically(run_dir / "record.json", json.dumps(record, indent=1, allow_nan=False) + "\n")


def finish(run_dir: Path, record: dict, status: str, error: dict | None = None) -> dict:
    """A copy of `record` with a terminal status, written to disk."""
    record = copy.deepcopy(record)
    record["status"] = status
    record["error"] |= error or {}
    record["time"]["ended"] = now()
    write_record(run_dir, record)
    return record


def read_record(run_dir: Path) -> dict:
    """The record of a run's folder. Raises RecordError when it is absent, broken, or of another schema."""
    path = run_dir / "record.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecordError(f"{path}: no record") from None
    except (OSError, ValueError) as problem:
        raise RecordError(f"{path}: not readable as JSON ({problem})") from problem
    schema = record.get("schema") if isinstance(record, dict) else None
    if schema != SCHEMA:
        raise RecordError(f"{path}: schema {schema!r} is not known to this version, which reads {SCHEMA!r}")
    return record


@contextlib.contextmanager
def lock(run_dir: Path, name: str = ".lock"):
    """Hold the run's folder while working in it; RunTaken if another process does. Freed when the holder dies.

    `.lock` is held by who writes the record; a driver holds `.driver.lock` from before its kernel starts to the end.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / name, "w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunTaken(f"{run_dir}: another process is working on this run") from None
        yield
