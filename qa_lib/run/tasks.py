"""What the lab does for each task: how its data is opened and loaded, and how its model is scored.

What is known of a task without PyTorch (its scores, its families of variants, words for a model's
card) is in spec/tasks.py. To add a task, write:

- its facts, in spec/tasks.py;
- its functions, in `WORKFLOWS` below;
- the architectures that it trains, in `architectures.KNOWN_FOR`;
- the class of transformers that makes such a model, in `build.HEADS`;
- a preset that names the task.

The functions import PyTorch when they are called, since planning a run does without it.
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

    open_source: Callable[[str, str], Source]
    """Takes the name or the path of a data set, and "train" or "validation"; returns that split,
    unread. Raises DataError for data that cannot be read."""
    load: Callable[[Spec], "Data"]
    """Takes a run's spec; returns the data that the run trains on and is scored by."""
    evaluate: Callable[["torch.nn.Module", "Data", Spec, "torch.device", Path], dict]
    """Takes the model, the data, the spec, the device and the run's folder; returns the scores,
    which the run's record holds as its `quality`."""


def load_questions(spec: Spec) -> "Data":
    """Return the questions of a run; see `data.load.load_data`."""
    from qa_lib.data import load

    return load.load_data(spec)


def load_text(spec: Spec) -> "Data":
    """Return the text of a run; see `data.load.load_text`."""
    from qa_lib.data import load

    return load.load_text(spec)


def evaluate_answers(
    model: "torch.nn.Module", data: "Data", spec: Spec, device: "torch.device", run_dir: Path
) -> dict:
    """Return the scores of a model's answers; see `score.evaluate.evaluate_answers`."""
    from qa_lib.score import evaluate

    return evaluate.evaluate_answers(model, data, spec, device, run_dir)


def evaluate_text(
    model: "torch.nn.Module", data: "Data", spec: Spec, device: "torch.device", run_dir: Path
) -> dict:
    """Return the scores of a language model; see `score.evaluate.evaluate_text`."""
    from qa_lib.score import evaluate

    return evaluate.evaluate_text(model, data, spec, device, run_dir)


# The functions of each task, by the task's name.
WORKFLOWS = {
    "qa": Workflow(open_source, load_questions, evaluate_answers),
    "lm": Workflow(open_text, load_text, evaluate_text),
}
