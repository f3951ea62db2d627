"""A session with much to do lets others go first, and forgets nothing meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import math

import pytest

from dflockd import clock
from dflockd.server import Server, slices
from dflockd.server.handling import FEW
from dflockd.server.session import READ_AHEAD
from dflockd.table import Limits
from dflockd.table.limits import STEP
from dflockd.wire import Acquire, Space, Status
from tests.dflockd.server.session_support import FullTransport, connect, give_time, make_server, say

PING = b"ping\n_\n_\n"


@pytest.fixture
async def server() -> Server:
    return make_server()


@pytest.fixture
def no_time(server: Server) -> None:
    """Each look at the clock finds that it is too late for more."""
    give_time(server.slices, -1.0)


def fill(server: Server, keys: int, now: float | None = None) -> None:
    peer = server.table.connect()
    for number in range(keys):
        request = Acquire(Space.LOCK, b"key:%d" % number, 1, 0, 60)
        server.table.handle(peer, request, clock.now() if now is None else now)


def replies(transport: FullTransport) -> list[bytes]:
    return transport.written.splitlines()


async def until_read(transport: FullTransport) -> None:
    """Wait until the session reads again, or has ended."""
    async with asyncio.timeout(60):
        while not (transport.is_reading or transport.closing):  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_others_are_served_between_the_turns_of_a_greedy_one(server: Server) -> None:
    server.slices.slice = slices.SLICE
    greedy, other = connect(server, 1 << 30), connect(server)
    greedy.session.data_received(PING * 80_000)
    assert not greedy.is_reading
    other.session.data_received(PING)
    assert other.written == b"ok\n"
    turns = 0
    while not greedy.is_reading:
        turns += 1
        await asyncio.sleep(0)
    assert greedy.written == b"ok\n" * 80_000
    assert turns > 10


@pytest.mark.usefixtures("no_time")
async def test_after_each_request_the_clock_is_looked_at(server: Server) -> None:
    transport = connect(server)
    transport.session.data_received(PING * 100)
    for answered in range(1, 101):
        assert len(replies(transport)) == answered
        await asyncio.sleep(0)
    assert transport.is_reading


@pytest.mark.usefixtures("no_time")
async def test_all_sessions_share_a_turn(server: Server) -> None:
    """What comes in once its time is over waits for the next, in its order, whoever it is from."""
    first, *more = (connect(server) for _ in range(6))
    for transport in (first, *more):
        transport.session.data_received(PING)
    assert replies(first) == [b"ok"]
    for served in range(1, 6):
        await asyncio.sleep(0)
        assert [len(replies(each)) for each in more] == [1] * served + [0] * (5 - served)


@pytest.mark.usefixtures("no_time")
async def test_those_that_rest_go_on_round_robin(server: Server) -> None:
    greedy = [connect(server) for _ in range(5)]
    for transport in greedy:
        transport.session.data_received(PING * 20)
    while not all(transport.is_reading for transport in greedy):
        await asyncio.sleep(0)
        answered = [len(replies(transport)) for transport in greedy]
        assert max(answered) - min(answered) < len(greedy)
    assert [len(replies(transport)) for transport in greedy] == [20] * 5


async def test_a_client_that_comes_while_others_rest_need_not_wait_for_them(server: Server) -> None:
    server.slices.slice = slices.SLICE
    greedy = [connect(server, 1 << 30) for _ in range(3)]
    for transport in greedy:
        transport.session.data_received(PING * 50_000)
    other = connect(server)
    for number in range(1, 10):
        await say(other, PING)
        assert len(replies(other)) == number
        assert not any(transport.is_reading for transport in greedy)
    for transport in greedy:
        await until_read(transport)


async def test_a_client_whose_first_request_takes_long_waits_behind_those_that_ask_for_little(
    server: Server,
) -> None:
    long, other = connect(server), connect(server)
    server.slices.slice = -1.0  # whatever it asks for takes too long
    long.session.data_received(b"w\nk\n0\n")
    server.slices.slice = 3600.0
    assert replies(long) == [b"error_not_enqueued"]
    await goes_behind(long, other)


async def test_a_client_that_moves_others_for_long_waits_behind_those_that_ask_for_little(
    server: Server,
) -> None:
    long, other, waiter = connect(server), connect(server), connect(server)
    for transport in (long, other, waiter):
        transport.session.data_received(PING)
        transport.written = b""
    long.session.data_received(b"l\nk\n0\n")
    token = replies(long)[0].split()[1]
    waiter.session.data_received(b"l\nk\n10\n")
    server.slices.slice = -1.0  # whatever it asks for takes too long
    long.session.data_received(b"r\nk\n%b\n" % token)
    server.slices.slice = 3600.0
    assert len(replies(waiter)) == 1
    await goes_behind(long, other)


async def goes_behind(long: FullTransport, other: FullTransport) -> None:
    """Make sure that one waits for its next turn where the other is answered at once."""
    long.written = b""
    for transport in (long, other):
        transport.session.data_received(PING)
    assert (len(replies(long)), len(replies(other))) == (0, 1)
    await asyncio.sleep(0)
    assert len(replies(long)) == 1
    long.session.data_received(PING)
    assert len(replies(long)) == 2, "that was little"


@pytest.mark.usefixtures("no_time")
async def test_reports_are_made_in_steps_between_the_requests_of_others(server: Server) -> None:
    holder, other, *curious = (connect(server, 1 << 30) for _ in range(7))
    for number in range(100):
        holder.session.data_received(b"l\n%d-%b\n0\n" % (number, b"x" * 200))
        await until_answered(holder, number + 1)
    for transport in curious:
        transport.session.data_received(PING + b"stats\n_\n_\n" + PING)
    pings = 0
    while not all(len(replies(transport)) == 3 for transport in curious):
        other.session.data_received(PING)
        pings += 1
        await until_answered(other, pings)
    assert pings >= 100 // 16 * len(curious)
    for transport in curious:
        first, report, last = replies(transport)
        assert (first, last) == (b"ok", b"ok")
        assert report.count(b'"key"') == 100


@pytest.mark.usefixtures("no_time")
async def test_a_drain_waits_for_a_report(server: Server) -> None:
    fill(server, 100)
    transport = connect(server, 1 << 30)
    transport.session.data_received(b"stats\n_\n_\n")
    server.draining = True
    transport.session.drain()
    assert not transport.closing
    await until_answered(transport, 1)
    assert transport.closing


@pytest.mark.usefixtures("no_time")
async def test_many_replies_are_sent_in_steps(server: Server) -> None:
    waiting = [connect(server) for _ in range(2 * FEW)]
    server._dispatch([(each.session.peer.id, Status.TIMEOUT) for each in waiting])
    for sent in range(1, len(waiting) + 1):
        assert [len(replies(each)) for each in waiting] == [1] * sent + [0] * (len(waiting) - sent)
        assert [each.session.owed for each in waiting] == [False] * sent + [True] * (
            len(waiting) - sent
        )
        await asyncio.sleep(0)


async def test_what_is_due_takes_effect_in_steps() -> None:
    server = make_server(Limits(max_locks=10_000))
    give_time(server.slices, -1.0)
    fill(server, 4 * STEP, clock.now() - 3600)
    left = [len(server.table)]
    server._due()
    while left[-1]:
        left.append(len(server.table))
        await asyncio.sleep(0)
    assert max(before - later for before, later in itertools.pairwise(left)) <= STEP


async def test_long_replies_do_not_pile_up_before_they_are_sent(server: Server) -> None:
    holder, greedy = connect(server), connect(server, high_water=0)
    for number in range(100):
        holder.session.data_received(b"l\n%d-%b\n0\n" % (number, b"x" * 200))
    greedy.session.data_received(b"stats\n_\n_\n" * 100)
    assert len(replies(greedy)) == 1


async def until_answered(transport: FullTransport, number: int) -> None:
    async with asyncio.timeout(60):
        while len(replies(transport)) < number:  # noqa: ASYNC110
            await asyncio.sleep(0)


@pytest.mark.usefixtures("no_time")
async def test_nothing_more_is_read_behind_a_report(server: Server) -> None:
    """It is the server that takes its time: who asks for much is not sent away for that."""
    fill(server, 100)
    transport = connect(server, 1 << 30)
    transport.session.data_received(b"stats\n_\n_\n" * 3)
    assert not transport.is_reading
    transport.session.data_received(PING * READ_AHEAD)
    await until_answered(transport, 3 + READ_AHEAD)
    assert not transport.closing
    assert transport.is_reading
    # The last of what is here is a report.
    transport.session.data_received(b"stats\n_\n_\n" * 3)
    await until_answered(transport, 6 + READ_AHEAD)
    await asyncio.sleep(0)
    assert transport.is_reading


async def test_what_comes_between_turns_is_served_in_order(server: Server) -> None:
    # TLS may hand on what it had read before it was told to stop.
    server.slices.slice = slices.SLICE
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


async def test_a_peer_that_stops_reading_between_turns_goes_on_where_it_was(server: Server) -> None:
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
    server.slices.slice = slices.SLICE
    transport = connect(server, 1 << 30)
    transport.session.data_received(PING * 3000 + b"pi")
    assert transport.session._frame_timer is None
    await until_read(transport)
    assert transport.session._frame_timer is not None
    server.slices.slice = math.inf  # what follows is read at once, on a slow machine too
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
    server.slices.slice = slices.SLICE
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


@pytest.mark.usefixtures("no_time")
async def test_many_that_end_at_once_let_others_go_first(server: Server) -> None:
    number = 50
    ending = [connect(server) for _ in range(number)]
    for index, transport in enumerate(ending):
        transport.session.data_received(b"l\n%d\n0\n" % index)
        await until_answered(transport, 1)
    for transport in ending:
        transport.session.eof_received()
        transport.abort()
    turns = 0
    while len(server.table) or server.sessions:
        # A step for what stands on each, and one for itself.
        assert len(server.table) >= number - turns - 1
        assert len(server.sessions) >= number - turns - 1
        turns += 1
        await asyncio.sleep(0)
    assert turns >= 2 * number - 1


async def test_who_has_ended_and_still_stands_in_the_queue_is_granted_nothing(
    server: Server,
) -> None:
    holder, waiter, heir = connect(server), connect(server), connect(server)
    holder.session.data_received(b"l\nk\n0\n")
    waiter.session.data_received(b"stable-ref\nref\n_\nl\nk\n30\n")
    heir.session.data_received(b"l\nk\n30\n")
    server.slices.turn, server.slices.free_until = -1.0, 0.0
    connect(server).abort()
    waiter.abort()
    # Its turn comes before its end does.
    token = holder.written.split()[1]
    holder.session.data_received(b"r\nk\n%b\n" % token)
    while waiter.session.peer.id in server.sessions:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert b"ok" not in waiter.written.partition(b"\n")[2]
    assert heir.written.startswith(b"ok ")


@pytest.mark.usefixtures("no_time")
async def test_draining_ends_many_in_turns(server: Server) -> None:
    idle = [connect(server) for _ in range(20)]
    server.draining = True
    server._end_idle()
    ended = [0]
    while ended[-1] < len(idle):
        ended.append(sum(transport.closing for transport in idle))
        await asyncio.sleep(0)
    assert all(later - before <= 1 for before, later in itertools.pairwise(ended))
