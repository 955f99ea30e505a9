"""The least versions of the two libraries that the package cannot do without.

`qa_lib.data` asks their metadata before anything imports either: an older transformers would end in
an ImportError of some name within it.
"""

import contextlib
import importlib.metadata
import re

from qa_lib.errors import UserError

# (major, minor), as in requirements.txt. That has upper bounds as well: those are what was tested,
# and no reason to refuse.
LEAST = {"torch": (2, 11), "transformers": (5, 10)}


def check_versions() -> None:
    """Check that no installed package is older than LEAST has it.

    A package that is not there is for whoever imports it to say. Raises UserError.
    """
    for package, least in LEAST.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            _check_version(package, importlib.metadata.version(package), least)


def _check_version(package: str, version: str | None, least: tuple[int, int]) -> None:
    """Raise UserError for a version that is too old; one that cannot be read passes."""
    match = re.match(r"(\d+)\.(\d+)", version or "")
    if match is None:
        return
    major, minor = match.groups()
    if (int(major), int(minor)) < least:
        needed = f"{least[0]}.{least[1]}"
        raise UserError(
            f"qa_lib needs {package} {needed} or newer, here {version}: "
            f'pip install -U "{package}>={needed}", then start Python anew'
        )
