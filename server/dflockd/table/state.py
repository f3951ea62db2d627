"""What the table remembers: entries with their holds and waiters, and the peers they belong to."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from dflockd.table.issuer import TokenIssuer
from dflockd.wire import Keep, Space


class Group:
    """The entries of one group of keys, which can be looked at, moved or dropped as a whole."""

    __slots__ = ("absent", "ended", "frozen", "issuer", "opens_at", "recovers_until", "spaces")

    def __init__(self, issuer: TokenIssuer) -> None:
        self.issuer = issuer
        """What counts its fences."""
        self.frozen = False
        """Whether nothing is granted, renewed or released, for all of it is about to leave."""
        self.opens_at: float | None = None
        """Until when nothing is granted or renewed, because somebody else may still do so."""
        self.spaces: tuple[dict[bytes, Entry], dict[bytes, Entry]] = ({}, {})
        self.absent: dict[bytes, Waiter] = {}
        """The places that are kept for somebody who is not there, by name."""
        self.recovers_until: float | None = None
        """Until when there are no grants, because of holds that are not in here any more."""
        self.ended: set[int] = set()
        """The fences of what has ended since: nobody can bring that back."""


UNKNOWN = 0
"""The limit of a semaphore whose holders have come back, and nobody else yet."""


class HoldRecord(NamedTuple):
    """What is kept of a hold where it outlives the table; times in seconds."""

    space: Space
    key: bytes
    limit: int
    fence: int
    lease: float
    """How long it was last set to run."""
    deadline: float
    since: float
    label: bytes
    detached: bool = False
    owner: bytes = b""
    """Which run holds it, where that was said."""
    attempt: int = 0
    """The how manieth of that run's attempts it is."""


class Entry:
    """One key: who holds it and who waits. It exists only while there is a holder or a waiter."""

    __slots__ = ("group", "holds", "key", "limit", "space", "waiters")

    def __init__(self, group: Group, space: Space, key: bytes, limit: int) -> None:
        self.group = group
        self.space = space
        self.key = key
        self.limit = limit
        self.holds: dict[int, Hold] = {}
        """By fence: the part of a token that is no secret."""
        self.waiters: OrderedDict[Waiter, None] | None = None
        """In the order of their arrival; absent until somebody has had to wait."""

    @property
    def has_room(self) -> bool:
        """Whether a slot is free that is nobody's already.

        Who waits while a slot is free is somebody for whom it is held, or will be given it in the
        same step or as soon as grants are given again.
        """
        taken = len(self.holds)
        return taken + len(self.waiters) < self.limit if self.waiters else taken < self.limit


class Hold:
    """One granted slot of an entry. It ends by release, at its deadline, or with its peer."""

    __slots__ = (
        "deadline",
        "detached",
        "entry",
        "fence",
        "label",
        "peer",
        "place",
        "since",
        "span",
        "token",
        "told",
    )

    deadline: float
    span: float

    def __init__(
        self, entry: Entry, fence: int, token: bytes, peer: Peer | None, since: float
    ) -> None:
        self.entry = entry
        self.label = peer.label if peer is not None else b""
        """What people see; it outlives the peer of a detached hold."""
        self.since = since
        self.fence = fence
        self.token = token
        self.peer = peer
        """Whose end releases it: who acquired it or last renewed it; nobody once it is detached."""
        self.detached = False
        """Whether it has no peer because the last one wanted so: nobody runs on the strength of it."""
        self.place: Waiter | None = None
        """The two-phase place that it was granted to, while its ``wait`` has not been answered."""
        self.told = True
        """Whether its token has left the table. What nobody was told is not worth keeping."""

    @property
    def ended(self) -> bool:
        """Whether it is no longer in the table."""
        return self.fence not in self.entry.holds

    def kept(self) -> HoldRecord:
        """Return what is worth keeping. The token is not: who knows the secret can make it anew."""
        entry = self.entry
        return HoldRecord(
            entry.space,
            entry.key,
            entry.limit,
            self.fence,
            self.span,
            self.deadline,
            self.since,
            self.label,
            self.detached,
        )


class Absence(NamedTuple):
    """That nobody is at a place, and what is done for whoever comes back to it."""

    due: float
    """When somebody is expected."""
    hold: float
    """Seconds before and after that in which a slot is held once the place's turn has come."""
    until: float
    """When the place is forgotten."""

    def is_worth_holding(self, now: float) -> bool:
        """Whether to hold a slot: not for somebody who comes much later, or not at all."""
        return abs(self.due - now) < self.hold


class Waiter:
    """A place in the queue of an entry.

    Taken by a blocked ``acquire``, or by an ``enqueue``: then the peer may already wait for it (it
    is its `Peer.waiting`) or still be elsewhere. Or nobody is there, and it is kept for a while.
    """

    __slots__ = (
        "absence",
        "deadline",
        "entry",
        "hold",
        "is_held",
        "keep",
        "lease",
        "number",
        "peer",
        "place",
        "since",
        "span",
        "two_phase",
    )

    deadline: float
    span: float

    def __init__(
        self, entry: Entry, peer: Peer, number: int, lease: int, since: float, *, two_phase: bool
    ) -> None:
        self.entry = entry
        self.number = number
        """Grows with every arrival at the table."""
        self.since = since
        self.peer = peer
        self.lease = lease
        self.two_phase = two_phase
        self.hold: Hold | None = None
        """What an ``enqueue`` was granted before its ``wait`` came."""
        self.place = b""
        """Its name, once it has got one to be taken up by."""
        self.keep: Keep | None = None
        """How it is to be kept if the wait for it ends."""
        self.absence: Absence | None = None
        """What is done for it while nobody is there."""
        self.is_held = False
        """Whether a slot is held for whoever comes back."""


class Peer:
    """One connection, as the table sees it. Number 0 stands for one that is not here."""

    __slots__ = (
        "detaches",
        "holds",
        "id",
        "keep",
        "label",
        "left",
        "places",
        "resumes",
        "waiting",
    )

    def __init__(self, number: int) -> None:
        self.id = number
        self.label = b""
        self.detaches = False
        """Its end leaves its holds to their leases: it has declared a ``stable-ref``."""
        self.holds: dict[Hold, None] = {}
        """In the order in which it got them. Fences would not do: those of two shards can be equal."""
        self.places: dict[tuple[Space, bytes], Waiter] = {}
        """Its two-phase places, until their ``wait`` is answered or their hold ends."""
        self.waiting: Waiter | None = None
        """What it is blocked on: its next request is handled only after that is answered."""
        self.resumes = b""
        """The name of the place that its next request takes up."""
        self.keep: Keep | None = None
        """What is to become of its place if its next ``wait`` ends without a grant."""
        self.left: dict[tuple[Space, bytes], bytes] = {}
        """The names of its two-phase places whose queues have gone to another server."""
