"""What a client has of a lock that it holds."""

from __future__ import annotations

import logging
import math
import random
import weakref
from collections.abc import Callable
from typing import Final, Protocol

from dflockd import clock
from dflockd.client import forks
from dflockd.client.connection import Connection
from dflockd.client.flow import Signal
from dflockd.client.operations import Grant, Target
from dflockd.client.routing import Asks, Pursuit, ShardMap
from dflockd.errors import RefusedError
from dflockd.wire import fence_from_token

logger = logging.getLogger("dflockd.client")

# The system's: no new seed after a fork, and nothing taken from a seed that somebody has set.
_chance = random.SystemRandom()

RENEWAL_JITTER = 0.1
"""Renewals come earlier by up to this share, so that locks taken together do not renew together."""

TOGETHER = 0.05
"""Seconds between the times at which renewals are sent, where the jitter leaves room for that: so a
process that holds many locks, and their server, wake once for all that are due by then. Not more, for
the server has other requests in between."""

UNRENEWED: Final = "its lease ended unrenewed"
UNKNOWN: Final = "the server no longer knows it"
FAILED: Final = "its renewal failed for an unexpected error"

HELD: Final = "held"
DOUBTFUL: Final = "doubtful"
LOST: Final = "lost"
RELEASED: Final = "released"
ABANDONED: Final = "abandoned"


class Renewal(Signal):
    """A renewal that somebody asks the reactor for; fired when it is done, or the lease is over.

    Args:
        seconds: the seconds of the new lease; ``None`` for that which was granted.
    """

    __slots__ = ("is_granted", "is_refused", "seconds", "sent")

    def __init__(self, seconds: int | None) -> None:
        super().__init__()
        self.seconds = seconds
        self.sent = math.inf
        """When the first request went out that says so."""
        self.is_granted = False
        self.is_refused = False
        """Whether the server does not grant so many seconds."""


class Keeping(Protocol):
    """The flow of a reactor that looks after a lease, once there is one."""

    def resume(self, came: bool) -> None:
        """Let it go on: what it waits for is there, or is waited for no longer."""


class Lease:
    """One granted slot, from its grant to its end: released, handed over, or lost.

    The lease counts from before the request that began it was sent. Past its deadline the lock is
    lost, whatever the server says later: somebody else may hold it.

    Two parties use it: the owner of the lock, and the reactor, which alone renews it: the owner asks
    for a renewal with `ask`. The one that gets its connection from `take` may use it, and returns it
    with `put`: the owner takes it to end the lease. The one for whose claim `end` returns ``True`` ends
    it. All of these are single operations of a list or a dict, so that no signal handler and no
    finaliser can meet them half done.

    Once its `owner` is forgotten the lock ends with its connection, unless it has ended already.
    """

    is_away = False
    """Whether the reactor looks for another connection to renew it on: then nobody need wait for this
    one."""
    spares: tuple[Connection, ...] = ()
    """Other connections that may still be read from, so that the hold may belong to one of them. They
    are the reactor's."""
    renew_at = math.inf
    """When the next renewal should be sent, once `spread` has chosen that."""
    begun: bool | None = None
    """Whether its run has begun, of a lock with a rate."""
    report_at = math.inf
    """When to report that to its server; never once that is done."""
    shards: ShardMap | None = None
    why: str = ""
    """Why it is lost."""
    _shortened_at = -math.inf
    """When another length of the lease was asked for last."""
    _ends_from = math.inf
    """When it may be over because of that. An answer says that it is not."""
    _on_lost: Callable[[], object] | None = None
    _owner: object = None

    def __init__(
        self,
        target: Target,
        grant: tuple[bytes, int, float],
        link: Connection,
        renew_ratio: float,
        on_lost: Callable[[], object] | None = None,
        shards: ShardMap | None = None,
        owner: object = None,
    ) -> None:
        self.target = target
        if shards is not None:
            self.shards = shards
        self.token, self.lease, self.deadline = grant
        self.asked = self.lease
        """Seconds that a renewal asks for if nobody says more: those that were granted first. (A server
        that answers with what is left of them would make them fewer and fewer.)"""
        self.link = link
        """The connection that the hold belongs to."""
        # What few leases ever have, too: Python 3.11 takes long to find what only the class has.
        self.task: Keeping | None = None
        """What looks after it."""
        self.settled: Signal | None = None
        """Fired once the doubt is over, one way or the other."""
        self.renewals: list[Renewal] = []
        """Those that are asked for and are still to be sent."""
        self._state = HELD
        self._forks = forks.count
        self._free = [link]
        self._end: dict[str, object] = {}
        """By whom or what it has ended, by a single operation: a claim, `LOST` or `ABANDONED`."""
        self.renew_ratio = renew_ratio
        """Share of the lease after which it is renewed."""
        if on_lost is not None:
            self._on_lost = on_lost
        if owner is not None:
            # Not by a finaliser of the owner: an exception that a signal handler raises in one is
            # ignored, and this way nothing runs at the end of most locks.
            self._owner = weakref.ref(owner, self._is_forgotten)

    def _is_forgotten(self, _owner: object) -> None:
        self.abandon()

    @property
    def is_ours(self) -> bool:
        """Whether this process has it: after a fork it is the parent's."""
        return self._forks == forks.count

    @property
    def state(self) -> str:
        """`HELD`, `DOUBTFUL`, `LOST`, `RELEASED` or `ABANDONED`."""
        if self._end:
            how = self._end["by"]
            return str(how) if how is LOST or how is ABANDONED else RELEASED
        return self._state if clock.now() < self.deadline else LOST

    @property
    def held(self) -> bool:
        """Whether the lock is certainly still ours. After a fork it is the parent's."""
        return self.is_held_at(clock.now())

    def is_held_at(self, now: float) -> bool:
        """Whether it is, at this time."""
        return (
            self._state is HELD
            and not self._end
            and now < self.deadline
            and self._forks == forks.count
        )

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to renew any more."""
        return bool(self._end)

    @property
    def left(self) -> float:
        """Seconds until the lease ends."""
        return max(0.0, self.deadline - clock.now())

    @property
    def fence(self) -> int | None:
        """The number of this grant, or ``None`` from a server older than 2.1."""
        try:
            return fence_from_token(self.token)
        except ValueError:
            return None

    # The connection.

    def take(self) -> Connection | None:
        """Return the connection, to be used by the caller alone; ``None`` while another has it."""
        try:
            return self._free.pop()
        except IndexError:
            return None

    def put(self, link: Connection) -> None:
        """Let others take the connection."""
        self._free.append(link)

    # What happens to it.

    def renewed(self, grant: Grant, link: Connection | None = None) -> bool:
        """Take in what a renewal has brought; ``False`` if it has come too late.

        It is good news then, but the owner may have seen already that the lease was over.

        Args:
            grant: the answer to the renewal.
            link: another connection, to which the hold belongs by now; others may take it.
        """
        if self._end or clock.now() >= self.deadline:
            return False
        self.lease = grant.lease
        if grant.deadline >= self._shortened_at + grant.lease:
            self._ends_from = math.inf
        self.deadline = min(grant.deadline, self._ends_from)
        self.spread()
        if link is not None:
            self.link = link
            self.is_away = False
            self._free.append(link)
        if self._state is DOUBTFUL:
            self._state = HELD
            self._settle()
        if link is not None and self._end and self.take() is not None:
            link.close()  # its owner has not waited for it
        return True

    def ask(self, renewal: Renewal) -> None:
        """Have it renewed by the reactor. Tell that next."""
        self.renewals.append(renewal)
        if self._end:  # who has ended it may not have seen this one
            self._settle()

    def next_renewal(self) -> Renewal | None:
        """Return one that is asked for, to be dealt with by the caller alone."""
        try:
            return self.renewals.pop(0)
        except IndexError:
            return None

    def poke(self, *, came: bool = False) -> None:
        """Have the reactor look at it now; in its thread.

        Not while it looks for another connection, to renew it there: what it waits for meanwhile would
        seem to be late.

        Args:
            came: whether something may have come on its connection.
        """
        if self.task is not None and (self._end or not self.is_away):
            self.task.resume(came)

    def shorten(self, seconds: int, now: float) -> None:
        """Take in that so short a lease is about to be asked for: it may begin with the request.

        The answer to an older request, which comes on another connection, does not make it longer.
        """
        self._shortened_at = now
        self._ends_from = min(self._ends_from, now + seconds)
        self.deadline = min(self.deadline, self._ends_from)

    def spread(self) -> None:
        """Choose when it is renewed: by chance, and then with others that are due about that time."""
        latest = self.deadline - self.lease * (1 - self.renew_ratio)
        early = self.lease * self.renew_ratio * RENEWAL_JITTER
        due = latest - early * _chance.random()
        self.renew_at = min(max(due - due % TOGETHER, latest - early), self.report_at)

    def begin(self, report_at: float) -> None:
        """Note that its run begins. A renewal will report that to its server."""
        self.report_at = report_at
        self.renew_at = min(self.renew_at, report_at)
        self.begun = True

    def doubt(self) -> None:
        """Take in that it is not certain any more: its connection broke."""
        if self._state is HELD:
            self.settled = Signal()
            self._state = DOUBTFUL

    def end(self, claim: object) -> bool:
        """End it for its owner, who releases it or hands it on; ``False`` if it has ended already.

        Args:
            claim: the claim of the call; `is_ended_by` knows it from then on.
        """
        if self._end.setdefault("by", claim) is not claim:
            return False
        self._owner = None
        if self.settled is not None or self.renewals:
            self._settle()
        return True

    def is_ended_by(self, claim: object) -> bool:
        """Whether that call has ended it."""
        return self._end.get("by") is claim

    def forget_claim(self) -> None:
        """Know no more which call has released it, for that knows it: nobody asks any more.

        So it is gone with its last user, and does not wait for the collector.
        """
        self._end["by"] = RELEASED

    def lose(self, why: str) -> None:
        """End it because it is lost, and tell the owner, unless it has ended otherwise.

        If this is interrupted it can be called again, and goes on.
        """
        if self._end.get("by", LOST) is not LOST:
            return
        # First: who sees in another thread that it is lost asks why, as a `renew` does.
        self.__dict__.setdefault("why", why)
        if self._end.setdefault("by", LOST) is not LOST:
            return
        self._owner = None
        self.link.close()  # the server may think otherwise: what it holds for us ends with it
        self._settle()
        me = object()
        if self.__dict__.setdefault("_told_by", me) is not me:
            return
        logger.warning("lock %r on %s is lost: %s", self.target.name, self.target.server, why)
        if self._on_lost is not None:
            self._on_lost()

    def forget(self, claim: object) -> bool:
        """Return whether that call is the first that puts a lost lease aside."""
        return self.__dict__.setdefault("_forgotten_by", claim) is claim

    def is_forgotten_by(self, claim: object) -> bool:
        """Whether that call has put it aside."""
        return self.__dict__.get("_forgotten_by") is claim

    def abandon(self) -> None:
        """Let the lock end with its connection: its owner was interrupted, or forgot it.

        From any thread, at any instant; nobody is told.
        """
        self._end.setdefault("by", ABANDONED)
        self._owner = None
        self.link.close()
        self._settle()

    def pursuit(self, asks: Asks, refusal: BaseException | None = None) -> Pursuit:
        """Return what finds the server in charge, until the lease ends.

        That is this one; in a cluster another may have taken its place.

        Args:
            asks: see `dflockd.client.routing.Pursuit`.
            refusal: what it said, if it did.
        """
        first = refused = None
        if self.shards is None:
            first = self.link.route.address
        elif isinstance(refusal, RefusedError):
            first, refused = self.link.route.address, refusal
        return Pursuit(
            self.shards,
            self.target.key,
            self.deadline,
            asks,
            first=first,
            refusal=refused,
            insists=True,
        )

    def _settle(self) -> None:
        if self.settled is not None:
            self.settled.fire()
        while self._end and (renewal := self.next_renewal()) is not None:
            renewal.fire()
