"""Imported by the first cell of each notebook: goes to the repository's root, and installs what notebooks need and is
missing or of another version; a torch that is there is left alone."""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement


def lacks(needed: Requirement) -> bool:
    """Whether a package is not there, or is of a version that the requirement excludes."""
    try:
        found = version(needed.name)
    except PackageNotFoundError:
        return True
    fits = needed.specifier.contains(found, prereleases=True)
    if needed.name == "torch" and not fits:
        print(
            f"torch {found} is left alone, but this was tested with {needed.specifier}",
            file=sys.stderr,
        )
    return needed.name != "torch" and not fits


os.chdir(Path(__file__).resolve().parents[1])
sys.path[:] = [
    folder for folder in sys.path if folder not in ("..", "lab")
]  # which lead elsewhere from here
if wanted := [
    line for line in Path("requirements.txt").read_text().split() if lacks(Requirement(line))
]:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *wanted], check=True)
