"""How busy the GPU is: NVML asked between the measured steps, on a GPU that is pretended."""

import sys
import types
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch

from qa_lib.measure import meter as meters

GPU = torch.device("cuda", 1)
LENGTHS = np.array([8, 8])
FREE = types.SimpleNamespace(flops=lambda *_, **__: 0.0)  # the cost of a step


BUSY, LOST = types.SimpleNamespace(gpu=75, memory=20), RuntimeError("GPU is lost")


@pytest.fixture
def nvml(monkeypatch):
    """A GPU without one: NVML answers, that it is 75 % busy, and CUDA's clock is the host's."""
    nvml, clock = Mock(), meters.Stopwatch
    nvml.nvmlDeviceGetTotalEnergyConsumption.return_value = 1000.0
    nvml.nvmlDeviceGetUtilizationRates.return_value = BUSY
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid="a-uuid")
    )
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(meters, "Stopwatch", lambda _: clock(torch.device("cpu")))
    meters._nvml.cache_clear()
    yield nvml
    meters._nvml.cache_clear()


def stretch(meter):
    """A step, and a pause after it."""
    meter.step(LENGTHS, LENGTHS)
    meter.flush()
    meter.resume()


def test_pauses_between_steps_cost_no_energy(nvml):
    """A checkpoint, say, between `flush` and `resume`."""
    meter = meters.Meter(GPU, warm_up=1)

    def spend(millijoules):
        nvml.nvmlDeviceGetTotalEnergyConsumption.return_value += millijoules

    for used, paused in ((1000, 0), (300, 5000), (500, 7000)):  # the first is the warm-up
        spend(used)
        meter.step(LENGTHS, LENGTHS)
        if paused:
            meter.flush()
            spend(paused)
            meter.resume()
    meter.flush()
    spend(9000)
    assert meter.step_ms().n == 2 and meter.joules_per_sample() == pytest.approx(0.8 / 4)


def test_an_energy_counter_that_falls_silent_ends_the_energy_and_not_the_run(nvml):
    meter = meters.Meter(GPU, warm_up=1)
    for problem in (None, LOST, None):
        nvml.nvmlDeviceGetTotalEnergyConsumption.side_effect = problem
        stretch(meter)
    assert meter.joules_per_sample() is None


@pytest.mark.parametrize(("looks", "samples"), [(9, 4 * [0.75]), (2, 2 * [0.75]), (0, [])])
def test_the_own_gpu_is_asked_after_each_measured_stretch_until_it_falls_silent(
    looks, samples, nvml
):
    nvml.nvmlDeviceGetUtilizationRates.side_effect = [BUSY] * looks + [LOST] * 9
    meter = meters.Meter(GPU, warm_up=1)
    for _ in range(5):  # the first is the warm-up
        stretch(meter)
    assert meter.samples == samples
    nvml.nvmlDeviceGetHandleByUUID.assert_called_with("GPU-a-uuid")
    assert meter.speed(FREE, 1.0).gpu_busy == (0.75 if samples else None)
    assert meter.samples == samples


def test_masters_beside_the_model_are_memory_of_the_optimizer():
    """As DeepSpeed has them: the optimizer updates copies in fp32, and not the model's parameters."""
    model = torch.nn.Linear(1024, 1024, bias=False).bfloat16()
    own, copied = (torch.optim.SGD([p]) for p in (model.weight, model.weight.detach().float()))
    view = torch.optim.SGD(
        [torch.nn.Parameter(model.weight.detach()[:512])]
    )  # a share, as P-zero1 has it
    found = [meters.memory_use(model, each, torch.device("cpu")) for each in (own, view, copied)]
    assert [each.optimizer_mib for each in found] == [0.0, 0.0, 4.0]
    now = psutil.Process().memory_info().rss / 2**20
    assert 0.9 * now < found[0].host_rss_mib < 100 * now, "the peak on the host is in MiB, too"
