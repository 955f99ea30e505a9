"""GPT-2 in plain PyTorch, as a good engineer writes it in an afternoon: a rival for family L (variant L-plain).

Nothing of the library is used. Weights come from transformers' model and go back into it, so that both start alike and
are scored alike.
"""

from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """One layer: x [batch, tokens, width] to the same."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.rate = heads, dropout
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

    def forward(self, x):
        rate = self.rate if self.training else 0.0
        query, key, value = (
            self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        )
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), rate)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")), rate)


class GPT2(nn.Module):
    """A language model of the shape of `like`, a GPT2LMHeadModel of transformers."""

    def __init__(self, like: nn.Module, dropout: float):
        super().__init__()
        config = like.config
        self.rate = dropout
        self.words = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.n_positions, config.n_embd)
        self.blocks = nn.ModuleList(
            Block(config.n_embd, config.n_head, dropout) for _ in range(config.n_layer)
        )
        self.norm = nn.LayerNorm(config.n_embd)

    def forward(self, input_ids, labels):
        """The mean loss of predicting each next token; both [batch, tokens]."""
        x = self.words(input_ids) + self.positions.weight[: input_ids.shape[1]]
        x = F.dropout(x, self.rate if self.training else 0.0)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.words.weight)
        targets = F.pad(
            labels[:, 1:], (0, 1), value=-100
        )  # shifts the labels, which are small, and not the logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def pairs(self, like: nn.Module):
        """Each weight of this model and the one of transformers' model that it stands for; of linear layers the latter
        are transposed."""
        theirs = like.transformer
        yield self.words.weight, theirs.wte.weight
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
