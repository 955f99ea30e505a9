"""GPT-2 in plain PyTorch, as a good engineer writes it in an afternoon.

This is the rival of family L (variants L-plain and L-plain-bf16). The file imports nothing of the
library but the other rival's dropout. Weights come from transformers' model and go back into it, so
that both start alike and are scored alike. What such an engineer tries next are options of `GPT2`,
each off by default; `qa_lib.peers.search` measures which of them pay.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from qa_lib.peers.bert import dropout


def sdpa(query, key, value, mask, rate: float):
    """Attend to earlier tokens, by whichever kernel PyTorch takes; `mask` is not used.

    Query, key and value and the result are [batch, heads, tokens, width of a head]; `rate` is that
    of dropout.
    """
    return F.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)


def flex(query, key, value, mask, rate: float):
    """Attend to earlier tokens by FlexAttention and the `mask` that causal_mask returns.

    Raises ValueError where `rate` is not 0, as FlexAttention has no dropout.
    """
    if rate:
        raise ValueError("FlexAttention has no dropout: take attention_dropout=0.0")
    return flex_attention(query, key, value, block_mask=mask)


ATTENTION = {"sdpa": sdpa, "flex": flex}


def causal_mask(tokens: int, device):
    """Return FlexAttention's mask in which each token attends to itself and the tokens before."""
    return create_block_mask(
        lambda batch, head, query, key: query >= key, None, None, tokens, tokens, device=device
    )


def whole_loss(x, weight, targets, vocabulary: int):
    """Return the mean cross entropy of x [rows, width] times `weight` for `targets` [rows].

    The first `vocabulary` rows of `weight` are words; those after them only fill up a tile.
    """
    return F.cross_entropy(F.linear(x, weight)[:, :vocabulary], targets)


@torch.compiler.disable
def chunked_loss(x, weight, targets, vocabulary: int):
    """Return the loss that whole_loss returns, computed from CHUNK rows of x at a time.

    The logits of all rows and their gradients then never exist at once. Only what lies between its
    GEMMs is compiled: as one compiled function it did not train on a GPU (torch 2.11).
    """
    return _Chunked.apply(x, weight, targets, vocabulary)


@torch.compiler.disable
def liger_loss(x, weight, targets, vocabulary: int):
    """Return the loss that whole_loss returns, by Liger's kernel, which must see words alone."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(weight[:vocabulary], x, targets)


LOSS = {"whole": whole_loss, "chunked": chunked_loss, "liger": liger_loss}
CHUNK = 4096  # rows


class _Chunked(torch.autograd.Function):
    """The loss of chunked_loss; its forward pass computes the gradients as well."""

    @staticmethod
    def forward(context, x, weight, targets, vocabulary):
        count = (targets >= 0).sum()
        cross_entropy = _COMPILED if x.is_cuda else _cross_entropy
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros_like(weight)
        total = torch.zeros((), device=x.device)
        chunks = zip(x.split(CHUNK), targets.split(CHUNK), grad_x.split(CHUNK), strict=True)
        for x_chunk, targets_chunk, grad_x_chunk in chunks:
            logits = F.linear(x_chunk, weight)
            loss, grad_logits = cross_entropy(logits, targets_chunk, count, vocabulary)
            total += loss
            grad_x_chunk.copy_(grad_logits @ weight)
            grad_weight.addmm_(grad_logits.t(), x_chunk)
        context.save_for_backward(grad_x, grad_weight)
        return total

    @staticmethod
    def backward(context, grad):
        grad_x, grad_weight = context.saved_tensors
        return grad_x * grad.to(grad_x.dtype), grad_weight * grad.to(grad_x.dtype), None, None


def _cross_entropy(logits, targets, count, vocabulary: int):
    """Return the sum of the rows' losses, divided by `count`, and its gradient by `logits`.

    Columns from `vocabulary` on are no words, and rows with a negative target have no loss.
    """
    column = torch.arange(logits.shape[1], device=logits.device)
    words = logits.float().masked_fill(column >= vocabulary, -torch.inf)
    log_probabilities = words.log_softmax(-1)
    kept = targets >= 0
    of_target = log_probabilities.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    loss = -torch.where(kept, of_target, 0.0).sum() / count
    grad = log_probabilities.exp() - (column == targets[:, None]).float()
    return loss, (grad * kept[:, None] / count).to(logits.dtype)


_COMPILED = torch.compile(_cross_entropy, dynamic=False)


class Block(nn.Module):
    """A layer of GPT-2, from [batch, tokens, width] to the same: attention, then feed-forward."""

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float,
        attention: str = "sdpa",
        attention_dropout: float | None = None,
    ):
        super().__init__()
        self.heads = heads
        self.rate = dropout
        self.attention_rate = dropout if attention_dropout is None else attention_dropout
        self.attention = ATTENTION[attention]
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x, mask=None, noise=None):
        """Return the block's output; `noise` is None or uint8 [2, batch, tokens, width]."""
        rate = self.rate if self.training else 0.0
        attention_rate = self.attention_rate if self.training else 0.0
        noise1, noise2 = (None, None) if noise is None else noise.unbind(0)
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.transpose(1, 3).unbind(2)
        attended = self.attention(query, key, value, mask, attention_rate)
        x = x + dropout(self.out(attended.transpose(1, 2).flatten(2)), rate, noise1)
        inner = F.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + dropout(self.down(inner), rate, noise2)


class GPT2(nn.Module):
    """A language model in the sizes of `like`, a GPT2LMHeadModel, of which only config is read.

    The options:

    - `attention`: the kernel, a name of ATTENTION.
    - `attention_dropout`: the rate within attention, where it is not `dropout`.
    - `loss`: the form of the loss, a name of LOSS.
    - `align`: fill the vocabulary up to a multiple of so many rows, for whole tiles in its GEMMs.
    - `drawn_at_once`: take dropout from random bytes that one kernel draws for the whole step.
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
        self.rate = dropout
        self.vocabulary = config.vocab_size
        self.takes_block_mask = attention == "flex"
        self.drawn_at_once = drawn_at_once
        self.loss_form = LOSS[loss]
        aligned_vocabulary = math.ceil(config.vocab_size / align) * align
        self.words = nn.Embedding(aligned_vocabulary, config.n_embd)
        self.positions = nn.Embedding(config.n_positions, config.n_embd)
        self.blocks = nn.ModuleList(
            Block(
                width=config.n_embd,
                heads=config.n_head,
                dropout=dropout,
                attention=attention,
                attention_dropout=attention_dropout,
            )
            for _ in range(config.n_layer)
        )
        self.norm = nn.LayerNorm(config.n_embd)

    def forward(self, input_ids, labels):
        """Return the mean loss of predicting each next token; the arguments are [batch, tokens]."""
        x = self.embed(input_ids)
        noise = [None] * len(self.blocks)
        if self.drawn_at_once and self.training:
            noise = self.draw(x)
        mask = causal_mask(x.shape[1], x.device) if self.takes_block_mask else None
        for block, noise_of_block in zip(self.blocks, noise, strict=True):
            x = block(x, mask, noise_of_block)
        return self.loss(x, labels)

    def embed(self, input_ids):
        """Return the sum of the embeddings that enters the first block, [batch, tokens, width]."""
        x = self.words(input_ids) + self.positions.weight[: input_ids.shape[1]]
        return F.dropout(x, self.rate if self.training else 0.0)

    def draw(self, x):
        """Return random bytes for the two dropouts of each block.

        They are uint8 [blocks, 2, batch, tokens, width], drawn as int32, four bytes at a time.
        """
        shape = (len(self.blocks), 2, *x.shape[:-1], x.shape[-1] // 4)
        range32 = torch.iinfo(torch.int32)
        bits = torch.randint(range32.min, range32.max, shape, dtype=torch.int32, device=x.device)
        return bits.view(torch.uint8)

    def loss(self, x, labels):
        """Return the mean loss over tokens; x [batch, tokens, width] is the last block's output."""
        # The labels are shifted, which are small, and not the logits.
        targets = F.pad(labels[:, 1:], (0, 1), value=-100)
        x = self.norm(x).flatten(0, 1)
        return self.loss_form(x, self.words.weight, targets.flatten(), self.vocabulary)

    def pairs(self, like: nn.Module):
        """Yield each weight of this model with the same weight of transformers' model.

        transformers' linear layers of GPT-2 hold transposed matrices (Conv1D), which are yielded as
        transposed views.
        """
        transformer = like.transformer
        yield self.words.weight[: self.vocabulary], transformer.wte.weight
        yield self.positions.weight, transformer.wpe.weight
        modules = [(self.norm, transformer.ln_f)]
        for block, like_block in zip(self.blocks, transformer.h, strict=True):
            modules += [
                (block.norm1, like_block.ln_1),
                (block.qkv, like_block.attn.c_attn),
                (block.out, like_block.attn.c_proj),
                (block.norm2, like_block.ln_2),
                (block.up, like_block.mlp.c_fc),
                (block.down, like_block.mlp.c_proj),
            ]
        for module, like_module in modules:
            yield module.weight, like_module.weight.t()
            yield module.bias, like_module.bias
