"""Plain loops that say what the vectorised code must give.

They are the windowing recipe's labels, and the answers by a double loop over starts and ends.
"""

import numpy as np


def overflow(tokenizer, questions: list[str], contexts: list[str], max_length: int, stride: int):
    """Return the windows that the fast tokenizer itself cuts."""
    return tokenizer(
        questions,
        contexts,
        truncation="only_second",
        max_length=max_length,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )


def plain_span(offsets, answers) -> tuple[int, int] | None:
    """Return the first character of the first gold answer that a token has, and one past the last.

    The tokens are those of the paragraph. Blanks at the answer's edges do not count. Returns None
    where no token has a character of the answer.
    """
    if not answers:
        return None
    text, start = answers[0]
    while text[:1].isspace():
        text = text[1:]
        start += 1
    while text[-1:].isspace():
        text = text[:-1]
    in_tokens = {place for begin, end in offsets for place in range(begin, end)}
    places = [place for place in range(start, start + len(text)) if place in in_tokens]
    return (places[0], places[-1] + 1) if places else None


def plain_positions(offsets, first: int, last: int, span) -> tuple[int, int]:
    """Return the start and end label of one window whose context tokens are first..last.

    It is the reference recipe's search for the characters that plain_span gives. Two things differ:
    the search for the start stops at the window's last context token, and a character of several
    tokens has them all where it is the whole answer.
    """
    if not span or last < first:
        return 0, 0
    begin, finish = span
    is_inside = offsets[first][0] <= begin and finish <= offsets[last][1]
    if not is_inside:
        return 0, 0
    start = first
    end = last
    while start + 1 <= last and offsets[start + 1][0] <= begin:
        start += 1
    while end - 1 >= first and offsets[end - 1][1] >= finish:
        end -= 1
    return min(start, end), max(start, end)


def plain_text(context: str, begin: int, end: int, in_tokens: set[int]) -> str:
    """Return the text of tokens from character `begin` to `end`, with what no token has beside it.

    `in_tokens` are the characters that tokens have. Others that follow the text are added up to the
    next token or blank; those before it where only a blank or nothing is before them.
    """
    while end < len(context) and end not in in_tokens and not context[end].isspace():
        end += 1
    before = begin
    while before > 0 and before - 1 not in in_tokens and not context[before - 1].isspace():
        before -= 1
    if before == 0 or context[before - 1].isspace():
        begin = before
    return context[begin:end]


def plain_answers(
    features,
    examples,
    start_logits,
    end_logits,
    n_best=20,
    max_answer_length=30,
    null_threshold=0.0,
):
    """Return predictions, null odds and n-best lists by a double loop over starts and ends.

    Row i of the float32 logits belongs to window i. Sorting is stable, so ties go to what was found
    first.
    """
    windows = {}
    for window, example in enumerate(features.example.tolist()):
        windows.setdefault(example, []).append(window)
    predictions = {}
    odds = {}
    lists = {}
    for number, example in enumerate(examples):
        null, spans = plain_spans(
            features,
            windows[number],
            example.context,
            start_logits,
            end_logits,
            n_best=n_best,
            max_answer_length=max_answer_length,
        )
        spans.sort(key=lambda span: span["score"], reverse=True)
        best = next((span for span in spans[:n_best] if span["text"]), None)
        if best:
            odds[example.id] = float(
                null["start_logit"] + null["end_logit"] - best["start_logit"] - best["end_logit"]
            )
        else:
            odds[example.id] = 1e30
        answers = odds[example.id] <= null_threshold
        predictions[example.id] = best["text"] if answers else ""
        lists[example.id] = plain_n_best(null, spans, n_best)
    return predictions, odds, lists


def plain_spans(
    features, windows, context, start_logits, end_logits, n_best, max_answer_length
) -> tuple[dict, list[dict]]:
    """Return the least null answer of a question's windows, and their spans in order of search."""
    all_spans = features.context.tolist()
    in_tokens = set()
    for window in windows:
        first, stop = (place + int(features.starts[window]) for place in all_spans[window])
        for begin, end in features.offsets[first:stop].tolist():
            in_tokens.update(range(begin, end))
    null = None
    spans = []
    for window in windows:
        first, stop = all_spans[window]
        offsets = features.offsets[features.starts[window] : features.starts[window + 1]].tolist()
        start = start_logits[window, : len(offsets)]
        end = end_logits[window, : len(offsets)]
        if null is None or start[0] + end[0] < null["score"]:
            null = plain_answer("", start[0], end[0])
        best_ends = np.argsort(-end, kind="stable")[:n_best].tolist()
        for s in np.argsort(-start, kind="stable")[:n_best].tolist():
            for e in best_ends:
                if s < first or e < first or s >= stop or e >= stop:
                    continue
                if e < s or e - s + 1 > max_answer_length:
                    continue
                begin = offsets[s][0]
                finish = offsets[e][1]
                text = plain_text(context, begin, finish, in_tokens) if begin < finish else ""
                spans.append(plain_answer(text, start[s], end[e]))
    return null, spans


def plain_answer(text, start_logit, end_logit) -> dict:
    return {
        "score": start_logit + end_logit,
        "text": text,
        "start_logit": start_logit,
        "end_logit": end_logit,
    }


def plain_n_best(null: dict, spans: list[dict], n_best: int) -> list[dict]:
    """Return the best of spans and null answer, which is in any case there, with probabilities."""
    entries = sorted([*spans, null], key=lambda span: span["score"], reverse=True)[:n_best]
    if not any(span is null for span in entries):
        entries.append(null)
    scores = np.array([span["score"] for span in entries], np.float64)
    weights = np.exp(scores - scores.max())
    return [
        {
            "text": span["text"],
            "probability": float(weight),
            "start_logit": float(span["start_logit"]),
            "end_logit": float(span["end_logit"]),
        }
        for span, weight in zip(entries, weights / weights.sum(), strict=True)
    ]
