"""A table whose shards come and go: what is asked for where a shard is not, or not yet."""

from __future__ import annotations

from dflockd.table import Limits, ShardTable, TokenIssuer
from dflockd.table.limits import STEP
from dflockd.table.sharded import FROZEN, LAPSED
from dflockd.table.states import QUEUED, TRANSITIONS, WAITING
from dflockd.wire import (
    Acquire,
    Enqueue,
    Enqueued,
    Evict,
    Granted,
    How,
    Recovering,
    Release,
    Renew,
    Renewed,
    Report,
    Shards,
    Status,
    Wait,
    fence_from_token,
)
from tests.dflockd.table.sharded_support import (
    AWAY,
    FOR_LONG,
    LOCK,
    ask,
    assert_empty,
    forget_all,
    table_of,
    take,
    two_shards,
    wait_for,
)


def test_the_map_is_sent_to_who_has_not_got_it() -> None:
    table = table_of()
    peer = table.connect()
    whole, packed = Report(b"{}"), Report(b'{"zlib":""}')
    assert ask(table, peer, Shards(), 5) == whole
    assert ask(table, peer, Shards(b"4"), 5) == whole
    assert ask(table, peer, Shards(b"4", packed=True), 5) == packed
    assert ask(table, peer, Shards(b"5", packed=True), 5) is Status.OK
    assert ask(table, peer, Shards(b"5"), 6) == whole


def test_a_shard_that_is_not_here_is_referred_to_its_server() -> None:
    table = table_of(FOR_LONG, 0)
    peer = table.connect()
    for request in (
        Acquire(LOCK, b"1", 1, 0, None),
        Enqueue(LOCK, b"1", 1, None),
        Renew(LOCK, b"1", b"0" * 32, None),
        Release(LOCK, b"1", b"0" * 32),
        Renew(LOCK, b"1", b"0" * 32, None, How.DETACH),
        Wait(LOCK, b"1", 0),
    ):
        assert ask(table, peer, request) == AWAY
    assert_empty(table)


def test_nothing_is_granted_or_renewed_without_a_promise_and_everything_due_with_the_next() -> None:
    table = table_of(5)
    holder = table.connect()
    token = take(table, holder, b"a", lease=20)
    waiter, other = wait_for(table, b"a"), table.connect()
    assert ask(table, holder, Renew(LOCK, b"a", token, 20), 5) is LAPSED
    assert ask(table, other, Acquire(LOCK, b"b", 1, 9, 10), 5) is LAPSED
    assert ask(table, other, Enqueue(LOCK, b"b", 1, 10), 5) is LAPSED
    assert table.handle(holder, Release(LOCK, b"a", token), 5) == [(holder.id, Status.OK)]
    # A serving lease that has passed already when it is heard of is none.
    assert table.serve_until(6.5, 7) == []
    ((number, reply),) = table.serve_until(12, 8)
    assert number == waiter.id
    assert isinstance(reply, Granted)
    assert table.serve_until(13, 9) == []
    forget_all(table)


def test_more_that_is_due_with_a_promise_than_fits_a_step_is_given_in_several() -> None:
    table = table_of(5, max_locks=2 * STEP)
    holder = table.connect()
    keys = [*(b"k%d" % n for n in range(STEP + 1)), b"1k"]
    tokens = [take(table, holder, key, lease=60) for key in keys]
    waiters = [wait_for(table, key) for key in keys]
    for key, token in zip(keys, tokens, strict=True):
        ask(table, holder, Release(LOCK, key, token), 6)
    given = table.serve_until(20, 7)
    assert [number for number, _ in given] == [each.id for each in waiters[:STEP]]
    assert table.next_deadline() <= 7
    # The last one goes with its shard meanwhile.
    table.freeze(1, 7)
    assert [number for number, _ in table.drop(1, AWAY)[0]] == [waiters[-1].id]
    assert [number for number, _ in table.advance(7)] == [waiters[-2].id]
    assert not table.slots.withheld
    assert table.next_deadline() > 7


def test_an_operator_ends_a_hold_only_within_a_promise() -> None:
    table = table_of(5)
    evict = Evict(LOCK, b"a", fence_from_token(take(table, table.connect(), b"a", lease=20)))
    operator = table.connect()
    assert ask(table, operator, evict, 5) is LAPSED
    assert table.serve_until(10, 6) == []
    assert ask(table, operator, evict, 6) is Status.OK
    assert_empty(table)


def test_a_grant_by_enqueue_is_taken_up_only_within_a_promise() -> None:
    table = table_of(5)
    peer = table.connect()
    assert isinstance(ask(table, peer, Enqueue(LOCK, b"a", 1, 10)), Enqueued)
    assert ask(table, peer, Wait(LOCK, b"a", 5), 6) is LAPSED
    table.serve_until(20, 7)
    assert isinstance(ask(table, peer, Wait(LOCK, b"a", 5), 8), Granted)


def test_withheld_grants_are_forgotten_with_those_who_waited() -> None:
    table = table_of(5)
    holder = table.connect()
    token = take(table, holder, b"a", lease=20)
    waiter = wait_for(table, b"a", timeout=3)
    ask(table, holder, Release(LOCK, b"a", token), 2.9)
    assert ask(table, waiter, Release(LOCK, b"a", token), 2.95) is Status.ERROR  # its grant is out
    table = table_of(1)
    token = take(table, holder := table.connect(), b"a", lease=20)
    waiter = wait_for(table, b"a", timeout=3)
    ask(table, holder, Release(LOCK, b"a", token), 2)
    assert table.slots.withheld
    assert table.advance(3) == [(waiter.id, Status.TIMEOUT)]
    assert_empty(table)
    assert table.serve_until(10, 4) == []


def test_who_waits_is_sent_away_and_a_position_by_enqueue_stays() -> None:
    table = table_of(5)
    token = take(table, table.connect(), b"a", lease=60)
    waiter, placed = wait_for(table, b"a"), table.connect()
    assert ask(table, placed, Enqueue(LOCK, b"a", 1, 10)) is Status.QUEUED
    assert ask(table, placed, Wait(LOCK, b"a", 60), 1) is None
    assert placed.waiting is not None
    assert placed.waiting.state == WAITING
    assert QUEUED in TRANSITIONS[WAITING]
    assert table.send_away(6) == [(waiter.id, LAPSED), (placed.id, LAPSED)]
    assert placed.enqueued[LOCK, b"a"].state == QUEUED
    assert ask(table, placed, Wait(LOCK, b"a", 60), 6) is LAPSED
    table.serve_until(20, 7)
    assert ask(table, placed, Wait(LOCK, b"a", 60), 8) is None
    effects = table.handle(table.connect(), Release(LOCK, b"a", token), 9)
    assert [number for number, _ in effects[1:]] == [placed.id]
    forget_all(table)


def test_while_frozen_nothing_changes_and_thawed_it_goes_on() -> None:
    table = table_of()
    holder = table.connect()
    token = take(table, holder, b"a", lease=10)
    waiter = wait_for(table, b"a")
    table.freeze(0, 0)
    for request in (
        Renew(LOCK, b"a", token, 10),
        Release(LOCK, b"a", token),
        Acquire(LOCK, b"b", 1, 0, 10),
    ):
        assert ask(table, holder, request, 1) is FROZEN
    assert isinstance(ask(table, holder, Acquire(LOCK, b"1", 1, 0, 10), 1), Granted)
    assert table.advance(11) == []  # the lease has ended, and the grant waits
    ((number, reply),) = table.thaw(0, 12)
    assert (number, type(reply)) == (waiter.id, Granted)


def test_a_shard_opens_when_its_former_server_must_have_stopped_and_grants_after_the_grace() -> (
    None
):
    old, new = table_of(), table_of(FOR_LONG, 1)
    token = take(old, old.connect(), b"a")
    new.open(0, 2 << 40, opens_at=3.0, recovers_until=12.0)
    peer = new.connect()
    assert ask(new, peer, Renew(LOCK, b"a", token, 10), 2) == Recovering(1000)
    assert ask(new, peer, Acquire(LOCK, b"b", 1, 0, 10), 2) == Recovering(1000)
    assert ask(new, peer, Renew(LOCK, b"a", token, 20), 3) == Renewed(20)
    assert ask(new, peer, Acquire(LOCK, b"b", 1, 0, 10), 11) == Recovering(1000)
    assert isinstance(ask(new, peer, Acquire(LOCK, b"b", 1, 0, 10), 12), Granted)
    assert ask(new, new.connect(), Acquire(LOCK, b"a", 1, 0, 10), 13) is Status.TIMEOUT
    forget_all(new)


def test_of_two_that_come_back_the_later_grant_counts() -> None:
    old, new = table_of(), table_of(FOR_LONG, 1)
    peer = old.connect()
    first = take(old, peer, b"a")
    ask(old, peer, Release(LOCK, b"a", first))
    second = take(old, peer, b"a")
    new.open(0, 2 << 40, opens_at=0.0, recovers_until=12.0)
    one, other = new.connect(), new.connect()
    assert ask(new, one, Renew(LOCK, b"a", first, 10)) == Renewed(10)
    assert ask(new, other, Renew(LOCK, b"a", second, 10)) == Renewed(10)
    assert ask(new, one, Renew(LOCK, b"a", first, 10)) is Status.ERROR
    assert not one.holds


def test_leases_are_longer_than_they_are_said_to_be() -> None:
    table = ShardTable(Limits(), TokenIssuer(b"secret", 0), two_shards(), stretch=1.5)
    table.serve_until(FOR_LONG, 0)
    table.open(0, 0)
    holder = table.connect()
    token = take(table, holder, b"a", lease=10)
    assert table.next_deadline() == 15
    assert ask(table, holder, Renew(LOCK, b"a", token, 4), 1) == Renewed(4)
    assert table.next_deadline() == 7
