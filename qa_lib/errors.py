"""Errors that the user can mend, and how the text of a message is made."""

import difflib
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

# The control characters of ASCII and Latin-1 but for line ends and tabs, and those that turn the
# direction of writing.
CONTROL = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
LEAST_LIKENESS = 0.3  # of a name that is suggested; 1 is equality
SHORT_LIST = 80  # characters of a list of names that is shown beside a suggestion


class UserError(ValueError):
    """An error that the user can mend.

    Its message is a single line, and the command line prints nothing else.
    """


class SpecError(UserError):
    """A run that cannot be specified as asked."""


class UnknownName(SpecError):
    """A name that does not exist, of a variant, preset, setting or the like.

    The message suggests the nearest; `nearest` words it.
    """


# Names


def find(kind: str, name: str, table: Mapping[str, Any]) -> Any:
    """Return the value of a name in a table.

    Raises UnknownName where the table does not have it; `kind` says what it is the name of.
    """
    if not isinstance(name, str) or name not in table:
        raise UnknownName(nearest(kind, name, table))
    return table[name]


def nearest(kind: str, name: object, known: Iterable[str]) -> str:
    """Return the message of an UnknownName: what was asked for, what may be meant, what there is.

    All known names are listed where none is like the one asked for, or where the list is short.
    """
    by_folded = {word.casefold(): word for word in known}
    matches = difflib.get_close_matches(str(name).casefold(), by_folded, 1, LEAST_LIKENESS)
    message = f"unknown {kind} {name!r}"
    if matches:
        message += f"; did you mean {by_folded[matches[0]]!r}?"
    listed = ", ".join(by_folded.values())
    if not matches or len(listed) < SHORT_LIST:
        message += f" (known: {listed})"
    return message


# Text


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def printable(text: str) -> str:
    """Return text as a terminal or a page may have it.

    Control characters but for line ends and tabs are left out: they can clear a terminal, set its
    title or turn around how it reads. Half characters (lone surrogates) become question marks.
    """
    return re.sub(CONTROL, "", text).encode(errors="replace").decode()


def one_line(text: str) -> str:
    """Return `printable` text in one line."""
    return " ".join(printable(text).split())


def wrapped(text: str, width: int = 94) -> str:
    """Return one sentence as lines that a terminal of 100 columns holds behind a time of day."""
    return textwrap.fill(text, width, subsequent_indent="    ", break_on_hyphens=False)


def print_anything() -> None:
    """Make this process, and those that it starts, print any text in any encoding.

    A character that the encoding of an output lacks is printed as an escape, such as \\xef.
    """
    for stream in (sys.stdout, sys.stderr):
        # A notebook's stream cannot be reconfigured, nor can one that is closed (None).
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    os.environ["PYTHONIOENCODING"] = f"{encoding}:backslashreplace"
