"""Where the library's own files are: in a checkout, or in an installed package.

They are notebooks/, the committed records in runs/, pictures in figures/ and requirements.txt.
Everything that a command writes goes to the current folder, or where its options say, and never
here.
"""

import os
from collections.abc import Mapping
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
_PACKED = PACKAGE / "files"  # in a wheel: pyproject.toml puts them there
IS_CHECKOUT = not _PACKED.is_dir()
ROOT = PACKAGE.parent if IS_CHECKOUT else _PACKED


def importing(environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with which a child process imports this library, too.

    Without them it would not find a checkout that is neither installed nor the current folder.
    """
    variables = dict(environment)
    if IS_CHECKOUT:
        path_before = environment.get("PYTHONPATH")
        variables["PYTHONPATH"] = f"{ROOT}{os.pathsep}{path_before}" if path_before else str(ROOT)
    return variables
