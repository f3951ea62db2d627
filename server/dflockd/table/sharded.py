"""A table whose keys belong to shards, which come to this server and leave it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from dflockd.table import owners, recovery, superseding
from dflockd.table.issuer import TokenIssuer
from dflockd.table.limits import Limits
from dflockd.table.line import ClientProcess, ReservedPosition
from dflockd.table.newest import NewestRecord
from dflockd.table.pauses import PauseRecord
from dflockd.table.queue import Queue
from dflockd.table.rates import RateRecord
from dflockd.table.recovery import latest
from dflockd.table.requests import Answer
from dflockd.table.reservations import RESERVED_LATE
from dflockd.table.slots import Effect, answer_asking
from dflockd.table.state import NOBODY, Entry, HoldRecord, Left, Partition, Peer, Serving, Waiter
from dflockd.table.states import EXPECTED, GONE
from dflockd.table.table import LockTable
from dflockd.wire import (
    FairGroup,
    MapReport,
    Moved,
    Owner,
    Recovering,
    Refusal,
    Reply,
    Shards,
    key_problem,
)
from dflockd.wire.arguments import Asked

FROZEN = Recovering(20)
"""The answer while a shard is being handed over, which takes about so many milliseconds."""

LAPSED = Recovering(200, b"cut off")
"""The answer while this server has not heard of the others for too long."""

CLOSED = Recovering(200, b"closed")
"""The answer of a server that is about to end: what the others know is worth nothing."""

RESUME_TIMEOUT = 2.0
"""Seconds for which a position that came with its shard is reserved for its waiter."""


class Directory(Protocol):
    """What the table asks about shards."""

    def shard_of(self, key: bytes) -> int:
        """Return the shard of a key."""

    def refer(self, shard: int) -> Refusal:
        """Return what to answer about a shard that is not here."""

    def report(self, now: float) -> MapReport:
        """Return which server has which shard."""


class WaiterRecord(NamedTuple):
    """Somebody in a queue that goes to another server with its shard."""

    space: int
    key: bytes
    limit: int
    ticket: bytes
    """With which they take up their position there."""
    lease: int
    since: float
    label: bytes
    reservation: ReservedPosition | None = None
    """If they were away already, or had a turn."""
    owner: bytes = b""
    attempt: int = 0
    age: int = 0
    group: FairGroup | None = None


class Snapshot(NamedTuple):
    """All that a shard's next server needs to go on where this one stopped."""

    holds: list[HoldRecord]
    waiters: list[WaiterRecord]
    """Those of one key in their order."""
    newest: Sequence[NewestRecord] = ()
    """Of those with an age."""
    rates: Sequence[RateRecord] = ()
    """The blocks of one rate in their order."""
    pauses: Sequence[PauseRecord] = ()
    rates_since: float = -math.inf
    """See `Partition.rates_since`."""

    @property
    def is_empty(self) -> bool:
        """Whether the next server can do without."""
        return not any(self[:-1]) and self.rates_since == -math.inf


class ShardTable(LockTable):
    """A lock table for some of a cluster's shards.

    It grants and renews only while `serve_until` says that nobody else does.

    Args:
        limits: how much it gives.
        issuer: what makes tokens, and knows those of the other servers of the cluster.
        directory: which key is in which shard, and which shard is where.
        stretch: how many times as long as they are said to be leases are here: the clock of a holder
            may run slower than this one's, and that of the shard's next server faster.
    """

    def __init__(
        self, limits: Limits, issuer: TokenIssuer, directory: Directory, *, stretch: float = 1
    ) -> None:
        super().__init__(limits, issuer, stretch=stretch)
        self.about = {"mode": "cluster"}
        self._is_whole = False
        self.partitions: dict[int, Partition] = {}
        """What is here, by shard."""
        self._directory = directory
        self._serving = Serving()
        self._lapsed = LAPSED
        """What to answer after that."""

    # Shards.

    def serve_until(self, until: float, now: float) -> list[Effect]:
        """Grant and renew until then: nobody else will have these shards before."""
        serving = self._serving
        lapsed, serving.until = now >= serving.until, max(serving.until, until)
        return self._give_withheld(now) if lapsed else []

    def lapse(self) -> None:
        """Grant and renew no more, whatever was said before."""
        self._serving.until = -math.inf
        self._lapsed = CLOSED

    def open(
        self,
        shard: int,
        fence: int,
        *,
        opens_at: float | None = None,
        recovers_until: float | None = None,
        rates_since: float = -math.inf,
    ) -> None:
        """Begin to serve a shard, with fences beyond `fence`.

        Args:
            shard: the shard.
            fence: no lock of it has been granted with a larger one.
            opens_at: until when another server may serve it.
            recovers_until: see `LockTable.recover`.
            rates_since: runs may have begun before that of which nothing was handed over.
        """
        partition = self.partitions[shard] = Partition(
            self.slots.issuer.beginning(fence), self._serving
        )
        partition.opens_at = opens_at
        partition.recovers_until = recovers_until
        partition.rates.since = rates_since

    def load(self, shard: int, snapshot: Snapshot, now: float) -> None:
        """Take in what another server had of the shard: all leases begin anew.

        Their holders may have renewed in the last moment before. The holds belong to nobody until
        they are renewed.
        """
        partition = self.partitions[shard]
        partition.rates.since = max(partition.rates.since, snapshot.rates_since)
        for rate in snapshot.rates:
            self.rates.restore(partition.rates, rate, now)
        for kept in latest(snapshot.holds):
            recovery.restore_hold(self.slots, partition, kept, kept.lease, now)
        for newest in snapshot.newest:
            superseding.remember(self.slots, partition, newest)
        for pause in snapshot.pauses:
            recovery.restore_pause(self.slots, partition, pause, now)
        for record in snapshot.waiters:
            entry = partition.spaces[record.space].get(record.key)
            if entry is None:
                entry = self.slots.add(partition, record.space, record.key, record.limit, now)
            is_rated = (record.space, record.key) in partition.rates.open
            waiter = self.slots.join(
                *(entry, NOBODY, record.lease, record.since, None, record.label, record.group),
                two_phase=False,
                is_rated=is_rated,
            )
            entry.limit = record.limit  # as the latest request has said
            until = now + RESUME_TIMEOUT
            reservation = record.reservation or ReservedPosition(now, RESUME_TIMEOUT, until)
            self.slots.reservations.reserve(waiter, record.ticket, reservation, now)
            if record.owner:
                # Not away on purpose: it waits, though its connection is elsewhere.
                waiter.owner = Owner(record.owner, record.attempt, record.age)
                owners.add(entry, waiter)
        for entry in [entry for entry in _entries(partition) if entry.waiters]:
            self.slots.promote(entry, now, [])  # grants nothing: no waiter is connected yet

    def freeze(self, shard: int, now: float) -> Snapshot:
        """Stop serving a shard for now, and return what there is to hand over."""
        partition = self.partitions[shard]
        partition.frozen = True
        newest = [newest.kept() for newest in partition.newest.values()]
        rates = [block for rate in partition.rates.open.values() for block in rate.kept(now)]
        rates += self.rates.packed(partition.rates)
        counts = now < partition.rates.since + self.limits.max_rate_window
        since = partition.rates.since if counts else -math.inf
        entries = list(_entries(partition))
        pauses = [entry.pause.kept() for entry in entries if entry.pause is not None]
        snapshot = Snapshot([], [], newest, rates, pauses, since)
        # Also those that others have passed, and which are in no queue.
        waiters = dict.fromkeys(partition.reserved.values())
        for entry in entries:
            for hold in entry.holds.values():
                if hold.told:
                    snapshot.holds.append(hold.kept())
                elif hold.waiter is not None:
                    # Nobody knows of this grant: its waiter is still ahead of all others.
                    waiters[hold.waiter] = None
            waiters.update(dict.fromkeys(entry.waiters or ()))
        for waiter in _in_turn(partition, waiters):
            entry, reservation, owner = waiter.entry, waiter.reservation, waiter.owner
            if waiter.is_told:
                reservation = _as_reserved(waiter, now)
            elif reservation is None and waiter.turn is None:
                waiter.ticket = partition.issuer.ticket(entry.space, entry.key)
            snapshot.waiters.append(
                WaiterRecord(
                    entry.space,
                    entry.key,
                    entry.limit,
                    waiter.ticket,
                    waiter.lease,
                    waiter.since,
                    waiter.label,
                    reservation,
                    *((b"", 0, 0) if owner is None else (owner.id, owner.attempt, owner.age)),
                    _group_of(waiter),
                )
            )
        return snapshot

    def thaw(self, shard: int, now: float) -> list[Effect]:
        """Go on serving a shard that was frozen."""
        self.partitions[shard].frozen = False
        return self._give_withheld(now)

    def send_away(self, now: float) -> list[Effect]:
        """Answer all who wait: another server may have replaced this one long ago.

        An enqueued waiter keeps its position, and may come back.
        """
        effects: list[Effect] = []
        for peer in self.connections.peers.values():
            waiting = peer.waiting
            if isinstance(waiting, ClientProcess):
                answer_asking(waiting, self._lapsed, effects)
                self.slots.look_behind(waiting, now)
            elif waiting is not None and waiting.two_phase:
                self.slots.unblock(waiting, self._lapsed, effects)
            elif waiting is not None:
                if self.slots.leave(waiting) and self.slots.is_here(waiting.entry):
                    self.slots.withheld[waiting.entry] = None
                effects.append((peer.id, self._lapsed))
        return effects

    def drop(self, shard: int, reply: Refusal) -> tuple[list[Effect], set[int]]:
        """Forget a shard; answer its waiters `reply`, with their tickets if there are any.

        Returns:
            The effects, and the peers that have lost a hold with it and have nothing else here.
        """
        effects: list[Effect] = []
        peers: dict[int, Peer] = {}
        partition = self.partitions.pop(shard)
        self.slots.reservations.drop(partition.reserved)
        self.newest.drop(partition.newest)
        self.rates.leave(partition.rates)
        for entry in list(_entries(partition)):
            self.counts.dropped += len(entry.holds)
            self.slots.drop_pause(entry)
            superseding.refer_listener(self.slots, entry, reply, effects)
            for hold in list(entry.holds.values()):
                self.deadlines.clear(hold)
                if hold.peer is not None:
                    del hold.peer.holds[hold]
                    peers[hold.peer.id] = hold.peer
                if hold.waiter is not None:
                    self.slots.forget_waiter(hold.waiter)
                    hold.waiter.state = GONE
                    left = Left(hold.waiter.ticket, hold.waiter.turn)
                    hold.waiter.peer.left[entry.space, entry.key] = left
            for waiter in list(entry.waiters or ()):
                peer, is_blocked = waiter.peer, waiter.peer.waiting is waiter
                self.slots.leave(waiter)
                if is_blocked:
                    effects.append((peer.id, _naming(reply, waiter.ticket)))
                elif waiter.two_phase:
                    peer.left[entry.space, entry.key] = Left(waiter.ticket, waiter.turn)
            if entry.key in entry.partition.spaces[entry.space]:
                self.slots.remove(entry)
        idle = {
            number
            for number, peer in peers.items()
            if not (peer.holds or peer.waiting or peer.enqueued)
        }
        return effects, idle

    def status(self, now: float) -> str:
        """Return whether it may grant locks; a single shard may recover all the same."""
        if now >= self._serving.until:
            return self._lapsed.status.decode()
        waits = [each.recovers_until for each in self.partitions.values()]
        recovers = bool(waits) and all(until is not None and now < until for until in waits)
        return "recovering" if recovers else "serving"

    def each_partition(self) -> Iterable[Partition]:
        """Return all that is in the table."""
        return self.partitions.values()

    # What the table asks itself.

    def locate(self, key: bytes) -> Partition | Refusal:
        """Return the partition that a key is in, or what to answer if that is not here."""
        shard = self._directory.shard_of(key)
        partition = self.partitions.get(shard)
        if partition is None:
            return self._directory.refer(shard)
        return FROZEN if partition.frozen else partition

    def serving(self, key: bytes, now: float) -> Partition | Refusal:
        """Return the partition that a key is in, if it may be granted and renewed there now."""
        partition = self.locate(key)
        is_here = partition is FROZEN or isinstance(partition, Partition)
        if is_here and now >= self._serving.until:
            return self._lapsed
        if isinstance(partition, Partition) and partition.opens_at is not None:
            if now < partition.opens_at:
                return Recovering(math.ceil((partition.opens_at - now) * 1000))
            partition.opens_at = None
        return partition

    def _give_withheld(self, now: float) -> list[Effect]:
        """Give what is due by now; what cannot be given yet stays withheld."""
        effects: list[Effect] = []
        self.slots.in_steps(list(self.slots.withheld), self._give, now, effects)
        return effects

    def _give(self, entry: Entry, now: float, effects: list[Effect]) -> None:
        if entry in self.slots.withheld:
            del self.slots.withheld[entry]
            self.slots.promote(entry, now, effects)

    def wait(
        self,
        peer: Peer,
        space: int,
        key: bytes,
        asked: Asked,
        now: float,
        effects: list[Effect],
    ) -> Answer | None:
        """Have the slot, or wait for it; a position may have come back here without its peer."""
        name = (space, key)
        if name in peer.enqueued:
            serving = self.serving(key, now)
            if not isinstance(serving, Partition):
                return serving
        elif not key_problem(key):
            partition = self.locate(key)
            if isinstance(partition, Recovering):
                return partition
            left = peer.left.pop(name, Left(b"", None))
            if not isinstance(partition, Partition):
                return _naming(partition, left.ticket)
            self._return(partition, left, peer, name, now, effects)
        return super().wait(peer, space, key, asked, now, effects)

    def shards(self, request: Shards, now: float) -> Reply:
        """Return which server has which shard."""
        return self._directory.report(now).answer(request)

    def _return(
        self,
        partition: Partition,
        left: Left,
        peer: Peer,
        name: tuple[int, bytes],
        now: float,
        effects: list[Effect],
    ) -> None:
        """Let a peer go on with the position that it had here, if its shard has been elsewhere."""
        waiter = partition.reserved.get(left.ticket)
        if waiter is None:
            return
        space, key = name
        entry = partition.spaces[space].get(key) or self.slots.add(
            partition, space, key, waiter.entry.limit, now
        )
        self.slots.reservations.come_back(waiter, entry)
        owners.add(entry, waiter)
        waiter.two_phase = True
        self.slots.hand(waiter, peer, left.turn, is_rated=waiter.is_rated)
        peer.enqueued[name] = waiter
        self.slots.promote(entry, now, effects)


def _as_reserved(waiter: Waiter, now: float) -> ReservedPosition:
    """Return the reservation elsewhere of a waiter that had a turn here: as if it was away."""
    hold = max(0.0, waiter.deadline - now) if waiter.state == EXPECTED else 0.0
    return ReservedPosition(now, hold, now + RESERVED_LATE)


def _naming(reply: Refusal, ticket: bytes) -> Refusal:
    return reply._replace(ticket=ticket) if isinstance(reply, Moved) else reply


def _in_turn(partition: Partition, waiters: Iterable[Waiter]) -> Iterable[Waiter]:
    """Return all of a partition of keys: those of each key in the order in which to let them in."""
    of_queues: dict[Queue[Waiter], list[Waiter]] = {}
    for waiter in sorted(waiters, key=lambda waiter: waiter.number):
        # Another one than when they came, if nobody was here meanwhile.
        entry = partition.spaces[waiter.entry.space].get(waiter.entry.key)
        queue = None if entry is None else entry.waiters
        if queue is None:
            yield waiter
        else:
            of_queues.setdefault(queue, []).append(waiter)
    for queue, members in of_queues.items():
        yield from queue.in_turn(members)


def _group_of(waiter: Waiter) -> FairGroup | None:
    group, queue = waiter.group, waiter.entry.waiters
    if group is None or queue is None:
        return group
    return group._replace(limit=queue.limit_of(group))


def _entries(partition: Partition) -> Iterable[Entry]:
    return (entry for space in partition.spaces for entry in space.values())
