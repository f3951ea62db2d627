"""Locks per second and how long they are waited for, at 1 to 1,000 connections.

Each connection takes and gives back a key of its own, over and over; over one, two and four servers
the keys are shared out by their hash. From two connections on, two processes make the load. Nobody
is tied to a core. All of it shares one machine: where that has two cores, load and servers take them
from one another, and more servers can only show that they cost nothing (see `two_servers`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from benchmarks import servers
from benchmarks.bench import Bench, turned
from benchmarks.exchange import WARM_UP, ExchangeProcess, Run, together
from benchmarks.topic import Figures, Load, Topic

CONNECTIONS = (1, 10, 100, 1000)
SERVERS = {"one server": 1, "two servers": 2, "four servers": 4}
OURS = "one server"


def run(ports: list[int], connections: int, seconds: float) -> Run:
    with ExitStack() as stack:
        halves = [connections] if connections == 1 else [connections // 2] * 2
        processes = [
            stack.enter_context(ExchangeProcess(ports, half, f"key-{number}"))
            for number, half in enumerate(halves)
        ]
        together(processes, seconds * WARM_UP)
        return together(processes, seconds)


@contextmanager
def load(bench: Bench) -> Iterator[Load]:
    shown = {
        number: (
            Topic(
                f"throughput-{number}",
                f"Locks per second, {number:,} connections",
                "/s",
                OURS,
                more_is_better=True,
            ),
            Topic(f"wait-p50-{number}", f"Wait for a grant, {number:,} connections", "us", OURS),
            Topic(f"wait-p99-{number}", f"The same, 99th percentile, {number:,}", "us", OURS),
        )
        for number in CONNECTIONS
    }
    with ExitStack() as stack:
        ports = [servers.ours(bench, stack, name=f"server-{number}").port for number in range(4)]

        def measure(number: int) -> Figures:
            figures: Figures = {}
            for connections, topics in shown.items():
                for name in turned(SERVERS, number):
                    done = run(ports[: SERVERS[name]], connections, bench.seconds)
                    values = (done.per_second, done.wait(0.5) * 1e6, done.wait(0.99) * 1e6)
                    for topic, value in zip(topics, values, strict=True):
                        figures.setdefault(topic.key, {})[name] = value
            return figures

        yield Load([topic for topics in shown.values() for topic in topics], measure)
