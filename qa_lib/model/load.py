"""The model of a folder, loaded once its configuration, weights and tokenizer have been held against each other."""

import logging
import re
import threading
from pathlib import Path

from qa_lib.errors import UserError
from qa_lib.model.architectures import encoder_of, find_encoder
from qa_lib.model.hf_checkpoint import QUANTIZED, as_user_error, inspect_checkpoint
from qa_lib.model.qat import fill_quantized, plain_sizes, quantize

log = logging.getLogger(__name__)

# Parts of a checkpoint that pretraining or an older transformers has left, and which no answer depends on.
PRETRAINING = ("cls", "lm_head", "pooler", "discriminator_predictions", "generator_predictions", "generator_lm_head")
CONSTANTS = ("masked_bias", "position_ids")
one_at_a_time = threading.Lock()  # while it loads, transformers changes its classes; two threads may leave them so


def read_config(folder: Path, task: str = "qa"):
    """The configuration of a model's folder, as transformers reads it. Raises UserError for one that it cannot read, of
    an architecture that is not known for the task, or that asks for what is not built here."""
    from transformers import AutoConfig

    inspect_checkpoint(folder)
    with as_user_error(folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        encoder = find_encoder(config.model_type, str(folder), task)
        # How results are returned and computed is for the caller to say. Neither changes a number.
        config.return_dict, config.chunk_size_feed_forward = True, 0
        positions = getattr(config, "position_embedding_type", None) or "absolute"
        if positions != "absolute":
            raise UserError(f"{folder}: position_embedding_type {str(positions)[:40]!r} in config.json, not absolute")
        if not encoder.causal and config.pad_token_id is None:
            raise UserError(
                f"{folder}: pad_token_id in config.json is null; it is the number of the tokenizer's padding"
            )
        if not encoder.causal and getattr(config, "is_decoder", False):
            raise UserError(f"{folder}: is_decoder is set in config.json; an encoder's tokens see those on both sides")
    return config


def load(folder: Path, head: type, attention: str, new_head: bool = False, task: str = "qa", **options):
    """The model of a folder that has weights, by a class of transformers like AutoModelForQuestionAnswering.

    `attention` is ours: a config may name one that transformers would download. `new_head` allows weights without the
    head's, which are then random. Quantized weights (model/qat.py) come back as they were saved, and cannot be
    trained. Raises UserError where config and weights do not belong together.
    """
    found, files = inspect_checkpoint(folder)
    quantized = _are_quantized(files)
    if quantized and new_head:
        raise UserError(f"{folder}: its weights are quantized, and train no more")
    config = read_config(folder, task)
    safe = {"local_files_only": True, "trust_remote_code": False, "attn_implementation": attention}
    with as_user_error(folder), one_at_a_time:
        _check_sizes(folder, config, head, _sizes(files, found))
        if quantized:
            model = head.from_config(config, attn_implementation=attention)
            quantize(model, found.get("quantized"))
            fill_quantized(model, folder)
            return model
        model, loading = head.from_pretrained(
            folder, config=config, use_safetensors=True, output_loading_info=True, **safe, **options
        )
    lacking = sorted(loading["missing_keys"])
    if new_head:
        lacking = [name for name in lacking if name.startswith(f"{model.base_model_prefix}.")]
    if lacking:
        raise UserError(f"{folder}: the weights lack {lacking[0]}, which would be left random")
    _tell_surplus(folder, model, sorted(loading["unexpected_keys"]))
    return model


def _tell_surplus(folder: Path, model, names: list[str]) -> None:
    """Say which weights no part of the model takes. Raises UserError for those of its own layers: an adapter's, say,
    which would change what it computes."""
    parts = dict(model.named_children())
    names = [name for name in names if not {*name.split(".")[:2]} & {*PRETRAINING} and not name.endswith(CONSTANTS)]
    own = [name for name in names if name.split(".")[0] in parts or "lora_" in name]
    if own:
        raise UserError(f"{folder}: the weights have {own[0][:80]}, for which a {type(model).__name__} has no place")
    if names:
        log.warning("%s: %d weights are of no use here and are left out, such as %.80s", folder, len(names), names[0])


def _are_quantized(files: list[Path]) -> bool:
    return [file.name for file in files] == [QUANTIZED]


def _sizes(files: list[Path], config: dict) -> dict[str, tuple]:
    """{name: (shape, type)} by the headers of these weights, as if plain where they are quantized."""
    from safetensors import safe_open

    stored = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                part = tensors.get_slice(name)
                stored[name] = (part.get_shape(), part.get_dtype())
    if _are_quantized(files):
        return plain_sizes(stored, config.get("quantized"))
    return stored


def _check_sizes(folder: Path, config, head: type, stored: dict[str, tuple]) -> None:
    """Hold the config against the headers of the weights before anything of its sizes is built. Raises UserError."""
    import torch

    layers = len(set(re.findall(r"\b(?:layers?|h)\.(\d+)\.", " ".join(stored))))
    if config.num_hidden_layers != layers:
        raise UserError(f"{folder}: {config.num_hidden_layers} layers in config.json, {layers} in the weights")
    with torch.device("meta"):  # shapes without memory
        model = head.from_config(config, attn_implementation="sdpa")
    if hasattr(model, "qa_outputs") and config.num_labels != 2:
        raise UserError(f"{folder}: {config.num_labels} labels in config.json; an answer has a start and an end")
    for name, parameter in model.named_parameters():
        # An encoder that was saved without a head does without its prefix, too.
        found = stored.get(name) or stored.get(name.removeprefix(f"{model.base_model_prefix}."))
        if found is None:
            continue  # said after loading, which knows older names as well
        shape, kind = found
        if shape != list(parameter.shape):
            raise UserError(f"{folder}: {name} is {shape} in the weights, {list(parameter.shape)} by config.json")
        if kind not in ("F64", "F32", "F16", "BF16"):
            raise UserError(f"{folder}: {name} holds {kind}, no floating-point numbers")


def check_tokenizer(folder: str | Path, tokenizer, model) -> None:
    """Whether a tokenizer's tokens and inputs are those of a model. Raises UserError."""
    config = model.config
    tokens = max(tokenizer.get_vocab().values(), default=-1) + 1
    if tokens > config.vocab_size:
        raise UserError(f"{folder}: {tokens} tokens in the tokenizer, {config.vocab_size} in the model")
    if "token_type_ids" in tokenizer.model_input_names and getattr(config, "type_vocab_size", 2) < 2:
        raise UserError(f"{folder}: the tokenizer tells question and paragraph apart, the model has one token type")
    # RoBERTa counts positions by it, and BERT never trains its embedding. GPT-2, which has none, never pads.
    own, padding = tokenizer.pad_token_id, getattr(config, "pad_token_id", None)
    if own != padding and not encoder_of(model).causal:
        raise UserError(f"{folder}: the tokenizer pads with token {own}, pad_token_id in config.json is {padding}")
