"""Servers that hang: they accept connections, say nothing, and do not end.

Nobody is told that a lock is somebody else's unless a server has said so. Times are judged generously:
what they must stay below is what a client took that waited for such a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from dflockd import client as async_client
from dflockd import clock, errors, sync_client
from dflockd.address import Address
from dflockd.client import aio, blocking, operations, requester, resolver
from dflockd.client.connection import Route
from dflockd.client.conversation import connect, talk
from dflockd.client.flow import Flow
from dflockd.client.process import close_idle_connections
from dflockd.client.session import RELEASE_PATIENCE
from tests.dflockd.client.silence import KEY, TOO_LONG, is_not_answered
from tests.dflockd.client_support import Calls, Client, soon, stats, until
from tests.dflockd.raw_server import PATIENCE, ServerProcess
from tests.effort import more
from tests.pace import Pace

pytestmark = pytest.mark.usefixtures("no_idle_connections")


EACH_WITH_ONE_OF = [
    ("sync", "uvloop"),
    ("asyncio", "asyncio"),
    more("sync", "asyncio"),
    more("asyncio", "uvloop"),
]
"""Each client with a server on one of the two loops; all of them in the soak."""


def keep_busy(seconds: float) -> None:
    """Have the event loop do nothing else."""
    time.sleep(seconds)


# One server, or a list of them.


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("timeout", [0, 0.3, more(1)])
@pytest.mark.parametrize("is_idle", [more(False), True])
async def test_nobody_says_that_the_lock_is_held(
    client: Client, hung: ServerProcess, timeout: float, is_idle: bool
) -> None:
    if is_idle:
        async with client.lock("another", hung):
            pass
    hung.suspend()
    lock = client.lock(KEY, hung, acquire_timeout_s=timeout)
    semaphore = client.semaphore(KEY, 2, hung, acquire_timeout_s=timeout)
    await asyncio.gather(
        is_not_answered(lock.acquire(), timeout), is_not_answered(semaphore.acquire(), timeout)
    )
    hung.signal(signal.SIGCONT)
    # What it comes across when it goes on, it grants to connections that have ended.
    anew = client.lock(KEY, hung)
    assert await anew.acquire() is True
    assert await anew.release() is True


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("timeout", [0, 0.3, more(1)])
@pytest.mark.parametrize("is_idle", [True, more(False)])
async def test_a_place_in_the_queue(
    client: Client, hung: ServerProcess, timeout: float, is_idle: bool
) -> None:
    async with client.lock(KEY, hung):
        waiter = client.lock(KEY, hung, acquire_timeout_s=timeout)
        assert await waiter.enqueue() == "queued"
        if is_idle:
            async with client.lock("idle", hung):
                pass
        other = client.lock("another", hung, acquire_timeout_s=1)
        hung.suspend()
        await asyncio.gather(
            is_not_answered(waiter.wait(), timeout), is_not_answered(other.enqueue(), 1)
        )
        hung.signal(signal.SIGCONT)


async def test_a_release_is_left_to_the_background(client: Client, hung: ServerProcess) -> None:
    lock = client.lock(KEY, hung)
    assert await lock.acquire() is True
    hung.suspend()
    with Pace() as pace:
        assert await lock.release() is False
    assert pace.seconds < RELEASE_PATIENCE + 0.7
    hung.signal(signal.SIGCONT)
    async with client.lock(KEY, hung) as another:
        assert another.held


async def test_a_renewal_that_is_asked_for_ends_with_the_lease(
    client: Client, hung: ServerProcess
) -> None:
    lock = client.lock(KEY, hung, lease_ttl_s=2)
    assert await lock.acquire() is True
    hung.suspend()
    with Pace() as pace, pytest.raises(errors.UnreachableError, match="no answer in time"):
        await soon(lock.renew())
    assert pace.seconds < TOO_LONG
    assert not lock.held


@pytest.mark.parametrize("seconds", [2.5, more(1.5), more(4), more(6)])
@pytest.mark.parametrize(("client", "loop"), EACH_WITH_ONE_OF, indirect=["client"])
async def test_locks_outlive_a_pause_of_their_server(
    client: Client, start: Callable[..., ServerProcess], seconds: float, loop: str
) -> None:
    """It goes on with all that was sent meanwhile, and with the ends of connections.

    Each lock is tried on a second connection. Whichever answers first, the hold must not end with
    the other.
    """
    server, lost = start(uvloop=loop == "uvloop"), Calls()
    options = {"lease_ttl_s": 8, "renew_ratio": 0.1, "on_lost": lost}
    locks = [client.lock(f"{KEY}-{n}", server, **options) for n in range(10)]
    for lock in locks:
        assert await lock.acquire() is True
    before = [lock._session.lease.deadline for lock in locks]
    server.suspend()  # the renewals are due in half a second, or one
    await asyncio.sleep(seconds)
    server.signal(signal.SIGCONT)

    def renewed(lock: Any, deadline: float) -> bool:
        return bool(lock.held and lock._session.lease.deadline > deadline)

    await until(lambda: all(map(renewed, locks, before)))
    await until(lambda: stats(server)["connections"] == 10)  # what was closed is closed by now
    for lock in locks:
        assert await client.lock(lock.key, server, acquire_timeout_s=0).acquire() is False
        assert await lock.renew() is True
    assert lost.times == []
    for lock in locks:
        assert await lock.release() is True


@pytest.mark.parametrize(("client", "loop"), EACH_WITH_ONE_OF, indirect=["client"])
async def test_a_renewal_that_is_asked_for_outlives_a_pause(
    client: Client, start: Callable[..., ServerProcess], loop: str
) -> None:
    """It is sent on two connections then, and does not end with the first."""
    server, lost = start(uvloop=loop == "uvloop"), Calls()
    locks = [client.lock(f"{KEY}-{n}", server, lease_ttl_s=20, on_lost=lost) for n in range(5)]
    for lock in locks:
        assert await lock.acquire() is True
    server.suspend()
    renewals = [asyncio.ensure_future(lock.renew()) for lock in locks]
    await asyncio.sleep(1.5)
    server.signal(signal.SIGCONT)
    assert await soon(asyncio.gather(*renewals)) == [True] * 5
    await until(lambda: stats(server)["connections"] == 5)  # what was closed is closed by now
    for lock in locks:
        assert await client.lock(lock.key, server, acquire_timeout_s=0).acquire() is False
        assert await lock.release() is True
    assert lost.times == []


@pytest.mark.usefixtures("hasty")
async def test_a_server_that_goes_on_within_the_time(client: Client, hung: ServerProcess) -> None:
    hung.suspend()
    lock = client.lock(KEY, hung, acquire_timeout_s=PATIENCE)
    acquiring = asyncio.ensure_future(lock.acquire())
    # Longer than a server may take that is asked for nothing but an answer.
    await asyncio.sleep(1.5 * operations.GRACE)
    assert not acquiring.done()
    hung.signal(signal.SIGCONT)
    assert await soon(acquiring) is True
    assert await lock.release() is True


async def test_an_answer_is_given_a_moment_also_when_the_time_is_over(
    start: Callable[..., ServerProcess],
) -> None:
    """The process was stopped: what it asks when it goes on is still answered."""
    route, is_over = Route(Address("127.0.0.1", start().port)), clock.now() - 60

    def ask() -> Flow[None]:
        link = yield from connect(route, is_over)
        yield from talk(link, operations.ping(operations.about_server("")), is_over)
        link.close()

    blocking.drive(ask())
    await aio.drive(ask())


async def test_a_connection_on_which_an_answer_is_given_up_is_of_no_more_use(
    start: Callable[..., ServerProcess],
) -> None:
    """Another server says that it has the key: the answer may come here all the same, a grant even."""
    server = start()
    route = Route(Address("127.0.0.1", server.port))

    def is_elsewhere(_: bool) -> Flow[float]:
        raise errors.MovedError("it is elsewhere", to="127.0.0.1:1")
        yield

    def ask() -> Flow[None]:
        link = yield from connect(route)
        server.signal(signal.SIGSTOP)
        try:
            with pytest.raises(errors.MovedError):
                yield from talk(
                    link, operations.ping(operations.about_server("")), None, is_elsewhere
                )
        finally:
            server.signal(signal.SIGCONT)
        assert link.closed

    blocking.drive(ask())
    await aio.drive(ask())


@pytest.mark.parametrize("name", ["asyncio", "uvloop"])
def test_a_reply_that_came_while_the_loop_was_busy(
    start: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It has come in time: it is this process that was late."""
    for module in (operations, requester):
        monkeypatch.setattr(module, "GRACE", 0.2)
    servers = [("127.0.0.1", start().port)]

    async def main() -> None:
        async with async_client.DistributedLock("another", servers=servers):
            pass
        lock = async_client.DistributedLock(KEY, acquire_timeout_s=0, servers=servers)
        acquiring = asyncio.ensure_future(lock.acquire())
        await asyncio.sleep(0)  # the request leaves
        keep_busy(0.5)
        assert await acquiring is True
        assert await lock.release() is True

    with asyncio.Runner(loop_factory=pytest.importorskip(name).new_event_loop) as runner:
        runner.run(main())


@pytest.fixture
def blackholes() -> Iterator[list[tuple[str, int]]]:
    """Addresses where nobody ever accepts a connection, nor refuses it."""
    with contextlib.ExitStack() as stack:
        found: list[tuple[str, int]] = []
        for number in range(6):
            listener = stack.enter_context(socket.socket())
            listener.bind((f"127.0.0.{number + 2}", 0))
            listener.listen(0)
            found.append(listener.getsockname())
            for _ in range(3):  # more than its queue takes
                sock = stack.enter_context(socket.socket())
                sock.setblocking(False)
                sock.connect_ex(found[-1])
        yield found


async def test_a_name_with_many_addresses(
    client: Client,
    blackholes: list[tuple[str, int]],
    start: Callable[..., ServerProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It takes no longer than one, and the last is reached as well: from then on it is the first."""
    addresses = blackholes.copy()

    def look_up(*_: object, flags: int = 0, **__: object) -> list[Any]:
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror("it is a name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", each) for each in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    lock = client.lock(KEY, servers=["many.example:6388"], acquire_timeout_s=0)
    await is_not_answered(lock.acquire(), 0)
    addresses.append(("127.0.0.1", start().port))
    assert await soon(lock.acquire()) is True
    assert await lock.release() is True
    with socket.create_server(("127.0.0.1", 0)) as accepts:  # and says nothing
        addresses[0] = accepts.getsockname()
        close_idle_connections()
        assert await soon(lock.acquire()) is True
        assert await lock.release() is True


def test_a_look_up_that_hangs_holds_up_nobody_else(
    start: Callable[..., ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the look-ups of others, nor who asks for longer than they wait."""
    port, hangs, look_up = start().port, threading.Event(), socket.getaddrinfo

    def getaddrinfo(host: str, *args: Any, **named: Any) -> list[Any]:
        if host.endswith(".example"):
            if named.get("flags"):
                raise socket.gaierror("it is a name")
            if host.startswith("hangs"):
                hangs.wait(60)
            host = "127.0.0.1"
        return look_up(host, *args, **named)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    away = sync_client.DistributedLock("k", 0, servers=[f"hangs.example:{port}"])
    try:
        began = time.monotonic()
        with pytest.raises(errors.UnreachableError, match="no answer in time"):
            away.acquire()
        assert time.monotonic() - began < 30, "as long as its resolver"
        # The reactor looks names up as well: behind one that hangs it would wait.
        answers: queue.SimpleQueue[object] = queue.SimpleQueue()
        for host in ("hangs.example", "other.example"):
            looking = resolver.look_up(host, port)
            looking.listen(partial(lambda looking: answers.put(looking.outcome), looking))
        assert isinstance(answers.get(timeout=10), list)
        other = sync_client.DistributedLock("k", 0, servers=[f"other.example:{port}"])
        assert other.acquire()
        assert other.release()
    finally:
        hangs.set()
