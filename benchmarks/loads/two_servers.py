"""What two servers that share the keys can do, beside one.

A server does so much before its core is full, and then the rest waits: the locks of a run, divided by
the CPU time of the server that it took most of. With the keys shared out by their hash that is twice
as much for two servers, if they take nothing from one another and both get their half.

Two programs, one on each core, make the load of 64 connections for each server, so that half of what
a server is asked comes from its own core and half from the other one; one server has the same, without
the second beside it. What is asked from the same core alone comes in larger batches, and costs less.

CPU time is what is compared, because the program that makes the load needs more of a core than a
compiled server does: what comes and goes in a second is what those programs can do. That two servers
answer twice as much in one second takes more than two cores to show.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from benchmarks import cpu, servers
from benchmarks.bench import Bench, LeftOutError, turned
from benchmarks.exchange import WARM_UP, ExchangeProcess, together
from benchmarks.topic import Figures, Goal, Load, Topic

ONE = "one server"
TWO = "two servers"
CONNECTIONS = 64


@contextmanager
def load(bench: Bench) -> Iterator[Load]:
    if len(cpu.CORES) < 2:
        raise LeftOutError("two cores are needed")
    room = Topic(
        "two-servers",
        "Locks per second that fill a server's core, keys sharded over two servers",
        "/s",
        TWO,
        {ONE: Goal(1.8, 1.95)},
        more_is_better=True,
    )
    with ExitStack() as stack:
        pair = []
        for core in (0, 1):
            with cpu.pinned(core):
                pair.append(servers.ours(bench, stack, name=f"server-{core}"))
        ports = [server.port for server in pair]
        one, two = [], []
        for core in (0, 1):
            with cpu.pinned(core):
                half = ExchangeProcess(ports[:1], CONNECTIONS // 2, f"one-{core}")
                one.append(stack.enter_context(half))
                both = ExchangeProcess(ports, CONNECTIONS, f"two-{core}")
                two.append(stack.enter_context(both))
        compared: dict[str, Sequence[ExchangeProcess]] = {TWO: two, ONE: one}

        def measure(number: int) -> Figures:
            rooms = {}
            for name in turned(compared, number):
                together(compared[name], bench.seconds * WARM_UP)
                before = [cpu.spent(server.pid) for server in pair]
                run = together(compared[name], bench.seconds)
                busiest = max(
                    cpu.spent(server.pid) - was for server, was in zip(pair, before, strict=True)
                )
                rooms[name] = run.turns / busiest
            return {room.key: rooms}

        yield Load([room], measure)
