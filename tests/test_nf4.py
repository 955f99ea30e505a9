"""Frozen weights in 4 bits: the product with what they stand for, and what trains beside them."""

import pytest
import torch
from torch import library
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from qa_lib.measure.meter import StepFlops
from qa_lib.model import nf4
from qa_lib.model.build import DTYPES, build_model, trainable_summary
from qa_lib.model.nf4 import NF4Linear, native
from qa_lib.spec.machine import gpu_of
from tests.kernels import with_gradients
from tests.material import python
from tests.tiny import planned

# The shape of the linear layer; neither is a power of 2.
INPUTS = 96
OUTPUTS = 160


def model_of(precision="bf16", variant="L-qlora"):
    spec = planned(
        variant,
        "lm-quality",
        {"precision": precision},
        data="synthetic:1",
        model="gpt2:L2H128V512",
        micro_batch=4,
        machine=gpu_of(90),
    )
    return build_model(spec)


@pytest.fixture(params=["linear", "conv1d", "no bias"])
def layer(request):
    torch.manual_seed(0)
    if request.param != "conv1d":
        return torch.nn.Linear(INPUTS, OUTPUTS, bias=request.param == "linear")
    conv1d = Conv1D(OUTPUTS, INPUTS)
    torch.nn.init.normal_(conv1d.bias)
    return conv1d


@pytest.fixture
def small(layer):
    """The layer in 4 bits."""
    return NF4Linear(layer, torch.float32)


def weight_of(layer):
    """The weight [out, in] of a linear layer, of which GPT-2's has the transpose."""
    return layer.weight.T if isinstance(layer, Conv1D) else layer.weight


@pytest.fixture
def x():
    return torch.randn(3, 5, INPUTS)


@pytest.fixture
def grad():
    return torch.randn(3, 5, OUTPUTS)


# The weight.


def test_the_bits_stand_for_nearly_the_weight(layer, small):
    weight = weight_of(layer)
    assert small.wide().shape == weight.shape == (OUTPUTS, INPUTS)
    error = (small.wide() - weight).abs().max() / weight.abs().max()
    assert 0 < error < 0.16, "16 values between -1 and 1: half of the widest gap is 0.152"


def test_its_bits_are_those_of_bitsandbytes_own_layer(layer, small):
    from bitsandbytes.nn import Params4bit

    weight = weight_of(layer).detach().contiguous()
    theirs = Params4bit(
        weight, requires_grad=False, quant_type="nf4", compress_statistics=False
    ).to("cpu")
    assert torch.equal(theirs.data, small.weight)
    assert torch.equal(theirs.quant_state.absmax, small.scales.view(torch.float32))


def test_a_weight_takes_4_bits_and_its_share_of_a_scale(small):
    bits = 8 * (small.weight.nbytes + small.scales.nbytes)
    assert bits / (INPUTS * OUTPUTS) == pytest.approx(4 + 32 / 64)


def test_the_weight_does_not_train(small):
    assert not small.weight.requires_grad
    assert not small.scales.requires_grad


def test_a_model_in_half_precision_leaves_the_scales_as_they_are(small):
    weight = small.wide()
    assert torch.equal(small.half().wide(), weight)


# The layer.


def test_product_and_gradient_are_those_of_the_weight_that_the_bits_stand_for(
    layer, small, x, grad
):
    weight = small.wide()
    results = with_gradients(small, [x], grad)
    expected = with_gradients(lambda x: F.linear(x, weight, layer.bias), [x], grad)
    torch.testing.assert_close(results, expected, atol=1e-5, rtol=1e-5)


def test_the_operator_is_what_the_compiler_takes_it_for(small, x):
    arguments = (x.requires_grad_(), small.weight, small.scales, OUTPUTS)
    library.opcheck(torch.ops.qa_lib.nf4_linear.default, arguments)


def product_in(layer, small):
    """The layer's product with the weight in 4 bits, in the type in which `small` computes."""
    weight = small.wide().to(small.compute)
    bias = 0 if layer.bias is None else layer.bias.to(small.compute)
    return lambda x: F.linear(x, weight) + bias


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16], ids=str)
def test_both_passes_are_in_the_type_that_it_computes_in(layer, compute, x, grad):
    small = NF4Linear(layer, compute)
    results = with_gradients(small, [x], grad.to(compute))
    output, x_grad = with_gradients(product_in(layer, small), [x.to(compute)], grad.to(compute))
    torch.testing.assert_close(results, [output, x_grad.float()], atol=0, rtol=0)


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16], ids=str)
def test_a_surrounding_autocast_changes_nothing(layer, compute, x):
    small = NF4Linear(layer, compute)
    expected = product_in(layer, small)(x.to(compute))
    other = torch.bfloat16 if compute == torch.float16 else torch.float16
    with torch.autocast("cpu", other):
        assert torch.equal(small(x), expected)


@pytest.mark.parametrize("width", [INPUTS // 2, 2 * INPUTS])
def test_inputs_of_another_width_are_refused(width):
    """On a GPU bitsandbytes would read on, or stop short."""
    small = NF4Linear(torch.nn.Linear(INPUTS, OUTPUTS), torch.float32)
    message = f"7680 bytes of weights in 4 bits are no matrix of 160 x {width}"
    with pytest.raises(RuntimeError, match=message):
        small(torch.randn(2, width))


@pytest.mark.parametrize("width", [INPUTS // 2, 2 * INPUTS])
def test_the_compiler_is_told_of_inputs_of_another_width(width):
    small = NF4Linear(torch.nn.Linear(INPUTS, OUTPUTS), torch.float32)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, pytest.raises(RuntimeError, match="no matrix of"):
        small(torch.randn(2, width))


def test_a_layer_of_the_kind_that_was_replaced_comes_back(layer, small, x):
    back = native(small)
    assert type(back) is type(layer)
    assert torch.allclose(back(x), small(x), atol=1e-5)


def test_what_adapters_have_learnt_is_added_in_fp32(layer):
    small = NF4Linear(layer, torch.bfloat16)
    delta = torch.randn(OUTPUTS, INPUTS)
    assert torch.equal(weight_of(native(small, delta)), small.wide() + delta)


def test_only_bytes_are_kept_for_the_backward_pass(small):
    x = torch.randn(2, INPUTS, requires_grad=True)
    dtypes = set()

    def keep(tensor):
        dtypes.add(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        small(x)
    assert dtypes == {torch.uint8, torch.int32}
    node = torch.ops.qa_lib.nf4_linear(x, small.weight, small.scales, OUTPUTS).grad_fn
    assert not any(map(torch.is_tensor, vars(node).values())), "nor beside what hooks see"


# Models.


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_adapters_train_in_fp32(precision):
    """peft makes adapters of bitsandbytes' own layer in the type that this computes in."""
    model = model_of(precision)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    types = [module.compute for module in model.modules() if isinstance(module, NF4Linear)]
    layers = 2
    assert types == [DTYPES[precision]] * layers * 4


def test_the_compiler_sees_one_graph():
    ids = torch.randint(0, 512, (2, 64))
    explanation = torch._dynamo.explain(model_of())(input_ids=ids, labels=ids)
    assert explanation.graph_count == 1
    assert explanation.graph_break_count == 0


def test_on_a_cpu_weights_are_widened_without_the_kernel_of_bitsandbytes(monkeypatch):
    """That kernel is wrong on processors with AVX512-BF16.

    A weight whose every value is one of the 16 times its block's scale comes back.
    """
    from bitsandbytes.functional import get_4bit_type

    blocks = INPUTS * OUTPUTS // nf4.BLOCK
    codes = torch.randint(0, 16, (blocks, nf4.BLOCK))
    codes[:, 0] = 15  # so that each block's scale is its largest weight
    scales = torch.linspace(0.1, 2, blocks)
    weight = (get_4bit_type("nf4", "cpu")[codes] * scales[:, None]).view(OUTPUTS, INPUTS)
    layer = torch.nn.Linear(INPUTS, OUTPUTS)
    layer.weight.data = weight
    small = NF4Linear(layer, torch.float32)

    def fail(*_):
        pytest.fail("bitsandbytes' kernel was called")

    monkeypatch.setattr(torch.ops.bitsandbytes, "dequantize_4bit", fail)
    assert torch.allclose(small.wide(), weight, atol=1e-6)


@pytest.mark.slow
def test_bitsandbytes_prints_no_lines_of_its_own():
    """On processors with AVX512-BF16 it warns on import, of a package that nothing here uses."""
    lines = (
        "import qa_lib",
        "from bitsandbytes.backends.cpu import ops",
        "ops.logger.warning('Failed to load')",
    )
    done = python("-c", "; ".join(lines))
    assert (done.stdout, done.stderr) == ("", "")


def test_weights_in_4_bits_count_as_weights():
    small = model_of()
    whole = model_of(variant="L-lora")
    assert StepFlops(small).flops(1000, 1e5) == StepFlops(whole).flops(1000, 1e5)
    assert trainable_summary(small).equals(trainable_summary(whole))


# Types, and weights of odd sizes.


def test_under_autocast_a_layer_computes_in_its_own_type():
    small = NF4Linear(torch.nn.Linear(INPUTS, OUTPUTS), torch.float32)
    x = torch.randn(4, INPUTS, requires_grad=True)
    expected = small(x)
    with torch.autocast("cpu", torch.bfloat16):
        found = small(x)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def test_an_output_is_of_the_type_that_a_layer_computes_in_with_its_bias():
    small = NF4Linear(torch.nn.Linear(INPUTS, OUTPUTS), torch.bfloat16)
    assert small(torch.randn(4, INPUTS)).dtype == torch.bfloat16


def test_a_layer_keeps_its_bias():
    layer = torch.nn.Linear(INPUTS, OUTPUTS)
    small = NF4Linear(layer, torch.float32)
    outputs = small(torch.zeros(2, INPUTS))
    torch.testing.assert_close(outputs, layer.bias.detach().expand(2, -1))
    assert native(small).bias is layer.bias


@pytest.mark.parametrize("shape", [(3, 7), (5, 64)], ids=str)
def test_weights_that_fill_no_whole_block_or_byte_are_widened(shape):
    rows, columns = shape
    layer = torch.nn.Linear(columns, rows)
    wide = NF4Linear(layer, torch.float32).wide()
    assert wide.shape == shape
    error = (wide - layer.weight).abs().max() / layer.weight.abs().max()
    assert 0 < error < 0.16


@pytest.mark.parametrize("bytes_", [3, 5])
def test_bits_of_another_size_are_refused(bytes_):
    packed = torch.zeros(bytes_, 1, dtype=torch.uint8)
    scales = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=f"{bytes_} bytes .* no matrix of 1 x 8"):
        nf4._wide(packed, scales, 1, 8, torch.float32)


def test_a_change_of_the_weight_is_in_the_native_layer(layer):
    small = NF4Linear(layer, torch.float32)
    delta = torch.randn(OUTPUTS, INPUTS)
    torch.testing.assert_close(weight_of(native(small, delta)), small.wide() + delta)
