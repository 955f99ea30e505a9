"""BERT for extractive question answering in plain PyTorch, without padding.

This is the model as a good engineer writes it in an afternoon: the rival of family E (variants
E-plain and E-plain-graphs). The file imports nothing of the library. Samples lie one after the
other in one sequence of a static length, and FlashAttention is told where each begins. Weights come
from transformers' model and go back into it, so that both start alike and are scored alike. What
such an engineer tries next are options of `Bert`, each off by default; `qa_lib.peers.search`
measures which of them pay.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def flash(query, key, value, ends, longest: int, rate: float):
    """Attend within segments by FlashAttention; on a CPU and in fp32, by SDPA with a mask.

    Query, key and value and the result are [tokens, heads, width of a head]. Segments begin and end
    at `ends`, int32 [segments + 1]; none is longer than `longest`. `rate` is that of dropout.
    """
    if query.is_cuda and query.dtype != torch.float32:
        return torch.ops.aten._flash_attention_forward(
            query, key, value, ends, ends, longest, longest, rate, False, False
        )[0]
    segment = torch.bucketize(torch.arange(len(query), device=ends.device), ends, right=True)
    query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
    mask = segment[:, None] == segment
    return F.scaled_dot_product_attention(query, key, value, mask, rate)[0].transpose(0, 1)


def cudnn(query, key, value, ends, longest: int, rate: float):
    """Attend within segments by cuDNN's kernel; on a CPU, by SDPA with a mask."""
    if not query.is_cuda:
        return flash(query, key, value, ends, longest, rate)
    return torch.ops.aten._cudnn_attention_forward(
        query, key, value, None, ends, ends, longest, longest, True, rate
    )[0]


def flex(query, key, value, mask, longest: int, rate: float):
    """Attend within segments by FlexAttention and the `mask` that block_mask returns.

    Raises ValueError where `rate` is not 0, as FlexAttention has no dropout.
    """
    if rate:
        raise ValueError("FlexAttention has no dropout: take attention_dropout=0.0")
    query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
    return flex_attention(query, key, value, block_mask=mask)[0].transpose(0, 1)


ATTENTION = {"flash": flash, "cudnn": cudnn, "flex": flex}


def block_mask(ends, tokens: int):
    """Return FlexAttention's mask for segments with these `ends`, in which each token attends
    within its own."""
    segment = torch.bucketize(torch.arange(tokens, device=ends.device), ends, right=True)

    def within(batch, head, query, key):
        return segment[query] == segment[key]

    return create_block_mask(within, None, None, tokens, tokens, device=ends.device)


def dropout(x, rate: float, noise):
    """Drop elements of x: by PyTorch's dropout where `noise` is None, or else by `noise`.

    `noise` is uint8 of x's shape. An element is dropped where its byte is below 256 x rate.
    """
    if noise is None or not rate:
        return F.dropout(x, rate)
    smallest_kept = round(256 * rate)
    return torch.where(noise >= smallest_kept, x * (256 / (256 - smallest_kept)), 0.0)


def random_bytes(layers: int, x):
    """Return random bytes for the two dropouts of each layer: uint8 [layers, 2, tokens, width].

    x is [tokens, width]. The bytes are drawn as int32, four at a time.
    """
    shape = (layers, 2, len(x), x.shape[1] // 4)
    range32 = torch.iinfo(torch.int32)
    bits = torch.randint(range32.min, range32.max, shape, dtype=torch.int32, device=x.device)
    return bits.view(torch.uint8)


class Layer(nn.Module):
    """A layer of BERT, from [tokens, width] to the same: attention, then feed-forward."""

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
        self.heads = heads
        self.rate = dropout
        self.attention_rate = dropout if attention_dropout is None else attention_dropout
        self.attention = ATTENTION[attention]
        self.gelu = gelu
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm1 = nn.LayerNorm(width, eps)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.norm2 = nn.LayerNorm(width, eps)

    def forward(self, x, ends, longest: int, noise=None):
        """Return the layer's output; `noise` is None or uint8 [2, tokens, width] for dropout."""
        rate = self.rate if self.training else 0.0
        attention_rate = self.attention_rate if self.training else 0.0
        noise1, noise2 = (None, None) if noise is None else noise.unbind(0)
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(1)
        attended = self.attention(query, key, value, ends, longest, attention_rate).flatten(1)
        x = self.norm1(x + dropout(self.out(attended), rate, noise1))
        inner = F.gelu(self.up(x), approximate=self.gelu)
        return self.norm2(x + dropout(self.down(inner), rate, noise2))


def layer_pairs(layer: Layer, like: nn.Module):
    """Yield each weight of a layer with the same weight of transformers' BertLayer `like`."""
    modules = [
        (layer.out, like.attention.output.dense),
        (layer.norm1, like.attention.output.LayerNorm),
        (layer.up, like.intermediate.dense),
        (layer.down, like.output.dense),
        (layer.norm2, like.output.LayerNorm),
    ]
    for module, like_module in modules:
        yield module.weight, like_module.weight
        yield module.bias, like_module.bias
    separate = like.attention.self
    qkv = (separate.query, separate.key, separate.value)
    weights = layer.qkv.weight.chunk(3)
    biases = layer.qkv.bias.chunk(3)
    for weight, bias, like_module in zip(weights, biases, qkv, strict=True):
        yield weight, like_module.weight
        yield bias, like_module.bias


def answer_loss(logits, cu_seqlens, start_positions, end_positions, longest: int):
    """Return the mean loss over samples for logits [tokens, 2] of segments of a sequence.

    Other arguments are those of Bert.forward; no segment is longer than `longest` tokens.
    """
    # The logits of each sample come into a row of its own, padded, for a softmax over it alone.
    samples = len(start_positions)
    begin = cu_seqlens[:samples, None]
    end = cu_seqlens[1 : samples + 1, None]
    index = begin + torch.arange(longest, device=logits.device)
    by_sample = logits[index.clamp(max=len(logits) - 1)].float()
    by_sample = by_sample.masked_fill((index >= end)[..., None], -torch.inf)
    start_loss = F.cross_entropy(by_sample[..., 0], start_positions)
    end_loss = F.cross_entropy(by_sample[..., 1], end_positions)
    return (start_loss + end_loss) / 2


class Bert(nn.Module):
    """BERT with an answer's two logits a token, in the sizes of transformers' model `like`.

    `like` is a BertForQuestionAnswering; only its config is read. No segment is longer than
    `longest` tokens. The options:

    - `attention`: the kernel, a name of ATTENTION.
    - `attention_dropout`: the rate within attention, where it is not `dropout`.
    - `gelu`: "none" for the exact function, "tanh" for its approximation.
    - `blend_types`: compute the embedding of the two token types by arithmetic in place of a
      look-up, so that its gradient is a sum and not a scatter to two rows.
    - `drawn_at_once`: take dropout from random bytes that one kernel draws for the whole step.
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
        width = config.hidden_size
        self.longest = longest
        self.rate = dropout
        self.takes_block_mask = attention == "flex"
        self.blend_types = blend_types
        self.drawn_at_once = drawn_at_once
        self.words = nn.Embedding(config.vocab_size, width)
        self.positions = nn.Embedding(config.max_position_embeddings, width)
        self.types = nn.Embedding(config.type_vocab_size, width)
        self.norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.layers = nn.ModuleList(
            Layer(
                width=width,
                inner=config.intermediate_size,
                heads=config.num_attention_heads,
                dropout=dropout,
                eps=config.layer_norm_eps,
                attention=attention,
                attention_dropout=attention_dropout,
                gelu=gelu,
            )
            for _ in range(config.num_hidden_layers)
        )
        self.head = nn.Linear(width, 2)

    def forward(
        self, input_ids, position_ids, token_type_ids, cu_seqlens, start_positions, end_positions
    ):
        """Return the mean loss over samples.

        The first three are [1, tokens]. `cu_seqlens`, [segments + 1], says where segments begin and
        end. The positions of the answers are [samples], those of the first segments; -100 stands
        where a segment is no sample but empty or padding.
        """
        x = self.embed(input_ids[0], position_ids[0], token_type_ids[0])
        noise = [None] * len(self.layers)
        if self.drawn_at_once and self.training:
            noise = self.draw(x)
        ends = block_mask(cu_seqlens, len(x)) if self.takes_block_mask else cu_seqlens
        for layer, noise_of_layer in zip(self.layers, noise, strict=True):
            x = layer(x, ends, self.longest, noise_of_layer)
        return self.loss(x, cu_seqlens, start_positions, end_positions)

    def embed(self, input_ids, position_ids, token_type_ids):
        """Return the sum of the embeddings that enters the first layer, [tokens, width]."""
        if self.blend_types:
            type0, type1 = self.types.weight
            types = type0 + token_type_ids[:, None] * (type1 - type0)
        else:
            types = self.types(token_type_ids)
        x = self.words(input_ids) + self.positions(position_ids) + types
        return F.dropout(self.norm(x), self.rate if self.training else 0.0)

    def draw(self, x):
        """Return random_bytes for the layers of this model; x is what enters the first one."""
        return random_bytes(len(self.layers), x)

    def loss(self, x, cu_seqlens, start_positions, end_positions):
        """Return the mean loss over samples for x, the last layer's output [tokens, width]."""
        return answer_loss(self.head(x), cu_seqlens, start_positions, end_positions, self.longest)

    def pairs(self, like: nn.Module):
        """Yield each weight of this model with the same weight of transformers' model."""
        embeddings = like.bert.embeddings
        modules = [
            (self.words, embeddings.word_embeddings),
            (self.positions, embeddings.position_embeddings),
            (self.types, embeddings.token_type_embeddings),
            (self.norm, embeddings.LayerNorm),
            (self.head, like.qa_outputs),
        ]
        for layer, like_layer in zip(self.layers, like.bert.encoder.layer, strict=True):
            yield from layer_pairs(layer, like_layer)
        for module, like_module in modules:
            yield module.weight, like_module.weight
            if hasattr(module, "bias"):
                yield module.bias, like_module.bias
