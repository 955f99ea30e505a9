"""One run after another in one process, as in a notebook's kernel: each is as it would be alone."""

import contextlib
import dataclasses
import datetime
import math
from types import ModuleType
from unittest.mock import Mock

import psutil
import pytest
import torch

from qa_lib.lab.launch import anywhere
from qa_lib.lab.launch.anywhere import fit
from qa_lib.lab.launch.driver import DRIVER, SHARE, START, surroundings
from qa_lib.measure.meter import Meter
from qa_lib.model import build, hf_checkpoint
from qa_lib.model.build import build_model
from qa_lib.records import record
from qa_lib.run import fit as fitting
from qa_lib.run.fit import find_engine, gpu_turn, limits
from qa_lib.run.recording import (
    checkpoint_files,
    fault_path,
    out_of_memory,
    outcome_of,
    recording,
)
from qa_lib.run.surroundings import Surroundings
from qa_lib.run.tasks import WORKFLOWS
from qa_lib.score.predict import ANSWER, WINDOW
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


def test_speed_is_told_by_the_devices_rate_and_the_number_of_processes(tmp_path, monkeypatch):
    asked = []
    speed = Meter.speed

    def asking(meter, flops, matrix_tflops, world):
        asked.append((matrix_tflops, world))
        return speed(meter, flops, matrix_tflops, world)

    monkeypatch.setattr(Meter, "speed", asking)
    monkeypatch.setattr(fitting.hardware, "matrix_rate", lambda *_: 7.5)
    fit(short(), tmp_path, say=quiet)
    assert asked == [(7.5, 1)]


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


def test_kernels_of_another_gpu_are_left_to_a_spec_that_asks_for_them(monkeypatch):
    asked = []
    monkeypatch.setattr("qa_lib.measure.hardware.restrict_sdpa", asked.append)
    for sm in (None, 75):
        with limits(dataclasses.replace(short(), sm=sm), torch.device("cpu")):
            pass
    assert asked == [75]


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


@pytest.mark.parametrize(("rank", "dropped"), [("0", 1), ("1", 0)])
def test_of_several_processes_the_first_drops_the_checkpoint(rank, dropped, tmp_path, monkeypatch):
    drop = Mock()
    monkeypatch.setattr(anywhere, "_drop_checkpoint", drop)
    monkeypatch.setattr(anywhere, "fit_here", lambda *_: {})
    monkeypatch.setenv("RANK", rank)
    fit(short(), tmp_path, say=quiet, force=True)
    assert drop.call_count == dropped


def test_a_checkpoint_is_not_dropped_while_another_process_has_the_run(tmp_path):
    checkpoint_file, *_ = checkpoint_files(tmp_path)
    checkpoint_file.touch()
    with record.lock(tmp_path), pytest.raises(record.RunTaken):
        anywhere._drop_checkpoint(tmp_path)
    assert checkpoint_file.exists()


def test_a_process_trains_no_other_run_than_the_one_that_it_was_started_for(tmp_path, monkeypatch):
    monkeypatch.setenv(DRIVER, str(tmp_path / "A1-s0-planned" / ".driver.lock"))
    spec = short()
    refused(f"^{spec.run_id}: planned was A1-s0-planned", anywhere.fit_here, spec, tmp_path)
    assert not (tmp_path / spec.run_path).exists()


def test_a_finished_run_leaves_no_checkpoint_and_no_fault(tmp_path):
    with recording(short(), tmp_path, quiet):
        left = [*checkpoint_files(tmp_path), fault_path(tmp_path, 1)]
        for path in left:
            path.touch()
    assert not any(path.exists() for path in left)
    assert {path.name for path in left} == {
        "checkpoint.safetensors",
        "checkpoint.refused",
        "checkpoint.partial",
        "fault-1.json",
    }


def test_a_run_that_fails_keeps_its_checkpoint(tmp_path):
    checkpoint_file, *_ = checkpoint_files(tmp_path)
    with pytest.raises(ZeroDivisionError), recording(short(), tmp_path, quiet):
        checkpoint_file.touch()
        raise ZeroDivisionError
    assert checkpoint_file.exists()


def test_a_run_that_had_its_result_when_the_signal_came_keeps_it(tmp_path, monkeypatch):
    monkeypatch.setattr("qa_lib.run.recording._drop_leftovers", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt), recording(short(), tmp_path, quiet):
        pass
    assert record.read_record(tmp_path)["status"] == "ok"


def test_a_result_that_a_signal_kept_from_being_written_is_written(tmp_path, monkeypatch):
    def interrupted(run_dir, entry, status, error=None):
        entry["status"] = status
        raise KeyboardInterrupt

    monkeypatch.setattr(record, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt), recording(short(), tmp_path, quiet):
        pass
    assert record.read_record(tmp_path)["status"] == "ok"


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


@pytest.mark.parametrize("is_first", [True, False])
def test_a_run_that_has_its_gpu_is_running_and_the_first_process_has_it_for_all(
    is_first, tmp_path, monkeypatch
):
    entry = record.new_record(short(), {})
    held = []

    @contextlib.contextmanager
    def lock(device, shared, waits):
        held.append((device, shared))
        waits()
        yield 2.5

    monkeypatch.setattr("qa_lib.measure.hardware.gpu_lock", lock)
    ranks = Mock(first=is_first)
    record.write_record(tmp_path, entry | {"status": "starting"})
    with gpu_turn(entry, tmp_path, "a GPU", ranks, True) as waited_s:
        status = record.read_record(tmp_path)["status"]
    ranks.start.assert_called_once_with()
    if is_first:
        assert (held, waited_s, status) == ([("a GPU", True)], 2.5, "running")
    else:
        assert (held, waited_s, status) == ([], 0.0, "starting")


def test_the_times_of_a_run_are_those_of_its_parts(tmp_path, monkeypatch):
    """On a clock on which each part takes seconds, and each look at it next to none."""
    quality = {"nats": 1.0, "n": 20}
    spec = scored(monkeypatch, quality)
    now = 1000.0

    def clock():
        nonlocal now
        now += 1e-6
        return now

    def taking(seconds, real):
        def call(*words, **more):
            nonlocal now
            result = real(*words, **more)
            now += seconds
            return result

        return call

    monkeypatch.setattr(fitting.time, "perf_counter", clock)
    for name, seconds in (("prepare", 10.0), ("train", 20.0)):
        monkeypatch.setattr(fitting, name, taking(seconds, getattr(fitting, name)))
    monkeypatch.setattr(fitting, "keep_model", taking(3.0, lambda *_: None))
    workflow = dataclasses.replace(WORKFLOWS["toy"], evaluate=taking(5.0, lambda *_: quality))
    monkeypatch.setitem(WORKFLOWS, "toy", workflow)
    monkeypatch.setattr(fitting, "_run_ids", [])
    begun = psutil.Process().create_time()
    time = fit(spec, tmp_path, say=quiet)["time"]
    parts = [time[name] for name in ("prepare_s", "eval_s", "wall_s")]
    assert parts == pytest.approx([10.0, 5.0, 38.0], abs=0.1)
    since = datetime.datetime.fromisoformat(time["started"]).timestamp() - begun
    assert since - 2 < time["first_step_s"] < since + 600, "since the process began"


def test_a_process_that_was_not_started_for_its_run_says_how_it_began(tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "_run_ids", [])
    forked = Surroundings(began_for_run=False, start_note="start: cold")
    entry = fitting.fit(short(steps=1), tmp_path, say=quiet, surroundings=forked)
    assert entry["time"]["first_step_s"] is None
    assert "start: cold" in entry["spec"]["adjusted"]


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


def test_a_model_that_answers_keeps_the_lengths_of_its_run(tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "save_model", lambda *_: None)
    monkeypatch.setattr(fitting, "write_card", lambda *_: None)
    spec = short(max_length=64, stride=16, max_answer_length=9)
    model = Mock()
    fitting.keep_model(model, Mock(), tmp_path / "model", record.new_record(spec, {}))
    (lengths,) = model.config.update.call_args.args
    assert [lengths[name] for name in (*WINDOW, ANSWER)] == [64, 16, 9]


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


def test_memory_that_ran_out_may_have_led_to_another_error():
    problem = ValueError("the graph could not be ended")
    problem.__context__ = MemoryError()
    assert out_of_memory(problem)


def test_an_error_of_files_is_one_whatever_its_class_unless_it_is_a_steps():
    assert outcome_of(FileNotFoundError(2, "no file"))["error"]["kind"] == "OSError"
    failed = StepFailed(3)
    failed.__cause__ = FileNotFoundError(2, "no compiler")
    error = outcome_of(failed)["error"]
    assert error["kind"] == "FileNotFoundError"
    assert error["step"] == 3


def test_a_run_that_is_out_of_memory_before_its_steps_says_so(tmp_path, monkeypatch):
    said = []
    with recording(short(), tmp_path, said.append):
        raise MemoryError
    assert said == ["A1: out of memory before training"]


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
