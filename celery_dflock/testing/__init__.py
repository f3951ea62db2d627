"""A pytest plugin: a real lock server for tests, assertions on locks, and a way to switch them off.

pytest loads it if celery-dflock is installed. It starts no server and imports no Celery until a
test uses one of the fixtures.

    def test_transfer(dflock_app, celery_app, celery_worker):
        dflock_app(celery_app)
        ...
        assert_not_locked("account:7", celery_app)
"""

from __future__ import annotations

import collections
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import pytest

if TYPE_CHECKING:
    from celery import Celery

    from celery_dflock.config import Settings
    from celery_dflock.testing.calls import supersede, turn_order, use_up_rate

__all__ = [
    "ConfigureApp",
    "DflockdServer",
    "assert_locked",
    "assert_not_locked",
    "dflock_app",
    "dflock_off",
    "dflockd_server",
    "supersede",
    "turn_order",
    "use_up_rate",
]

START_TIMEOUT = 20.0
"""Seconds that the server may take to listen."""

STOP_TIMEOUT = 10.0
"""Seconds that the server may take to end before it is killed."""

_LISTENING = re.compile(r"listening on (\S+):(\d+)$")


@dataclass(frozen=True, slots=True)
class DflockdServer:
    """A lock server on this machine."""

    host: str
    port: int

    @property
    def address(self) -> str:
        """The value for ``dflock_servers`` or the variable ``DFLOCK_SERVERS``."""
        return f"{self.host}:{self.port}"


class ConfigureApp(Protocol):
    """What the fixture `dflock_app` returns."""

    def __call__(self, app: Celery | None = None, **settings: Any) -> Celery:
        """Make `app` (default: the current app) use the server of the tests, and return the app.

        You can give other settings too, such as ``dflock_key_prefix="test:"``. The end of the test
        restores all of them.
        """


@pytest.fixture(scope="session")
def dflockd_server() -> Iterator[DflockdServer]:
    """A lock server for this test run: a separate process on a free port of 127.0.0.1."""
    log: collections.deque[str] = collections.deque(maxlen=20)
    ports: queue.SimpleQueue[int | None] = queue.SimpleQueue()
    # Variables win over flags, and one that is meant for another server must not.
    env = {name: value for name, value in os.environ.items() if not name.startswith("DFLOCKD_")}
    process = subprocess.Popen(
        # A second is enough for those who still hold a lock at the end of the tests.
        [
            *(sys.executable, "-P", "-m", "dflockd", "--host", "127.0.0.1", "--port", "0"),
            *("--shutdown-timeout", "1"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=env,
        text=True,
        errors="replace",
    )

    def read() -> None:
        assert process.stderr is not None
        with process.stderr as lines:
            for line in lines:
                log.append(line)
                if found := _LISTENING.search(line):
                    ports.put(int(found[2]))
        ports.put(None)

    reader = threading.Thread(target=read, name="dflockd-log", daemon=True)
    reader.start()
    try:
        try:
            port = ports.get(timeout=START_TIMEOUT)
        except queue.Empty:
            port = None
        if port is None:
            said = "".join(log) or "(nothing)"
            pytest.fail(f"the lock server did not start; it said:\n{said}", pytrace=False)
        yield DflockdServer("127.0.0.1", port)
        from dflockd.client.process import close_idle_connections

        close_idle_connections()
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_TIMEOUT)
        reader.join(STOP_TIMEOUT)


@pytest.fixture
def dflock_app(dflockd_server: DflockdServer, monkeypatch: pytest.MonkeyPatch) -> ConfigureApp:
    """A function that makes an app use `dflockd_server` until the end of the test.

    It accepts any app: the one of Celery's fixture `celery_app`, or one of yours whose tasks are
    registered already.
    """
    for variable in ("DFLOCK_AUTH_TOKEN", "DFLOCK_AUTH_TOKEN_FILE"):
        monkeypatch.delenv(variable, raising=False)

    def configure(app: Celery | None = None, **settings: Any) -> Celery:
        app = _app(app)
        values = {
            "dflock_servers": [dflockd_server.address],
            "dflock_auth_token": None,
            "dflock_use_ssl": None,
            "dflock_enabled": True,
            **settings,
        }
        for setting, value in values.items():
            for name in _names(app, setting):
                app.conf.get(name)  # a configuration that nobody has asked yet is not complete
                monkeypatch.setitem(app.conf.changes, name, value)
        return app

    return configure


@pytest.fixture
def dflock_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch locking off in this process for one test, so that no app needs a lock server.

    Locked tasks run their bodies at once, and ``current_lock()`` returns ``None`` in them. For a
    whole test run, request this fixture in one with ``autouse=True``, or set
    ``dflock_enabled = False``.
    """
    from celery_dflock import config

    monkeypatch.setattr(config, "switched_off", True)


def __getattr__(name: str) -> Any:
    # What is done to calls needs Celery, which is not imported before a test wants it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from celery_dflock.testing import calls

    return getattr(calls, name)


def assert_locked(key: str, app: Celery | None = None) -> None:
    """Fail unless the lock is held.

    Args:
        key: a `LockKey`, such as ``sync.lock_keys(7)[0]``, or a text, as for `dflock`.
        app: the app whose settings apply. Default: the current app.
    """
    __tracebackhide__ = True
    from dflockd import admin

    settings = _settings(app)
    if not settings.enabled:
        _fail(f"lock {key!r} is not held: locking is switched off")
    lock = _AtServer(key, settings)
    if not lock.holders:
        report = admin.stats(lock.server, **settings.credentials())
        held = sorted(entry["key"] for entry in report["locks"] + report["semaphores"])
        others = ", ".join(map(repr, held[:10])) + (", ..." if len(held) > 10 else "")
        _fail(
            f"lock {lock.name!r} is not held on {lock.server}; "
            + (f"held there: {others}" if held else "that server holds no lock")
        )


def assert_not_locked(key: str, app: Celery | None = None) -> None:
    """Fail if the lock is held. The message names the holder and says for how long.

    It takes the arguments of `assert_locked`.
    """
    __tracebackhide__ = True
    settings = _settings(app)
    if not settings.enabled:
        return
    lock = _AtServer(key, settings)
    if lock.holders:
        by = ", ".join(
            f"{entry['label'] or 'connection {conn_id}'.format(**entry)} "
            f"for {entry['held_s']:.1f} s"
            for entry in lock.holders
        )
        waiting = f"; {len(lock.waiters)} wait for it" if lock.waiters else ""
        _fail(f"lock {lock.name!r} on {lock.server} is held by {by}{waiting}")


class _AtServer:
    """What the server in charge says about a key, be it a lock or a semaphore."""

    def __init__(self, key: str, settings: Settings) -> None:
        from celery_dflock import keys
        from dflockd.sync_client import DistributedLock

        self.name = keys.finished(key, settings.key_prefix)
        lock = DistributedLock(self.name, **settings.connection_options())
        report = lock.inspect()
        self.server = lock.server  # now it is known in a cluster as well
        self.holders, self.waiters = report["holders"], report["waiters"]


def _app(app: Celery | None) -> Celery:
    from celery_dflock.checks import check_app

    check_app(app)
    if app is not None:
        return app
    from celery import current_app

    return current_app._get_current_object()


def _settings(app: Celery | None) -> Settings:
    from celery_dflock.config import settings

    return settings(_app(app))


def _names(app: Celery, setting: str) -> tuple[str, ...]:
    """Return the names under which the app looks for a setting."""
    namespace = app.namespace
    if not namespace:
        return (setting,)
    full = f"{namespace.rstrip('_')}_{setting}"
    # Celery up to 5.6 prefers what is in the namespace to what was set later without.
    return (full.upper() if namespace.isupper() else full.lower()), setting


def _fail(message: str) -> NoReturn:
    __tracebackhide__ = True
    raise AssertionError(message)
