"""Gradient noise scale, statistical efficiency and goodput: what a larger batch is worth (variants of family P).

A step of twice the samples is not twice the progress: the gradient of a batch is that of all data plus noise, and
once the noise is small, less of it helps little. McCandlish et al. (2018) measure this by the noise scale phi = tr(S)
/ |G|^2, where G is the mean of the samples' gradients and S their covariance: a batch below phi samples is mostly
noise, one above it mostly signal. Pollux (Qiao et al. 2021) makes of it the efficiency of a batch, its progress by
sample relative to a batch of reference, and goodput, samples a second times that efficiency. phi belongs to weights
and data: how a batch is spread over GPUs does not change it.

Neither |G|^2 nor tr(S) can be seen, but each process's gradient and their mean are two batches of different size, and
the expected square of a gradient's norm is |G|^2 + tr(S) / batch. Two sizes give both unknowns. They are averaged over
steps each by itself and divided then: the ratio of one step is biased and has no mean. A process alone compares its
first micro-batch with all of them.
"""

from qa_lib.record import Noise

REFERENCE = 32  # samples of the batch whose efficiency is 1: the effective batch of the reference project


def noise(own: float, mean: float, parts: int, samples: int) -> Noise:
    """|G|^2 (`sqr`) and tr(S) of a sample (`var`), from the mean square norm of the gradient of one of a step's equal
    `parts`, which has so many `samples`, and that of the mean of all; unbiased, so that each may come out negative
    where steps are few. McCandlish et al., appendix A.1."""
    sqr = (parts * mean - own) / (parts - 1)
    var = (own - mean) * parts * samples / (parts - 1)
    return Noise(sqr=sqr, var=var)


def noise_scale(noise: Noise) -> float | None:
    """phi, in samples; None where the noise has hidden the gradient."""
    return None if noise.sqr is None or noise.sqr <= 0 or noise.var < 0 else noise.var / noise.sqr


def efficiency(noise: Noise, batch: int) -> float | None:
    """Progress by sample with that batch, relative to REFERENCE: (phi + M0) / (phi + M), equation 7 of Pollux. None
    where the noise has hidden the gradient."""
    phi = noise_scale(noise)
    return None if phi is None else (phi + REFERENCE) / (phi + batch)
