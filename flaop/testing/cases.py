"""Choice of cases: every pair of values instead of every combination."""

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(**axes: Sequence[Any]) -> list[dict[str, Any]]:
    """A small list of cases in which any two values of any two axes meet at least once.

    Greedy and without chance: the same axes give the same cases.
    """
    names = list(axes)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(axes[a]))
        for j in range(len(axes[b]))
    }
    cases = []
    while missing:
        chosen = dict(min(missing, key=lambda pair: [(names.index(n), i) for n, i in pair]))
        for name in names:
            if name not in chosen:
                chosen[name] = max(
                    range(len(axes[name])),
                    key=lambda value: _new_pairs(names, chosen, name, value, missing),
                )
        missing -= set(itertools.combinations([(n, chosen[n]) for n in names], 2))
        cases.append({name: axes[name][chosen[name]] for name in names})
    return cases


def _new_pairs(
    names: list[str], chosen: dict[str, int], name: str, value: int, missing: set
) -> tuple[int, int]:
    """How many missing pairs a value closes now, and how many it could close at all."""
    place = names.index(name)
    now = 0
    for other, index in chosen.items():
        pair = ((other, index), (name, value))
        now += (pair if names.index(other) < place else pair[::-1]) in missing
    return now, sum((name, value) in pair for pair in missing)
