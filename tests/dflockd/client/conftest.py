"""Both clients, and a server to each of them that does as it is told."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dflockd.client import conversation, operations, requester, routing
from tests.collector import collector_off
from tests.dflockd.client.families import Family, StartFamily
from tests.dflockd.client.loops import LoopThread, NewLoop
from tests.dflockd.client_support import Client, Face, client_named, face_named
from tests.dflockd.raw_server import ServerProcess, StartServer
from tests.dflockd.scripted_server import ScriptedServer


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """A server that the tests of a module share: they use different keys."""
    server = ServerProcess()
    yield server
    server.end()


@pytest.fixture(params=["sync", "asyncio"])
def face(request: pytest.FixtureRequest) -> Iterator[Face]:
    """Each of the two clients in turn, for tests that are not `async` themselves."""
    with face_named(request.param) as face:
        yield face


@pytest.fixture(scope="module")
def clients() -> Iterator[list[Client]]:
    """Both clients, for tests in which they wait side by side."""
    with client_named("sync") as blocking, client_named("asyncio") as not_blocking:
        yield [blocking, not_blocking]


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    """A server that answers what the test tells it to."""
    server = ScriptedServer()
    yield server
    server.stop()


@pytest.fixture
def hung(start: StartServer) -> Iterator[ServerProcess]:
    """A server that is about to hang, and goes on with the end of the test."""
    server = start()
    assert server.port
    yield server
    server.signal(signal.SIGCONT)


@pytest.fixture
def options(server: ServerProcess) -> dict[str, Any]:
    """The arguments of a lock at that server whose lease does not end meanwhile."""
    return {"servers": [("127.0.0.1", server.port)], "lease_ttl_s": 600}


@pytest.fixture(params=["asyncio", "uvloop"])
def new_loop(request: pytest.FixtureRequest) -> NewLoop:
    """Make an event loop of either kind."""
    if request.param == "uvloop":
        made: NewLoop = pytest.importorskip("uvloop").new_event_loop
        return made
    return asyncio.new_event_loop


@pytest.fixture
def start_loop(new_loop: NewLoop) -> Iterator[Callable[..., LoopThread]]:
    """Start loops in threads; they end with the test."""
    loops: list[LoopThread] = []

    def start_loop(**options: Any) -> LoopThread:
        loops.append(LoopThread(new_loop, **options))
        return loops[-1]

    yield start_loop
    for loop in loops:
        loop.close()


@pytest.fixture
def families() -> Iterator[StartFamily]:
    """Start families; they end with the test."""
    begun: list[Family] = []

    def start(program: str, *args: object, fresh: bool = False) -> Family:
        begun.append(Family(program, *args, fresh=fresh))
        return begun[-1]

    yield start
    for family in begun:
        family.end()


HASTE = 0.2


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let both clients give up after a fifth of the usual time: where nobody says anything anyway."""
    for module, names in (
        (operations, ("GRACE", "SHARDS_PATIENCE")),
        (requester, ("GRACE",)),
        (routing, ("GRACE", "PING_PATIENCE", "SHARDS_PATIENCE")),
        (conversation, ("SILENCE",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, HASTE * getattr(module, name))


@pytest.fixture
def _refcounts_only() -> Iterator[None]:
    """What nobody refers to is ended at once, or not at all."""
    gc.collect()
    with collector_off():
        yield
