"""Ask a checkpoint: it is loaded once, and kept with a few others."""

import time
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import torch

from qa_lib.data.squad import DataError
from qa_lib.data.windows import build_features
from qa_lib.score.decode import LOWEST, decode
from qa_lib.score.predict import answering_device, asked, load_qa_model, predict_logits, window_lengths

LOADED = 4  # models kept in memory
MOST_WINDOWS = 2_000  # of a question; the longest paragraph and a question of a sentence take some 400
BATCH_TOKENS = 1_024  # on two cores BERT-base answers the quicker, the more alike the windows of a forward pass are
THREADS = torch.get_num_threads()


class QuestionTooLong(DataError):
    """A question that leaves its paragraph no room in a window, or so little that it is cut into very many."""


@dataclass(frozen=True)
class Model:
    """A loaded checkpoint, ready to answer, with the tokens of its windows and of their overlap.

    A `small` one is kept to one thread: beside busy cores the tiny model took 175 ms with two and 2 with one.
    """

    model: torch.nn.Module
    tokenizer: object
    max_length: int
    stride: int
    small: bool


def ask(folder: Path, question: str, context: str) -> dict:
    """What `answer` gives, by the checkpoint in `folder`, which is loaded if it is not in memory as it is now.

    Raises UserError for what load_qa_model refuses, and what `answer` raises.
    """
    loaded = _loaded(folder, max((path.stat().st_mtime_ns for path in folder.glob("*.safetensors")), default=0))
    torch.set_num_threads(1 if loaded.small else THREADS)
    return answer(loaded, question, context)


@lru_cache(LOADED)
def _loaded(folder: Path, written: int) -> Model:
    """The checkpoint in `folder`, whose weights were `written` then: a run that is done again overwrites them."""
    model, tokenizer = load_qa_model(folder)
    small = model.num_parameters() < 10_000_000
    loaded = Model(model.to(answering_device(model)), tokenizer, *window_lengths(folder, model), small)
    for words in (1, 4 * loaded.max_length):  # so that no asker waits for what happens the first time
        answer(loaded, "who", "she " * words)
    return loaded


def answer(loaded: Model, question: str, context: str) -> dict:
    """The answer to a question about a paragraph, as JSON can hold it.

    `nbest` is what Answers.entries gives; `margin` the null score minus that of the best span (None if no span was
    allowed); `windows` how many the paragraph was cut into, of at most `window_tokens`; `ms` the milliseconds that
    tokenizing, model and decoding took.
    Raises QuestionTooLong where the paragraph has no room, DataError for a model whose logits are NaN.
    """
    source = asked([(question, context)])
    (example,), clock = source.examples, [time.perf_counter()]
    try:
        features = build_features(source, loaded.tokenizer, loaded.max_length, loaded.stride, cache=False)
    except DataError:
        raise QuestionTooLong(f"too long for this model, which reads {loaded.max_length} tokens at a time") from None
    if len(features) > MOST_WINDOWS:
        raise QuestionTooLong(f"so long that this model would read its paragraph in {len(features):,} pieces")
    clock.append(time.perf_counter())
    logits = predict_logits(loaded.model, features, loaded.model.device, batch_tokens=BATCH_TOKENS)
    if loaded.model.device.type == "cuda":
        torch.cuda.synchronize()
    clock.append(time.perf_counter())
    answers = decode(features, source.examples, *logits)
    nbest = answers.entries(0)
    clock.append(time.perf_counter())
    odds = answers.null_odds[example.id]
    return {
        "margin": odds if odds < -LOWEST else None,
        "nbest": nbest,
        "windows": len(features),
        "window_tokens": loaded.max_length,
        "ms": {
            part: 1000 * (end - begin)
            for part, (begin, end) in zip(("tokenize", "model", "decode"), pairwise(clock), strict=True)
        },
    }
