"""A decoder's training pass as a whole: variants L-norm and on.

GPT-2 (Radford et al. 2019) has its norms before the linear layers: a layer is
h += attention(norm(h)) and then h += mlp(norm(h)). Between two GEMMs there are always the same
steps: a bias, dropout, the sum with the residual stream, and the norm that the next linear layer
begins with. One operator does them all (kernels/fused_norm.py). Half of these norms belong to the
next layer, and the last one to the model, so that no layer alone can do it. `FusedDecoder` is
therefore the whole training pass between embeddings and head, written out. Its modules keep their
places: evaluation and generation are transformers' own.
"""

import torch
from torch import nn
from transformers import GPT2Model
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from qa_lib.errors import UserError
from qa_lib.kernels.fused_norm import fused_add_norm
from qa_lib.kernels.varlen_attention import varlen_attention, varlen_attention_and_copy
from qa_lib.model.float8_layers import float8_conv1d, has_grad8, is_float8, leave_copy
from qa_lib.model.fused_norms import use_embedding_kernels
from qa_lib.model.hash_dropout import HashDropout, hash_dropout_for
from qa_lib.spec.rules import unfit_heads


class FusedDecoder(GPT2Model):
    """transformers' GPT2Model with hash dropout, whose forward pass in training is written out."""

    def forward(self, input_ids=None, **kwargs):
        """Return hidden states [batch, tokens, width] for input_ids [batch, tokens].

        In training there is no padding, and other arguments are ignored; else it is transformers'
        own forward.
        """
        if not self.training:
            return super().forward(input_ids, **kwargs)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.drop(self.wte(input_ids) + self.wpe(positions))
        normed = self.h[0].ln_1(hidden)
        next_norms = [*((block.ln_1, block.attn.c_attn) for block in self.h[1:]), (self.ln_f, None)]
        for block, (next_norm, next_linear) in zip(self.h, next_norms, strict=True):
            attended = self.attend(block.attn, normed)
            hidden, normed = _add_norm(
                attended,
                block.attn.c_proj,
                hidden,
                block.attn.resid_dropout,
                norm=block.ln_2,
                copies=is_float8(block.mlp.c_fc),
            )
            inner = block.mlp.act(block.mlp.c_fc(normed))
            hidden, normed = _add_norm(
                inner,
                block.mlp.c_proj,
                hidden,
                block.mlp.dropout,
                norm=next_norm,
                copies=is_float8(next_linear),
            )
        return BaseModelOutputWithPastAndCrossAttentions(normed)

    def attend(self, attention, normed):
        """Do what a GPT2Attention does before its last linear layer; [batch, tokens, width]."""
        if isinstance(attention.attn_dropout, HashDropout):
            return self._attend_by_our_kernel(attention, normed)
        heads = (3, attention.num_heads, attention.head_dim)
        qkv = attention.c_attn(normed).unflatten(2, heads)
        query, key, value = qkv.transpose(1, 3).unbind(2)
        kernel = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        output, _ = kernel(
            attention,
            query,
            key,
            value,
            None,
            dropout=attention.attn_dropout.p,
            scaling=attention.scaling,
        )
        return output.flatten(2)

    def _attend_by_our_kernel(self, attention, normed):
        """Attend by kernels/varlen_attention.py, which gives the projections' bias its gradient."""
        batch, length, width = normed.shape
        linear = attention.c_attn
        qkv_bias = linear.bias.detach()
        placeholder = None
        if is_float8(linear):
            qkv, placeholder = float8_conv1d(linear, normed, qkv_bias)
        else:
            qkv = torch.addmm(qkv_bias, normed.flatten(0, 1), linear.weight)
        cu_seqlens = torch.arange(
            0, batch * length + 1, length, dtype=torch.int32, device=normed.device
        )
        inputs = (
            qkv.view(batch * length, 3, attention.num_heads, attention.head_dim),
            linear.bias,
            cu_seqlens,
            length,
            attention.attn_dropout.seed,
            attention.attn_dropout.p,
            attention.scaling,
        )
        if placeholder is None:
            return varlen_attention(*inputs, causal=True).reshape(batch, length, width)
        attended, attended8 = varlen_attention_and_copy(
            *inputs, placeholder=placeholder, grad8_alone=has_grad8(linear), causal=True
        )
        attended = attended.reshape(batch, length, width)
        if is_float8(attention.c_proj):
            leave_copy(attended, attended8)
        return attended


def _add_norm(x, linear: Conv1D, hidden, dropout: HashDropout, norm: nn.LayerNorm, copies: bool):
    """Return the residual stream after a linear layer in training, and the norm of that stream.

    `x` is the linear layer's input, `hidden` the residual stream before it. The norm may carry an
    e4m3 copy, if it `copies`.
    """
    placeholder = None
    if is_float8(linear):
        product, placeholder = float8_conv1d(linear, x, None)
    else:
        product = x @ linear.weight
    total, normed, normed8 = fused_add_norm(
        product,
        linear.bias,
        hidden,
        gamma=norm.weight,
        beta=norm.bias,
        seed=dropout.seed,
        dropout=dropout.p,
        eps=norm.eps,
        placeholder=placeholder,
        copies=copies,
        grad8_alone=placeholder is not None and has_grad8(linear),
    )
    leave_copy(normed, normed8)
    return total, normed


def use_fused_decoder(model: nn.Module) -> None:
    """Give a GPT-2 with hash dropout the fused training pass, in place; replace its embeddings."""
    use_embedding_kernels(model)
    model.transformer.__class__ = FusedDecoder


def use_causal_attention(model: nn.Module) -> None:
    """Have the fused training pass call our own attention kernel, in place.

    Raises UserError for heads of a width that the kernel does not take.
    """
    width = model.config.hidden_size // model.config.num_attention_heads
    why = unfit_heads(width, "triton-causal")
    if why:
        raise UserError(why)
    for block in model.transformer.h:
        block.attn.attn_dropout = hash_dropout_for(block.attn, block.attn.attn_dropout.p)
