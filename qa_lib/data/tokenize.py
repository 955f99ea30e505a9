"""Tokens and character offsets of many texts at once, in flat arrays; tokenizers and what they do.

Text is repetitive: half of all words are a few hundred different ones, and a paragraph of SQuAD
comes with some seven questions. A WordPiece tokenizer (Schuster and Nakajima 2012, BERT's) cuts at
blanks before anything else, so that the tokens of a word are the same wherever it stands: each
distinct word is tokenized once, and its tokens are copied to where it stands, with their offsets
moved. Tokenizers for which that does not hold take each distinct text whole.

Here is also what a tokenizer says about itself: how it joins a question and a context, and whether
it gives token types. All variants share this.
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

# One call's encodings take some 150 bytes a token, so that not all texts go into one call.
TEXTS_PER_CALL = 2_000
WORDS_PER_ROW = 256  # words that are joined to a text, as a call costs more than a word


def fast_backend(tokenizer) -> tokenizers.Tokenizer:
    """Return the backend of a fast tokenizer of transformers, without truncation and padding.

    Its file or an earlier call may have left these switched on; transformers sets both at each call
    of its own. Raises UserError for a tokenizer that is not fast.
    """
    if not getattr(tokenizer, "is_fast", False):
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise UserError(
            f"{name}: no fast tokenizer of transformers, which alone say where their tokens "
            "come from"
        )
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return backend


@dataclass(frozen=True)
class Layout:
    """How a tokenizer joins a question and a context to one window."""

    before: list[int]  # the special tokens before the question: BERT's [CLS]
    between: list[int]  # between question and context: BERT's [SEP]
    after: list[int]  # after the context: BERT's [SEP]
    pad: int  # the token that pads
    segments: bool  # whether token types go with the tokens: 0 up to the context, 1 from there

    @property
    def size(self) -> int:
        """Special tokens in a window."""
        return len(self.before) + len(self.between) + len(self.after)


def find_layout(tokenizer, backend: tokenizers.Tokenizer) -> Layout:
    """Return how the tokenizer joins a pair of texts. Raises UserError where no window can be made
    of that."""
    name = tokenizer.name_or_path or type(tokenizer).__name__
    if tokenizer.pad_token_id is None:
        raise UserError(f"{name}: the tokenizer has no token that pads (pad_token)")
    pair = backend.encode("who", "he")
    # A letter for each token: "-" for a special token, "0" for the question's, "1" for the
    # context's.
    origins = "".join("-" if text is None else str(text) for text in pair.sequence_ids)
    parts = re.fullmatch("(?P<before>-+)0+(?P<between>-*)1+(?P<after>-*)", origins)
    if not parts:
        raise UserError(
            f"{name}: the tokenizer does not join texts as a special token, question and context"
        )
    return Layout(
        before=pair.ids[slice(*parts.span("before"))],
        between=pair.ids[slice(*parts.span("between"))],
        after=pair.ids[slice(*parts.span("after"))],
        pad=tokenizer.pad_token_id,
        segments="token_type_ids" in tokenizer.model_input_names and 1 in pair.type_ids,
    )


class Pieces(NamedTuple):
    """The tokens of many texts, without special tokens."""

    ids: np.ndarray  # int32 [T]
    starts: np.ndarray  # int64 [texts + 1]: where each text's tokens begin
    # int32 [T, 2]: first character of each token in its text, and one past its last
    offsets: np.ndarray


def tokenize(backend: tokenizers.Tokenizer, texts: list[str]) -> Pieces:
    """Return the tokens of all texts. Where a blank always ends a token, each distinct word is
    tokenized once."""
    if not _splits_at_blanks(backend):
        return _encode(backend, texts)

    words, word_of = distinct(chain.from_iterable(text.split(" ") for text in texts))
    pieces = _encode_words(backend, words)
    words_in_text = np.array([text.count(" ") + 1 for text in texts])
    first_word = np.cumsum(words_in_text) - words_in_text  # of each text

    # Where each word begins in its text, in characters: a blank follows each.
    size = np.array([len(word) + 1 for word in words])[word_of]
    begin = np.cumsum(size) - size
    begin -= np.repeat(begin[first_word], words_in_text)

    # Copy the tokens of each word to where it stands.
    length = np.diff(pieces.starts)[word_of]
    source = ranges(pieces.starts[word_of], length)
    moved = np.repeat(begin.astype(np.int32), length)
    word_starts = np.concatenate([[0], np.cumsum(length)])
    return Pieces(
        ids=pieces.ids[source],
        starts=word_starts[np.append(first_word, len(word_of))],
        offsets=pieces.offsets[source] + moved[:, None],
    )


def _encode_words(backend: tokenizers.Tokenizer, words: list[str]) -> Pieces:
    """Return the tokens of words without blanks.

    Words are joined to rows, which are encoded, and the rows' tokens are told apart by character.
    """
    rows = []
    for first in range(0, len(words), WORDS_PER_ROW):
        rows.append(" ".join(words[first : first + WORDS_PER_ROW]))
    ids, row_starts, offsets = _encode(backend, rows)

    # Where each word and each row begins, in characters of all rows in one, a blank after each
    # word.
    size = np.array([len(word) + 1 for word in words])
    begin = np.cumsum(size) - size
    row_begin = begin[::WORDS_PER_ROW]
    token_begin = offsets[:, 0] + np.repeat(row_begin, np.diff(row_starts))
    word = np.searchsorted(begin, token_begin, side="right") - 1  # of each token

    begin_in_row = begin - np.repeat(row_begin, WORDS_PER_ROW)[: len(words)]
    offsets -= begin_in_row[word, None].astype(np.int32)
    starts = np.searchsorted(word, np.arange(len(words) + 1))
    return Pieces(ids, starts, offsets)


def _splits_at_blanks(backend: tokenizers.Tokenizer) -> bool:
    """Say whether tokens on both sides of a blank are what they are without the other side, as in
    BERT's own pipeline."""
    parts = json.loads(backend.to_str())
    for token in parts["added_tokens"]:
        if token["lstrip"] or token["rstrip"] or " " in token["content"]:
            return False
    kinds = [(parts[name] or {}).get("type") for name in ("normalizer", "pre_tokenizer", "model")]
    return kinds == ["BertNormalizer", "BertPreTokenizer", "WordPiece"]


def _encode(backend: tokenizers.Tokenizer, texts: list[str]) -> Pieces:
    """Return the tokens of texts as the tokenizer gives them, text by text."""
    ids, offsets = [], []
    for first in range(0, len(texts), TEXTS_PER_CALL):
        part = texts[first : first + TEXTS_PER_CALL]
        encodings = backend.encode_batch(part, add_special_tokens=False)
        for text, encoding in zip(part, encodings, strict=True):
            places = np.array(encoding.offsets, np.int32).reshape(-1, 2)
            ids.append(np.array(encoding.ids, np.int32))
            offsets.append(_without_blank(text, places))
    starts = np.cumsum([0, *map(len, ids)])
    return Pieces(np.concatenate(ids), starts, np.concatenate(offsets))


def _without_blank(text: str, offsets: np.ndarray) -> np.ndarray:
    """Return offsets [tokens, 2] without the blank that a token begins with, and no answer should.

    RoBERTa's tokenizer leaves the blank out itself, and ModernBERT's does not.
    """
    # A character is added at the end, where a token of no characters may begin.
    encoded = f"{text}.".encode("utf-32-le", "surrogatepass")
    characters = np.frombuffer(encoded, np.uint32)
    begins, ends = offsets.T
    has_blank = (ends - begins > 1) & (characters[begins] == ord(" "))
    return np.stack([begins + has_blank, ends], axis=1)


def ranges(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return begins[0], begins[0] + 1, ... (lengths[0] numbers), then begins[1], and so on."""
    numbers = np.repeat(begins - (np.cumsum(lengths) - lengths), lengths)
    numbers += np.arange(len(numbers))
    return numbers


def distinct(texts: Iterable[str]) -> tuple[list[str], np.ndarray]:
    """Return the distinct texts in order of appearance, and for every text its index among them."""
    index: defaultdict[str, int] = defaultdict(count().__next__)  # numbers a text when it is new
    index_of = np.fromiter(map(index.__getitem__, texts), np.int64)
    return list(index), index_of


def build_tokenizer(source: str | Path):
    """Return a run's tokenizer: the synthetic text's for "tiny", else that of a folder or hub name.

    Code that comes with a tokenizer is never run. A warning is given for a tokenizer that may be
    cased and is read as uncased. Raises UserError where there is none, or one that transformers
    cannot read.
    """
    # Their import takes a second, for which drivers do not wait.
    from transformers import AutoTokenizer, BertTokenizer

    if source == "tiny":
        return BertTokenizer(vocab={word: index for index, word in enumerate(vocabulary())})
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, trust_remote_code=False, local_files_only=Path(source).is_dir()
        )
        tokenizer("a word")  # some of what is in its files is only looked at when it is used
        # transformers makes a tokenizer of special tokens alone where a folder has none.
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise ValueError("it has no words; tokenizer.json or vocab.txt is missing")
        if _drops_capitals(tokenizer) and not _names_its_case(source):
            _warn_of_capitals(os.fspath(source))
        return tokenizer
    except Exception as error:  # whatever the libraries make of a damaged folder
        raise UserError(f"{source}: its tokenizer cannot be loaded: {first_line(error)}") from None


def _drops_capitals(tokenizer) -> bool:
    """Say whether a tokenizer makes all letters small although its vocabulary has capitals."""
    normalizer = json.loads(tokenizer.backend_tokenizer.to_str())["normalizer"] or {}
    if not normalizer.get("lowercase"):
        return False
    words = tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys()
    return any(word != word.lower() for word in words)


def _names_its_case(source: str | Path) -> bool:
    """Say whether tokenizer_config.json has a word on letters being made small, which transformers
    takes for granted otherwise."""
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    is_folder = Path(source).is_dir()
    return "do_lower_case" in get_tokenizer_config(source, local_files_only=is_folder)


@cache  # warns once: a run and a page load a tokenizer more than once
def _warn_of_capitals(source: str) -> None:
    log.warning(
        "%s: read as uncased, though its vocabulary has words with capitals; if it is cased, put "
        '{"do_lower_case": false} into its tokenizer_config.json',
        source,
    )
