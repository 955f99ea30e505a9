"""Varlen attention for short sequences by a Triton kernel of our own (variants E-varlen and L-attention).

FlashAttention is made for sequences of thousands of tokens. The samples of a packed sequence have 180 on average, and
there its kernel reaches a fifth of the GEMM rate: much of what its tiles of 128 tokens compute is padding, its dropout
takes ten rounds of Philox, and its backward pass adds up the gradients of queries in memory, in fp32, which more
kernels clear, convert and copy. What is different here:

- A program takes 64 tokens of one head of one segment, and nothing is computed across segments. Forward, it goes over
  the keys in blocks with a running maximum m and sum l (online softmax, Milakov and Gimelshein 2018; FlashAttention,
  Dao et al. 2022), and keeps the logarithm of the sum for the backward pass.
- Backward, scores S are computed twice: once for dK and dV of the program's keys and values, over all queries, and once
  for dQ of its queries, over all keys. That is 7 products where FlashAttention takes 5, but nothing is added up by
  several programs: no atomic additions, no fp32 gradients in memory, and equal results in every run.
- For output O with gradient dO and the softmax P of the scores, dS = P * (dP - delta) with delta = rowsum(dO * O), and
  dropout in dP. delta is a small kernel of its own; within the other, every block of keys would compute it again.
- Query, key and value are one tensor, the fused projections' output, and so is their gradient: nothing is copied. Each
  program also leaves the partial sums of the gradient over its tokens: added up, they are the gradient of the
  projections' bias (common.py).
- Dropout's bits are a hash (common.py) of seed, head, query and key, computed again in the backward pass. The
  hash of seed, head and query seeds that of the keys. Tensor cores leave to one thread the queries i and i + 8 of every
  16, and the keys j and j + 8: these four scores share a hash of 32 bits. A rate is thus a multiple of 2^-8, as
  FlashAttention's are, and 0.1 is 26/256.
- Causal attention, a decoder's, leaves out the blocks of keys after the last query of a program. Only the blocks on the
  diagonal are masked, in a loop of their own. Its windows of text are segments of one length (variant L-attention).
- Triton's GEMMs are supported from compute capability 8.0 on, in bf16 and fp16.
- Powers are of base 2, which the GPU has an instruction for; log2(e) is multiplied into the scale.

On a CPU the same mathematics in plain PyTorch takes the kernel's place, with the same dropout, and is what the tests
hold the kernel to.
"""

import math

import torch

from qa_lib.kernels.common import custom_op, hash32, hash32_kernel, jit, launch, sum_partials, tl

# Tiles and threads. An H200's multiprocessor holds five programs of the first and three of the second at a time. For
# heads 64 wide and with dropout no register spills (by the compiler's word).
FORWARD = {"QUERIES": 64, "KEYS": 32, "num_warps": 4, "num_stages": 3}
BACKWARD = {"BLOCK": 64, "STEP": 32, "num_warps": 4, "num_stages": 3, "maxnreg": 168}
DELTA = {"TOKENS": 64, "num_warps": 4}
# Of causal attention, whose segments are long: KEYS divides QUERIES, and above STEP divides BLOCK.
CAUSAL_FORWARD = {"QUERIES": 64, "KEYS": 64, "num_warps": 4, "num_stages": 3}


def varlen_attention(
    qkv, bias, cu_seqlens, longest: int, seed, dropout: float, scale: float, causal: bool = False
) -> torch.Tensor:
    """Attention [tokens, heads, width] within segments of at most `longest` tokens, which begin and end at `cu_seqlens`
    int32 [segments + 1]; if `causal`, to a token itself and those before it.

    `qkv` [tokens, 3, heads, width] is query, key and value, of fewer than 2^31 elements, whose width is a power of 2
    and at least 16. `bias` [3 x heads x width], or None, is in `qkv` already, and gets its gradient here. `seed`, an
    int32 on the device, decides what is dropped out.
    """
    if qkv.is_cuda:
        return _attention(qkv, bias, cu_seqlens, seed, longest, dropout, scale, causal)[0]
    return reference(qkv, bias, cu_seqlens, seed, dropout, scale, causal)


def reference(qkv, bias, cu_seqlens, seed, dropout, scale, causal=False):
    """As varlen_attention in plain PyTorch, with all scores [heads, tokens, tokens] in memory."""
    if bias is not None:
        qkv = attach_bias_grad(qkv, bias)
    query, key, value = qkv.permute(1, 2, 0, 3)
    segment = segment_of(cu_seqlens, len(qkv))
    hidden = segment[:, None] != segment
    if causal:
        hidden |= torch.ones_like(hidden).triu(1)
    scores = (query @ key.mT * scale).masked_fill(hidden, -torch.inf)
    p = torch.softmax(scores, -1)
    if dropout:
        place = torch.arange(len(qkv), device=qkv.device, dtype=torch.int32) - cu_seqlens[segment]
        kept = _dropout_mask(place, qkv.shape[2], seed, dropout)
        p = torch.where(kept, p * _dropout_scale(dropout), 0.0)
    return (p @ value).transpose(0, 1)


def segment_of(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """For each of a packed sequence's tokens the number of the segment that it lies in."""
    places = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:], places, right=True)


def attach_bias_grad(qkv: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The same `qkv` [..., 3, heads, width], through which the bias that is in it already gets its gradient."""
    return qkv + (bias - bias.detach()).view(qkv.shape[-3:])


def _dropout_mask(place, heads, seed, dropout):
    """Which scores are kept [heads, tokens, tokens], for the keys' places in their segments, int32 [tokens]."""
    pair, second = place // 16 * 8 + place % 8, place // 8 % 2
    tokens = torch.arange(heads * len(place), device=place.device, dtype=torch.int32).view(
        heads, -1
    )
    seeds = query_seed(tokens - place + pair, seed)
    bits = hash32(pair, seeds[..., None])
    byte = bits >> (24 - 16 * second[:, None] - 8 * second) & 255
    return byte >= _threshold(dropout)


def query_seed(numbers, seed):
    """What seeds the hashes of the keys of a pair of queries: half a hash of the pair's number, since every thread has
    to compute it for few keys. The golden ratio (Knuth 1973) puts neighbours far apart."""
    bits = numbers * (0x9E3779B1 - 2**32) + seed
    return (bits ^ ((bits >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)


def _threshold(dropout: float) -> int:
    """Below it a byte of a hash drops its score."""
    return round(dropout * 2**8)


def _dropout_scale(dropout: float) -> float:
    """What scores that are kept are multiplied with."""
    return 1 / (1 - _threshold(dropout) / 2**8)


@custom_op("qa_lib::varlen_attention")
def _attention(
    qkv: torch.Tensor, bias: torch.Tensor | None, cu_seqlens: torch.Tensor, seed: torch.Tensor, longest: int,
    dropout: float, scale: float, causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The output, and for each head and query the logarithm to base 2 of the sum of its exponentials."""
    tokens, _, heads, width = qkv.shape
    output, logsumexp = (
        qkv.new_empty(tokens, heads, width),
        qkv.new_empty(heads, tokens, dtype=torch.float32),
    )
    options = CAUSAL_FORWARD if causal else FORWARD
    launch(
        varlen_attention_forward, (-(-longest // options["QUERIES"]), heads, len(cu_seqlens) - 1), qkv.contiguous(),
        output, logsumexp, cu_seqlens, seed, tokens, scale * math.log2(math.e), _threshold(dropout),
        _dropout_scale(dropout), HEADS=heads, WIDTH=width, DROPS=dropout > 0, CAUSAL=causal, **options,
    )  # fmt: skip
    return output, logsumexp


@custom_op("qa_lib::varlen_attention_backward")
def _attention_backward(
    grad: torch.Tensor, qkv: torch.Tensor, bias: torch.Tensor | None, output: torch.Tensor, logsumexp: torch.Tensor,
    cu_seqlens: torch.Tensor, seed: torch.Tensor, longest: int, dropout: float, scale: float, causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of `qkv` and of the bias in it; the latter is empty where there is none."""
    tokens, _, heads, width = qkv.shape
    blocks, segments = -(-longest // BACKWARD["BLOCK"]), len(cu_seqlens) - 1
    qkv_grad = qkv.new_empty(qkv.shape)
    partials = qkv.new_empty(
        segments * blocks, 0 if bias is None else len(bias), dtype=torch.float32
    )
    grad, delta = grad.contiguous(), torch.empty_like(logsumexp)
    grid = (-(-tokens // DELTA["TOKENS"]), heads)
    launch(
        delta_kernel,
        grid,
        grad,
        output.contiguous(),
        delta,
        tokens,
        HEADS=heads,
        WIDTH=width,
        **DELTA,
    )
    launch(
        varlen_attention_backward, (blocks, heads, segments), grad, qkv.contiguous(), delta, logsumexp,
        cu_seqlens, seed, qkv_grad, partials, tokens, scale, _threshold(dropout), _dropout_scale(dropout),
        HEADS=heads, WIDTH=width, DROPS=dropout > 0, SUMS=bias is not None, CAUSAL=causal, **BACKWARD,
    )  # fmt: skip
    return qkv_grad, qkv.new_empty(0) if bias is None else sum_partials(partials, bias.dtype)


def _setup_context(ctx, inputs, output):
    qkv, bias, cu_seqlens, seed, *ctx.options = inputs
    ctx.save_for_backward(qkv, bias, *output, cu_seqlens, seed)
    ctx.set_materialize_grads(False)  # of the logarithms: zeros, by a kernel


def _backward(ctx, grad, _):
    qkv, bias, output, logsumexp, cu_seqlens, seed = ctx.saved_tensors
    needed = ctx.needs_input_grad[1]
    grads = _attention_backward(
        grad, qkv, bias if needed else None, output, logsumexp, cu_seqlens, seed, *ctx.options
    )
    return grads[0], grads[1] if needed else None, *(None,) * 6


_attention.register_autograd(_backward, setup_context=_setup_context)


# The kernels. A program has one block of tokens of one head of one segment. Grids are (blocks, heads, segments), for as
# many blocks as the longest segment may have; a program beyond its segment's end leaves at once. Pointers are those of
# contiguous tensors: qkv and its gradient [tokens, 3, HEADS, WIDTH], query, key and value beside each other; output and
# its gradient [tokens, HEADS, WIDTH]; logsumexp and delta [HEADS, tokens]; cu_seqlens [segments + 1]; partials
# [segments, blocks, 3, HEADS, WIDTH]. `keeps` is 1 / (1 - rate).


@jit
def delta_kernel(
    grad, output, delta, tokens, HEADS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr
):
    """Of TOKENS tokens of one head: rowsum(dO * O). Its grid is (parts of the tokens, heads)."""
    token, head = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.program_id(1)
    at = (token[:, None] * HEADS + head) * WIDTH + tl.arange(0, WIDTH)
    inside = token[:, None] < tokens
    product = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    product *= tl.load(output + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(delta + head * tokens + token, tl.sum(product, 1), mask=token < tokens)


@jit
def query_seed_kernel(pairs, head, tokens, seed):
    """As query_seed, for these pairs of queries."""
    bits = (head * tokens + pairs).to(tl.uint32) * 0x9E3779B1 + tl.load(seed).to(
        tl.uint32, bitcast=True
    )
    return (bits ^ (bits >> 15)) * 0x846CA68B


@jit
def pairs(SIZE: tl.constexpr):
    """Tokens eight apart are a pair: of SIZE tokens the number of each one's pair, and whether it is the second."""
    EIGHTS: tl.constexpr = SIZE // 16
    number = 8 * tl.arange(0, EIGHTS)[:, None, None] + tl.arange(0, 8)
    second = tl.arange(0, 2)[None, :, None]
    return (
        tl.broadcast_to(number, (EIGHTS, 2, 8)).reshape(SIZE),
        tl.broadcast_to(second, (EIGHTS, 2, 8)).reshape(SIZE),
    )


@jit
def dropout_keeps(seeds, keys, shift, threshold):
    """Which scores dropout keeps: for the `seeds` of pairs of queries, pairs of `keys`, and by how many bits to shift
    a hash for each of the four scores that share it. All of them broadcast."""
    bits = hash32_kernel(keys.to(tl.uint32), seeds) << shift
    return bits >= (threshold << 24).to(tl.uint32)


@jit
def locate(cu_seqlens):
    """What this program does: the number of its block, its head, and where its segment begins and how long it is."""
    segment = tl.program_id(2)
    begin = tl.load(cu_seqlens + segment)
    return tl.program_id(0), tl.program_id(1), begin, tl.load(cu_seqlens + segment + 1) - begin


@jit(do_not_specialize=["threshold"])
def varlen_attention_forward(
    qkv, output, logsumexp, cu_seqlens, seed, tokens, scale, threshold, keeps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, DROPS: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Of QUERIES queries: output, and the logarithm to base 2 of the sum of their exponentials. `scale` is that of the
    scores times log2(e)."""
    block, head, begin, length = locate(cu_seqlens)
    if block * QUERIES >= length:
        return
    STRIDE: tl.constexpr = 3 * HEADS * WIDTH
    queries = block * QUERIES + tl.arange(0, QUERIES)
    width = tl.arange(0, WIDTH)
    number, second = pairs(QUERIES)
    seeds = query_seed_kernel(begin + block * (QUERIES // 2) + number, head, tokens, seed)
    here = qkv + begin * STRIDE + head * WIDTH
    query = tl.load(
        here + queries[:, None] * STRIDE + width, mask=queries[:, None] < length, other=0.0
    )
    key_at = here + HEADS * WIDTH + tl.arange(0, KEYS)[:, None] * STRIDE + width

    m_i = tl.full([QUERIES], float("-inf"), tl.float32)
    l_i = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, WIDTH], tl.float32)
    last = tl.minimum(length, (block + 1) * QUERIES) if CAUSAL else length
    seen_by_all = block * QUERIES if CAUSAL else length
    acc, l_i, m_i = attend(
        acc, l_i, m_i, query, queries, key_at, seeds, second, 0, seen_by_all, length, scale, threshold,
        STRIDE, HEADS * WIDTH, KEYS, DROPS, not CAUSAL, False,
    )  # fmt: skip
    if CAUSAL:
        acc, l_i, m_i = attend(
            acc, l_i, m_i, query, queries, key_at, seeds, second, seen_by_all, last, length, scale, threshold,
            STRIDE, HEADS * WIDTH, KEYS, DROPS, True, True,
        )  # fmt: skip
    acc *= (keeps / l_i)[:, None]
    inside = queries < length
    out_at = output + (begin + queries[:, None]) * (HEADS * WIDTH) + head * WIDTH + width
    tl.store(out_at, acc.to(output.dtype.element_ty), mask=inside[:, None])
    tl.store(logsumexp + head * tokens + begin + queries, m_i + tl.log2(l_i), mask=inside)


@jit
def attend(
    acc, l_i, m_i, query, queries, key_at, seeds, second, first, last, length, scale, threshold,
    STRIDE: tl.constexpr, PART: tl.constexpr, KEYS: tl.constexpr, DROPS: tl.constexpr, ENDS: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Take the keys from `first` to `last` into the output `acc`, the sums `l_i` and the maxima `m_i` of the queries.
    With ENDS some may lie beyond the end, and if CAUSAL after a query."""
    number, second_key = pairs(KEYS)
    shift = 16 * second[:, None] + 8 * second_key[None, :]
    for begin in tl.range(first, last, KEYS):
        keys = begin + tl.arange(0, KEYS)
        at = key_at + begin * STRIDE
        if ENDS:
            key = tl.load(at, mask=keys[:, None] < length, other=0.0)
            value = tl.load(at + PART, mask=keys[:, None] < length, other=0.0)
        else:
            key, value = tl.load(at), tl.load(at + PART)
        scores = tl.dot(query, key.T, input_precision="ieee")
        if ENDS:
            seen = keys <= queries[:, None] if CAUSAL else keys < length
            scores = tl.where(seen, scores, float("-inf"))
        m_next = tl.maximum(m_i, tl.max(scores, 1) * scale)
        p = tl.exp2(scores * scale - m_next[:, None])
        alpha = tl.exp2(m_i - m_next)
        l_i = l_i * alpha + tl.sum(p, 1)
        if DROPS:
            p = tl.where(
                dropout_keeps(seeds[:, None], begin // 2 + number[None, :], shift, threshold),
                p,
                0.0,
            )
        acc = tl.dot(p.to(value.dtype), value, acc * alpha[:, None], input_precision="ieee")
        m_i = m_next
    return acc, l_i, m_i


@jit(do_not_specialize=["threshold"])
def varlen_attention_backward(
    grad, qkv, delta, logsumexp, cu_seqlens, seed, qkv_grad, partials, tokens, scale, threshold, keeps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, DROPS: tl.constexpr,
    SUMS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Of BLOCK tokens: the gradients of their keys and values, over STEP queries at a time, and then those of their
    queries, over STEP keys at a time; and, where SUMS says so, the sums of each over the tokens, in `partials`."""
    block, head, begin, length = locate(cu_seqlens)
    STRIDE: tl.constexpr = 3 * HEADS * WIDTH
    PART: tl.constexpr = HEADS * WIDTH
    width = tl.arange(0, WIDTH)
    partials_at = (
        partials + (tl.program_id(2) * tl.num_programs(0) + block) * STRIDE + head * WIDTH + width
    )
    if block * BLOCK >= length:
        if SUMS:
            for part in tl.static_range(3):
                tl.store(partials_at + part * PART, tl.zeros([WIDTH], tl.float32))
        return
    own = block * BLOCK + tl.arange(0, BLOCK)
    inside = own < length
    here = qkv + begin * STRIDE + head * WIDTH
    own_at = here + own[:, None] * STRIDE + width
    others_at = here + tl.arange(0, STEP)[:, None] * STRIDE + width
    grad_at = grad + begin * PART + head * WIDTH + width
    dtype = qkv_grad.dtype.element_ty
    per_query = head * tokens + begin

    scores_scale = scale * 1.4426950408889634  # log2(e)
    dk, dv = key_value_grads(
        own_at, others_at, grad_at, logsumexp + per_query, delta + per_query, seed, own, inside, block, head, begin,
        length, tokens, scores_scale, threshold, keeps, PART, WIDTH, BLOCK, STEP, DROPS, CAUSAL,
    )  # fmt: skip
    dk *= scale
    # Computed here and not above, where it would hold registers that then spill.
    out_at = qkv_grad + begin * STRIDE + head * WIDTH + own[:, None] * STRIDE + width
    tl.store(out_at + PART, dk.to(dtype), mask=inside[:, None])
    tl.store(out_at + 2 * PART, dv.to(dtype), mask=inside[:, None])
    if SUMS:  # keys and values beyond the end have gradients here, which are not stored; queries below have none
        tl.store(partials_at + PART, tl.sum(tl.where(inside[:, None], dk, 0.0), 0))
        tl.store(partials_at + 2 * PART, tl.sum(tl.where(inside[:, None], dv, 0.0), 0))

    dq = query_grads(
        own_at, others_at, grad_at, logsumexp + per_query, delta + per_query, seed, own, inside, block, head, begin,
        length, tokens, scores_scale, threshold, keeps, PART, WIDTH, BLOCK, STEP, DROPS, CAUSAL,
    )  # fmt: skip
    dq *= scale
    tl.store(out_at, dq.to(dtype), mask=inside[:, None])
    if SUMS:
        tl.store(partials_at, tl.sum(dq, 0))


@jit
def key_value_grads(
    own_at, others_at, grad_at, logsumexp, delta, seed, own, inside, block, head, begin, length, tokens, scale,
    threshold, keeps, PART: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    DROPS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """dK, but for the scale, and dV [BLOCK, WIDTH] of a block's `own` tokens, over all queries of the segment."""
    key = tl.load(own_at + PART, mask=inside[:, None], other=0.0)
    value = tl.load(own_at + 2 * PART, mask=inside[:, None], other=0.0)
    dk = tl.zeros([BLOCK, WIDTH], tl.float32)
    dv = tl.zeros([BLOCK, WIDTH], tl.float32)
    seen_by_all = 0
    if CAUSAL:
        seen_by_all = tl.minimum((block + 1) * BLOCK, length)
        dk, dv = add_queries(
            dk, dv, key, value, others_at, grad_at, logsumexp, delta, seed, own, block, head, begin,
            block * BLOCK, seen_by_all, length, tokens, scale, threshold, keeps, PART, BLOCK, STEP, DROPS, True,
        )  # fmt: skip
    dk, dv = add_queries(
        dk, dv, key, value, others_at, grad_at, logsumexp, delta, seed, own, block, head, begin,
        seen_by_all, length, length, tokens, scale, threshold, keeps, PART, BLOCK, STEP, DROPS, False,
    )  # fmt: skip
    return dk, dv * keeps


@jit
def add_queries(
    dk, dv, key, value, others_at, grad_at, logsumexp, delta, seed, own, block, head, begin, first, last, length,
    tokens, scale, threshold, keeps, PART: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    DROPS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Add what the queries from `first` to `last` give to dK and dV. Scores are [keys, queries] here."""
    pair, second = pairs(STEP)
    key_pair, second_key = pairs(BLOCK)
    shift = 16 * second[None, :] + 8 * second_key[:, None]
    for at in tl.range(first, last, STEP):
        queries = at + tl.arange(0, STEP)
        there = queries < length
        query = tl.load(others_at + at * (3 * PART), mask=there[:, None], other=0.0)
        do = tl.load(grad_at + queries[:, None] * PART, mask=there[:, None], other=0.0)
        # A query beyond the end has zeros here, and so have its products: it adds nothing.
        lse = tl.load(logsumexp + queries, mask=there, other=0.0)
        d = tl.load(delta + queries, mask=there, other=0.0)
        p = tl.exp2(tl.dot(key, query.T, input_precision="ieee") * scale - lse[None, :])
        if CAUSAL:
            p = tl.where(queries[None, :] >= own[:, None], p, 0.0)
        dp = tl.dot(value, do.T, input_precision="ieee")
        p_kept = p
        if DROPS:
            seeds = query_seed_kernel(begin + at // 2 + pair, head, tokens, seed)
            keep = dropout_keeps(
                seeds[None, :], block * (BLOCK // 2) + key_pair[:, None], shift, threshold
            )
            p_kept = tl.where(keep, p, 0.0)
            dp = tl.where(keep, dp * keeps, 0.0)
        dv = tl.dot(p_kept.to(query.dtype), do, dv, input_precision="ieee")
        ds = p * (dp - d[None, :])
        dk = tl.dot(ds.to(query.dtype), query, dk, input_precision="ieee")
    return dk, dv


@jit
def query_grads(
    own_at, others_at, grad_at, logsumexp, delta, seed, own, inside, block, head, begin, length, tokens, scale,
    threshold, keeps, PART: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    DROPS: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """dQ [BLOCK, WIDTH], but for the scale, of a block's `own` tokens, over all keys of the segment."""
    query = tl.load(own_at, mask=inside[:, None], other=0.0)
    do = tl.load(grad_at + own[:, None] * PART, mask=inside[:, None], other=0.0)
    lse = tl.load(logsumexp + own, mask=inside, other=0.0)
    d = tl.load(delta + own, mask=inside, other=0.0)
    dq = tl.zeros([BLOCK, WIDTH], tl.float32)
    seen_by_all = length
    if CAUSAL:
        seen_by_all = block * BLOCK
        dq = add_keys(
            dq, query, do, lse, d, others_at, seed, own, block, head, begin, seen_by_all,
            tl.minimum(length, seen_by_all + BLOCK), length, tokens, scale, threshold, keeps, PART, BLOCK, STEP, DROPS,
            True, True,
        )  # fmt: skip
    return add_keys(
        dq, query, do, lse, d, others_at, seed, own, block, head, begin, 0, seen_by_all, length, tokens, scale,
        threshold, keeps, PART, BLOCK, STEP, DROPS, not CAUSAL, False,
    )  # fmt: skip


@jit
def add_keys(
    dq, query, do, lse, d, others_at, seed, own, block, head, begin, first, last, length, tokens, scale, threshold,
    keeps, PART: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, DROPS: tl.constexpr, ENDS: tl.constexpr,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Add what the keys from `first` to `last` give to dQ. Scores are [queries, keys] here. With ENDS some may lie
    beyond the end, and if CAUSAL after a query."""
    pair, second = pairs(BLOCK)
    key_pair, second_key = pairs(STEP)
    shift = 16 * second[:, None] + 8 * second_key[None, :]
    seeds = query_seed_kernel(begin + block * (BLOCK // 2) + pair, head, tokens, seed)
    for at in tl.range(first, last, STEP):
        keys = at + tl.arange(0, STEP)
        there = (keys < length)[:, None]
        key = tl.load(others_at + at * (3 * PART) + PART, mask=there, other=0.0)
        value = tl.load(others_at + at * (3 * PART) + 2 * PART, mask=there, other=0.0)
        scores = tl.dot(query, key.T, input_precision="ieee")
        if ENDS:
            seen = keys <= own[:, None] if CAUSAL else keys < length
            scores = tl.where(seen, scores, float("-inf"))
        p = tl.exp2(scores * scale - lse[:, None])
        dp = tl.dot(do, value.T, input_precision="ieee")
        if DROPS:
            keep = dropout_keeps(seeds[:, None], at // 2 + key_pair[None, :], shift, threshold)
            dp = tl.where(keep, dp * keeps, 0.0)
        ds = p * (dp - d[:, None])
        dq = tl.dot(ds.to(key.dtype), key, dq, input_precision="ieee")
    return dq
