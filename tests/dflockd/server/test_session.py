"""What a session does when its transport is in a state that no kernel can be brought to reliably."""

from __future__ import annotations

import asyncio
import errno

import pytest

from dflockd.server import Server
from dflockd.server.session import Session
from dflockd.table import Limits, LockTable, TokenIssuer
from dflockd.wire import Release, Space
from dflockd.wire.tokens import MAX_FENCE
from tests.dflockd.server.session_support import connect, make_server, prepare


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


async def test_many_long_replies_do_not_pile_up(server: Server) -> None:
    holder, greedy = connect(server), connect(server, high_water=10_000)
    for number in range(100):
        holder.session.data_received(b"l\n%d-%b\n0\n" % (number, b"x" * 200))
    greedy.session.data_received(b"stats\n_\n_\n" * 1000)
    assert greedy.written.count(b"\n") == 1
    # It goes on where it stopped.
    greedy.written = b""
    greedy.session.resume_writing()
    await asyncio.sleep(0)
    assert greedy.written.count(b"\n") == 1
    holder.abort()
    greedy.abort()


async def test_keep_and_wait_of_one_read_are_answered_in_one_write(server: Server) -> None:
    holder, transport = connect(server), connect(server)
    holder.session.data_received(b"l\nk\n0\n")
    transport.session.data_received(b"e\nk\n\nkeep\n_\n1000 1000\nw\nk\n0\n")
    first, second, third = transport.written.splitlines()
    assert (first, second) == (b"queued", b"ok")
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
    transport.session.data_received(b"ping\n_\n_\n")
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


async def test_who_does_not_know_a_long_secret_may_send_twice_its_length(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = make_server(auth_secret=b"s" * 2000)
    for count in (1, 2):
        transport = connect(server)
        transport.session.data_received(b"auth\n_\n" + b"x" * 3000)
        assert transport.written == b""
        transport.session.data_received(b"x" * 1000)
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
