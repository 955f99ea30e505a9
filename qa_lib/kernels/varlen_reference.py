"""Varlen attention by plain PyTorch, with the dropout of the kernels (varlen_attention.py).

It is what a CPU computes, and what the tests hold the kernels to.
"""

import torch
from torch.nn import functional as F

from qa_lib.kernels.hash_dropout import GOLDEN_INT32, hash32


def reference(qkv, qkv_bias, cu_seqlens, seed, dropout, scale, causal=False, distance_bias=None):
    """Return what varlen_attention returns, by plain PyTorch.

    It holds all scores [heads, tokens, tokens].
    """
    if qkv_bias is not None:
        qkv = attach_bias_grad(qkv, qkv_bias)
    query, key, value = qkv.permute(1, 2, 0, 3)
    segment = segment_of(cu_seqlens, len(qkv))
    hidden = segment[:, None] != segment
    if causal:
        hidden |= torch.ones_like(hidden).triu(1)
    place = torch.arange(len(qkv), device=qkv.device, dtype=torch.int32) - cu_seqlens[segment]
    scores = query @ key.mT * scale
    if distance_bias is not None:
        scores = scores + biases_of_scores(distance_bias.weight, distance_bias.buckets, place)
    p = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
    if dropout:
        kept = dropout_mask(place, qkv.shape[2], seed, dropout)
        p = torch.where(kept, p * dropout_scale(dropout), 0.0)
    return (p @ value).transpose(0, 1)


def segment_of(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return for each of so many `tokens` of a packed sequence the number of its segment."""
    numbers = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:], numbers, right=True)


def biases_of_scores(
    weight: torch.Tensor, buckets: torch.Tensor, place: torch.Tensor
) -> torch.Tensor:
    """Return the biases [heads, tokens, tokens] of scores, by query and key.

    `weight` and `buckets` are those of BiasByDistance; `place` [tokens] is where in its sample each
    token is.
    """
    reach = len(buckets) // 2
    distance = (place - place[:, None]).clamp(-reach, reach)
    return F.embedding(buckets[distance + reach], weight).permute(2, 0, 1)


def attach_bias_grad(qkv: torch.Tensor, qkv_bias: torch.Tensor) -> torch.Tensor:
    """Return `qkv` [..., 3, heads, width] unchanged, so that the bias in it gets its gradient."""
    return qkv + (qkv_bias - qkv_bias.detach()).view(qkv.shape[-3:])


def dropout_mask(place, heads, seed, dropout):
    """Return which scores are kept, bool [heads, tokens, tokens].

    `place`, int32 [tokens], is each token's place in its segment.
    """
    # Tokens eight apart are a pair: the number of each token's pair, and whether it is the second.
    pair = place // 16 * 8 + place % 8
    second = place // 8 % 2
    numbers = torch.arange(heads * len(place), device=place.device, dtype=torch.int32)
    numbers = numbers.view(heads, -1) - place + pair
    seeds = query_seed(numbers, seed)
    bits = hash32(pair, seeds[..., None])
    byte = bits >> (24 - 16 * second[:, None] - 8 * second) & 255
    return byte >= threshold_in_8_bits(dropout)


def query_seed(numbers, seed):
    """Return what seeds the hashes of the keys, for the `numbers` of pairs of queries, int32.

    It is half a hash of the pair's number, since every thread has to compute it for few keys.
    """
    bits = numbers * GOLDEN_INT32 + seed
    return (bits ^ ((bits >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)


def threshold_in_8_bits(dropout: float) -> int:
    """Return the number below which a byte of a hash drops its score."""
    return round(dropout * 2**8)


def dropout_scale(dropout: float) -> float:
    """Return what kept scores are multiplied by."""
    return 1 / (1 - threshold_in_8_bits(dropout) / 2**8)
