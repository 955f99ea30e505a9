"""What a run costs: step times, speed, arithmetic, memory and energy."""

import contextlib
import functools
import resource
import statistics
import time
from collections.abc import Iterator

import numpy as np
import torch

from qa_lib.model.architectures import (
    encoder_of,
    layers_of,
    layers_passed,
    local_layers,
    param_counts,
)
from qa_lib.record import Memory, Speed, StepTime

MIB = 2**20
PEAK_FROM = 3  # steps before the peak counts: compilation is over, and the capture of a graph (cuda_graph.py) is not
ENERGY = "nvmlDeviceGetTotalEnergyConsumption"  # in millijoules, since the driver was loaded
# The share of the last 1/6 to 1 s in which any kernel ran, however small, and be it one that waits for other GPUs: how
# much of the time the host leaves the GPU idle, where MFU says how well it is used.
UTILIZATION = "nvmlDeviceGetUtilizationRates"


@functools.cache
def _nvml(device: torch.device):
    """NVML, and its handle of a GPU."""
    import pynvml  # a GPU's machine has it, and others need not

    pynvml.nvmlInit()
    # By identity, since NVML does not follow CUDA_VISIBLE_DEVICES.
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(
        f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    )


def ask_nvml(device: torch.device, question: str):
    """What NVML answers to a `question` about a GPU; None where it does not say."""
    if device.type == "cuda":
        with contextlib.suppress(
            Exception
        ):  # the package, the driver, the permission or the counter is missing
            nvml, handle = _nvml(device)
            return getattr(nvml, question)(handle)


class Hooks:
    """What a run tells of itself while it trains: its phases, as ranges that profilers show, and its finished steps.

    Profiles derive from it; as it is, it only names the ranges for torch.profiler and, by NVTX, for Nsight Systems.
    """

    @contextlib.contextmanager
    def phase(self, name: str):
        """Around the forward pass, the backward pass, the reduction over processes and the optimizer of each step."""
        nvtx = (
            torch.cuda.nvtx.range(name) if torch.cuda.is_available() else contextlib.nullcontext()
        )
        with torch.profiler.record_function(name), nvtx:
            yield

    def finished(self, steps: int) -> None:
        """After each step, with the number of those done."""


class Stopwatch:
    """Marks moments on the device's own clock, the first when it is made; `elapsed` tells the time between two."""

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
        """Mark this moment without waiting for the device: the mark before it, and this one."""
        previous, self.begin = self.begin, self._mark()
        return previous, self.begin


def elapsed(lap) -> float:
    """Seconds between the two marks of a Stopwatch's lap; waits for the second."""
    begin, end = lap
    if isinstance(begin, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


class Meter:
    """Times every optimizer step and counts what it processed; the first `warm_up` of this process are not measured.

    Time and energy are of the stretches from `resume` to `flush`, and not of the pauses between them. At the end of
    each, which in a run is each second, the GPU is asked how busy it has been. Its memory peak counts from step
    `peak_from` on, after which compilation allocates no more.
    """

    def __init__(self, device: torch.device, warm_up: int, peak_from: int = PEAK_FROM):
        self.device, self.warm_up, self.peak_from = device, warm_up, min(peak_from, warm_up)
        self.laps, self.times, self.counts = [], [], []
        self.first_step_at = None  # time.time() when the first step of this process was done
        self.data_s = []  # the host's seconds to prepare each step's inputs
        self.joules = []  # of the GPU in each measured stretch; None where its counter did not answer
        self.counter = None  # its counter when the stretch began
        self.samples, self.polled = (
            [],
            [],
        )  # shares of time in which the GPU was busy; `polled` has one a step
        self.resume()

    def resume(self) -> None:
        """Start the next step's clock now: what happened since the last step (a checkpoint, say) is not a step."""
        if len(self.counts) >= self.warm_up:
            self.counter = ask_nvml(self.device, ENERGY)
        self.clock = Stopwatch(self.device)

    def step(self, real_lengths: np.ndarray, computed_lengths: np.ndarray) -> None:
        """One optimizer step is done: its samples' lengths, and those of the sequences that were computed (tokens)."""
        self.laps.append(self.clock.lap())
        real, computed = real_lengths.astype(np.int64), computed_lengths.astype(np.int64)
        self.counts.append(
            (len(real), real.sum(), real @ real, computed.sum(), computed @ computed)
        )
        if len(self.counts) == 1:  # it is warm-up, so that waiting for it costs nothing
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            self.first_step_at = time.time()
        if len(self.counts) == self.peak_from and self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if len(self.counts) == self.warm_up and self.device.type == "cuda":
            torch.cuda.synchronize()  # so that what the warm-up still has to do is not counted
            self.resume()

    def flush(self) -> list[float]:
        """Wait for the device; the seconds of each step since the last flush."""
        fresh = [elapsed(lap) for lap in self.laps]
        self.laps.clear()
        self.times += fresh
        if fresh and len(self.times) > self.warm_up:
            now, rates = (ask_nvml(self.device, question) for question in (ENERGY, UTILIZATION))
            self.joules.append((now - self.counter) / 1e3 if now and self.counter else None)
            if rates:
                self.samples.append(rates.gpu / 100)
        return fresh

    def joules_per_sample(self) -> float | None:
        """Energy of the GPU over the measured steps by its own counter; None where there is none or it stood still."""
        used = 0.0 if None in self.joules else sum(self.joules)
        return used / sum(count[0] for count in self.counts[self.warm_up :]) if used else None

    def step_ms(self) -> StepTime:
        """Milliseconds of the measured steps."""
        self.flush()
        measured = self.times[self.warm_up :]
        if not measured:
            return StepTime()
        p10, median, p90 = (1e3 * float(np.percentile(measured, q)) for q in (10, 50, 90))
        return StepTime(len(measured), median, p10, p90)

    def data_ms(self) -> float | None:
        """Milliseconds in which the host chooses and collates the inputs of a measured step: the median.

        Not what the GPU waits. The host prepares the next step while the GPU still computes this one, and where it is
        ahead of the GPU, that costs nothing. So this only bounds the wait, and data_ms over step_ms its share.
        """
        measured = self.data_s[self.warm_up :]
        return 1e3 * statistics.median(measured) if measured else None

    def compile_s(self) -> float | None:
        """By how much the warm-up steps exceeded as many median steps: compilation, capture, first allocations."""
        median = self.step_ms().median
        if not self.warm_up or median is None:
            return None
        return max(0.0, sum(self.times[: self.warm_up]) - self.warm_up * median / 1e3)

    def speed(self, step: "StepFlops", matrix_tflops: float, devices: int = 1) -> Speed:
        """Rates over the measured steps, of all devices together.

        `gemm_utilization` counts the arithmetic that the real tokens need, `gemm_utilization_padded` all that was
        computed; both are shares of `matrix_tflops`, the measured matrix rate of a device.
        """
        self.flush()
        measured, counts = (
            self.times[self.warm_up :],
            np.array(self.counts[self.warm_up :], dtype=np.float64),
        )
        if not measured:
            return Speed()
        possible = matrix_tflops * 1e12 * devices
        samples, real, real_squares, computed, computed_squares = counts.sum(0) / sum(measured)
        return Speed(
            samples_per_s=samples,
            tokens_per_s_padded=computed,
            tokens_per_s=real,
            pad_fraction=1 - real / computed,
            gemm_utilization=step.flops(real, real_squares) / possible,
            gemm_utilization_padded=step.flops(computed, computed_squares, recompute=True)
            / possible,
            gemm_tflops_measured=matrix_tflops,
            gpu_busy=statistics.fmean(self.samples) if self.samples else None,
            gpu_busy_polled=statistics.fmean(self.polled[self.warm_up :]) if self.polled else None,
        )


class StepFlops:
    """Arithmetic of one training step, from the model's shapes and from what of it trains.

    A forward pass takes 2 FLOPs a parameter and token; the gradient by activations as much, from the top down to the
    lowest layer that trains; the gradient by weights as much for what trains. Attention scores and their use take
    4 x hidden x length^2 a layer forward and twice that backward. With all parameters training this is the usual
    6 x parameters x tokens + 12 x layers x hidden x sum of length^2 (Kaplan et al. 2020, PaLM's appendix B).
    Embeddings, the answer head and the adapters' own forward pass are not counted. A decoder's head is, a GEMM as
    wide as the vocabulary; and of its attention half, since the other half of the scores is masked. Where a layer's
    tokens see a window each, that counts, or all of shorter sequences: of lengths beside it, a little too much.
    """

    def __init__(self, model: torch.nn.Module):
        layers = layers_of(model)
        named = [(name, p) for layer in layers for name, p in layer.named_parameters()]
        counts = param_counts(model)
        self.parameters = sum(counts[p] for name, p in named if ".lora_" not in name)
        self.trained = sum(p.numel() for _, p in named if p.requires_grad and p.ndim > 1)
        encoder = encoder_of(model)
        head = model.get_submodule(encoder.head).weight if encoder.causal else torch.empty(0)
        self.head, self.head_trains, self.attended = (
            head.numel(),
            head.requires_grad,
            0.5 if encoder.causal else 1.0,
        )
        self.layers, self.hidden = len(layers), model.config.hidden_size
        self.local, self.window = local_layers(model.config)
        self.passed = (
            layers_passed(model) / self.layers
        )  # share of the layers that gradients pass through
        self.recomputed = (
            any(getattr(m, "gradient_checkpointing", False) for m in model.modules()) * self.passed
        )

    def flops(self, tokens: float, squares: float, recompute: bool = False) -> float:
        """FLOPs for so many tokens in sequences whose squared lengths sum to `squares`; with `recompute`, as
        executed."""
        again = self.recomputed if recompute else 0.0
        linear = 2 * tokens * (self.parameters * (1 + self.passed + again) + self.trained)
        head = 2 * tokens * self.head * (2 + self.head_trains)
        squares += self.local * min(0, self.window * tokens - squares)
        attention = (
            4 * self.layers * self.hidden * self.attended * squares * (1 + 2 * self.passed + again)
        )
        return linear + head + attention


def memory_use(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> Memory:
    """What the GPU's memory holds: peaks since the first steps, and the bytes of what persists between steps.

    Gradients are counted as one of each trainable parameter's size, since they are freed between steps; activations
    are what the peak holds beside all that persists. What an optimizer updates in memory of its own, as DeepSpeed's
    does, is part of its state.
    """
    state = [
        v for values in optimizer.state.values() for v in values.values() if torch.is_tensor(v)
    ]
    weights = {t.untyped_storage().data_ptr() for t in _local(model.parameters())}
    updated = _local(p for group in optimizer.param_groups for p in group["params"])
    state += [t for t in updated if t.untyped_storage().data_ptr() not in weights]
    found = Memory(
        params_mib=_mib(model.parameters()),
        grads_mib=_mib(p for p in model.parameters() if p.requires_grad),
        optimizer_mib=_mib(state),
        host_rss_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )
    if device.type == "cuda":
        found.peak_alloc_mib = torch.cuda.max_memory_allocated() / MIB
        found.peak_reserved_mib = torch.cuda.max_memory_reserved() / MIB
        persistent = found.params_mib + found.grads_mib + found.optimizer_mib
        found.activations_mib = max(0.0, found.peak_alloc_mib - persistent)
    return found


def _local(tensors) -> Iterator[torch.Tensor]:
    """Of what is spread over several GPUs, the part here."""
    return (t.to_local() if hasattr(t, "to_local") else t for t in tensors)


def _mib(tensors) -> float:
    return sum(t.numel() * t.element_size() for t in _local(tensors)) / MIB
