"""What the pytest plugin has happen at the locks of calls, at a real server."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest
from celery import Celery

from celery_dflock import LockedTask, LockNotAcquiredError, SupersededError, dflock
from celery_dflock.testing import (
    ConfigureApp,
    assert_not_locked,
    supersede,
    turn_order,
    use_up_rate,
)
from tests.celery_dflock.processes import PATIENCE


@pytest.fixture
def app(dflock_app: ConfigureApp, key: str) -> Celery:
    app = Celery("tested", set_as_current=False)
    eager = {"task_always_eager": True, "task_eager_propagates": True}
    return dflock_app(app, dflock_key_prefix=f"{key}:", **eager)


numbers = itertools.count()


def task(app: Celery, function: Any, **options: Any) -> Any:
    options = {"lock_timeout": 0, "lock_conflict": "fail", "lock_key": "k:{x}", **options}
    options.setdefault("name", f"task-{next(numbers)}")
    return app.task(base=LockedTask, shared=False, **options)(function)


def nothing(x: int, tenant: str = "") -> int:
    return x


def test_the_body_that_calls_it_is_interrupted(app: Celery) -> None:
    seen: list[SupersededError] = []

    def body(x: int) -> None:
        try:
            supersede(render.s(x))
            pytest.fail("it goes on")
        except SupersededError as error:
            seen.append(error)
            raise

    render = task(app, body, lock_conflict="supersede")
    assert render.apply((7,)).state == "IGNORED"
    [error] = seen
    assert error.by == "a newer task of the test"
    assert_not_locked("k:7", app)
    assert render.apply((7,)).state == "IGNORED", "the next one is newer than that"


def test_it_returns_when_the_body_on_another_thread_has_let_go(app: Celery) -> None:
    running = threading.Event()
    ended: list[str] = []

    def body(x: int) -> None:
        running.set()
        try:
            while True:
                time.sleep(0.01)
        finally:
            ended.append("body")

    render = task(app, body, lock_conflict="supersede")
    thread = threading.Thread(target=render.apply, args=((7,),))
    thread.start()
    assert running.wait(60)
    supersede(render.s(7), timeout_s=60)
    assert ended == ["body"]
    thread.join(60)


def test_it_counts_as_no_run(app: Celery) -> None:
    def body(x: int) -> None:
        supersede(render.s(x))

    render = task(app, body, lock_conflict="supersede", lock_rate="2/h")
    for _ in range(2):
        assert render.apply((7,)).state == "IGNORED"


def test_nobody_who_could_be_superseded(app: Celery) -> None:
    render = task(app, nothing, lock_conflict="supersede")
    for_ages = "is held by nobody who could be superseded"
    with pytest.raises(AssertionError, match=for_ages):
        supersede(render.s(7))
    with dflock("k:7", app=app), pytest.raises(AssertionError, match=for_ages):
        supersede(render.s(7))
    with pytest.raises(AssertionError, match="never supersedes: give a task with"):
        supersede(task(app, nothing).s(7))
    with pytest.raises(AssertionError, match="takes no lock: give a call of a LockedTask"):
        supersede(app.task(shared=False)(nothing).s(7))


def test_who_does_not_let_go_is_told(app: Celery) -> None:
    runs, found = threading.Event(), []

    def body(x: int) -> str:
        try:
            runs.set()
            until = time.monotonic() + PATIENCE
            while time.monotonic() < until:
                time.sleep(0.01)  # in one long sleep it could not be interrupted
        except SupersededError:
            with pytest.raises(AssertionError, match=r"k:7' is still held after 0.1 s"):
                supersede(render.s(x), timeout_s=0.1)
            return "went on"
        return "was not interrupted"

    def interrupt() -> None:
        runs.wait(PATIENCE)
        with pytest.raises(AssertionError, match="still held after 0 s") as refused:
            supersede(render.s(7), timeout_s=0)
        found.append(refused.value)

    render = task(app, body, lock_conflict="supersede")
    other = threading.Thread(target=interrupt)
    other.start()
    try:
        assert render.apply((7,)).get() == "went on"
    finally:
        other.join(PATIENCE)
    assert found


def test_a_rate_lets_as_many_through_as_are_left(app: Celery) -> None:
    fetch = task(app, nothing, lock_rate="5/h")
    use_up_rate(fetch.s(7), leave=2)
    assert [fetch.delay(7).get(), fetch.delay(7).get()] == [7, 7]
    with pytest.raises(LockNotAcquiredError, match="rate: next in 3"):
        fetch.delay(7)
    assert fetch.delay(8).get() == 8, "another key"
    use_up_rate(fetch.s(8))
    with pytest.raises(LockNotAcquiredError):
        fetch.delay(8)
    with pytest.raises(AssertionError, match="only 0 may begin, not 1"):
        use_up_rate(fetch.s(8), leave=1)
    with pytest.raises(AssertionError, match="has no rate"):
        use_up_rate(task(app, nothing).s(8))


def test_a_rate_is_used_up_by_ones_whatever_the_weight_of_the_call(app: Celery) -> None:
    fetch = task(app, nothing, lock_rate="5/h", lock_limit=9, lock_weight=2)
    use_up_rate(fetch.s(7), leave=3)
    assert fetch.delay(7).get() == 7
    with pytest.raises(LockNotAcquiredError, match="was not acquired: rate: 1 of 5 free"):
        fetch.delay(7)


def test_a_rate_of_a_lock_that_is_held(app: Celery) -> None:
    fetch = task(app, nothing, lock_rate="5/h", lock_limit=1)
    with (
        dflock("k:7", rate="5/h", limit=1, app=app),
        pytest.raises(AssertionError, match="is held: its rate cannot be used up now"),
    ):
        use_up_rate(fetch.s(7))


def test_tenants_take_turns(app: Celery) -> None:
    render = task(app, nothing, lock_key="gpu", lock_limit=2, lock_group="tenant:{tenant}")
    calls = [render.s(number, "big") for number in range(5)] + [render.s(9, "small")]
    big, one = calls[:5], calls[5]
    assert turn_order(*calls) == [*big[:3], one, *big[3:]]
    assert_not_locked("gpu", app)
    limited = [call.clone() for call in calls]
    for call in limited:
        call.set(headers={"dflock": {"lock_group_limit": 1}})
    assert turn_order(*limited)[1] == limited[5], "at once: the others have all that they may"


def test_without_groups_it_is_the_order_of_coming(app: Celery) -> None:
    plain = task(app, nothing, lock_key="gpu", lock_rate="3/h")
    calls = [plain.s(number) for number in range(4)]
    assert turn_order(*calls) == calls
    assert turn_order() == []
    for call in calls[:3]:
        call.apply()  # nothing has counted
    with pytest.raises(AssertionError, match=r"several locks: '.*k:1', '.*k:2'"):
        turn_order(*(task(app, nothing).s(number) for number in (1, 2)))
