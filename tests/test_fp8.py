"""Products in 8-bit floats against the same in bf16; PyTorch has a CPU form of the product for this."""

import copy

import pytest
import torch

from qa_lib.kernels import fp8
from qa_lib.kernels.gelu import gelu
from qa_lib.model.architectures import layers_of
from qa_lib.model.build import build_model
from qa_lib.model.fused_blocks import Float8Linear, FusedIntermediate, LinearWithoutBias
from tests.kernels import DEVICE, relative, with_gradients
from tests.tiny import planned


@pytest.fixture
def drawn():
    """Inputs, the outputs' gradient, a linear layer and the same in 8 bits."""
    torch.manual_seed(0)
    x, grad = torch.randn(2, 32, 64).bfloat16(), torch.randn(2, 32, 128).bfloat16() * 1e-4
    native, eighth = torch.nn.Linear(64, 128).bfloat16(), Float8Linear(64, 128).bfloat16()
    torch.nn.init.normal_(native.weight, std=0.02)  # as in BERT
    eighth.load_state_dict(native.state_dict())
    return x, grad, native, eighth


def run(layer, x, grad):
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    return y.detach(), x.grad, layer.weight.grad, layer.bias.grad


def test_values_and_gradients_are_close_to_those_in_bf16(drawn):
    x, grad, native, eighth = drawn
    values, by_x, by_weight, by_bias = zip(run(eighth, x, grad), run(native, x, grad), strict=True)
    assert 0.005 < relative(*values) < 0.05  # e4m3 keeps 4 bits: it is not the same product
    assert 0.005 < relative(*by_x) < 0.08  # e5m2 keeps 3
    assert torch.equal(*by_weight)
    assert relative(*by_bias) < 0.01


def test_values_beyond_the_range_saturate(drawn):
    x, grad, _, eighth = drawn
    grad[:, :, 0] = 10.0  # 11 times what e5m2 holds of gradients as they are scaled
    y, by_x, *_ = run(eighth, x * 1000, grad)
    assert y.isfinite().all() and by_x.isfinite().all() and by_x.abs().max() > 0


def test_of_a_product_that_leaves_its_bias_to_others_it_leaves_it_too(drawn):
    x, grad, native, eighth = drawn
    bare = copy.deepcopy(eighth)
    bare.adds_bias = False
    found, wanted = run(bare, x, grad), run(eighth, x, grad)
    assert found[3] is None and all(map(torch.equal, found[1:3], wanted[1:3]))
    torch.testing.assert_close(found[0] + native.bias, wanted[0], atol=0.02, rtol=0.02)


def test_with_norms_and_gelu_of_our_own_a_layer_is_close_to_that_in_bf16_and_adds_biases_once():
    layer = layers_of(build_model(planned("E-fp8")).eval())[0].bfloat16()
    eighths = [module for module in layer.modules() if isinstance(module, Float8Linear)]
    for module in eighths:
        torch.nn.init.normal_(module.bias)
    x = torch.randn(1, 32, 64).bfloat16()
    found = layer.feed_forward_chunk(x)
    for name in ("intermediate.dense", "output.dense"):
        layer.get_submodule(name).__class__ = LinearWithoutBias
    assert len(eighths) == 2 and 0 < relative(found, layer.feed_forward_chunk(x)) < 0.05


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_feed_forward_block_hands_on_what_it_has_in_8_bits(drawn, backend):
    """From GELU to the second linear layer, and its gradient to the first; as if either converted it by itself. GELU's
    output is not kept."""
    x, *_, first = drawn
    second = Float8Linear(128, 64).bfloat16()
    first.adds_bias = second.adds_bias = False
    first.__class__ = LinearWithoutBias
    block = FusedIntermediate(first)
    first.__class__ = Float8Linear
    weights, found = (first.weight, first.bias, second.weight), []
    handing_on = torch.compile(lambda x: second(block(x)), backend=backend, fullgraph=True)
    for run in (lambda x: second(gelu(first(x), first.bias)), handing_on):
        own = x.clone().requires_grad_()
        y = run(own)
        found.append([y.detach(), *torch.autograd.grad(y, (own, *weights), x * 1e-4)])
    assert all(map(torch.equal, *found))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, id):
        second(block(x))
    assert [one.shape for one in kept if one.dtype == torch.bfloat16 and 128 in one.shape] == [
        (64, 128),
        (128,),
    ]


@pytest.mark.triton
@pytest.mark.parametrize(
    ("most", "dtype"), [(fp8.E4M3_MAX, torch.float8_e4m3fn), (fp8.E5M2_MAX, torch.float8_e5m2)]
)
def test_one_kernel_converts_to_8_bits(most, dtype):
    x = torch.randn(3, 700, device=DEVICE).bfloat16() * 100
    found, wanted = (
        convert(x, 2.0**10, most, dtype).float() for convert in (fp8._cast, fp8._in_8_bits)
    )
    if x.is_cuda:
        wanted = fp8._in_8_bits(x.cpu(), 2.0**10, most, dtype).float().cuda()
    # Triton's interpreter rounds some numbers to another neighbour.
    assert found.abs().max() == most and (found == wanted).float().mean() >= (
        1 if x.is_cuda else 0.9
    )


@pytest.mark.triton
@pytest.mark.parametrize("shape", [(64, 64), (70, 3), (1, 200)], ids=str)
def test_one_kernel_makes_both_copies_of_a_weight(shape):
    weight = torch.randn(shape, device=DEVICE).bfloat16() * 5  # of which some saturate
    if (
        DEVICE.type == "cpu"
    ):  # the interpreter rounds to 8 bits wrongly; what has 8 bits already stays as it is
        weight = fp8.in_e4m3(weight, fp8.WEIGHT).bfloat16() / fp8.WEIGHT
        weight[:, ::2] *= 64
    else:
        weight[0, 0] = torch.nan
    found, across = fp8._weight_in_e4m3(weight)
    wanted = fp8.in_e4m3(weight, fp8.WEIGHT)
    assert across.is_contiguous() and across.shape == shape[::-1]
    for one in (found, across.t()):
        assert torch.equal(one.float().nan_to_num(9999), wanted.float().nan_to_num(9999))
    assert wanted.float().abs().eq(fp8.E4M3_MAX).any()


def test_a_weight_that_is_transposed_in_memory_gives_the_same_product(drawn):
    x, grad, native, _ = drawn
    weights = native.weight, native.weight.t().contiguous().t()
    found = [
        with_gradients(lambda *a: fp8.fp8_linear(*a, native.bias), [x, weight], grad)
        for weight in weights
    ]
    assert all(map(torch.equal, *found))
