"""The gradients of tables of embeddings are exact sums, in an order that never changes."""

import math

import pytest
import torch
from torch.nn import functional as F

from qa_lib.kernels import embedding_gradient
from qa_lib.kernels.embedding_gradient import CHUNK, _Embedding, embedding
from qa_lib.model.build import build_model
from qa_lib.model.fused_norms import FixedOrderEmbedding
from tests.kernels import DEVICE, with_gradients
from tests.tiny import planned

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def whole_numbers(ids, width, dtype=torch.float32):
    """Gradients of embeddings whose sums fp32 has exactly, in whichever order they are added."""
    torch.manual_seed(0)
    return torch.randint(-8, 9, (*ids.shape, width), device=DEVICE).to(dtype)


def assert_exact(ids, rows, width, dtype=torch.float32, padding=None) -> torch.Tensor:
    """The kernels' gradient is that of plain PyTorch, rounded once; returns it."""
    ids = ids.to(DEVICE)
    grad = whole_numbers(ids, width, dtype)
    gradient = embedding_gradient._table_gradient(grad, ids, rows, padding)
    expected = embedding_gradient.reference(grad.double(), ids, rows, padding)
    assert gradient.dtype == dtype
    assert gradient.shape == (rows, width)
    assert torch.equal(gradient, expected.to(dtype))
    return gradient


def words(tokens, rows):
    """Ids of which few are frequent, as words are (Zipf)."""
    torch.manual_seed(1)
    return (rows ** torch.rand(tokens)).long() % rows


@pytest.mark.parametrize("padding", [None, 0, 3])
def test_the_plain_gradient_is_that_of_pytorch(padding):
    torch.manual_seed(0)
    ids = torch.randint(5, (4, 7))
    grad = torch.randn(4, 7, 6, dtype=torch.float64)
    weight = torch.randn(5, 6, dtype=torch.float64)
    _, expected = with_gradients(lambda w: F.embedding(ids, w, padding), [weight], grad)
    gradient = embedding_gradient.reference(grad, ids, 5, padding)
    torch.testing.assert_close(gradient, expected)


def test_on_a_cpu_embeddings_are_those_of_pytorch():
    ids = torch.randint(5, (4, 7))
    weight = torch.randn(5, 6)
    grad = torch.randn(4, 7, 6)
    results = with_gradients(lambda w: embedding(ids, w, 2), [weight], grad)
    expected = with_gradients(lambda w: F.embedding(ids, w, 2), [weight], grad)
    assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize(
    ("variant", "preset", "tables"), [("E-uncompiled", "smoke", 3), ("L-norm", "lm-smoke", 2)]
)
def test_models_with_fused_norms_have_them(variant, preset, tables):
    model = build_model(planned(variant, preset))
    assert sum(isinstance(module, FixedOrderEmbedding) for module in model.modules()) == tables


# What surrounds the kernels.


def chunk_sums(grid, grad, ids, places, sums, tokens, padding, WIDTH, CHUNK, COLUMNS, **_):
    """What the kernel of the same name does, in plain PyTorch."""
    assert grid == (math.ceil(tokens / CHUNK), math.ceil(WIDTH / COLUMNS))
    grad = grad.view(tokens, WIDTH)
    for begin in range(0, tokens, CHUNK):
        ids_of_chunk = ids.flatten()[begin : begin + CHUNK]
        for row in set(ids_of_chunk.tolist()) - {padding}:
            at = (ids_of_chunk == row).nonzero()[:, 0]
            several = CHUNK if len(at) > 1 else 0
            places[row, begin // CHUNK] = 1 + at[0] + several
            if several:
                sums[begin + at[0]] = grad[begin + at].sum(0)


def gradient(grid, grad, places, sums, table_grad, rows, chunks, CHUNK, ROWS, TILE, COLUMNS, **_):
    """What the kernel of the same name does, in plain PyTorch."""
    assert places.shape == (rows, chunks)
    assert chunks % TILE == 0
    assert grid == (math.ceil(rows / ROWS), math.ceil(table_grad.shape[1] / COLUMNS))
    table_grad.zero_()
    grad = grad.view(sums.shape)
    for row, chunk in places.nonzero().tolist():
        place = places[row, chunk].item() - 1
        found = sums if place >= CHUNK else grad
        table_grad[row] += found[chunk * CHUNK + place % CHUNK]


@pytest.mark.parametrize("rows", [5, 500])
@pytest.mark.parametrize("padding", [None, 0, 3])
def test_what_surrounds_the_kernels_gives_the_weight_its_gradient(rows, padding, monkeypatch):
    in_pytorch = {
        embedding_gradient.embedding_chunk_sums_kernel: chunk_sums,
        embedding_gradient.embedding_gradient_kernel: gradient,
    }

    def launch(kernel, grid, /, **arguments):
        in_pytorch[kernel](grid, **arguments)

    monkeypatch.setattr(embedding_gradient, "launch", launch)
    ids = words(2 * 75, rows).view(2, 75)
    weight = torch.randn(rows, 6)
    grad = torch.randn(2, 75, 6)
    results = with_gradients(lambda w: _Embedding.apply(ids, w, padding), [weight], grad)
    expected = with_gradients(lambda w: F.embedding(ids, w, padding), [weight], grad)
    torch.testing.assert_close(results, expected)


# The kernels.


@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("padding", [None, 0, 1])
@pytest.mark.parametrize(("tokens", "rows"), [(150, 40), (150, 331), (2200, 9)])
def test_the_gradient_is_the_exact_sum_in_the_type_of_the_weight(tokens, rows, padding, dtype):
    gradient = assert_exact(words(tokens, rows), rows, 24, dtype, padding)
    if padding is not None:
        assert not gradient[padding].any()


@pytest.mark.triton
@pytest.mark.parametrize("width", [1, 12, 128, 384, 768, 1024])
@pytest.mark.parametrize("rows", [2, 200])
def test_tables_may_have_any_width(width, rows):
    assert_exact(words(2 * CHUNK + 1, rows), rows, width)


@pytest.mark.triton
@pytest.mark.parametrize("tokens", [1, CHUNK, CHUNK + 1, 40 * CHUNK])
@pytest.mark.parametrize("rows", [1, 9, 301])
def test_tokens_may_all_have_one_id(tokens, rows):
    """Padding gets none, though nothing else is there."""
    ids = torch.full((tokens,), rows - 1)
    assert_exact(ids, rows, 8)
    assert not assert_exact(ids, rows, 8, padding=rows - 1).any()


@pytest.mark.triton
def test_tokens_may_all_have_other_ids():
    torch.manual_seed(0)
    assert_exact(torch.randperm(200)[:150], 200, 8)
    assert_exact(torch.randperm(150), 150, 8)


@pytest.mark.triton
def test_positions_begin_anew_in_each_sample():
    lengths = (1, 70, 33, 130, 64)
    assert_exact(torch.cat([torch.arange(length) for length in lengths]), 140, 8)


@pytest.mark.triton
def test_batches_need_not_lie_in_one_piece():
    """Ids that are repeated for each sample, and gradients that are transposed."""
    ids = torch.arange(70, device=DEVICE).expand(3, 70)
    grad = whole_numbers(ids, 16).transpose(0, 1).contiguous().transpose(0, 1)
    gradient = embedding_gradient._table_gradient(grad, ids, 71, None)
    assert torch.equal(gradient, embedding_gradient.reference(grad, ids, 71, None))


@pytest.mark.triton
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=str)
def test_the_function_looks_up_and_gives_the_weight_its_gradient(ids_dtype):
    ids = words(130, 50).view(2, 65).to(DEVICE, ids_dtype)
    weight = torch.randn(50, 16, device=DEVICE)
    grad = whole_numbers(ids, 16)
    results = with_gradients(lambda w: _Embedding.apply(ids, w, 1), [weight], grad)
    expected = with_gradients(lambda w: F.embedding(ids, w, 1), [weight], grad)
    assert all(map(torch.equal, results, expected))


@pytest.mark.triton
def test_a_head_with_the_same_weight_adds_its_gradient():
    ids = words(100, 60).to(DEVICE)
    weight = torch.randn(60, 16, device=DEVICE)
    grad = torch.randn(100, 60, device=DEVICE)

    def logits(look_up):
        return lambda w: look_up(ids, w, None) @ w.T

    results = with_gradients(logits(_Embedding.apply), [weight], grad)
    expected = with_gradients(logits(F.embedding), [weight], grad)
    torch.testing.assert_close(results, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [3, 350])
def test_two_calls_give_the_same_bits(rows, dtype):
    torch.manual_seed(0)
    ids = words(300, rows).to(DEVICE)
    grad = torch.randn(300, 40, device=DEVICE).to(dtype)
    first, second = (embedding_gradient._table_gradient(grad, ids, rows, None) for _ in range(2))
    assert torch.equal(first, second)
    expected = embedding_gradient.reference(grad.double(), ids, rows, None)
    precision = torch.finfo(dtype).eps
    torch.testing.assert_close(first.double(), expected, atol=2e-5, rtol=precision)


@pytest.mark.triton
def test_what_is_not_a_number_stays_in_its_own_row():
    """A step in fp16 whose gradients overflow is left out, and others are not disturbed."""
    ids = torch.tensor([0, 1, 0, 2, 1, 3], device=DEVICE)
    grad = torch.ones(6, 8, device=DEVICE)
    grad[2] = torch.inf
    grad[3] = torch.nan
    gradient = embedding_gradient._table_gradient(grad, ids, 5, None)
    assert gradient[0].isinf().all()
    assert gradient[2].isnan().all()
    assert gradient[[1, 3, 4]].tolist() == [[2.0] * 8, [1.0] * 8, [0.0] * 8]


@pytest.mark.skipif(DEVICE.type == "cpu", reason="a CPU captures no graph")
def test_replays_of_a_captured_graph_take_the_ids_of_the_time():
    ids = words(5632, 30_522).to(DEVICE)
    grad = whole_numbers(ids, 768, torch.bfloat16)

    def gradient():
        return embedding_gradient._table_gradient(grad, ids, 30_522, 0)

    gradient()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = gradient()
    for other_ids in (ids.flip(0), torch.zeros_like(ids), ids % 1000):
        ids.copy_(other_ids)
        graph.replay()
        expected = embedding_gradient.reference(grad.double(), ids, 30_522, 0)
        assert torch.equal(result, expected.to(result.dtype))
