"""A lease stays as long as it was granted, whatever the server says of what is left of it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from dflockd import errors, sync_client
from dflockd.client import DistributedLock
from dflockd.client.lease import UNRENEWED
from dflockd.wire import (
    Acquire,
    Enqueue,
    Evict,
    Granted,
    How,
    Inspect,
    Renew,
    Renewed,
    Report,
    Status,
)
from tests.dflockd.client_support import Calls, Client, soon, until
from tests.dflockd.scripted_server import Last, ScriptedServer, grant, renewed

pytestmark = pytest.mark.usefixtures("no_idle_connections")

LEASE = 3
RATIO = 0.05
"""Renewals come after this share of a lease: the sixth of them within a second."""


def rounded_down(request: Renew) -> Renewed:
    """What servers up to 0.4.1 answer: whole seconds that are left when it has just begun."""
    assert request.lease
    return Renewed(request.lease - 1)


def fewer(request: Any) -> Granted:
    """Less than was asked for, as a server whose longest lease that is."""
    token, _ = grant(request)
    return Granted(token, LEASE)


@pytest.mark.parametrize("kind", ["lock", "semaphore"])
@pytest.mark.parametrize(
    ("asked", "granting"),
    [(LEASE, grant), (None, fewer), (10, fewer)],
    ids=["own", "default", "cap"],
)
async def test_each_renewal_asks_for_what_was_granted(
    client: Client,
    scripted: ScriptedServer,
    kind: str,
    asked: int | None,
    granting: Callable[[Any], Granted],
) -> None:
    lost = Calls()
    scripted.script(Acquire, granting)
    scripted.script(Renew, rounded_down)
    options: Any = {"lease_ttl_s": asked, "renew_ratio": RATIO, "on_lost": lost}
    if kind == "lock":
        lock = client.lock("key", scripted, **options)
    else:
        lock = client.semaphore("key", 2, scripted, **options)
    assert await lock.acquire() is True
    await until(lambda: len(scripted.asked(Renew)) >= 6 or bool(lost.locks))
    assert [request.lease for request in scripted.asked(Renew)][:6] == [LEASE] * 6
    assert lock.held
    assert not lost.locks
    assert await lock.release() is True


async def test_so_do_renew_and_detach(client: Client, scripted: ScriptedServer) -> None:
    scripted.script(Renew, rounded_down)
    lock = client.lock("key", scripted, lease_ttl_s=10)
    assert await lock.acquire() is True
    for _ in range(3):
        assert await lock.renew() is True
    assert [request.lease for request in scripted.asked(Renew)] == [10] * 3
    assert await lock.detach()
    assert [request.lease for request in scripted.asked(How.DETACH)] == [10]


async def test_after_a_break_as_well(client: Client, scripted: ScriptedServer) -> None:
    lost = Calls()
    scripted.script(Renew, rounded_down)
    lock = client.lock("key", scripted, lease_ttl_s=LEASE, renew_ratio=RATIO, on_lost=lost)
    assert await lock.acquire() is True
    for number in (1, 2, 3, 4):
        await until(lambda n=number: len(scripted.asked(Renew)) >= n or bool(lost.locks))
        scripted.cut()
    await until(lambda: len(scripted.asked(Renew)) >= 6 or bool(lost.locks))
    assert {request.lease for request in scripted.asked(Renew)} == {LEASE}
    assert not lost.locks
    await until(lambda: lock.held)
    assert await lock.release() is True


async def test_a_lease_of_one_second(client: Client, scripted: ScriptedServer) -> None:
    """Of it 0 is left, rounded down: that is no time to rely on, and no reason to ask for 0."""
    lost = Calls()
    scripted.script(Renew, rounded_down)
    lock = client.lock("key", scripted, lease_ttl_s=1, on_lost=lost)
    assert await lock.acquire() is True
    await lost.first()
    assert {request.lease for request in scripted.asked(Renew)} == {1}


# Servers up to 0.4.1 say `error` and leave, when nothing was asked on a connection for some time.


@pytest.mark.parametrize("farewell", [b"error\n", b""], ids=["error", "nothing"])
@pytest.mark.parametrize("number", [1, 3])
async def test_a_server_that_gives_up_idle_connections(
    client: Client, scripted: ScriptedServer, farewell: bytes, number: int
) -> None:
    servers = [("127.0.0.1", scripted.port)]
    locks = [client.lock(f"key-{n}", servers=servers, acquire_timeout_s=1) for n in range(number)]
    for lock in locks:
        assert await lock.acquire() is True
    for lock in locks:
        assert await lock.release() is True
    scripted.say(farewell)
    scripted.cut()
    for lock in locks:
        assert await lock.acquire() is True
    for lock in locks:
        assert await lock.release() is True


async def test_an_event_loop_that_stood_still_meanwhile(scripted: ScriptedServer) -> None:
    """It finds the farewell only behind its next request."""
    lock = DistributedLock("key", servers=[("127.0.0.1", scripted.port)], acquire_timeout_s=1)
    for _ in range(3):
        assert await lock.acquire() is True
        assert await lock.release() is True
        # No turn of the loop between here and the next request.
        scripted.say(b"error\n")
        scripted.cut()


@pytest.mark.parametrize("method", ["inspect", "evict", "enqueue", "adopt"])
async def test_whatever_is_asked_next(
    client: Client, scripted: ScriptedServer, method: str
) -> None:
    report = {"key": "key", "limit": 1, "holders": [], "waiters": []}
    scripted.script(Inspect, Report(json.dumps(report).encode()))
    scripted.script(Evict, Status.OK)
    scripted.script(Enqueue, Status.QUEUED)
    lock = client.lock("key", scripted, acquire_timeout_s=1)
    async with lock:
        pass
    scripted.say(b"error\n")
    scripted.cut()
    arguments = {"evict": (5,), "adopt": ("0" * 32,)}.get(method, ())
    right = {"inspect": report, "evict": True, "enqueue": "queued", "adopt": True}[method]
    raw = lock.lock if client.name == "sync" else lock
    result = getattr(raw, method)(*arguments)
    assert (await result if client.name == "asyncio" else result) == right
    await lock.release()


async def test_a_refusal_is_still_a_refusal(client: Client, scripted: ScriptedServer) -> None:
    """`error` as an answer, with or without an end behind it, is asked for once more at most."""
    async with client.lock("key", scripted):
        pass
    for answer in (Status.ERROR, Last(b"error\n")):
        before = len(scripted.asked(Acquire))
        scripted.script(Acquire, answer)
        with pytest.raises(errors.RefusedError):
            await soon(client.lock("key", scripted, acquire_timeout_s=600).acquire())
        assert len(scripted.asked(Acquire)) - before <= 2


async def test_a_release_while_a_renewal_is_under_way(
    client: Client, scripted: ScriptedServer
) -> None:
    """The reply to the renewal comes first, and is none to the release."""
    may_answer = threading.Event()

    def late(request: Renew) -> Renewed:
        assert may_answer.wait(15)
        return renewed(request)

    scripted.script(Renew, late)
    lock = client.lock("key", servers=[scripted.address], lease_ttl_s=LEASE, renew_ratio=RATIO)
    assert await lock.acquire() is True
    await asyncio.to_thread(scripted.wait_asked, Renew)
    releasing = asyncio.ensure_future(lock.release())
    await until(lambda: lock.state == "free" or lock._session.telling is not None)
    may_answer.set()
    assert await releasing is True
    assert scripted.accepted == 1


class Ends(dict[str, object]):
    """How a lease has ended, with a look at why at each instant in which another thread could look."""

    def __init__(self, why: Callable[[], str]) -> None:
        self._why = why
        self.seen: list[str] = []

    def setdefault(self, *entry: Any) -> Any:
        ended = super().setdefault(*entry)
        self.seen.append(self._why())
        return ended


def test_whoever_sees_that_a_lease_is_lost_sees_why(scripted: ScriptedServer) -> None:
    lock = sync_client.DistributedLock("key", servers=[("127.0.0.1", scripted.port)])
    assert lock.acquire() is True
    lease = lock._session.lease
    assert lease is not None
    ends = lease._end = Ends(lambda: lease.why)
    lease.lose(UNRENEWED)
    assert ends.seen == [UNRENEWED]
    lock.release()
