"""Many pending acquires, waited for by one thread, and what they are told."""

from __future__ import annotations

from queue import Empty, Queue
from typing import Any

import pytest

from dflockd import errors
from dflockd.client.pending import PendingAcquire, PendingAcquires
from dflockd.sync_client import DistributedLock
from examples.demo.stage import LockServer, wait_until

PATIENCE = 60.0


class Crowd:
    """Those who wait, and what they are told."""

    def __init__(self, server: LockServer | None) -> None:
        self.server = server
        self.told: Queue[tuple[str, int, errors.RemoteError | None]] = Queue()
        self.everybody: list[PendingAcquire] = []
        self.pending = PendingAcquires()

    def lock(self, key: str, **options: Any) -> DistributedLock:
        assert self.server is not None
        return DistributedLock(key, PATIENCE, 10, [self.server.address], **options)

    def join(
        self, lock: DistributedLock, timeout: float | None = PATIENCE, **options: Any
    ) -> PendingAcquire:
        number = len(self.everybody)
        acquire = self.pending.join(
            lock,
            timeout,
            queued=lambda: self.told.put(("queued", number, None)),
            told=lambda: self.told.put(("told", number, None)),
            ended=lambda error: self.told.put(("ended", number, error)),
            **options,
        )
        self.everybody.append(acquire)
        return acquire

    def line_up(self, key: str, number: int, **options: Any) -> None:
        """Let some join one after the other, and wait for a lock that somebody else has."""
        for _ in range(number):
            self.join(self.lock(key), **options)
            self.hear("queued")

    def hear(self, what: str) -> tuple[int, errors.RemoteError | None]:
        said, number, error = self.told.get(timeout=PATIENCE)
        assert said == what, (said, number, error)
        return number, error

    def hear_told(self, number: int) -> PendingAcquire:
        """Ask whose turn it is, and hear that it is this one's."""
        self.pending.ask()
        heard = self.hear("told")
        assert heard == (number, None), heard
        return self.everybody[number]

    def hear_nothing(self) -> None:
        with pytest.raises(Empty):
            self.told.get(timeout=0.1)

    def wait_waiters(self, lock: DistributedLock, number: int) -> None:
        wait_until(
            lambda: len(lock.inspect()["waiters"]) == number or None,
            PATIENCE,
            lambda: f"not {number} waiters",
        )


def take_up(acquire: PendingAcquire, lock: DistributedLock) -> DistributedLock:
    """Do what the process does that runs a task: be the first holder, by the ticket."""
    ticket = acquire.hand_over()
    assert ticket is not None
    assert ticket == acquire.hand_over()
    assert lock.enqueue(ticket) == "acquired"
    return lock
