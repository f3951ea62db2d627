"""What clients of a table ask of it, and of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from dflockd.table import LockTable, TokenIssuer
from dflockd.wire import (
    Acquire,
    Aged,
    Barrier,
    DrawAge,
    Enqueue,
    Evict,
    FairGroup,
    How,
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
    Request,
    Reserve,
    Resume,
    Space,
    StableRef,
    Stats,
    Unbegun,
    Wait,
    fence_from_token,
)
from tests.dflockd.table.compared import Compared
from tests.dflockd.table.drawn import (
    ENDS,
    MOST_PEERS,
    groups,
    hows,
    instances,
    leases,
    limit_of,
    limits_asked,
    locks,
    mostly_not,
    names,
    numbers,
    owners,
    pauses,
    reserves,
    said,
    timeouts,
    turns,
)
from tests.dflockd.table.naive_state import Name

Said = Mapping[str, Any]
"""What a request for a lock says beside what a published one says; see `drawn.said`."""

NOTHING: Said = {}


def within(group: FairGroup | None, limit: int) -> FairGroup | None:
    """Return what may be said beside a limit: no weight beside 1."""
    if group is None or limit > 1:
        return group
    return group._replace(weight=1) if group.name else None


class Asked(Compared):
    """Does everything twice that a client can do."""

    @precondition(lambda self: len(self.peers) < MOST_PEERS)
    @rule(instance=instances)
    def connect(self, instance: bytes) -> None:
        self.greet(instance)

    @precondition(lambda self: self.peers)
    @rule(choice=numbers, end=st.sampled_from(ENDS))
    def disconnect(self, choice: int, end: dict[str, bool]) -> None:
        number = sorted(self.peers)[choice % len(self.peers)]
        self.model.disconnect(number, self.places(), **end)
        self.compare(self.table.disconnect(self.peers.pop(number), self.model.now, **end))
        self.go_on_behind()

    # Slots.

    @rule(
        choice=numbers,
        name=names,
        limit=limits_asked,
        timeout=timeouts,
        lease=leases,
        said=said,
        reserve=mostly_not(reserves),
    )
    def acquire(
        self,
        choice: int,
        name: Name,
        limit: int,
        timeout: int,
        lease: int | None,
        said: Said = NOTHING,
        reserve: Reserve | None = None,
        ticket: bytes = b"",
    ) -> None:
        more = {**said, "reserve": reserve, "ticket": ticket}
        bare = Space(name[0]), name[1], limit_of(name, limit), timeout, lease
        self.ask(choice, Acquire(*bare, **self.as_said(name, bare[2], more)))

    @rule(
        choice=numbers,
        name=names,
        limit=limits_asked,
        lease=leases,
        said=said,
        turn=mostly_not(turns),
    )
    def enqueue(
        self,
        choice: int,
        name: Name,
        limit: int,
        lease: int | None,
        said: Said = NOTHING,
        turn: int | None = None,
        ticket: bytes = b"",
    ) -> None:
        more = {**said, "turn": turn, "ticket": ticket}
        bare = Space(name[0]), name[1], limit_of(name, limit), lease
        self.ask(choice, Enqueue(*bare, **self.as_said(name, bare[2], more)))

    @staticmethod
    def as_said(name: Name, limit: int, more: Said) -> Said:
        """Requests for published semaphores say nothing more; windows of two keys differ."""
        if name[0] == 1:
            return NOTHING
        more = {**more, "group": within(more.get("group"), limit)}
        rate = more.get("rate")
        return more if rate is None else {**more, "rate": Rate(rate.runs, rate.window + name[1][0])}

    @rule(
        choice=numbers,
        name=names,
        timeout=timeouts,
        reserve=mostly_not(reserves),
        age=st.integers(0, 3),
    )
    def wait(
        self,
        choice: int,
        name: Name,
        timeout: int,
        reserve: Reserve | None = None,
        age: int = 0,
    ) -> None:
        more = (reserve, age) if name[0] == 0 else ()
        self.ask(choice, Wait(Space(name[0]), name[1], timeout, *more))

    @rule(which=numbers, timeout=timeouts, reserve=mostly_not(reserves))
    def wait_for_a_grant(self, which: int, timeout: int, reserve: Reserve | None) -> None:
        ready = [peer for peer in self.peers.values() if peer.waiting is None]
        having = [number for number, peer in enumerate(ready) if peer.enqueued]
        if having:
            choice = having[which % len(having)]
            name = list(ready[choice].enqueued)[which % len(ready[choice].enqueued)]
            self.wait(choice, name, timeout, reserve)

    @rule(
        name=names,
        lease=leases,
        wanted=st.lists(
            st.tuples(limits_asked, said, st.booleans(), mostly_not(turns), mostly_not(reserves)),
            max_size=6,
        ),
        timeout=timeouts,
    )
    def rush(
        self, name: Name, lease: int | None, wanted: list[tuple[Any, ...]], timeout: int
    ) -> None:
        """Several peers want the same key, one after another."""
        for choice, (limit, more, two_phase, turn, reserve) in enumerate(wanted):
            if two_phase or turn is not None:
                self.enqueue(choice, name, limit, lease, more, turn)
                if reserve is not None:
                    self.wait(choice, name, timeout, reserve)
            else:
                self.acquire(choice, name, limit, timeout, lease, more, reserve)

    @rule(name=locks, limits=st.lists(limits_asked, min_size=1, max_size=6), timeout=timeouts)
    def limits_change(self, name: Name, limits: list[int], timeout: int) -> None:
        """Some tasks say one limit of a lock, and some another."""
        for choice, limit in enumerate(limits):
            self.acquire(choice, name, limit, timeout, None)

    @rule(
        name=locks,
        wanted=st.lists(
            st.tuples(st.none() | groups, st.booleans(), st.none() | turns), max_size=6
        ),
        limit=limits_asked,
        timeout=timeouts,
    )
    def all_in_groups(
        self,
        name: Name,
        wanted: list[tuple[FairGroup | None, bool, int | None]],
        limit: int,
        timeout: int,
    ) -> None:
        """Several peers of some groups want the same key, and some to be told of their turn."""
        for choice, (group, two_phase, turn) in enumerate(wanted):
            if two_phase or turn is not None:
                self.enqueue(choice, name, limit, None, {"group": group}, turn)
            else:
                self.acquire(choice, name, limit, timeout, None, {"group": group})

    @rule(
        name=locks,
        wanted=st.lists(st.tuples(owners, st.booleans()), max_size=6),
        limit=limits_asked,
        timeout=timeouts,
    )
    def all_say_who_asks(
        self, name: Name, wanted: list[tuple[Owner, bool]], limit: int, timeout: int
    ) -> None:
        """Several attempts of a run, and others, want the same key."""
        for choice, (owner, two_phase) in enumerate(wanted):
            if two_phase:
                self.enqueue(choice, name, limit, None, {"owner": owner})
            else:
                self.acquire(choice, name, limit, timeout, None, {"owner": owner})

    @rule(
        name=locks,
        wanted=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=5),
        timeout=timeouts,
    )
    def newer_and_newer_ones_come(
        self, name: Name, wanted: list[tuple[int, int]], timeout: int
    ) -> None:
        """Runs with ages want the same lock, in some order, and who gets it listens."""
        for choice, (age, way) in enumerate(wanted):
            who = {"owner": Owner(b"run-%d" % age, 0, age), "label": b"%d" % age}
            if way < 2:
                self.enqueue(choice, name, 1, None, who, None if way else 1000)
            else:
                self.acquire(choice, name, 1, timeout, None, who)
            self.listen(choice, 0)

    # Positions.

    @rule(
        choice=numbers,
        which=numbers,
        limit=limits_asked,
        lease=leases,
        timeout=timeouts,
        more=said,
        two_phase=st.booleans(),
        turn=mostly_not(turns),
        reserve=mostly_not(reserves),
    )
    def come_back(
        self,
        choice: int,
        which: int,
        limit: int,
        lease: int | None,
        timeout: int,
        more: Said,
        two_phase: bool,
        turn: int | None = None,
        reserve: Reserve | None = None,
    ) -> None:
        """Mostly to a position that is kept, or told; else to one that was, or is elsewhere."""
        known = self.known_tickets(which)
        if not known:
            return
        name, ticket = known[which % len(known)]
        if which % 11 == 10:
            name = (0, b"b" if name[1] == b"a" else b"a")
        if two_phase:
            self.enqueue(choice, name, limit, lease, more, turn, ticket)
        else:
            self.acquire(choice, name, limit, timeout, lease, more, reserve, ticket)

    def known_tickets(self, which: int) -> list[tuple[Name, bytes]]:
        there = [*self.model.away, *self.model.told()]
        if which % 3 == 0:
            there += self.model.with_turns()
        kept = [(waiter.name, waiter.ticket) for waiter in there if waiter.ticket]
        return kept if kept and which % 8 else self.tickets[-8:]

    @rule(choice=numbers, which=numbers)
    def let_pass(self, choice: int, which: int) -> None:
        known = self.known_tickets(which)
        if known:
            name, ticket = known[which % len(known)]
            self.ask(choice, Pass(name[1], ticket))

    @rule(choice=numbers)
    def ask_whose_turn_it_is(self, choice: int) -> None:
        self.ask(choice, Next())

    # Ages.

    @rule(choice=numbers, which=numbers)
    def listen(self, choice: int, which: int) -> None:
        name, token = self.live_token(which)
        if name[0] == 0:
            self.ask(choice, Listen(name[1], token))

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

    # Holds.

    @rule(choice=numbers, which=numbers)
    def release(self, choice: int, which: int) -> None:
        name, token = self.live_token(which)
        self.ask(choice, Release(Space(name[0]), name[1], token))

    @rule(choice=numbers, which=numbers)
    def unbegun(self, choice: int, which: int) -> None:
        name, token = self.live_token(which)
        self.ask(choice, Unbegun(name[1], token))

    @rule(choice=numbers, which=numbers)
    def evict(self, choice: int, which: int) -> None:
        name, token = self.live_token(which)
        self.ask(choice, Evict(Space(name[0]), name[1], fence_from_token(token)))

    @rule(choice=numbers, name=locks, span=pauses, by=st.sampled_from([b"", b"me"]))
    def pause(self, choice: int, name: Name, span: int | None, by: bytes = b"") -> None:
        self.ask(choice, Pause(name[1], span, by, by and b"a reason"))

    @rule(choice=numbers, name=locks)
    def resume(self, choice: int, name: Name) -> None:
        self.ask(choice, Resume(name[1]))

    @rule(choice=numbers, which=numbers, lease=leases, how=hows, more=said)
    def renew(
        self,
        choice: int,
        which: int,
        lease: int | None,
        how: How = How.PLAIN,
        more: Said = NOTHING,
    ) -> None:
        self.renew_it(choice, *self.live_token(which), lease, how, more)

    def renew_it(
        self, choice: int, name: Name, token: bytes, lease: int | None, how: How, more: Said
    ) -> None:
        """As one request or, of a semaphore, as the published one."""
        if name[0] == 1:
            how, more = How.PLAIN, NOTHING
        who = {field: more[field] for field in ("owner", "label", "group") if field in more}
        self.ask(choice, Renew(Space(name[0]), name[1], token, lease, how, **who))

    @rule(choice=numbers, which=numbers, name=names, forge=numbers, release=st.booleans())
    def wrong_token(self, choice: int, which: int, name: Name, forge: int, release: bool) -> None:
        """An old token, one of another key, or one that was never given out."""
        known = self.seen[which % len(self.seen)][1] if self.seen else b"f" * 32
        forged = [known, known[:16] + b"0" * 16, known[:-1], known + b"0", b"\xff", b"-1", b"0x1"]
        token = forged[forge % len(forged)]
        if release:
            self.ask(choice, Release(Space(name[0]), name[1], token))
        else:
            self.renew_it(choice, name, token, None, How.PLAIN, NOTHING)

    @rule(choice=numbers, which=numbers, lease=leases, how=hows, more=said)
    def old_token(self, choice: int, which: int, lease: int | None, how: How, more: Said) -> None:
        """A token that was told some time: the server may have forgotten its hold."""
        if not self.seen:
            return
        name, token = self.seen[-1 - which % min(8, len(self.seen))]
        if which % 3 == 0:
            self.ask(choice, Release(Space(name[0]), name[1], token))
        else:
            self.renew_it(choice, name, token, lease, how, more)

    @rule(odds=numbers, lost=numbers, quarters=st.integers(0, 5))
    def crash(self, odds: int, lost: int, quarters: int) -> None:
        """The process ends, or its machine, and another goes on with what was recorded."""
        if odds % 4:
            return
        self.model.now += quarters / 4
        holds = sorted(self.kept.values(), key=lambda kept: kept.fence * (odds | 1) % 101)
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
        pauses = list(self.kept_pauses.values())
        self.kept_pauses.clear()
        self.table.restore(holds, self.model.now, rates, pauses)
        self.table.remember(newest)
        self.kept_newest.clear()
        if until > self.model.now:
            self.table.recover(until)
        self.model.crash(holds, until, pauses)
        self.table.doubt_rates(self.model.rates_since)
        self.model.newest = {record.key: (record.age, record.label) for record in newest}
        self.peers.clear()
        self.kept.clear()
        self.compare([])
        for hold in self.model.holds():
            # The table adds up from the grant and the model from now: the last bit may differ.
            there = self.kept[self.model._fence(hold)].deadline
            assert abs(hold.deadline - there) < 1e-9
            hold.deadline = there
        for kept in holds:
            if kept.fence not in self.kept:
                continue  # it had ended
            at_least = until if until > self.model.now else 0
            late = self.kept[kept.fence].deadline - max(kept.deadline, self.model.now, at_least)
            assert -1e-6 < late < 0.1 + 1e-6
        for _ in range(3):
            self.greet(b"here")

    def live_token(self, which: int) -> tuple[Name, bytes]:
        live = [(hold.name, hold.token) for hold in self.model.holds() if hold.token]
        return live[which % len(live)] if live else ((0, b"a"), b"0" * 32)

    @rule(
        choice=numbers,
        request=st.sampled_from([Ping(), Barrier(), Malformed("x"), Stats(), StableRef(b"ref")]),
    )
    def other(self, choice: int, request: Request) -> None:
        self.ask(choice, request)
