"""Few combinations in which every two values that go together occur.

They are a covering array, made greedily.
"""

import dataclasses
import itertools
import random
from collections.abc import Callable

from qa_lib.spec import rules
from qa_lib.spec.settings import Settings

# Draws of a combination with a pair, the best of which is taken. Where all fail, up to ten times as
# many follow until one succeeds.
TRIES = 30

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
    clashes = {frozenset(pair) for pair in couples if clash(*pair)}
    missing = {frozenset(pair) for pair in couples} - clashes
    chance = random.Random(0)
    chosen = []
    for pair in map(frozenset, couples):
        if pair not in missing:
            continue
        missing.discard(pair)  # also where no combination has it
        best = _best_with(pair, values, clashes, missing, chance)
        if best:
            missing -= pairs_of(best)
            chosen.append(best)
    return chosen


def _best_with(
    pair: frozenset, values: dict, clashes: set, missing: set, chance: random.Random
) -> dict | None:
    """Return the best of TRIES combinations with that pair: it has most of what is missing.

    None where the pair is in no combination.
    """
    drawn = []
    for number in range(10 * TRIES):
        if drawn and number >= TRIES:
            break
        combination = _draw(pair, values, clashes, missing, chance)
        if combination:
            drawn.append(combination)
    return max(drawn, key=lambda found: len(missing & pairs_of(found)), default=None)


def _draw(
    pair: frozenset, values: dict, clashes: set, missing: set, chance: random.Random
) -> dict | None:
    """Return a combination with that pair; None where a name has no value left.

    Names come in random order, and each takes the value that has most of what is missing with those
    before it.
    """
    chosen = dict(pair)
    others = [name for name in values if name not in chosen]
    for name in chance.sample(others, len(others)):
        new = {value: _pairs_with((name, value), chosen) for value in values[name]}
        free = [value for value in values[name] if not clashes & new[value]]
        if not free:
            return None
        shuffled = chance.sample(free, len(free))
        chosen[name] = max(shuffled, key=lambda value, new=new: len(missing & new[value]))
    return chosen


def _pairs_with(one: tuple, chosen: dict) -> set[frozenset]:
    return {frozenset((one, other)) for other in chosen.items()}
