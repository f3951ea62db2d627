"""A client that does everything a client may do, and much that it should not, until it is killed.

    python rough_client.py PORT SEED RECORD

Each critical section is two lines in RECORD, which several of these share: they are what the soak
test judges.
"""

import asyncio
import contextlib
import json
import os
import random
import socket
import struct
import sys
import threading
import time

from dflockd import errors
from dflockd.client import DistributedLock as AsyncLock
from dflockd.sync_client import DistributedLock, DistributedSemaphore

PORT, SEED, RECORD = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
SERVERS = [("127.0.0.1", PORT)]
KEYS = [f"key-{number}" for number in range(6)]
LIMIT = 3
FILE = os.open(RECORD, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def note(what, key, limit, lock):
    event = {"what": what, "key": key, "limit": limit, "token": lock, "pid": os.getpid()}
    os.write(FILE, (json.dumps({**event, "at": time.monotonic_ns()}) + "\n").encode())


def section(chance, lock, limit=1):
    """Work under a lock that was just acquired."""
    token = lock.token
    note("start", lock.key, limit, token)
    time.sleep(chance.random() * 0.01)
    note("end", lock.key, limit, token)


def with_lock(chance):
    lock = DistributedLock(chance.choice(KEYS), chance.choice((0, 0.05, 1, 5)), servers=SERVERS)
    if lock.acquire():
        section(chance, lock)
        lock.release()


def with_semaphore(chance):
    lock = DistributedSemaphore(chance.choice(KEYS), LIMIT, chance.choice((0, 1)), servers=SERVERS)
    if lock.acquire():
        section(chance, lock, LIMIT)
        lock.release()


def two_phase(chance):
    lock = DistributedLock(chance.choice(KEYS), 2, servers=SERVERS)
    lock.enqueue()
    if chance.random() < 0.7 and lock.wait():
        section(chance, lock)
    lock.release()


def forgotten(chance):
    lock = DistributedLock(chance.choice(KEYS), 1, servers=SERVERS)
    if lock.acquire():
        section(chance, lock)


def short_lease(chance):
    with DistributedLock(chance.choice(KEYS), 5, lease_ttl_s=1, servers=SERVERS) as lock:
        section(chance, lock)


def asynchronous(chance):
    async def one():
        lock = AsyncLock(chance.choice(KEYS), 2, servers=SERVERS)
        if await lock.acquire():
            token = lock.token
            note("start", lock.key, 1, token)
            # No await before the end is noted: a cancellation must not come in between.
            time.sleep(chance.random() * 0.005)  # noqa: ASYNC251
            note("end", lock.key, 1, token)
            await lock.release()

    async def several():
        tasks = [asyncio.create_task(one()) for _ in range(4)]
        await asyncio.sleep(chance.random() * 0.05)
        for task in tasks[:2]:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(several())


def rude(chance):
    """Bytes that are no request, half a request, a request and no patience, a reset."""
    with socket.create_connection(("127.0.0.1", PORT), 5) as sock:
        key = chance.choice(KEYS).encode()
        sock.sendall(
            chance.choice(
                (
                    os.urandom(chance.randrange(1, 400)),
                    b"l\n%b\n" % key,
                    b"l\n%b\n5\n" % key,
                    b"e\n%b\n\n" % key,
                    b"e\n%b\n1\nw\n%b\n3\n" % (key, key),
                    b"l\n%b\n0\nl\n%b\n0\nstats\n_\n_\n" % (key, key),
                )
            )
        )
        time.sleep(chance.random() * 0.02)
        if chance.random() < 0.5:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def run(seed):
    chance = random.Random(seed)
    doings = [with_lock] * 8 + [with_semaphore] * 4 + [two_phase] * 3 + [asynchronous] * 2
    doings += [forgotten, short_lease, rude, rude]
    while True:
        with contextlib.suppress(errors.LockTimeoutError):
            chance.choice(doings)(chance)


for thread in range(3):
    threading.Thread(target=run, args=(SEED * 10 + thread,), daemon=True).start()
run(SEED * 10 + 9)
