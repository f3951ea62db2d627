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

    def counted(server: servers.Server) -> float:
        with Exchange([server.port], CONNECTIONS) as exchange:
            return callgrind.per_turn(
                server.pid, lambda seconds: exchange.run(seconds).turns, SECONDS
            )

    with ExitStack() as stack:
        compared = servers.all_in_python(bench, stack, callgrind.prefix)

        def measure(_: int) -> Figures:
            return {topic.key: {name: counted(server) for name, server in compared.items()}}

        yield Load([topic], measure, exact=True)
