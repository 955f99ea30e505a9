"""Options that several verbs share, and the kinds of value that a word of the command line may be."""

import argparse
import contextlib
import itertools
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from qa_lib.errors import UserError
from qa_lib.presets import MOST
from qa_lib.variants import find_family, find_variant


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are UserErrors, of one line like all others, and that knows -1e-3 for a number."""

    def __init__(self, **options):
        super().__init__(**options)
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({self.prog} --help has all)")


def whole(least: int, most: int) -> Callable[[str], int]:
    """The kind of a whole number from `least` to `most`."""

    def kind(text: str) -> int:
        if not text.isdecimal() or not text.isascii() or len(text) > 20 or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from {least} to {most}")
        return int(text)

    return kind


one_or_more = whole(1, MOST)
seed = whole(0, 2**63 - 1)


def capability(text: str) -> int:
    """A compute capability, as in 7.5; times 10."""
    if not re.fullmatch(r"(5|6|7|8|9|1\d)\.\d", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a compute capability such as 7.5 (T4) or 9.0 (H100)")
    return int(text.replace(".", ""))


def number(text: str) -> float:
    """A number, or an infinity."""
    with contextlib.suppress(ValueError):
        if not math.isnan(found := float(text)):
            return found
    raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number")


def above_0(text: str) -> float:
    """A number above 0."""
    if 0 < (found := number(text)) < math.inf:
        return found
    raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above 0")


def rate(text: str) -> float:
    """A learning rate, between 0 and 1."""
    if (found := above_0(text)) < 1:
        return found
    raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a learning rate, between 0 and 1")


def given(text: str) -> str:
    """A text that is not empty, as a variable of the shell that was never set would be."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty")
    return text


def path(text: str) -> Path:
    """A path that is not empty, which Python would take for this folder."""
    return Path(given(text))


def folder(text: str) -> Path:
    """A path that is a folder or can become one."""
    found = path(text)
    nearest = next(parent for parent in (found, *found.absolute().parents) if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise argparse.ArgumentTypeError(f"{nearest} is no folder that can be written to")
    return found


class Joined(argparse.Action):
    """Joins the lists that the words of an option have become."""

    def __call__(self, parser, namespace, lists, option=None):
        setattr(namespace, self.dest, list(itertools.chain(*lists)))


def several(kind: Callable) -> Callable[[str], list]:
    """The kind of a word that holds several values, with commas or spaces between them."""

    def values(text: str) -> list:
        return [kind(word) for word in given(text.replace(",", " ")).split()]

    values.__name__ = kind.__name__  # argparse shows it for a word that is no value
    return values


def variants_of(args: argparse.Namespace) -> list[str]:
    """The names of the variants that were asked for. Raises UnknownName, and UserError where none was."""
    names = [*(args.variants or []), *(find_family(args.family) if args.family else [])]
    if not names:
        raise UserError("no variant is named: give some of `python -m qa_lib variants`, or a --family")
    return [find_variant(name).name for name in names]


def own_of(args: argparse.Namespace) -> dict:
    """What of its preset a run has otherwise, as `plan` takes it."""
    return {name: getattr(args, name) for name in ("world", "stages", "batch", "epochs", "learning_rate", "max_length")}
