"""GELU by a sigmoid is GELU to a fraction of bf16's rounding, and keeps no more than that."""

import functools
import re

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import library
from torch._dynamo.backends.common import aot_autograd
from transformers import AutoModelForCausalLM, GPT2Config

from qa_lib.kernels import gelu as gelus
from qa_lib.kernels.fp8 import E4M3_MAX, E5M2_MAX, in_e4m3, in_e5m2
from qa_lib.kernels.gelu import gelu
from qa_lib.model.fused_gelu import FusedIntermediate, use_sigmoid_gelu
from tests.kernels import DEVICE, assert_close, with_gradients
from tests.material import python, refused

# By type, the error that a kernel may have as a share of the result's norm.
ERRORS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def drawn(rows, width, dtype=torch.float32):
    """The output's gradient, the linear layer's output and its bias."""
    torch.manual_seed(0)
    grad, x = (2 * torch.randn(2, rows, width, device=DEVICE)).to(dtype)
    x[0, 0] = 30  # beyond what the polynomial is for
    return grad, x, torch.randn(width, device=DEVICE).to(dtype)


def test_value_and_gradient_are_within_a_fraction_of_half_a_step_of_bf16():
    near_zero = torch.linspace(-1e-3, 1e-3, 101)
    x = torch.cat([torch.linspace(-40, 40, 400_001), near_zero]).requires_grad_()
    value = gelu(x[:, None], torch.zeros(1))[:, 0]
    (gradient,) = torch.autograd.grad(value.sum(), x)
    wide = x.detach().double().requires_grad_()
    exact = wide * torch.special.erfc(-wide / 2**0.5) / 2
    (exact_gradient,) = torch.autograd.grad(exact.sum(), wide)
    half_step = 2**-9
    assert ((value - exact).abs() <= 0.21 * (half_step * exact.abs() + 1e-5)).all()
    error = (gradient - exact_gradient).abs()
    assert (error <= 0.21 * (half_step * exact_gradient.abs() + 1e-3)).all()


# A run before this may have left it False.
@torch._functorch.config.patch(ban_recompute_materialized_backward=True)
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
    x = torch.linspace(-9, 9, 2001).double()[:, None]
    grad = torch.linspace(-1, 2, 2001).double()[:, None]
    inputs = [x, torch.tensor([0.25], dtype=torch.float64)]

    def by_pytorch(x, bias):
        return torch.nn.functional.gelu(x + bias, approximate="tanh")

    def by_sigmoid(x, bias):
        return gelu(x, bias, tanh=True)

    results = with_gradients(by_sigmoid, inputs, grad)
    expected = with_gradients(by_pytorch, inputs, grad)
    torch.testing.assert_close(results, expected, rtol=1e-6, atol=1e-8)


def test_another_activation_is_refused_by_name():
    config = GPT2Config(n_layer=1, n_embd=64, n_head=1, vocab_size=100, activation_function="silu")
    model = AutoModelForCausalLM.from_config(config)
    refused("stands for GELU, and this model has SiLU", use_sigmoid_gelu, model)


# The kernels.


@pytest.mark.triton
@pytest.mark.parametrize(("rows", "width"), [(1, 3072), (11, 100), (6, 1)])
@pytest.mark.parametrize(("dtype", "error"), ERRORS.items(), ids=str)
@pytest.mark.parametrize("tanh", [False, True])
def test_the_kernels_are_gelu_and_its_derivative(rows, width, dtype, error, tanh, monkeypatch):
    monkeypatch.setattr(gelus, "PROGRAMS", 2)
    grad, *inputs = drawn(rows, width, dtype)
    value = gelus._gelu_forward(*inputs, 0.0, tanh)
    x_grad, bias_grad, x_grad8, output = gelus._gelu_backward(grad, *inputs, 0.0, tanh)
    results = [value, x_grad, bias_grad]
    assert {tensor.dtype for tensor in results} == {dtype}
    assert x_grad8.numel() == output.numel() == 0, "nobody asked for 8 bits"
    wide = [x.cpu().double() for x in inputs]
    expected = with_gradients(lambda *x: gelu(*x, tanh), wide, grad.cpu().double())
    assert_close([tensor.cpu() for tensor in results], expected, error)


@pytest.mark.triton
@pytest.mark.parametrize("factor", [0.0, 2.0**10])
def test_the_operators_are_what_the_compiler_takes_them_for(factor):
    checks = ("test_schema", "test_faketensor")
    grad, *inputs = drawn(4, 32)
    library.opcheck(gelus._gelu_forward.operator, (*inputs, factor), test_utils=checks)
    library.opcheck(gelus._gelu_backward.operator, (grad, *inputs, factor), test_utils=checks)
    library.opcheck(gelus._gelu_backward_turned.operator, (grad, *inputs), test_utils=checks)


FACTOR = 2.0**10
INFINITY = float("inf")
NAN = float("nan")


@pytest.fixture
def beyond_8_bits():
    """The arguments of the backward kernel, with values that would be infinite in 8 bits."""
    grad, x, bias = drawn(4, 32, torch.bfloat16)
    grad[0, 1] = 1000.0
    x[0, 1] = 1000.0
    return grad, x, bias


def assert_in_8_bits(tensor8, expected, largest) -> None:
    """A tensor has the values of another in 8 bits, and the largest of them."""
    assert tensor8.dtype == expected.dtype
    assert tensor8.float().abs().max() == largest
    # Triton's interpreter rounds some numbers to another neighbour; a GPU's sigmoid is as near as
    # fp32 is, and no nearer.
    least_share = 0.9 if DEVICE.type == "cpu" else 0.99
    assert (tensor8.float() == expected.float()).float().mean() >= least_share


def plain_reference(grad, x, bias):
    """The gradient of x and GELU in fp32, by plain PyTorch on the CPU."""
    x_grad, _, y = gelus.reference(grad.cpu(), x.cpu(), bias.cpu())
    return x_grad, y


@pytest.mark.triton
def test_the_forward_kernel_writes_its_result_in_8_bits(beyond_8_bits):
    _, *inputs = beyond_8_bits
    _, y = plain_reference(*beyond_8_bits)
    value8 = gelus._gelu_forward(*inputs, FACTOR).cpu()
    assert_in_8_bits(value8, in_e4m3(y, FACTOR), E4M3_MAX)


@pytest.mark.triton
@pytest.mark.parametrize("tanh", [False, True])
def test_gelu_of_infinity_is_infinite_and_of_nan_and_minus_infinity_nan_as_in_pytorch(tanh):
    x = torch.tensor([[INFINITY, -INFINITY, NAN, 1e30, -1e30]], device=DEVICE)
    value = gelus._gelu_forward(x, torch.zeros_like(x[0]), 0.0, tanh)
    wanted = torch.tensor([[INFINITY, NAN, NAN, 1e30, 0.0]], device=DEVICE)
    torch.testing.assert_close(value, wanted, equal_nan=True)


@pytest.mark.triton
def test_infinity_is_the_largest_number_of_8_bits():
    x = torch.tensor([[INFINITY]], device=DEVICE).bfloat16()
    grad = torch.tensor([[-INFINITY]], device=DEVICE).bfloat16()
    value8 = gelus._gelu_forward(x, torch.zeros_like(x[0]), FACTOR)
    _, _, x_grad8, _ = gelus._gelu_backward(grad, torch.ones_like(x), x.new_zeros(1), FACTOR)
    assert (value8.item(), x_grad8.item()) == (E4M3_MAX, -E5M2_MAX)


@pytest.mark.triton
@pytest.mark.skipif(DEVICE.type == "cpu", reason="Triton's interpreter makes numbers of NaN")
def test_nan_stays_nan_in_8_bits():
    nan = torch.tensor([[NAN]], device=DEVICE).bfloat16()
    value8 = gelus._gelu_forward(nan, torch.zeros_like(nan[0]), FACTOR)
    _, _, x_grad8, _ = gelus._gelu_backward(nan, torch.ones_like(nan), nan.new_zeros(1), FACTOR)
    assert value8.float().isnan().all() and x_grad8.float().isnan().all()


PTX = """
import torch
from tests.compiling import call_gelu, compiled
for program, _ in compiled(90, lambda: call_gelu(torch.bfloat16, has_fp8=True)):
    if "gelu" in program.metadata.name:
        print(program.asm["ptx"])
"""


@pytest.mark.triton
def test_a_gpu_computes_the_sigmoid_by_its_own_instructions_and_saturates_by_itself(tmp_path):
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    ptx = python("-c", PTX, **environment).stdout
    instructions = set(re.findall(r"^\s+(?:@\S+ )?([a-z0-9]+\.[\w.]+)", ptx, re.MULTILINE))
    assert {
        "ex2.approx.ftz.f32",
        "rcp.approx.ftz.f32",
        "cvt.rn.satfinite.e4m3x2.f32",
        "cvt.rn.satfinite.e5m2x2.f32",
    } <= instructions
    kinds = {instruction.partition(".")[0] for instruction in instructions}
    assert not kinds & {"div", "max", "tanh"}, "each of them would be slower or less exact"


@pytest.mark.triton
def test_the_backward_kernel_writes_its_result_in_8_bits_too(beyond_8_bits):
    wanted, _ = plain_reference(*beyond_8_bits)
    _, _, x_grad8, _ = gelus._gelu_backward(*beyond_8_bits, FACTOR)
    assert_in_8_bits(x_grad8.cpu(), in_e5m2(wanted, FACTOR), E5M2_MAX)


@pytest.mark.triton
@pytest.mark.parametrize(("rows", "width"), [(70, 130), (16, 64), (3, 16)])
def test_the_backward_kernel_writes_8_bits_both_ways_and_nothing_else(rows, width, monkeypatch):
    monkeypatch.setattr(gelus, "PROGRAMS", 2)
    grad, x, bias = drawn(rows, width, torch.bfloat16)
    grad = grad * 1e-3
    grad[0, 1] = 1000.0
    bias_grad, grad8, turned_grad8, turned8 = gelus._gelu_backward_turned(grad, x, bias)
    wanted = gelus._backward_turned(grad.cpu(), x.cpu(), bias.cpu(), tanh=False)
    assert_close([bias_grad.cpu()], [wanted[0].double()], 8e-3)
    assert_in_8_bits(grad8.cpu(), wanted[1], E5M2_MAX)
    assert torch.equal(turned_grad8[:, :rows].float(), grad8.t().float())
    assert_in_8_bits(turned8.cpu(), wanted[3], E4M3_MAX)
    assert not turned_grad8[:, rows:].float().any()
    assert not turned8[:, rows:].float().any()


@pytest.mark.triton
def test_the_backward_kernel_writes_the_result_of_the_forward_kernel_again(beyond_8_bits):
    _, *inputs = beyond_8_bits
    _, _, _, output = gelus._gelu_backward(*beyond_8_bits, FACTOR)
    assert torch.equal(output, gelus._gelu_forward(*inputs, 0.0))


# What surrounds the kernels, with plain PyTorch in their place.


def covers(programs: int, tile: int, size: int) -> bool:
    """Whether so many programs have all elements, and none of them nothing to do."""
    return (programs - 1) * tile < size <= programs * tile


def cdf_and_slope(x, FIRST, SECOND, THIRD, LARGEST_SQUARE, **_):
    square = (x * x).clamp(max=LARGEST_SQUARE)
    cdf = torch.sigmoid(x * (FIRST + square * (SECOND + square * THIRD)))
    return cdf, FIRST + square * (3 * SECOND + square * (5 * THIRD))


def in_8_bits(x, dtype, FACTOR, MAX, **_):
    assert torch.finfo(dtype).max == MAX
    return (x.float() * FACTOR).clamp(-MAX, MAX).to(dtype)


def forward_in_pytorch(grid, gemm_out, bias, output, **a) -> None:
    blocks_of_rows, blocks = grid
    assert covers(blocks_of_rows, a["ROWS"], a["rows"])
    assert covers(blocks, a["COLUMNS"], a["WIDTH"])
    assert bias.shape == (a["WIDTH"],)
    x = gemm_out + bias
    value = x * cdf_and_slope(x, **a)[0]
    output.copy_(in_8_bits(value, output.dtype, **a) if a["FACTOR"] else value)


def backward_in_pytorch(grid, grad, gemm_out, bias, gemm_grad, partials, **a) -> None:
    programs, blocks = grid
    assert programs == len(partials) <= -(-a["rows"] // a["ROWS"])
    assert covers(blocks, a["COLUMNS"], a["WIDTH"])
    x = gemm_out + bias
    cdf, slope = cdf_and_slope(x, **a)
    x_grad = grad * cdf * (1 + x * (1 - cdf) * slope)
    if gemm_grad is not None:
        assert programs == min(a["rows"], gelus.PROGRAMS)
        gemm_grad.copy_(x_grad)
    if a["FACTOR"]:
        a["gemm_grad8"].copy_(in_8_bits(x_grad, a["gemm_grad8"].dtype, **a))
    if a["output"] is not None:
        a["output"].copy_(x * cdf)
    if a["turned_grad8"] is not None:
        assert a["padded"] == a["turned_grad8"].shape[1]
        rows_of_zeros = (0, 0, 0, a["padded"] - a["rows"])
        padded = torch.nn.functional.pad(x_grad, rows_of_zeros)
        a["turned_grad8"].copy_(in_8_bits(padded.t(), torch.float8_e5m2, a["FACTOR"], a["MAX"]))
        padded = torch.nn.functional.pad(x * cdf, rows_of_zeros)
        factor, largest = a["OUTPUT_FACTOR"], a["OUTPUT_MAX"]
        a["turned_output8"].copy_(in_8_bits(padded.t(), torch.float8_e4m3fn, factor, largest))
    for program in range(programs):
        rows = x_grad.view(a["rows"], a["WIDTH"])[program::programs]
        partials[program] = rows.sum(0)


@pytest.fixture
def kernels_in_pytorch(monkeypatch):
    """Plain PyTorch in place of the kernels, which gets the arguments that they would."""
    in_pytorch = {
        gelus.gelu_forward_kernel: forward_in_pytorch,
        gelus.gelu_backward_kernel: backward_in_pytorch,
    }

    def launch(kernel, grid, /, **arguments):
        in_pytorch[kernel](grid, **arguments)

    monkeypatch.setattr(gelus, "launch", launch)
    monkeypatch.setattr(gelus, "sum_partials", lambda partials, dtype: partials.sum(0).to(dtype))
    monkeypatch.setattr(gelus, "PROGRAMS", 2)


@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 3000), (5, 7)])
def test_what_surrounds_the_kernels_gives_gelu_and_its_gradients(
    rows, width, tanh, kernels_in_pytorch
):
    grad, x, bias = (tensor.cpu() for tensor in drawn(rows, width))
    value = gelus._gelu_forward(x, bias, 0.0, tanh)
    x_grad, bias_grad, x_grad8, output = gelus._gelu_backward(grad, x, bias, 0.0, tanh)
    expected = with_gradients(lambda *inputs: gelu(*inputs, tanh), [x, bias], grad)
    torch.testing.assert_close([value, x_grad, bias_grad], expected, atol=1e-4, rtol=1e-4)
    assert x_grad8.numel() == output.numel() == 0, "nobody asked for 8 bits"


def test_what_surrounds_the_kernels_gives_results_in_8_bits_that_saturate(kernels_in_pytorch):
    grad, x, bias = (tensor.cpu() for tensor in drawn(5, 7))
    grad[0, 0] = 1e6
    value8 = gelus._gelu_forward(x, bias, 64.0)
    assert torch.equal(value8.float(), in_e4m3(gelu(x, bias), 64.0).float())
    assert value8.float().max() == E4M3_MAX
    x_grad, _, x_grad8, output = gelus._gelu_backward(grad, x, bias, 64.0)
    assert torch.equal(x_grad8.float(), in_e5m2(x_grad, 64.0).float())
    assert x_grad8.float().max() == E5M2_MAX
    torch.testing.assert_close(output, gelu(x, bias))


def test_what_surrounds_the_kernel_that_turns_gives_what_the_reference_does(kernels_in_pytorch):
    grad, x, bias = (tensor.cpu() for tensor in drawn(70, 130))
    grad *= 1e-3
    results = gelus._gelu_backward_turned(grad, x, bias)
    wanted = gelus._backward_turned(grad, x, bias, tanh=False)
    torch.testing.assert_close(
        [tensor.float() for tensor in results], [tensor.float() for tensor in wanted]
    )
    assert [tensor.dtype for tensor in results] == [tensor.dtype for tensor in wanted]
