"""How well a run's model does on its validation data: the record's `quality`, for each task.

Task "qa": the validation questions are answered and the answers scored (score/f1.py).

Task "lm": a text is predicted, and what the model writes by itself is kept beside that. Perplexity
is the exponential of the mean negative log-likelihood. Per token it depends on the tokenizer, so
that variants are compared by the one per word: the nats of all tokens over the words and line ends
of the source, whatever the tokenizer made of them. Bits per byte are the same nats over the bytes.
A text is longer than a model's context, so that a window slides over it, and each token is
predicted once, from at least as many tokens as neighbouring windows share (the preset's `stride`),
or from all there are.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn import functional as F

from qa_lib.data.files import DataError
from qa_lib.data.load import Data
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
LARGEST = 700.0  # nats whose exponential a float still holds
PROMPTS = 5  # prompts that a language model continues
PROMPT_WORDS = 12  # words of a prompt
WRITTEN = 24  # tokens that are written after a prompt, at most


def evaluate_answers(
    model: torch.nn.Module, data: Data, spec: Spec, device: torch.device, run_dir: Path
) -> dict:
    """Answer the validation questions with a model on `device`, and write the four answer files.

    Returns the record's `quality`. A score that these questions do not have, such as that of
    unanswerable ones where there are none, is None.
    """
    model.eval()
    samples = data.validation_samples
    examples = data.validation.examples
    ids, start, end = predict_logits(model, samples, device, dtype=DTYPES[spec.settings.precision])
    loss = span_loss(samples, ids, start, end)
    if spec.settings.fault == "positional-join":
        ids, start, end = joined_by_position(ids, start, end)
    answers = decode(samples, examples, ids, start, end, max_answer_length=data.max_answer_length)
    answers.write(run_dir / "answers")

    scores = score(examples, answers.texts, answers.null_odds, na_threshold=0.0)
    scores["loss"] = loss
    silence = dict.fromkeys(answers.texts, "")
    scores["always_null_f1"] = score(examples, silence)["f1"]
    quality = {}
    for name in SCORING["qa"]["scores"]:
        official_name = TASKS["qa"].official.get(name, name)
        quality[name] = scores.get(official_name)
    return quality


def span_loss(
    samples: Samples, ids: torch.Tensor, start: torch.Tensor, end: torch.Tensor
) -> float | None:
    """Return the held-out loss in nats, the mean over all windows; None if it is not finite.

    It is what training minimises. `ids`, `start` and `end` are what predict_logits gives. A
    window's loss is, like that of training, the mean of two cross entropies: of the gold answer's
    first and last token, or of [CLS] where the window holds none. It is over the window's own
    tokens, so that it does not depend on padding.
    """
    windows = ids.cpu().numpy()
    start_target = torch.from_numpy(samples.start_positions[windows]).to(start.device)
    end_target = torch.from_numpy(samples.end_positions[windows]).to(end.device)
    # The logits of padding are NaN.
    start_loss = F.cross_entropy(start.masked_fill(start.isnan(), -torch.inf), start_target)
    end_loss = F.cross_entropy(end.masked_fill(end.isnan(), -torch.inf), end_target)
    loss = (start_loss + end_loss).item() / 2
    return loss if math.isfinite(loss) else None


def joined_by_position(
    ids: torch.Tensor, start: torch.Tensor, end: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Give row r of logits that are sorted by length to window r: the fault of variant A4-b.

    It is kept on purpose. The reference project's Trainer returned its predictions in the order in
    which it had grouped them by length, and its notebook read them in the order of the questions.
    What lies beyond a row's own window is -100, the Trainer's filling of batches of unequal width,
    since the NaN that stands there otherwise would give the fault away.
    """
    return torch.arange(len(ids)), start.nan_to_num(-100.0), end.nan_to_num(-100.0)


def evaluate_text(
    model: torch.nn.Module, data: Data, spec: Spec, device: torch.device, run_dir: Path
) -> dict:
    """Score a model on `device` by the validation text, and write answers/continuations.json.

    Returns the record's `quality`. A perplexity beyond what a float holds, and one of a text
    without words, is None. Raises DataError for a model whose logits are NaN or infinite.
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
        written = continuations(model, data.tokenizer, prompts(data.validation.load_rows()))
    path = run_dir / "answers" / "continuations.json"
    write_atomically(path, json.dumps(written, indent=1) + "\n")
    n = len(tokens) - 1  # the first token is predicted from nothing, and is not scored
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
    """Return the perplexity of `count` words or tokens; None if there are none, or if it is more
    than a float holds."""
    if not count or nats / count >= LARGEST:
        return None
    return math.exp(nats / count)


def windows(tokens: int, length: int, shared: int) -> Iterator[tuple[int, int]]:
    """Yield where each window over a text begins, and the first token that it is scored for.

    The text has `tokens` tokens. Windows are `length` tokens long, or as long as the text;
    neighbours share `shared` of them, and the last ends where the text does.
    """
    begin = 0
    scored = 1  # nothing comes before the first token that could predict it
    while scored < tokens:
        begin = min(begin, max(0, tokens - length))
        yield begin, scored
        scored = begin + length
        begin += length - shared


def total_nats(model: torch.nn.Module, tokens: torch.Tensor, length: int, shared: int) -> float:
    """Return the negative log-likelihood of all tokens but the first, in nats.

    `tokens` int64 [T], T > 1, on the CPU; `length` and `shared` are those of `windows`.
    """
    total = 0.0
    places = list(windows(len(tokens), length, shared))
    length = min(length, len(tokens))
    together = max(1, BATCH_TOKENS // length)  # windows in one forward pass
    for first in range(0, len(places), together):
        batch = places[first : first + together]
        ids = torch.stack([tokens[begin : begin + length] for begin, _ in batch]).to(model.device)
        batch_logits = model(input_ids=ids).logits
        for (begin, scored), row, logits in zip(batch, ids, batch_logits, strict=True):
            skip = scored - begin
            # The logits at a token predict the next one.
            predictions = logits[skip - 1 : -1].double()
            total += F.cross_entropy(predictions, row[skip:], reduction="sum").item()
    return total


def prompts(lines: Iterator[str]) -> list[tuple[str, str]]:
    """Return the beginnings of the first lines that are long enough, and how the text goes on."""
    found = []
    for line in lines:
        words = line.split()
        if len(words) < 2 * PROMPT_WORDS:
            continue
        prompt = " ".join(words[:PROMPT_WORDS])
        text = " ".join(words[PROMPT_WORDS : 2 * PROMPT_WORDS])
        found.append((prompt, text))
        if len(found) == PROMPTS:
            break
    return found


def continuations(
    model: torch.nn.Module, tokenizer, beginnings: list[tuple[str, str]]
) -> list[dict]:
    """Return what the model takes for the likeliest next words after each prompt.

    `beginnings` are prompts and how the text goes on; the result is {prompt, continuation, text}
    for each. If a model has few positions, at least half of them are the prompt's.
    """
    positions = max_positions(model.config)
    length = min(WRITTEN, positions // 2)
    end = tokenizer.eos_token_id
    written = []
    for prompt, text in beginnings:
        ids = [end, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
        ids = torch.tensor([ids[: positions - length]], device=model.device)
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            do_sample=False,
            use_cache=True,
            pad_token_id=end,
            eos_token_id=end,
        )
        continuation = tokenizer.decode(generated[0, ids.shape[1] :], skip_special_tokens=True)
        written.append({"prompt": prompt, "continuation": continuation, "text": text})
    return written
