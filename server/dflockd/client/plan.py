"""What follows from the arguments of a lock, worked out once for each distinct set of them.

A program makes locks of the same few sorts again and again: their arguments are checked, and what
they ask for is encoded, the first time only.
"""

from __future__ import annotations

import ssl
from functools import lru_cache
from typing import Any

from dflockd import errors
from dflockd.address import Seeds, Servers
from dflockd.client import arguments
from dflockd.client.connection import Route
from dflockd.client.introduction import ANONYMOUS, Introduction, new
from dflockd.client.operations import Target
from dflockd.rates import RunRate
from dflockd.sharding import ShardingStrategy, server_index, stable_hash_shard
from dflockd.wire import Space

KEPT = 1024
"""So many plans are kept, those that were used last."""


_USUAL = Target(Space.LOCK, b"", 1, None, "")[Target._fields.index("introduction") + 1 :]
"""What a target has that says no more than a key, and who asks."""


class Sort:
    """The arguments of locks that differ in their keys, checked once for all of them.

    For the arguments see `dflockd.client.lock.LockBase`; `key` is for the errors.

    Raises:
        InvalidArgumentError: an argument is out of its range.
    """

    __slots__ = (
        "_limit",
        "_names",
        "_routes",
        "_space",
        "_strategy",
        "begins",
        "group_limit",
        "lease",
        "rate",
        "renew_ratio",
        "seeds",
        "timeout",
    )

    def __init__(
        self,
        key: str,
        space: Space,
        limit: int,
        timeout: float | None,
        lease: int | None,
        servers: Servers,
        strategy: ShardingStrategy,
        renew_ratio: float,
        auth_token: str | None,
        tls: ssl.SSLContext | None = None,
        rate: RunRate | None = None,
        begins: bool = True,
        group_limit: int | None = None,
    ) -> None:
        if space is Space.SEMAPHORE:
            arguments.check_limit(limit, key)
        arguments.check_timeout(timeout, key)
        arguments.check_lease(lease, key)
        arguments.check_renew_ratio(renew_ratio, key)
        arguments.check_group_limit(group_limit, key)
        secret = arguments.checked_secret(auth_token)
        self.seeds = servers if isinstance(servers, Seeds) else None
        """Some servers of the cluster; ``None`` without one."""
        self.timeout = timeout
        self.renew_ratio = renew_ratio
        self.rate = rate
        """How many runs may begin in a while; ``None`` at any time."""
        self.begins = begins
        """Whether a run begins with the grant."""
        self.group_limit = group_limit
        """How many of one group may hold a key, where a group is named."""
        if self.seeds is None:
            arguments.check_strategy(strategy, key)
        elif strategy is not stable_hash_shard:
            raise errors.InvalidArgumentError(
                f"sharding_strategy is given with {servers}: remove it, a cluster has its own"
            )
        self.lease = lease
        """Seconds; ``None`` for what the server gives."""
        self._space, self._limit = space, limit
        self._routes = [Route(server, secret, tls) for server in servers]
        self._names = [str(server) for server in servers]
        self._strategy: ShardingStrategy | None = strategy
        if self.seeds is not None:
            self._names[0] = str(servers)
            self._strategy = None
        elif strategy is stable_hash_shard and len(servers) == 1:
            self._strategy = None  # it has no choice

    def place(self, key: str, who: Introduction = ANONYMOUS) -> tuple[Target, Route]:
        """Return what is asked for, and the way to the server; in a cluster, to begin with.

        Args:
            key: which is checked.
            who: asks.

        Raises:
            InvalidKeyError: the key cannot be sent.
            InvalidArgumentError: the sharding strategy gives it no server.
        """
        arguments.check_key(key)
        index = 0
        if self._strategy is not None:
            index = server_index(self._strategy, key, len(self._routes))
        server = self._names[index]
        asked = (self._space, key.encode(), self._limit, self.lease, server, who, *_USUAL)
        return new(Target, asked), self._routes[index]


class Plan:
    """A checked set of arguments, and what follows from them."""

    __slots__ = ("beginning", "route", "sort", "target")

    def __init__(self, sort: Sort, target: Target, route: Route) -> None:
        self.sort = sort
        """The arguments but for the key."""
        self.target = target
        """What is asked for, by nobody in particular."""
        self.route = route
        """The way to the server without TLS; in a cluster, to begin with."""
        self.beginning: Any = None, None, None, None
        """The latest first request of an operation: what makes it, the timeout, what the server knows,
        and the `dflockd.client.operations.Exchange`. One that fits says what the next would say."""


def make(space: Space, key: str, *others: Any) -> Plan:
    """Check the arguments of a lock; see `dflockd.client.lock.LockBase`.

    Args:
        space: the kind of lock.
        key: the name of the lock.
        others: the other fields of a `Sort`, in order.

    Raises:
        InvalidKeyError: the key cannot be sent.
        InvalidArgumentError: another argument is out of its range.
    """
    arguments.check_key(key)
    sort = Sort(key, space, *others)
    return Plan(sort, *sort.place(key))


# By their types, too: 1 is a time to wait, and True is none.
known = lru_cache(maxsize=KEPT, typed=True)(make)
"""As `make`, which it asks for what it does not remember. Raises TypeError for what has no hash."""
