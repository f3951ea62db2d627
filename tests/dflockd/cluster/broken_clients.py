"""What clients do for a lock, without one of their rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflockd.client.connection import Connection
from dflockd.client.operations import GRACE, Exchange, Operation, Target, TimedReply, acquire
from dflockd.client.renewal import _Rescue


def silence_for_an_answer(target: Target, timeout: float | None) -> Operation[Any]:
    """Take the end of a client's patience for the answer that the lock is not free."""
    operation = acquire(target, timeout)
    return (yield from _changed(operation, lambda e: e._replace(timeout_is_reply=True)))


def long_patience(target: Target, timeout: float | None) -> Operation[Any]:
    """Give a server ten seconds for any answer."""

    def change(exchange: Exchange) -> Exchange:
        if exchange.timeout_is_reply or exchange.patience is None:
            return exchange
        return exchange._replace(patience=exchange.patience + 10 - GRACE)

    return (yield from _changed(acquire(target, timeout), change))


def without_an_attempt(target: Target, timeout: float | None) -> Operation[Any]:
    """Cut a wait off without having been told before that the lock is not free."""
    operation = acquire(target, timeout)
    exchange = next(operation)
    if timeout and exchange.patience == GRACE:
        exchange = operation.send(TimedReply(b"timeout", 0.0, 0.0))
    return (yield from _changed(operation, lambda e: e, exchange))


def _changed(
    operation: Operation[Any],
    change: Callable[[Exchange], Exchange],
    exchange: Exchange | None = None,
) -> Operation[Any]:
    try:
        exchange = exchange or next(operation)
        while True:
            exchange = operation.send((yield change(exchange)))
    except StopIteration as stop:
        return stop.value


class ForgetsWhatIsOwed(Connection):
    """Does not count the answers that are still to come, and takes each for the latest request's."""

    __slots__ = ()

    def owes(self) -> bool:
        return False

    def receive(self) -> bytes | None:
        self.reader.owed = min(self.reader.owed, 1)
        return super().receive()


class GivesUpWhatMayAnswer(_Rescue):
    """Closes connections on which a renewal may still be read."""

    def _end(self, link: Connection | None) -> None:
        super()._end(link)
        self._keeper.close()
        self._keeper.lease.spares = ()
