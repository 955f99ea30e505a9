"""Bias, dropout, residual and norm in one kernel: against plain PyTorch in float64, all gradients included.

The kernels run on a GPU, or in Triton's interpreter where it is installed without one (conftest.py asks for it).
"""

import dataclasses
import math

import pytest
import torch
from torch import library

from qa_lib.data.load import batches_of, load_data
from qa_lib.kernels import common, fused_norm, gelu
from qa_lib.kernels.common import sum_partials
from qa_lib.model.build import build_model
from qa_lib.model.fused_blocks import FusedIntermediate, FusedOutput, HashDropout, _Lookup, renew
from qa_lib.model.packed import Packed
from qa_lib.run.plan import plan
from qa_lib.spec import Machine
from qa_lib.train.compile import compile_kernels
from tests.tiny import checkpoint, having

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-5


def drawn(rows, width, dtype=torch.float32, residual_type=None, weight_type=None):
    """Product, bias, residual, gamma and beta; the output's gradient; and a seed."""
    torch.manual_seed(0)
    residual_type, weight_type = residual_type or dtype, weight_type or dtype
    large = [torch.randn(rows, width, device=DEVICE).to(kind) for kind in (dtype, residual_type, residual_type)]
    bias, gamma, beta = (torch.randn(width, device=DEVICE).to(weight_type) for _ in range(3))
    product, residual, grad = large
    return (product, bias, residual + 3, gamma, beta), grad, torch.tensor(-1234567, dtype=torch.int32, device=DEVICE)


def with_gradients(run, inputs, grad, seed, dropout):
    """The output and the gradients of the five inputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    output = run(*inputs, seed, dropout, EPS)
    return output.detach(), *torch.autograd.grad(output, inputs, grad)


def by_kernel(*inputs):
    return fused_norm._norm(*inputs)[0]


def by_plain(*inputs):
    return fused_norm.reference(*inputs)[1]


def expected(inputs, grad, seed, dropout):
    return with_gradients(by_plain, [x.double() for x in inputs], grad.double(), seed, dropout)


def assert_close(found, wanted, error):
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert (one.double() - other).norm() < error * other.norm(), number


@pytest.mark.triton
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("rows", "width"), [(1, 768), (7, 96), (4, 3), (5, 1024)])
def test_the_kernel_is_the_reference(rows, width, dropout):
    drew = drawn(rows, width)
    assert_close(with_gradients(by_kernel, *drew, dropout), expected(*drew, dropout), 1e-5)


def plain_norm(x, bias, residual, gamma, beta, kept, rate):
    """Bias, dropout by a mask, residual and layer norm by their formulas, written for the tests alone."""
    total = residual + (x + bias) * kept / (1 - rate)
    centred = total - total.sum(-1, keepdim=True) / total.shape[-1]
    variance = (centred * centred).sum(-1, keepdim=True) / total.shape[-1]
    return gamma * centred / (variance + EPS) ** 0.5 + beta


def as_a_layer_calls_it(*inputs):
    return fused_norm.fused_norm(*inputs)[0]


@pytest.mark.parametrize("function", [as_a_layer_calls_it, pytest.param(by_kernel, marks=pytest.mark.triton)])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 5), (13, 129), (2, 1023), (3, 1025), (2, 3, 7)], ids=str)
def test_shapes_of_odd_sizes_are_normed_by_the_formula(shape, function):
    (x, bias, residual, gamma, beta), grad, seed = drawn(math.prod(shape[:-1]), shape[-1])
    inputs = (x.view(shape), bias, residual.view(shape), gamma, beta)
    kept = HashDropout(0.25).to(DEVICE)
    kept.seed.copy_(seed)
    kept = kept(torch.ones(shape, device=DEVICE)) != 0

    def by_formula(*inputs):
        return plain_norm(*inputs[:5], kept, 0.25)

    wanted = with_gradients(by_formula, [value.double() for value in inputs], grad.view(shape).double(), seed, 0.25)
    found = with_gradients(function, inputs, grad.view(shape), seed, 0.25)
    torch.testing.assert_close([value.double() for value in found], list(wanted), atol=2e-3, rtol=1e-4)


@pytest.mark.triton
@pytest.mark.parametrize("rows_at_once", [1, 4])
def test_programs_with_several_rows_and_none_beyond_the_last_add_all_up(rows_at_once, monkeypatch):
    monkeypatch.setattr(fused_norm, "PROGRAMS", 3)
    for options in (fused_norm.FORWARD, fused_norm.BACKWARD):
        monkeypatch.setitem(options, "ROWS", rows_at_once)
    drew = drawn(19, 96)
    assert_close(with_gradients(by_kernel, *drew, 0.1), expected(*drew, 0.1), 1e-5)


@pytest.mark.triton
@pytest.mark.parametrize(
    ("types", "error"),
    [
        ((torch.float16, torch.float16, torch.float16), 2e-3),
        ((torch.bfloat16, torch.bfloat16, torch.bfloat16), 1e-2),
        ((torch.bfloat16, torch.float32, torch.float32), 5e-3),  # as autocast has it
    ],
    ids=str,
)
def test_in_half_precision_it_is_as_near_as_that_allows(types, error):
    drew = drawn(9, 96, *types)
    found = with_gradients(by_kernel, *drew, 0.1)
    assert_close(found, expected(*drew, 0.1), error)
    assert [x.dtype for x in found] == [types[1], *(x.dtype for x in drew[0])]


@pytest.mark.triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_kernel_of_its_own_drops_the_same_and_the_same_gradients(dtype):
    x, grad = torch.randn(2, 5, 333, device=DEVICE).to(dtype)
    seed = torch.tensor(77, dtype=torch.int32, device=DEVICE)
    own = x.clone().requires_grad_()
    y = common._HashDropout.apply(own, seed, 0.1)
    y.backward(grad)
    for found, of in ((y, x), (own.grad, grad)):
        wanted = common.hash_dropout(of.cpu(), seed.cpu(), 0.1)
        assert torch.equal(found.cpu() == 0, wanted == 0)
        torch.testing.assert_close(found.cpu(), wanted)


@pytest.mark.triton
def test_the_kernel_drops_what_hash_dropout_drops():
    """Read off the gradient of the product, which is 0 where nothing passes, and nowhere else."""
    drew = drawn(40, 96)
    dropout = HashDropout(0.3).to(DEVICE)
    dropout.seed.copy_(drew[-1])
    _, product_grad, *_ = with_gradients(by_kernel, *drew, 0.3)
    assert torch.equal(product_grad != 0, dropout(torch.ones_like(product_grad)) != 0)


@pytest.mark.triton
def test_large_means_and_tensors_that_are_not_contiguous_change_nothing():
    (product, bias, residual, *weights), grad, seed = drawn(6, 96)
    inputs = (product.T.contiguous().T, bias, residual + 1000, *weights)
    found = with_gradients(by_kernel, inputs, grad.T.contiguous().T, seed, 0.1)
    assert_close(found, expected(inputs, grad, seed, 0.1), 1e-3)


@pytest.mark.triton
def test_the_operators_are_what_the_compiler_takes_them_for():
    inputs, _, seed = drawn(4, 32)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    arguments = (*(x.requires_grad_() for x in inputs), seed, 0.1, EPS)
    for keeps in (False, True):
        library.opcheck(fused_norm._norm, (*arguments, keeps), test_utils=checks, atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="a CPU captures no graph")
def test_replays_of_a_captured_graph_drop_out_by_the_seed_of_the_time():
    drew = drawn(70, 768, torch.bfloat16)
    with_gradients(by_kernel, *drew, 0.1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = with_gradients(by_kernel, *drew, 0.1)
    for seed in (5, -6):
        drew[-1].fill_(seed)
        graph.replay()
        assert_close(found, expected(*drew, 0.1), 1e-2)


def test_the_reference_is_differentiated_as_finite_differences_have_it():
    inputs, _, seed = drawn(3, 5)
    inputs = [x.double().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(lambda *x: by_plain(*x, seed, 0.3, EPS), inputs)


def built(setting, **sources):
    """A model that trains under this value of the setting norms, for packed rows, and a batch; the seeds of its dropout
    are those of every other."""
    (spec,) = plan(["E-gelu"], "smoke", data="synthetic:40", machine=Machine(), **sources)
    spec = dataclasses.replace(spec, settings=dataclasses.replace(spec.settings, norms=setting))
    batches = batches_of(load_data(spec).samples, spec)
    model = build_model(spec).train()
    torch.manual_seed(5)
    renew(model)
    return model, Packed(model, batches.limits), batches.collate(batches.step(0)[0], torch.device("cpu"))


@pytest.mark.parametrize("kind", having("E-gelu"))
def test_every_encoder_has_it_with_the_loss_gradients_and_names_of_the_native_norms(kind, tmp_path):
    folder, results = checkpoint(kind, tmp_path), []
    for setting in ("native", "fused"):
        model, packed, inputs = built(setting, model=folder)
        packed(**inputs).loss.backward()
        results.append({name: p.grad for name, p in model.named_parameters()})
        layers = model.config.num_hidden_layers
        assert sum(isinstance(m, FusedOutput) for m in model.modules()) == 2 * layers * (setting == "fused")
        assert sum(isinstance(m, FusedIntermediate) for m in model.modules()) == layers
    native, fused = results
    assert list(native) == list(fused)
    torch.testing.assert_close(fused, native, atol=1e-6, rtol=1e-4)


@pytest.mark.triton
@pytest.mark.skipif(DEVICE.type == "cuda", reason="the model is on the CPU, for Triton's interpreter")
def test_the_model_trains_by_the_kernels_as_without_them(monkeypatch):
    """Traced, as the compiler has it."""
    results = []
    for setting in ("native", "fused"):
        model, packed, inputs = built(setting)
        if setting == "fused":
            monkeypatch.setattr(fused_norm, "reference", lambda *inputs: (None, by_kernel(*inputs)))
            monkeypatch.setattr(gelu, "reference", lambda *inputs: gelu._gelu_backward(*inputs, 0.0)[:2])
            for module in (fused_norm, gelu):
                monkeypatch.setattr(module, "PROGRAMS", 2)
            for options in (fused_norm.FORWARD, fused_norm.BACKWARD, gelu.BACKWARD):
                monkeypatch.setitem(options, "ROWS", 256)  # the interpreter takes its time for each program
        torch.compile(packed, backend="aot_eager", fullgraph=True)(**inputs).loss.backward()
        results.append({name: p.grad for name, p in model.named_parameters()})
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-3)


@pytest.mark.triton
@pytest.mark.parametrize(("programs", "width"), [(1, 768), (128, 3), (129, 17), (264, 2304)])
def test_what_the_programs_found_is_added_up(programs, width):
    sums = torch.randn(programs, width, device=DEVICE)
    torch.testing.assert_close(sum_partials(sums, torch.float32), sums.sum(0), atol=1e-4, rtol=1e-5)


@pytest.mark.triton
@pytest.mark.parametrize("used", ["first", "second", "both"])
def test_a_norm_that_goes_two_ways_adds_up_both_gradients(used):
    inputs, grad, seed = drawn(7, 32)
    found = []
    for run in (fused_norm._BothWays.apply, lambda *inputs: (by_kernel(*inputs),) * 2):
        own = [x.detach().clone().requires_grad_() for x in inputs]
        outputs = run(*own, seed, 0.1, 1e-5)
        used_ones = {"first": outputs[:1], "second": outputs[1:], "both": outputs}[used]
        loss = sum((output * grad * number).sum() for number, output in enumerate(used_ones, 1))
        found.append([outputs[0].detach(), *torch.autograd.grad(loss, own)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_an_embedding_adds_up_its_gradient_as_pytorchs_own_does():
    native = torch.nn.Embedding(20, 8, padding_idx=3)
    ids, grad = torch.randint(0, 20, (2, 50)), torch.randn(2, 50, 8)
    found = []
    for run in (native, lambda ids: _Lookup.apply(ids, native.weight, native.padding_idx)):
        y = run(ids)
        found.append((y.detach(), *torch.autograd.grad(y, native.weight, grad)))
    assert (ids == 3).any() and torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1])


def test_a_pass_among_fake_tensors_leaves_no_trace():
    """Neither in the model's gradients nor in the generator that draws dropout."""
    model, packed, inputs = built("fused")
    state = torch.get_rng_state()
    compile_kernels(lambda: packed(**inputs).loss, model)
    assert all(p.grad is None for p in model.parameters()) and torch.equal(state, torch.get_rng_state())
    assert packed(**inputs).loss.isfinite()


def test_dynamo_traces_the_whole_model():
    model, packed, inputs = built("fused")
    loss = packed(**inputs).loss
    traced = torch.compile(packed, backend="aot_eager", fullgraph=True)(**inputs).loss
    traced.backward()
    torch.testing.assert_close(traced, loss)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def by_kernel_with_sum(*inputs):
    output, _, total = fused_norm._norm(*inputs, keeps=True)
    return total, output


def with_stream_gradients(run, inputs, grad, seed, dropout):
    """The sum, its norm and the gradients of the five inputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    total, normed = run(*inputs, seed, dropout, EPS)
    gradients = torch.autograd.grad((total, normed), inputs, (grad.flip(0), grad))
    return total.detach(), normed.detach(), *gradients


@pytest.mark.triton
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("rows", "width"), [(1, 768), (7, 96), (4, 3)])
def test_the_kernel_gives_the_residual_stream_and_its_norm(rows, width, dropout):
    inputs, grad, seed = drawn(rows, width)
    wide = [x.double() for x in inputs]
    wanted = with_stream_gradients(
        fused_norm.fused_add_norm, [x.cpu() for x in wide], grad.double().cpu(), seed.cpu(), dropout
    )
    found = with_stream_gradients(by_kernel_with_sum, inputs, grad, seed, dropout)
    assert_close([x.cpu() for x in found], wanted, 1e-5)
