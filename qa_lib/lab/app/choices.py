"""The checkpoints that the app can put questions to: the user's, and those of runs that ended ok.

Nothing here imports torch before the user names a model, so that the list is there at once.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from qa_lib.model.hf_checkpoint import find_folder
from qa_lib.records.record import read_document, read_record, run_files
from qa_lib.records.schema import QUANTIZED_SCHEMA

# Where a run keeps its models, below its own folder: the trained one, and quantized copies of it.
MODEL_FILES = ("model/model.safetensors", "model-*/quantized.json")


@dataclass(frozen=True)
class Choice:
    """A checkpoint that the app can put questions to."""

    # What the page calls it by. No path ever leaves the server.
    key: str
    # What a reader of the page sees.
    name: str
    folder: Path
    # Its best F1 (0 to 100); NaN where no record tells.
    f1: float = math.nan
    # "No answer" is given where its score exceeds the best answer's by more; NaN: no record tells.
    threshold: float = math.nan
    # Whether it was trained on generated text, and knows no other.
    synthetic: bool = False


class Choices:
    """The checkpoints to choose from, `given` ones first, then those below the folder `runs`."""

    def __init__(self, given: list[Choice], runs: Path):
        self._given = given
        self._runs = runs
        # All that were listed so far, by key: a question does not read all records again.
        self._seen: dict[str, Choice] = {}

    def listed(self) -> list[Choice]:
        """Return all that there are now, each with a name of its own."""
        given_folders = {choice.folder.resolve() for choice in self._given}
        choices = list(self._given)
        for choice in choices_of_runs(self._runs):
            if choice.folder.resolve() not in given_folders:
                choices.append(choice)
        choices = _with_distinct_names(choices)
        for choice in choices:
            self._seen[choice.key] = choice
        return choices

    def find(self, key: str) -> Choice | None:
        """Return the checkpoint with this key, or None. Keys are compared, and never opened."""
        if key not in self._seen:
            self.listed()
        return self._seen.get(key)


def _with_distinct_names(choices: list[Choice]) -> list[Choice]:
    """Return the choices with the key added to each name that several of them have."""
    counts = Counter(choice.name for choice in choices)
    distinct = []
    for choice in choices:
        if counts[choice.name] > 1:
            choice = replace(choice, name=f"{choice.name} ({choice.key})")
        distinct.append(choice)
    return distinct


def choices_of_runs(runs: Path) -> list[Choice]:
    """Return the checkpoints of the runs that ended ok, the best F1 first.

    Those of synthetic text come last: their F1 is of another kind.
    """
    choices = []
    for pattern in MODEL_FILES:
        for path in run_files(runs, pattern):
            choice = _choice_if_recorded(path.parent)
            if choice is not None:
                choices.append(choice)
    return sorted(choices, key=lambda choice: (choice.synthetic, -choice.f1, choice.name))


def choices_of_user(models: list[str | Path]) -> list[Choice]:
    """Return the checkpoints that the user named by folders, of runs or models, or by hub names.

    Raises UserError for a name that leads to no model, or to one that load_qa_model refuses.
    """
    if not models:
        return []
    from qa_lib.score.predict import load_qa_model  # here, since it imports torch

    choices = []
    for number, model in enumerate(models, 1):
        folder = find_folder(model)
        load_qa_model(folder)  # which refuses now what could not be loaded later
        key = f"model {number}"
        recorded = _choice_if_recorded(folder)
        if recorded is None:
            choices.append(Choice(key=key, name=_short_name(model), folder=folder))
        else:
            choices.append(replace(recorded, key=key))
    return choices


def _short_name(model: str | Path) -> str:
    """Return the last part of a path, a run's rather than its folder `model`; or the hub name."""
    path = Path(model).resolve()
    if not path.exists():
        return str(model)
    if path.name == "model":
        return path.parent.name
    return path.name


def _choice_if_recorded(folder: Path) -> Choice | None:
    """Return the checkpoint in a model folder whose run ended ok by its record; None for others."""
    try:
        return _recorded_choice(folder)
    except (
        ValueError,
        KeyError,
        TypeError,
        ArithmeticError,
    ):  # there is no record, or a spoilt one
        return None


def _recorded_choice(folder: Path) -> Choice | None:
    """Return the checkpoint in a model folder by its run's record, or None if it did not end ok.

    Raises ValueError, KeyError, TypeError or ArithmeticError for a record that does not say.
    """
    record = read_record(folder.resolve().parent)
    if record["status"] != "ok" or record["task"]["name"] != "qa":
        return None
    spec = record["spec"]
    quality = record["quality"]
    name = f"{spec['variant']}-s{spec['seed']}"
    quantized_file = folder / "quantized.json"
    if quantized_file.is_file():  # its answers, and so its F1, are not those of the trained model
        quantized = read_document(quantized_file, QUANTIZED_SCHEMA)
        quality = quantized["after"]
        name += f" · {quantized['width']}"
    name += f" · {spec['preset']['name']} · F1 {quality['best_f1']:.1f}"
    return Choice(
        key=_key(folder),
        name=name,
        folder=folder,
        f1=float(quality["best_f1"]),
        threshold=float(quality["best_f1_threshold"]),
        synthetic=str(record["data"]["name"]).startswith("synthetic"),
    )


def _key(folder: Path) -> str:
    """Return group/run of a run's trained model, and group/run/model-8bit or so of a quantized one.

    Raises ValueError for bytes that are no text, which no page can be sent.
    """
    key = "/".join(folder.parts[-3:]).removesuffix("/model")
    key.encode()
    return key
