"""`lock_unique`: what is on its way is not sent again, and becomes free again however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, Task, chain, chord, group, states
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult
from celery.signals import after_task_publish
from kombu.exceptions import OperationalError

from celery_dflock import DuplicateTaskError, LockedTask, LockKeyError, Skipped
from celery_dflock.config import settings
from celery_dflock.signals import task_deduplicated
from celery_dflock.unique import publish
from celery_dflock.unique.lock import mark_of
from dflockd import admin
from dflockd.sync_client import DistributedLock
from examples.demo.stage import ROOT, LockServer, Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster, Waiter, node_of, waiters

pytestmark = pytest.mark.usefixtures("workers")


# What the tests look at.


def hold(cluster: Cluster, task: Task, key: str) -> dict[str, Any] | None:
    """The lock that keeps others from being sent, as the server lists it."""
    for lock in admin.stats(cluster.lock_server.address)["locks"]:
        if lock["key"] == f"unique:{task.name}:{key}":
            return dict(lock)
    return None


def wait_over(cluster: Cluster, task: Task, key: str) -> None:
    """Wait until another can be sent."""
    cluster.wait(lambda: hold(cluster, task, key) is None or None, f"{task.name} {key} to be over")


def marks(cluster: Cluster) -> list[str]:
    """Which tasks are marked as replaced."""
    names = [each["key"] for each in admin.stats(cluster.lock_server.address)["semaphores"]]
    return [name.removeprefix("replaced:") for name in names if name.startswith("replaced:")]


class Parked:
    """A queue that no worker serves, until its messages are moved to one that they do."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._redis = jobs.app.backend.client

    def __len__(self) -> int:
        return int(self._redis.llen(self.name))

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The oldest first."""
        return [json.loads(text) for text in reversed(self._redis.lrange(self.name, 0, -1))]

    def deliver(self, copies: int = 1, home: str = "celery") -> None:
        """Let workers have the messages; what they send again comes to the queue `home`."""
        messages = self.messages
        self._redis.delete(self.name)
        for message in messages:
            message["properties"]["delivery_info"]["routing_key"] = home
            for _ in range(copies):
                self._redis.lpush("celery", json.dumps(message))

    def put_copy(self, message: dict[str, Any]) -> None:
        """Add a message again, as Redis does that has waited for it to be acknowledged."""
        message["properties"]["delivery_info"]["redelivered"] = True
        self._redis.lpush(self.name, json.dumps(message))

    def purge(self) -> None:
        self._redis.delete(self.name)


@pytest.fixture
def parked(cluster: Cluster, key: str) -> Iterator[Parked]:
    queue = Parked(f"parked:{key}")
    yield queue
    queue.purge()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """A file that lets tasks go on; there at the end of the test in any case."""
    path = tmp_path / "gate"
    yield path
    path.touch()


def own_app(lock_server: LockServer | str, **conf: Any) -> Celery:
    """An app that only sends, to nobody."""
    app = Celery("sender", broker="memory://", set_as_current=False)
    address = lock_server if isinstance(lock_server, str) else lock_server.address
    app.conf.update(dflock_servers=[address], **conf)
    return app


def own_task(app: Celery, name: str, **options: Any) -> Task:
    options = {"base": LockedTask, "lock_unique": "until_executed", **options}

    @app.task(name=name, shared=False, lazy=False, **options)
    def task(account: int, *, region: str = "eu") -> None: ...

    return task


# When the next one can be sent.


def test_until_executing(cluster: Cluster, key: str, gate: Path) -> None:
    task = jobs.until_executing
    first = cluster.send(task, key, gate=str(gate))
    cluster.wait_event("start", first)
    second = cluster.send(task, key)
    assert second.id != first.id
    assert cluster.send(task, key).id == second.id, "it waits for the first"

    gate.touch()

    assert first.get(timeout=PATIENCE) == first.id
    assert second.get(timeout=PATIENCE) == second.id
    assert hold(cluster, task, key) is None


def test_until_executed(cluster: Cluster, parked: Parked, key: str, gate: Path) -> None:
    task = jobs.until_executed
    first = cluster.send(task, key, gate=str(gate), queue=parked.name)
    assert cluster.send(task, key, queue=parked.name).id == first.id
    assert len(parked) == 1
    parked.deliver()
    cluster.wait_event("start", first)
    assert cluster.send(task, key).id == first.id
    assert cluster.send(task, f"{key}:other").id != first.id

    gate.touch()

    assert first.get(timeout=PATIENCE) == first.id
    assert hold(cluster, task, key) is None
    second = cluster.send(task, key)
    assert second.get(timeout=PATIENCE) == second.id != first.id


def test_until_expired(cluster: Cluster, key: str) -> None:
    task, short = jobs.until_expired, {"dflock": {"lock_unique_ttl": 1}}
    first = cluster.send(task, key)
    assert first.get(timeout=PATIENCE) == first.id
    assert cluster.send(task, key).id == first.id
    second = cluster.send(task, f"{key}:short", headers=short)
    assert second.get(timeout=PATIENCE) == second.id
    wait_over(cluster, task, f"{key}:short")
    assert cluster.send(task, f"{key}:short").id != second.id


def test_a_task_that_has_not_begun_counts_for_so_long(
    cluster: Cluster, parked: Parked, key: str
) -> None:
    unbegun = cluster.send(jobs.until_executed, f"{key}:long", queue=parked.name)
    assert cluster.send(jobs.until_executed, f"{key}:long", queue=parked.name).id == unbegun.id
    options = {"headers": {"dflock": {"lock_unique_ttl": 1}}, "queue": parked.name}
    first = cluster.send(jobs.until_executed, key, **options)

    wait_over(cluster, jobs.until_executed, key)

    second = cluster.send(jobs.until_executed, key, **options)
    assert second.id != first.id
    assert len(parked) == 3
    parked.deliver()
    sent = (unbegun, first, second)
    assert [each.get(timeout=PATIENCE) for each in sent] == [each.id for each in sent]


# However it ends.


@pytest.mark.parametrize("then", ["raise", "ignore", "reject"])
def test_over_with_its_end(cluster: Cluster, key: str, gate: Path, then: str) -> None:
    sent = cluster.send(jobs.until_executed, key, then=then, gate=str(gate))
    cluster.wait_event("start", sent)
    assert hold(cluster, jobs.until_executed, key)

    gate.touch()

    cluster.wait_event("end", sent)
    wait_over(cluster, jobs.until_executed, key)


@pytest.mark.parametrize(
    ("task", "then"), [(jobs.until_executed, "retry later"), (jobs.unique_retried, "raise once")]
)
def test_goes_on_through_retries(
    cluster: Cluster, parked: Parked, key: str, task: Task, then: str
) -> None:
    sent = cluster.send(task, key, then=then, queue=parked.name)
    parked.deliver(home=parked.name)
    cluster.wait_event("end", sent)

    def probe() -> dict[str, Any] | None:
        found = hold(cluster, task, key)
        assert found is not None
        return found if found["owner_conn_id"] == 0 else None

    found = cluster.wait(probe, "the lock to be held by nobody")
    assert found["lease_expires_in_s"] > 3000, "for lock_unique_ttl again"
    assert cluster.send(task, key).id == sent.id
    cluster.wait(lambda: len(parked) or None, "the retry")
    parked.deliver()
    assert sent.get(timeout=PATIENCE) == 1
    wait_over(cluster, task, key)


def test_a_retry_that_comes_before_its_run_has_ended(cluster: Cluster, key: str) -> None:
    sent = cluster.send(jobs.unique_patient, key, then="retry slowly")
    assert sent.get(timeout=PATIENCE) == "retried"
    wait_over(cluster, jobs.unique_patient, key)


@pytest.mark.parametrize("task", [jobs.until_executed, jobs.until_executing])
def test_goes_on_while_it_is_requeued(cluster: Cluster, key: str, task: Task) -> None:
    with cluster.lock(key):
        sent = cluster.send(task, key)
        cluster.wait_event("requeued", sent, 2)
        assert cluster.send(task, key).id == sent.id

    assert sent.get(timeout=PATIENCE) == sent.id
    wait_over(cluster, task, key)


def test_goes_on_when_it_is_rejected_to_the_queue(
    cluster: Cluster, key: str, gate: Path, waiter: Callable[..., Waiter]
) -> None:
    task = jobs.unique_late
    sent = cluster.send(task, key, then="reject to the queue", gate=str(gate))
    cluster.wait_event("start", sent)
    waiting = waiter(key)
    cluster.wait_waiters(key, 1)

    gate.touch()

    waiting.wait_granted()
    cluster.wait_event("requeued", sent)
    assert cluster.send(task, key).id == sent.id
    waiting.lock.release()
    assert sent.get(timeout=PATIENCE) is True
    wait_over(cluster, task, key)


@pytest.mark.parametrize("task", [jobs.unique_skipped, jobs.unique_failed])
def test_over_when_it_cannot_run(cluster: Cluster, key: str, task: Task) -> None:
    with cluster.lock(key):
        sent = cluster.send(task, key)
        sent.get(timeout=PATIENCE, propagate=False)
        wait_over(cluster, task, key)


def test_revoked_before_it_ran(
    cluster: Cluster, workers: tuple[Worker, Worker], parked: Parked, key: str
) -> None:
    sent = cluster.send(jobs.until_executed, key, queue=parked.name)
    nodes = [node_of(worker) for worker in workers]
    jobs.app.control.revoke(sent.id, destination=nodes, reply=True, timeout=PATIENCE, limit=2)
    assert hold(cluster, jobs.until_executed, key)
    parked.deliver()

    with pytest.raises(TaskRevokedError):
        sent.get(timeout=PATIENCE)
    wait_over(cluster, jobs.until_executed, key)


def test_expired_before_it_ran(
    cluster: Cluster, parked: Parked, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "CLOCK_MARGIN", 600)
    sent = cluster.send(jobs.until_executed, key, expires=0.2, queue=parked.name)
    found = hold(cluster, jobs.until_executed, key)
    assert found is not None
    assert found["lease_expires_in_s"] == pytest.approx(601, abs=10)
    time.sleep(0.3)  # what is to come is a time, and no event
    parked.deliver()

    with pytest.raises(TaskRevokedError):
        sent.get(timeout=PATIENCE)
    wait_over(cluster, jobs.until_executed, key)


def end_child(cluster: Cluster, sent: AsyncResult, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def terminate(cluster: Cluster, sent: AsyncResult, pid: int) -> None:
    sent.revoke(terminate=True, signal="SIGKILL")


HOWEVER = pytest.mark.parametrize("end", [end_child, terminate])


@HOWEVER
def test_killed_while_it_runs(
    cluster: Cluster, key: str, gate: Path, end: Callable[[Cluster, AsyncResult, int], None]
) -> None:
    sent = cluster.send(jobs.until_executed, key, gate=str(gate))
    end(cluster, sent, cluster.wait_event("start", sent)["pid"])
    wait_over(cluster, jobs.until_executed, key)


@HOWEVER
@pytest.mark.parametrize("task", [jobs.unique_patient, jobs.unique_waiting])
def test_killed_while_it_waits(
    cluster: Cluster, key: str, task: Task, end: Callable[[Cluster, AsyncResult, int], None]
) -> None:
    with cluster.lock(key):
        sent = cluster.send(task, key)
        cluster.wait_waiters(key, 1)
        end(cluster, sent, cluster.wait_event("asked", sent)["pid"])
        wait_over(cluster, task, key)


def test_sender_killed_before_it_has_sent(cluster: Cluster, parked: Parked, key: str) -> None:
    script = f"""
import os, signal
from celery.signals import before_task_publish
from tests.celery_dflock import jobs

@before_task_publish.connect
def die(**_):
    os.kill(os.getpid(), signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGKILL)

jobs.until_executed.apply_async((), {{"key": {key!r}}}, queue={parked.name!r})
"""
    sender = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    try:
        os.waitid(os.P_PID, sender.pid, os.WSTOPPED | os.WNOWAIT)
        assert hold(cluster, jobs.until_executed, key), "what the kill is to end"
        sender.send_signal(signal.SIGCONT)
        assert sender.wait(PATIENCE) == -signal.SIGKILL
    finally:
        sender.kill()
        sender.wait()
    wait_over(cluster, jobs.until_executed, key)
    assert len(parked) == 0


def test_lost_by_its_sender_before_it_has_sent(
    cluster: Cluster, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped for long, perhaps: what it sends runs, and counts no more."""
    take = publish._take

    def take_and_lose(lock: DistributedLock, *args: Any) -> Any:
        first = take(lock, *args)
        admin.evict(cluster.lock_server.address, lock.key, lock.fence)
        assert not lock.renew()
        return first

    with monkeypatch.context() as patch:
        patch.setattr(publish, "_take", take_and_lose)
        sent = cluster.send(jobs.until_executed, key)
    assert sent.get(timeout=PATIENCE) == sent.id
    assert len(cluster.events(what="start", key=key)) == 1


def test_begun_before_its_sender_has_let_go_of_it(cluster: Cluster, key: str, gate: Path) -> None:
    def dawdle(sender: str, **_: Any) -> None:
        cluster.wait(lambda: cluster.events(what="start", key=key) or None, "its start")

    after_task_publish.connect(dawdle, sender="until_executed")
    try:
        cluster.send(jobs.until_executed, key, gate=str(gate))
    finally:
        after_task_publish.disconnect(dawdle, sender="until_executed")
    found = hold(cluster, jobs.until_executed, key)
    assert found is not None
    assert found["owner_conn_id"], "with the worker, and not with nobody"
    assert found["lease_expires_in_s"] <= jobs.until_executed.lock_ttl


def test_broker_down(cluster: Cluster, key: str) -> None:
    app = own_app(cluster.lock_server, broker_transport_options={"max_retries": 0})
    task = own_task(app, key)
    app.conf.broker_url = "redis://127.0.0.1:1//"

    with pytest.raises(OperationalError):
        task.apply_async((1,), retry=False)

    assert locks_of(cluster, key) == []


def locks_of(cluster: Cluster, task_name: str) -> list[str]:
    """The keys of what a task with this name has on its way."""
    start = f"unique:{task_name.replace(':', '%3A')}:"
    listed = admin.stats(cluster.lock_server.address)["locks"]
    return [each["key"] for each in listed if each["key"].startswith(start)]


# Copies of a message.


def test_a_copy_leaves_the_lock_to_the_run(
    cluster: Cluster, parked: Parked, key: str, gate: Path
) -> None:
    task = jobs.until_executed
    sent = cluster.send(task, key, gate=str(gate), queue=parked.name)
    parked.deliver(copies=2)
    cluster.wait_event("start", sent)
    cluster.wait_event("requeued", sent, 5)
    assert cluster.send(task, key).id == sent.id
    assert len(cluster.events(what="start", id=sent.id)) == 1

    gate.touch()

    assert sent.get(timeout=PATIENCE) == sent.id
    wait_over(cluster, task, key)
    cluster.wait_event("deduplicated", sent)


def test_what_is_known_to_be_a_copy_does_not_touch_the_lock(
    cluster: Cluster, parked: Parked, key: str, gate: Path
) -> None:
    sent = cluster.send(jobs.until_executed, key, gate=str(gate), queue=parked.name)
    [message] = parked.messages
    parked.deliver()
    cluster.wait_event("start", sent)
    parked.put_copy(message)
    parked.deliver()
    cluster.wait_event("requeued", sent, 2)
    found = hold(cluster, jobs.until_executed, key)
    assert found is not None
    assert found["owner_conn_id"], "the run"
    assert found["lease_expires_in_s"] <= jobs.until_executed.lock_ttl


# What becomes of the second.


def test_raise(cluster: Cluster, parked: Parked, key: str) -> None:
    first = cluster.send(jobs.raising, key, queue=parked.name)

    with pytest.raises(DuplicateTaskError) as raised:
        cluster.send(jobs.raising, key, queue=parked.name)

    text = str(raised.value)
    assert text.startswith(f"lock 'unique:raising:{key}' is taken: a task like this one is on its")
    assert f"raising[{first.id}] sent by " in text
    assert "\n" not in text
    assert str(pickle.loads(pickle.dumps(raised.value))) == text
    assert len(parked) == 1


def test_skip(cluster: Cluster, parked: Parked, key: str) -> None:
    first = cluster.send(jobs.skipping, key, queue=parked.name)

    second = cluster.send(jobs.skipping, key, queue=parked.name)

    assert second.ready()
    assert second.state == states.SUCCESS
    skipped = Skipped.of(second.get())
    assert skipped is not None
    assert (skipped.key, skipped.task_id) == (f"unique:skipping:{key}", second.id)
    assert first.id in str(skipped.holder)
    assert AsyncResult(second.id, app=jobs.app).get(timeout=PATIENCE) == skipped
    assert len(parked) == 1


@pytest.mark.parametrize("backend", ["disabled://", "rpc://", "cache+memory://"])
def test_skip_where_no_result_is_kept(cluster: Cluster, key: str, backend: str) -> None:
    app = own_app(cluster.lock_server, result_backend=backend)
    task = own_task(app, key, lock_duplicate="skip", ignore_result=backend.startswith("cache"))
    task.delay(1)

    second = task.delay(1)

    assert second.ready()
    assert Skipped.of(second.get())
    if task.ignore_result:
        assert AsyncResult(second.id, app=app).state == states.PENDING


@pytest.mark.parametrize("task", [jobs.replacing, jobs.replacing_queued])
def test_replace(cluster: Cluster, parked: Parked, key: str, task: Task) -> None:
    first = cluster.send(task, key, queue=parked.name)
    second = cluster.send(task, key, queue=parked.name)
    third = cluster.send(task, key, queue=parked.name)
    assert marks(cluster) == [first.id, second.id]
    parked.deliver()

    for each, newer in ((first, second), (second, third)):
        with pytest.raises(TaskRevokedError, match=f"replaced by {newer.id}"):
            each.get(timeout=PATIENCE)
    assert third.get(timeout=PATIENCE) == third.id
    assert not cluster.events(what="start", id=first.id)
    assert not cluster.events(what="start", id=second.id)
    wait_over(cluster, task, key)
    assert marks(cluster) == []


def test_several_set_out_to_replace_one(cluster: Cluster, parked: Parked, key: str) -> None:
    first = cluster.send(jobs.replacing, key, queue=parked.name)
    second = cluster.send(jobs.replacing, key, queue=parked.name)
    marking = [mark_of(first.id, settings(jobs.app), f"late[{n}] pid 1") for n in range(3)]
    assert all(mark.acquire() for mark in marking)  # they find out only now that it was too late
    parked.deliver()

    with pytest.raises(TaskRevokedError, match=f"replaced by {second.id}"):
        first.get(timeout=PATIENCE)
    assert second.get(timeout=PATIENCE) == second.id
    wait_over(cluster, jobs.replacing, key)
    assert marks(cluster) == []
    assert not any(mark.release() for mark in marking)


def test_replaced_by_one_that_has_ended(cluster: Cluster, parked: Parked, key: str) -> None:
    first = cluster.send(jobs.replacing, key, queue=parked.name)
    second = cluster.send(jobs.replacing, key)
    assert second.get(timeout=PATIENCE) == second.id
    wait_over(cluster, jobs.replacing, key)

    parked.deliver()

    with pytest.raises(TaskRevokedError, match=f"replaced by {second.id}"):
        first.get(timeout=PATIENCE)


@pytest.mark.parametrize("task", [jobs.replacing, jobs.replacing_queued])
def test_replaced_while_it_waits_for_the_other_lock(cluster: Cluster, key: str, task: Task) -> None:
    with cluster.lock(key):
        first = cluster.send(task, key)
        cluster.wait_waiters(key, 1)
        second = cluster.send(task, key)

    with pytest.raises(TaskRevokedError):
        first.get(timeout=PATIENCE)
    assert second.get(timeout=PATIENCE) == second.id


@pytest.mark.parametrize("task", [jobs.replacing, jobs.replacing_queued])
def test_replaced_while_it_runs(cluster: Cluster, key: str, gate: Path, task: Task) -> None:
    first = cluster.send(task, key, gate=str(gate))
    cluster.wait_event("start", first)
    second = cluster.send(task, key)

    gate.touch()

    assert first.get(timeout=PATIENCE) == first.id
    assert second.get(timeout=PATIENCE) == second.id
    wait_over(cluster, task, key)
    assert marks(cluster) == []


def test_a_retry_is_not_replaced_by_what_was_sent_since_it_began(
    cluster: Cluster, key: str
) -> None:
    task = jobs.replacing_queued
    first = cluster.send(task, key, then="retry later")
    cluster.wait_event("start", first)
    second = cluster.send(task, key)

    assert first.get(timeout=PATIENCE) == 1
    assert second.get(timeout=PATIENCE) == second.id


def test_what_could_not_be_sent_replaces_nothing(cluster: Cluster, key: str) -> None:
    app = own_app(cluster.lock_server, broker_transport_options={"max_retries": 0})
    task = own_task(app, key, lock_duplicate="replace")
    task.delay(1)
    down = own_app(cluster.lock_server, broker_transport_options={"max_retries": 0})
    down.conf.broker_url = "redis://127.0.0.1:1//"

    with pytest.raises(OperationalError):
        own_task(down, key, lock_duplicate="replace").apply_async((1,), retry=False)

    assert marks(cluster) == []
    assert locks_of(cluster, key) == []


# Many at once.


SENDER = """
import sys
from concurrent.futures import ThreadPoolExecutor
from tests.celery_dflock import jobs

key, queue = sys.argv[1:]
with ThreadPoolExecutor(5) as threads:
    sent = threads.map(
        lambda _: jobs.until_executed.apply_async((), {"key": key}, queue=queue), range(5)
    )
    print(*{each.id for each in sent})
"""


def test_of_many_senders_one_sends(cluster: Cluster, parked: Parked, key: str) -> None:
    ids: set[str] = set()
    with ThreadPoolExecutor(10) as threads, contextlib.ExitStack() as running:
        command = [sys.executable, "-c", SENDER, key, parked.name]
        senders = [
            running.enter_context(
                subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            )
            for _ in range(2)
        ]
        while any(sender.poll() is None for sender in senders):
            sent = threads.map(
                lambda _: cluster.send(jobs.until_executed, key, queue=parked.name), range(10)
            )
            ids |= {each.id for each in sent}
        for sender in senders:
            assert sender.stdout is not None
            ids |= set(sender.stdout.read().split())
            assert sender.returncode == 0
    assert len(ids) == 1
    assert len(parked) == 1


def test_sent_by_one_thread_while_another_binds_the_task(cluster: Cluster, key: str) -> None:
    sent: list[AsyncResult] = []

    class Eager(LockedTask):
        @classmethod
        def on_bound(cls, app: Celery) -> None:
            sent.append(app._tasks[cls.name].delay(1))
            super().on_bound(app)

    task = own_task(own_app(cluster.lock_server), key, base=Eager)
    assert task.delay(1).id == sent[0].id


def test_of_many_that_replace_each_other_one_runs(
    cluster: Cluster, parked: Parked, key: str
) -> None:
    with ThreadPoolExecutor(10) as threads:
        queue = {"queue": parked.name}
        sent = list(threads.map(lambda _: cluster.send(jobs.replacing, key, **queue), range(10)))
    assert len(parked) == 10
    parked.deliver()

    ends = [each.get(timeout=PATIENCE, propagate=False) for each in sent]

    assert len([end for end in ends if isinstance(end, TaskRevokedError)]) == 9
    assert len(cluster.events(what="start", key=key)) == 1
    wait_over(cluster, jobs.replacing, key)
    assert marks(cluster) == []


def test_many_replace_each_other_while_they_run(cluster: Cluster, key: str) -> None:
    with ThreadPoolExecutor(10) as threads:
        sent = list(threads.map(lambda _: cluster.send(jobs.replacing, key), range(20)))

    ends = [each.get(timeout=PATIENCE, propagate=False) for each in sent]

    runs = {each["id"] for each in cluster.events(what="start", key=key)}
    revoked = {each.id for each, end in zip(sent, ends, strict=True) if each.state == "REVOKED"}
    assert runs | revoked == {each.id for each in sent}
    assert not runs & revoked
    assert runs
    wait_over(cluster, jobs.replacing, key)
    assert marks(cluster) == []


# What is always sent.


def test_members_of_a_group(cluster: Cluster, key: str) -> None:
    sent = group([jobs.skipping.s(key=key)] * 3).apply_async()
    assert sent.get(timeout=PATIENCE) == [each.id for each in sent.results]
    assert len({each.id for each in sent.results}) == 3


def test_members_of_a_chord(cluster: Cluster, key: str) -> None:
    sent = chord([jobs.raising.s(key=key)] * 3)(jobs.collect.s(key=key))
    assert len(set(sent.get(timeout=PATIENCE))) == 3


def test_members_of_a_chain(cluster: Cluster, key: str) -> None:
    sent = chain([jobs.until_executed.si(key=key)] * 3).apply_async()
    assert sent.get(timeout=PATIENCE) == sent.id
    assert len(cluster.events(what="end", key=key)) == 3


@pytest.mark.parametrize("counts_on_it", ["link", "link_error", "task_id", "group_id", "chain"])
def test_what_somebody_counts_on(
    cluster: Cluster, parked: Parked, key: str, counts_on_it: str
) -> None:
    options = {"task_id": key, "group_id": key, "chain": [jobs.collect.s(key=key)]}
    option = options.get(counts_on_it, jobs.collect.s(key=key))
    cluster.send(jobs.until_executed, key, queue=parked.name)
    sent = cluster.send(jobs.until_executed, key, queue=parked.name, **{counts_on_it: option})
    assert len(parked) == 2
    assert "dflock" not in parked.messages[1]["headers"]
    parked.deliver()
    assert sent.get(timeout=PATIENCE) == sent.id


@pytest.mark.parametrize("setting", [{"task_always_eager": True}, {"dflock_enabled": False}])
def test_where_nothing_is_locked(cluster: Cluster, key: str, setting: dict[str, bool]) -> None:
    task = own_task(own_app(cluster.lock_server, **setting), key)
    assert task.delay(1).id != task.delay(1).id
    assert locks_of(cluster, key) == []


# Without a lock server that could say.


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_server_down(key: str, caplog: pytest.LogCaptureFixture) -> None:
    task = own_task(own_app(f"127.0.0.1:{closed_port()}"), key)
    first, second = task.delay(1), task.delay(1)
    assert first.id != second.id
    assert f"task {key}[{first.id}] is sent without lock_unique: " in caplog.text
    with task.app.connection() as broker:
        assert broker.default_channel.queue_declare("celery", passive=True).message_count >= 2


def test_server_has_forgotten_it(
    cluster: Cluster, tmp_path: Path, parked: Parked, key: str
) -> None:
    sent = cluster.send(jobs.replacing, key, queue=parked.name)
    assert admin.evict(
        cluster.lock_server.address,
        f"unique:replacing:{key}",
        admin.inspect(cluster.lock_server.address, f"unique:replacing:{key}")["holders"][0][
            "fence"
        ],
    )
    parked.deliver()
    assert sent.get(timeout=PATIENCE) == sent.id


def test_server_that_cannot_detach(key: str, caplog: pytest.LogCaptureFixture) -> None:
    with OldServer() as server:
        task = own_task(own_app(server.address), key)
        sent = task.delay(1)
        assert f"task {key}[{sent.id}] was sent, and goes on without lock_unique: " in caplog.text
        assert "detach" in server.asked
        assert task.delay(1).id != sent.id


class OldServer:
    """Grants every lock in the published dialect, and knows no more than that."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> OldServer:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rwb") as file, contextlib.suppress(OSError):
            while command := file.readline().decode().strip():
                file.readline()
                file.readline()
                self.asked.append(command)
                reply = {"l": "ok " + "0" * 32 + " 3600", "r": "ok"}.get(command, "error")
                file.write(reply.encode() + b"\n")
                file.flush()


# The call.


def test_a_call_has_its_own_options(cluster: Cluster, parked: Parked, key: str) -> None:
    options = {"headers": {"dflock": {"lock_unique": "until_executed"}, "x-user": "kept"}}
    first = cluster.send(jobs.patient, key, queue=parked.name, **options)
    assert cluster.send(jobs.patient, key, queue=parked.name, **options).id == first.id
    assert cluster.send(jobs.patient, key, queue=parked.name).id != first.id
    assert options["headers"] == {"dflock": {"lock_unique": "until_executed"}, "x-user": "kept"}
    parked.deliver()
    assert cluster.wait_event("start", first)["headers"] == {"x-user": "kept"}
    wait_over(cluster, jobs.patient, key)


def test_however_it_is_called(cluster: Cluster, parked: Parked, key: str) -> None:
    task, queue = jobs.until_executed, {"queue": parked.name}
    first = task.s(key=key).apply_async(**queue)
    assert task.s(key=key).set(**queue).delay().id == first.id
    assert task.apply_async(kwargs={"key": key}, **queue).id == first.id
    assert task.apply_async((key,), **queue).id == first.id
    assert task.delay(key).id == first.id
    assert jobs.app.send_task(task.name, (key,), **queue).id != first.id, "it knows no options"
    assert len(parked) == 2


def test_wrong_arguments_are_refused_by_celery(cluster: Cluster, key: str) -> None:
    app = own_app(cluster.lock_server)
    plain, task = own_task(app, "plain", lock_unique=None), own_task(app, key)
    for args, kwargs in (((), {}), ((1, 2), {}), ((1,), {"nation": "de"})):
        with pytest.raises(TypeError) as expected:
            plain.apply_async(args, kwargs)
        with pytest.raises(TypeError) as raised:
            task.apply_async(args, kwargs)
        assert str(raised.value) == str(expected.value)
    own_task(app, f"{key}:untyped", typing=False).delay()
    assert locks_of(cluster, f"{key}:untyped") == locks_of(cluster, key) == []


def test_arguments_without_a_key_are_refused_at_once(cluster: Cluster, key: str) -> None:
    task = own_task(own_app(cluster.lock_server), key, lock_key="{account.number}")
    with pytest.raises(LockKeyError):
        task.delay(1)


@pytest.mark.parametrize(
    "name", ["n" * 300, "ñ" * 200, "two words", "a[b] c", "a:b%", "\n", "x\N{NO-BREAK SPACE}é"]
)
def test_names_of_all_kinds(cluster: Cluster, name: str) -> None:
    task = own_task(own_app(cluster.lock_server), name, lock_key=f"odd:{len(name)}")
    first = task.delay(1)
    assert len(first.id) == 36
    assert task.delay(1).id == first.id


def test_keys_of_different_tasks_and_lists_differ(cluster: Cluster, key: str) -> None:
    sent = {
        own_task(own_app(cluster.lock_server), name, lock_key=lock_key).delay(1).id
        for name, lock_key in [
            (f"{key}:a", "b"),
            (key, "a:b"),
            (key, ["a", "b"]),
            (key, "a&b"),
        ]
    }
    assert len(sent) == 4


def test_held_by_somebody_who_is_no_task(
    cluster: Cluster, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    task = own_task(own_app(cluster.lock_server), "foreign", lock_key=key)
    with cluster.lock(f"unique:foreign:{key}"):
        sent = task.delay(1)
    assert sent.id
    assert f"task foreign[{sent.id}] is sent without lock_unique" in caplog.text


def test_a_header_that_is_handed_on_moves_no_lock(
    cluster: Cluster, parked: Parked, key: str
) -> None:
    task = jobs.until_executed
    cluster.send(task, key, queue=parked.name)
    header = parked.messages[0]["headers"]["dflock"]

    other = cluster.send(jobs.patient, f"{key}:other", headers={"dflock": header})

    assert other.get(timeout=PATIENCE) == other.id
    assert hold(cluster, task, key)


# What is seen of it.


def test_it_is_told(
    cluster: Cluster, parked: Parked, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[tuple[Any, ...]] = []

    def tell(sender: Task, request: Any, key: str, task_id: str, verdict: str, **_: Any) -> None:
        told.append((sender.name, request, key, task_id, verdict))

    tasks = (jobs.until_executed, jobs.skipping, jobs.replacing)
    with caplog.at_level("INFO", "celery_dflock"):
        task_deduplicated.connect(tell)
        try:
            firsts = [cluster.send(task, key, queue=parked.name) for task in tasks]
            for task in tasks:
                cluster.send(task, key, queue=parked.name)
        finally:
            task_deduplicated.disconnect(tell)
    assert told == [
        (task.name, None, f"unique:{task.name}:{key}", first.id, task.lock_duplicate)
        for task, first in zip(tasks, firsts, strict=True)
    ]
    lines = [each.getMessage() for each in caplog.records]
    assert any(
        line.startswith("task until_executed is not sent (lock_unique, lock_duplicate=coalesce)")
        and firsts[0].id in line
        for line in lines
    )
    assert f"task replacing[{firsts[2].id}] is replaced by a newer one" in lines


def test_nobody_is_told_the_token(
    cluster: Cluster, workers: tuple[Worker, Worker], parked: Parked, key: str
) -> None:
    sent = cluster.send(jobs.until_executed, key, then="retry later", queue=parked.name)
    token = parked.messages[0]["headers"]["dflock"]["unique"]["token"]
    parked.deliver()
    assert sent.get(timeout=PATIENCE) == 1
    cluster.wait_event("end", sent, 2)
    assert not any(token in worker.log.read_text() for worker in workers)
    assert token not in json.dumps(jobs.app.backend.get_task_meta(sent.id), default=str)
    assert waiters(cluster.lock_server, key) is None
