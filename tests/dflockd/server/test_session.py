"""What a session does when its transport is in a state that no kernel can be brought to reliably."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable

import pytest

from dflockd.server import Server
from dflockd.server.session import MOST_BESIDE, READ_AHEAD, Session
from dflockd.table import Limits, LockTable, TokenIssuer
from dflockd.table.identity import Identity
from dflockd.wire import MAX_LINE, Release, Space
from dflockd.wire.tokens import MAX_FENCE
from tests.dflockd.server.session_support import connect, make_server, prepare, say


@pytest.fixture
async def server() -> Server:
    return make_server()


async def test_a_peer_that_does_not_read_its_last_reply_is_dropped(server: Server) -> None:
    # There is too little to be sent for the transport to say that it is too much.
    transport = connect(server)
    transport.session.data_received(b"l\nk\n0\n")
    assert transport.written.startswith(b"ok ")
    transport.session.eof_received()
    assert len(server.table) == 0
    assert transport.closing
    assert not transport.aborted.is_set()
    async with asyncio.timeout(10):
        await transport.aborted.wait()
    assert not server.sessions


async def until(happens: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not happens():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_many_long_replies_do_not_pile_up(server: Server) -> None:
    holder, greedy = connect(server), connect(server, high_water=10_000)
    for number in range(100):
        holder.session.data_received(b"l\n%d-%b\n0\n" % (number, b"x" * 200))
    greedy.session.data_received(b"stats\n_\n_\n" * 1000)
    assert not greedy.is_reading
    for _ in range(2):
        await until(lambda: b"\n" in greedy.written)
        for _ in range(100):
            await asyncio.sleep(0)
        assert greedy.written.count(b"\n") == 1
        # It goes on where it stopped.
        greedy.written = b""
        greedy.session.resume_writing()
    holder.abort()
    greedy.abort()


async def test_requests_of_one_read_are_answered_in_one_write(server: Server) -> None:
    holder, transport = connect(server), connect(server)
    holder.session.data_received(b"l\nk\n0\n")
    writes: list[bytes] = []
    transport.write = writes.append  # type: ignore[method-assign]
    transport.session.data_received(
        b"hello\nhere\nversion=1\ne\nk\n\nwait\nk\ntimeout=0 away=1000 hold=1000\n"
    )
    [written] = writes
    first, second, third = written.splitlines()
    assert first.startswith(b"hello ok ")
    assert second == b"queued"
    assert third.startswith(b"timeout ")
    holder.abort()
    transport.abort()


@pytest.mark.parametrize("cut", range(1, 12))
async def test_a_first_line_in_pieces_is_looked_at_to_its_end(server: Server, cut: int) -> None:
    browser = connect(server)
    line = b"l / HTTP/1.1\r\n"
    for piece in (line[:cut], line[cut:], b"_\n_\nl\nk\n0 3600\n"):
        browser.session.data_received(piece)
    assert browser.closing
    assert len(server.table) == 0


async def test_a_fault_in_one_request_is_answered_and_survived(server: Server) -> None:
    # No fence is left, and that only a bug could bring about.
    exhausted = Server(LockTable(Limits(), TokenIssuer(b"secret", MAX_FENCE)), server.options)
    prepare(exhausted)
    transport = connect(exhausted)
    transport.session.data_received(b"l\nk\n0\n")
    await say(transport, b"ping\n_\n_\n")
    assert transport.written == b"error\nok\n"
    transport.abort()


async def test_d19_servers_in_one_process_share_nothing(server: Server) -> None:
    # D19: the state was the module's.
    other = Server(LockTable(Limits(), TokenIssuer(b"secret", 0)), server.options)
    prepare(other)
    transports = [connect(server), connect(other)]
    for transport in transports:
        transport.session.data_received(b"l\nk\n0\n")
        assert transport.written.startswith(b"ok ")
        transport.abort()


@pytest.mark.parametrize(
    ("number", "kept"),
    [
        (errno.ETIMEDOUT, True),
        (errno.EHOSTUNREACH, True),
        (errno.ENETUNREACH, True),
        (errno.ECONNRESET, False),
        (errno.EPIPE, False),
    ],
)
async def test_only_a_connection_that_fell_silent_leaves_its_locks(
    server: Server, number: int, kept: bool
) -> None:
    transport = connect(server)
    transport.session.data_received(b"l\nk\n0\n")
    transport.session.connection_lost(OSError(number, "as the kernel says it"))
    assert len(server.table) == kept


async def test_one_request_waits_while_its_peer_does_not_read(server: Server) -> None:
    transport = connect(server)
    transport.session.data_received(b"ping\n_\n_\n")
    transport.session.pause_writing()
    transport.session.data_received(b"l\nk\n0\n")
    assert len(server.table) == 0
    transport.session.resume_writing()
    assert len(server.table) == 1
    transport.abort()


async def test_one_request_waits_while_a_reply_is_owed(server: Server) -> None:
    holder, transport = connect(server), connect(server)
    holder.session.data_received(b"l\nk\n0\n")
    transport.session.data_received(b"ping\n_\n_\nl\nk\n9\n")
    # As if very many were answered before it.
    token = holder.written.split()[1]
    effects = server.table.handle(holder.session.peer, Release(Space.LOCK, b"k", token), 0.0)
    transport.session.owe()
    transport.session.data_received(b"l\nother\n0\n")
    assert len(server.table) == 1
    server._dispatch([effect for effect in effects if effect[0] == transport.session.peer.id])
    await asyncio.sleep(0)
    ping, first, second = transport.written.splitlines()
    assert (ping, first[:3], second[:3]) == (b"ok", b"ok ", b"ok ")
    holder.abort()
    transport.abort()


async def test_what_an_aborted_connection_held_waits_for_its_owner() -> None:
    """As after a reset: nobody has said that it is done with it."""
    for ends, left in ((Session.abort, 1), (Session.eof_received, 0)):
        server = make_server(Limits(orphan_ttl=600))
        transport = connect(server)
        transport.session.data_received(b"l\nk\n0\n")
        ends(transport.session)
        assert len(server.table) == left
        if not transport.aborted.is_set():
            transport.abort()


@pytest.mark.parametrize(("exc", "left"), [(ConnectionResetError(), 1), (None, 0)])
async def test_what_a_reset_connection_held_waits_for_its_owner(
    exc: Exception | None, left: int
) -> None:
    server = make_server(Limits(orphan_ttl=600))
    transport = connect(server)
    transport.session.data_received(b"l\nk\n0\n")
    transport.session.connection_lost(exc)
    assert len(server.table) == left


async def test_a_drain_leaves_who_holds_a_lock_until_it_is_released(server: Server) -> None:
    transport = connect(server)
    transport.session.data_received(b"l\nk\n0\n")
    server.draining = True
    server.table.drain(0.0)
    transport.session.drain()
    assert not transport.closing
    transport.session.data_received(b"r\nk\n%b\n" % transport.written.split()[1])
    assert transport.closing
    assert transport.written.endswith(b"\nok\n")
    transport.abort()


async def test_who_does_not_know_a_long_secret_may_send_as_much_as_it_takes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = make_server(auth_secret=b"s" * 2000)
    for count in (1, 2):
        transport = connect(server)
        transport.session.data_received(b"auth\n_\n" + b"x" * (1993 + MOST_BESIDE))
        assert transport.written == b""
        transport.session.data_received(b"x")
        assert transport.written == b"error_auth\n"
        assert server.unauthorized == count
        transport.session.data_received(b"x" * 1000)
        assert server.unauthorized == count, "what comes then is not looked at"
        transport.abort()
    assert caplog.messages.count("connection 1: wrong or missing auth token") == 1


async def test_a_request_that_does_not_end_in_time_ends_its_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = make_server(read_timeout=1)  # whole seconds, when compiled
    transport = connect(server)
    transport.session.data_received(b"l\nk\n")
    async with asyncio.timeout(60):
        await transport.closed.wait()
    assert transport.written == b"error\n"
    assert caplog.messages == ["connection 1: read timeout inside a request"]
    transport.abort()


async def test_a_request_that_comes_byte_by_byte_has_one_read_timeout(server: Server) -> None:
    transport = connect(server)
    transport.session.data_received(b"l\nk")
    timer = transport.session._frame_timer
    assert timer is not None
    for byte in b"\n3":
        transport.session.data_received(bytes([byte]))
        assert transport.session._frame_timer is timer
    transport.session.data_received(b"\npi")
    assert transport.written.startswith(b"ok ")
    assert transport.session._frame_timer not in (None, timer), "what has begun then has its own"
    assert timer.cancelled()
    transport.abort()


@pytest.mark.parametrize(
    ("sent", "reply", "log"),
    [
        (b"GET / HTTP/1.1\r\n", b"HTTP/1.1 400 ", "it speaks HTTP"),
        (b"\x16\x03\x01\n", b"", "it speaks TLS (--tls-cert is not set)"),
        (b"EHLO example.org\n", b"error\n", "its first line is not a command"),
    ],
)
async def test_what_is_not_the_lock_protocol_is_told_so_and_logged(
    server: Server, caplog: pytest.LogCaptureFixture, sent: bytes, reply: bytes, log: str
) -> None:
    transport = connect(server)
    transport.session.data_received(sent)
    assert transport.written[:13] == reply
    assert transport.closing
    assert caplog.messages == [f"connection 1: closed: {log}"]
    transport.abort()


async def test_a_line_that_is_too_long_is_answered_behind_what_was_asked_before(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    transport = connect(server)
    transport.session.data_received(b"ping\n_\n_\nl\n" + b"k" * (MAX_LINE + 2))
    assert transport.written == b"ok\nerror\n"
    assert transport.closing
    [line] = caplog.messages
    assert line.startswith("connection 1: ")
    assert str(MAX_LINE) in line
    transport.abort()


async def test_too_much_behind_a_request_that_waits_is_logged(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    holder, transport = connect(server), connect(server)
    for each in (holder, transport):
        each.session.data_received(b"l\nk\n30\n")
    transport.session.data_received(b"x" * READ_AHEAD)
    assert not transport.closing
    transport.session.data_received(b"x")
    assert transport.closing
    assert transport.written == b"error\n"
    assert caplog.messages == ["connection 2: too much sent behind a waiting request"]
    holder.abort()
    transport.abort()


async def test_who_arrives_at_the_very_moment_of_a_drain_is_sent_away(server: Server) -> None:
    server.draining = True
    transport = connect(server)
    assert transport.closing
    transport.abort()
    assert not server.sessions


async def test_who_does_not_know_the_secret_may_ask_once_who_the_server_is() -> None:
    server = make_server(auth_secret=b"sesame")
    server.table.identity = identity = Identity(b"key")
    asked = b"identify\n_\n%b\n" % (b"0" * 32)
    for first, more in ((b"", False), (b"auth\n_\nsesame\n", True)):
        transport = connect(server)
        transport.session.data_received(first + asked + b"ping\n_\n_\n")
        proof = b'ok {"proof":"%b"}' % identity.prove(b"0" * 32)
        assert transport.written.splitlines() == [b"ok", proof, b"ok"][not more : 2 + more]
        assert transport.closing is not more
        transport.abort()


async def test_the_write_timeout_is_not_begun_anew_by_the_end_of_a_connection(
    server: Server,
) -> None:
    transport = connect(server, high_water=0)
    transport.session.data_received(b"ping\n_\n_\n")
    timer = transport.session._write_timer
    assert timer is not None
    transport.session.eof_received()
    assert transport.closing
    assert transport.session._write_timer is timer
    transport.abort()
