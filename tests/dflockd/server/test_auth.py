"""Who may come in: the shared secret."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.dflockd.raw_server import ServerProcess, StartServer, granted


@pytest.fixture
def guarded(start_server: StartServer, tmp_path: Path) -> ServerProcess:
    path = tmp_path / "secret"
    path.write_text("open sesame\n")
    return start_server("--auth-token-file", str(path))


def test_auth_right(guarded: ServerProcess) -> None:
    client = guarded.connect()
    assert client.ask("auth", "_", "open sesame") == "ok"
    client.lock("k")
    assert client.ask("auth", "_", "open sesame") == "ok"


@pytest.mark.parametrize(
    ("command", "argument"),
    [("auth", "open"), ("auth", ""), ("ping", "_"), ("l", "0"), ("stats", "_"), ("x", "")],
)
def test_auth_wrong_or_missing(guarded: ServerProcess, command: str, argument: str) -> None:
    client = guarded.connect()
    begun = time.monotonic()
    client.send(f"{command}\nk\n{argument}\nauth\n_\nopen sesame\nping\n_\n_\n".encode())
    assert client.line() == "error_auth"
    assert client.line() == ""
    assert time.monotonic() - begun > 0.09  # slows down guessing
    assert "sesame" not in "".join(guarded.log)


def test_auth_by_variable(start_server: StartServer) -> None:
    server = start_server(env={"DFLOCKD_AUTH_TOKEN": "s" * 65536})
    client = server.connect()
    assert client.ask("auth", "_", "s" * 65536) == "ok"
    assert server.connect().ask("ping") == "error_auth"


def test_auth_lost_frees_locks(guarded: ServerProcess) -> None:
    client, other = guarded.connect(), guarded.connect()
    assert other.ask("auth", "_", "open sesame") == "ok"
    assert client.ask("auth", "_", "open sesame") == "ok"
    client.lock("k", "0 60")
    assert client.ask("auth", "_", "wrong") == "error_auth"
    granted(other.ask("l", "k", 10))
