"""MPNet for extractive question answering in plain PyTorch, without padding in its linear layers.

This is peers/bert.py with a bias of the attention's scores by distance. FlashAttention takes no
such bias, and cuDNN's kernel gives it no gradient. A good engineer tries these in their place:

- "efficient": PyTorch's memory-efficient kernel on padded rows, one for each sample, with bias and
  padding in a mask that is made once a step for all layers.
- "eager": the same rows and masks by matrix products and a softmax, which torch.compile fuses.
- "flex": FlexAttention on the packed sequence, which looks the bias up by distance. It has no
  dropout.

Rows have a few static lengths, so that short samples are not padded to the longest of all. The file
imports nothing of the library but its neighbours.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from qa_lib.peers import packing
from qa_lib.peers.bert import Layer, answer_loss, block_mask, layer_pairs, random_bytes

BUCKETS = 32  # of distances
EXACT = 8  # distances below have a bucket each
FARTHEST = 128  # from this distance on, all have the last bucket
ALIGN = 8  # lengths of rows are multiples of it, which kernels want of a mask in 16 bits
LOWEST = torch.finfo(torch.float16).min  # the mask of padding; finite, as a row may have no token


def bucket_of(distance: torch.Tensor) -> torch.Tensor:
    """Return the bucket of each distance from query to key, as T5 has it (Raffel et al. 2020).

    Half of the buckets are for keys after the query. In each half, the first half have one
    distance each, and the others grow by the logarithm.
    """
    size = distance.abs()
    half = BUCKETS // 2
    growth = torch.log(size.clamp(min=1) / EXACT) / math.log(FARTHEST / EXACT)
    far = EXACT + (growth * (half - EXACT)).long()
    return torch.where(size < EXACT, size, far.clamp(max=half - 1)) + half * (distance > 0)


def one_hot_buckets(distance: torch.Tensor) -> torch.Tensor:
    """Return 1.0 for the bucket of each of n distances and 0.0 for all others: [BUCKETS, n].

    A table's product with it looks the distances up, and the gradient of the table is a product,
    too, and no scatter of n numbers to few rows.
    """
    return F.one_hot(bucket_of(distance.flatten()), BUCKETS).t().float().contiguous()


class Move(torch.autograd.Function):
    """Copy rows of a tensor to other places; the gradient is copied back.

    PyTorch's own gradient of such a copy adds up, by a sort or by atomics, as if rows were taken
    more than once.
    """

    @staticmethod
    def forward(ctx, x, source, back):
        """Return x[source] for x [n, ...] and `source` [m], with 0 where `source` is -1.

        `back` [n] says where each row of x came to in the result, -1 if nowhere.
        """
        ctx.save_for_backward(back)
        return _taken(x, source)

    @staticmethod
    def backward(ctx, gradient):
        (back,) = ctx.saved_tensors
        return _taken(gradient, back), None, None


def _taken(x, source):
    """Return x[source], with 0 where `source` is -1."""
    return torch.where((source >= 0)[:, None, None], x[source.clamp(min=0)], 0.0)


class Rows(NamedTuple):
    """How a sequence's tokens lie in padded rows, all rows one after the other."""

    token: torch.Tensor  # [places], the token at each place; -1 for padding
    place: torch.Tensor  # [tokens], the place of each token; -1 for those of no sample
    masks: list[torch.Tensor]  # of each run [rows, heads, length, length], is added to scores


def rows(kernel, query, key, value, layout: Rows, longest: int, rate: float):
    """Attend within samples by `kernel`, called once for each run of rows of one length.

    Other arguments and the result are those of peers.bert.flash, but for `layout`.
    """
    sizes = [len(mask) * mask.shape[-1] for mask in layout.masks]
    moved = [Move.apply(t, layout.token, layout.place).split(sizes) for t in (query, key, value)]
    attended = []
    for mask, *of_run in zip(layout.masks, *moved, strict=True):
        of_run = [t.unflatten(0, (len(mask), -1)).transpose(1, 2) for t in of_run]
        attended.append(kernel(*of_run, mask, rate).transpose(1, 2).flatten(0, 1))
    return Move.apply(torch.cat(attended), layout.place, layout.token)


def efficient(query, key, value, mask, rate: float):
    """Attend in rows [rows, heads, length, width] by PyTorch's memory-efficient kernel.

    On a CPU it is what SDPA has there.
    """
    if not query.is_cuda:
        return F.scaled_dot_product_attention(query, key, value, mask, rate)
    # Named, as SDPA may take cuDNN's kernel, which gives the mask no gradient.
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    return attend(query, key, value, mask, True, rate)[0]


def eager(query, key, value, mask, rate: float):
    """Attend in rows [rows, heads, length, width] by two products and a softmax."""
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1]) + mask
    weights = F.dropout(scores.softmax(-1, dtype=torch.float32), rate)
    return weights.to(value.dtype) @ value


class Distances(NamedTuple):
    """What FlexAttention needs of a packed sequence."""

    mask: BlockMask
    table: torch.Tensor  # [heads, 2 * longest + 1], the bias of the distances from -longest on


def flex(query, key, value, layout: Distances, longest: int, rate: float):
    """Attend within segments by FlexAttention; arguments are those of peers.bert.flex.

    Raises ValueError where `rate` is not 0, as FlexAttention has no dropout.
    """
    if rate:
        raise ValueError("FlexAttention has no dropout: take attention_dropout=0.0")

    table = layout.table

    def biased(score, batch, head, query_index, key_index):
        # Scores of two segments are masked, but their bias is looked up all the same.
        distance = (key_index - query_index).clamp(-longest, longest)
        return score + table[head, distance + longest]

    query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
    attended = flex_attention(query, key, value, score_mod=biased, block_mask=layout.mask)
    return attended[0].transpose(0, 1)


ATTENTION = {"efficient": partial(rows, efficient), "eager": partial(rows, eager), "flex": flex}


class MPNet(nn.Module):
    """MPNet with an answer's two logits a token, in the sizes of the model `like`.

    `like` is an MPNetForQuestionAnswering; only its config is read. The k-th sample of a sequence
    has at most `limits[k]` tokens, and a sequence has as many samples. The options:

    - `attention`: a name of ATTENTION.
    - `attention_dropout`: the rate within attention, where it is not `dropout`.
    - `calls`: the most runs into which the samples of a sequence are cut for attention in rows. The
      rows of a run are as long as its longest limit, so that limits should fall.
    - `gelu`, `drawn_at_once`: those of Bert.
    """

    def __init__(
        self,
        like: nn.Module,
        dropout: float,
        limits: list[int],
        attention: str = "efficient",
        attention_dropout: float | None = None,
        calls: int = 1,
        gelu: str = "none",
        drawn_at_once: bool = False,
    ):
        super().__init__()
        config = like.config
        width = config.hidden_size
        self.longest = max(limits)
        self.rate = dropout
        self.takes_rows = attention != "flex"
        self.drawn_at_once = drawn_at_once
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
                attention_dropout=attention_dropout,
                gelu=gelu,
            )
            for _ in range(config.num_hidden_layers)
        )
        for layer in self.layers:
            layer.attention = ATTENTION[attention]
        self.head = nn.Linear(width, 2)
        if self.takes_rows:
            self._lay_rows(limits, calls)
        else:
            distance = torch.arange(-self.longest, self.longest + 1)
            self._keep("buckets", one_hot_buckets(distance))

    def _lay_rows(self, limits: list[int], calls: int) -> None:
        """Set what is known of the rows before any sample is: `runs`, and these buffers.

        `runs` has the number of rows and their length for each run. `sample` and `column` [places]
        say what sample's place it is and which of its tokens'; `begins` [samples] is where each row
        begins; `buckets` [BUCKETS, width * width] has the buckets of all pairs in the widest row.
        """
        self.runs = packing.cut(limits, calls, ALIGN)
        lengths = torch.tensor([length for count, length in self.runs for _ in range(count)])
        begins = lengths.cumsum(0) - lengths
        sample = torch.repeat_interleave(lengths)
        self._keep("sample", sample)
        self._keep("column", torch.arange(len(sample)) - begins[sample])
        self._keep("begins", begins)
        column = torch.arange(int(lengths.max()))
        self._keep("buckets", one_hot_buckets(column - column[:, None]))

    def _keep(self, name: str, constant: torch.Tensor) -> None:
        """Keep a constant that moves with the model and is no part of its state."""
        self.register_buffer(name, constant, persistent=False)

    def forward(self, input_ids, position_ids, cu_seqlens, start_positions, end_positions):
        """Return the mean loss over samples; arguments are those of Bert, without token types."""
        x = self.embed(input_ids[0], position_ids[0])
        noise = [None] * len(self.layers)
        if self.drawn_at_once and self.training:
            noise = random_bytes(len(self.layers), x)
        layout = self.layout(cu_seqlens, len(x))
        for layer, noise_of_layer in zip(self.layers, noise, strict=True):
            x = layer(x, layout, self.longest, noise_of_layer)
        return self.loss(x, cu_seqlens, start_positions, end_positions)

    def embed(self, input_ids, position_ids):
        """Return the sum of the embeddings that enters the first layer, [tokens, width]."""
        x = self.words(input_ids) + self.positions(position_ids + self.first_position)
        return F.dropout(self.norm(x), self.rate if self.training else 0.0)

    def layout(self, ends, tokens: int) -> Rows | Distances:
        """Return what attention needs of a sequence with these `ends`; all layers share it."""
        # A product has the type that attention computes in, autocast's too; no layer casts a mask.
        bias = self.distances.weight.t() @ self.buckets
        if not self.takes_rows:
            # In fp32, as FlexAttention adds the table's gradient up element by element.
            return Distances(block_mask(ends, tokens), bias.float())
        token = ends[self.sample] + self.column
        is_padding = token >= ends[self.sample + 1]
        masks = self.masks(bias, is_padding)
        return Rows(token.masked_fill(is_padding, -1), self.place(ends, tokens), masks)

    def place(self, ends, tokens: int):
        """Return the place in the rows of each token of a sequence; -1 for those of no sample."""
        token = torch.arange(tokens, device=ends.device)
        segment = torch.bucketize(token, ends, right=True) - 1
        sample = segment.clamp(max=len(self.begins) - 1)
        place = self.begins[sample] + token - ends[sample]
        return place.masked_fill(segment > sample, -1)

    def masks(self, bias, is_padding) -> list[torch.Tensor]:
        """Return the masks of Rows for the bias of all pairs and for the places of padding."""
        widest = math.isqrt(bias.shape[1])
        bias = bias.unflatten(1, (widest, widest))
        masks = []
        sizes = [count * length for count, length in self.runs]
        for (count, length), of_run in zip(self.runs, is_padding.split(sizes), strict=True):
            of_keys = of_run.view(count, 1, 1, length)
            masks.append(bias[None, :, :length, :length].masked_fill(of_keys, LOWEST))
        return masks

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
