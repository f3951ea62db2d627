"""Tasks of which only so many may begin in a while."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured

from celery_dflock import LockedTask, LockNotAcquiredError, SingletonTask, dflock
from celery_dflock.limits import MAX_LIMIT
from dflockd.sync_client import DistributedLock, DistributedSemaphore
from examples.demo.stage import LockServer, Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster
from tests.pace import Pace


def rated(app: Celery, function: Any, **options: Any) -> Any:
    options = {"lock_timeout": 0, "lock_conflict": "fail", "lock_key": "{key}", **options}
    return app.task(base=LockedTask, shared=False, **options)(function)


def rate_of(server: LockServer, key: str, kind: type[DistributedLock] = DistributedLock) -> Any:
    limit = {"limit": 1} if kind is DistributedSemaphore else {}
    return kind(key, servers=[server.address], **limit).inspect()["rate"]


def nothing(key: str) -> str:
    return key


def test_so_many_begin_and_the_next_is_told_when_it_may(app: Celery, key: str) -> None:
    task = rated(app, nothing, lock_rate="2/h")
    for _ in range(2):
        assert task.delay(key).get() == key
    with pytest.raises(LockNotAcquiredError, match=r"rate: next in 3[56]\d\d s"):
        task.delay(key)


def test_one_that_fails_counts_and_one_that_never_begins_does_not(
    app: Celery, key: str, lock_server: LockServer
) -> None:
    def fail(key: str) -> None:
        raise ValueError(key)

    failing = rated(app, fail, lock_rate="3/h")
    with pytest.raises(ValueError, match=key):
        failing.delay(key)
    assert rate_of(lock_server, key)["free"] == 2
    # Of two keys, in their order, the second is somebody else's.
    both = rated(app, nothing, lock_rate="3/h", lock_key=["{key}", "{key}:z"])
    with DistributedLock(f"{key}:z", servers=[lock_server.address]):
        with pytest.raises(LockNotAcquiredError):
            both.delay(key)
        assert rate_of(lock_server, key)["free"] == 2
    assert both.delay(key).get() == key
    assert rate_of(lock_server, key)["free"] == 1


def test_a_retry_counts_as_another_run(app: Celery, key: str, lock_server: LockServer) -> None:
    def again(self: Any, key: str) -> str:
        if not self.request.retries:
            raise self.retry(countdown=0)
        return key

    app.conf.task_eager_propagates = False
    task = rated(app, again, lock_rate="5/h", bind=True)
    assert task.delay(key).get() == key
    assert rate_of(lock_server, key)["free"] == 3


@pytest.mark.parametrize(
    ("options", "limit", "rate"),
    [
        ({}, 1, None),
        ({"lock_rate": "10/m"}, 1, (10, 60)),
        ({"lock_rate": (3, 0.5), "lock_limit": None}, MAX_LIMIT, (3, 0.5)),
        ({"lock_group": "{key}", "lock_group_limit": 1, "lock_limit": None}, MAX_LIMIT, None),
        ({"lock_rate": "7/h", "lock_limit": 2}, 2, (7, 3600)),
        ({"lock_rate": "7/h", "base": SingletonTask}, 1, (7, 3600)),
        ({"lock_rate": "7/h", "lock_conflict": "supersede"}, 1, (7, 3600)),
    ],
)
def test_a_rate_is_beside_a_limit(
    app: Celery, options: dict[str, Any], limit: int, rate: Any
) -> None:
    task = app.task(**{"base": LockedTask, "shared": False, **options})(nothing)
    assert task._lock_options.limits[:2] == (limit, rate)


def test_a_block_counts_as_the_run_of_a_task(
    app: Celery, key: str, lock_server: LockServer
) -> None:
    async def enter() -> None:
        async with dflock(key, rate="3/h", limit=None, app=app):
            pass

    with dflock(key, rate="3/h", limit=None, app=app) as lock:
        assert lock.held
        asyncio.run(enter())  # no limit but the rate
    assert rate_of(lock_server, key, DistributedSemaphore)["free"] == 1
    task = rated(app, nothing, lock_rate="3/h", lock_limit=None)
    assert task.delay(key).get() == key
    with pytest.raises(LockNotAcquiredError), dflock(key, 0, rate="3/h", limit=None, app=app):
        raise AssertionError
    assert re.search(r"limit=2, rate='3/h'", repr(dflock("k", limit=2, rate="3/h")))


def test_a_rate_alone_lets_no_two_run_at_once(app: Celery, key: str) -> None:
    def again(key: str) -> str:
        with pytest.raises(LockNotAcquiredError, match="held by"):
            task.delay(key)
        with pytest.raises(LockNotAcquiredError), dflock(key, 0, rate="9/h", app=app):
            raise AssertionError
        return key

    task = rated(app, again, lock_rate="9/h")
    assert task.delay(key).get() == key


@pytest.mark.parametrize("options", [{}, {"lock_conflict": "supersede", "lock_rate": "1/h"}])
def test_no_limit_at_all_is_refused(app: Celery, options: dict[str, Any]) -> None:
    with pytest.raises(ImproperlyConfigured, match="lock_limit is None: give "):
        app.task(base=LockedTask, lock_limit=None, shared=False, **options)(nothing).bind(app)
    with pytest.raises(ValueError, match=r"^limit is None: give .*: else nothing is locked$"):
        dflock("k", limit=None, app=app)


def check_windows(starts: list[dict[str, Any]], runs: int, window: float) -> None:
    """Of one key never more than so many have begun in any window.

    A run begins between its having the lock and its first line, which the machine may hold up: so a
    window is counted from the former of its first run to the latter of the one after its last.
    """
    by_key = defaultdict(list)
    for event in starts:
        by_key[event["key"]].append(event)
    for events in by_key.values():
        acquired, begun = (sorted(event[when] for event in events) for when in ("acquired", "at"))
        for first, beyond in zip(acquired, begun[runs:], strict=False):
            assert beyond - first >= window


@pytest.mark.parametrize("task", ["by_twos", "parked"])
def test_no_window_of_real_workers_has_more(
    cluster: Cluster, workers: tuple[Worker, Worker], key: str, task: str
) -> None:
    """In their slots with a limit besides, and in the consumer without."""
    headers = {"dflock": {"lock_rate": [5, 0.5]}}
    if task == "parked":
        headers["dflock"]["lock_limit"] = None
    send = getattr(jobs, task)
    sent = [cluster.send(send, f"{key}:{n % 2}", headers=headers) for n in range(40)]
    for each in sent:
        assert each.get(timeout=PATIENCE) == each.id
    ids = {each.id for each in sent}
    starts = [event for event in cluster.events(what="start") if event["id"] in ids]
    assert len(starts) == 40
    check_windows(starts, 5, 0.5)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("faults", [False, True], ids=["quiet", "kills"])
def test_thousands_over_four_workers(
    cluster: Cluster, tmp_path: Path, key: str, faults: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three keys at 20/s: the server is killed and started again, and then a worker is killed."""
    names = [f"rated-{key.replace(':', '-')}-{number}" for number in range(4)]
    headers = {"dflock": {"lock_rate": [20, 1], "lock_limit": None, "lock_timeout": 500}}
    with contextlib.ExitStack() as running:
        state = str(tmp_path / "state")
        server = running.enter_context(LockServer(tmp_path, "--state-dir", state, name="rated"))
        workers = [
            running.enter_context(
                cluster.worker(name, queues=key, servers=server.address, pool="threads")
            )
            for name in names
        ]
        for worker in workers:
            worker.wait_ready()
        pace = running.enter_context(Pace())
        for number in range(2400):
            cluster.send(jobs.parked, f"{key}:{number % 3}", headers=headers, queue=key)

        def starts() -> list[dict[str, Any]]:
            return [e for e in cluster.events(what="start") if e["key"].startswith(f"{key}:")]

        if faults:
            cluster.wait(lambda: len(starts()) > 500 or None, "some", 100)
            server.kill()
            server.start()
            cluster.wait(lambda: len(starts()) > 1100 or None, "some more", 100)
            workers[0].kill()
            cluster.wait(lambda: len(starts()) > 1700 or None, "many", 100)
        else:
            cluster.wait(lambda: len(starts()) == 2400 or None, "all", 200)
        found = starts()
        served = pace.seconds / pace.wall
    check_windows(found, 20, 1.0)
    shares = []
    for number in range(3):
        times = sorted(e["at"] for e in found if e["key"] == f"{key}:{number}")
        shares.append((len(times) - 20) / 20 / (times[-1] - times[0]))
    with capsys.disabled():
        print(
            f"\n{len(found)} runs, share of what is allowed: {[round(s, 3) for s in shares]}, "
            f"and of the time in which this process was served: {served:.2f}"
        )
    # Above 0.95 where processors are free; what the machine had no time for does not count.
    assert faults or min(shares) >= 0.9 * served
