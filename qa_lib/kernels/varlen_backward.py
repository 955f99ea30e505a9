"""The backward pass of varlen attention: delta, and the gradients of queries, keys and values.

varlen_attention.py says why they are computed so, varlen_device.py how tensors lie in memory.
"""

from qa_lib.kernels.common import KERNEL_LOG2_E, jit, tl
from qa_lib.kernels.fp8 import in_8_bits
from qa_lib.kernels.varlen_device import (
    distance_bias,
    dropout_keeps,
    ds_of_segment,
    pairs,
    query_seed_kernel,
    segment_of_program,
)

# Tiles and threads. An H200's multiprocessor holds three programs at a time. For heads 64 wide,
# with dropout and without a bias by distance, no register spills (by the compiler's word). In
# causal attention STEP must divide BLOCK.
BACKWARD = {"BLOCK": 64, "STEP": 32, "num_warps": 4, "num_stages": 3, "maxnreg": 168}
DELTA = {"TOKENS": 64, "num_warps": 4}


@jit
def delta_kernel(
    grad,
    output,
    delta,
    tokens,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Compute rowsum(dO * O) of TOKENS tokens of one head; the grid is (parts of tokens, heads)."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    offset = (token[:, None] * HEADS + head) * WIDTH + tl.arange(0, WIDTH)
    inside = token[:, None] < tokens
    product = tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
    product *= tl.load(output + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(delta + head * tokens + token, tl.sum(product, 1), mask=token < tokens)


@jit(do_not_specialize=["threshold"])
def varlen_attention_backward(
    grad,
    qkv,
    delta,
    logsumexp,
    cu_seqlens,
    seed,
    qkv_grad,
    qkv_grad8,
    ds,
    partials,
    table,
    tokens,
    scale,
    threshold,
    kept_scale,
    span,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    DROPS: tl.constexpr,
    SUMS: tl.constexpr,
    CAUSAL: tl.constexpr,
    REACH: tl.constexpr,
    FACTOR: tl.constexpr,
    MAX: tl.constexpr,
):
    """Compute the gradients of BLOCK tokens.

    First come those of their keys and values, over STEP queries at a time, then those of their
    queries, over STEP keys at a time. With SUMS, the sums of each over the tokens go into
    `partials`, and zeros for a block beyond the end.

    If `ds` is not None, the gradients of the scores of these keys go there, and those of queries
    are left to attention_query_backward.
    """
    block, head, begin, length = segment_of_program(cu_seqlens)
    PART: tl.constexpr = HEADS * WIDTH
    width = tl.arange(0, WIDTH)
    row_of_partials = tl.program_id(2) * tl.num_programs(0) + block
    partials_at = partials + row_of_partials * (3 * PART) + head * WIDTH + width
    if block * BLOCK >= length:
        if SUMS:
            for part in tl.static_range(3):
                tl.store(partials_at + part * PART, tl.zeros([WIDTH], tl.float32))
        return
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < length
    segment_at = qkv + begin * (3 * PART) + head * WIDTH
    block_at = segment_at + token[:, None] * (3 * PART) + width
    step_at = segment_at + tl.arange(0, STEP)[:, None] * (3 * PART) + width
    grad_at = grad + begin * PART + head * WIDTH + width
    dtype: tl.constexpr = qkv.dtype.element_ty
    row_offset = head * tokens + begin  # of the segment's numbers in logsumexp and delta
    ds_at = None
    if ds is not None:
        ds_at = ds_of_segment(ds, head, begin, tokens, span)
        ds_at += token[:, None] * span + tl.arange(0, STEP)

    scale_log2 = scale * KERNEL_LOG2_E
    dk, dv = key_value_grads(
        block_at=block_at,
        step_at=step_at,
        grad_at=grad_at,
        ds_at=ds_at,
        logsumexp=logsumexp + row_offset,
        delta=delta + row_offset,
        seed=seed,
        table=table,
        token=token,
        inside=inside,
        block=block,
        head=head,
        begin=begin,
        length=length,
        tokens=tokens,
        scale_log2=scale_log2,
        threshold=threshold,
        kept_scale=kept_scale,
        PART=PART,
        WIDTH=WIDTH,
        BLOCK=BLOCK,
        STEP=STEP,
        DROPS=DROPS,
        CAUSAL=CAUSAL,
        REACH=REACH,
    )
    dk *= scale
    # Computed here and not above, where it would hold registers that then spill.
    segment_offset = begin * (3 * PART) + head * WIDTH
    token_offset = token[:, None] * (3 * PART) + width
    if qkv_grad is not None:
        qkv_grad_at = qkv_grad + segment_offset + token_offset
        tl.store(qkv_grad_at + PART, dk.to(dtype), mask=inside[:, None])
        tl.store(qkv_grad_at + 2 * PART, dv.to(dtype), mask=inside[:, None])
    if FACTOR != 0.0:
        qkv_grad8_at = qkv_grad8 + segment_offset + token_offset
        # Both are converted before either is stored: in another order registers spill.
        dk8 = in_8_bits(dk.to(dtype), FACTOR, MAX, qkv_grad8.dtype.element_ty)
        dv8 = in_8_bits(dv.to(dtype), FACTOR, MAX, qkv_grad8.dtype.element_ty)
        tl.store(qkv_grad8_at + PART, dk8, mask=inside[:, None])
        tl.store(qkv_grad8_at + 2 * PART, dv8, mask=inside[:, None])
    if SUMS:
        # Keys and values beyond the end have gradients here, which are not stored; queries, below,
        # have none.
        tl.store(partials_at + PART, tl.sum(tl.where(inside[:, None], dk, 0.0), 0))
        tl.store(partials_at + 2 * PART, tl.sum(tl.where(inside[:, None], dv, 0.0), 0))

    if ds is None:
        # The arguments of key_value_grads, without ds_at, table and REACH.
        dq = query_grads(
            block_at=block_at,
            step_at=step_at,
            grad_at=grad_at,
            logsumexp=logsumexp + row_offset,
            delta=delta + row_offset,
            seed=seed,
            token=token,
            inside=inside,
            block=block,
            head=head,
            begin=begin,
            length=length,
            tokens=tokens,
            scale_log2=scale_log2,
            threshold=threshold,
            kept_scale=kept_scale,
            PART=PART,
            WIDTH=WIDTH,
            BLOCK=BLOCK,
            STEP=STEP,
            DROPS=DROPS,
            CAUSAL=CAUSAL,
        )
        store_query_grads(
            dq=dq * scale,
            qkv_grad=qkv_grad,
            qkv_grad8=qkv_grad8,
            partials_at=partials_at,
            segment_offset=segment_offset,
            token_offset=token_offset,
            inside=inside,
            dtype=dtype,
            SUMS=SUMS,
            FACTOR=FACTOR,
            MAX=MAX,
        )


@jit
def key_value_grads(
    block_at,
    step_at,
    grad_at,
    ds_at,
    logsumexp,
    delta,
    seed,
    table,
    token,
    inside,
    block,
    head,
    begin,
    length,
    tokens,
    scale_log2,
    threshold,
    kept_scale,
    PART: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    DROPS: tl.constexpr,
    CAUSAL: tl.constexpr,
    REACH: tl.constexpr,
):
    """Return dK, but for the scale, and dV [BLOCK, WIDTH], over all queries of the segment.

    `ds_at`, if it is not None, is where the gradients of scores with the first queries go.
    `logsumexp` and `delta` point to the segment's first query.
    """
    key = tl.load(block_at + PART, mask=inside[:, None], other=0.0)
    value = tl.load(block_at + 2 * PART, mask=inside[:, None], other=0.0)
    dk = tl.zeros([BLOCK, WIDTH], tl.float32)
    dv = tl.zeros([BLOCK, WIDTH], tl.float32)
    sees_all = 0  # the first query that sees all keys of the block
    if CAUSAL:
        sees_all = tl.minimum((block + 1) * BLOCK, length)
        dk, dv = add_queries(
            dk=dk,
            dv=dv,
            key=key,
            value=value,
            step_at=step_at,
            grad_at=grad_at,
            ds_at=ds_at,
            logsumexp=logsumexp,
            delta=delta,
            seed=seed,
            table=table,
            token=token,
            block=block,
            head=head,
            begin=begin,
            first=block * BLOCK,
            last=sees_all,
            length=length,
            tokens=tokens,
            scale_log2=scale_log2,
            threshold=threshold,
            kept_scale=kept_scale,
            PART=PART,
            BLOCK=BLOCK,
            STEP=STEP,
            DROPS=DROPS,
            CAUSAL=True,
            REACH=REACH,
        )
    # The same call with another first, last and CAUSAL: from here on queries see all of the keys.
    dk, dv = add_queries(
        dk=dk,
        dv=dv,
        key=key,
        value=value,
        step_at=step_at,
        grad_at=grad_at,
        ds_at=ds_at,
        logsumexp=logsumexp,
        delta=delta,
        seed=seed,
        table=table,
        token=token,
        block=block,
        head=head,
        begin=begin,
        first=sees_all,
        last=length,
        length=length,
        tokens=tokens,
        scale_log2=scale_log2,
        threshold=threshold,
        kept_scale=kept_scale,
        PART=PART,
        BLOCK=BLOCK,
        STEP=STEP,
        DROPS=DROPS,
        CAUSAL=False,
        REACH=REACH,
    )
    return dk, dv * kept_scale


@jit
def add_queries(
    dk,
    dv,
    key,
    value,
    step_at,
    grad_at,
    ds_at,
    logsumexp,
    delta,
    seed,
    table,
    token,
    block,
    head,
    begin,
    first,
    last,
    length,
    tokens,
    scale_log2,
    threshold,
    kept_scale,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    DROPS: tl.constexpr,
    CAUSAL: tl.constexpr,
    REACH: tl.constexpr,
):
    """Add to dK and dV what the queries from `first` to `last` give, and return these.

    Scores are [keys, queries] here. `token` are those of the keys. A whole step is stored at
    `ds_at`, with zeros for queries beyond the end.
    """
    BEYOND: tl.constexpr = float("inf") if REACH else 0.0
    pair, second = pairs(STEP)
    key_pair, second_key = pairs(BLOCK)
    shift = 16 * second[None, :] + 8 * second_key[:, None]
    for first_query in tl.range(first, last, STEP):
        query_token = first_query + tl.arange(0, STEP)
        inside = query_token < length
        query = tl.load(step_at + first_query * (3 * PART), mask=inside[:, None], other=0.0)
        do = tl.load(grad_at + query_token[:, None] * PART, mask=inside[:, None], other=0.0)
        # A query beyond the end is read as zeros, and so are its products: it adds nothing. A bias
        # could be too large for its powers, which an infinite sum makes 0.
        query_logsumexp = tl.load(logsumexp + query_token, mask=inside, other=BEYOND)
        query_delta = tl.load(delta + query_token, mask=inside, other=0.0)
        scores = tl.dot(key, query.T, input_precision="ieee")
        if REACH:
            distance = token[:, None] - query_token[None, :]
            bias = distance_bias(table, head, distance, REACH)
            p = tl.exp2(scores * scale_log2 + (bias - query_logsumexp[None, :]))
        else:
            p = tl.exp2(scores * scale_log2 - query_logsumexp[None, :])
        if CAUSAL:
            p = tl.where(query_token[None, :] >= token[:, None], p, 0.0)
        dp = tl.dot(value, do.T, input_precision="ieee")
        p_kept = p
        if DROPS:
            seeds = query_seed_kernel(begin + first_query // 2 + pair, head, tokens, seed)
            pair_of_keys = block * (BLOCK // 2) + key_pair[:, None]
            keep = dropout_keeps(seeds[None, :], pair_of_keys, shift, threshold)
            p_kept = tl.where(keep, p, 0.0)
            dp = tl.where(keep, dp * kept_scale, 0.0)
        dv = tl.dot(p_kept.to(query.dtype), do, dv, input_precision="ieee")
        ds = (p * (dp - query_delta[None, :])).to(query.dtype)
        if ds_at is not None:
            tl.store(ds_at + first_query, ds, mask=token[:, None] < length)
        dk = tl.dot(ds, query, dk, input_precision="ieee")
    return dk, dv


@jit
def query_grads(
    block_at,
    step_at,
    grad_at,
    logsumexp,
    delta,
    seed,
    token,
    inside,
    block,
    head,
    begin,
    length,
    tokens,
    scale_log2,
    threshold,
    kept_scale,
    PART: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    DROPS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Return dQ [BLOCK, WIDTH], but for the scale, over all keys of the segment.

    `logsumexp` and `delta` point to the segment's first query.
    """
    query = tl.load(block_at, mask=inside[:, None], other=0.0)
    do = tl.load(grad_at + token[:, None] * PART, mask=inside[:, None], other=0.0)
    query_logsumexp = tl.load(logsumexp + token, mask=inside, other=0.0)
    query_delta = tl.load(delta + token, mask=inside, other=0.0)
    dq = tl.zeros([BLOCK, WIDTH], tl.float32)
    seen_by_all = length  # every query of the block sees the keys before it
    if CAUSAL:
        seen_by_all = block * BLOCK
        dq = add_keys(
            dq=dq,
            query=query,
            do=do,
            query_logsumexp=query_logsumexp,
            query_delta=query_delta,
            step_at=step_at,
            seed=seed,
            token=token,
            block=block,
            head=head,
            begin=begin,
            first=seen_by_all,
            last=tl.minimum(length, seen_by_all + BLOCK),
            length=length,
            tokens=tokens,
            scale_log2=scale_log2,
            threshold=threshold,
            kept_scale=kept_scale,
            PART=PART,
            BLOCK=BLOCK,
            STEP=STEP,
            DROPS=DROPS,
            ENDS=True,
            CAUSAL=True,
        )
    # The same call with another first, last, ENDS and CAUSAL: all queries here see these keys.
    return add_keys(
        dq=dq,
        query=query,
        do=do,
        query_logsumexp=query_logsumexp,
        query_delta=query_delta,
        step_at=step_at,
        seed=seed,
        token=token,
        block=block,
        head=head,
        begin=begin,
        first=0,
        last=seen_by_all,
        length=length,
        tokens=tokens,
        scale_log2=scale_log2,
        threshold=threshold,
        kept_scale=kept_scale,
        PART=PART,
        BLOCK=BLOCK,
        STEP=STEP,
        DROPS=DROPS,
        ENDS=not CAUSAL,
        CAUSAL=False,
    )


@jit
def add_keys(
    dq,
    query,
    do,
    query_logsumexp,
    query_delta,
    step_at,
    seed,
    token,
    block,
    head,
    begin,
    first,
    last,
    length,
    tokens,
    scale_log2,
    threshold,
    kept_scale,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    DROPS: tl.constexpr,
    ENDS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Add to dQ what the keys from `first` to `last` give, and return it.

    Scores are [queries, keys] here. `token` are those of the queries. With ENDS some keys may lie
    beyond the end, and if CAUSAL after a query.
    """
    pair, second = pairs(BLOCK)
    key_pair, second_key = pairs(STEP)
    shift = 16 * second[:, None] + 8 * second_key[None, :]
    seeds = query_seed_kernel(begin + block * (BLOCK // 2) + pair, head, tokens, seed)
    for first_key in tl.range(first, last, STEP):
        key_token = first_key + tl.arange(0, STEP)
        inside = (key_token < length)[:, None]
        key = tl.load(step_at + first_key * (3 * PART) + PART, mask=inside, other=0.0)
        value = tl.load(step_at + first_key * (3 * PART) + 2 * PART, mask=inside, other=0.0)
        scores = tl.dot(query, key.T, input_precision="ieee")
        if ENDS:
            seen = key_token <= token[:, None] if CAUSAL else key_token < length
            scores = tl.where(seen, scores, float("-inf"))
        p = tl.exp2(scores * scale_log2 - query_logsumexp[:, None])
        dp = tl.dot(do, value.T, input_precision="ieee")
        if DROPS:
            keep = dropout_keeps(
                seeds[:, None], first_key // 2 + key_pair[None, :], shift, threshold
            )
            dp = tl.where(keep, dp * kept_scale, 0.0)
        ds = p * (dp - query_delta[:, None])
        dq = tl.dot(ds.to(key.dtype), key, dq, input_precision="ieee")
    return dq


@jit
def store_query_grads(
    dq,
    qkv_grad,
    qkv_grad8,
    partials_at,
    segment_offset,
    token_offset,
    inside,
    dtype: tl.constexpr,
    SUMS: tl.constexpr,
    FACTOR: tl.constexpr,
    MAX: tl.constexpr,
):
    """Store dQ [BLOCK, WIDTH] of the queries that are `inside`, and its sums.

    The others' rows of dQ are zeros. `segment_offset` is where the head's part of the segment
    begins in `qkv_grad`, and `token_offset` where the queries are from there.
    """
    if qkv_grad is not None:
        tl.store(qkv_grad + segment_offset + token_offset, dq.to(dtype), mask=inside[:, None])
    if FACTOR != 0.0:
        dq8 = in_8_bits(dq.to(dtype), FACTOR, MAX, qkv_grad8.dtype.element_ty)
        tl.store(qkv_grad8 + segment_offset + token_offset, dq8, mask=inside[:, None])
    if SUMS:
        tl.store(partials_at, tl.sum(dq, 0))


@jit
def attention_query_backward(
    qkv,
    ds,
    cu_seqlens,
    qkv_grad,
    qkv_grad8,
    partials,
    tokens,
    scale,
    span,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    SUMS: tl.constexpr,
    CAUSAL: tl.constexpr,
    FACTOR: tl.constexpr,
    MAX: tl.constexpr,
):
    """Compute dQ = dS K of BLOCK queries, over STEP keys at a time.

    varlen_attention_backward has left dS in `ds`, and the zeros of blocks beyond the end in
    `partials`. Both kernels must have one BLOCK: in causal attention, keys in a block after the
    queries' have no dS.
    """
    block, head, begin, length = segment_of_program(cu_seqlens)
    if block * BLOCK >= length:
        return
    PART: tl.constexpr = HEADS * WIDTH
    width = tl.arange(0, WIDTH)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < length
    segment_offset = begin * (3 * PART) + head * WIDTH
    step = tl.arange(0, STEP)[:, None]
    key_at = qkv + segment_offset + PART + step * (3 * PART) + width
    ds_at = ds_of_segment(ds, head, begin, tokens, span) + step * span + token
    is_written = token < tl.cdiv(length, STEP) * STEP
    dq = tl.zeros([BLOCK, WIDTH], tl.float32)
    last = tl.minimum(length, (block + 1) * BLOCK) if CAUSAL else length
    for first_key in tl.range(0, last, STEP):
        key_inside = first_key + step < length
        key = tl.load(key_at + first_key * (3 * PART), mask=key_inside, other=0.0)
        ds_of_keys = tl.load(ds_at + first_key * span, mask=key_inside & is_written, other=0.0)
        dq = tl.dot(ds_of_keys.T, key, dq, input_precision="ieee")
    row_of_partials = tl.program_id(2) * tl.num_programs(0) + block
    store_query_grads(
        dq=dq * scale,
        qkv_grad=qkv_grad,
        qkv_grad8=qkv_grad8,
        partials_at=partials + row_of_partials * (3 * PART) + head * WIDTH + width,
        segment_offset=segment_offset,
        token_offset=token[:, None] * (3 * PART) + width,
        inside=inside,
        dtype=qkv.dtype.element_ty,
        SUMS=SUMS,
        FACTOR=FACTOR,
        MAX=MAX,
    )
