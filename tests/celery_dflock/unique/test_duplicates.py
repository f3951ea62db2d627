"""What becomes of the second: it is refused, skipped, or replaces the first."""

from __future__ import annotations

import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from celery import Celery, Task, states
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult
from kombu.exceptions import OperationalError

from celery_dflock import DuplicateTaskError, LockedTask, Skipped
from celery_dflock.config import settings
from celery_dflock.unique.lock import mark_of
from examples.demo.stage import ROOT
from tests import forkserver
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster
from tests.celery_dflock.unique.support import Parked, locks_of, marks, own_app, own_task, wait_over

pytestmark = pytest.mark.usefixtures("workers")


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
    assert marks(cluster, first, second, third) == [first.id, second.id]
    parked.deliver()

    for each, newer in ((first, second), (second, third)):
        with pytest.raises(TaskRevokedError, match=f"replaced by {newer.id}"):
            each.get(timeout=PATIENCE)
    assert third.get(timeout=PATIENCE) == third.id
    assert not cluster.events(what="start", id=first.id)
    assert not cluster.events(what="start", id=second.id)
    wait_over(cluster, task, key)
    assert marks(cluster, first, second, third) == []


@pytest.mark.parametrize("task", [jobs.until_executed, jobs.until_executing])
def test_replaced_by_a_call_that_says_so_itself(
    cluster: Cluster, parked: Parked, key: str, task: Task
) -> None:
    first = cluster.send(task, key, queue=parked.name)
    headers = {"dflock": {"lock_duplicate": "replace"}}
    second = cluster.send(task, key, queue=parked.name, headers=headers)
    parked.deliver()

    with pytest.raises(TaskRevokedError, match=f"replaced by {second.id}"):
        first.get(timeout=PATIENCE)
    second.get(timeout=PATIENCE)
    wait_over(cluster, task, key)
    assert marks(cluster, first, second) == []


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
    assert marks(cluster, first, second) == []
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
    assert marks(cluster, first, second) == []


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
    first = task.delay(1)
    down = own_app(cluster.lock_server, broker_transport_options={"max_retries": 0})
    down.conf.broker_url = "redis://127.0.0.1:1//"

    with pytest.raises(OperationalError):
        own_task(down, key, lock_duplicate="replace").apply_async((1,), retry=False)

    assert marks(cluster, first) == []
    assert locks_of(cluster, key) == []


SENDER = """
import sys
from concurrent.futures import ThreadPoolExecutor
from tests.celery_dflock import jobs

_, key, queue = sys.argv[1:]
with ThreadPoolExecutor(5) as threads:
    sent = threads.map(
        lambda _: jobs.until_executed.apply_async((), {"key": key}, queue=queue), range(5)
    )
    print(*{each.id for each in sent})
"""


def test_of_many_senders_one_sends(
    cluster: Cluster, parked: Parked, key: str, tmp_path: Path
) -> None:
    ids: set[str] = set()
    script = tmp_path / "sender.py"
    script.write_text(SENDER)
    with ThreadPoolExecutor(10) as threads:
        command = [sys.executable, "-m", "tests.snippet", str(script), key, parked.name]
        senders = [
            forkserver.start(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)
        ]
        while any(sender.poll() is None for sender in senders):
            sent = threads.map(
                lambda _: cluster.send(jobs.until_executed, key, queue=parked.name), range(10)
            )
            ids |= {each.id for each in sent}
        for sender in senders:
            with sender.stdout:
                ids |= set(sender.stdout.read().split())
            assert sender.wait(PATIENCE) == 0
    assert len(ids) == 1
    assert len(parked) == 1


@pytest.mark.parametrize("is_base_bound", [False, True])
def test_sent_by_one_thread_while_another_binds_the_task(
    is_base_bound: bool, cluster: Cluster, key: str
) -> None:
    """Its options are its own, and not those of its base, which has others."""
    sent: list[AsyncResult] = []

    class Base(LockedTask):
        pass

    if is_base_bound:
        Base.bind(own_app(cluster.lock_server))

    class Eager(Base):
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
    assert marks(cluster, *sent) == []


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
    assert marks(cluster, *sent) == []
