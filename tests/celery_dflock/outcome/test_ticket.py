"""A requeued task gets its turn by arrival, held for it for a bounded time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from celery import Task
from celery.app.task import Context
from celery.exceptions import Retry
from celery.result import AsyncResult

from celery_dflock import LockNotAcquiredError
from celery_dflock.identity import runs_of
from celery_dflock.locks import try_once
from celery_dflock.outcome.decide import requeue_or_give_up
from celery_dflock.outcome.header import RUN, Header
from celery_dflock.outcome.requeue import reservation
from celery_dflock.outcome.types import Kept, TimedOut
from celery_dflock.plan import Plan
from dflockd.sync_client import DistributedLock, DistributedSemaphore, Reservation
from examples.demo.stage import LockServer, Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster, Waiter

pytestmark = pytest.mark.usefixtures("workers")


def queued(lock: DistributedLock) -> list[dict[str, Any]]:
    waiters: list[dict[str, Any]] = lock.inspect()["waiters"]
    return waiters


def send_in_order(
    cluster: Cluster, task: Task, key: str, number: int, **options: Any
) -> list[AsyncResult]:
    """Send some, each once the one before has its place."""
    sent = []
    for place in range(1, number + 1):
        sent.append(cluster.send(task, key, **options))
        cluster.wait_waiters(key, place)
    return sent


def by_grants(cluster: Cluster, sent: list[AsyncResult]) -> list[int]:
    """In which order they got the lock: 0, 1, 2, ... is that in which they were sent."""
    fences = [cluster.wait_event("start", each)["fence"] for each in sent]
    return sorted(range(len(sent)), key=fences.__getitem__)


@pytest.mark.parametrize(
    ("task", "number"),
    [(jobs.ticket, 6), (jobs.ticket_patient, 4)],
    ids=["at once", "after a wait"],
)
def test_they_run_in_the_order_of_their_arrival(
    cluster: Cluster, key: str, task: Task, number: int
) -> None:
    run_in_order(cluster, key, task, number)


def test_they_do_so_in_the_consumer_of_a_worker(cluster: Cluster, key: str) -> None:
    """It always has a thread: of two workers, or of a busy one, those go on who can start."""
    with cluster.ready("tickets", pool="threads", concurrency=8) as worker:
        run_in_order(cluster, key, jobs.ticket_parked, 4, queue=worker.name)


def run_in_order(cluster: Cluster, key: str, task: Task, number: int, **options: Any) -> None:
    """Their pauses are random, and so is the order in which they come back."""
    with cluster.lock(key) as holder:
        sent = send_in_order(cluster, task, key, number, **options)
        for each in sent:
            cluster.wait_event("requeued", each, 2)
        names = [waiter["label"].partition(" ")[0] for waiter in queued(holder)]
        assert names == [f"{task.name}[{each.id}]" for each in sent], "each has one place"
    assert [each.get(timeout=PATIENCE) for each in sent] == [each.id for each in sent]
    assert by_grants(cluster, sent) == list(range(number))
    assert all(len(cluster.events(what="start", id=each.id)) == 1 for each in sent)
    cluster.wait_free(key)


def test_newcomers_do_not_overtake(cluster: Cluster, key: str) -> None:
    with cluster.lock(key):
        [away] = send_in_order(cluster, jobs.ticket, key, 1)
        cluster.wait_event("requeued", away)
        newcomers = [cluster.send(task, key) for task in (jobs.patient, jobs.ticket)]
        cluster.wait_waiters(key, 3)
    assert cluster.lock(key).acquire() is False, "somebody has it, or it is kept for him"
    sent = [away, *newcomers]
    assert [each.get(timeout=PATIENCE) for each in sent] == [each.id for each in sent]
    assert by_grants(cluster, sent)[0] == 0


def test_with_several_holders(cluster: Cluster, key: str) -> None:
    def semaphore() -> DistributedSemaphore:
        return DistributedSemaphore(key, 2, 0, 30, [cluster.lock_server.address])

    one, two = semaphore(), semaphore()
    assert one.acquire()
    assert two.acquire()
    away = cluster.send(jobs.ticket_by_twos, key)
    cluster.wait_event("requeued", away)
    newcomer = cluster.send(jobs.by_twos, key)
    cluster.wait(lambda: len(queued(one)) == 2 or None, "a newcomer in the queue")
    one.release()
    assert [each.get(timeout=PATIENCE) for each in (away, newcomer)] == [away.id, newcomer.id]
    assert by_grants(cluster, [away, newcomer]) == [0, 1]
    two.release()


def test_who_does_not_come_back_delays_others_for_a_bounded_time(
    cluster: Cluster, workers: tuple[Worker, Worker], waiter: Callable[..., Waiter], key: str
) -> None:
    """Here because it was revoked. (If it is overdue by more than that, they do not wait at all.)"""
    with cluster.lock(key) as holder:
        gone = cluster.send(jobs.ticket_short, key)
        cluster.wait_event("requeued", gone)
        jobs.app.control.revoke(gone.id)
        # Its state says nothing: the run that sent it again may store its own after the end.
        end = f"Discarding revoked task: ticket_short[{gone.id}]"
        cluster.wait(lambda: any(end in w.log_text() for w in workers) or None, "its end")
        [place] = queued(holder)
        assert place["away"]
        assert place["label"].startswith(f"ticket_short[{gone.id}] ")
        next_one = waiter(key)
        cluster.wait_waiters(key, 2)
    next_one.wait_granted()
    next_one.lock.release()
    with cluster.lock(key):
        pass  # once only


@pytest.mark.parametrize(
    "task", [jobs.ticket_none, jobs.ticket_decided, jobs.ticket_two_keys], ids=lambda t: t.name
)
def test_who_keeps_none(cluster: Cluster, key: str, task: Task) -> None:
    """With `hold` None, where a function decides, and with several keys."""
    name = f"{key}:a" if task is jobs.ticket_two_keys else key
    with cluster.lock(name) as holder:
        sent = cluster.send(task, key)
        for nth in (1, 2):
            cluster.wait_event("requeued", sent, nth)
            assert not queued(holder)
    assert sent.get(timeout=PATIENCE) == sent.id


def test_a_redelivery_does_not_take_its_own_position_for_another_run(
    cluster: Cluster, key: str
) -> None:
    """A message can come twice while its task is away: from its latest attempt there is a position."""
    task, name = jobs.patient, f"redelivery-of-who-is-away-{key}"
    owner = runs_of(task.name, "")(name, 0, "", 0)
    place = DistributedLock(key, servers=[cluster.lock_server.address], owner=owner)
    with cluster.lock(key) as holder:
        assert place.enqueue() == "queued"
        assert place.wait(0, Reservation(30, 1)) is False
        sent = cluster.send(task, key, task_id=name)
        cluster.wait_waiters(key, 2)
        assert [waiter["away"] for waiter in queued(holder)] == [True, False]
    assert sent.get(timeout=PATIENCE) == name


@pytest.mark.parametrize("task", [jobs.ticket, jobs.ticket_parked], ids=lambda t: t.name)
def test_a_redelivery_of_who_holds_the_lock_keeps_no_position(
    cluster: Cluster, key: str, task: Task
) -> None:
    name = f"redelivery-{task.name}-{key}"
    owner = runs_of(task.name, "")(name, 0, "", 0)
    with DistributedLock(key, 0, 30, [cluster.lock_server.address], owner=owner) as holder:
        sent = cluster.send(task, key, task_id=name)
        cluster.wait_event("requeued", sent)
        assert not queued(holder)
    assert sent.get(timeout=PATIENCE) == name


def planned(task: Task, key: str, name: str, **more: Any) -> Plan:
    """What a worker would find out of a message; its request is the current one."""
    task.push_request(
        id=name, args=[], kwargs={"key": key}, **{"retries": 0, "called_directly": False, **more}
    )
    return Plan(task, task.request, task.run, (), {"key": key}, task._bound())


def test_the_pause_is_what_was_said(cluster: Cluster, key: str) -> None:
    name = f"said-{key}"
    run = planned(jobs.ticket, key, name)
    try:
        said = reservation(run.task, run.header, run.options, 0)
        assert said is not None
        it = TimedOut(LockNotAcquiredError(key, "asked"), Kept("00ff", said.away_s))
        with pytest.raises(Retry) as requeued:
            requeue_or_give_up(run, it)
    finally:
        jobs.ticket.pop_request()
    assert requeued.value.when == said.away_s
    assert AsyncResult(name, app=jobs.app).get(timeout=PATIENCE) == name


def test_a_queue_that_is_full(cluster: Cluster, key: str) -> None:
    """The lock is held all the same: that is no reason to run without it, or to fail."""
    narrow = LockServer(cluster.directory, "--max-waiters", "1", name="narrow")
    with narrow as server, cluster.lock(key, server):
        away, there, late = (cluster.lock(key, server) for _ in range(3))
        assert try_once(away, None, lambda: Reservation(9, 0)) is False
        assert away.ticket is not None
        assert there.enqueue() == "queued"
        assert try_once(late, None, lambda: Reservation(9, 0)) is False
        assert late.ticket is None
        there.release()


def test_a_retry_has_no_position() -> None:
    header = {RUN: {"id": "1", "attempt": 2, "since": 1.0, "ticket": "00ff", "retries": 0}}
    for retries, ticket in ((0, "00ff"), (1, None)):
        assert Header.read(Context(id="1", headers=header, retries=retries)).ticket == ticket


def test_who_is_about_to_give_up_leaves_no_position() -> None:
    """Nobody would come back to it."""
    task, options = jobs.limited, jobs.limited._lock_options
    header = Header({}, attempt=1, since=time.time())
    said = reservation(task, header, options, 0)
    assert said is not None
    assert 0 <= said.away_s <= options.requeue.cap
    assert reservation(task, replace(header, attempt=2), options, 0) is None
