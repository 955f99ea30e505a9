"""A decoder whose residual stream and norms are one kernel (variant L-norm).

GPT-2 (Radford et al. 2019) has its norms before the linear layers: a layer is h += attention(norm(h)) and then
h += mlp(norm(h)). What lies between two GEMMs is always the same: a bias, dropout, the sum with the residual stream,
and the norm that the next linear layer begins with (kernels/fused_norm.py). Half of these norms belong to the next
layer, and the last one to the model, so that no layer alone can do it. This is therefore the whole training pass
between embeddings and head, written out. Modules and weights keep their places and names: evaluation and generation are
transformers' own, and a checkpoint looks like any other.
"""

import torch
from transformers import GPT2Model
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qa_lib.errors import UserError
from qa_lib.kernels.fused_norm import fused_add_norm
from qa_lib.kernels.varlen_attention import varlen_attention
from qa_lib.model.fused_blocks import HashDropout, conv1d_without_bias
from qa_lib.variants import Settings


class FusedDecoder(GPT2Model):
    """transformers' GPT2Model with hash dropout; only its forward pass in training is another."""

    def forward(self, input_ids=None, **kwargs):
        """In training, input_ids [batch, tokens] without padding to hidden states [batch, tokens, width]."""
        if not self.training:
            return super().forward(input_ids, **kwargs)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.drop(self.wte(input_ids) + self.wpe(positions))
        normed = self.h[0].ln_1(hidden)
        for block, next_norm in zip(self.h, [*(block.ln_1 for block in self.h[1:]), self.ln_f], strict=True):
            attended = self.attend(block.attn, normed)
            hidden, normed = _add_norm(attended, block.attn.c_proj, hidden, block.attn.resid_dropout, block.ln_2)
            inner = block.mlp.act(block.mlp.c_fc(normed))
            hidden, normed = _add_norm(inner, block.mlp.c_proj, hidden, block.mlp.dropout, next_norm)
        return BaseModelOutputWithPastAndCrossAttentions(normed)

    def attend(self, attention, normed):
        """What GPT2Attention does before its last linear layer."""
        linear, dropout = attention.c_attn, attention.attn_dropout
        batch, length, width = normed.shape
        heads = (3, attention.num_heads, attention.head_dim)
        if isinstance(dropout, HashDropout):  # our own kernel, which gives the bias its gradient
            qkv = torch.addmm(linear.bias.detach(), normed.flatten(0, 1), linear.weight).unflatten(1, heads)
            ends = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=normed.device)
            attended = varlen_attention(
                qkv, linear.bias, ends, length, dropout.seed, dropout.p, attention.scaling, causal=True
            )
            return attended.reshape(batch, length, width)
        query, key, value = linear(normed).unflatten(2, heads).transpose(1, 3).unbind(2)
        kernel = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        return kernel(attention, query, key, value, None, dropout=dropout.p, scaling=attention.scaling)[0].flatten(2)


def _add_norm(x, linear, hidden, dropout, norm):
    """The residual stream `hidden` after a linear layer whose input is `x`, and its norm; in training."""
    x = conv1d_without_bias(linear, x)
    return fused_add_norm(x, linear.bias, hidden, norm.weight, norm.bias, dropout.seed, dropout.p, norm.eps)


def check_fused_decoder(settings: Settings) -> None:
    """Raise UserError for settings that need a decoder's layers to be called one by one."""
    allowed = {
        "attention": ("sdpa", "triton-causal"),
        "activation_checkpointing": (False, "elementwise"),
        "parallel": ("none", "ddp", "ddp-bf16", "ddp-one-bucket", "zero1"),
    }
    for name, values in allowed.items():
        if (value := getattr(settings, name)) not in values:
            known = " or ".join(map(repr, values))
            raise UserError(f"norms 'fused' of a decoder take {name} {known}, and not {value!r}")


def use_fused_decoder(model: torch.nn.Module) -> None:
    """Give a GPT-2 with hash dropout the fused training pass, in place."""
    model.transformer.__class__ = FusedDecoder


def use_causal_attention(model: torch.nn.Module) -> None:
    """Have the fused training pass call our own attention kernel, in place."""
    for block in model.transformer.h:
        block.attn.attn_dropout = HashDropout(block.attn.attn_dropout.p)
