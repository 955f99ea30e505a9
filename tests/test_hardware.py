"""What is told of the machine, its ceilings, and what a GPU's process may take of it.

The GPU is pretended.
"""

import subprocess
import types
from unittest.mock import Mock

import psutil
import pytest
import torch

from qa_lib.measure import hardware, nvml
from qa_lib.spec.machine import AMPERE, VOLTA

CPU = torch.device("cpu")
GIB = 2**30


@pytest.fixture
def gpu(monkeypatch):
    """The properties of the only GPU, which may be changed: an L4 of 24 GiB."""
    properties = types.SimpleNamespace(
        name="NVIDIA L4", total_memory=24 * GIB, major=8, minor=9, uuid="a-uuid"
    )
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 3,
        "get_device_properties": lambda _: properties,
        "get_device_name": lambda card=0: properties.name,
        "can_device_access_peer": lambda card, other: True,
        "get_device_capability": lambda: (properties.major, properties.minor),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(nvml, "free_bytes", lambda _: 20 * GIB)
    return properties


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def seconds_of_calls(monkeypatch):
    """The seconds of each lap of a stopwatch, which may be changed."""
    seconds = []
    monkeypatch.setattr(hardware, "elapsed", lambda _: seconds.pop(0))
    return seconds


# The device.


def test_a_process_trains_on_the_gpu_of_its_rank(gpu, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert hardware.train_device() == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert hardware.train_device() == torch.device("cuda", 2)


def test_without_a_gpu_a_process_of_any_rank_trains_on_the_cpu(no_gpu, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert hardware.train_device() == CPU


@pytest.mark.parametrize(("gib", "share"), [(6.0, 0.25), (24.0, 1.0), (80.0, 1.0)])
def test_a_limit_of_memory_is_a_share_of_the_gpus_own_and_all_of_it_at_most(
    gib, share, gpu, monkeypatch
):
    limit = Mock()
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", limit)
    hardware.limit_memory(gib)
    limit.assert_called_once_with(share)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_cards_are_locked_in_one_order_whatever_order_they_are_seen_in(
    order, gpu, monkeypatch, tmp_path
):
    """Two runs that each held what the other wants would wait for ever."""
    uuids = {card: types.SimpleNamespace(uuid=letter) for card, letter in enumerate(order)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", uuids.get)
    monkeypatch.setattr(hardware.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    locked = []
    monkeypatch.setattr(hardware.fcntl, "flock", lambda stream, _: locked.append(stream.name[-6]))
    with hardware.gpu_lock(torch.device("cuda")):
        assert locked == ["a", "b"]


# What decides which variants can run.


def test_a_machine_with_gpus_is_told_by_the_first_of_them(gpu):
    machine = hardware.this_machine()
    assert machine.hardware == "l4"
    assert machine.gpus == 3
    assert machine.sm == 89
    assert machine.free_mib == 20 * 1024
    assert machine.total_mib == 24 * 1024


def test_gpus_of_several_kinds_are_named(gpu, monkeypatch):
    assert hardware.this_machine().unlike == ""
    names = {0: "NVIDIA L4", 1: "NVIDIA A10", 2: "NVIDIA L4"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda card=0: names[card])
    assert hardware.this_machine().unlike == "NVIDIA L4 and NVIDIA A10"


@pytest.mark.parametrize("unlinked", [None, (2, 1)])
def test_gpus_are_linked_if_every_two_of_them_are(unlinked, gpu, monkeypatch):
    monkeypatch.setattr(
        nvml, "is_linked", lambda device, other: (device.index, other.index) != unlinked
    )
    assert hardware.this_machine().linked == (unlinked is None)


def test_a_gpu_alone_is_linked_to_none(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert not hardware.this_machine().linked


@pytest.mark.parametrize(("status", "is_linked"), [(0, True), (5, False)])
def test_nvml_tells_whether_two_gpus_are_linked(status, is_linked, monkeypatch):
    library = Mock(NVML_P2P_STATUS_OK=0)
    library.nvmlDeviceGetP2PStatus.return_value = status
    monkeypatch.setattr(nvml, "_nvml", lambda card: (library, card.index))
    cards = [torch.device("cuda", number) for number in range(2)]
    assert nvml.is_linked(*cards) is is_linked
    assert library.nvmlDeviceGetP2PStatus.call_args.args[:2] == (0, 1)


@pytest.mark.parametrize(("sm", "compiles"), [(VOLTA, True), (61, False), (AMPERE, True)])
def test_on_a_gpu_the_compiler_needs_triton_and_a_volta(sm, compiles, gpu, monkeypatch):
    gpu.major, gpu.minor = divmod(sm, 10)
    monkeypatch.setattr(hardware, "version_of", lambda _: "1.0")
    assert hardware.this_machine().compiler is compiles
    monkeypatch.setattr(hardware, "version_of", lambda name: None if name == "triton" else "1.0")
    assert not hardware.this_machine().compiler


@pytest.mark.parametrize("found", ["g++", "clang++", "my-cxx", None])
def test_on_a_cpu_the_compiler_needs_any_compiler_of_cpp(found, no_gpu, monkeypatch):
    monkeypatch.setenv("CXX", "my-cxx")
    monkeypatch.setattr(hardware.shutil, "which", lambda name: name if name == found else None)
    machine = hardware.this_machine()
    assert machine.compiler == (found is not None)
    assert (machine.hardware, machine.gpus, machine.sm, machine.free_mib) == ("cpu", 0, 0, 0)


@pytest.mark.parametrize("missing", ["bitsandbytes", "deepspeed", "peft"])
def test_a_machine_lacks_the_package_that_is_not_installed(missing, no_gpu, monkeypatch):
    monkeypatch.setattr(hardware, "version_of", lambda name: None if name == missing else "1.0")
    machine = hardware.this_machine()
    packages = {name: getattr(machine, name) for name in ("bitsandbytes", "deepspeed", "peft")}
    assert packages == {name: name != missing for name in packages}


# The record's environment.


def test_the_environment_tells_the_first_gpu(gpu, monkeypatch):
    monkeypatch.setattr(hardware, "_nvidia_smi", lambda *_: "570.1\n570.1\n570.1\n")
    told = hardware.environment()
    expected = {"gpu": "NVIDIA L4", "gpu_mem_mib": 24 * 1024, "driver": "570.1", "sm": 89}
    assert {name: told[name] for name in expected} == expected


def test_a_driver_that_nvidia_smi_does_not_tell_is_none(gpu, monkeypatch):
    monkeypatch.setattr(hardware, "_nvidia_smi", lambda *_: "")
    assert hardware.environment()["driver"] is None


def test_without_a_gpu_the_environment_has_none_for_each_of_its_values(no_gpu):
    told = hardware.environment()
    assert [told[name] for name in ("gpu", "gpu_mem_mib", "driver", "sm")] == [None] * 4


def test_the_environment_tells_the_host(no_gpu):
    told = hardware.environment()
    assert told["torch"] == torch.__version__
    assert told["ram_mib"] == round(psutil.virtual_memory().total / 2**20)
    assert told["threads"] == torch.get_num_threads()
    assert told["cpu_count"] == hardware.os.cpu_count()


def test_the_processors_name_is_what_the_system_says_of_the_first(tmp_path, monkeypatch):
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(hardware, "Path", lambda _: info)
    monkeypatch.setattr(hardware.platform, "processor", lambda: "")
    assert hardware._cpu_name() is None
    info.write_text("vendor_id\t: Any\nmodel name\t: Any CPU @ 2 GHz\nmodel name\t: Other\n")
    assert hardware._cpu_name() == "Any CPU @ 2 GHz"


# nvidia-smi.


@pytest.mark.parametrize(
    "problem",
    [
        FileNotFoundError("nvidia-smi"),
        subprocess.CalledProcessError(9, "nvidia-smi"),
        subprocess.TimeoutExpired("nvidia-smi", 20),
    ],
    ids=lambda problem: type(problem).__name__,
)
def test_nvidia_smi_that_is_not_there_or_fails_says_nothing(problem, monkeypatch):
    run = Mock(side_effect=problem)
    monkeypatch.setattr(hardware.subprocess, "run", run)
    assert hardware._nvidia_smi("-L") == ""
    assert run.call_args.kwargs["check"] is True, "or a failure would not be noticed"
    assert run.call_args.kwargs["timeout"] <= 60, "or a GPU that hangs would hold up a run"


# NVML.


def test_nvml_tells_a_gpus_free_bytes_and_busy_share(monkeypatch):
    library = Mock()
    library.nvmlDeviceGetMemoryInfo.return_value = types.SimpleNamespace(free=5, used=7, total=12)
    library.nvmlDeviceGetUtilizationRates.return_value = types.SimpleNamespace(gpu=40, memory=7)
    monkeypatch.setattr(nvml, "_nvml", lambda _: (library, "handle"))
    card = torch.device("cuda", 0)
    assert nvml.free_bytes(card) == 5
    assert nvml.busy_share(card) == 0.4
    assert nvml.free_bytes(CPU) is None


# Ceilings.


def test_a_call_takes_the_least_of_three_means_after_the_warm_up(seconds_of_calls):
    seconds_of_calls += [0.001, 60.0, 40.0, 50.0]
    work = Mock()
    assert hardware._quickest(work, CPU) == 40.0 / hardware.REPEATS
    assert work.call_count == 1 + 3 * hardware.REPEATS


def test_a_product_of_matrices_counts_a_multiplication_and_an_addition(monkeypatch):
    shapes = []

    def quickest(work, device):
        shapes.append(tuple(work().shape))
        return 0.5

    monkeypatch.setattr(hardware, "_quickest", quickest)
    rate = hardware.matrix_rate(CPU, torch.float32)
    ((rows, columns),) = shapes
    assert rate == pytest.approx(2 * rows * columns * rows / 0.5 / 1e12)


@pytest.mark.parametrize(("processes", "factor"), [(2, 1.0), (4, 1.5)])
def test_an_average_over_processes_counts_bytes_as_the_bus_bandwidth_does(
    processes, factor, monkeypatch
):
    monkeypatch.setattr(hardware, "_quickest", lambda *_: 0.5)
    monkeypatch.setattr(hardware.dist, "get_world_size", lambda: processes)
    bytes_of_gradients = 2 * 2**20
    expected = factor * bytes_of_gradients / 0.5 / 1e9
    assert hardware.reduce_rate(CPU) == pytest.approx(expected)
