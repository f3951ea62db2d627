"""What the flows of locks, of the reactor and of operators have in common."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeAlias, TypeVar, cast

from dflockd import errors
from dflockd.client import clock
from dflockd.client.frames import without_frames
from dflockd.client.operations import (
    Operation,
    ShardReport,
    Target,
    about_server,
    ping,
    shards,
)
from dflockd.client.routing import Ask, Leg, Load, Path, ShardMap, SignOfLife, StepOutcome, glance
from dflockd.client.steps import SILENT, Flow, Link, Open, Pause, Route, Talk

SILENCE = 1.0
"""Seconds without an answer after which one looks, in a cluster, whether it can still come."""

R = TypeVar("R")

LookAgain: TypeAlias = Callable[[bool], Flow[float]]
"""Looks at a server that says nothing, and returns after how many seconds to look again, or raises
what ends the wait. Its argument says whether the server may be right to say nothing yet."""


class Links(Protocol):
    """The pool, as far as flows go."""

    def take(self, route: Route) -> Link | None:
        """Return an idle connection, if there is one."""

    def give(self, link: Link, since: float | None = None) -> None:
        """Take one back, which nobody has needed since that time; by default since now."""

    def clear(self, route: Route | None = None) -> None:
        """Close the idle ones."""


def talk(
    link: Link, operation: Operation[R], until: float | None = None, look: LookAgain | None = None
) -> Flow[R]:
    """Go through an operation on a link.

    Args:
        link: which is closed after any error.
        operation: it.
        until: when no reply is waited for any more.
        look: to be done now and then while no reply comes.

    Raises:
        RemoteError: as a `Talk` does, or what `look` has raised.
    """
    return go_on(Talk(link, operation, until), look)


def go_on(going_on: Talk[R], look: LookAgain | None) -> Flow[R]:
    """Go through a talk, which may have begun already; see `talk`."""
    link = going_on.link
    if look is None:
        return cast(R, (yield going_on))
    going_on.look_at = clock.now() + SILENCE
    while (answer := (yield going_on)) is SILENT:
        assert going_on.under_way is not None
        exchange, _, _ = going_on.under_way
        try:
            pause = yield from look(exchange.waits)
        except errors.MovedError:
            # It may have come meanwhile.
            going_on.look_at = clock.now()
            if (answer := (yield going_on)) is not SILENT:
                break
            link.close()
            raise
        except BaseException:
            link.close()
            raise
        going_on.look_at = clock.now() + pause
    return cast(R, answer)


def ask(
    links: Links,
    route: Route,
    operation: Callable[[Target], Operation[R]],
    target: Target,
    patience: float,
) -> Flow[R]:
    """Run an operation that leaves nothing behind; again, if its connection has died in the pool.

    Args:
        links: the pool.
        route: to the server.
        operation: begins it.
        target: what it is about.
        patience: seconds for all of it.

    Raises:
        RemoteError: as `Open` and `Talk` do.
    """
    until = clock.now() + patience
    link = links.take(route)
    if link is not None:
        try:
            result = yield from talk(link, operation(target.knowing(link.features)), until)
        except errors.UnreachableError:
            links.clear(route)  # the other idle ones are most likely dead as well
            if clock.now() >= until:
                raise
        else:
            links.give(link)
            return result
    link = yield Open(route, until)
    result = yield from talk(link, operation(target.knowing(link.features)), until)
    links.give(link)
    return result


def look_at(
    links: Links,
    shard_map: ShardMap,
    key: bytes,
    route: Route,
    is_waiting: bool,
    until: float | None = None,
) -> Flow[float]:
    """Look at a server of a cluster that has not answered yet; see `dflockd.client.routing.glance`.

    Returns:
        After how many seconds to look again.

    Raises:
        MovedError: another is in charge of the key.
    """

    def found(step: Ask) -> Flow[float]:
        return step.timeout or 0.0
        yield  # a flow without steps

    path = glance(shard_map, key, route.address, is_waiting, clock.now(), until)
    return (yield from walk(links, path, route, found))


def pause(seconds: float) -> Flow[None]:
    """Wait."""
    yield Pause(seconds)


def walk(
    links: Links,
    path: Path,
    route: Route,
    attempt: Callable[[Ask], Flow[R]],
    wait: Callable[[float], Flow[None]] = pause,
) -> Flow[R]:
    """Walk a path until an attempt succeeds.

    Args:
        links: the pool.
        path: its servers are reached as `route` says, but for the address.
        route: see there.
        attempt: asks the server that the path has come to.
        wait: waits for so many seconds.

    Raises:
        RemoteError: the path has come to its end.
    """
    step = next(path)
    while True:
        report = None
        try:
            if isinstance(step, Ask):
                return (yield from attempt(step))
            if isinstance(step, Load):
                there, loading = about_server(str(step.server)), partial(shards, known=step.known)
                report = yield from ask(links, route.at(step.server), loading, there, step.patience)
            elif isinstance(step, SignOfLife):
                there = about_server(str(step.server))
                yield from ask(links, route.at(step.server), ping, there, step.patience)
            else:
                yield from wait(step.seconds)
        except errors.RemoteError as exc:
            step = _next(path, exc, None)
        else:
            step = _next(path, None, report)


def _next(path: Path, error: errors.RemoteError | None, report: ShardReport | None) -> Leg:
    """Tell a path what came of its last step.

    Errors go in and out without their tracebacks: see `dflockd.client.frames`.
    """
    try:
        if error is not None:
            without_frames(error)
        return path.send(StepOutcome(clock.now(), error, report))
    except errors.RemoteError as exc:
        without_frames(exc)
        raise
    finally:
        del error
