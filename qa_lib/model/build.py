"""The model of a run, with its task's head, the variant's attention and trainable parameters."""

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
from qa_lib.model.architectures import (
    embeddings_of,
    encoder_of,
    heads_of,
    layers_of,
    max_positions,
    param_counts,
)
from qa_lib.model.bert_layers import plain_state
from qa_lib.model.float8_layers import (
    copy_operands,
    use_float8,
    use_float8_around_causal_attention,
    use_float8_weight_gradients,
)
from qa_lib.model.fused_decoder import use_causal_attention, use_fused_decoder
from qa_lib.model.fused_gelu import use_sigmoid_gelu
from qa_lib.model.fused_norms import use_fused_norms
from qa_lib.model.fused_projections import (
    fuse_projections,
    split_projections,
    use_float8_projections,
)
from qa_lib.model.hash_dropout import HashDropout, use_hash_dropout
from qa_lib.model.hf_checkpoint import (
    ModelFolder,
    find_folder,
    inspect_checkpoint,
    inspect_source,
    replacing,
)
from qa_lib.model.load import as_user_error, load, new_model, read_config
from qa_lib.model.nf4 import NF4Linear, native, use_nf4
from qa_lib.model.packed_attention import UNMASKED, attention_name
from qa_lib.model.qat import is_rounding, use_rounding
from qa_lib.model.rotary import keep_frequencies
from qa_lib.model.varlen_attention import use_varlen_attention
from qa_lib.packages import adapters_fault
from qa_lib.spec.recipes import Recipe
from qa_lib.spec.rules import lacking, task_conflicts
from qa_lib.spec.settings import Settings
from qa_lib.spec.shapes import find_shape
from qa_lib.spec.spec import Spec

ALIGN = 64  # the size of a vocabulary is rounded up to a multiple of this
# transformers' class of each task's models.
HEADS = {"qa": AutoModelForQuestionAnswering, "lm": AutoModelForCausalLM}
DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "pure-bf16": torch.bfloat16,
}


def build_model(spec: Spec, folder: ModelFolder | None = None) -> torch.nn.Module:
    """Return the spec's model on the CPU in fp32, seeded, ready to train; not compiled yet.

    `folder` is the model's, where the caller has inspected it already.

    A folder with a config but no model.safetensors gives random weights where the preset measures
    no quality. Raises UserError where it does measure quality, for an architecture that is not
    known or cannot have the settings, and for a model that takes fewer tokens than samples have.
    """
    for why in task_conflicts(spec.settings, spec.preset.task):
        raise UserError(f"{spec.variant}: {why}")
    torch.manual_seed(spec.seed)
    model = _pretrained(spec, folder or inspect_source(spec.model_source))
    is_decoder = encoder_of(model).causal
    if is_decoder or spec.settings.activation_checkpointing is True:
        # The cache is for generating; with checkpointing it breaks the compiler's graph.
        model.config.use_cache = False
    if is_decoder:
        model.loss_type = "ForCausalLM"  # what transformers takes for it, after a warning
    keep_frequencies(model)
    _transform(model, spec.settings)
    model = apply_recipe(model, spec.recipe)
    if spec.settings.dropout == "none":  # that of adapters as well
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout | HashDropout):
                module.p = 0.0
    return model


def _transform(model: torch.nn.Module, settings: Settings) -> None:
    """Change a model in place where the settings say so.

    The order matters, since some changes build on what others have left.
    """
    is_decoder = encoder_of(model).causal
    if settings.activation_checkpointing is True:
        # transformers 5.23 renames it, and warns of the old name.
        enable = getattr(
            model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False})
    if settings.qkv == "fused":
        fuse_projections(model)
    if settings.attention == "triton-varlen":
        # The bias of fused projections is left to the kernel.
        use_varlen_attention(model)
    if settings.dropout in ("hash", "none"):
        # For none, at a rate of 0: fused norms know no other dropout.
        use_hash_dropout(model)
    if settings.norms == "fused":
        # Fused norms compute the bits of that dropout themselves.
        if is_decoder:
            use_fused_decoder(model)
        else:
            use_fused_norms(model)
    if settings.attention == "triton-causal":
        # The fused decoder calls it.
        use_causal_attention(model)
    if settings.gelu == "sigmoid":
        use_sigmoid_gelu(model)
    if settings.feed_forward == "fp8":
        # Linear layers have a bias or none by now, as fused norms and GELU have left them.
        use_float8(model)
    if settings.attention_projections == "fp8":
        if is_decoder:
            use_float8_around_causal_attention(model)
        else:
            use_float8_projections(model)
    if settings.weight_gradients == "fp8":
        use_float8_weight_gradients(model)
    if settings.norms == "fused" and not is_decoder:
        copy_operands(
            model,
            feed_forward=settings.feed_forward == "fp8",
            projections=settings.attention_projections == "fp8",
        )
    if settings.qat != "none":
        use_rounding(model, settings.qat)
    if settings.base_quantization == "nf4":
        use_nf4(model, DTYPES[settings.precision])


def model_config(source: str, task: str = "qa") -> PreTrainedConfig:
    """Return the configuration of "tiny", of a shape, of a folder or of a model of the hub.

    Raises UserError for an architecture that is not known for the task.
    """
    if source == "tiny":
        return BertConfig(vocab_size=len(vocabulary()), **TINY_CONFIG)
    shape = find_shape(source)
    if shape is None:
        inspect_source(source)
        return read_config(source, task)
    # Whole tiles in the GEMM that is as wide as the vocabulary, a third of a small model's
    # arithmetic.
    words = -(-shape.vocabulary // ALIGN) * ALIGN
    return GPT2Config(
        vocab_size=words,
        n_layer=shape.layers,
        n_embd=shape.hidden,
        n_head=shape.heads,
        n_positions=shape.positions,
        bos_token_id=0,
        eos_token_id=0,
    )


def _pretrained(spec: Spec, folder: ModelFolder | None) -> torch.nn.Module:
    """Return the spec's model as transformers builds it: from a folder's weights, or random.

    `folder` is None for what is no folder yet: "tiny", a shape, a name of the hub.
    """
    source = spec.model_source
    task = spec.preset.task
    head = HEADS[task]
    config = read_config(source, task) if folder else model_config(source, task)
    # Checked here and not only when the run is planned: the model may not have been here then.
    why = lacking(spec.settings, config.model_type)
    if why:
        raise UserError(f"{spec.variant} {why}")
    implementation = _attention_of(spec)
    spec.preset.check_length(source, max_positions(config))
    if source != "tiny" and not find_shape(source):
        folder = folder or inspect_checkpoint(find_folder(source))
        if folder.weights:
            return load(folder, head, implementation, new_head=True, task=task, dtype=torch.float32)
        if spec.preset.quality:
            raise UserError(
                f"{folder.path}: no model.safetensors, which {spec.preset.name} needs; "
                "save_pretrained makes it"
            )
    with as_user_error(source):
        return new_model(config, head, implementation)


def _attention_of(spec: Spec) -> str:
    """Return the name that transformers has for the attention of a spec's model."""
    kernel = spec.settings.attention
    if spec.settings.padding == "packed":
        return attention_name(kernel)
    is_fused = kernel in ("sdpa", "triton-causal")
    if spec.preset.task == "lm" and spec.settings.engine == "loop" and is_fused:
        return UNMASKED
    return kernel


def apply_recipe(model: torch.nn.Module, recipe: Recipe) -> torch.nn.Module:
    """Leave gradients on for the recipe's parameters alone, and return the model, changed in place.

    An answer head, which is new, always trains. Raises UserError where adapters need a package that
    is not installed or does not fit.
    """
    encoder = encoder_of(model)
    head = torch.nn.ModuleList([] if encoder.causal else heads_of(model))
    if recipe.kind == "lora":
        _add_adapters(model, recipe)
    elif recipe.kind == "bitfit":
        for name, parameter in model.named_parameters():
            parameter.requires_grad = name.endswith(".bias")
    elif recipe.kind == "top":
        for module in _frozen_by(model, recipe):
            module.requires_grad_(False)
    head.requires_grad_(True)
    return model


def _add_adapters(model: torch.nn.Module, recipe: Recipe) -> None:
    """Put LoRA adapters beside the recipe's linear layers, and freeze all else, in place."""
    fault = adapters_fault()
    if fault:
        raise UserError(fault)
    # peft asks transformers by a name that transformers 5.23 deprecates.
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as missing:
        raise UserError(
            f"adapters need a package that is not installed: pip install {missing.name}"
        ) from None

    own_names = encoder_of(model).adapters
    targets = set()
    for target in recipe.targets:
        targets.update(own_names.get(target, (target,)))
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=2 * recipe.rank,
        lora_dropout=0.1,
        target_modules=sorted(targets),
        # GPT-2's weights are [in, out].
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    # Injected into the model itself: peft's own wrapper for question answering drops
    # token_type_ids and position_ids on their way to the model.
    inject_adapter_in_model(config, model)


def _frozen_by(model: torch.nn.Module, recipe: Recipe) -> list[torch.nn.Module]:
    """Return the modules that a recipe of kind "top" freezes.

    Its share is of 12 layers; a shallower model keeps the proportion.
    """
    layers = layers_of(model)
    numerator, denominator = recipe.frozen
    count = len(layers) * numerator // denominator
    if recipe.frozen_side == "bottom":
        return embeddings_of(model) + layers[:count]
    return layers[-max(1, count) :]


def save_model(model: torch.nn.Module, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a plain checkpoint that transformers loads, in place of `folder`.

    Adapters are merged and changed layers made plain again, in the model itself. Weights are
    safetensors, with the tokenizer and digests beside them.
    """
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
    split_projections(model)
    with replacing(folder) as work:
        model.save_pretrained(work, state_dict=plain_state(model))
        tokenizer.save_pretrained(work)


def trainable_summary(model: torch.nn.Module):
    """Return a DataFrame, for display: parameters by part of the model, in all and trainable."""
    import pandas as pd  # takes a quarter of a second, and no run needs it

    parts = {"embeddings": embeddings_of(model)}
    parts |= {f"layer {number}": [layer] for number, layer in enumerate(layers_of(model))}
    parts |= {"head": heads_of(model), "all": [model]}
    counts = param_counts(model)
    rows = {}
    for name, modules in parts.items():
        parameters = [p for module in modules for p in module.parameters()]
        total = sum(counts[p] for p in parameters)
        trainable = sum(counts[p] for p in parameters if p.requires_grad)
        rows[name] = [total, trainable]
    return pd.DataFrame.from_dict(rows, orient="index", columns=["parameters", "trainable"])
