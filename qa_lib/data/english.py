"""Questions about two English paragraphs, on which nothing here has been trained."""

from qa_lib.data.examples import Example
from qa_lib.data.squad import open_source
from qa_lib.paths import PACKAGE

# The title of the paragraph whose every word is in the vocabulary of data/synthetic.py.
SMOKE_TITLE = "Lisbon"


def pretrained_questions() -> list[Example]:
    """Return questions for a pretrained model; the first has an answer, and the last has none."""
    return [example for example in _examples() if example.title != SMOKE_TITLE]


def smoke_question() -> Example:
    """Return a question that has an answer, of words that the model of preset smoke knows."""
    return next(example for example in _examples() if example.title == SMOKE_TITLE)


def _examples() -> list[Example]:
    return open_source(PACKAGE / "data" / "english.json", "validation").examples
