"""The machine: its device, what it can do, whose turn its GPU is, and its measured ceilings."""

import contextlib
import fcntl
import itertools
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
from qa_lib.measure import nvml
from qa_lib.measure.meter import MIB, Stopwatch, elapsed
from qa_lib.packages import adapters_fault, is_torchao_usable, version_of
from qa_lib.records.files import open_to_write
from qa_lib.spec.machine import AMPERE, VOLTA, Machine, hardware_name

REPEATS = 10  # calls in a row that are timed together


def train_device() -> torch.device:
    """Return the device that this process trains on.

    It is the first visible GPU, or this process's own if several processes train together. Without
    a GPU it is the CPU.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))


def limit_memory(gib: float) -> None:
    """Let this process allocate `gib` GiB of the GPU's memory and no more.

    A run that needs more ends as out of memory.
    """
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total))


def restrict_sdpa(sm: int) -> None:
    """Let PyTorch's attention in this process use only kernels that a GPU of that `sm` has."""
    if sm < AMPERE:  # FlashAttention and cuDNN's attention need Ampere or newer
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)


@contextlib.contextmanager
def gpu_lock(device: torch.device, shared: bool = False, waits: Callable[[], None] = lambda: None):
    """Hold the GPU, and yield the seconds waited for it.

    One run at a time holds it, so that none is timed while another trains; or any number of runs
    that are `shared`, which are not timed. If several processes train together, the first one calls
    this for the GPUs of all. `waits` is called before each wait for another holder. On a CPU nobody
    waits, since each run has threads of its own.
    """
    begin = time.perf_counter()
    if device.type != "cuda":
        yield 0.0
        return
    cards = range(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    uuids = [str(torch.cuda.get_device_properties(card).uuid) for card in cards]
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    with contextlib.ExitStack() as held:
        # All runs lock in the same order: two that each hold what the other wants would wait for
        # ever.
        for uuid in sorted(uuids):
            path = Path(tempfile.gettempdir(), f"qa_lib-{os.getuid()}-{uuid}.lock")
            stream = held.enter_context(open_to_write(path, "a"))
            try:
                fcntl.flock(stream, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                waits()
                fcntl.flock(stream, kind)
        yield time.perf_counter() - begin


def this_machine() -> Machine:
    """Return what decides which variants can run here."""
    packages = {
        package: version_of(package) is not None
        for package in ("bitsandbytes", "deepspeed", "peft")
    }
    packages |= {"torchao": is_torchao_usable(), "adapters_fault": adapters_fault()}
    if not torch.cuda.is_available():
        compilers = (os.environ.get("CXX", "g++"), "g++", "clang++")
        has_cpp_compiler = any(shutil.which(name) for name in compilers)
        return Machine(
            hardware=hardware_name(None),
            gpus=0,
            sm=0,
            free_mib=0,
            **packages,
            compiler=has_cpp_compiler,
        )
    major, minor = torch.cuda.get_device_capability()
    sm = 10 * major + minor
    return Machine(
        hardware=hardware_name(torch.cuda.get_device_name()),
        gpus=torch.cuda.device_count(),
        unlike=_unlike_gpus(),
        linked=_are_linked(),
        sm=sm,
        free_mib=_free_mib(),
        total_mib=int(torch.cuda.get_device_properties(0).total_memory / MIB),
        **packages,
        compiler=version_of("triton") is not None and sm >= VOLTA,  # Inductor's oldest
    )


def _unlike_gpus() -> str:
    """Return the names of the GPUs, where they are not all of one kind; else ""."""
    names = [torch.cuda.get_device_name(card) for card in range(torch.cuda.device_count())]
    kinds = list(dict.fromkeys(names))
    return " and ".join(kinds) if len(kinds) > 1 else ""


def _are_linked() -> bool:
    """Return whether each GPU writes into the memory of all others over NVLink."""
    cards = [torch.device("cuda", card) for card in range(torch.cuda.device_count())]
    pairs = list(itertools.permutations(cards, 2))
    return bool(pairs) and all(
        torch.cuda.can_device_access_peer(*pair) and nvml.is_linked(*pair) for pair in pairs
    )


def _free_mib() -> int:
    """Return the MiB of the first GPU's memory that are free; all of them if NVML does not say."""
    free_bytes = nvml.free_bytes(torch.device("cuda", 0))
    if free_bytes is not None:
        return int(free_bytes / MIB)
    return int(torch.cuda.get_device_properties(0).total_memory / MIB)


def libraries() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that the numbers of a run depend on."""
    packages = ("torch", "transformers", "peft", "bitsandbytes", "deepspeed", "torchao")
    return {"python": platform.python_version(), **{name: version_of(name) for name in packages}}


def environment() -> dict:
    """Return the record's `env`: versions and hardware, with None for what only a GPU has."""
    return {
        **libraries(),
        "cuda": torch.version.cuda,
        **_gpu_environment(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "ram_mib": round(psutil.virtual_memory().total / MIB),
    }


def _gpu_environment() -> dict:
    """Return what the record's `env` says of the first GPU: None for each value without a GPU."""
    if not torch.cuda.is_available():
        return dict.fromkeys(("gpu", "gpu_mem_mib", "driver", "sm"))
    gpu = torch.cuda.get_device_properties(0)
    drivers = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").split()
    return {
        "gpu": gpu.name,
        "gpu_mem_mib": round(gpu.total_memory / MIB),
        "driver": drivers[0] if drivers else None,
        "sm": gpu.major * 10 + gpu.minor,
    }


def interconnect() -> str | None:
    """Return how the first two GPUs that this process sees are connected, as nvidia-smi names it.

    NV18 stands for 18 NVLinks, PIX for one PCIe switch, SYS for the way through both processors.
    None if nvidia-smi does not say, and if there is no second GPU.
    """
    # The GPUs are found by their UUIDs, since nvidia-smi does not follow CUDA_VISIBLE_DEVICES.
    visible = [
        f"GPU-{torch.cuda.get_device_properties(card).uuid}"
        for card in range(min(2, torch.cuda.device_count()))
    ]
    known = _nvidia_smi("--query-gpu=uuid", "--format=csv,noheader").split()
    if len(visible) < 2 or not set(visible) <= set(known):
        return None
    first, second = map(known.index, visible)
    for line in _nvidia_smi("topo", "-m").splitlines():
        words = line.split()
        # A GPU's row begins with its name and has an X in its own column; the heading has none.
        if words[:1] == [f"GPU{first}"] and "X" in words:
            return words[1 + second]
    return None


def polled_utilization() -> float:
    """Return the share of its last sampling period in which a GPU was busy.

    It is the mean over all GPUs of this host, whoever uses them, as nvidia-smi says. Each call
    starts that program, which takes time. Raises UserError if nvidia-smi does not say.
    """
    percents = _nvidia_smi("--query-gpu=utilization.gpu", "--format=csv,noheader,nounits").split()
    try:
        return statistics.mean(map(int, percents)) / 100
    except ValueError:
        answer = " ".join(percents)[:80]
        raise UserError(
            f"nvidia-smi does not tell the GPUs' utilization (it says {answer!r})"
        ) from None


def _nvidia_smi(*words: str) -> str:
    """Return what nvidia-smi prints; "" if it is not installed or fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            ["nvidia-smi", *words], capture_output=True, text=True, check=True, timeout=20
        ).stdout
    return ""


def _cpu_name() -> str | None:
    """Return the processor's name; None if the system does not tell."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    model = re.search(r"model name\s*: (.*)", text)
    if model:
        return model[1]
    return platform.processor() or None


def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the measured TFLOP/s of one large square GEMM on random data.

    The record's gemm_utilization is a share of this ceiling, which is measured anew for each run,
    since the clock of a GPU at its power limit varies.
    """
    # On a CPU this size has 0.95 of the rate of one twice as large, and takes half a second less.
    size = 8192 if device.type == "cuda" else 512
    a, b, out = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(3))
    seconds = _quickest(lambda: torch.matmul(a, b, out=out), device)
    # All memory goes back before the run begins: the tensors, cuBLAS's workspace of this stream
    # (which a CUDA graph does not use), and what the allocator keeps of them.
    a = b = out = None
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    floating_point_operations = 2 * size**3
    return floating_point_operations / seconds / 1e12


def copy_rate(device: torch.device) -> float:
    """Return the measured GB/s (10^9 bytes) of copying a tensor far larger than the caches.

    Bytes that are read and bytes that are written both count.
    """
    size = 2**28 if device.type == "cuda" else 2**24
    source = torch.zeros(size, device=device)
    target = torch.empty_like(source)
    seconds = _quickest(lambda: target.copy_(source), device)
    return 2 * source.nbytes / seconds / 1e9


def reduce_rate(device: torch.device) -> float:
    """Return the measured GB/s (10^9 bytes) of averaging gradients over the processes.

    All processes call this together. It is what nccl-tests call the bus bandwidth: the bytes by the
    time, times 2 (n - 1) / n. That factor is there so that the rate of n processes can be compared
    with the rate of any other number.
    """
    size = 2**27 if device.type == "cuda" else 2**20
    gradients = torch.zeros(size, device=device, dtype=torch.bfloat16)
    seconds = _quickest(lambda: dist.all_reduce(gradients), device)
    n = dist.get_world_size()
    return 2 * (1 - 1 / n) * gradients.nbytes / seconds / 1e9


def _quickest(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call of `work`.

    It is the least of three means over REPEATS calls, after one call to warm up.
    """
    seconds = []
    for repeats in (1, REPEATS, REPEATS, REPEATS):
        watch = Stopwatch(device)
        for _ in range(repeats):
            work()
        seconds.append(elapsed(watch.lap()) / repeats)
    return min(seconds[1:])
