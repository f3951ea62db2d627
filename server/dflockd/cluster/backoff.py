"""When what has failed is tried again: soon at first, then ever more rarely, never all at once."""

from __future__ import annotations

import math
from collections.abc import Callable

from dflockd.cluster.transactions import RETRY, Kind, Transaction

MOST = 2.5
"""Seconds between two attempts at most, about: what a store that works again is not noticed for."""

SPREAD = 0.25
"""Share by which a pause is longer or shorter, by chance: servers are not to come all together."""


class Backoff:
    """The attempts at one thing.

    While it fails there is one attempt at a time. One that works ends all that at once.

    Args:
        chance: a number from 0 to 1, another one each time.

    Attributes:
        failing: whether the last attempt has failed.
    """

    def __init__(self, chance: Callable[[], float]) -> None:
        self.failing = False
        self._chance = chance
        self._pause = RETRY
        self._failed_at = -math.inf
        self._until = -math.inf
        self._trying = False

    def may(self, now: float) -> bool:
        """Whether an attempt may be made."""
        return not self.failing or (not self._trying and now >= self._until)

    def due(self, at: float | None) -> float | None:
        """Return from when on an attempt may be made that is due `at` a time; ``None`` for never."""
        if not self.failing or at is None:
            return at
        return None if self._trying else max(at, self._until)

    def begin(self) -> None:
        """Take note of an attempt."""
        self._trying = self.failing

    def failed(self, made: float, now: float, left: float = math.inf) -> float:
        """Take note that an attempt has failed; return when the next one may be made.

        Args:
            made: when it was made. Of several at a time, the first to fail counts.
            now: the time.
            left: seconds in which one should work, so that nothing is lost.
        """
        pause = self._pause * (1 - SPREAD + 2 * SPREAD * self._chance())
        if made >= self._failed_at:
            self._pause = min(2 * self._pause, MOST)
            self._failed_at = now
        if left > 0:
            pause = min(pause, max(RETRY, left / 4))
        self.failing, self._trying = True, False
        self._until = max(made + pause, now + RETRY)
        return self._until

    def worked(self) -> None:
        """Take note that an attempt has worked."""
        self.failing = self._trying = False
        self._pause, self._failed_at = RETRY, -math.inf


class Backoffs:
    """A `Backoff` for each kind of transactions: what is refused forever holds up nothing else."""

    def __init__(self, chance: Callable[[], float]) -> None:
        self._kinds = {kind: Backoff(chance) for kind in Kind}

    def __getitem__(self, kind: Kind) -> Backoff:
        return self._kinds[kind]

    def again_at(self, kind: Kind) -> float | None:
        """Return when a kind that fails is due again; ``None`` if it works, or is being tried."""
        backoff = self._kinds[kind]
        return backoff.due(-math.inf) if backoff.failing else None

    def ended(self, transaction: Transaction, *, worked: bool, now: float) -> None:
        """Take note of how a transaction ended."""
        if worked:
            self._kinds[transaction.kind].worked()
        else:
            self._kinds[transaction.kind].failed(transaction.made, now)
