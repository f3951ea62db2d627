"""Positions in queues that are kept for somebody who is away, and slots that are held for them."""

from __future__ import annotations

from dflockd.table import owners
from dflockd.table.counts import Counts
from dflockd.table.deadlines import Deadlines, rounded
from dflockd.table.queue import Queue
from dflockd.table.state import Entry, Hold, Peer, Reservation, Waiter
from dflockd.table.states import EXPECTED, GONE, PASSED, QUEUED, RESERVED
from dflockd.wire import Owner

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
        owners.discard(waiter.entry, waiter)
        waiter.owner = None
        waiter.peer = Peer(0)
        waiter.peer.label = label
        waiter.two_phase = False
        waiter.reserve = None
        waiter.ticket = ticket
        waiter.reservation = reservation
        waiter.state = RESERVED
        waiter.entry.queue().away += 1
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
        self,
        waiter: Waiter,
        entry: Entry,
        peer: Peer,
        lease: int,
        owner: Owner | None,
        *,
        two_phase: bool,
    ) -> None:
        """Let a peer have a position that was kept: it waits there, by ``enqueue`` so far."""
        del entry.group.reserved[waiter.ticket]
        self._size -= 1
        self._deadlines.clear(waiter)
        queue = entry.queue()
        owners.discard(waiter.entry, waiter)
        if waiter.state == RESERVED:
            queue.away -= 1
        else:
            if waiter.state == EXPECTED:
                queue.remove(waiter)
            queue.come_back(waiter)
        waiter.reservation = None
        waiter.state = QUEUED
        waiter.entry = entry  # not the same, if nobody was here meanwhile
        waiter.peer = peer
        waiter.owner = owner
        owners.add(entry, waiter)
        waiter.lease = lease
        waiter.two_phase = two_phase

    def next(self, queue: Queue, free: int, now: float, steps: int) -> Waiter | None:
        """Return who of a queue is to have one of so many free slots, if anybody is.

        For who is away a slot is held for a while. If that is over, or not worth it, who is behind
        them goes first. If that goes for as many as `steps`, the answer is who is to be looked at next,
        who may be `RESERVED`.
        """
        for _ in range(steps):
            waiter = queue.first(free)
            if waiter is None or waiter.state != RESERVED:
                return waiter
            reservation = waiter.reservation
            assert reservation is not None
            if reservation.is_worth_holding(now):
                queue.expect(waiter)
                end = min(reservation.due + reservation.hold, reservation.until)
                self._deadlines.reset(waiter, rounded(end - now), now)
            else:
                queue.remove(waiter)
                owners.discard(waiter.entry, waiter)
                waiter.state = PASSED
        return queue.first(free)

    def expire(self, waiter: Waiter, reservation: Reservation, now: float) -> bool:
        """Stop holding a slot for a waiter, or forget it; its deadline is not set any more.

        Returns:
            Whether it has left the queue with that, so that others may have their turn.
        """
        entry = waiter.entry
        is_queued = waiter.state != PASSED
        if is_queued:
            entry.queue().remove(waiter)
            owners.discard(entry, waiter)
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
