"""The model of a run: a BERT with a question-answering head, the row's attention and the row's trainable parameters."""

import logging
import re
import warnings
from pathlib import Path

import pandas as pd
import torch
from transformers import AutoConfig, AutoModelForQuestionAnswering, BertConfig
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import logging as transformers_logging

from qa_lib.data.synthetic import TINY_CONFIG, vocabulary
from qa_lib.errors import UserError
from qa_lib.model.attention import attention_name
from qa_lib.model.dropout import use_hash_dropout
from qa_lib.model.fp8 import use_float8
from qa_lib.model.projections import fuse_projections, split_projections
from qa_lib.spec import Spec
from qa_lib.variants import Recipe

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

transformers_logging.disable_progress_bar()  # bars that are redrawn inside a run fill its notebook


def build_model(spec: Spec, head: type = AutoModelForQuestionAnswering) -> torch.nn.Module:
    """The spec's model on the CPU in fp32, seeded, ready to train; not compiled yet.

    A folder with a config but no model.safetensors gives random weights where the scale measures no quality, and
    UserError where it does; so does a model that is no BERT, or one for shorter features.
    """
    torch.manual_seed(spec.seed)
    model = _pretrained(spec, head)
    if spec.settings.checkpointing:
        # transformers 5.23 renames it, and warns of the old name.
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    if spec.settings.projections == "fused":
        fuse_projections(model)
    if spec.settings.dropout == "hash":
        use_hash_dropout(model)
    if spec.settings.feed_forward == "fp8":
        use_float8(model)
    return apply_recipe(model, spec.recipe)


def _pretrained(spec: Spec, head: type) -> torch.nn.Module:
    attention = spec.settings.attention
    if spec.settings.padding == "packed":
        attention = attention_name(attention)
    if spec.model_source == "tiny":
        config = BertConfig(vocab_size=len(vocabulary()), **TINY_CONFIG)
        return head.from_config(config, attn_implementation=attention)
    config = AutoConfig.from_pretrained(spec.model_source, trust_remote_code=False)
    if config.model_type != "bert":
        raise UserError(f"{spec.model_source}: a model of type {config.model_type!r}; this lab trains BERT alone")
    if spec.scale.max_length > config.max_position_embeddings:
        raise UserError(
            f"{spec.model_source} takes {config.max_position_embeddings} tokens at most, and scale {spec.scale.name} "
            f"makes features of {spec.scale.max_length}"
        )
    folder = Path(spec.model_source)
    if folder.is_dir() and not (folder / "model.safetensors").exists():
        if spec.scale.quality:
            raise UserError(f"{folder} holds no model.safetensors, and scale {spec.scale.name} needs weights")
        return head.from_config(config, attn_implementation=attention)
    return head.from_pretrained(
        spec.model_source,
        attn_implementation=attention,
        dtype=torch.float32,
        use_safetensors=True,
        trust_remote_code=False,
    )


def apply_recipe(model: torch.nn.Module, recipe: Recipe) -> torch.nn.Module:
    """Leave gradients on for the recipe's parameters alone; the answer head always trains."""
    if recipe.kind == "all":
        return model
    if recipe.kind == "lora":
        # peft asks transformers by a name that transformers 5.23 deprecates, and imports bitsandbytes, which warns of
        # a 4-bit CPU kernel that nothing here uses.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        from peft import LoraConfig, inject_adapter_in_model

        # Injected into the model itself: peft's own wrapper for question answering drops token_type_ids and
        # position_ids on their way to the model.
        config = LoraConfig(
            r=recipe.rank, lora_alpha=2 * recipe.rank, lora_dropout=0.1, target_modules=list(recipe.targets)
        )
        inject_adapter_in_model(config, model)
        model.qa_outputs.requires_grad_(True)
        return model
    frozen = _frozen_modules(model, recipe) if recipe.kind == "top" else ()
    for name, parameter in model.named_parameters():
        if recipe.kind == "biases":
            parameter.requires_grad = name.endswith(".bias") or name.startswith("qa_outputs")
        else:
            parameter.requires_grad = not name.startswith(frozen)
    return model


def _frozen_modules(model: torch.nn.Module, recipe: Recipe) -> tuple[str, ...]:
    """Name prefixes of what is frozen. The share is of 12 layers; a shallower model keeps the proportion."""
    depth = model.config.num_hidden_layers
    numerator, denominator = recipe.frozen
    count = depth * numerator // denominator
    if recipe.frozen_side == "bottom":
        return ("bert.embeddings.", *(f"bert.encoder.layer.{i}." for i in range(count)))
    return tuple(f"bert.encoder.layer.{i}." for i in range(depth - max(1, count), depth))


def save_model(model: torch.nn.Module, tokenizer: Tokenizer, folder: Path) -> None:
    """A plain checkpoint that transformers loads: adapters merged, safetensors, tokenizer beside it."""
    model.float()  # an adapter's change can be below the resolution of half-precision weights
    for name, module in list(model.named_modules()):
        if hasattr(module, "get_base_layer"):  # a LoraLayer
            module.merge()
            model.set_submodule(name, module.get_base_layer())
    split_projections(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def trainable_summary(model: torch.nn.Module) -> pd.DataFrame:
    """Parameters by part of the model, in all and trainable, for display."""
    parts: dict[str, list[int]] = {}
    for name, parameter in model.named_parameters():
        found = re.search(r"embeddings|layer\.\d+|qa_outputs", name)
        counts = parts.setdefault(found.group() if found else "other", [0, 0])
        counts[0] += parameter.numel()
        counts[1] += parameter.numel() * parameter.requires_grad
    table = pd.DataFrame.from_dict(parts, orient="index", columns=["parameters", "trainable"])
    table.loc["all"] = table.sum()
    return table
