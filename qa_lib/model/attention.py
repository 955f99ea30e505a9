"""Attention within the segments of a packed sequence, by whichever kernel the GPU has, registered with transformers.

A packed sequence holds many samples, and a token must attend to its own sample's tokens alone. A mask over the whole
sequence would do that and cost as much as attention over all of it: quadratic in its length. FlashAttention (Dao et al.
2022, 2023) is told where segments end, computes nothing across them, and never writes the scores to memory: variant
E-packed. A T4 lacks it and has PyTorch's memory-efficient kernel (Rabe and Staats 2021), for which packed sequences
have a place of fixed length for each sample: variants E-packed-efficient and E-t4. A CPU takes the mask. A kernel of
our own for short segments is in kernels/varlen_attention.py, variant E-varlen. The kernels of padded batches, eager in
A1 and SDPA in A2, are transformers' and PyTorch's.

Kernels here take query, key and value [tokens, heads, width], `Segments`, dropout and the scale of the scores; those
for fused projections take the three as one tensor [tokens, 3, heads, width]. ModernBERT's local layers have a `window`
as well: a token attends to so many tokens on either side of it, in its segment.

**Query, key and value as one linear layer of three times the width** (variants E-qkv and E-t4). Self-attention (Vaswani
et al. 2017) multiplies the same hidden states by three matrices. Three GEMMs of width 768 leave a large GPU partly
idle: each has few tiles to spread over its multiprocessors, each is a launch, and each reads the hidden states anew.
One GEMM with the three matrices side by side gives the same numbers from one launch. Training changes only in the order
of rounding. A checkpoint must look like any other, so that the matrices are taken apart again before it is saved. It
works on every GPU and on a CPU.
"""

from itertools import groupby
from typing import NamedTuple

import torch
from torch import library, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert.modeling_bert import eager_attention_forward
from transformers.models.modernbert.modeling_modernbert import ModernBertRotaryEmbedding

from qa_lib.errors import UserError
from qa_lib.kernels.varlen_attention import attach_bias_grad, segment_of, varlen_attention
from qa_lib.model.architectures import encoder_of, layers_of
from qa_lib.model.fused_blocks import HashDropout


class Segments(NamedTuple):
    """Where the samples of a packed sequence lie."""

    cu_seqlens: (
        torch.Tensor
    )  # int32 [segments + 1]: where each segment begins and the last one ends
    # At most so many tokens in each, the same for every packed sequence of a run; with a bias, exactly so many.
    limits: list[int]
    bias: torch.Tensor | None = (
        None  # float32 [tokens], -inf where a segment is padded; for the kernel that wants that
    )


def flash(query, key, value, segments, dropout, scale, window=None):
    """FlashAttention by PyTorch's own op, for sm_80 and newer; fp16 or bf16."""
    ends, longest = segments.cu_seqlens, max(segments.limits)
    return torch.ops.aten._flash_attention_forward(
        query, key, value, ends, ends, longest, longest, dropout, False, False, scale=scale,
        window_size_left=window, window_size_right=window,
    )[0]  # fmt: skip


def efficient(qkv, segments, dropout, scale):
    """PyTorch's memory-efficient kernel, for sm_50 and newer (a T4 is sm_75), over segments that are padded to limits.

    The kernel also takes cu_seqlens, but then its forward pass drops out by another pattern than its backward pass (it
    begins every segment and head at the same random number), and training fails without a word.
    """
    return _efficient(qkv, segments.bias, segments.limits, dropout, scale)[0]


def stack_qkv(query, key, value, qkv=None):
    """Query, key and value [1, heads, tokens, width] as one tensor [tokens, 3, heads, width]: the `qkv` of fused
    projections, of which they are views, or a copy."""
    if qkv is None:
        qkv = torch.stack([part.transpose(1, 2) for part in (query, key, value)], 2)
    return qkv.squeeze(0)  # indexed, it would be copied in the backward pass


def _equal_limits(limits: list[int]) -> list[tuple[slice, tuple[int, int]]]:
    """Neighbouring segments that have the same limit form a run, which one call of the kernel takes. Of each run: its
    slice of the tokens, and the number of its segments and their limit."""
    found, begin = [], 0
    for limit, same in groupby(limits):
        count = len(list(same))
        found.append((slice(begin, begin + count * limit), (count, limit)))
        begin += count * limit
    return found


def _heads_first(tokens: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """A view of [segments x limit, heads, width] as [segments, heads, limit, width]."""
    return tokens.unflatten(0, shape).transpose(1, 2)


def _scores(bias: torch.Tensor, shape: tuple[int, int], heads: int) -> torch.Tensor:
    """The bias of keys [segments x limit] as one of scores [segments, heads, limit, limit]."""
    return bias.view(shape[0], 1, 1, shape[1]).expand(-1, heads, shape[1], -1)


def _logsumexp_length(limit: int) -> int:
    """Entries that the kernel keeps for the softmax of a segment and head."""
    return -(-limit // 32) * 32


_OPTIONS = "Tensor bias, SymInt[] limits, float dropout, float scale"


# Operators of their own, which the compiler does not look into: it would trace a dozen calls in every layer.
@library.custom_op(
    "qa_lib::efficient_attention",
    mutates_args=(),
    tags=(torch.Tag.nondeterministic_seeded,),
    schema=f"(Tensor qkv, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _efficient(qkv, bias, limits, dropout, scale):
    bias, heads = bias.to(qkv.dtype), qkv.shape[2]
    calls = [
        torch.ops.aten._scaled_dot_product_efficient_attention(
            *(_heads_first(t[part], shape) for t in qkv.unbind(1)), _scores(bias[part], shape, heads), True,
            dropout, scale=scale,
        )
        for part, shape in _equal_limits(limits)
    ]  # fmt: skip
    outputs, logsumexps, seeds, offsets = zip(*calls, strict=True)
    output = torch.cat([part.transpose(1, 2).flatten(0, 1) for part in outputs])
    return (
        output,
        torch.cat([t.flatten() for t in logsumexps]),
        torch.stack(seeds),
        torch.stack(offsets),
    )


@_efficient.register_fake
def _(qkv, bias, limits, dropout, scale):
    tokens, _, heads, width = qkv.shape
    logsumexp = qkv.new_empty(heads * sum(map(_logsumexp_length, limits)), dtype=torch.float32)
    random = qkv.new_empty(len(_equal_limits(limits)), dtype=torch.int64)
    return qkv.new_empty(tokens, heads, width), logsumexp, random, random.clone()


@library.custom_op(
    "qa_lib::efficient_attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor qkv, Tensor output, Tensor logsumexp, Tensor seeds, Tensor offsets, "
    f"{_OPTIONS}) -> Tensor",
)
def _efficient_backward(grad, qkv, output, logsumexp, seeds, offsets, bias, limits, dropout, scale):
    """The gradient of `qkv`, [tokens, 3, heads, width]."""
    bias, heads, qkv_grad = bias.to(qkv.dtype), qkv.shape[2], qkv.new_empty(qkv.shape)
    grad, runs = grad.contiguous(), _equal_limits(limits)
    sizes = [heads * count * _logsumexp_length(limit) for _, (count, limit) in runs]
    for (part, shape), sums, seed, offset in zip(
        runs, logsumexp.split(sizes), seeds, offsets, strict=True
    ):
        grads = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            *(_heads_first(t[part], shape) for t in (grad, *qkv.unbind(1))), _scores(bias[part], shape, heads),
            _heads_first(output[part], shape), sums.view(shape[0], heads, -1), seed, offset, dropout,
            [True, True, True, False], scale=scale,
        )[:3]  # fmt: skip
        torch.stack(
            [one.transpose(1, 2) for one in grads], 2, out=qkv_grad[part].unflatten(0, shape)
        )
    return qkv_grad


@_efficient_backward.register_fake
def _(grad, qkv, *_):
    return qkv.new_empty(qkv.shape)


def _setup_context(ctx, inputs, output):
    qkv, bias, *ctx.options = inputs
    ctx.save_for_backward(qkv, *output, bias)


def _backward(ctx, grad, *_):
    return _efficient_backward(grad, *ctx.saved_tensors, *ctx.options), *(None,) * 4


_efficient.register_autograd(_backward, setup_context=_setup_context)


def blockmask(query, key, value, segments, dropout, scale, window=None):
    """SDPA under a mask [tokens, tokens] that is true within segments: any device and dtype, but quadratic."""
    segment = segment_of(segments.cu_seqlens, len(query))
    query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
    mask = segment[:, None] == segment
    if window is not None:
        place = torch.arange(len(segment), device=segment.device)
        mask &= (place[:, None] - place).abs() <= window
    return F.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scale)[
        0
    ].transpose(0, 1)


def _interface(kernel):
    def attention(
        module, query, key, value, attention_mask, dropout=0.0, scaling=None, segments=None, qkv=None, bias=None,
        sliding_window=None, **kwargs,
    ):  # fmt: skip
        """An attention function of transformers: tensors [batch, heads, tokens, width] in, [batch, tokens, heads,
        width] out. A `bias` that is in `qkv` gets its gradient from varlen_attention, whose modules have a HashDropout.
        `sliding_window` counts the token itself and those on one side of it. Batches without segments, as in
        evaluation, are padded ones and go to SDPA."""
        if segments is None:
            return sdpa_attention_forward(
                module,
                query,
                key,
                value,
                attention_mask,
                dropout=dropout,
                scaling=scaling,
                **kwargs,
            )
        if kernel is varlen_attention:
            stacked, (ends, limits, _) = stack_qkv(query, key, value, qkv), segments
            output = varlen_attention(
                stacked, bias, ends, max(limits), module.dropout.seed, dropout, scaling
            )
        elif kernel is efficient:
            output = efficient(stack_qkv(query, key, value, qkv), segments, dropout, scaling)
        else:
            window = None if sliding_window is None else sliding_window - 1
            output = kernel(
                *(t[0].transpose(0, 1) for t in (query, key, value)),
                segments,
                dropout,
                scaling,
                window,
            )
        return output[None], None

    return attention


KERNELS = {
    "flash": flash,
    "efficient": efficient,
    "block-diagonal": blockmask,
    "triton-varlen": varlen_attention,
}


def attention_name(kernel: str) -> str:
    """The name that a kernel for packed sequences has in transformers, which takes any with "flash" in it for its
    own."""
    return "packed-" + kernel.replace("flash", "fa")


for _name, _kernel in KERNELS.items():
    AttentionInterface.register(attention_name(_name), _interface(_kernel))
    AttentionMaskInterface.register(attention_name(_name), sdpa_mask)

# For windows of text, which have no padding: SDPA that is told "causal" and given no mask. For a compiled model
# transformers makes the mask all the same, and with one PyTorch does not take FlashAttention.
UNMASKED = "unmasked"
AttentionInterface.register(UNMASKED, sdpa_attention_forward)
AttentionMaskInterface.register(UNMASKED, lambda *_, **__: None)


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
        self.qkv = nn.Linear(
            parts[0].in_features, sum(part.out_features for part in parts), device="meta"
        )
        self.qkv.weight = nn.Parameter(torch.cat([part.weight.detach() for part in parts]))
        self.qkv.bias = nn.Parameter(torch.cat([part.bias.detach() for part in parts]))
        self.config, self.names = separate.config, names
        self.dropout, self.scaling, self.width = (
            separate.dropout,
            separate.scaling,
            separate.attention_head_size,
        )
        self.is_causal = separate.is_causal
        self.separate = [
            separate.to("meta")
        ]  # without its weights, and in a list, so as not to be a submodule

    def split(self) -> nn.Module:
        """The original module with this one's weights."""
        separate = self.separate[0]
        for name, weight, bias in zip(
            self.names, self.qkv.weight.chunk(3), self.qkv.bias.chunk(3), strict=True
        ):
            part = separate.get_submodule(name)
            part.weight, part.bias = (
                nn.Parameter(weight.detach().clone()),
                nn.Parameter(bias.detach().clone()),
            )
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
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
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
        layer.set_submodule(
            encoder.self_attention, FusedSelfAttention(separate, encoder.projections)
        )


def split_projections(model: nn.Module) -> None:
    """Undo `fuse_projections`, in place; does nothing to other models."""
    name = encoder_of(model).self_attention
    for layer in layers_of(model):
        fused = layer.get_submodule(name)
        if isinstance(fused, FusedSelfAttention):
            layer.set_submodule(name, fused.split())


class ExactRotaryEmbedding(ModernBertRotaryEmbedding):
    """The angles by which queries and keys are turned. Cast to half precision with the rest of a model, its frequencies
    would be rounded, and a token's angle off by a whole radian some hundreds of tokens on; they stay fp32."""

    def _apply(self, fn, recurse=True):
        exact = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, moved in self.named_buffers():
            setattr(self, name, exact[name].to(moved.device))
        return self


def keep_frequencies(model: nn.Module) -> None:
    """Leave the frequencies of rotary embeddings in fp32 whatever the model is cast to, in place."""
    for module in model.modules():
        if isinstance(module, ModernBertRotaryEmbedding):
            module.__class__ = ExactRotaryEmbedding


def use_short_attention(model: nn.Module) -> None:
    """Give the attention of every layer a seed for its dropout, in place, which dropout.renew draws anew, and leave it
    the gradient of fused projections' bias. Raises UserError for heads of a width that the kernel does not take."""
    width = model.config.hidden_size // model.config.num_attention_heads
    if width < 16 or width & (width - 1):
        raise UserError(
            f"attention 'short' takes heads as wide as a power of 2, 16 or more, and not {width}"
        )
    for layer in layers_of(model):
        owner = layer.get_submodule(encoder_of(model).self_attention)
        owner.dropout = HashDropout(owner.dropout.p)
        if isinstance(owner, FusedSelfAttention):
            owner.qkv.__class__ = BiasDeferredLinear
