"""A run's data from its spec: tokenizer, sources, samples, micro-batches."""

import time
from dataclasses import dataclass, field

import numpy as np
import transformers.utils

from qa_lib.calls import checked, expect
from qa_lib.data.batches import Batches
from qa_lib.data.labels import answer_limit, gold_notes
from qa_lib.data.packing import EvenBatches, PackedBatches
from qa_lib.data.squad import Source, open_source
from qa_lib.data.text import Text, Windows, learn_tokenizer, open_text, tokenize_text
from qa_lib.data.tokenize import build_tokenizer
from qa_lib.data.windows import Samples, build_samples
from qa_lib.errors import UserError
from qa_lib.spec.presets import ANSWER_TOKENS
from qa_lib.spec.shapes import find_shape
from qa_lib.spec.spec import Spec

# transformers imports scikit-learn and SciPy for one way of generating text, and for finding
# objects in pictures: two seconds on a slow host, before the first model.
transformers.utils.is_sklearn_available = lambda: False
transformers.utils.is_scipy_available = lambda: False


@dataclass
class Data:
    """What a run trains on and is scored by."""

    tokenizer: object  # a fast tokenizer of transformers
    source: Source  # what is trained on
    samples: Samples | Windows  # its windows: of questions, or of a language model's text
    # What is scored, and its windows, or a language model's text as a whole; both None where the
    # preset measures no quality.
    validation: Source | None
    validation_samples: Samples | Text | None
    load_s: float  # seconds that loading took
    n: int  # questions, or words of a text, to train on
    n_eval: int | None  # questions, or tokens of a text, that are scored
    max_answer_length: int | None = None  # tokens of an answer, at most; None for a text
    notes: list[str] = field(default_factory=list)  # sentences for the run's output


@checked
def load_data(spec: Spec) -> Data:
    """Load a run's tokenizer, sources and samples, from the cache where they are in it.

    Raises UserError for what is no spec of questions, and for data that cannot be used.
    """
    expect("spec", spec, Spec, "give one spec that plan has made, as in `(spec,) = plan(...)`")
    if spec.preset.task == "lm":
        raise UserError(
            f"{spec.variant} trains on text: qa_lib.data.load.load_text loads it, "
            "load_data questions"
        )
    begin = time.perf_counter()
    preset = spec.preset
    tokenizer = build_tokenizer(spec.model_source)
    source = open_source(spec.data_source, "train")
    validation = open_source(spec.data_source, "validation") if preset.quality else None
    samples = build_samples(source, tokenizer, preset.max_length, preset.stride)
    validation_samples = None
    if validation:
        validation_samples = build_samples(validation, tokenizer, preset.max_length, preset.stride)
        if validation_samples.content_sha256 == samples.content_sha256:
            raise UserError(
                f"{validation.name}: has the questions of {source.name}, "
                "by which it would be scored"
            )
        _check_answers(validation, preset.name)

    notes = []
    limit = preset.max_answer_length
    if limit is None:
        limit = answer_limit(samples, ANSWER_TOKENS)
        notes.append(
            f"answers may have {limit} tokens: as the training answers need, "
            f"and at least {ANSWER_TOKENS}; --max-answer-length sets it"
        )
    notes += gold_notes(samples, source.name, limit)
    if validation:
        notes += gold_notes(validation_samples, validation.name, limit)
    return Data(
        tokenizer=tokenizer,
        source=source,
        samples=samples,
        validation=validation,
        validation_samples=validation_samples,
        load_s=time.perf_counter() - begin,
        n=samples.n_examples,
        n_eval=validation_samples.n_examples if validation else None,
        max_answer_length=limit,
        notes=notes,
    )


def _check_answers(validation: Source, preset: str) -> None:
    """Read the validation answers, while a file that has changed costs no training.

    Raises UserError at preset answerable for a question without an answer.
    """
    for example in validation.examples:
        if preset == "answerable" and example.impossible:
            raise UserError(
                f"{validation.name}: question {example.id} has no answer; "
                "in preset answerable all have one"
            )


def load_text(spec: Spec) -> Data:
    """Load a run's tokenizer, training windows and validation text, from the cache where they are
    in it.

    Raises DataError for a text that cannot be read, and UserError for one that is shorter than a
    window and for a tokenizer without an end token.
    """
    begin = time.perf_counter()
    length = spec.preset.max_length
    source = open_text(spec.data_source, "train")
    validation = open_text(spec.data_source, "validation") if spec.preset.quality else None
    shape = find_shape(spec.model_source)
    if shape:
        tokenizer = learn_tokenizer(source, shape.vocabulary)
    else:
        tokenizer = build_tokenizer(spec.model_source)
    text = tokenize_text(source, tokenizer)
    if len(text.tokens) < length:
        raise UserError(
            f"{source.name}: a text of {len(text.tokens)} tokens, shorter than a window of {length}"
        )
    validation_text = None
    if validation:
        validation_text = tokenize_text(validation, tokenizer)
        if np.array_equal(validation_text.tokens, text.tokens):
            raise UserError(
                f"{validation.name}: is the text of {source.name}, by which it would be scored"
            )
    return Data(
        tokenizer=tokenizer,
        source=source,
        samples=Windows(text, length),
        validation=validation,
        validation_samples=validation_text,
        load_s=time.perf_counter() - begin,
        n=text.words,
        # The first token is predicted from nothing, and is not scored.
        n_eval=len(validation_text.tokens) - 1 if validation else None,
    )


def batches_of(samples: Samples | Windows, spec: Spec) -> Batches:
    """Return the spec's micro-batches, packed or padded."""
    if spec.settings.padding == "packed" and spec.settings.engine == "searched":
        return EvenBatches(samples, spec)
    if spec.settings.padding == "packed":
        return PackedBatches(samples, spec)
    return Batches(samples, spec)
