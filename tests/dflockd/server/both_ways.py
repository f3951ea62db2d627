"""A server that is given bytes, beside a table that is given the messages in them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from dflockd.server import Server, ServerOptions
from dflockd.table import (
    Counts,
    Effect,
    Histogram,
    Hold,
    LockTable,
    Peer,
)
from dflockd.wire import (
    FrameTooLongError,
    MapReport,
    Moved,
    Refusal,
    RequestReader,
    encode_map,
    encode_reply,
)
from tests.dflockd.server.session_support import FullTransport, connect, prepare

KEYS = [b"a", b"a", b"a", b"b", b"c", b"d"]
BAD_KEYS = [b"", b"a b", b"a\0", b"a\tb", b"\xff", b"a\r", b"k" * 257]
CONNECTIONS = 6


class Clock:
    """The time of both."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Loop(asyncio.AbstractEventLoop):
    """The loop of the test, but for its timers: time is what the test says."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def time(self) -> float:
        return self._loop.time()

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        return self._loop.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return asyncio.TimerHandle(0.0, callback, args, self, context)

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing is to be done."""


class Shards:
    """Three shards, by key. The last is always elsewhere."""

    def shard_of(self, key: bytes) -> int:
        return {b"a": 0, b"b": 1}.get(key[:1], 2)

    def refer(self, shard: int) -> Refusal:
        return Moved(shard, 1, b"elsewhere:6388")

    def report(self, now: float) -> MapReport:
        return encode_map({})


class Written:
    """A journal that only notes what it is told."""

    def __init__(self) -> None:
        self.changes: list[Any] = []

    def record(self, changes: Iterable[Hold], fence: int) -> None:
        self.changes += [noted(hold) for hold in changes]


def noted(hold: Hold) -> object:
    return hold.ended, hold.fields()


class Messages:
    """A server as simple as can be: each request a message, one after another."""

    def __init__(self, table: LockTable, clock: Clock) -> None:
        self.table = table
        self.clock = clock
        self.peers: dict[int, Peer] = {}
        self.readers: dict[int, RequestReader] = {}
        self.written: dict[int, bytes] = {}
        self.changes: list[Any] = []
        self._answered: deque[int] = deque()

    def connect(self) -> int:
        peer = self.table.connect()
        self.peers[peer.id], self.readers[peer.id] = peer, RequestReader()
        self.written[peer.id] = b""
        return peer.id

    def disconnect(self, number: int, *, clean: bool) -> None:
        peer = self.peers.pop(number)
        self.send(self.table.disconnect(peer, self.clock.now, clean=clean))

    def receive(self, number: int, data: bytes) -> None:
        self.readers[number].receive(data)
        self._serve(number)

    def send(self, effects: list[Effect]) -> None:
        if self.table.changes:
            self.changes += [noted(hold) for hold in self.table.changes]
            self.table.changes.clear()
        for number, reply in effects:
            self.written[number] += encode_reply(reply)
            self._answered.append(number)

    def go_on(self) -> None:
        """Handle what comes next on connections that were answered."""
        while self._answered:
            self._serve(self._answered.popleft())

    def _serve(self, number: int) -> None:
        try:
            while (peer := self.peers.get(number)) and peer.waiting is None:
                request = self.readers[number].next_request()
                if request is None:
                    break
                self.send(self.table.handle(peer, request, self.clock.now))
        except FrameTooLongError:
            self.written[number] += b"error\n"
            self.disconnect(number, clean=False)


def everything(table: LockTable, peers: Iterable[Peer]) -> object:
    """All that a table holds, with the order of it."""
    groups = list(table.each_group())
    entries = [entry for group in groups for space in group.spaces for entry in space.values()]
    return {
        "entries": [
            (
                *(entry.space, entry.key, entry.limit),
                [
                    (hold.fields(), hold.token, hold.told, hold.lease)
                    for hold in entry.holds.values()
                ],
                [
                    (
                        *(each.peer.id, each.state, each.lease, each.ticket, each.turn),
                        *(each.reservation, each.group),
                    )
                    for each in entry.waiters or ()
                ],
                sorted(entry.owners or {}),
            )
            for entry in entries
        ],
        "peers": [
            (
                *(peer.id, peer.label, peer.owner, said_ahead(peer), peer.reserve, peer.turn),
                peer.waiting is not None,
                [hold.fence for hold in peer.holds],
                *(sorted(peer.enqueued), sorted(peer.left)),
            )
            for peer in peers
        ],
        "counts": {name: counted(getattr(table.counts, name)) for name in COUNTS},
        "deadlines": (len(table.deadlines), table.next_deadline()),
        "size": len(table),
        "reserved": [sorted(group.reserved) for group in groups],
    }


def said_ahead(peer: Peer) -> object:
    ahead = peer.ahead
    return None if ahead is None else (ahead.ticket, ahead.group)


COUNTS = [name for name in vars(Counts) if not name.startswith("_")]


def counted(value: object) -> object:
    return (value.counts, value.sum) if isinstance(value, Histogram) else value


class Frames:
    """Requests by chance: good ones, bad ones, and those with what was replied."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._tokens = [b"0" * 32]
        self._tickets = [b"0"]

    def learn(self, replies: bytes) -> None:
        for line in replies.splitlines():
            words = line.split(b" ")
            if words[0] in (b"ok", b"acquired") and len(words) == 3:
                self._tokens.append(words[1])
            elif words[0] in (b"turn", b"timeout") and len(words) == 2:
                self._tickets.append(words[1])

    def one(self) -> bytes:
        dice = self._dice
        s = dice.choice([b"", b"", b"s"])
        key = dice.choice(KEYS if dice.random() < 0.95 else BAD_KEYS)
        words = {
            "timeout": self._or([b"0", b"5"], [b"x", b"-1", b"", b"1 1 1"]),
            "lease": self._or([b"", b" 4"], [b" 21", b" 0", b" x", b" 1 1"]),
            "limit": b" " + self._or([b"2"], [b"1", b"3", b"0", b""]) if s else b"",
            "token": dice.choice(self._tokens[-6:]),
            "ticket": dice.choice(self._tickets[-4:]),
        }
        token = words["token"]
        words["token"] = self._or(
            [token], [b"", token[:-1], token.upper(), b"g" * 32, b" " + token]
        )
        frame = self._frame(s, key, words)
        return frame.replace(b"\n", b"\r\n") if dice.random() < 0.03 else frame

    def _or(self, usual: list[bytes], odd: list[bytes]) -> bytes:
        return self._dice.choice(usual if self._dice.random() < 0.95 else odd)

    def _owner(self) -> bytes:
        runs = [b"_\nrun 0 here", b"_\nrun 1 here", b"task\nrun 1", b"task\n_", b"_\nrun"]
        return b"owner\n" + self._dice.choice(runs)

    def ahead(self) -> bytes:
        """Return what may come ahead of other requests: most often who asks."""
        return self._owner() + b"\n" if self._dice.random() < 0.2 else b""

    def _frame(self, s: bytes, key: bytes, words: dict[str, bytes]) -> bytes:
        timeout, lease, limit, token, ticket = words.values()
        fence = int(token, 16) >> 64 if len(token) == 32 and b"g" not in token else 1
        frames = {
            b"%bl\n%b\n%b%b%b" % (s, key, timeout, limit, lease): 6,
            b"%br\n%b\n%b" % (s, key, token): 8,
            b"%bn\n%b\n%b%b" % (s, key, token, lease): 2,
            b"%be\n%b\n%b" % (s, key, (limit + lease).strip()): 3,
            b"%bw\n%b\n%b" % (s, key, timeout): 3,
            self._owner(): 2,
            b"resume\n_\n%b" % ticket: 1,
            b"group\n%b\n%b"
            % (self._or([b"one", b"two"], [b"", b"a b"]), limit.strip() or b"_"): 0.5,
            b"keep\n_\n%b" % self._dice.choice([b"1000 1000", b"0 500"]): 1,
            b"turn\n_\n%b" % self._dice.choice([b"500", b"2000"]): 0.5,
            b"%bpass\n%b\n%b" % (s, key, ticket): 0.5,
            b"%bdetach\n%b\n%b%b" % (s, key, token, lease): 0.3,
            b"%bconfirm\n%b\n%b%b" % (s, key, token, lease): 0.5,
            b"%bevict\n%b\n%d" % (s, key, fence): 0.3,
            b"%bi\n%b\n_" % (s, key): 0.3,
            b"stable-ref\nref\n_": 0.1,
            self._dice.choice([b"ping", b"stats", b"x", b"shards"]) + b"\n_\n_": 0.3,
        }
        return self._dice.choices(list(frames), list(frames.values()))[0] + b"\n"


class Both:
    """A server with sessions, and one of messages, which are told the same."""

    def __init__(self, tables: list[LockTable], clock: Clock, dice: random.Random) -> None:
        self.clock = clock
        self.dice = dice
        self.written = Written()
        kept = tables[0].changes is not None
        options = ServerOptions(host="127.0.0.1", port=0)
        self.server = Server(tables[0], options, self.written if kept else None)
        tables[1].about = tables[0].about
        prepare(self.server)
        self.server.loop = Loop()
        tables[1].about = tables[0].about  # what a server says of itself
        self.messages = Messages(tables[1], clock)
        self.frames = Frames(dice)
        self.transports: dict[int, FullTransport] = {}
        self.replies: Counter[bytes] = Counter()

    def connect(self) -> None:
        transport = connect(self.server, 1 << 30)
        number = transport.session.peer.id
        # The first request of a connection is looked at in another way.
        transport.session.data_received(b"ping\n_\n_\n")
        assert self.messages.connect() == number
        self.messages.receive(number, b"ping\n_\n_\n")
        self.transports[number] = transport

    def step(self) -> None:
        chance = self.dice.random()
        number = self.dice.choice(list(self.transports))
        if chance < 0.08:
            self.clock.now += self.dice.choice([0.01, 0.4, 1, 5])
            if self.dice.random() < 0.5:
                self.server._due()
                self.messages.send(self.messages.table.advance(self.clock.now))
        elif chance < 0.1:
            self.transports[number].session.eof_received()
            self.messages.disconnect(number, clean=True)
        elif self.transports[number].session.peer.waiting is None or chance < 0.3:
            data = self.frames.ahead() + b"".join(
                self.frames.one() for _ in range(self.dice.choice([1, 1, 1, 2, 3]))
            )
            cuts = [self.dice.randrange(len(data)) for _ in range(chance > 0.9)]
            for start, end in pairwise([0, *cuts, len(data)]):
                self.transports[number].session.data_received(data[start:end])
                self.messages.receive(number, data[start:end])

    async def settle(self) -> None:
        """Let sessions go on that were answered, and compare all there is."""
        self.messages.go_on()
        for _ in range(4):
            await asyncio.sleep(0)
        for number, transport in self.transports.items():
            assert transport.written == self.messages.written[number], number
            for line in transport.written.splitlines():
                self.replies[line.split(b" ")[0]] += 1
            self.frames.learn(transport.written)
            transport.written = self.messages.written[number] = b""
        assert self.written.changes == self.messages.changes
        for number, transport in list(self.transports.items()):
            assert transport.closing == (number not in self.messages.peers)
            if transport.closing:
                transport.abort()
                del self.transports[number]
                self.connect()
        peers = [transport.session.peer for transport in self.transports.values()]
        assert everything(self.server.table, peers) == everything(
            self.messages.table, self.messages.peers.values()
        )
