"""Tasks that wait for their locks in the consumer, and take up no slot of the worker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Task, chain, chord
from celery.result import AsyncResult

from celery_dflock import Skipped
from dflockd import admin
from examples.demo.stage import Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster, node_of
from tests.celery_dflock.worker.waiting import (
    SLOTS,
    assert_in_order,
    ids,
    keep_busy,
    started,
    turns,
    wait_started,
)


@pytest.fixture(scope="module")
def worker(cluster: Cluster) -> Iterator[Worker]:
    with cluster.worker("parking") as worker:
        cluster.wait_ready(worker)
        yield worker


def prefetch_count(worker: Worker) -> int:
    inspect = jobs.app.control.inspect([node_of(worker)], timeout=PATIENCE, limit=1)
    [stats] = inspect.stats().values()
    return int(stats["prefetch_count"])


def test_those_who_wait_take_no_slot_and_run_in_order(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    """More of them than slots, and than the worker would prefetch."""
    number = 5 * SLOTS
    before = prefetch_count(worker)
    with cluster.lock(key):
        sent = [cluster.send(jobs.parked, key, queue=worker.name) for _ in range(number)]
        cluster.wait_waiters(key, number)
        others = [
            cluster.send(jobs.patient, f"{key}-{n}", queue=worker.name) for n in range(number)
        ]
        assert [each.get(timeout=PATIENCE) for each in others] == ids(others)
        assert prefetch_count(worker) == before + number
        assert not started(cluster, key)
    assert [each.get(timeout=PATIENCE) for each in sent] == ids(sent)
    assert_in_order(turns(cluster, key, sent))
    starts = cluster.events(what="start", key=key)
    assert starts == sorted(starts, key=lambda event: event["at"])
    assert all(event["waited"] > 0 for event in starts)
    assert all(event["held"] for event in cluster.events(what="end", key=key))
    cluster.wait_free(key)
    cluster.wait(lambda: prefetch_count(worker) == before or None, "the prefetch as before")


def test_inspect_lists_them(cluster: Cluster, worker: Worker, key: str) -> None:
    with cluster.lock(key):
        sent = []
        for number in (1, 2):
            sent.append(cluster.send(jobs.parked, key, queue=worker.name))
            cluster.wait_waiters(key, number)
        [rows] = jobs.app.control.broadcast(
            "dflock", reply=True, destination=[node_of(worker)], timeout=PATIENCE, limit=1
        )
    [answer] = rows.values()
    ours = [row for row in answer if row.get("key") == key]
    assert [(row["id"], row["state"], row["place"]) for row in ours] == [
        (each.id, "waits", place) for place, each in enumerate(sent, 1)
    ]
    assert [each.get(timeout=PATIENCE) for each in sent] == ids(sent)


def test_a_child_that_dies_frees_the_lock_at_once(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    with cluster.lock(key):
        dying = cluster.send(jobs.parked, key, then="exit", queue=worker.name)
        cluster.wait_waiters(key, 1)
        after = cluster.send(jobs.parked, key, queue=worker.name)
        cluster.wait_waiters(key, 2)
    assert after.get(timeout=PATIENCE) == after.id
    assert turns(cluster, key, [dying, after]) == [0, 1]


def test_time_limits_do_not_count_the_wait(cluster: Cluster, worker: Worker, key: str) -> None:
    with cluster.lock(key):
        sent = cluster.send(jobs.parked, key, queue=worker.name, soft_time_limit=1, time_limit=2)
        cluster.wait_waiters(key, 1)
        received = time.monotonic()
        cluster.wait(lambda: time.monotonic() > received + 2.2 or None, "the time limits")
    assert sent.get(timeout=PATIENCE) == sent.id


def test_after_its_time_the_conflict_decides(cluster: Cluster, worker: Worker, key: str) -> None:
    with cluster.lock(key):
        skipped = cluster.send(jobs.parked_short, key, queue=worker.name)
        again = cluster.send(jobs.parked_again, key, queue=worker.name)
        result = Skipped.of(skipped.get(timeout=PATIENCE))
        assert result is not None
        assert (result.key, result.task_id) == (key, skipped.id)
        requeued = cluster.wait_event("requeued", again)
        assert requeued["attempt"] == 1
        cluster.wait_waiters(key, 1)
    assert again.get(timeout=PATIENCE) == again.id


@pytest.mark.parametrize("how", ["revoked", "expired"])
def test_who_will_not_run_leaves_the_queue(
    cluster: Cluster, worker: Worker, key: str, how: str
) -> None:
    expires = {"expires": 3} if how == "expired" else {}
    with cluster.lock(key):
        gone = cluster.send(jobs.parked, key, queue=worker.name, **expires)
        cluster.wait_waiters(key, 1)
        after = cluster.send(jobs.parked, key, queue=worker.name)
        cluster.wait_waiters(key, 2)
        if how == "revoked":
            jobs.app.control.revoke(gone.id)
        cluster.wait_waiters(key, 1)
        cluster.wait(lambda: gone.state == "REVOKED" or None, "the state")
    assert after.get(timeout=PATIENCE) == after.id
    assert started(cluster, key) == [after.id]


def test_who_has_no_slot_holds_nothing_and_keeps_its_position(
    cluster: Cluster, worker: Worker, key: str, gate: Path
) -> None:
    """Others have the lock meanwhile. One that is revoked leaves its position to the next."""
    busy = keep_busy(cluster, worker, key, gate)
    with cluster.lock(key):  # else the third may come while the others let somebody go first
        first, second, third = (cluster.send(jobs.parked, key, queue=worker.name) for _ in range(3))
        worker.wait_log(f"parked[{third.id}] waits for lock {key!r} in the consumer")
    for _ in range(3):
        with cluster.lock(key, timeout=PATIENCE) as other:
            assert other.held
    jobs.app.control.revoke(first.id)
    cluster.wait(lambda: first.state == "REVOKED" or None, "the state")
    gate.touch()
    assert [each.get(timeout=PATIENCE) for each in (second, third)] == ids([second, third])
    assert started(cluster, key) == [second.id, third.id]
    assert [each.get(timeout=PATIENCE) for each in busy] == ids(busy)
    cluster.wait_free(key)


def test_the_unique_lock_lasts_as_long_as_the_wait(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    def holders() -> list[dict[str, Any]]:
        stats = admin.stats(cluster.lock_server.address)["locks"]
        [name] = [e["key"] for e in stats if "parked_unique" in e["key"] and key in e["key"]]
        found: list[dict[str, Any]] = admin.inspect(cluster.lock_server.address, name)["holders"]
        return found

    def outlives() -> bool | None:
        return holders()[0]["held_s"] > 2 * jobs.parked_unique.lock_unique_ttl or None

    with cluster.lock(key):
        sent = cluster.send(jobs.parked_unique, key, queue=worker.name)
        cluster.wait_waiters(key, 1)
        cluster.wait(outlives, "a unique lock that is older than its first lease")
        again = cluster.send(jobs.parked_unique, key, queue=worker.name)
        assert again.id == sent.id, "it is on its way"
    assert sent.get(timeout=PATIENCE) == sent.id
    assert len(cluster.events(what="start", id=sent.id)) == 1


def test_a_busy_solo_worker_lets_others_go_first(cluster: Cluster, key: str, gate: Path) -> None:
    """Nobody in it could say so: a lock that is set aside for a minute would be idle for so long."""
    env = {jobs.TOLD_MS: str(int(10_000 * PATIENCE))}
    with cluster.worker("alone", pool="solo", env=env) as alone:
        cluster.wait_ready(alone)
        with cluster.lock(key):
            waiting = [cluster.send(jobs.parked, key, queue=alone.name) for _ in range(3)]
            cluster.wait_waiters(key, 3)
            busy = cluster.send(jobs.plain, key, gate=str(gate), queue=alone.name)
            cluster.wait_event("start", busy)
        with cluster.lock(key, timeout=PATIENCE):
            assert not [e for e in cluster.events(what="start") if e["id"] in ids(waiting)]
        gate.touch()
        assert [each.get(timeout=PATIENCE) for each in waiting] == ids(waiting)


def test_due_tasks_take_their_turns_with_ordinary_ones(
    cluster: Cluster, worker: Worker, key: str
) -> None:
    assert_take_turns(cluster, worker, key)


@pytest.mark.soak
def test_due_tasks_take_their_turns_with_ordinary_ones_in_threads(
    cluster: Cluster, key: str
) -> None:
    with cluster.ready("saturated", pool="threads") as worker:
        assert_take_turns(cluster, worker, key)


def assert_take_turns(cluster: Cluster, worker: Worker, key: str) -> None:
    """A worker that never has a free slot serves them all the same, in order."""

    def send_others() -> list[AsyncResult]:
        options: dict[str, Any] = {"seconds": 0.05, "queue": worker.name}
        return [cluster.send(jobs.plain, f"{key}-other", **options) for _ in range(40)]

    others = send_others()
    sent = [cluster.send(jobs.parked, key, queue=worker.name) for _ in range(10)]
    others += send_others()
    assert [each.get(timeout=PATIENCE) for each in sent] == ids(sent)
    assert_in_order(turns(cluster, key, sent))
    last = cluster.wait_event("end", sent[-1])["at"]
    for each in others:
        assert each.get(timeout=PATIENCE) == each.id
    ends = [event["at"] for event in cluster.events(what="end", key=f"{key}-other")]
    assert last < max(ends), "they had to wait for all others"
    assert not cluster.events(what="requeued", key=key)


MIXTURES = {
    "half in slots": [jobs.patient, jobs.parked],
    "half with two keys": [jobs.parked_pair, jobs.parked_one],
    "all three": [jobs.patient, jobs.parked, jobs.parked_endless],
}


@pytest.mark.parametrize("mixture", MIXTURES)
def test_whatever_waits_for_one_key_there_is_no_deadlock(
    cluster: Cluster, worker: Worker, key: str, mixture: str
) -> None:
    assert_no_deadlock(cluster, worker, key, MIXTURES[mixture])


@pytest.mark.soak
def test_nor_is_there_with_one_slot(cluster: Cluster, key: str) -> None:
    with cluster.worker("mixed", concurrency=1) as worker:
        for name, tasks in MIXTURES.items():
            assert_no_deadlock(cluster, worker, f"{key}:{name.replace(' ', '-')}", tasks)


def assert_no_deadlock(cluster: Cluster, worker: Worker, key: str, tasks: list[Task]) -> None:
    """Where the consumer held locks, those who waited for them had the processes."""
    sent = [
        cluster.send(tasks[n % len(tasks)], key, seconds=0.05, queue=worker.name) for n in range(16)
    ]
    assert [each.get(timeout=PATIENCE) for each in sent] == ids(sent)
    assert len(cluster.events(what="start", key=key)) == 16


def test_eta_and_rate_limit_come_first(cluster: Cluster, worker: Worker, key: str) -> None:
    with cluster.lock(key):
        later = cluster.send(jobs.parked, key, queue=worker.name, countdown=3)
        cluster.wait(
            lambda: f"parked[{later.id}] received" in worker.log_text() or None, "its arrival"
        )
        sooner = cluster.send(jobs.parked, key, queue=worker.name)
        cluster.wait_waiters(key, 1)
        worker.wait_log(f"parked[{later.id}] waits for lock {key!r} in the consumer")
    assert [each.get(timeout=PATIENCE) for each in (sooner, later)] == [sooner.id, later.id]
    assert started(cluster, key) == [sooner.id, later.id]

    with cluster.lock(key):
        slow = [cluster.send(jobs.parked_slowly, key, queue=worker.name) for _ in range(4)]
        worker.wait_log(f"parked_slowly[{slow[0].id}] waits for lock {key!r} in the consumer")
    assert [each.get(timeout=PATIENCE) for each in slow] == ids(slow)


def test_a_retry_waits_again(cluster: Cluster, worker: Worker, key: str) -> None:
    with cluster.lock(key):
        retried = cluster.send(jobs.parked, key, then="retry once", queue=worker.name)
        cluster.wait_waiters(key, 1)
        other = cluster.send(jobs.parked, key, queue=worker.name)
        cluster.wait_waiters(key, 2)
    assert retried.get(timeout=PATIENCE) == 1
    assert other.get(timeout=PATIENCE) == other.id
    retries = [event["retries"] for event in cluster.events(what="start", key=key, id=retried.id)]
    assert retries == [0, 1]
    assert not cluster.events(what="requeued", key=key)


def test_semaphores_wait_so_and_several_keys_for_the_first(
    cluster: Cluster, worker: Worker, key: str, gate: Path
) -> None:
    sent = [
        cluster.send(jobs.parked_by_twos, key, gate=str(gate), queue=worker.name) for _ in range(2)
    ]
    wait_started(cluster, key, 2)
    third = cluster.send(jobs.parked_by_twos, key, queue=worker.name)
    cluster.wait(
        lambda: f"parked_by_twos[{third.id}] waits" in worker.log_text() or None, "its wait"
    )
    gate.touch()
    assert [each.get(timeout=PATIENCE) for each in (*sent, third)] == ids([*sent, third])

    with cluster.lock(f"{key}:b"):
        with cluster.lock(f"{key}:a"):
            both = cluster.send(jobs.parked_two_keys, key, queue=worker.name)
            cluster.wait_waiters(f"{key}:a", 1)
            assert not cluster.events(what="asked", id=both.id)
        cluster.wait_waiters(f"{key}:b", 1)
    assert both.get(timeout=PATIENCE) == both.id


def test_one_call_can_ask_for_it(cluster: Cluster, worker: Worker, key: str) -> None:
    """And what keeps others like it from being sent goes along."""
    options = {"queue": worker.name, "headers": {"dflock": {"lock_wait": "consumer"}}}
    with cluster.lock(key):
        sent = cluster.send(jobs.unique_patient, key, **options)
        worker.wait_log(f"unique_patient[{sent.id}] waits for lock {key!r} in the consumer")
        assert cluster.send(jobs.unique_patient, key, **options).id == sent.id
    assert sent.get(timeout=PATIENCE) == sent.id
    again = cluster.send(jobs.unique_patient, key, **options)
    assert again.id != sent.id
    assert again.get(timeout=PATIENCE) == again.id


@pytest.mark.parametrize("rounds", [2, pytest.param(100, marks=pytest.mark.soak)])
@pytest.mark.timeout(600)
def test_chords_and_chains(cluster: Cluster, worker: Worker, key: str, rounds: int) -> None:
    options: dict[str, Any] = {"queue": worker.name}
    step = jobs.parked.si(key=key).set(**options)
    for _ in range(rounds):
        members = [step.clone() for _ in range(4)]
        body = jobs.collect.s(key=key).set(**options)
        results = chord(members)(body).get(timeout=PATIENCE)
        assert len(set(results)) == 4
        assert chain(step.clone(), step.clone(), step.clone())().get(timeout=PATIENCE)


def test_an_app_can_ask_for_it_and_bound_it(cluster: Cluster, key: str) -> None:
    env = {jobs.WAIT: "consumer", jobs.MAX_WAITING: "3"}
    with cluster.ready("bounded", env=env) as worker, cluster.lock(key):
        for _ in range(10):
            cluster.send(jobs.patient, key, queue=worker.name)
        cluster.wait_waiters(key, SLOTS + 3)
        assert prefetch_count(worker) == SLOTS + 3


@pytest.mark.parametrize(
    "pool",
    [
        "threads",
        "gevent",
        *(pytest.param(pool, marks=pytest.mark.soak) for pool in ("solo", "eventlet")),
    ],
)
def test_other_pools(cluster: Cluster, key: str, pool: str) -> None:
    name = f"parking-{pool}"
    with cluster.ready(name, pool=pool):
        with cluster.lock(key):
            sent = [cluster.send(jobs.parked, key, queue=name) for _ in range(5)]
            cluster.wait_waiters(key, 5)
            other = cluster.send(jobs.patient, f"{key}-other", queue=name)
            assert other.get(timeout=PATIENCE) == other.id
        assert [each.get(timeout=PATIENCE) for each in sent] == ids(sent)
        cluster.wait_free(key)
    assert_in_order(turns(cluster, key, sent))
