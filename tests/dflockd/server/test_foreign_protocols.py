"""Peers that do not speak the lock protocol: a browser can be made to send to any port."""

from __future__ import annotations

import contextlib

import pytest

from tests.dflockd.raw_server import RawClient, ServerProcess, StartServer
from tests.dflockd.server.server_support import stats

TAKES_A_LOCK = b"_\n_\nstable-ref\npage\n_\nl\nstolen\n0 3600\n"

HEADERS = b"Host: 127.0.0.1:6388\r\nContent-Type: text/plain\r\nContent-Length: 51\r\n\r\n"


def rest(client: RawClient) -> bytes:
    """Return everything up to the end of the connection."""
    received = b""
    while True:
        try:
            data = client.sock.recv(65536)
        except ConnectionResetError:
            data = b""
        if not data:
            return received
        received += data


@pytest.fixture
def closed_to_http(start_server: StartServer) -> ServerProcess:
    return start_server()


@pytest.mark.parametrize(
    "line", [b"POST / HTTP/1.1", b"GET / HTTP/1.1", b"OPTIONS / HTTP/1.1", b"l / HTTP/1.1"]
)
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_request_of_a_browser_is_not_run(
    closed_to_http: ServerProcess, line: bytes, pieces: int
) -> None:
    browser = closed_to_http.connect()
    browser.sock.setsockopt(6, 1, 1)  # TCP_NODELAY
    # The server may have ended the connection at the first piece.
    with contextlib.suppress(ConnectionError):
        for start in range(0, len(line), -(-len(line) // pieces)):
            browser.send(line[start : start - (-len(line) // pieces)])
        browser.send(b"\r\n" + HEADERS + TAKES_A_LOCK)
    answer = rest(browser)
    assert not answer or answer.startswith(b"HTTP/1.1 400 ") or answer == b"error\n"
    client = closed_to_http.connect()
    assert stats(client)["locks"] == []
    closed_to_http.wait_for_log(": closed: ")


def test_people_who_open_the_port_in_a_browser_are_told(closed_to_http: ServerProcess) -> None:
    browser = closed_to_http.connect()
    browser.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = rest(browser)
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert b"port for locks" in answer
    closed_to_http.wait_for_log("it speaks HTTP")


@pytest.mark.parametrize(
    ("sent", "log"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "it speaks HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\n" * 500, "it speaks TLS"),
        (b"EHLO example.org\r\n_\r\n_\r\n", "is not a command"),
        (b"*1\r\n$4\r\nPING\r\n", "is not a command"),
    ],
)
def test_other_protocols(closed_to_http: ServerProcess, sent: bytes, log: str) -> None:
    client = closed_to_http.connect()
    client.send(sent + TAKES_A_LOCK)
    rest(client)
    closed_to_http.wait_for_log(log)
    assert stats(closed_to_http.connect())["locks"] == []


def test_many_of_them_do_not_fill_the_log(closed_to_http: ServerProcess) -> None:
    for _ in range(100):
        browser = closed_to_http.connect()
        browser.send(b"GET / HTTP/1.1\r\n\r\n")
        rest(browser)
    assert len([line for line in closed_to_http.log if "it speaks HTTP" in line]) < 50


@pytest.mark.parametrize("first", ["ping", "owner", "x", "stable-ref", "new_command2", ""])
def test_a_command_may_be_unknown_as_the_first_too(server: ServerProcess, first: str) -> None:
    client = server.connect()
    assert client.ask(first, "ref") in ("ok", "error")
    assert client.ask("POST / HTTP/1.1") == "error"
    assert client.ask("ping") == "ok"


def test_the_first_line_may_come_in_pieces(server: ServerProcess) -> None:
    client = server.connect()
    for byte in b"ping\r\n_\r\n_\r\nping\n_\n_\n":
        client.send(bytes([byte]))
    assert [client.line(), client.line()] == ["ok", "ok"]
