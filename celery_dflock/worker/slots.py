"""The slots of a worker's pool: which are free, and who gets the next one, first come, first served.

Where Celery runs prefork in an event loop it has a semaphore for that. With other pools tasks queue
inside the pool, out of sight; so there they queue here instead.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from celery.worker import state
from celery.worker.consumer import Consumer

from celery_dflock.worker.errands import Job


def slots_of(
    consumer: Consumer, post: Callable[[Job], object]
) -> tuple[Any, Callable[[Any], object]]:
    """Return the semaphore of a worker's pool, and what runs a task in a slot that was acquired.

    Celery clears the semaphore when the broker is lost, and with it the messages.

    Args:
        consumer: the consumer of the worker.
        post: has something done where requests are handled.
    """
    controller = consumer.controller
    if controller.semaphore is not None and controller.pool_cls.uses_semaphore:
        return controller.semaphore, controller._process_task
    controller.semaphore = slots = Slots(consumer, post)
    return slots, slots.use


class Slots:
    """As a semaphore of Celery's, for threads, gevent, eventlet and solo.

    A request that has a slot is one that Celery counts as reserved: once Celery does not, it has ended,
    however that was.
    """

    def __init__(self, consumer: Consumer, post: Callable[[Job], object]) -> None:
        self._pool = consumer.pool
        self._post = post
        self._begin: Callable[[Any], object] = consumer.on_task_request
        consumer.on_task_request = lambda request: self.acquire(self._begin_with, request)
        self._mutex = threading.Lock()
        self._waiting: deque[Callable[[], object]] = deque()
        self._inside: set[Any] = set()
        self._acquired = 0
        """Slots that are somebody's without a task yet."""

    @property
    def value(self) -> int:
        """How many are free; none while somebody queues."""
        with self._mutex:
            return 0 if self._waiting else self._free

    @property
    def _free(self) -> int:
        self._inside = {each for each in self._inside if each in state.reserved_requests}
        return int(self._pool.num_processes) - len(self._inside) - self._acquired

    def acquire(self, callback: Callable[..., object], *arguments: Any) -> None:
        """Call something once a slot is the caller's."""
        self._waiting.append(partial(callback, *arguments))
        self.go_on()

    def release(self) -> None:
        """Give a slot back."""
        with self._mutex:
            self._acquired = max(0, self._acquired - 1)
        self.go_on()

    def clear(self) -> None:
        """Forget the requests that queue, and those that have acquired a slot."""
        with self._mutex:
            self._waiting.clear()
            self._acquired = 0

    def use(self, request: Any) -> None:
        """Run a task in a slot that was acquired."""
        self._begin_with(request)
        self.go_on()  # it may be over: it was revoked, or this is the process

    def _begin_with(self, request: Any) -> None:
        """Do so where `go_on` goes on itself: hundreds of slots can become free at once."""
        for name in ("on_success", "on_failure", "on_timeout"):
            setattr(request, name, partial(self._over, getattr(request, name)))
        with self._mutex:
            self._inside.add(request)
            self._acquired = max(0, self._acquired - 1)
        self._begin(request)

    def _over(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        finally:
            self._post(self.go_on)  # this is still in the slot that becomes free

    def go_on(self) -> None:
        """Let those who queue have what is free."""
        while True:
            with self._mutex:
                if not self._waiting or self._free <= 0:
                    return
                self._acquired += 1
                callback = self._waiting.popleft()
            callback()
