"""A run's data from its spec: tokenizer, sources, samples, micro-batches."""

import time
from dataclasses import dataclass, field

import numpy as np
import transformers.utils

from qa_lib.calls import checked, expect
from qa_lib.data.batches import Batches
from qa_lib.data.labels import answer_limit, gold_notes
from qa_lib.data.packing import PackedBatches
from qa_lib.data.squad import Source, open_source
from qa_lib.data.text import Text, Windows, learn_tokenizer, open_text, tokenize_text
from qa_lib.data.tokenize import build_tokenizer
from qa_lib.data.windows import Samples, build_samples
from qa_lib.errors import UserError
from qa_lib.spec.presets import ANSWER_TOKENS, find_shape
from qa_lib.spec.spec import Spec

# For one way of generating text, and for finding objects in pictures, transformers imports scikit-learn and SciPy: two
# seconds on a slow host, before the first model.
transformers.utils.is_sklearn_available = transformers.utils.is_scipy_available = lambda: False


@dataclass
class Data:
    """A run's two sources, the samples to train on and what is scored, what loading them took in seconds, and how much
    there is to train on (`n` questions, or words) and to score (`n_eval` questions, or tokens). A language model's
    samples are Windows, and it is scored on a bare Text. What is of validation is None where the preset measures no
    quality. `notes` are sentences for the run's output."""

    tokenizer: object  # of transformers
    source: Source
    samples: Samples | Windows
    validation: Source | None
    validation_samples: Samples | Text | None
    load_s: float
    n: int
    n_eval: int | None
    max_answer_length: int | None = None  # tokens of an answer, at most; None for a text
    notes: list[str] = field(default_factory=list)


@checked
def load_data(spec: Spec) -> Data:
    """Tokenizer, sources and samples of a run, from the cache where they are in it. Raises UserError for what is no
    spec of questions."""
    expect("spec", spec, Spec, "give one spec that plan has made, as in `(spec,) = plan(...)`")
    if spec.preset.task == "lm":
        raise UserError(
            f"{spec.variant} trains on text: qa_lib.data.load.load_text loads it, load_data questions"
        )
    begin = time.perf_counter()
    tokenizer = build_tokenizer(spec.model_source)
    limits = (spec.preset.max_length, spec.preset.stride)
    source = open_source(spec.data_source, "train")
    validation = open_source(spec.data_source, "validation") if spec.preset.quality else None
    samples = build_samples(source, tokenizer, *limits)
    held_out = build_samples(validation, tokenizer, *limits) if validation else None
    if held_out and held_out.content_sha256 == samples.content_sha256:
        raise UserError(
            f"{validation.name}: has the questions of {source.name}, by which it would be scored"
        )
    if validation:
        examples = (
            validation.examples
        )  # the answers, while a file that has changed costs no training
        if spec.preset.name == "answerable" and (
            silent := [each.id for each in examples if each.impossible]
        ):
            raise UserError(
                f"{validation.name}: question {silent[0]} has no answer; in preset answerable all have one"
            )
    limit = spec.preset.max_answer_length
    notes = []
    if limit is None:
        limit = answer_limit(samples, ANSWER_TOKENS)
        notes.append(
            f"answers may have {limit} tokens: as the training answers need, and at least {ANSWER_TOKENS}; "
            "--max-answer-length sets it"
        )
    for part, windows in ((source, samples), (validation, held_out)):
        if windows:
            notes += gold_notes(windows, part.name, limit)
    seconds, n_eval = time.perf_counter() - begin, held_out.n_examples if held_out else None
    return Data(
        tokenizer,
        source,
        samples,
        validation,
        held_out,
        seconds,
        samples.n_examples,
        n_eval,
        limit,
        notes,
    )


def load_text(spec: Spec) -> Data:
    """Tokenizer, training windows and validation text of a run, from the cache where they are in it.

    Raises DataError for a text that cannot be read, and UserError for one that is shorter than a window and for a
    tokenizer without an end token.
    """
    begin, length = time.perf_counter(), spec.preset.max_length
    source = open_text(spec.data_source, "train")
    validation = open_text(spec.data_source, "validation") if spec.preset.quality else None
    shape = find_shape(spec.model_source)
    tokenizer = (
        learn_tokenizer(source, shape.vocabulary) if shape else build_tokenizer(spec.model_source)
    )
    text = tokenize_text(source, tokenizer)
    if len(text.tokens) < length:
        raise UserError(
            f"{source.name}: a text of {len(text.tokens)} tokens, shorter than a window of {length}"
        )
    held_out = tokenize_text(validation, tokenizer) if validation else None
    if held_out and np.array_equal(held_out.tokens, text.tokens):
        raise UserError(
            f"{validation.name}: is the text of {source.name}, by which it would be scored"
        )
    seconds, n_eval = time.perf_counter() - begin, len(held_out.tokens) - 1 if held_out else None
    return Data(
        tokenizer, source, Windows(text, length), validation, held_out, seconds, text.words, n_eval
    )


def batches_of(samples: Samples | Windows, spec: Spec) -> Batches:
    """The spec's micro-batches, packed or padded."""
    return (PackedBatches if spec.settings.padding == "packed" else Batches)(samples, spec)
