"""Operations that are answered from a script, with times that are made up."""

from __future__ import annotations

from typing import Any

from dflockd.client.operations import Exchange, Operation, Target, TimedReply
from dflockd.wire import Space

LOCK = Target(Space.LOCK, b"key", 1, None, "host:6388")
LEASED = LOCK._replace(lease=10)
SEMAPHORE = Target(Space.SEMAPHORE, b"key", 3, 10, "host:6388")
PUBLISHED = SEMAPHORE.knowing(frozenset())
"""The same, of a server that knows the published protocol alone."""
TOKEN = b"0123456789abcdef0123456789abcdef"


class Played:
    """An operation that is answered from a script: what it sent, and what came of it."""

    def __init__(self, operation: Operation[Any], *answers: TimedReply) -> None:
        self.sent: list[Exchange] = []
        self.result: Any = None
        remaining = list(answers)
        try:
            exchange = next(operation)
            while True:
                self.sent.append(exchange)
                exchange = operation.send(remaining.pop(0))
        except StopIteration as stop:
            self.result = stop.value
        assert not remaining, "it asked less than expected"

    @property
    def requests(self) -> list[bytes]:
        return [exchange.request for exchange in self.sent]


def at_once(line: bytes) -> TimedReply:
    return TimedReply(line, 100.0, 100.001)


def granted(lease: int, *, sent: float = 100.0, received: float = 100.001) -> TimedReply:
    return TimedReply(b"ok %b %d" % (TOKEN, lease), sent, received)
