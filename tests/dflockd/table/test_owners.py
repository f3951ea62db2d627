"""One run of something that may be sent twice: who asks for a key that the run is at already."""

from __future__ import annotations

import json

import pytest

from dflockd.table import HoldRecord, Limits, LockTable, Peer, ShardTable, TokenIssuer
from dflockd.wire import (
    Acquire,
    Enqueue,
    Enqueued,
    Granted,
    Inspect,
    Moved,
    OwnerConflict,
    Recovering,
    Release,
    Report,
    Request,
    Space,
    Status,
    Wait,
)
from tests.dflockd.table.sharded_support import AWAY, FOR_LONG, hand_over, table_of
from tests.dflockd.table.turns_support import Run, ask, run

LOCK = Space.LOCK
ASK = [Acquire(LOCK, b"k", 1, 9, 30), Enqueue(LOCK, b"k", 1, 30)]
either = pytest.mark.parametrize("request_", ASK, ids=["acquire", "enqueue"])


def granted(table: LockTable, who: Peer | Run, now: float = 0.0) -> bytes:
    reply = ask(table, who, Acquire(LOCK, b"k", 1, 0, 30), now)
    assert isinstance(reply, Granted)
    return reply.token


@pytest.fixture
def table() -> LockTable:
    return LockTable(Limits(), TokenIssuer(b"secret", 0), kept=True)


@either
@pytest.mark.parametrize("attempt", [0, 2])
def test_a_run_that_holds_the_key_is_told_so(
    table: LockTable, request_: Request, attempt: int
) -> None:
    granted(table, run(table, 2))
    again = run(table, attempt)
    assert ask(table, again, request_) == OwnerConflict(b"held", 2)
    assert again.peer.waiting is None
    assert not again.peer.enqueued


def test_a_label_is_no_part_of_who_asks(table: LockTable) -> None:
    holder = run(table, 1, b"here")._replace(label=b"one")
    granted(table, holder)
    report = ask(table, table.connect(), Inspect(LOCK, b"k"))
    assert isinstance(report, Report)
    assert [each["label"] for each in json.loads(report.json)["holders"]] == ["one"]
    other = run(table, 1, b"here")._replace(label=b"two")
    assert ask(table, other, ASK[1]) == OwnerConflict(b"held", 1)


@either
def test_the_same_process_takes_over_what_its_lost_connection_waits_for(
    table: LockTable, request_: Request
) -> None:
    holder = table.connect()
    token = granted(table, holder)
    lost, other = run(table, 1, b"here"), table.connect()
    ask(table, lost, ASK[0])
    ask(table, other, ASK[0], 1.0)
    again = run(table, 1, b"here")
    effects = table.handle(again.peer, again.by(request_), 2.0)
    conflict = (lost.peer.id, OwnerConflict(b"waiting", 1))
    queued = (again.peer.id, Status.QUEUED)
    assert effects == ([conflict] if request_ is ASK[0] else [queued, conflict])
    assert lost.peer.waiting is None
    report = ask(table, other_one := table.connect(), Inspect(LOCK, b"k"), 3.0)
    assert isinstance(report, Report)
    waiters = json.loads(report.json)["waiters"]
    assert [(each["conn_id"], each["waited_s"]) for each in waiters] == [
        (again.peer.id, 3.0),
        (other.id, 2.0),
    ]
    table.handle(holder, Release(LOCK, b"k", token), 4.0)
    assert again.peer.holds
    assert table.disconnect(lost.peer, 5.0, clean=False) == []
    assert table.disconnect(other_one, 5.0, clean=False) == []
    assert again.peer.holds


def test_while_the_server_recovers_that_comes_first(table: LockTable) -> None:
    granted(table, run(table, 1))
    kept = [hold.kept() for hold in table.changes or ()]
    assert (kept[0].owner, kept[0].attempt) == (b"run", 1)
    after = LockTable(Limits(), TokenIssuer(b"secret", 1))
    after.restore(kept, 1.0)
    after.recover(20.0)
    again = run(after, 1)
    assert ask(after, again, ASK[0], 2.0) == Recovering(18_000)
    assert ask(after, again, ASK[0], 20.0) == OwnerConflict(b"held", 1)


def test_a_detached_hold_comes_back_as_nobodys() -> None:
    kept = HoldRecord(LOCK, b"k", 1, 7, 30, 31.0, 0.0, b"", detached=True)
    table = LockTable(Limits(), TokenIssuer(b"secret", 7))
    table.restore([kept], 1.0)
    assert ask(table, run(table, 1), ASK[0], 1.0) is None


def test_it_moves_with_its_shard() -> None:
    old, new = table_of(), table_of(FOR_LONG, 1)
    holder, waiter = run(old, 1), run(old, 3, b"here", name=b"waits")
    granted(old, holder)
    ask(old, waiter, ASK[0])
    effects = hand_over(old, new, 0)
    ((_, moved),) = effects
    assert isinstance(moved, Moved)
    assert ask(new, run(new, 1), ASK[0]) == OwnerConflict(b"held", 1)
    # It waits, though its connection has yet to come.
    assert ask(new, run(new, 3, name=b"waits"), ASK[0]) == OwnerConflict(b"waiting", 3)
    back = run(new, 3, b"here", name=b"waits")
    assert ask(new, back, Acquire(LOCK, b"k", 1, 9, 30, ticket=moved.ticket)) is None
    assert ask(new, run(new, 3, name=b"waits"), ASK[0]) == OwnerConflict(b"waiting", 3)


def test_it_comes_back_with_its_shard_too() -> None:
    there, back = table_of(), table_of(FOR_LONG, 1)
    granted(there, there.connect())
    waiter = run(there, 3, name=b"waits")
    assert ask(there, waiter, ASK[1]) is Status.QUEUED
    hand_over(there, back, 0)
    snapshot = back.freeze(0, 0)
    assert snapshot.waiters[0].owner == b"waits"
    back.drop(0, AWAY)
    there.open(0, 3 << 40)
    there.load(0, snapshot, 1.0)
    assert ask(there, waiter, Wait(LOCK, b"k", 9), 1.0) is None
    assert ask(there, run(there, 3, name=b"waits"), ASK[0], 1.0) == OwnerConflict(b"waiting", 3)


def test_a_moved_key_is_referred_to_its_server_first() -> None:
    table: ShardTable = table_of(FOR_LONG, 0)
    again = run(table, 1)
    assert ask(table, again, Acquire(LOCK, b"1", 1, 0, 30)) == AWAY


def test_people_see_who_it_is(table: LockTable) -> None:
    granted(table, run(table, 1))
    ask(table, run(table, 2), ASK[0])
    report = ask(table, table.connect(), Inspect(LOCK, b"k"))
    assert isinstance(report, Report)
    seen = json.loads(report.json)
    rows = [*seen["holders"], *seen["waiters"]]
    assert [(row["owner"], row["attempt"]) for row in rows] == [("run", 1), ("run", 2)]


@either
def test_who_holds_and_waits_for_as_much_as_it_may_takes_over_nothing(request_: Request) -> None:
    table = LockTable(Limits(max_holds=1), TokenIssuer(b"secret", 0))
    granted(table, table.connect())
    first, again = run(table, 1, b"here"), run(table, 1, b"here")
    assert ask(table, first, ASK[0]) is None
    assert isinstance(ask(table, again, Enqueue(LOCK, b"other", 1, 30)), Enqueued)
    assert ask(table, again, request_, 1.0) is Status.MAX_HOLDS
    assert first.peer.waiting is not None
    assert (again.peer.waiting, len(again.peer.enqueued)) == (None, 1)
