"""Weights, with both clients and real servers: readers and writers, and shares of a limit."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dflockd import errors, sync_client
from dflockd.wire import Hello, Welcome
from tests.dflockd.client_support import Client, Face, soon, until, waiters
from tests.dflockd.raw_server import ServerProcess
from tests.dflockd.scripted_server import ScriptedServer
from tests.dflockd.storage.recovery_support import Site, all_back, inspected

pytestmark = pytest.mark.usefixtures("no_idle_connections")


class Room:
    """Who is in, and who has come in since somebody began to wait."""

    def __init__(self) -> None:
        self.readers = 0
        self.writers = 0
        self.most_readers = 0
        self.entries: list[str] = []

    def enter(self, kind: str) -> None:
        self.entries.append(kind)
        if kind == "writer":
            self.writers += 1
        else:
            self.readers += 1
        self.most_readers = max(self.most_readers, self.readers)
        assert not (self.writers and self.readers), self.entries
        assert self.writers <= 1, self.entries

    def leave(self, kind: str) -> None:
        if kind == "writer":
            self.writers -= 1
        else:
            self.readers -= 1


async def test_readers_share_and_a_writer_is_alone(
    client: Client, server: ServerProcess, key: str
) -> None:
    """Twenty readers again and again, and two writers, who wait for none that came after them."""
    room = Room()
    rounds = {"reader": 8, "writer": 6}
    behind: list[int] = []

    async def use(kind: str, label: str) -> None:
        weight = "all" if kind == "writer" else 1
        lock = client.semaphore(key, 100, server, weight=weight, label=label)
        for _ in range(rounds[kind]):
            state = await lock.enqueue()
            before = len(room.entries)
            # Who is ahead holds the lock already, or stands in line before.
            there = inspected(watch, key)
            waiting = [waiter["label"] for waiter in there["waiters"]]
            ahead = len(there["holders"])
            ahead += waiting.index(label) if label in waiting else 0
            if state == "queued":
                assert await lock.wait(30)
            else:
                assert await lock.wait(0)
            if kind == "writer":
                behind.append(len(room.entries) - before - ahead)
            room.enter(kind)
            await asyncio.sleep(0)
            room.leave(kind)
            assert await lock.release()

    watch = server.connect()
    readers = [use("reader", f"reader {number}") for number in range(20)]
    writers = [use("writer", f"writer {number}") for number in range(2)]
    await soon(asyncio.gather(*readers, *writers))
    assert room.entries.count("writer") == 12
    assert room.entries.count("reader") == 160
    assert room.most_readers > 1
    # Those that it has seen ahead, and nobody else, have come in before a writer.
    assert max(behind) <= 0, behind


async def test_who_takes_much_is_not_passed_by_who_takes_little(
    client: Client, server: ServerProcess, key: str
) -> None:
    def lock(weight: Any) -> Any:
        return client.semaphore(key, 10, server, weight=weight)

    first, heavy, light, all_ = lock(7), lock(4), lock(1), lock("all")
    assert await first.acquire()
    for each in (heavy, light, all_):
        assert await each.enqueue() == "queued"
    raw = server.connect()
    report = inspected(raw, key)
    assert (report["used"], report["limit"]) == (7, 10)
    assert [holder["weight"] for holder in report["holders"]] == [7]
    assert [waiter.get("weight", 1) for waiter in report["waiters"]] == [4, 1, "all"]
    assert await first.release()
    assert await soon(heavy.wait())
    assert await soon(light.wait())
    assert inspected(raw, key)["used"] == 5
    assert await heavy.release()
    assert len(inspected(raw, key)["waiters"]) == 1
    assert await light.release()
    assert await soon(all_.wait())
    assert inspected(raw, key)["used"] == 10
    assert await all_.release()


async def test_those_behind_a_writer_that_gives_up_go_on(
    client: Client, server: ServerProcess, key: str
) -> None:
    reader, other = (client.semaphore(key, 9, server) for _ in range(2))
    writer = client.semaphore(key, 9, server, weight="all", acquire_timeout_s=1)
    assert await reader.acquire()
    waits = asyncio.ensure_future(writer.acquire())
    await until(lambda: waiters(server, key) == 1)
    assert await other.enqueue() == "queued"
    assert await waits is False
    assert await soon(other.wait())
    for each in (reader, other):
        assert await each.release()


async def test_nobody_is_beside_all_whatever_limit_others_give(
    client: Client, server: ServerProcess, key: str
) -> None:
    writer = client.semaphore(key, 3, server, weight="all")
    assert await writer.acquire()
    for limit in (100, 1 << 20):
        for weight in (1, "all"):
            one = client.semaphore(key, limit, server, weight=weight, acquire_timeout_s=0)
            assert not await one.acquire()
    plain = client.lock(key, server, acquire_timeout_s=0)
    assert not await plain.acquire()
    assert await writer.release()
    assert await plain.acquire()
    assert await plain.release()


async def test_a_rate_and_the_limit_of_a_group_count_in_the_same_units(
    client: Client, server: ServerProcess, key: str
) -> None:
    def lock(weight: Any, **options: Any) -> Any:
        return client.semaphore(key, 100, server, weight=weight, acquire_timeout_s=0, **options)

    in_group = {"group": "tenant", "group_limit": 5}
    first, second, third = lock(3, **in_group), lock(3, **in_group), lock(2, **in_group)
    taken = [await each.acquire() for each in (first, second, third)]
    assert taken == [True, False, True]
    for each in (first, third):
        assert await each.release()
    paid = [lock(4, rate="10/h") for _ in range(3)]
    assert [await each.acquire() for each in paid] == [True, True, False]
    assert inspected(server.connect(), key)["rate"]["free"] == 2
    small = lock(2, rate="10/h")
    assert await small.acquire()
    for each in (*paid[:2], small):
        assert await each.release()


@pytest.mark.parametrize("is_lost", [False, True], ids=["kept", "lost"])
async def test_a_weight_outlives_the_server(client: Client, tmp_path: Path, is_lost: bool) -> None:
    """From the journal, or from the holder if that is lost."""
    site = Site(tmp_path / "state", "--default-lease-ttl", "6")
    try:
        server = site.start()
        writer = client.semaphore("key", 5, server, weight="all", lease_ttl_s=6)
        assert await writer.acquire()
        site.kill()
        if is_lost:
            site.change_boot()
            for path in site.path.glob("journal-*"):
                path.unlink()
            site.start("--state-recover")
        else:
            site.start()
        await all_back(site.server, writer)
        [holder] = inspected(site.connect(), "key")["holders"]
        assert holder["weight"] == "all"
        assert await writer.release()
    finally:
        site.end()


def semaphore(limit: int = 3, **options: Any) -> sync_client.DistributedSemaphore:
    return sync_client.DistributedSemaphore("k", limit, **options)


def test_a_lock_says_its_weight() -> None:
    assert [semaphore().weight, semaphore(weight=2).weight] == [1, 2]
    assert semaphore(weight="all").weight == "all"
    assert semaphore(weight=2, group="g", group_limit=1).group == "g"
    assert semaphore(weight=2).group is None
    make = sync_client.DistributedSemaphore.maker(4)
    assert [make("k").weight, make("k", weight=3).weight] == [1, 3]
    assert make("k", weight="all", group="g").group == "g"


@pytest.mark.parametrize(
    ("limit", "weight", "text"),
    [
        (3, 0, "weight is 0 for lock 'k'"),
        (3, 4, r"weight is 4 .*: give a whole number from 1 to the limit \(3\), or 'all'"),
        (3, "most", "weight is 'most'"),
        (1, 2, "weight is 2 for 'k', of which the limit is 1: give a larger limit, or remove"),
        (1, "all", "weight is 'all' for 'k', of which the limit is 1"),
    ],
)
def test_what_is_no_weight_is_refused_early(limit: int, weight: Any, text: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=text):
        semaphore(limit, weight=weight)
    with pytest.raises(errors.InvalidArgumentError, match=text):
        sync_client.DistributedSemaphore.maker(limit)("k", weight=weight)


def test_a_lock_has_no_weight() -> None:
    with pytest.raises(errors.InvalidArgumentError, match="of which the limit is 1"):
        sync_client.DistributedLock.maker()("k", weight=2)


def test_a_server_that_does_not_know_weights(face: Face, scripted: ScriptedServer) -> None:
    """It would let others in beside all."""
    scripted.script(Hello, Welcome(b"0.1.0", frozenset({b"slots", b"rates", b"groups"})))
    servers = [("127.0.0.1", scripted.port)]
    for options in ({"weight": 2}, {"weight": "all", "group": "g"}):
        lock = face.module.DistributedSemaphore("key", 3, servers=servers, **options)
        with pytest.raises(
            errors.UnsupportedError, match="does not know weights: remove the weight"
        ):
            face.do(lock.acquire())
    plain = face.module.DistributedSemaphore("key", 3, servers=servers, group="g")
    assert face.do(plain.acquire())
    face.do(plain.release())
