"""Reading and writing files in folders that others can write into, too.

Whoever can write into a runs folder can put links, pipes and devices there. So nothing is read that
a reader could wait at for ever, and nothing is written through a link: what it leads to is not
ours. Files are replaced in one step, so that a reader never sees half of one.
"""

import contextlib
import errno
import json
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import IO

from qa_lib.errors import UserError


class RecordError(UserError):
    """A record, or another file of a run, that cannot be read or written; the message names it."""


def regular(path: Path) -> Path:
    """Return the path of a file to read, which is a regular one, a link to one, or absent.

    Raises RecordError for a folder, a device or a pipe. At the last a reader could wait for ever.
    """
    if path.exists() and not path.is_file():
        raise RecordError(f"{path}: not a regular file; only such files are read or replaced here")
    return path


def writable(path: Path) -> Path:
    """Return the path of a file to write, which is a regular one or absent.

    Raises RecordError for a device, a pipe, a folder or a link.
    """
    if path.is_symlink():
        raise RecordError(
            f"{path}: not a regular file, but a link; what it leads to is not written over: "
            "remove the link"
        )
    return regular(path)


def writable_folder(folder: Path) -> Path:
    """Return a folder in which files may be replaced.

    Raises RecordError for a link: the files would be somebody else's.
    """
    if folder.is_symlink():
        raise RecordError(
            f"{folder}: a link; what is in the folder that it leads to is not written over: "
            "remove the link, or name that folder"
        )
    return folder


def check_folder(run_dir: Path) -> None:
    """Refuse a run's folder in which a run would write through a link, or wait at a pipe for ever.

    Raises RecordError where the folder is a link, or has in it, at any depth, a link, a pipe or a
    device.
    """
    writable_folder(run_dir)
    for folder, folder_names, file_names in os.walk(run_dir):
        for name in folder_names + file_names:
            path = Path(folder, name)
            if path.is_dir() and not path.is_symlink():
                continue
            writable(path)


def empty_folder(run_dir: Path) -> None:
    """Remove all that is in a run's folder but its locks, which the caller holds.

    Links are removed, and what they lead to is not. Raises RecordError for a folder that is a link.
    """
    for path in writable_folder(run_dir).iterdir():
        if path.name.endswith(".lock"):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file in one step: a reader sees the old one or the new one, also after a crash.

    Raises RecordError when the disk is full, the folder not writable, or `path` a link or no
    regular file; what was there is intact then.
    """
    data = content if isinstance(content, bytes) else content.encode()
    temporary = None
    try:
        writable(path).parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        # mkstemp makes a file for its owner alone; a record is for all to read, or as it was.
        mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o644
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except OSError as problem:
        raise RecordError(
            f"cannot write {path}: {problem.strerror}; what was there before is intact"
        ) from problem
    finally:
        # It is gone where os.replace was reached, and left over after an error or Ctrl-C before.
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def open_to_write(path: Path, mode: str) -> IO:
    """Open a file that `writable` lets pass, and look again once it is open.

    Somebody may put a link, a pipe or a device there between the two.

    `mode` is that of `open`. Raises RecordError as `writable` does, and OSError as `open` does.
    """

    def opener(name: str, flags: int) -> int:
        handle = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        if not stat.S_ISREG(os.fstat(handle).st_mode):  # a device, or a pipe that somebody reads
            os.close(handle)
            raise RecordError(f"{name}: not a regular file; only such files are written here")
        return handle

    try:
        return open(writable(path), mode, opener=opener)
    except OSError as problem:
        if problem.errno in (errno.ELOOP, errno.ENXIO):  # a link; a pipe without a reader
            writable(path)
        raise


def as_json(content: object, **layout) -> str:
    """Return a value as JSON; `layout` are options of json.dumps.

    Half characters (lone surrogates), which an error's message may have from a file's name, become
    question marks: no other text format can hold them. Raises ValueError for a NaN.
    """
    text = json.dumps(content, allow_nan=False, ensure_ascii=False)
    without_surrogates = text.encode(errors="replace")
    return json.dumps(json.loads(without_surrogates), **layout)
