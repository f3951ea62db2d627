"""What each request costs at a key where very much is: fewer steps than there are of that.

A step is a line of the table's code. To count them says the same on every machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

import dflockd.table
from dflockd.table import Limits, LockTable, Peer, TokenIssuer
from dflockd.wire import (
    Acquire,
    Barrier,
    DrawAge,
    Enqueue,
    Evict,
    FairGroup,
    Granted,
    Hello,
    How,
    Identify,
    Inspect,
    Listen,
    Owner,
    Pass,
    Ping,
    Rate,
    Release,
    Renew,
    Reply,
    Request,
    Reserve,
    Shards,
    Space,
    StableRef,
    Stats,
    TimedOut,
    Unbegun,
    Wait,
)

LOCK = Space.LOCK
MANY = 100_000
KEY = b"k"
ROOM = dflockd.table.__path__[0]


class Crowd:
    """A key where `MANY` of something are."""

    limit = 1
    """As those who come later ask for it; with it they find no slot that is free."""
    rate: Rate | None = None

    def __init__(self) -> None:
        limits = Limits(max_holds=0, max_rate_runs=10 * MANY, default_lease=1000)
        self.table = LockTable(limits, TokenIssuer(b"secret", 0))
        self.now = 0.0
        self.holder = self.table.connect()
        self.tokens: list[bytes] = []

    def ask(self, peer: Peer, request: Request) -> Reply | None:
        effects = self.table.handle(peer, request, self.now)
        return next((reply for number, reply in effects if number == peer.id), None)

    def take(self, limit: int = 1, **more: Any) -> None:
        reply = self.ask(self.holder, Acquire(LOCK, KEY, limit, 0, None, **more))
        assert isinstance(reply, Granted)
        self.tokens.append(reply.token)

    def reserve(self, **more: Any) -> None:
        request = Acquire(LOCK, KEY, 1, 0, None, reserve=Reserve(900_000, 0), **more)
        assert isinstance(self.ask(self.holder, request), TimedOut)


class Holders(Crowd):
    limit = MANY

    def __init__(self) -> None:
        super().__init__()
        for _ in range(MANY):
            self.take(self.limit)


class HoldersInGroups(Crowd):
    limit = MANY

    def __init__(self) -> None:
        super().__init__()
        for number in range(MANY):
            self.take(self.limit, group=FairGroup(b"%d" % number, 1))
        for number in range(MANY):
            request = Acquire(LOCK, KEY, self.limit, 900, None, group=FairGroup(b"%d" % number, 1))
            assert self.ask(self.table.connect(), request) is None


class Waiters(Crowd):
    def __init__(self) -> None:
        super().__init__()
        self.take()
        for _ in range(MANY):
            assert self.ask(self.table.connect(), Acquire(LOCK, KEY, 1, 900, None)) is None


class Reservations(Crowd):
    def __init__(self) -> None:
        super().__init__()
        self.take()
        for _ in range(MANY):
            self.reserve()


class Groups(Crowd):
    def __init__(self) -> None:
        super().__init__()
        self.take()
        for number in range(MANY):
            self.reserve(group=FairGroup(b"%d" % number))


class Ages(Crowd):
    """All are as old: a newer one sends away whoever is older."""

    def __init__(self) -> None:
        super().__init__()
        self.take()
        for number in range(MANY):
            self.reserve(owner=Owner(b"%d" % number, 0, 1))


class Runs(Crowd):
    rate = Rate(MANY, 900_000)

    def __init__(self) -> None:
        super().__init__()
        for _ in range(MANY):
            self.now += 0.001
            self.take(rate=self.rate)
            token = self.tokens.pop()
            self.ask(self.holder, Renew(LOCK, KEY, token, None, How.BEGUN))
            self.ask(self.holder, Release(LOCK, KEY, token))


class RunsToBegin(Crowd):
    rate = Rate(MANY, 900_000)
    limit = MANY

    def __init__(self) -> None:
        super().__init__()
        for _ in range(MANY):
            self.take(self.limit, rate=self.rate)


def steps_of(call: Callable[[], object]) -> int:
    """Count the lines of the table's code that a call goes through."""
    count = 0

    def lines(_frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return lines

    def calls(frame: FrameType, _event: str, _arg: object) -> Any:
        return lines if frame.f_code.co_filename.startswith(ROOM) else None

    before = sys.gettrace()
    sys.settrace(calls)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def questions(crowd: Crowd) -> Iterator[tuple[str, Callable[[], object]]]:
    """All that can be asked, by somebody who has just come; what sends others away comes last."""
    table, limit, rate = crowd.table, crowd.limit, crowd.rate
    peer, replies = table.connect(), []

    def ask(name: str, request: Request, by: Peer = peer) -> tuple[str, Callable[[], object]]:
        def call() -> None:
            replies.append(crowd.ask(by, request))

        return name, call

    table.greet(peer, Hello(b"here", b"0.1.0"))
    who: dict[str, Any] = {"owner": Owner(b"who", 0), "label": b"who"}
    group = FairGroup(b"1", 2)
    blocked = [table.connect() for _ in range(4)]
    yield ask("ping", Ping())
    yield ask("barrier", Barrier())
    yield ask("identify", Identify(b"1"))
    yield ask("shards", Shards())
    yield ask("stable-ref", StableRef(b"ref"), table.connect())
    yield ask("age", DrawAge(KEY))
    yield ask("stats", Stats())
    yield ask("inspect", Inspect(LOCK, KEY))
    yield ask("try", Acquire(LOCK, KEY, limit, 0, None, rate=rate))
    yield ask("try as a run", Acquire(LOCK, KEY, limit, 0, None, rate=rate, **who))
    yield ask("try in a group", Acquire(LOCK, KEY, limit, 0, None, group=group))
    yield ask("acquire", Acquire(LOCK, KEY, limit, 900, None, **who), blocked[0])
    yield ask("acquire in a group", Acquire(LOCK, KEY, limit, 900, None, group=group), blocked[1])
    yield "disconnect a waiter", lambda: table.disconnect(blocked[1], crowd.now, clean=True)
    with_reserve = Acquire(LOCK, KEY, limit, 0, None, reserve=Reserve(1000, 0))
    yield ask("reserve", with_reserve)
    back = replies[-1]
    if isinstance(back, TimedOut):
        yield ask("come back", Acquire(LOCK, KEY, limit, 9, None, ticket=back.ticket), blocked[2])
    yield ask("enqueue", Enqueue(LOCK, KEY, limit, None))
    yield ask("wait", Wait(LOCK, KEY, 0))
    yield ask("enqueue for a turn", Enqueue(LOCK, KEY, limit, None, turn=10), blocked[3])
    yield "disconnect", lambda: table.disconnect(blocked[3], crowd.now, clean=True)
    yield ask("name a rate", Acquire(LOCK, KEY, limit, 0, None, rate=Rate(MANY, 800_000)))
    yield ask("a lower limit", Acquire(LOCK, KEY, 1, 0, None))
    yield ask("the limit", Acquire(LOCK, KEY, limit, 0, None))
    for token in crowd.tokens[-1:]:
        yield ask("renew", Renew(LOCK, KEY, token, None))
        yield ask("begun", Renew(LOCK, KEY, token, None, How.BEGUN))
        yield ask("confirm", Renew(LOCK, KEY, token, None, How.CONFIRM))
        yield ask("listen", Listen(KEY, token), table.connect())
        yield ask("detach", Renew(LOCK, KEY, token, None, How.DETACH))
        yield ask("release", Release(LOCK, KEY, token))
    for name in ("unbegun", "evict"):
        yield ask("take for " + name, Acquire(LOCK, KEY, limit, 0, None, rate=rate, **who))
        last = replies[-1]
        if isinstance(last, Granted):
            fence = int(last.token[:16], 16)
            way = Unbegun(KEY, last.token) if name == "unbegun" else Evict(LOCK, KEY, fence)
            yield ask(name, way)
    yield ask("pass", Pass(KEY, b"1"))
    newest = [DrawAge(KEY), DrawAge(KEY)]
    for number, draw in enumerate(newest):
        yield ask("age", draw)
        age = replies[-1].age  # type: ignore[union-attr]
        run = Owner(b"run-%d" % number, 0, age)
        yield ask("acquire as the newest", Acquire(LOCK, KEY, 1, 0, None, owner=run))
    yield ask("acquire as an older one", Acquire(LOCK, KEY, 1, 0, None, owner=Owner(b"x", 0, 1)))
    yield "advance", lambda: table.advance(crowd.now)
    yield "much at once", lambda: table.advance(crowd.now + 1000)
    yield "the end of all", lambda: table.disconnect(crowd.holder, crowd.now + 1000, clean=True)
    yield "drain", lambda: table.drain(crowd.now + 1000)


CROWDS = (
    *(Holders, HoldersInGroups, Waiters, Reservations, Groups),
    *(Ages, Runs, RunsToBegin),
)


@pytest.mark.parametrize("crowd", CROWDS)
def test_no_request_goes_through_what_others_have(crowd: type[Crowd]) -> None:
    there = crowd()
    costs = [(steps_of(call), name) for name, call in questions(there)]
    assert [(steps, name) for steps, name in costs if steps >= MANY] == []
