"""How a session asks: at the server in charge of its key, wherever that is."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from dflockd import clock, errors
from dflockd.address import Address
from dflockd.client import operations
from dflockd.client.connection import Connection, Route
from dflockd.client.conversation import (
    SILENCE,
    Heard,
    LookAgain,
    UnderWay,
    ask,
    asker,
    connect,
    talk,
)
from dflockd.client.flow import Flow, Hear, Signal
from dflockd.client.lease import ABANDONED, Lease
from dflockd.client.operations import GRACE, Operation, Progress, Target
from dflockd.client.routing import Pursuit, ShardMap, follow, pause

if TYPE_CHECKING:
    from dflockd.client.process import GreenProcess, Process

ANSWER_PATIENCE = 5.0
"""Seconds for servers to answer what is no waiting for a lock: a shard may be on its way."""

R = TypeVar("R")
E = TypeVar("E", bound=errors.DflockdError)

Begin: TypeAlias = Callable[[Target, float | None], Operation[R]]

Tell: TypeAlias = Callable[[Target, bool], Operation[R]]
"""An operation about what is held; and whether its connection is another one than before."""


class Requester:
    """What a session has to do with servers. The session makes the fields, all at once."""

    lease: Lease | None = None
    asking: Connection | None = None
    """The connection of the request under way."""
    telling: Connection | None = None
    """As `asking`, for a request about what is held: `cancel` does not end it."""
    is_cancelled: bool
    target: Target
    route: Route
    shards: ShardMap | None
    _home: Callable[[], Process | GreenProcess]
    _owner: dict[str, object]
    """Whose call made the object its own: one only, by a single operation of the dict. It is nobody's,
    but `ABANDONED`, while somebody closes what it stands on."""

    def cancel(self) -> None:
        """End the request of another thread; never undone. From a signal handler, too."""
        self.is_cancelled = True
        self._cancelling().fire()
        link = self.asking
        if link is not None:
            link.interrupt()

    def _cancelling(self) -> Signal:
        signal: Signal = self.__dict__.setdefault("_cancels", Signal())
        return signal

    # What begins something.

    def question(self, operation: Callable[[Target], Operation[R]]) -> Flow[R]:
        """Ask something that leaves nothing behind, whatever else this session is doing."""
        pool, target, route = self._home().pool, self.target, self.route
        if self.shards is None:
            return ask(pool, route, operation, target, ANSWER_PATIENCE)

        def attempt(server: Address, _: float | None) -> Flow[R]:
            return ask(pool, route.at(server), operation, target.at(server), GRACE)

        return follow(self._pursuit(ANSWER_PATIENCE), attempt)

    def _begin(self, begin: Begin[R], timeout: float | None) -> Flow[R]:
        """Run an operation at the server in charge; `asking` is then the connection to it."""
        if self.shards is None:
            return self._ask(begin, timeout, operations.give_up_at(timeout, clock.now()))
        return self._follow(begin, timeout, None, Progress())

    def _follow(
        self,
        begin: Begin[R],
        timeout: float | None,
        link: Connection | None,
        progress: Progress,
    ) -> Flow[R]:
        """Run an operation wherever in the cluster its key is.

        A connection that is given has a position: as long as it has, that is waited for.
        """
        pool, is_queued = self._home().pool, link is not None
        owner = self._whose()
        until = operations.give_up_at(timeout, clock.now())
        look = partial(self._look, until)

        def attempt(server: Address, timeout: float | None) -> Flow[R]:
            nonlocal is_queued
            if self._owner.get("by") is not owner:
                raise self._cancelled()
            link = self.asking
            if link is not None and (link.closed or link.route.address != server):
                if is_queued:
                    link.close()  # who refuses for a moment may keep the position, and serve it later
                else:
                    pool.give(link)
                self.asking, is_queued, link = None, False, None
            self._go_to(server)
            was_queued = is_queued
            try:
                return (yield from self._ask(going_on, timeout, until, look, link))
            except errors.RecoveringError:
                is_queued = was_queued
                raise

        def going_on(target: Target, timeout: float | None) -> Operation[R]:
            nonlocal is_queued
            start: Callable[..., Operation[Any]] = operations.wait if is_queued else begin
            is_queued = False
            return start(target._replace(progress=progress), timeout)

        return follow(self._pursuit(timeout, link, self._pause), attempt)

    def _ask(
        self,
        begin: Begin[R],
        timeout: float | None,
        until: float | None,
        look: LookAgain | None = None,
        link: Connection | None = None,
        under_way: UnderWay | None = None,
    ) -> Flow[R]:
        """Run an operation on a connection of the pool, or on a new one if that has died there.

        Args:
            begin: begins it.
            timeout: the time that this request has, in seconds.
            until: when no reply is waited for any more.
            look: to be done now and then while no reply comes.
            link: the connection, if one was chosen already.
            under_way: what has been asked on `link`.
        """
        pool, owner = self._home().pool, self._whose()
        link = link or pool.take(self.route)
        if link is not None:
            self._stand_on(link, owner)
            operation = begin(self._knowing(link), timeout)
            if under_way is not None:
                next(operation)  # that has been asked
            try:
                return (yield from self._talk(link, operation, until, look, under_way))
            except errors.UnreachableError:
                if not link.pooled:
                    raise
                # The other idle ones are most likely dead as well.
                pool.clear(self.route)
                if until is not None and clock.now() >= until:
                    raise
            # Nothing was granted that still is: a grant on the dead connection ended with it.
            if timeout is not None and until is not None:
                timeout = min(timeout, max(0, until - GRACE - clock.now()))
        link = yield from self._open(until, owner)
        operation = begin(self._knowing(link), timeout)
        return (yield from self._talk(link, operation, until, look))

    def _whose(self) -> object:
        """Return whose the request under way is, to see later whether it is abandoned."""
        owner = self._owner.get("by")
        if owner is None or owner is ABANDONED:
            raise self._cancelled()
        return owner

    def _stand_on(self, link: Connection, owner: object) -> None:
        """Make a connection that of the request under way, unless that is abandoned."""
        if self._owner.get("by") is owner:
            self.asking = link
        # Once more: who abandons it says so, and then closes the connection that is there.
        if self._owner.get("by") is not owner:
            link.close()
            raise self._cancelled()

    def _open(self, until: float | None, owner: object) -> Flow[Connection]:
        """Connect, unless the request is abandoned meanwhile."""

        def made(link: Connection) -> None:
            if self._owner.get("by") is owner:
                self.asking = link
            if self.is_cancelled:
                link.interrupt()  # `cancel` may have looked for it before it was there

        try:
            link = yield from connect(self.route, self._open_until(until), made=made)
        except errors.UnreachableError:
            if self.is_cancelled:
                raise self._cancelled() from None
            raise
        self._stand_on(link, owner)
        return link

    def _open_until(self, until: float | None) -> float:
        """Return when to give up a server that does not say hello; in a cluster others know more."""
        until = math.inf if until is None else until
        return until if self.shards is None else min(until, clock.now() + SILENCE)

    def _knowing(self, link: Connection) -> Target:
        """Return the target for the server of a connection, and keep it so."""
        self.target = self.target.knowing(link.features)
        return self.target

    def _look(self, until: float | None, is_waiting: bool) -> Flow[float]:
        """Look at the server of the cluster, which has not answered yet."""
        asks = asker(self._home().pool, self.route)
        pursuit = Pursuit(self.shards, self.target.key, until, asks, insists=True)
        return pursuit.glance(self.route.address, is_waiting)

    def _talk(
        self,
        link: Connection,
        operation: Operation[R],
        until: float | None,
        look: LookAgain | None,
        under_way: UnderWay | None = None,
    ) -> Flow[R]:
        try:
            if self.is_cancelled:
                raise self._cancelled()
            return (yield from talk(link, operation, until, look, under_way=under_way))
        except errors.UnreachableError:
            if self.is_cancelled:
                raise self._cancelled() from None
            raise

    def _pause(self, seconds: float) -> Flow[None]:
        yield Hear(self._cancelling(), clock.now() + seconds)
        if self.is_cancelled:
            raise self._cancelled()

    # What is about a lock that is held.

    def _tell(
        self,
        operation: Tell[R],
        link: Connection | None,
        timeout: float,
        under_way: tuple[float, Heard] | None = None,
    ) -> Flow[tuple[R, Connection]]:
        """End a hold on its connection; if that breaks or its server says nothing, on a new one.

        `telling` is then the connection, as long as the caller stands on it. What was sent on the first
        may still be read, before its end: it leaves the hold no connection's, or frees it. So neither
        that end nor the order in which a server reads from the two changes anything.

        Args:
            operation: ends it.
            link: its connection, if there is one.
            timeout: seconds.
            under_way: when that was asked already, and what has come since.
        """
        began = clock.now() if under_way is None else under_way[0]
        until = began + timeout
        self.telling = stood_on = link

        def attempt(server: Address, _: float | None) -> Flow[tuple[R, Connection]]:
            route, link = self._go_to(server), self.telling
            if link is None or link.closed or link.route.address != server:
                if link is not None:
                    link.close()
                self.telling = link = yield from connect(route, self._open_until(until))
            is_new, begun = link is not stood_on, None
            telling = operation(self._knowing(link), is_new)
            if not is_new and under_way is not None:
                begun = next(telling), *under_way
            limit = until if is_new else min(began + SILENCE, (began + until) / 2)
            return (yield from talk(link, telling, limit, under_way=begun)), link

        return follow(self._pursuit(until - clock.now(), link), attempt)

    @property
    def _name(self) -> str:
        return self.target.name

    def _go_to(self, server: Address) -> Route:
        """Turn to a server of the cluster."""
        if self.target.server != str(server):
            self.route = self.route.at(server)
            self.target = self.target.at(server)
        return self.route

    def _pursuit(
        self,
        timeout: float | None,
        link: Connection | None = None,
        pause: Callable[[float], Flow[None]] = pause,
    ) -> Pursuit:
        """Return what finds the server in charge.

        Args:
            timeout: seconds; ``None`` for no end.
            link: where to begin, if that is not closed.
            pause: waits for so many seconds.
        """
        until = None if timeout is None else clock.now() + timeout
        first = None if link is None or link.closed else link.route.address
        if self.shards is None:
            first = self.route.address
        asks = asker(self._home().pool, self.route)
        return Pursuit(self.shards, self.target.key, until, asks, first=first, pause=pause)

    def _cancelled(self) -> errors.AcquireCancelledError:
        name, server = self._name, self.target.server
        return errors.AcquireCancelledError(
            f"waiting for lock {name!r} on {server} was cancelled", key=name, server=server
        )

    def _error(self, kind: type[E], text: str) -> E:
        name = self._name
        return kind(f"lock {name!r}{text}", key=name, server=self.target.server)
