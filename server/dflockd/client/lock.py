"""What the blocking and the asyncio locks have in common: everything but waiting."""

from __future__ import annotations

import logging
import math
import ssl
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from dflockd import errors
from dflockd.address import DEFAULT_PORT, Address, Seeds, ServerLike, parse_servers
from dflockd.client.lease import Hold
from dflockd.client.operations import GRACE, Grant, Operation, Progress, Target, enqueue
from dflockd.client.pool import Route
from dflockd.client.routing import Path, ShardMap, pursue, shard_map
from dflockd.sharding import ShardingStrategy, server_index, stable_hash_shard
from dflockd.wire import MAX_LIMIT, MAX_LINE, MAX_SECONDS, MAX_SECRET, Reserve, Space, key_problem

logger = logging.getLogger("dflockd.client")

DEFAULT_SERVERS: tuple[ServerLike, ...] = (("127.0.0.1", DEFAULT_PORT),)

ANSWER_PATIENCE = 5.0
"""Seconds for servers to answer what is no waiting for a lock: a shard may be on its way."""

RELEASE_PATIENCE = 1.0
"""Seconds that a release waits for its server, or its shard, before it is left to the background."""


class KeepPlace(NamedTuple):
    """That a place in the queue is to be kept after a wait that ends without a grant.

    Somebody takes it up later, here or in another process: `enqueue` with its name. It is ahead of
    all who came later, whenever that is. If its turn comes before, others have theirs; but about the
    time at which it is expected a slot is held for it. It is forgotten a minute after that time, and
    when a server without a cluster ends.
    """

    away_s: float
    """Seconds after which it is expected to be taken up; at most the server's longest lease."""
    hold_s: float
    """Seconds before and after that in which a slot may be idle for its sake; 0 holds nothing."""


class Labelled(Protocol):
    """A connection, as far as its label goes."""

    label: bytes


class Connected(Protocol):
    """A connection, as far as its other end goes."""

    address: Address
    closed: bool


class LockBase:
    """Parameters, checks and the state that people ask for.

    Args:
        key: the name of the lock; at most 256 bytes of UTF-8 without white space.
        acquire_timeout_s: seconds to wait for the lock, fractions too; 0 tries once, ``None`` waits
            for ever. A server that does not answer is given two seconds more.
        lease_ttl_s: lease in whole seconds; ``None`` is the server's default (33 unless configured).
        servers: the servers as ``(host, port)`` tuples, or ``"host:port"`` or ``"unix:/path"``. Or
            the text ``"cluster://host:port,..."``, some servers of a cluster: each of them knows
            where every key lives, and the lock follows it when it moves.
        sharding_strategy: ``(key, number of servers) -> index``; where the key lives. Not with a
            cluster.
        renew_ratio: the lock is renewed once this share of its lease has passed.
        auth_token: shared secret of the servers.
        ssl_context: for servers that speak TLS.
        label: what people see who ask the server who holds the lock; one line of up to 256 bytes,
            longer ones are cut.
        on_lost: called once with this lock if it is lost while held: the lease ended unrenewed, or
            the server no longer knows it. It runs on the renewal thread: it must not block.

    Attributes:
        place: the name of the place in the queue that a `wait` with `KeepPlace` has left to be taken
            up; ``None`` if it has not, or the server is too old to know.

    Raises:
        InvalidKeyError: the key cannot be sent.
        InvalidArgumentError: another argument is out of its range.
    """

    place: str | None = None

    _space = Space.LOCK
    _shards: ShardMap | None = None
    """Which server of the cluster has which shard; ``None`` without a cluster."""

    def __init__(
        self,
        key: str,
        acquire_timeout_s: float | None = 10,
        lease_ttl_s: int | None = None,
        servers: Sequence[ServerLike] | str = DEFAULT_SERVERS,
        sharding_strategy: ShardingStrategy = stable_hash_shard,
        renew_ratio: float = 0.5,
        *,
        auth_token: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
        label: str = "",
        on_lost: Callable[[Any], object] | None = None,
    ) -> None:
        _check_key(key)
        check_timeout(acquire_timeout_s, key)
        check_lease(lease_ttl_s, key)
        if not 0 < renew_ratio < 1:
            raise errors.InvalidArgumentError(
                f"renew_ratio is {renew_ratio!r} for lock {key!r}: give a share between 0 and 1",
                key=key,
            )
        addresses = parse_servers(servers)
        if isinstance(addresses, Seeds):
            index, server = 0, str(addresses)
            if sharding_strategy is not stable_hash_shard:
                raise errors.InvalidArgumentError(
                    f"sharding_strategy is given with {server}: leave it out, a cluster has its own"
                )
        else:
            index = server_index(sharding_strategy, key, len(addresses))
            server = str(addresses[index])
        self.key = key
        self.acquire_timeout_s = acquire_timeout_s
        self.lease_ttl_s = lease_ttl_s
        self._renew_ratio = renew_ratio
        self._label = _label(label)
        self._on_lost = on_lost
        self._route = Route(addresses[index], _secret(auth_token), ssl_context)
        about = (self._space, key.encode(), self._limit(), lease_ttl_s, server)
        self._target = Target(*about)
        self._labelling = Target(*about, self._label)
        # For a new connection, which has no label yet.
        self._target_anew = self._labelling if self._label else self._target
        self._hold: Hold | None = None
        if isinstance(addresses, Seeds):
            self._shards = shard_map(addresses, self._route.auth_secret, ssl_context)

    def _limit(self) -> int:
        return 1

    @property
    def server(self) -> str:
        """The server in charge of the key, as ``host:port``.

        In a cluster it is as far as known, and before anybody was asked the cluster itself.
        """
        if self._shards is None:
            return self._target.server
        asked = self._target if self._hold is None else self._hold.target
        return str(self._shards.owner_of(asked.key) or asked.server)

    @property
    def held(self) -> bool:
        """Whether the lock is certainly held: granted, within its lease, not lost, not released."""
        return self._hold is not None and self._hold.held

    @property
    def token(self) -> str | None:
        """The token of the grant, or ``None`` while not held."""
        return self._hold.token.decode() if self._hold is not None and self._hold.held else None

    @property
    def lease(self) -> int:
        """The lease that the server granted, in seconds; 0 while not held."""
        return self._hold.lease if self._hold is not None and self._hold.held else 0

    @property
    def fence(self) -> int | None:
        """A number that grows with every grant of the key; a resource refuses smaller ones.

        It stays readable after a loss: it is then what the resource will refuse.
        """
        return self._hold.fence if self._hold is not None else None

    def __repr__(self) -> str:
        """Without secrets: neither the token nor the auth token."""
        state = "held" if self.held else "not held"
        return f"<{type(self).__name__} {self.key!r} on {self.server}, {state}>"

    def _go_to(self, server: Address) -> Route:
        """Turn to a server of the cluster."""
        if self._target.server != str(server):
            self._route = self._route._replace(address=server)
            self._labelling = self._labelling.at(server)
            self._target_anew = self._target_anew.at(server)
            self._target = self._target.at(server)
        return self._route

    def _path(
        self, shards: ShardMap, timeout: float | None, first: Connected | None = None
    ) -> Path:
        """Return how to come to the server in charge, in a cluster.

        Args:
            shards: the map of the cluster.
            timeout: seconds; ``None`` for no end.
            first: where to begin, if that is not closed.
        """
        now = time.monotonic()
        until = None if timeout is None else now + timeout
        server = None if first is None or first.closed else first.address
        return pursue(shards, self._target.key, until, now, first=server)

    def _enqueueing(
        self, place: str | None
    ) -> Callable[[Target, float | None], Operation[Grant | None]]:
        """Return the operation of `enqueue`."""
        self.place = None
        if place is None:
            return lambda target, _: enqueue(target)
        progress = self._progress(place)
        return lambda target, _: enqueue(target._replace(progress=progress))

    def _progress(self, place: str | None = None, keep: KeepPlace | None = None) -> Progress:
        """Return what goes along with a waiter.

        Raises:
            InvalidArgumentError: an argument cannot be sent.
        """
        return Progress(
            b"" if place is None else check_name(place, self.key, "place", "wait() has left"),
            keep=None if keep is None else _keep_request(keep, self.key),
            may_move=self._shards is not None,
        )

    def _target_on(self, connection: Labelled) -> Target:
        """Return what to ask for on a connection that may have another lock's label."""
        if connection.label == self._label:
            return self._target
        connection.label = self._label
        return self._labelling

    def _lost_callback(self) -> Callable[[], object] | None:
        if self._on_lost is None:
            return None
        on_lost, reference = self._on_lost, weakref.ref(self)

        def call() -> None:
            # Not the lock itself: it would keep alive one that its owner has forgotten.
            lock = reference()
            if lock is not None:
                on_lost(lock)

        return call

    def _lose(self, hold: Hold) -> None:
        callback = hold.lose()
        logger.warning("lock %r on %s is lost", self.key, hold.target.server)
        if callback is not None:
            callback()

    def _timed_out(self) -> errors.LockTimeoutError:
        return errors.LockTimeoutError(
            f"lock {self.key!r} on {self._target.server} was not granted within "
            f"{self.acquire_timeout_s} s",
            key=self.key,
            server=self._target.server,
        )

    def _cancelled(self) -> errors.AcquireCancelledError:
        return errors.AcquireCancelledError(
            f"waiting for lock {self.key!r} on {self._target.server} was cancelled",
            key=self.key,
            server=self._target.server,
        )

    def _already_held(self) -> errors.AlreadyHeldError:
        return errors.AlreadyHeldError(
            f"lock {self.key!r} is already held or waited for by this object: "
            "release it first, or make another object",
            key=self.key,
            server=self._target.server,
        )

    def _not_enqueued(self) -> errors.NotEnqueuedError:
        return errors.NotEnqueuedError(
            f"lock {self.key!r}: wait() needs a place in the queue: call enqueue() first",
            key=self.key,
            server=self._target.server,
        )


class SemaphoreBase(LockBase):
    """A lock with several holders at once.

    Args:
        limit: how many may hold it; every user of the key must name the same number.
    """

    _space = Space.SEMAPHORE

    def __init__(self, key: str, limit: int, *args: Any, **kwargs: Any) -> None:
        if not isinstance(limit, int) or isinstance(limit, bool) or not 1 <= limit <= MAX_LIMIT:
            raise errors.InvalidArgumentError(
                f"limit is {limit!r} for semaphore {key!r}: give a whole number from 1 to {MAX_LIMIT}",
                key=key,
            )
        self.limit = limit
        super().__init__(key, *args, **kwargs)

    def _limit(self) -> int:
        return self.limit


def give_up_at(timeout: float | None) -> float | None:
    """Return the monotonic time at which a request with so many seconds is given up."""
    return None if timeout is None else time.monotonic() + timeout + GRACE


def _check_key(key: str) -> None:
    if not isinstance(key, str):
        raise errors.InvalidKeyError(f"key is {key!r}: give a string")
    try:
        problem = key_problem(key.encode())
    except UnicodeEncodeError:
        problem = "contains half of a surrogate pair"
    if problem:
        shown = repr(key if len(key) <= 60 else key[:60] + "...")
        raise errors.InvalidKeyError(
            f"key {shown} {problem}: use up to 256 bytes of UTF-8 without white space", key=key
        )


def check_timeout(seconds: float | None, key: str, name: str = "acquire_timeout_s") -> None:
    """Refuse a time to wait that is no number of seconds from 0.

    Raises:
        InvalidArgumentError: it is none.
    """
    if seconds is None:
        return
    # The comparison is false for a NaN as well.
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds <= MAX_SECONDS:
        raise errors.InvalidArgumentError(
            f"{name} is {seconds!r} for lock {key!r}: give seconds from 0, "
            "or None to wait for ever",
            key=key,
        )


def check_lease(seconds: int | None, key: str) -> None:
    """Refuse a lease that is no whole number of seconds from 1.

    Raises:
        InvalidArgumentError: it is none.
    """
    if seconds is None:
        return
    is_whole = isinstance(seconds, int) and not isinstance(seconds, bool)
    if not is_whole or not 1 <= seconds <= MAX_SECONDS:
        raise errors.InvalidArgumentError(
            f"lease_ttl_s is {seconds!r} for lock {key!r}: give whole seconds from 1, "
            "or None for the server's default",
            key=key,
        )


def check_token(token: str, key: str) -> bytes:
    """Return a token as it is sent.

    Raises:
        InvalidArgumentError: it can be none; the text does not show it.
    """
    return check_name(token, key, "token", "detach() returned")


def check_name(name: str, key: str, what: str, source: str) -> bytes:
    """Return a token, or the name of a place, as it is sent.

    Raises:
        InvalidArgumentError: it can be none; the text does not show it.
    """
    try:
        sent = name.encode("ascii")
    except (AttributeError, UnicodeEncodeError):
        sent = b""
    if not sent.isalnum() or len(sent) > MAX_LINE:
        raise errors.InvalidArgumentError(
            f"lock {key!r}: what was given as its {what} is none: give what {source}", key=key
        )
    return sent


def _keep_request(keep: KeepPlace, key: str) -> Reserve:
    for name, seconds in zip(keep._fields, keep, strict=True):
        is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not is_number or not 0 <= seconds <= MAX_SECONDS:
            raise errors.InvalidArgumentError(
                f"{name} is {seconds!r} for lock {key!r}: give seconds from 0", key=key
            )
    away, hold = (min(math.ceil(seconds * 1000), MAX_SECONDS) for seconds in keep)
    return Reserve(away, hold)


def _secret(auth_token: str | None) -> bytes | None:
    if auth_token is None:
        return None
    try:
        secret = auth_token.encode()
    except (AttributeError, UnicodeEncodeError):
        secret = b""  # the error at hand would show it
    if not secret or len(secret) > MAX_SECRET or b"\n" in secret or b"\r" in secret:
        raise errors.InvalidArgumentError(
            f"auth_token must be one line of 1 to {MAX_SECRET} bytes of UTF-8 (its value is not shown)"
        )
    return secret


def _label(text: str) -> bytes:
    if not text.isprintable():
        text = "".join(char if char.isprintable() else " " for char in text)
    return text.encode("utf-8", "replace")[:MAX_LINE].decode("utf-8", "ignore").encode()
