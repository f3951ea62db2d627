"""Servers to lose."""

from __future__ import annotations

import pytest

from tests.dflockd.raw_server import ServerProcess, StartServer


@pytest.fixture
def doomed(start: StartServer) -> ServerProcess:
    """A server that the test may do anything to."""
    return start()
