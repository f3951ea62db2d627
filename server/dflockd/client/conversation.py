"""What is said on a connection: hello, and the exchanges of an operation.

Flows that sessions, the reactor and operators have in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, TypeAlias, TypeVar

from dflockd import clock, errors
from dflockd.address import Address
from dflockd.client import connection
from dflockd.client.connection import CONNECT_TIMEOUT, Connection, Route, dial, reason
from dflockd.client.flow import Flow
from dflockd.client.frames import without_frames
from dflockd.client.operations import (
    Exchange,
    Operation,
    Target,
    TimedReply,
    about_server,
    authenticate,
    greet,
)
from dflockd.client.pool import Pool
from dflockd.wire import UnexpectedReplyError

LEAST_PATIENCE = 0.5
"""Seconds for any answer, even if the time is over: this process may have been stopped."""

SILENCE = 1.0
"""Seconds without an answer after which one looks, in a cluster, whether it can still come."""

ORDERLY: Final = (*errors.IN_ORDER, errors.MovedError, errors.RecoveringError)
"""What a server that is in order may say of a request that is."""

R = TypeVar("R")

Heard: TypeAlias = "bytes | Exception | None"
"""The reply to a request, or what went wrong instead, or nothing yet."""

UnderWay: TypeAlias = tuple[Exchange, float, Heard]
"""An exchange that has begun, when its request was sent, and what has come since."""

LookAgain: TypeAlias = Callable[[bool], Flow[float]]
"""Looks at a server that says nothing, and returns after how many seconds to look again, or raises
what ends the wait. Its argument says whether the server may be right to say nothing yet."""


def connect(
    route: Route,
    until: float | None = None,
    *,
    is_strict: bool = False,
    made: Callable[[Connection], object] | None = None,
) -> Flow[Connection]:
    """Connect, and say hello.

    Args:
        route: to the server.
        until: when to give up; ``None`` for soon.
        is_strict: whether to give up exactly then. Otherwise a process that was stopped for long gets a
            moment more.
        made: gets the connection before its server has said hello: from then on it can be interrupted.

    Raises:
        UnreachableError: nobody answered there in time.
        AuthRefusedError: the server wants another secret.
    """
    address, now = route.address, clock.now()
    until = now + CONNECT_TIMEOUT if until is None else until
    if not is_strict:
        until = max(until, now + LEAST_PATIENCE)
    secret, server = route.auth_secret, str(address)
    if address not in connection.published:
        link = yield from dial(route, until, made)
        hello = greet(secret, server)
        features = yield from talk(link, hello, until, is_strict=is_strict)
        if features is not None:
            link.features = features
            return link
        # Older ones hang up on what they do not know, newer ones on who does not begin with the secret.
        link.close()
        connection.published.add(address)
    link = yield from dial(route, until, made)
    if secret is not None:
        yield from talk(link, authenticate(secret, server), until, is_strict=is_strict)
    return link


def talk(
    link: Connection,
    operation: Operation[R],
    until: float | None = None,
    look: LookAgain | None = None,
    *,
    is_strict: bool = False,
    under_way: UnderWay | None = None,
) -> Flow[R]:
    """Go through an operation on a connection.

    It stays open only if everything that was asked on it has been answered, and all of that was in
    order. An answer that is still to come may be a grant, and the end of the connection takes it back.

    Args:
        link: the connection.
        operation: what is asked on the connection.
        until: when no reply is waited for any more.
        look: to be done now and then while no reply comes.
        is_strict: as that of `connect`.
        under_way: the first exchange, if that has begun.

    Raises:
        UnreachableError: the connection broke, or no reply came in time.
        BadReplyError: the reply is none.
        RemoteError: the server said no, or `look` has raised it.
    """
    is_in_order = False
    try:
        result = yield from _exchange(link, operation, until, look, is_strict, under_way)
        is_in_order = True
        return result
    except ORDERLY:
        is_in_order = True
        raise
    except UnexpectedReplyError as exc:
        server = str(link.route.address)
        text = f"server {server}: {exc}: is a dflockd server listening there?"
        raise errors.BadReplyError(text, server=server) from without_frames(exc)
    except OSError as exc:
        if isinstance(exc, errors.DflockdError):
            raise
        server = str(link.route.address)
        raise errors.UnreachableError(
            f"connection to lock server {server} broke: {reason(exc)}", server=server
        ) from without_frames(exc)
    finally:
        if not is_in_order or link.owes():
            link.close()


def _exchange(
    link: Connection,
    operation: Operation[R],
    until: float | None,
    look: LookAgain | None,
    is_strict: bool,
    under_way: UnderWay | None,
) -> Flow[R]:
    look_at = math.inf if look is None else clock.now() + SILENCE
    line: Heard
    try:
        exchange, sent, line = under_way or (next(operation), 0.0, None)
        while True:
            if not sent:
                sent = clock.now()
                limit = _limit(exchange, sent, until, is_strict)
                if rest := link.begin(exchange.request):
                    yield from link.finish(rest, limit)
            else:
                limit = _limit(exchange, sent, until, is_strict)
            while line is None:
                left = min(limit, look_at) - clock.now()
                link.left = left if left > 0 else 0.0
                heard = yield link
                if heard or heard == b"":  # an empty line is an answer too
                    line = link.receive() if heard is True else heard
                elif look is not None and look_at < limit:
                    look_at, line = yield from _look(link, look, exchange.waits)
                else:
                    break
            if isinstance(line, Exception):
                raise line
            if line is not None:
                link.accept(line)
                answer = TimedReply(line, sent, clock.now())
            elif exchange.timeout_is_reply and not link.closed:
                over = clock.now()
                answer = TimedReply(b"timeout", over, over)
            else:
                raise TimeoutError
            exchange, sent, line = operation.send(answer), 0.0, None
    except StopIteration as stop:
        result: R = stop.value
        return result


def _limit(exchange: Exchange, sent: float, until: float | None, is_strict: bool) -> float:
    """Return when the reply to a request is too late."""
    limit = math.inf if exchange.patience is None else sent + exchange.patience
    if until is None or until >= limit:
        return limit
    # Also a reply whose time is over, or nearly so, has a moment.
    return until if is_strict else max(until, min(limit, sent + LEAST_PATIENCE))


def _look(link: Connection, look: LookAgain, waits: bool) -> Flow[tuple[float, bytes | None]]:
    """Look at a server; return when to do so again, and what it has said meanwhile."""
    try:
        pause = yield from look(waits)
    except errors.MovedError:
        if (line := link.receive()) is None:
            raise
        return clock.now(), line
    return clock.now() + pause, None


def ask(
    pool: Pool,
    route: Route,
    operation: Callable[[Target], Operation[R]],
    target: Target,
    patience: float | None = None,
) -> Flow[R]:
    """Run an operation that leaves nothing behind; again, if its connection has died in the pool.

    Args:
        pool: idle connections.
        route: to the server.
        operation: begins it.
        target: what it is about.
        patience: seconds for all of it; ``None`` for what each step has.

    Raises:
        RemoteError: as `connect` and `talk` do.
    """
    until = None if patience is None else clock.now() + patience
    link = pool.take(route)
    if link is not None:
        try:
            return (yield from ask_on(link, pool, operation, target, until))
        except errors.UnreachableError:
            pool.clear(route)  # the other idle ones are most likely dead as well
            if until is not None and clock.now() >= until:
                raise
    link = yield from connect(route, until)
    return (yield from ask_on(link, pool, operation, target, until))


def ask_on(
    link: Connection,
    pool: Pool,
    operation: Callable[[Target], Operation[R]],
    target: Target,
    until: float | None = None,
) -> Flow[R]:
    """Run an operation that leaves nothing behind on a connection, which is the pool's then."""
    try:
        return (yield from talk(link, operation(target.knowing(link.features)), until))
    finally:
        pool.give(link)  # unless it is closed


def asker(pool: Pool, route: Route) -> Callable[[Address, Any, float], Flow[Any]]:
    """Return what asks servers about themselves that are reached as this route says."""

    def ask_about(server: Address, operation: Any, patience: float) -> Flow[Any]:
        return ask(pool, route.at(server), operation, about_server(str(server)), patience)

    return ask_about
