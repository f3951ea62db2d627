"""Every request of the protocol, which many clients send all the time, at keys where very much is."""

from __future__ import annotations

import itertools
import re
import select
import selectors
import socket
import time
from collections.abc import Iterator

from benchmarks.exchange import PATIENCE

KEYS = ("plain", "aged", "grouped", "rated")
"""Each is held, and wanted by very many who are away."""

HELD = "held"
"""A semaphore with very many holders."""

AWAY = "away=3000000 hold=100"
WANTED = {
    "plain": AWAY,
    "aged": f"{AWAY} owner=crowd-{{n}} attempt=0 age=1",
    "grouped": f"{AWAY} group=group-{{n}}",
    "rated": f"{AWAY} rate=100000/80000000",
}
"""What those have said who are away, by the key."""

STORMS: dict[str, tuple[str, ...]] = {
    "l": ("l|{key}|0",),
    "e": ("e|{key}|", "w|{key}|0"),
    "w": ("e|{key}|", "w|{key}|0", "w|{key}|0"),
    "n": ("l|{mine}|0", "n|{mine}|{token}", "n|{key}|{token}", "r|{mine}|{token}"),
    "r": ("l|{mine}|0", "r|{key}|{token}", "r|{mine}|{token}"),
    "sl": ("sl|held|0 1000000", "sr|held|{token}"),
    "se": ("se|held|1000000", "sw|held|0", "sr|held|{token}"),
    "sw": ("se|held|1000000", "sw|held|0", "sw|held|0", "sr|held|{token}"),
    "sn": ("sl|held|0 1000000", "sn|held|{token}", "sr|held|{token}"),
    "sr": ("sl|held|0 1000000", "sr|held|{token}", "sr|held|{token}"),
    "acquire": (
        "acquire|{key}|timeout=0 owner=o-{n} attempt=0 label=somebody",
        "acquire|aged|timeout=0 owner=a-{n} attempt=0 age={n}",
        "acquire|grouped|timeout=0 group=g-{n} group-limit=1",
        "acquire|rated|timeout=0 rate=100000/80000000",
        "acquire|{key}|timeout=0 away=1000 hold=100",
        "acquire|{key}|timeout=0 ticket={ticket} away=0 hold=0",
    ),
    "enqueue": (
        "enqueue|{key}|turn=1000 owner=e-{n} attempt=0",
        "wait|{key}|timeout=0 away=1000 hold=100",
        "enqueue|{key}|ticket={ticket}",
        "wait|{key}|timeout=0",
    ),
    "wait": (
        "enqueue|aged|owner=w-{n} attempt=0 age={n}",
        "wait|aged|timeout=0 age={n}",
        "enqueue|{key}|",
        "wait|{key}|timeout=0",
    ),
    "renew": (
        "acquire|{mine}|timeout=0 rate=100000/1000 group=g",
        "renew|{mine}|token={token} how=begun",
        "renew|{mine}|token={token} how=confirm",
        "renew|{mine}|token={token} how=detach",
        "renew|{key}|token={token}",
        "r|{mine}|{token}",
    ),
    "unbegun": ("acquire|{mine}|timeout=0 rate=100000/1000", "unbegun|{mine}|{token}"),
    "next": (
        "hello|{mine}|version=1",
        "enqueue|{mine}|turn=1000",
        "next|_|_",
        "pass|{mine}|{ticket}",
        "wait|{mine}|timeout=0",
    ),
    "pass": ("acquire|{key}|timeout=0 away=1000 hold=100", "pass|{key}|{ticket}"),
    "age": ("age|{key}|_",),
    "listen": ("l|{mine}|0", "listen|{mine}|{token}", "r|{mine}|{token}", "listen|{key}|{token}"),
    "i": ("i|{key}|_",),
    "si": ("si|held|_",),
    "evict": ("l|{mine}|0", "evict|{mine}|{fence}", "evict|{key}|1"),
    "sevict": ("sl|held|0 1000000", "sevict|held|{fence}"),
    "find": ("find|waiters,all|group-{n}",),
    "pause": ("pause|{mine}|", "resume|{mine}|_"),
    "resume": ("resume|{mine}|_", "pause|{mine}|"),
    "stats": ("stats|_|_",),
    "shards": ("shards|_|_",),
    "ping": ("ping|_|_",),
    "barrier": ("barrier|_|_",),
    "stable-ref": ("stable-ref|ref|_",),
    "identify": ("identify|_|nonce",),
    "auth": ("auth|_|secret",),
    "hello": ("hello|here|version=1",),
    "malformed": ("nonsense|{key}|_", "l|{key}|nonsense"),
    "a larger limit": tuple(f"acquire|{{key}}|timeout=0 limit={limit}" for limit in (100000, 1)),
    "a larger group": tuple(
        f"acquire|grouped|timeout=0 limit=1000 group=group-{{n}} group-limit={limit}"
        for limit in (1000, 1)
    ),
}
"""What a client sends, one after the other and from the beginning, by the command that it is about.

``|`` stands between two lines of a request. The last two are the last: they make room at a key.
"""

_NO_TOKEN = "0" * 32
_GRANT = re.compile(rb"(?:ok|acquired) ([0-9a-f]{32}) ")
_TICKET = re.compile(rb"(?:timeout|turn) (\S+)")

_numbers = itertools.count(2)
"""As large as any age may be: they count from the time, in nanoseconds."""


class Client:
    """One connection, which has one request under way at a time."""

    def __init__(self, number: int, sock: socket.socket, requests: tuple[str, ...]) -> None:
        self.sock = sock
        self._mine = f"mine-{number}"
        self._token = _NO_TOKEN
        self._ticket = _NO_TOKEN
        self._asks = ((key, each) for key in itertools.cycle(KEYS) for each in requests)
        self._reply = b""

    def ask(self) -> None:
        """Send the next request."""
        key, request = next(self._asks)
        request = request.format(
            key=key,
            mine=self._mine,
            n=next(_numbers),
            token=self._token,
            fence=int(self._token[:16], 16),
            ticket=self._ticket,
        )
        self.sock.sendall((request.replace("|", "\n") + "\n").encode())

    def hear(self) -> bytes | None:
        """Read what has come, and return the reply if it is whole."""
        received = self.sock.recv(1 << 20)
        if not received:
            raise RuntimeError("the server has closed a connection")
        self._reply += received
        if not received.endswith(b"\n"):
            return None
        reply, self._reply = self._reply, b""
        if found := _GRANT.match(reply):
            self._token = found[1].decode()
        elif found := _TICKET.match(reply):
            self._ticket = found[1].decode()
        return reply


def storm(clients: list[Client], seconds: float) -> int:
    """Have all clients ask for so long, and return how often they were answered."""
    answered = 0
    with selectors.DefaultSelector() as selector:
        for client in clients:
            selector.register(client.sock, selectors.EVENT_READ, client)
            client.ask()
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.data.hear() is not None:
                    answered += 1
                    key.data.ask()
    return answered


def crowd_of(number: int) -> Iterator[tuple[str, int]]:
    """Yield what makes the crowds of so many, and how often each is asked for."""
    for key in KEYS:
        yield f"acquire|{key}|timeout=0 lease=3600", 1
        yield f"acquire|{key}|timeout=0 {WANTED[key]}", number
    yield f"sl|{HELD}|0 1000000 3600", number


def gather(sock: socket.socket, number: int, batch: int = 500) -> None:
    """Let one connection make all crowds.

    Raises:
        RuntimeError: the server refuses something.
    """
    for request, times in crowd_of(number):
        numbers = iter(range(times))
        while some := list(itertools.islice(numbers, batch)):
            frames = (request.format(n=each).replace("|", "\n") + "\n" for each in some)
            sock.sendall("".join(frames).encode())
            replies = b""
            while replies.count(b"\n") < len(some):
                if not select.select([sock], [], [], PATIENCE)[0]:
                    raise RuntimeError(f"no answer to {request}")
                replies += sock.recv(1 << 20)
            # A position has its ticket, and a grant its token.
            if replies.count(b" ") < len(some):
                raise RuntimeError(f"{request}: {replies[:80]!r}")
