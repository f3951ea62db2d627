"""A table whose keys belong to shards, which come to this server and leave it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from dflockd.table.issuer import TokenIssuer
from dflockd.table.state import Absence, Entry, Group, HoldRecord, Peer
from dflockd.table.table import Effect, Limits, LockTable
from dflockd.wire import Moved, Recovering, Refusal, Reply, Report, Shards, Space, Wait

FROZEN = Recovering(20)
"""The answer while a shard is being handed over, which takes about so many milliseconds."""

LAPSED = Recovering(200)
"""The answer while this server has not heard of the others for too long."""

PLACE_PATIENCE = 2.0
"""Seconds for which a place that came with its shard is kept for whoever had it."""


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
    absence: Absence | None = None
    """Where it was kept for somebody already."""


class Snapshot(NamedTuple):
    """All that a shard's next server needs to go on where this one stopped."""

    holds: list[HoldRecord]
    places: list[Place]
    """Those of one key in their order."""


class ShardTable(LockTable):
    """A lock table for some of a cluster's shards.

    It grants and renews only while `promise` says that nobody else does.

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
        super().__init__(limits, issuer)
        self._stretch = stretch
        self.groups: dict[int, Group] = {}
        """What is here, by shard."""
        self._directory = directory
        self._promised = -math.inf
        self._withheld: dict[Entry, None] = {}
        """Where grants are due that could not be given at the time."""
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
        group = self.groups[shard] = Group(self._issuer.beginning(fence))
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
            waiter = self._join(entry, Peer(0), place.lease, place.since, two_phase=False)
            absence = place.absence or Absence(now, PLACE_PATIENCE, now + PLACE_PATIENCE)
            self._keep_place(waiter, place.name, place.label, absence, now)
        for entry in list(_entries(group)):
            self._promote(entry, now, [])  # grants nothing: nobody is there yet

    def freeze(self, shard: int) -> Snapshot:
        """Stop serving a shard for now, and return what there is to hand over."""
        group = self.groups[shard]
        group.frozen = True
        snapshot = Snapshot([], [])
        # Also those that others have passed, and which are in no queue.
        waiters = dict.fromkeys(group.absent.values())
        for entry in _entries(group):
            for hold in entry.holds.values():
                if hold.told:
                    snapshot.holds.append(hold.kept())
                elif hold.place is not None:
                    # Nobody knows of this grant: its place is still ahead of all who wait.
                    waiters[hold.place] = None
            waiters.update(entry.waiters or {})
        for waiter in sorted(waiters, key=lambda waiter: waiter.number):
            entry, absence = waiter.entry, waiter.absence
            if absence is None:
                waiter.place = group.issuer.place(entry.space, entry.key)
            snapshot.places.append(
                Place(
                    entry.space,
                    entry.key,
                    entry.limit,
                    waiter.place,
                    waiter.lease,
                    waiter.since,
                    waiter.peer.label,
                    absence,
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
        peers: dict[int, Peer] = {}
        group = self.groups.pop(shard)
        self._absent -= len(group.absent)
        for waiter in group.absent.values():
            self._deadlines.clear(waiter)
            if waiter not in (waiter.entry.waiters or ()):
                self.counts.gave_up += 1  # others had passed it
        for entry in list(_entries(group)):
            self.counts.dropped += len(entry.holds)
            for hold in list(entry.holds.values()):
                self._deadlines.clear(hold)
                if hold.peer is not None:
                    del hold.peer.holds[hold]
                    peers[hold.peer.id] = hold.peer
                if hold.place is not None:
                    self._forget_place(hold.place)
                    hold.place.peer.left[entry.space, entry.key] = hold.place.place
            for waiter in list(entry.waiters or ()):
                peer, is_blocked = waiter.peer, waiter.peer.waiting is waiter
                self._leave(waiter)
                if is_blocked:
                    effects.append((peer.id, _naming(reply, waiter.place)))
                elif waiter.two_phase:
                    peer.left[entry.space, entry.key] = waiter.place
            if entry.key in entry.group.spaces[entry.space]:
                self._remove(entry)
        idle = {
            number
            for number, peer in peers.items()
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

    def _wait(self, peer: Peer, request: Wait, now: float, effects: list[Effect]) -> Reply | None:
        name = (request.space, request.key)
        place = peer.places.get(name)
        if place is None:
            group = self._group_of(request.key)
            if isinstance(group, Recovering):
                return self._wait_later(peer, group)
            left = peer.left.pop(name, b"")
            if not isinstance(group, Group):
                return self._wait_later(peer, _naming(group, left))
            self._return(group, left, peer, name, now, effects)
        else:
            serving = self._serving(request.key, now)
            if not isinstance(serving, Group):
                return self._wait_later(peer, serving)
        return super()._wait(peer, request, now, effects)

    @staticmethod
    def _wait_later(peer: Peer, reply: Refusal) -> Refusal:
        peer.keep = None  # was said for this request only
        return reply

    def _return(
        self,
        group: Group,
        place: bytes,
        peer: Peer,
        name: tuple[Space, bytes],
        now: float,
        effects: list[Effect],
    ) -> None:
        """Let a peer go on with the place that it had here, if its shard has been elsewhere."""
        waiter = group.absent.get(place)
        if waiter is None:
            return
        space, key = name
        entry = group.spaces[space].get(key) or self._add(group, space, key, waiter.entry.limit)
        self._take_up(waiter, entry, peer, waiter.lease, two_phase=True)
        peer.places[name] = waiter
        self._promote(entry, now, effects)


def _naming(reply: Refusal, place: bytes) -> Refusal:
    return reply._replace(place=place) if isinstance(reply, Moved) else reply


def _entries(group: Group) -> Iterable[Entry]:
    return (entry for space in group.spaces for entry in space.values())
