"""What an acquire and its release cost the server.

CPU time of the server's process, all of it, for the turns that it answered: 16, 64 or 256
connections, each with a key of its own, each sending its next request when the last is answered.
The server has one core for itself and the load another. Ours is compared as it is compiled, in plain
Python, and as it was before either. The server that does not look (uvloop, a protocol, fixed answers)
is the floor: nobody can answer in Python for less.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks import cpu, servers
from benchmarks.bench import Bench, turned
from benchmarks.exchange import Exchange
from benchmarks.topic import Figures, Goal, Load, Topic

CONNECTIONS = (16, 64, 256)


def per_turn(server: servers.Server, connections: int, seconds: float, **how: Any) -> float:
    """Return microseconds of the server's CPU for one acquire and release; `how` as for `Exchange`."""
    with Exchange([server.port], connections, **how) as exchange:
        exchange.warm_up(seconds)
        before = cpu.spent(server.pid)
        run = exchange.run(seconds)
        return (cpu.spent(server.pid) - before) / run.turns * 1e6


@contextmanager
def load(bench: Bench) -> Iterator[Load]:
    title = "Server CPU per acquire + release"
    topics = {
        number: Topic(
            f"server-cpu-{number}",
            f"{title}, {number} connections",
            "us",
            servers.OURS,
            goals={
                servers.GO: Goal(0.75, 0.6),
                servers.BARE: Goal(1.25, 1.12),
            },
        )
        for number in CONNECTIONS
    }
    plain = {
        number: Topic(
            f"server-cpu-plain-{number}",
            f"{title} in plain Python, {number} connections",
            "us",
            servers.PLAIN,
            goals={servers.BEFORE: Goal(0.55, 0.45)},
        )
        for number in CONNECTIONS
    }
    with ExitStack() as stack:
        with cpu.pinned(-1):
            compared = {**servers.all_in_python(bench, stack), **servers.go(bench, stack)}

        def measure(number: int) -> Figures:
            figures: Figures = {}
            for connections, topic in topics.items():
                found = {
                    name: per_turn(compared[name], connections, bench.seconds)
                    for name in turned(compared, number)
                }
                figures[topic.key] = found
                figures[plain[connections].key] = {
                    name: found[name] for name in found.keys() & {servers.PLAIN, servers.BEFORE}
                }
            return figures

        with cpu.pinned(0):
            yield Load([*topics.values(), *plain.values()], measure)
