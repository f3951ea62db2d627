"""Real beats on a schedule of one second: one sends, and when it ends another one does."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_dflock.cli import dflock
from dflockd import admin
from examples.demo.stage import LockServer
from tests.celery_dflock.beat.fleet import LEADS, Beat, Fleet, assert_never_early
from tests.dflockd.proxy import Proxy

LONG = 600
"""A lease in seconds, for whose end nobody waits: another beat leads long before."""

TTL = 2
"""A lease whose end a test waits for."""

AT_ONCE = 1.0
"""Seconds within which another beat leads after the end of the leader, on an idle machine."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("beats")


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[LockServer]:
    with LockServer(home) as server:
        yield server


@pytest.fixture(scope="module")
def fleet(home: Path, redis_url: str, server: LockServer) -> Iterator[Fleet]:
    with Fleet(home, redis_url, server, ttl=LONG) as fleet:
        yield fleet


@pytest.fixture
def fleet_of_short_leases(tmp_path: Path, redis_url: str, server: LockServer) -> Iterator[Fleet]:
    with Fleet(tmp_path, redis_url, server, size=2, ttl=TTL, prefix="short:") as fleet:
        yield fleet


def kill(beat: Beat) -> None:
    os.kill(beat.pid, signal.SIGKILL)


def terminate(beat: Beat) -> None:
    os.kill(beat.pid, signal.SIGTERM)


def test_one_of_three_sends(fleet: Fleet) -> None:
    led = [beat.logged(LEADS) for beat in fleet.beats]
    start = time.monotonic()
    fleet.wait_sent(3, start)

    sent = fleet.sent(start)
    fleet.assert_each_once(sent)
    assert_never_early(sent)
    assert {event["pid"] for event in sent} == {fleet.wait_leader().pid}
    assert [beat.logged(LEADS) for beat in fleet.beats] == led, "another one leads"


def test_who_leads_and_what_is_due_next(fleet: Fleet, redis_url: str) -> None:
    leader = fleet.wait_leader()
    app = Celery("scheduled", broker=redis_url, set_as_current=False)
    app.conf.dflock_servers = fleet.server.address
    app.conf.beat_schedule = {"second": {"task": "second", "schedule": 1.0}}

    def status(*arguments: str) -> str:
        context = CLIContext(app=app, no_color=True, workdir=None)
        done = CliRunner().invoke(dflock, ["status", *arguments], obj=context)
        assert done.exit_code == 0, done.output
        return done.stdout

    fleet.wait(lambda: json.loads(status("--json"))[1]["standing_by"] == 2 or None, "two")
    _, row = json.loads(status("--json"))
    assert row["leader"].endswith(f" pid {leader.pid}")
    assert row["next"] == "second"
    assert -1 < datetime.fromisoformat(row["next_due"]).timestamp() - time.time() < 1.1
    line = status().splitlines()[1]
    assert line.startswith(f"celery-beat:scheduled: led by {row['leader']} for ")
    assert re.search(r", [12] standing by, next due: 'second' at 2", line)  # one may ask anew

    app.conf.beat_schedule = {}
    app.conf.dflock_key_prefix = "nobody:"
    assert len(json.loads(status("--json"))) == 1
    app.conf.beat_scheduler = "dflock"
    assert "nobody leads, 0 standing by" in status()


@pytest.mark.parametrize("end", [kill, terminate])
def test_another_one_goes_on(fleet: Fleet, end: Callable[[Beat], None]) -> None:
    start = time.monotonic()
    old = fleet.suspend_idle_leader()

    def end_and_go_on(beat: Beat) -> None:
        end(beat)
        with contextlib.suppress(ProcessLookupError):
            os.kill(beat.pid, signal.SIGCONT)

    new, _ = fleet.fail_over(end_and_go_on)

    fleet.wait_sent(1, by=new)
    fleet.wait_sent(2, start)  # the old one may have sent its last before this began
    fleet.assert_each_once(fleet.sent(start))
    fleet.wait(lambda: not old.running or None, "the end of the old leader")
    if end is terminate:
        assert "beat: handing over" in old.log_text()
    fleet.restart(old)


def test_a_leader_that_was_stopped_stands_by(fleet_of_short_leases: Fleet) -> None:
    fleet, start = fleet_of_short_leases, time.monotonic()
    old = fleet.suspend_idle_leader()
    try:
        stopped = time.monotonic()
        new = fleet.wait_leader(but=old)
        fleet.wait_sent(1, by=new)
    finally:
        os.kill(old.pid, signal.SIGCONT)
    fleet.wait(lambda: "no longer leading" in old.log_text() or None, "the old leader to notice")
    fleet.wait_sent(1, by=new)

    assert not [e for e in fleet.sent(stopped) if e["pid"] == old.pid]
    assert len({event["id"] for event in fleet.sent(start)}) == len(fleet.sent(start))
    fleet.wait(lambda: old.log_text().count("standing by") or None, "it to stand by")


def test_the_lock_server_is_restarted(fleet: Fleet, server: LockServer) -> None:
    start = time.monotonic()
    fleet.wait_sent(1, start)

    server.kill()
    server.start()

    fleet.wait_sent(2)
    fleet.assert_each_once(fleet.sent(start))


@pytest.mark.parametrize(
    "how",
    [*(pytest.param(how, marks=pytest.mark.soak) for how in ("silence", "refusal")), "eviction"],
)
def test_the_leader_is_cut_off(home: Path, redis_url: str, server: LockServer, how: str) -> None:
    """From the lock server only: it could still send. Or another one has got its lock from it."""
    ttl = TTL if how == "silence" else LONG  # else the lease has no part in it
    with ExitStack() as stack:
        proxies = [Proxy(server.port) for _ in range(2)]
        for proxy in proxies:
            stack.callback(proxy.close)
        addresses = [f"127.0.0.1:{proxy.port}" for proxy in proxies]
        own = home / how
        own.mkdir()
        fleet = stack.enter_context(
            Fleet(own, redis_url, server, addresses=addresses, ttl=ttl, prefix=f"{how}:")
        )
        start = time.monotonic()
        fleet.wait_sent(1, start)
        old = fleet.wait_leader()
        proxy = proxies[fleet.beats.index(old)]

        if how == "silence":
            proxy.withhold()
        elif how == "refusal":
            proxy.close()  # and the server sees the end of the connections
        else:
            [holder] = admin.inspect(server.address, fleet.key)["holders"]
            assert admin.evict(server.address, fleet.key, holder["fence"])
        new = fleet.wait_leader(but=old)
        fleet.wait_sent(1, by=new)
        proxy.pass_on()
        fleet.wait(lambda: "no longer leading" in old.log_text() or None, "it to notice")
        fleet.wait_sent(1, by=new)

    sent = fleet.sent(start)
    first = next(event["at"] for event in sent if event["pid"] == new.pid)
    assert all(event["at"] < first for event in sent if event["pid"] == old.pid)
    assert len({event["id"] for event in sent}) == len(sent)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_minute(fleet: Fleet) -> None:
    start = time.monotonic()
    fleet.wait(lambda: time.monotonic() - start > 61 or None, "a minute", 65)

    sent = fleet.sent(start)
    assert len(sent) >= 60
    fleet.assert_each_once(sent)
    assert_never_early(sent)
    assert len(fleet.sent(start, "minute")) == 1
    assert len({event["pid"] for event in sent}) == 1


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("end", [kill, terminate])
def test_ten_leaders_end(fleet: Fleet, end: Callable[[Beat], None]) -> None:
    start, took, late = time.monotonic(), [], []
    for number in range(10):
        fleet.wait_sent(1)
        # At another time of the second each, and so also while a firing is under way.
        pause = time.monotonic() + 0.93 + 0.01 * number
        fleet.wait(lambda pause=pause: time.monotonic() > pause or None, "the moment")
        old = fleet.wait_leader()
        new, seconds = fleet.fail_over(end)
        took.append(seconds)
        fleet.wait_sent(2, by=new)
        fleet.wait(lambda old=old: not old.running or None, "the end of the old leader")
        fleet.restart(old)

    sent = fleet.sent(start)
    # A crash between a message and the note of it doubles the message, under the same id.
    first_copies = list({event["id"]: event for event in reversed(sent)}.values())[::-1]
    first_copies.sort(key=lambda event: event["due"])
    fleet.assert_each_once(first_copies)
    assert len(sent) - len(first_copies) <= 3
    late = [e["wall"] - datetime.fromisoformat(e["due"]).timestamp() for e in first_copies]
    print(
        f"\n{end.__name__}: nobody led for {median(took):.3f} s (median), {max(took):.3f} s (worst)"
        f"; a firing was late by {max(late):.3f} s (worst); "
        f"{len(sent) - len(first_copies)} of {len(sent)} messages twice"
    )
    assert max(took) < AT_ONCE


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_the_lock_server_is_away(fleet_of_short_leases: Fleet, server: LockServer) -> None:
    fleet, start = fleet_of_short_leases, time.monotonic()
    fleet.wait_sent(2, start)
    server.kill()
    away = time.monotonic()
    fleet.wait(lambda: time.monotonic() - away > 20 or None, "twenty seconds", 30)
    meanwhile = [event for event in fleet.sent(away) if event["at"] > away + TTL]
    server.start()

    fleet.wait_sent(3)
    assert not meanwhile
    sent = fleet.sent(start)
    assert len({event["id"] for event in sent}) == len(sent)
    gaps = [after["at"] - before["at"] for before, after in pairwise(sent)]
    assert sum(gap > 1.5 for gap in gaps) == 1
