"""Few combinations in which every two values that go together occur: a covering array, made greedily."""

import itertools
import random
from collections.abc import Callable

TRIES = 30  # at a combination with a pair; where none succeeds in ten times as many, the pair is in none


def pairs_of(combination: dict) -> set[frozenset]:
    """Every two (name, value) of a combination."""
    return set(map(frozenset, itertools.combinations(combination.items(), 2)))


def combinations(values: dict[str, tuple], clash: Callable[[tuple, tuple], bool]) -> list[dict]:
    """Combinations of one value for each name, none with two (name, value) that clash."""
    every = [(name, value) for name, several in values.items() for value in several]
    couples = [pair for pair in itertools.combinations(every, 2) if pair[0][0] != pair[1][0]]
    clashes = {frozenset(pair) for pair in couples if clash(*pair)}
    missing, chance, found = {frozenset(pair) for pair in couples} - clashes, random.Random(0), []
    for pair in map(frozenset, couples):
        if pair in missing:
            tries = (_drawn(pair, values, clashes, missing, chance) for _ in range(10 * TRIES))
            drawn = list(filter(None, itertools.islice(tries, TRIES))) or [
                next(filter(None, tries), {})
            ]
            best = max(drawn, key=lambda chosen: len(missing & pairs_of(chosen)))
            missing -= pairs_of(best) | {pair}
            found += [best] if best else []
    return found


def _drawn(
    pair: frozenset, values: dict, clashes: set, missing: set, chance: random.Random
) -> dict | None:
    """A combination with that pair, each other value the one that misses most of those before it; None where a name
    has no value left."""
    chosen = dict(pair)
    others = [name for name in values if name not in chosen]
    for name in chance.sample(others, len(others)):
        new = {value: _pairs_with((name, value), chosen) for value in values[name]}
        free = [value for value in values[name] if not clashes & new[value]]
        if not free:
            return None
        chosen[name] = max(
            chance.sample(free, len(free)), key=lambda value, new=new: len(missing & new[value])
        )
    return chosen


def _pairs_with(one: tuple, chosen: dict) -> set[frozenset]:
    return {frozenset((one, other)) for other in chosen.items()}
