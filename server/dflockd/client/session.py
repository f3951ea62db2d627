"""The life of one lock, as flows: written once, for threads and for asyncio.

A session is in one of six states::

    free --> asking --> held <--> doubtful      renewed and rescued by the reactor
      ^        |  ^       |          |
      |        v  |       v          v
      |      queued     lost <-------+          its lease ended, or the server no longer knows it
      +--------+----------+------------         released, handed over, given up, or resumed

`TRANSITIONS` has them all. A session that asks or is queued has one connection, that of `asking` or
of `queued`; one that is held has a `Lease`, which has one. They are attributes before a request goes
out: a signal handler can raise an exception between any two instructions, and the code that catches
it calls `let_go`, which closes them. Variables would keep them open, and the lock held, for as long
as the traceback lives.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from dflockd import clock, errors
from dflockd.address import Address
from dflockd.client import forks, operations, outage
from dflockd.client.connection import Connection, Route
from dflockd.client.conversation import Heard, ask, talk
from dflockd.client.flow import Flow, Hear, Pause, Signal
from dflockd.client.frames import without_frames
from dflockd.client.lease import ABANDONED, DOUBTFUL, HELD, LOST, UNRENEWED, Lease, Renewal
from dflockd.client.operations import Exchange, Grant, Operation, Progress, Target
from dflockd.client.requester import ANSWER_PATIENCE, Begin, Requester
from dflockd.client.routing import RETRIED, ShardMap
from dflockd.wire import GRANTED

if TYPE_CHECKING:
    from dflockd.client.plan import Plan
    from dflockd.client.process import GreenProcess, Process

FREE: Final = "free"
ASKING: Final = "asking"
QUEUED: Final = "queued"

TRANSITIONS: Final = frozenset(
    {
        (FREE, ASKING),
        (ASKING, FREE),
        (ASKING, QUEUED),
        (ASKING, HELD),
        (QUEUED, ASKING),
        (QUEUED, FREE),
        (HELD, FREE),
        (HELD, DOUBTFUL),
        (HELD, LOST),
        (DOUBTFUL, HELD),
        (DOUBTFUL, LOST),
        (DOUBTFUL, FREE),
        (LOST, FREE),
        (LOST, ASKING),
    }
)
"""From which state a session may come to which."""

RELEASE_PATIENCE = 1.0
"""Seconds that a release waits for its server, or its shard, before it is left to the reactor."""

REACTOR_BUSY = 0.001
"""Seconds between looks at whether the reactor has done with the connection: it never waits with it."""

REACTOR_BUSY_AT_MOST = 1.0
"""Seconds after which that connection is done without: its thread stands still for some reason."""

R = TypeVar("R")

logger = logging.getLogger("dflockd.client")

First: TypeAlias = Callable[[Target, float | None], Exchange]
"""The first request of an operation, with its timeout, by nobody in particular."""

Give: TypeAlias = Callable[[Target, bytes], Operation[bool]]

Ending: TypeAlias = "tuple[Lease | None, dict[str, object]]"
"""The claim of a call that is to end what there is when it begins: a lease, or a position by its
`LockSession.waiter`. It is made without any call, so that nothing comes between."""


class LockSession(Requester):
    """One lock object's dealings with servers.

    Its flows are driven by the caller. After any exception, whatever it is, the caller of a flow that
    has a `claim` calls `let_go` with it; `give_up`, if it has an `Ending`.

    Args:
        target: what is asked for, and who asks.
        route: to the server; in a cluster, to begin with.
        renew_ratio: share of the lease after which it is renewed.
        shards: the map of the cluster; ``None`` without one.
        home: returns what the process shares.
        on_lost: returns what to call when the lease is lost, from whatever thread finds it out.
        plan: the plan of the lock, which remembers what an operation begins with; ``None`` for a
            lock that says more than its plan, of who asks.
    """

    queued: Connection | None = None
    """The connection on which a position is waited for, between `enqueue` and `wait`."""
    ticket: str | None = None
    """The ticket that a `wait` has left."""
    asked: Exchange
    """What the latest `ask` has asked for."""
    patience: float | None
    """For how many seconds the client waits for the reply to it; ``None`` for no end."""

    def __init__(
        self,
        target: Target,
        route: Route,
        renew_ratio: float,
        shards: ShardMap | None,
        home: Callable[[], Process | GreenProcess],
        on_lost: Callable[[], Callable[[], object]] | None = None,
        plan: Plan | None = None,
    ) -> None:
        self.target = target
        self.route = route
        self.shards = shards
        self._renew_ratio = renew_ratio
        self._home = home
        self.home = home()
        """Of this process, for those who have taken possession."""
        self._on_lost = on_lost
        self._plan = plan
        self._forks = forks.count
        """Of the process that uses it: after a fork what was before is the parent's."""
        self.is_cancelled = False
        self._owner = {}
        self.waiter: dict[str, object] = {}
        """The same for who waits for the position, or gives it up; a new one for each position."""

    # What it is.

    @property
    def state(self) -> str:
        """One of the six, as a word."""
        lease = self.lease
        if lease is not None and lease.is_ours:
            state = lease.state
            if state in (HELD, DOUBTFUL, LOST):
                return state
        if self.queued is not None and not self.queued.closed:
            return QUEUED
        return ASKING if self._owner and self._forks == forks.count and not lease else FREE

    @property
    def server(self) -> str:
        """The server of the key, as far as known."""
        if self.shards is None:
            return self.target.server
        asked = self.target if self.lease is None else self.lease.target
        return str(self.shards.owner_of(asked.key) or asked.server)

    def let_go(self, claim: object) -> None:
        """Close whatever this session stands on, if it is the claim's: its end frees the lock."""
        lease = self.lease
        if (
            self._owner.get("by") is claim
            or self.waiter.get("by") is claim
            or (lease is not None and (lease.is_ended_by(claim) or lease.is_forgotten_by(claim)))
        ):
            self.abandon()

    def give_up(self, claim: Ending) -> None:
        """Close whatever this session stands on, unless that is not what the claim was to end.

        Also if its call has not come to ending it.
        """
        lease, waiter = claim
        if lease is not None and lease.state != LOST:
            lease.end(claim)
        if self.queued is not None:
            waiter.setdefault("by", claim)
        self.let_go(claim)

    def take_back(self, claim: Ending) -> None:
        """Do so, and free the hold that was meant for another process: nobody has its token."""
        self.give_up(claim)
        lease, _ = claim
        if lease is not None and lease.is_ended_by(claim):
            self._home().reactor.end_later(lease, operations.take_back)

    def abandon(self) -> None:
        """Close whatever this session stands on, at any instant and in any thread."""
        # Its flows see that first: one whose connection ends would ask again on another.
        self._owner["by"] = ABANDONED
        # The lease before all else, and as long as it is an attribute: nobody takes what is held for
        # asked for.
        lease = self.lease
        if lease is not None:
            lease.abandon()
            self._home().reactor.forget(lease)
            self.lease = None
        for link in (self.asking, self.queued, self.telling):
            if link is not None:
                if self._forks == forks.count:
                    link.interrupt()  # else another thread that waits on it would wait on
                link.close()
        self.asking = self.queued = self.telling = None
        self.waiter = {}
        self._owner.clear()

    # What nearly all locks need, by straight calls: an idle connection, and a server that says yes. All
    # else is left to the flows, which are told how far it has come.

    def ask(
        self,
        claim: object,
        timeout: float | None,
        request: First = operations.to_acquire,
        progress: Progress | None = None,
    ) -> Connection | None:
        """Begin an `acquire` on an idle connection, and return that; ``None`` if there is none.

        Or an `enqueue`, by `operations.to_enqueue`. A position that is or was kept is in `progress`.
        """
        if self.shards is not None:
            return None
        if self._forks != forks.count or self._owner.setdefault("by", claim) is not claim:
            self._take_possession(claim)
        link = self.home.pool.take(self.route)
        if link is None:
            return None
        self.asking, self.ticket = link, None
        if self.is_cancelled:
            raise self._cancelled()
        if self._owner.get("by") is not claim:  # as `_stand_on` does, at less cost
            link.close()
            raise self._cancelled()
        features, plan = link.features, self._plan
        if features is not self.target.features:
            self._knowing(link)
        if progress is not None:
            first = request(self.target._replace(progress=progress), timeout)
        elif plan is None:
            first = request(self.target, timeout)
        else:
            of, time, to, first = plan.beginning
            if of is not request or time != timeout or to is not features:
                first = request(self.target, timeout)
                plan.beginning = request, timeout, features, first
        self.asked = first
        data, self.patience, _, _ = first
        link.ask(data, clock.now())
        return link

    def is_granted(
        self, claim: object, link: Connection, line: bytes, word: bytes = GRANTED
    ) -> bool:
        """Hold the lock if the reply to `ask` is its grant; ``False`` if a flow is to go on."""
        grant = operations.granted_at_once(line, link.asked_at, clock.now(), word)
        if grant is None:
            return False
        link.rested = False
        return self._settle(grant, claim)

    def hand_back(self, claim: Ending) -> Connection | None:
        """Begin a `release` of what is certainly held; return the connection, or ``None``."""
        lease, now = self.lease, clock.now()
        if lease is None or self.shards is not None or not lease.is_held_at(now):
            return None
        if not lease.end(claim):
            return None
        link = lease.take()
        if link is None:
            return None
        if link.closed or link.reader.owed:  # as `owes` says, at less cost
            lease.put(link)
            return None
        self.telling = link
        link.ask(operations.to_release(lease.target, lease.token), now)
        return link

    def is_released(self, link: Connection, line: bytes) -> bool:
        """Be free if the reply to `hand_back` says so; ``False`` if a flow is to go on."""
        if line != operations.DONE:
            return False
        self.telling = None
        lease = self.lease
        self._be_free()
        if lease is not None:
            lease.forget_claim()
        self.home.pool.give(link, link.asked_at)
        return True

    def is_certain(self) -> bool:
        """Return whether it is held, and nothing has come that may say otherwise; see `check`."""
        lease = self.lease
        return lease is not None and lease.held and not _has_news(lease)

    # Flows that begin something.

    def _begun(
        self,
        claim: object,
        begin: Begin[R],
        timeout: float | None,
        asked: Connection | None = None,
        reply: Heard = None,
        progress: Progress | None = None,
    ) -> Flow[R]:
        """Begin something, or go on with what `ask` has begun. For the arguments see `acquire`."""
        if progress is not None:
            begin = _with_progress(begin, progress)
        if asked is None:
            self._take_possession(claim)
            flow = self._begin(begin, timeout)
        else:
            if self._owner.get("by") is not claim:
                raise self._cancelled()
            until = operations.give_up_at(timeout, asked.asked_at)
            under_way = self.asked, asked.asked_at, reply
            flow = self._ask(begin, timeout, until, None, asked, under_way)
        self.ticket = None
        return self._in_order(claim, flow)

    def _in_order(self, claim: object, flow: Flow[R]) -> Flow[R]:
        """Be free after a refusal that leaves the connection as good as before."""
        try:
            return (yield from flow)
        except errors.IN_ORDER:
            self._settle(None, claim)
            raise

    def acquire(
        self,
        claim: object,
        timeout: float | None,
        asked: Connection | None = None,
        reply: Heard = None,
        progress: Progress | None = None,
    ) -> Flow[bool]:
        """Wait for the lock; ``False`` if it was not granted in time.

        Args:
            claim: the claim of the caller.
            timeout: seconds; ``None`` for no end.
            asked: the connection on which `ask` has asked for it already.
            reply: the reply that has come on it since.
            progress: how far the waiter has come that takes up a position, or is to keep one.
        """
        begun = self._begun(claim, operations.acquire, timeout, asked, reply, progress)
        grant = yield from begun
        if progress is not None:
            self.ticket = progress.kept.decode() or None
        return self._settle(grant, claim)

    def enqueue(
        self,
        claim: object,
        timeout: float | None,
        asked: Connection | None = None,
        reply: Heard = None,
        progress: Progress | None = None,
    ) -> Flow[bool]:
        """Take a position; ``True`` if the lock was granted at once. For arguments see `acquire`."""
        begun = self._begun(claim, operations.enqueue, timeout, asked, reply, progress)
        grant = yield from begun
        if grant is not None:
            return self._settle(grant, claim)
        self._line_up(self._own(claim))
        self._end_request()
        return False

    def wait(self, claim: Ending, timeout: float | None, progress: Progress) -> Flow[bool]:
        """Wait for the position to be served; ``False`` if it was not in time.

        Raises:
            NotEnqueuedError: there is none, or another thread waits for it.
        """
        if self._forks != forks.count or self.queued is None:
            raise self._not_enqueued()  # a position from before a fork is the parent's
        if self.waiter.setdefault("by", claim) is not claim:
            raise self._not_enqueued()
        owner, link = self._whose(), self.queued
        if link is None:
            raise self._not_enqueued()
        self._stand_on(link, owner)
        self.queued = link.guard = None
        # Its process may have asked again on another connection: then nothing is left here.
        grant = yield from self._in_order(owner, self._wait_on(link, timeout, progress))
        self.ticket = progress.kept.decode() or None
        return self._settle(grant, owner)

    def _wait_on(
        self, link: Connection, timeout: float | None, progress: Progress
    ) -> Flow[Grant | None]:
        if self.shards is not None:
            # It begins with the wait for this position.
            return self._follow(operations.acquire, timeout, link, progress)
        target = self._knowing(link)._replace(progress=progress)
        until = operations.give_up_at(timeout, clock.now())
        return self._talk(link, operations.wait(target, timeout), until, None)

    def adopt(self, claim: object, token: bytes) -> Flow[bool]:
        """Take over a hold by its token; ``False`` if it is no more."""

        def begin(target: Target, _: float | None) -> Operation[Grant | None]:
            return operations.confirm(target, token, target.lease)

        return self._settle((yield from self._begun(claim, begin, ANSWER_PATIENCE)), claim)

    @property
    def asked_first(self) -> Address:
        """The server to ask, as far as known."""
        if self.shards is None:
            return self.route.address
        return self.shards.whom_to_ask(self.target.key)

    def draw_age(self) -> Flow[int]:
        """Have the server give a number that is larger than all before.

        Raises:
            UnsupportedError: it does not know ages.
        """
        return self.question(operations.draw_age)

    # Turns, for those who keep many waiters in order: only on one connection, and what goes wrong is
    # theirs to deal with.

    def line_up(self, claim: object, progress: Progress, turn: int) -> Flow[bytes]:
        """Take a position that gets a turn and no grant; return its ticket.

        Raises:
            UnsupportedError: the server does not know turns.
        """

        def begin(target: Target, _: float | None) -> Operation[bytes]:
            return operations.line_up(target, turn)

        ticket = yield from self._begun(claim, begin, 0, progress=progress)
        self._line_up(self._own(claim))
        self._end_request()
        return ticket

    def stay(self, timeout: int | None, progress: Progress) -> Flow[bool]:
        """Wait for the end of the position; whether somebody has taken it up."""
        link, claim = self.queued, self._owner.get("by")
        assert link is not None
        look = None if self.shards is None else partial(self._look, None)
        target = self.target._replace(progress=progress)
        try:
            is_taken_up = yield from talk(link, operations.stay(target, timeout), None, look)
        except errors.IN_ORDER:
            self._leave_queue(claim)  # its process has asked again on another connection
            raise
        self.ticket = progress.kept.decode() or None
        self._leave_queue(claim)
        return is_taken_up

    def pass_on(self, route: Route, ticket: bytes) -> Flow[None]:
        """Say that the turn of the position could not be used; its own connection is not asked."""
        begin = partial(operations.pass_on, ticket=ticket)
        pool = self._home().pool
        yield from ask(pool, route, begin, self.target.at(route.address), ANSWER_PATIENCE)

    def _leave_queue(self, claim: object) -> None:
        """Be free: there is no position any more."""
        if self._owner.get("by") is claim:
            self.asking, self.queued = self.queued, None
        if self.asking is not None:
            self.asking.guard = None
        self._settle(None, claim)

    # Flows about what is held.

    def check(self) -> Flow[None]:
        """Return once it is certain that the lock is held.

        Raises:
            LockLostError: it is not, or that cannot be found out here and now.
        """
        while True:
            lease = self.lease
            if lease is None or not lease.is_ours:
                raise self._lost_error("is not held")
            state = lease.state
            if state == HELD:
                if not _has_news(lease):
                    return
            elif state != DOUBTFUL:
                raise self._lost_error("is lost")
            reactor = self._home().reactor
            if reactor.cannot_be_awaited():
                raise self._lost_error(
                    "is in doubt, and this thread cannot wait until it is certain"
                )
            if state == HELD:
                seen = Signal()
                reactor.read(lease, seen)
            else:
                assert lease.settled is not None
                seen = lease.settled
            yield Hear(seen, lease.deadline)

    def renew(self, seconds: int | None) -> Flow[bool]:
        """Have the reactor start the lease anew; ``False`` if it is lost.

        What is interrupted here is the waiting: the lock is as healthy as before.

        Raises:
            RefusedError: the server grants no lease that long.
            UnreachableError: no server has answered in time.
        """
        lease = self.lease
        if lease is None or not lease.is_ours or lease.state not in (HELD, DOUBTFUL):
            return False
        reactor = self._home().reactor
        if reactor.cannot_be_awaited():
            why = "this thread renews all locks, and would wait for itself"
            raise self._error(errors.LocalError, f" cannot be renewed here: {why}")
        renewal = Renewal(seconds)
        lease.ask(renewal)
        reactor.renew(lease)
        yield Hear(renewal, clock.now() + operations.REPLY_PATIENCE)
        if renewal.is_granted:
            return True
        if renewal.is_refused:
            why = "the server grants no lease that long. It is still held, for as long as before"
            raise self._error(errors.RefusedError, f" is not renewed for {seconds} s: {why}")
        if lease.is_over and lease.why != UNRENEWED:
            return False
        raise errors.UnreachableError(
            f"lock {self._name!r} on {self.server} was not renewed: no answer in time",
            key=self._name,
            server=self.server,
        )

    def detach(self, claim: Ending, seconds: int | None) -> Flow[str | None]:
        """Let the hold go on without this session; return its token, or ``None`` if it is over.

        Args:
            claim: the claim of the caller.
            seconds: its lease; ``None`` for that which was granted.
        """
        lease = self.lease
        if lease is None or not lease.is_ours:
            return None
        link = yield from self._taken(lease, None)
        if link is None:
            return None
        if not lease.end(claim):
            lease.put(link)  # for who has ended it
            return None
        self.telling = link
        asked = seconds or lease.asked
        detached, link = yield from self._tell(
            lambda target, is_new: operations.detach(target, lease.token, asked, is_new=is_new),
            link,
            lease.left,
        )
        self.telling = None
        self._be_free()
        if not detached:
            link.close()
            return None
        self._home().pool.give(link)
        return lease.token.decode()

    def lend(self, claim: Ending) -> str | None:
        """Renew the hold no more, so that another process may adopt it; return its token.

        It belongs to its connection until then. `abandon` closes that, and frees what nobody has
        adopted. No renewal is under way then: one that came later would take the hold back.

        Args:
            claim: the claim of the caller.

        Returns:
            ``None`` if that cannot be done at this instant, and nothing has changed.
        """
        lease = self.lease
        link = None if lease is None or not lease.is_held_at(clock.now()) else lease.take()
        if lease is None or link is None:
            return None
        if link.closed or link.owes() or lease.spares or not lease.end(claim):
            lease.put(link)
            return None
        self.telling = link
        self._home().reactor.forget(lease)
        return lease.token.decode()

    def release(
        self,
        claim: Ending,
        asked: Connection | None = None,
        reply: Heard = None,
        give: Give = operations.release,
    ) -> Flow[bool]:
        """Release the lock, or the position; ``False`` if it was no longer held.

        Args:
            claim: the claim of the caller.
            asked: the connection on which `hand_back` has begun to.
            reply: the reply that has come on it since.
            give: what is said; `operations.give_back` of a run that never begins.
        """
        is_queued = self.queued is not None and self._forks == forks.count
        if is_queued and self.waiter.setdefault("by", claim) is claim and self.queued is not None:
            self.queued.close()
            self.queued = None
            self._owner.clear()
            return False  # from here on another thread may acquire it
        lease = self.lease
        if lease is None or not lease.is_ours:
            return False
        if lease.state == LOST:
            logger.warning("lock %r on %s was lost before its release", self._name, self.server)
            lease.lose(UNRENEWED)
            if lease.forget(claim):
                self._be_free()
            return False
        if not lease.end(claim):
            return False  # another thread releases it
        # A caller of `renew` may have its answer while the reactor is still at the connection.
        link = (yield from self._taken(lease, claim)) if asked is None else asked
        under_way = None if asked is None else (asked.asked_at, reply)
        patience = min(lease.left, RELEASE_PATIENCE)
        try:
            released, link = yield from self._tell(
                lambda target, _: give(target, lease.token), link, patience, under_way
            )
        except errors.RemoteError as exc:
            released = False
            level = outage.level(self.server)
            # A program that collects log records keeps the error, and a frame in it would keep the
            # lock.
            failed = without_frames(exc)
            logger.log(level, "lock %r could not be released: %s", self._name, failed)
            if self.telling is not None:
                self.telling.close()
            if isinstance(exc, RETRIED):
                self._home().reactor.end_later(lease, operations.release)
            link = None
        self.telling = None
        self._be_free()
        if link is not None:
            # Not before: a caller that is interrupted closes the connection that this session
            # stands on.
            self._home().pool.give(link)
        return released

    # Whose it is.

    def _take_possession(self, claim: object) -> None:
        """Make the object this caller's.

        Raises:
            AlreadyHeldError: it is another's, or holds the lock, or waits for it.
        """
        if self._forks != forks.count:
            # What this object holds is the parent's. To release it in the child would let others in
            # while the parent works.
            self._owner = {}
            self.lease = self.queued = None
            self._forks = forks.count
            self.home = self._home()
        # One operation, which no other thread and no signal handler divides: of a look and a change
        # after it two callers could come out as owners.
        if self._owner.setdefault("by", claim) is claim:
            return
        lease = self.lease
        if lease is None or lease.state != LOST or not lease.forget(claim):
            remedy = "release it first, or make another object"
            raise self._error(
                errors.AlreadyHeldError, f" is already held or waited for by this object: {remedy}"
            )
        self._owner["by"] = claim
        lease.lose(UNRENEWED)
        self.lease = None

    def _be_free(self) -> None:
        lease = self.lease
        if lease is not None:
            # First: once this session knows it no more, nobody could say so after an interruption.
            self.home.reactor.forget(lease)
        # Without a call in between: an interruption there would leave it to nobody.
        self.lease = None
        self._owner.clear()

    # The parts of flows.

    def _own(self, claim: object) -> Connection:
        """Return the connection of the request under way, unless somebody has abandoned that."""
        link = self.asking
        if link is None or self._owner.get("by") is not claim:
            raise self._cancelled()
        return link

    def _line_up(self, link: Connection) -> None:
        """Stand in the queue on a connection, which ends once this session is forgotten."""
        link.guard = weakref.ref(self, lambda _: link.close())
        self.waiter = {}
        self.queued = link

    def _settle(self, grant: tuple[bytes, int, float] | None, claim: object) -> bool:
        """Do what follows from the end of a wait: hold the lock, or give the connection back."""
        link = self.asking
        if link is None or self._owner.get("by") is not claim:  # as `_own` does, at less cost
            raise self._cancelled()
        if grant is None:
            self._end_request()
            self._owner.clear()
            self._home().pool.give(link)
            return False
        on_lost = None if self._on_lost is None else self._on_lost()
        # First the lease, then the end of the request: wherever this is interrupted, one of the two
        # names the connection, and with that the hold can be ended.
        lease = self.lease = Lease(
            self.target, grant, link, self._renew_ratio, on_lost, self.shards, self
        )
        self.home.reactor.keep(lease)
        self._end_request()
        return True

    def _end_request(self) -> None:
        link, self.asking = self.asking, None
        # `cancel` sets its mark before it looks for a connection. Without the mark now, it finds none,
        # and never cuts a connection that is another lock's by then.
        if self.is_cancelled:
            if link is not None:
                link.close()
            raise self._cancelled()

    def _taken(self, lease: Lease, claim: object | None) -> Flow[Connection | None]:
        """Take the connection of a lease; ``None`` if it is over, or has none.

        Args:
            lease: the lease whose connection is taken.
            claim: the claim of the caller that has ended the lease: that one does not wait while the
                reactor looks for another connection. ``None`` for other callers, which wait for it. To
                give it up halfway would be to end a connection to which the hold may belong by now.
        """
        began = clock.now()
        while (link := lease.take()) is None:
            if lease.state == LOST or (lease.is_over and not lease.is_ended_by(claim)):
                return None
            if lease.is_away:
                if claim is not None:
                    return None
                if clock.now() - began > operations.REPLY_PATIENCE:
                    raise self._error(errors.UnreachableError, " is in doubt: no answer in time")
            elif lease.link.closed or clock.now() - began > REACTOR_BUSY_AT_MOST:
                return None
            if self._home().reactor.cannot_be_awaited():
                return None
            yield Pause(10 * REACTOR_BUSY if lease.is_away else REACTOR_BUSY)
        return link

    # Small things.

    def _not_enqueued(self) -> errors.NotEnqueuedError:
        text = ": wait() needs a position in the queue: call enqueue() first"
        return self._error(errors.NotEnqueuedError, text)

    def _lost_error(self, what: str) -> errors.LockLostError:
        return self._error(errors.LockLostError, f" on {self.target.server} {what}")


def _with_progress(begin: Begin[R], progress: Progress) -> Begin[R]:
    return lambda target, timeout: begin(target._replace(progress=progress), timeout)


def _has_news(lease: Lease) -> bool:
    """Whether something has come that the reactor has not seen: it may not have run for a while."""
    return not lease.is_away and lease.link.has_come()
