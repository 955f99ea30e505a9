"""The model of a folder, loaded after its configuration, weights and tokenizer were compared."""

import contextlib
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig, DistilBertConfig, MPNetConfig
from transformers.utils import logging as transformers_logging

from qa_lib.errors import UserError, first_line
from qa_lib.model import distilbert, mpnet
from qa_lib.model.architectures import encoder_of, find_encoder
from qa_lib.model.hf_checkpoint import QUANTIZED, ModelFolder
from qa_lib.model.qat import fill_quantized, quantize

log = logging.getLogger(__name__)

# Parts of a checkpoint that pretraining has left, and which no answer depends on.
PRETRAINING = {
    "cls",
    "lm_head",
    "pooler",
    "discriminator_predictions",
    "generator_predictions",
    "generator_lm_head",
    "decoder",
    "vocab_transform",
    "vocab_layer_norm",
    "vocab_projector",
}
# Ends of the names of constants that an older transformers has left.
CONSTANTS = ("masked_bias", "position_ids")
# While it loads, transformers changes its classes; two threads may leave them so.
one_at_a_time = threading.Lock()

transformers_logging.disable_progress_bar()  # bars that are redrawn inside a run fill its notebook
transformers_logging.set_verbosity_error()  # _check_names says what its reports of loading say


@contextlib.contextmanager
def as_user_error(source: str | Path) -> Iterator[None]:
    """Turn whatever the libraries raise for a damaged folder into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{source}: cannot be loaded: {first_line(error)}") from None


def read_config(source: str | Path, task: str = "qa"):
    """Return the configuration of a model's folder that was inspected, or of a model of the hub.

    Raises UserError for one that transformers cannot read, of an architecture that is not known for
    the task, or that asks for what is not built.
    """
    with as_user_error(source):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        encoder = find_encoder(config.model_type, str(source), task)
        # How results are returned and computed is for the caller to say: it changes no number.
        config.return_dict = True
        config.chunk_size_feed_forward = 0
        config.num_labels = 2  # an answer's start and its end
        for name, built in (("position_embedding_type", "absolute"), ("is_decoder", False)):
            value = getattr(config, name, None) or built
            if value != built:
                raise _not_built(source, name, value, built)
        for name, built in encoder.fixed.items():
            if getattr(config, name) != built:
                raise _not_built(source, name, getattr(config, name), built)
        if not encoder.causal and config.pad_token_id is None:
            raise UserError(
                f"{source}: pad_token_id in config.json is null, "
                "and not the number of a token that pads"
            )
    return config


def _not_built(source: str | Path, name: str, value: object, built: object) -> UserError:
    """Return the error for an entry of config.json that has another value than the one built."""
    return UserError(
        f"{source}: {name} is {str(value)[:40]!r} in config.json, and {built} alone is built"
    )


def new_model(config, head: type, attention: str):
    """Return a model of that configuration with random weights; `head`, `attention` as in load."""
    model = head.from_config(config, attn_implementation=_attention_to_build(config, attention))
    _prepare(model, attention)
    return model


def _attention_to_build(config, attention: str) -> str:
    """Return the attention that transformers builds a model with, before `_prepare`."""
    return "eager" if isinstance(config, MPNetConfig) else attention


def _prepare(model, attention: str) -> None:
    """Give a model that transformers has built the layers that the lab can change, in place."""
    if isinstance(model.config, MPNetConfig):
        mpnet.use_bert_layers(model, attention)
    elif isinstance(model.config, DistilBertConfig):
        distilbert.use_bert_layers(model.distilbert, attention)


def load(
    found: ModelFolder,
    head: type,
    attention: str,
    new_head: bool = False,
    task: str = "qa",
    **options,
):
    """Return the model of a folder that was inspected and has weights.

    `head` is a class of transformers like AutoModelForQuestionAnswering. `attention` is for the
    caller to say: a config may name one that transformers would download. `new_head` allows weights
    without the head's, which are then random. Further `options` go to from_pretrained. Quantized
    weights (model/qat.py) come back as they were saved, and cannot be trained. Raises UserError
    where config and weights do not belong together.
    """
    folder = found.path
    is_quantized = found.weights == [folder / QUANTIZED]
    if is_quantized and new_head:
        raise UserError(f"{folder}: its weights are quantized, and train no more")
    config = read_config(folder, task)
    with as_user_error(folder), one_at_a_time:
        _check_sizes(folder, config, head, found.weights)
        if is_quantized:
            model = new_model(config, head, attention)
            quantize(model, found.config.get("quantized"))
            fill_quantized(model, folder)
            return model
        model, loading = head.from_pretrained(
            folder,
            config=config,
            **options,
            local_files_only=True,
            trust_remote_code=False,
            attn_implementation=_attention_to_build(config, attention),
            use_safetensors=True,
            output_loading_info=True,
        )
    _check_names(folder, model, new_head, loading["missing_keys"], loading["unexpected_keys"])
    _prepare(model, attention)
    return model


def _check_sizes(folder: Path, config, head: type, files: list[Path]) -> None:
    """Compare the config with the headers of the weights before anything of its sizes is built.

    Raises UserError where they differ.
    """
    stored = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            stored |= {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
    layers = len(set(re.findall(r"\b(?:layers?|h)\.(\d+)\.", " ".join(stored))))
    if config.num_hidden_layers != layers:
        raise UserError(
            f"{folder}: {config.num_hidden_layers} layers in config.json, {layers} in the weights"
        )
    with torch.device("meta"):  # shapes without memory
        model = head.from_config(config, attn_implementation="eager")  # which all have
    for name, parameter in model.named_parameters():
        # An encoder that was saved without a head does without its prefix, too.
        bare_name = name.removeprefix(f"{model.base_model_prefix}.")
        tensor = stored.get(name) or stored.get(bare_name)
        if tensor is None:
            continue  # said after loading, which knows older names as well
        if tensor.get_shape() != list(parameter.shape):
            sizes = f"{tensor.get_shape()} in the weights, {list(parameter.shape)} by config.json"
            raise UserError(f"{folder}: {name} is {sizes}")
        if tensor.get_dtype() not in ("F64", "F32", "F16", "BF16"):
            raise UserError(
                f"{folder}: {name} holds {tensor.get_dtype()}, no floating-point numbers"
            )


def _check_names(folder: Path, model, new_head: bool, missing, unexpected) -> None:
    """Warn of weights that no part of the model takes.

    `missing` and `unexpected` are names of weights. Raises UserError for weights that the model
    lacks, and for unexpected ones of its own layers: an adapter's, say, which would change what it
    computes.
    """
    for name in sorted(missing):
        if not new_head or name.startswith(f"{model.base_model_prefix}."):
            raise UserError(f"{folder}: the weights lack {name}, which would be left random")
    children = dict(model.named_children())
    unused = []
    for name in sorted(unexpected):
        first, *rest = name.split(".")
        if PRETRAINING & {first, *rest[:1]} or name.endswith(CONSTANTS):
            continue
        if first in children or "lora_" in name:
            raise UserError(
                f"{folder}: the weights have {name[:80]}, "
                f"for which a {type(model).__name__} has no place"
            )
        unused.append(name)
    if unused:
        log.warning(
            "%s: %d weights are of no use here and are left out, such as %.80s",
            folder,
            len(unused),
            unused[0],
        )


def check_tokenizer(folder: str | Path, tokenizer, model) -> None:
    """Raise UserError where a tokenizer's tokens or inputs are not those of a model."""
    config = model.config
    tokens = max(tokenizer.get_vocab().values(), default=-1) + 1
    if tokens > config.vocab_size:
        raise UserError(
            f"{folder}: {tokens} tokens in the tokenizer, {config.vocab_size} in the model"
        )
    has_types = "token_type_ids" in tokenizer.model_input_names
    if has_types and getattr(config, "type_vocab_size", 2) < 2:
        raise UserError(
            f"{folder}: the tokenizer tells question and paragraph apart, "
            "the model has one token type"
        )
    # RoBERTa counts positions by the token that pads, and BERT never trains its embedding. GPT-2,
    # which has none, never pads.
    padding = getattr(config, "pad_token_id", None)
    if tokenizer.pad_token_id != padding and not encoder_of(model).causal:
        raise UserError(
            f"{folder}: the tokenizer pads with token {tokenizer.pad_token_id}, "
            f"pad_token_id in config.json is {padding}"
        )
