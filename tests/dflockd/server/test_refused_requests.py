"""What is no request has an answer, and changes nothing of what a connection holds and waits for."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflockd.server import Server
from dflockd.wire import MAX_LINE, Release, Space
from dflockd.wire.messages import MAX_FIELDS, MAX_HELLO
from tests.dflockd.server.both_ways import everything
from tests.dflockd.server.session_support import FullTransport, connect, make_server, say, settled
from tests.dflockd.wire.test_requests import REFUSED

BUSY = (
    b"hello\nhere\nversion=1\nacquire\nheld\ntimeout=0 owner=run label=me group=g limit=2 rate=9/1000\n"
    b"enqueue\ntold\nturn=500\nenqueue\nqueued\nowner=run attempt=1\nstable-ref\nme\n_\n"
)
"""What a connection asks for, to have one of each."""


async def prepared() -> tuple[Server, FullTransport, FullTransport]:
    """Return a server with somebody who holds a lock, and somebody with something of each kind."""
    server = make_server()
    holder, busy = connect(server), connect(server)
    await say(holder, b"acquire\nqueued\ntimeout=0 owner=first\n")
    await say(busy, BUSY)
    assert [line.split()[0] for line in busy.written.splitlines()] == [
        *(b"hello", b"ok", b"queued", b"queued", b"ok")
    ]
    busy.written = b""
    return server, holder, busy


def state(server: Server, *transports: FullTransport) -> object:
    return everything(server.table, [each.session.peer for each in transports])


def cut(data: bytes, *cuts: int) -> list[bytes]:
    edges = [0, *sorted(each % (len(data) + 1) for each in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


async def check(data: bytes, *cuts: int, errors: int = 1) -> None:
    server, holder, busy = await prepared()
    before = state(server, holder, busy)
    for piece in cut(data, *cuts):
        await say(busy, piece)
    assert busy.written == b"error\n" * errors
    assert not busy.closing
    assert state(server, holder, busy) == before
    # It is told what it waits for as if nothing had been.
    busy.written = b""
    await say(busy, b"wait\nqueued\ntimeout=9\n")
    token = holder.written.split()[1]
    await say(holder, b"r\nqueued\n%b\n" % token)
    assert busy.written.startswith(b"ok ")
    for transport in (holder, busy):
        transport.abort()


@pytest.mark.parametrize("frame", REFUSED)
async def test_an_error_leaves_everything_as_it_is(frame: bytes) -> None:
    await check(frame)


@given(
    st.lists(st.sampled_from(REFUSED), min_size=1, max_size=6),
    st.lists(st.integers(0, 1 << 17), max_size=9),
)
async def test_so_do_many_wherever_they_are_cut(frames: list[bytes], cuts: list[int]) -> None:
    await check(b"".join(frames), *cuts, errors=len(frames))


@given(st.sampled_from([frame for frame in REFUSED if len(frame) < 100]))
async def test_so_does_one_that_is_cut_at_every_byte(frame: bytes) -> None:
    await check(frame, *range(1, len(frame)))


@pytest.mark.parametrize("frame", [b"acquire\nk\ntimeout=0 timeout=0\n", b"hello\n\nversion=1\n"])
async def test_behind_a_request_that_waits_an_error_comes_in_its_turn(frame: bytes) -> None:
    server, holder, busy = await prepared()
    await say(busy, b"wait\nqueued\ntimeout=9\n" + frame)
    assert busy.written == b""
    token = holder.written.split()[1]
    effects = server.table.handle(
        holder.session.peer, Release(Space.LOCK, b"queued", token), server.loop.time()
    )
    server._dispatch([effect for effect in effects if effect[0] == busy.session.peer.id])
    busy.session._resume()
    granted, error = busy.written.splitlines()
    assert granted.startswith(b"ok ")
    assert error == b"error"
    for transport in (holder, busy):
        transport.abort()


@pytest.mark.parametrize(
    "lines",
    [
        *([b"acquire", b"k" * (MAX_LINE + 1), b"timeout=0"], [b"a" * (MAX_LINE + 1), b"k", b"0"]),
        *(
            [b"acquire", b"k", b"timeout=0 label=" + b"x" * MAX_FIELDS],
            [b"wait", b"k", b"x" * 1025],
        ),
        *([b"renew", b"k", b"x" * (MAX_FIELDS + 1)], [b"enqueue", b"k", b"x" * (MAX_FIELDS + 1)]),
        *([b"hello", b"k", b"x" * (MAX_HELLO + 1)], [b"l", b"k", b"x" * (MAX_LINE + 1)]),
    ],
)
async def test_a_line_that_is_too_long_is_the_end(lines: list[bytes]) -> None:
    data = b"\n".join(lines) + b"\n"
    for cuts in ((), (1,), (len(data) - 1,), tuple(range(0, len(data), 50))):
        server, holder, busy = await prepared()
        for piece in cut(b"ping\n_\n_\n" + data + b"ping\n_\n_\n", *cuts):
            await say(busy, piece)
        assert busy.written == b"ok\nerror\n"
        assert busy.closing
        await settled(server)
        # It has declared a ref: what it held stays for its lease. What it waited for does not.
        left = everything(server.table, [])
        assert [(key, len(holds), len(waiters)) for key, holds, waiters in queues(left)] == [
            (b"queued", 1, 0),
            (b"held", 1, 0),
        ]
        for transport in (holder, busy):
            transport.abort()


def queues(found: object) -> list[tuple[bytes, list[object], list[object]]]:
    assert isinstance(found, dict)
    return [(key, holds, waiters) for _, key, _, holds, waiters, *_ in found["entries"]]
