"""How long the server is away when one client, or many, ask for more than they should.

Many: 4,000 connections ask for a key that is held and are willing to wait for two seconds. While
they time out, a program on the other core renews a lock of its own without a pause and notes its
longest round trip; the process with the 4,000 connections sleeps meanwhile and reads the answers
later. The same program at the same server with nothing to do shows what of that is the machine's.

One: the loads of `tests.stalls.gaps`, each at a server that starts anew and has nothing else to do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from benchmarks import cpu, servers
from benchmarks.bench import Bench, LeftOutError
from benchmarks.exchange import BACKLOG, connect, settle
from benchmarks.topic import Figures, Goal, Load, Topic
from tests.stalls.gaps import GAPS, Crowd, Gap, Prober

WAITERS = 4_000
PATIENCE = 2
CALM = 0.5
"""Seconds for which nothing happens before a load by one client."""
LIMIT = Goal(20.0, 5.0)
IDLE = "dflockd, nothing to do"


def storm(server: servers.Server, prober: Prober, waiters: int) -> float:
    """Return milliseconds of the longest round trip while so many time out."""
    with ExitStack() as stack:
        holder = stack.enter_context(connect(server.port))
        holder.sendall(b"l\nhot\n10 600\n")
        holder.recv(128)
        waiting = []
        for number in range(waiters):
            waiting.append(stack.enter_context(connect(server.port)))
            if number % BACKLOG == 0:
                settle(waiting[-1])
        began = time.monotonic()
        for sock in waiting:
            sock.sendall(b"l\nhot\n%d\n" % PATIENCE)
        asked = time.monotonic() - began
        if asked > PATIENCE / 2:
            raise LeftOutError(f"this machine takes {asked:.1f} s to send {waiters} requests")
        longest = prober.idle(PATIENCE + 0.5)
        answers = [sock.recv(64) for sock in waiting]
        if answers.count(b"timeout\n") < waiters:
            raise RuntimeError(f"not all of them timed out: {set(answers)}")
    cpu.wait_idle(server.pid)  # the next one wants the core
    return longest


def alone(bench: Bench, gap: Gap) -> Figures:
    """Return the gap under one of the loads by one client, and the one before it."""
    with ExitStack() as stack:
        with cpu.pinned(-1):
            server = servers.ours(bench, stack, *gap.flags, name=gap.key)
        prober = stack.enter_context(Prober.at(server))
        idle = prober.idle(CALM)
        # Its connections end before the prober does.
        with ExitStack() as connections:
            longest = gap.run(Crowd(server, connections), prober, bench.scaled(gap.number))
    return {gap.key: {servers.OURS: longest, IDLE: idle}}


@contextmanager
def load(bench: Bench) -> Iterator[Load]:
    waiters = bench.scaled(WAITERS)
    topic = Topic(
        "storm",
        f"Longest gap while {waiters:,} waiters of one key time out in a second",
        "ms",
        servers.OURS,
        limit=LIMIT,
    )
    gaps = [
        Topic(
            gap.key,
            f"Longest gap while {gap.title.format(bench.scaled(gap.number))}",
            "ms",
            servers.OURS,
            limit=LIMIT,
        )
        for gap in GAPS
    ]
    with ExitStack() as stack:
        with cpu.pinned(-1):
            server = servers.ours(bench, stack)
        with cpu.pinned(0):
            prober = stack.enter_context(Prober.at(server))

            def measure(_: int) -> Figures:
                idle = prober.idle(PATIENCE + 0.5)
                figures = {topic.key: {servers.OURS: storm(server, prober, waiters), IDLE: idle}}
                for gap in GAPS:
                    figures |= alone(bench, gap)
                return figures

            yield Load([topic, *gaps], measure, rounds=1)
