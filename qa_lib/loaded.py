"""Which code this process runs: digests of the package's files, taken before any is imported.

`qa_lib/__init__.py` imports this module before all others. A run's checkpoint carries the digest of
what was loaded, so that a file that is edited while the run is at work does not pass for the code
that the run began with. Engines and tables are read when they are first needed, after the digests
were taken. A file that has changed by then, or at any later look, leaves a process of which nobody
can say what it computes: its checkpoints are not believed.

All files of the package count, folders whole and data files beside code too, also those that will
be added, but for what is listed here.
"""

import contextlib
import hashlib
import os
import re
from pathlib import Path

# Folders that decide nothing of what a training computes. The lab starts, searches, shows and
# tells; what it hands to a training is in the spec, whose hash a checkpoint carries as well. No
# module outside of it imports it (tests/test_layout.py).
APART = {"lab"}
# Names of files and folders that are no code.
NO_CODE = re.compile(
    r"\..*"  # hidden ones: .ipynb_checkpoints, .loop.py.swp, .#loop.py
    r"|.*~|#.*#"  # what editors leave beside a file: loop.py~, #loop.py#
    r"|4913"  # the file by which Vim tries a folder
    r"|__pycache__"
    r"|.*\.(sw[a-p]|bak|orig|rej|tmp|save|pyc)"  # of editors and patches, and bytecode
    r"|.*\.(md|rst|css|ipynb|png|svg)"  # written for people
)


def code_files(package: Path) -> dict[str, str]:
    """Return the path of every file of a package that may decide what a training computes.

    The keys are their places in the package, such as train/loop.py. Links are followed.
    """
    paths = {}
    seen = set()
    for folder, subfolders, names in os.walk(package, followlinks=True):
        real_folder = os.path.realpath(folder)
        if real_folder in seen:  # a link leads back to it
            subfolders.clear()
            continue
        seen.add(real_folder)
        above = os.path.relpath(folder, package)
        subfolders[:] = sorted(name for name in subfolders if _is_code(above, name))
        for name in names:
            path = os.path.join(folder, name)
            if _is_code(above, name) and os.path.isfile(path):
                paths[_place(above, name)] = path
    return paths


def _is_code(above: str, name: str) -> bool:
    return not NO_CODE.fullmatch(name) and _place(above, name) not in APART


def _place(above: str, name: str) -> str:
    return os.path.normpath(os.path.join(above, name))


def file_digests(package: Path) -> dict[str, str]:
    """Return the SHA-256 (hex) of each of a package's `code_files`, by its place in the package.

    A file that vanishes meanwhile or cannot be read is left out.
    """
    digests = {}
    for place, path in code_files(package).items():
        with contextlib.suppress(OSError), open(path, "rb") as stream:
            digests[place] = hashlib.sha256(stream.read()).hexdigest()
    return digests


class LoadedCode:
    """The code of a package as it was when this was made, and what of it has changed since."""

    def __init__(self, package: Path):
        self.package = package
        self.files = file_digests(package)
        self._changed: set[str] = set()

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over the places and contents of all files."""
        lines = [f"{digest}  {place}\n" for place, digest in sorted(self.files.items())]
        return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()

    def changed(self) -> list[str]:
        """Return the places of files that are new, gone or of other content than at the start.

        A change at an earlier look counts, too: what was changed back may have been loaded
        meanwhile.
        """
        now = file_digests(self.package)
        for place in self.files.keys() | now.keys():
            if self.files.get(place) != now.get(place):
                self._changed.add(place)
        return sorted(self._changed)


CODE = LoadedCode(Path(__file__).absolute().parent)


def said_of_changes(places: list[str]) -> str:
    """Return words for files that have changed, such as "train/loop.py and 2 more"."""
    first = places[0].encode(errors="replace").decode()
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return f"{first}{more}"
