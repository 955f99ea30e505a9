"""The machine: its device, what it can do, whose turn on its GPU it is, and its measured ceilings."""

import contextlib
import fcntl
import os
import platform
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from qa_lib.errors import UserError
from qa_lib.measure.meter import MIB, Stopwatch, ask_nvml, elapsed
from qa_lib.packages import adapters_fault, is_torchao_usable, version_of
from qa_lib.record import open_to_write
from qa_lib.spec import Machine, hardware_name
from qa_lib.variants import AMPERE, VOLTA

TIMES = 10  # that what is timed is done in a row


def train_device() -> torch.device:
    """The device that runs train on: the first visible GPU, or of several processes each its own; else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def limit_memory(gib: float) -> None:
    """Let this process allocate so much of the GPU's memory and no more; what exceeds it ends as out of memory."""
    torch.cuda.set_per_process_memory_fraction(
        min(1.0, gib * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    )


def restrict_sdpa(sm: int) -> None:
    """Leave PyTorch's attention in this process the kernels that a GPU of that capability has."""
    if sm < AMPERE:  # FlashAttention and cuDNN's attention need it
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)


@contextlib.contextmanager
def gpu_lock(device: torch.device, shared: bool = False, waits: Callable[[], None] = lambda: None):
    """Hold the GPU: one run at a time trains on it, while others prepare, so that none is timed beside another; or
    any number of `shared` ones, which are not timed. The first of several processes holds the GPUs of all of them.

    `waits` is called before it waits for others, if it must. Yields the seconds waited. On a CPU nobody waits: its runs
    have threads of their own.
    """
    begin = time.perf_counter()
    if device.type != "cuda":
        yield 0.0
        return
    cards = range(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    with contextlib.ExitStack() as held:
        # In one order for all runs: two that each hold what the other waits for would wait for ever.
        for uuid in sorted(str(torch.cuda.get_device_properties(card).uuid) for card in cards):
            stream = held.enter_context(
                open_to_write(Path(tempfile.gettempdir(), f"qa_lib-{os.getuid()}-{uuid}.lock"), "a")
            )
            try:
                fcntl.flock(stream, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                waits()
                fcntl.flock(stream, kind)
        yield time.perf_counter() - begin


def this_machine() -> Machine:
    """What decides which variants can run here."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    sm = int("{}{}".format(*torch.cuda.get_device_capability())) if gpus else 0
    compiler = any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++")))
    return Machine(
        hardware=hardware_name(torch.cuda.get_device_name() if gpus else None),
        gpus=gpus,
        sm=sm,
        free_mib=_free_mib() if gpus else 0,
        total_mib=int(torch.cuda.get_device_properties(0).total_memory / MIB) if gpus else 0,
        **{
            package: version_of(package) is not None
            for package in ("bitsandbytes", "deepspeed", "peft")
        },
        torchao=is_torchao_usable(),
        adapters_fault=adapters_fault(),
        compiler=version_of("triton") is not None and sm >= VOLTA if gpus else compiler,
    )


def _free_mib() -> int:
    """MiB of the first GPU's memory that nobody holds; all of it where NVML does not say."""
    found = ask_nvml(torch.device("cuda", 0), "nvmlDeviceGetMemoryInfo")
    return int((found.free if found else torch.cuda.get_device_properties(0).total_memory) / MIB)


def libraries() -> dict[str, str | None]:
    """Versions of Python and of the packages that a training's numbers depend on."""
    packages = ("torch", "transformers", "peft", "bitsandbytes", "deepspeed", "torchao")
    return {"python": platform.python_version(), **{name: version_of(name) for name in packages}}


def environment() -> dict:
    """The record's `env`: versions and hardware; null where there is no GPU."""
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    driver = (
        _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").split() if gpu else []
    )
    return {
        **libraries(),
        "cuda": torch.version.cuda,
        "gpu": gpu.name if gpu else None,
        "gpu_mem_mib": round(gpu.total_memory / MIB) if gpu else None,
        "driver": driver[0] if driver else None,
        "sm": gpu.major * 10 + gpu.minor if gpu else None,
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "ram_mib": round(psutil.virtual_memory().total / MIB),
    }


def interconnect() -> str | None:
    """How the first two GPUs that this process sees are connected, as nvidia-smi names it: NV18 is 18 NVLinks, PIX one
    PCIe switch, SYS the way through both processors. None where it does not say, or sees one GPU alone."""
    # By identity, since nvidia-smi does not follow CUDA_VISIBLE_DEVICES.
    seen = [
        f"GPU-{torch.cuda.get_device_properties(card).uuid}"
        for card in range(min(2, torch.cuda.device_count()))
    ]
    known = _nvidia_smi("--query-gpu=uuid", "--format=csv,noheader").split()
    if len(seen) < 2 or not set(seen) <= set(known):
        return None
    first, second = map(known.index, seen)
    rows = [line.split() for line in _nvidia_smi("topo", "-m").splitlines()]
    named = {
        row[0]: row[1:] for row in rows if "X" in row
    }  # a row of the table has an X in its own column
    return named[f"GPU{first}"][second] if f"GPU{first}" in named else None


def polled_utilization() -> float:
    """The share of its last sampling period in which a GPU was busy, the mean over all GPUs of this host, whoever uses
    them: what one call of nvidia-smi says, which starts a program and takes its time. Raises UserError where it does
    not say."""
    said = _nvidia_smi("--query-gpu=utilization.gpu", "--format=csv,noheader,nounits").split()
    try:
        return statistics.mean(map(int, said)) / 100
    except ValueError:
        raise UserError(
            f"nvidia-smi does not tell the GPUs' utilization (it says {' '.join(said)[:80]!r})"
        ) from None


def _nvidia_smi(*words: str) -> str:
    """What nvidia-smi prints; nothing where it is not there or fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            ["nvidia-smi", *words], capture_output=True, text=True, check=True, timeout=20
        ).stdout
    return ""


def _cpu_name() -> str | None:
    info = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return named[1] if named else platform.processor() or None


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measured TFLOP/s of one large square GEMM on random data: the ceiling that MFU is a share of. Measured anew
    for each run, since a GPU at its power limit has not the same clock twice."""
    size = 8192 if device.type == "cuda" else 1024
    a, b, out = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(3))
    seconds = _quickest(lambda: torch.matmul(a, b, out=out), device)
    a = b = out = None  # and the memory goes back
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # of this stream, which a CUDA graph does not use
        torch.cuda.empty_cache()
    return 2 * size**3 / seconds / 1e12


def copy_rate(device: torch.device) -> float:
    """Measured GB/s (10^9 bytes, read and written) of copying a tensor far larger than the caches."""
    source = torch.zeros(2**28 if device.type == "cuda" else 2**24, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _quickest(lambda: target.copy_(source), device) / 1e9


def reduce_rate(device: torch.device) -> float:
    """Measured GB/s (10^9 bytes) of averaging gradients over the processes, all of which call this together: the bus
    bandwidth of nccl-tests, 2 (n - 1) / n times the bytes by the time, which does not depend on the number n."""
    gradients = torch.zeros(
        2**27 if device.type == "cuda" else 2**20, device=device, dtype=torch.bfloat16
    )
    seconds = _quickest(lambda: dist.all_reduce(gradients), device)
    return 2 * (1 - 1 / dist.get_world_size()) * gradients.nbytes / seconds / 1e9


def _quickest(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that `work` takes: the least of three means over TIMES, after a warm-up."""
    laps = []
    for times in (1, TIMES, TIMES, TIMES):
        watch = Stopwatch(device)
        for _ in range(times):
            work()
        laps.append(elapsed(watch.lap()) / times)
    return min(laps[1:])
