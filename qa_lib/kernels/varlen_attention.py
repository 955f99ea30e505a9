"""Varlen attention for short sequences, a Triton kernel (variants E-varlen and L-attention).

FlashAttention is made for sequences of thousands of tokens. The samples of a packed sequence have
180 on average, and there its kernel reaches a fifth of the GEMM rate: much of what its tiles of 128
tokens compute is padding, its dropout takes ten rounds of Philox, and its backward pass adds up the
gradients of queries in memory, in fp32, which more kernels clear, convert and copy. What is
different here:

- A program takes 64 tokens of one head of one segment, and nothing is computed across segments.
  Forward, it goes over the keys in blocks with a running maximum m and sum l (online softmax,
  Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022), and keeps the logarithm of the sum
  for the backward pass.
- Backward, scores S are computed twice: once for dK and dV of the program's keys and values, over
  all queries, and once for dQ of its queries, over all keys. That is 7 products where
  FlashAttention takes 5, but nothing is added up by several programs: no atomic additions, no fp32
  gradients in memory, and equal results in every run. With a bias by distance it is otherwise, see
  below.
- For output O with gradient dO and the softmax P of the scores, dS = P * (dP - delta) with
  delta = rowsum(dO * O), and dropout in dP. delta is a small kernel of its own; within the other,
  every block of keys would compute it again.
- Query, key and value are one tensor, the fused projections' output, and so is their gradient:
  nothing is copied. Each program also leaves the partial sums of the gradient over its tokens:
  added up, they are the gradient of the projections' bias (partial_sums.py).
- Dropout's bits are a hash (hash_dropout.py) of seed, head, query and key, computed again in the
  backward pass. The hash of seed, head and query seeds that of the keys. Tensor cores leave to one
  thread the queries i and i + 8 of every 16, and the keys j and j + 8: these four scores share a
  hash of 32 bits. A rate is thus a multiple of 2^-8, like FlashAttention's, and 0.1 is 26/256.
- Causal attention, a decoder's, leaves out the blocks of keys after the last query of a program.
  Only the blocks on the diagonal are masked, in a loop of their own. Its windows of text are
  segments of one length (variant L-attention).
- A bias of the scores by distance (RelativeBias; MPNet's, T5's) is a row of numbers for each head,
  1 KB for 128 tokens in each direction, which stays in the first cache. A score reads one of them
  and adds it; farther scores read the last. Its gradient at a distance is the sum of dS along a
  diagonal, over all segments. Where there is no bias, none of this is in the program.
- With such a bias, dS is computed once and stored in the type of `qkv`, and the backward pass has
  three kernels beside delta's. The first computes dK, dV and dS (varlen_attention_backward), the
  second dQ = dS K (attention_query_backward), and the third the sums of dS by distance
  (attention_distance_sums). Two of the seven products go, and exponentials, biases and dropout's
  hash are computed once, not twice. Sums along diagonals take many instructions for each tile. The
  third kernel adds up the tiles of many segments first, and sums the diagonals of the total. Still
  nothing is added up by several programs.
- Stored, dS saves instructions and costs bytes. For 32 samples of SQuAD and 12 heads it is 26 MB,
  written once and read twice. In a trial on one H200 such a layer's backward pass took 163 µs,
  where one kernel took 208. Without a bias there are fewer instructions to save, and no sums:
  BERT's took 78 µs with two kernels and 76 with one, and keeps the one.
- Where the linear layers before and after it are in 8-bit floats (kernels/fp8.py), the forward
  kernel writes the e4m3 copy of the output, and the backward kernel the e5m2 copy of the gradient
  of `qkv`, each laid out like what it is a copy of. Where the layer before reads the copy alone,
  only the copy is written.
- Triton's GEMMs are supported from compute capability 8.0 on, in bf16 and fp16.
- Powers are of base 2, which the GPU has an instruction for; log2(e) is multiplied into the scale.

On a CPU the same mathematics in plain PyTorch takes the kernel's place, with the same dropout, and
is what the tests hold the kernel to.
"""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from qa_lib.kernels.common import LOG2_E, custom_op, jit, tl
from qa_lib.kernels.fp8 import ACTIVATION, E4M3_MAX, E5M2_MAX, GRADIENT, in_8_bits
from qa_lib.kernels.hash_dropout import hash32, hash32_kernel
from qa_lib.kernels.partial_sums import sum_partials
from qa_lib.kernels.precompile import launch

# Tiles and threads. An H200's multiprocessor holds five programs of the first and three of the
# second at a time. For heads 64 wide, with dropout and without a bias by distance, no register
# spills (by the compiler's word).
FORWARD = {"QUERIES": 64, "KEYS": 32, "num_warps": 4, "num_stages": 3}
BACKWARD = {"BLOCK": 64, "STEP": 32, "num_warps": 4, "num_stages": 3, "maxnreg": 168}
DELTA = {"TOKENS": 64, "num_warps": 4}
# So many programs share the segments of a sum by distance. Each of them sums diagonals: the whole
# backward pass of a layer took 163 µs with 4 and 175 with 8 (one H200, 32 samples of SQuAD).
GROUPS = 4
DISTANCE_SUMS = {"STAGES": 3, "num_warps": 4}
# Causal attention has longer segments. Its KEYS must divide QUERIES, and the STEP above its BLOCK.
CAUSAL_FORWARD = {"QUERIES": 64, "KEYS": 64, "num_warps": 4, "num_stages": 3}


class RelativeBias(NamedTuple):
    """A bias of scores by the distance from query to key, in tokens; farther ones have the last."""

    # [buckets, heads]: the bias of each bucket of distances, whose number is a power of 2.
    weight: torch.Tensor
    # int32 [2 x reach + 1]: the bucket of each distance from -reach to reach.
    buckets: torch.Tensor
    # float32 [heads, 2 x reach + 1]: the bias of each distance, which is weight's, times log2(e),
    # for the kernel.
    table: torch.Tensor


def varlen_attention(
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    longest: int,
    seed: torch.Tensor,
    dropout: float,
    scale: float,
    causal: bool = False,
    relative: RelativeBias | None = None,
) -> torch.Tensor:
    """Return attention [tokens, heads, width] within segments of at most `longest` tokens.

    `qkv` [tokens, 3, heads, width] is query, key and value, of fewer than 2^31 elements; width is a
    power of 2 and at least 16. Segments begin and end at `cu_seqlens`, int32 [segments + 1].
    `bias` [3 x heads x width], or None, is in `qkv` already, and gets its gradient here. `seed`, an
    int32 on the device, decides what is dropped out. `scale` multiplies the scores. If `causal`, a
    token attends to itself and those before it alone. `relative` is added to the scaled scores, and
    its weight gets its gradient.
    """
    if not qkv.is_cuda:
        return reference(
            qkv,
            bias,
            cu_seqlens,
            seed=seed,
            dropout=dropout,
            scale=scale,
            causal=causal,
            relative=relative,
        )
    of_distances = (None, None, None) if relative is None else relative
    inputs = (qkv, bias, cu_seqlens, seed, longest, dropout, scale, causal, *of_distances)
    if torch.compiler.is_compiling():
        output, *_ = _attention(*inputs)
    else:
        output, _ = _Uncompiled.apply(*inputs, None, False)
    return output


def varlen_attention_and_copy(
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    longest: int,
    seed: torch.Tensor,
    dropout: float,
    scale: float,
    placeholder: torch.Tensor,
    grad8_alone: bool,
    causal: bool = False,
    relative: RelativeBias | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what varlen_attention does, and its e4m3 copy, times ACTIVATION; None on a CPU.

    Call it where the linear layers before and after attention are in 8 bits, and nothing is
    compiled by PyTorch.
    `placeholder` came with `qkv` from the first of these, and gets the gradient of `qkv` in e5m2;
    with `grad8_alone` `qkv` itself gets none.
    """
    if not qkv.is_cuda:
        output = varlen_attention(
            qkv, bias, cu_seqlens, longest, seed, dropout, scale, causal, relative
        )
        return output, None
    of_distances = (None, None, None) if relative is None else relative
    output, output8 = _Uncompiled.apply(
        qkv,
        bias,
        cu_seqlens,
        seed,
        longest,
        dropout,
        scale,
        causal,
        *of_distances,
        placeholder,
        grad8_alone,
    )
    return output, output8.view(torch.float8_e4m3fn)


class _Uncompiled(torch.autograd.Function):
    """Attention's output and its copy, without the operator around `_attention`.

    kernels/common.py says what that spares. `_attention`'s arguments have to be there all.
    """

    @staticmethod
    def forward(ctx, *inputs):
        output, logsumexp, output8 = _attention(*inputs)
        _setup_context(ctx, inputs, (output, logsumexp, output8))
        return output, output8

    @staticmethod
    def backward(ctx, grad, _):
        return _backward(ctx, grad, None, None)


def reference(qkv, bias, cu_seqlens, seed, dropout, scale, causal=False, relative=None):
    """Return what varlen_attention returns, by plain PyTorch.

    It holds all scores [heads, tokens, tokens].
    """
    if bias is not None:
        qkv = attach_bias_grad(qkv, bias)
    query, key, value = qkv.permute(1, 2, 0, 3)
    segment = segment_of(cu_seqlens, len(qkv))
    hidden = segment[:, None] != segment
    if causal:
        hidden |= torch.ones_like(hidden).triu(1)
    place = torch.arange(len(qkv), device=qkv.device, dtype=torch.int32) - cu_seqlens[segment]
    scores = query @ key.mT * scale
    if relative is not None:
        scores = scores + relative_scores(relative.weight, relative.buckets, place)
    p = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
    if dropout:
        kept = _dropout_mask(place, qkv.shape[2], seed, dropout)
        p = torch.where(kept, p * _dropout_scale(dropout), 0.0)
    return (p @ value).transpose(0, 1)


def segment_of(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return for each of so many `tokens` of a packed sequence the number of its segment."""
    places = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:], places, right=True)


def relative_scores(
    weight: torch.Tensor, buckets: torch.Tensor, place: torch.Tensor
) -> torch.Tensor:
    """Return the biases [heads, tokens, tokens] of scores, by query and key.

    `weight` and `buckets` are those of RelativeBias; `place` [tokens] is where in its sample each
    token is.
    """
    reach = len(buckets) // 2
    distance = (place - place[:, None]).clamp(-reach, reach)
    return F.embedding(buckets[distance + reach], weight).permute(2, 0, 1)


def attach_bias_grad(qkv: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return `qkv` [..., 3, heads, width] unchanged, so that the bias in it gets its gradient."""
    return qkv + (bias - bias.detach()).view(qkv.shape[-3:])


def _dropout_mask(place, heads, seed, dropout):
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

    It is half a hash of the pair's number, since every thread has to compute it for few keys. The
    golden ratio (Knuth 1973) puts neighbours far apart.
    """
    bits = numbers * (0x9E3779B1 - 2**32) + seed
    return (bits ^ ((bits >> 15) & 0x1FFFF)) * (0x846CA68B - 2**32)


def threshold_in_8_bits(dropout: float) -> int:
    """Return the number below which a byte of a hash drops its score."""
    return round(dropout * 2**8)


def _dropout_scale(dropout: float) -> float:
    """Return what kept scores are multiplied by."""
    return 1 / (1 - threshold_in_8_bits(dropout) / 2**8)


@custom_op("qa_lib::varlen_attention")
def _attention(
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    seed: torch.Tensor,
    longest: int,
    dropout: float,
    scale: float,
    causal: bool = False,
    weight: torch.Tensor | None = None,
    buckets: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    placeholder: torch.Tensor | None = None,
    grad8_alone: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output [tokens, heads, width], logsumexp, fp32 [heads, tokens], and a copy.

    logsumexp is for each query the logarithm to base 2 of the sum of its exponentials. `weight`,
    `buckets` and `table` are a RelativeBias. The copy is the output's in e4m3, as bytes, of which
    autograd knows that they have no gradient. It is empty without a `placeholder`, which gets the
    gradient of `qkv` in e5m2; with `grad8_alone` `qkv` itself gets none.
    """
    tokens, _, heads, width = qkv.shape
    output = qkv.new_empty(tokens, heads, width)
    logsumexp = qkv.new_empty(heads, tokens, dtype=torch.float32)
    copies = placeholder is not None
    output8 = qkv.new_empty(output.shape if copies else 0, dtype=torch.uint8)
    options = CAUSAL_FORWARD if causal else FORWARD
    blocks = -(-longest // options["QUERIES"])
    segments = len(cu_seqlens) - 1
    launch(
        varlen_attention_forward,
        (blocks, heads, segments),
        qkv=qkv.contiguous(),
        output=output,
        output8=output8.view(torch.float8_e4m3fn) if copies else None,
        logsumexp=logsumexp,
        cu_seqlens=cu_seqlens,
        seed=seed,
        table=table,
        tokens=tokens,
        scale=scale * LOG2_E,
        threshold=threshold_in_8_bits(dropout),
        kept_scale=_dropout_scale(dropout),
        HEADS=heads,
        WIDTH=width,
        DROPS=dropout > 0,
        CAUSAL=causal,
        REACH=_reach(buckets),
        FACTOR=ACTIVATION if copies else 0.0,
        MAX=E4M3_MAX,
        **options,
    )
    return output, logsumexp, output8


@custom_op("qa_lib::varlen_attention_backward")
def _attention_backward(
    grad: torch.Tensor,
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    cu_seqlens: torch.Tensor,
    seed: torch.Tensor,
    longest: int,
    dropout: float,
    scale: float,
    causal: bool = False,
    weight: torch.Tensor | None = None,
    buckets: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    copies: bool = False,
    copy_alone: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of `qkv`, of the bias in it and of the weight of a RelativeBias.

    Those of what is None are empty. The fourth result is the e5m2 copy [tokens, 3 x heads x width]
    of the first. It is empty unless `copies`; with `copy_alone` only the copy is made, and the
    first is empty.
    """
    tokens, _, heads, width = qkv.shape
    blocks = -(-longest // BACKWARD["BLOCK"])
    segments = len(cu_seqlens) - 1
    qkv_grad = qkv.new_empty(0 if copy_alone else qkv.shape)
    qkv_grad8 = qkv.new_empty((tokens, 3 * heads * width) if copies else 0, dtype=torch.float8_e5m2)
    partials = qkv.new_empty(
        segments * blocks, 0 if bias is None else len(bias), dtype=torch.float32
    )
    span = blocks * BACKWARD["BLOCK"]
    ds = None if weight is None else qkv.new_empty(heads, tokens, span)
    grad = grad.contiguous()
    qkv = qkv.contiguous()
    delta = torch.empty_like(logsumexp)
    launch(
        delta_kernel,
        (-(-tokens // DELTA["TOKENS"]), heads),
        grad=grad,
        output=output.contiguous(),
        delta=delta,
        tokens=tokens,
        HEADS=heads,
        WIDTH=width,
        **DELTA,
    )
    # What both kernels take that may compute the gradients of queries.
    shared = {
        "qkv": qkv,
        "cu_seqlens": cu_seqlens,
        "qkv_grad": None if copy_alone else qkv_grad,
        "qkv_grad8": qkv_grad8 if copies else None,
        "ds": ds,
        "partials": partials,
        "tokens": tokens,
        "span": span,
        "scale": scale,
        "HEADS": heads,
        "WIDTH": width,
        "SUMS": bias is not None,
        "CAUSAL": causal,
        "FACTOR": GRADIENT if copies else 0.0,
        "MAX": E5M2_MAX,
        **BACKWARD,
    }
    launch(
        varlen_attention_backward,
        (blocks, heads, segments),
        grad=grad,
        delta=delta,
        logsumexp=logsumexp,
        seed=seed,
        table=table,
        threshold=threshold_in_8_bits(dropout),
        kept_scale=_dropout_scale(dropout),
        DROPS=dropout > 0,
        REACH=_reach(buckets),
        **shared,
    )
    weight_grad = qkv.new_empty(0)
    if weight is not None:
        launch(attention_query_backward, (blocks, heads, segments), **shared)
        weight_grad = _sums_by_distance(ds, cu_seqlens, buckets, len(weight), causal, weight.dtype)
    bias_grad = qkv.new_empty(0)
    if bias is not None:
        bias_grad = sum_partials(partials, bias.dtype)
    return qkv_grad, bias_grad, weight_grad, qkv_grad8


def _sums_by_distance(
    ds: torch.Tensor,
    cu_seqlens: torch.Tensor,
    buckets: torch.Tensor,
    number_of_buckets: int,
    causal: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the gradient of a RelativeBias's weight [buckets, heads], in type `dtype`.

    It is the sum of `ds` [heads, tokens, span] for each bucket of distances.
    """
    heads, tokens, span = ds.shape
    tiles = (span // BACKWARD["BLOCK"]) ** 2
    partials = ds.new_empty(GROUPS * tiles, number_of_buckets, heads, dtype=torch.float32)
    launch(
        attention_distance_sums,
        (tiles, heads, GROUPS),
        ds=ds,
        cu_seqlens=cu_seqlens,
        buckets=buckets,
        partials=partials,
        segments=len(cu_seqlens) - 1,
        tokens=tokens,
        span=span,
        HEADS=heads,
        BLOCK=BACKWARD["BLOCK"],
        STEP=BACKWARD["STEP"],
        CAUSAL=causal,
        REACH=_reach(buckets),
        BUCKETS=number_of_buckets,
        **DISTANCE_SUMS,
    )
    return sum_partials(partials, dtype)


def _reach(buckets: torch.Tensor | None) -> int:
    """Return the farthest distance that has a bias of its own; 0 where there is no bias."""
    return 0 if buckets is None else len(buckets) // 2


def _setup_context(ctx, inputs, output):
    qkv, bias, cu_seqlens, seed, *ctx.options, weight, buckets, table = inputs[:-2]
    placeholder, ctx.grad8_alone = inputs[-2:]
    attended, logsumexp, _ = output
    ctx.save_for_backward(qkv, bias, attended, logsumexp, cu_seqlens, seed, weight, buckets, table)
    ctx.has_placeholder = placeholder is not None
    # Otherwise logsumexp would get a gradient of zeros, by a kernel of its own.
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _, __):
    qkv, bias, output, logsumexp, cu_seqlens, seed, *relative = ctx.saved_tensors
    if not ctx.needs_input_grad[1]:
        bias = None
    qkv_grad, bias_grad, weight_grad, qkv_grad8 = _attention_backward(
        grad,
        qkv,
        bias,
        output,
        logsumexp,
        cu_seqlens,
        seed,
        *ctx.options,
        *relative,
        ctx.has_placeholder,
        ctx.grad8_alone,
    )
    if not ctx.has_placeholder:
        qkv_grad8 = None
    if ctx.grad8_alone:
        qkv_grad = None
    if not ctx.needs_input_grad[1]:
        bias_grad = None
    # Arguments at the end that have their defaults are not counted in needs_input_grad.
    if relative[0] is None or not ctx.needs_input_grad[8]:
        weight_grad = None
    nones = [None] * 6
    return qkv_grad, bias_grad, *nones, weight_grad, None, None, qkv_grad8, None


_attention.operator.register_autograd(_backward, setup_context=_setup_context)


# The kernels. A program has one block of tokens of one head of one segment. Grids are (blocks,
# heads, segments), for as many blocks as the longest segment may have; a program beyond its
# segment's end leaves at once.
#
# Pointers are those of contiguous tensors: `qkv` and its gradient [tokens, 3, HEADS, WIDTH], query,
# key and value beside each other; `output` and its gradient [tokens, HEADS, WIDTH]; `logsumexp` and
# `delta` [HEADS, tokens]; `cu_seqlens` [segments + 1]; `partials` [segments, blocks, 3, HEADS,
# WIDTH]. A name that ends in _at is a pointer to the elements of a block. One that ends in 8 is
# that of a copy in 8 bits, of what is stored under the name without it, times FACTOR and within
# ±MAX; with a FACTOR of 0 there is none. The copy of the gradient has the same bits where
# `qkv_grad` is None and the copy is stored alone.
#
# A RelativeBias is `table` [HEADS, 2 * REACH + 1], where distance 0 has the number REACH, and
# `buckets`, as long as a row of it. With one, `ds` [HEADS, tokens, span] has the gradients of the
# scaled scores: a row for each key, and in it a column for each query of the key's segment. `span`
# is the longest segment's length, rounded up to a multiple of BLOCK. A row has zeros for queries
# beyond the end, up to a whole STEP; no more of it is ever written or read. If CAUSAL, queries in
# a BLOCK before the key's are never written or read either. Without a RelativeBias REACH is 0,
# `table` and `ds` are None, and all that is of them is left out of the program.
#
# PART is the distance from a query to its key and from a key to its value, HEADS * WIDTH, and
# 3 * PART that from a token's query to the next token's. `kept_scale` is 1 / (1 - rate). Tokens are
# counted from the begin of their segment, where `tokens` is the number of all.


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
    at = (token[:, None] * HEADS + head) * WIDTH + tl.arange(0, WIDTH)
    inside = token[:, None] < tokens
    product = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    product *= tl.load(output + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(delta + head * tokens + token, tl.sum(product, 1), mask=token < tokens)


@jit
def query_seed_kernel(pair, head, tokens, seed):
    """Return what `query_seed` returns, for the numbers `pair` of pairs of queries of a head."""
    seed_bits = tl.load(seed).to(tl.uint32, bitcast=True)
    bits = (head * tokens + pair).to(tl.uint32) * 0x9E3779B1 + seed_bits
    return (bits ^ (bits >> 15)) * 0x846CA68B


@jit
def pairs(SIZE: tl.constexpr):
    """Return for SIZE tokens the number of each one's pair, and whether it is the second of it.

    Tokens eight apart are a pair.
    """
    EIGHTS: tl.constexpr = SIZE // 16
    number = 8 * tl.arange(0, EIGHTS)[:, None, None] + tl.arange(0, 8)
    second = tl.arange(0, 2)[None, :, None]
    return (
        tl.broadcast_to(number, (EIGHTS, 2, 8)).reshape(SIZE),
        tl.broadcast_to(second, (EIGHTS, 2, 8)).reshape(SIZE),
    )


@jit
def dropout_keeps(seeds, keys, shift, threshold):
    """Return which scores dropout keeps.

    `seeds` are those of pairs of queries, `keys` the numbers of pairs of keys, and `shift` says by
    how many bits to shift a hash for each of the four scores that share it. All broadcast.
    """
    bits = hash32_kernel(keys.to(tl.uint32), seeds) << shift
    return bits >= (threshold << 24).to(tl.uint32)


@jit
def segment_of_program(cu_seqlens):
    """Return this program's block and head, and the begin and the length of its segment."""
    segment = tl.program_id(2)
    begin = tl.load(cu_seqlens + segment)
    block = tl.program_id(0)
    head = tl.program_id(1)
    length = tl.load(cu_seqlens + segment + 1) - begin
    return block, head, begin, length


@jit
def distance_bias(table, head, distance, REACH: tl.constexpr):
    """Return the biases of a head's scaled scores, times log2(e), by distance from query to key."""
    number = REACH + tl.minimum(tl.maximum(distance, -REACH), REACH)
    return tl.load(table + head * (2 * REACH + 1) + number)


@jit
def ds_of_segment(ds, head, begin, tokens, span):
    """Return the pointer to a head's gradients of scores in the segment that begins there.

    `ds` may have more elements than 32 bits can count, and its part of a segment has fewer.
    """
    return ds + (head * tokens + begin).to(tl.int64) * span


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
    scale,
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
    """Compute the output and logsumexp of QUERIES queries; `scale` is the scores' times log2(e)."""
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
    # Every query of the block sees the keys before `seen_by_all`, and none those after `last`.
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
        scale=scale,
        threshold=threshold,
        PART=PART,
        KEYS=KEYS,
        DROPS=DROPS,
        ENDS=not CAUSAL,
        CAUSAL=False,
        REACH=REACH,
    )
    if CAUSAL:
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
            scale=scale,
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
    scale,
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
    for begin in tl.range(first, last, KEYS):
        key_token = begin + tl.arange(0, KEYS)
        at = key_at + begin * (3 * PART)
        if ENDS:
            inside = key_token[:, None] < length
            key = tl.load(at, mask=inside, other=0.0)
            value = tl.load(at + PART, mask=inside, other=0.0)
        else:
            key = tl.load(at)
            value = tl.load(at + PART)
        scores = tl.dot(query, key.T, input_precision="ieee")
        if REACH:
            distance = key_token - query_token[:, None]
            scores += distance_bias(table, head, distance, REACH) * (1 / scale)
        if ENDS:
            seen = key_token <= query_token[:, None] if CAUSAL else key_token < length
            scores = tl.where(seen, scores, float("-inf"))
        next_highest = tl.maximum(highest, tl.max(scores, 1) * scale)
        p = tl.exp2(scores * scale - next_highest[:, None])
        correction = tl.exp2(highest - next_highest)
        total = total * correction + tl.sum(p, 1)
        if DROPS:
            pair = begin // 2 + key_pair[None, :]
            p = tl.where(dropout_keeps(seeds[:, None], pair, shift, threshold), p, 0.0)
        acc = tl.dot(p.to(value.dtype), value, acc * correction[:, None], input_precision="ieee")
        highest = next_highest
    return acc, total, highest


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
    first_query = head * tokens + begin
    ds_at = None
    if ds is not None:
        ds_at = ds_of_segment(ds, head, begin, tokens, span)
        ds_at += token[:, None] * span + tl.arange(0, STEP)

    scale_of_base_2 = scale * 1.4426950408889634  # log2(e)
    dk, dv = key_value_grads(
        block_at=block_at,
        step_at=step_at,
        grad_at=grad_at,
        ds_at=ds_at,
        logsumexp=logsumexp + first_query,
        delta=delta + first_query,
        seed=seed,
        table=table,
        token=token,
        inside=inside,
        block=block,
        head=head,
        begin=begin,
        length=length,
        tokens=tokens,
        scale=scale_of_base_2,
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
    first = begin * (3 * PART) + head * WIDTH
    place = token[:, None] * (3 * PART) + width
    if qkv_grad is not None:
        qkv_grad_at = qkv_grad + first + place
        tl.store(qkv_grad_at + PART, dk.to(dtype), mask=inside[:, None])
        tl.store(qkv_grad_at + 2 * PART, dv.to(dtype), mask=inside[:, None])
    if FACTOR != 0.0:
        qkv_grad8_at = qkv_grad8 + first + place
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
        dq = query_grads(
            block_at=block_at,
            step_at=step_at,
            grad_at=grad_at,
            logsumexp=logsumexp + first_query,
            delta=delta + first_query,
            seed=seed,
            token=token,
            inside=inside,
            block=block,
            head=head,
            begin=begin,
            length=length,
            tokens=tokens,
            scale=scale_of_base_2,
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
            first=first,
            place=place,
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
    scale,
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
            scale=scale,
            threshold=threshold,
            kept_scale=kept_scale,
            PART=PART,
            BLOCK=BLOCK,
            STEP=STEP,
            DROPS=DROPS,
            CAUSAL=True,
            REACH=REACH,
        )
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
        scale=scale,
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
    scale,
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
    for at in tl.range(first, last, STEP):
        query_token = at + tl.arange(0, STEP)
        inside = query_token < length
        query = tl.load(step_at + at * (3 * PART), mask=inside[:, None], other=0.0)
        do = tl.load(grad_at + query_token[:, None] * PART, mask=inside[:, None], other=0.0)
        # A query beyond the end is read as zeros, and so are its products: it adds nothing. A bias
        # could be too large for its powers, which an infinite sum makes 0.
        query_logsumexp = tl.load(logsumexp + query_token, mask=inside, other=BEYOND)
        query_delta = tl.load(delta + query_token, mask=inside, other=0.0)
        scores = tl.dot(key, query.T, input_precision="ieee")
        if REACH:
            distance = token[:, None] - query_token[None, :]
            bias = distance_bias(table, head, distance, REACH)
            p = tl.exp2(scores * scale + (bias - query_logsumexp[None, :]))
        else:
            p = tl.exp2(scores * scale - query_logsumexp[None, :])
        if CAUSAL:
            p = tl.where(query_token[None, :] >= token[:, None], p, 0.0)
        dp = tl.dot(value, do.T, input_precision="ieee")
        p_kept = p
        if DROPS:
            seeds = query_seed_kernel(begin + at // 2 + pair, head, tokens, seed)
            pair_of_keys = block * (BLOCK // 2) + key_pair[:, None]
            keep = dropout_keeps(seeds[None, :], pair_of_keys, shift, threshold)
            p_kept = tl.where(keep, p, 0.0)
            dp = tl.where(keep, dp * kept_scale, 0.0)
        dv = tl.dot(p_kept.to(query.dtype), do, dv, input_precision="ieee")
        ds = (p * (dp - query_delta[None, :])).to(query.dtype)
        if ds_at is not None:
            tl.store(ds_at + at, ds, mask=token[:, None] < length)
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
    scale,
    threshold,
    kept_scale,
    PART: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    DROPS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Return dQ [BLOCK, WIDTH], but for the scale, over all keys of the segment."""
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
            scale=scale,
            threshold=threshold,
            kept_scale=kept_scale,
            PART=PART,
            BLOCK=BLOCK,
            STEP=STEP,
            DROPS=DROPS,
            ENDS=True,
            CAUSAL=True,
        )
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
        scale=scale,
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
    scale,
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
    for at in tl.range(first, last, STEP):
        key_token = at + tl.arange(0, STEP)
        inside = (key_token < length)[:, None]
        key = tl.load(step_at + at * (3 * PART) + PART, mask=inside, other=0.0)
        value = tl.load(step_at + at * (3 * PART) + 2 * PART, mask=inside, other=0.0)
        scores = tl.dot(query, key.T, input_precision="ieee")
        if ENDS:
            seen = key_token <= token[:, None] if CAUSAL else key_token < length
            scores = tl.where(seen, scores, float("-inf"))
        p = tl.exp2(scores * scale - query_logsumexp[:, None])
        dp = tl.dot(do, value.T, input_precision="ieee")
        if DROPS:
            keep = dropout_keeps(seeds[:, None], at // 2 + key_pair[None, :], shift, threshold)
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
    first,
    place,
    inside,
    dtype: tl.constexpr,
    SUMS: tl.constexpr,
    FACTOR: tl.constexpr,
    MAX: tl.constexpr,
):
    """Store dQ [BLOCK, WIDTH] of the queries that are `inside`, and its sums.

    The others' rows of dQ are zeros. `first` is where the segment begins in `qkv_grad`, and `place`
    where the queries are from there.
    """
    if qkv_grad is not None:
        tl.store(qkv_grad + first + place, dq.to(dtype), mask=inside[:, None])
    if FACTOR != 0.0:
        dq8 = in_8_bits(dq.to(dtype), FACTOR, MAX, qkv_grad8.dtype.element_ty)
        tl.store(qkv_grad8 + first + place, dq8, mask=inside[:, None])
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
    first = begin * (3 * PART) + head * WIDTH
    step = tl.arange(0, STEP)[:, None]
    key_at = qkv + first + PART + step * (3 * PART) + width
    ds_at = ds_of_segment(ds, head, begin, tokens, span) + step * span + token
    is_written = token < tl.cdiv(length, STEP) * STEP
    dq = tl.zeros([BLOCK, WIDTH], tl.float32)
    last = tl.minimum(length, (block + 1) * BLOCK) if CAUSAL else length
    for at in tl.range(0, last, STEP):
        key_inside = at + step < length
        key = tl.load(key_at + at * (3 * PART), mask=key_inside, other=0.0)
        ds_of_keys = tl.load(ds_at + at * span, mask=key_inside & is_written, other=0.0)
        dq = tl.dot(ds_of_keys.T, key, dq, input_precision="ieee")
    row_of_partials = tl.program_id(2) * tl.num_programs(0) + block
    store_query_grads(
        dq=dq * scale,
        qkv_grad=qkv_grad,
        qkv_grad8=qkv_grad8,
        partials_at=partials + row_of_partials * (3 * PART) + head * WIDTH + width,
        first=first,
        place=token[:, None] * (3 * PART) + width,
        inside=inside,
        dtype=qkv.dtype.element_ty,
        SUMS=SUMS,
        FACTOR=FACTOR,
        MAX=MAX,
    )


@jit
def attention_distance_sums(
    ds,
    cu_seqlens,
    buckets,
    partials,
    segments,
    tokens,
    span,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    CAUSAL: tl.constexpr,
    REACH: tl.constexpr,
    BUCKETS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sum one tile [BLOCK keys, BLOCK queries] of dS, of some of the segments, by bucket.

    The grid is (tiles of span x span, heads, groups of segments), and `partials` are [groups,
    tiles, BUCKETS, HEADS].

    The tiles of all segments of the group are added up first. Elements of one distance then lie on
    a diagonal. Each row is turned by its number, so that diagonals become columns: element (i, j)
    comes from column i + j, counted on from the first column again where there are no more. A
    column then has two diagonals, one of before the count began anew and one of after that, and
    these are summed one after the other. Sums of diagonals go to their buckets by comparing
    numbers. All of it has one order, the same in every run.
    """
    blocks = span // BLOCK
    tile = tl.program_id(0)
    head = tl.program_id(1)
    first_key = tile // blocks * BLOCK
    first_query = tile % blocks * BLOCK
    key = first_key + tl.arange(0, BLOCK)
    query = first_query + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for segment in tl.range(tl.program_id(2), segments, tl.num_programs(2), num_stages=STAGES):
        begin = tl.load(cu_seqlens + segment)
        length = tl.load(cu_seqlens + segment + 1) - begin
        last_query = tl.cdiv(length, STEP) * STEP
        if CAUSAL:
            last_query = tl.where(first_key > first_query, 0, last_query)
        is_written = (key[:, None] < length) & (query < last_query)
        ds_at = ds_of_segment(ds, head, begin, tokens, span) + key[:, None] * span + query
        total += tl.load(ds_at, mask=is_written, other=0.0).to(tl.float32)

    sums = tl.zeros([BUCKETS], tl.float32)
    column = tl.arange(0, BLOCK)
    source = tl.arange(0, BLOCK)[:, None] + column
    turned = tl.gather(total, source % BLOCK, 1)
    for turns in tl.static_range(2):
        diagonals = tl.sum(tl.where(source // BLOCK == turns, turned, 0.0), 0)
        distance = first_key - first_query - column + turns * BLOCK
        number = REACH + tl.minimum(tl.maximum(distance, -REACH), REACH)
        is_of = tl.load(buckets + number)[:, None] == tl.arange(0, BUCKETS)
        sums += tl.sum(tl.where(is_of, diagonals[:, None], 0.0), 0)
    row_of_partials = tl.program_id(2) * tl.num_programs(0) + tile
    bucket = (row_of_partials * BUCKETS + tl.arange(0, BUCKETS)) * HEADS + head
    tl.store(partials + bucket, sums)
