"""What a hundred servers with a million locks cost their etcd, by what happens to them.

The servers' real logic and lock tables over a store in memory, under a clock of its own: see
`tests.dflockd.cluster.scale`. What is counted is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.bench import Bench
from benchmarks.topic import Figures, Load, Topic
from tests.dflockd.cluster import scale

SERVERS, LOCKS, RESTARTS = 100, 1_000_000, 5
QUICK_SERVERS = 3
SHOWN = {
    "transactions": ("transactions of etcd", ""),
    "changes": ("changes that each server is told", ""),
    "megabytes": ("what etcd writes", "MB"),
    "seconds": ("until it is done, by the model's clock", "s"),
}
"""What is made of the fields of a `scale.Phase`."""


@contextmanager
def load(bench: Bench) -> Iterator[Load]:
    servers = QUICK_SERVERS if bench.quick else SERVERS
    title = f"A cluster of {servers} servers and {bench.scaled(LOCKS):,} locks"
    topics = {
        field: Topic(f"cluster-{field}", f"{title}: {what}", unit)
        for field, (what, unit) in SHOWN.items()
    }

    def measure(_: int) -> Figures:
        phases = scale.run(servers, bench.scaled(LOCKS), 1 if bench.quick else RESTARTS)
        return {
            topic.key: {phase.name: getattr(phase, field) for phase in phases}
            for field, topic in topics.items()
        }

    yield Load(list(topics.values()), measure, rounds=1)
