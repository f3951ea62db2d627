"""What a client knows of a lock that it holds."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterator

from dflockd.operations import Grant, Target
from dflockd.wire import fence_from_token

JITTER = 0.1
"""Renewals come earlier by up to this share, so that locks taken together do not renew together."""


RETRY_PAUSES = (0.0, 0.05, 0.1, 0.2)
"""Seconds between attempts to reach the server again; the last one repeats."""


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
        "target",
        "token",
    )

    def __init__(
        self,
        target: Target,
        grant: Grant,
        renew_ratio: float,
        on_lost: Callable[[], object] | None,
    ) -> None:
        self.target = target
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
        share = self._renew_ratio * (1 - random.random() * JITTER)
        self.renew_at = grant.deadline - grant.lease * (1 - share)
        """Monotonic time at which the next renewal should be sent."""

    def pauses(self) -> Iterator[float]:
        """Yield the seconds before each attempt to reach the server again, until the lease ends."""
        for pause in itertools.chain(RETRY_PAUSES, itertools.repeat(RETRY_PAUSES[-1])):
            left = self.deadline - time.monotonic()
            if left <= 0:
                return
            yield min(pause, left)

    def lose(self) -> Callable[[], object] | None:
        """Mark the lock as lost; the first time, return what to call about it."""
        if self._lost:
            return None
        self._lost = True
        return self._on_lost
