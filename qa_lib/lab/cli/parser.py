"""The parser of a verb's words: its complaints are one line each, and its help ends in examples."""

import argparse
import re
from collections.abc import Callable
from typing import NoReturn

from qa_lib.errors import UserError
from qa_lib.spec.presets import named_or_own

Main = Callable[[argparse.Namespace], int]


class Parser(argparse.ArgumentParser):
    """The options of one verb, and what the verb runs.

    `verb`: what one types after `python -m qa_lib`.
    `summary`: what the verb does, as the list of verbs shows it: one line, no full stop.
    `examples`: lines that follow the options in the verb's help, commands or remarks.
    `load_main`: imports the function that acts on the parsed options and returns the exit code.
    That import may take seconds, so it waits until the options are known to be right.
    """

    def __init__(self, verb: str, summary: str, examples: list[str], load_main: Callable[[], Main]):
        super().__init__(
            prog=f"python -m qa_lib {verb}",
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog="\n".join(["examples:", *(f"  {line}" for line in examples)]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.summary = summary
        self.load_main = load_main
        # argparse takes -1 for a value and not for an option; so it shall take -1e-3.
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)

    def parse_args(self, args=None, namespace=None) -> argparse.Namespace:
        """Return the parsed options.

        A verb that takes a preset gets `local` where data and a model are given and no preset is.
        Raises UserError for words that the verb does not take, and where it lacks a preset.
        """
        parsed = super().parse_args(args, namespace)
        if "preset" in parsed:
            parsed.preset = named_or_own(parsed.preset, parsed.data, parsed.model)
        return parsed

    def error(self, message: str) -> NoReturn:
        """Raise a complaint as UserError; argparse would print it below the usage, and exit."""
        raise UserError(f"{message} ({self.prog} --help has all)")
