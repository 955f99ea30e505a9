"""Frozen weights in 4 bits: the product against the weight that they stand for, and what trains beside them."""

import pytest
import torch
from torch import library
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from qa_lib.lab.search.memory_estimate import gpu_of
from qa_lib.measure.meter import StepFlops
from qa_lib.model import nf4
from qa_lib.model.build import DTYPES, build_model, trainable_summary
from qa_lib.model.nf4 import NF4Linear, native
from tests.kernels import with_gradients
from tests.material import python
from tests.tiny import planned

WIDTHS = 96, 160  # of inputs and outputs; neither is a power of 2


def model_of(precision="bf16", row="L-qlora"):
    words = {
        "data": "synthetic:1",
        "model": "gpt2:L2H128V512",
        "micro_batch": 4,
        "machine": gpu_of(90),
    }
    return build_model(planned(row, "lm-quality", {"precision": precision}, **words))


@pytest.fixture(params=["linear", "conv1d", "no bias"])
def layer(request):
    torch.manual_seed(0)
    if request.param != "conv1d":
        return torch.nn.Linear(*WIDTHS, bias=request.param == "linear")
    made = Conv1D(*reversed(WIDTHS))
    torch.nn.init.normal_(made.bias)
    return made


@pytest.fixture
def small(layer):
    return NF4Linear(layer, torch.float32)


def test_product_and_gradient_are_those_of_the_weight_that_the_bits_stand_for(layer, small):
    weight = small.wide()
    own = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
    assert weight.shape == own.shape == (160, 96)
    error = (weight - own).abs().max() / own.abs().max()
    assert 0 < error < 0.16, "16 values between -1 and 1: half of the widest gap is 0.152"

    x, grad = torch.randn(3, 5, WIDTHS[0]), torch.randn(3, 5, WIDTHS[1])
    wanted = with_gradients(lambda x: F.linear(x, weight, layer.bias), [x], grad)
    torch.testing.assert_close(with_gradients(small, [x], grad), wanted, atol=1e-5, rtol=1e-5)
    arguments = (x.requires_grad_(), small.weight, small.scales, WIDTHS[1])
    library.opcheck(torch.ops.qa_lib.nf4_linear.default, arguments)


def test_its_bits_are_those_of_bitsandbytes_own_layer(layer, small):
    from bitsandbytes.nn import Params4bit

    weight = (layer.weight.T if small.transposed else layer.weight).detach().contiguous()
    theirs = Params4bit(
        weight, requires_grad=False, quant_type="nf4", compress_statistics=False
    ).to("cpu")
    assert torch.equal(theirs.data, small.weight)
    assert torch.equal(theirs.quant_state.absmax, small.scales.view(torch.float32))


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16], ids=str)
def test_both_passes_are_in_the_type_that_it_computes_in(layer, compute):
    small = NF4Linear(layer, compute)
    x, grad = torch.randn(3, 5, WIDTHS[0]), torch.randn(3, 5, WIDTHS[1]).to(compute)
    bias = 0 if layer.bias is None else layer.bias.to(compute)
    weight = small.wide().to(compute)
    expected, wanted = with_gradients(
        lambda half: F.linear(half, weight) + bias, [x.to(compute)], grad
    )
    torch.testing.assert_close(
        with_gradients(small, [x], grad), [expected, wanted.float()], atol=0, rtol=0
    )
    with torch.autocast("cpu", torch.bfloat16 if compute == torch.float16 else torch.float16):
        assert torch.equal(small(x), expected), "whatever a surrounding autocast says"


@pytest.mark.parametrize("width", [WIDTHS[0] // 2, 2 * WIDTHS[0]])
def test_inputs_of_another_width_are_refused(width):
    """On a GPU bitsandbytes would read on, or stop short."""
    small = NF4Linear(torch.nn.Linear(*WIDTHS), torch.float32)
    with pytest.raises(
        RuntimeError, match=f"7680 bytes of weights in 4 bits are no matrix of 160 x {width}"
    ):
        small(torch.randn(2, width))
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(RuntimeError, match="no matrix of"),
    ):
        small(torch.randn(2, width))


def test_the_layer_of_before_comes_back(layer, small):
    back, x = native(small), torch.randn(4, WIDTHS[0])
    assert type(back) is type(layer) and torch.allclose(back(x), small(x), atol=1e-5)
    delta = torch.randn(WIDTHS[1], WIDTHS[0])
    back = native(NF4Linear(layer, torch.bfloat16), delta)
    assert torch.equal(back.weight.T if small.transposed else back.weight, small.wide() + delta), (
        "in fp32"
    )


def test_a_weight_takes_4_bits_and_its_share_of_a_scale(layer):
    small = NF4Linear(layer, torch.bfloat16)
    assert (small.weight.nbytes + small.scales.nbytes) * 8 / (
        WIDTHS[0] * WIDTHS[1]
    ) == pytest.approx(4 + 32 / 64)
    assert not small.weight.requires_grad and not small.scales.requires_grad
    before = small.wide()
    assert torch.equal(small.half().wide(), before), (
        "a model in half precision leaves the scales as they are"
    )


def test_only_bytes_are_kept_for_the_backward_pass(small):
    kept, x = [], torch.randn(2, WIDTHS[0], requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        small(x)
    node = torch.ops.qa_lib.nf4_linear(x, small.weight, small.scales, WIDTHS[1]).grad_fn
    assert not any(map(torch.is_tensor, vars(node).values())), "nor beside what hooks see"
    assert kept and all(tensor.dtype in (torch.uint8, torch.int32) for tensor in kept)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_adapters_train_in_fp32(precision):
    """peft makes adapters of bitsandbytes' own layer in the type that this computes in."""
    model = model_of(precision)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    products = [module.compute for module in model.modules() if isinstance(module, NF4Linear)]
    assert products == [DTYPES[precision]] * 2 * 4


def test_the_compiler_sees_one_graph():
    ids = torch.randint(0, 512, (2, 64))
    found = torch._dynamo.explain(model_of())(input_ids=ids, labels=ids)
    assert (found.graph_count, found.graph_break_count) == (1, 0)


def test_on_a_cpu_weights_are_widened_without_the_kernel_of_bitsandbytes(monkeypatch):
    """That kernel is wrong on processors with AVX512-BF16. A weight whose every value is one of the 16 comes back."""
    from bitsandbytes.functional import get_4bit_type

    places = torch.randint(0, 16, (240, nf4.BLOCK))
    places[:, 0] = 15  # so that each block's scale is its largest weight
    weight = (get_4bit_type("nf4", "cpu")[places] * torch.linspace(0.1, 2, 240)[:, None]).view(
        160, 96
    )
    layer = torch.nn.Linear(96, 160)
    layer.weight.data = weight
    small = NF4Linear(layer, torch.float32)
    monkeypatch.setattr(
        torch.ops.bitsandbytes, "dequantize_4bit", lambda *_: pytest.fail("its kernel was called")
    )
    assert torch.allclose(small.wide(), weight, atol=1e-6)


@pytest.mark.slow
def test_bitsandbytes_prints_no_lines_of_its_own():
    """On processors with AVX512-BF16 it warns on import, of a package that nothing here uses."""
    code = "import qa_lib; from bitsandbytes.backends.cpu import ops; ops.logger.warning('Failed to load')"
    done = python("-c", code)
    assert (done.stdout, done.stderr) == ("", "")


def test_weights_in_4_bits_count_as_weights():
    small, whole = model_of(), model_of(row="L-lora")
    assert StepFlops(small).flops(1000, 1e5) == StepFlops(whole).flops(1000, 1e5)
    assert trainable_summary(small).equals(trainable_summary(whole))
