"""How long a lock lies idle between two programs that both want it.

One holds it for a random time between 0.1 and 0.2 s, another one waits; from the moment at which
the holder begins to release it to the moment at which the other has it. Blocking clients in two
threads, over TCP, no Celery; the median of the turns of a round. A redis-py `Lock` is left at its
default, a try each 0.1 s: shorter pauses take the Redis more work. The same bytes over bare sockets
are the least that it can take: most of it is the time in which the system wakes three sleepers.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

import redis

from benchmarks import servers
from benchmarks.bench import Bench, turned
from benchmarks.exchange import connect
from benchmarks.topic import Figures, Goal, Load, Topic
from dflockd.sync_client import DistributedLock

OURS = "DistributedLock"
BARE = "bare sockets, same exchange"
REDIS = "redis-py Lock"
HELD = (0.1, 0.2)
TURNS = 10


class Lock(Protocol):
    def acquire(self) -> object: ...
    def release(self) -> object: ...


class BareLock:
    """The bytes of a `DistributedLock`, and nothing else."""

    def __init__(self, port: int) -> None:
        self._sock = connect(port)
        self._token = b""

    def acquire(self) -> None:
        self._sock.sendall(b"l\nbench\n10 33\n")
        self._token = self._sock.recv(256).split(b" ")[1]

    def release(self) -> None:
        self._sock.sendall(b"r\nbench\n%b\n" % self._token)
        self._sock.recv(256)


def hand_off(make: Callable[[], Lock], seconds: float) -> float:
    """Return the seconds from a release to the grant of the one that waits."""
    holder, waiter = make(), make()
    granted = 0.0

    def wait() -> None:
        nonlocal granted
        waiter.acquire()
        granted = time.perf_counter()
        waiter.release()

    holder.acquire()
    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(seconds)
    released = time.perf_counter()
    holder.release()
    thread.join()
    return granted - released


@contextmanager
def load(bench: Bench) -> Iterator[Load]:
    goals = {REDIS: Goal(0.02, 0.012), BARE: Goal(1.2, 1.05)}
    topic = Topic("hand-off", "Hand-off of a lock, release to grant", "ms", OURS, goals)
    with ExitStack() as stack:
        server = servers.ours(bench, stack)
        client = redis.Redis(port=stack.enter_context(servers.TcpRedis(bench.directory)).port)
        compared: dict[str, Callable[[], Lock]] = {
            OURS: lambda: DistributedLock("bench", servers=[(server.host, server.port)]),
            BARE: lambda: BareLock(server.port),
            REDIS: lambda: client.lock("bench", timeout=33),
        }
        for make in compared.values():
            hand_off(make, HELD[0])

        def measure(number: int) -> Figures:
            # The same times for all.
            held = random.Random(number)
            times = [held.uniform(*HELD) for _ in range(max(bench.scaled(TURNS), 3))]
            return {
                topic.key: {
                    name: statistics.median(hand_off(compared[name], each) for each in times) * 1e3
                    for name in turned(compared, number)
                }
            }

        yield Load([topic], measure)
