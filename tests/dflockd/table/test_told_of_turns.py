"""Who wants to be told of the turn is granted nothing, and nobody waits for them for long."""

from __future__ import annotations

import pytest

from dflockd.table import LockTable, Peer
from dflockd.table.queue import LEAST_TURN
from dflockd.wire import (
    Acquire,
    Enqueue,
    Enqueued,
    Evict,
    Granted,
    OwnerConflict,
    Pass,
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
    blocked,
    hold,
    kinds,
    lock,
    run,
    table_of,
    take_up,
    told,
    want,
)


def test_a_free_lock_is_told_and_not_granted(table: LockTable) -> None:
    peer, _ = told(table)
    assert not peer.holds
    assert table.counts.granted == 0
    assert table.counts.waiting == 1
    # Its slot is for nobody else.
    assert lock(table, timeout=0)[1] is Status.TIMEOUT
    assert want(table)[1] is Status.QUEUED
    assert table.next_deadline() == HOLD


def test_who_waits_is_told(table: LockTable) -> None:
    holder, release = hold(table)
    peer, behind = blocked(table), blocked(table)
    effects = table.handle(holder, release, 1.0)
    assert kinds(effects) == [(holder.id, Status), (peer.id, YourTurn)]
    assert peer.waiting is None
    assert behind.waiting is not None


def test_whoever_has_the_ticket_is_the_first_holder(table: LockTable) -> None:
    peer, ticket = told(table)
    other = table.connect()
    granted = table.handle(other, Acquire(LOCK, b"k", 1, 60, 600, ticket=ticket), 1.0)
    assert kinds(granted) == [(other.id, Granted)]
    assert not peer.enqueued
    assert ask(table, peer, Wait(LOCK, b"k", 0), 1.0) is Status.NOT_ENQUEUED
    assert table.disconnect(peer, 1.0, clean=True) == []
    assert other.holds
    # A ticket is good for once.
    assert take_up(table, ticket, 2.0, timeout=0) is Status.TIMEOUT


def test_an_enqueue_takes_it_up_too(table: LockTable) -> None:
    _, ticket = told(table)
    other = table.connect()
    assert isinstance(ask(table, other, Enqueue(LOCK, b"k", 1, 60, ticket=ticket)), Enqueued)


def test_its_own_connection_may_take_it_up(table: LockTable) -> None:
    peer, ticket = told(table)
    assert ask(table, peer, Enqueue(LOCK, b"k", 1, 60, ticket=ticket)) is Status.ALREADY_ENQUEUED
    granted = table.handle(peer, Acquire(LOCK, b"k", 1, 60, 600, ticket=ticket), 0.0)
    assert kinds(granted) == [(peer.id, Granted)]
    assert not peer.enqueued


def test_somebody_else_who_wants_to_be_told_takes_it_up(table: LockTable) -> None:
    _, ticket = told(table)
    other = table.connect()
    assert ask(table, other, Enqueue(LOCK, b"k", 1, 60, ticket=ticket, turn=5000), 1.0) == YourTurn(
        ticket
    )
    assert table.next_deadline() == 6.0


def test_who_says_nothing_delays_others_by_no_more_than_was_said(table: LockTable) -> None:
    _, ticket = told(table)
    waiter, _ = lock(table, 1.0)
    assert table.advance(HOLD - 0.001) == []
    assert kinds(table.advance(HOLD)) == [(waiter.id, Granted)]
    # It is ahead of all that came later.
    later, _ = lock(table, 3.0)
    assert take_up(table, ticket, 3.0) is None
    (release,) = [Release(LOCK, b"k", token.token) for token in waiter.holds]
    effects = table.handle(waiter, release, 4.0)
    assert [number for number, _ in effects] == [waiter.id, later.id + 1]


def test_a_stopped_process_with_many_turns_delays_others_little_more(table: LockTable) -> None:
    def of(instance: bytes, name: bytes, now: float) -> tuple[Peer, object]:
        return want(table, now, who=run(table, 0, instance, name))

    stopped = [of(b"stopped", b"%d" % number, 0.0) for number in range(100)]
    for peer, _ in stopped[1:]:
        ask(table, peer, Wait(LOCK, b"k", 600))
    other, _ = of(b"other", b"other", 0.0)
    assert ask(table, other, Wait(LOCK, b"k", 600)) is None
    turns: dict[int, float] = {}
    while other.id not in turns:
        now = table.next_deadline()
        assert now is not None
        turns |= dict.fromkeys((number for number, _ in table.advance(now)), now)
    assert turns[other.id] < 2 * HOLD + 100 * LEAST_TURN
    # For another process a slot is held as long as ever.
    end = table.next_deadline()
    assert end is not None
    assert end - turns[other.id] == pytest.approx(HOLD)
    # And for the first again, once it has said something.
    first, reply = stopped[0]
    assert isinstance(reply, YourTurn)
    ask(table, first, Pass(b"k", reply.ticket), 50.0)
    assert ask(table, first, Wait(LOCK, b"k", 60), 50.0) == reply
    end = table.next_deadline()
    assert end is not None
    assert end - 50.0 == pytest.approx(HOLD)


def test_who_passes_delays_nobody(table: LockTable) -> None:
    peer, ticket = told(table)
    waiter, _ = lock(table)
    effects = table.handle(peer, Pass(b"k", ticket), 0.0)
    assert kinds(effects) == [(peer.id, Status), (waiter.id, Granted)]
    assert table.next_deadline() == 600


def test_who_passed_waits_for_the_next_turn_at_the_old_position(table: LockTable) -> None:
    peer, ticket = told(table)
    holder, _ = lock(table)
    ask(table, peer, Pass(b"k", ticket))
    later, _ = lock(table)
    assert ask(table, peer, Wait(LOCK, b"k", 60), 1.0) is None
    effects = table.disconnect(holder, 2.0, clean=True)
    assert effects == [(peer.id, YourTurn(ticket))]
    assert kinds(table.advance(2.0 + HOLD)) == [(later.id, Granted)]


def test_nobody_waits_while_others_are_let_pass_and_nobody_comes(table: LockTable) -> None:
    peer, ticket = told(table)
    ask(table, peer, Pass(b"k", ticket))
    assert ask(table, peer, Wait(LOCK, b"k", 60), 1.0) == YourTurn(ticket)
    table.advance(1.0 + HOLD)
    holder, granted = lock(table, 4.0)
    assert isinstance(granted, Granted)
    assert ask(table, peer, Wait(LOCK, b"k", 0), 5.0) is Status.TIMEOUT
    assert holder.holds


def test_to_wait_while_a_slot_is_set_aside_does_not_set_it_aside_for_longer(
    table: LockTable,
) -> None:
    peer, ticket = told(table)
    for now in (0.5, 1.0, 1.5):
        assert ask(table, peer, Wait(LOCK, b"k", 60), now) == YourTurn(ticket)
    assert table.next_deadline() == HOLD


def test_a_slot_that_is_set_aside_is_not_for_who_is_back_before(table: LockTable) -> None:
    first, ticket = told(table)
    second = blocked(table)
    ((_, _), (_, reply)) = table.handle(first, Pass(b"k", ticket), 0.0)
    assert isinstance(reply, YourTurn)
    assert ask(table, first, Wait(LOCK, b"k", 60)) is None
    assert take_up(table, ticket, timeout=0) is not None  # it is blocked on: no ticket any more
    other = table.connect()
    granted = table.handle(other, Acquire(LOCK, b"k", 1, 0, 600, ticket=reply.ticket), 0.0)
    assert kinds(granted) == [(other.id, Granted)]
    assert not second.enqueued
    assert first.waiting is not None


def test_who_passes_is_told_before_others_again(table: LockTable) -> None:
    first, ticket = told(table)
    second = blocked(table)
    ((_, _), (_, reply)) = table.handle(first, Pass(b"k", ticket), 0.0)
    assert isinstance(reply, YourTurn)
    ask(table, first, Wait(LOCK, b"k", 60))
    effects = table.handle(second, Pass(b"k", reply.ticket), 0.0)
    assert effects == [(second.id, Status.OK), (first.id, YourTurn(ticket))]


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
    away, waiter = table.connect(), None
    ask(table, away, Enqueue(LOCK, b"k", 1, 60))
    reply = ask(table, away, Wait(LOCK, b"k", 0, reserve=Reserve(0, 10000)))
    assert isinstance(reply, TimedOut)
    waiter, _ = lock(table)
    assert ask(table, away, Pass(b"k", reply.ticket)) is Status.OK  # not its turn yet
    assert kinds(table.handle(holder, release, 1.0)) == [(holder.id, Status)]
    effects = table.handle(away, Pass(b"k", reply.ticket), 1.0)
    assert kinds(effects) == [(away.id, Status), (waiter.id, Granted)]
    assert take_up(table, reply.ticket, 2.0) is None


@pytest.mark.parametrize("has_passed", [False, True])
def test_the_end_of_the_connection_ends_it(table: LockTable, has_passed: bool) -> None:
    peer, ticket = told(table)
    if has_passed:
        ask(table, peer, Pass(b"k", ticket))
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


@pytest.mark.parametrize("has_passed", [False, True])
def test_nothing_is_left_of_who_was_alone(table: LockTable, has_passed: bool) -> None:
    peer, ticket = told(table)
    if has_passed:
        ask(table, peer, Pass(b"k", ticket))
    assert len(table) == 1
    table.disconnect(peer, 1.0, clean=True)
    assert len(table) == table.counts.waiting == 0
    assert table.next_deadline() is None


def test_what_is_told_before_it_asks_is_told_when_it_asks(table: LockTable) -> None:
    holder, release = hold(table)
    peer, _ = want(table)
    waiter, _ = lock(table)
    assert kinds(table.handle(holder, release, 1.0)) == [(holder.id, Status)]
    assert isinstance(ask(table, peer, Wait(LOCK, b"k", 60), 1.5), YourTurn)
    assert kinds(table.advance(1.0 + HOLD)) == [(waiter.id, Granted)]


def test_trying_once(table: LockTable) -> None:
    peer, ticket = told(table)
    assert ask(table, peer, Wait(LOCK, b"k", 0)) == YourTurn(ticket)
    ask(table, peer, Pass(b"k", ticket))
    hold(table)
    assert ask(table, peer, Wait(LOCK, b"k", 0)) is Status.TIMEOUT
    assert not peer.enqueued
    assert not table._partition.reserved


def test_a_position_is_kept_for_who_could_not_wait_any_longer(table: LockTable) -> None:
    peer, ticket = told(table)
    assert ask(table, peer, Wait(LOCK, b"k", 60, reserve=Reserve(1000, 0))) == YourTurn(
        ticket
    )  # a keep was for this alone
    ask(table, peer, Pass(b"k", ticket))
    hold(table)
    assert ask(table, peer, Wait(LOCK, b"k", 1, reserve=Reserve(1000, 0))) is None
    assert table.advance(1.0) == [(peer.id, TimedOut(ticket))]
    assert ask(table, peer, Wait(LOCK, b"k", 1), 1.0) is Status.NOT_ENQUEUED
    table.disconnect(peer, 1.0, clean=True)
    assert take_up(table, ticket, 1.0) is None


def test_a_slot_is_set_aside_no_longer_than_a_lease() -> None:
    table = table_of(max_lease=600)
    peer = table.connect()
    assert ask(table, peer, Enqueue(LOCK, b"k", 1, 60, turn=600_001)) is Status.ERROR
    assert len(table) == 0
    assert isinstance(ask(table, peer, Enqueue(LOCK, b"k", 1, 60, turn=600_000)), YourTurn)


def test_no_slot_is_set_aside_for_no_time(table: LockTable) -> None:
    peer = table.connect()
    assert isinstance(ask(table, peer, Enqueue(LOCK, b"k", 1, 60, turn=0)), YourTurn)
    assert isinstance(lock(table)[1], Granted)


def test_as_many_are_told_as_there_are_slots(table: LockTable) -> None:
    replies = [want(table, limit=3)[1] for _ in range(5)]
    assert [type(reply) for reply in replies] == [YourTurn] * 3 + [Status] * 2
    newcomer = table.connect()
    assert ask(table, newcomer, Acquire(LOCK, b"k", 3, 0, 60)) is Status.TIMEOUT


def test_an_evicted_holder_is_followed_by_who_is_told(table: LockTable) -> None:
    holder, _ = hold(table)
    peer = blocked(table)
    (fence,) = [each.fence for each in holder.holds]
    effects = table.handle(holder, Evict(LOCK, b"k", fence), 1.0)
    assert kinds(effects) == [(holder.id, Status), (peer.id, YourTurn)]


# Who asks.


@pytest.mark.parametrize("has_passed", [False, True])
def test_who_was_told_is_compared_as_one_who_waits(table: LockTable, has_passed: bool) -> None:
    _, reply = want(table, who=run(table))
    assert isinstance(reply, YourTurn)
    if has_passed:
        ask(table, table.connect(), Pass(b"k", reply.ticket))
    for request in (Acquire(LOCK, b"k", 1, 9, 60), Enqueue(LOCK, b"k", 1, 60)):
        assert ask(table, run(table), request) == OwnerConflict(b"waiting", 1)
    # By the ticket nobody is compared, and then the run holds.
    by_ticket = Acquire(LOCK, b"k", 1, 0, 60, ticket=reply.ticket)
    assert isinstance(ask(table, run(table), by_ticket), Granted)
    assert ask(table, run(table), Acquire(LOCK, b"k", 1, 9, 60)) == OwnerConflict(b"held", 1)


@pytest.mark.parametrize("has_passed", [False, True])
@pytest.mark.parametrize("wants_turn", [False, True])
def test_the_same_process_takes_over_what_its_lost_connection_was_told(
    table: LockTable, has_passed: bool, wants_turn: bool
) -> None:
    lost, reply = want(table, who=run(table, instance=b"here"))
    assert isinstance(reply, YourTurn)
    if has_passed:
        ask(table, lost, Pass(b"k", reply.ticket))
    again = run(table, instance=b"here")
    if wants_turn:
        assert want(table, 1.0, who=again) == (again.peer, reply)
        assert table.next_deadline() == 1.0 + HOLD
    else:
        assert isinstance(ask(table, again, Enqueue(LOCK, b"k", 1, 60), 1.0), Enqueued)
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
