"""What happens between the question to the lock server and the message."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.beat import Scheduler

from celery_dflock.beat import DflockScheduler
from celery_dflock.beat.led import Lead, NotLeadingError, led
from dflockd import admin
from examples.demo.stage import LockServer


class NoClaims:
    def take(self, firing: Any) -> None: ...

    def confirm(self) -> None: ...


class LeaseThatEnds:
    """The process is stopped right after the lock server has said that it leads."""

    key, held, fence = "beat", True, 1

    def renew(self) -> bool:
        self.held = False
        return True


def app(**conf: Any) -> tuple[Celery, list[str]]:
    made, sent = Celery("led", broker="memory://", set_as_current=False), list[str]()
    made.conf.update(conf, beat_schedule={"job": {"task": "job", "schedule": 60.0}})
    made.send_task = lambda name, *_, **__: sent.append(name)
    return made, sent


def test_the_lease_ends_before_the_message_goes_out() -> None:
    proj, sent = app()
    lead = Lead(LeaseThatEnds(), NoClaims(), None)  # type: ignore[arg-type]
    inner = led(Scheduler, lead)(proj)
    with pytest.raises(NotLeadingError, match="its lease has ended"):
        inner.apply_entry(inner.schedule["job"])
    assert not sent


def test_a_signal_while_it_sends(lock_server: LockServer, tmp_path: Path) -> None:
    """Celery's handler closes the scheduler, in the midst of whatever it is doing."""
    proj, sent = app(
        dflock_servers=lock_server.address,
        dflock_beat_lock_key="signal",
        dflock_beat_store=f"file:{tmp_path / 'runs'}",
        dflock_beat_scheduler="celery.beat:Scheduler",
    )
    scheduler = DflockScheduler(proj)

    def holders() -> int:
        return len(admin.inspect(lock_server.address, "signal")["holders"])

    def handler(*_: Any, **__: Any) -> None:
        scheduler.close()
        assert holders() == 1
        raise SystemExit

    proj.send_task = handler
    assert scheduler.tick() == 0
    before = scheduler._store.load()["job"]
    scheduler.schedule["job"].last_run_at -= timedelta(minutes=1)
    with pytest.raises(SystemExit):
        scheduler.tick()
    assert not sent
    scheduler.close()
    scheduler.close()
    assert holders() == 0
    assert scheduler._store.load()["job"] == before  # it was not sent
    [claim] = admin.inspect(lock_server.address, "signal", semaphore=True)["holders"]
    assert claim["label"].endswith(" of job")


def test_a_signal_in_a_destructor(lock_server: LockServer, tmp_path: Path) -> None:
    """Python ignores the SystemExit that the handler raises there."""
    proj, _ = app(
        dflock_servers=lock_server.address,
        dflock_beat_lock_key="destructor",
        dflock_beat_store=f"file:{tmp_path / 'runs'}",
        dflock_beat_scheduler="celery.beat:Scheduler",
    )
    scheduler = DflockScheduler(proj)
    assert scheduler.tick() == 0
    proj.send_task = lambda *_, **__: scheduler.close()
    scheduler.schedule["job"].last_run_at -= timedelta(minutes=1)
    with pytest.raises(SystemExit):
        scheduler.tick()
    scheduler.close()
    assert not admin.inspect(lock_server.address, "destructor")["holders"]


def test_a_schedule_that_cannot_be_set_up(
    lock_server: LockServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another beat may be able to."""
    (tmp_path / "runs").write_text("something else")
    proj, _ = app(
        dflock_servers=lock_server.address,
        dflock_beat_lock_key="unable",
        dflock_beat_store=f"file:{tmp_path / 'runs'}",
    )
    scheduler = DflockScheduler(proj, schedule_filename=str(tmp_path / "schedule"))
    assert scheduler.tick() > 0
    assert scheduler.tick() > 0
    [record] = [r for r in caplog.records if "could not take over" in r.getMessage()]
    assert "holds no last runs" in record.getMessage()
    assert not admin.inspect(lock_server.address, "unable")["holders"]

    (tmp_path / "runs").unlink()
    assert scheduler.tick() == 0
    assert "job" in scheduler.schedule
    scheduler.close()


def test_no_lock_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LockServer(tmp_path) as gone:
        proj, _ = app(dflock_servers=gone.address)
    scheduler = DflockScheduler(proj, schedule_filename=str(tmp_path / "schedule"))
    assert scheduler.tick() > 0
    assert scheduler.tick() > 0
    [record] = [r for r in caplog.records if "nobody can lead" in r.getMessage()]
    assert gone.address in record.getMessage()
    scheduler.close()
