"""Exact match and F1 by the rules of the official SQuAD v2.0 evaluation (Rajpurkar et al. 2018).

Exact match asks whether an answer is, but for case, punctuation and articles, one of those that
people gave. F1 is milder: the harmonic mean of how many of the answer's words are right and how
many of the right words it has, by the best of people's answers. A question without an answer counts
1 for silence and 0 for anything else, so that a model which never answers scores the share of such
questions: half of SQuAD v2. When to be silent is a threshold; `best_f1` says what the best one
would have given on these very questions, which flatters every variant alike.

The command reads of its data what the official script reads, ids and gold answers' texts, and
nothing else (data/examples.py, build_golds). Figures agree with that script's to the last digit:
sums run over the questions in the data's order with Python's `sum`, and scores are int or float
where that script has them so (from Python 3.12, `sum` tells them apart). Every variant's quality is
measured here.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping

from qa_lib.data.examples import Example
from qa_lib.data.files import DataError

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Return a text in lower case, without ASCII punctuation and English articles, with single
    blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(gold: list[str], predicted: list[str]) -> float:
    """Return the harmonic mean of precision and recall over words, counted with repetitions.

    Two empty lists match. The result is an int where the official script has one.
    """
    if not gold or not predicted:
        return int(gold == predicted)
    shared = sum((Counter(gold) & Counter(predicted)).values())
    if not shared:
        return 0
    precision, recall = shared / len(predicted), shared / len(gold)
    return 2 * precision * recall / (precision + recall)


def score(
    examples: list[Example],
    predictions: Mapping[str, str],
    na_probs: Mapping[str, float] | None = None,
    na_threshold: float = 1.0,
) -> dict[str, float | int]:
    """Score predictions with the official keys, in percent.

    `predictions` has the answer of each question by its id, "" for none. The figures are exact, f1
    and total over all questions, with the prefixes HasAns_ and NoAns_ over those with and without
    an answer (left out where there are none).

    `na_probs` says by question id how sure it is that there is no answer, on any scale. With it a
    question above `na_threshold` counts as not answered, and best_exact, best_f1 and their _thresh
    are what the best threshold would give.

    Predictions and probabilities for further questions are not looked at. Raises DataError where
    one of `examples` has no prediction, or no probability if they are given, and for a probability
    that is no finite number.
    """
    _check(examples, predictions, "prediction", lambda value: isinstance(value, str))
    exact = {}  # by question id: 1 where the answer is one of people's
    overlap = {}  # by question id: the F1 by the best of people's answers
    for example in examples:
        predicted = normalise(predictions[example.id])
        words = predicted.split()
        # Gold answers of nothing but articles and punctuation do not count; without any, no answer
        # is the right one.
        golds = {normalise(text) for text, _ in example.answers} - {""}
        golds = golds or {""}
        exact[example.id] = int(predicted in golds)
        overlap[example.id] = max(f1(gold.split(), words) for gold in golds)
    if na_probs is None:
        return _averages(examples, exact, overlap)

    _check(examples, na_probs, "no-answer probability", _is_number)
    silenced = {}  # the scores of questions that count as not answered
    for example in examples:
        if na_probs[example.id] > na_threshold:
            silenced[example.id] = float(example.impossible)
    figures = _averages(examples, exact | silenced, overlap | silenced)
    for name, scores in (("exact", exact), ("f1", overlap)):
        best, threshold = _best_threshold(examples, predictions, scores, na_probs)
        figures[f"best_{name}"] = best
        figures[f"best_{name}_thresh"] = threshold
    return figures


def _check(
    examples: list[Example], given: Mapping, what: str, is_good: Callable[[object], bool]
) -> None:
    """Raise DataError unless each example has a value among the `given`, a `what` that is good."""
    titles = {example.id: example.title for example in examples}
    if not titles:
        raise DataError("no questions to score")
    missing = [key for key in titles if key not in given]
    if missing:
        where = f"article {titles[missing[0]][:80]!r}, question {missing[0]!r}"
        raise DataError(
            f"no {what} for {len(missing)} of {len(titles)} questions, the first: {where}"
        )
    for key in titles:
        value = given[key]
        if not is_good(value):
            raise DataError(
                f"article {titles[key][:80]!r}, question {key!r}: {value!r:.80} is no {what}"
            )


def _is_number(value: object) -> bool:
    """Say whether a value of JSON is a finite number, of any size."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -math.inf < value < math.inf


def _averages(
    examples: list[Example], exact: dict[str, float], overlap: dict[str, float]
) -> dict[str, float | int]:
    """Return the mean scores (percent) and counts over all questions, those with an answer, and
    those without one; a group without questions is left out."""
    answered = [example for example in examples if example.answers]
    impossible = [example for example in examples if example.impossible]
    figures = {}
    for prefix, group in (("", examples), ("HasAns_", answered), ("NoAns_", impossible)):
        if not group:
            continue
        n = len(group)
        figures[f"{prefix}exact"] = 100.0 * sum(exact[example.id] for example in group) / n
        figures[f"{prefix}f1"] = 100.0 * sum(overlap[example.id] for example in group) / n
        figures[f"{prefix}total"] = n
    return figures


def _best_threshold(
    examples: list[Example],
    predictions: Mapping[str, str],
    scores: dict[str, float],
    na_probs: Mapping[str, float],
) -> tuple[float, float]:
    """Return the best score (percent) over thresholds on `na_probs`, and the lowest threshold that
    reaches it.

    The threshold rises through the questions in order of probability (ties in the order of
    `na_probs`): each one that comes to be answered adds its score, or takes back the point that
    silence had on a question without an answer.
    """
    impossible = {example.id: example.impossible for example in examples}
    current = sum(impossible.values())  # the points of a model that never answers
    best = current
    threshold = 0.0
    known = (key for key in na_probs if key in impossible)
    for key in sorted(known, key=na_probs.get):
        if not impossible[key]:
            current += scores[key]
        elif predictions[key]:
            current -= 1
        if current > best:
            best, threshold = current, na_probs[key]
    return 100.0 * best / len(scores), threshold


def squad_metric():
    """Return the score as an `evaluate.Metric` that is here, not on the hub: nothing is downloaded.

    Its `compute` takes what the hub's "squad_v2" metric takes and gives the keys of `score`.
    predictions: {id, prediction_text, no_answer_probability}; references: {id, answers: {text,
    answer_start}}, the answers' texts empty for a question without one; no_answer_threshold:
    probability above which a question counts as not answered.
    """
    # These take seconds to import, and no other score needs them.
    import datasets
    import evaluate

    text = datasets.Value("string")
    number = datasets.Value("float32")
    starts = datasets.List(datasets.Value("int32"))
    answers = {"text": datasets.List(text), "answer_start": starts}
    predictions = {"id": text, "prediction_text": text, "no_answer_probability": number}
    references = {"id": text, "answers": answers}
    features = datasets.Features({"predictions": predictions, "references": references})

    class SquadV2(evaluate.Metric):
        def _info(self) -> evaluate.MetricInfo:
            return evaluate.MetricInfo(__doc__, "Rajpurkar, Jia, Liang 2018", features)

        def _compute(
            self, predictions: list[dict], references: list[dict], no_answer_threshold: float = 1.0
        ) -> dict:
            examples = []
            for row in references:
                golds = zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)
                example = Example(
                    row["id"], title="", question="", context="", answers=tuple(golds)
                )
                examples.append(example)
            texts = {row["id"]: row["prediction_text"] for row in predictions}
            chances = {row["id"]: row["no_answer_probability"] for row in predictions}
            return score(examples, texts, chances, no_answer_threshold)

    return SquadV2()
