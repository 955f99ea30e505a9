"""Packed rows are the same mathematics as padded ones, in which no segment has a neighbour."""

import dataclasses
import itertools
from functools import partial

import numpy as np
import pytest
import torch
from torch import library
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForQuestionAnswering

from qa_lib.data.batches import Batches
from qa_lib.data.load import batches_of
from qa_lib.data.packing import CALLS, EvenBatches, PackedBatches, deal, few_limits
from qa_lib.model.build import build_model
from qa_lib.model.packed import Packed, RegionalModel, regions_of, segment_loss, span_loss
from qa_lib.model.packed_attention import KERNELS, Segments
from qa_lib.run.fit import fit, train
from qa_lib.train.compile import LossOf
from tests.kernels import DEVICE, relative, replayed, with_gradients
from tests.material import refused
from tests.tiny import (
    CPU,
    H200,
    OfLengths,
    packed_model,
    planned,
    quiet,
    resized,
    samples_of,
    without_dropout,
)
from tests.tiny import checkpoint as checkpoint_of

T4 = dataclasses.replace(H200, hardware="t4", sm=75)
# Each kernel here with its floating-point type and the relative error that the type allows.
KINDS = [("block-diagonal", torch.float32, 1e-5), ("efficient", torch.float32, 1e-5)]
if DEVICE.type == "cuda":
    KINDS += [("efficient", torch.float16, 2e-3)]
    if torch.cuda.get_device_capability() >= (8, 0):
        KINDS += [("flash", torch.float16, 2e-3), ("flash", torch.bfloat16, 2e-2)]


@pytest.fixture(scope="module", autouse=True)
def gpu_ops_without_a_gpu():
    """PyTorch's memory-efficient attention exists on GPUs alone; elsewhere the same mathematics
    stands in for it."""
    if DEVICE.type == "cuda":
        yield
        return

    def laid(heads_first):
        """Lay a tensor out in memory as the GPU's op returns it."""
        return heads_first.transpose(1, 2).contiguous().transpose(1, 2)

    def shares(query, key, bias, dropout, scale, seed):
        random = torch.rand(bias.shape, generator=torch.Generator().manual_seed(int(seed)))
        return torch.softmax(query @ key.mT * scale + bias, -1), (random >= dropout) / (1 - dropout)

    def forward(query, key, value, bias, lse, dropout=0.0, causal=False, *, scale):
        seed = torch.randint(2**31, ())
        share, kept = shares(query, key, bias, dropout, scale, seed)
        lse = torch.full((*query.shape[:2], -(-query.shape[2] // 32) * 32), torch.nan)
        return laid((share * kept) @ value), lse, seed, seed.clone()

    def backward(
        grad, query, key, value, bias, out, lse, seed, offset, dropout, mask, causal=False, *, scale
    ):
        assert out.transpose(1, 2).is_contiguous(), "which the kernel takes for granted"
        assert lse.dtype == torch.float32, "which the kernel takes for granted"
        assert bias.dtype == query.dtype
        assert bias.stride(-1) == 1
        assert bias.shape[-1] % 16 == 0
        share, kept = shares(query, key, bias, dropout, scale, seed)
        slope = share * ((grad @ value.mT) * kept - (grad * out).sum(-1, keepdim=True)) * scale
        gradients = (slope @ key, slope.mT @ query, (share * kept).mT @ grad)
        return *map(laid, gradients), bias.new_empty(0)

    stand_ins = library.Library("aten", "IMPL")
    stand_ins.impl("_scaled_dot_product_efficient_attention", forward, "CPU")
    stand_ins.impl("_scaled_dot_product_efficient_attention_backward", backward, "CPU")
    yield
    stand_ins._destroy()


@pytest.fixture(scope="module")
def samples():
    return samples_of("synthetic:200")


def spec_of(variant="E-packed", attention=None, settings=None, **sizes):
    """Return the spec of a short run, not compiled, with this kernel and these settings."""
    changes = {"compile": "none"}
    if attention:
        changes["attention"] = attention
    if attention == "flash":
        changes["precision"] = "bf16"
    changes |= settings or {}
    return planned(variant, settings=changes, sizes={"steps": 8} | sizes, data="synthetic:200")


def segments(kind, lengths, limits) -> Segments:
    """Return the segments of a row of samples of these lengths, for a kernel.

    One limit stands for all of them.
    """
    if not isinstance(limits, list):
        limits = [limits] * len(lengths)
    widths = limits if kind == "efficient" else lengths
    ends = torch.tensor([0, *np.cumsum(widths)], dtype=torch.int32, device=DEVICE)
    if kind != "efficient":
        return Segments(ends, limits, None)
    padding_mask = torch.full((int(ends[-1]),), -torch.inf, device=DEVICE)
    for begin, length in zip(ends, lengths, strict=False):
        padding_mask[begin : begin + length] = 0
    return Segments(ends, limits, padding_mask)


def attend(kind, query, key, value, *rest):
    """A kernel's output, whichever way it takes query, key and value."""
    parts = [torch.stack([query, key, value], 1)] if kind == "efficient" else [query, key, value]
    return KERNELS[kind](*parts, *rest)


def micro_batches(batches, steps) -> list:
    return [*itertools.chain.from_iterable(map(batches.step, range(steps)))]


def test_dealing_balances_and_loses_nothing():
    draw = np.random.default_rng(0)
    lengths = draw.integers(20, 385, 32 * 100)
    groups = deal(draw.permutation(len(lengths)), lengths, 32)
    assert groups.shape == (100, 32)
    assert sorted(groups.ravel()) == list(range(len(lengths)))
    assert np.ptp(lengths[groups].sum(1)) < 20 < np.ptp(lengths.reshape(100, 32).sum(1))


def packed_sequences(samples):
    """Return the micro-batches of a run, and their arrays."""
    batches = PackedBatches(samples, spec_of())
    dealt = micro_batches(batches, batches.steps)
    return batches, dealt, [batches.arrays(indices) for indices in dealt]


def test_every_packed_sequence_has_one_shape(samples):
    batches, _, rows = packed_sequences(samples)
    shapes = {tuple((name, array.shape) for name, array in row.items()) for row in rows}
    assert len(shapes) == 1
    assert rows[0]["input_ids"].shape == (1, batches.budget)


def test_packed_sequences_have_little_padding(samples):
    batches, dealt, _ = packed_sequences(samples)
    tokens = sum(samples.lengths[indices].sum() for indices in dealt)
    assert tokens / (len(dealt) * batches.budget) > 0.8


def test_segments_fill_the_budget_and_are_within_their_limits(samples):
    batches, _, rows = packed_sequences(samples)
    lengths = np.diff([row["cu_seqlens"] for row in rows])
    assert {*lengths.sum(1)} == {batches.budget}
    assert lengths.min() >= 0
    assert lengths.max() <= 96
    room = batches.limits - np.max(lengths, axis=0)
    assert room.min() >= 0
    assert room.max() < 64, "no limit is an alignment too high"


def test_segments_fill_the_budget_where_one_sequence_is_much_shorter_than_another(samples):
    """The shortest one's padding needs more segments than the longest one's."""
    batches = PackedBatches(samples, spec_of(settings={"micro_batch": 1}))
    totals = [batches.arrays(np.array([index]))["cu_seqlens"][-1] for index in range(len(samples))]
    assert set(totals) == {batches.budget}


def test_the_budget_holds_the_samples_of_an_epoch_that_is_not_finished():
    """A sample that the first epoch leaves out is the longest, and comes in the second."""
    spec = spec_of(steps=3, effective_batch=16)
    samples = OfLengths(np.full(33, 10))
    (left_out,) = {*range(33)} - {*PackedBatches(samples, spec)._drawn(0).ravel()}
    samples.lengths[left_out] = 90
    batches = PackedBatches(samples, spec)
    totals = [samples.lengths[indices].sum() for indices in micro_batches(batches, 3)]
    assert batches.per_epoch < 6, "micro-batches of the run"
    assert batches.budget == 192, "of 160 tokens"
    assert max(totals) <= 192


def test_samples_fill_the_budget_to_the_last_token_and_one_more_is_refused(samples):
    batches = PackedBatches(samples, spec_of())
    fitting = np.full(8, batches.budget // 8)
    fitting[0] += batches.budget % 8
    begins, ends = batches._segments(fitting)
    assert begins.tolist() == [0, *fitting.cumsum()[:-1]]
    assert ends[8] == ends[-1] == batches.budget
    fitting[-1] += 1
    message = f"samples of {batches.budget + 1} tokens do not fit into a packed sequence"
    refused(message, batches._segments, fitting)


def test_places_have_few_lengths_and_make_up_the_budget(samples):
    batches = PackedBatches(samples, spec_of(attention="efficient"))
    assert batches.budget == sum(batches.limits)
    assert len(set(batches.limits)) <= CALLS
    assert batches.limits == sorted(batches.limits, reverse=True), "equal ones are neighbours"


def test_each_sample_has_a_place_that_is_the_same_in_every_packed_sequence(samples):
    batches = PackedBatches(samples, spec_of(attention="efficient"))
    for indices in micro_batches(batches, batches.steps):
        row = batches.arrays(indices)
        padded = Batches(samples, batches.spec).arrays(indices)
        lengths = samples.lengths[indices]
        assert list(np.diff(row["cu_seqlens"])) == batches.limits
        assert (row["padding_mask"] == 0).sum() == lengths.sum()
        for number, length in enumerate(lengths):
            begin = row["cu_seqlens"][number]
            place = slice(begin, begin + length)
            assert (row["padding_mask"][place] == 0).all()
            assert list(row["position_ids"][0, place]) == list(range(length))
            for name in ("input_ids", "token_type_ids"):
                assert (row[name][0, place] == padded[name][number, :length]).all()


def test_samples_that_do_not_fit_their_places_are_refused(samples):
    batches = PackedBatches(samples, spec_of(attention="efficient"))
    indices = batches.step(0)[0]
    refused("not for places of", batches.arrays, indices[::-1])
    refused("not for places of", batches.arrays, indices[1:])


def test_few_limits_are_the_best_few():
    lengths = np.array([380, 300, 299, 250, 180, 170, 160, 150, 90, 20])
    assert few_limits(lengths, 99) == [384, 304, 304, 256, 192, 176, 160, 160, 96, 32]
    assert few_limits(lengths, 1) == [384] * 10
    for most in (2, 3, 4):
        found = few_limits(lengths, most)
        assert (found >= lengths).all()
        assert len(set(found)) == most
        tried = (
            np.array([*chosen, 384])
            for chosen in itertools.combinations(range(32, 384, 16), most - 1)
        )
        assert sum(found) == min(some[np.searchsorted(some, lengths)].sum() for some in tried)


def test_an_epoch_sees_each_feature_once_and_the_next_in_another_order(samples):
    batches = PackedBatches(samples, spec_of())
    first = batches._epoch(0)
    assert len(np.unique(first)) == first.size == len(samples) // 8 * 8
    assert np.array_equal(first, PackedBatches(samples, spec_of())._epoch(0))
    assert not np.array_equal(first, batches._epoch(1))


def packed_and_padded(samples, kind, dtype, qkv="separate"):
    """A model, one micro-batch both ways, and its lengths: on the device, without dropout, in
    training mode."""
    spec = spec_of(attention=kind, settings={"qkv": qkv})
    batches = PackedBatches(samples, spec)
    indices = batches.step(0)[0]
    model = without_dropout(build_model(spec)).to(DEVICE, dtype).train()
    padded = Batches(
        samples, resized(spec, {"padding": "max_length", "attention": "sdpa"})
    ).collate(indices, DEVICE)
    return (
        Packed(model, batches.limits),
        batches.collate(indices, DEVICE),
        padded,
        samples.lengths[indices],
    )


def padded_loss(model, inputs, lengths):
    """The padded row's loss with its softmax over the question's own tokens."""
    output = model(**{k: v for k, v in inputs.items() if not k.endswith("_positions")})
    loss = 0
    inside = (
        torch.arange(output.start_logits.shape[1], device=DEVICE)
        < torch.tensor(lengths, device=DEVICE)[:, None]
    )
    for name in ("start", "end"):
        own = output[f"{name}_logits"].float().masked_fill(~inside, -torch.inf)
        loss += torch.nn.functional.cross_entropy(own, inputs[f"{name}_positions"]) / 2
    return loss, output, inside


@pytest.mark.parametrize("qkv", ["separate", "fused"])
@pytest.mark.parametrize(("kind", "dtype", "error"), KINDS)
def test_logits_loss_and_gradients_are_those_of_padded_rows(samples, kind, dtype, error, qkv):
    model, packed, padded, lengths = packed_and_padded(samples, kind, dtype, qkv=qkv)
    loss, output, inside = padded_loss(model.model, padded, lengths)
    loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    found = model(**packed)
    found.loss.backward()
    real = (
        packed["padding_mask"] == 0
        if kind == "efficient"
        else torch.arange(found.start_logits.shape[1]) < lengths.sum()
    )
    for name in ("start_logits", "end_logits"):
        assert relative(found[name][0, real].float(), output[name][inside].float()) < error, name
    assert found.loss.item() == pytest.approx(loss.item(), rel=error)
    largest = max(g.norm() for g in expected.values())
    for name, p in model.named_parameters():
        # Gradients that are 0 but for rounding (of a bias that shifts a whole softmax) are measured
        # by the largest.
        assert (p.grad - expected[name]).norm() < error * max(
            expected[name].norm(), 1e-2 * largest
        ), name


def test_a_model_in_regions_is_the_model(samples):
    """Loss and gradients, traced whole or not, and every parameter in one region alone; each is
    announced before it runs."""
    packed, inputs, *_ = packed_and_padded(samples, "block-diagonal", torch.float32)
    parts = []
    found = []
    announced = []
    regions = RegionalModel(packed, lambda part: parts.append(part) or part)
    assert len(parts) == len(regions_of(packed.model)) == 3, "embeddings, two layers, head"
    regions.before = announced.append
    traced = RegionalModel(packed, partial(torch.compile, backend="aot_eager", fullgraph=True))
    for forward in (LossOf(packed), regions, traced):
        packed.model.zero_grad()
        loss = forward(**inputs)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in packed.model.parameters())])
    torch.testing.assert_close(found[1:], found[:1] * 2)
    assert announced == [0, 1, 2]
    held = [p for part in parts for p in part.parameters()]
    assert {*held} == {*packed.model.parameters()}
    assert len(held) == len({*held})


@pytest.mark.parametrize(("kind", "dtype", "error"), KINDS)
def test_a_long_tail_leaks_nothing(samples, kind, dtype, error):
    """A budget far beyond the tokens: no gradient is touched by the padding, which is many
    segments, or in places."""
    spec = spec_of(attention=kind)
    model = without_dropout(build_model(spec)).to(DEVICE, dtype).train()

    def gradients(extra):
        batches = PackedBatches(samples, spec)
        batches.budget += extra
        if batches.has_places:
            batches.limits = [limit + extra // batches.size for limit in batches.limits]
        batches.least = 8
        segments = np.diff(batches.arrays(batches.step(0)[0])["cu_seqlens"])
        assert segments.max() <= max(96, *batches.limits)
        assert segments.sum() == batches.budget
        model.zero_grad()
        Packed(model, batches.limits)(**batches.collate(batches.step(0)[0], DEVICE)).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    for near, far in zip(gradients(0), gradients(128 * 8), strict=True):
        assert (near - far).norm() <= error * near.norm() + 1e-6


@pytest.mark.parametrize(("kind", "dtype", "error"), KINDS)
def test_attention_dropout_keeps_its_rate(kind, dtype, error):
    """With values of one, the output is the share of attention that is kept, over the share that
    should be."""
    torch.manual_seed(0)
    query, key, ones = torch.randn(3, 960, 4, 32, device=DEVICE, dtype=dtype)
    cut = segments(kind, [96] * 10, 96)
    ones = torch.ones_like(ones)
    kept, again, whole = (
        attend(kind, query, key, ones, cut, rate, 0.2).float() for rate in (0.1, 0.1, 0.0)
    )
    assert kept.mean().item() == pytest.approx(1.0, abs=0.01)
    assert kept.std() > 0.01
    assert not torch.equal(kept, again)
    assert torch.allclose(whole, torch.ones_like(kept), atol=1e-3)


def recomputed(step):
    """The step compiles under gradient checkpointing."""
    return torch.compile(
        lambda v: checkpoint(step, v * 1.0, use_reentrant=False),
        backend="aot_eager",
        fullgraph=True,
    )


WAYS = {"plainly": lambda step: step, "recomputed": recomputed}
WAYS |= {"by Inductor": partial(torch.compile, fullgraph=True)} if DEVICE.type == "cuda" else {}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("limits", [96, 80, [80, 64, 80, 80, 32, 80]])
@pytest.mark.parametrize(("kind", "dtype", "error"), KINDS)
def test_the_backward_pass_drops_what_the_forward_pass_dropped(kind, dtype, error, limits, way):
    """For one pattern the output is linear in the values, so that <grad, A v> = <A' grad, v>; A' by
    the backward pass.

    PyTorch's memory-efficient kernel breaks this where it is given cu_seqlens, and models then fail
    to train."""
    lengths = [80, 54, 80, 80, 26, 80]
    cut = segments(kind, lengths, limits)
    query, key, value, grad = torch.randn(
        4, int(cut.cu_seqlens[-1]), 4, 32, device=DEVICE, dtype=dtype
    )
    if kind == "efficient":
        grad[cut.padding_mask < 0] = 0  # as in training, where nothing depends on padding
    output, back = with_gradients(
        way(lambda v: attend(kind, query, key, v, cut, 0.5, 0.2)), [value], grad
    )
    for segment, (begin, length) in enumerate(zip(cut.cu_seqlens, lengths, strict=False)):
        part = slice(begin, begin + length)
        there = grad[part].float() * output[part].float()
        again = back[part].float() * value[part].float()
        difference = (there - again).sum((0, 2)).abs()
        assert (difference <= 20 * error * there.norm() + 1e-6).all(), segment


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA GPU")
@pytest.mark.parametrize(("kind", "dtype", "error"), KINDS[1:])
def test_a_captured_step_drops_anew_and_alike_in_both_passes(kind, dtype, error):
    query, key, value, grad = torch.randn(4, 480, 4, 32, device=DEVICE, dtype=dtype)
    cut = segments(kind, [96] * 5, 96)

    def step():
        return with_gradients(lambda v: attend(kind, query, key, v, cut, 0.5, 0.2), [value], grad)

    seen = []
    for output, back in replayed(step, torch.zeros((), device=DEVICE)):
        there = grad.float() * output.float()
        again = back.float() * value.float()
        assert (there.sum() - again.sum()).abs() <= 20 * error * there.norm()
        seen.append(output.clone())
    assert not torch.equal(*seen)


@pytest.mark.parametrize(("kind", "dtype", "error"), KINDS[1:])
def test_with_dropout_all_gradients_are_those_of_the_pattern_that_was_drawn(kind, dtype, error):
    """The pattern is read off the output for values that are the identity: one segment of as many
    tokens as a head is wide."""
    query, key, grad = torch.randn(3, 64, 1, 64, device=DEVICE, dtype=dtype)
    inputs = (query, key, torch.eye(64, device=DEVICE, dtype=dtype)[:, None])
    cut = segments(kind, [64], 64)
    output, *found = with_gradients(
        lambda *parts: attend(kind, *parts, cut, 0.5, 0.1), inputs, grad
    )
    kept = (output[:, 0] != 0).double() / 0.5
    wide = [x[:, 0].double() for x in inputs]
    plain = with_gradients(
        lambda q, k, v: (torch.softmax(q @ k.T * 0.1, -1) * kept) @ v, wide, grad[:, 0].double()
    )
    for one, other in zip(found, plain[1:], strict=True):
        assert relative(one[:, 0].double(), other) < 10 * error


@pytest.mark.parametrize(("kind", "dtype", "error"), KINDS)
def test_no_two_heads_or_segments_drop_by_one_pattern(kind, dtype, error):
    # Equal scores: the output is the share that is kept.
    even = torch.zeros(480, 4, 32, device=DEVICE, dtype=dtype)
    kept = attend(kind, even, even, torch.ones_like(even), segments(kind, [96] * 5, 96), 0.5, 0.2)[
        :, :, 0
    ].float()
    patterns = kept.view(5, 96, 4).transpose(1, 2).reshape(20, 96)
    assert (torch.corrcoef(patterns) - torch.eye(20, device=DEVICE)).abs().max() < 0.6


def test_the_kernel_is_chosen_by_capability_and_named():
    for machine, kernel in ((CPU, "block-diagonal"), (T4, "efficient"), (H200, "flash")):
        spec = planned("E-packed", machine=machine)
        assert (spec.settings.attention, spec.skip) == (kernel, None)
    assert "flash" in " ".join(spec.adjusted)
    assert "cuda_graph: False" in " ".join(planned("E-graph").adjusted)


def test_a_packed_variant_runs_end_to_end(tmp_path):
    """The whole path on this machine, through fit: packed training, padded evaluation."""
    entry = fit(spec_of("E-adamw", steps=20, measure_from=5), tmp_path, say=quiet)
    assert (entry["status"], entry["time"]["steps"], entry["quality"]["n"]) == ("ok", 20, 200)
    assert entry["speed"]["pad_fraction"] < 0.2


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    "changes", [{}, {"precision": "bf16"}, {"optimizer": "adamw-master"}], ids=str
)
def test_a_captured_step_is_the_eager_step(samples, changes, tmp_path):
    """Ten steps without dropout, three of them eager and seven replayed, against ten eager ones."""

    def weights(captured):
        sizes = {"steps": 10, "checkpoint_every": 0, "measure_from": 2}
        spec = planned("E-graph", sizes=sizes, data="synthetic:200", machine=H200)
        spec = resized(spec, {"compile": "none", "cuda_graph": captured} | changes)
        folder = tmp_path / str(captured)
        model = without_dropout(build_model(spec))
        folder.mkdir()
        train(model, PackedBatches(samples, spec), spec, DEVICE, folder, quiet)
        return torch.cat([p.detach().flatten().float() for p in model.parameters()])

    start = torch.cat(
        [p.detach().flatten().to(DEVICE) for p in build_model(spec_of("E-graph")).parameters()]
    )
    eager = weights(False)
    graph = weights(True)
    assert (graph - eager).norm() < 1e-2 * (eager - start).norm()


# Packed sequences of the searched rival.


def test_the_searched_rival_packs_more_evenly(samples):
    even = batches_of(samples, spec_of("E-searched"))
    others = batches_of(samples, spec_of("E-plain"))
    assert isinstance(even, EvenBatches)
    assert type(others) is PackedBatches
    spread = np.ptp([samples.lengths[group].sum() for group in even._drawn(0)])
    assert spread <= 2


def test_the_searched_rival_takes_each_sample_once_an_epoch(samples):
    drawn = batches_of(samples, spec_of("E-searched"))._drawn(0)
    assert drawn.shape == (len(samples) // 8, 8)
    assert len(np.unique(drawn)) == drawn.size


def test_the_searched_rivals_epochs_differ(samples):
    batches = batches_of(samples, spec_of("E-searched"))
    first = {frozenset(group) for group in batches._drawn(0).tolist()}
    second = {frozenset(group) for group in batches._drawn(1).tolist()}
    assert len(first & second) < len(first) / 10


# Parts of a packed model, and its loss.


def test_the_loss_is_the_mean_over_samples_of_a_softmax_over_each():
    torch.manual_seed(0)
    lengths = [3, 1, 5]  # and two tokens that are no sample
    logits = torch.randn(11)
    ends = torch.tensor([0, 3, 4, 9, 11])
    positions = torch.tensor([2, 0, 4])
    losses = []
    for begin, length, position in zip(ends, lengths, positions, strict=False):
        losses.append(-logits[begin : begin + length].log_softmax(0)[position])
    expected = torch.stack(losses).mean()
    for longest in (5, 9):
        torch.testing.assert_close(segment_loss(logits, positions, ends, longest), expected)
    # The last segment ends with the sequence.
    last = segment_loss(logits[:9], positions, ends[:4], 5)
    torch.testing.assert_close(last, expected)


def test_the_loss_is_the_mean_of_begin_and_end_without_what_pads_segments():
    begins, ends = torch.randn(2, 1, 8)
    padding_mask = torch.tensor([0.0] * 3 + [-torch.inf] + [0.0] * 2 + [-torch.inf] * 2)
    starts, stops = torch.tensor([0, 1]), torch.tensor([2, 0])
    places = torch.tensor([0, 4, 8])
    found = span_loss(begins, ends, starts, stops, places, longest=4, padding_mask=padding_mask)
    own = torch.tensor([0, 3, 5])
    of_own = torch.tensor([0, 1, 2, 4, 5])
    losses = [
        segment_loss(logits[0, of_own], answers, own, 3)
        for logits, answers in ((begins, starts), (ends, stops))
    ]
    torch.testing.assert_close(found, sum(losses) / 2)


@pytest.mark.parametrize(("layers", "sizes"), [(2, [2]), (3, [3]), (7, [3, 3, 1])])
def test_a_region_has_three_layers_and_the_last_one_what_is_left(layers, sizes):
    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=8,
        num_attention_heads=1,
        intermediate_size=8,
        vocab_size=9,
    )
    model = BertForQuestionAnswering(config)
    below, *between, above = regions_of(model)
    assert below == [model.bert.embeddings]
    assert [len(region) for region in between] == sizes
    assert [layer for region in between for layer in region] == list(model.bert.encoder.layer)
    assert above == [model.qa_outputs]


@pytest.mark.parametrize("kind", ["roberta", "electra"])
def test_regions_count_positions_and_widen_embeddings_as_the_whole_model_does(kind, tmp_path):
    settings = {"attention": "block-diagonal", "compile": "none"}
    spec = planned("E-packed", settings=settings, model=checkpoint_of(kind, tmp_path))
    _, packed, inputs = packed_model(spec)
    packed.eval()
    regions = RegionalModel(packed, lambda part: part)
    torch.testing.assert_close(regions(**inputs), packed(**inputs).loss)


def test_samples_of_equal_length_are_dealt_in_their_order():
    """Also where a sort that is not stable would mix them, so that runs stay the same."""
    dealt = deal(np.arange(400), np.resize([5, 6, 7, 8], 400), 2).tolist()
    assert dealt[:100] == [[4 * place + 3, 4 * place] for place in range(100)]
    assert dealt[100:] == [[4 * place + 2, 4 * place + 1] for place in range(100)]
