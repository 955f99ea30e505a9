"""The models that the lab trains: where each keeps its layers, embeddings and head.

BERT (Devlin et al. 2018), RoBERTa (Liu et al. 2019) and ELECTRA (Clark et al. 2020) are one
architecture under three names in transformers, and differ in what is written down here. DistilBERT
(Sanh et al. 2019) is half of BERT's layers, and MPNet (Song et al. 2020) adds a bias by distance to
the attention's scores; both have BERT's layers here (model/bert_layers.py). ModernBERT (Warner et
al. 2024) turns queries and keys by their positions, looks at a window around each token in two of
three layers, has its norms before its linear layers, and gates in place of biases. GPT-2 (Radford
et al. 2019) is the decoder among them: a token sees those before it alone, and the head predicts
the next token.

Whatever changes or counts a part of a model (fused projections, dropout, 8-bit linear layers,
frozen layers, FLOPs, memory, profiles) finds it by this table, so that another encoder is another
entry; `lacking` in spec/rules.py says which settings it cannot have. How a question and its context
are joined, and whether token types go with them, is not here: the tokenizer says that
(data/tokenize.py).

No torch is imported: the process that starts runs looks up whether the lab knows an architecture.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from qa_lib.errors import UserError


@dataclass(frozen=True)
class Architecture:
    """One architecture, an encoder or a decoder, by the names of its submodules."""

    # Names in the model with its head:
    layers: str
    # The modules below the layers; one that some configurations leave out may be named.
    embeddings: tuple[str, ...]
    head: str = "qa_outputs"
    # Empty where it is `dropout` in the first of the embeddings.
    embeddings_dropout: str = ""
    # Modules between the layers and the head.
    below_head: tuple[str, ...] = ()
    # Which of the embeddings is the bias of scores by distance, where there is one: all layers
    # share it.
    distance_bias: str = ""
    # A token sees those before it alone; the head, which has the embeddings' weights, predicts the
    # next.
    causal: bool = False

    # Names in each layer. Recipes (spec/recipes.py) address adapters by the last part of these.
    self_attention: str = "attention.self"
    # In the self-attention: the linear layers of query, key and value.
    projections: tuple[str, ...] = ("query", "key", "value")
    # The linear layer after the attention.
    attention_output: str = "attention.output.dense"
    # Those of the feed-forward block, and the activation between them.
    linears: tuple[str, ...] = ("intermediate.dense", "output.dense")
    activation: str = "intermediate.intermediate_act_fn"
    # The dropouts of the hidden states.
    dropouts: tuple[str, ...] = ("attention.output.dropout", "output.dropout")

    # Whether positions count from the padding's token id + 1, and not from 0.
    positions_after_padding: bool = False
    # Entries of its configuration that have one value alone here.
    fixed: Mapping[str, int] = field(default_factory=dict)
    # What this architecture calls the linear layers that recipes name as BERT does.
    adapters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Whether lab/search/memory_estimate.py knows what a layer keeps for its backward pass.
    memory_known: bool = True


ENCODERS = {
    "bert": Architecture(
        layers="bert.encoder.layer",
        embeddings=("bert.embeddings",),
    ),
    "roberta": Architecture(
        layers="roberta.encoder.layer",
        embeddings=("roberta.embeddings",),
        positions_after_padding=True,
    ),
    # Its small models have narrower embeddings, and a linear layer that widens them.
    "electra": Architecture(
        layers="electra.encoder.layer",
        embeddings=("electra.embeddings", "electra.embeddings_project"),
    ),
    # Names after model/distilbert.py has given it BERT's layers.
    "distilbert": Architecture(
        layers="distilbert.transformer.layer",
        embeddings=("distilbert.embeddings",),
        below_head=("dropout",),
    ),
    "modernbert": Architecture(
        layers="model.layers",
        embeddings=("model.embeddings",),
        head="classifier",
        embeddings_dropout="model.embeddings.drop",
        below_head=("model.final_norm", "head"),
        self_attention="attn",
        projections=("Wqkv",),
        attention_output="attn.Wo",
        linears=("mlp.Wi", "mlp.Wo"),
        activation="mlp.act",
        dropouts=("attn.out_drop", "mlp.drop"),
        # Query, key and value are one linear layer.
        adapters={
            "query": ("Wqkv",),
            "key": ("Wqkv",),
            "value": ("Wqkv",),
            "dense": ("Wo", "Wi"),
        },
        memory_known=False,
    ),
    # Names after model/mpnet.py has given it BERT's layers.
    "mpnet": Architecture(
        layers="mpnet.encoder.layer",
        embeddings=("mpnet.embeddings", "mpnet.encoder.relative_attention_bias"),
        distance_bias="mpnet.encoder.relative_attention_bias",
        positions_after_padding=True,
        # transformers takes these for granted, whatever the configuration says.
        fixed={"pad_token_id": 1, "relative_attention_num_buckets": 32},
    ),
}
DECODERS = {
    "gpt2": Architecture(
        layers="transformer.h",
        embeddings=("transformer.wte", "transformer.wpe"),
        head="lm_head",
        embeddings_dropout="transformer.drop",
        causal=True,
        self_attention="attn",
        linears=("mlp.c_fc", "mlp.c_proj"),
        activation="mlp.act",
        dropouts=("attn.resid_dropout", "mlp.dropout"),
        # Query, key and value are one linear layer.
        adapters={
            "query": ("c_attn",),
            "key": ("c_attn",),
            "value": ("c_attn",),
            "dense": ("c_proj", "c_fc"),
        },
    ),
}
ARCHITECTURES = ENCODERS | DECODERS
# The architectures that each task trains.
KNOWN_FOR = {"qa": ENCODERS, "lm": DECODERS}

# Architectures that people ask for and that no entry could describe, and why.
_DISENTANGLED = (
    "its disentangled attention adds relative-position scores that none of the attention kernels "
    "here take"
)
REFUSED = {"deberta": _DISENTANGLED, "deberta-v2": _DISENTANGLED}


def find_encoder(model_type: str, source: str, task: str = "qa") -> Architecture:
    """Return the entry for a `model_type` of transformers.

    Raises UserError, which names `source`, the model's folder or name, if there is none for the
    task.
    """
    known = KNOWN_FOR[task]
    why = ""
    if isinstance(model_type, str):  # a config.json may hold anything
        if model_type in known:
            return known[model_type]
        if model_type in REFUSED:
            why = f": {REFUSED[model_type]}"
    raise UserError(
        f"{source}: a model of type {model_type!r}{why}; "
        f"this lab knows {', '.join(known)} for task {task}"
    )


def check_architecture(model_type: str, source: str, task: str) -> None:
    """Raise the UserError of `find_encoder` for a `model_type` that is not known for a task."""
    find_encoder(model_type, source, task)


def encoder_of(model) -> Architecture:
    """Return the entry of a model that was built."""
    return _entry(model.config)


def _entry(config) -> Architecture:
    """Return the entry of a model's configuration."""
    return ARCHITECTURES[config.model_type]


def first_position(config) -> int:
    """Return the position id of a sequence's first token, by a model's configuration."""
    entry = _entry(config)
    if not entry.positions_after_padding:
        return 0
    return entry.fixed.get("pad_token_id", config.pad_token_id) + 1


def max_positions(config) -> int:
    """Return how many tokens a sequence may have: one for each position id."""
    return config.max_position_embeddings - first_position(config)


def positions_in(config: Mapping) -> int | None:
    """Return how many tokens a sequence may have by a model's config.json, which may hold anything.

    None where it gives no number. RoBERTa's configuration gives 1 where it leaves out the padding's
    token id.
    """
    architecture = ARCHITECTURES.get(config.get("model_type"))
    positions = config.get("max_position_embeddings")
    padding_id = config.get("pad_token_id", 1)
    if type(positions) is not int:
        return None
    if architecture and architecture.positions_after_padding and type(padding_id) is int:
        return positions - padding_id - 1
    return positions


def layers_of(model) -> list:
    """Return the layers, from the bottom up."""
    return list(model.get_submodule(encoder_of(model).layers))


def embeddings_of(model) -> list:
    """Return the modules below the layers."""
    names = encoder_of(model).embeddings
    return [module for name, module in model.named_modules() if name in names]


def heads_of(model) -> list:
    """Return the modules above the layers, which turn their output into answers or next tokens."""
    encoder = encoder_of(model)
    return [model.get_submodule(name) for name in (*encoder.below_head, encoder.head)]


def local_layers(config) -> tuple[float, int]:
    """Return the share of layers whose tokens see a window alone, and the window's tokens.

    The window is around each token and includes it. Both are 0 where there are no such layers.
    """
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    share = kinds.count("sliding_attention") / len(kinds)
    window = 2 * config.sliding_window + 1 if share else 0
    return share, window


def param_counts(model) -> dict:
    """Return how many weights each parameter of a model holds.

    These are its elements, unless its layer packs them and says their number in `held`
    (model/nf4.py).
    """
    return {
        parameter: getattr(parameter, "held", parameter.numel()) for parameter in model.parameters()
    }


def trains(module) -> bool:
    """Return whether any parameter of a module trains."""
    return any(parameter.requires_grad for parameter in module.parameters())


def layers_passed(model) -> int:
    """Return how many layers gradients pass on their way down to the lowest part that trains."""
    layers = layers_of(model)
    if any(map(trains, embeddings_of(model))):
        return len(layers)
    for number, layer in enumerate(layers):
        if trains(layer):
            return len(layers) - number
    return 0
