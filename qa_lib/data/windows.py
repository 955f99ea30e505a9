"""From questions to windows of tokens: what a question-answering model reads, flat and memory-mapped.

A model reads a question and a paragraph together, in at most `max_length` tokens. A longer paragraph is cut into
windows that share `stride` tokens, each with the whole question before it (Devlin et al. 2018, for SQuAD). Every fast
tokenizer of transformers cuts such windows itself, and what it cuts is the truth here. Where its tokens do not depend
on what stands beyond a blank, as with BERT's, there is a quicker way to the same windows: paragraphs repeat from
question to question, so that every distinct text is tokenized once and the windows are put together from the pieces.
That takes a tenth of the time of `datasets.map`, and a test holds both ways to equal windows. All variants share this
step; its result is cached on disk, so that a run begins in less than a second.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
import tokenizers

from qa_lib.data.squad import DataError, Example, Source
from qa_lib.data.tokenize import Layout, Pieces, bare, distinct, find_layout, splits_at_blanks, tokenize
from qa_lib.errors import UserError

log = logging.getLogger(__name__)

CACHE_VERSION = 4  # of the cached files; raise it when they, or what is in them, change
QUESTIONS_PER_CALL = 1_000

# Of which example a window is, its token ids and their offsets, each as arrays to be joined.
Window = tuple[int, Sequence[np.ndarray], Sequence[np.ndarray]]


@dataclass(eq=False)
class Samples:
    """Windows over the examples of one source: special tokens, question, special tokens, context, special tokens.

    There are n windows of T tokens in all, none of them padding. Positions are counted from a window's first token.
    """

    tokens: np.ndarray  # int32 [T]: token ids; window i is tokens[starts[i] : starts[i + 1]]
    offsets: np.ndarray  # int32 [T, 2]: each token's first character in question or context, and one past its last
    starts: np.ndarray  # int64 [n + 1]
    example: np.ndarray  # int32 [n]: index into the source's examples, ascending
    context: np.ndarray  # int64 [n, 2]: position of the first token of the context, and one past its last
    start_positions: np.ndarray  # int64 [n]: first and last token of the first gold answer; 0 and 0 where there is
    end_positions: np.ndarray  # int64 [n]: none, or none wholly inside the window
    max_length: int
    pad_token: int
    segments: bool  # whether token types go with the windows: 0 up to the context, and 1 from there
    n_examples: int
    examples_sha256: str  # of the source's question ids in order: what `decode` checks its examples against

    def __len__(self) -> int:
        return len(self.example)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n]: tokens of each window, special tokens included."""
        return np.diff(self.starts)

    def characters(self, rows: np.ndarray, first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First character, and one past the last, of the context text between two token positions, per window.

        `rows` int [k] are windows, `first` and `last` int [k] context positions in them; both results int32 [k].
        """
        begin = self.starts[rows]
        return self.offsets[begin + first, 0], self.offsets[begin + last, 1]

    def batch(self, indices: np.ndarray, pad_to: int) -> dict[str, np.ndarray]:
        """Windows `indices` (b of them) as a model's keyword arguments, padded on the right to `pad_to` tokens.

        int64: input_ids, attention_mask and, where the tokenizer gives them, token_type_ids [b, pad_to];
        start_positions, end_positions [b]. Raises ValueError if a window is longer than `pad_to`.
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
        batch = {"input_ids": ids, "attention_mask": real.astype(np.int64)}
        if self.segments:
            batch["token_type_ids"] = (real & (position >= self.context[indices, :1])).astype(np.int64)
        positions = {name: getattr(self, name)[indices] for name in ("start_positions", "end_positions")}
        return batch | positions


def examples_sha256(examples: list[Example]) -> str:
    """Hash of the question ids in order (hex)."""
    return hashlib.sha256(json.dumps([example.id for example in examples]).encode()).hexdigest()


def build_samples(
    source: Source, tokenizer, max_length: int = 384, stride: int = 128,
    cache: str | os.PathLike | Literal[False] | None = None,
) -> Samples:  # fmt: skip
    """The windows of all questions of `source`, as `tokenizer` with truncation="only_second" cuts them.

    `tokenizer` is a fast tokenizer of transformers. Windows hold at most `max_length` tokens; neighbours over the same
    paragraph share `stride` of them. The result is kept under `cache` (a folder; None stands for $QA_LIB_CACHE, else
    $XDG_CACHE_HOME/qa_lib, else ~/.cache/qa_lib; False for not at all) by the hash of data, tokenizer and settings, and
    is memory-mapped from there without reading the data again.
    Raises `DataError` for bad data and for a question that leaves its context no room, `UserError` for a tokenizer
    or lengths that cannot work.
    """
    with bare(tokenizer) as backend:
        layout = find_layout(tokenizer, backend)
        special = layout.size
        if max_length <= special or not 0 <= stride < max_length - special:
            raise UserError(
                f"max_length {max_length} with stride {stride}: 0 <= stride < max_length - {special} is needed"
            )
        if cache is False:
            return _build(source, tokenizer, layout, max_length, stride)
        key = _key(source, backend, layout, max_length, stride)
        folder = (default_cache() if cache is None else Path(cache)) / key
        found = load_entry(folder, Samples)
        return found or store_entry(folder, _build(source, tokenizer, layout, max_length, stride))


def _build(source: Source, tokenizer, layout: Layout, max_length: int, stride: int) -> Samples:
    examples, backend = source.examples, tokenizer.backend_tokenizer
    # The reference script strips blanks in front of questions: some are so long that they alone would fill a window.
    questions, contexts = [e.question.lstrip() for e in examples], [e.context for e in examples]
    texts, which = distinct(chain(questions, contexts))
    pieces = tokenize(backend, texts)
    question, context = which[: len(examples)], which[len(examples) :]
    lengths = np.diff(pieces.starts)
    room = max_length - layout.size - lengths[question]
    _refuse_cramped(source, lengths[question], lengths[context], room, max_length, stride)
    if splits_at_blanks(backend):
        windows = _assemble(pieces, layout, question, context, room, stride)
    else:
        windows = _overflow(tokenizer, questions, contexts, max_length, stride)
    tokens, offsets, size, example = [], [], [], []
    for number, ids, places in windows:
        tokens += ids
        offsets += places
        size.append(sum(map(len, ids)))
        example.append(number)
    tokens, offsets = np.concatenate(tokens), np.concatenate(offsets)
    first = len(layout.before) + lengths[question][example] + len(layout.between)
    context_span = np.stack([first, np.array(size) - len(layout.after)], axis=1)
    starts = np.concatenate([[0], np.cumsum(size)])
    example = np.array(example, np.int32)
    positions = _answer_positions(examples, offsets, starts, example, context_span)
    return Samples(
        *(tokens, offsets, starts, example, context_span, *positions),
        *(max_length, layout.pad, layout.segments, len(examples), examples_sha256(examples)),
    )


def _refuse_cramped(source: Source, question, context, room, max_length: int, stride: int) -> None:
    """Windows could not move on over a context whose question leaves it no more room than the stride. Lengths and room
    in tokens, int [examples]."""
    cramped = (context > room) & (room <= stride)
    if cramped.any():
        i = int(np.argmax(cramped))
        example = source.examples[i]
        raise DataError(
            f"{source.name}: article {example.title[:80]!r}, question {example.id!r}: its {question[i]} "
            f"tokens leave {max(room[i], 0)} of {max_length} for the context, which must be more than the stride "
            f"{stride} ({cramped.sum()} such questions)"
        )


def _overflow(tokenizer, questions: list[str], contexts: list[str], max_length: int, stride: int) -> Iterator[Window]:
    """The windows as the tokenizer itself cuts them."""
    for begin in range(0, len(questions), QUESTIONS_PER_CALL):
        part = slice(begin, begin + QUESTIONS_PER_CALL)
        found = tokenizer(
            questions[part],
            contexts[part],
            truncation="only_second",
            max_length=max_length,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        columns = found["overflow_to_sample_mapping"], found["input_ids"], found["offset_mapping"]
        for number, ids, offsets in zip(*columns, strict=True):
            yield begin + number, [np.array(ids, np.int32)], [np.array(offsets, np.int32)]


def _assemble(pieces: Pieces, layout: Layout, question, context, room, stride: int) -> Iterator[Window]:
    """The same windows out of what each text was tokenized to.

    `question` and `context` are the texts of each example, `room` is how many tokens of the context a window of it
    holds; int [examples].
    """
    special = [np.array(ids, np.int32) for ids in (layout.before, layout.between, layout.after)]
    before, between, after = ((ids, np.zeros((len(ids), 2), np.int32)) for ids in special)
    starts = pieces.starts.tolist()

    def cut(begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        return pieces.ids[begin:end], pieces.offsets[begin:end]

    for number, (q, c, most) in enumerate(zip(question.tolist(), context.tolist(), room.tolist(), strict=True)):
        asked = cut(starts[q], starts[q + 1])
        begin, stop = starts[c], starts[c + 1]
        end = min(begin + most, stop)
        yield number, *zip(before, asked, between, cut(begin, end), after, strict=True)
        while end < stop:
            begin = end - stride
            end = min(begin + most, stop)
            yield number, *zip(before, asked, between, cut(begin, end), after, strict=True)


def _answer_positions(examples: list[Example], offsets, starts, example, context_span) -> np.ndarray:
    """Start and end position in every window, int64 [2, n]; 0 where the first gold answer is not wholly inside.

    The start is the last token of the context that begins no later than the answer, the end the first that ends no
    earlier, as in the reference script (transformers' run_qa). The accumulations are for tokenizers whose offsets step
    back: there the search ends at the first token that is beyond the answer.
    """
    golds = [e.answers[0] if e.answers else ("", 0) for e in examples]
    begin = np.array([start for _, start in golds])[example]
    finish = np.array([start + len(text) for text, start in golds])[example]
    first, stop = context_span.T
    positions = np.zeros((2, len(example)), np.int64)
    for i in np.flatnonzero((finish > begin) & (stop > first)):
        begins, ends = offsets[starts[i] + first[i] : starts[i] + stop[i]].T
        if begins[0] <= begin[i] and ends[-1] >= finish[i]:
            positions[0, i] = first[i] + np.searchsorted(np.maximum.accumulate(begins), begin[i], "right") - 1
            positions[1, i] = first[i] + np.searchsorted(np.minimum.accumulate(ends[::-1])[::-1], finish[i], "left")
    return positions


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("QA_LIB_CACHE") or Path(base) / "qa_lib") / "features"


def _key(source: Source, backend, layout: Layout, max_length: int, stride: int) -> str:
    """Hash of all that the windows depend on."""
    parts = [CACHE_VERSION, tokenizers.__version__, source.sha256, source.fix_spans, asdict(layout), max_length, stride]
    return cache_key([*parts, backend.to_str()])


def cache_key(parts: list) -> str:
    """The name of a cache entry that is made of these, which JSON takes."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def load_entry(folder: Path, kind: type):
    """The cached object of a dataclass, its arrays memory-mapped; None if there is none, or one that is damaged."""
    if not os.path.exists(folder):  # which a path that is too long is not either
        return None
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
        digest = meta.pop("sha256")
        names = [field.name for field in fields(kind) if field.name not in meta]
        # As plain arrays over the mapping: indexing np.memmap itself costs several times as much.
        arrays = {name: np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in names}
        if _digest_of(folder, arrays, meta) != digest:
            raise ValueError("it does not hold what was stored")
        return kind(**arrays, **meta)
    except Exception as error:  # NumPy has many for a file that it cannot read, and all mean the same
        log.warning("%s: damaged, made anew (%s)", folder, error)
        return None


def _digest_of(folder: Path, arrays: dict[str, np.ndarray], meta: dict) -> str:
    """SHA-256 (hex) of a cache entry: its key, names, types, shapes and bytes of its arrays, and what JSON holds beside
    them."""
    digest = hashlib.sha256(json.dumps([folder.name, meta], sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8))
    return digest.hexdigest()


def store_entry(folder: Path, made):
    """Put a whole cache entry in place at once, and give it as it is read from there; or `made`, if the disk does not
    let us, which only costs time."""
    arrays = {name: value for name, value in vars(made).items() if isinstance(value, np.ndarray)}
    meta = {name: value for name, value in vars(made).items() if name not in arrays}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="tmp-", dir=folder.parent) as work:
            entry = Path(work, "entry")
            entry.mkdir()
            for name, array in arrays.items():
                np.save(entry / f"{name}.npy", array)
            (entry / "meta.json").write_text(json.dumps(meta | {"sha256": _digest_of(folder, arrays, meta)}))
            shutil.rmtree(folder, ignore_errors=True)  # a damaged entry, or a neighbour's equal one
            entry.rename(folder)
    except OSError as error:
        log.warning("%s: not cached (%s)", folder, error)
        return made
    return load_entry(folder, type(made)) or made
