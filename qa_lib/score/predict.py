"""Run a question-answering model over features, and answer a file or a single question with it.

Inference needs no gradients, so that a batch may be as large as the memory lets it, and each may have a shape of its
own. Windows are therefore sorted by length and put together by tokens, not by number: a batch is padded to its longest
window only, and where SQuAD's windows fill 180 of 384 tokens on average, half of the work falls away, by the same
reasoning as in row A4. Sorting changes the order of the results; each row of logits is returned with the number of the
window that it belongs to, and nothing after this file goes by position. Row A4-b shows what happens if one does.

A checkpoint is a folder that somebody else may have written. It is read as data: safetensors and JSON, files of this
folder alone, whose sizes are compared before anything is built from them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import torch

from qa_lib.data.squad import DataError, Source, open_source, read_json, unlabelled
from qa_lib.data.windows import Features, build_features
from qa_lib.errors import UserError, first_line
from qa_lib.model.encoders import find_encoder, most_tokens
from qa_lib.record import read_record
from qa_lib.score.decode import decode

EXAMPLE = """examples:
  python -m qa_lib predict --model DIR --question "Who wrote it?" --context "It was written by Ada."
  python -m qa_lib predict --model DIR dev-v2.0.json --out answers/"""

INDEX = "model.safetensors.index.json"
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def predict_logits(
    model,
    features: Features,
    device: torch.device | str = "cpu",
    *,
    batch_tokens: int = 16_384,
    pad_to: int | None = None,
    autocast_dtype: torch.dtype | None = None,
    progress: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of all n windows: (feature ids int64 [n], start and end logits float32 [n, longest window]) on `device`.

    `model` is called like `BertForQuestionAnswering` and is on `device` already. Batches hold windows of similar
    length, longest first, of at most `batch_tokens` tokens with padding, and are padded to `pad_to`, or else to their
    longest window, rounded up to a multiple of 8. `autocast_dtype` switches autocast on. Row r belongs to window
    ids[r]; beyond that window's length the logits are NaN, so that rows given to other windows do not pass `decode`.
    """
    order = np.argsort(-features.lengths, kind="stable")
    start, end = torch.full((2, len(features), features.lengths.max()), torch.nan, device=device)
    autocast = torch.autocast(torch.device(device).type, autocast_dtype) if autocast_dtype else nullcontext()
    training = getattr(model, "training", False)
    if training:
        model.eval()
    done = 0
    with torch.inference_mode(), autocast:
        for rows, width in _batches(order, features, batch_tokens, pad_to, progress):
            batch = features.batch(rows, width)
            output = model(**{name: torch.from_numpy(batch[name]).to(device) for name in INPUTS if name in batch})
            width = min(width, start.shape[1])
            padding = torch.from_numpy(batch["attention_mask"][:, :width] == 0).to(device)
            for logits, found in ((start, output.start_logits), (end, output.end_logits)):
                logits[done : done + len(rows), :width] = found[:, :width].masked_fill(padding, torch.nan)
            done += len(rows)
    if training:
        model.train()
    return torch.from_numpy(order), start, end


def _batches(order, features, batch_tokens: int, pad_to: int | None, progress: bool) -> Iterator[tuple]:
    """The windows `order` in batches, each with the length to pad to; at least one window in each."""
    from tqdm import tqdm

    with tqdm(total=len(order), unit="window", disable=not progress) as bar:
        first = 0
        while first < len(order):
            width = pad_to or min(features.max_length, -(-int(features.lengths[order[first]]) // 8) * 8)
            rows = order[first : first + max(1, batch_tokens // width)]
            yield rows, width
            first += len(rows)
            bar.update(len(rows))


def load_qa_model(folder: str | Path) -> tuple:
    """The model, in eval mode, and the tokenizer that `save_pretrained` wrote to `folder`.

    Raises `UserError` if the folder holds no question-answering model like BERT's in safetensors, if config, weights
    and tokenizer do not belong together, or if it asks for code, pickles, kernels or files of other folders.
    """
    from transformers import AutoConfig, AutoModelForQuestionAnswering, AutoTokenizer
    from transformers.utils import logging

    folder = Path(folder)
    files = _weight_files(folder)
    options = {"local_files_only": True, "trust_remote_code": False}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # what is wrong with a folder is told in one line instead
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        options["attn_implementation"] = "sdpa"  # the config may name one that transformers would download
        config = AutoConfig.from_pretrained(folder, **options)
        _check_sizes(folder, config, tokenizer, files)
        model, loading = AutoModelForQuestionAnswering.from_pretrained(
            folder, config=config, use_safetensors=True, output_loading_info=True, **options
        )
    except UserError:
        raise
    except Exception as error:  # whatever the libraries make of a damaged folder
        raise UserError(f"{folder}: cannot be loaded: {first_line(error)}") from None
    finally:
        logging.set_verbosity(verbosity)
    if loading["missing_keys"]:
        raise UserError(f"{folder}: the weights lack {sorted(loading['missing_keys'])[0]}, which would be left random")
    return model.eval(), tokenizer


def _weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors, after a look at what else it says and holds. Raises UserError."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    files = {path.name for path in folder.iterdir() if path.is_file()}  # no pipes and devices, which never end
    if "config.json" not in files:
        raise UserError(f"{folder}: no config.json, so not a model's folder")
    config = read_json(folder / "config.json")
    kinds = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(kinds, list) or not any(str(kind).endswith("ForQuestionAnswering") for kind in kinds):
        raise UserError(f"{folder}: not a question-answering model (architectures: {kinds!r:.80})")
    for key in {"quantization_config", "transformers_weights"} & config.keys():
        raise UserError(f"{folder}: config.json has {key}; plain weights in model.safetensors are needed")
    if not files & {"tokenizer.json", "vocab.txt"}:
        raise UserError(f"{folder}: no tokenizer (tokenizer.json or vocab.txt)")
    if "model.safetensors" in files:
        return [folder / "model.safetensors"]
    if INDEX not in files:
        pickled = sorted(name for name in files if name.endswith((".bin", ".pt", ".pth", ".ckpt")))
        found = f"only {pickled[0]}, a pickle, which could run any code when loaded" if pickled else "no weights"
        raise UserError(f"{folder}: {found}; model.safetensors is needed")
    index = read_json(folder / INDEX)
    parts = index.get("weight_map") if isinstance(index, dict) else None
    names = set(map(str, parts.values())) if isinstance(parts, dict) else {"nothing"}
    for name in names:
        linked = (folder / name).resolve().parent != folder.resolve()
        if not re.fullmatch(r"[\w.-]+\.safetensors", name) or name not in files or linked:
            raise UserError(f"{folder}: {INDEX} names {name[:80]!r}, which is no safetensors file of this folder")
    return [folder / name for name in names]


def _check_sizes(folder: Path, config, tokenizer, files: list[Path]) -> None:
    """Hold the config against the headers of the weights before anything of its sizes is built. Raises UserError."""
    from safetensors import safe_open
    from transformers import AutoModelForQuestionAnswering

    find_encoder(config.model_type, str(folder))
    stored = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            stored |= {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
    layers = len(set(re.findall(r"\.layers?\.(\d+)\.", " ".join(stored))))
    tokens = max(tokenizer.get_vocab().values(), default=-1) + 1
    if config.num_hidden_layers != layers:
        raise UserError(f"{folder}: {config.num_hidden_layers} layers in config.json, {layers} in the weights")
    if config.num_labels != 2:
        raise UserError(f"{folder}: {config.num_labels} labels in config.json; an answer has a start and an end")
    if tokens > config.vocab_size:
        raise UserError(f"{folder}: {tokens} tokens in the tokenizer, {config.vocab_size} in the model")
    if "token_type_ids" in tokenizer.model_input_names and getattr(config, "type_vocab_size", 2) < 2:
        raise UserError(f"{folder}: the tokenizer tells question and paragraph apart, the model has one token type")
    with torch.device("meta"):  # shapes without memory
        model = AutoModelForQuestionAnswering.from_config(config, attn_implementation="sdpa")
    for name, parameter in model.named_parameters():
        if name not in stored:
            continue  # said after loading, which knows older names as well
        shape, kind = stored[name].get_shape(), stored[name].get_dtype()
        if shape != list(parameter.shape):
            raise UserError(f"{folder}: {name} is {shape} in the weights, {list(parameter.shape)} by config.json")
        if kind not in ("F64", "F32", "F16", "BF16"):
            raise UserError(f"{folder}: {name} holds {kind}, no floating-point numbers")


def window_lengths(folder: str | Path, model) -> tuple[int, int]:
    """Tokens of a window and of its overlap for a model of `folder`: those of the run beside whose record it lies,
    or else the recipe's 384 and 128; or what a model with fewer positions allows."""
    max_length, stride = 384, 128
    with suppress(ValueError, KeyError, TypeError):  # no record, or one that says something else
        scale = read_record(Path(folder).resolve().parent)["spec"]["scale"]
        max_length, stride = int(scale["max_length"]), int(scale["stride"])
    max_length = min(max_length, most_tokens(model.config))
    return max_length, min(stride, max_length // 3)


def asked(pairs: list[tuple[str, str]]) -> Source:
    """A source of (question, paragraph) pairs that somebody typed, with their numbers as ids."""
    entries = [
        ("what was asked", "", context, {"id": str(i), "question": question, "answers": [], "is_impossible": True})
        for i, (question, context) in enumerate(pairs)
    ]
    return Source("what was asked", "validation", False, str, lambda: entries)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", nargs="?", metavar="DATA.json", help="a file, or any other source, to answer whole")
    parser.add_argument("--model", required=True, metavar="DIR", help="a folder with safetensors and tokenizer")
    parser.add_argument("--out", metavar="DIR", help="folder for predictions, best spans, n-best lists, null odds")
    parser.add_argument("--question", metavar="TEXT", help="one question, answered on the terminal")
    parser.add_argument("--context", metavar="TEXT", help="the paragraph that the one question is about")


def main(args: argparse.Namespace) -> int:
    """Write the four prediction files, or print the answer to one question as JSON (an empty one: no answer)."""
    one = args.question is not None and args.context is not None and args.data is None and args.out is None
    file = args.question is None and args.context is None and args.data is not None and args.out is not None
    if not one and not file:
        raise UserError("predict takes either DATA.json and --out, or --question and --context")
    if file and Path(args.out).exists() and not Path(args.out).is_dir():
        raise UserError(f"{args.out}: exists and is no folder")
    source = unlabelled(open_source(args.data, "validation")) if file else asked([(args.question, args.context)])
    examples = source.examples  # bad data is told before the model takes its seconds to load
    model, tokenizer = load_qa_model(args.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lengths = window_lengths(args.model, model)
    features = build_features(source, tokenizer, *lengths, cache=None if file else False)
    logits = predict_logits(model.to(device), features, device, progress=file and sys.stderr.isatty())
    try:
        answers = decode(features, examples, *logits)
    except DataError as error:
        raise DataError(f"{source.name}: {error}") from None
    if file:
        print("\n".join(map(str, answers.write(args.out))))
    else:
        (best,), (text,), (odds,) = answers.nbest.values(), answers.predictions.values(), answers.null_odds.values()
        chance = next(entry["probability"] for entry in best if entry["text"] == text)
        print(json.dumps({"answer": text, "probability": chance, "null_odds": odds}, ensure_ascii=False))
    return 0
