"""What a user can mend: the base of every error that the command line prints as one line."""

import re


class UserError(ValueError):
    """An error that the user can mend; its message is a single line, and the command line prints nothing else."""


def printable(text: str) -> str:
    """Text as a terminal may have it: without control characters, which can clear it or set its title, but for line
    ends and tabs; half characters as question marks."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "", text).encode(errors="replace").decode()


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
