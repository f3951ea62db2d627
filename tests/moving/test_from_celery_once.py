"""What users of celery-once count on, with `LockedTask`; docs/howto/migrate.md says what differs."""

from __future__ import annotations

from typing import Any

import pytest

from celery_dflock import DuplicateTaskError, Skipped, require_lock
from dflockd import admin
from tests.moving.conftest import Shop


def add(a: int, b: int) -> int:
    return a + b


def test_without_arguments_the_name_is_the_key(shop: Shop) -> None:
    one, other = shop.locked_task(name="one"), shop.locked_task(name="other")
    assert one.delay().id == one.delay().id != other.delay().id


def test_an_argument_is_the_same_by_name_and_by_position(shop: Shop) -> None:
    task = shop.locked_task(add, name="add")
    first = task.delay(1, 2)
    assert task.delay(1, b=2).id == task.delay(b=2, a=1).id == first.id
    assert task.delay(2, 1).id != first.id


def test_a_bound_task_does_not_count_itself(shop: Shop) -> None:
    def bound(self: Any, a: int, b: int) -> int:
        return a + b

    task = shop.locked_task(bound, name="bound", bind=True)
    assert task.delay(1, 2).id == task.delay(a=1, b=2).id


def test_only_the_keys_that_are_named_count(shop: Shop) -> None:
    task = shop.locked_task(add, name="selected", lock_key="{a}")
    assert task.delay(1, 2).id == task.delay(1, 3).id != task.delay(2, 2).id


def test_a_task_that_retries_by_itself_has_the_same_key(shop: Shop) -> None:
    tries: list[int] = []

    def flaky(a: int, b: int) -> int:
        tries.append(a)
        if len(tries) < 3:
            raise ValueError(a)
        return a + b

    options = {"autoretry_for": (ValueError,), "default_retry_delay": 0}
    task = shop.locked_task(flaky, name="flaky", lock_key="{a}", **options)
    first = task.delay(1, 2)
    assert shop.work() == 3
    assert first.get() == 3
    assert shop.on_its_way(task) == []


def test_a_retry_with_other_arguments_is_not_in_its_own_way(shop: Shop) -> None:
    def again(self: Any, a: int = 0) -> int:
        if a == 0:
            # Another one is not sent meanwhile, but the retry of this one is.
            assert self.delay(5).id == self.request.id
            raise self.retry(kwargs={"a": 1}, countdown=0)
        return a

    task = shop.locked_task(again, name="again", bind=True, lock_key="again")
    first = task.delay()
    assert shop.work() == 2
    assert first.get() == 1
    assert task.delay().id != first.id


@pytest.mark.parametrize("until", ["until_executing", "until_executed"])
def test_the_next_one_can_be_sent_before_or_after_the_run(shop: Shop, until: str) -> None:
    """`unlock_before_run`, or not."""
    seen: list[str] = []

    def body(self: Any) -> None:
        seen.append(self.delay().id)

    task = shop.locked_task(body, name="body", bind=True, lock_unique=until, lock_timeout=0)
    first = task.delay()
    assert shop.work(most=1) == 1
    assert (seen[0] == first.id) is (until == "until_executed")
    assert shop.queued() == (0 if until == "until_executed" else 1)


def test_a_duplicate_can_be_an_error(shop: Shop) -> None:
    task = shop.locked_task(add, name="refusing", lock_duplicate="raise")
    first = task.delay(1, 2)
    with pytest.raises(DuplicateTaskError) as raised:
        task.delay(1, 2)
    assert first.id in str(raised.value.holder)


def test_a_duplicate_can_be_let_go_for_one_call(shop: Shop) -> None:
    """`graceful`: nothing is raised, and the result says what has become of it."""
    task = shop.locked_task(add, name="graceful", lock_duplicate="raise")
    first = task.delay(1, 2)
    second = task.apply_async((1, 2), headers={"dflock": {"lock_duplicate": "skip"}})
    assert second.ready()
    skipped = Skipped.of(second.get())
    assert skipped is not None
    assert first.id in str(skipped.holder)
    assert shop.queued() == 1


def test_the_time_for_which_it_counts_can_be_set_for_one_call(shop: Shop) -> None:
    task = shop.locked_task(add, name="timed", lock_unique_ttl=60)
    task.delay(1, 2)
    task.apply_async((3, 4), headers={"dflock": {"lock_unique_ttl": 120}})
    short, long = sorted(lock["lease_expires_in_s"] for lock in shop.on_its_way(task))
    assert short <= 60 < long <= 120


def test_in_eager_mode_every_call_runs(shop: Shop) -> None:
    shop.app.conf.task_always_eager = True
    task = shop.locked_task(add, name="eager")
    assert task.delay(1, 2).get() == task.delay(1, 2).get() == 3


def test_it_is_also_locked_while_it_runs(shop: Shop) -> None:
    """What celery-once leaves to its user: two that were sent do not run at once."""
    inside: list[Any] = []

    def body(a: int) -> None:
        lock = require_lock()
        (holder,) = admin.inspect(shop.address, lock.key)["holders"]
        inside.append((lock.held, holder["fence"] == lock.fence))

    shop.locked_task(body, name="locked").delay(1)
    assert shop.work() == 1
    assert inside == [(True, True)]
