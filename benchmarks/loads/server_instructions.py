"""The instructions of an acquire and its release in the server's process, 16 connections.

In user space alone; the load and what is compared are those of `server_cpu`. The server in Go is
left out: valgrind does not run what Go compiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from benchmarks import servers
from benchmarks.bench import Bench
from benchmarks.callgrind import Callgrind
from benchmarks.exchange import Exchange
from benchmarks.topic import Figures, Load, Topic

CONNECTIONS = 16
SECONDS = (0.5, 2.0)


@contextmanager
def load(bench: Bench) -> Iterator[Load]:
    callgrind = Callgrind(bench.directory)
    topic = Topic(
        "server-instructions",
        f"Instructions of an acquire + release in the server, {CONNECTIONS} connections",
        "Ir",
        servers.OURS,
    )
    where = Topic("server-instructions-where", "Where those of our server are", "Ir")

    def counted(server: servers.Server) -> dict[str, float]:
        with Exchange([server.port], CONNECTIONS) as exchange:
            return callgrind.per_turn(
                server.pid, lambda seconds: exchange.run(seconds).turns, SECONDS
            )

    with ExitStack() as stack:
        compared = servers.all_in_python(bench, stack, callgrind.prefix)

        def measure(_: int) -> Figures:
            found = {name: counted(server) for name, server in compared.items()}
            return {
                topic.key: {name: sum(places.values()) for name, places in found.items()},
                where.key: found[servers.OURS],
            }

        yield Load([topic, where], measure, rounds=1)
