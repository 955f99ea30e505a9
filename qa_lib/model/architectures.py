"""The models that the lab trains: where each keeps its layers, embeddings and head.

BERT (Devlin et al. 2018), RoBERTa (Liu et al. 2019) and ELECTRA (Clark et al. 2020) are one architecture under three
names in transformers, and differ in what is written down here. Whatever changes or counts a part of a model (fused
projections, dropout, 8-bit linear layers, frozen layers, FLOPs, memory, profiles) finds it by this table, so that
another encoder is another entry. How a question and its context are joined, and whether token types go with them, is
not here: the tokenizer says that (data/tokenize.py). GPT-2 (Radford et al. 2019) is the decoder among them: it sees
what came before alone, and its head predicts the next token.

No torch is imported: a driver looks up whether the lab knows an architecture.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from qa_lib.errors import UserError


@dataclass(frozen=True)
class Encoder:
    """One architecture. Names are those of submodules, of the model with its head or of one of its layers."""

    layers: str
    embeddings: tuple[str, ...]  # modules that a configuration leaves out may be named
    head: str = "qa_outputs"
    embeddings_dropout: str = ""  # where it is not `dropout` in the first of the embeddings
    causal: bool = False  # a token sees those before it alone, and the head, which is the embeddings, predicts the next
    # In each layer. RECIPES of variants.py address adapters by the last part of these names.
    self_attention: str = "attention.self"
    projections: tuple[str, str, str] = ("query", "key", "value")  # in self_attention
    attention_output: str = "attention.output.dense"  # the linear layer after it
    linears: tuple[str, ...] = ("intermediate.dense", "output.dense")  # of the feed-forward block
    activation: str = "intermediate.intermediate_act_fn"  # between those linear layers
    dropouts: tuple[str, ...] = ("attention.output.dropout", "output.dropout")  # of the hidden states
    positions_after_padding: bool = False  # positions count from padding's token id + 1, and not from 0
    adapters: Mapping[str, str] = field(default_factory=dict)  # names in RECIPES -> what is called otherwise here


ENCODERS = {
    "bert": Encoder("bert.encoder.layer", ("bert.embeddings",)),
    "roberta": Encoder("roberta.encoder.layer", ("roberta.embeddings",), positions_after_padding=True),
    # Its small models have narrower embeddings, and a linear layer that widens them.
    "electra": Encoder("electra.encoder.layer", ("electra.embeddings", "electra.embeddings_project")),
}
DECODERS = {
    "gpt2": Encoder(
        "transformer.h", ("transformer.wte", "transformer.wpe"), "lm_head", "transformer.drop", causal=True,
        self_attention="attn", linears=("mlp.c_fc", "mlp.c_proj"),
        activation="mlp.act", dropouts=("attn.resid_dropout", "mlp.dropout"),
        # Query, key and value are one linear layer in GPT-2.
        adapters={"query": "c_attn", "key": "c_attn", "value": "c_attn", "dense": "c_proj c_fc"},
    ),
}  # fmt: skip


OF_TASK = {"qa": ENCODERS, "lm": DECODERS}


def find_encoder(model_type: str, source: str, task: str = "qa") -> Encoder:
    """The entry for a `model_type` of transformers; UserError, which names `source`, if there is none for the task."""
    known = OF_TASK[task]
    if not isinstance(model_type, str) or model_type not in known:
        raise UserError(f"{source}: a model of type {model_type!r}; this lab knows {', '.join(known)} for task {task}")
    return known[model_type]


def encoder_of(model) -> Encoder:
    """The entry of a model that was built."""
    return (ENCODERS | DECODERS)[model.config.model_type]


def first_position(config) -> int:
    """The position id of a sequence's first token, from a model's configuration."""
    found = (ENCODERS | DECODERS)[config.model_type]
    return config.pad_token_id + 1 if found.positions_after_padding else 0


def max_positions(config) -> int:
    """How long a sequence may be: one token a position id."""
    return config.max_position_embeddings - first_position(config)


def layers_of(model) -> list:
    """The layers, from the bottom up."""
    return list(model.get_submodule(encoder_of(model).layers))


def embeddings_of(model) -> list:
    """The modules below the layers."""
    return [module for name, module in model.named_modules() if name in encoder_of(model).embeddings]


def param_counts(model) -> dict:
    """How many weights each parameter of a model holds: its elements, unless its layer packs them otherwise."""
    return {parameter: getattr(parameter, "held", parameter.numel()) for parameter in model.parameters()}


def trains(module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def layers_passed(model) -> int:
    """How many layers gradients pass through on their way down to the lowest parameter that trains."""
    layers = layers_of(model)
    if any(map(trains, embeddings_of(model))):
        return len(layers)
    return max((len(layers) - number for number, layer in enumerate(layers) if trains(layer)), default=0)
