"""Products in 8-bit floats against the same in bf16; PyTorch has a CPU form of the product."""

import copy
import operator

import pytest
import torch

from qa_lib.data.synthetic import TINY_CONFIG
from qa_lib.kernels import fp8, fused_norm, precompile, varlen_backward
from qa_lib.kernels.gelu import fp8_feed_forward, gelu
from qa_lib.model import fused_norms, fused_projections
from qa_lib.model.architectures import layers_of
from qa_lib.model.build import build_model
from qa_lib.model.float8_layers import Float8Linear, LinearWithoutBias, cast_weights, leave_copy
from qa_lib.model.fused_gelu import FusedIntermediate
from qa_lib.model.fused_norms import FusedOutput
from qa_lib.model.hash_dropout import renew
from qa_lib.train.compile import compile_kernels
from tests.kernels import (
    DEVICE,
    Handed,
    attention_with_copies,
    copy_of,
    relative,
    with_gradients,
)
from tests.tiny import checkpoint, packed_model, planned

WIDTH = TINY_CONFIG["hidden_size"]
LAYERS = TINY_CONFIG["num_hidden_layers"]
# E-fp8-gradients has all that it has but bf16 in the gradients of weights.
E_FP8_ALL = pytest.param("E-fp8-all", marks=pytest.mark.slow)


@pytest.fixture
def drawn():
    """Inputs, the outputs' gradient, a linear layer and the same in 8 bits."""
    torch.manual_seed(0)
    x = torch.randn(2, 32, 64).bfloat16()
    grad = torch.randn(2, 32, 128).bfloat16() * 1e-4
    native = torch.nn.Linear(64, 128).bfloat16()
    in_fp8 = Float8Linear(64, 128).bfloat16()
    torch.nn.init.normal_(native.weight, std=0.02)  # as in BERT
    in_fp8.load_state_dict(native.state_dict())
    return x, grad, native, in_fp8


def run(layer, x, grad):
    """A layer's output, and the gradients of its input, weight and bias."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(grad)
    return y.detach(), x.grad, layer.weight.grad, layer.bias.grad


# The linear layer.


def test_values_and_gradients_are_close_to_those_in_bf16(drawn):
    x, grad, native, in_fp8 = drawn
    y, x_grad, weight_grad, bias_grad = run(in_fp8, x, grad)
    wanted_y, wanted_x_grad, wanted_weight_grad, wanted_bias_grad = run(native, x, grad)
    assert relative(y, wanted_y) < 0.05
    assert relative(x_grad, wanted_x_grad) < 0.08
    assert torch.equal(weight_grad, wanted_weight_grad)
    assert relative(bias_grad, wanted_bias_grad) < 0.01


def test_the_product_is_not_that_of_bf16(drawn):
    """e4m3 keeps 4 bits of a value, and e5m2 keeps 3 of a gradient."""
    x, grad, native, in_fp8 = drawn
    y, x_grad, _, _ = run(in_fp8, x, grad)
    wanted_y, wanted_x_grad, _, _ = run(native, x, grad)
    assert relative(y, wanted_y) > 0.005
    assert relative(x_grad, wanted_x_grad) > 0.005


def test_values_beyond_the_range_saturate(drawn):
    x, grad, _, in_fp8 = drawn
    grad[:, :, 0] = 10.0  # 11 times what e5m2 holds of gradients as they are scaled
    y, x_grad, _, _ = run(in_fp8, x * 1000, grad)
    assert y.isfinite().all()
    assert x_grad.isfinite().all()
    assert x_grad.abs().max() > 0


def test_a_layer_that_leaves_its_bias_to_others_does_not_add_it(drawn):
    x, grad, native, in_fp8 = drawn
    without_bias = copy.deepcopy(in_fp8)
    without_bias.adds_bias = False
    y, x_grad, weight_grad, bias_grad = run(without_bias, x, grad)
    wanted_y, wanted_x_grad, wanted_weight_grad, _ = run(in_fp8, x, grad)
    torch.testing.assert_close(y + native.bias, wanted_y, atol=0.02, rtol=0.02)
    assert torch.equal(x_grad, wanted_x_grad)
    assert torch.equal(weight_grad, wanted_weight_grad)
    assert bias_grad is None


def test_a_weight_that_is_transposed_in_memory_gives_the_same_product(drawn):
    x, grad, native, _ = drawn

    def product(x, weight):
        return fp8.fp8_linear(x, weight, native.bias)

    transposed = native.weight.t().contiguous().t()
    results = with_gradients(product, [x, native.weight], grad)
    assert all(map(torch.equal, with_gradients(product, [x, transposed], grad), results))


# The feed-forward block.


def test_with_norms_and_gelu_of_our_own_a_layer_is_close_to_that_in_bf16_and_adds_biases_once():
    layer = layers_of(build_model(planned("E-fp8")).eval())[0].bfloat16()
    linears = [module for module in layer.modules() if isinstance(module, Float8Linear)]
    assert len(linears) == 2
    for linear in linears:
        torch.nn.init.normal_(linear.bias)
    x = torch.randn(1, 32, 64).bfloat16()
    output = layer.feed_forward_chunk(x)
    for name in ("intermediate.dense", "output.dense"):
        layer.get_submodule(name).__class__ = LinearWithoutBias
    assert 0 < relative(output, layer.feed_forward_chunk(x)) < 0.05


@pytest.fixture
def feed_forward(drawn):
    """The first linear layer of a block, the block up to GELU, and the second linear layer."""
    *_, first = drawn
    second = Float8Linear(128, 64).bfloat16()
    first.adds_bias = False
    second.adds_bias = False
    first.__class__ = LinearWithoutBias
    intermediate = FusedIntermediate(first)
    first.__class__ = Float8Linear
    return first, intermediate, second


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_feed_forward_block_hands_on_8_bits_that_either_half_would_have_made(
    drawn, feed_forward, backend
):
    """GELU hands them to the second linear layer, and its gradient to the first."""
    x, *_ = drawn
    first, intermediate, second = feed_forward
    inputs = [x, first.weight, first.bias, second.weight]

    def results_of(block):
        x.requires_grad_()
        y = block(x)
        return [y.detach(), *torch.autograd.grad(y, inputs, x.detach() * 1e-4)]

    by_halves = results_of(lambda x: second(gelu(first(x), first.bias)))
    whole = torch.compile(lambda x: second(intermediate(x)), backend=backend, fullgraph=True)
    # The halves round to bf16 first, which gives some numbers another neighbour in 8 bits.
    for found, expected in zip(results_of(whole), by_halves, strict=True):
        assert relative(found, expected) < 0.03


def test_a_feed_forward_block_does_not_keep_what_gelu_has_given(drawn, feed_forward):
    x, *_ = drawn
    _, intermediate, second = feed_forward
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, id):
        second(intermediate(x))
    wide = [tuple(t.shape) for t in kept if t.dtype == torch.bfloat16 and 128 in t.shape]
    assert wide == [(64, 128), (128,)], "GELU's input, and the bias"


# The gradients of weights in 8 bits.


@pytest.mark.parametrize("rows", [16, 5])
def test_8_bits_are_turned_and_their_rows_filled_up_to_a_multiple_of_16(rows):
    x8 = fp8.in_e5m2(torch.randn(rows, 3), 64.0)
    turned8 = fp8.turned(x8)
    assert turned8.shape == (3, 16)
    assert turned8.is_contiguous()
    assert_same_numbers(turned8[:, :rows], x8.t())
    assert not turned8[:, rows:].float().any()


@pytest.mark.parametrize("rows", [64, 37], ids="rows={}".format)
def test_a_weights_gradient_in_8_bits_is_close_to_that_in_bf16_and_nothing_else_changes(
    drawn, rows
):
    x, grad, _, in_fp8 = drawn
    x, grad = x.flatten(0, 1)[:rows], grad.flatten(0, 1)[:rows]
    wanted = run(copy.deepcopy(in_fp8), x, grad)
    in_fp8.weight_grad8 = True
    found = run(in_fp8, x, grad)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    assert torch.equal(found[3], wanted[3])
    assert 0.005 < relative(found[2], wanted[2]) < 0.08


def test_a_transposed_weight_gets_the_same_gradient_in_8_bits(drawn):
    x, grad, native, _ = drawn

    def product(x, weight):
        return fp8.fp8_linear(x, weight, native.bias, weight_grad8=True)

    transposed = native.weight.t().contiguous().t()
    results = with_gradients(product, [x, native.weight], grad)
    assert all(map(torch.equal, with_gradients(product, [x, transposed], grad), results))


def test_a_layer_with_such_a_gradient_keeps_no_input_in_bf16(drawn):
    x, _, _, in_fp8 = drawn
    in_fp8.weight_grad8 = True
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, id):
        in_fp8(x.requires_grad_())
    assert {tensor.dtype for tensor in kept} == {torch.float8_e4m3fn}


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_feed_forward_block_has_its_weights_gradients_in_8_bits(
    drawn, feed_forward, is_transposed
):
    x, *_ = drawn
    first, _, second = feed_forward
    up, down = first.weight.detach(), second.weight.detach()
    if is_transposed:
        up, down = up.t().contiguous().t(), down.t().contiguous().t()
    inputs = [x, up, first.bias.detach(), down]
    grad = torch.randn(2, 32, 64).bfloat16() * 1e-4

    def block(weight_grad8):
        def outputs(x, up, bias, down):
            return fp8_feed_forward(
                x, up, bias, False, down=down, last=None, weight_grad8=weight_grad8
            )

        return outputs

    y, x_grad, up_grad, bias_grad, down_grad = with_gradients(block(True), inputs, grad)
    wanted = with_gradients(block(False), inputs, grad)
    assert torch.equal(y, wanted[0])
    assert torch.equal(x_grad, wanted[1])
    assert torch.equal(bias_grad, wanted[3])
    assert 0.005 < relative(up_grad, wanted[2]) < 0.08
    assert 0.005 < relative(down_grad, wanted[4]) < 0.08


def test_a_model_has_8_bits_in_the_gradients_of_all_weights_but_those_after_attention():
    model = build_model(planned("E-fp8-gradients"))
    names = [
        name for name, module in model.named_modules() if getattr(module, "weight_grad8", False)
    ]
    ends = ("attention.self.qkv", "intermediate.dense", "output.dense")
    assert len(names) == 3 * LAYERS
    assert all(name.endswith(ends) for name in names)
    assert not any(name.endswith("attention.output.dense") for name in names)


@pytest.mark.triton
@pytest.mark.parametrize("shape", [(64, 64), (70, 3), (1, 200)], ids=str)
def test_one_kernel_turns_8_bits(shape):
    x8 = fp8.in_e4m3(torch.randn(shape), 16.0)
    assert_same_numbers(fp8._turned(x8.to(DEVICE)).cpu(), fp8.turned(x8))


# The linear layers before and after attention.


def in_bf16(variant: str, folder=None, **settings) -> tuple:
    """What `packed_model` returns of a variant, the model in bf16.

    A row holds two short samples: PyTorch's product in 8 bits takes long on a CPU.
    """
    settings |= {"micro_batch": 2}
    sizes = {"max_length": 32, "stride": 8}
    spec = planned(variant, settings=settings, sizes=sizes, model=folder)
    model, packed, inputs = packed_model(spec)
    return model.bfloat16(), packed, inputs


def loss_and_gradients(variant: str, folder=None, compiles=False, **settings) -> dict:
    """The loss of a model of that variant in bf16 and its gradients by name; seeds are equal."""
    model, packed, inputs = in_bf16(variant, folder, **settings)
    torch.manual_seed(5)
    renew(model)
    if compiles:
        packed = torch.compile(packed, backend="aot_eager", fullgraph=True)
    loss = packed(**inputs).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["bert", "mpnet"])
@pytest.mark.parametrize("variant", ["E-fp8-gradients", E_FP8_ALL])
def test_a_model_whose_linear_layers_all_have_8_bits_is_close_to_one_with_none(
    kind, variant, tmp_path
):
    folder = checkpoint(kind, tmp_path)
    found = loss_and_gradients(variant, folder)
    native = loss_and_gradients("E-uncompiled", folder)
    assert list(found) == list(native)
    assert None not in found.values()
    in_layers = [name for name in native if "layer" in name.lower() and name.endswith("weight")]
    errors = [relative(found[name], native[name]) for name in in_layers]
    assert 0 < max(errors) < 0.2
    torch.testing.assert_close(found["loss"], native["loss"], atol=0.02, rtol=0.02)


@pytest.mark.parametrize("variant", ["E-fp8-gradients", E_FP8_ALL])
def test_the_compiler_traces_linear_layers_in_8_bits_as_one_graph(variant):
    compiled = loss_and_gradients(variant, compiles=True)
    torch.testing.assert_close(compiled, loss_and_gradients(variant), atol=1e-4, rtol=0.02)


@pytest.mark.parametrize(("variant", "in_8_bits"), [("E-fp8-uncompiled", 2), ("E-fp8-all", 4)])
def test_every_linear_layer_of_a_block_can_have_8_bits(variant, in_8_bits, monkeypatch):
    products = []
    real = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *x, **y: products.append(1) or real(*x, **y))
    model, packed, inputs = in_bf16(variant)
    loss = packed(**inputs).loss
    assert len(products) == in_8_bits * len(layers_of(model))
    loss.backward()
    assert len(products) == 2 * in_8_bits * len(layers_of(model))


def test_a_padded_batch_gets_the_gradient_of_the_projections_bias_too():
    model = build_model(planned("E-fp8-all")).bfloat16().train()
    ids = torch.randint(5, 30, (2, 16))
    model(ids, torch.ones_like(ids)).start_logits.float().square().sum().backward()
    for layer in layers_of(model):
        query, _, value = layer.attention.self.qkv.bias.grad.chunk(3)
        assert query.abs().max() > 0
        assert value.abs().max() > 0


# Operands that are written where they are made.


@pytest.fixture
def copies_as_on_a_gpu(monkeypatch):
    """Norms and attention whose copies in 8 bits are made, too, by plain PyTorch."""
    plain_norm = fused_norms.fused_norm
    attend = attention_with_copies(fused_projections.varlen_attention_and_copy)

    def norm(x, *rest, placeholder, copies, grad8_alone, **words):
        x = x if placeholder is None else Handed.apply(x, placeholder, grad8_alone)
        output, second, _ = plain_norm(x, *rest, **words)
        return output, second, copy_of(output) if copies else None

    monkeypatch.setattr(fused_norms, "fused_norm", norm)
    monkeypatch.setattr(fused_projections, "varlen_attention_and_copy", attend)


@pytest.fixture
def casts(monkeypatch) -> list[tuple[str, int]]:
    """The format and the width of all that is cast from now on."""
    noted = []
    for name in ("in_e4m3", "in_e5m2"):
        cast = getattr(fp8, name)

        def noting(x, factor, name=name, cast=cast):
            if factor != fp8.WEIGHT:
                noted.append((name, x.shape[-1]))
            return cast(x, factor)

        monkeypatch.setattr(fp8, name, noting)
    return noted


@pytest.mark.parametrize("kind", ["bert", "mpnet"])
@pytest.mark.parametrize("variant", ["E-fp8-uncompiled", "E-fp8-gradients", E_FP8_ALL])
def test_operands_that_are_handed_on_are_those_that_a_cast_would_make(
    kind, variant, tmp_path, request
):
    folder = checkpoint(kind, tmp_path)
    by_casts = loss_and_gradients(variant, folder)
    request.getfixturevalue("copies_as_on_a_gpu")
    torch.testing.assert_close(loss_and_gradients(variant, folder), by_casts, rtol=0, atol=0)


def test_layers_that_are_computed_again_have_the_gradients_of_others(copies_as_on_a_gpu):
    once = loss_and_gradients("E-fp8-gradients")
    again = loss_and_gradients("E-fp8-gradients", activation_checkpointing=True)
    torch.testing.assert_close(again, once, rtol=0, atol=0)


@pytest.mark.parametrize("variant", ["E-fp8-uncompiled", "E-fp8-all"])
def test_of_all_operands_but_gelus_only_the_first_layers_input_is_cast(
    variant, copies_as_on_a_gpu, casts
):
    """GELU casts on a CPU, and its kernel writes 8 bits by itself."""
    loss_and_gradients(variant)
    of_blocks = [(name, width) for name, width in casts if width in (WIDTH, 3 * WIDTH)]
    assert of_blocks == ([("in_e4m3", WIDTH)] if variant == "E-fp8-all" else [])


@pytest.fixture
def launches(monkeypatch) -> list:
    """The kernels that would be launched on a GPU, for models among fake tensors.

    Each with its arguments by name.
    """
    calls = []
    monkeypatch.setattr(precompile, "_compile_in_thread", lambda *call: calls.append(call[:2]))
    # Autograd wants a GPU for tensors that say that they lie on one.
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)

    def product(a, b, *_, out_dtype, **__):
        assert a.is_contiguous() and b.T.is_contiguous()
        return a.new_empty(len(a), b.shape[1], dtype=out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    return calls


@pytest.mark.parametrize(
    ("variant", "shapes"), [("E-fp8-uncompiled", 2), ("E-fp8-all", 4), ("E-fp8-gradients", 4)]
)
@pytest.mark.parametrize("kind", ["bert", "mpnet"])
def test_on_a_gpu_a_step_casts_one_operand_and_weights_of_one_shape_at_once(
    kind, variant, shapes, tmp_path, request
):
    launches = [kernel for kernel, _ in launched_by(variant, checkpoint(kind, tmp_path), request)]
    assert launches.count(fp8.cast_kernel) == (variant != "E-fp8-uncompiled")
    # Input and gradient of the projections; of the feed-forward block, its input and its gradient.
    turns = 4 * LAYERS if variant == "E-fp8-gradients" else 0
    assert launches.count(fp8.turned_kernel) == turns
    assert launches.count(fp8.weights_in_e4m3_kernel) == shapes
    assert launches.count(fused_norm.norm_backward_kernel) == 2 * LAYERS


def launched_by(variant, folder, request) -> list[tuple]:
    """What the fixture `launches` has after a step of a variant."""
    model, packed, inputs = in_bf16(variant, folder)
    calls = request.getfixturevalue("launches")

    def forward() -> torch.Tensor:
        cast_weights(model)
        return packed(**inputs).loss

    compile_kernels(forward, model)
    return calls


@pytest.mark.parametrize(
    ("variant", "read"), [("E-fp8-all", (2, 1)), ("E-fp8-gradients", (1, 0))], ids=str
)
@pytest.mark.parametrize("kind", ["bert", "mpnet"])
def test_on_a_gpu_no_gradient_is_written_in_bf16_that_only_a_weights_gradient_would_read(
    kind, variant, read, tmp_path, request
):
    """E-fp8-gradients has one in bf16 a layer: that of the linear layer after attention.

    With MPNet's bias by distance attention's gradient is written by two kernels.
    """
    calls = launched_by(variant, checkpoint(kind, tmp_path), request)
    of_norms = [a["gemm_grad"] for kernel, a in calls if kernel is fused_norm.norm_backward_kernel]
    backward = varlen_backward.varlen_attention_backward
    of_queries = varlen_backward.attention_query_backward
    of_attention = [a["qkv_grad"] for kernel, a in calls if kernel in (backward, of_queries)]
    written = tuple(
        sum(gradient is not None for gradient in gradients)
        for gradients in (of_norms, of_attention)
    )
    of_layer_norms, of_layer_attention = read
    writers = 2 if kind == "mpnet" else 1
    assert written == (LAYERS * of_layer_norms, LAYERS * writers * of_layer_attention)


def test_a_weight_that_was_cast_ahead_is_taken_once(monkeypatch):
    calls = []

    def both_copies(weights):
        calls.append(len(weights))
        weights8 = (fp8.WEIGHT * torch.stack(weights).float()).to(torch.float8_e4m3fn)
        return weights8, weights8.mT.contiguous()

    first, second = torch.randn(2, 4, 6).bfloat16()
    expected = fp8.weight_in_e4m3(first)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    monkeypatch.setattr(fp8, "_weights_in_e4m3", both_copies)
    fp8.cast_ahead([second, first])
    for _ in range(2):
        for copy8, wanted in zip(fp8.weight_in_e4m3(first), expected, strict=True):
            assert_same_numbers(copy8, wanted)
    assert calls == [2, 1]


def test_without_copies_every_operand_is_cast(casts):
    loss_and_gradients("E-fp8-all")
    assert casts.count(("in_e4m3", WIDTH)) == 3 * LAYERS
    assert casts.count(("in_e5m2", WIDTH)) == 2 * LAYERS
    assert casts.count(("in_e5m2", 3 * WIDTH)) == LAYERS


def test_a_layer_takes_the_copy_of_its_input_once(drawn):
    x, _, _, in_fp8 = drawn
    expected = in_fp8(2 * x)
    leave_copy(x, copy_of(2 * x))
    assert torch.equal(in_fp8(x), expected)
    assert not torch.equal(in_fp8(x), expected)


def test_norms_copy_for_linear_layers_in_8_bits_alone():
    def copying(variant):
        modules = build_model(planned(variant)).modules()
        return [module.copies for module in modules if isinstance(module, FusedOutput)]

    assert copying("E-uncompiled") == [False, False] * LAYERS
    assert copying("E-fp8-uncompiled") == [True, False] * LAYERS
    *others, last = copying("E-fp8-all")
    assert others == [True] * (2 * LAYERS - 1)
    assert not last


# The kernels. In Triton's interpreter some numbers are rounded to another neighbour.


@pytest.mark.triton
@pytest.mark.parametrize(
    ("largest", "dtype"), [(fp8.E4M3_MAX, torch.float8_e4m3fn), (fp8.E5M2_MAX, torch.float8_e5m2)]
)
def test_one_kernel_converts_to_8_bits(largest, dtype):
    x = torch.randn(3, 700, device=DEVICE).bfloat16() * 100
    x8 = fp8._cast(x, 2.0**10, largest, dtype).float().cpu()
    expected = fp8._in_8_bits(x.cpu(), 2.0**10, largest, dtype).float()
    assert x8.abs().max() == largest
    least_share = 1 if x.is_cuda else 0.9
    assert (x8 == expected).float().mean() >= least_share


def assert_same_numbers(tensor8, expected8) -> None:
    """Two tensors in 8 bits are equal, and NaN where the other is."""
    torch.testing.assert_close(tensor8.float(), expected8.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.triton
@pytest.mark.parametrize("shape", [(64, 64), (70, 3), (1, 200)], ids=str)
def test_one_kernel_makes_both_copies_of_several_weights(shape):
    weight = torch.randn(shape, device=DEVICE).bfloat16() * 5
    if DEVICE.type == "cpu":
        # What has 8 bits already is not rounded.
        weight = fp8.in_e4m3(weight, fp8.WEIGHT).bfloat16() / fp8.WEIGHT
        weight[:, ::2] *= 64
    else:
        weight[0, 0] = torch.nan
    expected = fp8.in_e4m3(weight, fp8.WEIGHT)
    assert expected.float().abs().eq(fp8.E4M3_MAX).any(), "some saturate"
    weights8, transposed8 = fp8._weights_in_e4m3([torch.zeros_like(weight), weight, -weight])
    assert weights8.is_contiguous() and transposed8.is_contiguous()
    for factor, weight8, other8 in zip((0, 1, -1), weights8, transposed8, strict=True):
        times_factor = expected.float() * factor if factor else torch.zeros_like(expected.float())
        assert_same_numbers(weight8, times_factor)
        assert_same_numbers(other8, times_factor.t())


# What surrounds the kernels and the product.


def launched(monkeypatch) -> list[tuple]:
    """The grid and the arguments of each kernel that is launched from now on; none of them runs."""
    calls = []
    monkeypatch.setattr(fp8, "launch", lambda kernel, grid, /, **words: calls.append((grid, words)))
    return calls


def test_the_kernel_that_converts_has_every_element_in_order_and_what_limits_it(monkeypatch):
    calls = launched(monkeypatch)
    x = torch.randn(5, 500).bfloat16().T
    x8 = fp8._cast(x, 8.0, fp8.E5M2_MAX, torch.float8_e5m2)
    assert (x8.shape, x8.dtype) == (x.shape, torch.float8_e5m2)
    ((grid, words),) = calls
    assert grid == (3,), "2,500 elements, 1,024 in each"
    assert torch.equal(words["x"], x)
    assert words["x"].is_contiguous() and words["x8"].is_contiguous()
    assert (words["size"], words["FACTOR"], words["MAX"]) == (2500, 8.0, fp8.E5M2_MAX)


def test_the_kernel_that_makes_both_copies_of_a_weight_has_every_tile(monkeypatch):
    calls = launched(monkeypatch)
    weights = [torch.randn(70, 130).bfloat16() for _ in range(5)]
    weights8, transposed8 = fp8._weights_in_e4m3(weights)
    assert (weights8.shape, transposed8.shape) == ((5, 70, 130), (5, 130, 70))
    ((grid, words),) = calls
    assert grid == (2, 3, 5), "tiles of 64 by 64 of each weight"
    assert all(map(operator.is_, words["weights"], weights))
    assert words["COUNT"] == 5
    assert (words["rows"], words["columns"]) == (70, 130)
    assert (words["FACTOR"], words["MAX"]) == (fp8.WEIGHT, fp8.E4M3_MAX)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_both_copies_of_a_weight_are_contiguous_whichever_way_it_lies_in_memory(is_transposed):
    weight = torch.randn(16, 48).bfloat16()
    given = weight.T.contiguous().T if is_transposed else weight
    weight8, transposed8 = fp8.weight_in_e4m3(given)
    assert weight8.is_contiguous() and transposed8.is_contiguous()
    assert torch.equal(weight8.float(), fp8.in_e4m3(weight, fp8.WEIGHT).float())
    assert torch.equal(transposed8.float(), weight8.float().T)


@pytest.mark.parametrize("fast", [None, False])
def test_a_product_is_divided_by_its_scale_and_fast_unless_told_otherwise(fast, monkeypatch):
    product = torch._scaled_mm
    fast_sums = []

    def noting(*tensors, use_fast_accum, **words):
        fast_sums.append(use_fast_accum)
        return product(*tensors, use_fast_accum=use_fast_accum, **words)

    monkeypatch.setattr(torch, "_scaled_mm", noting)
    a = fp8.in_e4m3(torch.randn(16, 32), 4.0)
    b = fp8.in_e4m3(torch.randn(32, 16).T.contiguous().T, 8.0)
    more = {} if fast is None else {"fast": fast}
    found = fp8.scaled_mm(a, b, 32.0, factor=torch.tensor(3.0), **more)
    torch.testing.assert_close(found.float(), a.float() @ b.float() * 3 / 32, atol=0.05, rtol=0.02)
    assert fast_sums == [fast is None]


def test_factors_use_the_range_that_values_have():
    """Activations lie within 28, weights within 7; gradients are as small as in fp16."""
    assert 28 * fp8.ACTIVATION == fp8.E4M3_MAX
    assert 7 * fp8.WEIGHT == fp8.E4M3_MAX
    assert torch.finfo(torch.float8_e4m3fn).max == fp8.E4M3_MAX
    assert torch.finfo(torch.float8_e5m2).max == fp8.E5M2_MAX
    assert torch.amp.GradScaler("cpu").get_scale() == fp8.GRADIENT


def test_a_number_for_the_product_is_kept_by_its_value_and_device():
    like = torch.ones(1)
    assert fp8._scalar(0.25, like) is fp8._scalar(0.25, like)
    assert fp8._scalar(0.25, like).item() == 0.25
    assert fp8._scalar(0.5, like).item() == 0.5
