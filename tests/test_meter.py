"""What a run costs: speed, energy, memory; NVML is asked between the measured steps."""

import sys
import types
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

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
    """DeepSpeed has such copies, in fp32 beside the model's parameters."""
    optimizer = torch.optim.SGD([model.weight.detach().float()])
    assert memory_use(model, optimizer, CPU).optimizer_mib == 8.0


def test_a_view_of_the_parameters_is_no_memory_of_the_optimizer(model):
    """P-zero1 has such a view, a share of them."""
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


# Memory of a GPU.


def test_activations_are_what_the_peak_holds_beside_all_that_persists(model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 30 * 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 50 * 2**20)
    optimizer = torch.optim.SGD([model.weight.detach().float()])
    memory = memory_use(model, optimizer, GPU)
    assert memory.peak_alloc_mib == 30.0
    assert memory.peak_reserved_mib == 50.0
    assert memory.activations_mib == 30.0 - (4.0 + 4.0 + 8.0)


def test_memory_that_other_processes_write_into_is_part_of_both_peaks(model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 30 * 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 50 * 2**20)
    memory = memory_use(model, torch.optim.SGD(model.parameters()), GPU, peer_bytes=7 * 2**20)
    assert memory.peak_alloc_mib == 37.0
    assert memory.peak_reserved_mib == 57.0
    assert memory.activations_mib == 37.0 - (4.0 + 4.0)


def test_a_peak_below_what_persists_leaves_no_activations(model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**20)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 2**20)
    assert memory_use(model, torch.optim.SGD(model.parameters()), GPU).activations_mib == 0.0


def test_both_moments_of_an_optimizer_are_its_memory(model):
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    assert memory_use(model, optimizer, CPU).optimizer_mib == pytest.approx(8.0, abs=1e-3)


def test_of_what_is_spread_over_gpus_the_part_here_counts(model):
    spread = Mock(requires_grad=True)
    spread.to_local.return_value = model.weight.detach()
    sharded = types.SimpleNamespace(parameters=lambda: [spread])
    memory = memory_use(sharded, torch.optim.SGD(model.parameters()), CPU)
    assert memory.params_mib == memory.grads_mib == 4.0


def test_the_peak_on_the_host_is_told_by_the_system_in_kib(model, monkeypatch):
    usage = types.SimpleNamespace(ru_maxrss=3 * 1024)
    monkeypatch.setattr(meters.resource, "getrusage", lambda _: usage)
    memory = memory_use(model, torch.optim.SGD(model.parameters()), CPU)
    assert memory.host_rss_mib == 3.0


# Steps.


def test_a_lap_on_a_gpu_is_in_seconds_and_waits_for_its_end():
    begin = Mock()
    end = Mock()
    begin.elapsed_time.return_value = 500.0  # milliseconds
    assert meters.elapsed((begin, end)) == 0.5
    begin.elapsed_time.assert_called_once_with(end)
    end.synchronize.assert_called_once_with()


@pytest.mark.parametrize(("warm_up", "step"), [(5, 3), (2, 2)])
def test_the_memorys_peak_counts_from_the_third_step_or_from_the_first_measured_one(
    warm_up, step, nvml, monkeypatch
):
    meter = Meter(GPU, warm_up)
    reset_at = []
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda: reset_at.append(len(meter.step_counts))
    )
    for _ in range(7):
        do_stretch(meter)
    assert reset_at == [step]


def test_the_first_step_is_when_it_was_done(monkeypatch):
    monkeypatch.setattr(meters.time, "time", Mock(side_effect=[100.0, 200.0]))
    meter = Meter(CPU, warm_up=1)
    assert meter.first_step_at is None
    for _ in range(3):
        do_stretch(meter)
    assert meter.first_step_at == 100.0


@pytest.fixture
def spread_meter():
    """A meter after two warm-up steps and eleven measured ones of 0 to 100 ms."""
    meter = Meter(CPU, warm_up=2)
    meter.times = [9.0, 3.0, *(0.01 * number for number in range(11))]
    return meter


def test_step_times_are_a_median_and_tenths_in_milliseconds(spread_meter):
    times = spread_meter.step_ms()
    assert times.n == 11
    assert [times.p10, times.median, times.p90] == pytest.approx([10.0, 50.0, 90.0])


def test_compilation_is_of_all_steps_of_the_warm_up(spread_meter):
    assert spread_meter.compile_s() == pytest.approx(9.0 + 3.0 - 2 * 0.05)


def test_what_was_compiled_before_the_first_step_is_compilation_too(spread_meter):
    spread_meter.compiled_before_s = 40.0
    assert spread_meter.compile_s() == pytest.approx(40.0 + 9.0 + 3.0 - 2 * 0.05)


def test_compilation_takes_no_less_than_nothing_and_is_unknown_without_a_warm_up(spread_meter):
    spread_meter.times[:2] = [0.01, 0.01]
    assert spread_meter.compile_s() == 0.0
    spread_meter.warm_up = 0
    assert spread_meter.compile_s() is None


def test_the_time_for_inputs_is_the_median_of_measured_steps(spread_meter):
    assert spread_meter.data_ms() is None
    spread_meter.data_s = [9.0, 9.0, 0.002, 0.004, 0.9]
    assert spread_meter.data_ms() == pytest.approx(4.0)


def test_an_energy_counter_that_stands_still_gives_no_energy(nvml):
    meter = Meter(GPU, warm_up=1)
    for _ in range(3):
        do_stretch(meter)
    assert meter.joules == [0.0, 0.0]
    assert meter.joules_per_sample() is None


def test_short_lengths_are_squared_without_overflow():
    """Lengths come as 16-bit numbers."""
    meter = Meter(CPU, warm_up=0)
    lengths = np.full(4, 300, dtype=np.int16)
    meter.step(lengths, lengths)
    (counts,) = meter.step_counts
    assert counts.squares == counts.computed_squares == 4 * 300**2


# Arithmetic.


def test_a_head_that_does_not_train_takes_no_gradient_by_its_weight():
    config = GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=20, n_positions=4)
    model = GPT2LMHeadModel(config)
    whole = meters.StepFlops(model).flops(10, 0)
    model.lm_head.weight.requires_grad = False  # and so the embeddings, whose weight it is
    frozen = meters.StepFlops(model).flops(10, 0)
    assert whole - frozen == 2 * 10 * 20 * 8


def test_steps_after_the_last_measured_one_count_for_nothing(nvml):
    """A profiler, say, slows them."""
    meter = Meter(GPU, warm_up=1, until=3)

    def spend(millijoules: int) -> None:
        nvml.nvmlDeviceGetTotalEnergyConsumption.return_value += millijoules

    for millijoules in (1000, 300, 500, 7000, 7000):
        spend(millijoules)
        do_stretch(meter)
    assert meter.step_ms().n == 2
    assert len(meter.times) == 5
    assert meter.joules_per_sample() == pytest.approx((0.3 + 0.5) / 4)


def test_the_last_measured_step_is_told():
    meter = Meter(CPU, warm_up=1, until=2)
    ends = []
    for _ in range(3):
        meter.step(LENGTHS, LENGTHS)
        ends.append(meter.is_at_end)
    assert ends == [False, True, False]
