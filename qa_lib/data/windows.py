"""From questions to windows of tokens: what a question-answering model reads, flat and memory-mapped.

A model reads a question and a paragraph together, in at most `max_length` tokens. A longer paragraph is cut into
windows that share `stride` tokens, each with the whole question before it (Devlin et al. 2018, for SQuAD). Every fast
tokenizer of transformers cuts such windows itself, and tests hold these here to what it cuts. But paragraphs repeat
from question to question: here every distinct text is tokenized once, and the windows are put together from the pieces.
That takes a tenth of the time of `datasets.map`. All variants share this step; its result is cached on disk, so that a
run begins in less than a second.

A window's label is the first and the last token of the gold answer. Characters at an answer's edges that no token has
(an uncased vocabulary drops marks, every WordPiece one drops U+200B and its like) and blanks there move neither: the
label is about the tokens between them. A gold answer that no window holds whole leaves all windows of its question
without an answer, as in the reference script. These windows are kept, since leaving them out would give SQuAD itself
other windows at short lengths; `gold_notes` counts them in the run's output, with what to do about it.
"""

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
import tokenizers

from qa_lib.data.squad import DataError, Example, Source, hash_files
from qa_lib.data.tokenize import Layout, Pieces, bare, distinct, find_layout, tokenize
from qa_lib.errors import UserError

log = logging.getLogger(__name__)

CACHE_VERSION = 6  # of the cached files; raise it when they, or what is in them, change

TOKENLESS = -1  # in place of how many tokens a gold answer has

# Of which example a window is, its token ids and their offsets, each as arrays to be joined.
Window = tuple[int, Sequence[np.ndarray], Sequence[np.ndarray]]


@dataclass(eq=False)
class Samples:
    """Windows over the examples of one source: special tokens, question, special tokens, context, special tokens.

    There are n windows of T tokens in all, none of them padding. Positions are counted from a window's first token.
    """

    tokens: np.ndarray  # int32 [T]: token ids; window i is tokens[starts[i] : starts[i + 1]]
    offsets: (
        np.ndarray
    )  # int32 [T, 2]: each token's first character in question or context, and one past its last
    starts: np.ndarray  # int64 [n + 1]
    example: np.ndarray  # int32 [n]: index into the source's examples, ascending
    context: (
        np.ndarray
    )  # int64 [n, 2]: position of the first token of the context, and one past its last
    start_positions: (
        np.ndarray
    )  # int64 [n]: first and last token of the first gold answer; 0 and 0 where there is
    end_positions: np.ndarray  # int64 [n]: none, or none wholly inside the window
    max_length: int
    pad_token: int
    segments: bool  # whether token types go with the windows: 0 up to the context, and 1 from there
    n_examples: int
    gold_tokens: (
        np.ndarray
    )  # int32 [n_examples]: tokens of each first gold answer; 0 where there is none, and
    # TOKENLESS where no token has any of its characters
    examples_sha256: (
        str  # of the source's question ids in order: what `decode` checks its examples against
    )
    content_sha256: str  # of the source's questions and paragraphs, whatever their ids and order

    def __len__(self) -> int:
        return len(self.example)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n]: tokens of each window, special tokens included."""
        return np.diff(self.starts)

    @property
    def held(self) -> np.ndarray:
        """bool [n_examples]: whether a window holds the first gold answer whole."""
        found = np.zeros(self.n_examples, bool)
        found[self.example[self.start_positions > 0]] = True
        return found

    def characters(
        self, rows: np.ndarray, first: np.ndarray, last: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
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
        ids = np.where(
            real, self.tokens[first[:, None] + position * real], np.int64(self.pad_token)
        )
        batch = {"input_ids": ids, "attention_mask": real.astype(np.int64)}
        if self.segments:
            batch["token_type_ids"] = (real & (position >= self.context[indices, :1])).astype(
                np.int64
            )
        return batch | {
            name: getattr(self, name)[indices] for name in ("start_positions", "end_positions")
        }


def examples_sha256(examples: list[Example]) -> str:
    """Hash of the question ids in order (hex)."""
    return hashlib.sha256(json.dumps([example.id for example in examples]).encode()).hexdigest()


def content_sha256(examples: list[Example]) -> str:
    """Hash of the questions with their paragraphs (hex), whatever their ids and order."""
    pairs = (f"{example.question}\0{example.context}" for example in examples)
    digests = sorted(hashlib.sha256(pair.encode()).digest() for pair in pairs)
    return hashlib.sha256(b"".join(digests)).hexdigest()


def answer_limit(samples: Samples, least: int) -> int:
    """How many tokens an answer needs to be given as long as the gold answers of `samples` are: as many as all but the
    longest 0.1 % of those that a window holds have, and at least `least`. A gold answer that is a paragraph by mistake
    does not count."""
    lengths = samples.gold_tokens[samples.held]
    if not len(lengths):
        return least
    return max(least, int(np.quantile(lengths, 0.999, method="higher")))


def gold_notes(samples: Samples, name: str, limit: int) -> list[str]:
    """A sentence for each reason for which gold answers of the file `name` cannot be given, with how many: answers of
    more than `limit` tokens, and those that no window holds whole."""
    golds = int((samples.gold_tokens != 0).sum())
    tokenless = int((samples.gold_tokens == TOKENLESS).sum())
    cut = int((~samples.held & (samples.gold_tokens > 0)).sum())
    long = int((samples.gold_tokens > limit).sum())
    notes = []
    if tokenless:
        notes.append(
            f"{name}: {tokenless} of {golds} gold answers have no token (they are blank, or of characters that the "
            "vocabulary drops): their questions count as unanswerable in training, and cannot be answered"
        )
    if cut:
        notes.append(
            f"{name}: {cut} of {golds} gold answers are whole in no window of {samples.max_length} tokens: their "
            "questions count as unanswerable in training, and cannot be answered; a larger --max-length holds more"
        )
    if long:
        notes.append(
            f"{name}: {long} of {golds} gold answers are longer than {limit} tokens and cannot be given; "
            "--max-answer-length allows more"
        )
    return notes


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
    backend = bare(tokenizer)
    layout = find_layout(tokenizer, backend)
    if max_length <= layout.size or not 0 <= stride < max_length - layout.size:
        needed = f"0 <= stride < max_length - {layout.size} is needed"
        raise UserError(f"max_length {max_length} with stride {stride}: {needed}")
    if cache is False:
        return _build(source, backend, layout, max_length, stride)
    parts = [CACHE_VERSION, tokenizers.__version__, source.sha256, source.labelled]
    parts += [asdict(layout), max_length, stride, backend.to_str()]
    return cached(
        parts, Samples, lambda: _build(source, backend, layout, max_length, stride), cache
    )


def _build(source: Source, backend, layout: Layout, max_length: int, stride: int) -> Samples:
    examples = source.examples
    # The reference script strips blanks in front of questions: some are so long that they alone would fill a window.
    texts, which = distinct(
        chain((e.question.lstrip() for e in examples), (e.context for e in examples))
    )
    pieces = tokenize(backend, texts)
    question, context = which[: len(examples)], which[len(examples) :]
    lengths = np.diff(pieces.starts)
    room = max_length - layout.size - lengths[question]
    _refuse_cramped(source, lengths[question], lengths[context], room, max_length, stride)
    tokens, offsets, size, example = [], [], [], []
    for number, ids, places in _windows(pieces, layout, question, context, room, stride):
        tokens += ids
        offsets += places
        size.append(sum(map(len, ids)))
        example.append(number)
    tokens, offsets = np.concatenate(tokens), np.concatenate(offsets)
    first = len(layout.before) + lengths[question][example] + len(layout.between)
    context_span = np.stack([first, np.array(size) - len(layout.after)], axis=1)
    starts = np.concatenate([[0], np.cumsum(size)])
    example = np.array(example, np.int32)
    golds, gold_tokens = _gold_spans(examples, pieces, context)
    positions = _answer_positions(golds, offsets, starts, example, context_span)
    return Samples(
        *(tokens, offsets, starts, example, context_span, *positions),
        *(max_length, layout.pad, layout.segments, len(examples), gold_tokens),
        *(examples_sha256(examples), content_sha256(examples)),
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


def _windows(
    pieces: Pieces, layout: Layout, question, context, room, stride: int
) -> Iterator[Window]:
    """The windows out of what each text was tokenized to.

    `question` and `context` are the texts of each example, `room` is how many tokens of the context a window of it
    holds; int [examples].
    """
    special = [np.array(ids, np.int32) for ids in (layout.before, layout.between, layout.after)]
    before, between, after = ((ids, np.zeros((len(ids), 2), np.int32)) for ids in special)
    starts = pieces.starts.tolist()

    def cut(begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        return pieces.ids[begin:end], pieces.offsets[begin:end]

    for number, (q, c, most) in enumerate(
        zip(question.tolist(), context.tolist(), room.tolist(), strict=True)
    ):
        asked, begin, stop = cut(starts[q], starts[q + 1]), starts[c], starts[c + 1]
        while True:
            end = min(begin + most, stop)
            yield number, *zip(before, asked, between, cut(begin, end), after, strict=True)
            if end == stop:
                break
            begin = end - stride


def _gold_spans(examples: list[Example], pieces: Pieces, context) -> tuple[np.ndarray, np.ndarray]:
    """The characters of each first gold answer that tokens have, and how many tokens these are; the first is that which
    is not blank.

    `context` int [examples] is the text of `pieces` that an example's paragraph is. The first result int64 [examples,
    2] has the first character and one past the last, 0 and 0 where there is no answer; the second int32 [examples] is
    what Samples.gold_tokens is. Blanks at a gold answer's edges are no part of it: a byte-level vocabulary has tokens
    for them.
    """
    spans = np.zeros((len(examples), 2), np.int64)
    tokens = np.zeros(len(examples), np.int32)
    for i, example in enumerate(examples):
        if not example.answers:
            continue
        filled = (answer for answer in example.answers if answer[0].strip())
        text, start = next(filled, example.answers[0])
        begin = start + len(text) - len(text.lstrip())
        finish = start + len(text.rstrip())
        begins, ends = pieces.offsets[pieces.starts[context[i]] : pieces.starts[context[i] + 1]].T
        inside = (begins < finish) & (ends > begin) & (ends > begins)
        if begin >= finish or not inside.any():
            tokens[i] = TOKENLESS
            continue
        spans[i] = max(begin, begins[inside].min()), min(finish, ends[inside].max())
        first, last = _first_and_last(begins, ends, *spans[i])
        tokens[i] = last - first + 1
    return spans, tokens


def _first_and_last(begins, ends, begin: int, finish: int) -> tuple[int, int]:
    """Which of the tokens with these offsets, int [tokens] each, are the first and the last of the text from character
    `begin` to `finish`: the last that begins no later than the text, and the first that ends no earlier, as in the
    reference script (transformers' run_qa). The accumulations are for tokenizers whose offsets step back: there the
    search ends at the first token that is beyond the text.

    A character may be several tokens, of bytes or of a syllable's letters. Where the text is that character alone, the
    two searches end at the last and at the first of them, in which order no answer can be given: here it is all of
    them."""
    first = np.searchsorted(np.maximum.accumulate(begins), begin, "right") - 1
    last = np.searchsorted(np.minimum.accumulate(ends[::-1])[::-1], finish, "left")
    return min(first, last), max(first, last)


def _answer_positions(golds, offsets, starts, example, context_span) -> np.ndarray:
    """Start and end position in every window, int64 [2, n]; 0 where the gold answer is not wholly inside. `golds` is
    what _gold_spans gives."""
    begin, finish = golds[example].T
    first, stop = context_span.T
    positions = np.zeros((2, len(example)), np.int64)
    for i in np.flatnonzero((finish > begin) & (stop > first)):
        begins, ends = offsets[starts[i] + first[i] : starts[i] + stop[i]].T
        if begins[0] <= begin[i] and ends[-1] >= finish[i]:
            positions[:, i] = first[i] + np.array(
                _first_and_last(begins, ends, begin[i], finish[i])
            )
    return positions


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("QA_LIB_CACHE") or Path(base) / "qa_lib") / "features"


def cached(parts: list, kind: type, make: Callable, cache: str | os.PathLike | None = None):
    """What `make` gives, an object with arrays and values that JSON takes, as it is read from the folder `cache`, or
    else default_cache(). `parts` are all that it is made of; JSON takes them. `kind` makes it of its values by name."""
    folder = Path(
        cache or default_cache(), hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    )
    return _load(folder, kind) or _store(folder, kind, make())


def _load(folder: Path, kind: type):
    """The object in a folder, its arrays memory-mapped; None if there is none, or one that is damaged."""
    if not os.path.exists(folder):  # which a path that is too long is not either
        return None
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
        if meta.pop("sha256") != _digest(folder, meta):
            raise ValueError("it does not hold what was stored")
        # As plain arrays over the mapping: indexing np.memmap itself costs several times as much.
        return kind(
            **{
                path.stem: np.asarray(np.load(path, mmap_mode="r")) for path in folder.glob("*.npy")
            },
            **meta,
        )
    except (
        Exception
    ) as error:  # NumPy has many for a file that it cannot read, and all mean the same
        log.warning("%s: damaged, made anew (%s)", folder, error)
        return None


def _digest(folder: Path, meta: dict) -> str:
    """SHA-256 (hex) of a cache entry: its key, its arrays' files, and what JSON holds beside them."""
    files = hash_files(sorted(folder.glob("*.npy")))
    return hashlib.sha256(
        json.dumps([folder.name, files, meta], sort_keys=True).encode()
    ).hexdigest()


def _store(folder: Path, kind: type, made):
    """Put a whole cache entry in place at once, and give it as it is read from there; or `made`, if the disk does not
    let us, which only costs time."""
    meta = dict(vars(made))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="tmp-", dir=folder.parent) as work:
            entry = Path(work, folder.name)
            entry.mkdir()
            for name in [name for name, value in meta.items() if isinstance(value, np.ndarray)]:
                np.save(entry / f"{name}.npy", meta.pop(name))
            (entry / "meta.json").write_text(json.dumps(meta | {"sha256": _digest(entry, meta)}))
            shutil.rmtree(folder, ignore_errors=True)  # a damaged entry, or a neighbour's equal one
            entry.rename(folder)
    except OSError as error:
        log.warning("%s: not cached (%s)", folder, error)
        return made
    return _load(folder, kind) or made
