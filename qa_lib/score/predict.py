"""Run a question-answering model over samples, and answer a file or a single question with it.

Inference needs no gradients, so that a batch may be as large as the memory lets it, and each may have a shape of its
own. Windows are therefore sorted by length and put together by tokens, not by number: a batch is padded to its longest
window only, and where SQuAD's windows fill 180 of 384 tokens on average, half of the work falls away, by the same
reasoning as in variant A4. Sorting changes the order of the results; each row of logits is returned with the number of
the window that it belongs to, and nothing after this file goes by position. Row A4-b shows what happens if one does.

A checkpoint is a folder that somebody else may have written; model/hf_checkpoint.py says what is believed of it.
The app asks one question at a time (`ask`): a checkpoint is loaded once, and kept with a few others.
"""

import dataclasses
import time
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from qa_lib.calls import checked, expect, expect_folder
from qa_lib.data.squad import DataError, Source
from qa_lib.data.tokenize import build_tokenizer
from qa_lib.data.windows import Samples, build_samples
from qa_lib.errors import UserError
from qa_lib.model.architectures import max_positions
from qa_lib.model.hf_checkpoint import find_folder, inspect_checkpoint
from qa_lib.model.load import check_tokenizer, load
from qa_lib.score.decode import LOWEST, Answers, decode
from qa_lib.spec.presets import ANSWER_TOKENS, MOST, stride_of, whole_number

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
# Without cuDNN's, which is prepared anew for each batch's shape, for longer than the batch then takes.
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
LOADED = 4  # models kept in memory
WINDOW = (
    "window_tokens",
    "window_stride",
)  # of a trained model's config: how long its windows were, and overlapped
ANSWER = "max_answer_length"  # likewise: how many tokens its answers had, at most
MOST_WINDOWS = (
    2_000  # of a question; the longest paragraph and a question of a sentence take some 400
)
BATCH_TOKENS = 1_024  # on two cores BERT-base answers the quicker, the more alike the windows of a forward pass are
THREADS = torch.get_num_threads()


def predict_logits(
    model, samples: Samples, device: torch.device | str = "cpu", *, batch_tokens: int | None = None,
    dtype: torch.dtype = torch.float32, progress: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Logits of all n windows: (sample ids int64 [n], start and end logits float32 [n, longest window]) on `device`.

    `model` is called like `BertForQuestionAnswering`, in eval mode and on `device` already. Batches hold windows of
    similar length, longest first, of at most `batch_tokens` tokens with padding (None: as many as `tokens_at_once`),
    and are padded to their longest window, rounded up to a multiple of 8. Another `dtype` is that of autocast. Row r
    belongs to window ids[r]; beyond that window's length the logits are NaN, so that rows given to other windows do
    not pass `decode`.
    """
    batches, done = _batches(samples, batch_tokens or tokens_at_once(device)), 0
    start, end = torch.full((2, len(samples), samples.lengths.max()), torch.nan, device=device)
    autocast = torch.autocast(torch.device(device).type, dtype, enabled=dtype != torch.float32)
    with torch.inference_mode(), sdpa_kernel(KERNELS), autocast:
        for rows, width in tqdm(batches, unit="batch", disable=not progress):
            batch = samples.batch(rows, width)
            output = model(
                **{
                    name: torch.from_numpy(batch[name]).to(device)
                    for name in INPUTS
                    if name in batch
                }
            )
            width = min(width, start.shape[1])
            padding = torch.from_numpy(batch["attention_mask"][:, :width] == 0).to(device)
            for logits, found in ((start, output.start_logits), (end, output.end_logits)):
                logits[done : done + len(rows), :width] = found[:, :width].masked_fill(
                    padding, torch.nan
                )
            done += len(rows)
    return torch.from_numpy(np.concatenate([rows for rows, _ in batches])), start, end


def tokens_at_once(device: torch.device | str) -> int:
    """Tokens of a forward pass: more on a GPU with 32 GiB free, which waits less for launches when passes are fewer."""
    free = torch.cuda.mem_get_info(device)[0] if torch.device(device).type == "cuda" else 0
    return 65_536 if free > 32 * 2**30 else 16_384


def _batches(samples: Samples, batch_tokens: int) -> list[tuple[np.ndarray, int]]:
    """All windows in batches, longest first, each with the length to pad to; at least one window in each."""
    order, batches = np.argsort(-samples.lengths, kind="stable"), []
    while len(order):
        width = min(samples.max_length, -(-int(samples.lengths[order[0]]) // 8) * 8)
        rows, order = np.split(order, [max(1, batch_tokens // width)])
        batches.append((rows, width))
    return batches


def load_qa_model(folder: str | Path) -> tuple:
    """The model, in eval mode, and the tokenizer that `save_pretrained` wrote to `folder`.

    Raises `UserError` if the folder holds no question-answering model like BERT's in safetensors, if config, weights
    and tokenizer do not belong together, or if it asks for code, pickles, kernels or files of other folders.
    """
    from transformers import AutoModelForQuestionAnswering

    folder = Path(folder)
    found = inspect_checkpoint(folder)
    if "ForQuestionAnswering" not in (kinds := str(found.config.get("architectures"))):
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
    """The GPU, if there is one; the CPU for quantized weights, which are for it."""
    return "cuda" if torch.cuda.is_available() and not hasattr(model.config, "quantized") else "cpu"


def window_lengths(model) -> tuple[int, int]:
    """Tokens of a window and of its overlap: those that the model was trained with, where its config says so, or else
    the reference script's 384 and 128; or what a model with fewer positions allows."""
    max_length, stride = (getattr(model.config, name, None) for name in WINDOW)
    if not (type(max_length) is type(stride) is int and 0 <= stride < max_length):
        max_length, stride = 384, 128
    max_length = min(max_length, max_positions(model.config))
    return max_length, stride_of(max_length, stride)


def answer_tokens(model, wanted: int | None = None) -> int:
    """Tokens of an answer, at most: those that are wanted, else those that the model's config says, where it was
    trained here, else the reference script's 30. Raises SpecError for a wanted number that cannot be."""
    if wanted is not None:
        return whole_number(ANSWER, wanted, 1)
    found = getattr(model.config, ANSWER, None)
    return found if type(found) is int and 1 <= found <= MOST else ANSWER_TOKENS


def asked(question: str, context: str) -> Source:
    """A source of one question about a paragraph, both of which somebody typed."""
    row = "what was asked", "", {"context": context}, {"id": "0", "question": question}
    return Source("what was asked", str, lambda: [row], labelled=False)


@dataclass(frozen=True)
class Model:
    """A loaded checkpoint, ready to answer, with the tokens of its windows, of their overlap, and of an answer."""

    model: torch.nn.Module
    tokenizer: object
    max_length: int
    stride: int
    max_answer_length: int = ANSWER_TOKENS


def load_answerer(folder: Path, max_answer_length: int | None = None) -> Model:
    """The checkpoint in `folder` on the device that it answers on. Raises UserError as load_qa_model does."""
    model, tokenizer = load_qa_model(folder)
    lengths = (*window_lengths(model), answer_tokens(model, max_answer_length))
    return Model(model.to(answering_device(model)), tokenizer, *lengths)


@checked
def ask(
    folder: str | Path, question: str, context: str, max_answer_length: int | None = None
) -> dict:
    """What `answer` gives, by the checkpoint in `folder`, or of the run there, loaded if it is not in memory as it is:
    ask("my-model", "Who came?", "Alice came.")["nbest"][0]["text"].

    An answer has at most `max_answer_length` tokens, by default as many as the model's answers had in training, or 30.
    Raises UserError for what load_qa_model refuses, and what `answer` raises.
    """
    expect_folder("folder", folder)
    expect("question", question, str, "give a text")
    expect("context", context, str, "give the text of a paragraph")
    folder = find_folder(folder)
    loaded = _loaded(
        folder, max((path.stat().st_mtime_ns for path in folder.glob("*.safetensors")), default=0)
    )
    # Beside busy cores the tiny model took 175 ms with two threads and 2 with one.
    torch.set_num_threads(1 if loaded.model.num_parameters() < 10_000_000 else THREADS)
    if max_answer_length is not None:
        most = answer_tokens(loaded.model, max_answer_length)
        loaded = dataclasses.replace(loaded, max_answer_length=most)
    return answer(loaded, question, context)


@lru_cache(LOADED)
def _loaded(folder: Path, written: int) -> Model:
    """The checkpoint in `folder`, whose weights were `written` then: a run that is done again overwrites them."""
    loaded = load_answerer(folder)
    for words in (
        1,
        4 * loaded.max_length,
    ):  # so that no asker waits for what happens the first time
        answer(loaded, "who", "she " * words)
    return loaded


def answer(loaded: Model, question: str, context: str) -> dict:
    """The answer to a question about a paragraph, as JSON can hold it.

    `nbest` is what Answers.entries gives; `margin` the null score minus that of the best span (None if no span was
    allowed); `windows` how many the paragraph was cut into, of at most `window_tokens`; `ms` the milliseconds that
    tokenizing, model and decoding took.
    Raises DataError for a question that leaves its paragraph no room in a window, or so little that it is cut into very
    many, and for a model whose logits are NaN.
    """
    source = asked(question, context)
    (example,), clock = source.examples, [time.perf_counter()]
    try:
        samples = build_samples(
            source, loaded.tokenizer, loaded.max_length, loaded.stride, cache=False
        )
    except DataError:
        most = f"this model, which reads {loaded.max_length} tokens at a time"
        raise DataError(f"the question is too long for {most}") from None
    if len(samples) > MOST_WINDOWS:
        raise DataError(
            f"the question is so long that this model would read its paragraph in {len(samples):,} pieces"
        )
    clock.append(time.perf_counter())
    logits = predict_logits(loaded.model, samples, loaded.model.device, batch_tokens=BATCH_TOKENS)
    logits = [rows.cpu() for rows in logits]  # which waits for the GPU
    clock.append(time.perf_counter())
    answers = decode(samples, source.examples, *logits, max_answer_length=loaded.max_answer_length)
    nbest = answers.entries(0)
    clock.append(time.perf_counter())
    odds = answers.null_odds[example.id]
    margin = odds if odds < -LOWEST else None
    ms = [1000 * (end - begin) for begin, end in pairwise(clock)]
    times = dict(zip(("tokenize", "model", "decode"), ms, strict=True))
    read = {"windows": len(samples), "window_tokens": loaded.max_length}
    return {"margin": margin, "nbest": nbest, **read, "ms": times}


def answers_to(source: Source, loaded: Model, cache=None, progress: bool = False) -> Answers:
    """The answers to a source's questions, by a model where it is; `cache` is that of build_samples."""
    samples = build_samples(source, loaded.tokenizer, loaded.max_length, loaded.stride, cache)
    logits = predict_logits(loaded.model, samples, loaded.model.device, progress=progress)
    return decode(samples, source.examples, *logits, max_answer_length=loaded.max_answer_length)
