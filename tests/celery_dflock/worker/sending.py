"""An app whose workers send a task that waits again in seconds, and stand still after that.

Until the file ``JOBS_SENDING`` is there.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from celery_dflock.worker import unacknowledged
from celery_dflock.worker.consumer_wait import ConsumerWait
from celery_dflock.worker.waiter import Waiter
from tests.celery_dflock import jobs

app = jobs.app

APP = __name__
"""What a worker is to be started with."""

SENDING = "JOBS_SENDING"

_send_again, _stop = Waiter.send_again, ConsumerWait.stop


def begun(gate: Path) -> Path:
    """The file that is there once a task is being sent again."""
    return gate.with_suffix(".begun")


def stopping(gate: Path) -> Path:
    """The file that is there once the worker gives up all."""
    return gate.with_suffix(".stopping")


def send_again(waiter: Waiter) -> None:
    _send_again(waiter)
    gate = Path(os.environ[SENDING])
    begun(gate).touch()
    while not gate.exists():
        time.sleep(0.005)


def stop(wait: ConsumerWait) -> None:
    stopping(Path(os.environ[SENDING])).touch()
    _stop(wait)


if SENDING in os.environ:
    unacknowledged.limit = lambda _app: 2.0
    Waiter.send_again, ConsumerWait.stop = send_again, stop  # type: ignore[method-assign]
