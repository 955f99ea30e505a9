"""From logits to answers: the best spans of every question, and how surely it has no answer.

A model gives each token of a window two logits: the answer begins here, the answer ends here. An
answer is a pair of tokens, scored by the sum of its two logits. Of a window's 384 x 384 pairs only
those between the 20 best starts and the 20 best ends are looked at, and of these only those that
run forwards, lie in the paragraph and are short: so does the reference script (run_qa of
transformers, after Devlin et al. 2019). A question's windows then compete in one list. "No answer"
is a pair as well, [CLS] to [CLS]; of a question's windows the one that believes in it least speaks
for all, and SQuAD v2 answers nothing where that score is higher than the best span's by a
threshold.

An answer's text is that from its first token's first character to its last token's last, and the
characters beside them that no token has: an uncased vocabulary drops the marks of letters, every
WordPiece one drops U+200B and its like, and without them a word is misspelt. `text_edges` says to
which token such a character belongs.

The script loops over a window's pairs in Python, which takes longer than what is here: for a block
of windows one table holds their sums, and one sort ranks each window's. Ties go to what the loop
finds first, so that both give the same lists. Every variant's answers, and the app's, come from
here.
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

BLOCK = 128  # windows that are decoded together: as quick as any number from 64 to 2,048
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
    - texts[id]: the text of the best span, whatever the null score, which a search for the best
      threshold needs.
    - null_odds[id]: the null score minus the score of the best non-empty span, in logits; higher
      means more surely no answer; 1e30 if no span was allowed at all.
    - nbest[id]: a list of {text, probability, start_logit, end_logit}, best first, with the null
      answer (text "") among them. The probabilities are a softmax over the list, as in the
      reference script (transformers' run_qa), which also adds the null answer where it is not among
      the best.
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
            best = next((span for span in candidates if span.begin < span.end), None)
            if best is None:
                odds = -LOWEST
                text = ""
            else:
                null_score = np.float32(null.score)
                odds = float(null_score - np.float32(best.start_logit) - np.float32(best.end_logit))
                text = example.context[best.begin : best.end]
            self.null_odds[example.id] = odds
            self.texts[example.id] = text
            self.predictions[example.id] = "" if odds > null_threshold else text

    def entries(self, i: int) -> list[dict]:
        """Return the n-best list of question i with places: {text, probability, start_logit,
        end_logit, score, begin, end}.

        begin and end are characters of the paragraph, None for no answer. The null answer comes
        after the spans that it ties with, and is always listed: it pushes out the last span, unless
        it comes last itself.
        """
        entries = []
        for entry, span in self._ranked(i):
            entries.append(entry | {"score": span.score, "begin": span.begin, "end": span.end})
        return entries

    def _ranked(self, i: int) -> Iterator[tuple[dict, Span]]:
        """Yield the n-best list of question i: the entries of `nbest`, each with its span."""
        example, spans, null = self._questions[i]
        place = sum(span.score >= null.score for span in spans)
        length = max(self._n_best, place + 1)
        listed = [*spans[:place], null, *spans[place:]][:length]
        weights = [math.exp(span.score - listed[0].score) for span in listed]
        total = sum(weights)
        for weight, span in zip(weights, listed, strict=True):
            entry = {
                "text": example.context[span.begin : span.end] if span.end else "",
                "probability": weight / total,
                "start_logit": span.start_logit,
                "end_logit": span.end_logit,
            }
            yield entry, span

    @cached_property
    def nbest(self) -> dict[str, list[dict]]:
        """The n-best lists by question id; built when they are first asked for."""
        lists = {}
        for i, (example, _, _) in enumerate(self._questions):
            lists[example.id] = [entry for entry, _ in self._ranked(i)]
        return lists

    def write(self, folder: str | os.PathLike) -> list[Path]:
        """Write the four answer files, each whole, and return their paths.

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
        # A quarter quicker without the check.
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
    are ranked by window, then by rank of start and of end, equal logits by position. Raises
    ValueError unless every window has exactly one row and the examples are those of the samples;
    DataError if a logit inside a window is NaN or +inf (also what rows under wrong ids from
    `predict_logits` lead to, as it leaves NaN beyond each window's length).
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
        for number, *values in zip(*[column.tolist() for column in columns], strict=True):
            span = Span(*values)
            if edges[number] is not None and span.begin < span.end:
                begin_at, end_at = edges[number]
                span = span._replace(begin=begin_at[span.begin], end=end_at[span.end])
            spans[number].append(span)

    best = []
    for candidates in spans:
        best.append(sorted(candidates, key=attrgetter("score"), reverse=True)[:n_best])
    return Answers(examples, best, nulls, n_best, null_threshold)


def _null_answers(
    samples: Samples, n_examples: int, start: np.ndarray, end: np.ndarray
) -> list[Span]:
    """Return the null answer of each question: of its windows' the one with the lowest score.

    `start` and `end` float32 [windows] are the logits of each window's [CLS].
    """
    start = start.clip(min=LOWEST)
    end = end.clip(min=LOWEST)
    nulls: list[Span | None] = [None] * n_examples
    columns = (samples.example, start + end, start, end)
    for number, score, *logits in zip(*[column.tolist() for column in columns], strict=True):
        if nulls[number] is None or score < nulls[number].score:
            nulls[number] = Span(score, None, None, *logits)
    return nulls


def _check_logits(
    samples: Samples,
    examples: list[Example],
    block: np.ndarray,
    start: np.ndarray,
    end: np.ndarray,
) -> None:
    """Raise DataError for windows of a block whose logits [windows, tokens] are NaN or +inf."""
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
    """Where the text of a paragraph's tokens begins and ends, with the characters beside them that
    no token has."""

    begin_at: list[int]  # by the character at which a token begins
    end_at: list[int]  # by the number that is one past a token's last character


def text_edges(context: str, offsets: np.ndarray) -> TextEdges | None:
    """Return the text edges of a paragraph, or None where tokens have all characters but blanks, so
    that nothing is to be added.

    Characters that no token has belong to the token before them, up to the next token or blank; and
    where a blank or nothing is before them, to the token after them. `offsets` int [tokens, 2] are
    those of all tokens of the paragraph.
    """
    n = len(context)
    begins, ends = offsets[offsets[:, 0] < offsets[:, 1]].T
    # How many more tokens begin than end at each character; the running sum says how many have it.
    change = np.zeros(n + 1, np.int64)
    np.add.at(change, begins, 1)
    np.add.at(change, ends, -1)
    is_bare = [False] * n  # no token has the character, and it is no blank
    for place in np.flatnonzero(change.cumsum()[:n] == 0).tolist():
        is_bare[place] = not context[place].isspace()
    if not any(is_bare):
        return None

    end_at = list(range(n + 1))
    for place in reversed(range(n)):
        if is_bare[place]:
            end_at[place] = end_at[place + 1]

    begin_at = list(range(n + 1))
    run = None  # where bare characters began that no token is before; None outside such a run
    for place in range(n):
        if is_bare[place]:
            if run is None and (place == 0 or context[place - 1].isspace()):
                run = place
        else:
            if run is not None and not context[place].isspace():
                begin_at[place] = run
            run = None
    return TextEdges(begin_at, end_at)


def _edges_of_examples(samples: Samples, examples: list[Example]) -> list[TextEdges | None]:
    """Return the text edges of each example's paragraph, worked out once for each distinct one."""
    by_context: dict[str, TextEdges | None] = {}
    first_window = np.searchsorted(samples.example, np.arange(len(examples) + 1))
    context_tokens = samples.starts[:-1, None] + samples.context
    for number, example in enumerate(examples):
        if example.context not in by_context:
            parts = context_tokens[first_window[number] : first_window[number + 1]].tolist()
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
    """Return the row of each window: the guard that logits are joined by id and by nothing else.

    Raises ValueError as `decode` does.
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
    """Return the `n_best` best spans of each window: score, window, first and last token, each [k],
    sorted by window, then best first, ties by rank of start and end.

    `start` and `end` [windows, tokens] are their logits, -inf beyond a window's own length;
    `context` [windows, 2] says where the paragraph lies. The reference script spends places on
    [CLS] and the question too, so that they are only struck out after the ranking.
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

    score = score.reshape(len(score), -1)
    order = np.argsort(-score, axis=1, kind="stable")[:, :n_best]
    score = np.take_along_axis(score, order, axis=1)
    window, rank = np.nonzero(score > -np.inf)
    start_rank, end_rank = np.divmod(order[window, rank], last.shape[1])
    return score[window, rank], window, first[window, start_rank], last[window, end_rank]
