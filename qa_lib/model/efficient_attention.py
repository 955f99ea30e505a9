"""PyTorch's memory-efficient attention for packed samples: variants E-packed-efficient and E-t4.

A T4 has no FlashAttention and has this kernel (Rabe and Staats 2021), for which a packed sequence
has a place of fixed length for each sample (data/packing.py). Neighbouring places of one length
share a call of the kernel. Their padding is masked.
"""

from itertools import groupby

import torch
from torch import library

# PyTorch's memory-efficient kernel rounds the number of logsumexp's entries for a segment up to a
# multiple of the block size of its backward pass (kAlignLSE in PyTorch's sources).
LOGSUMEXP_ALIGN = 32


def efficient(qkv, segments, dropout, scale):
    """Attend by PyTorch's memory-efficient kernel, for sm_50 and newer, over padded segments.

    (A T4 is sm_75.) Every segment is padded to its limit. The kernel also takes cu_seqlens, but
    then its forward pass drops out by another pattern than its backward pass (it begins every
    segment and head at the same random number), and training fails without a word.
    """
    outputs = _efficient(qkv, segments.padding_mask, segments.limits, dropout, scale)
    return outputs[0]


def _equal_limits(limits: list[int]) -> list[tuple[slice, tuple[int, int]]]:
    """Return the runs of neighbouring segments that have the same limit.

    One call of the kernel takes a run. For each: the slice of its tokens, and the number of its
    segments with their limit.
    """
    runs = []
    begin = 0
    for limit, group in groupby(limits):
        count = len(list(group))
        end = begin + count * limit
        runs.append((slice(begin, end), (count, limit)))
        begin = end
    return runs


def _heads_first(tokens: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Return a view of [segments x limit, heads, width] as [segments, heads, limit, width]."""
    return tokens.unflatten(0, shape).transpose(1, 2)


def _tokens_first(heads: torch.Tensor) -> torch.Tensor:
    """Return a view of [segments, heads, limit, width] as [segments, limit, heads, width]."""
    return heads.transpose(1, 2)


def _score_mask(padding_mask: torch.Tensor, shape: tuple[int, int], heads: int) -> torch.Tensor:
    """Return the mask of keys [segments x limit] for scores [segments, heads, limit, limit]."""
    segments, limit = shape
    return padding_mask.view(segments, 1, 1, limit).expand(-1, heads, limit, -1)


def _logsumexp_length(limit: int) -> int:
    """Return how many entries the kernel keeps for the softmax of a segment and head."""
    return -(-limit // LOGSUMEXP_ALIGN) * LOGSUMEXP_ALIGN


_OPTIONS = "Tensor padding_mask, SymInt[] limits, float dropout, float scale"


# Operators of their own, which the compiler does not look into: it would trace a dozen calls in
# every layer.
@library.custom_op(
    "qa_lib::efficient_attention",
    mutates_args=(),
    tags=(torch.Tag.nondeterministic_seeded,),
    schema=f"(Tensor qkv, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _efficient(qkv, padding_mask, limits, dropout, scale):
    """Return four tensors: the output, and what the backward pass needs.

    That is the logsumexp of each query, and the seed and the offset by which each run of the kernel
    drew its dropout.
    """
    heads = qkv.shape[2]
    padding_mask = padding_mask.to(qkv.dtype)
    outputs = []
    logsumexps = []
    seeds = []
    offsets = []
    for part, shape in _equal_limits(limits):
        query, key, value = (_heads_first(t[part], shape) for t in qkv.unbind(1))
        output, logsumexp, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention(
            query,
            key,
            value,
            attn_bias=_score_mask(padding_mask[part], shape, heads),
            compute_log_sumexp=True,
            dropout_p=dropout,
            scale=scale,
        )
        outputs.append(output)
        logsumexps.append(logsumexp)
        seeds.append(seed)
        offsets.append(offset)
    return (
        torch.cat([_tokens_first(output).flatten(0, 1) for output in outputs]),
        torch.cat([logsumexp.flatten() for logsumexp in logsumexps]),
        torch.stack(seeds),
        torch.stack(offsets),
    )


@_efficient.register_fake
def _(qkv, padding_mask, limits, dropout, scale):
    tokens, _, heads, width = qkv.shape
    output = qkv.new_empty(tokens, heads, width)
    entries = heads * sum(map(_logsumexp_length, limits))
    logsumexp = qkv.new_empty(entries, dtype=torch.float32)
    seeds = qkv.new_empty(len(_equal_limits(limits)), dtype=torch.int64)
    return output, logsumexp, seeds, seeds.clone()


@library.custom_op(
    "qa_lib::efficient_attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor qkv, Tensor output, Tensor logsumexp, Tensor seeds, "
    f"Tensor offsets, {_OPTIONS}) -> Tensor",
)
def _efficient_backward(
    grad, qkv, output, logsumexp, seeds, offsets, padding_mask, limits, dropout, scale
):
    """Return the gradient of `qkv`, [tokens, 3, heads, width]."""
    heads = qkv.shape[2]
    padding_mask = padding_mask.to(qkv.dtype)
    qkv_grad = qkv.new_empty(qkv.shape)
    grad = grad.contiguous()
    runs = _equal_limits(limits)
    entries = [heads * count * _logsumexp_length(limit) for _, (count, limit) in runs]
    for (part, shape), run_logsumexp, seed, offset in zip(
        runs, logsumexp.split(entries), seeds, offsets, strict=True
    ):
        segments, _ = shape
        output_grad, query, key, value = (
            _heads_first(t[part], shape) for t in (grad, *qkv.unbind(1))
        )
        *qkv_grads, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            output_grad,
            query,
            key,
            value,
            attn_bias=_score_mask(padding_mask[part], shape, heads),
            out=_heads_first(output[part], shape),
            logsumexp=run_logsumexp.view(segments, heads, -1),
            philox_seed=seed,
            philox_offset=offset,
            dropout_p=dropout,
            grad_input_mask=[True, True, True, False],
            scale=scale,
        )
        out = qkv_grad[part].unflatten(0, shape)
        torch.stack([_tokens_first(part_grad) for part_grad in qkv_grads], 2, out=out)
    return qkv_grad


@_efficient_backward.register_fake
def _(grad, qkv, *_):
    return qkv.new_empty(qkv.shape)


def _setup_context(ctx, inputs, output):
    qkv, padding_mask, *ctx.options = inputs
    ctx.save_for_backward(qkv, *output, padding_mask)


def _backward(ctx, grad, *_):
    qkv_grad = _efficient_backward(grad, *ctx.saved_tensors, *ctx.options)
    return qkv_grad, None, None, None, None


_efficient.register_autograd(_backward, setup_context=_setup_context)
