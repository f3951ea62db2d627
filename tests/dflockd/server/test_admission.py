"""The budgets of a port, with sockets that nobody serves."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from dflockd.server import Admission, Guest
from dflockd.server.descriptors import share

Pair = tuple[Guest, socket.socket, socket.socket]


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    made: list[Pair] = []
    yield made
    for _, server, client in made:
        server.close()
        client.close()


def admission_of(**budgets: float) -> Admission:
    settings: dict[str, float] = {"limit": 2, "pending": 3, "timeout": 60, **budgets}
    return Admission(asyncio.get_running_loop(), "connection", **settings)  # type: ignore[arg-type]


def arrive(admission: Admission, pairs: list[Pair]) -> Pair | None:
    """Let a connection come as a listener does; ``None`` if it is refused."""
    while not admission.is_ready():
        leave_ended(admission, pairs)
    server, client = socket.socketpair()
    guest = admission.arrive(server)
    if guest is None:
        server.close()
        client.close()
        return None
    pairs.append((guest, server, client))
    return pairs[-1]


def leave_ended(admission: Admission, pairs: list[Pair]) -> None:
    for pair in [pair for pair in pairs if pair[0].ended]:
        pair[0].leave()
        pairs.remove(pair)
        pair[1].close()
        pair[2].close()


async def closed(client: socket.socket) -> None:
    client.setblocking(False)
    async with asyncio.timeout(15):
        assert await asyncio.get_running_loop().sock_recv(client, 1) == b""


def must_arrive(admission: Admission, pairs: list[Pair]) -> Pair:
    pair = arrive(admission, pairs)
    assert pair is not None
    return pair


async def test_the_oldest_makes_room(pairs: list[Pair]) -> None:
    admission = admission_of()
    guests = [must_arrive(admission, pairs)[0] for _ in range(7)]
    assert [guest.ended for guest in guests] == [True, True, False, False, False, False, False]
    assert admission.pending == admission.total == 5
    assert admission.dropped == 2


async def test_those_that_are_in_leave_less_room(pairs: list[Pair]) -> None:
    admission = admission_of()
    guests = [must_arrive(admission, pairs)[0] for _ in range(2)]
    assert all(guest.admit() for guest in guests)
    guests += [must_arrive(admission, pairs)[0] for _ in range(4)]
    assert [guest.ended for guest in guests] == [False, False, True, False, False, False]
    assert not guests[-1].admit()


async def test_there_are_never_too_many_pending(
    pairs: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflockd.server.admission.MOST_PENDING", 3)
    admission = admission_of(limit=0)
    guests = [must_arrive(admission, pairs)[0] for _ in range(5)]
    assert [guest.ended for guest in guests] == [True, True, False, False, False]


async def test_who_has_spoken_is_not_the_one(pairs: list[Pair]) -> None:
    admission = admission_of()
    spoken = must_arrive(admission, pairs)
    spoken[2].send(b"auth")
    guests = [must_arrive(admission, pairs)[0] for _ in range(6)]
    assert not spoken[0].ended
    assert [guest.ended for guest in guests] == [True, True, False, False, False, False]
    # What it said is read, and was not enough: it is silent now.
    spoken[1].recv(100)
    for _ in range(5):
        must_arrive(admission, pairs)
    assert spoken[0].ended


async def test_peers_never_have_more_descriptors_than_both_budgets(pairs: list[Pair]) -> None:
    admission = admission_of()
    most = 0
    for number in range(50):
        pair = arrive(admission, pairs)
        most = max(most, admission.total)
        if pair is not None:
            pair[2].send(b"auth")
            if number < 2:
                pair[0].admit()
    assert admission.inside == 2
    assert admission.total == most == 5
    assert admission.refused == 50 - 5


async def test_budgets_are_free_again(pairs: list[Pair]) -> None:
    admission = admission_of()
    for _ in range(20):
        guest = must_arrive(admission, pairs)[0]
        assert guest.admit()
        assert guest.admit()
        guest.leave()
        guest.leave()
    assert (admission.total, admission.inside, admission.pending) == (0, 0, 0)
    assert admission.refused == admission.dropped == 0


async def test_who_was_dropped_cannot_come_in(pairs: list[Pair]) -> None:
    admission = admission_of(limit=1, pending=0)
    guest = must_arrive(admission, pairs)[0]
    assert not admission.is_ready(), "there is no room until it is closed"
    assert guest.ended
    assert not guest.admit()
    guest.leave()
    assert (admission.total, admission.inside, admission.pending) == (0, 0, 0)


async def test_time_ends_for_the_silent_alone(pairs: list[Pair]) -> None:
    admission = admission_of(timeout=0.05)
    silent, spoken, known = (must_arrive(admission, pairs) for _ in range(3))
    spoken[2].send(b"auth")
    assert known[0].admit()
    await closed(silent[2])
    assert not spoken[0].ended
    spoken[1].recv(100)
    await closed(spoken[2])
    assert not known[0].ended


async def test_handshakes_are_bounded_too(
    pairs: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflockd.server.admission.MOST_TLS", 2)
    admission = admission_of()
    first, second, third, fourth = (must_arrive(admission, pairs)[0] for _ in range(4))
    assert admission.begin_tls(first)
    assert admission.begin_tls(second)
    assert not admission.begin_tls(third)
    monkeypatch.setattr("dflockd.server.admission.TLS_GRACE", 0.0)
    pairs[0][2].send(b"what is said is not read yet")
    assert admission.begin_tls(third)
    assert [guest.ended for guest in (first, second, third)] == [False, True, False]
    # Who gets in makes room.
    assert third.admit()
    monkeypatch.setattr("dflockd.server.admission.TLS_GRACE", 60.0)
    assert admission.begin_tls(fourth)


async def test_without_a_limit_all_come_in(pairs: list[Pair]) -> None:
    admission = admission_of(limit=0, pending=0)
    for _ in range(20):
        assert must_arrive(admission, pairs)[0].admit()


@pytest.mark.parametrize("total", [16, 32, 64, 256, 1024, 20_000, 1 << 20])
@pytest.mark.parametrize("http", [True, False])
def test_shares_are_no_more_than_there_is(total: int, http: bool) -> None:
    shares = share(total, asks=True, http=http)
    assert shares.connections > 0
    assert shares.pending > 0
    assert bool(shares.http) == http
    if total >= 64:
        parts = shares.reserve + shares.http + shares.pending + shares.connections
        assert parts == total
        assert shares.reserve >= 28
    assert share(total, http=http).pending == 0


@pytest.mark.parametrize(("wanted", "connections"), [(10, 10), (500, 500), (5000, 672), (0, 672)])
def test_what_is_asked_for_is_had_if_it_fits(wanted: int, connections: int) -> None:
    shares = share(1024, wanted=wanted, asks=True)
    assert shares.connections == connections
    assert shares.reserve + shares.pending + shares.connections == 1024
