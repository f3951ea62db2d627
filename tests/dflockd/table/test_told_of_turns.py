"""Who wants to be told of the turn is granted nothing, and is told once its process asks."""

from __future__ import annotations

import pytest

from dflockd.table import LockTable
from dflockd.wire import (
    Acquire,
    Enqueue,
    Enqueued,
    Evict,
    Granted,
    Next,
    OwnerConflict,
    Pass,
    Queued,
    Release,
    Reserve,
    Status,
    TimedOut,
    Wait,
    YourTurn,
)
from tests.dflockd.table.turns_support import (
    HOLD,
    LOCK,
    ask,
    asks,
    blocked,
    hold,
    kinds,
    lock,
    process,
    run,
    table_of,
    take_up,
    ticket_of,
    told,
    want,
)


def test_nobody_is_told_whose_process_does_not_ask(table: LockTable) -> None:
    """And nobody waits for them: others have the lock meanwhile."""
    peer, ticket = blocked(table)
    assert table.next_deadline() == 60
    holder, granted = lock(table)
    assert isinstance(granted, Granted)
    asking, nothing = asks(table, peer)
    assert nothing is None
    effects = table.handle(holder, Release(LOCK, b"k", granted.token), 1.0)
    assert effects == [(holder.id, Status.OK), (asking.id, YourTurn(ticket))]
    assert peer.waiting is not None
    # Its slot is for nobody else now.
    assert lock(table, 1.0, timeout=0)[1] is Status.TIMEOUT
    assert table.next_deadline() == 1.0 + HOLD


def test_whoever_has_the_ticket_is_the_first_holder(table: LockTable) -> None:
    peer, ticket = told(table)
    assert ask(table, peer, Wait(LOCK, b"k", 60)) is None
    assert not peer.holds
    other = table.connect()
    granted = table.handle(other, Acquire(LOCK, b"k", 1, 60, 600, ticket=ticket), 1.0)
    assert kinds(granted) == [(peer.id, Status), (other.id, Granted)]
    assert granted[0][1] is Status.NOT_ENQUEUED
    assert not peer.enqueued
    assert table.disconnect(peer, 1.0, clean=True) == []
    assert other.holds
    # A ticket is good for once.
    assert take_up(table, ticket, 2.0, timeout=0) is Status.TIMEOUT


def test_it_is_taken_up_by_an_enqueue_too_and_by_its_own_connection(table: LockTable) -> None:
    peer, ticket = told(table)
    assert ask(table, peer, Enqueue(LOCK, b"k", 1, 60, ticket=ticket)) is Status.ALREADY_ENQUEUED
    granted = table.handle(peer, Acquire(LOCK, b"k", 1, 60, 600, ticket=ticket), 0.0)
    assert kinds(granted) == [(peer.id, Granted)]
    assert not peer.enqueued
    _, other = blocked(table)
    queued = ask(table, table.connect(), Enqueue(LOCK, b"k", 1, 60, ticket=other))
    assert queued is Status.QUEUED


def test_who_takes_it_up_to_be_told_has_another_ticket(table: LockTable) -> None:
    _, ticket = told(table)
    other = process(table)
    again = ask(table, other, Enqueue(LOCK, b"k", 1, 60, ticket=ticket, turn=5000), 1.0)
    assert ticket_of(again) != ticket
    assert asks(table, other, 1.0)[1] == YourTurn(ticket_of(again))
    assert table.next_deadline() == 6.0
    assert take_up(table, ticket, 2.0, timeout=0) is Status.TIMEOUT


def test_it_can_be_taken_up_before_its_turn(table: LockTable) -> None:
    """Where it is: behind those who came before."""
    holder, release = hold(table)
    first, _ = lock(table)
    peer, ticket = blocked(table)
    last, _ = lock(table)
    assert take_up(table, ticket) is None
    assert not peer.enqueued
    order = [waiter.peer.id for waiter in table.find(LOCK, b"k").waiters]  # type: ignore[union-attr]
    assert order == [first.id, last.id + 1, last.id]
    assert kinds(table.handle(holder, release, 1.0))[1:] == [(first.id, Granted)]


def test_who_says_nothing_delays_others_by_no_more_than_was_said(table: LockTable) -> None:
    peer, ticket = told(table)
    waiter, _ = lock(table, 1.0)
    assert table.advance(HOLD - 0.001) == []
    assert kinds(table.advance(HOLD)) == [(waiter.id, Granted)]
    # It is ahead of all that came later, and is not told again: its ticket may be on its way.
    later, _ = lock(table, 3.0)
    assert asks(table, peer, 3.0)[1] is None
    assert take_up(table, ticket, 3.0) is None
    (release,) = [Release(LOCK, b"k", token.token) for token in waiter.holds]
    effects = table.handle(waiter, release, 4.0)
    assert kinds(effects)[1][1] is Granted
    assert effects[1][0] > later.id


def test_a_stopped_process_with_many_positions_delays_others_once(table: LockTable) -> None:
    stopped = [blocked(table, who=process(table, b"stopped"))[0] for _ in range(100)]
    asks(table, stopped[0])
    waiter, _ = lock(table)
    assert kinds(table.advance(HOLD)) == [(waiter.id, Granted)]


def test_a_turn_that_cannot_be_used_is_none(table: LockTable) -> None:
    peer, ticket = told(table)
    assert ask(table, peer, Wait(LOCK, b"k", 60)) is None
    waiter, _ = lock(table)
    other = table.connect()
    effects = table.handle(other, Pass(b"k", ticket), 1.0)
    assert kinds(effects) == [(other.id, Status), (waiter.id, Granted)]
    later, _ = blocked(table, 1.0, process(table, peer.instance))
    asking, _ = asks(table, peer, 1.0)
    ended = table.disconnect(waiter, 2.0, clean=True)
    assert ended == [(asking.id, YourTurn(ticket))]
    assert table.disconnect(peer, 2.0, clean=True) == []
    assert asks(table, later, 2.0)[1] != YourTurn(ticket)


def test_what_can_be_passed(table: LockTable) -> None:
    peer, ticket = told(table)
    other = table.connect()
    assert ask(table, other, Pass(b"k", b"00")) is Status.ERROR
    assert ask(table, other, Pass(b"other", ticket)) is Status.ERROR
    assert table.next_deadline() == HOLD
    for _ in range(2):
        assert ask(table, other, Pass(b"k", ticket)) is Status.OK
    assert table.next_deadline() is None
    table.disconnect(peer, 0.0, clean=True)
    assert ask(table, other, Pass(b"k", ticket)) is Status.ERROR


def test_a_slot_that_is_held_for_somebody_who_is_away_can_be_passed_on(table: LockTable) -> None:
    holder, release = hold(table)
    away = table.connect()
    ask(table, away, Enqueue(LOCK, b"k", 1, 60))
    reply = ask(table, away, Wait(LOCK, b"k", 0, reserve=Reserve(0, 10000)))
    assert isinstance(reply, TimedOut)
    waiter, _ = lock(table)
    assert ask(table, away, Pass(b"k", reply.ticket)) is Status.OK  # not its turn yet
    assert kinds(table.handle(holder, release, 1.0)) == [(holder.id, Status)]
    effects = table.handle(away, Pass(b"k", reply.ticket), 1.0)
    assert kinds(effects) == [(away.id, Status), (waiter.id, Granted)]
    assert take_up(table, reply.ticket, 2.0) is None


# The connection that asks.


def test_a_process_asks_once(table: LockTable) -> None:
    first, second = process(table, b"here"), process(table, b"here")
    assert ask(table, first, Next()) is None
    effects = table.handle(second, Next(), 0.0)
    assert effects == [(first.id, Status.ERROR)]
    peer, reply = want(table, who=process(table, b"here"))
    assert first.waiting is None
    assert second.waiting is None
    assert not peer.holds
    assert second.told is not None
    assert second.told.ticket == ticket_of(reply)


def test_who_does_not_say_which_process_it_is_can_have_no_turn(table: LockTable) -> None:
    nobody = table.connect()
    assert ask(table, nobody, Next()) is Status.ERROR
    assert ask(table, nobody, Enqueue(LOCK, b"k", 1, 60, turn=1000)) is Status.ERROR
    assert len(table) == 0


def test_a_turn_that_nobody_has_heard_of_is_had_again(table: LockTable) -> None:
    peer, ticket = blocked(table)
    lost, reply = asks(table, peer)
    assert reply == YourTurn(ticket)
    waiter, _ = lock(table)
    assert kinds(table.disconnect(lost, 1.0, clean=False)) == [(waiter.id, Granted)]
    table.disconnect(waiter, 1.0, clean=True)
    asking, reply = asks(table, peer, 1.0)
    assert reply == YourTurn(ticket)
    # With what it asks next it says that it has heard.
    assert ask(table, asking, Next(), 1.5) is None
    assert table.disconnect(asking, 1.5, clean=False) == []
    assert table.next_deadline() == 1.0 + HOLD
    assert not table._partition.reserved[ticket].can_start


def test_only_the_connection_that_was_told_of_a_turn_last_takes_it_along(table: LockTable) -> None:
    peer, ticket = blocked(table)
    former, _ = asks(table, peer)
    assert ask(table, table.connect(), Pass(b"k", ticket)) is Status.OK
    latter, reply = asks(table, peer, 1.0)
    assert reply == YourTurn(ticket)
    waiter, _ = lock(table, 1.0)
    assert table.disconnect(former, 1.0, clean=False) == []
    assert kinds(table.disconnect(latter, 1.0, clean=False)) == [(waiter.id, Granted)]


def test_a_process_that_is_gone_leaves_nothing(table: LockTable) -> None:
    peer, _ = blocked(table)
    asking, _ = asks(table, peer)
    ask(table, asking, Next())
    for each in (peer, asking):
        table.disconnect(each, 1.0, clean=True)
    assert len(table) == 0
    assert not table.connections.processes
    assert not table._partition.reserved
    assert table.next_deadline() is None


@pytest.mark.parametrize("has_passed", [False, True])
def test_the_end_of_its_connection_ends_it(table: LockTable, has_passed: bool) -> None:
    peer, ticket = told(table)
    assert ask(table, peer, Wait(LOCK, b"k", 60)) is None
    if has_passed:
        ask(table, table.connect(), Pass(b"k", ticket))
        holder, _ = hold(table)
    waiter, _ = lock(table)
    effects = table.disconnect(peer, 1.0, clean=False)
    assert kinds(effects) == ([] if has_passed else [(waiter.id, Granted)])
    assert take_up(table, ticket, 1.0, timeout=0) is Status.TIMEOUT
    if has_passed:
        assert kinds(table.disconnect(holder, 1.0, clean=True)) == [(waiter.id, Granted)]
    table.disconnect(waiter, 1.0, clean=True)
    assert len(table) == 0
    assert not table._partition.reserved


# Where it could have had a turn.


def test_keys_that_were_free_take_turns(table: LockTable) -> None:
    """Each process starts with where it could have had one longest."""
    tickets = []
    for key in (b"a", b"b", b"a", b"b", b"c"):
        reply = want(table, limit=9, who=process(table, b"here"), key=key)[1]
        tickets.append(ticket_of(reply))
    asking = process(table, b"here")
    order = [tickets.index(ask(table, asking, Next()).ticket) for _ in range(5)]  # type: ignore[attr-defined]
    assert order == [0, 1, 4, 2, 3]
    assert ask(table, asking, Next()) is None
    assert not table.connections.processes[b"here"].starved


def test_each_process_has_the_first_of_its_own(table: LockTable) -> None:
    waiting = {}
    for name in (b"1", b"2"):
        waiting[name] = blocked(table, who=process(table, name))
        blocked(table, who=process(table, name))
    for name in (b"2", b"1"):
        peer, ticket = waiting[name]
        assert asks(table, peer)[1] == YourTurn(ticket)
        assert isinstance(take_up(table, ticket), Granted)
        [holder] = [p for p in table.connections.peers.values() if p.holds]
        assert table.disconnect(holder, 0.0, clean=True) == []


# Time.


def test_its_time_ends_nothing_while_it_is_its_turn(table: LockTable) -> None:
    peer, reply = want(table)
    assert ask(table, peer, Wait(LOCK, b"k", 1, reserve=Reserve(1000, 0))) is None
    asks(table, peer)
    assert table.advance(1.5) == []
    assert table.advance(HOLD) == []
    assert ask(table, table.connect(), Pass(b"k", ticket_of(reply)), 3.0) is Status.OK
    assert table.advance(3.0) == [(peer.id, TimedOut(ticket_of(reply)))]
    assert take_up(table, ticket_of(reply), 3.0) is not None


def test_trying_once(table: LockTable) -> None:
    peer, _ = want(table)
    assert ask(table, peer, Wait(LOCK, b"k", 0)) is Status.TIMEOUT
    assert not peer.enqueued
    assert not table._partition.reserved
    assert len(table) == 0


def test_a_free_slot_is_not_kept_for_who_goes_away(table: LockTable) -> None:
    peer, _ = want(table)
    kept = ask(table, peer, Wait(LOCK, b"k", 0, reserve=Reserve(5000, 0)))
    assert isinstance(kept, TimedOut)
    assert isinstance(lock(table)[1], Granted)


def test_a_slot_is_set_aside_no_longer_than_a_lease() -> None:
    table = table_of(max_lease=600)
    peer = process(table)
    assert ask(table, peer, Enqueue(LOCK, b"k", 1, 60, turn=600_001)) is Status.ERROR
    assert len(table) == 0
    assert isinstance(ask(table, peer, Enqueue(LOCK, b"k", 1, 60, turn=600_000)), Queued)


def test_as_many_are_told_as_there_are_slots(table: LockTable) -> None:
    tickets = [ticket_of(want(table, limit=3, who=process(table, b"here"))[1]) for _ in range(5)]
    asking = process(table, b"here")
    assert [ask(table, asking, Next()) for _ in range(4)] == [*map(YourTurn, tickets[:3]), None]
    newcomer = table.connect()
    assert ask(table, newcomer, Acquire(LOCK, b"k", 3, 0, 60)) is Status.TIMEOUT


def test_an_evicted_holder_is_followed_by_who_is_told(table: LockTable) -> None:
    holder, _ = hold(table)
    peer, ticket = blocked(table)
    asking, _ = asks(table, peer)
    (fence,) = [each.fence for each in holder.holds]
    effects = table.handle(holder, Evict(LOCK, b"k", fence), 1.0)
    assert effects == [(holder.id, Status.OK), (asking.id, YourTurn(ticket))]


# Who asks.


@pytest.mark.parametrize("is_told", [False, True])
def test_who_waits_to_be_told_is_compared(table: LockTable, is_told: bool) -> None:
    peer, reply = want(table, who=run(table))
    if is_told:
        asks(table, peer)
    for request in (Acquire(LOCK, b"k", 1, 9, 60), Enqueue(LOCK, b"k", 1, 60)):
        assert ask(table, run(table), request) == OwnerConflict(b"waiting", 1)
    # By the ticket nobody is compared, and then the run holds.
    by_ticket = Acquire(LOCK, b"k", 1, 0, 60, ticket=ticket_of(reply))
    assert isinstance(ask(table, run(table), by_ticket), Granted)
    assert ask(table, run(table), Acquire(LOCK, b"k", 1, 9, 60)) == OwnerConflict(b"held", 1)


@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("wants_turn", [False, True])
def test_the_same_process_takes_over_what_its_lost_connection_had(
    table: LockTable, is_told: bool, wants_turn: bool
) -> None:
    lost, ticket = blocked(table, who=run(table, instance=b"here"))
    if is_told:
        asks(table, lost)
    again = run(table, instance=b"here")
    request = Enqueue(LOCK, b"k", 1, 60, turn=2000 if wants_turn else None)
    effects = table.handle(again.peer, again.by(request), 1.0)
    assert effects[-1] == (lost.id, OwnerConflict(b"waiting", 1)) or wants_turn
    assert effects[0] == (again.peer.id, Queued(ticket)) or not wants_turn
    assert isinstance(effects[0][1], Queued if wants_turn else Enqueued)
    assert not lost.enqueued
    assert table.disconnect(lost, 1.0, clean=False) == []
    assert again.peer.enqueued


# At one instant.


def test_time_that_is_up_goes_first(table: LockTable) -> None:
    _, ticket = told(table)
    waiter, _ = lock(table)
    other = table.connect()
    effects = table.handle(other, Acquire(LOCK, b"k", 1, 0, 600, ticket=ticket), HOLD)
    assert kinds(effects) == [(waiter.id, Granted)]
    assert kinds(table.advance(HOLD)) == [(other.id, Status)]


def test_what_falls_due_with_the_end_of_a_connection_goes_first(table: LockTable) -> None:
    peer, _ = told(table)
    late, _ = lock(table, timeout=1)
    waiter, _ = lock(table)
    effects = table.disconnect(peer, 1.0, clean=True)
    assert kinds(effects) == [(late.id, Status), (waiter.id, Granted)]
