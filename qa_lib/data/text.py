"""Running text, and windows of its tokens: what a language model trains on and is scored by.

Text comes from files, folders, the hub and the generator. A source is its lines, each with its line
end, decoded and never all in memory at once. A line that holds a form feed alone separates two
documents. Everything else is text, as it stands: nothing is stripped but a byte order mark at the
start, and only Windows line ends are made plain ones, so that words, line ends and bytes are
counted as in the original.

Each line becomes tokens by itself, so that it does not matter how much is read at a time. The end
token stands before the first document and between two; it is what a model that has seen nothing yet
begins with. Where no tokenizer is given, a byte-level BPE (Sennrich et al. 2016, Radford et al.
2019) is learnt from the training text. Tokenizers and tokens are cached by the content that they
were made of (data/cache.py).
"""

import gzip
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import tokenizers

from qa_lib.data.cache import cached
from qa_lib.data.files import DataError, sha256_of
from qa_lib.data.origins import find_file, generated, hub_table, is_hub_name
from qa_lib.data.squad import Source
from qa_lib.data.tokenize import fast_backend
from qa_lib.errors import UserError

ENDINGS = (".txt", ".txt.gz", ".tokens")
# The names of files in a folder: that of the split, or as WikiText-103 comes.
NAMES = {"train": ("train", "wiki.train"), "validation": ("validation", "wiki.valid")}
SEPARATOR = "\f"
CACHE_VERSION = 5  # of the cached files; raise it when they, or what is in them, change
LINES_PER_CALL = 10_000
LONGEST = 1_000  # characters of a word or a blank that a tokenizer learns from as a whole
END = "<|endoftext|>"


def open_text(source: str | os.PathLike, split: str) -> Source:
    """Find the text `source`, whose rows are lines; nothing is read yet.

    `source` is one of
      - "synthetic:1600": the paragraphs of so many generated questions, one a line,
      - a folder with train and validation as .txt, .txt.gz or .tokens, or with WikiText-103's
        wiki.train.tokens and wiki.valid.tokens,
      - one such file, which has no other split than "train",
      - a data set of the hub with a column `text`, and its configuration:
        "Salesforce/wikitext:wikitext-103-raw-v1".
    Raises DataError if there is no such text, and on use of the result if its content is bad.
    """
    name = os.fspath(source)
    if name.startswith("synthetic:"):
        origin = generated(name, split, mark="text ")
        return Source(name, origin.hash_content, lambda: _paragraphs(origin.load()))

    file_names = [stem + ending for stem in NAMES[split] for ending in ENDINGS]
    path = find_file(name, file_names)
    if os.path.isdir(name) and not path:
        raise DataError(f"{name}: none of {', '.join(file_names)} in this folder")
    if os.path.isfile(name):
        both = "a folder with train.txt and validation.txt has both"
        if split != "train":
            raise DataError(f"{name}: one file has no text to validate on; {both}")
        if not name.endswith(ENDINGS):
            raise DataError(f"{name}: not one of {', '.join(ENDINGS)}; {both}")
    if path:
        return Source(str(path), partial(sha256_of, path), partial(_lines, path))

    if is_hub_name(name) and not name.endswith(ENDINGS):
        origin = hub_table(name, split, "train.txt and validation.txt")
        return Source(name, origin.hash_content, lambda: _table_lines(origin.load(), name))

    raise DataError(f"{name!r}: no such file or folder")


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file. Raises DataError for one that cannot be read or decoded."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            for line in stream:
                number += 1
                # Windows programs write a byte order mark in front of a text; it may be all that
                # an empty one has.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text:
                    yield text.replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: line {number} is not UTF-8: {error.reason} at byte {error.start} of it"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read after line {number}: {error}") from None


def _paragraphs(document: dict) -> Iterator[str]:
    """Yield the paragraphs of a document in SQuAD's layout, each as a line."""
    for article in document["data"]:
        for paragraph in article["paragraphs"]:
            yield paragraph["context"] + "\n"


def _table_lines(table, name: str) -> Iterator[str]:
    """Yield the column `text` of a table of the hub, a row a line.

    WikiText's rows have their line ends with them, and its empty ones have lost theirs.
    Raises DataError for a table without such a column.
    """
    if "text" not in table.column_names:
        raise DataError(f"{name}: no column text")
    for number, row in enumerate(table["text"]):
        if number == 0:
            row = row.removeprefix("\ufeff")
        yield row if row.endswith("\n") else row + "\n"


@dataclass(eq=False)
class Text:
    """A tokenized text, and how much there was of it; a line end counts as a byte."""

    tokens: np.ndarray  # uint16 or uint32 [T]: an end token, and then the text's
    words: int  # between blanks, and line ends: what WikiText calls its tokens
    bytes: int  # of UTF-8


@dataclass(eq=False)
class Windows:
    """A text cut into windows, one after the other: samples without padding.

    Tokens at the text's end that do not fill a window are left out.
    """

    text: Text
    max_length: int  # tokens of every window

    def __len__(self) -> int:
        return len(self.text.tokens) // self.max_length

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n]: tokens of each window."""
        return np.full(len(self), self.max_length)

    def batch(self, indices: np.ndarray, pad_to: int) -> dict[str, np.ndarray]:
        """Return windows `indices` (b of them) as a model's keyword arguments.

        input_ids and, equal to them, labels, which transformers' models shift by themselves; int64
        [b, max_length]. There is nothing to pad.
        """
        begin = np.asarray(indices)[:, None] * self.max_length
        ids = self.text.tokens[begin + np.arange(self.max_length)].astype(np.int64)
        return {"input_ids": ids, "labels": ids}


def learn_tokenizer(source: Source, size: int):
    """Return a fast tokenizer of transformers: a byte-level BPE of at most `size` tokens.

    It is learnt from the text, or found in the cache. The end token has the number 0.
    """
    parts = ["bpe", CACHE_VERSION, tokenizers.__version__, source.sha256, size]
    learnt = cached(parts, SimpleNamespace, lambda: SimpleNamespace(content=_learn(source, size)))
    # Its import takes a second, for which drivers do not wait.
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(learnt.content),
        bos_token=END,
        eos_token=END,
        model_input_names=["input_ids", "attention_mask"],
    )


def _learn(source: Source, size: int) -> str:
    """Learn a tokenizer from the text, and return it as JSON."""
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        chain.from_iterable(map(_pieces, source.read())),
        vocab_size=size,
        min_frequency=0,
        special_tokens=[END],
        show_progress=False,
    )
    return tokenizer.to_str()


def _pieces(line: str) -> list[str]:
    """Cut a line where a word or a blank in it is longer than LONGEST characters.

    To learn from a longer one takes time by the square of its length, in which no signal is heard.
    """
    is_short = len(line) <= LONGEST
    if is_short or not re.search(rf"\S{{{LONGEST + 1}}}|\s{{{LONGEST + 1}}}", line):
        return [line]
    return re.findall(rf"\s{{0,{LONGEST}}}\S{{1,{LONGEST}}}|\s{{1,{LONGEST}}}", line)


def tokenize_text(source: Source, tokenizer) -> Text:
    """Return the tokens of a text, made once and memory-mapped from the cache.

    Raises UserError for a text of nothing, and for a tokenizer that is not fast or has no end
    token.
    """
    end = tokenizer.eos_token_id
    backend = fast_backend(tokenizer)
    if end is None:
        name = tokenizer.name_or_path or type(tokenizer).__name__
        raise UserError(
            f"{name}: its tokenizer has no end token (eos_token), with which a text begins"
        )
    parts = ["tokens", CACHE_VERSION, tokenizers.__version__, source.sha256, end, backend.to_str()]
    return cached(parts, Text, lambda: _tokenize(source, backend, end))


def _tokenize(source: Source, backend: tokenizers.Tokenizer, end: int) -> Text:
    """Make the text that `tokenize_text` describes; `end` is the number of the end token."""
    dtype = np.uint16 if backend.get_vocab_size() <= 2**16 else np.uint32
    tokens = [np.array([end], dtype)]
    words = 0
    size = 0
    # A text may speak of end tokens; transformers switches this off again at its next call.
    backend.encode_special_tokens = True
    source_lines = source.read()
    while lines := list(islice(source_lines, LINES_PER_CALL)):
        words += sum(len(line.split()) + line.endswith("\n") for line in lines)
        size += sum(len(line.encode()) for line in lines)
        encodings = backend.encode_batch_fast(lines, add_special_tokens=False)
        ids = []
        for line, encoding in zip(lines, encodings, strict=True):
            is_separator = line.strip(" \n") == SEPARATOR
            ids.append([end] if is_separator else encoding.ids)
        tokens.append(np.fromiter(chain.from_iterable(ids), dtype))
    if not size:
        raise UserError(f"{source.name}: an empty text")
    return Text(np.concatenate(tokens), words, size)
