"""Slots of a pool of threads or greenlets, by themselves."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from celery.worker import state

from celery_dflock.worker.errands import Job
from celery_dflock.worker.slots import Slots


class Request:
    """A task that has a slot for as long as Celery counts it as reserved."""

    on_success = on_failure = on_timeout = None

    def __init__(self, number: int) -> None:
        self.id = str(number)


@pytest.fixture(autouse=True)
def no_reserved_requests() -> Any:
    state.reset_state()
    yield
    state.reset_state()


def slots_of(size: int, begun: list[Any], posted: list[Job]) -> tuple[Any, Slots]:
    consumer: Any = SimpleNamespace(
        pool=SimpleNamespace(num_processes=size), on_task_request=begun.append
    )
    return consumer, Slots(consumer, posted.append)


def test_any_number_of_slots_can_become_free_at_once() -> None:
    begun: list[Any] = []
    consumer, slots = slots_of(0, begun, [])
    number = sys.getrecursionlimit()
    requests = [Request(each) for each in range(number)]
    for request in requests:
        state.task_reserved(request)
        consumer.on_task_request(request)
    assert begun == []
    consumer.pool.num_processes = number - 1
    slots.go_on()
    assert begun == requests[:-1], "in order, and no more than there are slots"
    state.reserved_requests.discard(requests[0])
    slots.go_on()
    assert begun == requests


def test_a_task_that_is_over_at_once_leaves_its_slot_to_the_next() -> None:
    """It was revoked, or the process of the pool is this one."""
    begun: list[Any] = []
    consumer, slots = slots_of(0, [], [])
    slots._begin = lambda request: (begun.append(request), state.reserved_requests.discard(request))
    requests = [Request(each) for each in range(5)]
    for request in requests:
        state.task_reserved(request)
        consumer.on_task_request(request)
    consumer.pool.num_processes = 1
    slots.go_on()
    assert begun == requests


def test_a_free_slot_is_had_at_once() -> None:
    _, slots = slots_of(1, [], [])
    had: list[bool] = []
    slots.acquire(had.append, True)
    assert had == [True]
    assert slots.value == 0
