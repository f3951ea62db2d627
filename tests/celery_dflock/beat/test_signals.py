"""A beat that a signal ends, wherever that meets it; and one in a thread, which no signal meets."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, signals
from celery.beat import EmbeddedService, Service

from celery_dflock.beat import DflockScheduler
from dflockd import admin
from examples.demo.stage import LockServer, wait_until
from tests.celery_dflock.beat.test_leadership import app


def beat_app(key: str, lock_server: LockServer, directory: Path) -> tuple[Celery, list[str]]:
    """An app whose beat keeps its last runs in a file, and what it has sent."""
    return app(
        dflock_servers=lock_server.address,
        dflock_beat_lock_key=key,
        dflock_beat_store=f"file:{directory / 'runs'}",
        dflock_beat_scheduler="celery.beat:Scheduler",
    )


def test_a_signal_while_it_sends(lock_server: LockServer, tmp_path: Path) -> None:
    """Celery's handler closes the scheduler, in the midst of whatever it is doing."""
    proj, sent = beat_app("signal", lock_server, tmp_path)
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
    [claim] = admin.inspect(lock_server.address, "signal:claim")["holders"]
    assert claim["label"].endswith(" of job")


def test_a_signal_in_a_destructor(lock_server: LockServer, tmp_path: Path) -> None:
    """Python ignores the SystemExit that the handler raises there."""
    proj, _ = beat_app("destructor", lock_server, tmp_path)
    scheduler = DflockScheduler(proj)
    assert scheduler.tick() == 0
    proj.send_task = lambda *_, **__: scheduler.close()
    scheduler.schedule["job"].last_run_at -= timedelta(minutes=1)
    with pytest.raises(SystemExit):
        scheduler.tick()
    scheduler.close()
    assert not admin.inspect(lock_server.address, "destructor")["holders"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_in_a_destructor_in_the_beat_of_a_worker(
    lock_server: LockServer, tmp_path: Path
) -> None:
    """The handler that such a process begins with raises SystemExit, and closes nothing."""
    proj, _ = beat_app("embedded", lock_server, tmp_path)

    class Ending:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        service = Service(proj, scheduler_cls="dflock")
        signals.beat_embedded_init.send(sender=service)
        assert service.scheduler.tick() == 0
        proj.send_task = lambda *_, **__: (Ending(), None)[1]
        service.scheduler.schedule["job"].last_run_at -= timedelta(minutes=1)
        with pytest.raises(SystemExit):
            service.scheduler.tick()
        service.sync()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not admin.inspect(lock_server.address, "embedded")["holders"]


def test_a_beat_in_a_thread(lock_server: LockServer, tmp_path: Path) -> None:
    proj, sent = app(
        dflock_servers=lock_server.address,
        dflock_beat_lock_key="thread",
        dflock_beat_store=f"file:{tmp_path / 'runs'}",
    )
    proj.conf.beat_schedule["job"]["schedule"] = 0.1
    path = str(tmp_path / "schedule")
    beat = EmbeddedService(proj, thread=True, scheduler_cls="dflock", schedule_filename=path)
    beat.start()
    wait_until(lambda: len(sent) > 1 or None, 20, lambda: f"sent {sent}")
    beat.stop()
    assert not admin.inspect(lock_server.address, "thread")["holders"]
    beat.join(20)
    assert not beat.is_alive()
