import dataclasses
import functools
import gc
import itertools
import shutil
import weakref
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from qa_lib.data.batches import Batches
from qa_lib.data.load import batches_of
from qa_lib.measure.meter import PEAK_FROM, Meter, memory_use
from qa_lib.model.build import build_model
from qa_lib.peers.bert import Bert
from qa_lib.peers.step import Step
from qa_lib.records.schema import Noise
from qa_lib.run.fit import train
from qa_lib.spec.settings import Settings
from qa_lib.spec.variants import VARIANTS
from qa_lib.train import checkpoint as checkpoints
from qa_lib.train import compile as compilation
from qa_lib.train import plain
from qa_lib.train.loop import STRATEGIES, OptimizerStep
from qa_lib.train.master_adamw import MasterAdamW
from qa_lib.train.optim import build_optimizer, clip, learning_rate, peak_rate, set_rate, unscale
from qa_lib.train.parallel.data_parallel import NoParallel
from qa_lib.train.parallel.process_group import ProcessGroup
from qa_lib.train.plain import PlainStep
from qa_lib.train.step_log import NonFiniteLoss, StepLog
from tests.conftest import slow
from tests.material import flip_a_bit, refused
from tests.tiny import (
    OfLengths,
    losses_of,
    planned,
    quiet,
    resized,
    samples_of,
    steps_of,
    stop_after,
    trained,
    without_dropout,
)

DEVICE = torch.device("cpu")


@pytest.fixture(scope="module")
def samples():
    return samples_of("synthetic:120")


def spec_of(variant, settings=None, micro_batch=None, gpu=False, **sizes):
    """A variant at preset smoke, made smaller, on a CPU or for the GPU that is here."""
    sizes = {"steps": 6, "checkpoint_every": 0, "measure_from": 2, "effective_batch": 16} | sizes
    options = {"data": "synthetic:120", "micro_batch": micro_batch}
    if gpu:
        options["machine"] = None
    return planned(variant, settings=settings, sizes=sizes, **options)


def tensors(batch):
    """A batch of arrays as tensors."""
    return {name: torch.from_numpy(array) for name, array in batch.items()}


def weights(model):
    """All of them in a row, of a type that holds each."""
    return torch.cat([p.detach().flatten().float() for p in model.parameters()])


# The loss of padded samples.


def test_a_masked_loss_is_that_of_each_sample_without_its_padding(samples):
    model = without_dropout(build_model(spec_of("A1-masked"))).train()
    rows = range(4)
    padded = tensors(samples.batch(rows, 96))
    losses = [model(**tensors(samples.batch([row], samples.lengths[row]))).loss for row in rows]
    expected = torch.stack(losses).mean()
    torch.testing.assert_close(compilation.MaskedLossOf(model)(**padded), expected)
    assert compilation.LossOf(model)(**padded) > expected + 0.1


# The schedule of the learning rate.


def rates_of(spec, steps=100):
    return [learning_rate(spec, step, steps) for step in range(steps)]


def test_a_masked_loss_of_logits_in_half_precision_is_in_fp32():
    logits = torch.linspace(-3, 3, 8).bfloat16()[None]
    output = Mock(start_logits=logits, end_logits=logits)
    model = compilation.MaskedLossOf(lambda **_: output)
    place = torch.tensor([2])
    loss = model(torch.ones(1, 8, dtype=torch.int64), place, place)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits.float(), place))


def test_the_learning_rate_rises_to_the_presets_and_falls_from_there():
    spec = spec_of("A1", warmup=0.1)
    rate = spec.preset.learning_rate
    rates = rates_of(spec)
    assert peak_rate(spec) == rate
    assert max(rates) == rates[9] == rates[10] == rate
    assert np.allclose(np.diff(rates[:10]), rate / 10)
    assert np.allclose(np.diff(rates[10:]), -rate / 90)


def test_no_step_has_a_learning_rate_of_zero():
    spec = spec_of("A1", warmup=0.1)
    rates = rates_of(spec)
    assert rates[0] == pytest.approx(spec.preset.learning_rate / 10)
    assert rates[-1] == pytest.approx(spec.preset.learning_rate / 90)


def test_the_optimizer_steps_at_the_rates_of_the_schedule(samples, tmp_path, monkeypatch):
    spec = spec_of("A1", warmup=0.5)
    used = []

    def note(optimizer, _):
        used.append(optimizer.param_groups[0]["lr"])

    monkeypatch.setattr("qa_lib.train.loop.clip", note)
    trained(spec, samples, tmp_path)
    assert used == rates_of(spec, spec.preset.steps)


@pytest.mark.parametrize("variant", ["A1", "E-plain", "E-searched"])
def test_a_run_logs_the_rates_of_the_schedule(variant, samples, tmp_path):
    spec = spec_of(variant, settings={"compile": "none"}, warmup=0.5)
    trained(spec, samples, tmp_path)
    assert [line["lr"] for line in steps_of(tmp_path)] == rates_of(spec, spec.preset.steps)


def test_the_searched_rival_trains_the_model_that_it_is_given(samples, tmp_path):
    """With fp32 weights, and moments in bf16, its updates are nearly those of the plain rival."""
    settings = {"compile": "none", "dropout": "none"}
    trained_by = {}
    for variant in ("E-plain", "E-searched"):
        spec = spec_of(variant, settings=settings)
        batches = batches_of(samples, spec_of("E-plain", settings=settings))
        model = build_model(spec)
        begin = weights(model)
        train(model, batches, spec, DEVICE, tmp_path, quiet)
        trained_by[variant] = weights(model) - begin
    plain, searched = trained_by.values()
    assert plain.norm() > 0
    assert torch.cosine_similarity(searched, plain, dim=0) > 0.99
    assert searched.norm() / plain.norm() == pytest.approx(1, abs=0.01)


def test_what_the_searched_rivals_steps_before_the_capture_trained_is_put_back(
    samples, monkeypatch
):
    """Here they are played by a step that is taken where the graph would be captured."""
    spec = spec_of("E-searched", settings={"compile": "none"})
    batches = batches_of(samples, spec)
    example = [batches.collate(m, DEVICE) for m in batches.step(0)]

    class Capturing(Step):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self._run()

    monkeypatch.setattr(plain, "Step", Capturing)
    peer = Bert(build_model(spec), 0.1, max(batches.limits)).train()
    before = weights(peer)
    step = plain.SearchedStep(peer, spec.settings, 1e-3, example)
    assert torch.equal(weights(peer), before)
    assert step.update.count == 0
    assert not any(moment.any() for moment in step.update.moments())
    seeds = step.update.seeds
    assert [seed.item() for seed in seeds] == list(range(len(seeds)))
    step(example)
    assert not torch.equal(weights(peer), before)


def test_a_rivals_meter_leaves_out_the_last_steps_and_knows_what_was_compiled_before(
    samples, tmp_path, monkeypatch
):
    meter, log, hooks = Mock(), Mock(), Mock(untimed_steps=1)
    monkeypatch.setattr(plain, "Meter", meter)
    monkeypatch.setattr(plain, "StepLog", log)
    spec = spec_of("E-searched", settings={"compile": "none"})
    batches = batches_of(samples, spec)
    ranks = ProcessGroup(DEVICE)
    plain.train(build_model(spec), batches, spec, tmp_path, quiet, hooks, ranks)
    last = batches.steps - 1
    assert meter.call_args.args == (DEVICE, spec.preset.measure_from, 0, last)
    assert meter.return_value.compiled_before_s > 0
    assert log.call_args.kwargs["begin"] == 0
    assert hooks.finished.call_count == log.return_value.step.call_count == batches.steps


def test_the_searched_rivals_optimizer_is_measured_by_its_moments(samples, tmp_path):
    model, optimizer, *_ = trained(
        spec_of("E-searched", settings={"compile": "none"}), samples, tmp_path
    )
    elements = sum(parameter.numel() for parameter in model.parameters())
    moments_mib = 2 * 2 * elements / 2**20
    assert memory_use(model, optimizer, DEVICE).optimizer_mib == pytest.approx(moments_mib)


def test_a_rival_gives_the_model_the_weights_that_it_has_trained(samples, tmp_path):
    spec = spec_of("E-plain", settings={"compile": "none"}, steps=1)
    before = build_model(spec).state_dict()
    model, *_ = trained(spec, samples, tmp_path)
    moved = [name for name, weight in model.state_dict().items() if (weight != before[name]).any()]
    assert len(moved) == len(before)


def test_a_rival_draws_from_the_seed_of_its_run(samples, tmp_path):
    spec = dataclasses.replace(spec_of("E-plain", settings={"compile": "none"}), seed=3)
    batches = stop_after(batches_of(samples, spec), 0)
    with pytest.raises(KeyboardInterrupt):
        train(build_model(spec), batches, spec, DEVICE, tmp_path, quiet)
    assert torch.initial_seed() == 3


@pytest.mark.parametrize(("dropout", "share"), [("none", 0.0), ("philox", 0.1)])
def test_a_rival_drops_out_as_the_spec_says(dropout, share, samples, tmp_path, monkeypatch):
    rival = Mock(side_effect=ZeroDivisionError)
    monkeypatch.setattr("qa_lib.train.plain.Bert", rival)
    with pytest.raises(ZeroDivisionError):
        trained(spec_of("E-plain", settings={"dropout": dropout}), samples, tmp_path)
    assert rival.call_args.args[1] == share


@pytest.mark.parametrize(("precision", "casts"), [("bf16", True), ("pure-bf16", False)])
@pytest.mark.parametrize(
    ("compiler", "asked"),
    [("none", []), ("inductor", [{}]), ("reduce-overhead", [{"mode": "reduce-overhead"}])],
)
def test_a_rival_is_compiled_and_cast_as_the_spec_says(
    precision, casts, compiler, asked, monkeypatch
):
    options = []
    monkeypatch.setattr(torch, "compile", lambda model, **more: options.append(more) or model)
    model = torch.nn.Module()
    model.norm = torch.nn.LayerNorm(1)
    step = PlainStep(model, precision, compiler, rate=0.5)
    assert options == asked
    assert step.autocast._enabled is casts
    (group,) = step.optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.5, 0.0)


def test_a_rivals_gradients_are_clipped_to_a_norm_of_1():
    model = torch.nn.Linear(4, 1, bias=False)
    model.norm = torch.nn.LayerNorm(1, elementwise_affine=True).requires_grad_(False)
    step = PlainStep(model, "fp32", "none", rate=0.0)
    step.forward = lambda x: 3.0 * model(x).sum()
    gradients = []
    step.optimizer.register_step_pre_hook(lambda *_: gradients.extend(model.weight.grad[0]))
    step([{"x": torch.ones(1, 4)}])
    assert gradients == pytest.approx([0.5] * 4)


@pytest.mark.parametrize(("recipe_rates", "factor"), [(False, 1), (True, 5)])
def test_a_recipes_factor_counts_where_the_preset_asks_for_it(recipe_rates, factor):
    lora = spec_of("B1-all", warmup=0.0, recipe_rates=recipe_rates)
    assert peak_rate(lora) == factor * lora.preset.learning_rate
    assert learning_rate(lora, 0, 100) == peak_rate(lora)


# Padding.


def padded(variant, samples):
    """The lengths of a variant's micro-batches, and of the longest sample in each."""
    batches = Batches(samples, spec_of(variant, micro_batch=8))
    micro_batches = [m for step in range(20) for m in batches.step(step)]
    shapes = [batches.collate(m, DEVICE)["input_ids"].shape for m in micro_batches]
    assert shapes == [(8, batches.padded_length(m)) for m in micro_batches]
    lengths = np.array([shape[1] for shape in shapes])
    longest = np.array([samples.lengths[m].max() for m in micro_batches])
    return lengths, longest


def test_padding_to_the_limit_makes_all_micro_batches_as_long(samples):
    lengths, _ = padded("A3", samples)
    assert set(lengths) == {96}


def test_padding_to_the_longest_is_to_the_next_multiple_of_32(samples):
    lengths, longest = padded("A4-nb", samples)
    assert np.all(lengths >= longest)
    assert np.all(lengths < longest + 32)
    assert np.all(lengths % 32 == 0)
    assert len(set(lengths)) > 1


def test_micro_batches_of_like_samples_have_less_padding(samples):
    lengths, _ = padded("A4-nb", samples)
    by_length, _ = padded("A4", samples)
    assert by_length.sum() < 0.8 * lengths.sum()


@pytest.mark.parametrize(("longest", "padded_to"), [(31, 32), (32, 32), (33, 64), (70, 80)])
def test_a_length_that_is_a_multiple_of_32_gets_no_padding_and_none_exceeds_the_limit(
    longest, padded_to
):
    lengths = np.array([5, longest] * 8)
    batches = Batches(OfLengths(lengths), spec_of("A4-nb", micro_batch=8, max_length=80))
    assert batches.padded_length(np.array([0, 1])) == padded_to


# The samples of each step.


SIZED = ["A3", "A4", "E-packed"]  # in any order, sorted by length, and dealt by length


def epochs_of(variant, count, seed=0):
    """The samples of a run over 50 samples, by epoch, each of which has six micro-batches of 8."""
    lengths = OfLengths(np.arange(20, 70))
    spec = spec_of(variant, micro_batch=8, epochs=count, steps=None)
    batches = batches_of(lengths, dataclasses.replace(spec, seed=seed))
    assert batches.steps == 3 * count, "of two micro-batches"
    micro_batches = [indices for step in range(batches.steps) for indices in batches.step(step)]
    return np.stack(micro_batches).reshape(count, 6, 8)


def test_a_step_may_straddle_two_epochs_so_that_no_micro_batch_is_left_out():
    """Three epochs of five micro-batches are seven steps of two, and one micro-batch over."""
    preset = SimpleNamespace(steps=None, epochs=3)
    settings = SimpleNamespace(micro_batch=2)
    spec = SimpleNamespace(preset=preset, settings=settings, micro_batches=2, data={"name": "d"})
    assert Batches([None] * 10, spec).steps == 7


@pytest.mark.parametrize("variant", SIZED)
def test_an_epoch_has_no_sample_twice_and_each_epoch_another_order(variant):
    first, second, third = epochs_of(variant, 3)
    for epoch in (first, second, third):
        assert len(np.unique(epoch)) == 48
    assert not np.array_equal(first, second)
    assert not np.array_equal(second, third)
    assert set(first.ravel()) != set(second.ravel()), "other samples are left out"


@pytest.mark.parametrize("variant", SIZED)
def test_another_seed_has_other_micro_batches(variant):
    (usual,) = epochs_of(variant, 1)
    assert np.array_equal(usual, epochs_of(variant, 1)[0])
    (other,) = epochs_of(variant, 1, seed=1)
    assert not np.array_equal(usual, other)


def test_micro_batches_of_like_samples_come_in_any_order():
    (epoch,) = epochs_of("A4", 1)
    longest = epoch.max(axis=1)
    assert list(longest) not in (sorted(longest), sorted(longest, reverse=True))


@pytest.mark.parametrize("variant", SIZED)
def test_the_tokens_of_a_step_are_those_of_its_samples_and_those_that_are_computed(
    variant, samples
):
    batches = batches_of(samples, spec_of(variant, micro_batch=8))
    micro_batches = batches.step(0)
    lengths, computed = batches.tokens(micro_batches)
    assert lengths.tolist() == samples.lengths[np.concatenate(micro_batches)].tolist()
    shapes = [batches.arrays(indices)["input_ids"].size for indices in micro_batches]
    assert computed.sum() == sum(shapes)


# Gradients.


def test_the_scale_of_the_loss_is_off_the_gradients_before_they_are_clipped_to_a_norm_of_1():
    parameter = torch.nn.Parameter(torch.zeros(4))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizer = torch.optim.SGD([parameter])
    scaler.scale((3.0 * parameter).sum()).backward()
    unscale(optimizer, scaler)
    assert parameter.grad.tolist() == [3.0] * 4
    clip(optimizer, lambda norm: norm)
    assert parameter.grad.tolist() == pytest.approx([0.5] * 4)


def test_the_norm_is_of_the_gradients_that_there_are_in_all_processes():
    """A parameter may have none. Here the others' gradients make the norm twice as large."""
    used, unused = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    used.grad = torch.tensor([3.0, 4.0])
    clip(torch.optim.SGD([used, unused]), lambda norm: 2 * norm)
    assert used.grad.tolist() == pytest.approx([0.3, 0.4])
    assert unused.grad is None


def test_masters_are_told_whose_gradients_their_norm_is_of():
    optimizer = MasterAdamW([torch.nn.Parameter(torch.ones(4).bfloat16())])
    strategy = Mock()
    clip(optimizer, strategy.global_norm)
    assert optimizer.global_norm is strategy.global_norm


@pytest.mark.parametrize(
    ("settings", "casts"),
    [
        ({}, False),
        ({"feed_forward": "fp8"}, True),
        ({"feed_forward": "fp8", "compile": "inductor"}, False),
    ],
)
def test_weights_in_8_bits_are_cast_ahead_where_no_compiler_casts_them(
    settings, casts, samples, monkeypatch
):
    cast = Mock()
    monkeypatch.setattr("qa_lib.train.loop.cast_weights", cast)
    spec = spec_of("A1", {"precision": "bf16", "optimizer": "adamw-master"} | settings)
    batches = batches_of(samples, spec)
    model = torch.nn.Linear(2, 2).bfloat16()
    step = OptimizerStep(model, batches, spec, Mock(), Mock(), ProcessGroup(DEVICE))
    step.cast_weights()
    assert cast.called is casts


@pytest.mark.parametrize(
    ("backend", "micro_batch", "is_kept"),
    [("cudagraphs", 4, True), ("cudagraphs", 16, False), ("none", 4, False)],
)
def test_gradients_have_memory_of_their_own_where_graphs_add_to_them(
    backend, micro_batch, is_kept, samples, monkeypatch
):
    """From before the first step on, since the address is recorded with the graph."""
    spec = spec_of("A1", {"compile": backend}, micro_batch)
    model = build_model(spec)
    step = OptimizerStep(
        model, batches_of(samples, spec), spec, Mock(), Mock(), ProcessGroup(DEVICE)
    )
    assert step.keep_gradients is is_kept
    assert all((parameter.grad is not None) == is_kept for parameter in model.parameters())


# In half precision, and by graphs that write their gradients to the same place again and again.
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
ON_GPU = pytest.param("D1-cudagraphs", torch.device("cuda"), 1e-2, marks=NEEDS_GPU)


@pytest.mark.parametrize(("variant", "device", "tolerance"), [("A1", DEVICE, 1e-5), ON_GPU])
def test_accumulated_micro_batches_are_the_whole_batch(
    variant, device, tolerance, samples, tmp_path, monkeypatch
):
    # So that every step has the same weights.
    monkeypatch.setattr("qa_lib.train.loop.learning_rate", lambda *_: 0.0)

    def gradients(micro_batch):
        """The gradients of all steps of a run, as they come to be clipped."""
        spec = spec_of(variant, micro_batch=micro_batch, gpu=device.type == "cuda", steps=3)
        gradients = []

        def note(parameters, *_):
            gradients.extend(parameter.grad.clone() for parameter in parameters)

        monkeypatch.setattr(torch.nn.utils, "clip_grads_with_norm_", note)
        run_dir = tmp_path / str(micro_batch)
        run_dir.mkdir()
        model = without_dropout(build_model(spec))
        train(model, batches_of(samples, spec), spec, device, run_dir, quiet)
        return gradients

    of_whole = gradients(16)
    assert of_whole, "they are clipped in every precision"
    for whole, accumulated in zip(of_whole, gradients(4), strict=True):
        assert (whole - accumulated).norm() <= tolerance * whole.norm() + 1e-6


@pytest.mark.parametrize(("variant", "modules", "rank"), [("B1", 2, 8), ("B1-all", 6, 32)])
def test_adapters_have_their_rank_and_count_twice(variant, modules, rank):
    """alpha / rank is 2, whatever the rank; which train, test_settings says."""
    adapted = [m for m in build_model(spec_of(variant)).modules() if hasattr(m, "get_base_layer")]
    layers = 2
    assert len(adapted) == layers * modules
    assert {module.r["default"] for module in adapted} == {rank}
    assert {module.scaling["default"] for module in adapted} == {2.0}


# Checkpoints.


def stopped(spec, samples, run_dir, step=4):
    """The folder of a run that was broken off after `step`."""
    run_dir.mkdir()
    batches = stop_after(batches_of(samples, spec), step)
    with pytest.raises(KeyboardInterrupt):
        train(build_model(spec), batches, spec, DEVICE, run_dir, quiet)
    return run_dir


OTHERS = ("A2", "B1", "B2", "C2", "E-adamw")
RESUMED = [  # the variant, and after which steps it is broken off
    ("C1", (1, 3, 5)),
    ("E-dropout-moments", (3,)),
    ("E-packed-lora-masters", (3,)),
    slow("E-dropout-moments", (1, 5)),
    slow("E-packed-lora-masters", (1, 5)),
    *(slow(name, (1, 3, 5)) for name in OTHERS),
]


@pytest.mark.parametrize(("variant", "stops"), RESUMED)
def test_resume_is_exact_from_any_checkpoint(variant, stops, samples, tmp_path):
    # Compiling would take a minute.
    spec = spec_of(variant, {"compile": "none"})
    if spec.asked.half_weights:  # a CPU would adjust it away, but can do it
        spec = resized(spec, {"optimizer": spec.asked.optimizer, "precision": spec.asked.precision})
    whole = weights(trained(spec, samples, tmp_path / "whole")[0])
    for stop in stops:
        spec = resized(spec, checkpoint_every=stop)
        run_dir = stopped(spec, samples, tmp_path / f"stopped-at-{stop}", stop)
        model, _, _, begin, note = trained(spec, samples, run_dir)
        assert (begin, note) == (stop, None)
        assert torch.equal(weights(model), whole), f"after a resume at step {stop}"
        assert [line["step"] for line in steps_of(run_dir)] == list(range(1, spec.preset.steps + 1))


def cut_off(path):
    path.write_bytes(path.read_bytes()[:5000])


def give_other_metadata(path):
    save_file({"x": torch.ones(3)}, path, {"state": "{}"})


# What is done to the checkpoint, the seed of the run that goes on, and why it begins anew. What
# else can happen to a checkpoint is in test_trust.
DAMAGE = [
    pytest.param(flip_a_bit, 0, "its digest is not that", id="a flipped bit"),
    pytest.param(cut_off, 0, "cannot be read", id="cut off"),
    pytest.param(give_other_metadata, 0, "cannot be read", id="other metadata"),
    pytest.param(quiet, 1, "began anew, since its checkpoint is of another run", id="another run"),
]


@pytest.fixture(scope="module")
def stopped_once(samples, tmp_path_factory):
    """The folder of a run of A1 that was broken off, to be copied."""
    spec = spec_of("A1", checkpoint_every=2)
    return stopped(spec, samples, tmp_path_factory.mktemp("stopped") / "run")


@pytest.fixture(scope="module")
def whole_weights(samples, tmp_path_factory):
    """Returns the weights at the end of a run of A1 that was not broken off, by its seed."""

    @functools.cache
    def weights_of(seed):
        spec = dataclasses.replace(spec_of("A1"), seed=seed)
        model, *_ = trained(spec, samples, tmp_path_factory.mktemp("whole"))
        return weights(model)

    return weights_of


@pytest.mark.parametrize(("spoil", "seed", "reason"), DAMAGE)
def test_a_wrong_checkpoint_is_named_and_set_aside_and_the_run_begins_anew(
    spoil, seed, reason, stopped_once, whole_weights, samples, tmp_path
):
    run_dir = shutil.copytree(stopped_once, tmp_path / "run")
    spoil(run_dir / checkpoints.CHECKPOINT)
    spec = dataclasses.replace(spec_of("A1", checkpoint_every=2), seed=seed)
    model, _, _, begin, note = trained(spec, samples, run_dir)
    assert begin == 0
    assert reason in note
    assert (run_dir / "checkpoint.refused").exists()
    assert torch.equal(weights(model), whole_weights(seed))


def test_a_full_disk_leaves_the_older_checkpoint(samples, tmp_path, monkeypatch):
    spec = spec_of("A1", checkpoint_every=2)
    run_dir = tmp_path / "run"

    def fill_the_disk(tensors, path, metadata):
        if (run_dir / checkpoints.CHECKPOINT).exists():
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save_file(tensors, path, metadata)

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", fill_the_disk)
        message = r"checkpoint\.safetensors.*No space left.*intact"
        refused(message, trained, spec, samples, run_dir)
    assert [path.name for path in run_dir.glob("checkpoint*")] == ["checkpoint.safetensors"]
    _, _, _, begin, _ = trained(spec, samples, run_dir)
    assert begin == 2


def test_a_checkpoint_is_of_whole_weights_and_the_last_step_has_none(
    samples, tmp_path, monkeypatch
):
    """`finish` gathers the weights where processes share them."""
    calls = []

    def save(checkpoint, step):
        calls.append(f"save {step}")

    monkeypatch.setattr(NoParallel, "finish", lambda strategy: calls.append("finish"))
    monkeypatch.setattr(checkpoints.Checkpoint, "save", save)
    trained(spec_of("A1", micro_batch=16, steps=4, checkpoint_every=2), samples, tmp_path)
    assert calls == ["finish", "save 2", "finish"]


def test_the_time_to_save_a_checkpoint_is_no_steps(samples, tmp_path, monkeypatch):
    """On a clock that nothing else moves."""
    now = 0.0

    def save(*_):
        nonlocal now
        now += 100.0

    monkeypatch.setattr(checkpoints.Checkpoint, "save", save)
    monkeypatch.setattr("qa_lib.measure.meter.time.perf_counter", lambda: now)
    spec = spec_of("A1", micro_batch=16, steps=3, checkpoint_every=1)
    _, _, meter, *_ = trained(spec, samples, tmp_path)
    assert meter.times == [0.0] * 3


@pytest.mark.parametrize(
    "other",
    [
        {"b": torch.zeros(4)},
        {"a": torch.zeros(4, dtype=torch.int32)},
        {"a": torch.zeros(2, 2)},
        {"a": torch.zeros(4), "b": torch.zeros(0)},
    ],
    ids=["name", "type", "shape", "one more"],
)
def test_tensors_of_the_same_bytes_have_another_digest_where_anything_else_differs(other):
    tensors = {"a": torch.zeros(4)}
    assert checkpoints.digest_of(tensors) == checkpoints.digest_of(dict(tensors))
    assert checkpoints.digest_of(other) != checkpoints.digest_of(tensors)
    assert checkpoints.digest_of(tensors, {"step": 1}) != checkpoints.digest_of(tensors)


# Processes and the loop.


@pytest.mark.parametrize(("rank", "alike", "seed"), [(0, False, 3), (1, False, 4), (1, True, 3)])
def test_processes_drop_out_by_numbers_of_their_own_unless_they_have_the_same_samples(
    rank, alike, seed, samples, tmp_path, monkeypatch
):
    monkeypatch.setattr(NoParallel, "draws_alike", alike)
    spec = dataclasses.replace(spec_of("A1"), seed=3)
    ranks = ProcessGroup(DEVICE)
    ranks.rank = rank
    batches = stop_after(batches_of(samples, spec), 0)
    with pytest.raises(KeyboardInterrupt):
        train(build_model(spec), batches, spec, DEVICE, tmp_path, quiet, ranks=ranks)
    assert torch.initial_seed() == seed


def test_only_processes_that_cut_layers_have_the_same_samples():
    alike = {name for name, strategy in STRATEGIES.items() if strategy.draws_alike}
    assert alike == {"tensor"}


@pytest.mark.parametrize(("backend", "peak_from"), [("none", PEAK_FROM), ("cudagraphs", 0)])
def test_the_peak_of_memory_counts_from_the_first_step_where_that_records_graphs(
    backend, peak_from, samples, tmp_path, monkeypatch
):
    meter = Mock(side_effect=ZeroDivisionError)
    monkeypatch.setattr("qa_lib.train.loop.Meter", meter)
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    with pytest.raises(ZeroDivisionError):
        trained(spec_of("A1", {"compile": backend}), samples, tmp_path)
    device, not_measured, *others = meter.call_args.args
    assert (device, not_measured) == (DEVICE, 2)
    assert others[0] == peak_from


# Compiling.


@pytest.mark.parametrize(
    ("variant", "device", "expected"),
    [
        ("E-dropout", "cuda", 1),
        ("E-regions", "cuda", 1),
        ("D1-cudagraphs", "cuda", 0),
        ("A4", "cpu", 0),
    ],
)
def test_the_compilers_processes_start_where_a_gpus_kernels_are_compiled(
    variant, device, expected, monkeypatch
):
    starts = []
    monkeypatch.setattr(
        "torch._inductor.async_compile.AsyncCompile.wakeup", lambda: starts.append(1)
    )
    compilation.start_compilers(VARIANTS[variant].settings, torch.device(device))
    assert len(starts) == expected


def loss_of_feed_forward(checkpointing, monkeypatch):
    """Compile a feed-forward block and do both passes.

    Returns the shapes of what the forward pass keeps, and the gradients. There is no code
    generation, which the same partitioner serves.
    """
    torch_compile = torch.compile

    def trace(block, **_):
        return torch_compile(block, backend="aot_eager", dynamic=False)

    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
    x = torch.randn(32, 16)
    kept = []

    def keep(tensor):
        kept.append(tuple(tensor.shape))
        return tensor

    settings = Settings(compile="inductor", activation_checkpointing=checkpointing)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", trace)
        forward = compilation.compiled(block, settings)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = forward(x).square().sum()
    gradients = torch.autograd.grad(loss, block.parameters())
    torch._dynamo.reset()
    return kept, gradients


def test_elementwise_work_is_repeated_and_gemms_are_not(monkeypatch):
    kept, gradients = loss_of_feed_forward(False, monkeypatch)
    kept_less, same_gradients = loss_of_feed_forward("elementwise", monkeypatch)
    wide = (32, 64)
    assert kept.count(wide) == 2, "GELU's input and output"
    assert kept_less.count(wide) == 1
    assert all(map(torch.equal, gradients, same_gradients))


def test_what_this_process_compiled_for_an_earlier_run_counts_as_found(monkeypatch):
    compilation.forget_compiled()
    monkeypatch.setattr(compilation, "_compiled_before", False)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    assert not compilation.found_in_cache(), "the run itself has compiled it"
    compilation.forget_compiled()
    assert compilation.found_in_cache()


def test_a_run_begins_with_nothing_compiled(monkeypatch):
    """Dynamo leaves a model uncompiled once this process has compiled a few before it."""
    monkeypatch.setattr(compilation, "_compiled_before", False)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    counted = []

    def note(*_):
        counted.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    monkeypatch.setattr("qa_lib.train.loop.train", note)
    train(None, None, spec_of("A1"), DEVICE, None, quiet)
    assert counted == [0]


@pytest.mark.parametrize(
    ("hits", "by_kernels", "found"), [(0, False, False), (1, False, True), (0, True, True)]
)
def test_what_another_process_compiled_counts_as_found(hits, by_kernels, found, monkeypatch):
    monkeypatch.setattr(compilation, "_compiled_before", False)
    counters = torch._dynamo.utils.counters
    monkeypatch.setitem(counters, "inductor", {"fxgraph_cache_hit": hits})
    monkeypatch.setattr(compilation, "found_compiled", lambda: by_kernels)
    assert compilation.found_in_cache() is found


@pytest.mark.parametrize(("padding", "dynamic"), [("longest", True), ("max_length", False)])
def test_shapes_are_symbolic_where_padding_varies(padding, dynamic, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: asked.append(options))
    compilation.compiled(torch.nn.Linear(1, 1), Settings(compile="inductor", padding=padding))
    assert asked == [{"backend": "inductor", "dynamic": dynamic}]


# The optimizer in 8 bits.


def test_the_8bit_optimizer_keeps_small_tensors_and_embeddings_in_32_bits(samples, tmp_path):
    model, optimizer, *_ = trained(spec_of("C2-8", steps=2), samples, tmp_path)
    trained_parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained_parameters) == len(optimizer.state)
    in_8_bits = 0
    for name, parameter in trained_parameters.items():
        is_small = parameter.numel() < 4096 or "embeddings" in name
        dtype = optimizer.state[parameter]["state1"].dtype
        assert dtype == (torch.float32 if is_small else torch.uint8), name
        in_8_bits += dtype == torch.uint8
    assert in_8_bits > 0


def test_the_8bit_optimizer_keeps_no_earlier_model_alive():
    spec = spec_of("C2-8")
    model = build_model(spec)
    build_optimizer(model, spec)
    embedding = weakref.ref(model.bert.embeddings.word_embeddings)
    del model
    gc.collect()
    assert embedding() is None


def test_the_8bit_optimizer_knows_the_embeddings_of_its_model_alone():
    """In an earlier model's place of each parameter, the next model has another."""
    earlier = spec_of("C2-8")
    build_optimizer(build_model(earlier), earlier)
    spec = spec_of("E-packed-lora")
    model = build_model(spec)
    manager = type(build_optimizer(model, spec).mng).get_instance()
    modules = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    assert set(manager.pid2config) <= {id(module.weight) for module in modules}
    assert not manager.index2config, "frozen embeddings have no place in the optimizer"


def test_the_usual_optimizer_is_pytorchs():
    spec = spec_of("A1")
    assert isinstance(build_optimizer(build_model(spec), spec), torch.optim.AdamW)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused", "adamw-8bit"])
def test_an_optimizer_lets_no_weight_decay_and_begins_at_the_peak_rate(optimizer):
    spec = spec_of("A1", {"optimizer": optimizer})
    (group,) = build_optimizer(torch.nn.Linear(2, 1), spec).param_groups
    assert group["weight_decay"] == 0.0
    assert group["lr"] == peak_rate(spec)


def test_an_optimizer_has_the_parameters_that_it_is_given():
    model = torch.nn.Linear(2, 1)
    (group,) = build_optimizer(model, spec_of("A1"), [model.bias]).param_groups
    assert len(group["params"]) == 1
    assert group["params"][0] is model.bias


def test_a_rate_is_set_for_all_parameters_and_where_it_is_a_tensor_in_place():
    rate = torch.tensor(1.0)
    first, second = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [first], "lr": rate}, {"params": [second], "lr": 1.0}])
    set_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
    assert optimizer.param_groups[0]["lr"] is rate


# What a run says of its steps.


def test_a_loss_that_is_not_finite_stops_the_run_with_the_step(samples, tmp_path, monkeypatch):
    spec = spec_of("A1")
    model = build_model(spec)
    calls = []

    def poison(*_):
        calls.append(0)
        if len(calls) == 3:
            model.qa_outputs.bias.data.fill_(torch.nan)

    monkeypatch.setattr("qa_lib.train.loop.clip", poison)
    with pytest.raises(ValueError, match=r"--learning-rate .* nan at step 4") as caught:
        trained(spec, samples, tmp_path, model)
    assert caught.value.step == 4
    is_missing = [loss is None for loss in losses_of(tmp_path)]
    assert is_missing[:4] == [False, False, False, True], "and as far as it had run"


def test_the_time_for_inputs_is_of_the_host_and_of_the_measured_steps(
    samples, tmp_path, monkeypatch
):
    """On a clock that only the batches move.

    Choosing takes 2 s, and collating a micro-batch 3, or 300 in the warm-up.
    """
    spec = spec_of("A1", steps=4)
    micro_batches = 2
    batches = batches_of(samples, spec)
    now = 0.0
    steps_begun = 0
    real_step = batches.step
    real_collate = batches.collate

    def step(number):
        nonlocal now, steps_begun
        now += 2.0
        steps_begun += 1
        return real_step(number)

    def collate(*arguments):
        nonlocal now
        now += 3.0 if steps_begun > spec.preset.measure_from else 300.0
        return real_collate(*arguments)

    monkeypatch.setattr("qa_lib.train.loop.time.perf_counter", lambda: now)
    batches.step = step
    batches.collate = collate
    meter = train(build_model(spec), batches, spec, DEVICE, tmp_path, quiet).meter
    cold = 2.0 + 300.0 * micro_batches
    warm = 2.0 + 3.0 * micro_batches
    assert meter.data_s == [cold, cold, warm, warm]
    assert meter.data_ms() == 1e3 * warm


def step_log(folder, steps, begin=0, variant="A1", say=quiet, **scale):
    scaler = torch.amp.GradScaler("cpu", **scale or {"enabled": False})
    return StepLog(folder, spec_of(variant), steps, begin, scaler, ProcessGroup(DEVICE), say)


def write_losses(folder, losses, scale):
    """Have a log write losses while GradScaler has that scale."""
    log = step_log(folder, 20, init_scale=scale)
    log.pending += [(torch.tensor(loss), 1e-3) for loss in losses]
    log.write([0.01] * len(losses))


@pytest.mark.parametrize("scale", [2.0**15, 2.0])
def test_an_overflow_is_excused_while_the_scaler_can_still_back_off(scale, tmp_path):
    write_losses(tmp_path, [1.0, float("inf"), 1.0], scale=scale)
    assert losses_of(tmp_path) == [1.0, None, 1.0]


def test_an_overflow_at_the_least_scale_is_an_error_after_all_steps_were_written(tmp_path):
    with pytest.raises(NonFiniteLoss, match="inf at step 2"):
        write_losses(tmp_path, [1.0, float("inf"), 1.0], scale=1.0)
    assert losses_of(tmp_path) == [1.0, None, 1.0]


def test_the_time_left_does_not_count_compilation(tmp_path, monkeypatch):
    now = 0.0
    said = []
    monkeypatch.setattr("qa_lib.train.step_log.time.monotonic", lambda: now)
    log = step_log(tmp_path, 10, variant="A3", say=said.append)
    for clock in (84.0, 86.0):  # the first step compiles
        now = clock
        log.pending.append((torch.tensor(1.0), 0.1))
        log.write([1.0])
    compiling, progress = said
    assert "compiling" in compiling
    assert "step 2/10" in progress
    assert "01:26 so far, 00:16 left" in progress


def test_a_spoilt_log_loses_only_what_cannot_be_read_and_what_is_trained_once_more(tmp_path):
    """The checkpoint is that of step 3."""
    lines = [
        b'{"step": 1}',
        b'{"st\xff',
        b"[2]",
        b'{"loss": 2}',
        b'{"step": "2"}',
        b'{"step": 3}',
        b'{"step": 4}',
        b'{"ste',
    ]
    (tmp_path / "steps.jsonl").write_bytes(b"\n".join(lines))
    step_log(tmp_path, 5, begin=3)
    assert (tmp_path / "steps.jsonl").read_text() == '{"step": 1}\n{"step": 3}\n'


def log_on_a_clock(folder, monkeypatch, steps, begin=0):
    """A log of a run without compilation, what it says, and a function to note steps at a time."""
    now = 0.0
    said = []
    monkeypatch.setattr("qa_lib.train.step_log.time.monotonic", lambda: now)
    log = step_log(folder, steps, begin=begin, say=said.append)

    def note(count, at):
        nonlocal now
        now = at
        log.pending += [(torch.tensor(1.0), 0.1)] * count
        log.write([0.25] * count)

    return said, note


def test_progress_is_said_at_each_tenth_of_the_steps_and_at_the_last(tmp_path, monkeypatch):
    said, note = log_on_a_clock(tmp_path, monkeypatch, steps=40)
    for number in range(1, 10):
        note(1, at=float(number))
    assert [line.split(",")[0] for line in said] == [
        "A1 seed 0: step 4/40",
        "A1 seed 0: step 8/40",
    ]
    note(30, at=39.0)
    note(1, at=40.0)
    assert said[-1].startswith("A1 seed 0: step 40/40, loss 1.000, ")


def test_progress_is_said_a_minute_after_the_last_line_of_it(tmp_path, monkeypatch):
    said, note = log_on_a_clock(tmp_path, monkeypatch, steps=1000)
    for at in (59.0, 60.0, 119.0, 120.0):
        note(1, at)
    assert [line.split(",")[0] for line in said] == [
        "A1 seed 0: step 2/1000",
        "A1 seed 0: step 4/1000",
    ]


def test_progress_of_a_run_that_goes_on_counts_the_steps_of_this_process(tmp_path, monkeypatch):
    """16 samples a step, 5 steps in 10 s, and 10 to come."""
    said, note = log_on_a_clock(tmp_path, monkeypatch, steps=50, begin=35)
    note(5, at=10.0)
    assert said == ["A1 seed 0: step 40/50, loss 1.000, 8 samples/s, 00:10 so far, 00:20 left"]


def test_of_a_compiled_run_that_goes_on_the_steps_that_are_left_are_told(tmp_path):
    said = []
    step_log(tmp_path, 20, begin=5, variant="A3", say=said.append)
    assert said == ["A3 seed 0: compiling, then 15 steps"]


def test_a_line_of_the_log_has_milliseconds_and_the_rate_of_its_step(tmp_path):
    log = step_log(tmp_path, 5, begin=2)
    log.pending += [(torch.tensor(2.0), 0.5), (torch.tensor(1.0), 0.25)]
    log.write([0.0123456, 1.0])
    assert steps_of(tmp_path) == [
        {"step": 3, "loss": 2.0, "lr": 0.5, "ms": 12.3456},
        {"step": 4, "loss": 1.0, "lr": 0.25, "ms": 1000.0},
    ]


def test_the_noise_scale_stands_at_the_last_step_and_is_of_this_processs_steps(
    tmp_path, monkeypatch
):
    asked = []

    def noise(stats, steps):
        asked.append(steps)
        return Noise(sqr=3.0, var=10.0)

    monkeypatch.setattr("qa_lib.train.grad_noise.StepStats.noise", noise)
    log = step_log(tmp_path, 9, begin=4)
    log.pending += [(torch.tensor(1.0), 0.1)] * 2
    log.write([0.1, 0.1])
    assert asked == [2]
    assert [line.get("phi") for line in steps_of(tmp_path)] == [None, 3.33]


@pytest.mark.parametrize(("world", "steps"), [(1, [3]), (2, [50])])
def test_one_process_looks_at_its_losses_each_second_and_several_every_50_steps(
    world, steps, tmp_path, monkeypatch
):
    now = 0.0
    monkeypatch.setattr("qa_lib.train.step_log.time.monotonic", lambda: now)
    monkeypatch.setattr(ProcessGroup, "mean", lambda ranks, tensor: tensor)
    log = step_log(tmp_path, 60)
    log.ranks.world = world
    meter = Mock(flush=lambda: [0.1] * len(log.pending), is_at_end=False)
    written = []
    for number in range(1, 52 if world > 1 else 4):
        now = 0.4 * number
        log.step(meter, ([], []), torch.tensor(1.0), 0.1)
        if not log.pending:
            written.append(number)
    assert written == steps


def test_steps_are_written_when_the_last_that_is_measured_is_done(tmp_path, monkeypatch):
    """What follows is disturbed, and its energy is not to be counted."""
    clock = itertools.count()  # of which a look at the loss is many ticks away
    monkeypatch.setattr("qa_lib.train.step_log.time.monotonic", lambda: next(clock) * 1e-6)
    log = step_log(tmp_path, 9)
    meter = Meter(DEVICE, warm_up=1, until=4)
    written = []
    for number in range(1, 10):
        log.step(meter, (np.array([3]), np.array([3])), torch.tensor(1.0), 0.1)
        if not log.pending:
            written.append(number)
    assert written == [4, 9]


def test_a_process_that_is_not_the_first_neither_writes_nor_says(tmp_path):
    said = []
    ranks = ProcessGroup(DEVICE)
    ranks.first = False
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    log = StepLog(tmp_path, spec_of("A3"), 1, 0, scaler, ranks, said.append)
    log.pending.append((torch.tensor(1.0), 0.1))
    log.write([0.1])
    assert said == []
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_cannot_be_written_is_one_line(tmp_path):
    log = step_log(tmp_path, 5)
    log.path = tmp_path / "nowhere" / "steps.jsonl"
    log.pending.append((torch.tensor(1.0), 0.1))
    refused(r"^cannot write .*steps\.jsonl: No such file or directory$", log.write, [0.1])
