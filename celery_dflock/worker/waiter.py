"""One task that waits for its lock in the consumer of a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from celery.app.task import Context

from celery_dflock.config import settings
from celery_dflock.exceptions import LockNotAcquiredError
from celery_dflock.identity import label_of
from celery_dflock.options import LockOptions
from celery_dflock.outcome.header import Header, age_of, is_silent, options_of_call
from celery_dflock.outcome.requeue import chance, publish, reservation, short_reservation
from celery_dflock.outcome.types import (
    HandOff,
    ItsTurn,
    Kept,
    Overtaken,
    TimedOut,
    refusal_of,
)
from celery_dflock.plan import Bound, keeps_position
from celery_dflock.unique.run import Carried
from celery_dflock.worker import unacknowledged
from dflockd import clock, errors
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
        lock: what it waits for, of several keys those in their order. Never held here, but for all
            but the last of several; see `held`.
        held: those that are held here, while it waits for the next.
        timeout: seconds to wait here, as far as the broker waits too; ``None`` for no end.
        ticket: the ticket of the position that was kept for it before, if one was.
        reservation: how its position is kept if its turn does not come in time.
        pending: the client's part of the wait, once that has begun.
        handed: what the process that runs the task is to know, once that is decided.
        is_in_pool: whether it has been given to the pool.
        is_accepted: whether a process has taken it up.
        is_over: whether nobody is to come back to it.
        is_cut: whether the broker waits no longer than `timeout`, and this would.
        is_to_be_sent: whether it could not be sent again yet.
        is_sent: whether it was sent again, and its message is to be acknowledged.
        holds_nothing: whether it is to hold nothing here, or has given it back. Then it waits for the
            turn of the first key alone, and takes the others in its process.
    """

    handed: HandOff | None = None
    held: tuple[DistributedLock, ...] = ()
    holds_nothing = False
    is_in_pool = False
    is_accepted = False
    is_over = False
    is_to_be_sent = False
    is_sent = False
    reservation: Reservation | None = None
    _make_locks: Callable[[], Sequence[DistributedLock]]
    _unique: Carried | None = None
    _unique_due = 0.0

    def __init__(
        self,
        request: Any,
        context: Context,
        locks: Sequence[DistributedLock],
        options: LockOptions,
    ) -> None:
        self.request = request
        self._locks = locks
        self.lock = locks[0]
        self.pending: PendingAcquire
        header = Header.read(context)
        self.ticket = header.ticket
        # What was waited before counts, if the wait goes on.
        self._here_since = clock.now()
        self._began = self._here_since - header.waited
        most = self._limit = unacknowledged.limit(request.task.app)
        left = options.queue_timeout
        if most is not None:  # not all at once: hundreds may have come together
            most -= unacknowledged.since_received(request)
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
        owner = bound.asks_as(context, age)
        locks = bound.locks_of(
            task, tuple(request.args), request.kwargs, label_of(task.name, request.id), owner
        )
        waiter = cls(request, context, locks, options)
        if waiter.lock is not locks[-1]:
            call = task, tuple(request.args), request.kwargs
            label = label_of(task.name, request.id)
            waiter._make_locks = partial(bound.locks_of, *call, label, owner)
        return waiter

    @property
    def is_late(self) -> bool:
        """Whether the broker may not wait until a process is free that this would queue for.

        Not if it had no time to wait: then it has just been here, and was sent again for that.
        """
        if self._limit is None or not self.timeout:
            return False
        return unacknowledged.since_received(self.request) >= LEAST_SHARE * self._limit

    @property
    def context(self) -> Context:
        """The request as a task knows it."""
        return Context(self.request.request_dict)

    # Several keys.

    @property
    def is_last(self) -> bool:
        """Whether what comes next is a process."""
        return self.holds_nothing or len(self.held) == len(self._locks) - 1

    @property
    def left(self) -> float | None:
        """Seconds left to wait; ``None`` for no end."""
        if self.timeout is None or not (self.held or self.holds_nothing):
            return self.timeout
        return max(0.0, self.timeout - (clock.now() - self._here_since))

    def has_next(self) -> None:
        """It holds the lock that it has waited for, and waits for the next."""
        self.held = (*self.held, self.lock)
        self.lock = self._locks[len(self.held)]
        # What is kept of a position is for the first one: an attempt begins with that.
        self.ticket = self.reservation = None

    def let_go(self) -> Sequence[DistributedLock]:
        """Hold nothing any more; return what was held."""
        held, self.held = self.held, ()
        return held

    def begin_again(self) -> None:
        """Wait for the first one, after `let_go`.

        Raises:
            Exception: whatever makes of the arguments no key this time.
        """
        # Others: a wait that was given up may not have come to its end yet.
        self._locks = self._make_locks()
        self.lock, self.holds_nothing = self._locks[0], True

    def overtaken(self) -> HandOff:
        """Return what the process is told if the turn came, and what is held cannot be lent."""
        why = "its turn came, but another lock that it needs was in doubt or lost"
        return HandOff(
            self._locks[0].key, self._waited, Overtaken(LockNotAcquiredError(self.lock.key, why))
        )

    def lend(self) -> tuple[tuple[str, str], ...] | None:
        """Return what is held, with the tokens for the process; ``None`` if one cannot be lent now."""
        if not all(lock.held for lock in self.held):
            return None
        lent = [(lock.key, lock.lend()) for lock in self.held]
        tokens = tuple((key, token) for key, token in lent if token is not None)
        return tokens if len(tokens) == len(lent) else None

    @property
    def has_unique_to_prolong(self) -> bool:
        """Whether its lock of ``lock_unique`` could run out before this is looked at again."""
        return self._unique is not None and clock.now() >= self._unique_due

    def prolong_unique(self) -> None:
        """Have that lock last while this waits. Asks a server, so not for the consumer's own thread."""
        if self._unique is not None and not (self.is_in_pool or self.is_over):
            self._unique_due = clock.now() + self._unique_ttl / 3
            self._unique.prolong(self._unique_ttl)

    def hand_off(self, ticket: str | None, lent: tuple[tuple[str, str], ...]) -> HandOff:
        """Return what the process that runs the task is told when the turn has come."""
        return HandOff(self._locks[0].key, self._waited, ItsTurn(ticket), lent)

    def verdict(self, error: errors.RemoteError | None) -> HandOff:
        """Return what it is told when the wait has ended otherwise."""
        key, first, waited = self.lock.key, self._locks[0].key, self._waited
        if error is None:
            why = f"waited {waited:.0f} s in the consumer (lock_timeout)"
            pause = None if self.reservation is None else self.reservation.away_s
            kept = Kept.of(self.lock.ticket, pause)
            return HandOff(first, waited, TimedOut(LockNotAcquiredError(key, why), kept))
        if isinstance(error, errors.UnsupportedError):
            return HandOff(first, waited, None)
        return HandOff(first, waited, refusal_of(error, key, self.lock.server))

    def send_again(self) -> None:
        """Publish the task once more, as one that waits on at its position."""
        request = self.context
        ticket, waited = self._locks[0].ticket, round(self._waited, 3)
        header = replace(Header.read(request), ticket=ticket, waited=waited)
        pause = 0.0 if self.reservation is None else self.reservation.away_s
        publish(self.request.task, request, pause, header)

    @property
    def _waited(self) -> float:
        return clock.now() - self._began
