"""The queue of one key, and who is the latest there of an owner, by themselves."""

from __future__ import annotations

import pytest

from dflockd.table import LockTable, Peer, TokenIssuer, owners
from dflockd.table.line import ClientProcess, Line
from dflockd.table.queue import Queue
from dflockd.table.state import Entry, Partition, Waiter
from dflockd.wire import Acquire, Enqueue, Owner, Reserve, Status, TimedOut, Wait
from tests.dflockd.table.rules_support import LOCK, reply_to, table_of, take


def test_the_time_between_grants_is_an_average_of_the_last_few() -> None:
    queue = Queue()
    assert queue.gap < 0
    gaps = []
    for since, now in ((0.0, 0.0), (0.0, 2.0), (0.0, 4.5), (7.0, 8.0)):
        queue.has_served(since, now)
        gaps.append(queue.gap)
    assert gaps == [0.0, 0.5, 1.0, 1.0], "who comes late has not waited for those before"


def waiter_of(instance: bytes) -> Waiter:
    peer = Peer(1)
    peer.instance = instance
    entry = Entry(Partition(TokenIssuer(b"secret", 0)), LOCK, b"k", 1)
    return Waiter(entry, peer, 1, 10, 0.0, two_phase=True, owner=Owner(b"run", 0))


def test_a_line_is_in_the_order_of_numbers_whoever_has_come_back() -> None:
    """And the next is the first of those whose process asks, or who need none."""
    line, entry = Line(), Entry(Partition(TokenIssuer(b"secret", 0)), LOCK, b"k", 1)
    one, two = ClientProcess(b"one"), ClientProcess(b"two")

    def waiter(number: int, process: ClientProcess | None) -> Waiter:
        made = Waiter(entry, Peer(1), number, 10, 0.0, two_phase=True)
        made.process = process
        return made

    first, second, third, fourth, fifth = made = [
        waiter(number, process) for number, process in enumerate((one, two, None, one, None))
    ]
    for each in (first, third, fifth):
        line.enter(each)
    for each in (fourth, second):
        line.go_back(each)
    assert list(line.everybody()) == made
    assert line.next() is third
    two.asking = Peer(2)
    assert line.next() is second
    one.asking = Peer(3)
    assert line.next() is first
    for each in (first, second, third):
        line.leave(each)
    assert set(line.rows) == {one}
    assert line.next() is fourth
    line.leave(fourth)
    assert not line.rows
    assert line.next() is fifth
    line.go_back(third)
    assert line.next() is third


@pytest.mark.parametrize("attempt", [0, 1])
@pytest.mark.parametrize("held_first", [True, False])
def test_of_one_attempt_what_is_held_goes_before_what_waits(
    table: LockTable, attempt: int, held_first: bool
) -> None:
    peer = table.connect()
    owner = Owner(b"run", attempt)
    table.handle(peer, Acquire(LOCK, b"k", 1, 0, None, owner=owner), 0.0)
    entry = table.find(LOCK, b"k")
    assert isinstance(entry, Entry)
    [hold] = entry.holds.values()
    waiter = Waiter(entry, peer, hold.fence + 1, 10, 0.0, two_phase=False, owner=owner)
    owners.add(entry, waiter)
    if not held_first:
        owners.discard(entry, hold)
        owners.add(entry, hold)
    assert owners.latest(entry, b"run") is hold
    owners.discard(entry, hold)
    assert owners.latest(entry, b"run") is waiter
    owners.discard(entry, waiter)
    assert entry.owners == {}


def test_what_was_not_noted_of_an_owner_is_not_taken_out(table: LockTable) -> None:
    first, second, stranger = (waiter_of(b"here") for _ in range(3))
    first.number, second.number = 1, 2
    stranger.owner = Owner(b"other", 0)
    entry = first.entry
    for each in (first, second):
        owners.add(entry, each)
    owners.discard(entry, stranger)
    owners.discard(entry, waiter_of(b"elsewhere"))
    assert owners.latest(entry, b"run") is second
    owners.discard(entry, second)
    assert owners.latest(entry, b"run") is first


def test_who_comes_back_to_a_position_holds_no_more_than_it_may() -> None:
    table = table_of(max_holds=1)
    take(table, table.connect(), b"k")
    away, back = table.connect(), table.connect()
    assert reply_to(table, away, Enqueue(LOCK, b"k", 1, None)) is Status.QUEUED
    kept = reply_to(table, away, Wait(LOCK, b"k", 0, reserve=Reserve(9000, 0)))
    assert isinstance(kept, TimedOut)
    take(table, back, b"other")
    assert (
        reply_to(table, back, Acquire(LOCK, b"k", 1, 9, None, ticket=kept.ticket))
        is Status.MAX_HOLDS
    )
