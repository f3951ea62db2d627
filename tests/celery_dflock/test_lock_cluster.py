"""The plugin with a cluster of lock servers: three real ones over a real etcd, and scripted ones."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from celery.exceptions import ImproperlyConfigured
from celery.utils.nodenames import gethostname
from click.testing import CliRunner, Result

from celery_dflock import LockedTask, LockUnavailableError, dflock
from celery_dflock.beat.claims import Claims
from celery_dflock.beat.firing import Firing
from celery_dflock.cli import dflock as commands
from celery_dflock.config import settings
from celery_dflock.locks import Locks
from celery_dflock.testing import assert_locked, assert_not_locked
from dflockd.client.process import close_idle_connections
from dflockd.sync_client import DistributedLock
from dflockd.wire import Acquire, Enqueue, Recovering, Status, Wait
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster, Waiter
from tests.dflockd.cluster.stage import ClusterStage, settled
from tests.dflockd.scripted_server import ScriptedCluster
from tests.pace import Pace

LEASE = 60


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterStage]:
    directory = tmp_path_factory.mktemp("lock-cluster")
    # No server ends without a word here: nobody waits until the longest lease is over.
    with settled(directory, "--shutdown-timeout", "3", lease=jobs.LONG) as stage:
        yield stage
        close_idle_connections()


def seeds(stage: ClusterStage) -> str:
    return "cluster://" + ",".join(server.address for server in stage.servers[:2])


def make_app(servers: Any, **conf: Any) -> Celery:
    app = Celery("cluster", broker="memory://", set_as_current=False)
    app.conf.update(dflock_servers=servers, **conf)
    return app


@pytest.fixture
def app(stage: ClusterStage) -> Celery:
    return make_app(seeds(stage))


# Settings.


def test_where_the_servers_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "cluster://lock-1:6388,lock-2"
    assert str(settings(make_app(text)).servers) == "cluster://lock-1:6388,lock-2:6388"
    assert settings(make_app(text)).is_cluster
    monkeypatch.setenv("DFLOCK_SERVERS", text)
    assert str(settings(make_app(None)).servers) == "cluster://lock-1:6388,lock-2:6388"
    assert not settings(make_app(["lock-1", "lock-2"])).is_cluster


@pytest.mark.parametrize(
    ("servers", "more", "text"),
    [
        ("cluster://", {}, "dflock_servers: .* name one or more servers"),
        ("cluster://a:1,a:1", {}, "dflock_servers: .* names one server twice"),
        ("cluster://a:x", {}, "dflock_servers: server 'a:x' is malformed"),
        (["cluster://a:1"], {}, "dflock_servers: .* is a cluster: give it alone"),
        ("a:1,cluster://b:1", {}, "dflock_servers: .* is a cluster: give it alone"),
        (
            "cluster://a:1",
            {"dflock_sharding_strategy": "tests.celery_dflock.test_lock_cluster.seeds"},
            "dflock_sharding_strategy is set with dflock_servers cluster://a:1: remove it",
        ),
    ],
)
def test_bad_settings(servers: Any, more: dict[str, Any], text: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=text) as refused:
        settings(make_app(servers, **more))
    assert "\n" not in str(refused.value)


# Locks.


@pytest.mark.parametrize("refusal", [Recovering(20), Status.DRAINING])
@pytest.mark.parametrize("asked", [Enqueue, Wait])
def test_a_cluster_that_is_not_ready_is_unavailable(asked: type, refusal: Any) -> None:
    """That is no conflict: nobody has said that another holds the lock. And it is waited for once."""
    cluster = ScriptedCluster()
    first = cluster.servers[0]
    try:
        first.script(Enqueue, Status.QUEUED)
        first.script(asked, refusal)
        first.script(Acquire, refusal)
        app_settings = settings(make_app(cluster.seeds))
        locks = Locks([Locks.maker(1, 30, app_settings)("k")], 1, is_cluster=True)
        with Pace() as pace, pytest.raises(LockUnavailableError):
            locks.acquire()
        assert pace.wall >= 0.9
        assert pace.seconds < 2.5
    finally:
        cluster.stop()
        close_idle_connections()


@pytest.mark.parametrize(("retry_ms", "asked"), [(20, 3), (5000, 1)])
def test_a_hand_over_is_waited_for_without_a_timeout(retry_ms: int, asked: int) -> None:
    cluster = ScriptedCluster()
    first = cluster.servers[0]
    try:
        first.script(Acquire, Recovering(retry_ms), Recovering(retry_ms), Status.TIMEOUT)
        app_settings = settings(make_app(cluster.seeds))
        locks = Locks([Locks.maker(1, 30, app_settings)("k")], 0, is_cluster=True)
        if asked > 1:
            assert locks.acquire() == "k"
        else:
            with pytest.raises(LockUnavailableError):
                locks.acquire()
        assert len(first.asked(Acquire)) == asked
    finally:
        cluster.stop()
        close_idle_connections()


def test_the_time_in_which_the_server_is_looked_for_counts() -> None:
    cluster = ScriptedCluster()
    first = cluster.servers[0]
    try:
        first.script(Enqueue, *[Recovering(400)] * 3, Status.QUEUED)
        first.script(Wait, Status.TIMEOUT)
        app_settings = settings(make_app(cluster.seeds))
        locks = Locks([Locks.maker(1, 30, app_settings)("k")], 4, is_cluster=True)
        assert locks.acquire() == "k"
        assert first.asked(Wait)[0].timeout == 3
    finally:
        cluster.stop()
        close_idle_connections()


def test_a_block_whose_lock_moves(stage: ClusterStage, app: Celery) -> None:
    key = stage.key_at(stage.servers[0])
    with dflock(key, ttl=LEASE, app=app) as lock:
        assert_locked(key, app)
        stage.move([stage.shard_of(key)], stage.servers[2])
        assert_locked(key, app)
        assert lock.extend()
        with pytest.raises(AssertionError, match=f"on {stage.servers[2].address} is held by"):
            assert_not_locked(key, app)
    assert_not_locked(key, app)


async def test_a_block_of_a_coroutine(stage: ClusterStage, app: Celery) -> None:
    key = await asyncio.to_thread(stage.key_at, stage.servers[0])
    async with dflock(key, ttl=LEASE, app=app) as lock:
        await asyncio.to_thread(stage.move, [stage.shard_of(key)], stage.servers[1])
        assert await lock.extend()
        assert lock.held


def test_a_unique_task_whose_lock_moves(stage: ClusterStage, app: Celery) -> None:
    """Its lock is held by nobody's connection while the message is on its way."""

    @app.task(base=LockedTask, lock_unique="until_executed", shared=False, lazy=False)
    def sync_account(account: int) -> None: ...

    first = sync_account.delay(7)
    assert sync_account.delay(7).id == first.id
    [row] = json.loads(run(app, "locks", "--json").stdout)
    for server in stage.servers:
        stage.move([stage.shard_of(row["key"])], server)
        assert sync_account.delay(7).id == first.id
    assert json.loads(run(app, "release", row["key"], "--yes", "--json").stdout)
    assert sync_account.delay(7).id != first.id
    run(app, "release", row["key"], "--yes")


def test_claims_of_beats(stage: ClusterStage, app: Celery) -> None:
    key = stage.key_at(stage.servers[0])
    due = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
    claims = Claims(key, settings(app))
    for number, server in enumerate(stage.servers):
        firing = Firing(key, f"entry {number}", due)
        claims.take(firing)
        stage.move([stage.shard_of(key)], server)
        assert claims.left([]) == firing
        if number:
            claims.confirm()
        else:
            claims.clear()
        assert claims.left([]) is None


# Commands.


def run(app: Celery, *arguments: str) -> Result:
    context = CLIContext(app=app, no_color=True, workdir=None)
    return CliRunner().invoke(commands, arguments, obj=context)


def test_all_servers_are_looked_at(stage: ClusterStage, app: Celery) -> None:
    every = sorted(server.address for server in stage.servers)
    status = run(app, "status", "--json")
    assert status.exit_code == 0, status.output
    assert [row["server"] for row in json.loads(status.stdout) if "server" in row] == every
    assert [line.split(": ")[0] for line in run(app, "ping").stdout.splitlines()] == every
    keys = [stage.key_at(server) for server in stage.servers]
    locks = [DistributedLock(key, 0, LEASE, seeds(stage), label=f"of {key}") for key in keys]
    for lock in locks:
        assert lock.acquire()
    waiting = DistributedLock(keys[1], 30, LEASE, seeds(stage), label="next")
    with Waiter(waiting) as waiter:
        stage.follow("i", keys[1], "_")
        deadline = time.monotonic() + PATIENCE
        while not (rows := json.loads(run(app, "waiters", "--json").stdout)):
            assert time.monotonic() < deadline
        assert [(row["key"], row["label"]) for row in rows] == [(keys[1], "next")]
        held = json.loads(run(app, "locks", "--json").stdout)
        assert {(row["key"], row["server"]) for row in held} == {
            (key, server.address) for key, server in zip(keys, stage.servers, strict=True)
        }
        done = run(app, "release", keys[1], "--yes")
        assert done.stdout == f"{keys[1]}: released, was held by of {keys[1]}\n"
        waiter.wait_granted()
    for lock in locks:
        lock.release()


def test_a_cluster_that_is_down() -> None:
    cluster = ScriptedCluster()
    cluster.stop()
    app = make_app(cluster.seeds)
    status = run(app, "status")
    assert status.exit_code == 1
    assert status.stdout.startswith(f"{cluster.seeds}: no server of {cluster.seeds} can be reached")
    locks = run(app, "locks")
    assert locks.exit_code == 1
    assert locks.stderr.count("\n") == 1


# Workers.


def inspected(worker: str) -> list[tuple[str, str, str]]:
    """What ``celery inspect dflock`` says: key, task id and state."""
    node = f"{worker}@{gethostname()}"
    inspect = jobs.app.control.inspect([node], timeout=PATIENCE, limit=1)
    rows = inspect._request("dflock")[node]
    # A server that is not ready yet is an error, in a row that has none of these.
    return [(row.get("key"), row.get("id"), row.get("state")) for row in rows]


def test_tasks_outlive_their_lock_server(cluster: Cluster, stage: ClusterStage, gate: Path) -> None:
    """One runs, one waits for it, and a third would be skipped: nothing of it changes."""
    leaving = stage.servers[2]
    key = stage.key_at(leaving)
    task = jobs.patient
    with cluster.ready("clustered", servers=seeds(stage), concurrency=2):
        first = cluster.send(task, key, gate=str(gate), queue="clustered")
        cluster.wait_event("start", first)
        second = cluster.send(task, key, queue="clustered")
        lock = DistributedLock(key, 0, LEASE, seeds(stage))
        cluster.wait(lambda: lock.inspect()["waiters"] or None, "the second to wait")
        leaving.stop()
        waiting = cluster.wait(lambda: lock.inspect()["waiters"] or None, "it to wait again")
        assert second.id in waiting[0]["label"]
        both = {(key, first.id, "holds"), (key, second.id, "waits")}
        cluster.wait(lambda: set(inspected("clustered")) == both or None, "the worker to know both")
        assert lock.acquire() is False
        assert cluster.events(what="start", id=second.id) == []
        gate.touch()
        assert first.get(timeout=PATIENCE) == first.id
        assert second.get(timeout=PATIENCE) == second.id
    ends = cluster.events(what="end", key=key)
    assert [(event["id"], event["error"]) for event in ends] == [
        (first.id, None),
        (second.id, None),
    ]
    # On a busy machine the first may end before it has found its lock at the next server.
    assert {event["state"] for event in ends} <= {"held", "doubtful"}
    fences = [event["fence"] for event in cluster.events(what="start", key=key)]
    assert fences == sorted(set(fences))
    leaving.start()
    leaving.wait_joined()
