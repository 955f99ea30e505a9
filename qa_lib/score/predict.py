"""Run a question-answering model over samples, and answer a file or a single question with it.

Inference needs no gradients, so that a batch may be as large as the memory lets it, and each may
have a shape of its own. Windows are therefore sorted by length and put together by tokens, not by
number: a batch is padded to its longest window only, and where SQuAD's windows fill 180 of 384
tokens on average, half of the work falls away, by the same reasoning as in variant A4. Sorting
changes the order of the results; each row of logits is returned with the number of the window that
it belongs to, and nothing after this file goes by position. Variant A4-b shows what happens if
something does.

A checkpoint is a folder that somebody else may have written; model/hf_checkpoint.py says what is
believed of it. The app asks one question at a time (`ask`): a checkpoint is loaded once, and kept
with a few others.
"""

import dataclasses
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
# cuDNN's is left out: it is prepared anew for each batch's shape, which takes longer than the
# batch.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
LOADED = 4  # models that `ask` keeps in memory
# The names of a trained model's config for the tokens of its windows, and of their overlap.
WINDOW = ("window_tokens", "window_stride")
ANSWER = "max_answer_length"  # its name for the tokens of an answer, at most
# Windows that `ask` reads for a question. The longest paragraph and a question of a sentence take
# some 400.
MOST_WINDOWS = 2_000
# Tokens of a forward pass of `ask`: on two cores BERT-base answers the quicker, the more alike the
# windows of a pass are.
BATCH_TOKENS = 1_024
THREADS = torch.get_num_threads()
SMALL_MODEL = 10_000_000  # parameters of a model below which one thread is quicker than several


def predict_logits(
    model,
    samples: Samples,
    device: torch.device | str = "cpu",
    *,
    batch_tokens: int | None = None,
    dtype: torch.dtype = torch.float32,
    progress: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the logits of all n windows, in any order, with their numbers.

    The results are sample ids int64 [n] on the CPU, and start and end logits float32 [n, longest
    window] on `device`.

    `model` is called like `BertForQuestionAnswering`, in eval mode and on `device` already. Batches
    hold windows of similar length, longest first, of at most `batch_tokens` tokens with padding
    (None: as many as `tokens_at_once`), and are padded to their longest window, rounded up to a
    multiple of 8. Another `dtype` than float32 is that of autocast. Row r belongs to window ids[r];
    beyond that window's length the logits are NaN, so that rows given to other windows do not pass
    `decode`.
    """
    batches = _batches(samples, batch_tokens or tokens_at_once(device))
    start, end = torch.full((2, len(samples), samples.lengths.max()), torch.nan, device=device)
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

            width = min(width, start.shape[1])
            rows = slice(done, done + len(windows))
            is_padding = torch.from_numpy(batch["attention_mask"][:, :width] == 0).to(device)
            start[rows, :width] = output.start_logits[:, :width].masked_fill(is_padding, torch.nan)
            end[rows, :width] = output.end_logits[:, :width].masked_fill(is_padding, torch.nan)
            done += len(windows)
    ids = np.concatenate([windows for windows, _ in batches])
    return torch.from_numpy(ids), start, end


def tokens_at_once(device: torch.device | str) -> int:
    """Return how many tokens a forward pass takes: more on a GPU with 32 GiB free, which waits less
    for launches when passes are fewer."""
    if torch.device(device).type != "cuda":
        return 16_384
    free, _ = torch.cuda.mem_get_info(device)
    return 65_536 if free > 32 * 2**30 else 16_384


def _batches(samples: Samples, batch_tokens: int) -> list[tuple[np.ndarray, int]]:
    """Return all windows in batches, longest first, each with the length to pad to.

    A batch has at least one window, and at most `batch_tokens` tokens if it has more.
    """
    batches = []
    lengths = samples.lengths
    left = np.argsort(-lengths, kind="stable")
    while len(left):
        rounded = -(-int(lengths[left[0]]) // 8) * 8
        width = min(samples.max_length, rounded)
        size = max(1, batch_tokens // width)
        batches.append((left[:size], width))
        left = left[size:]
    return batches


def load_qa_model(folder: str | Path) -> tuple:
    """Return the model, in eval mode, and the tokenizer that `save_pretrained` wrote to `folder`.

    Raises UserError if the folder holds no question-answering model like BERT's in safetensors, if
    config, weights and tokenizer do not belong together, or if it asks for code, pickles, kernels
    or files of other folders.
    """
    from transformers import AutoModelForQuestionAnswering

    folder = Path(folder)
    found = inspect_checkpoint(folder)
    kinds = str(found.config.get("architectures"))
    if "ForQuestionAnswering" not in kinds:
        raise UserError(f"{folder}: not a question-answering model (architectures: {kinds[:80]})")
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
    """Return the device that a model answers on: the GPU, if there is one, but for quantized
    weights the CPU, which they are made for."""
    if hasattr(model.config, "quantized"):
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def window_lengths(model) -> tuple[int, int]:
    """Return the tokens of a window and of its overlap.

    These are what the model was trained with, where its config says so, or else the reference
    script's 384 and 128; or what a model with fewer positions allows.
    """
    length_name, stride_name = WINDOW
    max_length = getattr(model.config, length_name, None)
    stride = getattr(model.config, stride_name, None)
    are_numbers = type(max_length) is int and type(stride) is int
    if not are_numbers or not 0 <= stride < max_length:
        max_length = 384
        stride = 128
    max_length = min(max_length, max_positions(model.config))
    return max_length, stride_of(max_length, stride)


def answer_tokens(model, wanted: int | None = None) -> int:
    """Return the most tokens that an answer may have.

    These are as many as are wanted, else as the model's config says, where it was trained here,
    else the reference script's 30. Raises SpecError for a wanted number that cannot be.
    """
    if wanted is not None:
        return whole_number(ANSWER, wanted, 1)
    trained = getattr(model.config, ANSWER, None)
    if type(trained) is int and 1 <= trained <= MOST:
        return trained
    return ANSWER_TOKENS


def asked(question: str, context: str) -> Source:
    """Return a source of one question about a paragraph, both of which somebody typed."""
    row = Row(
        article="what was asked",
        title="",
        paragraph={"context": context},
        question={"id": "0", "question": question},
    )
    # It is never cached, so that its hash, which `str` gives, may be empty.
    return Source("what was asked", digest=str, rows=lambda: [row], labelled=False)


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

    Raises UserError as load_qa_model does, and SpecError for a length that cannot be.
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
    """Answer a question about a paragraph with the checkpoint in `folder`, or of the run there:
    ask("my-model", "Who came?", "Alice came.")["nbest"][0]["text"].

    The result is that of `answer`. The checkpoint is loaded if it is not in memory as it is on the
    disk. An answer has at most `max_answer_length` tokens, by default as many as the model's
    answers had in training, or 30. Raises UserError for what load_qa_model refuses, and what
    `answer` raises.
    """
    expect_folder("folder", folder)
    expect("question", question, str, "give a text")
    expect("context", context, str, "give the text of a paragraph")
    folder = find_folder(folder)
    written = [path.stat().st_mtime_ns for path in folder.glob("*.safetensors")]
    loaded = _loaded(folder, max(written, default=0))
    # Beside busy cores the tiny model took 175 ms with two threads and 2 with one.
    is_small = loaded.model.num_parameters() < SMALL_MODEL
    torch.set_num_threads(1 if is_small else THREADS)
    if max_answer_length is not None:
        most = answer_tokens(loaded.model, max_answer_length)
        loaded = dataclasses.replace(loaded, max_answer_length=most)
    return answer(loaded, question, context)


@lru_cache(LOADED)
def _loaded(folder: Path, written: int) -> Model:
    """Load the checkpoint in `folder`, whose weights were `written` then (ns).

    A run that is done again overwrites its weights, which are then loaded anew.
    """
    loaded = load_answerer(folder)
    # Answer a short and a long paragraph, so that no asker waits for what happens the first time.
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
    logits = predict_logits(loaded.model, samples, loaded.model.device, batch_tokens=BATCH_TOKENS)
    ids, start, end = (rows.cpu() for rows in logits)  # waits for the GPU
    predicted = time.perf_counter()
    answers = decode(
        samples, source.examples, ids, start, end, max_answer_length=loaded.max_answer_length
    )
    nbest = answers.entries(0)
    decoded = time.perf_counter()
    odds = answers.null_odds[example.id]
    return {
        "margin": odds if odds < -LOWEST else None,
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
    """Return the answers to a source's questions, on the device that the model is on.

    `cache` is that of build_samples.
    """
    samples = build_samples(source, loaded.tokenizer, loaded.max_length, loaded.stride, cache)
    logits = predict_logits(loaded.model, samples, loaded.model.device, progress=progress)
    return decode(samples, source.examples, *logits, max_answer_length=loaded.max_answer_length)
