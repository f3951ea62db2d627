"""Positions in a queue that outlive a wait. Every case runs with both clients."""

from __future__ import annotations

import time
from queue import Queue
from typing import Any

import pytest

from dflockd import errors, sync_client
from dflockd.client.pending import PendingAcquire, PendingAcquires
from dflockd.client.process import close_idle_connections
from dflockd.sync_client import Reservation
from dflockd.wire import Acquire, Enqueue, Hello, Reserve, Space, Status, TimedOut, Wait
from tests.dflockd.client_support import Client, is_free, soon, stats, until
from tests.dflockd.raw_server import PATIENCE, ServerProcess, eventually
from tests.dflockd.scripted_server import ScriptedCluster, ScriptedServer

pytestmark = pytest.mark.usefixtures("no_idle_connections")

KEPT = Reservation(0, 30)


async def left(lock: Any, reservation: Reservation = KEPT, ticket: str | None = None) -> str:
    """Queue for a lock that is held, and leave the position at once; return its ticket."""
    assert await lock.enqueue(ticket) == "queued"
    assert lock.ticket is None
    assert await lock.wait(0, reservation) is False
    assert lock.ticket
    return str(lock.ticket)


def labels(lock: Any) -> list[str]:
    """Who waits, in order; who is away is in brackets."""
    asking = sync_client.DistributedLock(lock.key, servers=[lock.server])
    waiters = asking.inspect()["waiters"]
    return [f"({each['label']})" if each["away"] else str(each["label"]) for each in waiters]


async def test_its_turn_comes_by_arrival(client: Client, server: ServerProcess, key: str) -> None:
    holder, first, second = (client.lock(key, server, label=str(n)) for n in range(3))
    assert await holder.acquire()
    ticket = await left(first)
    assert await second.enqueue() == "queued"
    assert labels(holder) == ["(1)", "2"]
    assert await holder.release()
    assert await client.lock(key, server, acquire_timeout_s=0).acquire() is False, "it is held"
    # Anybody can take it up.
    other = client.lock(key, server, label="other")
    assert await other.enqueue(ticket) == "acquired"
    assert other.held
    assert labels(holder) == ["2"]
    assert await other.release()
    assert await soon(second.wait()) is True
    assert await second.release()


@pytest.mark.parametrize("is_free", [True, False])
async def test_who_takes_another_position_has_no_ticket_any_more(
    client: Client, server: ServerProcess, key: str, is_free: bool
) -> None:
    holder, lock = client.lock(key, server), client.lock(key, server)
    assert await holder.acquire()
    ticket = await left(lock)
    another = client.lock(key, server)
    assert await another.enqueue(ticket) == "queued"
    await another.release()
    if is_free:
        assert await holder.release()
    assert await lock.enqueue() == ("acquired" if is_free else "queued")
    assert lock.ticket is None
    await lock.release()
    await holder.release()


async def test_it_can_be_kept_again_and_again(
    client: Client, server: ServerProcess, key: str
) -> None:
    holder, first, second = (client.lock(key, server, label=str(n)) for n in range(3))
    assert await holder.acquire()
    ticket = await left(first)
    await left(second)
    for _ in range(3):
        ticket = await left(first, ticket=ticket)
        assert labels(holder) == ["(1)", "(2)"]
    assert await first.enqueue(ticket) == "queued"
    assert await holder.release()
    assert await soon(first.wait(None, KEPT)) is True
    assert first.ticket is None
    assert await first.release()
    assert await second.enqueue(second.ticket) == "acquired"
    assert await second.release()


async def test_it_outlives_its_connection(client: Client, server: ServerProcess, key: str) -> None:
    holder, first = client.lock(key, server), client.lock(key, server)
    assert await holder.acquire()
    before = stats(server)["connections"]
    ticket = await left(first)
    again = client.lock(key, server)
    assert await again.enqueue() == "queued"
    assert stats(server)["connections"] == before + 1, "the connection can be used for others"
    await again.release()
    if client.name == "sync":
        close_idle_connections()
        await until(lambda: bool(stats(server)["connections"] == 1))
    await holder.release()
    assert await first.enqueue(ticket) == "acquired"
    await first.release()


async def test_who_does_not_come_is_waited_for_no_longer_than_said(
    client: Client, server: ServerProcess, key: str
) -> None:
    patient = {"acquire_timeout_s": 600, "lease_ttl_s": 600}
    holder, late, far, next_one = (client.lock(key, server, **patient) for _ in range(4))
    assert await holder.acquire()
    await left(late, Reservation(0.5, 1))
    await left(far, Reservation(30, 1))
    assert await next_one.enqueue() == "queued"
    released = time.monotonic()
    await holder.release()
    assert await soon(next_one.wait()) is True
    assert time.monotonic() - released > 0.9
    # Whoever comes late is still ahead of all that came later, and so is who was far away.
    newcomer = client.lock(key, server)
    assert await newcomer.enqueue() == "queued"
    assert await far.enqueue(far.ticket) == "queued"
    assert await late.enqueue(late.ticket) == "queued"
    for lock in (next_one, late, far, newcomer):
        assert await soon(lock.wait()) is True
        await lock.release()
    assert is_free(server, key)


async def test_semaphores_as_well(client: Client, server: ServerProcess, key: str) -> None:
    one, two, first = (client.semaphore(key, 2, server, acquire_timeout_s=0) for _ in range(3))
    assert await one.acquire()
    assert await two.acquire()
    await left(first)
    await two.release()
    assert await two.acquire() is False
    assert await first.enqueue(first.ticket) == "acquired"
    assert (first.held, one.held) == (True, True)
    await first.release()
    await one.release()


async def test_a_part_of_a_second_is_rounded_up(
    client: Client, server: ServerProcess, key: str
) -> None:
    holder, first = client.lock(key, server), client.lock(key, server)
    assert await holder.acquire()
    assert await first.enqueue() == "queued"
    begun = time.monotonic()
    assert await soon(first.wait(0.2, KEPT)) is False
    assert time.monotonic() - begun > 0.9
    assert first.ticket
    await holder.release()


async def test_without_a_reservation_there_is_no_ticket(
    client: Client, server: ServerProcess, key: str
) -> None:
    holder, first = client.lock(key, server), client.lock(key, server)
    assert await holder.acquire()
    await left(first)
    assert await first.enqueue(first.ticket) == "queued"
    assert await first.wait(0) is False
    assert first.ticket is None
    await holder.release()
    assert is_free(server, key)


async def test_a_ticket_that_is_unknown_is_a_new_position(
    client: Client, server: ServerProcess, key: str
) -> None:
    holder, second, first = (client.lock(key, server, label=str(n)) for n in range(3))
    assert await holder.acquire()
    assert await first.enqueue() == "queued"
    assert await second.enqueue("00deadbeef") == "queued"
    assert labels(holder) == ["2", "1"]
    for lock in (holder, first, second):
        await lock.release()
    free = client.lock(f"{key}-free", server)
    assert await free.enqueue("00deadbeef") == "acquired"
    await free.release()


@pytest.mark.parametrize("ticket", ["", "with space", "line\nbreak", "ünlike", 7, "x" * 300])
async def test_what_cannot_be_a_ticket(client: Client, server: ServerProcess, ticket: Any) -> None:
    lock = client.lock("bad-ticket", server)
    with pytest.raises(errors.InvalidArgumentError, match="the ticket is malformed"):
        await lock.enqueue(ticket)
    assert await lock.enqueue() == "acquired"
    await lock.release()


@pytest.mark.parametrize("reservation", [(-1, 1), (1, float("nan")), ("1", 1), (1, float("inf"))])
async def test_times_that_are_none(
    client: Client, server: ServerProcess, key: str, reservation: Any
) -> None:
    holder, lock = client.lock(key, server), client.lock(key, server)
    assert await holder.acquire()
    assert await lock.enqueue() == "queued"
    with pytest.raises(errors.InvalidArgumentError, match="give seconds, 0 or more"):
        await lock.wait(0, Reservation(*reservation))
    assert await lock.wait(0) is False, "it has had no effect"
    await holder.release()


async def test_longer_than_the_server_keeps_anything(
    client: Client, server: ServerProcess, key: str
) -> None:
    holder, lock = client.lock(key, server), client.lock(key, server)
    assert await holder.acquire()
    assert await lock.enqueue() == "queued"
    assert await lock.wait(0, Reservation(1e9, 1)) is False
    assert lock.ticket is None
    await holder.release()


async def test_a_published_server(client: Client, scripted: ScriptedServer) -> None:
    """It keeps no position, and is asked for all else."""
    scripted.script(Hello, Status.ERROR)
    scripted.script(Enqueue, Status.QUEUED)
    scripted.script(Wait, Status.TIMEOUT)
    lock = client.lock("key", servers=[str(scripted)])
    for ticket in (None, "0123456789"):
        assert await lock.enqueue(ticket) == "queued"
        assert await soon(lock.wait(1, Reservation(1.5, 0.25))) is False
        assert lock.ticket is None
    assert scripted.asked(Enqueue) == [Enqueue(Space.LOCK, b"key", 1, None)] * 2
    assert {request.reserve for request in scripted.asked(Wait)} == {None}


async def test_in_a_cluster_it_is_kept_where_the_key_has_gone(client: Client) -> None:
    cluster, key = ScriptedCluster(), "account:7"
    first, second = cluster.servers
    first.script(Enqueue, Status.QUEUED)
    first.script(Wait, cluster.moved(key, 1, 8, place="7moved7"))
    second.script(Acquire, TimedOut(b"7kept7"))
    second.script(Enqueue, Status.QUEUED)
    try:
        lock = client.lock(key, servers=cluster.seeds, acquire_timeout_s=5)
        assert await lock.enqueue() == "queued"
        assert await soon(lock.wait(3, Reservation(2, 1))) is False
        assert lock.ticket == "7kept7"
        [wait, acquire] = first.asked(Wait) + second.asked(Acquire)
        assert wait.reserve == acquire.reserve == Reserve(2000, 1000)
        assert acquire.ticket == b"7moved7"
        assert await lock.enqueue(lock.ticket) == "queued"
        assert [request.ticket for request in second.asked(Enqueue)] == [b"7kept7"]
        await lock.release()
    finally:
        cluster.stop()


def test_many_places_at_once(server: ServerProcess) -> None:
    """`PendingAcquires` keeps them and takes them up as well."""
    servers, acquires = [("127.0.0.1", server.port)], PendingAcquires()
    told: Queue[int] = Queue()
    ended: Queue[int] = Queue()
    locks = [sync_client.DistributedLock("many", None, 10, servers) for _ in range(3)]

    def join(number: int, timeout: float, **options: Any) -> PendingAcquire:
        return acquires.join(
            locks[number],
            timeout,
            queued=lambda: None,
            told=lambda: told.put(number),
            ended=lambda _: ended.put(number),
            **options,
        )

    with sync_client.DistributedLock("many", servers=servers) as holder:
        for number in range(3):
            join(number, 0, reservation=KEPT)
            assert ended.get(timeout=PATIENCE) == number
        kept = [lock.ticket for lock in locks]
        assert len(set(kept)) == 3
        assert all(kept)
        pending = {
            number: join(number, 30, ticket=kept[number], reservation=KEPT) for number in (2, 1, 0)
        }
        eventually(lambda: not any(waiter["away"] for waiter in holder.inspect()["waiters"]))
    for number in range(3):
        acquires.ask()
        assert told.get(timeout=PATIENCE) == number
        pending[number].leave()
    acquires.close()
