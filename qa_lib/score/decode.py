"""From logits to answers: the best spans of every question, its n-best list, and how surely it has no answer.

A model gives each token of a window two logits: the answer begins here, the answer ends here. An answer is a pair of
tokens, scored by the sum of its two logits. Of a window's 384 x 384 pairs only those between the 20 best starts and
the 20 best ends are looked at, and of these only those that run forwards, lie in the paragraph and are short: so does
the reference script (run_qa of transformers, after Devlin et al. 2019). A question's windows then compete in one
list. "No answer" is a pair as well, [CLS] to [CLS]; of a question's windows the one that believes in it least
speaks for all, and SQuAD v2 answers nothing where that score is higher than the best span's by a threshold.

The script's double loop in Python takes three times as long as what is here: each step is one call of NumPy for
thousands of windows. Two sorts find starts and ends, one table holds their sums, one sort ranks what is left, question
by question: half a second for SQuAD's validation set. Ties go to what the loop finds first, so that both give the same
lists. Every variant's answers, and the app's, come from here.
"""

from __future__ import annotations

import json
import math
import os
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from qa_lib.data.squad import DataError, Example
from qa_lib.data.windows import Samples, examples_sha256
from qa_lib.record import write_atomically

WINDOWS_PER_CALL = 2_048  # so that the tables of n_best x n_best spans stay small
LOWEST = -1e30  # stands in for a score of -inf, so that no difference is infinite or NaN
Span = tuple[float, int | None, int | None, float, float]  # score, characters begin to end or None, start and end logit


class Answers:
    """Decoded answers of a data set, by question id.

    `predictions[id]` is the answer's text, "" for none; `texts[id]` is that of the best span, whatever the null score,
    which a search for the best threshold needs. `null_odds[id]` is the null score minus the score of the best
    non-empty span (logits; higher means more surely no answer; 1e30 if no span was allowed at all). `nbest[id]` lists
    {text, probability, start_logit, end_logit}, best first, with the null answer (text "") among them; it is built
    when first asked for. The probabilities are a softmax over the list, as in the reference script (transformers'
    run_qa), which also adds the null answer where it is not among the best.
    """

    def __init__(self, examples: list[Example], spans: list[list[Span]], nulls: list[Span], n_best: int, limit: float):
        # Of each question its `n_best` best spans, best first, and its null answer.
        self._n_best, self._questions = n_best, list(zip(examples, spans, nulls, strict=True))
        self.predictions: dict[str, str] = {}
        self.texts: dict[str, str] = {}
        self.null_odds: dict[str, float] = {}
        for example, found, null in self._questions:
            best = next((span for span in found if span[1] < span[2]), null)
            _, begin, end, start_logit, end_logit = best
            odds = np.float32(null[0]) - np.float32(start_logit) - np.float32(end_logit)
            self.null_odds[example.id] = -LOWEST if best is null else float(odds)
            self.texts[example.id] = example.context[begin:end] if end else ""
            self.predictions[example.id] = "" if self.null_odds[example.id] > limit else self.texts[example.id]

    def entries(self, i: int) -> list[dict]:
        """The n-best list of question i with places: {text, probability, start_logit, end_logit, score, begin, end},
        where begin and end are characters of the paragraph, None for no answer.

        The null answer comes after the spans that it ties with, and is listed always: it pushes out the last span,
        unless it comes last itself.
        """
        example, spans, null = self._questions[i]
        place = sum(span[0] >= null[0] for span in spans)
        listed = [*spans[:place], null, *spans[place:]][: max(self._n_best, place + 1)]
        weights = [math.exp(span[0] - listed[0][0]) for span in listed]
        total = sum(weights)
        return [
            {"text": example.context[begin:end] if end else "", "probability": weight / total}
            | {"start_logit": start_logit, "end_logit": end_logit, "score": score, "begin": begin, "end": end}
            for weight, (score, begin, end, start_logit, end_logit) in zip(weights, listed, strict=True)
        ]

    @cached_property
    def nbest(self) -> dict[str, list[dict]]:
        kept = ("text", "probability", "start_logit", "end_logit")
        return {
            example.id: [{key: entry[key] for key in kept} for entry in self.entries(i)]
            for i, (example, *_) in enumerate(self._questions)
        }

    def write(self, folder: str | os.PathLike) -> list[Path]:
        """Write predictions.json, texts.json, nbest_predictions.json and null_odds.json, each whole. Raises
        RecordError."""
        files = {
            "predictions.json": self.predictions,
            "texts.json": self.texts,
            "nbest_predictions.json": self.nbest,
            "null_odds.json": self.null_odds,
        }
        for name, content in files.items():
            # One question a line: readable, and the fast encoder of json knows no indentation.
            lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
            write_atomically(Path(folder, name), "{\n" + ",\n".join(lines) + "\n}\n")
        return [Path(folder, name) for name in files]


def decode(
    samples: Samples, examples: list[Example], sample_ids: torch.Tensor, start_logits: torch.Tensor,
    end_logits: torch.Tensor, *, n_best: int = 20, max_answer_length: int = 30, null_threshold: float = 0.0,
) -> Answers:  # fmt: skip
    """Answer every question of `examples`, whose windows are `samples`.

    Row r of the logits [n, L] belongs to window `sample_ids[r]`; rows come in any order. What lies beyond a window's
    own length is never looked at. A window's candidates are the spans between its `n_best` best start and end
    positions that lie in the context and have at most `max_answer_length` tokens; a question's null score is the
    lowest start + end logit at [CLS] over its windows, and "" is answered if null score - best span > `null_threshold`.
    Equal scores are ranked by window, then by rank of start and of end, equal logits by position.
    Raises ValueError unless every window has exactly one row and the examples are those of the samples;
    `DataError` if a logit inside a window is NaN or infinite (also what rows under wrong ids from `predict_logits`
    lead to, as it leaves NaN beyond each window's length).
    """
    rows = _rows_by_id(samples, examples, sample_ids, start_logits, end_logits)
    both = [logits.float().cpu().numpy() for logits in (start_logits, end_logits)]
    spans, nulls = [], []
    for first in range(0, len(samples), WINDOWS_PER_CALL):
        windows = slice(first, first + WINDOWS_PER_CALL)
        outside = np.arange(start_logits.shape[1]) >= samples.lengths[windows, None]
        start, end = (_inside(logits[rows[windows]], outside, first, samples, examples) for logits in both)
        window, *columns = _window_spans(start, end, samples.context[windows].copy(), n_best, max_answer_length)
        spans.append((window + first, *columns))
        nulls.append((start[:, 0].clip(min=LOWEST), end[:, 0].clip(min=LOWEST)))
    window, first, last, start, end = map(np.concatenate, zip(*spans, strict=True))
    question = samples.example[window]
    order = np.lexsort((-(start + end), question))  # question by question, best first, ties as they came
    columns = (start + end, *samples.characters(window, first, last), start, end)
    ranked = list(zip(*(column[order].tolist() for column in columns), strict=True))
    bounds = np.searchsorted(question[order], np.arange(len(examples) + 1)).tolist()
    best = [ranked[begin : min(stop, begin + n_best)] for begin, stop in pairwise(bounds)]

    start, end = map(np.concatenate, zip(*nulls, strict=True))
    order = np.lexsort((start + end, samples.example))
    _, first = np.unique(samples.example[order], return_index=True)  # of each question its lowest null score
    lows = zip(*(column[order[first]].tolist() for column in (start + end, start, end)), strict=True)
    null_answers = [(score, None, None, start_logit, end_logit) for score, start_logit, end_logit in lows]
    return Answers(examples, best, null_answers, n_best, null_threshold)


def _rows_by_id(samples, examples, sample_ids, start_logits, end_logits) -> np.ndarray:
    """The row of each window: the guard that logits are joined by id and by nothing else."""
    if len(examples) != samples.n_examples or examples_sha256(examples) != samples.examples_sha256:
        raise ValueError("these examples are not the ones, or not in the order, that the samples were built from")
    n = len(samples)
    shape = tuple(start_logits.shape)
    if shape != tuple(end_logits.shape) or len(shape) != 2 or shape[0] != n or shape[1] < samples.lengths.max():
        raise ValueError(f"logits of shape {shape} and {tuple(end_logits.shape)} for {n} windows")
    ids = torch.as_tensor(sample_ids).cpu().numpy()
    if not np.array_equal(np.sort(ids), np.arange(n)):
        raise ValueError(f"sample ids must be the numbers 0 to {n - 1}, each once, one a row of the logits")
    return np.argsort(ids)


def _inside(logits: np.ndarray, outside: np.ndarray, first: int, samples, examples) -> np.ndarray:
    """The logits with -inf beyond the windows, of which `first` is the number of the first one."""
    values = np.where(outside, -np.inf, logits)
    wrong = ~(values < np.inf).all(axis=1)
    if wrong.any():
        window = first + int(wrong.argmax())
        example = examples[samples.example[window]]
        raise DataError(
            f"article {example.title[:80]!r}, question {example.id!r}: NaN or infinite logits in window {window} "
            "(the model has diverged, or its outputs were given to other windows)"
        )
    return values


def _window_spans(start, end, context, n_best: int, max_answer_length: int) -> tuple[np.ndarray, ...]:
    """Each window's `n_best` best spans, and those that tie with the last of them, by rank of start and of end:
    window, first and last token, start and end logit, all [k].

    `start` and `end` are the logits [windows, L], `context` [windows, 2] says where the paragraph lies.
    """
    start_logit, start = _best_positions(start, n_best, context)
    end_logit, end = _best_positions(end, n_best, context)
    length = end[:, None, :] - start[:, :, None]
    score = start_logit[:, :, None] + end_logit[:, None, :]
    score[(length < 0) | (length >= max_answer_length)] = -np.inf
    score = score.reshape(len(score), -1)
    n_best = min(n_best, score.shape[1])
    least = np.partition(score, -n_best, axis=1)[:, -n_best, None]
    window, pair = np.nonzero((score >= least) & (score > -np.inf))
    of_start, of_end = np.divmod(pair, end.shape[1])
    starts, ends = (window, of_start), (window, of_end)
    return window, start[starts], end[ends], start_logit[starts], end_logit[ends]


def _best_positions(logits: np.ndarray, k: int, context: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The k greatest logits of each window and their positions, greatest first, equal ones from left to right.

    The reference script spends places on [CLS] and the question too, so they are only now struck out, by -inf.
    """
    place = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    outside = (place < context[:, :1]) | (place >= context[:, 1:])
    return np.where(outside, -np.inf, np.take_along_axis(logits, place, axis=1)), place
