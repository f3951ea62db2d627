"""How locks come into doubt."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from examples.demo.stage import LockServer, wait_until
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE

LONG = jobs.LONG
"""Lease in seconds, where nothing may wait for its end."""


remembers = pytest.mark.parametrize("server", ["remembers"], indirect=True)
forgets = pytest.mark.parametrize("server", ["forgets"], indirect=True)


def wait_for(probe: Callable[[], Any], what: str) -> None:
    wait_until(lambda: probe() or None, PATIENCE, lambda: f"waited for {what}")


def wait_in_doubt(lock: Any) -> None:
    wait_for(lambda: lock.state == "doubtful", f"{lock!r} to be in doubt")


@contextlib.contextmanager
def back_in(server: LockServer, seconds: float) -> Iterator[list[float]]:
    """Start a server after a while, on a thread; then the list has the time."""
    back: list[float] = []

    def start() -> None:
        back.append(time.monotonic())
        server.start()

    timer = threading.Timer(seconds, start)
    timer.start()
    try:
        yield back
    finally:
        timer.join()
