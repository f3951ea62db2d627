"""What happens between the question to the lock server and the message."""

from __future__ import annotations

import dbm
import errno
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from celery import Celery
from celery.beat import ScheduleEntry, Scheduler
from kombu.exceptions import EncodeError, OperationalError

from celery_dflock.beat import DflockScheduler, leadership
from celery_dflock.beat.claims import Claims
from celery_dflock.beat.config import DEFAULT_LOCK_TTL
from celery_dflock.beat.firing import Firing
from celery_dflock.beat.leadership import Lead, NotLeadingError, led
from celery_dflock.config import settings
from celery_dflock.outcome.header import FIRING
from dflockd import admin, clock
from dflockd.errors import LockLostError
from dflockd.sync_client import DistributedLock
from examples.demo.stage import LockServer, wait_until


class NoClaims:
    def take(self, firing: Any) -> None: ...

    def confirm(self) -> None: ...

    def leave(self) -> None: ...


class LeaseThatEnds:
    """The process is stopped right after the lock server has said that it leads."""

    key, held, fence = "beat", True, 1

    def renew(self) -> bool:
        self.held = False
        return True

    def check(self) -> None:
        if not self.held:
            raise LockLostError("it is not")


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


def test_a_leader_whose_clock_is_set_back_stands_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for the times of before."""
    day = 1e9
    monkeypatch.setattr(leadership, "time", SimpleNamespace(time=lambda: day + clock.now()))
    lock = SimpleNamespace(state="held", held=True)
    lead = Lead(lock, NoClaims(), None)  # type: ignore[arg-type]
    assert lead.still_leads()
    day += 3600  # forward is no matter
    assert lead.still_leads()
    day -= 290
    assert lead.still_leads()
    day -= 20
    with pytest.raises(NotLeadingError, match="its clock was set back by 310 s"):
        lead.still_leads()


def test_the_claim_of_a_firing_that_was_not_sent_outlives_the_next_term(
    lock_server: LockServer,
) -> None:
    claims = Claims("left", settings(app(dflock_servers=[lock_server.address])[0]))
    firing = Firing("left", "job", datetime.now(UTC))
    claims.take(firing)
    for unsent in (True, False):  # in the second one the broker was away, before it was sent again
        Lead(LeaseThatEnds(), claims, None).give_up(unsent)  # type: ignore[arg-type]
    assert claims.left(["job"]) == firing
    claims.clear()


def test_a_firing_that_is_sent_again_leaves_its_entry_alone(
    lock_server: LockServer, tmp_path: Path
) -> None:
    """Celery writes the schedule to its file and reads it again before it is done with sending."""
    proj, _ = app(
        dflock_servers=lock_server.address,
        dflock_beat_lock_key="again",
        dflock_beat_store=f"file:{tmp_path / 'runs'}",
    )
    ids: list[str] = []
    proj.send_task = lambda *_, task_id, headers, **__: ids.append(
        f"{task_id} {headers[FIRING]['id']}"
    )
    claimed = Firing("again", "job", datetime.now(UTC) + timedelta(hours=1))
    Claims("again", settings(proj)).take(claimed)

    scheduler = DflockScheduler(proj, schedule_filename=str(tmp_path / "schedule"))
    assert scheduler.tick() == 0
    assert ids == [f"{claimed.id} {claimed.id}"]
    assert scheduler.schedule["job"].options == {}
    scheduler.schedule["job"].last_run_at -= timedelta(minutes=1)
    assert scheduler.tick() == 0
    assert 0 < scheduler.tick() <= DEFAULT_LOCK_TTL / 3  # often enough to notice a loss
    scheduler.close()
    _, then = ids
    assert len(set(then.split())) == 1
    assert claimed.id not in then


class WritesFirst(Scheduler):
    """Writes down that an entry has been before it is sent, for all beats, as RedBeat does."""

    runs: ClassVar[dict[str, datetime]] = {}
    then: ClassVar[Callable[[Any], None]] = lambda _: None

    def setup_schedule(self) -> None:
        super().setup_schedule()
        self.merge_inplace(self.app.conf.beat_schedule)
        for name, at in self.runs.items():
            self.schedule[name].last_run_at = at

    def reserve(self, entry: ScheduleEntry) -> ScheduleEntry:
        after = super().reserve(entry)
        self.runs[entry.name] = after.last_run_at
        type(self).then(self)
        return after


@pytest.mark.parametrize("who", ["itself", "another"])
def test_the_lease_ends_when_a_firing_is_written_down_and_not_sent(
    lock_server: LockServer, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """It is sent by the next leader: nobody would find it due again."""
    name = f"written-{who}"
    proj, sent = app(
        dflock_servers=lock_server.address,
        dflock_beat_lock_key=name,
        dflock_beat_scheduler=WritesFirst,
    )
    monkeypatch.setattr(WritesFirst, "runs", {})
    scheduler = DflockScheduler(proj)
    assert scheduler.tick() == 0

    def lose(_: Any) -> None:
        [holder] = admin.inspect(lock_server.address, name)["holders"]
        admin.evict(lock_server.address, name, holder["fence"])
        assert not scheduler._lock.renew()

    monkeypatch.setattr(WritesFirst, "then", lose)
    scheduler.schedule["job"].last_run_at -= timedelta(minutes=1)
    assert scheduler.tick() == 0
    assert scheduler.schedule == {}
    assert not sent

    following = scheduler if who == "itself" else DflockScheduler(proj)
    assert following.tick() == 0
    assert sent == ["job"]
    assert following.tick() > 0
    assert sent == ["job"]
    for each in (scheduler, following):
        each.close()
    assert not admin.inspect(lock_server.address, f"{name}:claim")["holders"]


@pytest.fixture(params=["remembers", "forgets"])
def restarted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LockServer]:
    """A lock server of its own, which knows after a restart what it knew before, or does not."""
    options = ["--state-dir", str(tmp_path / "state")] if request.param == "remembers" else []
    with LockServer(tmp_path, *options, name=request.param) as server:
        yield server


@pytest.fixture
def in_doubt(restarted: LockServer, tmp_path: Path) -> Iterator[tuple[DflockScheduler, list[str]]]:
    """A beat that leads and has lost its connection, and what it sends; an entry is due."""
    proj, sent = app(
        dflock_servers=restarted.address,
        dflock_beat_lock_key="doubt",
        dflock_beat_lock_ttl=60,
        dflock_beat_store=f"file:{tmp_path / 'runs'}",
        dflock_beat_scheduler="celery.beat:Scheduler",
    )
    scheduler = DflockScheduler(proj, max_interval=1)
    assert scheduler.tick() == 0
    scheduler.schedule["job"].last_run_at -= timedelta(minutes=1)
    restarted.kill()
    wait_until(
        lambda: scheduler._lock.state == "doubtful" or None, 20, lambda: f"{scheduler._lock!r}"
    )
    yield scheduler, sent
    scheduler.close()


def test_it_sends_nothing_in_doubt_and_leads_on(
    in_doubt: tuple[DflockScheduler, list[str]],
    restarted: LockServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    (scheduler, sent), fence = in_doubt, in_doubt[0]._lock.fence
    for _ in range(3):
        assert 0 < scheduler.tick() < 1
    assert not sent
    assert "job" in scheduler.schedule
    said = [r.getMessage() for r in caplog.records if "in doubt" in r.getMessage()]
    assert len(said) == 1

    restarted.start()
    other = DistributedLock("doubt", 1, 60, [restarted.address])
    if restarted.name == "remembers":
        with pytest.raises(LockLostError):
            other.check()
        assert not other.acquire()
        scheduler._lock.check()
        assert scheduler.tick() == 0
        assert sent == ["job"]
        assert scheduler._lock.fence == fence
        assert any("still leading" in record.getMessage() for record in caplog.records)
        return
    # Somebody else leads by now: that is known at once, and not at the end of the lease.
    assert other.acquire()
    wait_until(lambda: scheduler._lock.state == "lost" or None, 20, lambda: f"{scheduler._lock!r}")
    assert scheduler.tick() == 0
    assert any("no longer leading" in record.getMessage() for record in caplog.records)
    assert scheduler.schedule == {}
    assert not sent
    other.release()


def test_in_doubt_with_a_firing_in_its_hands(
    in_doubt: tuple[DflockScheduler, list[str]], restarted: LockServer
) -> None:
    """It waits, and sends it if it still leads."""
    scheduler, sent = in_doubt
    inner = scheduler._inner
    back = threading.Timer(0.5, restarted.start)
    back.start()
    try:
        if restarted.name == "remembers":
            inner.apply_entry(inner.schedule["job"])
        else:
            with pytest.raises(NotLeadingError):
                inner.apply_entry(inner.schedule["job"])
    finally:
        back.join()
    assert sent == (["job"] if restarted.name == "remembers" else [])


class LogsErrors(WritesFirst):
    """Goes on after an error of one entry, as RedBeat does."""

    def tick(self) -> float:
        try:
            return float(super().tick())
        except Exception:
            return 0.0


@pytest.mark.parametrize("cls", [WritesFirst, LogsErrors])
def test_a_firing_that_may_be_written_down_in_spite_of_an_error(
    lock_server: LockServer, monkeypatch: pytest.MonkeyPatch, cls: type[WritesFirst]
) -> None:
    """The connection to the store broke before its answer came."""
    name = f"unanswered-{cls.__name__}"
    proj, sent = app(
        dflock_servers=lock_server.address, dflock_beat_lock_key=name, dflock_beat_scheduler=cls
    )
    proj.conf.beat_schedule["other"] = proj.conf.beat_schedule["job"] | {"task": "other"}
    monkeypatch.setattr(WritesFirst, "runs", {})
    scheduler = DflockScheduler(proj)
    assert scheduler.tick() == 0

    errors: list[Exception] = [ConnectionResetError()]

    def broke(_: Any) -> None:
        if errors:
            raise errors.pop()

    monkeypatch.setattr(WritesFirst, "then", broke)
    for entry in scheduler.schedule.values():
        entry.last_run_at -= timedelta(minutes=1)
        WritesFirst.runs[entry.name] = entry.last_run_at
    for _ in range(10):
        scheduler.tick()
    assert sorted(sent) == ["job", "other"]
    scheduler.close()


def test_a_claimed_firing_that_cannot_be_sent_keeps_nobody_from_leading(
    lock_server: LockServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It is left out, as it is when it is due; but not while the broker is away."""
    proj, _ = app(
        dflock_servers=lock_server.address,
        dflock_beat_lock_key="unsendable",
        dflock_beat_scheduler=Scheduler,
        dflock_beat_store=False,
    )
    proj.conf.beat_schedule = {"job": {"task": "job", "schedule": 60.0}}
    errors: list[Exception] = [OperationalError("away"), EncodeError("no such argument")]

    def send_task(*_: Any, **__: Any) -> None:
        raise errors.pop(0)

    proj.send_task = send_task
    claimed = Firing("unsendable", "job", datetime.now(UTC) + timedelta(hours=1))
    Claims("unsendable", settings(proj)).take(claimed)
    scheduler = DflockScheduler(proj)
    assert scheduler.tick() > 0
    assert scheduler._inner is None
    assert scheduler.tick() == 0
    assert scheduler._inner is not None, caplog.text
    assert f"{claimed} cannot be sent, it is left out" in caplog.text
    assert not admin.inspect(lock_server.address, "unsendable:claim")["holders"]
    scheduler.close()


def test_an_error_while_it_writes_ends_nothing_but_the_term(
    lock_server: LockServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Celery asks for that between two ticks too: an error there would end the beat."""
    proj, _ = app(
        dflock_servers=lock_server.address,
        dflock_beat_lock_key="full",
        dflock_beat_scheduler=WritesFirst,
    )
    scheduler = DflockScheduler(proj)
    assert scheduler.tick() == 0

    def full(_: Any) -> None:
        monkeypatch.undo()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(WritesFirst, "sync", full)
    assert scheduler.should_sync()
    scheduler._do_sync()
    assert scheduler._inner is None
    assert scheduler.tick() == 0
    assert scheduler._inner is not None
    scheduler.close()


def test_who_does_not_lead_writes_nothing(lock_server: LockServer, tmp_path: Path) -> None:
    """Nor does who leads no more."""
    proj, _ = app(
        dflock_servers=lock_server.address,
        dflock_beat_lock_key="quiet",
        dflock_beat_store=f"file:{tmp_path / 'runs'}",
    )

    def written(name: str) -> dict[bytes, bytes]:
        """What the shelf holds. Of a copy: its files change by being opened, in some formats."""
        files = list(tmp_path.glob(f"{name}*"))
        if not files:
            return {}
        with tempfile.TemporaryDirectory() as copies:
            for path in files:
                shutil.copy(path, copies)
            with dbm.open(str(Path(copies) / name)) as values:
                names = values.keys()
                return {bytes(name): bytes(values[name]) for name in names}

    one, two = (
        DflockScheduler(proj, schedule_filename=str(tmp_path / name), max_interval=most)
        for name, most in (("one", 60), ("two", 1))
    )
    assert one.tick() == 0
    one.schedule["job"].total_run_count = 7
    before = written("one")
    assert before
    assert two.tick() == 0
    assert two.schedule == {}
    assert not written("two")

    [holder] = admin.inspect(lock_server.address, "quiet")["holders"]
    admin.evict(lock_server.address, "quiet", holder["fence"])
    one.schedule["job"].last_run_at -= timedelta(minutes=1)
    assert one.tick() == 0
    assert one.schedule == {}
    assert written("one") == before
    assert two.tick() == 0
    assert "job" in two.schedule
    for each in (one, two):
        each.close()


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
    assert "is not a file of last runs" in record.getMessage()
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
    [record] = [r for r in caplog.records if "no beat can lead" in r.getMessage()]
    assert gone.address in record.getMessage()
    scheduler.close()
