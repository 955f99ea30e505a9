"""What a run costs: speed, energy, memory; NVML is asked between the measured steps."""

import sys
import types
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch

from qa_lib.measure import hardware
from qa_lib.measure import meter as meters
from qa_lib.measure import nvml as nvml_module
from qa_lib.measure.meter import Meter, memory_use

CPU = torch.device("cpu")
GPU = torch.device("cuda", 1)
LENGTHS = np.array([8, 8])
FREE = types.SimpleNamespace(flops=lambda *_, **__: 0.0)  # the cost of a step
BUSY = types.SimpleNamespace(gpu=75, memory=20)  # NVML's answer, in percent
LOST = RuntimeError("GPU is lost")


@pytest.fixture
def nvml(monkeypatch):
    """NVML's module on a GPU that is pretended, 75 % busy, and timed by the host's clock."""
    nvml = Mock()
    nvml.nvmlDeviceGetTotalEnergyConsumption.return_value = 1000.0
    nvml.nvmlDeviceGetUtilizationRates.return_value = BUSY
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid="a-uuid")
    )
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    stopwatch = meters.Stopwatch
    monkeypatch.setattr(meters, "Stopwatch", lambda _: stopwatch(CPU))
    nvml_module._nvml.cache_clear()
    yield nvml
    nvml_module._nvml.cache_clear()


def do_stretch(meter: Meter) -> None:
    """A measured stretch of one step, and a pause after it."""
    meter.step(LENGTHS, LENGTHS)
    meter.flush()
    meter.resume()


# Energy.


def test_energy_is_of_the_measured_steps_and_not_of_pauses_between_them(nvml):
    """A checkpoint, say, is written between `flush` and `resume`."""
    meter = Meter(GPU, warm_up=1)

    def spend(millijoules: int) -> None:
        nvml.nvmlDeviceGetTotalEnergyConsumption.return_value += millijoules

    spend(1000)
    meter.step(LENGTHS, LENGTHS)  # the warm-up
    for in_step, in_pause in ((300, 5000), (500, 7000)):
        spend(in_step)
        meter.step(LENGTHS, LENGTHS)
        meter.flush()
        spend(in_pause)
        meter.resume()
    meter.flush()
    spend(9000)
    assert meter.step_ms().n == 2
    samples = 4
    assert meter.joules_per_sample() == pytest.approx((0.3 + 0.5) / samples)


def test_an_energy_counter_that_falls_silent_ends_the_energy_and_not_the_run(nvml):
    meter = Meter(GPU, warm_up=1)
    for problem in (None, LOST, None):
        nvml.nvmlDeviceGetTotalEnergyConsumption.side_effect = problem
        do_stretch(meter)
    assert meter.joules_per_sample() is None


def test_a_cpu_has_no_energy():
    meter = Meter(CPU, warm_up=1)
    for _ in range(3):
        do_stretch(meter)
    assert meter.joules_per_sample() is None


# How busy the GPU is.


@pytest.mark.parametrize(("answers", "shares"), [(9, 4 * [0.75]), (2, 2 * [0.75]), (0, [])])
def test_nvml_is_asked_after_each_measured_stretch_until_it_falls_silent(answers, shares, nvml):
    nvml.nvmlDeviceGetUtilizationRates.side_effect = [BUSY] * answers + [LOST] * 9
    meter = Meter(GPU, warm_up=1)
    for _ in range(5):  # the first is the warm-up
        do_stretch(meter)
    assert meter.busy_shares == shares
    assert meter.speed(FREE, 1.0).gpu_busy == (0.75 if shares else None)


def test_reading_the_speed_asks_nvml_no_more(nvml):
    meter = Meter(GPU, warm_up=1)
    for _ in range(3):
        do_stretch(meter)
    meter.speed(FREE, 1.0)
    assert len(meter.busy_shares) == 2


def test_nvml_is_asked_about_the_runs_own_gpu(nvml):
    meter = Meter(GPU, warm_up=1)
    for _ in range(2):
        do_stretch(meter)
    nvml.nvmlDeviceGetHandleByUUID.assert_called_with("GPU-a-uuid")


def test_polled_shares_count_from_the_first_measured_step(nvml):
    meter = Meter(GPU, warm_up=1)
    for share in (1.0, 0.5, 0.3):
        meter.polled_busy_shares.append(share)
        do_stretch(meter)
    assert meter.speed(FREE, 1.0).gpu_busy_polled == pytest.approx(0.4)


# Speed.


@pytest.fixture
def timed_meter():
    """A meter after a warm-up step and two measured ones of 0.5 s."""
    meter = Meter(CPU, warm_up=1)
    for _ in range(3):
        meter.step(real_lengths=np.array([2, 4]), computed_lengths=np.array([4, 4]))
    meter.laps.clear()
    meter.times = [9.0, 0.5, 0.5]
    return meter


def test_rates_are_of_the_measured_steps(timed_meter):
    speed = timed_meter.speed(FREE, 1.0)
    assert speed.samples_per_s == 4
    assert speed.tokens_per_s == 12
    assert speed.tokens_per_s_padded == 16
    assert speed.pad_fraction == 0.25


def test_utilization_is_of_the_needed_flops_and_padded_of_all_that_is_computed(timed_meter):
    step = Mock()
    step.flops.side_effect = [2e12, 3e12]  # a second
    speed = timed_meter.speed(step, matrix_tflops=4.0, devices=2)
    assert speed.gemm_utilization == 0.25
    assert speed.gemm_utilization_padded == 0.375
    needed, computed = step.flops.call_args_list
    assert needed.args == (12, 2 * (2**2 + 4**2))
    assert computed.args == (16, 2 * (4**2 + 4**2))
    assert computed.kwargs == {"recompute": True}


def test_compilation_is_what_the_warm_up_took_longer_than_measured_steps(timed_meter):
    assert timed_meter.compile_s() == pytest.approx(9.0 - 0.5)


def test_without_a_measured_step_there_is_no_speed():
    meter = Meter(CPU, warm_up=2)
    do_stretch(meter)
    assert meter.speed(FREE, 1.0).samples_per_s is None
    assert meter.step_ms().median is None
    assert meter.compile_s() is None


# Memory.


@pytest.fixture
def model():
    """4 MiB of parameters in bf16."""
    return torch.nn.Linear(1024, 2048, bias=False).bfloat16()


def test_parameters_and_gradients_are_memory_of_their_own(model):
    memory = memory_use(model, torch.optim.SGD(model.parameters()), CPU)
    assert memory.params_mib == 4.0
    assert memory.grads_mib == 4.0
    assert memory.optimizer_mib == 0.0


def test_parameters_that_do_not_train_have_no_gradients(model):
    model.weight.requires_grad = False
    memory = memory_use(model, torch.optim.SGD(model.parameters()), CPU)
    assert memory.grads_mib == 0.0


def test_copies_that_the_optimizer_updates_are_its_memory(model):
    """As DeepSpeed has them, in fp32 beside the model's parameters."""
    optimizer = torch.optim.SGD([model.weight.detach().float()])
    assert memory_use(model, optimizer, CPU).optimizer_mib == 8.0


def test_a_view_of_the_parameters_is_no_memory_of_the_optimizer(model):
    """As P-zero1 has it, a share of them."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(model.weight.detach()[:512])])
    assert memory_use(model, optimizer, CPU).optimizer_mib == 0.0


def test_the_peak_on_the_host_is_in_mib(model):
    memory = memory_use(model, torch.optim.SGD(model.parameters()), CPU)
    now_mib = psutil.Process().memory_info().rss / 2**20
    assert 0.9 * now_mib < memory.host_rss_mib < 100 * now_mib


# Ceilings.


def test_a_copy_counts_the_bytes_that_it_reads_and_those_that_it_writes(monkeypatch):
    monkeypatch.setattr(hardware, "_quickest", lambda work, device: 1.0)
    assert hardware.copy_rate(CPU) == pytest.approx(2 * 4 * 2**24 / 1e9)
