"""How well a run's model does on its validation data: the record's `quality`, for each task.

Of task "qa" the validation questions are answered and the answers scored (score/f1.py).

Of task "lm" a text is predicted, and what the model writes by itself is kept beside that. Perplexity is the exponential
of the mean negative log-likelihood. Per token it depends on the tokenizer, so that variants are compared by the one per
word: the nats of all tokens over the words and line ends of the source, whatever the tokenizer made of them. Bits per
byte are the same nats over the bytes. A text is longer than a model's context, so that a window slides over it, and
each token is predicted once, from at least as many tokens as neighbouring windows share (`stride` of the preset), or
from all there are.
"""

import json
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch.nn import functional as F

from qa_lib.data.load import Data
from qa_lib.data.squad import DataError
from qa_lib.data.windows import Samples
from qa_lib.model.architectures import max_positions
from qa_lib.model.build import DTYPES
from qa_lib.records.files import write_atomically
from qa_lib.records.record import SCORING
from qa_lib.score.decode import decode
from qa_lib.score.f1 import score
from qa_lib.score.predict import predict_logits
from qa_lib.spec.spec import Spec
from qa_lib.spec.tasks import TASKS

BATCH_TOKENS = 16_384  # of windows in one forward pass
LARGEST = 700.0  # nats, of which a float still holds the exponential
PROMPTS, PROMPT_WORDS, WRITTEN = (
    5,
    12,
    24,
)  # continuations, words of a prompt, tokens that are written at most


def evaluate_answers(
    model: torch.nn.Module, data: Data, spec: Spec, device: torch.device, run_dir: Path
) -> dict:
    """Answer the validation questions with a model on `device`; the record's `quality`, and the four answer files.

    A score that these questions do not have, such as that of unanswerable ones where there are none, is None.
    """
    model.eval()
    rows = predict_logits(
        model, data.validation_samples, device, dtype=DTYPES[spec.settings.precision]
    )
    loss = span_loss(data.validation_samples, *rows)
    if spec.settings.fault == "positional-join":
        rows = joined_by_position(*rows)
    examples = data.validation.examples
    answers = decode(
        data.validation_samples, examples, *rows, max_answer_length=data.max_answer_length
    )
    answers.write(run_dir / "answers")
    found = score(examples, answers.texts, answers.null_odds, 0.0) | {"loss": loss}
    found["always_null_f1"] = score(examples, dict.fromkeys(answers.texts, ""))["f1"]
    return {
        name: found.get(TASKS["qa"].official.get(name, name)) for name in SCORING["qa"]["scores"]
    }


def span_loss(
    samples: Samples, ids: torch.Tensor, start: torch.Tensor, end: torch.Tensor
) -> float | None:
    """The held-out loss: what training minimises, in nats, as the mean over all windows; None if it is not finite.

    `ids`, `start` and `end` are what predict_logits gives. As in training a window's loss is the mean of two cross
    entropies, of the first gold answer's first and last token, or of [CLS] where it holds none; over the window's own
    tokens, so that it does not depend on padding.
    """
    parts = []
    for logits, positions in ((start, samples.start_positions), (end, samples.end_positions)):
        target = torch.from_numpy(positions[ids.cpu().numpy()]).to(logits.device)
        parts.append(F.cross_entropy(logits.masked_fill(logits.isnan(), -torch.inf), target))
    loss = sum(parts).item() / 2
    return loss if math.isfinite(loss) else None


def joined_by_position(
    ids: torch.Tensor, start: torch.Tensor, end: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The fault of variant A4-b, kept on purpose: row r of logits that are sorted by length goes to window r of the
    data.

    The reference project's Trainer returned its predictions in the order in which it had grouped them by length, and
    its notebook read them in the order of the questions. What lies beyond a row's own window is -100, the Trainer's
    filling of batches of unequal width, since the NaN that stands there otherwise would give the fault away.
    """
    return torch.arange(len(ids)), start.nan_to_num(-100.0), end.nan_to_num(-100.0)


def evaluate_text(
    model: torch.nn.Module, data: Data, spec: Spec, device: torch.device, run_dir: Path
) -> dict:
    """Score a model on `device` by the validation text; the record's `quality`, and answers/continuations.json.

    A perplexity beyond what a float holds, and one of a text without words, is None. Raises DataError for a model whose
    logits are NaN or infinite.
    """
    model.eval()
    dtype = DTYPES[spec.settings.precision]
    text = data.validation_samples
    with torch.inference_mode(), torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        tokens = torch.from_numpy(text.tokens.astype("int64"))
        nats = total_nats(model, tokens, spec.preset.max_length, spec.preset.stride)
        if not math.isfinite(nats):
            raise DataError(
                f"{spec.data['name']}: its validation text has {nats} nats (the model has diverged)"
            )
        written = continuations(model, data.tokenizer, prompts(data.validation.rows()))
    write_atomically(
        run_dir / "answers" / "continuations.json", json.dumps(written, indent=1) + "\n"
    )
    n = len(tokens) - 1
    return {
        "word_perplexity": _perplexity(nats, text.words),
        "token_perplexity": _perplexity(nats, n),
        "bits_per_byte": nats / math.log(2) / text.bytes,
        "nats": nats,
        "n": n,
        "words": text.words,
        "bytes": text.bytes,
    }


def _perplexity(nats: float, count: int) -> float | None:
    return math.exp(nats / count) if count and nats / count < LARGEST else None


def windows(tokens: int, length: int, shared: int) -> Iterator[tuple[int, int]]:
    """Where each window over a text of so many tokens begins, and the first token that it is scored for.

    Windows are `length` tokens long, or as the text; neighbours share `shared` of them, and the last ends where the
    text does.
    """
    begin, scored = 0, 1  # nothing comes before the first token that could predict it
    while scored < tokens:
        begin = min(begin, max(0, tokens - length))
        yield begin, scored
        scored = begin + length
        begin += length - shared


def total_nats(model: torch.nn.Module, tokens: torch.Tensor, length: int, shared: int) -> float:
    """Negative log-likelihood of all tokens but the first, in nats; `tokens` int64 [T], T > 1, on the CPU."""
    device, total = model.device, 0.0
    places = list(windows(len(tokens), length, shared))
    length = min(length, len(tokens))
    together = max(1, BATCH_TOKENS // length)
    for first in range(0, len(places), together):
        part = places[first : first + together]
        rows = torch.stack([tokens[begin : begin + length] for begin, _ in part]).to(device)
        for (begin, scored), row, logits in zip(
            part, rows, model(input_ids=rows).logits, strict=True
        ):
            skip = scored - begin
            total += F.cross_entropy(
                logits[skip - 1 : -1].double(), row[skip:], reduction="sum"
            ).item()
    return total


def prompts(lines: Iterator[str]) -> list[tuple[str, str]]:
    """The beginnings of the first lines that are long enough, and how the text goes on."""
    long_enough = (words for words in map(str.split, lines) if len(words) >= 2 * PROMPT_WORDS)
    return [
        (" ".join(words[:PROMPT_WORDS]), " ".join(words[PROMPT_WORDS : 2 * PROMPT_WORDS]))
        for words in islice(long_enough, PROMPTS)
    ]


def continuations(
    model: torch.nn.Module, tokenizer, beginnings: list[tuple[str, str]]
) -> list[dict]:
    """What the model takes for the likeliest next words after each prompt: {prompt, continuation, text}. Of a model
    with few positions at least half are the prompt's."""
    positions, end, found = max_positions(model.config), tokenizer.eos_token_id, []
    length = min(WRITTEN, positions // 2)
    options = {"do_sample": False, "use_cache": True, "pad_token_id": end, "eos_token_id": end}
    for prompt, text in beginnings:
        ids = [end, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
        ids = torch.tensor([ids[: positions - length]], device=model.device)
        written = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, **options
        )
        said = tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
        found.append({"prompt": prompt, "continuation": said, "text": text})
    return found
