"""What other threads have for the consumer of a worker, done where that handles its requests."""

from __future__ import annotations

import contextlib
import queue
import socket
from typing import Any

from celery.concurrency.solo import TaskPool as SoloPool
from celery.worker.consumer import Consumer

from celery_dflock.worker.errands import Errands, Job, do


class Inbox:
    """Jobs from any thread, begun in the order in which they came.

    In a worker with an event loop that does them. Under gevent and eventlet they are done in
    greenlets: one that gives a task to a full pool waits there. In other workers a thread does them,
    and with the pool solo it runs the tasks that they give to the pool.
    """

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._is_green = bool(consumer.pool.is_green)
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._errands: Errands | None = None
        self._pair: tuple[socket.socket, socket.socket] | None = None
        """What wakes the event loop of the worker, if it has one."""

    def start(self) -> None:
        """Begin, before anything is posted."""
        if self._consumer.hub is None and not self._is_green and self._errands is None:
            self._errands = Errands("dflock-inbox")

    def watch(self, hub: Any) -> None:
        """Have the event loop of the worker do the jobs, from its beginning or anew."""
        if self._pair is None:
            self._pair = socket.socketpair()
            for each in self._pair:
                each.setblocking(False)
        hub.add_reader(self._pair[0], self._wake)

    def post(self, job: Job) -> None:
        """Have something done. Returns at once."""
        if self._errands is not None:
            self._errands.run(job)
            return
        self._jobs.put(job)
        if self._pair is not None:
            with contextlib.suppress(OSError):  # it is awake for long, or has ended
                self._pair[1].send(b"\0")
        elif self._is_green:
            self._consumer.timer.call_after(0, self._do_all)

    def close(self) -> None:
        """The worker has ended, and perhaps not the process."""
        if self._errands is not None:
            self._errands.close()
            if isinstance(self._consumer.pool, SoloPool):
                self._errands.join()  # it may be in a task, and would end with the process
        for each in self._pair or ():
            each.close()

    def _wake(self) -> None:
        if self._pair is not None:
            with contextlib.suppress(BlockingIOError):
                self._pair[0].recv(4096)
        self._do_all()

    def _do_all(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                do(self._jobs.get_nowait())
