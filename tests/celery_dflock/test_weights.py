"""`lock_weight`: a run takes several of a limit, or all: readers and writers, shares of a limit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, Task, states
from celery.exceptions import ImproperlyConfigured
from celery.result import AsyncResult

from celery_dflock import Lock, LockedTask, LockNotAcquiredError, dflock
from celery_dflock.config import settings
from celery_dflock.limits import Limits, Wanted, in_order
from celery_dflock.lock_key import LockKey
from dflockd.client.lock import Maker
from dflockd.sync_client import DistributedLock
from examples.demo.stage import LockServer, Worker, wait_until
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster, waiters
from tests.celery_dflock.record import Event
from tests.dflockd.storage.recovery_support import Site, inspected

ROUNDS = 3
READERS = 20
WRITERS = 2


def bind(**options: Any) -> Task:
    app = Celery("weights", set_as_current=False)

    @app.task(base=LockedTask, name="weighed", shared=False, lazy=False, **options)
    def task(account: int, weight: Any = 2, seats: Any = 3) -> None: ...

    return task


def weight_of(task: Task, *args: Any, **kwargs: Any) -> Any:
    [wanted] = task._lock_options.wanted(task, args, kwargs, "")
    return wanted.limits.weight


# What a task may say.


@pytest.mark.parametrize(
    ("options", "call", "weight"),
    [
        ({}, {}, 1),
        ({"lock_weight": 3}, {}, 3),
        ({"lock_weight": "all"}, {}, "all"),
        ({"lock_weight": "{weight}"}, {}, 2),
        ({"lock_weight": "{weight}"}, {"weight": "all"}, "all"),
        ({"lock_weight": lambda _task, args, _kwargs: args[0]}, {}, 1),
        ({"lock_weight": 3, "lock_limit": "{seats}"}, {}, 3),
        ({"lock_weight": 7, "lock_limit": None, "lock_rate": "5/m"}, {}, 7),
    ],
)
def test_a_value_a_template_or_a_function_says_it(
    options: dict[str, Any], call: dict[str, Any], weight: Any
) -> None:
    assert weight_of(bind(**{"lock_limit": 3, **options}), 1, **call) == weight


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"lock_weight": 0}, "lock_weight is 0: give a whole number, 1 or more, or 'all'"),
        ({"lock_weight": True}, "lock_weight is True: give a whole number, 1 or more, or 'all'"),
        ({"lock_weight": "most"}, "lock_weight is 'most': give a whole number, 1 or more, or"),
        ({"lock_weight": None}, "lock_weight is None: give a whole number, 1 or more, or 'all'"),
        (
            {"lock_weight": 4},
            "lock_weight is 4: give a whole number up to the lock_limit, 3, or 'all'",
        ),
        (
            {"lock_weight": 2, "lock_limit": 1},
            "lock_weight is 2: give a lock_limit above 1 too, or remove it",
        ),
        (
            {"lock_weight": "all", "lock_limit": 1},
            "lock_weight is 'all': give a lock_limit above 1 too, or remove it",
        ),
        (
            {"lock_weight": "{weight}", "lock_limit": 1},
            r"lock_weight is '\{weight\}': give a lock_limit above 1 too, or remove it",
        ),
        ({"lock_weight": "{nobody}"}, r"lock_weight '\{nobody\}': \{nobody\} names no argument"),
        (
            {"lock_weight": 2, "lock_conflict": "supersede"},
            "lock_limit is 3: give 1, since lock_conflict is 'supersede'",
        ),
        (
            {"lock_weight": 2, "lock_key": [Lock("a"), Lock("b", limit=2)], "lock_limit": None},
            "lock_limit is None: give a whole number, 1 or more",
        ),
        (
            {"lock_key": [Lock("a", limit=3, weight=4), "b"]},
            r"lock_key: weight of Lock\('a'\) is 4: give a whole number up to the limit, 3, or",
        ),
    ],
)
def test_what_is_known_to_be_bad_stops_the_program(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=f"^task weighed: {line}") as refused:
        bind(**{"lock_limit": 3, **options})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "call", "line"),
    [
        ({"lock_weight": "{weight}"}, {"weight": 0}, "lock_weight is 0: give a whole number, 1"),
        ({"lock_weight": "{weight}"}, {"weight": "a\nb"}, "lock_weight is 'a%0Ab': give a whole"),
        ({"lock_weight": lambda *_: "2"}, {}, "lock_weight is '2': give a whole number, 1 or more"),
        ({"lock_weight": lambda *_: None}, {}, "lock_weight is None: give a whole number, 1"),
        (
            {"lock_weight": "{weight}"},
            {"weight": 4},
            "lock_weight is 4: give a whole number up to the lock_limit, 3, or 'all'",
        ),
        (
            {"lock_weight": 3, "lock_limit": "{seats}"},
            {"seats": 2},
            "lock_weight is 3: give a whole number up to the lock_limit, 2, or 'all'",
        ),
        (
            {"lock_weight": "all", "lock_limit": "{seats}"},
            {"seats": 1},
            "lock_weight is 'all': give a lock_limit above 1 too, or remove it",
        ),
    ],
)
def test_a_bad_one_fails_the_task_in_one_line(
    options: dict[str, Any], call: dict[str, Any], line: str
) -> None:
    with pytest.raises(ImproperlyConfigured, match=f"^task weighed: {line}") as refused:
        bind(**{"lock_limit": 3, **options}).apply((1,), call, throw=True)
    assert "\n" not in str(refused.value)


def test_a_call_may_say_another() -> None:
    bound = bind(lock_key="a", lock_limit=3)._bound({"lock_weight": "all"})
    assert bound.options.limits == Limits(3, None, None, "all")
    assert bound.make_lock("a").weight == "all"


def test_readers_and_writers_take_their_locks_in_the_same_order() -> None:
    def taken(weight: Any) -> list[str]:
        limits = Limits(9, None, None, weight), Limits(5, None, None)
        wanted = [Wanted(LockKey(key), each, None) for key, each in zip("ab", limits, strict=True)]
        return [each.key for each in in_order(wanted)]

    assert taken(1) == taken(9) == taken("all") == ["b", "a"]


def test_who_has_none_says_nothing_of_it() -> None:
    """What is said for a weight is in the way of nobody else: a weight of 1 is made by no more."""
    for options in ({}, {"lock_limit": 3}, {"lock_limit": 3, "lock_weight": 1}):
        assert type(bind(**options)._bound().make_lock) is Maker


# What it does, in one process.


@pytest.fixture
def app(lock_server: LockServer) -> Celery:
    return eager(lock_server.address)


def eager(address: str) -> Celery:
    app = Celery("weighed", set_as_current=False)
    app.conf.task_always_eager = True
    app.conf.dflock_servers = [address]
    return app


def inspect(app: Celery, key: str) -> dict[str, Any]:
    return DistributedLock(key, **settings(app).connection_options()).inspect()


def weights(app: Celery, key: str, of: str = "holders") -> list[Any]:
    return [each.get("weight", 1) for each in inspect(app, key)[of]]


def test_each_lock_has_its_own_and_a_retry_the_same(app: Celery, key: str) -> None:
    seen = []
    locks = [Lock(f"{key}:gpu", limit=8, weight="{gpus}"), Lock(f"{key}:report", 100, weight="all")]

    @app.task(bind=True, base=LockedTask, shared=False, lock_key=locks)
    def task(self: Task, gpus: int) -> None:
        seen.append([weights(app, f"{key}:{name}") for name in ("gpu", "report")])
        if not self.request.retries:
            raise self.retry(countdown=0)

    task.apply((3,), throw=False)
    assert seen == [[[3], ["all"]]] * 2


def test_a_rate_and_the_limit_of_a_group_count_in_the_same_units(app: Celery, key: str) -> None:
    options: dict[str, Any] = {"lock_limit": None, "lock_weight": 4, "lock_timeout": 0}

    @app.task(base=LockedTask, shared=False, lock_key=key, lock_rate="10/h", **options)
    def paced() -> Any:
        return inspect(app, key)["rate"]["free"]

    assert [paced.apply(throw=True).get() for _ in range(2)] == [6, 2]

    @app.task(
        base=LockedTask,
        shared=False,
        lock_key=f"{key}:group",
        lock_group="tenant",
        lock_group_limit=5,
        lock_conflict="skip",
        **options,
    )
    def grouped() -> str:
        return "ran"

    def beside(weight: int) -> dflock:
        group = {"limit": None, "group": "tenant", "group_limit": 5}
        return dflock(f"{key}:group", 0, weight=weight, app=app, **group)  # type: ignore[arg-type]

    with beside(2):
        assert grouped.apply(throw=True).get() != "ran"
    with beside(1):
        assert grouped.apply(throw=True).get() == "ran"


@pytest.mark.parametrize(
    ("weight", "options"), [(4, {"lock_rate": "100/s"}), ("all", {})], ids=["rated", "all"]
)
def test_a_renewal_tells_a_server_that_has_lost_it(
    tmp_path: Path, weight: Any, options: dict[str, Any]
) -> None:
    site = Site(tmp_path / "state", "--default-lease-ttl", "6")
    try:
        app = eager(f"127.0.0.1:{site.start().port}")
        given: dict[str, Any] = {"lock_key": "k", "lock_limit": 9, "lock_ttl": 6, **options}

        @app.task(base=LockedTask, shared=False, lock_weight="{weight}", **given)
        def task(weight: Any) -> Any:
            site.kill()
            site.change_boot()
            for path in site.path.glob("journal-*"):
                path.unlink()
            site.start("--state-recover")
            holders = wait_until(
                lambda: inspected(site.connect(), "k")["holders"] or None,
                PATIENCE,
                lambda: "nobody has said that it holds the lock",
            )
            return [each.get("weight", 1) for each in holders]

        assert task.apply((weight,), throw=True).get() == [weight]
    finally:
        site.end()


# With real workers.


def two_that_run(cluster: Cluster, task: Task, key: str, **kwargs: Any) -> list[AsyncResult]:
    """Send two tasks, and wait until both run: another that is sent by then may overtake one."""
    sent = [cluster.send(task, key, **kwargs) for _ in range(2)]
    for each in sent:
        cluster.wait_event("start", each)
    return sent


def inside(cluster: Cluster, key: str) -> Iterator[list[Event]]:
    """Yield, for each start of a body, the starts of all that were in by then."""
    starts = cluster.events(what="start", key=key)
    ends = {event["id"]: event["at"] for event in cluster.events(what="end", key=key)}
    for now in starts:
        yield [each for each in starts if each["at"] <= now["at"] < ends[each["id"]]]


BOTH = pytest.mark.parametrize(
    ("light", "heavy"),
    [(jobs.read, jobs.write), (jobs.parked_read, jobs.parked_write)],
    ids=["slot", "consumer"],
)


@pytest.mark.usefixtures("workers")
@BOTH
def test_tasks_that_read_run_together_and_one_that_writes_alone(
    cluster: Cluster, key: str, gate: Path, light: Task, heavy: Task
) -> None:
    kinds = [*[light] * (READERS // WRITERS), heavy] * WRITERS * ROUNDS
    sent = two_that_run(cluster, light, key, gate=str(gate))
    sent += [cluster.send(kind, key, seconds=0.02) for kind in kinds]
    gate.touch()
    for each in sent:
        assert each.get(timeout=PATIENCE) == each.id
    cluster.wait_free(key)
    kind_of = zip(sent, [light, light, *kinds], strict=True)
    writers = {each.id for each, kind in kind_of if kind is heavy}
    found = list(inside(cluster, key))
    assert len(found) == len(sent)
    for there in found:
        assert len(there) == 1 or writers.isdisjoint(each["id"] for each in there), there
    assert max(map(len, found)) > 1


@pytest.mark.usefixtures("workers")
@BOTH
def test_a_writer_waits_only_for_the_readers_before_it(
    cluster: Cluster, key: str, gate: Path, light: Task, heavy: Task
) -> None:
    before = [cluster.send(light, key, gate=str(gate)) for _ in range(2)]
    for each in before:
        cluster.wait_event("start", each)
    writer = cluster.send(heavy, key)
    cluster.wait_waiters(key, 1)
    after = cluster.send(light, key)
    cluster.wait_waiters(key, 2)
    report = cluster.lock(key).inspect()
    assert [waiter.get("weight", 1) for waiter in report["waiters"]] == ["all", 1]
    gate.touch()
    for each in (*before, writer, after):
        assert each.get(timeout=PATIENCE) == each.id
    starts, ends = (
        {each.id: cluster.wait_event(what, each)["at"] for each in (*before, writer, after)}
        for what in ("start", "end")
    )
    assert max(ends[each.id] for each in before) <= starts[writer.id]
    assert ends[writer.id] <= starts[after.id]


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("task", [jobs.by_weight, jobs.parked_by_weight], ids=["slot", "consumer"])
def test_the_weights_of_who_runs_fit_into_the_limit(
    cluster: Cluster, key: str, gate: Path, task: Task
) -> None:
    weights = [5, 3, 1, "all", 2, 7, 4, 4, 8, 1, 1, 6, 2, 3] * 2
    together = two_that_run(cluster, task, key, weight=4, gate=str(gate))
    sent = dict.fromkeys([each.id for each in together], 4) | {
        cluster.send(task, key, weight=each, seconds=0.02).id: each for each in weights
    }
    gate.touch()
    for task_id in sent:
        assert task.AsyncResult(task_id).get(timeout=PATIENCE) == task_id
    cluster.wait_free(key)
    found = list(inside(cluster, key))
    assert len(found) == len(sent)
    for there in found:
        taken = [sent[each["id"]] for each in there]
        assert sum(8 if each == "all" else each for each in taken) <= 8, taken
    assert max(map(len, found)) > 1


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("task", [jobs.by_weight, jobs.parked_by_weight], ids=["slot", "consumer"])
def test_a_bad_weight_fails_the_task_and_locks_nothing(
    cluster: Cluster, key: str, task: Task
) -> None:
    sent = cluster.send(task, key, weight=9)
    line = "lock_weight is 9: give a whole number up to the lock_limit, 8, or 'all'"
    with pytest.raises(ImproperlyConfigured, match=line):
        sent.get(timeout=PATIENCE)
    assert sent.state == states.FAILURE
    assert cluster.events(id=sent.id, what="start") == []
    assert waiters(cluster.lock_server, key) is None


@pytest.mark.usefixtures("workers")
def test_a_task_holds_its_share_of_one_while_it_waits_for_the_next_without_a_slot(
    cluster: Cluster, key: str, gate: Path
) -> None:
    """Its process then has all of them, with the weights that the consumer asked for."""
    gpu, report = f"{key}:gpu", f"{key}:report"
    with dflock(report, limit=100, app=jobs.app):
        sent = cluster.send(jobs.parked_shares, key, gate=str(gate))
        cluster.wait_waiters(report, 1)
        assert weights(jobs.app, gpu) == [3]
        assert weights(jobs.app, report, "waiters") == ["all"]
        assert not cluster.events(what="asked", id=sent.id)
    cluster.wait_event("start", sent)
    assert [weights(jobs.app, each) for each in (gpu, report)] == [[3], ["all"]]
    gate.touch()
    assert sent.get(timeout=PATIENCE) == sent.id
    for each in (gpu, report):
        cluster.wait_free(each)


@pytest.mark.usefixtures("workers")
def test_a_requeued_task_keeps_the_position_of_its_weight(cluster: Cluster, key: str) -> None:
    with ExitStack() as held:
        held.enter_context(dflock(key, limit=3, weight=2, app=jobs.app))
        sent = cluster.send(jobs.ticket_weighed, key)
        cluster.wait_event("requeued", sent, 2)
        [waiter] = cluster.lock(key).inspect()["waiters"]
        assert waiter["weight"] == 2
        # One slot is free, and it is not for who came later.
        late = dflock(key, 0, limit=3, app=jobs.app)
        with pytest.raises(LockNotAcquiredError):
            held.enter_context(late)
    assert sent.get(timeout=PATIENCE) == sent.id


def test_inspection_shows_it(
    cluster: Cluster, workers: tuple[Worker, Worker], key: str, gate: Path
) -> None:
    running = cluster.send(jobs.by_weight, key, weight=3, gate=str(gate))
    cluster.wait_event("start", running)
    waiting = cluster.send(jobs.parked_by_weight, key, weight="all")
    cluster.wait_waiters(key, 1)
    answers = jobs.app.control.inspect(timeout=PATIENCE, limit=len(workers))._request("dflock")
    rows = {row["id"]: row for rows in answers.values() for row in rows if row.get("key") == key}
    gate.touch()
    assert waiting.get(timeout=PATIENCE) == waiting.id
    assert [rows[each.id]["weight"] for each in (running, waiting)] == [3, "all"]
