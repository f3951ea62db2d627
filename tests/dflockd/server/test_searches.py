"""`find`: answered later, in slices, while everybody else is served."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
from itertools import pairwise

import pytest

from dflockd import clock
from dflockd.server import Server
from dflockd.table import Entry, Limits
from dflockd.wire import Acquire, Enqueue, Space
from tests.dflockd.raw_server import RawClient, ServerProcess, StartServer, eventually, granted
from tests.dflockd.server.server_support import queue_up, stats
from tests.dflockd.server.session_support import connect, make_server, say


def fill(server: Server, keys: int) -> None:
    peer = server.table.connect()
    for number in range(keys):
        request = Acquire(Space.LOCK, b"key:%d" % number, 1, 0, 60)
        server.table.handle(peer, request, clock.now())


FIND = b"find\n_\nkey\n"


def found(line: str) -> list[str]:
    assert line.startswith("ok "), line
    return [row["key"] for row in json.loads(line[3:])["found"]]


def test_requests_behind_it_are_answered_after_it(alice: RawClient) -> None:
    alice.send(
        b"l\nfind:behind\n0\nfind\n_\nfind:b\nping\n_\n_\nfind\n_\nno such\nl\nfind:two\n0\n"
    )
    granted(alice.line())
    assert found(alice.line()) == ["find:behind"]
    assert alice.line() == "ok"
    assert found(alice.line()) == []
    granted(alice.line())


def test_what_is_no_search(alice: RawClient) -> None:
    for argument in (b"find\nnobody\nx\n", b"find\n_\n\xff\n", b"find\n\nx\n"):
        alice.send(argument)
        assert alice.line() == "error"
    assert alice.ask("ping") == "ok"


def test_many_search_at_once(server: ServerProcess, alice: RawClient) -> None:
    alice.lock("find:many")
    clients = [server.connect() for _ in range(30)]
    for client in clients:
        client.send(b"find\n_\nfind:many\n")
    for client in clients[::2]:
        client.reset()
    for client in clients[1::2]:
        assert found(client.line()) == ["find:many"]


def test_a_server_that_drains_looks_for_nothing_new(start_server: StartServer) -> None:
    server = start_server("--shutdown-timeout", "5")
    client = server.connect()
    client.lock("draining")
    server.signal(signal.SIGTERM)
    eventually(lambda: client.ask("ping") == "error_draining")
    client.send(b"find\n_\ndraining\n")
    assert client.line() == "error_draining"


def test_waiters_are_found_with_their_position(server: ServerProcess, alice: RawClient) -> None:
    alice.lock("find:queue")
    for _ in range(3):
        queue_up(server, alice, "find:queue", 30)
    alice.send(b"find\nwaiters\n\n")
    rows = json.loads(alice.line()[3:])["found"]
    assert [row["position"] for row in rows if row["key"] == "find:queue"] == [1, 2, 3]
    assert stats(alice)["version"]


async def test_who_leaves_is_not_looked_for() -> None:
    """Whoever comes next has their turn, and a search that has begun is not told to somebody else."""
    server = make_server()
    server.slices.at_once = server.slices.look_for = -1.0
    server.slices.rest = 0.0
    fill(server, 200)
    first, second = connect(server), connect(server)
    first.session.data_received(b"find\n_\nkey:1\n")
    await asyncio.sleep(0)
    first.session.connection_lost(None)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not server.slices._looks, "it has more steps than that"
    second.session.data_received(b"find\n_\nkey:19\n")
    for _ in range(2000):
        await asyncio.sleep(0)
    assert len(json.loads(second.written[3:])["found"]) == 11
    assert not first.written


async def test_one_is_searched_for_after_the_other() -> None:
    """A search has a list of all that it looks through: few of them are to be there at a time."""
    server = make_server()
    server.slices.at_once = server.slices.look_for = -1.0  # one step
    server.slices.rest = 0.0
    fill(server, 200)
    askers = [connect(server) for _ in range(5)]
    for asker in askers:
        asker.session.data_received(FIND)
    inspecting = connect(server)
    inspecting.session.data_received(b"i\nkey:0\n_\n")
    answered: list[int] = []
    for turn in itertools.count():
        answered += [turn] * (sum(1 for asker in askers if asker.written) - len(answered))
        if len(answered) == len(askers):
            break
        assert not answered or inspecting.written, "it is no search, and waits for none"
        await asyncio.sleep(0)
    # In turns they would all be answered within a few steps.
    assert all(later - earlier >= 200 / 16 for earlier, later in pairwise(answered))


@pytest.mark.parametrize("is_answered", [False, True])
async def test_who_leaves_while_a_search_runs_keeps_what_it_was_told_of(is_answered: bool) -> None:
    """What it waits for is no grant: a lock that it had by waiting is not given back for that."""
    server = make_server(Limits(orphan_ttl=60, orphan_all=True))
    server.slices.at_once = -1.0
    holder, heir = connect(server), connect(server)
    holder.session.data_received(b"l\nk\n0\n")
    heir.session.data_received(b"l\nk\n30\n")
    holder.session.data_received(b"r\nk\n%b\n" % holder.written.split()[1])
    assert heir.written.startswith(b"ok ")
    heir.session.data_received(FIND)
    heir.closing = True  # the transport knows it before it says so
    if is_answered:
        while heir.session._looks_on:  # noqa: ASYNC110
            await asyncio.sleep(0)
    heir.session.connection_lost(None)
    while heir.session.peer.id in server.sessions:  # noqa: ASYNC110
        await asyncio.sleep(0)
    entry = server.table.find(Space.LOCK, b"k")
    assert isinstance(entry, Entry)
    assert len(entry.holds) == 1


@pytest.mark.parametrize(
    "asked", [FIND, b"stats\n_\n_\n", b"i\nkey:0\n_\n"], ids=["find", "stats", "inspect"]
)
async def test_others_are_served_between_the_steps(asked: bytes) -> None:
    """However much there is to look through, a turn of the loop has no more than a slice of it."""
    server = make_server(Limits(max_locks=10_000))
    server.slices.at_once = server.slices.look_for = -1.0  # one step
    server.slices.rest = 0.0
    fill(server, 1000)
    for _ in range(1000):
        queued = Enqueue(Space.LOCK, b"key:0", 1, 60)
        server.table.handle(server.table.connect(), queued, clock.now())
    asker, other = connect(server, 1 << 20), connect(server, 1 << 20)
    asker.session.data_received(asked)
    pings = 0
    while not asker.written:
        await say(other, b"ping\n_\n_\n")
        pings += 1
        await asyncio.sleep(0)
    assert other.written == b"ok\n" * pings
    assert pings >= 1000 / 16
