"""What ends a command early: mistakes that the user can mend, and signals that ask it to stop."""

import contextlib
import difflib
import os
import re
import signal
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping

# Those of ASCII and Latin-1 without line ends and tabs, and what turns the direction of writing.
CONTROL = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"


class UserError(ValueError):
    """An error that the user can mend; its message is a single line, and the command line prints nothing else."""


class SpecError(UserError):
    """A run that cannot be specified as asked."""


class UnknownName(SpecError):
    """A variant, preset, family, setting or value that does not exist; the message suggests the nearest."""


def nearest(kind: str, name: str, known: Iterable[str]) -> str:
    """The message of an UnknownName: what was asked for, what may have been meant, and what there is."""
    folded = {word.casefold(): word for word in known}
    close = [
        folded[word] for word in difflib.get_close_matches(str(name).casefold(), folded, 1, 0.3)
    ]
    hint, listed = f"; did you mean {close[0]!r}?" if close else "", ", ".join(folded.values())
    others = f" (known: {listed})" if not close or len(listed) < 80 else ""
    return f"unknown {kind} {name!r}{hint}{others}"


def find(kind: str, name: str, table: Mapping):
    """What has that name in a table; UnknownName otherwise."""
    if not isinstance(name, str) or name not in table:
        raise UnknownName(nearest(kind, name, table))
    return table[name]


def printable(text: str) -> str:
    """Text as a terminal or a page may have it: without control characters, which can clear a terminal, set its title
    or turn around how it reads, but for line ends and tabs; half characters (lone surrogates) as question marks."""
    return re.sub(CONTROL, "", text).encode(errors="replace").decode()


def one_line(text: str) -> str:
    """As printable, in one line."""
    return " ".join(printable(text).split())


def print_anything() -> None:
    """From now on this process, and those that it starts, can print any text, whatever the encoding of their outputs:
    what that lacks comes as an escape, such as \\xef."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # which a notebook's has not, nor one that is closed
            stream.reconfigure(errors="backslashreplace")
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    os.environ["PYTHONIOENCODING"] = f"{encoding}:backslashreplace"


def wrapped(text: str, width: int = 94) -> str:
    """One sentence as lines that a terminal of 100 columns holds, also behind a time of day."""
    return textwrap.fill(text, width, subsequent_indent="    ", break_on_hyphens=False)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


CTRL_C = "SIGINT (Ctrl-C)"
SIGNALS = {
    signal.SIGINT: CTRL_C,
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "SIGHUP (its terminal is gone)",
}
TOGETHER_S = (
    3  # signals that come within so many seconds are one wish: a closing terminal sends several
)


class Stopped(KeyboardInterrupt):
    """One of SIGNALS asked this process to end; the message is its name. As Ctrl-C it passes `except Exception`."""


def stopped_by(problem: BaseException) -> str:
    """Words for what stopped a run or a driver; a notebook's Ctrl-C is a KeyboardInterrupt without a message."""
    if isinstance(problem, KeyboardInterrupt):
        return f"stopped by {str(problem) or CTRL_C}"
    return f"stopped by {type(problem).__name__}"


@contextlib.contextmanager
def stoppable(names: Mapping[int, str] = SIGNALS) -> Iterator[None]:
    """Inside, each of SIGNALS raises Stopped, with its name, in the main thread, which alone may enter.

    A signal that is ignored stays so: that is how `nohup` keeps SIGHUP from a command. What follows within TOGETHER_S
    is dropped, so that tidying up is not interrupted by the second signal of one wish.
    """
    last = -TOGETHER_S

    def stop(number: int, _) -> None:
        nonlocal last
        if time.monotonic() - last < TOGETHER_S:
            return
        last = time.monotonic()
        raise Stopped(names[number])

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
