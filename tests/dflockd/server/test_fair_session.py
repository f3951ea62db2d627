"""A session with much to do lets others go first, and forgets nothing meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from dflockd.server import Server
from dflockd.server import session as module
from dflockd.server.handling import SLICE
from dflockd.server.server import ENDS
from dflockd.server.session import MOST_COLLECTED, READ_AHEAD
from tests.dflockd.server.session_support import FullTransport, connect, make_server

PING = b"ping\n_\n_\n"


@pytest.fixture
async def server() -> Server:
    return make_server()


def replies(transport: FullTransport) -> list[bytes]:
    return transport.written.splitlines()


async def until_read(transport: FullTransport) -> None:
    """Wait until the session reads again, or has ended."""
    async with asyncio.timeout(60):
        while not (transport.is_reading or transport.closing):  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_others_are_served_between_the_turns_of_a_greedy_one(server: Server) -> None:
    greedy, other = connect(server, 1 << 30), connect(server)
    greedy.session.data_received(PING * 80_000)
    assert len(greedy.written) < MOST_COLLECTED + 10
    assert not greedy.is_reading
    other.session.data_received(PING)
    assert other.written == b"ok\n"
    turns = 0
    while not greedy.is_reading:
        before = len(greedy.written)
        await asyncio.sleep(0)
        turns += 1
        assert len(greedy.written) - before < MOST_COLLECTED + 10
    assert greedy.written == b"ok\n" * 80_000
    assert turns > 50


async def test_a_turn_is_short_whatever_its_requests_take(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TURN", -1.0)
    transport = connect(server)
    transport.session.data_received(PING * 100)
    assert len(replies(transport)) == 2 * module.REQUESTS
    await until_read(transport)
    assert replies(transport) == [b"ok"] * 100


async def test_one_long_reply_ends_a_turn(server: Server) -> None:
    holder, greedy = connect(server), connect(server, 1 << 30)
    for number in range(100):
        holder.session.data_received(b"l\n%d-%b\n0\n" % (number, b"x" * 200))
    greedy.session.data_received(b"stats\n_\n_\n" * 10)
    assert len(replies(greedy)) == 1
    await until_read(greedy)
    assert len(replies(greedy)) == 10


async def test_those_that_rest_share_a_turn(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflockd.server.server.TURN", -1.0)
    holder, *greedy = (connect(server, 1 << 30) for _ in range(6))
    for number in range(100):
        holder.session.data_received(b"l\n%d-%b\n0\n" % (number, b"x" * 200))
    for transport in greedy:
        transport.session.data_received(b"stats\n_\n_\n" * 3)
    # The first one's first is made at once.
    for turn in range(1, 3 * len(greedy)):
        await asyncio.sleep(0)
        answered = [len(replies(transport)) for transport in greedy]
        assert sum(answered) == 1 + turn
        assert max(answered) - min(answered) <= 2
    # While others rest, one that has just come does not go on for long either.
    for transport in greedy:
        transport.session.data_received(b"stats\n_\n_\n" * 3)
    holder.written = b""
    holder.session.data_received(PING * 1000)
    assert len(replies(holder)) == module.REQUESTS
    for transport in (holder, *greedy):
        await until_read(transport)


async def test_one_long_reply_in_a_turn_is_enough(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflockd.server.server.TURN", -1.0)
    holder, *curious = (connect(server, 1 << 30) for _ in range(6))
    for number in range(100):
        holder.session.data_received(b"l\n%d-%b\n0\n" % (number, b"x" * 200))
    await until_read(holder)
    # Each asks once, behind something short; who asks for nothing long is not held up.
    for transport in curious:
        transport.session.data_received(PING + b"stats\n_\n_\n")
    holder.written = b""
    holder.session.data_received(PING)
    assert replies(holder) == [b"ok"]
    for turn in range(1, len(curious) + 1):
        long = [transport for transport in curious if len(replies(transport)) > 1]
        assert len(long) == turn
        await asyncio.sleep(0)
    for transport in curious:
        await until_read(transport)
        first, report = replies(transport)
        assert first == b"ok"
        assert report.startswith(b"ok {")


async def test_what_comes_between_turns_is_served_in_order(server: Server) -> None:
    # TLS may hand on what it had read before it was told to stop.
    transport = connect(server, 1 << 30)
    transport.session.data_received(PING * 3000 + b"l\nk\n0\n")
    so_far = len(transport.written)
    for number in range(100):
        transport.session.data_received(b"x\n\n\n" if number % 2 else PING)
    assert len(transport.written) == so_far
    await until_read(transport)
    lines = replies(transport)
    assert lines[:3000] == [b"ok"] * 3000
    assert lines[3000].startswith(b"ok ")
    assert lines[3001:] == [b"ok", b"error"] * 50


async def test_a_request_that_waits_holds_up_what_is_behind_it(server: Server) -> None:
    holder, transport = connect(server), connect(server, 1 << 30)
    holder.session.data_received(b"l\nk\n0\n")
    token = replies(holder)[0].split()[1]
    transport.session.data_received(PING * 3000 + b"l\nk\n30\n" + PING * 100)
    await until_read(transport)
    assert len(replies(transport)) == 3000
    holder.session.data_received(b"r\nk\n" + token + b"\n")
    await asyncio.sleep(0)
    await until_read(transport)
    assert len(replies(transport)) == 3101


async def test_too_much_behind_a_request_that_waits_is_found_in_a_later_turn(
    server: Server,
) -> None:
    holder, transport = connect(server), connect(server, 1 << 30)
    holder.session.data_received(b"l\nk\n0\n")
    behind = PING * (READ_AHEAD // len(PING) + 1)
    transport.session.data_received(PING * 3000 + b"l\nk\n30\n" + behind)
    await until_read(transport)
    assert transport.closing
    assert replies(transport)[3000:] == [b"error"]
    assert not server.table.find(0, b"k").waiters  # type: ignore[arg-type, union-attr]


async def test_nothing_behind_a_wrong_secret_is_run(server: Server) -> None:
    guarded = make_server(auth_secret=b"sesame")
    transport = connect(guarded, 1 << 30)
    asked = b"auth\n_\nsesame\n" + PING * 3000 + b"auth\n_\nwrong\n" + b"l\nk\n0\n" * 100
    transport.session.data_received(asked)
    await asyncio.wait_for(closed(transport), 15)
    assert replies(transport) == [b"ok"] * 3001 + [b"error_auth"]
    assert len(guarded.table) == 0


async def closed(transport: FullTransport) -> None:
    while not transport.closing:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_a_peer_that_stops_reading_between_turns_goes_on_where_it_was(
    server: Server,
) -> None:
    transport = connect(server, high_water=0)
    transport.session.data_received(PING * 5000)
    written = 0
    while written < 5000:
        lines = replies(transport)
        assert set(lines) == {b"ok"}
        written += len(lines)
        transport.written = b""
        await asyncio.sleep(0)
        assert not transport.written
        transport.session.resume_writing()
        if not transport.written:
            await asyncio.sleep(0)
    assert written == 5000


async def test_the_read_timeout_does_not_run_while_the_server_is_behind(server: Server) -> None:
    transport = connect(server, 1 << 30)
    transport.session.data_received(PING * 3000 + b"pi")
    assert transport.session._frame_timer is None
    await until_read(transport)
    assert transport.session._frame_timer is not None
    transport.session.data_received(b"ng\n_\n_\n")
    assert transport.session._frame_timer is None
    assert replies(transport) == [b"ok"] * 3001


async def test_the_end_between_turns_leaves_nothing(server: Server) -> None:
    transport = connect(server, 1 << 30)
    transport.session.data_received(PING * 3000 + b"l\nk\n0\n")
    transport.abort()
    await asyncio.sleep(0)
    assert len(server.table) == 0
    assert not server.sessions


async def test_draining_between_turns_answers_first(server: Server) -> None:
    transport = connect(server, 1 << 30)
    transport.session.data_received(PING * 3000)
    server.draining = True
    server.table.drain(0.0)
    answered = len(replies(transport))
    transport.session.drain()
    assert not transport.closing
    await until_read(transport)
    assert transport.closing
    assert replies(transport)[answered:] == [b"error_draining"] * (3000 - answered)


async def test_many_that_end_at_once_let_others_go_first(server: Server) -> None:
    number = 10 * ENDS
    ending = [connect(server) for _ in range(number)]
    for index, transport in enumerate(ending):
        transport.session.data_received(b"l\n%d\n0\n" % index)
    for transport in ending:
        transport.session.eof_received()
        transport.abort()
    turns = 0
    while len(server.table) or server.sessions:
        # A step for what stands on each, and one for itself.
        assert len(server.table) >= number - (turns + 1) * ENDS
        assert len(server.sessions) >= number - (turns + 1) * ENDS
        turns += 1
        await asyncio.sleep(0)
    assert turns >= 2 * number // ENDS - 1


async def test_who_has_ended_and_still_stands_in_the_queue_is_granted_nothing(
    server: Server,
) -> None:
    holder, waiter, heir = connect(server), connect(server), connect(server)
    holder.session.data_received(b"l\nk\n0\n")
    waiter.session.data_received(b"stable-ref\nref\n_\nl\nk\n30\n")
    heir.session.data_received(b"l\nk\n30\n")
    for transport in [connect(server) for _ in range(ENDS)]:
        transport.abort()
    waiter.abort()
    # Its turn comes before its end does.
    token = holder.written.split()[1]
    holder.session.data_received(b"r\nk\n%b\n" % token)
    while waiter.session.peer.id in server.sessions:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert b"ok" not in waiter.written.partition(b"\n")[2]
    assert heir.written.startswith(b"ok ")


async def test_draining_ends_many_in_turns(server: Server) -> None:
    idle = [connect(server) for _ in range(2 * SLICE + 1)]
    server.draining = True
    server._end_idle()
    for ended in (SLICE, 2 * SLICE, len(idle)):
        assert sum(transport.closing for transport in idle) == ended
        await asyncio.sleep(0)
