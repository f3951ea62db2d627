"""Positions in queues that are kept for somebody who is away, and slots that are held for them."""

from __future__ import annotations

import itertools
from collections import OrderedDict

from dflockd.table.counts import Counts
from dflockd.table.deadlines import Deadlines, rounded
from dflockd.table.state import Entry, Hold, Peer, Reservation, Waiter
from dflockd.table.states import EXPECTED, GONE, PASSED, QUEUED, RESERVED

RESERVED_LATE = 60.0
"""Seconds for which a position is kept after somebody was expected back: workers can be busy."""

MAX_RESERVED = 100_000
"""Positions that are kept at once: neither `Limits.max_locks` nor `Limits.max_waiters` bounds them."""


class Reservations:
    """The reservations of one table.

    It decides who of a queue has the next turn and grants nothing: that is for the table.

    Args:
        deadlines: those of the table.
        counts: those of the table.
    """

    def __init__(self, deadlines: Deadlines[Hold | Waiter], counts: Counts) -> None:
        self._deadlines = deadlines
        self._counts = counts
        self._size = 0

    def __len__(self) -> int:
        """Return how many positions are kept."""
        return self._size

    @property
    def is_full(self) -> bool:
        """Whether no more positions are kept."""
        return self._size >= MAX_RESERVED

    def reserve(
        self, waiter: Waiter, ticket: bytes, label: bytes, reservation: Reservation, now: float
    ) -> None:
        """Keep the position of a waiter in the queue whose peer leaves it."""
        waiter.peer = Peer(0)
        waiter.peer.label = label
        waiter.two_phase = False
        waiter.reserve = None
        waiter.ticket = ticket
        waiter.reservation = reservation
        waiter.state = RESERVED
        waiter.entry.group.reserved[ticket] = waiter
        self._size += 1
        self._deadlines.set(waiter, rounded(reservation.until - now), now)

    @staticmethod
    def find(entry: Entry, ticket: bytes) -> Waiter | None:
        """Return the waiter of that ticket, if it is one of this key, even if others have passed it."""
        waiter = entry.group.reserved.get(ticket)
        if waiter is None or (waiter.entry.space, waiter.entry.key) != (entry.space, entry.key):
            return None
        return waiter

    def take_up(
        self, waiter: Waiter, entry: Entry, peer: Peer, lease: int, *, two_phase: bool
    ) -> None:
        """Let a peer have a position that was kept: it waits there, by ``enqueue`` so far."""
        del entry.group.reserved[waiter.ticket]
        self._size -= 1
        self._deadlines.clear(waiter)
        waiter.reservation = None
        waiter.state = QUEUED
        waiter.entry = entry  # not the same, if nobody was here meanwhile
        waiter.peer = peer
        waiter.lease = lease
        waiter.two_phase = two_phase
        if entry.waiters is None:
            entry.waiters = OrderedDict()
        if waiter not in entry.waiters:
            # Others passed it. All that are still ahead of it did the same, and have come back.
            ahead = list(itertools.takewhile(lambda w: w.number < waiter.number, entry.waiters))
            entry.waiters[waiter] = None
            for each in (waiter, *reversed(ahead)):
                entry.waiters.move_to_end(each, last=False)

    def next(self, entry: Entry, now: float) -> Waiter | None:
        """Return who is to have a slot, if one is free.

        For who is away a slot is held for a while. If that is over, or not worth it, who is behind
        them goes first.
        """
        free = entry.limit - len(entry.holds)
        passed = []
        found = None
        waiters: dict[Waiter, None] = entry.waiters or {}
        for waiter in waiters:
            if free <= 0:
                break
            if waiter.reservation is None:
                found = waiter
                break
            if self._is_held_for(waiter, waiter.reservation, now):
                free -= 1
            else:
                passed.append(waiter)
        for waiter in passed:
            del waiters[waiter]
            waiter.state = PASSED
        return found

    def _is_held_for(self, waiter: Waiter, reservation: Reservation, now: float) -> bool:
        if waiter.state == RESERVED and reservation.is_worth_holding(now):
            waiter.state = EXPECTED
            end = min(reservation.due + reservation.hold, reservation.until)
            self._deadlines.reset(waiter, rounded(end - now), now)
        return waiter.state == EXPECTED

    def expire(self, waiter: Waiter, reservation: Reservation, now: float) -> bool:
        """Stop holding a slot for a waiter, or forget it; its deadline is not set any more.

        Returns:
            Whether it has left the queue with that, so that others may have their turn.
        """
        entry = waiter.entry
        is_queued = waiter.state != PASSED
        if is_queued:
            assert entry.waiters is not None
            del entry.waiters[waiter]
        if waiter.state == EXPECTED and now < reservation.until:
            waiter.state = PASSED
            self._deadlines.set(waiter, rounded(reservation.until - now), now)
        else:
            del entry.group.reserved[waiter.ticket]
            waiter.state = GONE
            self._size -= 1
            self._counts.gave_up += 1
            self._counts.forgotten += 1
        return is_queued

    def drop(self, reserved: dict[bytes, Waiter]) -> None:
        """Forget the reservations of a group that leaves. Those in a queue are still to leave that."""
        self._size -= len(reserved)
        for waiter in reserved.values():
            self._deadlines.clear(waiter)
            if waiter.state == PASSED:
                waiter.state = GONE
                self._counts.gave_up += 1
