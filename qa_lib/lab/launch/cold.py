"""A run from nothing, as a new user has it: the command line, with every cache empty."""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from qa_lib.paths import importing
from qa_lib.records import record
from qa_lib.spec.spec import Spec

# Environment variables of folders: what this library, Inductor and Triton cache.
CACHES = ("QA_LIB_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@contextlib.contextmanager
def empty_caches() -> Iterator[dict[str, str]]:
    """Yield environment variables with which a process finds nothing cached.

    What it caches itself is removed at the end.
    """
    with tempfile.TemporaryDirectory() as empty:
        yield {name: os.path.join(empty, name) for name in CACHES}


def run_cold(spec: Spec, runs: str | Path) -> dict:
    """Run a spec by the command `python -m qa_lib run`, and return the record.

    The command finds nothing cached. The record's `notebook_s` is what it takes from its start to
    its end. Raises CalledProcessError where the command fails, which has said why.
    """
    run_dir = Path(runs, spec.run_path)
    options = spec.own | {
        "preset": spec.preset.name,
        "seed": spec.seed,
        "runs": runs,
        "data": spec.data_source,
        "model": spec.model_source,
    }
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "qa_lib", "run", spec.variant, *words]
    (run_dir / "record.json").unlink(missing_ok=True)  # a finished run would be left alone
    with empty_caches() as caches:
        begin = time.monotonic()
        subprocess.run(command, env=importing(os.environ | caches), check=True)
        seconds = time.monotonic() - begin
    entry = record.read_record(run_dir)
    entry["time"]["notebook_s"] = round(seconds, 3)
    entry["time"]["compile_cached"] = False  # what it found was its own code at most
    record.write_record(run_dir, entry)
    return entry
