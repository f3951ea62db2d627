"""What each request costs at a key where very much is: as much as where nothing is.

It is counted in lines of the table's code. That says the same on every machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeAlias

import pytest

import dflockd.table
from dflockd.table import Limits, LockTable, Peer, TokenIssuer
from dflockd.table.blocking import DeadlockSearch
from dflockd.table.finding import Search
from dflockd.table.report import Listing
from dflockd.table.table import _HANDLERS
from dflockd.wire import (
    Acquire,
    Barrier,
    DrawAge,
    Enqueue,
    Evict,
    FairGroup,
    Find,
    Granted,
    Hello,
    How,
    Identify,
    Inspect,
    Listen,
    Malformed,
    Next,
    Owner,
    Pass,
    Pause,
    Ping,
    Rate,
    Release,
    Renew,
    Reply,
    Request,
    Reserve,
    Resume,
    Shards,
    Space,
    StableRef,
    Stats,
    TimedOut,
    Unbegun,
    Wait,
)

LOCK = Space.LOCK
MANY = 5_000
STEP, MAX_LISTED = 10, 100
"""A tenth of the table's own, see `small_steps`: far fewer than there are others."""
FEW = 600
"""Lines that a request may take: some dozens of functions."""
MUCH = 300 * STEP
"""Lines for what happens to `STEP` others, of however many: the rest of them have other turns."""
LISTED = 13 * MAX_LISTED
"""Lines for a step of a report, which shows so many at most, and takes them in one piece."""
TO_OTHERS = {
    "release",
    "unbegun",
    "evict",
    "resume",
    "advance",
    "acquire as the newest",
    "more of it",
    "much at once",
    "the end",
    "drain",
}
"""Where much can happen to others."""
KEY = b"k"
ROOM = dflockd.table.__path__[0]


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("slots", "connections", "superseding", "rates"):
        monkeypatch.setattr(f"dflockd.table.{module}.STEP", STEP)
    monkeypatch.setattr("dflockd.table.report.MAX_LISTED", MAX_LISTED)


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
        self.asked: set[type] = set()

    def ask(self, peer: Peer, request: Request) -> Reply | None:
        self.asked.add(type(request))
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

    def __init__(self, many: int = MANY) -> None:
        super().__init__()
        for _ in range(many):
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


class GroupsLeftOut(Crowd):
    """Each has somebody who waits for more slots than it may have beside its holder."""

    limit = 3 * MANY

    def __init__(self) -> None:
        super().__init__()
        for number in range(MANY):
            group = FairGroup(b"%d" % number, 2)
            self.take(self.limit, group=group)
            heavy = group._replace(weight=2)
            request = Acquire(LOCK, KEY, self.limit, 900, None, group=heavy)
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
    """More of them, for the table has them in blocks."""

    rate = Rate(4 * MANY, 900_000)

    def __init__(self) -> None:
        super().__init__()
        for _ in range(self.rate.runs):
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


def lines_of(call: Callable[[], object]) -> int:
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


Question: TypeAlias = tuple[str, Callable[[], object]]


def questions(crowd: Crowd) -> Iterator[Question]:
    """All that can be asked, by somebody who has just come; what sends others away comes last."""
    table, limit, rate = crowd.table, crowd.limit, crowd.rate
    peer, replies = table.connect(), []

    def ask(name: str, request: Request, by: Peer = peer) -> Question:
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
    for request in (Stats(), Inspect(LOCK, KEY), Find(b"x", True, True)):
        yield from looks(crowd, request)
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
    table.greet(blocked[2], Hello(b"there", b"0.1.0"))
    yield ask("ask whose turn it is", Next(), blocked[2])
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
    for token in crowd.tokens[-2:-1]:
        yield ask("unbegun", Unbegun(KEY, token))
    for token in crowd.tokens[-3:-2]:
        yield ask("evict", Evict(LOCK, KEY, int(token[:16], 16)))
    yield ask("pass", Pass(KEY, b"1"))
    yield ask("pause", Pause(KEY, 900_000))
    yield ask("pause anew", Pause(KEY))
    yield ask("try while it is paused", Acquire(LOCK, KEY, limit, 0, None))
    yield ask("resume", Resume(KEY))
    newest = [DrawAge(KEY), DrawAge(KEY)]
    for number, draw in enumerate(newest):
        yield ask("age", draw)
        age = replies[-1].age  # type: ignore[union-attr]
        run = Owner(b"run-%d" % number, 0, age)
        yield ask("acquire as the newest", Acquire(LOCK, KEY, 1, 0, None, owner=run))
    yield ask("acquire as an older one", Acquire(LOCK, KEY, 1, 0, None, owner=Owner(b"x", 0, 1)))
    yield from to_its_end(crowd, "advance", lambda: table.advance(crowd.now))
    crowd.now += 1000
    yield "much at once", lambda: table.advance(crowd.now)
    yield "the end", lambda: table.disconnect(crowd.holder, crowd.now, clean=True)
    yield from to_its_end(crowd, "drain", lambda: table.drain(crowd.now))


def looks(crowd: Crowd, request: Find | Inspect | Stats) -> Iterator[Question]:
    """A report, in the steps in which a server makes it."""
    crowd.asked.add(type(request))
    made: list[Search | Listing] = []

    def begin() -> None:
        report = crowd.table.look(request, crowd.now)
        assert isinstance(report, Search | Listing)
        made.append(report)

    yield "a report", begin
    for _ in range(100):
        yield "a report", lambda: made[0].step(crowd.now)


def to_its_end(crowd: Crowd, name: str, begin: Callable[[], object]) -> Iterator[Question]:
    """Something that may go on in many steps."""
    yield name, begin
    while (due := crowd.table.next_deadline()) is not None and due <= crowd.now:
        yield "more of it", lambda: crowd.table.advance(crowd.now)


CROWDS = (
    *(Holders, HoldersInGroups, GroupsLeftOut, Waiters, Reservations, Groups),
    *(Ages, Runs, RunsToBegin),
)


@pytest.mark.parametrize("crowd", CROWDS)
def test_no_request_goes_through_what_others_have(crowd: type[Crowd]) -> None:
    there = crowd()
    costs = [(lines_of(call), name) for name, call in questions(there)]
    most = {"a report": LISTED, **dict.fromkeys(TO_OTHERS, MUCH)}
    assert [(lines, name) for lines, name in costs if lines > most.get(name, FEW)] == []


def test_no_step_of_the_look_for_deadlocks_goes_through_all_groups() -> None:
    look = DeadlockSearch(Groups().table.each_partition())
    costs, ends = [], []
    while not any(ends):
        costs.append(lines_of(lambda: ends.append(look.step())))
    assert max(costs) < FEW


def test_every_request_is_asked() -> None:
    """But for those that change nothing, whatever they say, and what no message is made of."""
    there = Holders(3)
    for _, call in questions(there):
        call()
    assert there.asked == set(_HANDLERS) - {Malformed}
