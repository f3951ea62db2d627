"""A lock table beside the model: what is the same after each step."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from dflockd.table import (
    Effect,
    HoldRecord,
    Limits,
    LockTable,
    NewestRecord,
    Peer,
    TokenIssuer,
    report,
)
from dflockd.table import Hold as TableHold
from dflockd.table.pauses import KeyPause, PauseRecord
from dflockd.table.rates import RateBlock, RateRecord
from dflockd.table.state import Waiter
from dflockd.table.states import EXPECTED
from dflockd.wire import (
    Enqueued,
    Granted,
    Hello,
    OwnerConflict,
    Queued,
    Recovering,
    Renewed,
    Report,
    Request,
    Space,
    Status,
    Superseded,
    TimedOut,
    YourTurn,
    fence_from_token,
)
from tests.dflockd.table.drawn import limits
from tests.dflockd.table.naive_state import LATE, Hold, Key, Name, name_of
from tests.dflockd.table.naive_state import Waiter as NaiveWaiter
from tests.dflockd.table.naive_table import NaiveTable
from tests.dflockd.table.recount import check_counts

FIRST_FENCE = 1000


class Compared(RuleBasedStateMachine):
    """The real table, the model, and how they are compared."""

    @initialize(limits=limits)
    def begin(self, limits: Limits) -> None:
        self.limits = limits
        self.table = LockTable(limits, TokenIssuer(b"secret", FIRST_FENCE), kept=True)
        self.model = NaiveTable(limits)
        self.model.authentic = self.authentic
        self.kept: dict[int, HoldRecord] = {}  # what the changes say, by fence
        self.kept_newest: dict[bytes, NewestRecord] = {}
        self.kept_pauses: dict[bytes, PauseRecord] = {}
        self.last_fence = FIRST_FENCE
        self.crashed = False  # once a machine is lost, badly behaved clients are believed
        self.peers: dict[int, Peer] = {}
        self.seen: list[tuple[Name, bytes]] = []  # every token that a client has been told
        self.fences: dict[int, int] = {}  # number of the grant -> fence
        self.tickets: list[tuple[Name, bytes]] = []  # every position that a client may come back to
        self.kept_rates: dict[int, RateRecord] = {}
        for instance in (b"", b"here", b"here", b"there"):
            self.greet(instance)

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
            elif isinstance(reply, TimedOut | Queued | YourTurn):
                assert answer.waiter is not None
                if isinstance(reply, Queued) and answer.waiter.is_renamed:
                    answer.waiter.former, answer.waiter.ticket = answer.waiter.ticket, None
                    answer.waiter.is_renamed = False
                elif isinstance(reply, YourTurn) and reply.ticket == answer.waiter.former:
                    continue
                self.tell_ticket(answer.waiter, reply.ticket)

    def record(self) -> None:
        """Do with the changes what a journal does."""
        assert self.table.changes is not None
        for hold in self.table.changes:
            if isinstance(hold, RateBlock):
                self.kept_rates.pop(hold.number, None)
                if not hold.ended:
                    self.kept_rates[hold.number] = hold.kept()
            elif isinstance(hold, KeyPause):
                if hold.ended:
                    self.kept_pauses.pop(hold.key, None)
                else:
                    self.kept_pauses[hold.key] = hold.kept()
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
        assert token not in [known for _, known in self.seen], "a token was granted twice"
        hold.token = token
        self.seen.append((hold.name, token))
        self.fences[hold.number] = fence_from_token(token)
        fences = [self.fences[number] for number in sorted(self.fences)]
        grows = all(a < b for a, b in zip([FIRST_FENCE, *fences], fences, strict=False))
        assert grows, f"each fence is larger than the last: {fences}"

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

    def greet(self, instance: bytes) -> None:
        """Have another connection; a published client does not say whose process it is."""
        peer = self.table.connect()
        assert peer.id not in self.peers
        self.peers[peer.id] = peer
        self.model.connect(peer.id, instance)
        if instance:
            assert self.table.greet(peer, Hello(instance, b"0.1.0"))
            assert not self.table.greet(peer, Hello(b"another", b"0.1.0"))

    def ask(self, choice: int, request: Request) -> None:
        peer = self.idle(choice)
        if peer is None:
            return
        self.model.advance(self.places())
        self.model.handle(peer.id, request)
        self.compare(self.table.handle(peer, request, self.model.now))
        self.go_on_behind()

    def places(self) -> list[tuple[float, float, Name]]:
        """When places of rates may be free again: as long as it is late enough, that is no rule."""
        now, rates = self.model.now, self.table._partition.rates.open.values()
        return sorted((r.deadline, r.span, (r.space, r.key)) for r in rates if r.deadline <= now)

    def advance(self) -> None:
        self.expire()
        self.go_on_behind()

    def expire(self) -> None:
        """Let what is due take effect, as `LockTable.advance` does before it goes on with a backlog."""
        self.model.advance(self.places())
        effects: list[Effect] = []
        self.table.slots.expire(self.model.now, effects)
        self.compare(effects)

    def go_on_behind(self) -> None:
        """Have the steps that are left: somebody waits behind a process that asks no more.

        In which order it waits for what there is no rule.
        """
        while self.table.backlog:
            self.expire()
            job = self.table.backlog[0]
            if isinstance(job, partial) and job.func == self.table.slots._go_on_behind:
                process, most = job.args
                behind = list(process.behind.items())[:most]
                self.model.go_on_behind([((e.space, e.key), lane.name) for lane, e in behind])
            self.compare(self.table.advance(self.model.now))

    def pass_time(self, seconds: float) -> None:
        """From deadline to deadline, as the timer of the server does: so places are given."""
        until = self.model.now + seconds
        while (due := self.table.next_deadline()) is not None and due <= until:
            self.model.now = max(self.model.now, due)
            self.advance()
        self.model.now = until

    # What always holds.

    @invariant()
    def next_deadline_is_the_earliest(self) -> None:
        places = [rate.deadline for rate in self.table._partition.rates.open.values()]
        due = min([*self.model.deadlines(), *places], default=None)
        assert self.table.next_deadline() == due

    @invariant()
    def never_more_holders_than_the_limit_and_no_lost_waiter(self) -> None:
        for entry in self.entries().values():
            # Each was granted where its limit had room; what a lost machine had ended may be back.
            for hold in entry.holds.values():
                before = [each for each in entry.holds.values() if each.fence < hold.fence]
                used = sum(each.weight for each in before)
                is_within = used + min(hold.weight, hold.limit) <= hold.limit
                assert is_within or hold.limit == 0 or (self.crashed and hold.limit > 1)
            assert entry.is_used
            # Whoever waits at a free slot is not there, and the slot is for whoever comes.
            key = self.model.keys[entry.space, entry.key]
            waiters = [
                waiter
                for waiter in entry.waiters or ()
                if not waiter.is_told
                and waiter.can_start
                and (waiter.state == EXPECTED or key.may_have_turns(name_of(waiter.group)))
            ]
            free = min(entry.limit, self.limits.max_holds or entry.limit) - len(entry.holds)
            rate = self.model.rates.get((entry.space, entry.key))
            if rate is not None:
                # What it lets begin is noticed a moment later.
                is_due = any(name == (entry.space, entry.key) for _, _, name in self.places())
                then = self.model.now - LATE
                free = 0 if is_due or then < rate.changed else min(free, rate.free(then))
                kept = sum(each.weight for each in key.queue if each.has_slot and each.is_rated)
                if rate.free(then) <= kept:  # a place is held for who is back only later
                    waiters = [w for w in waiters if w.state == EXPECTED or not w.is_rated]
            free = 0 if key.pause else free
            told = [waiter for waiter in entry.waiters or () if waiter.is_told]
            free -= sum(waiter.state == EXPECTED for waiter in told)
            queue = entry.waiters or ()
            if entry.used > len(entry.holds) or any(waiter.weight > 1 for waiter in queue):
                line = [waiter for waiter in waiters if waiter.state != EXPECTED]
                free -= len(waiters) - len(line)
                assert not line or free <= 0 or not all(self.fits(key, each) for each in line)
                if free > 0:
                    self.check_whose_turn_it_is((entry.space, entry.key), key)
                continue
            assert all(waiter.state == EXPECTED for waiter in waiters[: max(0, free)])
            assert not waiters or entry.limit > 0

    def check_whose_turn_it_is(self, name: Name, key: Key) -> None:
        """The first who can start lacks slots; a group is left out only as long as its first can."""
        found, taken = self.model.whose_turn(name, key), key.aside() + key.expected()
        if found is not None and key.fits(1, taken):
            group, waiter = found
            weight = 1 if waiter.reservation else waiter.weight
            assert waiter.reservation or key.has_room(group, weight)
            assert not key.fits(weight, taken)
        for group, was in key.plain_stuck.items():
            if was == key.state_of(group):
                assert self.model.can_start(key.stuck_by[group])

    def fits(self, key: Key, waiter: Waiter) -> bool:
        """Whether there is room for somebody, beside all that is taken or kept for others."""
        weight = 1 if waiter.is_away else waiter.weight
        rate = self.model.rates.get((waiter.entry.space, waiter.entry.key))
        if waiter.is_rated and rate is not None:
            kept = sum(each.weight for each in key.queue if each.has_slot and each.is_rated)
            if rate.free(self.model.now - LATE) - kept < min(weight, rate.runs):
                return False
        has_room = key.has_room(name_of(waiter.group), weight)
        return has_room and key.fits(weight, key.aside() + key.expected())

    @invariant()
    def what_is_kept_is_what_somebody_was_told(self) -> None:
        told = {hold.token: hold.deadline for hold in self.model.holds() if hold.token}
        assert self.kept == {fence_from_token(token): self.holds()[token] for token in told}
        assert {kept.deadline for kept in self.kept.values()} == set(told.values())
        ages = {each.key: (each.age, each.label) for each in self.kept_newest.values()}
        assert ages == self.model.newest
        assert len(self.table.newest) == len(ages)
        pauses = [key.pause for key in self.model.keys.values() if key.pause]
        assert self.kept_pauses.keys() == {pause.name[1] for pause in pauses}
        assert self.table.slots.paused == len(pauses)

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
            if key.pause is None:
                assert entry.pause is None
            else:
                assert entry.pause is not None
                said = entry.pause.kept()
                assert said == self.kept_pauses[name[1]]
                assert said[1:4] == (key.pause.by, key.pause.reason, key.pause.begun)
                is_endless = key.pause.deadline is None
                assert is_endless == (said.until == math.inf)
            assert [
                (
                    hold.peer.id if hold.peer else None,
                    hold.deadline,
                    hold.waiter is not None,
                    hold.group,
                    hold.weight,
                    hold.limit,
                    hold.label,
                )
                for hold in entry.holds.values()
            ] == [
                (
                    *(hold.peer, hold.deadline, self.is_enqueued(hold)),
                    *(hold.group, hold.weight, hold.limit, hold.label),
                )
                for hold in key.holds
            ]
            order = key.order()
            queue = entry.waiters
            assert (queue is not None and queue.is_grouped) == key.is_grouped
            plain, rated = model.ahead(key)
            extra = key.used() - len(key.holds)
            assert entry.used == key.used()
            ahead = key.aside() + key.expected() + extra + (0 if key.is_heavy() else plain)
            assert queue is None or queue.ahead == ahead
            assert queue is None or queue.rated_ahead == rated
            assert [
                (
                    waiter.peer.id,
                    waiter.lease,
                    waiter.turn,
                    waiter.state == EXPECTED,
                    waiter.is_told,
                    waiter.group,
                    waiter.label,
                )
                for waiter in entry.waiters or ()
            ] == [
                (
                    *(each.peer, each.lease, each.turn, each.has_slot, each.is_told),
                    *(each.group, each.label),
                )
                for each in order
            ]
            assert [waiter.two_phase for waiter in entry.waiters or ()] == [
                waiter.two_phase for waiter in order
            ]
        assert set(table.connections.peers) == set(model.peers) == set(self.peers)
        for number, peer in self.peers.items():
            twin = model.peers[number]
            assert (peer.waiting is None) == (
                twin.waiting is None and twin.listening is None and not twin.asks
            )
            assert set(peer.enqueued) == {waiter.name for waiter in twin.enqueued}
            assert len(peer.holds) == sum(hold.peer == number for hold in model.holds())
        assert len(table.deadlines) - table.rates.size == len(model.deadlines())
        self.reserved_are_the_same()

    def reserved_are_the_same(self) -> None:
        reserved = self.table._partition.reserved.items()
        away = {ticket: waiter.deadline for ticket, waiter in reserved if waiter.is_away}
        assert away == {waiter.ticket: waiter.deadline for waiter in self.model.away}
        assert len(self.table.slots.reservations) == len(away)
        named = {ticket for ticket, waiter in reserved if waiter.turn is not None}
        assert len(named) == len(reserved) - len(away)
        assert named == {waiter.ticket for waiter in self.model.with_turns()}
        told = [ticket for ticket, waiter in reserved if waiter.is_told]
        assert set(told) == {waiter.ticket for waiter in self.model.told()}
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
            theirs = [item.owner for item in [*key.holds, *key.order()]]
            assert [item.owner for item in [*holds, *waiters]] == theirs
            noted = entry.owners or {}
            assert all(noted.values())
            items = [item for each in noted.values() for item in each]
            assert len(items) == len(set(items))
            assert set(items) == {item for item in [*holds, *waiters] if item.owner}
            assert all(item.owner.id == owner for owner, each in noted.items() for item in each)

    @invariant()
    def counts_are_right(self) -> None:
        check_counts(self.table)
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
            for key, entry in self.table._partition.spaces[space].items()
        }

    @invariant()
    def stats_are_right(self) -> None:
        peers = len(self.table.connections.peers)
        steps = report.stats([self.table._partition], len(self.table), {"connections": peers})
        while not steps.step(self.model.now):
            pass
        stats = json.loads(steps.text())
        assert stats["connections"] == len(self.model.peers)
        shown = [*stats["locks"], *stats["semaphores"]]
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


def kind_of(reply: object) -> str:
    if isinstance(reply, Status):
        return reply.value.decode()
    if isinstance(reply, OwnerConflict):
        return f"{reply.state.decode()} {reply.attempt}"
    if isinstance(reply, Superseded):
        return f"superseded {reply.age} by {reply.label.decode()}"
    if isinstance(reply, Recovering):
        return f"recovering {reply.milliseconds}"
    kinds = {
        Granted: "granted",
        Enqueued: "acquired",
        TimedOut: "kept",
        YourTurn: "turn",
        Queued: "queued",
        Renewed: "renewed",
        Report: "stats",
    }
    return kinds[type(reply)]
