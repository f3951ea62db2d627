"""Tasks that are cancelled wherever they wait: nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
from typing import Any

import pytest

from dflockd import client, sync_client
from dflockd.client import process
from tests.dflockd.client.interruptions import Cancelled
from tests.dflockd.client.scenes import BUSY, FREED, Scene, check_after, connections
from tests.dflockd.client_support import Calls, is_free, renewed, soon, until, waiters
from tests.dflockd.proxy import Proxy
from tests.dflockd.raw_server import ServerProcess

pytestmark = pytest.mark.usefixtures("no_idle_connections")


async def in_block(lock: client.DistributedLock) -> None:
    async with lock:
        assert lock.held
        await asyncio.sleep(random.choice((0, 0.0003)))


async def in_calls(lock: client.DistributedLock) -> None:
    assert await lock.acquire() is True
    try:
        assert await lock.renew() is True
    finally:
        await lock.release()


async def in_phases(lock: client.DistributedLock) -> None:
    try:
        await lock.enqueue()
        assert await lock.wait() is True
    finally:
        await lock.release()


async def in_time(lock: client.DistributedLock) -> None:
    try:
        async with asyncio.timeout(random.uniform(0, 0.001)):
            await in_block(lock)
    except TimeoutError:
        raise asyncio.CancelledError from None


@pytest.mark.parametrize("contended", [False, True])
async def test_a_task_cancelled_at_any_moment(
    server: ServerProcess, options: dict[str, Any], key: str, contended: bool
) -> None:
    raw = server.connect()

    def check() -> None:
        token = raw.lock(key, FREED)
        assert raw.ask("r", key, token) == "ok"

    cancelled = 0
    for number in range(200):
        function = (in_block, in_calls, in_phases, in_time)[number % 4]
        token = raw.lock(key, FREED) if contended else ""
        task = asyncio.create_task(function(client.DistributedLock(key, **options)))
        if contended:
            await asyncio.sleep(random.uniform(0, 0.001))
            assert raw.ask("r", key, token) == "ok"
        await asyncio.sleep(random.uniform(0, 0.001))
        task.cancel()
        try:
            await soon(task)
        except asyncio.CancelledError:
            cancelled += 1
        await asyncio.to_thread(check)
        # The connections that are left have no answers waiting in them.
        lock = client.DistributedLock(key, **options)
        assert await lock.acquire() is True
        assert await lock.release() is True
    assert cancelled > 40


async def async_block(scene: Scene) -> None:
    async with scene.lock:
        pass


async def async_phases(scene: Scene) -> None:
    assert await scene.lock.enqueue() == "acquired"
    assert await scene.lock.wait() is True
    assert await scene.lock.release() is True


async def async_queue(scene: Scene) -> None:
    assert await scene.lock.enqueue() == "queued"
    scene.unhold()
    assert await scene.lock.wait() is True
    assert await scene.lock.release() is True


async def async_waiting_in_vain(scene: Scene) -> None:
    assert await scene.lock.enqueue() == "queued"
    assert await scene.lock.wait(0.1) is False


async def async_in_vain(scene: Scene) -> None:
    scene.lock.acquire_timeout_s = 0.1
    assert await scene.lock.acquire() is False


async def async_renewal(scene: Scene) -> None:
    assert await scene.lock.acquire() is True
    assert await scene.lock.renew() is True
    await scene.lock.check()
    assert await scene.lock.release() is True


async def async_detaching(scene: Scene) -> None:
    assert await scene.lock.acquire() is True
    scene.detached = await scene.lock.detach()


async def async_adopting(scene: Scene) -> None:
    scene.detached, scene.token = scene.token, None
    assert scene.detached is not None
    assert await scene.lock.adopt(scene.detached) is True
    scene.detached = None
    assert await scene.lock.release() is True


async def async_broken(scene: Scene) -> None:
    assert await scene.lock.acquire() is True
    scene.is_taken = True
    scene.lock._session.lease.link._sock.shutdown(socket.SHUT_RDWR)
    await scene.lock.release()


ASYNC_SCENES = {
    each.__name__.removeprefix("async_"): each
    for each in (
        *(async_block, async_phases, async_queue, async_waiting_in_vain, async_in_vain),
        *(async_renewal, async_detaching, async_adopting, async_broken),
    )
}


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("localhost", marks=pytest.mark.soak)])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("how", ASYNC_SCENES)
async def test_a_task_cancelled_wherever_it_waits(
    server: ServerProcess, key: str, how: str, is_late: bool, host: str
) -> None:
    """Each connection is new; the name of one is to be looked up."""
    before = connections(server)
    rival = server.connect()
    lost = Calls()
    for number in itertools.count(1):
        lock = client.DistributedLock(key, servers=[(host, server.port)], on_lost=lost)
        scene = Scene(server, key, lock, rival)
        if how in BUSY:
            scene.hold()
        process.close_idle_connections()
        cancelled = Cancelled(ASYNC_SCENES[how](scene), number, is_late=is_late)
        try:
            await soon(cancelled)
        except asyncio.CancelledError as exc:
            await asyncio.sleep(0)  # who is told of a loss is told on the loop
            if how == "renewal" and lock.state == "held":
                # It was waiting for a renewal, or asking whether it is held.
                assert await lock.release() is True
            assert lock.state == "lost" if lost.locks else lock.state == "free"
            assert len(lost.locks) == (lock.state == "lost")
            lost.locks.clear()
            # Another client, with which it is easier to see what is there.
            other = sync_client.DistributedLock(key, 2, servers=[("127.0.0.1", server.port)])
            scene.lock = other
            check_after(scene, exc)
            lock.acquire_timeout_s = 2
            assert await lock.acquire() is True
            assert await lock.release() is True
        else:
            scene.unhold()
            if scene.detached is not None:
                assert rival.ask("r", key, scene.detached) == "ok"
            if cancelled.count < number:
                break
    assert number > 2
    rival.close()
    await until(lambda: connections(server) <= before)


async def test_a_cancelled_wait_leaves_the_queue(
    server: ServerProcess, options: dict[str, Any], key: str
) -> None:
    async with client.DistributedLock(key, **options):
        for _ in range(3):
            waiting = asyncio.create_task(client.DistributedLock(key, **options).acquire())
            await until(lambda: waiters(server, key) == 1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await until(lambda: waiters(server, key) == 0)


async def test_a_cancelled_renewal(
    server: ServerProcess, options: dict[str, Any], key: str
) -> None:
    """What is cancelled is the waiting: the lock is as healthy as before, wherever it was."""
    lost = Calls()
    lock = client.DistributedLock(key, on_lost=lost, **options)
    await lock.acquire()
    for steps in range(40):
        renewing = asyncio.create_task(lock.renew())
        for _ in range(steps % 10):
            await asyncio.sleep(steps * 0.00002)
        renewing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            assert await soon(renewing) is True
        assert lock.held
    assert not is_free(server, key)
    assert await lock.renew() is True
    assert await lock.release() is True
    assert not lost.locks
    assert is_free(server, key)


async def test_a_release_cancelled_while_a_renewal_is_under_way(
    server: ServerProcess, key: str
) -> None:
    proxy = Proxy(server.port)
    try:
        options = {"lease_ttl_s": 600, "renew_ratio": 0.001}
        lock = client.DistributedLock(key, servers=[("127.0.0.1", proxy.port)], **options)
        await lock.acquire()
        proxy.withhold_replies()
        await renewed(server, key)
        releasing = asyncio.create_task(lock.release())
        await asyncio.sleep(0.05)
        assert not releasing.done()
        releasing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await soon(releasing)
        assert not lock.held
        await until(lambda: is_free(server, key))
    finally:
        proxy.close()
