"""Attention within the segments of a packed sequence, by whichever kernel the GPU has.

A packed sequence holds many samples, and a token must attend to its own sample's tokens alone. A
mask over the whole sequence would do that and cost as much as attention over all of it: quadratic
in its length. FlashAttention (Dao et al. 2022, 2023) is told where segments end, computes nothing
across them, and never writes the scores to memory: variant E-packed. A T4 lacks it and has
PyTorch's memory-efficient kernel (efficient_attention.py). A CPU takes the mask. A kernel of our
own for short segments is in kernels/varlen_attention.py, variant E-varlen. The kernels of padded
batches, eager in A1 and SDPA in A2, are transformers' and PyTorch's.

Kernels here take query, key and value [tokens, heads, width], `Segments`, dropout and the scale of
the scores; those for fused projections take the three as one tensor [tokens, 3, heads, width].
ModernBERT's local layers have a `window` as well: a token attends to so many tokens on either side
of it, in its segment.

They are registered with transformers when this module is imported. Whoever builds a model whose
attention has one of their names (`attention_name`, QUICKEST, UNMASKED) imports it, therefore.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from qa_lib.kernels.varlen_attention import BiasByDistance, varlen_attention
from qa_lib.kernels.varlen_reference import biases_of_scores, segment_of
from qa_lib.model.efficient_attention import efficient
from qa_lib.model.hash_dropout import HashDropout


class Segments(NamedTuple):
    """Where the samples of a packed sequence lie."""

    # int32 [segments + 1]: where each segment begins and the last one ends.
    cu_seqlens: torch.Tensor
    # At most so many tokens in each segment, the same for every packed sequence of a run. With a
    # padding mask, exactly so many.
    limits: list[int]
    # float32 [tokens], -inf where a segment is padded; for the kernel that wants that.
    padding_mask: torch.Tensor | None = None
    # The bias of scores by distance, in a model that has one.
    distance_bias: BiasByDistance | None = None


# The kernels.


def flash(query, key, value, segments, dropout, scale, window=None):
    """Attend by FlashAttention, PyTorch's own op, for sm_80 and newer; fp16 or bf16."""
    longest = max(segments.limits)
    outputs = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        cum_seq_q=segments.cu_seqlens,
        cum_seq_k=segments.cu_seqlens,
        max_q=longest,
        max_k=longest,
        dropout_p=dropout,
        is_causal=False,
        return_debug_mask=False,
        scale=scale,
        window_size_left=window,
        window_size_right=window,
    )
    return outputs[0]


def blockmask(query, key, value, segments, dropout, scale, window=None):
    """Attend by SDPA under a mask [tokens, tokens] that is true within segments.

    It works on any device, in any type and with a bias by distance, but takes quadratic time.
    """
    segment = segment_of(segments.cu_seqlens, len(query))
    mask = segment[:, None] == segment
    if window is not None:
        place = torch.arange(len(segment), device=segment.device)
        mask &= (place[:, None] - place).abs() <= window
    if segments.distance_bias is not None:
        place = torch.arange(len(segment), device=segment.device) - segments.cu_seqlens[segment]
        distance_bias = segments.distance_bias
        biases = biases_of_scores(distance_bias.weight, distance_bias.buckets, place)
        mask = biases.masked_fill(~mask, -torch.inf).to(query.dtype)
    query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
    output = F.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scale)
    return output[0].transpose(0, 1)


def stack_qkv(query, key, value, qkv=None):
    """Return query, key and value [1, heads, tokens, width] as one [tokens, 3, heads, width].

    With fused projections the three are views of `qkv`, which is returned; without, it is a copy.
    """
    if qkv is None:
        qkv = torch.stack([part.transpose(1, 2) for part in (query, key, value)], 2)
    return qkv.squeeze(0)  # indexed, it would be copied in the backward pass


# Their registration with transformers.


def _interface(kernel):
    """Return the attention function of transformers that calls a kernel for packed sequences."""

    def attention(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=0.0,
        scaling=None,
        segments=None,
        qkv=None,
        qkv_bias=None,
        sliding_window=None,
        **kwargs,
    ):
        """Attend for tensors [1, heads, tokens, width]; return [1, tokens, heads, width] and None.

        `qkv_bias`, which is in `qkv` already, gets its gradient from varlen_attention, whose
        modules have a HashDropout. `sliding_window` counts the token itself and those on one side
        of it. Batches without segments, which evaluation has, are padded ones and go to SDPA.
        """
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
            output = varlen_attention(
                stack_qkv(query, key, value, qkv),
                qkv_bias,
                segments.cu_seqlens,
                longest=max(segments.limits),
                seed=module.dropout.seed,
                dropout=dropout,
                scale=scaling,
                distance_bias=segments.distance_bias,
            )
        elif kernel is efficient:
            output = efficient(stack_qkv(query, key, value, qkv), segments, dropout, scaling)
        else:
            window = None if sliding_window is None else sliding_window - 1
            query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))
            output = kernel(query, key, value, segments, dropout, scaling, window)
        return output[None], None

    return attention


KERNELS = {
    "flash": flash,
    "efficient": efficient,
    "block-diagonal": blockmask,
    "triton-varlen": varlen_attention,
}


def attention_name(kernel: str) -> str:
    """Return the name that a kernel for packed sequences has in transformers.

    transformers takes any name with "flash" in it for one of its own.
    """
    return "packed-" + kernel.replace("flash", "fa")


_INTERFACES = {name: _interface(kernel) for name, kernel in KERNELS.items()}
for _name, _function in _INTERFACES.items():
    AttentionInterface.register(attention_name(_name), _function)
    AttentionMaskInterface.register(attention_name(_name), sdpa_mask)


def quickest_kernel(
    module: nn.Module, query: torch.Tensor, segments: Segments | None = None
) -> str:
    """Return the name of the quickest kernel for packed sequences that takes this query.

    `module` is the self-attention. It has a HashDropout where the model was prepared for our own
    kernel, which a CPU computes in plain PyTorch. FlashAttention takes no bias by distance, which
    `segments` may have.
    """
    is_prepared = isinstance(getattr(module, "dropout", None), HashDropout)
    if query.is_cuda:
        is_half = query.dtype in (torch.float16, torch.bfloat16)
        # PyTorch's compiler can trace this call, and not get_device_capability.
        if not is_half or torch.cuda.get_device_properties(query.device).major < 8:
            return "block-diagonal"
        if is_prepared:
            return "triton-varlen"
        has_distance_bias = segments is not None and segments.distance_bias is not None
        return "block-diagonal" if has_distance_bias else "flash"
    return "triton-varlen" if is_prepared else "block-diagonal"


def _quickest(module, query, *args, segments=None, **kwargs):
    """Attend as `_interface` says, by whichever kernel is the quickest for this query."""
    kernel = _INTERFACES[quickest_kernel(module, query, segments)]
    return kernel(module, query, *args, segments=segments, **kwargs)


# For a model that takes padded batches and packed sequences of any type, on any device.
QUICKEST = attention_name("quickest")
AttentionInterface.register(QUICKEST, _quickest)
AttentionMaskInterface.register(QUICKEST, sdpa_mask)


# For windows of text, which have no padding: SDPA that is told "causal" and given no mask. For a
# compiled model transformers makes the mask all the same, and with one PyTorch does not take
# FlashAttention.
UNMASKED = "unmasked"
AttentionInterface.register(UNMASKED, sdpa_attention_forward)
AttentionMaskInterface.register(UNMASKED, lambda *_, **__: None)
