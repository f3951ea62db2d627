"""Positions in queues that can be resumed, and slots that are held for them.

A waiter is away, and has reserved its position. Or it wants a turn, and any client with the ticket
can take the position up: like that of any waiter, it lasts as long as its connection.
"""

from __future__ import annotations

from dflockd.table import owners
from dflockd.table.counts import Counts
from dflockd.table.deadlines import Deadlines, rounded
from dflockd.table.line import ReservedPosition
from dflockd.table.queue import Queue
from dflockd.table.state import NOBODY, Entry, Partition, Waiter
from dflockd.table.states import EXPECTED, GONE, PASSED, QUEUED, RESERVED, WAITING

RESERVED_LATE = 60.0
"""Seconds for which a position is kept after somebody was expected back: workers can be busy."""

MAX_RESERVED = 100_000
"""Positions that are kept at once, for all connections and keys: 75 MB."""


class Reservations:
    """The reservations of one table.

    It decides who of a queue has the next turn and grants nothing: that is for the table.

    Args:
        deadlines: those of the table.
        counts: those of the table.
        most: positions that are kept of one connection, and in the queue of one key.
    """

    def __init__(self, deadlines: Deadlines, counts: Counts, most: int) -> None:
        self._deadlines = deadlines
        self._counts = counts
        self._most = most
        self._size = 0

    def __len__(self) -> int:
        """Return how many positions are kept for somebody who is away."""
        return self._size

    def has_room(self, waiter: Waiter) -> bool:
        """Whether one more position can be kept for that connection, at that key."""
        is_full = self._size >= MAX_RESERVED or waiter.peer.kept >= self._most
        return not is_full and waiter.entry.queue().away < self._most

    # Away, or with a turn.

    def reserve(
        self, waiter: Waiter, ticket: bytes, reservation: ReservedPosition, now: float
    ) -> None:
        """Keep the position of a waiter in the queue whose peer leaves it."""
        owners.discard(waiter.entry, waiter)
        waiter.away_age, waiter.owner = waiter.age, None
        if waiter.away_age:
            owners.add_age(waiter.entry, waiter)
        if waiter.peer is not NOBODY:
            waiter.maker, waiter.peer = waiter.peer, NOBODY
            waiter.maker.kept += 1
        waiter.two_phase = False
        waiter.reserve = None
        waiter.turn = None
        waiter.ticket = ticket
        queue = waiter.entry.queue()
        queue.change(waiter, None, is_rated=waiter.is_rated)
        waiter.reservation = reservation
        waiter.state = RESERVED
        queue.away += 1
        waiter.entry.partition.reserved[ticket] = waiter
        self._size += 1
        self._deadlines.set(waiter, rounded(reservation.until - now), now)

    @staticmethod
    def name(waiter: Waiter) -> None:
        """See to it that the position of a waiter who wants a turn can be taken up."""
        entry = waiter.entry
        waiter.ticket = waiter.ticket or entry.partition.issuer.ticket(entry.space, entry.key)
        entry.partition.reserved[waiter.ticket] = waiter

    def tell(self, waiter: Waiter, turn: float, now: float) -> None:
        """Hold a slot for a waiter whose turn it is, for this number of seconds."""
        if waiter.state == WAITING:
            self._deadlines.clear(waiter)
        waiter.entry.queue().expect(waiter)
        self._deadlines.set(waiter, turn, now)

    # Back again.

    @staticmethod
    def find(partition: Partition, space: int, key: bytes, ticket: bytes) -> Waiter | None:
        """Return the waiter of that ticket, if it is one of this key, even if others have passed it."""
        waiter = partition.reserved.get(ticket)
        if waiter is None or (waiter.entry.space, waiter.entry.key) != (space, key):
            return None
        return waiter

    def come_back(self, waiter: Waiter, entry: Entry) -> bool:
        """Let a waiter stand in line again if it does not, as one who waits by ``enqueue``.

        Returns:
            Whether a slot was held for it alone.
        """
        queue = entry.queue() if waiter.group is None else entry.grouped()
        # Among groups nobody else could have it: the turn of that of somebody who was away is over.
        has_slot = waiter.state == EXPECTED and (queue.is_grouped or not waiter.is_away)
        if waiter.is_away:
            del entry.partition.reserved[waiter.ticket]
            self._is_kept_no_more(waiter)
            owners.discard(waiter.entry, waiter)  # its age
        if waiter.is_away or waiter.state == EXPECTED:
            self._deadlines.clear(waiter)
        if waiter.state == RESERVED:
            queue.away -= 1
        elif waiter.state in (EXPECTED, PASSED):
            queue.come_back(waiter)  # before it is removed: its group is not to be forgotten
            if not waiter.is_away or waiter.state == EXPECTED:
                queue.remove(waiter)
        waiter.reservation = None
        waiter.away_age = 0
        waiter.state = QUEUED
        waiter.entry = entry  # not the same, if nobody was here meanwhile
        return has_slot

    # Whose turn has come.

    def hold_or_pass(self, queue: Queue[Waiter], waiter: Waiter, now: float) -> None:
        """Hold a slot for the first one, who is away; if that is not worth it, the next goes first."""
        reservation = waiter.reservation
        assert reservation is not None
        if reservation.is_worth_holding(now):
            queue.use_turn(waiter)
            queue.expect(waiter)
            end = min(reservation.due + reservation.hold, reservation.until)
            self._deadlines.reset(waiter, rounded(end - now), now)
        else:
            queue.let_pass(waiter)
            owners.discard(waiter.entry, waiter)

    def pass_on(self, waiter: Waiter, now: float) -> bool:
        """Stop holding a slot for a waiter; say whether somebody may have a turn with that.

        A waiter whose process has heard of its turn is in line again as if it had not.
        """
        if waiter.is_told:
            self.come_back(waiter, waiter.entry)
            if waiter.peer.waiting is waiter:
                waiter.state = WAITING
                self._deadlines.set(waiter, rounded(waiter.until - now), now)
            return True
        if waiter.state != EXPECTED:
            return False
        self._deadlines.clear(waiter)
        self._let_pass(waiter, now)
        return True

    def expire(self, waiter: Waiter, now: float) -> bool:
        """Stop holding a slot for a waiter, or forget it; its deadline is not set any more.

        Returns:
            Whether others may have their turn with that.
        """
        reservation = waiter.reservation
        if waiter.state == EXPECTED and (reservation is None or now < reservation.until):
            self._let_pass(waiter, now)
            return True
        entry, is_queued = waiter.entry, waiter.state != PASSED
        if is_queued:
            entry.queue().remove(waiter)
            owners.discard(entry, waiter)
        del entry.partition.reserved[waiter.ticket]
        waiter.state = GONE
        self._is_kept_no_more(waiter)
        self._counts.gave_up += 1
        self._counts.forgotten += 1
        return is_queued

    def _let_pass(self, waiter: Waiter, now: float) -> None:
        waiter.entry.queue().let_pass(waiter)
        if waiter.reservation is not None:
            owners.discard(waiter.entry, waiter)
            self._deadlines.set(waiter, rounded(waiter.reservation.until - now), now)

    def drop(self, reserved: dict[bytes, Waiter]) -> None:
        """Forget who is away of a partition that leaves. Those in a queue are still to leave that."""
        for waiter in reserved.values():
            if waiter.is_away:
                self._is_kept_no_more(waiter)
                self._deadlines.clear(waiter)
                if waiter.state == PASSED:
                    waiter.state = GONE
                    self._counts.gave_up += 1

    def _is_kept_no_more(self, waiter: Waiter) -> None:
        self._size -= 1
        if waiter.maker is not None:
            waiter.maker.kept -= 1
            waiter.maker = None
