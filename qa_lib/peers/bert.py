"""BERT for extractive question answering in plain PyTorch, without padding, as a good engineer writes it in an
afternoon: a rival for family E (variants E-plain and E-plain-graphs).

Nothing of the library is used. Samples lie one after the other in one sequence of a static length, and FlashAttention
is told where each begins. Weights come from transformers' model and go back into it, so that both start alike and are
scored alike.
"""

import torch
from torch import nn
from torch.nn import functional as F


def attention(query, key, value, ends, longest: int, rate: float):
    """Attention within segments, of [tokens, heads, width]: FlashAttention; on a CPU, a mask."""
    if query.is_cuda:
        return torch.ops.aten._flash_attention_forward(
            query, key, value, ends, ends, longest, longest, rate, False, False
        )[0]
    segment = torch.bucketize(torch.arange(len(query)), ends, right=True)
    query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
    mask = segment[:, None] == segment
    return F.scaled_dot_product_attention(query, key, value, mask, rate)[0].transpose(0, 1)


class Layer(nn.Module):
    """One layer: x [tokens, width] to the same."""

    def __init__(self, width: int, inner: int, heads: int, dropout: float, eps: float):
        super().__init__()
        self.heads, self.rate = heads, dropout
        self.qkv, self.out, self.norm1 = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            nn.LayerNorm(width, eps),
        )
        self.up, self.down, self.norm2 = (
            nn.Linear(width, inner),
            nn.Linear(inner, width),
            nn.LayerNorm(width, eps),
        )

    def forward(self, x, ends, longest: int):
        rate = self.rate if self.training else 0.0
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(1)
        attended = attention(query, key, value, ends, longest, rate).flatten(1)
        x = self.norm1(x + F.dropout(self.out(attended), rate))
        return self.norm2(x + F.dropout(self.down(F.gelu(self.up(x))), rate))


class Bert(nn.Module):
    """A model of the shape of `like`, a BertForQuestionAnswering of transformers, for segments of at most `longest`
    tokens."""

    def __init__(self, like: nn.Module, dropout: float, longest: int):
        super().__init__()
        config = like.config
        width, eps, self.longest, self.rate = (
            config.hidden_size,
            config.layer_norm_eps,
            longest,
            dropout,
        )
        self.words = nn.Embedding(config.vocab_size, width)
        self.positions = nn.Embedding(config.max_position_embeddings, width)
        self.types = nn.Embedding(config.type_vocab_size, width)
        self.norm = nn.LayerNorm(width, eps)
        shape = (width, config.intermediate_size, config.num_attention_heads, dropout, eps)
        self.layers = nn.ModuleList(Layer(*shape) for _ in range(config.num_hidden_layers))
        self.head = nn.Linear(width, 2)

    def forward(
        self, input_ids, position_ids, token_type_ids, cu_seqlens, start_positions, end_positions
    ):
        """The mean loss over samples. Tokens [1, tokens]; where segments end, [segments + 1]; answers [samples], whose
        segments are the first ones."""
        x = (
            self.words(input_ids[0])
            + self.positions(position_ids[0])
            + self.types(token_type_ids[0])
        )
        x = F.dropout(self.norm(x), self.rate if self.training else 0.0)
        for layer in self.layers:
            x = layer(x, cu_seqlens, self.longest)
        # The logits of each sample in a row of its own, padded, for a softmax over it alone.
        begin, end = (
            cu_seqlens[: len(start_positions), None],
            cu_seqlens[1 : len(start_positions) + 1, None],
        )
        index = begin + torch.arange(self.longest, device=x.device)
        rows = (
            self.head(x)[index.clamp(max=len(x) - 1)]
            .float()
            .masked_fill((index >= end)[..., None], -torch.inf)
        )
        return (
            F.cross_entropy(rows[..., 0], start_positions)
            + F.cross_entropy(rows[..., 1], end_positions)
        ) / 2

    def pairs(self, like: nn.Module):
        """Each weight of this model and the one of transformers' model that it stands for."""
        theirs = like.bert.embeddings
        modules = [
            (self.words, theirs.word_embeddings),
            (self.positions, theirs.position_embeddings),
        ]
        modules += [(self.types, theirs.token_type_embeddings), (self.norm, theirs.LayerNorm)]
        modules.append((self.head, like.qa_outputs))
        for own, other in zip(self.layers, like.bert.encoder.layer, strict=True):
            modules += [
                (own.out, other.attention.output.dense),
                (own.norm1, other.attention.output.LayerNorm),
            ]
            modules += [(own.up, other.intermediate.dense), (own.down, other.output.dense)]
            modules.append((own.norm2, other.output.LayerNorm))
            separate = [getattr(other.attention.self, name) for name in ("query", "key", "value")]
            yield from zip(own.qkv.weight.chunk(3), [part.weight for part in separate], strict=True)
            yield from zip(own.qkv.bias.chunk(3), [part.bias for part in separate], strict=True)
        for own, other in modules:
            yield own.weight, other.weight
            if hasattr(own, "bias"):
                yield own.bias, other.bias
