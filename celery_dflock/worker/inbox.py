"""What other threads have for the consumer of a worker, done where that handles its requests."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

from celery.worker.consumer import Consumer

Job: TypeAlias = Callable[[], object]

logger = logging.getLogger("celery_dflock")


class Inbox:
    """Jobs from any thread, begun in the order in which they came.

    In a worker with an event loop that does them. Under gevent and eventlet they are done in
    greenlets: one that gives a task to a full pool waits there. In other workers a thread does them.
    """

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._is_green = bool(getattr(consumer.pool, "is_green", False))
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pair: tuple[socket.socket, socket.socket] | None = None
        """What wakes the event loop of the worker, if it has one."""

    def start(self) -> None:
        """Begin, before anything is posted."""
        if self._consumer.hub is None and not self._is_green and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dflock-inbox", daemon=True)
            self._thread.start()

    def watch(self, hub: Any) -> None:
        """Have the event loop of the worker do the jobs, from its beginning or anew."""
        if self._pair is None:
            self._pair = socket.socketpair()
            for each in self._pair:
                each.setblocking(False)
        hub.add_reader(self._pair[0], self._wake)

    def post(self, job: Job) -> None:
        """Have something done. Returns at once."""
        self._jobs.put(job)
        if self._pair is not None:
            with contextlib.suppress(OSError):  # it is awake for long, or has ended
                self._pair[1].send(b"\0")
        elif self._is_green:
            self._consumer.timer.call_after(0, self._do_all)

    def close(self) -> None:
        """The worker has ended, and perhaps not the process. What has not been done is not."""
        self._jobs.put(None)
        for each in self._pair or ():
            each.close()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            _do(job)

    def _wake(self) -> None:
        if self._pair is not None:
            with contextlib.suppress(BlockingIOError):
                self._pair[0].recv(4096)
        self._do_all()

    def _do_all(self) -> None:
        with contextlib.suppress(queue.Empty):
            while (job := self._jobs.get_nowait()) is not None:
                _do(job)


def _do(job: Job) -> None:
    try:
        job()
    except Exception:
        logger.exception("%r failed", job)
