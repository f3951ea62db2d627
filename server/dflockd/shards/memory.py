"""A store within one process, with the semantics of etcd: for tests, and for a server on its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import NamedTuple

from dflockd import clock
from dflockd.shards.errors import CompactedError, LeaseGoneError
from dflockd.shards.store import (
    NO_LEASE,
    Compare,
    Delete,
    Event,
    Get,
    Loaded,
    Outcome,
    Put,
    Record,
    RevisionIs,
    Size,
    StoreLease,
    StoreOperation,
    check_ttl,
    check_txn,
)

HISTORY = 10_000
"""Revisions that a watch can begin at, counted from the latest."""


class _Change(NamedTuple):
    revision: int
    events: list[Event]


class KeySpace:
    """The map, its history and its leases. Pure: no clock, no asyncio; time is an argument."""

    def __init__(self, history: int = HISTORY) -> None:
        self.revision = 1
        self._records: dict[str, Record] = {}
        self._changes: deque[_Change] = deque(maxlen=history)
        self._next_lease = 1
        self._leases: dict[int, tuple[int, float]] = {}

    def load(self, prefix: str) -> Loaded:
        """Return the keys with a prefix."""
        records = {k: r for k, r in sorted(self._records.items()) if k.startswith(prefix)}
        return Loaded(records, self.revision)

    def txn(self, compares: Sequence[Compare], operations: Sequence[StoreOperation]) -> Outcome:
        """Carry out the operations if all conditions hold. See `Store.txn`."""
        check_txn(compares, operations)
        if not all(map(self._holds, compares)):
            keys = [compare.key for compare in compares if compare.key in self._records]
            return Outcome(False, self.revision, {key: self._records[key] for key in keys})
        for operation in operations:
            if isinstance(operation, Put) and operation.lease not in (NO_LEASE, *self._leases):
                raise _gone(operation.lease)
        read: dict[str, Record] = {}
        events: list[Event] = []
        for operation in operations:
            if not isinstance(operation, Get):
                events += self._write(operation)
            elif operation.key in self._records:
                read[operation.key] = self._records[operation.key]
        self._commit(events)
        return Outcome(True, self.revision, read)

    def since(self, prefix: str, revision: int) -> list[list[Event]]:
        """Return the changes under a prefix from a revision on, oldest first.

        Raises:
            CompactedError: some have been forgotten.
        """
        full = len(self._changes) == self._changes.maxlen
        if full and revision < self._changes[0].revision:
            raise CompactedError(f"changes since revision {revision} are forgotten: load again")
        found: list[list[Event]] = []
        for change in reversed(self._changes):
            if change.revision < revision:
                break
            if events := [event for event in change.events if event.key.startswith(prefix)]:
                found.append(events)
        return found[::-1]

    def grant(self, ttl: int, now: float) -> StoreLease:
        """Make a lease."""
        check_ttl(ttl)
        lease, self._next_lease = self._next_lease, self._next_lease + 1
        self._leases[lease] = ttl, now + ttl
        return StoreLease(lease, ttl)

    def keep_alive(self, lease: int, now: float) -> None:
        """Start a lease anew."""
        ttl, _ = self._lease(lease)
        self._leases[lease] = ttl, now + ttl

    def revoke(self, lease: int) -> None:
        """End a lease and delete its keys, in one change."""
        self._lease(lease)
        del self._leases[lease]
        keys = [key for key, record in self._records.items() if record.lease == lease]
        self._commit([event for key in keys for event in self._write(Delete(key))])

    def expire(self, now: float) -> None:
        """End the leases whose time is over."""
        for lease in [lease for lease, (_, end) in self._leases.items() if end <= now]:
            self.revoke(lease)

    def next_deadline(self) -> float | None:
        """Return when the next lease ends."""
        return min((end for _, end in self._leases.values()), default=None)

    def _holds(self, compare: Compare) -> bool:
        record = self._records.get(compare.key)
        if isinstance(compare, RevisionIs):
            return (record.revision if record else 0) == compare.revision
        return record is not None and record.value == compare.value

    def _write(self, operation: Put | Delete) -> list[Event]:
        revision = self.revision + 1
        if isinstance(operation, Put):
            record = Record(operation.value, revision, operation.lease)
            self._records[operation.key] = record
            return [Event(operation.key, revision, record)]
        if self._records.pop(operation.key, None) is None:
            return []
        return [Event(operation.key, revision, None)]

    def _commit(self, events: list[Event]) -> None:
        if events:
            self.revision += 1
            self._changes.append(_Change(self.revision, events))

    def _lease(self, lease: int) -> tuple[int, float]:
        if lease not in self._leases:
            raise _gone(lease)
        return self._leases[lease]


class MemoryStore:
    """A `KeySpace` as a `Store`.

    Args:
        clock: seconds, by which leases end. A clock that is turned by hand needs `expire()` after
            it, or any other call, to wake who watches.
        history: revisions that a watch can begin at, counted from the latest.
    """

    def __init__(self, *, clock: Callable[[], float] = clock.now, history: int = HISTORY) -> None:
        self._space = KeySpace(history)
        self._clock = clock
        self._watches: set[asyncio.Event] = set()

    def expire(self) -> None:
        """End the leases whose time is over, as every other call does first."""
        with self._turn():
            pass

    async def get_prefix(self, prefix: str) -> Loaded:
        """See `Store`."""
        with self._turn():
            return self._space.load(prefix)

    async def txn(
        self,
        compares: Sequence[Compare],
        operations: Sequence[StoreOperation],
        *,
        timeout: float | None = None,
    ) -> Outcome:
        """See `Store`."""
        with self._turn():
            return self._space.txn(compares, operations)

    async def watch(self, prefix: str, from_revision: int) -> AsyncGenerator[list[Event], None]:
        """See `Store`."""
        changed = asyncio.Event()
        self._watches.add(changed)
        try:
            while True:
                changed.clear()
                self.expire()
                found = self._space.since(prefix, from_revision)
                from_revision = max(from_revision, self._space.revision + 1)
                for events in found:
                    yield events
                await self._wait(changed)
        finally:
            self._watches.discard(changed)

    async def grant_lease(self, ttl: int) -> StoreLease:
        """See `Store`."""
        with self._turn() as now:
            return self._space.grant(ttl, now)

    async def keep_alive(self, lease: int) -> None:
        """See `Store`."""
        with self._turn() as now:
            self._space.keep_alive(lease, now)

    async def revoke_lease(self, lease: int) -> None:
        """See `Store`."""
        with self._turn():
            self._space.revoke(lease)

    async def size(self) -> Size | None:
        """See `Store`."""
        return None

    def begin_anew(self) -> None:
        """See `Store`. It is never replaced."""

    async def close(self) -> None:
        """See `Store`."""

    @contextlib.contextmanager
    def _turn(self) -> Iterator[float]:
        before = self._space.revision, self._space.next_deadline()
        now = self._clock()
        self._space.expire(now)
        try:
            yield now
        finally:
            if (self._space.revision, self._space.next_deadline()) != before:
                for changed in self._watches:
                    changed.set()

    async def _wait(self, changed: asyncio.Event) -> None:
        deadline = self._space.next_deadline()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None if deadline is None else deadline - self._clock()):
                await changed.wait()


def _gone(lease: int) -> LeaseGoneError:
    return LeaseGoneError(f"lease {lease} has ended")
