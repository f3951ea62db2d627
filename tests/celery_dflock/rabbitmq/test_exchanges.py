"""Every way to a queue, and all that sends a task back: to that queue alone, and each runs once."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Task
from celery.result import AsyncResult
from kombu import Exchange, Queue

from celery_dflock import Skipped
from examples.demo.stage import Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster
from tests.celery_dflock.rabbitmq import exchanging
from tests.celery_dflock.rabbitmq.bus import Bus
from tests.celery_dflock.rabbitmq.exchanging import KEY_OF_ITS_OWN, WAYS, Way, named, to_die
from tests.rabbitmq import RabbitMQ

WORKERS = ("a", "b")
CONNECTED = "Connected to amqp"


@pytest.fixture(scope="module")
def bus(rabbitmq: RabbitMQ, cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Bus]:
    with Bus(rabbitmq, cluster, f"exchanging-{request.param}", request.param) as bus:
        to_die(bus.kind).bind(bus.connection.default_channel).declare()
        yield bus


@pytest.fixture(scope="module")
def both(bus: Bus) -> Iterator[list[Worker]]:
    with contextlib.ExitStack() as running, pytest.MonkeyPatch.context() as patch:
        workers = []
        patch.setenv(exchanging.KIND, bus.kind)
        # Some have to fit into the consumer where the broker cannot raise the prefetch count.
        settings = {"dflock_consumer_timeout": 3, "worker_prefetch_multiplier": 4}
        for name in WORKERS:
            patch.setenv(exchanging.WORKER, name)
            worker = bus.worker(name, app=exchanging.__name__, **settings)
            workers.append(running.enter_context(worker))
        for worker in workers:
            worker.wait_ready()
        yield workers


def send(bus: Bus, way: Way, task: Task, key: str, **options: Any) -> AsyncResult:
    key_there = named(bus.kind, way.key) if way.is_named else way.key
    if way.exchange:
        exchange = named(bus.kind, way.exchange)
        where: dict[str, Any] = {"exchange": exchange, "routing_key": key_there, "queue": None}
    else:
        where = {"queue": Queue(key_there, Exchange(""), key_there, no_declare=True)}
    return bus.send(task, key, **where, **options)


def received(workers: list[Worker], sent: AsyncResult) -> int:
    return sum(worker.log_text().count(f"[{sent.id}] received") for worker in workers)


def wait_received(bus: Bus, workers: list[Worker], sent: AsyncResult, number: int) -> None:
    bus.cluster.wait(
        lambda: received(workers, sent) >= number or None, f"{number} receipts of {sent.id}"
    )


def wait_work_of_all(bus: Bus, workers: list[Worker], key: str) -> None:
    """Wait until each has done a task.

    In its first tenth of a second Celery's event loop ignores that a connection is closed.
    """

    def each_works() -> bool | None:
        bus.send(jobs.plain, key)
        ends = bus.cluster.events(what="end", key=key)
        return len({each["worker"] for each in ends}) == len(workers) or None

    bus.cluster.wait(each_works, "the work of all")


def requeue(bus: Bus, both: list[Worker], way: Way, key: str, gate: Path) -> None:
    """Each message goes round by itself. None of them becomes two."""
    copies = way.to(len(both))
    with bus.cluster.lock(key):
        sent = send(bus, way, jobs.requeued, key)
        bus.cluster.wait_event("requeued", sent, 4 * copies)
    finish(bus, sent, key, copies)
    requeued = bus.cluster.events(what="requeued", id=sent.id)
    assert received(both, sent) == copies + len(requeued)
    attempts = Counter(each["attempt"] for each in requeued)
    assert max(attempts.values()) <= copies, attempts


def redelivery(bus: Bus, both: list[Worker], way: Way, key: str, gate: Path) -> None:
    """What comes again while its task runs is dropped in the end, and stores nothing."""
    sent = send(bus, way, jobs.late_patient, key, gate=str(gate))
    bus.cluster.wait_event("start", sent)
    wait_received(bus, both, sent, way.to(len(both)))
    wait_work_of_all(bus, both, f"{key}-here")
    connected = {worker: worker.log_text().count(CONNECTED) for worker in both}
    bus.close_connections()
    for worker in both:
        bus.cluster.wait(
            lambda worker=worker: worker.log_text().count(CONNECTED) > connected[worker] or None,
            f"{worker.name} to be back",
        )

    # Celery's pool may end with an error if a result comes before its event loop is there again.
    wait_work_of_all(bus, both, f"{key}-back")
    gate.touch()
    finish(bus, sent, key, None if way.copies > 1 else way.to(len(both)))


def cut_wait(bus: Bus, both: list[Worker], way: Way, key: str, gate: Path) -> None:
    """It goes through the broker and waits on, and that is no attempt."""
    copies = way.to(len(both))
    with bus.cluster.lock(key):
        sent = send(bus, way, jobs.parked, key)
        wait_received(bus, both, sent, 2 * copies)
    finish(bus, sent, key, None if way.copies > 1 else copies)


def skip(bus: Bus, both: list[Worker], way: Way, key: str, gate: Path) -> None:
    """It stays what it is: nothing is sent back."""
    with bus.cluster.lock(key):
        sent = send(bus, way, jobs.skipped, key)
        bus.cluster.wait_event("skipped", sent, way.to(len(both)))
        assert Skipped.of(sent.get(timeout=PATIENCE))
    assert not bus.cluster.events(what="start", id=sent.id)
    assert received(both, sent) == way.to(len(both))


def finish(bus: Bus, sent: AsyncResult, key: str, runs: int | None) -> None:
    """It runs so often, or once for two messages that meet; then there is nothing left of it."""
    assert sent.get(timeout=PATIENCE) == sent.id
    for number in range(1, (runs or 1) + 1):
        bus.cluster.wait_event("end", sent, number)
    bus.cluster.wait_free(key)
    starts, ends = (bus.cluster.events(what=what, id=sent.id) for what in ("start", "end"))
    assert len(starts) == (runs or len(starts)) <= 2
    assert all(end["at"] <= start["at"] for end, start in zip(ends, starts[1:], strict=False))
    assert AsyncResult(sent.id, app=jobs.app).get(timeout=PATIENCE) == sent.id


def is_promised(way: str, cell: Any) -> bool:
    """Whether it can be had with quorum queues, where a message goes back by way of its exchange.

    Celery does not see that RabbitMQ closes the connection of a worker with so many of them; with
    one, `test_reconnects.py` does. And exclusive queues keep it from having anything delayed.
    """
    if way == "fanout to exclusive queues" or cell is redelivery:
        return False
    return way in KEY_OF_ITS_OWN or cell is skip


CELLS = (requeue, redelivery, cut_wait, skip)
SAMPLE = {
    ("classic", "topic that matches two", requeue),
    ("classic", "fanout to two shared queues", requeue),
    ("classic", "direct with a key of its own", requeue),
    ("classic", "fanout to a shared queue", redelivery),
    ("classic", "dead-letter", cut_wait),
    ("classic", "fanout to exclusive queues", skip),
    ("quorum", "topic", requeue),
}
"""What `make test` tries of them; `make soak` tries all."""


@pytest.mark.parametrize(
    ("bus", "way", "cell"),
    [
        pytest.param(kind, way, cell, marks=() if (kind, way, cell) in SAMPLE else pytest.mark.soak)
        for kind in ("classic", "quorum")
        for way in WAYS
        for cell in CELLS
        if kind == "classic" or is_promised(way, cell)
    ],
    indirect=["bus"],
)
def test_what_goes_back_goes_to_the_queue_it_came_from(
    bus: Bus, both: list[Worker], key: str, gate: Path, way: str, cell: Any
) -> None:
    cell(bus, both, WAYS[way], key, gate)
