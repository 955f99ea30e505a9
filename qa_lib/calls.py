"""What the calls of the package's front door are checked for: the names of their arguments, and what these are.

A wrong word in a notebook is then one line, as it is on the command line, and no TypeError from within.
"""

import functools
import inspect
import os
from collections.abc import Callable

from qa_lib.errors import SpecError, UnknownName, nearest


def checked(function: Callable) -> Callable:
    """The function, which raises UnknownName for an argument of a name that it does not have, with the nearest that it
    has, and SpecError for one that lacks or is too many."""
    signature = inspect.signature(function)
    names = [*signature.parameters]
    takes_any = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())

    @functools.wraps(function)
    def call(*values, **named):
        if not takes_any:
            check_names(function.__name__, named, names)
        try:
            signature.bind(*values, **named)
        except TypeError as problem:
            said = f"{function.__name__}: {problem} (its arguments: {', '.join(names)})"
            raise SpecError(said) from None
        return function(*values, **named)

    return call


def check_names(function: str, given, known) -> None:
    """Raises UnknownName for a name that is not among the `known` arguments of a function."""
    for name in given:
        if name not in known:
            raise UnknownName(nearest(f"argument of {function}", name, known))


def expect(name: str, value: object, kind: type | tuple[type, ...], wanted: str) -> None:
    """Raises SpecError, which says what is `wanted`, for an argument that is not of that kind."""
    if not isinstance(value, kind):
        raise SpecError(f"{name} is {shown(value)}: {wanted}")


def expect_folder(name: str, value: object) -> None:
    """Raises SpecError for what is no path, or an empty one, which Python would take for the current folder."""
    expect(name, value, (str, os.PathLike), "give the path of a folder")
    if not isinstance(os.fspath(value), str) or not os.fspath(value).strip():
        raise SpecError(f"{name} is {shown(os.fspath(value))}: give the path of a folder")


def shown(value: object) -> str:
    """A value in a message: its kind, and itself where it is short."""
    text = " ".join(repr(value).split())
    kind = type(value).__name__
    if value is None or isinstance(value, str | bytes | int | float):
        return text if len(text) <= 60 else f"{text[:60]}…"
    is_short = isinstance(value, list | tuple | dict | set) and len(text) <= 40
    return f"the {kind} {text}" if is_short else f"a {kind}"
