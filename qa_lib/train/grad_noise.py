"""Gradient noise scale, statistical efficiency and goodput: what a larger batch is worth.

The variants of family P measure it.

A step of twice the samples is not twice the progress: the gradient of a batch is that of all data
plus noise, and once the noise is small, less of it helps little. McCandlish et al. (2018) measure
this by the noise scale phi = tr(S) / |G|^2, where G is the mean of the samples' gradients and S
their covariance: a batch below phi samples is mostly noise, one above it mostly signal. Pollux
(Qiao et al. 2021) makes of it the efficiency of a batch, its progress by sample relative to a batch
of reference, and goodput, samples a second times that efficiency. phi belongs to weights and data:
how a batch is spread over GPUs does not change it.

Neither |G|^2 nor tr(S) can be seen, but each process's gradient and their mean are two batches of
different size, and the expected square of a gradient's norm is |G|^2 + tr(S) / batch. Two sizes
give both unknowns. They are averaged over steps each by itself and divided then: the ratio of one
step is biased and has no mean. A process alone compares its first micro-batch with all of them.

`StepStats` keeps these norms, and what else a process sees of its steps beside their times: how
long it waited, what it computed. All of it is kept without waiting for the device, and read when
the run has been timed.
"""

import collections
from collections.abc import Callable

import torch

from qa_lib.measure.meter import elapsed
from qa_lib.records.schema import Noise
from qa_lib.spec.presets import Preset

# Samples of the batch whose efficiency is 1: that of the reference project.
REFERENCE = Preset.effective_batch
KEPT = 100  # the last steps, over which a pipeline's bubble is measured
# The share of the running means of gradient norms that is left after a step of REFERENCE samples. A
# step of twice as many leaves its square, so that the means reach back over as many samples
# whatever the batch is, and noise scales of different batches tell of the same part of a training.
# AdaptDL, the code of Pollux, scales its smoothing by the batch in this way.
SMOOTHING = 0.999


def noise_from_norms(of_part: float, of_step: float, parts: int, samples: int) -> Noise:
    """Return |G|^2 (`sqr`) and tr(S) of a sample (`var`), by McCandlish et al., appendix A.1.

    `of_part` is the mean square norm of the gradient of one of a step's equal `parts`, which has so
    many `samples`; `of_step` is the square norm of the mean over all parts. The results are
    unbiased, so that each may come out negative where steps are few.
    """
    sqr = (parts * of_step - of_part) / (parts - 1)
    var = (of_part - of_step) * parts * samples / (parts - 1)
    return Noise(sqr=sqr, var=var)


def noise_scale(noise: Noise) -> float | None:
    """Return phi, in samples; None where the noise has hidden the gradient."""
    if noise.sqr is None or noise.sqr <= 0 or noise.var < 0:
        return None
    return noise.var / noise.sqr


def efficiency(noise: Noise, batch: int) -> float | None:
    """Return the progress by sample with batch M, relative to REFERENCE, which is M0.

    It is (phi + M0) / (phi + M), equation 7 of Pollux; None where the noise has hidden the
    gradient.
    """
    phi = noise_scale(noise)
    return None if phi is None else (phi + REFERENCE) / (phi + batch)


class StepStats:
    """The measurements of a run's steps by one process; `ranks` is its ProcessGroup.

    `norms` are the running means that `note_norms` keeps. `waits` are a pipeline's readings: for
    each step its laps of computing, and the passes as a whole. `overlap` is what
    communication.overlap has measured, empty before `note_overlap`.
    """

    def __init__(self, ranks):
        self.ranks = ranks
        self.overlap = {}
        self.norms = torch.zeros(2, device=ranks.device)
        self.waits = collections.deque(maxlen=KEPT)

    def note_norms(self, of_part: torch.Tensor, of_step: torch.Tensor) -> None:
        """Keep two square norms for the gradient noise scale (scalars on the device).

        They are those of the gradient of this process's part of a step and of the whole step's.
        Kept are running means over the last REFERENCE / (1 - SMOOTHING) samples.
        """
        if self.ranks.parts > 1:
            self.norms.lerp_(torch.stack([of_part, of_step]), 1 - self.kept_share(1))

    def kept_share(self, steps: int) -> float:
        """Return the share that so many steps leave of the running means before them."""
        return SMOOTHING ** (steps * self.ranks.batch / REFERENCE)

    def noise(self, steps: int) -> Noise:
        """Return the noise by the norms of so many steps, empty where none were noted.

        All processes call this together; it waits for the device.
        """
        ranks = self.ranks
        # The square norms of a pipeline's stages add up.
        norms = ranks.mean(self.norms.clone()) * ranks.stages
        if not norms.any() or not norms.isfinite().all():
            return Noise()
        # The running means began at 0.
        of_part, of_step = (norms / (1 - self.kept_share(steps))).tolist()
        samples = ranks.batch // ranks.parts
        noise = noise_from_norms(of_part, of_step, parts=ranks.parts, samples=samples)
        noise.steps = steps
        return noise

    def pipelined(self) -> tuple[float, float] | None:
        """Return how long this stage of a pipeline computes in a step, and how long its passes are.

        The latter are the seconds from the begin of its passes to their end. Both are means over
        the last KEPT steps; None without a pipeline. Waits for the device.
        """
        if not self.waits:
            return None
        steps = [(sum(map(elapsed, laps)), elapsed(passes)) for laps, passes in self.waits]
        return tuple(torch.tensor(steps).mean(0).tolist())

    def note_overlap(self, step: Callable[[], object]) -> None:
        """Measure what communication costs a step, by making some more of them.

        All processes call this together.
        """
        # It imports pandas, which no other run needs.
        from qa_lib.measure.communication import overlap

        waits = self.waits.copy()
        norms = self.norms.clone()
        self.overlap = overlap(step, self.ranks.device)
        self.waits = waits
        self.norms.copy_(norms)  # in place: a CUDA graph writes there
