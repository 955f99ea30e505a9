"""A run's data from its spec: tokenizer, sources, features, micro-batches."""

import time
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase as Tokenizer

from qa_lib.data.batches import Batches
from qa_lib.data.packing import PackedBatches
from qa_lib.data.squad import Source, open_source
from qa_lib.data.tokenise import build_tokenizer
from qa_lib.data.windows import Features, build_features
from qa_lib.spec import Spec


@dataclass
class Data:
    """A run's two sources and their features, what loading them took in seconds, and how much there is to train on
    (`n` questions, or words) and to score (`n_eval` questions, or tokens); what is of validation is None where the
    scale measures no quality."""

    tokenizer: Tokenizer
    source: Source
    features: Features
    validation: Source | None
    validation_features: Features | None
    load_s: float
    n: int
    n_eval: int | None


def load_data(spec: Spec) -> Data:
    """Tokenizer, sources and features of a run, from the cache where they are in it."""
    begin = time.perf_counter()
    tokenizer = build_tokenizer(spec.model_source)
    limits = (spec.scale.max_length, spec.scale.stride)
    source = open_source(spec.data_source, "train")
    validation = open_source(spec.data_source, "validation") if spec.scale.quality else None
    features = build_features(source, tokenizer, *limits)
    validation_features = build_features(validation, tokenizer, *limits) if validation else None
    n = int(features.example.max()) + 1  # without parsing the questions again
    n_eval = len(validation.examples) if validation else None
    return Data(tokenizer, source, features, validation, validation_features, time.perf_counter() - begin, n, n_eval)


def batches_of(features: Features, spec: Spec) -> Batches:
    """The spec's micro-batches, packed or padded."""
    return (PackedBatches if spec.settings.padding == "packed" else Batches)(features, spec)
