"""Which samples share a packed sequence, so that hardly a token of it is padding. Nothing of the library is used.

Over all samples of an epoch at once, since a window of a few thousand samples has a mean of its own: the sequences of
one window are then as full as its mean allows, and the fullest window sets the length of all.
"""

import heapq

import numpy as np

SWAPS = 20  # rounds; each about halves what sums differ by


def deal(lengths: np.ndarray, size: int) -> list[np.ndarray]:
    """Groups of `size` samples each, with nearly equal sums of `lengths`; up to size - 1 samples are left out.

    Longest first, in rounds that give each group one sample: the longest of the round to the group that has least.
    Then fullest and emptiest groups swap samples, in a few rounds, until all are within a token or two.
    """
    groups = len(lengths) // size
    rounds = np.argsort(-lengths, kind="stable")[: groups * size].reshape(size, groups)
    totals, dealt = np.zeros(groups, dtype=np.int64), np.empty_like(rounds)
    for row, samples in zip(dealt, rounds, strict=True):
        row[np.argsort(totals, kind="stable")] = samples
        totals += lengths[row]
    dealt = dealt.T.copy()
    for _ in range(SWAPS):
        _swap(dealt, lengths)
    return list(dealt)


def _swap(dealt: np.ndarray, lengths: np.ndarray) -> None:
    """The fullest group with the emptiest, the next with the next: each pair swaps the two samples that bring their
    sums nearest to one another, if any do."""
    order = np.argsort(lengths[dealt].sum(1), kind="stable")
    half = len(order) // 2
    low, high = dealt[order[:half]], dealt[order[::-1][:half]]
    gap = lengths[high].sum(1) - lengths[low].sum(1)
    # What the gap would be after a swap of sample i of the fuller group with sample j of the emptier one.
    after = gap[:, None, None] - 2 * (lengths[high][:, :, None] - lengths[low][:, None, :])
    best = np.abs(after).reshape(half, -1).argmin(1)
    pair, (i, j) = np.arange(half), np.divmod(best, dealt.shape[1])
    better = np.abs(after).reshape(half, -1)[pair, best] < gap
    pair, i, j = pair[better], i[better], j[better]
    high[pair, i], low[pair, j] = low[pair, j].copy(), high[pair, i].copy()
    dealt[order[:half]], dealt[order[::-1][:half]] = low, high


def fill(lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    """Groups of any number of samples whose `lengths` sum up to `budget` at most, and nearly to it where groups are of
    some dozens of samples.

    Longest first, each sample to the group that has least, in as few groups as hold them all. Raises ValueError for a
    sample longer than `budget`.
    """
    if lengths.max() > budget:
        raise ValueError(f"a sample of {lengths.max()} tokens is longer than {budget}")
    number = -(-int(lengths.sum()) // budget)
    while True:
        groups = [[] for _ in range(number)]
        least = [(0, group) for group in range(number)]
        for sample in np.argsort(-lengths, kind="stable"):
            total, group = heapq.heappop(least)
            groups[group].append(sample)
            heapq.heappush(least, (total + int(lengths[sample]), group))
        if max(total for total, _ in least) <= budget:
            return [np.array(group) for group in groups]
        number += max(1, number // 1000)


def tile(tokens: int, border: int = 128) -> int:
    """`tokens`, up to a tile's border: GEMMs compute whole tiles of rows."""
    return -(-tokens // border) * border


def sequence(lengths: np.ndarray, budget: int, most: int) -> dict[str, np.ndarray]:
    """Where samples of these `lengths` lie in a packed sequence of `budget` tokens: position_ids [1, budget] and
    cu_seqlens [most + 2]: at most `most` samples, empty segments in place of those that lack, and the padding."""
    ends = np.concatenate([[0], lengths.cumsum(), np.full(most - len(lengths), lengths.sum())])
    positions = [np.arange(length) for length in (*lengths, budget - lengths.sum())]
    return {
        "position_ids": np.concatenate(positions)[None],
        "cu_seqlens": np.append(ends, budget).astype(np.int32),
    }
