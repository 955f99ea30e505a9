"""The command line: `python -m qa_lib VERB ...`.

`qa_lib/lab/cli/verbs.py` lists the verbs; here is how a command ends. Exit codes: 0, done; 1, a run
or a check failed; 2, the user's mistake or a full disk, in one line; 130, stopped by a signal.
"""

import contextlib
import errno
import gc
import os
import sys

from qa_lib.errors import UserError, find, first_line, print_anything, printable
from qa_lib.lab.cli.verbs import VERBS, help_text
from qa_lib.packages import how_to_get_module
from qa_lib.signals import stoppable, stopped_by

MISTAKE = 2
STOPPED = 130


@stoppable()
def main(argv: list[str]) -> int:
    """Run one verb and return the exit code; mistakes and signals end in one line."""
    try:
        try:
            return run_verb(argv)
        finally:
            print(end="", flush=True)  # while it can still be told that the disk is full
    except UserError as problem:
        complain(str(problem))
        return MISTAKE
    except OSError as problem:
        return end_of_os_error(problem)
    except KeyboardInterrupt as stop:
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(f"{stopped_by(stop)}; finished runs are kept", file=sys.stderr, flush=True)
        return STOPPED


def run_verb(argv: list[str]) -> int:
    """Parse the words of a command, run its verb and return the exit code.

    Raises UserError for words that are no command, and where a package is missing.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(help_text())
        return 0 if argv else MISTAKE
    for word in argv:
        check_utf8(word)
    parser = find("verb", argv[0], VERBS)()
    args = parser.parse_args(argv[1:])
    # Modules stay, and looking for garbage among them takes a fifth of the time of importing them.
    gc.disable()
    try:
        verb_main = parser.load_main()
    except ModuleNotFoundError as missing:
        raise UserError(f"{missing}: {how_to_get_module(missing.name)}") from None
    gc.freeze()  # nor is any garbage looked for among them later
    gc.enable()
    return verb_main(args)


def check_utf8(word: str) -> None:
    """Raise UserError for a word that holds bytes which are no UTF-8."""
    # Python holds such bytes as lone surrogates.
    if any(0xD800 <= ord(letter) < 0xE000 for letter in word):
        raise UserError(
            f"{word!a} is not UTF-8, which names of files and everything else have to be here"
        )


def end_of_os_error(problem: OSError) -> int:
    """Say in one line what the system refused, and return the exit code.

    Raises the error again where it names no file and is not about the output.
    """
    if problem.filename:
        complain(f"{problem.filename}: {problem.strerror}")
        return MISTAKE
    if problem.errno is None:  # transformers raises those
        complain(first_line(problem))
        return MISTAKE
    if problem.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO):
        raise problem
    # What is left to print goes nowhere, or Python would fail at it once more on its way out.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if problem.errno == errno.EPIPE:  # whoever reads the output, `head` say, has had enough
        return 0
    with contextlib.suppress(OSError):
        print(f"error: {problem.strerror}", file=sys.stderr, flush=True)
    if problem.errno == errno.EIO:  # the terminal is gone
        return STOPPED
    return MISTAKE


def complain(message: str) -> None:
    """Print an error in one line."""
    print(f"error: {printable(message)}", file=sys.stderr)


if __name__ == "__main__":
    print_anything()
    code = main(sys.argv[1:])
    if code == STOPPED:
        os._exit(code)  # Python would wait for threads that are in the middle of something
    sys.exit(code)
