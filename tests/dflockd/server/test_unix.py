"""The unix socket: whose path it is."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import stat
from pathlib import Path

import pytest

from dflockd.server.unix import SocketPathError, UnixSocket
from tests.dflockd.raw_server import RawClient, ServerProcess, StartServer


def connect(server: ServerProcess, path: Path) -> RawClient:
    sock = socket.socket(socket.AF_UNIX)
    client = server.adopt(sock)
    sock.connect(str(path))
    return client


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


def test_a_second_server_leaves_the_path_to_the_first(
    start_server: StartServer, tmp_path: Path
) -> None:
    path = tmp_path / "s"
    first = start_server("--unix-socket", str(path))
    first.wait_for_log(f"unix:{path}")
    second = start_server("--unix-socket", str(path))
    assert second.wait() == 1
    assert len(second.log) == 1
    assert f"--unix-socket {path}: another server listens there" in second.log[0]
    client = connect(first, path)
    client.lock("k")
    assert first.connect().ask("l", "k", 0) == "timeout"


def test_of_servers_that_start_at_once_one_has_the_path(
    start_server: StartServer, tmp_path: Path
) -> None:
    path = tmp_path / "s"
    killed = start_server("--unix-socket", str(path))
    killed.wait_for_log(f"unix:{path}")
    killed.signal(signal.SIGKILL)
    killed.wait()
    lock = os.open(tmp_path / "s.lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    servers = [start_server("--unix-socket", str(path)) for _ in range(4)]
    os.close(lock)
    refused = 0
    for server in servers:
        try:
            server.wait_for_log(f"unix:{path}")
        except AssertionError:
            assert server.wait() == 1
            assert "another server listens there" in server.log[0]
            refused += 1
    assert refused == 3


def test_only_ones_own_path_is_removed_at_the_end(
    start_server: StartServer, tmp_path: Path
) -> None:
    path = tmp_path / "s"
    first = start_server("--unix-socket", str(path))
    first.wait_for_log(f"unix:{path}")
    path.unlink()
    second = start_server("--unix-socket", str(path))
    second.wait_for_log(f"unix:{path}")
    first.signal(signal.SIGTERM)
    assert first.wait() == 0
    assert connect(second, path).ask("ping") == "ok"


def test_its_permissions(start_server: StartServer, tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = start_server("--unix-socket", str(path), "--unix-socket-mode", "640")
    server.wait_for_log(f"unix:{path}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_bad_path_is_not_reported_as_a_bad_port(
    start_server: StartServer, tmp_path: Path
) -> None:
    for path in (tmp_path / "missing" / "s", tmp_path / ("x" * 200)):
        server = start_server("--unix-socket", str(path))
        assert server.wait() == 1
        assert len(server.log) == 1
        assert f"cannot listen on --unix-socket {path}: " in server.log[0]
        assert "--port" not in server.log[0]


async def test_whoever_holds_the_lock_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflockd.server.unix.OTHERS_START", 0.1)
    lock = os.open(tmp_path / "s.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(SocketPathError, match=r"another process holds .*s\.lock"):
        await UnixSocket.bind(str(tmp_path / "s"), None)
    os.close(lock)


async def test_who_may_look_into_the_directory_holds_up_no_start(tmp_path: Path) -> None:
    directory = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(directory, fcntl.LOCK_EX)
    try:
        bound = await UnixSocket.bind(str(tmp_path / "s"), None)
    finally:
        os.close(directory)
    assert stat.S_IMODE((tmp_path / "s.lock").stat().st_mode) == 0o600
    bound.remove()
    bound.sock.close()


async def test_a_lock_that_is_not_a_file_of_ones_own_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "s.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SocketPathError, match=r"s\.lock: "):
        await UnixSocket.bind(str(tmp_path / "s"), None)
    assert not (tmp_path / "elsewhere").exists()


async def test_a_socket_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(path))
        with pytest.raises(SocketPathError):
            await asyncio.wait_for(UnixSocket.bind(str(path), None), 15)
        assert path.exists()


@pytest.mark.parametrize("path", ["/", ".", "..", ""])
def test_a_directory_is_no_path_for_a_socket(path: str) -> None:
    with pytest.raises(SocketPathError, match="it is a directory"):
        asyncio.run(UnixSocket.bind(path, None))
