"""Text as one flat array of tokens, and windows of it as samples: what a language model trains on and is scored by.

Each line becomes tokens by itself, so that it does not matter how much is read at a time. The end token stands before
the first document and between two; it is what a model that has seen nothing yet begins with. Where no tokenizer is
given, a byte-level BPE (Sennrich et al. 2016, Radford et al. 2019) is learnt from the training text. Tokenizers and
arrays are cached by the content that they were made of, and arrays are memory-mapped from there.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from qa_lib.data.squad import check_same
from qa_lib.data.text import SEPARATOR, TextSource
from qa_lib.data.tokenize import bare
from qa_lib.data.windows import cache_key, default_cache, load_entry, store_entry
from qa_lib.errors import UserError

CACHE_VERSION = 2  # of the cached files; raise it when they, or what is in them, change
LINES_PER_CALL = 10_000
LONGEST = 1_000  # characters of a word or a blank that a tokenizer learns from as a whole
END = "<|endoftext|>"


@dataclass(eq=False)
class Text:
    """A tokenized text, and how much there was of it; a line end counts as a byte."""

    tokens: np.ndarray  # uint16 or uint32 [T]: an end token, and then the text's
    words: int  # between blanks, and line ends: what WikiText calls its tokens
    bytes: int  # of UTF-8


@dataclass(eq=False)
class Windows:
    """A text cut into windows of `max_length` tokens, one after the other: samples without padding. What is left at its
    end, of fewer tokens, is left out."""

    text: Text
    max_length: int

    def __len__(self) -> int:
        return len(self.text.tokens) // self.max_length

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n]: tokens of each window."""
        return np.full(len(self), self.max_length)

    def batch(self, indices: np.ndarray, pad_to: int) -> dict[str, np.ndarray]:
        """Windows `indices` (b of them) as a model's keyword arguments: input_ids and, equal to them, labels, which
        transformers' models shift by themselves; int64 [b, max_length]. There is nothing to pad."""
        places = np.asarray(indices)[:, None] * self.max_length + np.arange(self.max_length)
        ids = self.text.tokens[places].astype(np.int64)
        return {"input_ids": ids, "labels": ids}


@dataclass
class Vocabulary:
    """A tokenizer in the form of its file tokenizer.json."""

    content: str


def learn_tokenizer(source: TextSource, size: int) -> PreTrainedTokenizerBase:
    """A byte-level BPE of at most `size` tokens, learnt from the text or found in the cache. The end token has the
    number 0."""
    parts = [CACHE_VERSION, tokenizers.__version__, source.sha256, size]
    folder = _folder("bpe", parts)
    learnt = load_entry(folder, Vocabulary)
    if not learnt:
        learnt = Vocabulary(_learn(source, size))
        check_same(source)
        learnt = store_entry(folder, learnt)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(learnt.content),
        bos_token=END,
        eos_token=END,
        model_input_names=["input_ids", "attention_mask"],
    )


def _learn(source: TextSource, size: int) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(chain.from_iterable(map(_pieces, source.lines())), trainer)
    return tokenizer.to_str()


def _pieces(line: str) -> list[str]:
    """A line, cut up where a word or a blank in it is longer than LONGEST characters: to learn from one takes time by
    the square of its length, in which no signal is heard."""
    whole = len(line) <= LONGEST or not re.search(rf"\S{{{LONGEST + 1}}}|\s{{{LONGEST + 1}}}", line)
    return [line] if whole else re.findall(rf"\s{{0,{LONGEST}}}\S{{1,{LONGEST}}}|\s{{1,{LONGEST}}}", line)


def tokenize_text(source: TextSource, tokenizer: PreTrainedTokenizerBase) -> Text:
    """The tokens of a text, made once and memory-mapped from the cache. Raises UserError for a text of nothing, and for
    a tokenizer that is not fast or has no end token."""
    name = tokenizer.name_or_path or type(tokenizer).__name__
    if tokenizer.eos_token_id is None:
        raise UserError(f"{name}: its tokenizer has no end token (eos_token), with which a text begins")
    with bare(tokenizer) as backend:
        parts = [CACHE_VERSION, tokenizers.__version__, source.sha256, tokenizer.eos_token_id, backend.to_str()]
        folder = _folder("tokens", parts)
        if found := load_entry(folder, Text):
            return found
        made = _tokenize(source, backend, tokenizer.eos_token_id)
        check_same(source)
        return store_entry(folder, made)


def _tokenize(source: TextSource, backend: Tokenizer, end: int) -> Text:
    dtype = np.uint16 if backend.get_vocab_size() <= 2**16 else np.uint32
    pieces, words, size = [np.array([end], dtype)], 0, 0
    plain, backend.encode_special_tokens = backend.encode_special_tokens, True  # a text may speak of end tokens
    try:
        for lines in _chunks(source.lines()):
            words += sum(len(line.split()) + line.endswith("\n") for line in lines)
            size += sum(len(line.encode()) for line in lines)
            encoded = backend.encode_batch_fast(lines, add_special_tokens=False)
            ids = ([end] if line.strip(" \n") == SEPARATOR else e.ids for line, e in zip(lines, encoded, strict=True))
            pieces.append(np.fromiter(chain.from_iterable(ids), dtype))
    finally:
        backend.encode_special_tokens = plain
    if not size:
        raise UserError(f"{source.name}: an empty text")
    return Text(np.concatenate(pieces), words, size)


def _chunks(lines: Iterator[str]) -> Iterator[list[str]]:
    while chunk := list(islice(lines, LINES_PER_CALL)):
        yield chunk


def _folder(kind: str, parts: list):
    return default_cache() / f"{kind}-{cache_key(parts)}"
