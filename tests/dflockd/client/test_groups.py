"""Groups that take turns, with both clients and real servers."""

from __future__ import annotations

import pytest

from dflockd import errors, sync_client
from tests.dflockd.client_support import Client
from tests.dflockd.raw_server import ServerProcess

pytestmark = pytest.mark.usefixtures("no_idle_connections")


@pytest.mark.parametrize("limit", [1, 2])
async def test_the_only_one_of_a_group_waits_for_a_round_at_most(
    client: Client, server: ServerProcess, key: str, limit: int
) -> None:
    def lock(group: str | None = None):  # type: ignore[no-untyped-def]
        kind = client.lock if limit == 1 else client.semaphore
        more = () if limit == 1 else (limit,)
        return kind(key, *more, server, group=group)

    holders = [lock() for _ in range(limit)]
    for holder in holders:
        assert await holder.acquire()
    heavy = [lock("heavy") for _ in range(20)]
    for each in heavy:
        assert await each.enqueue() == "queued"
    one = lock("one")
    assert await one.enqueue() == "queued"
    servers = [("127.0.0.1", server.port)]
    shown = sync_client.DistributedLock(key, servers=servers)
    if limit > 1:
        shown = sync_client.DistributedSemaphore(key, limit, servers=servers)
    report = shown.inspect()
    assert [waiter["group"] for waiter in report["waiters"][:3]] == ["heavy", "one", "heavy"]
    assert await holders[0].release()
    assert await heavy[0].wait(10)
    await (heavy[0] if limit == 1 else holders[1]).release()
    assert await one.wait(10)
    for each in [*holders, *heavy, one]:
        await each.release()


async def test_a_group_has_as_many_as_its_limit(
    client: Client, server: ServerProcess, key: str
) -> None:
    def lock(group: str) -> object:
        return client.semaphore(key, 3, server, group=group, group_limit=1, acquire_timeout_s=0)

    first, second, other = lock("a"), lock("a"), lock("b")
    assert await first.acquire()  # type: ignore[attr-defined]
    assert not await second.acquire()  # type: ignore[attr-defined]
    assert await other.acquire()  # type: ignore[attr-defined]
    assert await first.release()  # type: ignore[attr-defined]
    assert await second.acquire()  # type: ignore[attr-defined]
    for each in (second, other):
        await each.release()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"group": ""}, "is empty"),
        ({"group": "a b"}, "contains white space"),
        ({"group": "g" * 257}, "256 are allowed"),
        ({"group": 7}, "is no text"),
        ({"group": "\ud800"}, "half of a surrogate pair"),
        ({"group": "a", "group_limit": 0}, "group_limit is 0"),
        ({"group": "a", "group_limit": True}, "group_limit is True"),
        ({"group_limit": 1}, "give a group too"),
    ],
)
def test_what_is_no_group_is_refused_early(given: dict[str, object], text: str) -> None:
    with pytest.raises(errors.InvalidArgumentError, match=text):
        sync_client.DistributedLock("k", **given)  # type: ignore[arg-type]
