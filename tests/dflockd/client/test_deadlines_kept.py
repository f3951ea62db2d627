"""A time that is given is kept, whatever the server does, and silence never means "held by another".

Servers here stand still, accept and say nothing, say one byte now and then, or never end what they say.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dflockd import errors
from dflockd.client import connection
from dflockd.wire import Acquire, Auth, Enqueue, Granted, Hello, How, Renew, Status, Wait
from tests.dflockd.client.silence import GRACE, SLACK
from tests.dflockd.client_support import Client, soon
from tests.dflockd.raw_server import PATIENCE, ServerProcess, StartServer
from tests.dflockd.scripted_server import ScriptedCluster, ScriptedServer, Silence
from tests.pace import Pace

pytestmark = pytest.mark.usefixtures("no_idle_connections")

KEY = "key"
CONNECTING = 5.0
"""Seconds for a connection to be made where there is no end to the wait for the lock."""


async def in_time(waiting: Any, timeout: float) -> None:
    """Check that nobody is told that the lock is somebody else's, and that in time."""
    with Pace() as pace, pytest.raises(errors.UnreachableError) as caught:
        await soon(waiting)
    assert pace.seconds < timeout + GRACE + SLACK
    assert "\n" not in str(caught.value)


class Mute:
    """It accepts connections, and says so many bytes a second that are no reply."""

    def __init__(self, says: bytes = b"", path: Path | None = None) -> None:
        family = socket.AF_INET if path is None else socket.AF_UNIX
        self._listener = socket.socket(family)
        self._listener.bind(("127.0.0.1", 0) if path is None else str(path))
        self._listener.listen()
        self.port = 0 if path is not None else int(self._listener.getsockname()[1])
        self._says = says
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(PATIENCE)

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(sock,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            while not self._ended.wait(0.2):
                if self._says:
                    sock.sendall(self._says)


@pytest.fixture
def mute() -> Iterator[Callable[..., Mute]]:
    with contextlib.ExitStack() as stack:

        def start(*args: Any, **options: Any) -> Mute:
            server = Mute(*args, **options)
            stack.callback(server.close)
            return server

        yield start


soak = pytest.mark.soak  # for what others here cover by and large


# A server that stands still.


@pytest.mark.parametrize("timeout", [pytest.param(0, marks=soak), 1, pytest.param(2, marks=soak)])
async def test_a_server_that_stands_still(
    clients: list[Client], start: StartServer, timeout: float
) -> None:
    """With idle connections to it and without, at the first word and at the token."""
    flags = {None: (), "secret": ("--auth-token", "secret")}
    servers, waiting = [], []
    for client, secret in itertools.product(clients, flags):
        server = start(*flags[secret])
        servers.append(server)
        options = {"acquire_timeout_s": timeout, "auth_token": secret}
        locks = [client.lock(f"{KEY}-{n}", server, **options) for n in range(4)]
        # Two of them leave idle connections, the others find none left.
        await asyncio.gather(*(lock.acquire() for lock in locks[:2]))
        await asyncio.gather(*(lock.release() for lock in locks[:2]))
        semaphore = client.semaphore("semaphore", 2, server, **options)
        waiting += [lock.acquire for lock in locks[:3]] + [locks[3].enqueue, semaphore.acquire]
    for server in servers:
        server.suspend()
    try:
        await asyncio.gather(*(in_time(begin(), timeout) for begin in waiting))
    finally:
        for server in servers:
            server.signal(signal.SIGCONT)


async def test_connecting_has_an_end_where_waiting_has_none(
    clients: list[Client], mute: Callable[..., Mute]
) -> None:
    tls, quiet = ssl.create_default_context(), mute()
    locks = [
        client.lock(KEY, quiet, acquire_timeout_s=timeout, ssl_context=tls)
        for client, timeout in itertools.product(clients, (None, 30))
    ]
    await asyncio.gather(*(in_time(lock.acquire(), CONNECTING - GRACE) for lock in locks))


@pytest.mark.parametrize("secret", [None, "secret"])
async def test_a_server_that_stands_still_has_the_time_for_the_lock_to_say_hello(
    clients: list[Client], start: StartServer, monkeypatch: pytest.MonkeyPatch, secret: str | None
) -> None:
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT", 0.2)
    server = start(*(() if secret is None else ("--auth-token", secret)))
    options: dict[str, Any] = {"auth_token": secret}
    locks = [
        client.lock(f"{KEY}-{timeout}-{client.name}", server, acquire_timeout_s=timeout, **options)
        for client, timeout in itertools.product(clients, (None, PATIENCE))
    ]
    assert server.port
    server.suspend()
    waiting = [asyncio.ensure_future(lock.acquire()) for lock in locks]
    await asyncio.sleep(0.5)
    assert not any(each.done() for each in waiting)
    server.signal(signal.SIGCONT)
    assert await soon(asyncio.gather(*waiting)) == [True] * len(locks)
    for lock in locks:
        assert await lock.release()


@soak
async def test_what_is_no_wait_for_a_lock(client: Client, hung: ServerProcess) -> None:
    """An answer comes at once or not at all: five seconds, and one for a release."""
    holder = client.lock("held", hung, lease_ttl_s=5)
    assert await holder.acquire() is True
    raw = client.lock(KEY, hung)
    adopting = client.lock(KEY, hung)
    hung.suspend()

    async def asked(name: str, *args: Any) -> None:
        if client.name == "sync":
            await in_time(asyncio.to_thread(getattr(raw.lock, name), *args), CONNECTING)
        else:
            await in_time(getattr(raw, name)(*args), CONNECTING)

    async def released() -> None:
        with Pace() as pace:
            assert await holder.release() is False
        assert pace.seconds < 1 + GRACE + SLACK

    adopted = in_time(adopting.adopt("0" * 32), CONNECTING)
    await asyncio.gather(asked("inspect"), asked("evict", 5), adopted, released())


async def test_renew_and_detach_end_with_the_lease(
    clients: list[Client], hung: ServerProcess
) -> None:
    locks = [
        client.lock(f"{KEY}-{client.name}-{n}", hung, lease_ttl_s=4)
        for n in range(2)
        for client in clients
    ]
    for lock in locks:
        assert await lock.acquire() is True
    hung.suspend()
    renewing, detaching = locks[: len(clients)], locks[len(clients) :]
    await asyncio.gather(
        *(in_time(lock.renew(), 4) for lock in renewing),
        *(in_time(lock.detach(), 4) for lock in detaching),
    )
    assert not any(lock.held for lock in locks)


# A server that accepts and does not answer.


@pytest.mark.parametrize("timeout", [0, pytest.param(1.3, marks=soak), pytest.param(2, marks=soak)])
async def test_a_server_that_says_nothing(
    clients: list[Client], mute: Callable[..., Mute], tmp_path: Path, timeout: float
) -> None:
    """To what is asked, to the token, or to the beginning of TLS. A byte now and then is nothing."""
    tls = ssl.create_default_context()
    mute(path=tmp_path / "socket")
    locks = []
    # For TLS, the beginning of a record that never ends.
    silences = ((b"", b""), (b"o", b"\x16"))
    for client, (says, said_in_tls) in itertools.product(clients, silences):
        servers = [("127.0.0.1", mute(says).port)]
        locks += [
            client.lock(KEY, servers=servers, acquire_timeout_s=timeout),
            client.lock(KEY, servers=servers, acquire_timeout_s=timeout, auth_token="secret"),
        ]
        servers = [("127.0.0.1", mute(said_in_tls).port)]
        locks += [client.lock(KEY, servers=servers, acquire_timeout_s=timeout, ssl_context=tls)]
    for client, secret in itertools.product(clients, (None, "secret")):
        options = {"acquire_timeout_s": timeout, "auth_token": secret}
        locks += [client.lock(KEY, servers=[f"unix:{tmp_path / 'socket'}"], **options)]
    await asyncio.gather(*(in_time(lock.acquire(), timeout) for lock in locks))


@pytest.fixture
def scripts() -> Iterator[Callable[[], ScriptedServer]]:
    """Start servers that answer what the test tells them to."""
    with contextlib.ExitStack() as stack:

        def start() -> ScriptedServer:
            server = ScriptedServer()
            stack.callback(server.stop)
            return server

        yield start


async def test_a_server_that_is_silent_about_one_thing(
    clients: list[Client], scripts: Callable[[], ScriptedServer]
) -> None:
    async def ask(client: Client, silent: type, is_idle: bool) -> None:
        server = scripts()
        options: dict[str, Any] = {"auth_token": "secret", "acquire_timeout_s": 0}
        if silent is Auth:
            server.script(Hello, Status.ERROR)
        if is_idle:
            async with client.lock(KEY, server, **options):
                pass
            if silent is not Acquire:
                server.cut()  # it is shown the token again
        server.script(silent, Silence)
        await in_time(client.lock(KEY, server, label="label", **options).acquire(), 0)

    cases = itertools.product(clients, (Acquire, Auth, Hello), (True, False))
    await asyncio.gather(*itertools.starmap(ask, cases))


async def test_a_place_whose_turn_never_comes(
    clients: list[Client], scripted: ScriptedServer
) -> None:
    scripted.script(Enqueue, Status.QUEUED)
    scripted.script(Wait, Silence)

    async def wait(client: Client, timeout: float) -> None:
        lock = client.lock(KEY, scripted)
        assert await lock.enqueue() == "queued"
        await in_time(lock.wait(timeout), timeout)

    await asyncio.gather(*itertools.starmap(wait, itertools.product(clients, (0, 1))))


@soak
@pytest.mark.parametrize("timeout", [1.3, 2])
async def test_a_confirmation_that_never_comes_in_time(
    client: Client, scripted: ScriptedServer, timeout: float
) -> None:
    """The grant comes late in its lease, and each answer about it after that: it is never certain."""

    def late(request: Any) -> Any:
        time.sleep(0.6)
        return Granted(b"ab" * 16, 1) if isinstance(request, Acquire) else Status.ERROR

    for kind in (Acquire, Renew, How.CONFIRM):
        scripted.script(kind, late)
    lock = client.lock(KEY, scripted, acquire_timeout_s=timeout, lease_ttl_s=1)
    with Pace() as pace, contextlib.suppress(errors.RemoteError):
        await soon(lock.acquire())
    assert pace.seconds < timeout + GRACE + SLACK
    assert not lock.held
    await lock.release()


async def test_a_cluster_whose_servers_send_each_other_round(client: Client) -> None:
    cluster = ScriptedCluster()
    try:
        first, second = cluster.servers
        epochs = iter(range(100, 1 << 20))
        first.script(Acquire, lambda _: cluster.moved(KEY, 1, epoch=next(epochs)))
        second.script(Acquire, lambda _: cluster.moved(KEY, 0, epoch=next(epochs)))
        with Pace() as pace, pytest.raises(errors.RemoteError):
            await soon(client.lock(KEY, servers=cluster.seeds, acquire_timeout_s=0).acquire())
        assert pace.seconds < GRACE + SLACK
    finally:
        cluster.stop()


@pytest.mark.parametrize("timeout", [0, pytest.param(2, marks=soak)])
async def test_a_cluster_that_stands_still(
    clients: list[Client], mute: Callable[..., Mute], timeout: float
) -> None:
    """However many servers it has: they have one time together, not each its own."""
    locks = []
    for client, number in itertools.product(clients, (1, 3, 8)):
        seeds = "cluster://" + ",".join(f"127.0.0.1:{mute().port}" for _ in range(number))
        for secret in (None, "secret"):
            options = {"acquire_timeout_s": timeout, "auth_token": secret}
            locks += [client.lock(KEY, servers=seeds, **options)]
    await asyncio.gather(*(in_time(lock.acquire(), timeout) for lock in locks))
