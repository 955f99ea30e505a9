"""The verbs of `python -m qa_lib`: their options, and the kinds of value that a word of the command line may be.

verbs.toml has what a verb does: the module with its `main`, its options by their names in OPTIONS, and examples.
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
from dataclasses import dataclass
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


one_or_more = whole(1, MOST)
seed = whole(0, 2**63 - 1)
number = within(float, "a number", -math.inf, math.inf)
above_0 = within(float, "a number above 0", math.nextafter(0, 1), sys.float_info.max)
rate = within(float, "a learning rate, between 0 and 1", math.nextafter(0, 1), math.nextafter(1, 0))


def capability(text: str) -> int:
    """A compute capability, as in 7.5; times 10."""
    return round(10 * within(float, "a compute capability such as 7.5 (T4) or 9.0 (H100)", 5, 20)(text))


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


def option(kind: Callable, metavar: str, help: str, **more) -> dict:
    """What argparse is told of an option that takes a value."""
    return {"type": kind, "metavar": metavar, "help": help} | more


def each(kind: Callable, metavar: str, help: str, **more) -> dict:
    """An option that takes several values, with commas or spaces between them."""

    def values(text: str) -> list:
        return [kind(word) for word in given(text.replace(",", " ")).split()]

    return option(values, metavar, help, nargs="+", action=Joined) | more


def flag(help: str) -> dict:
    return {"action": "store_true", "help": help}


SIZES = {
    "--micro-batch": "samples in one forward pass (variants: 8)",
    "--batch": "samples in an optimizer step (its preset's)",
    "--max-length": "tokens of a sample (its preset's); neighbours of fewer than 256 share a third",
    "--world": "processes of a variant of family P, one a GPU (2)",
}
# What follows a slash tells apart options of one name.
OPTIONS = {
    "variant": option(given, "VARIANT", "one of `python -m qa_lib variants`"),
    "variants": each(given, "VARIANT", "of `python -m qa_lib variants`", nargs="*"),
    "--variants": each(given, "VARIANT", "these alone (default: all)"),
    "--family": option(given, "A", "the variants of one family, by its letter"),
    "--preset": option(given, "P", ", ".join(PRESETS), required=True),
    "--seed": option(seed, "N", "of new weights, order and dropout (0)", default=0),
    "--seeds": each(seed, "N", "a run of every variant for each (0)", default=[0]),
    **{name: option(one_or_more, "N", said) for name, said in SIZES.items()},
    **{f"{name}/each": each(one_or_more, "N", f"{said}; several: each") for name, said in SIZES.items()},
    "--stages": option(one_or_more, "N", "processes in one pipeline (all of them)"),
    "--epochs": option(one_or_more, "N", "passes over the data (its preset's)"),
    "--learning-rate": option(rate, "X", "its peak, before a recipe's factor (its preset's)"),
    "--learning-rate/each": each(rate, "X", "of the preset (its own)", default=[]),
    "--trainable": each(given, "NAME", "such as lora-all-r32 (the variant's own)", default=[]),
    "--data": option(given, "DIR", "questions or text: a folder, a file, or a hub name"),
    "--data/quantize": option(given, "D", "questions to score by (default: the run's own)"),
    "data/predict": option(given, "DATA.json", "a file or other source to answer", nargs="?"),
    "data/score": option(given, "DATA.json", "questions with gold answers, SQuAD v1.1 or v2.0"),
    "--model": option(given, "DIR", "a folder, a hub name, or a shape: gpt2:L12H768"),
    "--model/app": option(given, "M", "folder or hub name; repeatable", action="append", default=[]),
    "--model/predict": option(given, "M", "a model's or run's folder, or a hub name", required=True),
    "--runs": option(folder, "DIR", "where records go (runs)", default="runs"),
    "--runs/read": option(path, "DIR", "folder of the records (runs)", default="runs"),
    "--figures": option(folder, "DIR", "drawn into (figures)", default="figures"),
    "--figures/read": option(path, "DIR", "of reports (figures)", default="figures"),
    "group": option(given, "GROUP", "a folder of runs below --runs"),
    "--group/export": option(given, "G", "this group alone (default: all)"),
    "--group/report": option(given, "G", "of runs (default: the newest)"),
    "--gpus": each(whole(0, 1023), "N", "cards to use; one that is named twice has two runs at a time"),
    "--time-limit": option(one_or_more, "SECONDS", "for each run (its preset's)"),
    "--launcher": {"help": "where runs go (local)", "choices": ["local", "slurm"], "default": "local"},
    "--shared-gpu": flag("runs on one card train at once; records no times"),
    "--plan": flag("say what would run, and run nothing"),
    "--force": flag("run again what is finished, too"),
    "--on-finish": option(given, "COMMAND", "run by the shell at the end, however it ends"),
    "--json": flag("print every variant with all its settings as JSON"),
    "--ncu": flag("also read the GPU's counters, with Nsight Compute"),
    "--compute-capability": option(capability, "X.Y", "of the GPU (9.0)", default=90),
    "--compute-capability/use": option(capability, "X.Y", "use what such a GPU has (T4: 7.5)", default=90),
    "--limit-gib": option(above_0, "G", "GPU memory to stay within", required=True),
    "run": option(path, "RUN", "folder of a run that has its model"),
    "--weights": {"help": "bits of a weight (int8)", "choices": ["int8", "int4"], "default": "int8"},
    "--csv": option(path, "OUT.csv", "a line a run, a column a value of its record"),
    "--tensorboard": option(folder, "DIR", "event files; needs the package tensorboard"),
    "--wandb": option(folder, "DIR", "offline runs; needs the package wandb, and no account"),
    "--readme": flag("only put the committed groups' results into README.md"),
    "--pages": flag("only make the executed pages of the repository again"),
    "--check": flag("write nothing; fail if figures, pages or README.md are old"),
    "--host": option(str, "H", "address to listen on (127.0.0.1: this machine alone)", default="127.0.0.1"),
    "--port": option(whole(0, 65535), "N", "0 takes a free one (8600)", default=8600),
    "--out": option(folder, "DIR", "for predictions, spans, n-best lists, null odds"),
    "--question": option(str, "TEXT", "one question, answered on the terminal"),
    "--context": option(str, "TEXT", "the paragraph that the one question is about"),
    "predictions": option(given, "PREDICTIONS.json", "question id -> answer, '' for none"),
    "--na-prob": option(given, "FILE", "question id -> how sure of no answer"),
    "--na-threshold": option(number, "X", "above it, no answer (1.0)", default=1.0),
    "--fix-spans": flag("move misplaced gold answers to their only occurrence"),
}


@dataclass(frozen=True)
class Verb:
    """What `python -m qa_lib NAME` does: the module that has its `main`, names of OPTIONS, and examples. Of `either`,
    one option at most may be given, or exactly one where `required`."""

    module: str
    text: str
    options: str
    examples: str
    either: str = ""
    required: bool = False


_FILE = Path(__file__).with_name("verbs.toml")
VERBS = {name: Verb(**verb) for name, verb in tomllib.loads(_FILE.read_text(encoding="utf-8")).items()}


def parser_of(name: str) -> Parser:
    """The parser of a verb's options."""
    verb = VERBS[name]
    lines = [f"  python -m qa_lib {line}" if line.split()[0] in VERBS else f"  {line}"
             for line in verb.examples.splitlines()]  # fmt: skip
    parser = Parser(
        prog=f"python -m qa_lib {name}",
        description=f"{verb.text[0].upper()}{verb.text[1:]}.",
        epilog="\n".join(["examples:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    places = [(parser, verb.options)]
    if verb.either:
        places.append((parser.add_mutually_exclusive_group(required=verb.required), verb.either))
    for place, names in places:
        for one in names.split():
            place.add_argument(one.partition("/")[0], **OPTIONS[one])
    return parser


def variants_of(args: argparse.Namespace) -> list[str]:
    """The names of the variants that were asked for. Raises UnknownName, and UserError where none was."""
    names = [*(args.variants or []), *(find_family(args.family) if args.family else [])]
    if not names:
        raise UserError("no variant is named: give some of `python -m qa_lib variants`, or a --family")
    return [find_variant(name).name for name in names]


def own_of(args: argparse.Namespace) -> dict:
    """What of its preset a run has otherwise, as `plan` takes it."""
    return {name: getattr(args, name) for name in ("world", "stages", "batch", "epochs", "learning_rate", "max_length")}
