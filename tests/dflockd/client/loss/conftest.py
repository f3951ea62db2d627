"""Servers to lose."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.dflockd.raw_server import ServerProcess


@pytest.fixture
def doomed(start: Callable[..., ServerProcess]) -> ServerProcess:
    """A server that the test may do anything to."""
    return start()
