"""What an event loop knows of connections: while it uses them, and not for longer than it lives."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from dflockd.client import aio
from dflockd.client.process import close_idle_connections
from tests.dflockd.client.loops import NewLoop, lock_on
from tests.dflockd.client_support import soon, until
from tests.dflockd.proxy import Proxy
from tests.dflockd.raw_server import ServerProcess, eventually
from tests.pace import Pace


async def used(server: ServerProcess | Proxy, key: str) -> Any:
    """Use a lock, and return the connection that is idle now."""
    lock = lock_on(server, key)
    async with lock:
        return lock._session.lease.link  # type: ignore[union-attr]


async def test_one_registration_does_for_all_locks(
    server: ServerProcess, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, registered = asyncio.get_running_loop(), list[int]()
    real = loop.add_reader

    def add_reader(number: int, *args: Any) -> None:
        registered.append(number)
        real(number, *args)

    link = await used(server, key)
    monkeypatch.setattr(loop, "add_reader", add_reader)
    for _ in range(20):
        assert await used(server, key) is link
    assert not registered


async def test_a_server_that_ends_an_idle_connection_wakes_the_loop_once(
    server: ServerProcess, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[object] = []
    real = aio._Reader._read

    def reading(self: Any) -> None:
        read.append(self)
        real(self)

    monkeypatch.setattr(aio._Reader, "_read", reading)
    proxy = Proxy(server.port)
    try:
        link = await used(proxy, key)
        before = len(read)
        proxy.cut(reset=False)
        await until(lambda: link.loop_reader is None)
        await asyncio.sleep(0.1)
        assert len(read) == before + 1
        await used(proxy, key)  # on another one
    finally:
        proxy.close()


async def test_the_answer_to_a_renewal_is_not_the_loops(server: ServerProcess, key: str) -> None:
    lock = lock_on(server, key)
    async with lock:
        link = lock._session.lease.link  # type: ignore[union-attr]
        assert link.loop_reader is not None
        await until(lambda: link.loop_reader is None)  # the reactor has read one
        assert await lock.renew() is True
        assert lock.held


async def test_each_wait_has_its_own_time(server: ServerProcess, key: str) -> None:
    """One timer does for all: those who come later may be over sooner, or have no end."""
    holder = server.connect()
    token = holder.lock(key, "0 600")
    pace = Pace()

    async def wait(seconds: float | None) -> tuple[float, float]:
        lock = lock_on(server, key)
        lock.acquire_timeout_s = seconds
        granted = await lock.acquire()
        took = pace.wall, pace.seconds
        assert granted == (seconds is None)
        assert await lock.release() == granted
        return took

    times = (1.7, 0.3, 0.9, 0.6, 1.2)
    with pace:
        forever = asyncio.ensure_future(wait(None))
        took = await soon(asyncio.gather(*map(wait, times)))
    for (wall, seconds), should in zip(took, times, strict=True):
        assert wall >= should
        assert seconds < should + 0.5
    assert holder.ask("r", key, token) == "ok"
    await soon(forever)


def test_nothing_keeps_a_loop_that_has_ended(
    server: ServerProcess, new_loop: NewLoop, key: str
) -> None:
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []
    for _ in range(3):
        with asyncio.Runner(loop_factory=new_loop) as runner:
            loops.append(weakref.ref(runner.get_loop()))
            runner.run(used(server, key))
    del runner
    close_idle_connections()

    def are_gone() -> bool:
        gc.collect()
        return [loop() for loop in loops] == [None] * 3

    eventually(are_gone)  # the reactor may be about to let go of the last one
