"""What ``with DistributedLock(...): pass`` takes a program, when nobody else wants the lock.

A blocking client, one lock after the other, a new lock object each time. Clients, lock server and
Redis are tied to one core, so that what is measured is their work and not when the scheduler wakes
which of them. Over TCP on loopback for all, and over unix sockets for all that can.

- `bare socket`: the same bytes to the same server and nothing else, the least that it can take.
- `redis-py Lock`: with a Redis for itself.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from benchmarks import cpu, servers
from benchmarks.bench import Bench, turned
from benchmarks.topic import Figures, Goal, Load, Topic
from benchmarks.turns import BARE, OURS, REDIS, WAYS, Turns

CHUNK = 20
"""Turns between two looks at the clock."""


def timed(turns: Turns, seconds: float) -> float:
    """Return the microseconds of a turn, over so many seconds."""
    turns(1)
    taken = 0
    started = now = time.perf_counter()
    while now < started + seconds:
        turns(CHUNK)
        taken += CHUNK
        now = time.perf_counter()
    return (now - started) / taken * 1e6


@contextmanager
def load(bench: Bench) -> Iterator[Load]:
    goals = {BARE: Goal(1.4, 1.2), REDIS: Goal(0.3, 0.22)}
    tcp = Topic("with-lock-tcp", "with lock: pass, over TCP", "us", OURS, goals=goals)
    unix = Topic("with-lock-unix", "with lock: pass, over unix sockets", "us", OURS, goals=goals)
    with cpu.pinned(-1), ExitStack() as stack:
        path = bench.directory / "locks.sock"
        server = servers.ours(bench, stack, "--unix-socket", str(path))
        broker = stack.enter_context(servers.TcpRedis(bench.directory))
        addresses = {
            tcp: (f"127.0.0.1:{server.port}", f"127.0.0.1:{broker.port}"),
            unix: (f"unix:{path}", f"unix:{broker.socket}"),
        }
        compared: dict[Topic, dict[str, Callable[[float], float]]] = {
            topic: {
                name: functools.partial(timed, WAYS[name](address))
                for name, address in ((OURS, locks), (BARE, locks), (REDIS, theirs))
            }
            for topic, (locks, theirs) in addresses.items()
        }

        def measure(number: int) -> Figures:
            return {
                topic.key: {
                    name: measures[name](bench.seconds) for name in turned(measures, number)
                }
                for topic, measures in compared.items()
            }

        yield Load([tcp, unix], measure)
