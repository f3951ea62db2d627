"""Peers that never say who they are: they use up nothing that others need."""

from __future__ import annotations

import re
import signal
import ssl
from pathlib import Path

import pytest

from tests.dflockd.raw_server import RawClient, ServerProcess, StartServer, eventually
from tests.dflockd.server.server_support import stats, takes_seconds, tls_flags

SECRET = "open sesame"


@pytest.fixture
def secret(tmp_path: Path) -> tuple[str, str]:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    return ("--auth-token-file", str(path))


@pytest.fixture
def tls(certificates: Path) -> tuple[str, ...]:
    return tls_flags(certificates)


@pytest.fixture
def context(certificates: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificates / "ca.pem"))


def is_closed(client: RawClient) -> bool:
    """Say whether the server has closed the connection; it does so in the end."""
    try:
        return client.sock.recv(1) == b""
    except ConnectionResetError:
        return True


def log_of(server: ServerProcess, text: str) -> list[str]:
    return [line for line in server.log if text in line]


@pytest.mark.parametrize("silent", [5, 200])
def test_silent_peers_do_not_shut_out_who_knows_the_secret(
    start_server: StartServer, secret: tuple[str, str], silent: int
) -> None:
    server = start_server(*secret, "--max-connections", "5")
    for _ in range(silent):
        server.connect()
    client = server.connect()
    assert client.ask("auth", "_", SECRET) == "ok"
    client.lock("k")


def test_silent_peers_do_not_shut_out_who_speaks_tls(
    start_server: StartServer, tls: tuple[str, ...], context: ssl.SSLContext
) -> None:
    server = start_server(*tls, "--max-connections", "2", open_files=96)
    silent = [server.connect() for _ in range(100)]
    client = server.connect(context=context)
    client.lock("k")
    assert is_closed(silent[0])


@takes_seconds
def test_open_files_that_peers_use_up_are_not_those_of_the_state_directory(
    start_server: StartServer,
    tmp_path: Path,
    secret: tuple[str, str],
    tls: tuple[str, ...],
    context: ssl.SSLContext,
) -> None:
    server = start_server(
        *tls, *secret, "--state-dir", str(tmp_path / "state"), "--max-connections", "10",
        open_files=64,
    )  # fmt: skip
    client = server.connect(context=context)
    assert client.ask("auth", "_", SECRET) == "ok"
    for _ in range(70):
        server.connect()
    # The longest lease so far is written down, in a file of its own.
    token = client.lock("k", "0 600")
    assert client.ask("r", "k", token) == "ok"
    newcomer = server.connect(context=context)
    assert newcomer.ask("auth", "_", SECRET) == "ok"
    assert len(log_of(server, "others need the room")) < 10


def test_more_connections_than_open_files_are_refused_and_the_server_goes_on(
    start_server: StartServer, tmp_path: Path
) -> None:
    server = start_server("--state-dir", str(tmp_path), open_files=64)
    server.wait_for_log("64 open files: 36 for connections")
    client = server.connect()
    client.lock("k")
    crowd = [server.connect() for _ in range(80)]
    assert is_closed(crowd[-1])
    client.lock("k2", "0 900")
    assert stats(client)["connections"] == 36
    crowd[0].close()
    eventually(lambda: server.connect().ask("ping") == "ok")
    assert len(log_of(server, "refused: 36 are open")) < 10


def test_what_does_not_fit_into_the_open_files_is_said(start_server: StartServer) -> None:
    server = start_server("--max-connections", "2000", open_files=64)
    line = server.wait_for_log("--max-connections 2000 does not fit")
    assert "64 open files" in line
    assert line.endswith("the limit is 36")


@takes_seconds
def test_a_silent_peer_is_closed_in_time_and_one_that_is_in_is_not(
    start_server: StartServer, secret: tuple[str, str]
) -> None:
    server = start_server(*secret, "--auth-timeout", "1")
    silent, slow, known = (server.connect() for _ in range(3))
    slow.send(b"auth\n_\nopen ses")
    assert known.ask("auth", "_", SECRET) == "ok"
    assert is_closed(silent)
    assert is_closed(slow)
    server.wait_for_log("did not get in within 1 s")
    assert known.ask("ping") == "ok"


@takes_seconds
def test_the_time_to_get_in_covers_the_handshake(
    start_server: StartServer, tls: tuple[str, ...], context: ssl.SSLContext
) -> None:
    server = start_server(*tls, "--auth-timeout", "1")
    silent, known = server.connect(), server.connect(context=context)
    begun = server.connect()
    begun.send(b"\x16\x03\x01\x02\x00\x01")
    assert is_closed(silent)
    assert is_closed(begun)
    assert known.ask("ping") == "ok"


def test_only_those_that_are_in_count_towards_max_connections(
    start_server: StartServer, secret: tuple[str, str]
) -> None:
    server = start_server(*secret, "--max-connections", "2")
    first, second, third = (server.connect() for _ in range(3))
    assert first.ask("auth", "_", SECRET) == second.ask("auth", "_", SECRET) == "ok"
    # Nothing is said: an answer of any kind would be one about the secret.
    assert third.ask("auth", "_", SECRET) == ""
    first.close()
    eventually(lambda: server.connect().ask("auth", "_", SECRET) == "ok")


@takes_seconds
def test_all_who_come_back_at_once_get_in(
    start_server: StartServer, secret: tuple[str, str]
) -> None:
    server = start_server(*secret, open_files=1024)
    server.wait_for_log("672 for connections, 224 for connections that have not signed in yet")
    server.suspend()
    crowd = [server.connect() for _ in range(600)]
    for client in crowd:
        client.request("auth", "_", SECRET)
    server.signal(signal.SIGCONT)
    assert {client.line() for client in crowd} == {"ok"}
    assert not log_of(server, "closed")


def test_who_does_not_know_the_secret_can_have_little_kept(
    start_server: StartServer, secret: tuple[str, str]
) -> None:
    server = start_server(*secret)
    client = server.connect()
    client.send(b"auth\n_\n" + b"x" * 2000)
    assert client.line() == "error_auth"
    assert client.line() == ""


@takes_seconds
def test_wrong_secrets_do_not_fill_the_log(
    start_server: StartServer, secret: tuple[str, str]
) -> None:
    server = start_server(*secret)
    clients = [server.connect() for _ in range(100)]
    for client in clients:
        client.request("auth", "_", "wrong")
    assert {client.line() for client in clients} == {"error_auth"}
    server.wait_for_log(" times in the last second)")
    lines = log_of(server, "wrong or missing auth token")
    assert len(lines) < 10
    more = sum(int(n) for line in lines for n in re.findall(r"\((\d+) times", line))
    eventually(lambda: more == 99 or len(log_of(server, "wrong or")) > len(lines))
