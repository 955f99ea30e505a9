"""BERT's layers for models that compute the same and are put together otherwise.

MPNet's and DistilBERT's layers are BERT's under other names, with attention that none of what
changes BERT's layers knows. Here transformers' own BertLayers take their places, with their weights
(model/mpnet.py, model/distilbert.py). The lab's models then have BERT's names, and `plain_state`
gives their parameters those of a checkpoint. In one's own code (own/speed_up.py) `keep_names` has
the layers read and write the checkpoint's names themselves.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from transformers.models.bert.modeling_bert import BertConfig, BertLayer

from qa_lib.model.architectures import encoder_of

# By model_type: beginnings of names in a layer as transformers has them, and BERT's. All others are
# the same.
NAMES = {
    "mpnet": {
        "attention.attn.q.": "attention.self.query.",
        "attention.attn.k.": "attention.self.key.",
        "attention.attn.v.": "attention.self.value.",
        "attention.attn.o.": "attention.output.dense.",
        "attention.LayerNorm.": "attention.output.LayerNorm.",
    },
    "distilbert": {
        "attention.q_lin.": "attention.self.query.",
        "attention.k_lin.": "attention.self.key.",
        "attention.v_lin.": "attention.self.value.",
        "attention.out_lin.": "attention.output.dense.",
        "sa_layer_norm.": "attention.output.LayerNorm.",
        "ffn.lin1.": "intermediate.dense.",
        "ffn.lin2.": "output.dense.",
        "output_layer_norm.": "output.LayerNorm.",
    },
}


def replace_layers(layers: nn.ModuleList, kind: str, config: BertConfig) -> None:
    """Put BertLayers of that configuration with the same weights in place of layers.

    `kind` is the model_type that the layers are of.
    """
    for number, layer in enumerate(layers):
        with torch.device("meta"):
            new = BertLayer(config)
        parameters = {
            _bert_in_layer(kind, name): parameter for name, parameter in layer.named_parameters()
        }
        for name, parameter in new.named_parameters():
            # The new parameter decides whether the one that takes its place trains.
            parameter.requires_grad_(parameters[name].requires_grad)
        new.load_state_dict(parameters, assign=True)
        if getattr(layer, "gradient_checkpointing", False):  # as transformers has set it
            new.gradient_checkpointing = True
            new._gradient_checkpointing_func = layer._gradient_checkpointing_func
        layers[number] = new.train(layer.training)


def plain_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of the lab's model by the names of transformers' model of its type."""
    return {original_name(model, name): value for name, value in model.state_dict().items()}


def original_name(model: nn.Module, name: str) -> str:
    """Return what transformers calls a parameter that the lab's model calls `name`."""
    layers = f"{encoder_of(model).layers}."
    kind = model.config.model_type
    if kind not in NAMES or not name.startswith(layers):
        return name
    number, _, in_layer = name.removeprefix(layers).partition(".")
    return f"{layers}{number}.{_original_in_layer(kind, in_layer)}"


def _original_in_layer(kind: str, name: str) -> str:
    """Return what a layer of a model of a kind calls a parameter that BERT's calls `name`."""
    for own, berts in NAMES[kind].items():
        if name.startswith(berts):
            return own + name.removeprefix(berts)
    return name


def _bert_in_layer(kind: str, name: str) -> str:
    """Return what BERT's layer calls a parameter that a layer of a kind calls `name`."""
    for own, berts in NAMES[kind].items():
        if name.startswith(own):
            return berts + name.removeprefix(own)
    return name


def keep_names(layer: BertLayer, kind: str) -> None:
    """Have the states of one of replace_layers' layers be by the names of transformers' model."""
    layer.register_state_dict_post_hook(partial(_originals_in_state, kind))
    layer.register_load_state_dict_pre_hook(partial(_berts_in_state, kind))


def _originals_in_state(kind: str, _layer, state: dict, prefix: str, _metadata) -> None:
    """Give the parameters of a layer in a state the names of transformers' model."""
    _rename(state, prefix, partial(_original_in_layer, kind))


def _berts_in_state(kind: str, _layer, state: dict, prefix: str, *_) -> None:
    """Give the parameters of a layer in a state the names of BERT."""
    _rename(state, prefix, partial(_bert_in_layer, kind))


def _rename(state: dict, prefix: str, renamed: Callable[[str], str]) -> None:
    """Give what begins with `prefix` in a state other names, in place."""
    for name in [name for name in state if name.startswith(prefix)]:
        state[prefix + renamed(name.removeprefix(prefix))] = state.pop(name)
