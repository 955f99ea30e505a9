"""Plain loops that say what the vectorised code must give: the windowing recipe's labels and the double loop."""

import numpy as np


def overflow(tokenizer, questions: list[str], contexts: list[str], max_length: int, stride: int):
    """The windows that the fast tokenizer itself cuts."""
    cut = {"truncation": "only_second", "max_length": max_length, "stride": stride}
    return tokenizer(
        questions, contexts, return_overflowing_tokens=True, return_offsets_mapping=True, **cut
    )


def plain_span(offsets, answers) -> tuple[int, int] | None:
    """First character of the first gold answer that one of these tokens of the paragraph has, and one past the last;
    blanks at its edges do not count. None where there is no such character."""
    if not answers:
        return None
    text, start = answers[0]
    while text[:1].isspace():
        text, start = text[1:], start + 1
    while text[-1:].isspace():
        text = text[:-1]
    held = {place for begin, end in offsets for place in range(begin, end)}
    inside = [place for place, _ in enumerate(text, start) if place in held]
    return (inside[0], inside[-1] + 1) if inside else None


def plain_positions(offsets, first: int, last: int, span) -> tuple[int, int]:
    """Start and end label of one window whose context tokens are first..last, by the reference recipe's search for the
    characters that plain_span gives.

    Two things differ: the search for the start stops at the window's last context token, and a character of several
    tokens has them all where it is the whole answer.
    """
    if not span or last < first:
        return 0, 0
    begin, finish = span
    if not (offsets[first][0] <= begin and offsets[last][1] >= finish):
        return 0, 0
    start, end = first, last
    while start + 1 <= last and offsets[start + 1][0] <= begin:
        start += 1
    while end - 1 >= first and offsets[end - 1][1] >= finish:
        end -= 1
    return min(start, end), max(start, end)


def plain_text(context: str, begin: int, end: int, held: set[int]) -> str:
    """The text of tokens from character `begin` to `end`, with the characters beside it that are none of `held`, those
    that tokens have: after it up to the next token or blank, and before it where only a blank or nothing is before."""
    while end < len(context) and end not in held and not context[end].isspace():
        end += 1
    before = begin
    while before > 0 and before - 1 not in held and not context[before - 1].isspace():
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
    """Predictions, null odds and n-best lists by a double loop over the n-best start and end positions.

    Row i of the float32 logits belongs to window i. Sorting is stable, so ties go to what was found first.
    """
    windows = {}
    for i, example in enumerate(features.example.tolist()):
        windows.setdefault(example, []).append(i)
    spans = features.context.tolist()
    predictions, odds, lists = {}, {}, {}
    for number, example in enumerate(examples):
        null, found, held = None, [], set()
        for i in windows[number]:
            first, stop = (place + int(features.starts[i]) for place in spans[i])
            for place in features.offsets[first:stop].tolist():
                held.update(range(*place))
        for i in windows[number]:
            first, stop = spans[i]
            offsets = features.offsets[features.starts[i] : features.starts[i + 1]].tolist()
            start, end = start_logits[i, : len(offsets)], end_logits[i, : len(offsets)]
            if null is None or start[0] + end[0] < null["score"]:
                null = {
                    "score": start[0] + end[0],
                    "text": "",
                    "start_logit": start[0],
                    "end_logit": end[0],
                }
            best_ends = np.argsort(-end, kind="stable")[:n_best].tolist()
            for s in np.argsort(-start, kind="stable")[:n_best].tolist():
                for e in best_ends:
                    if s < first or e < first or s >= stop or e >= stop:
                        continue
                    if e < s or e - s + 1 > max_answer_length:
                        continue
                    place = offsets[s][0], offsets[e][1]
                    text = plain_text(example.context, *place, held) if place[0] < place[1] else ""
                    span = {
                        "score": start[s] + end[e],
                        "text": text,
                        "start_logit": start[s],
                        "end_logit": end[e],
                    }
                    found.append(span)
        found.sort(key=lambda span: span["score"], reverse=True)
        best = next((span for span in found[:n_best] if span["text"]), None)
        odd = (
            float(null["start_logit"] + null["end_logit"] - best["start_logit"] - best["end_logit"])
            if best
            else 1e30
        )
        odds[example.id] = odd
        predictions[example.id] = "" if odd > null_threshold else best["text"]
        entries = sorted([*found, null], key=lambda span: span["score"], reverse=True)[:n_best]
        if not any(span is null for span in entries):
            entries.append(null)
        scores = np.array([span["score"] for span in entries], np.float64)
        weights = np.exp(scores - scores.max())
        lists[example.id] = []
        for span, weight in zip(entries, weights / weights.sum(), strict=True):
            sides = {name: float(span[name]) for name in ("start_logit", "end_logit")}
            lists[example.id].append({"text": span["text"], "probability": float(weight)} | sides)
    return predictions, odds, lists
