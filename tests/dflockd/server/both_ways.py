"""A server that is given bytes, beside a table that is given the messages in them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from dflockd import __version__
from dflockd.server import Server, ServerOptions
from dflockd.table import Change, Counts, Effect, Histogram, LockTable, Peer
from dflockd.wire import (
    FEATURES,
    FrameTooLongError,
    Hello,
    Reply,
    RequestReader,
    Status,
    Unwelcome,
    Welcome,
    encode_reply,
)
from tests.dflockd.server.session_support import FullTransport, connect, prepare
from tests.dflockd.table.sharded_support import Shards

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


def three_shards() -> Shards:
    """By key. The last is always elsewhere."""
    return Shards(lambda key: {b"a": 0, b"b": 1}.get(key[:1], 2))


class Written:
    """A journal that only notes what it is told."""

    def __init__(self) -> None:
        self.changes: list[Any] = []

    def record(self, changes: Iterable[Change], fence: int) -> None:
        self.changes += [noted(change) for change in changes]


def noted(change: Change) -> object:
    return change.ended, change.kept()


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

    def advance(self) -> None:
        """Let all that is due take effect."""
        due: float | None = self.clock.now
        while due is not None and due <= self.clock.now:
            self.send(self.table.advance(self.clock.now))
            due = self.table.next_deadline()

    def send(self, effects: list[Effect]) -> None:
        if self.table.changes:
            self.changes += [noted(change) for change in self.table.changes]
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
                if isinstance(request, Hello):
                    self.send([(number, self._greet(peer, request))])
                else:
                    self.send(self.table.handle(peer, request, self.clock.now))
        except FrameTooLongError:
            self.written[number] += b"error\n"
            self.disconnect(number, clean=False)

    def _greet(self, peer: Peer, request: Hello) -> Reply:
        """Nobody is asked for a secret here, so nobody may show one."""
        if request.secret is not None or not self.table.greet(peer, request):
            return Unwelcome(Status.ERROR)
        return Welcome(__version__.encode(), FEATURES)


def everything(table: LockTable, peers: Iterable[Peer]) -> object:
    """All that a table holds, with the order of it."""
    groups = list(table.each_partition())
    entries = [entry for group in groups for space in group.spaces for entry in space.values()]
    return {
        "entries": [
            (
                *(entry.space, entry.key, entry.limit),
                [(hold.kept(), hold.token, hold.told, hold.lease) for hold in entry.holds.values()],
                [
                    (
                        *(each.peer.id, each.state, each.lease, each.ticket, each.turn),
                        *(each.reservation, each.group, each.owner, each.label, each.is_rated),
                        *(each.reserve, each.away_age),
                    )
                    for each in entry.waiters or ()
                ],
                sorted(entry.owners or {}),
            )
            for entry in entries
        ],
        "peers": [
            (
                *(peer.id, peer.instance, peer.detaches, peer.waiting is not None),
                peer.told is not None and peer.told.ticket,
                [hold.fence for hold in peer.holds],
                *(sorted(peer.enqueued), sorted(peer.left)),
            )
            for peer in peers
        ],
        "processes": {
            instance: (
                *(each.connections, each.asking is not None and each.asking.id),
                [entry.key for entry in each.starved],
                [entry.key for entry in each.behind.values()],
            )
            for instance, each in table.connections.processes.items()
        },
        "counts": {name: counted(getattr(table.counts, name)) for name in COUNTS},
        "deadlines": (len(table.deadlines), table.next_deadline()),
        "size": len(table),
        "reserved": [sorted(group.reserved) for group in groups],
        "rates": [
            [
                (name, rate.runs, rate.window, rate.begun, sorted(rate.pending))
                for name, rate in group.rates.open.items()
            ]
            for group in groups
        ],
        "newest": [{key: each.kept() for key, each in group.newest.items()} for group in groups],
    }


COUNTS = [name for name in vars(Counts) if not name.startswith("_")]


def counted(value: object) -> object:
    return (value.counts, value.sum) if isinstance(value, Histogram) else value


class Frames:
    """Requests by chance: good ones, bad ones, and those with what was replied."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._tokens = [b"0" * 32]
        self._tickets = [b"0"]
        self._ages = [b"1"]

    def learn(self, replies: bytes) -> None:
        for line in replies.splitlines():
            words = line.split(b" ")
            if words[0] in (b"ok", b"acquired") and len(words) == 3:
                self._tokens.append(words[1])
            elif words[0] in (b"turn", b"timeout", b"queued") and len(words) == 2:
                self._tickets.append(words[1])
            elif words[0] == b"ok" and len(words) == 2 and len(words[1]) > 3 and words[1].isdigit():
                self._ages.append(words[1])

    def one(self) -> bytes:
        dice = self._dice
        key = dice.choice(KEYS if dice.random() < 0.95 else BAD_KEYS)
        frame = self._published(key) if dice.random() < 0.5 else self._ours(key)
        return frame.replace(b"\n", b"\r\n") if dice.random() < 0.03 else frame

    def _or(self, usual: list[bytes], odd: list[bytes]) -> bytes:
        return self._dice.choice(usual if self._dice.random() < 0.97 else odd)

    def _token(self) -> bytes:
        token = self._dice.choice(self._tokens[-6:])
        return self._or([token], [b"", token[:-1], token.upper(), b"g" * 32, b" " + token])

    def _ticket(self) -> bytes:
        return self._dice.choice(self._tickets[-4:])

    def _one_of(self, frames: dict[bytes, float]) -> bytes:
        return self._dice.choices(list(frames), list(frames.values()))[0] + b"\n"

    def _published(self, key: bytes) -> bytes:
        s = self._dice.choice([b"", b"", b"s"])
        timeout = self._or([b"0", b"5"], [b"x", b"-1", b"", b"1 1 1"])
        lease = self._or([b"", b" 4"], [b" 21", b" 0", b" x", b" 1 1", b" 1/1"])
        limit = b" " + self._or([b"2", b"2", b"2", b"3"], [b"1", b"0", b""]) if s else b""
        token = self._token()
        fence = int(token, 16) >> 64 if len(token) == 32 and b"g" not in token else 1
        return self._one_of(
            {
                b"%bl\n%b\n%b%b%b" % (s, key, timeout, limit, lease): 6,
                b"%br\n%b\n%b" % (s, key, token): 8,
                b"%bn\n%b\n%b%b" % (s, key, token, lease): 2,
                b"%be\n%b\n%b" % (s, key, (limit + lease).strip()): 3,
                b"%bw\n%b\n%b" % (s, key, timeout): 3,
                b"%bevict\n%b\n%d" % (s, key, fence): 0.3,
                b"%bi\n%b\n_" % (s, key): 0.3,
                b"stable-ref\nref\n_": 0.1,
                self._dice.choice([b"ping", b"stats", b"x", b"shards"]) + b"\n_\n_": 0.3,
            }
        )

    def _ours(self, key: bytes) -> bytes:
        token, ticket = self._token(), self._ticket()
        how = self._or([b"begun", b"confirm", b"detach"], [b"so"])
        return self._one_of(
            {
                b"acquire\n%b\n%b" % (key, self._fields({**self._slot(), **self._wait()})): 6,
                b"enqueue\n%b\n%b"
                % (key, self._fields({**self._slot(), b"turn": (b"500", 0.3)})): 4,
                b"wait\n%b\n%b"
                % (key, self._fields({**self._wait(), b"age": (self._age(), 0.2)})): 4,
                b"renew\n%b\n%b"
                % (
                    key,
                    self._fields({**self._who(), b"token": (token, 0.97), b"how": (how, 0.7)}),
                ): 2,
                b"unbegun\n%b\n%b" % (key, token): 1,
                b"pass\n%b\n%b" % (key, ticket): 1,
                b"next\n%b\n_" % key: 1,
                b"age\n%b\n_" % key: 2,
                b"listen\n%b\n%b" % (key, token): 0.5,
                b"hello\nhere\nversion=1": 0.2,
                b"hello\nthere\nversion=1 secret=s": 0.1,
            }
        )

    def _age(self) -> bytes:
        return self._or(self._ages[-3:], [b"1", b"2000", b"0"])

    def _who(self) -> dict[bytes, tuple[bytes, float]]:
        """Fields with how likely they are."""
        has_owner = self._dice.random() < 0.4
        said = {
            b"lease": (self._or([b"4"], [b"21", b"0", b"x"]), 0.4),
            b"label": (self._or([b"task", b"a label=b"], [b"\xff", b"l" * 257]), 0.3),
            b"group": (self._or([b"one", b"two"], [b"a\0b"]), 0.15),
        }
        if has_owner:
            owner = self._or([b"run", b"run", b"other"], [b"\xff", b"o" * 65])
            said |= {
                b"owner": (owner, 0.98),
                b"attempt": (self._or([b"0", b"1"], [b"x"]), 0.5),
                b"age": (self._age(), 0.4),
            }
        return said

    def _slot(self) -> dict[bytes, tuple[bytes, float]]:
        return {
            **self._who(),
            b"limit": (self._or([b"1", b"2", b"3"], [b"0", b"1048577"]), 0.25),
            b"rate": (self._or([b"2/1000", b"1/400"], [b"1/0", b"9999/9999999999"]), 0.1),
            b"group-limit": (b"1", 0.03),
            b"ticket": (self._or([self._ticket()], [b"-"]), 0.3),
        }

    def _wait(self) -> dict[bytes, tuple[bytes, float]]:
        said = {b"timeout": (self._or([b"0", b"5"], [b"x"]), 0.98)}
        if self._dice.random() < 0.3:
            hold = self._dice.choice([b"500", b"1000"])
            said |= {b"away": (b"1000", 0.98), b"hold": (self._or([hold], [b"99999"]), 0.98)}
        return said

    def _fields(self, likely: dict[bytes, tuple[bytes, float]]) -> bytes:
        """Write fields in any order, now and then with something wrong about them."""
        dice = self._dice
        said = [
            b"%b=%b" % (name, value)
            for name, (value, chance) in likely.items()
            if name != b"label" and dice.random() < chance
        ]
        dice.shuffle(said)
        if dice.random() < 0.03:
            said.insert(dice.randrange(len(said) + 1), dice.choice([b"", b"colour=red", *said]))
        value, chance = likely.get(b"label", (b"", 0.0))
        return b" ".join(said + ([b"label=" + value] if dice.random() < chance else []))


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
        self.settled = 0

    def connect(self) -> None:
        transport = connect(self.server, 1 << 30)
        number = transport.session.peer.id
        # The first request of a connection is looked at in another way.
        first = self.dice.choice([b"ping\n_\n_\n", b"hello\nhere\nversion=1\n"])
        transport.session.data_received(first)
        assert self.messages.connect() == number
        self.messages.receive(number, first)
        self.transports[number] = transport

    def step(self) -> None:
        chance = self.dice.random()
        number = self.dice.choice(list(self.transports))
        if chance < 0.08:
            self.clock.now += self.dice.choice([0.01, 0.4, 1, 5])
            if self.dice.random() < 0.5:
                self.server._due()
                self.messages.advance()
        elif chance < 0.1:
            self.transports[number].session.eof_received()
            self.messages.disconnect(number, clean=True)
        elif self.transports[number].session.peer.waiting is None or chance < 0.3:
            data = b"".join(self.frames.one() for _ in range(self.dice.choice([1, 1, 1, 2, 3])))
            cuts = [self.dice.randrange(len(data)) for _ in range(chance > 0.9)]
            for start, end in pairwise([0, *cuts, len(data)]):
                self.transports[number].session.data_received(data[start:end])
                self.messages.receive(number, data[start:end])

    async def settle(self) -> None:
        """Let sessions go on that were answered; compare what is said, and often all there is."""
        self.messages.go_on()
        # One report is made at once, and others after a rest; then what is behind them goes on.
        quiet = 0
        while quiet < 4:
            await asyncio.sleep(0)
            waits = any(each.session._looks_on for each in self.transports.values())
            quiet = 0 if waits else quiet + 1
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
        await asyncio.sleep(0)  # a new turn, with all of its time
        self.settled += 1
        if self.settled % 3:
            return
        peers = [transport.session.peer for transport in self.transports.values()]
        assert everything(self.server.table, peers) == everything(
            self.messages.table, self.messages.peers.values()
        )
