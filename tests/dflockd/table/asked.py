"""What clients of a table ask of it, and of the model."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import (
    precondition,
    rule,
)

from dflockd.table import (
    LockTable,
    TokenIssuer,
)
from dflockd.wire import (
    Acquire,
    Aged,
    Barrier,
    Confirm,
    Detach,
    DrawAge,
    Enqueue,
    Evict,
    InGroup,
    Listen,
    Malformed,
    Owner,
    Pass,
    Ping,
    Release,
    Renew,
    Request,
    Reserve,
    Resume,
    Space,
    StableRef,
    Stats,
    Turn,
    Wait,
    fence_from_token,
)
from tests.dflockd.table.compared import Compared
from tests.dflockd.table.drawn import (
    ENDS,
    MOST_PEERS,
    aways,
    groups,
    held,
    hold_of,
    leases,
    limit_of,
    names,
    numbers,
    owners,
    timeouts,
)
from tests.dflockd.table.naive_state import Name


class Asked(Compared):
    """Does everything twice that a client can do."""

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
