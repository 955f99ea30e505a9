"""What NVML, the library behind nvidia-smi, says of a GPU: its energy, how busy it is, free memory.

Each question is answered by None on a CPU, and where the package, the driver, the permission or the
counter is missing: a run goes on without it.
"""

import contextlib
import functools
from collections.abc import Callable

import torch


@functools.cache
def _nvml(device: torch.device):
    """Return the module pynvml, and its handle of a GPU."""
    import pynvml  # a GPU's machine has it, and others need not

    pynvml.nvmlInit()
    # By identity, since NVML does not follow CUDA_VISIBLE_DEVICES.
    uuid = torch.cuda.get_device_properties(device).uuid
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")


def _ask(device: torch.device, question: Callable):
    """Return what `question` answers, called with pynvml and its handle of a GPU."""
    if device.type != "cuda":
        return None
    with contextlib.suppress(Exception):
        nvml, handle = _nvml(device)
        return question(nvml, handle)
    return None


def energy_mj(device: torch.device) -> int | None:
    """Return the millijoules that a GPU has used since its driver was loaded."""
    return _ask(device, lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu))


def busy_share(device: torch.device) -> float | None:
    """Return the share of the last 1/6 to 1 s in which any kernel ran on a GPU.

    A kernel counts however small it is, and be it one that waits for other GPUs. So the share says
    how much of the time the host leaves the GPU idle, where the utilization by GEMMs says how well
    it is used.
    """
    rates = _ask(device, lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu))
    return None if rates is None else rates.gpu / 100


def is_linked(device: torch.device, other: torch.device) -> bool:
    """Return whether two GPUs reach each other's memory over NVLink; False where nobody says."""

    def ask(nvml, gpu):
        _, other_gpu = _nvml(other)
        kind = nvml.NVML_P2P_CAPS_INDEX_NVLINK
        return nvml.nvmlDeviceGetP2PStatus(gpu, other_gpu, kind) == nvml.NVML_P2P_STATUS_OK

    return bool(_ask(device, ask))


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes of a GPU's memory that nobody holds."""
    memory = _ask(device, lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu))
    return None if memory is None else memory.free
