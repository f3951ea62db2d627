"""What follows from the arguments of a lock, worked out once for each distinct set of them.

A program makes locks of the same few sorts again and again: their arguments are checked, and what
they ask for is encoded, the first time only.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from dflockd import errors
from dflockd.address import Seeds, Servers
from dflockd.client import arguments
from dflockd.client.operations import Exchange, Target
from dflockd.client.steps import Route
from dflockd.sharding import ShardingStrategy, server_index, stable_hash_shard
from dflockd.wire import Space

KEPT = 1024
"""So many plans are kept, those that were used last."""


class Plan:
    """A checked set of arguments, and what follows from them."""

    __slots__ = ("beginnings", "renew_ratio", "route", "seeds", "target")

    def __init__(
        self,
        target: Target,
        route: Route,
        seeds: Seeds | None,
        renew_ratio: float,
    ) -> None:
        self.target = target
        """What is asked for, by nobody in particular."""
        self.route = route
        """The way to the server without TLS; in a cluster, to begin with."""
        self.seeds = seeds
        """Some servers of the cluster; ``None`` without one."""
        self.renew_ratio = renew_ratio
        # In a cluster it is not the same each time.
        self.beginnings: dict[Any, Exchange] | None = {} if seeds is None else None
        """See `dflockd.client.session.Session`."""


def make(
    space: Space,
    key: str,
    limit: int,
    timeout: float | None,
    lease: int | None,
    servers: Servers,
    strategy: ShardingStrategy,
    renew_ratio: float,
    auth_token: str | None,
) -> Plan:
    """Check the arguments of a lock; see `dflockd.client.lock.LockBase`.

    Raises:
        InvalidKeyError: the key cannot be sent.
        InvalidArgumentError: another argument is out of its range.
    """
    if space is Space.SEMAPHORE:
        arguments.check_limit(limit, key)
    arguments.check_key(key)
    arguments.check_timeout(timeout, key)
    arguments.check_lease(lease, key)
    arguments.check_renew_ratio(renew_ratio, key)
    secret = arguments.checked_secret(auth_token)
    if isinstance(servers, Seeds):
        seeds, index, server = servers, 0, str(servers)
        if strategy is not stable_hash_shard:
            raise errors.InvalidArgumentError(
                f"sharding_strategy is given with {server}: leave it out, a cluster has its own"
            )
    else:
        arguments.check_strategy(strategy, key)
        seeds, index = None, server_index(strategy, key, len(servers))
        server = str(servers[index])
    target = Target(space, key.encode(), limit, lease, server)
    return Plan(target, Route(servers[index], secret), seeds, renew_ratio)


# By their types, too: 1 is a time to wait, and True is none.
known = lru_cache(maxsize=KEPT, typed=True)(make)
"""As `make`, which it asks for what it does not remember. Raises TypeError for what has no hash."""
