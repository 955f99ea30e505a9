"""Kinds of value that a word of the command line can be.

Each is a function that turns the word into its value, as argparse's `type` takes it, and raises
`argparse.ArgumentTypeError` for a word that is no such value.
"""

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

from qa_lib.errors import UnknownName
from qa_lib.spec.presets import MOST, find_preset
from qa_lib.spec.resolve import ALL
from qa_lib.spec.variants import find_variant


def text(word: str) -> str:
    """Return the word, unless it is empty, as a shell variable that was never set would be."""
    if not word.strip():
        raise argparse.ArgumentTypeError("it is empty")
    return word


def path(word: str) -> Path:
    """Return the path that the word names; an empty word would stand for the current folder."""
    return Path(text(word))


def folder(word: str) -> Path:
    """Return a path that is a folder which can be written to, or that can become one."""
    wanted = path(word)
    if wanted.is_symlink() and not wanted.exists():
        raise argparse.ArgumentTypeError(f"{word[:80]!r} is a link that leads nowhere")
    candidates = (wanted, *wanted.absolute().parents)
    nearest = next(candidate for candidate in candidates if candidate.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise argparse.ArgumentTypeError(f"{nearest} is no folder that can be written to")
    return wanted


def number_between(
    convert: Callable[[str], float], description: str, least: float, most: float
) -> Callable[[str], float]:
    """Return the kind of a number from `least` to `most`.

    `convert` is `int` or `float`; `description` names the kind in the message for another word.
    """

    def parse(word: str) -> float:
        try:
            value = convert(word)
        except ValueError:
            value = math.nan
        if least <= value <= most:  # NaN is in no such range
            return value
        raise argparse.ArgumentTypeError(f"{word[:40]!r} is not {description}")

    return parse


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """Return the kind of a whole number from `least` to `most`."""
    return number_between(int, f"a whole number from {least} to {most}", least, most)


count = whole_number(1, MOST)
seed = whole_number(0, 2**63 - 1)
gpu_index = whole_number(0, 1023)
port = whole_number(0, 65535)
number = number_between(float, "a number", -math.inf, math.inf)
positive_number = number_between(
    float, "a number above 0", math.nextafter(0, 1), sys.float_info.max
)
learning_rate = number_between(
    float, "a learning rate, between 0 and 1", math.nextafter(0, 1), math.nextafter(1, 0)
)


def world(text: str) -> int | str:
    """Return a number of processes, or ALL."""
    return text if text == ALL else count(text)


_capability = number_between(
    float, "a compute capability such as 7.5 (T4) or 9.0 (H100)", least=5, most=20
)


def compute_capability(word: str) -> int:
    """Return ten times a GPU's compute capability, 75 for 7.5."""
    return round(10 * _capability(word))


def variant(word: str) -> str:
    """Return the name of a variant, or `recommended`, which stands for one that suits the GPU."""
    if word == "recommended":
        return word
    try:
        return find_variant(word).name
    except UnknownName as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def preset(word: str) -> str:
    """Return the name of a preset."""
    try:
        return find_preset(word).name
    except UnknownName as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def list_of(kind: Callable[[str], object]) -> Callable[[str], list]:
    """Return the kind of a word that holds one value or several, between commas: `8,32`."""

    def parse(word: str) -> list:
        return [kind(part) for part in text(word.replace(",", " ")).split()]

    return parse


class JoinLists(argparse.Action):
    """Joins the lists of all words of an option, also where the option is typed more than once.

    With `nargs="+"` or `"*"` and `list_of`, argparse makes a list of each word: [[8, 32], [64]].
    """

    def __call__(self, parser, namespace, values, option_string=None):
        earlier = getattr(namespace, self.dest)
        joined = [] if earlier is self.default else list(earlier)
        for values_of_a_word in values:
            joined += values_of_a_word
        setattr(namespace, self.dest, joined)
