"""A queue that throws away what was delivered too often has what waits in the consumer as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.celery_dflock import jobs
from tests.celery_dflock.rabbitmq.bus import Bus
from tests.rabbitmq import RabbitMQ


@pytest.fixture
def limited(rabbitmq: RabbitMQ) -> Iterator[int]:
    """RabbitMQ throws a message away that it has delivered more than once again."""
    rabbitmq.evaluate(
        'rabbit_policy:set(<<"/">>, <<"limited">>, <<"^quorum">>, [{<<"delivery-limit">>, 1}],'
        ' 0, <<"all">>, <<"a test">>)'
    )
    yield 1
    rabbitmq.evaluate('rabbit_policy:delete(<<"/">>, <<"limited">>, <<"a test">>)')


@pytest.mark.parametrize("kind", ["quorum"])
def test_no_number_of_shutdowns_loses_what_waits(
    make_bus: Callable[..., Bus], limited: int, kind: str, key: str
) -> None:
    bus = make_bus(kind)
    cluster = bus.cluster
    with cluster.lock(key):
        waiting = [bus.send(jobs.parked, key) for _ in range(3)]
        for number in range(limited + 2):
            with bus.running(f"{number}", worker_prefetch_multiplier=4) as worker:
                cluster.wait_waiters(key, 3)
                worker.stop()
    with bus.running("last"):
        for each in waiting:
            cluster.wait_event("end", each)
    assert len(cluster.events(what="start", key=key)) == 3
