"""Exact match and F1 by the rules of the official SQuAD v2.0 evaluation (Rajpurkar, Jia, Liang 2018).

Exact match asks whether an answer is, but for case, punctuation and articles, one of those that people gave. F1 is
milder: the harmonic mean of how many of the answer's words are right and how many of the right words it has, by the
best of people's answers. A question without an answer counts 1 for silence and 0 for anything else, so that a model
which never answers scores the share of such questions: half of SQuAD v2. When to be silent is a threshold; `best_f1`
says what the best one would have given on these very questions, which flatters every variant alike.

The command reads of its data what the official script reads, ids and gold answers' texts, and nothing else
(data/squad.py, build_golds). Figures agree with that script's to the last digit: sums run over the questions in the
data's order with Python's `sum`, and scores are int or float where that script has them so (from Python 3.12, `sum`
tells them apart). Every variant's quality is measured here.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Mapping

from qa_lib.data.squad import DataError, Example

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Lower case, without punctuation (ASCII's) and English articles, single blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(gold: list[str], predicted: list[str]) -> float:
    """Harmonic mean of precision and recall over words, counted with their repetitions; both empty is a match."""
    if not gold or not predicted:
        return int(gold == predicted)
    shared = sum((Counter(gold) & Counter(predicted)).values())
    if not shared:
        return 0
    precision, recall = shared / len(predicted), shared / len(gold)
    return 2 * precision * recall / (precision + recall)


def score(
    examples: list[Example], predictions: Mapping[str, str], na_probs: Mapping[str, float] | None = None,
    na_threshold: float = 1.0,
) -> dict[str, float | int]:  # fmt: skip
    """Score `predictions` (question id -> answer, "" for none) with the official keys; scores in percent.

    exact, f1 and total over all questions, with the prefixes HasAns_ and NoAns_ over those with and without an answer
    (left out where there are none). With `na_probs` (question id -> how sure it is that there is no answer, on any
    scale) a question above `na_threshold` counts as not answered, and best_exact, best_f1 and their _thresh are what
    the best threshold would give.
    Predictions and probabilities for further questions are not looked at. Raises `DataError` where one of `examples`
    has no prediction, or no probability if they are given, and for a probability that is no finite number.
    """
    _check(examples, predictions, "prediction", lambda value: isinstance(value, str))
    exact, overlap = {}, {}
    for example in examples:
        predicted = normalise(predictions[example.id])
        words = predicted.split()
        # Gold answers of nothing but articles and punctuation do not count; without any, no answer is the right one.
        golds = {gold for gold in (normalise(text) for text, _ in example.answers) if gold} or {""}
        exact[example.id] = int(predicted in golds)
        overlap[example.id] = max(f1(gold.split(), words) for gold in golds)
    if na_probs is None:
        return _averages(examples, exact, overlap)

    _check(examples, na_probs, "no-answer probability", _is_number)
    silenced = {
        example.id: float(example.impossible)
        for example in examples
        if na_probs[example.id] > na_threshold
    }
    found = _averages(examples, exact | silenced, overlap | silenced)
    for name, scores in (("exact", exact), ("f1", overlap)):
        found[f"best_{name}"], found[f"best_{name}_thresh"] = _best_threshold(
            examples, predictions, scores, na_probs
        )
    return found


def _check(examples: list[Example], given: Mapping, what: str, good) -> None:
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
        if not good(value):
            raise DataError(
                f"article {titles[key][:80]!r}, question {key!r}: {value!r:.80} is no {what}"
            )


def _is_number(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and -math.inf < value < math.inf
    )


def _averages(
    examples: list[Example], exact: dict[str, float], overlap: dict[str, float]
) -> dict[str, float | int]:
    answered = [example for example in examples if example.answers]
    impossible = [example for example in examples if example.impossible]
    found = {}
    for prefix, group in (("", examples), ("HasAns_", answered), ("NoAns_", impossible)):
        if group:
            found[f"{prefix}exact"] = (
                100.0 * sum(exact[example.id] for example in group) / len(group)
            )
            found[f"{prefix}f1"] = (
                100.0 * sum(overlap[example.id] for example in group) / len(group)
            )
            found[f"{prefix}total"] = len(group)
    return found


def _best_threshold(examples, predictions, scores, na_probs) -> tuple[float, float]:
    """The best score (percent) over thresholds on `na_probs`, and the lowest threshold that reaches it.

    The threshold rises through the questions in order of probability (ties in the order of `na_probs`): each one that
    comes to be answered adds its score, or takes back the point that silence had on a question without an answer.
    """
    impossible = {example.id: example.impossible for example in examples}
    current = best = sum(impossible.values())
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
    """The score as an `evaluate.Metric` that is here, not on the hub: nothing is downloaded.

    Its `compute` takes what the hub's "squad_v2" metric takes and gives the keys of `score`. predictions: {id,
    prediction_text, no_answer_probability}; references: {id, answers: {text, answer_start}}, the answers' texts empty
    for a question without one; no_answer_threshold: probability above which a question counts as not answered.
    """
    import datasets  # which with evaluate takes seconds to import, and which no other score needs
    import evaluate

    text, number, place = (datasets.Value(kind) for kind in ("string", "float32", "int32"))
    answers = {"text": datasets.List(text), "answer_start": datasets.List(place)}
    predictions = {"id": text, "prediction_text": text, "no_answer_probability": number}
    features = datasets.Features(
        {"predictions": predictions, "references": {"id": text, "answers": answers}}
    )

    class SquadV2(evaluate.Metric):
        def _info(self) -> evaluate.MetricInfo:
            return evaluate.MetricInfo(__doc__, "Rajpurkar, Jia, Liang 2018", features)

        def _compute(
            self, predictions: list[dict], references: list[dict], no_answer_threshold: float = 1.0
        ) -> dict:
            examples = []
            for row in references:
                golds = zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)
                examples.append(Example(row["id"], "", "", "", tuple(golds)))
            texts = {row["id"]: row["prediction_text"] for row in predictions}
            chances = {row["id"]: row["no_answer_probability"] for row in predictions}
            return score(examples, texts, chances, no_answer_threshold)

    return SquadV2()
