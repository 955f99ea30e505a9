"""Kernel time is read from the last steps of a run, which are not timed."""

from unittest.mock import MagicMock

import pytest
import torch

from qa_lib.data.batches import BUCKET
from qa_lib.measure import trace
from qa_lib.measure.kernel_time import KernelTime
from qa_lib.measure.meter import Hooks, Meter
from qa_lib.run.fit import hooks_of
from qa_lib.run.notes import why_untimed
from tests.tiny import planned

GPU = torch.device("cuda")


@pytest.fixture
def profiler(monkeypatch):
    """A profiler that sees, in all profiled steps, two kernels of which 2 ms overlap."""
    stand_in = MagicMock()
    monkeypatch.setattr(torch.cuda, "synchronize", MagicMock())
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: stand_in)
    kernels = [
        {"cat": "kernel", "name": "a", "ts": 0.0, "dur": 5000.0},
        {"cat": "gpu_memcpy", "name": "b", "ts": 3000.0, "dur": 4000.0},
        {"cat": "cpu_op", "name": "c", "ts": 0.0, "dur": 90000.0},
    ]
    monkeypatch.setattr(trace, "export", lambda _: b"")
    monkeypatch.setattr(trace, "read", lambda _: kernels)
    return stand_in


def test_the_last_steps_are_profiled_and_read(profiler):
    hooks = KernelTime(steps=20, untimed_steps=4)
    for number in range(1, 21):
        hooks.finished(number)
        assert (profiler.start.called, profiler.stop.called) == (number >= 16, number == 20)
    assert hooks.kernel_ms == pytest.approx(7.0 / 4)


def test_a_run_that_is_resumed_in_its_last_steps_has_no_kernel_time(profiler):
    hooks = KernelTime(steps=20, untimed_steps=4)
    hooks.finished(19)
    hooks.finished(20)
    assert hooks.kernel_ms is None
    assert not profiler.start.called


def test_runs_that_are_timed_alone_on_a_gpu_are_profiled():
    spec = planned(sizes={"quality": False, "measure_from": 100})
    assert isinstance(hooks_of(spec, 300, GPU, shared=False), KernelTime)


def test_of_batches_that_differ_in_length_a_whole_span_is_profiled():
    spec = planned("A4", sizes={"quality": False, "measure_from": 100})
    assert hooks_of(spec, 300, GPU, shared=False).untimed_steps == BUCKET


@pytest.mark.parametrize(
    ("quality", "steps", "device", "shared"),
    [
        (True, 300, "cuda", False),
        (False, 105, "cuda", False),
        (False, 300, "cpu", False),
        (False, 300, "cuda", True),
    ],
    ids=["scored", "short", "on a CPU", "shared"],
)
def test_other_runs_are_not_profiled(quality, steps, device, shared):
    spec = planned(sizes={"quality": quality, "measure_from": 100})
    assert type(hooks_of(spec, steps, torch.device(device), shared)) is Hooks


def test_a_run_of_which_only_untimed_steps_are_left_says_that_it_has_no_speed():
    meter = Meter(torch.device("cpu"), warm_up=1, until=0)
    meter.times = [0.1, 0.1, 0.1]
    assert "too few steps to time" in why_untimed(meter)
