"""Where the lab's own files are: notebooks/, the committed records in runs/, pictures in figures/, requirements.txt.

Everything that a command writes goes to the current folder, or where its options say, and never here.
"""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
_PACKED = PACKAGE / "files"  # in a wheel: pyproject.toml puts them there
IS_CHECKOUT = not _PACKED.is_dir()
ROOT = PACKAGE.parent if IS_CHECKOUT else _PACKED
