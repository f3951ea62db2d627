"""What waits in the consumer is back with its broker before that loses patience, and is not lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from celery_dflock import Skipped
from tests.celery_dflock import jobs
from tests.celery_dflock.rabbitmq.bus import Bus
from tests.rabbitmq import RabbitMQ

CONSUMER_TIMEOUT = 4


@pytest.fixture
def impatient(rabbitmq: RabbitMQ) -> Iterator[None]:
    """RabbitMQ waits for an acknowledgement for seconds, instead of half an hour."""
    setting = "application:{}_env(rabbit, consumer_timeout{})."
    usual = rabbitmq.control("eval", setting.format("get", ""))
    assert usual == "{ok,1800000}\n", usual
    rabbitmq.control("eval", setting.format("set", f", {CONSUMER_TIMEOUT * 1000}"))
    yield
    rabbitmq.control("eval", setting.format("set", ", 1800000"))


@pytest.fixture
def limited(rabbitmq: RabbitMQ) -> Iterator[int]:
    """RabbitMQ throws a message away that it has delivered more than once again."""
    rabbitmq.control("set_policy", "limited", "^quorum", '{"delivery-limit": 1}')
    yield 1
    rabbitmq.control("clear_policy", "limited")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", ["classic", pytest.param("quorum", marks=pytest.mark.soak)])
def test_a_long_wait_goes_through_the_broker_and_keeps_its_position(
    make_bus: Callable[..., Bus], kind: str, key: str
) -> None:
    bus = make_bus(kind)
    cluster = bus.cluster
    options = {"worker_prefetch_multiplier": 4, "dflock_consumer_timeout": CONSUMER_TIMEOUT}
    with bus.running("one", **options) as worker:
        with cluster.lock(key) as lock:
            first = bus.send(jobs.parked, key)
            cluster.wait_waiters(key, 1)
            cluster.wait_event("requeued", first)
            second = bus.send(jobs.parked, key)
            cluster.wait_event("requeued", second)
            assert lock.held
        ends = [cluster.wait_event("end", each) for each in (first, second)]
        assert worker.running

    assert ends[0]["at"] < ends[1]["at"]
    assert len(cluster.events(what="start", key=key)) == 2
    received = [worker.log_text().count(f"[{each.id}] received") for each in (first, second)]
    assert min(received) >= 2


@pytest.mark.usefixtures("impatient")
def test_a_long_wait_is_over_when_lock_timeout_is(make_bus: Callable[..., Bus], key: str) -> None:
    bus = make_bus("classic")
    options = {"lock_timeout": 2 * CONSUMER_TIMEOUT, "lock_conflict": "skip"}
    with (
        bus.running("one", dflock_consumer_timeout=CONSUMER_TIMEOUT),
        bus.cluster.lock(key),
    ):
        sent = bus.send(jobs.parked, key, headers={"dflock": options})
        result = sent.get(timeout=5 * CONSUMER_TIMEOUT)

    assert Skipped.of(result)
    assert len(bus.cluster.events(what="requeued", id=sent.id)) == 2


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
