"""What waiting in the consumer does to the prefetch count.

Celery receives so many messages ahead, and one that waits for its lock counts among them. For each
that waits the broker is asked for one more, so that the worker goes on to receive others.

Two numbers meet in what the broker is told: Celery's own, which it sets anew after a reconnect, and
ours. They are kept apart and added up where they are told.
"""

from __future__ import annotations

from typing import Any

from celery.worker.consumer import Consumer


class Prefetch:
    """The messages that a consumer receives beyond Celery's own count, for those that wait in it."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def attach(self) -> None:
        """Begin with a connection to the broker: nobody waits yet. Celery's tasks step has started."""
        raise NotImplementedError

    @property
    def most(self) -> int | None:
        """How many may wait here without keeping others out; ``None`` for any number.

        Where the count can be raised that is ``dflock_max_waiting``. Where it cannot be (quorum
        queues, RabbitMQ 4) it is what is received ahead beyond one message for each slot.
        """
        raise NotImplementedError

    def raise_for(self, request: Any) -> None:
        """Receive one more while this request waits. Any thread, any number of times."""
        raise NotImplementedError

    def lower_for(self, request: Any) -> None:
        """It waits no more. Any thread; nothing happens for one that was not counted."""
        raise NotImplementedError

    @property
    def count(self) -> int:
        """What the broker was told; 0 for no limit. For ``celery inspect stats``."""
        raise NotImplementedError
