"""What is known of a task from its binding on is what would be found out anew for each run."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
from celery import Celery
from celery.app.task import Context
from hypothesis import given
from hypothesis import strategies as st
from kombu.common import Broadcast
from kombu.entity import Queue

from celery_dflock import LockedTask, config, signatures
from celery_dflock.config import read, settings
from celery_dflock.identity import process_label
from celery_dflock.options import LockOptions
from celery_dflock.outcome import delivery
from celery_dflock.plan import Bound, Plan

options = st.fixed_dictionaries(
    {},
    optional={
        "lock_key": st.sampled_from(
            [None, "{a}", "k:{b}", ["{a}", "{b}"], lambda _task, args, _kwargs: f"f:{args[0]}"]
        ),
        "lock_limit": st.integers(1, 3),
        "lock_ttl": st.integers(1, 60),
        "lock_timeout": st.sampled_from([None, 0, 0.5, 7]),
        "lock_conflict": st.sampled_from(["requeue", "skip", "fail"]),
        "lock_requeue": st.sampled_from([{}, {"cap": 2.0}, {"hold": None}]),
        "lock_lost": st.sampled_from(["raise", "warn"]),
        "lock_wait": st.sampled_from(["slot", "consumer"]),
    },
)
settings_of_app = st.fixed_dictionaries(
    {},
    optional={
        "dflock_servers": st.sampled_from([["lock-1"], "lock-1,lock-2", "cluster://lock-1:6388"]),
        "dflock_key_prefix": st.sampled_from(["", "shop:"]),
        "dflock_enabled": st.booleans(),
        "dflock_wait": st.sampled_from(["slot", "consumer"]),
    },
)
messages = st.fixed_dictionaries(
    {
        "id": st.sampled_from(["1", "2"]),
        "retries": st.integers(0, 2),
        "hostname": st.sampled_from(["one@here", "two@here"]),
        "delivery_info": st.fixed_dictionaries(
            {
                "exchange": st.sampled_from(["", "for-all", "unheard-of"]),
                "routing_key": st.sampled_from(["celery", "for-all", "late"]),
                "redelivered": st.booleans(),
            }
        ),
    }
)
_numbers = itertools.count()


def an_app(**conf: Any) -> Celery:
    app = Celery("bound", set_as_current=False)
    app.conf.update(task_queues=[Queue("celery"), Broadcast("for-all")], **conf)
    return app


def a_task(app: Celery, **given: Any) -> Any:
    @app.task(base=LockedTask, name=f"bound-{next(_numbers)}", shared=False, **given)
    def _task(a: int, b: int = 2) -> None: ...

    return app.tasks[_task.name]


def planned(task: Any, message: dict[str, Any], bound: Bound) -> list[Any]:
    run = Plan(task, Context(message), task.run, (1,), {}, bound)
    locks = [run.bound.make_lock(key) for key in run.keys]
    return [
        bound.is_locked,
        run.options,
        run.settings,
        run.keys,
        bound.owner_of(run.request),
        run.header,
        run.timeout,
        run.keeps_position,
        run.is_redelivered,
        [(type(lock), lock.key, lock.server, lock.lease_ttl_s) for lock in locks],
    ]


def from_scratch(task: Any, message: dict[str, Any]) -> list[Any]:
    cls = type(task)
    return planned(task, message, Bound(cls, LockOptions.of(cls), read(task.app)))


def comparable(found: list[Any]) -> list[Any]:
    """Options have functions and templates in them: they are compared by their fields."""
    its = found[1]
    fields = [getattr(its, name) for name in its.__slots__ if name not in ("keys", "parameters")]
    return [found[0], fields, *found[2:]]


cases = st.tuples(
    options, options, settings_of_app, st.lists(settings_of_app, max_size=2), messages
)


@hypothesis.settings(deadline=None, max_examples=25)
@given(cases)
def test_what_was_known_is_what_would_be_found(case: Any) -> None:
    assert_known_is_found(*case)


@pytest.mark.soak
@pytest.mark.timeout(600)
@hypothesis.settings(deadline=None, max_examples=500)
@given(cases)
def test_what_was_known_is_what_would_be_found_whatever_is_set(case: Any) -> None:
    assert_known_is_found(*case)


def assert_known_is_found(
    bound_with: dict[str, Any],
    call: dict[str, Any],
    before: dict[str, Any],
    changes: list[dict[str, Any]],
    message: dict[str, Any],
) -> None:
    app = an_app(**before)
    task = a_task(app, **bound_with)
    for change in [{}, *changes]:
        app.conf.update(change)
        for headers in (None, {"dflock": call}):
            sent = {**message, "headers": headers}
            known = planned(task, sent, task._bound())
            assert comparable(known) == comparable(from_scratch(task, sent))
            for name, value in call.items() if headers else ():
                if name == "lock_limit":
                    assert known[1].limits.limit == value
                if name in ("lock_ttl", "lock_conflict", "lock_wait"):
                    assert getattr(known[1], name.removeprefix("lock_")) == value


CHANGES: dict[str, Callable[[Celery, pytest.MonkeyPatch], object]] = {
    "conf": lambda app, _: app.conf.update(dflock_key_prefix="other:"),
    "attribute": lambda app, _: setattr(app.conf, "dflock_wait", "consumer"),
    "defaults": lambda app, _: app.add_defaults({"dflock_wait": "consumer"}),
    "read anew": lambda app, _: app.config_from_object({"dflock_wait": "consumer"}, force=True),
    "in place": lambda app, _: app.conf.dflock_servers.append("lock-2"),
    "taken back": lambda app, _: app.conf.changes.pop("dflock_servers"),
    "environment": lambda _, patch: patch.setenv("DFLOCK_AUTH_TOKEN", "another"),
    "another environment": lambda _, patch: patch.setattr(
        os, "environ", {"DFLOCK_AUTH_TOKEN": "other"}
    ),
    "switched off": lambda _, patch: patch.setattr(config, "switched_off", True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_settings_is_seen_by_the_next_run(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = an_app(dflock_servers=["lock-1"])
    task = a_task(app)
    known = task._bound()
    assert task._bound() is known
    CHANGES[change](app, monkeypatch)
    assert task._bound() is not known
    assert task._bound().settings is settings(app)
    assert task._bound().settings != known.settings


def test_each_app_and_each_class_has_its_own() -> None:
    one, other = an_app(dflock_key_prefix="one:"), an_app(dflock_key_prefix="other:")
    tasks = [a_task(app, lock_key="{a}") for app in (one, other)]
    keys = [task._bound().keys_of(task, (1,), {}) for task in tasks]
    assert keys == [["one:1"], ["other:1"]]

    class Further(type(tasks[0])):  # type: ignore[misc]
        lock_ttl = 7

    further = Further()
    assert further._bound().task is Further
    assert tasks[0]._bound().task is type(tasks[0])


def test_options_of_a_call_stay_with_it() -> None:
    task = a_task(an_app(), lock_key="{a}", lock_ttl=9)
    known = task._bound()
    its = task._bound({"lock_ttl": 5, "lock_key": "k:{b}"})
    assert (its.options.ttl, its.keys_of(task, (1,), {})) == (5, ["k:2"])
    assert task._bound() is known
    assert (known.options.ttl, known.keys_of(task, (1,), {})) == (9, ["1"])


def test_options_of_a_call_do_not_look_into_the_function_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = a_task(an_app(), lock_key="{a}")
    looks: list[Any] = []
    look = signatures.signature
    monkeypatch.setattr(signatures, "signature", lambda function: looks.append(1) or look(function))
    assert task._bound({"lock_ttl": 5}).keys_of(task, (1,), {}) == ["1"]
    assert not looks
    a_task(an_app())
    assert looks, "it is looked into when a task is bound"


def test_a_child_has_a_label_of_its_own() -> None:
    mine = process_label()
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(writing, process_label().encode())
        os._exit(0)
    os.waitpid(pid, 0)
    its = os.read(reading, 999).decode()
    os.close(reading)
    os.close(writing)
    assert its == mine.replace(str(os.getpid()), str(pid))


@pytest.fixture(scope="module")
def of_a_shop() -> Any:
    return a_task(an_app(dflock_key_prefix="shop:"), lock_key="{a}")


@hypothesis.settings(deadline=None)
@given(message=messages, task_id=st.text(st.characters(exclude_categories=[]), min_size=1))
def test_an_owner_is_the_same_in_all_versions(
    of_a_shop: Any, message: dict[str, Any], task_id: str
) -> None:
    """Workers of other versions compare it: it is a digest of what they make it of as well."""
    task = of_a_shop
    request = Context({**message, "id": task_id})
    info = request.delivery_info
    is_for_all = delivery.is_for_all(task.app, info["exchange"], info["routing_key"])
    audience = request.hostname if is_for_all else ""
    text = "\0".join(("shop:", task.name, task_id, audience)).encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(text, digest_size=16).hexdigest()
    assert task._bound().owner_of(request) == (digest, message["retries"])


def test_what_a_task_puts_in_its_own_place_is_another_owner() -> None:
    """It has its id and its number of retries, and often its name: it is no second delivery of it."""
    task = a_task(an_app())
    message = {"id": "1", "retries": 0, "delivery_info": {}}
    owners = {
        task._bound().owner_of(Context({**message, "replaced_task_nesting": nesting}))
        for nesting in (None, 0, 1, 2)
    }
    assert len(owners) == 3


def test_what_comes_from_a_queue_that_is_added_later_is_known_by_it() -> None:
    """As ``celery control add_consumer`` adds it, after messages of other queues have come."""
    app = an_app()
    task = a_task(app)

    def owners(exchange: str) -> set[Any]:
        info = {"exchange": exchange, "routing_key": "celery"}
        message = {"id": "1", "retries": 0, "delivery_info": info}
        hosts = ("one@here", "two@here")
        return {task._bound().owner_of(Context({**message, "hostname": host})) for host in hosts}

    assert len(owners("")) == 1, "a queue that both share"
    app.amqp.queues.select_add("late", exchange="late", exchange_type="fanout", auto_delete=True)
    assert len(owners("late")) == 2, "each gets a message of its own"
    assert len(owners("")) == 1
