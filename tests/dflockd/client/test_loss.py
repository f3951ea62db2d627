"""Locks whose server or network fails: kept where that is safe, lost in time where it is not.

What takes its time runs with both clients at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import pytest

from dflockd import errors
from dflockd.address import Address
from dflockd.client import clock, reactor, renewal
from dflockd.client.lease import Lease
from dflockd.client.operations import Grant, Target
from dflockd.client.pool import Pool
from dflockd.client.reactor import Reactor
from dflockd.client.steps import Ready, Route
from dflockd.wire import Space
from tests.dflockd.client_support import (
    Calls,
    Client,
    Proxy,
    Script,
    Time,
    client_named,
    is_free,
    renewed,
    soon,
    stats,
    until,
    wait_renewed,
    waiters,
)
from tests.dflockd.raw_server import PATIENCE, ServerProcess, eventually

pytestmark = pytest.mark.usefixtures("no_idle_connections")

LEASE = 600
"""Seconds; they end when the test sets the clock of the clients forward, and not before."""


@pytest.fixture(scope="module")
def clients() -> Iterator[list[Client]]:
    with client_named("sync") as blocking, client_named("asyncio") as not_blocking:
        yield [blocking, not_blocking]


@pytest.fixture
def doomed(start: Callable[..., ServerProcess]) -> ServerProcess:
    """A server that the test may do anything to."""
    return start()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    server = ServerProcess()
    yield server
    server.end()


@pytest.fixture(scope="module")
def patient_server() -> Iterator[ServerProcess]:
    """One that lets the locks of broken connections wait for a renewal."""
    server = ServerProcess("--orphan-ttl", "5")
    yield server
    server.end()


class Held:
    """A lock that was just taken, and what becomes of it."""

    def __init__(
        self, client: Client, server: ServerProcess | Proxy | None, suffix: str = "", **options: Any
    ) -> None:
        self.calls = Calls()
        self.key = f"key-{client.name}{suffix}"
        self.lock = client.lock(self.key, server, on_lost=self.calls, **options)
        self.asked_at = self.granted_at = 0.0

    @classmethod
    async def take(
        cls, client: Client, server: ServerProcess | Proxy | None, **options: Any
    ) -> Held:
        self = cls(client, server, **options)
        self.asked_at = clock.now()
        assert await soon(self.lock.acquire()) is True
        self.granted_at = clock.now()
        return self

    async def lost_at_once(self) -> None:
        """It is told of that long before its lease ends."""
        await self.calls.first()
        await self.stays_lost()

    async def stays_lost(self) -> None:
        assert (self.lock.held, self.lock.token, self.lock.lease) == (False, None, 0)
        assert self.lock.state == "lost"
        with pytest.raises(errors.LockLostError):
            await self.lock.check()
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            assert not self.lock.held, "resurrected"
            await asyncio.sleep(0.01)
        assert self.calls.locks == [getattr(self.lock, "lock", self.lock)]
        assert await self.lock.release() is False
        assert len(self.calls.locks) == 1

    async def kept_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.lock.held
            await asyncio.sleep(0.01)
        assert not self.calls.locks


async def end_leases(
    clients_time: Time, held: Sequence[Held], doubtful: Sequence[Held] = ()
) -> None:
    """Check that locks are lost with their leases, not before, and that they are told.

    They are held until then; those whose connections break are in doubt soon, and never held again.
    """
    for hold in doubtful:
        await until(lambda hold=hold: not hold.lock.held)  # type: ignore[misc]
    holds = [*held, *doubtful]
    states = ["held"] * len(held) + ["doubtful"] * len(doubtful)
    assert [hold.lock.state for hold in holds] == states
    first, last = (min(each.asked_at for each in holds), max(each.granted_at for each in holds))
    clients_time.go_on_from(first + 0.75 * LEASE)  # the renewals are due
    await asyncio.sleep(0.3)
    clients_time.stand_at(first + LEASE - 0.001)
    assert [hold.lock.state for hold in holds] == states
    assert not any(hold.calls.locks for hold in holds), "lost before its lease ended"
    clients_time.stand_at(last + LEASE)
    assert {hold.lock.state for hold in holds} == {"lost"}, "held past its lease"
    clients_time.go_on_from(last + LEASE)
    for hold in holds:
        assert hold.lock.fence
        await hold.calls.first()
    clients_time.patch.undo()


# The server.


async def test_the_server_is_killed(
    clients: list[Client], doomed: ServerProcess, clients_time: Time
) -> None:
    holds = [await Held.take(client, doomed, lease_ttl_s=LEASE) for client in clients]
    doomed.process.kill()
    await end_leases(clients_time, [], holds)
    await asyncio.gather(*(hold.stays_lost() for hold in holds))
    for client in clients:
        with pytest.raises(errors.UnreachableError):
            await soon(client.lock("key", doomed).acquire())


async def test_the_server_is_killed_and_the_lock_released(
    client: Client, doomed: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    hold = await Held.take(client, doomed)
    doomed.process.kill()
    doomed.process.wait(PATIENCE)
    with caplog.at_level(logging.WARNING, "dflockd.client"):
        assert await soon(hold.lock.release()) is False
    assert "could not be released" in caplog.text
    assert not hold.lock.held
    assert not hold.calls.locks


async def test_renewing_where_the_server_is_gone(client: Client, doomed: ServerProcess) -> None:
    hold = await Held.take(client, doomed)
    doomed.process.kill()
    doomed.process.wait(PATIENCE)
    with pytest.raises(errors.UnreachableError, match=f":{doomed.port}"):
        await soon(hold.lock.renew())
    await hold.stays_lost()


async def test_the_server_is_restarted(
    clients: list[Client], start: Callable[..., ServerProcess]
) -> None:
    """Its locks were in memory: they are lost, long before their leases end."""
    server = start()
    holds = [await Held.take(client, server) for client in clients]
    port = server.port
    server.end()
    server = start("--port", str(port))
    assert server.port == port
    await asyncio.gather(*(hold.lost_at_once() for hold in holds))
    for hold in holds:
        assert await soon(hold.lock.acquire()) is True
        assert await hold.lock.release() is True


async def test_a_waiter_whose_server_ends(client: Client, doomed: ServerProcess) -> None:
    raw = doomed.connect()
    raw.lock("key")
    waiting = asyncio.ensure_future(client.lock("key", doomed).acquire())
    await until(lambda: waiters(doomed, "key") == 1)
    doomed.process.kill()
    with pytest.raises(errors.UnreachableError, match=f":{doomed.port}"):
        await soon(waiting)


async def test_the_server_stops_for_longer_than_the_lease(
    clients: list[Client], doomed: ServerProcess, clients_time: Time
) -> None:
    holds = [await Held.take(client, doomed, lease_ttl_s=LEASE) for client in clients]
    doomed.suspend()
    await end_leases(clients_time, holds)
    # What it answers now to the renewals that it finds is too late.
    doomed.signal(signal.SIGCONT)
    await asyncio.gather(*(hold.stays_lost() for hold in holds))
    for hold in holds:
        await until(lambda key=hold.key: is_free(doomed, key))  # type: ignore[misc]
        assert await soon(hold.lock.acquire()) is True
        await hold.lock.release()


async def test_the_server_stops_for_less_than_the_lease(
    clients: list[Client], doomed: ServerProcess
) -> None:
    options = {"lease_ttl_s": LEASE, "renew_ratio": 0.5 / LEASE}
    holds = [await Held.take(client, doomed, **options) for client in clients]
    doomed.suspend()
    await asyncio.gather(*(hold.kept_for(1.4) for hold in holds))  # renewals are due
    doomed.signal(signal.SIGCONT)
    await asyncio.gather(*(renewed(doomed, hold.key) for hold in holds))
    await asyncio.gather(*(hold.kept_for(0.2) for hold in holds))
    for hold in holds:
        assert await hold.lock.release() is True


# The network.


@pytest.mark.parametrize("times", [1, 3])
async def test_a_reset_connection_is_replaced(
    client: Client,
    patient_server: ServerProcess,
    through: Callable[[ServerProcess], Proxy],
    times: int,
) -> None:
    proxy = through(patient_server)
    hold = await Held.take(client, proxy)
    token = hold.lock.token

    def owner() -> int:
        return int(stats(patient_server)["locks"][0]["owner_conn_id"])

    for number in range(times):
        before = owner()
        proxy.cut(reset=True)
        await until(lambda n=number: proxy.accepted == n + 2)  # type: ignore[misc]
        await until(lambda before=before: owner() not in (before, 0))  # type: ignore[misc]
        # The server has taken the renewal; its answer ends the doubt.
        await soon(hold.lock.check())
        assert hold.lock.held
        assert not is_free(patient_server, hold.key)
    assert hold.lock.token == token
    assert not hold.calls.locks
    assert await hold.lock.release() is True
    assert is_free(patient_server, hold.key)


async def test_an_ended_connection_is_a_lost_lock(
    clients: list[Client], server: ServerProcess, through: Callable[[ServerProcess], Proxy]
) -> None:
    """Without a grace period the server has given it to the next, however long the lease is."""
    proxies = [through(server) for _ in clients]
    holds = [await Held.take(client, proxy) for client, proxy in zip(clients, proxies, strict=True)]
    others = [client.lock(hold.key, server) for client, hold in zip(clients, holds, strict=True)]
    waiting = [asyncio.ensure_future(other.acquire()) for other in others]
    await until(lambda: all(waiters(server, hold.key) == 1 for hold in holds))
    for reset, proxy in zip((False, True), proxies, strict=True):
        proxy.cut(reset=reset)
    await asyncio.gather(*(hold.lost_at_once() for hold in holds))
    assert await soon(asyncio.gather(*waiting)) == [True, True]
    for other in others:
        await other.release()


async def test_many_cuts_lose_a_lock_once(
    clients: list[Client], server: ServerProcess, through: Callable[[ServerProcess], Proxy]
) -> None:
    proxy = through(server)
    holds = [await Held.take(client, proxy) for client in clients]
    for _ in range(20):
        proxy.cut(reset=False)
        await asyncio.sleep(0.01)
    await asyncio.gather(*(hold.lost_at_once() for hold in holds))


async def test_nothing_gets_through(
    clients: list[Client],
    server: ServerProcess,
    through: Callable[[ServerProcess], Proxy],
    clients_time: Time,
) -> None:
    proxy = through(server)
    holds = [await Held.take(client, proxy, lease_ttl_s=LEASE) for client in clients]
    proxy.withhold()
    await end_leases(clients_time, holds)
    proxy.pass_on()
    await asyncio.gather(*(hold.stays_lost() for hold in holds))
    await until(lambda: stats(server)["locks"] == [])


async def test_answers_that_come_after_the_lease(
    clients: list[Client],
    patient_server: ServerProcess,
    through: Callable[[ServerProcess], Proxy],
    clients_time: Time,
) -> None:
    """The server has renewed the lock, but said so too late: it stays lost, and is given back."""
    steady, broken = through(patient_server), through(patient_server)
    holds = [
        await Held.take(client, proxy, suffix=str(number), lease_ttl_s=LEASE)
        for number, proxy in enumerate((steady, broken))
        for client in clients
    ]
    await asyncio.sleep(0.15)
    steady.withhold_replies()
    broken.withhold_replies()
    broken.cut(reset=True)
    await end_leases(clients_time, holds[: len(clients)], holds[len(clients) :])
    steady.pass_on()
    broken.pass_on()
    await asyncio.gather(*(hold.stays_lost() for hold in holds))
    await until(lambda: stats(patient_server)["locks"] == [])
    await until(lambda: stats(patient_server)["connections"] == 0)


@pytest.mark.parametrize("noticed", [False, True])
async def test_a_lock_with_a_broken_connection_is_released(
    client: Client, start: Callable[..., ServerProcess], noticed: bool
) -> None:
    """The server would wait for a renewal; it hears on another connection that none will come."""
    server = start("--orphan-ttl", "30")
    proxy = Proxy(server.port)
    hold = await Held.take(client, proxy)
    proxy.cut(reset=True)
    if noticed:
        # Whoever reaches out now gets no answer yet.
        proxy.withhold_replies()
        await until(lambda: proxy.accepted == 2)
        releasing = asyncio.ensure_future(hold.lock.release())
        await asyncio.sleep(0.05)
        proxy.pass_on()
        await soon(releasing)  # False if the end of that attempt has released it already
    else:
        assert await soon(hold.lock.release()) is True
    await until(lambda: is_free(server, hold.key))
    proxy.close()


# The answer and the end in one.


@contextlib.asynccontextmanager
async def _answered_and_left(client: Client, again: bytes) -> AsyncIterator[Held]:
    """A lock whose first renewal is answered with the end of its connection."""

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock, _ = listener.accept()
            with sock:
                sock.recv(1000)
                sock.sendall(b"ok 0123456789abcdef0123456789abcdef %d\n" % LEASE)
                sock.recv(1000)
                # In one packet.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
                sock.sendall(b"ok %d\n" % LEASE)
                sock.shutdown(socket.SHUT_RDWR)
            while True:
                sock, _ = listener.accept()
                with sock:
                    sock.recv(1000)
                    sock.sendall(again)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        servers = [("127.0.0.1", listener.getsockname()[1])]
        # One renewal is answered, half a second or less after the grant.
        yield await Held.take(client, None, servers=servers, renew_ratio=0.5 / LEASE)
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(PATIENCE)
    assert not thread.is_alive()


@pytest.mark.parametrize("again", [b"error\n", b""])
async def test_a_server_that_answers_and_leaves(
    clients: list[Client], again: bytes, clients_time: Time
) -> None:
    """The end of the connection must be noticed though a good answer came right before it."""
    async with contextlib.AsyncExitStack() as stack:
        holds = [
            await stack.enter_async_context(_answered_and_left(client, again)) for client in clients
        ]
        if again:
            await asyncio.gather(*(hold.lost_at_once() for hold in holds))
        else:
            for hold in holds:
                await until(lambda hold=hold: hold.lock.state == "doubtful")  # type: ignore[misc]
            clients_time.go_on_from(clock.now() + LEASE)
            assert {hold.lock.state for hold in holds} == {"lost"}
            await asyncio.gather(*(hold.calls.first() for hold in holds))
        await asyncio.sleep(0.1)
        assert [len(hold.calls.locks) for hold in holds] == [1, 1]


class Line:
    """A connection on which lines have come, as far as flows go."""

    def __init__(self, *lines: bytes) -> None:
        self.route = Route(Address("host", 1))
        self.closed = self.pooled = False
        self.label = b""
        self.owed = True
        self.lines = list(lines)
        self.sent: list[bytes] = []

    def send_now(self, request: bytes) -> None:
        self.sent.append(request)
        self.owed = True

    def receive_now(self) -> bytes | None:
        self.owed = not self.lines
        return self.lines.pop(0) if self.lines else None

    def interrupt(self) -> None:
        self.closed = True

    def close(self) -> None:
        self.closed = True


def make_lease(
    link: Any,
    seconds: float,
    on_lost: Callable[[], object] | None = None,
    renew_ratio: float = 0.5,
) -> Lease:
    """Return a lease of so many seconds, which are left of it."""
    target = Target(Space.LOCK, b"key", 1, None, str(link.route.address))
    grant = Grant(b"token", max(1, int(seconds)), clock.now() + seconds)
    return Lease(target, grant, link, renew_ratio, on_lost)


def test_an_answer_that_is_read_after_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that was stopped may find an answer before it finds that the lease is over."""
    link = Line()
    link.owed = False
    lost = []
    lease = make_lease(link, 1, lambda: lost.append(True))
    keeping = renewal.keep(lease, Pool())
    step = next(keeping)
    monkeypatch.setattr(clock, "now", lambda: lease.renew_at + 0.01)
    assert isinstance(step, Ready)
    step = keeping.send(False)
    assert isinstance(step, Ready)
    assert link.sent
    link.lines.append(b"ok 1")
    after = lease.deadline + 0.1
    monkeypatch.setattr(clock, "now", lambda: after)
    with pytest.raises(StopIteration):
        keeping.send(True)
    assert lost == [True]
    assert (lease.held, lease.state, lease.is_over) == (False, "lost", True)
    assert link.closed, "and the server hears of it"


class Looking(Reactor):
    """A reactor whose thread is played by the test."""

    def __init__(self) -> None:
        super().__init__(Pool())
        self._thread = 1
        self._wakes_at = math.inf
        self.watched: list[Lease] = []
        self.woken = 0

    def _look_at(self, lease: Lease) -> None:
        if not lease.is_over:
            self.watched.append(lease)

    def _wake(self) -> None:
        self.woken += 1

    def look(self, now: float) -> float:
        """Look at those that have come; return when it looks again."""
        self._look_at_young(now)
        return self._look_at_young_at

    def take_in(self) -> None:
        """Take in what it was told."""
        self._take_in_all()
        self._do_what_is_due()


def test_a_lock_that_is_seen_twice_is_watched() -> None:
    looking = Looking()
    first, gone, second = (make_lease(Line(), 60) for _ in range(3))
    looking.keep(first)
    looking.keep(gone)
    assert looking.look(1.0) == 1.0 + reactor.LOOK_EVERY
    assert looking.watched == []
    looking.keep(second)
    assert gone.end(object())
    looking.look(1.0 + reactor.LOOK_EVERY / 2)
    assert looking.watched == [], "too early"
    again = looking.look(1.0 + reactor.LOOK_EVERY)
    assert looking.watched == [first]
    looking.look(again)
    assert looking.watched == [first, second]


def test_nothing_is_kept_of_a_lock_that_has_come_and_gone() -> None:
    looking = Looking()
    lease, other = make_lease(Line(), 60), make_lease(Line(), 60)
    looking.keep(lease)
    looking.keep(other)
    looking.look(1.0)
    assert lease.end(object())
    looking.forget(lease)
    gone = weakref.ref(lease)
    del lease
    assert gone() is None
    looking.look(1.0 + reactor.LOOK_EVERY)
    assert looking.watched == [other]


def test_one_that_is_renewed_soon_is_watched_at_once() -> None:
    looking = Looking()
    lease = make_lease(Line(), 1, renew_ratio=0.1)
    looking.keep(lease)
    assert looking.woken == 1
    looking.take_in()
    assert looking.watched == [lease]


def test_locks_that_come_and_go_wake_nobody() -> None:
    looking, now = Looking(), 1.0
    for expected in (1, 2):
        for _ in range(2 * reactor.LOOK_ON):
            lease = make_lease(Line(), 60)
            looking.keep(lease)
            assert lease.end(object())
            looking.forget(lease)
            assert looking.woken == expected
            now = looking.look(now)
        # The thread goes on to look for a while, and then sleeps until it is woken.
        looks = 0
        while now < math.inf:
            now = looking.look(now)
            looks += 1
        assert reactor.LOOK_ON <= looks <= reactor.LOOK_ON + 2
        assert looking.watched == []
        now = 100.0


def test_one_that_comes_while_the_thread_stops_looking_is_seen() -> None:
    """It has woken nobody, for the thread had not said yet that it looks no more."""
    late = make_lease(Line(), 60)

    class Stopping(Looking):
        looks = 0

        @property
        def _looks(self) -> int:
            return self.looks

        @_looks.setter
        def _looks(self, number: int) -> None:
            if self.looks and not number and not late.is_over:
                self.keep(late)
            self.looks = number

    looking = Stopping()
    looking.keep(make_lease(Line(), 60))
    now = looking.look(1.0)
    while now < math.inf and late not in looking.watched:
        now = looking.look(now)
    assert looking.woken == 1
    assert late in looking.watched


async def _kept_by_the_next(client: Client) -> None:
    def serve(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            sock.recv(1000)
            sock.sendall(b"ok 0123456789abcdef0123456789abcdef 1\n")
            sock.recv(1000)
            # In one packet.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
            sock.sendall(b"ok 1\n")
            sock.shutdown(socket.SHUT_RDWR)
        sock, _ = listener.accept()
        with sock:
            sock.recv(1000)
            sock.sendall(b"ok 33\n")
            renewed.set()
            sock.recv(1000)
            sock.sendall(b"ok\n")

    renewed = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        lost = Calls()
        port = listener.getsockname()[1]
        lock = client.lock("key", servers=[("127.0.0.1", port)], on_lost=lost)
        assert await soon(lock.acquire()) is True
        await until(renewed.is_set)
        await soon(lock.check())
        assert lock.held
        assert await soon(lock.release()) is True
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert not lost.locks


async def test_a_reply_and_the_end_in_one(clients: list[Client]) -> None:
    """The end must be noticed, though there is a good answer before it, and is not the lock's."""
    await asyncio.gather(*map(_kept_by_the_next, clients))


# This process.


async def test_a_callback_that_fails(
    clients: list[Client], doomed: ServerProcess, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_lock: Any) -> None:
        raise ZeroDivisionError

    locks = [
        client.lock(f"{client.name}-{n}", doomed, on_lost=fail) for client in clients for n in "ab"
    ]
    for lock in locks:
        await lock.acquire()
    await asyncio.sleep(0.15)
    with caplog.at_level(logging.WARNING, "dflockd.client"):
        doomed.process.kill()
        raw = ServerProcess("--port", str(doomed.port))
        try:
            await until(lambda: caplog.text.count("on_lost of lock") == len(locks))
        finally:
            raw.end()
    assert not any(lock.held for lock in locks)


async def test_an_event_loop_that_stands_still(
    clients: list[Client], server: ServerProcess
) -> None:
    """A blocking call costs no lock, however long it is: the loop does not renew it."""
    lost = Calls()
    lock = clients[1].lock("key", server, lease_ttl_s=LEASE, renew_ratio=0.5 / LEASE, on_lost=lost)
    await lock.acquire()
    wait_renewed(server, "key")
    assert lock.held
    assert not is_free(server, "key")
    assert await lock.release() is True
    await asyncio.sleep(0)
    assert not lost.locks


def test_an_event_loop_that_is_closed(
    clients: list[Client], doomed: ServerProcess, clients_time: Time
) -> None:
    """Its locks go on, and if one is lost the client's own thread says so."""
    lost = Calls()
    threads = []
    lock = clients[1].lock(
        "key",
        doomed,
        lease_ttl_s=LEASE,
        renew_ratio=0.5 / LEASE,
        on_lost=lambda _: [lost(_), threads.append(threading.get_ident())],
    )
    assert asyncio.run(lock.acquire()) is True
    wait_renewed(doomed, "key")
    assert lock.held
    assert not is_free(doomed, "key")
    doomed.process.kill()
    eventually(lambda: lock.state == "doubtful")
    clients_time.go_on_from(clock.now() + LEASE)
    eventually(lambda: bool(threads))
    assert threads != [threading.get_ident()]
    assert lost.locks == [lock]
    assert lock.state == "lost"


HOLDER = """
import asyncio, sys, threading
from dflockd import client, sync_client

lost = []
options = {
    "servers": [("127.0.0.1", int(sys.argv[2]))],
    "lease_ttl_s": 3,
    "acquire_timeout_s": 600,
    "on_lost": lost.append,
}
name = sys.argv[1]

def answer(lock):
    print("granted", lock.held, lock.fence, flush=True)
    for _ in sys.stdin:
        print(lock.held, len(lost), flush=True)

async def main():
    lock = client.DistributedLock("key-asyncio", **options)
    await lock.acquire()
    await asyncio.to_thread(answer, lock)

if name == "sync":
    lock = sync_client.DistributedLock("key-sync", **options)
    lock.acquire()
    answer(lock)
else:
    asyncio.run(main())
"""


@pytest.fixture
def holders(clients: list[Client], server: ServerProcess) -> Iterator[list[Script]]:
    """Two programs that hold a lock with a lease of three seconds, one with each client."""
    scripts = [Script(HOLDER, client.name, server.port) for client in clients]
    yield scripts
    for script in scripts:
        script.process.send_signal(signal.SIGCONT)
        script.close()


async def test_this_process_stops_for_longer_than_the_lease(
    clients: list[Client], server: ServerProcess, holders: list[Script]
) -> None:
    keys = [f"key-{client.name}" for client in clients]
    for script in holders:
        assert script.line().startswith("granted True")
        script.process.send_signal(signal.SIGSTOP)
    raw = server.connect()
    for key in keys:
        raw.lock(key, 600)  # granted once the lease has ended
    for script in holders:
        script.say()
        script.process.send_signal(signal.SIGCONT)
        # The first thing that it does: its own threads may not have run yet.
        assert script.line().startswith("False")
    for script in holders:
        end = time.monotonic() + PATIENCE
        told = ""
        while told != "False 1":
            assert time.monotonic() < end, told
            script.say()
            told = script.line()
            assert told in ("False 0", "False 1")
    raw.close()


async def test_a_grant_that_comes_while_this_process_is_stopped(
    clients: list[Client], server: ServerProcess
) -> None:
    """It is not believed: the lease has ended, and somebody else has the lock."""
    raw = server.connect()
    keys = [f"key-{client.name}" for client in clients]
    tokens = [raw.lock(key, "0 600") for key in keys]
    scripts = [Script(HOLDER, client.name, server.port) for client in clients]
    try:
        for key, token, script in zip(keys, tokens, scripts, strict=True):
            await until(lambda key=key: waiters(server, key) == 1)  # type: ignore[misc]
            script.process.send_signal(signal.SIGSTOP)
            assert raw.ask("r", key, token) == "ok"
            await until(lambda key=key: waiters(server, key) == 0)  # type: ignore[misc]
        tokens = [raw.lock(key, "600 600") for key in keys]  # granted once that lease has ended
        for key, token, script in zip(keys, tokens, scripts, strict=True):
            script.process.send_signal(signal.SIGCONT)
            # It does not take the grant up, but goes back to waiting.
            await until(lambda key=key: waiters(server, key) == 1)  # type: ignore[misc]
            assert raw.ask("r", key, token) == "ok"
            granted, held, fence = script.line().split()
            assert (granted, held) == ("granted", "True")
            assert int(fence) > int(token[:16], 16)
            assert not is_free(server, key)
    finally:
        raw.close()
        for script in scripts:
            script.process.send_signal(signal.SIGCONT)
            script.close()


@pytest.mark.parametrize("how", ["renew", "check", "detach"])
async def test_who_comes_during_a_rescue_waits_for_its_end(
    client: Client,
    start: Callable[..., ServerProcess],
    through: Callable[[ServerProcess], Proxy],
    how: str,
) -> None:
    server = start("--orphan-ttl", "30", "--orphan-ttl-covers", "all")
    proxy = through(server)
    lock = client.lock("slow", proxy)
    assert await lock.acquire()
    token, fence = lock.token, lock.fence
    proxy.withhold_replies()
    proxy.cut(reset=True)
    await until(lambda: lock.state == "doubtful")
    assert (lock.held, lock.token, lock.fence) == (False, token, fence)
    await until(lambda: proxy.accepted == 2)
    coming = asyncio.ensure_future(getattr(lock, how)())
    await asyncio.sleep(0.3)
    assert not coming.done()
    proxy.pass_on()
    assert await soon(coming) == {"renew": True, "check": None, "detach": token}[how]
    assert lock.held == (how != "detach")
    assert await lock.release() == (how != "detach")
    assert proxy.accepted == 2
