"""MPNet with BERT's layers, so that all that changes BERT's layers changes these.

MPNet (Song et al. 2020) is BERT's network with a bias of the attention's scores: a learnt number
for each head and distance from query to key, the same in all layers (Raffel et al. 2020, T5's).
Distances share 32 *buckets*, 16 for each direction: one for each distance below 8, then wider ones,
and from 91 tokens on all have one. There are no token types, and positions count from 2 on.

transformers has eager attention alone for it, in layers whose parts have other names than BERT's.
BertLayers in their places (model/bert_layers.py) call a kernel of attention by its name and give it
the arguments that they do not know. The lab's model for questions is changed by `use_bert_layers`;
in one's own code (own/speed_up.py) any head stays as it is, over `change_backbone`.

Padded samples get the bias in their mask, of scores [batch, heads, tokens, tokens], which eager
attention and SDPA both add. Packed ones get it with their `Segments`, from which the kernels read
it by distance (packed_attention.py, kernels/varlen_attention.py).
"""

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling, QuestionAnsweringModelOutput
from transformers.models.bert.modeling_bert import BertConfig
from transformers.models.mpnet import modeling_mpnet
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from qa_lib.kernels.common import LOG2_E
from qa_lib.kernels.varlen_attention import BiasByDistance
from qa_lib.kernels.varlen_reference import biases_of_scores
from qa_lib.model.bert_layers import replace_layers
from qa_lib.model.fused_projections import refuse_attentions

# Distances of so many tokens and more have the last bucket.
REACH = 128


class DistanceBias(nn.Module):
    """The bias of scores: `weight` [buckets, heads], where transformers has an embedding."""

    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight
        distances = torch.arange(-REACH, REACH + 1, device=weight.device)
        buckets = MPNetEncoder.relative_position_bucket(distances).int()
        self.register_buffer("buckets", buckets, persistent=False)

    def mask(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None):
        """Return the bias of padded samples, -inf for keys that are padding.

        `hidden_states` are [batch, tokens, width], `attention_mask` is [batch, tokens] with 0 for
        padding, or None. The result is [batch or 1, heads, tokens, tokens], of the type that
        attention computes in: otherwise autocast would make a copy for each layer.
        """
        place = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        biases = biases_of_scores(self.weight, self.buckets, place)[None]
        if attention_mask is not None:
            biases = biases.masked_fill(attention_mask[:, None, None] == 0, -torch.inf)
        kind = hidden_states.device.type
        if torch.is_autocast_enabled(kind):
            return biases.to(torch.get_autocast_dtype(kind))
        return biases.to(hidden_states.dtype)

    def by_distance(self) -> BiasByDistance:
        """Return the bias as the kernels for packed samples take it."""
        table = LOG2_E * self.weight.detach().float()[self.buckets].t().contiguous()
        return BiasByDistance(self.weight, self.buckets, table)


class Encoder(MPNetEncoder):
    """The layers, after change_backbone."""

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        segments=None,
        output_hidden_states=False,
        **kwargs,
    ):
        """Return hidden states [batch, tokens, width] for such, and a tuple of those of each layer.

        The tuple begins with the input, and is None unless `output_hidden_states` asks for it.
        Padded samples have a mask, and packed ones segments. Other arguments go to the attention.
        """
        mask = None
        if segments is None:
            mask = self.relative_attention_bias.mask(hidden_states, attention_mask)
        else:
            segments = segments._replace(distance_bias=self.relative_attention_bias.by_distance())
        between = (hidden_states,) if output_hidden_states else None
        for layer in self.layer:
            hidden_states = layer(hidden_states, mask, segments=segments, **kwargs)
            if output_hidden_states:
                between += (hidden_states,)
        return hidden_states, between


class MPNetModel(modeling_mpnet.MPNetModel):
    """Embeddings, layers and what pools their output, after change_backbone.

    It has the name of transformers' class, which save_pretrained writes into the config.
    """

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        inputs_embeds=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        **kwargs,
    ):
        """Do what the original's forward does, and hand on other arguments to the layers.

        Raises UserError where the attention's weights are asked for.
        """
        config = self.config
        refuse_attentions(output_attentions, config)
        if output_hidden_states is None:
            output_hidden_states = config.output_hidden_states
        hidden_states = self.embeddings(
            input_ids=input_ids, position_ids=position_ids, inputs_embeds=inputs_embeds
        )
        hidden_states, between = self.encoder(
            hidden_states, attention_mask, output_hidden_states=output_hidden_states, **kwargs
        )
        pooled = None if self.pooler is None else self.pooler(hidden_states)
        if not (config.return_dict if return_dict is None else return_dict):
            return (hidden_states, pooled, between)[: 3 if output_hidden_states else 2]
        return BaseModelOutputWithPooling(
            last_hidden_state=hidden_states, pooler_output=pooled, hidden_states=between
        )


class MPNetForQuestionAnswering(modeling_mpnet.MPNetForQuestionAnswering):
    """The model, after use_bert_layers, under the name of transformers' class, too."""

    supports_gradient_checkpointing = True  # BERT's layers can be computed again

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        start_positions=None,
        end_positions=None,
        segments=None,
        **kwargs,
    ):
        """Do what the original's forward does, and hand on the segments of packed samples."""
        outputs = self.mpnet(input_ids, attention_mask, position_ids, segments=segments)
        hidden_states = outputs.last_hidden_state
        start_logits, end_logits = self.qa_outputs(hidden_states).unbind(-1)
        loss = None
        if start_positions is not None:
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions)
        return QuestionAnsweringModelOutput(
            loss=loss, start_logits=start_logits, end_logits=end_logits
        )


def use_bert_layers(model: modeling_mpnet.MPNetForQuestionAnswering, attention: str) -> None:
    """Give the lab's MPNet BERT's layers and a head that hands on segments, in place.

    `attention` is the kernel's name in transformers.
    """
    model.config._attn_implementation = attention
    change_backbone(model.mpnet, attention)
    model.__class__ = MPNetForQuestionAnswering


def change_backbone(backbone: modeling_mpnet.MPNetModel, attention: str) -> None:
    """Give an MPNet without its head BERT's layers with its own weights, in place.

    `attention` is the kernel's name in transformers, which the layers' own configuration gets.
    """
    config = backbone.config
    of_layers = BertConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        intermediate_size=config.intermediate_size,
        hidden_act=config.hidden_act,
        hidden_dropout_prob=config.hidden_dropout_prob,
        attention_probs_dropout_prob=config.attention_probs_dropout_prob,
        layer_norm_eps=config.layer_norm_eps,
    )
    of_layers._attn_implementation = attention
    encoder = backbone.encoder
    replace_layers(encoder.layer, "mpnet", of_layers)
    encoder.relative_attention_bias = DistanceBias(encoder.relative_attention_bias.weight)
    encoder.__class__ = Encoder
    backbone.__class__ = MPNetModel
