"""The newest wins: who is older is sent away, or told if it holds the lock and listens."""

from __future__ import annotations

import json

import pytest

from dflockd.table import Effect, Limits, LockTable, NewestRecord, Peer, TokenIssuer
from dflockd.table.limits import STEP
from dflockd.table.newest import NewestKeys
from dflockd.wire import (
    Acquire,
    Aged,
    DrawAge,
    Enqueue,
    Granted,
    Hello,
    Inspect,
    Listen,
    Owner,
    Release,
    Report,
    Request,
    Reserve,
    Space,
    Status,
    Superseded,
    TimedOut,
)
from tests.dflockd.table.turns_support import Run

LOCK, SEMAPHORE = Space.LOCK, Space.SEMAPHORE
OVER = Status.LEASE_EXPIRED


@pytest.fixture
def table() -> LockTable:
    return LockTable(Limits(), TokenIssuer(b"secret", 100), kept=True)


_others: list[Effect] = []


def ask(table: LockTable, who: Peer | Run, request: Request, now: float = 0.0) -> object:
    """The reply; what others are told is in `heard`."""
    peer, request = (who.peer, who.by(request)) if isinstance(who, Run) else (who, request)
    effects = table.handle(peer, request, now)
    _others[:] = [effect for effect in effects if effect[0] != peer.id]
    replies = [reply for number, reply in effects if number == peer.id]
    return replies[-1] if replies else None


def heard() -> list[Effect]:
    return list(_others)


def run(table: LockTable, age: int, attempt: int = 0) -> Run:
    """A run of that age, in a process that has other connections."""
    peer = table.connect()
    assert table.greet(peer, Hello(b"here", b"0.1.0"))
    return Run(peer, Owner(b"run-%d" % age, attempt, age), b"task-%d" % age)


def take(table: LockTable, age: int) -> tuple[Peer, bytes]:
    holder = run(table, age)
    reply = ask(table, holder, Acquire(LOCK, b"k", 1, 0, 30))
    assert isinstance(reply, Granted)
    return holder.peer, reply.token


def wait(table: LockTable, age: int, attempt: int = 0) -> Peer:
    waiter = run(table, age, attempt)
    assert ask(table, waiter, Acquire(LOCK, b"k", 1, 60, 30)) is None
    return waiter.peer


def listen(table: LockTable, token: bytes) -> Peer:
    peer = table.connect()
    assert ask(table, peer, Listen(b"k", token)) is None
    return peer


def test_ages_grow_with_the_fences(table: LockTable) -> None:
    peer = table.connect()
    first = ask(table, peer, DrawAge(b"k"))
    granted = ask(table, peer, Acquire(LOCK, b"k", 1, 0, 30))
    second = ask(table, peer, DrawAge(b"other"))
    assert isinstance(granted, Granted)
    assert [first, int(granted.token[:16], 16), second] == [Aged(101), 102, Aged(103)]
    assert len(table) == 1


def test_who_listens_is_told_and_keeps_the_lock_until_it_lets_go(table: LockTable) -> None:
    holder, token = take(table, 1)
    ear = listen(table, token)
    newer = wait(table, 2)
    assert heard() == [(ear.id, Superseded(2, b"task-2"))]
    assert ear.waiting is None
    assert newer.waiting is not None
    assert ask(table, holder, Release(LOCK, b"k", token)) is Status.OK
    [(number, reply)] = heard()
    assert (number, type(reply)) == (newer.id, Granted)


def test_who_listens_too_late_is_told_at_once(table: LockTable) -> None:
    _, token = take(table, 1)
    wait(table, 2)
    assert ask(table, table.connect(), Listen(b"k", token)) == Superseded(2, b"task-2")
    assert table.counts.asked_to_stop == 1


def test_who_is_older_is_sent_away_whatever_the_newest_does(table: LockTable) -> None:
    newer, token = take(table, 5)
    refused = Superseded(5, b"task-5")
    for request in (Acquire(LOCK, b"k", 1, 60, 30), Enqueue(LOCK, b"k", 1, 30)):
        assert ask(table, run(table, 4), request) == refused
    assert heard() == []
    ask(table, newer, Release(LOCK, b"k", token))
    assert ask(table, run(table, 4), Acquire(LOCK, b"k", 1, 60, 30)) == refused
    assert len(table) == 0
    assert table.counts.outdated == 3
    # The newest itself may come again: it was requeued, or its worker was killed.
    take(table, 5)


def test_an_age_that_was_not_given_out_is_the_oldest(table: LockTable) -> None:
    """It is another server's, or nobody's: it keeps nobody from the lock, now or later."""
    stranger, token = take(table, 1 << 63)
    listener = table.connect()
    assert ask(table, listener, Listen(b"k", token)) is None
    drawn = ask(table, stranger, DrawAge(b"k"))
    assert isinstance(drawn, Aged)
    wait(table, drawn.age)
    assert heard() == [(listener.id, Superseded(drawn.age, b"task-%d" % drawn.age))]
    # Also one that waits, and one that comes again.
    asks_again = run(table, (1 << 64) - 1)
    reply = ask(table, asks_again, Acquire(LOCK, b"k", 1, 60, 30))
    assert reply == Superseded(drawn.age, b"task-%d" % drawn.age)
    assert table._partition.newest[b"k"].age == drawn.age
    last = ask(table, stranger, DrawAge(b"k"))
    assert isinstance(last, Aged)
    assert drawn.age < last.age < drawn.age + 10


def test_of_several_holders_none_is_the_newest(table: LockTable) -> None:
    take(table, 1)
    waiter = wait(table, 2)
    newer = run(table, 3)
    for request in (Acquire(LOCK, b"k", 2, 0, 30), Enqueue(LOCK, b"k", 3, 30)):
        assert ask(table, newer, request) is Status.ERROR
    # It changes nothing, not even the limit.
    assert heard() == []
    assert waiter.waiting is not None
    assert table._partition.newest[b"k"].age == 2
    assert not newer.peer.enqueued


def test_all_that_are_older_are_sent_away_however_many(table: LockTable) -> None:
    take(table, 1)
    older = [wait(table, 1, attempt) for attempt in range(1, 2 * STEP + 2)]
    wait(table, 2)
    sent = heard()
    while table.backlog:
        sent += table.advance(0.0)
    answer = Superseded(2, b"task-2")
    assert sent == [(peer.id, answer) for peer in older]


def test_a_number_of_keys_is_remembered(table: LockTable) -> None:
    table.newest = table.slots.newest = NewestKeys(3)
    for key, age in ((b"a", 7), (b"b", 7), (b"c", 7), (b"a", 6), (b"d", 7)):
        ask(table, run(table, age), Acquire(LOCK, key, 1, 0, 30))
    assert set(table._partition.newest) == {b"a", b"c", b"d"}
    assert len(table.newest) == 3
    # Who is there is known without that.
    reply = ask(table, run(table, 6), Acquire(LOCK, b"b", 1, 60, 30))
    assert reply == Superseded(7, b"task-7")


def test_who_is_away_is_known_when_the_newest_is_forgotten(table: LockTable) -> None:
    take(table, 1)
    newest = run(table, 3)
    asked = Acquire(LOCK, b"k", 1, 0, 30, reserve=Reserve(5000, 5000))
    assert isinstance(ask(table, newest, asked), TimedOut)
    table.newest.drop(table._partition.newest)
    reply = ask(table, run(table, 2), Acquire(LOCK, b"k", 1, 60, 30))
    assert reply == Superseded(3, b"task-3")


def test_a_journal_hears_of_who_comes_and_of_who_goes_by_that(table: LockTable) -> None:
    keys, group = NewestKeys(2), table._partition
    [first] = keys.note(group.newest, NewestRecord(b"a", 1, b""))
    second, former = keys.note(group.newest, NewestRecord(b"a", 2, b""))
    assert former is first
    assert (first.ended, second.ended) == (True, False)
    keys.note(group.newest, NewestRecord(b"b", 3, b""))
    third, oldest = keys.note(group.newest, NewestRecord(b"c", 4, b""))
    assert oldest is second
    assert (second.ended, third.ended) == (True, False)


def test_another_table_goes_on_with_what_was_kept(table: LockTable) -> None:
    holder, token = take(table, 5)
    wait(table, 6)
    assert table.changes is not None
    kept = [hold.kept() for hold in holder.holds]
    assert kept[0].age == 5
    assert table._partition.newest[b"k"].kept() == NewestRecord(b"k", 6, b"task-6")
    after = LockTable(Limits(), TokenIssuer(b"secret", 1), kept=True)
    after.restore(kept, 0.0)
    after.remember([NewestRecord(b"k", 6, b"task-6")])
    assert ask(after, after.connect(), Listen(b"k", token)) == Superseded(6, b"task-6")
    # Also without that: who holds the lock knows its age.
    after = LockTable(Limits(), TokenIssuer(b"secret", 1), kept=True)
    after.restore(kept, 0.0)
    assert ask(after, run(after, 4), Acquire(LOCK, b"k", 1, 60, 30)) == Superseded(5, b"task-5")


def test_people_see_who_was_superseded(table: LockTable) -> None:
    take(table, 1)
    peer = table.connect()

    def holder() -> dict[str, object]:
        report = ask(table, peer, Inspect(LOCK, b"k"))
        assert isinstance(report, Report)
        [shown] = json.loads(report.json)["holders"]
        return dict(shown)

    assert (holder()["age"], holder()["superseded_by"]) == (1, "")
    wait(table, 2)
    assert holder()["superseded_by"] == "task-2"
