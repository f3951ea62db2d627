"""What waits in the consumer is back with its broker before that loses patience, and is not lost."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from celery.result import AsyncResult

from celery_dflock import Skipped
from dflockd.sync_client import DistributedLock
from examples.demo.stage import Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE
from tests.celery_dflock.rabbitmq.bus import Bus
from tests.celery_dflock.worker.waiting import started
from tests.rabbitmq import RabbitMQ

CONSUMER_TIMEOUT = 4
"""What the worker is told."""

PATIENCE_OF_RABBITMQ = 5 * CONSUMER_TIMEOUT
"""Longer, so that no busy machine makes the worker late; a worker that keeps a message is too late."""


@pytest.fixture(scope="module")
def impatient(rabbitmq: RabbitMQ) -> Iterator[None]:
    """RabbitMQ waits for an acknowledgement for seconds, instead of half an hour."""
    setting = "application:{}_env(rabbit, consumer_timeout{})"
    get, shorter, as_usual = (
        setting.format("get", ""),
        setting.format("set", f", {PATIENCE_OF_RABBITMQ * 1000}"),
        setting.format("set", ", 1800000"),
    )
    said = rabbitmq.evaluate(f"{{{get}, {shorter}}}")
    assert said == "{{ok, 1800000}, ok}"
    yield
    rabbitmq.evaluate(as_usual)


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("kind", ["classic", pytest.param("quorum", marks=pytest.mark.soak)])
def test_a_long_wait_goes_through_the_broker_and_keeps_its_position(
    make_bus: Callable[..., Bus], kind: str, key: str
) -> None:
    """It is over when `lock_timeout` is, however often it went through the broker."""
    bus = make_bus(kind)
    cluster = bus.cluster
    options = {"worker_prefetch_multiplier": 4, "dflock_consumer_timeout": CONSUMER_TIMEOUT}
    given_up = {"lock_timeout": 2 * CONSUMER_TIMEOUT, "lock_conflict": "skip"}
    with bus.running("one", **options) as worker, cluster.lock(f"{key}:given-up"):
        skipped = bus.send(jobs.parked, f"{key}:given-up", headers={"dflock": given_up})
        with cluster.lock(key) as lock:
            first = bus.send(jobs.parked, key)
            cluster.wait(lambda: received(worker, first) > 1 or None, "it comes again")
            second = bus.send(jobs.parked, key)
            cluster.wait(lambda: received(worker, second) > 1 or None, "it comes again")
            # Who is on its way through the broker when the lock is free is passed.
            both = [first.id, second.id]
            cluster.wait(lambda: present(lock) == both or None, "both to wait, in their order")
            assert lock.held
        for each in (first, second):
            cluster.wait_event("end", each)
        assert Skipped.of(skipped.get(timeout=PATIENCE))
        assert worker.running

    assert len(cluster.events(what="start", key=key)) == 2
    assert not cluster.events(what="requeued", key=key)
    assert len(cluster.events(what="requeued", id=skipped.id)) == 0


def present(lock: DistributedLock) -> list[str]:
    """The tasks that wait and are not away, in the order of the lock server."""
    waiting = [each for each in lock.inspect()["waiters"] if not each["away"]]
    return [re.search(r"\[(.+?)\]", each["label"])[1] for each in waiting]


def received(worker: Worker, sent: AsyncResult) -> int:
    """How often a worker has received a task."""
    return worker.log_text().count(f"[{sent.id}] received")


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("pool", ["prefork", pytest.param("gevent", marks=pytest.mark.soak)])
def test_many_waits_are_cut_while_no_process_is_free(
    make_bus: Callable[..., Bus], key: str, gate: Path, pool: str
) -> None:
    """They need none for that: they would come too late."""
    bus, number = make_bus("classic"), 100
    cluster = bus.cluster
    with bus.running("one", pool=pool, dflock_consumer_timeout=CONSUMER_TIMEOUT) as worker:
        busy = [bus.send(jobs.plain, f"{key}-busy", gate=str(gate)) for _ in range(2)]
        with cluster.lock(key, ttl=300):
            sent = [bus.send(jobs.parked, key) for _ in range(number)]
            cluster.wait_waiters(key, number)

            def all_came_again() -> bool | None:
                log = worker.log_text()
                return all(log.count(f"[{each.id}] received") > 1 for each in sent) or None

            cluster.wait(all_came_again, "all of them to come again", PATIENCE_OF_RABBITMQ)
            gate.touch()
        for each in (*busy, *sent):
            cluster.wait_event("end", each)
        assert worker.running
    # Who is on its way through the broker when the lock is free is passed.
    assert sorted(started(cluster, key)) == sorted(each.id for each in sent)
    assert not cluster.events(what="requeued", key=key)


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("impatient")
def test_the_time_before_a_wait_counts(make_bus: Callable[..., Bus], key: str) -> None:
    """RabbitMQ waits from the moment in which the worker receives the message, which has an ETA."""
    bus = make_bus("classic")
    cluster = bus.cluster
    told = round(0.6 * PATIENCE_OF_RABBITMQ)
    with bus.running("one", dflock_consumer_timeout=told) as worker:
        with cluster.lock(key, ttl=300):
            # Without the time before it, the wait would take until RabbitMQ has no patience any more.
            sent = bus.send(jobs.parked, key, countdown=0.75 * PATIENCE_OF_RABBITMQ)
            cluster.wait(lambda: received(worker, sent) > 1 or None, "it comes again")
        cluster.wait_event("end", sent)
        assert worker.running
        assert "PRECONDITION_FAILED" not in worker.log_text()
    assert not cluster.events(what="requeued", key=key)


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("impatient")
def test_a_task_whose_time_is_over_queues_for_a_process_with_a_new_message(
    make_bus: Callable[..., Bus], key: str, gate: Path
) -> None:
    """No process is free, and RabbitMQ has waited for most of its time already."""
    bus = make_bus("classic")
    cluster = bus.cluster
    given_up = {"lock_timeout": CONSUMER_TIMEOUT - 2, "lock_conflict": "skip"}
    with bus.running("one", dflock_consumer_timeout=CONSUMER_TIMEOUT) as worker:
        busy = [bus.send(jobs.plain, f"{key}-busy", gate=str(gate)) for _ in range(2)]
        for each in busy:
            cluster.wait_event("start", each)
        with cluster.lock(key, ttl=300):
            sent = bus.send(jobs.parked, key, headers={"dflock": given_up})
            cluster.wait(lambda: received(worker, sent) > 1 or None, "it comes again")
            gate.touch()
            assert Skipped.of(sent.get(timeout=PATIENCE))
        assert received(worker, sent) == 2, "once: its time is over"
    assert not cluster.events(what="requeued", key=key)


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("impatient")
def test_no_pause_of_a_requeue_is_longer_than_rabbitmq_waits(
    make_bus: Callable[..., Bus], key: str
) -> None:
    """The worker that gets the message next keeps it unacknowledged for the pause."""
    bus = make_bus("classic")
    cluster = bus.cluster
    long = {"lock_requeue": {"base": 10 * PATIENCE_OF_RABBITMQ, "cap": 10 * PATIENCE_OF_RABBITMQ}}
    with bus.running("one", dflock_consumer_timeout=PATIENCE_OF_RABBITMQ) as worker:
        with cluster.lock(key, ttl=300):
            sent = bus.send(jobs.requeued, key, headers={"dflock": long})
            cluster.wait_event("requeued", sent, 3)
        assert sent.get(timeout=PATIENCE_OF_RABBITMQ + PATIENCE) == sent.id
        assert worker.running
        assert "PRECONDITION_FAILED" not in worker.log_text()
