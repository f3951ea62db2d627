"""Other schedulers under the lock: those that share the last runs themselves; and a worker's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from examples.demo.stage import ROOT, LockServer, Redis, Worker
from tests.celery_dflock.beat import scheduled
from tests.celery_dflock.beat.fleet import APP, LEADS, Beat, Event, Fleet

SCHEDULERS = {
    "django_celery_beat": "django_celery_beat.schedulers:DatabaseScheduler",
    "redbeat": "redbeat.schedulers:RedBeatScheduler",
}


def due_of(event: Event) -> float:
    return datetime.fromisoformat(event["due"]).timestamp()


def kill(beat: Beat) -> None:
    os.kill(beat.pid, signal.SIGKILL)


@pytest.fixture(params=list(SCHEDULERS))
def fleet(
    request: pytest.FixtureRequest, tmp_path: Path, redis_url: str, lock_server: LockServer
) -> Iterator[Fleet]:
    name = request.param
    pytest.importorskip("django" if name == "django_celery_beat" else name)
    env = {scheduled.INNER: SCHEDULERS[name], scheduled.DIE: str(tmp_path / "die")}
    if name == "django_celery_beat":
        env["DJANGO_SETTINGS_MODULE"] = "tests.celery_dflock.beat.django_settings"
        env["BEAT_DATABASE"] = str(tmp_path / "beat.sqlite3")
        migrate = [sys.executable, "-m", "django", "migrate", "--verbosity", "0"]
        subprocess.run(migrate, env={**os.environ, **env}, cwd=ROOT, check=True, timeout=60)
    with Fleet(
        tmp_path, redis_url, lock_server, size=2, ttl=600, prefix=f"{tmp_path.name}:", **env
    ) as it:
        yield it


def kill_leaders(fleet: Fleet, times: int) -> list[float]:
    """Kill the leader so many times; return how long nobody led."""
    start, took = time.monotonic(), []
    for number in range(times):
        fleet.wait_sent(1)
        # At another time of the second each, and so also while a firing is under way.
        pause = time.monotonic() + 0.93 + 0.01 * number
        fleet.wait(lambda pause=pause: time.monotonic() > pause or None, "the moment")
        old = fleet.wait_leader()
        new, seconds = fleet.fail_over(kill)
        took.append(seconds)
        fleet.wait_sent(1, by=new)
        if number < times - 1:
            fleet.wait(lambda old=old: not old.running or None, "the end of the old leader")
            fleet.restart(old)
    assert_none_missed(fleet, start, times)
    return took


def assert_none_missed(fleet: Fleet, start: float, kills: int) -> None:
    """These schedulers count from when a task was sent, so that the gap moves what comes after."""
    sent = fleet.sent(start)
    first_copies = {event["id"]: event for event in reversed(sent)}.values()
    doubled = len(sent) - len(first_copies)
    assert doubled <= kills, "more than a crash while sending"
    firings = sorted(first_copies, key=due_of)
    for one, other in pairwise(firings):
        assert due_of(other) - due_of(one) > 0.9, firings
    fleet.assert_none_missed(firings)


@pytest.mark.parametrize(
    "fleet", ["django_celery_beat", pytest.param("redbeat", marks=pytest.mark.soak)], indirect=True
)
def test_a_killed_leader(fleet: Fleet) -> None:
    kill_leaders(fleet, 1)


@pytest.mark.parametrize("fleet", ["redbeat"], indirect=True)
def test_a_firing_that_was_written_down_and_not_sent(fleet: Fleet, tmp_path: Path) -> None:
    """RedBeat writes when an entry has last run before it sends it."""
    start = time.monotonic()
    fleet.wait_sent(1, start)
    old = fleet.wait_leader()

    (tmp_path / "die").touch()
    new = fleet.wait_leader(but=old)
    fleet.wait_sent(2, by=new)

    again = new.wait_log("was claimed but not confirmed, it is sent again")
    # At a full minute that may be the other entry.
    sent = [event["id"] for event in fleet.events("sent") if event["pid"] == new.pid]
    assert any(f"[{each}]" in again for each in sent)
    assert_none_missed(fleet, start, 0)


@pytest.mark.usefixtures("needs_redis")
def test_a_scheduler_whose_redis_is_away_for_a_while(
    tmp_path: Path, lock_server: LockServer
) -> None:
    """RedBeat itself ends its beat; here there is none that takes over."""
    pytest.importorskip("redbeat")
    env = {scheduled.INNER: SCHEDULERS["redbeat"]}
    with Redis(tmp_path) as redis:
        prefix = f"{tmp_path.name}:"
        with Fleet(
            tmp_path, redis.url, lock_server, size=1, ttl=600, prefix=prefix, **env
        ) as fleet:
            fleet.wait_sent(1)
            redis.kill()
            fleet.beats[0].wait_log("no longer leading, could not go on")
            redis.start()
            fleet.wait_sent(2)


@pytest.mark.parametrize("has_store", [False, True])
def test_a_firing_that_was_written_down_when_the_lease_ended(
    tmp_path: Path, redis_url: str, lock_server: LockServer, has_store: bool
) -> None:
    """Its own beat notices that it does not lead any more, and is the next leader."""
    pytest.importorskip("redbeat")
    env = {scheduled.INNER: f"{APP}:StoppingRedBeat", scheduled.STOP: str(tmp_path / "stop")}
    if has_store:
        env[scheduled.STORE] = f"file:{tmp_path / 'runs'}"
    prefix = f"{tmp_path.name}:"
    with Fleet(tmp_path, redis_url, lock_server, size=1, prefix=prefix, **env) as fleet:
        start = time.monotonic()
        fleet.wait_sent(1, start)
        beat = fleet.wait_leader()
        (tmp_path / "stop").touch()
        fleet.wait(lambda: fleet.events("stopped") or None, "it to stop")
        fleet.wait(lambda: fleet.leader() is None or None, "the end of its lease")
        os.kill(beat.pid, signal.SIGCONT)

        beat.wait_log("no longer leading")
        again = beat.wait_log("was claimed but not confirmed, it is sent again")
        fleet.wait_sent(2)
        sent = fleet.sent(start)
    stopped = fleet.events("stopped")[0]["wall"]
    dues = {event["id"]: due_of(event) for event in sent}
    [due] = [due for id, due in dues.items() if id in again]
    assert due <= stopped
    assert len(dues) == len(sent)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_ten_killed_leaders(fleet: Fleet, tmp_path: Path) -> None:
    with Worker(tmp_path, app=APP, name="runs", env=fleet.env) as worker:
        worker.wait_ready()
        took = kill_leaders(fleet, 10)
        sent = [event["id"] for event in fleet.sent()]

        def probe() -> bool | None:
            return {event["id"] for event in fleet.events("run")}.issuperset(sent) or None

        fleet.wait(probe, "all to run")
        worker.stop()
    runs = [event["id"] for event in fleet.events("run") if event["id"] in sent]
    print(
        f"\nfail-over: median {median(took):.3f} s, worst {max(took):.3f} s; "
        f"{len(sent) - len(set(sent))} of {len(sent)} messages twice, "
        f"{len(runs) - len(set(runs))} runs twice"
    )
    assert max(took) < 1.0
    assert len(set(runs)) == len(runs)


def test_beat_of_a_worker(tmp_path: Path, redis_url: str, lock_server: LockServer) -> None:
    """``worker -B`` beside a beat that stands by for it; and tasks that are run."""
    fleet = Fleet(tmp_path, redis_url, lock_server, size=1, prefix=f"{tmp_path.name}:")
    [beat] = fleet.beats
    worker = Worker(
        tmp_path,
        *("-B", "--scheduler", "dflock", "--schedule", str(tmp_path / "worker.schedule")),
        app=APP,
        name="with-beat",
        env=fleet.env,
    )
    with worker, beat:
        fleet.wait_ready(beat)
        worker.wait_ready()
        fleet.wait(lambda: bool(fleet.events("run")) or None, "a run")
        if LEADS in beat.log_text():
            beat.stop()
            worker.wait_log(LEADS)
            fleet.restart(beat)
        start = time.monotonic()
        fleet.wait_sent(1, start)
        sent = fleet.sent(start)
        assert {event["pid"] for event in sent}.isdisjoint({beat.pid})

        # Billiard takes 30 seconds to end a process that has a result which nobody reads any more.
        worker.wait_log(f"Task second[{sent[0]['id']}] succeeded")
        pause = time.monotonic() + 0.3
        fleet.wait(lambda: time.monotonic() > pause or None, "the worker to idle")
        os.kill(worker.pid, signal.SIGTERM)
        beat.wait_log(LEADS)
        fleet.wait(lambda: not worker.running or None, "the end of the worker")
        fleet.wait_sent(1, by=beat)

    runs = [event["id"] for event in fleet.events("run")]
    assert len(set(runs)) == len(runs)


@pytest.mark.soak
def test_a_workers_beat_is_asked_to_end_in_a_destructor(
    tmp_path: Path, redis_url: str, lock_server: LockServer
) -> None:
    """Python ignores the SystemExit there; and the worker waits for its beat to end."""
    env = {scheduled.END: str(tmp_path / "end")}
    fleet = Fleet(tmp_path, redis_url, lock_server, prefix=f"{tmp_path.name}:", **env)
    arguments = ("-B", "--scheduler", "dflock", "--schedule", str(tmp_path / "schedule"))
    # Of a queue without tasks, so that only its beat sends.
    worker = Worker(tmp_path, *arguments, "-Q", "none", app=APP, name="with-beat", env=fleet.env)
    with worker:
        worker.wait_log(LEADS)
        worker.wait_ready()
        (tmp_path / "end").touch()
        worker.wait_log("Exception ignored in: ")
        worker.wait_log("beat: handing over")
        worker.stop()
