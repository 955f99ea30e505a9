"""Which code this process runs: digests of the package's files, taken before any of them decides anything.

`qa_lib/__init__.py` imports this module before all others. A run's checkpoint carries the digest of what was loaded, so
that a file that is edited while the run is at work does not pass for the code that the run began with. Engines and
tables are read when they are first needed, after the digests were taken. A file that has changed by then, or at any
later look, leaves a process of which nobody can say what it computes: its checkpoints are not believed.

All files of the package count, also those that will be added, but for what is listed here.
"""

import contextlib
import hashlib
import os
import re
from pathlib import Path

# Modules and folders that no process imports in order to train (tests/test_loaded.py holds this), by their places.
APART = {
    "lab/app",
    "lab/quickstart.py",
    "lab/report",
    "lab/search/tune.py",
    "lab/tools/export.py",
    "lab/tools/quantize.py",
}
# Names of files and folders that are no code: hidden ones (.ipynb_checkpoints, .loop.py.swp, .#loop.py), what editors
# and patches leave beside a file (loop.py~, #loop.py#, loop.py.orig; Vim tries a folder with a file 4913), bytecode,
# and what is written for people.
NO_CODE = re.compile(
    r"\..*|.*~|#.*#|4913|__pycache__|.*\.(sw[a-p]|bak|orig|rej|tmp|save|pyc|md|rst|css|ipynb|png|svg)"
)


def code_files(package: Path) -> dict[str, str]:
    """The path of every file below a package that may decide what a training computes, by its place in the package."""
    found, seen = {}, set()
    for folder, inner, names in os.walk(package, followlinks=True):
        if (whole := os.path.realpath(folder)) in seen:  # a link leads back to it
            inner.clear()
            continue
        seen.add(whole)
        above = os.path.relpath(folder, package)
        inner[:] = sorted(name for name in inner if _is_code(above, name))
        for name in names:
            path = os.path.join(folder, name)
            if _is_code(above, name) and os.path.isfile(path):
                found[_place(above, name)] = path
    return found


def _is_code(above: str, name: str) -> bool:
    return not NO_CODE.fullmatch(name) and _place(above, name) not in APART


def _place(above: str, name: str) -> str:
    return os.path.normpath(os.path.join(above, name))


def file_digests(package: Path) -> dict[str, str]:
    """SHA-256 (hex) of each of a package's `code_files`, by its place in the package. A file that vanishes meanwhile or
    cannot be read is left out."""
    found = {}
    for place, path in code_files(package).items():
        with contextlib.suppress(OSError), open(path, "rb") as stream:
            found[place] = hashlib.sha256(stream.read()).hexdigest()
    return found


class LoadedCode:
    """The code of a package as it was when this was made, and which of its files have changed since."""

    def __init__(self, package: Path):
        self.package, self.files = package, file_digests(package)
        self._changed: set[str] = set()

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over the places and contents of all files."""
        lines = (f"{digest}  {place}\n" for place, digest in sorted(self.files.items()))
        return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()

    def changed(self) -> list[str]:
        """The places of the files that are new, gone or of other content than at the start, now or at an earlier look:
        what was changed back may have been loaded meanwhile."""
        now = file_digests(self.package)
        for place in self.files.keys() | now.keys():
            if self.files.get(place) != now.get(place):
                self._changed.add(place)
        return sorted(self._changed)


CODE = LoadedCode(Path(__file__).absolute().parent)


def said_of_changes(places: list[str]) -> str:
    """Words for files that have changed: 'train/loop.py and 2 more'."""
    first = places[0].encode(errors="replace").decode()
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return f"{first}{more}"
