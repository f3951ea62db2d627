"""An app whose workers each have a queue of their own, to which everything is sent that is for all."""

from __future__ import annotations

from kombu import Exchange, Queue
from kombu.common import Broadcast

from tests.celery_dflock.jobs import app

name = app.conf.task_default_queue
app.conf.task_queues = (
    Broadcast("for-all"),
    Queue(name, Exchange(name, app.conf.task_default_exchange_type), name),
)
