"""How a worker ends: those who wait for locks are told before anything else is waited for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from celery import bootsteps

from celery_dflock.worker.shutdown import shutdown


class Step(bootsteps.StartStopStep):
    """Tells those who wait that the worker ends, in whatever way it does.

    A signal is heard of early, by ``worker_shutting_down``. A shutdown that was asked for from remote,
    and a restart, come as an exception out of the event loop: then this is the first to know, before
    anybody waits for the pool.
    """

    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)
        if hasattr(worker, "wait_for_soft_shutdown"):  # since Celery 5.5
            worker.wait_for_soft_shutdown = partial(
                _end_softly, worker, worker.wait_for_soft_shutdown
            )

    def close(self, _worker: Any) -> None:
        """The worker is about to end its parts."""
        shutdown.begin()
        shutdown.settle()


def _end_softly(worker: Any, wait: Callable[[], object]) -> None:
    """Begin before a soft shutdown waits, and before a cold one kills what it finds.

    This runs in a signal handler, in the thread of the event loop: the messages of those who wait in
    the consumer go back when that goes on, but nobody else has to wait for them until then.
    """
    shutdown.begin()
    consumer_wait = getattr(getattr(worker, "consumer", None), "dflock_wait", None)
    if consumer_wait is not None:
        consumer_wait.leave()
    shutdown.settle()
    wait()
