"""The lock table against a naive model, over random histories and with a clock that the test turns."""

from __future__ import annotations

import json
import random
from collections import Counter
from types import MemberDescriptorType
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dflockd.table import (
    Effect,
    HoldRecord,
    Limits,
    LockTable,
    NewestRecord,
    Peer,
    TokenIssuer,
    Waiter,
    report,
)
from dflockd.table import (
    Hold as TableHold,
)
from dflockd.table.rates import RateBlock, RateRecord
from dflockd.table.states import EXPECTED, TRANSITIONS
from dflockd.wire import (
    Acquire,
    Aged,
    Barrier,
    Begun,
    Confirm,
    Detach,
    DrawAge,
    Enqueue,
    Enqueued,
    Evict,
    Granted,
    InGroup,
    Listen,
    Malformed,
    Owner,
    OwnerConflict,
    Pass,
    Ping,
    Rate,
    Recovering,
    Release,
    Renew,
    Renewed,
    Report,
    Request,
    Reserve,
    Resume,
    Space,
    StableRef,
    Stats,
    Status,
    Superseded,
    TimedOut,
    Turn,
    Unbegun,
    Wait,
    YourTurn,
    fence_from_token,
)
from tests.dflockd.table.naive_table import LATE, Hold, NaiveTable, Name, PlacesOfRate, name_of
from tests.dflockd.table.naive_table import Waiter as NaiveWaiter

MOST_PEERS = 6
FIRST_FENCE = 1000

limits = st.builds(
    Limits,
    default_lease=st.sampled_from([3, 10]),
    max_lease=st.sampled_from([10, 20]),
    max_detached_lease=st.sampled_from([5, 20]),
    max_locks=st.sampled_from([1, 2, 3, 100, 100, 100]),
    max_waiters=st.sampled_from([0, 0, 0, 1, 2]),
    auto_release=st.booleans(),
    max_holds=st.sampled_from([0, 10_000, 10_000, 10_000, 1, 2]),
    orphan_ttl=st.sampled_from([0, 1, 3]),
    orphan_all=st.booleans(),
)
# One lock is the favourite, so that its queue grows.
names = st.sampled_from(
    [(0, b"a"), (0, b"a"), (0, b"a"), (0, b"b"), (1, b"a"), (1, b"a"), (1, b"b"), (1, b"c")]
)
numbers = st.integers(0, 1000)
leases = st.sampled_from([None, None, None, 1, 3, 5, 10, 21])
timeouts = st.sampled_from([0, 1, 3, 5, 10, 20])
aways = st.sampled_from([0, 0, 1000, 2500, 5000, 20_001])
held = st.sampled_from([0, 500, 1000, 3000, 3000, 10_000])


def limit_of(name: Name, odd: bool) -> int:
    usual = {b"a": 2, b"b": 3, b"c": 1}[name[1]] if name[0] else 1
    return usual % 3 + 1 if odd and name[0] else usual


# Mostly nobody says who asks.
owners = st.none() | st.builds(
    Owner,
    st.sampled_from([b"run", b"run", b"other"]),
    st.integers(0, 2),
    st.sampled_from([b"", b"here", b"here", b"there"]),
    st.sampled_from([None, None, b"", b"me"]),  # which is no part of who asks
    st.sampled_from([0, 0, 0, 1, 2, 3, 4]),
)

ENDS = [
    {"clean": True, "silent": False},
    {"clean": False, "silent": False},
    {"clean": False, "silent": True},
    {"clean": False, "silent": False, "told": False},
    {"clean": False, "silent": True, "told": False},
]


groups = st.builds(
    InGroup, st.sampled_from([b"one", b"one", b"two", b"three"]), st.sampled_from([0, 0, 0, 1, 2])
)


class TableMachine(RuleBasedStateMachine):
    """Does everything twice, in the real table and in the model, and compares."""

    @initialize(limits=limits)
    def begin(self, limits: Limits) -> None:
        self.limits = limits
        self.table = LockTable(limits, TokenIssuer(b"secret", FIRST_FENCE), kept=True)
        self.model = NaiveTable(limits)
        self.model.authentic = self.authentic
        self.kept: dict[int, HoldRecord] = {}  # what the changes say, by fence
        self.kept_newest: dict[bytes, NewestRecord] = {}
        self.last_fence = FIRST_FENCE
        self.crashed = False  # once a machine is lost, badly behaved clients are believed
        self.peers: dict[int, Peer] = {}
        self.seen: list[tuple[Name, bytes]] = []  # every token that a client has been told
        self.fences: dict[int, int] = {}  # number of the grant -> fence
        self.tickets: list[tuple[Name, bytes]] = []  # every position that a client may come back to
        self.rates: dict[Name, Rate] = {}  # of keys all of whose users name them
        self.kept_rates: dict[int, RateRecord] = {}
        for _ in range(4):
            self.connect()

    # Comparing.

    def compare(self, effects: list[Effect]) -> None:
        self.record()
        answers = self.model.taken()
        assert [(peer, kind_of(reply)) for peer, reply in effects] == [
            (answer.peer, answer.kind) for answer in answers
        ]
        for (_, reply), answer in zip(effects, answers, strict=True):
            if isinstance(reply, Granted | Enqueued):
                assert answer.hold is not None
                assert reply.lease == answer.lease
                self.tell(answer.hold, reply.token)
            elif isinstance(reply, Renewed):
                assert reply.lease == answer.lease
            elif isinstance(reply, TimedOut | YourTurn):
                assert answer.waiter is not None
                self.tell_ticket(answer.waiter, reply.ticket)

    def record(self) -> None:
        """Do with the changes what a journal does."""
        assert self.table.changes is not None
        for hold in self.table.changes:
            if isinstance(hold, RateBlock):
                self.kept_rates.pop(hold.number, None)
                if not hold.ended:
                    self.kept_rates[hold.number] = hold.kept()
            elif not isinstance(hold, TableHold):
                if not hold.ended:
                    self.kept_newest[hold.key] = hold.kept()
            elif hold.ended:
                self.kept.pop(hold.fence, None)
            else:
                self.kept[hold.fence] = hold.kept()
                self.last_fence = max(self.last_fence, hold.fence)
        self.table.changes.clear()

    def authentic(self, name: Name, token: bytes) -> int | None:
        return fence_from_token(token) if (name, token) in self.seen else None

    def tell(self, hold: Hold, token: bytes) -> None:
        if hold.token is not None:
            assert hold.token == token
            return
        assert token not in [known for _, known in self.seen]
        hold.token = token
        self.seen.append((hold.name, token))
        self.fences[hold.number] = fence_from_token(token)
        fences = [self.fences[number] for number in sorted(self.fences)]
        assert all(a < b for a, b in zip([FIRST_FENCE, *fences], fences, strict=False))

    def tell_ticket(self, waiter: NaiveWaiter, ticket: bytes) -> None:
        """A position has one ticket, and no other has that."""
        known = [] if waiter.ticket else [ticket for _, ticket in self.tickets]
        assert waiter.ticket == ticket if waiter.ticket else ticket not in known
        assert ticket not in [token for _, token in self.seen]
        waiter.ticket = ticket
        self.tickets.append((waiter.name, ticket))
        self.last_fence = max(self.last_fence, fence_from_token(ticket))

    def idle(self, choice: int) -> Peer | None:
        ready = [peer for peer in self.peers.values() if peer.waiting is None]
        return ready[choice % len(ready)] if ready else None

    def ask(self, choice: int, request: Request, method: str, *arguments: Any) -> None:
        peer = self.idle(choice)
        if peer is None:
            return
        self.model.advance()
        if self.model.draining and method not in ("release", "renew", "confirm"):
            self.model.say(peer.id, "error_draining")
        else:
            getattr(self.model, method)(peer.id, *arguments)
        self.compare(self.table.handle(peer, request, self.model.now))

    # What clients do.

    @precondition(lambda self: len(self.peers) < MOST_PEERS)
    @rule()
    def connect(self) -> None:
        peer = self.table.connect()
        assert peer.id not in self.peers
        self.peers[peer.id] = peer
        self.model.connect(peer.id)

    @precondition(lambda self: self.peers)
    @rule(choice=numbers, end=st.sampled_from(ENDS))
    def disconnect(self, choice: int, end: dict[str, bool]) -> None:
        number = sorted(self.peers)[choice % len(self.peers)]
        self.model.disconnect(number, **end)
        self.compare(self.table.disconnect(self.peers.pop(number), self.model.now, **end))

    @rule(choice=numbers, name=names, odd=numbers, timeout=timeouts, lease=leases)
    def acquire(self, choice: int, name: Name, odd: int, timeout: int, lease: int | None) -> None:
        limit = limit_of(name, odd % 8 == 1)
        rate = self.rates.get(name)
        request = Acquire(Space(name[0]), name[1], limit, timeout, lease, rate)
        self.ask(choice, request, "acquire", name, limit, timeout, lease)

    @rule(choice=numbers, owner=owners)
    def own(self, choice: int, owner: Owner | None) -> None:
        self.ask(choice, owner or Owner(b"", 0), "own", owner and (*owner[:3], owner.age))

    @rule(choice=numbers, which=numbers)
    def listen(self, choice: int, which: int) -> None:
        name, token = self.live_token(which)
        if name[0] == 0:
            self.ask(choice, Listen(name[1], token), "listen", name, token)

    @rule(choice=numbers, name=names)
    def draw_age(self, choice: int, name: Name) -> None:
        peer = self.idle(choice)
        if peer is None or self.model.draining:
            return
        self.advance()
        [(number, reply)] = self.table.handle(peer, DrawAge(name[1]), self.model.now)
        assert number == peer.id
        assert isinstance(reply, Aged)
        assert reply.age > max(self.last_fence, *self.fences.values(), *[0])
        self.last_fence = reply.age

    @rule(
        name=st.sampled_from([(0, b"a"), (0, b"a"), (0, b"b")]),
        wanted=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=5),
        timeout=timeouts,
    )
    def newer_and_newer_ones_come(
        self, name: Name, wanted: list[tuple[int, int]], timeout: int
    ) -> None:
        """Runs with ages want the same lock, in some order, and who gets it listens."""
        for choice, (age, way) in enumerate(wanted):
            self.own(choice, Owner(b"run-%d" % age, 0, b"here", None, age))
            if way == 0:
                self.want_turn(choice, 1000)
            if way < 2:
                self.enqueue(choice, name, 0, None)
            else:
                self.acquire(choice, name, 0, timeout, None)
            self.listen(choice, 0)

    @rule(
        name=names,
        wanted=st.lists(st.tuples(owners, st.booleans()), max_size=5),
        timeout=timeouts,
        lease=leases,
    )
    def all_say_who_asks(
        self,
        name: Name,
        wanted: list[tuple[Owner | None, bool]],
        timeout: int,
        lease: int | None,
    ) -> None:
        """Several attempts of a run, and others, want the same key."""
        for choice, (owner, two_phase) in enumerate(wanted):
            self.own(choice, owner)
            if two_phase:
                self.enqueue(choice, name, 0, lease)
            else:
                self.acquire(choice, name, 0, timeout, lease)

    @rule(choice=numbers, name=names, timeout=timeouts)
    def acquire_again(self, choice: int, name: Name, timeout: int) -> None:
        self.acquire(choice, name, 0, timeout, None)

    @rule(choice=numbers, name=names, odd=numbers, lease=leases)
    def enqueue(self, choice: int, name: Name, odd: int, lease: int | None) -> None:
        limit = limit_of(name, odd % 8 == 1)
        request = Enqueue(Space(name[0]), name[1], limit, lease, self.rates.get(name))
        self.ask(choice, request, "enqueue", name, limit, lease)

    @rule(choice=numbers, name=names, timeout=timeouts)
    def wait(self, choice: int, name: Name, timeout: int) -> None:
        self.ask(choice, Wait(Space(name[0]), name[1], timeout), "wait", name, timeout)

    @rule(choice=numbers, which=numbers, timeout=timeouts)
    def wait_for_a_grant(self, choice: int, which: int, timeout: int) -> None:
        ready = [peer for peer in self.peers.values() if peer.waiting is None]
        having = [number for number, peer in enumerate(ready) if peer.enqueued]
        if having:
            choice = having[choice % len(having)]
            name = list(ready[choice].enqueued)[which % len(ready[choice].enqueued)]
            self.ask(choice, Wait(*name, timeout), "wait", name, timeout)

    @rule(choice=numbers, away=aways, hold=held)
    def keep(self, choice: int, away: int, hold: int) -> None:
        self.ask(choice, Reserve(away, hold), "reserve", away, hold)

    @rule(name=names, which=numbers, timeout=timeouts, away=aways, hold=held)
    def wait_and_keep(self, name: Name, which: int, timeout: int, away: int, hold: int) -> None:
        """Somebody with a waiter, or else with a new one, waits there, and means to come back."""
        ready = [peer for peer in self.peers.values() if peer.waiting is None]
        having = [number for number, peer in enumerate(ready) if peer.enqueued]
        choice = having[which % len(having)] if having else which
        if having:
            name = list(ready[choice].enqueued)[which % len(ready[choice].enqueued)]
        else:
            self.enqueue(choice, name, 0, None)
        self.keep(choice, away, hold)
        self.wait(choice, name, timeout)

    @rule(name=names, away=aways, hold=held, ways=st.lists(st.booleans(), max_size=5))
    def all_go_away(self, name: Name, away: int, hold: int, ways: list[bool]) -> None:
        """Several peers want the same key, and some of them later."""
        for choice, goes in enumerate(ways):
            self.enqueue(choice, name, 0, None)
            if goes:
                self.keep(choice, away, hold)
                self.wait(choice, name, 0)

    @rule(choice=numbers, which=numbers, timeout=timeouts, lease=leases, two_phase=st.booleans())
    def come_back(
        self, choice: int, which: int, timeout: int, lease: int | None, two_phase: bool
    ) -> None:
        """Mostly to a position that is kept, or told; else to one that was, or was taken up."""
        there = [*self.model.away, *self.model.told()]
        kept = [(waiter.name, waiter.ticket) for waiter in there if waiter.ticket]
        known = kept if kept and which % 8 else self.tickets[-8:]
        if not known:
            return
        name, ticket = known[which % len(known)]
        assert ticket is not None
        self.resume(choice, ticket)
        if two_phase:
            self.enqueue(choice, name, 0, lease)
        else:
            self.acquire(choice, name, 0, timeout, lease)

    @rule(choice=numbers, hold=held)
    def want_turn(self, choice: int, hold: int) -> None:
        """Whatever is enqueued next."""
        self.ask(choice, Turn(hold_of(hold)), "want_turn", hold_of(hold))

    @rule(name=names, hold=held, ways=st.lists(st.sampled_from([True, True, False]), max_size=5))
    def all_want_turns(self, name: Name, hold: int, ways: list[bool]) -> None:
        """Several peers want the same key, and most of them to be told of it."""
        for choice, wants_turn in enumerate(ways):
            if wants_turn:
                self.want_turn(choice, hold)
            self.enqueue(choice, name, 0, None)

    @rule(choice=numbers, group=groups)
    def in_group(self, choice: int, group: InGroup) -> None:
        """Whoever asks for a slot next."""
        self.ask(choice, group, "in_group", group)

    @rule(
        name=names,
        ways=st.lists(st.tuples(st.none() | groups, st.booleans(), st.none() | held), max_size=6),
        timeout=timeouts,
    )
    def all_in_groups(
        self, name: Name, ways: list[tuple[InGroup | None, bool, int | None]], timeout: int
    ) -> None:
        """Several peers of some groups want the same key, and some to be told of their turn."""
        for choice, (group, two_phase, turn) in enumerate(ways):
            if group:
                self.in_group(choice, group)
            if turn is not None:
                self.want_turn(choice, turn)
            if two_phase or turn is not None:
                self.enqueue(choice, name, 0, None)
            else:
                self.acquire(choice, name, 0, timeout, None)

    @rule(choice=numbers, which=numbers)
    def let_pass(self, choice: int, which: int) -> None:
        there = [*self.model.away, *self.model.told()]
        known = [(waiter.name, waiter.ticket) for waiter in there if waiter.ticket]
        known = known if known and which % 8 else self.tickets[-8:]
        if known:
            name, ticket = known[which % len(known)]
            assert ticket is not None
            self.ask(choice, Pass(Space(name[0]), name[1], ticket), "let_pass", name, ticket)

    @rule(choice=numbers, which=numbers)
    def say_where_to_come_back(self, choice: int, which: int) -> None:
        """Whatever is asked for next may be for another key."""
        self.resume(choice, self.tickets[which % len(self.tickets)][1] if self.tickets else b"a")

    def resume(self, choice: int, ticket: bytes) -> None:
        self.ask(choice, Resume(ticket), "resume", ticket)

    @rule(name=names, timeout=timeouts, lease=leases, ways=st.lists(st.booleans(), max_size=5))
    def rush(self, name: Name, timeout: int, lease: int | None, ways: list[bool]) -> None:
        """Several peers want the same key, one after another."""
        for choice, two_phase in enumerate(ways):
            if two_phase:
                self.enqueue(choice, name, 0, lease)
            else:
                self.acquire(choice, name, 0, timeout, lease)

    @rule(choice=numbers, which=numbers)
    def release(self, choice: int, which: int) -> None:
        name, token = self.live_token(which)
        self.ask(choice, Release(Space(name[0]), name[1], token), "release", name, token)

    @rule(choice=numbers, which=numbers)
    def evict(self, choice: int, which: int) -> None:
        name, token = self.live_token(which)
        request = Evict(Space(name[0]), name[1], fence_from_token(token))
        self.ask(choice, request, "evict", name, token)

    @rule(choice=numbers, which=numbers, lease=leases, confirms=st.booleans())
    def renew(self, choice: int, which: int, lease: int | None, confirms: bool) -> None:
        name, token = self.live_token(which)
        request = (Confirm if confirms else Renew)(Space(name[0]), name[1], token, lease)
        self.ask(choice, request, "confirm" if confirms else "renew", name, token, lease)

    @rule(choice=numbers, which=numbers, lease=leases)
    def detach(self, choice: int, which: int, lease: int | None) -> None:
        name, token = self.live_token(which)
        request = Detach(Space(name[0]), name[1], token, lease)
        self.ask(choice, request, "detach", name, token, lease)

    @rule(choice=numbers, which=numbers, name=names, forge=numbers, release=st.booleans())
    def wrong_token(self, choice: int, which: int, name: Name, forge: int, release: bool) -> None:
        """An old token, one of another key, or one that was never given out."""
        known = self.seen[which % len(self.seen)][1] if self.seen else b"f" * 32
        forged = [known, known[:16] + b"0" * 16, known[:-1], known + b"0", b"\xff", b"-1", b"0x1"]
        token = forged[forge % len(forged)]
        if release:
            self.ask(choice, Release(Space(name[0]), name[1], token), "release", name, token)
        else:
            request = Renew(Space(name[0]), name[1], token, None)
            self.ask(choice, request, "renew", name, token, None)

    @rule(choice=numbers, which=numbers)
    def confirm_what_may_be_forgotten(self, choice: int, which: int) -> None:
        name, token = self.seen[which % len(self.seen)] if self.seen else ((0, b"a"), b"0" * 32)
        request = Confirm(Space(name[0]), name[1], token, None)
        self.ask(choice, request, "confirm", name, token, None)

    @rule(choice=numbers, which=numbers, lease=leases, release=st.booleans())
    def old_token(self, choice: int, which: int, lease: int | None, release: bool) -> None:
        """A token that was told some time: the server may have forgotten its hold."""
        if not self.seen:
            return
        name, token = self.seen[-1 - which % min(8, len(self.seen))]
        if release and which % 3 == 0:
            self.ask(choice, Release(Space(name[0]), name[1], token), "release", name, token)
        else:
            request = Renew(Space(name[0]), name[1], token, lease)
            self.ask(choice, request, "renew", name, token, lease)

    @rule(odds=numbers, lost=numbers, quarters=st.integers(0, 5))
    def crash(self, odds: int, lost: int, quarters: int) -> None:
        """The process ends, or its machine, and another goes on with what was recorded."""
        if odds % 4:
            return
        self.model.now += quarters / 4
        holds = sorted(self.kept.values(), key=lambda kept: kept.fence)
        until = self.model.recovers_until
        if odds % 8:
            holds = [kept for kept in holds if not lost >> kept.fence % 10 & 1]
            until = self.model.now + self.limits.max_lease
            self.crashed, self.last_fence = True, self.last_fence + 1000
        self.table = LockTable(self.limits, TokenIssuer(b"secret", self.last_fence), kept=True)
        newest = [
            record
            for number, record in enumerate(self.kept_newest.values())
            if not odds % 8 or not lost >> number & 1
        ]
        rates = [self.kept_rates[number] for number in sorted(self.kept_rates)]
        self.kept_rates.clear()
        self.table.restore(holds, self.model.now, rates)
        self.table.remember(newest)
        self.kept_newest.clear()
        if until > self.model.now:
            self.table.recover(until)
        self.model.crash(holds, until)
        self.model.newest = {record.key: record.age for record in newest}
        self.peers.clear()
        self.kept.clear()
        self.compare([])
        for kept in holds:
            at_least = until if until > self.model.now else 0
            late = self.kept[kept.fence].deadline - max(kept.deadline, self.model.now, at_least)
            assert -1e-6 < late < 0.1 + 1e-6
        for _ in range(3):
            self.connect()

    def live_token(self, which: int) -> tuple[Name, bytes]:
        live = [(hold.name, hold.token) for hold in self.model.holds() if hold.token]
        return live[which % len(live)] if live else ((0, b"a"), b"0" * 32)

    @rule(
        choice=numbers,
        request=st.sampled_from([Ping(), Barrier(), Malformed("x"), Stats(), StableRef(b"ref")]),
    )
    def other(self, choice: int, request: Request) -> None:
        if isinstance(request, StableRef):
            self.ask(choice, request, "stable_ref")
        else:
            kind = {Malformed: "error", Stats: "stats"}.get(type(request), "ok")
            self.ask(choice, request, "say", kind)

    # Time.

    @rule(quarters=st.integers(1, 10), told=st.booleans())
    def time_passes(self, quarters: int, told: bool) -> None:
        """With or without the timer of the server going off."""
        self.model.now += quarters / 4
        if told:
            self.advance()

    @rule(which=numbers, told=st.booleans())
    def time_passes_to_a_deadline(self, which: int, told: bool) -> None:
        """Exactly: what comes next happens at the same instant, or after an `advance`."""
        deadlines = sorted(d for d in self.model.deadlines() if d > self.model.now)
        if deadlines:
            self.model.now = deadlines[which % min(3, len(deadlines))]
            if told:
                self.advance()

    def advance(self) -> None:
        now, rates = self.model.now, self.table._group.rates.values()
        due = [(r.deadline, r.span, (r.space, r.key)) for r in rates if r.deadline <= now]
        self.model.advance(sorted(due))
        self.compare(self.table.advance(now))

    def pass_time(self, seconds: float) -> None:
        """From deadline to deadline, as the timer of the server does: so places are given."""
        until = self.model.now + seconds
        while (due := self.table.next_deadline()) is not None and due <= until:
            self.model.now = max(self.model.now, due)
            self.advance()
        self.model.now = until

    def begin_or_not(self, which: int, *, begun: bool) -> None:
        name, token = self.live_token(which)
        if begun:
            request: Request = Begun(Space(name[0]), name[1], token, None)
            self.ask(which, request, "begun", name, token, None)
        else:
            self.ask(which, Unbegun(Space(name[0]), name[1], token), "unbegun", name, token)

    # What always holds.

    @invariant()
    def next_deadline_is_the_earliest(self) -> None:
        if not self.rates:
            assert self.table.next_deadline() == min(self.model.deadlines(), default=None)

    @invariant()
    def never_more_holders_than_the_limit_and_no_lost_waiter(self) -> None:
        for entry in self.entries().values():
            is_lock = entry.space is Space.LOCK
            assert len(entry.holds) <= entry.limit or (self.crashed and not is_lock)
            assert entry.holds or entry.waiters
            # Whoever waits at a free slot is not there, and the slot is for whoever comes.
            key = self.model.keys[entry.space, entry.key]
            waiters = [
                waiter
                for waiter in entry.waiters or ()
                if not waiter.is_told
                and (waiter.state == EXPECTED or key.has_room(name_of(waiter.group)))
            ]
            free = min(entry.limit, self.limits.max_holds or entry.limit) - len(entry.holds)
            rate = self.model.rates.get((entry.space, entry.key))
            if rate is not None:
                free = min(free, rate.free(self.model.now))
            told = [waiter for waiter in entry.waiters or () if waiter.is_told]
            free -= sum(waiter.state == EXPECTED for waiter in told)
            assert free >= 0 or (self.crashed and not is_lock)
            if rate is not None:
                free = min(free, rate.free(self.model.now - LATE))
            assert all(waiter.state == EXPECTED for waiter in waiters[: max(0, free)])
            assert not waiters or entry.limit > 0

    @invariant()
    def what_is_kept_is_what_somebody_was_told(self) -> None:
        told = {hold.token: hold.deadline for hold in self.model.holds() if hold.token}
        assert self.kept == {fence_from_token(token): self.holds()[token] for token in told}
        assert {kept.deadline for kept in self.kept.values()} == set(told.values())
        ages = {record.key: record.age for record in self.kept_newest.values()}
        assert ages == self.model.newest
        assert len(self.table.newest) == len(ages)

    def holds(self) -> dict[bytes, HoldRecord]:
        entries = self.entries().values()
        return {hold.token: hold.kept() for entry in entries for hold in entry.holds.values()}

    @invariant()
    def state_is_the_same(self) -> None:
        table, model = self.table, self.model
        entries = self.entries()
        assert set(entries) == set(model.keys)
        assert len(table) == len(model.keys)
        for name, key in model.keys.items():
            entry = entries[name]
            assert entry.limit == key.limit
            assert [
                (
                    hold.peer.id if hold.peer else None,
                    hold.deadline,
                    hold.waiter is not None,
                    hold.group,
                )
                for hold in entry.holds.values()
            ] == [
                (hold.peer, hold.deadline, self.is_enqueued(hold), hold.group) for hold in key.holds
            ]
            order = key.order()
            queue = entry.waiters
            assert (queue is not None and queue.is_grouped) == key.is_grouped
            ahead = len(order) - len([each for each in order if each.is_told and not each.has_slot])
            resting = [
                each for each in order if each.wants and not key.has_room(name_of(each.group))
            ]
            assert queue is None or queue.ahead == ahead - len(resting)
            assert [
                (
                    waiter.peer.id,
                    waiter.lease,
                    waiter.turn,
                    waiter.state == EXPECTED,
                    waiter.is_told,
                    waiter.group,
                )
                for waiter in entry.waiters or ()
            ] == [
                (each.peer, each.lease, each.turn, each.has_slot, each.is_told, each.group)
                for each in order
            ]
            assert [waiter.two_phase for waiter in entry.waiters or ()] == [
                waiter.two_phase for waiter in order
            ]
        assert set(table._peers) == set(model.peers) == set(self.peers)
        for number, peer in self.peers.items():
            twin = model.peers[number]
            assert (peer.waiting is None) == (twin.waiting is None and twin.listening is None)
            assert set(peer.enqueued) == {waiter.name for waiter in twin.enqueued}
            assert len(peer.holds) == sum(hold.peer == number for hold in model.holds())
        assert len(table.deadlines) - table.rates.size == len(model.deadlines())
        self.reserved_are_the_same()

    def reserved_are_the_same(self) -> None:
        reserved = self.table._group.reserved.items()
        away = {ticket: waiter.deadline for ticket, waiter in reserved if waiter.is_away}
        assert away == {waiter.ticket: waiter.deadline for waiter in self.model.away}
        assert len(self.table._reservations) == len(away)
        told = [ticket for ticket, waiter in reserved if waiter.is_told]
        assert len(told) == len(reserved) - len(away) == len(self.model.told())
        # Those who have not asked since have not heard of it.
        assert {waiter.ticket for waiter in self.model.told() if waiter.ticket} <= set(told)
        entries = self.entries().values()
        queue = [waiter for entry in entries for waiter in entry.waiters or ()]
        assert all(waiter.ticket in told for waiter in queue if waiter.is_told)
        held = [waiter.deadline for waiter in queue if waiter.is_told and waiter.state == EXPECTED]
        assert sorted(held) == sorted(w.deadline or 0 for w in self.model.told() if w.has_slot)

    @invariant()
    def owners_are_the_same(self) -> None:
        entries = self.entries()
        for name, key in self.model.keys.items():
            entry = entries[name]
            holds, waiters = list(entry.holds.values()), list(entry.waiters or ())
            mine = [
                (*item.owner[:2], item.owner.age) if item.owner else None
                for item in [*holds, *waiters]
            ]
            theirs = [
                (*item.owner[:2], item.owner[3]) if item.owner else None
                for item in [*key.holds, *key.order()]
            ]
            assert mine == theirs
            noted = entry.owners or {}
            assert all(noted.values())
            items = [item for each in noted.values() for item in each]
            assert len(items) == len(set(items))
            assert set(items) == {item for item in [*holds, *waiters] if item.owner}
            assert all(item.owner.id == owner for owner, each in noted.items() for item in each)

    @invariant()
    def counts_are_right(self) -> None:
        counts, model = self.table.counts, self.model
        queued = [waiter for key in model.keys.values() for waiter in key.queue]
        passed = [waiter for waiter in model.away if waiter not in queued]
        assert counts.waiting == len(queued) + len(passed)
        assert counts.holding == len(model.holds())
        assert (counts.kept, counts.forgotten) == (model.kept, model.forgotten)

    def is_enqueued(self, hold: Hold) -> bool:
        peers = self.model.peers.values()
        return any(waiter.hold is hold for peer in peers for waiter in peer.enqueued)

    def entries(self) -> dict[Name, Any]:
        return {
            (int(space), key): entry
            for space in Space
            for key, entry in self.table._group.spaces[space].items()
        }

    @invariant()
    def stats_are_right(self) -> None:
        peers = len(self.table._peers)
        stats = report.stats([self.table._group], len(self.table), peers, self.model.now, 3000)
        json.dumps(stats)
        assert stats["connections"] == len(self.model.peers)
        shown = [*stats["locks"], *stats["semaphores"]]  # type: ignore[misc]
        assert sorted((row["key"].encode(), row["waiters"]) for row in shown) == sorted(
            (name[1], len(key.queue)) for name, key in self.model.keys.items()
        )

    def check_all(self) -> None:
        self.next_deadline_is_the_earliest()
        self.never_more_holders_than_the_limit_and_no_lost_waiter()
        self.what_is_kept_is_what_somebody_was_told()
        self.state_is_the_same()
        self.owners_are_the_same()
        self.counts_are_right()
        self.stats_are_right()

    # The end: drained or not, whatever is left ends, and then nothing is left.

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        if self.model.grants % 2:
            keep = self.model.grants % 4 == 1
            self.model.drain(keep=keep)
            self.compare(self.table.drain(self.model.now, keep=keep))
            self.state_is_the_same()
            for choice in range(len(self.peers)):
                self.acquire(choice, (0, b"a"), 0, 5, None)
                self.enqueue(choice, (1, b"a"), 0, None)
                self.renew(choice, choice, None, choice % 2 == 0)
                self.release(choice, choice)
            self.state_is_the_same()
        while self.peers:
            self.disconnect(self.model.grants, ENDS[len(self.peers) % len(ENDS)])
            self.state_is_the_same()
        while (deadline := self.table.next_deadline()) is not None:
            self.model.now = max(self.model.now, deadline)
            self.advance()
            self.state_is_the_same()
        assert not self.model.keys
        assert not self.model.away
        assert len(self.table) == 0
        assert not self.table._group.reserved
        assert not self.table._peers
        assert not self.table.deadlines._chains
        assert not self.table.deadlines._heads


def hold_of(hold: int) -> int:
    """Milliseconds, of which the most are too many."""
    return 2 * hold + 1 if hold == 10_000 else hold


def kind_of(reply: object) -> str:
    if isinstance(reply, Status):
        return reply.value.decode()
    if isinstance(reply, OwnerConflict):
        return f"{reply.state.decode()} {reply.attempt}"
    if isinstance(reply, Superseded):
        return f"superseded {reply.age}"
    if isinstance(reply, Recovering):
        return f"recovering {reply.milliseconds}"
    kinds = {
        Granted: "granted",
        Enqueued: "acquired",
        TimedOut: "kept",
        YourTurn: "turn",
        Renewed: "renewed",
        Report: "stats",
    }
    return kinds[type(reply)]


def come_and_go(seed: int, *, in_groups: bool = False, rated: bool = False) -> TableMachine:
    """A few peers about two keys, with many positions that are kept: chance alone makes few."""
    dice = random.Random(seed)
    machine = TableMachine()
    machine.begin(Limits(default_lease=10, max_lease=20, max_waiters=dice.choice([0, 0, 0, 3])))
    keys = dice.choice([[(0, b"a")], [(1, b"b")], [(0, b"a"), (1, b"a")]])
    if in_groups and seed % 3:
        keys = [(1, b"b")]
    times = dice.choice([[0, 1000, 2500], [0], [2500, 5000]]), dice.choice([[0, 500], [1000, 3000]])
    for number_of_key, name in enumerate(keys if rated else ()):
        runs, window = dice.choice([(1, 751), (2, 2003), (3, 1502), (5, 5003)])
        window += 7 * number_of_key  # places of two keys are not free at the same instant
        machine.rates[name] = Rate(runs, window)
        machine.model.rates[name] = PlacesOfRate(runs, window / 1000)

    def number() -> int:
        return dice.randrange(1000)

    def belong(choice: int) -> None:
        if in_groups and dice.random() < 0.8:
            name, limit = dice.choice([b"one", b"one", b"two", b"three"]), dice.choice([0, 1, 1, 2])
            machine.in_group(choice, InGroup(name, limit))

    def enter() -> None:
        choice = number()
        belong(choice)
        if dice.random() < 0.3:
            machine.want_turn(choice, dice.choice(times[1]))
        machine.enqueue(choice, dice.choice(keys), 0, dice.choice([None, 3]))

    def go() -> None:
        away, hold = map(dice.choice, times)
        if dice.random() < 0.2:
            owner = Owner(b"run", dice.randrange(3), dice.choice([b"", b"here"]))
            machine.own(number(), dice.choice([owner, None]))
        which = number()
        belong(which)
        machine.wait_and_keep(dice.choice(keys), which, dice.choice([0, 0, 1]), away, hold)

    def return_() -> None:
        if dice.random() < 0.2:
            machine.want_turn(number(), 1000)
        machine.come_back(number(), number(), dice.choice([0, 3, 10]), None, dice.random() < 0.5)

    def enter_twice() -> None:
        """The same process from two connections: the former is lost by then."""
        name = dice.choice(keys)
        for choice in (number(), number()):
            machine.own(choice, Owner(b"run", 1, b"here"))
            if dice.random() < 0.8:
                machine.want_turn(choice, 1000)
            machine.enqueue(choice, name, 0, None)

    def say_nothing() -> None:
        """A process that has been stopped is told of the turns of its runs."""
        name = dice.choice(keys)
        for run in (b"run", b"other"):
            choice = number()
            machine.own(choice, Owner(run, 1, b"here"))
            machine.want_turn(choice, 1000)
            machine.enqueue(choice, name, 0, None)
        for _ in range(2):
            if rated:
                machine.pass_time(0.75)
            else:
                machine.time_passes_to_a_deadline(number(), True)

    def newer() -> None:
        """Runs with ages, some of which go away and come back, or are told."""
        name = (0, b"a")
        top = max([0, *machine.model.newest.values()])
        for age in (top + dice.choice([0, 1]), top + dice.choice([-1, 2])):
            choice = number()
            machine.own(choice, Owner(b"run-%d" % age, 0, b"here", None, max(1, age)))
            if dice.random() < 0.6:
                machine.want_turn(choice, 1000)
            machine.enqueue(choice, name, 0, None)
            if dice.random() < 0.5:
                machine.keep(choice, 1000, 500)
                machine.wait(choice, name, dice.choice([0, 5]))
            machine.listen(choice, 0)

    def older_returns() -> None:
        """To a position that was kept before a newer one came."""
        choice = number()
        machine.own(choice, Owner(b"run-1", 0, b"there", None, 1))
        machine.come_back(choice, 1, 3, None, dice.random() < 0.5)

    def crash() -> None:
        machine.crash(0 if rated else 4 * dice.randrange(2), 0, 0)

    def ask() -> None:
        choice = number()
        belong(choice)
        machine.acquire(choice, dice.choice(keys), 0, dice.choice([0, 3]), None)

    moves = {
        newer: 0.7,
        older_returns: 0.5,
        crash: 0.05,
        enter: 4,
        enter_twice: 0.5,
        say_nothing: 0.5,
        go: 6,
        return_: 4,
        ask: 2,
        lambda: machine.wait_for_a_grant(number(), number(), dice.choice([0, 1, 5])): 1,
        lambda: machine.release(number(), number()): 5,
        lambda: machine.let_pass(number(), number()): 1,
        lambda: machine.disconnect(number(), ENDS[0]): 0.8,
    }
    if rated:
        moves |= {
            lambda: machine.pass_time(dice.choice([0.25, 0.25, 0.5, 1.0])): 6,
            lambda: machine.begin_or_not(number(), begun=dice.random() < 0.7): 4,
            lambda: machine.disconnect(number(), dice.choice(ENDS)): 0.8,
            lambda: machine.acquire(number(), dice.choice(keys), 0, 0, None): 2,
        }
    else:
        moves |= {
            lambda: machine.time_passes(dice.choice([1, 1, 2, 4]), dice.random() < 0.5): 4,
            lambda: machine.time_passes_to_a_deadline(number(), dice.random() < 0.5): 2,
        }

    for number_of_move, move in enumerate(dice.choices([*moves], [*moves.values()], k=150)):
        if len(machine.peers) < MOST_PEERS:
            machine.connect()
        move()
        if number_of_move % 2:
            machine.check_all()
    return machine


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 10_000), marks=pytest.mark.soak)], ids=len
)
@pytest.mark.timeout(900)
def test_positions_are_kept_as_the_model_does(
    seeds: range, transitions: set[tuple[int, int]] | None
) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        machine = come_and_go(seed)
        seen.update(machine.model.seen)
        machine.teardown()
    assert len(seen) == 26, seen
    assert min(seen.values()) > 5, seen
    # All that is allowed happens.
    assert transitions is None or transitions == ALLOWED


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 10_000), marks=pytest.mark.soak)], ids=len
)
@pytest.mark.timeout(900)
def test_groups_take_turns_as_in_the_model(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        machine = come_and_go(seed, in_groups=True)
        seen.update(machine.model.seen)
        machine.teardown()
    for what in OF_GROUPS:
        assert seen[what] > 2, seen


@pytest.mark.parametrize(
    "seeds", [range(30), pytest.param(range(30, 10_000), marks=pytest.mark.soak)], ids=len
)
@pytest.mark.timeout(900)
def test_rates_turns_groups_and_ages_are_at_one_key_as_in_the_model(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for seed in seeds:
        machine = come_and_go(seed, in_groups=True, rated=True)
        seen.update(machine.model.seen)
        machine.teardown()
    for what in (*OF_RATES, *OF_GROUPS[:2], "told", "older", "listened", "back", "held"):
        assert seen[what] > 0, seen


OF_RATES = (
    "a place that is free again",
    "a place that is given back",
    "a try that finds no place",
    "slots, and no place",
)

OF_GROUPS = (
    "turns of several groups",
    "groups that have all they may",
    "served by a new limit",
    "back to a slot of its group",
)


@pytest.fixture
def transitions(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]] | None:
    """Every change of a waiter's state while the test runs; compiled, nobody can look on."""
    slot = vars(Waiter)["state"]
    if not isinstance(slot, MemberDescriptorType):
        return None
    seen: set[tuple[int, int]] = set()

    def change(waiter: Waiter, state: int) -> None:
        before = getattr(waiter, "peer", None) and slot.__get__(waiter)
        if before is not None and before != state:
            seen.add((before, state))
        slot.__set__(waiter, state)

    monkeypatch.setattr(Waiter, "state", property(slot.__get__, change))
    return seen


ALLOWED = {(state, after) for state, more in TRANSITIONS.items() for after in more}


@pytest.mark.timeout(900)
def test_table_does_what_the_model_does(transitions: set[tuple[int, int]] | None) -> None:
    run_state_machine_as_test(
        TableMachine,
        settings=settings(
            max_examples=50,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
    assert transitions is None or transitions <= ALLOWED


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_table_does_what_the_model_does_for_long() -> None:
    run_state_machine_as_test(
        TableMachine,
        settings=settings(
            max_examples=10_000,
            stateful_step_count=120,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
