"""What a table takes back after a loss: whoever holds a lock keeps it, and nobody else gets in."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflockd.table import HoldRecord, Limits, LockTable, Peer, TokenIssuer
from dflockd.wire import (
    Acquire,
    Granted,
    How,
    Recovering,
    Release,
    Renew,
    Renewed,
    Reply,
    Request,
    Space,
    Status,
    fence_from_token,
)

LOCK, SEMAPHORE = Space.LOCK, Space.SEMAPHORE
LONGEST = 10
"""Seconds of the longest lease, and so of a recovery."""


def table_of(fence: int = 0) -> LockTable:
    limits = Limits(default_lease=LONGEST, max_lease=LONGEST, max_detached_lease=60)
    return LockTable(limits, TokenIssuer(b"secret", fence), kept=True)


def ask(table: LockTable, peer: Peer, request: Request, now: float) -> Reply:
    ((number, reply),) = table.handle(peer, request, now)
    assert number == peer.id
    return reply


def taken(table: LockTable, peer: Peer, lease: int, now: float, key: bytes = b"k") -> bytes:
    reply = ask(table, peer, Acquire(LOCK, key, 1, 0, lease), now)
    assert isinstance(reply, Granted)
    return reply.token


def records(table: LockTable) -> list[HoldRecord]:
    """What a journal would get now."""
    assert table.changes is not None
    changes = table.changes.copy()
    table.changes.clear()
    return [hold.kept() for hold in changes if not hold.ended]


def two_of_one_lock() -> tuple[list[HoldRecord], bytes, bytes]:
    table = table_of()
    peer = table.connect()
    first = taken(table, peer, 10, 0.0)
    kept = records(table)
    ask(table, peer, Release(LOCK, b"k", first), 1.0)
    second = taken(table, peer, 10, 2.0)
    return kept + records(table), first, second


@pytest.mark.parametrize("reverse", [False, True])
def test_of_two_records_of_one_lock_the_later_grant_counts(reverse: bool) -> None:
    # The end of the first was lost with a part of the journal. The holder got `error`, both lived on.
    kept, first, second = two_of_one_lock()
    table = table_of(2)
    table.restore(kept[::-1] if reverse else kept, 3.0)
    table.recover(13.0)
    assert len(table) == 1
    assert [hold.fence for hold in table.changes or ()] == [2, 2]
    peer = table.connect()
    assert ask(table, peer, Renew(LOCK, b"k", first, 10), 4.0) is Status.ERROR
    assert ask(table, peer, Renew(LOCK, b"k", second, 10), 4.0) == Renewed(10)
    assert ask(table, peer, Release(LOCK, b"k", second), 5.0) is Status.OK
    assert ask(table, peer, Renew(LOCK, b"k", first, 10), 6.0) is Status.ERROR


def test_of_two_records_one_counts_without_a_recovery_too() -> None:
    kept, _, second = two_of_one_lock()
    table = table_of(2)
    table.restore(kept, 3.0)
    peer = table.connect()
    assert ask(table, peer, Release(LOCK, b"k", second), 5.0) is Status.OK
    assert isinstance(ask(table, peer, Acquire(LOCK, b"k", 1, 0, None), 5.0), Granted)


def test_a_record_that_is_out_of_date_does_not_end_its_hold() -> None:
    # Its renewal for a longer lease was lost: it ended in the recovery, and its holder was refused.
    table = table_of()
    token = taken(table, table.connect(), 2, 0.0)
    kept = records(table)
    table = table_of(1)
    table.restore([kept[0]._replace(deadline=3.0)], 1.0)
    table.recover(11.0)
    holder, other = table.connect(), table.connect()
    assert table.advance(6.0) == []
    assert ask(table, other, Acquire(LOCK, b"k", 1, 0, None), 6.0) == Recovering(5000)
    assert ask(table, holder, Renew(LOCK, b"k", token, 10), 9.0) == Renewed(10)
    assert ask(table, other, Acquire(LOCK, b"k", 1, 0, None), 18.0) is Status.TIMEOUT
    assert isinstance(ask(table, other, Acquire(LOCK, b"k", 1, 0, None), 19.0), Granted)


def test_what_nobody_renews_ends_with_the_recovery() -> None:
    table = table_of()
    token = taken(table, table.connect(), 2, 0.0)
    kept = records(table)
    table = table_of(1)
    table.restore(kept, 1.0)
    table.recover(11.0)
    peer = table.connect()
    assert isinstance(ask(table, peer, Acquire(LOCK, b"k", 1, 0, None), 11.1), Granted)
    assert ask(table, peer, Renew(LOCK, b"k", token, None), 11.1) is Status.ERROR


def test_a_lease_that_was_renewed_in_a_recovery_ends_for_good() -> None:
    table = table_of()
    token = taken(table, table.connect(), 2, 0.0)
    kept = records(table)
    table = table_of(1)
    table.restore(kept, 1.0)
    table.recover(11.0)
    peer = table.connect()
    assert ask(table, peer, Renew(LOCK, b"k", token, 2), 2.0) == Renewed(2)
    assert table.advance(4.0) == []
    assert ask(table, peer, Renew(LOCK, b"k", token, 2), 5.0) is Status.ERROR


def test_nothing_is_confirmed_while_it_is_in_doubt() -> None:
    # The record of what came after it may be lost, and that one's holder is yet to renew.
    table = table_of()
    publisher = table.connect()
    token = taken(table, publisher, 10, 0.0)
    assert ask(table, publisher, Renew(LOCK, b"k", token, 60, How.DETACH), 0.0) == Renewed(60)
    kept = records(table)[-1:]
    table = table_of(1)
    table.restore(kept, 1.0)
    table.recover(11.0)
    peer = table.connect()
    assert ask(table, peer, Renew(LOCK, b"k", token, 10, How.CONFIRM), 2.0) == Recovering(9000)
    assert ask(table, peer, Renew(LOCK, b"k", token, 10, How.CONFIRM), 11.0) == Renewed(10)


def test_a_confirmation_follows_a_renewal_and_a_detachment() -> None:
    table = table_of()
    token = taken(table, table.connect(), 10, 0.0)
    other = taken(table, table.connect(), 10, 0.0, b"other")
    kept = records(table)
    table = table_of(2)
    table.restore(kept, 1.0)
    table.recover(11.0)
    peer = table.connect()
    assert ask(table, peer, Renew(LOCK, b"k", token, 10), 2.0) == Renewed(10)
    assert ask(table, peer, Renew(LOCK, b"k", token, 10, How.CONFIRM), 3.0) == Renewed(10)
    assert ask(table, peer, Renew(LOCK, b"other", other, 10, How.DETACH), 2.0) == Renewed(10)
    assert ask(table, peer, Renew(LOCK, b"other", other, 10, How.CONFIRM), 3.0) == Renewed(10)


def test_who_detaches_what_was_forgotten_brings_it_back_first() -> None:
    # It was refused, as if another had adopted it: the holder's server hung, and it asked the next.
    before = table_of()
    token = taken(before, before.connect(), 10, 0.0)
    other = taken(before, before.connect(), 10, 0.0, b"other")
    table = table_of(2)
    table.recover(11.0)
    holder, adopter = table.connect(), table.connect()
    assert ask(table, holder, Renew(LOCK, b"k", token, 60, How.DETACH), 1.0) == Renewed(60)
    table.disconnect(holder, 2.0, clean=True)
    assert ask(table, adopter, Acquire(LOCK, b"k", 1, 0, None), 12.0) is Status.TIMEOUT
    assert ask(table, adopter, Renew(LOCK, b"k", token, 10, How.CONFIRM), 12.0) == Renewed(10)
    # Nothing is brought back once others can have had it, nor what somebody else has by now.
    late = table.connect()
    assert (
        ask(table, late, Renew(LOCK, b"other", other, 60, How.DETACH), 12.0) is Status.LEASE_EXPIRED
    )
    assert ask(table, late, Renew(LOCK, b"k", token, 60, How.DETACH), 12.0) is Status.LEASE_EXPIRED


@pytest.mark.parametrize("detached", [False, True])
def test_a_release_ends_what_was_held_before_its_grant(detached: bool) -> None:
    # It stayed: its late holder got it back, and a detached one kept the key for its whole lease.
    table = table_of()
    peer = table.connect()
    first = taken(table, peer, 10, 0.0)
    if detached:
        assert ask(table, peer, Renew(LOCK, b"k", first, 60, How.DETACH), 0.0) == Renewed(60)
    kept = records(table)[-1:]
    assert ask(table, peer, Release(LOCK, b"k", first), 1.0) is Status.OK
    second = taken(table, peer, 10, 2.0)

    table = table_of(2)
    table.restore(kept, 3.0)
    table.recover(13.0)
    peer = table.connect()
    records(table)
    assert ask(table, peer, Release(LOCK, b"k", second), 4.0) is Status.OK
    assert [hold.ended for hold in table.changes or ()] == [True]
    assert ask(table, peer, Renew(LOCK, b"k", first, 10), 4.0) is Status.ERROR
    assert isinstance(ask(table, peer, Acquire(LOCK, b"k", 1, 0, None), 13.0), Granted)


def test_each_lock_that_a_later_grant_has_ended_is_counted() -> None:
    table = table_of()
    peer = table.connect()
    keys = (b"a", b"b", b"c")
    first = {key: taken(table, peer, 10, 0.0, key) for key in keys}
    kept = records(table)
    second = {}
    for key, token in first.items():
        assert ask(table, peer, Release(LOCK, key, token), 1.0) is Status.OK
        second[key] = taken(table, peer, 10, 2.0, key)

    table = table_of(2)
    table.restore(kept, 3.0)
    table.recover(13.0)
    peer = table.connect()
    for key, token in second.items():
        assert ask(table, peer, Release(LOCK, key, token), 4.0) is Status.OK
    assert table.counts.superseded == 3
    assert len(table) == 0


def test_a_release_ends_nothing_that_was_granted_after_it() -> None:
    kept, first, second = two_of_one_lock()
    table = table_of(2)
    table.restore(kept, 3.0)
    table.recover(13.0)
    peer = table.connect()
    assert ask(table, peer, Release(LOCK, b"k", first), 4.0) is Status.OK
    assert ask(table, peer, Renew(LOCK, b"k", second, 10), 4.0) == Renewed(10)


# Any part of the records of a real history, each as it was some time.


@dataclass
class Holder:
    """Somebody who believes in a lock until `deadline`."""

    space: Space
    key: bytes
    token: bytes
    deadline: float

    @property
    def name(self) -> tuple[Space, bytes]:
        return self.space, self.key


class History:
    """A few clients that keep to the rules, before and after a loss."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.now = 100.0
        self.table = table_of()
        self.peer = self.table.connect()
        self.holders: list[Holder] = []
        self.known: list[Holder] = []
        """All that was ever granted, whoever has the token by now."""
        self.versions: dict[int, list[HoldRecord | None]] = defaultdict(list)
        """What the journal of this process has of each hold; ``None`` for its end."""
        self.fence = 0

    def ask(self, request: Request) -> Reply:
        reply = ask(self.table, self.peer, request, self.now)
        self.record()
        return reply

    def record(self) -> None:
        for hold in self.table.changes or ():
            self.fence = max(self.fence, hold.fence)
            self.versions[hold.fence].append(None if hold.ended else hold.kept())
        self.table.changes.clear()

    def believe(self, holder: Holder, limit: int = 3) -> None:
        """No more may do so than it was granted to."""
        self.holders.append(holder)
        if (holder.space, holder.key) != (LOCK, b"b"):
            limit = 1 if holder.space is LOCK else 2
        assert [each.name for each in self.holders].count(holder.name) <= limit, "too many holders"

    def pass_time(self, seconds: float) -> None:
        """Who holds on renews in time, each at a moment of their own."""
        end = self.now + seconds
        while due := [holder for holder in self.holders if holder.deadline <= end]:
            first = min(due, key=lambda holder: holder.deadline)
            if self.dice.random() < 0.3:
                self.holders.remove(first)  # it stops, and lets its lease end
            else:
                self.now = max(self.now, first.deadline - self.dice.random())
                self.renew(first)
            if self.dice.random() < 0.3:
                self.table.advance(self.now)
                self.record()
        self.now = max(self.now, end)

    def renew(self, holder: Holder) -> None:
        lease = self.dice.choice([2, 5, LONGEST])
        request = Renew(holder.space, holder.key, holder.token, lease)
        assert self.ask(request) == Renewed(lease), "who holds the lock was refused"
        holder.deadline = self.now + lease

    def step(self) -> None:
        dice = self.dice
        space, key = dice.choice([(LOCK, b"a"), (LOCK, b"b"), (LOCK, b"b"), (SEMAPHORE, b"a")])
        lease = dice.choice([2, 5, LONGEST])
        match dice.choice(
            ["acquire", "renew", "release", "detach", "adopt", "adopt", "old", "time"]
        ):
            case "acquire":
                limit = 1 if space is LOCK else 2
                if (space, key) == (LOCK, b"b"):
                    limit = dice.choice([1, 2, 3])  # some say this and some that
                reply = self.ask(Acquire(space, key, limit, 0, lease))
                if isinstance(reply, Granted):
                    holder = Holder(space, key, reply.token, self.now + lease)
                    self.known.append(holder)
                    self.believe(holder, limit)
            case "renew" if self.holders:
                self.renew(dice.choice(self.holders))
            case "release" if self.holders:
                holder = dice.choice(self.holders)
                self.holders.remove(holder)
                assert self.ask(Release(holder.space, holder.key, holder.token)) is Status.OK
            case "detach" if self.holders:
                holder = dice.choice(self.holders)
                lease = dice.choice([3, 30])
                request = Renew(holder.space, holder.key, holder.token, lease, How.DETACH)
                assert self.ask(request) == Renewed(lease), "who holds the lock was refused"
                self.holders.remove(holder)
            case "adopt" if self.known:
                holder = dice.choice(self.known)
                if holder not in self.holders:
                    request = Renew(holder.space, holder.key, holder.token, lease, How.CONFIRM)
                    if isinstance(self.ask(request), Renewed):
                        holder.deadline = self.now + lease
                        self.believe(holder)
            case "old" if self.known:
                holder = dice.choice(self.known)
                if holder not in self.holders and holder.deadline < self.now:
                    self.ask(Release(holder.space, holder.key, holder.token))
            case "time":
                self.pass_time(dice.choice([0.0, 0.5, 1, 3]))

    def lose(self) -> None:
        """Go on with some of what was written, each record as it was some time."""
        kept = []
        for versions in self.versions.values():
            last = self.dice.choice([len(versions) - 1, self.dice.randrange(-1, len(versions))])
            record = versions[last] if last >= 0 else None
            if record is not None:
                kept.append(record)
        if self.dice.random() < 0.5:
            kept = [each._replace(deadline=self.now + each.lease, since=self.now) for each in kept]
        self.dice.shuffle(kept)
        self.versions.clear()  # the next process begins a journal with what it takes in
        self.table = table_of(self.fence + 1000)
        self.table.restore(kept, self.now)
        self.table.recover(self.now + LONGEST)
        self.peer = self.table.connect()
        self.record()


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 40), steps=st.integers(1, 40), losses=st.integers(1, 2))
def test_any_part_of_the_records_gives_every_holder_its_lock(
    seed: int, steps: int, losses: int
) -> None:
    history = History(random.Random(seed))
    for _ in range(losses):
        for _ in range(steps):
            history.step()
        history.lose()
    for _ in range(steps):
        history.step()
        for holder in list(history.holders):
            if history.dice.random() < 0.2:
                history.renew(holder)


def test_the_records_of_a_history_are_worth_looking_at() -> None:
    history = History(random.Random(1))
    for _ in range(300):
        history.step()
    assert len(history.versions) > 10
    assert max(map(len, history.versions.values())) > 3
    assert any(None in versions for versions in history.versions.values())
    assert fence_from_token(history.known[0].token) in history.versions
