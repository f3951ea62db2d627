"""A connection that another thread, or a finaliser, closes just when it is to be waited for.

The reading fails then, and the flow goes on. Its number is free for another connection only once nobody
watches it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dflockd import clock, errors
from dflockd.address import Address
from dflockd.client import aio, blocking, connection
from dflockd.client.connection import Connection, Route, Watcher, dial
from dflockd.client.flow import Flow, Pause, Ready
from dflockd.client.pool import Pool
from dflockd.client.reactor import Reactor
from tests.dflockd.raw_server import PATIENCE, eventually

ROUTE = Route(Address("127.0.0.1", 1))


class Connected(Connection):
    """A connection to a socket of the test."""

    def __init__(self) -> None:
        super().__init__(ROUTE, int(socket.AF_UNIX), int(socket.SOCK_STREAM), 0)
        self._sock.close()
        self._sock, self.server = socket.socketpair()
        self._sock.setblocking(False)


class ClosedMeanwhile(Connected):
    """It is open until somebody is about to wait for it."""

    def watch(self, watcher: Watcher) -> bool:
        self.close()
        return super().watch(watcher)

    def fileno(self) -> int:
        self.close()
        return super().fileno()


@pytest.fixture
def link() -> Iterator[Connection]:
    link = ClosedMeanwhile()
    yield link
    link.server.close()


@pytest.fixture
def watched() -> Iterator[Connected]:
    link = Connected()
    yield link
    link.server.close()


def waiting(link: Connection, outcomes: queue.Queue[Any]) -> Flow[None]:
    outcomes.put((yield Ready(link, False, clock.now() + 3600)))


def test_by_the_reactor(link: Connection) -> None:
    outcomes: queue.Queue[Any] = queue.Queue()
    Reactor(Pool()).run(waiting(link, outcomes))
    assert outcomes.get(timeout=PATIENCE) is True


@pytest.mark.parametrize("writes", [False, True])
def test_by_a_thread(link: Connection, writes: bool) -> None:
    assert blocking._ready(link, writes, PATIENCE) is True


@pytest.mark.parametrize("writes", [False, True])
async def test_by_an_event_loop(link: Connection, writes: bool) -> None:
    assert await aio._ready(asyncio.get_running_loop(), link, writes, PATIENCE) is True


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def check_number(link: Connected, end: Callable[[], object]) -> None:
    """Close a connection that is watched: the other side learns of it at once, and its number stays."""
    number = link.fileno()
    link.close()
    link.server.settimeout(PATIENCE)
    assert link.server.recv(1) == b""
    assert is_open(number)
    end()
    eventually(lambda: not is_open(number))


def test_the_number_of_one_that_the_reactor_watches(watched: Connected) -> None:
    reactor, outcomes = Reactor(Pool()), queue.Queue[Any]()
    reactor.run(waiting(watched, outcomes))
    eventually(lambda: bool(watched._watchers))
    stands, goes_on = queue.Queue[None](), queue.Queue[None]()

    def stand() -> None:
        stands.put(None)
        goes_on.get(timeout=PATIENCE)

    reactor.call(stand)
    stands.get(timeout=PATIENCE)
    check_number(watched, lambda: goes_on.put(None))
    assert outcomes.get(timeout=PATIENCE) is True


@pytest.mark.parametrize("writes", [False, True])
async def test_the_number_of_one_that_a_loop_watches(watched: Connected, writes: bool) -> None:
    loop = asyncio.get_running_loop()
    if writes:
        with contextlib.suppress(BlockingIOError):
            while watched._sock.send(bytes(65536)):
                pass
    ready = asyncio.ensure_future(aio._ready(loop, watched, writes, PATIENCE))
    await asyncio.sleep(0)
    number = watched.fileno()
    closing = threading.Thread(target=watched.close)
    closing.start()
    closing.join(PATIENCE)  # the loop stands still, and learns of nothing yet
    assert is_open(number)
    assert await asyncio.wait_for(ready, PATIENCE) is True
    assert not is_open(number)


def test_two_who_close_and_one_who_watches(watched: Connected) -> None:
    """Whoever comes last closes it, and nobody twice."""

    class Who:
        def is_gone(self) -> bool:
            return False

    one, two = Who(), Who()
    number = watched.fileno()
    assert watched.watch(one)
    assert watched.watch(two)
    watched.close()
    watched.close()
    watched.interrupt()
    watched.unwatch(one)
    assert is_open(number)
    assert not watched.watch(one)
    watched.unwatch(two)
    assert not is_open(number)
    watched.unwatch(two)


def test_one_whose_watcher_is_gone(watched: Connected) -> None:
    class Gone:
        def is_gone(self) -> bool:
            return True

    number = watched.fileno()
    assert watched.watch(Gone())
    watched.close()
    assert not is_open(number)


def test_a_server_that_goes_before_tls_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptor of a connection is its own from the first to the last: nothing takes it over."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def reset(sock: socket.socket) -> None:
            accepted, _ = listener.accept()
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            accepted.close()
            ended = select.poll()
            ended.register(sock, 0)
            assert ended.poll(PATIENCE * 1000)

        def dialling() -> Flow[None]:
            route = Route(Address(*listener.getsockname()), None, ssl.create_default_context())
            try:
                yield from dial(route, clock.now() + PATIENCE)
            except errors.UnreachableError as exc:
                outcomes.put(exc)
            yield Pause(0.0)
            outcomes.put("it goes on")

        # What a client does last before TLS.
        monkeypatch.setattr(connection, "_tune", reset)
        outcomes: queue.Queue[Any] = queue.Queue()
        Reactor(Pool()).run(dialling())
        error = outcomes.get(timeout=PATIENCE)
        assert isinstance(error, errors.UnreachableError)
        assert str(error).endswith("cannot be reached: the server closed the connection")
        assert outcomes.get(timeout=PATIENCE) == "it goes on"
