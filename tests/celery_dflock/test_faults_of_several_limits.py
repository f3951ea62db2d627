"""Several locks on one task: if one of them goes wrong, that is seen, and nothing stays held."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Task, states
from celery.result import AsyncResult

from celery_dflock import LockKeyError, LockLostError
from dflockd import admin
from dflockd.sharding import stable_hash_shard
from examples.demo.stage import LockServer, Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster, waiters

EITHER = pytest.mark.parametrize(
    "task", [jobs.by_locks, jobs.parked_three], ids=["slot", "consumer"]
)
WAITS = pytest.mark.parametrize("wait", ["slot", "consumer"])
NAMES = ("", ":vendor", ":fleet")


def names(key: str) -> list[str]:
    return [key + name for name in NAMES]


def lose_the_second(cluster: Cluster, key: str, sent: AsyncResult) -> None:
    """Take the vendor away from a run."""
    cluster.wait_event("start", sent)
    name = f"{key}:vendor"
    [holder] = cluster.lock(name).inspect()["holders"]
    assert admin.evict(cluster.lock_server.address, name, holder["fence"])


@pytest.mark.usefixtures("workers")
@EITHER
def test_the_second_is_lost_while_the_body_runs(cluster: Cluster, key: str, task: Task) -> None:
    sent = cluster.send(task, key, seconds=jobs.LONG)
    lose_the_second(cluster, key, sent)
    with pytest.raises(LockLostError) as failure:
        sent.get(timeout=PATIENCE)
    assert failure.value.key == f"{key}:vendor"
    assert cluster.wait_event("end", sent)["error"] == "LockLostError"
    assert [event["key"] for event in cluster.events(what="lost") if key in event["key"]] == [
        f"{key}:vendor"
    ]
    for name in names(key):
        cluster.wait_free(name)
    # It has begun: its place is used.
    assert cluster.lock(f"{key}:vendor").inspect()["rate"]["free"] == 4
    following = cluster.send(task, key)
    assert following.get(timeout=PATIENCE) == following.id


@pytest.mark.usefixtures("workers")
@EITHER
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_retry_takes_them_anew(cluster: Cluster, key: str, task: Task, is_lost: bool) -> None:
    sent = cluster.send(task, key, then="retry if lost" if is_lost else "retry slowly")
    if is_lost:
        lose_the_second(cluster, key, sent)
    assert sent.get(timeout=PATIENCE) == (sent.id if is_lost else "retried")
    first, second = cluster.events(what="start", id=sent.id)
    end = cluster.wait_event("end", sent)
    assert (first["retries"], second["retries"]) == (0, 1)
    assert end["at"] <= second["at"], "the retry runs beside what has sent it"
    for name in names(key):
        cluster.wait_free(name)
    assert cluster.lock(f"{key}:vendor").inspect()["rate"]["free"] == 3


@pytest.mark.usefixtures("workers")
@WAITS
def test_lists_that_name_the_same_keys_in_another_order(
    cluster: Cluster, key: str, wait: str
) -> None:
    """Five of an hour, so no more than five runs; they meet at three keys."""
    headers = {"dflock": {"lock_wait": wait}}
    kinds = [jobs.by_locks, jobs.by_locks_backwards] * 2
    sent = [cluster.send(each, key, seconds=0.05, headers=headers) for each in kinds]
    sent += [
        cluster.send(each, f"{key}:pair", seconds=0.01, headers=headers)
        for each in [jobs.two_keys, jobs.parked_pair] * 10
    ]
    for each in sent:
        assert each.get(timeout=PATIENCE) == each.id
    for name in (*names(key), f"{key}:pair:a", f"{key}:pair:b"):
        cluster.wait_free(name)


@pytest.mark.usefixtures("workers")
@WAITS
@pytest.mark.parametrize(
    ("task", "limit", "error", "line"),
    [
        (jobs.by_two_names, "vendor", LockKeyError, "gives it twice, and not with the same"),
        (jobs.by_second_limit, 7, LockKeyError, r"limit of Lock\('{key}:vendor'\) does not fit"),
        (jobs.by_two_names_of, 7, LockKeyError, "lock_key does not fit the arguments"),
    ],
    ids=["twice", "limit", "key"],
)
def test_what_cannot_be_made_of_the_second_one_fails_the_task(
    cluster: Cluster, key: str, wait: str, task: Task, limit: Any, error: type[Exception], line: str
) -> None:
    key = key.replace(":", "-")  # else it is encoded
    sent = cluster.send(task, key, limit=limit, headers={"dflock": {"lock_wait": wait}})
    with pytest.raises(error, match=line) as failure:
        sent.get(timeout=PATIENCE)
    assert "\n" not in str(failure.value)
    assert sent.state == states.FAILURE
    assert not cluster.events(what="start", id=sent.id)
    for name in names(key):
        assert waiters(cluster.lock_server, name) is None
    assert cluster.lock(f"{key}:vendor").inspect()["rate"] is None


@pytest.fixture(scope="module")
def second_server(cluster: Cluster) -> Iterator[LockServer]:
    with LockServer(cluster.directory, name="second of several") as server:
        yield server


@pytest.fixture(scope="module")
def sharded(cluster: Cluster, second_server: LockServer) -> Iterator[Worker]:
    """A worker whose keys are on two servers."""
    servers = f"{cluster.lock_server.address},{second_server.address}"
    with cluster.worker("several-sharded", servers=servers) as worker:
        cluster.wait_ready(worker)
        yield worker


def with_vendor_elsewhere(key: str) -> str:
    """Return a key that is at the first server, as its fleet is, while its vendor is at the second."""
    keys = (f"{key}:{number}" for number in range(1000))
    return next(
        each for each in keys if [stable_hash_shard(n, 2) for n in names(each)] == [0, 1, 0]
    )


@EITHER
def test_one_of_the_servers_is_down(
    cluster: Cluster, sharded: Worker, second_server: LockServer, key: str, task: Task
) -> None:
    key = with_vendor_elsewhere(key)
    second_server.kill()
    sent = cluster.send(task, key, queue=sharded.name)
    cluster.wait_event("requeued", sent)
    assert not cluster.events(what="start", id=sent.id)
    second_server.start()
    assert sent.get(timeout=PATIENCE) == sent.id
    for name in (key, f"{key}:fleet"):
        cluster.wait_free(name)
    cluster.wait_free(f"{key}:vendor", second_server)


@EITHER
def test_one_of_the_servers_forgets_its_lock_while_the_body_runs(
    cluster: Cluster, sharded: Worker, second_server: LockServer, key: str, task: Task
) -> None:
    key = with_vendor_elsewhere(key)
    sent = cluster.send(task, key, seconds=jobs.LONG, queue=sharded.name)
    cluster.wait_event("start", sent)
    second_server.kill()
    second_server.start()
    with pytest.raises(LockLostError) as failure:
        sent.get(timeout=PATIENCE)
    assert failure.value.key == f"{key}:vendor"
    for name in (key, f"{key}:fleet"):
        cluster.wait_free(name)
    cluster.wait_free(f"{key}:vendor", second_server)
