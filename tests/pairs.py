"""Few combinations in which every two values that go together occur.

They are a covering array, made greedily.
"""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable

from qa_lib.spec import rules
from qa_lib.spec.settings import Settings

# Draws of a combination with a pair, the best of which is taken. Where all fail, up to ten times as
# many follow until one succeeds.
TRIES = 12

DEFAULTS = {field.name: field.default for field in dataclasses.fields(Settings)}


def unchecked(**values) -> Settings:
    """Return settings as they are, whether they go together or not."""
    settings = object.__new__(Settings)
    for name, default in DEFAULTS.items():
        object.__setattr__(settings, name, values.get(name, default))
    return settings


def clash(one: tuple, other: tuple) -> bool:
    """Return whether a rule says of two (name, value) that they do not go together."""
    named = {f"{name} {value!r}" for name, value in (one, other)}
    for sentence in rules.conflicts(unchecked(**dict([one, other]))):
        culprits, _, _ = sentence.partition(" do not go together: ")
        if set(culprits.split(" and ")) == named:
            return True
    return False


def pairs_of(combination: dict) -> set[frozenset]:
    """Return every two (name, value) of a combination."""
    return {frozenset(pair) for pair in itertools.combinations(combination.items(), 2)}


def combinations(values: dict[str, tuple], clash: Callable[[tuple, tuple], bool]) -> list[dict]:
    """Return combinations of one value for each name, none with two (name, value) that clash."""
    every = [(name, value) for name, several in values.items() for value in several]
    couples = [pair for pair in itertools.combinations(every, 2) if pair[0][0] != pair[1][0]]
    clashing = [pair for pair in couples if clash(*pair)]
    left = Left(every, couples, clashing)
    chance = random.Random(0)
    chosen = []
    for pair in couples:
        if not left.has(pair):
            continue
        left.remove([pair])  # also where no combination has it
        best = _best_with(pair, values, left, chance)
        if best:
            left.remove(itertools.combinations(best.items(), 2))
            chosen.append(best)
    return chosen


class Left:
    """The pairs of (name, value) that no combination has so far, and those that clash.

    A set of items is an integer with a bit for each, since counting common bits takes no time.
    """

    def __init__(self, every: list[tuple], couples: list[tuple], clashing: list[tuple]):
        self.bit = {item: 1 << place for place, item in enumerate(every)}
        # item -> the items that it clashes with, and those that it has yet to be together with
        self.clashing = dict.fromkeys(every, 0)
        self.missing = dict.fromkeys(every, 0)
        for one, other in couples:
            self.missing[one] |= self.bit[other]
            self.missing[other] |= self.bit[one]
        for one, other in clashing:
            self.clashing[one] |= self.bit[other]
            self.clashing[other] |= self.bit[one]
        self.remove(clashing)

    def has(self, pair: tuple) -> bool:
        """Return whether a pair is in no combination so far."""
        one, other = pair
        return bool(self.missing[one] & self.bit[other])

    def remove(self, pairs: Iterable[tuple]) -> None:
        """Take away pairs, which a combination has."""
        for one, other in pairs:
            self.missing[one] &= ~self.bit[other]
            self.missing[other] &= ~self.bit[one]

    def bits(self, items: Iterable[tuple]) -> int:
        """Return a set of items."""
        return sum(self.bit[item] for item in items)

    def count(self, combination: dict) -> int:
        """Return how many pairs of a combination are in no other so far."""
        items = self.bits(combination.items())
        return sum((self.missing[item] & items).bit_count() for item in combination.items()) // 2


def _best_with(pair: tuple, values: dict, left: Left, chance: random.Random) -> dict | None:
    """Return the best of TRIES combinations with that pair: it has most of what is missing.

    None where the pair is in no combination.
    """
    drawn = []
    for number in range(10 * TRIES):
        if drawn and number >= TRIES:
            break
        combination = _draw(pair, values, left, chance)
        if combination:
            drawn.append(combination)
    return max(drawn, key=left.count, default=None)


def _draw(pair: tuple, values: dict, left: Left, chance: random.Random) -> dict | None:
    """Return a combination with that pair; None where a name has no value left.

    Names come in random order, and each takes the value that has most of what is missing with those
    before it.
    """
    chosen = dict(pair)
    items = left.bits(pair)
    others = [name for name in values if name not in chosen]
    for name in chance.sample(others, len(others)):
        free = [value for value in values[name] if not left.clashing[name, value] & items]
        if not free:
            return None
        shuffled = chance.sample(free, len(free))
        new = {value: (left.missing[name, value] & items).bit_count() for value in free}
        chosen[name] = max(shuffled, key=new.__getitem__)
        items |= left.bit[name, chosen[name]]
    return chosen
