"""The pytest plugin, in this process."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from celery import Celery

from celery_dflock import current_lock, dflock
from celery_dflock.config import settings
from celery_dflock.testing import ConfigureApp, DflockdServer, assert_locked, assert_not_locked
from tests.celery_dflock.test_eager import locked


def test_messages(dflock_app: ConfigureApp, dflockd_server: DflockdServer, key: str) -> None:
    app = dflock_app(Celery("messages", set_as_current=False), dflock_key_prefix="shop:")
    server = re.escape(dflockd_server.address)
    name = re.escape(f"'shop:{key}'")

    assert_not_locked(key, app)
    with pytest.raises(AssertionError) as failure:
        assert_locked(key, app)
    assert re.fullmatch(
        rf"lock {name} is not held on {server}; that server holds no lock", str(failure.value)
    )
    with dflock(f"{key}:other", app=app), dflock(f"{key}:three", limit=3, app=app):
        with pytest.raises(AssertionError, match=rf"; held there: '{name[1:-1]}:other', "):
            assert_locked(key, app)
        assert_locked(f"{key}:three", app)
    with dflock(key, app=app):
        assert_locked(key, app)
        with pytest.raises(AssertionError) as failure:
            assert_not_locked(key, app)
    assert re.fullmatch(rf"lock {name} on {server} is held by .+ for \d\.\d s", str(failure.value))
    assert_not_locked(key, app)


@pytest.fixture
def namespaced() -> Iterator[Celery]:
    """An app that is as it was once `dflock_app` has ended: that is made later, so it ends first."""
    app = Celery("namespaced", set_as_current=False)
    app.config_from_object(
        {"CELERY_DFLOCK_SERVERS": ["lock-1"], "CELERY_DFLOCK_ENABLED": False}, namespace="CELERY"
    )
    app.conf.dflock_unavailable = "fail"
    yield app
    found = settings(app)
    assert (found.servers, found.enabled) == ((("lock-1", 6388),), False)
    assert found.unavailable == "fail"


def test_a_namespace_is_shadowed_for_the_test(
    namespaced: Celery, dflock_app: ConfigureApp, dflockd_server: DflockdServer
) -> None:
    dflock_app(namespaced)
    dflock_app(namespaced, dflock_unavailable="run")
    found = settings(namespaced)
    assert found.servers == ((dflockd_server.host, dflockd_server.port),)
    assert (found.enabled, found.unavailable) == (True, "run")


def test_switched_off_says_so_once(caplog: pytest.LogCaptureFixture, key: str) -> None:
    app = Celery("off", set_as_current=False)
    app.conf.update(dflock_enabled=False, task_always_eager=True, dflock_servers=["127.0.0.1:1"])

    @locked(app)
    def task(key: str) -> bool:
        return current_lock() is None

    assert task.delay(key).get()
    assert task.delay(key).get()
    assert [record.message for record in caplog.records if "switched off" in record.message] == [
        "locking is switched off: tasks of app 'off' run without locks"
    ]
