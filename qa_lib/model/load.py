"""The model of a folder, loaded once its configuration, weights and tokenizer have been held against each other."""

import contextlib
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from qa_lib.errors import UserError, first_line
from qa_lib.model.architectures import encoder_of, find_encoder
from qa_lib.model.hf_checkpoint import QUANTIZED, inspect_checkpoint
from qa_lib.model.qat import fill_quantized, quantize

log = logging.getLogger(__name__)

# Parts of a checkpoint that pretraining or an older transformers has left, and which no answer depends on.
PRETRAINING = (
    "cls", "lm_head", "pooler", "discriminator_predictions", "generator_predictions", "generator_lm_head", "decoder",
    "vocab_transform", "vocab_layer_norm", "vocab_projector",
)  # fmt: skip
CONSTANTS = ("masked_bias", "position_ids")
one_at_a_time = (
    threading.Lock()
)  # while it loads, transformers changes its classes; two threads may leave them so

transformers_logging.disable_progress_bar()  # bars that are redrawn inside a run fill its notebook
transformers_logging.set_verbosity_error()  # what its reports of loading say is held against the model here


@contextlib.contextmanager
def as_user_error(source: str | Path) -> Iterator[None]:
    """Whatever the libraries make of a damaged folder, as a UserError of one line that names it."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{source}: cannot be loaded: {first_line(error)}") from None


def read_config(source: str | Path, task: str = "qa"):
    """The configuration of a model's folder, or of a model of the hub, as transformers reads it. Raises UserError for
    one that it cannot read, of an architecture that is not known for the task, or that asks for what is not built."""
    if Path(source).is_dir():
        inspect_checkpoint(Path(source))
    with as_user_error(source):
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        encoder = find_encoder(config.model_type, str(source), task)
        # How results are returned and computed is for the caller to say: none of it changes a number. An answer has a
        # start and an end.
        config.return_dict, config.chunk_size_feed_forward, config.num_labels = True, 0, 2
        for name, usual in (("position_embedding_type", "absolute"), ("is_decoder", False)):
            if (found := getattr(config, name, None) or usual) != usual:
                raise UserError(
                    f"{source}: {name} is {str(found)[:40]!r} in config.json, and {usual} alone is built"
                )
        if not encoder.causal and config.pad_token_id is None:
            raise UserError(
                f"{source}: pad_token_id in config.json is null, and not the number of a token that pads"
            )
    return config


def load(
    folder: Path, head: type, attention: str, new_head: bool = False, task: str = "qa", **options
):
    """The model of a folder that has weights, by a class of transformers like AutoModelForQuestionAnswering.

    `attention` is ours: a config may name one that transformers would download. `new_head` allows weights without the
    head's, which are then random. Quantized weights (model/qat.py) come back as they were saved, and cannot be
    trained. Raises UserError where config and weights do not belong together.
    """
    found, files = inspect_checkpoint(folder)
    quantized = files == [folder / QUANTIZED]
    if quantized and new_head:
        raise UserError(f"{folder}: its weights are quantized, and train no more")
    config = read_config(folder, task)
    with as_user_error(folder), one_at_a_time:
        _check_sizes(folder, config, head, files)
        if quantized:
            model = head.from_config(config, attn_implementation=attention)
            quantize(model, found.get("quantized"))
            fill_quantized(model, folder)
            return model
        options |= {
            "local_files_only": True,
            "trust_remote_code": False,
            "attn_implementation": attention,
        }
        options |= {"use_safetensors": True, "output_loading_info": True}
        model, loading = head.from_pretrained(folder, config=config, **options)
    _check_names(folder, model, new_head, **loading)
    return model


def _check_sizes(folder: Path, config, head: type, files: list[Path]) -> None:
    """Hold the config against the headers of the weights before anything of its sizes is built. Raises UserError."""
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
        model = head.from_config(config, attn_implementation="sdpa")
    for name, parameter in model.named_parameters():
        # An encoder that was saved without a head does without its prefix, too.
        found = stored.get(name) or stored.get(name.removeprefix(f"{model.base_model_prefix}."))
        if found is None:
            continue  # said after loading, which knows older names as well
        if found.get_shape() != list(parameter.shape):
            sizes = f"{found.get_shape()} in the weights, {list(parameter.shape)} by config.json"
            raise UserError(f"{folder}: {name} is {sizes}")
        if found.get_dtype() not in ("F64", "F32", "F16", "BF16"):
            raise UserError(
                f"{folder}: {name} holds {found.get_dtype()}, no floating-point numbers"
            )


def _check_names(folder: Path, model, new_head: bool, missing_keys, unexpected_keys, **_) -> None:
    """Say which weights no part of the model takes. Raises UserError for those of its own layers: an adapter's, say,
    which would change what it computes; and for those that it lacks."""
    for name in sorted(missing_keys):
        if not new_head or name.startswith(f"{model.base_model_prefix}."):
            raise UserError(f"{folder}: the weights lack {name}, which would be left random")
    parts, surplus = dict(model.named_children()), []
    for name in sorted(unexpected_keys):
        if {*name.split(".")[:2]} & {*PRETRAINING} or name.endswith(CONSTANTS):
            continue
        if name.split(".")[0] in parts or "lora_" in name:
            raise UserError(
                f"{folder}: the weights have {name[:80]}, for which a {type(model).__name__} has no place"
            )
        surplus.append(name)
    if surplus:
        log.warning(
            "%s: %d weights are of no use here and are left out, such as %.80s",
            folder,
            len(surplus),
            surplus[0],
        )


def check_tokenizer(folder: str | Path, tokenizer, model) -> None:
    """Whether a tokenizer's tokens and inputs are those of a model. Raises UserError."""
    config = model.config
    tokens = max(tokenizer.get_vocab().values(), default=-1) + 1
    if tokens > config.vocab_size:
        raise UserError(
            f"{folder}: {tokens} tokens in the tokenizer, {config.vocab_size} in the model"
        )
    if (
        "token_type_ids" in tokenizer.model_input_names
        and getattr(config, "type_vocab_size", 2) < 2
    ):
        raise UserError(
            f"{folder}: the tokenizer tells question and paragraph apart, the model has one token type"
        )
    # RoBERTa counts positions by it, and BERT never trains its embedding. GPT-2, which has none, never pads.
    own, padding = tokenizer.pad_token_id, getattr(config, "pad_token_id", None)
    if own != padding and not encoder_of(model).causal:
        raise UserError(
            f"{folder}: the tokenizer pads with token {own}, pad_token_id in config.json is {padding}"
        )
