"""Why holders lost locks of a cluster: which faults left them no time to renew. Pure.

A lock is renewed from the half of its lease on. Whoever has no server to ask for most of the rest of
it loses the lock, as is right; whoever had one and lost it all the same is a case to look at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dflockd.cluster import ClusterParameters
from dflockd.cluster.leader import SETTLE
from tests.chaos.history import Event

CLAIM = 2.0
"""Seconds in which the shards of a server that is gone are given away and taken over."""

ENOUGH = 1.5
"""Seconds in which a renewal comes through for certain, when nothing is in its way."""


@dataclass(frozen=True)
class Loss:
    """A holder that lost its lock.

    Attributes:
        event: when it was told so.
        reasons: the faults that were in the way of its renewals.
        free: seconds between the half of its lease and its end in which nothing was.
    """

    event: Event
    reasons: tuple[str, ...]
    free: float

    @property
    def is_explained(self) -> bool:
        return self.free < ENOUGH


def losses(events: Sequence[Event], parameters: ClusterParameters, lease: float) -> list[Loss]:
    """Every loss of a lock, with what was in the way of its holder."""
    faults = [event for event in events if event.what == "fault"]
    deadlines: dict[str, int] = {}
    found = []
    for event in events:
        if event.until is not None:
            deadlines[event.who] = event.until
        if event.what == "lost":
            # Its client may have forgotten the deadline by then, but has told of it before.
            end = deadlines.get(event.who, event.at)
            start = end - round(lease / 2 * 1e9)
            blocked = []
            reasons = []
            for fault in faults:
                first, last = _blocks(fault, event, parameters)
                if first < end and last > start:
                    blocked.append((max(first, start), min(last, end)))
                    reasons.append(fault.detail)
            free = (end - start - _covered(blocked)) / 1e9
            found.append(Loss(event, tuple(reasons), free))
    return found


def _blocks(fault: Event, holder: Event, parameters: ClusterParameters) -> tuple[int, int]:
    """From when to when a fault can keep a holder from renewing."""
    kind, _, _ = fault.detail.partition(" ")
    until = fault.until or fault.at
    taken_over = fault.at + round((parameters.serving_lease + SETTLE + CLAIM) * 1e9)
    if kind in ("client-stop", "worker-stop"):
        mine = fault.group in (holder.group, holder.pid)
        return (fault.at, until + round(1e9)) if mine else (0, 0)
    if kind.startswith("link-"):
        return fault.at, until + round(1e9)
    if kind in ("server-kill", "server-stop", "server-step", "server-shift"):
        return fault.at, taken_over
    if kind.startswith("etcd-"):
        # All servers may be taken for dead at once, and have to come in again.
        return fault.at, until + round((SETTLE + CLAIM) * 1e9)
    if kind in ("tie-delay", "tie-refuse", "tie-deafen", "tie-silence"):
        return fault.at, taken_over
    return 0, 0


def _covered(spans: Iterable[tuple[int, int]]) -> int:
    total = at = 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, at))
        at = max(at, end)
    return total
