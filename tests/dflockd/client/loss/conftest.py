"""Both clients, and servers to lose."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.dflockd.client_support import (
    Client,
    client_named,
)
from tests.dflockd.raw_server import ServerProcess


@pytest.fixture(scope="module")
def clients() -> Iterator[list[Client]]:
    with client_named("sync") as blocking, client_named("asyncio") as not_blocking:
        yield [blocking, not_blocking]


@pytest.fixture
def doomed(start: Callable[..., ServerProcess]) -> ServerProcess:
    """A server that the test may do anything to."""
    return start()
