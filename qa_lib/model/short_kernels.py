"""The two Triton kernels behind model/short.py, which says what they compute and why.

A program has one block of tokens of one head of one segment. Grids are (blocks, heads, segments), for as many blocks
as the longest segment may have; a program beyond its segment's end leaves at once. Pointers are those of contiguous
tensors: product and its gradient [tokens, 3, HEADS, WIDTH], query, key and value beside each other; output and its
gradient [tokens, HEADS, WIDTH]; logsumexp and row_sums [HEADS, tokens]; ends [segments + 1]; sums [segments, blocks, 3,
HEADS, WIDTH].
"""

import triton
import triton.language as tl

# Tiles and threads. An H200's multiprocessor holds five programs of the first and three of the second at a time. For
# heads 64 wide and with dropout no register spills (by the compiler's word).
FORWARD = {"QUERIES": 64, "KEYS": 32, "num_warps": 4, "num_stages": 3}
BACKWARD = {"BLOCK": 64, "STEP": 32, "num_warps": 4, "num_stages": 3, "maxnreg": 168}


@triton.jit
def hashed(numbers, seed):
    """As dropout.hashed, in unsigned numbers."""
    bits = ((numbers ^ (numbers >> 16)) + seed) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def rows_of(rows, head, tokens, seed):
    """As short.rows_of, for these rows."""
    bits = (head * tokens + rows).to(tl.uint32) * 0x9E3779B1 + tl.load(seed).to(tl.uint32, bitcast=True)
    return (bits ^ (bits >> 15)) * 0x846CA68B


@triton.jit
def pairs(KEYS: tl.constexpr):
    """Keys eight apart share a hash: of KEYS keys the number of each pair, and by how many bits to shift its hash."""
    EIGHTS: tl.constexpr = KEYS // 16
    number = 8 * tl.arange(0, EIGHTS)[:, None, None] + tl.arange(0, 8)
    shift = 16 * tl.arange(0, 2)[None, :, None]
    return (
        tl.broadcast_to(number, (EIGHTS, 2, 8)).reshape(KEYS).to(tl.uint32),
        tl.broadcast_to(shift, (EIGHTS, 2, 8)).reshape(KEYS),
    )


@triton.jit
def factors(rows, first, number, shift, threshold, keeps):
    """What dropout multiplies shares with, `keeps` or 0: for `rows` of rows_of and pairs from key `first` of the
    segment on, both of which broadcast."""
    return tl.where((hashed(first // 2 + number, rows) << shift) >= (threshold << 16).to(tl.uint32), keeps, 0.0)


@triton.jit
def task_of(ends):
    """What this program does: the number of its block, its head, and where its segment begins and how long it is."""
    segment = tl.program_id(2)
    begin = tl.load(ends + segment)
    return tl.program_id(0), tl.program_id(1), begin, tl.load(ends + segment + 1) - begin


@triton.jit(do_not_specialize=["threshold"])
def attention_short_forward(
    product, output, logsumexp, ends, seed, tokens, scale, threshold, keeps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Of QUERIES queries: output, and the logarithm to base 2 of the sum of their exponentials. `scale` is that of the
    scores times log2(e), `keeps` is 1 / (1 - rate)."""
    block, head, begin, length = task_of(ends)
    if block * QUERIES >= length:
        return
    STRIDE: tl.constexpr = 3 * HEADS * WIDTH
    queries = block * QUERIES + tl.arange(0, QUERIES)
    keys = tl.arange(0, KEYS)
    width = tl.arange(0, WIDTH)
    rows = rows_of(begin + queries, head, tokens, seed)
    here = product + begin * STRIDE + head * WIDTH
    query = tl.load(here + queries[:, None] * STRIDE + width, mask=queries[:, None] < length, other=0.0)
    key_at = here + HEADS * WIDTH + keys[:, None] * STRIDE + width

    number, shift = pairs(KEYS)
    most = tl.full([QUERIES], float("-inf"), tl.float32)
    sums = tl.zeros([QUERIES], tl.float32)
    gathered = tl.zeros([QUERIES, WIDTH], tl.float32)
    for first in range(0, length, KEYS):
        inside = first + keys < length
        key = tl.load(key_at, mask=inside[:, None], other=0.0)
        value = tl.load(key_at + HEADS * WIDTH, mask=inside[:, None], other=0.0)
        scores = tl.where(inside, tl.dot(query, key.T, input_precision="ieee"), float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1) * scale)
        shares = tl.exp2(scores * scale - larger[:, None])
        shrink = tl.exp2(most - larger)
        sums = sums * shrink + tl.sum(shares, 1)
        if DROPS:
            shares *= factors(rows[:, None], first, number[None, :], shift[None, :], threshold, keeps)
        gathered = tl.dot(shares.to(value.dtype), value, gathered * shrink[:, None], input_precision="ieee")
        most = larger
        key_at += KEYS * STRIDE
    gathered *= (1 / sums)[:, None]
    inside = queries < length
    out_at = output + (begin + queries[:, None]) * (HEADS * WIDTH) + head * WIDTH + width
    tl.store(out_at, gathered.to(output.dtype.element_ty), mask=inside[:, None])
    tl.store(logsumexp + head * tokens + begin + queries, most + tl.log2(sums), mask=inside)


@triton.jit(do_not_specialize=["threshold"])
def attention_short_backward(
    grad, product, row_sums, logsumexp, ends, seed, product_grad, sums, tokens, scale, threshold, keeps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, DROPS: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """Of BLOCK tokens: the gradients of their keys and values, over STEP queries at a time, and then those of their
    queries, over STEP keys at a time; and, where SUMS says so, the sums of each over the tokens, in `sums`."""
    block, head, begin, length = task_of(ends)
    STRIDE: tl.constexpr = 3 * HEADS * WIDTH
    PART: tl.constexpr = HEADS * WIDTH
    width = tl.arange(0, WIDTH)
    sums_at = sums + (tl.program_id(2) * tl.num_programs(0) + block) * STRIDE + head * WIDTH + width
    if block * BLOCK >= length:
        if SUMS:
            for part in tl.static_range(3):
                tl.store(sums_at + part * PART, tl.zeros([WIDTH], tl.float32))
        return
    own = block * BLOCK + tl.arange(0, BLOCK)
    others = tl.arange(0, STEP)
    inside = own < length
    base2 = scale * 1.4426950408889634
    here = product + begin * STRIDE + head * WIDTH
    own_at = here + own[:, None] * STRIDE + width
    others_at = here + others[:, None] * STRIDE + width
    grad_at = grad + begin * PART + head * WIDTH + width
    per_query = head * tokens + begin

    number, shift = pairs(STEP)
    own_number, own_shift = pairs(BLOCK)
    # Scores here are [keys, queries].
    key = tl.load(own_at + PART, mask=inside[:, None], other=0.0)
    value = tl.load(own_at + 2 * PART, mask=inside[:, None], other=0.0)
    key_grad = tl.zeros([BLOCK, WIDTH], tl.float32)
    value_grad = tl.zeros([BLOCK, WIDTH], tl.float32)
    for first in range(0, length, STEP):
        queries = first + others
        there = queries < length
        query = tl.load(others_at + first * STRIDE, mask=there[:, None], other=0.0)
        output_grad = tl.load(grad_at + queries[:, None] * PART, mask=there[:, None], other=0.0)
        # A query beyond the end has zeros here, and so have its products: it adds nothing.
        log_sum = tl.load(logsumexp + per_query + queries, mask=there, other=0.0)
        row_sum = tl.load(row_sums + per_query + queries, mask=there, other=0.0)
        shares = tl.exp2(tl.dot(key, query.T, input_precision="ieee") * base2 - log_sum[None, :])
        share_grad = tl.dot(value, output_grad.T, input_precision="ieee")
        shares_kept = shares
        if DROPS:
            seeds = rows_of(begin + queries, head, tokens, seed)
            factor = factors(seeds[None, :], block * BLOCK, own_number[:, None], own_shift[:, None], threshold, keeps)
            shares_kept = shares * factor
            share_grad *= factor
        value_grad = tl.dot(shares_kept.to(query.dtype), output_grad, value_grad, input_precision="ieee")
        score_grad = shares * (share_grad - row_sum[None, :])
        key_grad = tl.dot(score_grad.to(query.dtype), query, key_grad, input_precision="ieee")
    out_at = product_grad + begin * STRIDE + head * WIDTH + own[:, None] * STRIDE + width
    kind = product_grad.dtype.element_ty
    key_grad *= scale
    tl.store(out_at + PART, key_grad.to(kind), mask=inside[:, None])
    tl.store(out_at + 2 * PART, value_grad.to(kind), mask=inside[:, None])
    if SUMS:  # keys and values beyond the end have gradients here, which are not stored; queries below have none
        tl.store(sums_at + PART, tl.sum(tl.where(inside[:, None], key_grad, 0.0), 0))
        tl.store(sums_at + 2 * PART, tl.sum(tl.where(inside[:, None], value_grad, 0.0), 0))

    # And here [queries, keys].
    own_query = tl.load(own_at, mask=inside[:, None], other=0.0)
    own_grad = tl.load(grad_at + own[:, None] * PART, mask=inside[:, None], other=0.0)
    own_sum = tl.load(logsumexp + per_query + own, mask=inside, other=0.0)
    own_row_sum = tl.load(row_sums + per_query + own, mask=inside, other=0.0)
    rows = rows_of(begin + own, head, tokens, seed)
    query_grad = tl.zeros([BLOCK, WIDTH], tl.float32)
    for first in range(0, length, STEP):
        there = first + others < length
        other_key = tl.load(others_at + first * STRIDE + PART, mask=there[:, None], other=0.0)
        other_value = tl.load(others_at + first * STRIDE + 2 * PART, mask=there[:, None], other=0.0)
        scores = tl.where(there, tl.dot(own_query, other_key.T, input_precision="ieee"), float("-inf"))
        shares = tl.exp2(scores * base2 - own_sum[:, None])
        share_grad = tl.dot(own_grad, other_value.T, input_precision="ieee")
        if DROPS:
            share_grad *= factors(rows[:, None], first, number[None, :], shift[None, :], threshold, keeps)
        score_grad = shares * (share_grad - own_row_sum[:, None])
        query_grad = tl.dot(score_grad.to(other_key.dtype), other_key, query_grad, input_precision="ieee")
    query_grad *= scale
    tl.store(out_at, query_grad.to(kind), mask=inside[:, None])
    if SUMS:
        tl.store(sums_at, tl.sum(query_grad, 0))
