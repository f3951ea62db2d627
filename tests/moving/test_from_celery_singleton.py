"""What users of celery-singleton count on, with `LockedTask`; what differs: docs/howto/migrate.md."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from celery import group
from celery.exceptions import ImproperlyConfigured
from kombu.exceptions import EncodeError

from celery_dflock import DuplicateTaskError, LockKeyError
from dflockd import admin
from tests.moving.conftest import Shop, give_back


class AskedError(Exception):
    pass


def fails(*_args: Any) -> None:
    raise AskedError


def work_on(a: int, b: int, c: int = 3, d: int = 4) -> None: ...


def test_ten_calls_with_the_same_arguments_are_one_task(shop: Shop) -> None:
    task = shop.locked_task(name="same")
    assert len({task.delay(1, 2, 3).id for _ in range(10)}) == 1
    assert shop.queued() == 1


def test_calls_with_different_arguments_are_different_tasks(shop: Shop) -> None:
    task = shop.locked_task(name="different")
    assert len({task.delay(number, number + 1).id for number in range(5)}) == 5
    assert shop.queued() == 5


@pytest.mark.parametrize("body", [give_back, fails], ids=["success", "error"])
def test_once_it_has_ended_another_can_be_sent(shop: Shop, body: Any) -> None:
    task = shop.locked_task(body, name="ended")
    first = task.delay(1)
    assert shop.work() == 1
    assert first.state == ("FAILURE" if body is fails else "SUCCESS")
    # It is given back before the result is stored: nobody has to wait a little.
    assert task.delay(1).id != first.id
    assert shop.work() == 1


def test_whose_place_it_is_can_be_learned(shop: Shop) -> None:
    task = shop.locked_task(name="whose")
    first = task.delay(1)
    (lock,) = shop.on_its_way(task)
    assert first.id in lock["label"]


def test_what_could_not_be_sent_is_an_error_and_leaves_nothing_behind(shop: Shop) -> None:
    task = shop.locked_task(name="unsent", lock_key="unsent")
    with pytest.raises(EncodeError):
        task.delay(object())
    assert shop.on_its_way(task) == []
    task.delay(1)
    assert shop.queued() == 1


def test_a_duplicate_can_be_an_error_that_names_the_first(shop: Shop) -> None:
    task = shop.locked_task(name="raising", lock_duplicate="raise")
    first = task.delay(1)
    with pytest.raises(DuplicateTaskError) as raised:
        task.delay(1)
    assert first.id in str(raised.value.holder)
    assert shop.queued() == 1


def test_all_tasks_of_an_app_can_be_told_to_raise(shop: Shop) -> None:
    shop.app.conf.task_annotations = {"*": {"lock_duplicate": "raise"}}
    task = shop.locked_task(name="annotated")
    task.delay(1)
    with pytest.raises(DuplicateTaskError):
        task.delay(1)


@pytest.mark.parametrize(
    ("key", "call", "alike", "unlike"),
    [
        pytest.param("{a}:{c}", ((2, 3, 4, 5), {}), ((2, 9, 4, 9), {}), ((2, 3, 9, 5), {}), id="two"),
        pytest.param("{b}:{d}", ((2,), {"b": 3, "d": 5}), ((9, 3, 9, 5), {}), ((2, 3), {}), id="named"),
        pytest.param("all", ((2, 3), {}), ((9, 9), {"d": 9}), None, id="none"),
        pytest.param("{d}", ((2, 3), {}), ((9, 9), {"d": 4}), ((2, 3), {"d": 9}), id="default"),
    ],
)  # fmt: skip
def test_only_some_arguments_count(
    shop: Shop, key: str, call: Any, alike: Any, unlike: Any | None
) -> None:
    task = shop.locked_task(work_on, name=f"some:{key}", lock_key=key)
    first = task.apply_async(*call)
    assert task.apply_async(*alike).id == first.id
    if unlike is not None:
        assert task.apply_async(*unlike).id != first.id


@pytest.mark.parametrize(
    ("keys", "inner"),
    [(("{a}", "{a}"), "FAILURE"), (("outer:{a}", "inner:{a}"), "SUCCESS")],
    ids=["the same key", "the task's name in it"],
)
def test_tasks_exclude_each_other_if_their_keys_do_not_have_their_names(
    shop: Shop, keys: tuple[str, str], inner: str
) -> None:
    """`unique_on` has the name of its task in its keys: a `lock_key` has what you write."""
    options = {"lock_unique": None, "lock_timeout": 0, "lock_conflict": "fail"}

    def body(a: int) -> int:
        return a

    other = shop.locked_task(body, name=f"inner{inner}", lock_key=keys[1], **options)

    def runs_the_other(a: int) -> str:
        # This run holds its own lock meanwhile.
        return str(other.apply(args=(a,)).state)

    first = shop.locked_task(
        runs_the_other, name=f"outer{inner}", lock_key=keys[0], **options
    ).delay(7)
    assert shop.work() == 1
    assert first.get() == inner


def test_equal_members_of_a_group_all_run(shop: Shop) -> None:
    task = shop.locked_task(name="member")
    results = group([task.s(1), task.s(1)], app=shop.app).apply_async().results
    assert len({result.id for result in results}) == 2
    assert shop.work() == 2
    assert [result.get() for result in results] == [[1], [1]]


def test_an_argument_that_does_not_exist_cannot_count(shop: Shop) -> None:
    with pytest.raises(ImproperlyConfigured, match=r"\{e\} names no argument of the task"):
        shop.locked_task(work_on, name="unknown", lock_key="{e}")


def test_the_time_for_which_it_counts_can_be_set(shop: Shop) -> None:
    task = shop.locked_task(name="expiring", lock_unique_ttl=60)
    task.delay(1)
    (lock,) = shop.on_its_way(task)
    assert 0 < lock["lease_expires_in_s"] <= 60


def test_all_of_them_can_be_cleared(shop: Shop) -> None:
    task = shop.locked_task(name="cleared")
    first = [task.delay(number).id for number in range(5)]
    locks = shop.on_its_way(task)
    assert len(locks) == 5
    for lock in locks:
        (holder,) = admin.inspect(shop.address, lock["key"])["holders"]
        assert admin.evict(shop.address, lock["key"], holder["fence"])
    assert shop.on_its_way(task) == []
    assert not {task.delay(number).id for number in range(5)} & set(first)


def test_arguments_need_not_be_plain(shop: Shop) -> None:
    """And need no encoder: what can be sent has a key."""
    task = shop.locked_task(name="identified")
    one, two = uuid.uuid4(), uuid.uuid4()
    assert task.delay(one).id == task.delay(one).id != task.delay(two).id


def test_a_template_takes_an_argument_and_its_text_for_the_same(shop: Shop) -> None:
    task = shop.locked_task(work_on, name="marshalled", lock_key="{a}")
    one = uuid.uuid4()
    assert task.delay(one, 2).id == task.delay(str(one), 2).id


def test_what_has_no_text_of_its_own_is_refused(shop: Shop) -> None:
    task = shop.locked_task(name="opaque")
    with pytest.raises(LockKeyError):
        task.delay(object())
