"""What travels: one class for each request and each reply, and the limits of the format.

Keys and tokens are ``bytes``, as on the wire; times are whole seconds.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Final, NamedTuple, TypeAlias

MAX_LINE: Final = 256
"""Longest line, in bytes, without its line feed (and without a carriage return before it)."""

MAX_SECRET: Final = 64 * 1024
"""Longest argument of ``auth``, in bytes: the one line that may be longer than `MAX_LINE`."""

MAX_REF: Final = 64
"""Longest ref of ``stable-ref``, in bytes."""

MAX_TICKET: Final = 64
"""Longest ticket, in bytes."""

MAX_OWNER: Final = 64
"""Longest name of an owner, and of an instance, in bytes."""

MAX_ATTEMPT: Final = (1 << 31) - 1
"""Largest number of an attempt."""

MAX_AGE: Final = (1 << 64) - 1
"""Largest age: it is counted with the fences."""

MAX_SECONDS: Final = 9_223_372_036
"""Largest timeout or lease that any published server accepts: 2**63 nanoseconds, in seconds."""

MAX_LIMIT: Final = 1 << 20
"""Largest number of holders of one semaphore."""


MAX_RATE: Final = 1 << 20
"""Largest number of runs that may begin in one window of a `Rate`."""

UNLIMITED: Final = MAX_LIMIT
"""The limit of a semaphore that only a `Rate` bounds."""


class Space(IntEnum):
    """The two namespaces of keys: a lock and a semaphore of the same text do not meet."""

    LOCK = 0
    SEMAPHORE = 1


class Rate(NamedTuple):
    """``<runs>/<window>`` behind an `Acquire` or `Enqueue`: how many runs may begin in a window.

    A grant counts until one window after its run has begun, which a `Begun` or the end of the hold
    says. An extension of this server, which others refuse.
    """

    runs: int
    window: int
    """Milliseconds."""


class Acquire(NamedTuple):
    """``l`` and ``sl``: wait up to `timeout` seconds for a slot; 0 tries once."""

    space: Space
    key: bytes
    limit: int
    timeout: int
    lease: int | None
    rate: Rate | None = None


class Enqueue(NamedTuple):
    """``e`` and ``se``: queue, or take the slot if one is free, without waiting."""

    space: Space
    key: bytes
    limit: int
    lease: int | None
    rate: Rate | None = None


class Wait(NamedTuple):
    """``w`` and ``sw``: wait up to `timeout` seconds for the grant of an earlier `Enqueue`."""

    space: Space
    key: bytes
    timeout: int


class Release(NamedTuple):
    """``r`` and ``sr``."""

    space: Space
    key: bytes
    token: bytes


class Renew(NamedTuple):
    """``n`` and ``sn``: the lease starts anew; without `lease`, with the server's default."""

    space: Space
    key: bytes
    token: bytes
    lease: int | None


class Begun(NamedTuple):
    """``begun`` and ``sbegun``: as `Renew`, and the run that a `Rate` let through has begun.

    It counts until one window after the first such request. An extension of this server.
    """

    space: Space
    key: bytes
    token: bytes
    lease: int | None


class Unbegun(NamedTuple):
    """``unbegun`` and ``sunbegun``: as `Release`, of a run that has not begun and never will.

    So it no longer counts for a `Rate`. An extension of this server.
    """

    space: Space
    key: bytes
    token: bytes


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


class Label(NamedTuple):
    """``label``: what this connection's holds and waiters are shown as; empty for nothing."""

    text: bytes


class Owner(NamedTuple):
    """``owner <id> <attempt> [<instance> [<age>]]``, or ``_``: who asks with all that follows.

    Its key line can carry a label as well. An extension of this server; see `OwnerConflict`.
    """

    id: bytes
    """A name for one run of something; empty for nobody's."""
    attempt: int
    """Grows with every time that the run is tried again on purpose."""
    instance: bytes = b""
    """Which process asks, so that it can take over what its own lost connection waits for."""
    label: bytes | None = None
    """As that of `Label`; ``None`` leaves it as it is. ``_`` alone cannot be said here."""
    age: int = 0
    """Of those who ask for a lock with one, the newest wins; 0 takes no part. See `Superseded`.

    Only where the instance is said as well.
    """


class Inspect(NamedTuple):
    """``i`` and ``si``: who holds a key and who waits for it, as JSON."""

    space: Space
    key: bytes


class Find(NamedTuple):
    """``find``: keys, holders and waiters with a text in the key or the label, as JSON.

    The longest wait comes first. An extension of this server.
    """

    text: bytes
    """Empty for all."""
    waiters: bool = False
    """Nobody but waiters."""
    notes: bool = False
    """The keys of notes as well; see `dflockd.wire.notes`."""


class Detach(NamedTuple):
    """``detach`` and ``sdetach``: the hold stays for `lease`, and belongs to no connection.

    Refused to any but the connection that it belongs to. An extension of this server.
    """

    space: Space
    key: bytes
    token: bytes
    lease: int | None


class Confirm(NamedTuple):
    """``confirm`` and ``sconfirm``: as `Renew`, but what the server has forgotten stays so.

    For those who do not know whether the lease has ended since: a `Renew` of theirs could bring a
    hold back that others have come after. An extension of this server.
    """

    space: Space
    key: bytes
    token: bytes
    lease: int | None


class Evict(NamedTuple):
    """``evict`` and ``sevict``: end the hold with this fence without its token, for operators.

    Its holder learns of it at the next renewal.
    """

    space: Space
    key: bytes
    fence: int


class Shards(NamedTuple):
    """``shards``: which server of a cluster has which shard, as JSON. An extension of this server.

    A client that has a map names its version. If that is the latest, the answer is only
    `Status.OK`. Servers of 0.1 ignore both fields and answer with the whole map.
    """

    version: bytes = b""
    """Of the map that is known; empty without one."""
    packed: bool = False
    """Whether the map may come packed; see `dflockd.wire.maps`."""


class Identify(NamedTuple):
    """``identify``: what only this process can answer to a nonce, as JSON.

    A server of a cluster asks it where it says that it is. An extension of this server.
    """

    nonce: bytes


class Resume(NamedTuple):
    """``resume``: the next `Acquire` or `Enqueue` takes up a queue position that was kept.

    Its ticket comes from a `Moved` or a `TimedOut`. An extension of this server.
    """

    ticket: bytes


class InGroup(NamedTuple):
    """``group``: the next `Acquire` or `Enqueue` belongs to this group.

    The groups that wait for a key take turns; within one it is first come, first served. All
    requests without a group form one. An extension of this server.
    """

    name: bytes
    """As a key may be."""
    limit: int = 0
    """How many slots of the key the group may have at once; 0 is no limit of its own."""


class Reserve(NamedTuple):
    """``keep``: if the next `Wait` ends without a grant, its position is reserved; see `TimedOut`.

    The waiter is expected back in `away` milliseconds. If its turn comes within `hold` milliseconds
    of that, before or after, a slot is held for it until `hold` milliseconds after. Otherwise, and
    after that, the next has its turn; the position is still ahead of all that came later. An
    extension of this server.
    """

    away: int
    hold: int


class Turn(NamedTuple):
    """``turn``: the next `Enqueue` wants a turn, and no grant.

    After its turn the client sends `Resume`, from the process that is ready to hold the key; see
    `YourTurn`. An extension of this server.
    """

    hold: int
    """Milliseconds for which a slot is set aside once it has been told."""


class Pass(NamedTuple):
    """``pass`` and ``spass``: others may go first, and the position with that ticket stays.

    An extension of this server.
    """

    space: Space
    key: bytes
    ticket: bytes


class DrawAge(NamedTuple):
    """``age``: a number for an `Owner`, larger than all that were given out for the key before.

    An extension of this server.
    """

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
    Acquire
    | Enqueue
    | Wait
    | Release
    | Renew
    | Begun
    | Unbegun
    | Stats
    | Auth
    | Ping
    | Barrier
    | StableRef
    | Label
    | Owner
    | Inspect
    | Find
    | Detach
    | Confirm
    | Evict
    | Shards
    | Identify
    | Resume
    | InGroup
    | Reserve
    | Turn
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
    """``error_recovering <ms>``: not now, for holders that the server forgot may be running.

    Or a shard is being handed over, or its server is cut off from the others. Ask the same server
    again, not much later than this.
    """

    milliseconds: int


class Moved(NamedTuple):
    """``error_moved <shard> <epoch> <server>[ <ticket>]``: another server is in charge of the key.

    The epoch grows each time that the shard changes hands: of two such replies the one with the
    smaller epoch is out of date. A waiter keeps its position if it shows the ticket there soon
    (`Resume`).
    """

    shard: int
    epoch: int
    server: bytes
    ticket: bytes = b""


class OwnerConflict(NamedTuple):
    """``error_owner held|waiting <attempt>``: the owner is there already, with that attempt.

    The answer to an `Acquire` or `Enqueue` of an `Owner` with the same or a lower attempt.
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


class Granted(NamedTuple):
    """``ok <token> <lease>``: the answer to `Acquire` and `Wait`."""

    token: bytes
    lease: int


class Enqueued(NamedTuple):
    """``acquired <token> <lease>``: the answer to an `Enqueue` that found a free slot."""

    token: bytes
    lease: int


class TimedOut(NamedTuple):
    """``timeout <ticket>``: the answer to a `Wait` that ended without a grant, after a `Reserve`.

    The position in the queue is kept under that ticket until some time after it was expected back.
    """

    ticket: bytes


class YourTurn(NamedTuple):
    """``turn <ticket>``: the answer to an `Enqueue` and its `Wait` after a `Turn`.

    Nothing is held. The position lasts as long as the connection. A `Resume` with the ticket on
    another connection takes it over; a `Wait` on this one waits for the next turn.
    """

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

Reply: TypeAlias = Refusal | Granted | Enqueued | TimedOut | YourTurn | Renewed | Aged | Report
