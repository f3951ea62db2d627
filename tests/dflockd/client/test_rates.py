"""Clients of keys whose runs may not begin at any time, at a real server."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dflockd import client, errors, sync_client
from dflockd.rates import describe_rate, parse_rate
from tests.dflockd.raw_server import ServerProcess, eventually

pytestmark = pytest.mark.usefixtures("no_idle_connections")


def at(server: Any) -> list[tuple[str, int]]:
    return [("127.0.0.1", server.port)]


def limit(key: str, rate: Any, server: ServerProcess, **more: Any) -> sync_client.RateLimit:
    return sync_client.RateLimit(key, rate, servers=at(server), **more)


def check_windows(stamps: list[float], runs: int, window: float) -> None:
    stamps = sorted(stamps)
    for first, last in zip(stamps, stamps[runs:], strict=False):
        assert last - first >= window


def test_no_window_has_more_beginnings_than_it_may(server: ServerProcess, key: str) -> None:
    stamps: list[float] = []

    def work(seconds: float) -> None:
        for _ in range(8):
            with limit(key, (6, 0.5), server, acquire_timeout_s=None):
                stamps.append(time.monotonic())
                time.sleep(seconds)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, [0, 0, 0.03, 0.1]))
    assert len(stamps) == 32
    check_windows(stamps, 6, 0.5)


def test_no_window_of_asyncio_has_either(server: ServerProcess, key: str) -> None:
    stamps: list[float] = []

    async def work() -> None:
        for _ in range(6):
            lock = client.RateLimit(key, (4, 0.3), servers=at(server), acquire_timeout_s=None)
            async with lock:
                stamps.append(time.monotonic())
                await asyncio.sleep(0.02)

    async def all_work() -> None:
        await asyncio.gather(*(work() for _ in range(3)))

    asyncio.run(all_work())
    assert len(stamps) == 18
    check_windows(stamps, 4, 0.3)


@pytest.mark.parametrize("window", [1000, 3600])
def test_a_run_that_goes_on_reports_its_beginning(
    server: ServerProcess, key: str, window: float
) -> None:
    with limit(f"{key}-{window}", (1, window), server) as lock:
        eventually(lambda: lock.inspect()["rate"]["pending"] == 0)
        shown = lock.inspect()["rate"]
        assert (shown["runs"], shown["window_s"], shown["free"]) == (1, window, 0)
        assert window - 60 < shown["next_s"] <= window
        assert describe_rate(shown).startswith("rate: next in ")
        assert len(lock.inspect()["holders"]) == 1
        assert lock.inspect()["limit"] is None


def test_a_run_that_never_begins_costs_nothing(server: ServerProcess, key: str) -> None:
    lock = sync_client.DistributedLock(key, servers=at(server)).with_rate("1/h", begins=False)
    for _ in range(2):
        assert lock.acquire()
        assert lock.inspect()["rate"]["pending"] == 1
        assert lock.give_back()
    assert lock.acquire()
    assert lock.renew()
    assert lock.inspect()["rate"]["pending"] == 1
    lock.begin()
    eventually(lambda: lock.inspect()["rate"]["pending"] == 0)
    lock.begin()
    assert lock.release()
    lock.acquire_timeout_s = 0
    with pytest.raises(errors.LockTimeoutError):
        lock.__enter__()
    # Who asks for no rate has the lock.
    with sync_client.DistributedLock(key, 0, servers=at(server)):
        pass


def test_both_hold_for_a_semaphore(server: ServerProcess, key: str) -> None:
    def make() -> sync_client.DistributedSemaphore:
        return sync_client.DistributedSemaphore(key, 2, 0, servers=at(server), rate="3/h")

    first, second, third = make(), make(), make()
    assert first.acquire()
    assert second.acquire()
    assert not third.acquire()
    first.release()
    assert third.acquire()
    second.release()
    assert not make().acquire()


def test_a_run_whose_connection_ends_counts(server: ServerProcess, key: str, through: Any) -> None:
    proxy = through(server)
    lock = sync_client.DistributedLock(key, servers=at(proxy)).with_rate("1/h", begins=False)
    assert lock.acquire()
    proxy.cut(reset=True)
    asked = sync_client.DistributedLock(key, servers=at(server))
    eventually(lambda: not asked.inspect()["holders"] or asked.inspect()["rate"]["pending"] == 0)
    assert asked.inspect()["rate"]["free"] == 0
    lock.release()
    assert limit(key, "1/h", server).inspect()["rate"]["free"] == 0  # it is the same key


@pytest.mark.parametrize(
    "rate",
    [
        "",
        "10",
        "10/d",
        "0/m",
        "-1/s",
        "1.5/s",
        "10/m ",
        (0, 60),
        (10,),
        (10, 0),
        (True, 60),
        5,
        None,
    ],
)
def test_a_rate_that_is_none_is_refused_at_once(rate: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError, match="give a text such as '10/m'"):
        sync_client.RateLimit("k", rate)


def test_rates_are_written_as_celery_writes_them() -> None:
    assert [parse_rate(each) for each in ("3/s", "10/m", "7/h", (5, 0.5))] == [
        (3, 1),
        (10, 60),
        (7, 3600),
        (5, 0.5),
    ]
    assert [str(parse_rate(each)) for each in ("10/m", (5, 0.5))] == ["10/m", "5/0.5 s"]


def test_a_server_says_which_of_its_bounds_a_rate_exceeds(start: Any, key: str) -> None:
    server = start("--max-rate-window", "60", "--max-rate-runs", "10")
    with pytest.raises(errors.RefusedError, match="--max-rate-window"):
        limit(key, "1/h", server).acquire()
    with pytest.raises(errors.MaxRatesError, match="--max-rate-runs"):
        limit(key, "11/m", server).acquire()
