"""An answer and the end of its connection come in one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import socket
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from dflockd import clock
from dflockd.address import Address
from dflockd.client import reactor, renewal
from dflockd.client.connection import Route
from dflockd.client.flow import Ready, Signal
from dflockd.client.lease import Lease
from dflockd.client.operations import Grant, Target
from dflockd.client.pool import Pool
from dflockd.client.reactor import Reactor
from dflockd.wire import FEATURES, Space, Welcome, encode_reply
from tests.dflockd.client.loss.support import LEASE, Held
from tests.dflockd.client_support import Calls, Client, Time, soon, until
from tests.dflockd.raw_server import PATIENCE

pytestmark = pytest.mark.usefixtures("no_idle_connections")


def _greet(sock: socket.socket) -> bool:
    """Welcome a client; say whether it is still there."""
    said = sock.recv(1000)
    assert not said or said.startswith(b"hello\n")
    if said:
        sock.sendall(encode_reply(Welcome(b"1.0", FEATURES)))
    return bool(said)


@contextlib.asynccontextmanager
async def _answered_and_left(client: Client, again: bytes) -> AsyncIterator[Held]:
    """A lock whose first renewal is answered with the end of its connection."""

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock, _ = listener.accept()
            with sock:
                _greet(sock)
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
                    if _greet(sock):  # else its lease has ended meanwhile
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
        self.features = FEATURES
        self.is_asked = True
        self.lines = list(lines)
        self.sent: list[bytes] = []

    def send_now(self, request: bytes) -> None:
        self.sent.append(request)
        self.is_asked = True

    def owes(self) -> bool:
        return self.is_asked

    def receive(self) -> bytes | None:
        self.is_asked = not self.lines
        return self.lines.pop(0) if self.lines else None

    def interrupt(self) -> None:
        self.closed = True

    def close(self) -> None:
        self.closed = True


def make_lease(
    link: Any, seconds: float, on_lost: Callable[[], object] | None = None, renew_ratio: float = 0.5
) -> Lease:
    """Return a lease of so many seconds, which are left of it."""
    target = Target(Space.LOCK, b"key", 1, None, str(link.route.address))
    grant = Grant(b"token", max(1, int(seconds)), clock.now() + seconds)
    return Lease(target, grant, link, renew_ratio, on_lost)


def test_an_answer_that_is_read_after_the_lease(clients_time: Time) -> None:
    """A thread that was stopped may find an answer before it finds that the lease is over."""
    link = Line()
    link.is_asked = False
    lost = []
    lease = make_lease(link, 1, lambda: lost.append(True))
    keeping = renewal.keep(lease, Pool())
    step = next(keeping)
    clients_time.stand_at(lease.renew_at + 0.01)
    assert isinstance(step, Ready)
    step = keeping.send(False)
    assert isinstance(step, Ready)
    assert link.sent
    link.lines.append(b"ok 1")
    clients_time.stand_at(lease.deadline + 0.1)
    with pytest.raises(StopIteration):
        keeping.send(True)
    assert lost == [True]
    assert (lease.held, lease.state, lease.is_over) == (False, "lost", True)
    assert link.closed, "and the server hears of it"


def test_who_looks_for_another_connection_is_not_disturbed() -> None:
    """A renewal that is asked for meanwhile, or the beginning of a run: it is sent there anyway."""
    lease = make_lease(Line(), 60)
    lease.task = task = Mock()
    begin, seen = Mock(), Signal()
    lease.is_away = True
    renewal.renew_now(lease, begin)
    looking = Looking()
    looking.report(lease)
    looking.take_in()
    renewal.read_now(lease, begin, seen)
    assert task.mock_calls == []
    assert seen.fired
    lease.is_away = False
    renewal.renew_now(lease, begin)
    renewal.read_now(lease, begin, Signal())
    assert task.mock_calls == [call.resume(False), call.resume(True)]
    lease.is_away = True
    assert lease.end(object())
    lease.poke()
    assert len(task.mock_calls) == 3, "there is nothing to look for"
    begin.assert_not_called()


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

    def turn(self) -> float:
        """Take one turn; return for how long it sleeps at the end of it, in seconds."""
        slept: list[float] = []
        self._selector = Mock(select=lambda seconds: slept.append(seconds) or ())
        self._turn()
        return slept[0]

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


def test_it_looks_again_soon_though_the_clock_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks that come meanwhile wake nobody: they would be neither renewed nor lost for so long."""
    looking = Looking()
    looking.keep(make_lease(Line(), 60))
    times = itertools.chain([100.0, 100.0], itertools.repeat(1.0))
    monkeypatch.setattr(reactor, "clock", SimpleNamespace(now=partial(next, times)))
    assert looking.turn() <= reactor.LOOK_EVERY
    assert looking.turn() <= reactor.LOOK_EVERY


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
            _greet(sock)
            sock.recv(1000)
            sock.sendall(b"ok 0123456789abcdef0123456789abcdef 1\n")
            sock.recv(1000)
            # In one packet.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
            sock.sendall(b"ok 1\n")
            sock.shutdown(socket.SHUT_RDWR)
        sock, _ = listener.accept()
        with sock:
            _greet(sock)
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
