"""The verbs of `python -m qa_lib`: their options, and the kinds of value that a word of the command line may be.

verbs.toml has what a verb does: the module with its `main`, its options, and examples; options.toml what argparse is
told of these.
Nothing here imports what a verb needs to work, so that every --help answers at once.
"""

import argparse
import contextlib
import itertools
import math
import os
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from qa_lib.errors import UnknownName, UserError
from qa_lib.spec.presets import MOST, OWN, PRESETS, find_preset, named_or_own
from qa_lib.spec.variants import find_family, find_variant


def tables(name: str) -> dict[str, dict]:
    """The tables of a TOML file beside this one."""
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are UserErrors, of one line like all others, and that knows -1e-3 for a number."""

    def __init__(self, **options):
        super().__init__(**options)
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)

    def parse_args(self, args=None, namespace=None) -> argparse.Namespace:
        """The options; of a verb that has a preset, the one that is meant where none is given."""
        found = super().parse_args(args, namespace)
        if "preset" in found:
            found.preset = named_or_own(found.preset, found.data, found.model)
        return found

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({self.prog} --help has all)")


def within(number: type, what: str, least: float, most: float) -> Callable[[str], float]:
    """The kind of an int or a float from `least` to `most`, which `what` says in words."""

    def kind(text: str) -> float:
        with contextlib.suppress(ValueError):
            if least <= (found := number(text)) <= most:  # which no NaN is
                return found
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not {what}")

    return kind


def whole(least: int, most: int) -> Callable[[str], int]:
    """The kind of a whole number from `least` to `most`."""
    return within(int, f"a whole number from {least} to {most}", least, most)


def capability(text: str) -> int:
    """A compute capability, as in 7.5; times 10."""
    return round(
        10 * within(float, "a compute capability such as 7.5 (T4) or 9.0 (H100)", 5, 20)(text)
    )


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
    if found.is_symlink() and not found.exists():
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is a link that leads nowhere")
    nearest = next(parent for parent in (found, *found.absolute().parents) if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise argparse.ArgumentTypeError(f"{nearest} is no folder that can be written to")
    return found


class Joined(argparse.Action):
    """Joins the lists that the words of an option have become, also where it is typed more than once."""

    def __call__(self, parser, namespace, lists, option=None):
        before = getattr(namespace, self.dest)
        setattr(
            namespace,
            self.dest,
            list(itertools.chain([] if before is self.default else before, *lists)),
        )


def named(find: Callable[[str], object], also: str | None = None) -> Callable[[str], str]:
    """The kind of a name that `find` knows, or `also`."""

    def kind(text: str) -> str:
        try:
            return text if text == also else find(text).name
        except UnknownName as problem:
            raise argparse.ArgumentTypeError(str(problem)) from None

    return kind


KINDS = {
    "text": given,
    "variant": named(find_variant, "recommended"),
    "preset": named(find_preset),
    "path": path,
    "folder": folder,
    "count": whole(1, MOST),
    "seed": whole(0, 2**63 - 1),
    "card": whole(0, 1023),
    "port": whole(0, 65535),
    "number": within(float, "a number", -math.inf, math.inf),
    "size": within(float, "a number above 0", math.nextafter(0, 1), sys.float_info.max),
    "rate": within(
        float, "a learning rate, between 0 and 1", math.nextafter(0, 1), math.nextafter(1, 0)
    ),
    "capability": capability,
}


def _option(kind: str = "", several: bool = False, **told) -> dict:
    """What argparse is told of an option of options.toml."""

    def values(text: str) -> list:
        return [KINDS[kind](word) for word in given(text.replace(",", " ")).split()]

    if several:
        return {"type": values, "nargs": "+", "action": Joined} | told
    return told | ({"type": KINDS[kind]} if kind else {})


OPTIONS = {name: _option(**table) for name, table in tables("options.toml").items()}
OPTIONS["--preset"]["help"] = f"{', '.join(PRESETS)} ({OWN}, where --data and --model are given)"


VERBS = tables(
    "verbs.toml"
)  # of `either` one option at most may be given, or exactly one where it is `required`


def parser_of(name: str) -> Parser:
    """The parser of a verb's options."""
    verb = VERBS[name]
    lines = [f"  python -m qa_lib {line}" if line.split()[0] in VERBS else f"  {line}"
             for line in verb["examples"].splitlines()]  # fmt: skip
    parser = Parser(
        prog=f"python -m qa_lib {name}",
        description=f"{verb['text'][0].upper()}{verb['text'][1:]}.",
        epilog="\n".join(["examples:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    places = [(parser, verb["options"])]
    if "either" in verb:
        either = parser.add_mutually_exclusive_group(required=verb.get("required", False))
        places.append((either, verb["either"]))
    for place, names in places:
        for one in names.split():
            place.add_argument(one.partition("/")[0], **OPTIONS[one])
    return parser


def variants_of(args: argparse.Namespace) -> list[str]:
    """The names of the variants that were asked for, `recommended` among them. Raises UserError where none was."""
    names = [*(args.variants or []), *(find_family(args.family) if args.family else [])]
    if not names:
        raise UserError(
            "no variant is named: give some of `python -m qa_lib variants`, or a --family"
        )
    return names


def own_of(args: argparse.Namespace) -> dict:
    """What of its preset a run has otherwise, as `plan` takes it."""
    return {
        name: getattr(args, name)
        for name in (
            "world",
            "stages",
            "batch",
            "epochs",
            "learning_rate",
            "max_length",
            "max_answer_length",
        )
    }
