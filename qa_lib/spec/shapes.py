"""GPT-2 models of any size with random weights, whose sizes are in the model's name.

`--model gpt2:L12H768` asks for one. Standard library only.
"""

import re
from dataclasses import dataclass

from qa_lib.errors import SpecError

HEAD_WIDTH = 64  # as in GPT-2 itself
BYTE_TOKENS = 256  # tokens of a byte-level vocabulary before it merges any
# Nine digits are more than any size that fits into memory, and few enough to be read as a number.
PATTERN = re.compile(
    r"gpt2:L(?P<layers>\d{1,9})H(?P<hidden>\d{1,9})"
    r"(V(?P<vocabulary>\d{1,9}))?(P(?P<positions>\d{1,9}))?",
    re.ASCII,
)


@dataclass(frozen=True)
class Shape:
    """The sizes of a GPT-2.

    The small one that was published is 'gpt2:L12H768'. Defaults are what all published ones have.
    """

    layers: int
    hidden: int  # width of hidden states
    vocabulary: int = 50_257  # tokens
    positions: int = 1024

    @property
    def heads(self) -> int:
        return self.hidden // HEAD_WIDTH

    @property
    def is_possible(self) -> bool:
        """Whether there can be such a model."""
        if min(self.layers, self.hidden, self.positions) < 1:
            return False
        return self.hidden % HEAD_WIDTH == 0 and self.vocabulary > BYTE_TOKENS


def find_shape(model: str) -> Shape | None:
    """Return the shape that a model's name states; None for the name of any other model.

    A name that states one is like 'gpt2:L12H768' or 'gpt2:L2H64V512P128': layers, hidden width,
    tokens of the vocabulary, positions. Raises SpecError for a shape that cannot be.
    """
    if not model.startswith("gpt2:"):
        return None
    match = PATTERN.fullmatch(model)
    if match:
        # What is left out has no digits, and keeps its default.
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
    """Raise SpecError where `model` states a shape with fewer positions than `max_length`.

    Names of other models pass.
    """
    shape = find_shape(model)
    if shape is None or max_length <= shape.positions:
        return
    without_positions = re.sub(r"P\d+$", "", model)
    longer = f"{without_positions}P{max_length}"
    raise SpecError(
        f"{model} has positions for {shape.positions} tokens and not for {max_length}: give "
        f"--model {longer}, to all runs that are compared"
    )
