"""From logits to answers: best spans, n-best lists and no-answer scores, for all windows at once.

Works where the logits are, CPU or GPU; only the few candidates that are left come back to the host.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from qa_lib.data.squad import DataError, Example
from qa_lib.data.windows import Features, examples_sha256
from qa_lib.errors import UserError

WINDOWS_PER_CALL = 2_048  # the tables of n_best x n_best spans stay small enough for a CPU's cache
LOWEST = -1e30  # stands in for a score of -inf, so that no difference is infinite or NaN
SPAN = np.dtype([("begin", "i4"), ("end", "i4"), ("start_logit", "f4"), ("end_logit", "f4")])


class Answers:
    """Decoded answers of a data set, by question id.

    `predictions[id]` is the answer's text, "" for none; `texts[id]` is that of the best span, whatever the null score,
    which a search for the best threshold needs. `null_odds[id]` is the null score minus the score of the best
    non-empty span (logits; higher means more surely no answer; 1e30 if no span was allowed at all). `nbest[id]` lists
    {text, probability, start_logit, end_logit}, best first, with the null answer (text "") among them; it is built
    when first asked for. The probabilities are a softmax over the list, as in the reference script (transformers'
    run_qa), which also adds the null answer where it is not among the best.
    """

    def __init__(self, examples: list[Example], spans: np.ndarray, counts: np.ndarray, nulls: np.ndarray, limit: float):
        # `spans` SPAN [questions, n_best], best first, of which `counts` are filled; `nulls` float32 [questions, 2].
        self._examples, self._spans, self._counts, self._nulls = examples, spans, counts, nulls
        best = spans[np.arange(len(spans)), (spans["end"] > spans["begin"]).argmax(1)]
        odds = (nulls.sum(1) - best["start_logit"] - best["end_logit"]).astype(np.float64)
        odds[best["end"] <= best["begin"]] = -LOWEST
        self.predictions: dict[str, str] = {}
        self.texts: dict[str, str] = {}
        self.null_odds: dict[str, float] = {}
        rows = zip(examples, best["begin"].tolist(), best["end"].tolist(), odds.tolist(), strict=True)
        for example, begin, end, odd in rows:
            self.texts[example.id] = example.context[begin:end]
            self.predictions[example.id] = "" if odd > limit else self.texts[example.id]
            self.null_odds[example.id] = odd

    @cached_property
    def _ranking(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of each question: the scores of its spans, that of the null answer, its place among them, spans to list."""
        n_best = self._spans.shape[1]
        filled = np.arange(n_best) < self._counts[:, None]
        scores = np.where(filled, self._spans["start_logit"] + self._spans["end_logit"], -np.inf)
        null = self._nulls.sum(1)
        # The null answer comes after the spans it ties with, and pushes out the last span unless it is last itself.
        place = (scores >= null[:, None]).sum(1)
        kept = np.where(place < n_best, np.minimum(self._counts, n_best - 1), self._counts)
        return np.where(np.arange(n_best) < kept[:, None], scores, -np.inf), null, place, kept

    def places(self, i: int) -> list[tuple[int, int] | None]:
        """First character, and one past the last, of each entry of question i's n-best list; None for no answer."""
        _, _, place, kept = self._ranking
        found: list = self._spans[["begin", "end"]][i, : kept[i]].tolist()
        found.insert(place[i], None)
        return found

    @cached_property
    def nbest(self) -> dict[str, list[dict]]:
        scores, null, place, kept = self._ranking
        scores = np.column_stack([scores, null]).astype(np.float64)
        weights = np.exp(scores - scores.max(1, keepdims=True))
        chances = (weights / weights.sum(1, keepdims=True)).tolist()
        columns = self._spans.tolist(), self._nulls.tolist(), place.tolist(), kept.tolist()
        found = {}
        for example, chance, spans, ends, at, k in zip(self._examples, chances, *columns, strict=True):
            text, (null_start, null_end) = example.context, ends
            entries = [
                {"text": text[begin:end], "probability": p, "start_logit": start_logit, "end_logit": end_logit}
                for (begin, end, start_logit, end_logit), p in zip(spans[:k], chance[:k], strict=True)
            ]
            null_entry = {"text": "", "probability": chance[-1], "start_logit": null_start, "end_logit": null_end}
            entries.insert(at, null_entry)
            found[example.id] = entries
        return found

    def write(self, folder: str | os.PathLike) -> list[Path]:
        """Write predictions.json, texts.json, nbest_predictions.json and null_odds.json: all whole, or none of them."""
        files = {
            "predictions.json": self.predictions,
            "texts.json": self.texts,
            "nbest_predictions.json": self.nbest,
            "null_odds.json": self.null_odds,
        }
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".tmp-", dir=folder) as work:
                for name, content in files.items():
                    # One question a line: readable, and the fast encoder of json knows no indentation.
                    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in content.items())
                    Path(work, name).write_text("{\n" + ",\n".join(lines) + "\n}\n")
                for name in files:
                    os.replace(Path(work, name), folder / name)
        except OSError as error:
            raise UserError(f"{folder}: {error.strerror}") from None
        return [folder / name for name in files]


@contextmanager
def one_thread() -> Iterator[None]:
    """On a CPU the tables are too small for threads to gain much, and where cores are busy they wait for each other:
    12,000 windows took 0.17 s with one thread and anything from 0.09 to 2.5 s with two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def decode(
    features: Features,
    examples: list[Example],
    feature_ids: torch.Tensor,
    start_logits: torch.Tensor,
    end_logits: torch.Tensor,
    *,
    n_best: int = 20,
    max_answer_length: int = 30,
    null_threshold: float = 0.0,
) -> Answers:
    """Answer every question of `examples`, whose windows are `features`.

    Row r of the logits [n, L] belongs to window `feature_ids[r]`; rows come in any order. What lies beyond a window's
    own length is never looked at. A window's candidates are the spans between its `n_best` best start and end
    positions that lie in the context and have at most `max_answer_length` tokens; a question's null score is the
    lowest start + end logit at [CLS] over its windows, and "" is answered if null score - best span > `null_threshold`.
    Equal scores are ranked by window, then by rank of start and of end, equal logits by position.
    Raises ValueError unless every window has exactly one row and the examples are those of the features;
    `DataError` if a logit inside a window is NaN or infinite (also what rows under wrong ids from `predict_logits`
    lead to, as it leaves NaN beyond each window's length).
    """
    order = _rows_by_id(features, examples, feature_ids, start_logits, end_logits).to(start_logits.device)
    lengths = torch.from_numpy(features.lengths).to(order.device)
    context = torch.from_numpy(features.context_span).to(order.device)
    found, nulls = [], []
    for first in range(0, len(features), WINDOWS_PER_CALL):
        windows = slice(first, first + WINDOWS_PER_CALL)
        outside = torch.arange(start_logits.shape[1], device=order.device) >= lengths[windows, None]
        start, end = (
            _inside(logits[order[windows]], outside, first, features, examples) for logits in (start_logits, end_logits)
        )
        window, *rest = _window_spans(start, end, context[windows], n_best, max_answer_length)
        found.append((window + first, *rest))
        nulls.append(torch.stack([start[:, 0], end[:, 0]], dim=1).clamp(min=LOWEST))
    window, begin, end, start_logit, end_logit = (torch.cat(column) for column in zip(*found, strict=True))
    nulls = torch.cat(nulls)
    example = torch.from_numpy(features.example.astype(np.int64)).to(order.device)

    best, rank = _rank_by_example(start_logit + end_logit, example[window])
    best, rank = best[rank < n_best], rank[rank < n_best]
    columns = (example[window], window, begin, end, start_logit, end_logit)
    question, window, begin, end, *chosen = (column[best].cpu().numpy() for column in columns)
    spans = np.zeros((len(examples), n_best), SPAN)
    values = (*features.characters(window, begin, end), *chosen)
    for field, value in zip(SPAN.names, values, strict=True):
        spans[field][question, rank.cpu().numpy()] = value
    counts = np.bincount(question, minlength=len(examples))
    lowest, rank = _rank_by_example(-nulls.sum(1), example)
    return Answers(examples, spans, counts, nulls[lowest[rank == 0]].cpu().numpy(), null_threshold)


def _rows_by_id(features, examples, feature_ids, start_logits, end_logits) -> torch.Tensor:
    """The row of each window: the guard that logits are joined by id and by nothing else."""
    if len(examples) != features.n_examples or examples_sha256(examples) != features.examples_sha256:
        raise ValueError("these examples are not the ones, or not in the order, that the features were built from")
    n = len(features)
    shape = tuple(start_logits.shape)
    if shape != tuple(end_logits.shape) or len(shape) != 2 or shape[0] != n or shape[1] < features.lengths.max():
        raise ValueError(f"logits of shape {shape} and {tuple(end_logits.shape)} for {n} windows")
    ids = torch.as_tensor(feature_ids).cpu().long()
    if ids.shape != (n,) or ids.min() < 0 or ids.max() >= n:
        raise ValueError(f"feature ids must be a list of {n} numbers from 0 to {n - 1}, one a row of the logits")
    rows = torch.full((n,), -1)
    rows[ids] = torch.arange(n)
    if (rows < 0).any():
        raise ValueError(f"{int((rows < 0).sum())} windows have no row in the logits, as other ids come twice")
    return rows


def _inside(logits, outside, first: int, features, examples) -> torch.Tensor:
    """Logits, which may be overwritten, as float32 with -inf beyond the windows; `first` numbers the first window."""
    values = logits.float().masked_fill_(outside, -torch.inf)
    if not (values < torch.inf).all():
        window = first + int((~(values < torch.inf)).any(1).nonzero()[0])
        example = examples[features.example[window]]
        raise DataError(
            f"article {example.title[:80]!r}, question {example.id!r}: NaN or infinite logits in window {window} "
            "(the model has diverged, or its outputs were given to other windows)"
        )
    return values


def _window_spans(start, end, context, n_best: int, max_answer_length: int) -> tuple[torch.Tensor, ...]:
    """Each window's best spans, window by window: window, first token, last token, start and end logit, all [k]."""
    start_logit, start = _best_positions(start, n_best, context)
    end_logit, end = _best_positions(end, n_best, context)
    length = (end[:, None, :] - start[:, :, None]).flatten(1)
    score = (start_logit[:, :, None] + end_logit[:, None, :]).flatten(1)
    score.masked_fill_((length < 0) | (length >= max_answer_length), -torch.inf)
    # All spans as good as the n-th best: ties may leave a few too many, which the ranking by question cuts off.
    chosen = score >= _nth_greatest(score, n_best).clamp(min=torch.finfo(torch.float32).min)
    window, pair = chosen.nonzero(as_tuple=True)
    of_start, of_end = pair // end.shape[1], pair % end.shape[1]
    tokens = (start[window, of_start].long(), end[window, of_end].long())
    return window, *tokens, start_logit[window, of_start], end_logit[window, of_end]


def _best_positions(values: torch.Tensor, k: int, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The k greatest logits of each window and their positions (int16), greatest first, equal ones from left to right.

    The reference script spends places on [CLS] and the question too, so they are only now struck out, by -inf.
    """
    k = min(k, values.shape[1])
    # torch.topk leaves the order of equal values open, and with it which of them it takes.
    chosen = values >= _nth_greatest(values, k)
    many = (chosen.sum(1) > k).nonzero()[:, 0]
    if len(many):
        kept = values[many].argsort(dim=1, descending=True, stable=True)[:, :k]
        chosen[many] = torch.zeros_like(chosen[many]).scatter_(1, kept, True)
    place = chosen.nonzero()[:, 1].view(-1, k)
    best, order = values.gather(1, place).sort(dim=1, descending=True, stable=True)
    place = place.gather(1, order)
    best = best.masked_fill((place < context[:, :1]) | (place >= context[:, 1:]), -torch.inf)
    return best, place.to(torch.int16)


def _nth_greatest(values: torch.Tensor, n: int) -> torch.Tensor:
    """The n-th greatest value of each row, or the least where the row is shorter; [rows, 1]."""
    n = min(n, values.shape[1])
    if values.is_cpu:  # numpy's partition is some five times as fast as torch's topk there
        return torch.from_numpy(np.partition(values.numpy(), -n, axis=1)[:, -n, None])
    return values.topk(n).values[:, -1:]


def _rank_by_example(scores: torch.Tensor, example: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An order that goes example by example, best score first, and each entry's rank within its example; both [k].

    Equal scores stay in the order they came in. Sorts once, by whole numbers: the example above a float32's bits,
    which are turned so that they rise as the score falls.
    """
    bits = (scores + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    falling = torch.where(bits < 0, bits, bits ^ 0x7FFFFFFF).long() & 0xFFFFFFFF
    order = ((example << 32) | falling).argsort(stable=True)
    example = example[order]
    counts = torch.bincount(example)
    rank = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[example]
    return order, rank
