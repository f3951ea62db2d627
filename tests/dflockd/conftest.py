"""Real lock servers for the tests of dflockd."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from dflockd import clock
from dflockd.client import connection
from dflockd.client.pending import PendingAcquires
from dflockd.client.process import close_idle_connections
from tests.dflockd.client_support import Client, Time, client_named
from tests.dflockd.proxy import Proxy, Through
from tests.dflockd.raw_server import ServerProcess, StartServer


@pytest.fixture(scope="module", params=["uvloop", "asyncio"])
def uvloop(request: pytest.FixtureRequest) -> bool:
    """Whether the servers of a test run on uvloop; the test runs with and without."""
    if request.param == "uvloop":
        pytest.importorskip("uvloop")
    return bool(request.param == "uvloop")


@pytest.fixture
def start_server(uvloop: bool) -> Iterator[StartServer]:
    """Start servers with given flags and environment; they end with the test."""
    with contextlib.ExitStack() as stack:

        def start(*flags: str, **options: Any) -> ServerProcess:
            server = ServerProcess(*flags, uvloop=uvloop, **options)
            stack.callback(server.end)
            return server

        yield start


@pytest.fixture(scope="module")
def server(uvloop: bool) -> Iterator[ServerProcess]:
    """A server that the tests of a module share: they use different keys."""
    server = ServerProcess("--read-timeout", "1", uvloop=uvloop)
    yield server
    server.end()


@pytest.fixture
def key(request: pytest.FixtureRequest) -> str:
    """A key that no other test of the module uses."""
    return request.node.name.replace("[", "-").rstrip("]")


@pytest.fixture
def start() -> Iterator[StartServer]:
    """Start servers, on uvloop alone; they end with the test."""
    with contextlib.ExitStack() as stack:

        def start(*flags: str, **options: Any) -> ServerProcess:
            server = ServerProcess(*flags, **options)
            stack.callback(server.end)
            return server

        yield start


@pytest.fixture(scope="module", params=["sync", "asyncio"])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """Each of the two clients in turn."""
    with client_named(request.param) as client:
        yield client


@pytest.fixture
def clients_time() -> Iterator[Time]:
    time = Time()
    yield time
    time.go_on_from(clock.now())


@pytest.fixture(autouse=True)
def _forgetpublished_servers() -> Iterator[None]:
    """Forget which servers do not know `hello`: the next test may have another on the same port."""
    yield
    connection.published.clear()


@pytest.fixture
def no_idle_connections() -> Iterator[None]:
    """Close the connections that a test has left in the pool."""
    yield
    close_idle_connections()


@pytest.fixture
def acquires() -> Iterator[PendingAcquires]:
    """What waits for many locks; it is closed with the test."""
    acquires = PendingAcquires()
    yield acquires
    acquires.close()


@pytest.fixture
def through() -> Iterator[Through]:
    """Put a proxy in front of a server."""
    proxies: list[Proxy] = []

    def through(server: ServerProcess) -> Proxy:
        proxies.append(Proxy(server.port))
        return proxies[-1]

    yield through
    for proxy in proxies:
        proxy.close()
