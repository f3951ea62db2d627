"""Connections of the HTTP port: slow, silent, greedy, too many."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from dflockd.http import gate
from dflockd.http.head import HttpRequest
from tests.dflockd.client_support import make_certificate
from tests.dflockd.http.http_here import GET, fill, site_here, until
from tests.dflockd.http.http_site import SECRET, Site
from tests.dflockd.raw_server import PATIENCE, ServerProcess

# Slow ones.


async def test_a_request_that_trickles_in_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "HEAD_TIMEOUT", 0.5)
    async with site_here() as here:
        peer = await here.connect()
        peer.writer.write(b"GET / HTTP/1.1\r\n")

        async def trickle() -> None:
            while True:
                peer.writer.write(b"A: b\r\n")
                await asyncio.sleep(0.05)

        task = asyncio.create_task(trickle())
        assert await peer.status() == 408
        assert await peer.ended()
        task.cancel()


async def test_the_next_request_of_a_connection_has_as_much_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with site_here() as here:
        peer = await here.connect()
        assert await peer.ask() == 200
        monkeypatch.setattr(gate, "HEAD_TIMEOUT", 0.1)
        peer.writer.write(GET[:9])
        assert await peer.status() == 408


async def test_a_silent_connection_ends_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "HEAD_TIMEOUT", 0.1)
    async with site_here() as here:
        assert await (await here.connect()).ended()


async def test_an_idle_connection_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "IDLE_TIMEOUT", 0.1)
    async with site_here() as here:
        peer = await here.connect()
        assert await peer.ask() == 200
        assert await peer.ended()


async def test_an_idle_connection_is_kept_for_longer_than_a_head_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with site_here() as here:
        peer = await here.connect()
        await until(lambda: any(each._timer for each in here.http._house._gates))
        monkeypatch.setattr(gate, "HEAD_TIMEOUT", 0.1)
        assert await peer.ask() == 200
        await asyncio.sleep(0.5)  # so long nobody says anything, and it is kept
        assert await peer.ask() == 200


async def test_who_does_not_read_the_answer_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gate, "WRITE_TIMEOUT", 0.3)
    async with site_here() as here:
        fill(here.table, 500)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with sock:
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, (here.where.hostname, here.where.port))
            ask = b"GET /api/locks?limit=500 HTTP/1.1\r\nHost: a\r\n\r\n"
            # As many as it takes to fill what the kernel keeps.
            await loop.sock_sendall(sock, ask * 60)
            await until(lambda: not here.http._house.admission.total)
        assert "127.0.0.1: answer was not read in time" in caplog.text


async def test_who_reads_the_answers_late_gets_all_of_them() -> None:
    async with site_here() as here:
        fill(here.table, 500)
        peer = await here.connect()
        peer.writer.write(b"GET /api/locks?limit=500 HTTP/1.1\r\nHost: a\r\n\r\n" * 60)
        await until(lambda: any(each._can_write for each in here.http._house._gates))

        assert [await peer.status() for _ in range(60)] == [200] * 60


# Greedy ones.


async def test_requests_behind_one_another_are_answered_in_their_order() -> None:
    async with site_here() as here:
        peer = await here.connect()
        paths = ["/healthz", "/nowhere", "/api/locks", "/healthz"] * 20
        peer.writer.write(
            b"".join(b"GET %s HTTP/1.1\r\nHost: a\r\n\r\n" % p.encode() for p in paths)
        )
        for path in paths:
            assert await peer.status() == (404 if path == "/nowhere" else 200)


async def test_nonsense_behind_a_request_does_not_come_before_its_answer() -> None:
    async with site_here() as here:
        fill(here.table, 1000)
        peer = await here.connect()
        peer.writer.write(b"GET /api/locks HTTP/1.1\r\nHost: a\r\n\r\nnonsense")
        assert [await peer.status() for _ in range(3)] == [200, 400, 0]


async def test_what_is_sent_behind_the_last_request_is_not_looked_at() -> None:
    async with site_here() as here:
        peer = await here.connect()
        peer.writer.write(GET[:-2] + b"Connection: close\r\n\r\n" + GET)
        assert [await peer.status() for _ in range(2)] == [200, 0]


async def test_no_more_is_kept_of_a_stream_than_a_head_can_have() -> None:
    async with site_here() as here:
        peer = await here.connect()
        peer.writer.write(b"GET / HTTP/1.1\r\nX: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                peer.writer.write(b"x" * 1000)
                await peer.writer.drain()
        assert await peer.status() == 431


# Handshakes.


async def test_nothing_is_kept_of_a_handshake_that_failed(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*make_certificate(tmp_path))
    async with site_here(tls=context) as here:
        for _ in range(3):
            assert await (await here.connect()).ask() == 0
        await until(lambda: not here.http._house.admission.total)
        assert not here.http._house._gates


@pytest.mark.parametrize("uvloop", [True, False])
def test_a_handshake_that_goes_on_is_in_no_way_of_a_clean_stop(
    tmp_path: Path, uvloop: bool
) -> None:
    cert, key = make_certificate(tmp_path)
    flags = ("--http-port", "0", "--tls-cert", str(cert), "--tls-key", str(key))
    state = tmp_path / "state"
    server = ServerProcess(*flags, "--state-dir", str(state), uvloop=uvloop)
    try:
        where = urlsplit(Site(server).url)
        client = ssl.create_default_context(cafile=str(cert))
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        peer = client.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        with pytest.raises(ssl.SSLWantReadError):
            peer.do_handshake()
        with socket.create_connection((where.hostname, where.port), PATIENCE) as connection:
            connection.sendall(outgoing.read())
            assert connection.recv(1)
            server.signal(signal.SIGTERM)
            assert server.wait() == 0, server.log
    finally:
        server.end()
    assert json.loads((state / "state.json").read_text())["clean"]


# Too many.


async def test_silent_connections_make_room() -> None:
    async with site_here(most=8) as here:
        silent = [await here.connect() for _ in range(8)]
        for _ in range(20):
            assert await here.ask() == 200
        assert await silent[0].ended(), "the oldest goes first"
        assert here.http._house.admission.total <= 8


async def test_idle_connections_make_room_and_those_with_the_secret_go_last() -> None:
    proof = b"GET /api/stats HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %s\r\n\r\n"
    proof %= SECRET.encode()
    async with site_here(most=16, secret=SECRET.encode()) as here:
        known = await here.connect()
        assert await known.ask(proof) == 200
        strangers = [await here.connect() for _ in range(40)]
        for stranger in strangers:
            assert await stranger.ask() in (200, 0)
        assert await here.ask() == 200
        assert await known.ask(proof) == 200, "it has been idle for longer than they"
        assert here.http._house.admission.total <= 16


async def test_guessing_shuts_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflockd.http.guard.PAUSE", 3600)
    wrong = b"GET / HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer x\r\n\r\n"
    async with site_here(most=8, secret=b"secret") as here:
        for _ in range(20):
            (await here.connect()).writer.write(wrong)
        assert await here.ask() == 200


async def test_who_is_refused_shuts_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "LINGER", PATIENCE)
    async with site_here(8) as here:
        for _ in range(20):
            peer = await here.connect()
            assert [await peer.ask(), await peer.ask(b"nonsense\r\n\r\n")] == [200, 400]
        assert await here.ask() == 200


async def test_where_all_are_busy_one_more_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async with site_here(most=8) as here:
        busy = asyncio.Event()

        async def look(*_: object) -> None:
            await busy.wait()

        monkeypatch.setattr(here.http._exposition, "text", look)
        for _ in range(6):
            (await here.connect()).writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
        await until(lambda: here.http._house.admission.inside == 6)
        assert await here.ask() == 503
        for peer in here.peers:
            peer.writer.transport.abort()
        await until(lambda: not here.http._house.admission.inside)
        assert await here.ask() == 200


@pytest.fixture(params=[True, False], ids=["uvloop", "asyncio"])
def few_files(request: pytest.FixtureRequest) -> Iterator[Site]:
    """A server with few open files."""
    server = ServerProcess("--http-port", "0", open_files=256, uvloop=request.param)
    try:
        yield Site(server)
    finally:
        server.end()


def test_half_open_connections_leave_the_locks_alone(few_files: Site) -> None:
    site, where = few_files, urlsplit(few_files.url)
    with contextlib.ExitStack() as stack:
        for _ in range(400):
            sock = socket.create_connection((where.hostname, where.port), PATIENCE)
            stack.callback(sock.close)
            sock.send(b"GET / HT")
        for number in range(20):
            assert site.server.connect().lock(f"key:{number}")
        assert site.ask("/healthz").status == 200
        assert site.ask("/readyz").status == 200
        assert site.json("/api/stats")["connections"] == 20
    assert "cannot accept connections" not in "\n".join(site.server.log)


async def test_what_is_sent_behind_a_request_that_is_worked_on_waits_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with site_here() as here:
        go_on = asyncio.Event()

        async def wait() -> bytes:
            await go_on.wait()
            return b"made"

        monkeypatch.setattr(here.http._exposition, "text", wait)
        peer = await here.connect()
        peer.writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
        house = here.http._house
        await until(lambda: len(house._inside) == 1)
        (one,) = house._inside
        number = 200_000
        peer.writer.write(GET * number)
        await until(lambda: one._reader.is_full)
        for _ in range(50):
            await asyncio.sleep(0)
        assert one._reader.pending < number * len(GET) / 2, "the kernel has the rest"
        go_on.set()
        assert [await peer.status() for _ in range(100)] == [200] * 100


async def test_an_answer_lets_in_no_more_than_was_taken_away() -> None:
    async with site_here() as here:
        peer = await here.connect()
        await peer.ask()
        (one,) = here.http._house._inside
        most = 0
        receive = one._reader.receive

        def noted(data: bytes) -> None:
            nonlocal most
            receive(data)
            most = max(most, one._reader.pending)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(one._reader, "receive", noted)
            peer.writer.write(GET * 100_000)
            assert [await peer.status() for _ in range(1000)] == [200] * 1000
        # What is read at once, on top of what one head can need.
        assert most <= (256 + 32 + 1) * 1024


async def test_one_request_is_let_in_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async with site_here() as here:
        loop, turn, let_in = asyncio.get_running_loop(), 0, []

        def count() -> None:
            nonlocal turn
            turn += 1
            loop.call_soon(count)

        pass_on = gate.Gate.pass_on

        def noted(self: gate.Gate, request: HttpRequest) -> None:
            let_in.append(turn)
            pass_on(self, request)

        monkeypatch.setattr(gate.Gate, "pass_on", noted)
        count()
        peers = [await here.connect() for _ in range(20)]
        for peer in peers:
            peer.writer.write(GET)
        assert [await peer.status() for peer in peers] == [200] * 20
        assert len(set(let_in)) == 20
