"""Data sets: `open_source` finds one of questions by its name, and returns it as a `Source`.

It may be a file, a folder, a saved table, on the hub, or generated. Whatever trains, scores or
answers is given a `Source` and reads `Example`s from it, whatever the data's format. A Source may
be of text as well (data/text.py). data/origins.py knows the places, data/examples.py the layouts
and their checks.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from qa_lib.data.examples import Example, build_examples, build_golds, flat_rows, nested_rows
from qa_lib.data.files import DataError, read_json, sha256_of
from qa_lib.data.origins import Origin, find_file, generated, hub_table, is_hub_name, saved_table

OFFICIAL_NAMES = {
    "train": ("train.json", "train-v2.0.json"),
    "validation": ("validation.json", "dev-v2.0.json"),
}


@dataclass
class Source:
    """A data set, of questions or of text, that is read when it is first used."""

    # What the user asked for, a path as it was given.
    name: str
    # Computes the SHA-256 (hex) of the content as it is stored now. Raises DataError.
    hash_content: Callable[[], str]
    # Reads the content from the start: `Row`s of questions, or a text's lines. Raises DataError.
    load_rows: Callable[[], Iterable]
    # Whether `examples` have the gold answers, which are checked then. Without, the data's may be
    # missing or wrong. `golds` reads them in either case.
    labelled: bool = True

    @cached_property
    def sha256(self) -> str:
        """The SHA-256 (hex) of the content when this property was first used."""
        return self.hash_content()

    def read(self) -> Iterator:
        """Yield the rows of `load_rows`, and check that they are of the content of `sha256`.

        Raises DataError after the last one if the content has another hash by then: the rows may
        be of the old or of the new content.
        """
        before = self.sha256
        yield from self.load_rows()
        if self.hash_content() != before:
            raise DataError(
                f"{self.name}: it has changed since it was first looked at; give the command again"
            )

    @cached_property
    def examples(self) -> list[Example]:
        """The questions to train on or to answer, each with its paragraph."""
        return build_examples(self.read(), self.name, self.labelled)

    @cached_property
    def golds(self) -> list[Example]:
        """The questions and gold answers to score by, without the paragraphs."""
        return build_golds(self.read(), self.name)


def open_source(source: str | os.PathLike, split: str, labelled: bool = True) -> Source:
    """Find the data set that `source` names; nothing is parsed yet.

    The name is one of
      - "synthetic:2000": 2,000 generated questions (the two splits use different seeds),
      - a .json file in the official nested layout, v1.1 or v2.0,
      - a folder with train.json / validation.json, or the official train-v2.0.json / dev-v2.0.json,
      - a folder that `datasets` wrote with save_to_disk (a Dataset, or a DatasetDict of splits),
      - a name on the Hugging Face hub, such as "squad_v2".
    `split` is "train" or "validation": the part that is meant where the data set has both. A single
    file, or a single Dataset, is the same for either.
    `labelled` is the Source's: whether `examples` have gold answers.
    Raises DataError if there is no such data set, and on first use of the result if it is bad.
    """
    name = os.fspath(source)
    file = find_file(name, OFFICIAL_NAMES[split])
    # What looks like a path is more likely misspelt than on the hub.
    is_path = name.endswith(".json") or os.path.isdir(os.path.dirname(name))

    if name.startswith("synthetic:"):
        origin = generated(name, split)
        to_rows = nested_rows
    elif file:
        name = str(file)
        origin = Origin(partial(sha256_of, file), partial(read_json, file))
        to_rows = nested_rows
    elif os.path.isdir(name):
        name = str(Path(name))
        origin = saved_table(Path(name), split, wanted=" or ".join(OFFICIAL_NAMES[split]))
        to_rows = flat_rows
    elif is_hub_name(name) and not is_path:
        origin = hub_table(name, split, "train.json and validation.json in SQuAD's format")
        to_rows = flat_rows
    else:
        raise DataError(f"{name!r}: no such file or folder")
    return Source(name, origin.hash_content, lambda: to_rows(origin.load(), name), labelled)
