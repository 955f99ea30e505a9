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


def spec_of(row, settings=None, micro_batch=None, gpu=False, **sizes):
    """A variant at preset smoke, made smaller, on a CPU or for the GPU that is here."""
    sizes = {"steps": 6, "checkpoint_every": 0, "measure_from": 2, "effective_batch": 16} | sizes
    words = {"data": "synthetic:120", "micro_batch": micro_batch} | (
        {"machine": None} if gpu else {}
    )
    return planned(row, settings=settings, sizes=sizes, **words)


def stopped(spec, samples, run_dir, step=4):
    """The folder of a run that was broken off after `step`."""
    run_dir.mkdir()
    with pytest.raises(KeyboardInterrupt):
        train(
            build_model(spec),
            stop_after(batches_of(samples, spec), step),
            spec,
            DEVICE,
            run_dir,
            quiet,
        )
    return run_dir


def weights(model):
    """All of them in a row, of a type that holds each."""
    return torch.cat([p.detach().flatten().float() for p in model.parameters()])


def test_the_learning_rate_rises_to_its_peak_and_no_step_has_a_rate_of_zero():
    spec = spec_of("A1", warmup=0.1)
    rate = spec.preset.learning_rate
    rates = [learning_rate(spec, step, 100) for step in range(100)]
    assert max(rates) == rates[9] == rates[10] == peak_rate(spec) == rate
    assert (rates[0], rates[-1]) == pytest.approx((rate / 10, rate / 90))
    assert np.allclose(np.diff(rates[10:]), -rate / 90)
    for pretrained, factor in ((False, 1), (True, 5)):
        lora = spec_of("B1-all", warmup=0.0, recipe_rates=pretrained)
        assert learning_rate(lora, 0, 100) == peak_rate(lora) == factor * rate


def test_padding_is_to_the_limit_the_longest_or_among_equals(samples):
    def padded(variant):
        batches = Batches(samples, spec_of(variant, micro_batch=8))
        micro_batches = [m for step in range(20) for m in batches.step(step)]
        shapes = [batches.collate(m, DEVICE)["input_ids"].shape for m in micro_batches]
        assert shapes == [(8, batches.padded_length(m)) for m in micro_batches]
        return np.array([shape[1] for shape in shapes]), np.array(
            [samples.lengths[m].max() for m in micro_batches]
        )

    assert set(padded("A3")[0]) == {96}
    lengths, longest = padded("A4-nb")
    assert (
        np.all((lengths >= longest) & (lengths < longest + 32) & (lengths % 32 == 0))
        and len(set(lengths)) > 1
    )
    assert padded("A4")[0].sum() < 0.8 * lengths.sum()


def test_the_scale_of_the_loss_is_off_the_gradients_before_they_are_scaled_down_to_a_norm_of_1():
    parameter, scaler = (
        torch.nn.Parameter(torch.zeros(4)),
        torch.amp.GradScaler("cpu", init_scale=64.0),
    )
    optimizer = torch.optim.SGD([parameter])
    scaler.scale((3.0 * parameter).sum()).backward()
    unscale(optimizer, scaler)
    assert parameter.grad.tolist() == [3.0] * 4
    clip(optimizer, lambda norm: norm)
    assert parameter.grad.tolist() == pytest.approx([0.5] * 4)


@pytest.mark.parametrize(("variant", "modules", "rank"), [("B1", 2, 8), ("B1-all", 6, 32)])
def test_adapters_have_their_rank_and_count_twice(variant, modules, rank):
    """alpha / rank is 2, whatever the rank; which train, test_settings says."""
    adapted = [m for m in build_model(spec_of(variant)).modules() if hasattr(m, "get_base_layer")]
    assert len(adapted) == 2 * modules, "two layers"
    assert {(module.r["default"], module.scaling["default"]) for module in adapted} == {(rank, 2.0)}


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
        spec = spec_of(variant, micro_batch=micro_batch, gpu=device.type == "cuda", steps=3)
        seen, folder = [], tmp_path / str(micro_batch)

        def note(own, *_):
            seen.extend(parameter.grad.clone() for parameter in own)

        monkeypatch.setattr(torch.nn.utils, "clip_grads_with_norm_", note)
        folder.mkdir()
        train(
            without_dropout(build_model(spec)),
            batches_of(samples, spec),
            spec,
            device,
            folder,
            quiet,
        )
        return seen

    for whole, parts in zip(gradients(16), gradients(4), strict=True):
        assert (whole - parts).norm() <= tolerance * whole.norm() + 1e-6


OTHERS = [slow(name) for name in ("A2", "B1", "B2", "C2", "E-adamw")]


@pytest.mark.parametrize("variant", ["C1", "E-dropout-moments", "E-packed-lora-masters", *OTHERS])
def test_resume_is_exact_from_any_checkpoint(variant, samples, tmp_path, monkeypatch):
    spec = spec_of(
        variant, {"compile": "none"}, checkpoint_every=1
    )  # compiling would take a minute
    if spec.asked.half_weights:  # a CPU would adjust it away, but can do it
        spec = resized(spec, {"optimizer": spec.asked.optimizer, "precision": spec.asked.precision})
    whole = weights(trained(spec, samples, tmp_path / "whole")[0])
    for stop in (1, 3, 5):
        run_dir = stopped(spec, samples, tmp_path / f"stopped-at-{stop}", stop)
        model, _, _, begin, refused = trained(spec, samples, run_dir)
        assert begin == stop and refused is None
        assert torch.equal(weights(model), whole), f"after a resume at step {stop}"
        assert [line["step"] for line in steps_of(run_dir)] == list(range(1, spec.preset.steps + 1))


def test_the_compilers_processes_start_where_a_gpus_kernels_are_compiled(monkeypatch):
    started = []
    monkeypatch.setattr(
        "torch._inductor.async_compile.AsyncCompile.wakeup", lambda: started.append(variant)
    )
    for variant, device in (
        ("E-dropout", "cuda"),
        ("E-regions", "cuda"),
        ("D1-cudagraphs", "cuda"),
        ("A4", "cpu"),
    ):
        compilation.start_compilers(VARIANTS[variant].settings, torch.device(device))
    assert started == ["E-dropout", "E-regions"]


def test_elementwise_work_is_repeated_and_products_are_not(monkeypatch):
    """Of a feed-forward block GELU's output is not kept, and no gradient changes. Without code generation, which the
    same partitioner serves."""
    compile_ = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda block, **_: compile_(block, backend="aot_eager", dynamic=False)
    )
    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
    x, kept, gradients = torch.randn(32, 16), {}, {}
    for checkpointing in (False, "elementwise"):
        saved = kept.setdefault(checkpointing, [])
        forward = compilation.compiled(
            block, Settings(compile="inductor", activation_checkpointing=checkpointing)
        )
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(t) or t, lambda t: t
        ):
            loss = forward(x).square().sum()
        gradients[checkpointing] = torch.autograd.grad(loss, block.parameters())
        torch._dynamo.reset()
    assert [sum(tuple(t.shape) == (32, 64) for t in saved) for saved in kept.values()] == [2, 1], (
        "the wide ones"
    )
    assert all(map(torch.equal, *gradients.values()))


DAMAGE = {  # seed of the run that goes on; and whatever else: test_trust
    "a flipped bit": (flip_a_bit, 0, "its digest is not that"),
    "cut off": (lambda p: p.write_bytes(p.read_bytes()[:5000]), 0, "cannot be read"),
    "with other metadata": (
        lambda p: save_file({"x": torch.ones(3)}, p, {"state": "{}"}),
        0,
        "cannot be read",
    ),
    "of another run": (quiet, 1, "began anew, since its checkpoint is of another run"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_wrong_checkpoint_is_named_and_set_aside_and_the_run_begins_anew(
    damage, samples, tmp_path
):
    spec = spec_of("A1", checkpoint_every=2)
    run_dir = stopped(spec, samples, tmp_path / "run")
    spoil, seed, said = DAMAGE[damage]
    spoil(run_dir / checkpoints.CHECKPOINT)
    spec = dataclasses.replace(spec, seed=seed)
    whole = weights(trained(spec, samples, tmp_path / "whole")[0])
    model, _, _, begin, refused = trained(spec, samples, run_dir)
    assert begin == 0 and said in refused and (run_dir / "checkpoint.refused").exists()
    assert torch.equal(weights(model), whole)


def test_a_full_disk_leaves_the_older_checkpoint(samples, tmp_path, monkeypatch):
    spec = spec_of("A1", checkpoint_every=2)

    def fills_up(tensors, path, metadata):
        if (tmp_path / "run" / checkpoints.CHECKPOINT).exists():
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save_file(tensors, path, metadata)

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", fills_up)
        refused(
            r"checkpoint\.safetensors.*No space left.*intact",
            trained,
            spec,
            samples,
            tmp_path / "run",
        )
    assert [p.name for p in (tmp_path / "run").glob("checkpoint*")] == ["checkpoint.safetensors"]
    assert trained(spec, samples, tmp_path / "run")[3] == 2


def test_a_loss_that_is_not_finite_stops_the_run_with_the_step(samples, tmp_path, monkeypatch):
    spec, calls = spec_of("A1"), []
    model = build_model(spec)

    def poison(*_):
        calls.append(0)
        if len(calls) == 3:
            model.qa_outputs.bias.data.fill_(torch.nan)

    monkeypatch.setattr("qa_lib.train.loop.clip", poison)
    with pytest.raises(ValueError, match=r"--learning-rate .* nan at step 4") as caught:
        trained(spec, samples, tmp_path, model)
    assert caught.value.step == 4
    assert [loss is None for loss in losses_of(tmp_path)[:4]] == [
        False,
        False,
        False,
        True,
    ]  # and as far as it had run


def test_the_8bit_optimizer_keeps_small_tensors_and_embeddings_in_32_bits(samples, tmp_path):
    spec = spec_of("C2-8", steps=2)
    model, optimizer, *_ = trained(spec, samples, tmp_path)
    dtypes = {
        name: optimizer.state[p]["state1"].dtype
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    assert len(dtypes) == len(optimizer.state) and torch.uint8 in dtypes.values()
    for name, parameter in model.named_parameters():
        small = parameter.numel() < 4096 or "embeddings" in name
        assert dtypes[name] == (torch.float32 if small else torch.uint8), name
    # Of the next model another parameter is in each place, and nothing keeps this one alive.
    kept = weakref.ref(model.bert.embeddings.word_embeddings)
    del model, optimizer, parameter
    gc.collect()
    assert kept() is None
    lora = spec_of("E-packed-lora")
    model = build_model(lora)
    manager = type(build_optimizer(model, lora).mng).get_instance()
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }
    assert set(manager.pid2config) <= embeddings and not manager.index2config, (
        "frozen embeddings have no place"
    )
    assert isinstance(build_optimizer(build_model(spec_of("A1")), spec_of("A1")), torch.optim.AdamW)


def test_the_time_for_inputs_is_of_the_host_and_of_the_measured_steps(
    samples, tmp_path, monkeypatch
):
    """On a clock that only the batches move: choosing takes 2 s, collating a micro-batch 3, or 300 in the warm-up."""
    now, chosen = [0.0], []
    monkeypatch.setattr("qa_lib.train.loop.time.perf_counter", lambda: now[0])
    spec = spec_of("A1", steps=4)  # two micro-batches a step
    batches = batches_of(samples, spec)

    def slow(real, seconds):
        def called(*words):
            now[0] += seconds()
            return real(*words)

        return called

    batches.step = slow(batches.step, lambda: chosen.append(0) or 2.0)
    batches.collate = slow(
        batches.collate, lambda: 3.0 if len(chosen) > spec.preset.measure_from else 300.0
    )
    meter = train(build_model(spec), batches, spec, DEVICE, tmp_path, quiet)[1]
    assert (meter.data_s, meter.data_ms()) == ([602.0, 602.0, 8.0, 8.0], 8000.0)


def step_log(folder, steps, begin=0, variant="A1", say=quiet, **scale):
    scaler = torch.amp.GradScaler("cpu", **scale or {"enabled": False})
    return StepLog(folder, spec_of(variant), steps, begin, scaler, ProcessGroup(DEVICE), say)


def test_an_overflow_is_excused_while_the_scaler_can_still_back_off(tmp_path):
    def write(losses, scale):
        log = step_log(tmp_path, 20, init_scale=scale)
        log.pending += [(torch.tensor(loss), 1e-3) for loss in losses]
        log.write([0.01] * len(losses))

    write([1.0, float("inf"), 1.0], scale=2.0**15)
    with pytest.raises(NonFiniteLoss, match="inf at step 2"):
        write([1.0, float("inf"), 1.0], scale=1.0)


def test_the_time_left_does_not_count_compilation(tmp_path, monkeypatch):
    now, said = [0.0], []
    monkeypatch.setattr("qa_lib.train.step_log.time.monotonic", lambda: now[0])
    log = step_log(tmp_path, 10, variant="A3", say=said.append)
    for clock in (84.0, 86.0):  # the first step compiles
        now[0] = clock
        log.pending.append((torch.tensor(1.0), 0.1))
        log.write([1.0])
    compiling, progress = said
    assert (
        "compiling" in compiling
        and "step 2/10" in progress
        and "01:26 so far, 00:16 left" in progress
    )


def test_a_spoilt_log_is_gone_on_with_and_loses_only_what_cannot_be_read(tmp_path):
    """Of the steps before the checkpoint, which was the third; what came after them is trained once more."""
    spoilt = (
        b'{"step": 1}\n{"st\xff\n[2]\n{"loss": 2}\n{"step": "2"}\n{"step": 3}\n{"step": 4}\n{"ste'
    )
    (tmp_path / "steps.jsonl").write_bytes(spoilt)
    step_log(tmp_path, 5, begin=3)
    assert (tmp_path / "steps.jsonl").read_text() == '{"step": 1}\n{"step": 3}\n'


def test_what_this_process_compiled_for_an_earlier_run_counts_as_found(monkeypatch):
    compilation.forget_compiled()
    monkeypatch.setattr(compilation, "_compiled_before", False)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    assert not compilation.found_in_cache(), "of the run itself"
    compilation.forget_compiled()
    assert compilation.found_in_cache()
