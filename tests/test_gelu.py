"""GELU by a sigmoid is GELU to a fraction of bf16's rounding, and keeps no more for the backward pass."""

import functools

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import library
from torch._dynamo.backends.common import aot_autograd
from transformers import AutoModelForCausalLM, GPT2Config

from qa_lib.kernels import gelu as gelus
from qa_lib.kernels.fp8 import E4M3_MAX, E5M2_MAX, in_e4m3, in_e5m2
from qa_lib.kernels.gelu import gelu
from qa_lib.model.fused_blocks import FusedIntermediate, use_sigmoid_gelu
from tests.kernels import DEVICE, assert_close, with_gradients
from tests.material import refused

ERRORS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def drawn(rows, width, dtype=torch.float32):
    """The output's gradient, the product and the bias."""
    torch.manual_seed(0)
    grad, product = (2 * torch.randn(2, rows, width, device=DEVICE)).to(dtype)
    product[0, 0] = 30  # beyond what the polynomial is for
    return grad, product, torch.randn(width, device=DEVICE).to(dtype)


def test_value_and_gradient_are_within_a_fraction_of_half_a_step_of_bf16():
    x = torch.cat(
        [torch.linspace(-40, 40, 400_001), torch.linspace(-1e-3, 1e-3, 101)]
    ).requires_grad_()
    value = gelu(x[:, None], torch.zeros(1))[:, 0]
    (gradient,) = torch.autograd.grad(value.sum(), x)
    wide = x.detach().double().requires_grad_()
    exact = wide * torch.special.erfc(-wide / 2**0.5) / 2
    (expected,) = torch.autograd.grad(exact.sum(), wide)
    half_step = 2**-9
    assert ((value - exact).abs() <= 0.21 * (half_step * exact.abs() + 1e-5)).all()
    assert ((gradient - expected).abs() <= 0.21 * (half_step * expected.abs() + 1e-3)).all()


@torch._functorch.config.patch(
    ban_recompute_materialized_backward=True
)  # a run before this may have left it False
def test_the_compiler_keeps_input_and_output_and_nothing_else():
    kept = []

    def remember(graph, _):
        (last,) = (node for node in graph.graph.nodes if node.op == "output")
        kept.extend(node.meta["val"] for node in last.all_input_nodes)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=remember,
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
    )
    block = torch.nn.Sequential(
        FusedIntermediate(torch.nn.Linear(16, 64)), torch.nn.Linear(64, 16)
    ).bfloat16()
    x = torch.randn(100, 16, dtype=torch.bfloat16, requires_grad=True)
    torch.compile(block.forward, backend=backend)(x).sum().backward()
    assert [value.dtype for value in kept if value.shape == (100, 64)] == [torch.bfloat16] * 2


def test_the_approximation_by_tanh_is_a_sigmoid_of_two_terms():
    x, grad = (
        torch.linspace(-9, 9, 2001).double()[:, None],
        torch.linspace(-1, 2, 2001).double()[:, None],
    )
    inputs = x, torch.tensor([0.25], dtype=torch.float64)
    wanted = with_gradients(
        lambda x, bias: torch.nn.functional.gelu(x + bias, approximate="tanh"), inputs, grad
    )
    found = with_gradients(lambda x, bias: gelu(x, bias, tanh=True), inputs, grad)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)


def test_another_activation_is_refused_by_name():
    config = GPT2Config(n_layer=1, n_embd=64, n_head=1, vocab_size=100, activation_function="silu")
    refused(
        "stands for GELU, and this model has SiLU",
        use_sigmoid_gelu,
        AutoModelForCausalLM.from_config(config),
    )


@pytest.mark.triton
@pytest.mark.parametrize(("rows", "width"), [(1, 3072), (11, 100), (6, 1)])
@pytest.mark.parametrize(("dtype", "error"), ERRORS.items(), ids=str)
@pytest.mark.parametrize("tanh", [False, True])
def test_the_kernels_are_gelu_and_its_derivative(rows, width, dtype, error, tanh, monkeypatch):
    monkeypatch.setattr(gelus, "PROGRAMS", 2)
    grad, *inputs = drawn(rows, width, dtype)
    wide = [x.cpu().double() for x in inputs]
    value, *slopes = with_gradients(lambda *x: gelu(*x, tanh), wide, grad.cpu().double())
    *found, eighth, again = gelus._gelu_backward(grad, *inputs, 0.0, tanh)
    found.insert(0, gelus._gelu_forward(*inputs, 0.0, tanh))
    assert eighth.numel() == again.numel() == 0 and {one.dtype for one in found} == {dtype}
    assert_close([one.cpu() for one in found], [value, *slopes], error)


@pytest.mark.triton
def test_its_operator_is_what_the_compiler_takes_it_for():
    for factor in (0.0, 2.0**10):
        for call, inputs in (
            (gelus._gelu_forward, drawn(4, 32)[1:]),
            (gelus._gelu_backward, drawn(4, 32)),
        ):
            library.opcheck(call, (*inputs, factor), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.triton
@pytest.mark.parametrize(
    "call", [gelus._gelu_forward, gelus._gelu_backward], ids=["forward", "backward"]
)
def test_either_kernel_writes_its_result_in_8_bits_and_the_second_that_of_the_first_again(call):
    grad, *inputs = drawn(4, 32, torch.bfloat16)
    grad[0, 1] = inputs[0][0, 1] = 1000.0  # which would be infinite in 8 bits
    value = gelus._gelu_forward(*inputs, 0.0)
    if call is gelus._gelu_forward:
        eighth, wanted, most = call(*inputs, 2.0**10), in_e4m3(value, 2.0**10), E4M3_MAX
    else:
        result, _, eighth, again = call(grad, *inputs, 2.0**10)
        assert torch.equal(again, value)
        wanted, most = in_e5m2(result, 2.0**10), E5M2_MAX
    assert eighth.dtype == wanted.dtype and eighth.float().abs().max() == most
    # Triton's interpreter rounds some numbers to another neighbour.
    assert (eighth.float() == wanted.float()).float().mean() >= (0.9 if DEVICE.type == "cpu" else 1)
