"""What a stranger does to workers and servers at the very moment of a turn."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil

from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster, node_of
from tests.celery_dflock.worker import standing
from tests.celery_dflock.worker.waiting import ids, keep_busy, present, started


def wait_told(cluster: Cluster, key: str) -> None:
    lock = cluster.lock(key)
    cluster.wait(lambda: any(each["told"] for each in present(lock)) or None, "its turn")


def test_a_worker_that_is_killed_at_a_turn_costs_the_next_one_nothing(
    cluster: Cluster, key: str
) -> None:
    """Its process is stopped on the way to the lock, and then the worker is killed."""
    with cluster.worker("killed-at-turn", concurrency=1) as worker:
        cluster.wait_ready(worker)
        first = cluster.send(jobs.plain, f"{key}-first", queue=worker.name)
        pid = cluster.wait_event("end", first)["pid"]
        with cluster.worker("lives-on") as other:
            cluster.wait_ready(other)
            with cluster.lock(key):
                cluster.send(jobs.parked, key, queue=worker.name)
                cluster.wait_waiters(key, 1)
                after = [cluster.send(jobs.parked, key, queue=other.name) for _ in range(3)]
                cluster.wait_waiters(key, 4)
                os.kill(pid, signal.SIGSTOP)
            wait_told(cluster, key)
            os.killpg(worker.pid, signal.SIGKILL)
            assert [each.get(timeout=PATIENCE) for each in after] == ids(after)
    assert started(cluster, key) == ids(after)


def test_a_waiting_task_that_is_revoked_at_its_turn(cluster: Cluster, key: str, gate: Path) -> None:
    """Its worker has no process when the lock is free; the next of the same worker runs."""
    with cluster.worker("revoked-at-turn") as worker:
        cluster.wait_ready(worker)
        with cluster.lock(key):
            sent = [cluster.send(jobs.parked, key, queue=worker.name) for _ in range(3)]
            cluster.wait_waiters(key, 3)
            busy = keep_busy(cluster, worker, key, gate)
        jobs.app.control.revoke(sent[0].id, destination=[node_of(worker)], reply=True)
        gate.touch()
        for each in (*busy, *sent[1:]):
            assert each.get(timeout=PATIENCE) == each.id
        cluster.wait_free(key)
    assert started(cluster, key) == ids(sent[1:])


def test_many_keys_share_one_process(cluster: Cluster, key: str) -> None:
    """One task waits for each: none of them waits forever, and they run as they came."""
    number = 200
    with cluster.worker("many-keys", concurrency=1) as worker:
        cluster.wait_ready(worker)
        with cluster.lock(f"{key}-held"):
            kept = cluster.send(jobs.parked, f"{key}-held", queue=worker.name)
            sent = [
                cluster.send(jobs.parked, f"{key}-{n}", queue=worker.name) for n in range(number)
            ]
            for each in sent:
                assert each.get(timeout=PATIENCE) == each.id
        assert kept.get(timeout=PATIENCE) == kept.id
        for n in range(number):
            assert started(cluster, f"{key}-{n}") == [sent[n].id]


def test_a_pool_that_shrinks_and_grows(cluster: Cluster, key: str) -> None:
    with cluster.worker("shrinks") as worker:
        cluster.wait_ready(worker)
        node, control = node_of(worker), jobs.app.control
        with cluster.lock(key):
            sent = [cluster.send(jobs.parked, key, queue=worker.name) for _ in range(6)]
            cluster.wait_waiters(key, 6)
            control.pool_shrink(1, destination=[node], reply=True)
            main = psutil.Process(
                worker.pid
            )  # a process that is about to end could be given a task
            cluster.wait(lambda: len(main.children()) == 1 or None, "one process that is left")
        control.pool_grow(2, destination=[node], reply=True)
        assert [each.get(timeout=PATIENCE) for each in sent] == ids(sent)
    assert started(cluster, key) == ids(sent)


def test_two_workers_of_one_name(cluster: Cluster, key: str) -> None:
    """Each is an instance of its own to the lock server."""
    with cluster.worker("same-name") as one:
        cluster.wait_ready(one)
        with cluster.worker("same-name") as two:
            two.wait_ready()  # asked from remote, either of them could answer
            sent = [cluster.send(jobs.parked, key, queue=one.name) for _ in range(40)]
            for each in sent:
                assert each.get(timeout=PATIENCE) == each.id
            assert {one.pid, two.pid} == {
                psutil.Process(each["pid"]).ppid() for each in cluster.events(what="start", key=key)
            }
    assert sorted(started(cluster, key)) == sorted(ids(sent))


def test_a_time_that_ends_at_the_turn(cluster: Cluster, key: str) -> None:
    """Whichever comes first, each task has one end: it runs, or it is skipped."""
    with cluster.worker("ends-at-turn") as worker:
        cluster.wait_ready(worker)
        sent = []
        for round_ in range(6):
            with cluster.lock(f"{key}-{round_}"):
                each = cluster.send(jobs.parked_short, f"{key}-{round_}", queue=worker.name)
                cluster.wait_waiters(f"{key}-{round_}", 1)
                lock = cluster.lock(f"{key}-{round_}")
                near = 0.9 + round_ * 0.03
                cluster.wait(
                    lambda lock=lock, near=near: (
                        (not (there := present(lock)) or there[0]["waited_s"] >= near) or None
                    ),
                    "the end",
                )
            sent.append(each)
        for each in sent:
            each.get(timeout=PATIENCE)
            assert (
                len(cluster.events(what="start", id=each.id))
                + len(cluster.events(what="skipped", id=each.id))
                == 1
            )


def test_a_worker_asks_for_its_next_turn_before_the_first_one_is_in_the_pool(
    cluster: Cluster, key: str, gate: Path
) -> None:
    """Both its processes are free: were it to ask later, others would go first meanwhile."""
    env = {jobs.TOLD_MS: str(1000 * jobs.LONG)}
    with cluster.worker("asks-at-once", app=standing.APP, env=env) as worker:
        cluster.wait_ready(worker)
        keys = [f"{key}-{n}" for n in range(2)]
        held = [cluster.lock(each) for each in keys]
        for each in held:
            assert each.acquire()
        sent = []
        for each in keys:
            sent.append(cluster.send(jobs.parked, each, queue=worker.name))
            cluster.wait_waiters(each, 1)
        with standing.standing(cluster, worker, gate):
            for lock in held:
                lock.release()
            for each in keys:
                wait_told(cluster, each)
            assert not any(started(cluster, each) for each in keys)
        for each in sent:
            assert each.get(timeout=PATIENCE) == each.id
