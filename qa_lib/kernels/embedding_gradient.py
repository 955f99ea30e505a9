"""Embeddings whose tables' gradients are summed in a fixed order, by two kernels and no sort.

The gradient of a table of embeddings has in each row the sum of the gradients of the tokens that
looked the row up. BERT has three tables, of very different kinds: most of the 30,522 words have no
token in a batch, and "the" has hundreds; each of the 512 positions has one token a sample; two
token types share all tokens. PyTorch sorts the ids, in a dozen launches a table. Its compiler fills
a table in fp32 with zeros, adds to it by atomic additions, in an order that differs in each run,
and converts it: for words 94 MB are written, and read again for the 47 MB that are wanted in bf16.

Here the tokens are divided into chunks of CHUNK, few enough to be compared each with each:

- A table `places`, a byte for each row and chunk, begins as zeros.
- `embedding_chunk_sums_kernel` has a program for each chunk, and for some columns of it. A token
  with which no earlier one of the chunk shares its id is the first of its row there, and `places`
  gets its place in the chunk. If other tokens of the chunk have that id, too, the program sums
  their gradients in fp32 and writes the sum where the first token has its place. A row's list is
  thereby as long as there are chunks at most, be all tokens of its kind.
- `embedding_gradient_kernel` has the rows of the table. From `places` it knows which chunks have a
  row. It adds what it finds there, TILE chunks at a time: the sum, or the gradient itself of a
  token that is alone. Rows without tokens become zeros in the same launch.

Every number is written by one program, and the order of each sum follows from the ids alone: equal
inputs give equal bits. Nothing asks the device for sizes, so that a captured graph can replay it.

Bytes, for 5,632 tokens of width 768 in bf16 and the table of words: 47 MB of it are written, the
gradient of the tokens is read up to twice (17 MB, the second time partly from the cache), `places`
has 3 MB and the sums of chunks have fewer than that. That takes 16 µs at the 4.2 TB/s of an H200;
41 were measured, with the launch that zeroes `places`. Positions and token types move 9 to 17 MB
and wait for memory rather than fill its bandwidth. They take 17 and 10 µs. By zeros, index_add_ and
a cast the three tables take 99, 40 and 67.

On a CPU, and where PyTorch's compiler traces, it is PyTorch's own embedding. The kernels are for
GPUs of compute capability 7.5 and newer.
"""

import torch
from torch.nn import functional as F

from qa_lib.kernels.common import jit, tl
from qa_lib.kernels.precompile import launch

CHUNK = 64  # tokens; twice as many must be fewer than a byte has values
# A row of `places` has a multiple of it, which every TILE divides; beyond the chunks it has zeros.
CHUNKS_ALIGN = 32
CHUNK_SUMS = {"COLUMNS": 64, "num_warps": 1}
# ROWS are those of the table that a program has; TILE, how many chunks' sums it adds at a time;
# SCANNED, how many entries of `places` it reads at a time to see which rows have tokens. A table
# with more rows than there are tokens is mostly filled with zeros, and a program has several rows.
# In others each row has many tokens, and a program has one row, for which it loads much at once.
MOSTLY_EMPTY = {"ROWS": 8, "TILE": 8, "COLUMNS": 256, "SCANNED": 128, "num_warps": 1}
MOSTLY_USED = {"ROWS": 1, "TILE": 32, "COLUMNS": 64, "SCANNED": 128, "num_warps": 1}


def embedding(ids: torch.Tensor, weight: torch.Tensor, padding: int | None) -> torch.Tensor:
    """Return the rows `ids` of `weight` [rows, width], as F.embedding does: [*ids.shape, width].

    `ids` are integers of any shape. The row `padding`, if there is one, gets no gradient. The
    gradient of `weight` has fewer than 2^31 elements.
    """
    if torch.compiler.is_compiling() or not ids.is_cuda:
        return F.embedding(ids, weight, padding)
    return _Embedding.apply(ids, weight, padding)


class _Embedding(torch.autograd.Function):
    """`embedding`, with its gradient by the kernels."""

    @staticmethod
    def forward(ctx, ids, weight, padding):
        ctx.save_for_backward(ids)
        ctx.rows = len(weight)
        ctx.padding = padding
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx, grad):
        (ids,) = ctx.saved_tensors
        return None, _table_gradient(grad, ids, ctx.rows, ctx.padding), None


def reference(
    grad: torch.Tensor, ids: torch.Tensor, rows: int, padding: int | None
) -> torch.Tensor:
    """Return what `_table_gradient` returns, by plain PyTorch, in fp32, or in fp64 for such."""
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    total = wide.new_zeros(rows, grad.shape[-1])
    total.index_add_(0, ids.flatten(), wide.flatten(0, -2))
    if padding is not None:
        total[padding] = 0.0
    return total


def _table_gradient(
    grad: torch.Tensor, ids: torch.Tensor, rows: int, padding: int | None
) -> torch.Tensor:
    """Return the gradient [rows, width] of a table, by the kernels, in the type of `grad`.

    `grad` is that of the embeddings [*ids.shape, width].
    """
    width = grad.shape[-1]
    grad = grad.contiguous()
    tokens = ids.numel()
    chunks = -(-tokens // CHUNK)
    padded_chunks = -(-chunks // CHUNKS_ALIGN) * CHUNKS_ALIGN
    places = torch.zeros(rows, padded_chunks, dtype=torch.uint8, device=grad.device)
    sums = grad.new_empty(tokens, width, dtype=torch.float32)
    launch(
        embedding_chunk_sums_kernel,
        (chunks, -(-width // CHUNK_SUMS["COLUMNS"])),
        grad=grad,
        ids=ids.contiguous(),
        places=places,
        sums=sums,
        tokens=tokens,
        chunks=padded_chunks,
        padding=-1 if padding is None else padding,
        WIDTH=width,
        CHUNK=CHUNK,
        **CHUNK_SUMS,
    )
    table_grad = grad.new_empty(rows, width)
    sizes = MOSTLY_EMPTY if rows > tokens else MOSTLY_USED
    launch(
        embedding_gradient_kernel,
        (-(-rows // sizes["ROWS"]), -(-width // sizes["COLUMNS"])),
        grad=grad,
        places=places,
        sums=sums,
        table_grad=table_grad,
        rows=rows,
        chunks=padded_chunks,
        WIDTH=width,
        CHUNK=CHUNK,
        **sizes,
    )
    return table_grad


@jit(do_not_specialize=["tokens", "padding"])
def embedding_chunk_sums_kernel(
    grad,
    ids,
    places,
    sums,
    tokens,
    chunks,
    padding,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Find the first token of each id in a chunk of CHUNK tokens; sum COLUMNS of ids with several.

    `grad` and `sums` are [tokens, WIDTH], `ids` [tokens], `places` [rows of the table, chunks]. A
    place is 1 + the number of the first token in the chunk, and CHUNK more where other tokens have
    the same id; the row of that token in `sums` is written then. Tokens whose id is `padding` have
    no place.
    """
    chunk = tl.program_id(0)
    number = tl.arange(0, CHUNK)
    token = chunk * CHUNK + number
    # Beyond the last token all is as in padding.
    row = tl.load(ids + token, mask=token < tokens, other=padding).to(tl.int32)
    same = row[:, None] == row[None, :]
    first = tl.min(tl.where(same, number[:, None], CHUNK), 0)
    is_first = (first == number) & (row != padding)
    has_several = is_first & (tl.sum(same.to(tl.int32), 0) > 1)
    if tl.program_id(1) == 0:
        place = 1 + number + tl.where(has_several, CHUNK, 0)
        tl.store(places + row * chunks + chunk, place.to(tl.uint8), mask=is_first)
    at = tl.min(tl.where(has_several, number, CHUNK))
    if at < CHUNK:
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        in_width = column < WIDTH
        value = tl.load(
            grad + token[:, None] * WIDTH + column,
            mask=(token < tokens)[:, None] & in_width,
            other=0.0,
        ).to(tl.float32)
        while at < CHUNK:
            total = tl.sum(tl.where((first == at)[:, None], value, 0.0), 0)
            tl.store(sums + (chunk * CHUNK + at) * WIDTH + column, total, mask=in_width)
            at = tl.min(tl.where(has_several & (number > at), number, CHUNK))


@jit(do_not_specialize=["rows"])
def embedding_gradient_kernel(
    grad,
    places,
    sums,
    table_grad,
    rows,
    chunks,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCANNED: tl.constexpr,
):
    """Compute COLUMNS columns of ROWS rows of the gradient `table_grad` [rows, WIDTH] of a table.

    `grad`, `places` and `sums` are those of embedding_chunk_sums_kernel. TILE divides `chunks`.
    """
    # Frequent words have neighbouring numbers: each program has rows from all over the table.
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    number = tl.arange(0, ROWS)
    row = program + number * programs
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_width = column < WIDTH
    dtype: tl.constexpr = table_grad.dtype.element_ty
    # Bit i of a row is set where tile i, or i + 64 and so on, has one of the row's tokens.
    used_tiles = tl.zeros([ROWS], tl.int64)
    for begin in range(0, chunks, SCANNED):
        chunk = begin + tl.arange(0, SCANNED)
        place = tl.load(
            places + row[:, None] * chunks + chunk,
            mask=(row < rows)[:, None] & (chunk < chunks),
            other=0,
        ).to(tl.int32)
        in_tile = tl.max(tl.reshape(place, [ROWS, SCANNED // TILE, TILE]), 2) > 0
        tile = begin // TILE + tl.arange(0, SCANNED // TILE)
        used_tiles |= tl.sum(in_tile.to(tl.int64) << (tile % 64)[None, :], 1)
    is_empty = (used_tiles == 0) & (row < rows)
    tl.store(
        table_grad + row[:, None] * WIDTH + column,
        tl.zeros([ROWS, COLUMNS], dtype),
        mask=is_empty[:, None] & in_width,
    )
    at = tl.min(tl.where(used_tiles != 0, number, ROWS))
    while at < ROWS:
        used_row = program + at * programs
        tiles = tl.sum(tl.where(number == at, used_tiles, 0))
        total = tl.zeros([COLUMNS], tl.float32)
        for begin in range(0, chunks, TILE):
            if (tiles >> (begin // TILE % 64)) & 1 != 0:
                chunk = begin + tl.arange(0, TILE)
                place = tl.load(places + used_row * chunks + chunk).to(tl.int32)
                token = chunk * CHUNK + (place - 1) % CHUNK
                element = token[:, None] * WIDTH + column
                is_alone = ((place > 0) & (place <= CHUNK))[:, None] & in_width
                is_sum = (place > CHUNK)[:, None] & in_width
                alone = tl.load(grad + element, mask=is_alone, other=0.0).to(tl.float32)
                total += tl.sum(alone + tl.load(sums + element, mask=is_sum, other=0.0), 0)
        tl.store(table_grad + used_row * WIDTH + column, total.to(dtype), mask=in_width)
        at = tl.min(tl.where((used_tiles != 0) & (number > at), number, ROWS))
