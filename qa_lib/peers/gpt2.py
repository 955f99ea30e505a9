"""GPT-2 in plain PyTorch, as a good engineer writes it in an afternoon: a rival for family L (variant L-plain).

Nothing of the library is used. Weights come from transformers' model and go back into it, so that both start alike and
are scored alike. What such an engineer tries next are options of `GPT2`, each off at first; `qa_lib.peers.search` tells
which of them pay.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from qa_lib.peers.bert import dropout


def sdpa(query, key, value, mask, rate: float):
    """Causal attention, of [batch, heads, tokens, width], by whichever kernel PyTorch takes."""
    return F.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)


def flex(query, key, value, mask, rate: float):
    """The same by FlexAttention and a mask of blocks. It has no dropout: `rate` must be 0."""
    if rate:
        raise ValueError("FlexAttention has no dropout: take attention_dropout=0.0")
    return flex_attention(query, key, value, block_mask=mask)


ATTENTION = {"sdpa": sdpa, "flex": flex}


def causal_mask(tokens: int, device):
    """FlexAttention's mask: a token attends to what is not after it."""
    return create_block_mask(
        lambda batch, head, query, key: query >= key, None, None, tokens, tokens, device=device
    )


def whole_loss(x, weight, targets, vocabulary: int):
    """The mean cross entropy of x [rows, width] times `weight`, whose first `vocabulary` rows are words."""
    return F.cross_entropy(F.linear(x, weight)[:, :vocabulary], targets)


@torch.compiler.disable
def chunked_loss(x, weight, targets, vocabulary: int):
    """The same, a chunk of rows at a time, so that logits and their gradients are never there at once.

    Only what lies between its GEMMs is compiled: as one compiled function it did not train on a GPU (torch 2.11).
    """
    return _Chunked.apply(x, weight, targets, vocabulary)


@torch.compiler.disable
def liger_loss(x, weight, targets, vocabulary: int):
    """The same by Liger's kernel, which takes no rows of `weight` that are no words."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(weight[:vocabulary], x, targets)


LOSS = {"whole": whole_loss, "chunked": chunked_loss, "liger": liger_loss}
CHUNK = 4096  # rows


class _Chunked(torch.autograd.Function):
    """Loss and gradients in one pass over chunks of rows."""

    @staticmethod
    def forward(context, x, weight, targets, vocabulary):
        count = (targets >= 0).sum()
        softmax = _COMPILED if x.is_cuda else _softmax
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
        total = torch.zeros((), device=x.device)
        for rows, own_targets, own_grad in zip(
            x.split(CHUNK), targets.split(CHUNK), grad_x.split(CHUNK), strict=True
        ):
            loss, grad = softmax(F.linear(rows, weight), own_targets, count, vocabulary)
            total += loss
            own_grad.copy_(grad @ weight)
            grad_weight.addmm_(grad.t(), rows)
        context.save_for_backward(grad_x, grad_weight)
        return total

    @staticmethod
    def backward(context, grad):
        grad_x, grad_weight = context.saved_tensors
        return grad_x * grad.to(grad_x.dtype), grad_weight * grad.to(grad_x.dtype), None, None


def _softmax(logits, targets, count, vocabulary: int):
    """The sum of losses over `count`, and its gradient in `logits`."""
    column = torch.arange(logits.shape[1], device=logits.device)
    wide = logits.float().masked_fill(column >= vocabulary, -torch.inf)
    likelihood = wide.log_softmax(-1)
    kept = targets >= 0
    chosen = likelihood.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    loss = -torch.where(kept, chosen, 0.0).sum() / count
    grad = likelihood.exp() - (column == targets[:, None]).float()
    return loss, (grad * kept[:, None] / count).to(logits.dtype)


_COMPILED = torch.compile(_softmax, dynamic=False)


class Block(nn.Module):
    """One layer: x [batch, tokens, width] to the same."""

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float,
        attention: str = "sdpa",
        attention_dropout: float | None = None,
    ):
        super().__init__()
        self.heads, self.rate = heads, dropout
        self.attention = ATTENTION[attention]
        self.attention_rate = dropout if attention_dropout is None else attention_dropout
        self.norm1, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.norm2, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x, mask=None, noise=None):
        rate, attention_rate = (self.rate, self.attention_rate) if self.training else (0.0, 0.0)
        first, second = (None, None) if noise is None else noise.unbind(0)
        query, key, value = (
            self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        )
        attended = self.attention(query, key, value, mask, attention_rate)
        x = x + dropout(self.out(attended.transpose(1, 2).flatten(2)), rate, first)
        inner = F.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + dropout(self.down(inner), rate, second)


class GPT2(nn.Module):
    """A language model of the shape of `like`, a GPT2LMHeadModel of transformers.

    Options: the kernel of `attention` (see ATTENTION) and its own rate of dropout, the form of the `loss` (see LOSS),
    rows of the vocabulary up to a multiple of `align`, for whole tiles in its GEMMs, and dropout from random bytes that
    one kernel draws for the whole step (`drawn_at_once`).
    """

    def __init__(
        self,
        like: nn.Module,
        dropout: float,
        attention: str = "sdpa",
        attention_dropout: float | None = None,
        loss: str = "whole",
        align: int = 1,
        drawn_at_once: bool = False,
    ):
        super().__init__()
        config = like.config
        self.rate, self.vocabulary = dropout, config.vocab_size
        self.by_blocks, self.drawn_at_once = attention == "flex", drawn_at_once
        self.loss_of = LOSS[loss]
        self.words = nn.Embedding(-(-config.vocab_size // align) * align, config.n_embd)
        self.positions = nn.Embedding(config.n_positions, config.n_embd)
        self.blocks = nn.ModuleList(
            Block(config.n_embd, config.n_head, dropout, attention, attention_dropout)
            for _ in range(config.n_layer)
        )
        self.norm = nn.LayerNorm(config.n_embd)

    def forward(self, input_ids, labels):
        """The mean loss of predicting each next token; both [batch, tokens]."""
        x = self.embed(input_ids)
        noise = self.draw(x) if self.drawn_at_once and self.training else [None] * len(self.blocks)
        mask = causal_mask(x.shape[1], x.device) if self.by_blocks else None
        for block, own_noise in zip(self.blocks, noise, strict=True):
            x = block(x, mask, own_noise)
        return self.loss(x, labels)

    def embed(self, input_ids):
        """What enters the first block, [batch, tokens, width]."""
        x = self.words(input_ids) + self.positions.weight[: input_ids.shape[1]]
        return F.dropout(x, self.rate if self.training else 0.0)

    def draw(self, x):
        """Random bytes for each element of two dropouts of each block: uint8 [blocks, 2, batch, tokens, width]."""
        shape = (len(self.blocks), 2, *x.shape[:-1], x.shape[-1] // 4)
        least, most = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
        return torch.randint(least, most, shape, dtype=torch.int32, device=x.device).view(
            torch.uint8
        )

    def loss(self, x, labels):
        """The mean over tokens, from what leaves the last block."""
        targets = F.pad(
            labels[:, 1:], (0, 1), value=-100
        )  # shifts the labels, which are small, and not the logits
        x = self.norm(x).flatten(0, 1)
        return self.loss_of(x, self.words.weight, targets.flatten(), self.vocabulary)

    def pairs(self, like: nn.Module):
        """Each weight of this model and the one of transformers' model that it stands for; of linear layers the latter
        are transposed."""
        theirs = like.transformer
        yield self.words.weight[: self.vocabulary], theirs.wte.weight
        yield self.positions.weight, theirs.wpe.weight
        modules = [(self.norm, theirs.ln_f)]
        for own, other in zip(self.blocks, theirs.h, strict=True):
            modules += [
                (own.norm1, other.ln_1),
                (own.qkv, other.attn.c_attn),
                (own.out, other.attn.c_proj),
            ]
            modules += [
                (own.norm2, other.ln_2),
                (own.up, other.mlp.c_fc),
                (own.down, other.mlp.c_proj),
            ]
        for own, other in modules:
            yield own.weight, other.weight.t()
            yield own.bias, other.bias
