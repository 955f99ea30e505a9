"""The forward pass of varlen attention, by blocks of keys (varlen_attention.py says why).

varlen_device.py says how tensors lie in memory.
"""

from qa_lib.kernels.common import jit, tl
from qa_lib.kernels.fp8 import in_8_bits
from qa_lib.kernels.varlen_device import (
    distance_bias,
    dropout_keeps,
    pairs,
    query_seed_kernel,
    segment_of_program,
)

# Tiles and threads. An H200's multiprocessor holds five programs at a time. For heads 64 wide, with
# dropout and without a bias by distance, no register spills (by the compiler's word).
FORWARD = {"QUERIES": 64, "KEYS": 32, "num_warps": 4, "num_stages": 3}
# Causal attention has longer segments. Its KEYS must divide QUERIES.
CAUSAL_FORWARD = {"QUERIES": 64, "KEYS": 64, "num_warps": 4, "num_stages": 3}


@jit(do_not_specialize=["threshold"])
def varlen_attention_forward(
    qkv,
    output,
    output8,
    logsumexp,
    cu_seqlens,
    seed,
    table,
    tokens,
    scale_log2,
    threshold,
    kept_scale,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DROPS: tl.constexpr,
    CAUSAL: tl.constexpr,
    REACH: tl.constexpr,
    FACTOR: tl.constexpr,
    MAX: tl.constexpr,
):
    """Compute the output and logsumexp of QUERIES queries."""
    block, head, begin, length = segment_of_program(cu_seqlens)
    if block * QUERIES >= length:
        return
    PART: tl.constexpr = HEADS * WIDTH
    query_token = block * QUERIES + tl.arange(0, QUERIES)
    inside = query_token < length
    width = tl.arange(0, WIDTH)
    pair, second = pairs(QUERIES)
    seeds = query_seed_kernel(begin + block * (QUERIES // 2) + pair, head, tokens, seed)
    segment_at = qkv + begin * (3 * PART) + head * WIDTH
    query_at = segment_at + query_token[:, None] * (3 * PART) + width
    query = tl.load(query_at, mask=inside[:, None], other=0.0)
    key_at = segment_at + PART + tl.arange(0, KEYS)[:, None] * (3 * PART) + width

    acc = tl.zeros([QUERIES, WIDTH], tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    # Every query of the block sees the keys before `seen_by_all`, and none those from `last` on.
    last = tl.minimum(length, (block + 1) * QUERIES) if CAUSAL else length
    seen_by_all = block * QUERIES if CAUSAL else length
    acc, total, highest = attend(
        acc=acc,
        total=total,
        highest=highest,
        query=query,
        query_token=query_token,
        key_at=key_at,
        seeds=seeds,
        second=second,
        table=table,
        head=head,
        first=0,
        last=seen_by_all,
        length=length,
        scale_log2=scale_log2,
        threshold=threshold,
        PART=PART,
        KEYS=KEYS,
        DROPS=DROPS,
        ENDS=not CAUSAL,
        CAUSAL=False,
        REACH=REACH,
    )
    if CAUSAL:
        # The same for the keys on the diagonal: another first and last, with ENDS and CAUSAL.
        acc, total, highest = attend(
            acc=acc,
            total=total,
            highest=highest,
            query=query,
            query_token=query_token,
            key_at=key_at,
            seeds=seeds,
            second=second,
            table=table,
            head=head,
            first=seen_by_all,
            last=last,
            length=length,
            scale_log2=scale_log2,
            threshold=threshold,
            PART=PART,
            KEYS=KEYS,
            DROPS=DROPS,
            ENDS=True,
            CAUSAL=True,
            REACH=REACH,
        )
    acc *= (kept_scale / total)[:, None]
    output_at = output + (begin + query_token[:, None]) * PART + head * WIDTH + width
    rounded = acc.to(output.dtype.element_ty)
    tl.store(output_at, rounded, mask=inside[:, None])
    if FACTOR != 0.0:
        output8_at = output8 + (begin + query_token[:, None]) * PART + head * WIDTH + width
        rounded8 = in_8_bits(rounded, FACTOR, MAX, output8.dtype.element_ty)
        tl.store(output8_at, rounded8, mask=inside[:, None])
    logsumexp_at = logsumexp + head * tokens + begin + query_token
    tl.store(logsumexp_at, highest + tl.log2(total), mask=inside)


@jit
def attend(
    acc,
    total,
    highest,
    query,
    query_token,
    key_at,
    seeds,
    second,
    table,
    head,
    first,
    last,
    length,
    scale_log2,
    threshold,
    PART: tl.constexpr,
    KEYS: tl.constexpr,
    DROPS: tl.constexpr,
    ENDS: tl.constexpr,
    CAUSAL: tl.constexpr,
    REACH: tl.constexpr,
):
    """Take the keys from `first` to `last` into the queries' running results, and return these.

    They are the output `acc`, the sum of exponentials `total` and the `highest` score. With ENDS
    some keys may lie beyond the end, and if CAUSAL after a query.
    """
    key_pair, second_key = pairs(KEYS)
    shift = 16 * second[:, None] + 8 * second_key[None, :]
    for first_key in tl.range(first, last, KEYS):
        key_token = first_key + tl.arange(0, KEYS)
        keys_at = key_at + first_key * (3 * PART)
        if ENDS:
            inside = key_token[:, None] < length
            key = tl.load(keys_at, mask=inside, other=0.0)
            value = tl.load(keys_at + PART, mask=inside, other=0.0)
        else:
            key = tl.load(keys_at)
            value = tl.load(keys_at + PART)
        scores = tl.dot(query, key.T, input_precision="ieee")
        if REACH:
            distance = key_token - query_token[:, None]
            scores += distance_bias(table, head, distance, REACH) * (1 / scale_log2)
        if ENDS:
            seen = key_token <= query_token[:, None] if CAUSAL else key_token < length
            scores = tl.where(seen, scores, float("-inf"))
        next_highest = tl.maximum(highest, tl.max(scores, 1) * scale_log2)
        p = tl.exp2(scores * scale_log2 - next_highest[:, None])
        correction = tl.exp2(highest - next_highest)
        total = total * correction + tl.sum(p, 1)
        if DROPS:
            pair_of_keys = first_key // 2 + key_pair[None, :]
            p = tl.where(dropout_keeps(seeds[:, None], pair_of_keys, shift, threshold), p, 0.0)
        acc = tl.dot(p.to(value.dtype), value, acc * correction[:, None], input_precision="ieee")
        highest = next_highest
    return acc, total, highest
