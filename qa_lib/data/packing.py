"""Training without padding: several samples in one packed sequence of static length, isolated from one another (variant
E-packed).

Half of a batch that is padded to 384 tokens is not text. Sequence packing (Krell et al. 2021) concatenates samples
instead. Here a micro-batch keeps its number of samples, so that the training stays the same: samples are dealt to
micro-batches so that all have nearly the same number of tokens (`deal`), and each is one packed sequence of `budget`
tokens, the same for every step of a run. That is one shape to compile and to capture as a CUDA graph, with hardly any
padding. Attention runs within segments (`cu_seqlens`, model/attention.py), softmax and loss as well (model/packed.py).

The kernel that a T4 has takes segments of equal length alone. Samples that are copied to where each is as long as the
kernel wants it, in both passes of every layer, would move three times the bytes that it moves itself. For that kernel
the packed sequence itself has a place for each sample, the same in all: as long as the longest that comes there, and
with few lengths in all, since each is a call of the kernel. As samples are dealt by length, that is 7 to 8 % more
tokens for SQuAD v2 from 32 samples on (counted; 14 % at 8), and nothing is copied.
"""

from functools import cache, cached_property

import numpy as np

from qa_lib.data.batches import Batches
from qa_lib.errors import UserError
from qa_lib.spec.spec import Spec

DEALT_TOGETHER = (
    256  # micro-batches that are dealt together: more are better balanced, fewer are more random
)
PER_TOKEN = (
    "input_ids",
    "token_type_ids",
    "position_ids",
)  # what a packed sequence has for each token, where given
ALIGN = 64  # the budget and limits of segments are multiples of this many tokens, for whole tiles in GEMMs
PLACES = 16  # where each sample has a place of its own, its length is a multiple of this, for whole loads of memory,
CALLS = 12  # and has at most so many values


def deal(order: np.ndarray, lengths: np.ndarray, size: int) -> np.ndarray:
    """Samples `order` (n x size of them) in n groups of `size` with nearly equal sums of `lengths`: int [n, size].

    Longest first, in rounds that give each group one sample, the longest of the round to the group that has least so
    far (the greedy rule for balanced partition of Graham 1969, with equal numbers).
    """
    rounds = order[np.argsort(-lengths[order], kind="stable")].reshape(size, -1)
    groups, totals = np.empty_like(rounds), np.zeros(rounds.shape[1], dtype=np.int64)
    for row, chunk in zip(groups, rounds, strict=True):
        row[np.argsort(totals, kind="stable")] = chunk
        totals += lengths[row]
    return groups.T


def _aligned(tokens, to: int = ALIGN):
    return -(-tokens // to) * to


def few_limits(lengths: np.ndarray, most: int) -> list[int]:
    """For each of some `lengths` a limit that is no lower, a multiple of PLACES; of the limits with at most `most`
    values, those with the least sum."""
    wanted = _aligned(lengths, PLACES)
    values, counts = np.unique(wanted, return_counts=True)

    @cache
    def least(end: int, values_left: int) -> tuple[float, tuple]:
        """The sum of limits for the `end` lowest values, and what values these limits have."""
        if not end or not values_left:
            return (np.inf if end else 0), ()
        top, options = (
            values[end - 1],
            ((begin, least(begin, values_left - 1)) for begin in range(end)),
        )
        return min(
            (total + top * counts[begin:end].sum(), (*lower, top))
            for begin, (total, lower) in options
        )

    chosen = np.array(least(len(values), most)[1])
    return chosen[np.searchsorted(chosen, wanted)].tolist()


class PackedBatches(Batches):
    """Micro-batches as packed sequences: `size` samples one after the other, then padding up to `budget` tokens.

    The padding is cut into segments of its own of at most max_length tokens: a kernel given a longer one would leave
    part of its output unwritten.
    """

    def __init__(self, samples, spec: Spec):
        super().__init__(samples, spec)
        epochs = -(-self.steps * spec.micro_batches // self.per_epoch)
        lengths = [samples.lengths[self._drawn(epoch)] for epoch in range(epochs)]
        totals = np.concatenate([part.sum(1) for part in lengths])
        self.least = int(totals.min())
        # Samples are dealt longest first, so that the k-th of a micro-batch is about as long as the k-th of any other.
        self.longest = np.max([part.max(0) for part in lengths], axis=0)
        self.has_places = spec.settings.attention == "efficient"
        self.budget = sum(self.limits) if self.has_places else int(_aligned(totals.max()))

    @cached_property
    def limits(self) -> list[int]:
        """No segment of any packed sequence has more tokens: those of the samples, then those of the padding. Where
        samples have places, how long these are."""
        if self.has_places:
            return few_limits(self.longest, CALLS)
        most = self.spec.preset.max_length
        tails = (min(most, n) for n in range(self.budget - self.least, 0, -most))
        return [int(_aligned(n)) for n in (*self.longest, *tails)]

    def _drawn(self, epoch: int) -> np.ndarray:
        order = super()._drawn(epoch)
        # Windows of like size: a small one at the end could not be balanced, and would set the budget of all.
        windows = np.array_split(order, max(1, len(order) // DEALT_TOGETHER))
        dealt = [deal(window.ravel(), self.samples.lengths, self.size) for window in windows]
        return np.random.default_rng([self.spec.seed, epoch, 1]).permutation(np.concatenate(dealt))

    def tokens(self, micro_batches: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        lengths = [self.samples.lengths[m] for m in micro_batches]
        # Attention pays for a segment's own length alone, the rest of the model for the whole packed sequence.
        tails = [[self.budget - part.sum()] for part in lengths]
        return np.concatenate(lengths), np.concatenate([*lengths, *tails])

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """A packed sequence, int64: what PER_TOKEN names [1, budget]; cu_seqlens int32 [segments + 1],
        where each segment begins and the last one ends; start_positions and end_positions [size] within segments. Where
        samples have places, a segment is a place, and bias float32 [budget] is 0 for tokens and -inf for padding."""
        lengths = self.samples.lengths[indices]
        batch = self.samples.batch(indices, int(lengths.max()))
        real = batch["attention_mask"].astype(bool)
        rows = {"position_ids": np.broadcast_to(np.arange(real.shape[1]), real.shape)} | batch
        packed = {
            name: np.zeros((1, self.budget), dtype=np.int64) for name in PER_TOKEN if name in rows
        }
        begins, packed["cu_seqlens"] = self._cut(lengths)
        place = np.repeat(begins - (lengths.cumsum() - lengths), lengths) + np.arange(lengths.sum())
        for name in packed.keys() - {"cu_seqlens"}:
            packed[name][0, place] = rows[name][real]
        if self.has_places:
            packed["bias"] = np.full(self.budget, -np.inf, dtype=np.float32)
            packed["bias"][place] = 0.0
        return packed | {name: batch[name] for name in ("start_positions", "end_positions")}

    def _cut(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where samples of these `lengths` begin, and cu_seqlens. Raises UserError for samples that do not fit."""
        if self.has_places:
            if len(lengths) != self.size or (lengths > self.limits).any():
                raise UserError(
                    f"samples of {lengths.tolist()} tokens are not for places of {self.limits}"
                )
            ends = np.cumsum([0, *self.limits])
            return ends[:-1], ends.astype(np.int32)
        if (total := lengths.sum()) > self.budget:
            raise UserError(
                f"samples of {total} tokens do not fit into a packed sequence of {self.budget}"
            )
        tails = self.spec.preset.max_length * np.arange(1, len(self.limits) - self.size + 1)
        ends = np.concatenate([[0], lengths.cumsum(), np.minimum(total + tails, self.budget)])
        return ends[: len(lengths)], ends.astype(np.int32)
