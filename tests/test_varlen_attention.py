"""Attention for short segments: the kernel against plain PyTorch in float64, with gradients."""

import functools
import itertools
import math

import pytest
import torch
from torch import library

from qa_lib.kernels import fp8, varlen_distance
from qa_lib.kernels import varlen_attention as varlen
from qa_lib.kernels.common import LOG2_E
from qa_lib.kernels.varlen_backward import BACKWARD, delta_kernel, varlen_attention_backward
from qa_lib.kernels.varlen_forward import CAUSAL_FORWARD, varlen_attention_forward
from qa_lib.kernels.varlen_reference import (
    dropout_mask,
    dropout_scale,
    reference,
    segment_of,
    threshold_in_8_bits,
)
from qa_lib.model.architectures import layers_of
from qa_lib.model.build import build_model
from qa_lib.model.hash_dropout import HashDropout, renew
from qa_lib.model.varlen_attention import use_varlen_attention
from qa_lib.spec.machine import Machine
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
from tests.material import refused
from tests.tiny import checkpoint, having, packed_model, planned

SCALE = 0.3
# Heads, their width, the type, and the error that it allows.
KINDS = [(heads, width, torch.float32, 1e-5) for heads, width in ((1, 32), (12, 64), (3, 128))]
KINDS += [(2, 16, torch.float16, 2e-3)]
if DEVICE.type == "cuda":  # the interpreter multiplies the bits of bf16 as whole numbers
    KINDS += [(2, 16, torch.bfloat16, 2e-2)]
# One token, none, an odd number, a whole tile, one more, and two tokens of padding.
LENGTHS = [1, 0, 37, 64, 65, 2]


def drawn(lengths=LENGTHS, heads=2, width=16, dtype=torch.float32):
    """Query, key and value, the gradient of the output, where segments end, and a seed."""
    torch.manual_seed(0)
    tokens = sum(lengths)
    qkv = torch.randn(tokens, 3, heads, width)
    grad = torch.randn(tokens, heads, width)
    cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0, dtype=torch.int32)
    seed = torch.tensor(-1234567, dtype=torch.int32, device=DEVICE)
    return qkv.to(DEVICE, dtype), grad.to(DEVICE, dtype), cu_seqlens, seed


# Far from the begin of a segment, distances beyond the reach have one bucket in each direction.
REACH = 20


def distance_bias_of(heads=2, dtype=torch.float32) -> varlen.BiasByDistance:
    """A bias by distance that differs from bucket to bucket and head to head."""
    torch.manual_seed(2)
    weight = torch.randn(16, heads).to(DEVICE, dtype)
    distances = torch.arange(-REACH, REACH + 1, device=DEVICE)
    buckets = (distances.abs().clamp(max=14) // 2 + 8 * (distances > 0)).int()
    table = LOG2_E * weight.float()[buckets].t().contiguous()
    return varlen.BiasByDistance(weight, buckets, table)


def with_bias(qkv):
    """The inputs of attention: query, key and value, and a bias of zeros."""
    return qkv, qkv.new_zeros(qkv[0].numel())


def by_plain(cu_seqlens, seed, dropout, causal=False):
    """The function of the inputs that runs the reference."""

    def attention(qkv, bias):
        return reference(qkv, bias, cu_seqlens, seed, dropout, SCALE, causal)

    return attention


def by_kernel(cu_seqlens, seed, dropout, longest=None, causal=False):
    """The same function by the kernel."""
    longest = longest or int(cu_seqlens.diff().max())

    def attention(qkv, bias):
        output, *_ = varlen._attention(
            qkv, bias, cu_seqlens, seed, longest, dropout, SCALE, causal=causal
        )
        return output

    return attention


def assert_kernel_close(qkv, grad, cu_seqlens, seed, dropout, error, longest=None, causal=False):
    """The kernel is near to the reference."""
    kernel = by_kernel(cu_seqlens, seed, dropout, longest, causal)
    plain = by_plain(cu_seqlens, seed, dropout, causal)
    close_to_plain(kernel, plain, with_bias(qkv), [grad], error)


@pytest.mark.triton
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    "lengths", [LENGTHS, [130, 3], [1], [5, 20, 0, 0], [384], [1, 383, 0]], ids=str
)
def test_the_kernel_is_the_reference(lengths, dropout):
    assert_kernel_close(*drawn(lengths), dropout=dropout, error=1e-5)


@pytest.mark.triton
@pytest.mark.parametrize("tiles", [(64, 32, 64, 32), (128, 64, 128, 64), (64, 64, 32, 32)], ids=str)
@pytest.mark.parametrize("lengths", [[96, 96], [1, 65, 130]], ids=str)
def test_a_causal_kernel_is_the_reference(lengths, tiles, monkeypatch):
    queries, keys, block, step = tiles
    monkeypatch.setitem(CAUSAL_FORWARD, "QUERIES", queries)
    monkeypatch.setitem(CAUSAL_FORWARD, "KEYS", keys)
    monkeypatch.setitem(BACKWARD, "BLOCK", block)
    monkeypatch.setitem(BACKWARD, "STEP", step)
    assert_kernel_close(*drawn(lengths), dropout=0.1, error=1e-5, causal=True)


def test_tiles_end_where_the_diagonals_of_causal_attention_do():
    assert CAUSAL_FORWARD["QUERIES"] % CAUSAL_FORWARD["KEYS"] == 0
    assert BACKWARD["BLOCK"] % BACKWARD["STEP"] == 0


def head_attention(query, key, value, kept, rate, causal):
    """Softmax attention of one segment and head, by the formula; `kept` leaves probabilities."""
    exponentials = torch.exp(SCALE * torch.einsum("qw,kw->qk", query, key))
    if causal:
        exponentials = exponentials.tril()
    probabilities = exponentials / exponentials.sum(1, keepdim=True)
    return (probabilities * kept / (1 - rate)) @ value


def by_formula(cu_seqlens, seed, causal, rate=0.25):
    """Attention of three heads, segment by segment, with dropout by the mask of the hash."""
    ends = cu_seqlens.tolist()
    lengths = cu_seqlens.diff().tolist()
    places = torch.cat([torch.arange(length) for length in lengths]).to(DEVICE, torch.int32)
    kept = dropout_mask(places, 3, seed, rate)

    def attention(qkv, bias):
        outputs = []
        qkv = qkv + bias.view(qkv.shape[1:])
        for begin, end in itertools.pairwise(ends):
            heads = [
                head_attention(query, key, value, mask[begin:end, begin:end], rate, causal)
                for (query, key, value), mask in zip(
                    qkv[begin:end].permute(2, 1, 0, 3), kept, strict=True
                )
            ]
            outputs.append(torch.stack(heads, 1))
        return torch.cat(outputs)

    return attention


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_is_the_formula_with_the_mask_of_its_hash(causal):
    qkv, grad, cu_seqlens, seed = drawn([1, 0, 37, 5], heads=3)
    reference = by_plain(cu_seqlens, seed, 0.25, causal)
    formula = by_formula(cu_seqlens, seed, causal)
    close_to_plain(reference, formula, with_bias(qkv.double()), [grad.double()], 1e-12)


@pytest.mark.triton
@pytest.mark.parametrize("causal", [False, True])
def test_the_kernel_is_the_formula_with_the_mask_of_its_hash(causal):
    qkv, grad, cu_seqlens, seed = drawn([1, 0, 37, 65], heads=3)
    kernel = by_kernel(cu_seqlens, seed, 0.25, causal=causal)
    formula = by_formula(cu_seqlens, seed, causal)
    close_to_plain(kernel, formula, with_bias(qkv), [grad], 1e-5)


@pytest.mark.triton
@pytest.mark.parametrize(("heads", "width", "dtype", "error"), KINDS, ids=str)
def test_heads_of_every_number_width_and_type_are_the_references(heads, width, dtype, error):
    assert_kernel_close(*drawn([70, 1, 9], heads, width, dtype), dropout=0.1, error=error)


@pytest.mark.triton
def test_limits_beyond_the_longest_segment_and_extreme_scores_change_nothing():
    qkv, *rest = drawn([70, 9])
    qkv[:, :2] *= 30  # powers of 2 with these exponents are beyond fp32
    # Scores of thousands are rounded to some 1e-4 in fp32, by which probabilities then differ.
    assert_kernel_close(qkv, *rest, dropout=0.1, error=1e-3, longest=256)


@pytest.mark.triton
def test_keys_beyond_the_end_count_nothing_even_where_all_others_score_far_less_than_their_0():
    qkv, *rest = drawn([70, 9])
    query, key, _ = qkv.unbind(1)
    query -= 30
    key /= 10
    key += 1
    assert_kernel_close(qkv, *rest, dropout=0.1, error=1e-4)


@pytest.mark.triton
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_operators_are_what_the_compiler_takes_them_for(has_bias):
    qkv, _, cu_seqlens, seed = drawn([20, 3])
    bias = torch.zeros(96, device=DEVICE, requires_grad=True) if has_bias else None
    arguments = (qkv.requires_grad_(), bias, cu_seqlens, seed, 64, 0.1, SCALE)
    library.opcheck(varlen._attention.operator, arguments, test_utils=CHECKS, atol=1e-5, rtol=1e-4)


def with_copies(
    qkv, grad, cu_seqlens, seed, longest, distance_bias=(None, None, None), alone=False
):
    """The output with its e4m3 copy, and the gradient of `qkv` with its e5m2 copy.

    With `alone` the former gradient is None.
    """
    qkv = qkv.requires_grad_()
    placeholder = fp8.placeholder_of(qkv.detach().flatten(1)).requires_grad_()
    output, _, copy8 = varlen._attention(
        qkv, None, cu_seqlens, seed, longest, 0.1, SCALE, False, *distance_bias, placeholder, alone
    )
    gradients = torch.autograd.grad(output, (qkv, placeholder), grad, allow_unused=alone)
    return (output.detach(), copy8.view(torch.float8_e4m3fn)), gradients


@pytest.mark.triton
@pytest.mark.parametrize("has_distance_bias", [False, True])
def test_both_kernels_copy_what_they_store_into_8_bits_and_saturate(has_distance_bias):
    qkv, *rest = drawn([37, 65, 0, 2])
    qkv[:, 2, 0] *= 1000
    distance_bias = distance_bias_of() if has_distance_bias else (None, None, None)
    for stored, copy8 in with_copies(qkv, *rest, longest=65, distance_bias=distance_bias):
        assert_copy(copy8, stored)


@pytest.mark.triton
def test_copies_change_nothing_of_what_they_are_copies_of():
    qkv, grad, cu_seqlens, seed = drawn([37, 2])
    (output, _), (qkv_grad, _) = with_copies(qkv, grad, cu_seqlens, seed, longest=37)
    kernel = by_kernel(cu_seqlens, seed, 0.1)
    expected, wanted_grad, _ = with_gradients(kernel, with_bias(qkv), grad)
    assert torch.equal(output, expected)
    assert torch.equal(qkv_grad, wanted_grad)


def assert_alone_has_the_same_copy(tensors, longest, distance_bias=(None, None, None)) -> None:
    """The gradient's copy has the same bits where the gradient itself is left out."""
    _, (gradient, found) = with_copies(*tensors, longest, distance_bias, alone=True)
    _, (_, wanted) = with_copies(*tensors, longest, distance_bias)
    assert gradient is None
    assert torch.equal(found.float(), wanted.float())


@pytest.mark.triton
@pytest.mark.parametrize("has_distance_bias", [False, True])
def test_the_kernel_leaves_out_the_gradient_of_which_only_the_copy_is_read(has_distance_bias):
    distance_bias = distance_bias_of() if has_distance_bias else (None, None, None)
    assert_alone_has_the_same_copy(drawn([37, 0, 2]), longest=37, distance_bias=distance_bias)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="a CPU captures no graph")
def test_replays_of_a_captured_graph_drop_out_by_the_seed_of_the_time():
    qkv, grad, cu_seqlens, seed = drawn([70, 9], dtype=torch.bfloat16)
    kernel = by_kernel(cu_seqlens, seed, 0.1, longest=70)
    wide = with_bias(qkv.double())
    for results in replayed(lambda: with_gradients(kernel, with_bias(qkv), grad), seed):
        plain = by_plain(cu_seqlens, seed, 0.1)
        assert_close(results, with_gradients(plain, wide, grad.double()), 2e-2)


# Dropout.

HEADS = 4
LENGTH = 384
RATE = 26 / 256  # the nearest to 0.1 for a byte


def kept(seed, rate=RATE):
    """Which scores are kept [heads, tokens of both segments, tokens of one]."""
    places = torch.arange(LENGTH, dtype=torch.int32).repeat(2)  # of two segments
    mask = dropout_mask(places, HEADS, torch.tensor(seed, dtype=torch.int32), rate)
    return mask[:, :, :LENGTH]


@pytest.fixture(scope="module")
def patterns():
    """What some seeds keep, as numbers whose mean is 0: [seeds, heads, queries, keys]."""
    return torch.stack([kept(seed).float() - (1 - RATE) for seed in (3, 4, -(2**31))])


def test_dropout_keeps_its_rate(patterns):
    deviation = (RATE * (1 - RATE) / patterns.numel()) ** 0.5
    assert patterns.mean().abs() < 5 * deviation


def test_half_of_the_scores_may_be_dropped_and_none():
    assert not kept(3, rate=0.5).all()
    assert kept(3, rate=0.0).all()


@pytest.mark.parametrize(("rate", "bytes_"), [(0.0, 0), (0.1, 26), (0.5, 128)])
def test_a_rate_is_the_nearest_share_of_bytes_and_what_is_kept_makes_up_for_that(rate, bytes_):
    assert threshold_in_8_bits(rate) == bytes_
    assert dropout_scale(rate) == 256 / (256 - bytes_)


DISTANCES = [
    *((0, distance) for distance in (1, 2)),  # of seeds
    *((1, distance) for distance in (1, 2)),  # of heads
    *((2, distance) for distance in (1, 2, 8, 16, LENGTH)),  # of queries, or of segments
    *((3, distance) for distance in (1, 2, 8, 16)),  # of keys
]


@pytest.mark.parametrize(("dim", "distance"), DISTANCES)
def test_no_seed_head_query_or_key_repeats_another(dim, distance, patterns):
    size = patterns.shape[dim] - distance
    pattern = patterns.narrow(dim, 0, size)
    later = patterns.narrow(dim, distance, size)
    correlation = (pattern * later).mean().abs() / (RATE * (1 - RATE))
    assert correlation < 5 / pattern.numel() ** 0.5


# Models.

varlen_spec = functools.partial(planned, "E-varlen", machine=Machine())


def encoder_with(attention, qkv, folder):
    """The model of a folder, the same for packed rows, and a micro-batch."""
    settings = {"attention": attention, "qkv": qkv}
    return packed_model(varlen_spec(settings=settings, model=folder))


@pytest.mark.parametrize("qkv", ["fused", "separate"])
@pytest.mark.parametrize("kind", having("E-varlen"))
def test_every_encoder_has_the_loss_and_gradients_of_another_kernel(kind, qkv, tmp_path):
    folder = checkpoint(kind, tmp_path)
    results = []
    for attention in ("triton-varlen", "block-diagonal"):
        model, packed, inputs = encoder_with(attention, qkv, folder)
        loss = packed.eval()(**inputs).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-3)


def attention_dropouts(model):
    """The modules that have a seed for the dropout of attention."""
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, HashDropout) and ".self." in name
    ]


@pytest.mark.parametrize("qkv", ["fused", "separate"])
@pytest.mark.parametrize("kind", having("E-varlen"))
def test_every_layer_has_a_seed_of_its_own_for_the_kernel(kind, qkv, tmp_path):
    model, _, _ = encoder_with("triton-varlen", qkv, checkpoint(kind, tmp_path))
    assert len(attention_dropouts(model)) == len(layers_of(model))


@pytest.mark.parametrize("qkv", ["fused", "separate"])
def test_layers_have_no_seed_for_another_kernel(qkv):
    model, _, _ = encoder_with("block-diagonal", qkv, folder=None)
    assert attention_dropouts(model) == []


def test_padded_rows_leave_no_bias_without_its_gradient():
    model = build_model(varlen_spec()).eval()
    model(torch.randint(5, 100, (2, 20))).start_logits.sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if ".layer." in name)


def test_its_dropout_changes_when_it_is_renewed_and_not_before():
    model, packed, inputs = packed_model(varlen_spec())
    for name, module in model.named_modules():
        is_dropout = isinstance(module, HashDropout)
        if is_dropout and name != "bert.encoder.layer.0.attention.self.dropout":
            module.p = 0.0
    loss = packed(**inputs).loss
    assert packed(**inputs).loss == loss
    renew(model)
    assert packed(**inputs).loss != loss


@pytest.mark.slow
def test_layers_are_computed_twice_without_a_generator():
    """So that a captured step can do it.

    The gradients are those of one computation, and no random number is drawn.
    """
    gradients = []
    for variant in ("E-varlen", "E-recompute"):
        model, packed, inputs = packed_model(planned(variant, machine=Machine()))
        before = torch.get_rng_state()
        torch.compile(packed, backend="aot_eager", fullgraph=True)(**inputs).loss.backward()
        assert torch.equal(torch.get_rng_state(), before)
        gradients.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*gradients)


def test_a_width_that_it_does_not_take_is_told():
    model = build_model(varlen_spec())
    model.config.num_attention_heads = 64
    refused("power of 2, 16 or more, and not 1", use_varlen_attention, model)


# What surrounds the kernels, with plain PyTorch in their place.


def covers(programs: int, tile: int, size: int) -> bool:
    """Whether so many programs have all elements, and none of them nothing to do."""
    return (programs - 1) * tile < size <= programs * tile


LONGEST = 70


class InPyTorch:
    """Plain PyTorch in place of the kernels, which gets the arguments that they would."""

    def __init__(self, qkv, cu_seqlens, seed, threshold, CAUSAL, HEADS, WIDTH, **_):
        assert qkv.shape[1:] == (3, HEADS, WIDTH)
        self.parts = qkv.permute(1, 2, 0, 3)
        segment = segment_of(cu_seqlens, len(qkv))
        self.seen = segment[:, None] == segment
        if CAUSAL:
            self.seen = self.seen.tril()
        places = torch.arange(len(qkv), dtype=torch.int32) - cu_seqlens[segment]
        self.kept = dropout_mask(places, HEADS, seed, threshold / 256)

    def scores(self, scale):
        query, key, _ = self.parts
        return (query @ key.mT * scale).masked_fill(~self.seen, -torch.inf)

    @staticmethod
    def forward(grid, output, logsumexp, scale_log2, kept_scale, **a) -> None:
        self = InPyTorch(**a)
        blocks, heads, segments = grid
        assert covers(blocks, a["QUERIES"], LONGEST)
        assert (heads, segments) == (a["HEADS"], len(a["cu_seqlens"]) - 1)
        scores = self.scores(scale_log2)
        logsumexp.copy_(torch.exp2(scores).sum(-1).log2())
        p = torch.exp2(scores - logsumexp[:, :, None])
        if a["DROPS"]:
            p = p * self.kept * kept_scale
        output.copy_((p @ self.parts[2]).transpose(0, 1))
        if a["FACTOR"]:
            a["output8"].copy_(in_8_bits(output, a["output8"]))

    @staticmethod
    def delta(grid, grad, output, delta, tokens, HEADS, TOKENS, **_) -> None:
        assert covers(grid[0], TOKENS, tokens)
        assert grid[1] == HEADS
        delta.copy_((grad * output).sum(-1).T)

    @staticmethod
    def backward(grid, grad, delta, logsumexp, qkv_grad, partials, scale, kept_scale, **a) -> None:
        self = InPyTorch(**a)
        blocks, heads, segments = grid
        assert covers(blocks, a["BLOCK"], LONGEST)
        assert (heads, segments) == (a["HEADS"], len(a["cu_seqlens"]) - 1)
        query, key, value = self.parts
        p = torch.exp2(self.scores(scale * math.log2(math.e)) - logsumexp[:, :, None])
        kept = self.kept * kept_scale if a["DROPS"] else 1.0
        output_grad = grad.transpose(0, 1)
        slope = p * (output_grad @ value.mT * kept - delta[:, :, None]) * scale
        grads = (slope @ key, slope.mT @ query, (p * kept).mT @ output_grad)
        stacked = torch.stack(grads).permute(2, 0, 1, 3)
        if qkv_grad is not None:
            qkv_grad.copy_(stacked)
        if a["FACTOR"]:
            a["qkv_grad8"].copy_(in_8_bits(stacked, a["qkv_grad8"]).flatten(1))
        if a["SUMS"]:
            assert len(partials) == blocks * segments
            partials[1:] = 0.0
            partials[0] = stacked.sum(0).flatten()


@pytest.fixture
def kernels_in_pytorch(monkeypatch):
    in_pytorch = {
        varlen_attention_forward: InPyTorch.forward,
        delta_kernel: InPyTorch.delta,
        varlen_attention_backward: InPyTorch.backward,
    }

    def launch(kernel, grid, /, **arguments):
        in_pytorch[kernel](grid, **arguments)

    monkeypatch.setattr(varlen, "launch", launch)
    monkeypatch.setattr(varlen, "sum_partials", lambda partials, dtype: partials.sum(0).to(dtype))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_what_surrounds_the_kernels_gives_attention_and_its_gradients(
    dropout, causal, kernels_in_pytorch
):
    qkv, grad, cu_seqlens, seed = drawn([5, 0, 9], heads=3)
    cu_seqlens, seed = cu_seqlens.cpu(), seed.cpu()
    kernel = by_kernel(cu_seqlens, seed, dropout, LONGEST, causal)
    plain = by_plain(cu_seqlens, seed, dropout, causal)
    close_to_plain(kernel, plain, with_bias(qkv.cpu()), [grad.cpu()], 1e-5)


def test_what_surrounds_the_kernels_hands_on_copies_in_8_bits(kernels_in_pytorch):
    qkv, *rest = (tensor.cpu() for tensor in drawn([5, 0, 9], heads=3))
    for stored, copy8 in with_copies(qkv, *rest, longest=LONGEST):
        expected = in_8_bits(stored, copy8).view(copy8.shape)
        assert torch.equal(copy8.float(), expected.float())


def test_what_surrounds_the_kernel_leaves_out_the_gradient_of_which_only_the_copy_is_read(
    kernels_in_pytorch,
):
    assert_alone_has_the_same_copy([tensor.cpu() for tensor in drawn([5, 0, 9])], longest=LONGEST)


def test_attention_that_nobody_asks_for_copies_makes_none(kernels_in_pytorch):
    qkv, grad, cu_seqlens, seed = (tensor.cpu() for tensor in drawn([5, 9]))
    rest = (cu_seqlens, seed, LONGEST, 0.25, SCALE)
    output, logsumexp, copy8 = varlen._attention(qkv, None, *rest)
    *_, qkv_grad8 = varlen._attention_backward(grad, qkv, None, output, logsumexp, *rest)
    assert copy8.numel() == 0
    assert qkv_grad8.numel() == 0


def test_all_kernels_of_the_gradients_of_scores_have_one_block(monkeypatch):
    """One writes no such gradients in blocks of which another one must not read them."""
    tiles = []

    def launch(kernel, grid, /, BLOCK=None, STEP=None, **_):
        if kernel is not delta_kernel:
            tiles.append((BLOCK, STEP))

    for module in (varlen, varlen_distance):
        monkeypatch.setattr(module, "launch", launch)
        monkeypatch.setattr(module, "sum_partials", lambda partials, dtype: partials.sum(0))
    qkv, grad, cu_seqlens, seed = (tensor.cpu() for tensor in drawn([5, 9]))
    logsumexp = torch.zeros(2, len(qkv))
    distance_bias = [tensor.cpu() for tensor in distance_bias_of()]
    rest = (cu_seqlens, seed, 9, 0.1, SCALE, True, *distance_bias)
    varlen._attention_backward(grad, qkv, None, grad, logsumexp, *rest)
    assert tiles == 3 * [(BACKWARD["BLOCK"], BACKWARD["STEP"])]


def test_a_bias_that_is_none_or_does_not_train_has_no_gradient(kernels_in_pytorch):
    qkv, grad, cu_seqlens, seed = (tensor.cpu() for tensor in drawn([5, 9]))
    rest = (cu_seqlens, seed, LONGEST, 0.25, SCALE)

    def gradient_with(bias):
        leaf = qkv.clone().requires_grad_()
        output, *_ = varlen._attention(leaf, bias, *rest)
        output.backward(grad)
        return leaf.grad

    frozen = torch.zeros(qkv[0].numel())
    assert torch.equal(gradient_with(frozen), gradient_with(None))
    assert frozen.grad is None


def assert_equal_around_the_operator(
    qkv, grad, cu_seqlens, seed, longest, alone, distance_bias=None
):
    """Results and gradients are the operator's; `alone` is None without an 8-bit copy."""

    def results(attention):
        leaves = [t.clone().requires_grad_() for t in with_bias(qkv)]
        of_distances = (None, None, None)
        if distance_bias is not None:
            weight = distance_bias.weight.detach().clone().requires_grad_()
            of_distances = (weight, *distance_bias[1:])
            leaves.append(weight)
        placeholder = None
        if alone is not None:
            placeholder = fp8.placeholder_of(qkv.flatten(1)).requires_grad_()
            leaves.append(placeholder)
        inputs = (*leaves[:2], cu_seqlens, seed, longest, 0.25, SCALE, False, *of_distances)
        output, *_, output8 = attention(*inputs, placeholder, bool(alone))
        gradients = torch.autograd.grad(output, leaves, grad, allow_unused=True)
        return output, output8, *gradients

    found = results(varlen._Uncompiled.apply)
    for one, other in zip(found, results(varlen._attention.operator), strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


COPIES = pytest.mark.parametrize("alone", [None, False, True], ids=["none", "copy", "copy alone"])


@COPIES
def test_attention_around_the_operator_has_the_operators_results(alone, kernels_in_pytorch):
    inputs = [tensor.cpu() for tensor in drawn([5, 0, 9])]
    assert_equal_around_the_operator(*inputs, LONGEST, alone)


@pytest.mark.triton
@COPIES
def test_around_the_operator_a_bias_by_distance_has_its_gradient(alone):
    assert_equal_around_the_operator(*drawn([5, 0, 9]), 9, alone, distance_bias_of())


# A model's own rates.


def test_attentions_dropout_keeps_the_models_rate():
    model = build_model(varlen_spec())
    rates = []
    for layer, rate in zip(layers_of(model), (0.3, 0.0), strict=True):
        dropout = layer.attention.self.dropout
        dropout.p = rate
        rates.append(rate)
    use_varlen_attention(model)
    assert [module.p for module in attention_dropouts(model)] == rates


@pytest.mark.parametrize("attention", ["triton-varlen", "block-diagonal"])
def test_out_of_training_fused_projections_drop_nothing(attention):
    model, packed, inputs = encoder_with(attention, "fused", folder=None)
    for module in model.modules():
        if hasattr(module, "p"):
            module.p = 0.5
    packed.eval()
    assert packed(**inputs).loss == packed(**inputs).loss
    renew(model)
    loss = packed(**inputs).loss
    renew(model)
    assert packed(**inputs).loss == loss
    assert packed.train()(**inputs).loss != loss


# A bias by distance.


def assert_close_with_distance_bias(
    qkv, grad, cu_seqlens, seed, distance_bias, error, dropout=0.1, longest=None, causal=False
):
    """The kernels are near to the reference with that bias; return their results."""
    longest = longest or int(cu_seqlens.diff().max())

    def kernel(qkv, bias, weight):
        output, *_ = varlen._attention(
            qkv, bias, cu_seqlens, seed, longest, dropout, SCALE, causal, weight, *distance_bias[1:]
        )
        return output

    def plain(qkv, bias, weight):
        changed = distance_bias._replace(weight=weight)
        return reference(qkv, bias, cu_seqlens, seed, dropout, SCALE, causal, distance_bias=changed)

    inputs = (*with_bias(qkv), distance_bias.weight)
    return close_to_plain(kernel, plain, inputs, [grad], error)


@pytest.mark.triton
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("lengths", [LENGTHS, [130, 3], [70], [2], [5, 20, 0, 0]], ids=str)
def test_the_kernels_with_a_bias_by_distance_are_the_reference(lengths, dropout):
    assert_close_with_distance_bias(
        *drawn(lengths), distance_bias_of(), error=1e-5, dropout=dropout
    )


@pytest.mark.triton
@pytest.mark.parametrize("lengths", [LENGTHS, [130, 3]], ids=str)
def test_causal_kernels_with_a_bias_by_distance_are_the_reference(lengths):
    assert_close_with_distance_bias(*drawn(lengths), distance_bias_of(), error=1e-5, causal=True)


@pytest.mark.triton
@pytest.mark.parametrize(("heads", "width", "dtype", "error"), KINDS, ids=str)
def test_a_bias_by_distance_of_heads_of_every_number_width_and_type_is_the_references(
    heads, width, dtype, error
):
    drawn_ones = drawn([33, 1], heads, width, dtype)
    assert_close_with_distance_bias(*drawn_ones, distance_bias_of(heads, dtype), error=1.5 * error)


@pytest.mark.triton
def test_a_token_alone_gives_a_bias_by_distance_no_gradient():
    """Its softmax is 1 whatever the bias is."""
    qkv, grad, cu_seqlens, seed = drawn([1])
    weight, *others = distance_bias_of()
    weight.requires_grad_()
    output, *_ = varlen._attention(
        qkv, None, cu_seqlens, seed, 1, 0.0, SCALE, False, weight, *others
    )
    (gradient,) = torch.autograd.grad(output, weight, grad)
    assert gradient.abs().max() < 1e-5


@pytest.mark.triton
def test_a_bias_far_above_all_scores_leaves_the_gradients_finite():
    distance_bias = distance_bias_of()
    table = distance_bias.table + 200 * LOG2_E
    distance_bias = distance_bias._replace(weight=distance_bias.weight + 200, table=table)
    assert_close_with_distance_bias(*drawn([70, 9]), distance_bias, error=1e-3)


@pytest.fixture
def unwritten_is_nan():
    """Tensors of torch.empty and its like hold NaN until something is written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.triton
@pytest.mark.parametrize("causal", [False, True])
def test_no_gradient_of_scores_is_read_that_was_not_written(causal, unwritten_is_nan):
    assert drawn([2])[0].new_empty(3).isnan().all()
    drawn_ones = drawn([130, 3, 0])
    assert_close_with_distance_bias(
        *drawn_ones, distance_bias_of(), error=1e-5, longest=256, causal=causal
    )


@pytest.mark.triton
@pytest.mark.parametrize("groups", [1, 4])
def test_the_gradient_of_a_bias_is_the_sum_of_each_buckets_gradients_of_scores(groups, monkeypatch):
    monkeypatch.setattr(varlen_distance, "GROUPS", groups)
    *_, cu_seqlens, _ = drawn([70, 0, 1, 30, 64, 5])
    distance_bias = distance_bias_of()
    torch.manual_seed(3)
    ds = torch.randn(2, int(cu_seqlens[-1]), 128, device=DEVICE)
    expected = torch.zeros_like(distance_bias.weight)
    for begin, end in itertools.pairwise(cu_seqlens.tolist()):
        length = end - begin
        ds[:, begin:end, length:] = 0.0
        for k, q in itertools.product(range(length), repeat=2):
            bucket = distance_bias.buckets[REACH + max(-REACH, min(REACH, k - q))]
            expected[bucket] += ds[:, begin + k, q]
    found = varlen_distance.sums_by_distance(
        ds, cu_seqlens, distance_bias.buckets, len(expected), False, torch.float32
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.triton
def test_the_gradients_with_a_bias_by_distance_are_the_same_in_every_run():
    runs = [
        assert_close_with_distance_bias(*drawn([130, 3]), distance_bias_of(), error=1e-5)
        for _ in range(2)
    ]
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)


@pytest.mark.triton
def test_the_operator_with_a_bias_by_distance_is_what_the_compiler_takes_it_for():
    qkv, _, cu_seqlens, seed = drawn([20, 3])
    weight, *others = distance_bias_of()
    arguments = (qkv.requires_grad_(), None, cu_seqlens, seed, 64, 0.1, SCALE, False)
    arguments = (*arguments, weight.requires_grad_(), *others)
    library.opcheck(varlen._attention.operator, arguments, test_utils=CHECKS, atol=1e-5, rtol=1e-4)


def test_the_reference_adds_the_bias_of_each_distance_to_the_scaled_scores():
    qkv, _, cu_seqlens, seed = drawn([40, 7])
    distance_bias = distance_bias_of()
    output = reference(qkv, None, cu_seqlens, seed, 0.0, SCALE, distance_bias=distance_bias)
    for begin, end in itertools.pairwise(cu_seqlens.tolist()):
        query, key, value = qkv[begin:end].unbind(1)
        scores = SCALE * torch.einsum("qhw,khw->hqk", query, key)
        for q, k in itertools.product(range(end - begin), repeat=2):
            bucket = distance_bias.buckets[REACH + max(-REACH, min(REACH, k - q))]
            scores[:, q, k] += distance_bias.weight[bucket]
        expected = torch.einsum("hqk,khw->qhw", scores.softmax(-1), value)
        torch.testing.assert_close(output[begin:end], expected, atol=1e-5, rtol=1e-5)
