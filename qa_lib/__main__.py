"""The command line: python -m qa_lib VERB ... verbs.toml lists the verbs, and the module of each has its main."""

import contextlib
import errno
import gc
import importlib
import os
import sys

from qa_lib.errors import (
    UserError,
    find,
    first_line,
    print_anything,
    printable,
    stoppable,
    stopped_by,
)
from qa_lib.lab.cli import VERBS, parser_of
from qa_lib.packages import how_to_have

STOPPED = 130  # exit code of a verb that a signal ended


@stoppable()
def main(argv: list[str]) -> int:
    """Run one verb; the user's mistakes end as one line and exit code 2, signals as one line and STOPPED."""
    try:
        try:
            return _run(argv)
        finally:
            print(end="", flush=True)  # while it can still be told that the disk is full
    except UserError as problem:
        print(f"error: {printable(str(problem))}", file=sys.stderr)
        return 2
    except OSError as problem:
        if problem.filename or problem.errno is None:  # transformers raises those without a number
            said = (
                f"{problem.filename}: {problem.strerror}"
                if problem.filename
                else first_line(problem)
            )
            print(f"error: {printable(said)}", file=sys.stderr)
            return 2
        if problem.errno not in (errno.EPIPE, errno.ENOSPC, errno.EIO):
            raise
        # What is left to print goes nowhere, or Python would fail at it once more on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if problem.errno == errno.EPIPE:  # whoever reads the output, `head` say, has had enough
            return 0
        with contextlib.suppress(OSError):
            print(f"error: {problem.strerror}", file=sys.stderr, flush=True)
        return STOPPED if problem.errno == errno.EIO else 2  # EIO: the terminal is gone
    except KeyboardInterrupt as stop:
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(f"{stopped_by(stop)}; finished runs are kept", file=sys.stderr, flush=True)
        return STOPPED


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m qa_lib VERB ...\n\nverbs:")
        print("\n".join(f"  {name:11}{verb['text']}" for name, verb in VERBS.items()))
        print("\nexample: python -m qa_lib sweep --help")
        return 0 if argv else 2
    for word in argv:
        if any(
            0xD800 <= ord(letter) < 0xE000 for letter in word
        ):  # how Python holds bytes that are no UTF-8
            raise UserError(
                f"{word!a} is not UTF-8, which names of files and everything else have to be here"
            )
    verb = find("verb", argv[0], VERBS)
    args = parser_of(argv[0]).parse_args(argv[1:])
    gc.disable()  # modules stay, and looking for garbage among them takes a fifth of the time of importing them
    try:
        module = importlib.import_module(verb["module"])
    except ModuleNotFoundError as missing:
        raise UserError(f"{missing}: {how_to_have(missing.name)}") from None
    gc.freeze()  # nor is any looked for among them later
    gc.enable()
    return module.main(args)


if __name__ == "__main__":
    print_anything()
    code = main(sys.argv[1:])
    if code == STOPPED:
        os._exit(code)  # Python would wait for threads that are in the middle of something
    sys.exit(code)
