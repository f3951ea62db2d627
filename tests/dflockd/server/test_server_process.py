"""Where it listens, its settings and its log."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from tests.dflockd.raw_server import ServerProcess, StartServer


def test_d2_documented_variables_count_and_others_do_not(start_server: StartServer) -> None:
    # D2: five variables were looked up under a wrong name, so the documented one had no effect.
    server = start_server(
        env={"DFLOCKD_MAX_LOCKS": "1", "DFLOCKD_DEFAULT_LEASE_TTL_S": "5", "MAX_LOCKS": "7"}
    )
    client = server.connect()
    assert client.ask("l", "k1", 0).endswith(" 5")
    assert client.ask("l", "k2", 0) == "error_max_locks"


def test_d24_the_log_shows_no_keys_and_no_line_for_each_request(
    start_server: StartServer,
) -> None:
    # D24: a line for each request, with the key as it came.
    server = start_server()
    client = server.connect()
    client.lock("key\x1b[31m")
    before = len(server.log)
    for _ in range(10):
        client.ask("l", "key\x1b[31m", 0)
    assert client.ask("ping") == "ok"
    assert len(server.log) == before
    assert "key" not in "".join(server.log)


def test_d26_a_bad_variable_refuses_to_start(start_server: StartServer) -> None:
    # D26: it was silently ignored.
    server = start_server(env={"DFLOCKD_READ_TIMEOUT_S": "abc"})
    assert server.wait() == 2
    assert len(server.log) == 1


def test_unix_socket(start_server: StartServer, tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = start_server("--unix-socket", str(path))
    server.wait_for_log(f"unix:{path}")
    sock = socket.socket(socket.AF_UNIX)
    client = server.adopt(sock)
    sock.connect(str(path))
    client.lock("k")
    assert server.connect().ask("l", "k", 0) == "timeout"
    client.close()
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert not path.exists()


def test_unix_socket_left_by_a_killed_server_is_no_obstacle(
    start_server: StartServer, tmp_path: Path
) -> None:
    path = tmp_path / "s"
    for _ in range(2):
        server = start_server("--unix-socket", str(path))
        server.wait_for_log(f"unix:{path}")
        server.signal(signal.SIGKILL)
        server.wait()
    assert path.exists()


def test_a_file_in_place_of_the_unix_socket_is_left_alone(
    start_server: StartServer, tmp_path: Path
) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    server = start_server("--unix-socket", str(path))
    assert server.wait() == 1
    assert path.read_text() == "data"
    assert len(server.log) == 1
    assert str(path) in server.log[0]


@pytest.mark.parametrize("host", ["a..b", "192.0.2.1"])
def test_an_address_that_cannot_be_bound(start_server: StartServer, host: str) -> None:
    server = start_server("--host", host)
    assert server.wait() == 1
    assert len([line for line in server.log if "ERROR" in line]) == 1
    assert host in server.log[-1]
    assert "Traceback" not in "".join(server.log)


def test_two_servers_on_one_port(start_server: StartServer, server: ServerProcess) -> None:
    second = start_server("--port", str(server.port))
    assert second.wait() == 1
    assert len(second.log) == 1
    assert str(server.port) in second.log[0]
    assert server.connect().ask("ping") == "ok"
