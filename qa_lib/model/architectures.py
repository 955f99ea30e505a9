"""The models that the lab trains: where each keeps its layers, embeddings and head.

BERT (Devlin et al. 2018), RoBERTa (Liu et al. 2019) and ELECTRA (Clark et al. 2020) are one architecture under three
names in transformers, and differ in what is written down here. DistilBERT (Sanh et al. 2019) is half of BERT's layers,
put together otherwise. ModernBERT (Warner et al. 2024) turns queries and keys by their positions, looks at a window
around each token in two of three layers, has its norms before its linear layers, and gates in place of biases. Whatever
changes or counts a part of a model (fused projections, dropout, 8-bit linear layers, frozen layers, FLOPs, memory,
profiles) finds it by this table, so that another encoder is another entry; lacks.csv says which settings it cannot
have. How a question and its context are joined, and whether token types go with them, is not here: the tokenizer says
that (data/tokenize.py). GPT-2 (Radford et al. 2019) is the decoder among them: it sees what came before alone, and its
head predicts the next token.

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
    below_head: tuple[str, ...] = ()  # modules with weights between the layers and the head
    causal: bool = False  # a token sees those before it alone, and the head, which is the embeddings, predicts the next
    # In each layer. RECIPES of variants.py address adapters by the last part of these names.
    self_attention: str = "attention.self"
    projections: tuple[str, ...] = ("query", "key", "value")  # in self_attention
    attention_output: str = "attention.output.dense"  # the linear layer after it
    linears: tuple[str, ...] = ("intermediate.dense", "output.dense")  # of the feed-forward block
    activation: str = "intermediate.intermediate_act_fn"  # between those linear layers
    dropouts: tuple[str, ...] = (
        "attention.output.dropout",
        "output.dropout",
    )  # of the hidden states
    positions_after_padding: bool = (
        False  # positions count from padding's token id + 1, and not from 0
    )
    adapters: Mapping[str, str] = field(
        default_factory=dict
    )  # names in RECIPES -> what is called otherwise here
    memory_known: bool = (
        True  # whether run/memory_estimate.py knows what a layer keeps for its backward pass
    )


# fmt: off
ENCODERS = {
    "bert": Encoder("bert.encoder.layer", ("bert.embeddings",)),
    "roberta": Encoder("roberta.encoder.layer", ("roberta.embeddings",), positions_after_padding=True),
    # Its small models have narrower embeddings, and a linear layer that widens them.
    "electra": Encoder("electra.encoder.layer", ("electra.embeddings", "electra.embeddings_project")),
    "distilbert": Encoder(
        "distilbert.transformer.layer", ("distilbert.embeddings",), self_attention="attention",
        projections=("q_lin", "k_lin", "v_lin"), attention_output="attention.out_lin", linears=("ffn.lin1", "ffn.lin2"),
        activation="ffn.activation", dropouts=("ffn.dropout",),
        adapters={"query": "q_lin", "key": "k_lin", "value": "v_lin", "dense": "out_lin lin1 lin2"},
    ),
    "modernbert": Encoder(
        "model.layers", ("model.embeddings",), "classifier", "model.embeddings.drop", ("model.final_norm", "head"),
        self_attention="attn", projections=("Wqkv",), attention_output="attn.Wo", linears=("mlp.Wi", "mlp.Wo"),
        activation="mlp.act", dropouts=("attn.out_drop", "mlp.drop"), memory_known=False,
        adapters={"query": "Wqkv", "key": "Wqkv", "value": "Wqkv", "dense": "Wo Wi"},
    ),
}
DECODERS = {
    "gpt2": Encoder(
        "transformer.h", ("transformer.wte", "transformer.wpe"), "lm_head", "transformer.drop", causal=True,
        self_attention="attn", linears=("mlp.c_fc", "mlp.c_proj"),
        activation="mlp.act", dropouts=("attn.resid_dropout", "mlp.dropout"),
        # Query, key and value are one linear layer in GPT-2.
        adapters={"query": "c_attn", "key": "c_attn", "value": "c_attn", "dense": "c_proj c_fc"},
    ),
}
# fmt: on
# Encoders that are asked for and cannot be had, and why.
_SCORES = "its disentangled attention adds relative-position scores that none of the attention kernels here take"
REFUSED = {"deberta": _SCORES, "deberta-v2": _SCORES}


OF_TASK = {"qa": ENCODERS, "lm": DECODERS}


def find_encoder(model_type: str, source: str, task: str = "qa") -> Encoder:
    """The entry for a `model_type` of transformers; UserError, which names `source`, if there is none for the task."""
    known = OF_TASK[task]
    if not isinstance(model_type, str) or model_type not in known:
        why = (
            f": {REFUSED[model_type]}"
            if isinstance(model_type, str) and model_type in REFUSED
            else ""
        )
        knows = f"this lab knows {', '.join(known)} for task {task}"
        raise UserError(f"{source}: a model of type {model_type!r}{why}; {knows}")
    return known[model_type]


def encoder_of(model) -> Encoder:
    """The entry of a model that was built."""
    return (ENCODERS | DECODERS)[model.config.model_type]


def first_position(config) -> int:
    """The position id of a sequence's first token, from a model's configuration."""
    return (
        config.pad_token_id + 1
        if (ENCODERS | DECODERS)[config.model_type].positions_after_padding
        else 0
    )


def max_positions(config) -> int:
    """How long a sequence may be: one token a position id."""
    return config.max_position_embeddings - first_position(config)


def positions_in(config: Mapping) -> int | None:
    """How long a sequence may be by what a model's config.json says; None where it does not say, or not by a number."""
    encoder = (ENCODERS | DECODERS).get(config.get("model_type"))
    most, pad = config.get("max_position_embeddings"), config.get("pad_token_id", 1)
    if type(most) is not int:
        return None
    if encoder and encoder.positions_after_padding and type(pad) is int:
        return most - pad - 1
    return most


def layers_of(model) -> list:
    """The layers, from the bottom up."""
    return list(model.get_submodule(encoder_of(model).layers))


def embeddings_of(model) -> list:
    """The modules below the layers."""
    return [
        module for name, module in model.named_modules() if name in encoder_of(model).embeddings
    ]


def heads_of(model) -> list:
    """The modules above the layers, which make answers, or the next token, of what these give."""
    encoder = encoder_of(model)
    return [model.get_submodule(name) for name in (*encoder.below_head, encoder.head)]


def local_layers(config) -> tuple[float, int]:
    """Of a model's configuration the share of layers in which a token sees a window of tokens around it alone, and how
    many tokens that are, itself among them; 0 and 0 where there are none."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    share = kinds.count("sliding_attention") / len(kinds)
    return share, 2 * config.sliding_window + 1 if share else 0


def param_counts(model) -> dict:
    """How many weights each parameter of a model holds: its elements, unless its layer packs them otherwise."""
    return {
        parameter: getattr(parameter, "held", parameter.numel()) for parameter in model.parameters()
    }


def trains(module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def layers_passed(model) -> int:
    """How many layers gradients pass through on their way down to the lowest parameter that trains."""
    layers = layers_of(model)
    if any(map(trains, embeddings_of(model))):
        return len(layers)
    return max(
        (len(layers) - number for number, layer in enumerate(layers) if trains(layer)), default=0
    )
