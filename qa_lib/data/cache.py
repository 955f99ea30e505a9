"""Arrays that are made once and kept on disk, by the hash of all that they are made of.

An entry is a folder: an .npy file for each array, and meta.json with the other values and the hash
of everything. Arrays are memory-mapped when they are read, so that a run begins in less than a
second. An entry that is damaged is made anew.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from qa_lib.data.files import hash_files

log = logging.getLogger(__name__)


def default_cache() -> Path:
    """Return the folder of cached arrays: below $QA_LIB_CACHE, else $XDG_CACHE_HOME/qa_lib, else
    ~/.cache/qa_lib."""
    root = os.environ.get("QA_LIB_CACHE")
    if not root:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "qa_lib")
    return Path(root, "features")


def cached(parts: list, kind: type, make: Callable, cache: str | os.PathLike | None = None):
    """Return what `make` gives, read from the folder `cache` where it is there already.

    `make` gives an object whose attributes are arrays and values that JSON takes, and `kind` makes
    such an object of its attributes by name. `parts` are all that the object is made of, as JSON
    takes them. None as `cache` stands for `default_cache()`.
    """
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    folder = Path(cache or default_cache(), key)
    return _load(folder, kind) or _store(folder, kind, make())


def _load(folder: Path, kind: type):
    """Return the object in a folder, its arrays memory-mapped; None if there is none, or a damaged
    one."""
    if not os.path.exists(folder):  # also says no to a path that is too long
        return None
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
        if meta.pop("sha256") != _digest(folder, meta):
            raise ValueError("it does not hold what was stored")
        arrays = {}
        for path in folder.glob("*.npy"):
            # A plain array over the mapping: indexing np.memmap itself costs several times as much.
            arrays[path.stem] = np.asarray(np.load(path, mmap_mode="r"))
        return kind(**arrays, **meta)
    except Exception as error:  # NumPy has many for a file that it cannot read; all mean the same
        log.warning("%s: damaged, made anew (%s)", folder, error)
        return None


def _digest(folder: Path, meta: dict) -> str:
    """Return the SHA-256 (hex) of an entry: its key, its arrays' files, and its other values."""
    files = hash_files(sorted(folder.glob("*.npy")))
    content = json.dumps([folder.name, files, meta], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _store(folder: Path, kind: type, made):
    """Put a whole entry in place at once, and return the object as it is read from there.

    Where the disk does not take it, `made` itself is returned, which costs the next call time.
    """
    arrays, meta = {}, {}
    for name, value in vars(made).items():
        if isinstance(value, np.ndarray):
            arrays[name] = value
        else:
            meta[name] = value
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="tmp-", dir=folder.parent) as work:
            entry = Path(work, folder.name)
            entry.mkdir()
            for name, array in arrays.items():
                np.save(entry / f"{name}.npy", array)
            content = meta | {"sha256": _digest(entry, meta)}
            (entry / "meta.json").write_text(json.dumps(content))
            # What may be there is a damaged entry, or the equal one of a neighbouring process.
            shutil.rmtree(folder, ignore_errors=True)
            entry.rename(folder)
    except OSError as error:
        log.warning("%s: not cached (%s)", folder, error)
        return made
    return _load(folder, kind) or made
