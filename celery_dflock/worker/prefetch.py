"""What waiting in the consumer does to the prefetch count.

Celery prefetches a number of messages, and one that waits for its lock counts among them. For each
that waits, the worker asks the broker for one more, so that it still receives others.

The prefetch count is the sum of two numbers: Celery's own, which it sets anew after a reconnect,
and ours. They are stored apart, and added when they are sent.
"""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Any

from amqp import spec
from celery.worker.consumer import Consumer
from kombu.common import PREFETCH_COUNT_MAX, ignore_errors

from celery_dflock.config import settings
from celery_dflock.outcome import delivery

logger = logging.getLogger("celery_dflock")


class Prefetch:
    """The messages that a consumer receives beyond Celery's own count, for those that wait in it."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._waiting: set[Any] = set()
        self._mutex = threading.Lock()
        self._is_static = False
        self._celery = self._told = 0
        self._thread = 0
        # Celery does this where a task ends, which may be a thread of the pool, and waits for an answer
        # of the broker. The consumer's thread could read that answer, and both would stand still.
        restore = consumer._restore_prefetch_count_after_connection_restart
        consumer._restore_prefetch_count_after_connection_restart = partial(
            consumer.call_soon, restore
        )

    def attach(self) -> None:
        """Begin with a connection to the broker: nobody waits yet. Celery's tasks step has started."""
        consumer, qos = self._consumer, self._consumer.qos
        self._is_static = _is_static(consumer)
        self._thread = threading.get_ident()
        self._celery = self._told = consumer.initial_prefetch_count
        self._waiting = set()
        _read_what_was_asked_for(consumer.task_consumer.channel)
        # What Celery tells is what it counts itself; ours is added on the way.
        self._tell, qos.callback = qos.callback, self._add_ours

    @property
    def most(self) -> int | None:
        """How many may wait here without keeping others out; ``None`` for any number.

        Where the count can be raised that is ``dflock_max_waiting``. Where it cannot be (quorum
        queues, RabbitMQ 4) it is what is received ahead beyond one message for each slot.
        """
        if not self._celery:
            return None
        most: int = settings(self._consumer.app).max_waiting
        if not self._is_static:
            return most
        ahead: int = self._celery - self._consumer.pool.num_processes
        return min(most, max(0, ahead))

    @property
    def has_room(self) -> bool:
        """Whether one more can wait here; where the count can be raised it always can."""
        return not self._is_static or self.most is None or len(self._waiting) < self.most

    def raise_for(self, request: Any) -> None:
        """Receive one more while this request waits. Any thread, any number of times."""
        with self._mutex:
            self._waiting.add(request)
        self._say()

    def lower_for(self, request: Any) -> None:
        """It waits no more. Any thread; nothing happens for one that was not counted."""
        with self._mutex:
            self._waiting.discard(request)
        self._say()

    @property
    def count(self) -> int:
        """What the broker was told; 0 for no limit. For ``celery inspect stats``."""
        return self._told

    def warn(self) -> None:
        """Say what the broker cannot do, once it is known; for workers whose tasks may wait here."""
        if self._is_static and self.most is not None:
            logger.warning(
                "this broker cannot raise the prefetch count of a consumer (a quorum queue, or "
                "RabbitMQ 4): of %d prefetched messages %d may wait for their locks in the "
                "consumer, and others wait in their slots; for more raise "
                "worker_prefetch_multiplier, which is %d",
                self._celery,
                self.most,
                self._consumer.prefetch_multiplier,
            )

    def _say(self) -> None:
        """Tell the broker if there is something new; on the thread that talks with it."""
        if self._is_static or self._sum() == self._told:
            return
        if threading.get_ident() != self._thread:
            self._consumer.call_soon(self._say)
            return
        connection = self._consumer.connection
        if connection is None:
            return  # it is lost, and the count begins anew with the next one
        with ignore_errors(connection):  # if it is lost, the loop will find out
            self._send()

    def _send(self) -> None:
        self._told = self._sum()
        channel = self._consumer.task_consumer.channel
        if hasattr(channel, "send_method"):
            # Celery waits for the answer and may receive messages meanwhile, which its event loop
            # would notice only later. The answer says nothing, so this does not wait for it.
            channel.send_method(spec.Basic.Qos, "lBb", (0, self._told, True))
        else:
            self._tell(prefetch_count=self._told)

    def _add_ours(self, prefetch_count: int) -> None:
        """Celery tells the broker its count: replaces its `QoS.callback`.

        Where that changes nothing, as after ``pool_grow``, the worker still receives as many as before.
        """
        if not self._is_static:
            self._celery = prefetch_count
            self._told = self._sum()
        self._tell(prefetch_count=prefetch_count if self._is_static else self._told)

    def _sum(self) -> int:
        if not self._celery:
            return 0
        most = self.most
        ours = len(self._waiting) if most is None else min(len(self._waiting), most)
        limit = getattr(self._consumer.qos, "max_prefetch", None)  # worker_eta_task_limit, in 5.6
        ceiling = PREFETCH_COUNT_MAX if limit is None else min(limit, PREFETCH_COUNT_MAX)
        return max(self._celery, min(self._celery + ours, ceiling))


def _read_what_was_asked_for(channel: Any) -> None:
    """Read the message that Redis pops for this worker, though the count was lowered meanwhile.

    A worker asks for one message ahead (``BRPOP``), and cannot take that back. With no room for the
    answer kombu leaves it in the socket, for as long as the tasks run that take up the room. Nobody
    else can have it, and nothing says that it is there: if the worker is killed, it is lost.
    """
    if hasattr(channel, "_in_poll"):
        has_room = channel.qos.can_consume
        channel.qos.can_consume = lambda: has_room() or bool(channel._in_poll)


def _is_static(consumer: Consumer) -> bool:
    """Whether the broker takes a new prefetch count for new consumers only."""
    connection = consumer.connection
    if connection.transport.driver_type != "amqp":
        return False
    is_global = getattr(consumer, "qos_global", None)
    if is_global is None:  # Celery before 5.7 did not say what it does
        is_global = not connection.qos_semantics_matches_spec
        is_global &= not delivery.has_quorum_queues(consumer.app)
    return not is_global
