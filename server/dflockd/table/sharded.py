"""A table whose keys belong to shards, which come to this server and leave it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, TypeVar

from dflockd.table.mint import Mint
from dflockd.table.state import Entry, Group, Kept, Peer, Waiter
from dflockd.table.table import Effect, Limits, LockTable
from dflockd.wire import (
    Acquire,
    Enqueue,
    Moved,
    Recovering,
    Refusal,
    Reply,
    Report,
    Resume,
    Shards,
    Space,
    Status,
    Wait,
)

FROZEN = Recovering(20)
"""The answer while a shard is being handed over, which takes about so many milliseconds."""

LAPSED = Recovering(200)
"""The answer while this server has not heard of the others for too long."""

PLACE_PATIENCE = 2.0
"""Seconds for which a place that came with its shard is kept for whoever had it."""


R = TypeVar("R", Acquire, Enqueue)


class Directory(Protocol):
    """What the table asks about shards."""

    def shard_of(self, key: bytes) -> int:
        """Return the shard of a key."""

    def refer(self, shard: int) -> Refusal:
        """Return what to answer about a shard that is not here."""

    def report(self) -> Report:
        """Return which server has which shard."""


class Place(NamedTuple):
    """A place in a queue that goes to another server with its shard."""

    space: Space
    key: bytes
    limit: int
    name: bytes
    """How whoever had it asks for it there."""
    lease: int
    since: float
    label: bytes


class Snapshot(NamedTuple):
    """All that a shard's next server needs to go on where this one stopped."""

    holds: list[Kept]
    places: list[Place]
    """Those of one key in their order."""


class ShardTable(LockTable):
    """A lock table for some of a cluster's shards.

    It grants and renews only while `promise` says that nobody else does.

    Args:
        limits: how much it gives.
        mint: what makes tokens, and knows those of the other servers of the cluster.
        directory: which key is in which shard, and which shard is where.
        stretch: how many times as long as they are said to be leases are here: the clock of a holder
            may run slower than this one's, and that of the shard's next server faster.
    """

    def __init__(
        self, limits: Limits, mint: Mint, directory: Directory, *, stretch: float = 1
    ) -> None:
        super().__init__(limits, mint)
        self._stretch = stretch
        self.groups: dict[int, Group] = {}
        """What is here, by shard."""
        self._directory = directory
        self._promised = -math.inf
        self._withheld: dict[Entry, None] = {}
        """Where grants are due that could not be given at the time."""
        self._absent: dict[bytes, Waiter] = {}
        """The places that came with their shard and are kept for now, by name."""
        self._taking: Waiter | None = None
        self._handlers[Resume] = self._resume
        self._handlers[Shards] = lambda *_: directory.report()

    # Shards.

    def promise(self, until: float, now: float) -> list[Effect]:
        """Grant and renew until then: nobody else will have these shards before."""
        lapsed, self._promised = now >= self._promised, max(self._promised, until)
        return self._give_withheld(now) if lapsed else []

    def open(
        self,
        shard: int,
        fence: int,
        *,
        opens_at: float | None = None,
        recovers_until: float | None = None,
    ) -> None:
        """Begin to serve a shard, with fences beyond `fence`.

        Args:
            shard: the shard.
            fence: no lock of it has been granted with a larger one.
            opens_at: until when another server may serve it.
            recovers_until: see `LockTable.recover`.
        """
        group = self.groups[shard] = Group(self._mint.beginning(fence))
        group.opens_at = opens_at
        group.recovers_until = recovers_until

    def load(self, shard: int, snapshot: Snapshot, now: float) -> None:
        """Take in what another server had of the shard: all leases begin anew.

        Their holders may have renewed in the last moment before. The holds belong to nobody until
        they are renewed.
        """
        group = self.groups[shard]
        for kept in snapshot.holds:
            self._restore(group, kept, kept.lease, now)
        for place in snapshot.places:
            entry = group.spaces[place.space].get(place.key)
            if entry is None:
                entry = self._add(group, place.space, place.key, place.limit)
            nobody = Peer(0)
            nobody.label = place.label
            waiter = self._join(entry, nobody, place.lease, place.since, two_phase=False)
            waiter.place = place.name
            self._absent[place.name] = waiter
            self._deadlines.set(waiter, PLACE_PATIENCE, now)

    def freeze(self, shard: int) -> Snapshot:
        """Stop serving a shard for now, and return what there is to hand over."""
        group = self.groups[shard]
        group.frozen = True
        snapshot = Snapshot([], [])
        for entry in _entries(group):
            first = []
            for hold in entry.holds.values():
                if hold.told:
                    snapshot.holds.append(hold.kept())
                elif hold.place is not None:
                    # Nobody knows of this grant: its place is still ahead of all who wait.
                    first.append(hold.place)
            for waiter in (*first, *(entry.waiters or ())):
                if waiter.peer.id:
                    waiter.place = group.mint.mint(entry.space, entry.key)[1]
                snapshot.places.append(
                    Place(
                        entry.space,
                        entry.key,
                        entry.limit,
                        waiter.place,
                        waiter.lease,
                        waiter.since,
                        waiter.peer.label,
                    )
                )
        return snapshot

    def thaw(self, shard: int, now: float) -> list[Effect]:
        """Go on serving a shard that was frozen."""
        self.groups[shard].frozen = False
        return self._give_withheld(now)

    def send_away(self) -> list[Effect]:
        """Answer all who wait: another server may have replaced this one long ago.

        Places by enqueue stay, for those who come back.
        """
        effects: list[Effect] = []
        for peer in self._peers.values():
            waiter = peer.waiting
            if waiter is not None:
                if waiter.two_phase:
                    self._deadlines.clear(waiter)
                    peer.waiting = None
                else:
                    self._leave(waiter)
                effects.append((peer.id, LAPSED))
        return effects

    def drop(self, shard: int, reply: Refusal) -> tuple[list[Effect], set[int]]:
        """Forget a shard; who waits is sent away with `reply`, and its place if there is one.

        Returns:
            The effects, and the peers that have lost a hold with it and have nothing else here.
        """
        effects: list[Effect] = []
        owners: dict[int, Peer] = {}
        for entry in list(_entries(self.groups.pop(shard))):
            self.counts.dropped += len(entry.holds)
            for hold in list(entry.holds.values()):
                self._deadlines.clear(hold)
                if hold.owner is not None:
                    del hold.owner.holds[hold]
                    owners[hold.owner.id] = hold.owner
                if hold.place is not None:
                    self._forget_place(hold.place)
                    hold.place.peer.left[entry.space, entry.key] = hold.place.place
            for waiter in list(entry.waiters or ()):
                peer, is_blocked = waiter.peer, waiter.peer.waiting is waiter
                if not peer.id:
                    self._deadlines.clear(waiter)
                    self._absent.pop(waiter.place, None)
                self._leave(waiter)
                if is_blocked:
                    effects.append((peer.id, _naming(reply, waiter.place)))
                elif waiter.two_phase:
                    peer.left[entry.space, entry.key] = waiter.place
            if entry.key in entry.group.spaces[entry.space]:
                self._remove(entry)
        idle = {
            number
            for number, peer in owners.items()
            if not (peer.holds or peer.waiting or peer.places)
        }
        return effects, idle

    def each_group(self) -> Iterable[Group]:
        """Return all that is in the table."""
        return self.groups.values()

    # What the table asks itself.

    def _group_of(self, key: bytes) -> Group | Refusal:
        shard = self._directory.shard_of(key)
        group = self.groups.get(shard)
        if group is None:
            return self._directory.refer(shard)
        return FROZEN if group.frozen else group

    def _serving(self, key: bytes, now: float) -> Group | Refusal:
        group = self._group_of(key)
        is_here = group is FROZEN or isinstance(group, Group)
        if is_here and now >= self._promised:
            return LAPSED
        if isinstance(group, Group) and group.opens_at is not None:
            if now < group.opens_at:
                return Recovering(math.ceil((group.opens_at - now) * 1000))
            group.opens_at = None
        return group

    def _remove(self, entry: Entry) -> None:
        self._withheld.pop(entry, None)
        super()._remove(entry)

    def _promote(self, entry: Entry, now: float, effects: list[Effect]) -> None:
        if entry.group.frozen or now >= self._promised:
            self._withheld[entry] = None
        else:
            super()._promote(entry, now, effects)

    def _give_withheld(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        withheld, self._withheld = self._withheld, {}
        for entry in withheld:
            self._promote(entry, now, effects)
        return effects

    # Places that came with their shard.

    def _resume(
        self, peer: Peer, request: Resume, _now: float, _effects: list[Effect]
    ) -> Reply | None:
        peer.resumes = request.place
        return Status.OK

    def _acquire(
        self, peer: Peer, request: Acquire, now: float, effects: list[Effect]
    ) -> Reply | None:
        return self._taking_up(super()._acquire, peer, request, now, effects)

    def _enqueue(
        self, peer: Peer, request: Enqueue, now: float, effects: list[Effect]
    ) -> Reply | None:
        return self._taking_up(super()._enqueue, peer, request, now, effects)

    def _taking_up(
        self,
        handle: Callable[[Peer, R, float, list[Effect]], Reply | None],
        peer: Peer,
        request: R,
        now: float,
        effects: list[Effect],
    ) -> Reply | None:
        """Handle a request that may be about a place that was had before."""
        place, peer.resumes = peer.resumes, b""
        taking = self._taking = self._absent.pop(place, None) if place else None
        if taking is None:
            return handle(peer, request, now, effects)
        reply = handle(peer, request, now, effects)
        if self._taking is not None:
            # Refused for now, or about another key.
            self._taking, self._absent[place] = None, taking
        elif len(taking.entry.holds) < taking.entry.limit:
            self._promote(taking.entry, now, effects)
        return reply

    def _is_full(self, entry: Entry) -> bool:
        return self._taking is None and super()._is_full(entry)

    def _join(self, entry: Entry, peer: Peer, lease: int, now: float, *, two_phase: bool) -> Waiter:
        waiter = self._taking
        if waiter is None or waiter.entry is not entry:
            return super()._join(entry, peer, lease, now, two_phase=two_phase)
        self._taking = None
        waiter.lease = lease
        return self._taken_up(waiter, peer, two_phase=two_phase)

    def _taken_up(self, waiter: Waiter, peer: Peer, *, two_phase: bool) -> Waiter:
        self._deadlines.clear(waiter)
        waiter.peer = peer
        waiter.two_phase = two_phase
        return waiter

    def _time_out(self, waiter: Waiter, now: float, effects: list[Effect]) -> None:
        if waiter.peer.id:
            super()._time_out(waiter, now, effects)
            return
        self._absent.pop(waiter.place, None)
        self._give_up(waiter)
        if waiter.entry.waiters:
            self._promote(waiter.entry, now, effects)

    def _wait(self, peer: Peer, request: Wait, now: float, effects: list[Effect]) -> Reply | None:
        name = (request.space, request.key)
        place = peer.places.get(name)
        if place is None:
            group = self._group_of(request.key)
            if isinstance(group, Recovering):
                return group
            left = peer.left.pop(name, b"")
            if not isinstance(group, Group):
                return _naming(group, left)
            if left in self._absent:
                # Its shard has been elsewhere, and is here again.
                waiter = peer.places[name] = self._taken_up(
                    self._absent.pop(left), peer, two_phase=True
                )
                if len(waiter.entry.holds) < waiter.entry.limit:
                    self._promote(waiter.entry, now, effects)
        else:
            serving = self._serving(request.key, now)
            if not isinstance(serving, Group):
                return serving
        return super()._wait(peer, request, now, effects)


def _naming(reply: Refusal, place: bytes) -> Refusal:
    return reply._replace(place=place) if isinstance(reply, Moved) else reply


def _entries(group: Group) -> Iterable[Entry]:
    return (entry for space in group.spaces for entry in space.values())
