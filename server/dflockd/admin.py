"""Questions of operators to a server: what it holds, who holds a key, whether it answers."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from dflockd import clock
from dflockd.address import Seeds, ServerLike, parse_server, parse_servers
from dflockd.client import arguments, operations
from dflockd.client.blocking import drive
from dflockd.client.connection import Connection, Route
from dflockd.client.conversation import asker, connect, talk
from dflockd.client.flow import Flow
from dflockd.client.operations import REPLY_PATIENCE, Exchange, Operation, Target
from dflockd.client.pool import Pool
from dflockd.client.routing import Pursuit, ShardMap
from dflockd.wire import Ping, Space, Status, encode_request, parse_done
from dflockd.wire import notes as wire_notes

__all__ = [
    "Inquiry",
    "describe_pause",
    "duration",
    "evict",
    "find",
    "inspect",
    "is_note",
    "members",
    "pause",
    "ping",
    "printable",
    "resume",
    "stats",
]

R = TypeVar("R")


def members(
    servers: Sequence[ServerLike] | str,
    auth_token: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
) -> list[str]:
    """Return all servers as ``host:port``: those of a list, or the present members of a cluster.

    Args:
        servers: a list, or the text ``"cluster://host:port,..."``.
        auth_token: the shared secret of the servers.
        ssl_context: for servers that speak TLS.

    Raises:
        InvalidArgumentError: the servers or the token are malformed.
        UnreachableError: no server of the cluster can be reached.
        RemoteError: one of them refused; the subclass says why.
    """
    seeds = parse_servers(servers)
    if not isinstance(seeds, Seeds):
        return list(map(str, seeds))
    secret = arguments.checked_secret(auth_token)
    shards, pool = ShardMap(seeds), Pool()
    asks = asker(pool, Route(seeds[0], secret, ssl_context))
    try:
        # The way to any key begins with the map.
        drive(Pursuit(shards, b"-", clock.now(), asks).next())
    finally:
        pool.clear()
    return sorted(map(str, shards.servers))


def stats(
    server: ServerLike, auth_token: str | None = None, ssl_context: ssl.SSLContext | None = None
) -> dict[str, Any]:
    """Return what the server holds.

    Args:
        server: ``(host, port)``, ``"host:port"`` or ``"unix:/path"``.
        auth_token: the shared secret of the server.
        ssl_context: for a server that speaks TLS.

    Returns:
        ``connections``, ``locks`` (each with ``key``, ``label``, ``held_s``, ``waiters`` and more; of
        one with another limit or several holders also ``limit`` and ``holders``, and while the first
        is from before a change of the limit ``changed_limit``: ``is``, ``was``, ``since_s``) and, of
        published clients, ``semaphores`` (``key``, ``limit``, ``holders``, ``waiters``). A server lists
        some thousands of keys and counts the rest as ``omitted``.

    Raises:
        InvalidArgumentError: the server or the token is malformed.
        UnreachableError: no answer came in time.
        BadReplyError: the answer is not that of a lock server.
        RefusedError: the server refused; the subclass says why.
    """
    return _ask(_stats(str(parse_server(server))), server, auth_token, ssl_context)


class Inquiry:
    """Questions to one server over one connection, for programs that ask repeatedly.

    It connects when it is first asked, and again if that connection breaks. Use it in one thread at
    a time. It takes the arguments of `stats` and raises the same errors.
    """

    def __init__(
        self,
        server: ServerLike,
        auth_token: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self.server = str(parse_server(server))
        self._route = _route(server, auth_token, ssl_context)
        self._link: Connection | None = None

    def stats(self) -> dict[str, Any]:
        """Return what the server holds; see `dflockd.admin.stats`."""
        return self._ask(_stats(self.server))

    def inspect(self, key: str, *, semaphore: bool = False) -> dict[str, Any]:
        """Return the holders and waiters of a key; see `dflockd.admin.inspect`."""
        return self._ask(operations.inspect(_target(self.server, key), _space(semaphore)))

    def find(self, text: str, *, waiters: bool = False, notes: bool = False) -> dict[str, Any]:
        """Search keys, holders and waiters; see `dflockd.admin.find`."""
        return self._ask(_find(self.server, text, waiters, notes))

    def shards(self, known: operations.ShardReport | None = None) -> operations.ShardReport:
        """Ask which server of its cluster has which shard.

        Returns:
            `known` itself, if it is still true.

        Raises:
            RefusedError: the server is not in a cluster.
        """
        return self._ask(operations.shards(operations.about_server(self.server), known))

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._link is not None:
            self._link.close()

    def _ask(self, operation: Operation[R]) -> R:
        return drive(self._asking(operation))

    def _asking(self, operation: Operation[R]) -> Flow[R]:
        if self._link is None or self._link.closed:
            self._link = yield from connect(self._route)
        return (yield from talk(self._link, operation))


def printable(text: str) -> str:
    r"""Return a key or a label in a form that is safe to show in a terminal.

    Both can contain anything. Characters that would move the cursor, colour the screen or change
    the direction of writing become escapes such as ``\x1b``.
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def is_note(key: str) -> bool:
    """Whether a program keeps notes under this key: no work runs while it is held."""
    return wire_notes.is_note(key.encode())


def duration(seconds: float) -> str:
    """Return a time in a short readable form."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 360_000 else f"{seconds / 86400:.0f} d"


def describe_pause(paused: Mapping[str, Any]) -> str:
    """Return what a server says of the pause of a key in a few words."""
    by = f" by {printable(paused['by'])}" if paused["by"] else ""
    left = "" if paused["left_s"] is None else f", {duration(paused['left_s'])} left"
    reason = f": {printable(paused['reason'])}" if paused["reason"] else ""
    return f"paused{by} for {duration(paused['paused_s'])}{left}{reason}"


def describe_limit(changed: Mapping[str, Any]) -> str:
    """Return what a server says of a limit that has changed in a few words."""
    return f"limit {changed['is']} (was {changed['was']}, since {duration(changed['since_s'])})"


def ping(
    server: ServerLike, auth_token: str | None = None, ssl_context: ssl.SSLContext | None = None
) -> float:
    """Return how many seconds the server took to answer, without the time to connect.

    It takes the arguments of `stats` and raises the same errors.
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
    """Return the holders and waiters of a key; see `DistributedLock.inspect`.

    With `semaphore`, of the semaphore that published clients have under that name beside the lock. This
    takes the other arguments of `stats` and raises the same errors.
    """
    operation = operations.inspect(_target(server, key), _space(semaphore))
    return _ask(operation, server, auth_token, ssl_context)


def find(
    server: ServerLike,
    text: str,
    auth_token: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
    *,
    waiters: bool = False,
    notes: bool = False,
) -> dict[str, Any]:
    """Ask for keys, holders and waiters with a text in the key, or in the label.

    Args:
        server: see `stats`.
        text: part of a key, of a task's name or id, or of a host; empty for all. Upper and lower
            case of ASCII letters are the same.
        auth_token: see `stats`.
        ssl_context: see `stats`.
        waiters: only waiters.
        notes: also keys that are notes of a program, see `is_note`.

    Returns:
        ``matched``, how many there are, and ``found``: of up to 200, the longest wait first,
        ``key``, ``space``, ``limit``, ``holders`` and ``waiters`` (numbers), ``holder`` and
        ``waiter`` (who; or ``None``), ``position`` of the waiter from 1, ``pace_s`` (seconds from a
        grant of the key to the next, of late; or ``None``), ``paused`` (``by``, ``reason``,
        ``paused_s``, ``left_s``; or ``None``).

    Raises:
        InvalidArgumentError: the text cannot be sent: too long, or not printable.
        UnsupportedError: the server knows no searches.
        DflockdError: as for `stats`.
    """
    return _ask(
        _find(str(parse_server(server)), text, waiters, notes), server, auth_token, ssl_context
    )


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
    target = _target(server, key)
    arguments.check_fence(fence, key)
    operation = operations.evict(target, fence, _space(semaphore))
    return _ask(operation, server, auth_token, ssl_context)


def pause(
    server: ServerLike,
    key: str,
    for_s: float | None = None,
    reason: str = "",
    by: str | None = None,
    auth_token: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
) -> None:
    """Have nothing of a lock granted for a while; see `DistributedLock.pause`.

    The other arguments and the errors are those of `stats`.
    """
    target = _target(server, key)
    asked = arguments.checked_pause(key, for_s, reason, by)
    _ask(operations.pause(target, asked), server, auth_token, ssl_context)


def resume(
    server: ServerLike,
    key: str,
    auth_token: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
) -> bool:
    """End the pause of a lock, and serve who waits; ``False`` if it is not paused.

    The other arguments and the errors are those of `stats`.
    """
    return _ask(operations.resume(_target(server, key)), server, auth_token, ssl_context)


def _target(server: ServerLike, key: str) -> Target:
    arguments.check_key(key)
    return Target(Space.LOCK, key.encode(), 1, None, str(parse_server(server)))


def _space(semaphore: bool) -> Space:
    return Space.SEMAPHORE if semaphore else Space.LOCK


def _stats(server: str) -> Operation[dict[str, Any]]:
    return operations.stats(operations.about_server(server))


def _find(server: str, text: str, waiters: bool, notes: bool) -> Operation[dict[str, Any]]:
    return operations.find(
        operations.about_server(server), arguments.checked_text(text), waiters=waiters, notes=notes
    )


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
    route = _route(server, auth_token, ssl_context)

    def asking() -> Flow[R]:
        link = yield from connect(route)
        try:
            return (yield from talk(link, operation))
        finally:
            link.close()

    return drive(asking())


def _route(server: ServerLike, auth_token: str | None, ssl_context: ssl.SSLContext | None) -> Route:
    arguments.check_tls(ssl_context)
    return Route(parse_server(server), arguments.checked_secret(auth_token), ssl_context)
