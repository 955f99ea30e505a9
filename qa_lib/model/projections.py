"""Query, key and value of a BERT layer as one matrix product of three times the width."""

import torch
from torch import nn
from transformers.models.bert.modeling_bert import ALL_ATTENTION_FUNCTIONS, BertSelfAttention, eager_attention_forward


class FusedSelfAttention(nn.Module):
    """BertSelfAttention with one product for the three projections; `split` gives the original back."""

    def __init__(self, separate: BertSelfAttention):
        super().__init__()
        self.config, self.separate = separate.config, [separate.to("meta")]  # in a list, so as not to be a submodule
        self.dropout, self.scaling, self.width = separate.dropout, separate.scaling, separate.attention_head_size
        self.is_causal = separate.is_causal

    @classmethod
    def of(cls, separate: BertSelfAttention) -> "FusedSelfAttention":
        """The fused form, with the weights of `separate`, which loses its own."""
        parts = [getattr(separate, name) for name in ("query", "key", "value")]
        joined = nn.Linear(parts[0].in_features, sum(part.out_features for part in parts))
        with torch.no_grad():
            joined.weight.copy_(torch.cat([part.weight for part in parts]))
            joined.bias.copy_(torch.cat([part.bias for part in parts]))
        fused = cls(separate)
        fused.qkv = joined
        return fused

    def split(self) -> BertSelfAttention:
        """BertSelfAttention with this module's weights."""
        (separate,) = self.separate
        separate = separate.to_empty(device=self.qkv.weight.device).to(self.qkv.weight.dtype)
        with torch.no_grad():
            for index, name in enumerate(("query", "key", "value")):
                part = getattr(separate, name)
                part.weight.copy_(self.qkv.weight.chunk(3)[index])
                part.bias.copy_(self.qkv.bias.chunk(3)[index])
        return separate

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, **kwargs):
        """As BertSelfAttention.forward, for an encoder: hidden_states [batch, tokens, hidden]."""
        shape = hidden_states.shape[:-1]
        parts = self.qkv(hidden_states).view(*shape, 3, -1, self.width).transpose(1, 3).unbind(2)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.dropout.p if self.training else 0.0
        output, weights = attention(self, *parts, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return output.reshape(*shape, -1).contiguous(), weights


def fuse_projections(model: nn.Module) -> None:
    """Fuse the three projections of every layer of a BERT, in place."""
    for layer in model.bert.encoder.layer:
        layer.attention.self = FusedSelfAttention.of(layer.attention.self)


def split_projections(model: nn.Module) -> None:
    """Undo `fuse_projections`, in place; does nothing to other models."""
    for layer in model.bert.encoder.layer:
        if isinstance(layer.attention.self, FusedSelfAttention):
            layer.attention.self = layer.attention.self.split()
