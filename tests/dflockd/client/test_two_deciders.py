"""What client and server, or two threads, read in one answer: it must be one thing."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading

import pytest

from dflockd import clock, errors
from dflockd.client import connection, operations, process, resolver, routing
from dflockd.client.flow import Hear
from dflockd.sync_client import DistributedLock
from dflockd.wire import Listen, Renew, Renewed, Status, Superseded
from tests.dflockd.client_support import Client, Time, until
from tests.dflockd.raw_server import PATIENCE, ServerProcess
from tests.dflockd.scripted_server import ScriptedServer

TOO_LONG = 7200
"""A server grants an hour at most."""


async def test_a_renewal_for_too_long_is_refused_and_the_lock_goes_on(
    client: Client, server: ServerProcess, key: str
) -> None:
    lock, other = client.lock(key, server), client.lock(key, server, acquire_timeout_s=0)
    assert await lock.acquire() is True
    for _ in range(2):
        with pytest.raises(errors.RefusedError, match=f"not renewed for {TOO_LONG} s"):
            await lock.renew(TOO_LONG)
        assert await lock.renew() is True
    assert await lock.renew(3600) is True
    assert await other.acquire() is False
    assert await lock.release() is True


async def test_what_is_adopted_for_too_long_is_no_end_of_the_hold(
    client: Client, server: ServerProcess, key: str
) -> None:
    lock = client.lock(key, server)
    assert await lock.acquire() is True
    token = await lock.detach()
    with pytest.raises(errors.RefusedError, match="is the lease too long"):
        await client.lock(key, server, lease_ttl_s=TOO_LONG).adopt(token)
    adopting = client.lock(key, server)
    assert await adopting.adopt(token) is True
    assert await adopting.release() is True
    assert await client.lock(key, server).adopt(token) is False


async def test_seconds_of_a_renewal_are_for_that_one(
    client: Client, scripted: ScriptedServer
) -> None:
    lock = client.lock("key", scripted, lease_ttl_s=30)
    assert await lock.acquire() is True
    assert await lock.renew(2) is True
    await until(lambda: len(scripted.asked(Renew)) > 1)
    assert [request.lease for request in scripted.asked(Renew)][:2] == [2, 30]


async def test_no_renewal_that_nobody_asks_for_makes_a_lease_shorter(
    client: Client, scripted: ScriptedServer
) -> None:
    lock = client.lock("key", scripted, lease_ttl_s=1, renew_ratio=0.01)
    assert await lock.acquire() is True
    # Once after a refusal one asks for no more than was granted first: that is over by then.
    scripted.script(Renew, lambda it: Status.ERROR if it.lease == TOO_LONG else Renewed(50))
    with pytest.raises(errors.RefusedError):
        await lock.renew(TOO_LONG)
    scripted.script(Renew)
    assert await lock.renew(100) is True
    before = len(scripted.asked(Renew))
    await until(lambda: len(scripted.asked(Renew)) > before)
    assert scripted.asked(Renew)[before].lease > 1


async def test_what_is_refused_at_any_length_is_lost(
    client: Client, scripted: ScriptedServer
) -> None:
    lock = client.lock("key", scripted, lease_ttl_s=1, renew_ratio=0.01)
    assert await lock.acquire() is True
    assert await lock.renew(100) is True
    before = len(scripted.asked(Renew))
    scripted.script(Renew, Status.ERROR, Status.ERROR)
    await until(lambda: lock.state == "lost")
    longer, plain = (request.lease for request in scripted.asked(Renew)[before:])
    assert longer > plain == 1


def test_a_holder_that_is_not_known_for_a_moment_listens_again(scripted: ScriptedServer) -> None:
    """Its server was started again, and learns of the hold by the next renewal."""
    scripted.script(Listen, Status.LEASE_EXPIRED, Superseded(9, b"newer"))
    at = [("127.0.0.1", scripted.port)]
    lock = DistributedLock("key", servers=at, owner=("run", 0, 3))
    assert lock.acquire()
    heard = list[str]()
    has_heard = threading.Event()
    lock.listen(lambda by: (heard.append(by), has_heard.set()))
    assert has_heard.wait(PATIENCE)
    assert heard == ["newer"]


def test_check_sees_an_end_before_the_thread_that_renews(scripted: ScriptedServer) -> None:
    lock = DistributedLock("key", servers=[("127.0.0.1", scripted.port)])
    assert lock.acquire()
    assert lock.renew()  # from here on that thread looks after it
    reactor, stands, goes_on = process.current().reactor, threading.Event(), threading.Event()
    reactor.call(lambda: (stands.set(), goes_on.wait(PATIENCE)))
    assert stands.wait(PATIENCE)
    scripted.script(Renew, Status.ERROR)
    scripted.cut()
    ends = list[BaseException]()

    def check() -> None:
        try:
            lock.check()
        except errors.LockLostError as exc:
            ends.append(exc)

    checking = threading.Thread(target=check)
    checking.start()
    checking.join(0.3)
    assert checking.is_alive(), "it says that the lock is held"
    goes_on.set()
    checking.join(PATIENCE)
    assert len(ends) == 1


async def test_detach_in_doubt_gives_up_before_the_lease_ends(
    client: Client,
    scripted: ScriptedServer,
    monkeypatch: pytest.MonkeyPatch,
    clients_time: Time,
) -> None:
    monkeypatch.setattr(operations, "REPLY_PATIENCE", 0.3)
    lock = client.lock("key", scripted, lease_ttl_s=3600)
    assert await lock.acquire() is True
    assert await lock.renew() is True
    scripted.stop()
    await until(lambda: lock.state == "doubtful")
    detaching = asyncio.ensure_future(lock.detach(3600))
    await asyncio.wait([detaching], timeout=PATIENCE)
    clients_time.go_on_from(clock.now() + 3600)  # who still waits does so no longer
    with pytest.raises(errors.UnreachableError, match="in doubt"):
        await detaching
    assert lock.state == "free"


@pytest.mark.parametrize("is_tls", [False, True], ids=["connecting", "tls"])
def test_cancel_ends_an_attempt_to_connect(is_tls: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT", 4 * PATIENCE)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent:
        address = silent.getsockname()
        full = [socket.socket() for _ in range(0 if is_tls else 4)]
        for each in full:  # the kernel answers nobody else
            each.setblocking(False)
            each.connect_ex(address)
        context = ssl.create_default_context() if is_tls else None
        lock = DistributedLock("key", 4 * PATIENCE, servers=[address], ssl_context=context)
        ends = list[BaseException]()

        def acquire() -> None:
            try:
                lock.acquire()
            except errors.AcquireCancelledError as exc:
                ends.append(exc)

        acquiring = threading.Thread(target=acquire)
        acquiring.start()
        while lock._session.asking is None:
            acquiring.join(0.01)
        lock.cancel()
        acquiring.join(PATIENCE)
        assert len(ends) == 1
        for each in full:
            each.close()


async def test_a_hold_that_was_detached_is_no_answer_to_its_enqueue(
    client: Client, server: ServerProcess, key: str
) -> None:
    lock = client.lock(key, server)
    assert await lock.enqueue() == "acquired"
    assert await lock.detach(60)
    assert await lock.enqueue() == "queued"
    assert await lock.release() is False


def test_there_are_no_threads_to_look_up_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(resolver._thread, "start_new_thread", start)
    flow = connection.dial(connection.Route(routing.parse_server("nowhere:1"), None, None), 1e9)
    waits = next(flow)
    assert isinstance(waits, Hear)
    assert waits.signal.fired, "nobody else would fire it"
    with pytest.raises(errors.UnreachableError, match="can't start new thread"):
        flow.send(True)


def test_contexts_of_cluster_clients_are_not_kept_for_ever() -> None:
    seeds = (routing.parse_server("a:1"),)
    for _ in range(20):
        routing.shard_map(seeds, None, ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    assert sum(each[0] == seeds for each in routing._maps) <= routing.MOST_CONTEXTS
