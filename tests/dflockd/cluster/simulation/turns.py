"""The turns of groups, and the judge of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tests.dflockd.cluster.simulation.machines import Key

if TYPE_CHECKING:
    from tests.dflockd.cluster.simulation.world import World


class Turns:
    """What groups have had of each key, by the numbers that those who come are given, too."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.groups: dict[float, bytes] = {}
        """To which group each number belongs."""
        self._had: dict[tuple[Key, bytes], int] = {}
        self._aside: dict[tuple[Key, bytes], int] = {}
        """When a group was last granted a lock; and when a slot was last set aside for it."""
        self.missed: set[float] = set()
        """Those whose turn has come when they were away."""

    def are_of_one(self, number: float, other: float) -> bool:
        return self.groups.get(number) == self.groups.get(other)

    def judge(self, key: Key, number: float, present: Iterable[float]) -> None:
        """No group has two turns while another has none and somebody waits there all the while."""
        group = self.groups.get(number, b"")
        last = self._had.get((key, group), 0)
        for other in present:
            name = self.groups.get(other, b"")
            theirs = max(self._had.get((key, name), 0), self._aside.get((key, name), 0))
            if name != group and max(other, theirs) < last and other not in self.missed:
                raise self._world.violation(
                    f"number {number:g} of {key.name.decode()} is the second of group "
                    f"{group.decode()} while number {other:g} of {name.decode()} waits"
                )

    def note(self, key: Key, number: float) -> None:
        self._had[key, self.groups.get(number, b"")] = next(self._world.numbers)

    def set_aside(self, key: Key, numbers: Iterable[float]) -> None:
        now = next(self._world.numbers)
        for number in numbers:
            if number not in self.missed:
                self.missed.add(number)
                self._aside[key, self.groups.get(number, b"")] = now
