"""A connection that another thread, or a finaliser, closes just when it is to be waited for.

The reading fails then, and its flow goes on. It raised errors that no caller knows, and the reactor did
not renew the lock any more.
"""

from __future__ import annotations

import asyncio
import fcntl
import queue
import socket
from collections.abc import Callable
from typing import Any, cast

import pytest

from dflockd.client import aio, blocking, clock
from dflockd.client.connection import Connection
from dflockd.client.pool import Pool
from dflockd.client.reactor import Reactor
from dflockd.client.steps import Flow, Ready
from tests.dflockd.raw_server import PATIENCE

HIGH = 900
"""No other thread gets so high a descriptor soon."""


def number_of_a_closed_one() -> int:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        number = fcntl.fcntl(ours, fcntl.F_DUPFD, HIGH)
    socket.close(number)
    return number


class ClosedMeanwhile:
    """A connection that was open when it was asked last whether it is closed."""

    closed = False
    poll = None

    def __init__(self, fileno: Callable[[], int]) -> None:
        self.fileno = fileno


@pytest.fixture(params=[number_of_a_closed_one, lambda: -1], ids=["after", "before"])
def link(request: pytest.FixtureRequest) -> Connection:
    """It is closed after or before its number is asked for."""
    return cast("Connection", ClosedMeanwhile(request.param))


def test_by_the_reactor(link: Connection) -> None:
    outcomes: queue.Queue[Any] = queue.Queue()

    def flow() -> Flow[None]:
        outcomes.put((yield Ready(link, False, clock.now() + 3600)))

    Reactor(Pool()).run(flow())
    assert outcomes.get(timeout=PATIENCE) is True


@pytest.mark.parametrize("writes", [False, True])
def test_by_a_thread(link: Connection, writes: bool) -> None:
    assert blocking._ready(link, writes, PATIENCE) is True


@pytest.mark.parametrize("writes", [False, True])
async def test_by_an_event_loop(link: Connection, writes: bool) -> None:
    assert await aio._ready(asyncio.get_running_loop(), link, writes, PATIENCE) is True
