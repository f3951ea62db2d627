"""What a cluster needs of the store that it shares: a handful of calls that etcd has.

The store is a map from keys to values with one revision, a number that grows with every change.
All of it is linearizable: a read sees every change that was acknowledged before. There are two:
`MemoryStore` and `EtcdStore`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from dflockd.errors import InvalidArgumentError
from dflockd.shards.errors import LeaseGoneError, StoreError, StoreReplacedError

MAX_OPERATIONS = 128
"""Comparisons and operations, each, of one transaction. It is etcd's limit."""

NO_LEASE = 0
"""The lease of a key that stays until it is deleted."""

RELOAD_PAUSES = (0.0, 0.1, 0.2, 0.5, 1.0, 2.5)
"""Seconds, about, between attempts to follow a store that fails; the last one repeats."""

logger = logging.getLogger("dflockd.shards")


class Record(NamedTuple):
    """A key's value, the revision of its latest change, and the lease that it lives by."""

    value: bytes
    revision: int
    lease: int = NO_LEASE


class Loaded(NamedTuple):
    """All keys with a prefix, and the revision that this was true at."""

    records: Mapping[str, Record]
    revision: int


class Event(NamedTuple):
    """A change of one key; without a record it was deleted."""

    key: str
    revision: int
    record: Record | None


class RevisionIs(NamedTuple):
    """A condition: the key has not changed since this revision; 0: it does not exist."""

    key: str
    revision: int


class ValueIs(NamedTuple):
    """A condition: the key exists, with this value."""

    key: str
    value: bytes


class Put(NamedTuple):
    """Give the key this value. It ends with the lease, and with no other one from now on."""

    key: str
    value: bytes
    lease: int = NO_LEASE


class Delete(NamedTuple):
    """Delete the key, if it exists."""

    key: str


class Get(NamedTuple):
    """Read the key, after the operations before this one."""

    key: str


Compare: TypeAlias = RevisionIs | ValueIs
StoreOperation: TypeAlias = Put | Delete | Get


class Outcome(NamedTuple):
    """What became of a transaction.

    Attributes:
        succeeded: whether all conditions held, and so the operations were carried out.
        revision: the store's, afterwards.
        records: the keys that `Get` asked for; if it did not succeed, those of the conditions.
            Keys that do not exist are missing.
    """

    succeeded: bool
    revision: int
    records: Mapping[str, Record]


class StoreLease(NamedTuple):
    """Keys put with this id are deleted `ttl` seconds after the latest `Store.keep_alive`."""

    id: int
    ttl: int


class Size(NamedTuple):
    """How much room the store takes, in bytes.

    Attributes:
        total: on disk; a limit that the store has is about this.
        in_use: the part of it that holds something. The rest is used again for what is written next.
    """

    total: int
    in_use: int


class Store(Protocol):
    """The calls. Each of them ends within a bound, even if the store is silent.

    All of them raise `StoreUnreachableError` if there is no answer, and `StoreError` if the answer
    is no. If the store has been replaced, they raise `StoreReplacedError` from then on.
    """

    async def get_prefix(self, prefix: str) -> Loaded:
        """Return all keys that begin with `prefix`."""

    async def txn(
        self,
        compares: Sequence[Compare],
        operations: Sequence[StoreOperation],
        *,
        timeout: float | None = None,
    ) -> Outcome:
        """Carry out the operations, all or none, if all conditions hold.

        It is never sent twice: after `StoreUnreachableError` it may or may not have happened.

        Args:
            compares: the conditions.
            operations: what to do.
            timeout: seconds until the answer is given up, where that is sooner than usual.

        Raises:
            InvalidArgumentError: more than `MAX_OPERATIONS`, or a key is written twice.
            LeaseGoneError: a key needs a lease that has ended.
        """

    def watch(self, prefix: str, from_revision: int) -> AsyncGenerator[list[Event], None]:
        """Yield what changes under `prefix`, from that revision on, in order.

        The changes of one transaction come together. It never ends by itself, but raises.

        Raises:
            CompactedError: the store has forgotten some of it.
        """

    async def grant_lease(self, ttl: int) -> StoreLease:
        """Make a lease of at least `ttl` seconds; the store may make it longer."""

    async def keep_alive(self, lease: int) -> None:
        """Start a lease anew, with its full time.

        Raises:
            LeaseGoneError: it has ended.
        """

    async def revoke_lease(self, lease: int) -> None:
        """End a lease, and delete its keys, now.

        Raises:
            LeaseGoneError: it has ended before.
        """

    async def size(self) -> Size | None:
        """Return how much room it takes; ``None`` if that means nothing."""

    def begin_anew(self) -> None:
        """Take the store as it is now, after `StoreReplacedError`: for who knows what to do then."""

    async def close(self) -> None:
        """Close the connections. End all calls and watches before."""


def check_txn(compares: Sequence[Compare], operations: Sequence[StoreOperation]) -> None:
    """Refuse what etcd would refuse, before it is sent.

    Raises:
        InvalidArgumentError: more than `MAX_OPERATIONS`, or a key is written twice.
    """
    for name, items in (("compares", compares), ("operations", operations)):
        if len(items) > MAX_OPERATIONS:
            raise InvalidArgumentError(
                f"a transaction has {len(items)} {name}: it may have {MAX_OPERATIONS}"
            )
    written: set[str] = set()
    for operation in operations:
        if not isinstance(operation, Get):
            if operation.key in written:
                raise InvalidArgumentError(f"a transaction writes {operation.key!r} twice")
            written.add(operation.key)


def check_ttl(ttl: int) -> None:
    """Refuse a lease without time.

    Raises:
        InvalidArgumentError: it is not a whole number of seconds above 0.
    """
    if not isinstance(ttl, int) or isinstance(ttl, bool) or ttl < 1:
        raise InvalidArgumentError(f"ttl is {ttl!r}: give whole seconds, at least 1")


async def follow(store: Store, prefix: str) -> AsyncGenerator[Loaded | list[Event], None]:
    """Yield everything under `prefix`, then every change; forever.

    After any interruption comes another `Loaded`, which replaces all that was known: changes that
    were missed are in it. Close it (`contextlib.aclosing`) to end the watch at once.

    Raises:
        StoreReplacedError: the store was wiped, or restored from a backup.
    """
    failures = 0
    while True:
        try:
            loaded = await store.get_prefix(prefix)
            yield loaded
            async with contextlib.aclosing(store.watch(prefix, loaded.revision + 1)) as changes:
                async for events in changes:
                    failures = 0
                    yield events
        except StoreReplacedError:
            raise
        except StoreError as exc:
            pause = RELOAD_PAUSES[min(failures, len(RELOAD_PAUSES) - 1)]
            failures += 1
            # Once: a store that is away for long is reported by its users.
            level = logging.DEBUG if failures > 1 else logging.WARNING
            logger.log(level, "cannot watch %s, loading it again: %s", prefix, exc)
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))


class Registration:
    """A key that says who is alive: it exists while this process renews it, and is nobody else's.

    Args:
        store: where.
        key: the key, say ``/dflockd/nodes/10.0.0.1:6388``.
        value: what tells this process from any other one, also from an earlier one of its own name.
        ttl: seconds after the latest heartbeat that the key is deleted; the store may add to them.
        sign: a key that is written as well, and stays.
        unless: a key of others, beside whom it must not be.
    """

    def __init__(
        self, store: Store, key: str, value: str, *, ttl: int, sign: str = "", unless: str = ""
    ) -> None:
        check_ttl(ttl)
        self._sign = sign
        self._unless = unless
        self.key = key
        self.value = value.encode("utf-8")
        self._store = store
        self._ttl = ttl
        self._lease = NO_LEASE

    @property
    def condition(self) -> ValueIs:
        """The condition to put into every transaction of this process: that it still counts."""
        return ValueIs(self.key, self.value)

    async def register(self) -> bool:
        """Make the key; return whether it is there, and this process's.

        It is false while there is one of another process, also of a dead one.

        Raises:
            StoreUnreachableError: the key may exist all the same: call it again.
            StoreError: it must not exist, for others are there.
        """
        if self._lease == NO_LEASE:
            self._lease = (await self._store.grant_lease(self._ttl)).id
        put = Put(self.key, self.value, self._lease)
        compares = [RevisionIs(key, 0) for key in (self.key, self._unless) if key]
        puts = [put, Put(self._sign, b"")] if self._sign else [put]
        try:
            made = await self._store.txn(compares, puts)
        except LeaseGoneError:
            self._lease = NO_LEASE
            return False
        if self._unless in made.records:
            raise StoreError(
                f"{self._unless} exists, so lock servers use this prefix: choose another one"
            )
        # It may be there from an attempt whose answer was lost.
        there = made.records.get(self.key)
        return made.succeeded or (there is not None and there[::2] == (self.value, self._lease))

    async def heartbeat(self) -> bool:
        """Renew the key; return whether it was still there, and this process's.

        It is a transaction, not only a lease's keep-alive: an etcd member that was cut off has been
        known to confirm the latter (etcd-io/etcd, issue 15247). Once it is false, the others take
        this process for dead.
        """
        if self._lease == NO_LEASE:
            return False
        put = Put(self.key, self.value, self._lease)
        try:
            await self._store.keep_alive(self._lease)
            alive = (await self._store.txn([self.condition], [put])).succeeded
        except LeaseGoneError:
            alive = False
        if not alive:
            self._lease = NO_LEASE
        return alive

    async def end(self) -> None:
        """Delete the key, if it is there and this process's."""
        lease, self._lease = self._lease, NO_LEASE
        if lease != NO_LEASE:
            with contextlib.suppress(LeaseGoneError):
                await self._store.revoke_lease(lease)
