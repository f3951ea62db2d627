"""What travels: one class for each request and each reply, and the limits of the format.

Keys and tokens are ``bytes``, as on the wire; times are whole seconds.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Final, NamedTuple, TypeAlias

MAX_LINE: Final = 256
"""Longest line, in bytes, without its line feed (and without a carriage return before it)."""

MAX_FIELDS: Final = 1024
"""Longest argument of a request with named fields, in bytes."""

MAX_SECRET: Final = 64 * 1024
"""Longest shared secret, in bytes: the argument of ``auth``, and with it that of ``hello``."""

MAX_HELLO: Final = MAX_SECRET + MAX_FIELDS
"""Longest argument of ``hello``, in bytes."""

MAX_TICKET: Final = 64
"""Longest ticket, in bytes."""

MAX_OWNER: Final = 64
"""Longest name of an owner, an instance, a version or a ref, in bytes."""

FEATURES: Final = frozenset(
    {b"slots", b"rates", b"groups", b"ages", b"turns", b"pauses", b"weights"}
)
"""What a server can know beyond the published protocol: each stands for some fields of requests.

``slots``: requests with named fields at all, with any limit, owners, labels, tickets and
reservations. ``rates``, ``groups``, ``ages``, ``turns`` and ``weights``: the fields of that name.
``pauses``: `Pause` and `Resume`.
"""

MAX_ATTEMPT: Final = (1 << 31) - 1
"""Largest number of an attempt."""

MAX_AGE: Final = (1 << 64) - 1
"""Largest age: it is counted with the fences."""

MAX_SECONDS: Final = 9_223_372_036
"""Largest timeout or lease that any published server accepts: 2**63 nanoseconds, in seconds."""

MAX_LIMIT: Final = 1 << 20
"""Largest number of holders of one key."""


MAX_RATE: Final = 1 << 20
"""Largest number of runs that may begin in one window of a `Rate`."""

UNLIMITED: Final = MAX_LIMIT
"""The limit of a key that only a `Rate` or a `FairGroup` bounds."""

ALL: Final = MAX_LIMIT
"""The weight of a run that takes a key for itself, whatever its limit is or becomes."""


class Space(IntEnum):
    """The two namespaces of keys of the published protocol: a lock and a semaphore do not meet.

    Requests with named fields know locks alone, of any limit.
    """

    LOCK = 0
    SEMAPHORE = 1


class Rate(NamedTuple):
    """How many runs of a key may begin in a window.

    A grant counts until one window after its run has begun, which a `Renew` or the end of the hold
    says.
    """

    runs: int
    window: int
    """Milliseconds."""


class Owner(NamedTuple):
    """Whose run asks for a slot. See `OwnerConflict`."""

    id: bytes
    """A name for one run of something."""
    attempt: int
    """Grows with every time that the run is tried again on purpose."""
    age: int = 0
    """Of those who ask for a lock with one, the newest wins; 0 takes no part. See `Superseded`."""


class FairGroup(NamedTuple):
    """The group that somebody belongs to who asks for a slot, and how many slots that is.

    The groups that wait for a key take turns; within one it is first come, first served. All
    requests without a group form one.
    """

    name: bytes
    """As a key may be; empty for those without a group, who have a weight."""
    limit: int = 0
    """How many slots of the key the group may have at once; 0 is no limit of its own."""
    weight: int = 1
    """How many slots of the key and of the group a run takes, and how many places of a `Rate`: all
    that there may be, if that is fewer."""


class Reserve(NamedTuple):
    """Keeps the position if the wait ends without a grant; see `TimedOut`.

    The waiter is expected back in `away` milliseconds. If its turn comes within `hold` milliseconds
    of that, before or after, a slot is held for it until `hold` milliseconds after. Otherwise, and
    after that, the next has its turn; the position is still ahead of all that came later.
    """

    away: int
    hold: int


class Hello(NamedTuple):
    """``hello``: the first request of a client that knows more than the published protocol.

    Its answer is a `Welcome` or an `Unwelcome`.
    """

    instance: bytes
    """Names the process, so that it can take over what its own lost connection waits for."""
    version: bytes
    """Of the client, for people."""
    secret: bytes | None = None
    """As that of `Auth`."""

    def __repr__(self) -> str:
        """Without the secret: requests are logged."""
        return f"Hello({self.instance!r}, {self.version!r})"


class Acquire(NamedTuple):
    """``l``, ``sl`` and ``acquire``: wait up to `timeout` seconds for a slot; 0 tries once.

    What comes behind `lease` only ``acquire`` can say.
    """

    space: Space
    key: bytes
    limit: int
    timeout: int
    lease: int | None
    rate: Rate | None = None
    """How many runs may begin in a while, if they may not at any time."""
    owner: Owner | None = None
    label: bytes = b""
    """What people see of who asks."""
    group: FairGroup | None = None
    ticket: bytes = b""
    """Of a position that was kept, and is taken up again: from a `Moved`, `TimedOut` or `Queued`."""
    reserve: Reserve | None = None


class Enqueue(NamedTuple):
    """``e``, ``se`` and ``enqueue``: queue, or take the slot if one is free, without waiting.

    For the fields see `Acquire`.
    """

    space: Space
    key: bytes
    limit: int
    lease: int | None
    rate: Rate | None = None
    owner: Owner | None = None
    label: bytes = b""
    group: FairGroup | None = None
    ticket: bytes = b""
    turn: int | None = None
    """Asks for a turn, and no grant: milliseconds for which a slot is set aside once it is told.

    Then the client takes the position up, where it is ready to hold the key; see `Next`.
    """


class Wait(NamedTuple):
    """``w``, ``sw`` and ``wait``: wait up to `timeout` seconds for the grant of an earlier `Enqueue`.

    What comes behind `timeout` only ``wait`` can say.
    """

    space: Space
    key: bytes
    timeout: int
    reserve: Reserve | None = None
    age: int = 0
    """Of the owner, who is told why if somebody newer has ended the wait."""


class Release(NamedTuple):
    """``r`` and ``sr``."""

    space: Space
    key: bytes
    token: bytes


class Unbegun(NamedTuple):
    """``unbegun``: as `Release`, of a run that has not begun and never will.

    So it no longer counts for a `Rate`. Of locks alone.
    """

    key: bytes
    token: bytes


class How(Enum):
    """What a `Renew` does beside starting the lease anew."""

    PLAIN = b""
    """Nothing. What the server has forgotten comes back if the token is authentic."""
    BEGUN = b"begun"
    """The run that a `Rate` let through has begun: it counts until one window after the first such
    request."""
    CONFIRM = b"confirm"
    """What the server has forgotten stays so. For those who do not know whether the lease has ended
    since: they could bring a hold back that others have come after."""
    DETACH = b"detach"
    """The hold belongs to no connection any more, and stays for its lease. Refused to any but the
    connection that it belongs to."""


class Renew(NamedTuple):
    """``n``, ``sn`` and ``renew``: the lease starts anew; without `lease`, with the server's default.

    What comes behind `lease` only ``renew`` can say. A server that has forgotten the hold takes from
    there whose it is.
    """

    space: Space
    key: bytes
    token: bytes
    lease: int | None
    how: How = How.PLAIN
    owner: Owner | None = None
    label: bytes = b""
    group: FairGroup | None = None


class Stats(NamedTuple):
    """``stats``: what the server holds, as JSON."""


class Auth(NamedTuple):
    """``auth``: the shared secret, before anything else on a connection that needs it."""

    secret: bytes

    def __repr__(self) -> str:
        """Without the secret: requests are logged."""
        return "Auth(...)"


class Ping(NamedTuple):
    """``ping``."""


class Barrier(NamedTuple):
    """``barrier``: answered once every earlier change is in effect; on one server, at once."""


class StableRef(NamedTuple):
    """``stable-ref``: this connection's holds outlive it, until their leases end."""

    ref: bytes


class Inspect(NamedTuple):
    """``i`` and ``si``: the holders and waiters of a key, as JSON."""

    space: Space
    key: bytes


class Find(NamedTuple):
    """``find``: keys, holders and waiters with a text in the key or the label, as JSON.

    The longest wait comes first.
    """

    text: bytes
    """Empty for all."""
    waiters: bool = False
    """Nobody but waiters."""
    notes: bool = False
    """The keys of notes as well; see `dflockd.wire.notes`."""


class Evict(NamedTuple):
    """``evict`` and ``sevict``: end the hold with this fence without its token, for operators.

    Its holder learns of it at the next renewal.
    """

    space: Space
    key: bytes
    fence: int


class Pause(NamedTuple):
    """``pause``: grant nothing of a lock, and announce no turn, until a `Resume`; for operators.

    Its holder goes on, and waiters keep their positions. The latest replaces those before.
    """

    key: bytes
    span: int | None = None
    """Milliseconds after which it ends by itself."""
    by: bytes = b""
    """The name of the person or program that has paused it, for people."""
    reason: bytes = b""
    """Why it is paused, for people."""


class Resume(NamedTuple):
    """``resume``: end the pause of a lock; those who wait are served at once."""

    key: bytes


class Shards(NamedTuple):
    """``shards``: which server of a cluster has which shard, as JSON.

    A client that has a map names its version. If that is the latest, the answer is only
    `Status.OK`.
    """

    version: bytes = b""
    """Of the map that is known; empty without one."""
    packed: bool = False
    """Whether the map may come packed; see `dflockd.wire.maps`."""


class Identify(NamedTuple):
    """``identify``: what only this process can answer to a nonce, as JSON.

    A server of a cluster asks it where it says that it is.
    """

    nonce: bytes


class Next(NamedTuple):
    """``next``: wait until it is the turn of a position of this process that wants one.

    The process has somebody who can use the lock at once. It is answered `YourTurn`, about a position
    of any of its connections; a process has one `Next` at a time.
    """


class Pass(NamedTuple):
    """``pass``: the turn of the position with that ticket could not be used, and others may go first.

    The position is what it was before its turn, and has another one.
    """

    key: bytes
    ticket: bytes


class DrawAge(NamedTuple):
    """``age``: a number for an `Owner`, larger than all that were given out for the key before."""

    key: bytes


class Listen(NamedTuple):
    """``listen``: wait until a newer owner wants the lock that is held under this token.

    Answered `Superseded` then, and `Status.LEASE_EXPIRED` once that hold has ended. An extension of
    this server.
    """

    key: bytes
    token: bytes


class Malformed(NamedTuple):
    """Three lines that are no request: answered ``error``, and the connection lives on."""

    reason: str


Request: TypeAlias = (
    Hello
    | Acquire
    | Enqueue
    | Wait
    | Release
    | Unbegun
    | Renew
    | Stats
    | Auth
    | Ping
    | Barrier
    | StableRef
    | Inspect
    | Find
    | Evict
    | Pause
    | Resume
    | Shards
    | Identify
    | Next
    | Pass
    | DrawAge
    | Listen
    | Malformed
)


class Status(Enum):
    """The replies that are one word. Clients compare them exactly: no text may follow."""

    OK = b"ok"
    QUEUED = b"queued"
    TIMEOUT = b"timeout"
    ERROR = b"error"
    AUTH = b"error_auth"
    MAX_LOCKS = b"error_max_locks"
    MAX_WAITERS = b"error_max_waiters"
    MAX_HOLDS = b"error_max_holds"
    MAX_RATES = b"error_max_rates"
    RATE_WINDOW = b"error_rate_window"
    LIMIT_MISMATCH = b"error_limit_mismatch"
    ALREADY_ENQUEUED = b"error_already_enqueued"
    NOT_ENQUEUED = b"error_not_enqueued"
    LEASE_EXPIRED = b"error_lease_expired"
    DRAINING = b"error_draining"

    def __init__(self, word: bytes) -> None:
        self.line = word + b"\n"


class Recovering(NamedTuple):
    """``error_recovering <ms>[ <status>]``: not now, for holders that the server forgot may be running.

    Or a shard is being handed over, or its server is cut off from the others. Ask the same server
    again, not much later than this.
    """

    milliseconds: int
    status: bytes = b""
    """That of the server, if that is the reason: ``cut off`` or ``closed``; see `LockTable.status`."""


class Moved(NamedTuple):
    """``error_moved <shard> <epoch> <server>[ <ticket>]``: another server is in charge of the key.

    The epoch grows each time that the shard changes hands: of two such replies the one with the
    smaller epoch is out of date. A waiter keeps its position if it shows the ticket there soon.
    """

    shard: int
    epoch: int
    server: bytes
    ticket: bytes = b""


class OwnerConflict(NamedTuple):
    """``error_owner held|waiting <attempt>``: the owner is there already, with that attempt.

    The answer to an `Acquire` or `Enqueue` of the same `Owner` with the same or a lower attempt.
    """

    state: bytes
    """``held`` or ``waiting``."""
    attempt: int


class Superseded(NamedTuple):
    """``error_superseded <age> <label>``: a newer one has asked for the lock.

    The answer to an `Acquire`, `Enqueue` or `Wait` of an `Owner` with a smaller age, and to the
    `Listen` of who holds the lock with one.
    """

    age: int
    """Of the newest."""
    label: bytes
    """The label of the newest; empty if it has none."""


class Welcome(NamedTuple):
    """``hello ok <version> <features>``: the answer to a `Hello`."""

    version: bytes
    """Of the server, for people."""
    features: frozenset[bytes]
    """What it knows beyond the published protocol; see `FEATURES`."""


class Unwelcome(NamedTuple):
    """``hello <status>``: a `Hello` was refused."""

    status: Status


class Granted(NamedTuple):
    """``ok <token> <lease>``: the answer to `Acquire` and `Wait`."""

    token: bytes
    lease: int


class Enqueued(NamedTuple):
    """``acquired <token> <lease>``: the answer to an `Enqueue` that found a free slot."""

    token: bytes
    lease: int


class TimedOut(NamedTuple):
    """``timeout <ticket>``: the answer to a wait with a `Reserve` that ended without a grant.

    The position in the queue is kept under that ticket until some time after it was expected back.
    """

    ticket: bytes


class Queued(NamedTuple):
    """``queued <ticket>``: the answer to an `Enqueue` for a turn.

    The position lasts as long as the connection. Another connection takes it over with the ticket.
    """

    ticket: bytes


class YourTurn(NamedTuple):
    """``turn <ticket>``: the answer to `Next`. Nothing is held yet."""

    ticket: bytes


class Aged(NamedTuple):
    """``ok <age>``: the answer to `DrawAge`."""

    age: int


class Renewed(NamedTuple):
    """``ok <seconds>``: the lease that was just set, in full."""

    lease: int


class Report(NamedTuple):
    """``ok <json>``: the answer to `Stats` and its like, one line of JSON."""

    json: bytes


Refusal: TypeAlias = Status | Recovering | Moved | OwnerConflict | Superseded
"""What any request can be answered with."""

Reply: TypeAlias = (
    Refusal
    | Welcome
    | Unwelcome
    | Granted
    | Enqueued
    | TimedOut
    | Queued
    | YourTurn
    | Renewed
    | Aged
    | Report
)
