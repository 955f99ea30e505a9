"""Training without padding: several samples in one packed sequence of static length (E-packed).

Half of a batch that is padded to 384 tokens is not text. Sequence packing (Krell et al. 2021)
concatenates samples instead, isolated from one another. Here a micro-batch keeps its number of
samples, so that the training stays the same: samples are dealt to micro-batches so that all have
nearly the same number of tokens (`deal`), and each is one packed sequence of `budget` tokens, the
same for every step of a run. That is one shape to compile and to capture as a CUDA graph, with
hardly any padding. Attention runs within segments (`cu_seqlens`, model/packed_attention.py),
softmax and loss as well (model/packed.py).

The kernel that a T4 has takes only segments of equal length. Copying samples to where each is as
long as that kernel wants it, in both passes of every layer, would move three times the bytes that
the kernel moves. For it the packed sequence itself has a place for each sample, the same places in
all sequences: each as long as the longest sample that comes there, with few lengths in all, since
each length is a call of the kernel. Since samples are dealt by length, that is 7 to 8 % more tokens
for SQuAD v2 from 32 samples on (counted; 14 % at 8), and nothing is copied.
"""

from functools import cached_property

import numpy as np

from qa_lib.data.batches import Batches, round_up
from qa_lib.errors import UserError
from qa_lib.peers import packing as peers_packing
from qa_lib.spec.spec import Spec

# Micro-batches that are dealt together: more are better balanced, fewer are more random.
DEALT_TOGETHER = 256
# What a packed sequence has for each token, where the samples have it.
PER_TOKEN = ("input_ids", "token_type_ids", "position_ids")
# The budget and limits of segments are multiples of this many tokens, for whole tiles in GEMMs.
ALIGN = 64
PLACES = 16  # lengths of places are multiples of this many tokens, for whole loads of memory
CALLS = 12  # places have at most so many lengths


def deal(order: np.ndarray, lengths: np.ndarray, size: int) -> np.ndarray:
    """Deal samples `order` (n x size of them) to n groups of `size` with nearly equal sums of
    `lengths`: int [n, size].

    Longest first, in rounds that give each group one sample, the longest of the round to the group
    that has least so far (the greedy rule for balanced partition of Graham 1969, with equal
    numbers).
    """
    by_length = order[np.argsort(-lengths[order], kind="stable")]
    rounds = by_length.reshape(size, -1)
    dealt = np.empty_like(rounds)
    totals = np.zeros(rounds.shape[1], dtype=np.int64)  # tokens of each group so far
    for number, samples in enumerate(rounds):
        dealt[number, np.argsort(totals, kind="stable")] = samples
        totals += lengths[dealt[number]]
    return dealt.T


def segment_ends(lengths: np.ndarray, budget: int, padding_segments: int, most: int) -> np.ndarray:
    """Return cu_seqlens, int64 [samples + padding_segments + 1]: 0, then where each segment ends.

    Segments are samples of these `lengths`, one after the other, then padding of at most `most`
    tokens each, as long as there is any up to `budget`. The last of them may be empty.
    """
    total = lengths.sum()
    padding_ends = total + most * np.arange(1, padding_segments + 1)
    return np.concatenate([[0], lengths.cumsum(), np.minimum(padding_ends, budget)])


def few_limits(lengths: np.ndarray, most: int) -> list[int]:
    """Return for each of some `lengths` a limit that is no lower, a multiple of PLACES.

    There are at most `most` different limits, and of all such choices this is one with the least
    sum, found by dynamic programming over the different lengths in ascending order.
    """
    wanted = round_up(lengths, PLACES)
    values, counts = np.unique(wanted, return_counts=True)
    # For each number of lowest values, the least sum of the limits that cover them, and what these
    # limits are: first for no limit at all, which covers no value, then for one more in each round.
    best: list[tuple[float, tuple]] = [(0, ())] + [(np.inf, ())] * len(values)
    for _ in range(most):
        extended = best[:1]
        for covered in range(1, len(values) + 1):
            # The highest limit is the highest value; it serves the values from `begin` on.
            limit = values[covered - 1]
            candidates = []
            for begin in range(covered):
                total, lower_limits = best[begin]
                total += limit * counts[begin:covered].sum()
                candidates.append((total, (*lower_limits, limit)))
            extended.append(min(candidates))
        best = extended
    limits = np.array(best[-1][1])
    return limits[np.searchsorted(limits, wanted)].tolist()


class PackedBatches(Batches):
    """Micro-batches as packed sequences: `size` samples one after the other, then padding up to
    `budget` tokens.

    The padding is cut into segments of its own of at most max_length tokens: a kernel given a
    longer one would leave part of its output unwritten. Where the kernel wants equal segments
    (`has_places`), each sample has a place instead, with its padding behind it.
    """

    def __init__(self, samples, spec: Spec):
        super().__init__(samples, spec)
        epochs = -(-self.steps * spec.micro_batches // self.per_epoch)
        # For each epoch, int64 [per_epoch, size].
        lengths = [samples.lengths[self._drawn(epoch)] for epoch in range(epochs)]
        totals = np.concatenate([epoch_lengths.sum(1) for epoch_lengths in lengths])
        self.least = int(totals.min())  # tokens of the micro-batch that has fewest
        # Tokens of the longest sample at each place of a micro-batch. Samples are dealt longest
        # first, so that the k-th of a micro-batch is about as long as the k-th of any other.
        self.longest = np.max([epoch_lengths.max(0) for epoch_lengths in lengths], axis=0)
        self.has_places = spec.settings.attention == "efficient"
        if self.has_places:
            self.budget = sum(self.limits)
        else:
            self.budget = int(round_up(totals.max(), ALIGN))

    @cached_property
    def limits(self) -> list[int]:
        """The most tokens that each segment has in any packed sequence, first those of the samples,
        then those of the padding. Where samples have places, these are the places' lengths."""
        if self.has_places:
            return few_limits(self.longest, CALLS)
        most = self.spec.preset.max_length
        most_padding = self.budget - self.least
        padding = [min(most, tokens) for tokens in range(most_padding, 0, -most)]
        return [int(round_up(tokens, ALIGN)) for tokens in (*self.longest, *padding)]

    def _drawn(self, epoch: int) -> np.ndarray:
        order = super()._drawn(epoch)
        # Spans of like size: a small one at the end could not be balanced, and would set the budget
        # of all.
        spans = np.array_split(order, max(1, len(order) // DEALT_TOGETHER))
        dealt = [deal(span.ravel(), self.samples.lengths, self.size) for span in spans]
        return np.random.default_rng([self.spec.seed, epoch, 1]).permutation(np.concatenate(dealt))

    def tokens(self, micro_batches: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        lengths = [self.samples.lengths[indices] for indices in micro_batches]
        # Attention pays for a segment's own length, the rest of the model for the whole sequence.
        padding = [self.budget - sample_lengths.sum() for sample_lengths in lengths]
        return np.concatenate(lengths), np.concatenate([*lengths, padding])

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return a packed sequence as inputs of the model, int64 where nothing else is said.

        What PER_TOKEN names [1, budget]; cu_seqlens int32 [segments + 1], where each segment begins
        and the last one ends; start_positions and end_positions [size] within segments. Where
        samples have places, a segment is a place, and padding_mask float32 [budget] is 0 for tokens
        and -inf for padding. Raises UserError for samples that do not fit.
        """
        lengths = self.samples.lengths[indices]
        batch = self.samples.batch(indices, int(lengths.max()))
        is_token = batch["attention_mask"].astype(bool)
        batch["position_ids"] = np.broadcast_to(np.arange(is_token.shape[1]), is_token.shape)

        begins, cu_seqlens = self._segments(lengths)
        # Where each token of the samples, one after the other, comes in the packed sequence.
        moved = begins - (lengths.cumsum() - lengths)
        place = np.repeat(moved, lengths) + np.arange(lengths.sum())
        packed = {}
        for name in PER_TOKEN:
            if name in batch:
                packed[name] = np.zeros((1, self.budget), dtype=np.int64)
                packed[name][0, place] = batch[name][is_token]
        packed["cu_seqlens"] = cu_seqlens
        if self.has_places:
            packed["padding_mask"] = np.full(self.budget, -np.inf, dtype=np.float32)
            packed["padding_mask"][place] = 0.0
        packed["start_positions"] = batch["start_positions"]
        packed["end_positions"] = batch["end_positions"]
        return packed

    def _segments(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where samples of these `lengths` begin, int64 [size], and cu_seqlens.

        Raises UserError for samples that do not fit.
        """
        if self.has_places:
            if len(lengths) != self.size or (lengths > self.limits).any():
                raise UserError(
                    f"samples of {lengths.tolist()} tokens are not for places of {self.limits}"
                )
            ends = np.cumsum([0, *self.limits])
            return ends[:-1], ends.astype(np.int32)
        total = lengths.sum()
        if total > self.budget:
            raise UserError(
                f"samples of {total} tokens do not fit into a packed sequence of {self.budget}"
            )
        padding_segments = len(self.limits) - self.size
        most = self.spec.preset.max_length
        cu_seqlens = segment_ends(lengths, self.budget, padding_segments, most)
        return cu_seqlens[: len(lengths)], cu_seqlens.astype(np.int32)


class EvenBatches(PackedBatches):
    """Packed sequences as the searched rival makes them: dealt over a whole epoch.

    They hold less than 1 % of padding, whose share is otherwise that of the fullest of
    DEALT_TOGETHER. Which samples of one length meet is random; how lengths meet is not.
    """

    def _drawn(self, epoch: int) -> np.ndarray:
        order = Batches._drawn(self, epoch).ravel()
        groups = np.stack(peers_packing.deal(self.samples.lengths[order], self.size))
        return np.random.default_rng([self.spec.seed, epoch, 1]).permutation(order[groups])
