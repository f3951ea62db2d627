"""What operators ask a server: what it holds, who holds a key, whether it answers."""

from __future__ import annotations

import json
import ssl
from typing import Any, TypeVar

from dflockd import operations
from dflockd.address import ServerLike, parse_server
from dflockd.connection import Connection, run
from dflockd.lock import LockBase
from dflockd.operations import REPLY_PATIENCE, Exchange, Operation, Target
from dflockd.wire import (
    Evict,
    Ping,
    Report,
    Space,
    Stats,
    Status,
    encode_request,
    parse_done,
    parse_report,
)

__all__ = ["evict", "inspect", "ping", "stats"]

R = TypeVar("R")


def stats(
    server: ServerLike, auth_token: str | None = None, ssl_context: ssl.SSLContext | None = None
) -> dict[str, Any]:
    """Ask what the server holds.

    Args:
        server: ``(host, port)``, ``"host:port"`` or ``"unix:/path"``.
        auth_token: the server's shared secret.
        ssl_context: for a server that speaks TLS.

    Returns:
        ``connections``, ``locks`` (each with ``key``, ``label``, ``held_s``, ``waiters`` and more)
        and ``semaphores`` (``key``, ``limit``, ``holders``, ``waiters``). A server lists some
        thousands of keys and counts the others as ``omitted``.

    Raises:
        InvalidArgumentError: the server or the token cannot be one.
        UnreachableError: nobody answered in time.
        BadReplyError: who answered is no lock server.
        RefusedError: it said no; the subclass says why.
    """
    return _ask(_stats(str(parse_server(server))), server, auth_token, ssl_context)


def ping(
    server: ServerLike, auth_token: str | None = None, ssl_context: ssl.SSLContext | None = None
) -> float:
    """Return the seconds that the server took to answer, on a connection made before.

    The arguments and errors are those of `stats`.
    """
    return _ask(_ping(str(parse_server(server))), server, auth_token, ssl_context)


def inspect(
    server: ServerLike,
    key: str,
    auth_token: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
    *,
    semaphore: bool = False,
) -> dict[str, Any]:
    """Ask who holds a key and who waits for it; see `DistributedLock.inspect`.

    The other arguments and the errors are those of `stats`.
    """
    target = _target(server, key, semaphore)
    return _ask(operations.inspect(target), server, auth_token, ssl_context)


def evict(
    server: ServerLike,
    key: str,
    fence: int,
    auth_token: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
    *,
    semaphore: bool = False,
) -> bool:
    """End the hold with this fence without its token; ``False`` if it has ended already.

    Somebody else gets the lock at once, and the former holder goes on until its next renewal: for
    operators who know that it is stuck. The other arguments and the errors are those of `stats`.
    """
    target = _target(server, key, semaphore)
    return _ask(_evict(target, fence), server, auth_token, ssl_context)


def _target(server: ServerLike, key: str, semaphore: bool) -> Target:
    LockBase(key)  # checks it
    space = Space.SEMAPHORE if semaphore else Space.LOCK
    return Target(space, key.encode(), 1, None, str(parse_server(server)))


def _evict(target: Target, fence: int) -> Operation[bool]:
    answer = yield Exchange(encode_request(Evict(target.space, target.key, fence)), REPLY_PATIENCE)
    status = parse_done(answer.line)
    if status in (Status.OK, Status.ERROR):
        return status is Status.OK
    raise operations.refused(status, target)


def _stats(server: str) -> Operation[dict[str, Any]]:
    answer = yield Exchange(encode_request(Stats()), REPLY_PATIENCE)
    reply = parse_report(answer.line)
    if not isinstance(reply, Report):
        raise operations.refused(reply, operations.about_server(server))
    report: dict[str, Any] = json.loads(reply.json)
    return report


def _ping(server: str) -> Operation[float]:
    answer = yield Exchange(encode_request(Ping()), REPLY_PATIENCE)
    status = parse_done(answer.line)
    if status is not Status.OK:
        raise operations.refused(status, operations.about_server(server))
    return answer.received - answer.sent


def _ask(
    operation: Operation[R],
    server: ServerLike,
    auth_token: str | None,
    ssl_context: ssl.SSLContext | None,
) -> R:
    LockBase("-", servers=[server], auth_token=auth_token)  # checks both
    secret = None if auth_token is None else auth_token.encode()
    connection = Connection.open(parse_server(server), secret, ssl_context)
    try:
        return run(operation, connection)
    finally:
        connection.close()
