"""What the kernels of varlen attention share: their tensors in memory, and device functions.

A program has one block of tokens of one head of one segment. Grids are (blocks, heads, segments)
where a kernel says nothing else, for as many blocks as the longest segment may have; a program
beyond its segment's end leaves at once.

Pointers are those of contiguous tensors:

    qkv, qkv_grad       [tokens, 3, HEADS, WIDTH], query, key and value beside each other
    output, grad        [tokens, HEADS, WIDTH], and the gradient of that
    logsumexp, delta    [HEADS, tokens]
    cu_seqlens          [segments + 1]
    partials            [segments, blocks, 3, HEADS, WIDTH]
    table               [HEADS, 2 * REACH + 1]
    buckets             [2 * REACH + 1]
    ds                  [HEADS, tokens, span]

Tokens are counted from the begin of their segment, but tokens is the number of all. Loops go from
the token first on and end before the token last; first_query and first_key are the first tokens
of a step. What is counted in elements of memory has a name that ends in _offset, and a pointer to
the elements of a block one that ends in _at. scale multiplies the scores, and scale_log2 is that
times log2(e), for powers of base 2.

A name that ends in 8 is that of a copy in 8 bits, of what is stored under the name without it,
times FACTOR and within ±MAX; with a FACTOR of 0 there is none. The copy of the gradient has the
same bits where qkv_grad is None and the copy is stored alone.

The table and the buckets are a BiasByDistance's; distance 0 has the number REACH. With one, ds has
the gradients of the scaled scores: a row for each key, and in it a column for each query of the
key's segment. Its span is the longest segment's length, rounded up to a multiple of BLOCK. A row
has zeros for queries beyond the end, up to a whole STEP; no more of it is ever written or read. If
CAUSAL, queries in a BLOCK before the key's are never written or read either. Without a
BiasByDistance, REACH is 0, table and ds are None, and all that is of them is left out of the
program.

PART is the distance from a query to its key and from a key to its value, HEADS * WIDTH, and
3 * PART that from a token's query to the next token's. kept_scale is 1 / (1 - rate).
"""

from qa_lib.kernels.common import jit, tl
from qa_lib.kernels.hash_dropout import KERNEL_GOLDEN, hash32_kernel


@jit
def query_seed_kernel(pair, head, tokens, seed):
    """Return what `query_seed` returns, for the numbers `pair` of pairs of queries of a head."""
    seed_bits = tl.load(seed).to(tl.uint32, bitcast=True)
    bits = (head * tokens + pair).to(tl.uint32) * KERNEL_GOLDEN + seed_bits
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
