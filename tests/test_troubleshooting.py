"""The page for when something is wrong: what it quotes is what you get, each fault made for real."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured

from celery_dflock import LockedTask, LockNotAcquiredError, dflock, require_lock
from celery_dflock.worker.spelling import ignored
from dflockd.sync_client import DistributedLock
from examples.demo.stage import ROOT
from tests.dflockd.client_support import make_certificate
from tests.dflockd.raw_server import ServerProcess

BOUND = 60
PAGE = (ROOT / "docs" / "howto" / "troubleshooting.md").read_text()
QUOTED = re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)
VALUES = re.compile(r"sync_account\[9f0c\.\.\.\] web-1 pid 4711|\b3 s|\.\.\.")
"""What differs from one time to the next."""


@pytest.fixture(scope="module")
def started() -> Iterator[Callable[..., str]]:
    """A function that starts a lock server with these flags and returns its address."""
    with ExitStack() as stack:

        def start(*flags: str) -> str:
            server = ServerProcess(*flags)
            stack.callback(server.end)
            return f"127.0.0.1:{server.port}"

        yield start


def app_of(server: str, **conf: object) -> Celery:
    app = Celery("trouble", broker="memory://", set_as_current=False)
    eager = {"task_always_eager": True, "task_eager_propagates": True}
    app.conf.update(dflock_servers=[server], dflock_unavailable="fail", **eager, **conf)
    return app


def sent(task: Any) -> None:
    task.delay(7).get()


def said(app: Celery, call: Callable[[Any], object] = sent, **options: Any) -> str:
    """Return the error of a task with these options."""

    @app.task(base=LockedTask, name="report", shared=False, **options)
    def report(account_id: int) -> None:
        raise AssertionError("it has its lock")

    with pytest.raises(Exception) as caught:  # noqa: PT011
        call(report)
    return str(caught.value)


class Foreign(socketserver.StreamRequestHandler):
    """A service that answers each line, as Redis does."""

    def handle(self) -> None:
        for _ in self.rfile:
            self.wfile.write(b"-ERR unknown command\r\n")


@pytest.fixture(scope="module")
def foreign() -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Foreign) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def bound(**options: Any) -> str:
    """Return the error of a task with these options that asks no server."""
    return said(app_of("127.0.0.1:1"), **options)


def in_code() -> list[str]:
    """What is said of mistakes in code and settings."""

    async def coroutine() -> None: ...

    async def blocks() -> None:
        with dflock("a", app=app_of("127.0.0.1:1")):
            pass

    with pytest.raises(ImproperlyConfigured) as refused:
        app_of("127.0.0.1:1").task(base=LockedTask, lazy=False, shared=False)(coroutine)
    with pytest.raises(RuntimeError) as blocking:
        asyncio.run(blocks())
    with pytest.raises(RuntimeError) as nothing_held:
        require_lock()
    return [
        *(str(each.value) for each in (refused, blocking, nothing_held)),
        bound(lock_key="{account_id}{account_id}"),
        bound(lock_key="{account_id.id}"),
        bound(lock_key=lambda task, args, kwargs: None),
        bound(lock_key="a", lock_conflict="skp"),
        bound(lock_key="a", lock_ttl=0.5),
        bound(lock_key="a", lock_rate="10"),
        said(app_of("redis://lock-1"), lock_key="a"),
    ]


def at_start(taken: str) -> list[str]:
    """What servers with mistakes in their settings say, and one in which all is as it comes."""
    env = {**os.environ, "DFLOCKD_PORT": "0"}
    port = taken.rpartition(":")[2]
    found = []
    for flags in (["--port", port], ["--prot", "1"], ["--tls-cert", "a.pem"]):
        own = {name: value for name, value in env.items() if name != "DFLOCKD_PORT"}
        command = [sys.executable, "-m", "dflockd", "--host", "127.0.0.1", *flags]
        ended = subprocess.run(
            command, env=own, capture_output=True, text=True, timeout=BOUND, check=False
        )
        assert ended.returncode in (1, 2)
        found.append(ended.stderr)
    command = [sys.executable, "-m", "dflockd", "--host", "0.0.0.0"]
    env["DFLOCKD_PROT"] = "1"
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            for line in server.stderr:
                found.append(line)
                if "listening on" in line:
                    break
        finally:
            server.kill()
    return found


def takes_its_own_key(server: str) -> str:
    """The error of a task that takes its key a second time."""
    app = app_of(server)

    @app.task(base=LockedTask, name="report", lock_key="same", shared=False)
    def report(_account_id: int) -> None:
        with dflock("same", app=app, timeout=0.1):
            raise AssertionError("it has its lock twice")

    with pytest.raises(LockNotAcquiredError) as caught:
        sent(report)
    return str(caught.value)


@pytest.fixture(scope="module")
def everything_said(
    started: Callable[..., str], foreign: str, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """What all the faults of the page make somebody read."""
    secret = Path(tmp_path_factory.mktemp("secret")) / "token"
    secret.write_text("sesame\n")
    plain, full = started(), started("--max-locks", "1")
    certificate, key = make_certificate(Path(tmp_path_factory.mktemp("tls")))
    encrypted = started("--tls-cert", str(certificate), "--tls-key", str(key))
    guarded = started("--auth-token-file", str(secret))
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and listens to nothing
        away = said(app_of(f"127.0.0.1:{nobody.getsockname()[1]}"), lock_key="a")
    with dflock("limited", limit=3, app=app_of(plain)):
        limited = said(app_of(plain), lock_key="limited", lock_limit=2)
    with DistributedLock("taken", servers=[plain]):  # somebody else: not a dflock() of this thread
        taken = said(app_of(plain), lock_key="taken", lock_timeout=0.1, lock_conflict="fail")
    with dflock("first", app=app_of(full)):
        crowded = said(app_of(full), lock_key="second")
    under = Celery("under", set_as_current=False)
    source = type("source", (), {"CELERY_DFLOCK_SERVER": 1, "DFLOCK_SERVERS": 2})
    under.config_from_object(source, namespace="CELERY")
    without = Celery("without", set_as_current=False)
    without.config_from_object(type("source", (), {"CELERY_DFLOCK_SERVERS": 1}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLOCK_SERVER", "a:1")
        misspelled = ignored(under) + ignored(without)
    return "\n".join(
        [
            *(away, limited, taken, crowded, *misspelled),
            *in_code(),
            *at_start(plain),
            takes_its_own_key(plain),
            said(app_of(encrypted), lock_key="a"),
            said(app_of(encrypted, dflock_use_ssl=True), lock_key="a"),
            said(app_of(plain, dflock_use_ssl=True), lock_key="a"),
            said(app_of(guarded), lock_key="a"),
            said(app_of(guarded, dflock_auth_token="other"), lock_key="a"),
            said(app_of(foreign), lock_key="a"),
            said(app_of(plain), lock_key="a", lock_ttl=7200),
            said(app_of(plain), lock_key="account:{account}"),
            said(app_of(plain), lock_key="a", lock_confict="skip"),
            said(app_of(plain), lambda task: task.map([1]), lock_key="a"),
        ]
    )


@pytest.mark.parametrize("message", QUOTED)
def test_the_message_is_what_you_read(message: str, everything_said: str) -> None:
    words = ".+".join(map(re.escape, VALUES.split(message)))
    assert re.search(words, everything_said), everything_said


def test_there_are_messages() -> None:
    assert len(set(QUOTED)) >= 25


def test_a_lock_and_a_semaphore_of_one_key_exclude_nobody(started: Callable[..., str]) -> None:
    """The page warns of it."""
    app = app_of(started())

    with dflock("key", app=app), dflock("key", limit=3, app=app, timeout=0) as lock:
        assert lock.held
