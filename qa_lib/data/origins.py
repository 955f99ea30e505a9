"""Where data comes from: the generator, a folder that `datasets` saved, and the hub.

Each place answers two questions: what is the hash of its content, and what is the content. Files in
SQuAD's layout and text files need no more than data/files.py has.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from qa_lib.data.files import DataError, hash_files
from qa_lib.data.synthetic import synthetic_squad
from qa_lib.errors import first_line

SYNTHETIC_SEEDS = {"train": 0, "validation": 1}
SYNTHETIC_LIMIT = 10_000_000  # questions that may be asked of the generator


class Origin(NamedTuple):
    """A place that data comes from. Nothing is read before one of the two functions is called."""

    hash_content: Callable[[], str]  # the hash (hex) of the content; raises DataError
    load: Callable  # the content: a document in SQuAD's layout, or a table of datasets; likewise


def find_file(name: str, names: Iterable[str]) -> Path | None:
    """Return the file called `name`, or the first of `names` in the folder called `name`; None
    where there is no such file."""
    if os.path.isdir(name):
        candidates = [Path(name, other) for other in names]
    else:
        candidates = [Path(name)]
    for path in candidates:
        if os.path.isfile(path):
            return path
    return None


def is_hub_name(name: str) -> bool:
    """Say whether `name` may be a data set on the hub, perhaps with a configuration, as in
    Salesforce/wikitext:wikitext-2-v1."""
    return re.fullmatch(r"[\w-][\w.-]{0,95}(/[\w.-]{1,95})?(:[\w.-]+)?", name) is not None


def generated(name: str, split: str, mark: str = "") -> Origin:
    """Return the origin of a generated document, for a name such as "synthetic:2000".

    `mark` is hashed as well: it tells apart what is made of one document. Raises DataError for a
    name without a number of questions that can be generated.
    """
    count = name.removeprefix("synthetic:")
    is_number = count.isascii() and count.isdigit()
    # int() refuses thousands of digits; ten of them are enough to be beyond the limit.
    if not is_number or not 0 < int(count[:10]) <= SYNTHETIC_LIMIT:
        raise DataError(
            f"{name!r}: write synthetic: and a number of questions, as in synthetic:2000"
        )
    arguments = int(count), SYNTHETIC_SEEDS[split]
    return Origin(
        partial(_hash_of_generated, *arguments, mark), partial(synthetic_squad, *arguments)
    )


@cache
def _hash_of_generated(n: int, seed: int, mark: str) -> str:
    """Return the hash of a generated document and a mark; every plan of a process asks for it."""
    content = mark + json.dumps(synthetic_squad(n, seed), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def saved_table(folder: Path, split: str, wanted: str) -> Origin:
    """Return the origin of a table that `datasets` wrote to `folder` with save_to_disk.

    The hash is that of the Arrow files which the table is loaded from, in their order: files of
    `datasets`' own cache may lie beside them, and its fingerprints differ between copies.
    Raises DataError for a folder without such a table, naming the files that are `wanted` there.
    """
    part = folder / split if (folder / "dataset_dict.json").is_file() else folder
    if not (part / "state.json").is_file():
        raise DataError(
            f"{folder}: no {wanted} in this folder, and no data set of save_to_disk "
            f"with a split {split!r}"
        )

    def load():
        import datasets

        try:
            table = datasets.load_from_disk(str(part), keep_in_memory=False)
            # Arrow follows damaged offsets to wherever they lead.
            table.data.table.validate(full=True)
        except Exception as error:  # whatever Arrow or datasets make of a damaged folder
            raise DataError(
                f"{folder}: not a data set that datasets can load: {first_line(error)}"
            ) from None
        return table

    def hash_content() -> str:
        files = [Path(file["filename"]) for file in load().cache_files]
        for file in files:
            if file.parent != part:
                raise DataError(
                    f"{folder}: its state.json lists {file.name[:80]!r} of another folder"
                )
        return hash_files(files)

    return Origin(hash_content, load)


def hub_table(name: str, split: str, files: str) -> Origin:
    """Return the origin of a data set on the hub, which is loaded once and never with its code.

    The error for a data set that cannot be had says which `files` a folder may have in its place.
    """

    @cache
    def load():
        import datasets

        try:
            formats = Path(datasets.__file__).with_name("packaged_modules")
            if (formats / name.split(":")[0]).is_dir():
                raise ValueError(
                    "a format's name, by which datasets reads the files of the working directory"
                )
            return datasets.load_dataset(*name.split(":"), split=split)
        except Exception as error:  # offline, unknown, gated, a script: the library says which
            raise DataError(
                f"{name!r}: no such file or folder, nor to be had from the hub "
                f"({type(error).__name__}: {first_line(error)}): give --data FOLDER, "
                f"a folder with {files}"
            ) from None

    def hash_content() -> str:
        content = f"{name} {split} {load()._fingerprint}"
        return hashlib.sha256(content.encode()).hexdigest()

    return Origin(hash_content, load)
