"""Which samples make up which micro-batch: a pure function of the seed and the step, so that a run can resume."""

from functools import lru_cache

import numpy as np
import torch

from qa_lib.errors import UserError
from qa_lib.spec.spec import Spec

ROUND = 32  # padded lengths are multiples of this: a GPU prepares its attention anew for each length it meets
BUCKET = (
    50  # micro-batches that are sorted by length together; more would make the order less random
)


class Batches:
    """The micro-batches of every optimizer step of a run.

    Each epoch is a permutation of the samples, cut into full micro-batches (the remainder is left out, another one
    each epoch), so that every micro-batch has as many samples. With `group_by_length`, spans of BUCKET
    micro-batches are sorted by length before the cut and all micro-batches shuffled after it.
    """

    def __init__(self, samples, spec: Spec):
        self.samples, self.spec = samples, spec
        self.size = spec.settings.micro_batch
        self._epoch = lru_cache(2)(self._drawn)  # a step can straddle two epochs
        self.per_epoch = len(samples) // self.size
        if not self.per_epoch:
            raise UserError(
                f"{spec.data['name']}: {len(samples)} samples are too few for --micro-batch {self.size}"
            )
        self.steps = spec.preset.steps or spec.preset.epochs * self.per_epoch // spec.micro_batches
        if not self.steps:
            raise UserError(
                f"{spec.data['name']}: {len(samples)} samples are too few for --batch {spec.preset.batch}"
            )

    def _drawn(self, epoch: int) -> np.ndarray:
        draw = np.random.default_rng([self.spec.seed, epoch])
        order = draw.permutation(len(self.samples))[: self.per_epoch * self.size]
        if self.spec.settings.group_by_length:
            lengths = self.samples.lengths
            spans = np.array_split(order, range(BUCKET * self.size, len(order), BUCKET * self.size))
            order = np.concatenate(
                [span[np.argsort(lengths[span], kind="stable")] for span in spans]
            )
            return draw.permutation(order.reshape(self.per_epoch, self.size))
        return order.reshape(self.per_epoch, self.size)

    def step(self, step: int) -> list[np.ndarray]:
        """The samples of each micro-batch of an optimizer step, counted from 0: int arrays [micro_batch].

        All of them, whichever process works on which: the same step of one process or of many.
        """
        first = step * self.spec.micro_batches
        numbers = range(first, first + self.spec.micro_batches)
        return [
            self._epoch(number // self.per_epoch)[number % self.per_epoch] for number in numbers
        ]

    def padded_length(self, indices: np.ndarray) -> int:
        """Tokens to which these samples are padded: the limit, or the longest rounded up to one of few lengths."""
        limit = self.spec.preset.max_length
        if self.spec.settings.padding == "max_length":
            return limit
        return min(limit, int(-(-self.samples.lengths[indices].max() // ROUND) * ROUND))

    def tokens(self, micro_batches: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """What a step processes, in tokens: the lengths of its samples, and of what is computed for them."""
        padded = [np.full(len(m), self.padded_length(m)) for m in micro_batches]
        return self.samples.lengths[np.concatenate(micro_batches)], np.concatenate(padded)

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Model inputs, int64: [micro_batch, padded_length], and [micro_batch] for the positions."""
        return self.samples.batch(indices, self.padded_length(indices))

    def collate(self, indices: np.ndarray, device: torch.device) -> dict[str, torch.Tensor]:
        """`arrays` on the device; the copy to a GPU does not wait."""
        tensors = {name: torch.from_numpy(array) for name, array in self.arrays(indices).items()}
        if device.type == "cuda":
            tensors = {
                name: t.pin_memory().to(device, non_blocking=True) for name, t in tensors.items()
            }
        return tensors
