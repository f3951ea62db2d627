"""Roll-outs: this release and 0.1, as workers, senders, beats and lock servers, at the same time.

Each scenario goes in both directions, on a lock server of each release: never two holders of a key,
nothing lost, and every task runs once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from celery.utils.nodenames import gethostname

from celery_dflock.beat.firing import Firing
from dflockd.sync_client import DistributedLock
from examples.demo.stage import Worker, wait_until
from tests.celery_dflock import mixed, releases
from tests.celery_dflock.beat import scheduled
from tests.celery_dflock.beat.fleet import APP, Fleet, assert_each_once
from tests.celery_dflock.cluster import waiters
from tests.celery_dflock.releases import Release, Sender, Server

PATIENCE = 20.0

Event = dict[str, Any]

pytestmark = pytest.mark.timeout(releases.BUILD_BOUND + 60)


@pytest.fixture(scope="module")
def release() -> dict[str, Release]:
    return {release.name: release for release in (releases.first(), releases.here())}


class Stage:
    """The lock server, and what the workers and senders of both releases do at it."""

    def __init__(self, directory: Path, broker: str, server: Server, running: ExitStack) -> None:
        self.directory = directory
        self.server = server
        self.record = directory / "record.jsonl"
        self.name = directory.name
        self._running = running
        self._processes: list[Worker] = []
        self.env = {
            mixed.BROKER: broker,
            mixed.RECORD: str(self.record),
            "DFLOCK_SERVERS": server.address,
        }
        mixed.configure(broker)

    def queue(self, name: str) -> str:
        return f"{self.name}-{name}"

    def worker(self, release: Release, *queues: str, concurrency: int = 2) -> Worker:
        names = ",".join(map(self.queue, queues))
        options = {"concurrency": concurrency, "env": self.env}
        worker = releases.worker(self.directory, release, names, **options)
        self._processes.append(worker)
        return self._running.enter_context(worker)

    def sender(self, release: Release) -> Sender:
        return self._running.enter_context(releases.sender(release, self.env))

    def held(self, *keys: str) -> ExitStack:
        """Hold the locks in this process, for as long as the block lasts."""
        locks = ExitStack()
        for key in keys:
            lock = DistributedLock(key, 0, 30, [self.server.address])
            assert lock.acquire(), key
            locks.callback(lock.release)
        return locks

    def wait_ended(self, *task_ids: str, retries: int = 0, seconds: float = PATIENCE) -> None:
        """Wait until these runs have ended.

        Their results are no witness: where the pause is short, Celery may store the RETRY of one
        attempt after the SUCCESS of the next.
        """

        def probe() -> bool | None:
            ended = {e["id"] for e in mixed.history(self.record, "end") if e["retries"] == retries}
            return ended.issuperset(task_ids) or None

        self.wait(probe, f"the end of {task_ids}", seconds)

    def result(self, task_id: str) -> Any:
        """What a task returned."""
        state = mixed.app.AsyncResult(task_id)
        self.wait(lambda: state.ready() or None, f"the result of {task_id}")
        return state.get(timeout=1)

    def events(self, what: str, task_id: str) -> list[Event]:
        return [e for e in mixed.history(self.record) if e["what"] == what and e["id"] == task_id]

    def wait_events(self, what: str, *task_ids: str, number: int = 1) -> None:
        def probe() -> bool | None:
            return all(len(self.events(what, each)) >= number for each in task_ids) or None

        self.wait(probe, f"{number} x {what} of {task_ids}")

    def wait_waiters(self, key: str, number: int) -> None:
        self.wait(
            lambda: waiters(self.server, key) == number or None, f"{number} waiters for {key}"
        )

    def wait(self, probe: Callable[[], Any], what: str, seconds: float = PATIENCE) -> None:
        def failure() -> str:
            logs = "\n\n".join(each.with_log(each.name) for each in self._processes)
            return f"waited {seconds:g} s for {what}\n{logs}"

        wait_until(probe, seconds, failure)

    def settle(self, worker: Worker, queue: str, number: int) -> None:
        """Let a worker receive no more, until so many that it has requeued lie in the queue.

        What it is about to run when it is asked to end, Celery itself may run and deliver again.
        """
        name, node = self.queue(queue), f"{worker.name}@{gethostname()}"
        mixed.app.control.cancel_consumer(name, destination=[node])
        with mixed.app.connection() as connection:
            size = connection.default_channel.client.llen
            self.wait(lambda: size(name) == number or None, f"{number} messages in {name}")

    def runs(self, task_id: str) -> int:
        return len(self.events("begin", task_id))

    def judge(self) -> None:
        """Nobody shared a key, nothing failed or ran twice, and nobody holds anything any more."""
        assert not mixed.violations(mixed.history(self.record))
        assert not mixed.history(self.record, "failed")
        for event in mixed.history(self.record):
            for key in event["holds"]:
                self.wait(lambda key=key: waiters(self.server, key) is None or None, f"{key}: free")


@pytest.fixture
def stage(
    tmp_path: Path, redis_url: str, release: dict[str, Release], server: str
) -> Iterator[Stage]:
    with ExitStack() as running:
        started = running.enter_context(Server(tmp_path, release[server]))
        yield Stage(tmp_path, redis_url, started, running)


ROLLS = [
    ("old", "old", "new"),
    ("new", "new", "old"),
    pytest.param("old", "new", "old", marks=pytest.mark.soak),
    pytest.param("new", "old", "new", marks=pytest.mark.soak),
]
directions = pytest.mark.parametrize(("server", "one", "other"), ROLLS)


@directions
def test_what_is_in_flight_goes_on(
    stage: Stage, release: dict[str, Release], one: str, other: str, tmp_path: Path
) -> None:
    """One worker is stopped with tasks in every state, and one of the other release takes over."""
    sender, later = stage.sender(release[one]), stage.sender(release[other])
    worker = stage.worker(release[one], "now", concurrency=6)
    worker.wait_ready()
    now, gate = {"queue": stage.queue("now")}, tmp_path / "gate"
    retried_on = {"retry_on": stage.queue("later")}

    held = stage.held("tickets", "parked", "patient", "chord", "unique", "executing")
    tickets = [sender.send("ticket", {"key": "tickets"}, **now) for _ in range(3)]
    parked = [sender.send("parked", {"key": "parked"}, **now) for _ in range(2)]
    patient = sender.send("patient", {"key": "patient"}, **now)
    chord = sender.send("requeued", *({"key": "chord"} for _ in range(3)), **now)
    unique = sender.send("executed", {"key": "unique"}, **now)
    executing = sender.send("executing", {"key": "executing"}, **now)
    retried = sender.send("patient", {"key": "retried", **retried_on}, **now)
    unique_retried = sender.send("executed", {"key": "unique retried", **retried_on}, **now)
    late = sender.send("late", {"key": "late", "gate": str(gate)}, **now)
    stage.wait_events("begin", late)
    again = {"task_id": late, "delivery_info": {"redelivered": True}}
    sender.send("late", {"key": "late", "gate": str(gate)}, **again, **now)

    stage.wait_events("requeued", *tickets, unique, executing, late)
    stage.wait_events("end", retried, unique_retried)
    stage.wait_waiters("parked", 2)
    stage.wait_waiters("patient", 1)
    # Each sender finds what the other has sent.
    assert later.send("executed", {"key": "unique"}, **now) == unique
    assert later.send("executing", {"key": "executing"}, **now) == executing
    assert later.send("executed", {"key": "unique retried", **retried_on}, **now) == unique_retried

    stage.settle(worker, "now", len((*tickets, chord, chord, chord, unique, executing, late)))
    os.kill(worker.pid, signal.SIGTERM)
    worker.wait_log("Warm shutdown")
    gate.touch()
    stage.wait(lambda: not worker.running or None, "the worker to end")
    stage.worker(release[other], "now", "later", concurrency=6).wait_ready()
    held.close()

    stage.wait_ended(*tickets, *parked, patient, unique, executing, late)
    stage.wait_ended(retried, unique_retried, retries=1)
    assert len(stage.result(chord)) == 3
    assert [stage.runs(each) for each in (retried, unique_retried)] == [2, 2]
    stage.wait_events("deduplicated", late)
    # What kept others from being sent has ended with it.
    once_more = [
        later.send("executed", {"key": "unique"}, **now),
        sender.send("executing", {"key": "executing"}, **now),
    ]
    stage.wait_ended(*once_more)
    assert not {unique, executing} & set(once_more)
    stage.judge()


@directions
def test_one_message_at_both(
    stage: Stage, release: dict[str, Release], one: str, other: str, tmp_path: Path
) -> None:
    """A redelivered message, a retry that overtakes the run which has sent it, a firing sent twice."""
    sender = stage.sender(release[one])
    for name, number in ((one, 4), (other, 4)):
        stage.worker(release[name], name, concurrency=number)
    gate = tmp_path / "gate"
    here, there = {"queue": stage.queue(one)}, {"queue": stage.queue(other)}
    copied = []
    for kind in ("late", "late_parked"):
        arguments = {"key": kind, "gate": str(gate)}
        copied.append(sender.send(kind, arguments, **here))
        stage.wait_events("begin", copied[-1])
        again = {"task_id": copied[-1], "delivery_info": {"redelivered": True}}
        sender.send(kind, arguments, **again, **there)
    stage.wait_events("requeued", *copied)
    firing = Firing("celery-beat:upgrade", "an entry", datetime.now(UTC)).options({}, None)
    fired = sender.send("patient", {"key": "fired"}, **firing, **here)
    stage.wait_ended(fired)
    sender.send("patient", {"key": "fired"}, **firing, **there)
    overtaken = {"key": "overtaken", "retry_on": stage.queue(other), "lingers": 0.5}
    retried = [sender.send(kind, overtaken, **here) for kind in ("patient", "parked")]
    stage.wait_ended(*retried, retries=1)
    assert [stage.runs(each) for each in retried] == [2, 2]
    gate.touch()
    stage.wait_ended(*copied)
    stage.wait_events("deduplicated", *copied, fired)
    assert [stage.runs(each) for each in (*copied, fired)] == [1, 1, 1]
    stage.judge()


@pytest.mark.soak
@directions
def test_beats_take_over(
    stage: Stage, release: dict[str, Release], one: str, other: str, tmp_path: Path
) -> None:
    """A beat dies between the claim of a firing and its being sent; the other release's sends it."""
    die = tmp_path / "die"
    with ExitStack() as running:
        fleet = Fleet(
            *(tmp_path, stage.env[mixed.BROKER], stage.server),
            size=2,
            **{scheduled.DIE: str(die)},
        )
        for beat, name in zip(fleet.beats, (one, other), strict=True):
            beat._env.update(release[name].env)
            options = {"app": APP, "name": name, "env": {**fleet.env, **release[name].env}}
            running.enter_context(Worker(tmp_path, *("-Q", tmp_path.name), **options))
            running.enter_context(beat)
            fleet.wait_ready(beat)
        leader = fleet.wait_idle_leader()
        assert leader is fleet.beats[0]
        die.touch()
        fleet.wait_leader(but=leader)
        fleet.wait_sent(2, by=fleet.beats[1])
        fleet.restart(leader)
        fleet.wait_idle_leader()
        die.touch()
        fleet.wait_leader(but=fleet.beats[1])
        fleet.wait_sent(2, by=leader)
        assert_each_once(fleet.sent())
        sent = {event["id"] for event in fleet.sent()}

        def all_run() -> bool | None:
            return sent.issubset(event["id"] for event in fleet.events("run")) or None

        fleet.wait(all_run, "all firings to have run")
        run = [event["id"] for event in fleet.events("run")]
        assert len(run) == len(set(run))


KINDS = ("requeued", "ticket", "patient", "parked")


def crowd(stage: Stage, release: dict[str, Release], number: int, seconds: float) -> None:
    """Workers of both releases at the same keys, and senders of both."""
    workers = [stage.worker(each, "all") for each in release.values()]
    senders = [stage.sender(each) for each in release.values()]
    for worker in workers:
        worker.wait_ready()
    queue = {"queue": stage.queue("all")}
    sent = [
        sender.send(kind, {"key": kind, "lingers": 0.01}, **queue)
        for _ in range(number)
        for kind in KINDS
        for sender in senders
    ]
    stage.wait_ended(*sent, seconds=seconds)
    begun = mixed.history(stage.record, "begin")
    assert len(begun) == len(sent)
    assert len({e["parent"] for e in begun}) == 2, "only one release took part"
    stage.judge()


@pytest.mark.parametrize("server", [pytest.param("old", marks=pytest.mark.soak), "new"])
def test_a_crowd_of_both(stage: Stage, release: dict[str, Release]) -> None:
    crowd(stage, release, 5, PATIENCE)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("server", ["old", "new"])
def test_a_large_crowd_of_both(stage: Stage, release: dict[str, Release]) -> None:
    crowd(stage, release, 60, 200)
