"""The gradient of varlen attention's bias by distance: the sums of dS along diagonals.

varlen_attention.py says why dS is in memory, varlen_device.py how it lies there.
"""

import torch

from qa_lib.kernels.common import jit, tl
from qa_lib.kernels.partial_sums import sum_partials
from qa_lib.kernels.precompile import launch
from qa_lib.kernels.varlen_backward import BACKWARD
from qa_lib.kernels.varlen_device import ds_of_segment

# So many programs share the segments of a sum by distance. Each of them sums diagonals: the whole
# backward pass of a layer took 163 µs with 4 and 175 with 8 (one H200, 32 samples of SQuAD).
GROUPS = 4
DISTANCE_SUMS = {"STAGES": 3, "num_warps": 4}


def sums_by_distance(
    ds: torch.Tensor,
    cu_seqlens: torch.Tensor,
    buckets: torch.Tensor,
    number_of_buckets: int,
    causal: bool,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the gradient of a BiasByDistance's weight [buckets, heads], in type `dtype`.

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
        REACH=reach_of(buckets),
        BUCKETS=number_of_buckets,
        **DISTANCE_SUMS,
    )
    return sum_partials(partials, dtype)


def reach_of(buckets: torch.Tensor | None) -> int:
    """Return the farthest distance that has a bias of its own; 0 where there is no bias."""
    return 0 if buckets is None else len(buckets) // 2


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
    a diagonal. Each row is turned by its number, so that diagonals become columns, and the columns
    are summed. Sums of diagonals go to their buckets by comparing numbers. All of it has one order,
    the same in every run.
    """
    blocks = span // BLOCK
    tile = tl.program_id(0)
    head = tl.program_id(1)
    first_key = tile // blocks * BLOCK
    first_query = tile % blocks * BLOCK
    key_token = first_key + tl.arange(0, BLOCK)
    query_token = first_query + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for segment in tl.range(tl.program_id(2), segments, tl.num_programs(2), num_stages=STAGES):
        begin = tl.load(cu_seqlens + segment)
        length = tl.load(cu_seqlens + segment + 1) - begin
        last_query = tl.cdiv(length, STEP) * STEP
        if CAUSAL:
            last_query = tl.where(first_key > first_query, 0, last_query)
        is_written = (key_token[:, None] < length) & (query_token < last_query)
        ds_at = (
            ds_of_segment(ds, head, begin, tokens, span) + key_token[:, None] * span + query_token
        )
        total += tl.load(ds_at, mask=is_written, other=0.0).to(tl.float32)

    # A tile of 4 x 4, each element by its distance (key minus query, without the distance from the
    # tile's first query to its first key). Row i is turned to the left by i places: its column c
    # comes from column i + c, and what leaves the row on the left comes in again on the right.
    #
    #     before             after
    #      0 -1 -2 -3         0 -1 -2 -3
    #      1  0 -1 -2         0 -1 -2| 1
    #      2  1  0 -1         0 -1| 2  1
    #      3  2  1  0         0| 3  2  1
    #
    # Column c then has two diagonals. Left of the line is that of distance -c, of elements that
    # have not come in again (turns is 0); right of it that of BLOCK - c, of those that have (1).
    # The loop sums one after the other.
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
