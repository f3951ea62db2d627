"""All pairs: few rows in which any two values of any two factors come together at least once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]
"""A value of each factor; of some factors only, while it is made."""
Pair = frozenset[tuple[str, int]]
"""Two factors, and which of their values."""

TRIES = 20
"""Rows that are made before the best is taken; there are dead ends, too."""


def pairs_of(row: Mapping[str, int]) -> Iterator[Pair]:
    return map(frozenset, combinations(row.items(), 2))


def all_pairs(
    factors: Mapping[str, Sequence[Any]], is_refused: Callable[[Row], bool], seed: int
) -> tuple[list[Row], set[Pair]]:
    """Return the rows, and the pairs that no allowed row can have.

    Args:
        factors: the values of each.
        is_refused: whether a row, or the part of it that there is, cannot be.
        seed: another one makes other rows.
    """
    dice = random.Random(seed)
    numbers = {name: range(len(values)) for name, values in factors.items()}
    open_pairs = [
        frozenset([(one, m), (two, n)])
        for one, two in combinations(factors, 2)
        for m in numbers[one]
        for n in numbers[two]
    ]
    dice.shuffle(open_pairs)
    left, never, rows = dict.fromkeys(open_pairs), set[Pair](), []

    def valued(row: Mapping[str, int]) -> Row:
        return {name: factors[name][number] for name, number in row.items()}

    def fill(row: dict[str, int]) -> dict[str, int] | None:
        names = [name for name in factors if name not in row]
        dice.shuffle(names)
        for name in names:
            fits = [n for n in numbers[name] if not is_refused(valued({**row, name: n}))]
            if not fits:
                return None
            dice.shuffle(fits)
            row[name] = max(
                fits,
                key=lambda n: sum(frozenset([(name, n), each]) in left for each in row.items()),
            )
        return row

    while left:
        first = next(iter(left))
        made = [fill(dict(first)) for _ in range(TRIES) if not is_refused(valued(dict(first)))]
        whole = [row for row in made if row is not None]
        if not whole:
            never.add(first)
            del left[first]
            continue
        best = max(whole, key=lambda row: sum(pair in left for pair in pairs_of(row)))
        for pair in pairs_of(best):
            left.pop(pair, None)
        rows.append({name: factors[name][best[name]] for name in factors})
    return rows, never
