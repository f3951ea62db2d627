"""Roll-outs: this release and 0.1, as workers, senders, beats and lock servers, at the same time.

Each scenario goes in both directions, on a lock server of each release: never two holders of a key,
nothing lost, and every task runs once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import pytest
from celery.app.task import Context

from celery_dflock.beat.firing import Firing
from celery_dflock.outcome.header import Header
from examples.demo.stage import Worker
from tests.celery_dflock import mixed
from tests.celery_dflock.beat import scheduled
from tests.celery_dflock.beat.fleet import APP, Fleet
from tests.celery_dflock.upgrade import releases
from tests.celery_dflock.upgrade.releases import PATIENCE, Release, Server, Stage

pytestmark = pytest.mark.timeout(releases.BUILD_BOUND + 60)


@pytest.fixture(scope="module")
def release() -> dict[str, Release]:
    return {release.name: release for release in (releases.first(), releases.here())}


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
READER_OF_0_1 = """
from celery.app.task import Context
from celery_dflock import policy

def answer(headers, retries):
    request = Context(headers=headers, retries=retries)
    return [policy.attempts(request), policy.options_of_call(request)]
"""


def test_0_1_reads_the_headers(release: dict[str, Release]) -> None:
    """Its own code does; for all that headers can say see test_header.py, with a copy of it."""
    options, unique = {"lock_timeout": 3}, {"id": "1", "key": "k", "token": "t"}
    written = [
        Header(options, attempt=2, since=5.0, ticket="a ticket"),
        Header({}, redelivery=3, is_free=True),
        Header(options, unique, outage=4, paused=7.0),
    ]
    asked = [[header.write(Context(retries=1)), 1] for header in written]
    read = releases.evaluate(release["old"], READER_OF_0_1, asked)
    counted = {"retries": 1}
    assert read == [
        [{"attempt": 2, "since": 5.0, "place": "a ticket", **counted}, options],
        [{"copy": 3, "free": True, **counted}, {}],
        [counted, options],
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
    newcomer = stage.waiter("tickets")
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

    newcomer.wait_granted()
    newcomer.lock.release()
    stage.wait_ended(*tickets, *parked, patient, unique, executing, late)
    stage.wait_ended(retried, unique_retried, retries=1)
    # What Redis gave back at the last moment may be a copy, and in doubt 0.1 gives up its ticket.
    kept = [each for each in tickets if not stage.is_redelivered(each)]
    begun = [stage.events("begin", each)[0]["at"] for each in kept]
    assert all(at < newcomer.granted_at for at in begun), "a ticket was lost"
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
    stage: Stage, release: dict[str, Release], one: str, other: str, gate: Path
) -> None:
    """A redelivered message, a retry that overtakes the run which has sent it, a firing sent twice."""
    sender = stage.sender(release[one])
    for name, number in ((one, 4), (other, 4)):
        stage.worker(release[name], name, concurrency=number)
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
        fleet.assert_each_once(fleet.sent())
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
