"""Which samples make up which micro-batch, by seed and step alone, so that a run can resume."""

from functools import lru_cache

import numpy as np
import torch

from qa_lib.errors import UserError
from qa_lib.spec.spec import Spec

# Padded lengths are multiples of this: a GPU prepares its attention anew for each length it meets.
ROUND = 32
# For the tuned Trainer, whose search found fewer lengths to be quicker: each is compiled anew.
ROUND_TUNED = 64
BUCKET = 50  # micro-batches that are sorted by length together; more make the order less random


def round_up(tokens, multiple: int):
    """Return tokens, a number or an array, rounded up to a multiple."""
    return -(-tokens // multiple) * multiple


class Batches:
    """The micro-batches of every optimizer step of a run.

    Each epoch is a permutation of the samples, cut into full micro-batches (the remainder is left
    out, another one each epoch), so that every micro-batch has as many samples. With
    `group_by_length`, spans of BUCKET micro-batches are sorted by length before the cut and all
    micro-batches shuffled after it.

    `samples` are windows of questions or of text (data/windows.py, data/text.py). Raises UserError
    where there are too few of them for a micro-batch or for a step.
    """

    def __init__(self, samples, spec: Spec):
        self.samples = samples
        self.spec = spec
        self.size = spec.settings.micro_batch  # samples of a micro-batch
        self._epoch = lru_cache(2)(self._drawn)  # a step can straddle two epochs
        self.per_epoch = len(samples) // self.size  # micro-batches
        too_few = f"{spec.data['name']}: {len(samples)} samples are too few for"
        if not self.per_epoch:
            raise UserError(f"{too_few} --micro-batch {self.size}")
        # Optimizer steps of the run.
        self.steps = spec.preset.steps or spec.preset.epochs * self.per_epoch // spec.micro_batches
        if not self.steps:
            raise UserError(f"{too_few} --batch {spec.preset.batch}")

    def _drawn(self, epoch: int) -> np.ndarray:
        """Draw the micro-batches of an epoch: int64 [per_epoch, size]."""
        draw = np.random.default_rng([self.spec.seed, epoch])
        order = draw.permutation(len(self.samples))[: self.per_epoch * self.size]
        if not self.spec.settings.group_by_length:
            return order.reshape(self.per_epoch, self.size)
        lengths = self.samples.lengths
        spans = np.array_split(order, range(BUCKET * self.size, len(order), BUCKET * self.size))
        by_length = [span[np.argsort(lengths[span], kind="stable")] for span in spans]
        return draw.permutation(np.concatenate(by_length).reshape(self.per_epoch, self.size))

    def step(self, step: int) -> list[np.ndarray]:
        """Return the samples of each micro-batch of an optimizer step: int64 [micro_batch] each.

        Steps are counted from 0. The micro-batches are all of the step's, whichever process works
        on which: the step is the same in one process and in many.
        """
        first = step * self.spec.micro_batches
        numbers = range(first, first + self.spec.micro_batches)
        return [
            self._epoch(number // self.per_epoch)[number % self.per_epoch] for number in numbers
        ]

    def padded_length(self, indices: np.ndarray) -> int:
        """Return the number of tokens to which these samples are padded: the preset's limit, or
        the longest sample's, rounded up to one of few lengths."""
        limit = self.spec.preset.max_length
        if self.spec.settings.padding == "max_length":
            return limit
        multiple = ROUND_TUNED if self.spec.settings.engine == "trainer-tuned" else ROUND
        longest = self.samples.lengths[indices].max()
        return min(limit, int(round_up(longest, multiple)))

    def tokens(self, micro_batches: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return a step's tokens: the length of each sample, and the lengths that are computed."""
        padded = [np.full(len(indices), self.padded_length(indices)) for indices in micro_batches]
        return self.samples.lengths[np.concatenate(micro_batches)], np.concatenate(padded)

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the inputs of the model for these samples.

        int64: [micro_batch, padded_length], and [micro_batch] for the positions.
        """
        return self.samples.batch(indices, self.padded_length(indices))

    def collate(self, indices: np.ndarray, device: torch.device) -> dict[str, torch.Tensor]:
        """Return `arrays` as tensors on the device; the copy to a GPU does not wait."""
        tensors = {}
        for name, array in self.arrays(indices).items():
            tensor = torch.from_numpy(array)
            if device.type == "cuda":
                tensor = tensor.pin_memory().to(device, non_blocking=True)
            tensors[name] = tensor
        return tensors
