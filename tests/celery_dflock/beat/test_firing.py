"""When a firing is due and what its id is: the same for every beat that knows the last run."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from celery import Celery
from celery.schedules import BaseSchedule, crontab, schedule, solar

from celery_dflock.beat.firing import Firing, due_after, latest_due
from celery_dflock.outcome.header import FIRING

app = Celery("firing", set_as_current=False)
app.conf.timezone = "Europe/Berlin"


def at(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def due(of: Any, last_run: str) -> str:
    of.app = app
    return due_after(of, at(last_run)).isoformat(" ")[:-6]


@pytest.mark.parametrize(
    ("of", "last_run", "expected"),
    [
        (schedule(90), "2026-03-01 12:00:00.250", "2026-03-01 12:01:30.250000"),
        (schedule(3600, relative=True), "2026-03-01 12:20:00", "2026-03-01 13:00:00"),
        (crontab(minute=30, hour=7), "2026-03-01 06:30:04", "2026-03-02 06:30:00"),
        (crontab(minute=30, hour=7), "2026-03-01 06:29:59", "2026-03-01 06:30:00"),
        # Clocks go forward at 01:00 UTC on 2026-03-29, and back on 2026-10-25.
        (crontab(minute=0, hour=4), "2026-03-28 03:00:01", "2026-03-29 02:00:00"),
        (crontab(minute=0, hour=4), "2026-10-24 02:00:01", "2026-10-25 03:00:00"),
    ],
)
def test_due(of: Any, last_run: str, expected: str) -> None:
    assert due(of, last_run) == expected


def test_due_of_the_sun() -> None:
    pytest.importorskip("ephem")
    assert due(solar("sunset", 52.5, 13.4), "2026-06-01 12:00:00").startswith("2026-06-01 19:1")


def test_due_does_not_depend_on_now() -> None:
    every_minute = crontab(nowfun=lambda: at("2030-01-01 00:00:00"))
    assert due(every_minute, "2026-03-01 12:00:00") == "2026-03-01 12:01:00"
    assert every_minute.now() == at("2030-01-01 00:00:00")


def test_a_schedule_that_cannot_say() -> None:
    class Odd(BaseSchedule):
        pass

    assert due(Odd(), "2026-03-01 12:00:00") == "2026-03-01 12:00:00"


def latest(of: Any, last_run: str, now: str) -> str:
    of.app = app
    return latest_due(of, at(last_run), at(now).astimezone(app.timezone)).isoformat(" ")[:-6]


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ("12:00:09.9", "12:00:10"),
        ("12:00:10", "12:00:10"),
        ("12:00:19.9", "12:00:10"),
        ("12:01:05.5", "12:01:00"),
    ],
)
def test_latest_of_an_interval(now: str, expected: str) -> None:
    day = "2026-03-01 "
    assert latest(schedule(10), day + "12:00:00", day + now) == day + expected


def test_latest_of_an_interval_when_the_clocks_change() -> None:
    found = latest(schedule(420), "2026-03-29 00:59:00", "2026-03-29 01:06:01")
    assert found == "2026-03-29 01:06:00"


@pytest.mark.parametrize(
    ("of", "last_run", "now", "expected"),
    [
        (crontab(), "2026-03-01 12:00:01", "2026-03-01 12:00:30", "2026-03-01 12:01:00"),
        (crontab(), "2026-03-01 12:00:01", "2026-03-01 12:01:00", "2026-03-01 12:01:00"),
        (crontab(), "2025-01-01 12:00:01", "2026-03-01 12:07:13", "2026-03-01 12:07:00"),
        (
            crontab(minute=0, hour="1,2,3"),
            "2026-03-01 12:00:01",
            "2026-03-09 12:00:00",
            "2026-03-09 02:00:00",
        ),
        (
            crontab(minute=0, hour=0, day_of_month=1),
            "2025-12-01 12:00:01",
            "2026-03-20 12:00:00",
            "2026-02-28 23:00:00",
        ),
        (
            schedule(3600, relative=True),
            "2026-03-01 12:20:00",
            "2026-03-01 13:00:01",
            "2026-03-01 13:00:00",
        ),
    ],
)
def test_latest_of_several(of: Any, last_run: str, now: str, expected: str) -> None:
    assert latest(of, last_run, now) == expected


def test_id() -> None:
    firing = Firing("celery-beat:a", "report", at("2026-03-01 12:00:00"))
    assert firing.id == Firing("celery-beat:a", "report", at("2026-03-01 12:00:00")).id
    others = [
        firing._replace(beat="celery-beat:b"),
        firing._replace(entry="reports"),
        firing._replace(due=at("2026-03-01 12:00:00.001")),
    ]
    assert len({firing.id, *(other.id for other in others)}) == 4
    assert firing.id in str(firing)


def test_options() -> None:
    firing = Firing("beat", "report", at("2026-03-01 12:00:00"))
    given = {"queue": "slow", "headers": {"tenant": 7}}

    options = firing.options(given, 5)

    assert options["queue"] == "slow"
    assert options["task_id"] == firing.id
    assert options["headers"]["tenant"] == 7
    assert options["headers"][FIRING] == {
        "id": firing.id,
        "entry": "report",
        "due": "2026-03-01T12:00:00+00:00",
        "fence": 5,
    }
    assert given == {"queue": "slow", "headers": {"tenant": 7}}
    assert firing.options({"task_id": "mine"}, 5)["task_id"] == "mine"
