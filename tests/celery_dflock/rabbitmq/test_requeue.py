"""A requeue on RabbitMQ: the same task, sent again a while later, on classic and quorum queues."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable

import pytest
from kombu import Exchange, Queue

from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE
from tests.celery_dflock.rabbitmq.bus import EXCHANGE, Bus

SENT = 5
TASKS = (jobs.requeued, jobs.ticket, jobs.parked_again)


def test_tasks_of_one_key_run_one_by_one_and_all_succeed(bus: Bus, key: str) -> None:
    keys = {task: f"{key}:{task.name}" for task in TASKS}
    with bus.running("one", concurrency=4, worker_prefetch_multiplier=4):
        with contextlib.ExitStack() as held:
            for of_one in keys.values():
                held.enter_context(bus.cluster.lock(of_one))
            sent = {
                task: [bus.send(task, keys[task], seconds=0.05) for _ in range(SENT)]
                for task in TASKS
            }
            for results in sent.values():
                bus.cluster.wait_event("requeued", results[0])
        for results in sent.values():
            ended = [result.get(timeout=PATIENCE, propagate=False) for result in results]
            assert ended == [result.id for result in results]

    for of_one in keys.values():
        starts = bus.cluster.events(what="start", key=of_one)
        ends = bus.cluster.events(what="end", key=of_one)
        assert len(starts) == len(ends) == SENT
        assert all(end["at"] <= start["at"] for end, start in zip(ends, starts[1:], strict=False))


@pytest.mark.parametrize("kind", ["classic", "quorum"])
def test_a_requeue_stays_in_its_queue(make_bus: Callable[..., Bus], kind: str, key: str) -> None:
    """Where RabbitMQ delays a task Celery would send it to the default queue."""
    default, other = make_bus(kind), make_bus(kind)
    missing = {
        "task_create_missing_queue_type": kind,
        "task_create_missing_queue_exchange_type": EXCHANGE[kind],
    }
    with (
        default.running("default"),
        default.running("other", "-Q", other.queue.name, **missing) as worker,
    ):
        with other.cluster.lock(key):
            sent = other.send(jobs.requeued, key)
            other.cluster.wait_event("requeued", sent, 2)
        end = other.cluster.wait_event("end", sent)

    assert end["worker"] == worker.name


def test_a_message_of_two_queues_is_requeued_to_each_alone(
    make_bus: Callable[..., Bus], key: str
) -> None:
    """The exchange would give each of them every copy: one message became hundreds."""
    bus = make_bus("classic")
    exchange = Exchange("orders", "topic")
    queues = {"orders.all": "orders.#", "orders.eu": "#.eu"}
    with contextlib.ExitStack() as running:
        for name, pattern in queues.items():
            Queue(name, exchange, pattern).bind(bus.connection.default_channel).declare()
            settings = {
                "task_default_queue": name,
                "task_default_exchange": exchange.name,
                "task_default_exchange_type": "topic",
                "task_default_routing_key": pattern,
            }
            running.enter_context(bus.running(name, **settings))
        with bus.cluster.lock(key):
            options = {"queue": None, "exchange": "orders", "routing_key": "orders.eu"}
            sent = bus.send(jobs.requeued, key, seconds=0.05, **options)
            bus.cluster.wait_event("requeued", sent, 8)
        bus.cluster.wait_event("end", sent)
        bus.cluster.wait_free(key)
    requeued = bus.cluster.events(what="requeued", id=sent.id)
    assert len({each["worker"] for each in requeued}) == 2
    # Each copy counts its attempts; a copy too many would begin anew with an old number.
    assert max(Counter((each["worker"], each["attempt"]) for each in requeued).values()) == 1


@pytest.mark.soak
def test_quorum_queues_with_one_key_get_the_copies_of_each_other(
    make_bus: Callable[..., Bus], key: str
) -> None:
    """RabbitMQ delays a message by way of its exchange: the manual says what that asks of the keys."""
    bus = make_bus("quorum")
    exchange = Exchange("trades", "topic")
    queues = {"trades.all": "trades.#", "trades.eu": "#.eu"}
    quorum = {"x-queue-type": "quorum"}
    with contextlib.ExitStack() as running:
        for name, pattern in queues.items():
            queue = Queue(name, exchange, pattern, queue_arguments=quorum)
            queue.bind(bus.connection.default_channel).declare()
            settings = {
                "task_default_queue": name,
                "task_default_exchange": exchange.name,
                "task_default_exchange_type": "topic",
                "task_default_routing_key": pattern,
            }
            running.enter_context(bus.running(name, **settings))
        with bus.cluster.lock(key):
            options = {"queue": None, "exchange": "trades", "routing_key": "trades.eu"}
            sent = bus.send(jobs.limited, key, **options)

            def multiplies() -> bool | None:
                requeued = bus.cluster.events(what="requeued", id=sent.id)
                return max(Counter(e["attempt"] for e in requeued).values(), default=0) > 2 or None

            bus.cluster.wait(multiplies, "more messages than queues")


def test_a_full_queue_that_confirms_loses_no_requeue(
    make_bus: Callable[..., Bus], key: str
) -> None:
    bus = make_bus("classic")
    full = '[{<<"max-length">>, 0}, {<<"overflow">>, <<"reject-publish">>}]'
    pattern = f'<<"^{bus.queue.name}$">>'
    with bus.running("one", broker_transport_options={"confirm_publish": True}) as worker:
        with bus.cluster.lock(key):
            sent = bus.send(jobs.requeued, key)
            bus.cluster.wait_event("requeued", sent)
            bus.rabbitmq.evaluate(
                f'rabbit_policy:set(<<"/">>, <<"full">>, {pattern}, {full}, 0, <<"queues">>, <<"me">>)'
            )
            worker.wait_log("cannot be sent again yet: MessageNacked")
        bus.rabbitmq.evaluate('rabbit_policy:delete(<<"/">>, <<"full">>, <<"me">>)')
        assert sent.get(timeout=PATIENCE) == sent.id
