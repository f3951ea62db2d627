"""What a new leader finds, and how far it believes that."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery
from celery.beat import Scheduler

from celery_dflock.beat.claims import CLAIM_TTL, Claims
from celery_dflock.beat.firing import Firing
from celery_dflock.beat.leadership import MOST_AHEAD, restore
from celery_dflock.beat.store import FileStore, Runs
from celery_dflock.config import settings
from dflockd.sync_client import DistributedLock
from examples.demo.stage import LockServer

HOUR = timedelta(hours=1)


class RunsInMemory(FileStore):
    """Last runs in memory."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs

    def load(self) -> Runs:
        return dict(self.runs)

    def save(self, runs: Any) -> None:
        self.runs.update(runs)


def scheduler(timezone: str = "UTC") -> Scheduler:
    made = Celery("taking-over", set_as_current=False)
    made.conf.update(
        timezone=timezone,
        beat_schedule={name: {"task": name, "schedule": 60.0} for name in ("wrong", "right")},
    )
    inner = Scheduler(made, lazy=True)
    inner.setup_schedule()
    inner.merge_inplace(made.conf.beat_schedule)
    return inner


@pytest.mark.parametrize("timezone", ["UTC", "Asia/Tokyo"])
def test_a_last_run_that_is_to_come_is_not_believed(
    timezone: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock of a host was a day ahead: its entries would not be sent for a day by anybody."""
    before = datetime.now(UTC)
    soon = before + MOST_AHEAD / 2  # clocks of two hosts differ a little
    store, inner = RunsInMemory({"wrong": before + 24 * HOUR, "right": soon}), scheduler(timezone)
    restore(inner, store)
    for runs in ({n: e.last_run_at for n, e in inner.schedule.items()}, store.runs):
        assert before <= runs["wrong"] <= datetime.now(UTC)
        assert runs["right"] == soon
    assert [record.args[0] for record in caplog.records if record.args] == ["wrong"]


def test_the_claim_of_an_entry_with_a_long_name_is_found(lock_server: LockServer, key: str) -> None:
    """Celery names an entry after its task and arguments, of which a label has no room for all."""
    app = Celery("long", set_as_current=False)
    app.conf.dflock_servers = [lock_server.address]
    name = f"shop.tasks.send_report('{'é' * 100}', [{', '.join(map(str, range(100)))}])"
    claims, firing = Claims(key, settings(app)), Firing(key, name, datetime.now(UTC))
    claims.take(firing)
    assert Claims(key, settings(app)).left(["another", name]) == firing
    assert Claims(key, settings(app)).left(["another"]) is None


@pytest.mark.parametrize("due", ["yesterday", "2026-03-01T12:00:00"])
def test_what_looks_like_a_claim_keeps_nobody_from_leading(
    due: str, lock_server: LockServer, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = Celery("hostile", set_as_current=False)
    app.conf.dflock_servers = [lock_server.address]
    label = f"firing {'0' * 8} due {due} of job"
    options = settings(app).connection_options()
    somebody = DistributedLock(f"{key}:claim", 0, 30, label=label, **options)
    assert somebody.acquire()
    somebody.detach(CLAIM_TTL)
    with caplog.at_level(logging.WARNING):
        assert Claims(key, settings(app)).left(["job"]) is None
    assert "cannot tell whether" in caplog.text


def test_a_claim_takes_the_place_of_one_that_was_not_confirmed(
    lock_server: LockServer, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = Celery("claims", set_as_current=False)
    app.conf.dflock_servers = [lock_server.address]
    earlier, later = Claims(key, settings(app)), Claims(key, settings(app))
    first, second = (Firing(key, name, datetime.now(UTC)) for name in ("first", "second"))
    earlier.take(first)
    later.take(second)
    names = ["first", "second"]
    assert Claims(key, settings(app)).left(names) == second
    earlier.confirm()  # it is gone: that ends no other, and is no error
    assert Claims(key, settings(app)).left(names) == second
    later.confirm()
    assert Claims(key, settings(app)).left(names) is None
    assert not caplog.records
