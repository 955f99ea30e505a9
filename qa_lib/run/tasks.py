"""What kinds of work the lab trains for. A task is its data, its model's head and its score; the rest is shared.

Question answering is the first, language modelling the second. Another one takes a loader in data/load.py, an
evaluation in score/, a preset that names it, variants (Variant.task in variants.py says whose they are), and an entry
here and in each of these:

- record.SCORING: the names of its scores, which the report reads
- plan.SOURCES: what opens its data
- encoders.OF_TASK: the models that it trains
- variants.BASELINES: the variant that its others are compared with
- tune.JUDGED and tradeoffs.SCORES: the score that a search goes by, and the one that curves show
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, AutoModelForQuestionAnswering

from qa_lib.data.batches import Batches
from qa_lib.data.load import Data, batches_of, load_data, load_text
from qa_lib.model.build import build_model
from qa_lib.model.load import check_tokenizer
from qa_lib.run.plan import check_planned
from qa_lib.score import evaluate, perplexity
from qa_lib.spec import Spec


@dataclass(frozen=True)
class Task:
    """`load(spec)` gives a run's data, and `head` is transformers' class for the model. `evaluate(model, data, spec,
    device, run_dir)` gives the record's `quality`; record.SCORING says which of these scores compares variants."""

    load: Callable
    head: type
    evaluate: Callable


def prepare(spec: Spec, data: Data | None = None) -> tuple[Data, torch.nn.Module, Batches]:
    """What a spec trains: its data, or `data` that the caller has loaded, its model, and micro-batches of the former.

    Raises UserError where they do not go together, or are not those that the spec was planned with.
    """
    task = TASKS[spec.preset.task]
    data = data or task.load(spec)
    model = build_model(spec, task.head)
    check_tokenizer(spec.model_source, data.tokenizer, model)
    check_planned(spec, [source.sha256 for source in (data.source, data.validation) if source])
    return data, model, batches_of(data.samples, spec)


TASKS = {
    "qa": Task(load_data, AutoModelForQuestionAnswering, evaluate.evaluate),
    "lm": Task(load_text, AutoModelForCausalLM, perplexity.evaluate),
}
