"""Both clients, and a server to each of them that does as it is told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dflockd.client_support import Face, face_named
from tests.dflockd.scripted_server import ScriptedServer


@pytest.fixture(params=["sync", "asyncio"])
def face(request: pytest.FixtureRequest) -> Iterator[Face]:
    """Each of the two clients in turn, for tests that are not `async` themselves."""
    with face_named(request.param) as face:
        yield face


@pytest.fixture
def scripted() -> Iterator[ScriptedServer]:
    """A server that answers what the test tells it to."""
    server = ScriptedServer()
    yield server
    server.stop()
