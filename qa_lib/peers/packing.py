"""Group samples into packed sequences so that hardly a token of them is padding.

All samples of an epoch are grouped at once. A window of a few thousand samples would have a mean
length of its own, its sequences would be as full as that mean allows, and the fullest window would
set the length of all. This file imports nothing of the library.
"""

import heapq
import math

import numpy as np

SWAP_ROUNDS = 20  # each about halves the differences between the groups' sums


def deal(lengths: np.ndarray, size: int) -> list[np.ndarray]:
    """Return groups of `size` samples each, as indices, with nearly equal sums of `lengths`.

    Samples are dealt like cards, longest first, in rounds that give each group one sample: the
    longest of the round goes to the group with the smallest sum. Then the fullest and the emptiest
    groups swap samples for a few rounds, until all sums are within a token or two. Up to size - 1
    samples are left out.
    """
    count = len(lengths) // size
    rounds = np.argsort(-lengths, kind="stable")[: count * size].reshape(size, count)
    sums = np.zeros(count, dtype=np.int64)
    dealt = np.empty_like(rounds)
    for row, samples in zip(dealt, rounds, strict=True):
        row[np.argsort(sums, kind="stable")] = samples
        sums += lengths[row]
    groups = dealt.T.copy()
    for _ in range(SWAP_ROUNDS):
        _swap(groups, lengths)
    return list(groups)


def _swap(groups: np.ndarray, lengths: np.ndarray) -> None:
    """Bring the sums of `groups`, [groups, size], nearer to each other, in place.

    The fullest group is paired with the emptiest, the second fullest with the second emptiest, and
    so on. Each pair swaps the two samples that bring its sums nearest to each other, if any do.
    """
    order = np.argsort(lengths[groups].sum(1), kind="stable")
    half = len(order) // 2
    emptier, fuller = order[:half], order[::-1][:half]
    low = groups[emptier]
    high = groups[fuller]
    gap = lengths[high].sum(1) - lengths[low].sum(1)
    # [pair, i, j]: the gap after a swap of sample i of the fuller group and j of the emptier one.
    gap_after = gap[:, None, None] - 2 * (lengths[high][:, :, None] - lengths[low][:, None, :])
    distance = np.abs(gap_after).reshape(half, -1)
    best = distance.argmin(1)
    pair = np.arange(half)
    i, j = np.divmod(best, groups.shape[1])
    better = distance[pair, best] < gap
    pair, i, j = pair[better], i[better], j[better]
    high[pair, i], low[pair, j] = low[pair, j].copy(), high[pair, i].copy()
    groups[emptier] = low
    groups[fuller] = high


def fill(lengths: np.ndarray, budget: int) -> list[np.ndarray]:
    """Return groups of samples, as indices, whose `lengths` sum up to `budget` at most.

    The number of samples in a group is free. Sums are nearly `budget` where a group has some dozens
    of samples. Longest first, each sample goes to the group with the smallest sum, in as few groups
    as hold them all.

    Raises ValueError: a sample is longer than `budget`.
    """
    if lengths.max() > budget:
        raise ValueError(f"a sample of {lengths.max()} tokens is longer than {budget}")
    count = math.ceil(lengths.sum() / budget)
    while True:
        groups = [[] for _ in range(count)]
        sums = [(0, group) for group in range(count)]  # a heap
        for sample in np.argsort(-lengths, kind="stable"):
            total, group = heapq.heappop(sums)
            groups[group].append(sample)
            heapq.heappush(sums, (total + int(lengths[sample]), group))
        if max(total for total, _ in sums) <= budget:
            return [np.array(group) for group in groups]
        count += max(1, count // 1000)


def tile(tokens: int, multiple: int = 128) -> int:
    """Return `tokens` rounded up to a multiple, as GEMMs compute whole tiles of rows."""
    return math.ceil(tokens / multiple) * multiple


def cut(limits: list[int], most: int, multiple: int) -> list[tuple[int, int]]:
    """Cut samples, in their order, into at most `most` runs that are padded to one length each.

    `limits` are the most tokens of each sample. Return the number of samples and the length, a
    multiple of `multiple`, of each run. The cut has the least sum of squared lengths, which is what
    attention costs, and among such cuts the fewest runs. It is found by dynamic programming over
    the ends of runs.
    """
    # For each number of first samples, the least cost of runs that hold them, and what these are:
    # first for no run at all, then for one more in each round.
    best: list[tuple[float, tuple]] = [(0, ())] + [(math.inf, ())] * len(limits)
    for _ in range(most):
        extended = best[:1]
        for end in range(1, len(limits) + 1):
            candidates = [best[end]]
            length = 0
            for begin in reversed(range(end)):
                length = max(length, tile(limits[begin], multiple))
                cost, runs = best[begin]
                samples = end - begin
                candidates.append((cost + samples * length**2, (*runs, (samples, length))))
            extended.append(min(candidates, key=lambda found: (found[0], len(found[1]))))
        best = extended
    return list(best[-1][1])


def sequence(lengths: np.ndarray, budget: int, most: int) -> dict[str, np.ndarray]:
    """Return where samples of these `lengths` lie in a packed sequence of `budget` tokens.

    These are position_ids [1, budget] and cu_seqlens [most + 2], the ends of `most` + 1 segments:
    the samples, then empty ones up to `most`, and the padding.
    """
    padding = budget - lengths.sum()
    empty = np.full(most - len(lengths), lengths.sum())
    ends = np.concatenate([[0], lengths.cumsum(), empty])
    positions = [np.arange(length) for length in (*lengths, padding)]
    return {
        "position_ids": np.concatenate(positions)[None],
        "cu_seqlens": np.append(ends, budget).astype(np.int32),
    }
