"""Event loops of either kind, in threads of their own or alone, and locks that are used on them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from dflockd import client
from tests.dflockd.client_support import is_free, wait_renewed
from tests.dflockd.proxy import Proxy
from tests.dflockd.raw_server import PATIENCE, ServerProcess
from tests.dflockd.scripted_server import ScriptedServer

R = TypeVar("R")

LEASE = 600
"""Seconds; it does not end while a test runs, and is renewed every half second."""
SOON = 2.0
"""Seconds for what needs no more than an answer of the server."""

NewLoop = Callable[[], asyncio.AbstractEventLoop]


class LoopThread:
    """An event loop that runs in a thread of its own."""

    def __init__(self, new_loop: NewLoop, *, debug: bool = False) -> None:
        self.loop = new_loop()
        self.loop.set_debug(debug)
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE)

    def stop(self) -> None:
        """Let it run no more; it is not closed."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE)

    def goes(self, how: str) -> None:
        """Have it go on, stand, or be closed."""
        if how == "stands":
            self.stop()
        elif how == "closed":
            self.close()

    def close(self) -> None:
        if self._thread.is_alive():
            self.stop()
        if not self.loop.is_closed():
            self.loop.close()


def run_alone(new_loop: NewLoop, coroutine: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine on a loop of its own, as `asyncio.run` does."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(coroutine)


def lock_on(
    server: ServerProcess | Proxy | ScriptedServer, key: str, **options: Any
) -> client.DistributedLock:
    servers = [("127.0.0.1", server.port)]
    lease: dict[str, Any] = {"lease_ttl_s": LEASE, "renew_ratio": 0.5 / LEASE}
    return client.DistributedLock(key, 5, **{"servers": servers} | lease | options)


def stays_held(lock: client.DistributedLock, server: ServerProcess) -> None:
    """Check that the lock is held and renewed."""
    for _ in range(3):
        assert lock.held, "lost"
        assert not is_free(server, lock.key), "somebody else gets it"
        wait_renewed(server, lock.key)
    assert lock.held, "lost"


async def acquire(lock: client.DistributedLock) -> bool:
    return await lock.acquire()


async def release(lock: client.DistributedLock) -> bool:
    return await lock.release()
