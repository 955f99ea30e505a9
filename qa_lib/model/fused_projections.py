"""Query, key and value as one linear layer of three times the width (variants E-qkv and E-t4).

Self-attention (Vaswani et al. 2017) multiplies the same hidden states by three matrices. Three
GEMMs of width 768 leave a large GPU partly idle: each has few tiles to spread over its
multiprocessors, each is a launch, and each reads the hidden states anew. One GEMM with the three
matrices side by side gives the same numbers from one launch. Training changes only in the order of
rounding. A checkpoint must look like any other, so that the matrices are taken apart again before
it is saved. It works on every GPU and on a CPU.

Before our own attention kernel (varlen_attention.py) the linear layer may leave its bias's gradient
to that kernel, and may be in 8-bit floats, as may the one after attention.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert.modeling_bert import eager_attention_forward

from qa_lib.errors import UserError
from qa_lib.kernels.fp8 import fp8_linear, fp8_linear_and_placeholder
from qa_lib.kernels.varlen_attention import varlen_attention_and_copy
from qa_lib.kernels.varlen_reference import attach_bias_grad
from qa_lib.model.architectures import encoder_of, layers_of
from qa_lib.model.float8_layers import leave_copy, take_copy, to_float8


def refuse_attentions(asked: bool | None, config: PreTrainedConfig) -> None:
    """Raise UserError where a call, or else the configuration, asks for attention's weights.

    `asked` is the call's `output_attentions`.
    """
    if config.output_attentions if asked is None else asked:
        raise UserError(
            "output_attentions: the kernels of attention here return no weights; "
            "ask a model that was not sped up"
        )


class BiasDeferredLinear(nn.Linear):
    """nn.Linear that adds its bias and leaves the bias's gradient to the attention kernel after it.

    kernels/partial_sums.py says why.
    """

    def forward(self, x):
        return F.linear(x, self.weight, self.bias.detach())


class Float8BiasDeferredLinear(BiasDeferredLinear):
    """A BiasDeferredLinear for bf16 inputs and weights whose GEMMs are in 8-bit floats."""

    float8 = True
    weight_grad8 = False

    @property
    def reads_grad8_alone(self) -> bool:
        """Whether nothing reads the gradient of its output in bf16."""
        return self.weight_grad8

    def forward(self, x):
        return fp8_linear(x, self.weight, self.bias.detach(), take_copy(x), self.weight_grad8)

    def with_placeholder(self, x) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output, and a placeholder for its gradient in e5m2 (kernels/fp8.py)."""
        return fp8_linear_and_placeholder(
            x, self.weight, self.bias.detach(), take_copy(x), self.weight_grad8
        )


class FusedSelfAttention(nn.Module):
    """The self-attention of a BERT-like encoder with one linear layer for the three projections.

    `names` are those of the projections in the original, the module `separate`; `split` gives the
    original back. The fused weights train where the originals do, all three of them.
    """

    def __init__(self, separate: nn.Module, names: tuple[str, ...]):
        super().__init__()
        projections = [separate.get_submodule(name) for name in names]
        in_features = projections[0].in_features
        out_features = sum(projection.out_features for projection in projections)
        weight = torch.cat([projection.weight.detach() for projection in projections])
        bias = torch.cat([projection.bias.detach() for projection in projections])
        self.qkv = nn.Linear(in_features, out_features, device="meta")
        self.qkv.weight = nn.Parameter(weight, projections[0].weight.requires_grad)
        self.qkv.bias = nn.Parameter(bias, projections[0].bias.requires_grad)
        self.config = separate.config
        self.names = names
        self.dropout = separate.dropout
        self.scaling = separate.scaling
        self.width = separate.attention_head_size
        self.is_causal = separate.is_causal
        # Without its weights, and in a list, so as not to be a submodule.
        self.separate = [separate.to("meta")]

    def split(self) -> nn.Module:
        """Return the original module with this one's weights."""
        (separate,) = self.separate
        weights = self.qkv.weight.chunk(3)
        biases = self.qkv.bias.chunk(3)
        for name, weight, bias in zip(self.names, weights, biases, strict=True):
            projection = separate.get_submodule(name)
            projection.weight = nn.Parameter(weight.detach().clone())
            projection.bias = nn.Parameter(bias.detach().clone())
        return separate

    def project(self, hidden_states, is_packed: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return query, key and value [batch, tokens, 3, heads, width], and `qkv_bias` or None.

        It is the bias that is in them already and whose gradient is left to the attention kernel.
        """
        qkv = self.qkv(hidden_states).unflatten(-1, (3, -1, self.width))
        if not isinstance(self.qkv, BiasDeferredLinear):
            return qkv, None
        if is_packed:
            return qkv, self.qkv.bias
        # A padded batch goes to another kernel, which knows nothing of a bias.
        return attach_bias_grad(qkv, self.qkv.bias), None

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, **kwargs):
        """Do what the original's forward does for an encoder.

        Takes hidden_states [batch, tokens, hidden]; returns the output, of that shape, and the
        attention's weights, which are None unless it is eager.
        """
        shape = hidden_states.shape[:-1]
        is_packed = kwargs.get("segments") is not None
        qkv, qkv_bias = self.project(hidden_states, is_packed)
        if qkv_bias is not None:
            kwargs["qkv_bias"] = qkv_bias
        query, key, value = qkv.transpose(1, 3).unbind(2)
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.dropout.p if self.training else 0.0,
            scaling=self.scaling,
            qkv=qkv,
            **kwargs,
        )
        return output.reshape(*shape, -1).contiguous(), weights


class Float8SelfAttention(FusedSelfAttention):
    """A FusedSelfAttention between linear layers in 8 bits.

    Its `qkv` is a Float8BiasDeferredLinear. Packed samples go to our own kernel, which makes the
    operands in 8 bits; there transformers' interface of attention has no place for these.
    """

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, **kwargs):
        """Do what the original's forward does; the output may carry an e4m3 copy."""
        segments = kwargs.get("segments")
        if segments is None or torch.compiler.is_compiling():
            return super().forward(hidden_states, attention_mask, past_key_values, **kwargs)
        qkv, placeholder = self.qkv.with_placeholder(hidden_states)
        output, output8 = varlen_attention_and_copy(
            qkv.unflatten(-1, (3, -1, self.width)).squeeze(0),
            self.qkv.bias,
            segments.cu_seqlens,
            longest=max(segments.limits),
            seed=self.dropout.seed,
            dropout=self.dropout.p if self.training else 0.0,
            scale=self.scaling,
            distance_bias=segments.distance_bias,
            placeholder=placeholder,
            grad8_alone=self.qkv.reads_grad8_alone,
        )
        output = output.reshape(hidden_states.shape).contiguous()
        leave_copy(output, output8)
        return output, None


def fuse_projections(model: nn.Module, kind: type = FusedSelfAttention) -> None:
    """Fuse the three projections of every layer, in place, by a FusedSelfAttention of that kind."""
    encoder = encoder_of(model)
    for layer in layers_of(model):
        separate = layer.get_submodule(encoder.self_attention)
        fused = kind(separate, encoder.projections)
        layer.set_submodule(encoder.self_attention, fused)


def split_projections(model: nn.Module) -> None:
    """Undo `fuse_projections`, in place; do nothing to other models."""
    name = encoder_of(model).self_attention
    for layer in layers_of(model):
        fused = layer.get_submodule(name)
        if isinstance(fused, FusedSelfAttention):
            layer.set_submodule(name, fused.split())


def use_float8_projections(model: nn.Module) -> None:
    """Give the linear layers before and after attention 8-bit operands, in place.

    The model has fused projections and is prepared for the kernel of kernels/varlen_attention.py.
    Weights stay in bf16.
    """
    encoder = encoder_of(model)
    for layer in layers_of(model):
        self_attention = layer.get_submodule(encoder.self_attention)
        self_attention.__class__ = Float8SelfAttention
        self_attention.qkv.__class__ = Float8BiasDeferredLinear
        to_float8(layer.get_submodule(encoder.attention_output))
