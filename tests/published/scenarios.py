"""What a published client is put through. Runs under its own interpreter, not under pytest.

    python scenarios.py '{"servers": [["127.0.0.1", 6388]], ...}' SCENARIO ...

Each scenario raises if the client does not get what it was made for; the last line printed is
``passed: N``.
"""

import asyncio
import importlib
import json
import ssl
import sys
import threading
import time
import zlib

CONFIG = json.loads(sys.argv[1])
SERVERS = [tuple(server) for server in CONFIG["servers"]]
PLAIN = {"servers": SERVERS[:1]}

try:
    import dflockd_client

    NAME = "dflockd_client"
except ImportError:
    NAME = "dflockd"


def module(kind):
    """The blocking (``sync``) or asyncio (``async``) module, under the names of its version."""
    names = {"sync": ("sync_client", "_sync"), "async": ("client", "_async")}[kind]
    for name in names:
        try:
            return importlib.import_module(f"{NAME}.{name}")
        except ImportError:
            continue
    raise AssertionError(f"no {kind} client in {NAME}")


SYNC, ASYNC = module("sync"), module("async")
Lock, AsyncLock = SYNC.DistributedLock, ASYNC.DistributedLock


def lock():
    with Lock("lock", acquire_timeout_s=5, **PLAIN) as held:
        assert len(held.token) == 32
        assert held.lease == 33
        assert Lock("lock", acquire_timeout_s=0, **PLAIN).acquire() is False
    again = Lock("lock", acquire_timeout_s=0, **PLAIN)
    assert again.acquire()
    assert again.release()

    async def main():
        async with AsyncLock("lock", acquire_timeout_s=5, **PLAIN) as held:
            assert held.token
            assert await AsyncLock("lock", acquire_timeout_s=1, **PLAIN).acquire() is False

    asyncio.run(main())


def waiters(number):
    """Wait until so many wait on the first server."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        reply = raw("stats\n_\n_\n")
        if sum(entry["waiters"] for entry in json.loads(reply[3:])["locks"]) == number:
            return
        time.sleep(0.01)
    raise AssertionError(f"never saw {number} waiters")


def raw(request):
    import socket

    with socket.create_connection(SERVERS[0], 5) as sock, sock.makefile("rw") as stream:
        stream.write(request)
        stream.flush()
        return stream.readline()


def fifo():
    order = []

    def wait(number):
        with Lock("fifo", acquire_timeout_s=10, **PLAIN):
            order.append(number)

    with Lock("fifo", acquire_timeout_s=5, **PLAIN):
        threads = [threading.Thread(target=wait, args=(number,)) for number in range(6)]
        for number, thread in enumerate(threads):
            thread.start()
            waiters(number + 1)
    for thread in threads:
        thread.join(10)
    assert order == list(range(6)), order


def lease_left(key):
    report = json.loads(raw("stats\n_\n_\n")[3:])
    return next(entry["lease_expires_in_s"] for entry in report["locks"] if entry["key"] == key)


def renewal():
    """Leases are renewed long before their end, by both clients at once: the server says so.

    The old clients trip over a renewal that meets their release: it follows right after one.
    """
    renewed_soon = {"lease_ttl_s": 30, "renew_ratio": 0.05, **PLAIN}

    def wait_renewed(key):
        left, deadline = lease_left(key), time.monotonic() + 30
        while (now := lease_left(key)) <= left:
            assert time.monotonic() < deadline, f"{key} is not renewed"
            left = now
            time.sleep(0.01)

    def blocking():
        with Lock("renewal", acquire_timeout_s=5, **renewed_soon) as held:
            assert held.lease == 30
            wait_renewed("renewal")
            assert Lock("renewal", acquire_timeout_s=0, **PLAIN).acquire() is False
            assert held.token

    async def main():
        other = asyncio.create_task(asyncio.to_thread(blocking))
        async with AsyncLock("async", acquire_timeout_s=5, **renewed_soon) as held:
            await asyncio.to_thread(wait_renewed, "async")
            assert await AsyncLock("async", acquire_timeout_s=0, **PLAIN).acquire() is False
            assert held.token
        await other

    asyncio.run(main())


def two_phase():
    first, second = (Lock("two-phase", acquire_timeout_s=5, **PLAIN) for _ in range(2))
    assert first.enqueue() == "acquired"
    assert first.wait(timeout_s=1)
    assert second.enqueue() == "queued"
    assert first.release()
    assert second.wait(timeout_s=5)
    assert second.release()


def semaphore():
    Semaphore = SYNC.DistributedSemaphore
    first, second, third = (
        Semaphore("semaphore", limit=2, acquire_timeout_s=0, **PLAIN) for _ in range(3)
    )
    assert first.acquire()
    assert second.acquire()
    assert not third.acquire()
    assert first.release()
    assert third.acquire()
    other = Semaphore("semaphore", limit=3, acquire_timeout_s=0, **PLAIN)
    try:
        other.acquire()
    except Exception as exc:
        assert "mismatch" in f"{type(exc).__name__} {exc}".lower(), repr(exc)
    else:
        raise AssertionError("two limits for one key")
    assert second.release()
    assert third.release()


def stats():
    with Lock("stats", acquire_timeout_s=5, **PLAIN):
        if hasattr(SYNC, "open_conn"):
            connection = SYNC.open_conn(*SERVERS[0], ssl_context=None, connect_timeout_s=5)
            report = SYNC.stats(connection)
            connection.close()
        else:
            import socket

            with socket.create_connection(SERVERS[0], 5) as sock, sock.makefile() as stream:
                report = SYNC.stats(sock, stream)
    keys = [entry["key"] for entry in report["locks"]]
    assert keys == ["stats"], report
    assert report["connections"] == 2


def fences():
    fence_from_token = dflockd_client.fence_from_token
    seen = []
    for _ in range(5):
        with Lock("fences", acquire_timeout_s=5, **PLAIN) as held:
            seen.append(fence_from_token(held.token))
    assert seen == sorted(set(seen)), seen


def sharding():
    assert len(SERVERS) == 2
    used = set()
    for number in range(8):
        key = f"shard-{number}"
        with Lock(key, acquire_timeout_s=5, servers=SERVERS):
            index = zlib.crc32(key.encode()) % 2
            used.add(index)
            # It is on the server that every client computes, and on no other.
            here = Lock(key, acquire_timeout_s=0, servers=[SERVERS[index]])
            assert not here.acquire()
            there = Lock(key, acquire_timeout_s=0, servers=[SERVERS[1 - index]])
            assert there.acquire()
            assert there.release()
    assert used == {0, 1}


def auth():
    for token in (None, "wrong"):
        try:
            Lock("auth", acquire_timeout_s=1, auth_token=token, **PLAIN).acquire()
        except Exception as exc:
            assert "right" not in str(exc)
        else:
            raise AssertionError(f"let in with the token {token!r}")
    with Lock("auth", acquire_timeout_s=5, auth_token="right", **PLAIN) as held:
        assert held.token


def tls():
    context = ssl.create_default_context(cafile=CONFIG["cafile"])
    with Lock("tls", acquire_timeout_s=5, ssl_context=context, **PLAIN) as held:
        assert held.token
    try:
        Lock("tls", acquire_timeout_s=1, **PLAIN).acquire()
    except Exception:
        return
    raise AssertionError("let in without TLS")


for scenario in sys.argv[2:]:
    globals()[scenario]()
print(f"passed: {len(sys.argv) - 2}")
