"""GPT-2s of one's own size, which are written as names. Standard library only."""

import re
from dataclasses import dataclass

from qa_lib.errors import SpecError

HEAD_WIDTH = 64
BYTE_TOKENS = 256  # tokens of a byte-level vocabulary before it merges any
PATTERN = re.compile(
    r"gpt2:L(?P<layers>\d{1,9})H(?P<hidden>\d{1,9})"
    r"(V(?P<vocabulary>\d{1,9}))?(P(?P<positions>\d{1,9}))?",
    re.ASCII,
)


@dataclass(frozen=True)
class Shape:
    """A GPT-2 of one's own size, with random weights.

    Heads are 64 wide, as in GPT-2 itself, whose small model is 'gpt2:L12H768' and whose vocabulary
    and positions are the defaults.
    """

    layers: int
    hidden: int
    vocabulary: int = 50_257
    positions: int = 1024

    @property
    def heads(self) -> int:
        return self.hidden // HEAD_WIDTH

    @property
    def is_possible(self) -> bool:
        """Whether there can be such a model."""
        has_parts = self.layers > 0 and self.hidden > 0 and self.positions > 0
        return has_parts and self.hidden % HEAD_WIDTH == 0 and self.vocabulary > BYTE_TOKENS


def find_shape(model: str) -> Shape | None:
    """Return the shape that a model's name gives; None for a name that gives none.

    A name is like 'gpt2:L12H768' or 'gpt2:L2H64V512P128': layers, hidden width, tokens of the
    vocabulary, positions. Raises SpecError for a shape that cannot be.
    """
    if not model.startswith("gpt2:"):
        return None
    match = PATTERN.fullmatch(model)
    if match:
        sizes = {name: int(digits) for name, digits in match.groupdict().items() if digits}
        shape = Shape(**sizes)
        if shape.is_possible:
            return shape
    raise SpecError(
        f"model {model!r}: a shape is written like gpt2:L12H768V50257P1024, layers, width "
        f"(a multiple of {HEAD_WIDTH}), vocabulary (more than {BYTE_TOKENS}) and positions, of "
        "which the last two may be left out"
    )


def check_positions(model: str, max_length: int) -> None:
    """Raise SpecError where `model` names a shape with fewer positions than `max_length` tokens."""
    shape = find_shape(model)
    if shape is None or max_length <= shape.positions:
        return
    longer = re.sub(r"(P\d+)?$", f"P{max_length}", model, count=1)
    raise SpecError(
        f"{model} has positions for {shape.positions} tokens and not for {max_length}: give "
        f"--model {longer}, to all runs that are compared"
    )
