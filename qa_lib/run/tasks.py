"""What the lab does for each task: how its data is opened and loaded, and how its model is scored.

Facts of a task (its scores, its families of variants, words for a model's card) are in qa_lib.spec.
Another task takes an entry in WORKFLOWS; its facts there; the models that it trains, in
`architectures.KNOWN_FOR`; transformers' class of them, in `build.HEADS`; and a preset that names it.

PyTorch is imported when a function that needs it is called: planning a run does without.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qa_lib.data.squad import Source, open_source
from qa_lib.data.text import open_text
from qa_lib.spec.spec import Spec

if TYPE_CHECKING:
    import torch

    from qa_lib.data.load import Data


@dataclass(frozen=True)
class Workflow:
    """The functions of one task."""

    # (data, "train" or "validation") -> what is read of it, with a `name` and a `sha256`. It raises
    # DataError for what cannot be read.
    open_source: Callable[[str, str], Source]
    # A run's data by its spec.
    load: Callable[[Spec], "Data"]
    # (model, data, spec, device, run_dir) -> the `quality` of the run's record.
    evaluate: Callable[["torch.nn.Module", "Data", Spec, "torch.device", Path], dict]


def load_questions(spec: Spec) -> "Data":
    """Return the questions of a run; see `load_data`."""
    from qa_lib.data.load import load_data

    return load_data(spec)


def load_text(spec: Spec) -> "Data":
    """Return the text of a run; see `data.load.load_text`."""
    from qa_lib.data import load

    return load.load_text(spec)


def evaluate_answers(model, data, spec: Spec, device, run_dir: Path) -> dict:
    """Return the scores of a model's answers; see `score.evaluate.evaluate_answers`."""
    from qa_lib.score import evaluate

    return evaluate.evaluate_answers(model, data, spec, device, run_dir)


def evaluate_text(model, data, spec: Spec, device, run_dir: Path) -> dict:
    """Return the perplexity of a language model; see `score.evaluate.evaluate_text`."""
    from qa_lib.score import evaluate

    return evaluate.evaluate_text(model, data, spec, device, run_dir)


WORKFLOWS = {
    "qa": Workflow(open_source, load_questions, evaluate_answers),
    "lm": Workflow(open_text, load_text, evaluate_text),
}
