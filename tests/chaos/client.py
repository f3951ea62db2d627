"""A user of locks: works under them in every way there is, until SIGTERM or worse.

    python -m tests.chaos.client --servers A,B --seed N --directory D ...

It writes its part of the history, and writes to the fenced resource under each lock.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import signal
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

from dflockd import errors
from dflockd.client import DistributedLock as AsyncLock
from dflockd.sync_client import DistributedLock, DistributedSemaphore, RateLimit
from dflockd.wire import UNLIMITED
from tests.chaos.bare import CLUSTER, Bare, parse
from tests.chaos.history import Recorder, now
from tests.chaos.options import FAIR, HISTORY, RATED, SEVERAL, key_names, of_users
from tests.chaos.resource import FencedResource
from tests.chaos.section import Heedless, deadline, work

THREADS = 2
LIMIT = 3
STARTS, WINDOW = 2, 3
"""So many in so many seconds: fewer than would like to."""
TENANTS = ("red", "green", "blue", "white")
FORGETS = 0.05
"""How often a lock is not given back: its object goes."""

NONSENSE = (
    *(b"l\n%b\n", b"l\n%b\n5\n", b"e\n%b\n\n", b"e\n%b\n1\nw\n%b\n3\n"),
    b"l\n%b\n0\nl\n%b\n0\nstats\n_\n_\n",
)
"""Half a request, a request and no patience, two phases of one, one and another."""


class User:
    """One thread."""

    _numbers = itertools.count(1)
    _process = os.urandom(2).hex()
    """Beside the pid, which in a long run is given to a second client."""

    def __init__(self, options: argparse.Namespace, recorder: Recorder, number: int) -> None:
        self._options = options
        self._servers: str | list[str] = options.servers
        if not options.servers.startswith(CLUSTER):
            self._servers = options.servers.split(",")
        self._recorder = recorder
        self._resource = FencedResource(options.directory, recorder)
        self._chance = random.Random(f"{options.seed}/{number}")
        self._keys = key_names(options.keys)
        self._doings = [self.at_once] * 3 + [self.two_phase] * 5 + [self.semaphore] * 2
        self._doings += [self.asynchronous, self.rude, self.nonsense]
        self._doings += [self.rated, self.fair] * 2
        if self._servers == options.servers:
            self._doings.append(self.bare)

    def run(self) -> None:
        while not stopping.is_set():
            self._chance.choice(self._doings)()
            stopping.wait(self._chance.random() * self._options.aside)

    # The ways to work.

    def at_once(self) -> None:
        """Acquire, and wait if need be."""
        lock, named = self._lock()
        self._acquire(lock, named)

    def semaphore(self) -> None:
        name = SEVERAL + self._chance.choice(self._keys)
        named = {"who": self._who(), "key": name, "limit": LIMIT}
        self._acquire(
            DistributedSemaphore(
                name, LIMIT, 2, self._options.lease, self._servers, on_lost=self._lost(named)
            ),
            named,
        )

    def rated(self) -> None:
        """Begin, if not too many have of late; mostly without waiting, so that it is known when."""
        name = RATED + self._chance.choice(self._keys)
        named = {"who": self._who(), "key": name, "limit": UNLIMITED}
        named |= {"starts": STARTS, "window": WINDOW * 1_000_000_000}
        timeout, lease = self._chance.choice((0, 0, 0, 1)), self._options.lease
        lock = RateLimit(
            name, (STARTS, WINDOW), timeout, lease, self._servers, on_lost=self._lost(named)
        )
        self._acquire(lock, named)

    def fair(self) -> None:
        """Be one of several, but the only one of a tenant."""
        name, tenant = FAIR + self._chance.choice(self._keys), self._chance.choice(TENANTS)
        named = {"who": self._who(), "key": name, "limit": LIMIT, "tenant": tenant}
        lock = DistributedSemaphore(
            name,
            LIMIT,
            2,
            self._options.lease,
            self._servers,
            group=tenant,
            group_limit=1,
            on_lost=self._lost(named),
        )
        self._acquire(lock, named)

    def two_phase(self) -> None:
        """Take a place in the queue, and then wait for it; sometimes walk away instead."""
        lock, named = self._lock()
        self._recorder.note("asked", **named)
        try:
            if lock.enqueue() == "queued":
                self._recorder.note("queued", **named)
                if self._chance.random() < 0.1:
                    lock.release()
                    self._recorder.note("gave_up", detail="walked away", **named)
                    return
                waits, timeout = now(), self._chance.choice((0.2, 2, 4))
                if not lock.wait(timeout):
                    until = waits + round(timeout * 1e9)
                    self._recorder.note("gave_up", until=until, detail="timed out", **named)
                    return
        except errors.RemoteError as exc:
            self._recorder.note("gave_up", detail=type(exc).__name__, **named)
            return
        self._granted(lock, named)

    def bare(self) -> None:
        """Use the protocol itself."""
        key = self._chance.choice(self._keys)
        named = {"who": self._who(), "key": key}
        lock = Bare(key, self._options.lease, self._servers)
        self._recorder.note("asked", **named)
        try:
            granted = lock.acquire(self._chance.choice((0, 2)))
        except OSError as exc:
            lock.close()
            self._recorder.note("gave_up", detail=type(exc).__name__, **named)
            return
        if granted:
            self._granted(lock, named)
        else:
            self._recorder.note("gave_up", detail="timed out", **named)

    def rude(self) -> None:
        """Release what somebody else holds, with a token that is made up."""
        key = self._chance.choice(self._keys)
        lock = DistributedLock(key, 1, self._options.lease, self._servers)
        try:
            holders = lock.inspect()["holders"]
            if holders:
                forger = Bare(key, self._options.lease, self._servers)
                forger.forge(f"{holders[0]['fence']:016x}{self._chance.getrandbits(64):016x}")
                forger.release()
        except errors.RemoteError:
            pass

    def nonsense(self) -> None:
        """Send what is no request, or leave before it is answered, and that without a farewell."""
        addresses = self._options.servers.removeprefix(CLUSTER).split(",")
        text = self._chance.choice([None, *NONSENSE])
        key = self._chance.choice(self._keys).encode()
        data = os.urandom(self._chance.randrange(1, 400))
        if text is not None:
            data = text % ((key,) * text.count(b"%b"))
        with (
            contextlib.suppress(OSError),
            socket.create_connection(parse(self._chance.choice(addresses)), 5) as sock,
        ):
            sock.sendall(data)
            time.sleep(self._chance.random() * 0.02)
            if self._chance.random() < 0.5:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def asynchronous(self) -> None:
        """Have some tasks wait side by side, and cancel one wherever it is by then."""

        async def several() -> None:
            tasks = [asyncio.create_task(self._task()) for _ in range(3)]
            await asyncio.sleep(self._chance.random() * 0.05)
            tasks[0].cancel()
            await asyncio.gather(*tasks)

        asyncio.run(several())

    async def _task(self) -> None:
        lock, named = self._lock(AsyncLock)
        self._recorder.note("asked", **named)
        try:
            if not await lock.acquire():
                self._recorder.note("gave_up", detail="timed out", **named)
                return
        except (errors.RemoteError, asyncio.CancelledError) as exc:
            self._recorder.note("gave_up", detail=type(exc).__name__, **named)
            return
        # Nothing is awaited before the end is noted: a cancellation must not come in between.
        self._work(lock, named)
        with contextlib.suppress(asyncio.CancelledError):
            self._recorder.note("released", held=await lock.release(), **named)

    # What they have in common.

    def _lock(self, kind: Any = DistributedLock) -> tuple[Any, dict[str, Any]]:
        key = self._chance.choice(self._keys)
        named = {"who": self._who(), "key": key}
        timeout = self._chance.choice((0, 0.5, 2))
        lease = self._options.lease
        on_lost = self._lost(named)
        return kind(key, timeout, lease, self._servers, on_lost=on_lost), named

    def _who(self) -> str:
        return f"client {os.getpid()}-{self._process}.{next(self._numbers)}"

    def _lost(self, named: dict[str, Any]) -> Any:
        return lambda lock: self._recorder.note("lost", until=deadline(lock), **named)

    def _acquire(self, lock: DistributedLock, named: dict[str, Any]) -> None:
        self._recorder.note("asked", **named)
        try:
            granted = lock.acquire()
        except errors.RemoteError as exc:
            self._recorder.note("gave_up", detail=type(exc).__name__, **named)
            return
        if granted:
            self._granted(lock, named)
        else:
            self._recorder.note("gave_up", detail="timed out", **named)

    def _granted(self, lock: DistributedLock | Bare, named: dict[str, Any]) -> None:
        self._work(lock, named)
        if self._chance.random() >= FORGETS or isinstance(lock, Bare):
            self._recorder.note("released", held=lock.release(), **named)

    def _work(self, lock: Any, named: dict[str, Any]) -> None:
        self._recorder.note("granted", fence=lock.fence, **named)
        seconds = self._chance.random() * self._options.work
        if self._chance.random() < self._options.long:
            seconds = self._options.lease * (0.5 + self._chance.random())
        held = Heedless(lock) if self._options.heedless else lock
        work(self._recorder, self._resource, held, named, seconds)


stopping = threading.Event()


def main() -> None:
    parser = of_users("servers", "directory")
    parser.add_argument("--heedless", action="store_true")
    options = parser.parse_args()
    recorder = Recorder(Path(options.directory) / HISTORY)
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    users = [User(options, recorder, number) for number in range(THREADS)]
    threads = [threading.Thread(target=user.run) for user in users]
    for thread in threads:
        thread.start()
    for thread in threads:
        # A signal that another thread was given does not wake this one.
        while thread.is_alive():
            thread.join(0.1)


if __name__ == "__main__":
    main()
