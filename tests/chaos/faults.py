"""Which faults happen when: a schedule that follows from its seed alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = {
    "server": ("kill", "restart", "stop", "step", "shift"),
    "worker": ("kill", "child", "restart", "stop"),
    "client": ("kill", "restart", "stop"),
    "link": ("cut", "delay", "refuse"),
}
"""What can happen to what.

kill: SIGKILL and a new start. restart: SIGTERM and a new start. stop: SIGSTOP, and SIGCONT later.
step: kill, and a new start with another wall clock. shift: kill, and a new start with another
monotonic clock, in a time namespace: only root may do that, and not on every machine. child:
SIGKILL for one process of a worker's pool. cut: all connections are reset. delay: nothing is passed
on for a while. refuse: cut, and no new connections for a while.
"""

ALL_FAULTS = tuple(f"{target}-{kind}" for target, kinds in KINDS.items() for kind in kinds)
FAULTS = tuple(name for name in ALL_FAULTS if name != "server-shift")
"""What every machine lets one do."""

SLOW_START = 4.0
"""A worker takes seconds to start: its faults are so many times rarer."""


@dataclass(frozen=True)
class Fault:
    """Something bad.

    Attributes:
        at: seconds from the start of the run.
        target: ``server-0`` and so on.
        kind: one of `KINDS` of the target.
        seconds: how long it lasts: stopped, held back, or gone.
        choice: from 0 to 1, where it has to choose.
    """

    at: float
    target: str
    kind: str
    seconds: float
    choice: float

    @property
    def name(self) -> str:
        return f"{self.target.partition('-')[0]}-{self.kind}"


def schedule(
    seed: int,
    targets: Sequence[str],
    kinds: Sequence[str],
    seconds: float,
    pace: float,
    lease: float,
) -> dict[str, list[Fault]]:
    """The faults of each target, one after the other.

    Args:
        seed: says it all.
        targets: ``server-0``, ``client-3`` and so on.
        kinds: those of `ALL_FAULTS` that may happen.
        seconds: how long the run is.
        pace: seconds between two faults of one target, on average.
        lease: seconds; what lasts is shorter than that, or longer.
    """
    return {t: list(_faults_of(seed, t, kinds, seconds, pace, lease)) for t in targets}


def _faults_of(
    seed: int, target: str, kinds: Sequence[str], seconds: float, pace: float, lease: float
) -> list[Fault]:
    chance = random.Random(f"{seed}/{target}")
    sort = target.partition("-")[0]
    possible = [kind for kind in KINDS[sort] if f"{sort}-{kind}" in kinds]
    if not possible:
        return []
    if sort == "worker":
        pace *= SLOW_START
    found = []
    at = pace * chance.uniform(0.3, 1)
    while at < seconds:
        kind = chance.choice(possible)
        lasts = _duration(chance, kind, lease)
        found.append(Fault(at, target, kind, lasts, chance.random()))
        at += lasts + pace * chance.uniform(0.5, 1.5)
    return found


def _duration(chance: random.Random, kind: str, lease: float) -> float:
    if kind in ("cut", "child"):
        return 0.0
    if kind in ("kill", "restart", "step", "shift"):
        return chance.random() * 0.3
    if chance.random() < 0.5:
        return chance.random() * lease / 2
    return lease * (1.1 + chance.random() * 0.7)
