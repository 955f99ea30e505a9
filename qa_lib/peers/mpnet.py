"""MPNet for extractive question answering in plain PyTorch, without padding in its linear layers.

This is peers/bert.py with a bias of the attention's scores by distance. FlashAttention and cuDNN
take no such bias, and FlexAttention has no dropout. Attention is therefore SDPA on padded rows, one
for each segment, with bias and padding in its mask, which all layers share; PyTorch's
memory-efficient kernel gives the mask's gradient.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from qa_lib.peers.bert import Layer, answer_loss, layer_pairs

BUCKETS = 32  # of distances
EXACT = 8  # distances below have a bucket each
FARTHEST = 128  # from this distance on, all have the last bucket


def bucket_of(distance: torch.Tensor) -> torch.Tensor:
    """Return the bucket of each distance from query to key, as T5 has it (Raffel et al. 2020).

    Half of the buckets are for keys after the query. Of each half, the first half have one distance
    each, and the others grow by the logarithm.
    """
    size = distance.abs()
    half = BUCKETS // 2
    growth = torch.log(size.clamp(min=1) / EXACT) / math.log(FARTHEST / EXACT)
    far = EXACT + (growth * (half - EXACT)).long()
    return torch.where(size < EXACT, size, far.clamp(max=half - 1)) + half * (distance > 0)


def rows(query, key, value, layout, longest: int, rate: float):
    """Attend within segments by SDPA; arguments are those of peers.bert.flash but for `layout`.

    It is what MPNet.layout returns.
    """
    index, place, mask = layout
    query, key, value = (t[index].transpose(1, 2) for t in (query, key, value))
    attended = F.scaled_dot_product_attention(query, key, value, mask, rate)
    return attended.transpose(1, 2).flatten(0, 1)[place]


class MPNet(nn.Module):
    """MPNet with an answer's two logits a token, in the sizes of the model `like`.

    `like` is an MPNetForQuestionAnswering; only its config is read. No segment is longer than
    `longest` tokens.
    """

    def __init__(self, like: nn.Module, dropout: float, longest: int):
        super().__init__()
        config = like.config
        width = config.hidden_size
        self.longest = longest
        self.rate = dropout
        self.words = nn.Embedding(config.vocab_size, width)
        self.positions = nn.Embedding(config.max_position_embeddings, width)
        self.first_position = config.pad_token_id + 1
        self.norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.distances = nn.Embedding(BUCKETS, config.num_attention_heads)
        self.layers = nn.ModuleList(
            Layer(
                width=width,
                inner=config.intermediate_size,
                heads=config.num_attention_heads,
                dropout=dropout,
                eps=config.layer_norm_eps,
            )
            for _ in range(config.num_hidden_layers)
        )
        for layer in self.layers:
            layer.attention = rows
        self.head = nn.Linear(width, 2)

    def forward(self, input_ids, position_ids, cu_seqlens, start_positions, end_positions):
        """Return the mean loss over samples; arguments are those of Bert, without token types."""
        x = self.embed(input_ids[0], position_ids[0])
        layout = self.layout(cu_seqlens, x)
        for layer in self.layers:
            x = layer(x, layout, self.longest)
        return self.loss(x, cu_seqlens, start_positions, end_positions)

    def embed(self, input_ids, position_ids):
        """Return the sum of the embeddings that enters the first layer, [tokens, width]."""
        x = self.words(input_ids) + self.positions(position_ids + self.first_position)
        return F.dropout(self.norm(x), self.rate if self.training else 0.0)

    def layout(self, ends, x):
        """Return how the tokens of x [tokens, width] lie in rows, and the mask of their attention.

        `index` [segments, longest] has the token of each place in a row, `place` [tokens] each
        token's place in all rows, and `mask` [segments, heads, longest, longest] is added to
        scores. A segment that is empty has a row all the same, whose numbers are finite.
        """
        token = torch.arange(len(x), device=x.device)
        segment = torch.bucketize(token, ends, right=True) - 1
        place = segment * self.longest + token - ends[segment]
        column = torch.arange(self.longest, device=x.device)
        index = ends[:-1, None] + column
        is_padding = index >= ends[1:, None]
        bias = self.distances(bucket_of(column - column[:, None])).permute(2, 0, 1)
        lowest = torch.finfo(torch.float16).min
        mask = bias[None].masked_fill(is_padding[:, None, None], lowest)
        # The mask has the type that attention computes in, or each layer would make a copy.
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return index.clamp(max=len(x) - 1), place, mask.to(dtype)

    def loss(self, x, cu_seqlens, start_positions, end_positions):
        """Return the mean loss over samples for x, the last layer's output [tokens, width]."""
        return answer_loss(self.head(x), cu_seqlens, start_positions, end_positions, self.longest)

    def pairs(self, like: nn.Module):
        """Yield each weight of this model with the same weight of `like`, whose layers are BERT's.

        qa_lib.model.mpnet has given it these.
        """
        embeddings = like.mpnet.embeddings
        encoder = like.mpnet.encoder
        yield self.distances.weight, encoder.relative_attention_bias.weight
        yield self.words.weight, embeddings.word_embeddings.weight
        yield self.positions.weight, embeddings.position_embeddings.weight
        for module, like_module in (
            (self.norm, embeddings.LayerNorm),
            (self.head, like.qa_outputs),
        ):
            yield module.weight, like_module.weight
            yield module.bias, like_module.bias
        for layer, like_layer in zip(self.layers, encoder.layer, strict=True):
            yield from layer_pairs(layer, like_layer)
