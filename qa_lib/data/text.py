"""Where running text comes from: files, folders, the hub and the generator, all as lines.

A source is its lines, each with its line end, decoded and never all in memory at once. A line that holds a form feed
alone separates two documents. Everything else is text, as it stands: nothing is stripped, and only Windows line ends
are made plain ones, so that words, line ends and bytes are counted as in the original.
"""

import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path

from qa_lib.data.squad import DataError, generated, hub_digest, hub_table, sha256_of

ENDINGS = (".txt", ".txt.gz", ".tokens")
# In a folder: by the name of the split, or as WikiText-103 comes.
NAMES = {"train": ("train", "wiki.train"), "validation": ("validation", "wiki.valid")}
SEPARATOR = "\f"


@dataclass
class TextSource:
    """A text that is read when it is used: `lines()` reads it from the start, and `sha256` is the hash of the content
    as stored (hex). Both raise DataError."""

    name: str
    split: str
    digest: Callable[[], str]
    lines: Callable[[], Iterator[str]]

    @cached_property
    def sha256(self) -> str:
        return self.digest()


def open_text(source: str | os.PathLike, split: str) -> TextSource:
    """Find the text `source`; nothing is read yet.

    `source` is one of
      - "synthetic:1600": the paragraphs of so many generated questions, one a line,
      - a folder with train and validation as .txt, .txt.gz or .tokens, or WikiText-103's wiki.train.tokens and so on,
      - one such file, which has no other split than "train",
      - a data set of the hub with a column `text`, and its configuration: "Salesforce/wikitext:wikitext-103-raw-v1".
    Raises DataError if there is no such text, and on use of the result if its content is bad.
    """
    name, path = os.fspath(source), Path(source)
    if name.startswith("synthetic:"):
        document = generated(name, split)

        @cache
        def digest() -> str:
            return hashlib.sha256(f"text {json.dumps(document(), sort_keys=True)}".encode()).hexdigest()

        return TextSource(name, split, digest, partial(_paragraphs, document))
    if path.is_dir():
        names = [known + ending for known in NAMES[split] for ending in ENDINGS]
        found = next((path / file for file in names if (path / file).is_file()), None)
        if found is None:
            raise DataError(f"{path}: none of {', '.join(names)} in this folder")
        path = found
    elif path.is_file() and (not name.endswith(ENDINGS) or split != "train"):
        wanted = f"not one of {', '.join(ENDINGS)}" if split == "train" else "one file has no text to validate on"
        raise DataError(f"{path}: {wanted}; a folder with train.txt and validation.txt has both")
    if path.is_file():
        return TextSource(str(path), split, partial(sha256_of, path), partial(_lines, path))
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", name) and not name.endswith(ENDINGS):
        table = hub_table(name, split, "a text file, or a folder with train.txt and validation.txt")
        return TextSource(name, split, partial(hub_digest, name, split, table), partial(_rows, table, name))
    raise DataError(f"{name!r}: no such file or folder")


def _lines(path: Path) -> Iterator[str]:
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            for line in stream:
                number += 1
                yield line.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: line {number} is not UTF-8: {error.reason} at byte {error.start} of it") from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read after line {number}: {error}") from None


def _paragraphs(document: Callable[[], dict]) -> Iterator[str]:
    for article in document()["data"]:
        yield from (paragraph["context"] + "\n" for paragraph in article["paragraphs"])


def _rows(table: Callable, name: str) -> Iterator[str]:
    """A row a line. WikiText's rows have their line ends with them, and its empty ones have lost theirs."""
    if "text" not in table().column_names:
        raise DataError(f"{name}: no column text")
    for row in table()["text"]:
        yield row if row.endswith("\n") else row + "\n"
