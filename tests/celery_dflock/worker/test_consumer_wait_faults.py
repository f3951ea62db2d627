"""What waits in the consumer survives its worker, its broker, its lock server, and their delays."""

from __future__ import annotations

import json
import os
import queue
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from celery import Celery

from dflockd.client.pending import PendingAcquires
from dflockd.client.requester import ANSWER_PATIENCE
from dflockd.sync_client import DistributedLock
from examples.demo.stage import LockServer, Redis, Worker, wait_until
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster, node_of
from tests.celery_dflock.reconnects import lose_connections
from tests.celery_dflock.worker.waiting import (
    assert_in_order,
    ids,
    present,
    started,
    turns,
    wait_started,
)
from tests.pace import Pace
from tests.stopping import stopped


@pytest.fixture(scope="module")
def server(cluster: Cluster) -> Iterator[LockServer]:
    with LockServer(cluster.directory, name="parking-locks") as server:
        yield server


def test_a_worker_that_grows(cluster: Cluster, key: str, gate: Path) -> None:
    """A task that is due counts as work for the autoscaler, and has the first new process."""
    with cluster.ready("growing", args=("--autoscale", "3,1")) as worker:
        busy = cluster.send(jobs.plain, f"{key}-busy", gate=str(gate), queue=worker.name)
        wait_started(cluster, f"{key}-busy", 1)
        sent = [cluster.send(jobs.parked, key, queue=worker.name) for _ in range(3)]
        assert [each.get(timeout=PATIENCE) for each in sent] == ids(sent)
        gate.touch()
        assert busy.get(timeout=PATIENCE) == busy.id
    assert_in_order(turns(cluster, key, sent))


def test_a_pool_of_greenlets_that_grows(cluster: Cluster, key: str, gate: Path) -> None:
    """What queues for a slot has the new one, and nothing else has to happen for that."""
    with cluster.worker("growing-gevent", pool="gevent", concurrency=1) as worker:
        cluster.wait_ready(worker)
        busy = cluster.send(jobs.plain, f"{key}-busy", gate=str(gate), queue=worker.name)
        cluster.wait_event("start", busy)
        sent = cluster.send(jobs.plain, key, queue=worker.name)
        worker.wait_log(f"{sent.id}] received")
        jobs.app.control.pool_grow(1, destination=[node_of(worker)])
        assert sent.get(timeout=PATIENCE) == sent.id
        assert not cluster.events(what="end", id=busy.id)


def processes_of(worker: Worker) -> int | None:
    """How many processes the pool of a worker with an autoscaler has; None if it does not say."""
    node = node_of(worker)
    said = jobs.app.control.inspect([node]).stats() or {}
    return said[node]["autoscaler"]["current"] if node in said else None


def test_a_worker_that_has_shrunk_to_nothing(cluster: Cluster, key: str) -> None:
    """Celery's autoscaler does not count who waits: there is a process when the turn comes."""
    env = {"AUTOSCALE_KEEPALIVE": "1"}
    with cluster.ready("shrinking", args=("--autoscale", "2,0"), env=env) as worker:
        with cluster.lock(key):
            headers = {"dflock": {"lock_timeout": None}}
            sent = cluster.send(jobs.parked, key, queue=worker.name, headers=headers)
            cluster.wait_waiters(key, 1)
            cluster.wait(lambda: processes_of(worker) == 0 or None, "it to shrink")
        assert sent.get(timeout=PATIENCE) == sent.id


def test_processes_that_die_and_are_replaced(cluster: Cluster, key: str) -> None:
    with cluster.ready("dying", args=("--max-tasks-per-child", "1")) as worker:
        with cluster.lock(key):
            sent = []
            for number in range(1, 6):
                then = "exit" if number == 3 else "return"
                sent.append(cluster.send(jobs.parked, key, then=then, queue=worker.name))
                cluster.wait_waiters(key, number)
        for number, each in enumerate(sent, 1):
            if number != 3:
                assert each.get(timeout=PATIENCE) == each.id
        wait_started(cluster, key, 5)
        cluster.wait_free(key)
    # What Celery takes for a free process may have yet to be made.
    assert_in_order(turns(cluster, key, sent), late=1)


def test_descriptors_used_up(cluster: Cluster, key: str) -> None:
    """More wait than the worker may have files open: nobody is stuck or lost."""
    number = 120
    with cluster.ready("few-files", files=90) as worker:
        with cluster.lock(key):
            sent = [cluster.send(jobs.parked, key, queue=worker.name) for _ in range(number)]
            cluster.wait(
                lambda: worker.log_text().count(" received") >= 60 or None, "their arrival"
            )
            time.sleep(1)
        for each in sent:
            assert each.get(timeout=60) == each.id
    assert sorted(started(cluster, key)) == sorted(ids(sent))


def test_a_worker_reads_what_it_has_asked_for_when_its_last_slot_is_taken(
    cluster: Cluster, key: str, gate: Path
) -> None:
    """Redis has popped it for that worker: nobody else has it, and a kill would cost it."""
    asks_rarely = {jobs.MORE: json.dumps({"broker_transport_options": {"polling_interval": 60}})}
    with cluster.ready("asking", concurrency=1, env=asks_rarely) as worker:
        with cluster.lock(key):
            first = cluster.send(jobs.parked_late, key, gate=str(gate), queue=worker.name)
            cluster.wait_waiters(key, 1)
        cluster.wait_event("start", first)
        second, third = (cluster.send(jobs.plain, key, queue=worker.name) for _ in range(2))
        worker.wait_log(f"{second.id}] received")
        # That was one beyond what it has room for, and it asks for no other.
        assert jobs.app.backend.client.llen(worker.name) == 1
        assert not cluster.events(id=second.id)
        gate.touch()
        assert third.get(timeout=PATIENCE) == third.id


def test_a_slow_receiver_costs_nobody_his_lock(cluster: Cluster, key: str) -> None:
    """The thread that knows of the wait renews the locks of all tasks of the process."""
    slow, env = 2.0, {jobs.SLOW: "2.0"}
    with cluster.ready("slow-receiver", pool="threads", env=env) as worker:
        other = f"{key}-short"
        with cluster.lock(key):
            sent = cluster.send(jobs.parked, key, queue=worker.name)
            cluster.wait_waiters(key, 1)
            short = cluster.send(jobs.short, other, seconds=slow + 0.5, queue=worker.name)
            assert short.get(timeout=PATIENCE) == short.id
        assert sent.get(timeout=PATIENCE) == sent.id
    assert cluster.wait_event("end", short)["held"]
    assert not cluster.events(what="lost", key=other)


def test_who_asks_a_server_that_hangs_costs_nobody_his_lock(
    lock_server: LockServer, key: str, tmp_path: Path
) -> None:
    """The thread that asks for a position renews the locks of all tasks of the process."""
    told: queue.Queue[None] = queue.Queue()
    kept = DistributedLock(key, 0, jobs.LONG, [lock_server.address], renew_ratio=0.2 / jobs.LONG)

    def wait_renewed() -> None:
        seen = [float("inf")]

        def probe() -> bool | None:
            [holder] = kept.inspect()["holders"]
            seen.append(holder["lease_expires_in_s"])
            return seen[-1] > seen[-2] or None

        wait_until(probe, PATIENCE, lambda: "it is not renewed")

    with LockServer(tmp_path) as hanging, kept:
        waiting = PendingAcquires()
        os.kill(hanging.pid, signal.SIGSTOP)
        waiting.join(
            DistributedLock(key, None, 10, [hanging.address]),
            PATIENCE,
            queued=lambda: None,
            told=lambda: told.put(None),
            ended=lambda _: None,
        )
        with Pace() as pace:
            for _ in range(3):
                wait_renewed()
        os.kill(hanging.pid, signal.SIGCONT)
        assert pace.seconds < ANSWER_PATIENCE - 1, "it was renewed once the server was given up"
        waiting.ask()
        told.get(timeout=PATIENCE)
        waiting.close()


@pytest.mark.parametrize(
    "how", [signal.SIGTERM, pytest.param(signal.SIGQUIT, marks=pytest.mark.soak), signal.SIGKILL]
)
def test_a_worker_that_ends(cluster: Cluster, key: str, how: signal.Signals) -> None:
    """Its tasks go to another at once, in their order. After a kill Redis keeps them for a while.

    One can come late: that which the worker was about to receive again, for it listens until its end.
    """
    queue = f"ending-{how.name}".lower()
    held = cluster.lock(key)
    with cluster.ready(queue) as worker, held:
        sent = [cluster.send(jobs.parked, key, queue=queue) for _ in range(6)]
        cluster.wait_waiters(key, 6)
        os.kill(worker.pid, how)
        cluster.wait_waiters(key, 0)
        cluster.wait(lambda: not worker.running or None, "the end of the worker")
        if how is signal.SIGKILL:
            return
        assert "6 tasks that waited in the consumer" in worker.log_text()
        with cluster.worker(f"{queue}-next", queues=queue):
            cluster.wait_waiters(key, 6)
            assert not started(cluster, key)
            held.release()
            assert [each.get(timeout=PATIENCE) for each in sent] == ids(sent)
    assert_in_order(turns(cluster, key, sent), late=1)


def test_a_broker_connection_that_breaks(cluster: Cluster, key: str, tmp_path: Path) -> None:
    """The places are left, the messages come again, and each runs once."""
    held = cluster.lock(key)
    with Redis(tmp_path, name="frail") as frail, Celery(broker=frail.url) as sender:
        env = {jobs.BROKER: frail.url}
        with cluster.ready("cut-off", env=env), held:
            sent = [
                sender.send_task("parked", kwargs={"key": key}, queue="cut-off") for _ in range(4)
            ]
            cluster.wait_waiters(key, 4)

            def cut() -> None:
                with redis.Redis(unix_socket_path=str(frail.socket)) as client:
                    client.client_kill_filter(_type="normal", skipme=True)

            for _ in range(2):
                lose_connections(cluster, key, 4, cut)
            held.release()
            wait_started(cluster, key, 4)
            cluster.wait_free(key)
    assert sorted(started(cluster, key)) == sorted(ids(sent))


def test_a_worker_that_is_stopped_queues_again(cluster: Cluster, key: str) -> None:
    """Its turn passes, and somebody else has the lock when it goes on."""
    held, other = cluster.lock(key), cluster.lock(key, timeout=PATIENCE)
    with cluster.ready("stopped") as worker, held:
        sent = cluster.send(jobs.parked_lease, key, queue="stopped")
        cluster.wait_waiters(key, 1)
        with stopped(worker):
            held.release()
            assert other.acquire()
        cluster.wait_waiters(key, 1)
        assert not started(cluster, key)
        other.release()
        assert sent.get(timeout=PATIENCE) == sent.id
    assert started(cluster, key) == [sent.id]


def test_who_is_passed_on_its_way_goes_back_and_that_is_no_conflict(
    cluster: Cluster, key: str
) -> None:
    """Its process takes longer than its turn lasts, and somebody else has the lock by then."""
    held, other = cluster.lock(key), cluster.lock(key, timeout=PATIENCE)
    with cluster.ready("passed", concurrency=1) as worker, held:
        first = cluster.send(jobs.plain, f"{key}-first", queue="passed")
        pid = cluster.wait_event("end", first)["pid"]
        inspect = jobs.app.control.inspect([node_of(worker)], timeout=PATIENCE, limit=1)
        for look in (inspect.reserved, inspect.active):  # first the one, then the other
            cluster.wait(lambda look=look: look() == {node_of(worker): []} or None, "no task")
        sent = cluster.send(jobs.parked_strict, key, queue="passed")
        cluster.wait_waiters(key, 1)
        os.kill(pid, signal.SIGSTOP)
        try:
            held.release()
            cluster.wait(lambda: any(each["told"] for each in present(other)) or None, "its turn")
            assert other.acquire()
        finally:
            os.kill(pid, signal.SIGCONT)
        requeued = cluster.wait_event("requeued", sent)
        assert requeued["attempt"] == 0
        assert "before it had a slot" in requeued["reason"]
        later = cluster.send(jobs.parked_strict, key, queue="passed")
        cluster.wait(lambda: len(present(other)) == 2 or None, "both, and the first is back")
        other.release()
        assert [each.get(timeout=PATIENCE) for each in (sent, later)] == ids([sent, later])
    assert started(cluster, key) == ids([sent, later]), "its position was kept"


@pytest.mark.parametrize("away", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_lock_server_that_ends(
    cluster: Cluster, server: LockServer, key: str, away: bool
) -> None:
    """Restarted, it is waited at again in the order of before. Else the tasks are sent again."""
    held = cluster.lock(key, server)
    name = f"restarting-{away}".lower()
    with cluster.ready(name, servers=server.address), held:
        sent = [cluster.send(jobs.parked, key, queue=name) for _ in range(5)]
        cluster.wait_waiters(key, 5, server)
        server.kill()
        if away:
            for each in sent:
                cluster.wait_event("requeued", each)
        server.start()
        assert [each.get(timeout=PATIENCE) for each in sent] == ids(sent)
    if not away:
        assert_in_order(turns(cluster, key, sent))
        assert not cluster.events(what="requeued", key=key)


def test_a_copy_does_not_run_beside_its_message_or_after_it(cluster: Cluster, key: str) -> None:
    """The message waits for longer than the broker waits for its acknowledgement."""
    held = cluster.lock(key)
    with cluster.worker("forgotten", env={jobs.VISIBILITY: "1"}) as worker, held:
        worker.wait_ready()
        sent = cluster.send(jobs.parked_late, key, queue="forgotten")
        cluster.wait_waiters(key, 1)
        worker.wait_log("was delivered again while it runs")
        cluster.wait_waiters(key, 1)
        held.release()
        assert sent.get(timeout=PATIENCE) == sent.id
        cluster.wait_event("deduplicated", sent)
    assert started(cluster, key) == [sent.id]
