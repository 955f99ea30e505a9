"""Tokens and character offsets of many texts at once, each distinct text and word tokenized once, in flat arrays.

Text is repetitive: half of all words are a few hundred different ones, and a paragraph of SQuAD comes with some seven
questions. A WordPiece tokenizer (Schuster and Nakajima 2012, BERT's) cuts at blanks before anything else, so that the
tokens of a word are the same wherever it stands: they are looked up once and copied from then on, with offsets moved
to where the word is. Tokenizers for which that does not hold take each text whole. Here is also what a tokenizer says
about itself: how it joins a question and a context, and whether it gives token types. All variants share this.
"""

import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers

from qa_lib.data.synthetic import vocabulary
from qa_lib.errors import UserError, first_line

log = logging.getLogger(__name__)

TEXTS_PER_CALL = 2_000  # one call's encodings take some 150 bytes a token, so not all texts at once
WORDS_PER_ROW = 256


def bare(tokenizer) -> tokenizers.Tokenizer:
    """The backend of a fast tokenizer of transformers, without the truncation and padding that its file or an earlier
    call left switched on; transformers sets both at each call of its own. Raises UserError for another tokenizer."""
    if not getattr(tokenizer, "is_fast", False):
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise UserError(
            f"{name}: no fast tokenizer of transformers, which alone say where their tokens come from"
        )
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return backend


@dataclass(frozen=True)
class Layout:
    """How a tokenizer joins a question and a context: the special tokens before, between and after them (BERT's [CLS],
    [SEP], [SEP]), the token that pads, and whether token types go with them, 0 up to the context and 1 from there."""

    before: list[int]
    between: list[int]
    after: list[int]
    pad: int
    segments: bool

    @property
    def size(self) -> int:
        """Special tokens in a window."""
        return len(self.before) + len(self.between) + len(self.after)


def find_layout(tokenizer, backend) -> Layout:
    """What the tokenizer does with a pair of texts; UserError where no window can be made of that."""
    pair = backend.encode("who", "he")
    whose = "".join("-" if text is None else str(text) for text in pair.sequence_ids)
    parts = re.fullmatch("(-+)(0+)(-*)(1+)(-*)", whose)
    name = tokenizer.name_or_path or type(tokenizer).__name__
    if tokenizer.pad_token_id is None:
        raise UserError(f"{name}: the tokenizer has no token that pads (pad_token)")
    if not parts:
        raise UserError(
            f"{name}: the tokenizer does not join texts as a special token, question and context"
        )
    before, _, between, _, after = (pair.ids[slice(*parts.span(group))] for group in range(1, 6))
    segments = "token_type_ids" in tokenizer.model_input_names and 1 in pair.type_ids
    return Layout(before, between, after, tokenizer.pad_token_id, segments)


class Pieces(NamedTuple):
    """The tokens of many texts, without special tokens."""

    ids: np.ndarray  # int32 [T]
    starts: np.ndarray  # int64 [texts + 1]: where each text's tokens begin
    offsets: (
        np.ndarray
    )  # int32 [T, 2]: first character of each token in its text, and one past its last


def tokenize(backend, texts: list[str]) -> Pieces:
    """The tokens of all texts; where a blank always ends a token, each distinct word is tokenized once."""
    if not _splits_at_blanks(backend):
        return _encode(backend, texts)
    words = np.array([text.count(" ") + 1 for text in texts])
    known, word = distinct(chain.from_iterable(text.split(" ") for text in texts))
    ids, starts, offsets = _encode_words(backend, known)

    size = np.array([len(text) + 1 for text in known])[word]
    first_word = np.cumsum(words) - words
    begin = np.cumsum(size) - size  # of each word, in characters, over all texts joined by blanks
    begin -= np.repeat(begin[first_word], words)
    lengths = np.diff(starts)[word]
    source = ranges(starts[word], lengths)
    text_starts = np.concatenate([[0], np.cumsum(lengths)])[np.append(first_word, len(word))]
    return Pieces(
        ids[source],
        text_starts,
        offsets[source] + np.repeat(begin.astype(np.int32), lengths)[:, None],
    )


def _encode_words(backend, words: list[str]) -> Pieces:
    """As `_encode` for words without blanks: joined to rows, as a call costs more than a word, and told apart after."""
    rows = [
        " ".join(words[first : first + WORDS_PER_ROW])
        for first in range(0, len(words), WORDS_PER_ROW)
    ]
    ids, starts, offsets = _encode(backend, rows)
    size = np.array([len(word) + 1 for word in words])
    begin = np.cumsum(size) - size
    row_begin = begin[::WORDS_PER_ROW]
    word = (
        np.searchsorted(begin, offsets[:, 0] + np.repeat(row_begin, np.diff(starts)), "right") - 1
    )
    offsets -= (begin - np.repeat(row_begin, WORDS_PER_ROW)[: len(words)])[word, None].astype(
        np.int32
    )
    return Pieces(ids, np.searchsorted(word, np.arange(len(words) + 1)), offsets)


def _splits_at_blanks(backend) -> bool:
    """Whether tokens on both sides of a blank are what they are without the other side, as in BERT's own pipeline."""
    parts = json.loads(backend.to_str())
    kinds = [(parts[name] or {}).get("type") for name in ("normalizer", "pre_tokenizer", "model")]
    plain = not any(
        t["lstrip"] or t["rstrip"] or " " in t["content"] for t in parts["added_tokens"]
    )
    return plain and kinds == ["BertNormalizer", "BertPreTokenizer", "WordPiece"]


def _encode(backend, texts: list[str]) -> Pieces:
    """What `tokenize` gives, by the tokenizer alone."""
    ids, offsets = [], []
    for first in range(0, len(texts), TEXTS_PER_CALL):
        part = texts[first : first + TEXTS_PER_CALL]
        for text, encoding in zip(
            part, backend.encode_batch(part, add_special_tokens=False), strict=True
        ):
            ids.append(np.array(encoding.ids, np.int32))
            offsets.append(
                _without_blank(text, np.array(encoding.offsets, np.int32).reshape(-1, 2))
            )
    return Pieces(np.concatenate(ids), np.cumsum([0, *map(len, ids)]), np.concatenate(offsets))


def _without_blank(text: str, offsets: np.ndarray) -> np.ndarray:
    """Offsets [tokens, 2] without the blank that a token begins with, and no answer should: RoBERTa's tokenizer leaves
    it out itself, and ModernBERT's does not."""
    coded = f"{text}.".encode(
        "utf-32-le", "surrogatepass"
    )  # with a character after its end, where a token may begin
    characters = np.frombuffer(coded, np.uint32)
    begins, ends = offsets.T
    blank = (ends - begins > 1) & (characters[begins] == ord(" "))
    return np.stack([begins + blank, ends], axis=1)


def ranges(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """begins[0], begins[0] + 1, ... (lengths[0] numbers), then the same from begins[1], and so on."""
    numbers = np.repeat(begins - (np.cumsum(lengths) - lengths), lengths)
    numbers += np.arange(len(numbers))
    return numbers


def distinct(texts: Iterable[str]) -> tuple[list[str], np.ndarray]:
    """The distinct texts in order of appearance, and for every text its index among them."""
    index: defaultdict[str, int] = defaultdict(count().__next__)
    which = np.fromiter(map(index.__getitem__, texts), np.int64)
    return list(index), which


def build_tokenizer(source: str | Path):
    """The tokenizer of a run: of the synthetic text for "tiny", else of a folder or hub name. Never remote code.

    Warns of one that may be cased and is read as uncased. Raises UserError where there is none, or one that
    transformers cannot read.
    """
    from transformers import AutoTokenizer, BertTokenizer  # a second, for which drivers do not wait

    if source == "tiny":
        return BertTokenizer(vocab={word: index for index, word in enumerate(vocabulary())})
    try:
        found = AutoTokenizer.from_pretrained(
            source, trust_remote_code=False, local_files_only=Path(source).is_dir()
        )
        found("a word")  # some of what is in its files is only looked at when it is used
        if len(found) <= len(
            found.all_special_ids
        ):  # what transformers makes of a folder without one
            raise ValueError("it has no words; tokenizer.json or vocab.txt is missing")
        if _drops_capitals(found) and not _says_lower_case(source):
            _warn_of_capitals(os.fspath(source))
        return found
    except Exception as error:  # whatever the libraries make of a damaged folder
        raise UserError(f"{source}: its tokenizer cannot be loaded: {first_line(error)}") from None


def _drops_capitals(tokenizer) -> bool:
    """Whether a tokenizer makes all letters small although its vocabulary has words with capitals."""
    normalizer = json.loads(tokenizer.backend_tokenizer.to_str())["normalizer"] or {}
    words = tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys()
    return bool(normalizer.get("lowercase")) and any(word != word.lower() for word in words)


def _says_lower_case(source: str | Path) -> bool:
    """Whether tokenizer_config.json says if letters are made small; transformers takes it for granted otherwise."""
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    local = Path(source).is_dir()
    return "do_lower_case" in get_tokenizer_config(source, local_files_only=local)


@cache  # a run and a page load a tokenizer more than once
def _warn_of_capitals(source: str) -> None:
    log.warning(
        "%s: read as uncased, though its vocabulary has words with capitals; if it is cased, put "
        '{"do_lower_case": false} into its tokenizer_config.json',
        source,
    )
