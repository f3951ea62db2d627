"""The longest gap that one client sees while another one does its worst.

Each load comes from one client, though it may have several connections. What it needs is made ready
before anybody looks for a gap, and it reads its answers as they come.
"""

from __future__ import annotations

import itertools
import select
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple, Self

from benchmarks.child import Child
from benchmarks.exchange import PATIENCE, connect
from benchmarks.servers import Server
from tests.stalls import storms

BURST = 12 << 10
"""Bytes of requests: a client can send them at once, and a server reads them in one piece."""
BATCH = 500
"""Requests that are sent at once while a server is only made ready."""
HOLDS = 10_000
"""What a connection or a key may have, unless ``--max-holds`` says otherwise."""
MOST = 1 << 20
"""The largest limit of a semaphore."""
LEASE = 3600
AWAY = 3_000_000
"""Milliseconds until somebody is back at a kept place: long after the load."""
ORPHANED = 3
"""Seconds that holds have left once their connection broke off."""
NEWER = 2.0
"""Seconds for which newer runs ask for a lock."""
STORM = 0.15
"""Seconds for which one kind of request is made."""
LOOKED = 6.0
"""Seconds in which a server has looked for deadlocks once."""
AFTER = 1.0
"""Seconds in which a server does what nobody waits for. What it does later, it does in pieces."""


class Prober(Child):
    """A client that does nothing but ask."""

    @classmethod
    def at(cls, server: Server) -> Self:
        return cls.of("tests.stalls.prober", str(server.port), str(server.pid))

    @contextmanager
    def watching(self) -> Iterator[list[float]]:
        """Probe while the block runs; after it the list has the longest gap, in milliseconds."""
        found: list[float] = []
        self.ask("begin")
        yield found
        found.append(float(self.ask("end")))

    def idle(self, seconds: float) -> float:
        """Return the longest gap in so many seconds in which nobody else does anything."""
        with self.watching() as found:
            time.sleep(seconds)
        return found[0]


class Crowd:
    """A client, and the connections that it has until the stack is closed."""

    def __init__(self, server: Server, stack: ExitStack) -> None:
        self._server = server
        self._stack = stack

    def connect(self) -> socket.socket:
        return self._stack.enter_context(connect(self._server.port))

    def lock(self, *keys: bytes) -> socket.socket:
        """Hold the locks over one connection."""
        sock = self.connect()
        for start in range(0, len(keys), BATCH):
            batch = keys[start : start + BATCH]
            requests = b"".join(b"l\n%b\n0 %d\n" % (key, LEASE) for key in batch)
            expect(b"ok ", exchange(sock, requests, len(batch)), len(batch))
        return sock

    def hold(self, number: int) -> list[socket.socket]:
        """Have so many holds of semaphores; return their connections.

        Each connection has a semaphore of its own, with as many holds as a server gives by default.
        """
        connections: list[socket.socket] = []
        for first in range(0, number, HOLDS):
            some = min(HOLDS, number - first)
            sock = self.connect()
            request = b"sl\nheld-%d\n0 %d %d\n" % (len(connections), MOST, LEASE)
            expect(b"ok ", exchange(sock, request * some, some), some)
            connections.append(sock)
        return connections


def exchange(sock: socket.socket, requests: bytes, number: int) -> bytes:
    """Send requests and read so many replies, both at the same time: neither side waits for long."""
    to_send, replies = memoryview(requests), [b""]
    missing = number
    sock.setblocking(False)
    while missing > 0:
        readable, writable, _ = select.select([sock], [sock] if to_send else [], [], PATIENCE)
        if readable:
            replies.append(sock.recv(1 << 20))
            missing -= replies[-1].count(b"\n")
        if writable:
            to_send = to_send[sock.send(to_send) :]
        if not (readable or writable) or (readable and not replies[-1]):
            raise RuntimeError(f"{missing} of {number} replies are missing")
    sock.settimeout(PATIENCE)
    return b"".join(replies)


def burst(sock: socket.socket, request: bytes) -> None:
    """Send as many of a request as `BURST` has room for."""
    number = BURST // len(request)
    exchange(sock, request * number, number)


def expect(words: bytes, replies: bytes, number: int) -> None:
    """Raise a RuntimeError unless so many replies have these words."""
    if replies.count(words) != number:
        raise RuntimeError(f"not {number} times {words!r}: {replies[-80:]!r}")


def break_off(sock: socket.socket) -> None:
    """End a connection without a farewell."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


# The loads. Each returns the longest gap in milliseconds.


def reserve(crowd: Crowd, number: int, fields: str = "") -> socket.socket:
    """Reserve so many positions at a key that is held; return the connection that has done so.

    Where `fields` has ``{}``, that is the number of the position.
    """
    crowd.lock(b"hot")
    sock = crowd.connect()
    for start in range(0, number, BATCH):
        batch = range(start, min(start + BATCH, number))
        requests = (
            f"acquire\nhot\ntimeout=0 away={AWAY} hold=100{fields.format(each)}\n" for each in batch
        )
        replies = exchange(sock, "".join(requests).encode(), len(batch))
        expect(b"timeout ", replies, len(batch))
    return sock


def kept_places(crowd: Crowd, prober: Prober, number: int) -> float:
    sock = reserve(crowd, number)
    with prober.watching() as found:
        burst(sock, b"l\nhot\n0\n")
    return found[0]


def newer_and_newer(connections: int, crowd: Crowd, prober: Prober, number: int) -> float:
    """Let each of some connections ask all the time for a key with reserved positions, ever newer."""
    reserve(crowd, number)
    ages = itertools.count(2)  # as large as any may be: they count from the time, in nanoseconds
    with selectors.DefaultSelector() as selector, prober.watching() as found:

        def ask(sock: socket.socket) -> None:
            age = next(ages)
            sock.sendall(b"acquire\nhot\ntimeout=0 owner=%d attempt=0 age=%d\n" % (age, age))

        for _ in range(connections):
            sock = crowd.connect()
            selector.register(sock, selectors.EVENT_READ)
            ask(sock)
        until, waiting = time.monotonic() + NEWER, connections
        while waiting:
            ready = selector.select(PATIENCE)
            if not ready:
                raise RuntimeError(f"{waiting} connections are not answered")
            for key, _ in ready:
                assert isinstance(key.fileobj, socket.socket)
                if not key.fileobj.recv(256):
                    raise RuntimeError("the server has closed a connection")
                if time.monotonic() < until:
                    ask(key.fileobj)
                else:
                    waiting -= 1
    return found[0]


def every_request(connections: int, crowd: Crowd, prober: Prober, number: int) -> float:
    """Have each of some connections ask for all that there is, one kind of request after the other."""
    storms.gather(crowd.connect(), number)
    longest = 0.0
    for requests in storms.STORMS.values():
        with ExitStack() as stack, prober.watching() as found:
            socks = [stack.enter_context(crowd.connect()) for _ in range(connections)]
            storms.storm([storms.Client(*each, requests) for each in enumerate(socks)], STORM)
        longest = max(longest, *found)
    return longest


def groups(crowd: Crowd, prober: Prober, number: int) -> float:
    """Reserve positions in a group each, and leave; then look at them."""
    reserve(crowd, number, " group=group-{}").close()
    longest = prober.idle(LOOKED)
    sock = crowd.connect()
    with prober.watching() as found:
        burst(sock, b"i\nhot\n_\n")
    return max(longest, found[0])


def stats(crowd: Crowd, prober: Prober, number: int) -> float:
    sock = crowd.lock(*(b"account:%06d" % each for each in range(number)))
    with prober.watching() as found:
        burst(sock, b"stats\n_\n_\n")
    return found[0]


def inspections(crowd: Crowd, prober: Prober, number: int) -> float:
    sock = crowd.hold(number)[0]
    with prober.watching() as found:
        burst(sock, b"si\nheld-0\n_\n")
    return found[0]


def pings(crowd: Crowd, prober: Prober, number: int) -> float:
    sock = crowd.connect()
    with prober.watching() as found:
        exchange(sock, b"ping\n_\n_\n" * number, number)
    return found[0]


def end(crowd: Crowd, prober: Prober, number: int) -> float:
    connections = crowd.hold(number)
    with prober.watching() as found:
        for sock in connections:
            sock.close()
        time.sleep(AFTER)
    return found[0]


def expiry(crowd: Crowd, prober: Prober, number: int) -> float:
    """Let the leases of all holds end at one moment.

    They were granted one after the other, and would end so: ``--orphan-ttl`` gives them a new end
    when their connection breaks off.
    """
    connections = crowd.hold(number)
    for sock in connections:
        break_off(sock)
    time.sleep(ORPHANED / 2)
    return prober.idle(ORPHANED / 2 + AFTER)


class Gap(NamedTuple):
    """A load, and the server that it is for."""

    key: str
    title: str
    """With a place for the number."""
    number: int
    run: Callable[[Crowd, Prober, int], float]
    flags: tuple[str, ...] = ()


UNBOUNDED = ("--max-holds", "0")
"""More than one connection or key may have: the server is to bear that too."""

GAPS = (
    Gap(
        "gap-places",
        "12 KB of attempts at a key with {:,} reserved positions",
        20_000,
        kept_places,
        (*UNBOUNDED, "--max-waiters", "5"),
    ),
    *(
        Gap(
            f"gap-newer-{each}",
            f"{each} {'client asks' if each == 1 else 'clients ask'}, ever newer, for a key with "
            "{:,} reserved positions",
            100_000,
            partial(newer_and_newer, each),
            UNBOUNDED,
        )
        for each in (1, 300)
    ),
    *(
        Gap(
            f"gap-any-{each}",
            f"{each} {'client makes' if each == 1 else 'clients make'} one kind of request after the "
            "other, with {:,} holders and four times as many reserved positions",
            25_000,
            partial(every_request, each),
            (*UNBOUNDED, "--max-rate-runs", str(MOST)),
        )
        for each in (1, 300)
    ),
    Gap(
        "gap-groups",
        "deadlocks are looked for with {:,} groups of one key",
        30_000,
        groups,
        UNBOUNDED,
    ),
    Gap("gap-stats", "12 KB of stats with {:,} locks held", 1_000, stats),
    Gap("gap-inspect", "12 KB of inspections of a semaphore held {:,} times", 5_000, inspections),
    Gap("gap-pings", "{:,} pings in one piece", 80_000, pings),
    Gap("gap-end", "connections with {:,} holds end", 300_000, end),
    Gap(
        "gap-expiry",
        "{:,} leases end at one moment",
        300_000,
        expiry,
        ("--orphan-ttl", str(ORPHANED)),
    ),
)
