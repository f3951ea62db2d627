"""Which faults happen when: a schedule that follows from its seed alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from dflockd.cluster import ClusterParameters
from dflockd.cluster.leader import SETTLE

KINDS = {
    "server": ("kill", "restart", "stop", "step", "shift"),
    "worker": ("kill", "child", "restart", "stop"),
    "client": ("kill", "restart", "stop"),
    "link": ("cut", "delay", "refuse", "deafen", "silence"),
    "etcd": ("stop", "restart", "kill", "full"),
    "peer": ("cut", "delay", "refuse", "deafen", "silence"),
    "tie": ("cut", "delay", "refuse", "deafen", "silence"),
    "cluster": ("move", "rebalance", "join"),
}
"""What can happen to what.

kill: SIGKILL and a new start. restart: SIGTERM and a new start. stop: SIGSTOP, and SIGCONT later.
step: kill, and a new start with another wall clock. shift: kill, and a new start with another
clock that nobody can set, in a time namespace: only root may do that, and not on every machine. child:
SIGKILL for one process of a worker's pool. cut: all connections are reset. delay: nothing is passed
on for a while. refuse: cut, and no new connections for a while. deafen: whoever a link leads to hears
nothing for a while, but is heard. silence: it hears, and is not heard.

In a cluster, etcd may have several members, each of which is stopped, restarted or killed, whether it
leads or not. full: their database takes nothing new, until an operator makes room. A peer is the link
by which the others reach one of them. A tie is the link between a server and etcd. move: some of the
keys' shards get another server. rebalance: all servers get equally many. join: there is one server
more for a while.
"""

ALL_FAULTS = tuple(f"{target}-{kind}" for target, kinds in KINDS.items() for kind in kinds)
FAULTS = tuple(name for name in ALL_FAULTS if name != "server-shift")
"""What every machine lets one do."""

RARER = {"worker": 4.0, "etcd": 4.0, "peer": 4.0}
"""How many times rarer some faults are: a worker takes seconds to start, and etcd is everybody's."""

UNSETTLING = frozenset(
    {
        *("server-kill", "server-step", "server-shift", "server-stop"),
        *("etcd-stop", "etcd-restart", "etcd-kill", "etcd-full"),
        *(f"{way}-{kind}" for way in ("peer", "tie") for kind in KINDS[way]),
    }
)
"""Faults after which shards of a cluster may be taken over that were not handed over."""

COSTLY = ("server", "tie", "etcd", "peer", "link")
CROWDED = 0.5
"""In a cluster, what it takes to recover from a crash, times this, is between two faults of these."""

LONGEST_SILENCE = 3.0
"""Seconds for each of a serving lease that etcd is silent at most: holders can do nothing meanwhile."""


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
        return f"{_sort(self.target)}-{self.kind}"


def schedule(
    seed: int,
    targets: Sequence[str],
    kinds: Sequence[str],
    seconds: float,
    pace: float,
    lease: float,
    parameters: ClusterParameters | None = None,
) -> dict[str, list[Fault]]:
    """The faults of each target, one after the other.

    Args:
        seed: says it all.
        targets: ``server-0``, ``client-3`` and so on.
        kinds: those of `ALL_FAULTS` that may happen.
        seconds: how long the run is.
        pace: seconds between two faults of one target, on average.
        lease: seconds; what lasts is shorter than that, or longer.
        parameters: those of the cluster, if it is one: its servers recover between two faults.
    """
    paces = {target: pace * RARER.get(_sort(target), 1) for target in targets}
    if parameters is not None and UNSETTLING & set(kinds):
        costly = [t for t in targets if _sort(t) in COSTLY and _possible(t, kinds)]
        # Or else all keys would be waiting for former holders most of the time.
        slow = recovery(parameters) * CROWDED * len(costly)
        paces |= {target: max(slow, paces[target]) for target in costly}
    return {
        t: list(_faults_of(seed, t, kinds, seconds, paces[t], lease, parameters)) for t in targets
    }


def _sort(target: str) -> str:
    return target.partition("-")[0]


def _possible(target: str, kinds: Sequence[str]) -> list[str]:
    sort = _sort(target)
    return [kind for kind in KINDS[sort] if f"{sort}-{kind}" in kinds]


def recovery(parameters: ClusterParameters) -> float:
    """Seconds from the crash of a server of a cluster until all of its keys are granted again."""
    return parameters.serving_lease + SETTLE + parameters.grace + 1


def _faults_of(
    seed: int,
    target: str,
    kinds: Sequence[str],
    seconds: float,
    pace: float,
    lease: float,
    parameters: ClusterParameters | None,
) -> list[Fault]:
    chance = random.Random(f"{seed}/{target}")
    sort, possible = _sort(target), _possible(target, kinds)
    if not possible:
        return []
    found = []
    at = pace * chance.uniform(0.3, 1)
    while at < seconds:
        kind = chance.choice(possible)
        lasts = _duration(chance, sort, kind, lease, parameters)
        found.append(Fault(at, target, kind, lasts, chance.random()))
        at += lasts + pace * chance.uniform(0.5, 1.5)
    return found


def _duration(
    chance: random.Random, sort: str, kind: str, lease: float, parameters: ClusterParameters | None
) -> float:
    if kind in ("cut", "child", "move", "rebalance"):
        return 0.0
    if kind in ("kill", "restart", "step", "shift"):
        return chance.random() * 0.3
    if sort in ("etcd", "peer") and parameters is not None:
        return chance.random() * LONGEST_SILENCE * parameters.serving_lease
    if chance.random() < 0.5:
        return chance.random() * lease / 2
    return lease * (1.1 + chance.random() * 0.7)
