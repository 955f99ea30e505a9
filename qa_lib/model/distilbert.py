"""DistilBERT with BERT's layers, so that all that changes BERT's layers changes these.

DistilBERT (Sanh et al. 2019) has half of BERT's layers and no token types. Its layers compute what
BERT's do, without a dropout after the attention's output (model/bert_layers.py).
"""

from torch import nn
from transformers.models.bert.modeling_bert import BertConfig, BertLayer
from transformers.models.distilbert.modeling_distilbert import DistilBertModel, TransformerBlock

from qa_lib.model.bert_layers import replace_layers

NORM_EPS = 1e-12  # of all norms in transformers' DistilBERT


class Layer(BertLayer, TransformerBlock):
    """A BertLayer that transformers takes for a layer of DistilBERT.

    It looks for those where the hidden states of all layers are asked for.
    """


def use_bert_layers(backbone: DistilBertModel, attention: str) -> None:
    """Give a DistilBERT without its head BERT's layers with its own weights, in place.

    `attention` is the kernel's name in transformers, which the layers' own configuration gets.
    """
    config = backbone.config
    of_layers = BertConfig(
        hidden_size=config.dim,
        num_attention_heads=config.n_heads,
        intermediate_size=config.hidden_dim,
        hidden_act=config.activation,
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.attention_dropout,
        layer_norm_eps=NORM_EPS,
    )
    of_layers._attn_implementation = attention
    layers: nn.ModuleList = backbone.transformer.layer
    replace_layers(layers, "distilbert", of_layers)
    for layer in layers:
        layer.attention.output.dropout.p = 0.0
        layer.__class__ = Layer
