"""The tasks: answering questions and modelling language, each as one object of facts.

What a task does (how its data are opened and loaded, how a model is scored) is in run/tasks.py and
model/build.py; here is what is known of it without torch. Standard library only.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """How a run of a task is scored: the section `task` of its record."""

    metric: str
    """The score by which variants are compared, a name in `scores`."""
    label: str
    """What tables and figures call that score."""
    higher_is_better: bool
    scores: list[str]
    """All scores, which the record's section `quality` holds."""


@dataclass(frozen=True, kw_only=True)
class HubCard:
    """What differs between tasks in the card of a model, in the words of the Hugging Face hub."""

    purpose: str
    pipeline_tag: str
    loader: str
    """transformers' class that loads the model."""
    metrics: Mapping[str, str]
    """Scores that the hub knows, and the hub's names of them."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a model is trained for."""

    name: str
    baseline: str
    """The variant that others are compared with."""
    families: Mapping[str, str]
    """First letters of the task's variants, and the notebook of each."""
    scoring: Scoring
    tuned_by: str
    """The score by which a search chooses, a name in `scoring.scores`."""
    tuned_label: str
    """What tables call that score."""
    reference: str
    """The group of records by which `on_gpu` is in order."""
    on_gpu: list[str]
    """Variants that `recommended` may take on a GPU, the quickest first; each of them has the
    baseline's score (lab/search/recommend.py)."""
    on_cpu: list[str]
    """The same where there is no GPU."""
    reference_of_several: str
    """The group of records by which `on_gpus` is in order."""
    on_gpus: list[str]
    """Variants that `recommended` may take on several GPUs, the quickest first; each is one of
    `on_gpu`, or the baseline, in several processes."""
    on_cpus: list[str]
    """The same where there is no GPU."""
    card: HubCard
    official: Mapping[str, str] = field(default_factory=dict)
    """Scores that the official evaluation script calls otherwise, and its names of them."""


QA = Task(
    name="qa",
    baseline="A1",
    families={
        "A": "systems",
        "B": "peft",
        "C": "memory",
        "D": "backends",
        "E": "beyond",
        "P": "parallel",
    },
    scoring=Scoring(
        metric="f1",
        label="F1",
        higher_is_better=True,
        scores=[
            "exact",
            "f1",
            "has_answer_exact",
            "has_answer_f1",
            "no_answer_f1",
            "best_exact",
            "best_exact_threshold",
            "best_f1",
            "best_f1_threshold",
            "always_null_f1",
            "loss",
            "n",
        ],
    ),
    tuned_by="best_f1",
    tuned_label="F1 at the best threshold",
    reference="h100-80gb-hbm3-bench",
    on_gpu=[
        "E-fp8-gradients",
        "E-uncompiled",
        "E-t4-norm",
        "E-masters",
        "E-t4",
        "E-graph",
        "A4",
        "A2",
        "A1",
    ],
    on_cpu=["A4", "A2", "A1"],
    reference_of_several="h200-parallel",
    on_gpus=[
        "P-peers-fp8",
        "P-peers",
        "P-nccl-fp8",
        "P-nccl",
        "P-nccl-t4",
        "P-graph",
        "P1",
    ],
    on_cpus=["P1"],
    card=HubCard(
        purpose="question answering",
        pipeline_tag="question-answering",
        loader="AutoModelForQuestionAnswering",
        metrics={"exact": "exact_match", "f1": "f1"},
    ),
    official={
        "has_answer_exact": "HasAns_exact",
        "has_answer_f1": "HasAns_f1",
        "no_answer_f1": "NoAns_f1",
        "best_exact_threshold": "best_exact_thresh",
        "best_f1_threshold": "best_f1_thresh",
        "n": "total",
    },
)

LM = Task(
    name="lm",
    baseline="L1",
    families={"L": "language"},
    scoring=Scoring(
        metric="word_perplexity",
        label="perplexity",
        higher_is_better=False,
        scores=[
            "word_perplexity",
            "token_perplexity",
            "bits_per_byte",
            "nats",
            "n",
            "words",
            "bytes",
        ],
    ),
    tuned_by="word_perplexity",
    tuned_label="perplexity",
    reference="h200-lm-bench",
    on_gpu=["L-dropout", "L-compile", "L-sdpa", "L-fp16", "L1"],
    on_cpu=["L-sdpa", "L1"],
    reference_of_several="h200-lm-bench",
    on_gpus=["L-one-bucket", "L-ddp"],
    on_cpus=["L-ddp"],
    card=HubCard(
        purpose="text generation",
        pipeline_tag="text-generation",
        loader="AutoModelForCausalLM",
        metrics={"word_perplexity": "perplexity"},
    ),
)

TASKS = {task.name: task for task in (QA, LM)}
