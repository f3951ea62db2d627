"""A process that has no descriptor left loses nobody who waits in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from dflockd.client import reactor
from dflockd.sync_client import DistributedLock
from tests.dflockd.client_support import Script
from tests.dflockd.raw_server import ServerProcess

WAITERS = 120
DESCRIPTORS = 50

CONSUMER = f"""
import resource, sys
from dflockd.client.pending import PendingAcquires
from dflockd.sync_client import DistributedLock

resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))
pending, acquires = PendingAcquires(), {{}}

def join(number):
    def told():
        print("told", number, acquires[number].hand_over(), flush=True)
        pending.ask()
    def ended(error):
        print("ended", number, type(error).__name__, error, flush=True)
    lock = DistributedLock("key", servers=[("127.0.0.1", int(sys.argv[1]))])
    acquires[number] = pending.join(
        lock, None, queued=lambda: print("queued", number, flush=True),
        told=told, ended=ended,
    )

pending.ask()
for number in range({WAITERS}):
    join(number)
for line in sys.stdin:
    word, number = line.split()
    if word == "leave":
        acquires[int(number)].leave()
    else:
        join(int(number))
"""


def test_nobody_is_lost(server: ServerProcess) -> None:
    """Who finds no descriptor waits for one, or is told so after a while; the others go on."""
    where: dict[str, Any] = {"servers": [("127.0.0.1", server.port)]}
    holder = DistributedLock("key", None, **where)
    assert holder.acquire()
    with closing(Script(CONSUMER, server.port)) as consumer:
        queued: set[int] = set()
        served: list[int] = []
        ended: set[int] = set()
        until = time.monotonic() + 60
        while len(served) < WAITERS:
            assert time.monotonic() < until, (len(queued), len(served), len(ended))
            word, number, *rest = consumer.line().split(" ", 3)
            if word == "queued":
                queued.add(int(number))
            elif word == "told":
                user = DistributedLock("key", **where)
                assert user.enqueue(rest[0]) == "acquired"
                assert user.release()
                served.append(int(number))
                consumer.say(f"leave {number}")
            else:
                # As a task is requeued: it comes again.
                assert rest[0] == "UnreachableError", rest
                assert "Too many open files" in rest[1]
                ended.add(int(number))
                consumer.say(f"join {number}")
                if holder.held:
                    assert 20 < len(queued) < DESCRIPTORS
                    holder.release()
        assert sorted(served) == list(range(WAITERS))
        assert not DistributedLock("key", **where).inspect()["waiters"]


def test_the_thread_that_renews_begins_once_there_are_some(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """It needs some of its own."""
    real: Callable[[], Any] = reactor.make_selector
    failures = iter([OSError(24, "Too many open files")] * 3)

    def make() -> Any:
        for error in failures:
            raise error
        return real()

    monkeypatch.setattr(reactor, "make_selector", make)
    begun = reactor.Reactor(reactor.Pool())
    called: list[int] = []
    begun.call(lambda: called.append(1))
    until = time.monotonic() + 10
    while not called:
        assert time.monotonic() < until
        time.sleep(0.01)
    begun.call(begun.forget_after_fork)  # there it can be told no more
    pipe = begun._pipe
    assert pipe is not None
    while not begun._is_closed:
        assert time.monotonic() < until
        time.sleep(0.01)
    pipe.close()
