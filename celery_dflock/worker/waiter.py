"""One task that waits for its lock in the consumer of a worker."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from celery.app.task import Context

from celery_dflock.config import settings
from celery_dflock.exceptions import LockNotAcquiredError
from celery_dflock.identity import Owner, label_of
from celery_dflock.options import LockOptions
from celery_dflock.outcome.header import Header, age_of, is_silent, options_of_call
from celery_dflock.outcome.requeue import chance, publish, reservation, short_reservation
from celery_dflock.outcome.types import HandOff, ItsTurn, Kept, Redelivered, TimedOut, refusal_of
from celery_dflock.plan import Bound, keeps_position
from celery_dflock.unique.run import Carried
from celery_dflock.worker import unacknowledged
from dflockd import errors
from dflockd.client.pending import PendingAcquire
from dflockd.sync_client import DistributedLock, Reservation

LEAST_SHARE = 0.6
"""Of the time that the broker leaves, the least after which a wait is cut."""


def _given(request_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options that a call names itself, from its request as it goes to the pool."""
    if is_silent(request_dict) and "headers" not in request_dict:
        return {}
    return options_of_call(Context(request_dict))


class Waiter:
    """One task that waits, or has waited and is on its way through the pool.

    Attributes:
        request: Celery's.
        owner: who asks.
        lock: what it waits for; of several keys the first in order. Never held here.
        timeout: seconds to wait here, as far as the broker waits too; ``None`` for no end.
        ticket: of the position that was kept for it before, if one was.
        reservation: how its position is kept if its turn does not come in time.
        pending: the client's part of the wait, once that has begun.
        handed: what the process that runs the task is to know, once that is decided.
        is_in_pool: whether it has been given to the pool.
        is_accepted: whether a process has taken it up.
        is_over: whether nobody is to come back to it.
        is_cut: whether the broker waits no longer than `timeout`, and this would.
        is_to_be_sent: whether it could not be sent again yet.
    """

    handed: HandOff | None = None
    is_in_pool = False
    is_accepted = False
    is_over = False
    is_to_be_sent = False
    reservation: Reservation | None = None
    _unique: Carried | None = None
    _unique_due = 0.0

    def __init__(
        self,
        request: Any,
        context: Context,
        locks: Sequence[DistributedLock],
        owner: Owner,
        options: LockOptions,
    ) -> None:
        self.request = request
        self.lock = locks[0]
        self.owner = owner
        self.pending: PendingAcquire
        header = Header.read(context)
        self.ticket = header.ticket
        # What was waited before counts, if the wait goes on.
        self._began = time.monotonic() - header.waited
        most = unacknowledged.limit(request.task.app)
        left = options.queue_timeout
        if most is not None:  # not all at once: hundreds may have come together
            most = max(1.0, most * chance.uniform(LEAST_SHARE, 1.0) // 1)
        if left is not None:
            left = max(0.0, left - header.waited)
        self.is_cut = most is not None and (left is None or left > most)
        self.timeout = most if self.is_cut else left
        self._unique_ttl = options.unique_ttl
        if header.unique is not None and not header.is_redelivered(context):
            said = settings(request.task.app)
            self._unique = Carried(request.task, context, header.unique, options.ttl, said)
        if self.is_cut:
            self.reservation = short_reservation(request.task, options)
        elif keeps_position(options, len(locks)):
            self.reservation = reservation(request.task, header, options, self.timeout)

    @classmethod
    def of(cls, request: Any) -> Waiter | None:
        """Return that of a request that waits for a lock here; ``None`` if it does not.

        Raises:
            Exception: whatever makes of the arguments no key. The process that runs the task will
                meet the same, and say so.
        """
        task = request.task
        bound: Bound = task._bound(_given(request.request_dict))
        options = bound.options
        if (
            (options.wait or bound.settings.wait) != "consumer"
            or options.queue_timeout == 0
            or not bound.is_locked
        ):
            return None
        age = 0
        if options.supersedes:
            age = age_of(request.request_dict, request.id)
            if not age:
                return None  # it is drawn where the task can wait for the answer
        context = Context(request.request_dict)
        asks = bound.owner_of(context)
        owner = (*asks, age) if age else asks
        label = label_of(task.name, request.id)
        locks = bound.locks_of(task, tuple(request.args), request.kwargs, label, owner)
        return cls(request, context, locks, asks, options)

    @property
    def context(self) -> Context:
        """The request as a task knows it."""
        return Context(self.request.request_dict)

    @property
    def line(self) -> Hashable:
        """What is waited for: locks and semaphores have names of their own."""
        return type(self.lock), self.lock.key

    @property
    def run(self) -> Hashable:
        """Which task waits for which key: the same for another delivery of the message."""
        return self.owner, self.line

    @property
    def has_unique_to_prolong(self) -> bool:
        """Whether its lock of ``lock_unique`` could run out before this is looked at again."""
        return self._unique is not None and time.monotonic() >= self._unique_due

    def prolong_unique(self) -> None:
        """Have that lock last while this waits. Asks a server, so not for the consumer's own thread."""
        if self._unique is not None and not (self.is_in_pool or self.is_over):
            self._unique_due = time.monotonic() + self._unique_ttl / 3
            self._unique.prolong(self._unique_ttl)

    def hand_off(self, ticket: str | None) -> HandOff:
        """Return what the process that runs the task is told when the turn has come."""
        return HandOff(self.lock.key, self._waited, ItsTurn(ticket))

    def redelivery(self, why: str) -> HandOff:
        """Return what it is told if another delivery of its message is there before it."""
        key = self.lock.key
        return HandOff(key, self._waited, Redelivered(LockNotAcquiredError(key, why)))

    def verdict(self, error: errors.RemoteError | None) -> HandOff:
        """Return what it is told when the wait has ended otherwise."""
        key, waited = self.lock.key, self._waited
        if error is None:
            why = f"waited {waited:.0f} s in the consumer (lock_timeout)"
            pause = None if self.reservation is None else self.reservation.away_s
            kept = Kept.of(self.lock.ticket, pause)
            return HandOff(key, waited, TimedOut(LockNotAcquiredError(key, why), kept))
        if isinstance(error, errors.UnsupportedError):
            return HandOff(key, waited, None)
        return HandOff(key, waited, refusal_of(error, key, self.lock.server))

    def send_again(self) -> None:
        """Publish the task once more, as one that waits on at its position."""
        request = self.context
        ticket, waited = self.lock.ticket, round(self._waited, 3)
        header = replace(Header.read(request), ticket=ticket, waited=waited)
        pause = 0.0 if self.reservation is None else self.reservation.away_s
        publish(self.request.task, request, pause, header)

    @property
    def _waited(self) -> float:
        return time.monotonic() - self._began
