"""A task ends in a thread of the pool while the consumer begins anew. For workers that include it."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import amqp
from celery.worker.consumer.tasks import Tasks
from kombu.asynchronous import Hub

GATE = "ENDING_LATE_GATE"
"""The environment variable with the path of the file that lets the task end."""

TOLD = "a thread of the pool waits for an answer of the broker"

logger = logging.getLogger("celery_dflock")
has_ended = threading.Event()
start, basic_qos, call_soon = Tasks.start, amqp.Channel.basic_qos, Hub.call_soon


def _in_pool() -> bool:
    return threading.current_thread() is not threading.main_thread()


def start_beside_its_end(self: Any, consumer: Any) -> None:
    start(self, consumer)
    if consumer.restart_count > 1:
        has_ended.clear()
        Path(os.environ[GATE]).touch()
        has_ended.wait(60)


def note_what_is_left_to_the_consumer(self: Any, callback: Any, *args: Any) -> Any:
    if _in_pool() and "prefetch" in repr(callback):
        has_ended.set()
    return call_soon(self, callback, *args)


def note_who_tells_the_prefetch_count(self: Any, *args: Any, **kwargs: Any) -> Any:
    if _in_pool():
        logger.warning(TOLD)
        has_ended.set()
    return basic_qos(self, *args, **kwargs)


if GATE in os.environ:
    Tasks.start = start_beside_its_end
    Hub.call_soon = note_what_is_left_to_the_consumer
    amqp.Channel.basic_qos = note_who_tells_the_prefetch_count
