"""Where a task goes that is sent again, and how soon; by the settings of the app alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from celery.exceptions import ImproperlyConfigured
from kombu import Exchange, Queue
from kombu.common import Broadcast

from celery_dflock import LockedTask
from celery_dflock.outcome import delivery
from celery_dflock.worker.waiter import Waiter
from dflockd.client.arguments import checked_owner

QUORUM = {"x-queue-type": "quorum"}
DELAY = "0." * 27 + "1."


def an_app(broker: str = "amqp://", *queues: Queue) -> Celery:
    app = Celery(set_as_current=False, broker=broker)
    app.conf.task_queues = queues or (a_queue("default", "direct"),)
    return app


def a_queue(name: str, kind: str, key: str | None = None, **arguments: Any) -> Queue:
    return Queue(name, Exchange(name, kind), key or name, queue_arguments=arguments or None)


def received(exchange: str, routing_key: str, **more: Any) -> Context:
    info = {"exchange": exchange, "routing_key": routing_key}
    return Context(task="shop.sync", hostname="one@here", delivery_info=info, **more)


def is_for_all(app: Celery, request: Context) -> bool:
    info = request.delivery_info
    return delivery.is_for_all(app, info["exchange"], info["routing_key"])


def route(app: Celery, request: Context) -> tuple[Any, ...]:
    """Name and exchange of the queue, routing key."""
    options = delivery.route_of(app, request)
    queue = options["queue"]
    key = queue.routing_key if options["routing_key"] is None else options["routing_key"]
    return queue.name, queue.exchange.name, queue.exchange.type, key


def test_pauses_are_a_second_at_least_where_rabbitmq_delays() -> None:
    app = an_app("amqp://", a_queue("a", "direct"), a_queue("b", "topic", **QUORUM))
    assert [delivery.pause(app, s) for s in (0.0, 0.001, 0.999, 1.0, 7.5)] == [
        0.0,
        1.001,
        1.999,
        1.0,
        7.5,
    ]


@pytest.mark.parametrize(
    "app",
    [
        an_app(),
        an_app("memory://", a_queue("b", "topic", **QUORUM)),
        an_app("redis://", a_queue("b", "topic", **QUORUM)),
    ],
)
def test_pauses_are_as_they_are_elsewhere(app: Celery) -> None:
    assert delivery.pause(app, 0.05) == 0.05


def test_no_pause_outlasts_the_patience_of_a_broker() -> None:
    """As it is usual, and as the app says."""
    redis = Celery(broker="redis://", set_as_current=False)
    assert delivery.pause(redis, 10_000.0) == 1800.0
    redis.conf.broker_transport_options = {"visibility_timeout": 5}
    assert [delivery.pause(redis, each) for each in (0.05, 2.5, 30.0)] == [0.05, 2.5, 2.5]


def test_no_pause_outlasts_the_consumer_timeout_of_rabbitmq() -> None:
    """It would close the channel of the worker that keeps the message for the pause."""
    assert delivery.pause(an_app("amqp://"), 10_000.0) == 900.0
    told = an_app("amqp://")
    told.conf.dflock_consumer_timeout = 5
    assert [delivery.pause(told, each) for each in (0.05, 2.5, 30.0)] == [0.05, 2.5, 2.5]
    told.conf.dflock_consumer_timeout = 0
    assert delivery.pause(told, 10_000.0) == 10_000.0
    hasty = a_queue("a", "direct", **{"x-consumer-timeout": 60_000})
    assert delivery.pause(an_app("amqp://", hasty), 10_000.0) == 30.0
    tiny = a_queue("b", "topic", **QUORUM, **{"x-consumer-timeout": 1_000})
    assert delivery.pause(an_app("amqp://", tiny), 10_000.0) == 1.5, "Celery refuses less than one"


def test_the_most_common_route_is_celerys() -> None:
    app = an_app()
    assert delivery.route_of(app, received("", "default")) == {}
    assert delivery.route_of(app, received("else", "where")) == {}
    assert delivery.route_of(app, Context()) == {}


def test_what_rabbitmq_delays_stays_in_its_queue() -> None:
    app = an_app("amqp://", a_queue("default", "topic", **QUORUM), a_queue("b", "topic", **QUORUM))
    back = ("b", "b", "topic", "b")
    assert route(app, received("b", "b")) == back
    assert route(app, received("b", DELAY + "b")) == back
    assert route(app, received(delivery.DELAYED, DELAY + "b")) == (
        "b",
        delivery.DELAYED,
        "topic",
        "b",
    )


def test_what_rabbitmq_delays_keeps_its_routing_key() -> None:
    app = an_app("amqp://", a_queue("imports", "topic", "import.#", **QUORUM))
    assert route(app, received("imports", "import.users"))[1:] == (
        "imports",
        "topic",
        "import.users",
    )


def test_a_direct_exchange_is_left_to_celery_unless_its_queue_is_known() -> None:
    direct = a_queue("b", "direct", **QUORUM)
    app = an_app("amqp://", a_queue("default", "topic"), direct)
    assert delivery.route_of(app, received("b", "c")) == {}
    assert delivery.route_of(app, received("elsewhere", "c")) == {}
    assert route(app, received("b", "b")) == ("b", "b", "direct", "b")


def test_what_is_for_all_goes_to_this_worker_alone() -> None:
    own = Broadcast("for-all")
    app = an_app("amqp://", a_queue("default", "direct"), own)
    for request in (received("for-all", ""), received("", own.name)):
        assert route(app, request) == (own.name, "", "direct", own.name)
        assert is_for_all(app, request)
    assert not is_for_all(app, received("", "default"))


def test_consumer_and_process_of_a_worker_are_one_owner() -> None:
    """And those of two workers are two, where each gets a message of its own."""
    app = an_app("amqp://", a_queue("default", "direct"), Broadcast("for-all"))

    @app.task(base=LockedTask, lock_key="k", lock_wait="consumer", name="shop.sync", shared=False)
    def _task() -> None: ...

    task = app.tasks["shop.sync"]

    def owners(exchange: str, worker: str) -> tuple[Any, Any]:
        info = {"exchange": exchange, "routing_key": "default"}
        message = {"id": "1", "retries": 2, "delivery_info": info, "hostname": worker}
        there = SimpleNamespace(
            task=task, id="1", args=(), kwargs={}, request_dict=message, message=SimpleNamespace()
        )
        waiter = Waiter.of(there)
        assert waiter is not None
        asks = waiter.lock._session.target.introduction.owner
        return asks, checked_owner(task._bound().owner_of(Context(message)), "k")

    (one, same), (other, _) = owners("for-all", "one@here"), owners("for-all", "two@here")
    assert one == same != other
    assert owners("", "one@here")[0] == owners("", "two@here")[1]


@pytest.mark.parametrize("kind", ["fanout", "headers", "topic"])
@pytest.mark.parametrize("broker", ["amqp://", "redis://"])
def test_what_a_shared_queue_gets_goes_back_to_it_and_is_for_one(broker: str, kind: str) -> None:
    app = an_app(broker, a_queue("default", "direct"), a_queue("shared", kind, "work.#"))
    request = received("shared", "work.eu")
    if (broker, kind) == ("redis://", "fanout"):
        assert is_for_all(app, request), "there is no such queue"
        with pytest.raises(ImproperlyConfigured, match="redis cannot send it back"):
            delivery.route_of(app, request)
    else:
        assert not is_for_all(app, request)
        back = ("shared", "", "direct", "shared")
        assert route(app, request) == back
        assert route(app, received("", "shared")) == back, "and so when it goes back again"


@pytest.mark.parametrize(
    ("pattern", "key", "fits"),
    [
        ("work.#", "work", True),
        ("work.#", "work.eu.west", True),
        ("work.#", "works", False),
        ("#.eu", "eu", True),
        ("#.eu", "a.b.eu", True),
        ("#.eu", "neu", False),
        ("*.eu", "a.eu", True),
        ("*.eu", "a.b.eu", False),
        ("a.#.b", "a.b", True),
        ("a.#.b", "a.x.y.b", True),
        ("#", "", True),
        ("a+b", "aab", False),
    ],
)
def test_which_keys_a_topic_fits(pattern: str, key: str, fits: bool) -> None:
    queues = an_app("amqp://", a_queue("shared", "topic", pattern)).amqp.queues
    assert (delivery.queue_of(queues, received("shared", key)) is not None) == fits


def test_two_queues_of_one_direct_exchange_are_told_apart() -> None:
    app = an_app("amqp://", a_queue("default", "direct"), a_queue("mine", "direct", "both"))
    assert route(app, received("mine", "both")) == ("mine", "", "direct", "mine")


def test_redis_cannot_send_to_one_what_was_for_all() -> None:
    app = an_app("redis://", Broadcast("for-all"))
    with pytest.raises(ImproperlyConfigured, match=r"shop\.sync came from for-all.*lock_conflict"):
        delivery.route_of(app, received("for-all", ""))


def test_no_queue_is_made_by_looking_for_it() -> None:
    app = an_app()
    assert delivery.queue_of(app.amqp.queues, received("", "unheard-of")) is None
    assert "unheard-of" not in app.amqp.queues


def test_headers_of_the_broker_stay_behind() -> None:
    mine = {"x-mine": 1, "dflock": {"attempt": 1}, "x-deaths": 2}
    theirs = {"x-death": [{}], "x-first-death-queue": "a", "x-delivery-count": 3}
    assert delivery.without_counts({**mine, **theirs}) == mine
    assert delivery.without_counts({}) == {}
