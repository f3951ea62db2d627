"""What a client knows of a lock that it holds."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

from dflockd import errors
from dflockd.address import Address
from dflockd.client.operations import Grant, Target
from dflockd.client.routing import Path, ShardMap, doubt, insist, pursue
from dflockd.wire import fence_from_token

# The system's: no new seed after a fork, and nothing taken from a seed that somebody has set.
_chance = random.SystemRandom()

JITTER = 0.1
"""Renewals come earlier by up to this share, so that locks taken together do not renew together."""


SILENCE = 1.0
"""Seconds without an answer to a renewal after which, in a cluster, the other servers are asked."""


class Hold:
    """One granted slot, from its grant to its release or loss.

    The lease counts from before the request that began it was sent. Past its deadline the lock is
    lost, whatever the server says later: somebody else may hold it.
    """

    __slots__ = (
        "__weakref__",
        "_lost",
        "_on_lost",
        "_renew_ratio",
        "deadline",
        "lease",
        "pid",
        "renew_at",
        "shards",
        "target",
        "token",
    )

    def __init__(
        self,
        target: Target,
        grant: Grant,
        renew_ratio: float,
        on_lost: Callable[[], object] | None,
        shards: ShardMap | None = None,
    ) -> None:
        self.target = target
        self.shards = shards
        self.token = grant.token
        self.pid = os.getpid()
        self._renew_ratio = renew_ratio
        self._lost = False
        self._on_lost = on_lost
        self.renewed(grant)

    @property
    def held(self) -> bool:
        """Whether the lock is certainly still ours. After a fork it is the parent's."""
        return not self._lost and time.monotonic() < self.deadline and self.pid == os.getpid()

    @property
    def left(self) -> float:
        """Seconds until the lease ends."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def fence(self) -> int | None:
        """The number of this grant, or ``None`` from a server older than 2.1."""
        try:
            return fence_from_token(self.token)
        except ValueError:
            return None

    def renewed(self, grant: Grant) -> None:
        """Start the lease (anew) with what the server answered."""
        self.lease = grant.lease
        self.deadline = grant.deadline
        share = self._renew_ratio * (1 - _chance.random() * JITTER)
        self.renew_at = grant.deadline - grant.lease * (1 - share)
        """Monotonic time at which the next renewal should be sent."""

    def path_from(self, server: Address, refusal: BaseException | None = None) -> Path:
        """Return how to reach the server in charge again, until the lease ends.

        That is this one; in a cluster another may have taken its place.

        Args:
            server: the last that was asked.
            refusal: what it said, if it did.
        """
        now = time.monotonic()
        if self.shards is None:
            return insist(server, self.deadline, now)
        key = self.target.key
        if isinstance(refusal, errors.RefusedError):
            return pursue(
                self.shards, key, self.deadline, now, first=server, refusal=refusal, insists=True
            )
        return pursue(self.shards, key, self.deadline, now, insists=True)

    @property
    def silence(self) -> float:
        """Seconds that an answer may take before the others are asked."""
        return min(SILENCE, self.left / 2)

    @property
    def may_move(self) -> bool:
        """Whether another server may take its server's place: it is a cluster."""
        return self.shards is not None

    def doubts(self, server: Address) -> Path:
        """Return how to learn, in a cluster, that a server that says nothing is in charge no more."""
        assert self.shards is not None
        return doubt(self.shards, self.target.key, server, self.deadline, time.monotonic())

    def lose(self) -> Callable[[], object] | None:
        """Mark the lock as lost; the first time, return what to call about it."""
        if self._lost:
            return None
        self._lost = True
        return self._on_lost
