"""Run a question-answering model over samples, and answer a file or a single question with it.

Inference needs no gradients, so that a batch may be as large as memory allows, and each batch may
have a shape of its own. Windows are therefore sorted by length, and a batch takes as many as fit a
number of tokens. It is padded only to its longest window: where SQuAD's windows fill 180 of 384
tokens on average, this saves half of the work, as variant A4 does in training.

Sorting changes the order of the results. Each row of logits comes with the number of its window,
and whatever uses the rows goes by that number and not by position. Variant A4-b shows what happens
otherwise.

A checkpoint is a folder that somebody else may have written, and is checked before it is loaded
(model/hf_checkpoint.py). The app asks one question at a time (`ask`), so that a few checkpoints
stay in memory.
"""

import dataclasses
import math
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from qa_lib.calls import checked, expect, expect_folder
from qa_lib.data.examples import Row
from qa_lib.data.files import DataError
from qa_lib.data.squad import Source
from qa_lib.data.tokenize import build_tokenizer
from qa_lib.data.windows import Samples, build_samples
from qa_lib.errors import UserError
from qa_lib.model.architectures import max_positions
from qa_lib.model.hf_checkpoint import find_folder, inspect_checkpoint
from qa_lib.model.load import check_tokenizer, load
from qa_lib.score.decode import LOWEST, Answers, decode
from qa_lib.spec.presets import ANSWER_TOKENS, MOST, stride_of, whole_number

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
# Without cuDNN's kernel, which is prepared anew for each batch's shape: that takes longer than the
# batch.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

# Keys that training adds to a model's config: the tokens of a window, those that neighbouring
# windows share, and the most tokens of an answer.
WINDOW = ("window_tokens", "window_stride")
ANSWER = "max_answer_length"

# Limits of `ask`.
MODELS_IN_MEMORY = 4
# Windows of one question. The longest paragraph and a question of a sentence have some 400.
MOST_WINDOWS = 2_000
# Tokens of a forward pass. Few, so that its windows are alike in length: on two cores BERT-base
# then answers sooner.
ASK_BATCH_TOKENS = 1_024
# A model with fewer parameters answers sooner with one thread than with several: beside busy cores
# the tiny model took 2 ms with one thread and 175 ms with two.
SMALL_MODEL = 10_000_000
THREADS = torch.get_num_threads()  # for a larger model


def predict_logits(
    model,
    samples: Samples,
    device: torch.device | str = "cpu",
    *,
    batch_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
    progress: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (ids, start, end): the logits of all n windows, and the window of each row.

    - ids: int64 [n] on the CPU; row r of the logits is that of window ids[r].
    - start, end: float32 [n, longest window] on `device`. Beyond the window's length they are NaN,
      so that `decode` refuses rows that are given to other windows.

    `model` is called like `BertForQuestionAnswering`, and is in eval mode and on `device` already.
    A batch has at most `batch_tokens` tokens with padding (None: as many as `tokens_at_once`). If
    `dtype` is not float32, the model runs under autocast to it.
    """
    batches = _batches(samples, batch_tokens or tokens_at_once(device))
    longest = int(samples.lengths.max())
    start = torch.full((len(samples), longest), torch.nan, device=device)
    end = torch.full_like(start, torch.nan)
    autocast = torch.autocast(torch.device(device).type, dtype, enabled=dtype != torch.float32)
    done = 0  # rows that are filled
    with torch.inference_mode(), sdpa_kernel(KERNELS), autocast:
        for windows, width in tqdm(batches, unit="batch", disable=not progress):
            batch = samples.batch(windows, width)
            inputs = {}
            for name in INPUTS:
                if name in batch:
                    inputs[name] = torch.from_numpy(batch[name]).to(device)
            output = model(**inputs)

            kept = min(width, longest)  # a batch may be padded beyond the longest window
            rows = slice(done, done + len(windows))
            is_padding = torch.from_numpy(batch["attention_mask"][:, :kept] == 0).to(device)
            start[rows, :kept] = output.start_logits[:, :kept].masked_fill(is_padding, torch.nan)
            end[rows, :kept] = output.end_logits[:, :kept].masked_fill(is_padding, torch.nan)
            done += len(windows)
    ids = np.concatenate([windows for windows, _ in batches])
    return torch.from_numpy(ids), start, end


def tokens_at_once(device: torch.device | str) -> int:
    """Return how many tokens a forward pass takes.

    A GPU with more than 32 GiB free takes more: with fewer passes it waits less for launches.
    """
    if torch.device(device).type != "cuda":
        return 16_384
    free, _ = torch.cuda.mem_get_info(device)
    return 65_536 if free > 32 * 2**30 else 16_384


def _batches(samples: Samples, batch_tokens: int) -> list[tuple[np.ndarray, int]]:
    """Return all windows in batches, longest first, each with the length to pad to.

    That is the length of the batch's longest window, rounded up to a multiple of 8. A batch has at
    least one window, and at most `batch_tokens` tokens if it has more.
    """
    batches = []
    lengths = samples.lengths
    remaining = np.argsort(-lengths, kind="stable")
    while len(remaining):
        longest = int(lengths[remaining[0]])
        width = min(samples.max_length, math.ceil(longest / 8) * 8)
        size = max(1, batch_tokens // width)
        batches.append((remaining[:size], width))
        remaining = remaining[size:]
    return batches


def load_qa_model(folder: str | Path) -> tuple:
    """Return the model in eval mode and the tokenizer that `save_pretrained` wrote to `folder`.

    Raises UserError if the folder holds no question-answering model like BERT's in safetensors, if
    config, weights and tokenizer do not belong together, or if it asks for code, pickles, kernels
    or files of other folders.
    """
    from transformers import AutoModelForQuestionAnswering

    folder = Path(folder)
    found = inspect_checkpoint(folder)
    architectures = str(found.config.get("architectures"))
    if "ForQuestionAnswering" not in architectures:
        raise UserError(
            f"{folder}: not a question-answering model (architectures: {architectures[:80]})"
        )
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt")):
        raise UserError(f"{folder}: no tokenizer (tokenizer.json or vocab.txt)")
    if not found.weights:
        raise UserError(
            f"{folder}: no weights in safetensors; a pickle could run any code when loaded"
        )
    tokenizer = build_tokenizer(folder)
    model = load(found, AutoModelForQuestionAnswering, "sdpa")
    check_tokenizer(folder, tokenizer, model)
    return model.eval(), tokenizer


def answering_device(model) -> str:
    """Return the device that a model answers on: a GPU if there is one, else the CPU."""
    if hasattr(model.config, "quantized"):  # for the CPU alone (model/qat.py)
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def window_lengths(model) -> tuple[int, int]:
    """Return how many tokens a window has, and how many neighbouring windows share.

    They are those of the model's training if its config has them, else the reference script's 384
    and 128. Both are reduced to what the model's positions allow.
    """
    length_name, stride_name = WINDOW
    max_length = getattr(model.config, length_name, None)
    stride = getattr(model.config, stride_name, None)
    # The config may have anything there. A bool is no number here, but an instance of int.
    are_numbers = type(max_length) is int and type(stride) is int
    if not are_numbers or not 0 <= stride < max_length:
        max_length = 384
        stride = 128
    max_length = min(max_length, max_positions(model.config))
    return max_length, stride_of(max_length, stride)


def answer_tokens(model, wanted: int | None = None) -> int:
    """Return the most tokens that an answer may have.

    That is `wanted` if given, else the number of the model's training if its config has it, else
    the reference script's 30. Raises SpecError if `wanted` is no whole number from 1.
    """
    if wanted is not None:
        return whole_number(ANSWER, wanted, 1)
    trained = getattr(model.config, ANSWER, None)
    if type(trained) is int and 1 <= trained <= MOST:
        return trained
    return ANSWER_TOKENS


def asked(question: str, context: str) -> Source:
    """Return the source whose only row is a question about a paragraph, as somebody typed them."""
    row = Row(
        article="what was asked",
        title="",
        paragraph={"context": context},
        question={"id": "0", "question": question},
    )
    # Its hash may be empty, since its samples are never cached.
    return Source(
        "what was asked",
        hash_content=lambda: "",
        load_rows=lambda: [row],
        labelled=False,
    )


@dataclass(frozen=True)
class Model:
    """A loaded checkpoint, ready to answer."""

    model: torch.nn.Module
    tokenizer: object  # a fast tokenizer of transformers
    max_length: int  # tokens of a window
    stride: int  # tokens that neighbouring windows share
    max_answer_length: int = ANSWER_TOKENS  # tokens of an answer, at most


def load_answerer(folder: Path, max_answer_length: int | None = None) -> Model:
    """Load the checkpoint in `folder` onto the device that it answers on.

    Raises UserError as load_qa_model does, and SpecError as answer_tokens does.
    """
    model, tokenizer = load_qa_model(folder)
    max_length, stride = window_lengths(model)
    return Model(
        model=model.to(answering_device(model)),
        tokenizer=tokenizer,
        max_length=max_length,
        stride=stride,
        max_answer_length=answer_tokens(model, max_answer_length),
    )


@checked
def ask(
    folder: str | Path, question: str, context: str, max_answer_length: int | None = None
) -> dict:
    """Answer a question about a paragraph with a checkpoint, and return what `answer` does.

    For example: ask("my-model", "Who came?", "Alice came.")["nbest"][0]["text"]. `folder` is the
    checkpoint's, its run's, or a name on the hub. It is loaded if it is not in memory, or has
    changed on the disk since. `max_answer_length` is as for `answer_tokens`. Raises UserError for
    what load_qa_model refuses, and what `answer` raises.
    """
    expect_folder("folder", folder)
    expect("question", question, str, "give a text")
    expect("context", context, str, "give the text of a paragraph")
    folder = find_folder(folder)
    # Not the time of the last writing, which copies often take over from another file.
    changed = [path.stat().st_ctime_ns for path in folder.glob("*") if path.is_file()]
    loaded = _loaded(folder, max(changed, default=0))
    is_small = loaded.model.num_parameters() < SMALL_MODEL
    torch.set_num_threads(1 if is_small else THREADS)
    if max_answer_length is not None:
        most = answer_tokens(loaded.model, max_answer_length)
        loaded = dataclasses.replace(loaded, max_answer_length=most)
    return answer(loaded, question, context)


@lru_cache(MODELS_IN_MEMORY)
def _loaded(folder: Path, _changed_ns: int) -> Model:
    """Return the loaded checkpoint of `folder`.

    The time of the last change of its files is a parameter for the cache: a run that is done again
    overwrites its weights, which are then loaded anew.
    """
    loaded = load_answerer(folder)
    # The first forward passes are slow. Answer a short and a long paragraph now, so that no user
    # waits for them.
    answer(loaded, "who", "she ")
    answer(loaded, "who", "she " * (4 * loaded.max_length))
    return loaded


def answer(loaded: Model, question: str, context: str) -> dict:
    """Return the answer to a question about a paragraph, as JSON can hold it.

    - margin: the null score minus that of the best span; None if no span was allowed.
    - nbest: what Answers.entries gives.
    - windows: how many the paragraph was cut into, of at most `window_tokens`.
    - ms: the milliseconds that tokenizing, model and decoding took.

    Raises DataError for a question that leaves its paragraph no room in a window, or so little that
    it is cut into very many, and for a model whose logits are NaN.
    """
    source = asked(question, context)
    (example,) = source.examples
    begin = time.perf_counter()
    try:
        samples = build_samples(
            source, loaded.tokenizer, loaded.max_length, loaded.stride, cache=False
        )
    except DataError:
        raise DataError(
            "the question is too long for this model, "
            f"which reads {loaded.max_length} tokens at a time"
        ) from None
    if len(samples) > MOST_WINDOWS:
        raise DataError(
            "the question is so long that this model would read its paragraph "
            f"in {len(samples):,} pieces"
        )
    tokenized = time.perf_counter()
    logits = predict_logits(
        loaded.model, samples, loaded.model.device, batch_tokens=ASK_BATCH_TOKENS
    )
    ids, start, end = (tensor.cpu() for tensor in logits)  # waits for the GPU, so in its time
    predicted = time.perf_counter()
    answers = decode(
        samples, source.examples, ids, start, end, max_answer_length=loaded.max_answer_length
    )
    nbest = answers.entries(0)
    decoded = time.perf_counter()
    odds = answers.null_odds[example.id]
    return {
        "margin": odds if odds < -LOWEST else None,  # -LOWEST stands for infinity
        "nbest": nbest,
        "windows": len(samples),
        "window_tokens": loaded.max_length,
        "ms": {
            "tokenize": 1000 * (tokenized - begin),
            "model": 1000 * (predicted - tokenized),
            "decode": 1000 * (decoded - predicted),
        },
    }


def answers_to(source: Source, loaded: Model, cache=None, progress: bool = False) -> Answers:
    """Return the model's answers to all questions of a source.

    `cache` is as for build_samples.
    """
    samples = build_samples(source, loaded.tokenizer, loaded.max_length, loaded.stride, cache)
    logits = predict_logits(loaded.model, samples, loaded.model.device, progress=progress)
    return decode(samples, source.examples, *logits, max_answer_length=loaded.max_answer_length)
