"""What grows with the number of locks, connections and waiters: the server's CPU, and its memory.

CPU of the server for an acquire and its release, all of them beside the other figure of their row:

- with 10, 1,000 or 100,000 other locks held, at 16 connections;
- with 1, 100 or 10,000 connections that each take a lock of their own, over and over;
- with 10 or 10,000 connections that all want one lock, which each gets in its turn.

With 10 and with 100,000 locks held, also how long one connection waits for a free lock (the median).

Memory is what the server's resident memory grows by, for each: of 100,000 locks after the first 1,000,
over ten connections, keys of 14 bytes included; of 10,000 idle connections; of as many waiters, each
on a connection that is there already. A server that starts anew each round has the 100,000 locks.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psutil

from benchmarks import cpu, servers
from benchmarks.bench import Bench, LeftOutError, turned
from benchmarks.exchange import Exchange, connect, settle
from benchmarks.loads.server_cpu import per_turn
from benchmarks.topic import Figures, Goal, Load, Topic
from tests.stalls.gaps import Crowd

HELD = (10, 1_000, 100_000)
CONNECTIONS = (1, 100, 10_000)
WAITERS = (10, 10_000)
HOLDERS = 10
SPARE = 500
"""Files that a process has open anyway."""
GROWTH = Goal(1.2)


def hold(stack: ExitStack, server: servers.Server, keys: range) -> None:
    """Let the keys be held over `HOLDERS` connections, until the stack is closed."""
    crowd = Crowd(server, stack)
    for first in range(HOLDERS):
        crowd.lock(*(b"account:%06d" % key for key in keys[first::HOLDERS]))


def latency(server: servers.Server, seconds: float) -> float:
    """Return microseconds from an acquire to its grant."""
    with Exchange([server.port], 1) as exchange:
        return exchange.warm_up(seconds).run(seconds).wait(0.5) * 1e6


def named(each: int, what: str) -> str:
    return f"{each:,} {what if each > 1 else what.removesuffix('s')}"


def grows(kind: str, most: str, least: str, goal: bool = True) -> Topic:
    """Return the topic of CPU by what there is most of."""
    return Topic(
        f"growth-{kind}",
        f"Server CPU per acquire + release, {most} against {least}",
        "us",
        most,
        {least: GROWTH} if goal else {},
    )


@contextmanager
def load(bench: Bench) -> Iterator[Load]:
    few, some, many = HELD[0], *(bench.scaled(each) for each in HELD[1:])
    connections = [each if each < 1_000 else bench.scaled(each) for each in CONNECTIONS]
    waiters = [WAITERS[0], bench.scaled(WAITERS[1])]
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < connections[-1] + SPARE:
        raise LeftOutError(f"{connections[-1] + SPARE:,} open files are needed: `ulimit -n`")
    by_held = grows("held", named(many, "held"), named(few, "held"))
    # Requests of many that come at once are answered at once: one alone costs more.
    by_connections = grows(
        "connections", named(connections[-1], "connections"), named(1, "connections"), goal=False
    )
    by_waiters = grows("waiters", named(waiters[-1], "waiters"), named(waiters[0], "waiters"))
    wait = Topic(
        "wait-free",
        f"Wait for a free lock, {many:,} held against {few}",
        "us",
        named(many, "held"),
        {named(few, "held"): GROWTH},
    )
    lock, connection, waiter = (
        Topic(f"memory-{key}", f"Memory of {what}", "B", servers.OURS, limit=limit)
        for key, what, limit in (
            ("lock", "a held lock, without its connection", Goal(1024.0)),
            ("connection", "an idle connection", None),
            ("waiter", "a waiter, without its connection", None),
        )
    )

    def started(stack: ExitStack, name: str, held: int) -> servers.Server:
        with cpu.pinned(-1):
            server = servers.ours(bench, stack, name=name)
        hold(stack, server, range(held))
        return server

    def waiting(server: servers.Server, number: int) -> tuple[float, float]:
        """Return the bytes of a connection and of its waiter."""
        process = psutil.Process(server.pid)
        sizes = [process.memory_info().rss]
        with connect(server.port) as holder, Exchange([server.port], number) as exchange:
            sizes.append(process.memory_info().rss)
            holder.sendall(b"l\nhot\n10 600\n")
            holder.recv(128)
            exchange.send(b"l\nhot\n600\n")
            settle(holder)
            sizes.append(process.memory_info().rss)
        cpu.wait_idle(server.pid)
        return (sizes[1] - sizes[0]) / number, (sizes[2] - sizes[1]) / number

    with ExitStack() as stack, cpu.pinned(0):
        with_few = started(stack, "few", few)
        with_some = started(stack, "some", some)

        def measure(number: int) -> Figures:
            with ExitStack() as round_stack:
                # Its first locks are those of the others.
                with_many = started(round_stack, "many", some)
                process = psutil.Process(with_many.pid)
                before = process.memory_info().rss
                hold(round_stack, with_many, range(some, some + many))
                a_lock = (process.memory_info().rss - before) / many
                held = {few: with_few, some: with_some, many: with_many}
                names = {named(each, "held"): server for each, server in held.items()}
                cpu_held = {
                    name: per_turn(names[name], 16, bench.seconds) for name in turned(names, number)
                }
                waits = {
                    name: latency(names[name], bench.seconds)
                    for name in turned([wait.ours, *wait.goals], number)
                }
                a_connection, a_waiter = waiting(with_many, connections[-1])
            cpu_connections = {
                named(each, "connections"): per_turn(with_few, each, bench.seconds)
                for each in connections
            }
            cpu_waiters = {
                named(each, "waiters"): per_turn(with_few, each, bench.seconds, shared="hot")
                for each in waiters
            }
            return {
                by_held.key: cpu_held,
                by_connections.key: cpu_connections,
                by_waiters.key: cpu_waiters,
                wait.key: waits,
                lock.key: {servers.OURS: a_lock},
                connection.key: {servers.OURS: a_connection},
                waiter.key: {servers.OURS: a_waiter},
            }

        topics = [by_held, by_connections, by_waiters, wait, lock, connection, waiter]
        yield Load(topics, measure, rounds=3)
