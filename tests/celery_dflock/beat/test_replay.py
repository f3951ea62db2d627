"""A day or a night of a schedule under a clock that is told the time, with beats that die at any step.

The schedulers are Celery's own, led as in a real beat, and each starts from what the last one left
in the store. What they send is compared with what one beat sends that never dies.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from celery import Celery
from celery.beat import ScheduleEntry, Scheduler
from celery.schedules import crontab, schedule, solar

from celery_dflock.beat.firing import Firing
from celery_dflock.beat.leadership import Lead, led, restore
from celery_dflock.beat.store import FileStore
from celery_dflock.outcome.header import FIRING

START = datetime(2026, 3, 28, 17, 0, 0, 137_000, tzinfo=UTC)  # clocks go forward the next day
DAY = timedelta(days=1)
NIGHT = timedelta(hours=12)
"""From before sunset until after sunrise: something of everything."""
LONGEST_GAP = 45.0
"""Seconds without any beat; shorter than the shortest interval, so that none is missed twice."""


class DeadError(BaseException):
    """The process is killed here."""


class Clock(Celery):
    """An app that is told the time."""

    time = START

    def now(self) -> datetime:
        return self.time.astimezone(self.timezone)


class HeldLock:
    """The lock server has granted the lock, and knows that it has."""

    key, held, fence = "celery-beat:replay", True, 1

    def check(self) -> None: ...

    def renew(self) -> bool:
        return True


class Fate:
    """Decides when a beat dies; `None` never."""

    def __init__(self, chances: random.Random | None) -> None:
        self._chances = chances

    def maybe_die(self) -> None:
        if self._chances is not None and self._chances.random() < 0.02:
            raise DeadError

    def pause(self) -> timedelta:
        """How late a beat wakes up."""
        return timedelta(seconds=self._chances.uniform(0, 0.05) if self._chances else 0.001)

    def gap(self) -> timedelta:
        assert self._chances is not None
        return timedelta(seconds=self._chances.choice([0.0, 0.3, 5.0, LONGEST_GAP]))


class FatalClaims:
    """No claims, but the two moments at which there would be one."""

    def __init__(self, fate: Fate) -> None:
        self._fate = fate

    def take(self, firing: Firing) -> None:
        self._fate.maybe_die()

    def confirm(self) -> None:
        self._fate.maybe_die()


class FatalStore(FileStore):
    """A store before which, and after which, beats die."""

    fate: Fate

    def save(self, runs: Mapping[str, datetime]) -> None:
        self.fate.maybe_die()
        super().save(runs)


class Replay:
    """The beats of one day, one after the other."""

    def __init__(
        self, path: Path, length: timedelta, seed: int | None, deadline: float | None
    ) -> None:
        self.over = START + length
        self.fate = Fate(None if seed is None else random.Random(seed))
        self.store = FatalStore(str(path))
        self.store.fate = self.fate
        self.path = path
        self.sent: list[tuple[str, str, datetime]] = []
        self.gaps: list[tuple[datetime, datetime]] = []
        self.app = Clock("replay", broker="memory://", set_as_current=False)
        self.app.conf.update(
            timezone="Europe/Berlin",
            beat_cron_starting_deadline=deadline,
            beat_schedule={
                name: {"task": name, "schedule": each} for name, each in self.schedules().items()
            },
        )
        self.app.send_task = self.send

    @staticmethod
    def schedules() -> dict[str, Any]:
        return {
            "every minute": schedule(60),
            "every seven minutes": schedule(420),
            "relative": schedule(3600, relative=True),
            "cron minutes": crontab(minute="*/5"),
            "cron nightly": crontab(minute=30, hour=4),
            "cron morning": crontab(minute=15, hour=6),
            "sunset": solar("sunset", 52.5, 13.4),
            "sunrise": solar("sunrise", 52.5, 13.4),
        }

    def send(self, task: str, *_: Any, task_id: str, headers: dict[str, Any], **__: Any) -> None:
        self.fate.maybe_die()
        due = datetime.fromisoformat(headers[FIRING]["due"])
        assert due <= self.app.time, "too early"
        self.sent.append((task_id, task, due))
        self.fate.maybe_die()

    def run(self) -> set[tuple[str, str, datetime]]:
        while self.app.time < self.over:
            try:
                self.lead()
            except DeadError:
                died = self.app.time
                if not self.gaps or died - self.gaps[-1][1] > timedelta(minutes=1):
                    self.app.time += self.fate.gap()
                self.gaps.append((died, self.app.time))
        # What is due at the very end may be sent after it.
        end = self.over - timedelta(minutes=2)
        return {firing for firing in self.sent if firing[2] < end}

    def lead(self) -> None:
        lead = Lead(HeldLock(), FatalClaims(self.fate), self.store)  # type: ignore[arg-type]
        inner = led(SilentScheduler, lead)(self.app)
        restore(inner, self.store)
        while self.app.time < self.over:
            self.fate.maybe_die()
            wait = inner.tick()
            self.app.time += timedelta(seconds=max(0.0, wait)) + self.fate.pause()

    def is_excluded(self, task: str, due: datetime, deadline: float | None) -> bool:
        """Whether a firing was missed for longer than the deadline."""
        is_cron = isinstance(self.schedules()[task], crontab)
        late = (end - due for died, end in self.gaps if died - timedelta(seconds=2) <= due <= end)
        limit = timedelta(seconds=deadline or DAY.total_seconds())
        return is_cron and any(lateness >= limit for lateness in late)


class SilentScheduler(Scheduler):
    """Celery's scheduler, without a connection to a broker."""

    producer = None

    def apply_entry(self, entry: ScheduleEntry, producer: Any = None) -> None:
        self.apply_async(entry, producer=producer, advance=False)


@cache
def alone(length: timedelta, deadline: float | None) -> set[tuple[str, str, datetime]]:
    """What one beat sends that never dies."""
    pytest.importorskip("ephem")
    with TemporaryDirectory() as directory:
        return Replay(Path(directory) / "runs", length, None, deadline).run()


def compare(tmp_path: Path, length: timedelta, seed: int, deadline: float | None) -> None:
    expected = alone(length, deadline)
    several = Replay(tmp_path / "runs", length, seed, deadline)
    sent = several.run()

    assert len(several.gaps) > 30
    assert len({task for _, task, _ in alone(length, None)}) == len(several.schedules())
    missed = {f for f in expected - sent if not several.is_excluded(f[1], f[2], deadline)}
    assert not missed
    assert not sent - expected
    assert sent == expected or deadline is not None
    repeated = [each for each in Counter(several.sent).values() if each > 1]
    assert 0 < len(repeated) < len(several.gaps)


def test_a_night_with_fail_overs(tmp_path: Path) -> None:
    compare(tmp_path, NIGHT, 1, None)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 22))
def test_many_days_with_fail_overs(tmp_path: Path, seed: int) -> None:
    compare(tmp_path, DAY, seed, None if seed % 2 else 10)
