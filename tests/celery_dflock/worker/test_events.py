"""Worker events of locks: when they are sent, what is in them, and what monitors make of them."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from celery.events.state import State
from celery.result import AsyncResult
from celery.utils.nodenames import gethostname

from celery_dflock import LockedTask
from celery_dflock.signals import task_skipped
from celery_dflock.worker import events
from dflockd import admin
from examples.demo.stage import Process, Redis, Worker
from tests.celery_dflock import jobs
from tests.celery_dflock.processes import PATIENCE, Cluster

Event = dict[str, Any]


class WatchedWorker(Worker):
    """One with heartbeats: without, Celery's dispatcher of events cannot be enabled later on."""

    def _command(self) -> Sequence[str]:
        return [word for word in super()._command() if word != "--without-heartbeat"]


class Dump(Process):
    """`celery events --dump`."""

    def _command(self) -> Sequence[str]:
        return [
            sys.executable,
            "-m",
            "celery",
            "-A",
            "tests.celery_dflock.jobs",
            "events",
            "--dump",
        ]

    def _after_start(self) -> None:
        self.wait_log("starting capture")


class Monitor:
    """What a monitor receives, and what Celery's makes of it."""

    def __init__(self, cluster: Cluster) -> None:
        self.events: list[Event] = []
        self.states: dict[str, list[str]] = {}
        self._cluster = cluster
        self._state = State()
        self._receiver = jobs.app.events.Receiver(
            jobs.app.connection_for_read(), handlers={"*": self._note}
        )
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._receiver.should_stop = True
        self._thread.join(PATIENCE)
        self._receiver.connection.release()

    def sees(self, worker: Worker) -> bool | None:
        return any(event["hostname"].startswith(worker.name) for event in self.events) or None

    def wait(self, kind: str, sent: AsyncResult) -> Event:
        def probe() -> Event | None:
            found = [e for e in self.events if e["type"] == kind and e.get("uuid") == sent.id]
            return found[0] if found else None

        return self._cluster.wait(probe, f"event {kind} of task {sent.id}")

    def kinds(self, sent: AsyncResult) -> list[str]:
        """The types of the plugin's events of a task."""
        events = [event for event in self.events if event.get("uuid") == sent.id]
        return [event["type"] for event in events if event["type"].startswith("lock-")]

    def _receive(self) -> None:
        self._receiver.capture(wakeup=False)

    def _note(self, event: Event) -> None:
        self._state.event(event)
        self.events.append(event)
        task = self._state.tasks.get(event.get("uuid"))
        if task is not None:
            self.states.setdefault(task.uuid, []).append(task.state)


@pytest.fixture(scope="module")
def monitor(cluster: Cluster) -> Iterator[Monitor]:
    monitor = Monitor(cluster)
    yield monitor
    monitor.end()


@pytest.fixture(scope="module", autouse=True)
def dump(cluster: Cluster, monitor: Monitor) -> Iterator[Dump]:
    """What a worker with `-E` and one without send."""

    def worker(name: str, *more: str) -> Worker:
        args = ("-Q", name, *more)
        return WatchedWorker(cluster.directory, *args, app="tests.celery_dflock.jobs", name=name)

    with (
        Dump(cluster.directory, "dump") as dump,
        worker("telling", "-E") as telling,
        worker("silent") as silent,
    ):
        # A receiver that has begun may not have subscribed yet.
        for node in (telling, silent):
            cluster.wait(lambda node=node: monitor.sees(node), f"events of {node.name}")
            dump.wait_log(f"{node.name}@")
        yield dump


def send(cluster: Cluster, task: Any, key: str, **options: Any) -> AsyncResult:
    return cluster.send(task, key, **{"queue": "telling", **options})


def test_a_task_that_waits(cluster: Cluster, monitor: Monitor, dump: Dump, key: str) -> None:
    with cluster.lock(key):
        sent = send(cluster, jobs.patient, key)
        waiting = monitor.wait("lock-waiting", sent)
    assert sent.get(timeout=PATIENCE) == sent.id
    monitor.wait("lock-released", sent)
    monitor.wait("task-succeeded", sent)

    assert monitor.kinds(sent) == ["lock-waiting", "lock-acquired", "lock-released"]
    assert waiting["key"] == key
    assert waiting["holder"].startswith("somebody, for ")
    start = cluster.wait_event("start", sent)
    for kind in ("lock-acquired", "lock-released"):
        event = monitor.wait(kind, sent)
        assert (event["key"], event["fence"]) == (key, start["fence"])
        assert event["name"] == "patient"
        assert event["hostname"].startswith("telling@")
        assert event["pid"] == start["pid"], "the child has sent it"
    assert monitor.wait("lock-acquired", sent)["waited"] == pytest.approx(start["waited"], abs=1e-3)
    assert not re.search("[0-9a-f]{32}", json.dumps(monitor.events)), "no token"
    assert set(monitor.states[sent.id]) <= {"PENDING", "RECEIVED", "STARTED", "SUCCESS"}

    for kind in ("acquired", "released"):
        shown = rf"lock {kind}: .*\bkey={re.escape(key)}, .*\buuid={sent.id}"
        cluster.wait(lambda shown=shown: re.search(shown, dump.log_text()), shown)


def test_a_task_that_waits_for_its_rate_in_a_group(
    cluster: Cluster, monitor: Monitor, key: str
) -> None:
    options = {"lock_rate": [1, 3600], "lock_group": "blue", "lock_timeout": 1}
    headers = {"dflock": {**options, "lock_conflict": "skip"}}
    first = send(cluster, jobs.patient, key, headers=headers)
    assert first.get(timeout=PATIENCE) == first.id
    second = send(cluster, jobs.parked, key, headers=headers)
    waiting = monitor.wait("lock-waiting", second)
    conflict = monitor.wait("lock-conflict", second)
    for event in (waiting, conflict):
        assert (event["key"], event["holder"]) == (key, None)
        assert "rate: next in 3" in event["reason"]
    assert waiting["group"] == monitor.wait("lock-acquired", first)["group"] == "blue"
    assert monitor.wait("lock-released", first)["group"] == "blue"


def test_a_task_that_is_skipped(cluster: Cluster, monitor: Monitor, key: str) -> None:
    with cluster.lock(key):
        sent = send(cluster, jobs.skipped, key)
        skipped = monitor.wait("lock-skipped", sent)
        conflict = monitor.wait("lock-conflict", sent)
    assert monitor.kinds(sent) == ["lock-conflict", "lock-skipped"]
    for event in (skipped, conflict):
        assert event["key"] == key
        assert event["holder"].startswith("somebody, for ")
    assert conflict["reason"] == "it is held"


def test_a_task_that_is_requeued(cluster: Cluster, monitor: Monitor, key: str) -> None:
    with cluster.lock(key):
        sent = send(cluster, jobs.requeued, key)
        requeued = monitor.wait("lock-requeued", sent)
    assert sent.get(timeout=PATIENCE) == sent.id
    monitor.wait("lock-released", sent)
    monitor.wait("task-succeeded", sent)
    assert monitor.kinds(sent)[:2] == ["lock-conflict", "lock-requeued"]
    assert (requeued["key"], requeued["attempt"]) == (key, 1)
    assert requeued["countdown"] <= jobs.AT_ONCE["cap"]
    assert set(monitor.states[sent.id]) <= {"PENDING", "RECEIVED", "STARTED", "RETRY", "SUCCESS"}


def test_tasks_that_are_superseded(cluster: Cluster, monitor: Monitor, key: str) -> None:
    runs = send(cluster, jobs.latest, key, gate="/nonexistent/gate")
    monitor.wait("lock-acquired", runs)
    newest = send(cluster, jobs.latest, key)
    stopped = monitor.wait("lock-superseded", runs)
    revoked = monitor.wait("task-revoked", runs)
    assert newest.get(timeout=PATIENCE) == newest.id
    assert (stopped["key"], stopped["was_running"]) == (key, True)
    assert newest.id in stopped["by"]
    assert revoked["terminated"] is True
    assert monitor.states[runs.id][-1] == "REVOKED"
    assert monitor.kinds(runs) == ["lock-acquired", "lock-released", "lock-superseded"]


def test_one_that_waits_is_superseded(cluster: Cluster, monitor: Monitor, key: str) -> None:
    with cluster.lock(key):
        waits = send(cluster, jobs.latest, key)
        monitor.wait("lock-waiting", waits)
        newest = send(cluster, jobs.latest_parked, key)
        event = monitor.wait("lock-superseded", waits)
        skipped = monitor.wait("lock-skipped", waits)
    assert newest.get(timeout=PATIENCE) == newest.id
    assert (event["key"], event["was_running"]) == (key, False)
    assert newest.id in event["by"]
    assert skipped["holder"] == event["by"]
    assert monitor.kinds(waits) == ["lock-waiting", "lock-superseded", "lock-skipped"]


def test_a_lock_that_is_lost(cluster: Cluster, monitor: Monitor, gate: Path, key: str) -> None:
    sent = send(cluster, jobs.warned, key, gate=str(gate))
    fence = monitor.wait("lock-acquired", sent)["fence"]
    assert admin.evict(cluster.lock_server.address, key, fence)
    lost = monitor.wait("lock-lost", sent)
    assert (lost["key"], lost["fence"]) == (key, fence)
    gate.touch()
    assert sent.get(timeout=PATIENCE) == sent.id


def test_several_keys(cluster: Cluster, monitor: Monitor, key: str) -> None:
    sent = send(cluster, jobs.two_keys, key)
    acquired = monitor.wait("lock-acquired", sent)
    assert acquired["key"] == f"{key}:a"
    assert acquired["fences"].keys() == {f"{key}:a", f"{key}:b"}
    assert acquired["fence"] == acquired["fences"][f"{key}:a"]


def test_only_while_events_are_enabled(cluster: Cluster, monitor: Monitor, key: str) -> None:
    node = f"silent@{gethostname()}"

    def switch(command: str) -> None:
        ask = getattr(jobs.app.control, command)
        assert ask([node], reply=True, timeout=PATIENCE, limit=1)

    def run() -> AsyncResult:
        sent = send(cluster, jobs.patient, key, queue="silent")
        assert sent.get(timeout=PATIENCE) == sent.id
        return sent

    before = run()
    switch("enable_events")
    enabled = run()
    monitor.wait("lock-released", enabled)
    switch("disable_events")
    after = run()
    # Of what is sent now, whatever was sent before has come.
    last = send(cluster, jobs.patient, key)
    monitor.wait("lock-released", last)

    assert monitor.kinds(enabled) == ["lock-acquired", "lock-released"]
    assert monitor.kinds(before) == []
    assert monitor.kinds(after) == []


def test_a_broker_that_is_away_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A channel of it would be tried again after a pause, which is as long as the test has."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        broker = f"amqp://127.0.0.1:{nobody.getsockname()[1]}"
        app = Celery("away", broker=broker, set_as_current=False)
        pause = {"interval_start": jobs.LONG, "interval_max": jobs.LONG}
        app.conf.broker_transport_options = pause

        @app.task(shared=False, name="away", base=LockedTask)
        def task() -> None: ...

        monkeypatch.setattr(events, "_wanted", b"\1")
        request = Context(id="away", hostname="here")
        task_skipped.send(sender=task, request=request, key="k", holder=None)
    assert "event lock-skipped of task away[away] was not sent" in caplog.text


@pytest.mark.usefixtures("needs_redis")
def test_the_first_event_without_a_broker_is_told_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its connection is one that was good."""
    app = Celery("gone", set_as_current=False)

    @app.task(shared=False, name="gone", base=LockedTask)
    def task() -> None: ...

    monkeypatch.setattr(events, "_wanted", b"\1")
    with Redis(tmp_path) as redis:
        app.conf.broker_url = redis.url
        for name in ("there", "first", "second"):
            request = Context(id=name, hostname="here")
            task_skipped.send(sender=task, request=request, key="k", holder=None)
            if name == "there":
                redis.kill()
    lost = re.findall(r"task gone\[(\w+)\] was not sent", caplog.text)
    assert lost == ["first", "second"]
