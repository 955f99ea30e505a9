"""One line that speeds up an encoder of transformers, whatever its head: `speed_up(model)`.

The techniques are those of the variants (in model/: fused_projections.py, hash_dropout.py,
fused_norms.py, fused_gelu.py, packed_attention.py, varlen_attention.py). Each is taken where the
architecture and the card allow it. What they would ask of whoever calls the model is done by hooks
(packed_model.py); the weights in `state_dict`, and so in every checkpoint, have the names and
shapes that transformers gives them.

To add an encoder: its entry in the table of model/architectures.py, what it lacks in `lacking` of
spec/rules.py, and its name in KINDS below, where its layers hand keyword arguments down to the
attention kernel, or are made to. All tests of this part then take it.
"""

import inspect
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from transformers import PreTrainedModel
from transformers.activations import GELUActivation

from qa_lib.calls import checked, expect
from qa_lib.errors import UserError
from qa_lib.kernels.gelu import gelu
from qa_lib.kernels.varlen_reference import attach_bias_grad
from qa_lib.model import distilbert, mpnet
from qa_lib.model.architectures import REFUSED, encoder_of, layers_of
from qa_lib.model.bert_layers import keep_names
from qa_lib.model.fused_gelu import FusedIntermediate
from qa_lib.model.fused_norms import use_fused_norms
from qa_lib.model.fused_projections import (
    FusedSelfAttention,
    fuse_projections,
    refuse_attentions,
)
from qa_lib.model.hash_dropout import use_hash_dropout
from qa_lib.model.packed_attention import QUICKEST, quickest_kernel
from qa_lib.model.rotary import keep_frequencies
from qa_lib.model.varlen_attention import use_varlen_attention
from qa_lib.own.packed_model import (
    Rooted,
    draw_dropouts,
    hand_on_segments,
    refuse_packed,
    score_in_fp32,
    take_packed,
)
from qa_lib.spec.rules import lacking, unfit_heads
from qa_lib.spec.settings import Settings

# Types of models whose layers hand keyword arguments down.
KINDS = ("bert", "roberta", "electra", "distilbert", "modernbert", "mpnet")
# What each technique is among a run's settings, by the words that `speed_up` has for it.
FUSED_QKV = "fused QKV"
HASH_DROPOUT = "hash dropout"
FUSED_NORMS = "fused norms"
FUSED_GELU = "fused GELU"
PACKING = "packed sequences"
TECHNIQUES = {
    FUSED_QKV: Settings(qkv="fused"),
    HASH_DROPOUT: Settings(dropout="hash"),
    FUSED_NORMS: Settings(dropout="hash", norms="fused"),
    FUSED_GELU: Settings(gelu="sigmoid"),
    PACKING: Settings(padding="packed", attention="block-diagonal"),
}
KERNELS = (HASH_DROPOUT, FUSED_NORMS, FUSED_GELU)  # those that are Triton kernels of our own
VARLEN = Settings(padding="packed", attention="triton-varlen")
LEAST_CAPABILITY = (7, 5)  # of a GPU that the kernels are for


@checked
def speed_up(model: PreTrainedModel, say: Callable[[str], None] = print) -> PreTrainedModel:
    """Speed up an encoder of transformers, in place, and return it.

    `model` is a BERT, RoBERTa, ELECTRA, DistilBERT, ModernBERT or MPNet with a head for questions,
    sequences or tokens, or with none. Make the optimizer afterwards: some parameters are new ones.
    Everything else stays as it is: training and evaluation, gradient checkpointing, autocast,
    `torch.compile`, DistributedDataParallel, `save_pretrained`. It then also takes packed
    sequences: the batches that PackedCollator gives. Logits and losses of a head of transformers
    are in fp32, also where weights are in half precision. `say` takes one line on what was taken
    and what was not, and why.

    Raises UserError for another architecture, a decoder, a model with adapters or quantized
    weights, and one that has been sped up. Later a call of the model raises it for adapters that
    were added to the fused linear layer, and a step of an optimizer that was made before.

        from transformers import AutoModelForSequenceClassification
        from qa_lib import speed_up

        model = AutoModelForSequenceClassification.from_pretrained("my-bert")
        speed_up(model)  # BertForSequenceClassification: fused QKV, hash dropout, ...
    """
    _check(model)
    parameters = list(model.parameters())
    root = Rooted(model)
    _give_bert_layers(model, root)
    left_out = {name: why for name in TECHNIQUES if (why := _why_not(name, model, root))}
    if FUSED_QKV not in left_out:
        fuse_projections(root, QuickSelfAttention)
        for layer in layers_of(root):
            _keep_layout(layer.get_submodule(encoder_of(root).self_attention))
        model.base_model.register_forward_pre_hook(_refuse_attentions, with_kwargs=True)
    if HASH_DROPOUT not in left_out:
        if _takes_varlen(model):
            use_varlen_attention(root, defers_bias=False)
        use_hash_dropout(root)
    if FUSED_NORMS not in left_out:
        use_fused_norms(root)
    if FUSED_GELU not in left_out:
        _use_fused_gelu(root)
    keep_frequencies(root)
    score_in_fp32(model)
    # First what refuses or lays out, then seeds: hooks are called in this order.
    encoder = root.get_submodule(root.encoder_name)
    if PACKING in left_out:
        refuse_packed(model, left_out[PACKING])
    else:
        take_packed(model, root)
    if HASH_DROPOUT not in left_out:
        draw_dropouts(root)
    model.train(model.training)  # modules that are new begin in training mode
    encoder.is_sped_up = True
    _mark_replaced(parameters, model)
    say(_told(model, left_out))
    return model


def _check(model: PreTrainedModel) -> None:
    """Raise UserError for what cannot be sped up."""
    if type(model).__module__.partition(".")[0] == "peft" or hasattr(model, "peft_config"):
        raise UserError(
            "speed_up takes a model without adapters, and this one has adapters of peft: "
            "the fused linear layers would leave them out"
        )
    expect("model", model, PreTrainedModel, _what_to_give(model))
    name = type(model).__name__
    kind = model.config.model_type
    if kind not in KINDS:
        why = f" ({REFUSED[kind]})" if kind in REFUSED else ""
        raise UserError(f"{name}: speed_up takes {', '.join(KINDS)}, and not {kind}{why}")
    if getattr(model.config, "is_decoder", False):
        raise UserError(
            f"{name} is a decoder, by is_decoder in its configuration, and speed_up takes encoders"
        )
    if getattr(model, "is_quantized", False):
        raise UserError(
            f"the weights of this {name} are quantized, and speed_up fuses those that are not: "
            "load it without quantization_config"
        )
    if getattr(model.base_model, "is_sped_up", False):
        raise UserError(f"this {name} has been sped up already: call speed_up once")


def _what_to_give(model: object) -> str:
    """Return what to give in place of what is no model of transformers: an encoder within it."""
    if isinstance(model, nn.Module):
        for name, part in model.named_children():
            if isinstance(part, PreTrainedModel):
                return f"give the encoder within it, speed_up(model.{name})"
    return "give a model of transformers, before torch.compile or DDP has wrapped it"


def _refuse_attentions(encoder: nn.Module, args: tuple, kwargs: dict) -> None:
    """Raise UserError where the weights of attention are asked for."""
    refuse_attentions(kwargs.get("output_attentions"), encoder.config)


def _give_bert_layers(model: PreTrainedModel, root: Rooted) -> None:
    """Give an MPNet or a DistilBERT BERT's layers, in place; checkpoints stay those of its own."""
    kind = model.config.model_type
    if kind == "mpnet":
        mpnet.change_backbone(model.base_model, attention="sdpa")
        hand_on_segments(model)
        model.supports_gradient_checkpointing = True  # BERT's layers can be computed again
    elif kind == "distilbert":
        distilbert.use_bert_layers(model.base_model, model.config._attn_implementation)
    else:
        return
    for layer in layers_of(root):
        keep_names(layer, kind)


def _why_not(name: str, model: PreTrainedModel, root: Rooted) -> str | None:
    """Return why a model cannot have a technique; None if it can."""
    kind = model.config.model_type
    why = lacking(TECHNIQUES[name], kind)
    if why:
        return why.removeprefix(f"does not fit {kind}: ")
    if name in KERNELS and (why := _card_lacks()):
        return why
    if name == FUSED_QKV:
        return _mixed_projections(root)
    if name == FUSED_GELU:
        return _other_activation(root)
    if name == PACKING:
        if type(model).__name__.endswith("ForMultipleChoice"):
            return "a head for multiple choice counts the choices by the shape of its inputs"
        if not _hands_on(model):
            return "its forward hands no position_ids and **kwargs to the encoder"
        first_layer = layers_of(root)[0]
        config = first_layer.get_submodule(encoder_of(root).self_attention).config
        attention = config._attn_implementation
        if attention not in ("sdpa", QUICKEST):  # a configuration may be that of several models
            return f"attention {attention!r}: load the model with attn_implementation='sdpa'"
    return None


def _hands_on(model: PreTrainedModel) -> bool:
    """Return whether a model's forward takes what it has to hand on to its encoder.

    A class of somebody's own may name the arguments that it knows, and no others.
    """
    parameters = inspect.signature(model.forward).parameters
    return "cu_seqlens" in parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def _card_lacks() -> str | None:
    """Return why the GPU here cannot have the kernels; None if it can, or if there is none.

    A CPU computes the same in plain PyTorch.
    """
    if not torch.cuda.is_available():
        return None
    if torch.cuda.get_device_capability() < LEAST_CAPABILITY:
        return "the kernels are for compute capability 7.5 and newer"
    if find_spec("triton") is None:
        return "the kernels need the package triton"
    return None


def _mixed_projections(root: Rooted) -> str | None:
    """Return why query, key and value cannot be one layer; None if they can."""
    encoder = encoder_of(root)
    for layer in layers_of(root):
        attention = layer.get_submodule(encoder.self_attention)
        projections = [attention.get_submodule(name) for name in encoder.projections]
        parameters = [p for projection in projections for p in projection.parameters()]
        if len({p.requires_grad for p in parameters}) > 1:
            return "some of query, key and value are frozen and others are not"
    return None


def _other_activation(root: Rooted) -> str | None:
    """Return why the activation has no fused kernel; None if it is GELU."""
    for layer in layers_of(root):
        activation = layer.get_submodule(encoder_of(root).activation)
        if not isinstance(activation, GELUActivation):
            return f"the activation is {type(activation).__name__}"
    return None


def _takes_varlen(model: PreTrainedModel) -> bool:
    """Return whether our own attention kernel takes the heads of a model."""
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    return lacking(VARLEN, config.model_type) is None and unfit_heads(width) is None


# Optimizers that were made before. What they have of the model's parameters gets no gradients any
# more, and they leave out such parameters without a word.


def _mark_replaced(parameters: list[nn.Parameter], model: PreTrainedModel) -> None:
    """Mark those of a model's earlier parameters that it has no longer, for optimizers to see."""
    kept = {id(parameter) for parameter in model.parameters()}
    for parameter in parameters:
        if id(parameter) not in kept:
            parameter.is_replaced = True
            _watch_optimizers()


@cache
def _watch_optimizers() -> None:
    """Have every optimizer look for replaced parameters before its steps. Called again: nothing."""
    register_optimizer_step_pre_hook(_refuse_replaced)


def _refuse_replaced(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    """Raise UserError for an optimizer that has parameters which `speed_up` replaced.

    This takes microseconds, and is in no CUDA graph.
    """
    replaced = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            replaced += getattr(parameter, "is_replaced", False)
    if replaced:
        raise UserError(
            f"the optimizer was made before speed_up, which replaced {replaced} of its "
            "parameters: make it afterwards"
        )


def _told(model: PreTrainedModel, left_out: dict[str, str]) -> str:
    """Return the line that says what a model has got."""
    taken = [name for name in TECHNIQUES if name not in left_out]
    line = f"{type(model).__name__}: {', '.join(taken) or 'nothing'}"
    names_by_reason: dict[str, list[str]] = {}
    for name, why in left_out.items():
        names_by_reason.setdefault(why, []).append(name)
    for why, names in names_by_reason.items():
        line += f"; not {', '.join(names)}: {why}"
    return line


# Fused projections whose checkpoint is that of three.


class QuickSelfAttention(FusedSelfAttention):
    """FusedSelfAttention that leaves its bias's gradient to our attention kernel where that runs.

    That depends on the call: on the device, on the type under autocast, and on whether the sequence
    is packed.
    """

    def project(self, hidden_states, is_packed: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what FusedSelfAttention returns."""
        if type(self.qkv) is not nn.Linear:
            raise UserError(
                "the fused linear layer of query, key and value was replaced by a "
                f"{type(self.qkv).__module__}.{type(self.qkv).__name__}: "
                "adapters and quantization are for a model that was not sped up"
            )
        shape = (3, -1, self.width)
        if not is_packed:
            return self.qkv(hidden_states).unflatten(-1, shape), None
        weight = self.qkv.weight
        qkv_bias = self.qkv.bias
        qkv = F.linear(hidden_states, weight, qkv_bias.detach()).unflatten(-1, shape)
        if quickest_kernel(self, qkv) == "triton-varlen":
            return qkv, qkv_bias
        return attach_bias_grad(qkv, qkv_bias), None


def _keep_layout(attention: FusedSelfAttention) -> None:
    """Have `state_dict` and `load_state_dict` know three projections where there is one."""
    attention.register_state_dict_post_hook(_split_in_state)
    attention.register_load_state_dict_pre_hook(_fuse_in_state)


def _split_in_state(attention: FusedSelfAttention, state: dict, prefix: str, _metadata) -> None:
    """Replace the fused weight and bias in a state by those of the three projections."""
    for kind in ("weight", "bias"):
        fused = state.pop(f"{prefix}qkv.{kind}")
        for name, part in zip(attention.names, fused.chunk(3), strict=True):
            state[f"{prefix}{name}.{kind}"] = part


def _fuse_in_state(attention: FusedSelfAttention, state: dict, prefix: str, *_) -> None:
    """Replace the weights and biases of the three projections in a state by the fused ones.

    A state that lacks some of them stays as it is: PyTorch says what is missing.
    """
    for kind in ("weight", "bias"):
        names = [f"{prefix}{name}.{kind}" for name in attention.names]
        if all(name in state for name in names):
            state[f"{prefix}qkv.{kind}"] = torch.cat([state.pop(name) for name in names])


# GELU.


class GeluInHalf(FusedIntermediate):
    """FusedIntermediate whose GELU is exact where activations are in fp32.

    The kernel's is off by a fraction of half precision's rounding.
    """

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        inner = self.dense(hidden_states)
        if inner.dtype == torch.float32:
            return F.gelu(inner + self.dense.bias)
        return gelu(inner, self.dense.bias)


def _use_fused_gelu(root: Rooted) -> None:
    """Replace the first linear layers of the feed-forward blocks and their activations."""
    encoder = encoder_of(root)
    first_linear = encoder.linears[0]
    for layer in layers_of(root):
        linear = layer.get_submodule(first_linear)
        layer.set_submodule(first_linear.rpartition(".")[0], GeluInHalf(linear))
