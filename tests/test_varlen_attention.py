"""Attention for short segments: the kernel against plain PyTorch in float64, dropout and gradients included."""

import functools

import pytest
import torch
from torch import library

from qa_lib.kernels import varlen_attention as varlen
from qa_lib.model.architectures import layers_of
from qa_lib.model.attention import use_varlen_attention
from qa_lib.model.build import build_model
from qa_lib.model.fused_blocks import HashDropout, renew
from qa_lib.spec.machine import Machine
from tests.kernels import CHECKS, DEVICE, assert_close, close_to_plain, replayed, with_gradients
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
    """A product and the gradient of the attention's output, where segments end, and a seed."""
    torch.manual_seed(0)
    tokens = sum(lengths)
    product, grad = torch.randn(tokens, 3, heads, width), torch.randn(tokens, heads, width)
    ends = torch.tensor([0, *lengths], device=DEVICE).cumsum(0, dtype=torch.int32)
    seed = torch.tensor(-1234567, dtype=torch.int32, device=DEVICE)
    return product.to(DEVICE, dtype), grad.to(DEVICE, dtype), ends, seed


def with_bias(product):
    """A product, and a bias of zeros."""
    return product, product.new_zeros(product[0].numel())


def by_plain(ends, seed, dropout, causal=False):
    return lambda product, bias: varlen.reference(product, bias, ends, seed, dropout, SCALE, causal)


def by_kernel(ends, seed, dropout, longest=None, causal=False):
    longest = longest or int(ends.diff().max())
    return lambda *inputs: varlen._attention(*inputs, ends, seed, longest, dropout, SCALE, causal)[
        0
    ]


def close(drew, dropout, error, longest=None, causal=False):
    """The kernel is near to the reference."""
    product, grad, *rest = drew
    kernel, plain = by_kernel(*rest, dropout, longest, causal), by_plain(*rest, dropout, causal)
    close_to_plain(kernel, plain, with_bias(product), [grad], error)


@pytest.mark.triton
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    "lengths", [LENGTHS, [130, 3], [1], [5, 20, 0, 0], [384], [1, 383, 0]], ids=str
)
def test_the_kernel_is_the_reference(lengths, dropout):
    close(drawn(lengths), dropout, 1e-5)


@pytest.mark.triton
@pytest.mark.parametrize("tiles", [(64, 32, 64, 32), (128, 64, 128, 64), (64, 64, 32, 32)], ids=str)
@pytest.mark.parametrize("lengths", [[96, 96], [1, 65, 130]], ids=str)
def test_a_causal_kernel_is_the_reference(lengths, tiles, monkeypatch):
    options = [(varlen.CAUSAL_FORWARD, name) for name in ("QUERIES", "KEYS")]
    options += [(varlen.BACKWARD, name) for name in ("BLOCK", "STEP")]
    for (own, name), size in zip(options, tiles, strict=True):
        monkeypatch.setitem(own, name, size)
    close(drawn(lengths), 0.1, 1e-5, causal=True)


def plain_attention(ends, kept, rate, causal):
    """Softmax attention of each segment and head by itself, whose shares `kept` [heads, tokens, tokens] leaves or
    drops, written for the tests alone."""

    def attention(product, bias):
        outputs = []
        product = product + bias.view(product.shape[1:])
        for first, last in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            heads = []
            for head, (query, key, value) in enumerate(product[first:last].permute(2, 1, 0, 3)):
                exponentials = torch.exp(SCALE * torch.einsum("qw,kw->qk", query, key))
                if causal:
                    exponentials = exponentials.tril()
                shares = exponentials / exponentials.sum(1, keepdim=True)
                heads.append((shares * kept[head, first:last, first:last] / (1 - rate)) @ value)
            outputs.append(torch.stack(heads, 1))
        return torch.cat(outputs)

    return attention


def by_hash(ends, seed, causal):
    """Plain attention of three heads with a quarter of the shares dropped, by the mask of the hash."""
    places = torch.cat([torch.arange(length) for length in ends.diff().tolist()]).to(
        DEVICE, torch.int32
    )
    return plain_attention(ends, varlen._dropout_mask(places, 3, seed, 0.25), 0.25, causal)


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_is_plain_attention_with_the_mask_of_its_hash(causal):
    product, grad, ends, seed = drawn([1, 0, 37, 5], heads=3)
    own, plain = by_plain(ends, seed, 0.25, causal), by_hash(ends, seed, causal)
    close_to_plain(own, plain, with_bias(product.double()), [grad.double()], 1e-12)


@pytest.mark.triton
@pytest.mark.parametrize("causal", [False, True])
def test_the_kernel_is_plain_attention_with_the_mask_of_its_hash(causal):
    product, grad, ends, seed = drawn([1, 0, 37, 65], heads=3)
    own, plain = by_kernel(ends, seed, 0.25, causal=causal), by_hash(ends, seed, causal)
    close_to_plain(own, plain, with_bias(product), [grad], 1e-5)


@pytest.mark.triton
@pytest.mark.parametrize(("heads", "width", "dtype", "error"), KINDS, ids=str)
def test_heads_of_every_number_width_and_type_are_the_references(heads, width, dtype, error):
    close(drawn([70, 1, 9], heads, width, dtype), 0.1, error)


@pytest.mark.triton
def test_limits_beyond_the_longest_segment_and_extreme_scores_change_nothing():
    product, *rest = drawn([70, 9])
    product[:, :2] *= 30  # powers of 2 with these exponents are beyond fp32
    # Scores of thousands are rounded to some 1e-4 in fp32, by which weights then differ, as a processor's sums do.
    close((product, *rest), 0.1, 1e-3, longest=256)


@pytest.mark.triton
def test_keys_beyond_the_end_count_nothing_even_where_all_others_score_far_less_than_their_0():
    product, *rest = drawn([70, 9])
    product[:, 0], product[:, 1] = product[:, 0] - 30, 1 + product[:, 1] / 10
    close((product, *rest), 0.1, 1e-4)


@pytest.mark.triton
def test_the_operators_are_what_the_compiler_takes_them_for():
    product, _, ends, seed = drawn([20, 3])

    for bias in (None, torch.zeros(96, device=DEVICE, requires_grad=True)):
        arguments = (product.requires_grad_(), bias, ends, seed, 64, 0.1, SCALE)
        library.opcheck(varlen._attention, arguments, test_utils=CHECKS, atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="a CPU captures no graph")
def test_replays_of_a_captured_graph_drop_out_by_the_seed_of_the_time():
    product, grad, ends, seed = drawn([70, 9], dtype=torch.bfloat16)
    kernel = by_kernel(ends, seed, 0.1, longest=70)
    for found in replayed(lambda: with_gradients(kernel, with_bias(product), grad), seed):
        wide = with_bias(product.double())
        assert_close(found, with_gradients(by_plain(ends, seed, 0.1), wide, grad.double()), 2e-2)


def kept(seed, heads=4, length=384, rate=0.1):
    places = torch.arange(length, dtype=torch.int32).repeat(2)  # two segments
    return varlen._dropout_mask(places, heads, torch.tensor(seed, dtype=torch.int32), rate)[
        :, :, :length
    ]


def test_dropout_keeps_its_rate_and_no_seed_head_query_or_key_repeats_another():
    rate = 26 / 256  # the nearest to 0.1 for a byte
    patterns = torch.stack([kept(seed).float() - 1 + rate for seed in (3, 4, -(2**31))])
    assert patterns.mean().abs() < 5 * (rate * (1 - rate) / patterns.numel()) ** 0.5
    for dim in range(4):  # seeds, heads, queries (of both segments), keys
        size = patterns.shape[dim]
        for step in {1, 2, 8, 16, 384} & {*range(size)}:
            one, other = (
                patterns.narrow(dim, step, size - step),
                patterns.narrow(dim, 0, size - step),
            )
            assert (one * other).mean().abs() / (rate * (1 - rate)) < 5 / one.numel() ** 0.5, (
                dim,
                step,
            )
    assert not kept(3, rate=0.5).all() and kept(3, rate=0.0).all()


varlen_spec = functools.partial(planned, "E-varlen", machine=Machine())


@pytest.mark.parametrize("qkv", ["fused", "separate"])
@pytest.mark.parametrize("kind", having("E-varlen"))
def test_every_encoder_has_it(kind, qkv, tmp_path):
    """With the loss and gradients of another kernel, and with a seed of its own in every layer."""
    folder, results = checkpoint(kind, tmp_path), []
    for attention in ("triton-varlen", "block-diagonal"):
        model, packed, inputs = packed_model(
            varlen_spec(settings={"attention": attention, "qkv": qkv}, model=folder)
        )
        loss = packed.eval()(**inputs).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
        seeds = {
            name
            for name, m in model.named_modules()
            if isinstance(m, HashDropout) and ".self." in name
        }
        assert len(seeds) == (attention == "triton-varlen") * len(layers_of(model))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-3)


def test_padded_rows_leave_no_bias_without_its_gradient():
    model = build_model(varlen_spec()).eval()
    model(torch.randint(5, 100, (2, 20))).start_logits.sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if ".layer." in name)


def test_its_dropout_is_renewed_and_trains_with_it():
    model, packed, inputs = packed_model(varlen_spec())
    for name, module in model.named_modules():
        if (
            isinstance(module, HashDropout)
            and name != "bert.encoder.layer.0.attention.self.dropout"
        ):
            module.p = 0.0
    first, again = packed(**inputs).loss, packed(**inputs).loss
    renew(model)
    assert first == again != packed(**inputs).loss


@pytest.mark.slow
def test_layers_are_computed_twice_without_a_generator():
    """So that a captured step can do it: the gradients are those of one computation, and no random number is drawn."""
    found = []
    for variant in ("E-varlen", "E-recompute"):
        model, packed, inputs = packed_model(planned(variant, machine=Machine()))
        before = torch.get_rng_state()
        torch.compile(packed, backend="aot_eager", fullgraph=True)(**inputs).loss.backward()
        assert torch.equal(torch.get_rng_state(), before)
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found)


def test_a_width_that_it_does_not_take_is_told():
    model = build_model(varlen_spec())
    model.config.num_attention_heads = 64
    refused("power of 2, 16 or more, and not 1", use_varlen_attention, model)
