"""The SQuAD v2 score as an `evaluate.Metric` that is here, not on the hub: nothing is downloaded."""

from __future__ import annotations

import datasets
import evaluate

from qa_lib.data.squad import Example
from qa_lib.score.f1 import score

_TEXT = datasets.Value("string")
_PREDICTION = {"id": _TEXT, "prediction_text": _TEXT, "no_answer_probability": datasets.Value("float32")}
_ANSWERS = {"text": datasets.List(_TEXT), "answer_start": datasets.List(datasets.Value("int32"))}


class SquadV2(evaluate.Metric):
    """`compute` takes what the hub's "squad_v2" metric takes and gives the keys of `qa_lib.score.f1.score`.

    predictions: {id, prediction_text, no_answer_probability}; references: {id, answers: {text, answer_start}}, the
    answers' texts empty for a question without one; no_answer_threshold: probability above which a question counts as
    not answered.
    """

    def _info(self) -> evaluate.MetricInfo:
        features = {"predictions": _PREDICTION, "references": {"id": _TEXT, "answers": _ANSWERS}}
        return evaluate.MetricInfo(
            description="Exact match and F1 by the official rules of SQuAD v2.0.",
            citation="Rajpurkar, Jia, Liang: Know What You Don't Know: Unanswerable Questions for SQuAD (2018)",
            inputs_description=self.__doc__,
            features=datasets.Features(features),
        )

    def _compute(self, predictions: list[dict], references: list[dict], no_answer_threshold: float = 1.0) -> dict:
        examples = []
        for row in references:
            answers = zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)
            examples.append(Example(row["id"], "", "", "", tuple(answers)))
        texts = {row["id"]: row["prediction_text"] for row in predictions}
        chances = {row["id"]: row["no_answer_probability"] for row in predictions}
        return score(examples, texts, chances, no_answer_threshold)
