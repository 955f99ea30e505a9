"""BERT for extractive question answering in plain PyTorch, without padding, as a good engineer writes it in an
afternoon: a rival for family E (variants E-plain and E-plain-graphs).

Nothing of the library is used. Samples lie one after the other in one sequence of a static length, and FlashAttention
is told where each begins. Weights come from transformers' model and go back into it, so that both start alike and are
scored alike. What such an engineer tries next are options of `Bert`, each off at first; `qa_lib.peers.search` tells
which of them pay.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def flash(query, key, value, ends, longest: int, rate: float):
    """Attention within segments, of [tokens, heads, width]: FlashAttention; on a CPU and in fp32, a mask."""
    if query.is_cuda and query.dtype != torch.float32:
        return torch.ops.aten._flash_attention_forward(
            query, key, value, ends, ends, longest, longest, rate, False, False
        )[0]
    segment = torch.bucketize(torch.arange(len(query), device=ends.device), ends, right=True)
    query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
    mask = segment[:, None] == segment
    return F.scaled_dot_product_attention(query, key, value, mask, rate)[0].transpose(0, 1)


def cudnn(query, key, value, ends, longest: int, rate: float):
    """The same by cuDNN's kernel for segments; on a CPU, a mask."""
    if not query.is_cuda:
        return flash(query, key, value, ends, longest, rate)
    return torch.ops.aten._cudnn_attention_forward(
        query, key, value, None, ends, ends, longest, longest, True, rate
    )[0]


def flex(query, key, value, mask, longest: int, rate: float):
    """The same by FlexAttention and a mask of blocks. It has no dropout: `rate` must be 0."""
    if rate:
        raise ValueError("FlexAttention has no dropout: take attention_dropout=0.0")
    query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
    return flex_attention(query, key, value, block_mask=mask)[0].transpose(0, 1)


ATTENTION = {"flash": flash, "cudnn": cudnn, "flex": flex}


def block_mask(ends, tokens: int):
    """FlexAttention's mask for segments that end at `ends`: a token attends within its own."""
    segment = torch.bucketize(torch.arange(tokens, device=ends.device), ends, right=True)

    def within(batch, head, query, key):
        return segment[query] == segment[key]

    return create_block_mask(within, None, None, tokens, tokens, device=ends.device)


def dropout(x, rate: float, noise):
    """Dropout by random bytes `noise` of x's shape, one draw for the whole step: a byte under 256 x rate drops its
    element. Without `noise`, PyTorch's own."""
    if noise is None or not rate:
        return F.dropout(x, rate)
    least = round(256 * rate)
    return torch.where(noise >= least, x * (256 / (256 - least)), 0.0)


class Layer(nn.Module):
    """One layer: x [tokens, width] to the same."""

    def __init__(
        self,
        width: int,
        inner: int,
        heads: int,
        dropout: float,
        eps: float,
        attention: str = "flash",
        attention_dropout: float | None = None,
        gelu: str = "none",
    ):
        super().__init__()
        self.heads, self.rate, self.gelu = heads, dropout, gelu
        self.attention = ATTENTION[attention]
        self.attention_rate = dropout if attention_dropout is None else attention_dropout
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

    def forward(self, x, ends, longest: int, noise=None):
        rate, attention_rate = (self.rate, self.attention_rate) if self.training else (0.0, 0.0)
        first, second = (None, None) if noise is None else noise.unbind(0)
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(1)
        attended = self.attention(query, key, value, ends, longest, attention_rate).flatten(1)
        x = self.norm1(x + dropout(self.out(attended), rate, first))
        inner = F.gelu(self.up(x), approximate=self.gelu)
        return self.norm2(x + dropout(self.down(inner), rate, second))


class Bert(nn.Module):
    """A model of the shape of `like`, a BertForQuestionAnswering of transformers, for segments of at most `longest`
    tokens.

    Options: the kernel of `attention` (see ATTENTION) and its own rate of dropout, "tanh" for `gelu`, the two type
    embeddings by arithmetic in place of a look-up (`blend_types`), whose gradient is a sum and no scatter to two rows,
    and dropout from random bytes that one kernel draws for the whole step (`drawn_at_once`).
    """

    def __init__(
        self,
        like: nn.Module,
        dropout: float,
        longest: int,
        attention: str = "flash",
        attention_dropout: float | None = None,
        gelu: str = "none",
        blend_types: bool = False,
        drawn_at_once: bool = False,
    ):
        super().__init__()
        config = like.config
        width, eps, self.longest, self.rate = (
            config.hidden_size,
            config.layer_norm_eps,
            longest,
            dropout,
        )
        self.by_blocks = attention == "flex"
        self.blend_types, self.drawn_at_once = blend_types, drawn_at_once
        self.words = nn.Embedding(config.vocab_size, width)
        self.positions = nn.Embedding(config.max_position_embeddings, width)
        self.types = nn.Embedding(config.type_vocab_size, width)
        self.norm = nn.LayerNorm(width, eps)
        shape = (width, config.intermediate_size, config.num_attention_heads, dropout, eps)
        self.layers = nn.ModuleList(
            Layer(*shape, attention, attention_dropout, gelu)
            for _ in range(config.num_hidden_layers)
        )
        self.head = nn.Linear(width, 2)

    def forward(
        self, input_ids, position_ids, token_type_ids, cu_seqlens, start_positions, end_positions
    ):
        """The mean loss over samples. Tokens [1, tokens]; where segments end, [segments + 1]; answers [samples], whose
        segments are the first ones. An answer of -100 is of no sample: its segment is empty or padding."""
        x = self.embed(input_ids[0], position_ids[0], token_type_ids[0])
        noise = self.draw(x) if self.drawn_at_once and self.training else [None] * len(self.layers)
        ends = block_mask(cu_seqlens, len(x)) if self.by_blocks else cu_seqlens
        for layer, own_noise in zip(self.layers, noise, strict=True):
            x = layer(x, ends, self.longest, own_noise)
        return self.loss(x, cu_seqlens, start_positions, end_positions)

    def embed(self, input_ids, position_ids, token_type_ids):
        """What enters the first layer, [tokens, width]."""
        if self.blend_types:
            no, yes = self.types.weight
            types = no + token_type_ids[:, None] * (yes - no)
        else:
            types = self.types(token_type_ids)
        x = self.words(input_ids) + self.positions(position_ids) + types
        return F.dropout(self.norm(x), self.rate if self.training else 0.0)

    def draw(self, x):
        """Random bytes for each element of two dropouts of each layer: uint8 [layers, 2, tokens, width]."""
        shape = (len(self.layers), 2, len(x), x.shape[1] // 4)
        least, most = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
        return torch.randint(least, most, shape, dtype=torch.int32, device=x.device).view(
            torch.uint8
        )

    def loss(self, x, cu_seqlens, start_positions, end_positions):
        """The mean over samples, from what leaves the last layer."""
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
