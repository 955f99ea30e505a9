"""What kinds of work the lab trains for. A task is its data, its model's head and its score; the rest is shared.

Question answering is the first, language modelling the second. Another one takes a loader in data/load.py, an
evaluation in score/, a scale that names it, rows (Variant.task in variants.py says whose they are), and an entry here
and in each of these:

- record.SCORING: the names of its scores, which the report reads
- plan.SOURCES: what opens its data
- encoders.OF_TASK: the models that it trains
- variants.BASELINES: the row that its others are compared with
- tune.JUDGED and tradeoffs.SCORES: the score that a search goes by, and the one that curves show
"""

from collections.abc import Callable
from dataclasses import dataclass

from transformers import AutoModelForCausalLM, AutoModelForQuestionAnswering

from qa_lib.data.load import load_data, load_text
from qa_lib.score import evaluate, perplexity


@dataclass(frozen=True)
class Task:
    """`load(spec)` gives a run's data, `head` is transformers' class for the model, and `evaluate(model, data, spec,
    device, run_dir)` gives the record's `quality`; record.SCORING says by which of these scores rows are compared."""

    load: Callable
    head: type
    evaluate: Callable


TASKS = {
    "qa": Task(load_data, AutoModelForQuestionAnswering, evaluate.evaluate),
    "lm": Task(load_text, AutoModelForCausalLM, perplexity.evaluate),
}
