"""What a worker says of its lock servers when it starts."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery

from celery_dflock.config import settings
from celery_dflock.worker import banner
from dflockd import __version__
from examples.demo.stage import LockServer
from tests.celery_dflock.processes import Cluster
from tests.dflockd.ports import free_port


def app_of(*servers: str, **conf: object) -> Celery:
    app = Celery("banner", set_as_current=False)
    app.conf.update(dflock_servers=list(servers), **conf)
    return app


def test_the_banner_of_a_worker_has_a_line_for_each_server(cluster: Cluster) -> None:
    there, away = cluster.lock_server.address, f"127.0.0.1:{free_port()}"
    with cluster.ready("bannered", servers=f"{there},{away}") as worker:
        lines = worker.log_text().splitlines()
    at = lines.index("[lock servers]")
    assert re.fullmatch(
        rf"  \.> {there} +dflockd {re.escape(__version__)}, in memory, \d+ keys? held",
        lines[at + 1],
    )
    refused = (
        "cannot be reached: Connection refused (start dflockd there, or correct dflock_servers)"
    )
    assert lines[at + 2].split() == [".>", away, "unavailable:", *refused.split()]
    assert "[tasks]" in lines[at + 3 :], "what Celery says there is still said"
    [warned] = [line for line in lines if "WARNING" in line and away in line]
    assert warned.endswith(f"lock server {away} is unavailable: {refused}")


def test_with_a_state_directory(tmp_path: Path) -> None:
    with LockServer(tmp_path, "--state-dir", str(tmp_path / "state")) as server:
        found = banner.ask_all(settings(app_of(server.address)))
    assert found[server.address] == (
        True,
        f"dflockd {__version__}, with a state directory, 0 keys held",
    )


@pytest.mark.parametrize(
    ("token", "why"),
    [
        (None, "the server requires an auth token: set auth_token"),
        ("wrong", "refused the auth token: set the one that it was started with"),
    ],
)
def test_a_server_with_another_token(tmp_path: Path, token: str | None, why: str) -> None:
    (tmp_path / "token").write_text("right\n")
    with LockServer(tmp_path, "--auth-token-file", str(tmp_path / "token")) as server:
        app_settings = settings(app_of(server.address, dflock_auth_token=token))
        found = banner.ask_all(app_settings)
    which = "(dflock_auth_token, or the variable DFLOCK_AUTH_TOKEN_FILE)"
    assert found[server.address] == (False, f"{why} {which}")


@pytest.fixture
def silent() -> Iterator[str]:
    """Somebody who accepts and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_a_server_that_says_nothing_keeps_nobody(
    silent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(banner, "PATIENCE", 0.5)
    with LockServer(tmp_path) as server:
        found = banner.ask_all(settings(app_of(silent, server.address)))
    assert found[silent] == (False, "no answer within 0.5 s")
    assert found[server.address][0]


def test_an_older_server_does_not_say_its_version() -> None:
    stats = {"connections": 1, "locks": [{}], "semaphores": []}
    assert banner.describe(stats) == "does not say its version, 1 key held"


def test_bad_settings_are_said_and_stop_nothing() -> None:
    [line] = banner._lines(app_of("no such server"))
    assert "dflock_servers" in line


def test_switched_off() -> None:
    [line] = banner._lines(app_of("a:1", dflock_enabled=False))
    assert "dflock_enabled" in line
