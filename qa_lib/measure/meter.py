"""What a run costs: step times, memory, arithmetic, and the machine it ran on."""

import contextlib
import fcntl
import functools
import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import torch

from qa_lib.record import WAITING
from qa_lib.variants import Machine, hardware_name

MIB = 2**20
PEAK_FROM = 3  # steps before the peak counts: compilation is over, and the capture of a graph (graph.WARM_UP) is not


def device() -> torch.device:
    """The device that runs train on: the first visible GPU, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def limit_memory(gib: float) -> None:
    """Let this process allocate so much of the GPU's memory and no more; what exceeds it ends as out of memory."""
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / torch.cuda.get_device_properties(0).total_memory))


NEWER_ATTENTION = 80  # the compute capability x 10 that FlashAttention and cuDNN's attention need


def imitate(sm: int) -> None:
    """Leave PyTorch's attention in this process the kernels that a GPU of that capability has."""
    if sm < NEWER_ATTENTION:
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)


@contextlib.contextmanager
def turn(device: torch.device, shared: bool = False, say=print):
    """Hold the GPU: one run at a time trains on it, while others prepare, so that none is timed beside another; or
    any number of `shared` ones, which are not timed.

    Yields the seconds waited. On a CPU nobody waits: its runs have threads of their own.
    """
    begin = time.perf_counter()
    if device.type != "cuda":
        yield 0.0
        return
    path = Path(tempfile.gettempdir(), f"qa_lib-{os.getuid()}-{torch.cuda.get_device_properties(0).uuid}.lock")
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    with open(path, "a") as stream:
        try:
            fcntl.flock(stream, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            say(WAITING)
            fcntl.flock(stream, kind)
        yield time.perf_counter() - begin


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine() -> Machine:
    """What decides which rows can run here."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    sm = int("{}{}".format(*torch.cuda.get_device_capability())) if gpus else 0
    compiler = any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++")))
    return Machine(
        hardware=hardware_name(torch.cuda.get_device_name() if gpus else None),
        gpus=gpus,
        sm=sm,
        backends=tuple(torch._dynamo.list_backends(exclude_tags=())),
        bitsandbytes=_version("bitsandbytes") is not None,
        compiler=_version("triton") is not None and sm >= 70 if gpus else bool(compiler),
    )


def environment() -> dict:
    """The record's `env`: versions and hardware; null where there is no GPU."""
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "peft", "bitsandbytes")},
        "cuda": torch.version.cuda,
        "gpu": gpu.name if gpu else None,
        "gpu_mem_mib": round(gpu.total_memory / MIB) if gpu else None,
        "driver": _driver() if gpu else None,
        "sm": gpu.major * 10 + gpu.minor if gpu else None,
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "ram_mib": round(psutil.virtual_memory().total / MIB),
    }


def _driver() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


@functools.cache
def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measured TFLOP/s of one large square product on random data: the ceiling that MFU is a share of."""
    size, products = (8192, 30) if device.type == "cuda" else (1024, 3)
    a, b, out = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(3))
    rates = []
    for _ in range(4):  # the first is warm-up
        clock = Stopwatch(device)
        for _ in range(products):
            torch.matmul(a, b, out=out)
        rates.append(2 * size**3 * products / clock.seconds() / 1e12)
    del a, b, out
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return max(rates[1:])


@functools.cache
def _energy_counter(device: torch.device):
    """A function that reads the GPU's energy counter in millijoules; None where NVML does not answer."""
    try:
        import pynvml  # a GPU's machine has it, and others need not

        pynvml.nvmlInit()
        # By identity, since NVML does not follow CUDA_VISIBLE_DEVICES.
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # the package, the driver, the permission or the counter is missing
        return None
    return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)


@functools.cache
def copy_rate(device: torch.device) -> float:
    """Measured GB/s (10^9 bytes, read and written) of copying a tensor far larger than the caches."""
    source = torch.zeros(2**28 if device.type == "cuda" else 2**24, device=device)
    target, rates = torch.empty_like(source), []
    for _ in range(4):  # the first is warm-up
        clock = Stopwatch(device)
        for _ in range(5):
            target.copy_(source)
        rates.append(10 * source.nbytes / clock.seconds() / 1e9)
    return max(rates[1:])


def joules(device: torch.device) -> float | None:
    """What a GPU has used since its driver was loaded, in joules; None where it does not say."""
    counter = _energy_counter(device) if device.type == "cuda" else None
    return counter() / 1e3 if counter else None


class Watch:
    """What a run tells of itself while it trains: its phases, as ranges that profilers show, and its finished steps.

    Profiles derive from it; as it is, it only names the ranges for torch.profiler and, by NVTX, for Nsight Systems.
    """

    @contextlib.contextmanager
    def phase(self, name: str):
        """Around the forward pass, the backward pass and the optimizer of each step."""
        with torch.profiler.record_function(name), nvtx(name):
            yield

    def finished(self, steps: int) -> None:
        """After each step, with the number of those done."""


def nvtx(name: str):
    """An NVTX range where there is a GPU, else nothing."""
    return torch.cuda.nvtx.range(name) if torch.cuda.is_available() else contextlib.nullcontext()


class Stopwatch:
    """Seconds since construction, on the device's own clock."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.begin = self._mark()

    def _mark(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self):
        """Mark this moment without waiting for the device."""
        previous, self.begin = self.begin, self._mark()
        return previous, self.begin

    def seconds(self) -> float:
        """Wait for the device; seconds since construction or the last lap."""
        return elapsed(self.lap())


def elapsed(lap) -> float:
    """Seconds between the two marks of a Stopwatch's lap; waits for the second."""
    begin, end = lap
    if isinstance(begin, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


class Meter:
    """Times every optimizer step and counts what it processed; the first `warm_up` of this process are not measured.

    The GPU's memory peak counts from step `peak_from` on, after which compilation allocates no more.
    """

    def __init__(self, device: torch.device, warm_up: int, peak_from: int = PEAK_FROM):
        self.device, self.warm_up, self.peak_from = device, warm_up, min(peak_from, warm_up)
        self.laps, self.times, self.counts = [], [], []
        self.joules_before = None
        self.resume()

    def resume(self) -> None:
        """Start the next step's clock now: what happened since the last step (a checkpoint, say) is not a step."""
        self.clock = Stopwatch(self.device)

    def step(self, real_lengths: np.ndarray, computed_lengths: np.ndarray) -> None:
        """One optimizer step is done: its features' lengths, and those of the rows that were computed (tokens)."""
        self.laps.append(self.clock.lap())
        self.counts.append(
            (
                len(real_lengths),
                real_lengths.sum(),
                np.square(real_lengths, dtype=np.int64).sum(),
                computed_lengths.sum(),
                np.square(computed_lengths, dtype=np.int64).sum(),
            )
        )
        if len(self.counts) == self.peak_from and self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if len(self.counts) == self.warm_up and self.device.type == "cuda":
            torch.cuda.synchronize()  # so that what the warm-up still has to do is not counted
            self.joules_before = joules(self.device)
            self.resume()

    def flush(self) -> list[float]:
        """Wait for the device; the seconds of each step since the last flush."""
        fresh = [elapsed(lap) for lap in self.laps]
        self.laps.clear()
        self.times += fresh
        return fresh

    def joules_per_feature(self) -> float | None:
        """Energy of the GPU over the measured steps by its own counter; None where there is none or it stood still."""
        self.flush()
        now = joules(self.device)
        used = now - self.joules_before if now and self.joules_before else 0.0
        return used / sum(count[0] for count in self.counts[self.warm_up :]) if used else None

    def summary(self, cost: "StepCost", peak_tflops: float) -> tuple[dict, dict]:
        """The record's `speed`, and of `time`: compile_s, train_s, steps and step_ms.

        compile_s is by how much the warm-up steps exceeded as many median steps: compilation, capture, first
        allocations. MFU counts the arithmetic that the real tokens need, HFU all that was computed; both are shares
        of the measured matrix rate.
        """
        self.flush()
        measured, counts = self.times[self.warm_up :], np.array(self.counts[self.warm_up :], dtype=np.float64)
        clock = {"train_s": sum(self.times), "steps": len(self.times)}
        if not measured:
            return {}, clock
        features, real, real_squares, computed, computed_squares = counts.sum(0) / sum(measured)
        p10, median, p90 = (1e3 * float(np.percentile(measured, q)) for q in (10, 50, 90))
        speed = {
            "features_per_s": features,
            "tokens_per_s": computed,
            "real_tokens_per_s": real,
            "pad_fraction": 1 - real / computed,
            "mfu": cost.flops(real, real_squares) / (peak_tflops * 1e12),
            "hfu": cost.flops(computed, computed_squares, recompute=True) / (peak_tflops * 1e12),
            "peak_tflops_measured": peak_tflops,
        }
        excess = sum(self.times[: self.warm_up]) - self.warm_up * median / 1e3
        clock |= {
            "compile_s": max(0.0, excess) if self.warm_up else None,
            "step_ms": {"n": len(measured), "median": median, "p10": p10, "p90": p90},
        }
        return speed, clock


class StepCost:
    """Arithmetic of one training step, from the model's shapes and from what of it trains.

    A forward pass takes 2 FLOPs a parameter and token; the gradient by activations as much, from the top down to the
    lowest layer that trains; the gradient by weights as much for what trains. Attention scores and their use take
    4 x hidden x length^2 a layer forward and twice that backward. With all parameters training this is the usual
    6 x parameters x tokens + 12 x layers x hidden x sum of length^2 (Kaplan et al. 2020, PaLM's appendix B).
    Embeddings and the answer head are not counted.
    """

    def __init__(self, model: torch.nn.Module):
        encoder = {name: p for name, p in model.named_parameters() if ".encoder.layer." in name}
        base = {name: p for name, p in encoder.items() if ".lora_" not in name}
        self.parameters = sum(p.numel() for p in base.values())
        self.trained = sum(p.numel() for p in encoder.values() if p.requires_grad and p.ndim > 1)
        self.layers, self.hidden = model.config.num_hidden_layers, model.config.hidden_size
        embeddings = any(p.requires_grad for name, p in model.named_parameters() if ".embeddings." in name)
        training = [
            int(name.split(".encoder.layer.")[1].split(".")[0]) for name, p in encoder.items() if p.requires_grad
        ]
        lowest = 0 if embeddings else min(training, default=self.layers)
        self.passed = 1 - lowest / self.layers  # share of the layers that gradients pass through
        self.recomputed = any(getattr(m, "gradient_checkpointing", False) for m in model.modules()) * self.passed

    def flops(self, tokens: float, squares: float, recompute: bool = False) -> float:
        """FLOPs for so many tokens in rows whose squared lengths sum to `squares`; with `recompute`, as executed."""
        again = self.recomputed if recompute else 0.0
        linear = 2 * tokens * (self.parameters * (1 + self.passed + again) + self.trained)
        attention = 4 * self.layers * self.hidden * squares * (1 + 2 * self.passed + again)
        return linear + attention


def memory(model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> dict:
    """The record's `memory` in MiB: peaks since the first steps, and the bytes of what persists between steps.

    Gradients are counted as one of each trainable parameter's size, since they are freed between steps.
    """
    state = [v for values in optimizer.state.values() for v in values.values() if torch.is_tensor(v)]
    gpu = device.type == "cuda"
    found = {
        "peak_alloc_mib": torch.cuda.max_memory_allocated() / MIB if gpu else None,
        "peak_reserved_mib": torch.cuda.max_memory_reserved() / MIB if gpu else None,
        "params_mib": _mib(model.parameters()),
        "grads_mib": _mib(p for p in model.parameters() if p.requires_grad),
        "optimizer_mib": _mib(state),
        "host_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    if gpu:
        persistent = found["params_mib"] + found["grads_mib"] + found["optimizer_mib"]
        found["activations_mib"] = max(0.0, found["peak_alloc_mib"] - persistent)
    return found


def _mib(tensors) -> float:
    return sum(t.numel() * t.element_size() for t in tensors) / MIB
