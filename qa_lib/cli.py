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
from qa_lib.presets import MOST, PRESETS
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


def add_several(parser, name, kind, metavar, help, **more) -> None:
    parser.add_argument(name, **{"nargs": "+"} | more, type=several(kind), action=Joined, metavar=metavar, help=help)


def add_rows(parser: argparse.ArgumentParser, name: str, help: str = "rows of `python -m qa_lib variants`") -> None:
    """Rows by their names, as the option or argument `name`, and by their family; see rows_of."""
    add_several(parser, name, given, "VARIANT", help, **{} if name.startswith("-") else {"nargs": "*"})
    parser.add_argument("--family", type=given, metavar="A", help="the rows of one family, by letter or by notebook")


def variants_of(args: argparse.Namespace) -> list[str]:
    """The names of the variants that were asked for. Raises UnknownName, and UserError where none was."""
    names = [*(args.variants or []), *(find_family(args.family) if args.family else [])]
    if not names:
        raise UserError("no variant is named: give some of `python -m qa_lib variants`, or a --family")
    return [find_variant(name).name for name in names]


rows_of = variants_of


def add_source_arguments(parser: argparse.ArgumentParser, preset: bool = True, several: bool = False) -> None:
    """Options that `run`, `sweep` and others share; those that have a preset of their own take no `preset`, and
    `several` micro-batches may be given to those that try each."""
    if preset:
        parser.add_argument("--preset", type=given, required=True, metavar="S", help=", ".join(PRESETS))
    parser.add_argument("--data", type=given, metavar="DIR", help="questions or text: a folder, a file, or a hub name")
    parser.add_argument("--model", type=given, metavar="DIR", help="a folder, a hub name, or a shape: gpt2:L12H768")
    add_size(parser, "--micro-batch", several)
    parser.add_argument("--runs", type=folder, default="runs", metavar="DIR", help="where records go (%(default)s)")


def add_run_arguments(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Options of `run` and `sweep`: what a run may have otherwise than its row and its preset say; `several` of a size
    may be given to the latter."""
    add_size(parser, "--world", several)
    parser.add_argument("--stages", type=one_or_more, metavar="N", help="of them in one pipeline (rows: all)")
    add_size(parser, "--batch", several)
    parser.add_argument("--epochs", type=one_or_more, metavar="N", help="passes over the data (its preset's)")
    parser.add_argument(
        "--learning-rate", type=rate, metavar="X", help="its peak, before a recipe's factor (its preset's)"
    )
    add_size(parser, "--max-length", several)


SIZES = {
    "--micro-batch": "features in one forward pass (rows: 8)",
    "--batch": "features in an optimizer step (its preset's)",
    "--max-length": "tokens of a feature or window (its preset's); neighbours of fewer than 256 share a third",
    "--world": "processes of a P row, one a GPU (rows: 2)",
}


def add_size(parser: argparse.ArgumentParser, name: str, several: bool) -> None:
    """One of SIZES as an option; it takes several numbers where each is to be tried."""
    if several:
        add_several(parser, name, one_or_more, "N", f"{SIZES[name]}; several: each")
    else:
        parser.add_argument(name, type=one_or_more, metavar="N", help=SIZES[name])


def own_of(args: argparse.Namespace) -> dict:
    """What add_run_arguments has read, as `plan` takes it."""
    return {name: getattr(args, name) for name in ("world", "stages", "batch", "epochs", "learning_rate", "max_length")}
