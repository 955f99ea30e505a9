"""One run after another in one process, as in a notebook's kernel: each is as it would be alone."""

import contextlib
import dataclasses
import math
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch

from qa_lib.lab.launch.anywhere import fit
from qa_lib.lab.launch.driver import SHARE, START, surroundings
from qa_lib.model import build, hf_checkpoint
from qa_lib.model.build import build_model
from qa_lib.records import record
from qa_lib.run.fit import find_engine, limits
from qa_lib.run.recording import out_of_memory
from qa_lib.run.surroundings import Surroundings
from qa_lib.run.tasks import WORKFLOWS
from qa_lib.spec.settings import choices
from qa_lib.spec.tasks import TASKS
from qa_lib.train.step_log import StepFailed
from tests.material import end_of, python, refused
from tests.tiny import CPU, checkpoint, losses_of, planned, quiet


def short(variant="A1", settings=None, micro_batch=None, **sizes):
    """A variant at preset smoke with few steps and no quality, so that nothing is saved."""
    sizes = {"steps": 3, "measure_from": 1, "checkpoint_every": 0, "quality": False} | sizes
    return planned(variant, settings=settings, sizes=sizes, micro_batch=micro_batch)


def scored(monkeypatch, quality):
    """A spec with a task of another metric, whose evaluation gives these scores."""
    task = {
        "name": "toy",
        "metric": "nats",
        "label": "nats a token",
        "higher_is_better": False,
        "scores": [*quality],
    }
    workflow = dataclasses.replace(WORKFLOWS["qa"], evaluate=lambda *_: quality)
    monkeypatch.setitem(record.SCORING, "toy", task)
    card = dataclasses.replace(TASKS["qa"].card, metrics={})
    monkeypatch.setitem(TASKS, "toy", dataclasses.replace(TASKS["qa"], name="toy", card=card))
    monkeypatch.setitem(build.HEADS, "toy", build.HEADS["qa"])
    monkeypatch.setitem(WORKFLOWS, "toy", workflow)
    return short(task="toy", quality=True)


# What a run leaves behind in its process.


@pytest.mark.parametrize("trainable", ["all", "lora-qv"])
def test_a_cell_that_is_run_again_trains_a_new_model(trainable, tmp_path):
    spec = short(settings={"trainable": trainable})
    fit(spec, tmp_path, say=quiet)
    first = losses_of(tmp_path / spec.run_path)
    fit(spec, tmp_path, say=quiet, force=True)
    assert losses_of(tmp_path / spec.run_path) == first


def test_the_first_step_is_timed_of_a_processs_first_run_alone(tmp_path):
    for _ in range(2):
        entry = fit(short(), tmp_path, say=quiet, force=True)
    assert entry["time"]["first_step_s"] is None


def test_preparing_a_steps_data_is_a_part_of_the_step(tmp_path):
    time = fit(short(), tmp_path, say=quiet)["time"]
    assert 0 < time["data_ms"] < time["step_ms"]["p90"]


def test_the_record_counts_the_parameters_that_train_and_the_layers(tmp_path):
    spec = short(settings={"trainable": "lora-qv"})
    entry = fit(spec, tmp_path, say=quiet)
    parameters = build_model(spec).parameters()
    trainable = sum(each.numel() for each in parameters if each.requires_grad)
    assert entry["model"]["params_trainable"] == trainable
    assert entry["model"]["layers"] == 2


def test_a_run_has_the_threads_of_its_record_and_leaves_those_of_its_process(tmp_path):
    threads = torch.get_num_threads()
    entry = fit(short(threads=threads + 1), tmp_path, say=quiet)
    assert entry["env"]["threads"] == threads + 1
    assert entry["spec"]["preset"]["threads"] == threads + 1
    assert torch.get_num_threads() == threads


def test_a_limit_of_memory_ends_with_its_run(monkeypatch):
    given = []
    monkeypatch.setattr("qa_lib.measure.hardware.limit_memory", given.append)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    for spec in (short(limit_gib=4.0), short()):
        with contextlib.suppress(MemoryError), limits(spec, torch.device("cuda")):
            raise MemoryError
    assert given == [4.0, math.inf]


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True)
def test_every_model_of_a_process_is_compiled(tmp_path):
    for micro_batch in (4, 8):
        entry = fit(short("D1", micro_batch=micro_batch), tmp_path, say=quiet)
        assert entry["status"] == "ok"


def test_a_run_without_a_compiler_does_not_import_inductor():
    """It takes seconds. Dynamo's reset would where there is a GPU, and its list of backends."""
    code = "import sys, torch\n"
    code += "from qa_lib.measure import hardware\n"
    code += "from qa_lib.run.fit import forget_compiled\n"
    code += "hardware.this_machine()\n"
    code += "torch.cuda.is_available = lambda: True\n"
    code += "forget_compiled()\n"
    code += "print(*sys.modules)\n"
    imported = set(python("-c", code).stdout.split())
    assert not imported & {"torch._inductor.compile_fx", "torch._dynamo.backends.common"}


# What is finished, and what goes on.


def test_a_finished_run_is_returned_and_not_trained_again(tmp_path):
    spec = short()
    said = []
    first = fit(spec, tmp_path, say=quiet)
    assert fit(spec, tmp_path, say=said.append) == first
    assert said == [
        f"finished on {first['time']['started'][:10]}; to train it anew, give --force, or in "
        "Python force=True"
    ]


@pytest.mark.parametrize(("force", "resumed"), [(False, 2), (True, None)])
def test_a_stopped_run_goes_on_and_one_that_is_forced_drops_its_checkpoint(
    force, resumed, tmp_path, monkeypatch
):
    spec = short(steps=4, checkpoint_every=2)
    with monkeypatch.context() as patch:
        patch.setattr("qa_lib.train.loop.clip", Mock(side_effect=[None] * 3 + [KeyboardInterrupt]))
        with pytest.raises(KeyboardInterrupt):
            fit(spec, tmp_path, say=quiet)
    entry = fit(spec, tmp_path, say=quiet, force=force)
    assert entry["time"]["resumed_from_step"] == resumed
    assert entry["status"] == "ok"


# What is told.


def test_a_chosen_size_is_said_once(tmp_path):
    spec = dataclasses.replace(short(), chosen=["micro_batch"], adjusted=["micro-batch 8: chosen"])
    for _ in range(2):
        said = []
        fit(spec, tmp_path, say=said.append)
        assert said.count("micro-batch 8: chosen") == 1


def test_a_run_too_short_to_time_says_so(tmp_path):
    said = []
    entry = fit(short(steps=3, measure_from=30), tmp_path, say=said.append)
    why = "speed: not measured, too few steps to time: 3, "
    why += "of which the first 30 of a process are warm-up"
    assert entry["speed"]["samples_per_s"] is None
    assert why in entry["spec"]["adjusted"]
    assert f"A1: {why}" in said
    assert len(f"A1: {why}") <= 100


def test_a_run_that_is_timed_says_nothing_of_its_speed(tmp_path):
    adjusted = fit(short(), tmp_path, say=quiet)["spec"]["adjusted"]
    assert not any("speed:" in note for note in adjusted)


def test_a_run_that_waits_says_so_in_its_record(tmp_path, monkeypatch):
    spec = short()
    statuses = []

    @contextlib.contextmanager
    def busy(device, shared, waits):
        waits()
        statuses.append(record.read_record(tmp_path / spec.run_path)["status"])
        yield 1000.0

    monkeypatch.setattr("qa_lib.measure.hardware.gpu_lock", busy)
    entry = fit(spec, tmp_path, say=quiet)
    assert statuses == ["waiting"]
    assert entry["status"] == "ok"
    assert entry["time"]["wall_s"] < 0, "what was waited is no time of the run"


def test_a_run_beside_others_records_no_times(tmp_path, monkeypatch):
    monkeypatch.setattr(Surroundings, "shares", lambda self, device: True)
    entry = fit(short(), tmp_path, say=quiet)
    assert set(entry["speed"].values()) == {None}
    assert set(entry["energy"].values()) == {None}
    step_ms = entry["time"].pop("step_ms")
    assert set(step_ms.values()) == {None}
    known = {name for name, value in entry["time"].items() if value is not None}
    assert known == {"started", "ended", "steps"}
    assert "others shared the GPU" in entry["spec"]["adjusted"][-1]


@pytest.mark.parametrize(
    ("value", "device", "shared"),
    [("1", "cuda", True), ("1", "cpu", False), (None, "cuda", False)],
)
def test_the_environment_says_whether_others_train_on_the_gpu(value, device, shared, monkeypatch):
    monkeypatch.delenv(SHARE, raising=False)
    if value:
        monkeypatch.setenv(SHARE, value)
    assert surroundings().shares(torch.device(device)) is shared


@pytest.mark.parametrize(
    ("start", "began_for_run", "note"),
    [
        (None, True, None),
        ("warm", False, None),
        ("cold, since it is", False, "start: cold, since it is"),
    ],
)
def test_the_environment_says_how_the_process_began(start, began_for_run, note, monkeypatch):
    monkeypatch.delenv(START, raising=False)
    if start:
        monkeypatch.setenv(START, start)
    assert surroundings().began_for_run is began_for_run
    assert surroundings().start_note == note


# The parts of a run.


def test_every_engine_of_the_settings_is_found():
    for name in choices()["engine"]:
        engine = find_engine(name)
        assert isinstance(engine, ModuleType)
        assert callable(engine.train)


def test_a_models_folder_is_inspected_once_by_a_plan_and_once_by_a_run(tmp_path, monkeypatch):
    looks = []
    inspect = hf_checkpoint.inspect_checkpoint

    def noted(folder):
        looks.append(folder)
        return inspect(folder)

    # Both look it up by name, the former when `inspect_source` calls it.
    monkeypatch.setattr(hf_checkpoint, "inspect_checkpoint", noted)
    monkeypatch.setattr(build, "inspect_checkpoint", noted)
    model = checkpoint("bert", tmp_path / "model")
    spec = planned(
        sizes={"steps": 1, "measure_from": 0, "quality": False}, model=model, machine=CPU
    )
    assert len(looks) == 1, "by the plan"
    fit(spec, tmp_path / "runs", say=quiet)
    assert len(looks) == 2, "by the run"


# What ends a run.

WORDS = [
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes",
]


@pytest.mark.parametrize("words", WORDS)
def test_memory_runs_out_in_many_words(words):
    assert out_of_memory(RuntimeError(words))


@pytest.mark.parametrize(
    "problem", [RuntimeError("out of resource: shared memory"), ValueError("out of memory")]
)
def test_other_problems_are_not_of_memory(problem):
    assert not out_of_memory(problem)


def test_a_score_that_json_has_not_makes_the_run_an_error(tmp_path, monkeypatch):
    spec = scored(monkeypatch, {"nats": math.nan, "n": 20})
    with pytest.raises(ValueError, match="not JSON compliant"):
        fit(spec, tmp_path, say=quiet)
    entry = record.read_record(tmp_path / spec.run_path)
    assert entry["status"] == "error"
    assert entry["error"]["kind"] == "ValueError"
    assert entry["quality"] == {"nats": None, "n": 20}
    assert entry["time"]["steps"] == 3


def test_a_disk_that_fills_while_the_model_is_saved_is_one_line(tmp_path, monkeypatch):
    """A record on a full disk is in test_record, a checkpoint in test_train."""
    spec = scored(monkeypatch, {"nats": 1.0, "n": 20})
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("qa_lib.run.fit.save_model", full)
    refused(r"^cannot write .*/model: .*No space left on device$", fit, spec, tmp_path, say=quiet)
    assert end_of(tmp_path / spec.run_path)[0] == "error"


def test_a_run_that_is_out_of_memory_is_a_result(tmp_path, monkeypatch):
    problem = torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr("qa_lib.train.loop.clip", Mock(side_effect=[None, problem]))
    said = []
    entry = fit(short(), tmp_path, say=said.append)
    assert entry["status"] == "oom"
    error = {"kind": "OutOfMemoryError", "message": "CUDA out of memory", "step": 2}
    assert entry["error"] == error
    assert "A1: out of memory in step 2" in said


def test_what_a_step_raises_is_raised_and_its_first_line_is_in_the_record(tmp_path, monkeypatch):
    problem = ValueError("a fault\nin two lines")
    monkeypatch.setattr("qa_lib.train.loop.clip", Mock(side_effect=[None, problem]))
    spec = short()
    with pytest.raises(StepFailed):
        fit(spec, tmp_path, say=quiet)
    entry = record.read_record(tmp_path / spec.run_path)
    assert entry["status"] == "error"
    assert entry["error"] == {"kind": "ValueError", "message": "a fault", "step": 2}
