"""`lock_unique` however a task is called, and what is always sent."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from celery import Task, chain, chord, group
from celery.result import EagerResult

from celery_dflock import LockKeyError
from celery_dflock.outcome.header import RUN
from celery_dflock.signals import task_deduplicated
from dflockd import admin
from examples.demo.stage import Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster, waiters
from tests.celery_dflock.unique.support import Parked, hold, locks_of, own_app, own_task, wait_over

pytestmark = pytest.mark.usefixtures("workers")


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
    assert RUN not in parked.messages[1]["headers"]
    parked.deliver()
    assert sent.get(timeout=PATIENCE) == sent.id


def test_a_callback_of_a_task_that_has_done_its_work(
    cluster: Cluster, key: str, gate: Path
) -> None:
    """An error where it is sent would be the result of that task."""
    first = cluster.send(jobs.raising, key, gate=str(gate))
    cluster.wait_event("start", first)
    callback = jobs.raising.si(key=key)
    sent = jobs.plain.apply_async((f"{key}:parent",), link=callback)
    assert sent.get(timeout=PATIENCE) == sent.id
    gate.touch()
    assert first.get(timeout=PATIENCE) == first.id
    assert sent.children
    assert sent.children[0].get(timeout=PATIENCE) == sent.children[0].id


def test_a_callback_without_a_key_fails_where_it_arrives(cluster: Cluster, key: str) -> None:
    sent = jobs.plain.apply_async((key,), link=jobs.latest.si(key=""))
    assert sent.get(timeout=PATIENCE) == sent.id


@pytest.mark.parametrize("setting", [{"task_always_eager": True}, {"dflock_enabled": False}])
def test_where_nothing_is_locked(cluster: Cluster, key: str, setting: dict[str, bool]) -> None:
    task = own_task(own_app(cluster.lock_server, **setting), key)
    assert task.delay(1).id != task.delay(1).id
    assert locks_of(cluster, key) == []


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
        assert server.asked[:2] == ["hello", "l"]
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
                reply = {"l": "ok " + "0" * 32 + " 2", "r": "ok"}.get(command, "error")
                file.write(reply.encode() + b"\n")
                file.flush()


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
        for name, lock_key in [(f"{key}:a", "b"), (key, "a:b"), (key, ["a", "b"]), (key, "a&b")]
    }
    assert len(sent) == 4


@pytest.mark.parametrize("duplicate", ["coalesce", "raise", "skip", "replace"])
def test_held_by_somebody_who_is_no_task(
    cluster: Cluster, key: str, caplog: pytest.LogCaptureFixture, duplicate: str
) -> None:
    app = own_app(cluster.lock_server)
    task = own_task(app, "foreign", lock_key=key, lock_duplicate=duplicate)
    with cluster.lock(f"unique:foreign:{key}") as lock:
        sent = task.delay(1)
        assert lock.renew()
    assert not isinstance(sent, EagerResult)
    assert f"task foreign[{sent.id}] is sent without lock_unique" in caplog.text


def test_a_header_that_is_handed_on_moves_no_lock(
    cluster: Cluster, parked: Parked, key: str
) -> None:
    task = jobs.until_executed
    cluster.send(task, key, queue=parked.name)
    header = parked.messages[0]["headers"][RUN]

    other = cluster.send(jobs.patient, f"{key}:other", headers={RUN: header})

    assert other.get(timeout=PATIENCE) == other.id
    assert hold(cluster, task, key)


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
    token = parked.messages[0]["headers"][RUN]["unique"]["token"]
    parked.deliver()
    assert sent.get(timeout=PATIENCE) == 1
    cluster.wait_event("end", sent, 2)
    assert not any(token in worker.log.read_text() for worker in workers)
    assert token not in json.dumps(jobs.app.backend.get_task_meta(sent.id), default=str)
    assert waiters(cluster.lock_server, key) is None
