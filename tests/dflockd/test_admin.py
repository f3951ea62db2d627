"""Questions to a server that are about no lock: real servers, blocking calls."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dflockd import admin, errors
from dflockd.sync_client import DistributedLock, DistributedSemaphore
from dflockd.wire import Find, Hello, Pause, Status
from examples.demo.stage import LockServer
from tests.dflockd.scripted_server import Last, ScriptedServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockServer]:
    with LockServer(tmp_path_factory.mktemp("admin")) as server:
        yield server


def test_ping(server: LockServer) -> None:
    assert 0 < admin.ping(server.address) < 5
    assert 0 < admin.ping((server.host, server.port)) < 5


def test_stats(server: LockServer) -> None:
    where = [server.address]
    with (
        DistributedLock("stats:lock", servers=where, label="the test"),
        DistributedSemaphore("stats:semaphore", 3, servers=where),
    ):
        report = admin.stats(server.address)
    lock, of_several = report["locks"]
    assert (lock["key"], lock["label"], lock["waiters"]) == ("stats:lock", "the test", 0)
    assert 0 <= lock["held_s"] < 10
    assert "limit" not in lock
    shown = {"key": "stats:semaphore", "limit": 3, "holders": 1, "waiters": 0}
    assert of_several | shown == of_several
    assert report["semaphores"] == []
    assert admin.stats(server.address)["locks"] == []


def test_a_question_leaves_no_connection(server: LockServer) -> None:
    before = admin.stats(server.address)["connections"]
    for _ in range(5):
        admin.ping(server.address)
    assert admin.stats(server.address)["connections"] <= before + 1, "the last may still be ending"


def test_secret(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("right\n")
    with LockServer(tmp_path, "--auth-token-file", str(secret)) as server:
        assert admin.stats(server.address, "right")["locks"] == []
        assert admin.ping(server.address, "right") > 0
        for ask in (admin.stats, admin.ping):
            for token in (None, "wrong"):
                with pytest.raises(errors.AuthRefusedError) as refused:
                    ask(server.address, token)
                assert server.address in str(refused.value)


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(errors.UnreachableError, match=f"127.0.0.1:{port} cannot be reached"):
        admin.ping(("127.0.0.1", port))


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\n",
        b"ok {nonsense\n",
        b'ok {"locks": "\xff"}\n',
        b'ok {"locks": ' + b"[" * 10_000 + b"\n",
    ],
)
@pytest.mark.parametrize(
    "ask", [admin.stats, lambda server: DistributedLock("key", servers=[server]).inspect()]
)
def test_not_a_lock_server(ask: Callable[[str], object], answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        def impostor() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(answer)
                connection.recv(100)

        thread = threading.Thread(target=impostor, daemon=True)
        thread.start()
        with pytest.raises(errors.BadReplyError, match=address):
            ask(address)
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize("server", ["", "one:x", ("127.0.0.1", 0), 5])
def test_no_address(server: object) -> None:
    with pytest.raises(errors.InvalidArgumentError):
        admin.ping(server)  # type: ignore[arg-type]


def test_find(server: LockServer) -> None:
    where = [server.address]
    with DistributedLock("find:lock", servers=where, label="sync[3f2a-11] w1 pid 7"):
        for text in ("find:lock", "3F2A", "w1 pid"):
            report = admin.find(server.address, text)
            assert report["matched"] == 1
            assert report["found"][0]["holder"]["label"] == "sync[3f2a-11] w1 pid 7"
        inquiry = admin.Inquiry(server.address)
        assert inquiry.find("sync[", waiters=True)["found"] == []
        inquiry.close()


def test_pause_and_resume(server: LockServer) -> None:
    where = server.address
    admin.pause(where, "admin:paused", 90.5, "the vendor is down", "ann@w1")
    [row] = admin.find(where, "admin:paused")["found"]
    paused = row["paused"]
    assert (paused["by"], paused["reason"]) == ("ann@w1", "the vendor is down")
    assert 80 < paused["left_s"] <= 90.5
    assert DistributedLock("admin:paused", 0, servers=[where]).acquire() is False
    assert admin.resume(where, "admin:paused") is True
    assert admin.resume(where, "admin:paused") is False
    assert admin.find(where, "admin:paused")["found"] == []


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (("", "", 3.2, None), "paused for 3 s"),
        (("me", "", 300.0, None), "paused by me for 5 min"),
        (("me", "why\x1b[2J", 3.0, 7200.0), r"paused by me for 3 s, 2 h left: why\x1b[2J"),
    ],
)
def test_a_pause_in_words(said: tuple[object, ...], words: str) -> None:
    names = ("by", "reason", "paused_s", "left_s")
    assert admin.describe_pause(dict(zip(names, said, strict=True))) == words


def test_a_published_server_cannot_pause() -> None:
    scripted = ScriptedServer()
    try:
        scripted.script(Hello, Status.ERROR)
        scripted.script(Pause, Status.ERROR)
        for pause in (
            lambda: admin.pause(str(scripted), "k"),
            DistributedLock("k", servers=[str(scripted)]).pause,
        ):
            with pytest.raises(errors.UnsupportedError, match="does not know pauses: upgrade it"):
                pause()
    finally:
        scripted.stop()


@pytest.mark.parametrize("answer", [Status.ERROR, Last(b"error\n")])
def test_a_published_server_cannot_find(answer: object) -> None:
    """Some answer `error` to what they do not know, and some end the connection as well."""
    scripted = ScriptedServer()
    try:
        for kind in (Hello, Find):
            scripted.script(kind, answer)  # type: ignore[arg-type]
        with pytest.raises(errors.UnsupportedError) as refused:
            admin.find(str(scripted), "x")
    finally:
        scripted.stop()
    assert str(refused.value) == (
        f"server {scripted}: the server does not know searches: upgrade it"
    )
