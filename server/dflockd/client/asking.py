"""How a session asks: at the server in charge of its key, wherever that is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

from dflockd import errors
from dflockd.address import Address
from dflockd.client import clock, flows, operations
from dflockd.client.flows import Links
from dflockd.client.lease import SILENCE, Lease
from dflockd.client.operations import (
    GRACE,
    Detour,
    Operation,
    Progress,
    Target,
)
from dflockd.client.routing import Ask, Path, ShardMap, pursue
from dflockd.client.steps import SILENT, Flow, Hear, Link, Open, Route, Signal, Talk

ANSWER_PATIENCE = 5.0
"""Seconds for servers to answer what is no waiting for a lock: a shard may be on its way."""

R = TypeVar("R")

Begin: TypeAlias = Callable[[Target, float | None], Operation[R]]

Tell: TypeAlias = Callable[[Target, bool], Operation[R]]
"""An operation about what is held; and whether its connection is another one than before."""


class Background(Protocol):
    """What goes on without the caller, as far as sessions go. None of these calls waits."""

    def keep(self, lease: Lease) -> None:
        """Renew it until it ends."""

    def renew(self, lease: Lease) -> None:
        """Renew it now: somebody waits for that."""

    def report(self, lease: Lease) -> None:
        """Renew it when its beginning must be reported."""

    def forget(self, lease: Lease) -> None:
        """Its owner has ended it."""

    def release_later(self, lease: Lease) -> None:
        """Release it once its server can be reached."""

    def take_back(self, lease: Lease) -> None:
        """Free a hold that was meant for another process, unless that has adopted it."""

    def cannot_be_awaited(self) -> bool:
        """Whether the caller would wait for itself, or for a thread that stands still by now."""


class Home(Protocol):
    """What the sessions of one process share."""

    @property
    def pool(self) -> Links:
        """Idle connections."""

    @property
    def reactor(self) -> Background:
        """What goes on without the caller."""


class Asker:
    """What a session has to do with servers. The session makes the fields, all at once."""

    lease: Lease | None = None
    asking: Link | None = None
    """The connection of the request under way."""
    telling: Link | None = None
    """As `asking`, for a request about what is held: `cancel` does not end it."""
    is_cancelled = False
    target: Target
    route: Route
    shards: ShardMap | None
    _home: Callable[[], Home]
    _owner: dict[str, object]
    """Whose call made the object its own: one only, by a single operation of the dict."""

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
        links, target = self._home().pool, self.target
        if self.shards is None:
            return (yield from flows.ask(links, self.route, operation, target, ANSWER_PATIENCE))

        def attempt(step: Ask) -> Flow[R]:
            route, there = self.route.at(step.server), target.at(step.server)
            return flows.ask(links, route, operation, there, GRACE)

        path = self._path(self.shards, ANSWER_PATIENCE)
        return (yield from flows.walk(links, path, self.route, attempt))

    def _begin(self, begin: Begin[R], timeout: float | None) -> Flow[R]:
        """Run an operation at the server in charge; `asking` is then the connection to it."""
        if self.shards is None:
            until = operations.give_up_at(timeout, clock.now())
            return self._ask(begin, timeout, None, until, None)
        return self._follow(self.shards, begin, timeout, None, Progress())

    def _follow(
        self,
        shards: ShardMap,
        begin: Begin[R],
        timeout: float | None,
        link: Link | None,
        progress: Progress,
    ) -> Flow[R]:
        """Run an operation wherever in the cluster its key is.

        A connection that is given has a position: as long as it has, that is waited for.
        """
        links, is_queued = self._home().pool, link is not None
        owner = self._owner.get("by")
        until = operations.give_up_at(timeout, clock.now())

        def look(is_waiting: bool) -> Flow[float]:
            return self._look(shards, self.route, is_waiting, until)

        def attempt(step: Ask) -> Flow[R]:
            nonlocal is_queued
            if self._owner.get("by") is not owner:
                raise self._cancelled()
            link = self.asking
            if link is not None and (link.closed or link.route.address != step.server):
                self.asking, is_queued = None, False
                links.give(link)
                link = None
            self._go_to(step.server)
            was_queued = is_queued
            answer = yield from self._ask(going_on, step.timeout, link, until, look)
            is_queued = was_queued and isinstance(answer, errors.RecoveringError)
            return operations.raised(answer)

        def going_on(target: Target, timeout: float | None) -> Operation[R | Detour]:
            nonlocal is_queued
            start: Callable[..., Operation[Any]] = operations.wait if is_queued else begin
            is_queued = False
            return operations.kept(start(target._replace(progress=progress), timeout))

        path = self._path(shards, timeout, link)
        return (yield from flows.walk(links, path, self.route, attempt, self._pause))

    def _ask(
        self,
        begin: Begin[R],
        timeout: float | None,
        link: Link | None,
        until: float | None,
        look: flows.LookAgain | None,
    ) -> Flow[R]:
        """Run an operation on a connection of the pool, or on a new one if that has died there."""
        links, owner = self._home().pool, self._owner.get("by")
        if link is None:
            link = links.take(self.route) or (yield from self._open(until, owner))
        self.asking = link
        talk = Talk(link, begin(self._knowing(link), timeout), until)
        return (yield from self._ask_twice(begin, timeout, talk, look))

    def _ask_twice(
        self, begin: Begin[R], timeout: float | None, talk: Talk[R], look: flows.LookAgain | None
    ) -> Flow[R]:
        """Go through a talk on the connection of `asking`; once more if it has died in the pool."""
        links, owner, until = self._home().pool, self._owner.get("by"), talk.until
        link = talk.link
        try:
            if self.is_cancelled:
                raise self._cancelled()
            if look is None:
                return (yield talk)  # type: ignore[no-any-return]
            return (yield from flows.go_on(talk, look))
        except errors.UnreachableError:
            if self.is_cancelled:
                raise self._cancelled() from None
            if not link.pooled:
                raise
            # The other idle ones are most likely dead as well.
            links.clear(self.route)
            if until is not None and clock.now() >= until:
                raise
        # Nothing was granted that still is: a grant on the dead connection ended with it.
        if timeout is not None and until is not None:
            timeout = min(timeout, max(0, until - GRACE - clock.now()))
        self.asking = link = yield from self._open(until, owner)
        operation = begin(self._knowing(link), timeout)
        return (yield from self._talk(link, operation, until, look))

    def _open(self, until: float | None, owner: object) -> Flow[Link]:
        """Connect, unless the request is abandoned meanwhile."""

        def made(link: Link) -> None:
            if self._owner.get("by") is owner:
                self.asking = link
            if self.is_cancelled:
                link.interrupt()  # `cancel` may have looked for it before it was there

        try:
            link: Link = yield Open(self.route, self._open_until(until), made=made)
        except errors.UnreachableError:
            if self.is_cancelled:
                raise self._cancelled() from None
            raise
        if self._owner.get("by") is not owner:
            link.close()
            raise self._cancelled()
        return link

    def _open_until(self, until: float | None) -> float:
        """Return when to give up a server that does not say hello; in a cluster others know more."""
        until = math.inf if until is None else until
        return until if self.shards is None else min(until, clock.now() + flows.SILENCE)

    def _knowing(self, link: Link) -> Target:
        """Return the target for the server of a connection, and keep it so."""
        self.target = self.target.knowing(link.features)
        return self.target

    def _look(
        self, shards: ShardMap, route: Route, is_waiting: bool, until: float | None = None
    ) -> Flow[float]:
        """Look at a server of the cluster that has not answered yet."""
        return flows.look_at(self._home().pool, shards, self.target.key, route, is_waiting, until)

    def _talk(
        self, link: Link, operation: Operation[R], until: float | None, look: flows.LookAgain | None
    ) -> Flow[R]:
        try:
            if self.is_cancelled:
                raise self._cancelled()
            if look is None:
                return (yield Talk(link, operation, until))  # type: ignore[no-any-return]
            return (yield from flows.talk(link, operation, until, look))
        except errors.UnreachableError:
            if self.is_cancelled:
                raise self._cancelled() from None
            raise

    def _pause(self, seconds: float) -> Flow[None]:
        yield Hear(self._cancelling(), clock.now() + seconds)
        if self.is_cancelled:
            raise self._cancelled()

    # What is about a lock that is held.

    def _tell(self, operation: Tell[R], link: Link | None, timeout: float) -> Flow[tuple[R, Link]]:
        """Run an operation about what is held, on its connection or, if that broke, on a new one.

        `telling` is then the connection, as long as the caller stands on it.
        """
        until = clock.now() + timeout
        shards, links = self.shards, self._home().pool
        if shards is None:
            return (yield from self._tell_twice(operation, link, until))
        # Its server may have the lock after all, and would free it with this connection.
        self.telling = stood_on = link

        def attempt(step: Ask) -> Flow[tuple[R, Link]]:
            route, link = self._go_to(step.server), self.telling
            if link is None or link.closed or link.route.address != step.server:
                if link is not None and link is not stood_on:
                    link.close()
                self.telling = link = yield Open(route, self._open_until(until))
            told = operations.kept(operation(self._knowing(link), link is not stood_on))
            try:
                answer = yield from flows.talk(link, told, until, look)
            except errors.RemoteError:
                self._doubt()
                raise
            return operations.raised(answer), link

        def look(is_waiting: bool) -> Flow[float]:
            return self._look(shards, self.route, is_waiting, until)

        path = self._path(shards, timeout, link)
        try:
            return (yield from flows.walk(links, path, self.route, attempt))
        finally:
            if stood_on is not None and stood_on is not self.telling:
                stood_on.close()

    def _tell_twice(
        self, operation: Tell[R], first: Link | None, until: float
    ) -> Flow[tuple[R, Link]]:
        """Do so on a connection, and on another one if it breaks or its server says nothing.

        What is sent on the first may still be read. So it stays open until the second has answered,
        and if it answers then, the second has the last word: see `dflockd.client.renewal`.
        """
        on_first: Talk[R] | None = None
        if first is not None and not first.closed:
            self.telling = first
            on_first, now = Talk(first, operation(self._knowing(first), False), until), clock.now()
            on_first.look_at = now + min(SILENCE, (until - now) / 2)
            try:
                answer = yield on_first
            except errors.UnreachableError:
                self._doubt()
                if clock.now() >= until:
                    raise
                on_first = None
            else:
                if answer is not SILENT:
                    return answer, first
        try:
            self.telling = link = yield Open(self.route, until)
            answer = yield Talk(link, operation(self._knowing(link), True), until)
            if on_first is not None:
                on_first.look_at = clock.now() + SILENCE
                try:
                    is_silent = (yield on_first) is SILENT
                except errors.RemoteError:
                    self._doubt()  # the hold may have come to it again, and ended with it
                    is_silent = False
                if not is_silent:
                    answer = yield Talk(link, operation(self.target, True), until)
            return answer, link
        finally:
            if on_first is not None:
                on_first.link.close()

    def _doubt(self) -> None:
        """Take in that the connection has ended on which something about the hold was asked."""
        if self.lease is not None:
            self.lease.doubt()

    @property
    def _name(self) -> str:
        return self.target.name

    def _go_to(self, server: Address) -> Route:
        """Turn to a server of the cluster."""
        if self.target.server != str(server):
            self.route = self.route.at(server)
            self.target = self.target.at(server)
        return self.route

    def _path(self, shards: ShardMap, timeout: float | None, first: Link | None = None) -> Path:
        """Return how to come to the server in charge, in a cluster.

        Args:
            shards: the map of the cluster.
            timeout: seconds; ``None`` for no end.
            first: where to begin, if that is not closed.
        """
        now = clock.now()
        until = None if timeout is None else now + timeout
        server = None if first is None or first.closed else first.route.address
        return pursue(shards, self.target.key, until, now, first=server)

    def _cancelled(self) -> errors.AcquireCancelledError:
        return errors.AcquireCancelledError(
            f"waiting for lock {self._name!r} on {self.target.server} was cancelled",
            key=self._name,
            server=self.target.server,
        )
