"""The clients where the system has less: no forks, no polls, no sockets with a path, as on Windows."""

from __future__ import annotations

import pytest

from tests.dflockd.client_support import Script, is_free, stats
from tests.dflockd.raw_server import ServerProcess, eventually
from tests.effort import more

# asyncio is imported before: what it has is the system's own business.
WITHOUT = """
import asyncio, os, select, selectors, signal, socket, ssl, subprocess, sys, threading, time

# Elsewhere it makes other sockets; here there are no others.
pair, family = socket.socketpair, socket.AF_UNIX
socket.socketpair = lambda *args: pair(family)

for name in sys.argv[3].split():
    module, _, attribute = name.partition(".")
    if attribute:
        assert hasattr(sys.modules[module], attribute)
        delattr(sys.modules[module], attribute)
    else:
        sys.modules[module] = None

options = {"servers": [("127.0.0.1", int(sys.argv[2]))], "lease_ttl_s": 600, "renew_ratio": 0.0002}

def blocking():
    from dflockd.sync_client import DistributedLock, DistributedSemaphore
    lost = []
    with DistributedLock("held", on_lost=lost.append, **options) as lock:
        first = lock._session.lease.deadline
        while lock._session.lease.deadline == first:  # until it is renewed
            time.sleep(0.01)
        assert lock.held and lock.renew() and not lost
        assert not DistributedLock("held", 0, servers=options["servers"]).acquire()
    with DistributedSemaphore("slots", 2, **options):
        pass

async def not_blocking():
    from dflockd.client import DistributedLock, DistributedSemaphore
    lost = []
    async with DistributedLock("held", on_lost=lost.append, **options) as lock:
        first = lock._session.lease.deadline
        while lock._session.lease.deadline == first:  # until it is renewed
            await asyncio.sleep(0.01)
        assert lock.held and await lock.renew() and not lost
        assert not await DistributedLock("held", 0, servers=options["servers"]).acquire()
    async with DistributedSemaphore("slots", 2, **options):
        pass

for face in sys.argv[1].split():
    if face == "sync":
        blocking()
    else:
        asyncio.run(not_blocking())
print("done", flush=True)
"""

FORK = "os.register_at_fork os.fork"
POLL = "select.poll"
UNIX = "socket.AF_UNIX socket.SO_REUSEPORT fcntl resource pwd grp"
OPTIONS = "socket.TCP_KEEPIDLE socket.TCP_KEEPINTVL socket.TCP_KEEPCNT socket.TCP_USER_TIMEOUT"
CLOCKS = "time.CLOCK_BOOTTIME time.clock_gettime"


MISSING = {"fork": FORK, "poll": POLL, "unix": UNIX, "options": OPTIONS, "clocks": CLOCKS}
BOTH = "sync asyncio"
ALL = " ".join(MISSING.values())


@pytest.mark.parametrize(
    ("faces", "missing"),
    [
        *(pytest.param(BOTH, missing, id=name) for name, missing in MISSING.items()),
        *(pytest.param(faces, ALL, id=f"all-{faces}") for faces in ("sync", "asyncio", BOTH)),
        *(more(faces, missing) for faces in ("sync", "asyncio") for missing in MISSING.values()),
    ],
)
def test_a_system_that_has_less(server: ServerProcess, faces: str, missing: str) -> None:
    script = Script(WITHOUT, faces, server.port, missing, fresh=True)
    try:
        assert script.line() == "done"
    finally:
        script.close()
    assert is_free(server, "held")
    eventually(lambda: stats(server)["connections"] == 0)


@pytest.mark.parametrize("module", ["dflockd.sync_client", "dflockd.client", "dflockd.sharding"])
def test_each_can_be_imported_first(module: str) -> None:
    script = Script(
        f"import asyncio, os; del os.register_at_fork, os.fork; import {module}; print('imported')",
        fresh=True,
    )
    try:
        assert script.line() == "imported"
    finally:
        script.close()
