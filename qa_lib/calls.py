"""Checks of the arguments that a notebook gives to the package's public functions.

A wrong word in a notebook is then one line, as it is on the command line, and no TypeError from
within.
"""

import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterable

from qa_lib.errors import SpecError, UnknownName, nearest

LONGEST_SHOWN = 60  # characters of a text or a number that a message shows
LONGEST_CONTAINER = 40  # characters of a list, tuple, dict or set that a message shows whole


def checked(function: Callable) -> Callable:
    """Wrap a function so that it refuses wrong arguments in one line.

    The wrapped function raises UnknownName for an argument by a name that it does not have, with
    the nearest that it has, and SpecError for a missing argument and for one too many. A function
    that takes arguments by any name (**) has to check these names itself.
    """
    signature = inspect.signature(function)
    names = argument_names(function)
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    takes_any_name = inspect.Parameter.VAR_KEYWORD in kinds

    @functools.wraps(function)
    def call(*values, **named):
        if not takes_any_name:
            check_names(function.__name__, named, names)
        try:
            signature.bind(*values, **named)
        except TypeError as problem:
            message = f"{function.__name__}: {problem} (its arguments: {', '.join(names)})"
            raise SpecError(message) from None
        return function(*values, **named)

    return call


def argument_names(function: Callable) -> list[str]:
    """Return the names that a caller can give arguments by, which those of * and ** are not."""
    parameters = inspect.signature(function).parameters.values()
    nameable = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in parameters if parameter.kind in nameable]


def check_names(function_name: str, given: Iterable[str], known: Collection[str]) -> None:
    """Check that all given names are among the known arguments of a function.

    Raises UnknownName for the first that is not.
    """
    for name in given:
        if name not in known:
            raise UnknownName(nearest(f"argument of {function_name}", name, known))


def expect(name: str, value: object, kind: type | tuple[type, ...], wanted: str) -> None:
    """Check that an argument is of a type, or of one of several.

    Raises SpecError, whose message ends with `wanted`, what to do instead: "give a text".
    """
    if not isinstance(value, kind):
        raise SpecError(f"{name} is {shown(value)}: {wanted}")


def expect_folder(name: str, value: object) -> None:
    """Check that an argument is a path of text, and not empty.

    Raises SpecError. Python would take an empty path for the current folder.
    """
    wanted = "give the path of a folder"
    expect(name, value, (str, os.PathLike), wanted)
    path = os.fspath(value)
    if not isinstance(path, str) or not path.strip():
        raise SpecError(f"{name} is {shown(path)}: {wanted}")


def shown(value: object) -> str:
    """Return a value in one short line for a message.

    None, a text, bytes or a number is written as Python writes it, cut at LONGEST_SHOWN. A short
    container has its type in front, and of anything else the type is all that is shown.
    """
    text = " ".join(repr(value).split())
    if value is None or isinstance(value, str | bytes | int | float):
        return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"
    kind = type(value).__name__
    if isinstance(value, list | tuple | dict | set) and len(text) <= LONGEST_CONTAINER:
        return f"the {kind} {text}"
    return f"a {kind}"
