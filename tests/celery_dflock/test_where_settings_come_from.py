"""Where settings come from: the app, its namespace, Django, the environment."""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured

from celery_dflock import current_lock
from celery_dflock.config import settings
from examples.demo.stage import LockServer
from tests.celery_dflock.test_eager import locked


def test_namespace() -> None:
    app = Celery("namespace", set_as_current=False)
    app.config_from_object(
        {
            "CELERY_DFLOCK_SERVERS": ["lock-1:6388", "lock-2"],
            "CELERY_DFLOCK_UNAVAILABLE": "fail",
            "CELERY_DFLOCK_KEY_PREFIX": "shop:",
        },
        namespace="CELERY",
    )
    found = settings(app)
    assert found.servers == (("lock-1", 6388), ("lock-2", 6388))
    assert (found.unavailable, found.key_prefix) == ("fail", "shop:")


class DjangoLike:
    """As Django's settings: an object with all names in capitals, some of which change in tests."""

    CELERY_DFLOCK_SERVERS: ClassVar = ["lock-1:6388"]
    CELERY_DFLOCK_AUTH_TOKEN = "of-the-project"
    CELERY_DFLOCK_SHARDING_STRATEGY = f"{__name__}:last_server"
    CELERY_DFLOCK_ENABLED = True
    CELERY_TASK_ALWAYS_EAGER = True
    CELERY_TASK_ANNOTATIONS: ClassVar = {"annotated": {"lock_ttl": 7}}
    DFLOCK_UNAVAILABLE = "of another package: it is in no namespace"


@pytest.mark.parametrize("namespace", [None, "CELERY", "celery", "Celery_"])
@pytest.mark.parametrize("project", [type("Project", (), {}), ModuleType("project")])
def test_a_change_of_the_settings_is_seen_wherever_it_is_made(
    namespace: str | None, project: Any
) -> None:
    app = Celery("changing", set_as_current=False)
    app.config_from_object(project, namespace=namespace)
    assert settings(app) is settings(app)
    name = "dflock_key_prefix"
    long = f"{(namespace or '').rstrip('_')}_{name}"
    values = iter(f"{number}:" for number in range(100))

    def check() -> str:
        found = settings(app).key_prefix
        assert found == (app.conf.get(name) or "")
        return found

    seen = set()
    for spelling in (name, long, long.lower(), long.upper()):
        setattr(project, spelling, next(values))
        seen.add(check())
        delattr(project, spelling)
        seen.add(check())
    app.conf.add_defaults({name: next(values)})
    seen.add(check())
    for value in (next(values), None):
        for spelling in (name, long, long.lower(), long.upper()):
            app.conf[spelling] = value
            seen.add(check())
    assert len(seen) >= 4
    app.conf.changes.clear()
    assert check() in seen


def test_a_module_that_makes_its_settings_up() -> None:
    project = ModuleType("project")
    made_up = {"CELERY_DFLOCK_KEY_PREFIX": "one:"}

    def make_up(name: str) -> str:
        try:
            return made_up[name]
        except KeyError:
            raise AttributeError(name) from None

    project.__getattr__ = make_up  # type: ignore[method-assign]
    app = Celery("made-up", set_as_current=False)
    app.config_from_object(project, namespace="CELERY")
    assert settings(app).key_prefix == "one:"
    made_up["CELERY_DFLOCK_KEY_PREFIX"] = "other:"
    assert settings(app).key_prefix == "other:"


def test_what_stands_in_for_settings_is_looked_at_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = Celery("standing-in", set_as_current=False)
    for host in ("lock-1", "lock-2"):
        monkeypatch.setenv("DFLOCK_SERVERS", host)
        monkeypatch.setenv("DFLOCK_AUTH_TOKEN", f"for-{host}")
        assert settings(app).servers == ((host, 6388),)
        assert settings(app).auth_token == f"for-{host}"
    assert settings(app).enabled
    monkeypatch.setattr("celery_dflock.config.switched_off", True)
    assert not settings(app).enabled


def test_a_list_of_servers_that_is_changed_in_place() -> None:
    app = Celery("in-place", set_as_current=False)
    app.conf.dflock_servers = ["lock-1"]
    assert len(settings(app).servers) == 1
    app.conf.dflock_servers.append("lock-2")
    assert len(settings(app).servers) == 2


def test_django_settings(lock_server: LockServer, key: str) -> None:
    project = DjangoLike()
    app = Celery("project", set_as_current=False)
    app.config_from_object(project, namespace="CELERY")

    @locked(app, name="annotated")
    def task(key: str) -> str:
        lock = current_lock()
        return lock.key if lock else "unlocked"

    found = settings(app)
    assert found.servers == (("lock-1", 6388),)
    assert (found.auth_token, found.unavailable) == ("of-the-project", "requeue")
    assert found.sharding_strategy is last_server
    assert task._lock_options.ttl == 7

    # What override_settings() does in a test.
    project.CELERY_DFLOCK_SERVERS = [lock_server.address]
    project.CELERY_DFLOCK_AUTH_TOKEN = None
    project.CELERY_DFLOCK_KEY_PREFIX = "shop:"
    assert task.delay(key).get() == f"shop:{key}"
    project.CELERY_DFLOCK_ENABLED = False
    assert task.delay(key).get() == "unlocked"
    project.CELERY_DFLOCK_ENABLED = "off"
    with pytest.raises(ImproperlyConfigured, match="dflock_enabled is 'off': give True or False"):
        task.apply((key,), throw=True)


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLOCK_SERVERS", "lock-1, lock-2:7000,unix:/run/dflockd.sock")
    monkeypatch.setenv("DFLOCK_AUTH_TOKEN", "from-there")
    app = Celery("environment", set_as_current=False)
    assert settings(app).servers == (
        ("lock-1", 6388),
        ("lock-2", 7000),
        ("unix:/run/dflockd.sock", 0),
    )
    assert settings(app).auth_token == "from-there"

    app.conf.dflock_servers = "lock-3"
    app.conf.dflock_auth_token = "from-here"
    assert settings(app).servers == (("lock-3", 6388),), "what the app says comes first"
    assert settings(app).auth_token == "from-here"


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DFLOCK_SERVERS", raising=False)
    found = settings(Celery("defaults", set_as_current=False))
    assert found.servers == (("127.0.0.1", 6388),)
    assert (found.unavailable, found.key_prefix, found.auth_token) == ("requeue", "", None)


def test_sharding_strategy_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Celery("strategy", set_as_current=False)
    app.conf.dflock_sharding_strategy = f"{__name__}:last_server"
    assert settings(app).sharding_strategy is last_server


def last_server(_key: str, number: int) -> int:
    return number - 1
