"""From logits to answers: the best spans of every question, its n-best list, and how surely it has no answer.

A model gives each token of a window two logits: the answer begins here, the answer ends here. An answer is a pair of
tokens, scored by the sum of its two logits. Of a window's 384 x 384 pairs only those between the 20 best starts and
the 20 best ends are looked at, and of these only those that run forwards, lie in the paragraph and are short: so does
the reference script (run_qa of transformers, after Devlin et al. 2019). A question's windows then compete in one
list. "No answer" is a pair as well, [CLS] to [CLS]; of a question's windows the one that believes in it least
speaks for all, and SQuAD v2 answers nothing where that score is higher than the best span's by a threshold.

An answer's text is that from its first token's first character to its last token's last, and the characters beside them
that no token has: an uncased vocabulary drops the marks of letters, every WordPiece one drops U+200B and its like, and
without them a word is misspelt. `text_edges` says to which token such a character belongs.

The script loops over a window's pairs in Python, which takes longer than what is here: for a block of windows one table
holds their sums, and one sort ranks each window's. Ties go to what the loop finds first, so that both give the
same lists. Every variant's answers, and the app's, come from here.
"""

import json
import math
import os
from collections.abc import Iterator
from functools import cached_property
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch

from qa_lib.data.squad import DataError, Example
from qa_lib.data.windows import Samples, examples_sha256
from qa_lib.records.files import writable, writable_folder, write_atomically
from qa_lib.spec.presets import ANSWER_TOKENS

BLOCK = 128  # windows that are decoded together: as quick as any number from 64 to 2,048
LOWEST = -1e30  # stands in for a score of -inf, so that no difference is infinite or NaN
Span = tuple[
    float, int | None, int | None, float, float
]  # score, characters begin to end or None, start and end logit


class Answers:
    """Decoded answers of a data set, by question id.

    `predictions[id]` is the answer's text, "" for none; `texts[id]` is that of the best span, whatever the null score,
    which a search for the best threshold needs. `null_odds[id]` is the null score minus the score of the best
    non-empty span (logits; higher means more surely no answer; 1e30 if no span was allowed at all). `nbest[id]` lists
    {text, probability, start_logit, end_logit}, best first, with the null answer (text "") among them; it is built
    when first asked for. The probabilities are a softmax over the list, as in the reference script (transformers'
    run_qa), which also adds the null answer where it is not among the best.
    """

    def __init__(
        self,
        examples: list[Example],
        spans: list[list[Span]],
        nulls: list[Span],
        n_best: int,
        limit: float,
    ):
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
            self.predictions[example.id] = (
                "" if self.null_odds[example.id] > limit else self.texts[example.id]
            )

    def entries(self, i: int) -> list[dict]:
        """The n-best list of question i with places: {text, probability, start_logit, end_logit, score, begin, end},
        where begin and end are characters of the paragraph, None for no answer.

        The null answer comes after the spans that it ties with, and is listed always: it pushes out the last span,
        unless it comes last itself.
        """
        return [
            entry | {"score": span[0], "begin": span[1], "end": span[2]}
            for entry, span in self._ranked(i)
        ]

    def _ranked(self, i: int) -> Iterator[tuple[dict, Span]]:
        example, spans, null = self._questions[i]
        place = sum(span[0] >= null[0] for span in spans)
        listed = [*spans[:place], null, *spans[place:]][: max(self._n_best, place + 1)]
        weights = [math.exp(span[0] - listed[0][0]) for span in listed]
        total = sum(weights)
        for weight, span in zip(weights, listed, strict=True):
            _, begin, end, start_logit, end_logit = span
            text = example.context[begin:end] if end else ""
            entry = {
                "text": text,
                "probability": weight / total,
                "start_logit": start_logit,
                "end_logit": end_logit,
            }
            yield entry, span

    @cached_property
    def nbest(self) -> dict[str, list[dict]]:
        return {
            example.id: [entry for entry, _ in self._ranked(i)]
            for i, (example, *_) in enumerate(self._questions)
        }

    def write(self, folder: str | os.PathLike) -> list[Path]:
        """Write nbest_predictions.json, predictions.json, texts.json and null_odds.json, each whole. Raises
        RecordError, also for a folder that is a link."""
        writable_folder(Path(folder))
        # The largest first: where it fills the disk, all four stay as they were.
        files = {"nbest_predictions": self.nbest, "predictions": self.predictions}
        files |= {"texts": self.texts, "null_odds": self.null_odds}
        for name in files:
            writable(Path(folder, f"{name}.json"))
        encode = json.JSONEncoder(check_circular=False).encode  # a quarter quicker
        for name, content in files.items():
            # One question a line: readable, and the fast encoder of json knows no indentation.
            lines = (f"{encode(key)}: {encode(value)}" for key, value in content.items())
            write_atomically(Path(folder, f"{name}.json"), "{\n" + ",\n".join(lines) + "\n}\n")
        return [Path(folder, f"{name}.json") for name in files]


def decode(
    samples: Samples, examples: list[Example], sample_ids: torch.Tensor, start_logits: torch.Tensor,
    end_logits: torch.Tensor, *, n_best: int = 20, max_answer_length: int = ANSWER_TOKENS, null_threshold: float = 0.0,
) -> Answers:  # fmt: skip
    """Answer every question of `examples`, whose windows are `samples`.

    Row r of the logits [n, L] belongs to window `sample_ids[r]`; rows come in any order. What lies beyond a window's
    own length is never looked at. A window's candidates are the spans between its `n_best` best start and end
    positions that lie in the context and have at most `max_answer_length` tokens; a question's null score is the
    lowest start + end logit at [CLS] over its windows, and "" is answered if null score - best span > `null_threshold`.
    Equal scores are ranked by window, then by rank of start and of end, equal logits by position.
    Raises ValueError unless every window has exactly one row and the examples are those of the samples;
    `DataError` if a logit inside a window is NaN or +inf (also what rows under wrong ids from `predict_logits`
    lead to, as it leaves NaN beyond each window's length).
    """
    rows = _rows_by_id(samples, examples, sample_ids, start_logits, end_logits)
    both = [logits.float().cpu().numpy() for logits in (start_logits, end_logits)]
    null = np.stack([logits[rows, 0] for logits in both], axis=1).clip(min=LOWEST)
    spans, nulls = ([[] for _ in examples] for _ in range(2))  # of each question
    for number, total, pair in zip(
        samples.example.tolist(), null.sum(axis=1).tolist(), null.tolist(), strict=True
    ):
        nulls[number].append((total, None, None, *pair))
    edges_of = _edges_of_examples(samples, examples)
    for block in np.split(np.arange(len(samples)), range(BLOCK, len(samples), BLOCK)):
        lengths = samples.lengths[block, None]
        own = np.arange(lengths.max()) < lengths
        start, end = (
            np.where(own, logits[rows[block], : own.shape[1]], -np.inf) for logits in both
        )
        wrong = block[~((start < np.inf) & (end < np.inf)).all(axis=1)]
        if len(wrong):
            example = examples[samples.example[wrong[0]]]
            place = f"article {example.title[:80]!r}, question {example.id!r}, window {wrong[0]}"
            raise DataError(
                f"{place}: a logit is NaN or +inf (the model has diverged, or these are of other windows)"
            )
        score, window, first, last = _block_spans(
            start, end, samples.context[block], n_best, max_answer_length
        )
        characters = samples.characters(block[window], first, last)
        columns = (
            samples.example[block[window]],
            score,
            *characters,
            start[window, first],
            end[window, last],
        )
        for number, total, begin, end, *pair in zip(*map(np.ndarray.tolist, columns), strict=True):
            if (edges := edges_of[number]) and begin < end:
                begin, end = edges[0][begin], edges[1][end]
            spans[number].append((total, begin, end, *pair))
    best = [sorted(found, key=itemgetter(0), reverse=True)[:n_best] for found in spans]
    return Answers(
        examples, best, [min(found, key=itemgetter(0)) for found in nulls], n_best, null_threshold
    )


def text_edges(context: str, offsets: np.ndarray) -> tuple[list[int], list[int]] | None:
    """Where the text of tokens of a paragraph begins and ends, with the characters beside them that no token has: for
    each character at which a token begins, and for each number that is one past a token's last. None where tokens have
    all characters but blanks, so that nothing is to be added.

    Such characters belong to the token before them, up to the next token or blank; and where a blank or nothing is
    before them, to the token after them. `offsets` int [tokens, 2] are those of all tokens of the paragraph.
    """
    n = len(context)
    begins, ends = offsets[offsets[:, 0] < offsets[:, 1]].T
    depth = np.zeros(n + 1, np.int64)
    np.add.at(depth, begins, 1)
    np.add.at(depth, ends, -1)
    bare = np.zeros(n, bool)
    for place in np.flatnonzero(depth.cumsum()[:n] == 0).tolist():
        bare[place] = not context[place].isspace()
    if not bare.any():
        return None
    first, last = list(range(n + 1)), list(range(n + 1))
    for place in range(n - 1, -1, -1):
        if bare[place]:
            last[place] = last[place + 1]
    run = None  # where a run of such characters began that no token is before
    for place in range(n):
        if not bare[place]:
            if run is not None and not context[place].isspace():
                first[place] = run
            run = None
        elif run is None and (place == 0 or context[place - 1].isspace()):
            run = place
    return first, last


def _edges_of_examples(samples: Samples, examples: list[Example]) -> list:
    """What text_edges gives of each example's paragraph, worked out once for each distinct one."""
    known: dict[str, tuple | None] = {}
    windows = np.searchsorted(samples.example, np.arange(len(examples) + 1))
    places = samples.starts[:-1, None] + samples.context
    for number, example in enumerate(examples):
        if example.context not in known:
            spans = places[windows[number] : windows[number + 1]].tolist()
            offsets = [samples.offsets[begin:end] for begin, end in spans]
            known[example.context] = text_edges(example.context, np.concatenate(offsets))
    return [known[example.context] for example in examples]


def _rows_by_id(samples, examples, sample_ids, start_logits, end_logits) -> np.ndarray:
    """The row of each window: the guard that logits are joined by id and by nothing else."""
    if len(examples) != samples.n_examples or examples_sha256(examples) != samples.examples_sha256:
        raise ValueError(
            "these examples are not the ones, or not in the order, that the samples were built from"
        )
    n = len(samples)
    shape = tuple(start_logits.shape)
    if (
        shape != tuple(end_logits.shape)
        or len(shape) != 2
        or shape[0] != n
        or shape[1] < samples.lengths.max()
    ):
        raise ValueError(f"logits of shape {shape} and {tuple(end_logits.shape)} for {n} windows")
    ids = torch.as_tensor(sample_ids).cpu().numpy()
    if not np.array_equal(np.sort(ids), np.arange(n)):
        raise ValueError(
            f"sample ids must be the numbers 0 to {n - 1}, each once, one a row of the logits"
        )
    return np.argsort(ids)


def _block_spans(
    start, end, context, n_best: int, max_answer_length: int
) -> tuple[np.ndarray, ...]:
    """The `n_best` best spans of each window: score, window, first and last token, four arrays [k], sorted by window,
    then best first, ties by rank of start and end.

    `start` and `end` [windows, tokens] are their logits, -inf beyond a window's own length; `context` [windows, 2] says
    where the paragraph lies. The reference script spends places on [CLS] and the question too, so that they are only
    struck out after the ranking.
    """
    first, last = (
        np.argsort(-logits, axis=1, kind="stable")[:, :n_best] for logits in (start, end)
    )
    inside = (first >= context[:, :1])[:, :, None] & (last < context[:, 1:])[:, None]
    length = last[:, None] - first[:, :, None]
    score = (
        np.take_along_axis(start, first, 1)[:, :, None] + np.take_along_axis(end, last, 1)[:, None]
    )
    score[~inside | (length < 0) | (length >= max_answer_length)] = -np.inf
    score = score.reshape(len(score), -1)
    order = np.argsort(-score, axis=1, kind="stable")[:, :n_best]
    score = np.take_along_axis(score, order, 1)
    window, place = np.nonzero(score > -np.inf)
    of_start, of_end = np.divmod(order[window, place], last.shape[1])
    return score[window, place], window, first[window, of_start], last[window, of_end]
