"""Bias, dropout, residual and norm in one kernel: against plain PyTorch in float64, all gradients included. And dropout
by a hash alone, which keeps the rate, scales what it keeps, and draws anew when told to."""

import math

import pytest
import torch
from torch import library

from qa_lib.kernels import common, fused_norm, gelu
from qa_lib.model.build import build_model
from qa_lib.model.fused_blocks import FusedIntermediate, FusedOutput, HashDropout, _Lookup, renew
from qa_lib.spec.machine import Machine
from qa_lib.train.compile import compile_kernels
from tests.kernels import CHECKS, DEVICE, assert_close, close_to_plain, replayed, with_gradients
from tests.tiny import checkpoint, having, packed_model, planned

EPS = 1e-5


def drawn(rows, width, dtype=torch.float32, others=None):
    """Product, bias, residual, gamma and beta, of a type and `others` of theirs; the output's gradient; and a seed."""
    torch.manual_seed(0)
    others = others or dtype
    product, residual, grad = (
        torch.randn(rows, width, device=DEVICE).to(kind) for kind in (dtype, others, others)
    )
    bias, gamma, beta = (torch.randn(width, device=DEVICE).to(others) for _ in range(3))
    return (
        (product, bias, residual + 3, gamma, beta),
        grad,
        torch.tensor(-1234567, dtype=torch.int32, device=DEVICE),
    )


def by_kernel(seed, dropout):
    return lambda *inputs: fused_norm._norm(*inputs, seed, dropout, EPS)[0]


def by_plain(seed, dropout):
    return lambda *inputs: fused_norm.reference(*inputs, seed, dropout, EPS)[1]


def close(inputs, grad, seed, dropout, error):
    """What the kernel gives, which must be near to the reference."""
    return close_to_plain(by_kernel(seed, dropout), by_plain(seed, dropout), inputs, [grad], error)


def plain_norm(x, bias, residual, gamma, beta, kept, rate):
    """Bias, dropout by a mask, residual and layer norm by their formulas, written for the tests alone."""
    total = residual + (x + bias) * kept / (1 - rate)
    centred = total - total.sum(-1, keepdim=True) / total.shape[-1]
    variance = (centred * centred).sum(-1, keepdim=True) / total.shape[-1]
    return gamma * centred / (variance + EPS) ** 0.5 + beta


# As a layer calls it, and the kernel.
NORMS = [
    fused_norm.fused_norm,
    pytest.param(fused_norm._norm, marks=pytest.mark.triton, id="kernel"),
]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 2), (3, 5), (13, 129), (2, 1023), (3, 1025), (2, 3, 7)], ids=str
)
def test_shapes_of_odd_sizes_are_normed_by_the_formula(shape, norm):
    """With what HashDropout drops, which the gradient of the product shows too."""
    inputs, grad, seed = drawn(math.prod(shape[:-1]), shape[-1])
    inputs, grad = [x.view(shape) if x.ndim == 2 else x for x in inputs], grad.view(shape)
    dropout = HashDropout(0.25).to(DEVICE)
    dropout.seed.copy_(seed)
    kept = dropout(torch.ones(shape, device=DEVICE)) != 0
    wide = [x.double() for x in inputs]
    wanted = with_gradients(lambda *x: plain_norm(*x, kept, 0.25), wide, grad.double())
    found = with_gradients(lambda *x: norm(*x, seed, 0.25, EPS)[0], inputs, grad)
    torch.testing.assert_close([x.double() for x in found], wanted, atol=2e-3, rtol=1e-4)


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
    drew = drawn(9, 96, dtype, others)
    found = close(*drew, 0.1, error)
    assert [x.dtype for x in found] == [others or dtype, *(x.dtype for x in drew[0])]


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_kernel_of_its_own_drops_the_same_and_the_same_gradients(dtype):
    x, grad = torch.randn(2, 5, 333, device=DEVICE).to(dtype)
    seed = torch.tensor(77, dtype=torch.int32, device=DEVICE)
    found = with_gradients(lambda x: common._HashDropout.apply(x, seed, 0.1), [x], grad)
    for one, of in zip(found, (x, grad), strict=True):
        wanted = common.hash_dropout(of.cpu(), seed.cpu(), 0.1)
        assert torch.equal(one.cpu() == 0, wanted == 0)
        torch.testing.assert_close(one.cpu(), wanted)


@pytest.mark.triton
def test_large_means_and_tensors_that_are_not_contiguous_change_nothing():
    (product, bias, residual, *weights), grad, seed = drawn(6, 96)
    close(
        (product.T.contiguous().T, bias, residual + 1000, *weights),
        grad.T.contiguous().T,
        seed,
        0.1,
        1e-3,
    )


@pytest.mark.triton
def test_the_operators_are_what_the_compiler_takes_them_for():
    inputs, _, seed = drawn(4, 32)
    arguments = (*(x.requires_grad_() for x in inputs), seed, 0.1, EPS)
    for keeps in (False, True):
        library.opcheck(
            fused_norm._norm, (*arguments, keeps), test_utils=CHECKS, atol=1e-5, rtol=1e-4
        )


@pytest.mark.skipif(DEVICE.type == "cpu", reason="a CPU captures no graph")
def test_replays_of_a_captured_graph_drop_out_by_the_seed_of_the_time():
    inputs, grad, seed = drawn(70, 768, torch.bfloat16)
    for found in replayed(lambda: with_gradients(by_kernel(seed, 0.1), inputs, grad), seed):
        wide = [x.double() for x in inputs]
        assert_close(found, with_gradients(by_plain(seed, 0.1), wide, grad.double()), 1e-2)


def built(norms, gelu_="sigmoid", **sources):
    """A model with such norms and GELU, as `packed_model`; the seeds of its dropout are those of every other."""
    settings = {"norms": norms, "gelu": gelu_}
    model, packed, inputs = packed_model(
        planned("E-gelu", settings=settings, machine=Machine(), **sources)
    )
    torch.manual_seed(5)
    renew(model)
    return model, packed, inputs


def gradients(model, loss):
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", having("E-gelu"))
def test_every_encoder_has_it_with_the_loss_gradients_and_names_of_the_native_norms(kind, tmp_path):
    """And GELU by a sigmoid nearly those of the exact one."""
    folder, results = checkpoint(kind, tmp_path), []
    for norms, gelu_ in (("native", "exact"), ("native", "sigmoid"), ("fused", "sigmoid")):
        model, packed, inputs = built(norms, gelu_, model=folder)
        results.append(gradients(model, packed(**inputs).loss))
        layers = model.config.num_hidden_layers
        assert sum(isinstance(m, FusedOutput) for m in model.modules()) == 2 * layers * (
            norms == "fused"
        )
        assert sum(isinstance(m, FusedIntermediate) for m in model.modules()) == layers * (
            gelu_ == "sigmoid"
        )
    exact, native, fused = results
    assert list(exact) == list(native) == list(fused) and not torch.equal(
        exact["loss"], native["loss"]
    )
    torch.testing.assert_close(native, exact, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(fused, native, atol=1e-6, rtol=1e-4)


@pytest.mark.triton
@pytest.mark.skipif(
    DEVICE.type == "cuda", reason="the model is on the CPU, for Triton's interpreter"
)
def test_the_model_trains_by_the_kernels_as_without_them(monkeypatch):
    """Traced, as the compiler has it."""
    results = []
    for norms in ("native", "fused"):
        model, packed, inputs = built(norms)
        if norms == "fused":
            monkeypatch.setattr(
                fused_norm, "reference", lambda *inputs: (None, fused_norm._norm(*inputs)[0])
            )
            monkeypatch.setattr(
                gelu, "reference", lambda *inputs: (*gelu._gelu_backward(*inputs, 0.0)[:2], None)
            )
            for module in (fused_norm, gelu):
                monkeypatch.setattr(module, "PROGRAMS", 2)
            for options in (fused_norm.FORWARD, fused_norm.BACKWARD, gelu.BACKWARD):
                monkeypatch.setitem(
                    options, "ROWS", 256
                )  # the interpreter takes its time for each program
        traced = torch.compile(packed, backend="aot_eager", fullgraph=True)
        results.append(gradients(model, traced(**inputs).loss))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-3)


@pytest.mark.triton
@pytest.mark.parametrize(("programs", "width"), [(1, 768), (128, 3), (129, 17), (264, 2304)])
def test_what_the_programs_found_is_added_up(programs, width):
    sums = torch.randn(programs, width, device=DEVICE)
    torch.testing.assert_close(
        common.sum_partials(sums, torch.float32), sums.sum(0), atol=1e-4, rtol=1e-5
    )


@pytest.mark.triton
@pytest.mark.parametrize("used", [slice(0, 1), slice(1, 2), slice(0, 2)], ids=str)
def test_a_norm_that_goes_two_ways_adds_up_both_gradients(used):
    inputs, grad, seed = drawn(7, 32)
    kernel, grads = by_kernel(seed, 0.1), (grad, 2 * grad)[used]
    found = with_gradients(
        lambda *x: fused_norm._BothWays.apply(*x, seed, 0.1, EPS)[used], inputs, *grads
    )
    wanted = with_gradients(lambda *x: (kernel(*x), kernel(*x))[used], inputs, *grads)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_an_embedding_adds_up_its_gradient_as_pytorchs_own_does():
    ids, weight, grad = (
        torch.arange(100).view(2, 50) % 20,
        torch.randn(20, 8),
        torch.randn(2, 50, 8),
    )
    found = with_gradients(lambda weight: _Lookup.apply(ids, weight, 3), [weight], grad)
    wanted = with_gradients(
        lambda weight: torch.nn.functional.embedding(ids, weight, padding_idx=3), [weight], grad
    )
    torch.testing.assert_close(found, wanted)


def test_a_pass_among_fake_tensors_leaves_no_trace_and_dynamo_traces_the_whole_model():
    """No trace in the model's gradients, nor in the generator that draws dropout."""
    model, packed, inputs = built("fused")
    state = torch.get_rng_state()
    compile_kernels(lambda: packed(**inputs).loss, model)
    assert all(p.grad is None for p in model.parameters()) and torch.equal(
        state, torch.get_rng_state()
    )
    loss = packed(**inputs).loss
    traced = torch.compile(packed, backend="aot_eager", fullgraph=True)(**inputs).loss
    torch.testing.assert_close(traced, loss)
    assert all(
        grad is not None and grad.isfinite().all() for grad in gradients(model, traced).values()
    )


@pytest.mark.triton
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("rows", "width"), [(1, 768), (7, 96), (4, 3), (5, 1024)])
def test_the_kernel_gives_the_residual_stream_and_its_norm(rows, width, dropout):
    inputs, grad, seed = drawn(rows, width)

    def by_kernel_with_sum(*inputs):
        output, _, total = fused_norm._norm(*inputs, seed, dropout, EPS, keeps=True)
        return total, output

    def by_plain_with_sum(*inputs):
        return fused_norm.reference(*inputs, seed, dropout, EPS)

    close_to_plain(by_kernel_with_sum, by_plain_with_sum, inputs, (grad.flip(0), grad), 1e-5)


# Dropout by a hash, by itself.

P = 0.1


def dropout_of(seed: int) -> HashDropout:
    dropout = HashDropout(P)
    dropout.seed.fill_(seed)
    return dropout


def test_rate_and_scale():
    values = torch.randn(512, 768) + 3
    dropped = dropout_of(7)(values)
    kept = dropped != 0
    assert 1 - kept.float().mean().item() == pytest.approx(P, abs=0.002)  # 4 standard deviations
    assert torch.allclose(dropped[kept], values[kept] / (1 - P))


def test_patterns_of_seeds_neighbours_rows_and_columns_are_unrelated():
    found = [
        dropout_of(seed)(torch.ones(1024, 768)) != 0 for seed in (5, 6, 99, 5 + 768, 2**31 - 1)
    ]
    kept = torch.stack(found).flatten(1).float() - (1 - P)
    noise = 1 / kept.shape[1] ** 0.5
    related = kept @ kept.T / kept.shape[1] / (P * (1 - P))
    assert (related - torch.eye(len(kept))).abs().max() < 5 * noise
    for distance in (1, 2, 64, 768, 1536):
        assert (kept[0, distance:] * kept[0, :-distance]).mean().abs() / (P * (1 - P)) < 5 * noise
    one = kept[0].view(1024, 768)
    for axis, n in ((0, 1024), (1, 768)):
        assert one.mean(axis).std().item() == pytest.approx((P * (1 - P) / n) ** 0.5, rel=0.15)


def test_every_layer_has_its_own_and_renewal_changes_all_reproducibly():
    model = build_model(planned("E-packed", settings={"dropout": "hash"})).to(torch.bfloat16)
    found = [module for module in model.modules() if isinstance(module, HashDropout)]
    assert (
        len(found) == 1 + 2 * model.config.num_hidden_layers and found[0].seed.dtype == torch.int32
    )

    drawn = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        renew(model)
        drawn.append(torch.stack([module.seed for module in found]))
    assert len(set(drawn[0].tolist())) == len(found)
    assert not (drawn[1] == drawn[0]).any() and torch.equal(drawn[2], drawn[0])
