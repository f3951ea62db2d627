"""What users of other libraries have complained about and no other test shows; docs/complaints.md.

With real workers, like the rest of these tests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from celery import Celery, chain, states
from celery.result import AsyncResult

from celery_dflock import Skipped
from dflockd.sync_client import DistributedLock
from examples.demo.stage import LockServer
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster, Waiter, waiters
from tests.dflockd.proxy import Proxy

pytestmark = pytest.mark.usefixtures("workers")


def ids_and_ends(cluster: Cluster, key: str) -> list[tuple[str, str]]:
    """Who began and ended under the key, in order."""
    return [(e["id"], e["what"]) for e in cluster.events(key=key) if e["what"] in ("start", "end")]


def test_sent_by_name_from_a_program_without_the_task(
    cluster: Cluster, redis_url: str, key: str
) -> None:
    publisher = Celery("publisher", broker=redis_url, set_as_current=False)
    with publisher, cluster.lock(key):
        sent = publisher.send_task("patient", kwargs={"key": key})
        cluster.wait_waiters(key, 1)
        assert not cluster.events(what="start", id=sent.id)

    assert cluster.wait_event("end", sent)["held"]


def test_the_rest_of_a_chain_runs_after_a_link_that_was_skipped(cluster: Cluster, key: str) -> None:
    with cluster.lock(key):
        sent = chain(jobs.skipped.s(key), jobs.collect.s(key=key)).apply_async()

        skipped = Skipped.of(sent.get(timeout=PATIENCE))

    assert skipped is not None
    assert skipped.task_id == sent.parent.id
    assert len(cluster.events(what="collected", key=key)) == 1


def test_a_task_may_send_itself_again(cluster: Cluster, key: str) -> None:
    first = cluster.send(jobs.requeued, key, then="send again")

    second = AsyncResult(first.get(timeout=PATIENCE), app=jobs.app)

    assert second.get(timeout=PATIENCE) == second.id != first.id
    assert ids_and_ends(cluster, key) == [
        (first.id, "start"),
        (first.id, "end"),
        (second.id, "start"),
        (second.id, "end"),
    ]


def test_revoked_before_it_ran_blocks_nobody(
    cluster: Cluster, lock_server: LockServer, key: str
) -> None:
    sent = cluster.send(jobs.patient, key, countdown=2)
    sent.revoke()
    cluster.wait(lambda: sent.state == states.REVOKED or None, "the state REVOKED")
    assert waiters(lock_server, key) is None

    again = cluster.send(jobs.patient, key)

    assert again.get(timeout=PATIENCE) == again.id != sent.id
    assert not cluster.events(what="start", id=sent.id)


def test_a_task_for_later_keeps_nobody_waiting(
    cluster: Cluster, lock_server: LockServer, key: str
) -> None:
    later = cluster.send(jobs.patient, key, countdown=3)
    now = cluster.send(jobs.patient, key)

    assert now.get(timeout=PATIENCE) == now.id
    assert waiters(lock_server, key) is None, "it has no place yet"
    assert not cluster.events(what="asked", id=later.id)
    assert later.get(timeout=PATIENCE) == later.id


def test_requeued_tasks_leave_the_processes_to_others(
    cluster: Cluster, waiter: Callable[..., Waiter], key: str
) -> None:
    """More of them than the worker has processes, and none of these stands still."""
    waiter(key).wait_granted()
    stuck = [cluster.send(jobs.requeued, key, queue="one") for _ in range(4)]
    for each in stuck:
        cluster.wait_event("requeued", each)

    others = [cluster.send(jobs.patient, f"{key}:{n}", queue="one") for n in range(4)]

    assert [each.get(timeout=PATIENCE) for each in others] == [each.id for each in others]
    assert not cluster.events(what="start", key=key)
    for each in stuck:
        each.revoke()


def test_a_waiter_asks_once_and_is_told(
    cluster: Cluster, lock_server: LockServer, key: str
) -> None:
    holder = cluster.lock(key)
    with contextlib.closing(Proxy(lock_server.port)) as proxy:
        lock = DistributedLock(key, PATIENCE, 30, [f"127.0.0.1:{proxy.port}"])
        assert holder.acquire()
        with ThreadPoolExecutor(1) as pool:
            granted = pool.submit(lock.acquire)
            cluster.wait_waiters(key, 1)
            proxy.withhold_requests()
            holder.release()

            assert granted.result()

            proxy.pass_on()
            assert lock.release()
