"""What the table remembers: entries with their holds and waiters, and the peers they belong to."""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

from dflockd.table.deadlines import Timed
from dflockd.table.grouped import GroupedQueue
from dflockd.table.issuer import TokenIssuer
from dflockd.table.line import ClientProcess, Position, ReservedPosition
from dflockd.table.newest import Newest
from dflockd.table.pauses import KeyPause
from dflockd.table.queue import Queue
from dflockd.table.rates import KeyRate, PackedRates, RateBlock, RateBook
from dflockd.table.states import EXPECTED, PASSED, QUEUED
from dflockd.wire import FairGroup, Owner, Reserve, Superseded


class Serving:
    """Until when a server may grant and renew: nobody else does so before."""

    __slots__ = ("until",)

    def __init__(self) -> None:
        self.until = -math.inf


class Partition:
    """A part of the table that can be looked at, moved or dropped as a whole: all of it, or a shard."""

    __slots__ = (
        "doubted",
        "ended",
        "frozen",
        "issuer",
        "last_ended",
        "newest",
        "opens_at",
        "rates",
        "recovers_until",
        "reserved",
        "serving",
        "spaces",
    )

    def __init__(self, issuer: TokenIssuer, serving: Serving | None = None) -> None:
        self.serving = serving
        """Until when it is this server's; always without."""
        self.issuer = issuer
        """What counts its fences."""
        self.frozen = False
        """Whether nothing is granted, renewed or released, for all of it is about to leave."""
        self.opens_at: float | None = None
        """Until when nothing is granted or renewed, because somebody else may still do so."""
        self.spaces: list[dict[bytes, Entry]] = [{}, {}]
        """By `Space`."""
        self.reserved: dict[bytes, Waiter] = {}
        """Positions that can be resumed, of waiters that are away or want a turn; by ticket."""
        self.rates = RateBook(self.spaces)
        self.recovers_until: float | None = None
        """Until when there are no grants, because of holds that are not in here any more."""
        self.doubted: set[Hold] = set()
        """What was restored then and nobody has renewed since."""
        self.ended: set[int] = set()
        """The fences of what has ended since: nobody can bring that back."""
        self.last_ended: dict[tuple[int, bytes], int] = {}
        """The largest such fence of each key that was held alone: nor what was granted before it."""

        self.newest: dict[bytes, Newest] = {}
        """The newest that has asked for a lock, of those with an age; see `superseding`."""

    def withholds(self, now: float) -> bool:
        """Whether no grant can be given, for another server may have it soon, or has it already."""
        return self.frozen or (self.serving is not None and now >= self.serving.until)

    def newer_than(self, key: bytes, age: int) -> Superseded | None:
        """Return what to tell somebody of that age, if it has one and a newer one has come."""
        newest = self.newest.get(key)
        return newest.answer if newest is not None and 0 < age < newest.age else None

    def remember_end(self, name: tuple[int, bytes], fence: int, *, is_sole: bool) -> None:
        """See to it that nobody brings back what has ended, nor what had ended before it began."""
        if is_sole:
            self.last_ended[name] = max(fence, self.last_ended.get(name, 0))
        else:
            self.ended.add(fence)

    def end_recovery(self) -> None:
        """Grant again: a holder that has not come back by now holds nothing any more."""
        self.recovers_until = None
        self.doubted.clear()
        self.ended.clear()
        self.last_ended.clear()


UNKNOWN = 0
"""The limit of a key whose holders have come back, and nobody else yet."""


class HoldRecord(NamedTuple):
    """What is kept of a hold where it outlives the table; times in seconds."""

    space: int
    key: bytes
    limit: int
    """How many could hold the key when it was granted; see `Hold.is_sole`."""
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
    """Which of its attempts; the first is 0."""
    age: int = 0
    """Of that run; see `dflockd.wire.Owner`."""
    places: int = 0
    """How many places of the rate its run takes that has yet to begin; see `dflockd.table.rates`."""
    group: bytes = b""
    """To which group its holder belongs; see `dflockd.wire.FairGroup`."""
    weight: int = 1
    """How many slots it takes; see there."""


HoldFields: TypeAlias = tuple[
    int, bytes, int, int, float, float, float, bytes, bool, bytes, int, int, int, bytes, int
]
"""What a `HoldRecord` is made of, in its order."""


class Entry:
    """One key, with its holders and its waiters.

    It exists only while there is a holder or a waiter, or while it is paused.
    """

    __slots__ = ("aged", "holds", "key", "limit", "owners", "partition", "space", "waiters")

    def __init__(self, partition: Partition, space: int, key: bytes, limit: int) -> None:
        self.partition = partition
        self.space = space
        self.key = key
        self.limit = limit
        """How many may hold it, by the latest request for a slot. If it has become less, more may
        still do so, and nobody new gets in until there is room."""
        self.holds: dict[int, Hold] = {}
        """By fence: the part of a token that is no secret."""
        self.waiters: Queue[Waiter] | None = None
        """Absent until somebody has had to wait."""
        self.owners: dict[bytes, list[Hold | Waiter]] | None = None
        """What is here of whom, by attempt; absent until somebody says who asks. See `owners`."""
        self.aged: dict[Waiter, None] | None = None
        """The waiters that have an age. They are as old as the newest, or about to leave: so nobody has
        to look for them among all others. Absent until there is one."""

    @property
    def used(self) -> int:
        """How many of its slots are taken: one for each holder, or what it takes if that is more."""
        return len(self.holds) + (0 if self.waiters is None else self.waiters.extra)

    @property
    def pause(self) -> KeyPause | None:
        """Why nothing of it is granted, if it is paused."""
        return None if self.waiters is None else self.waiters.pause

    @property
    def rate(self) -> KeyRate | None:
        """How many of its runs may begin in a while, if they may not at any time."""
        return None if self.waiters is None else self.waiters.rate

    @property
    def is_used(self) -> bool:
        """Whether there is anything to say of it."""
        return bool(self.holds or self.waiters or self.pause)

    def queue(self) -> Queue[Waiter]:
        """Return its queue."""
        if self.waiters is None:
            self.waiters = Queue()
        return self.waiters

    def grouped(self) -> Queue[Waiter]:
        """Return its queue, in which groups take turns, and weights count, from now on."""
        queue = self.waiters
        if queue is None or not queue.is_grouped:
            self.waiters = queue = GroupedQueue(queue)
        return queue


class Hold(Timed):
    """One granted slot of an entry. It ends by release, at its deadline, or with its peer."""

    __slots__ = (
        "detached",
        "entry",
        "fence",
        "label",
        "lease",
        "limit",
        "owner",
        "peer",
        "since",
        "token",
        "told",
        "waiter",
    )

    def __init__(
        self,
        entry: Entry,
        fence: int,
        token: bytes,
        peer: Peer | None,
        lease: int,
        since: float,
        limit: int,
        owner: Owner | None = None,
        label: bytes = b"",
    ) -> None:
        self.entry = entry
        self.lease = lease
        """The lease, in seconds, of the last answer to its holder."""
        self.limit = limit
        """How many could hold the key when it was granted; `UNKNOWN` of one that came back."""
        self.label = label
        """What people see."""
        self.owner = owner
        """Whose run it is; nobody's once it is detached."""
        self.since = since
        self.fence = fence
        self.token = token
        self.peer = peer
        """The connection whose end releases it: it acquired it or last renewed it. None if detached."""
        self.detached = False
        """Whether it has no peer because the last one wanted so: nobody runs on the strength of it."""
        self.waiter: Waiter | None = None
        """The waiter by ``enqueue`` that got it, while its ``wait`` has not been answered."""
        self.told = True
        """Whether its token has left the table. What nobody was told is not worth keeping."""

    @property
    def ended(self) -> bool:
        """Whether it is no longer in the table."""
        return self.fence not in self.entry.holds

    @property
    def age(self) -> int:
        """The age of who holds it; 0 without."""
        return 0 if self.owner is None else self.owner.age

    @property
    def is_sole(self) -> bool:
        """Whether it was granted as the only one: all that were granted before had ended then."""
        return self.limit == 1

    @property
    def places(self) -> int:
        """How many places of the rate its run takes that has yet to begin; 0 if it has."""
        rate = self.entry.rate
        return 0 if rate is None else rate.pending.get(self.fence, 0)

    @property
    def group(self) -> bytes:
        """To which group its holder belongs; nothing if to none."""
        queue = self.entry.waiters
        return b"" if queue is None else queue.group_of(self.fence)

    @property
    def weight(self) -> int:
        """How many slots of its entry it takes."""
        queue = self.entry.waiters
        return 1 if queue is None else queue.weight_of(self.fence)

    def fields(self) -> HoldFields:
        """Return what is worth keeping, as plain as it can be: it is asked for at every change.

        The token is not: the server can make it anew from the secret.
        """
        entry, owner, queue = self.entry, self.owner, self.entry.waiters
        places, group, weight = 0, b"", 1
        if queue is not None:
            places = self.places if queue.rate is not None else 0
            if queue.is_grouped:
                group, weight = self.group, self.weight
        return (
            entry.space,
            entry.key,
            self.limit,
            self.fence,
            self.span,
            self.deadline,
            self.since,
            self.label,
            self.detached,
            b"" if owner is None else owner[0],
            0 if owner is None else owner[1],
            0 if owner is None else owner[2],
            places,
            group,
            weight,
        )

    def kept(self) -> HoldRecord:
        """Return what is worth keeping."""
        return HoldRecord(*self.fields())


Change: TypeAlias = Hold | Newest | RateBlock | PackedRates | KeyPause
"""Something to be kept that has changed or ended, as it says itself."""


class Left(NamedTuple):
    """What a peer had enqueued at a key that has left this server."""

    ticket: bytes
    turn: float | None
    """What it wanted; see `Waiter.turn`."""


class Waiter(Position):
    """Somebody in the queue of an entry.

    By a blocked ``acquire``, or by an ``enqueue``: then the peer may already wait for it (it is its
    `Peer.waiting`) or still be elsewhere. Or it is away, and the position is reserved for a while.
    Or it wants a turn: then any client with the ticket can take the position up.
    """

    __slots__ = (
        "away_age",
        "entry",
        "hold",
        "label",
        "lease",
        "maker",
        "owner",
        "peer",
        "reserve",
        "ticket",
        "told_on",
        "turn",
        "two_phase",
        "until",
    )

    def __init__(
        self,
        entry: Entry,
        peer: Peer,
        number: int,
        lease: int,
        since: float,
        *,
        two_phase: bool,
        state: int = QUEUED,
        owner: Owner | None = None,
        label: bytes = b"",
        group: FairGroup | None = None,
    ) -> None:
        self.state = state
        """One of `dflockd.table.states`."""
        self.entry = entry
        self.number = number
        """Grows with every arrival at the table."""
        self.since = since
        self.peer = peer
        self.owner = owner
        """The run that asks."""
        self.label = label
        """What people see of them."""
        self.group = group
        """To which group they belong."""
        self.lease = lease
        self.two_phase = two_phase
        self.is_rated = False
        """Whether its run is to count for the rate of the key."""
        self.hold: Hold | None = None
        """What an ``enqueue`` was granted before its ``wait`` came."""
        self.ticket = b""
        """What its position can be taken up with, once it has got one."""
        self.reserve: Reserve | None = None
        """The reservation of its position if the wait for it ends."""
        self.reservation: ReservedPosition | None = None
        """What the table does for it while it is away."""
        self.maker: Peer | None = None
        """The connection that has left this reservation."""
        self.away_age = 0
        """Its age while it is away: it is nobody's then, but somebody newer still goes first."""
        self.turn: float | None = None
        """Seconds for which a slot is held once it has a turn; without, it is granted one."""
        self.process = None
        self.told_on: Peer | None = None
        """The connection on which its process last learned of its turn."""
        self.until = 0.0
        """When a wait that began is over; nothing ends it while it is its turn."""

    @property
    def age(self) -> int:
        """The age of who asks, or is away; 0 without."""
        return self.away_age if self.owner is None else self.owner.age

    @property
    def is_told(self) -> bool:
        """Whether its turn has come, and its process was told."""
        return self.state in (EXPECTED, PASSED) and self.reservation is None

    @property
    def leaves_room(self) -> bool:
        """Whether others may have their turn once it is away or gone, though no hold has ended.

        A slot that was set aside for it is free. Or somebody takes more than one: then others may
        have waited for it beside free slots.
        """
        queue = self.entry.waiters
        return self.turn is not None or (queue is not None and queue.is_heavy)

    @property
    def place(self) -> object:
        """By what its `ClientProcess` knows where it waits."""
        return self.entry


class Peer:
    """One connection, as the table sees it. Number 0 stands for one that is not here."""

    __slots__ = (
        "detaches",
        "ended",
        "enqueued",
        "granted",
        "holds",
        "id",
        "instance",
        "kept",
        "left",
        "process",
        "told",
        "waiting",
    )

    def __init__(self, number: int) -> None:
        self.id = number
        self.instance = b""
        """Which process it is; empty of one that has not said `Hello`."""
        self.process: ClientProcess | None = None
        """The same, with all of its connections."""
        self.detaches = False
        """Its end leaves its holds to their leases: it has declared a ``stable-ref``."""
        self.holds: dict[Hold, None] = {}
        """In the order in which it got them. Fences would not do: those of two shards can be equal."""
        self.enqueued: dict[tuple[int, bytes], Waiter] = {}
        """What it waits for by ``enqueue``, until their ``wait`` is answered or their hold ends."""
        self.ended = False
        """Whether its connection has ended. What stands on it may take some steps to be freed."""
        self.granted: Hold | None = None
        """What its last wait was answered with."""
        self.told: Waiter | None = None
        """Of whose turn it was told last."""
        self.waiting: Waiter | ClientProcess | None = None
        """What it is blocked on: its next request is handled only after that is answered. It is its
        own process while it asks whose turn it is."""
        self.left: dict[tuple[int, bytes], Left] = {}
        """What it enqueued, where the queues are at another server now."""
        self.kept = 0
        """How many positions are kept that it has left."""


NOBODY = Peer(0)
"""The peer of who is away, or at another connection than any of this server."""
