"""What a client does, step by step, without saying how bytes travel.

Each operation is a generator: it yields what to send, is resumed with the line that came back, and
returns the result. `dflockd.client.conversation.talk` goes through them, so every rule of the client
side is written once. (psycopg 3 is built this way.)

A `Target` has what the server at the other end knows beyond the published protocol. What it does not
know is not sent: an operation raises `UnsupportedError` instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from dflockd import __version__, errors
from dflockd.address import Address, parse_server
from dflockd.client.introduction import ANONYMOUS, Introduction, instance, new
from dflockd.wire import (
    FEATURES,
    GRANTED,
    MAX_SECONDS,
    Acquire,
    Aged,
    Auth,
    DrawAge,
    Enqueue,
    Enqueued,
    Evict,
    FairGroup,
    Find,
    Granted,
    Hello,
    How,
    Inspect,
    Listen,
    Moved,
    Next,
    OwnerConflict,
    Pass,
    Pause,
    Ping,
    Queued,
    Rate,
    Recovering,
    Renew,
    Renewed,
    Report,
    Request,
    Reserve,
    Resume,
    Shards,
    Space,
    Stats,
    Status,
    Superseded,
    TimedOut,
    Unbegun,
    UnexpectedReplyError,
    Unwelcome,
    Wait,
    Welcome,
    YourTurn,
    decode_map,
    encode_release,
    encode_request,
    parse_aged,
    parse_done,
    parse_enqueued,
    parse_granted,
    parse_hello,
    parse_map,
    parse_renewed,
    parse_report,
    parse_turn,
    read_grant,
    read_json,
)

SEARCH_PATIENCE = 60.0
"""Seconds for the answer to a search, which is looked for between the requests of others."""

REPLY_PATIENCE = 10.0
"""Seconds that a server may take over a reply that comes at once, where the caller sets no time."""

GRACE = 2.0
"""Seconds beyond a caller's time for a server to be reached and to answer: then it is an error.

Only a server can say that the lock is somebody else's. One that says nothing has not said so.
"""


def give_up_at(timeout: float | None, now: float) -> float | None:
    """Return when a request with so many seconds is given up."""
    return None if timeout is None else now + timeout + GRACE


ROUNDING = 0.05
"""A time that is so little short of whole seconds is waited for as if it were whole."""

SHARDS_PATIENCE = 2.0
"""Seconds that a server may take to say where the shards are: the others know as well."""

PING_PATIENCE = 1.0
"""Seconds that a server may take to give a sign of life."""

CONFIRM_SHARE = 0.25
"""A wait that took more than this share of the lease is followed by a renewal; see `_confirmed`."""


class Exchange(NamedTuple):
    """One request to send and one reply to wait for."""

    request: bytes
    patience: float | None
    """Seconds to wait for the reply; ``None`` waits forever."""
    timeout_is_reply: bool = False
    """Whether running out of time counts as the reply ``timeout`` and not as a fault, because a
    server has said that somebody else has the lock."""
    waits: bool = False
    """Whether the server may be right to say nothing for a while: the lock is not free."""


class TimedReply(NamedTuple):
    """One reply, with the times at which its request left and it came."""

    line: bytes
    sent: float
    received: float


@dataclass(slots=True)
class Progress:
    """How far a waiter has come: it goes with it from one server of a cluster to the next."""

    place: bytes = b""
    """The ticket that the last server has named."""
    granted: Granted | None = None
    """A grant that was not confirmed yet when the lock's shard moved."""
    keep: Reserve | None = None
    """The reservation of the position if the wait ends without a grant."""
    kept: bytes = b""
    """The ticket of the position, once it is reserved."""


class Target(NamedTuple):
    """What an operation is about."""

    space: Space
    """Whether it is a lock or a semaphore for a server that knows the published protocol alone."""
    key: bytes
    limit: int
    lease: int | None
    server: str
    introduction: Introduction = ANONYMOUS
    """The owner and the label of the client that asks."""
    progress: Progress | None = None
    """Of a waiter that has a position with a ticket, or may get one."""
    rate: Rate | None = None
    """How many runs may begin in a while, if they may not at any time."""
    group: FairGroup | None = None
    """To which group it belongs, and how many slots it takes."""
    features: frozenset[bytes] = FEATURES
    """What its server knows beyond the published protocol."""

    @property
    def name(self) -> str:
        """The key as text."""
        return self.key.decode()

    @property
    def is_published(self) -> bool:
        """Whether its server knows nothing beyond the published protocol."""
        return b"slots" not in self.features

    def at(self, server: Address) -> Target:
        """Return the same, asked of this server."""
        return self._replace(server=str(server))

    def knowing(self, features: frozenset[bytes]) -> Target:
        """Return the same, asked of a server that knows these."""
        return self if features is self.features else self._replace(features=features)


def about_server(server: str) -> Target:
    """Return the target of a question that is about no key."""
    return Target(Space.LOCK, b"", 1, None, server)


class Grant(NamedTuple):
    """A slot that was granted."""

    token: bytes
    lease: int
    """Seconds."""
    deadline: float
    """Monotonic time at which it ends unless renewed: the request's departure plus the lease."""


_LOCK: Final = Space.LOCK
"""To get it from its class takes Python 3.11 as long as to encode a request."""

DONE: Final = Status.OK.value
"""The reply to a request, such as a `release`, that says no more than that."""

REFUSED: Final = Status.ERROR.value
"""The reply to a request that cannot be."""

R = TypeVar("R")
M = TypeVar("M")
Operation: TypeAlias = Generator[Exchange, TimedReply, R]


def acquire(target: Target, timeout: float | None) -> Operation[Grant | None]:
    """Wait up to `timeout` seconds for a slot (``None``: as long as it takes); ``None`` without.

    A wait that the client ends itself begins with an attempt that does not wait. Its answer comes
    at once, and says that somebody else has the lock. A waiter with a position would lose it that
    way, and so would one that is to keep it, so they wait for whole seconds instead.

    Raises:
        UnsupportedError: the server does not know what is asked for.
    """
    start: float | None = None
    remaining = _rounded(target, timeout)
    grant = (yield from _confirmed_elsewhere(target)) if target.progress is not None else None
    if grant is not None:
        return grant
    is_told = False
    while True:
        is_attempt = _is_attempt(remaining) and not is_told
        answer = yield _acquiring(target, remaining, is_attempt=is_attempt)
        reply = _read(parse_granted, answer, target)
        if isinstance(reply, TimedOut) and target.progress is not None:
            target.progress.kept = reply.ticket
            return None
        is_told = reply is Status.TIMEOUT
        if is_told and not is_attempt:
            return None
        if not is_told:
            if not isinstance(reply, Granted):
                raise _not_granted(reply, target)
            grant = yield from _confirmed(target, reply, answer)
            if grant is not None:
                return grant
            # This process was stopped for so long that the lease ended before it learned of the
            # grant. What was said before is out of date, so it is asked again also at the end.
        start = answer.sent if start is None else start
        if timeout is not None:
            remaining = max(0, timeout - (answer.received - start))
            if is_told and not remaining:
                return None


def to_acquire(target: Target, timeout: float | None) -> Exchange:
    """Return the first request of an `acquire`."""
    remaining = _rounded(target, timeout)
    return _acquiring(target, remaining, is_attempt=_is_attempt(remaining))


def _rounded(target: Target, timeout: float | None) -> float | None:
    """Return the seconds to wait: whole ones if a position goes along."""
    if timeout is None or target.progress is None:
        return timeout
    is_kept = _ticket_of(target) or _reserve_of(target) is not None
    return math.ceil(timeout) if is_kept else timeout


def _is_attempt(remaining: float | None) -> bool:
    """Whether to ask at first without waiting: the client ends the wait itself."""
    return remaining is not None and not _is_whole_seconds(remaining)


def _acquiring(target: Target, remaining: float | None, *, is_attempt: bool) -> Exchange:
    seconds, patience, is_reply, waits = _waiting(0 if is_attempt else remaining)
    reserve = None if is_attempt else _reserve_of(target)
    request = encode_request(_acquire(target, seconds, reserve))
    return new(Exchange, (request, patience, is_reply, waits))


def _acquire(target: Target, seconds: int, reserve: Reserve | None) -> Acquire:
    if target.features is not FEATURES:
        _check(target)
        if target.is_published:
            return Acquire(target.space, target.key, target.limit, seconds, target.lease)
    label, owner = target.introduction
    said = target.rate, owner, label, target.group, _ticket_of(target), reserve
    return new(Acquire, (Space.LOCK, target.key, target.limit, seconds, target.lease, *said))


def _enqueue(target: Target, turn: int | None = None) -> Enqueue:
    if target.features is not FEATURES:
        _check(target)
        if turn is not None and b"turns" not in target.features:
            raise unsupported(target, "turns", "wait for the lock in the slot")
        if target.is_published:
            return Enqueue(target.space, target.key, target.limit, target.lease)
    label, owner = target.introduction
    said = target.rate, owner, label, target.group, _ticket_of(target), turn
    return new(Enqueue, (Space.LOCK, target.key, target.limit, target.lease, *said))


def _check(target: Target) -> None:
    """Refuse what the server does not know. A label, and an owner without an age, are left out.

    Raises:
        UnsupportedError: it cannot be asked of it.
    """
    if target.rate is not None and b"rates" not in target.features:
        raise unsupported(target, "rates", "remove the rate")
    if target.group is not None:
        name, _, weight = target.group
        if name and b"groups" not in target.features:
            raise unsupported(target, "groups", f"remove the group {name.decode()!r}")
        if weight > 1 and b"weights" not in target.features:
            raise unsupported(target, "weights", "remove the weight")
    owner = target.introduction.owner
    if owner is not None and owner.age:
        _check_ages(target)


def _check_ages(target: Target) -> None:
    if b"ages" not in target.features:
        remedy = "use another lock_conflict than 'supersede'"
        raise unsupported(target, "which task is the newest", remedy)


def _ticket_of(target: Target) -> bytes:
    """Return the ticket of the position that is taken up; empty without."""
    return b"" if target.progress is None else target.progress.place


def _reserve_of(target: Target) -> Reserve | None:
    """Return how the position should be kept, if it should and the server can."""
    if target.progress is None or target.is_published:
        return None
    return target.progress.keep


def enqueue(target: Target, _timeout: float | None = None) -> Operation[Grant | None]:
    """Take a position in the queue; return the grant if a slot was free. The caller limits its time.

    Raises:
        UnsupportedError: the server does not know what is asked for.
    """
    grant = (yield from _confirmed_elsewhere(target)) if target.progress is not None else None
    if grant is not None:
        return grant
    answer = yield to_enqueue(target)
    reply = _read(parse_enqueued, answer, target)
    if reply is Status.QUEUED:
        return None
    if not isinstance(reply, Enqueued):
        raise _not_granted(reply, target)
    return _taken_up((yield from _confirmed(target, Granted(*reply), answer)), target)


def to_enqueue(target: Target, _timeout: float | None = None) -> Exchange:
    """Return the request of an `enqueue`."""
    return new(Exchange, (encode_request(_enqueue(target)), REPLY_PATIENCE, False, False))


def line_up_patience(timeout: float | None) -> float:
    """Return the seconds for the answer to an `enqueue`, of a lock that is given so many."""
    return REPLY_PATIENCE if timeout is None else min(REPLY_PATIENCE, timeout + GRACE)


def wait(target: Target, timeout: float | None) -> Operation[Grant | None]:
    """Wait up to `timeout` seconds for the grant to an earlier `enqueue` on this connection.

    A reserved position must not be cut off, so its time is rounded up to whole seconds. Any other
    wait that the client ends itself begins with a sign of life from the server. The waiter knows
    that somebody else had the lock when it queued, but that may be long ago.
    """
    progress = target.progress
    if timeout is not None and _reserve_of(target) is not None:
        timeout = math.ceil(timeout)
    if timeout is not None and not _is_whole_seconds(timeout):
        alive = yield Exchange(encode_request(Ping()), timeout + GRACE)
        timeout = max(0, timeout - (alive.received - alive.sent))
    answer = yield _waiting_for(target, timeout)
    reply = _read(parse_granted, answer, target)
    if reply is Status.TIMEOUT:
        return None
    if isinstance(reply, TimedOut) and progress is not None:
        progress.kept = reply.ticket
        return None
    if not isinstance(reply, Granted):
        raise _not_granted(reply, target)
    return _taken_up((yield from _confirmed(target, reply, answer)), target)


def _waiting_for(target: Target, timeout: float | None) -> Exchange:
    seconds, patience, is_reply, waits = _waiting(timeout)
    if target.is_published:
        request = Wait(target.space, target.key, seconds)
    else:
        owner = target.introduction.owner
        age = 0 if owner is None else owner.age
        request = Wait(Space.LOCK, target.key, seconds, _reserve_of(target), age)
    return Exchange(encode_request(request), patience, is_reply, waits)


def line_up(target: Target, turn: int) -> Operation[bytes]:
    """Take a position that gets a turn and no grant; return its ticket.

    Args:
        target: what is waited for.
        turn: milliseconds for which a slot is set aside once the turn is there.

    Raises:
        UnsupportedError: the server does not know turns.
    """
    answer = yield from _asked(target, _enqueue(target, turn), parse_enqueued)
    if not isinstance(answer, Queued):
        raise _not_granted(answer, target)
    return answer.ticket


def stay(target: Target, timeout: int | None) -> Operation[bool]:
    """Wait for the end of a position on this connection, which gets a turn.

    Returns:
        Whether somebody has taken it up. If not, its time was over before its turn.
    """
    reply = _read(parse_granted, (yield _waiting_for(target, timeout)), target)
    if reply is Status.NOT_ENQUEUED:
        return True
    if isinstance(reply, TimedOut) and target.progress is not None:
        target.progress.kept = reply.ticket
    elif reply is not Status.TIMEOUT:
        raise _not_granted(reply, target)
    return False


def next_turn(target: Target) -> Operation[bytes]:
    """Wait until it is the turn of a position of this process; return its ticket."""
    exchange = Exchange(encode_request(Next()), None, waits=True)
    reply = _read(parse_turn, (yield exchange), target)
    if not isinstance(reply, YourTurn):
        raise refused(reply, target)
    return reply.ticket


def pass_on(target: Target, ticket: bytes) -> Operation[bool]:
    """Say that a turn could not be used; ``False`` if the position is no more."""
    return _is_done((yield from _asked(target, Pass(target.key, ticket), parse_done)), target)


def renew(
    target: Target, token: bytes, lease: int | None, *, has_begun: bool = False
) -> Operation[Grant | None]:
    """Start the lease anew; ``None`` if the slot is no longer held.

    It belongs to this connection from now on, whichever it was granted on. A server that has forgotten
    it learns whose it is.
    """
    request = renewal_request(target, token, lease, has_begun=has_begun, is_new=True)
    return read_renewal(target, token, (yield Exchange(request, REPLY_PATIENCE)))


def confirm(target: Target, token: bytes, lease: int | None) -> Operation[Grant | None]:
    """Start the lease anew of a slot that may be held no more; ``None`` if it is not.

    As `renew`, but it never brings back what a server has forgotten: for those who have not renewed
    it themselves all the time, so that others may have come after it.

    Raises:
        RefusedError: the server grants no lease that long.
    """
    if target.is_published:  # which bring nothing back
        request = Renew(target.space, target.key, token, lease)
    else:
        label = target.introduction.label
        request = Renew(Space.LOCK, target.key, token, lease, How.CONFIRM, None, label)
    exchange = Exchange(encode_request(request), REPLY_PATIENCE)
    while True:
        answer = yield exchange
        grant = read_renewal(target, token, answer)
        if grant is None and not target.is_published and answer.line == REFUSED:
            raise refused(Status.ERROR, target)  # of no such hold it says that the lease has ended
        if grant is None or answer.received < grant.deadline:
            return grant
        # It took longer than the lease is: whether it has begun anew is not known any more.


def detach(target: Target, token: bytes, lease: int, *, is_new: bool = False) -> Operation[bool]:
    """Start the lease anew and let the hold outlive this connection, whose it is no more.

    ``False`` if it is another's by now, or held no more.

    Args:
        target: what it is about.
        token: the token of the grant.
        lease: seconds.
        is_new: whether its connection is another one than before. To the server the hold belongs to
            that, which may be half open: so it is brought here before.

    Raises:
        UnsupportedError: the server does not know that.
    """
    if target.is_published:
        raise unsupported(target, "how to detach a hold", "release it")
    if is_new and (yield from renew(target, token, lease)) is None:
        return False
    request = _renew(target, token, lease, How.DETACH)
    reply = yield from _asked(target, request, parse_renewed)
    if isinstance(reply, Renewed):
        return True
    if reply is Status.LEASE_EXPIRED:
        return False
    raise refused(reply, target)


def take_back(target: Target, token: bytes) -> Operation[bool]:
    """Release a hold that may be detached; ``False`` if it is another's by now, or held no more."""
    # The server says no to the first if it is another's.
    return (yield from detach(target, token, 1)) and (yield from release(target, token))


def renewal_request(
    target: Target,
    token: bytes,
    lease: int | None,
    *,
    has_begun: bool = False,
    is_new: bool = False,
) -> bytes:
    """Return the bytes of a renewal, for those who wait for its answer in their own way.

    Args:
        target: what it is about.
        token: the token of the grant.
        lease: seconds.
        has_begun: whether it says that the run has begun, of a lock with a rate.
        is_new: whether its connection is another one than before: its server may have forgotten the
            hold, and is told whose it is.
    """
    if target.is_published:
        return encode_request(Renew(target.space, target.key, token, lease))
    if has_begun or is_new:
        how = How.BEGUN if has_begun else How.PLAIN
        return encode_request(_renew(target, token, lease, how))
    return encode_request(Renew(Space.LOCK, target.key, token, lease))


def _renew(target: Target, token: bytes, lease: int | None, how: How) -> Renew:
    label, owner = target.introduction
    return Renew(Space.LOCK, target.key, token, lease, how, owner, label, target.group)


def read_renewal(target: Target, token: bytes, answer: TimedReply) -> Grant | None:
    """Return what the answer to a `renewal_request` means."""
    reply = _read(parse_renewed, answer, target)
    if isinstance(reply, Renewed):
        # A server that rounds down may answer 0 for a lease of 1: it means no time at all.
        return Grant(token, reply.lease, answer.sent + reply.lease) if reply.lease else None
    if reply in (Status.ERROR, Status.LEASE_EXPIRED):
        return None
    raise refused(reply, target)


def give_back(target: Target, token: bytes) -> Operation[bool]:
    """Give the slot back of a run that never begins; ``False`` if it was no longer held."""
    return _given_back(target, encode_request(Unbegun(target.key, token)))


def release(target: Target, token: bytes) -> Operation[bool]:
    """Give the slot back; ``False`` if it was no longer held."""
    return _given_back(target, to_release(target, token))


def to_release(target: Target, token: bytes) -> bytes:
    """Return the request of a `release`."""
    is_ours = target.features is FEATURES or not target.is_published
    return encode_release(_LOCK if is_ours else target.space, target.key, token)


def _given_back(target: Target, request: bytes) -> Operation[bool]:
    answer = yield Exchange(request, REPLY_PATIENCE)
    if answer.line == DONE:
        return True
    reply = _read(parse_done, answer, target)
    if reply in (Status.ERROR, Status.LEASE_EXPIRED):
        return False
    raise refused(reply, target)


def greet(secret: bytes | None, server: str) -> Operation[frozenset[bytes] | None]:
    """Say hello, first thing on a connection, and show the shared secret with that if there is one.

    The caller limits the time: a server that stands still is waited for as in any other request.

    Returns:
        What the server knows beyond the published protocol; ``None`` if it does not know this request,
        and may hang up.

    Raises:
        AuthRefusedError: it wants another secret.
    """
    target, hello = about_server(server), Hello(instance(), __version__.encode(), secret)
    reply = yield from _asked(target, hello, parse_hello, None)
    if isinstance(reply, Welcome):
        return FEATURES if reply.features >= FEATURES else reply.features
    if isinstance(reply, Unwelcome):
        raise _unwelcome(reply.status, secret, target)
    if reply in (Status.ERROR, Status.AUTH):
        return None
    raise refused(reply, target)


def authenticate(secret: bytes, server: str) -> Operation[None]:
    """Show the shared secret to a server that knows the published protocol alone."""
    target = about_server(server)
    status = yield from _asked(target, Auth(secret), parse_done, None)
    if status is not Status.OK:
        raise _unwelcome(status, secret, target)


def _unwelcome(status: object, secret: bytes | None, target: Target) -> errors.RefusedError:
    if secret is None or status not in (Status.ERROR, Status.AUTH):
        return refused(status, target)
    why = (
        "takes no auth token: remove yours"
        if status is Status.ERROR
        else "refused the auth token: set the one that it was started with"
    )
    return errors.AuthRefusedError(f"server {target.server} {why}", server=target.server)


def inspect(target: Target, space: Space = Space.LOCK) -> Operation[dict[str, Any]]:
    """Ask who holds the key and who waits for it; the semaphores of published clients are another."""
    reply = yield from _asked(target, Inspect(space, target.key), parse_report)
    return read_report(reply, target, holders="holders", waiters="waiters")


def find(target: Target, text: bytes, *, waiters: bool, notes: bool) -> Operation[dict[str, Any]]:
    """Ask for keys, holders and waiters with a text in them."""
    request = Find(text, waiters, notes)
    reply = yield from _asked(target, request, parse_report, SEARCH_PATIENCE)
    if reply is Status.ERROR:
        raise unsupported(target, "searches")
    return read_report(reply, target, found="what was found")


def stats(target: Target) -> Operation[dict[str, Any]]:
    """Ask what the server holds."""
    return read_report((yield from _asked(target, Stats(), parse_report)), target)


def read_report(reply: object, target: Target, **lists: str) -> dict[str, Any]:
    """Return what a report says.

    Args:
        reply: it, or something else.
        target: what it is about.
        lists: which lists of objects it must have, and what they are of.

    Raises:
        BadReplyError: it is no JSON object, or lacks one of the lists.
        RefusedError: it is no report.
    """
    if not isinstance(reply, Report):
        raise refused(reply, target)
    try:
        report: dict[str, Any] = read_json(reply.json)
    except ValueError as exc:
        raise _bad_reply(target, f"its answer cannot be read: {exc}") from None
    for part, what in lists.items():
        listed = report.get(part)
        if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
            raise _bad_reply(target, f"its answer has no list of {what}")
    return report


def evict(target: Target, fence: int, space: Space = Space.LOCK) -> Operation[bool]:
    """End the hold with this fence without its token; ``False`` if it has ended already."""
    request = Evict(space, target.key, fence)
    return _is_done((yield from _asked(target, request, parse_done)), target)


def pause(target: Target, asked: Pause) -> Operation[None]:
    """Have nothing of a lock granted for a while.

    Raises:
        UnsupportedError: the server knows no pauses.
    """
    _check_pauses(target)
    if not _is_done((yield from _asked(target, asked, parse_done)), target):
        raise _no_pauses(target)


def resume(target: Target) -> Operation[bool]:
    """End the pause of a lock; ``False`` if it is not paused.

    Raises:
        UnsupportedError: the server knows no pauses.
    """
    _check_pauses(target)
    return _is_done((yield from _asked(target, Resume(target.key), parse_done)), target)


def _check_pauses(target: Target) -> None:
    if b"pauses" not in target.features:
        raise _no_pauses(target)


def _no_pauses(target: Target) -> errors.UnsupportedError:
    return unsupported(target, "pauses")


def draw_age(target: Target) -> Operation[int]:
    """Ask for a number that is larger than all before.

    Raises:
        UnsupportedError: the server knows no ages.
    """
    _check_ages(target)
    reply = yield from _asked(target, DrawAge(target.key), parse_aged)
    if isinstance(reply, Aged):
        return reply.age
    raise refused(reply, target)


def listen(target: Target, token: bytes) -> Operation[Superseded | None]:
    """Wait until a newer owner asks for what is held; ``None`` if it is not held any more."""
    request = encode_request(Listen(target.key, token))
    answer = yield Exchange(request, None, waits=True)
    reply = _read(parse_done, answer, target)
    if isinstance(reply, Superseded):
        return reply
    if reply in (Status.LEASE_EXPIRED, Status.ERROR):
        return None
    raise refused(reply, target)


def ping(_target: Target) -> Operation[None]:
    """Ask a server for a sign of life, which any answer is."""
    yield Exchange(encode_request(Ping()), PING_PATIENCE)


class ShardReport(NamedTuple):
    """Which server of a cluster has which shard, as one of them says."""

    servers: Sequence[Address]
    """All that live."""
    shards: Sequence[int]
    """For each shard the index of its server, -1 if it has none at the moment."""
    epochs: Sequence[int]
    """For each shard how new that is; see `dflockd.wire.Moved`."""
    version: bytes = b""
    """By which servers know it; empty if it came without."""


def shards(target: Target, known: ShardReport | None = None) -> Operation[ShardReport]:
    """Ask a server of a cluster which of them has which shard.

    Returns:
        `known` itself, if the server says the same. Else nothing is spent on sending and reading it.
    """
    server = target.server
    version = b"" if known is None else known.version
    request = Shards(version, packed=True)
    reply = yield from _asked(target, request, parse_map, SHARDS_PATIENCE)
    if reply is Status.OK and known is not None and version:
        return known
    if reply is Status.ERROR:
        raise errors.RefusedError(
            f"server {server} is not in a cluster: start it with --cluster, "
            f"or give a list, servers=['{server}']",
            server=server,
        )
    if not isinstance(reply, Report):
        raise refused(reply, target)
    try:
        found = _read_map(reply)
    except (ValueError, KeyError, TypeError) as exc:
        raise _bad_reply(target, f"its list of shards cannot be read: {exc}") from None
    return found


def _read_map(reply: Report) -> ShardReport:
    report, version = decode_map(reply)
    if type(report["servers"]) is not list or set(map(type, report["servers"])) - {str}:
        raise ValueError("its servers are no list of texts")
    servers = [parse_server(each) for each in report["servers"]]
    found = ShardReport(servers, report["shards"], report["epochs"], version)
    if not found.shards or len(found.shards) != len(found.epochs):
        raise ValueError("not one epoch for each shard")
    if set(map(type, found.shards)) | set(map(type, found.epochs)) != {int}:
        raise ValueError("a number is missing")
    if min(found.shards) < -1 or max(found.shards) >= len(found.servers):
        raise ValueError("a server that is not listed")
    return found


def _waiting(timeout: float | None) -> tuple[int, float | None, bool, bool]:
    """Return the seconds to ask the server for, and the other fields of the `Exchange`.

    The wire knows whole seconds only. A time in between is cut off on this side, which costs the
    connection: a server could still grant on it. So a server must have said before that the lock is
    not free: here nobody says so.
    """
    if timeout is None:
        return MAX_SECONDS, None, False, True
    seconds = min(math.ceil(timeout), MAX_SECONDS)
    if _is_whole_seconds(timeout):
        return seconds, seconds + GRACE, False, seconds > 0
    return seconds, timeout, True, True


def _is_whole_seconds(seconds: float) -> bool:
    return math.ceil(seconds) - seconds <= ROUNDING


def _confirmed(target: Target, granted: Granted, answer: TimedReply) -> Operation[Grant | None]:
    """Return the grant with a deadline that can be trusted, or ``None`` if its lease has ended.

    The lease began at the server at some time between the departure of the request and the arrival
    of the reply. The departure is the safe assumption, and fine after a short wait. After a long one
    it would leave little of the lease or nothing, so a renewal finds out: its answer comes at once.
    """
    token, lease = granted
    if answer.received - answer.sent <= lease * CONFIRM_SHARE:
        return Grant(token, lease, answer.sent + lease)
    if target.progress is not None:
        target.progress.granted = granted
    return (yield from _confirmation(target, granted))


def granted_at_once(
    line: bytes, sent: float, received: float, word: bytes = GRANTED
) -> tuple[bytes, int, float] | None:
    """Return the fields of the `Grant` that the answer to an `acquire` is, if that is all it says.

    Or to an `enqueue`, where that is the `word` for it.

    ``None`` is for all else, which only the operation itself can tell.
    """
    try:
        granted = read_grant(line, word)
    except UnexpectedReplyError:
        return None
    if granted is None:
        return None
    token, lease = granted
    if received - sent > lease * CONFIRM_SHARE:
        return None
    return token, lease, sent + lease


def _confirmed_elsewhere(target: Target) -> Operation[Grant | None]:
    """Return the grant of another server that was about to be confirmed, if it still is one."""
    if target.progress is None or target.progress.granted is None:
        return None
    return (yield from _confirmation(target, target.progress.granted))


def _confirmation(target: Target, granted: Granted) -> Operation[Grant | None]:
    grant = yield from confirm(target, *granted)
    if target.progress is not None:
        target.progress.granted = None
    return grant


def _taken_up(grant: Grant | None, target: Target) -> Grant:
    if grant is None:
        raise refused(Status.LEASE_EXPIRED, target)
    return grant


def _asked(
    target: Target,
    request: Request,
    parse: Callable[[bytes], M],
    patience: float | None = REPLY_PATIENCE,
) -> Operation[M]:
    """Ask something that is answered at once."""
    return _read(parse, (yield Exchange(encode_request(request), patience)), target)


def _is_done(reply: object, target: Target) -> bool:
    if reply in (Status.OK, Status.ERROR):
        return reply is Status.OK
    raise refused(reply, target)


def _read(parse: Callable[[bytes], M], answer: TimedReply, target: Target) -> M:
    try:
        return parse(answer.line)
    except UnexpectedReplyError as exc:
        raise _bad_reply(target, f"{exc}: is a dflockd server listening there?") from None


_REFUSALS: dict[Status, tuple[type[errors.RefusedError], str]] = {
    Status.ERROR: (errors.RefusedError, "the server refused the request (is the lease too long?)"),
    Status.AUTH: (errors.AuthRefusedError, "the server requires an auth token: set auth_token"),
    Status.MAX_LOCKS: (errors.MaxLocksError, "the server has reached its --max-locks keys"),
    Status.MAX_WAITERS: (errors.MaxWaitersError, "the key has reached --max-waiters waiters"),
    Status.MAX_HOLDS: (
        errors.MaxHoldsError,
        "--max-holds is reached, by this connection or by the key's holders",
    ),
    Status.MAX_RATES: (errors.MaxRatesError, "all rates together reach --max-rate-runs"),
    Status.RATE_WINDOW: (
        errors.RefusedError,
        "the window of its rate is longer than --max-rate-window",
    ),
    Status.LIMIT_MISMATCH: (errors.LimitMismatchError, "it is in use with another limit"),
    Status.LEASE_EXPIRED: (errors.LeaseExpiredError, "its lease ended before it was taken up"),
    Status.NOT_ENQUEUED: (errors.LeaseExpiredError, "its lease ended before it was taken up"),
    Status.DRAINING: (errors.DrainingError, "the server is shutting down"),
}

_WHY = {
    b"": "grants nothing at the moment",
    b"cut off": "is cut off from etcd, and grants and renews nothing",
    b"closed": "is about to end, because etcd was wiped or restored from a backup",
}
"""What to say of the status of a server."""


def refused(reply: object, target: Target) -> errors.RefusedError:
    """Return the error for a reply that is not what was hoped for."""
    cls, text = (errors.RefusedError, f"unexpected answer {reply}")
    if isinstance(reply, Status) and reply in _REFUSALS:
        cls, text = _REFUSALS[reply]
        if reply is Status.LIMIT_MISMATCH:
            text = f"{text} than {target.limit}"
    elif isinstance(reply, Recovering):
        retry_s = reply.milliseconds / 1000
        return errors.RecoveringError(
            f"{_about(target)}: the server {_WHY.get(reply.status, _WHY[b''])}: try again in "
            f"{retry_s:g} s",
            retry_s=retry_s,
            key=target.name or None,
            server=target.server,
        )
    elif isinstance(reply, Moved):
        return _moved(reply, target)
    return cls(f"{_about(target)}: {text}", key=target.name or None, server=target.server)


def _not_granted(reply: object, target: Target) -> errors.RefusedError:
    """Return the error for such a reply to who wants a slot.

    He alone can have a rival of his own name. Then the connection is as good as before; elsewhere
    such an answer comes from something that is out of order.
    """
    if isinstance(reply, Superseded):
        by = reply.label.decode(errors="replace")
        newer = by or "somebody"
        return errors.SupersededError(
            f"{_about(target)}: {newer} is newer", by=by, key=target.name, server=target.server
        )
    if not isinstance(reply, OwnerConflict):
        return refused(reply, target)
    state = reply.state.decode()
    return errors.OwnerConflictError(
        f"{_about(target)}: attempt {reply.attempt} of the same owner is {state} already",
        state=state,
        attempt=reply.attempt,
        key=target.name or None,
        server=target.server,
    )


def unsupported(target: Target, what: str, remedy: str = "") -> errors.UnsupportedError:
    """Return the error for a server that lacks something.

    Args:
        target: what was asked for.
        what: the server does not know.
        remedy: to do without.
    """
    remedy = f"{remedy}, or upgrade it" if remedy else "upgrade it"
    return errors.UnsupportedError(
        f"{_about(target)}: the server does not know {what}: {remedy}",
        key=target.name or None,
        server=target.server,
    )


def _moved(reply: Moved, target: Target) -> errors.RefusedError:
    if target.progress is not None and reply.ticket:
        target.progress.place = reply.ticket
    to = reply.server.decode()
    try:
        parse_server(to)
    except errors.InvalidArgumentError as exc:
        raise _bad_reply(target, f"it was redirected to a bad address: {exc}") from None
    return errors.MovedError(
        f"{_about(target)}: its shard {reply.shard} is now on {to}: "
        "give servers='cluster://...' to follow it",
        shard=reply.shard,
        epoch=reply.epoch,
        to=to,
        place=reply.ticket.decode(),
        key=target.name or None,
        server=target.server,
    )


def _bad_reply(target: Target, text: str) -> errors.BadReplyError:
    about, key = _about(target), target.name or None
    return errors.BadReplyError(f"{about}: {text}", key=key, server=target.server)


def _about(target: Target) -> str:
    return f"lock {target.name!r} on {target.server}" if target.key else f"server {target.server}"
