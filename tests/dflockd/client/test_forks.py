"""Forks at any moment: no copy of a connection is left to keep the parent's locks.

The forked children live on, and hold nothing; the parent dies, and the server frees what it held.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dflockd.client.families import StartFamily, faces, needs_forks
from tests.dflockd.client_support import is_free, stats
from tests.dflockd.raw_server import ServerProcess, eventually

pytestmark = needs_forks


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    server = ServerProcess()
    yield server
    server.end()


def freed(server: ServerProcess, *keys: str) -> None:
    """Check that the locks are free soon, because no connection is left."""
    eventually(lambda: all(is_free(server, key) for key in keys))
    eventually(lambda: stats(server)["connections"] == 0)


# One of the two clients alone: nobody has imported the other.

ONE_CLIENT = """
import asyncio

options = {"servers": [("127.0.0.1", int(sys.argv[2]))], "lease_ttl_s": 600}

async def main():
    from dflockd import client
    assert "dflockd.sync_client" not in sys.modules
    lock, idle = (client.DistributedLock(key, **options) for key in ("held", "idle"))
    await lock.acquire()
    async with idle:
        pass
    fork()
    say("forked")
    await asyncio.sleep(600)

def blocking():
    from dflockd import sync_client
    assert "dflockd.client" not in sys.modules or "asyncio" in sys.modules
    lock, idle = (sync_client.DistributedLock(key, **options) for key in ("held", "idle"))
    lock.acquire()
    with idle:
        pass
    fork()
    say("forked")
    time.sleep(600)

run(sys.argv[1], blocking, main)
"""


@faces
def test_only_one_of_the_clients_is_imported(
    server: ServerProcess, families: StartFamily, face: str
) -> None:
    if face == "uvloop":
        pytest.importorskip("uvloop")
    family = families(ONE_CLIENT, face, server.port, fresh=True)
    family.wait_for("forked")
    assert not is_free(server, "held")
    family.kill_parent()
    assert family.children_live(1)
    freed(server, "held")
    assert family.children_live(1)


# Forks at random moments.

BUSY = """
face, port, forks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
import asyncio, random

options = {"servers": [("127.0.0.1", port)], "lease_ttl_s": 600}
sys.setswitchinterval(1e-4)
held = []
enough = threading.Event()

def blocking():
    from dflockd import sync_client
    while not enough.is_set() and len(held) < 1500:
        lock = sync_client.DistributedLock(f"{os.getpid()}-{len(held)}", **options)
        assert lock.acquire()
        held.append(lock)

async def not_blocking():
    from dflockd import client
    while not enough.is_set() and len(held) < 1500:
        lock = client.DistributedLock(f"{os.getpid()}-{len(held)}", **options)
        assert await lock.acquire()
        held.append(lock)
    await asyncio.sleep(600)

threading.Thread(target=run, args=(face, blocking, not_blocking), daemon=True).start()
while not held:
    time.sleep(0.001)
for _ in range(forks):
    before = len(held)
    time.sleep(random.uniform(0, 0.003))
    fork()
    while len(held) == before:  # the next comes in the middle of another connection
        time.sleep(0.0001)
enough.set()
time.sleep(0.2)
say("forked")
time.sleep(600)
"""


@faces
def test_forks_beside_a_thread_that_connects(
    server: ServerProcess, families: StartFamily, face: str
) -> None:
    """Each lock that it takes has a connection of its own."""
    if face == "uvloop":
        pytest.importorskip("uvloop")
    forks = 40
    family = families(BUSY, face, server.port, forks)
    family.wait_for("forked")
    held = len(stats(server)["locks"])
    assert held > forks
    family.kill_parent()
    assert family.children_live(forks)
    eventually(lambda: not stats(server)["locks"])
    eventually(lambda: stats(server)["connections"] == 0)  # one may just be being made
    assert family.children_live(forks)


LOOK_INTO = """
import socket
from dflockd.sync_client import DistributedLock

where = ("127.0.0.1", int(sys.argv[1]))
locks = [DistributedLock(f"key-{n}", servers=[where], lease_ttl_s=600) for n in range(5)]
for lock in locks:
    lock.acquire()
own = socket.create_connection(where)
r, w = os.pipe()
if os.fork() == 0:
    own.sendall(b"ping\\n_\\n_\\n")
    os.write(w, own.recv(100))
    os._exit(0)
say(os.read(r, 100).decode().strip())
os.wait()
say([lock.release() for lock in locks].count(True))
"""


def test_a_child_keeps_what_is_not_the_clients(
    server: ServerProcess, families: StartFamily
) -> None:
    family = families(LOOK_INTO, server.port)
    family.wait_for("5")
    assert family.lines[0].startswith(("ok", "error"))
