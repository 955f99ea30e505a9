"""From questions to windows of tokens: what a question-answering model reads, in flat arrays.

A model reads a question and a paragraph together, in at most `max_length` tokens. A longer
paragraph is cut into windows that share `stride` tokens, each with the whole question before it
(Devlin et al. 2018, for SQuAD).

Every fast tokenizer of transformers cuts such windows itself, and tests compare the windows made
here with those. Paragraphs, though, repeat from question to question: here every distinct text is
tokenized once, and the windows are put together from the pieces, in less than a tenth of the time
of `datasets.map`. All variants share this step. Its result is cached on disk (data/cache.py), so
that a run begins in less than a second. data/labels.py says where in a window its answer is.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Literal

import numpy as np
import tokenizers

from qa_lib.data.cache import cached
from qa_lib.data.examples import Example
from qa_lib.data.files import DataError
from qa_lib.data.labels import answer_positions, find_golds
from qa_lib.data.squad import Source
from qa_lib.data.tokenize import (
    Layout,
    Pieces,
    distinct,
    fast_backend,
    find_layout,
    ranges,
    tokenize,
)
from qa_lib.errors import UserError

# Part of the key of cached files: raise it when they, or what is in them, change.
CACHE_VERSION = 6


@dataclass(eq=False)
class Samples:
    """Windows over the examples of one source: special tokens around question and context.

    There are n windows, which have T tokens in all, none of them padding. Positions are counted
    from a window's first token.
    """

    tokens: np.ndarray  # int32 [T]: token ids; window i is tokens[starts[i] : starts[i + 1]]
    # int32 [T, 2]: each token's first character in question or context, and one past its last; 0
    # and 0 for special tokens
    offsets: np.ndarray
    starts: np.ndarray  # int64 [n + 1]: where in `tokens` each window begins; the last is T
    example: np.ndarray  # int32 [n]: index into the source's examples, ascending
    # int64 [n, 2]: position of the first token of the context, and one past its last
    context: np.ndarray
    # int64 [n] each: positions of the first and last token of the gold answer; 0 and 0, a special
    # token's, where there is none, or none wholly inside the window
    start_positions: np.ndarray
    end_positions: np.ndarray
    max_length: int  # no window has more tokens
    pad_token: int  # the id of the token that pads
    segments: bool  # whether token types go with the windows: 0 up to the context, 1 from there
    n_examples: int
    # int32 [n_examples]: how many tokens each gold answer has; 0 where there is no answer, and
    # labels.TOKENLESS where no token has any of its characters
    gold_tokens: np.ndarray
    # Hash of the source's question ids in order, against which `decode` checks its examples.
    examples_sha256: str
    # Hash of the source's questions and paragraphs, whatever their ids and order.
    content_sha256: str

    def __len__(self) -> int:
        return len(self.example)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n]: how many tokens each window has, special tokens included."""
        return np.diff(self.starts)

    @property
    def held(self) -> np.ndarray:
        """bool [n_examples]: whether a window holds the gold answer whole."""
        # No answer is at position 0, which is a special token's.
        has_answer = self.start_positions > 0
        held = np.zeros(self.n_examples, bool)
        held[self.example[has_answer]] = True
        return held

    def characters(
        self, rows: np.ndarray, first: np.ndarray, last: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return where in the context the characters of some tokens begin and end.

        `rows` int [k] are windows, `first` and `last` int [k] positions of context tokens in them.
        The results are int32 [k] each: the first character of the token `first`, and one past the
        last of the token `last`.
        """
        begin = self.starts[rows]
        return self.offsets[begin + first, 0], self.offsets[begin + last, 1]

    def batch(self, indices: np.ndarray, pad_to: int) -> dict[str, np.ndarray]:
        """Return some windows as a model's keyword arguments.

        `indices` int [b] are the windows, which are padded on the right to `pad_to` tokens. The
        arrays are int64: input_ids, attention_mask and, where the tokenizer gives them,
        token_type_ids [b, pad_to]; start_positions, end_positions [b]. Raises ValueError if a
        window is longer than `pad_to`.
        """
        indices = np.asarray(indices)
        begin = self.starts[indices, None]
        lengths = self.starts[indices + 1, None] - begin
        if len(indices) and lengths.max() > pad_to:
            raise ValueError(f"a window of {lengths.max()} tokens does not fit into {pad_to}")
        position = np.arange(pad_to)
        is_token = position < lengths
        # Past the window's end the index stays on the window's first token, which exists; the mask
        # then replaces what it reads.
        ids = self.tokens[begin + position * is_token]
        batch = {
            # The ids are int32, and the type of the other choice makes the result int64.
            "input_ids": np.where(is_token, ids, np.int64(self.pad_token)),
            "attention_mask": is_token.astype(np.int64),
        }
        if self.segments:
            context_begin = self.context[indices, :1]
            is_in_second_text = is_token & (position >= context_begin)
            batch["token_type_ids"] = is_in_second_text.astype(np.int64)
        batch["start_positions"] = self.start_positions[indices]
        batch["end_positions"] = self.end_positions[indices]
        return batch


def examples_sha256(examples: list[Example]) -> str:
    """Return the hash (hex) of the question ids in order."""
    ids = json.dumps([example.id for example in examples])
    return hashlib.sha256(ids.encode()).hexdigest()


def content_sha256(examples: list[Example]) -> str:
    """Return the hash (hex) of questions and paragraphs, whatever their ids and order.

    Two sources with the same hash are the same data.
    """
    pairs = (f"{example.question}\0{example.context}" for example in examples)
    digests = sorted(hashlib.sha256(pair.encode()).digest() for pair in pairs)
    return hashlib.sha256(b"".join(digests)).hexdigest()


def build_samples(
    source: Source,
    tokenizer,
    max_length: int = 384,
    stride: int = 128,
    cache: str | os.PathLike | Literal[False] | None = None,
) -> Samples:
    """Return windows over all questions of `source`.

    `tokenizer` is a fast tokenizer of transformers; with truncation="only_second" it gives the same
    windows. Windows hold at most `max_length` tokens, and neighbours over the same paragraph share
    `stride` of them. The result is kept in the folder `cache` (None: data/cache.py says where;
    False: not at all) by the hash of data, tokenizer and settings, and is memory-mapped from there
    without reading the data again.

    Raises DataError for bad data and for a question that leaves its context no room, UserError for
    a tokenizer or lengths that cannot work.
    """
    backend = fast_backend(tokenizer)
    layout = find_layout(tokenizer, backend)
    if not 0 <= stride < max_length - layout.size:
        raise UserError(
            f"max_length {max_length} with stride {stride}: "
            f"0 <= stride < max_length - {layout.size} is needed"
        )

    def build() -> Samples:
        return _build(source, backend, layout, max_length, stride)

    if cache is False:
        return build()
    key = [
        CACHE_VERSION,
        tokenizers.__version__,
        source.sha256,
        source.labelled,
        asdict(layout),
        max_length,
        stride,
        backend.to_str(),
    ]
    return cached(key, Samples, build, cache)


def _build(source: Source, backend, layout: Layout, max_length: int, stride: int) -> Samples:
    """Return the samples that `build_samples` describes, made anew."""
    examples = source.examples
    # The reference script strips blanks in front of questions: some have so many that these alone
    # would fill a window.
    question_texts = (example.question.lstrip() for example in examples)
    context_texts = (example.context for example in examples)
    texts, text_of = distinct(chain(question_texts, context_texts))
    pieces = tokenize(backend, texts)
    text_length = np.diff(pieces.starts)  # in tokens

    # Each example has a question and a context: their texts, and their lengths.
    question, context = np.split(text_of, 2)
    question_length = text_length[question]
    context_length = text_length[context]
    room = max_length - layout.size - question_length  # for context in a window
    _refuse_cramped(source, question_length, context_length, room, max_length, stride)

    # Each window has an example, and some tokens of `pieces` as its part of the context.
    example, skipped = _cut(context_length, room, stride)
    part_begin = pieces.starts[context[example]] + skipped
    part_length = np.minimum(room[example], context_length[example] - skipped)
    tokens, offsets, lengths = _join(pieces, layout, question[example], part_begin, part_length)

    golds = find_golds(examples, pieces, context)
    in_part = answer_positions(golds.spans[example], pieces.offsets, part_begin, part_length)
    context_begin = len(layout.before) + question_length[example] + len(layout.between)
    start_positions, end_positions = np.where(in_part >= 0, context_begin + in_part, 0)
    return Samples(
        tokens=tokens,
        offsets=offsets,
        starts=np.concatenate([[0], np.cumsum(lengths)]),
        example=example.astype(np.int32),
        context=np.stack([context_begin, context_begin + part_length], axis=1),
        start_positions=start_positions,
        end_positions=end_positions,
        max_length=max_length,
        pad_token=layout.pad,
        segments=layout.segments,
        n_examples=len(examples),
        gold_tokens=golds.tokens,
        examples_sha256=examples_sha256(examples),
        content_sha256=content_sha256(examples),
    )


def _refuse_cramped(
    source: Source,
    question_length: np.ndarray,
    context_length: np.ndarray,
    room: np.ndarray,
    max_length: int,
    stride: int,
) -> None:
    """Raise DataError for a question whose windows could not move on over its context.

    That is one whose context is longer than its room in a window, and this room no larger than the
    tokens that windows share. Lengths and room are in tokens, int [examples].
    """
    cramped = (context_length > room) & (room <= stride)
    if not cramped.any():
        return
    index = int(np.argmax(cramped))  # of the first one
    example = source.examples[index]
    raise DataError(
        f"{source.name}: article {example.title[:80]!r}, question {example.id!r}: its "
        f"{question_length[index]} tokens leave {max(room[index], 0)} of {max_length} for the "
        f"context, which must be more than the stride {stride} ({cramped.sum()} such questions)"
    )


def _cut(
    context_length: np.ndarray, room: np.ndarray, stride: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut contexts into parts of at most `room` tokens, neighbours of which share `stride` tokens.

    A window has one part. The results are int64 [n] for the n windows of all examples: the example
    of each, and how many tokens of its context are before its part. A context without tokens has
    one window as well.
    """
    # Where room - stride is less than 1, one part holds the context (_refuse_cramped sees to that),
    # and any step will do.
    step = np.maximum(1, room - stride)
    beyond = np.maximum(0, context_length - room)  # tokens that the first part does not hold
    further_parts = (beyond + step - 1) // step  # beyond / step, rounded up
    parts = 1 + further_parts
    example = np.repeat(np.arange(len(parts)), parts)
    part = ranges(np.zeros_like(parts), parts)  # number of each part in its context: 0, 1, ...
    return example, step[example] * part


def _join(
    pieces: Pieces,
    layout: Layout,
    question: np.ndarray,
    part_begin: np.ndarray,
    part_length: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Join special tokens, question and part of the context to a window, for n windows.

    `question` int [n] says which text of `pieces` a window's question is. Its part of the context
    is the `part_length` tokens of `pieces` from `part_begin` on, int [n] each. The results are
    token ids int32 [T] and offsets int32 [T, 2] of all windows, and the length of each, int64 [n].
    """
    # Special tokens are put behind the others, so that all that windows need is in one array.
    special = [*layout.before, *layout.between, *layout.after]
    ids = np.concatenate([pieces.ids, np.array(special, np.int32)])
    offsets = np.concatenate([pieces.offsets, np.zeros((len(special), 2), np.int32)])

    # A window is five ranges of that array: before, question, between, part of the context, after.
    n = len(question)
    begins = np.empty((n, 5), np.int64)
    lengths = np.empty((n, 5), np.int64)
    lengths[:, 0] = len(layout.before)
    lengths[:, 1] = np.diff(pieces.starts)[question]
    lengths[:, 2] = len(layout.between)
    lengths[:, 3] = part_length
    lengths[:, 4] = len(layout.after)
    begins[:, 0] = len(pieces.ids)
    begins[:, 1] = pieces.starts[question]
    begins[:, 2] = begins[:, 0] + lengths[:, 0]
    begins[:, 3] = part_begin
    begins[:, 4] = begins[:, 2] + lengths[:, 2]
    indices = ranges(begins.ravel(), lengths.ravel())
    return ids[indices], offsets[indices], lengths.sum(axis=1)
