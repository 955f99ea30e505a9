"""What kinds of work the lab trains for. A task is its data, its model's head and its score; the rest is shared.

Question answering is the first, language modelling the second. Another one takes an entry here, one in record.TASKS
(the names of its scores, which the report reads), one in plan.SOURCES, a loader in data/, an evaluation in score/, and
a scale that names it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from transformers import AutoModelForCausalLM, AutoModelForQuestionAnswering

from qa_lib.data.load import load_data
from qa_lib.data.tokens import load_text
from qa_lib.score import evaluate, perplexity


@dataclass(frozen=True)
class Task:
    """`load(spec)` gives a run's data, `head` is transformers' class for the model, and `evaluate(model, data, spec,
    device, run_dir)` gives the record's `quality`; record.TASKS says by which of these scores rows are compared."""

    load: Callable
    head: type
    evaluate: Callable


TASKS = {
    "qa": Task(load_data, AutoModelForQuestionAnswering, evaluate.evaluate),
    "lm": Task(load_text, AutoModelForCausalLM, perplexity.evaluate),
}
