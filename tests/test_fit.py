"""One run after another in one process, as in a notebook's kernel: each must be as it would be alone."""

import contextlib
import dataclasses
import math
from unittest.mock import Mock

import pytest
import torch

from qa_lib.model.build import HEADS, build_model
from qa_lib.records import record
from qa_lib.run.fit import EVALUATIONS, LOADERS, _limits, fit, out_of_memory
from qa_lib.spec.tasks import TASKS
from qa_lib.train.step_log import StepFailed
from tests.material import end_of, python, refused
from tests.tiny import losses_of, planned, quiet


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
    monkeypatch.setitem(record.SCORING, "toy", task)
    card = dataclasses.replace(TASKS["qa"].card, metrics={})
    monkeypatch.setitem(TASKS, "toy", dataclasses.replace(TASKS["qa"], name="toy", card=card))
    for table, own in (
        (HEADS, HEADS["qa"]),
        (LOADERS, LOADERS["qa"]),
        (EVALUATIONS, lambda *_: quality),
    ):
        monkeypatch.setitem(table, "toy", own)
    return short(task="toy", quality=True)


@pytest.mark.parametrize("trainable", ["all", "lora-qv"])
def test_a_cell_that_is_run_again_trains_a_new_model(trainable, tmp_path):
    spec = short(settings={"trainable": trainable})
    fit(spec, tmp_path, say=quiet)
    first = losses_of(tmp_path / spec.run_path)
    entry = fit(spec, tmp_path, say=quiet, force=True)
    assert losses_of(tmp_path / spec.run_path) == first
    assert entry["time"]["first_step_s"] is None, "which is of a process's first run"
    assert 0 < entry["time"]["data_ms"] < entry["time"]["step_ms"]["p90"]
    trains = sum(p.numel() for p in build_model(spec).parameters() if p.requires_grad)
    assert (entry["model"]["params_trainable"], entry["model"]["layers"]) == (trains, 2)


def test_a_finished_run_is_returned_and_not_trained_again(tmp_path):
    spec, said = short(), []
    first = fit(spec, tmp_path, say=quiet)
    assert fit(spec, tmp_path, say=said.append) == first
    assert said == [
        f"finished on {first['time']['started'][:10]}; to train it anew, give --force, or in Python "
        "force=True"
    ]


def test_a_run_that_is_forced_drops_its_checkpoint(tmp_path, monkeypatch):
    spec = short(steps=4, checkpoint_every=2)
    for force, resumed in ((False, 2), (True, None)):
        with monkeypatch.context() as patch:
            patch.setattr(
                "qa_lib.train.loop.clip", Mock(side_effect=[None] * 3 + [KeyboardInterrupt])
            )
            with pytest.raises(KeyboardInterrupt):
                fit(spec, tmp_path, say=quiet, force=True)
        entry = fit(spec, tmp_path, say=quiet, force=force)
        assert entry["time"]["resumed_from_step"] == resumed and entry["status"] == "ok"


def test_a_chosen_size_is_said_once(tmp_path):
    spec = dataclasses.replace(short(), chosen=["micro_batch"], adjusted=["micro-batch 8: chosen"])
    for _ in range(2):
        said = []
        fit(spec, tmp_path, say=said.append)
        assert said.count("micro-batch 8: chosen") == 1


def test_a_run_too_short_to_time_says_so(tmp_path):
    spec, said = short(steps=3, measure_from=30), []
    entry = fit(spec, tmp_path, say=said.append)
    why = "speed: not measured, too few steps to time: 3, of which the first 30 of a process are warm-up"
    assert entry["speed"]["samples_per_s"] is None and why in entry["spec"]["adjusted"]
    assert f"A1: {why}" in said and len(f"A1: {why}") <= 100
    assert not any("speed:" in why for why in fit(short(), tmp_path, say=quiet)["spec"]["adjusted"])


def test_a_run_without_a_compiler_does_not_import_inductor():
    """Which takes seconds. Where there is a GPU, Dynamo's reset would, and its list of backends everywhere."""
    code = "import sys; from qa_lib.run.fit import forget_compiled, hardware, torch; hardware.this_machine();"
    code += "torch.cuda.is_available = lambda: True; forget_compiled(); print(*sys.modules)"
    assert not {"torch._inductor.compile_fx", "torch._dynamo.backends.common"} & {
        *python("-c", code).stdout.split()
    }


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True)
def test_every_model_of_a_process_is_compiled(tmp_path):
    for micro_batch in (4, 8):
        assert fit(short("D1", micro_batch=micro_batch), tmp_path, say=quiet)["status"] == "ok"


WORDS = """CUDA error: out of memory
Triton Error [CUDA]: out of memory
CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`
DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"""


def test_memory_runs_out_in_many_words():
    assert all(out_of_memory(RuntimeError(words)) for words in WORDS.splitlines())
    assert not any(
        map(
            out_of_memory,
            (RuntimeError("out of resource: shared memory"), ValueError("out of memory")),
        )
    )


def test_a_score_that_json_has_not_makes_the_run_an_error(tmp_path, monkeypatch):
    spec = scored(monkeypatch, {"nats": math.nan, "n": 20})
    with pytest.raises(ValueError, match="not JSON compliant"):
        fit(spec, tmp_path, say=quiet)
    entry = record.read_record(tmp_path / spec.run_path)
    assert (entry["status"], entry["error"]["kind"]) == ("error", "ValueError")
    assert entry["quality"] == {"nats": None, "n": 20} and entry["time"]["steps"] == 3


def test_a_disk_that_fills_while_the_model_is_saved_is_one_line(tmp_path, monkeypatch):
    """A record on a full disk is in test_record, a checkpoint in test_train."""
    spec = scored(monkeypatch, {"nats": 1.0, "n": 20})
    monkeypatch.setattr(
        "qa_lib.run.fit.save_model", Mock(side_effect=OSError(28, "No space left on device"))
    )
    refused(r"^cannot write .*/model: .*No space left on device$", fit, spec, tmp_path, say=quiet)
    assert end_of(tmp_path / spec.run_path)[0] == "error"


def test_a_run_has_the_threads_of_its_record_and_leaves_those_of_its_process(tmp_path):
    threads = torch.get_num_threads()
    entry = fit(short(threads=threads + 1), tmp_path, say=quiet)
    found = entry["env"]["threads"], entry["spec"]["preset"]["threads"], torch.get_num_threads()
    assert found == (threads + 1, threads + 1, threads)


def test_a_limit_of_memory_ends_with_its_run(monkeypatch):
    limits = []
    monkeypatch.setattr("qa_lib.measure.hardware.limit_memory", limits.append)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    for each in (short(limit_gib=4.0), short()):
        with contextlib.suppress(MemoryError), _limits(each, torch.device("cuda")):
            raise MemoryError
    assert limits == [4.0, math.inf]


def test_a_run_that_waits_says_so_in_its_record(tmp_path, monkeypatch):
    spec = short()

    @contextlib.contextmanager
    def busy(device, shared, waits):
        waits()
        assert record.read_record(tmp_path / spec.run_path)["status"] == "waiting"
        yield 1000.0

    monkeypatch.setattr("qa_lib.measure.hardware.gpu_lock", busy)
    entry = fit(spec, tmp_path, say=quiet)
    assert entry["status"] == "ok" and entry["time"]["wall_s"] < 0, (
        "what was waited is no time of the run"
    )


def test_a_run_beside_others_records_no_times(tmp_path, monkeypatch):
    monkeypatch.setattr("qa_lib.run.fit.shares_gpu", lambda device: True)
    entry = fit(short(), tmp_path, say=quiet)
    assert set(entry["speed"].values()) == set(entry["energy"].values()) == {None}
    known = {name for name, value in entry["time"].items() if value is not None} - {"step_ms"}
    assert known == {"started", "ended", "steps"} and set(entry["time"]["step_ms"].values()) == {
        None
    }
    assert "others shared the GPU" in entry["spec"]["adjusted"][-1]


FAULTS = (
    (torch.OutOfMemoryError("CUDA out of memory"), "oom"),
    (ValueError("a fault\nin two lines"), "error"),
)


@pytest.mark.parametrize(("problem", "status"), FAULTS)
def test_what_ends_a_run_is_in_its_record(problem, status, tmp_path, monkeypatch):
    monkeypatch.setattr("qa_lib.train.loop.clip", Mock(side_effect=[None, problem]))
    spec = short()
    with contextlib.nullcontext() if status == "oom" else pytest.raises(StepFailed):
        fit(spec, tmp_path, say=quiet)
    entry = record.read_record(tmp_path / spec.run_path)
    error = {"kind": type(problem).__name__, "message": str(problem).split("\n")[0], "step": 2}
    assert (entry["status"], entry["error"]) == (status, error)
