"""The model of a run: with its task's head, the variant's attention and its trainable parameters."""

import warnings
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    BertConfig,
    GPT2Config,
    PreTrainedConfig,
)
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.pytorch_utils import Conv1D

from qa_lib.data.synthetic import TINY_CONFIG, vocabulary
from qa_lib.errors import UserError
from qa_lib.model import attention, fused_blocks
from qa_lib.model.architectures import (
    embeddings_of,
    encoder_of,
    heads_of,
    layers_of,
    max_positions,
    param_counts,
)
from qa_lib.model.hf_checkpoint import find_folder, inspect_checkpoint, replacing
from qa_lib.model.load import as_user_error, load, read_config
from qa_lib.model.nf4 import NF4Linear, native, use_nf4
from qa_lib.model.qat import is_rounding, use_rounding
from qa_lib.packages import adapters_fault
from qa_lib.presets import HEAD, find_shape
from qa_lib.spec import Spec
from qa_lib.variants import Recipe, Settings, lacking

ALIGN = 64  # tokens of a vocabulary are made a multiple of this
HEADS = {"qa": AutoModelForQuestionAnswering, "lm": AutoModelForCausalLM}
DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "pure-bf16": torch.bfloat16,
}


def fuse_norms(model: torch.nn.Module) -> None:
    """Fuse norms with what is before them, in place: layer by layer, or a decoder's training pass as a whole."""
    (fused_blocks.use_fused_decoder if encoder_of(model).causal else fused_blocks.use_fused_norms)(
        model
    )


CHANGES = (  # setting, value, and what it does to a model; in this order, since some build on what others have left
    ("qkv", "fused", attention.fuse_projections),
    (
        "attention",
        "triton-varlen",
        attention.use_short_attention,
    ),  # leaves itself the bias of the fused projections
    ("dropout", "hash", fused_blocks.use_hash_dropout),
    ("dropout", "none", fused_blocks.use_hash_dropout),  # at a rate of 0: fused norms know no other
    ("norms", "fused", fuse_norms),  # computes the bits of that dropout itself
    (
        "attention",
        "triton-causal",
        fused_blocks.use_causal_attention,
    ),  # which the fused decoder calls
    ("gelu", "sigmoid", fused_blocks.use_sigmoid_gelu),
    # Takes linear layers as the two before have left them: with or without a bias.
    ("feed_forward", "fp8", fused_blocks.use_float8),
)


def build_model(spec: Spec) -> torch.nn.Module:
    """The spec's model on the CPU in fp32, seeded, ready to train; not compiled yet.

    A folder with a config but no model.safetensors gives random weights where the preset measures no quality, and
    UserError where it does; so does an encoder that is not in the table, or one for shorter samples.
    """
    torch.manual_seed(spec.seed)
    model = _pretrained(spec)
    if encoder_of(model).causal or spec.settings.activation_checkpointing is True:
        model.config.use_cache = (
            False  # which is for generating; with checkpointing it breaks the compiler's graph
        )
    if encoder_of(model).causal:
        model.loss_type = "ForCausalLM"  # what transformers takes for it, after a warning
    elif spec.settings.loss != "native":
        raise UserError(f"{spec.variant}: loss {spec.settings.loss!r} is that of a language model")
    attention.keep_frequencies(model)
    _transform(model, spec.settings)
    model = apply_recipe(model, spec.recipe)
    if spec.settings.dropout == "none":  # that of adapters as well
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout | fused_blocks.HashDropout):
                module.p = 0.0
    return model


def _transform(model: torch.nn.Module, settings: Settings) -> None:
    """Change of a model in place what the settings say."""
    if settings.activation_checkpointing is True:
        # transformers 5.23 renames it, and warns of the old name.
        enable = getattr(
            model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False})
    if encoder_of(model).causal and settings.norms == "fused":
        fused_blocks.check_fused_decoder(settings)
    for name, value, change in CHANGES:
        if getattr(settings, name) == value:
            change(model)
    if settings.qat != "none":
        use_rounding(model, settings.qat)
    if settings.base_quantization == "nf4":
        use_nf4(model, DTYPES[settings.precision])


def model_config(source: str, task: str = "qa") -> PreTrainedConfig:
    """The configuration of "tiny", of a shape, a folder or a hub name. UserError for an architecture that is not known
    for the task."""
    if source == "tiny":
        return BertConfig(vocab_size=len(vocabulary()), **TINY_CONFIG)
    if shape := find_shape(source):
        # Whole tiles in the GEMM that is as wide as the vocabulary, a third of a small model's arithmetic.
        words, heads = -(-shape.vocabulary // ALIGN) * ALIGN, shape.hidden // HEAD
        sizes = {
            "n_layer": shape.layers,
            "n_embd": shape.hidden,
            "n_head": heads,
            "n_positions": shape.positions,
        }
        return GPT2Config(vocab_size=words, **sizes, bos_token_id=0, eos_token_id=0)
    return read_config(source, task)


def _pretrained(spec: Spec) -> torch.nn.Module:
    source, task, implementation = spec.model_source, spec.preset.task, spec.settings.attention
    head, config = HEADS[task], model_config(source, task)
    if why := lacking(
        spec.settings, config.model_type
    ):  # of a model that was not here yet when the run was planned
        raise UserError(f"{spec.variant} {why}")
    if spec.settings.padding == "packed":
        implementation = attention.attention_name(implementation)
    elif (
        task == "lm"
        and implementation in ("sdpa", "triton-causal")
        and spec.settings.engine == "loop"
    ):
        implementation = attention.UNMASKED
    spec.preset.check_length(source, max_positions(config))
    if source != "tiny" and not find_shape(source):
        folder = find_folder(source)
        if inspect_checkpoint(folder)[1]:
            return load(folder, head, implementation, new_head=True, task=task, dtype=torch.float32)
        if spec.preset.quality:
            raise UserError(
                f"{folder}: no model.safetensors, which {spec.preset.name} needs; save_pretrained makes it"
            )
    with as_user_error(source):
        return head.from_config(config, attn_implementation=implementation)


def apply_recipe(model: torch.nn.Module, recipe: Recipe) -> torch.nn.Module:
    """Leave gradients on for the recipe's parameters alone; an answer head, which is new, always trains."""
    encoder = encoder_of(model)
    head = torch.nn.ModuleList([] if encoder.causal else heads_of(model))
    if recipe.kind == "lora":
        if any(
            isinstance(module, fused_blocks.FusedDecoder | fused_blocks.Conv1DGelu)
            for module in model.modules()
        ):
            raise UserError("adapters of a decoder take norms 'native' and gelu 'exact'")
        if fault := adapters_fault():
            raise UserError(fault)
        # peft asks transformers by a name that transformers 5.23 deprecates.
        warnings.filterwarnings(
            "ignore", message=".*is_gradient_checkpointing", category=FutureWarning
        )
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ModuleNotFoundError as missing:
            raise UserError(
                f"adapters need a package that is not installed: pip install {missing.name}"
            ) from None

        # Injected into the model itself: peft's own wrapper for question answering drops token_type_ids and
        # position_ids on their way to the model.
        targets = {
            name
            for target in recipe.targets
            for name in encoder.adapters.get(target, target).split()
        }
        config = LoraConfig(
            r=recipe.rank,
            lora_alpha=2 * recipe.rank,
            lora_dropout=0.1,
            target_modules=sorted(targets),
            fan_in_fan_out=any(
                isinstance(m, Conv1D) for m in model.modules()
            ),  # GPT-2's weights are [in, out]
        )
        inject_adapter_in_model(config, model)
    elif recipe.kind == "bitfit":
        for name, parameter in model.named_parameters():
            parameter.requires_grad = name.endswith(".bias")
    elif recipe.kind == "top":
        # The share is of 12 layers; a shallower model keeps the proportion.
        layers, (numerator, denominator) = layers_of(model), recipe.frozen
        count = len(layers) * numerator // denominator
        bottom, top = embeddings_of(model) + layers[:count], layers[-max(1, count) :]
        for module in bottom if recipe.frozen_side == "bottom" else top:
            module.requires_grad_(False)
    head.requires_grad_(True)
    return model


def save_model(model: torch.nn.Module, tokenizer: Tokenizer, folder: Path) -> None:
    """A plain checkpoint that transformers loads: adapters merged, safetensors, tokenizer and digests beside it."""
    model.float()  # an adapter's change can be below the resolution of half-precision weights
    for name, module in list(model.named_modules()):
        if hasattr(module, "get_base_layer"):  # a LoraLayer
            base = module.get_base_layer()
            if isinstance(base, NF4Linear):
                base = native(base, module.get_delta_weight("default"))
            else:
                module.merge()
            model.set_submodule(name, base)
    for name, module in list(model.named_modules()):
        if isinstance(module, NF4Linear):  # without an adapter
            model.set_submodule(name, native(module))
        if is_rounding(module):
            model.set_submodule(name, module.to_linear())
    attention.split_projections(model)
    with replacing(folder) as work:
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)


def trainable_summary(model: torch.nn.Module):
    """Parameters by part of the model, in all and trainable: a DataFrame, for display."""
    import pandas as pd  # takes a quarter of a second, and no run needs it

    parts = {"embeddings": embeddings_of(model)}
    parts |= {f"layer {number}": [layer] for number, layer in enumerate(layers_of(model))}
    parts |= {"head": heads_of(model), "all": [model]}
    counts, rows = param_counts(model), {}
    for name, modules in parts.items():
        parameters = [p for module in modules for p in module.parameters()]
        rows[name] = [
            sum(counts[p] for p in parameters),
            sum(counts[p] for p in parameters if p.requires_grad),
        ]
    return pd.DataFrame.from_dict(rows, orient="index", columns=["parameters", "trainable"])
