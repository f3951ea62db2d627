"""How many may hold a lock: what the latest request says, up and down, and after a loss."""

from __future__ import annotations

import json

import pytest

from dflockd.table import HoldRecord, LockTable
from dflockd.table.state import Entry
from dflockd.wire import (
    Acquire,
    FairGroup,
    Granted,
    Hello,
    How,
    Listen,
    Owner,
    OwnerConflict,
    Release,
    Renew,
    Renewed,
    Report,
    Space,
    Stats,
    Status,
)
from tests.dflockd.table import sharded_support
from tests.dflockd.table.rules_support import LOCK, SEMAPHORE, inspected, recovering, reply_to
from tests.dflockd.table.test_groups import Stage
from tests.dflockd.table.turns_support import ask


def test_a_rollout_changes_it_up_and_down_with_waiters() -> None:
    stage = Stage()
    for number, limit in enumerate((1, 1, 1, 3, 3, 3, 2, 2)):
        stage.limit = limit
        stage.come(f"-{number}")
    assert stage.order == ["-0", "-1", "-2"]
    stage.end("-0")
    assert stage.order[3:] == []  # two at once, first come, first served
    for number in range(1, 5):
        stage.end(f"-{number}")
        assert stage.order[3:] == [f"-{each}" for each in range(3, number + 3)]


# After a loss: fences 1, 2, ... in their order; a grant to one alone says that all before had ended.


def granted_at(*limits: int, space: Space = LOCK) -> tuple[list[HoldRecord], list[bytes]]:
    """Return the records and the tokens of holds, each granted at that limit; none has an end."""
    before = recovering(-1.0)[0]
    before.changes = []
    records, tokens = [], []
    for limit in limits:
        peer = before.connect()
        if limit == 1 and tokens:  # all before have ended, and nobody has written that
            for hold in list(before.find(space, b"k").holds.values()):  # type: ignore[union-attr]
                reply_to(before, peer, Release(space, b"k", hold.token), 0.0)
        reply = reply_to(before, peer, Acquire(space, b"k", limit, 0, 30), 0.0)
        assert isinstance(reply, Granted)
        tokens.append(reply.token)
        records.append(next(iter(peer.holds)).kept())
    return records, tokens


def fences(table: LockTable) -> list[int]:
    shown = inspected(table, table.connect(), b"k", 1.0)["holders"]
    return [holder["fence"] - 1000 for holder in shown]


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ((1, 1, 1), [3]),
        ((3, 3, 3), [1, 2, 3]),
        ((3, 3, 1), [3]),
        ((1, 3, 3), [1, 2, 3]),
        ((2, 1, 3, 3), [2, 3, 4]),
    ],
)
@pytest.mark.parametrize("is_reverse", [False, True])
@pytest.mark.parametrize("ways", ["records", "tokens", "both"])
def test_what_comes_back_is_what_had_not_ended(
    limits: tuple[int, ...], left: list[int], is_reverse: bool, ways: str
) -> None:
    records, tokens = granted_at(*limits)
    if is_reverse:
        records.reverse()
        tokens.reverse()
    table, peer, _ = recovering(10.0, tuple(records) if ways != "tokens" else ())
    for token in tokens if ways != "records" else ():
        reply = reply_to(table, peer, Renew(LOCK, b"k", token, 30))
        assert reply is Status.ERROR or reply == Renewed(30)
    assert sorted(fences(table)) == left
    # Nobody new gets in before there is room.
    newcomer = table.connect()
    request = Acquire(LOCK, b"k", len(left), 0, 30)
    assert reply_to(table, newcomer, request, 11.0 if ways == "tokens" else 9.0) is not None
    if ways != "records":
        assert reply_to(table, newcomer, request, 11.0) is Status.TIMEOUT
        assert isinstance(
            reply_to(table, newcomer, request._replace(limit=len(left) + 1), 11.0), Granted
        )


@pytest.mark.parametrize("is_restored", [False, True])
def test_a_release_keeps_only_those_from_coming_back_that_had_ended(is_restored: bool) -> None:
    records, (first, alone, second, third) = granted_at(1, 1, 3, 3)
    table, peer, _ = recovering(10.0, tuple(records) if is_restored else ())
    assert reply_to(table, peer, Release(LOCK, b"k", third)) is Status.OK
    for token, reply in ((third, Status.ERROR), (second, Renewed(30)), (alone, Renewed(30))):
        assert reply_to(table, peer, Renew(LOCK, b"k", token, 30)) == reply
    assert sorted(fences(table)) == [2, 3]
    assert reply_to(table, peer, Release(LOCK, b"k", alone)) is Status.OK
    for token, reply in ((first, Status.ERROR), (alone, Status.ERROR), (second, Renewed(30))):
        assert reply_to(table, peer, Renew(LOCK, b"k", token, 30)) == reply


def test_a_hold_among_several_that_had_ended_before_one_alone_does_not_come_back() -> None:
    _, (first, alone) = granted_at(3, 1)
    table, peer, _ = recovering()
    assert reply_to(table, peer, Release(LOCK, b"k", alone)) is Status.OK
    assert reply_to(table, peer, Renew(LOCK, b"k", first, 30)) is Status.ERROR
    assert reply_to(table, peer, Release(LOCK, b"k", first)) is Status.ERROR


def test_a_lock_and_a_semaphore_of_one_key_end_nothing_of_each_other() -> None:
    _, (*_, lock) = granted_at(1, 1, 1)
    _, (_, semaphore) = granted_at(2, 2, space=SEMAPHORE)
    for first, second in ((LOCK, SEMAPHORE), (SEMAPHORE, LOCK)):
        tokens = {LOCK: lock, SEMAPHORE: semaphore}
        table, peer, _ = recovering()
        assert reply_to(table, peer, Release(first, b"k", tokens[first])) is Status.OK
        assert reply_to(table, peer, Renew(second, b"k", tokens[second], 30)) == Renewed(30)
        assert reply_to(table, peer, Renew(second, b"k", tokens[first], 30)) is Status.ERROR


def test_who_listens_hears_that_its_hold_had_ended_before_another() -> None:
    (record, _), (token, alone) = granted_at(1, 1)
    table, holder, other = recovering(10.0, (record._replace(owner=b"run", age=1),))
    assert reply_to(table, holder, Renew(LOCK, b"k", token, 30)) == Renewed(30)
    ear = table.connect()
    assert table.handle(ear, Listen(b"k", token), 1.0) == []
    effects = table.handle(other, Renew(LOCK, b"k", alone, 30), 2.0)
    assert effects == [(other.id, Renewed(30)), (ear.id, Status.LEASE_EXPIRED)]
    assert ear.waiting is None


@pytest.mark.parametrize("how", [How.PLAIN, How.BEGUN])
def test_a_whole_renewal_brings_back_whose_hold_it_is(how: How) -> None:
    _, (token,) = granted_at(3)
    table, peer, other = recovering()
    owner, group = Owner(b"run", 2), FairGroup(b"tenant", 1)
    renew = Renew(LOCK, b"k", token, 30, how, owner, b"the task", group)
    assert reply_to(table, peer, renew) == Renewed(30)
    [shown] = inspected(table, other, b"k", 1.0)["holders"]
    found = (shown["owner"], shown["attempt"], shown["label"], shown["group"])
    assert found == ("run", 2, "the task", "tenant")
    asks = Acquire(LOCK, b"k", 3, 0, 30, owner=owner)
    assert reply_to(table, other, asks, 11.0) == OwnerConflict(b"held", 2)
    of_group = asks._replace(owner=None, group=group)
    assert reply_to(table, other, of_group, 11.0) is Status.TIMEOUT
    assert isinstance(reply_to(table, other, of_group._replace(group=None), 11.0), Granted)


def test_a_plain_renewal_brings_back_nobody_in_particular() -> None:
    _, (token,) = granted_at(1)
    table, peer, other = recovering()
    assert table.greet(peer, Hello(b"here", b"0.1.0"))
    assert reply_to(table, peer, Renew(LOCK, b"k", token, 30)) == Renewed(30)
    [shown] = inspected(table, other, b"k", 1.0)["holders"]
    assert (shown["owner"], shown["attempt"], shown["label"], shown["group"]) == ("", 0, "", "")


# Positions.


def test_a_shard_that_moves_gives_nobody_what_a_smaller_limit_has_taken() -> None:
    old, new = sharded_support.table_of(), sharded_support.table_of(sharded_support.FOR_LONG, 1)
    reply = ask(old, old.connect(), Acquire(LOCK, b"a", 2, 0, 60))
    assert isinstance(reply, Granted)
    sharded_support.wait_for(old, b"a")
    sharded_support.hand_over(old, new, 0)
    entry = new.find(LOCK, b"a")
    assert isinstance(entry, Entry)
    assert (entry.limit, len(entry.holds), len(entry.queue().expected)) == (1, 1, 0)


def test_people_see_how_many_may_hold_a_lock_and_the_semaphores_of_published_clients(
    table: LockTable,
) -> None:
    peer = table.connect()
    for space, key, limit in ((LOCK, b"one", 1), (LOCK, b"k", 3), (SEMAPHORE, b"k", 2)):
        assert isinstance(ask(table, peer, Acquire(space, key, limit, 0, 60)), Granted)
    report = ask(table, peer, Stats())
    assert isinstance(report, Report)
    stats = json.loads(report.json)
    shown = {row["key"]: (row.get("limit"), row.get("holders")) for row in stats["locks"]}
    assert shown == {"one": (None, None), "k": (3, 1)}
    assert stats["semaphores"] == [{"key": "k", "limit": 2, "holders": 1, "waiters": 0}]


def test_people_see_that_it_has_changed_while_an_older_holder_is_there(table: LockTable) -> None:
    peers = [table.connect() for _ in range(3)]
    for number, (limit, group) in enumerate([(2, None), (3, None), (3, FairGroup(b"g"))]):
        asked = Acquire(LOCK, b"k", limit, 0, 60, group=group)
        table.handle(peers[number], asked, float(number))
    [lock] = json.loads(table.handle(peers[0], Stats(), 9.0)[0][1].json)["locks"]
    for report in (lock, inspected(table, peers[0], b"k", 9.0)):
        assert report["changed_limit"] == {"is": 3, "was": 2, "since_s": 8.0}
    table.disconnect(peers[0], 9.0, clean=True)
    assert "changed_limit" not in inspected(table, peers[1], b"k", 9.0)
