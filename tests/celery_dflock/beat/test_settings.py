"""The settings of beat, and where the last runs are kept."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.beat import PersistentScheduler, Scheduler, Service
from celery.exceptions import ImproperlyConfigured

from celery_dflock.beat import DflockScheduler
from celery_dflock.beat.config import beat_settings
from celery_dflock.beat.store import FileStore, RedisStore, store_for

RUNS = {
    "a": datetime(2026, 3, 1, 12, 0, 0, 250_000, tzinfo=UTC),
    "b c": datetime(2026, 3, 2, tzinfo=UTC),
}


class Remembering(Scheduler):
    """Shares the last runs in its own way."""

    def sync(self) -> None: ...


def app(**conf: Any) -> Celery:
    made = Celery("proj", broker="memory://", set_as_current=False)
    made.conf.update(conf)
    return made


@pytest.mark.parametrize(
    ("setting", "value", "text"),
    [
        ("dflock_beat_scheduler", "no.such:Scheduler", "'no.such:Scheduler': No module named"),
        ("dflock_beat_scheduler", "celery.beat:Nothing", "'celery.beat:Nothing': module"),
        ("dflock_beat_scheduler", "dflock", "is 'dflock': give the scheduler that -S dflock"),
        ("dflock_beat_scheduler", 5, "is 5: give the scheduler"),
        ("dflock_beat_lock_key", "my beat", "'my beat': give text without white space"),
        ("dflock_beat_lock_key", 5, "is 5: give text"),
        ("dflock_beat_lock_ttl", 0, "is 0: give whole seconds, 1 or more"),
        ("dflock_beat_lock_ttl", 2.5, "is 2.5: give whole seconds, 1 or more"),
        ("dflock_beat_lock_ttl", True, "is True: give whole seconds, 1 or more"),
        ("dflock_beat_store", "mysql://u:very-secret@h/d", "begins with 'mysql': give redis"),
        ("dflock_beat_store", True, "begins with True: give redis"),
        ("dflock_enabled", False, "is False: start beat without -S dflock, or enable locks"),
    ],
)
def test_bad_setting(setting: str, value: object, text: str) -> None:
    with pytest.raises(ImproperlyConfigured) as refused:
        beat_settings(app(**{setting: value}))
    message = str(refused.value)
    assert message.startswith(setting)
    assert text in message
    assert "\n" not in message
    assert "very-secret" not in message


def test_defaults() -> None:
    settings = beat_settings(app(dflock_key_prefix="shop:"))
    assert settings.scheduler is PersistentScheduler
    assert settings.lock_key == "shop:celery-beat:proj"
    assert settings.lock_ttl == 10
    assert beat_settings(Celery(set_as_current=False)).lock_key == "celery-beat"


@pytest.mark.parametrize(
    ("scheduler", "url", "kind"),
    [
        ("celery.beat:Scheduler", None, FileStore),
        (f"{__name__}:Remembering", None, type(None)),
        (f"{__name__}:Remembering", "file:/somewhere", FileStore),
        ("celery.beat:PersistentScheduler", False, type(None)),
        ("celery.beat:PersistentScheduler", None, FileStore),
        ("celery.beat:PersistentScheduler", "redis://localhost/1", RedisStore),
        ("celery.beat:PersistentScheduler", "sentinel://localhost:26379", RedisStore),
    ],
)
def test_which_store(scheduler: str, url: Any, kind: type) -> None:
    proj = app(dflock_beat_scheduler=scheduler, dflock_beat_store=url)
    assert type(store_for(proj, beat_settings(proj), "schedule")) is kind


def test_the_redis_at_hand() -> None:
    broker = app(broker_url="redis://:very-secret@one/3", result_backend="redis://two/4")
    backend = app(result_backend="redis://two/4")
    stores = [str(store_for(each, beat_settings(each), None)) for each in (broker, backend)]
    assert stores[0].startswith("redis://:**@one:6379/3 celery-beat:proj:last-runs")
    assert "two" in stores[1]


@pytest.fixture(params=["redis", "file"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Make stores of the same last runs, as several beats have them."""
    if request.param == "file":
        return lambda: FileStore(str(tmp_path / "runs"))
    url = request.getfixturevalue("redis_url")
    proj = app(dflock_beat_store=url, dflock_key_prefix=f"{tmp_path.name}:")
    return lambda: store_for(proj, beat_settings(proj), None)


def test_what_one_saves_another_loads(stores: Any) -> None:
    one, two = stores(), stores()
    assert one.load() == two.load() == {}
    one.save(RUNS)
    assert two.load() == RUNS
    two.save({"a": RUNS["b c"]})
    two.forget({"b c", "none"})
    assert one.load() == {"a": RUNS["b c"]}
    for store in (one, two):
        store.close()


def test_a_file_that_is_something_else(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text('{"a": "yesterday"}')
    with pytest.raises(ValueError, match=r"is not a file of last runs .* remove it"):
        FileStore(str(tmp_path / "runs")).load()


def test_a_hash_that_is_something_else(redis_url: str, tmp_path: Path) -> None:
    proj = app(dflock_beat_store=redis_url, dflock_key_prefix=f"{tmp_path.name}:")
    store = store_for(proj, beat_settings(proj), None)
    assert isinstance(store, RedisStore)
    store._client().hset(store._key, "a", "yesterday")
    with pytest.raises(ValueError, match=r"last-runs is not a hash of last runs .* delete it"):
        store.load()
    store.close()


def test_the_banner_changes_nothing(tmp_path: Path) -> None:
    """Nor does it need a lock server."""
    proj = app(dflock_servers=["127.0.0.1:1"])
    service = Service(proj, schedule_filename=str(tmp_path / "schedule"), scheduler_cls="dflock")
    scheduler = service.get_scheduler(lazy=True)
    assert isinstance(scheduler, DflockScheduler)
    lines = scheduler.info.splitlines()
    assert lines[0] == "    . runs -> celery.beat.PersistentScheduler"
    assert lines[1] == f"    . db -> {tmp_path / 'schedule'}"
    assert lines[2].endswith("schedule.dflock.json, for this host only")
    assert lines[3] == "    . lock -> celery-beat:proj on 127.0.0.1:1 (10s)"
    assert lines[4].startswith("    . leader -> not known: ")
    assert scheduler.max_interval == 300
    scheduler.close()
    assert not list(tmp_path.iterdir())
