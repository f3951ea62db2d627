"""What has happened in a table: numbers that only grow, for metrics."""

from __future__ import annotations

from bisect import bisect_left

SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
"""Bounds for times: from a lock around a statement to one around a nightly job."""

SHARES = (0.1, 0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1)
"""Bounds for the share of a lease that is over: clients renew at one half."""


class Histogram:
    """How often a value fell between which bounds, and the sum of all."""

    __slots__ = ("_first", "bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._first = bounds[0]
        self.counts = [0] * (len(bounds) + 1)
        """One for each bound, of the values up to it and over the one before; then the rest."""
        self.sum = 0.0

    def __len__(self) -> int:
        """Return the number of values."""
        return sum(self.counts)

    def add(self, value: float) -> None:
        """Count one value in."""
        self.sum += value
        if value <= self._first:  # as most are
            self.counts[0] += 1
        else:
            self.counts[bisect_left(self.bounds, value)] += 1


class Counts:
    """The counts of one table."""

    __slots__ = (
        "asked_to_stop",
        "begun",
        "busy",
        "dropped",
        "evicted",
        "expired",
        "forgotten",
        "full",
        "gave_up",
        "granted",
        "held",
        "kept",
        "lapsed",
        "ousted",
        "outdated",
        "queued",
        "released",
        "renewed",
        "returned",
        "superseded",
        "timed_out",
        "unbegun",
        "unknown",
        "waited",
    )

    def __init__(self) -> None:
        # How holds begin.
        self.granted = 0
        self.waited = Histogram(SECONDS)
        """Seconds from request to grant, of those that had to wait for it."""
        self.returned = 0
        """Holds of another table: restored, brought back by a renewal, or come with their shard."""

        # How they go on.
        self.renewed = Histogram(SHARES)
        """How much of its lease was over when a hold was renewed."""
        self.unknown = 0
        """Renewals of what is not held: their senders have lost a lock."""

        self.begun = 0
        """Runs that a rate had let through and that have begun, as far as the table knows."""
        self.unbegun = 0
        """Runs that a rate had let through and that gave up before they began."""

        # How they end.
        self.held = Histogram(SECONDS)
        """Seconds from grant to end, of every hold that has ended: in one of the ways that follow, or
        `parted`."""
        self.released = 0
        self.expired = 0
        self.lapsed = 0
        """Holds that were left to their leases, and ended as was meant."""
        self.evicted = 0
        self.superseded = 0
        """Holds that gave way to a later one of the same lock, which its holder has brought back."""
        self.dropped = 0
        """Holds that have not ended, but left with their shard."""

        # How waits begin and end.
        self.queued = 0
        self.gave_up = 0
        """Waits that ended without a grant: in one of the ways that follow, or `left`."""
        self.timed_out = 0
        self.forgotten = 0
        """Waits that ended because no client came back to a position that was reserved."""
        self.ousted = 0
        """Waits that ended because a newer waiter came to a lock where the newest wins."""
        self.kept = 0
        """Positions that were left to be taken up again later."""

        self.asked_to_stop = 0
        """Holders that were told that somebody newer has come."""

        # What was refused at once.
        self.outdated = 0
        """Requests of who is older than the newest."""
        self.busy = 0
        """Requests that would not wait."""
        self.full = 0
        """Requests beyond the number of keys or of waiters."""

    @property
    def parted(self) -> int:
        """Holds that ended with their connection."""
        others = self.released + self.expired + self.lapsed + self.evicted + self.superseded
        return len(self.held) - others

    @property
    def left(self) -> int:
        """Waits that ended with their connection, with their shard, or at the end of the server."""
        return self.gave_up - self.timed_out - self.forgotten - self.ousted

    @property
    def holding(self) -> int:
        """Holds that are here now."""
        return self.granted + self.returned - len(self.held) - self.dropped

    @property
    def waiting(self) -> int:
        """Waits that are not over."""
        return self.queued - len(self.waited) - self.gave_up
