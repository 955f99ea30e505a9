"""From logits to answers: the best spans of every question, and how surely it has no answer.

A model gives each token of a window two logits: the answer begins here, the answer ends here. An
answer is a pair of tokens, scored by the sum of its two logits. The pairs are chosen as in the
reference script (run_qa of transformers, after Devlin et al. 2019):

- In each window, only pairs of one of the 20 best starts and one of the 20 best ends count, and of
  these only those that run forwards, lie in the paragraph and are short.
- The pairs of all windows of a question are ranked in one list.
- "No answer" is a pair as well, [CLS] to [CLS]. Its score for a question is the lowest that any of
  the question's windows gives it.
- A question is not answered if that score exceeds the best span's by more than a threshold.

The text of an answer goes from the first character of its first token to the last of its last
token. Tokens do not have every character: an uncased vocabulary drops the marks of letters, and
every WordPiece vocabulary drops U+200B and its like. Where such a character is beside the answer,
it is taken in, since a word would be misspelt without it; `text_edges` says to which token it
belongs.

The script loops over a window's pairs in Python. Here one table holds the sums of a block of
windows, and one sort ranks each window's pairs, which is quicker. Ties go to what the loop finds
first, so that both give the same lists. Every variant's answers, and the app's, come from here.
"""

import json
import math
import os
from collections.abc import Iterator
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from qa_lib.data.examples import Example
from qa_lib.data.files import DataError
from qa_lib.data.windows import Samples, examples_sha256
from qa_lib.records.files import writable, writable_folder, write_atomically
from qa_lib.spec.presets import ANSWER_TOKENS

BLOCK = 128  # windows that are decoded together; any number from 64 to 2,048 is as quick
LOWEST = -1e30  # stands in for a score of -inf, so that no difference is infinite or NaN


class Span(NamedTuple):
    """A candidate for an answer."""

    score: float  # the sum of its two logits
    begin: int | None  # its first character in the paragraph; None for no answer
    end: int | None  # one past its last character; None for no answer
    start_logit: float
    end_logit: float


class Answers:
    """Decoded answers of a data set, by question id.

    - predictions[id]: the answer's text, "" for none.
    - texts[id]: the text of the best span, whatever the null score. A search for the best threshold
      needs it.
    - null_odds[id]: the null score minus the score of the best non-empty span. It is a difference
      of logits, which the reference script calls odds. Higher means more surely no answer; 1e30
      means that no span was allowed at all.
    - nbest[id]: a list of {text, probability, start_logit, end_logit}, best first, with the null
      answer (text "") always among them. The probabilities are a softmax over the list. Both are
      as in the reference script.
    """

    def __init__(
        self,
        examples: list[Example],
        spans: list[list[Span]],
        nulls: list[Span],
        n_best: int,
        null_threshold: float,
    ):
        """Take each question's `n_best` best spans, best first, and its null answer.

        A question is not answered if its null odds are above `null_threshold`.
        """
        self._questions = list(zip(examples, spans, nulls, strict=True))
        self._n_best = n_best
        self.predictions: dict[str, str] = {}
        self.texts: dict[str, str] = {}
        self.null_odds: dict[str, float] = {}
        for example, candidates, null in self._questions:
            # A span of tokens without characters is empty.
            best = next((span for span in candidates if span.begin < span.end), None)
            if best is None:
                odds = -LOWEST
                text = ""
            else:
                # In the order and the precision of the reference script, so that both round alike.
                null_score = np.float32(null.score)
                odds = float(null_score - np.float32(best.start_logit) - np.float32(best.end_logit))
                text = example.context[best.begin : best.end]
            self.null_odds[example.id] = odds
            self.texts[example.id] = text
            self.predictions[example.id] = "" if odds > null_threshold else text

    def entries(self, i: int) -> list[dict]:
        """Return the n-best list of question i, with a score and places for each entry.

        An entry is {text, probability, start_logit, end_logit, score, begin, end}, where begin and
        end are characters of the paragraph, and None for no answer. The null answer comes after the
        spans that it ties with. It is always listed: it takes the place of the last span in a full
        list, unless it comes last itself, and then the list is longer by one.
        """
        entries = []
        for entry, span in self._ranked(i):
            entries.append(entry | {"score": span.score, "begin": span.begin, "end": span.end})
        return entries

    def _ranked(self, i: int) -> Iterator[tuple[dict, Span]]:
        """Yield the n-best list of question i: the entries of `nbest`, each with its span."""
        example, spans, null = self._questions[i]
        null_place = sum(span.score >= null.score for span in spans)
        length = max(self._n_best, null_place + 1)
        listed = [*spans[:null_place], null, *spans[null_place:]][:length]
        weights = [math.exp(span.score - listed[0].score) for span in listed]
        total = sum(weights)
        for weight, span in zip(weights, listed, strict=True):
            entry = {
                "text": "" if span.end is None else example.context[span.begin : span.end],
                "probability": weight / total,
                "start_logit": span.start_logit,
                "end_logit": span.end_logit,
            }
            yield entry, span

    @cached_property
    def nbest(self) -> dict[str, list[dict]]:
        """The n-best lists by question id, built when they are first asked for."""
        lists = {}
        for i, (example, _, _) in enumerate(self._questions):
            lists[example.id] = [entry for entry, _ in self._ranked(i)]
        return lists

    def write(self, folder: str | os.PathLike) -> list[Path]:
        """Write the four answer files, each atomically, and return their paths.

        Raises RecordError where they cannot be written, and for a folder that is a link.
        """
        folder = Path(folder)
        writable_folder(folder)
        # The largest first: where it fills the disk, all four stay as they were.
        contents = {
            folder / "nbest_predictions.json": self.nbest,
            folder / "predictions.json": self.predictions,
            folder / "texts.json": self.texts,
            folder / "null_odds.json": self.null_odds,
        }
        for path in contents:
            writable(path)
        # Without the check for circular references encoding takes a quarter less time.
        encode = json.JSONEncoder(check_circular=False).encode
        for path, content in contents.items():
            # One question a line: readable, and the fast encoder of json knows no indentation.
            lines = [f"{encode(key)}: {encode(value)}" for key, value in content.items()]
            write_atomically(path, "{\n" + ",\n".join(lines) + "\n}\n")
        return list(contents)


def decode(
    samples: Samples,
    examples: list[Example],
    sample_ids: torch.Tensor,
    start_logits: torch.Tensor,
    end_logits: torch.Tensor,
    *,
    n_best: int = 20,
    max_answer_length: int = ANSWER_TOKENS,
    null_threshold: float = 0.0,
) -> Answers:
    """Answer every question of `examples`, whose windows are `samples`.

    Row r of the logits [n, L] belongs to window sample_ids[r]; rows come in any order. What lies
    beyond a window's own length is never looked at. A window's candidates are the spans between its
    `n_best` best start and end positions that lie in the context and have at most
    `max_answer_length` tokens. A question's null score is the lowest start + end logit at [CLS]
    over its windows, and "" is answered if null score - best span > `null_threshold`. Equal scores
    are ranked by window, then by rank of start and of end, equal logits by position.

    Raises ValueError unless every window has exactly one row and the examples are those of the
    samples. Raises DataError if a logit inside a window is NaN or +inf. Rows of `predict_logits`
    under wrong ids are found so as well, since they are NaN beyond the length of their own window.
    """
    rows = _row_of_window(samples, examples, sample_ids, start_logits, end_logits)
    start = start_logits.float().cpu().numpy()
    end = end_logits.float().cpu().numpy()
    nulls = _null_answers(samples, len(examples), start[rows, 0], end[rows, 0])
    edges = _edges_of_examples(samples, examples)

    spans: list[list[Span]] = [[] for _ in examples]
    all_lengths = samples.lengths
    for first in range(0, len(samples), BLOCK):
        block = np.arange(first, min(first + BLOCK, len(samples)))
        lengths = all_lengths[block, None]
        width = lengths.max()
        is_token = np.arange(width) < lengths
        block_start = np.where(is_token, start[rows[block], :width], -np.inf)
        block_end = np.where(is_token, end[rows[block], :width], -np.inf)
        _check_logits(samples, examples, block, block_start, block_end)
        score, window, first_token, last_token = _block_spans(
            block_start, block_end, samples.context[block], n_best, max_answer_length
        )
        begin, end_character = samples.characters(block[window], first_token, last_token)
        columns = (
            samples.example[block[window]],
            score,
            begin,
            end_character,
            block_start[window, first_token],
            block_end[window, last_token],
        )
        for question, *values in zip(*[column.tolist() for column in columns], strict=True):
            span = Span(*values)
            if edges[question] is not None and span.begin < span.end:
                begin_at, end_at = edges[question]
                span = span._replace(begin=begin_at[span.begin], end=end_at[span.end])
            spans[question].append(span)

    best = []
    for candidates in spans:
        best.append(sorted(candidates, key=attrgetter("score"), reverse=True)[:n_best])
    return Answers(examples, best, nulls, n_best, null_threshold)


def _null_answers(
    samples: Samples, n_examples: int, start: np.ndarray, end: np.ndarray
) -> list[Span]:
    """Return the null answer of each question: that of the window that scores it lowest.

    `start` and `end` float32 [windows] are the logits of each window's [CLS].
    """
    start = start.clip(min=LOWEST)
    end = end.clip(min=LOWEST)
    nulls: list[Span | None] = [None] * n_examples
    columns = (samples.example, start + end, start, end)
    for question, score, *logits in zip(*[column.tolist() for column in columns], strict=True):
        if nulls[question] is None or score < nulls[question].score:
            nulls[question] = Span(score, None, None, *logits)
    return nulls


def _check_logits(
    samples: Samples,
    examples: list[Example],
    block: np.ndarray,
    start: np.ndarray,
    end: np.ndarray,
) -> None:
    """Raise DataError for the first window of a block with a logit that is NaN or +inf.

    `start` and `end` [windows, tokens] are the logits of the block.
    """
    is_good = ((start < np.inf) & (end < np.inf)).all(axis=1)
    if is_good.all():
        return
    window = block[~is_good][0]
    example = examples[samples.example[window]]
    raise DataError(
        f"article {example.title[:80]!r}, question {example.id!r}, window {window}: a logit is NaN "
        "or +inf (the model has diverged, or these are of other windows)"
    )


class TextEdges(NamedTuple):
    """Where the text of a paragraph's tokens begins and ends.

    It takes in the characters beside a token that no token has.
    """

    # begin_at[c]: where the text of a token begins whose first character is c
    begin_at: list[int]
    # end_at[c]: where the text of a token ends whose last character is c - 1
    end_at: list[int]


def text_edges(context: str, offsets: np.ndarray) -> TextEdges | None:
    """Return the text edges of a paragraph, or None if tokens have every character but blanks.

    Bare characters, which no token has and which are no blanks, belong to the token that is right
    before them. If a blank or nothing is before them, they belong to the token right after them.
    `offsets` int [tokens, 2] are those of all tokens of the paragraph.
    """
    n = len(context)
    begins, ends = offsets[offsets[:, 0] < offsets[:, 1]].T
    # By character: how many more tokens begin there than end. The running sum is how many have it.
    change = np.zeros(n + 1, np.int64)
    np.add.at(change, begins, 1)
    np.add.at(change, ends, -1)
    is_bare = [False] * n
    for place in np.flatnonzero(change.cumsum()[:n] == 0).tolist():
        is_bare[place] = not context[place].isspace()
    if not any(is_bare):
        return None

    end_at = list(range(n + 1))
    for place in reversed(range(n)):
        if is_bare[place]:
            end_at[place] = end_at[place + 1]

    begin_at = list(range(n + 1))
    # Where the bare characters before this place began; None if there are none, or if they belong
    # to the token before them.
    first_bare = None
    for place in range(n):
        if is_bare[place]:
            if first_bare is None and (place == 0 or context[place - 1].isspace()):
                first_bare = place
        else:
            if first_bare is not None and not context[place].isspace():
                begin_at[place] = first_bare
            first_bare = None
    return TextEdges(begin_at, end_at)


def _edges_of_examples(samples: Samples, examples: list[Example]) -> list[TextEdges | None]:
    """Return the text edges of each example's paragraph, worked out once for each distinct one."""
    by_context: dict[str, TextEdges | None] = {}
    # The windows of question i are first_window[i] to first_window[i + 1].
    first_window = np.searchsorted(samples.example, np.arange(len(examples) + 1))
    context_tokens = samples.starts[:-1, None] + samples.context
    for i, example in enumerate(examples):
        if example.context not in by_context:
            parts = context_tokens[first_window[i] : first_window[i + 1]].tolist()
            offsets = np.concatenate([samples.offsets[begin:end] for begin, end in parts])
            by_context[example.context] = text_edges(example.context, offsets)
    return [by_context[example.context] for example in examples]


def _row_of_window(
    samples: Samples,
    examples: list[Example],
    sample_ids: torch.Tensor,
    start_logits: torch.Tensor,
    end_logits: torch.Tensor,
) -> np.ndarray:
    """Return the row of the logits that belongs to each window, by the windows' ids alone.

    Raises ValueError as `decode` does: rows that were joined by position would be scored for other
    questions, and nobody would see it.
    """
    if len(examples) != samples.n_examples or examples_sha256(examples) != samples.examples_sha256:
        raise ValueError(
            "these examples are not the ones, or not in the order, that the samples were built from"
        )
    n = len(samples)
    shape = tuple(start_logits.shape)
    end_shape = tuple(end_logits.shape)
    has_windows_shape = len(shape) == 2 and shape[0] == n and shape[1] >= samples.lengths.max()
    if shape != end_shape or not has_windows_shape:
        raise ValueError(f"logits of shape {shape} and {end_shape} for {n} windows")
    ids = torch.as_tensor(sample_ids).cpu().numpy()
    if not np.array_equal(np.sort(ids), np.arange(n)):
        raise ValueError(
            f"sample ids must be the numbers 0 to {n - 1}, each once, one a row of the logits"
        )
    return np.argsort(ids)


def _block_spans(
    start: np.ndarray, end: np.ndarray, context: np.ndarray, n_best: int, max_answer_length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the `n_best` best spans of each window.

    They are four arrays, each [spans]: score, window, first token and last token. They are sorted
    by window, then best first, ties by rank of start and end.

    `start` and `end` [windows, tokens] are the logits, -inf beyond a window's own length.
    `context` [windows, 2] says where the paragraph lies. A start or an end outside of it is struck
    out only after the best starts and ends are chosen, since the reference script counts it among
    them.
    """
    first = np.argsort(-start, axis=1, kind="stable")[:, :n_best]
    last = np.argsort(-end, axis=1, kind="stable")[:, :n_best]
    # Tables of all pairs: [windows, starts, ends].
    start_score = np.take_along_axis(start, first, axis=1)[:, :, None]
    end_score = np.take_along_axis(end, last, axis=1)[:, None]
    score = start_score + end_score
    begins_inside = (first >= context[:, :1])[:, :, None]
    ends_inside = (last < context[:, 1:])[:, None]
    steps = last[:, None] - first[:, :, None]
    is_allowed = begins_inside & ends_inside & (steps >= 0) & (steps < max_answer_length)
    score[~is_allowed] = -np.inf

    # Each window's table as one row, whose best pairs are turned back into ranks of start and end.
    score = score.reshape(len(score), -1)
    order = np.argsort(-score, axis=1, kind="stable")[:, :n_best]
    score = np.take_along_axis(score, order, axis=1)
    window, rank = np.nonzero(score > -np.inf)
    start_rank, end_rank = np.divmod(order[window, rank], last.shape[1])
    return score[window, rank], window, first[window, start_rank], last[window, end_rank]
