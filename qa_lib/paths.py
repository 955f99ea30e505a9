"""Where the lab's own files are: notebooks/, the committed records in runs/, pictures in figures/, requirements.txt.

Everything that a command writes goes to the current folder, or where its options say, and never here.
"""

import os
from collections.abc import Mapping
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
_PACKED = PACKAGE / "files"  # in a wheel: pyproject.toml puts them there
IS_CHECKOUT = not _PACKED.is_dir()
ROOT = PACKAGE.parent if IS_CHECKOUT else _PACKED


def importing(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables with which a child process imports this library as this one does, also where it lies in a
    checkout that is neither installed nor the current folder."""
    if not IS_CHECKOUT:
        return dict(environment)
    before = environment.get("PYTHONPATH")
    path = os.pathsep.join([str(ROOT), *([before] if before else [])])
    return {**environment, "PYTHONPATH": path}
