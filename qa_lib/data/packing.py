"""Training without padding: several features in one packed row of static length, isolated from one another (row E1).

Half of a batch that is padded to 384 tokens is not text. Packing (Krell et al. 2021) lays features end to end instead.
Here a micro-batch keeps its number of features, so that the training stays the same: features are dealt to
micro-batches so that all have nearly the same number of tokens (`deal`), and each is one packed row of `budget` tokens,
the same for every step of a run. That is one shape to compile and to capture as a CUDA graph, with hardly any padding.
Attention runs within segments (`cu_seqlens`, model/attention.py), softmax and loss as well (model/packed.py).
"""

from functools import cached_property

import numpy as np

from qa_lib.data.batches import Batches
from qa_lib.errors import UserError
from qa_lib.spec import Spec

DEALT_TOGETHER = 256  # micro-batches that are dealt together: more are better balanced, fewer are more random
PER_TOKEN = ("input_ids", "token_type_ids", "position_ids")  # what a packed row has for each token, where it is given
ALIGN = 64  # the budget and limits of segments are multiples of this many tokens, for whole tiles in matrix products


def deal(order: np.ndarray, lengths: np.ndarray, size: int) -> np.ndarray:
    """Features `order` (n x size of them) in n groups of `size` with nearly equal sums of `lengths`: int [n, size].

    Longest first, in rounds that give each group one feature, the longest of the round to the group that has least so
    far (the greedy rule for balanced partition of Graham 1969, with equal numbers).
    """
    rounds = order[np.argsort(-lengths[order], kind="stable")].reshape(size, -1)
    groups, totals = np.empty_like(rounds), np.zeros(rounds.shape[1], dtype=np.int64)
    for row, chunk in zip(groups, rounds, strict=True):
        row[np.argsort(totals, kind="stable")] = chunk
        totals += lengths[row]
    return groups.T


def _aligned(tokens: int) -> int:
    return int(-(-tokens // ALIGN) * ALIGN)


class PackedBatches(Batches):
    """Micro-batches as packed rows: `size` features end to end, then padding up to `budget` tokens.

    The padding is cut into segments of its own of at most max_length tokens: a kernel given a longer one would leave
    part of its output unwritten.
    """

    def __init__(self, features, spec: Spec):
        super().__init__(features, spec)
        epochs = -(-self.steps * spec.micro_batches // self.per_epoch)
        lengths = [features.lengths[self._drawn(epoch)] for epoch in range(epochs)]
        totals = np.concatenate([part.sum(1) for part in lengths])
        self.budget, self.least = _aligned(totals.max()), int(totals.min())
        # Features are dealt longest first, so that the k-th of a micro-batch is about as long as the k-th of any other.
        self.longest = np.max([part.max(0) for part in lengths], axis=0)

    @cached_property
    def limits(self) -> list[int]:
        """No segment of any packed row has more tokens: those of the features, then those of the padding."""
        most = self.spec.scale.max_length
        return [
            _aligned(n) for n in (*self.longest, *(min(most, n) for n in range(self.budget - self.least, 0, -most)))
        ]

    def _drawn(self, epoch: int) -> np.ndarray:
        order = super()._drawn(epoch)
        # Windows of like size: a small one at the end could not be balanced, and would set the budget of all.
        windows = np.array_split(order, max(1, len(order) // DEALT_TOGETHER))
        dealt = [deal(window.ravel(), self.features.lengths, self.size) for window in windows]
        return np.random.default_rng([self.spec.seed, epoch, 1]).permutation(np.concatenate(dealt))

    def tokens(self, micro_batches: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        lengths = [self.features.lengths[m] for m in micro_batches]
        # Attention pays for a segment's own length alone, the rest of the model for the whole packed row.
        tails = [[self.budget - part.sum()] for part in lengths]
        return np.concatenate(lengths), np.concatenate([*lengths, *tails])

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """A packed row, int64: what PER_TOKEN names [1, budget]; cu_seqlens int32 [segments + 1],
        where each segment begins and the last one ends; start_positions and end_positions [size] within segments; what
        lay_out() gives, for the kernel that pads."""
        limit, lengths = self.spec.scale.max_length, self.features.lengths[indices]
        if (total := lengths.sum()) > self.budget:
            raise UserError(f"features of {total} tokens do not fit into a packed row of {self.budget}")
        batch = self.features.batch(indices, int(lengths.max()))
        real = batch["attention_mask"].astype(bool)
        rows = {"position_ids": np.broadcast_to(np.arange(real.shape[1]), real.shape)} | batch
        packed = {name: np.zeros((1, self.budget), dtype=np.int64) for name in PER_TOKEN if name in rows}
        for name, row in packed.items():
            row[0, :total] = rows[name][real]
        tails = len(self.limits) - self.size
        ends = np.minimum(total + limit * np.arange(1, tails + 1), self.budget)
        packed["cu_seqlens"] = np.concatenate([[0], lengths.cumsum(), ends]).astype(np.int32)
        if self.spec.settings.attention == "efficient":
            packed |= lay_out(packed["cu_seqlens"], self.limits)
        return packed | {name: batch[name] for name in ("start_positions", "end_positions")}


def lay_out(cu_seqlens: np.ndarray, limits: list[int]) -> dict[str, np.ndarray]:
    """The segments each padded to its limit, one after another, in sum(limits) places: slots, the token at each (int64;
    any token where there is padding), bias, 0 or -inf there (float32), and place, where each token went (int64)."""
    if (np.diff(cu_seqlens) > limits).any():
        raise ValueError(f"segments of {np.diff(cu_seqlens).tolist()} tokens are beyond their limits {limits}")
    first = np.cumsum(limits) - limits
    slots = np.arange(sum(limits)) + np.repeat(cu_seqlens[:-1] - first, limits)
    inside = slots < np.repeat(cu_seqlens[1:], limits)
    place = np.empty(cu_seqlens[-1], dtype=np.int64)
    place[slots[inside]] = np.flatnonzero(inside)
    bias = np.where(inside, 0, -np.inf).astype(np.float32)
    return {"slots": np.minimum(slots, len(place) - 1), "bias": bias, "place": place}
