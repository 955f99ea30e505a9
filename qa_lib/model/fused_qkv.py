"""Query, key and value of a layer as one linear layer of three times the width (variants E-qkv and E-t4).

Self-attention (Vaswani et al. 2017) multiplies the same hidden states by three matrices. Three GEMMs of width 768
leave a large GPU partly idle: each has few tiles to spread over its multiprocessors, each is a launch, and each reads
the hidden states anew. One GEMM with the three matrices side by side gives the same numbers from one launch. Training
changes only in the order of rounding. A checkpoint must look like any other, so that the matrices are taken apart
again before it is saved. It works on every GPU and on a CPU.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert.modeling_bert import eager_attention_forward

from qa_lib.kernels.varlen_attention import attach_bias_grad
from qa_lib.model.architectures import encoder_of, layers_of


class BiasDeferredLinear(nn.Linear):
    """nn.Linear that adds its bias, whose gradient is left to the attention kernel after it (kernels/common.py)."""

    def forward(self, x):
        return F.linear(x, self.weight, self.bias.detach())


class FusedSelfAttention(nn.Module):
    """The self-attention of a BERT-like encoder with one linear layer for the three projections `names`; `split` gives
    the original back."""

    def __init__(self, separate: nn.Module, names: tuple[str, ...]):
        super().__init__()
        parts = [separate.get_submodule(name) for name in names]
        self.qkv = nn.Linear(parts[0].in_features, sum(part.out_features for part in parts), device="meta")
        self.qkv.weight = nn.Parameter(torch.cat([part.weight.detach() for part in parts]))
        self.qkv.bias = nn.Parameter(torch.cat([part.bias.detach() for part in parts]))
        self.config, self.names = separate.config, names
        self.dropout, self.scaling, self.width = separate.dropout, separate.scaling, separate.attention_head_size
        self.is_causal = separate.is_causal
        self.separate = [separate.to("meta")]  # without its weights, and in a list, so as not to be a submodule

    def split(self) -> nn.Module:
        """The original module with this one's weights."""
        separate = self.separate[0]
        for name, weight, bias in zip(self.names, self.qkv.weight.chunk(3), self.qkv.bias.chunk(3), strict=True):
            part = separate.get_submodule(name)
            part.weight, part.bias = nn.Parameter(weight.detach().clone()), nn.Parameter(bias.detach().clone())
        return separate

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, **kwargs):
        """As the original's forward, for an encoder: hidden_states [batch, tokens, hidden]."""
        shape = hidden_states.shape[:-1]
        qkv = self.qkv(hidden_states).view(*shape, 3, -1, self.width)
        if isinstance(self.qkv, BiasDeferredLinear):
            if kwargs.get("segments") is not None:
                kwargs["bias"] = self.qkv.bias
            else:  # then it is not our kernel that takes it
                qkv = attach_bias_grad(qkv, self.qkv.bias)
        parts = qkv.transpose(1, 3).unbind(2)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.dropout.p if self.training else 0.0
        output, weights = attention(
            self, *parts, attention_mask, dropout=dropout, scaling=self.scaling, qkv=qkv, **kwargs
        )
        return output.reshape(*shape, -1).contiguous(), weights


def fuse_projections(model: nn.Module) -> None:
    """Fuse the three projections of every layer, in place."""
    encoder = encoder_of(model)
    for layer in layers_of(model):
        separate = layer.get_submodule(encoder.self_attention)
        layer.set_submodule(encoder.self_attention, FusedSelfAttention(separate, encoder.projections))


def split_projections(model: nn.Module) -> None:
    """Undo `fuse_projections`, in place; does nothing to other models."""
    name = encoder_of(model).self_attention
    for layer in layers_of(model):
        fused = layer.get_submodule(name)
        if isinstance(fused, FusedSelfAttention):
            layer.set_submodule(name, fused.split())
