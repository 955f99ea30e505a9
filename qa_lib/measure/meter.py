"""What a run costs: step times, speed, arithmetic, memory and energy."""

import contextlib
import resource
import statistics
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from qa_lib.measure import nvml
from qa_lib.model.architectures import (
    encoder_of,
    layers_of,
    layers_passed,
    local_layers,
    param_counts,
)
from qa_lib.records.schema import Memory, Speed, StepTime

MIB = 2**20
# Steps before the memory's peak counts: compilation is over by then, and the capture of a CUDA
# graph (train/cuda_graph.py) is not.
PEAK_FROM = 3


class Hooks:
    """What a run tells of itself while it trains: its phases and its finished steps.

    Phases are ranges that profilers show: torch.profiler and, by NVTX, Nsight Systems. Profiles
    derive from this class, and do more with either.
    """

    untimed_steps = 0  # at the end of a training, since these hooks disturb them

    @contextlib.contextmanager
    def phase(self, name: str):
        """Surround a phase of a step.

        Phases are "forward", "backward", "reduce" (over processes) and "optimizer".
        """
        nvtx = (
            torch.cuda.nvtx.range(name) if torch.cuda.is_available() else contextlib.nullcontext()
        )
        with torch.profiler.record_function(name), nvtx:
            yield

    def finished(self, steps: int) -> None:
        """Take note that a step is done; `steps` are all that are."""


class Stopwatch:
    """Marks moments on the device's own clock, the first of them when it is made.

    `elapsed` tells the time between two.
    """

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.begin = self._mark()

    def _mark(self):
        """Return a mark of this moment: seconds on a CPU, an event of the stream on a GPU."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self) -> tuple:
        """Mark this moment, and return the mark before it and this one; does not wait."""
        previous = self.begin
        self.begin = self._mark()
        return previous, self.begin


def elapsed(lap: tuple) -> float:
    """Return the seconds between the two marks of a Stopwatch's lap; waits for the second."""
    begin, end = lap
    if isinstance(begin, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


class StepCounts(NamedTuple):
    """What an optimizer step processed."""

    samples: int
    tokens: int  # of the samples, without padding
    squares: int  # the sum of the samples' squared lengths
    computed_tokens: int  # of the sequences that were computed, with their padding
    computed_squares: int  # the sum of these sequences' squared lengths


class Meter:
    """Times every optimizer step and counts what it processed.

    The first `warm_up` steps of this process are not measured, nor those after its step `until`.
    Time and energy are of the stretches from `resume` to `flush`, and not of the pauses between
    them. At the end of each stretch, which in a run is each second, the GPU is asked how busy it
    has been. Its memory peak counts from step `peak_from` on, after which compilation allocates no
    more.
    """

    def __init__(
        self,
        device: torch.device,
        warm_up: int,
        peak_from: int = PEAK_FROM,
        until: int | None = None,
    ):
        self.device = device
        self.warm_up = warm_up
        self.until = until
        self.measured = slice(warm_up, until)
        self.compiled_before_s = 0.0  # seconds of compilation before the first step
        self.peak_from = min(peak_from, warm_up)
        self.laps = []  # of the steps since the last flush
        self.times: list[float] = []  # seconds of each step
        self.step_counts: list[StepCounts] = []  # of each step
        self.data_s: list[float] = []  # the host's seconds to prepare each step's inputs
        # time.time() when the first step of this process was done
        self.first_step_at: float | None = None
        # The GPU's energy in each measured stretch; None where its counter did not answer.
        self.joules: list[float | None] = []
        # The energy counter when the stretch began, in millijoules.
        self.energy_before: int | None = None
        # The share of time in which the GPU was busy, by NVML, in each measured stretch.
        self.busy_shares: list[float] = []
        # The same by nvidia-smi after each step, over all GPUs of the host, where a variant polls.
        self.polled_busy_shares: list[float] = []
        self.resume()

    def resume(self) -> None:
        """Start the next step's clock now.

        What happened since the last step, such as a checkpoint, is not a step.
        """
        if len(self.step_counts) >= self.warm_up:
            self.energy_before = nvml.energy_mj(self.device)
        self.clock = Stopwatch(self.device)

    def step(self, real_lengths: np.ndarray, computed_lengths: np.ndarray) -> None:
        """Take note that an optimizer step is done.

        Lengths, in tokens, are those of its samples and of the sequences that were computed.
        """
        self.laps.append(self.clock.lap())
        real = real_lengths.astype(np.int64)
        computed = computed_lengths.astype(np.int64)
        self.step_counts.append(
            StepCounts(
                samples=len(real),
                tokens=real.sum(),
                squares=real @ real,
                computed_tokens=computed.sum(),
                computed_squares=computed @ computed,
            )
        )
        steps = len(self.step_counts)
        on_gpu = self.device.type == "cuda"
        if steps == 1:
            if on_gpu:
                torch.cuda.synchronize()  # it is warm-up, so that waiting for it costs nothing
            self.first_step_at = time.time()
        if steps == self.peak_from and on_gpu:
            torch.cuda.reset_peak_memory_stats()
        if steps == self.warm_up and on_gpu:
            torch.cuda.synchronize()  # so that what the warm-up still has to do is not counted
            self.resume()

    @property
    def is_at_end(self) -> bool:
        """Return whether the last step that is measured has just been done."""
        return len(self.step_counts) == self.until

    def flush(self) -> list[float]:
        """Wait for the device, and return the seconds of each step since the last flush."""
        seconds = [elapsed(lap) for lap in self.laps]
        self.laps.clear()
        self.times += seconds
        is_before_end = self.until is None or len(self.times) <= self.until
        if seconds and len(self.times) > self.warm_up and is_before_end:
            self._end_measured_stretch()
        return seconds

    def _end_measured_stretch(self) -> None:
        """Note the GPU's energy since `resume`, and how busy it has been."""
        energy = nvml.energy_mj(self.device)
        if energy and self.energy_before:
            self.joules.append((energy - self.energy_before) / 1e3)
        else:
            self.joules.append(None)
        share = nvml.busy_share(self.device)
        if share is not None:
            self.busy_shares.append(share)

    def joules_per_sample(self) -> float | None:
        """Return the GPU's energy over the measured steps, by its own counter.

        Returns None where there is no counter, and where it stood still.
        """
        if None in self.joules or not sum(self.joules):
            return None
        samples = sum(counts.samples for counts in self.step_counts[self.measured])
        return sum(self.joules) / samples

    def step_ms(self) -> StepTime:
        """Return the milliseconds of the measured steps."""
        self.flush()
        measured = self.times[self.measured]
        if not measured:
            return StepTime()
        p10, median, p90 = (1e3 * float(np.percentile(measured, q)) for q in (10, 50, 90))
        return StepTime(n=len(measured), median=median, p10=p10, p90=p90)

    def data_ms(self) -> float | None:
        """Return the median milliseconds in which the host chooses and collates a step's inputs.

        The GPU need not wait as long. The host prepares the next step while the GPU still computes
        this one, and where it is ahead of the GPU, that costs nothing. So this only bounds the
        wait, and data_ms over step_ms its share.
        """
        measured = self.data_s[self.measured]
        return 1e3 * statistics.median(measured) if measured else None

    def compile_s(self) -> float | None:
        """Return the seconds by which the warm-up steps exceeded as many median steps.

        That is compilation, capture and first allocations. What was compiled before the first step
        is added.
        """
        median = self.step_ms().median
        if not self.warm_up or median is None:
            return None
        in_steps_s = sum(self.times[: self.warm_up]) - self.warm_up * median / 1e3
        return self.compiled_before_s + max(0.0, in_steps_s)

    def speed(self, step: "StepFlops", matrix_tflops: float, devices: int = 1) -> Speed:
        """Return the rates over the measured steps, of all `devices` together.

        `gemm_utilization` counts the arithmetic that the real tokens need,
        `gemm_utilization_padded` all that was computed; both are shares of `matrix_tflops`, the
        measured matrix rate of a device.
        """
        self.flush()
        measured = self.times[self.measured]
        if not measured:
            return Speed()
        counts = np.array(self.step_counts[self.measured], dtype=np.float64)
        rates = StepCounts(*counts.sum(0) / sum(measured))  # a second
        possible = matrix_tflops * 1e12 * devices
        needed_flops = step.flops(rates.tokens, rates.squares)
        executed_flops = step.flops(rates.computed_tokens, rates.computed_squares, recompute=True)
        polled = self.polled_busy_shares[self.measured]
        return Speed(
            samples_per_s=rates.samples,
            tokens_per_s=rates.tokens,
            tokens_per_s_padded=rates.computed_tokens,
            pad_fraction=1 - rates.tokens / rates.computed_tokens,
            gemm_utilization=needed_flops / possible,
            gemm_utilization_padded=executed_flops / possible,
            gemm_tflops_measured=matrix_tflops,
            gpu_busy=statistics.fmean(self.busy_shares) if self.busy_shares else None,
            gpu_busy_polled=statistics.fmean(polled) if polled else None,
        )


class StepFlops:
    """Arithmetic of one training step, from the model's shapes and from what of it trains.

    A forward pass takes 2 FLOPs a parameter and token; the gradient by activations takes the same,
    from the top down to the lowest layer that trains; so does the gradient by weights, for what
    trains. Attention scores and their use take 4 x hidden x length^2 a layer forward and twice that
    backward. With all parameters training this is the usual
    6 x parameters x tokens + 12 x layers x hidden x sum of length^2
    (Kaplan et al. 2020, PaLM's appendix B).

    Embeddings, the answer head and the adapters' own forward pass are not counted. A decoder's head
    is, a GEMM as wide as the vocabulary; its attention counts half, since the other half of the
    scores is masked. Where a layer's tokens see a window each, the window counts, or all of shorter
    sequences. That is a little too much for sequences that are hardly longer than the window.
    """

    def __init__(self, model: torch.nn.Module):
        layers = layers_of(model)
        named = [(name, p) for layer in layers for name, p in layer.named_parameters()]
        counts = param_counts(model)
        # Elements of the layers' parameters, and of their matrices that train.
        self.parameters = sum(counts[p] for name, p in named if ".lora_" not in name)
        self.trained = sum(p.numel() for _, p in named if p.requires_grad and p.ndim > 1)
        encoder = encoder_of(model)
        # Elements of a decoder's head, whose gradient by activations is always needed.
        head = model.get_submodule(encoder.head).weight if encoder.causal else torch.empty(0)
        self.head = head.numel()
        self.head_passes = 3 if head.requires_grad else 2
        self.attended = 0.5 if encoder.causal else 1.0  # share of the scores
        self.layers = len(layers)
        self.hidden = model.config.hidden_size
        self.local, self.window = local_layers(model.config)
        # Shares of the layers: those that gradients pass, and those that are computed twice.
        self.passed = layers_passed(model) / self.layers
        recomputes = any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
        self.recomputed = self.passed if recomputes else 0.0

    def flops(self, tokens: float, squares: float, recompute: bool = False) -> float:
        """Return the FLOPs for `tokens` in sequences whose squared lengths sum to `squares`.

        With `recompute` those count, too, that are executed a second time.
        """
        again = self.recomputed if recompute else 0.0
        linear = 2 * tokens * (self.parameters * (1 + self.passed + again) + self.trained)
        head = 2 * tokens * self.head * self.head_passes
        # `local` is the share of layers whose tokens see a window alone, where that is less.
        squares += self.local * min(0, self.window * tokens - squares)
        passes = 1 + 2 * self.passed + again
        attention = 4 * self.layers * self.hidden * self.attended * squares * passes
        return linear + head + attention


def memory_use(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    peer_bytes: int = 0,
) -> Memory:
    """Return what memory holds: the GPU's peaks, and the MiB of what persists between steps.

    Gradients are counted as one of each trainable parameter's size, since they are freed between
    steps; activations are what the peak holds beside all that persists. What an optimizer updates
    in memory of its own, such as DeepSpeed's, is part of its state. Both peaks hold `peer_bytes`:
    other processes write into these all the time, and PyTorch's allocator does not know of them
    (train/parallel/peer_memory.py).
    """
    state = [
        value
        for values in optimizer.state.values()
        for value in values.values()
        if torch.is_tensor(value)
    ]
    weights = {t.untyped_storage().data_ptr() for t in _local(model.parameters())}
    updated = _local(p for group in optimizer.param_groups for p in group["params"])
    state += [t for t in updated if t.untyped_storage().data_ptr() not in weights]
    memory = Memory(
        params_mib=_mib(model.parameters()),
        grads_mib=_mib(p for p in model.parameters() if p.requires_grad),
        optimizer_mib=_mib(state),
        host_rss_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )
    if device.type == "cuda":
        memory.peak_alloc_mib = (torch.cuda.max_memory_allocated() + peer_bytes) / MIB
        memory.peak_reserved_mib = (torch.cuda.max_memory_reserved() + peer_bytes) / MIB
        persistent = memory.params_mib + memory.grads_mib + memory.optimizer_mib
        memory.activations_mib = max(0.0, memory.peak_alloc_mib - persistent)
    return memory


def _local(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Return the tensors, or the parts here of those that are spread over several GPUs."""
    return (t.to_local() if hasattr(t, "to_local") else t for t in tensors)


def _mib(tensors: Iterable[torch.Tensor]) -> float:
    """Return the MiB that tensors take here."""
    return sum(t.numel() * t.element_size() for t in _local(tensors)) / MIB
