"""Tokens and character offsets of many texts at once, each distinct text and word tokenised once, in flat arrays."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, count

import numpy as np
from transformers import AutoTokenizer, BertTokenizer
from transformers import PreTrainedTokenizerBase as Tokenizer

from qa_lib.data.synthetic import vocabulary
from qa_lib.errors import UserError

TEXTS_PER_CALL = 2_000  # one call's encodings take some 150 bytes a token, so not all texts at once
WORDS_PER_ROW = 256


@contextmanager
def bare(backend) -> Iterator:
    """The tokenizer without the truncation and padding that earlier calls left switched on; they are put back."""
    truncation, padding = backend.truncation, backend.padding
    backend.no_truncation()
    backend.no_padding()
    try:
        yield backend
    finally:
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)


def check_layout(tokenizer, backend) -> None:
    """Refuse tokenizers that do not join a pair as BERT does: the windows are assembled in that form."""
    question, context = (backend.encode(text, add_special_tokens=False).ids for text in ("who", "he"))
    cls, sep, pad = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id
    if None in (cls, sep, pad) or backend.encode("who", "he").ids != [cls, *question, sep, *context, sep]:
        raise UserError(f"{type(tokenizer).__name__} does not join texts as [CLS] question [SEP] context [SEP]")


def tokenise(backend, texts: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids int32 [T], starts int64 [len(texts) + 1] and offsets int32 [T, 2] of all texts, without special tokens.

    Where a blank always ends a token, texts are cut at blanks and each distinct word is tokenised once.
    """
    if not _splits_at_blanks(backend):
        return _encode(backend, texts)
    index: defaultdict[str, int] = defaultdict(count().__next__)
    word, size, words = [], [], []
    for first in range(0, len(texts), TEXTS_PER_CALL):
        parts = [text.split(" ") for text in texts[first : first + TEXTS_PER_CALL]]
        words += map(len, parts)
        parts = list(chain.from_iterable(parts))
        word.append(np.fromiter(map(index.__getitem__, parts), np.int64, len(parts)))
        size.append(np.fromiter(map(len, parts), np.int64, len(parts)) + 1)
    ids, starts, offsets = _encode_words(backend, list(index))

    word, size = np.concatenate(word), np.concatenate(size)
    first_word = np.cumsum(words) - words
    begin = np.cumsum(size) - size  # of each word, in characters, over all texts joined by blanks
    begin -= np.repeat(begin[first_word], words)
    lengths = np.diff(starts)[word]
    source = ranges(starts[word], lengths)
    text_starts = np.concatenate([[0], np.cumsum(lengths)])[np.append(first_word, len(word))]
    return ids[source], text_starts, offsets[source] + np.repeat(begin.astype(np.int32), lengths)[:, None]


def _encode_words(backend, words: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `_encode` for words without blanks: joined to rows, as a call costs more than a word, and told apart after."""
    rows = [" ".join(words[first : first + WORDS_PER_ROW]) for first in range(0, len(words), WORDS_PER_ROW)]
    ids, starts, offsets = _encode(backend, rows)
    size = np.fromiter(map(len, words), np.int64, len(words)) + 1
    begin = np.cumsum(size) - size
    row_begin = begin[::WORDS_PER_ROW]
    word = np.searchsorted(begin, offsets[:, 0] + np.repeat(row_begin, np.diff(starts)), "right") - 1
    offsets -= (begin - np.repeat(row_begin, WORDS_PER_ROW)[: len(words)])[word, None].astype(np.int32)
    return ids, np.searchsorted(word, np.arange(len(words) + 1)), offsets


def _splits_at_blanks(backend) -> bool:
    """Whether tokens on both sides of a blank are what they are without the other side, as in BERT's own pipeline."""
    parts = json.loads(backend.to_str())
    kinds = [(parts[name] or {}).get("type") for name in ("normalizer", "pre_tokenizer", "model")]
    plain = not any(t["lstrip"] or t["rstrip"] or " " in t["content"] for t in parts["added_tokens"])
    return plain and kinds == ["BertNormalizer", "BertPreTokenizer", "WordPiece"]


def _encode(backend, texts: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `tokenise` gives, by the tokenizer alone."""
    ids, offsets, lengths = [], [], [0]
    for first in range(0, len(texts), TEXTS_PER_CALL):
        encodings = backend.encode_batch(texts[first : first + TEXTS_PER_CALL], add_special_tokens=False)
        parts = [encoding.ids for encoding in encodings]
        lengths += map(len, parts)
        ids.append(np.fromiter(chain.from_iterable(parts), np.int32))
        pairs = chain.from_iterable(encoding.offsets for encoding in encodings)
        offsets.append(np.fromiter(chain.from_iterable(pairs), np.int32, 2 * len(ids[-1])).reshape(-1, 2))
    return np.concatenate(ids), np.cumsum(lengths), np.concatenate(offsets)


def ranges(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """begins[0], begins[0] + 1, ... (lengths[0] numbers), then the same from begins[1], and so on."""
    ends = np.cumsum(lengths)
    return np.repeat(begins - (ends - lengths), lengths) + np.arange(ends[-1])


def distinct(texts: Iterable[str]) -> tuple[list[str], np.ndarray]:
    """The distinct texts in order of appearance, and for every text its index among them."""
    index: defaultdict[str, int] = defaultdict(count().__next__)
    which = np.fromiter(map(index.__getitem__, texts), np.int64)
    return list(index), which


def build_tokenizer(source: str) -> Tokenizer:
    """The tokenizer of a run: of the synthetic text for "tiny", else of a folder or hub name. Never remote code."""
    if source == "tiny":
        return BertTokenizer(vocab={word: index for index, word in enumerate(vocabulary())})
    return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
