"""From questions to windows of tokens: what `BertForQuestionAnswering` reads, flat and memory-mapped.

Every distinct paragraph and question is tokenised once; the windows are then assembled from the pieces in numpy.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
import tokenizers

from qa_lib.data.squad import DataError, Example, Source
from qa_lib.data.tokenise import bare, check_layout, distinct, ranges, tokenise
from qa_lib.errors import UserError

log = logging.getLogger(__name__)

LAYOUT = 2  # of the cached files; raise it when they, or what is in them, change
WINDOWS_PER_CALL = 8_192


class Features:
    """Windows `[CLS] question [SEP] context [SEP]` over the examples of one source, one row a window.

    For n windows of T tokens in all (none of them padding):
      tokens           int32 [T]     token ids; window i is tokens[starts[i] : starts[i + 1]]
      starts           int64 [n + 1]
      example          int32 [n]     index into the source's examples, ascending
      question_length  int32 [n]     tokens of the question, without [CLS] and [SEP]
      start_positions  int32 [n]     first and last token of the first gold answer, counted from [CLS];
      end_positions    int32 [n]     0 and 0 ([CLS]) where there is none, or none wholly inside the window
    `examples_sha256` is the hash of the source's question ids in order: what `decode` checks its examples against.
    """

    def __init__(self, arrays: dict[str, np.ndarray], meta: dict):
        self.tokens = arrays["tokens"]
        self.starts = arrays["starts"]
        self.example = arrays["example"]
        self.question_length = arrays["question_length"]
        self.start_positions = arrays["start_positions"]
        self.end_positions = arrays["end_positions"]
        # Offsets belong to texts, not to windows: each window knows where in them its question and context begin.
        self._text_offsets = arrays["text_offsets"]
        self._question_from = arrays["question_from"]
        self._context_from = arrays["context_from"]
        self.max_length: int = meta["max_length"]
        self.stride: int = meta["stride"]
        self.pad_token: int = meta["pad_token"]
        self.n_examples: int = meta["n_examples"]
        self.examples_sha256: str = meta["examples_sha256"]

    def __len__(self) -> int:
        return len(self.example)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n]: tokens of each window, special tokens included."""
        return np.diff(self.starts)

    @property
    def context_span(self) -> np.ndarray:
        """int64 [n, 2]: position of each window's first context token, and one past its last."""
        return np.stack([self.question_length + 2, self.lengths - 1], axis=1)

    def offsets(self, i: int) -> np.ndarray:
        """int32 [length, 2]: first character and one past the last, in the question or the context, for window i.

        The question is the one without leading blanks; special tokens have (0, 0).
        """
        length = int(self.starts[i + 1] - self.starts[i])
        question, first = int(self.question_length[i]), int(self.question_length[i]) + 2
        offsets = np.zeros((length, 2), np.int32)
        offsets[1 : question + 1] = self._text_offsets[self._question_from[i] :][:question]
        offsets[first : length - 1] = self._text_offsets[self._context_from[i] :][: length - 1 - first]
        return offsets

    def characters(self, rows: np.ndarray, first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First character, and one past the last, of the context text between two token positions, per window.

        `rows` int [k] are windows, `first` and `last` int [k] context positions in them; both results int32 [k].
        """
        base = self._context_from[rows] - self.question_length[rows] - 2
        return self._text_offsets[base + first, 0], self._text_offsets[base + last, 1]

    def batch(self, indices: np.ndarray, pad_to: int) -> dict[str, np.ndarray]:
        """Windows `indices` (b of them) as a model's keyword arguments, padded on the right to `pad_to` tokens.

        int64: input_ids, attention_mask, token_type_ids [b, pad_to]; start_positions, end_positions [b].
        Raises ValueError if a window is longer than `pad_to`.
        """
        indices = np.asarray(indices)
        first = self.starts[indices]
        lengths = self.starts[indices + 1] - first
        if len(indices) and lengths.max() > pad_to:
            raise ValueError(f"a window of {lengths.max()} tokens does not fit into {pad_to}")
        position = np.arange(pad_to)
        real = position < lengths[:, None]
        # Past the window's end the index stays on its first token, which exists; the mask then replaces what it reads.
        ids = np.where(real, self.tokens[first[:, None] + position * real], np.int64(self.pad_token))
        return {
            "input_ids": ids,
            "attention_mask": real.astype(np.int64),
            "token_type_ids": (real & (position >= self.question_length[indices][:, None] + 2)).astype(np.int64),
            "start_positions": self.start_positions[indices].astype(np.int64),
            "end_positions": self.end_positions[indices].astype(np.int64),
        }


def examples_sha256(examples: list[Example]) -> str:
    """Hash of the question ids in order (hex)."""
    return hashlib.sha256(json.dumps([example.id for example in examples]).encode()).hexdigest()


def build_features(
    source: Source,
    tokenizer,
    max_length: int = 384,
    stride: int = 128,
    cache: str | os.PathLike | Literal[False] | None = None,
) -> Features:
    """The windows of all questions of `source`, as `tokenizer` with truncation="only_second" cuts them.

    `tokenizer` is a fast BERT-like tokenizer of transformers. Windows hold at most `max_length` tokens; neighbours
    over the same paragraph share `stride` of them. The result is kept under `cache` (a folder; None stands for
    $QA_LIB_CACHE, else $XDG_CACHE_HOME/qa_lib, else ~/.cache/qa_lib; False for not at all) by the hash of data,
    tokenizer and settings, and is memory-mapped from there without reading the data again.
    Raises `DataError` for bad data and for a question that leaves its context no room, `UserError` for a tokenizer
    or lengths that cannot work.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            f"{type(tokenizer).__name__} is no fast tokenizer, so it does not tell where its tokens come from"
        )
    if max_length < 4 or not 0 <= stride < max_length - 3:
        raise UserError(f"max_length {max_length} with stride {stride}: 0 <= stride < max_length - 3 is needed")
    with bare(tokenizer.backend_tokenizer) as backend:
        check_layout(tokenizer, backend)
        if cache is False:
            return Features(*_build(source, tokenizer, backend, max_length, stride))
        folder = (_default_cache() if cache is None else Path(cache)) / _key(
            source, tokenizer, backend, max_length, stride
        )
        features = _load(folder)
        if features is None:
            arrays, meta = _build(source, tokenizer, backend, max_length, stride)
            features = _store(folder, arrays, meta) or Features(arrays, meta)
        return features


def _build(source: Source, tokenizer, backend, max_length: int, stride: int) -> tuple[dict[str, np.ndarray], dict]:
    examples = source.examples
    # The reference recipe strips blanks in front of questions: some are so long that they alone would fill a window.
    questions = (example.question.lstrip() for example in examples)
    texts, which = distinct(chain(questions, (example.context for example in examples)))
    ids, starts, offsets = tokenise(backend, texts)

    question, context = which[: len(examples)], which[len(examples) :]
    question_length, context_length = np.diff(starts)[question], np.diff(starts)[context]
    room = max_length - 3 - question_length
    cut = context_length > room
    _refuse_cramped(source, cut & (room <= stride), room, max_length, stride)

    # Windows begin every `room - stride` tokens, and the first that reaches the paragraph's end is the last.
    step = np.where(cut, room - stride, 1)
    windows = np.where(cut, -(-(context_length - room) // step), 0) + 1
    example = np.repeat(np.arange(len(examples)), windows)
    begin = (np.arange(len(example)) - np.repeat(np.cumsum(windows) - windows, windows)) * step[example]
    taken = np.minimum(context_length[example] - begin, room[example])
    arrays = {
        "example": example.astype(np.int32),
        "question_length": question_length[example].astype(np.int32),
        "text_offsets": offsets,
        "question_from": starts[question[example]],
        "context_from": starts[context[example]] + begin,
        "starts": np.concatenate([[0], np.cumsum(question_length[example] + taken + 3)]),
    }
    pool = np.concatenate([np.array([tokenizer.cls_token_id, tokenizer.sep_token_id], np.int32), ids])
    arrays["tokens"] = _assemble(arrays, pool, taken)
    first, last = _answer_tokens(examples, context, starts, offsets)
    arrays["start_positions"], arrays["end_positions"] = _answer_positions(arrays, examples, first, last, begin, taken)
    meta = {
        "max_length": max_length,
        "stride": stride,
        "pad_token": tokenizer.pad_token_id,
        "n_examples": len(examples),
        "examples_sha256": examples_sha256(examples),
    }
    return arrays, meta


def _refuse_cramped(source: Source, cramped: np.ndarray, room: np.ndarray, max_length: int, stride: int) -> None:
    """Windows could not move on over a context whose question leaves it no more room than the stride."""
    if cramped.any():
        i = int(np.argmax(cramped))
        example = source.examples[i]
        raise DataError(
            f"{source.name}: article {example.title[:80]!r}, question {example.id!r}: its {max_length - 3 - room[i]} "
            f"tokens leave {max(room[i], 0)} of {max_length} for the context, which must be more than the stride "
            f"{stride} ({cramped.sum()} such questions)"
        )


def _assemble(arrays: dict[str, np.ndarray], pool: np.ndarray, taken: np.ndarray) -> np.ndarray:
    """The windows' tokens out of `pool`: [CLS], [SEP], then the tokens of all texts."""
    tokens = np.empty(arrays["starts"][-1], np.int32)
    one = np.ones_like(taken)
    lengths = np.stack([one, arrays["question_length"], one, taken, one], axis=1)
    begins = np.stack([0 * one, arrays["question_from"] + 2, one, arrays["context_from"] + 2, one], axis=1)
    for row in range(0, len(taken), WINDOWS_PER_CALL):
        rows = slice(row, row + WINDOWS_PER_CALL)
        source = ranges(begins[rows].ravel(), lengths[rows].ravel())
        target = arrays["starts"][row]
        tokens[target : target + len(source)] = pool[source]
    return tokens


def _answer_tokens(examples, context, text_starts, offsets) -> tuple[np.ndarray, np.ndarray]:
    """Per example, the first gold answer's first and last token within its paragraph; anything if there is none.

    The first token is the last one that starts no later than the answer, the last token the first one that ends no
    earlier. One search does all of them: number of the text and offset together rise from token to token (the
    accumulations hold that where a tokenizer's own offsets step back).
    """
    text = np.repeat(np.arange(len(text_starts) - 1), np.diff(text_starts)) << 32
    starts = np.maximum.accumulate(text | offsets[:, 0])
    ends = np.minimum.accumulate((text | offsets[:, 1])[::-1])[::-1]
    begin, end = _answer_characters(examples)
    first = np.searchsorted(starts, (context << 32) + begin, "right") - 1 - text_starts[context]
    last = np.searchsorted(ends, (context << 32) + end, "left") - text_starts[context]
    return first, last


def _answer_characters(examples) -> tuple[np.ndarray, np.ndarray]:
    """First character of each first gold answer and one past its last; 0 and 0 without answers."""
    spans = ((e.answers[0][1], e.answers[0][1] + len(e.answers[0][0])) if e.answers else (0, 0) for e in examples)
    spans = np.fromiter(chain.from_iterable(spans), np.int64, 2 * len(examples)).reshape(-1, 2)
    return spans[:, 0], spans[:, 1]


def _answer_positions(arrays, examples, first, last, begin, taken) -> tuple[np.ndarray, np.ndarray]:
    """Start and end position in every window (int32 [n]), 0 where the answer is not wholly inside."""
    example = arrays["example"]
    answered = np.array([bool(e.answers) for e in examples])[example]
    inside = np.flatnonzero(answered & (taken > 0))
    example, begin, taken = example[inside], begin[inside], taken[inside]
    character, end_character = (ends[example] for ends in _answer_characters(examples))
    context_from = arrays["context_from"][inside]
    whole = arrays["text_offsets"][context_from, 0] <= character
    whole &= arrays["text_offsets"][context_from + taken - 1, 1] >= end_character
    shift = arrays["question_length"][inside] + 2
    # An answer that begins in the window's last token stays there: the reference recipe's search runs on into [SEP].
    start = np.minimum(first[example] - begin, taken - 1) + shift
    end = np.maximum(last[example] - begin, 0) + shift
    positions = np.zeros((2, len(arrays["example"])), np.int32)
    positions[0, inside] = np.where(whole, start, 0)
    positions[1, inside] = np.where(whole, end, 0)
    return positions[0], positions[1]


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("QA_LIB_CACHE") or Path(base) / "qa_lib") / "features"


def _key(source: Source, tokenizer, backend, max_length: int, stride: int) -> str:
    """Hash of all that the windows depend on."""
    special = [tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id]
    parts = [LAYOUT, tokenizers.__version__, source.sha256, source.fix_spans, special, max_length, stride]
    return hashlib.sha256(json.dumps([*parts, backend.to_str()]).encode()).hexdigest()[:32]


def _load(folder: Path) -> Features | None:
    """The cached features, or None if there are none that can be read."""
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
        # As plain arrays over the mapping: indexing np.memmap itself costs several times as much.
        arrays = {name: np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in meta["arrays"]}
        return Features(arrays, meta)
    except FileNotFoundError:
        return None
    except Exception as error:  # NumPy has many for a file that it cannot read, and all mean the same
        log.warning("%s: damaged, made anew (%s)", folder, error)
        return None


def _store(folder: Path, arrays: dict[str, np.ndarray], meta: dict) -> Features | None:
    """Put a whole cache entry in place at once; None if the disk does not let us, which only costs time."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix="tmp-", dir=folder.parent))
        try:
            for name, array in arrays.items():
                np.save(work / f"{name}.npy", array)
            (work / "meta.json").write_text(json.dumps({**meta, "arrays": list(arrays)}))
            shutil.rmtree(folder, ignore_errors=True)  # a damaged entry, or a neighbour's equal one
            work.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        log.warning("%s: features not cached (%s)", folder, error)
        return None
    return _load(folder)
