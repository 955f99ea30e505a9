"""Bias, dropout, residual and norm in one kernel, against plain PyTorch in float64 with gradients.

And dropout by a hash alone, which keeps the rate, scales what it keeps, and draws anew when told.
"""

import copy
import functools
import math

import pytest
import torch
from torch import library
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertOutput

from qa_lib.kernels import fp8, fused_norm, gelu, hash_dropout, partial_sums
from qa_lib.kernels.hash_dropout import _HashDropout
from qa_lib.model import fused_norms
from qa_lib.model.build import build_model
from qa_lib.model.fused_gelu import FusedIntermediate
from qa_lib.model.fused_norms import FusedOutput
from qa_lib.model.hash_dropout import HashDropout, renew, use_hash_dropout
from qa_lib.spec.machine import Machine
from qa_lib.train.compile import compile_kernels
from tests.kernels import (
    CHECKS,
    DEVICE,
    assert_close,
    assert_copy,
    close_to_plain,
    in_8_bits,
    replayed,
    with_gradients,
)
from tests.tiny import checkpoint, having, packed_model, planned

EPS = 1e-5


def drawn(rows, width, dtype=torch.float32, others=None):
    """The inputs of a norm, the gradient of its output, and a seed.

    The inputs are a linear layer's output, of type `dtype`, and bias, residual, gamma and beta, of
    type `others`, by default the same.
    """
    torch.manual_seed(0)
    others = others or dtype
    x = torch.randn(rows, width, device=DEVICE).to(dtype)
    residual = torch.randn(rows, width, device=DEVICE).to(others) + 3
    grad = torch.randn(rows, width, device=DEVICE).to(others)
    bias, gamma, beta = (torch.randn(width, device=DEVICE).to(others) for _ in range(3))
    seed = torch.tensor(-1234567, dtype=torch.int32, device=DEVICE)
    return (x, bias, residual, gamma, beta), grad, seed


def by_kernel(seed, dropout):
    """The function of the inputs that runs the kernel."""

    def norm(*inputs):
        output, *_ = fused_norm._norm(*inputs, seed, dropout, EPS)
        return output

    return norm


def by_plain(seed, dropout):
    """The same function by plain PyTorch."""

    def norm(*inputs):
        _, output = fused_norm.reference(*inputs, seed, dropout, EPS)
        return output

    return norm


def close(inputs, grad, seed, dropout, error):
    """What the kernel gives, which must be near to the reference."""
    return close_to_plain(by_kernel(seed, dropout), by_plain(seed, dropout), inputs, [grad], error)


def plain_norm(x, bias, residual, gamma, beta, kept, rate):
    """Bias, dropout by a mask, residual and layer norm by their formulas."""
    total = residual + (x + bias) * kept / (1 - rate)
    centred = total - total.sum(-1, keepdim=True) / total.shape[-1]
    variance = (centred * centred).sum(-1, keepdim=True) / total.shape[-1]
    return gamma * centred / (variance + EPS) ** 0.5 + beta


# The calls by a layer, and the kernel.
NORMS = [
    fused_norm.fused_norm,
    pytest.param(fused_norm._norm, marks=pytest.mark.triton, id="kernel"),
]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 2), (3, 5), (13, 129), (2, 1023), (3, 1025), (2, 3, 7)], ids=str
)
def test_shapes_of_odd_sizes_are_normed_by_the_formula(shape, norm):
    """With what HashDropout drops, which the gradient of the linear layer's output shows too."""
    inputs, grad, seed = drawn(math.prod(shape[:-1]), shape[-1])
    inputs = [x.view(shape) if x.ndim == 2 else x for x in inputs]
    grad = grad.view(shape)
    dropout = HashDropout(0.25).to(DEVICE)
    dropout.seed.copy_(seed)
    kept = dropout(torch.ones(shape, device=DEVICE)) != 0
    wide = [x.double() for x in inputs]
    expected = with_gradients(lambda *x: plain_norm(*x, kept, 0.25), wide, grad.double())
    results = with_gradients(lambda *x: norm(*x, seed, 0.25, EPS)[0], inputs, grad)
    torch.testing.assert_close([x.double() for x in results], expected, atol=2e-3, rtol=1e-4)


@pytest.mark.triton
@pytest.mark.parametrize("rows_at_once", [1, 4])
def test_programs_with_several_rows_and_none_beyond_the_last_add_all_up(rows_at_once, monkeypatch):
    monkeypatch.setattr(fused_norm, "PROGRAMS", 3)
    for options in (fused_norm.FORWARD, fused_norm.BACKWARD):
        monkeypatch.setitem(options, "ROWS", rows_at_once)
    close(*drawn(19, 96), 0.1, 1e-5)


# The last as autocast has it.
HALVES = [
    (torch.float16, None, 2e-3),
    (torch.bfloat16, None, 1e-2),
    (torch.bfloat16, torch.float32, 5e-3),
]


@pytest.mark.triton
@pytest.mark.parametrize(("dtype", "others", "error"), HALVES, ids=str)
def test_in_half_precision_it_is_as_near_as_that_allows(dtype, others, error):
    inputs, grad, seed = drawn(9, 96, dtype, others)
    output, *gradients = close(inputs, grad, seed, 0.1, error)
    assert output.dtype == (others or dtype)
    assert [gradient.dtype for gradient in gradients] == [x.dtype for x in inputs]


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_kernel_of_its_own_drops_the_same_elements_and_their_gradients(dtype):
    x, grad = torch.randn(2, 5, 333, device=DEVICE).to(dtype)
    seed = torch.tensor(77, dtype=torch.int32, device=DEVICE)
    results = with_gradients(lambda x: _HashDropout.apply(x, seed, 0.1), [x], grad)
    for dropped, tensor in zip(results, (x, grad), strict=True):
        expected = hash_dropout.hash_dropout(tensor.cpu(), seed.cpu(), 0.1)
        assert torch.equal(dropped.cpu() == 0, expected == 0)
        torch.testing.assert_close(dropped.cpu(), expected)


@pytest.mark.triton
def test_large_means_and_tensors_that_are_not_contiguous_change_nothing():
    (x, bias, residual, gamma, beta), grad, seed = drawn(6, 96)
    transposed_x = x.T.contiguous().T
    transposed_grad = grad.T.contiguous().T
    inputs = (transposed_x, bias, residual + 1000, gamma, beta)
    close(inputs, transposed_grad, seed, dropout=0.1, error=1e-3)


@pytest.mark.triton
@pytest.mark.parametrize("keeps", [False, True])
def test_the_operators_are_what_the_compiler_takes_them_for(keeps):
    inputs, _, seed = drawn(4, 32)
    arguments = (*(x.requires_grad_() for x in inputs), seed, 0.1, EPS, keeps)
    library.opcheck(fused_norm._norm.operator, arguments, test_utils=CHECKS, atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="a CPU captures no graph")
def test_replays_of_a_captured_graph_drop_out_by_the_seed_of_the_time():
    inputs, grad, seed = drawn(70, 768, torch.bfloat16)
    wide = [x.double() for x in inputs]
    for results in replayed(lambda: with_gradients(by_kernel(seed, 0.1), inputs, grad), seed):
        expected = with_gradients(by_plain(seed, 0.1), wide, grad.double())
        assert_close(results, expected, 1e-2)


# Models.


def built(norms, gelu_="sigmoid", **sources):
    """A model with such norms and GELU, as `packed_model` gives it.

    The seeds of its dropout are those of every other.
    """
    settings = {"norms": norms, "gelu": gelu_}
    spec = planned("E-gelu", settings=settings, machine=Machine(), **sources)
    model, packed, inputs = packed_model(spec)
    torch.manual_seed(5)
    renew(model)
    return model, packed, inputs


def loss_and_gradients(model, loss):
    """A loss, and the gradients of the model's parameters by name."""
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Makes the checkpoint of a tiny encoder of some kind, once."""
    return functools.cache(lambda kind: checkpoint(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture(scope="module")
def results_of(folder_of):
    """Computes the loss and the gradients of an encoder with such norms and GELU, once."""

    @functools.cache
    def results_of(kind, norms, gelu_):
        model, packed, inputs = built(norms, gelu_, model=folder_of(kind))
        return loss_and_gradients(model, packed(**inputs).loss)

    return results_of


@pytest.mark.parametrize("kind", having("E-gelu"))
def test_fused_norms_give_the_loss_the_gradients_and_the_names_of_native_ones(kind, results_of):
    native = results_of(kind, "native", "sigmoid")
    fused = results_of(kind, "fused", "sigmoid")
    assert list(fused) == list(native)
    torch.testing.assert_close(fused, native, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", having("E-gelu"))
def test_gelu_by_a_sigmoid_gives_nearly_the_loss_and_gradients_of_the_exact_one(kind, results_of):
    exact = results_of(kind, "native", "exact")
    sigmoid = results_of(kind, "native", "sigmoid")
    assert list(sigmoid) == list(exact)
    assert not torch.equal(sigmoid["loss"], exact["loss"])
    torch.testing.assert_close(sigmoid, exact, atol=1e-3, rtol=1e-3)


# By norms and GELU: how many modules of a layer are replaced.
REPLACED = [("native", "exact", 0, 0), ("native", "sigmoid", 0, 1), ("fused", "sigmoid", 2, 1)]


@pytest.mark.parametrize("kind", having("E-gelu"))
@pytest.mark.parametrize(("norms", "gelu_", "outputs", "intermediates"), REPLACED)
def test_every_encoder_can_have_them(kind, norms, gelu_, outputs, intermediates, folder_of):
    model, _, _ = built(norms, gelu_, model=folder_of(kind))
    layers = model.config.num_hidden_layers
    modules = list(model.modules())
    assert sum(isinstance(m, FusedOutput) for m in modules) == layers * outputs
    assert sum(isinstance(m, FusedIntermediate) for m in modules) == layers * intermediates


def norm_by_kernel(*inputs):
    output, *_ = fused_norm._norm(*inputs)
    return None, output


def gelu_gradients_by_kernel(grad, x, bias, tanh):
    x_grad, bias_grad, _, y = gelu._gelu_backward(grad, x, bias, 0.0, tanh)
    return x_grad, bias_grad, y


@pytest.fixture
def kernels_in_place_of_references(monkeypatch):
    monkeypatch.setattr(fused_norm, "reference", norm_by_kernel)
    monkeypatch.setattr(gelu, "reference", gelu_gradients_by_kernel)
    # The interpreter takes its time for each program.
    for module in (fused_norm, gelu):
        monkeypatch.setattr(module, "PROGRAMS", 2)
    for options in (fused_norm.FORWARD, fused_norm.BACKWARD, gelu.BACKWARD):
        monkeypatch.setitem(options, "ROWS", 256)


def traced(norms):
    """The loss and the gradients of a model that was traced, as the compiler has it."""
    model, packed, inputs = built(norms)
    forward = torch.compile(packed, backend="aot_eager", fullgraph=True)
    return loss_and_gradients(model, forward(**inputs).loss)


@pytest.mark.triton
@pytest.mark.skipif(
    DEVICE.type == "cuda", reason="the model is on the CPU, for Triton's interpreter"
)
def test_the_model_trains_by_the_kernels_as_without_them(request):
    native = traced("native")
    request.getfixturevalue("kernels_in_place_of_references")
    torch.testing.assert_close(traced("fused"), native, atol=1e-5, rtol=1e-3)


@pytest.mark.triton
@pytest.mark.parametrize(("programs", "width"), [(1, 768), (128, 3), (129, 17), (264, 2304)])
def test_the_partial_sums_of_programs_are_added_up(programs, width):
    partials = torch.randn(programs, width, device=DEVICE)
    total = partial_sums.sum_partials(partials, torch.float32)
    torch.testing.assert_close(total, partials.sum(0), atol=1e-4, rtol=1e-5)


@pytest.mark.triton
@pytest.mark.parametrize("used", [slice(0, 1), slice(1, 2), slice(0, 2)], ids=str)
def test_a_norm_that_goes_two_ways_adds_up_both_gradients(used):
    inputs, grad, seed = drawn(7, 32)
    grads = (grad, 2 * grad)[used]
    norm = by_kernel(seed, 0.1)

    def both_ways(*x):
        return fused_norm._BothWays.apply(*x, seed, 0.1, EPS)[used]

    def two_norms(*x):
        return (norm(*x), norm(*x))[used]

    results = with_gradients(both_ways, inputs, *grads)
    expected = with_gradients(two_norms, inputs, *grads)
    torch.testing.assert_close(results, expected, atol=1e-5, rtol=1e-5)


def test_a_pass_among_fake_tensors_leaves_no_gradients_and_draws_nothing():
    model, packed, inputs = built("fused")
    state = torch.get_rng_state()
    compile_kernels(lambda: packed(**inputs).loss, model)
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(state, torch.get_rng_state())


def test_dynamo_traces_the_whole_model_after_a_pass_among_fake_tensors():
    model, packed, inputs = built("fused")
    compile_kernels(lambda: packed(**inputs).loss, model)
    loss = packed(**inputs).loss
    traced_loss = torch.compile(packed, backend="aot_eager", fullgraph=True)(**inputs).loss
    torch.testing.assert_close(traced_loss, loss)
    results = loss_and_gradients(model, traced_loss)
    assert all(tensor is not None and tensor.isfinite().all() for tensor in results.values())


def with_copies(inputs, grad, seed, dropout):
    """A norm's output with its e4m3 copy, and the gradient of `x` with its e5m2 copy."""
    (output, copy8), (x_grad, x_grad8, *_) = gradients_in_8_bits(inputs, grad, seed, dropout)
    return (output, copy8), (x_grad, x_grad8)


def gradients_in_8_bits(inputs, grad, seed, dropout, alone=False):
    """A norm's output with its copy, and the gradients of `x`, of its placeholder and of others.

    With `alone`, x has no gradient, which is None.
    """
    x, *others = (tensor.detach().requires_grad_() for tensor in inputs)
    placeholder = fp8.placeholder_of(x).requires_grad_()
    output, _, copy8 = fused_norm._BothWays.apply(
        x, *others, seed, dropout, EPS, False, placeholder, True, alone
    )
    leaves = (x, placeholder, *others)
    gradients = torch.autograd.grad(output, leaves, grad, allow_unused=True)
    return (output.detach(), copy8.view(torch.float8_e4m3fn)), gradients


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows_at_once", [1, 4])
def test_both_kernels_copy_what_they_store_into_8_bits_and_saturate(
    rows_at_once, dtype, monkeypatch
):
    for options in (fused_norm.FORWARD, fused_norm.BACKWARD):
        monkeypatch.setitem(options, "ROWS", rows_at_once)
    (x, bias, residual, gamma, beta), grad, seed = drawn(7, 33, dtype)
    gamma[0] = 100
    beta[1] = torch.inf
    beta[2] = -torch.inf
    for stored, copy8 in with_copies((x, bias, residual, gamma, beta), grad, seed, 0.1):
        assert_copy(copy8, stored)


@pytest.mark.triton
def test_copies_change_nothing_of_what_they_are_copies_of():
    inputs, grad, seed = drawn(5, 33, torch.bfloat16)
    (output, _), (x_grad, _) = with_copies(inputs, grad, seed, 0.1)
    expected, wanted_x_grad, *_ = with_gradients(by_kernel(seed, 0.1), inputs, grad)
    assert torch.equal(output, expected)
    assert torch.equal(x_grad, wanted_x_grad)


def assert_alone_changes_nothing_else(dtype) -> None:
    """Without a gradient of x in its own type, all other gradients have the same bits."""
    inputs, grad, seed = drawn(5, 33, dtype)
    _, (x_grad, *gradients) = gradients_in_8_bits(inputs, grad, seed, 0.1, alone=True)
    _, (_, *expected) = gradients_in_8_bits(inputs, grad, seed, 0.1)
    assert x_grad is None
    for found, wanted in zip(gradients, expected, strict=True):
        assert torch.equal(found.float(), wanted.float())


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_leaves_out_the_gradient_of_which_only_the_copy_is_read(dtype):
    assert_alone_changes_nothing_else(dtype)


@pytest.mark.triton
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("rows", "width"), [(1, 768), (7, 96), (4, 3), (5, 1024)])
def test_the_kernel_gives_the_residual_stream_and_its_norm(rows, width, dropout):
    inputs, grad, seed = drawn(rows, width)

    def by_kernel_with_sum(*inputs):
        output, _, total, _ = fused_norm._norm(*inputs, seed, dropout, EPS, keeps=True)
        return total, output

    def by_plain_with_sum(*inputs):
        return fused_norm.reference(*inputs, seed, dropout, EPS)

    close_to_plain(by_kernel_with_sum, by_plain_with_sum, inputs, (grad.flip(0), grad), 1e-5)


def stream_and_norm(inputs, grads, seed, alone):
    """The residual stream, its norm and the norm's e4m3 copy, and the gradients.

    `grads` are those of stream and norm. Gradients are of x, of its placeholder and of others; with
    `alone`, x has none.
    """
    x, *others = (tensor.detach().requires_grad_() for tensor in inputs)
    placeholder = fp8.placeholder_of(x).requires_grad_()
    output, total, copy8 = fused_norm._BothWays.apply(
        x, *others, seed, 0.1, EPS, True, placeholder, True, alone
    )
    leaves = (x, placeholder, *others)
    gradients = torch.autograd.grad((total, output), leaves, grads, allow_unused=True)
    return (total.detach(), output.detach(), copy8.view(torch.float8_e4m3fn)), gradients


def assert_stream_has_copies(dtype, cast) -> None:
    """Copies beside a residual stream are of what is stored, and change nothing of it.

    `cast` is what makes a copy of a tensor.
    """
    inputs, grad, seed = drawn(7, 33, dtype)
    grads = (grad.flip(0), grad)

    def without_copies(*x):
        output, _, total, _ = fused_norm._norm(*x, seed, 0.1, EPS, keeps=True)
        return total, output

    total, output, *expected = with_gradients(without_copies, inputs, *grads)
    for alone in (False, True):
        results, (x_grad, x_grad8, *gradients) = stream_and_norm(inputs, grads, seed, alone)
        assert torch.equal(results[0], total)
        assert torch.equal(results[1], output)
        assert torch.equal(results[2].float(), in_8_bits(output, results[2], cast).float())
        expected8 = in_8_bits(expected[0], x_grad8, cast).view(x_grad8.shape)
        assert torch.equal(x_grad8.float(), expected8.float())
        assert x_grad is None if alone else torch.equal(x_grad, expected[0])
        for found, wanted in zip(gradients, expected[1:], strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_copies_beside_a_residual_stream(dtype):
    assert_stream_has_copies(dtype, fp8._cast)


@pytest.mark.triton
def test_the_last_norm_of_a_residual_stream_gets_the_gradient_of_its_output_alone():
    inputs, grad, seed = drawn(7, 32)

    def last(*x):
        return fused_norm._BothWays.apply(*x, seed, 0.1, EPS, True)[:1]

    def plain(*x):
        return fused_norm.reference(*x, seed, 0.1, EPS)[1:]

    close_to_plain(last, plain, inputs, (grad,), 1e-5)


# Dropout by a hash, by itself.

P = 0.1


def dropout_of(seed: int) -> HashDropout:
    dropout = HashDropout(P)
    dropout.seed.fill_(seed)
    return dropout


def test_dropout_keeps_its_rate_and_scales_what_it_keeps():
    values = torch.randn(512, 768) + 3
    dropped = dropout_of(7)(values)
    kept = dropped != 0
    assert 1 - kept.float().mean().item() == pytest.approx(P, abs=0.002)  # 4 standard deviations
    assert torch.allclose(dropped[kept], values[kept] / (1 - P))


def test_patterns_of_seeds_neighbours_rows_and_columns_are_unrelated():
    seeds = (5, 6, 99, 5 + 768, 2**31 - 1)
    patterns = torch.stack([dropout_of(seed)(torch.ones(1024, 768)) != 0 for seed in seeds])
    kept = patterns.flatten(1).float() - (1 - P)
    variance = P * (1 - P)
    noise = 1 / kept.shape[1] ** 0.5
    correlations = kept @ kept.T / kept.shape[1] / variance
    assert (correlations - torch.eye(len(kept))).abs().max() < 5 * noise
    first = kept[0]
    for distance in (1, 2, 64, 768, 1536):
        correlation = (first[distance:] * first[:-distance]).mean() / variance
        assert correlation.abs() < 5 * noise, distance
    for axis, elements in ((0, 1024), (1, 768)):
        deviation = first.view(1024, 768).mean(axis).std().item()
        assert deviation == pytest.approx((variance / elements) ** 0.5, rel=0.15)


@pytest.fixture
def model_with_hash_dropout():
    """In half precision, which leaves the seeds as they are."""
    return build_model(planned("E-packed", settings={"dropout": "hash"})).to(torch.bfloat16)


def seeds_of(model):
    modules = [module for module in model.modules() if isinstance(module, HashDropout)]
    return torch.stack([module.seed for module in modules])


def renewed_seeds(model, seed):
    """The seeds that a model gets from PyTorch's generator after `seed`."""
    torch.manual_seed(seed)
    renew(model)
    return seeds_of(model)


def test_embeddings_and_both_blocks_of_every_layer_have_a_seed_each(model_with_hash_dropout):
    seeds = renewed_seeds(model_with_hash_dropout, 0)
    assert len(seeds) == 1 + 2 * model_with_hash_dropout.config.num_hidden_layers
    assert seeds.dtype == torch.int32
    assert len(set(seeds.tolist())) == len(seeds)


def test_renewal_changes_all_seeds_reproducibly(model_with_hash_dropout):
    seeds = renewed_seeds(model_with_hash_dropout, 0)
    assert not (renewed_seeds(model_with_hash_dropout, 1) == seeds).any()
    assert torch.equal(renewed_seeds(model_with_hash_dropout, 0), seeds)


# What surrounds the kernels, with plain PyTorch in their place.


def kept_elements(shape, seed, threshold) -> torch.Tensor:
    """Which elements a kernel keeps, by their places in memory."""
    numbers = torch.arange(math.prod(shape), dtype=torch.int32, device=seed.device).view(shape)
    return hash_dropout.hash32(numbers, seed) & 0x7FFFFFFF >= threshold


def covers(programs: int, tile: int, size: int) -> bool:
    """Whether so many programs have all elements, and none of them nothing to do."""
    return (programs - 1) * tile < size <= programs * tile


def norm_forward(grid, gemm_out, residual, statistics, WIDTH, **a) -> None:
    assert covers(grid[0], a["ROWS"], a["rows"])
    assert WIDTH <= a["BLOCK"] < 2 * WIDTH
    x = gemm_out + a["bias"]
    if a["DROPS"]:
        kept = kept_elements(x.shape, a["seed"], a["threshold"])
        x = torch.where(kept, x * a["kept_scale"], 0.0)
    x = (x + residual).view(a["rows"], WIDTH)
    if a["KEEPS"]:
        a["total"].copy_(x.view_as(residual))
    statistics[0] = x.mean(1)
    statistics[1] = (x.var(1, correction=0) + a["eps"]).rsqrt()
    normed = (x - statistics[0, :, None]) * statistics[1, :, None]
    a["output"].copy_((normed * a["gamma"] + a["beta"]).view_as(residual))
    if a["FACTOR"]:
        a["output8"].copy_(in_8_bits(a["output"], a["output8"]))


def norm_backward(grid, grad, other, gemm_out, residual, statistics, partials, WIDTH, **a) -> None:
    assert grid == (len(partials),)
    assert len(partials) == min(a["rows"], fused_norm.PROGRAMS)
    assert WIDTH <= a["BLOCK"] < 2 * WIDTH
    kept = 1.0
    if a["DROPS"]:
        kept = kept_elements(residual.shape, a["seed"], a["threshold"]) * a["kept_scale"]
    x = residual if a["SUMMED"] else residual + (gemm_out + a["bias"]) * kept
    x = (x.view(a["rows"], WIDTH) - statistics[0, :, None]) * statistics[1, :, None]
    if a["ADDS"] and not a["SUMMED"]:
        grad = grad + other
    grad = grad.view(x.shape)
    g = grad * a["gamma"]
    x_grad = g - g.mean(1, keepdim=True) - x * (g * x).mean(1, keepdim=True)
    x_grad = (x_grad * statistics[1, :, None]).view(residual.shape)
    if a["ADDS"] and a["SUMMED"]:
        x_grad = x_grad + other
    a["residual_grad"].copy_(x_grad)
    gemm_grad = (x_grad * kept).view(x.shape)
    if a["gemm_grad"] is not None:
        a["gemm_grad"].copy_(gemm_grad.view(residual.shape))
    if a["FACTOR"]:
        a["gemm_grad8"].copy_(in_8_bits(gemm_grad, a["gemm_grad8"]))
    of_rows = torch.stack([gemm_grad, grad * x, grad], 1)
    for program in range(len(partials)):
        partials[program] = of_rows[program :: len(partials)].sum(0)


def dropout(grid, x, y, seed, size, threshold, kept_scale, ELEMENTS, **_) -> None:
    assert covers(grid[0], ELEMENTS, size)
    assert x.is_contiguous()
    y.copy_(torch.where(kept_elements(x.shape, seed, threshold), x * kept_scale, 0.0))


def sum_of_partials(grid, partials, total, programs, WIDTH, COLUMNS, **_) -> None:
    assert covers(grid[0], COLUMNS, WIDTH)
    total.copy_(partials.view(programs, WIDTH).sum(0).view(total.shape))


@pytest.fixture
def kernels_in_pytorch(monkeypatch):
    """Plain PyTorch in place of the kernels, which gets the arguments that they would."""
    in_pytorch = {
        fused_norm.norm_forward_kernel: norm_forward,
        fused_norm.norm_backward_kernel: norm_backward,
        partial_sums.sum_partials_kernel: sum_of_partials,
        hash_dropout.dropout_kernel: dropout,
    }

    def launch(kernel, grid, /, **arguments):
        in_pytorch[kernel](grid, **arguments)

    for module in (fused_norm, hash_dropout, partial_sums):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr(fused_norm, "PROGRAMS", 3)


@pytest.mark.parametrize("rate", [0.0, 0.25])
@pytest.mark.parametrize("rows", [1, 7])
def test_what_surrounds_the_kernels_of_a_norm_gives_values_and_gradients(
    rows, rate, kernels_in_pytorch
):
    inputs, grad, seed = drawn(rows, 5)
    results = with_gradients(by_kernel(seed, rate), inputs, grad)
    expected = with_gradients(by_plain(seed, rate), inputs, grad)
    torch.testing.assert_close(results, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("used", [slice(1, 2), slice(0, 2)], ids=str)
@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_what_surrounds_the_kernels_gives_the_residual_stream_and_its_norm(
    rate, used, kernels_in_pytorch
):
    inputs, grad, seed = drawn(7, 5)

    def by_kernel_with_sum(*inputs):
        output, _, total, _ = fused_norm._norm(*inputs, seed, rate, EPS, keeps=True)
        return (total, output)[used]

    def by_plain_with_sum(*inputs):
        return fused_norm.reference(*inputs, seed, rate, EPS)[used]

    grads = (grad.flip(0), grad)[used]
    results = with_gradients(by_kernel_with_sum, inputs, *grads)
    expected = with_gradients(by_plain_with_sum, inputs, *grads)
    torch.testing.assert_close(results, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("used", [slice(0, 1), slice(1, 2), slice(0, 2)], ids=str)
def test_what_surrounds_the_kernels_of_a_norm_that_goes_two_ways_adds_up_both_gradients(
    used, kernels_in_pytorch
):
    inputs, grad, seed = drawn(7, 5)
    grads = (grad, 2 * grad.flip(0))[used]
    plain = by_plain(seed, 0.25)

    def both_ways(*x):
        return fused_norm._BothWays.apply(*x, seed, 0.25, EPS)[used]

    results = with_gradients(both_ways, inputs, *grads)
    expected = with_gradients(lambda *x: (plain(*x), plain(*x))[used], inputs, *grads)
    torch.testing.assert_close(results, expected, atol=1e-4, rtol=1e-4)


def test_what_surrounds_the_kernels_of_a_norm_hands_on_copies_in_8_bits(kernels_in_pytorch):
    for stored, copy8 in with_copies(*drawn(7, 5), dropout=0.25):
        expected = in_8_bits(stored, copy8)
        assert copy8.shape == expected.shape
        assert torch.equal(copy8.float(), expected.float())


def test_what_surrounds_the_kernels_hands_on_copies_beside_a_residual_stream(kernels_in_pytorch):
    assert_stream_has_copies(torch.float32, fp8._in_8_bits)


def test_what_surrounds_the_kernel_leaves_out_the_gradient_of_which_only_the_copy_is_read(
    kernels_in_pytorch,
):
    assert_alone_changes_nothing_else(torch.float32)


def test_a_norm_that_nobody_asks_for_copies_makes_none(kernels_in_pytorch):
    inputs, grad, seed = drawn(7, 5)
    x, *others = (tensor.requires_grad_() for tensor in inputs)
    _, _, copy8 = fused_norm._BothWays.apply(x, *others, seed, 0.25, EPS)
    assert copy8.numel() == 0
    _, _, _, x_grad8 = fused_norm._norm_backward(
        grad, None, x, *others[:3], seed, torch.ones(2, 7, device=DEVICE), 0.25, x.dtype
    )
    assert x_grad8.numel() == 0


def test_what_surrounds_the_kernel_of_dropout_drops_the_gradient_by_the_same_bits(
    kernels_in_pytorch,
):
    x, grad = torch.randn(2, 5, 500)
    seed = torch.tensor(77, dtype=torch.int32)
    results = with_gradients(lambda x: _HashDropout.apply(x.T, seed, 0.25), [x], grad.T)
    expected = with_gradients(lambda x: hash_dropout.hash_dropout(x.T, seed, 0.25), [x], grad.T)
    torch.testing.assert_close(results, expected)
    assert 0.15 < (results[0] == 0).float().mean() < 0.35


def test_programs_of_the_sum_of_partial_sums_have_every_column(kernels_in_pytorch):
    partials = torch.randn(5, 3, 7)
    total = partial_sums.sum_partials(partials, torch.bfloat16)
    assert total.dtype == torch.bfloat16
    torch.testing.assert_close(total.float(), partials.sum(0), atol=0.05, rtol=0.05)


@pytest.mark.parametrize(("size", "power"), [(1, 1), (2, 2), (3, 4), (768, 1024), (1024, 1024)])
def test_a_block_is_the_least_power_of_2_that_has_a_row(size, power):
    assert fused_norm._power_of_2(size) == power


# A model's own rates and least variance.


def test_hash_dropouts_have_the_rates_of_those_that_they_replace():
    model = build_model(planned("A2"))
    for number, module in enumerate(m for m in model.modules() if type(m) is torch.nn.Dropout):
        module.p = number / 100
    before = {name: module.p for name, module in model.named_modules() if hasattr(module, "p")}
    use_hash_dropout(model)
    after = {name: module.p for name, module in model.named_modules() if hasattr(module, "p")}
    assert after == before


def test_hash_dropout_drops_nothing_out_of_training_and_at_a_rate_of_0():
    values = torch.randn(9, 9)
    assert torch.equal(dropout_of(7).eval()(values), values)
    none = dropout_of(7)
    none.p = 0.0
    assert torch.equal(none(values), values)


@pytest.fixture
def output_layer():
    """An output of BERT's layer with a large least variance and dropout, and the same fused."""
    config = BertConfig(
        hidden_size=8, intermediate_size=8, layer_norm_eps=0.5, hidden_dropout_prob=0.5
    )
    native = BertOutput(config)
    fused = copy.deepcopy(native)
    fused.dropout = HashDropout(0.5)
    return native, FusedOutput(fused)


def test_a_fused_norm_has_the_least_variance_of_the_native_one_and_drops_nothing_when_evaluated(
    output_layer,
):
    native, fused = output_layer
    hidden, residual = torch.randn(2, 3, 8)
    expected = native.eval()(hidden, residual)
    torch.testing.assert_close(fused.eval()(hidden, residual), expected)
    assert not torch.allclose(fused.train()(hidden, residual), expected)


def test_a_fused_norm_takes_as_its_residual_what_its_input_carries(output_layer, monkeypatch):
    _, fused = output_layer
    seen = []

    def noting(x, bias, residual, **_):
        seen.append(residual)
        return residual + 1, residual + 2, None

    monkeypatch.setattr(fused_norms, "fused_norm", noting)
    first = torch.zeros(1, 8, requires_grad=True)
    output = fused(torch.ones(1, 8), first)
    assert torch.equal(output, first + 1)
    assert torch.equal(output.residual, first + 2)
    fused(torch.ones(1, 8), output)
    assert seen[0] is first
    assert seen[1] is output.residual
