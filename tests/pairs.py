"""Few combinations in which every two values that go together occur: a covering array, made greedily."""

import itertools
import random
from collections.abc import Callable, Iterator

DRAWS = 8  # combinations to choose the next one from


def pairs_of(combination: dict) -> set[frozenset]:
    """Every two (name, value) of a combination."""
    return set(map(frozenset, itertools.combinations(combination.items(), 2)))


def _bits(mask: int) -> Iterator[int]:
    while mask:
        yield (low := mask & -mask).bit_length() - 1
        mask ^= low


class Covering:
    """Combinations of one value for each name, none with two (name, value) that clash, by number and bit mask."""

    def __init__(self, values: dict[str, tuple], clash: Callable[[tuple, tuple], bool]):
        self.all = [(name, value) for name, several in values.items() for value in several]
        self.names = [sum(1 << i for i, (other, _) in enumerate(self.all) if other == name) for name in values]
        self.beside = [self._beside(i, clash) for i in range(len(self.all))]

    def _beside(self, i: int, clash: Callable[[tuple, tuple], bool]) -> int:
        """What may stand beside a value, and itself."""
        one = self.all[i]
        fits = (i == j or (one[0] != other[0] and not clash(one, other)) for j, other in enumerate(self.all))
        return sum(1 << j for j, fit in enumerate(fits) if fit)

    def _left(self, mask: int) -> int:
        """What can still stand beside all that has no choice any more; 0 where a name has no value left."""
        before = 0
        while mask != before:
            before = mask
            for name in self.names:
                left = mask & name
                if not left:
                    return 0
                if not left & (left - 1):
                    mask &= self.beside[left.bit_length() - 1]
        return mask

    def _can_end(self, mask: int) -> bool:
        """Whether any combination is left."""
        mask = self._left(mask)
        choices = [mask & name for name in self.names if (mask & name) & ((mask & name) - 1)]
        if not mask or not choices:
            return bool(mask)
        return any(self._can_end(mask & self.beside[i]) for i in _bits(min(choices, key=int.bit_count)))

    def combinations(self) -> list[dict]:
        """Combinations in which every two values occur together that do in any."""
        missing, every = [0] * len(self.all), (1 << len(self.all)) - 1
        for i, j in itertools.combinations(range(len(self.all)), 2):
            both = self.beside[i] & self.beside[j]
            if self.beside[i] >> j & 1 and self._can_end(every & both):
                missing[i] |= 1 << j
                missing[j] |= 1 << i
        draw, found = random.Random(0), []
        while any(missing):
            drawn = [self._drawn(missing, draw) for _ in range(DRAWS)]
            best = max(drawn, key=lambda chosen: sum((missing[i] & chosen).bit_count() for i in _bits(chosen)))
            for i in _bits(best):
                missing[i] &= ~best
            found.append({self.all[i][0]: self.all[i][1] for i in _bits(best)})
        return found

    def _drawn(self, missing: list[int], draw: random.Random) -> int:
        """A combination that begins with the value that misses most others, and takes what misses most of it next."""
        mask, chosen = (1 << len(self.all)) - 1, 0
        while True:
            choices = [i for name in self.names if not name & chosen for i in _bits(mask & name)]
            if not choices:
                return chosen
            seen = chosen or mask
            best = max(choices, key=lambda i: ((missing[i] & seen).bit_count(), draw.random()))
            left = self._left(mask & self.beside[best])
            if left and self._can_end(left):
                mask, chosen = left, chosen | 1 << best
            else:
                mask &= ~(1 << best)
