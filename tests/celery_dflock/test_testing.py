"""The pytest plugin, in test runs of its users: each a process of its own."""

from __future__ import annotations

import errno
import os
import re
import socket

import pytest

import celery_dflock
from examples.demo.stage import ROOT

pytest_plugins = ["pytester"]

BOUND = 100
"""Seconds for all tests of a user."""

APP = """
from celery import Celery
from celery_dflock import LockedTask, current_lock
from celery_dflock.testing import assert_locked, assert_not_locked

app = Celery("shop", broker="memory://", backend="cache+memory://")
app.conf.task_always_eager = True
app.conf.task_eager_propagates = True

@app.task(base=LockedTask, lock_key="account:{number}")
def sync(number):
    lock = current_lock()
    if lock is None:
        return None
    assert_locked(f"account:{number}", app)
    return lock.key
"""


@pytest.fixture
def user(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A directory with the tests of a user, where warnings are errors."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'server'}")
    # As on a machine that has a server of its own: none of these must matter.
    monkeypatch.setenv("DFLOCKD_PORT", "1")
    monkeypatch.setenv("DFLOCKD_AUTH_TOKEN", "of-another-server")
    monkeypatch.setenv("DFLOCK_AUTH_TOKEN", "of-another-server")
    monkeypatch.setenv("DFLOCK_SERVERS", "127.0.0.1:1")
    pytester.makeini(
        "[pytest]\nfilterwarnings = error\naddopts = -p no:cacheprovider -p no:asyncio"
    )
    pytester.makepyfile(shop=APP)
    return pytester


def run(user: pytest.Pytester, *tests: str, **outcomes: int) -> str:
    """Run files of tests, in their order and in one process."""
    user.makepyfile(**{f"test_shop_{number}": each for number, each in enumerate(tests)})
    result = user.runpytest_subprocess("-p", "no:randomly", timeout=BOUND)
    result.assert_outcomes(**outcomes)
    return result.stdout.str()


def test_pytest_finds_the_plugin_and_it_imports_nothing_heavy(user: pytest.Pytester) -> None:
    run(
        user,
        """
        import sys

        def test_start(request):
            assert request.config.pluginmanager.hasplugin("celery_dflock")
            heavy = {"celery", "kombu", "dflockd"}
            assert not heavy & {name.partition(".")[0] for name in sys.modules}
        """,
        passed=1,
    )


CONFTEST = """
import pytest
import celery.contrib.testing.tasks

pytest_plugins = ["celery.contrib.pytest"]

@pytest.fixture(scope="session")
def celery_config():
    return {"broker_url": "memory://", "result_backend": "cache+memory://"}
"""

IN_WORKER = """
from celery_dflock import LockedTask
from celery_dflock.testing import assert_not_locked

def test_in_a_worker(dflock_app, celery_app, celery_worker):
    dflock_app(celery_app)

    @celery_app.task(base=LockedTask, lock_key="report")
    def report():
        return "done"

    celery_worker.reload()
    assert report.delay().get(timeout=10) == "done"
    assert_not_locked("report", celery_app)
"""

NEVER_STARTS = """
from celery._state import _set_task_join_will_block
from celery.bootsteps import StartStopStep

def test_a_worker_that_does_not_start(celery_app):
    class Crash(StartStopStep):
        requires = ("celery.worker.components:Pool",)

        def start(self, parent):
            raise RuntimeError("as asked")

    celery_app.steps["worker"].add(Crash)
    worker = celery_app.WorkController(pool="solo")
    worker.start()
    _set_task_join_will_block(False)  # as Celery's own fixture does for a worker in this process
    assert worker.exitcode
"""

HERE = """
from celery_dflock import dflock
from shop import app, sync

def test_here(dflock_app):
    dflock_app(app)
    assert sync.delay(7).get() == "account:7"
    with dflock("account:7", app=app) as lock:
        assert lock.held
"""


@pytest.mark.parametrize(
    "tests",
    [
        [HERE, IN_WORKER],
        [IN_WORKER, IN_WORKER, HERE, NEVER_STARTS, HERE, IN_WORKER],
    ],
    ids=["the worker last", "several workers"],
)
def test_the_order_of_tests_with_workers_does_not_matter(
    user: pytest.Pytester, tests: list[str]
) -> None:
    """The end of one worker ends nothing but what that worker has received."""
    user.makeconftest(CONFTEST)
    user.makeini("[pytest]\naddopts = -p no:cacheprovider -p no:asyncio")
    run(user, *tests, passed=len(tests))


def test_public_names_are_there() -> None:
    for name in celery_dflock.__all__:
        assert getattr(celery_dflock, name).__name__ == name
        assert name in dir(celery_dflock)
    with pytest.raises(AttributeError, match="no attribute 'LockedTasks'"):
        _ = celery_dflock.LockedTasks


EAGER = """
import pytest
from dflockd import admin
from shop import app, sync, assert_locked, assert_not_locked

def test_of_the_apps_own_servers():
    assert app.conf.get("dflock_servers") is None

def test_locked(dflock_app, dflockd_server):
    assert dflock_app(app) is app
    assert app.conf.dflock_servers == [dflockd_server.address]
    assert sync.delay(7).get() == "account:7"
    assert_not_locked("account:7", app)
    assert 0 <= admin.ping(dflockd_server.address) < 5

def test_undone():
    assert app.conf.get("dflock_servers") is None
    assert app.conf.get("dflock_enabled") is None

def test_current_app_and_settings(dflock_app):
    app.set_current()
    dflock_app(dflock_key_prefix="test:")
    assert sync.delay(8).get() == "test:account:8"
    assert_not_locked("account:8")

def test_undone_again():
    assert app.conf.get("dflock_key_prefix") is None
"""

OFF = """
import pytest
from celery_dflock import dflock
from shop import app, sync, assert_locked, assert_not_locked

@pytest.fixture(autouse=True)
def no_locks(request):
    if "on" not in request.node.name:
        request.getfixturevalue("dflock_off")

def test_fixture(no_locks):
    assert sync.delay(7).get() is None
    with dflock("account:7", app=app) as lock:
        assert not lock.held and lock.fence is None
        assert_not_locked("account:7", app)
        with pytest.raises(AssertionError, match="'account:7' .* is switched off"):
            assert_locked("account:7", app)

def test_on_again(dflock_app):
    dflock_app(app)
    assert sync.delay(7).get() == "account:7"

def test_one_app_by_setting(dflock_app):
    dflock_app(app, dflock_enabled=False)
    assert sync.delay(7).get() is None
"""
"""For one test, for a whole run, by the setting; there is no server to ask."""

THE_FIXTURE_WINS = """
import pytest
from shop import app, sync

@pytest.fixture(scope="module", autouse=True)
def switched_off():
    app.conf.dflock_enabled = False

def test_off():
    assert sync.delay(7).get() is None

def test_on(dflock_app):
    assert sync.delay(7).get() is None
    dflock_app(app)
    assert sync.delay(7).get() == "account:7"

def test_off_again():
    assert sync.delay(7).get() is None
"""
"""Over the setting of the app."""


def test_eager_and_off(user: pytest.Pytester) -> None:
    """One after the other in one process: what each has set is undone for the next."""
    run(user, EAGER, OFF, THE_FIXTURE_WINS, passed=11)


WORKER = """
import pytest
from celery_dflock import LockedTask, Skipped, current_lock, dflock
from celery_dflock.testing import assert_locked, assert_not_locked

# The memory transport looks for messages from time to time only.
FAST = {"broker_transport_options": {"polling_interval": 0.01}}

def add_tasks(app):
    @app.task(base=LockedTask, lock_key="account:{number}", shared=False, name="sync")
    def sync(number):
        if current_lock() is None:
            return None
        assert_locked(f"account:{number}", app)
        return current_lock().key

    @app.task(base=LockedTask, lock_key="vendor", lock_limit=2, lock_timeout=0,
              lock_conflict="skip", shared=False, name="call")
    def call():
        assert_locked("vendor", app)
        return "called"

    return sync, call
"""


CELERYS_FIXTURES = """
@pytest.fixture(scope="session")
def celery_config():
    return {"broker_url": "memory://", "result_backend": "cache+memory://", **FAST}

def test_with_a_worker(dflock_app, celery_app, celery_worker):
    sync, call = add_tasks(dflock_app(celery_app))
    celery_worker.reload()
    assert sync.delay(7).get(timeout=60) == "account:7"
    assert_not_locked("account:7", celery_app)
    assert call.delay().get(timeout=60) == "called"
    with (
        dflock("vendor", limit=2, app=celery_app),
        dflock("vendor", limit=2, app=celery_app),
    ):
        assert Skipped.of(call.delay().get(timeout=60)).key == "vendor"
    assert_not_locked("vendor", celery_app)

def test_without_locks(dflock_off, celery_app, celery_worker):
    sync, _ = add_tasks(celery_app)
    celery_worker.reload()
    assert sync.delay(7).get(timeout=60) is None
"""

OWN_APP_AND_WORKER = """
from celery import Celery, Task
from celery.contrib.testing.worker import start_worker

contexts = []

class ContextTask(Task):
    def __call__(self, *args, **kwargs):
        contexts.append(current_lock().key)
        try:
            return self.run(*args, **kwargs)
        finally:
            contexts.pop()

class PoliteTask(Task):
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs), "politely"

class Locked(LockedTask, ContextTask):
    pass

class Polite(PoliteTask, LockedTask):
    pass

app = Celery(
    "own", broker="memory://", backend="cache+memory://", set_as_current=False, task_cls=Locked
)
app.conf.update(FAST)
sync, call = add_tasks(app)

@app.task(lock_key="stacked", shared=False, name="stacked", bind=True)
def stacked(self):
    assert_locked("stacked", app)
    return list(contexts), self.request.id

@app.task(base=Polite, lock_key="polite", shared=False, name="polite", bind=True)
def polite(self):
    assert_locked("polite", app)
    return self.request.id

@pytest.fixture
def worker(dflock_app):
    with start_worker(dflock_app(app), pool="solo", perform_ping_check=False):
        yield

def test_it(worker):
    assert [r.get(timeout=60) for r in [sync.delay(n) for n in (1, 2, 1)]] == [
        "account:1", "account:2", "account:1"
    ]
    sent = stacked.delay()
    assert sent.get(timeout=60) == [["stacked"], sent.id]
    sent = polite.delay()
    assert sent.get(timeout=60) == [sent.id, "politely"]
    assert_not_locked("stacked", app)
"""
"""With a base class that has a __call__, as the default base of the app."""


def test_workers_of_celerys_fixtures_and_of_the_users_own(user: pytest.Pytester) -> None:
    # Celery's worker looks every two seconds whether it is to end, and twice.
    user.makeconftest(
        """
        pytest_plugins = ["celery.contrib.pytest"]
        import celery.contrib.testing.tasks
        from kombu import Connection

        drain = Connection.drain_events

        def drain_shortly(self, timeout=None, **options):
            return drain(self, timeout=min(timeout or 0.05, 0.05), **options)

        Connection.drain_events = drain_shortly
        """
    )
    run(user, WORKER + CELERYS_FIXTURES, WORKER + OWN_APP_AND_WORKER, passed=3)


def test_the_server_ends_with_the_run(user: pytest.Pytester) -> None:
    """Also if a test leaves a lock behind, and if it fails."""
    output = run(
        user,
        """
        from dflockd.sync_client import DistributedLock

        def test_left_behind(dflockd_server):
            global lock
            print("the server is", dflockd_server.address)
            lock = DistributedLock("left", servers=[dflockd_server.address])
            assert not lock.acquire()
        """,
        failed=1,
    )
    found = re.search(r"the server is (\S+):(\d+)", output)
    assert found is not None
    with socket.socket() as connection:
        connection.settimeout(BOUND)
        assert connection.connect_ex((found[1], int(found[2]))) == errno.ECONNREFUSED


def test_a_server_that_does_not_start(user: pytest.Pytester) -> None:
    (user.path / "elsewhere").mkdir()
    broken = user.path / "elsewhere" / "dflockd"
    broken.mkdir()
    (broken / "__init__.py").touch()
    (broken / "__main__.py").write_text("raise SystemExit('no room for locks')")
    user.makeini("[pytest]\naddopts = -p no:cacheprovider -p no:asyncio\n")
    output = run(
        user,
        f"""
        import os
        os.environ["PYTHONPATH"] = {str(broken.parent)!r}

        def test_it(dflockd_server): ...
        """,
        errors=1,
    )
    assert "the lock server did not start; it said:" in output
    assert "no room for locks" in output


def test_the_tests_of_the_manual_pass(user: pytest.Pytester) -> None:
    snippets = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "docs/testing.md").read_text(), re.DOTALL | re.MULTILINE
    )
    tests = [each for each in snippets if "def test_" in each and "celery_worker" not in each]
    # Each is a file of its own, as a reader would have it.
    user.makepyfile(**{f"test_{number}": each for number, each in enumerate(tests)})
    result = user.runpytest_subprocess("-p", "no:randomly", timeout=BOUND)
    result.assert_outcomes(passed=sum(each.count("def test_") for each in tests))
