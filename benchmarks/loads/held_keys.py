"""What 100,000 held locks cost: memory, and whether they slow down the others.

Each round a server starts anew and gives 100,000 locks over ten connections. What its resident
memory grows meanwhile, after the first 1,000, is what they take, keys of 14 bytes included; then
5,000 idle connections are made, which shows what one of those takes. With the locks still held, an
acquire and release of other keys is compared with the same on a server that holds ten: CPU of the
server at 16 connections, and the wait of one connection for its grant (the median).
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psutil

from benchmarks import cpu, servers
from benchmarks.bench import Bench, turned
from benchmarks.exchange import Exchange, connect
from benchmarks.loads.server_cpu import per_turn
from benchmarks.topic import Figures, Goal, Load, Topic

HELD = 100_000
FEW = 10
FIRST = 1_000
HOLDERS = 10
CONNECTIONS = 5_000
BATCH = 500
MEMORY_LIMIT = Goal(1024.0)
GROWTH = Goal(1.2)


def hold(stack: ExitStack, port: int, keys: range) -> None:
    """Let the keys be held over `HOLDERS` connections, until the stack is closed."""
    for first in range(HOLDERS):
        sock = stack.enter_context(connect(port))
        mine = keys[first::HOLDERS]
        for start in range(0, len(mine), BATCH):
            batch = mine[start : start + BATCH]
            sock.sendall(b"".join(b"l\naccount:%06d\n0 3600\n" % key for key in batch))
            reply = b""
            while (more := sock.recv(1 << 16)) and (reply := reply + more).count(b"\n") < len(
                batch
            ):
                pass
            if reply.count(b"ok ") != len(batch):
                raise RuntimeError(f"the server does not hold all: {reply[-80:]!r}")


def bytes_each(process: psutil.Process, before: int, number: int) -> float:
    """Return how much a process has grown, for each of so many."""
    return float(process.memory_info().rss - before) / number


def latency(server: servers.Server, seconds: float) -> float:
    """Return microseconds from an acquire to its grant."""
    with Exchange([server.port], 1) as exchange:
        return exchange.warm_up(seconds).run(seconds).wait(0.5) * 1e6


@contextmanager
def load(bench: Bench) -> Iterator[Load]:
    held = bench.scaled(HELD)
    connections = bench.scaled(min(CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))
    many, few = f"{held:,} held", f"{FEW} held"
    lock_memory = Topic(
        "lock-memory",
        "Memory of a held lock, without its connection",
        "B",
        servers.OURS,
        limit=MEMORY_LIMIT,
    )
    connection_memory = Topic(
        "connection-memory", "Memory of an idle connection", "B", servers.OURS
    )
    growth_cpu = Topic(
        "growth-cpu",
        f"Server CPU per acquire + release, {many} against {FEW}",
        "us",
        many,
        {few: GROWTH},
    )
    growth_latency = Topic(
        "growth-latency", f"Wait for a grant, {many} against {FEW}", "us", many, {few: GROWTH}
    )
    with ExitStack() as stack, cpu.pinned(0):
        with cpu.pinned(-1):
            little = servers.ours(bench, stack, name="few")
        hold(stack, little.port, range(FEW))

        def measure(number: int) -> Figures:
            with ExitStack() as round_stack:
                with cpu.pinned(-1):
                    full = servers.ours(bench, round_stack, name="many")
                process = psutil.Process(full.pid)
                hold(round_stack, full.port, range(FIRST))
                before = process.memory_info().rss
                hold(round_stack, full.port, range(FIRST, FIRST + held))
                a_lock = bytes_each(process, before, held)
                compared = {many: full, few: little}
                names = turned(compared, number)
                cpu_each = {name: per_turn(compared[name], 16, bench.seconds) for name in names}
                waits = {name: latency(compared[name], bench.seconds) for name in names}
                before = process.memory_info().rss
                with Exchange([full.port], connections):
                    a_connection = bytes_each(process, before, connections)
            return {
                lock_memory.key: {servers.OURS: a_lock},
                connection_memory.key: {servers.OURS: a_connection},
                growth_cpu.key: cpu_each,
                growth_latency.key: waits,
            }

        yield Load([lock_memory, connection_memory, growth_cpu, growth_latency], measure)
