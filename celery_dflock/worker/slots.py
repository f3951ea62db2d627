"""How busy the pool of a worker is: a hint, on which no lock depends."""

from __future__ import annotations

from celery.concurrency import solo
from celery.worker import state
from celery.worker.consumer import Consumer


def spare(consumer: Consumer) -> int:
    """Return how many slots of the pool do nothing; below 0, how many tasks stand in line for one."""
    processes: int = consumer.pool.num_processes
    return processes - len(state.reserved_requests)


def is_answering(consumer: Consumer) -> bool:
    """Whether the consumer can say who goes to the pool: a solo worker cannot while it runs a task."""
    return not (isinstance(consumer.pool, solo.TaskPool) and state.active_requests)
