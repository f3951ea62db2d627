"""``celery -A proj dflock ...`` against a real server."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_dflock.cli import dflock
from dflockd.clock import now
from dflockd.sync_client import DistributedLock, DistributedSemaphore, RateLimit, Reservation
from examples.demo.stage import ROOT, LockServer
from tests import forkserver
from tests.celery_dflock.processes import Waiter
from tests.dflockd.raw_server import RawClient, eventually
from tests.dflockd.storage.machine import rewrite
from tests.dflockd.top.terminal import Terminal

BOUND = 30


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    with LockServer(tmp_path_factory.mktemp("cli")) as server:
        yield server


Run = Callable[..., Result]


@pytest.fixture
def run(server: LockServer) -> Run:
    """Run a command in this process: starting Celery's takes seconds."""

    def run(*arguments: str, answer: str = "", servers: str | None = None, **conf: Any) -> Result:
        app = Celery("cli", set_as_current=False)
        app.conf.update(conf, dflock_servers=servers or server.address)
        context = CLIContext(app=app, no_color=True, workdir=None)
        return CliRunner().invoke(dflock, arguments, input=answer, obj=context)

    return run


def test_it_is_a_command_of_celery(server: LockServer) -> None:
    done = forkserver.run(
        [sys.executable, "-m", "celery", "-A", "examples.skip", "dflock", "status", "--json"],
        env={**os.environ, "DFLOCK_SERVERS": server.address},
        cwd=ROOT,
        timeout=BOUND,
    )
    assert done.returncode == 0, done.stderr
    [row] = json.loads(done.stdout)
    assert row["server"] == server.address


def test_status_of_an_app_without_redis(server: LockServer) -> None:
    code = (
        "import sys; sys.modules['redis'] = None; sys.argv[0] = 'celery'; "
        "from celery.__main__ import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "-b", "memory://", "dflock", "status"],
        env={**os.environ, "DFLOCK_SERVERS": server.address},
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{server.address}: ")


def semaphore(server: LockServer, key: str, label: str) -> DistributedSemaphore:
    return DistributedSemaphore(key, 2, 0, servers=[server.address], label=label)


def test_status_and_ping(run: Run, server: LockServer) -> None:
    status = run("status", "--json")
    assert status.exit_code == 0, status.stderr
    [row] = json.loads(status.stdout)
    assert row["server"] == server.address
    assert (row["keys"], row["waiters"]) == (0, 0)
    assert run("status").stdout.startswith(f"{server.address}: answers in ")
    assert run("ping").exit_code == 0
    [row] = json.loads(run("ping", "--json").stdout)
    assert row["server"] == server.address
    assert row["ping_ms"] > 0


def test_status_of_a_server_that_grants_nothing_yet(run: Run, tmp_path: Path) -> None:
    flags = ("--state-dir", str(tmp_path / "state"))
    with LockServer(tmp_path, *flags):
        pass
    rewrite(tmp_path / "state", recovers_until=now() + 60)  # by the clock of the server
    with LockServer(tmp_path, *flags, name="again") as again:
        done = run("status", servers=again.address)
    assert done.exit_code == 1
    assert "grants nothing (recovering): it waits for holders" in done.stdout


def test_status_of_a_beat_whose_scheduler_cannot_be_loaded_here(
    run: Run, server: LockServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of django-celery-beat without Django's settings, which raises an error of its own."""
    (tmp_path / "needs_setup.py").write_text("raise RuntimeError('settings\\nare not configured')")
    monkeypatch.syspath_prepend(tmp_path)
    conf = {"beat_scheduler": "dflock", "dflock_beat_scheduler": "needs_setup:Scheduler"}
    why = (
        "cannot tell what is due next: "
        "dflock_beat_scheduler 'needs_setup:Scheduler': settings are not configured"
    )

    status = run("status", **conf)
    as_json = run("status", "--json", **conf)

    assert (status.exit_code, as_json.exit_code) == (0, 0)
    assert status.stdout.endswith(f"\ncelery-beat:cli: nobody leads, 0 standing by, {why}\n"), (
        status.stdout
    )
    assert json.loads(as_json.stdout)[1] == {
        "beat": "celery-beat:cli",
        "leader": None,
        "leads_s": None,
        "standing_by": 0,
        "next": None,
        "next_due": None,
        "note": why,
    }


def test_django_that_is_not_set_up(server: LockServer) -> None:
    pytest.importorskip("django_celery_beat")
    program = (
        "from celery import Celery\n"
        "app = Celery('shop')\n"
        "app.conf.dflock_beat_scheduler = 'django_celery_beat.schedulers:DatabaseScheduler'\n"
        "from celery_dflock.beat.status import beat_status\n"
        "print(beat_status(app))\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**env, "DFLOCK_SERVERS": server.address},
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "not configured" in done.stdout


def test_a_setting_that_is_bad(run: Run) -> None:
    for arguments in (["status"], ["ping"], ["locks"], ["waiters"], ["release", "a"]):
        refused = run(*arguments, dflock_wait="nowhere")
        assert refused.exit_code == 1
        assert refused.stderr == "Error: dflock_wait is 'nowhere': give one of slot, consumer\n"
    assert run("status", dflock_beat_lock_key="my beat").stderr == (
        "Error: dflock_beat_lock_key is 'my beat': give text without white space\n"
    )


def test_a_server_that_is_down(run: Run, server: LockServer, tmp_path: Path) -> None:
    with LockServer(tmp_path) as gone:
        address = gone.address
    both = f"{server.address},{address}"

    status = run("status", servers=both)
    locks = run("locks", servers=both)

    assert status.exit_code == 1
    assert "answers in" in status.stdout
    assert f"{address}: lock server {address} cannot be reached" in status.stdout
    assert locks.exit_code == 1
    assert locks.stderr == (
        f"Error: lock server {address} cannot be reached: Connection refused "
        "(start dflockd there, or correct dflock_servers)\n"
    )


def test_groups_and_who_is_superseded(run: Run, server: LockServer) -> None:
    address = (server.host, server.port)
    with (
        contextlib.closing(RawClient(socket.create_connection(address))) as older,
        contextlib.closing(RawClient(socket.create_connection(address))) as newer,
    ):
        said = "timeout=30 owner=run-{0} attempt=0 age={0} group=tenant:{0} label=run {0}"
        assert older.ask("acquire", "own", said.format(1)).startswith("ok ")
        newer.request("acquire", "own", said.format(2))
        eventually(lambda: "run 2" in run("waiters", "own").stdout)
        held = run("locks").stdout
        assert held.startswith("own  run 1, group tenant:1, superseded by run 2  held ")
        assert run("waiters").stdout.startswith("own  1. run 2, group tenant:2  for ")


def test_weights(run: Run, server: LockServer) -> None:
    def lock(label: str, weight: Any) -> DistributedSemaphore:
        servers = [server.address]
        return DistributedSemaphore("gpu", 8, None, servers=servers, label=label, weight=weight)

    with lock("three", 3), Waiter(lock("all", "all")):
        assert run("locks").stdout.startswith("gpu  three, weight 3  held ")
        assert run("waiters").stdout.startswith("gpu  1. all, weight all  for ")


@pytest.mark.parametrize(("k", "has_limit"), [("k", True), ("j", False)])
def test_rates(run: Run, server: LockServer, k: str, has_limit: bool) -> None:
    def lock(label: str) -> DistributedLock:
        given: dict[str, Any] = {"servers": [server.address], "label": label}
        if has_limit:
            return DistributedLock(k, None, rate="1/h", **given)
        return RateLimit(k, "1/h", None, **given)

    with lock("first"), Waiter(lock("second")):
        eventually(lambda: "second, rate: next in" in run("waiters", k).stdout)
        assert re.match(rf"{k}  1\. second, rate: next in 3\d+ s  for", run("waiters").stdout)
        assert re.match(rf"{k}  first, rate: next in 3\d+ s  held", run("locks").stdout)
        waits = run("find", "second").stdout
        assert re.search(r"the only one, for \d s; .*the rate lets the next begin in ", waits)
        assert ("held by first" in waits) is has_limit


def test_locks_and_waiters(run: Run, server: LockServer) -> None:
    with (
        semaphore(server, "api", "first"),
        semaphore(server, "api", "second"),
        Waiter(semaphore(server, "api", "third")),
    ):
        held = json.loads(run("locks", "--json").stdout)
        assert [(row["key"], row["label"]) for row in held] == [("api", "first"), ("api", "second")]
        [waiting] = json.loads(run("waiters", "--json").stdout)
        assert (waiting["key"], waiting["place"], waiting["label"]) == ("api", 1, "third")
        assert run("waiters", "api").stdout.startswith("api  1. third  for ")
        away = semaphore(server, "api", "fourth")
        assert away.enqueue() == "queued"
        assert away.wait(0, Reservation(30, 0)) is False
        lines = run("waiters", "api").stdout.splitlines()
        assert [line.endswith(" s, requeued") for line in lines] == [False, True]
        assert len(run("locks").stdout.splitlines()) == 2
    assert run("locks").stdout == "no key is held\n"
    assert run("waiters").stdout == "nobody waits\n"


def test_watch(server: LockServer) -> None:
    command = ("-m", "celery", "-A", "examples.skip", "dflock", "locks", "--watch", "0.2")
    with (
        semaphore(server, "watched", "the holder"),
        Terminal([sys.executable, *command], env={"DFLOCK_SERVERS": server.address}) as terminal,
    ):
        terminal.wait_line("watched", "1 of 2: the holder")
        terminal.type("q")
        assert terminal.wait_end() == 0
        assert terminal.attributes() == terminal.before


def test_watch_refuses(run: Run) -> None:
    both, never = run("locks", "--watch", "--json"), run("locks", "--watch", "0")
    assert (both.exit_code, never.exit_code) == (2, 2)
    assert "--json and --watch are both given: choose one" in both.stderr
    assert "0.2<=x<=3600" in never.stderr


def test_a_key_that_would_command_the_terminal(run: Run, server: LockServer) -> None:
    with DistributedLock("evil:\x1b[2J", 0, servers=[server.address], label="me"):
        assert run("locks").stdout.startswith(r"evil:\x1b[2J  me  held ")


def test_release_asks_and_lets_the_next_in(run: Run, server: LockServer) -> None:
    holder = semaphore(server, "stuck", "the one that is stuck")
    assert holder.acquire()
    try:
        declined = run("release", "stuck", answer="n\n")
        assert declined.exit_code == 1
        assert "Release stuck, held by the one that is stuck" in declined.stderr
        assert holder.renew()

        done = run("release", "stuck", "--yes")
        assert done.exit_code == 0, done.stderr
        assert done.stdout == "stuck: released, was held by the one that is stuck\n"
        assert not holder.renew()
    finally:
        holder.release()
    assert run("release", "stuck", "--yes").exit_code == 1
    server.wait_log("evicts the holder of 'stuck'")


def test_a_limit_that_has_changed(run: Run, server: LockServer) -> None:
    """All older holders are listed, if only one may hold it by now as well."""

    def holder(limit: int) -> DistributedSemaphore:
        return DistributedSemaphore("resized", limit, 0, servers=[server.address], label="h")

    with holder(2), holder(2):
        assert run("locks").stdout.count("resized  h  held") == 2
        began = now()
        assert not holder(1).acquire()
        said = run("locks").stdout
    spans = re.findall(r"resized  h, limit 1 \(was 2, since (\d+) s\)  held", said)
    assert len(spans) == 2
    assert max(map(int, spans)) <= now() - began


def test_pause_and_resume(run: Run, server: LockServer) -> None:
    holder = DistributedLock("vendor:7", servers=[server.address], label="the holder")
    assert holder.acquire()
    began = now()

    def is_said(pattern: str, text: str) -> bool:
        """Whether it is, with the whole seconds that the pause has lasted."""
        said = r"paused by \S+@\S+ for (\d+) s, 2 h left: the vendor is down"
        found = re.search(pattern.replace("SAID", said), text)
        return found is not None and int(found[1]) <= round(now() - began)

    done = run("pause", "vendor:7", "--for", "2h", "--reason", "the vendor is down")
    assert done.exit_code == 0, done.stderr
    assert is_said(r"\Avendor:7: SAID\n\Z", done.stdout)
    with Waiter(DistributedLock("vendor:7", None, servers=[server.address], label="waiter")) as w:
        eventually(lambda: "waiter" in run("waiters").stdout)
        assert is_said(r"\Avendor:7  the holder, SAID  held ", run("locks").stdout)
        assert holder.renew()
        holder.release()
        assert is_said(r"\Avendor:7  not held, SAID, 1 waiting\n\Z", run("locks").stdout)
        assert is_said(r"\Avendor:7  1\. waiter, SAID  for ", run("waiters", "vendor:7").stdout)
        found = run("find", "vendor").stdout
        assert is_said(r"\Avendor:7 is not held; 1 waits for it; SAID\n", found)
        assert is_said("nobody holds it yet; SAID$", run("find", "waiter").stdout.strip())
        [row] = json.loads(run("locks", "--json").stdout)
        assert row["paused"]["reason"] == "the vendor is down"
        assert not w.granted
        resumed = run("resume", "vendor:7")
        assert (resumed.exit_code, resumed.stdout) == (0, "vendor:7: resumed\n")
        w.wait_granted()
    server.wait_log("pauses 'vendor:7' for 7200 s, by ")
    server.wait_log("resumes 'vendor:7'")


def test_a_pause_without_end_of_a_key_that_nobody_holds(run: Run) -> None:
    assert run("pause", "idle:7", "--json").exit_code == 0
    again = json.loads(run("pause", "idle:7", "--reason", "b", "--json").stdout)
    assert [(row["paused"]["reason"], row["paused"]["left_s"]) for row in again] == [("b", None)]
    assert run("locks").stdout.startswith("idle:7  not held, paused by ")
    assert run("resume", "idle:7", "--json").exit_code == 0
    assert run("locks").stdout == "no key is held\n"
    resumed = run("resume", "idle:7")
    assert (resumed.exit_code, resumed.stdout) == (1, "idle:7: not paused\n")


@pytest.mark.parametrize("span", ["90", "0s", "1w", "-1h", "1.5h", ""])
def test_a_pause_for_no_time(run: Run, span: str) -> None:
    refused = run("pause", "vendor:7", "--for", span)
    assert refused.exit_code == 2
    assert "give a time such as 90s, 10m, 1h or 2d" in refused.stderr


def test_serve_is_the_server(run: Run) -> None:
    assert run("serve", "--port", "none").exit_code == 2
    assert run("serve", "--version").stdout.startswith("dflockd ")
