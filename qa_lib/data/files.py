"""Files as they lie on disk: their JSON, their hashes, and the error for data of no use."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from qa_lib.errors import UserError


class DataError(UserError):
    """Data that cannot be used. The message names the file and, where there are any, the article
    and the question's id."""


def read_json(path: str | os.PathLike) -> object:
    """Parse a JSON file.

    Raises DataError for a file that cannot be read or is not JSON, and for a pipe or a device,
    whose content may never end.
    """
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise DataError(f"{path}: not a regular file")
    try:
        return json.loads(Path(path).read_bytes())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    # These are also broken UTF-8, a number of thousands of digits, and deep nesting.
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}") from None


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256 (hex). Raises DataError for a file that cannot be read."""
    try:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None


def hash_files(paths: Iterable[Path]) -> str:
    """Return the SHA-256 (hex) over the digests and names of files, in this order.

    Raises DataError for a file that cannot be read.
    """
    lines = [f"{sha256_of(path)}  {path.name}\n" for path in paths]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
