import dataclasses
import gc
import weakref

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from qa_lib.data.batches import Batches
from qa_lib.data.load import batches_of
from qa_lib.model.build import build_model
from qa_lib.run.fit import train
from qa_lib.spec.settings import Settings
from qa_lib.spec.variants import VARIANTS
from qa_lib.train import checkpoint as checkpoints
from qa_lib.train import compile as compilation
from qa_lib.train.optim import build_optimizer, clip, learning_rate, peak_rate, unscale
from qa_lib.train.parallel.process_group import ProcessGroup
from qa_lib.train.step_log import NonFiniteLoss, StepLog
from tests.conftest import slow
from tests.material import flip_a_bit, refused
from tests.tiny import (
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


def test_a_rival_trains_at_the_rates_of_the_schedule(samples, tmp_path):
    spec = spec_of("E-plain", settings={"compile": "none"}, warmup=0.5)
    trained(spec, samples, tmp_path)
    assert [line["lr"] for line in steps_of(tmp_path)] == rates_of(spec, spec.preset.steps)


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

    for whole, accumulated in zip(gradients(16), gradients(4), strict=True):
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


OTHERS = [slow(name) for name in ("A2", "B1", "B2", "C2", "E-adamw")]


@pytest.mark.parametrize("variant", ["C1", "E-dropout-moments", "E-packed-lora-masters", *OTHERS])
def test_resume_is_exact_from_any_checkpoint(variant, samples, tmp_path):
    # Compiling would take a minute.
    spec = spec_of(variant, {"compile": "none"}, checkpoint_every=1)
    if spec.asked.half_weights:  # a CPU would adjust it away, but can do it
        spec = resized(spec, {"optimizer": spec.asked.optimizer, "precision": spec.asked.precision})
    whole = weights(trained(spec, samples, tmp_path / "whole")[0])
    for stop in (1, 3, 5):
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


@pytest.mark.parametrize(("spoil", "seed", "reason"), DAMAGE)
def test_a_wrong_checkpoint_is_named_and_set_aside_and_the_run_begins_anew(
    spoil, seed, reason, samples, tmp_path
):
    spec = spec_of("A1", checkpoint_every=2)
    run_dir = stopped(spec, samples, tmp_path / "run")
    spoil(run_dir / checkpoints.CHECKPOINT)
    spec = dataclasses.replace(spec, seed=seed)
    whole = weights(trained(spec, samples, tmp_path / "whole")[0])
    model, _, _, begin, note = trained(spec, samples, run_dir)
    assert begin == 0
    assert reason in note
    assert (run_dir / "checkpoint.refused").exists()
    assert torch.equal(weights(model), whole)


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
    _, meter, *_ = train(build_model(spec), batches, spec, DEVICE, tmp_path, quiet)
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


def test_an_overflow_is_excused_while_the_scaler_can_still_back_off(tmp_path):
    write_losses(tmp_path, [1.0, float("inf"), 1.0], scale=2.0**15)
    assert losses_of(tmp_path) == [1.0, None, 1.0]


def test_an_overflow_at_the_least_scale_is_an_error(tmp_path):
    with pytest.raises(NonFiniteLoss, match="inf at step 2"):
        write_losses(tmp_path, [1.0, float("inf"), 1.0], scale=1.0)


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
