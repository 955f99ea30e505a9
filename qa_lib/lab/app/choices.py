"""Which checkpoints can be asked: those that the user named, and those of the runs that ended ok.

Nothing here imports torch before a model is named, so that the list is there at once.
"""

import contextlib
import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from qa_lib.records.record import read_document, read_record, run_files
from qa_lib.records.schema import QUANTIZED_SCHEMA


@dataclass(frozen=True)
class Choice:
    """A checkpoint that can be asked. `key` is what a page calls it by; no path ever leaves the server.

    `f1` is its best one and `threshold` the margin of "no answer" that goes with it, NaN where no record tells;
    `synthetic` says that it knows generated text alone.
    """

    key: str
    name: str
    folder: Path
    f1: float = math.nan
    threshold: float = math.nan
    synthetic: bool = False


class Choices:
    """The checkpoints to choose from, `given` ones first."""

    def __init__(self, given: list[Choice], runs: Path):
        self._given, self._runs = given, runs
        self._known: dict[
            str, Choice
        ] = {}  # every one seen so far: a question does not read all records again

    def listed(self) -> list[Choice]:
        """All that there are now, each with a name of its own."""
        twice = {choice.folder.resolve() for choice in self._given}
        found = [
            *self._given,
            *(choice for choice in offered(self._runs) if choice.folder.resolve() not in twice),
        ]
        times = Counter(choice.name for choice in found)
        found = [replace(c, name=f"{c.name} ({c.key})") if times[c.name] > 1 else c for c in found]
        self._known |= {choice.key: choice for choice in found}
        return found

    def find(self, key: str) -> Choice | None:
        """The checkpoint that is called so: keys are compared, never opened."""
        if key not in self._known:
            self.listed()
        return self._known.get(key)


def offered(runs: Path) -> list[Choice]:
    """The checkpoints of the runs that ended ok, the best F1 first; after all others those of synthetic text, whose
    F1 is of another kind."""
    names = ("model/model.safetensors", "model-*/quantized.json")
    found = [_of_run(path.parent) for name in names for path in run_files(runs, name)]
    return sorted(
        filter(None, found), key=lambda choice: (choice.synthetic, -choice.f1, choice.name)
    )


def named(models: list[str | Path]) -> list[Choice]:
    """The checkpoints that the user named: folders, of runs or models, and names of the hub.

    Raises UserError for a name that leads to no model, or to one that load_qa_model refuses.
    """
    found = []
    for i, model in enumerate(models, 1):
        from qa_lib.model.hf_checkpoint import find_folder  # and torch
        from qa_lib.score.predict import load_qa_model  # and torch

        folder, path = find_folder(model), Path(model).resolve()
        load_qa_model(folder)
        name = (path.parent if path.name == "model" else path).name if path.exists() else str(model)
        found.append(replace(_of_run(folder) or Choice("", name, folder), key=f"model {i}"))
    return found


def _of_run(folder: Path) -> Choice | None:
    """The checkpoint of a run that ended ok, or None where no record says so."""
    with contextlib.suppress(ValueError, KeyError, TypeError, ArithmeticError):
        record = read_record(folder.resolve().parent)
        spec, quality, width = record["spec"], record["quality"], ""
        if record["status"] != "ok" or record["task"]["name"] != "qa":
            return None
        if (found := folder / "quantized.json").is_file():  # whose answers are others
            quantized = read_document(found, QUANTIZED_SCHEMA)
            quality, width = quantized["after"], f" · {quantized['width']}"
        name = f"{spec['variant']}-s{spec['seed']}{width} · {spec['preset']['name']} · F1 {quality['best_f1']:.1f}"
        synthetic = str(record["data"]["name"]).startswith("synthetic")
        key = "/".join(folder.parts[-3:]).removesuffix("/model")
        key.encode()  # raises ValueError for bytes that are no text, which no page can be sent
        return Choice(
            key,
            name,
            folder,
            float(quality["best_f1"]),
            float(quality["best_f1_threshold"]),
            synthetic,
        )
    return None
