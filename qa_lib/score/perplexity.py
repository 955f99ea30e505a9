"""How well a language model predicts a text: the record's `quality` for the task "lm", and what it writes by itself.

Perplexity is the exponential of the mean negative log-likelihood. Per token it depends on the tokenizer, so that
variants are compared by the one per word: the nats of all tokens over the words and line ends of the source, whatever
the tokenizer made of them. Bits per byte are the same nats over the bytes. A text is longer than a model's context, so
that a window slides over it, and each token is predicted once, from at least as many tokens as neighbouring windows
share (the scale's `stride`), or from all there are.
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
from qa_lib.model.architectures import max_positions
from qa_lib.model.build import DTYPES
from qa_lib.record import write_atomically
from qa_lib.spec import Spec

BATCH_TOKENS = 16_384  # of windows in one forward pass
LARGEST = 700.0  # nats, of which a float still holds the exponential
PROMPTS, PROMPT_WORDS, WRITTEN = 5, 12, 24  # continuations, words of a prompt, tokens that are written at most


def evaluate(model: torch.nn.Module, data: Data, spec: Spec, device: torch.device, run_dir: Path) -> dict:
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
            raise DataError(f"{spec.data['name']}: its validation text has {nats} nats (the model has diverged)")
        written = continuations(model, data.tokenizer, prompts(data.validation.rows()))
    write_atomically(run_dir / "answers" / "continuations.json", json.dumps(written, indent=1) + "\n")
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
        for (begin, scored), row, logits in zip(part, rows, model(input_ids=rows).logits, strict=True):
            skip = scored - begin
            total += F.cross_entropy(logits[skip - 1 : -1].double(), row[skip:], reduction="sum").item()
    return total


def prompts(lines: Iterator[str]) -> list[tuple[str, str]]:
    """The beginnings of the first lines that are long enough, and how the text goes on."""
    long_enough = (words for words in map(str.split, lines) if len(words) >= 2 * PROMPT_WORDS)
    return [
        (" ".join(words[:PROMPT_WORDS]), " ".join(words[PROMPT_WORDS : 2 * PROMPT_WORDS]))
        for words in islice(long_enough, PROMPTS)
    ]


def continuations(model: torch.nn.Module, tokenizer, beginnings: list[tuple[str, str]]) -> list[dict]:
    """What the model takes for the likeliest next words after each prompt: {prompt, continuation, text}. Of a model
    with few positions at least half are the prompt's."""
    positions, end, found = max_positions(model.config), tokenizer.eos_token_id, []
    length = min(WRITTEN, positions // 2)
    options = {"do_sample": False, "use_cache": True, "pad_token_id": end, "eos_token_id": end}
    for prompt, text in beginnings:
        ids = [end, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
        ids = torch.tensor([ids[: positions - length]], device=model.device)
        written = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, **options)
        said = tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
        found.append({"prompt": prompt, "continuation": said, "text": text})
    return found
